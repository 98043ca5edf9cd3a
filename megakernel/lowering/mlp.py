"""Gate, up and down products of a layer, routed or dense.

Routed work is a fixed number of shares: each finds its (expert, tile) list by arithmetic from the routed ids, so a
table holds for every routing. The down product is cut by output columns over all of a row's experts: the sum over
experts stays inside one task, in ascending order of expert, whatever the other rows chose.
"""

from __future__ import annotations

from megakernel.graph import Access, Task, When
from megakernel.kinds import TaskKind
from megakernel.lowering.attention import Scratch
from megakernel.lowering.context import ABSENT, BF16, Lowering, read, whole, write
from megakernel.model import DenseMlp, LayerSpec, RoutedMlp
from megakernel.tiling import PAIRED_COLUMNS, UNIT_ROWS, deal


def expected_experts(mlp: RoutedMlp, rows: int) -> float:
    """Mean number of distinct experts that `rows` independent, uniformly routed rows touch."""
    return mlp.num_experts * (1.0 - (1.0 - mlp.top_k / mlp.num_experts) ** rows)


def max_experts(mlp: RoutedMlp, rows: int) -> int:
    """Bound on the distinct experts of a step; with it, on every share's device-built work."""
    return min(mlp.num_experts, mlp.top_k * rows)


def up_tiles(mlp: DenseMlp | RoutedMlp) -> int:
    """Weight units of one expert's gate and up products."""
    return mlp.width // PAIRED_COLUMNS


def _experts(mlp: DenseMlp | RoutedMlp) -> int:
    return mlp.num_experts if isinstance(mlp, RoutedMlp) else 1


def lower_up(ctx: Lowering, layer: int, spec: LayerSpec, x: tuple[int, int], scratch: Scratch) -> None:
    """`hidden = silu(gate x) * (up x)` for every (row, chosen expert)."""
    mlp = spec.mlp
    hidden = ctx.model.hidden_size
    weights = ctx.weights(f"L{layer}.up", _experts(mlp) * up_tiles(mlp), UNIT_ROWS, hidden)
    inputs = [read(slot, whole(ctx.shape(buffer))) for slot, buffer in enumerate(x) if buffer >= 0]
    unit_bytes = UNIT_ROWS * hidden * BF16

    def routed() -> list[Task]:
        assert isinstance(mlp, RoutedMlp)
        shares = ctx.choices.cut.up
        weight = round(expected_experts(mlp, ctx.rows) * up_tiles(mlp) * unit_bytes / shares)
        accesses = (
            read(2, whole(ctx.shape(scratch.router)), When.LOAD),
            read(3, whole(ctx.shape(scratch.row_state)), When.LOAD),
            read(5, whole(ctx.shape(weights)), When.LOAD),
            *inputs,
            write(4, whole(ctx.shape(scratch.hidden)), partitioned=True),
        )
        return [
            Task(accesses, weight, share=share, shares=shares, row_tile_count=ctx.bucket.row_tiles)
            for share in range(shares)
        ]

    def dense() -> list[Task]:
        tasks: list[Task] = []
        for begin, end in deal(up_tiles(mlp), ctx.choices.cut.up):
            columns = ((0, ctx.rows), (0, 1), (begin * PAIRED_COLUMNS, end * PAIRED_COLUMNS))
            load = read(5, ((begin, end), (0, UNIT_ROWS), (0, hidden)), When.LOAD)
            accesses = (load, *inputs, write(4, columns))
            weight = (end - begin) * unit_bytes
            tasks.append(Task(accesses, weight, begin=begin, end=end, row_tile_count=ctx.bucket.row_tiles))
        return tasks

    key = ("up", mlp, x[1] >= 0)
    tasks = ctx.tasks(key, routed if isinstance(mlp, RoutedMlp) else dense)
    router, state = (scratch.router, scratch.row_state) if isinstance(mlp, RoutedMlp) else (ABSENT, ABSENT)
    ctx.add("up", TaskKind.UP, layer, ((*x, router, state), (scratch.hidden,), (weights,)), tasks)


def lower_down(ctx: Lowering, layer: int, spec: LayerSpec, residual: int, out: int, scratch: Scratch) -> None:
    """`out = (residual +) sum over a row's experts of score * hidden W`, by output columns."""
    mlp = spec.mlp
    units = ctx.model.hidden_size // UNIT_ROWS
    weights = ctx.weights(f"L{layer}.down", _experts(mlp) * units, UNIT_ROWS, mlp.width)
    routed = isinstance(mlp, RoutedMlp)

    def cut() -> list[Task]:
        experts = expected_experts(mlp, ctx.rows) if isinstance(mlp, RoutedMlp) else 1.0
        unit_bytes = UNIT_ROWS * mlp.width * BF16
        tasks: list[Task] = []
        for begin, end in deal(units, ctx.choices.cut.down):
            columns = ((0, ctx.rows), (begin * UNIT_ROWS, end * UNIT_ROWS))
            accesses: list[Access] = [read(0, whole(ctx.shape(scratch.hidden)))]
            if routed:
                accesses.append(read(1, whole(ctx.shape(scratch.router)), When.LOAD))
                accesses.append(read(2, whole(ctx.shape(scratch.row_state)), When.LOAD))
            if residual >= 0:
                accesses.append(read(3, columns))
            accesses.append(read(5, whole(ctx.shape(weights)), When.LOAD))
            accesses.append(write(4, columns))
            weight = round((end - begin) * experts * unit_bytes)
            tasks.append(Task(tuple(accesses), weight, begin=begin, end=end, row_tile_count=ctx.bucket.row_tiles))
        return tasks

    tasks = ctx.tasks(("down", mlp, residual >= 0), cut)
    router, state = (scratch.router, scratch.row_state) if routed else (ABSENT, ABSENT)
    ctx.add("down", TaskKind.DOWN, layer, ((scratch.hidden, router, state, residual), (out,), (weights,)), tasks)
