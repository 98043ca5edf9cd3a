"""A search's finalists on a card that is pretended: what is compiled when, who passes, and that both commands agree."""

import json
import sys
from pathlib import Path
from threading import Barrier

import pytest
from support.searching import write_search

from megakernel.config import ConfigError, load_json
from megakernel.plan import Plan
from tuner.problem import HAND, REFERENCE, REFERENCE_ORDER

pytest.importorskip("cuda.core", reason="needs the launcher of the runtime extra")

PRETENDED = '''
"""`runtime` on a machine whose card is pretended: nothing is compiled or launched, all else is the real command."""
import json, sys, time
from pathlib import Path
import torch
from support.measuring import CARD
from runtime import cli
from runtime.gpu import contest
from runtime.gpu.launch import KernelStoppedError
told = json.loads(Path(__file__).with_name("told.json").read_text())
class Loaded:
    def __init__(self, step, name):
        self.table, self.does, self.runs = step.table, told.get(name, told["others"]), 0
    def time_ms(self):
        self.runs += 1
        if self.does == "hangs late" and self.runs > 4:
            raise KernelStoppedError("L2.down[5] never arrived")
        return self.does if isinstance(self.does, float) else 5.0
    def counters(self):
        return self.table.totals
class Bench:
    def __init__(self, chip, positions, *, computes):
        assert computes
    def logits(self, loaded):
        if loaded.does == "hangs":
            raise KernelStoppedError("L1.up[3] never arrived")
        return torch.ones(1, 8) * (2.0 if loaded.does == "differs" else 1.0)
def load(campaign, bench, variant):
    loaded = Loaded(campaign.steps[variant.name], variant.name)
    if loaded.does == "spills":
        raise RuntimeError("spills")
    return loaded
cli._need_card = lambda: None
contest.fitting, contest.PlanBench, contest.load, contest.compile_ahead = lambda _: CARD, Bench, load, lambda *_: None
cli.main()
'''
"""By the variant's name: how long a step takes, or what goes wrong."""


@pytest.fixture
def searched(tmp_path, monkeypatch, capsys):
    """Search with --measure on that card; the plan, and what was printed."""
    from tuner.cli import main

    write_search(tmp_path)
    (tmp_path / "runtime.py").write_text(PRETENDED, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{root / 'tests'}")

    def search(told):
        (tmp_path / "told.json").write_text(json.dumps(told), encoding="utf-8")
        command = json.dumps([sys.executable, "-P", str(tmp_path / "runtime.py"), "measure", "--tolerant"])
        arguments = ["tuner", "search", "search.toml", "--out", "plan.json", "--measure", "--fresh"]
        monkeypatch.setattr(sys, "argv", [*arguments, "--set", f"ladder.measured.command={command}"])
        with pytest.raises(SystemExit) as left:
            main()
        out = capsys.readouterr().out
        assert not left.value.code, out
        return load_json(tmp_path / "plan.json", Plan), out

    return search


def test_what_the_search_asks_is_what_the_runtime_reads_and_its_record_decides(searched):
    plan, out = searched({REFERENCE: 2.0, HAND: 3.0, "others": 4.0})
    (entry,) = plan.entries
    losers = {each.name: each.measured_ns for each in entry.losers}
    assert entry.measured_ns == 2.0e6
    assert (losers[HAND], losers[REFERENCE_ORDER]) == (3.0e6, 4.0e6)
    assert REFERENCE not in losers
    assert plan.provenance.measured_on.startswith("made up")
    assert "wins" in out


def test_who_hangs_computes_something_else_or_does_not_compile_never_wins(searched):
    plan, out = searched({HAND: 3.0, REFERENCE: "hangs", REFERENCE_ORDER: "differs", "others": "spills"})
    (entry,) = plan.entries
    assert entry.measured_ns == 3.0e6
    assert {each.measured_ns for each in entry.losers} == {None}
    assert HAND not in {each.name for each in entry.losers}
    for printed in ("hung: L1.up[3] never arrived", "wrong: logits differ", "failed build: spills"):
        assert printed in out


def test_who_hangs_once_it_is_timed_ends_alone(searched):
    plan, out = searched({HAND: 3.0, REFERENCE: "hangs late", "others": 4.0})
    (entry,) = plan.entries
    losers = {each.name: each.measured_ns for each in entry.losers}
    assert (entry.measured_ns, losers[REFERENCE], losers[REFERENCE_ORDER]) == (3.0e6, None, 4.0e6)
    assert "hung: L2.down[5] never arrived" in out


def test_kernels_are_compiled_at_once_and_one_that_fails_leaves_the_others_in_the_cache(tmp_path, monkeypatch):
    from runtime.gpu import compile as compiler
    from runtime.gpu.specialize import Specialization

    together, compiled = Barrier(2, timeout=20), []

    def compile_one(_source, rendered, _flags):
        compiled.append(rendered)
        together.wait()
        return b"cubin", f"'{compiler.ENTRY}' Used {300 if 'kSlots = 9' in rendered else 100} registers"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_compile", compile_one)
    monkeypatch.setattr(Specialization, "render", lambda self: f"kSlots = {self['kSlots']}")
    fits, too_large = (
        Specialization((("kSlots", slots), ("kConsumerWarps", 8), ("kStreaming", 0), ("kTrace", 0))) for slots in (4, 9)
    )
    with pytest.raises(ConfigError, match="300 registers"):
        compiler.compile_ahead([too_large, fits, fits], "sm_90a")
    assert len(compiled) == 2
    assert compiler.compile_kernel(fits, "sm_90a").resources.registers == 100
    with pytest.raises(ConfigError, match="300 registers"):
        compiler.compile_kernel(too_large, "sm_90a")
    assert len(compiled) == 2, "both were in the cache"
