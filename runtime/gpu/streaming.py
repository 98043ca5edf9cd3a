"""Tables ready to be timed: those without a model, and real plans, streaming or computing.

Owns the way from a table without a model, or from choices, to a loaded one. Every real table is verified first; the
free stream of a plan is the one exception: its waits and arrivals are taken out, which is harmless as long as nothing
is computed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megakernel.build import BuiltStep
from megakernel.config import ConfigError
from megakernel.counters import NONE
from megakernel.hardware import HardwareSpec
from megakernel.kinds import TaskKind
from megakernel.table import TaskTable
from megakernel.verify import verify
from runtime.gpu.buffers import Addresses, Drawn, StepBuffers, random_bytes, random_inputs, upload
from runtime.gpu.compile import compile_kernel
from runtime.gpu.even import NEXT, Even
from runtime.gpu.launch import NO_WORK, LoadedTable, Work
from runtime.gpu.linear import LinearTable
from runtime.gpu.postmortem import GraphTitles
from runtime.gpu.skeleton import ROUTER_CYCLES, SHIPPED_CELLS, TOP_K_CYCLES, SkeletonCell
from runtime.gpu.specialize import KernelOptions, Specialization, resolved, specialize, specialize_linear
from runtime.gpu.tags import marks

MAX_COPY_BYTES = 65536


class UnsoundTableError(ConfigError):
    """`verify` refuses the table."""


class LinearBench:
    """Loads tables without a model over one arena."""

    def __init__(self, chip: HardwareSpec) -> None:
        """Allocate the arena for the chip's SMs: what the skeleton streams is the most."""
        self.chip = chip
        self.num_bytes = SHIPPED_CELLS[0].build(chip.num_sms).arena_bytes
        # Another copy size rounds every SM's last copy up.
        self.arena = random_bytes(self.num_bytes + MAX_COPY_BYTES * chip.num_sms)

    def specialization(self, built: LinearTable, options: KernelOptions) -> Specialization:
        """What the kernel of a table is compiled for."""
        return specialize_linear(built.table, self.chip, options)

    def load(self, built: LinearTable, options: KernelOptions, work: Work) -> LoadedTable:
        """A table, armed; ConfigError when it reads more than the arena has."""
        if built.arena_bytes > self.arena.numel():
            raise ConfigError(f"a table reads {built.arena_bytes} bytes, the arena has {self.arena.numel()}")
        compiled = compile_kernel(self.specialization(built, options), self.chip.architecture)
        loaded = LoadedTable(compiled, built.table, built.titles, proved_digest=None)
        loaded.arm(Addresses(arena=self.arena.data_ptr()), work=work)
        return loaded


def skeleton_work(cell: SkeletonCell) -> Work:
    """Cycles by kind: after every wait, and the router's two parts where there is work at all."""
    if cell.skeleton.free or not cell.work_cycles:
        return NO_WORK
    waiting = (TaskKind.PROJECT, TaskKind.ATTEND, TaskKind.OUTPUT, TaskKind.DOWN, TaskKind.HEAD)
    return Work(
        load={TaskKind.UP: TOP_K_CYCLES},
        early={TaskKind.PROJECT: ROUTER_CYCLES},
        run=dict.fromkeys(waiting, cell.work_cycles),
    )


def even_work(even: Even) -> Work:
    """Cycles after every wait; the first phase has another kind, and none."""
    return Work(run={NEXT: even.work_cycles}) if even.work_cycles else NO_WORK


class PlanBench:
    """Loads the tables of one model and bucket over one set of weights."""

    def __init__(self, chip: HardwareSpec, positions: tuple[int, ...], *, computes: bool) -> None:
        """Keep the live state that all tables run in; where one `computes`, weights are numbers."""
        self.chip = chip
        self.positions = positions
        self.drawn: Drawn = "normal" if computes else "bits"
        self._model: StepBuffers | None = None
        self._buffers: dict[LoadedTable, StepBuffers] = {}

    def load(
        self,
        step: BuiltStep,
        options: KernelOptions,
        *,
        steps: int = 1,
        work: Work = NO_WORK,
        free: bool = False,
    ) -> LoadedTable:
        """A verified table, armed; `free` takes its waits and arrivals out, which only streaming survives.

        UnsoundTableError when `verify` has findings, any other ConfigError when the kernel can't be built.
        """
        if free and not options.streaming:
            raise ConfigError("a free stream computes nothing: set streaming = true in its kernel options")
        findings = verify(step.graph, step.table)
        if findings:
            raise UnsoundTableError("the table is not sound:\n" + "\n".join(map(str, findings)))
        table = without_waits(step.table) if free else step.table
        compiled = compile_kernel(specialize(step, self.chip, options), self.chip.architecture)
        titles = GraphTitles(step.graph, step.counter_titles)
        proved = None if free else step.table.digest
        has_tags = bool(resolved(step, options).logits_ahead) and not options.streaming
        loaded = LoadedTable(compiled, table, titles, proved_digest=proved, marks=marks(step) if has_tags else None)
        buffers = StepBuffers(step, self._model, drawn=self.drawn, has_tags=has_tags)
        if self._model is None:
            self._model = buffers
        self._buffers[loaded] = buffers
        torch.cuda.synchronize()
        inputs = random_inputs(step, self.positions)
        loaded.arm(buffers.set_inputs(inputs), steps=steps, work=work)
        loaded.restores += buffers.tags()
        states, tokens = upload(inputs.rows), first_tokens(step)
        loaded.restores.append((buffers.tensor("row_state", tuple(states.shape), torch.uint8), states))
        loaded.restores.append((buffers.tensor("tokens", tuple(tokens.shape), torch.int32), tokens))
        return loaded

    def logits(self, loaded: LoadedTable) -> Tensor:
        """What a launch leaves: float32 [active rows, vocabulary], on the host."""
        loaded.run()
        return self._buffers[loaded].scratch("logits", torch.float32)[: len(self.positions)].cpu()


def first_tokens(step: BuiltStep) -> Tensor:
    """Tokens that all launches begin with, a row's its own: rows that decode the same route alike."""
    return (torch.arange(step.bucket.rows, dtype=torch.int32) * TOKEN_STRIDE % step.model.vocab_size).cuda()


TOKEN_STRIDE = 7919


def without_waits(table: TaskTable) -> TaskTable:
    """The same loads in the same lists, with nothing to wait for."""
    records = table.records.copy()
    for name in ("num_load_waits", "num_run_waits"):
        records[name] = 0
    for name in ("arrive", "early"):
        records[name] = NONE
    return TaskTable(table.header, table.offsets, np.zeros_like(table.totals), records)
