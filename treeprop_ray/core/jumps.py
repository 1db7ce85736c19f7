"""recipe=lookahead: how long its windows are, and which depth moves which of their ends. Pure."""

from __future__ import annotations


def window_of(D: int) -> int:
    """recipe=lookahead: the largest power of 2 that is at most 4 D and N / 2, and not below 2."""
    return 2 ** max(1, min(D - 1, (4 * D).bit_length() - 1))


def jumps(D: int, W: int) -> dict[int, list[tuple[int, int]]]:
    """For every depth that takes part: the ends it moves, as (index of the window, time)."""
    at = {j: (j + 1) * W for j in range(2**D // W)}
    found: dict[int, list[tuple[int, int]]] = {}
    for d in range(W.bit_length() - 1, D):
        found[d] = [(j, t) for j, t in at.items() if t >> d & 1]
        for j, _ in found[d]:
            at[j] += 2**d
    return found
