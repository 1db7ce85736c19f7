"""What a run draws when it has ended, and the callbacks that every run has."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from treeprop_ray.config import Settings
from treeprop_ray.errors import first_line, warn
from treeprop_ray.reporting.figures import run_figures
from treeprop_ray.reporting.probing import Probing
from treeprop_ray.reporting.timeline import TIMELINE, draw_waves, write_timeline
from treeprop_ray.run.callbacks import Callback, Scores
from treeprop_ray.run.trainer import Trainer

EVERY = 2.0  # seconds between two timelines of a run that goes


class Figures(Callback):
    """figures/*.png of the run folder; where actors worked, timeline.json and waves.png too."""

    written = -EVERY  # when the timeline was, by the monotonic clock

    def on_epoch(self, run: Trainer, epoch: int, scores: Scores) -> None:
        """The timeline so far, for those who watch."""
        now = time.monotonic()
        if not (run.folder and run.writes and run.engine.spread) or now - self.written < EVERY:
            return
        self.written = now
        try:
            if spans := run.engine.spans():
                write_timeline(spans, run.folder.path / TIMELINE)
        except OSError as e:
            warn(f"{TIMELINE}: {first_line(e)}")
        run.log.pause(time.monotonic() - now)

    def on_end(self, run: Trainer, summary: dict[str, Any]) -> None:
        """Draw what is in the run folder."""
        if not (run.folder and run.writes):
            return
        try:
            self._draw(run, run.folder.path)
        except OSError as e:  # a full disk: the run itself is finished and kept
            warn(f"figures: {first_line(e)}")

    def _draw(self, run: Trainer, folder: Path) -> None:
        if "csv" in run.settings.loggers:
            run_figures(folder, run.outline)
        if spans := run.engine.spans():
            write_timeline(spans, folder / TIMELINE)
            draw_waves(spans, folder / "figures" / "waves.png")


def standard(settings: Settings) -> list[Callback]:
    """The probe if it is asked for, and the figures."""
    return [*([Probing(settings.probe)] if settings.probe.every else []), Figures()]
