"""How far a chip's constants carry: which costs nobody measured on it, and which constants no step can be priced with.

Owns the reading of a chip's sources, and the messages for absurd constants: they end as one line, not as an infinity.
Called by the commands.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from megakernel.config import ConfigError
from megakernel.hardware import Costs, HardwareSpec
from simulator.breakdown import LONGEST_NS
from simulator.prediction import Prediction

TRANSFERRED = "transferred"
"""How the source of a number begins that was taken over from another chip."""


def uncalibrated(chip: HardwareSpec) -> tuple[str, ...]:
    """Costs of `chip` that were taken over from another one."""
    return tuple(name for name in Costs.model_fields if chip.sources[f"costs.{name}"].startswith(TRANSFERRED))


def calibration_note(chip: HardwareSpec) -> str | None:
    """One line for people about costs that are not this chip's own; None if all are."""
    found, of = len(uncalibrated(chip)), len(Costs.model_fields)
    if not found:
        return None
    return f"{chip.name}: this chip's costs are not calibrated: {found} of {of} are transferred from another chip"


@contextmanager
def priced_with(chip: HardwareSpec) -> Generator[None]:
    """Report an overflow or a division by zero inside as a fault of the chip's constants."""
    try:
        yield
    except ArithmeticError as error:
        raise _absurd(chip, str(error)) from None


def check_finite(prediction: Prediction, chip: HardwareSpec) -> None:
    """ConfigError when a figure of the prediction is no sensible number."""
    bounds = prediction.bounds
    figures = (prediction.total_ns, bounds.roofline_ns, bounds.bytes_ns, bounds.critical_path_ns, bounds.sm_load_ns)
    if not all(each < LONGEST_NS for each in figures) or prediction.total_ns <= 0.0 or bounds.roofline_ns <= 0.0:
        raise _absurd(chip, f"the step takes {prediction.total_ns:g} ns, its roofline is {bounds.roofline_ns:g} ns")


def _absurd(chip: HardwareSpec, what: str) -> ConfigError:
    return ConfigError(f"{chip.name}: no step can be priced with these constants ({what}); check its rates and [costs]")
