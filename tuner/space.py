"""The search space: every choice of a plan as an index into a short list of values, and back to `Choices`.

Owns the way from a point to choices and back, so that nearly every point is legal by construction, and which
dimensions act in a point. Refuses to score, and knows nothing of samplers: a point is a number per dimension that acts.
Values come from `values.py`. Used by `study.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from megakernel import limits
from megakernel.hardware import HardwareSpec
from megakernel.model import ModelSpec
from megakernel.tiling import MAX_TASKS, Choices, Counters, Cut, Interleave, Ring, Rounding, Segment
from megakernel.workload import Bucket
from tuner.orders import Orders
from tuner.search_config import SpaceValues
from tuner.values import NO_CAP, PROBE, ROUTER, Dimension, Value, Values, ordered

Point = dict[str, int]
"""Index of the value of every dimension that acts."""


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
        self._values = Values(model, bucket, chip, values, rounding)
        self._orders = {
            joined: _orders(model, joined=joined, parts=values.interleave.parts) for joined in (True, False)
        }
        self._by_name = {each.name: each for each in (*self._values.dimensions(), *self._order_dimensions())}
        self._copies = {each: self._values.copies(each) for each in self._values.roundings()}

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """All dimensions, those with a single value included."""
        return tuple(self._by_name.values())

    @property
    def roundings(self) -> tuple[Rounding, ...]:
        """All roundings of the space."""
        return tuple(self._copies)

    def acts(self, dimension: Dimension, point: Mapping[str, int]) -> bool:
        """Whether `dimension` changes the choices that `point` means, as far as the dimensions before it say."""
        if dimension.needs is None:
            return True
        name, values = dimension.needs
        parent = self._by_name[name]
        return self.acts(parent, point) and parent.values[point.get(name, 0)] in values

    def acting(self, point: Mapping[str, int]) -> Point:
        """`point` without what does not act in it; what acts and is missing takes its first value."""
        return {each.name: point.get(each.name, 0) for each in self.dimensions if self.acts(each, point)}

    def choices(self, point: Mapping[str, int]) -> Choices:
        """The choices that `point` means; values that don't go together are brought to the nearest that do."""
        acting = self.acting(point)

        def at(name: str) -> Value:
            return self._by_name[name].values[acting[name]]

        def number(name: str) -> int:
            return int(at(name)) if name in acting else 0

        cut = Cut.model_validate({op: number(f"cut.{op}") for op in Cut.model_fields if f"cut.{op}" in acting})
        interleave = self._interleave_of(at, number)
        counters = Counters(words=number("counters.words") or 1)
        model, bucket, chip = self._values.model, self._values.bucket, self._values.chip
        choices = None
        for rounding in self._roundings_of(number):
            copies = self._copies[rounding]
            copy = max((each for each in copies if each <= number("ring.copy_bytes")), default=copies[0])
            least = limits.least_stages(model, rounding, copy)
            ring = _ring_of(copy, number, least)
            choices = Choices(rounding=rounding, cut=cut, ring=ring, interleave=interleave, counters=counters)
            fits = limits.most_stages(model, bucket, choices, chip)
            if fits >= ring.stages:
                break
            if fits >= least:
                return choices.model_copy(update={"ring": _ring_of(copy, number, least, most_stages=fits)})
        assert choices is not None
        return choices

    def nearest(self, choices: Choices) -> Point:
        """The point that means `choices`, or is near it where the space has no such value."""
        ring, rounding, interleave = choices.ring, choices.rounding, choices.interleave
        wanted: dict[str, Value] = {f"cut.{op}": getattr(choices.cut, op) for op in Cut.model_fields}
        wanted |= {
            "ring.copy_bytes": ring.copy_bytes,
            "ring.ring_bytes": ring.bytes,
            "ring.in_flight_cap_bytes": ring.in_flight_cap_bytes or NO_CAP,
            "rounding.chunk_tokens": rounding.chunk_tokens,
            "rounding.project_k_splits": rounding.project_k_splits,
            "rounding.slice_columns": rounding.slice_columns,
            "interleave.policy": interleave.policy,
            "interleave.loads": interleave.loads,
            "interleave.attention_sms": interleave.attention_sms or 0,
            "interleave.takeover_percent": interleave.takeover_percent,
            ROUTER: interleave.router_with_project,
            "counters.words": choices.counters.words,
        }
        orders = self._orders[interleave.router_with_project]
        wanted |= {_slot_name(segment): slot for segment, slot in orders.slots(interleave.order).items()}
        return self.acting({name: each.index_of(wanted.get(name, 0)) for name, each in self._by_name.items()})

    def _roundings_of(self, number: Callable[[str], int]) -> Iterator[Rounding]:
        """What the point means, and then shorter chunks, for rings that can't hold one of that length."""
        if self._values.settled is not None:
            yield self._values.settled
            return
        wanted = number("rounding.chunk_tokens")
        for chunk in sorted(map(int, self._by_name["rounding.chunk_tokens"].values), reverse=True):
            if chunk <= wanted:
                yield Rounding(
                    chunk_tokens=chunk,
                    project_k_splits=number("rounding.project_k_splits"),
                    page_tokens=self._values.given.rounding.page_tokens,
                    slice_columns=number("rounding.slice_columns"),
                )

    def _interleave_of(self, at: Callable[[str], Value], number: Callable[[str], int]) -> Interleave:
        joined = bool(at(ROUTER))
        orders = self._orders[joined]
        return Interleave.model_validate(
            {
                "order": orders.order({rider: number(_slot_name(rider)) for rider in orders.riders}),
                "policy": at("interleave.policy"),
                "loads": at("interleave.loads"),
                "attention_sms": number("interleave.attention_sms") or None,
                "takeover_percent": number("interleave.takeover_percent"),
                "router_with_project": joined,
            }
        )

    def _order_dimensions(self) -> Iterator[Dimension]:
        joins = self._values.joins
        riders = {rider: self._orders[joined].num_slots for joined in joins for rider in self._orders[joined].riders}
        for rider, num_slots in riders.items():
            riding = tuple(joined for joined in joins if rider in self._orders[joined].riders)
            yield ordered(_slot_name(rider), range(num_slots), needs=None if riding == joins else (ROUTER, riding))


def _orders(model: ModelSpec, *, joined: bool, parts: int) -> Orders:
    """Orders of a layer whose router runs with the projection, or by itself."""
    interleave = Interleave(order=("project",), router_with_project=joined)
    probe = PROBE.model_copy(update={"interleave": interleave})
    return Orders(limits.layer_ops(model, probe), limits.order_pairs(model, probe), parts)


def _ring_of(copy: int, number: Callable[[str], int], least_stages: int, most_stages: int = MAX_TASKS) -> Ring:
    stages = min(max(number("ring.ring_bytes") // copy, least_stages), most_stages)
    copies = max(number("ring.in_flight_cap_bytes") // copy, 1)
    return Ring(copy_bytes=copy, stages=stages, in_flight_cap_bytes=copies * copy if copies < stages else None)


def _slot_name(segment: Segment) -> str:
    return f"order.{segment.op}.{segment.part}"
