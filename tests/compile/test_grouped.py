"""A prefill's kernels compile for Hopper without a card, and products as they were meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or by itself")

COMPILE = """
import inspect, json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from runtime.gpu import grouped, heads, routing

name, constants, options = json.loads(sys.argv[1])
kernel = next(found for module in (grouped, heads, routing) if (found := getattr(module, name, None)))._function
floats = {"eps": "fp32"}
words = {"rows", "tiles", "chosen", "ranks", "counts", "places", "positions", "slots"}
numbers = {"pairs", "most", "tokens"}
def kind(name):
    if name in constants: return "constexpr"
    if name in numbers: return "i32"
    return floats.get(name) or ("*i32" if name in words else "*fp32" if name == "weights" else "*bf16")
names = list(inspect.signature(kernel.fn).parameters)
signature = {name: kind(name) for name in names}
aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name].startswith("*")}
source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
ptx = compiled.asm["ptx"]
copies = re.findall(r"cp\\.async\\.c[ag]\\.shared\\.global \\[[^\\]]*\\], \\[[^\\]]*\\], (\\w+)", ptx)
first = re.search(r"wgmma\\.mma_async[^;]*?\\}, (\\{|%)", ptx)
print(json.dumps({
    "copies": sorted({int(size, 0) for size in copies}),
    "weights from registers": bool(first) and first[1] == "{",
    "spills": "st.local" in ptx,
    "pending": sorted(set(map(int, re.findall(r"wgmma\\.wait_group\\.sync\\.aligned\\s+(\\d+)", ptx)))),
    "shared": compiled.metadata.shared,
}))
"""


def compiled(name: str, constants: dict, options: dict, folder: Path) -> dict:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    environment |= {
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])]),
        "TRITON_CACHE_DIR": str(folder),
    }
    command = [sys.executable, "-c", COMPILE, json.dumps([name, constants, options])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


ONE = {"rows": None, "tiles": None, "gathers": False}
PRODUCTS = {
    "qkv": {"height": 5120, "columns": 2048, "gated": False, "plus": None, **ONE},
    "output": {"height": 2048, "columns": 4096, "gated": False, **ONE},
    "up": {"height": 1536, "columns": 2048, "gated": True, "gathers": True, "plus": None},
    "down": {"height": 2048, "columns": 768, "gated": False, "gathers": False, "plus": None},
    "dense up": {"height": 6144, "columns": 2048, "gated": True, "plus": None, **ONE},
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_products_of_north(product, tmp_path):
    """Weights go to the matrix unit from registers, as they lie; none is loaded while a product may read another."""
    from runtime.gpu.grouped import BLOCKS

    constants = {"splits": 1, "tall": BLOCKS.tokens, "wide": BLOCKS.rows, "depth": BLOCKS.depth, **PRODUCTS[product]}
    options = {"num_warps": BLOCKS.warps, "num_stages": BLOCKS.stages}
    found = compiled("_product", constants, options, tmp_path)
    expected = {"copies": [16], "weights from registers": True, "spills": False, "pending": [0]}
    assert found == expected | {"shared": found["shared"]}
    assert found["shared"] <= 113 * 1024, "two blocks an SM"


NORTH = {"is_laid": True, "kv_heads": 4, "dim": 128, "page": 64, "tall": 16}
OTHERS = {
    "_route": {
        "experts": 128, "hidden": 2048, "power": 128, "top_k": 8, "kept": 8, "softmax": True, "renormalise": True,
        "tall": 16, "depth": 128,
    },
    "_place": {"experts": 128, "top_k": 8, "power": 128, "tall": 128, "block": 32},
    "_combine": {"hidden": 2048, "power": 2048, "top_k": 8},
    "_norm": {"hidden": 2048, "power": 2048},
    "_append": {"heads": 32, "power": 64, "is_half": False, **NORTH},
    "_gather": {"power": 128, **NORTH},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_between_products(name, tmp_path):
    assert not compiled(name, OTHERS[name], {"num_warps": 4, "num_stages": 3}, tmp_path)["spills"]
