"""Short steps for tests of the simulator: the real geometry with few layers and a head in fewer pieces."""

from __future__ import annotations

from functools import cache

from support import north

from megakernel.assets import asset
from megakernel.build import BuiltStep, build_step
from megakernel.families import read_model
from megakernel.hardware import HardwareSpec
from megakernel.model import ModelSpec
from megakernel.tiling import Choices, Ring
from megakernel.workload import Bucket
from simulator.few_layers import truncated

HEAD_TASKS = 528


@cache
def qwen() -> ModelSpec:
    """A sequential block."""
    return read_model(asset("configs/models/Qwen--Qwen3-30B-A3B.json"))


def choices_for(model: ModelSpec, name: str, ring: Ring | None = None) -> Choices:
    """Shipped choices in an order that the model's block allows, perhaps with another ring."""
    choices = north.choices(name)
    if model.block == "sequential":
        order = ("project", "attend", "merge", "output", "route", "up", "down")
        changed = choices.interleave.model_copy(update={"order": order, "router_with_project": False})
        choices = choices.model_copy(update={"interleave": changed})
    cut = choices.cut.model_copy(update={"head": HEAD_TASKS})
    return choices.model_copy(update={"cut": cut, "ring": ring or choices.ring})


@cache
def short_step(
    name: str = "hand",
    *,
    model: ModelSpec | None = None,
    layers: int = 5,
    bucket: Bucket = north.BUCKET,
    ring: Ring | None = None,
) -> BuiltStep:
    """The first layers of North Mini Code, or of another model, built for an H200."""
    whole = model or north.model()
    fewer = truncated(whole, layers)
    return build_step(fewer, bucket, choices_for(whole, name, ring), north.chip())


def with_bandwidth(chip: HardwareSpec, factor: float) -> HardwareSpec:
    """The chip with a memory that streams `factor` times as fast."""
    ceilings = tuple(each.model_copy(update={"bytes_per_ns": each.bytes_per_ns * factor}) for each in chip.ceilings)
    return chip.model_copy(update={"ceilings": ceilings})
