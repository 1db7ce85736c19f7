"""What is installed: a wheel has everything that a checkout has, tune_spaces/ among it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tracked files, unpacked as an installer would."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", "treeprop_ray", "tune_spaces", "pyproject.toml", "LICENSE",
         "README.md"], cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", str(source / "dist"), str(source)], check=True)
    (wheel,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def in_wheel(site: Path, where: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of the unpacked wheel, run in an empty folder."""
    env = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, *words], cwd=where, env=env, capture_output=True, text=True
    )


def test_a_sweep_is_found_in_a_wheel(unpacked: Path, tmp_path: Path) -> None:
    asked = in_wheel(unpacked, tmp_path, "-m", "treeprop_ray.tune", "sweep=alpha_beta", "--dry-run")
    assert asked.returncode == 0, asked.stderr
    assert "24 trials" in asked.stdout and not list(tmp_path.iterdir())
    home = in_wheel(unpacked, tmp_path, "-c", "import treeprop_ray; print(treeprop_ray.__file__)")
    assert home.stdout.startswith(str(unpacked))


def test_a_wheel_has_every_room_and_file(unpacked: Path) -> None:
    package = ROOT / "treeprop_ray"
    files = [
        p for p in package.rglob("*") if p.suffix in (".py", ".yaml", ".html", ".js", ".typed")
    ]
    missing = [p for p in files if not (unpacked / p.relative_to(ROOT)).is_file()]
    spaces = [p.name for p in (ROOT / "tune_spaces").glob("*.yaml")]
    inside = unpacked / "treeprop_ray" / "tune_spaces"
    assert missing == [] and {p.name for p in inside.glob("*.yaml")} == set(spaces)


def test_a_checkout_finds_the_spaces_beside_the_package() -> None:
    from treeprop_ray.config import spaces

    assert spaces.folder() == ROOT / "tune_spaces"
