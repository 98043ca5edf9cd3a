"""Small steps: in the space, near a leader, and new as long as that is possible."""

import pytest
from support import north, predicting

from tuner.neighbours import PARENTS, Neighbours
from tuner.search_config import SpaceValues
from tuner.space import Space


@pytest.fixture
def space():
    return Space(north.model(), north.BUCKET, north.chip(), SpaceValues())


def nobody(_):
    return False


def test_a_step_changes_few_dimensions_of_a_leader_by_little(space):
    neighbours = Neighbours(space, seed=1)
    start = space.nearest(north.choices("hand"))
    neighbours.learn(1.0, start)
    sizes = {each.name: len(each.values) for each in space.dimensions}
    changes = []
    for number in range(300):
        neighbours.turn(number, number)
        step = neighbours.step(nobody)
        assert step == space.acting(step)
        assert all(0 <= idx < sizes[name] for name, idx in step.items())
        changes.append({name for name in step.keys() & start.keys() if step[name] != start[name]})
    assert all(changes)
    assert sum(map(len, changes)) / len(changes) < 2.5
    assert set.union(*changes) == {name for name in start if sizes[name] > 1}


def test_only_the_best_are_parents_and_equal_choices_count_once(space):
    neighbours = Neighbours(space, seed=1)
    assert not neighbours.wants(100)
    start = space.nearest(north.choices("hand"))
    worse = start | {"cut.head": 0}
    neighbours.learn(2.0, worse)
    for idx in range(PARENTS):
        neighbours.learn(1.0, start | {"cut.up": idx})
        neighbours.learn(1.0, start | {"cut.up": idx, "cut.route": 1})  # the router runs with the projection
    assert neighbours.wants(100)
    assert not neighbours.wants(0)
    heads = [neighbours.step(nobody)["cut.head"] for _ in range(100)]
    assert heads.count(start["cut.head"]) > 80


def test_every_dimension_has_a_turn_before_any_has_a_second_what_runs_when_first(space):
    free = [each.name for each in space.dimensions if len(each.values) > 1]
    neighbours = Neighbours(space)
    start = space.nearest(north.choices("hand"))
    neighbours.learn(1.0, start)
    acting = [name for name in free if name in start]
    turns = []
    for number in range(2 * len(free)):
        neighbours.turn(number, number)
        turns.append(next(each.name for each in neighbours._order_of_turns()))
        assert neighbours.wants(1) or number >= len(free)
    assert sorted(turns[: len(free)]) == sorted(turns[len(free) :]) == sorted(free)
    assert turns[0].startswith("interleave.")
    assert set(acting) <= set(turns)
    assert not neighbours.wants(0)


def test_halves_of_an_operator_move_together_or_apart(space):
    neighbours = Neighbours(space)
    start = space.nearest(north.choices("hand"))
    neighbours.learn(1.0, start)
    halves = sorted(name for name in start if name.startswith("order."))[:2]
    number = next(idx for idx, each in enumerate(neighbours._dimensions) if each.name == halves[0])
    together = 0
    for seed in range(100):
        neighbours.turn(number, seed)
        step = neighbours.step(nobody)
        together += step[halves[0]] == step[halves[1]]
    assert 30 < together < 95


def test_known_choices_are_avoided(space):
    neighbours = Neighbours(space, seed=2)
    start = space.nearest(north.choices("hand"))
    neighbours.learn(1.0, start)
    neighbours.turn(next(idx for idx, each in enumerate(neighbours._dimensions) if each.name == "cut.head"), 2)
    known = {space.choices(neighbours.step(nobody)) for _ in range(10)}
    assert all(space.choices(neighbours.step(lambda each: each in known)) not in known for _ in range(30))
    assert neighbours.step(lambda _: True).keys() == start.keys()


def test_steps_are_seeded():
    def steps(seed):
        space = Space(predicting.qwen(), north.BUCKET, north.chip(), SpaceValues())
        neighbours = Neighbours(space, seed)
        neighbours.learn(1.0, space.nearest(predicting.choices_for(predicting.qwen(), "hand")))
        return [neighbours.step(nobody) for _ in range(10)]

    assert steps(5) == steps(5)
    assert steps(5) != steps(6)
