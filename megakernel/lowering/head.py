"""Ends of a step: embedding of the step's tokens, logits, and the choice of the next token."""

from __future__ import annotations

from megakernel.abi import BEST_WORDS
from megakernel.graph import Task, When
from megakernel.kinds import TaskKind
from megakernel.lowering.context import BF16, FP32, Lowering, read, whole, write
from megakernel.tiling import UNIT_ROWS, deal


def lower_embed(ctx: Lowering, tokens: int, embedding: int, out: int) -> None:
    """Residual of the first layer, one task a tile of rows."""
    hidden = ctx.model.hidden_size

    def cut() -> list[Task]:
        tasks: list[Task] = []
        for tile in range(ctx.bucket.row_tiles):
            rows = ctx.row_tile(tile)
            accesses = (
                read(0, (rows,)),
                read(2, whole(ctx.shape(embedding))),
                write(1, (rows, (0, hidden))),
            )
            tasks.append(Task(accesses, (rows[1] - rows[0]) * hidden * BF16, row_tile_begin=tile))
        return tasks

    ctx.add("embed", TaskKind.EMBED, -1, ((tokens,), (out,), (embedding,)), ctx.tasks("embed", cut))


def lower_head(ctx: Lowering, x: tuple[int, int], weights: int, logits: int, best: int, row_state: int) -> None:
    """Logits by columns; each task also leaves its best draw and its best logit, with their tokens, per row."""
    hidden = ctx.model.hidden_size
    ranges = deal(ctx.model.vocab_size // UNIT_ROWS, ctx.choices.cut.head)

    def cut() -> list[Task]:
        tasks: list[Task] = []
        for task, (begin, end) in enumerate(ranges):
            rows = (0, ctx.rows)
            accesses = [read(slot, whole(ctx.shape(buffer))) for slot, buffer in enumerate(x) if buffer >= 0]
            accesses.append(read(4, ((begin * UNIT_ROWS, end * UNIT_ROWS), (0, hidden)), When.LOAD))
            accesses.append(write(2, (rows, (begin * UNIT_ROWS, end * UNIT_ROWS))))
            accesses.append(write(3, (rows, (task, task + 1), (0, BEST_WORDS))))
            accesses.append(read(5, (rows,)))
            weight = (end - begin) * UNIT_ROWS * hidden * BF16
            tasks.append(
                Task(
                    tuple(accesses),
                    weight,
                    begin=begin,
                    end=end,
                    share=task,
                    shares=len(ranges),
                    row_tile_count=ctx.bucket.row_tiles,
                )
            )
        return tasks

    ctx.add("head", TaskKind.HEAD, -1, (x, (logits, best), (weights, row_state)), ctx.tasks("head", cut))


def lower_sample(ctx: Lowering, logits: int, best: int, row_state: int, tokens: int) -> None:
    """Next token and position of every row of a tile. Only rows that filter their tokens read logits."""

    def cut() -> list[Task]:
        tasks: list[Task] = []
        for tile in range(ctx.bucket.row_tiles):
            rows = ctx.row_tile(tile)
            accesses = (
                read(0, (rows, (0, ctx.model.vocab_size))),
                read(1, (rows, *whole(ctx.shape(best))[1:])),
                read(2, (rows,)),
                write(3, (rows,)),
                write(2, (rows,)),
            )
            shares = ctx.shape(best)[1]
            tasks.append(Task(accesses, (rows[1] - rows[0]) * shares * BEST_WORDS * FP32, row_tile_begin=tile))
        return tasks

    slots = ((logits, best, row_state), (tokens,), ())
    ctx.add("sample", TaskKind.SAMPLE, -1, slots, ctx.tasks("sample", cut))
