"""From choices to a packed table, in one call: check, lower, derive, place, wire, pack.

Plans, searches, the simulator, the runtime and the tests all get their tables here, so that equal choices always give
the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from megakernel import limits
from megakernel.config import ConfigError
from megakernel.counters import wire
from megakernel.graph import TaskGraph
from megakernel.hardware import HardwareSpec
from megakernel.hazards import derive
from megakernel.lowering import lower
from megakernel.model import ModelSpec
from megakernel.placement import place
from megakernel.table import TaskTable, pack
from megakernel.tiling import Choices
from megakernel.uncollected import uncollected
from megakernel.workload import Bucket


@dataclass(frozen=True)
class BuiltStep:
    """A decode step, lowered and placed: what it was built from, its graph, its table, the counters' titles."""

    model: ModelSpec
    bucket: Bucket
    choices: Choices
    graph: TaskGraph
    table: TaskTable
    counter_titles: tuple[str, ...]


def build_step(model: ModelSpec, bucket: Bucket, choices: Choices, chip: HardwareSpec) -> BuiltStep:
    """Build the table of `choices` for one list per SM of `chip`; ConfigError lists every limit they break."""
    _refuse(limits.reasons(model, bucket, choices, chip), chip)
    step = assemble(model, bucket, choices, chip.num_sms)
    _refuse(limits.check_memory(step.graph, chip), chip)
    return step


def check_step(step: BuiltStep, chip: HardwareSpec) -> None:
    """Raise ConfigError unless `chip` can run a step that was built for another one."""
    found = [*limits.reasons(step.model, step.bucket, step.choices, chip), *limits.check_memory(step.graph, chip)]
    _refuse(found, chip)


def _refuse(found: list[str], chip: HardwareSpec) -> None:
    if found:
        raise ConfigError(f"these choices can't run on {chip.name}:\n" + "\n".join(f"  {reason}" for reason in found))


@uncollected()
def assemble(model: ModelSpec, bucket: Bucket, choices: Choices, num_sms: int) -> BuiltStep:
    """`build_step` for choices that are known to be legal."""
    graph = lower(model, bucket, choices)
    schedule = place(graph, choices.interleave, num_sms)
    after_wait = choices.interleave.loads == "after_wait"
    wiring = wire(graph, derive(graph), schedule, load_after_wait=after_wait, words=choices.counters.words)
    table = pack(graph, schedule, wiring, bucket, choices)
    return BuiltStep(model, bucket, choices, graph, table, wiring.titles)
