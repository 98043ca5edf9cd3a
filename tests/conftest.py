"""Switches that all tests share: GPU tests and the property tests' profile."""

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import settings

# Two slow cores make any deadline flaky; in CI the same examples run every time.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_addoption(parser):
    """Add the switch that a machine with a GPU sets, so that a green run there has run its GPU tests."""
    parser.addoption("--require-gpu", action="store_true", help="a GPU test that is skipped fails instead")
    parser.addoption(
        "--backend", choices=("scripted", "ahead"), default="scripted", help="what plays tests/server's scripts"
    )


def pytest_configure(config):
    """Tell those who make backends, in this process and in those that tests start."""
    os.environ["COUNTERPOINT_TEST_BACKEND"] = config.getoption("--backend")
    if not Path("/dev/nvidiactl").exists():
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, whoever does it first


def pytest_collection_modifyitems(items):
    """Skip GPU tests where there is no GPU; torch is imported only when such tests were collected."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Turn the skip of a GPU test, for whatever reason, into a failure under --require-gpu."""
    report = yield
    is_required = item.config.getoption("--require-gpu") and item.get_closest_marker("gpu")
    if is_required and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"--require-gpu: {item.nodeid} was skipped at {call.when}: {call.excinfo.value}"
    return report


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
