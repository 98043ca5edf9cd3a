"""What an SM can be asked to do, and which path of a layer each operator belongs to.

A kind is the unit of extension: its declaration here, one function in `lowering/`, one header in `csrc/tasks`,
one reference function in `runtime/reference`, one parity case.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class TaskKind(IntEnum):
    """Numbers are the ABI: append, never renumber."""

    EMBED = 1
    PROJECT = 2
    ATTEND = 3
    MERGE = 4
    OUTPUT = 5
    UP = 6
    DOWN = 7
    HEAD = 8
    SAMPLE = 9


class Path(StrEnum):
    """Independent chains inside a layer; the trunk is what both of them meet in."""

    TRUNK = "trunk"
    ATTENTION = "attention"
    MLP = "mlp"


@dataclass(frozen=True)
class KindInfo:
    """Declaration of a kind.

    `hold_copies` is how many ring stages a run keeps before it gives the first one back: a product consumes copy
    by copy, attention keeps a piece of K until the matching piece of V is used.
    """

    path: Path
    summary: str
    hold_copies: int = 1


KINDS: dict[TaskKind, KindInfo] = {
    TaskKind.EMBED: KindInfo(Path.TRUNK, "gathers the embedding rows of the step's tokens", 0),
    TaskKind.PROJECT: KindInfo(Path.TRUNK, "norm, then router rows (published early) and Q, K, V rows"),
    TaskKind.ATTEND: KindInfo(Path.ATTENTION, "RoPE, partial attention over chunks of old KV, append of new KV", 2),
    TaskKind.MERGE: KindInfo(Path.ATTENTION, "merges the chunks' partial results of whole query heads", 0),
    TaskKind.OUTPUT: KindInfo(Path.ATTENTION, "output projection and residual sum"),
    TaskKind.UP: KindInfo(Path.MLP, "norm, gate and up products and their activation, of routed experts or dense"),
    TaskKind.DOWN: KindInfo(Path.MLP, "down product summed over a row's experts, by output columns"),
    TaskKind.HEAD: KindInfo(Path.TRUNK, "final norm, logits and each tile's best logit"),
    TaskKind.SAMPLE: KindInfo(Path.TRUNK, "next token of a tile of rows, and the new positions", 0),
}
