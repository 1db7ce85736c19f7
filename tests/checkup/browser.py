"""A page in headless Chromium: driven over its DevTools protocol, or opened once and read.

python tests/checkup/browser.py plan.html docs/plan.png     # a picture of a page
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
        if (found := shutil.which(name))
    ),
    None,
)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--hide-scrollbars",
]  # fmt: skip
DRIVEN = [
    "--remote-debugging-port=0", "--remote-debugging-address=127.0.0.1", "--window-size=1500,1400"
]  # fmt: skip
READ = ["--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom"]
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket, self.last = socket, 0
        self.complaints: list[str] = []  # uncaught errors and refused contents

    async def ask(self, method: str, **words: Any) -> Any:
        """Send a command and wait for its own answer; of the events only complaints are kept."""
        self.last += 1
        await self.socket.send_json({"id": self.last, "method": method, "params": words})
        while True:
            answer = await self.socket.receive_json(timeout=60)
            if answer.get("id") == self.last:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(answer["params"]["exceptionDetails"]))
            if answer.get("method") == "Log.entryAdded":
                entry = answer["params"]["entry"]
                self.complaints += [entry["text"]] * (entry["source"] in ("security", "violation"))

    async def value(self, expression: str) -> Any:
        """What an expression gives in the page."""
        answer = await self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    async def text(self) -> str:
        """What the page shows, with single spaces."""
        return " ".join(str(await self.value("document.body?.innerText ?? ''")).split())

    async def shows(self, words: list[str], seconds: float = 60) -> str:
        """Wait until the page shows all words; returns what it shows in the end."""
        shown = ""
        for _ in range(int(seconds / 0.5)):
            await asyncio.sleep(0.5)
            shown = await self.text()
            if all(word in shown for word in words):
                break
        return shown

    async def holds(self, expression: str, seconds: float = 60) -> bool:
        """Whether an expression comes true in the page, in time."""
        for _ in range(int(seconds / 0.5)):
            if await self.value(expression):
                return True
            await asyncio.sleep(0.5)
        return False

    async def until(self, url: str, words: list[str], seconds: float = 60) -> str:
        """Open the page and wait until it shows all words; returns what it shows in the end."""
        await self.ask("Page.navigate", url=url)
        return await self.shows(words, seconds)

    async def spills(self, pixels: int) -> int:
        """By how many pixels the page is wider than a window of that width."""
        size = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await self.ask("Emulation.setDeviceMetricsOverride", **size)
        return int(await self.value("document.documentElement.scrollWidth")) - pixels

    async def picture(self, target: Path, whole: bool = False) -> None:
        """Keep what is seen, or the whole page, as a PNG."""
        shot = await self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        target.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Page]:
    """A tab of a browser of its own, whose profile is in the folder."""
    assert CHROMIUM
    process = subprocess.Popen(
        [CHROMIUM, *FLAGS, *DRIVEN, f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        told = folder / "DevToolsActivePort"
        for _ in range(600):
            if told.is_file() and told.read_text().strip():
                break
            await asyncio.sleep(0.1)
        port = int(told.read_text().splitlines()[0])
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                (tab,) = [t for t in await answer.json() if t["type"] == "page"]
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                await page.ask("Runtime.enable")
                await page.ask("Log.enable")
                yield page
    finally:
        process.terminate()
        process.wait(20)


async def _look(
    folder: Path, url: str, cookie: dict[str, str], words: list[str], picture: Path
) -> tuple[str, str]:
    async with opened(folder) as page:
        stranger = await page.until(url, ["oken"], 20)
        await page.ask("Network.setCookie", url=url, **cookie)
        await page.ask("Page.navigate", url="about:blank")
        shown = await page.until(url, words)
        await asyncio.sleep(1)  # the table has its words before its last layout
        await page.picture(picture)
        return stranger, shown


def look(
    folder: Path, url: str, cookie: dict[str, str], words: list[str], picture: Path
) -> tuple[str, str]:
    """What a page shows without a cookie, and with it once it has the words (and its picture)."""
    return asyncio.run(_look(folder, url, cookie, words, picture))


def read(page: Path, folder: Path) -> str:
    """What a page of one file has become once its scripts ran without a word on the console."""
    assert CHROMIUM
    done = subprocess.run(
        [CHROMIUM, *FLAGS, *READ, f"--user-data-dir={folder}", page.as_uri()],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


async def _photograph(page: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with opened(Path(folder)) as tab:
            await tab.until(page.resolve().as_uri(), [])
            await tab.picture(target, whole=True)


if __name__ == "__main__":
    asyncio.run(_photograph(Path(sys.argv[1]), Path(sys.argv[2])))
