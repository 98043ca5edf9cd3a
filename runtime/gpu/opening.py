"""From a checkpoint folder to a backend on the present card: which choices, what fits, weights piece by piece.

Owns the choice where no plan was searched for the model: the hand's, with as much of a ring as fits, else small ones.
Says why a card or a model can't be served rather than trying.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from megakernel import limits
from megakernel.assets import asset
from megakernel.build import BuiltStep, build_step
from megakernel.config import ConfigError, load_json, load_toml
from megakernel.families import read_model
from megakernel.hardware import HardwareSpec, load_hardware
from megakernel.model import ModelSpec
from megakernel.plan import Plan
from megakernel.tiling import Choices, Cut, Interleave, Ring, Rounding
from megakernel.workload import Bucket
from runtime.engine.checkpoint import Checkpoint
from runtime.gpu.backend import GpuBackend
from runtime.gpu.card import read_card, reasons
from runtime.gpu.decoder import Decoder
from runtime.gpu.specialize import KernelOptions
from runtime.weights import pack_pieces

CHIP = "configs/hardware/h200.toml"


def open_backend(folder: Path, *, rows: int, max_tokens: int) -> GpuBackend:
    """A backend for up to `rows` requests of `max_tokens` tokens; ConfigError when the card or the model can't."""
    chip, model = load_hardware(asset(CHIP)), read_model(folder)
    step = fitting_step(
        model, Bucket(rows=rows, max_context_tokens=max_tokens, nominal_context_tokens=max_tokens), chip
    )
    card = read_card()
    found = reasons(
        card, num_sms=chip.num_sms, architecture=chip.architecture, shared_bytes=chip.shared_memory_per_block_bytes
    )
    if found:
        raise ConfigError(f"{card.name} can't run the kernel:\n" + "\n".join(f"  {reason}" for reason in found))
    pieces = pack_pieces(model, Checkpoint(folder), step.choices.rounding, torch.bfloat16)
    return GpuBackend(Decoder(step, chip, pieces, options=KernelOptions()))


def fitting_step(model: ModelSpec, bucket: Bucket, chip: HardwareSpec) -> BuiltStep:
    """A step of the first choices that the chip can run; ConfigError says why the last ones can't."""
    last = ""
    for choices in _candidates(model, bucket, chip):
        found = list(limits.reasons(model, bucket, choices, chip))
        if not found:
            return build_step(model, bucket, choices, chip)
        last = "\n".join(f"  {reason}" for reason in found)
    raise ConfigError(f"no choices fit this model on {chip.name}:\n{last}")


def _candidates(model: ModelSpec, bucket: Bucket, chip: HardwareSpec) -> Iterator[Choices]:
    for path in sorted(asset("configs/plans").glob("*.json")):
        plan = load_json(path, Plan)
        if plan.model == model:
            yield from (entry.choices for entry in plan.entries if entry.bucket.rows == bucket.rows)
    name = "hand" if model.block == "parallel" else "sequential-hand"
    hand = load_toml(asset(f"configs/choices/{name}.toml"), Choices)
    stages = min(hand.ring.stages, limits.most_stages(model, bucket, hand, chip))
    if stages >= 2:
        yield hand.model_copy(update={"ring": hand.ring.model_copy(update={"stages": stages})})
    if model.block == "parallel":
        interleave = Interleave(order=("project", "up", "attend", "merge", "down", "output"))
    else:
        order = ("project", "attend", "merge", "output", "route", "up", "down")
        interleave = Interleave(order=order, router_with_project=False)
    yield Choices(
        rounding=Rounding(chunk_tokens=16, page_tokens=16, slice_columns=32),
        cut=Cut(project=5, attend=4, merge=3, output=3, up=4, down=4, head=5, route=2),
        ring=Ring(copy_bytes=4096, stages=12, in_flight_cap_bytes=16384),
        interleave=interleave,
    )
