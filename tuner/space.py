"""The search space: every choice of a plan as an index into a short list of values, and back to `Choices`.

Owns which values are worth trying, drawn from the model, the chip and `limits`, so that nearly every point is legal by
construction. Refuses to score, and knows nothing of samplers: a point is a number per dimension. Used by `study.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from megakernel import limits
from megakernel.hardware import HardwareSpec
from megakernel.lowering.mlp import max_experts, up_tiles
from megakernel.model import ModelSpec, RoutedMlp
from megakernel.tiling import MAX_TASKS, TILE_COLUMNS, UNIT_ROWS, Choices, Cut, Interleave, Ring, Rounding, Segment
from megakernel.workload import Bucket
from megakernel.workspace import CONSUMER_WARPS, chunk_pieces, least_copy_bytes, products, slice_bytes
from tuner.orders import WHOLE, Orders
from tuner.search_config import SpaceValues

Point = dict[str, int]
"""Index of the value of every dimension."""

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


@dataclass(frozen=True)
class Dimension:
    """One choice: its values, and whether near indices mean near values."""

    name: str
    values: tuple[Value, ...]
    is_ordered: bool = True

    def index_of(self, value: Value) -> int:
        """Index of `value`; of the next larger number, or the largest, where it is none of the values."""
        if value in self.values:
            return self.values.index(value)
        if not self.is_ordered:
            return 0
        wanted = int(value)
        numbers = [int(each) for each in self.values]
        return min(range(len(numbers)), key=lambda idx: (numbers[idx] < wanted, abs(numbers[idx] - wanted)))


class Space:
    """All choices of one bucket; with `rounding` given, those that change rounding are settled."""

    def __init__(
        self,
        model: ModelSpec,
        bucket: Bucket,
        chip: HardwareSpec,
        values: SpaceValues,
        rounding: Rounding | None = None,
    ) -> None:
        """Draw the values that `values` leaves open from the model, the bucket and the chip."""
        self._rounding = rounding
        self._model, self._bucket, self._chip = model, bucket, chip
        self._page_tokens = values.rounding.page_tokens
        self._has_route = any(isinstance(layer.mlp, RoutedMlp) for layer in model.layers)
        self._joins_route = self._has_route and model.block == "parallel"
        self._orders = {
            joined: _orders(model, joined=joined, parts=values.interleave.parts) for joined in (True, False)
        }
        self._by_name = {each.name: each for each in self._dimensions(model, bucket, chip, values)}

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """All dimensions, those with a single value included."""
        return tuple(self._by_name.values())

    def choices(self, point: Mapping[str, int]) -> Choices:
        """The choices that `point` means; values that don't act together are brought to one form."""

        def at(name: str) -> Value:
            dimension = self._by_name[name]
            return dimension.values[point.get(name, 0)]

        def number(name: str) -> int:
            return int(at(name))

        interleave = self._interleave_of(at)
        counts = {op: number(f"cut.{op}") for op in Cut.model_fields}
        if interleave.router_with_project:  # then nothing is cut by it
            del counts["route"]
        cut = Cut.model_validate(counts)
        choices = None
        for rounding in self._roundings_of(number):
            least = limits.least_stages(self._model, rounding, number("ring.copy_bytes"))
            choices = Choices(rounding=rounding, cut=cut, ring=_ring_of(number, least), interleave=interleave)
            fits = limits.most_stages(self._model, self._bucket, choices, self._chip)
            if fits >= choices.ring.stages:
                break
            if fits >= least:
                return choices.model_copy(update={"ring": _ring_of(number, least, most_stages=fits)})
        assert choices is not None
        return choices

    def nearest(self, choices: Choices) -> Point:
        """The point that means `choices`, or is near it where the space has no such value."""
        ring, rounding, interleave = choices.ring, choices.rounding, choices.interleave
        wanted: dict[str, Value] = {f"cut.{op}": getattr(choices.cut, op) for op in Cut.model_fields}
        wanted |= {
            "ring.copy_bytes": ring.copy_bytes,
            "ring.ring_bytes": ring.bytes,
            "ring.in_flight_cap_bytes": _cap_value(ring.in_flight_cap_bytes),
            "rounding.chunk_tokens": rounding.chunk_tokens,
            "rounding.project_k_splits": rounding.project_k_splits,
            "interleave.policy": interleave.policy,
            "interleave.loads": interleave.loads,
            "interleave.attention_sms": interleave.attention_sms or 0,
            "interleave.takeover_percent": interleave.takeover_percent,
            "interleave.router_with_project": interleave.router_with_project,
        }
        orders = self._orders[interleave.router_with_project]
        wanted |= {_slot_name(segment): slot for segment, slot in orders.slots(interleave.order).items()}
        return {name: dimension.index_of(wanted.get(name, 0)) for name, dimension in self._by_name.items()}

    def _roundings_of(self, number: Callable[[str], int]) -> Iterator[Rounding]:
        """What the point means, and then shorter chunks, for rings that can't hold one of that length."""
        if self._rounding is not None:
            yield self._rounding
            return
        wanted = number("rounding.chunk_tokens")
        splits = number("rounding.project_k_splits")
        for chunk in sorted(self._by_name["rounding.chunk_tokens"].values, reverse=True):
            if int(chunk) <= wanted:
                yield Rounding(chunk_tokens=int(chunk), project_k_splits=splits, page_tokens=self._page_tokens)

    def _interleave_of(self, at: Callable[[str], Value]) -> Interleave:
        joined = bool(at("interleave.router_with_project"))
        orders = self._orders[joined]
        slots = {rider: int(at(_slot_name(rider))) for rider in orders.riders}
        policy, loads = at("interleave.policy"), at("interleave.loads")
        # Groups are the balanced policy's; takeover acts between groups.
        sms = int(at("interleave.attention_sms")) if policy == "balanced" else 0
        return Interleave.model_validate(
            {
                "order": orders.order(slots),
                "policy": policy,
                "loads": loads,
                "attention_sms": sms or None,
                "takeover_percent": at("interleave.takeover_percent") if sms else 0,
                "router_with_project": joined,
            }
        )

    def _dimensions(
        self, model: ModelSpec, bucket: Bucket, chip: HardwareSpec, values: SpaceValues
    ) -> Iterable[Dimension]:
        for op, units in _units(model, bucket).items():
            least = 1 if op in WHOLE else chip.num_sms // LEAST_SHARE
            most = chip.num_sms * (MOST_HEAD_WAVES if op == "head" else MOST_WAVES)
            counts = getattr(values.cut, op) or task_counts(units, chip.num_sms, least, most)
            yield _ordered(f"cut.{op}", counts)
        ring = values.ring
        rounding = self._rounding or Rounding(page_tokens=self._page_tokens)
        slices = [slice_bytes(columns, rounding) for columns in products(model, rounding).values()]
        copies = [
            size
            for size in ring.copy_bytes
            if size >= least_copy_bytes(model, rounding) and not any(size % each for each in slices)
        ]
        copies = copies or list(ring.copy_bytes)  # to be refused by name
        free = max(_most_ring_bytes(model, bucket, chip, size, rounding) for size in copies)
        least = min(max(limits.least_stages(model, rounding, size) * size for size in copies), free)
        caps = ring.in_flight_cap_bytes or (*(each * KIB for each in CAPS_KIB), 0)
        yield _ordered("ring.copy_bytes", copies)
        yield _ordered("ring.ring_bytes", ring.ring_bytes or (*range(least, free, RING_STEP_KIB * KIB), free))
        yield _ordered("ring.in_flight_cap_bytes", (_cap_value(each or None) for each in caps))
        if self._rounding is None:
            splits = [n for n in values.rounding.project_k_splits if model.hidden_size % (n * TILE_COLUMNS) == 0]
            chunks = [
                size
                for size in values.rounding.chunk_tokens
                if size % self._page_tokens == 0 and all(_shares_warps(model, rounding, size, copy) for copy in copies)
            ]
            yield _ordered("rounding.chunk_tokens", chunks or values.rounding.chunk_tokens)
            yield _ordered("rounding.project_k_splits", splits or values.rounding.project_k_splits)
        interleave = values.interleave
        groups = (chip.num_sms * part // TWELFTHS for part in range(TWELFTHS))
        yield Dimension("interleave.policy", interleave.policy, is_ordered=False)
        yield Dimension("interleave.loads", interleave.loads, is_ordered=False)
        yield _ordered("interleave.attention_sms", interleave.attention_sms or groups)
        yield _ordered("interleave.takeover_percent", interleave.takeover_percent)
        joins = interleave.router_with_project if self._joins_route else (not self._has_route,)
        yield Dimension("interleave.router_with_project", joins, is_ordered=False)
        slots = {rider: self._orders[joined].num_slots for joined in joins for rider in self._orders[joined].riders}
        for rider, num_slots in slots.items():
            yield _ordered(_slot_name(rider), range(num_slots))


def _ordered(name: str, values: Iterable[int]) -> Dimension:
    return Dimension(name, tuple(sorted(set(values))))


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


def _shares_warps(model: ModelSpec, rounding: Rounding, chunk_tokens: int, copy_bytes: int) -> bool:
    """Whether warps can share out the pieces that such copies cut a chunk into."""
    chunk = rounding.model_copy(update={"chunk_tokens": chunk_tokens})
    return CONSUMER_WARPS % chunk_pieces(model, chunk, copy_bytes) == 0


def _most_ring_bytes(model: ModelSpec, bucket: Bucket, chip: HardwareSpec, copy_bytes: int, rounding: Rounding) -> int:
    """Bytes of the largest ring of such copies, whatever else is chosen."""
    ring = Ring(copy_bytes=copy_bytes, stages=limits.least_stages(model, rounding, copy_bytes))
    probe = PROBE.model_copy(update={"ring": ring, "rounding": rounding})
    return limits.most_stages(model, bucket, probe, chip) * copy_bytes


def _orders(model: ModelSpec, *, joined: bool, parts: int) -> Orders:
    """Orders of a layer whose router runs with the projection, or by itself."""
    interleave = Interleave(order=("project",), router_with_project=joined)
    probe = PROBE.model_copy(update={"interleave": interleave})
    return Orders(limits.layer_ops(model, probe), limits.order_pairs(model, probe), parts)


PROBE = Choices(
    cut=Cut(project=1, attend=1, merge=1, output=1, up=1, down=MAX_TASKS, head=1),
    ring=Ring(copy_bytes=KIB, stages=2),
    interleave=Interleave(order=("project",)),
)
"""Some choices, to ask `limits` with."""


def _ring_of(number: Callable[[str], int], least_stages: int, most_stages: int = MAX_TASKS) -> Ring:
    copy, size = number("ring.copy_bytes"), number("ring.ring_bytes")
    stages = min(max(size // copy, least_stages), most_stages)
    cap = number("ring.in_flight_cap_bytes")
    copies = max(cap // copy, 1)
    return Ring(copy_bytes=copy, stages=stages, in_flight_cap_bytes=copies * copy if copies < stages else None)


def _cap_value(cap_bytes: int | None) -> int:
    """A cap as a number that grows with what may be in flight."""
    return cap_bytes or NO_CAP


NO_CAP = 2**31


def _slot_name(segment: Segment) -> str:
    return f"order.{segment.op}.{segment.part}"
