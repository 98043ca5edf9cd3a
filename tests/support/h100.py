"""What was published of the reference engine on an H100, and what the simulator says of the same steps.

Owns the figures, as ms a step, and which of them the engine's constants were fitted to. Used by tests/accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from megakernel.assets import asset
from megakernel.config import load_toml
from megakernel.families import read_model
from megakernel.hardware import HardwareSpec, load_hardware
from megakernel.model import ModelSpec
from simulator.engine import Engine, Load, engine_step_ns

TOKENS = 1024
FITTED = ("hand_off_ns", "stream_share", "attend_block_ns")

SWEEP_MS = {1: 3.316, 2: 3.329, 4: 3.401, 8: 3.428, 16: 3.465, 32: 3.685, 64: 3.956, 128: 4.498, 256: 5.624}
"""The vendor's context sweep, one row, by context in units of 1024 tokens: the engine's constants are fitted to it."""

UNIFORM_TOKENS_PER_S = {1: 291, 2: 423, 4: 553}
"""The vendor's figures under uniform routing at 8K, by rows."""

ORDERS_PERCENT = {
    "interleaved": {1: -3, 2: -4, 4: -4},
    "attention_first": {1: -19, 2: -14, 4: -8},
}
"""What other orders of its waves cost in tokens a second there, by rows."""

REPRODUCED_MS = {
    1: {1: 3.258, 8: 3.381, 32: 3.597},
    2: {1: 3.935, 8: 4.214, 32: 4.667},
    4: {1: 4.987, 8: 5.702, 32: 6.670},
    8: {1: 6.977, 8: 8.018, 32: 9.894},
}
"""An independent reproduction with real prompts, by rows and context."""


@dataclass(frozen=True)
class Point:
    """A step of the engine: rows, context in units of 1024 tokens, mean distinct experts of a layer, order of waves."""

    rows: int
    context: int
    experts: float
    order: str = ""


def uniform(rows: int) -> float:
    """Distinct experts of 128 that `rows` rows with 8 each hit on average."""
    return 128.0 * (1.0 - (120.0 / 128.0) ** rows)


def engine() -> Engine:
    return load_toml(asset("configs/engines/reference-h100.toml"), Engine)


def chip() -> HardwareSpec:
    return load_hardware(asset("configs/hardware/h100-sxm.toml"))


def model() -> ModelSpec:
    return read_model(asset("configs/models/CohereLabs--North-Mini-Code-1.0.json"))


def step_ms(point: Point, described: Engine) -> float:
    load = Load((point.context * TOKENS,) * point.rows, point.experts)
    return engine_step_ns(described, model(), chip(), load, point.order) / 1e6


def steps_ms(points: Sequence[Point], described: Engine) -> list[float]:
    """Simulate on two processes."""
    with ProcessPoolExecutor(2) as pool:
        return list(pool.map(partial(step_ms, described=described), points))


def experts_at(rows: int, ms: float, described: Engine) -> float:
    """Distinct experts at which a step of 1K takes about `ms`: the best of some tried by false position.

    Whole tiles fall on whole SMs, so the time is no line in them, and may step by 2%.
    """
    low, high = 8.0, uniform(rows)
    tried = {each: step_ms(Point(rows, 1, each), described) for each in (low, high)}
    for _ in range(4):
        found = low + (ms - tried[low]) * (high - low) / (tried[high] - tried[low])
        tried[found] = step_ms(Point(rows, 1, found), described)
        low, high = (found, high) if tried[found] < ms else (low, found)
    return min(tried, key=lambda each: abs(tried[each] - ms))
