"""The wave schedule as a law, over trees, rules, placements and micro-batches."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeprop_ray.core.rule import Rule, cut
from treeprop_ray.core.tree import Tree
from treeprop_ray.schedule.chain import one_chain_step
from treeprop_ray.schedule.ops import Call, Layout
from treeprop_ray.schedule.placement import pack
from treeprop_ray.schedule.tree import one_piece, one_step


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tree, Rule, Layout, bool]:
    tree = Tree(draw(st.integers(2, 70)), draw(st.sampled_from(["floor", "right_full"])))
    rule = Rule(
        objective=draw(st.sampled_from(["final_ce", "node", "node_all_ce"])),
        beta=draw(st.sampled_from([0.0, 0.5])),
        target_gradient=draw(st.booleans()),
        detach_levels=draw(st.booleans()),
        input=draw(st.sampled_from(["mean", "sample"])),
        ce_at=draw(st.sampled_from(["mean", "sample"])),
        levels=draw(st.sampled_from(["all", "finest"])),
    )
    kind = draw(st.sampled_from(["single", "per_node", "random"]))
    hosts = draw(st.integers(1, 5))
    if kind == "per_node":
        layout = Layout({n: n for n in tree.nodes})
    elif kind == "single":
        layout = Layout.single(tree)
    else:
        layout = Layout({n: draw(st.integers(0, hosts - 1)) for n in tree.nodes})
    layout = Layout(layout.host_of, layout.boundary, one_machine=draw(st.booleans()))
    return tree, rule, layout, draw(st.booleans())


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(1, 5), st.booleans())
def test_every_input_was_produced_before(
    case: tuple[Tree, Rule, Layout, bool], pieces: int, gathered: bool
) -> None:
    tree, rule, layout, stem_trains = case
    sent: set[tuple[int, str]] = set()
    packets: dict[tuple[int, str], tuple[str, ...]] = {}
    held: set[tuple[int, int, str]] = set()
    for call in one_step(tree, rule, layout, stem_trains, pieces, gathered):
        for name in call.inputs:
            assert (call.piece, name) in sent
            held.update((call.host, call.piece, fellow) for fellow in packets[call.piece, name])
        for op in call.ops:
            for name in op.reads:
                assert (call.host, call.piece, name) in held
            held.update((call.host, call.piece, name) for name in op.writes)
        for packet in call.packets:
            for name in packet:
                assert (call.host, call.piece, name) in held
                sent.add((call.piece, name))
                packets[call.piece, name] = packet


@settings(max_examples=200, deadline=None)
@given(cases())
def test_one_call_per_host_level_and_phase(case: tuple[Tree, Rule, Layout, bool]) -> None:
    calls = [c for _, wave in one_piece(*case) for c in wave]
    assert max(Counter((c.host, c.level, c.phase) for c in calls).values()) == 1


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_node_goes_forward_and_backward_once(case: tuple[Tree, Rule, Layout, bool]) -> None:
    tree = case[0]
    verbs = Counter((op.verb, op.n) for _, wave in one_piece(*case) for c in wave for op in c.ops)
    for n in tree.nodes:
        assert verbs["lift", n] == verbs["settle", n] == verbs["backward", n] == 1
    assert max(verbs.values()) == 1


@settings(max_examples=100, deadline=None)
@given(cases(), st.booleans())
def test_the_last_call_of_a_host_is_marked(
    case: tuple[Tree, Rule, Layout, bool], gathered: bool
) -> None:
    calls = [c for _, wave in one_piece(*case, gathered=gathered) for c in wave]
    for host in {c.host for c in calls}:
        marks = [c.last for c in calls if c.host == host]
        assert marks == [False] * (len(marks) - 1) + [True]


@settings(max_examples=200, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_gathering_keeps_every_node_in_order_and_nobody_waits_longer(
    case: tuple[Tree, Rule, Layout, bool], random: Random
) -> None:
    by_level = one_step(*case, gathered=False)
    gathered = one_step(*case, gathered=True)
    assert len(gathered) <= len(by_level)
    for n in (0, *case[0].nodes):
        verbs = [
            [op.verb for c in calls for op in c.ops if op.n == n] for calls in (by_level, gathered)
        ]
        assert verbs[0] == verbs[1]
    price = {(op.verb, op.n): random.randrange(9) for c in by_level for op in c.ops}

    def arrivals(calls: list[Call]) -> dict[str, int]:
        """When each tensor that travels has been made; "" is the end of the step."""
        free: dict[int, int] = {}
        made: dict[str, int] = {}
        for c in calls:
            begin = max([free.get(c.host, 0), *(made[name] for name in c.inputs)])
            free[c.host] = begin + sum(price[op.verb, op.n] for op in c.ops)
            made.update(dict.fromkeys(c.outputs, free[c.host]))
        return {**made, "": max(free.values())}

    slow, fast = arrivals(by_level), arrivals(gathered)
    assert all(fast[name] <= when for name, when in slow.items())


@pytest.mark.parametrize("N", [2, 3, 8, 13, 16, 37, 64, 128])
@pytest.mark.parametrize("gathered", [True, False])
def test_two_packed_hosts_need_at_most_two_calls_per_wave(N: int, gathered: bool) -> None:
    tree = Tree(N)
    calls = one_step(tree, Rule(objective="node_all_ce"), pack(tree, 2), True, gathered=gathered)
    assert len(calls) <= 2 * (2 * tree.depth - 1)


def span(calls: list[Call]) -> int:
    """Longest chain of node steps; a forward or backward of a level counts one, FB counts two."""
    finish: dict[str, int] = {}
    latest = 0
    for call in calls:
        verbs = {op.verb for op in call.ops}
        begin = max(
            (finish[name] for op in call.ops for name in op.reads if name in finish), default=0
        )
        cost = ("lift" in verbs) + ("backward" in verbs)
        for op in call.ops:
            for name in op.writes:
                finish[name] = begin + (1 if name[0] in "zm" else cost)
        latest = max(latest, begin + cost)
    return latest


@pytest.mark.parametrize("N", [2, 3, 5, 8, 13, 16, 37, 64, 128])
@pytest.mark.parametrize("split", ["floor", "right_full"])
def test_the_critical_path_has_2D_waves(N: int, split: str) -> None:
    tree = Tree(N, split)
    rule = Rule(objective="node_all_ce", beta=0.5)
    waves = one_piece(tree, rule, Layout.single(tree), stem_trains=True)
    assert span([c for _, wave in waves for c in wave]) == 2 * tree.depth
    # forward and backward of the finest level are one call
    assert len(waves) == 2 * tree.depth - 1


@given(st.integers(2, 200), st.sampled_from(["floor", "right_full"]))
def test_at_most_half_the_nodes_work_at_a_time(N: int, split: str) -> None:
    tree = Tree(N, split)
    waves = one_piece(tree, Rule(), Layout({n: n for n in tree.nodes}), True)
    forward = [sum(len(c.nodes) for c in wave) for _, wave in waves if wave[0].phase == "forward"]
    assert max(forward) <= max(1, N // 2)


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 12))
def test_in_flight_pieces_are_bounded_by_the_depth(
    case: tuple[Tree, Rule, Layout, bool], pieces: int
) -> None:
    """However many pieces a batch is cut into, few hold activations at the same time."""
    open_: set[int] = set()
    most = 0
    remaining = Counter(c.piece for c in one_step(*case, pieces))
    for call in one_step(*case, pieces):
        open_.add(call.piece)
        most = max(most, len(open_))
        remaining[call.piece] -= 1
        if not remaining[call.piece]:
            open_.remove(call.piece)
    assert most <= 2 * case[0].depth


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(1, 6))
def test_head_and_stem_meet_levels_and_pieces_in_the_same_order_everywhere(
    case: tuple[Tree, Rule, Layout, bool], pieces: int
) -> None:
    """So gradients of weights that they share add up in the same order, to the bit.

    The spine lives either with the boundary or away from it, never partly (placement.py).
    """
    tree, rule, layout, stem_trains = case
    spine = {node.n for node in tree.spine}
    hosts = {n: max(1, h) if n in spine else h for n, h in layout.host_of.items()}
    if layout.host_of[tree.root.n] == layout.boundary:
        hosts.update(dict.fromkeys(spine, layout.boundary))
    layout = Layout(hosts, layout.boundary)

    def order(layout: Layout) -> list[tuple[int, int]]:
        calls = one_step(tree, rule, layout, stem_trains, pieces)
        ops = [(c.piece, op) for c in calls for op in c.ops if op.verb in ("head", "close")]
        return [(piece, op.n) for piece, op in ops if op.verb == "close" or learns(op.n)]

    def learns(n: int) -> bool:
        """ce_at=sample: only heads that train are asked at z_n; for the others no order matters."""
        return rule.ce_at == "mean" or rule.ce_weight(tree, tree.nodes[n]) > 0

    assert order(layout) == order(Layout.single(tree))


@given(st.integers(1, 20), st.integers(0, 300))
def test_pieces_cover_the_batch_and_are_nearly_equal(pieces: int, more: int) -> None:
    total = pieces + more
    found = cut(0, total, pieces)
    assert [i for p in found for i in p.places] == list(range(total))
    sizes = [len(p.places) for p in found]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 9), st.integers(1, 6), st.booleans())
def test_chain_inputs_were_produced_before_and_every_stage_goes_both_ways(
    stages: int, pieces: int, stem_trains: bool
) -> None:
    sent: set[tuple[int, str]] = set()
    verbs: Counter[tuple[str, int]] = Counter()
    for call in one_chain_step(stages, stem_trains, pieces):
        assert all((call.piece, name) in sent for name in call.inputs)
        sent.update((call.piece, name) for name in call.outputs)
        verbs.update((op.verb, op.n) for op in call.ops)
    for k in range(stages):
        assert verbs["ahead", k] == verbs["back", k] == pieces
    assert verbs["head", stages - 1] == verbs["open", 0] == pieces


def test_nothing_travels_inside_one_host() -> None:
    tree = Tree(13)
    for call in one_step(tree, Rule(beta=0.5), Layout.single(tree), True, 3):
        assert not call.inputs and not call.outputs


def test_the_head_is_one_hop_away_only_when_the_spine_lives_elsewhere() -> None:
    tree = Tree(8)
    apart = Layout({n: n for n in tree.nodes})

    def phases(rule: Rule, layout: Layout) -> Counter[str]:
        return Counter(c.phase for _, wave in one_piece(tree, rule, layout, True) for c in wave)

    together = phases(Rule(beta=0.5, objective="node_all_ce"), Layout.single(tree))
    assert together["head"] == together["settle"] == 0
    waits = phases(Rule(beta=0.5, objective="node_all_ce"), apart)
    assert waits["head"] == waits["settle"] == 3
    flows = phases(Rule(beta=0.0, objective="node_all_ce"), apart)
    assert (flows["head"], flows["settle"]) == (3, 0)
    assert phases(Rule(beta=0.0, objective="node"), apart)["head"] == 1
