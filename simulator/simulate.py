"""Runs a program on a chip: one SimPy environment, one memory, its counters, and an SM per record list.

Owns the choice between exact mode (every copy is issued by its own event) and fast mode (several copies at once),
and the refusal of programs that stop for ever. Refuses to read files or to print. Called by the front ends.
"""

from sys import maxsize

from megakernel.hardware import HardwareSpec
from megakernel.uncollected import uncollected
from simulator.counters import Counters
from simulator.memory import Memory
from simulator.producer import Shared
from simulator.program import Program, ProgramError
from simulator.result import Result
from simulator.sm import StreamingMultiprocessor
from simulator.timer import Clock

# Larger batches are faster and agree less with the exact mode (see tests/accuracy).
FAST_BATCH_COPIES = 4
FAST_BATCH_BYTES = 48 * 1024


def simulate(program: Program, chip: HardwareSpec, *, exact: bool = False) -> Result:
    """Run `program` to its end and return what happened when."""
    if len(program.sms) > chip.num_sms:
        raise ProgramError(f"the program has {len(program.sms)} SMs and {chip.name} has {chip.num_sms}")
    env = Clock()
    memory = Memory(chip, len(program.sms))
    counters = Counters(env, chip, memory, program)
    batch = 1 if exact else max(1, min(FAST_BATCH_COPIES, FAST_BATCH_BYTES // program.ring.copy_bytes))
    shared = Shared(
        env=env,
        chip=chip,
        memory=memory,
        counters=counters,
        ring=program.ring,
        batch_copies=batch,
        slots=program.slots or maxsize,
        follow_ns=program.follow_ns,
        longest_turn=program.longest_turn,
    )
    sms = [StreamingMultiprocessor(shared, sm, records) for sm, records in enumerate(program.sms)]
    for sm in sms:
        sm.start()
    with uncollected():
        env.run_timers()
    for idx, sm in enumerate(sms):
        if not sm.is_done:
            raise ProgramError(f"the program stops for ever: SM {idx} is {sm.blocked_at}")
    return Result(
        total_ns=max((sm.times.end_ns[-1] for sm in sms if len(sm.times.end_ns)), default=0.0),
        bytes_read=memory.bytes_read,
        memory_busy_ns=memory.busy_ns,
        num_records=sum(len(sm.times.end_ns) for sm in sms),
        sms=tuple(sm.times for sm in sms),
    )
