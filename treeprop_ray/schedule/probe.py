"""Other passes over the hosts of a tree's step. Pure Python, no torch, no Ray.

    chain   forward and backward of the deployed chain, block by block, over whoever owns the
            blocks: for the probe, and as a training step at the end of a run (finish)

        boundary   open                                 top            close
        node 1           ahead 1 2                            back 2 1
        node 3                     ahead 3 …      …  back …

    sweep   the probe's forward waves, those of a training step; after `settle` a node weighs its
            state against the chain's blocks (`weigh`), and at the end the head reads z_{N-1}
            (`readout`)

States are z0, z1, …; adjoints in the chain a0, a1, …; in the sweep s<n> is what the node settled on
and m<n> the mean of its factor.
"""

from __future__ import annotations

import itertools

from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Node, Tree
from treeprop_ray.schedule.ops import Call, Layout, Op, Wave, interleave, make_calls
from treeprop_ray.schedule.tree import answers

CHAIN, SWEEP = "chain", "sweep"  # names of the passes
Rows = tuple[int, str, int, dict[int, list[Op]]]


def probe_calls(
    tree: Tree, rule: Rule, layout: Layout, stem_trains: bool, pieces: int
) -> dict[str, list[Call]]:
    """The calls of one batch of each of the probe's two passes."""
    chain = [chain_waves(tree, rule, layout, stem_trains, m) for m in range(pieces)]
    sweep = [sweep_waves(tree, rule, layout, m) for m in range(pieces)]
    return {CHAIN: interleave(chain, stride=1), SWEEP: interleave(sweep, stride=3)}


def chain_owner(tree: Tree, n: int) -> Node:
    """The node that owns chain block n, the edge (n - 1, n), for n < N: one of its two ends."""
    return tree.nodes[n] if tree.nodes[n].l == n - 1 else tree.nodes[n - 1]


def chain_waves(
    tree: Tree, rule: Rule, layout: Layout, stem_trains: bool, piece: int
) -> list[Wave]:
    """Consecutive blocks of one host share a call."""
    N, boundary = tree.N, layout.boundary
    hosts = [(layout.host_of[chain_owner(tree, n).n], n) for n in range(1, N)]
    runs = [(h, [n for _, n in run]) for h, run in itertools.groupby(hosts, lambda pair: pair[0])]
    waves: list[tuple[str, int, list[Op]]] = [
        ("stem", boundary, [Op("open", 0, (), ("z0", *rule.side_inputs))])
    ]
    for host, run in runs:
        ops = [Op("ahead", n, (f"z{n - 1}", *rule.side_inputs), (f"z{n}",)) for n in run]
        waves.append(("forward", host, ops))
    waves.append(("head", boundary, [Op("top", N, (f"z{N - 1}",), (f"a{N - 1}",))]))
    for host, run in reversed(runs):
        ops = [Op("back", n, (f"a{n}",), (f"a{n - 1}",)) for n in reversed(run)]
        waves.append(("backward", host, ops))
    if stem_trains:
        waves.append(("stem_backward", boundary, [Op("close", 0, ("a0",))]))
    rows: list[Rows] = [(t, phase, 0, {h: ops}) for t, (phase, h, ops) in enumerate(waves)]
    return make_calls(rows, piece, layout.one_machine)


def sweep_waves(tree: Tree, rule: Rule, layout: Layout, piece: int) -> list[Wave]:
    """Every level in three ticks, as in training; spine nodes always ask the head."""
    boundary = layout.boundary
    rows: list[Rows] = [(0, "stem", 0, {boundary: [Op("open", 0, (), ("z0", *rule.side_inputs))]})]

    def wave(clock: int, phase: str, level: int, ops: list[tuple[int, list[Op]]]) -> None:
        by_host: dict[int, list[Op]] = {}
        for host, mine in ops:
            by_host.setdefault(host, []).extend(mine)
        if by_host:
            rows.append((clock, phase, level, dict(sorted(by_host.items()))))

    for s in range(1, tree.depth + 1):
        forward, heads, settles, again = [], [], [], []
        for node in tree.level(s):
            n, host = node.n, layout.host_of[node.n]
            lift = Op("lift", n, (f"z{node.l}", *rule.side_inputs), (f"mu{n}",))
            settle = Op("settle", n, (), (f"s{n}",))
            if tree.is_spine(node):
                at_sample = rule.at_sample(tree, node)
                forward.append((host, [lift]))
                received = []
                if rule.beta > 0 or not at_sample:
                    verb = "hint" if at_sample else "head"
                    heads.append((boundary, [Op(verb, n, (f"mu{n}",), answers(n, rule))]))
                    received = [Op("receive", n, answers(n, rule))]
                if at_sample:
                    again.append((boundary, [Op("head", n, (f"z{n}",), (f"h{n}",))]))
                weigh = Op("weigh", n, (f"s{n}",), (f"z{n}", f"m{n}"))
                settles.append((host, [*received, settle, weigh]))
            else:
                r = node.r
                weigh = Op("weigh", n, (f"s{n}", f"z{r}", f"m{r}"), (f"z{n}", f"m{n}"))
                forward.append((host, [lift, Op("answer", n, (f"z{r}",)), settle, weigh]))
        wave(3 * s - 2, "forward", s, forward)
        wave(3 * s - 1, "head", s, heads)
        wave(3 * s, "settle", s, settles)
        wave(3 * s, "again", s, again)
    wave(3 * tree.depth + 1, "head", 0, [(boundary, [Op("readout", 0, (f"z{tree.N - 1}",))])])
    return make_calls(rows, piece, layout.one_machine)
