"""The Vision Transformer: its size, its gradients, both engines, and leaving early."""

from __future__ import annotations

import asyncio
import csv
import importlib.util
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Result, engine_of, local_engine
from test_backward import gradients
from test_ray import assert_same
from warm import warm_ray

from treeprop_ray import config, data
from treeprop_ray.config import Settings
from treeprop_ray.core.network import TreeNetwork, count_parameters
from treeprop_ray.core.objective import tree_objective
from treeprop_ray.core.optim_rule import OptimizerRule
from treeprop_ray.core.rule import Piece, Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.data import Batches, DataSet, Shape, Split
from treeprop_ray.data.images import unit_scale
from treeprop_ray.engine import Engine
from treeprop_ray.hosts.base import StepReport
from treeprop_ray.inference import adaptive, calibration, outcome
from treeprop_ray.inference.calibration import calibrate, paths_of
from treeprop_ray.inference.early_exit import Calibration, EarlyExit, Readout, read
from treeprop_ray.inference.readout import readouts, through
from treeprop_ray.models import blueprint
from treeprop_ray.run.reading import open_run

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
    with warm_ray():
        yield


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


def test_adaptive_inference_is_calibrated_on_validation(command: Command, run: Path) -> None:
    fixed = command("evaluate", f"run={run}").out
    accuracy = {row.split()[0]: row.split()[2] for row in fixed.splitlines()[2:]}
    result = command("evaluate", f"run={run}", "mode=adaptive", "blocks=[1,2]", f"out={run}/t")
    assert result.code == 0, result.err
    rows = [row.split() for row in result.out.splitlines()[2:4]]
    assert [row[0] for row in rows] == ["1", "2"]
    one, blocks, as_trained, as_read = (rows[0][k] for k in (1, 3, 4, 6))
    assert (blocks, as_trained) == ("1.00", accuracy["spine-1"])  # nobody can stop earlier
    assert one == as_read
    assert (run / "figures" / "adaptive.png").stat().st_size > 1000
    with (run / "t" / "adaptive.csv").open(newline="") as f:
        first, second = csv.DictReader(f)
    shares = [float(value) for key, value in second.items() if key.startswith("leave at")]
    assert first["blocks"] == "1" and sum(shares) == pytest.approx(100)
    page = (run / "t" / "adaptive.md").read_text()
    assert "seed 1, 2 epochs" in page and (run / "t" / "adaptive.png").is_file()

    ends = command("evaluate", f"run={run}", "mode=adaptive", "threshold=[0,1]")
    low, high = (row.split() for row in ends.out.splitlines()[2:4])
    found = Calibration.read(run)
    assert float(low[3]) == found.exits[0].blocks and float(high[3]) == found.exits[-1].blocks


def test_the_network_that_stops_answers_as_the_table_says(
    command: Command, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, and as programs that need torch alone."""
    monkeypatch.setattr(calibration, "MOST_EXITS", 2)  # every part is a program to export
    assert command("evaluate", f"run={run}", "mode=adaptive").code == 0
    _, samples, _, network = open_run(str(run), "last", None)
    thresholds = [0.3] * len(Calibration.read(run).exits)
    assert isinstance(network, TreeNetwork)
    views = outcome.look(network, paths_of(network.tree), samples.batches("test"))
    found = adaptive.early_exit(str(run))
    exits = found.calibration.exits
    expected = outcome.outcome(*views.answers(exits), [e.blocks for e in exits], thresholds)
    assert command("export", f"run={run}", "path=adaptive", f"to={tmp_path}").code == 0
    assert {"early_exit.py", "adaptive.json", "stem.pt2"} <= {p.name for p in tmp_path.iterdir()}
    x = torch.cat([x for x, _ in samples.batches("test")])
    for program in (found, EarlyExit.load(tmp_path)):
        answer = program.at(x, thresholds)
        assert float(answer.blocks.double().mean()) == pytest.approx(expected.blocks)
        right = (answer.labels == views.y).double().mean()
        assert float(right) == pytest.approx(expected.accuracy)
        assert program(x[:1], blocks=1).blocks.tolist() == [exits[0].blocks]


def test_a_server_answers_with_fewer_blocks_when_many_wait(command: Command, run: Path) -> None:
    assert command("evaluate", f"run={run}", "mode=adaptive").code == 0
    module = load_example("serve_depth")
    server = module.DepthServer(str(run), deep=3, shallow=1, crowd=8)
    budgets: list[float] = []
    network = server.network
    server.network = lambda x, blocks: (budgets.append(blocks), network(x, blocks))[1]
    x = torch.rand(40, 1, 8, 8)

    async def one_then_many() -> list[dict[str, float]]:
        first = await server.answer(x[0])
        rest = await asyncio.gather(*map(server.answer, x))
        return [first, *rest]

    answers = asyncio.run(one_then_many())
    assert len(answers) == 41 and all(0 <= a["label"] < 10 for a in answers)
    assert budgets[0] == 3 and budgets[1] == 1  # alone, and with forty in the queue


def test_a_served_network_answers_over_http_and_grows_shallow_under_load(
    command: Command, run: Path
) -> None:
    """Ray Serve on the loopback: one client is answered with the deep budget, forty at once with
    less; the table of the load says so."""
    serve = pytest.importorskip("ray.serve")
    assert command("evaluate", f"run={run}", "mode=adaptive").code == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = load_example("serve_depth").app({"run": str(run), "deep": "3", "crowd": "4"})
    module = load_example("serve_load")
    module.EACH = 40
    with warm_ray():
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(app)
            words = {"run": str(run), "to": f"http://127.0.0.1:{port}", "atonce": "1,40"}
            alone, crowd = module.main(words)
        finally:
            serve.shutdown()
    assert alone["budget (least)"] == 3 > crowd["budget (least)"]
    assert crowd["budget (mean)"] < 3 and crowd["clients"] == 40


def load_example(name: str) -> Any:
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_export_of_exits_needs_their_calibration(command: Command, run: Path) -> None:
    (run / "adaptive.json").unlink(missing_ok=True)
    result = command("export", f"run={run}", "path=adaptive")
    assert result.code == 2 and "mode=adaptive makes it" in result.err
    (run / "adaptive.json").write_text("{}")
    assert "cannot be read" in command("export", f"run={run}", "path=adaptive").err
    (run / "adaptive.json").unlink()


def test_a_sample_leaves_at_its_first_confident_exit() -> None:
    confidence = torch.tensor([[0.9, 0.2, 0.3], [0.95, 0.8, 0.4], [0.1, 0.2, 0.5]]).double()
    correct = torch.tensor([[True, False, False], [False, True, False], [False, False, True]])
    point = outcome.outcome(confidence, correct, (1, 2, 9), [0.75] * 3)
    assert point.left_at == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert point.accuracy == 1.0 and point.blocks == pytest.approx(4)


def test_calibration_finds_temperatures_exits_and_thresholds() -> None:
    """Made-up paths: a cheap one that is right on easy samples and too sure, a dear one that is
    right on all, and others that only guess."""
    generator = torch.Generator().manual_seed(0)
    tree, n = Tree(8), 2000
    y = torch.randint(0, 4, (n,), generator=generator)
    easy = torch.rand(n, generator=generator) < 0.5
    truth = torch.nn.functional.one_hot(y, 4).double()

    def noise() -> torch.Tensor:
        return torch.randn(n, 4, generator=generator, dtype=torch.double)

    logits = {name: noise() for name in paths_of(tree)}
    logits["spine-1"] = 5 * (4 * truth * easy[:, None] + noise())  # five times too sure
    logits["spine-3"] = 4 * truth + noise()
    views = outcome.Views(paths_of(tree), torch.stack(list(logits.values())), y)
    reading = readouts(views)
    found = calibrate(views, tree, 7, reading)
    assert found.exits[0].name == "spine-1" and found.step == 7
    assert "spine-3" in [e.name for e in found.exits] and len(found.exits) <= 3
    assert found.exits[0].readout.temperature > 2 and not any(r.matrix for r in reading)
    fixed = adaptive.fixed_paths(views, tree)
    policy = found.policy(2.2)
    assert policy.blocks <= 2.2
    assert policy.accuracy > adaptive.at_equal_blocks(fixed, policy.blocks) + 0.05
    assert [p.blocks for p in found.policies] == sorted(p.blocks for p in found.policies)
    most = found.policies[-1].blocks  # a budget beyond it would repeat the row
    assert [b >= most for b in adaptive.default_budgets(found)].count(True) == 1


def test_an_exit_joins_what_all_paths_know_and_beats_the_best_of_them() -> None:
    """Made-up paths: one sees labels through noise, another the noise alone, with its classes in
    another order, all others guess: a joint map takes the noise away. Budgets reach the blocks of
    the full chain, no further."""
    tree = Tree(8)

    def views(seed: int, n: int) -> outcome.Views:
        generator = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 4, (n,), generator=generator)
        noise = torch.randn(len(paths_of(tree)), n, 4, generator=generator, dtype=torch.double)
        said = dict(zip(paths_of(tree), noise, strict=True))
        said["0-2-4-6-7-8"] = said["spine-1"].roll(1, 1)
        said["spine-1"] = said["spine-1"] + torch.nn.functional.one_hot(y, 4)
        return outcome.Views(paths_of(tree), torch.stack(list(said.values())), y)

    held, training, test = views(1, 1000), views(2, 1500), views(3, 2000)
    reading = readouts(held, training)
    found = calibrate(held, tree, 7, reading, training)
    assert {"spine-1", "0-2-4-6-7-8"} <= {e.name for e in found.exits}
    assert found.exits[-1].joint.matrix and found.exits[-1].blocks <= 7
    fixed = adaptive.fixed_paths(through(test, reading), tree)
    blocks = [e.blocks for e in found.exits]
    policy = found.policy(7)
    reached = outcome.outcome(*test.answers(found.exits), blocks, policy.thresholds)
    assert policy.blocks <= 7
    assert reached.accuracy > adaptive.at_equal_blocks(fixed, reached.blocks) + 0.1


def made_up(seed: int, n: int, turned: bool = True) -> outcome.Views:
    """A path that takes every class for the next one, and is unsure of it."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (n,), generator=generator)
    truth = torch.nn.functional.one_hot(y, 5).double()
    noise = torch.randn(n, 5, generator=generator, dtype=torch.double)
    return outcome.Views({"full": [0, 8]}, (truth.roll(int(turned), 1) * 2 + noise)[None], y)


def test_a_reading_maps_logits_as_training_samples_say() -> None:
    views, test = made_up(1, 500), made_up(2, 2000)
    (plain,) = readouts(views)
    (mapped,) = readouts(views, made_up(0, 2000))
    accuracy = {
        r: float((read(test.logits[0], r).argmax(-1) == test.y).double().mean())
        for r in (plain, mapped)
    }
    assert accuracy[plain] < 0.2 and accuracy[mapped] > 0.7 and len(mapped.matrix) == 5
    best = torch.nn.functional.nll_loss(read(views.logits[0], mapped), views.y)
    for factor in (0.9, 1.1):  # its temperature is the best one
        other = Readout(mapped.temperature * factor, mapped.matrix, mapped.bias)
        assert torch.nn.functional.nll_loss(read(views.logits[0], other), views.y) > best


def test_a_map_that_holds_on_training_samples_only_is_left_out() -> None:
    (reading,) = readouts(made_up(1, 500, turned=False), made_up(0, 2000))
    assert reading.matrix == () and reading.bias == ()


def test_single_paths_are_mixed_to_compare_at_equal_blocks() -> None:
    fixed = {"a": (1, 0.4), "b": (3, 0.6), "poor": (2, 0.1)}
    assert adaptive.at_equal_blocks(fixed, 2) == pytest.approx(0.5)
    assert adaptive.at_equal_blocks(fixed, 5) == 0.6 and adaptive.at_equal_blocks(fixed, 1) == 0.4


@pytest.mark.parametrize(
    ("N", "blocks"), [(2, (1,)), (3, (1, 2)), (4, (1, 2, 5)), (8, (1, 2, 3, 10))]
)
def test_blocks_run_count_shared_beginnings_once(N: int, blocks: tuple[int, ...]) -> None:
    tree = Tree(N)
    assert outcome.blocks_run(tree, list(tree.named_paths.values())) == blocks


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["mode=adaptive", "threshold=1.5"], ["threshold=1.5", "[0, 1]"]),
        (["mode=adaptive", "threshold=[0.5,much]"], ["threshold=", "[0, 1]"]),
        (["mode=adaptive", "threshold=[]"], ["threshold=[]", "at least one"]),
        (["mode=adaptive", "threshold=nan"], ["threshold=nan", "[0, 1]"]),
        (["mode=adaptive", "path=full"], ["path=full", "mode=adaptive"]),
        (["threshold=0.5"], ["threshold=0.5", "mode=adaptive"]),
        (["blocks=2"], ["blocks=2", "mode=adaptive"]),
        (["mode=adaptive", "blocks=-1"], ["blocks=-1", "[0, "]),
        (["mode=adaptive", "blocks=2", "threshold=0.5"], ["threshold=0.5", "blocks=2"]),
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
