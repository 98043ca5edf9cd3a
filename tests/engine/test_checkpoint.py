"""A folder that transformers saved is served as the model that it was, and a damaged one is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from support import tiny_models
from support.engines import request, run, solo, tiny, tiny_backend

from megakernel.config import ConfigError
from megakernel.families import read_model
from runtime.engine import EngineCore
from runtime.engine.checkpoint import INDEX, Checkpoint
from runtime.engine.cpu_backend import CpuBackend
from runtime.weights import pack_weights

TEXT = list(range(20, 50))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", ["cohere2_moe", "qwen3_moe"])
@pytest.mark.parametrize("shard", ["10GB", "100KB"])
def test_a_saved_folder_gives_the_same_answers(family: str, shard: str, tmp_path) -> None:
    model, spec, _ = tiny(family)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / INDEX).exists() == (shard == "100KB")
    rounding = tiny_models.choices_for(spec).rounding
    loaded = read_model(tmp_path)
    weights = pack_weights(loaded, Checkpoint(tmp_path), rounding, torch.float64)
    assert loaded == spec
    backend = CpuBackend(loaded, weights, page_tokens=8, pages=tiny_backend(family).pages)
    each = request("a", TEXT, 10)
    assert run(EngineCore(backend), each)["a"].tokens == solo(tiny_backend(family), each).tokens


def test_what_is_missing_or_damaged_is_named(tmp_path) -> None:
    model, spec, _ = tiny("qwen3_moe")
    rounding = tiny_models.choices_for(spec).rounding
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))

    def refusal() -> str:
        with pytest.raises(ConfigError) as error:
            pack_weights(read_model(tmp_path), Checkpoint(tmp_path), rounding, torch.float32)
        return str(error.value)

    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[: len(whole) // 2])
    assert shards[1].name in refusal()
    shards[1].unlink()
    assert shards[1].name in refusal()
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_text("{}")
    assert "weight_map" in refusal()
    lost = [name for name, file in index["weight_map"].items() if file == shards[1].name]
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name not in lost}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert any(name in refusal() for name in lost)
    (tmp_path / INDEX).unlink()
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    assert "no *.safetensors" in refusal()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool])
def test_quantized_weights_are_refused_by_name_rather_than_read_as_numbers(dtype) -> None:
    """Their scales lie elsewhere: cast to bfloat16 they would be another model, which answers all the same."""
    model, spec, _ = tiny("qwen3_moe")
    rounding = tiny_models.choices_for(spec).rounding
    tensors = dict(model.state_dict())
    name = "model.layers.1.self_attn.o_proj.weight"
    for plain in (torch.float32, torch.float16, torch.bfloat16):
        pack_weights(spec, {**tensors, name: tensors[name].to(plain)}, rounding, torch.float32)
    said = str(dtype).removeprefix("torch.")
    with pytest.raises(ConfigError, match=rf"tensor '{name}' is {said}, quantized: needed are weights as bfloat16"):
        pack_weights(spec, {**tensors, name: tensors[name].to(dtype)}, rounding, torch.float32)
