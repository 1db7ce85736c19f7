"""The cluster: its nodes, the placement of an experiment, how fast tensors travel, three steps."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from treeprop_ray import config
from treeprop_ray.checkup import FAIL, OK, WARN, Finding, judge, size
from treeprop_ray.config import Settings
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import TrainingError, UserError
from treeprop_ray.schedule.placement import Cluster, Plan, plan

LATE = 0.01  # seconds of a call that is slow
THIN = 100e6  # bytes per second that are few
MB_SENT = 32
MOST_PAIRS = 36  # of nodes; beyond that only pairs with the first node are measured


def examine(settings: Settings) -> list[Finding]:
    """All findings that need a running Ray; starts one and stops it if no cluster is named."""
    from treeprop_ray.engine import runtime

    try:
        owns = runtime.start(settings.ray)
    except Exception as e:  # whatever Ray says is the finding
        remedy = (
            "ray.address= names a running cluster, empty starts a local one; see RAY_ADDRESS too"
        )
        return [Finding("cluster", FAIL, _first_line(e), remedy)]
    try:
        cluster = runtime.cluster()
        return [
            nodes(cluster, _gpu_torch()),
            placement(settings, cluster),
            *transport(),
            training(settings),
        ]
    finally:
        if owns:
            runtime.stop()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]


def _gpu_torch() -> bool:
    import torch

    return bool(torch.version.cuda)


def nodes(cluster: Cluster, gpu_torch: bool) -> Finding:
    """The machines that Ray has."""
    found = f"{len(cluster.nodes)} node{'s' if len(cluster.nodes) > 1 else ''}: {cluster}"
    if cluster.gpus and not gpu_torch:
        remedy = "install a CUDA build of torch on all nodes, or set device=cpu"
        return Finding("cluster", WARN, f"{found}; torch here is a CPU build", remedy)
    return judge(
        "cluster", found, cluster.cpus == 0, False, "no node has a CPU: ray start --num-cpus=…"
    )


def plan_for(settings: Settings, cluster: Cluster) -> Plan:
    """Where an experiment's actors would live."""
    if config.recurrent(settings):
        from treeprop_ray.through_time.distributed import plan_time

        return plan_time(settings, cluster)
    return plan(settings, tree_of(settings), cluster, config.run_name(settings))


def tree_of(settings: Settings) -> Tree:
    """The tree of an experiment, whether or not its data is here."""
    model = settings.model
    return Tree(model.blocks + (0 if model.output_block else 1), settings.split)


def placement(settings: Settings, cluster: Cluster) -> Finding:
    """What the experiment would get."""
    name = settings.experiment
    try:
        made = plan_for(settings, cluster)
    except UserError as e:
        return Finding("placement", FAIL, f"experiment={name}: {e}", "lower hosts, or add nodes")
    each = f"{made.cpus:g} CPU" + (f" + {made.gpus:g} GPU" if made.gpus else "")
    kind = made.names[-1].rpartition("/")[2].rpartition("-")[0] or "boundary"
    many = "" if len(made.names) == 1 else "s"
    found = f"experiment={name}: {len(made.names)} actor{many} ({kind}) with {each} each"
    return Finding("placement", OK, f"{found}, {made.strategy}, device {made.device}")


# -- how tensors travel ---------------------------------------------------------------------------


class Probe:
    """An actor that talks to another one. No torch: it starts in half a second."""

    def echo(self, x: Any = None) -> int:
        """Read a byte of every page, so that the data has really arrived."""
        return 0 if x is None else int(x[::4096].sum())

    def latency(self, other: Any, calls: int = 30) -> float:
        """Median seconds of a call without data."""
        import ray

        return statistics.median(_timed(lambda: ray.get(other.echo.remote()), calls))

    def bandwidth(self, other: Any, megabytes: int = MB_SENT) -> float:
        """Bytes per second from here to the other one through the object store."""
        import numpy as np
        import ray

        data = np.ones(megabytes * 1_000_000, dtype=np.uint8)
        seconds = _timed(lambda: ray.get(other.echo.remote(ray.put(data))), 4)
        return data.nbytes / statistics.median(seconds[1:])


def _timed(work: Any, times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return seconds


def pairs_of(count: int) -> list[tuple[int, int]]:
    """Pairs of nodes to measure: each with itself and with the others, if they are not too many."""
    pairs = list(itertools.combinations_with_replacement(range(count), 2))
    return pairs if len(pairs) <= MOST_PAIRS else [(0, k) for k in range(count)]


def measure(patience: float) -> dict[str, tuple[float, float]]:
    """(seconds of a call, bytes per second) for pairs of nodes, by their addresses."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    found = [n for n in ray.nodes() if n["Alive"]]
    make = ray.remote(num_cpus=0)(Probe)
    where = [NodeAffinitySchedulingStrategy(n["NodeID"], soft=False) for n in found]
    probes = [[make.options(scheduling_strategy=w).remote() for _ in range(2)] for w in where]
    out = {}
    try:
        for i, j in pairs_of(len(found)):
            here, there = probes[i][0], probes[j][1]
            name = f"{found[i]['NodeManagerAddress']} to " + (
                "itself" if i == j else found[j]["NodeManagerAddress"]
            )
            ray.get([here.echo.remote(), there.echo.remote()], timeout=patience)
            asked = [here.latency.remote(there), here.bandwidth.remote(there)]
            out[name] = tuple(ray.get(asked, timeout=patience))
    finally:
        for probe in itertools.chain(*probes):
            ray.kill(probe)
    return out


def transport(patience: float = 60.0) -> list[Finding]:
    """Measure all pairs; an actor that does not answer is a failure."""
    from ray.exceptions import RayError

    try:
        return judge_transport(measure(patience))
    except RayError as e:
        remedy = (
            "`ray status` and the logs of the node: can it start an actor, can the others reach it?"
        )
        return [Finding("transport", FAIL, _first_line(e), remedy)]


def judge_transport(measured: Mapping[str, tuple[float, float]]) -> list[Finding]:
    """A line for each pair of nodes."""
    return [
        judge(
            "transport",
            f"{pair}: call {1000 * seconds:.2f} ms, {size(rate)}/s",
            fail=False,
            warn=seconds > LATE or rate < THIN,
            remedy="nodes of one zone and a placement group, or a busy machine; "
            "larger blocks and batches make up for slow calls",
        )
        for pair, (seconds, rate) in measured.items()
    ]


# -- three steps ----------------------------------------------------------------------------------

TINY = [
    "experiment=digits", "model.blocks=3", "model.hidden=16", "batch=32", "name=doctor",
    "placement=packed", "cpus_per_actor=0.1",
]  # fmt: skip


def training(settings: Settings) -> Finding:
    """Three steps of a small network on two actors, against the same steps in one process."""
    from treeprop_ray import data
    from treeprop_ray.engine import local
    from treeprop_ray.engine import ray as distributed

    words = [*TINY, f"device={settings.device}", f"transport={settings.transport}"]
    remedy = "run a train command with engine=local to see whether Ray is at fault"
    began = time.perf_counter()
    try:
        alone = config.load([*words, "engine=local"])
        samples = data.load(alone)
        engines: list[Any] = [local.build(alone, samples, 3)]
        engines.append(
            distributed.build(config.load([*words, "engine=ray", "hosts=2"]), samples, 3)
        )
        try:
            losses = [three_steps(engine) for engine in engines]
        finally:
            engines[1].close()
    except (TrainingError, UserError) as e:
        return Finding("training", FAIL, _first_line(e), remedy)
    return compare(losses[0], losses[1], time.perf_counter() - began, remedy)


def three_steps(engine: Any) -> list[float]:
    """The sum of all loss terms after each of three steps."""
    found = []
    for step in range(3):
        engine.step(step, report=True)
        terms = [t for r in engine.reports() for t in r.losses.values()]
        found.append(math.fsum(value for term in terms for value in term.values()))
    return found


def compare(
    alone: Sequence[float], spread: Sequence[float], seconds: float, remedy: str
) -> Finding:
    """The two engines must agree, to rounding."""
    shown = " ".join(f"{loss:.4f}" for loss in spread)
    finite = all(map(math.isfinite, spread))
    same = all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(alone, spread, strict=True))
    what = (
        "as in one process" if same else f"but {' '.join(f'{x:.4f}' for x in alone)} in one process"
    )
    found = f"3 steps on 2 actors, losses {shown}, {what} ({seconds:.1f} s)"
    return judge("training", found, not (finite and same), False, remedy)
