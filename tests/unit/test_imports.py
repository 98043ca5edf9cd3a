"""Who may import whom, read from the source: the direction of imports is the project's first seam."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = {"megakernel", "simulator", "runtime", "tuner"}

# Third-party packages a package may import anywhere, and those of ours.
MAY_IMPORT = {
    "megakernel": {"numpy", "pydantic", "pydantic_core", "megakernel"},
    "simulator": {"numpy", "pydantic", "simpy", "megakernel", "simulator"},
    "runtime": {
        *("numpy", "pydantic", "pydantic_core", "torch", "triton", "cuda", "safetensors", "transformers", "tokenizers"),
        *("fastapi", "starlette", "uvicorn", "jinja2", "llguidance", "prometheus_client", "aiohttp"),
        *("megakernel", "runtime"),
    },
    "tuner": {"numpy", "pydantic", "optuna", "megakernel", "simulator", "tuner"},
}

# Talking to people is the business of these files alone.
FOR_PEOPLE = {"cli.py": {"rich", "typer"}, "report.py": {"rich"}}

# What makes the same input give another answer; the pure language may not even hold it.
IMPURE_MODULES = {
    "asyncio",
    "getpass",
    "locale",
    "multiprocessing",
    "platform",
    "secrets",
    "socket",
    "subprocess",
}
IMPURE_MODULES |= {"threading", "time", "uuid"}
IMPURE_NAMES = {"os.environ", "os.getenv", "os.putenv", "datetime.now", "datetime.today", "date.today"}
IMPURE_NAMES |= {"datetime.utcnow", "sys.argv"}
SEEDED_NAMES = {"random.Random", "np.random.default_rng", "np.random.Generator"}


@dataclass(frozen=True)
class Import:
    """One import statement's target, the module's full name, wherever it stands."""

    module: str
    line: int

    @property
    def root(self) -> str:
        """Return the package imported from."""
        return self.module.partition(".")[0]


def imports(tree: ast.AST) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import(names=names):
                yield from (Import(each.name, node.lineno) for each in names)
            case ast.ImportFrom(module=module, level=level):
                assert level == 0, f"line {node.lineno}: a relative import hides where it leads"
                yield Import(module or "", node.lineno)
            case _:
                yield from imports(node)


def faults(package: str, file_name: str, source: str) -> list[str]:
    """Return what a file of a package imports or names against the rules."""
    tree = ast.parse(source)
    allowed = MAY_IMPORT[package] | FOR_PEOPLE.get(file_name, set())
    found: list[str] = []
    for each in imports(tree):
        if each.root not in sys.stdlib_module_names | allowed:
            found.append(f"line {each.line}: {package} may not import {each.module}")
        if package == "megakernel" and each.root in IMPURE_MODULES:
            found.append(f"line {each.line}: megakernel is pure and may not import {each.module}")
    if package == "megakernel":
        found += impure_names(tree)
    return found


def impure_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute():
                name = ast.unparse(node)
                is_random = name.startswith(("random.", "np.random.")) and name not in SEEDED_NAMES
                if name in IMPURE_NAMES or is_random:
                    yield f"line {node.lineno}: megakernel is pure and may not use {name}"
            case ast.Call(func=func, args=args) if ast.unparse(func) in SEEDED_NAMES and not args:
                yield f"line {node.lineno}: {ast.unparse(func)} needs a seed"
            case ast.Call(func=ast.Name(id="print" | "input" as name)):
                yield f"line {node.lineno}: megakernel is pure and may not {name}"
            case ast.ImportFrom(module="os" | "random" | "sys" as module, names=names):
                for each in names:
                    if f"{module}.{each.name}" in IMPURE_NAMES or (module == "random" and each.name != "Random"):
                        yield f"line {node.lineno}: megakernel is pure and may not use {module}.{each.name}"
            case _:
                pass


def sources() -> list[Path]:
    return sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_architecture(path):
    package = path.relative_to(ROOT).parts[0]
    assert faults(package, path.name, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_owns(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("package", "file_name", "source"),
    [
        ("megakernel", "plan.py", "import torch"),
        ("megakernel", "plan.py", "import time"),
        ("megakernel", "plan.py", "def f():\n    import time"),
        ("megakernel", "plan.py", "import os\nos.environ['X']"),
        ("megakernel", "plan.py", "from os import environ"),
        ("megakernel", "plan.py", "import random\nrandom.shuffle([])"),
        ("megakernel", "plan.py", "import random\nrandom.Random()"),
        ("megakernel", "plan.py", "from random import shuffle"),
        ("megakernel", "plan.py", "import numpy as np\nnp.random.seed(1)"),
        ("megakernel", "plan.py", "import numpy as np\nnp.random.default_rng()"),
        ("megakernel", "plan.py", "print('x')"),
        ("megakernel", "plan.py", "import rich"),
        ("megakernel", "plan.py", "from simulator import costs"),
        ("megakernel", "plan.py", "if TYPE_CHECKING:\n    import simpy"),
        ("simulator", "sm.py", "import runtime.engine"),
        ("simulator", "sm.py", "def f():\n    import runtime"),
        ("simulator", "sm.py", "import tuner"),
        ("simulator", "sm.py", "import optuna"),
        ("simulator", "sm.py", "import rich.table"),
        ("simulator", "report.py", "import typer"),
        ("runtime", "engine.py", "import simulator"),
        ("runtime", "engine.py", "import simpy"),
        ("runtime", "engine.py", "import tuner"),
        ("tuner", "study.py", "import runtime"),
        ("tuner", "measure.py", "def f():\n    import runtime.gpu.campaign"),
        ("tuner", "study.py", "import torch"),
        ("tuner", "study.py", "import simpy"),
    ],
)
def test_the_rules_catch_what_they_forbid(package, file_name, source):
    assert faults(package, file_name, source)


@pytest.mark.parametrize(
    ("package", "file_name", "source"),
    [
        (
            "megakernel",
            "plan.py",
            "import json, os\nimport numpy as np\nfrom pydantic import Field\nos.replace('a', 'b')",
        ),
        ("megakernel", "plan.py", "import random\nrandom.Random(7)"),
        ("megakernel", "plan.py", "import numpy as np\nnp.random.default_rng(7)"),
        ("simulator", "cli.py", "import rich\nimport typer\nimport time"),
        ("runtime", "engine.py", "import torch\nimport cuda.core"),
        ("tuner", "evaluate.py", "import simulator\ndef f():\n    import optuna"),
    ],
)
def test_the_rules_let_pass_what_they_allow(package, file_name, source):
    assert faults(package, file_name, source) == []


def test_a_relative_import_is_refused():
    with pytest.raises(AssertionError, match="relative import"):
        faults("megakernel", "plan.py", "from . import graph")
