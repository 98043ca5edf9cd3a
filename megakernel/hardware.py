"""What a chip can do and what its steps cost: limits, ceilings and calibrated times, each with its source.

Owns the shape of configs/hardware/*.toml and the rule that no number comes without a source. Refuses to price
anything: the simulator does that with these numbers. Called by every command that takes a chip.
"""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from megakernel.config import Frozen, load_toml
from megakernel.work import WorkCosts

Positive = Annotated[float, Field(gt=0)]
Cost = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(gt=0)]


class Ceiling(Frozen):
    """Highest measured streaming rate of the whole memory when only `num_sms` SMs read."""

    num_sms: Count
    bytes_per_ns: Positive


class Costs(Frozen):
    """Calibrated times of the simulator's model of an SM, the memory and a hand-off.

    One byte per nanosecond is one gigabyte (10^9) per second.
    """

    issue_ns: Cost  # one bulk copy by the producer: wait for the stage, expect, copy
    issue_capped_ns: Cost  # the same with the in-flight cap's extra wait
    copy_latency_ns: Cost  # of a bulk copy, beside its time in the memory's queue
    queue_ramp_ns: Positive  # queue that the memory needs to reach 63% of its rate
    consume_copy_ns: Cost  # consumers, per landed copy
    consume_bytes_per_ns: Positive  # consumers, per byte of a landed copy
    handoff_ns: Cost  # from the last arrival to one waiting thread, idle memory, on average over its turns of polling
    handoff_queue_share: Cost  # how often an arrival waits as long as a copy that is issued with it would queue
    arrive_serial_ns: Cost  # between two arrivals on one counter
    poll_ns: Cost  # a poll's trip there and back, idle memory: finding a wait met takes one, or up to one more
    poll_queue_share: Cost  # share of the memory's queue that each way of such a poll waits behind
    fence_ns: Cost  # what orders an arrival by a release, once no copy of the SM is in flight
    fence_later_share: Cost  # of what copies take beyond those, issued while it waits, the share that it waits for too
    read_back_ns: Cost  # what orders an arrival by reading results back, idle memory
    read_back_queue_share: Cost  # share of the memory's queue that this trip waits behind
    straggle_ns: Cost  # mean of a copy's own, random delay beside the queue
    straggle_queue_share: Cost  # the same as a share of the queue that the copy finds
    work_stretch: Positive  # threads' cycles under load, over cycles at the nominal clock
    l2_bytes_per_ns: Positive  # activations read by an SM's run through L2

    def consume_ns(self, num_bytes: int) -> float:
        """What consumers spend on a copy of so many bytes that they only read."""
        return self.consume_copy_ns + num_bytes / self.consume_bytes_per_ns


class HardwareSpec(Frozen):
    """One chip. `sources` names where each number comes from, by dotted key."""

    name: str
    architecture: str
    num_sms: Count
    sm_clock_mhz: Count
    shared_memory_per_block_bytes: Count
    memory_bytes: Count
    l2_bytes: Count
    datasheet_bytes_per_ns: Positive
    sm_bytes_per_ns: Positive  # one SM's port
    l2_latency_ns: Positive
    dram_latency_ns: Positive
    ceilings: tuple[Ceiling, ...]
    costs: Costs
    work: WorkCosts = WorkCosts()  # of a kernel on this chip; the defaults say where they come from
    sources: dict[str, str]

    @property
    def streaming_bytes_per_ns(self) -> float:
        """Measured streaming rate with all SMs reading."""
        return self.ceilings[-1].bytes_per_ns

    def streaming(self) -> Self:
        """The chip under a kernel that streams its bytes, waits and arrives, and computes nothing."""
        return self.model_copy(update={"work": self.work.streaming()})

    def cycles_ns(self, cycles: float) -> float:
        """Time that threads need for `cycles` while the memory is busy."""
        return cycles * 1e3 / self.sm_clock_mhz * self.costs.work_stretch

    def ceiling_bytes_per_ns(self, num_sms: int) -> float:
        """Streaming rate with `num_sms` SMs reading, interpolated between the measured numbers of SMs."""
        below_sms, below = 0, 0.0
        for each in self.ceilings:
            if num_sms <= each.num_sms:
                share = (num_sms - below_sms) / (each.num_sms - below_sms)
                return below + share * (each.bytes_per_ns - below)
            below_sms, below = each.num_sms, each.bytes_per_ns
        return below

    @model_validator(mode="after")
    def _complete(self) -> Self:
        numbers = {key for key in HardwareSpec.model_fields if key not in {"name", "costs", "work", "sources"}}
        numbers |= {f"costs.{key}" for key in Costs.model_fields}
        works = {f"work.{key}" for key in WorkCosts.model_fields}
        missing, unknown = sorted(numbers - self.sources.keys()), sorted(self.sources.keys() - numbers - works)
        if missing:
            raise ValueError(f"no source is given for {', '.join(missing)}; add to [sources]")
        if unknown:
            raise ValueError(f"[sources] names {', '.join(unknown)}, which is no number of a chip")
        counts = [each.num_sms for each in self.ceilings]
        if not counts or counts != sorted(set(counts)) or counts[-1] != self.num_sms:
            raise ValueError(f"ceilings must be for rising numbers of SMs up to {self.num_sms}, not {counts}")
        return self


def load_hardware(path: str | Path) -> HardwareSpec:
    """Read a chip's TOML file."""
    return load_toml(path, HardwareSpec)


__all__ = ["Ceiling", "Costs", "HardwareSpec", "load_hardware"]
