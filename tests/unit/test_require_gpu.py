"""--require-gpu: a machine that should have a GPU cannot be green without having run its GPU tests."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

GPU_TESTS = """
    import pytest

    @pytest.mark.gpu
    def test_on_the_gpu():
        {body}

    def test_anywhere():
        pass
"""


def outcomes(pytester: pytest.Pytester, body: str, *flags: str) -> dict[str, int]:
    pytester.makeini("[pytest]\nmarkers = gpu: needs a GPU")
    conftest = Path(__file__).parents[1].joinpath("conftest.py").read_text(encoding="utf-8")
    # The answer of this machine is replaced by one of the two that a test is about.
    pytester.makeconftest(conftest.replace("return torch.cuda.is_available()", "return True"))
    pytester.makepyfile(GPU_TESTS.format(body=body))
    return pytester.inline_run(*flags).countoutcomes()


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_its_tests_are_skipped(pytester):
    assert outcomes(pytester, "assert False") == [1, 1, 0]


@pytest.mark.usefixtures("no_gpu")
def test_the_switch_turns_the_skip_into_a_failure(pytester):
    assert outcomes(pytester, "assert False", "--require-gpu") == [1, 0, 1]


def test_the_switch_also_fails_a_test_that_skips_itself(pytester):
    pytest.importorskip("torch")
    assert outcomes(pytester, "pytest.skip('not today')") == [1, 1, 0]
    assert outcomes(pytester, "pytest.skip('not today')", "--require-gpu") == [1, 0, 1]
