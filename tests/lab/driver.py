"""The driver of a disturbed run: `python -m lab.driver spec.json`. It ends as `train` does."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from ray import cloudpickle

from lab.history import Recorded
from lab.nemesis import Fault, Struck
from treeprop_ray import cli, config
from treeprop_ray.engine import driver
from treeprop_ray.run.trainer import Trainer


def main(path: str) -> int:
    """Train with a nemesis and a history, or with a history alone."""
    spec = json.loads(Path(path).read_text())
    folder = Path(spec["folder"])
    for name in ("lab", "lab.history", "lab.nemesis"):  # actors cannot import the tests
        cloudpickle.register_pickle_by_value(sys.modules[name])
    driver.ANSWER_SECONDS = spec["answer"]
    faults = [Fault(**fault) for fault in spec["faults"]]

    def run(settings: config.Settings) -> None:
        trainer = Trainer.of(settings, command=f"python -m lab.driver {path}")
        method = Struck(folder, faults) if faults else Recorded(folder)
        trainer.job = replace(trainer.job, method=method)
        trainer.train()
        if hasattr(trainer.engine, "recovery"):
            told = {k: getattr(trainer.engine.recovery, k) for k in ("failures", "replayed")}
            (folder / "recovery.json").write_text(json.dumps(told))

    return cli.main("", config.Settings, config.load, run, argv=spec["words"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
