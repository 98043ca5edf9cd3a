"""The real geometry that shipped plans are for: North Mini Code on an H200, and the choices placed by hand."""

from __future__ import annotations

from functools import cache

from megakernel.assets import asset
from megakernel.build import BuiltStep, build_step
from megakernel.config import load_toml
from megakernel.families import read_model
from megakernel.hardware import HardwareSpec, load_hardware
from megakernel.model import ModelSpec
from megakernel.tiling import Choices
from megakernel.workload import Bucket

BUCKET = Bucket(rows=1, max_context_tokens=16384, nominal_context_tokens=8192)


@cache
def model() -> ModelSpec:
    return read_model(asset("configs/models/CohereLabs--North-Mini-Code-1.0.json"))


@cache
def chip() -> HardwareSpec:
    return load_hardware(asset("configs/hardware/h200.toml"))


def choices(name: str) -> Choices:
    """`hand` or `reference`."""
    return load_toml(asset(f"configs/choices/{name}.toml"), Choices)


@cache
def step(name: str = "hand") -> BuiltStep:
    return build_step(model(), BUCKET, choices(name), chip())
