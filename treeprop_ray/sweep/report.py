"""Tables and figure of sweeps, from their run folders and from the rows stored earlier."""

from __future__ import annotations

from pathlib import Path

from treeprop_ray.errors import UserError
from treeprop_ray.reporting.index import sweep_tables, write_index
from treeprop_ray.sweep import rows, table
from treeprop_ray.sweep.command import sweep_of_command
from treeprop_ray.sweep.figure import draw


def write_sweep(name: str, storage: str, out: Path) -> str:
    """Write <name>.csv, .md and .png and the index; returns the tables as text."""
    ended: list[rows.Row] = []
    for command in rows.command_log(Path(storage) / name):  # the newest has the last word
        ended += rows.rows_of(sweep_of_command(command, storage))
    stored = out / f"{name}.csv"
    together = rows.merge(rows.read_rows(stored), ended)
    if not together:
        raise UserError(
            f"sweep={name}: no run has come to an end in {storage}/{name}, and there is no {stored}"
        )
    out.mkdir(parents=True, exist_ok=True)
    rows.write_rows(stored, together)
    sections = table.sections(rows.read_rows(stored), sweep_of_command)
    (out / f"{name}.md").write_text(table.report_of(name, sections))
    draw(sections, out / f"{name}.png")
    write_index(out)
    tables = "\n\n".join(f"{table.table_of(s)}\n{table.best_of(s)}" for s in sections)
    return f"{tables}\ntable: {out / name}.md"


def names(storage: str, out: Path) -> list[str]:
    """Sweeps that have a folder in `storage` or rows in `out`."""
    logs = {p.parent.name for p in Path(storage).glob("*/commands.json")}
    stored = {name for name in sweep_tables(out) if rows.read_rows(out / f"{name}.csv")}
    return sorted(logs | stored)
