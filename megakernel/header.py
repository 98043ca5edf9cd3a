"""Text of `csrc/abi.cuh`: the records of `abi` with asserts on their layout, and the arithmetic of `live` as CUDA."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable

from megakernel.abi import CONSTANTS, ENUMS, STRUCTS, Struct
from megakernel.kinds import TaskKind
from megakernel.live import LIVE_FUNCTIONS


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
    for enum in ENUMS:
        parts += ["", f"enum class {enum.__name__} : uint32_t {{"]
        parts += [f"  k{_camel(member.name)} = {member.value}," for member in enum]
        parts += ["};"]
    for struct in STRUCTS:
        parts += ["", *_struct_lines(struct)]
    parts += ["", "// Arithmetic on live state, translated from megakernel/live.py."]
    for function in LIVE_FUNCTIONS:
        parts += ["", *_function_lines(function)]
    return "\n".join([*parts, "", "}  // namespace mk::abi", ""])


def _camel(name: str) -> str:
    return "".join(word.title() for word in name.split("_"))


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
