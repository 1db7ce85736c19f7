"""What a trial asks of the cluster, and whether the cluster can ever give it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treeprop_ray import methods
from treeprop_ray.config import Settings
from treeprop_ray.errors import UserError
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.placement import Plan
from treeprop_ray.sweep.plan import Trial


@dataclass(frozen=True)
class Need:
    """Bundles of a trial's placement group: the trial's own, then one for each of its actors."""

    bundles: list[dict[str, float]]
    strategy: str = "PACK"

    def total(self, kind: str) -> float:
        """All CPUs or GPUs of the trial."""
        return sum(bundle.get(kind, 0.0) for bundle in self.bundles)

    def __str__(self) -> str:
        parts = [f"{self.total('CPU'):g} CPU"]
        if self.total("GPU"):
            parts.append(f"{self.total('GPU'):g} GPU")
        actors = len(self.bundles) - 1
        return " + ".join(parts) + (f" ({actors} actors)" if actors else "")


def need(settings: Settings, cluster: Cluster) -> Need:
    """The bundles of a trial; UserError when the cluster can never hold them."""
    if settings.engine == "ray":
        plan = plan_of(settings, cluster)
        return Need([{}, *plan.bundles], plan.strategy)  # the trial itself only waits
    if settings.engine == "train":
        raise UserError("engine=train: not for a sweep; use engine=local or engine=ray")
    gpus = 1.0 if cluster.gpus and settings.device != "cpu" else 0.0
    cpus = float(settings.threads)
    if not any(c >= cpus and g >= gpus for c, g in cluster.nodes):
        raise UserError(
            f"threads={settings.threads}: a trial needs {cpus:g} CPU + {gpus:g} GPU on one "
            f"machine, but the cluster has {cluster}"
        )
    return Need([{"CPU": cpus, **({"GPU": gpus} if gpus else {})}])


def pin(settings: Settings, cluster: Cluster) -> Settings:
    """Fix what the plan decided, so that the trial's own plan asks for the bundles it was given."""
    if settings.engine != "ray":
        return settings
    return methods.of(settings).pinned(settings, plan_of(settings, cluster))


def plan_of(settings: Settings, cluster: Cluster) -> Plan:
    """Where the actors of a run would live."""
    method = methods.of(settings)
    return method.plan(settings, method.tree(settings), cluster)


def room(each: Need, cluster: Cluster) -> int:
    """How many trials of this kind fit at the same time; at least one."""
    fits = [
        int(have / each.total(kind) + 1e-6)
        for kind, have in (("CPU", cluster.cpus), ("GPU", cluster.gpus))
        if each.total(kind)
    ]
    return max(1, min(fits, default=1))


def side_by_side(trials: Sequence[Trial], cluster: Cluster, at_most: int) -> int:
    """How many trials run at the same time; `at_most` 0 sets no limit."""
    fits = min((room(need(t.settings, cluster), cluster) for t in trials), default=1)
    return min(fits, at_most or fits)
