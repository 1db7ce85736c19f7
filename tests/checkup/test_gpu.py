"""The first GPU: every branch for one, on devices that are not; and on real ones with -m gpu."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fake_gpus
import pytest
import ray
import torch
from fake_gpus import FakeGpus
from torch import distributed

from treeprop_ray import config, data, doctor, methods
from treeprop_ray.benchmarks import gpu as bench
from treeprop_ray.benchmarks.random_data import random_images
from treeprop_ray.checkup import FAIL, OK, gpu
from treeprop_ray.core import devices
from treeprop_ray.engine import build, local
from treeprop_ray.hosts.probe import Gauge
from treeprop_ray.schedule.cluster import Cluster

STREAM = ["placement=packed", "hosts=2", "transport=stream", "head_copies=1", "gpus_per_actor=0.5"]
PACKAGE = Path(devices.__file__).parent.parent
SMALL = ["model.blocks=3", "model.hidden=12", "model.patch=4", "batch=16"]


def test_only_the_door_speaks_to_cuda() -> None:
    speaks = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"torch\.(cuda|version\.cuda)|ProcessGroupNCCL", line)
    ]
    assert speaks and all(line.startswith("core/devices.py") for line in speaks), speaks


def test_the_stand_in_answers_every_question_that_the_door_is_asked() -> None:
    asked = {name for name, member in vars(devices.Gpus).items() if callable(member)}
    assert asked <= set(vars(FakeGpus)), asked - set(vars(FakeGpus))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    gpus = FakeGpus()
    monkeypatch.setattr(devices, "gpus", gpus)
    return gpus


def test_training_and_probing_run_their_gpu_branches(fake: FakeGpus) -> None:
    settings = config.load([*gpu.SMALL, *SMALL, "device=cuda", "precision=bf16"])
    assert local.pick_device("auto") == "cuda"
    engine = build(methods.job_of(settings, data.load(settings), 3))
    assert engine.plan.device == "cuda" and fake.calls["device cuda"]
    losses = gpu.three_steps(engine)
    assert len(losses) == 3 and fake.calls["seed"] > 0
    probe = Gauge(engine.host)  # type: ignore[attr-defined]
    assert fake.calls["rng"] == 1
    probe.restore()
    assert fake.calls["set_rng"] == 1


def test_a_group_of_nccl_is_made_with_the_patience_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU build of torch has no nccl: a class of the same form stands in."""

    class Group:
        class Options:
            _timeout: timedelta

        def __init__(self, store: Any, rank: int, world: int, options: Options) -> None:
            self.told = (store, rank, world, options._timeout)

    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Group, raising=False)
    patience = timedelta(seconds=5)
    assert devices.Gpus().group("store", 1, 2, patience).told == ("store", 1, 2, patience)


def test_without_a_gpu_the_doctor_says_so(
    command: Callable[..., Any], fake_ray: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu.runtime, "cluster", lambda: Cluster(((2.0, 0.0),)))
    monkeypatch.setattr(devices, "gpus", FakeGpus(here=False))
    result = command("doctor", "gpu", f"to={tmp_path}")
    assert result.code == 1 and result.out.startswith("fail  GPU") and not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def fake_ray() -> Iterator[None]:
    """A Ray that counts two GPUs, and whose workers take the CPU for them."""
    tests = str(Path(fake_gpus.__file__).parent)
    with pytest.MonkeyPatch.context() as patch:  # the workers import the stand-in
        patch.setenv("PYTHONPATH", os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]))
        ray.init(
            address="local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False,
            _node_ip_address="127.0.0.1", logging_level="ERROR",
            runtime_env={"worker_process_setup_hook": fake_gpus.install},
        )  # fmt: skip
        yield
        ray.shutdown()


def test_doctor_gpu_fills_its_pages(
    fake: FakeGpus, fake_ray: None, command: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The whole command: the driver sees no GPU, as the head of a cluster; Ray's workers do."""
    fake.here = False
    monkeypatch.setattr(gpu, "SMALL", [*gpu.SMALL, *SMALL])
    monkeypatch.setattr(gpu, "SIZES", {"4 kB": 2**10})
    monkeypatch.setitem(gpu.PLACEMENTS, "packed, transport=stream", STREAM)
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    small = ["experiment=cifar10_vit_small", "data.augment=none", *SMALL]
    few = ("BP, float32", "TreeProp, bf16", "TreeProp, bf16, all GPUs, stream")
    monkeypatch.setattr(bench, "NETWORKS", {"small": (small, lambda s: random_images(32))})
    monkeypatch.setattr(bench, "CANDIDATES", {name: bench.CANDIDATES[name] for name in few})
    result = command("doctor", "gpu", f"to={tmp_path}")
    assert result.code == 0, result.out + result.err
    check, hop, step = (read(tmp_path / f"gpu_{name}.csv") for name in ("check", "hop", "step"))
    assert all(row["result"] == OK for row in check)
    assert len(check) == 2 + 1 + len(gpu.PRECISIONS) + len(gpu.PLACEMENTS)
    assert [row["tensor"] for row in hop] == ["4 kB"] and float(hop[0]["gloo (ms)"]) > 0
    assert [row["why not"] for row in step] == ["-"] * 3, step
    assert float(step[0]["counted (GB)"]) > 0 and step[2]["counted (GB)"] == "-"


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as f:
        return list(csv.DictReader(f))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_doctor_gpu_on_a_real_one(tmp_path: Path) -> None:
    assert doctor.main(["gpu", f"to={tmp_path}"]) == 0
    assert (tmp_path / "gpu_check.md").is_file() and (tmp_path / "gpu_step.md").is_file()
    assert FAIL not in {row["result"] for row in read(tmp_path / "gpu_check.csv")}
