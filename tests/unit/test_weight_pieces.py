"""A checkpoint that transformers saved comes piece by piece to exactly the buffers that a table is interpreted with."""

from __future__ import annotations

import pytest
import torch
from support.tiny_models import built, choices_for, cohere2_moe, qwen3_moe, spec_of

from runtime import weights as packing
from runtime.engine.checkpoint import Checkpoint
from runtime.weights import pack_pieces, pack_weights, weight_pieces


def placed(pieces) -> tuple[dict[str, torch.Tensor], int, int]:
    """Pieces copied to their places, as a card's memory has them; bytes of the largest with its source, and of all."""
    buffers: dict[str, torch.Tensor] = {}
    most = total = 0
    for piece in pieces:
        before = buffers.get(piece.name, piece.tensor[:0])
        assert piece.begin == len(before), f"{piece.name}: a gap or an overlap"
        buffers[piece.name] = torch.cat([before, piece.tensor])
        most, total = max(most, piece.bytes + piece.source_bytes), total + piece.bytes
    return buffers, most, total


@pytest.mark.parametrize("family", [cohere2_moe, qwen3_moe])
@pytest.mark.parametrize("shard", ["10GB", "30KB"])
@pytest.mark.parametrize("splits", [1, 2])
def test_pieces_of_a_saved_checkpoint_are_the_packed_buffers(family, shard, splits, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "MOST_PIECE_BYTES", 4096)
    model = family(dtype=torch.bfloat16)
    spec = spec_of(model)
    rounding = choices_for(spec).rounding.model_copy(update={"project_k_splits": splits})
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "30KB")
    pieces = pack_pieces(spec, Checkpoint(tmp_path), rounding, torch.bfloat16)
    found, most, total = placed(pieces)
    expected, _, _ = placed(weight_pieces(pack_weights(spec, dict(model.state_dict()), rounding, torch.bfloat16)))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert most < total / 3, "what the host holds at once is a piece, not the model"


@pytest.mark.parametrize("family", [cohere2_moe, qwen3_moe])
def test_pieces_fill_the_weights_of_a_table_and_nothing_else(family):
    model = family(dtype=torch.bfloat16)
    spec = spec_of(model)
    step = built(spec)
    found, _, _ = placed(pack_pieces(spec, dict(model.state_dict()), step.choices.rounding, torch.bfloat16))
    read_only = {buffer.name: buffer.bytes for buffer in step.graph.buffers if buffer.read_only}
    own = {name: tensor.numel() * 2 for name, tensor in found.items() if "norm" not in name}
    assert own == read_only
