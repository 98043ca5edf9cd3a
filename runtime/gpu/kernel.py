"""A Triton kernel that is looked up once for its constants.

Triton's own look-up, at every launch, takes the host longer than the card takes for a layer of a short prompt. Refuses
arguments that Triton would compile another kernel for: addresses are multiples of 16 bytes, and whole numbers that
differ from call to call are named in `do_not_specialize`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.runtime.jit import JITFunction  # pyright: ignore[reportMissingImports]


class Kernel:
    """Launches `function`, whose arguments come in two parts: what differs from launch to launch, and constants."""

    def __init__(self, function: Callable[..., None]) -> None:
        """`function` is decorated, and compiled at its first launch with some constants."""
        self._function: Any = function
        self._found: dict[tuple[object, ...], tuple[Any, list[object]]] = {}

    def __call__(
        self, grid: tuple[Any, ...], *args: object, warps: int = 4, stages: int = 3, **constants: object
    ) -> None:
        """Launch on the current stream; `constants` are the function's last parameters, and None among `args`."""
        key = (warps, stages, *constants.values(), *(arg is None for arg in args))
        found = self._found.get(key)
        if found is not None:
            compiled, rest = found
            compiled[*grid, 1, 1](*args, *rest)
            return
        launch = self._function[grid]
        compiled = launch(*args, **constants, num_warps=warps, num_stages=stages)
        if isinstance(self._function, JITFunction):  # not where it is interpreted
            names = self._function.arg_names[len(args) :]
            self._found[key] = compiled, [constants[name] for name in names]
