"""Decodes on a card: one table, its weights and pages, rows that join and leave between launches, tokens back.

Owns the state that steps carry from launch to launch: row states, tokens, page tables, the number of the next step.
Refuses tables that are not proved. The interpreter's `Memory` has the same verbs, so that one test drives both; `Chain`
runs many steps on it without the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megakernel.abi import ROW_STATE
from megakernel.build import BuiltStep
from megakernel.config import ConfigError
from megakernel.hardware import HardwareSpec
from megakernel.model import DenseMlp, RoutedMlp
from megakernel.tiling import TILE_COLUMNS, UNIT_ROWS
from megakernel.verify import verify
from runtime.gpu.buffers import LiveInputs, StepBuffers, random_inputs
from runtime.gpu.compile import compile_kernel
from runtime.gpu.launch import DEADLINE_MS, LoadedTable
from runtime.gpu.mailbox import Mailbox, put_pages
from runtime.gpu.postmortem import GraphTitles
from runtime.gpu.specialize import KernelOptions, resolved, specialize
from runtime.gpu.tags import marks
from runtime.kv_pages import TILE, layer_groups, read, write
from runtime.rows import Command, Decodes, Drop, Extend, Join, row_state
from runtime.weights import LayerWeights, Piece, Weights, weight_pieces


class Decoder(Decodes):
    """Rows of one bucket, decoded step by step."""

    def __init__(  # noqa: PLR0913 - what a step needs, and what tests set
        self,
        step: BuiltStep,
        chip: HardwareSpec,
        weights: Weights | Iterable[Piece] | None = None,
        *,
        options: KernelOptions | None = None,
        model: Decoder | None = None,
        first_step: int = 0,
        pages: int | None = None,
    ) -> None:
        """Prove, compile and load; without `weights` they are drawn, or those of `model`. All rows are empty.

        `pages` each layer's pool has; without, as many as all rows can fill. With `model`, a decoder of another bucket,
        weights and pools are its. `deadline_ms`, the longest wait inside a launch, may be set afterwards.
        """
        findings = verify(step.graph, step.table)
        if findings:
            raise ConfigError("the table is not sound:\n" + "\n".join(map(str, findings)))
        self.step, self.chip = step, chip
        options = resolved(step, options or KernelOptions())
        has_tags = bool(options.logits_ahead)
        compiled = compile_kernel(specialize(step, chip, options), chip.architecture)
        self.table = LoadedTable(
            compiled,
            step.table,
            GraphTitles(step.graph, step.counter_titles),
            proved_digest=step.table.digest,
            marks=marks(step) if has_tags else None,
        )
        shared = model.buffers if model else None
        pieces = weight_pieces(weights) if isinstance(weights, Weights) else weights
        self.buffers = StepBuffers(step, shared, weights=pieces, drawn="normal", pages=pages, has_tags=has_tags)
        self.table.restores += self.buffers.tags()
        inputs = random_inputs(step, ())
        inputs.pages %= self.buffers.num_pages
        self.pages: np.ndarray = inputs.pages
        self.rows: np.ndarray = np.zeros(step.bucket.rows, ROW_STATE.dtype)
        self.next_step = first_step
        self.deadline_ms = DEADLINE_MS
        self._addresses = self.buffers.set_inputs(LiveInputs(self.rows, self.pages, inputs.routed))
        self._tokens = self.buffers.tensor("tokens", (step.bucket.rows,), torch.int32)
        self.mailbox = Mailbox(self.pages, pinned=True)

    @property
    def ring(self) -> npt.NDArray[np.uint64]:
        """See `Device`."""
        return self.table.ring

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

    def seat(self, joins: Mapping[int, Join]) -> None:
        """Have exactly these rows in the next steps; pages of the others stay."""
        self.rows[:] = np.zeros(1, ROW_STATE.dtype)
        tokens = np.zeros(len(self.rows), np.int32)
        before = self.pages.copy()
        for row, join in joins.items():
            put_pages(self.pages, row, join)
            self.rows[row] = row_state(join)[0]
            tokens[row] = join.token
        if not np.array_equal(before, self.pages):
            self.buffers.set_pages(self.pages)
        self._tokens.copy_(torch.from_numpy(tokens))
        self.buffers.set_rows(self.rows)
        torch.cuda.synchronize()

    def weights(self) -> Weights:
        """The packed weights where they lie on the card."""
        buffers, model = self.buffers, self.step.model
        splits = self.step.choices.rounding.project_k_splits
        hidden = model.hidden_size

        def units(name: str, rows: int, columns: int) -> Tensor:
            shape = (rows // UNIT_ROWS, columns // TILE_COLUMNS, UNIT_ROWS, TILE_COLUMNS)
            return buffers.tensor(name, shape, torch.bfloat16)

        def layer(idx: int, mlp: RoutedMlp | DenseMlp) -> LayerWeights:
            experts = mlp.num_experts if isinstance(mlp, RoutedMlp) else 0
            norms = {name: buffers.constants.get(f"L{idx}.{name}") for name in ("q_norm", "k_norm")}
            return LayerWeights(
                **norms,
                input_norm=buffers.constants[f"L{idx}.input_norm"],
                mlp_norm=buffers.constants[f"L{idx}.mlp_norm"],
                qkv=units(f"L{idx}.qkv", splits * (model.q_size + 2 * model.kv_size), hidden // splits),
                output=units(f"L{idx}.output", hidden, model.q_size),
                router=buffers.tensor(f"L{idx}.router", (experts, hidden), torch.bfloat16) if experts else None,
                up=units(f"L{idx}.up", max(experts, 1) * 2 * mlp.width, hidden),
                down=units(f"L{idx}.down", max(experts, 1) * hidden, mlp.width),
            )

        embedding = units("embedding", model.vocab_size, hidden)
        return Weights(
            embedding=embedding,
            head=embedding if model.tied_embeddings else units("head", model.vocab_size, hidden),
            final_norm=buffers.constants["final_norm"],
            layers=tuple(layer(idx, spec.mlp) for idx, spec in enumerate(model.layers)),
        )

    def pool(self, layer: int) -> Tensor:
        """A layer's pool of KV pages."""
        model, page_tokens = self.step.model, self.step.choices.rounding.page_tokens
        shape = (self.buffers.num_pages, model.num_kv_heads, 2, page_tokens // TILE, model.head_dim // TILE, TILE, TILE)
        return self.buffers.tensor(f"L{layer}.kv", shape, torch.bfloat16)

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Logits [vocab] that the last step left of a row."""
        return self.buffers.scratch("logits", torch.float32)[row].cpu().numpy()

    def run(self, steps: int = 1) -> list[list[int | None]]:
        """Run `steps` steps in one launch; each step's tokens by row, None where a row was not active."""
        first = self.next_step
        self.table.arm(self._addresses, steps=steps, first_step=first, deadline_ms=self.deadline_ms)
        self.table.run()
        self.next_step = (first + steps) % 2**32
        return [self.table.tokens((first + step) % 2**32) for step in range(steps)]

    def time_ms(self, *, steps: int = 8, launches: int = 3) -> float:
        """Milliseconds of a step with all rows there, at the length that placement assumes; no row is, afterwards."""
        bucket = self.step.bucket
        position = max(min(bucket.nominal_context_tokens, bucket.max_context_tokens - steps * launches) - 1, 0)
        steps = min(steps, bucket.max_context_tokens)
        taken: list[float] = []
        for _ in range(launches):
            self.seat({row: Join(row, position) for row in range(bucket.rows)})
            self.table.arm(self._addresses, steps=steps, first_step=self.next_step, deadline_ms=self.deadline_ms)
            taken.append(self.table.time_ms() / steps)
            self.next_step = (self.next_step + steps) % 2**32
        self.seat({})
        return sorted(taken)[launches // 2]

    def begin(self, steps: int) -> int:
        """See `Device`."""
        first = self.next_step
        self.mailbox.pages[:] = self.pages
        self.table.arm(
            self._addresses,
            steps=steps,
            first_step=first,
            mailbox=self.mailbox,
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
        write(self.pool(layer), self._row_pages(layer, row), 0, kv.cuda())

    def read_kv(self, layer: int, row: int, begin: int, end: int) -> Tensor:
        """K and V [2, KV heads, end - begin, head_dim] of a row."""
        return read(self.pool(layer), self._row_pages(layer, row), begin, end).cpu()

    def _fetch(self) -> None:
        torch.cuda.synchronize()
        data = self.buffers.tensor("row_state", (self.rows.nbytes,), torch.uint8).cpu().numpy()
        self.rows = data.view(ROW_STATE.dtype).copy()

    def _row_pages(self, layer: int, row: int) -> Tensor:
        group = layer_groups(self.step.model)[1][layer]
        return torch.from_numpy(self.pages[group, row].astype(np.int64)).cuda()
