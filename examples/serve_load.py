"""Load on a served tree (serve_depth.py): blocks and seconds of an answer over requests at once.

cd examples && serve run serve_depth:app run=../results/runs/served &
python serve_load.py run=../results/runs/served [to=http://127.0.0.1:8000] [atonce=1,8,64,256]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from treeprop_ray.reporting.tables import markdown
from treeprop_ray.run.reading import open_run

EACH = 256  # answers of a row


def ask(to: str, image: list[Any]) -> dict[str, float]:
    """One request; its answer and how long it took."""
    request = urllib.request.Request(to, json.dumps({"image": image}).encode())
    began = time.perf_counter()
    with urllib.request.urlopen(request) as reply:
        answer: dict[str, float] = json.load(reply)
    return {**answer, "seconds": time.perf_counter() - began}


def load(to: str, images: list[list[Any]], at_once: int) -> dict[str, float]:
    """Mean blocks and median time of an answer while so many clients ask, one after the other."""
    with ThreadPoolExecutor(at_once) as clients:
        answers = list(clients.map(lambda image: ask(to, image), images))
    return {
        "clients": at_once,
        "blocks (mean)": statistics.mean(a["blocks"] for a in answers),
        "budget (mean)": statistics.mean(a["budget"] for a in answers),
        "budget (least)": min(a["budget"] for a in answers),
        "ms (median)": 1000 * statistics.median(a["seconds"] for a in answers),
    }


def main(words: dict[str, str]) -> list[dict[str, float]]:
    """A row for every number of clients."""
    _, samples, _, _ = open_run(words["run"], "last", None)
    x, _ = next(iter(samples.batches("test")))
    images = [x[k % len(x)].tolist() for k in range(EACH)]
    counts = [int(n) for n in words.get("atonce", "1,8,64,256").split(",")]
    return [load(words.get("to", "http://127.0.0.1:8000"), images, n) for n in counts]


if __name__ == "__main__":
    print(markdown(main(dict(word.split("=", 1) for word in sys.argv[1:]))))
