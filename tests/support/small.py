"""A model small enough to be read back from a card byte by byte, with every kind of layer, and legal choices for it."""

from __future__ import annotations

from megakernel.assets import asset
from megakernel.build import BuiltStep, build_step
from megakernel.hardware import HardwareSpec, load_hardware
from megakernel.model import DenseMlp, LayerSpec, ModelSpec, Rope, RoutedMlp
from megakernel.tiling import Choices, Cut, Interleave, Ring, Rounding
from megakernel.workload import Bucket

ROPE = Rope(theta=10000.0, pairing="interleaved")
EXPERTS = RoutedMlp(kind="routed", num_experts=40, top_k=3, width=64, score="sigmoid", renormalise=False)
DENSE = DenseMlp(kind="dense", width=192)


def chip() -> HardwareSpec:
    """The H200."""
    return load_hardware(asset("configs/hardware/h200.toml"))


def model(block: str = "parallel") -> ModelSpec:
    """Dense and routed MLPs, full and windowed attention."""
    full, window = {"window_tokens": None, "rope": None}, {"window_tokens": 200, "rope": ROPE}
    return ModelSpec(
        family="small",
        block=block,
        hidden_size=256,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        qk_norm=False,
        norm_eps=1e-6,
        vocab_size=8192,
        tied_embeddings=True,
        logit_scale=1.0,
        max_context_tokens=4096,
        eos_token_ids=(1,),
        layers=(
            LayerSpec(**full, mlp=DENSE),
            LayerSpec(**window, mlp=EXPERTS),
            LayerSpec(**full, mlp=EXPERTS),
            LayerSpec(**window, mlp=EXPERTS),
        ),
    )


def build(
    ring: Ring | None = None,
    *,
    rows: int = 3,
    splits: int = 1,
    loads: str = "ahead",
    router_with_project: bool = True,
    block: str = "parallel",
) -> BuiltStep:
    """A step over all SMs of an H200."""
    with_project = router_with_project and block == "parallel"
    order = ["project", "attend", "merge", "output", "up", "down"]
    if not with_project:
        order.insert(4, "route")
    choices = Choices(
        rounding=Rounding(chunk_tokens=32, page_tokens=16, project_k_splits=splits, slice_columns=32),
        cut=Cut(project=30, attend=50, merge=12, output=16, up=60, down=16, head=200, route=5),
        ring=ring or Ring(copy_bytes=2048, stages=12, in_flight_cap_bytes=6144),
        interleave=Interleave(order=tuple(order), loads=loads, router_with_project=with_project),
    )
    bucket = Bucket(rows=rows, max_context_tokens=4096, nominal_context_tokens=2048)
    return build_step(model(block), bucket, choices, chip())
