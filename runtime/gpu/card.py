"""What card this is, and whether it can run a table: `runtime check`'s answers.

Owns the refusals of a card that is there: too few SMs, another architecture, a kernel of which no block fits. Pure
where it decides; only `read_card` asks the driver.
"""

from __future__ import annotations

import torch

from megakernel.config import ConfigError
from megakernel.measurement import Card

OTHER_PLAN = "search a plan for that chip"


def read_card() -> Card:
    """The present card; ConfigError when it can't be had."""
    from cuda.bindings import driver  # noqa: PLC0415 # pyright: ignore[reportAttributeAccessIssue]
    from cuda.core import system  # noqa: PLC0415 # pyright: ignore[reportAttributeAccessIssue]

    try:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        torch.cuda.mem_get_info()  # the first call that takes the card
    except RuntimeError as error:  # held by one process alone, full, or lost
        raise ConfigError(
            f"the card can't be used: {str(error).splitlines()[0]}; another process may hold it, which nvidia-smi "
            "shows: stop that one, or wait"
        ) from None
    _, version = driver.cuDriverGetVersion()
    kernel_mode = system.get_kernel_mode_driver_version()  # pyright: ignore[reportAttributeAccessIssue]
    return Card(
        name=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        num_sms=properties.multi_processor_count,
        shared_memory_per_block_bytes=properties.shared_memory_per_block_optin,
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
        driver=".".join(map(str, kernel_mode)),
        cuda=f"{version // 1000}.{version % 1000 // 10}",
    )


def reasons(card: Card, *, num_sms: int, architecture: str, shared_bytes: int) -> list[str]:
    """Why `card` cannot run a table for `num_sms` SMs; an empty list when it can."""
    found: list[str] = []
    if card.architecture != architecture:
        found.append(f"the table is for {architecture}, {card.name} is {card.architecture}; {OTHER_PLAN}")
    if card.num_sms < num_sms:
        found.append(f"the table is for {num_sms} SMs, {card.name} has {card.num_sms}; {OTHER_PLAN}")
    if card.shared_memory_per_block_bytes < shared_bytes:
        given = card.shared_memory_per_block_bytes
        found.append(f"a block needs {shared_bytes} bytes of shared memory, {card.name} gives {given}")
    return found
