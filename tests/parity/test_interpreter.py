"""The interpreted table computes what transformers computes, in any order and beside any neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.decoding import decode, interpreter, prompts, reference_greedy, reference_logits
from support.tiny_models import WINDOW, built, choices_for, cohere2_moe, qwen3_moe, spec_of
from transformers import PreTrainedModel

from megakernel.counters import NONE
from megakernel.tiling import Choices
from megakernel.verify import verify
from runtime.reference import Interpreter, Memory, StuckError
from runtime.weights import pack_weights

# one token, both sides of a page (16), both sides of the window, and a prompt beyond it
LENGTHS = [17, WINDOW, 1, 16, WINDOW + 1, 15, 45, 2]
FAMILIES = [pytest.param(cohere2_moe, id="cohere2_moe"), pytest.param(qwen3_moe, id="qwen3_moe")]
Family = Callable[..., PreTrainedModel]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def orders(model: PreTrainedModel) -> list[Choices]:
    """Choices that change everything but rounding: order, cuts, placement, load policy."""
    spec = spec_of(model)
    base = choices_for(spec)
    if spec.block == "parallel":
        cut_order = ("project", "up:1/2", "attend", "up:2/2", "merge", "output", "down")
        late_router = ("project", "route", "attend", "merge", "up", "down", "output")
        return [
            base,
            choices_for(spec, order=cut_order, attention_sms=1, takeover_percent=50),
            choices_for(spec, order=late_router, policy="round_robin", loads="after_wait", router_with_project=False),
            base.model_copy(
                update={"cut": base.cut.model_copy(update={"project": 1, "attend": 9, "up": 7, "head": 1})}
            ),
        ]
    return [base, choices_for(spec, policy="round_robin", loads="after_wait")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [2, 9])
def test_every_layer_leaves_the_reference_residual(family: Family, layers: int) -> None:
    model = family(layers)
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, out: seen.append(out[0] if isinstance(out, tuple) else out))
    tokens = prompts([WINDOW + 5])[0]
    whole = spec_of(model)
    for count in range(1, layers + 1):
        step = built(whole.model_copy(update={"layers": whole.layers[:count]}))
        machine = interpreter(model, step, torch.float64)
        decode(machine, [tokens], 1)
        seen.clear()
        reference_logits(model, tokens)
        if whole.block == "parallel":
            at = count % 2
            stream = machine.memory.scratch(f"residual{at}")[0] + machine.memory.scratch(f"mlp_out{at}")[0]
        else:
            stream = machine.memory.scratch("residual0")[0]
        expected = seen[count - 1].reshape(-1, whole.hidden_size)[-1]
        # transformers keeps norms, angles and softmax in float32 even in a float64 model
        torch.testing.assert_close(stream, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", range(1, 9))
def test_64_greedy_tokens_of_ragged_rows_are_the_references(family: Family, rows: int) -> None:
    model = family()
    texts = prompts(LENGTHS[:rows], seed=rows)
    machine = interpreter(model, built(spec_of(model), rows=rows), torch.float64, seed=rows)
    found, logits = decode(machine, texts, 64)
    for row, text in enumerate(texts):
        assert found[row] == reference_greedy(model, text, 64)
    last = reference_logits(model, texts[0] + found[0][:-1])
    torch.testing.assert_close(logits[-1][0], last, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_are_as_close_as_float32_allows(family: Family) -> None:
    model = family(dtype=torch.float32)
    text = prompts([30])[0]
    _, logits = decode(interpreter(model, built(spec_of(model)), torch.float32), [text], 1)
    torch.testing.assert_close(logits[0][0], reference_logits(model, text), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_error_stays_within_the_noise_between_two_references(family: Family) -> None:
    text = prompts([60], seed=5)[0]
    exact, rough = family(dtype=torch.float32), family(dtype=torch.bfloat16)
    # the float32 model has the bfloat16 model's weights: only the arithmetic differs
    exact.load_state_dict({name: value.float() for name, value in rough.state_dict().items()})
    machine = interpreter(rough, built(spec_of(rough)), torch.bfloat16)
    ours = theirs = 0.0
    for position, token in enumerate(text):
        machine.memory.join(0, token, position)
        machine.step()
        truth = reference_logits(exact, text[: position + 1])
        ours += float((machine.memory.scratch("logits")[0] - truth).norm()) ** 2
        theirs += float((reference_logits(rough, text[: position + 1]).float() - truth).norm()) ** 2
    assert ours**0.5 <= 1.5 * theirs**0.5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_interleaving_cut_or_order_changes_a_bit(family: Family, dtype: torch.dtype) -> None:
    model = family(dtype=dtype)
    texts = prompts([5, 24, 11], seed=2)
    results = []
    for choices in orders(model):
        step = built(spec_of(model), rows=3, choices=choices)
        assert verify(step.graph, step.table) == []
        for seed in range(3):
            machine = interpreter(model, step, dtype, seed=seed)
            results.append(decode(machine, texts, 6))
    for tokens, logits in results[1:]:
        assert tokens == results[0][0]
        assert all(torch.equal(one, other) for one, other in zip(logits, results[0][1], strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_alone_and_beside_any_neighbours(family: Family, dtype: torch.dtype) -> None:
    model = family(dtype=dtype)
    text = prompts([23], seed=9)[0]
    alone, logits = decode(interpreter(model, built(spec_of(model)), dtype), [text], 6)
    for rows, at in ((2, 1), (8, 3), (12, 10)):
        step = built(spec_of(model), rows=rows)
        others = prompts([7 + 3 * row for row in range(rows)], seed=rows)
        others[at] = text
        found, beside = decode(interpreter(model, step, dtype), others, 6)
        assert found[at] == alone[0]
        assert all(torch.equal(one[0], other[at]) for one, other in zip(logits, beside, strict=True))


def test_k_splits_are_summed_in_order_and_stay_within_float32() -> None:
    model = cohere2_moe(dtype=torch.float32)
    spec = spec_of(model)
    choices = choices_for(spec)
    choices = choices.model_copy(update={"rounding": choices.rounding.model_copy(update={"project_k_splits": 2})})
    text = prompts([30])[0]
    _, logits = decode(interpreter(model, built(spec, choices=choices), torch.float32), [text], 1)
    torch.testing.assert_close(logits[0][0], reference_logits(model, text), rtol=1e-3, atol=1e-3)


def test_rows_join_and_leave_between_steps() -> None:
    model = cohere2_moe()
    step = built(spec_of(model), rows=3)
    machine = interpreter(model, step, torch.float64)
    first, second = prompts([9, 12], seed=4)
    memory = machine.memory
    for position, token in enumerate(first):
        memory.join(0, token, position)
        machine.step()
    found = [memory.tokens[0]]
    for position, token in enumerate(second):
        memory.join(2, token, position)
        machine.step()
        found.append(memory.tokens[0])
    memory.leave(0)
    machine.step()
    assert found == reference_greedy(model, first, len(found))
    assert memory.tokens[2] == reference_greedy(model, second, 2)[1]
    assert memory.tokens[0] == found[-1]


def test_a_lost_arrival_names_the_first_task_that_should_have_run() -> None:
    model = cohere2_moe(2)
    step = built(spec_of(model))
    records = step.table.records.copy()
    lost = records["task"] == step.graph.first_task[1]  # a projection of layer 0
    records["arrive"][lost] = NONE
    weights = pack_weights(step.model, dict(model.state_dict()), step.choices.rounding, torch.float64)
    machine = Interpreter(replace(step.table, records=records), Memory(step, torch.float64), weights)
    machine.memory.join(0, 5, 0)
    with pytest.raises(StuckError, match=r"\(attend, layer 0\).*waits for counter"):
        machine.step()


def test_a_saved_checkpoint_packs_to_the_same_weights(tmp_path: object) -> None:
    from safetensors.torch import load_file

    for model in (cohere2_moe(3), qwen3_moe()):
        spec = spec_of(model)
        folder = f"{tmp_path}/{spec.family}"
        model.save_pretrained(folder)
        rounding = choices_for(spec).rounding
        ours = pack_weights(spec, dict(model.state_dict()), rounding, torch.float64)
        saved = pack_weights(spec, load_file(f"{folder}/model.safetensors"), rounding, torch.float64)
        for one, other in zip(ours.layers, saved.layers, strict=True):
            for name in ("qkv", "output", "up", "down", "input_norm", "mlp_norm"):
                assert torch.equal(getattr(one, name), getattr(other, name))
        assert torch.equal(ours.head, saved.head)
