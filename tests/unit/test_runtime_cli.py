"""The `runtime` command as a user meets it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megakernel.assets import asset

COMMAND = [sys.executable, "-c", "from runtime.cli import main; main()"]


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """Return a directory from which only the import path leads to the code."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return tmp_path


def test_a_shipped_model_is_shown_from_any_directory(elsewhere):
    done = run("model", "configs/models/CohereLabs--North-Mini-Code-1.0.json", cwd=elsewhere)
    assert (done.returncode, done.stderr) == (0, "")
    assert "30,484,303,872" in done.stdout
    assert "36 layers" in done.stdout


def test_json_is_the_spec(elsewhere):
    done = run("model", asset("configs/models/Qwen--Qwen3-30B-A3B.json"), "--json", cwd=elsewhere)
    assert json.loads(done.stdout)["num_heads"] == 32


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "error: mine.json: no such file\n"),
        (
            "{",
            "error: mine.json: not valid JSON: Expecting property name enclosed in double quotes at line 1",
        ),
        ('{"model_type": "gpt2"}', 'error: mine.json: `model_type` is "gpt2"; supported: one of cohere2_moe'),
        (
            '{"model_type": "qwen3_moe"}',
            "error: mine.json: `hidden_size` is missing; needed: an integer",
        ),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(elsewhere, content, message):
    if content is not None:
        (elsewhere / "mine.json").write_text(content, encoding="utf-8")
    done = run("model", "mine.json", cwd=elsewhere)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


def test_the_command_needs_no_torch(elsewhere):
    check = "import sys, runtime.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=elsewhere, check=False, timeout=120).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "configs/measure/north-h200.toml"),
        ("measure", "configs/measure/north-h200.toml"),
        ("trace", "configs/measure/north-h200.toml", "out.json"),
        ("microbench", "--out", "out.json"),
    ],
)
def test_a_command_that_needs_a_card_says_so_in_one_line(arguments, elsewhere, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run(*arguments, cwd=elsewhere)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "which this command needs" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("measure", "configs/measure/none.toml"), "no such file"),
        (("measure", "configs/measure/north-h200.toml", "--out", "none/out.json"), "none"),
        (("trace", "configs/measure/none.toml", "out.json"), "no such file"),
        (("trace", "configs/measure/north-h200.toml", "none/out.json"), "none"),
        (("microbench", "--out", "out.json", "--chip", "configs/hardware/none.toml"), "no such file"),
        (("microbench", "--out", "none/out.json"), "none"),
        (("check", "configs/measure/none.toml"), "no such file"),
    ],
)
def test_paths_are_looked_at_before_the_card(arguments, message, elsewhere, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run(*arguments, cwd=elsewhere)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr
    assert "which this command needs" not in done.stderr


def test_the_header_check_outside_a_clone_says_that_there_is_none(elsewhere):
    done = run("abi", cwd=elsewhere)
    assert (done.returncode, "no such file" in done.stderr) == (2, True)
