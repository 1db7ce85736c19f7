"""The cluster files: Ray's own validation, authentication, nothing open, everything pinned."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.autoscaler._private.util import prepare_config, validate_config

from treeprop_ray import config, doctor, tune
from treeprop_ray.config.spaces import shipped
from treeprop_ray.engine.runtime import TASK_EVENTS

ROOT = Path(__file__).parent.parent.parent
CLUSTERS = ROOT / "clusters"
LAUNCHER = ["gpu.yaml", "gpu-gcp.yaml", "onprem.yaml"]
CLOUD = LAUNCHER[:2]


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CLUSTERS / name).read_text())
    return found


def kube(kind: str) -> dict[str, Any]:
    (found,) = [item for item in read("kuberay.yaml")["items"] if item["kind"] == kind]
    return found


def test_no_file_is_forgotten() -> None:
    assert {p.name for p in CLUSTERS.glob("*.yaml")} == {*LAUNCHER, "kuberay.yaml"}


@pytest.mark.parametrize("name", LAUNCHER)
def test_ray_accepts_the_file(name: str) -> None:
    prepared = prepare_config(read(name))
    validate_config(prepared)
    broken = {**prepared, "idle_minutes": 3}  # the validation is one that can fail
    with pytest.raises(Exception, match="idle_minutes"):
        validate_config(broken)


@pytest.mark.parametrize("name", LAUNCHER)
def test_the_token_is_on_and_the_dashboard_on_loopback(name: str) -> None:
    config = prepare_config(read(name))
    for part in ("head", "worker"):
        starts = [c for c in config[f"{part}_start_ray_commands"] if "ray start" in c]
        assert len(starts) == 1 and "RAY_AUTH_MODE=token ray start" in starts[0]
    head = config["head_start_ray_commands"][-1]
    assert "--dashboard-host=127.0.0.1" in head
    assert f"RAY_task_events_max_num_task_in_gcs={TASK_EVENTS} " in head
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    text = (CLUSTERS / name).read_text()
    assert not re.search(r"0\.0\.0\.0|AUTH_MODE=disabled", text)


@pytest.mark.parametrize("name", CLOUD)
def test_containers_have_the_token_mode_and_the_versions_of_the_tests(name: str) -> None:
    config = read(name)
    assert config["docker"]["image"] == f"rayproject/ray:{ray.__version__}-py311-gpu"
    assert "--env=RAY_AUTH_MODE=token" in config["docker"]["run_options"]
    assert "--volume=/mnt/shared:/mnt/shared" in config["docker"]["run_options"]


@pytest.mark.parametrize("name", LAUNCHER)
def test_the_package_is_installed_from_what_is_mounted_under_the_constraints(name: str) -> None:
    config = read(name)
    here = {t: s for t, s in config["file_mounts"].items() if not s.startswith("~")}
    assert all((ROOT / source).exists() for source in here.values())
    needed = {"treeprop_ray", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    assert {t.removeprefix("~/treeprop/") for t in here} == needed
    installs = [c for c in config["setup_commands"] if "pip install" in c]
    assert all("--constraint ~/treeprop/constraints.txt ~/treeprop" in c for c in installs)
    assert len(installs) == 1


@pytest.mark.parametrize("name", [*LAUNCHER, "kuberay.yaml"])
def test_every_file_says_who_keeps_outsiders_from_the_metrics(name: str) -> None:
    """Their port asks for no token and listens on every address."""
    assert "ask for no token" in (CLUSTERS / name).read_text()
    if name == "kuberay.yaml":
        policy = kube("NetworkPolicy")["spec"]
        assert policy["policyTypes"] == ["Ingress"] and len(policy["ingress"]) == 1
    else:
        starts = [
            c for part in ("head", "worker") for c in read(name)[f"{part}_start_ray_commands"]
        ]
        assert sum("--metrics-export-port=8090" in c for c in starts) == 2


def test_ray_makes_no_open_security_group() -> None:
    """Ray opens ssh to 0.0.0.0/0 in every group that it makes; it makes none where one is named."""
    types = read("gpu.yaml")["available_node_types"].values()
    assert all(t["node_config"]["SecurityGroupIds"] for t in types)
    gcp = read("gpu-gcp.yaml")["available_node_types"].values()
    for t in gcp:
        (interface,) = t["node_config"]["networkInterfaces"]
        assert not interface["subnetwork"].endswith("/default")


@pytest.mark.parametrize("name", CLOUD)
def test_a_gpu_type_has_bounds_and_idle_workers_end(name: str) -> None:
    config = prepare_config(read(name))
    gpu = config["available_node_types"]["gpu"]
    assert 0 < gpu["min_workers"] <= gpu["max_workers"] <= config["max_workers"]
    assert 0 < config["idle_timeout_minutes"] <= 30
    text = (CLUSTERS / name).read_text()
    assert re.search(r"#.*(MarketType: spot|preemptible: true)", text)


@pytest.mark.parametrize("spec", ["RayCluster", "RayJob"])
def test_ray_reads_the_kubernetes_manifest(spec: str) -> None:
    found = kube(spec)
    assert found["apiVersion"] == "ray.io/v1"
    cluster = found["spec"] if spec == "RayCluster" else found["spec"]["rayClusterSpec"]
    config = _derive_autoscaling_config_from_ray_cr({**found, "spec": cluster})  # validates too
    types = config["available_node_types"]
    assert types["headgroup"]["resources"]["GPU"] == 0
    assert types["gpu"]["resources"]["GPU"] == 1 and types["gpu"]["min_workers"] == 2
    assert config["idle_timeout_minutes"] == 10
    assert cluster["authOptions"] == {"mode": "token"} and cluster["rayVersion"] == ray.__version__
    head = cluster["headGroupSpec"]
    assert head["serviceType"] == "ClusterIP"
    assert head["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    claim = kube("PersistentVolumeClaim")["metadata"]["name"]
    for group in (head, *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim
        (container,) = pod["containers"]
        assert container["image"].endswith(f":{ray.__version__}-py311-gpu")
        bound = {"name": "RAY_task_events_max_num_task_in_gcs", "value": str(TASK_EVENTS)}
        assert bound in container["env"]
        assert {"/mnt/shared", "/dev/shm"} == {m["mountPath"] for m in container["volumeMounts"]}


def test_the_job_ends_its_pods() -> None:
    spec = kube("RayJob")["spec"]
    assert spec["shutdownAfterJobFinishes"] and spec["submissionMode"] == "SidecarMode"
    python, _, module, *words = spec["entrypoint"].split()
    assert (python, module) == ("python", "treeprop_ray.tune")
    settings = tune.load(words)
    assert settings.sweep in shipped() and not settings.overrides
    assert settings.storage.startswith("/mnt/shared/") and settings.out.startswith("/mnt/shared/")


def test_the_six_commands_are_ones_that_the_programs_take() -> None:
    text = (CLUSTERS / "README.md").read_text()
    jobs = re.findall(r"-- python -m treeprop_ray\.(\w+) ([^`#\n]*)", text)
    assert {name for name, _ in jobs} == {"doctor", "tune", "train"}
    for name, words in jobs:
        load = {"doctor": doctor.load, "tune": tune.load, "train": config.load}[name]
        load(words.split())
    for word in ("up", "dashboard", "job submit", "rsync-down", "down"):
        assert f"\nray {word} " in text


# -- Grafana ---------------------------------------------------------------------------------------


def exported() -> dict[str, set[str]]:
    """Metrics that the sources declare, as Prometheus shows them, with their labels."""
    text = "".join(
        (ROOT / "treeprop_ray" / "engine" / f).read_text() for f in ("actors.py", "driver.py")
    )
    found = re.findall(r'Gauge\(\s*"(treeprop_\w+)",[^(]*\(([^)]*)\)', text)
    return {f"ray_{name}": set(re.findall(r'"(\w+)"', labels)) for name, labels in found}


def test_grafana_shows_every_metric_and_no_other() -> None:
    text = (CLUSTERS / "grafana" / "treeprop.json").read_text()
    board = json.loads(text)
    metrics = exported()
    assert len(metrics) == 5
    used = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            names = set(re.findall(r"\bray_\w+", target["expr"]))
            assert names and names <= set(metrics), target["expr"]
            labels = {label for n in names for label in metrics[n]}
            legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            chosen = set(re.findall(r"(\w+)\s*=~?", target["expr"]))
            grouped = set(re.findall(r"by \((\w+(?:, \w+)*)\)", target["expr"]))
            spread = {g for text in grouped for g in text.split(", ")}
            assert legend | chosen | spread <= labels, target["expr"]
            used |= names
    assert used == set(metrics)
    assert all(v["query"].count("ray_treeprop_") == 1 for v in board["templating"]["list"][1:])
