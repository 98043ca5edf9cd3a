"""Decoders on a card: tiny checkpoints, a small model with drawn weights and any vocabulary, North's geometry."""

from __future__ import annotations

import os

import torch
from support import north
from support.tiny_models import choices_for, spec_of

from megakernel.assets import asset
from megakernel.build import BuiltStep, build_step
from megakernel.hardware import HardwareSpec, load_hardware
from megakernel.model import ModelSpec
from megakernel.tiling import Choices, Counters
from megakernel.workload import Bucket
from runtime.engine.drawn import DrawnTensors
from runtime.gpu.buckets import for_rows

DEADLINE_MS = float(os.environ.get("GPU_TEST_DEADLINE_MS", "100"))
"""Of a wait inside a launch; tools that slow a kernel need more."""


def chip() -> HardwareSpec:
    """The H200."""
    return load_hardware(asset("configs/hardware/h200.toml"))


def tiny_step(model, rows: int, *, max_tokens: int = 128, **interleave) -> BuiltStep:
    """A step of a tiny transformers model over all SMs of an H200."""
    spec = spec_of(model)
    bucket = Bucket(rows=rows, max_context_tokens=max_tokens, nominal_context_tokens=64)
    return build_step(spec, bucket, choices_for(spec, **interleave), chip())


def on_card(model, rows: int, *, max_tokens: int = 128, first_step: int = 0, **options):
    """A decoder of a tiny transformers model."""
    from runtime.gpu.decoder import Decoder
    from runtime.gpu.specialize import KernelOptions
    from runtime.weights import pack_weights

    step = tiny_step(model, rows, max_tokens=max_tokens)
    weights = pack_weights(step.model, dict(model.state_dict()), step.choices.rounding, torch.bfloat16)
    decoder = Decoder(step, chip(), weights, options=KernelOptions(**options), first_step=first_step)
    decoder.deadline_ms = DEADLINE_MS
    return decoder


def north_step(rows: int, max_tokens: int = 4096) -> BuiltStep:
    """A step of North's geometry, by the hand's choices with a ring that leaves room for the rows."""
    choices = north.choices("hand")
    ring = choices.ring.model_copy(update={"stages": 16})
    bucket = Bucket(rows=rows, max_context_tokens=max_tokens, nominal_context_tokens=max_tokens // 2)
    return build_step(north.model(), bucket, choices.model_copy(update={"ring": ring}), chip())


def drawn(step: BuiltStep, **options):
    """A decoder of a step with weights drawn on the device."""
    from runtime.gpu.decoder import Decoder
    from runtime.gpu.specialize import KernelOptions

    decoder = Decoder(step, chip(), options=KernelOptions(**options))
    decoder.deadline_ms = DEADLINE_MS
    return decoder


def random_tensors(spec: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """A checkpoint of any spec, with the names that Hugging Face gives its tensors; scaled as the tiny models are."""
    return dict(DrawnTensors(spec, std=0.25, seed=seed))


def best_step(model: ModelSpec, rows: int, max_tokens: int, nominal_tokens: int | None = None) -> BuiltStep:
    """A step of real geometry by the choices that measured best, cut for its rows as a server's are."""
    bucket = Bucket(rows=rows, max_context_tokens=max_tokens, nominal_context_tokens=nominal_tokens or max_tokens)
    return build_step(model, bucket, for_rows(model, bucket, best_choices(model), chip()), chip())


def best_choices(model: ModelSpec) -> Choices:
    """The hand's cuts and ring; attention before the experts, lists dealt in turn, arrivals in two words."""
    name, order = {
        "parallel": ("hand", ("project", "attend", "up", "merge", "down", "output")),
        "sequential": ("sequential-hand", ("project", "attend", "merge", "output", "route", "up", "down")),
    }[model.block]
    choices = north.choices(name)
    interleave = choices.interleave.model_copy(update={"order": order, "policy": "round_robin"})
    return choices.model_copy(update={"interleave": interleave, "counters": Counters(words=2)})
