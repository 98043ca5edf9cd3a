"""The search space: every point means legal choices, and every legal order is some point's."""

import itertools
import random

import pytest
from support import north, predicting, small

from megakernel import limits
from megakernel.build import build_step
from megakernel.tiling import Rounding, Segment
from megakernel.verify import verify
from megakernel.workload import Bucket
from tuner.orders import WHOLE, Orders
from tuner.problem import baselines
from tuner.search_config import CutValues, InterleaveValues, RoundingValues, SpaceValues
from tuner.space import Space
from tuner.values import task_counts

WIDE = Bucket(rows=8, max_context_tokens=16384, nominal_context_tokens=8192)


def random_point(space: Space, rng: random.Random) -> dict[str, int]:
    return {each.name: rng.randrange(len(each.values)) for each in space.dimensions}


@pytest.mark.parametrize("model", [north.model, predicting.qwen, small.model], ids=["north", "qwen", "small"])
@pytest.mark.parametrize("rows", [1, 8])
def test_every_point_is_legal_and_found_again(model, rows, record_property):
    bucket = Bucket(rows=rows, max_context_tokens=4096, nominal_context_tokens=2048)
    space = Space(model(), bucket, north.chip(), SpaceValues())
    rng = random.Random(rows)
    sampled = [space.choices(random_point(space, rng)) for _ in range(300)]
    legal = [choices for choices in sampled if not limits.reasons(model(), bucket, choices, north.chip())]
    record_property("legal_fraction", len(legal) / len(sampled))
    assert len(legal) == len(sampled)
    for choices in sampled:
        assert space.choices(space.nearest(choices)) == choices


def test_sampled_choices_pass_verify():
    bucket = Bucket(rows=2, max_context_tokens=2048, nominal_context_tokens=1024)
    space = Space(small.model(), bucket, small.chip(), SpaceValues(cut=CutValues(head=(132, 264))))
    rng = random.Random(5)
    for _ in range(10):
        step = build_step(small.model(), bucket, space.choices(random_point(space, rng)), small.chip())
        assert verify(step.graph, step.table) == []


def legal_orders(orders: Orders) -> set[tuple[str, ...]]:
    """Every order of the operators and their halves that keeps the pairs, by trying all; whole where halves meet."""
    found = set()
    cuttable = [op for op in orders.ops if op not in WHOLE]
    for cut in itertools.product((1, 2), repeat=len(cuttable)):
        parts = dict(zip(cuttable, cut, strict=True))
        texts = [
            f"{op}:{part}/2" if parts.get(op, 1) == 2 else op
            for op in orders.ops
            for part in range(1, parts.get(op, 1) + 1)
        ]
        found |= set(extensions((), tuple(texts), orders.pairs))
    return {
        order
        for order in found
        if not any(a.endswith(":1/2") and b == a[:-3] + "2/2" for a, b in itertools.pairwise(order))
    }


def extensions(done, left, pairs):
    if not left:
        yield done
    for text in left:
        segment = Segment.parse(text)
        others = [Segment.parse(each) for each in left if each != text]
        blocked = any(
            (other.op, segment.op) in pairs or (other.op == segment.op and other.part < segment.part)
            for other in others
        )
        if not blocked:
            yield from extensions((*done, text), tuple(each for each in left if each != text), pairs)


@pytest.mark.parametrize("joined", [True, False])
def test_every_legal_order_is_reached_and_no_other(joined):
    choices = north.choices("hand" if joined else "reference")
    ops, pairs = limits.layer_ops(north.model(), choices), limits.order_pairs(north.model(), choices)
    # Halves of those operators that have something to meet; the rest would only take longer to enumerate.
    ops = tuple(op for op in ops if op != "merge") if not joined else ops
    pairs = pairs if joined else tuple(pair for pair in (*pairs, ("attend", "output")) if "merge" not in pair)
    orders = Orders(ops, pairs, parts=2)
    reached = {
        orders.order(dict(zip(orders.riders, slots, strict=True)))
        for slots in itertools.product(range(orders.num_slots), repeat=len(orders.riders))
    }
    assert reached == legal_orders(orders)
    for order in reached:
        assert orders.order(orders.slots(order)) == order


def test_a_sequential_block_leaves_no_order_to_choose():
    space = Space(predicting.qwen(), WIDE, north.chip(), SpaceValues())
    assert not [each for each in space.dimensions if each.name.startswith("order.")]
    order = space.choices({}).interleave.order
    assert order == ("project", "attend", "merge", "output", "route", "up", "down")


def test_the_baselines_are_points_or_near_one():
    space = Space(north.model(), north.BUCKET, north.chip(), SpaceValues())
    hand, reference, mixed = (each.choices for each in baselines(north.choices("hand"), north.choices("reference")))
    assert space.choices(space.nearest(hand)) == hand
    assert space.choices(space.nearest(mixed)) == mixed
    near = space.choices(space.nearest(reference))
    assert (near.interleave, near.ring, near.rounding) == (reference.interleave, reference.ring, reference.rounding)


def test_rounding_is_settled_by_an_earlier_bucket():
    rounding = Rounding(chunk_tokens=256, project_k_splits=2)
    space = Space(north.model(), WIDE, north.chip(), SpaceValues(), rounding)
    rng = random.Random(1)
    assert {space.choices(random_point(space, rng)).rounding for _ in range(50)} == {rounding}
    assert not [each for each in space.dimensions if each.name.startswith("rounding.")]


def test_values_of_the_file_replace_the_derived_ones():
    values = SpaceValues(
        cut=CutValues(up=(132, 264)),
        rounding=RoundingValues(chunk_tokens=(192,)),
        interleave=InterleaveValues(attention_sms=(0, 44), parts=1),
    )
    space = Space(north.model(), north.BUCKET, north.chip(), values)
    rng = random.Random(2)
    sampled = [space.choices(random_point(space, rng)) for _ in range(200)]
    assert {each.cut.up for each in sampled} == {132, 264}
    assert {each.rounding.chunk_tokens for each in sampled} == {192}
    assert {each.interleave.attention_sms for each in sampled} == {None, 44}
    assert all(":" not in text for each in sampled for text in each.interleave.order)


def test_dimensions_that_need_another_are_drawn_only_beside_it():
    """What does not act in a point changes nothing there, and is left out of the point."""
    space = Space(north.model(), north.BUCKET, north.chip(), SpaceValues())
    sizes = {each.name: len(each.values) for each in space.dimensions}
    rng = random.Random(4)
    left_out = set()
    for _ in range(200):
        point = random_point(space, rng)
        acting = space.acting(point)
        assert space.choices(acting) == space.choices(point)
        for name in sizes.keys() - acting.keys():
            left_out.add(name)
            assert space.choices(point | {name: rng.randrange(sizes[name])}) == space.choices(point)
    assert left_out == {
        "interleave.attention_sms", "interleave.takeover_percent", "counters.words", "cut.route", "order.route.1"
    }  # fmt: skip


def test_copies_and_words_are_what_limits_allow():
    """The lists hold every size that is legal beside some rounding, and none that is legal beside none."""
    space = Space(north.model(), north.BUCKET, north.chip(), SpaceValues())
    lists = {each.name: each.values for each in space.dimensions}
    start = north.choices("hand")
    for copy in SpaceValues().ring.copy_bytes:
        legal = []
        for rounding in space.roundings:
            stages = limits.least_stages(north.model(), rounding, copy)
            ring = start.ring.model_copy(update={"copy_bytes": copy, "stages": stages, "in_flight_cap_bytes": None})
            choices = start.model_copy(update={"ring": ring, "rounding": rounding})
            if not limits.reasons(north.model(), north.BUCKET, choices, north.chip()):
                legal.append(rounding)
        assert (copy in lists["ring.copy_bytes"]) == bool(legal), copy
    assert {12288, 16384} <= set(lists["ring.copy_bytes"])
    assert lists["counters.words"] == (1, 2)


def test_choices_that_do_not_act_have_one_form():
    space = Space(north.model(), north.BUCKET, north.chip(), SpaceValues())
    point = space.nearest(north.choices("hand"))
    by_name = {each.name: each for each in space.dimensions}
    point |= {"interleave.policy": by_name["interleave.policy"].index_of("round_robin")}
    point |= {"interleave.attention_sms": 4, "interleave.takeover_percent": 2, "cut.route": 3}
    interleave = space.choices(point).interleave
    assert (interleave.attention_sms, interleave.takeover_percent) == (None, 0)
    assert space.choices(point).cut.route == north.choices("hand").cut.route


@pytest.mark.parametrize("units", [1, 5, 128, 768, 16384])
def test_task_counts_are_whole_units_or_whole_waves(units):
    counts = task_counts(units, num_sms=132, least=33, most=528)
    assert counts == tuple(sorted(set(counts)))
    for count in counts:
        assert 1 <= count <= min(units, 528)
        assert count % 132 == 0 or any(-(-units // each) == count for each in range(1, units + 1))


def test_rings_from_the_smallest_to_the_largest_are_values():
    space = Space(north.model(), north.BUCKET, north.chip(), SpaceValues())
    rings = next(each.values for each in space.dimensions if each.name == "ring.ring_bytes")
    assert min(rings) <= 65536
    assert max(rings) >= 196608
    assert len(rings) > 8
