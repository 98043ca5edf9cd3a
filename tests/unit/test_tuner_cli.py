"""The `tuner` command as a user meets it."""

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children
from pathlib import Path
from subprocess import PIPE
from time import sleep

import pytest
from support import small
from support.searching import write_search

from megakernel.config import load_json
from megakernel.plan import Plan
from tuner.cli import main
from tuner.interrupt import interruptible, undisturbed
from tuner.workers import Workers

COMMAND = "from tuner.cli import main; main()"

TELLTALE = """
import sys
from tuner import cli, report
update = report.LiveSearch.update
def told(self, idx, progress):
    print(progress.phase, progress.num_trials, file=sys.stderr, flush=True)
    update(self, idx, progress)
report.LiveSearch.update = told
cli.main()
"""
"""The command, which also says on stderr how far it is."""


ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A directory with `search.toml` and all that it names, made the current one."""
    write_search(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(folder: Path, code: str, *arguments: str) -> subprocess.Popen[str]:
    """Run `code`, which calls the command, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=folder, env=environment, text=True, stdout=PIPE, stderr=PIPE
    )


@pytest.fixture
def command(here, monkeypatch, capsys):
    """Run `tuner` with arguments in that directory; returns exit code, stdout and stderr."""
    assert here.is_dir()

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["tuner", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> Path:
    """A plan that the command wrote."""
    folder = tmp_path_factory.mktemp("searched")
    write_search(folder)
    done = start(folder, COMMAND, "search", "search.toml", "--out", "plan.json", "--picture", "search.svg")
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0, err
    (folder / "stdout").write_text(out, encoding="utf-8")
    return folder


def test_a_search_writes_a_plan_that_can_be_built_and_reports_it(searched):
    plan = load_json(searched / "plan.json", Plan)
    assert plan.build(plan.entries[0]).table.digest == plan.entries[0].table_digest
    assert plan.provenance.command.endswith("search search.toml --out plan.json --picture search.svg")
    out = (searched / "stdout").read_text(encoding="utf-8")
    for part in (
        "hand plan", "reference plan", "reference order, hand cap", "bound of any plan", "tok/s", "% of roofline",
        "6 candidates", "wrote plan.json",
    ):  # fmt: skip
        assert part in out
    assert "<svg" in (searched / "search.svg").read_text(encoding="utf-8")


def test_flags_replace_the_budget_and_set_any_key(command, here):
    flags = ("--trials", 3, "--seed", 7, "--set", "ladder.draws=2", "--set", "buckets.0.nominal_context_tokens=256")
    code, _, _ = command("search", "search.toml", "--out", "plan.json", *flags)
    assert code == 0
    plan = load_json(here / "plan.json", Plan)
    assert (plan.provenance.candidates, plan.provenance.seed, plan.provenance.draws) == (3, 7, 2)
    assert plan.entries[0].bucket.nominal_context_tokens == 256


def test_show_prints_choices_and_scores(command, searched):
    code, out, _ = command("show", searched / "plan.json")
    assert code == 0
    for part in ("up to date", "cut.project", "ring.in_flight_cap_bytes", "this plan", "hand plan"):
        assert part in out


def test_plots_are_drawn_without_a_word_on_stderr(here, searched):
    """In a process of its own, because here a warning is an error already."""
    pytest.importorskip("plotly", reason="needs the extra `plots`")
    pytest.importorskip("matplotlib", reason="needs the extra `plots`")
    plan, journal = searched / "plan.json", searched / "plan.json.journal"
    shown = start(here, COMMAND, "show", str(plan), "--journal", str(journal), "--plots", "plots")
    out, err = shown.communicate(timeout=120)
    assert (shown.returncode, err) == (0, "")
    for name in ("history-1.html", "history-1.png", "slices-1.html", "slices-1.png"):
        assert f"wrote plots/{name}" in out
        assert (here / "plots" / name).stat().st_size > 5000


def test_refresh_rewrites_a_stale_plan_in_place_or_elsewhere(command, here, searched):
    plan = load_json(searched / "plan.json", Plan)
    stale = json.loads((searched / "plan.json").read_text(encoding="utf-8"))
    stale["code_digest"] = "sha256:" + "0" * 64
    stale["entries"][0]["table_digest"] = "sha256:" + "1" * 64
    (here / "plan.json").write_text(json.dumps(stale), encoding="utf-8")
    assert "stale" in command("show", "plan.json")[1]
    code, out, _ = command("refresh", "plan.json", "--out", "new.json")
    assert (code, "wrote new.json" in out) == (0, True)
    assert load_json(here / "new.json", Plan) == plan
    assert command("refresh", "plan.json")[0] == 0
    assert load_json(here / "plan.json", Plan) == plan


def failure(command, *arguments):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert err.startswith("error: ")
    return err


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("search.toml", 'model = "model.json"', "model = ", "search.toml: not valid TOML"),
        ("search.toml", "[ladder]", "[laddder]", "unknown key `laddder`; did you mean `ladder`?"),
        ("search.toml", "trials = 6", "trails = 6", "unknown key `budget.trails`; did you mean `trials`?"),
        ("search.toml", "trials = 6", "", "`budget` needs seconds, trials or both"),
        ("search.toml", "batch = 3", 'batch = "3"', "`proposals.batch` must be a valid integer"),
        ("search.toml", "model.json", "mdel.json", "mdel.json: no such file; did you mean `model.json`?"),
        ("search.toml", "rows = 1", "rows = 65", "`buckets.0.rows` must be less than or equal to 64, found 65"),
        ("search.toml", "hand.toml", "hnd.toml", "hnd.toml: no such file; did you mean `hand.toml`?"),
        ("hand.toml", "stages = 24", "stages = 64", "of 232448 bytes of shared memory; at most"),
        ("hand.toml", '"up", ', "", "interleave.order places nothing of up"),
        ("chip.toml", f"memory_bytes = {small.chip().memory_bytes}", "memory_bytes = 1", "sixteen SMs has 0.0 GB"),
        ("model.json", '"cohere2_moe"', '"gpt2"', '`model_type` is "gpt2"; supported: one of cohere2_moe'),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(command, here, file, old, new, message):
    text = (here / file).read_text(encoding="utf-8")
    assert old in text
    (here / file).write_text(text.replace(old, new, 1), encoding="utf-8")
    (here / "plan.json").write_text("kept", encoding="utf-8")
    assert message in failure(command, "search", "search.toml", "--out", "plan.json")
    assert (here / "plan.json").read_text(encoding="utf-8") == "kept"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("search", "serch.toml", "--out", "plan.json"), "serch.toml: no such file; did you mean `search.toml`?"),
        (("search", "search.toml", "--out", "no/plan.json"), "no/plan.json: cannot be written: the directory"),
        (("search", "search.toml", "--out", "."), ".: is a directory; a file name is needed"),
        (("search", "search.toml", "--out", "p.json", "--picture", "p.png"), "p.png: needed a name that ends in .svg"),
        (("search", "search.toml", "--out", "p.json", "--set", "proposals.sed=1"), "did you mean `seed`?"),
        (("search", "search.toml", "--out", "p.json", "--trials", "0"), "`budget.trials` must be greater than"),
        (
            ("search", "search.toml", "--out", "p.json", "--set", "space.ring.copy_bytes=[300032]"),
            "[space] leaves nothing that sixteen SMs can run; for example:\n  ring.copy_bytes is 300032, needed whole",
        ),
        *(
            (("search", "search.toml", "--out", "p.json", "--set", f"space.{key}=[{value}]"), f"space.{key}.0")
            for key, value in (
                ("rounding.project_k_splits", 0),
                ("rounding.project_k_splits", 9),
                ("rounding.chunk_tokens", 0),
                ("cut.project", 0),
                ("cut.head", 10**12),
                ("ring.copy_bytes", 100),
                ("ring.in_flight_cap_bytes", -8192),
                ("interleave.attention_sms", -3),
                ("interleave.takeover_percent", 150),
            )
        ),
        (("search", "search.toml", "--out", "p.svg", "--picture", "p.svg"), "needed two files"),
        (("refresh", "search.toml"), "search.toml: not valid JSON"),
        (("show", "model.json"), "model.json:"),
    ],
)
def test_bad_arguments_are_one_message_and_exit_code_2(command, arguments, message):
    assert message in failure(command, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("search", "search.toml", "--out", "p.json", "--lost-after", "-1"),
            "'--lost-after': input should be greater than or equal to 4",
        ),
        (("storage", "sqlite:///q.db", "--port", "99999"), "'--port': input should be less than or equal to 65535"),
    ],
)
def test_flags_out_of_range_are_refused_before_anything_waits(command, here, arguments, message):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.replace("│", "").split()).replace("Input", "input")
    assert {each.name for each in here.iterdir()}.isdisjoint({"p.json", "p.json.journal", "q.db"})


def test_help_names_the_keys_that_it_speaks_of(command):
    """Brackets would be taken for markup, and vanish."""
    assert "ladder.measured" in command("search", "--help")[1]


@pytest.mark.parametrize("verb", ["refresh", "show"])
def test_an_edited_plan_is_refused(command, here, searched, verb):
    plan = json.loads((searched / "plan.json").read_text(encoding="utf-8"))
    plan["model"]["vocab_size"] += 16
    (here / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    assert re.search(
        r"model_digest is sha256:\w+, the embedded model has .*: the file was edited",
        failure(command, verb, "plan.json"),
    )


def test_a_disk_that_fills_is_one_message_and_what_was_scored_is_kept(here, searched):
    """A limit on the size of files stands for the disk: writes beyond it fail in the middle, as on a full one."""
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))\n"
    arguments = ("search", "search.toml", "--out", "plan.json")
    out, err = (stopped := start(here, full + COMMAND, *arguments)).communicate(timeout=120)
    assert (stopped.returncode, out) == (2, "")
    assert "error: the search had to stop: plan.json.journal: File too large; make room there" in err
    assert "Traceback" not in err
    out, err = (done := start(here, COMMAND, *arguments)).communicate(timeout=120)
    assert done.returncode == 0, err
    assert "going on from" in err
    assert load_json(here / "plan.json", Plan).entries == load_json(searched / "plan.json", Plan).entries


SEARCH = ("search", "search.toml", "--out", "plan.json", "--seconds", "600")

FROM_A_TERMINAL = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
IN_THE_BACKGROUND = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
"""How shells start commands; these tests themselves may run either way."""


def searches(running: subprocess.Popen[str]) -> None:
    """Wait until it has searched on."""
    assert running.stderr is not None
    assert any(line.startswith("search ") for line in running.stderr)


def kept_the_best(here: Path, running: subprocess.Popen[str]) -> None:
    """It ends at once, and well, with a plan."""
    out, err = running.communicate(timeout=60)
    assert (running.returncode, "Traceback" in err) == (0, False), err
    assert "interrupted: the best so far, for 1 of 1 buckets" in out
    plan = load_json(here / "plan.json", Plan)
    assert plan.build(plan.entries[0]).table.digest == plan.entries[0].table_digest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_writes_the_best_so_far(here, number):
    running = start(here, FROM_A_TERMINAL + TELLTALE, *SEARCH, "--jobs", "2")
    searches(running)
    running.send_signal(number)
    kept_the_best(here, running)


def test_a_search_in_the_background_leaves_ctrl_c_to_the_foreground_and_answers_sigterm(here):
    running = start(here, IN_THE_BACKGROUND + TELLTALE, *SEARCH)
    searches(running)
    running.send_signal(signal.SIGINT)
    searches(running)
    searches(running)
    running.send_signal(signal.SIGTERM)
    kept_the_best(here, running)


SWALLOWS = """
import os
from tuner import cli
from tuner.evaluate import SimulatorEvaluator
score, calls = SimulatorEvaluator.evaluate, []
def swallow(self, choices, rung):
    calls.append(rung)
    try:
        if len(calls) == 20:
            os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        pass
    return score(self, choices, rung)
SimulatorEvaluator.evaluate = swallow
cli.main()
"""
"""The command, interrupted where a library drops whatever is raised."""


def test_an_interrupt_that_a_library_swallows_is_not_lost(here):
    kept_the_best(here, start(here, FROM_A_TERMINAL + SWALLOWS, *SEARCH))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_come_together_are_one_interrupt_and_a_later_one_is_another(monkeypatch, number):
    """`timeout` sends its signal twice: the second must not break what answers the first."""
    before = {each: signal.signal(each, signal.default_int_handler) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with interruptible() as check:
            check()
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            monkeypatch.setattr("tuner.interrupt.SAME_S", 0.0)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
            with pytest.raises(KeyboardInterrupt):
                check()
        with undisturbed():
            os.kill(os.getpid(), number)
        assert {signal.getsignal(each) for each in before} == {signal.default_int_handler}
    finally:
        for each, answer in before.items():
            signal.signal(each, answer)


def test_an_interrupt_while_processes_start_is_not_lost(monkeypatch):
    monkeypatch.setattr(ProcessPoolExecutor, "submit", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Workers(2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_no_process_of_a_search_ever_sees_ctrl_c():
    with Workers(2):
        states = [Path(f"/proc/{each.pid}/status").read_text(encoding="utf-8") for each in active_children()]
    blocked = [int(line.split()[1], 16) for each in states for line in each.splitlines() if line.startswith("SigBlk")]
    assert len(blocked) == 2
    assert all(each >> (signal.SIGINT - 1) & 1 for each in blocked)


def test_an_interrupt_before_there_is_a_result_writes_nothing(here, monkeypatch, command):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("tuner.cli.run_search", interrupted)
    code, out, err = command("search", "search.toml", "--out", "plan.json")
    assert (code, out) == (130, "")
    assert "nothing is written" in err
    assert not (here / "plan.json").exists()


def test_the_command_killed_twice_leaves_no_process_and_comes_to_the_same_plan(here):
    """With two processes and the real simulator, by a signal that nobody can answer."""
    arguments = ("search", "search.toml", "--trials", "30", "--jobs", "2", "--out")
    start(here, COMMAND, *arguments, "whole.json").communicate(timeout=120)
    journal = here / "plan.json.journal"
    for num_lines in (40, 80):
        running = start(here, COMMAND, *arguments, "plan.json")
        while not journal.exists() or journal.read_bytes().count(b"\n") < num_lines:
            assert running.poll() is None, "it ended before it could be killed"
            sleep(0.02)
        children = children_of(running.pid)
        assert len(children) >= 2
        running.kill()
        running.communicate()
        for _ in range(500):
            if not any(Path(f"/proc/{each}").exists() for each in children):
                break
            sleep(0.02)
        assert not [each for each in children if Path(f"/proc/{each}").exists()], "its processes outlive it"
    start(here, COMMAND, *arguments, "plan.json").communicate(timeout=120)
    plans = [
        load_json(here / name, Plan).model_dump(exclude={"provenance": {"command"}})
        for name in ("whole.json", "plan.json")
    ]
    assert plans[0] == plans[1]


def children_of(pid: int) -> list[str]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [child for task in tasks for child in task.read_text(encoding="utf-8").split()]
