"""compile=true: the same network with the same names, and a way back where it cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import engine_of, tiny_network
from torch import nn

from treeprop_ray import config, data, fit, methods
from treeprop_ray.errors import UserError
from treeprop_ray.hosts.compiled import Compiled

SMALL = ["model.hidden=8", "batch=32", "model.blocks=3", "model.activation=tanh"]


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    """What other tests of this process have compiled, or failed to, does not count."""
    torch._dynamo.reset()


def trained(words: list[str]) -> dict[str, torch.Tensor]:
    settings = methods.checked(config.load([*SMALL, *words]))
    engine = engine_of(settings, data.load(settings), 4)
    engine.score({"full": engine.tree.chain}, "validation")
    for step in range(2):
        engine.step(step, report=True)
    engine.close()
    return dict(engine.state()[0])


@pytest.mark.parametrize(
    "words", [["beta=0.5", "correction=vjp"], ["recompute=true"], ["method=bp", "freeze=[0-1]"]]
)
def test_compiled_blocks_learn_the_same_and_keep_their_names(words: list[str]) -> None:
    plain, compiled = trained(words), trained([*words, "compile=true", "compile_backend=aot_eager"])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert plain.keys() == compiled.keys()
    for key, value in plain.items():
        torch.testing.assert_close(compiled[key], value)


def test_blocks_that_cannot_be_compiled_run_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def backend(graph: Any, example: Any) -> Any:
        raise RuntimeError("no compiler here")

    modules = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)]
    x = torch.randn(2, 3)
    expected = [module(x) for module in modules]
    compiled = Compiled(modules, backend)
    for module, value in zip(modules, expected, strict=True):
        assert torch.equal(compiled.guarded(lambda module=module: module(x)), value)
    warnings = capsys.readouterr().err.strip().splitlines()
    assert len(warnings) == 1 and warnings[0].startswith("warning: compile=true: ")


def test_an_error_of_the_block_itself_is_no_reason_to_go_on() -> None:
    module = nn.Linear(3, 3)
    compiled = Compiled([module], "eager")
    with pytest.raises(ZeroDivisionError):
        compiled.guarded(lambda: 1 / 0)
    assert compiled.modules == [module]


def test_fit_gives_back_modules_that_are_not_compiled() -> None:
    x, y = torch.randn(32, 5, dtype=torch.float64), torch.randint(3, (32,))
    network = tiny_network(3)
    fit(network, x, y, epochs=1, batch=16, compile=True, compile_backend="eager")
    assert not any(module._compiled_call_impl for module in network.modules())


def test_where_it_is_not_for() -> None:
    with pytest.raises(UserError, match="compile=true: is for networks of blocks"):
        methods.checked(config.load(["experiment=digits_gru", "compile=true"]))
    with pytest.raises(UserError, match="compile_backend=eager: needs compile=true"):
        config.load(["compile_backend=eager"])
