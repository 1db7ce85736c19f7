"""What `doctor` looks at. A finding is a line: ok, warn or fail, with the remedy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from treeprop_ray.errors import hidden

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    status: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.status:<5} {self.what:<12} {self.found}"
        return hidden(f"{line}\n{'':<18} -> {self.remedy}" if self.remedy else line)


def judge(what: str, found: str, fail: bool, warn: bool, remedy: str) -> Finding:
    """A finding from two conditions; the remedy is shown only when one of them holds."""
    status = FAIL if fail else WARN if warn else OK
    return Finding(what, status, found, "" if status == OK else remedy)


def report(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings as plain data, for --json."""
    return {"status": worst(findings), "findings": [told(f) for f in findings]}


def told(finding: Finding) -> dict[str, str]:
    """A finding as plain data."""
    return {key: hidden(value) for key, value in asdict(finding).items()}


def summary(findings: Sequence[Finding]) -> str:
    """How many there are of each kind."""
    return ", ".join(f"{sum(f.status == s for f in findings)} {s}" for s in (OK, WARN, FAIL))


def worst(findings: Sequence[Finding]) -> str:
    """fail if anything failed, else warn if anything is doubtful, else ok."""
    seen = {f.status for f in findings}
    return FAIL if FAIL in seen else WARN if WARN in seen else OK


def shown(findings: Iterable[Finding], as_json: bool) -> Iterator[Finding]:
    """Print each as it is found; with --json nothing until `summed_up`."""
    for finding in findings:
        if not as_json:
            print(finding, flush=True)
        yield finding


def summed_up(findings: Sequence[Finding], as_json: bool) -> bool:
    """Print the end of the report; whether anything failed."""
    print(json.dumps(report(findings), indent=2) if as_json else summary(findings))
    return worst(findings) == FAIL


def size(n: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.1f} GB"
