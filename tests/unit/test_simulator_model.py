"""The simulator's model against cases whose answer is known without it."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.h200 import CHIP

from megakernel.hardware import HardwareSpec, load_hardware
from simulator.consumers import Consumers
from simulator.producer import Producer
from simulator.program import Label, Program, ProgramError, Record, Ring, Signal, Wait
from simulator.simulate import simulate

LABEL = Label("T")


@pytest.fixture(scope="module")
def chip() -> HardwareSpec:
    """An H200 whose copies are served evenly and whose SMs poll all the time, so that times are closed forms."""
    measured = load_hardware(CHIP)
    costs = measured.costs.model_copy(update={"straggle_ns": 0.0, "straggle_queue_share": 0.0, "poll_ns": 0.0})
    return measured.model_copy(update={"costs": costs})


def idle_copy_ns(chip: HardwareSpec, num_bytes: int, num_sms: int) -> float:
    """From the start of the issue of a copy, into an idle memory, until it has landed."""
    costs = chip.costs
    own_ns = num_bytes / chip.streaming_bytes_per_ns
    served_ns = own_ns / (1 - math.exp(-own_ns / costs.queue_ramp_ns))
    served_ns = max(served_ns, num_bytes / chip.ceiling_bytes_per_ns(num_sms))
    return served_ns + costs.copy_latency_ns + num_bytes / chip.sm_bytes_per_ns


def consume_ns(chip: HardwareSpec, num_bytes: int) -> float:
    return chip.costs.consume_copy_ns + num_bytes / chip.costs.consume_bytes_per_ns


def even(num_sms: int, copies: int, *, phases: int, work_ns: float, ring: Ring) -> Program:
    """Phases in a chain of barriers, every SM alike; they release, as the measured barriers do."""
    records = tuple(
        Record(
            LABEL,
            load_bytes=copies * ring.copy_bytes,
            run_waits=(Wait(phase - 1, num_sms),) if phase else (),
            work_ns=work_ns if phase else 0.0,
            arrive=phase,
        )
        for phase in range(phases)
    )
    return Program(ring, (records,) * num_sms, phases, arrival="release")


@pytest.mark.parametrize("exact", [True, False])
def test_one_copy_of_one_sm_takes_issue_latency_port_and_use(chip, exact):
    ring = Ring(8192, 4)
    found = simulate(Program(ring, ((Record(LABEL, load_bytes=8192),),), 0), chip, exact=exact)
    expected = chip.costs.issue_ns + idle_copy_ns(chip, 8192, 1) + consume_ns(chip, 8192)
    assert found.total_ns == pytest.approx(expected)
    assert found.bytes_read == 8192


@pytest.mark.parametrize(("copy_bytes", "bytes_per_ns"), [(4096, 48), (8192, 96), (16384, 180)])
def test_one_sm_is_limited_by_its_issue_rate_or_its_port(chip, copy_bytes, bytes_per_ns):
    num_bytes = 500 * copy_bytes
    found = simulate(
        Program(Ring(copy_bytes, 204800 // copy_bytes), ((Record(LABEL, load_bytes=num_bytes),),), 0), chip
    )
    assert num_bytes / found.total_ns == pytest.approx(bytes_per_ns, rel=0.05)


@pytest.mark.parametrize("exact", [True, False])
def test_all_sms_together_stream_at_the_measured_rate(chip, exact):
    ring = Ring(8192, 25)
    program = Program(ring, ((Record(LABEL, load_bytes=1000 * 8192),),) * 132, 0)
    found = simulate(program, chip, exact=exact)
    rate = found.bytes_read / found.total_ns
    assert rate == pytest.approx(chip.streaming_bytes_per_ns, rel=0.01 if exact else 0.02)
    assert found.memory_busy_ns == pytest.approx(found.bytes_read / chip.streaming_bytes_per_ns)


def test_fewer_sms_stream_at_their_measured_rate(chip):
    program = Program(Ring(16384, 12), ((Record(LABEL, load_bytes=400 * 16384),),) * 48, 0)
    found = simulate(program, chip)
    assert found.bytes_read / found.total_ns == pytest.approx(3864, rel=0.02)


@pytest.mark.parametrize(("num_sms", "rel"), [(1, 0.02), (132, 0.01)])
def test_a_barrier_on_an_idle_memory_takes_one_way_and_the_fan_in_or_all_turns_of_polling(num_sms, rel):
    """One way is measured between two SMs, of which one polls: half a poll's trip on average is part of it.

    Alone, an SM sees its own arrival half a trip later on average. Of many the first to see goes on at once, and all
    others are queued at the counter behind it, or come in their turn of polling, whatever takes longer.
    """
    chip, phases = load_hardware(CHIP), 200
    found = simulate(even(num_sms, 0, phases=phases, work_ns=0.0, ring=Ring(8192, 4)), chip)
    costs = chip.costs
    spread_ns = 0.5 * costs.poll_ns if num_sms == 1 else max(costs.arrive_serial_ns * (num_sms - 1), costs.poll_ns)
    barrier_ns = costs.handoff_ns - 0.5 * costs.poll_ns + spread_ns
    assert found.total_ns / (phases - 1) == pytest.approx(barrier_ns, rel=rel)


def test_the_idle_barrier_of_all_sms_is_the_measured_one():
    costs = load_hardware(CHIP).costs
    assert costs.handoff_ns - 0.5 * costs.poll_ns + 131 * costs.arrive_serial_ns == pytest.approx(920, abs=10)


@pytest.mark.parametrize("copies_in_flight", [1, 2, 4])
def test_a_capped_sm_moves_its_cap_once_a_latency(chip, copies_in_flight):
    """Little's law: with few bytes in flight the rate is cap over latency."""
    ring = Ring(2048, 64, in_flight_cap_bytes=copies_in_flight * 2048)
    num = 400
    found = simulate(Program(ring, ((Record(LABEL, load_bytes=num * 2048),),), 0), chip, exact=True)
    round_ns = chip.costs.issue_capped_ns + idle_copy_ns(chip, 2048, 1)
    step_ns = max(round_ns / copies_in_flight, chip.costs.issue_capped_ns)
    assert found.total_ns / num == pytest.approx(step_ns, rel=0.25)


@pytest.mark.parametrize("exact", [True, False])
def test_an_uncapped_ring_hides_nothing_and_a_cap_does(exact):
    """The finding that decides the design; four phases a layer, 1 us of work each, 12 layers."""
    measured = load_hardware(CHIP)
    work_ns, phases, copies = 1000.0, 48, 32
    streamed_ns = copies * 132 * 8192 / measured.streaming_bytes_per_ns

    def phase_ns(cap: int | None) -> float:
        program = even(132, copies, phases=phases, work_ns=work_ns, ring=Ring(8192, 25, cap))
        return simulate(program, measured, exact=exact).total_ns / phases

    assert phase_ns(None) == pytest.approx(streamed_ns + work_ns + 1250, rel=0.06)
    assert phase_ns(48 * 1024) < 1.05 * streamed_ns


def test_a_short_last_copy_costs_its_bytes(chip):
    ring = Ring(8192, 4)
    found = simulate(Program(ring, ((Record(LABEL, load_bytes=8192 + 100),),), 0), chip)
    assert found.bytes_read == 8292


def test_a_signal_leaves_after_its_work_and_delays_the_run(chip):
    ring = Ring(8192, 4)
    sender = (Record(LABEL, signal=Signal(0, 300.0), work_ns=5000.0, arrive=1),)
    waiter = (Record(LABEL, run_waits=(Wait(0, 1),)),)
    found = simulate(Program(ring, (sender, waiter), 2, arrival="release"), chip)
    assert found.sms[0].end_ns[0] == pytest.approx(5300 + chip.costs.fence_ns)
    assert found.sms[1].run_start_ns[0] == pytest.approx(300 + chip.costs.handoff_ns)
    assert found.sms[1].run_wait_ns == pytest.approx(300 + chip.costs.handoff_ns)


def test_an_arrival_holds_its_threads_until_the_release_has_gone(chip):
    ring = Ring(8192, 4)
    records = (Record(LABEL, work_ns=1000.0, arrive=0), Record(LABEL, work_ns=1000.0), Record(LABEL))
    found = simulate(Program(ring, (records,), 1, arrival="release"), chip)
    assert list(found.sms[0].run_start_ns) == pytest.approx([0, 1000 + chip.costs.fence_ns, 2000 + chip.costs.fence_ns])


def arrived_ns(chip, arrival, copies=20):
    """When a waiter sees the arrival of an SM that has loads for its next record in flight."""
    sender = (Record(LABEL, work_ns=1500.0, arrive=0), Record(LABEL, load_bytes=copies * 8192, work_ns=9000.0))
    waiter = (Record(LABEL, run_waits=(Wait(0, 1),)),)
    found = simulate(Program(Ring(8192, 24), (sender, waiter), 1, arrival=arrival), chip, exact=True)
    return found.sms[1].run_start_ns[0], found


def test_a_release_waits_for_the_copies_in_flight_and_other_arrivals_do_not(chip):
    idle = {arrival: arrived_ns(chip, arrival, copies=0)[0] for arrival in ("release", "read_back", "relaxed")}
    costs = chip.costs
    assert idle["release"] == pytest.approx(1500 + costs.handoff_ns)
    assert idle["relaxed"] == pytest.approx(1500 + costs.handoff_ns - costs.fence_ns)
    assert idle["read_back"] == pytest.approx(idle["relaxed"] + costs.read_back_ns)
    released, found = arrived_ns(chip, "release")
    assert found.sms[0].landed_ns[1] > 2000.0
    # Of the time that copies take which are issued after the release has begun, it waits for a share.
    later_ns = (20 - int(1500 / costs.issue_ns)) * costs.issue_ns
    expected = found.sms[0].landed_ns[1] - (1.0 - costs.fence_later_share) * later_ns
    assert released == pytest.approx(expected + costs.handoff_ns, abs=costs.issue_ns)
    for arrival in ("read_back", "relaxed"):
        assert arrived_ns(chip, arrival)[0] < idle[arrival] + 300.0


@pytest.mark.parametrize(
    ("arrival", "copies", "cycles"),
    [
        *(("release", copies, cycles) for copies, cycles in enumerate((1309, 1706, 2000, 2284, 2701, 3364), 1)),
        *(("release", copies, cycles) for copies, cycles in ((8, 5071), (12, 8233), (24, 18437))),
        *(("read_back", copies, cycles) for copies, cycles in ((1, 464), (5, 561), (8, 962), (12, 1395), (24, 2798))),
    ],
)
def test_what_an_arrival_costs_its_thread_is_about_what_was_measured(arrival, copies, cycles):
    """tests/bench/LOG.md: a thread arrives while another keeps as many copies of 8 KB in flight on every SM."""
    measured = load_hardware(CHIP)
    stream = Record(LABEL, load_bytes=900 * 8192)
    turns = tuple(Record(LABEL, arrive=0) for _ in range(30))
    # The copies are the last record's, so that only the ring and its cap hold them up.
    ring = Ring(8192, 900, copies * 8192)
    program = Program(ring, (((*turns, stream)),) * 132, 1, arrival=arrival)
    ends = simulate(program, measured, exact=True).sms[0].end_ns
    # Past the first few, while the stream still lasts.
    spent = (ends[25] - ends[5]) / 20
    assert spent == pytest.approx(cycles / 1.98, rel=0.45)


def test_of_a_list_no_more_records_are_begun_than_there_are_slots(chip):
    records = tuple(Record(LABEL, load_bytes=8192, compute_ns=1000.0) for _ in range(6))
    ring = Ring(8192, 12)
    (free,), (two,), (drained,) = (
        simulate(Program(ring, (records,), 0, slots=slots), chip).sms for slots in (None, 2, 1)
    )
    assert free.load_start_ns[5] < free.end_ns[0]
    for times, slots in ((two, 2), (drained, 1)):
        begun = [times.load_start_ns[idx + slots] - times.end_ns[idx] for idx in range(6 - slots)]
        assert begun == pytest.approx([0.0] * len(begun)), "at once when a slot is free"
    assert drained.end_ns[5] > two.end_ns[5] >= free.end_ns[5]


@pytest.mark.parametrize("exact", [True, False])
def test_a_copy_that_is_served_late_holds_its_tasks_end_and_not_the_copies_behind_it(chip, exact):
    """One SM, a delay of its own for every copy: a task of many ends with the latest, and tasks don't add theirs up."""
    late = chip.model_copy(update={"costs": chip.costs.model_copy(update={"straggle_ns": 300.0})})

    def ends(chip: HardwareSpec, tasks: int) -> list[float]:
        records = (Record(LABEL, load_bytes=12 * 8192),) * tasks
        return list(simulate(Program(Ring(8192, 12 * tasks), (records,), 0), chip, exact=exact).sms[0].end_ns)

    held = [end - even for end, even in zip(ends(late, 20), ends(chip, 20), strict=True)]
    assert min(held) >= 0.0
    assert max(held) <= 8.0 * 300.0, "the latest of 240 copies is late by six means; were delays added up, by hundreds"
    assert sum(held) / len(held) >= 1.5 * 300.0, "and that of twelve by three, of which a part is hidden behind others"


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("turn", [1, 2, 4, 8])
def test_a_copy_is_one_warps_and_the_next_one_is_a_turn_further(chip, exact, turn):
    """16 copies that landed long before: turns one after another, in each of which all warps use a copy at once."""
    ring, wait = Ring(8192, 16), (Wait(0, 1),)
    record = Record(
        LABEL, load_bytes=16 * 8192, run_waits=wait, fetch_ns=300.0, warp_ns=2000.0, turn=turn, work_ns=50.0
    )
    sender = (Record(LABEL, work_ns=90_000.0, arrive=0),)
    (_, times) = simulate(Program(ring, (sender, (record,)), 1), chip, exact=exact).sms
    # They are read one after another, batches together, of which a warp has one copy at a time.
    apart = (turn - (1 if exact else min(turn, 4))) * consume_ns(chip, 8192)
    assert times.end_ns[0] - times.run_start_ns[0] == pytest.approx(50.0 + 16 // turn * 2300.0 + apart)


def test_a_warp_fetches_while_its_copy_is_on_its_way(chip):
    def total(**spent: float) -> float:
        return simulate(Program(Ring(8192, 4), ((Record(LABEL, load_bytes=8192, **spent),),), 0), chip).total_ns

    landed = chip.costs.issue_ns + idle_copy_ns(chip, 8192, 1)
    assert total(warp_ns=900.0) == pytest.approx(landed + 900.0)
    assert total(warp_ns=900.0, fetch_ns=100.0) == pytest.approx(landed + 900.0)
    assert total(warp_ns=900.0, fetch_ns=5000.0) == pytest.approx(5900.0)


def test_what_a_warp_takes_longer_for_does_not_hold_the_others(chip):
    """40 copies of one SM: five turns of 8 warps where warps are slow, the stream where they are fast."""
    ring = Ring(8192, 12)

    def total(warp_ns: float) -> float:
        record = Record(LABEL, load_bytes=40 * 8192, warp_ns=warp_ns)
        return simulate(Program(ring, ((record,),), 0), chip, exact=True).total_ns

    assert total(400.0) == pytest.approx(total(0.0), abs=400.0)
    assert total(10_000.0) == pytest.approx(5 * 10_000.0, rel=0.05)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("copies", [1, 5, 8])
def test_copies_that_lead_to_an_early_signal_are_used_one_after_another_before_it(chip, exact, copies):
    ring, wait = Ring(8192, 16), (Wait(0, 1),)
    start = (Record(LABEL, work_ns=90_000.0, arrive=0),)
    leads = (Record(LABEL, load_bytes=8 * 8192, run_waits=wait, signal=Signal(1, 700.0, copies, 900.0), warp_ns=500.0),)
    sees = (Record(LABEL, run_waits=(Wait(1, 1),)),)
    _, ours, others = simulate(Program(ring, (start, leads, sees), 2, arrival="relaxed"), chip, exact=exact).sms
    led = 700.0 + copies * 900.0
    handed = chip.costs.handoff_ns - chip.costs.fence_ns
    assert others.run_start_ns[0] - ours.run_start_ns[0] == pytest.approx(led + handed)
    took = ours.end_ns[0] - ours.run_start_ns[0]
    if copies == 8:
        assert took == pytest.approx(led)
    else:
        assert led + 500.0 <= took + 1e-6 <= led + 500.0 + (8 - copies) * consume_ns(chip, 8192) + 1e-3


@pytest.mark.parametrize("exact", [True, False])
def test_only_what_may_be_fetched_ahead_is_there_when_the_wait_is_met(chip, exact):
    ring = Ring(8192, 12)
    slow = (Record(LABEL, work_ns=9000.0, arrive=0),)

    def landed(ahead):
        record = Record(LABEL, load_bytes=8 * 8192, run_waits=(Wait(0, 1),), ahead_bytes=ahead)
        return simulate(Program(ring, (slow, (record,)), 1), chip, exact=exact)

    met = 9000 + chip.costs.handoff_ns
    everything, some, nothing = (landed(ahead) for ahead in (None, 4 * 8192, 0))
    assert everything.sms[1].landed_ns[0] < met < some.sms[1].landed_ns[0] < nothing.sms[1].landed_ns[0]
    assert nothing.sms[1].end_ns[0] > some.sms[1].end_ns[0] > everything.sms[1].end_ns[0]
    assert {each.bytes_read for each in (everything, some, nothing)} == {8 * 8192}


def test_a_records_own_time_per_copy_is_spent_on_every_copy(chip):
    ring = Ring(8192, 12)
    plain, slow = (
        simulate(Program(ring, ((Record(LABEL, load_bytes=10 * 8192, copy_ns=extra),),), 0), chip)
        for extra in (0.0, 2000.0)
    )
    assert slow.total_ns - plain.total_ns == pytest.approx(9 * 2000.0 + 2000.0, rel=0.1)


def test_a_run_never_starts_before_its_own_load_wait(chip):
    ring = Ring(8192, 4)
    slow = (Record(LABEL, work_ns=9000.0, arrive=0),)
    held = (Record(LABEL, load_waits=(Wait(0, 1),), load_work_ns=200.0, load_bytes=8192),)
    found = simulate(Program(ring, (slow, held), 1, arrival="release"), chip)
    open_ns = 9000 + chip.costs.handoff_ns + 200
    assert found.sms[1].load_start_ns[0] == pytest.approx(open_ns)
    assert found.sms[1].run_start_ns[0] == pytest.approx(open_ns)
    assert found.sms[1].load_wait_ns == pytest.approx(9000 + chip.costs.handoff_ns)


def test_a_wait_that_is_met_long_ago_costs_a_poll():
    ring, chip = Ring(8192, 4), load_hardware(CHIP)
    sender = (Record(LABEL, arrive=0),)
    late = (Record(LABEL, work_ns=9000.0), Record(LABEL, run_waits=(Wait(0, 1),)))
    found = simulate(Program(ring, (sender, late), 1), chip)
    assert found.sms[1].run_start_ns[1] == pytest.approx(9000 + chip.costs.poll_ns)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Small programs without deadlock: waits look at earlier positions of any SM's list only."""
    num_sms = draw(st.integers(1, 3))
    length = draw(st.integers(1, 6))
    stages = draw(st.integers(1, 5))
    cap = draw(st.none() | st.integers(1, 6))
    ring = Ring(4096, stages, None if cap is None else cap * 4096)

    def record(position: int) -> Record:
        waits = st.integers(0, position - 1).map(lambda at: Wait(at, num_sms))
        some = st.lists(waits, max_size=2).map(tuple) if position else st.just(())
        return Record(
            LABEL,
            load_bytes=draw(st.integers(0, 12 * 4096)),
            load_waits=draw(some),
            load_work_ns=draw(st.sampled_from([0.0, 150.0])),
            run_waits=draw(some),
            work_ns=draw(st.sampled_from([0.0, 700.0, 3000.0])),
            arrive=position,
        )

    return Program(ring, tuple(tuple(record(at) for at in range(length)) for _ in range(num_sms)), length)


@settings(max_examples=60, deadline=None)
@given(program=programs(), exact=st.booleans())
def test_the_ring_never_holds_more_than_its_stages(program, exact):
    """Copy i may be issued once copy i - stages is used; every byte is read; equal input, equal times."""
    issued: list[tuple[float, float, int]] = []
    used: list[float] = []  # when each copy was
    one = Program(program.ring, program.sms[:1], program.num_counters) if len(program.sms) == 1 else program
    measured = load_hardware(CHIP)
    with pytest.MonkeyPatch.context() as patch:
        issue, consume = Producer._issue, Consumers.consume

        def logged_issue(self, now_ns):
            if self._is_booked or self._batch_last_ns <= now_ns:  # the last copy of a batch is issued
                issued.append((self._batch_first_ns, self._batch_last_ns, self._batch_bytes))
            return issue(self, now_ns)

        def logged_consume(self, num, landed_ns, now_ns):
            consume(self, num, landed_ns, now_ns)
            used.extend(self._stage_free_ns[-num:])

        patch.setattr(Producer, "_issue", logged_issue)
        patch.setattr(Consumers, "consume", logged_consume)
        found = simulate(one, measured, exact=exact)
    assert found.bytes_read == sum(record.load_bytes for records in one.sms for record in records)
    assert simulate(one, measured, exact=exact).digest() == found.digest()
    if len(one.sms) == 1:
        copy = 0
        for now_ns, last_ns, num_bytes in issued:
            num = -(-num_bytes // 4096)
            for number, at_ns in ((copy, now_ns), (copy + num - 1, last_ns)):
                if number >= one.ring.stages:
                    assert at_ns >= used[number - one.ring.stages] - 1e-6
            copy += num


@pytest.mark.parametrize("exact", [True, False])
def test_equal_programs_give_equal_times_to_the_byte(exact):
    measured = load_hardware(CHIP)
    program = even(132, 20, phases=8, work_ns=500.0, ring=Ring(8192, 25, 40960))
    first, second = (simulate(program, measured, exact=exact) for _ in range(2))
    assert first.digest() == second.digest()


def test_fast_mode_agrees_with_exact_mode():
    measured = load_hardware(CHIP)
    program = even(132, 30, phases=8, work_ns=500.0, ring=Ring(8192, 25, 40960))
    exact, fast = (simulate(program, measured, exact=mode) for mode in (True, False))
    assert fast.total_ns == pytest.approx(exact.total_ns, rel=0.02)
    assert fast.bytes_read == exact.bytes_read


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Program(Ring(8192, 4, 4096), ((),), 0), "below one copy"),
        (lambda: Program(Ring(8192, 0), ((),), 0), "holds no copy"),
        (lambda: Program(Ring(8192, 4), (), 0), "at least one SM"),
        (lambda: Program(Ring(8192, 4), ((Record(LABEL, arrive=3),),), 3), "counter 3 of 3"),
        (lambda: Program(Ring(8192, 4), ((Record(LABEL, load_bytes=-1),),), 0), "-1 bytes"),
        (lambda: Program(Ring(8192, 4), ((Record(LABEL, work_ns=-1.0),),), 0), "negative"),
        (lambda: Program(Ring(8192, 4), ((Record(LABEL, ahead_bytes=100),),), 0), "no number of copies"),
        (lambda: Program(Ring(8192, 4), ((Record(LABEL, turn=0),),), 0), "turns of 0 copies"),
    ],
)
def test_malformed_programs_are_refused(build, message):
    with pytest.raises(ProgramError, match=message):
        build()


def test_more_sms_than_the_chip_are_refused(chip):
    with pytest.raises(ProgramError, match="133 SMs"):
        simulate(Program(Ring(8192, 4), ((),) * 133, 0), chip)


@pytest.mark.parametrize(
    "records",
    [
        (Record(LABEL, run_waits=(Wait(0, 1),), arrive=0),),
        (Record(LABEL, load_waits=(Wait(0, 1),), load_bytes=8192, arrive=0),),
        (Record(LABEL, run_waits=(Wait(0, 1),)), Record(LABEL, arrive=0)),
        # the producer sits in front of a load wait, and the arrival comes from the record behind it
        (Record(LABEL, load_waits=(Wait(0, 1),)), Record(LABEL, load_bytes=8192, arrive=0)),
    ],
)
def test_programs_that_stop_for_ever_are_refused(chip, records):
    with pytest.raises(ProgramError, match="stops for ever"):
        simulate(Program(Ring(8192, 4), (records,), 1), chip)
