"""A step of the chain's own by sweeps over all its blocks at once. Pure Python, no torch, no Ray.

Backpropagation goes from block to block. Where blocks add to their input, as residual ones do, a
sweep that goes through all of them at once, from a guess of their inputs, finds nearly what they
would add, and sums along the chain make the next guess of it: Newton's method with the identity in
place of the Jacobians. Blocks of one node of the tree are a unit, one after the other:

    unit u     from z_s to z_e, d_u = its blocks' output - their input
    ahead      z_s of unit u = z_0 + d_0 + … + d_{u-1}, of the sweep before (the first: z_0)
    end        z_{N-1} = z_0 + the sum of all; the label, and its slope a there
    back       v_u = (J_u^T - 1) s_u with s_u = a + v_{u+1} + … of the sweep before (the first: a)
    close      the slope at z_0 is a + the sum of all

    N = 8, K = 2    boundary   open            reach              close
                    node 1          d0.0                v1.0
                    node 3          d0.1 d1.1      v0.1 v1.1
                    node 5          d0.2 d1.2      v0.2 v1.2
                    node 7               d1.3      v0.3

After as many sweeps as there are units both are exact. Unit u is so after sweep u (counted from 0)
ahead, and as many from the end back, and sweeps no more; the ends sweep where others read it.
Tensors: d<k>.<u>, v<k>.<u> of sweep k; a.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.schedule.ops import Call, Layout, Op, Row, Wave, interleave, make_calls
from treeprop_ray.schedule.owner import owner_of


@dataclass(frozen=True)
class Unit:
    """Consecutive blocks of the chain that one node owns."""

    index: int
    node: int
    edges: tuple[Edge, ...]


def units_of(tree: Tree) -> list[Unit]:
    """The chain without its head."""
    owned = [(owner_of(tree, edge).n, edge) for edge in tree.path_edges(tree.chain)[:-1]]
    runs = itertools.groupby(owned, lambda pair: pair[0])
    return [Unit(u, n, tuple(edge for _, edge in run)) for u, (n, run) in enumerate(runs)]


def sweep_calls(
    tree: Tree, rule: Rule, layout: Layout, stem_trains: bool, pieces: int, sweeps: int
) -> list[Call]:
    """A training step of the chain by so many sweeps."""
    each = [sweep_waves(tree, rule, layout, stem_trains, m, sweeps) for m in range(pieces)]
    return interleave(each, stride=1)


def sweep_waves(
    tree: Tree, rule: Rule, layout: Layout, stem_trains: bool, piece: int, sweeps: int
) -> list[Wave]:
    """The waves of one piece."""
    units, boundary, sides = units_of(tree), layout.boundary, rule.side_inputs
    last = len(units) - 1
    K = min(sweeps, len(units))

    def names(kind: str, k: int, whose: Iterable[int]) -> tuple[str, ...]:
        """What is known of some units after sweep k; they may have been done before it."""
        done = {"d": lambda u: u, "v": lambda u: last - u}[kind]
        return tuple(f"{kind}{final(kind, u) if k >= done(u) else k}.{u}" for u in whose)

    def final(kind: str, u: int) -> int:
        """The last sweep of a unit; the ends have a single one, when all they read is settled."""
        if kind == "d":
            return K - 1 if u == last else min(u, K - 1)
        return K - 1 if u == 0 else min(last - u, K - 1)

    rows: list[Row] = [(0, "stem", 0, {boundary: [Op("open", 0, (), ("z0", *sides))]})]

    def wave(clock: int, phase: str, ops: list[tuple[int, Op]]) -> None:
        by_host: dict[int, list[Op]] = {}
        for node, op in ops:
            by_host.setdefault(layout.host_of[node], []).append(op)
        rows.append((clock, phase, 0, dict(sorted(by_host.items()))))

    for k in range(K):
        ops = []
        for u, unit in enumerate(units):
            if k > final("d", u) or (u == last and k < K - 1):
                continue
            reads = ("z0", *(names("d", k - 1, range(u)) if k else ()), *sides)
            verb = "trace" if k == final("d", u) else "sweep"
            ops.append((unit.node, Op(verb, unit.edges[-1][1], reads, (f"d{k}.{u}",))))
        wave(1 + k, "forward", ops)
    ends = names("d", last, range(last + 1))
    rows.append((K + 1, "head", 0, {boundary: [Op("reach", tree.N, ("z0", *ends), ("a",))]}))
    for k in range(K):
        ops = []
        for u, unit in reversed(list(enumerate(units))):
            if k > final("v", u) or (u == 0 and k < K - 1):
                continue
            reads = ("a", *(names("v", k - 1, range(u + 1, last + 1)) if k else ()))
            verb = "retrace" if k == final("v", u) else "pull"
            ops.append((unit.node, Op(verb, unit.edges[-1][1], reads, (f"v{k}.{u}",))))
        wave(K + 2 + k, "backward", ops)
    if stem_trains:
        starts = names("v", last, range(last + 1))
        close = [Op("gathered", 0, ("a", *starts), ("a0",)), Op("close", 0, ("a0",))]
        rows.append((2 * K + 2, "stem_backward", 0, {boundary: close}))
    return make_calls(rows, piece, layout.one_machine)
