"""Step boundaries: rows end by themselves, and the host's commands are carried out by the step that reads them.

The interpreted table stands for the card, behind the very bytes that the card reads and writes.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from support.chained import InterpretedDevice
from support.decoding import interpreter
from support.tiny_models import built, cohere2_moe, qwen3_moe, spec_of

from megakernel.abi import MAX_STOPS
from runtime.gpu.chain import Chain
from runtime.rows import NO_END, Extend, Join, row_state
from runtime.sampling import NO_TOKEN, SamplingParams, sample

ROWS = 3


@pytest.fixture(scope="module", params=[cohere2_moe, qwen3_moe], ids=["cohere2_moe", "qwen3_moe"])
def model(request):
    return request.param(2, dtype=torch.float32)


def opened(model, rows: int = ROWS, *, seed: int = 0, first_step: int = 0, ring_steps: int = 16) -> InterpretedDevice:
    machine = interpreter(model, built(spec_of(model), rows), torch.float32, seed=seed)
    machine.step_idx = machine.first_step = first_step
    machine.counters = [first_step * total % 2**32 for total in machine.totals]
    return InterpretedDevice(machine, ring_steps=ring_steps)


def solo(model, token: int, count: int, sampling: SamplingParams) -> list[int]:
    """Tokens of a row that is alone, step by step, from position 0."""
    machine = interpreter(model, built(spec_of(model), 1), torch.float32, seed=9)
    machine.memory.join(0, token, 0, sampling)
    found: list[int] = []
    for _ in range(count):
        machine.step()
        found.append(machine.memory.tokens[0])
    return found


def test_rows_that_join_and_leave_a_running_chain_have_the_tokens_that_they_have_alone(model):
    """Every row from 0 on, in any seat, at any time, near the wrap of the counters and the ring."""
    rng = random.Random(3)
    device = opened(model, first_step=2**32 - 9)
    chain = Chain(device)
    asked: dict[int, tuple[int, int, SamplingParams]] = {}
    found: dict[int, list[int]] = {}
    ended: set[int] = set()

    def join(row: int) -> None:
        token, count = rng.randrange(3, 192), rng.randrange(1, 9)
        sampling = rng.choice((SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, seed=rng.randrange(99))))
        asked[chain.join(row, Join(token, 0, sampling, end_position=count))] = token, count, sampling

    for row in range(ROWS - 1):
        join(row)
    joins = 2
    while chain.has_rows:
        for made in chain.tokens():
            assert made.ticket not in ended
            found.setdefault(made.ticket, []).append(made.token)
            if made.ended:
                ended.add(made.ticket)
            if joins < 12 and rng.random() < 0.6:
                join(rng.randrange(ROWS))  # whoever sits there leaves
                joins += 1
    assert device.machine.step_idx > 2**32
    assert len(ended) >= 4
    whole = 0
    for ticket, (token, count, sampling) in asked.items():
        tokens = found.get(ticket, [])
        assert tokens == solo(model, token, count, sampling)[: len(tokens)], ticket
        assert (len(tokens) == count) == (ticket in ended)
        whole += len(tokens) == count
    assert whole == len(ended)


def test_a_stop_id_ends_a_row_with_itself(model):
    alone = solo(model, 7, 6, SamplingParams())
    stop = alone[3]
    chain = Chain(opened(model))
    chain.join(1, Join(7, 0, stops=(5000, stop)))
    made = list(chain.tokens())
    assert [each.token for each in made] == alone[: alone.index(stop) + 1]
    assert [each.ended for each in made] == [False] * alone.index(stop) + [True]
    assert not chain.has_rows


def test_a_drop_and_a_halt_come_within_one_step(model):
    chain = Chain(opened(model))
    chain.join(0, Join(7, 0))
    chain.join(1, Join(8, 0))
    dropped_at = halted_at = last = None
    for made in chain.tokens():
        if made.step == 3 and made.row == 0:
            chain.drop(0)
            dropped_at = made.step
        if made.row == 0 and dropped_at is not None:
            assert made.step <= dropped_at + 2
        if made.step == 7 and made.row == 1:
            chain.halt()
            halted_at = made.step
        last = made.step
    assert halted_at is not None
    assert last <= halted_at + 2
    assert chain.has_rows, "a halted chain's rows go on with the next"
    tokens = [made.token for made in chain.tokens(2)]
    alone = solo(model, 8, last + 3, SamplingParams())
    assert tokens == alone[last + 1 :]


def test_a_row_grows_into_pages_that_it_is_given_while_it_runs(model):
    device = opened(model, 2)
    memory = device.memory
    page_tokens = memory.page_tokens
    own = [table[0].numpy().copy() for table in memory.pages]
    for table in memory.pages:
        table[0, 1:] = table[1, 0]  # wrong until they are given
    device.mailbox.pages[:] = np.stack([table.numpy() for table in memory.pages])
    chain = Chain(device)
    chain.join(0, Join(7, 0, end_position=page_tokens))
    found = []
    for made in chain.tokens():
        found.append(made.token)
        position = len(found)
        if position % page_tokens == page_tokens - 4 and position < 2 * page_tokens:
            block = position // page_tokens + 1
            chain.extend(0, block, [ids[block : block + 1] for ids in own], end_position=(block + 1) * page_tokens)
    assert len(found) == 3 * page_tokens
    assert found == solo(model, 7, len(found), SamplingParams())


def test_a_host_that_does_not_read_halts_the_chain_and_loses_nothing(model):
    device = opened(model, ring_steps=16)
    chain = Chain(device)
    chain.join(0, Join(7, 0, end_position=40))
    found = []
    while chain.has_rows:
        for made in chain.tokens():
            while device.is_running():  # the device runs on as far as it may
                pass
            found.append(made.token)
    assert found == solo(model, 7, 40, SamplingParams())


def test_a_dropped_iterator_halts_and_what_was_asked_is_done_after(model):
    device = opened(model)
    chain = Chain(device)
    chain.join(0, Join(7, 0))
    tokens = chain.tokens()
    next(tokens)
    chain.join(1, Join(9, 0, end_position=2))
    tokens.close()
    assert not device.is_running()
    assert chain.has_rows
    made = [*chain.tokens(3)]
    assert [each.token for each in made if each.row == 1] == solo(model, 9, 2, SamplingParams())
    steps = [each.step for each in made if each.row == 0]
    assert steps == list(range(1, 1 + len(steps))), "no step between the chains is lost"


def test_logits_that_are_no_numbers_end_their_row_alone(model):
    device = opened(model)
    chain = Chain(device)
    chain.join(0, Join(7, 0, end_position=5))
    chain.join(1, Join(8, 3))  # of pages that nobody wrote: they hold no numbers
    made = list(chain.tokens())
    assert [(each.token, each.ended) for each in made if each.row == 1] == [(NO_TOKEN, True)]
    assert len([each for each in made if each.row == 0]) == 5


def test_what_a_row_cannot_have_is_refused_before_it_is_asked(model):
    chain = Chain(opened(model))
    with pytest.raises(ValueError, match=f"at most {MAX_STOPS}"):
        chain.join(0, Join(7, 0, stops=tuple(range(MAX_STOPS + 1))))
    with pytest.raises(ValueError, match="sample on the host"):
        chain.join(0, Join(7, 0, SamplingParams(presence_penalty=1.0)))
    with pytest.raises(ValueError, match="at most"):
        chain.extend(0, 10**6, [np.zeros(1, np.int64)] * len(chain._device.mailbox.pages))
    assert not chain.has_rows


def test_a_state_says_what_the_parameters_say():
    sampling = SamplingParams(temperature=0.5, top_p=0.25, min_p=0.125, top_k=7, seed=2**63 - 1)
    state = row_state(Join(3, 9, sampling, 20, (1, 2)))[0]
    assert [state[name] for name in ("position", "active", "end_position", "num_stops")] == [9, 1, 20, 2]
    assert [state[name] for name in ("temperature", "top_p", "min_p", "top_k")] == [0.5, 0.25, 0.125, 7]
    assert int(state["seed"]) == 2**63 - 1
    assert state["stops"].tolist() == [1, 2, 0, 0, 0, 0]
    assert row_state(Join(3, 9, SamplingParams(temperature=1.0, top_k=1)))[0]["temperature"] == 0
    assert row_state(Join(3, 9, SamplingParams(temperature=1e-300)))[0]["temperature"] > 0
    assert row_state(Join(3, 9))[0]["end_position"] == NO_END


@pytest.mark.parametrize("seed", range(4))
def test_the_interpreted_table_draws_what_the_parameters_mean(seed):
    """Over random logits and parameters, the sampling task leaves the token that `sample` defines."""
    from megakernel.kinds import TaskKind
    from runtime.reference.ends import run_sample
    from runtime.reference.operands import Operands

    model = qwen3_moe(1, dtype=torch.float32)
    step = built(spec_of(model), 8)
    machine = interpreter(model, step, torch.float32)
    memory, rng = machine.memory, np.random.default_rng(seed)
    record = next(record for record in step.table.records if record["kind"] == TaskKind.SAMPLE)
    logits, best = memory.scratch("logits"), memory.scratch("best")
    for _ in range(60):
        values = rng.normal(size=logits.shape) * rng.choice((0.3, 3.0, 10.0))
        logits.copy_(torch.from_numpy(np.round(values, int(rng.integers(1, 6)))))
        shares = best.shape[1]
        for row in range(8):
            for share, part in enumerate(logits[row].tensor_split(shares)):
                peak = int(part.argmax())
                best[row, share, :2] = torch.tensor([float(part[peak]), peak])
            starts = np.cumsum([0, *(len(part) for part in logits[row].tensor_split(shares))])[:-1]
            best[row, :, 1] += torch.from_numpy(starts)
        params = [
            SamplingParams(
                temperature=float(rng.choice((0.0, 0.3, 1.0, 2.0))), top_k=int(rng.integers(0, 40)),
                top_p=float(rng.choice((0.1, 0.9, 1.0))), min_p=float(rng.choice((0.0, 0.05))),
                seed=int(rng.integers(2**62)),
            )
            for _ in range(8)
        ]  # fmt: skip
        for row in range(8):
            memory.join(row, 0, int(rng.integers(200)), params[row])
        before = list(memory.positions)
        run_sample(Operands.decode(record), memory, machine.weights, None)
        expected = [sample(logits[row].double().numpy(), params[row], before[row]) for row in range(8)]
        assert memory.tokens == expected


def test_extending_a_row_that_ends_in_the_same_step_keeps_it(model):
    machine = interpreter(model, built(spec_of(model), 1), torch.float32)
    machine.memory.join(0, 7, 0, end_position=1)
    machine.memory.mail[0] = Extend(0, (), 3)
    machine.step()
    assert machine.memory.active == [True]
    machine.step()
    machine.step()
    assert machine.memory.active == [False]


def test_a_step_that_was_not_made_has_no_token(model):
    """Whoever counts a step too many would read the empty words of the ring as token 0."""
    device = opened(model)
    finish = device.finish
    device.finish = lambda: finish() + 1
    chain = Chain(device)
    chain.join(0, Join(7, 0))
    with pytest.raises(AssertionError, match="step 2 was not made"):
        list(chain.tokens(2))
    assert chain.take() == []
