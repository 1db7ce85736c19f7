"""What a user reads when something breaks inside an actor, or a cluster does not let us in."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from warm import warm_ray

from treeprop_ray import TreeNetwork, fit
from treeprop_ray.errors import TrainingError, UserError

ENGINES = [{"engine": "local"}, {"engine": "ray", "placement": "packed", "hosts": 2}]
OWN = """
import torch
from torch import nn
from treeprop_ray import Blueprint

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(16, 16), 0

    def forward(self, z):
        self.calls += self.training
        if self.calls == 2:
            raise ValueError("the block broke")
        return torch.tanh(self.linear(z))

def network(model, shape):
    return Blueprint(4, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 16)),
                     lambda l, r: Broken() if (l, r) == (2, 3) else nn.Linear(16, 16),
                     lambda: nn.Linear(16, 10))

def half_network(model, shape):
    def block(l, r):
        raise OSError("no weights\\nfor this block")
    return Blueprint(4, nn.Identity, block, lambda: nn.Linear(64, 10))
"""


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with warm_ray():
        yield


def fragile() -> nn.Module:
    """Breaks in its fourth training step; a class of a function travels as it is."""

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(5, 5), 0

        def forward(self, z: Tensor) -> Tensor:
            self.calls += self.training
            if self.calls == 4:
                raise ValueError("the block broke")
            return torch.tanh(self.linear(z))

    return Fragile()


LINE = next(
    n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1)
    if line.strip() == 'raise ValueError("the block broke")' and n > 50
)  # fmt: skip


class Unmade(nn.Linear):
    """Cannot be unpickled, as it cannot be where a package is missing."""

    def __reduce__(self) -> tuple[object, ...]:
        return (int, ("no module here",))


def network_with(block: nn.Module) -> TreeNetwork:
    own: list[nn.Module] = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)]
    own[2] = block
    return TreeNetwork.from_blocks(
        None,
        own,
        nn.Linear(5, 2),
        example=torch.zeros(2, 5),
        auxiliary=lambda l, r: nn.Linear(5, 5),
    )


@pytest.mark.parametrize("where", ENGINES, ids=["local", "ray"])
def test_an_error_in_an_own_block_names_node_step_and_the_own_line(
    local_ray: None, where: dict[str, object]
) -> None:
    x, y = torch.randn(64, 5), torch.arange(64) % 2
    with pytest.raises(TrainingError) as caught:
        fit(network_with(fragile()), x, y, batch=16, epochs=5, **where)
    wanted = f"node 3, level 2, step 3: ValueError: the block broke (test_messages.py, line {LINE})"
    assert wanted in str(caught.value)


def test_an_actor_that_cannot_be_given_its_role_is_named_and_not_made_again(
    local_ray: None, cold_actors: None, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = torch.randn(64, 5), torch.arange(64) % 2
    with pytest.raises(
        TrainingError, match=r"actor \S*host-\d cannot be made: .*ValueError: inval"
    ):
        fit(network_with(Unmade(5, 5)), x, y, batch=16, epochs=1, **ENGINES[1])
    assert "lost" not in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_an_own_factory_that_raises_is_one_line(tmp_path: Path, engine: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    texts = {}
    for factory in ("network", "half_network"):
        words = [
            f"model.name=own:{factory}", f"engine={engine}", "steps=9", "family=gaussian",
            f"out={tmp_path}", f"name={factory}",
        ]  # fmt: skip
        ran = subprocess.run(
            [sys.executable, "-m", "treeprop_ray.train", *words],
            cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        )  # fmt: skip
        assert ran.returncode in (1, 2), ran.stdout
        (texts[factory],) = ran.stderr.strip().splitlines()
    assert "step 1: ValueError: the block broke (own.py, line 14)" in texts["network"]
    assert "OSError: no weights" in texts["half_network"]
    assert "(own.py, line " in texts["half_network"]


def test_a_wrong_token_is_said_at_once() -> None:
    """A head with a token of its own, on loopback and in a folder of its own."""
    folder = tempfile.mkdtemp(prefix="tk", dir="/tmp")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 32,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    }  # fmt: skip
    words = [
        "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1",
        "--include-dashboard=false", f"--temp-dir={folder}", "--num-cpus=1",
        "--disable-usage-stats",
    ]  # fmt: skip
    head = subprocess.Popen(
        [Path(sys.executable).parent / "ray", *words],
        env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    address = f"ray.address=127.0.0.1:{port}"
    train = [sys.executable, "-m", "treeprop_ray.train", "engine=ray", address, f"out={folder}"]
    doctor = [sys.executable, "-m", "treeprop_ray.doctor", address]
    try:
        wait_for(port)
        wrong, right = ({**env, "RAY_AUTH_TOKEN": letter * 32} for letter in "ba")
        begin = time.monotonic()
        answer = subprocess.run(train, env=wrong, capture_output=True, text=True)
        seconds = time.monotonic() - begin
        print(f"the line about the token came after {seconds:.1f} s, of which imports are most")
        (line,) = answer.stderr.strip().splitlines()
        assert answer.returncode == 2 and "refuses this token" in line and address in line
        assert seconds < 60  # and not after the minutes that Ray would try
        assert subprocess.run([*train, "--cfg"], env=right, capture_output=True).returncode == 0
        answer = subprocess.run(doctor, env=wrong, capture_output=True, text=True)
        assert answer.returncode == 1 and "fail  token        mismatch: 127.0.0.1" in answer.stdout
    finally:
        head.terminate()
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(port: int) -> None:
    """Until somebody answers."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    pytest.fail("the head did not start")


def test_a_user_error_of_an_actor_keeps_its_kind(local_ray: None) -> None:
    from treeprop_ray.engine.actors import HostActor, Role

    def refuse() -> None:
        raise UserError("data.root=x: no such folder")

    actor = HostActor(Role("r/host-0", "", refuse, (), 1, 1))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"data.root=x: no such folder \(actor r/host-0\)"):
        actor.ready()
