"""CFF+M on a chain of Ray actors: each learns its layers while the next batch already enters."""

from __future__ import annotations

from typing import Any

from treeprop_ray.config import Settings
from treeprop_ray.core.network import STEM
from treeprop_ray.engine.base import State, StepReport
from treeprop_ray.engine.job import Job
from treeprop_ray.engine.ray import RayEngine
from treeprop_ray.hosts.cff import Selection


class CffRayEngine(RayEngine):
    """The Ray engine, which also validates the layers after each epoch of stage 1.

    A validation is a recovery point of its own, so that no replay crosses one. With `in_flight` at
    least the number of actors, all of them work at the same time.
    """

    def __init__(self, job: Job, settings: Settings, owns_ray: bool = False) -> None:
        assert job.optimizer.second is not None
        self.selection = Selection(
            job.optimizer.second[0], job.samples // job.batch, job.splits["validation"]
        )
        super().__init__(job, settings, owns_ray)

    def step(self, step: int, report: bool) -> None:
        super().step(step, report)
        self.selection.last = None
        if self.selection.due(step + 1):
            better = self.selection.better(self._guarded(self._validation))
            self._guarded(lambda: self._keep(better, step + 1))

    def _validation(self) -> float:
        """The last layer's mean loss over the validation split."""
        actors = self.driver.actors
        asked = []
        for index in range(self.selection.batches):
            z, y = actors[0].open_split.options(num_returns=2).remote("views", index)
            for edge in self.tree.path_edges(self.tree.chain)[:-1]:
                z = actors[self.owner[edge]].through.remote([edge], z)
            asked.append(actors[self.owner[STEM]].ask.remote("validation_loss", z, y))
        return float(sum(self.driver.get(asked)) / len(asked))

    def _keep(self, better: bool, done: int) -> None:
        actors = self.driver.actors
        if better:
            self.driver.get([a.ask.remote("keep") for a in actors])
        self.pending = None
        states: Any = self.driver.get([a.state.remote() for a in actors])
        self._set_point(done, states)

    def reports(self) -> list[StepReport]:
        return self.selection.report(super().reports(), self.tree.N - 1)

    def state(self) -> State:
        return self.selection.add_to(super().state())

    def load(self, state: State, step: int = 0) -> None:
        self.selection.take_from(state)
        super().load(state, step)
