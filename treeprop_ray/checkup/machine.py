"""This machine: versions, devices, memory, disk, data sets.

`look` gathers facts; everything else judges facts and is pure, so each failure can be provoked.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from treeprop_ray.checkup import FAIL, OK, WARN, Finding, judge, size
from treeprop_ray.config import Settings
from treeprop_ray.core import devices as door
from treeprop_ray.data.hub import find_root, hub_reachable
from treeprop_ray.engine import access
from treeprop_ray.errors import first_line

REQUIRED = {"python": ">=3.10", "torch": ">=2.6", "torchvision": ">=0.21", "ray": ">=2.50"}
AUTH_SINCE = ">=2.52"  # the first Ray with token authentication
GB = 1e9

EMBEDDED = {"digits": "scikit-learn", "adding": "made", "topics": "Python"}
# data.name -> folder below the data root
HUB_SETS = {
    "mnist": "ylecun/mnist",
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "tinyimagenet": "zh-plus/tiny-imagenet",
    "wikitext2": "Salesforce/wikitext/wikitext-2-v1",
    "wikitext103": "Salesforce/wikitext/wikitext-103-v1",
}


@dataclass(frozen=True)
class Facts:
    """What was found on this machine; sizes in bytes."""

    versions: Mapping[str, str]  # "" where a package is missing
    wants: Mapping[str, str]  # what torchvision's own metadata says about torch
    vision_error: str  # why torchvision does not import; "" if it does
    cores: int
    gpus: tuple[str, ...]
    cuda_build: str  # "" for a CPU build of torch
    driver: bool  # nvidia-smi is on the PATH
    memory: tuple[float, float]  # total, available
    shm: float | None  # free in /dev/shm
    disks: Mapping[str, tuple[float, float]]  # what it is for -> total, free
    auth: str  # RAY_AUTH_MODE, "" if unset
    open_token: str = ""  # the file with Ray's token, if others can read it


def version(package: str) -> str:
    """An installed version, or nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def wants_of(package: str) -> dict[str, str]:
    """The version ranges a package declares, by name; optional extras are left out."""
    try:
        declared = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    ranges = [Requirement(text) for text in declared]
    return {r.name: str(r.specifier) for r in ranges if r.marker is None or r.marker.evaluate()}


def memory() -> tuple[float, float]:
    """Total and available memory; the limit of a container counts."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    free = total
    info = Path("/proc/meminfo")
    if info.is_file():
        rows = dict(line.split(":", 1) for line in info.read_text().splitlines())
        free = 1024.0 * int(rows["MemAvailable"].split()[0])
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, float(text))
        free = min(free, float(text) - float(used.read_text()))
    return total, free


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def existing(folder: str) -> str:
    """The folder, or the nearest one above it that exists."""
    path = Path(folder).expanduser().absolute()
    return str(next(p for p in (path, *path.parents) if p.exists()))


def examine(settings: Settings) -> Iterator[Finding]:
    """All findings that need no Ray."""
    yield from findings(look(settings.out), settings.device)
    yield from data_sets(settings.data.name, settings.data.root, hub_reachable())


def look(out: str) -> Facts:
    """Gather the facts; `out` is where runs will be written."""
    try:
        import treeprop_ray.core.vision  # noqa: F401

        vision_error = ""
    except Exception as e:  # whatever goes wrong in there is the finding
        vision_error = first_line(e)
    shm = Path("/dev/shm")
    scratch = os.environ.get("RAY_TMPDIR", tempfile.gettempdir())
    folders = {f"out={out}": out, f"Ray's files in {scratch}": scratch}
    usage = {what: shutil.disk_usage(existing(folder)) for what, folder in folders.items()}
    return Facts(
        versions={
            "python": platform.python_version(),
            **{p: version(p) for p in REQUIRED if p != "python"},
        },
        wants=wants_of("torchvision"),
        vision_error=vision_error,
        cores=cores(),
        gpus=tuple(door.gpus.names()),
        cuda_build=door.gpus.build(),
        driver=shutil.which("nvidia-smi") is not None,
        memory=memory(),
        shm=float(shutil.disk_usage(shm).free) if shm.is_dir() else None,
        disks={what: (float(u.total), float(u.free)) for what, u in usage.items()},
        auth=os.environ.get("RAY_AUTH_MODE", ""),
        open_token=str(access.token_file()) if access.is_open(access.token_file()) else "",
    )


def findings(facts: Facts, device: str) -> list[Finding]:
    """Judge the facts; `device` is what the experiment asks for."""
    return [
        *(package(facts, name) for name in REQUIRED),
        devices(facts, device),
        main_memory(facts),
        shared_memory(facts),
        *(disk(what, *sizes) for what, sizes in facts.disks.items()),
        authentication(facts),
    ]


def package(facts: Facts, name: str) -> Finding:
    """Python or a package: is it there, in range, and made for the torch beside it."""
    installed, wanted = facts.versions[name], REQUIRED[name]
    if not installed:
        return Finding(name, FAIL, "not installed", f"pip install '{name}{wanted}'")
    if installed not in SpecifierSet(wanted, prereleases=True):
        how = "install a newer Python" if name == "python" else f"pip install '{name}{wanted}'"
        return Finding(name, FAIL, f"{installed}, needs {wanted}", how)
    if name != "torchvision":
        return Finding(name, OK, installed)
    here, pair = facts.versions["torch"], facts.wants.get("torch", "")
    if here and here not in SpecifierSet(pair, prereleases=True):
        remedy = f"pip install 'torch{pair}', or another torchvision; only data.augment needs it"
        return Finding(name, WARN, f"{installed} is made for torch{pair}, here is {here}", remedy)
    if facts.vision_error:
        remedy = "reinstall torch and torchvision together; until then data.augment=none"
        return Finding(name, WARN, f"{installed} does not import: {facts.vision_error}", remedy)
    return Finding(name, OK, f"{installed}, fits torch {here}")


def devices(facts: Facts, device: str) -> Finding:
    """Cores and GPUs."""
    build = f"torch for CUDA {facts.cuda_build}" if facts.cuda_build else "torch for CPU"
    found = f"{facts.cores} cores, {len(facts.gpus)} GPUs, {build}"
    found += "".join(f"; {name}" for name in facts.gpus)
    if facts.gpus:
        return Finding("devices", OK, found)
    if facts.driver:
        remedy = "install a CUDA build of torch that fits the driver (nvidia-smi shows it)"
        status = FAIL if device == "cuda" else WARN
        return Finding("devices", status, f"{found}, but an NVIDIA driver is here", remedy)
    if device == "cuda":
        return Finding("devices", FAIL, found, "no GPU here: device=cpu, or join a cluster")
    return Finding("devices", OK, found)


def main_memory(facts: Facts) -> Finding:
    """Each actor process takes about 200 MB before it holds a weight."""
    total, free = facts.memory
    return judge(
        "memory",
        f"{size(free)} available of {size(total)}",
        fail=free < 1 * GB,
        warn=free < 4 * GB,
        remedy="free some, or use fewer actors (placement=packed hosts=1): each takes 0.2 GB",
    )


def shared_memory(facts: Facts) -> Finding:
    """Ray's object store wants 30 % of the memory in /dev/shm, else it goes to disk."""
    if facts.shm is None:
        return Finding("/dev/shm", OK, "not used on this system")
    wanted = 0.3 * facts.memory[0]
    return judge(
        "/dev/shm",
        f"{size(facts.shm)} free, the object store takes up to {size(wanted)}",
        fail=facts.shm < 0.1 * GB,
        warn=facts.shm < wanted,
        remedy=f"docker run --shm-size={max(1, round(wanted / GB))}g, or remount /dev/shm larger",
    )


def disk(what: str, total: float, free: float) -> Finding:
    """Checkpoints and Ray's session files; Ray refuses objects when a disk is 95 % full."""
    return judge(
        "disk",
        f"{size(free)} free of {size(total)} for {what}",
        fail=free < 1 * GB,
        warn=free < 10 * GB or free < 0.05 * total,
        remedy="free some, or choose other folders: out=… for runs, RAY_TMPDIR for Ray",
    )


def authentication(facts: Facts) -> Finding:
    """A local Ray turns the token on by itself; a cluster only if RAY_AUTH_MODE says so."""
    remedy = (
        "unset RAY_AUTH_MODE or set it to token: without it anyone who reaches Ray can run code"
    )
    ray = facts.versions["ray"]
    if ray and ray not in SpecifierSet(AUTH_SINCE, prereleases=True):
        return Finding("token", WARN, f"ray {ray} has none", f"pip install 'ray{AUTH_SINCE}'")
    if facts.auth and facts.auth.lower() != "token":
        return Finding("token", WARN, f"RAY_AUTH_MODE={facts.auth}", remedy)
    if facts.open_token:
        found = f"{facts.open_token}: others can read it"
        return Finding("token", WARN, found, f"chmod 600 {facts.open_token}")
    return Finding("token", OK, f"RAY_AUTH_MODE={facts.auth or '(unset: on for a local Ray)'}")


def data_sets(name: str, root: str | None, reachable: bool) -> list[Finding]:
    """Which sets are here and where; the experiment's own must be within reach."""
    base = find_root(root)
    here = [n for n, repo in HUB_SETS.items() if base and (base / repo).is_dir()]
    found = ", ".join(f"{n} ({source})" for n, source in EMBEDDED.items())
    found += f"; in {base}: {', '.join(here) or 'none'}" if base else "; no data.root is set"
    lines = [Finding("data sets", OK, found)]
    if name in EMBEDDED or name in here:
        lines.append(Finding("data", OK, f"data.name={name} is here"))
    else:
        lines.append(
            judge(
                "data",
                f"data.name={name} is not here; the hub is {'' if reachable else 'not '}reachable",
                fail=not reachable,
                warn=True,
                remedy=f"set data.root or TREEPROP_DATA to a folder that holds {HUB_SETS[name]}; "
                "else it is loaded from the Hugging Face hub on first use",
            )
        )
    return lines
