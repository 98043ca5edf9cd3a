"""What the documentation tells people to type, probe and watch is there: commands, flags, files, routes, metrics."""

import configparser
import json
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml
from support.serving import answered, serving, thought

import runtime.cli
import simulator.cli
import tuner.cli
from runtime.bench.scrape import samples
from runtime.server.app import make_app
from runtime.server.auth import KeyRing
from runtime.server.config import ServeConfig, Waits, load_config

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
FILES = ROOT / "docs" / "deployment"
PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
COMMANDS = {"runtime": runtime.cli, "simulator": simulator.cli, "tuner": tuner.cli}


def blocks(text, language):
    """Fenced blocks of a language, without the indentation that a list gives them."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", text, flags=re.MULTILINE | re.DOTALL)
    return ["\n".join(line.removeprefix(indent) for line in body.splitlines()) for indent, body in found]


def typed(text):
    """Every command of the shell blocks, split into words."""
    for block in blocks(text, "bash"):
        joined = re.sub(r"(^|\s)#.*$", "", block.replace("\\\n", " "), flags=re.MULTILINE)
        lexer = shlex.shlex(joined, posix=True, punctuation_chars=";&|\n")
        lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
        words = []
        for word in [*lexer, "\n"]:
            if set(word) <= set(";&|\n"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)


OURS = [
    (path.name, [Path(words[0]).name, *words[1:]])
    for path in DOCS
    for words in typed(path.read_text(encoding="utf-8"))
    if Path(words[0]).name in COMMANDS
]


def faults(words):
    """What is wrong with a command of ours: its name, its flags, or how many arguments it has."""
    group = typer.main.get_command(COMMANDS[words[0]].app)
    try:
        command = group.commands[words[1]]
        command.make_context(words[1], list(words[2:]), resilient_parsing=False)
    except KeyError:
        return f"no command {words[1]}"
    except Exception as error:  # noqa: BLE001 - typer may have a click of its own, with its own errors
        return str(error) or type(error).__name__
    return None


@pytest.mark.parametrize("words", [words for _, words in OURS], ids=" ".join)
def test_every_command_of_ours_can_be_typed(words):
    assert faults(words) is None


def test_the_pages_have_commands_and_wrong_ones_would_be_found():
    assert {page for page, _ in OURS} >= {"deployment.md", "serving.md"}
    assert {words[1] for page, words in OURS if page == "deployment.md"} >= {"whatif", "bench"}
    assert faults(["runtime", "serv"]) == "no command serv"
    assert "--no-such" in faults(["runtime", "serve", "x", "--no-such"])
    assert faults(["simulator", "whatif", "--batch", "many"])


@pytest.mark.parametrize("words", [words for page, words in OURS if words[:2] == ["simulator", "whatif"]])
def test_sizing_answers_with_tokens_a_second(words):
    code = "from simulator.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words[1:], "--json"], cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    hand = next(each for each in json.loads(done.stdout)["answers"] if each["scheme"] == "hand")
    assert (hand["batch"], hand["context"]) == (8, 8192)
    assert hand["tokens_per_s"] > 0


def test_the_memory_of_the_example_is_as_the_model_says():
    from megakernel.assets import asset
    from megakernel.families import read_model

    model = read_model(asset("configs/models/CohereLabs--North-Mini-Code-1.0.json"))
    kv = (
        sum(8 * min(layer.window_tokens or 16384, 16384) for layer in model.layers) * model.kv_bytes_per_token_per_layer
    )
    whole = sum(layer.window_tokens is None for layer in model.layers)
    said = f"{whole} layers that see everything hold the whole context of a row, the {len(model.layers) - whole} others"
    text = " ".join(PAGE.split())
    assert said in text
    assert f"8 rows of 16,384 tokens are {kv / 1e9:.1f} GB beside {model.weight_bytes / 1e9:.0f} GB" in text


def test_the_router_has_the_flags():
    shown = subprocess.run(
        [sys.executable, "-m", "smg", "launch", "--help"], capture_output=True, text=True, check=True
    )
    launches = [
        words for path in DOCS for words in typed(path.read_text(encoding="utf-8")) if words[:2] == ["smg", "launch"]
    ]
    assert len(launches) >= 2
    flags = {word for words in launches for word in words if word.startswith("--")}
    assert {flag for flag in flags if not re.search(rf"{flag}\b", shown.stdout)} == set()
    known = set(re.search(r"--policy \{(.*?)\}", shown.stdout).group(1).split(","))
    assert {words[words.index("--policy") + 1] for words in launches} <= known


@cache
def routes():
    from support.serving import Script, service_of

    service = service_of(Script())
    service.engine.close()
    return make_app(service, KeyRing((), None), KeyRing((), None))._routes


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_route_named_exists(path):
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:GET |POST )?(/[\w/]+)`", text)) | set(re.findall(r"path: (/\w+)", text))
    named |= set(re.findall(r"localhost:8000(/[\w/]+)", text)) | set(re.findall(r"-endpoint (/\w+)", text))
    named -= {"/v1", "/v1/models/NAME"}
    assert named <= routes(), named - routes()
    if path.name == "deployment.md":
        assert {"/health", "/ready", "/metrics"} <= named


@pytest.mark.anyio
async def test_every_metric_named_is_exposed_with_its_labels():
    async with serving(thought("hm") + answered("x")) as served:
        await served.chat()
        exposed = samples((await served.client.get("/metrics")).text)
    names = {each.partition("{")[0] for each in exposed}
    labels = {key: set(re.findall(r'[{,](\w+)="', each)) for each in exposed for key in [each.partition("{")[0]]}
    bases = names | {each.removesuffix("_bucket") for each in names} | {each.removesuffix("_total") for each in names}
    page = set(re.findall(r"\b(?:vllm|counterpoint):\w+", PAGE))
    assert len(page) >= 10
    assert page - bases == set()
    rules = yaml.safe_load((FILES / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    expressions = " ".join(rule["expr"] for rule in rules)
    used = re.findall(r"\b((?:vllm|counterpoint):\w+)(?:\{(\w+)=)?", expressions)
    assert {name for name, _ in used} - names == set(), "a rule needs the whole name, _total or _bucket with it"
    assert all(not label or label in labels[name] for name, label in used)
    told = {name.removesuffix("_total").removesuffix("_bucket") for name, _ in used}
    assert told <= {each.removesuffix("_total") for each in page}, "a rule is not explained on the page"


def test_the_page_and_the_rules_have_the_same_thresholds():
    rules = yaml.safe_load((FILES / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    limits = {rule["alert"]: rule["expr"].rsplit("> ", 1)[1] for rule in rules}
    assert limits["FirstTokensLate"] == "2"
    assert "p99 over 2 s for 10 min" in PAGE
    assert (float(limits["TokensStutter"]), "p99 over 50 ms for 10 min" in PAGE) == (0.05, True)
    assert (float(limits["StepsSlower"]), "over 15 ms for 10 min" in PAGE) == (0.015, True)
    assert (limits["RowsGiveWay"], "over 0.9; over 0.1/s" in PAGE) == ("0.1", True)
    assert (limits["ServerErrors"], "status 5xx over 0.1/s for 5 min" in PAGE) == ("0.1", True)


def test_the_image_copies_what_an_installation_reads_and_starts_a_command_that_exists():
    lines = (FILES / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    copied = {name for line in words if line[0] == "COPY" for name in line[1:-1]}
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert copied >= {*wheel["packages"], *wheel["force-include"], project["project"]["readme"], "pyproject.toml"}
    (entry,) = (json.loads(" ".join(line[1:])) for line in words if line[0] == "ENTRYPOINT")
    assert entry[0] in project["project"]["scripts"]
    assert faults([*entry, "/models/x"]) is None
    assert ["STOPSIGNAL", "SIGTERM"] in words
    assert ["EXPOSE", str(ServeConfig().port)] in words
    assert "runtime" in project["project"]["optional-dependencies"]
    assert f"-f {(FILES / 'Containerfile').relative_to(ROOT)} " in PAGE


def test_the_units_command_configuration_and_patience_fit():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(FILES / "counterpoint.service", encoding="utf-8")
    service = unit["Service"]
    words = shlex.split(service["ExecStart"])
    assert faults([Path(words[0]).name, *words[1:]]) is None
    config = load_config(FILES / Path(words[-1]).name, {})
    assert config.waits.drain_s < int(service["TimeoutStopSec"])
    assert service["RestartPreventExitStatus"] == "2"
    assert (config.port, config.host, config.open_metrics) == (8000, "0.0.0.0", True)


def test_whatever_stops_the_process_waits_longer_than_a_drain():
    drain_s = Waits().drain_s
    (pod,) = map(yaml.safe_load, blocks(PAGE, "yaml"))
    assert pod["terminationGracePeriodSeconds"] > drain_s
    assert f"`drain_s` seconds ({drain_s:.0f})" in PAGE
    stops = [words for words in typed(PAGE) if words[:2] == ["docker", "stop"]]
    assert [int(words[words.index("-t") + 1]) > drain_s for words in stops] == [True]


def test_files_that_the_page_names_are_there():
    named = set(re.findall(r"\]\(((?!http)[^)#]+)\)", PAGE)) | {
        f"../{each}" for each in re.findall(r"docs/deployment/\S+", PAGE)
    }
    assert len(named) >= 5
    assert [each for each in named if not (ROOT / "docs" / each.rstrip("/")).exists()] == []
    assert (ROOT / "tests/server/test_router.py").is_file()
