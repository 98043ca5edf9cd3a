"""Runs spread over processes: every one has its own, a fault costs its own run alone, and time ends the beginning."""

import os
from functools import partial
from time import sleep

from support.spread import spread


def own_process(name):
    return name, os.getpid(), os.environ["OMP_NUM_THREADS"]


def faulty():
    raise ValueError("no such sampler")


def test_every_run_has_a_process_and_a_core_of_its_own_and_a_fault_ends_none_but_its_own():
    runs = [(name, partial(own_process, name)) for name in "abc"]
    found = dict(spread([*runs[:1], ("bad", faulty), *runs[1:]], 2))
    assert isinstance(found.pop("bad"), ValueError)
    assert set(found) == set("abc")
    assert all(name == each[0] and each[2] == "1" for name, each in found.items())
    assert len({each[1] for each in found.values()} | {os.getpid()}) == 4


def test_none_is_begun_after_the_time_and_those_that_run_are_waited_for():
    found = dict(spread([("first", partial(sleep, 2.0)), ("second", partial(sleep, 0.0))], 1, stop_after_s=0.5))
    assert found == {"first": None}
