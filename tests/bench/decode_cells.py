"""Decode steps on a card, cell by cell: model, rows and context, by the table that measured best. One record.

    python tests/bench/decode_cells.py RECORD.json [CELL...]

A cell is a name of `CELLS`; without one, all are measured. Random weights, the real router, rows with tokens of their
own. The roofline is the datasheet's: weights of the experts that the step touched, counted on the card from what a
traced step loaded, and the KV that its rows attend to.
"""

# ruff: noqa: T201 - a script reports on stdout

from __future__ import annotations

import gc
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.card import best_step, chip

from megakernel.assets import asset
from megakernel.families import read_model
from runtime.gpu.campaign import Campaign, MeasureConfig, Variant, measure
from runtime.gpu.compile import compile_kernel
from runtime.gpu.specialize import KernelOptions, specialize

CHIP = "configs/hardware/h200.toml"
NORTH, QWEN = "CohereLabs--North-Mini-Code-1.0", "Qwen--Qwen3-30B-A3B"
CELLS = {
    "north-1-8k": (NORTH, 1, 8192),
    "north-1-1k": (NORTH, 1, 1024),
    "north-1-64k": (NORTH, 1, 65536),
    "north-2-8k": (NORTH, 2, 8192),
    "north-4-8k": (NORTH, 4, 8192),
    "north-8-8k": (NORTH, 8, 8192),
    "qwen3-30b-a3b-1-8k": (QWEN, 1, 8192),
}
ROUNDS = 15
SPARE_TOKENS = 64


def campaign(name: str) -> Campaign:
    """A cell as a campaign of one variant."""
    model_name, rows, context = CELLS[name]
    path = asset(f"configs/models/{model_name}.json")
    step = best_step(read_model(path), rows, context + SPARE_TOKENS, context)
    config = MeasureConfig(
        model=str(path),
        chip=CHIP,
        bucket=step.bucket,
        positions=(context - 2,) * rows,
        rounds=ROUNDS,
        variants=(Variant(name=name, choices="the best measured"),),
    )
    return Campaign(config, step.model, chip(), {name: step})


def main(out: str, names: list[str]) -> None:
    """Measure and write; a cell that fails leaves the others' figures."""
    campaigns = {name: campaign(name) for name in names}
    kernels = [
        specialize(each.steps[name], each.chip, KernelOptions(trace=trace))
        for name, each in campaigns.items()
        for trace in (False, True)
    ]
    with ThreadPoolExecutor() as pool:  # the compiler is most of the time
        list(pool.map(lambda each: compile_kernel(each, chip().architecture), kernels))
    found: dict[str, dict[str, object]] = {}
    for name, each in campaigns.items():
        taken = measure(each)
        rows, roofline = CELLS[name][1], float(taken.facts["roofline_ms"])
        ms = taken.median_ms(name)
        found[name] = taken.model_dump(mode="json") | {
            "ms": ms,
            "tokens_per_second": rows / ms * 1e3,
            "roofline_percent": 100 * roofline / ms,
            "choices": {name: each.steps[name].choices.model_dump(mode="json")},
        }
        print(
            f"{name:20s} {ms:7.3f} ms {rows / ms * 1e3:7.1f} tok/s {100 * roofline / ms:5.1f}% of {roofline} ms, "
            f"{taken.facts['distinct_experts']} experts a layer"
        )
        Path(out).write_text(json.dumps(found, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or list(CELLS))
