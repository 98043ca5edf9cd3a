"""Decodes on a card: one table, its weights and pages, rows that join and leave between launches, tokens back.

Owns the state that steps carry from launch to launch: row states, tokens, page tables, the number of the next step.
Refuses tables that are not proved. The interpreter's `Memory` has the same verbs, so that one test drives both; `Chain`
runs many steps on it without the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megakernel.abi import ROW_STATE
from megakernel.build import BuiltStep
from megakernel.config import ConfigError
from megakernel.hardware import HardwareSpec
from megakernel.verify import verify
from runtime.gpu.buffers import LiveInputs, StepBuffers, random_inputs
from runtime.gpu.compile import compile_kernel
from runtime.gpu.launch import DEADLINE_MS, NO_FUZZ, Fuzz, LoadedTable
from runtime.gpu.mailbox import Mailbox, put_pages
from runtime.gpu.postmortem import GraphTitles
from runtime.gpu.specialize import KernelOptions, specialize
from runtime.kv_pages import TILE, layer_groups, read, write
from runtime.rows import Command, Drop, Extend, Join, row_state
from runtime.sampling import GREEDY, SamplingParams
from runtime.weights import Piece, Weights, weight_pieces


class Decoder:
    """Rows of one bucket, decoded step by step."""

    def __init__(
        self,
        step: BuiltStep,
        chip: HardwareSpec,
        weights: Weights | Iterable[Piece] | None = None,
        *,
        options: KernelOptions | None = None,
        model: Decoder | None = None,
        first_step: int = 0,
        deadline_ms: float = DEADLINE_MS,
    ) -> None:
        """Prove, compile and load; without `weights` they are drawn, or those of `model`. All rows are empty.

        `deadline_ms` is the longest wait inside a launch. `fuzz` may be set where the options have it.
        """
        findings = verify(step.graph, step.table)
        if findings:
            raise ConfigError("the table is not sound:\n" + "\n".join(map(str, findings)))
        self.step, self.chip = step, chip
        compiled = compile_kernel(specialize(step, chip, options or KernelOptions()), chip.architecture)
        titles = GraphTitles(step.graph, step.counter_titles)
        self.table = LoadedTable(compiled, step.table, titles, proved_digest=step.table.digest)
        shared = model.buffers if model else None
        pieces = weight_pieces(weights) if isinstance(weights, Weights) else weights
        self.buffers = StepBuffers(step, shared, weights=pieces, drawn="normal")
        inputs = random_inputs(step, ())
        self.pages: np.ndarray = inputs.pages
        self.rows: np.ndarray = np.zeros(step.bucket.rows, ROW_STATE.dtype)
        self.next_step = first_step
        self.deadline_ms = deadline_ms
        self.fuzz: Fuzz = NO_FUZZ
        self._addresses = self.buffers.set_inputs(LiveInputs(self.rows, self.pages, inputs.routed))
        self._tokens = self.buffers.tensor("tokens", (step.bucket.rows,), torch.int32)
        self.mailbox = Mailbox(self.pages, pinned=True)

    @property
    def ring(self) -> npt.NDArray[np.uint64]:
        """See `Device`."""
        return self.table.ring

    def join(self, row: int, token: int, position: int, sampling: SamplingParams = GREEDY, **limits: Any) -> None:
        """Activate `row` as `Join` says; ValueError as in `row_state`."""
        self.carry_out(row, Join(token, position, sampling, **limits))

    def leave(self, row: int) -> None:
        """Deactivate `row`."""
        self.carry_out(row, Drop())

    def carry_out(self, row: int, command: Command) -> None:
        """Change a row between launches."""
        self._fetch()
        begin, end = put_pages(self.pages, row, command)
        if end > begin:
            self.buffers.set_pages(self.pages)
        match command:
            case Join():
                self.rows[row] = row_state(command)[0]
                self._tokens[row] = command.token
            case Drop():
                self.rows[row]["active"] = 0
            case Extend():
                self.rows[row]["end_position"] = command.end_position
        self.buffers.set_rows(self.rows)
        torch.cuda.synchronize()

    def run(self, steps: int = 1) -> list[list[int | None]]:
        """Run `steps` steps in one launch; each step's tokens by row, None where a row was not active."""
        first = self.next_step
        self.table.arm(self._addresses, steps=steps, first_step=first, fuzz=self.fuzz, deadline_ms=self.deadline_ms)
        self.table.run()
        self.next_step = (first + steps) % 2**32
        return [self.table.tokens((first + step) % 2**32) for step in range(steps)]

    def begin(self, steps: int) -> int:
        """See `Device`."""
        first = self.next_step
        self.mailbox.pages[:] = self.pages
        self.table.arm(
            self._addresses,
            steps=steps,
            first_step=first,
            mailbox=self.mailbox,
            fuzz=self.fuzz,
            deadline_ms=self.deadline_ms,
        )
        self.table.forget_tokens()
        self.table.reset()
        self.table.launch()
        return first

    def is_running(self) -> bool:
        """See `Device`."""
        return self.table.is_running()

    def finish(self) -> int:
        """See `Device`; KernelStoppedError when the launch left early."""
        self.table.finish()
        made = self.table.steps_made()
        self.next_step = (self.next_step + made) % 2**32
        self.pages[:] = self.mailbox.pages
        return made

    def scratch(self, name: str) -> Tensor:
        """A scratch buffer on the host, in the type that it has in the kernel."""
        wide = name in {"router", "qkv", "partial", "logits"}
        return self.buffers.scratch(name, torch.float32 if wide else torch.bfloat16).cpu()

    def write_kv(self, layer: int, row: int, kv: Tensor) -> None:
        """Store K and V [2, KV heads, tokens, head_dim] of a row's first positions."""
        write(self._pool(layer), self._row_pages(layer, row), 0, kv.cuda())

    def read_kv(self, layer: int, row: int, begin: int, end: int) -> Tensor:
        """K and V [2, KV heads, end - begin, head_dim] of a row."""
        return read(self._pool(layer), self._row_pages(layer, row), begin, end).cpu()

    def _fetch(self) -> None:
        torch.cuda.synchronize()
        data = self.buffers.tensor("row_state", (self.rows.nbytes,), torch.uint8).cpu().numpy()
        self.rows = data.view(ROW_STATE.dtype).copy()

    def _pool(self, layer: int) -> Tensor:
        model, page_tokens = self.step.model, self.step.choices.rounding.page_tokens
        shape = (self.pages[0].size, model.num_kv_heads, 2, page_tokens // TILE, model.head_dim // TILE, TILE, TILE)
        return self.buffers.tensor(f"L{layer}.kv", shape, torch.bfloat16)

    def _row_pages(self, layer: int, row: int) -> Tensor:
        group = layer_groups(self.step.model)[1][layer]
        return torch.from_numpy(self.pages[group, row].astype(np.int64)).cuda()
