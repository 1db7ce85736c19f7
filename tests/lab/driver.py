"""The driver of a disturbed run: `python -m lab.driver spec.json`. It ends as `train` does."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from ray import cloudpickle

from lab.history import Recorded
from lab.nemesis import Fault, Struck
from treeprop_ray import config
from treeprop_ray.config import cli
from treeprop_ray.engine import crew
from treeprop_ray.run.callbacks import Callback
from treeprop_ray.run.trainer import Trainer

PROBE_EVERY = 10
START_SECONDS = 90  # an actor may be paused while it is made


class Probed(Callback):
    """Faults may strike in a probe too."""

    def on_step(self, run: Trainer, done: int) -> None:
        """Probe, and throw the row away."""
        if done % PROBE_EVERY == 0:
            run.engine.probe(1, 0)


def main(path: str) -> int:
    """Train with a nemesis and a history, or with a history alone."""
    spec = json.loads(Path(path).read_text())
    folder = Path(spec["folder"])
    for name in ("lab", "lab.history", "lab.nemesis"):  # actors cannot import the tests
        cloudpickle.register_pickle_by_value(sys.modules[name])
    crew.ANSWER_SECONDS = spec["answer"]
    crew.START_SECONDS = START_SECONDS
    faults = [Fault(**fault) for fault in spec["faults"]]

    def run(settings: config.Settings) -> None:
        command = f"python -m lab.driver {path}"
        trainer = Trainer.of(settings, command, [Probed()] if faults else [])
        method = Struck(folder, faults) if faults else Recorded(folder)
        trainer.job = replace(trainer.job, method=method)
        trainer.train()
        if hasattr(trainer.engine, "recovery"):
            told = {k: getattr(trainer.engine.recovery, k) for k in ("failures", "replayed")}
            (folder / "recovery.json").write_text(json.dumps(told))

    return cli.main("", config.Settings, config.load, run, argv=spec["words"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
