"""Ways to damage a file."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path

Harm = Callable[[random.Random, Path], None]


def flip(dice: random.Random, path: Path) -> None:
    raw = bytearray(path.read_bytes())
    for _ in range(min(len(raw), dice.choice([1, 1, 8]))):
        raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
    path.write_bytes(raw)


def cut(dice: random.Random, path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: dice.randrange(len(raw) + 1)])


def noise(dice: random.Random, path: Path) -> None:
    path.write_bytes(dice.randbytes(dice.choice([1, 50, 5000])))


def zeros(dice: random.Random, path: Path) -> None:
    raw = path.read_bytes()
    at = dice.randrange(len(raw) + 1)
    path.write_bytes(raw[:at] + b"\0" * (len(raw) - at))


def gone(dice: random.Random, path: Path) -> None:
    path.unlink()


def a_folder(dice: random.Random, path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_loop(dice: random.Random, path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def twice(dice: random.Random, path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def other_types(dice: random.Random, path: Path) -> None:
    """A JSON or YAML value becomes one of another type."""
    odd = dice.choice(["null", "[]", "{}", "-1", "1e999", '"<script>"', "true", '"\\u0000"', '""'])
    text = path.read_bytes().decode(errors="replace")
    spots = list(re.finditer(r"(?<=: )[^,\n{\[]+", text))
    if not spots:
        return cut(dice, path)
    spot = dice.choice(spots)
    path.write_text(text[: spot.start()] + odd + text[spot.end() :])


HARMS: Mapping[str, Harm] = {
    "flipped bits": flip, "cut off": cut, "noise": noise, "zeros": zeros, "missing": gone,
    "a folder": a_folder, "a loop of links": a_loop, "twice": twice, "other types": other_types,
}  # fmt: skip
