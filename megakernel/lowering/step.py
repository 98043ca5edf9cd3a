"""A whole decode step, embedding to sampled token, as a task graph in reference order.

The residual is never a task of its own: the output projection adds its columns to what it read, and every reader of
the stream adds the MLP's output to it as it normalises. In a parallel block the two are double-buffered by layer
parity, since output tasks of a layer may finish while MLP tasks still read that layer's input.
"""

from __future__ import annotations

from megakernel import live
from megakernel.abi import BEST_WORDS
from megakernel.graph import TaskGraph
from megakernel.lowering.attention import (
    Scratch,
    lower_attend,
    lower_merge,
    lower_output,
    lower_project,
    lower_route,
    project_columns,
)
from megakernel.lowering.context import ABSENT, BF16, FP32, INT32, Lowering
from megakernel.lowering.head import lower_embed, lower_head, lower_sample
from megakernel.lowering.mlp import lower_down, lower_up
from megakernel.model import ModelSpec, RoutedMlp
from megakernel.tiling import UNIT_ROWS, Choices, deal
from megakernel.workload import Bucket


def lower(model: ModelSpec, bucket: Bucket, choices: Choices) -> TaskGraph:
    """Lower one decode step of `model` for `bucket`; legality of the choices is `limits`' business."""
    ctx = Lowering(model, bucket, choices)
    rows, hidden = bucket.rows, model.hidden_size
    tokens = ctx.buffer("tokens", (rows,), INT32)
    scratch = _scratch(ctx)
    residual = tuple(ctx.buffer(f"residual{parity}", (rows, hidden), BF16) for parity in range(2))
    mlp_out = (ABSENT, ABSENT)
    if model.block == "parallel":
        mlp_out = tuple(ctx.buffer(f"mlp_out{parity}", (rows, hidden), BF16) for parity in range(2))
    head_tasks = len(deal(model.vocab_size // UNIT_ROWS, choices.cut.head))
    logits = ctx.buffer("logits", (rows, model.vocab_size), FP32)
    best = ctx.buffer("best", (rows, head_tasks, BEST_WORDS), FP32)
    embedding = ctx.buffer("embedding", (model.vocab_size, hidden), BF16, read_only=True)
    head = embedding
    if not model.tied_embeddings:
        head = ctx.buffer("head", (model.vocab_size, hidden), BF16, read_only=True)

    lower_embed(ctx, tokens, embedding, residual[0])
    if model.block == "parallel":
        for layer in range(model.num_layers):
            now, following = layer % 2, (layer + 1) % 2
            source = (residual[now], mlp_out[now] if layer else ABSENT)
            _parallel_layer(ctx, layer, source, (residual[following], mlp_out[following]), scratch)
        last = model.num_layers % 2
        stream = (residual[last], mlp_out[last])
    else:
        for layer in range(model.num_layers):
            _sequential_layer(ctx, layer, (residual[0], residual[1]), scratch)
        stream = (residual[0], ABSENT)
    lower_head(ctx, stream, head, logits, best, scratch.row_state)
    lower_sample(ctx, logits, best, scratch.row_state, tokens)
    return TaskGraph(tuple(ctx.buffers), tuple(ctx.ops))


def _parallel_layer(
    ctx: Lowering, layer: int, source: tuple[int, int], target: tuple[int, int], scratch: Scratch
) -> None:
    spec = ctx.model.layers[layer]
    router_rows = spec.mlp.num_experts if isinstance(spec.mlp, RoutedMlp) else 0
    with_project = ctx.choices.interleave.router_with_project
    lower_project(ctx, layer, source, scratch, router_rows=router_rows if with_project else 0)
    if router_rows and not with_project:
        lower_route(ctx, layer, source, scratch, router_rows=router_rows)
    lower_attend(ctx, layer, spec, scratch)
    lower_merge(ctx, layer, spec, scratch)
    lower_output(ctx, layer, source, target[0], scratch)
    lower_up(ctx, layer, spec, source, scratch)
    lower_down(ctx, layer, spec, ABSENT, target[1], scratch)


def _sequential_layer(ctx: Lowering, layer: int, residual: tuple[int, int], scratch: Scratch) -> None:
    spec = ctx.model.layers[layer]
    lower_project(ctx, layer, (residual[0], ABSENT), scratch, router_rows=0)
    lower_attend(ctx, layer, spec, scratch)
    lower_merge(ctx, layer, spec, scratch)
    lower_output(ctx, layer, (residual[0], ABSENT), residual[1], scratch)
    if isinstance(spec.mlp, RoutedMlp):
        lower_route(ctx, layer, (residual[1], ABSENT), scratch, router_rows=spec.mlp.num_experts)
    lower_up(ctx, layer, spec, (residual[1], ABSENT), scratch)
    lower_down(ctx, layer, spec, residual[1], residual[0], scratch)


def _scratch(ctx: Lowering) -> Scratch:
    model, rows = ctx.model, ctx.rows
    chunk = ctx.choices.rounding.chunk_tokens
    last = ctx.bucket.max_context_tokens - 1
    # a window that starts inside a chunk spans one chunk more than it fills
    most_chunks = max(
        max(
            live.chunk_end(position, chunk) - live.chunk_begin(position, layer.window_tokens or 0, chunk)
            for position in range(max(last - chunk, 0), last + 1)
        )
        for layer in set(model.layers)
    )
    routed = [layer.mlp for layer in model.layers if isinstance(layer.mlp, RoutedMlp)]
    experts = max((mlp.num_experts for mlp in routed), default=0)
    top_k = max((mlp.top_k for mlp in routed), default=1)
    width = max(layer.mlp.width for layer in model.layers)
    return Scratch(
        row_state=ctx.buffer("row_state", (rows,), 2 * INT32),
        router=ctx.buffer("router", (rows, experts), FP32) if experts else ABSENT,
        qkv=ctx.buffer("qkv", (ctx.choices.rounding.project_k_splits, rows, project_columns(ctx)), FP32),
        partial=ctx.buffer("partial", (rows, model.num_heads, most_chunks, model.head_dim + 2), FP32),
        attention=ctx.buffer("attention", (rows, model.q_size), BF16),
        hidden=ctx.buffer("hidden", (rows, top_k, width), BF16),
    )
