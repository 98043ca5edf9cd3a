"""What `runtime microbench` would run fits the card, and its record says what each figure is of."""

import pytest
from support import small

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
