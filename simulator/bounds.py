"""What no schedule of a step can beat: closed forms over bytes, the ring, hand-offs and serial work.

Owns three lower bounds of the simulator's own model: all bytes at the streaming rate; the longest chain of hand-offs,
with the work and the copies that cannot move off it; and, for a placed table, the busiest SM. Refuses to simulate or
to lower: without a table it takes well under a millisecond, so a search asks here first. Called by `predict` and the
tuner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megakernel import live
from megakernel.build import BuiltStep
from megakernel.cost import price_bytes
from megakernel.hardware import HardwareSpec
from megakernel.kinds import TaskKind
from megakernel.model import BF16_BYTES, LayerSpec, ModelSpec, RoutedMlp
from megakernel.tiling import Choices
from megakernel.workload import Workload
from simulator.routing import mean_distinct_experts, mean_state


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of one step, in nanoseconds; `roofline_ns` is the datasheet's, which no real memory reaches.

    `sm_load_ns` needs a placed table and is 0 without one.
    """

    roofline_ns: float
    bytes_ns: float
    critical_path_ns: float
    sm_load_ns: float = 0.0

    @property
    def lower_ns(self) -> float:
        """The highest of the bounds."""
        return max(self.bytes_ns, self.critical_path_ns, self.sm_load_ns)

    @property
    def binding(self) -> str:
        """Which one that is: `bytes`, `critical path` or `SM load`."""
        named = {"bytes": self.bytes_ns, "critical path": self.critical_path_ns, "SM load": self.sm_load_ns}
        return max(named, key=lambda name: named[name])


def bounds(
    source: BuiltStep | ModelSpec,
    chip: HardwareSpec,
    workload: Workload,
    choices: Choices | None = None,
    *,
    distinct_experts: Sequence[float] | None = None,
) -> Bounds:
    """Bounds of a built step, or of a model under `choices` before anything is lowered.

    `distinct_experts` per layer replace the mean of the workload's routing. A model without choices is bounded for any
    choices: a ring of all shared memory, no chunks, loads ahead of waits.
    """
    model = source.model if isinstance(source, BuiltStep) else source
    choices = source.choices if isinstance(source, BuiltStep) else choices
    experts = _mean_experts(model, workload) if distinct_experts is None else tuple(distinct_experts)
    num_sms = source.table.num_sms if isinstance(source, BuiltStep) else chip.num_sms
    chain = _Chain(model, choices, chip, workload, num_sms)
    streamed, path_ns = chain.whole_step(experts)
    routed = [each for each, layer in zip(experts, model.layers, strict=True) if isinstance(layer.mlp, RoutedMlp)]
    mean = sum(routed) / len(routed) if routed else 0.0
    return Bounds(
        roofline_ns=model.step_bytes(workload.contexts, mean) / chip.datasheet_bytes_per_ns,
        bytes_ns=streamed / chip.ceiling_bytes_per_ns(num_sms),
        critical_path_ns=path_ns,
        sm_load_ns=_busiest_sm_ns(source, chip, workload) if isinstance(source, BuiltStep) else 0.0,
    )


def _mean_experts(model: ModelSpec, workload: Workload) -> tuple[float, ...]:
    rows = len(workload.contexts)
    return tuple(
        mean_distinct_experts(layer.mlp, rows, workload.routing) if isinstance(layer.mlp, RoutedMlp) else 0.0
        for layer in model.layers
    )


def _busiest_sm_ns(step: BuiltStep, chip: HardwareSpec, workload: Workload) -> float:
    """Time of the SM with most to do, alone on the chip: to issue, to receive and to consume its copies."""
    ring, costs, table = step.choices.ring, chip.costs, step.table
    loads = price_bytes(step, mean_state(step.model, workload)).load_bytes[table.records["task"]]
    sm_of = np.repeat(np.arange(table.num_sms), np.diff(table.offsets))
    copies = np.bincount(sm_of, -(-loads // ring.copy_bytes), table.num_sms)
    issue_ns = costs.issue_ns if ring.in_flight_cap_bytes is None else costs.issue_capped_ns
    per_copy_ns = max(issue_ns, costs.consume_ns(ring.copy_bytes))
    received = np.bincount(sm_of, loads, table.num_sms)
    return float(max(copies.max() * per_copy_ns, received.max() / chip.sm_bytes_per_ns))


class _Chain:
    """The longest chain through a step, counting of every operator what no placement can take off it."""

    def __init__(
        self,
        model: ModelSpec,
        choices: Choices | None,
        chip: HardwareSpec,
        workload: Workload,
        num_sms: int,
    ) -> None:
        rows, costs, work = len(workload.contexts), chip.costs, chip.work
        self._model, self._choices, self._contexts = model, choices, workload.contexts
        self._num_sms = num_sms
        self._stream = chip.ceiling_bytes_per_ns(num_sms)
        self._hand_off_ns, self._latency_ns = costs.handoff_ns, costs.copy_latency_ns
        self._start_ns = {kind: chip.cycles_ns(work.start_cycles(kind, rows)) for kind in TaskKind}
        self._finish_ns, self._router_ns, self._topk_ns = (
            chip.cycles_ns(work.with_rows(cycles, rows)) for cycles in (work.finish, work.router, work.topk)
        )
        self._ring_bytes, self._after_wait = num_sms * chip.shared_memory_per_block_bytes, False
        self._consume_ns_per_byte = 1.0 / costs.consume_bytes_per_ns
        if choices is not None:
            ring = choices.ring
            self._ring_bytes = num_sms * ring.bytes
            self._consume_ns_per_byte += costs.consume_copy_ns / ring.copy_bytes
            self._after_wait = choices.interleave.loads == "after_wait"

    def whole_step(self, experts: Sequence[float]) -> tuple[float, float]:
        """Bytes of all rings, and the chain's length in ns."""
        known: dict[tuple[LayerSpec, float], tuple[float, float]] = {}
        total, now_ns = 0.0, self._start_ns[TaskKind.EMBED] + self._finish_ns
        for layer, distinct in zip(self._model.layers, experts, strict=True):
            key = (layer, distinct)
            if key not in known:
                known[key] = self._layer(layer, distinct)
            total += known[key][0]
            now_ns += known[key][1]
        head = float(self._model.vocab_size * self._model.hidden_size * BF16_BYTES)
        cut = self._choices.cut.head if self._choices else 0
        now_ns = self._end(TaskKind.HEAD, now_ns, head, cut)
        return total + head, self._end(TaskKind.SAMPLE, now_ns)

    def _layer(self, layer: LayerSpec, distinct: float) -> tuple[float, float]:
        """Bytes of one layer, and how long after its input its output is complete."""
        model, cut = self._model, self._choices.cut if self._choices else None
        mlp, hidden = layer.mlp, model.hidden_size
        routed = isinstance(mlp, RoutedMlp)
        rows = self._router_rows(mlp.num_experts) if isinstance(mlp, RoutedMlp) else 0
        experts = distinct if routed else 1.0
        project = float(hidden * (model.q_size + 2 * model.kv_size) * BF16_BYTES)
        router = float(hidden * mlp.num_experts * BF16_BYTES) if isinstance(mlp, RoutedMlp) else 0.0
        attend, output = self._kv_bytes(layer), float(hidden * model.q_size * BF16_BYTES)
        up, down = (experts * matrices * hidden * mlp.width * BF16_BYTES for matrices in (2, 1))

        projected = self._end(TaskKind.PROJECT, 0.0, project, cut.project if cut else 0)
        attended = self._end(TaskKind.ATTEND, projected, attend, cut.attend if cut else 0)
        merged = self._end(TaskKind.MERGE, attended)
        attention_ns = self._end(TaskKind.OUTPUT, merged, output, cut.output if cut else 0)
        start_ns = 0.0 if model.block == "parallel" else attention_ns
        gate_ns = None
        if routed:
            early_ns = start_ns + self._hand_off_ns + self._start_ns[TaskKind.PROJECT] + rows * self._router_ns
            gate_ns = early_ns + self._hand_off_ns + self._topk_ns
        up_ns = self._end(TaskKind.UP, start_ns, up, cut.up if cut else 0, gate_ns)
        mlp_ns = self._end(TaskKind.DOWN, up_ns, down, cut.down if cut else 0)
        if gate_ns is not None:
            mlp_ns = max(mlp_ns, gate_ns + self._latency_ns + (up + down) / self._stream)
        return project + router + attend + output + up + down, max(attention_ns, mlp_ns)

    def _router_rows(self, experts: int) -> int:
        """Rows of the router that some SM has at least, one after another."""
        if self._choices is None:
            return -(-experts // self._num_sms)
        cut = self._choices.cut
        tasks = cut.project if self._choices.interleave.router_with_project else cut.route
        return -(-experts // min(tasks, self._num_sms))

    def _kv_bytes(self, layer: LayerSpec) -> float:
        token_bytes = self._model.kv_bytes_per_token_per_layer
        if self._choices is None:
            return float(token_bytes * sum(layer.attended_tokens(tokens) for tokens in self._contexts))
        chunk, window = self._choices.rounding.chunk_tokens, layer.window_tokens or 0
        chunks = sum(live.attend_units(1, tokens - 1, window, chunk, 1) for tokens in self._contexts)
        return float(token_bytes * chunk * chunks)

    def _end(
        self, kind: TaskKind, ready_ns: float, num_bytes: float = 0.0, tasks: int = 0, gate_ns: float | None = None
    ) -> float:
        """When the last task of an operator ends: inputs are complete at `ready_ns`, loads may begin at `gate_ns`.

        Its busiest SM consumes at least the mean, after the inputs; bytes beyond the ring, or all of them after the
        gate, pass the memory's streaming rate first.
        """
        seen_ns = ready_ns + self._hand_off_ns
        busiest = num_bytes / min(tasks or self._num_sms, self._num_sms)
        end_ns = seen_ns + self._start_ns[kind] + busiest * self._consume_ns_per_byte
        if self._after_wait and num_bytes:
            gate_ns = max(seen_ns, gate_ns or 0.0)
        if gate_ns is not None:
            end_ns = max(end_ns, gate_ns + self._latency_ns + num_bytes / self._stream)
        else:
            end_ns = max(end_ns, seen_ns + (num_bytes - self._ring_bytes) / self._stream)
        return end_ns + self._finish_ns
