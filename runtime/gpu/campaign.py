"""What `runtime check`, `measure` and `trace` do: from a file to tables on a card, and back to a record.

Owns the shape of configs/measure/*.toml. A variant is choices, assignments to them, and kernel options; all variants of
a file share one model, one bucket and one live state, so that weights are allocated once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from megakernel.build import BuiltStep, build_step
from megakernel.config import ConfigError, Frozen, load_json, load_toml, override
from megakernel.families import read_model
from megakernel.hardware import HardwareSpec, load_hardware
from megakernel.kinds import TaskKind
from megakernel.measurement import Card, Fault, Record, Sample
from megakernel.model import BF16_BYTES, ModelSpec, RoutedMlp
from megakernel.plan import Plan
from megakernel.tiling import Choices
from megakernel.timeline import Timeline
from megakernel.verify import verify
from megakernel.workload import Bucket
from runtime.gpu.buffers import distinct_experts, random_inputs
from runtime.gpu.card import read_card, reasons
from runtime.gpu.compile import compile_kernel
from runtime.gpu.launch import LoadedTable
from runtime.gpu.measure import Timed, record, take
from runtime.gpu.postmortem import GraphTitles
from runtime.gpu.specialize import KernelOptions, specialize
from runtime.gpu.streaming import PlanBench
from runtime.gpu.trace import to_timeline


class Variant(Frozen):
    """One thing to time: choices, dotted assignments to them, and how the kernel is compiled.

    `choices` is a file of choices, TOML, or a plan, JSON, whose entry for the bucket is meant.
    """

    name: str
    choices: str
    set: tuple[str, ...] = ()
    kernel: KernelOptions = KernelOptions()
    steps: int = Field(default=1, ge=1)
    free: bool = False


class MeasureConfig(Frozen):
    """A measurement file; paths are relative to it."""

    model: str
    chip: str
    bucket: Bucket
    positions: tuple[int, ...] = Field(min_length=1)
    rounds: int = Field(default=7, ge=1)
    variants: tuple[Variant, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Campaign:
    """A measurement file with all that it names, read and built."""

    config: MeasureConfig
    model: ModelSpec
    chip: HardwareSpec
    steps: dict[str, BuiltStep]

    @property
    def computes(self) -> bool:
        """Whether a variant computes, so that the router chooses the experts; they are random where all stream."""
        return not all(variant.kernel.streaming for variant in self.config.variants)

    def num_bytes(self, experts: tuple[int, ...]) -> int:
        """Bytes that a step must read: weights of `experts` distinct ones a layer, and KV. The roofline's."""
        routed = [count for count in experts if count]
        mean = sum(routed) / len(routed) if routed else 0.0
        return self.model.step_bytes([position + 1 for position in self.config.positions], mean)

    def variant(self, name: str | None) -> Variant:
        """A variant by name; the first without one."""
        found = [variant for variant in self.config.variants if name in (None, variant.name)]
        if not found:
            raise ConfigError(f"no variant {name!r}; there are {', '.join(each.name for each in self.config.variants)}")
        return found[0]


def read_campaign(path: Path, faults: dict[str, Fault] | None = None) -> Campaign:
    """Read a measurement file and build the tables of its variants; with `faults`, leave out what can't be built."""
    config = load_toml(path, MeasureConfig)
    bucket, names = config.bucket, [variant.name for variant in config.variants]
    if len(config.positions) > bucket.rows or not all(0 <= at < bucket.max_context_tokens for at in config.positions):
        raise ConfigError(
            f"{path}: positions are {list(config.positions)}, needed at most {bucket.rows} from 0 to "
            f"{bucket.max_context_tokens - 1}"
        )
    if len(set(names)) < len(names):
        raise ConfigError(f"{path}: variants are named {', '.join(names)}, needed a name of its own for each")
    base = path.parent
    model, chip = read_model(base / config.model), load_hardware(base / config.chip)
    steps: dict[str, BuiltStep] = {}
    for variant in config.variants:
        choices = override(choices_of(base / variant.choices, bucket), variant.set)
        try:
            steps[variant.name] = build_step(model, config.bucket, choices, chip)
        except ConfigError as error:
            if faults is None:
                raise
            faults[variant.name] = Fault(kind="illegal", text=str(error))
    return Campaign(config, model, chip, steps)


def choices_of(path: Path, bucket: Bucket) -> Choices:
    """Read a file of choices, or what a plan chooses for `bucket`; ConfigError when it has no such entry."""
    if path.suffix != ".json":
        return load_toml(path, Choices)
    entries = {entry.bucket: entry.choices for entry in load_json(path, Plan).entries}
    if bucket not in entries:
        has = ", ".join(f"{each.rows} x {each.max_context_tokens}" for each in entries)
        raise ConfigError(f"{path}: the plan has no entry for {bucket.rows} x {bucket.max_context_tokens}, only {has}")
    return entries[bucket]


def check(path: Path, name: str | None = None) -> list[dict[str, str]]:
    """Facts of the card and of kernels on it: a measurement file's variant, the first without `name`, or all of a plan.

    ConfigError when the card can't run one of them, when a plan is stale, or when nothing has the name.
    """
    if path.suffix == ".json":
        plan = load_json(path, Plan)
        entries = {f"{each.bucket.rows} x {each.bucket.max_context_tokens}": each for each in plan.entries}
        if name is not None and name not in entries:
            raise ConfigError(f"{path}: no entry is called {name}; there are {', '.join(entries)}")
        chosen = entries if name is None else {name: entries[name]}
        return [_check(each, plan.build(entry), plan.hardware, KernelOptions()) for each, entry in chosen.items()]
    campaign = read_campaign(path)
    variant = campaign.variant(name)
    return [_check(variant.name, campaign.steps[variant.name], campaign.chip, variant.kernel)]


def _check(name: str, step: BuiltStep, chip: HardwareSpec, options: KernelOptions) -> dict[str, str]:
    card = read_card()
    spec = specialize(step, chip, options)
    found = reasons(card, num_sms=step.table.num_sms, architecture=chip.architecture, shared_bytes=spec.shared_bytes)
    found += [str(finding) for finding in verify(step.graph, step.table)]
    if found:
        raise ConfigError("this card can't run this table:\n" + "\n".join(f"  {reason}" for reason in found))
    compiled = compile_kernel(spec, chip.architecture)
    titles = GraphTitles(step.graph, step.counter_titles)
    loaded = LoadedTable(compiled, step.table, titles, proved_digest=step.table.digest)
    resources = compiled.resources
    return {
        "card": f"{card.name}, {card.num_sms} SMs, {card.memory_bytes / 1e9:.0f} GB",
        "driver": f"{card.driver}, CUDA {card.cuda}",
        "variant": name,
        "table": f"{step.table.digest}, {len(step.table.records)} records, {step.table.num_counters} counters",
        "kernel": f"{resources.registers} registers, {resources.spill_bytes} bytes spilled",
        "block": f"{spec.block_threads} threads",
        "shared memory": f"{spec.shared_bytes} of {card.shared_memory_per_block_bytes} bytes a block",
        "occupancy": f"{loaded.blocks_per_sm} block an SM, {step.table.num_sms} blocks",
    }


def measure(campaign: Campaign) -> Record:
    """Time all variants, interleaved."""
    card = fitting(campaign)
    bench = PlanBench(campaign.chip, campaign.config.positions, computes=campaign.computes)
    timed: dict[str, Timed] = {}
    for variant in campaign.config.variants:
        timed[variant.name] = per_step(load(campaign, bench, variant), variant.steps)
    experts = touched_experts(campaign, bench)
    samples = take(timed, rounds=campaign.config.rounds)
    digests = {f"table of {name}": step.table.digest for name, step in campaign.steps.items()}
    num_bytes = campaign.num_bytes(experts)
    roofline_ms = round(num_bytes / campaign.chip.datasheet_bytes_per_ns / 1e6, 4)
    mean = round(sum(experts) / max(sum(count > 0 for count in experts), 1), 2)
    return record("step", card, samples, bytes=num_bytes, roofline_ms=roofline_ms, distinct_experts=mean, **digests)


def touched_experts(campaign: Campaign, bench: PlanBench) -> tuple[int, ...]:
    """Distinct experts a layer in the first step: counted on the card from what a traced step loaded."""
    computing = [variant for variant in campaign.config.variants if not variant.kernel.streaming]
    if not computing:
        step = next(iter(campaign.steps.values()))
        return distinct_experts(step, random_inputs(step, campaign.config.positions))
    kernel = computing[0].kernel.model_copy(update={"trace": True})
    loaded = load(campaign, bench, computing[0].model_copy(update={"kernel": kernel, "steps": 1}))
    loaded.run()
    step, tasks = campaign.steps[computing[0].name], loaded.trace().tasks
    counts: list[int] = []
    for idx, layer in enumerate(step.model.layers):
        of_layer = (step.table.records["kind"] == TaskKind.UP) & (step.table.records["layer"] == idx)
        expert_bytes = 2 * layer.mlp.width * step.model.hidden_size * BF16_BYTES
        is_routed = isinstance(layer.mlp, RoutedMlp)
        counts.append(round(int(tasks["bytes"][of_layer].sum()) / expert_bytes) if is_routed else 0)
    return tuple(counts)


def trace(campaign: Campaign, name: str | None = None) -> tuple[Timeline, Sample, Sample]:
    """Timeline of one step of a variant, and what tracing costs: samples without and with it."""
    fitting(campaign)
    variant = campaign.variant(name)
    bench = PlanBench(campaign.chip, campaign.config.positions, computes=campaign.computes)
    plain, traced = (
        load(
            campaign, bench, variant.model_copy(update={"kernel": variant.kernel.model_copy(update={"trace": tracing})})
        )
        for tracing in (False, True)
    )
    timed = {"plain": per_step(plain, variant.steps), "traced": per_step(traced, variant.steps)}
    without, with_trace = take(timed, rounds=campaign.config.rounds)
    traced.run()
    step = campaign.steps[variant.name]
    titles = GraphTitles(step.graph, step.counter_titles)
    return to_timeline(step.table, titles, traced.trace(), variant.name), without, with_trace


def fitting(campaign: Campaign) -> Card:
    """The present card; ConfigError unless it can run the campaign's tables."""
    card = read_card()
    found = reasons(card, num_sms=campaign.chip.num_sms, architecture=campaign.chip.architecture, shared_bytes=0)
    if found:
        raise ConfigError("\n".join(found))
    return card


def load(campaign: Campaign, bench: PlanBench, variant: Variant) -> LoadedTable:
    """A variant's table, armed."""
    step = campaign.steps[variant.name]
    return bench.load(step, variant.kernel, steps=variant.steps, free=variant.free)


def per_step(table: LoadedTable, steps: int) -> Timed:
    """Milliseconds of one of the steps that a launch runs."""
    return lambda: table.time_ms() / steps
