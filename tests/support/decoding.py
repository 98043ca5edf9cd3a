"""Greedy decoding two ways: through the interpreted table, and by transformers recomputing every context whole."""

from __future__ import annotations

import random

import torch
from transformers import PreTrainedModel

from megakernel.build import BuiltStep
from runtime.kv_pages import layer_groups
from runtime.reference import Interpreter, Memory
from runtime.weights import pack_weights


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths, all different, without special tokens."""
    generator = random.Random(seed)
    return [[generator.randrange(3, 192) for _ in range(length)] for length in lengths]


def interpreter(model: PreTrainedModel, step: BuiltStep, dtype: torch.dtype, seed: int = 0) -> Interpreter:
    """An interpreter of `step` over the model's weights; pages are scattered over the pool."""
    weights = pack_weights(step.model, dict(model.state_dict()), step.choices.rounding, dtype)
    rows = step.bucket.rows
    pages_a_row = -(-step.bucket.max_context_tokens // step.choices.rounding.page_tokens)
    generator = torch.Generator().manual_seed(seed)
    groups = len(layer_groups(step.model)[0])
    orders = [torch.randperm(rows * pages_a_row, generator=generator) for _ in range(groups)]
    memory = Memory(step, dtype, pages=[order.reshape(rows, pages_a_row) for order in orders])
    return Interpreter(step.table, memory, weights, seed=seed)


def decode(machine: Interpreter, texts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Feed every prompt token by token, rows joining late so that all prompts end together, then decode greedily.

    Returns each row's new tokens, and the logits [rows, vocab] of every step from the last prompt token on.
    """
    memory, longest = machine.memory, max(map(len, texts))
    out: list[list[int]] = [[] for _ in texts]
    logits: list[torch.Tensor] = []
    for tick in range(longest + new_tokens - 1):
        for row, text in enumerate(texts):
            position = tick - (longest - len(text))
            if 0 <= position < len(text):
                memory.join(row, text[position], position)
        machine.step()
        if tick >= longest - 1:
            logits.append(memory.scratch("logits").clone())
            for row in range(len(texts)):
                out[row].append(memory.tokens[row])
    return out, logits


@torch.no_grad()
def reference_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits [vocab] of the last of `tokens`, without any cache."""
    return model(torch.tensor([tokens])).logits[0, -1]


def reference_greedy(model: PreTrainedModel, text: list[int], new_tokens: int) -> list[int]:
    """Greedy continuation of one prompt, alone in its batch."""
    tokens = list(text)
    for _ in range(new_tokens):
        tokens.append(int(reference_logits(model, tokens).argmax()))
    return tokens[len(text) :]
