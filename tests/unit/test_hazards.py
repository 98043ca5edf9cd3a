"""Dependencies derived from regions are those that the mathematics of a block asks for, and no more."""

from __future__ import annotations

from support import north
from support.tiny_models import built, qwen3_moe, spec_of

from megakernel.graph import TaskGraph
from megakernel.hazards import Source, derive


def named(graph: TaskGraph) -> dict[str, tuple[set[str], set[str]]]:
    """Operator -> (what its loads wait for, what its runs wait for), as `L3.up`, `L3.project.early`, `sample-1`."""

    def name(source: Source) -> str:
        return f"{graph.ops[source.op].title}{'.early' if source.early else ''}{'-1' if source.lag else ''}"

    needs = derive(graph).needs
    return {
        op.title: ({name(s) for s in need.load}, {name(s) for s in need.run})
        for op, need in zip(graph.ops, needs, strict=True)
    }


def test_a_parallel_block_waits_for_exactly_its_mathematics() -> None:
    needs = named(north.step().graph)
    assert needs["embed"] == (set(), {"sample-1"})
    # layer 0 is dense: nothing to route
    assert needs["L0.up"] == (set(), {"embed"})
    for layer in (1, 2, 4, 48):
        before = {f"L{layer - 1}.output", f"L{layer - 1}.down"}
        assert needs[f"L{layer}.project"] == (set(), before)
        # old KV may be copied once the previous step is over; the current token is a run read
        assert needs[f"L{layer}.attend"] == ({"sample-1"}, {f"L{layer}.project"})
        assert needs[f"L{layer}.merge"] == (set(), {f"L{layer}.attend"})
        assert needs[f"L{layer}.output"] == (set(), {f"L{layer}.merge"})
        # expert addresses are known at the router's early signal, which also says that the residual is whole
        assert needs[f"L{layer}.up"] == ({f"L{layer}.project.early"}, set())
        assert needs[f"L{layer}.down"] == ({f"L{layer}.project.early"}, {f"L{layer}.up"})
    assert needs["head"] == (set(), {"L48.output", "L48.down"})
    assert needs["sample"] == (set(), {"head"})


def test_a_sequential_block_routes_after_attention() -> None:
    needs = named(built(spec_of(qwen3_moe())).graph)
    assert needs["L1.route"] == (set(), {"L1.output"})
    assert needs["L1.up"] == ({"L1.route.early"}, set())
    assert needs["L1.down"] == ({"L1.route.early"}, {"L1.up"})
    assert needs["L1.project"] == (set(), {"L0.down"})


def test_weights_are_never_waited_for() -> None:
    graph = north.step().graph
    for op, need in zip(graph.ops, derive(graph).needs, strict=True):
        if op.name in {"project", "output", "head", "merge"}:
            assert need.load == ()
