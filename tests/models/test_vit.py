"""The Vision Transformer: its size, its gradients, both engines, and leaving early."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import Result, engine_of, local_engine
from test_backward import gradients
from test_ray import assert_same

from treeprop_ray import config, data
from treeprop_ray.config import Settings
from treeprop_ray.core.network import TreeNetwork, count_parameters
from treeprop_ray.core.objective import tree_objective
from treeprop_ray.core.optim import OptimizerRule
from treeprop_ray.core.rule import Piece, Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.data import Batches, DataSet, Shape, Split
from treeprop_ray.data.images import unit_scale
from treeprop_ray.engine import Engine
from treeprop_ray.hosts.base import StepReport
from treeprop_ray.inference import adaptive
from treeprop_ray.inference.paths import score_network
from treeprop_ray.models import blueprint

Command = Callable[..., Result]
# on the embedded digits: 8x8 pixels, so patch 4 gives four tokens
TINY = ["model.name=vit", "model.hidden=12", "model.heads=3", "model.patch=4", "alpha=1", "beta=0"]


@pytest.mark.parametrize(
    ("name", "side", "classes", "millions", "exact"),
    [
        ("cifar10_vit", 32, 10, "3.27", 3_274_090),
        ("cifar100_vit", 32, 100, "3.30", 3_295_780),
        ("tinyimagenet_vit", 64, 200, "3.35", 3_354_440),
    ],
)
def test_deployed_parameters_are_the_papers(
    name: str, side: int, classes: int, millions: str, exact: int
) -> None:
    settings = config.load([f"experiment={name}"])
    plan = blueprint(settings, Shape((3, side, side), classes, torch.float32))
    tree = Tree(plan.N)
    assert (tree.N, tree.depth, plan.family) == (8, 3, "gaussian")
    chain = TreeNetwork.from_blueprint(plan, tree, seed=1).chain()
    assert count_parameters(chain) == exact
    assert f"{exact / 1e6:.2f}" == millions


def random_images(side: int, samples: int, dtype: torch.dtype = torch.float64) -> DataSet:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (samples, 3, side, side), generator=generator, dtype=torch.uint8)
    split = Split(x, torch.arange(samples) % 5)
    return DataSet("random", split, split, split, 5, unit_scale, dtype)


def test_the_tokens_are_the_patches() -> None:
    """Every token sees exactly the pixels of its own square."""
    settings = config.load([*TINY, "model.patch=2"])
    stem = blueprint(settings, Shape((3, 8, 8), 5, torch.float32)).stem()
    x = torch.rand(1, 3, 8, 8)
    changed = x.clone()
    changed[0, :, 2:4, 6:8] += 1  # second row of patches, fourth column
    moved = (stem(changed) - stem(x)).abs().sum(-1)[0]
    assert moved.nonzero().flatten().tolist() == [1 * 4 + 3]


@pytest.mark.parametrize("objective", ["final_ce", "node", "node_all_ce"])
@pytest.mark.parametrize(("beta", "sigma", "pieces"), [(0.0, 0.0, 1), (0.5, 0.05, 3)])
def test_adjoint_waves_equal_autograd(
    objective: str, beta: float, sigma: float, pieces: int
) -> None:
    samples = random_images(8, 6)
    plan = blueprint(config.load(TINY), samples)
    network = TreeNetwork.from_blueprint(plan, Tree(8), 1, torch.float64)
    rule = Rule(objective=objective, alpha=1.0, beta=beta, sigma=sigma)
    x, y = Batches(samples, 6, 1)(0)
    tree_objective(network, rule, x, y, Piece(0, 0, 0, 6, 6))[0].backward()
    expected = gradients(network)
    network.zero_grad()
    local_engine(network, rule, OptimizerRule(), Batches(samples, 6, 1), pieces).gradients(0)
    assert expected["stem.positions"].any()
    for name, gradient in gradients(network).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12, msg=name)


def three_steps(engine: Engine) -> tuple[list[list[StepReport]], object]:
    reports = []
    for step in range(3):
        engine.step(step, report=True)
        reports.append(engine.reports())
    return reports, engine.state()


def dropout_settings(*words: str) -> Settings:
    return config.load([*TINY, "model.dropout=0.2", "sigma=0.01", "clip=1", "batch=32", *words])


@pytest.fixture
def cluster() -> Iterator[None]:
    from treeprop_ray.engine import runtime

    runtime.start(config.RaySettings(num_cpus=2))
    yield
    runtime.stop()


def test_two_actors_equal_local_with_dropout_and_augmentation(cluster: None) -> None:

    words = ["data.augment=standard", "microbatches=2", "objective=node_all_ce"]
    settings = dropout_settings(*words)
    samples = data.load(settings)
    expected = three_steps(engine_of(settings, samples, 3))
    settings = dropout_settings(*words, "engine=ray", "placement=packed", "hosts=2")
    engine = engine_of(settings, samples, 3)
    try:
        found = three_steps(engine)
    finally:
        engine.close()
    assert_same(found, expected)


def test_dropout_is_drawn_and_the_same_in_every_run() -> None:
    samples = data.load(dropout_settings())
    first, again, without = (
        three_steps(engine_of(s, samples, 3))[0][0][0].losses
        for s in (dropout_settings(), dropout_settings(), dropout_settings("model.dropout=0"))
    )
    assert first == again and first != without


@pytest.mark.parametrize("method", ["tree", "bp"])
def test_a_stopped_run_goes_on_with_the_same_masks_and_pictures(method: str) -> None:
    settings = dropout_settings("data.augment=standard", f"method={method}")
    samples = data.load(settings)
    whole, before, after = (engine_of(settings, samples, 4) for _ in range(3))
    for step in range(4):
        whole.step(step, report=False)
    for step in range(2):
        before.step(step, report=False)
    after.load(before.state())
    for step in range(2, 4):
        after.step(step, report=False)
    for mine, theirs in zip(after.state(), whole.state(), strict=True):
        assert all(torch.equal(mine[k], v) for k, v in theirs.items())


def test_chain_lr_is_for_the_chains_blocks_alone() -> None:
    """One step of SGD: their change is multiplied, that of stem, head and auxiliary blocks not."""
    words = [*TINY, "model.blocks=3", "optimizer=sgd", "momentum=0", "weight_decay=0"]
    samples = data.load(config.load(words))

    def change(factor: float) -> dict[str, torch.Tensor]:
        engine = engine_of(config.load([*words, f"chain_lr={factor}"]), samples, 1)
        before = engine.state()[0]
        engine.step(0, report=False)
        return {name: value - before[name] for name, value in engine.state()[0].items()}

    plain, faster = change(1), change(3)
    for name, moved in plain.items():
        expected = 3 * moved if name.split("/")[0] in ("0-1", "1-2", "2-3") else moved
        torch.testing.assert_close(faster[name], expected, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("method", ["tree", "bp"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_loss_falls(method: str, precision: str) -> None:
    settings = config.load(
        [*TINY, "model.hidden=24", "lr=0.003", f"method={method}", f"precision={precision}",
         "objective=node_all_ce", "clip=1", "sigma=0.005", "model.blocks=3"]
    )  # fmt: skip
    engine = engine_of(settings, data.load(settings), 60)
    before = engine.score({"full": engine.tree.chain}, "validation")["full"]
    for step in range(60):
        engine.step(step, report=False)
    after = engine.score({"full": engine.tree.chain}, "validation")["full"]
    assert after.loss < 0.8 * before.loss and after.accuracy > before.accuracy + 0.2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from treeprop_ray import train

    out = tmp_path_factory.mktemp("runs")
    words = [*TINY, "epochs=2", "lr=0.003", "objective=node_all_ce", f"out={out}", "name=vit"]
    assert train.main(words) == 0
    return out / "vit"


def test_adaptive_ends_are_the_shortest_and_the_full_path(command: Command, run: Path) -> None:
    fixed = command("evaluate", f"run={run}").out
    accuracy = {row.split()[0]: row.split()[2] for row in fixed.splitlines()[2:]}
    result = command("evaluate", f"run={run}", "mode=adaptive", "threshold=[1,0,0.4]")
    rows = [row.split() for row in result.out.splitlines()[2:5]]
    assert [row[0] for row in rows] == ["0", "0.4", "1"]
    assert (rows[0][1], rows[0][3]) == (accuracy["spine-1"], "1.00")
    assert (rows[2][1], rows[2][3]) == (accuracy["full"], "10.00")
    assert 1 <= float(rows[1][3]) <= 10
    assert (run / "figures" / "adaptive.png").stat().st_size > 1000
    stored = command("evaluate", f"run={run}", "mode=adaptive", "threshold=0.9", f"out={run}/t")
    assert stored.code == 0
    with (run / "t" / "adaptive.csv").open(newline="") as f:
        (line,) = csv.DictReader(f)
    shares = [float(value) for key, value in line.items() if key.startswith("leave at")]
    assert line["threshold"] == "0.9" and sum(shares) == pytest.approx(100)
    page = (run / "t" / "adaptive.md").read_text()
    assert "seed 1, 2 epochs" in page and (run / "t" / "adaptive.png").is_file()


def test_threshold_one_is_the_full_path_even_for_saturated_logits() -> None:
    samples = random_images(8, 300, torch.float32)
    network = TreeNetwork.from_blueprint(blueprint(config.load(TINY), samples), Tree(8), 1)
    with torch.no_grad():
        network.block((7, 8)).classify.weight.mul_(1e4)  # every softmax rounds to 1
    exits = adaptive.look(network, samples.batches("test"))
    point = adaptive.at_threshold(exits, 1.0)
    full = score_network(network, {"full": network.tree.chain}, samples.batches("test"))["full"]
    assert point.accuracy == full.accuracy and point.left_at == (0, 0, 0, 1)
    assert adaptive.at_threshold(exits, 0.999).left_at[0] > 0.9


def test_a_sample_leaves_at_its_first_confident_exit() -> None:
    confidence = torch.tensor([[0.9, 0.2, 0.3], [0.95, 0.8, 0.4], [0.1, 0.2, 0.5]])
    correct = torch.tensor([[True, False, False], [False, True, False], [False, False, True]])
    exits = adaptive.Exits(("a", "b", "c"), (1, 2, 9), confidence.double(), correct)
    point = adaptive.at_threshold(exits, 0.75)
    assert point.left_at == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert point.accuracy == 1.0 and point.blocks == pytest.approx(4)


@pytest.mark.parametrize(
    ("N", "blocks"), [(2, (1,)), (3, (1, 2)), (4, (1, 2, 5)), (8, (1, 2, 3, 10))]
)
def test_blocks_run_count_shared_beginnings_once(N: int, blocks: tuple[int, ...]) -> None:
    tree = Tree(N)
    assert adaptive.blocks_run(tree, list(tree.named_paths.values())) == blocks


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["mode=adaptive", "threshold=1.5"], ["threshold=1.5", "[0, 1]"]),
        (["mode=adaptive", "threshold=[0.5,much]"], ["threshold=", "[0, 1]"]),
        (["mode=adaptive", "threshold=[]"], ["threshold=[]", "at least one"]),
        (["mode=adaptive", "threshold=nan"], ["threshold=nan", "[0, 1]"]),
        (["mode=adaptive", "path=full"], ["path=full", "spine"]),
        (["threshold=0.5"], ["threshold=0.5", "mode=adaptive"]),
        (["out=results"], ["out=results", "mode=adaptive"]),
        (["mode=early"], ["mode=early", "paths, adaptive"]),
    ],
)
def test_bad_adaptive_input_is_one_line(
    command: Command, run: Path, words: list[str], parts: list[str]
) -> None:
    result = command("evaluate", f"run={run}", *words)
    assert result.code == 2 and len(result.error_lines) == 1
    assert all(part in result.err for part in parts), result.err


def test_a_shallow_baseline_trains_and_has_no_short_paths(command: Command, tmp_path: Path) -> None:
    words = [*TINY, "method=bp", "model.blocks=1", "epochs=1", f"out={tmp_path}", "name=bp"]
    assert command("train", *words).code == 0
    result = command("evaluate", f"run={tmp_path / 'bp'}", "mode=adaptive")
    assert result.code == 2 and "method=bp" in result.err


def test_export_of_a_path_runs_as_a_plain_program(
    command: Command, run: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    assert command("export", f"run={run}", "path=spine-2", f"to={target}").code == 0
    program = torch.export.load(target / "model.pt2").module()
    assert program(torch.rand(5, 1, 8, 8)).shape == (5, 10)
