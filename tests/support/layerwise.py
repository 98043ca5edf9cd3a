"""A machine's layers, one by one, against transformers' own layer modules at any geometry: weights of one at a time.

What a layer was given - the residual stream and the KV of earlier tokens - is read from the machine and given to
transformers' module, in float32 (the truth) and in bfloat16 (whose distance from it is the noise floor). So no error of
one layer is another's excuse, and a model of any size needs the room of one unpacked layer. `Chained` goes through all
of them on its own, for whole steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.cohere2_moe import modeling_cohere2_moe as cohere2_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from megakernel.build import BuiltStep
from megakernel.counters import NONE
from megakernel.kinds import TaskKind
from megakernel.model import ModelSpec, RoutedMlp
from megakernel.table import TaskTable
from runtime.weights import LayerWeights, Weights, row_in_place, rows_of, unit_rows

FAMILIES: Mapping[str, tuple[type, type, type]] = {
    "cohere2_moe": (
        cohere2_moe.Cohere2MoeDecoderLayer, cohere2_moe.Cohere2MoeRotaryEmbedding, cohere2_moe.Cohere2MoeRMSNorm,
    ),
    "qwen3_moe": (qwen3_moe.Qwen3MoeDecoderLayer, qwen3_moe.Qwen3MoeRotaryEmbedding, qwen3_moe.Qwen3MoeRMSNorm),
}  # fmt: skip

ALLOWED = 1.5
"""Error of a valid bfloat16 implementation, of the distance between two runs of the reference."""

NEAR_TIE = 3.0
"""Gap under which two valid implementations may choose differently, of the same distance."""


class Machine(Protocol):
    """What decodes: a card, or the interpreter."""

    step: BuiltStep

    def run_first(self, layers: int) -> Tensor:
        """Run a step's first layers; the stream [rows, hidden] that they leave, bfloat16."""
        ...

    def router(self) -> Tensor:
        """Router logits [rows, experts] of the last layer that was run, float32."""
        ...

    def kv(self, layer: int, row: int, begin: int, end: int) -> Tensor:
        """K and V [2, KV heads, end - begin, head_dim] of a row's positions."""
        ...


def first_layers(step: BuiltStep, layers: int) -> TaskTable:
    """The step's table without what comes after `layers` layers, for one step: nothing that is left waits for that."""
    table = step.table
    kept = (table.records["layer"] < layers) | (table.records["kind"] == TaskKind.EMBED)
    sm = np.repeat(np.arange(table.num_sms), np.diff(table.offsets.astype(np.int64)))
    lengths = np.bincount(sm[kept], minlength=table.num_sms)
    header = table.header.copy()
    header["num_records"] = kept.sum()
    records = table.records[kept]
    for name in ("load", "run"):
        _drop_earlier_waits(records[f"{name}_waits"], records[f"num_{name}_waits"])
    totals = np.zeros_like(table.totals)
    for name in ("arrive", "early"):
        totals += np.bincount(records[name][records[name] != NONE], minlength=len(totals)).astype("<u4")
    return TaskTable(header, np.concatenate([[0], np.cumsum(lengths)]).astype("<u4"), totals, records)


def _drop_earlier_waits(waits: np.ndarray, counts: np.ndarray) -> None:
    """Leave out waits for the step before: their counters may stand for tasks that are left out."""
    is_there = np.arange(waits.shape[1]) < counts[:, None]
    for at in np.flatnonzero((is_there & (waits["lag"] > 0)).any(axis=1)):
        own = waits[at, : counts[at]]
        own = own[own["lag"] == 0].copy()
        waits[at, : len(own)] = own
        counts[at] = len(own)


def stream_names(step: BuiltStep, layers: int) -> tuple[str, ...]:
    """Buffers whose sum is the stream after `layers` layers."""
    if step.model.block == "sequential":
        return ("residual0",)
    return (f"residual{layers % 2}", f"mlp_out{layers % 2}") if layers else ("residual0",)


class Layers:
    """transformers' modules of one dtype, into which one layer's weights at a time are unpacked."""

    def __init__(self, config: Mapping[str, Any], weights: Weights, dtype: torch.dtype, splits: int) -> None:
        """`weights` lie where they are computed; `splits` of K are how the projection is packed."""
        fields = {key: value for key, value in config.items() if key != "model_type"}
        self.config = AutoConfig.for_model(config["model_type"], **fields)
        self.config._attn_implementation = "eager"
        self.config._experts_implementation = "batched_mm"  # without a trip to the host for every expert
        self.weights, self.dtype, self.splits = weights, dtype, splits
        self.device = weights.embedding.device
        self._layer, rotary, self._norm = FAMILIES[config["model_type"]]
        self._rotary = rotary(self.config).to(self.device)
        self._modules: dict[tuple[object, ...], torch.nn.Module] = {}
        self._loaded = -1
        self._asked: list[Tensor] = []

    def embed(self, tokens: list[int]) -> Tensor:
        """First residuals [rows, hidden]."""
        return rows_of(self.weights.embedding, torch.tensor(tokens, device=self.device)).to(self.dtype)

    @torch.no_grad()
    def logits(self, stream: Tensor) -> Tensor:
        """Logits [rows, vocabulary] after the last layer, float32."""
        norm = self._norm(self.config.hidden_size, eps=self.config.rms_norm_eps).to(self.device, self.dtype)
        norm.weight.copy_(self.weights.final_norm)
        x = norm(stream)
        parts = [x @ unit_rows(units).flatten(0, -2).to(self.dtype).mT for units in self.weights.head.split(2048)]
        return torch.cat(parts, -1).float() * getattr(self.config, "logit_scale", 1.0)

    @torch.no_grad()
    def run(self, idx: int, x: Tensor, past: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """One row [hidden] through layer `idx` at `position`; it attends to `past` [2, KV heads, tokens, head_dim].

        Returns what it leaves, its key and value [2, KV heads, head_dim], and its router's logits in float32.
        """
        module = self._load(idx)
        cache = _Past(past.to(self.dtype))
        hidden = x.to(self.dtype)[None, None]
        places = torch.tensor([[position]], device=self.device)
        name = "cache" if "cache" in inspect.signature(module.self_attn.forward).parameters else "past_key_values"
        self._asked.clear()
        out = module(hidden, attention_mask=None, position_embeddings=self._rotary(hidden, places), **{name: cache})
        out = out[0] if isinstance(out, tuple) else out
        router = None
        if self._asked:
            router = self._asked[0].reshape(-1, self._asked[0].shape[-1])[0].float() @ module.mlp.gate.weight.float().mT
        return out[0, 0], cache.new, router

    def _load(self, idx: int) -> torch.nn.Module:
        types = getattr(self.config, "layer_types", None)
        key = (self.weights.layers[idx].router is None, types[idx] if types else None, idx == 0)
        if key not in self._modules:
            self._modules.clear()  # a layer of experts takes gigabytes
            with torch.device("meta"):
                module = self._layer(self.config, idx)
            module = module.to(self.dtype).to_empty(device=self.device).eval()
            if hasattr(module.mlp, "gate"):
                module.mlp.gate.register_forward_pre_hook(lambda _, inputs: self._asked.append(inputs[0]))
            self._modules[key] = module
        if self._loaded != idx:
            self._modules[key].load_state_dict(unpacked(self.weights.layers[idx], self.splits), strict=True)
            self._loaded = idx
        return self._modules[key]


def unpacked(layer: LayerWeights, splits: int) -> dict[str, Tensor]:
    """A layer's tensors by transformers' names, rows as they were before packing."""

    def rows(units: Tensor) -> Tensor:
        return unit_rows(units).flatten(0, -2)

    qkv = torch.cat([rows(part) for part in layer.qkv.chunk(splits)], dim=1)
    output = rows(layer.output)
    q_size = output.shape[1]
    q, k, v = qkv.split([q_size, (len(qkv) - q_size) // 2, (len(qkv) - q_size) // 2])
    found = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": output}
    found = {f"self_attn.{name}.weight": value for name, value in found.items()}
    if layer.q_norm is not None and layer.k_norm is not None:
        found |= {"self_attn.q_norm.weight": layer.q_norm, "self_attn.k_norm.weight": layer.k_norm}
        found["post_attention_layernorm.weight"] = layer.mlp_norm
    found["input_layernorm.weight"] = layer.input_norm
    experts = 1 if layer.router is None else len(layer.router)
    pairs = rows(layer.up).unflatten(0, (experts, -1, 2, 8))
    gate, up = (pairs[:, :, half].flatten(1, 2) for half in (0, 1))
    down = rows(layer.down).unflatten(0, (experts, -1))
    if layer.router is None:
        names = {"gate_proj": gate[0], "up_proj": up[0], "down_proj": down[0]}
        return found | {f"mlp.{name}.weight": value for name, value in names.items()}
    found["mlp.gate.weight"] = layer.router
    return found | {"mlp.experts.gate_up_proj": torch.cat([gate, up], dim=1), "mlp.experts.down_proj": down}


class _Past:
    """What an attention module asks of a cache, for one row."""

    def __init__(self, past: Tensor) -> None:
        self.past = past
        self.new = past

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.new = torch.stack([keys[0, :, 0], values[0, :, 0]])
        whole = [torch.cat([old[None], new], dim=2) for old, new in zip(self.past, (keys, values), strict=True)]
        return whole[0], whole[1]


@dataclass
class Found:
    """Of one row after one layer: root mean squares of errors, by the noise floor's, and its routing."""

    layer: int
    row: int
    stream: float
    kv: float
    router: float
    rerouted: bool
    gap: float
    """Between the last expert chosen and the first one left out, in units of the router's noise."""


def compare_layers(
    machine: Machine, truth: Layers, rough: Layers, positions: Mapping[int, int]
) -> tuple[list[Found], Tensor]:
    """Every layer and row of the machine's step against `truth`, by the distance of `rough`; and the last stream."""
    model = machine.step.model
    before = machine.run_first(0)
    found: list[Found] = []
    for layer in range(model.num_layers):
        after = machine.run_first(layer + 1)
        own_router = machine.router() if isinstance(model.layers[layer].mlp, RoutedMlp) else None
        for row, position in positions.items():
            past = machine.kv(layer, row, first_attended(model, layer, position), position)
            exact, kv, router = truth.run(layer, before[row], past, position)
            noisy, noisy_kv, noisy_router = rough.run(layer, before[row], past, position)
            own_kv = machine.kv(layer, row, position, position + 1)[:, :, 0]
            found.append(
                Found(
                    layer,
                    row,
                    stream=ratio(after[row], noisy, exact),
                    kv=ratio(own_kv, noisy_kv, kv),
                    **_routing(model, layer, None if own_router is None else own_router[row], noisy_router, router),
                )
            )
        before = after
    return found, before


def first_attended(model: ModelSpec, layer: int, position: int) -> int:
    """First position that `position` attends to."""
    window = model.layers[layer].window_tokens
    return 0 if window is None else max(0, position + 1 - window)


def ratio(found: Tensor, rough: Tensor, exact: Tensor) -> float:
    """Distance of `found` from `exact`, by that of `rough`."""
    exact = exact.double()
    floor = (rough.to(exact.device).double() - exact).norm()
    return float((found.to(exact.device).double() - exact).norm() / floor)


def _routing(
    model: ModelSpec, layer: int, own: Tensor | None, noisy: Tensor | None, exact: Tensor | None
) -> dict[str, Any]:
    mlp = model.layers[layer].mlp
    if own is None or noisy is None or exact is None or not isinstance(mlp, RoutedMlp):
        return {"router": 0.0, "rerouted": False, "gap": float("inf")}
    sets = [set(part.topk(mlp.top_k).indices.tolist()) for part in (own, noisy, exact)]
    ordered = exact.sort(descending=True).values
    noise = (noisy - exact).abs().max()
    return {
        "router": ratio(own, noisy, exact),
        # where the rough run took other experts its distance is no floor either
        "rerouted": sets[0] != sets[2] or sets[1] != sets[2],
        "gap": float((ordered[mlp.top_k - 1] - ordered[mlp.top_k]) / noise),
    }


def judge(found: list[Found], allowed: float = ALLOWED) -> str:
    """A summary; AssertionError where an error is beyond the noise floor and no near-tie of a router explains it."""
    rerouted = [each for each in found if each.rerouted]
    rest = [each for each in found if not each.rerouted]
    worst = {name: max(getattr(each, name) for each in rest) for name in ("stream", "kv", "router")}
    summary = (
        f"{len(found)} rows of layers: {len(rerouted)} routed apart; worst of the others, by the noise floor: "
        + ", ".join(f"{name} {value:.2f}" for name, value in worst.items())
    )
    assert len(rerouted) <= 0.25 * len(found), summary
    for each in found:
        assert each.kv <= allowed, (summary, each)
        assert each.router <= allowed, (summary, each)
        assert each.stream <= allowed or (each.rerouted and each.gap < NEAR_TIE), (summary, each)
    return summary


class Chained:
    """Whole steps of transformers' layers on their own, from a machine's earlier KV on."""

    def __init__(self, layers: Layers, machine: Machine, begins: Mapping[int, int]) -> None:
        """Rows go on at position `begins[row]`; what the machine holds before that is theirs too."""
        self.layers, self.machine, self.begins = layers, machine, begins
        self.position = dict(begins)
        self.own: dict[tuple[int, int], list[Tensor]] = {}

    def logits(self, tokens: Mapping[int, int]) -> Tensor:
        """Logits [rows, vocabulary], in the order of `tokens`, after every row's token."""
        model = self.machine.step.model
        stream = dict(zip(tokens, self.layers.embed(list(tokens.values())), strict=True))
        for layer in range(model.num_layers):
            for row in tokens:
                first, end = first_attended(model, layer, self.position[row]), self.begins[row]
                own = self.own.setdefault((layer, row), [])
                past = self.machine.kv(layer, row, min(first, end), end).to(self.layers.dtype)
                past = torch.cat([past, *own], dim=2)[:, :, max(first - end, 0) :]
                stream[row], kv, _ = self.layers.run(layer, stream[row], past, self.position[row])
                own.append(kv[:, :, None])
        for row in tokens:
            self.position[row] += 1
        return self.layers.logits(torch.stack(list(stream.values())))


def judge_logits(found: Tensor, rough: Tensor, exact: Tensor, *, allowed: float = ALLOWED, least: int = 0) -> str:
    """A summary of whole steps' logits [rows, tokens].

    AssertionError where too many rows are beyond the noise floor, as a row is for which some router's near-tie fell the
    other way; where the choice of one of the others differs and was no near-tie; or where fewer than `least` choices
    were neither.
    """
    floor, error = ((part.to(exact.device) - exact).double().pow(2).mean(-1).sqrt() for part in (rough, found))
    ratios = error / floor
    is_apart = ratios > allowed
    best = exact.double().topk(2).values
    is_tie = best[:, 0] - best[:, 1] < NEAR_TIE * floor
    compared = ~is_tie & ~is_apart
    differs = (found.to(exact.device).argmax(-1) != exact.argmax(-1)) & compared
    summary = (
        f"{len(found)} choices: logits {float(ratios.median()):.2f} of the noise floor, {int(is_apart.sum())} beyond "
        f"{allowed}; {int((is_tie & ~is_apart).sum())} near-ties, {int(differs.sum())} of the others differ"
    )
    assert is_apart.sum() <= 0.25 * len(found), summary
    assert not differs.any(), summary
    assert compared.sum() >= least, f"too few were compared: {summary}"
    return summary


@contextmanager
def peaks(weights: Weights, tokens: list[int]) -> Iterator[None]:
    """Have random weights' logits peak at these tokens, whose rows are made longer by a power of two, and back.

    The best two of some hundred thousand random logits are near-ties, the best two of a few are not.
    """
    rows = [row_in_place(weights.head, token) for token in tokens]
    for row in rows:
        row.mul_(PEAK)
    try:
        yield
    finally:
        for row in rows:
            row.div_(PEAK)


PEAK = 64.0
