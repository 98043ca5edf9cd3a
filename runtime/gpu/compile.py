"""Compiles csrc for one specialization, without a card: NVRTC in, a cubin and its resources out, cached by content.

Owns the compiler's flags, the cache and the ceilings on registers, spills and shared memory. The cache key is made of
every file of csrc, which of them is compiled, the rendered constants, the flags and the compiler's version, so that
nothing stale can load.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cuda.bindings import nvrtc  # pyright: ignore[reportAttributeAccessIssue]
from pydantic import TypeAdapter

from megakernel.assets import asset
from megakernel.config import ConfigError
from runtime.gpu.specialize import Specialization

ENTRY = "decode_steps"
"""The kernel's name in csrc/decode_step.cu."""

MAX_REGISTERS = 168
"""What 384 threads can have each; planner and issuer then give theirs to the consumers."""

MAX_SPILL_BYTES = {True: 0, False: 160}
"""By whether the kernel only streams. A spill is a trip to memory that no plan knows of. One row spills nothing with
CI's compiler; eight rows keep a few words of the head's there, and another compiler may allocate otherwise."""


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes, as the assembler reports it."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int


@dataclass(frozen=True)
class CompiledKernel:
    """A cubin and what it was compiled for."""

    cubin: bytes
    resources: Resources
    specialization: Specialization
    architecture: str


def compile_kernel(
    specialization: Specialization, architecture: str, *, cache_directory: Path | None = None
) -> CompiledKernel:
    """Compile, or take from the cache; ConfigError when the kernel breaks a ceiling."""
    rendered = specialization.render()
    cubin, resources = compile_source("decode_step.cu", ENTRY, rendered, architecture, cache_directory=cache_directory)
    check_ceilings(resources, specialization)
    return CompiledKernel(cubin, resources, specialization, architecture)


def compile_source(
    source: str, kernel: str, rendered: str, architecture: str, *, cache_directory: Path | None = None
) -> tuple[bytes, Resources]:
    """Compile the one kernel of a file of csrc, or take it from the cache: a cubin, and what it takes.

    `rendered` is the text of its `rendered.cuh`. ConfigError when it does not compile, or nothing can be kept.
    """
    flags = _flags(architecture)
    parts = (csrc_fingerprint(), source, rendered, " ".join(flags), compiler_version())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    entry = (cache_directory or default_cache()) / key
    if not entry.is_dir():
        cubin, log = _compile(source, rendered, flags)
        resources = _RESOURCES.dump_json(read_resources(log, kernel))
        try:
            _publish(entry, {"kernel.cubin": cubin, "resources.json": resources})
        except OSError as error:
            raise ConfigError(
                f"{entry.parent}: no kernel can be kept there: {error.strerror}; needed: a folder to write to, which "
                "XDG_CACHE_HOME can name"
            ) from None
    return (entry / "kernel.cubin").read_bytes(), _RESOURCES.validate_json((entry / "resources.json").read_bytes())


def compile_ahead(specializations: Iterable[Specialization], architecture: str) -> None:
    """Fill the cache with several kernels, all at once: the compiler lets threads run.

    ConfigError, when all are done, of the first that breaks a ceiling.
    """
    with ThreadPoolExecutor() as threads:
        compiling = [threads.submit(compile_kernel, each, architecture) for each in dict.fromkeys(specializations)]
    for each in compiling:
        each.result()


_RESOURCES = TypeAdapter(Resources)


def check_ceilings(resources: Resources, specialization: Specialization) -> None:
    """Raise ConfigError when a kernel takes more than it may."""
    threads = specialization.block_threads
    limit = min(MAX_REGISTERS, 65536 // threads)
    if resources.registers > limit:
        raise ConfigError(f"the kernel takes {resources.registers} registers a thread, needed at most {limit}")
    most = MAX_SPILL_BYTES[bool(specialization["kStreaming"])]
    if resources.spill_bytes > most and not specialization["kTrace"]:  # a traced kernel's times are no result
        raise ConfigError(f"the kernel spills {resources.spill_bytes} bytes, needed at most {most}")
    if resources.static_shared_bytes:
        raise ConfigError(
            f"the kernel has {resources.static_shared_bytes} bytes of static shared memory: move them into core::Shared"
        )


def default_cache() -> Path:
    """Directory of compiled kernels."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "counterpoint" / "kernels"


@cache
def csrc_fingerprint() -> str:
    """Digest of every file of csrc, names included."""
    root = asset("csrc")
    total = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        total.update(path.relative_to(root).as_posix().encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


@cache
def compiler_version() -> str:
    """Version of the run-time compiler."""
    status, major, minor = nvrtc.nvrtcVersion()
    _check(status)
    return f"nvrtc {major}.{minor}"


def read_resources(log: str, kernel: str = ENTRY) -> Resources:
    """Resources from the assembler's report on the one kernel."""
    report = log[log.index(f"'{kernel}'") :]
    return Resources(
        registers=_number(r"Used (\d+) registers", report),
        spill_bytes=_number(r"(\d+) bytes spill stores", report) + _number(r"(\d+) bytes spill loads", report),
        stack_bytes=_number(r"(\d+) bytes stack frame", report),
        static_shared_bytes=_number(r"(\d+) bytes smem", report),
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def _flags(architecture: str) -> list[str]:
    return [
        f"--gpu-architecture={architecture}",
        "--std=c++20",
        "--ptxas-options=-v",
        "--generate-line-info",
        "--device-as-default-execution-space",  # ordinary constexpr functions may run on the device
    ]


def _compile(source: str, rendered: str, flags: list[str]) -> tuple[bytes, str]:
    root = asset("csrc")
    text = (root / source).read_bytes()
    status, program = nvrtc.nvrtcCreateProgram(text, source.encode(), 1, [rendered.encode()], [b"rendered.cuh"])
    _check(status)
    try:
        options = [flag.encode() for flag in (*flags, f"--include-path={root}", f"--include-path={root / 'nvrtc'}")]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        size_status, size = nvrtc.nvrtcGetProgramLogSize(program)
        _check(size_status)
        log = b" " * size
        _check(*nvrtc.nvrtcGetProgramLog(program, log))
        said = log.decode(errors="replace").rstrip("\0 \n")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise ConfigError(f"csrc does not compile ({status.name}):\n{said}")
        size_status, size = nvrtc.nvrtcGetCUBINSize(program)
        _check(size_status)
        cubin = b" " * size
        _check(*nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin, said
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _check(status: object) -> None:
    assert getattr(status, "value", 1) == 0, f"the run-time compiler answered {status}"


def _publish(entry: Path, files: dict[str, bytes]) -> None:
    """Make a cache entry appear whole or not at all; another process may have been faster."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=entry.parent))
    for name, data in files.items():
        (scratch / name).write_bytes(data)
    try:
        scratch.rename(entry)
    except OSError:
        if not entry.is_dir():
            raise
