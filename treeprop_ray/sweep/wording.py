"""Metrics in words."""

from __future__ import annotations

from collections.abc import Sequence

# figures of the test split at other times than the end
EPOCHS = {
    "best": ("test", " at the best validation epoch"),
    "highest": ("highest test", " of all epochs"),
    "late": ("mean test", " over the last ten epochs"),
}
PLAIN = {
    "leak": "leak: clean minus tree cross-entropy at the end",
    "correction_ratio": "ratio: norm of beta * correction over that of the forward estimate at the "
    "end, all nodes together",
}


def epochs_text(count: object) -> str:
    """1 epoch, 2 epochs."""
    return f"{count} epoch{'' if str(count) == '1' else 's'}"


def metric_text(metric: str) -> str:
    """test/full/accuracy -> test accuracy (%), full chain."""
    parts = metric.split("/")
    if len(parts) != 3:
        return PLAIN.get(metric, metric)
    unit = " (%)" if parts[2] == "accuracy" else ""
    split, when = EPOCHS.get(parts[0], (parts[0], ""))
    return f"{split} {parts[2]}{unit} of {parts[1]}{when}"


def metrics_text(metrics: Sequence[str]) -> str:
    """All metrics of a table; paths of one kind are put together."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for metric in metrics:
        split, path, kind = metric.split("/") if metric.count("/") == 2 else (metric, "", "")
        kinds.setdefault((split, kind), []).append(path)
    texts = []
    for (split, kind), paths in kinds.items():
        joined = ", ".join(paths)
        texts.append(metric_text(f"{split}/{joined}/{kind}" if kind else split))
    return "; ".join(texts)
