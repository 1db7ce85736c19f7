"""The common front of all commands: key=value words, --help, --cfg, exit codes. No torch here."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treeprop_ray.config import describe, to_yaml
from treeprop_ray.errors import TrainingError, UserError, one_line

DONE, FAILED, BAD_INPUT = 0, 1, 2


def main(
    doc: str,
    schema: type,
    load: Callable[[Sequence[str]], Any],
    run: Callable[[Any], int | None],
    show: Callable[[Any], str] | None = None,
    argv: Sequence[str] | None = None,
    flags: Mapping[str, Callable[[Any], int | None]] | None = None,
) -> int:
    """Run a command and return its exit code: 0 done, 1 failed run, 2 bad input.

    `show` may add to what --cfg prints; `flags` are what the command can do instead of running.
    """
    instead = flags or {}
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if "--help" in words or "-h" in words:
            said = [w for w in words if not w.startswith("-")]
            print(
                help_text(doc, load(said) if said else schema(), "values" if said else "defaults")
            )
            return DONE
        given = [w for w in words if w.startswith("-")]
        for other in given:
            if other not in ("--cfg", *instead):
                known = ", ".join(["--help", "--cfg", *instead])
                raise UserError(f"{other}: unknown flag; known: {known}; settings are key=value")
        settings = load([w for w in words if not w.startswith("-")])
        if given and given[0] in instead:
            return instead[given[0]](settings) or DONE
        if given:
            print(to_yaml(settings), end="")
            if show and (more := show(settings)):
                print(more)
            return DONE
        return run(settings) or DONE
    except UserError as e:
        print(f"error: {one_line(e)}", file=sys.stderr)
        return BAD_INPUT
    except TrainingError as e:
        print(f"failed: {one_line(e)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt as e:
        last = f"{e}" or "the last checkpoint"
        print(f"stopped; the same command continues from {last}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def help_text(doc: str, settings: Any, column: str = "defaults") -> str:
    """The command's docstring and a table of its keys, group by group."""
    groups = describe(settings)
    key_width = max(len(key) for _, rows in groups for key, _, _ in rows)
    value_width = max(len(value) for _, rows in groups for _, value, _ in rows)
    lines = [doc.strip(), "", f"Keys, {column} and meaning:"]
    for title, rows in groups:
        lines += ["", title]
        lines += [f"  {k:<{key_width}}  {v:<{value_width}}  {text}" for k, v, text in rows]
    return "\n".join(lines)


def quiet() -> None:
    """Logs of libraries stay silent unless something is wrong."""
    logging.getLogger().setLevel(logging.WARNING)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
