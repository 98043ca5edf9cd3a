"""Whether there is a card to launch on, and if not, what is missing: bindings, driver, a build of torch, the card.

Asks in the order in which answers are cheap: where there is no driver, torch is not imported.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

NEEDED_CUDA = 13.0
"""Which the kernels are compiled for: drivers from 580 on."""


@dataclass(frozen=True)
class Present:
    """What is there to launch with: whether bindings are installed, CUDA of the driver and of torch's build, cards."""

    bindings: bool
    driver_cuda: float | None = None
    torch_cuda: str | None = None
    cards: int = 0


def present() -> Present:
    """Ask the driver and torch; never fails."""
    parts = ("cuda", "cuda.bindings", "cuda.core")  # where the first is not found, the others are not asked for
    if not all(map(importlib.util.find_spec, parts)):
        return Present(bindings=False)
    from cuda.bindings import driver  # noqa: PLC0415 # pyright: ignore[reportAttributeAccessIssue]

    try:
        status, version = driver.cuDriverGetVersion()
    except RuntimeError:  # its library is not there
        return Present(bindings=True)
    if status != driver.CUresult.CUDA_SUCCESS or not version:
        return Present(bindings=True)
    import torch  # noqa: PLC0415 - heavy

    return Present(
        bindings=True,
        driver_cuda=version // 1000 + version % 1000 / 100,
        torch_cuda=torch.version.cuda,
        cards=torch.cuda.device_count(),
    )


def absence(found: Present) -> str | None:
    """Why nothing can be launched; None where a card can be asked what it is."""
    if not found.bindings:
        return "cuda-python is not installed: pip install '.[runtime]'"
    if found.driver_cuda is None:
        return "there is no NVIDIA driver here; needed: a card of the Hopper generation, and a driver from 580 on"
    if found.driver_cuda < NEEDED_CUDA:
        return f"the driver speaks CUDA {found.driver_cuda:g}, needed {NEEDED_CUDA} (drivers from 580 on): update it"
    if found.torch_cuda is None:
        return "torch is a build without CUDA: install one with it"
    if not found.cards:
        return "torch sees no NVIDIA GPU: CUDA_VISIBLE_DEVICES may hide it, or a container was not given it"
    return None
