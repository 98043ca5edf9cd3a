"""What ways of drawing a token cost a step, on a card: North's geometry, drawn weights, 1 and 8 rows.

    python tests/bench/sampling_cost.py RECORD.json [ROWS...]

Milliseconds a step: the middle of some launches of 32 steps each, ways in turn. Drawn weights spread the logits over
the whole vocabulary, the worst case for filters: a trained model keeps few tokens. The last way is greedy with a
mailbox: at every boundary the sampling block looks at what the host asks of the rows, which is nothing.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import north
from support.card import best_step, chip

from runtime.gpu.decoder import Decoder
from runtime.gpu.specialize import KernelOptions
from runtime.sampling import SamplingParams

STEPS = 32
LAUNCHES = 7
MAILBOX = "greedy, with a mailbox"
WAYS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=1.0, seed=1),
    "temperature 0.3, top_p 0.95": SamplingParams(temperature=0.3, top_p=0.95, seed=1),
    "temperature 0.05, top_p 0.95": SamplingParams(temperature=0.05, top_p=0.95, seed=1),
    "temperature 1, min_p 0.05": SamplingParams(temperature=1.0, min_p=0.05, seed=1),
    "temperature 1, top_k 20, top_p 0.95": SamplingParams(temperature=1.0, top_k=20, top_p=0.95, seed=1),
    MAILBOX: SamplingParams(),
}


def main(out: str, all_rows: list[int]) -> None:
    """Measure and write."""
    found: dict[str, dict[str, float]] = {}
    for rows in all_rows:
        decoder = Decoder(best_step(north.model(), rows, 4096), chip(), options=KernelOptions(arrival="read_back"))
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for launch in range(LAUNCHES):
            for way, params in WAYS.items():
                for row in range(rows):
                    decoder.join(row, 1000 + row, 1000, params.model_copy(update={"seed": launch * 8 + row}))
                decoder.mailbox.clear()
                mailbox = decoder.mailbox if way == MAILBOX else None
                decoder.table.arm(decoder._addresses, steps=STEPS, mailbox=mailbox)
                times[way].append(decoder.table.time_ms() / STEPS)
        found[f"{rows} rows"] = {way: round(statistics.median(each[1:]), 4) for way, each in times.items()}
        del decoder
        torch.cuda.empty_cache()
    Path(out).write_text(json.dumps({"device": torch.cuda.get_device_name(), "ms_a_step": found}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], [int(rows) for rows in sys.argv[2:]] or [1, 8])
