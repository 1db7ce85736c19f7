"""matplotlib without a display, and what all figures share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

__all__ = ["label_points", "plt", "save"]

Place = tuple[float, float]
# where a label may stand beside its point, in the order of choice: offset, and which end is near
BESIDE = [
    ((4, 4), "left"), ((4, -10), "left"), ((-4, 4), "right"), ((-4, -10), "right"),
    ((0, 12), "center"), ((0, -18), "center"),
]  # fmt: skip


def label_points(ax: Any, texts: Sequence[tuple[Place, str]], fontsize: int = 7) -> int:
    """Write texts beside their points, the first ones first, where they cover no other text.

    One that finds no room is left out; returns how many. To be called when all else is drawn.
    """
    ax.figure.tight_layout()
    renderer = ax.figure.canvas.get_renderer()
    taken: list[Any] = []
    if ax.get_legend():
        taken.append(ax.get_legend().get_window_extent(renderer))
    left_out = 0
    for place, text in texts:
        for offset, side in BESIDE:
            note = ax.annotate(
                text, place, xytext=offset, textcoords="offset points", fontsize=fontsize, ha=side
            )
            box = note.get_window_extent(renderer).padded(2)
            if not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            note.remove()
        else:
            left_out += 1
    return left_out


def save(fig: plt.Figure, target: Path, **more: Any) -> None:
    """Write a figure as PNG and give it back."""
    fig.tight_layout()
    fig.savefig(target, dpi=120, **more)
    plt.close(fig)
