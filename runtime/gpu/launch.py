"""Launches a compiled table, alone in knowing how: cooperative, one block an SM, one pointer argument.

Owns the control words of a table on a card - counters, abort word, progress, report, trace - and the deadline of every
launch. A launch that stopped early becomes a `KernelStoppedError` whose message `postmortem` writes; the card stays
usable. Refuses tables that `verify` was not asked about: the caller states the digest it has proved.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]
from cuda.core import (
    Device,  # pyright: ignore[reportAttributeAccessIssue]
    LaunchConfig,  # pyright: ignore[reportAttributeAccessIssue]
    ObjectCode,  # pyright: ignore[reportAttributeAccessIssue]
    Stream,  # pyright: ignore[reportAttributeAccessIssue]
    launch,  # pyright: ignore[reportAttributeAccessIssue]
)
from torch import Tensor

from megakernel.abi import CLOCKS, LAUNCH, MAX_KINDS, PROGRESS, REPORT, SINK_WORDS, TRACE, Stop
from megakernel.config import ConfigError
from megakernel.kinds import TaskKind
from megakernel.table import TaskTable
from runtime.gpu.buffers import Addresses, upload
from runtime.gpu.compile import ENTRY, CompiledKernel
from runtime.gpu.mailbox import Mailbox, Word
from runtime.gpu.postmortem import Evidence, TaskTitles, explain
from runtime.gpu.trace import TraceData

DEADLINE_MS = 200.0
"""Longest wait inside a launch; a step takes under 3 ms."""

CLOCK_MHZ = 1980.0
"""Of the SMs, at most: what cycles of deadlines and delays are counted by."""

LINE_BYTES = 128

TOKENS_OUT_STEPS = 1024
"""Steps whose tokens the host can still read; a power of two."""


class KernelStoppedError(Exception):
    """A launch that left early; the message names the first task that should have fired."""


@dataclass(frozen=True)
class Work:
    """Cycles that the streaming mode spends, by kind: planning, before the early signal, before the first copy."""

    load: dict[TaskKind, int] = field(default_factory=dict[TaskKind, int])
    early: dict[TaskKind, int] = field(default_factory=dict[TaskKind, int])
    run: dict[TaskKind, int] = field(default_factory=dict[TaskKind, int])


NO_WORK = Work()


@dataclass(frozen=True)
class Fuzz:
    """Random delays before loads and runs, of a kernel compiled for them: of up to `most_us` microseconds."""

    seed: int = 0
    most_us: float = 0.0


NO_FUZZ = Fuzz()


class LoadedTable:
    """A table on a card, with its kernel and control words."""

    def __init__(
        self,
        compiled: CompiledKernel,
        table: TaskTable,
        titles: TaskTitles,
        *,
        proved_digest: str | None,
        marks: np.ndarray | None = None,
    ) -> None:
        """Load the cubin and upload the table; `proved_digest` None is for tests that break tables on purpose.

        `marks` of its records are for kernels whose logits carry tags; `restores` then clears those.
        """
        if proved_digest is not None and proved_digest != table.digest:
            raise ConfigError(f"table {table.digest} was not verified; {proved_digest} was")
        self.table, self.titles, self.compiled = table, titles, compiled
        device_id = take_device()
        self._code = ObjectCode.from_cubin(compiled.cubin)
        self._kernel = self._code.get_kernel(ENTRY)
        spec = compiled.specialization
        allow_shared_memory(self._kernel.handle, device_id, spec.shared_bytes)
        if self.blocks_per_sm < 1:
            raise ConfigError("no block of this kernel fits on an SM of the card: fewer ring stages would")
        self._config = LaunchConfig(
            grid=table.num_sms, block=spec.block_threads, shmem_size=spec.shared_bytes, is_cooperative=True
        )
        self.stream = torch.cuda.Stream()
        self._core_stream = Stream.from_handle(self.stream.cuda_stream)
        records = table.records.copy()
        records["reserved"][:, 0] = 0 if marks is None else marks
        self._static = [upload(part) for part in (table.offsets, table.totals, records)]
        counter_words = max(table.num_counters, 1) * spec["kCounterStride"]
        # One block, zeroed at once: counters, then a line each for the words that all blocks share, then progress.
        words = LINE_BYTES // 4
        sizes = {"counters": counter_words, **dict.fromkeys(("present", "abort", "boundary"), words)}
        sizes["sink"] = (1 + table.num_sms) * SINK_WORDS
        self._at: dict[str, int] = {}
        for name, size in {**sizes, "progress": 2 * table.num_sms}.items():
            self._at[name] = self._at["end"] if self._at else 0
            self._at["end"] = self._at[name] + size
        self._control = torch.zeros(self._at["end"], dtype=torch.int32, device="cuda")
        self._trace = torch.zeros(len(table.records) * TRACE.dtype.itemsize, dtype=torch.uint8, device="cuda")
        self._clocks = torch.zeros(table.num_sms * CLOCKS.dtype.itemsize, dtype=torch.uint8, device="cuda")
        self._report = torch.zeros(REPORT.dtype.itemsize, dtype=torch.uint8, pin_memory=True)
        self._launch_host = torch.zeros(LAUNCH.dtype.itemsize, dtype=torch.uint8, pin_memory=True)
        self._launch = torch.zeros(LAUNCH.dtype.itemsize, dtype=torch.uint8, device="cuda")
        self._tokens = torch.zeros(TOKENS_OUT_STEPS * spec["kRows"], dtype=torch.int64, pin_memory=True)
        self._record = np.zeros(1, LAUNCH.dtype)
        self._first_step = 0
        self.fuzz = NO_FUZZ
        self.restores: list[tuple[Tensor, Tensor]] = []
        torch.cuda.synchronize()

    @property
    def blocks_per_sm(self) -> int:
        """Blocks of this kernel that fit on one SM."""
        spec = self.compiled.specialization
        occupancy = self._kernel.occupancy
        return occupancy.max_active_blocks_per_multiprocessor(spec.block_threads, spec.shared_bytes)

    def arm(
        self,
        addresses: Addresses,
        *,
        steps: int = 1,
        first_step: int = 0,
        work: Work = NO_WORK,
        mailbox: Mailbox | None = None,
        deadline_ms: float = DEADLINE_MS,
    ) -> None:
        """Say what the following launches run; they may be repeated without saying it again."""
        record = self._record
        for name in Addresses.__dataclass_fields__:
            record[name] = getattr(addresses, name)
        for name, tensor in zip(("offsets", "totals", "records"), self._static, strict=True):
            record[name] = tensor.data_ptr()
        base = self._control.data_ptr()
        for name in ("counters", "present", "abort", "sink", "boundary", "progress"):
            record[name] = base + 4 * self._at[name]
        record["report"], record["trace"] = self._report.data_ptr(), self._trace.data_ptr()
        record["clocks"] = self._clocks.data_ptr()
        record["tokens_out"], record["tokens_out_steps"] = self._tokens.data_ptr(), TOKENS_OUT_STEPS
        record["mailbox"] = mailbox.address if mailbox else 0
        record["pages_in"] = mailbox.pages_address if mailbox else 0
        record["mailbox_sm"] = self._sampling_sm()
        record["fuzz_seed"], record["fuzz_cycles"] = self.fuzz.seed, int(self.fuzz.most_us * CLOCK_MHZ)
        record["deadline_cycles"] = int(deadline_ms * CLOCK_MHZ * 1e3)
        record["first_step"], record["num_steps"] = first_step, steps
        record["trace_step"] = (first_step + steps - 1) % 2**32
        for name in ("load", "early", "run"):
            cycles = np.zeros(MAX_KINDS, "<u4")
            for kind, value in getattr(work, name).items():
                cycles[kind] = value
            record[f"{name}_cycles"] = cycles
        self._first_step = first_step
        torch.cuda.synchronize()
        self._launch_host.copy_(torch.from_numpy(record.view(np.uint8).reshape(-1).copy()))
        self._launch.copy_(self._launch_host)
        torch.cuda.synchronize()

    def reset(self) -> None:
        """Put counters and control words where the next launch expects them; asynchronous."""
        with torch.cuda.stream(self.stream):
            self._control.zero_()
            for to, state in self.restores:  # what steps change, and a repeated launch must find as it was
                to.copy_(state)
            if self.compiled.specialization["kTrace"]:
                self._trace.zero_()
            if self._first_step:
                totals = self.table.totals.astype(np.uint64)
                values = np.zeros(self._at["present"], "<u4")
                stride = self.compiled.specialization["kCounterStride"]
                values[::stride][: len(totals)] = (totals * self._first_step) % 2**32
                self._control[: len(values)].copy_(torch.from_numpy(values.view("<i4")))

    def launch(self) -> None:
        """Queue one launch; asynchronous. `reset` comes before, `finish` after."""
        launch(self._core_stream, self._config, self._kernel, self._launch.data_ptr())

    def finish(self) -> None:
        """Wait for the launch; KernelStoppedError when it left early."""
        self.stream.synchronize()
        report = self._report.numpy().view(REPORT.dtype)[0]
        if report["stop"] == Stop.NONE:
            return
        evidence = Evidence(report.copy(), self.counters(), self.progress(), self._first_step)
        self._report.zero_()
        raise KernelStoppedError(explain(self.table, self.titles, evidence))

    def run(self) -> None:
        """One launch from reset to finish."""
        self.reset()
        self.launch()
        self.finish()

    @property
    def ring(self) -> np.ndarray:
        """Words that steps leave for the host, [steps, rows] uint64."""
        return self._tokens.numpy().view(np.uint64).reshape(TOKENS_OUT_STEPS, -1)

    def forget_tokens(self) -> None:
        """Mark all words of the ring as of the step before the first; before a launch whose words are awaited."""
        self.ring[:] = np.uint64(self._first_step << 32)

    def is_running(self) -> bool:
        """Whether a launch goes on."""
        return not self.stream.query()

    def steps_made(self) -> int:
        """How many steps the last launch made: fewer than it was armed with where it was halted.

        A halt lets one more step follow, which a launch that was at its last does not have.
        """
        steps, has_ended = self._words(self._at["boundary"], 2)
        armed = int(self._record["num_steps"][0])
        return min(int(steps), armed) if has_ended else armed

    def tokens(self, step: int) -> list[int | None]:
        """Tokens of all rows that `step` made; None where a row was not active."""
        words = [int(word) for word in self.ring[step % TOKENS_OUT_STEPS]]
        made = (step + 1) % 2**32
        return [Word.read(word).token if word >> 32 == made else None for word in words]

    def _sampling_sm(self) -> int:
        """List whose block samples; 0 where none does."""
        records = np.flatnonzero(self.table.records["kind"] == TaskKind.SAMPLE)
        return int(np.searchsorted(self.table.offsets, records[0], side="right")) - 1 if len(records) else 0

    def counters(self) -> np.ndarray:
        """Values of all counters."""
        stride = self.compiled.specialization["kCounterStride"]
        return self._words(0, self._at["present"])[::stride][: self.table.num_counters].copy()

    def progress(self) -> np.ndarray:
        """How far each SM came."""
        return self._words(self._at["progress"], 2 * self.table.num_sms).view(PROGRESS.dtype)

    def trace(self) -> TraceData:
        """Trace of the last launch's last step."""
        assert self.compiled.specialization["kTrace"], "compiled without a trace"
        return TraceData(
            self._trace.cpu().numpy().view(TRACE.dtype).copy(), self._clocks.cpu().numpy().view(CLOCKS.dtype).copy()
        )

    def time_ms(self) -> float:
        """Milliseconds of one launch, by events around it; the launch must end well."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.reset()
        begin.record(self.stream)
        self.launch()
        end.record(self.stream)
        self.finish()
        return begin.elapsed_time(end)

    def _words(self, begin: int, count: int) -> np.ndarray:
        tensor: Tensor = self._control[begin : begin + count]
        return tensor.cpu().numpy().view("<u4")


def take_device() -> int:
    """Make torch's present device the one that code is loaded to; its number."""
    device = Device(torch.cuda.current_device())
    device.set_current()
    return device.device_id


def allow_shared_memory(kernel: object, device_id: int, num_bytes: int) -> None:
    """Let a kernel, by its handle, take so much dynamic shared memory."""
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _check(driver.cuKernelSetAttribute(attribute, num_bytes, kernel, driver.CUdevice(device_id)))


def _check(result: tuple[object, ...]) -> None:
    status = result[0]
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver answered {status}")
