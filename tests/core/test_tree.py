import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeprop_ray.core.tree import Tree, ideal_span

trees = st.builds(Tree, st.integers(2, 300), st.sampled_from(["floor", "right_full"]))


@given(trees)
def test_edges_are_the_chain_and_N_minus_2_longer_ones(tree: Tree) -> None:
    lengths = [r - l for l, r in tree.edges]
    assert len(set(tree.edges)) == len(tree.edges) == 2 * tree.N - 2
    assert [e for e in tree.edges if e[1] - e[0] == 1] == [(i, i + 1) for i in range(tree.N)]
    assert sum(length > 1 for length in lengths) == tree.N - 2


@given(trees)
def test_every_inner_state_has_one_node_that_owns_two_edges(tree: Tree) -> None:
    assert list(tree.nodes) == list(range(1, tree.N))
    owned = [edge for node in tree.nodes.values() for edge in (node.left, node.right)]
    assert sorted(owned) == tree.edges


@given(trees)
def test_depth_is_the_logarithm(tree: Tree) -> None:
    assert tree.depth == math.ceil(math.log2(tree.N))


@given(trees)
def test_boundaries_exist_before_the_node_needs_them(tree: Tree) -> None:
    for node in tree.nodes.values():
        for end in (node.l, node.r):
            if end not in (0, tree.N):
                assert tree.nodes[end].level < node.level


@given(trees)
def test_the_head_is_one_block_for_every_edge_that_ends_at_N(tree: Tree) -> None:
    assert {tree.block_of(node.right) for node in tree.spine} == {tree.head}
    assert len(tree.blocks) == 2 * tree.N - 2 - (len(tree.spine) - 1)


def test_spine_paths_are_those_of_the_paper() -> None:
    assert Tree(8).spine_paths == [[0, 4, 8], [0, 4, 6, 8], [0, 4, 6, 7, 8]]
    assert Tree(13, "right_full").spine_paths[-1] == [0, 5, 9, 11, 12, 13]


@pytest.mark.parametrize(("N", "span"), [(8, 2.67), (13, 3.25), (25, 5.00), (37, 6.17)])
def test_ideal_span_is_that_of_the_paper(N: int, span: float) -> None:
    assert round(ideal_span(N), 2) == span


@given(trees)
def test_named_paths_are_paths(tree: Tree) -> None:
    for path in tree.named_paths.values():
        edges = tree.path_edges(path)
        assert edges[-1] == tree.head and len(edges) == len(path) - 1


def test_a_pair_that_is_no_edge_is_named() -> None:
    with pytest.raises(ValueError, match=r"0->3 is no edge.*\[1, 2, 4\]"):
        Tree(8).path_edges([0, 3, 8])
    with pytest.raises(ValueError, match="start at 0 and end at N=8"):
        Tree(8).path_edges([0, 4])


def test_a_tree_needs_two_blocks_and_a_known_split() -> None:
    with pytest.raises(ValueError, match="N=1"):
        Tree(1)
    with pytest.raises(ValueError, match="floor, right_full"):
        Tree(8, "middle")
