"""matplotlib without a display, and what all figures share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

__all__ = ["plt", "save"]


def save(fig: plt.Figure, target: Path, **more: Any) -> None:
    """Write a figure as PNG and give it back."""
    fig.tight_layout()
    fig.savefig(target, dpi=120, **more)
    plt.close(fig)
