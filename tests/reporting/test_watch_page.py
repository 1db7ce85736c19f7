"""The live page in a browser, while a run goes: it follows, comes back, and outlives the run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import browser

from treeprop_ray import config, methods
from treeprop_ray.engine.base import Span
from treeprop_ray.reporting.live import Live
from treeprop_ray.reporting.serving import Server
from treeprop_ray.reporting.timeline import TIMELINE, write_timeline
from treeprop_ray.run.callbacks import Callback
from treeprop_ray.run.trainer import Trainer

WORDS = [
    "model.hidden=8",
    "model.blocks=3",
    "batch=128",
    "epochs=2",
    "log_every=3",
    "loggers=[csv]",
]
NODES = "[...document.querySelectorAll('#tree g circle')].map(c => c.getAttribute('fill'))"
MARKUP = "document.querySelectorAll('main li i').length"
SPANS = [
    Span("<b>/node-1", "forward", 2, 0, 4, 10.0, 10.5),
    Span("<b>/node-2", "backward", 1, 0, 4, 10.5, 11.0),
]


@contextlib.contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[Server]:
    with Server(Live(str(folder)), "127.0.0.1", port) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            yield server
        finally:
            server.shutdown()


class Reader(Callback):
    """Somebody who has the page open, at a few steps of the run."""

    def __init__(self, page: browser.Page, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.page, self.folder, self.loop, self.port = page, folder, loop, 0

    def waits(self, action: Any) -> Any:
        return self.loop.run_until_complete(action)

    def on_step(self, run: Trainer, done: int) -> None:
        if done == 14:  # an epoch of 10 steps has been scored
            write_timeline(SPANS, self.folder / TIMELINE)
            run.callbacks.on_notice(run, "lost <i>node-1</i> (killed); back to step 0")
            with serving(self.folder) as server:
                self.port = int(server.server_address[1])
                words = ["running", "spine-2", "of 20", "lost <i>node-1</i>", "node-2", "of step 5"]
                shown = self.waits(self.page.until(server.url, words))
                assert [word for word in words if word not in shown] == [], shown
                colours = self.waits(self.page.value(NODES))
                assert len(colours) == 3 and len(set(colours)) > 1, colours
            words = ["no answer"]
            shown = self.waits(self.page.shows(words))
            assert words[0] in shown and "lost <i>node-1</i>" in shown  # what it knew stays


@browser.needs_chromium
def test_the_page_follows_a_running_job_comes_back_and_outlives_it(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    opened = browser.opened(tmp_path / "profile")
    page = loop.run_until_complete(opened.__aenter__())
    try:
        reader = Reader(page, tmp_path / "<b>", loop)
        settings = methods.checked(config.load([*WORDS, f"out={tmp_path}", "name=<b>"]))
        summary = Trainer.of(settings, callbacks=[reader]).train()
        with serving(tmp_path / "<b>", reader.port):
            score = f"{100 * summary['final']['validation']['full']['accuracy']:.2f} %"
            words = ["<b>", "finished after 20 steps", score, "0-2-4"]
            shown = loop.run_until_complete(page.shows(words))
            assert [word for word in words if word not in shown] == [], shown
        assert page.complaints == []
        assert loop.run_until_complete(page.value(MARKUP)) == 0  # texts of a run are texts
    finally:
        loop.run_until_complete(opened.__aexit__(None, None, None))
        loop.close()
