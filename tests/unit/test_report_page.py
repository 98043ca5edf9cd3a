"""The page of a step: whole in one file, the same figures as the JSON, and drawn without an error or a request."""

import json
import re
import sys

import numpy as np
import pytest
from support import north
from support.browser import needs_chromium, show
from support.plans import plan_of
from support.predicting import short_step

from megakernel.assets import asset
from megakernel.config import pretty_json
from megakernel.workload import Workload
from simulator.cli import main
from simulator.curves import curves
from simulator.exposure import Exposure
from simulator.memory import Memory
from simulator.routing import mean_state
from simulator.step_run import run_step
from simulator.walk import walk_of_run

LAYERS = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`simulator run --report --json` of a plan and a chip with names that are markup, as text and figures."""
    folder = tmp_path_factory.mktemp("page")
    chip = asset("configs/hardware/h100-sxm.toml").read_text(encoding="utf-8")
    name = "[bold]H100</script><b>"
    (folder / "chip.toml").write_text(chip.replace('name = "NVIDIA H100 SXM"', f'name = "{name}"'))
    (folder / "plan.json").write_text(pretty_json(plan_of(short_step(layers=LAYERS), north.chip())), encoding="utf-8")
    page, printed = folder / "page.html", []
    arguments = [str(folder / "plan.json"), "--chip", str(folder / "chip.toml"), "--report", str(page), "--json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["simulator", "run", *arguments])
        patch.setattr("typer.echo", lambda text, **_: printed.append(text))
        with pytest.raises(SystemExit) as left:
            main()
    assert not left.value.code
    return page, json.loads(printed[-1])


def data_of(page):
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_names_nothing_outside_itself_and_forbids_itself_to_ask(made):
    text = made[0].read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    for outside in ("http:", "https:", "//cdn", "@import", "url(", "src=", "fetch(", "XMLHttpRequest", "import("):
        assert outside not in text.replace('http-equiv="Content', "")
    assert "@" not in re.sub(r"@media|@title@", "", text.split("</style>")[0])


def test_the_page_holds_the_figures_of_the_json_and_every_task(made):
    page, figures = made
    data = data_of(page)
    assert data["figures"] == figures
    step = short_step(layers=LAYERS)
    assert len(data["spans"]["end"]) == step.graph.num_tasks
    assert max(data["spans"]["end"]) == round(figures["ms"] * 1e6)
    assert data["spans"]["offsets"] == step.table.offsets.tolist()
    assert {op["name"] for op in data["ops"]} == {kind["name"] for kind in figures["kinds"]}
    moved = sum(data["curves"]["bytes_per_ns"]) * data["curves"]["bin_ns"]
    assert moved == pytest.approx(sum(kind["load_bytes"] for kind in figures["kinds"]), rel=1e-4)


def test_the_chain_in_the_page_reaches_from_the_steps_end_to_its_beginning(made):
    data = data_of(made[0])
    assert data["chain"][0]["to"] == pytest.approx(data["total_ns"], abs=1)
    assert data["chain"][-1]["from"] < 0.02 * data["total_ns"]
    assert all(link["from"] <= link["to"] for link in data["chain"])


def test_an_uncalibrated_chip_is_said_to_be_one(made):
    page, figures = made
    assert "not calibrated" in data_of(page)["note"]
    assert "handoff_ns" in figures["uncalibrated_costs"]


@needs_chromium
def test_the_browser_shows_the_figures_of_the_json_without_an_error_or_a_request(made, tmp_path):
    page, figures = made
    shown = show(page, tmp_path)
    assert shown.console == []
    assert (shown.root["data-ready"], shown.root["data-requests"]) == ("yes", "0")
    assert "data-error" not in shown.root
    whole = figures["ms"] * 1e6
    assert f"{figures['ms']:.4f} ms" in shown.text
    assert "[bold]H100</script><b>" in shown.text
    assert shown.tables["kinds"][1:] == [
        [
            kind["name"], f"{kind['tasks']:.0f}", f"{kind['load_bytes'] / 1e6:.0f}", f"{kind['run_ns'] / 1e3:.1f}",
            f"{100 * kind['run_ns'] / whole:.1f}%", f"{kind['wait_ns'] / 1e3:.1f}", f"{kind['critical_ns'] / 1e3:.1f}",
            f"{kind['slack_ns'] / kind['tasks'] / 1e3:.1f}",
        ]
        for kind in figures["kinds"]
    ]  # fmt: skip
    assert [(row[0], row[1], row[3]) for row in shown.tables["hand-offs"][1:]] == [
        (f"{off['source']} → {off['waiter']}", off["phase"], f"{off['exposed_ns'] / 1e3:.1f}")
        for off in figures["hand_offs"]
    ]
    assert shown.tables["critical"][1][1] == f"{figures['critical_path']['run_ns'] / 1e3:.1f}"
    assert shown.tables["idle"][-1][1] == f"{figures['memory_idle_ns'] / 1e3:.1f}"
    assert shown.tables["bounds"][1][1] == f"{figures['bounds']['roofline_ns'] / 1e6:.4f}"
    drawn = [int(each["data-drawn"]) for each in shown.canvases if "data-drawn" in each]
    assert drawn == [short_step(layers=LAYERS).graph.num_tasks]


@needs_chromium
def test_an_address_opens_on_a_part_of_the_step(made, tmp_path):
    data = data_of(made[0])
    middle = data["total_ns"] / 2e3
    shown = show(made[0], tmp_path, address=f"#{middle - 2:.0f}-{middle + 2:.0f}")
    (drawn,) = (int(each["data-drawn"]) for each in shown.canvases if "data-drawn" in each)
    assert 0 < drawn < len(data["spans"]["end"]) / 4


@pytest.mark.parametrize("name", ["hand", "reference"])
def test_the_bandwidth_curve_is_near_what_the_memory_served(name, monkeypatch):
    served = []

    def note(name: str) -> None:
        queue = getattr(Memory, name)

        def noted(memory, *arguments):
            found = queue(memory, *arguments)
            served.append((memory._free_ns, arguments[-1]))
            return found

        monkeypatch.setattr(Memory, name, noted)

    note("read")
    note("book")
    step = short_step(name, layers=6)
    run = run_step(step, north.chip(), mean_state(step.model, Workload(contexts=(8192,))))
    walk = walk_of_run(run)
    found = curves(run, walk, Exposure(walk, step.choices.ring, run.chip), bins=200)
    ends, sizes = np.array(served).T
    truth = np.histogram(ends, bins=200, range=(0.0, walk.total_ns), weights=sizes)[0]
    mine = found.bytes_per_ns * found.bin_ns
    assert mine.sum() == pytest.approx(sizes.sum())
    assert np.abs(np.cumsum(mine) - np.cumsum(truth)).max() < 0.5 * step.table.num_sms * step.choices.ring.bytes
    assert np.corrcoef(mine, truth)[0, 1] > 0.8
    assert found.bytes_per_ns.max() <= 1.001 * run.chip.ceiling_bytes_per_ns(step.table.num_sms)
    assert found.ring_most.max() <= step.choices.ring.bytes
    assert (found.ring_least <= found.ring_mean).all()
    assert (found.ring_mean <= found.ring_most).all()
