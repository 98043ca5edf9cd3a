"""Proof that a packed table does what its graph means, whatever the timing; `verify` lists what it finds wrong.

A table is judged as the kernel runs it, step after step: every SM's producer and consumers walk its records in order,
a run starts after its own load wait, waits and arrivals are all the order there is. Three questions: is every task
there once, as lowered, and does it fit (`structure`); does every task come to run (`order`); are all clashing accesses
ordered as in the reference order (`races`), given what must have happened before each of them (`knowledge`).
"""

from __future__ import annotations

from itertools import chain, islice

from megakernel.graph import TaskGraph
from megakernel.table import TaskTable
from megakernel.uncollected import uncollected
from megakernel.verify.finding import Finding
from megakernel.verify.knowledge import find_overtaking, know
from megakernel.verify.races import find_races
from megakernel.verify.structure import check_structure

__all__ = ["Finding", "verify"]


@uncollected()
def verify(graph: TaskGraph, table: TaskTable, *, most: int = 20) -> list[Finding]:
    """What is wrong with `table` as an execution of `graph`, at most `most` findings; an empty list is a proof."""
    findings = list(islice(check_structure(graph, table), most))
    if findings:
        return findings
    knowledge, execution = know(table)
    if knowledge is None:
        return [execution.deadlock(graph)]
    return list(islice(chain(find_races(graph, table, knowledge), find_overtaking(graph, knowledge)), most))
