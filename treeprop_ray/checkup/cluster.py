"""The cluster: its nodes, the placement of an experiment, three training steps."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence

from treeprop_ray import config, data, methods
from treeprop_ray.checkup import FAIL, OK, WARN, Finding, judge, transport
from treeprop_ray.config import Settings
from treeprop_ray.core import devices
from treeprop_ray.engine import Engine, access, build, runtime
from treeprop_ray.errors import TrainingError, UserError, first_line
from treeprop_ray.methods.auto import decided
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.placement import Plan


def examine(settings: Settings) -> Iterator[Finding]:
    """All findings that need a running Ray; starts one and stops it if no cluster is named."""
    try:
        owns = runtime.start(settings.ray)
    except runtime.TokenRefused:
        yield refused(settings.ray.address)
        return
    except Exception as e:  # whatever Ray says is the finding
        remedy = (
            "ray.address= names a running cluster, empty starts a local one; see RAY_ADDRESS too"
        )
        yield Finding("cluster", FAIL, first_line(e), remedy)
        return
    try:
        cluster = runtime.cluster()
        yield nodes(cluster, bool(devices.gpus.build()))
        yield placement(settings, cluster)
        yield from transport.examine()
        yield training(settings)
    finally:
        if owns:
            runtime.stop()


def refused(address: str) -> Finding:
    """Our token is not the cluster's; says which one was shown."""
    shown = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else str(access.token_file())
    where = address or os.environ.get("RAY_ADDRESS", "")
    remedy = (
        "`ray get-auth-token` on the head prints the cluster's: put it into RAY_AUTH_TOKEN here, "
        f"or into {access.token_file()}, with RAY_AUTH_MODE=token"
    )
    return Finding("token", FAIL, f"mismatch: {where} refuses the token of {shown}", remedy)


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
    method = methods.of(settings)
    return method.plan(settings, method.tree(settings), cluster)


def reserves(bundle: Mapping[str, float]) -> str:
    """What an actor takes."""
    return f"{bundle['CPU']:g} CPU" + (f" + {bundle['GPU']:g} GPU" if "GPU" in bundle else "")


def placement(settings: Settings, cluster: Cluster) -> Finding:
    """What the experiment would get."""
    name = settings.experiment
    try:
        plan = plan_for(decided(settings, cluster).settings, cluster)
    except UserError as e:
        return Finding("placement", FAIL, f"experiment={name}: {e}", "lower hosts, or add nodes")
    kind = plan.names[-1].rpartition("/")[2].rpartition("-")[0] or "boundary"
    many = "" if len(plan.actors) == 1 else "s"
    each = reserves(plan.bundles[0])
    found = f"experiment={name}: {len(plan.actors)} actor{many} ({kind}) with {each} each"
    return Finding("placement", OK, f"{found}, {plan.strategy}, device {plan.device}")


# -- three steps ----------------------------------------------------------------------------------

TINY = [
    "experiment=digits", "model.blocks=3", "model.hidden=16", "batch=32", "name=doctor",
    "placement=packed", "cpus_per_actor=0.1",
]  # fmt: skip


def training(settings: Settings) -> Finding:
    """Three steps of a small network on two actors, against the same steps in one process."""
    words = [*TINY, f"device={settings.device}", f"transport={settings.transport}"]
    remedy = "run a train command with engine=local to see whether Ray is at fault"
    began = time.perf_counter()
    try:
        alone = config.load([*words, "engine=local"])
        samples = data.load(alone)
        spread = config.load([*words, "engine=ray", "hosts=2"])
        one, two = (build(methods.job_of(s, samples, 3)) for s in (alone, spread))
        try:
            losses = [three_steps(engine) for engine in (one, two)]
        finally:
            two.close()
    except (TrainingError, UserError) as e:
        return Finding("training", FAIL, first_line(e), remedy)
    return compare(losses[0], losses[1], time.perf_counter() - began, remedy)


def three_steps(engine: Engine) -> list[float]:
    """The sum of all loss terms after each of three steps."""
    losses = []
    for step in range(3):
        engine.step(step, report=True)
        terms = [t for r in engine.reports() for t in r.losses.values()]
        losses.append(math.fsum(value for term in terms for value in term.values()))
    return losses


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
