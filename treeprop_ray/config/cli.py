"""The common front of all commands: key=value words, --help, --cfg, exit codes. No torch here."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from treeprop_ray.config import Settings, describe, to_yaml
from treeprop_ray.config import load as load_settings
from treeprop_ray.errors import (
    TERMINATED,
    Terminated,
    TrainingError,
    UserError,
    one_line,
    place_of,
    signals,
    warn,
)

DONE, FAILED, BAD_INPUT = 0, 1, 2
RECORD = "--record"


def main(
    doc: str,
    schema: type,
    load: Callable[[Sequence[str]], Any],
    run: Callable[[Any], int | None],
    show: Callable[[Any], str] | None = None,
    argv: Sequence[str] | None = None,
    flags: Mapping[str, Callable[[Any], int | None]] | None = None,
    record: str = "",
) -> int:
    """Run a command and return its exit code: 0 done, 1 failed run, 2 bad input, 143 terminated.

    Whatever happens is one line; --debug shows the traceback too.
    `show` may add to what --cfg prints; `flags` are what the command can do instead of running;
    `record` is the word that --record stands for, in commands that write tables.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    code = _guarded(doc, schema, load, run, show, words, flags or {}, record)
    signals.late(code)
    return code


def _guarded(
    doc: str,
    schema: type,
    load: Callable[[Sequence[str]], Any],
    run: Callable[[Any], int | None],
    show: Callable[[Any], str] | None,
    words: Sequence[str],
    flags: Mapping[str, Callable[[Any], int | None]],
    record: str,
) -> int:
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    interrupts: list[int] = []
    try:
        words = recorded(words, record) if record else words
        with _signals(debug, interrupts):
            return _run(doc, schema, load, run, show, words, flags, bool(record))
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (Exception, KeyboardInterrupt, Terminated) as e:
        if debug:
            traceback.print_exc()
        known = isinstance(e, UserError | TrainingError | Terminated | KeyboardInterrupt)
        line, code = told(KeyboardInterrupt() if interrupts and not known else e)
        with contextlib.suppress(OSError):  # a standard error that is full or closed
            print(line, file=sys.stderr, flush=True)
        return code


def recorded(words: Sequence[str], word: str) -> list[str]:
    """--record is short for the word that names the published tables' place."""
    key = word.partition("=")[0]
    if RECORD in words and (given := [w for w in words if w.startswith(f"{key}=")]):
        raise UserError(f"{given[0]}: {RECORD} means {word}; give one of them")
    return [word if w == RECORD else w for w in words]


def told(error: BaseException) -> tuple[str, int]:
    """The one line and the exit code in which an error ends a command."""
    if isinstance(error, UserError):
        return f"error: {one_line(error)}", BAD_INPUT
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # only a user makes those
        name = str(error.filename)[:40]
        return f"error: {one_line(Exception(name))}…: too long for the name of a file", BAD_INPUT
    if isinstance(error, TrainingError):
        return f"failed: {one_line(error)}", FAILED
    if isinstance(error, Terminated):
        last = error.saved or "the last checkpoint"
        return f"terminated; the same command continues from {last}", TERMINATED
    if isinstance(error, KeyboardInterrupt):
        last = f"{error}" or "the last checkpoint"
        return f"stopped; the same command continues from {last}", FAILED
    text = " ".join(str(error).split())  # nobody has foreseen it: the last line of defence
    where = place_of(error)
    return one_line(
        Exception(f"failed: {type(error).__name__}: {text}{where} (--debug shows more)")
    ), FAILED


def _run(
    doc: str,
    schema: type,
    load: Callable[[Sequence[str]], Any],
    run: Callable[[Any], int | None],
    show: Callable[[Any], str] | None,
    words: Sequence[str],
    instead: Mapping[str, Callable[[Any], int | None]],
    records: bool,
) -> int:
    if "--help" in words or "-h" in words:
        said = [w for w in words if not w.startswith("-")]
        print(help_text(doc, load(said) if said else without_words(schema)))
        return DONE
    given = [w for w in words if w.startswith("-")]
    for other in given:
        if other not in ("--cfg", *instead):
            known = ", ".join(["--help", "--cfg", *instead, *[RECORD] * records, "--debug"])
            raise UserError(f"{other}: unknown flag; known: {known}; settings are key=value")
    settings = load([w for w in words if not w.startswith("-")])
    if given and "--cfg" not in given:
        return instead[given[0]](settings) or DONE
    if given:
        print(to_yaml(settings), end="")
        if show and (more := show(settings)):
            print(more)
        return DONE
    return run(settings) or DONE


@contextlib.contextmanager
def _signals(debug: bool, interrupts: list[int]) -> Iterator[None]:
    """SIGTERM ends the command in order; an error in a thread is one line. What Ctrl-C becomes is
    not always a KeyboardInterrupt, so that it came is remembered."""
    hook, main = threading.excepthook, threading.current_thread() is threading.main_thread()
    drop = sys.unraisablehook

    def said(args: threading.ExceptHookArgs) -> None:
        if debug:
            hook(args)
        elif not type(args.thread).__module__.startswith("tensorboard"):  # told where it writes
            warn(f"a thread failed: {args.exc_value!r}")

    def terminate(number: int, frame: FrameType | None) -> None:
        signals.end_in_import(number, frame)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the way out is not interrupted again
        raise Terminated

    def interrupt(number: int, frame: FrameType | None) -> None:
        signals.end_in_import(number, frame)
        interrupts.append(number)
        raise KeyboardInterrupt

    def dropped(args: Any) -> None:
        """Python drops what arises in a destructor; a signal is sent again after it."""
        if not isinstance(args.exc_value, KeyboardInterrupt | Terminated):
            return drop(args)
        is_term = isinstance(args.exc_value, Terminated)
        number, now = (signal.SIGTERM, signal.SIG_IGN) if is_term else (signal.SIGINT, interrupt)
        if main and signal.getsignal(number) is now:
            signal.signal(number, ours[number])
            threading.Timer(0.01, os.kill, (os.getpid(), number)).start()

    threading.excepthook, sys.unraisablehook = said, dropped
    ours = {signal.SIGTERM: terminate, signal.SIGINT: interrupt} if main else {}
    before = {number: signal.signal(number, handler) for number, handler in ours.items()}
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = hook, drop
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def without_words(schema: type) -> Any:
    """What a command has when nothing is said: the default experiment's values, where it has one.

    Not `load`: that of some commands wants a key, and that of others needs torch for its checks.
    """
    return load_settings([], schema) if issubclass(schema, Settings) else schema()


def help_text(doc: str, settings: Any) -> str:
    """The command's docstring and a table of its keys, group by group."""
    groups = describe(settings)
    key_width = max(len(key) for _, rows in groups for key, _, _ in rows)
    value_width = max(len(value) for _, rows in groups for _, value, _ in rows)
    lines = [doc.strip(), "", "Keys, values and meaning [what a key takes]:"]
    for title, rows in groups:
        lines += ["", title]
        lines += [f"  {k:<{key_width}}  {v:<{value_width}}  {text}" for k, v, text in rows]
    return "\n".join(lines)


def quiet() -> None:
    """Logs of libraries stay silent unless something is wrong."""
    logging.getLogger().setLevel(logging.WARNING)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
