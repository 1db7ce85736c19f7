"""A table of finished runs."""

from collections.abc import Callable
from pathlib import Path

from conftest import Result

Command = Callable[..., Result]
TINY = ["experiment=text_small", "model.hidden=12", "model.heads=3", "data.length=16", "batch=8"]


def test_compare_writes_a_table_from_summaries(command: Command, tmp_path: Path) -> None:
    words = [*TINY, "steps=1", "data.limit=8", f"out={tmp_path / 'runs'}"]
    for method in ("tree", "bp"):
        assert command("train", *words, f"method={method}", f"name={method}").code == 0
    runs = ",".join(str(tmp_path / "runs" / m) for m in ("tree", "bp"))
    done = command("compare", f"runs=[{runs}]", f"to={tmp_path / 'text'}", "title=Text")
    assert done.code == 0
    page = (tmp_path / "text.md").read_text()
    assert "| TreeProp | " in page and "model.hidden=12" in page and "spine-1" in page
    assert (tmp_path / "text" / "bp.json").is_file()
    assert "no such folder" in command("compare", "runs=[/no/such]", "to=x").err
    assert "at least one run folder" in command("compare", "to=x").err
