"""What `verify` has to say: one finding, its tasks, and the smallest execution that shows it."""

from __future__ import annotations

from dataclasses import dataclass

from megakernel.graph import TaskGraph


@dataclass(frozen=True)
class Finding:
    """`rule` is from a small vocabulary, `message` names tasks, `counterexample` is an execution, line by line."""

    rule: str
    message: str
    counterexample: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n  ".join((f"{self.rule}: {self.message}", *self.counterexample))


class TaskNames:
    """Titles of tasks by number."""

    def __init__(self, graph: TaskGraph) -> None:
        """Number the tasks of `graph`."""
        self._graph = graph
        self._op_of = [(op_idx, idx) for op_idx, op in enumerate(graph.ops) for idx in range(len(op.tasks))]

    def __getitem__(self, task: int) -> str:
        return self._graph.task_title(*self._op_of[task])

    def op(self, task: int) -> int:
        """Operator that the task belongs to."""
        return self._op_of[task][0]
