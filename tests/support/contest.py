"""A contest on a card beside what the simulator says of the same tables: times, rank and regret."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from scipy.stats import spearmanr

from megakernel.assets import asset, locate
from megakernel.config import load_json
from megakernel.families import read_model
from megakernel.hardware import HardwareSpec, load_hardware
from megakernel.measurement import Record
from megakernel.tiling import Choices
from megakernel.workload import Bucket, Workload
from simulator.estimate import estimate_step_ns

Times = dict[str, float]


def contest(path: str) -> Record:
    """A record, shipped or not."""
    return load_json(locate(path), Record)


def measured_ms(record: Record) -> Times:
    """Medians by name."""
    return {name: record.median_ms(name) for name in record.choices if name not in record.faults}


def fitted_half(record: Record) -> tuple[str, ...]:
    """Names of every other variant: the half that constants may be fitted to."""
    return tuple(measured_ms(record))[::2]


def simulated_ms(record: Record, chip: HardwareSpec | None = None, names: Sequence[str] | None = None) -> Times:
    """What the simulator says of the named variants of North, or of all; two processes."""
    names = tuple(measured_ms(record)) if names is None else names
    assert record.bucket is not None
    one = partial(_one, record.bucket, chip or load_hardware(asset("configs/hardware/h200.toml")))
    with ProcessPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(one, [record.choices[name] for name in names]), strict=True))


def _one(bucket: Bucket, chip: HardwareSpec, choices: Choices) -> float:
    model = read_model(asset("configs/models/CohereLabs--North-Mini-Code-1.0.json"))
    return estimate_step_ns(model, bucket, choices, chip, Workload.nominal(bucket)) / 1e6


def spearman(measured: Mapping[str, float], predicted: Mapping[str, float]) -> float:
    """Rank correlation."""
    return float(spearmanr([measured[name] for name in predicted], list(predicted.values())).statistic)


def regret(measured: Mapping[str, float], predicted: Mapping[str, float], top: int) -> float:
    """How far the best measured of the `top` best predicted is above the best measured of all, as a ratio less one."""
    chosen = sorted(predicted, key=predicted.__getitem__)[:top]
    return min(measured[name] for name in chosen) / min(measured[name] for name in predicted) - 1.0


def mean_error(measured: Mapping[str, float], predicted: Mapping[str, float]) -> float:
    """Mean of the relative errors' sizes."""
    return sum(abs(ms / measured[name] - 1.0) for name, ms in predicted.items()) / len(predicted)
