"""The orders that a layer's phases can take, as a few whole numbers that a sampler understands.

The longest chain of operators that must follow each other is the spine. Every other operator, cut into parts, is
given a slot: how many spine segments come before it. A later slot is a later place, so near numbers are near orders,
and every point is legal: a segment is placed at its slot or as soon after it as what it waits for is complete.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from megakernel.tiling import Segment

WHOLE = frozenset({"merge", "route"})
"""Operators that are never cut: they stream next to nothing, so nothing is gained by placing half of one."""

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Orders:
    """Orders of `ops`, of which the first of each of `pairs` comes before the second, cut into at most `parts`."""

    ops: tuple[str, ...]
    pairs: Pairs
    parts: int

    @property
    def spine(self) -> tuple[Segment, ...]:
        """Segments of the longest chain, in its order."""
        chain = _longest_chain(self.ops, self.pairs)
        return tuple(segment for op in chain for segment in self._cut(op))

    @property
    def riders(self) -> tuple[Segment, ...]:
        """Segments that a slot places."""
        chain = _longest_chain(self.ops, self.pairs)
        return tuple(segment for op in self.ops if op not in chain for segment in self._cut(op))

    @property
    def num_slots(self) -> int:
        """Slots of a rider: before the spine, and after each of its segments."""
        return len(self.spine) + 1

    def order(self, slots: Mapping[Segment, int]) -> tuple[str, ...]:
        """The order in which every rider stands at its slot, or as soon after it as it may."""
        spine = self.spine
        wanted = {segment: 2 * idx + 1 for idx, segment in enumerate(spine)}
        wanted |= {segment: 2 * slots[segment] for segment in self.riders}
        done: list[Segment] = []
        left = [*spine, *self.riders]
        while left:
            free = [segment for segment in left if not any(self._precedes(other, segment) for other in left)]
            chosen = min(free, key=lambda segment: (wanted[segment], self.ops.index(segment.op), segment.part))
            done.append(chosen)
            left.remove(chosen)
        return tuple(text for segment in _join(done) for text in (_text(segment),))

    def slots(self, order: Iterable[str]) -> dict[Segment, int]:
        """Slots that give `order`, or one near it when it is cut otherwise; the inverse of `order`."""
        given = [Segment.parse(text) for text in order]
        at = {segment: _position(segment, given) for segment in (*self.spine, *self.riders)}
        return {rider: sum(at[segment] < at[rider] for segment in self.spine) for rider in self.riders}

    def _cut(self, op: str) -> tuple[Segment, ...]:
        parts = 1 if op in WHOLE else self.parts
        return tuple(Segment(op=op, part=part, parts=parts) for part in range(1, parts + 1))

    def _precedes(self, first: Segment, second: Segment) -> bool:
        if first.op == second.op:
            return first.part < second.part
        return (first.op, second.op) in self.pairs


@cache
def _longest_chain(ops: tuple[str, ...], pairs: Pairs) -> tuple[str, ...]:
    def chains(op: str) -> list[tuple[str, ...]]:
        return [(op, *rest) for first, second in pairs if first == op for rest in chains(second)] or [(op,)]

    return max((chain for op in ops for chain in chains(op)), key=len)


def _join(segments: list[Segment]) -> list[Segment]:
    """Parts that stand side by side are the operator itself."""
    joined: list[Segment] = []
    idx = 0
    while idx < len(segments):
        segment = segments[idx]
        run = segments[idx : idx + segment.parts]
        if segment.part == 1 and [(each.op, each.part) for each in run] == [
            (segment.op, part) for part in range(1, segment.parts + 1)
        ]:
            joined.append(Segment(op=segment.op))
            idx += segment.parts
        else:
            joined.append(segment)
            idx += 1
    return joined


def _position(segment: Segment, order: list[Segment]) -> int:
    """Where the middle of `segment` stands; an operator that `order` doesn't place stands first."""
    middle = (segment.part - 0.5) / segment.parts
    for idx, other in enumerate(order):
        if other.op == segment.op and other.part - 1 <= middle * other.parts <= other.part:
            return idx
    return -1


def _text(segment: Segment) -> str:
    return segment.op if segment.parts == 1 else f"{segment.op}:{segment.part}/{segment.parts}"
