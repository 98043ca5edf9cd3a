"""A search's finalists on a card: every variant passes the gate before it is timed, and one that fails ends alone.

Owns what becomes of each variant: a fault with its reason, or times taken in turns with all the others. Says which
variant is at work, so that whoever ends a process that hangs knows whom to blame. Called by `runtime measure
--tolerant`, which a search runs.
"""

from __future__ import annotations

from contextlib import suppress

from megakernel.config import ConfigError, digest
from megakernel.measurement import Fault, Record
from runtime.gpu.campaign import Campaign, Variant, fitting, load, per_step
from runtime.gpu.compile import compile_ahead
from runtime.gpu.gate import REPEATS, Gate, check_counters
from runtime.gpu.launch import KernelStoppedError, LoadedTable
from runtime.gpu.measure import Watch, record, take, tolerant
from runtime.gpu.specialize import Specialization, specialize
from runtime.gpu.streaming import PlanBench, UnsoundTableError


def measure_tolerantly(campaign: Campaign, faults: dict[str, Fault], watch: Watch) -> Record:
    """Time all variants that pass the gate; `faults` has those that could not be built, and takes the others'."""
    card = fitting(campaign)
    with suppress(ConfigError):  # it comes again, as the fault of its variant
        compile_ahead(_specializations(campaign), campaign.chip.architecture)
    bench = PlanBench(campaign.chip, campaign.config.positions, computes=campaign.computes)
    gate = Gate()
    passed: dict[str, LoadedTable] = {}
    for variant in campaign.config.variants:
        watch(variant.name)
        if variant.name in faults:
            continue
        found = _admit(campaign, bench, gate, variant)
        if isinstance(found, Fault):
            faults[variant.name] = found
        else:
            passed[variant.name] = found
    variants = {each.name: each for each in campaign.config.variants}
    timed = {
        name: tolerant(name, per_step(loaded, variants[name].steps), faults, watch) for name, loaded in passed.items()
    }
    samples = take(timed, rounds=campaign.config.rounds) if timed else ()
    facts: dict[str, str | float] = {f"table of {name}": step.table.digest for name, step in campaign.steps.items()}
    return record("contest", card, samples, **facts).model_copy(
        update={
            "model_digest": digest(campaign.model),
            "bucket": campaign.config.bucket,
            "choices": {name: step.choices for name, step in campaign.steps.items()},
            "faults": faults,
        }
    )


def _specializations(campaign: Campaign) -> list[Specialization]:
    """What the kernels of all variants are compiled for; those that can't be computed are left out."""
    found: list[Specialization] = []
    for name, step in campaign.steps.items():
        with suppress(ConfigError):
            found.append(specialize(step, campaign.chip, campaign.variant(name).kernel))
    return found


def _admit(campaign: Campaign, bench: PlanBench, gate: Gate, variant: Variant) -> LoadedTable | Fault:
    """A variant's table on the card, once it has shown that it computes what the others do."""
    step = campaign.steps[variant.name]
    try:
        loaded = load(campaign, bench, variant)
    except UnsoundTableError as error:
        return Fault(kind="illegal", text=str(error))
    except (ConfigError, RuntimeError) as error:
        return Fault(kind="failed build", text=str(error))
    try:
        if not variant.kernel.streaming:
            gate.check(step.choices.rounding, [bench.logits(loaded) for _ in range(REPEATS)])
        else:
            loaded.run()
        if not variant.free:
            check_counters(loaded, variant.steps)
    except KernelStoppedError as stopped:
        return Fault(kind="hung", text=str(stopped))
    except ConfigError as error:
        return Fault(kind="wrong", text=str(error))
    return loaded
