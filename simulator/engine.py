"""A published engine's decode step as a program: tasks of its own kinds, dealt round robin, over rings that drain.

Owns the description of such an engine (configs/engines) and its translation: static tasks go to SMs in turn with a
cursor that carries over, tiles of the device-built queues to whoever is free first, as near as bytes tell; every task
empties its SM's ring and fetches no more than a few tiles before its wait. It shares chip, memory and counters with
the tables of this project, and none of their lowering. Called by the accuracy tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Annotated

from pydantic import Field

from megakernel.config import ConfigError, Frozen
from megakernel.hardware import HardwareSpec
from megakernel.model import BF16_BYTES, DenseMlp, ModelSpec, RoutedMlp
from simulator.few_layers import runs, truncated
from simulator.program import Label, Program, Record, Ring, Wait
from simulator.simulate import simulate

Count = Annotated[int, Field(gt=0)]
Cost = Annotated[float, Field(ge=0)]
STATIC = frozenset({"project", "route", "topk", "finalize", "gather", "merge", "combine", "output", "norm"})


class EngineCosts(Frozen):
    """Nanoseconds of an engine's own work, and the share of the streaming rate that its copies reach."""

    task_ns: Cost
    hand_off_ns: Cost
    stream_share: Annotated[float, Field(gt=0, le=1)]
    attend_block_ns: Cost
    end_ns: Cost
    claim_ns: Cost
    topk_ns: Cost
    finalize_ns: Cost
    gather_ns: Cost
    merge_split_ns: Cost
    combine_ns: Cost
    norm_ns: Cost
    outside_ns: Cost


class Engine(Frozen):
    """Tiles, splits, prefetch and order of the reference engine's design; `orders` are other orders by name."""

    name: str
    copy_bytes: Count
    ring_stages: Count
    page_tokens: Count
    tile_rows: Count
    expert_tile_rows: Count
    output_splits: Count
    router_splits: Count
    split_tokens: Count
    most_splits: Count
    most_splits_long: Count
    project_ahead_bytes: Annotated[int, Field(ge=0)]
    expert_ahead_bytes: Annotated[int, Field(ge=0)]
    order: tuple[str, ...]
    orders: dict[str, tuple[str, ...]]
    costs: EngineCosts


@dataclass(frozen=True)
class Load:
    """What a step decodes: tokens of every row, and mean distinct experts of a routed layer."""

    contexts: tuple[int, ...]
    distinct_experts: float


def engine_step_ns(engine: Engine, model: ModelSpec, chip: HardwareSpec, load: Load, order: str = "") -> float:
    """Time of a step in the engine's own order or another one of its `orders`, with what runs outside its kernel."""
    rates = tuple(
        each.model_copy(update={"bytes_per_ns": each.bytes_per_ns * engine.costs.stream_share})
        for each in chip.ceilings
    )
    slower = chip.model_copy(update={"ceilings": rates})
    waves = _order(engine, order)
    return engine.costs.outside_ns + sum(
        weight * simulate(_Step(engine, truncated(model, layers), slower, load, waves).program(), slower).total_ns
        for layers, weight in runs(model).items()
    )


def _order(engine: Engine, name: str) -> tuple[str, ...]:
    if name and name not in engine.orders:
        raise ConfigError(f"{engine.name} has no order {name!r}; it has {', '.join(engine.orders)}")
    waves = engine.orders[name] if name else engine.order
    if sorted(waves) != sorted(STATIC | {"attend", "up", "down"}):
        raise ConfigError(f"{engine.name}: an order names every wave once, not {', '.join(waves)}")
    return waves


class _Step:
    """Builds the lists of one step, wave after wave."""

    def __init__(self, engine: Engine, model: ModelSpec, chip: HardwareSpec, load: Load, waves: Sequence[str]) -> None:
        self._engine, self._model, self._load, self._waves = engine, model, load, waves
        self._rows, self._sms = len(load.contexts), chip.num_sms
        self._ring = Ring(engine.copy_bytes, engine.ring_stages)
        self._lists: list[list[Record]] = [[] for _ in range(self._sms)]
        self._busy = [0] * self._sms  # bytes of this layer's attention and experts, by SM
        self._cursor = 0
        self._counters: dict[tuple[object, ...], int] = {}
        self._layer = 0

    def program(self) -> Program:
        for number, layer in enumerate(self._model.layers):
            self._layer = number
            self._busy = [0] * self._sms
            for wave in self._waves:
                if isinstance(layer.mlp, RoutedMlp):
                    getattr(self, f"_{wave}")(layer.mlp)
                elif wave in {"up", "down"}:
                    getattr(self, f"_dense_{wave}")(layer.mlp)
                elif wave in {"project", "attend", "merge", "output", "norm"}:
                    getattr(self, f"_{wave}")(layer.mlp)
        self._layer = self._model.num_layers
        tile = self._engine.tile_rows
        for _ in range(self._model.vocab_size // tile):
            self._static("head", tile * self._model.hidden_size * BF16_BYTES, self._inputs())
        return Program(self._ring, tuple(map(tuple, self._lists)), len(self._counters), arrival="release", slots=1)

    def _counter(self, *name: object) -> int:
        return self._counters.setdefault((self._layer, *name), len(self._counters))

    def _wait(self, need: int, *name: object) -> Wait:
        return Wait(self._counter(*name), need)

    def _inputs(self) -> tuple[Wait, ...]:
        """What a layer's first tasks wait for; the step's own input is there when the kernel starts."""
        return (self._wait(self._rows, "stream"),) if self._layer else ()

    def _add(  # noqa: PLR0913 - one task
        self,
        sm: int,
        kind: str,
        num_bytes: int,
        waits: tuple[Wait, ...],
        arrive: int | None,
        *,
        ahead_bytes: int = 0,
        before_ns: float = 0.0,
        copy_ns: float = 0.0,
        work_ns: float = 0.0,
    ) -> None:
        costs = self._engine.costs
        self._lists[sm].append(
            Record(
                Label(kind, layer=self._layer),
                load_bytes=num_bytes,
                load_work_ns=costs.task_ns + before_ns,
                run_waits=waits,
                work_ns=costs.hand_off_ns if waits else 0.0,
                copy_ns=copy_ns,
                compute_ns=work_ns + costs.end_ns,
                arrive=arrive,
                ahead_bytes=ahead_bytes // self._ring.copy_bytes * self._ring.copy_bytes,
            )
        )

    def _static(  # noqa: PLR0913 - one task
        self,
        kind: str,
        num_bytes: int,
        waits: tuple[Wait, ...],
        arrive: int | None = None,
        *,
        ahead_bytes: int = 0,
        copy_ns: float = 0.0,
        work_ns: float = 0.0,
    ) -> None:
        """Deal a task to the next SM in turn."""
        self._add(
            self._cursor, kind, num_bytes, waits, arrive, ahead_bytes=ahead_bytes, copy_ns=copy_ns, work_ns=work_ns
        )
        self._busy[self._cursor] += num_bytes if kind == "attend" else 0
        self._cursor = (self._cursor + 1) % self._sms

    def _claim(self, kind: str, num_bytes: int, tiles: Sequence[tuple[tuple[Wait, ...], int]]) -> None:
        """Deal tiles of a queue to the SMs that get to it first: those with the fewest bytes before it."""
        ahead = self._engine.expert_ahead_bytes if self._rows > 1 else 0
        free = [(self._busy[sm], (sm - self._cursor) % self._sms, sm) for sm in range(self._sms)]
        heapify(free)
        for waits, arrive in tiles:
            busy, turn, sm = free[0]
            self._add(sm, kind, num_bytes, waits, arrive, ahead_bytes=ahead, before_ns=self._engine.costs.claim_ns)
            self._busy[sm] = busy + num_bytes
            heapreplace(free, (self._busy[sm], turn, sm))

    def _project(self, _: object) -> None:
        model, tile = self._model, self._engine.tile_rows
        num_bytes = tile * model.hidden_size * BF16_BYTES
        for size in (model.q_size, model.kv_size, model.kv_size):
            tiles = size // tile
            for idx in range(tiles):
                head = self._counter("project", idx * model.num_kv_heads // tiles)
                self._static("project", num_bytes, self._inputs(), head, ahead_bytes=self._engine.project_ahead_bytes)

    def _projected(self, head: int) -> Wait:
        tiles = (self._model.q_size + 2 * self._model.kv_size) // self._engine.tile_rows
        return self._wait(tiles // self._model.num_kv_heads, "project", head)

    def _route(self, mlp: RoutedMlp) -> None:
        engine = self._engine
        tasks = mlp.num_experts // engine.tile_rows * engine.router_splits
        num_bytes = mlp.num_experts * self._model.hidden_size * BF16_BYTES // tasks
        for _ in range(tasks):
            self._static("route", num_bytes, self._inputs(), self._counter("route"), ahead_bytes=num_bytes)

    def _topk(self, mlp: RoutedMlp) -> None:
        tasks = mlp.num_experts // self._engine.tile_rows * self._engine.router_splits
        for _ in range(self._rows):
            waits = (self._wait(tasks, "route"),)
            self._static("topk", 0, waits, self._counter("topk"), work_ns=self._engine.costs.topk_ns)

    def _finalize(self, _: object) -> None:
        waits = (self._wait(self._rows, "topk"),)
        self._static("finalize", 0, waits, self._counter("queue"), work_ns=self._engine.costs.finalize_ns)

    def _gather(self, _: object) -> None:
        for _row in range(self._rows):
            waits = (self._wait(self._rows, "topk"),)
            self._static("gather", 0, waits, self._counter("gather"), work_ns=self._engine.costs.gather_ns)

    def _splits(self) -> list[tuple[int, int]]:
        """Tokens that each row attends to, and in how many splits."""
        engine, heads = self._engine, self._model.num_kv_heads
        layer = self._model.layers[self._layer]
        visible = [layer.attended_tokens(tokens) for tokens in self._load.contexts]
        most = engine.most_splits if max(visible) <= 65537 else engine.most_splits_long
        if layer.window_tokens is not None:
            least = -(-self._sms // (self._rows * heads))
            return [(tokens, max(1, min(least, tokens // engine.split_tokens, most))) for tokens in visible]
        pages = [-(-tokens // engine.page_tokens) for tokens in visible]
        granule = max(engine.split_tokens // engine.page_tokens, -(-heads * sum(pages) // self._sms))
        return [(tokens, max(2, min(round(num / granule), most))) for tokens, num in zip(visible, pages, strict=True)]

    def _attend(self, _: object) -> None:
        model, engine = self._model, self._engine
        first = self._cursor
        block_bytes = engine.page_tokens * 2 * model.head_dim * BF16_BYTES
        copy_ns = engine.costs.attend_block_ns * engine.copy_bytes / block_bytes
        for row, (tokens, splits) in enumerate(self._splits()):
            pages = -(-tokens // engine.page_tokens)
            for head in range(model.num_kv_heads):
                done = self._counter("split", row, head) if splits > 1 else self._counter("attend", head)
                for split in range(splits):
                    own = pages * (split + 1) // splits - pages * split // splits
                    self._static("attend", own * block_bytes, (self._projected(head),), done, copy_ns=copy_ns)
        if self._model.layers[self._layer].window_tokens is None:
            self._cursor = first  # a queue: one descriptor on every SM

    def _merge(self, _: object) -> None:
        for row, (_tokens, splits) in enumerate(self._splits()):
            if splits == 1:
                continue
            for head in range(self._model.num_kv_heads):
                waits = (self._wait(splits, "split", row, head),)
                work_ns = splits * self._engine.costs.merge_split_ns
                self._static("merge", 0, waits, self._counter("attend", head), work_ns=work_ns)

    def _up(self, mlp: RoutedMlp) -> None:
        waits = (self._wait(1, "queue"), self._wait(self._rows, "gather"))
        tiles = [(waits, self._counter("up", expert)) for expert in self._up_tiles(mlp)]
        self._claim("up", self._engine.expert_tile_rows * self._model.hidden_size * BF16_BYTES, tiles)

    def _up_tiles(self, mlp: RoutedMlp) -> list[int]:
        """Expert of every tile of gate and up rows; the last expert may be a part of one."""
        per_expert = 2 * mlp.width // self._engine.expert_tile_rows
        return [tile // per_expert for tile in range(round(self._load.distinct_experts * per_expert))]

    def _down(self, mlp: RoutedMlp) -> None:
        experts = self._up_tiles(mlp)
        queue = self._wait(1, "queue")
        waits = {expert: (queue, self._wait(experts.count(expert), "up", expert)) for expert in set(experts)}
        tiles = [(waits[expert], self._counter("down")) for expert in self._down_tiles(mlp)]
        self._claim("down", self._engine.expert_tile_rows * mlp.width * BF16_BYTES, tiles)

    def _down_tiles(self, mlp: RoutedMlp) -> list[int]:
        per_expert = self._model.hidden_size // self._engine.expert_tile_rows
        last = self._up_tiles(mlp)[-1]
        return [min(tile // per_expert, last) for tile in range(round(self._load.distinct_experts * per_expert))]

    def _combine(self, mlp: RoutedMlp) -> None:
        waits = (self._wait(len(self._down_tiles(mlp)), "down"),)
        for _row in range(self._rows):
            self._static("combine", 0, waits, self._counter("mlp"), work_ns=self._engine.costs.combine_ns)

    def _dense_up(self, mlp: DenseMlp) -> None:
        tile = self._engine.expert_tile_rows
        for _ in range(2 * mlp.width // tile):
            num_bytes = tile * self._model.hidden_size * BF16_BYTES
            self._static("dense up", num_bytes, self._inputs(), self._counter("dense up"))

    def _dense_down(self, mlp: DenseMlp) -> None:
        tile, width = self._engine.tile_rows, mlp.width // 2  # two splits of K
        waits = (self._wait(2 * mlp.width // self._engine.expert_tile_rows, "dense up"),)
        for _ in range(2 * self._model.hidden_size // tile):
            self._static("dense down", tile * width * BF16_BYTES, waits, self._counter("mlp"))

    def _output(self, _: object) -> None:
        model, engine = self._model, self._engine
        num_bytes = engine.tile_rows * model.q_size // engine.output_splits * BF16_BYTES
        for _tile in range(model.hidden_size // engine.tile_rows):
            for split in range(engine.output_splits):
                head = split * model.num_kv_heads // engine.output_splits
                self._static("output", num_bytes, (self._wait(self._rows, "attend", head),), self._counter("output"))

    def _norm(self, mlp: DenseMlp | RoutedMlp) -> None:
        tasks = self._model.hidden_size // self._engine.tile_rows
        mlp_done = self._rows if isinstance(mlp, RoutedMlp) else 2 * tasks
        waits = (self._wait(mlp_done, "mlp"), self._wait(tasks * self._engine.output_splits, "output"))
        self._layer += 1
        arrive = self._counter("stream")
        self._layer -= 1
        for _row in range(self._rows):
            self._static("norm", 0, waits, arrive, work_ns=self._engine.costs.norm_ns)
