"""`simulator stream`: what names mean, what is refused, and what is printed."""

import json
import subprocess
import sys

import pytest
from support.h200 import CHIP

from megakernel.hardware import load_hardware
from simulator.stream import Phase, PhaseSignal, StreamProgram, stream_records

PHASES = [
    {"name": "A", "copies": 4, "consume_after": ["prev:B"], "load_after": [], "work_cycles": 100,
     "load_work_cycles": 0, "signal": {"counter": "S", "work_cycles": 50}},
    {"name": "B", "copies": 6, "consume_after": ["A"], "load_after": ["S"], "work_cycles": 0,
     "load_work_cycles": 10},
]  # fmt: skip
PROGRAM = {
    "sms": 132,
    "copy_bytes": 8192,
    "ring_stages": 25,
    "in_flight_cap_bytes": 49152,
    "layers": 3,
    "phases": PHASES,
    "tail": {"name": "T", "copies": 5, "consume_after": ["prev:B"], "load_after": [], "work_cycles": 0,
             "load_work_cycles": 0},
}  # fmt: skip


def run(tmp_path, program, *flags):
    path = tmp_path / "program.json"
    path.write_text(program if isinstance(program, str) else json.dumps(program))
    code = "from simulator.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "stream", str(path), "--chip", str(CHIP), *flags],
        capture_output=True,
        text=True,
        check=False,
    )


def with_phase(number, **changes):
    phases = [dict(phase) for phase in PHASES]
    phases[number].update(changes)
    return {**PROGRAM, "phases": phases}


def test_the_last_line_is_the_time_as_json(tmp_path):
    fast, exact = run(tmp_path, PROGRAM, "--json"), run(tmp_path, PROGRAM, "--json", "--exact")
    assert fast.returncode == exact.returncode == 0
    fast_ms, exact_ms = (json.loads(each.stdout.splitlines()[-1])["ms"] for each in (fast, exact))
    assert fast_ms == pytest.approx(exact_ms, rel=0.05)
    assert run(tmp_path, PROGRAM).stdout.startswith("132 SMs of NVIDIA H200 read")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ({**PROGRAM, "sms": 133}, "`sms` is 133"),
        ({**PROGRAM, "in_flight_cap_bytes": 8191}, "below one copy"),
        ({**PROGRAM, "ring_stages": 29}, "a block of NVIDIA H200 has 232448 bytes"),
        ({**PROGRAM, "rings": 3}, "rings"),
        ({**PROGRAM, "phases": []}, "phases"),
        ({**PROGRAM, "layers": 0}, "layers"),
        ({**PROGRAM, "layers": "3"}, "layers"),
        (with_phase(1, copies=-1), "copies"),
        (with_phase(1, name="A"), "`A` is named twice"),
        (with_phase(1, signal={"counter": "A", "work_cycles": 0}), "`A` is named twice"),
        (with_phase(1, consume_after=["C"]), "unknown counter `C`"),
        (with_phase(1, load_after=["prev:C"]), "unknown counter `prev:C`"),
        (with_phase(1, consume_after=["T"]), "unknown counter `T`"),
        (with_phase(1, consume_after=["A", "A"]), "names a counter twice"),
        (with_phase(1, name="prev:A"), "looks one layer back"),
        ({**PROGRAM, "tail": {**PROGRAM["tail"], "consume_after": ["B"]}}, "unknown counter `B`"),
        ({**PROGRAM, "tail": {**PROGRAM["tail"], "name": "B"}}, "`B` is named twice"),
        (with_phase(0, consume_after=["B"]), "stops for ever: SM 0 is waiting to run A of layer 0"),
        (with_phase(0, load_after=["A"]), "stops for ever: SM 0 is waiting to load A of layer 0"),
        ("{", "not valid JSON"),
    ],
)
def test_bad_programs_are_one_message_and_exit_2(tmp_path, program, message):
    found = run(tmp_path, program, "--json")
    assert found.returncode == 2
    assert found.stdout == ""
    assert message in found.stderr
    assert found.stderr.startswith("error: ")
    assert found.stderr.count("\n") == 1


def test_a_missing_file_is_one_message(tmp_path):
    code = "from simulator.cli import main; main()"
    found = subprocess.run(
        [sys.executable, "-c", code, "stream", str(tmp_path / "no.json"), "--chip", str(CHIP)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 2
    assert "no such file" in found.stderr


@pytest.fixture(scope="module")
def records():
    chip = load_hardware(CHIP)
    described = StreamProgram(
        sms=4,
        copy_bytes=8192,
        ring_stages=8,
        in_flight_cap_bytes=None,
        layers=2,
        phases=(
            Phase(
                name="A",
                copies=1,
                consume_after=("prev:A", "prev:B"),
                work_cycles=198,
                signal=PhaseSignal(counter="S", work_cycles=99),
            ),
            Phase(name="B", copies=0, load_after=("S",), load_work_cycles=19.8),
            Phase(name="C", copies=1, work_cycles=198, signal=PhaseSignal(counter="U", work_cycles=99)),
        ),
        tail=Phase(name="T", copies=2, consume_after=("prev:B",)),
    )
    return stream_records(described, chip).sms[0]


def test_prev_is_met_in_the_first_layer_and_waits_for_all_sms_later(records):
    assert records[0].run_waits == ()
    assert [wait.need for wait in records[3].run_waits] == [4, 4]
    assert [wait.counter for wait in records[3].run_waits] == [records[0].arrive, records[1].arrive]


def test_work_is_spent_without_a_wait_and_comes_before_the_signal(records):
    assert records[0].signal is not None
    assert records[0].signal.work_ns == pytest.approx(load_hardware(CHIP).cycles_ns(297))
    assert records[0].work_ns == 0
    assert records[1].load_waits[0].counter == records[0].signal.counter
    assert records[1].load_work_ns == pytest.approx(load_hardware(CHIP).cycles_ns(19.8))


def test_what_nobody_waits_for_is_not_sent(records):
    assert records[2].signal is None
    assert records[2].arrive is None
    assert records[2].work_ns == pytest.approx(load_hardware(CHIP).cycles_ns(297))
    assert records[-1].arrive is None


def test_the_tail_waits_for_the_last_layer(records):
    assert [wait.counter for wait in records[-1].run_waits] == [records[4].arrive]
