"""A run seen from outside: its metrics on the Prometheus endpoint, its actors on the dashboard.

TREEPROP_PICTURE=docs/dashboard.png keeps the picture, of a run with eight actors.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import browser
import pytest
from test_clusters import exported

BLOCKS = 7 if "TREEPROP_PICTURE" in os.environ else 2


@dataclass
class Run:
    url: str
    folder: Path
    token: str


@pytest.fixture(scope="module")
def going() -> Iterator[Run]:
    """A run with an actor for every node, a dashboard and a token of its own."""
    folder = Path(tempfile.mkdtemp(prefix="tp", dir="/tmp"))  # short: Ray puts sockets there
    token = secrets.token_hex(16)
    env = {
        **os.environ, "RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token,
        "OMP_NUM_THREADS": "1", "RAY_metrics_report_interval_ms": "1000",
    }  # fmt: skip
    env.pop("RAY_ADDRESS", None)
    words = [
        "engine=ray", "placement=per_node", "cpus_per_actor=0.1", f"model.blocks={BLOCKS}",
        "model.hidden=8", "epochs=100000", "eval_every=1000", f"out={folder}", "name=digits",
        "ray.dashboard=true",
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "treeprop_ray.train", *words],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout
        found = re.match(r"dashboard: (http://127\.0\.0\.1:\d+)", line := process.stdout.readline())
        assert found, line
        yield Run(found[1], folder, token)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=900)
        shutil.rmtree(folder, ignore_errors=True)
    assert process.returncode == 1


def get(url: str, token: str) -> str:
    """A page; nothing while nobody listens there: some of the targets come up later than others."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


@pytest.mark.slow
def test_metrics_appear_on_the_prometheus_endpoint_while_a_run_goes(going: Run) -> None:
    """Where Prometheus looks: the targets that Ray writes for it, one per Ray node."""
    wanted, text = exported(), ""
    nodes = {f"node-{n}" for n in range(1, BLOCKS + 1)}
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline:
        time.sleep(0.5)
        for targets in going.folder.rglob("prom_metrics_service_discovery.json"):
            hosts = [h for t in json.loads(targets.read_text()) for h in t["targets"]]
            text = "".join(get(f"http://{host}/metrics", going.token) for host in hosts)
        actors = set(re.findall(r'ray_treeprop_wave_seconds{.*actor="([^"]+)"', text))
        if all(name + "{" in text for name in wanted) and actors >= nodes:
            break
    assert actors >= nodes
    for name, labels in wanted.items():
        lines = re.findall(rf"^{name}{{(.*)}} ", text, re.M)
        assert lines, f"{name} is not exported"
        assert all(f'{label}="' in line for line in lines for label in labels), lines
        assert all('run="digits"' in line for line in lines)


@pytest.mark.slow
@browser.needs_chromium
def test_the_dashboard_lists_the_actors_by_name_to_those_who_have_the_token(
    going: Run, tmp_path: Path
) -> None:
    picture = Path(os.environ.get("TREEPROP_PICTURE", tmp_path / "dashboard.png"))
    names = ["digits/boundary", *(f"digits/node-{n}" for n in range(1, BLOCKS + 1))]
    cookie = {"name": "ray-authentication-token", "value": going.token}
    page = f"{going.url}/#/actors"
    wanted = [*names, f"ALIVE x {len(names)}"]
    stranger, shown = browser.look(tmp_path / "profile", page, cookie, wanted, picture)
    assert not any(name in stranger for name in names) and "oken" in stranger
    assert [word for word in wanted if word not in shown] == [], shown
    assert picture.stat().st_size > 10_000
