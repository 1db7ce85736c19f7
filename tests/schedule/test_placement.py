"""Placement: pure plans, and actors that land where the plan says on a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Result
from hypothesis import given
from hypothesis import strategies as st

from treeprop_ray import config
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError
from treeprop_ray.schedule.cluster import Cluster, share
from treeprop_ray.schedule.placement import check_fits, lines, pack, plan_tree, stages
from treeprop_ray.schedule.tree import one_step

trees = st.builds(Tree, st.integers(2, 130), st.sampled_from(["floor", "right_full"]))


@given(trees)
def test_half_as_many_lines_as_blocks_serve_all_nodes(tree: Tree) -> None:
    found = lines(tree)
    assert sorted(n.n for line in found for n in line) == list(tree.nodes)
    assert len(found) <= max(1, tree.N // 2)
    assert found[0] == tree.spine
    for line in found:  # nodes of a line never work at the same time
        assert [n.level for n in line] == list(range(line[0].level, line[0].level + len(line)))


@given(trees, st.integers(1, 9))
def test_packed_keeps_the_spine_at_the_boundary_and_lines_together(tree: Tree, hosts: int) -> None:
    layout = pack(tree, hosts)
    assert all(layout.host_of[n.n] == layout.boundary for n in tree.spine)
    for line in lines(tree):
        assert len({layout.host_of[n.n] for n in line}) == 1
    assert set(layout.host_of.values()) <= set(range(hosts))


@pytest.mark.parametrize(("N", "hosts"), [(8, 2), (13, 2), (16, 4), (37, 4), (64, 2), (64, 8)])
def test_packed_hosts_hold_subtrees_and_exchange_little(N: int, hosts: int) -> None:
    """Per host but the first: both boundary states in, the adjoints of its top out."""
    tree = Tree(N)
    calls = one_step(tree, Rule(), pack(tree, hosts), stem_trains=True)
    assert sum(len(call.inputs) for call in calls) <= 3 * (hosts - 1)


def test_packed_balances_the_finest_level() -> None:
    tree = Tree(64)
    layout = pack(tree, 4)
    finest = [layout.host_of[n.n] for n in tree.level(tree.depth)]
    assert max(finest.count(h) for h in range(4)) <= 9


@given(trees, st.integers(1, 20))
def test_stages_are_the_chain_in_order(tree: Tree, count: int) -> None:
    cuts = stages(tree, min(count, tree.N))
    assert [e for cut in cuts for e in cut] == tree.path_edges(tree.chain)
    assert all(cuts)


def settings(*words: str) -> config.Settings:
    return config.load(["engine=ray", *words])


def test_auto_is_per_node_only_when_every_node_can_have_a_device() -> None:
    tree = Tree(8)
    assert len(plan_tree(settings(), tree, Cluster(((8.0, 0.0),)), "r").names) == 8
    assert len(plan_tree(settings(), tree, Cluster(((2.0, 0.0),)), "r").names) == 2
    gpus = plan_tree(settings(), tree, Cluster(((64.0, 4.0),)), "r")
    assert (len(gpus.names), gpus.gpus, gpus.device) == (4, 1.0, "cuda")
    assert plan_tree(settings("device=cpu"), tree, Cluster(((64.0, 4.0),)), "r").gpus == 0


def test_devices_are_shared_in_equal_parts_when_there_are_fewer_than_actors() -> None:
    made = plan_tree(
        settings("placement=per_node"), Tree(8), Cluster(((4.0, 2.0), (4.0, 2.0))), "r"
    )
    assert (made.cpus, made.gpus) == (1.0, 0.5)
    assert share([2.0], 8) == 0.25
    assert share([1.0, 1.0, 1.0], 8) == 0.3333
    assert share([3.0], 2) == 1.0


def test_names_tell_the_node() -> None:
    made = plan_tree(settings("placement=per_node"), Tree(3), Cluster(((9.0, 0.0),)), "run")
    assert made.names == ("run/boundary", "run/node-1", "run/node-2")


@pytest.mark.parametrize(
    ("words", "cluster", "message"),
    [
        (
            ["placement=per_node", "cpus_per_actor=1"],
            ((2.0, 0.0),),
            r"8 actors x \(1 CPU \+ 0 GPU\) = 8 CPUs, but the cluster has 2 CPUs",
        ),
        (
            ["placement=packed", "hosts=4", "gpus_per_actor=1"],
            ((16.0, 2.0), (16.0, 1.0)),
            "4 actors .* = 4 GPUs, .* room for 3 actors",
        ),
        (["gpus_per_actor=0.75", "hosts=2", "placement=packed"], ((8.0, 1.0),), "room for 1"),
        (
            ["gpus_per_actor=1.5", "hosts=2", "placement=packed"],
            ((8.0, 4.0),),
            "only whole numbers",
        ),
        (["placement=packed", "hosts=9"], ((32.0, 0.0),), "hosts=9: the tree has only 7 nodes"),
        (
            ["strategy=STRICT_SPREAD", "placement=packed", "hosts=3"],
            ((8.0, 0.0), (8.0, 0.0)),
            "3 actors, but only 2 Ray nodes",
        ),
        (
            ["strategy=STRICT_PACK", "placement=packed", "hosts=3", "cpus_per_actor=4"],
            ((8.0, 0.0), (8.0, 0.0)),
            "no Ray node has room",
        ),
    ],
)
def test_a_plan_that_cannot_fit_says_what_is_missing(
    words: list[str], cluster: tuple[tuple[float, float], ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        plan_tree(settings(*words), Tree(8), Cluster(cluster), "r")


def test_whole_gpus_larger_than_one_are_allowed() -> None:
    made = plan_tree(
        settings("gpus_per_actor=2", "placement=packed", "hosts=2"),
        Tree(8),
        Cluster(((8.0, 4.0),)),
        "r",
    )
    check_fits(made, Cluster(((8.0, 4.0),)))
    assert made.bundles == [{"CPU": 1.0, "GPU": 2.0}] * 2


def test_cfg_prints_the_plan(command: Callable[..., Result], tmp_path: Path) -> None:
    words = ["engine=ray", "placement=per_node", "ray.num_cpus=4", f"out={tmp_path / 'x'}"]
    result = command("train", "--cfg", *words)
    rows = [line.split() for line in result.out.splitlines() if line.startswith("#")]
    nodes = {row[1]: row for row in rows if row[1].isdigit()}
    assert list(nodes) == ["4", "2", "6", "1", "3", "5", "7"]
    assert nodes["2"][2:] == ["2", nodes["2"][3], "0.5", "CPU", "8,320"]
    assert nodes["2"][3].endswith("node-2")
    assert not (tmp_path / "x").exists()


def test_a_plan_that_cannot_fit_is_bad_input(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    """It fails when Ray's resources are known, before any actor starts."""
    words = ["engine=ray", "cpus_per_actor=3", "hosts=2", "placement=packed", "ray.num_cpus=2"]
    result = command("train", *words, f"out={tmp_path / 'x'}")
    assert result.code == 2 and len(result.error_lines) == 1
    assert "2 actors x (3 CPU + 0 GPU) = 6 CPUs" in result.err
    assert not (tmp_path / "x").exists()
