"""Decodes on a card: one table, its weights and pages, rows that join and leave between launches, tokens back.

Owns the state that steps carry from launch to launch: row states, tokens, the number of the next step. Refuses tables
that are not proved. The interpreter's `Memory` has the same verbs, so that one test drives both.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megakernel.abi import MAX_STOPS, ROW_STATE
from megakernel.build import BuiltStep
from megakernel.config import ConfigError
from megakernel.hardware import HardwareSpec
from megakernel.verify import verify
from runtime.gpu.buffers import NO_END, LiveInputs, StepBuffers, random_inputs
from runtime.gpu.compile import compile_kernel
from runtime.gpu.launch import DEADLINE_MS, LoadedTable
from runtime.gpu.postmortem import GraphTitles
from runtime.gpu.specialize import KernelOptions, specialize
from runtime.kv_pages import TILE, layer_groups, read, write
from runtime.sampling import GREEDY, SamplingParams
from runtime.weights import Weights


class Decoder:
    """Rows of one bucket, decoded step by step."""

    def __init__(
        self,
        step: BuiltStep,
        chip: HardwareSpec,
        weights: Weights | None = None,
        *,
        options: KernelOptions | None = None,
        model: Decoder | None = None,
        first_step: int = 0,
    ) -> None:
        """Prove, compile and load; without `weights` they are drawn, or those of `model`. All rows are empty."""
        findings = verify(step.graph, step.table)
        if findings:
            raise ConfigError("the table is not sound:\n" + "\n".join(map(str, findings)))
        self.step, self.chip = step, chip
        compiled = compile_kernel(specialize(step, chip, options or KernelOptions()), chip.architecture)
        titles = GraphTitles(step.graph, step.counter_titles)
        self.table = LoadedTable(compiled, step.table, titles, proved_digest=step.table.digest)
        shared = model.buffers if model else None
        self.buffers = StepBuffers(step, shared, weights=weights, drawn="normal")
        inputs = random_inputs(step, ())
        self.pages: np.ndarray = inputs.pages
        self.rows: np.ndarray = np.zeros(step.bucket.rows, ROW_STATE.dtype)
        self.next_step = first_step
        self._addresses = self.buffers.set_inputs(LiveInputs(self.rows, self.pages, inputs.routed))
        self._tokens = self.buffers.tensor("tokens", (step.bucket.rows,), torch.int32)

    def join(
        self,
        row: int,
        token: int,
        position: int,
        sampling: SamplingParams = GREEDY,
        *,
        end_position: int = NO_END,
        stops: tuple[int, ...] = (),
    ) -> None:
        """Activate `row`: the next step decodes `token` at `position`; its earlier KV is already in its pages.

        ValueError for more stop ids than fit, or a temperature: rows are decoded greedily.
        """
        if sampling.temperature > 0:
            raise ValueError(f"temperature is {sampling.temperature:g}: the kernel picks the likeliest token, needed 0")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"{len(stops)} stop ids, at most {MAX_STOPS} fit a row")
        self._fetch()
        state = self.rows[row]
        state["position"], state["active"], state["end_position"] = position, 1, end_position
        state["num_stops"] = len(stops)
        state["stops"][: len(stops)] = stops
        state["temperature"], state["top_p"] = 0.0, 1.0
        self._tokens[row] = token
        self.buffers.set_rows(self.rows)

    def leave(self, row: int) -> None:
        """Deactivate `row`."""
        self._fetch()
        self.rows[row]["active"] = 0
        self.buffers.set_rows(self.rows)

    def run(self, steps: int = 1, *, deadline_ms: float = DEADLINE_MS) -> list[list[int | None]]:
        """Run `steps` steps in one launch; each step's tokens by row, None where a row was not active."""
        first = self.next_step
        self.table.arm(self._addresses, steps=steps, first_step=first, deadline_ms=deadline_ms)
        self.table.run()
        self.next_step = (first + steps) % 2**32
        return [self.table.tokens((first + step) % 2**32) for step in range(steps)]

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
