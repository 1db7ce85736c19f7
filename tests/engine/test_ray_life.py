"""Beginning and end of the Ray engine: where actors land, errors, interrupts, other clusters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from conftest import engine_of
from ray import cloudpickle
from torch import Tensor, nn

from treeprop_ray import TreeNetwork, config, data, fit
from treeprop_ray.engine import runtime
from treeprop_ray.errors import TrainingError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def local_ray() -> Iterator[None]:
    runtime.start(config.RaySettings(num_cpus=2))
    yield
    runtime.stop()


@pytest.fixture
def three_machines() -> Iterator[None]:
    """Three Ray nodes with a made-up GPU each, on this machine."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 1})
    for _ in range(2):
        cluster.add_node(num_cpus=2, num_gpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
    cluster.shutdown()
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def places() -> dict[str, str]:
    """Ray node of every living actor, by the last part of its name."""
    return {
        a["Name"].rpartition("/")[2]: a["Address"]["NodeID"]
        for a in ray._private.state.actors().values()
        if a["State"] == "ALIVE"
    }


def test_actors_land_where_the_plan_says_on_three_machines(three_machines: None) -> None:
    samples = data.load(config.load([]))
    base = ["engine=ray", "model.hidden=8", "device=cpu", "placement=packed"]
    spread = config.load([*base, "hosts=3", "strategy=STRICT_SPREAD", "gpus_per_actor=1"])
    engine = engine_of(spread, samples, 20)
    try:
        assert runtime.cluster().nodes == ((2.0, 1.0),) * 3
        found = places()
        assert set(found) == {"host-0", "host-1", "host-2"} and len(set(found.values())) == 3
        engine.step(0, report=True)
        assert engine.reports()
    finally:
        engine.close()
    halves = config.load([*base, "hosts=6", "gpus_per_actor=0.5"])
    engine = engine_of(halves, samples, 20)
    try:
        per_node = list(places().values())
        assert len(per_node) == 6
        assert sorted(per_node.count(n) for n in set(per_node)) == [2, 2, 2]
    finally:
        engine.close()
    assert not places()


class Fragile(nn.Module):
    """Breaks in its fourth training step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(5, 5), 0

    def forward(self, z: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls == 4:
            raise ValueError("the block broke")
        return torch.tanh(self.linear(z))


def test_an_exception_in_one_node_surfaces_once_with_node_level_and_step(local_ray: None) -> None:
    own = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)]
    own[2] = Fragile()
    x, y = torch.randn(64, 5), torch.arange(64) % 2
    network = TreeNetwork.from_blocks(
        None, own, nn.Linear(5, 2), example=x[:2], auxiliary=lambda l, r: nn.Linear(5, 5)
    )
    words = {"engine": "ray", "placement": "packed", "hosts": 2, "batch": 16, "epochs": 5}
    with pytest.raises(TrainingError) as caught:
        fit(network, x, y, **words)
    node = next(n for n in network.tree.nodes.values() if (2, 3) in (n.left, n.right))
    text = str(caught.value)
    assert f"level {node.level}, step 3: ValueError: the block broke" in text
    assert str(node.n) in text.partition(",")[0] and "\n" not in text
    assert not places()


def test_own_blocks_train_on_ray_as_in_one_process(local_ray: None) -> None:
    def train(**where: object) -> dict[str, Tensor]:
        torch.manual_seed(0)
        own = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)]
        x, y = torch.randn(64, 5), torch.arange(64) % 2
        network = TreeNetwork.from_blocks(None, own, nn.Linear(5, 2), example=x[:2])
        return fit(network, x, y, batch=16, epochs=2, sigma=0.1, **where).network.state_dict()

    alone = train()
    for key, value in train(engine="ray", placement="packed", hosts=2).items():
        assert torch.equal(value, alone[key]), key


def ours(folder: str) -> list[int]:
    """Processes whose command line names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if folder.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_until(condition: object, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.2)
    return False


def test_ctrl_c_leaves_no_process_and_the_same_command_continues(tmp_path: Path) -> None:
    folder = tempfile.mkdtemp(prefix="tp", dir="/tmp")
    env = {**os.environ, "RAY_TMPDIR": folder}
    words = [
        sys.executable, "-m", "treeprop_ray.train", "engine=ray", "hosts=2", "placement=packed",
        "model.hidden=8", "model.blocks=3", f"out={tmp_path}", "name=r", "checkpoint_every=5",
        "keep_last=3",
    ]  # fmt: skip
    process = subprocess.Popen(
        [*words, "epochs=100000"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    saved = lambda: list((tmp_path / "r" / "checkpoints").glob("step-*"))  # noqa: E731
    assert wait_until(saved, 60)
    assert ours(folder)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=900)
    assert process.returncode == 1
    assert "the same command continues" in err and "Traceback" not in err
    assert wait_until(lambda: not ours(folder))
    done = max(int(p.name[5:]) for p in saved())
    again = subprocess.run(
        [*words, f"steps={done + 2}", "epochs=100000"], env=env, capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    assert f"(step {done} of {done + 2})" in again.stdout
    assert wait_until(lambda: not ours(folder))
    trace = json.loads((tmp_path / "r" / "timeline.json").read_text())["traceEvents"]
    assert {"r/host-0", "r/host-1"} == {e["args"]["name"] for e in trace if e["ph"] == "M"}
    assert (tmp_path / "r" / "figures" / "waves.png").stat().st_size > 1000


def test_an_existing_cluster_is_joined_and_left_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.cluster_utils import Cluster

    from treeprop_ray import train

    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        words = ["engine=ray", "hosts=1", "placement=packed", "model.hidden=8", "steps=2", "name=c"]
        assert train.main([*words, f"out={tmp_path}", f"ray.address={cluster.address}"]) == 0
        assert not ray.is_initialized()
        ray.init(address=cluster.address, log_to_driver=False)
        assert len(ray.nodes()) == 1 and not places()
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_a_cluster_that_is_not_there_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    from treeprop_ray import train

    assert train.main(["engine=ray", "ray.address=127.0.0.1:1", "steps=1"]) == 2
    assert "ray.address=127.0.0.1:1: cannot connect" in capsys.readouterr().err
