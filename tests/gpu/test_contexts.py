"""On a card: contexts around windows, pages and chunks, up to 128K, and any routing, against the interpreted table."""

from __future__ import annotations

import pytest
import torch
from support.card import DEADLINE_MS, chip, random_tensors
from support.tiny_models import choices_for, cohere2_moe, qwen3_moe, spec_of

from megakernel.build import build_step
from megakernel.model import ModelSpec, RoutedMlp
from megakernel.workload import Bucket
from runtime.reference import Interpreter, Memory
from runtime.weights import pack_weights

pytestmark = pytest.mark.gpu

FAMILIES = [pytest.param(cohere2_moe, id="cohere2_moe"), pytest.param(qwen3_moe, id="qwen3_moe")]
LONG_WINDOW = 4096


def spec_for(family, **changes) -> ModelSpec:
    """A tiny model with North's window and a long context, and routed layers changed as said."""
    spec = spec_of(family(2))
    layers = [
        layer.model_copy(
            update={
                "window_tokens": LONG_WINDOW if layer.window_tokens else None,
                "mlp": layer.mlp.model_copy(update=changes) if isinstance(layer.mlp, RoutedMlp) else layer.mlp,
            }
        )
        for layer in spec.layers
    ]
    return spec.model_copy(update={"layers": tuple(layers), "max_context_tokens": 2**17})


def machines(spec: ModelSpec, rows: int, max_tokens: int, chunk_tokens: int, *, router_scale: float = 0.25):
    """The kernel, and the interpreted table in bfloat16 and float32, on the same weights and pages."""
    from runtime.gpu.decoder import Decoder

    choices = choices_for(spec)
    rounding = choices.rounding.model_copy(update={"chunk_tokens": chunk_tokens})
    bucket = Bucket(rows=rows, max_context_tokens=max_tokens, nominal_context_tokens=max_tokens // 2)
    step = build_step(spec, bucket, choices.model_copy(update={"rounding": rounding}), chip())
    tensors = {
        name: (tensor * router_scale / 0.25 if ".gate.weight" in name else tensor).to(torch.bfloat16)
        for name, tensor in random_tensors(spec).items()
    }
    packed = pack_weights(spec, tensors, rounding, torch.bfloat16)
    device = Decoder(step, chip(), packed)
    device.deadline_ms = DEADLINE_MS
    hosts = []
    for dtype in (torch.bfloat16, torch.float32):
        pages = [torch.from_numpy(table.astype("int64")) for table in device.pages]
        memory = Memory(step, dtype, pages)
        hosts.append(Interpreter(step.table, memory, pack_weights(spec, tensors, rounding, dtype)))
    return device, hosts


def join_all(device, hosts, row: int, length: int) -> None:
    """Give a row random KV of `length` earlier tokens, and its next one."""
    generator = torch.Generator().manual_seed(row)
    model = device.step.model
    for layer in range(model.num_layers):
        kv = torch.randn(2, model.num_kv_heads, length, model.head_dim, generator=generator).to(torch.bfloat16)
        if length:
            device.write_kv(layer, row, kv)
        for host in hosts:
            for head in range(model.num_kv_heads if length else 0):
                host.memory.write_kv(layer, row, head, 0, kv[:, head].to(host.memory.dtype))
    for machine in (device, *(host.memory for host in hosts)):
        machine.join(row, 20 + row, length)


def compare(device, hosts, steps: int) -> tuple[int, int]:
    """Teacher-forced steps; how many rows were compared, and how many differ by more than two times the noise."""
    compared = apart = 0
    for _ in range(steps):
        tokens = device.run()[0]
        for host in hosts:
            host.step()
        found, expected, truth = (part.scratch("logits") for part in (device, *(host.memory for host in hosts)))
        for row, token in enumerate(tokens):
            if token is None:
                continue
            noise = (expected[row] - truth[row]).abs().max()
            compared += 1
            apart += bool((found[row] - truth[row]).abs().max() > 2.0 * noise + 1e-3)
            for host in hosts:
                host.memory.tokens[row] = token
    return compared, apart


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_contexts_around_the_window_pages_and_chunks(family):
    device, hosts = machines(spec_for(family), 8, 8448, 64)
    for row, length in enumerate((0, 4094, 4095, 4096, 8191, 63, 15, 4111)):
        join_all(device, hosts, row, length)
    compared, apart = compare(device, hosts, 3)
    assert compared == 24
    assert apart <= 1, f"{apart} of {compared} rows differ by more than noise"


@pytest.mark.parametrize("family", FAMILIES)
def test_contexts_of_64k_and_128k(family):
    device, hosts = machines(spec_for(family), 2, 2**17, 64)
    join_all(device, hosts, 0, 2**16 - 1)
    join_all(device, hosts, 1, 2**17 - 2)
    compared, apart = compare(device, hosts, 1)
    assert (compared, apart) == (2, 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("routing", ["collapsed", "spread"])
def test_routing_collapsed_to_eight_experts_and_spread_to_all(family, routing):
    spec = spec_for(family, num_experts=32, top_k=8)
    device, hosts = machines(spec, 8, 256, 16, router_scale=0.0 if routing == "collapsed" else 2.0)
    for row in range(8):
        join_all(device, hosts, row, 3 * row)
    touched: set[int] = set()
    from runtime.reference import mlp as reference

    route = reference.ops.route

    def seen(logits, mlp):
        experts, scores = route(logits, mlp)
        touched.update(experts)
        return experts, scores

    reference.ops.route = seen
    try:
        compared, apart = compare(device, hosts, 4)
    finally:
        reference.ops.route = route
    assert len(touched) == 8 if routing == "collapsed" else len(touched) >= 30
    assert compared == 32
    assert apart <= 0.25 * compared, f"{apart} of {compared} rows differ by more than noise"
    if routing == "collapsed":
        assert apart == 0, "where no routing can differ, nothing does"
