"""Without a card: shipped choices and plans compile for Hopper within their ceilings, and the loop for Blackwell."""

import pytest
from support import north, predicting, small

from megakernel import limits
from megakernel.assets import asset
from megakernel.build import build_step
from megakernel.config import ConfigError, load_json, load_toml
from megakernel.header import render
from megakernel.plan import Plan
from megakernel.tiling import Choices
from megakernel.workload import Bucket
from runtime.gpu.specialize import KernelOptions, Specialization, specialize, specialize_linear

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the run-time compiler of the runtime extra")

CHOICES = ["hand", "reference"]
ENTRIES = [
    (path, idx)
    for path in sorted(asset("configs/plans").glob("*.json"))
    for idx in range(len(load_json(path, Plan).entries))
]


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("name", CHOICES)
def test_shipped_choices_compile_for_hopper(name, cache):
    from runtime.gpu.compile import compile_kernel

    step, chip = north.step(name), north.chip()
    for options in ({}, {"logits_ahead": 8}, {"streaming": True}, {"streaming": True, "trace": True}):
        kernel = compile_kernel(specialize(step, chip, KernelOptions(**options)), "sm_90a", cache_directory=cache)
        keeps_its_ceilings(kernel, chip)


@pytest.mark.parametrize("family", ["north", "qwen"])
def test_eight_rows_of_both_families_compile_for_hopper(family, cache):
    from runtime.gpu.compile import compile_kernel

    chip, bucket = north.chip(), Bucket(rows=8, max_context_tokens=16384, nominal_context_tokens=8192)
    model, choices = (north.model(), "hand") if family == "north" else (predicting.qwen(), "sequential-hand")
    hand = load_toml(asset(f"configs/choices/{choices}.toml"), Choices)
    ring = hand.ring.model_copy(update={"stages": limits.most_stages(model, bucket, hand, chip)})
    step = build_step(model, bucket, hand.model_copy(update={"ring": ring}), chip)
    kernel = compile_kernel(specialize(step, chip, KernelOptions()), "sm_90a", cache_directory=cache)
    keeps_its_ceilings(kernel, chip, spill_bytes=64)  # of the head, once a step


@pytest.mark.parametrize(("path", "idx"), ENTRIES, ids=lambda each: getattr(each, "stem", str(each)))
def test_shipped_plans_compile_for_hopper(path, idx, cache):
    from runtime.gpu.compile import compile_kernel

    plan = load_json(path, Plan)
    entry = plan.entries[idx]
    specialization = specialize(plan.build(entry), plan.hardware, KernelOptions())
    kernel = compile_kernel(specialization, plan.hardware.architecture, cache_directory=cache)
    keeps_its_ceilings(kernel, plan.hardware, spill_bytes=64 if entry.bucket.rows == 8 else 0)


def keeps_its_ceilings(kernel, chip, spill_bytes=0):
    assert kernel.cubin[:4] == b"\x7fELF"
    assert kernel.resources.registers <= 168
    assert kernel.resources.spill_bytes <= spill_bytes
    assert kernel.specialization.shared_bytes <= chip.shared_memory_per_block_bytes


def test_the_loop_compiles_for_blackwell(cache):
    from runtime.gpu.compile import compile_kernel

    kernel = compile_kernel(
        specialize(small.build(), small.chip(), KernelOptions(streaming=True)), "sm_100a", cache_directory=cache
    )
    assert kernel.resources.spill_bytes == 0


def test_the_skeleton_compiles(cache):
    from megakernel.tiling import Ring
    from runtime.gpu.compile import compile_kernel
    from runtime.gpu.skeleton import Skeleton, build_skeleton

    ring = Ring(copy_bytes=8192, stages=25, in_flight_cap_bytes=40960)
    table = build_skeleton(Skeleton(("QKV", "UP", "ATT", "DOWN", "O"), ring), 132).table
    compile_kernel(specialize_linear(table, small.chip(), KernelOptions()), "sm_90a", cache_directory=cache)


def test_the_cache_returns_the_same_kernel(cache):
    from runtime.gpu.compile import compile_kernel

    spec = specialize(small.build(), small.chip(), KernelOptions())
    first = compile_kernel(spec, "sm_90a", cache_directory=cache)
    assert compile_kernel(spec, "sm_90a", cache_directory=cache) == first


def test_a_constant_that_cannot_be_is_refused_by_the_compiler(cache):
    from runtime.gpu.compile import compile_kernel

    constants = dict(specialize(small.build(), small.chip(), KernelOptions()).constants)
    constants["kInFlightCapBytes"] = constants["kRingBytes"] + constants["kCopyBytes"]
    with pytest.raises(ConfigError, match="the cap is from one copy to the whole ring"):
        compile_kernel(Specialization(tuple(constants.items())), "sm_90a", cache_directory=cache)


def test_the_committed_header_is_what_the_host_packs():
    assert asset("csrc/abi.cuh").read_text(encoding="utf-8") == render()


def test_a_cache_that_can_t_be_written_is_named(tmp_path, monkeypatch):
    from runtime.gpu import compile as compiling

    monkeypatch.setattr(compiling, "_compile", lambda *_: (b"cubin", f"'{compiling.ENTRY}'"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file: no kernel can be kept there: .*XDG_CACHE_HOME can name$"):
        compiling.compile_kernel(
            specialize(small.build(), small.chip(), KernelOptions()), "sm_90a", cache_directory=tmp_path / "file"
        )
