"""The values worth trying for each choice, drawn from the model, the bucket, the chip and `limits`.

Owns the lists: whole waves of SMs, whole units of the stored tile, rings that fit. A choice that acts only beside
others says beside which. Values that the search file gives replace what is derived. `space.py` turns them into choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from megakernel import limits
from megakernel.hardware import HardwareSpec
from megakernel.lowering.mlp import max_experts, up_tiles
from megakernel.model import ModelSpec, RoutedMlp
from megakernel.tiling import MAX_TASKS, TILE_COLUMNS, UNIT_ROWS, Choices, Cut, Interleave, Ring, Rounding
from megakernel.workload import Bucket
from megakernel.workspace import CONSUMER_WARPS, chunk_pieces, least_copy_bytes, products, slice_bytes
from tuner.orders import WHOLE
from tuner.search_config import SpaceValues

Value = int | str | bool

KIB = 1024
MOST_WAVES = 4
"""Tasks of a layer's operator: at most this many per SM."""

MOST_HEAD_WAVES = 32
"""The same for the head, which is longer than any layer's operator by far."""

LEAST_SHARE = 4
"""Operators that stream are cut for at least this share of the SMs: fewer can't draw what the memory gives."""

SPACING = 1.15
"""Task counts closer than this ratio say the same."""

RING_STEP_KIB = 16
CAPS_KIB = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160)
TWELFTHS = 12
"""Groups of SMs are tried in this many steps."""

NO_CAP = 2**31
"""No cap, as a number that grows with what may be in flight."""

ROUTER = "interleave.router_with_project"

PROBE = Choices(
    cut=Cut(project=1, attend=1, merge=1, output=1, up=1, down=MAX_TASKS, head=1),
    ring=Ring(copy_bytes=KIB, stages=2),
    interleave=Interleave(order=("project",)),
)
"""Some choices, to ask `limits` with."""


@dataclass(frozen=True)
class Dimension:
    """One choice: its values, and whether near indices mean near values.

    With `needs`, a choice and some of its values, this one acts only where that choice takes one of them.
    """

    name: str
    values: tuple[Value, ...]
    is_ordered: bool = True
    needs: tuple[str, tuple[Value, ...]] | None = None

    def index_of(self, value: Value) -> int:
        """Index of `value`; of the next larger number, or the largest, where it is none of the values."""
        if value in self.values:
            return self.values.index(value)
        if not self.is_ordered:
            return 0
        wanted = int(value)
        numbers = [int(each) for each in self.values]
        return min(range(len(numbers)), key=lambda idx: (numbers[idx] < wanted, abs(numbers[idx] - wanted)))


@dataclass(frozen=True)
class Values:
    """What one bucket's choices may be; with `settled`, those that change rounding are."""

    model: ModelSpec
    bucket: Bucket
    chip: HardwareSpec
    given: SpaceValues
    settled: Rounding | None = None

    def dimensions(self) -> Iterator[Dimension]:
        """Every dimension but the order's; one that another needs comes before it."""
        yield from self._rounding()
        yield from self._interleave()
        yield from self._cuts()
        yield from self._ring()

    @property
    def joins(self) -> tuple[bool, ...]:
        """Whether the router may run with the projection."""
        has_route = any(isinstance(layer.mlp, RoutedMlp) for layer in self.model.layers)
        if has_route and self.model.block == "parallel":
            return self.given.interleave.router_with_project
        return (not has_route,)

    def roundings(self) -> tuple[Rounding, ...]:
        """All roundings that the lists allow; the settled one alone, where there is one."""
        if self.settled is not None:
            return (self.settled,)
        given = self.given.rounding
        splits = [n for n in given.project_k_splits if self.model.hidden_size % (n * TILE_COLUMNS) == 0]
        found = [
            Rounding(project_k_splits=each, slice_columns=columns, page_tokens=given.page_tokens)
            for each, columns in product(splits or given.project_k_splits, given.slice_columns)
        ]
        chunks = [
            tokens
            for tokens in given.chunk_tokens
            if tokens % given.page_tokens == 0 and all(self._shares_warps(each, tokens) for each in found)
        ]
        return tuple(
            each.model_copy(update={"chunk_tokens": tokens})
            for each, tokens in product(found, chunks or given.chunk_tokens)
        )

    def copies(self, rounding: Rounding) -> tuple[int, ...]:
        """Copy sizes of the list that are whole slices of every product."""
        slices = [slice_bytes(columns, rounding) for columns in products(self.model, rounding).values()]
        least = least_copy_bytes(self.model, rounding)
        listed = self.given.ring.copy_bytes
        found = [size for size in listed if size >= least and not any(size % each for each in slices)]
        return tuple(sorted(found or listed))  # if none is, to be refused by name

    def _rounding(self) -> Iterator[Dimension]:
        if self.settled is None:
            for name in ("chunk_tokens", "project_k_splits", "slice_columns"):
                yield ordered(f"rounding.{name}", (getattr(each, name) for each in self.roundings()))

    def _interleave(self) -> Iterator[Dimension]:
        given, num_sms = self.given.interleave, self.chip.num_sms
        groups = given.attention_sms or tuple(num_sms * part // TWELFTHS for part in range(TWELFTHS))
        yield Dimension(ROUTER, self.joins, is_ordered=False)
        yield Dimension("interleave.policy", given.policy, is_ordered=False)
        # Groups are the balanced policy's; takeover acts between groups.
        yield ordered("interleave.attention_sms", groups, needs=("interleave.policy", ("balanced",)))
        grouped = tuple(each for each in sorted(set(groups)) if each)
        yield ordered(
            "interleave.takeover_percent", given.takeover_percent, needs=("interleave.attention_sms", grouped)
        )
        yield Dimension("interleave.loads", given.loads, is_ordered=False)
        most = {loads: limits.most_words(_with_loads(loads)) for loads in given.loads}
        several = tuple(loads for loads in given.loads if most[loads] > 1)
        words = [each for each in self.given.counters.words if each <= max(most.values())]
        yield ordered("counters.words", words or (1,), needs=("interleave.loads", several))

    def _cuts(self) -> Iterator[Dimension]:
        for op, units in _units(self.model, self.bucket).items():
            least = 1 if op in WHOLE else self.chip.num_sms // LEAST_SHARE
            most = self.chip.num_sms * (MOST_HEAD_WAVES if op == "head" else MOST_WAVES)
            counts = getattr(self.given.cut, op) or task_counts(units, self.chip.num_sms, least, most)
            yield ordered(f"cut.{op}", counts, needs=(ROUTER, (False,)) if op == "route" else None)

    def _ring(self) -> Iterator[Dimension]:
        given = self.given.ring
        roundings = self.roundings()
        pairs = [(rounding, size) for rounding in roundings for size in self.copies(rounding)]
        copies = {size for _, size in pairs}
        free = max(self._most_ring_bytes(size, rounding) for rounding, size in pairs)
        # The smallest ring of every copy size is a value of its own: shorter wishes are lengthened to it.
        held = {limits.least_stages(self.model, rounding, size) * size for rounding, size in pairs}
        caps = given.in_flight_cap_bytes or (*(each * KIB for each in CAPS_KIB), 0)
        yield ordered("ring.copy_bytes", copies)
        step = RING_STEP_KIB * KIB
        sizes = (*(each for each in held if each < free), *range(-(-min(held) // step) * step, free, step), free)
        yield ordered("ring.ring_bytes", given.ring_bytes or sizes)
        yield ordered("ring.in_flight_cap_bytes", (each or NO_CAP for each in caps))

    def _shares_warps(self, rounding: Rounding, chunk_tokens: int) -> bool:
        """Whether warps can share out the pieces of a chunk, whatever the copies."""
        chunk = rounding.model_copy(update={"chunk_tokens": chunk_tokens})
        return all(CONSUMER_WARPS % chunk_pieces(self.model, chunk, copy) == 0 for copy in self.copies(rounding))

    def _most_ring_bytes(self, copy_bytes: int, rounding: Rounding) -> int:
        """Bytes of the largest ring of such copies, whatever else is chosen."""
        ring = Ring(copy_bytes=copy_bytes, stages=limits.least_stages(self.model, rounding, copy_bytes))
        probe = PROBE.model_copy(update={"ring": ring, "rounding": rounding})
        return limits.most_stages(self.model, self.bucket, probe, self.chip) * copy_bytes


def _with_loads(loads: str) -> Choices:
    return PROBE.model_copy(update={"interleave": PROBE.interleave.model_copy(update={"loads": loads})})


def ordered(name: str, values: Iterable[int], needs: tuple[str, tuple[Value, ...]] | None = None) -> Dimension:
    """A dimension of numbers, smallest first, each once."""
    return Dimension(name, tuple(sorted(set(values))), needs=needs)


def task_counts(units: int, num_sms: int, least: int, most: int) -> tuple[int, ...]:
    """Numbers of tasks worth trying: whole waves of SMs, and cuts into equal numbers of whole units, well apart."""
    most = min(units, most)
    doubled = [num_sms * 2**power for power in range(most.bit_length())]
    waves = range(num_sms, most + 1, num_sms)
    equal = sorted({-(-units // each) for each in range(1, units + 1)}, reverse=True)
    kept: list[int] = []
    for count in (*doubled, *waves, *equal):
        if min(least, most) <= count <= most and all(max(count, each) >= SPACING * min(count, each) for each in kept):
            kept.append(count)
    return tuple(sorted(kept))


def _units(model: ModelSpec, bucket: Bucket) -> dict[str, int]:
    """Whole units of every operator in the bucket's nominal state, the largest layer's."""
    mlps = [layer.mlp for layer in model.layers]
    routed = [mlp for mlp in mlps if isinstance(mlp, RoutedMlp)]
    tiles = [up_tiles(mlp) * max_experts(mlp, bucket.rows) for mlp in routed]
    columns = model.hidden_size // UNIT_ROWS
    chunks = -(-bucket.nominal_context_tokens // Rounding().page_tokens)
    units = {
        "project": (model.q_size + 2 * model.kv_size) // UNIT_ROWS,
        "attend": chunks * bucket.rows * model.num_kv_heads,
        "merge": bucket.rows * model.num_heads,
        "output": columns,
        "up": max(tiles + [up_tiles(mlp) for mlp in mlps]),
        "down": columns,
        "head": model.vocab_size // UNIT_ROWS,
        "route": max((mlp.num_experts for mlp in routed), default=1),
    }
    return {op: max(count, 1) for op, count in units.items()}
