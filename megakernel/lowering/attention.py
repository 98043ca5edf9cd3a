"""Projections, attention over pages, merge of partial results, output projection.

Q, K and V leave the projection unrotated, in fp32; attention tasks apply q/k norm and RoPE as they read, so one product
kind serves every family. The share that owns the current position appends the new K and V to its page after its
own copies have landed: no other task reads that page in this step, so no copy ever races with the append.
"""

from __future__ import annotations

from dataclasses import dataclass

from megakernel import live
from megakernel.graph import Task, When
from megakernel.kinds import Path, TaskKind
from megakernel.lowering.context import ABSENT, BF16, FP32, Lowering, grid_boxes, read, whole, write
from megakernel.model import LayerSpec
from megakernel.tiling import UNIT_ROWS, deal


@dataclass(frozen=True)
class Scratch:
    """Buffers that every layer reuses."""

    row_state: int
    router: int
    qkv: int
    partial: int
    attention: int
    hidden: int


def project_columns(ctx: Lowering) -> int:
    """Columns of the packed Q, K, V projection."""
    return ctx.model.q_size + 2 * ctx.model.kv_size


def lower_project(ctx: Lowering, layer: int, x: tuple[int, int], scratch: Scratch, *, router_rows: int) -> None:
    """Q, K, V of one layer; with `router_rows`, also the router, dealt over the tasks and published early."""
    hidden = ctx.model.hidden_size
    splits = ctx.choices.rounding.project_k_splits
    units = project_columns(ctx) // UNIT_ROWS
    weights = ctx.weights(f"L{layer}.qkv", units * splits, UNIT_ROWS, hidden // splits)
    others = (weights,)
    if router_rows:
        others += (ctx.buffer(f"L{layer}.router", (router_rows, hidden), BF16, read_only=True),)

    def cut() -> list[Task]:
        tasks: list[Task] = []
        ranges = deal(units * splits, ctx.choices.cut.project)
        router = deal(router_rows, len(ranges)) if router_rows else []
        unit_bytes = UNIT_ROWS * (hidden // splits) * BF16
        for task, (begin, end) in enumerate(ranges):
            first, last = router[task] if task < len(router) else (0, 0)
            accesses = [read(slot, whole(ctx.shape(buffer))) for slot, buffer in enumerate(x) if buffer >= 0]
            accesses.append(read(4, ((begin, end), (0, UNIT_ROWS), (0, hidden // splits)), When.LOAD))
            if last > first:
                accesses.append(read(5, ((first, last), (0, hidden)), When.LOAD))
                accesses.append(write(2, ((0, ctx.rows), (first, last)), When.EARLY))
            for split, (low, high) in grid_boxes(begin, end, units):
                box = (split, (0, ctx.rows), (low * UNIT_ROWS, high * UNIT_ROWS))
                accesses.append(write(3, box))
            weight = (end - begin) * unit_bytes + (last - first) * hidden * BF16
            tasks.append(
                Task(
                    tuple(accesses),
                    weight,
                    begin=begin,
                    end=end,
                    router_begin=first,
                    router_end=last,
                    row_tile_count=ctx.bucket.row_tiles,
                )
            )
        return tasks

    tasks = ctx.tasks(("project", x[1] >= 0, router_rows), cut)
    router = scratch.router if router_rows else ABSENT
    ctx.add("project", TaskKind.PROJECT, layer, (x, (router, scratch.qkv), others), tasks)


def lower_route(ctx: Lowering, layer: int, x: tuple[int, int], scratch: Scratch, *, router_rows: int) -> None:
    """The router alone: a projection without Q, K, V rows, for blocks whose router reads another input."""
    hidden = ctx.model.hidden_size
    weights = ctx.buffer(f"L{layer}.router", (router_rows, hidden), BF16, read_only=True)

    def cut() -> list[Task]:
        return [
            Task(
                (
                    *(read(slot, whole(ctx.shape(buffer))) for slot, buffer in enumerate(x) if buffer >= 0),
                    read(4, ((first, last), (0, hidden)), When.LOAD),
                    write(2, ((0, ctx.rows), (first, last)), When.EARLY),
                ),
                (last - first) * hidden * BF16,
                router_begin=first,
                router_end=last,
                row_tile_count=ctx.bucket.row_tiles,
            )
            for first, last in deal(router_rows, ctx.choices.cut.route)
        ]

    tasks = ctx.tasks(("route", x[1] >= 0), cut)
    slots = (x, (scratch.router, ABSENT), (weights,))
    ctx.add("route", TaskKind.PROJECT, layer, slots, tasks, Path.MLP)


def nominal_chunks(ctx: Lowering, layer: LayerSpec) -> int:
    """Chunks of one row at the bucket's nominal context."""
    position = ctx.bucket.nominal_context_tokens - 1
    chunk = ctx.choices.rounding.chunk_tokens
    return live.chunk_end(position, chunk) - live.chunk_begin(position, layer.window_tokens or 0, chunk)


def lower_attend(ctx: Lowering, layer: int, spec: LayerSpec, scratch: Scratch) -> None:
    """Shares over all (row, KV head, chunk) units of the step, found on the device from live lengths."""
    model = ctx.model
    kv = ctx.buffer(
        f"L{layer}.kv",
        (ctx.rows, model.num_kv_heads, ctx.bucket.max_context_tokens, 2 * model.head_dim),
        BF16,
    )

    def cut() -> list[Task]:
        units = nominal_chunks(ctx, spec) * ctx.rows * model.num_kv_heads
        chunk_bytes = ctx.choices.rounding.chunk_tokens * 2 * model.head_dim * BF16
        shares = ctx.choices.cut.attend
        accesses = (
            read(1, whole(ctx.shape(scratch.row_state)), When.LOAD),
            read(3, whole(ctx.shape(kv)), When.LOAD, partitioned=True),
            read(0, whole(ctx.shape(scratch.qkv))),
            write(3, whole(ctx.shape(kv)), partitioned=True),
            write(2, whole(ctx.shape(scratch.partial)), partitioned=True),
        )
        return [
            Task(
                accesses,
                (live.share_begin(units, share + 1, shares) - live.share_begin(units, share, shares)) * chunk_bytes,
                share=share,
                shares=shares,
                row_tile_count=ctx.bucket.row_tiles,
            )
            for share in range(shares)
        ]

    tasks = ctx.tasks(("attend", spec.window_tokens), cut)
    slots = ((scratch.qkv, scratch.row_state), (scratch.partial,), (kv,))
    ctx.add("attend", TaskKind.ATTEND, layer, slots, tasks)


def lower_merge(ctx: Lowering, layer: int, spec: LayerSpec, scratch: Scratch) -> None:
    """Merge of the chunks of whole query heads; a unit is one (row, query head)."""
    model = ctx.model

    def cut() -> list[Task]:
        chunks, width = ctx.shape(scratch.partial)[2:]
        unit_bytes = nominal_chunks(ctx, spec) * width * FP32
        tasks: list[Task] = []
        for begin, end in deal(ctx.rows * model.num_heads, ctx.choices.cut.merge):
            accesses = [read(1, whole(ctx.shape(scratch.row_state)))]
            for rows, heads in grid_boxes(begin, end, model.num_heads):
                accesses.append(read(0, (rows, heads, (0, chunks), (0, width))))
                accesses.append(write(2, (rows, (heads[0] * model.head_dim, heads[1] * model.head_dim))))
            tasks.append(Task(tuple(accesses), (end - begin) * unit_bytes, begin=begin, end=end))
        return tasks

    tasks = ctx.tasks(("merge", spec.window_tokens), cut)
    slots = ((scratch.partial, scratch.row_state), (scratch.attention,), ())
    ctx.add("merge", TaskKind.MERGE, layer, slots, tasks)


def lower_output(ctx: Lowering, layer: int, x: tuple[int, int], out: int, scratch: Scratch) -> None:
    """Output projection by columns, added to the residual: `out = x (+ f) + attention W`."""
    model = ctx.model
    units = model.hidden_size // UNIT_ROWS
    weights = ctx.weights(f"L{layer}.output", units, UNIT_ROWS, model.q_size)

    def cut() -> list[Task]:
        tasks: list[Task] = []
        for begin, end in deal(units, ctx.choices.cut.output):
            columns = ((0, ctx.rows), (begin * UNIT_ROWS, end * UNIT_ROWS))
            accesses = [read(0, whole(ctx.shape(scratch.attention)))]
            accesses += [read(slot, columns) for slot, buffer in enumerate(x, start=1) if buffer >= 0]
            accesses.append(read(4, ((begin, end), (0, UNIT_ROWS), (0, model.q_size)), When.LOAD))
            accesses.append(write(3, columns))
            weight = (end - begin) * UNIT_ROWS * model.q_size * BF16
            tasks.append(Task(tuple(accesses), weight, begin=begin, end=end, row_tile_count=ctx.bucket.row_tiles))
        return tasks

    tasks = ctx.tasks(("output", x[1] >= 0), cut)
    ctx.add("output", TaskKind.OUTPUT, layer, ((scratch.attention, *x), (out,), (weights,)), tasks)
