"""Tables small enough to try every interleaving of: random graphs that no model has, and lowered steps of a toy model.

All are legal: hazards are derived and wired as in a real build, and lists are random orders that respect them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

from megakernel.abi import MAX_LOAD_WAITS, MAX_RUN_WAITS
from megakernel.counters import wire
from megakernel.graph import Access, Box, Buffer, Op, Task, TaskGraph, When
from megakernel.hazards import Dependencies, derive
from megakernel.kinds import KINDS, TaskKind
from megakernel.lowering import lower
from megakernel.model import DenseMlp, LayerSpec, ModelSpec, Rope, RoutedMlp
from megakernel.placement import Schedule
from megakernel.table import TaskTable, pack
from megakernel.tiling import Choices, Cut, Interleave, Ring, Rounding
from megakernel.workload import Bucket

TOY_BUCKET = Bucket(rows=1, max_context_tokens=16, nominal_context_tokens=16)


@dataclass(frozen=True)
class Step:
    """A graph and a legal table of it."""

    graph: TaskGraph
    table: TaskTable


def random_step(seed: int) -> Step:
    """A random graph of three to seven tasks on two or three SMs, in a random legal order."""
    rng = random.Random(seed)
    while True:
        step = schedule_randomly(random_graph(rng), toy_choices(rng), rng.choice((2, 2, 3)), rng)
        if step is not None and any(step.table.totals):
            return step


def toy_step(seed: int) -> Step:
    """One or two layers of the toy model, hardly cut, on two or three SMs, in a random legal order."""
    rng = random.Random(seed)
    return _lowered(toy_model(rng, layers=rng.choice((1, 1, 2))), toy_choices(rng), rng.choice((2, 2, 3)), rng)


def larger_step(seed: int) -> Step:
    """More layers, tasks and SMs than can be exhausted."""
    rng = random.Random(seed)
    return _lowered(
        toy_model(rng, layers=rng.choice((2, 3))), toy_choices(rng, most_tasks=4), rng.choice((4, 5, 6)), rng
    )


def _lowered(model: ModelSpec, choices: Choices, num_sms: int, rng: random.Random) -> Step:
    graph = lower(model, TOY_BUCKET, choices)
    while True:
        step = schedule_randomly(graph, choices, num_sms, rng)
        if step is not None:
            return step


def schedule_randomly(graph: TaskGraph, choices: Choices, num_sms: int, rng: random.Random) -> Step | None:
    """Wire and pack `graph` in a random legal order; None when a record would need more waits than it holds."""
    dependencies = derive(graph)
    schedule = random_schedule(graph, dependencies, num_sms, rng)
    wiring = wire(graph, dependencies, schedule, load_after_wait=rng.random() < 0.15)
    for signals in wiring.signals:
        if len(signals.load_waits) > MAX_LOAD_WAITS or len(signals.run_waits) > MAX_RUN_WAITS:
            return None
    return Step(graph, pack(graph, schedule, wiring, TOY_BUCKET, choices))


def table_of(graph: TaskGraph, lists: tuple[tuple[int, ...], ...]) -> TaskTable:
    """Wire and pack `graph` with the lists given, legal or not."""
    schedule = Schedule(lists)
    wiring = wire(graph, derive(graph), schedule, load_after_wait=False)
    return pack(graph, schedule, wiring, TOY_BUCKET, toy_choices(random.Random(0)))


def random_schedule(graph: TaskGraph, dependencies: Dependencies, num_sms: int, rng: random.Random) -> Schedule:
    """Every task once, on any SM, in any order in which operators come after those that they depend on in the step."""
    tasks = [op_idx for op_idx, op in enumerate(graph.ops) for _ in op.tasks]
    left = [len(op.tasks) for op in graph.ops]
    sources = [{source.op for source in (*needs.load, *needs.run) if source.lag == 0} for needs in dependencies.needs]
    waiting = list(range(len(tasks)))
    lists: list[list[int]] = [[] for _ in range(num_sms)]
    while waiting:
        ready = [task for task in waiting if not any(left[op] for op in sources[tasks[task]])]
        task = rng.choice(ready)
        waiting.remove(task)
        left[tasks[task]] -= 1
        rng.choice(lists).append(task)
    return Schedule(tuple(map(tuple, lists)))


def random_graph(rng: random.Random) -> TaskGraph:
    """Two to five operators over two to four small buffers, with every kind of hazard."""
    buffers = tuple(
        Buffer(f"b{idx}", tuple(rng.randint(1, 4) for _ in range(rng.choice((1, 1, 2)))), 4)
        for idx in range(rng.randint(2, 4))
    )
    sizes = [rng.choice((1, 1, 2, 3)) for _ in range(rng.randint(2, 5))]
    while not 3 <= sum(sizes) <= 7:
        sizes = [rng.choice((1, 1, 2, 3)) for _ in range(rng.randint(2, 5))]
    return TaskGraph(buffers, tuple(_random_op(idx, size, buffers, rng) for idx, size in enumerate(sizes)))


def _random_op(idx: int, size: int, buffers: tuple[Buffer, ...], rng: random.Random) -> Op:
    written = rng.sample(range(len(buffers)), rng.choice((0, 1, 1, 1, 1, 2)) if len(buffers) > 2 else 1)
    others = [buffer for buffer in range(len(buffers)) if buffer not in written]
    read = rng.sample(others, min(len(others), rng.choice((0, 1, 1, 2))))
    updated = [buffer for buffer in written if rng.random() < 0.3]
    early = [rng.random() < 0.5 for _ in range(size)] if rng.random() < 0.4 else [False] * size
    inputs = (*read, *updated)
    accesses: list[list[Access]] = [[] for _ in range(size)]
    for slot, buffer in enumerate(written, start=len(inputs)):
        shape = buffers[buffer].shape
        partitioned = rng.random() < 0.25
        boxes = [whole(shape)] * size if partitioned else disjoint_boxes(shape, size, rng)
        for task, box in enumerate(boxes):
            if box is None:
                continue
            when = When.EARLY if early[task] and rng.random() < 0.6 else When.RUN
            accesses[task].append(Access(slot, box, when, write=True, partitioned=partitioned))
            if buffer in updated:
                when = rng.choice((When.LOAD, When.RUN))
                accesses[task].append(Access(inputs.index(buffer), box, when, partitioned=partitioned))
    for slot, buffer in enumerate(read):
        shared = random_box(buffers[buffer].shape, rng)
        for task in range(size):
            box = shared if rng.random() < 0.5 else random_box(buffers[buffer].shape, rng)
            whens = (When.LOAD, When.RUN, When.RUN, When.EARLY) if early[task] else (When.LOAD, When.RUN)
            accesses[task].append(Access(slot, box, rng.choice(whens)))
    kind = rng.choice((TaskKind.PROJECT, TaskKind.ATTEND, TaskKind.MERGE, TaskKind.DOWN))
    tasks = tuple(
        Task(tuple(accesses[task]), 1, begin=task, end=task + 1, share=task, shares=size, router_end=int(early[task]))
        for task in range(size)
    )
    return Op(f"op{idx}", kind, KINDS[kind].path, 0, (*inputs, *written), len(inputs), len(written), tasks)


def whole(shape: tuple[int, ...]) -> Box:
    """All of a buffer."""
    return tuple((0, extent) for extent in shape)


def random_box(shape: tuple[int, ...], rng: random.Random) -> Box:
    """Some of a buffer, or all of it."""
    if rng.random() < 0.3:
        return whole(shape)
    lows = [rng.randrange(extent) for extent in shape]
    return tuple((low, rng.randint(low + 1, extent)) for low, extent in zip(lows, shape, strict=True))


def disjoint_boxes(shape: tuple[int, ...], size: int, rng: random.Random) -> list[Box | None]:
    """Boxes of `size` tasks that don't meet; some may be missing, and together they may leave something out."""
    axis = max(range(len(shape)), key=lambda dim: shape[dim])
    rest = random_box(shape, rng)
    points = sorted(rng.sample(range(shape[axis] + 1), min(size + 1, shape[axis] + 1)))
    if rng.random() < 0.5:
        points[0], points[-1] = 0, shape[axis]
    boxes: list[Box | None] = [
        tuple(cut if dim == axis else rest[dim] for dim in range(len(shape))) for cut in pairwise(points)
    ]
    boxes += [None] * (size - len(boxes))
    rng.shuffle(boxes)
    return boxes


def toy_choices(rng: random.Random, most_tasks: int = 2) -> Choices:
    """Operators cut into few tasks; the order is nobody's business here."""
    return Choices(
        rounding=Rounding(chunk_tokens=16, page_tokens=16, slice_columns=32),
        cut=Cut(**{name: rng.choice((1, rng.randint(1, most_tasks))) for name in Cut.model_fields}),
        ring=Ring(copy_bytes=1024, stages=rng.randint(3, 6), in_flight_cap_bytes=rng.choice((None, 1024, 2048))),
        interleave=Interleave(order=("project",), router_with_project=rng.random() < 0.5),
    )


def toy_model(rng: random.Random, layers: int) -> ModelSpec:
    """Layers of a few columns, parallel or sequential, dense or routed."""
    dense = DenseMlp(kind="dense", width=32)
    routed = RoutedMlp(kind="routed", num_experts=4, top_k=2, width=32, score="softmax", renormalise=True)
    rope = Rope(theta=1e4, pairing="half")
    specs = [
        LayerSpec(window_tokens=rng.choice((None, 8)), rope=rope, mlp=rng.choice((dense, routed, routed)))
        for _ in range(layers)
    ]
    return ModelSpec(
        family="toy", block=rng.choice(("parallel", "sequential")), hidden_size=32, num_heads=2, num_kv_heads=1,
        head_dim=16, qk_norm=False, norm_eps=1e-6, vocab_size=32, tied_embeddings=True, logit_scale=1.0,
        max_context_tokens=16, eos_token_ids=(0,), layers=tuple(specs),
    )  # fmt: skip
