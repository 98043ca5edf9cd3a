"""Placement deals every task once, keeps the order of phases, and balances what it is told to balance."""

from __future__ import annotations

import numpy as np
from support import north
from support.tiny_models import built, choices_for, cohere2_moe, spec_of

from megakernel.kinds import Path
from megakernel.placement import place


def test_the_hand_plan_is_balanced_to_less_than_one_task() -> None:
    step = north.step()
    schedule = place(step.graph, step.choices.interleave, 132)
    weights = [task.weight for op in step.graph.ops for task in op.tasks]
    loads = [sum(weights[task] for task in tasks) for tasks in schedule.sms]
    assert max(loads) - min(loads) <= max(weights)


def test_every_list_keeps_the_order_of_layers_and_phases() -> None:
    step = north.step()
    order = step.choices.interleave.order
    titles = [op for op in step.graph.ops for _ in op.tasks]
    for tasks in place(step.graph, step.choices.interleave, 132).sms:
        inside = [titles[task] for task in tasks if titles[task].layer >= 0]
        keys = [(op.layer, order.index(op.name)) for op in inside]
        assert keys == sorted(keys)


def test_round_robin_deals_task_k_to_sm_k_with_one_cursor() -> None:
    step = north.step("reference")
    schedule = place(step.graph, step.choices.interleave, 132)
    lengths = [len(tasks) for tasks in schedule.sms]
    assert max(lengths) - min(lengths) <= 1
    assert sorted(task for tasks in schedule.sms for task in tasks) == list(range(step.graph.num_tasks))


def test_groups_hold_their_path_and_takeover_opens_the_tail() -> None:
    spec = spec_of(cohere2_moe())
    for takeover in (0, 50):
        choices = choices_for(spec, attention_sms=1, takeover_percent=takeover)
        graph = built(spec, choices=choices).graph
        path = [op.path for op in graph.ops for _ in op.tasks]
        lists = place(graph, choices.interleave, 4).sms
        strangers = sum(path[task] is Path.MLP for task in lists[0])
        assert (strangers == 0) == (takeover == 0)


def test_parts_of_an_operator_stand_where_the_order_says() -> None:
    spec = spec_of(cohere2_moe())
    order = ("project", "up:1/2", "attend", "up:2/2", "merge", "down", "output")
    choices = choices_for(spec, order=order)
    graph = built(spec, choices=choices).graph
    ops = [op for op in graph.ops for _ in op.tasks]
    first = dict(zip([op.title for op in graph.ops], graph.first_task, strict=True))["L1.up"]
    for tasks in place(graph, choices.interleave, 2).sms:
        layer = [task for task in tasks if ops[task].layer == 1]
        attends = [at for at, task in enumerate(layer) if ops[task].name == "attend"]
        for at, task in enumerate(layer):
            if ops[task].name == "up":
                early = task - first < 2
                assert all((at < other) == early for other in attends)


def test_the_same_choices_give_the_same_bytes() -> None:
    spec = spec_of(cohere2_moe())
    assert built(spec).table.digest == built(spec).table.digest
    assert built(spec).table.digest != built(spec, rows=2).table.digest
    assert np.array_equal(built(spec).table.offsets, built(spec).table.offsets)
