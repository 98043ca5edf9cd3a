"""What fits on a card beside a model, and what is said where it does not; whether there is a card at all."""

from __future__ import annotations

import re

import pytest
from support import north
from support.plans import north_plan
from support.tiny_models import qwen3_moe, spec_of

from megakernel.config import ConfigError
from megakernel.kinds import TaskKind
from megakernel.plan import PlanEntry
from runtime.gpu.buckets import fitting, planned
from runtime.gpu.presence import Present, absence, present
from runtime.gpu.room import GIB, Memory, Need, need, pages

H200 = Memory("H200", total=150 * 10**9, free=149 * 10**9)
NEED = Need(weights=61 * 10**9, scratch=3 * 10**9, page=6 * 10**6, page_tokens=64)


def found(memory=H200, needed=NEED, **given):
    return pages(memory, needed, **{"share": 0.9, "longest": 16384, "asked": None, "most": 10**6} | given)


def test_as_many_pages_fit_as_the_share_leaves_and_no_more_than_are_of_use():
    count = found()
    used = count * NEED.page + NEED.fixed + H200.total - H200.free
    assert 0.9 * H200.total - NEED.page < used <= 0.9 * H200.total
    assert found(most=1000) == 1000
    assert found(share=0.8) < count
    assert found(asked=300) == 300


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"memory": Memory("H200", 150 * 10**9, 20 * 10**9)},
            r"130\.0 GB are taken by others: stop.*61\.0 GB of w",
        ),
        (
            {"memory": Memory("L40", 48 * 10**9, 48 * 10**9)},
            r"L40 has 48\.0 GB.*61\.0 GB of weights.*tokens; serve a s",
        ),
        (
            {"share": 0.4},
            r"lets 40% be used\. .* 1\.5 GB of KV.*raise `gpu_memory_utilization` to 0\.46, serve",
        ),
        ({"asked": 0}, r"there are 0: none is room for a request, or raise .*`kv_cache_memory_bytes`$"),
        ({"asked": 10**5}, r"100000 KV blocks take 600\.0 GB; beside the weights \d+ fit: lower `num_gpu_blocks`"),
        ({"needed": Need(131 * 10**9, 0, 6 * 10**8, 64)}, r"takes 256 KV blocks.*lower `max_model_len` to 64$"),
        ({"asked": 200}, r"takes 256 KV blocks of 64 tokens, there are 200: lower `max_model_len` to 12800.*or raise"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(given, message):
    with pytest.raises(ConfigError, match=message):
        found(**given)


def test_what_is_advised_fits():
    """Whatever share is given: the share that the refusal names is enough, and one hundredth less is not."""
    for share in (0.01, 0.2, 0.43, 0.44):
        with pytest.raises(ConfigError) as raised:
            found(share=share)
        advised = float(re.findall(r"`gpu_memory_utilization` to (0\.\d+)", str(raised.value))[0])
        assert found(share=advised) >= 256
        with pytest.raises(ConfigError):
            found(share=advised - 0.01)


def test_north_takes_what_its_parameters_say():
    served = fitting(north.model(), 8, 16384, north.chip())
    needed = need(north.model(), [each.step for each in served], 8192)
    assert needed.weights == pytest.approx(2 * 30_484_303_872, rel=0.001)
    assert needed.page == 64 * 49 * 2 * 4 * 128 * 2
    assert needed.scratch < 8 * GIB


def test_no_sm_merges_more_heads_one_after_another_than_it_must():
    """Eight heads each on 32 SMs, while 100 waited, cost eight rows 4% on a card."""
    chip = north.chip()
    for each in fitting(north.model(), 8, 16384, chip):
        if each.measured_ns is None:
            heads = each.step.model.num_heads * each.step.bucket.rows
            records = each.step.table.records
            merges = records[records["kind"] == int(TaskKind.MERGE)]
            assert (merges["end"].astype(int) - merges["begin"]).max() == -(-heads // chip.num_sms)


@pytest.mark.parametrize(
    ("max_tokens", "shares"), [(512, [8, 16, 32, 64]), (2048, [32, 64, 128, 132]), (16384, [132] * 4)]
)
def test_attention_to_a_short_context_is_dealt_to_no_more_sms_than_it_has_units(max_tokens, shares):
    """North has four KV heads, a chunk 128 tokens: at half the length that is allowed, eight chunks of 2,048."""
    served = fitting(north.model(), 8, max_tokens, north.chip())
    assert [each.step.choices.cut.attend for each in served] == shares


def test_tables_for_all_numbers_of_rows_share_their_rounding():
    served = fitting(north.model(), 6, 8192, north.chip())
    assert [each.step.bucket.rows for each in served] == [1, 2, 4, 6]
    assert len({each.step.choices.rounding for each in served}) == 1
    assert all(each.step.bucket.max_context_tokens == 8192 for each in served)


def test_more_rows_than_the_kernel_has_are_refused():
    with pytest.raises(ConfigError, match=r"`max_num_seqs` is 9; the kernel decodes at most 8"):
        fitting(spec_of(qwen3_moe()), 9, 256, north.chip())


def test_rows_too_long_for_the_memory_are_refused_with_lengths_that_fit():
    with pytest.raises(ConfigError, match=r"the step needs .* has 150\.8 GB") as raised:
        fitting(north.model(), 8, 262144, north.chip())
    advised = re.findall(r"(\d+) with `max_num_seqs` (\d)", str(raised.value))
    assert [int(rows) for _, rows in advised] == [1, 4, 8]
    tokens, rows = map(int, advised[1])
    fitting(north.model(), rows, tokens, north.chip())
    with pytest.raises(ConfigError):
        fitting(north.model(), rows, tokens + 1024, north.chip())


def test_of_a_plan_those_buckets_are_served_that_are_long_enough():
    class Two:
        entries = tuple(
            PlanEntry.model_construct(
                bucket=north.BUCKET.model_copy(update={"rows": rows, "max_context_tokens": most}),
                predicted_ns=float(rows),
                measured_ns=None,
            )
            for rows, most in ((1, 16384), (2, 512), (4, 8192), (8, 8192))
        )

        @staticmethod
        def build(entry):
            return entry.bucket

    assert [each.step.rows for each in planned(Two, 3, 8192)] == [1, 4]
    assert [each.step.rows for each in planned(Two, 1, 16384)] == [1]
    with pytest.raises(ConfigError, match="no bucket for 2 rows of 16384 tokens"):
        planned(Two, 2, 16384)


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({"measured_ns": 2e6}, True),
        ({"measured_ns": None}, False),
        ({"measured_ns": 2e6, "chunk_tokens": 64}, False),
    ],
    ids=["measured", "predicted", "of another rounding"],
)
def test_a_shipped_plan_s_step_is_taken_if_a_card_timed_it_and_its_rounding_is_all_s(changes, taken, monkeypatch):
    plan = north_plan()
    choices = plan.entries[0].choices
    if "chunk_tokens" in changes:
        rounding = choices.rounding.model_copy(update={"chunk_tokens": changes["chunk_tokens"]})
        choices = choices.model_copy(update={"rounding": rounding})
    entry = plan.entries[0].model_copy(update={"choices": choices, "measured_ns": changes["measured_ns"]})
    shipped = plan.model_copy(update={"entries": (entry,)})
    monkeypatch.setattr("runtime.gpu.buckets.load_json", lambda _path, _kind: shipped)
    one, two = fitting(north.model(), 2, 16384, north.chip())
    assert (one.measured_ns == 2e6) == taken
    assert (one.step.table.digest == entry.table_digest) == taken
    assert two.measured_ns is None


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (Present(bindings=False), "cuda-python is not installed"),
        (Present(bindings=True), "no NVIDIA driver"),
        (Present(bindings=True, driver_cuda=12.8), r"speaks CUDA 12\.8, needed 13\.0 .*update it"),
        (Present(bindings=True, driver_cuda=13.0), "build without CUDA"),
        (Present(bindings=True, driver_cuda=13.0, torch_cuda="13.0"), "CUDA_VISIBLE_DEVICES may hide it"),
    ],
)
def test_what_is_missing_is_named(there, message):
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(absence(there))


def test_a_card_that_another_process_holds_alone_is_told(monkeypatch):
    torch, card = pytest.importorskip("torch"), pytest.importorskip("runtime.gpu.card")
    pytest.importorskip("cuda.bindings")

    def taken():
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might be")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", taken)
    with pytest.raises(ConfigError, match=r"can't be used: .* busy or unavailable; another .* stop that one, or wait$"):
        card.read_card()


def test_a_card_that_can_be_asked_is_no_absence():
    assert absence(Present(bindings=True, driver_cuda=13.1, torch_cuda="13.0", cards=1)) is None
    assert isinstance(present(), Present)
