"""Fuzz: made-up command lines over all commands, and run folders with one damaged file.

    PYTHONPATH=.:tests python -m lab.fuzz lines=1500 files=300 seed=1 to=results/local

A case is fine if it ends with code 0, 1 or 2 and without a traceback, with one line where the code
is not 0; a run that trains on from a damaged folder must end with the weights of a whole one.
"Unforeseen" counts the cases that only the last line of defence (cli.main) has caught. Every case
has dice of its own, and its row is written when it is done (`to`/lab_fuzz_rows.csv): the same
command goes on where an earlier one was ended.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from unittest import mock

import torch

from lab.harms import HARMS
from treeprop_ray import config
from treeprop_ray.__main__ import COMMANDS
from treeprop_ray.config import spaces
from treeprop_ray.errors import TrainingError
from treeprop_ray.run import checkpoint
from treeprop_ray.run.trainer import Trainer

SMALL = ["model.hidden=8", "model.blocks=3", "batch=256", "checkpoint_every=2", "keep_last=9",
         "keep_best=false", "name=r", "loggers=[csv]", "eval_every=1000"]  # fmt: skip
TEXT = ["model.name=gpt", "model.heads=2", "data.name=topics", "data.length=16", "data.limit=512"]
# only their words are read: running them starts clusters, or a server that waits for readers
IDLE = ("tune", "bench", "doctor", "watch")
STEPS = 4


@dataclass
class Outcome:
    """How a case ended."""

    case: str
    code: int
    err: str
    wrong: str = ""  # why that is not fine

    @property
    def unforeseen(self) -> bool:
        """Whether only the last line of defence has caught it."""
        return "--debug shows more" in self.err


@dataclass
class Tally:
    """Counts by what was tried."""

    rows: dict[str, Counter[str]] = field(default_factory=dict)
    bad: list[Outcome] = field(default_factory=list)
    unforeseen: list[Outcome] = field(default_factory=list)
    path: Path | None = None  # of the rows
    done: set[str] = field(default_factory=set)

    def take_up(self, path: Path) -> None:
        """Count the rows of earlier calls."""
        self.path = path
        if path.is_file():
            with path.open(newline="") as f:
                for row in csv.reader(f):
                    if len(row) == 6:
                        number, kind, code, *rest = row
                        self.add(number, kind, Outcome(rest[0], int(code), rest[1], rest[2]), False)

    def add(self, number: str, kind: str, outcome: Outcome, new: bool = True) -> None:
        """Count a case, and keep it if it is new."""
        self.done.add(number)
        row = self.rows.setdefault(kind, Counter())
        row.update(["cases", f"code {outcome.code}"])
        if outcome.wrong:
            row.update(["wrong"])
            self.bad.append(outcome)
        if outcome.unforeseen:
            row.update(["unforeseen"])
            self.unforeseen.append(outcome)
        if new and self.path:
            told = outcome.wrong or outcome.unforeseen  # of the others the code is enough
            case, err = (ascii(outcome.case)[:300], ascii(outcome.err)[-300:]) if told else ("", "")
            with self.path.open("a", newline="") as f:
                csv.writer(f).writerow([number, kind, outcome.code, case, err, outcome.wrong])


def run(name: str, words: list[str]) -> Outcome:
    """A command in this process."""
    out, err = io.StringIO(), io.StringIO()
    module = importlib.import_module(f"treeprop_ray.{name}")
    case = " ".join([name, *words])
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        warnings.simplefilter("ignore")
        try:
            code = module.main(words)
        except BaseException as e:
            return Outcome(case, -1, err.getvalue(), f"raised {e!r}")
    text = err.getvalue()
    lines = [line for line in text.splitlines() if not line.startswith("warning: ")]
    wrong = ""
    if "Traceback" in text:
        wrong = "traceback"
    elif code not in (0, 1, 2):
        wrong = f"code {code}"
    elif code and len(lines) != 1:
        wrong = f"{len(lines)} lines"
    return Outcome(case, code, text, wrong)


# -- command lines --------------------------------------------------------------------------------

VALUES = [
    "", "0", "1", "-1", "1e400", "nan", "-inf", "9" * 30, "true", "no", "null", "[]", "[1,2", "{}",
    "{a: b}", "[[1]]", "x", "../..", "/dev/null", "/proc/self/mem", "~", "*", "a b", "ü²", "\u202e",
    "'", '"', "`id`", "$(id)", "${oc.env:HOME}", "${x}", "!!python/object:os.system x", "&a", "*a",
    "s3://x", "nowhere://x", "http://[", "file:///nowhere", "a:b", "os:system", "treeprop_ray:fit",
    "a.b:c", "2024-01-01", "0x10", "1_000", "1:30", "[0,4,6,8]", "[0,0]", "full", "spine-1", "last",
    "best", "²", "\x00", "\n", "\t", "a\x1b[31m", "=", "==", "x=y", "[" * 200, "{" * 50, "a" * 5000,
]  # fmt: skip


def keys_of(name: str) -> list[str]:
    """The keys of a command's settings."""
    module = importlib.import_module(f"treeprop_ray.{name}")
    schemas = [
        v for v in vars(module).values()
        if isinstance(v, type) and is_dataclass(v) and v.__name__.endswith("Settings")
    ]  # fmt: skip
    found = []
    for schema in schemas:
        found += [key for key, _, _ in config.walk(schema())]
    return sorted(set(found)) or ["run"]


def line(dice: random.Random, keys: list[str], run_folder: Path, scratch: Path) -> list[str]:
    """A made-up command line: mostly known keys with odd values."""
    words = []
    for _ in range(dice.choice([0, 1, 1, 2, 2, 3, 5])):
        shape = dice.random()
        key = dice.choice(keys)
        if shape < 0.1:
            key = "".join(dice.choice("abz._-=[]²🙂 \n") for _ in range(dice.randrange(8)))
        elif shape < 0.2:
            key = dice.choice([f"{key}.x", f"{key}[0]", key.upper(), f"+{key}", f"~{key}"])
        value = dice.choice(VALUES)
        if dice.random() < 0.15:
            value = dice.choice([str(run_folder), str(scratch), str(run_folder / "config.yaml")])
        words.append(dice.choice([f"{key}={value}"] * 9 + [key, value]))
    if dice.random() < 0.15:
        words.append(dice.choice(["--help", "--cfg", "--json", "--debugger", "-x", "--", "-h"]))
    if "run" in keys and dice.random() < 0.7:
        words.append(f"run={run_folder}")
    if "runs" in keys and dice.random() < 0.5:
        words += [f"runs=[{run_folder}]", f"to={scratch / 'table'}"]
    if "sweep" in keys and dice.random() < 0.7:
        words.append(f"sweep={dice.choice(spaces.shipped())}")
    if "out" in keys and dice.random() < 0.5:  # not all that a command does has one
        words.append(f"out={scratch / 'runs'}")
    return words


@contextlib.contextmanager
def harmless(scratch: Path) -> Iterator[None]:
    """Nothing trains for long, no cluster starts, and files land in a scratch folder."""
    before = os.getcwd()
    scratch.mkdir(parents=True, exist_ok=True)
    os.chdir(scratch)
    no_training = mock.patch.object(Trainer, "train", side_effect=TrainingError("would train"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_training)
        for name in IDLE:
            module = importlib.import_module(f"treeprop_ray.{name}")
            stack.enter_context(mock.patch.object(module, "run", lambda settings: 0))
        try:
            yield
        finally:
            os.chdir(before)


def fuzz_lines(count: int, seed: int, folder: Path, tally: Tally) -> None:
    """So many command lines, the commands in turn."""
    runs = wholes(folder)
    keys = {name: keys_of(name) for name in COMMANDS}
    for k in range(count):
        dice, name, number = random.Random(f"{seed} {k}"), COMMANDS[k % len(COMMANDS)], f"line {k}"
        if number in tally.done:
            continue
        scratch = folder / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        whole = runs[int(name == "generate")]
        shutil.copytree(whole, scratch / "whole")  # its own: a line may write into it
        with harmless(scratch):
            words = line(dice, keys[name], scratch / "whole", scratch)
            tally.add(number, f"lines: {name}", run(name, words))


# -- damaged files --------------------------------------------------------------------------------


def trained(folder: Path, more: Sequence[str] = ()) -> Path:
    """A run with all its files, finished."""
    words = [*SMALL, *more, f"steps={STEPS}", f"out={folder}"]
    if not (folder / "r" / "summary.json").is_file():
        with contextlib.redirect_stdout(io.StringIO()):
            Trainer.of(config.load(words)).train()
    return folder / "r"


def wholes(folder: Path) -> tuple[Path, Path]:
    """A run on pictures, and one on text, which can be asked to generate."""
    return trained(folder / "whole"), trained(folder / "text", TEXT)


def commands(root: Path) -> dict[str, list[str]]:
    """What is asked of a damaged run."""
    at = f"run={root / 'r'}"
    return {
        "evaluate": [at],
        "export": [at, f"to={root / 'exported'}"],
        "probe": [at, "batches=1", "draws=0"],
        "report": [at],
        "compare": [f"runs=[{root / 'r'}]", f"to={root / 'table'}"],
        "generate": [at, "tokens=4"],
        "train": [*SMALL, f"out={root}", f"steps={STEPS + 2}"],
    }


def files_of(folder: Path) -> list[Path]:
    """What can be damaged."""
    found = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return sorted(p.relative_to(folder) for p in found)


def fuzz_files(count: int, seed: int, folder: Path, tally: Tally) -> None:
    """So many damaged run folders, one damage each."""
    runs = wholes(folder)
    files = [files_of(whole) for whole in runs]
    expected = weights(trained_further(folder / "further"))
    for k in range(count):
        dice, number, root = random.Random(f"{seed} {k}"), f"file {k}", folder / "damaged"
        if number in tally.done:
            continue
        shutil.rmtree(root, ignore_errors=True)
        name = list(commands(root))[k % 7]
        kind = int(name == "generate")
        shutil.copytree(runs[kind], root / "r")
        victim, harm = dice.choice(files[kind]), dice.choice(sorted(HARMS))
        HARMS[harm](dice, root / "r" / victim)
        outcome = run(name, commands(root)[name])
        outcome.case += f" ({victim}: {harm})"
        if name == "train" and outcome.code == 0 and not outcome.wrong:
            ends = weights(root / "r")
            if any(not torch.equal(ends[key], value) for key, value in expected.items()):
                outcome.wrong = "other weights"
        tally.add(number, f"files: {harm}", outcome)


def trained_further(folder: Path) -> Path:
    """What an undamaged run would have become."""
    words = [*SMALL, f"steps={STEPS + 2}", f"out={folder}"]
    with contextlib.redirect_stdout(io.StringIO()):
        Trainer.of(config.load(words)).train()
    return folder / "r"


def weights(run_folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(run_folder / "checkpoints", STEPS + 2).weights


# -- the command ----------------------------------------------------------------------------------


@dataclass
class Fuzz:
    """Settings of the fuzz."""

    lines: int = 1500
    files: int = 300
    seed: int = 1
    to: str = ""


def main(argv: list[str]) -> int:
    """Run the fuzz; 1 if a case was wrong."""
    given = dict(word.split("=", 1) for word in argv)
    kinds = {f.name: type(getattr(Fuzz(), f.name)) for f in fields(Fuzz)}
    s = Fuzz(**{key: kinds[key](value) for key, value in given.items()})
    tally, began = Tally(), time.monotonic()
    if s.to:
        Path(s.to).mkdir(parents=True, exist_ok=True)
        tally.take_up(Path(s.to).resolve() / "lab_fuzz_rows.csv")  # commands run elsewhere
    with tempfile.TemporaryDirectory(prefix="treeprop-fuzz-") as folder:
        fuzz_lines(s.lines, s.seed, Path(folder), tally)
        fuzz_files(s.files, s.seed, Path(folder), tally)
    codes = sorted({key for row in tally.rows.values() for key in row if key.startswith("code")})
    columns = ["cases", *codes, "wrong", "unforeseen"]
    rows = [
        {"what": what, **{column: str(row[column]) for column in columns}}
        for what, row in sorted(tally.rows.items())
    ]
    for outcome in tally.bad:
        print(f"WRONG {outcome.wrong}: {outcome.case!r}\n  {outcome.err[-400:]!r}")
    for outcome in tally.unforeseen:
        print(f"unforeseen: {outcome.case[:200]!r}\n  {outcome.err[-300:].strip()!r}")
    if s.to:
        from treeprop_ray.reporting.tables import write_table

        notes = [
            f"{s.lines} command lines and {s.files} damaged run folders (one damage each), seed "
            f"{s.seed}. Wrong: a traceback, another exit code than 0, 1, 2, more than one line, or "
            "(train) other weights than an undamaged run. Unforeseen: one line, but only the last "
            "line of defence knew it. `tune`, `bench` and `doctor` read their words only.",
        ]
        title = "Fuzz: command lines and damaged files"
        print(write_table(s.to, "lab_fuzz", title, rows, notes))
    print(json.dumps({"wrong": len(tally.bad), "unforeseen": len(tally.unforeseen),
                      "seconds": round(time.monotonic() - began)}))  # fmt: skip
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
