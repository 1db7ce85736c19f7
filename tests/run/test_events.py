"""events.jsonl, and what a run says on the screen."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Result
from rich.console import Console

from treeprop_ray.run.ending import next_commands
from treeprop_ray.run.events import NAME
from treeprop_ray.run.progress import Bar, clock

Command = Callable[..., Result]
WORDS = ["model.hidden=8", "model.blocks=3", "epochs=2", "loggers=[csv]"]


def test_the_end_names_files_and_commands_that_work(command: Command, tmp_path: Path) -> None:
    words = [*WORDS, f"out={tmp_path}", "name=a run"]
    first = command("train", *words)
    assert first.code == 0 and f"files: {tmp_path / 'a run'}\n" in first.out
    assert "summary.json" in first.out and "spine-1" in first.out
    lines = first.out[first.out.index("next:") :].splitlines()[1:]
    typed = [shlex.split(line, comments=True) for line in lines]
    assert [t[2] for t in typed] == [f"treeprop_ray.{n}" for n in ("evaluate", "export", "report")]
    for _, _, module, *rest in typed:
        assert command(module.partition(".")[2], *rest).code == 0
    again = command("train", *words)
    assert "this run is finished" in again.out and again.out.endswith(first.out[-200:])


def test_a_run_without_a_test_split_is_evaluated_on_the_other() -> None:
    final = {"validation": {"full": {"loss": 1.0, "perplexity": 2.7}}}
    told = dict(next_commands(Path("r"), {"final": final}))
    assert any("evaluate run=r split=validation" in line for line in told)
    assert any("generate run=r" in line for line in told)


def test_a_checkpoint_past_the_last_step_is_said_to_be_only_scored(
    command: Command, tmp_path: Path
) -> None:
    words = [*WORDS, f"out={tmp_path}", "name=r", "epochs=1", "checkpoint_every=1"]
    assert command("train", *words).code == 0
    (tmp_path / "r" / "summary.json").unlink()
    shorter = command("train", *words, "steps=3")
    (line,) = [x for x in shorter.out.splitlines() if x.startswith("continuing from")]
    assert shorter.code == 0 and line.endswith("past the 3 steps asked for: only scored)")


def test_a_torn_line_of_an_earlier_process_stays_one_line(command: Command, tmp_path: Path) -> None:
    words = [*WORDS, f"out={tmp_path}", "name=r"]
    assert command("train", *words, "epochs=1").code == 0
    with (tmp_path / "r" / NAME).open("a") as file:
        file.write('{"kind": "no')
    assert command("train", *words).code == 0
    lines = (tmp_path / "r" / NAME).read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines if not line.endswith('"no')]
    assert kinds == ["start", "end", "start", "end"] and len(lines) == 5


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_bar_names_what_it_shows_and_epoch_lines_stay(width: int) -> None:
    out, line = io.StringIO(), "epoch 1/2  loss 0.5  val full 95.83 %"
    console = Console(file=out, force_terminal=True, width=width, color_system=None)
    with Bar("digits", 20, samples=128, epochs=(10, 2), console=console) as bar:
        for step in range(20):
            if step == 9:
                bar.line(
                    "epoch 1/2  loss 0.5  val full 95.83 %", "val full 95.8 % · spine-3 95.1 %"
                )
            bar.advance()
    shown = out.getvalue()
    assert shown.count(line) == 1  # above the bar, once
    last = shown.rpartition("epoch 2/2")[2]
    assert "val full 95.8 % · spine-3 95.1 %" in last and "samples/s" in last
    assert ("20/20" in last) == (width >= 120)


def test_elsewhere_lines_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("digits", 2, console=Console(file=io.StringIO())) as bar:
        bar.line("epoch 1/2  loss 0.5", "short")
        bar.advance()
    assert capsys.readouterr().out == "epoch 1/2  loss 0.5\n"


def test_the_clock() -> None:
    assert [clock(s) for s in (0, 42, 725, 11525)] == ["0:00", "0:42", "12:05", "3:12:05"]
