"""Beginning and end of the Ray engine: where actors land, errors, interrupts, other clusters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
import torch
from conftest import engine_of
from ray import cloudpickle
from torch import Tensor, nn

from treeprop_ray import TreeNetwork, config, data, fit
from treeprop_ray.engine import runtime
from treeprop_ray.errors import TERMINATED, TrainingError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def three_machines() -> Iterator[str]:
    """Three Ray nodes with a made-up GPU each, on this machine; this process has not joined."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 1})
    for _ in range(2):
        cluster.add_node(num_cpus=2, num_gpus=1)
    yield cluster.address
    cluster.shutdown()
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


@pytest.fixture
def joined(three_machines: str) -> Iterator[None]:
    ray.init(address=three_machines, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def places() -> dict[str, str]:
    """Ray node of every living actor, by the last part of its name."""
    return {
        a["Name"].rpartition("/")[2]: a["Address"]["NodeID"]
        for a in ray._private.state.actors().values()
        if a["State"] == "ALIVE"
    }


def test_actors_land_where_the_plan_says_on_three_machines(joined: None) -> None:
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


def test_an_exception_in_one_node_surfaces_once_with_node_level_and_step(joined: None) -> None:
    own = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)]
    own[2] = Fragile()
    x, y = torch.randn(64, 5), torch.arange(64) % 2
    network = TreeNetwork.from_blocks(
        None, own, nn.Linear(5, 2), example=x[:2], auxiliary=lambda l, r: nn.Linear(5, 5)
    )
    words = {"engine": "ray", "placement": "packed", "hosts": 2, "batch": 16, "epochs": 5,
             "device": "cpu"}  # fmt: skip
    with pytest.raises(TrainingError) as caught:
        fit(network, x, y, **words)
    node = next(n for n in network.tree.nodes.values() if (2, 3) in (n.left, n.right))
    text = str(caught.value)
    assert f"level {node.level}, step 3: ValueError: the block broke" in text
    assert str(node.n) in text.partition(",")[0] and "\n" not in text
    assert not places()


def test_own_blocks_train_on_ray_as_in_one_process(joined: None) -> None:
    def train(**where: object) -> dict[str, Tensor]:
        torch.manual_seed(0)
        own = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)]
        x, y = torch.randn(64, 5), torch.arange(64) % 2
        network = TreeNetwork.from_blocks(None, own, nn.Linear(5, 2), example=x[:2])
        return fit(network, x, y, batch=16, epochs=2, sigma=0.1, **where).network.state_dict()

    alone = train()
    for key, value in train(engine="ray", placement="packed", hosts=2, device="cpu").items():
        assert torch.equal(value, alone[key]), key


def ours(folder: str, kind: str = "") -> list[int]:
    """Processes that name the folder, in their command line or (Ray's agents and workers, which
    have other names) by a file that they have open; and the kind."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                named = command = (entry / "cmdline").read_bytes().decode(errors="replace")
                if command.startswith("ray::"):
                    named += " ".join(os.readlink(fd) for fd in (entry / "fd").iterdir())
                if folder in named and kind in command:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_until(condition: Callable[[], object]) -> None:
    """Patiently: nothing here is about how long it takes."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


HASTY = """
import sys
from treeprop_ray import train
from treeprop_ray.engine import watch
watch.ANSWER, watch.PATIENCE["control store"] = 5.0, 3
sys.exit(train.main(sys.argv[1:]))
"""  # the watch's patience is for busy machines


def test_a_run_that_is_ended_says_one_line_leaves_nobody_and_continues(tmp_path: Path) -> None:
    """SIGTERM keeps the step under way (143), Ctrl-C does not, nor does a run whose control store
    is killed or hangs, or whose raylet is killed; a killed driver says nothing. No process of our
    Ray stays, an agent or a paused actor neither."""
    folder = tempfile.mkdtemp(prefix="tp", dir="/tmp")
    env = {**os.environ, "RAY_TMPDIR": folder, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    words = [
        sys.executable, "-c", HASTY, "engine=ray", "hosts=2", "placement=packed",
        "model.hidden=8", "model.blocks=3", f"out={tmp_path}", "name=r", "checkpoint_every=5",
        "keep_last=3", "epochs=100000",
    ]  # fmt: skip

    def steps() -> set[int]:
        return {int(p.name[5:]) for p in (tmp_path / "r" / "checkpoints").glob("step-*")}

    done, way_on = 0, "last checkpoint: {}; this continues: python"
    for victim, how, code, told in (
        ("", "SIGTERM", TERMINATED, "terminated; the same command continues from {}"),
        ("", "SIGINT", 1, "stopped; the same command continues from {}"),
        ("", "SIGKILL", -signal.SIGKILL, ""),
        ("gcs_server", "SIGKILL", 1, f"is gone; {way_on}"),
        ("gcs_server", "SIGSTOP", 1, f"is gone; {way_on}"),
        ("raylet/raylet", "SIGKILL", 1, f"raylet (this machine) is gone; {way_on}"),
    ):
        process = subprocess.Popen(
            words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        earlier = done
        wait_until(lambda: max(steps(), default=0) > earlier or process.poll() is not None)  # noqa: B023
        assert process.poll() is None
        wait_until(lambda: all(ours(folder, f"ray::{k}Agent") for k in ("Dashboard", "RuntimeEnv")))
        if how == "SIGKILL" and not victim:  # a paused actor does not notice
            os.kill(ours(folder, "ray::HostActor")[0], signal.SIGSTOP)
        (pid,) = ours(folder, victim) if victim else (process.pid,)
        os.kill(pid, signal.Signals[how])
        out, err = process.communicate()
        done = max(steps())
        assert process.returncode == code, err
        assert not earlier or f"(step {earlier} of" in out
        if how == "SIGKILL" and not victim:
            assert not err
            wait_until(lambda: not ours(folder))
            continue
        *before, line = err.strip().splitlines()
        assert not before or (victim and all(text.startswith("lost ") for text in before)), err
        # without its Ray a run goes on until that is sure, and the line names what was the last
        # checkpoint then
        named = int(line.partition("step-")[2][:8]) if victim else done
        last = tmp_path / "r" / "checkpoints" / f"step-{named:08}"
        assert told.format(last) in line and named in steps()
        wait_until(lambda: not ours(folder))
    again = subprocess.run([*words, f"steps={done + 2}"], env=env, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert f"(step {done} of {done + 2})" in again.stdout
    wait_until(lambda: not ours(folder))
    trace = json.loads((tmp_path / "r" / "timeline.json").read_text())["traceEvents"]
    assert {"r/host-0", "r/host-1"} == {e["args"]["name"] for e in trace if e["ph"] == "M"}
    assert (tmp_path / "r" / "figures" / "waves.png").stat().st_size > 1000


CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
print("address", cluster.address, flush=True)
sys.stdin.read()
assert len(cluster.list_all_nodes()) == 1
cluster.shutdown()
"""


@pytest.mark.parametrize("mode", ["disabled", "token"])
def test_an_existing_cluster_is_joined_and_left_running(tmp_path: Path, mode: str) -> None:
    """With a token at hand, which a cluster without tokens must not be shown."""
    (token := tmp_path / "token").write_text("a" * 64)
    token.chmod(0o600)
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    env |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", "RAY_AUTH_TOKEN_PATH": str(token)}
    pipe = subprocess.PIPE
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env={**env, "RAY_AUTH_MODE": mode}, stdin=pipe,
        stdout=pipe, stderr=pipe, text=True,
    )  # fmt: skip
    assert cluster.stdout is not None
    address = next(line.split()[1] for line in cluster.stdout if line.startswith("address"))
    words = ["engine=ray", "hosts=1", "placement=packed", "model.hidden=8", "steps=2", "name=c"]
    train = [sys.executable, "-m", "treeprop_ray.train", *words, f"out={tmp_path}"]
    ended = subprocess.run([*train, f"ray.address={address}"], env=env, capture_output=True)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "c" / "summary.json").is_file() and cluster.poll() is None
    cluster.communicate()
    assert cluster.returncode == 0


def test_a_cluster_that_is_not_there_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    from treeprop_ray import train

    assert train.main(["engine=ray", "ray.address=127.0.0.1:1", "steps=1"]) == 2
    assert "ray.address=127.0.0.1:1: cannot connect" in capsys.readouterr().err
