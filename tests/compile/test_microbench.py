"""What `runtime microbench` would run fits the card, and its record says what each figure is of."""

from types import SimpleNamespace

import pytest
from support import small
from support.pretend_card import CARD

pytest.importorskip("cuda.core", reason="needs the launcher of the runtime extra")

SMS = 132


@pytest.fixture(scope="module")
def kernels():
    """Names of all cases by the kernel that they need, and the most bytes that one reads."""
    from runtime.gpu.microbench import cases
    from runtime.gpu.specialize import specialize_linear

    found, most = {}, 0
    for case in cases(SMS):
        found.setdefault(specialize_linear(case.built.table, small.chip(), case.options), []).append(case.name)
        most = max(most, case.built.arena_bytes)
    return found, most


def test_no_case_reads_beyond_the_arena(kernels):
    from runtime.gpu.skeleton import SHIPPED_CELLS
    from runtime.gpu.streaming import MAX_COPY_BYTES

    assert kernels[1] <= SHIPPED_CELLS[0].build(SMS).arena_bytes + MAX_COPY_BYTES * SMS


def test_every_case_has_a_name_of_its_own_in_a_group_that_is_described(kernels):
    from runtime.gpu import microbench
    from runtime.gpu.signal import SIGNALS

    names = [name for each in kernels[0].values() for name in each] + [signal.name for signal in SIGNALS]
    assert len(set(names)) == len(names)
    groups = {name.partition(" | ")[0] for name in names} - set(microbench.HANDOFF_VARIANTS)
    assert groups == {"default", "streaming", "signal", "fan-in", "hand-off", "issue", "consume"}
    assert all(f"`{group}`" in microbench.__doc__ for group in groups)


def test_a_case_that_hangs_ends_alone(monkeypatch):
    """On a card that is pretended: figures are of one copy, phase or signal, and the others' stay."""
    from runtime.gpu import microbench
    from runtime.gpu.launch import KernelStoppedError

    class Bench:
        num_bytes, arena = 1, None

        def __init__(self, _chip):
            pass

        def specialization(self, _built, options):
            return options

        def load(self, built, _options, _work):
            def time_ms():
                if built.table.num_sms == 8:
                    raise KernelStoppedError("P3[1] never arrived")
                return 2.0

            return SimpleNamespace(time_ms=time_ms)

    cases = [case for case in microbench.cases(SMS) if case.name.startswith(("hand-off", "issue"))]
    monkeypatch.setattr(microbench, "read_card", lambda: CARD)
    monkeypatch.setattr(microbench, "cases", lambda _: cases)
    monkeypatch.setattr(microbench, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(microbench, "LinearBench", Bench)
    monkeypatch.setattr(microbench, "SignalBench", lambda *_: SimpleNamespace(timed=lambda _: lambda: 0.0006))
    found = microbench.microbench(small.chip(), rounds=3)
    assert {name: fault.text for name, fault in found.faults.items()} == {
        f"hand-off | {arrival}, 8 SMs, 1 word": "P3[1] never arrived" for arrival in ("release", "read back")
    }
    names = {sample.name for sample in found.samples}
    assert names.isdisjoint(found.faults)
    assert len(names) == len(cases) - 2 + len(microbench.SIGNALS)
    assert found.median_ms("hand-off | release, 132 SMs, 1 word") == 2.0 / found.facts["phases of a hand-off"]
    assert found.median_ms("issue | 4096 B x 48, no cap") == 2.0 / found.facts["copies of an issue"]


@pytest.mark.parametrize("group", ["streaming", "hand-off", "issue", "consume"])
def test_a_kernel_of_each_group_compiles(kernels, group, tmp_path):
    from runtime.gpu.compile import compile_kernel

    (spec, *_) = (spec for spec, names in kernels[0].items() if names[0].startswith(f"{group} | "))
    compile_kernel(spec, "sm_90a", cache_directory=tmp_path)


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_the_signals_compile_and_spill_nothing(tmp_path, architecture):
    from runtime.gpu.compile import compile_source
    from runtime.gpu.signal import COPY_BYTES, RENDERED, STAGES

    _, resources = compile_source("signal.cu", "signals", RENDERED, architecture, cache_directory=tmp_path)
    assert resources.spill_bytes == 0
    assert resources.static_shared_bytes + STAGES * COPY_BYTES <= small.chip().shared_memory_per_block_bytes
    assert compile_source("signal.cu", "signals", RENDERED, architecture, cache_directory=tmp_path)[1] == resources
