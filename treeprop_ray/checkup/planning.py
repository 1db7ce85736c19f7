"""The plan command: devices and blocks that are asked about, and what the planner says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treeprop_ray.checkup.settings import PlanSettings
from treeprop_ray.config import Model, dotted
from treeprop_ray.errors import UserError
from treeprop_ray.methods import of
from treeprop_ray.methods.weighing import CORE, GPU, anatomy_of, anatomy_of_model, workload
from treeprop_ray.reporting import planning
from treeprop_ray.reporting.tables import markdown
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.planner import Fleet, fastest
from treeprop_ray.schedule.pricing import ETHERNET, NVLINK, PCIE, SHARED, Link
from treeprop_ray.schedule.workload import Workload

LINKS = {"nvlink": NVLINK, "pcie": PCIE, "ethernet": ETHERNET, "shared": SHARED}
PLAIN = ["objective=node", "alpha=1", "beta=0"]
SHIPPED = Model.__dataclass_fields__["name"].metadata["choices"]


def spelled(words: Sequence[str]) -> list[str]:
    """`model=X` as model.name=X, or as hf=X where X is neither shipped nor one's own; with hf the
    objective is the plain one unless it is given."""
    out = []
    for word in words:
        key, _, value = word.partition("=")
        if key == "model" and value and not value.startswith("{"):
            known = value in SHIPPED or dotted(value)
            word = f"model.name={value}" if known else f"hf={value}"
        out.append(word)
    return [*PLAIN, *out] if any(word.startswith("hf=") for word in out) else out


def fleet_of(asked: PlanSettings) -> Fleet:
    """The devices that are asked about."""
    if asked.speeds and len(asked.speeds) != asked.nodes:
        raise UserError(f"speeds={asked.speeds}: one for each of nodes={asked.nodes} machines")
    if any(speed <= 0 for speed in asked.speeds):
        raise UserError(f"speeds={asked.speeds}: all must be above 0")
    machines = ((float(asked.cpus), float(asked.gpus)),) * asked.nodes
    cluster = Cluster(machines, tuple(asked.speeds))
    fleet = Fleet.on(cluster, asked.transport, 1e9 * asked.memory)
    if asked.link == "auto":
        inside = asked.nodes == 1 and asked.gpus > 0
        return replace(fleet, link=NVLINK) if inside else fleet
    return replace(fleet, link=link_of(asked.link))


def link_of(word: str) -> Link:
    """A link by its name or its GB/s."""
    if word in LINKS:
        return LINKS[word]
    try:
        rate = float(word)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise UserError(f"link={word}: auto, {', '.join(LINKS)}, or GB/s above 0")
    return Link("link", 1e9 * rate, 100e-6)


def prepared(asked: PlanSettings) -> tuple[Workload, Fleet]:
    """Blocks and devices of the settings of the plan command."""
    if not of(asked).planned and not asked.hf:
        raise UserError(
            f"method={asked.method} model.name={asked.model.name}: plans are for networks of "
            "blocks; use method=tree and a model of blocks"
        )
    fleet = fleet_of(asked)
    device = GPU if asked.gpus else CORE
    if asked.tflops:
        device = replace(device, peak=1e12 * asked.tflops / device.share)
    if asked.hf:
        if asked.measure:
            raise UserError("measure=true: a Hugging Face model is known by its config alone")
        anatomy = anatomy_of_model(asked, asked.hf)
    else:
        anatomy = anatomy_of(asked)
    speed = asked.speedup if asked.measure else 0.0
    return workload(asked, anatomy, device, speed), fleet


def report(work: Workload, fleet: Fleet) -> tuple[str, str]:
    """The whole answer as text, and its last line."""
    found = fastest(work, fleet)
    table = markdown(planning.rows(found, fleet.memory))
    verdict = planning.verdict(work, fleet, found)
    return "\n".join([*planning.about(work, fleet), "", table, "", verdict]), verdict
