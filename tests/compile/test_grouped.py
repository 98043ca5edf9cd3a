"""The grouped products compile for Hopper without a card, and as they were meant: matrix units, 16-byte copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or by itself")

COMPILE = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from runtime.gpu.grouped import BLOCKS, _product

columns = int(sys.argv[1])
types = dict(x="*bf16", rows="*i64", units="*bf16", out="*bf16", begins="*i64", ends="*i64", tile_ends="*i64")
types |= dict.fromkeys(("height", "matrices", "x_stride"), "i32")
constants = dict(columns=columns, power=128, tall=BLOCKS.rows, wide=BLOCKS.columns, depth=BLOCKS.depth)
signature = types | dict.fromkeys(constants, "constexpr")
aligned = {(place,): [["tt.divisibility", 16]] for place in range(len(types))}
source = ASTSource(fn=_product, signature=signature, constexprs=constants, attrs=aligned)
options = dict(num_warps=BLOCKS.warps, num_stages=BLOCKS.stages)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
copies = re.findall(r"cp\\.async\\.c[ag]\\.shared\\.global \\[[^\\]]*\\], \\[[^\\]]*\\], (\\w+)", compiled.asm["ptx"])
print(json.dumps({
    "copies": sorted({int(size, 0) for size in copies}),
    "matrix": "wgmma.mma_async" in compiled.asm["ptx"],
    "spills": "st.local" in compiled.asm["ptx"],
    "shared": compiled.metadata.shared,
}))
"""


@pytest.mark.parametrize("columns", [2048, 768], ids=["up", "down"])
def test_products_of_north_s_experts(columns, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    environment |= {
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])]),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-c", COMPILE, str(columns)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {"copies": [16], "matrix": True, "spills": False, "shared": found["shared"]}
    assert found["shared"] <= 113 * 1024, "two blocks an SM"
