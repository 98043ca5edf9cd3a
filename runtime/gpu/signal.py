"""What signals between SMs cost by themselves: one to another, and all to all, in idle memory and behind copies.

Owns csrc/signal.cu's request and its launches. An arrival in a table costs this and what the loop does around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from cuda.core import (
    LaunchConfig,  # pyright: ignore[reportAttributeAccessIssue]
    ObjectCode,  # pyright: ignore[reportAttributeAccessIssue]
    Stream,  # pyright: ignore[reportAttributeAccessIssue]
    launch,  # pyright: ignore[reportAttributeAccessIssue]
)
from torch import Tensor

from megakernel.hardware import HardwareSpec
from runtime.gpu.buffers import upload
from runtime.gpu.compile import compile_source
from runtime.gpu.launch import (
    CLOCK_MHZ,
    DEADLINE_MS,
    LINE_BYTES,
    KernelStoppedError,
    allow_shared_memory,
    take_device,
)
from runtime.gpu.measure import Timed
from runtime.gpu.specialize import Specialization

COPY_BYTES, STAGES, THREADS = 8192, 24, 64
RENDERED = Specialization((("kCopyBytes", COPY_BYTES), ("kStages", STAGES), ("kThreads", THREADS))).render()
"""Constants of csrc/signal.cu."""

UNTIMED, TURNS = 132, 1000
"""The untimed turns are over before the copies of all SMs have come to their pace."""


@dataclass(frozen=True)
class Signal:
    """One kind of signal: between two SMs in turns, or of all SMs to all, with so many copies in flight to each SM."""

    of_all: bool
    reads_back: bool
    in_flight: int

    @property
    def name(self) -> str:
        """Group and case, as a sample is called."""
        arrival = "read back" if self.reads_back else "release"
        return (
            f"{'fan-in' if self.of_all else 'signal'} | {arrival}, {self.in_flight * COPY_BYTES // 1024} KB in flight"
        )


SIGNALS = tuple(
    Signal(of_all, reads_back, in_flight)
    for of_all, reads_back, in_flight in product((False, True), (False, True), (0, 5, 8, STAGES))
)


class SignalBench:
    """Times signals on the present card."""

    def __init__(self, chip: HardwareSpec, arena: Tensor) -> None:
        """Compile; `arena` is what the copies read."""
        self.num_sms, self.arena = chip.num_sms, arena
        cubin, _ = compile_source("signal.cu", "signals", RENDERED, chip.architecture)
        device_id = take_device()
        self._code = ObjectCode.from_cubin(cubin)
        self._kernel = self._code.get_kernel("signals")
        allow_shared_memory(self._kernel.handle, device_id, STAGES * COPY_BYTES)
        self._config = LaunchConfig(
            grid=chip.num_sms, block=THREADS, shmem_size=STAGES * COPY_BYTES, is_cooperative=True
        )
        self.stream = torch.cuda.Stream()
        # Lines: the counter, the result, and a block's own.
        self._words = torch.zeros((2 + chip.num_sms) * LINE_BYTES // 8, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()

    def timed(self, signal: Signal, *, turns: int = TURNS, begun: int = 0, deadline_ms: float = DEADLINE_MS) -> Timed:
        """Milliseconds of a signal, the mean of `turns`; KernelStoppedError when one is not met within the deadline.

        The counter starts at `begun`: another value than 0 is one that the players do not reckon with.
        """
        request = upload(self._request(signal, turns, deadline_ms))
        torch.cuda.synchronize()

        def run() -> float:
            with torch.cuda.stream(self.stream):
                self._words.zero_()
                self._words[0].fill_(begun)
            launch(Stream.from_handle(self.stream.cuda_stream), self._config, self._kernel, request.data_ptr())
            self.stream.synchronize()
            nanoseconds, came = self._words[LINE_BYTES // 8 :][:2].tolist()
            if not nanoseconds:
                raise KernelStoppedError(
                    f"{signal.name}: turn {came} of {UNTIMED + turns} did not come within {deadline_ms:.0f} ms"
                )
            return nanoseconds / turns / 1e6

        return run

    def _request(self, signal: Signal, turns: int, deadline_ms: float) -> np.ndarray:
        base = self._words.data_ptr()
        copies = self.arena.numel() // COPY_BYTES
        words = (
            base,
            base + 2 * LINE_BYTES,
            self.arena.data_ptr(),
            copies - copies % self.num_sms,
            base + LINE_BYTES,
            self.num_sms if signal.of_all else 2,
            signal.of_all,
            signal.reads_back,
            signal.in_flight,
            UNTIMED,
            UNTIMED + turns,
            int(deadline_ms * CLOCK_MHZ * 1e3),
        )
        return np.array(words, "<u8")
