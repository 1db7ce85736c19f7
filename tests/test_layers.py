"""The layers of the house: who may import whom, and what stays free of torch and Ray."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from treeprop_ray.__main__ import COMMANDS as COMMAND_NAMES

PACKAGE = Path(__file__).parent.parent / "treeprop_ray"
COMMANDS = "commands"
# From left to right; a room may import only rooms of later lines. Rooms of one line are apart.
LAYERS = [
    {COMMANDS},
    {"sweep", "checkup", "benchmarks", "fitting"},
    {"reporting", "inference", "theory"},
    {"run"},
    {"engine"},
    {"methods"},
    {"hosts"},
    {"schedule", "models", "data"},
    {"core"},
    {"config"},
    {"errors"},
]
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
# Packages that are imported where they are needed: optional, or slow and for one purpose only.
LAZY = {
    "datasets", "mlflow", "optuna", "pyarrow.parquet", "pydoc_data", "ray.tune.search.optuna",
    "sklearn", "tokenizers", "transformers", "treeprop_ray.core.vision", "wandb",
}  # fmt: skip


@cache
def modules() -> list[tuple[str, ast.Module]]:
    """Every module of the package: its name and its text, parsed."""
    paths = sorted(PACKAGE.rglob("*.py"))
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in paths]
    trees = [ast.parse(path.read_text()) for path in paths]
    return [(name.removesuffix(".__init__"), t) for name, t in zip(names, trees, strict=True)]


def room_of(module: str) -> str:
    """The folder of a module of the package; the root holds the commands."""
    parts = module.split(".")
    if len(parts) == 1:
        return COMMANDS
    return parts[1] if (PACKAGE / parts[1]).is_dir() else COMMANDS


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
        return target == PACKAGE.name
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
        ("treeprop_ray.config.cli", "treeprop_ray.run.folder"),
        ("treeprop_ray.config.loading", "treeprop_ray.methods"),
    ],
)
def test_the_rule_sees_a_forbidden_import(source: str, target: str) -> None:
    assert not allowed(source, target)


def inside_functions() -> Iterator[tuple[str, str]]:
    """Where a room imports something inside a function, and what."""
    for name, tree in modules():
        if room_of(name) == COMMANDS:
            continue
        functions = [
            n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        for target, node in (pair for f in functions for pair in imports(f)):
            yield f"{name}:{node.lineno} {target}", target


def below(target: str, package: str) -> bool:
    return target == package or target.startswith(f"{package}.")


def test_imports_inside_functions_are_only_in_commands_and_for_optional_packages() -> None:
    strange = {
        where for where, target in inside_functions() if not any(below(target, p) for p in LAZY)
    }
    assert sorted(strange) == []


def test_every_optional_package_is_imported_somewhere() -> None:
    wanted = {target for _, target in inside_functions()}
    assert sorted(p for p in LAZY if not any(below(target, p) for target in wanted)) == []


def modules_of(rooms: str) -> list[str]:
    """All modules of rooms, or of a room's single modules; by their names."""
    named = [f"{PACKAGE.name}.{room}" for room in rooms.split()]
    found = [m for m, _ in modules() if any(below(m, name) for name in named)]
    assert all(any(below(m, name) for m in found) for name in named), "a room without modules"
    return found


BELOW_ENGINE = "methods hosts schedule models data core config errors"


@pytest.mark.parametrize(
    ("rooms", "banned"),
    [
        (" ".join(COMMAND_NAMES), "torch ray"),
        ("config errors", "torch ray"),
        ("core.tree core.rule core.jumps", "torch ray"),
        ("schedule", "torch ray"),
        (BELOW_ENGINE, "ray"),
    ],
    ids=["commands", "config", "core", "schedule", "below-engine"],
)
def test_what_no_module_of_a_room_loads(rooms: str, banned: str) -> None:
    """Also not through a module of another room, or of a package."""
    load = "; ".join(f"import {name}" for name in modules_of(rooms))
    ask = f"import sys; {load}; print([b for b in {banned.split()} if b in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_nothing_below_the_engine_names_ray() -> None:
    """Not inside functions nor for types either."""
    known = set(modules_of(BELOW_ENGINE))
    named = [
        f"{name}:{node.lineno}"
        for name, tree in modules()
        if name in known
        for target, node in imports(tree)
        if below(target, "ray")
    ]
    assert named == []
