"""The cost model and the planner: laws they must obey, on devices of one speed and of several."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeprop_ray import config
from treeprop_ray.core.grouping import grouping
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.schedule import planner, steps
from treeprop_ray.schedule.auto import choose, undecided, with_copies
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.cost import tree_cost
from treeprop_ray.schedule.ops import Layout
from treeprop_ray.schedule.placement import lines, pack, plan_tree, stages
from treeprop_ray.schedule.planner import DATA, ONE_F_ONE_B, TREE, ZERO_BUBBLE, Fleet
from treeprop_ray.schedule.pricing import ETHERNET, FREE, Link, Runtime, price
from treeprop_ray.schedule.tree import one_step
from treeprop_ray.schedule.workload import TRAIN_BYTES, Device, Network, Part, Workload

FAST = Link("instant", float("inf"), 0.0)
FLAT = Device(half=0.0)  # a piece of half the size takes half the time


def fleet(count: int, link: Link = FAST, ray: Runtime = FREE) -> Fleet:
    return Fleet((1.0,) * count, link, ray)


def even(N: int, t: float = 1.0, batch: int = 8) -> Workload:
    """Blocks of t seconds for the whole batch, the head is one of them; nothing else costs."""
    part = Part(0.0, t / batch, 1.0, 0.0)
    return Workload.even(Tree(N), batch, part, part, 0.0)


def test_one_device_does_all_the_work_in_a_row() -> None:
    work = Network(8).on(FLAT)
    block, head = (part.forward(64) for part in (work.block, work.head))
    chain = steps.pipeline_step(work, 1, 1, FAST, FREE)
    assert chain.seconds == pytest.approx(3 * (7 * block + head)) and chain.moved == 0
    alone = steps.tree_step(work, Layout.single(Tree(8)), 1, FAST, FREE)
    assert alone.seconds == pytest.approx(3 * (11 * block + head)) and alone.moved == 0
    assert steps.replica_step(work, 1, FAST) == pytest.approx(chain.seconds)
    assert steps.zero_bubble_step(work, 1, 4, FAST) == pytest.approx(chain.seconds)


def test_layers_of_a_block_are_priced() -> None:
    """On a device for every node the price of unit layers is the critical path; the fullest device
    has the layers of two blocks. Without groups it is the network as before."""
    coarse = Network(8, vocabulary=0, grouping=grouping([2, 2, 3], 2))
    work, tree = coarse.on(FLAT), coarse.tree
    block = FLAT.part(coarse.block_flops, 1, 0, 0).forward(64)
    layout = Layout({n: n for n in tree.nodes})
    seconds = steps.tree_step(work, layout, 1, FAST, FREE).seconds
    assert seconds == pytest.approx(1.5 * tree_cost(tree, Rule(objective="node")).path * block)
    assert steps.tree_memory(work, layout, 1) >= 4 * TRAIN_BYTES * coarse.block_parameters
    fine = Network(8, grouping=grouping([1] * 7))
    assert fine == Network(8) and fine.tree.N == 8


@pytest.mark.parametrize("pieces", [1, 4, 16])
def test_the_pipeline_has_the_known_bubble(pieces: int) -> None:
    """(m + S - 1) / m, for equal stages: here the head is a block like the others."""
    work = even(8, batch=16)
    found = steps.pipeline_step(work, 4, pieces, FAST, FREE).seconds
    assert found == pytest.approx(3 * 2 * (pieces + 3) / pieces)


@given(st.integers(1, 8), st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_zero_bubble_is_between_its_work_and_one_forward_one_backward(S: int, m: int) -> None:
    work = even(16, batch=32)
    found = steps.zero_bubble_step(work, S, m, FAST)
    busiest = max(map(len, stages(Tree(16), S)))
    plain = steps.pipeline_step(work, S, m, FAST, FREE).seconds
    assert 3 * busiest - 1e-9 <= found <= plain + busiest / m + 1e-9
    alone = steps.zero_bubble_step(work, S, 1, FAST)  # one piece: down, up, and weights at the end
    assert alone == pytest.approx(2 * 16 + busiest) or S == 1


@pytest.mark.parametrize("N", [2, 8, 13, 64])
def test_unit_waves_have_the_ideal_span(N: int) -> None:
    """A node's forward is one unit and its backward one, with a device for each: 2D units."""
    tree = Tree(N)
    layout = Layout({n: n for n in tree.nodes})
    calls = one_step(tree, Rule(objective="final_ce"), layout, True)
    unit = lambda call: float(len({o.verb for o in call.ops} & {"lift", "backward"}))  # noqa: E731
    found = price(calls, max(tree.nodes) + 1, unit, lambda _: 0.0, FAST, FREE)
    assert found.path == 2 * tree.depth


def test_overheads_only_ever_cost() -> None:
    work, slow = Network(16).on(FLAT), Link("slow", 1e9, 1e-3)
    layout = steps.layout_for(work.tree, 8)
    step = lambda link, ray: steps.tree_step(work, layout, 2, link, ray)  # noqa: E731
    bare = step(FAST, FREE)
    assert bare.seconds < step(FAST, Runtime(hop=0.01)).seconds
    assert bare.seconds < step(slow, FREE).seconds
    assert 0 < bare.wave < bare.moved
    driven = step(FAST, Runtime(submit=10.0))
    assert driven.seconds >= 10 * driven.calls > bare.seconds


def test_memory_is_that_of_the_parameters_when_there_is_no_batch() -> None:
    net = Network(8, batch=0)
    work = net.on(FLAT)
    blocks, head = 16 * net.block_parameters, 16 * net.head_parameters
    assert steps.replica_memory(work, 1) == pytest.approx(7 * blocks + head)
    assert steps.tree_memory(work, Layout.single(Tree(8)), 1) == pytest.approx(11 * blocks + head)
    assert steps.pipeline_memory(work, 1, 1) == pytest.approx(7 * blocks + head)


def test_the_block_is_that_of_gpt2_large() -> None:
    net = Network(36)
    total = 35 * net.block_parameters + net.head_parameters
    assert total == pytest.approx(774.03e6, rel=1e-4)


def test_copies_divide_the_batch_and_pay_for_the_exchange() -> None:
    work = Network(36).on(Device())
    one, four = (planner.tree(work, fleet(64, ETHERNET), copies) for copies in (1, 4))
    layout = steps.layout_for(work.tree, 16)
    share = steps.tree_step(replace(work, batch=16), layout, 1, ETHERNET, FREE)
    assert share.seconds < four.seconds < one.seconds and four.devices == 64
    most = 4 * max(steps.host_parameters(work, layout).values())
    exchange = 1.5 * most / ETHERNET.bandwidth + 2 * ETHERNET.latency
    assert four.seconds - share.seconds == pytest.approx(exchange)


def test_every_way_uses_no_more_devices_than_there_are() -> None:
    work = Network(13).on(Device())
    for count in (1, 2, 6, 24):
        found = planner.fastest(work, fleet(count, ETHERNET))
        assert all(c.devices <= count for c in found.values())
        assert planner.winner(found, float("inf")) == min(found, key=lambda w: found[w].seconds)
    assert planner.winner(found, 1.0) == ""  # nothing fits into a byte


def test_what_does_not_fit_is_chosen_only_if_nothing_does() -> None:
    work = Network(36).on(Device())
    roomy = planner.fastest(work, fleet(8, ETHERNET), [DATA, ONE_F_ONE_B])
    small = replace(fleet(8, ETHERNET), memory=roomy[DATA].memory * 0.6)
    assert planner.winner(planner.fastest(work, small), small.memory) != DATA


# -- devices of several speeds ------------------------------------------------------------------


@given(st.integers(4, 40), st.lists(st.sampled_from([1.0, 0.5, 0.25]), min_size=2, max_size=6))
def test_lines_stay_whole_on_devices_of_several_speeds(N: int, some: list[float]) -> None:
    speeds, tree = tuple(sorted(some, reverse=True)), Tree(N)
    layout = pack(tree, min(len(speeds), len(lines(tree))), speeds)
    for line in lines(tree):
        assert len({layout.host_of[node.n] for node in line}) == 1
    assert all(layout.host_of[node.n] == layout.boundary == 0 for node in tree.spine)


@pytest.mark.parametrize("N", [16, 32, 64, 128])
@pytest.mark.parametrize("speeds", [(1.0, 1.0, 0.5, 0.5), (1.0, 0.25, 0.25), (1.0, 0.4)])
def test_lines_dealt_out_by_speed_are_faster(N: int, speeds: tuple[float, ...]) -> None:
    """Than the same lines dealt out as if all devices were alike."""
    work, count = even(N), len(speeds)
    mine, alike = (
        steps.tree_step(work, layout, 1, FAST, FREE, speeds).seconds
        for layout in (pack(work.tree, count, speeds), pack(work.tree, count))
    )
    assert mine < alike


def test_the_slow_half_gets_fewer_lines() -> None:
    tree = Tree(64)
    layout = pack(tree, 4, (1.0, 1.0, 0.25, 0.25))
    held = [sum(h == host for h in layout.host_of.values()) for host in range(4)]
    assert max(held[2:]) < min(held[:2])
    assert pack(tree, 4, (1.0,) * 4) == pack(tree, 4)


def test_stages_follow_the_speeds_and_keep_a_block_each() -> None:
    lengths = [len(cut) for cut in stages(Tree(12), 3, (1.0, 0.5, 0.5))]
    assert lengths == [6, 3, 3]
    assert [len(c) for c in stages(Tree(4), 4, (1.0, 0.01, 0.01, 0.01))] == [1, 1, 1, 1]
    assert stages(Tree(12), 3, (0.5,) * 3) == stages(Tree(12), 3)


def test_a_device_that_is_too_slow_is_left_out() -> None:
    work = even(8)
    crawling = Fleet.of([1.0, 0.001, 1.0], FAST, FREE, float("inf"))
    for way, c in planner.fastest(work, crawling).items():
        assert c.devices <= 2, way
        assert c.seconds < 3 * 12, way


def test_actors_sit_on_devices_by_speed() -> None:
    """Two fast GPUs, two slow ones, a machine without GPUs: the boundary's lines on the fastest,
    twins side by side; the CPU-only machine has no speed and no actor."""
    cluster = Cluster(((4.0, 2.0), (8.0, 0.0), (4.0, 2.0)), (0.4, 0.0, 1.0), ("a", "b", "c"))
    settings = config.load(["engine=ray", "placement=packed", "hosts=2", "replicas=2"])
    plan = plan_tree(settings, Tree(8), cluster, "run")
    assert [seat.id for seat in plan.seats] == ["c", "a", "c", "a"]  # copy 0, copy 1
    assert plan.selectors[0] == {"ray.io/node-id": "c"} and plan.device == "cuda"
    assert plan.layout == replace(pack(Tree(8), 2, (1.0, 0.4)), one_machine=False)
    cores = Cluster(((4.0, 1.0), (2.0, 0.0)), (1.0, 0.2), ("a", "b"))
    settings = config.load(["engine=ray", "placement=packed", "hosts=3"])
    plan = plan_tree(settings, Tree(8), cores, "run")
    assert plan.bundles == [{"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0}, {"CPU": 1.0}]
    assert [plan.seen_by(k).device for k in range(3)] == ["cuda", "cpu", "cpu"]
    even_cluster = Cluster(((4.0, 2.0), (4.0, 2.0)))
    assert not plan_tree(settings, Tree(8), even_cluster, "run").selectors


# -- placement=auto --------------------------------------------------------------------------------


def settings_of(*words: str) -> config.Settings:
    return config.load(["engine=ray", *words])


def test_auto_keeps_the_pieces_of_a_batch() -> None:
    counts = [(s.replicas, s.microbatches) for s in with_copies(settings_of("microbatches=6"))]
    assert counts == [(1, 6), (2, 3), (3, 2), (6, 1)]
    (kept,) = with_copies(settings_of("microbatches=4", "replicas=2"))
    assert (kept.replicas, kept.microbatches) == (2, 4)
    for pieces in (1, 4, 12):
        given = settings_of(f"microbatches={pieces}", "batch=64")
        copies = [s.replicas for s in with_copies(given)]
        chosen = choose(given, even(8, 10.0, 64), Cluster(((16.0, 0.0),)), copies).settings
        assert chosen.replicas * chosen.microbatches == pieces and chosen.placement != "auto"


def test_auto_is_one_actor_where_hops_cost_more_than_blocks_and_many_where_they_do_not() -> None:
    cluster = Cluster(((8.0, 0.0),))
    short, long = (choose(settings_of(), even(8, t), cluster) for t in (1e-5, 1.0))
    assert (short.settings.placement, short.settings.hosts) == ("packed", 1)
    assert len(plan_tree(long.settings, Tree(8), cluster, "r").names) >= 4
    assert "1F1B" in long.why[-1] and DATA in long.why[-1] and ZERO_BUBBLE in long.why[-1]
    predicted = planner.auto(even(8), Fleet.on(cluster), [1], 1)
    assert predicted[0].seconds == min(c.seconds for c in predicted) and predicted[0].way == TREE


def test_what_the_settings_say_is_not_planned_anew() -> None:
    assert undecided(settings_of())
    for word in ("hosts=2", "placement=packed", "head_copies=1", "elastic=true"):
        assert not undecided(settings_of(word)), word


def test_devices_that_stay_idle_are_named_with_what_would_use_them() -> None:
    """And what is named is what the planner then chooses."""
    cluster, work = Cluster(((64.0, 64.0),) * 2), even(32, 0.1, 64)
    idle = choose(settings_of("batch=64"), work, cluster)
    (line,) = [line for line in idle.why if "idle:" in line]
    words, used, seconds = re.findall(
        r"(microbatches=\d+) would use (\d+) .*: (\S+ ms) inst", line
    )[0]
    given = settings_of("batch=64", words)
    better = choose(given, work, cluster, [s.replicas for s in with_copies(given)])
    assert better.settings.replicas * better.settings.hosts == int(used) <= 128
    assert seconds in better.why[0] and int(used) > idle.settings.hosts
    held = choose(settings_of("batch=64"), work, cluster, suits=lambda s: s.replicas == 1)
    assert not any("copies):" in line for line in held.why if "idle:" in line)
    few = choose(settings_of("batch=64"), work, Cluster(((8.0, 2.0),)))
    assert not any("idle:" in line for line in few.why)


def test_a_hop_is_priced_as_that_of_its_transport() -> None:
    cluster = Cluster(((8.0, 0.0),))
    store, stream, auto = (Fleet.on(cluster, t).ray for t in ("store", "stream", "auto"))
    assert auto == stream and stream.hop < store.hop / 5 and stream.submit == 0
