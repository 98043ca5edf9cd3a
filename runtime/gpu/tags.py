"""Router logits that carry the step and layer they are of, and the waits of a table that may end before all are there.

Owns which buffer that is and the marks that the kernel finds in a record's first reserved word. Tables are as they
were: the dependency is there, is proved, and every task arrives. Only, a task arrives before it knows that its logits
are where they should be, and a planner looks for all of a layer's before the last task has arrived. It then knows what
the counter would have told: who left a logit had taken its input whole. Called by whoever loads a table.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megakernel.build import BuiltStep
from megakernel.config import ConfigError
from megakernel.counters import NONE
from megakernel.kinds import TaskKind
from megakernel.table import read_waits

TAGGED = "router"
"""The buffer whose values carry tags, each below its tag of 32 bits, which is never 0."""

READERS = frozenset({TaskKind.UP, TaskKind.DOWN})
"""Kinds whose planner takes all of a layer's logits."""


def can_look(step: BuiltStep) -> bool:
    """Whether somebody waits for a step's logits, and all who do are planners that would see which are there."""
    try:
        return bool(marks(step).any())
    except ConfigError:
        return False


def marks(step: BuiltStep) -> npt.NDArray[np.uint16]:
    """Marks of every record of a step's table: bit i for load wait i, if it is for logits.

    ConfigError when somebody else waits for them, who would not see whether they are there.
    """
    records = step.table.records
    early = {int(counter) for counter in records["early"]} - {NONE}
    found = np.zeros(len(records), "<u2")
    for row, record in enumerate(records):
        for phase in ("load", "run"):
            for idx, wait in enumerate(read_waits(record, phase)):
                if wait.counter not in early:
                    continue
                if phase == "run" or wait.lag or record["kind"] not in READERS:
                    kind, name = TaskKind(record["kind"]).name.lower(), step.counter_titles[wait.counter]
                    raise ConfigError(
                        f"a task of kind {kind} waits to {phase} for {name}, needed with logits_ahead: up or down, "
                        "to load, whose planners see which logits are there"
                    )
                found[row] |= 1 << idx
    return found
