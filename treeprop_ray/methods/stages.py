"""The stages of a run by TreeProp: the tree, the tree without its finest levels, a path at the end.

    coarsen=[0.4, 0.7] finish=0.1    steps 0 …            0.4 …               0.7 …        0.9 …
                                     all levels           level D - 1 is      level D - 2  a path
                                                          one of segments     is
Every stage is another list of calls over the same hosts (schedule/coarse.py, schedule/probe.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from treeprop_ray.config import Settings
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError
from treeprop_ray.schedule.ops import STEP
from treeprop_ray.schedule.probe import FINISH


@dataclass(frozen=True)
class Stage:
    """A part of a run."""

    name: str  # of its calls among the passes of a job
    first: int  # step
    level: int = 0  # of the segments, where there are some

    @property
    def is_chain(self) -> bool:
        """Whether the tree is gone."""
        return self.name == FINISH or self.level == 1


def stages_of(settings: Settings, tree: Tree, total_steps: int) -> list[Stage]:
    """In the order of a run; some may have no steps."""
    stages = [Stage(STEP, 0)]
    for k, share in enumerate(settings.coarsen, 1):
        level = tree.depth - k
        stages.append(Stage(f"level {level}", round(share * total_steps), level))
    if settings.finish:
        stages.append(Stage(FINISH, total_steps - max(1, round(settings.finish * total_steps))))
    return stages


def shares_of(settings: Settings, tree: Tree) -> list[tuple[Stage, float]]:
    """The stages with their shares of a long run."""
    whole = 10**9
    stages = stages_of(settings, tree, whole)
    ends = [stage.first for stage in stages[1:]] + [whole]
    return [(s, (end - s.first) / whole) for s, end in zip(stages, ends, strict=True)]


def finish_path(settings: Settings, tree: Tree) -> list[int]:
    """The path of the last steps; UserError where the tree has none of that name."""
    if settings.finish_path not in tree.named_paths:
        names = ", ".join(tree.named_paths)
        raise UserError(f"finish_path={settings.finish_path}: one of {names}")
    return tree.named_paths[settings.finish_path]


def check_stages(settings: Settings, tree: Tree | None) -> None:
    """UserError where stages do not suit the other settings; `tree`: if it is known yet."""
    s = settings
    if s.finish and tree:
        finish_path(s, tree)
    if s.finish_path != "full" and not s.finish:
        raise UserError(f"finish_path={s.finish_path}: needs finish, a share of the steps")
    if s.finish_sweeps and not (s.finish and s.finish_path == "full"):
        raise UserError(
            f"finish_sweeps={s.finish_sweeps}: needs finish, a share of the steps, and "
            "finish_path=full"
        )
    if s.finish_from == "path":
        _check_growth(s)
    if s.finish_sweeps and s.model.name == "mlp":
        raise UserError(
            f"finish_sweeps={s.finish_sweeps}: is for blocks that add to their input (vit, gpt), "
            "not model.name=mlp"
        )
    if s.coarsen:
        _check_coarsen(s, tree)
    if not (s.finish or s.coarsen):
        return
    given = f"finish={s.finish}" if s.finish else f"coarsen={s.coarsen}"
    if s.patience:
        raise UserError(
            f"patience={s.patience}: {given} is the end of the run, which must not be left out; "
            "use 0"
        )
    if s.mc_samples > 1:
        raise UserError(
            f"mc_samples={s.mc_samples}: backpropagation along several blocks ({given}) has no "
            "samples to draw; use 1"
        )


def _check_growth(settings: Settings) -> None:
    s, given = settings, "finish_from=path"
    if not (s.finish and s.finish_path == "full"):
        raise UserError(f"{given}: needs finish, a share of the steps, and finish_path=full")
    others = {"finish_sweeps": 0, "coarsen": [], "freeze": [], "replicas": 1}
    for key, value in others.items():
        if getattr(s, key) != value:
            raise UserError(f"{given}: needs {key}={value}, not {getattr(s, key)}")
    if s.model.name == "mlp":
        raise UserError(
            f"{given}: is for blocks that add to their input (vit, gpt), not model.name=mlp"
        )


def _check_coarsen(settings: Settings, tree: Tree | None) -> None:
    s, given = settings, f"coarsen={settings.coarsen}"
    if s.coarsen != sorted(s.coarsen) or max(s.coarsen) + s.finish > 1:
        raise UserError(
            f"{given}: shares of the steps in rising order, at most 1 - finish = {1 - s.finish:g}"
        )
    if tree and len(s.coarsen) >= tree.depth:
        raise UserError(f"{given}: a tree of {tree.depth} levels can lose {tree.depth - 1} of them")
    needs = {
        "alpha": 1.0, "beta": 0.0, "input": "mean", "ce_at": "mean", "levels": "all",
    }  # fmt: skip
    for key, value in needs.items():
        if getattr(s, key) != value:
            raise UserError(f"{given}: needs {key}={value}, not {getattr(s, key)}")
    if s.objective == "final_ce":
        raise UserError(f"{given}: needs objective=node or node_all_ce, not final_ce")
