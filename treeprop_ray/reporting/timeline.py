"""When which actor worked: timeline.json (Chrome trace) and waves.png (one step, drawn)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.patches import Patch

from treeprop_ray.engine.base import Span
from treeprop_ray.reporting.plot import plt
from treeprop_ray.run.files import write_whole

TIMELINE = "timeline.json"  # of a run folder
COLORS = {
    "stem": "#7f7f7f", "forward": "#1f77b4", "head": "#9467bd", "settle": "#17becf",
    "again": "#9467bd", "aside": "#2ca02c", "backward": "#d62728", "stem_backward": "#7f7f7f",
    "hand_out": "#ff7f0e", "add_up": "#e377c2", "report": "#bcbd22", "update": "#8c564b",
    "renew": "#ff7f0e", "grow": "#17becf",
}  # fmt: skip


def write_timeline(spans: Sequence[Span], target: Path) -> None:
    """A Chrome trace, one row per actor; open it in chrome://tracing or ui.perfetto.dev."""
    rows = {name: i for i, name in enumerate(sorted({s.actor for s in spans}, key=_order))}
    origin = min((s.begin for s in spans), default=0.0)
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
        for name, tid in rows.items()
    ]
    events += [
        {
            "ph": "X", "pid": 1, "tid": rows[s.actor], "cat": s.phase,
            "name": f"{s.phase} level {s.level}", "ts": 1e6 * (s.begin - origin),
            "dur": 1e6 * (s.end - s.begin), "args": {"step": s.step, "piece": s.piece},
        }
        for s in spans
    ]  # fmt: skip
    write_whole(target, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def draw_waves(spans: Sequence[Span], target: Path) -> None:
    """The last whole step: a row per actor, a box per call, coloured by phase."""
    step = max(s.step for s in spans)
    mine = [s for s in spans if s.step == step]
    names = sorted({s.actor for s in mine}, key=_order)
    origin = min(s.begin for s in mine)
    fig, ax = plt.subplots(figsize=(10, 1.2 + 0.4 * len(names)))
    for s in mine:
        begin, width = 1000 * (s.begin - origin), 1000 * (s.end - s.begin)
        row = names.index(s.actor)
        ax.barh(row, width, left=begin, color=COLORS.get(s.phase, "0.5"), edgecolor="w", height=0.8)
        ax.text(
            begin + width / 2, row, str(s.level), ha="center", va="center", color="w", fontsize=7
        )
    ax.set_yticks(range(len(names)), [name.rpartition("/")[2] for name in names])
    ax.invert_yaxis()
    ax.set(xlabel="ms", title=f"step {step}: calls by actor, with the level in the box")
    phases = [p for p in COLORS if any(s.phase == p for s in mine)]
    handles = [Patch(color=COLORS[p], label=p) for p in phases]
    fig.legend(handles=handles, ncols=len(phases), loc="lower center", frameon=False)
    fig.tight_layout(rect=(0, 0.35 / fig.get_figheight(), 1, 1))
    fig.savefig(target, dpi=120)
    plt.close(fig)


def last_step(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Of a written trace the last step that every actor has finished: the calls of each actor, with
    times in milliseconds from its begin."""
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"].rpartition("/")[2] for e in events if e["ph"] == "M"}
    calls = [e for e in events if e["ph"] == "X"]
    ends = [max(c["args"]["step"] for c in calls if c["tid"] == tid) for tid in names]
    step = min(ends, default=0)
    mine = [c for c in calls if c["args"]["step"] == step]
    origin = min((c["ts"] for c in mine), default=0.0)
    rows: dict[int, list[list[Any]]] = {tid: [] for tid in names}
    for c in mine:
        level = c["name"].rpartition(" ")[2]
        begin, width = (c["ts"] - origin) / 1000, c["dur"] / 1000
        rows[c["tid"]].append([c["cat"], level, round(begin, 3), round(width, 3)])
    actors = [{"name": names[tid], "calls": rows[tid]} for tid in names]
    return {"step": step, "actors": actors, "colors": COLORS}


def _order(name: str) -> tuple[str, int]:
    """boundary first, then node-2 before node-10."""
    stem, _, number = name.rpartition("-")
    return (stem, int(number)) if number.isdigit() else ("", 0)
