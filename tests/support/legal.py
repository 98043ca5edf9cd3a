"""Random models of both block kinds, and random choices for them that `limits` lets pass."""

from __future__ import annotations

import random
from dataclasses import dataclass

from megakernel import limits
from megakernel.assets import asset
from megakernel.hardware import HardwareSpec, load_hardware
from megakernel.model import DenseMlp, LayerSpec, ModelSpec, Rope, RoutedMlp
from megakernel.tiling import Choices, Counters, Cut, Interleave, Ring, Rounding
from megakernel.workload import Bucket


@dataclass(frozen=True)
class Case:
    """What a step is built from."""

    model: ModelSpec
    bucket: Bucket
    choices: Choices
    chip: HardwareSpec


def random_case(seed: int) -> Case:
    """The first legal one of a seed's random cases."""
    rng = random.Random(seed)
    h200 = load_hardware(asset("configs/hardware/h200.toml"))
    while True:
        chip = h200.model_copy(update={"num_sms": rng.choice((1, 2, 3, 5, 8, 13))})
        model = random_model(rng)
        most = rng.choice((16, 40, 100))
        bucket = Bucket(rows=rng.randint(1, 16), max_context_tokens=most, nominal_context_tokens=rng.randint(1, most))
        case = Case(model, bucket, random_choices(model, chip.num_sms, rng), chip)
        if not limits.reasons(case.model, case.bucket, case.choices, case.chip):
            return case


def random_model(rng: random.Random) -> ModelSpec:
    """One to four layers, windows and dense first layers among them."""
    rope = Rope(theta=1e4, pairing=rng.choice(("half", "interleaved")))
    experts = rng.choice((2, 4, 8))
    routed = RoutedMlp(
        kind="routed",
        num_experts=experts,
        top_k=rng.randint(1, min(experts, 3)),
        width=rng.choice((32, 64, 96)),
        score=rng.choice(("sigmoid", "softmax")),
        renormalise=rng.random() < 0.5,
    )
    dense = DenseMlp(kind="dense", width=rng.choice((32, 64, 96)))
    num_layers, num_dense = rng.randint(1, 4), rng.choice((0, 0, 1, 1, 4))
    layers = [
        LayerSpec(
            window_tokens=rng.choice((None, 8, 20, 48)),
            rope=rng.choice((rope, None)),
            mlp=dense if idx < num_dense else routed,
        )
        for idx in range(num_layers)
    ]
    kv_heads = rng.choice((1, 2))
    return ModelSpec(
        family="random", block=rng.choice(("parallel", "sequential")), hidden_size=rng.choice((64, 128)),
        num_heads=kv_heads * rng.choice((2, 4)), num_kv_heads=kv_heads, head_dim=rng.choice((16, 32)),
        qk_norm=rng.random() < 0.5, norm_eps=1e-6, vocab_size=16 * rng.randint(1, 20),
        tied_embeddings=rng.random() < 0.5, logit_scale=1.0, max_context_tokens=128, eos_token_ids=(0,),
        layers=tuple(layers),
    )  # fmt: skip


def random_choices(model: ModelSpec, num_sms: int, rng: random.Random) -> Choices:
    """Anything that may be chosen; `limits` has the last word."""
    page, copy = rng.choice((16, 32)), 1024 * rng.randint(1, 4)
    stages = rng.randint(2, 12)
    with_project = model.block == "parallel" and rng.random() < 0.6
    interleave = Interleave(
        order=("project",),
        policy=rng.choice(("balanced", "balanced", "round_robin")),
        loads=rng.choice(("ahead", "ahead", "after_wait")),
        attention_sms=rng.choice((None, None, rng.randint(1, num_sms))),
        takeover_percent=rng.choice((0, 0, 25, 100)),
        router_with_project=with_project,
    )
    choices = Choices(
        rounding=Rounding(
            chunk_tokens=page * rng.randint(1, 3),
            page_tokens=page,
            project_k_splits=rng.choice((1, 1, 2)),
            slice_columns=32,
        ),
        cut=Cut(**{name: rng.randint(1, rng.choice((2, 6, 24))) for name in Cut.model_fields}),
        ring=Ring(
            copy_bytes=copy, stages=stages, in_flight_cap_bytes=rng.choice((None, copy * rng.randint(1, stages)))
        ),
        interleave=interleave,
    )
    order = random_order(model, choices, rng)
    choices = choices.model_copy(update={"interleave": interleave.model_copy(update={"order": order})})
    return choices.model_copy(update={"counters": Counters(words=rng.randint(1, limits.most_words(choices)))})


def random_order(model: ModelSpec, choices: Choices, rng: random.Random) -> tuple[str, ...]:
    """A random order of a layer's operators, some of them cut in parts that stand apart."""
    pairs = limits.order_pairs(model, choices)
    left = {op: rng.choice((1, 1, 2, 3)) for op in limits.layer_ops(model, choices)}
    parts = dict(left)
    order: list[str] = []
    while left:
        ready = [op for op in left if not any(then == op and first in left for first, then in pairs)]
        op = rng.choice(ready)
        order.append(f"{op}:{parts[op] - left[op] + 1}/{parts[op]}" if parts[op] > 1 else op)
        left[op] -= 1
        if not left[op]:
            del left[op]
    return tuple(order)
