"""The binary interface between host and device: records declared once, printed as `csrc/abi.cuh`.

Fields are listed here and nowhere else; numpy packs them, and the generated header asserts size and offset of each. The
live arithmetic of `live` and the kinds' numbers are printed with them. A test compares the committed header with
`render()`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megakernel.counters import NONE
from megakernel.kinds import TaskKind
from megakernel.live import LIVE_FUNCTIONS
from megakernel.tiling import PAIRED_COLUMNS, UNIT_ROWS
from megakernel.workload import ROW_TILE

ABI_VERSION = 1
TABLE_MAGIC = 0x4350544B
MAX_LOAD_WAITS = 4
MAX_RUN_WAITS = 4
MAX_INPUTS = 4
MAX_OUTPUTS = 2

CONSTANTS: dict[str, int] = {
    "kAbiVersion": ABI_VERSION,
    "kTableMagic": TABLE_MAGIC,
    "kNone": NONE,
    "kMaxLoadWaits": MAX_LOAD_WAITS,
    "kMaxRunWaits": MAX_RUN_WAITS,
    "kMaxInputs": MAX_INPUTS,
    "kMaxOutputs": MAX_OUTPUTS,
    "kRowTile": ROW_TILE,
    "kUnitRows": UNIT_ROWS,
    "kPairedColumns": PAIRED_COLUMNS,
}


@dataclass(frozen=True)
class Field:
    """One member: C type name, numpy type, array length (0: scalar) and meaning."""

    name: str
    type: str
    meaning: str
    length: int = 0


@dataclass(frozen=True)
class Struct:
    """A record, its members in order."""

    name: str
    fields: tuple[Field, ...]

    @property
    def dtype(self) -> np.dtype[np.void]:
        """Numpy layout, with the alignment rules of C."""
        members = [
            (field.name, _numpy_type(field.type), (field.length,)) if field.length else
            (field.name, _numpy_type(field.type))
            for field in self.fields
        ]  # fmt: skip
        return np.dtype(members, align=True)


WAIT = Struct(
    "Wait",
    (
        Field("counter", "uint16_t", "index of the counter"),
        Field("lag", "uint16_t", "0: arrivals of this step; 1: of the previous step (met in the first)"),
        Field("need", "uint32_t", "arrivals needed in that step"),
    ),
)

RECORD = Struct(
    "Record",
    (
        Field("kind", "uint16_t", "TaskKind"),
        Field("layer", "uint16_t", "layer, kNone outside the layers"),
        Field("task", "uint32_t", "number of the task in reference order"),
        Field("begin", "uint32_t", "first static unit"),
        Field("end", "uint32_t", "one past the last static unit"),
        Field("share", "uint32_t", "this task's share of device-found units"),
        Field("shares", "uint32_t", "number of shares; 0: the units are static"),
        Field("router_begin", "uint16_t", "first router row"),
        Field("router_end", "uint16_t", "one past the last router row"),
        Field("row_tile_begin", "uint16_t", "first tile of eight rows"),
        Field("row_tile_count", "uint16_t", "tiles of eight rows"),
        Field("inputs", "uint16_t", "buffers read, kNone: absent", MAX_INPUTS),
        Field("outputs", "uint16_t", "buffers written, kNone: absent", MAX_OUTPUTS),
        Field("arrive", "uint16_t", "counter raised by one when the run has ended"),
        Field("early", "uint16_t", "counter raised by one when the early part has ended"),
        Field("num_load_waits", "uint16_t", "waits before the first copy is issued"),
        Field("num_run_waits", "uint16_t", "waits before the run"),
        Field("hold_copies", "uint16_t", "ring stages that the run keeps before it frees the first"),
        Field("reserved", "uint16_t", "zero; makes the record 128 bytes, a whole number of 16-byte loads", 5),
        Field("load_waits", "Wait", "see num_load_waits", MAX_LOAD_WAITS),
        Field("run_waits", "Wait", "see num_run_waits", MAX_RUN_WAITS),
    ),
)

HEADER = Struct(
    "TableHeader",
    (
        Field("magic", "uint32_t", "kTableMagic"),
        Field("abi_version", "uint32_t", "kAbiVersion"),
        Field("num_sms", "uint32_t", "lists of records"),
        Field("num_records", "uint32_t", "records of all lists"),
        Field("num_counters", "uint32_t", "counters"),
        Field("num_buffers", "uint32_t", "buffers that records name"),
        Field("rows", "uint32_t", "row slots"),
        Field("max_context_tokens", "uint32_t", "longest row, current token included"),
        Field("copy_bytes", "uint32_t", "bytes of one ring stage"),
        Field("ring_stages", "uint32_t", "stages of the ring"),
        Field("in_flight_cap_bytes", "uint32_t", "bytes requested and not landed; 0: as many as the ring holds"),
        Field("chunk_tokens", "uint32_t", "tokens of one attention chunk"),
        Field("page_tokens", "uint32_t", "tokens of one KV page"),
        Field("project_k_splits", "uint32_t", "K splits of the projection"),
    ),
)

STRUCTS = (WAIT, RECORD, HEADER)


def _numpy_type(name: str) -> np.dtype[np.void] | str:
    return WAIT.dtype if name == "Wait" else {"uint16_t": "<u2", "uint32_t": "<u4"}[name]


def render() -> str:
    """Text of `csrc/abi.cuh`."""
    parts = [
        "// Generated from megakernel/abi.py by `runtime abi --write`; do not edit.",
        "#pragma once",
        "#include <cstddef>",
        "#include <cstdint>",
        "",
        "#ifdef __CUDACC__",
        "#define MK_HOST_DEVICE __host__ __device__",
        "#else",
        "#define MK_HOST_DEVICE",
        "#endif",
        "",
        "namespace mk::abi {",
        "",
        *(f"inline constexpr uint32_t {name} = {value}u;" for name, value in CONSTANTS.items()),
        "",
        "enum class TaskKind : uint16_t {",
        *(f"  k{kind.name.title()} = {kind.value}," for kind in TaskKind),
        "};",
    ]
    for struct in STRUCTS:
        parts += ["", *_struct_lines(struct)]
    parts += ["", "// Arithmetic on live state, translated from megakernel/live.py."]
    for function in LIVE_FUNCTIONS:
        parts += ["", *_function_lines(function)]
    return "\n".join([*parts, "", "}  // namespace mk::abi", ""])


def _struct_lines(struct: Struct) -> list[str]:
    dtype = struct.dtype
    lines = [f"struct {struct.name} {{"]
    for field in struct.fields:
        array = f"[{field.length}]" if field.length else ""
        lines.append(f"  {field.type} {field.name}{array};  // {field.meaning}")
    lines += ["};", f"static_assert(sizeof({struct.name}) == {dtype.itemsize});"]
    members: dict[str, tuple[object, ...]] = {name: tuple(member) for name, member in (dtype.fields or {}).items()}
    for field in struct.fields:
        lines.append(f"static_assert(offsetof({struct.name}, {field.name}) == {members[field.name][1]});")
    return lines


def _function_lines(function: Callable[..., int]) -> list[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    result = tree.body[-1]
    assert isinstance(result, ast.Return), f"{tree.name}: needed one return expression"
    assert result.value is not None
    arguments = ", ".join(f"uint32_t {argument.arg}" for argument in tree.args.args)
    return [
        f"// {ast.get_docstring(tree)}",
        f"MK_HOST_DEVICE inline constexpr uint32_t {tree.name}({arguments}) {{",
        f"  return static_cast<uint32_t>({_expression(result.value)});",
        "}",
    ]


_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "/", ast.Mod: "%",
    ast.Gt: ">", ast.GtE: ">=", ast.Lt: "<", ast.LtE: "<=", ast.Eq: "==",
}  # fmt: skip


def _expression(node: ast.expr) -> str:
    """C++ text of an integer expression; every operand is int64_t, so differences may be negative in between."""
    match node:
        case ast.BinOp():
            return f"({_expression(node.left)} {_OPERATORS[type(node.op)]} {_expression(node.right)})"
        case ast.Compare(ops=[operator], comparators=[right]):
            return f"({_expression(node.left)} {_OPERATORS[type(operator)]} {_expression(right)})"
        case ast.IfExp():
            return f"({_expression(node.test)} ? {_expression(node.body)} : {_expression(node.orelse)})"
        case ast.Name():
            return f"int64_t{{{node.id}}}"
        case ast.Constant(value=int()):
            return f"int64_t{{{node.value}}}"
        case ast.Call(func=ast.Name(id="max" | "min" as name), args=[first, second]):
            left, right = _expression(first), _expression(second)
            return f"({left} {'>' if name == 'max' else '<'} {right} ? {left} : {right})"
        case ast.Call(func=ast.Name(id=name), args=arguments):
            passed = (f"static_cast<uint32_t>({_expression(argument)})" for argument in arguments)
            return f"int64_t{{{name}({', '.join(passed)})}}"
        case _:
            raise AssertionError(f"live arithmetic uses {ast.dump(node)}, which has no translation")
