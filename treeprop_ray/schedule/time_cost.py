"""What a step through time costs in applications of a cell: in all, and one after the other. Pure.

A forward of a cell at one position is 1, a backward is 1; readout and sending are free.

    work    the applications at all positions. A scan's sums and products are not counted: a few for
            each number of a state, where a cell has as many as the state is wide
    path    the longest line of applications that wait for each other, on devices that do a depth's
            nodes (or all positions) at once. A round of a scan counts as one, though it is less

    N = 2**D           path                         what waits for what
    BPTT               2 N                          one step after the other, there and back
    minGRU             2 (1 + D)                    its scan has D rounds
    paper, boost       D + 1 + max(2, K)            depth by depth; the nodes' second halves, then
                                                    K - 1 more sweeps and the last one back, or the
                                                    nodes back (time.gradient=one: 1, not 2)
    lookahead          N + W + 2 J                  the roll, J jumps there and back, a window
    newton             D + 2 K + 2 + (2 K + 1) D    2 K + 1 scans of D rounds

The first sweep is what the nodes of depth 0 have computed. Diagonals that autograd has to find for
a cell of one's own are not counted.
"""

from __future__ import annotations

from treeprop_ray.config import Time
from treeprop_ray.core.jumps import jumps, window_of
from treeprop_ray.schedule.cost import Cost


def bptt_cost(D: int, scans: bool = False) -> Cost:
    """Backpropagation through time; `scans`: of a cell that a scan goes over."""
    N = 2**D
    return Cost(2 * N, 2 * (1 + D) if scans else 2 * N, 1, 1)


def time_tree_cost(time: Time) -> Cost:
    """A step of the tree over time."""
    ahead = forward_applications(time)
    D, K, N = time.depth, time.sweeps, 2**time.depth
    if time.recipe == "lookahead":
        W = window_of(D)
        return Cost(2 * ahead, N + W + 2 * len(jumps(D, W)), D, 1)
    halves = 2 if time.gradient == "both" else 1  # applications that a node goes back through
    if time.recipe == "newton":
        back = halves * (N // 2 - 1) + (K + 1) * N
        return Cost(ahead + back, D + 2 * K + 2 + (2 * K + 1) * D, D, 1)
    back = halves * (N - 1) + (N if K else 0)
    return Cost(ahead + back, D + 1 + max(halves, K), D, 1)


def forward_applications(time: Time) -> int:
    """Forward applications of a cell in a step."""
    D, K, N = time.depth, time.sweeps, 2**time.depth
    if time.recipe == "newton":
        return (N - 2) + N // 2 + (K + 1) * N
    if time.recipe == "lookahead":  # the roll, and the tree's nodes from depth 1 on
        return 2 * (N - 1) + sum(map(len, jumps(D, window_of(D)).values()))
    # two for each node; the first sweep is already there when others follow
    return 2 * (N - 1) + max(K - 1, min(1, K)) * N
