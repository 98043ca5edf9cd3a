"""On a card: the kernel leaves what the interpreted table leaves, and decodes what transformers decodes."""

from __future__ import annotations

import pytest
import torch
from support.card import on_card
from support.decoding import interpreter, prompts
from support.tiny_models import WINDOW, cohere2_moe, qwen3_moe

pytestmark = pytest.mark.gpu

FAMILIES = [pytest.param(cohere2_moe, id="cohere2_moe"), pytest.param(qwen3_moe, id="qwen3_moe")]
LENGTHS = [17, WINDOW, 1, 16, WINDOW + 1, 15, 45, 2]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arrival", ["read_back", "release"])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_kernel_leaves_what_the_interpreter_leaves(family, rows, arrival):
    model = family(dtype=torch.bfloat16)
    texts = prompts(LENGTHS[:rows], seed=rows)
    device = on_card(model, rows, arrival=arrival)
    host = interpreter(model, device.step, torch.bfloat16)
    exact = interpreter(model, device.step, torch.float32)
    longest = max(map(len, texts))
    compared = apart = 0
    for tick in range(longest + 8):
        for row, text in enumerate(texts):
            position = tick - (longest - len(text))
            if 0 <= position < len(text):
                for join in (device.join, host.memory.join, exact.memory.join):
                    join(row, text[position], position)
        found = device.run()[0]
        for machine in (host, exact):
            machine.step()
        logits, expected, truth = (part.scratch("logits") for part in (device, host.memory, exact.memory))
        for row in range(rows):
            if not host.memory.active[row]:
                continue
            noise = (expected[row] - truth[row]).abs().max()
            compared += 1
            # a router's near-tie may fall either way, and is then no matter of rounding
            apart += bool((logits[row] - truth[row]).abs().max() > 2.0 * noise + 1e-3)
            assert found[row] == int(torch.argmax(logits[row]))
            # teacher forcing: all go on with the card's token
            for machine in (host, exact):
                machine.memory.tokens[row] = found[row]
    assert apart <= 0.05 * compared, f"{apart} of {compared} rows differ by more than noise"
