"""The calls of a finish: every block of a path once ahead and once back, where it lives."""

from __future__ import annotations

import pytest

from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.schedule.ops import Layout
from treeprop_ray.schedule.owner import owner_of
from treeprop_ray.schedule.placement import pack
from treeprop_ray.schedule.probe import edge_of, path_calls


@pytest.mark.parametrize("split", ["floor", "right_full"])
@pytest.mark.parametrize("N", [2, 3, 5, 8, 13])
def test_every_path_goes_over_the_owners_of_its_blocks(N: int, split: str) -> None:
    tree = Tree(N, split)
    layouts = [Layout.single(tree), Layout({n: n for n in tree.nodes})]
    layouts += [pack(tree, hosts) for hosts in (2, 3) if hosts < len(tree.nodes)]
    for layout in layouts:
        for path in tree.named_paths.values():
            calls = path_calls(tree, Rule(), layout, True, 2, path)
            for piece in (0, 1):
                there: dict[int, set[str]] = {}  # tensors, by host
                sent: set[str] = set()
                ahead, back = [], []
                for call in (c for c in calls if c.piece == piece):
                    mine = there.setdefault(call.host, set())
                    assert set(call.inputs) <= sent
                    mine |= set(call.inputs)
                    for op in call.ops:
                        assert set(op.reads) <= mine, (op, path)
                        mine |= set(op.writes)
                        if op.verb == "ahead":
                            ahead.append(edge_of(op))
                            assert call.host == layout.host_of[owner_of(tree, edge_of(op)).n]
                        if op.verb == "back":
                            back.append((int(op.writes[0][1:]), int(op.reads[0][1:])))
                    sent |= set(call.outputs)
                edges = tree.path_edges(path)[:-1]
                assert ahead == edges and back == edges[::-1]
                assert "a0" in there[layout.boundary]
