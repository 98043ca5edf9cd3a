"""The start on a card and what follows, with the card itself pretended: tables interpreted, no kernel launched."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
import torch
from support import north
from support.plans import plan_of
from support.pretend_card import CARD, pretend
from support.process import Process
from support.served_model import client_of, open_service, write_rounded
from support.serving import Stream, hosted

from megakernel.config import ConfigError, pretty_json
from megakernel.families import read_model
from megakernel.workload import Bucket
from runtime.gpu.buckets import fitting
from runtime.gpu.launch import KernelStoppedError
from runtime.server.config import ServeConfig
from runtime.server.loading import CARD_TOKENS, place
from runtime.server.offline import generate

pytestmark = pytest.mark.anyio

SIZES = {"device": "cuda", "max_num_seqs": 2, "max_model_len": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_rounded(tmp_path_factory.mktemp("demo"))


def test_without_a_card_auto_is_the_cpu_and_cuda_is_refused(folder):
    assert place(ServeConfig(), folder).device == "cpu"
    with pytest.raises(ConfigError, match="`device` is cuda: there is no NVIDIA driver"):
        place(ServeConfig(device="cuda"), folder)


def test_the_process_exits_2_where_a_card_is_asked_for(folder):
    running = Process(str(folder), "--device", "cuda")
    try:
        assert running.process.wait(60) == 2
        assert running.process.stderr.read().startswith("error: `device` is cuda: ")
    finally:
        running.end()


def test_a_card_is_taken_and_bounds_a_window_that_nobody_has_set(folder, monkeypatch):
    pretend(monkeypatch)
    assert place(ServeConfig(device="cpu"), folder).device == "cpu"
    placed = place(ServeConfig(), folder)
    assert (placed.device, placed.max_model_len) == ("cuda", min(8192, CARD_TOKENS))
    assert place(ServeConfig(max_model_len=100), folder).max_model_len == 100


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"compute_capability": "8.0"}, r"the table is for sm_90a, NVIDIA Pretended is sm_80"),
        ({"num_sms": 114}, "the table is for 132 SMs, NVIDIA Pretended has 114"),
    ],
)
def test_another_card_is_refused_by_cuda_and_passed_over_by_auto(changed, message, folder, monkeypatch):
    pretend(monkeypatch)
    monkeypatch.setattr("runtime.gpu.opening.read_card", lambda: CARD.model_copy(update=changed))
    with pytest.raises(ConfigError, match=message):
        place(ServeConfig(device="cuda"), folder)
    assert place(ServeConfig(), folder).device == "cpu"


@pytest.mark.parametrize(
    ("settings", "free", "message"),
    [
        ({}, 10**9, "taken by others: stop them"),
        ({"num_gpu_blocks": 10**7}, 19 * 10**9, "lower `num_gpu_blocks`"),
        (
            {"num_gpu_blocks": 3},
            19 * 10**9,
            "takes 4 KV blocks of 64 tokens, there are 3: lower `max_model_len`",
        ),
        ({"block_size": 32}, 19 * 10**9, "`block_size` is 32; blocks of these tables have 64 tokens"),
        ({"max_num_seqs": 9}, 19 * 10**9, "the kernel decodes at most 8 rows"),
    ],
)
def test_sizes_that_can_t_be_are_refused_at_the_start(settings, free, message, folder, monkeypatch):
    pretend(monkeypatch, free=free)
    with pytest.raises(ConfigError, match=message):
        open_service(folder, **SIZES | settings)


def test_without_a_compiler_the_start_is_refused_before_weights_are_read(folder, monkeypatch):
    pretend(monkeypatch)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"no C compiler, .* install gcc, or name one in CC"):
        open_service(folder, **SIZES)


def test_memory_that_another_process_takes_during_the_start_is_told(folder, monkeypatch):
    pretend(monkeypatch)

    def full(*_args, **_more):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 60.00 GiB.\nGPU 0 has a total capacity of")

    monkeypatch.setattr("runtime.gpu.opening.Decoder", full)
    with pytest.raises(ConfigError, match=r"has none now: another .* lower `gpu_memory_utilization` from 0\.9$"):
        open_service(folder, **SIZES)


@pytest.mark.parametrize("named", [None, "/elsewhere"])
def test_triton_s_kernels_are_kept_beside_ours_unless_an_operator_names_a_folder(named, folder, tmp_path, monkeypatch):
    """A service has no home to write to, and a container's is lost with it."""
    pretend(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(named))
    if named is None:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    open_service(folder, **SIZES).engine.close()
    assert os.environ["TRITON_CACHE_DIR"] == (named or str(tmp_path / "counterpoint" / "triton"))


async def test_no_more_rows_run_than_an_operator_allows_whatever_seats_a_plan_s_bucket_has(
    folder, tmp_path, monkeypatch
):
    pretend(monkeypatch)
    model = read_model(folder)
    bucket = Bucket(rows=3, max_context_tokens=256, nominal_context_tokens=128)
    (step,) = (each.step for each in fitting(model, 3, 256, north.chip()) if each.step.bucket.rows == 3)
    assert step.bucket == bucket
    path = tmp_path / "plan.json"
    path.write_text(pretty_json(plan_of(step, north.chip())), encoding="utf-8")
    service = open_service(folder, device="cuda", plan=str(path), max_num_seqs=2)
    try:
        async with client_of(service) as served:
            info = (await served.client.get("/server_info")).json()
            body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "prompt": [[5], [6], [7]]}
            answer = await served.post("/v1/completions", body)
            assert answer.json()["usage"]["completion_tokens"] == 12
    finally:
        service.engine.close()
    assert info["rows"] == 2
    assert [each["rows"] for each in info["card"]["buckets"]] == [3]
    assert info["plan"]["buckets"][0]["table_digest"] == info["card"]["buckets"][0]["table_digest"]


async def test_requests_are_answered_and_an_operator_sees_the_card(folder, monkeypatch):
    pretend(monkeypatch)
    service = open_service(folder, **SIZES, num_gpu_blocks=9)
    try:
        async with client_of(service) as served:
            body = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            prompts = ([5], [5, *range(30, 99)], [5, *range(40, 60)])
            answers = await asyncio.gather(
                *(served.post("/v1/completions", {"prompt": prompt, **body}) for prompt in prompts)
            )
            assert [len(each.json()["choices"][0]["token_ids"]) for each in answers] == [5, 5, 5]
            info = (await served.client.get("/server_info")).json()
    finally:
        service.engine.close()
    card = info["card"]
    assert (info["device"], card["name"], card["kv_blocks"], card["block_size"]) == ("cuda", CARD.name, 9, 64)
    assert [(bucket["rows"], bucket["measured_ns"]) for bucket in card["buckets"]] == [(1, 250_000), (2, 500_000)]
    assert all(bucket["table_digest"].startswith("sha256:") for bucket in card["buckets"])


def test_drawn_weights_need_no_weight_files(tmp_path):
    write_rounded(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    asked = {"max_tokens": 12, "temperature": 1.0, "seed": 1}
    config = ServeConfig(model=str(tmp_path), device="cpu", load_format="dummy")
    texts = ["".join(generate(config, "hello", asked, raw=True)) for _ in range(2)]
    assert texts[0] == texts[1] != ""


async def test_a_kernel_that_stops_ends_streams_health_and_process(folder, monkeypatch, caplog):
    """As `tests/gpu/test_faults.py` has it on a card, whose report is pretended here."""
    pretend(monkeypatch)
    service = open_service(folder, **SIZES)
    async with hosted(service) as at:
        body = {"prompt": [5], "max_tokens": 200, "ignore_eos": True, "stream": True}
        async with at.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            begin, device = time.monotonic(), service.engine.core.backend.tables[0]

            def stopped():
                raise KernelStoppedError("the first task that should have fired is L1.merge[0]")

            device.finish, device.is_running = stopped, lambda: False
            rest = [line async for line in lines]
        assert time.monotonic() - begin < 5
        stream = Stream.read("\n".join(rest).lstrip("\n") + "\n")
        assert len(stream.errors()) == 1
        assert not stream.is_done
        assert await at.running == 1
    assert "the first task that should have fired is L1.merge[0]" in caplog.text
