"""What a chip can't run is refused with what was found, what was needed, and which choice to change."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from support import north
from support.tiny_models import choices_for, qwen3_moe, spec_of

from megakernel import limits
from megakernel.build import build_step
from megakernel.config import ConfigError
from megakernel.tiling import Choices
from megakernel.workload import Bucket


def changed(**updates: dict[str, object]) -> Choices:
    data = north.choices("hand").model_dump()
    for part, values in updates.items():
        data[part].update(values)
    return Choices.model_validate(data)


def test_shipped_choices_are_legal_on_the_h200() -> None:
    for name in ("hand", "reference"):
        assert limits.reasons(north.model(), north.BUCKET, north.choices(name), north.chip()) == []


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        (
            {"ring": {"stages": 40}},
            r"ring.stages is 40 x 8192 .* of 232448 bytes of shared memory; at most 25 stages fit",
        ),
        (
            {"ring": {"stages": 7}},
            "ring.stages is 7, needed at least 8: so many copies are held at once",
        ),
        ({"ring": {"copy_bytes": 5000}}, "needed a multiple of 1024"),
        ({"ring": {"in_flight_cap_bytes": 4096}}, r"in_flight_cap_bytes is 4096, needed from 8192 \(one copy\)"),
        ({"rounding": {"chunk_tokens": 96}}, "needed whole pages of 64 tokens"),
        ({"rounding": {"chunk_tokens": 32}}, "needed whole pages of 64 tokens"),
        ({"rounding": {"project_k_splits": 7}}, "project_k_splits is .* needed a multiple of 32"),
        ({"counters": {"words": 3}}, "counters.words is 3, needed at most 2 where loads start ahead"),
        (
            {"counters": {"words": 2}, "interleave": {"loads": "after_wait"}},
            "counters.words is 2, needed at most 1 where loads start after_wait: .* up to 3 operators and hold 4 waits",
        ),
        ({"interleave": {"attention_sms": 132}}, "needed fewer than the chip's 132 SMs"),
        ({"interleave": {"attention_sms": 40, "policy": "round_robin"}}, "round_robin, which knows no SM groups"),
        ({"interleave": {"order": ("project", "up", "attend", "merge", "down")}}, "places nothing of output"),
        ({"interleave": {"order": ("project", "up", "merge", "attend", "down", "output")}}, "merge before attend"),
        ({"interleave": {"order": ("attend", "project", "up", "merge", "down", "output")}}, "attend before project"),
        (
            {"interleave": {"order": ("project", "up:1/2", "attend", "merge", "down", "output", "up:2/2")}},
            "down before up is complete",
        ),
        (
            {"interleave": {"order": ("project", "up:1/3", "up:2/3", "attend", "merge", "down", "output")}},
            "every part once",
        ),
        ({"interleave": {"order": ("project", "route", "up", "attend", "merge", "down", "output")}}, "places 'route'"),
    ],
)
def test_an_illegal_choice_is_named_with_its_limit(updates: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_step(north.model(), north.BUCKET, changed(**updates), north.chip())


@pytest.mark.parametrize(
    "updates",
    [
        {"cut": {"up": 10**12}},
        {"rounding": {"chunk_tokens": 2**53}},
        {"interleave": {"order": ("project:1/99999999",)}},
        {"interleave": {"order": ("project:\u00b2/\u00b2",)}},
    ],
)
def test_numbers_beyond_reason_are_refused_before_anything_is_built(updates: dict[str, dict[str, object]]) -> None:
    with pytest.raises(ValidationError):
        changed(**updates)


def test_a_model_that_does_not_fit_is_said_not_to_fit() -> None:
    small = north.chip().model_copy(update={"name": "a small chip", "memory_bytes": 24 * 10**9})
    with pytest.raises(ConfigError, match=r"61\.0 GB of weights .* a small chip has 24\.0 GB"):
        build_step(north.model(), north.BUCKET, north.choices("hand"), small)


def test_a_context_beyond_the_models_is_refused() -> None:
    bucket = Bucket(rows=1, max_context_tokens=600_000, nominal_context_tokens=8192)
    with pytest.raises(ConfigError, match="max_context_tokens is 600000, the model ends at 500000"):
        build_step(north.model(), bucket, north.choices("hand"), north.chip())


def test_a_sequential_blocks_router_cannot_join_the_projection() -> None:
    spec = spec_of(qwen3_moe())
    found = limits.reasons(
        spec,
        Bucket(rows=1, max_context_tokens=64, nominal_context_tokens=64),
        choices_for(spec, router_with_project=True),
        north.chip(),
    )
    assert any("reads what attention leaves" in reason for reason in found)


def test_batch_8_leaves_less_room_for_the_ring() -> None:
    eight = Bucket(rows=8, max_context_tokens=16384, nominal_context_tokens=8192)
    hand = north.choices("hand")
    one = limits.most_stages(north.model(), north.BUCKET, hand, north.chip())
    assert limits.most_stages(north.model(), eight, hand, north.chip()) < one
