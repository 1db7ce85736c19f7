"""Other passes over the hosts of a tree's step. Pure Python, no torch, no Ray.

    chain   forward and backward of the deployed chain, block by block, over whoever owns the
            blocks, for the probe; along any path as a training step at the end of a run (finish)

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
from collections.abc import Iterator, Sequence

from treeprop_ray.core.rule import HeldOut, Rule
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.schedule.growth import growth_rows
from treeprop_ray.schedule.ops import STEP, Call, Layout, Op, Wave, interleave, make_calls
from treeprop_ray.schedule.owner import owner_of
from treeprop_ray.schedule.tree import answers

FINISH = "finish"  # the pass of a training step along a path
Rows = tuple[int, str, int, dict[int, list[Op]]]


def probe_parts(batches: int, draws: int, rule: Rule) -> Iterator[tuple[str, str, list[HeldOut]]]:
    """(part, its calls, the held-out batches it runs, with their draws)."""
    once = [HeldOut(k) for k in range(batches)]
    yield "tree", STEP, once
    yield "chain", "chain", once
    yield "states", "sweep", once
    if draws and has_density(rule):
        yield "draws", "sweep", [HeldOut(b.batch, m) for m in range(1, draws + 1) for b in once]


def has_density(rule: Rule) -> bool:
    """Whether q is a density at all: with sigma = 0 a Gaussian state is a point."""
    return rule.family == "bernoulli" or rule.sigma > 0


def path_calls(
    tree: Tree,
    rule: Rule,
    layout: Layout,
    stem_trains: bool,
    pieces: int,
    path: Sequence[int],
    grows: bool = False,
) -> list[Call]:
    """Backpropagation along a path, as a training step; `grows`: the chain is the deepest path
    first (schedule/growth.py)."""
    first = growth_rows(tree, layout) if grows else []
    waves = [
        chain_waves(tree, rule, layout, stem_trains, m, pieces, path, () if m else first)
        for m in range(pieces)
    ]
    return interleave(waves, stride=1)


def probe_calls(
    tree: Tree, rule: Rule, layout: Layout, stem_trains: bool, pieces: int
) -> dict[str, list[Call]]:
    """The calls of one batch of each of the probe's two passes."""
    sweep = [sweep_waves(tree, rule, layout, m) for m in range(pieces)]
    chain = path_calls(tree, rule, layout, stem_trains, pieces, tree.chain)
    return {"chain": chain, "sweep": interleave(sweep, stride=3)}


def edge_of(op: Op) -> Edge:
    """The block that an op `ahead` runs: from the state that it reads to the one that it makes."""
    return int(op.reads[0].removeprefix("z")), op.n


def chain_waves(
    tree: Tree,
    rule: Rule,
    layout: Layout,
    stem_trains: bool,
    piece: int,
    pieces: int,
    path: Sequence[int],
    first: Sequence[Rows] = (),
) -> list[Wave]:
    """Consecutive blocks of one host share a call. `first`: what goes before them."""
    N, boundary, top = tree.N, layout.boundary, path[-2]
    edges = tree.path_edges(path)[:-1]
    hosts = [(layout.host_of[owner_of(tree, edge).n], edge) for edge in edges]
    runs = [(h, [e for _, e in run]) for h, run in itertools.groupby(hosts, lambda pair: pair[0])]
    waves: list[tuple[str, int, list[Op]]] = [
        ("stem", boundary, [Op("open", 0, (), ("z0", *rule.side_inputs))])
    ]
    for host, run in runs:
        ops = [Op("ahead", r, (f"z{l}", *rule.side_inputs), (f"z{r}",)) for l, r in run]
        waves.append(("forward", host, ops))
    waves.append(("head", boundary, [Op("top", N, (f"z{top}",), (f"a{top}",))]))
    for host, run in reversed(runs):
        ops = [Op("back", r, (f"a{r}",), (f"a{l}",)) for l, r in reversed(run)]
        waves.append(("backward", host, ops))
    rows: list[Rows] = [(t, phase, 0, {h: ops}) for t, (phase, h, ops) in enumerate(waves)]
    if stem_trains:
        # not before the head of the last piece: where both have a weight in common (tied), the
        # order of its sums must not depend on how many runs the path is cut into
        clock = max(len(waves), len(runs) + 1 + pieces)
        rows.append((clock, "stem_backward", 0, {boundary: [Op("close", 0, ("a0",))]}))
    return make_calls([*first, *rows], piece, layout.one_machine)


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
