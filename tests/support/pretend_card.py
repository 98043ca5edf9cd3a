"""A card that is pretended: its tables are interpreted, its prefill is the plain one; all else is the real start."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import SimpleNamespace

import torch
from support.ahead import Bucket

from megakernel.measurement import Card
from runtime.gpu.specialize import pages_per_row
from runtime.kv_pages import layer_groups
from runtime.reference import Interpreter, Memory
from runtime.torch_model import TorchModel
from runtime.weights import LayerWeights, Piece, Weights

CARD = Card(
    name="NVIDIA Pretended", compute_capability="9.0", num_sms=132, shared_memory_per_block_bytes=232448,
    memory_bytes=20 * 10**9, l2_bytes=6 * 10**7, driver="580", cuda="13.0",
)  # fmt: skip


class PretendedDecoder(Bucket):
    """What the start asks of a `Decoder`."""

    def __init__(
        self, step, _chip, pieces: Iterable[Piece] | None = None, *, model=None, pages: int | None = None
    ) -> None:
        """Likewise."""
        rows, entries = step.bucket.rows, pages_per_row(step.bucket, step.choices)
        self.num_pages = model.num_pages if model else pages or rows * entries
        groups = len(layer_groups(step.model)[0])
        memory = Memory(step, torch.bfloat16, [torch.full((rows, entries), self.num_pages - 1) for _ in range(groups)])
        if model is not None:
            memory.kv, self.packed = model.memory.kv, model.packed
        else:
            assert pieces is not None
            self.packed = gathered(step.model.num_layers, pieces)
        super().__init__(Interpreter(step.table, memory, self.packed), ring_steps=64)
        self.deadline_ms = 0.0

    def weights(self) -> Weights:
        return self.packed

    def pool(self, layer: int) -> torch.Tensor:
        return self.memory.kv[layer].nan_to_num_()

    def time_ms(self) -> float:
        return 0.25 * self.step.bucket.rows


def gathered(layers: int, pieces: Iterable[Piece]) -> Weights:
    parts: dict[str, list[torch.Tensor]] = {}
    for piece in pieces:
        parts.setdefault(piece.name, []).append(piece.tensor)
    packed = {name: torch.cat(found) for name, found in parts.items()}
    return Weights(
        embedding=packed["embedding"],
        head=packed.get("head", packed["embedding"]),
        final_norm=packed["final_norm"],
        layers=tuple(
            LayerWeights(**{name: packed.get(f"L{idx}.{name}") for name in LayerWeights.__dataclass_fields__})
            for idx in range(layers)
        ),
    )


def pretend(monkeypatch, *, free: int = 19 * 10**9) -> None:
    """From now on there is a card, of which so many bytes are free."""
    from runtime.gpu import opening, presence

    found = presence.Present(bindings=True, driver_cuda=13.0, torch_cuda="13.0", cards=1)
    monkeypatch.setattr(presence, "present", lambda: found)
    monkeypatch.setattr(opening, "present", lambda: found)
    monkeypatch.setattr(opening, "read_card", lambda: CARD)
    monkeypatch.setattr(opening, "_compile", lambda _served, _chip: None)
    monkeypatch.setattr(opening, "Decoder", PretendedDecoder)
    plain = SimpleNamespace(CardModel=TorchModel)
    monkeypatch.setitem(sys.modules, "runtime.gpu.card_model", plain)  # the real one needs Triton
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, CARD.memory_bytes))
