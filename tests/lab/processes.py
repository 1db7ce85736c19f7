"""The processes of a run: who is below a driver, what they are, what memory they have."""

from __future__ import annotations

import os
import re
from pathlib import Path

KINDS = {  # of a Ray's own processes, by what their command lines say
    "gcs_server": "control store", "raylet/raylet": "raylet", "log_monitor.py": "log monitor",
    "dashboard.py": "dashboard", "monitor.py": "autoscaler", "RuntimeEnvAgent": "environment agent",
    "runtime_env/agent": "environment agent", "DashboardAgent": "dashboard agent",
    "dashboard/agent": "dashboard agent", "ray::IDLE": "idle worker",
}  # fmt: skip


def below(root: int) -> dict[int, str]:
    """The processes below one, with their command lines."""
    by_parent: dict[int, dict[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                command = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            by_parent.setdefault(parent, {})[int(entry.name)] = command
    found: dict[int, str] = {}
    todo = [root]
    while todo:
        mine = by_parent.get(todo.pop(), {})
        found |= mine
        todo += mine
    return found


def kind_of(command: str) -> str:
    """What a process of Ray is; an actor by its name."""
    actor = re.match(r"ray::(?:[^ ]*/)?([\w-]+)", command)
    if actor and "IDLE" not in command and "Agent" not in command:
        return f"actor {actor[1]}"
    return next((kind for mark, kind in KINDS.items() if mark in command), "other")


def private_mb(pid: int) -> float | None:
    """Memory that a process shares with nobody; None if it is gone."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    except (OSError, ValueError):
        return None
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE") / 1e6
