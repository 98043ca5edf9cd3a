"""A measured step beside the simulated one: what is put into a timeline is found again, in its part of the gap."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from support import north
from support.browser import needs_chromium, show
from support.plans import plan_of
from support.predicting import short_step

from megakernel.arrival import DEFAULT_ARRIVAL
from megakernel.config import ConfigError, pretty_json
from megakernel.timeline import Timeline
from megakernel.work import WorkCosts
from megakernel.workload import Workload
from simulator.cli import main
from simulator.compare import both_in_perfetto, compare
from simulator.critical import At, Critical, Via
from simulator.exposure import Exposure
from simulator.routing import mean_state
from simulator.step_run import run_step
from simulator.trace_file import load_timeline
from simulator.walk import walk_of_run

LAYERS = 7
PARTS = ("duration_ns", "wait_ns", "order_ns", "contention_ns")
MOMENTS = ("load_start_ns", "landed_ns", "run_wait_ns", "run_start_ns", "end_ns")


def simulated(chip=None, name="hand", layers=LAYERS, arrival="release"):
    step = short_step(name, layers=layers)
    state = mean_state(step.model, Workload(contexts=(8192,)))
    return run_step(step, chip or north.chip(), state, arrival=arrival)


@pytest.fixture(scope="module")
def run():
    """A step whose path has every kind of link: where tasks compute for long, no full ring holds anything up."""
    return simulated(north.chip().model_copy(update={"work": WorkCosts()}))


@pytest.fixture(scope="module")
def critical(run):
    walk = walk_of_run(run)
    return Critical(walk, Exposure(walk, run.step.choices.ring, run.chip))


def parts(found):
    return {part: getattr(found.gap, part) for part in PARTS}


def later(timeline, since_ns, by_ns):
    """Everything from a moment on happens later."""
    return Timeline(
        "injected",
        tuple(
            replace(
                span,
                **{name: at + by_ns for name in MOMENTS if (at := getattr(span, name)) >= since_ns},
            )
            for span in timeline.spans
        ),
    )


def moment(critical, link, what):
    return float(getattr(critical.walk, what)[link.record])


def pick(critical, is_wanted, count):
    """Links of the chain, spread over the step, latest first, so that earlier moments stay where they are."""
    fitting = [link for link in critical.chain() if is_wanted(link)]
    assert len(fitting) >= count
    return [fitting[idx] for idx in np.linspace(0, len(fitting) - 1, count).astype(int)]


def put_behind(timeline, critical, link):
    """Let another task that `link` waited for run on the SM of the last one, behind it; by how much that is later."""
    walk, records = critical.walk, critical.walk.records
    peers = np.flatnonzero((records["arrive"] == link.counter) & (walk.sm != walk.sm[link.source]))
    other = int(peers[walk.end[peers].argmin()])
    lag = float(walk.run_start[other] - max(critical._previous_end[other], critical.run_gate.done[other]))
    length = float(walk.end[other] - walk.run_start[other])
    last = float(walk.end[link.source])
    moved = later(timeline, np.nextafter(last, np.inf), lag + length)
    task, sm = int(walk.task[other]), int(walk.sm[link.source])
    start = last + lag
    spans = [
        replace(
            span, sm=sm, run_wait_ns=last, run_start_ns=start, end_ns=start + length, load_start_ns=last, landed_ns=last
        )
        if span.task == task
        else span
        for span in moved.spans
    ]
    return Timeline("injected", tuple(spans)), lag + length


def test_a_timeline_has_no_gap_to_itself(run):
    found = compare(run, run.timeline())
    assert found.gap.total_ns == 0.0
    assert set(parts(found).values()) == {0.0}
    for kind in found.kinds:
        assert (kind.measured_run_ns, kind.moved) == (kind.simulated_run_ns, 0)


@pytest.mark.parametrize("kind", PARTS)
def test_one_kind_of_injected_delay_is_found_in_its_part(run, critical, kind):
    timeline, injected = inject(run.timeline(), critical, {kind})
    found = compare(run, timeline)
    assert found.gap.total_ns == pytest.approx(injected[kind], rel=0.02)
    assert parts(found)[kind] == pytest.approx(injected[kind], rel=0.1)
    for other in set(PARTS) - {kind}:
        assert abs(parts(found)[other]) < 0.1 * injected[kind]


def test_all_kinds_of_injected_delays_together_are_told_apart(run, critical):
    timeline, injected = inject(run.timeline(), critical, set(PARTS))
    found = compare(run, timeline)
    assert sum(parts(found).values()) == pytest.approx(found.gap.total_ns)
    assert found.gap.total_ns == pytest.approx(sum(injected.values()), rel=0.02)
    for part in PARTS:
        assert parts(found)[part] == pytest.approx(injected[part], rel=0.1)


def inject(timeline, critical, kinds):
    """Delays of each kind on the critical path, in different places; the timeline, and how much of each there is."""
    walk = critical.walk
    ops = np.array([op.name for op in short_step(layers=LAYERS).graph.ops])[walk.op]

    def to_end(link, via):
        return link.at is At.END and link.via is via

    choices = {
        "duration_ns": (4, "end", 2500.0, lambda link: link.at is At.END and ops[link.record] in {"up", "output"}),
        "wait_ns": (5, "run_start", 1800.0, lambda link: to_end(link, Via.LIST)),
        "contention_ns": (3, "landed", 3000.0, lambda link: to_end(link, Via.RING)),
        "order_ns": (3, "run_start", None, lambda link: to_end(link, Via.RUN_WAIT) and ops[link.record] == "merge"),
    }
    edits = []
    for kind in kinds:
        count, what, by_ns, is_wanted = choices[kind]
        edits += [(kind, link, moment(critical, link, what), by_ns) for link in pick(critical, is_wanted, count)]
    injected = dict.fromkeys(PARTS, 0.0)
    # From the last to the first, so that a moment is where the simulation left it when its turn comes.
    for kind, link, since_ns, by_ns in sorted(edits, key=lambda edit: -edit[2]):
        if by_ns is None:
            timeline, added_ns = put_behind(timeline, critical, link)
        else:
            timeline, added_ns = later(timeline, since_ns, by_ns), by_ns
        injected[kind] += added_ns
    return timeline, injected


def with_costs(chip, **costs):
    return chip.model_copy(update={"costs": chip.costs.model_copy(update=costs)})


@pytest.mark.parametrize("part", ["duration_ns", "wait_ns", "contention_ns"])
def test_what_slows_a_simulated_card_down_is_the_part_that_grows(part):
    # Without queues before hand-offs, stragglers, and releases that wait, the causes don't act on each other.
    chip = with_costs(north.chip(), handoff_queue_share=0.0, poll_queue_share=0.0, straggle_queue_share=0.0)
    slower = tuple(each.model_copy(update={"bytes_per_ns": 0.9 * each.bytes_per_ns}) for each in chip.ceilings)
    longer = chip.work.model_copy(update={"finish": chip.work.finish + 2000.0})
    cause = {
        "duration_ns": chip.model_copy(update={"work": longer}),
        "wait_ns": with_costs(chip, handoff_ns=chip.costs.handoff_ns + 1000.0),
        "contention_ns": chip.model_copy(update={"ceilings": slower}),
    }[part]
    base, measured = (simulated(each, arrival="relaxed") for each in (chip, cause))
    gap = measured.result.total_ns - base.result.total_ns
    # A stream that is held up catches up a little, which is contention that shrinks.
    assert parts(compare(base, measured.timeline()))[part] == pytest.approx(gap, rel=0.17)


def test_every_hand_off_on_the_path_counts_its_own_delay():
    # Loads after the wait: one hand-off after another, and nothing hides a delay. Router rows that took their time
    # would make a second path, about as long, whose copies in flight hold a release up.
    work = north.chip().work.model_copy(update={"router": 0.0})
    chip = north.chip().model_copy(update={"work": work})
    slower = with_costs(chip, handoff_ns=chip.costs.handoff_ns + 1000.0)
    base, measured = (simulated(each, "reference") for each in (chip, slower))
    walk = walk_of_run(base)
    chain = Critical(walk, Exposure(walk, base.step.choices.ring, base.chip)).chain()
    hand_offs = sum(link.counter >= 0 for link in chain)
    assert parts(compare(base, measured.timeline()))["wait_ns"] == pytest.approx(1000.0 * hand_offs, rel=0.01)


def test_a_trace_is_read_back_as_it_was_written(run, tmp_path):
    (tmp_path / "trace.json").write_text(run.timeline().to_perfetto(), encoding="utf-8")
    read = load_timeline(tmp_path / "trace.json", run.step.graph.num_tasks)
    assert read.source == "simulated on NVIDIA H200"
    by_task = {span.task: span for span in read.spans}
    for span in run.timeline().spans:
        found = by_task[span.task]
        assert (found.sm, found.kind, found.layer, found.path) == (span.sm, span.kind, span.layer, span.path)
        assert (found.run_start_ns, found.end_ns) == pytest.approx((span.run_start_ns, span.end_ns))
        if span.landed_ns > span.load_start_ns:
            assert (found.load_start_ns, found.landed_ns) == pytest.approx((span.load_start_ns, span.landed_ns))
    assert abs(compare(run, read).gap.total_ns) < 1e-3


def test_both_timelines_are_in_one_perfetto_file(run):
    trace = json.loads(both_in_perfetto(compare(run, run.timeline())))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    runs = [event for event in slices if event["cat"] not in {"load", "wait"}]
    assert len(runs) == 2 * run.step.graph.num_tasks
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names[0] == "SM 0 measured"
    assert names[263] == "SM 131 simulated"
    assert trace["otherData"]["measured"] == trace["otherData"]["simulated"]


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run `simulator compare` with arguments beside `plan.json` and `trace.json` of two layers."""
    monkeypatch.chdir(tmp_path)
    step = short_step(layers=2)
    (tmp_path / "plan.json").write_text(pretty_json(plan_of(step, north.chip())), encoding="utf-8")
    run = simulated(layers=2, arrival=DEFAULT_ARRIVAL)
    (tmp_path / "trace.json").write_text(later(run.timeline(), 30e3, 5e3).to_perfetto(), encoding="utf-8")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["simulator", "compare", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return call


def test_the_command_says_what_the_gap_is_made_of(command, tmp_path):
    code, out, err = command("plan.json", "trace.json", "--perfetto", "both.json")
    assert (code, err) == (0, "")
    for part in ("measured less simulated", "duration", "wait", "order", "contention", "together", "5.0", "task kind"):
        assert part in out
    assert (tmp_path / "both.json").is_file()
    found = json.loads(command("plan.json", "trace.json", "--json")[1])
    assert found["gap"]["total_ns"] == pytest.approx(5000.0)
    assert found["measured_ms"] - found["simulated_ms"] == pytest.approx(5e-3)


@needs_chromium
def test_the_page_shows_both_timelines_and_the_gap_of_the_json(command, tmp_path):
    code, out, _ = command("plan.json", "trace.json", "--report", "page.html", "--json")
    assert code == 0
    gap = json.loads(out)["gap"]
    shown = show(tmp_path / "page.html", tmp_path)
    assert shown.console == []
    assert (shown.root["data-ready"], shown.root["data-requests"]) == ("yes", "0")
    figures = [float(row[1]) for row in shown.tables["gap"][1:]]
    assert figures == [round(gap[part] / 1e3, 1) + 0.0 for part in (*PARTS, "total_ns")]
    drawn = [int(each["data-drawn"]) for each in shown.canvases if "data-drawn" in each]
    assert drawn == [short_step(layers=2).graph.num_tasks] * 2


def edited(change):
    trace = json.loads(simulated(layers=2).timeline().to_perfetto())
    change(trace)
    return json.dumps(trace)


def first_run(trace):
    return next(e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] not in {"load", "wait"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda trace: trace.pop("traceEvents"), "`traceEvents` is missing"),
        (lambda trace: trace["traceEvents"].append(7), "is no object"),
        (lambda trace: trace["traceEvents"].remove(first_run(trace)), "needed: a trace of this plan and bucket"),
        (lambda trace: trace["traceEvents"].append(first_run(trace)), "runs twice; needed: a trace of one step"),
        (lambda trace: first_run(trace)["args"].update(task=10**6), "the plan's step has"),
        (lambda trace: first_run(trace)["args"].pop("task"), "`args.task` is missing"),
        (lambda trace: first_run(trace).update(ts="soon"), "needed: microseconds"),
        (lambda trace: first_run(trace).update(dur=-1), "needed: microseconds"),
        (lambda trace: first_run(trace)["args"].update(path="sideways"), "is on the path 'sideways'"),
        (lambda trace: first_run(trace).pop("pid"), "has no SM or layer"),
    ],
)
def test_a_file_that_is_no_trace_of_the_plan_is_refused(tmp_path, change, message):
    (tmp_path / "trace.json").write_text(edited(change), encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as refused:
        load_timeline(tmp_path / "trace.json", short_step(layers=2).graph.num_tasks)
    assert "trace.json" in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan.json", "none.json"), "none.json: no such file"),
        (("plan.json", "plan.json"), "`traceEvents` is missing"),
        (("plan.json", "trace.json", "--rows", 2), "no bucket for 2 rows"),
        (("plan.json", "trace.json", "--perfetto", "none/x.json"), "none/x.json: cannot be written"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(command, arguments, message):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
