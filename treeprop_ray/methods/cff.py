"""method=cff: contrastive forward-forward with margin, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from treeprop_ray.config import Settings
from treeprop_ray.core.network import STEM
from treeprop_ray.core.optim_rule import OptimizerRule
from treeprop_ray.core.tree import Tree
from treeprop_ray.data import Views
from treeprop_ray.errors import UserError
from treeprop_ray.hosts.base import Host, StepReport
from treeprop_ray.hosts.cff import CffHost
from treeprop_ray.methods.base import Crew
from treeprop_ray.methods.bp import ChainMethod
from treeprop_ray.methods.job import Job
from treeprop_ray.methods.outline import Outline
from treeprop_ray.schedule.cff import one_cff_step
from treeprop_ray.schedule.ops import Call
from treeprop_ray.schedule.placement import Plan, stages


class ForwardForward(ChainMethod):
    """Layers learn while the next batch already enters; the head learns at the end.

    With `in_flight` at least the number of actors, all of them work at the same time.
    """

    name = "cff"
    adds_up = False

    def misfit(self, model: str) -> str:
        """Layers must be comparable by their outputs."""
        return f"needs model.name=mlp or vit, not {model}"

    def check(self, settings: Settings) -> None:
        """Which networks and batches it takes."""
        super().check(settings)
        if settings.loss.name != "cross_entropy":
            raise UserError(
                f"loss.name={settings.loss.name}: method=cff compares samples by their labels; use "
                "cross_entropy"
            )
        if settings.model.name == "gpt":
            raise UserError(f"method=cff: {self.misfit('gpt')}")
        if settings.patience:
            raise UserError(
                f"patience={settings.patience}: method=cff trains its head in the last steps of "
                "the run, which must not be left out; use 0"
            )
        if settings.microbatches > 1:
            raise UserError(
                f"microbatches={settings.microbatches}: method=cff compares all samples of a batch "
                "with each other; use microbatches=1"
            )
        if settings.accumulate > 1:
            raise UserError(
                f"accumulate={settings.accumulate}: method=cff compares all samples of a step with "
                "each other; use a larger batch"
            )

    def optimizer(self, settings: Settings, tree: Tree, total_steps: int) -> OptimizerRule:
        """Two stages with a learning rate each; layers are clipped one by one."""
        cff = settings.cff
        first = total_steps - max(1, round(cff.head_share * total_steps))
        rule = super().optimizer(settings, tree, total_steps)
        return replace(rule, lr=cff.lr, clip_each=True, second=(first, cff.head_lr))

    def calls(self, job: Job, plan: Plan) -> list[Call]:
        """Nothing comes back."""
        return one_cff_step(stages(job.tree, len(plan.names)))

    def host(self, job: Job, plan: Plan, index: int) -> Host:
        """A run of layers."""
        names = self.residents(job.settings, plan, job.tree)[index].parts
        share = job.share(names, plan, opens=index == 0)
        cut = stages(job.tree, len(plan.names))[index]
        return CffHost(share, job.tree, job.rule, cut, job.settings.cff)

    def outline(self, settings: Settings, tree: Tree) -> Outline:
        """A contrastive loss at every layer, cross-entropy at the head.

        A layer runs twice in a step, on two views of the batch; in the second stage all layers run
        once, forward only, and the head once.
        """
        weights = {n: {"contrast": 1.0, "clamped": 0.0} for n in range(1, tree.N)}
        weights[tree.N - 1]["validation"] = 0.0
        weights[tree.N] = {"ce": 1.0}
        paths = {"full": tree.chain}
        applications = 2 * sum(map(tree.layers, tree.path_edges(tree.chain)[:-1]))
        return Outline(tree, paths, weights, self.deployed(tree), applications, curves="layer")

    # -- which weights stage 2 gets -----------------------------------------------------------

    def after_step(self, crew: Crew, step: int) -> list[StepReport]:
        """At the end of an epoch of stage 1, and of stage 1 itself: validate the layers."""
        job, done = crew.job, step + 1
        assert job.optimizer.second is not None
        first, batches = job.optimizer.second[0], job.splits["validation"]
        ends = done % job.per_epoch == 0 or done == first
        if not (ends and batches and done <= first):
            return []
        loss = crew.guarded(partial(self._select, crew, done))
        return [StepReport(losses={job.tree.N - 1: {"validation": loss}})]

    def _select(self, crew: Crew, done: int) -> float:
        """The last layer's validation loss; if it is the lowest, all layers keep their weights.

        It is a point of its own, so that no replay crosses a validation.
        """
        loss = self.validation(crew)
        (better,) = crew.get([crew.ask(0, CffHost.judge, loss)])
        if better:
            crew.get([crew.ask(k, CffHost.keep) for k in range(len(crew.plan.names))])
        crew.mark(done)
        return loss

    def validation(self, crew: Crew) -> float:
        """The last layer's mean loss over the validation split."""
        tree = crew.job.tree
        owner = self.owners(tree, crew.plan)
        asked: list[Any] = []
        for index in range(crew.job.splits["validation"]):
            z, y = crew.ask(owner[STEM], CffHost.opened, Views(index), returns=2)
            for edge in tree.path_edges(tree.chain)[:-1]:
                z = crew.ask(owner[edge], CffHost.through, edge, z)
            asked.append(crew.ask(owner[STEM], CffHost.validation_loss, z, y))
        losses: Sequence[float] = crew.get(asked)
        return float(sum(losses) / len(losses))
