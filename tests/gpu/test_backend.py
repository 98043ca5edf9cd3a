"""On a card: the engine over torch prefill and kernel decode answers as on the CPU, and `runtime generate` speaks."""

from __future__ import annotations

import contextlib

import pytest
import torch
from support.card import DEADLINE_MS
from support.engines import request, run
from support.tiny_models import cohere2_moe, qwen3_moe, spec_of

from runtime.engine import EngineCore
from runtime.engine.checkpoint import Checkpoint
from runtime.engine.cpu_backend import CpuBackend
from runtime.sampling import SamplingParams
from runtime.weights import pack_pieces, pack_weights

pytestmark = pytest.mark.gpu

TEXTS = [list(range(20, 20 + count)) for count in (1, 30, 45, 70, 90)]


@pytest.mark.parametrize("family", [cohere2_moe, qwen3_moe], ids=["cohere2_moe", "qwen3_moe"])
def test_the_engine_on_a_card_answers_as_on_the_cpu(family, tmp_path):
    """Greedy and seeded rows, more than fit at once; a near-tie of bfloat16 may part an answer from the CPU's."""
    from runtime.gpu.opening import Sizes, open_card

    model = family(dtype=torch.bfloat16)
    spec = spec_of(model)
    model.save_pretrained(tmp_path, max_shard_size="100KB")

    def pieces(rounding):
        return pack_pieces(spec, Checkpoint(tmp_path), rounding, torch.bfloat16)

    opened = open_card(spec, pieces, Sizes(rows=3, max_tokens=256))
    card = opened.backend
    assert [table.ring.shape[1] for table in card.tables] == [1, 2, 3]
    for table in card.tables:
        table.deadline_ms = DEADLINE_MS
    packed = pack_weights(spec, dict(model.state_dict()), card.tables[0].step.choices.rounding, torch.bfloat16)
    for mine, theirs in (
        (card.model.weights.embedding, packed.embedding),
        (card.model.weights.layers[1].up, packed.layers[1].up),
    ):
        assert torch.equal(mine.cpu(), theirs), "the card holds what was packed"
    host = CpuBackend(spec, packed, rows=3, page_tokens=card.page_tokens, pages=card.pages)
    asked = [
        request(
            f"{idx}", text, 12, SamplingParams() if idx % 2 else SamplingParams(temperature=0.5, top_p=0.9, seed=idx)
        )
        for idx, text in enumerate(TEXTS)
    ]
    ours, expected = run(EngineCore(card), *asked), run(EngineCore(host), *asked)
    same = total = 0
    for name, answer in expected.items():
        found = ours[name].tokens
        assert len(found) == len(answer.tokens)
        first = next((at for at, (a, b) in enumerate(zip(found, answer.tokens, strict=True)) if a != b), len(found))
        same, total = same + first, total + len(found)
    assert same >= 0.6 * total, f"{same} of {total} tokens come before a row parts from the CPU's"
    assert ours["1"].tokens[:2] == expected["1"].tokens[:2]


def test_generate_speaks(capsys, monkeypatch):
    from runtime.cli import main

    monkeypatch.setattr("sys.argv", ["runtime", "generate", "Hello", "--max-tokens", "8", "--temperature", "0"])
    with contextlib.suppress(SystemExit):
        main()
    assert capsys.readouterr().out.strip()
