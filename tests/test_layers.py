"""The layers of the house: who may import whom, and what stays free of torch and Ray."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "treeprop_ray"
COMMANDS = "commands"
# From left to right; a room may import only rooms of later lines. Rooms of one line are apart.
LAYERS = [
    {COMMANDS},
    {"sweep", "checkup", "benchmarks"},
    {"reporting", "inference", "theory"},
    {"run"},
    {"engine"},
    {"methods"},
    {"hosts"},
    {"schedule", "models", "data"},
    {"core"},
    {"config"},
    {"errors", "signals"},
]
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
FRONT = {"cli", "errors", "signals"}  # what commands may import beside the rooms
# Packages that are imported where they are needed: optional, or slow and for one purpose only.
LAZY = {
    "datasets", "mlflow", "optuna", "pyarrow.parquet", "pydoc_data", "ray.air.integrations",
    "ray.tune.search.optuna",
    "sklearn", "tokenizers", "torchvision", "transformers", "treeprop_ray.core.vision", "wandb",
}  # fmt: skip


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        yield name.removesuffix(".__init__"), ast.parse(path.read_text())


def room_of(module: str) -> str:
    """The folder of a module of the package; the root holds the commands, cli, errors, signals."""
    parts = module.split(".")
    if len(parts) == 1:
        return COMMANDS
    if len(parts) == 2 and not (PACKAGE / parts[1]).is_dir():
        return parts[1] if parts[1] in LAYERS[-1] else COMMANDS
    return parts[1]


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Every module that is imported anywhere in a file, and the statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                inner = node.module.split(".")[0] == PACKAGE.name and exists(whole)
                yield (whole if inner else node.module), node


def exists(module: str) -> bool:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def allowed(source: str, target: str) -> bool:
    here, there = room_of(source), room_of(target)
    if here == there == COMMANDS:
        return target in (PACKAGE.name, *(f"{PACKAGE.name}.{name}" for name in FRONT))
    if source == "treeprop_ray.cli":
        return there in ("config", "errors", "signals")
    return here == there or RANK[here] < RANK[there]


def violations() -> list[str]:
    """Imports against the layers, also inside functions and for types only."""
    return [
        f"{name}:{node.lineno} imports {target}"
        for name, tree in modules()
        for target, node in imports(tree)
        if target.split(".")[0] == PACKAGE.name and name != PACKAGE.name
        if not allowed(name, target)
    ]


def test_every_import_goes_to_the_right() -> None:
    assert violations() == []


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("treeprop_ray.hosts.tree", "treeprop_ray.engine.base"),
        ("treeprop_ray.core.node", "treeprop_ray.schedule.ops"),
        ("treeprop_ray.evaluate", "treeprop_ray.train"),
        ("treeprop_ray.reporting.page", "treeprop_ray.inference.paths"),
        ("treeprop_ray.sweep.plan", "treeprop_ray.benchmarks.timing"),
        ("treeprop_ray.cli", "treeprop_ray.run.folder"),
        ("treeprop_ray.config.loading", "treeprop_ray.methods"),
    ],
)
def test_the_rule_sees_a_forbidden_import(source: str, target: str) -> None:
    assert not allowed(source, target)


def test_imports_inside_functions_are_only_in_commands_and_for_optional_packages() -> None:
    inside = []
    for name, tree in modules():
        if room_of(name) == COMMANDS:
            continue
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        for target, node in (pair for f in functions for pair in imports(f)):
            if not any(target == p or target.startswith(f"{p}.") for p in LAZY):
                inside.append(f"{name}:{node.lineno} {target}")
    assert sorted(set(inside)) == []


@pytest.mark.parametrize(
    ("modules", "banned"),
    [
        ("config cli errors", "torch ray"),
        ("core.tree core.rule core.jumps", "torch ray"),
        ("schedule.ops schedule.tree schedule.gather schedule.chain schedule.cff schedule.time "
         "schedule.probe schedule.placement", "torch ray"),
        ("methods hosts.tree hosts.chain hosts.cff hosts.time models.gpt data core.node", "ray"),
    ],
    ids=["config", "core", "schedule", "below-engine"],
)  # fmt: skip
def test_what_a_room_must_not_load(modules: str, banned: str) -> None:
    load = "; ".join(f"import treeprop_ray.{name}" for name in modules.split())
    ask = f"import sys; {load}; print([b for b in {banned.split()} if b in sys.modules])"
    found = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
