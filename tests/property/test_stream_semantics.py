"""What a streaming program means, against a literal reading of it on a chip where only named things take time.

On the textbook chip a copy lands `LATENCY` after its issue whatever else flies, is used in `USE`, an arrival is seen
`HAND_OFF` later, a cycle is a nanosecond, and nothing else costs anything. All SMs are alike, so one of them tells all.
"""

import json
import sys
from math import inf

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.h200 import CHIP

from megakernel.hardware import Ceiling, Costs, HardwareSpec, load_hardware
from simulator.calibrate import chip_toml
from simulator.cli import main
from simulator.simulate import simulate
from simulator.stream import Phase, PhaseSignal, StreamProgram, stream_records

LATENCY, USE, HAND_OFF = 1000.0, 10.0, 500.0
NOWHERE = 1e-12
"""Instead of a zero where a chip's number must be positive."""


def textbook() -> HardwareSpec:
    measured = load_hardware(CHIP)
    costs = dict.fromkeys(Costs.model_fields, 0.0)
    costs |= {"copy_latency_ns": LATENCY, "consume_copy_ns": USE, "handoff_ns": HAND_OFF, "work_stretch": 1.0}
    costs |= {"queue_ramp_ns": NOWHERE, "consume_bytes_per_ns": 1 / NOWHERE, "l2_bytes_per_ns": 1 / NOWHERE}
    return measured.model_copy(
        update={
            "costs": Costs(**costs),
            "sm_clock_mhz": 1000,
            "sm_bytes_per_ns": 1 / NOWHERE,
            "datasheet_bytes_per_ns": 1 / NOWHERE,
            "ceilings": (Ceiling(num_sms=1, bytes_per_ns=1 / NOWHERE), Ceiling(num_sms=132, bytes_per_ns=1 / NOWHERE)),
        }
    )


def literally(program: StreamProgram) -> float:
    """Time of the program, phase by phase and copy by copy."""
    cap = inf if program.in_flight_cap_bytes is None else program.in_flight_cap_bytes // program.copy_bytes
    arrived: dict[tuple[int, str], float] = {}
    issued: list[float] = []
    landed: list[float] = []
    used: list[float] = []
    produced = consumed = 0.0
    phases = [(layer, phase) for layer in range(program.layers) for phase in program.phases]
    phases += [(program.layers, program.tail)] if program.tail else []

    def seen(layer: int, waits: tuple[str, ...]) -> float:
        times = [0.0]
        for wait in waits:
            of_layer = layer - wait.startswith("prev:")
            if of_layer >= 0:
                times.append(arrived[of_layer, wait.removeprefix("prev:")] + HAND_OFF)
        return max(times)

    for layer, phase in phases:
        opened = max(produced, seen(layer, phase.load_after)) + phase.load_work_cycles
        ready = max(consumed, opened, seen(layer, phase.consume_after)) + phase.work_cycles
        if phase.signal is not None:
            ready += phase.signal.work_cycles
            arrived[layer, phase.signal.counter] = ready
        consumed, produced = ready, opened
        for _ in range(phase.copies):
            number = len(issued)
            waits = [produced]
            if number >= program.ring_stages:
                waits.append(used[number - program.ring_stages])
            if number >= cap:
                waits.append(landed[number - int(cap)])
            produced = max(waits)
            issued.append(produced)
            landed.append(produced + LATENCY)
            consumed = max(consumed, landed[-1]) + USE
            used.append(consumed)
        arrived[layer, phase.name] = consumed
    return consumed


@st.composite
def programs(draw: st.DrawFn) -> StreamProgram:
    """Few phases that wait for earlier ones of their layer, and for any of the layer before."""
    names = ["A", "B", "C", "D"][: draw(st.integers(1, 4))]
    signals = {name: f"{name}!" for name in names if draw(st.booleans())}
    counters = [*names, *signals.values()]
    cycles = st.integers(0, 3000)

    def phase(name: str, known: list[str], previous: list[str]) -> Phase:
        waits = st.lists(
            st.sampled_from([*known, *(f"prev:{each}" for each in previous)]), max_size=2, unique=True
        ).map(tuple)
        signal = PhaseSignal(counter=signals[name], work_cycles=draw(cycles)) if name in signals else None
        return Phase(
            name=name,
            copies=draw(st.integers(0, 9)),
            consume_after=draw(waits),
            load_after=draw(waits),
            work_cycles=draw(cycles),
            load_work_cycles=draw(cycles),
            signal=signal,
        )

    def before(name: str) -> list[str]:
        earlier = names[: names.index(name)]
        return [*earlier, *(signals[each] for each in earlier if each in signals)]

    stages = draw(st.integers(1, 6))
    return StreamProgram(
        sms=draw(st.sampled_from([1, 2, 5])),
        copy_bytes=1000,
        ring_stages=stages,
        in_flight_cap_bytes=draw(st.none() | st.integers(1000, 8999)),
        layers=draw(st.integers(1, 4)),
        phases=tuple(phase(name, before(name), counters) for name in names),
        tail=draw(st.none() | st.just(phase("T", [], counters))),
    )


def of_one(copies: int, cap: int | None, stages: int = 25) -> StreamProgram:
    return StreamProgram(
        sms=1, copy_bytes=1000, ring_stages=stages, in_flight_cap_bytes=cap, layers=1,
        phases=(Phase(name="A", copies=copies),), tail=None,
    )  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(programs())
@example(of_one(8, 2999))
@example(of_one(8, None, stages=1))
def test_a_program_takes_as_long_as_it_says(program):
    assert simulate(stream_records(program, textbook()), textbook(), exact=True).total_ns == pytest.approx(
        literally(program), abs=1e-3
    )


CHAIN = {"sms": 3, "copy_bytes": 1000, "ring_stages": 4, "in_flight_cap_bytes": 2500, "layers": 2}


@pytest.mark.parametrize(
    ("program", "expected_ns"),
    [
        # four copies, two in flight: two latencies, the last two used
        ({"layers": 1, "phases": [{"name": "A", "copies": 4}], "tail": None}, 2 * 1000 + 20),
        # work is spent in both layers, though there is nothing to wait for or to load
        ({"phases": [{"name": "A", "copies": 0, "work_cycles": 300}], "tail": None}, 600),
        # nor does it matter that nobody waits for the signal: its cycles are spent, its arrival costs nothing
        ({"phases": [{"name": "A", "copies": 0, "work_cycles": 300, "signal": {"counter": "S", "work_cycles": 50}}],
          "tail": None}, 700),
        # the previous layer's wait is met in the first, and costs a hand-off in the second
        ({"phases": [{"name": "A", "copies": 0, "work_cycles": 300, "consume_after": ["prev:A"]}], "tail": None},
         300 + 500 + 300),
        # in the tail it is the last layer's, and is waited for after a single layer too
        ({"layers": 1, "phases": [{"name": "A", "copies": 0, "work_cycles": 300}],
          "tail": {"name": "T", "copies": 0, "consume_after": ["prev:A"], "work_cycles": 20}}, 300 + 500 + 20),
        # the first copy is fetched after signal, hand-off and the producer's work, and used when it has landed
        ({"layers": 1, "phases": [
            {"name": "A", "copies": 0, "work_cycles": 300, "signal": {"counter": "S", "work_cycles": 50}},
            {"name": "B", "copies": 1, "load_after": ["S"], "load_work_cycles": 70}], "tail": None},
         350 + 500 + 70 + 1000 + 10),
        # a phase arrives when its last copy is used; until then the next one's work waits, its copies don't
        ({"layers": 1, "phases": [{"name": "A", "copies": 2},
                                  {"name": "B", "copies": 2, "consume_after": ["A"], "work_cycles": 40}], "tail": None},
         max(1000 + 20 + 500 + 40, 2000) + 20),
    ],
)  # fmt: skip
def test_the_command_prints_the_time_last(monkeypatch, capsys, tmp_path, program, expected_ns):
    defaults = {"consume_after": [], "load_after": [], "work_cycles": 0, "load_work_cycles": 0}
    phases = [{**defaults, **phase} for phase in program["phases"]]
    tail = None if program["tail"] is None else {**defaults, **program["tail"]}
    (tmp_path / "program.json").write_text(json.dumps({**CHAIN, **program, "phases": phases, "tail": tail}))
    (tmp_path / "chip.toml").write_text(chip_toml(textbook(), ["Only named things take time."]))
    arguments = ["stream", str(tmp_path / "program.json"), "--chip", str(tmp_path / "chip.toml"), "--json", "--exact"]
    monkeypatch.setattr(sys, "argv", ["simulator", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(printed) == ["ms"]
    assert printed["ms"] == pytest.approx(expected_ns / 1e6, abs=1e-6)
