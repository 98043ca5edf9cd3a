"""A long chain of North's geometry on a card: rows join and leave, the step's number and the counters wrap.

    python tests/bench/decode_soak.py RECORD.json [STEPS [SECONDS [ROWS]]]

Drawn weights. Every row's tokens are compared with those that it has alone; a difference, a step that hangs or a logit
that is no number ends the script. The record says how many steps there were, at most SECONDS long, how many rows were
compared, and how full steps were.
"""

# ruff: noqa: T201 - a script reports on stdout

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import north
from support.card import best_step, drawn
from support.soak import Soak

from runtime.gpu.compile import csrc_fingerprint

BEFORE_WRAP = 2_000
"""Steps; the rows that run alone first take some of them."""
MOST_TOKENS = 256


def main(out: str, steps: int = 20_000, most_seconds: float = 550.0, rows: int = 8) -> None:
    """Run and write; an AssertionError says which row differed."""
    decoder = drawn(best_step(north.model(), rows, MOST_TOKENS), arrival="read_back")
    decoder.next_step = 2**32 - BEFORE_WRAP
    soak = Soak(decoder, longest=100)
    assert decoder.next_step > 2**31, "the chain itself has to cross the wrap"
    begin = time.monotonic()
    made = soak.run(steps, seconds=most_seconds)
    seconds = time.monotonic() - begin
    assert torch.isfinite(decoder.scratch("logits")).all()
    record = {
        "device": torch.cuda.get_device_name(),
        "code": csrc_fingerprint(),
        "steps": made,
        "asked": steps,
        "rows": rows,
        "seconds": round(seconds, 1),
        "rows_compared": soak.checked,
        "rows_joined": len(soak.asked),
        "next_step": decoder.next_step,
        "steps_by_active_rows": {str(count): soak.active[count] for count in sorted(soak.active)},
    }
    Path(out).write_text(json.dumps(record, indent=1) + "\n")
    print(record)


if __name__ == "__main__":
    main(sys.argv[1], *(as_type(given) for as_type, given in zip((int, float, int), sys.argv[2:], strict=False)))
