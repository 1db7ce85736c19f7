"""`treeprop watch` beside a run with an actor for every node, both as a user starts them.

TREEPROP_PICTURE=docs/watch.png keeps the picture, of a longer run of the default network.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest

PICTURE = os.environ.get("TREEPROP_PICTURE", "")
SMALL = ["model.blocks=3", "model.hidden=8", "epochs=100000", "probe.draws=2"]
LARGE = ["batch=128", "lr=0.006", "epochs=60", "ray.dashboard=true"]
WORDS = ["name=digits", "engine=ray", "placement=per_node", "cpus_per_actor=0.1", "probe.every=20"]
NODES = "[...document.querySelectorAll('#tree g circle')].map(c => c.getAttribute('fill'))"
ROWS = "[...document.querySelectorAll('#waves text')].map(t => t.textContent)"


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tp", dir="/tmp"))  # short: Ray puts sockets there
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def job(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that goes on until it is interrupted."""
    env = {**os.environ, "RAY_TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    env.pop("RAY_ADDRESS", None)
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "treeprop_ray.train", *WORDS, *(LARGE if PICTURE else SMALL)],
            env=env, cwd=folder, stdout=said, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(600)


@pytest.fixture
def address(folder: Path, job: subprocess.Popen[str]) -> Iterator[str]:
    """Where the page is, once the folder of the run is there."""

    async def there() -> None:
        while not (folder / "results/runs/digits/config.yaml").is_file():
            assert job.poll() is None, (folder / "said").read_text()
            await asyncio.sleep(0.2)

    asyncio.run(asyncio.wait_for(there(), 600))
    process = subprocess.Popen(
        [sys.executable, "-m", "treeprop_ray.watch", "run=results/runs/digits"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout
        found = re.search(r"http://127\.0\.0\.1:\d+/", line := process.stdout.readline())
        assert found, line
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=600)
    assert process.returncode == 0


async def follow(job: subprocess.Popen[str], address: str, profile: Path) -> None:
    async with browser.opened(profile) as page:
        words = ["running", "full", "of step", "boundary", "node-1", "for each block of the chain"]
        shown = await page.until(address, words, 600)
        assert [word for word in words if word not in shown] == [], shown
        colours = await page.value(NODES)
        assert len(colours) == (7 if PICTURE else 3) and len(set(colours)) > 1, colours
        rows = await page.value(ROWS)
        assert {"boundary", *(f"node-{n + 1}" for n in range(len(colours)))} <= set(rows)
        if PICTURE:
            assert await page.holds("kept.scores.length >= 30", 600)
            await page.picture(Path(PICTURE), whole=True)
        assert job.poll() is None
        job.send_signal(signal.SIGINT)
        shown = await page.shows(["stopped at step"], 600)
        assert "stopped at step" in shown, shown
        assert "boundary" in shown and "node-1" in shown and "full" in shown  # what it knew stays
        await asyncio.to_thread(job.wait, 600)
        shown = await page.until(address, words := ["stopped", "of step", "node-1", "full"], 60)
        assert [word for word in words if word not in shown] == [], shown  # who comes later sees it
        assert page.complaints == []


@pytest.mark.slow
@browser.needs_chromium
def test_the_page_shows_the_waves_of_a_running_job_and_outlives_it(
    job: subprocess.Popen[str], address: str, folder: Path
) -> None:
    asyncio.run(follow(job, address, folder / "profile"))
