"""`verify` finds what an independent oracle proves harmful, refuses nothing that it proves harmless, and says how.

The oracle tries every interleaving of tiny tables; on larger ones random schedules may prove harm, and what they don't
is counted apart. `python tests/bench/mutants.py` prints the counts.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support import literal, oracle, walk
from support.campaign import WANTED, exhaust, fuzz
from support.edits import copied, remove_wait, settle, wait_sites
from support.literal import Literal
from support.mutants import MOSTLY_HARMLESS, OPERATORS
from support.oracle import Oracle
from support.tiny import random_step, table_of

from megakernel.graph import Access, Buffer, Op, Task, TaskGraph, When
from megakernel.kinds import KINDS, TaskKind
from megakernel.verify import verify

OUT_OF_ORDER = {"drop a record", "duplicate a record", "alter an operand", "overflow the ring"}
"""Operators that spoil a table whatever the interleaving."""


@pytest.mark.parametrize("operator", OPERATORS)
def test_exhausted_mutants_are_refused_exactly_if_harmful(operator, record_property):
    tally = exhaust(operator)
    record_property("tally", str(tally))
    assert tally.missed == []
    assert tally.refused == []
    assert (tally.harmless if operator in MOSTLY_HARMLESS else tally.visible) >= WANTED


@pytest.mark.parametrize("operator", OPERATORS)
def test_mutants_of_larger_tables_that_fail_in_a_random_schedule_are_refused(operator, record_property):
    tally = fuzz(operator, mutants=20, schedules=24)
    record_property("tally", str(tally))
    assert tally.missed == []


@pytest.mark.parametrize("module", [oracle, walk, literal])
def test_the_oracle_knows_nothing_of_what_it_judges(module):
    lines = Path(module.__file__).read_text(encoding="utf-8").splitlines()
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    assert imports
    assert not [line for line in imports if "verify" in line or "hazards" in line]


def test_the_oracle_agrees_with_every_event_of_the_kernel_loop_tried_one_by_one():
    names = [name for name in OPERATORS if name not in OUT_OF_ORDER]
    judged = {True: 0, False: 0}
    for seed in range(120):
        step = random_step(seed)
        if step.table.num_sms > 2 or step.graph.num_tasks > 4:
            continue
        judge = Oracle(step.graph, steps=2)
        for name in random.Random(seed).sample(names, 4):
            table = OPERATORS[name](step.table, random.Random(seed))
            if table is None or judge.misfit(table):
                continue
            harmful = Literal(step.graph, table, steps=2).is_harmful()
            assert (judge.judge(table) is not None) == harmful, f"{name} on step {seed}"
            judged[harmful] += 1
    assert min(judged.values()) >= 20, judged


def graph_of(*ops: list[tuple[int, When, bool]], kind: TaskKind = TaskKind.OUTPUT) -> TaskGraph:
    """Operators A, B, ... of one task that touches whole buffers a, b, ...: (buffer, when, write)."""
    buffers = tuple(Buffer(name, (4,), 4) for name in "abcd")
    built = []
    for name, touches in zip("ABCD", ops, strict=False):
        accesses = tuple(Access(slot, ((0, 4),), when, write) for slot, (_, when, write) in enumerate(touches))
        bound = tuple(buffer for buffer, _, _ in touches)
        built.append(Op(name, kind, KINDS[kind].path, -1, bound, len(bound), 0, (Task(accesses, 1),)))
    return TaskGraph(buffers, tuple(built))


WRITE_A, WRITE_B, WRITE_C = ((buffer, When.RUN, True) for buffer in range(3))
READ_A, READ_B = ((buffer, When.RUN, False) for buffer in range(2))
LOAD_A, LOAD_B = ((buffer, When.LOAD, False) for buffer in range(2))


@pytest.mark.parametrize("reads", [(READ_A, READ_B), (LOAD_A, LOAD_B), (READ_A, LOAD_B)])
def test_two_queues_that_deadlock_across_sms_though_the_graph_is_acyclic(reads):
    graph = graph_of([WRITE_A], [WRITE_B], [reads[0]], [reads[1]])
    assert verify(graph, table_of(graph, ((1, 2), (0, 3)))) == []
    # C waits for A, which stands behind D; D waits for B, which stands behind C
    table = table_of(graph, ((2, 1), (3, 0)))
    assert Oracle(graph).judge(table).kind == "deadlock"
    (finding,) = verify(graph, table)
    assert finding.rule == "deadlock"
    assert "C[0] of step 0 never runs; 2 of 2 SMs stop" in finding.message
    first, second = finding.counterexample
    assert "C[0] of step 0 until counter" in first
    assert "A[0] of step 0 on SM 1 would arrive there" in first
    assert "D[0] of step 0 until counter" in second
    assert "B[0] of step 0 on SM 0 would arrive there" in second


def test_a_producer_blocked_at_a_load_wait_blocks_the_loads_behind_it():
    # B's load waits for A; C behind it waits for nothing, but its load is behind B's, and A waits for C
    graph = graph_of([WRITE_C], [WRITE_A, (2, When.RUN, False)], [LOAD_A])
    assert verify(graph, table_of(graph, ((0, 2), (1,)))) == []
    table = table_of(graph, ((2, 0), (1,)))
    assert Oracle(graph).judge(table).kind == "deadlock"
    (finding,) = verify(graph, table)
    assert "SM 0 waits to load C[0] of step 0" in finding.counterexample[0]


def test_a_dropped_wait_that_only_matters_in_the_next_step():
    graph = graph_of([WRITE_A], [READ_A])
    table = copied(table_of(graph, ((0,), (1,))))
    ((row, phase, slot),) = wait_sites(table, lag=1)
    assert row == 0
    remove_wait(table, (row, phase, slot))
    assert Oracle(graph, steps=1).judge(table) is None
    assert Oracle(graph, steps=2).judge(table).kind == "clash"
    finding, *_ = verify(graph, table)
    assert finding.rule == "race"
    assert finding.message == "A[0] of step 1 may run while B[0] of step 0 has not finished with a"
    assert finding.counterexample[0] == "hold SM 1 back in B[0] of step 0, record 0 of its list"
    assert len(finding.counterexample) == 3


def test_a_ring_that_is_smaller_than_what_a_run_holds():
    graph = graph_of([WRITE_A], kind=TaskKind.ATTEND)
    table = copied(table_of(graph, ((0,), ())))
    for stages in range(1, 5):
        table.header["ring_stages"] = stages
        table.header["in_flight_cap_bytes"] = 0
        stalls = stages <= KINDS[TaskKind.ATTEND].hold_copies
        harm, findings = Oracle(graph).judge(table), verify(graph, table)
        assert (harm is not None) == bool(findings) == stalls
        if stalls:
            assert harm.kind == "ring"
            assert findings[0].rule == "ring space"
            assert (
                f"A[0] holds 2 stages while the next copy needs one more; the ring has {stages}" in findings[0].message
            )
            assert len(findings[0].counterexample) == 2


def test_a_counter_that_runs_away_from_a_wait():
    # nothing holds A back: a second arrival may stand for B's, whose result C reads
    graph = graph_of([WRITE_A], [WRITE_B], [READ_B])
    table = copied(table_of(graph, ((0,), (1,), (2,))))
    table.records["arrive"][0] = table.records["arrive"][1]
    settle(table)
    assert Oracle(graph, steps=1).judge(table) is None
    assert Oracle(graph, steps=2).judge(table).kind == "clash"
    assert {finding.rule for finding in verify(graph, table)} == {"race", "counter reuse"}
