"""Watch a run while it goes, or look at one that is over: a live page in the browser.

    python -m treeprop_ray.watch run=results/runs/<name>              # prints the page's address
    python -m treeprop_ray.watch run=results/runs/<name> port=8000
    python -m treeprop_ray.watch run=results/runs/<name> host=0.0.0.0     # asks for a token

The page shows the tree coloured by the loss of its nodes, the score of every path, how well the
update is aligned with the true gradient (with probe.every=), the waves of the last timed step (with
engine=ray), the pace, and what happened to the run. It reads the run folder only: the run need not
know, may not have begun yet, and may be stopped and taken up again meanwhile. Ctrl-C ends it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from treeprop_ray import config
from treeprop_ray.config import cli, opt
from treeprop_ray.errors import Terminated


@dataclass
class WatchSettings:
    """Settings of the watch command."""

    run: str = opt("", "run folder, e.g. results/runs/<name>")
    host: str = opt("127.0.0.1", "address to listen on; one that others reach asks for a token")
    port: int = opt(0, "port to listen on; 0 = any that is free", low=0, high=65535)


def load(words: Sequence[str]) -> WatchSettings:
    """Settings from command-line words."""
    settings: WatchSettings = config.merge(WatchSettings, ("", config.parse_overrides(words)))
    return settings


def run(settings: WatchSettings) -> None:
    """The watch command."""
    from treeprop_ray.reporting.live import Live
    from treeprop_ray.reporting.serving import Server

    with Server(Live(settings.run), settings.host, settings.port) as server:
        print(f"watching {settings.run} at {server.url} (Ctrl-C ends)", flush=True)
        with contextlib.suppress(KeyboardInterrupt, Terminated):
            server.serve_forever()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.watch`."""
    return cli.main(__doc__ or "", WatchSettings, load, run, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
