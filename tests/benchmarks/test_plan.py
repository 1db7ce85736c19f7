"""The cost model: laws it must obey, and the command that uses it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from treeprop_ray.benchmarks import cost_model as model
from treeprop_ray.benchmarks import plan
from treeprop_ray.core.grouping import grouping
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.schedule.cost import tree_cost
from treeprop_ray.schedule.ops import Layout
from treeprop_ray.schedule.tree import one_step

ROOT = Path(__file__).parent.parent.parent
FAST = model.Link("instant", float("inf"), 0.0)
FREE = model.Runtime()
FLAT = model.Device(half=0.0)  # a piece of half the size takes half the time


def block_seconds(net: model.Network) -> float:
    return FLAT.seconds(net.block_flops(net.batch), net.batch * net.tokens)


def head_seconds(net: model.Network) -> float:
    return FLAT.seconds(net.head_flops(net.batch), net.batch * net.tokens)


def test_one_device_does_all_the_work_in_a_row() -> None:
    net = model.Network(8)
    block, head = block_seconds(net), head_seconds(net)
    chain = model.pipeline_step(net, 1, 1, FLAT, FAST, FREE)
    assert chain.seconds == pytest.approx(3 * (7 * block + head)) and chain.moved == 0
    alone = model.tree_step(net, Layout.single(Tree(8)), 1, FLAT, FAST, FREE)
    assert alone.seconds == pytest.approx(3 * (11 * block + head)) and alone.moved == 0


def test_layers_of_a_block_are_priced() -> None:
    """On a device for every node the price of unit layers is the critical path; the fullest device
    has the layers of two blocks. Without groups it is the network as before."""
    coarse = model.Network(8, vocabulary=0, grouping=grouping([2, 2, 3], 2))
    tree, block = coarse.tree, block_seconds(coarse)
    layout = Layout({n: n for n in tree.nodes})
    seconds = model.tree_step(coarse, layout, 1, FLAT, FAST, FREE).seconds
    assert seconds == pytest.approx(1.5 * tree_cost(tree, Rule(objective="node")).path * block)
    graph = 2 * coarse.graph_bytes(64)  # the auxiliary block waits for its adjoint
    fullest = max(4 * model.TRAIN_BYTES * coarse.block_parameters, graph)
    assert model.tree_memory(coarse, layout, 1) >= fullest
    fine = model.Network(8, grouping=grouping([1] * 7))
    assert fine == model.Network(8) and fine.tree.N == 8


@pytest.mark.parametrize("pieces", [1, 4, 16])
def test_the_pipeline_has_the_known_bubble(pieces: int) -> None:
    """(m + S - 1) / m, for equal stages: here the head is a block like the others."""
    net = model.Network(8, vocabulary=0)
    found = model.pipeline_step(net, 4, pieces, FLAT, FAST, FREE).seconds
    assert found == pytest.approx(3 * 2 * block_seconds(net) * (pieces + 3) / pieces)


@pytest.mark.parametrize("N", [2, 8, 13, 64])
def test_unit_waves_have_the_ideal_span(N: int) -> None:
    """A node's forward is one unit and its backward one, with a device for each: 2D units."""
    tree = Tree(N)
    layout = Layout({n: n for n in tree.nodes})
    calls = one_step(tree, Rule(objective="final_ce"), layout, True)
    unit = lambda call: float(len({o.verb for o in call.ops} & {"lift", "backward"}))  # noqa: E731
    found = model.price(calls, max(tree.nodes) + 1, unit, lambda _: 0.0, FAST, FREE)
    assert found.path == 2 * tree.depth


def test_overheads_only_ever_cost() -> None:
    net, slow = model.Network(16), model.Link("slow", 1e9, 1e-3)
    layout = model.layout_for(Tree(16), 8)
    step = lambda link, ray: model.tree_step(net, layout, 2, FLAT, link, ray)  # noqa: E731
    bare = step(FAST, FREE)
    assert bare.seconds < step(FAST, model.Runtime(hop=0.01)).seconds
    assert bare.seconds < step(slow, FREE).seconds
    assert 0 < bare.wave < bare.moved
    driven = step(FAST, model.Runtime(submit=10.0))
    assert driven.seconds >= 10 * driven.calls > bare.seconds


def test_more_devices_than_lines_are_not_used() -> None:
    assert len(model.layout_for(Tree(16), 512).hosts) == 8


def test_memory_is_that_of_the_parameters_when_there_is_no_batch() -> None:
    net = model.Network(8, batch=0)
    blocks, head = 16 * net.block_parameters, 16 * net.head_parameters
    assert model.replica_memory(net, 1) == pytest.approx(7 * blocks + head)
    single = Layout.single(Tree(8))
    assert model.tree_memory(net, single, 1) == pytest.approx(11 * blocks + head)


def test_the_block_is_that_of_gpt2_large() -> None:
    net = model.Network(36)
    total = 35 * net.block_parameters + net.head_parameters
    assert total == pytest.approx(774.03e6, rel=1e-4)


def test_plan_needs_measurements_to_check_itself_against(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    result = command("bench", "plan", f"out={tmp_path}")
    assert result.code == 2 and "run bench span" in result.err and len(result.error_lines) == 1


def test_the_check_finds_the_hop_that_was_in_the_measurement() -> None:
    hop = 0.0031
    rows = [
        {
            "N": str(N),
            "t (ms)": "20",
            "tree (ms)": str(1000 * plan.emulated(N, 0.02, hop, False)),
            "chain (ms)": "0",
            "chain of few stages (ms)": str(1000 * plan.emulated(N, 0.02, hop, True)),
        }
        for N in (8, 16, 64)
    ]
    checks, found = plan.check_span(rows)
    assert found == pytest.approx(hop, rel=1e-3)
    assert plan.error_of(checks) == pytest.approx(1, rel=1e-3) and len(checks) == 6


def test_plan_writes_both_tables(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "SIZES", {"GPT-2 large": 36})
    monkeypatch.setattr(plan, "DEVICES", (8,))
    for name in ("bench_span.csv", "bench_step_ray.csv"):
        shutil.copy(ROOT / "results" / name, tmp_path)
    result = command("bench", "plan", f"out={tmp_path}")
    assert result.code == 0, result.err
    rows = plan.read(str(tmp_path), "bench_plan")
    assert [r["link"] for r in rows] == ["NVLink", "PCIe", "Ethernet"]
    assert "Nothing in this table was measured" in (tmp_path / "bench_plan.md").read_text()
    checks = plan.read(str(tmp_path), "bench_plan_check")
    (fitted,) = [r for r in checks if "fitted" in r["run"]]
    assert float(fitted["predicted / measured"]) == pytest.approx(1, abs=1e-3)


def test_copies_divide_the_batch_and_pay_for_the_exchange() -> None:
    net, link, tree = model.Network(36), plan.LINKS[-1], Tree(36)
    rest = (plan.DEVICE, link, FREE)
    one, four = (model.copies_step(net, 64, copies, 1, *rest) for copies in (1, 4))
    layout = model.layout_for(tree, 16)
    share = model.tree_step(replace(net, batch=16), layout, 1, *rest)
    assert share.seconds < four.seconds < one.seconds
    most = 4 * max(model.host_parameters(net, layout).values())
    exchange = 1.5 * most / link.bandwidth + 2 * link.latency
    assert four.seconds - share.seconds == pytest.approx(exchange)
