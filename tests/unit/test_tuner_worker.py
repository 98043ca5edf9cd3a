"""Many machines: a real server on loopback, workers that die, a search that loses nothing and runs nothing twice."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import optuna
import pytest
from support.searching import write_search

from megakernel.config import ConfigError, load_json
from megakernel.plan import Plan
from tuner.outcome import Scored
from tuner.queue import Item, WorkQueue, open_storage, serve
from tuner.worker import work

ROOT = Path(__file__).parents[2]
COMMAND = "from tuner.cli import main; main()"

WORKER = """
import os, signal, sys
from dataclasses import dataclass
from pathlib import Path
from megakernel.config import canonical_json
from tuner import cli
from tuner.evaluate import Evaluator
log, killed_at = Path(sys.argv.pop(1)), int(sys.argv.pop(1))

@dataclass
class Logged:
    inner: object
    def evaluate(self, choices, rung):
        line = f"{os.getpid()} {rung.name} {canonical_json(choices)}\\n"
        with log.open("a") as file:
            file.write("began " + line)
        if killed_at and log.read_text().count(f"began {os.getpid()}") == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        outcome = self.inner.evaluate(choices, rung)
        with log.open("a") as file:
            file.write("ended " + line)
        return outcome

evaluator = cli.simulator_evaluator
cli.simulator_evaluator = lambda *asked: Logged(evaluator(*asked))
cli.main()
"""
"""`tuner worker`, which notes what it scores and is killed, as by the system, in the middle of candidate so many."""


@pytest.fixture
def start(tmp_path):
    """Start processes in a folder with a search; whatever is left is ended."""
    write_search(tmp_path)
    started = []

    def run(code, *arguments):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=tmp_path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(params=["grpc", "database"])
def storage(request, start):
    """A storage's URL: of a server on loopback, or a database's."""
    if request.param == "database":
        return "sqlite:///work.db"
    pytest.importorskip("grpc", reason="needs the extra `remote`")
    port = free_port()
    server = start(COMMAND, "storage", "sqlite:///work.db", "--port", port)
    url = server.stdout.readline().strip()
    assert url == f"grpc://127.0.0.1:{port}"
    return url


def test_two_workers_one_killed_in_the_middle_and_the_plan_is_the_same(start, storage, tmp_path):
    alone = start(COMMAND, "search", "search.toml", "--out", "alone.json", "--trials", 12)
    flags = ("--storage", storage)
    shared = start(COMMAND, "search", "search.toml", "--out", "shared.json", "--trials", 12, *flags, "--lost-after", 6)
    log = tmp_path / "log"
    dying = start(WORKER, log, 3, "worker", "search.toml", *flags)
    assert dying.wait(90) == -signal.SIGKILL
    living = start(WORKER, log, 0, "worker", "search.toml", *flags)
    for process in (alone, shared, living):
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out
        assert "Warning" not in out
    plans = [load_json(tmp_path / f"{name}.json", Plan) for name in ("alone", "shared")]
    assert plans[0].entries == plans[1].entries
    assert plans[0].provenance.candidates == plans[1].provenance.candidates
    lines = [line.split(" ", 2) for line in log.read_text(encoding="utf-8").splitlines()]
    began = Counter(what for verb, _, what in lines if verb == "began")
    ended = Counter(what for verb, _, what in lines if verb == "ended")
    assert set(began) == set(ended), "nothing is lost"
    assert set(ended.values()) == {1}, "nothing is run twice"
    assert sorted(began.values())[-2:] == [1, 2], "only the candidate that the killed worker left is begun again"
    assert {who for verb, who, _ in lines if verb == "ended"} == {str(dying.pid), str(living.pid)}


def test_a_storage_that_ends_leaves_one_message_and_the_search_goes_on_with_the_next(start):
    """Whoever waits for it says so; what was scored is in its database and in the search's journal."""
    pytest.importorskip("grpc", reason="needs the extra `remote`")
    port = free_port()
    served = ("storage", "sqlite:///work.db", "--port", port)
    flags = ("search.toml", "--storage", f"grpc://127.0.0.1:{port}")
    asked = ("search", *flags, "--out", "shared.json", "--trials", 12)
    server, search = start(COMMAND, *served), start(COMMAND, *asked)
    lonely = start(COMMAND, "worker", *flags, "--seed", 9)  # of another search: nobody gives it anything
    time.sleep(8)
    server.kill()
    for process in (search, lonely):
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 2, out
        assert "Traceback" not in out
        assert "answers no more: " in out
        assert "start it again, and the same command goes on" in out
    start(COMMAND, *served).stdout.readline()
    search = start(COMMAND, *asked)
    start(COMMAND, "worker", *flags)
    out, _ = search.communicate(timeout=120)
    assert (search.returncode, "wrote shared.json" in out) == (0, True), out


@dataclass
class Slow:
    """Scores when it is told to."""

    may: Callable[[], bool]

    def evaluate(self, choices, rung):
        del choices
        deadline = time.monotonic() + 30
        while not self.may() and time.monotonic() < deadline:
            time.sleep(0.01)
        return Scored(rung, 1.0, 1.0, 1.0, 1.0)


def queue_of(tmp_path, **identity):
    return WorkQueue(open_storage(f"sqlite:///{tmp_path}/q.db"), {"code": "same"} | identity)


def item():
    from support import small
    from support.searching import BUCKET

    from tuner.outcome import Rung

    return Item(BUCKET, small.build(rows=1).choices, Rung.FEW_LAYERS)


def test_an_item_goes_to_one_worker_and_only_to_those_of_the_same_search(tmp_path):
    one, other, strange = queue_of(tmp_path), queue_of(tmp_path), queue_of(tmp_path, code="other")
    one.put(item())
    assert strange.take() is None
    taken = other.take()
    assert taken is not None
    assert taken[1] == item()
    assert one.take() is None


def test_the_answer_of_a_worker_that_was_given_up_does_not_count(tmp_path):
    from tuner.outcome import Illegal

    queue = queue_of(tmp_path)
    queue.put(item())
    late, _ = queue.take()
    (trial,) = queue.trials()
    queue.give_back(trial)
    again, same = queue.take()
    assert same == item()
    assert not queue.finish(late, Illegal(("late",)))
    assert queue.finish(again, Illegal(("in time",)))


def test_a_worker_whose_storage_goes_for_a_moment_counts_on_and_answers(tmp_path, monkeypatch):
    """A thread that died of it would print, and leave the worker to be given up at work."""
    queue = queue_of(tmp_path)
    queue.put(item())
    monkeypatch.setattr("tuner.worker.BEAT_S", 0.01)
    beats = []

    def beat(_, count):
        beats.append(count)
        if count == 1:
            raise optuna.exceptions.StorageInternalError("gone")
        queue.end(ended=True)

    monkeypatch.setattr(queue, "beat", beat)
    evaluator = Slow(lambda: len(beats) > 1)
    assert work(queue, lambda _: evaluator, lambda *_: None) == 1
    assert beats[:2] == [1, 2]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("grpc://nowhere", "needed grpc://HOST:PORT"),
        ("grpc://localhost:99999", "needed grpc://HOST:PORT"),
        ("postgresql+nothing://x/y", "can't be opened"),
    ],
)
def test_a_storage_that_is_none_is_refused(url, message):
    with pytest.raises(ConfigError, match=message):
        open_storage(url)


def test_an_address_that_can_not_be_served_at_is_refused(tmp_path):
    """Left to gRPC, it would share the port with whoever has it, wrap a larger one, and trap at a host of others."""
    pytest.importorskip("grpc", reason="needs the extra `remote`")
    url = f"sqlite:///{tmp_path}/queue.db"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host, port in (("127.0.0.1", taken.getsockname()[1]), ("192.0.2.1", 13000), ("no such host", 13000)):
            with pytest.raises(ConfigError, match=r"can't be listened at: .*; needed an address of this"):
                serve(url, host, port, lambda: pytest.fail("said that it was ready"))
