"""The calls of a CFF step, over one host or a chain of them. Pure Python, no torch, no Ray.

Nothing comes back: a layer hands its output on, then learns from its own loss while the next
layer already runs, and takes the next batch when it has updated. Three hosts, two batches:

    host 0    F0 L0 F1 L1
    host 1       F0 L0 F1 L1
    host 2          F0 L0 F1 L1

A batch needs N forwards and one backward: N + 1 units, where backpropagation needs 2N.
"""

from __future__ import annotations

from collections.abc import Sequence

from treeprop_ray.core.tree import Edge
from treeprop_ray.schedule.ops import Call, Op, Wave, interleave, make_calls


def one_cff_step(stages: Sequence[Sequence[Edge]]) -> list[Call]:
    """The calls of a step; `stages` are the chain's edges, the head last, by host.

    z<r> is the output of layer r, y the labels of the rows. Which ops have work to do depends on
    the stage of training: layers learn in the first, the head in the second.
    """
    N = stages[-1][-1][1]
    waves: list[tuple[int, str, int, dict[int, list[Op]]]] = []
    for k, stage in enumerate(stages):
        ahead = [Op("ahead", r, (f"z{r - 1}",), (f"z{r}",)) for _, r in stage if r < N]
        learn = [Op("learn", r, ("y",)) for _, r in stage if r < N]
        opening = [Op("open", 0, (), ("z0", "y"))] if k == 0 else []
        closing = [Op("classify", N, (f"z{N - 1}", "y"))] if stage[-1][1] == N else []
        if len(stages) == 1:  # a layer at a time: one graph lives, not all of them
            pairs = [op for pair in zip(ahead, learn, strict=True) for op in pair]
            waves.append((0, "forward", 0, {0: opening + pairs + closing}))
            continue
        waves.append((2 * k, "forward", k, {k: opening + ahead}))
        waves.append((2 * k + 1, "aside", k, {k: learn + closing}))
    calls: list[Wave] = make_calls([w for w in waves if any(w[3].values())], 0)
    return interleave([calls], stride=1)
