"""doctor: each failure provoked once, the whole command on this machine, made-up clusters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from treeprop_ray import config
from treeprop_ray.checkup import (
    FAIL,
    OK,
    WARN,
    Finding,
    cluster,
    machine,
    simulate,
    transport,
    worst,
)
from treeprop_ray.config import Data
from treeprop_ray.engine import runtime
from treeprop_ray.schedule.cluster import Cluster

GOOD = machine.Facts(
    versions={"python": "3.11.7", "torch": "2.13.0+cpu", "torchvision": "0.28.0", "ray": "2.60.0"},
    wants={"torch": "==2.13.0"},
    vision_error="",
    cores=8,
    gpus=(),
    cuda_build="",
    driver=False,
    memory=(64e9, 32e9),
    shm=32e9,
    disks={"out=results/runs": (500e9, 200e9)},
    auth="",
)


def with_version(name: str, version: str) -> machine.Facts:
    return replace(GOOD, versions={**GOOD.versions, name: version})


def one(facts: machine.Facts, what: str, device: str = "auto") -> Finding:
    (found,) = [f for f in machine.findings(facts, device) if f.what == what]
    return found


def test_a_good_machine_has_nothing_to_mend() -> None:
    found = machine.findings(GOOD, "auto")
    assert worst(found) == OK and not any(f.remedy for f in found)
    assert worst(machine.findings(replace(GOOD, gpus=("H100",), cuda_build="13.0"), "cuda")) == OK


@pytest.mark.parametrize(
    ("facts", "what", "status", "remedy"),
    [
        (with_version("python", "3.9.1"), "python", FAIL, "newer Python"),
        (with_version("torch", ""), "torch", FAIL, "pip install 'torch>=2.6'"),
        (with_version("torch", "2.5.1"), "torch", FAIL, "torch>=2.6"),
        (with_version("ray", "2.9.0"), "ray", FAIL, "ray>=2.50"),
        (with_version("torchvision", "0.20.0"), "torchvision", FAIL, "torchvision>=0.21"),
        (with_version("torch", "2.12.0"), "torchvision", WARN, "torch==2.13.0"),
        (replace(GOOD, vision_error="no nms"), "torchvision", WARN, "data.augment=none"),
        (replace(GOOD, driver=True), "devices", WARN, "CUDA build of torch"),
        (replace(GOOD, memory=(8e9, 2e9)), "memory", WARN, "hosts=1"),
        (replace(GOOD, memory=(8e9, 0.5e9)), "memory", FAIL, "free some"),
        (replace(GOOD, shm=5e9), "/dev/shm", WARN, "--shm-size=19g"),
        (replace(GOOD, shm=64e6), "/dev/shm", FAIL, "--shm-size=19g"),
        (replace(GOOD, disks={"x": (100e9, 5e9)}), "disk", WARN, "out="),
        (replace(GOOD, disks={"x": (9e12, 300e9)}), "disk", WARN, "RAY_TMPDIR"),
        (replace(GOOD, disks={"x": (100e9, 0.1e9)}), "disk", FAIL, "out="),
        (replace(GOOD, auth="disabled"), "token", WARN, "anyone"),
        (with_version("ray", "2.51.0"), "token", WARN, "ray>=2.52"),
    ],
)
def test_each_fault_of_a_machine_is_found_with_its_remedy(
    facts: machine.Facts, what: str, status: str, remedy: str
) -> None:
    found = one(facts, what)
    assert found.status == status and remedy in found.remedy
    others = [f for f in machine.findings(facts, "auto") if f.what != what and f.status != OK]
    assert {f.what for f in others} <= {"torchvision", "token"}  # these two judge pairs


def test_a_gpu_that_was_asked_for_must_be_there() -> None:
    assert one(GOOD, "devices", "cuda").status == FAIL
    assert one(replace(GOOD, driver=True), "devices", "cuda").status == FAIL


def test_the_ranges_are_those_of_the_package() -> None:
    text = (Path(__file__).parent.parent.parent / "pyproject.toml").read_text()
    for name, wanted in machine.REQUIRED.items():
        pattern = r'requires-python = "(.+)"' if name == "python" else rf'"{name}(?:\[.*\])?(>=.+)"'
        assert set(re.findall(pattern, text)) == {wanted}, name  # an extra may name it again


def test_every_data_set_has_its_place() -> None:
    (names,) = [f.metadata["choices"] for f in fields(Data) if f.name == "name"]
    assert {*machine.EMBEDDED, *machine.HUB_SETS} == set(names)


def test_a_data_set_is_here_or_on_the_hub_or_missing(tmp_path: Path) -> None:
    (tmp_path / "hub" / "ylecun" / "mnist").mkdir(parents=True)
    root = str(tmp_path)
    status = lambda name, hub: machine.data_sets(name, root, hub)[1].status  # noqa: E731
    assert status("digits", False) == status("mnist", False) == OK
    assert status("cifar10", True) == WARN and status("cifar10", False) == FAIL
    assert "uoft-cs/cifar10" in machine.data_sets("cifar10", root, False)[1].remedy


def test_each_fault_of_a_cluster_is_found() -> None:
    gpus = Cluster(((8.0, 2.0), (8.0, 0.0)))
    assert cluster.nodes(gpus, gpu_torch=True).status == OK
    assert "CPU build" in cluster.nodes(gpus, gpu_torch=False).found
    assert cluster.nodes(Cluster(((0.0, 0.0),)), True).status == FAIL
    wide = config.load(["engine=ray", "placement=packed", "hosts=4", "gpus_per_actor=1"])
    failed = cluster.placement(wide, gpus)
    assert failed.status == FAIL and "room for 2 actors" in failed.found
    assert cluster.placement(config.load(["engine=ray"]), gpus).status == OK
    assert (
        "3 actors"
        in cluster.placement(config.load(["experiment=digits_gru", "time.depth=2"]), gpus).found
    )
    slow, thin = transport.judge_pairs({"a to b": (0.02, 1e9), "b to c": (0.001, 1e7)})
    assert slow.status == thin.status == WARN and "20.00 ms" in slow.found
    nan = float("nan")
    assert cluster.compare([1.0, 0.9, 0.8], [1.0, 0.9, 0.8], 1, "r").status == OK
    assert cluster.compare([1.0, 0.9, 0.8], [1.0, 0.9, 0.7], 1, "r").status == FAIL
    assert cluster.compare([nan] * 3, [nan] * 3, 1, "r").status == FAIL


def test_pairs_of_nodes_stay_few() -> None:
    assert transport.pairs_of(2) == [(0, 0), (0, 1), (1, 1)]
    assert len(transport.pairs_of(100)) == 100


def test_a_cluster_that_does_not_answer_fails_with_exit_code_1(command: Callable[..., Any]) -> None:
    result = command("doctor", "ray.address=127.0.0.1:1")
    assert result.code == 1 and not result.err
    assert "fail  cluster      ray.address=127.0.0.1:1: cannot connect" in result.out
    assert result.out.strip().splitlines()[-1].endswith("1 fail")


def test_bad_input_is_one_line(command: Callable[..., Any]) -> None:
    for words, text in (
        (["operate"], "task=operate: one of check, simulate, gpu"),
        (["simulate", "nodes=0"], "nodes=0: must be at least 1"),
        (["nods=2"], "did you mean nodes?"),
        (["engine=local"], "engine=local: one of ray"),
    ):
        result = command("doctor", *words)
        assert result.code == 2 and len(result.error_lines) == 1 and text in result.err


@pytest.fixture
def local_ray() -> Iterator[None]:
    runtime.start(config.RaySettings(num_cpus=2))
    yield
    runtime.stop()


def test_doctor_examines_this_machine(command: Callable[..., Any], local_ray: None) -> None:
    (silent,) = transport.examine(patience=0.0)  # nobody can answer at once
    assert silent.status == FAIL and "timed out" in silent.found and "ray status" in silent.remedy
    result = command("doctor", "--json")
    told = json.loads(result.out)
    lines = {f["what"]: f for f in told["findings"]}
    assert set(lines) == {
        *machine.REQUIRED, "devices", "memory", "/dev/shm", "disk", "token", "data sets", "data",
        "cluster", "placement", "transport", "training",
    }  # fmt: skip
    assert "2 CPUs" in lines["cluster"]["found"] and "1 actor " in lines["placement"]["found"]
    assert "127.0.0.1 to itself: call" in lines["transport"]["found"]
    assert lines["training"]["status"] == OK, lines["training"]
    assert result.code == (1 if told["status"] == FAIL else 0)
    assert told["status"] == worst([Finding(**f) for f in told["findings"]])


def test_simulate_shows_where_ray_puts_the_actors(command: Callable[..., Any]) -> None:
    words = ["nodes=2", "gpus=2", "cpus=4", "hosts=3", "strategy=SPREAD"]
    result = command("doctor", "simulate", *words, "--json")
    assert result.code == 0, result.err
    placed = [simulate.Placed(**row) for row in json.loads(result.out)]
    assert [p.actor for p in placed] == ["host-0", "host-1", "host-2"]
    assert {p.machine for p in placed} == {1, 2}  # spread over both
    assert {p.resources for p in placed} == {"1 CPU + 1 GPU"}
    assert placed[0].holds.startswith("stem, head, node 4 6 7")
    assert sum(int(p.parameters.replace(",", "")) for p in placed) > 0
    text = simulate.table([replace(p, machine=1) for p in placed], 2)
    assert "idle: machine 2" in text


@pytest.mark.parametrize(
    ("words", "holds"),
    [
        (
            ["experiment=digits_gru", "time.depth=2", "time.sweeps=0", "time.shards=2"],
            {
                "boundary": "data, readout",
                "depth-0-0": "cell of depth 0, nodes 1/2",
                "depth-0-1": "cell of depth 0, nodes 2/2",
                "depth-1": "cell of depth 1",
            },
        ),
        (["method=bp", "hosts=2"], {"stage-0": "blocks 0..4", "stage-1": "blocks 4..8"}),
        (["method=cff", "hosts=2"], {"stage-0": "blocks 0..4", "stage-1": "blocks 4..8"}),
    ],
    ids=["recurrent", "bp", "cff"],
)
def test_simulate_knows_every_method(words: list[str], holds: dict[str, str]) -> None:
    """What the actors of a plan hold, and how many parameters; nothing is started."""
    settings = config.load([*words, "engine=ray"])
    plan = cluster.plan_for(settings, Cluster(((4.0, 0.0), (4.0, 0.0))))
    told = simulate.held(settings, plan)
    actors = [name.rpartition("/")[2] for name in plan.names]
    assert {actor: text for actor, (text, _) in zip(actors, told, strict=True)} == holds
    assert all(int(parameters.replace(",", "")) > 0 for _, parameters in told)


def test_simulate_deals_lines_out_by_speed(command: Callable[..., Any]) -> None:
    """The fastest machine has the spine and most nodes, the next one the rest."""
    words = ["nodes=3", "cpus=1", "speeds=[0.5,0.01,1]", "hosts=2", "placement=packed"]
    result = command("doctor", "simulate", *words, "--json")
    assert result.code == 0, result.err
    boundary, other = (simulate.Placed(**row) for row in json.loads(result.out))
    assert (boundary.machine, other.machine) == (3, 1)
    assert len(boundary.holds.split()) > len(other.holds.split())
    result = command("doctor", "simulate", "nodes=2", "speeds=[1]")
    assert result.code == 2 and "speeds=[1.0]: one for each of nodes=2" in result.err


def test_simulate_places_the_shards_of_a_time_tree(command: Callable[..., Any]) -> None:
    result = command("doctor", "simulate", "experiment=digits_gru", "time.shards=2", "nodes=2")
    assert result.code == 0 and not result.err
    assert "boundary" in result.out and "cell of depth 0, nodes 2/2" in result.out


def test_a_token_of_another_cluster_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    finding = cluster.refused("10.0.0.1:6379")
    assert (finding.what, finding.status) == ("token", FAIL)
    assert "mismatch: 10.0.0.1:6379 refuses the token of RAY_AUTH_TOKEN" in finding.found
    assert "ray get-auth-token" in finding.remedy
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/some/token")
    assert cluster.refused("a:1").found.endswith("refuses the token of /some/token")
