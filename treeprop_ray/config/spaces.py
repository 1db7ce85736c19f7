"""Where the sweeps' YAML files lie: inside the package (a wheel), or beside it (a checkout)."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

PACKAGE = Path(__file__).parent.parent


def folder() -> Path:
    """tune_spaces/: in an installed wheel part of the package, in a checkout beside it."""
    inside = PACKAGE / "tune_spaces"
    return inside if inside.is_dir() else PACKAGE.parent / "tune_spaces"


def shipped() -> list[str]:
    """Names of the sweeps that come with the package."""
    return sorted(path.stem for path in folder().glob("*.yaml"))


def title(name: str) -> str:
    """The title of a shipped sweep."""
    return str(OmegaConf.select(OmegaConf.load(folder() / f"{name}.yaml"), "title", default=name))
