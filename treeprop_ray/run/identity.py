"""Whose checkpoint it is: the id of a run folder and the settings that say what is computed.

Both are in the manifest of every checkpoint. One of another run is neither taken up nor deleted,
also where `storage=` and `name=` agree. The same settings give the same run bit for bit, so a run
whose folder is lost may be taken up from its storage.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treeprop_ray import config
from treeprop_ray.config import Settings
from treeprop_ray.errors import UserError, warn
from treeprop_ray.run import checkpoint
from treeprop_ray.run.checkpoint import Checkpoint
from treeprop_ray.run.files import read_json, write_whole
from treeprop_ray.run.storage import Storage

FILE = "run.json"


@dataclass
class Identity:
    """What the manifest of a checkpoint says of its run."""

    settings: str  # digest of `computed`
    computed: Mapping[str, Any]
    run: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def of(cls, settings: Settings, folder: Path) -> Identity:
        """That of the run in a folder; a new one where there is none."""
        mine = cls(config.digest(settings), config.computed(settings))
        if (folder / FILE).is_file():
            try:
                mine.run = str(read_json(folder / FILE, "id")["id"])
            except UserError as e:
                warn(f"{e}; it is written anew")
        return mine

    def keep(self, folder: Path) -> None:
        """Write the id into a run folder."""
        write_whole(folder / FILE, json.dumps({"id": self.run}) + "\n")

    def marks(self) -> dict[str, str]:
        """What goes into a manifest."""
        return {"run": self.run, "settings": self.settings}

    def check(self, point: Checkpoint) -> None:
        """UserError for a checkpoint of another run, with what that computes otherwise."""
        if not checkpoint.is_ours(point.manifest, self.marks()):
            theirs = point.meta.get("settings") or {}
            keys = sorted(self.computed.keys() | theirs.keys())
            pairs = [(k, theirs.get(k, "default"), self.computed.get(k, "default")) for k in keys]
            unlike = "; ".join(f"{k}: {a} there, {b} here" for k, a, b in pairs if a != b)
            raise UserError(
                f"{point.path}: is of another run ({unlike or 'its settings differ'}); choose "
                "another name=…, or take its weights with init_from=…"
            )
        if point.manifest.get("settings") == self.settings:
            self.run = point.manifest["run"]  # a run whose folder was lost keeps its id

    def others(self, storage: Storage) -> list[str]:
        """Where checkpoints lie that are of another run, or of nobody knows which."""
        marks = self.marks()
        unlike = []
        for step in checkpoint.steps(storage):
            manifest = checkpoint.manifest(storage, step)
            if manifest is None or not checkpoint.is_ours(manifest, marks):
                unlike.append(storage.at(checkpoint.name_of(step)))
        return unlike
