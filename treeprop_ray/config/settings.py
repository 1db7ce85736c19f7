"""All settings of a run, and what must fit together across their groups. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from treeprop_ray.config.fields import group, walk
from treeprop_ray.config.groups import Records, Run, Training
from treeprop_ray.config.machines import Machines
from treeprop_ray.config.names import dotted
from treeprop_ray.config.nested import TEXTS, Cff, Data, Loss, Model, Probe
from treeprop_ray.config.objective import Objective
from treeprop_ray.config.through_time import Time
from treeprop_ray.errors import UserError


@dataclass
class Nested:
    """The groups whose keys have a prefix, `model.hidden`."""

    model: Model = group(Model)
    data: Data = group(Data)
    time: Time = group(Time)
    probe: Probe = group(Probe)
    cff: Cff = group(Cff)
    loss: Loss = group(Loss, word="name")


@dataclass
class Settings(Records, Nested, Objective, Training, Machines, Run):
    """All settings of a run; the order of keys is that of the bases from last to first."""

    @property
    def pieces(self) -> int:
        """Pieces of an optimizer step: micro-batches of every copy's share of every batch."""
        return self.microbatches * self.accumulate * self.replicas

    def check(self) -> None:
        """What concerns several groups; what depends on the method is checked by the method."""
        if self.microbatches > self.batch:
            raise UserError(f"microbatches={self.microbatches}: at most batch={self.batch} pieces")
        if self.pieces > self.step_samples:
            raise UserError(
                f"replicas={self.replicas} microbatches={self.microbatches}: more pieces than "
                f"batch={self.batch}"
            )
        self._check_text()
        for key in ("metrics", "callbacks"):
            if (names := getattr(self, key)) and self.engine == "train":
                raise UserError(f"{key}=[{','.join(names)}]: needs engine=local or ray, not train")
        if recurrent(self):
            self._check_recurrent()
        elif not dotted(self.model.name):
            self._check_no_sequence()
        if family_of(self) == "bernoulli":
            self._check_bernoulli()
        if self.mc_samples > 1 and self.sigma == 0:
            raise UserError(
                f"mc_samples={self.mc_samples}: without noise (sigma=0) all samples are the same"
            )

    def _check_text(self) -> None:
        """Text needs a language model, and a language model text."""
        model, data = self.model.name, self.data
        blocks = dotted(model) and not self.model.recurrent
        shipped = not blocks and not dotted(data.name)
        if shipped and (model == "gpt") != (data.name in TEXTS):
            what = "one of " + ", ".join(TEXTS) if model == "gpt" else "text needs model.name=gpt"
            raise UserError(f"data.name={data.name} with model.name={model}: {what}")
        if model == "gpt" and data.augment != "none":
            raise UserError(f"data.augment={data.augment}: is for images; use none")

    def _check_recurrent(self) -> None:
        """Networks over time pass their states on as they are."""
        if self.family == "bernoulli":
            raise UserError(
                f"family=bernoulli: model.name={self.model.name} passes its states on as they are"
            )
        for key, neutral in (("sigma", 0), ("beta", 0), ("mc_samples", 1)):
            if getattr(self, key) != neutral:
                raise UserError(
                    f"{key}={getattr(self, key)}: recurrent networks pass the forward state on; "
                    f"use {key}={neutral}"
                )
        for key in ("group", "auxiliary_layers", "span"):
            if (value := getattr(self.model, key)) != getattr(Model(), key):
                raise UserError(
                    f"model.{key}={value}: is for networks of blocks, not "
                    f"model.name={self.model.name}"
                )
        if self.loss != Loss():
            raise UserError(
                f"loss.name={self.loss.name}: recurrent networks have plain cross_entropy; leave "
                "out loss.*"
            )
        if self.metrics:
            raise UserError(
                f"metrics=[{','.join(self.metrics)}]: is for networks of blocks, not "
                f"model.name={self.model.name}"
            )
        if self.chain_lr != 1:
            raise UserError(
                f"chain_lr={self.chain_lr}: is for trees over blocks; through time use time.recipe"
            )

    def _check_no_sequence(self) -> None:
        """Only recurrent networks read sequences of numbers."""
        for key, used in (("permuted", self.data.permuted), ("name", self.data.name == "adding")):
            if used:
                raise UserError(
                    f"data.{key}={str(getattr(self.data, key)).lower()}: needs model.name=gru or "
                    f"elman, not {self.model.name} (a sequence)"
                )

    def _check_bernoulli(self) -> None:
        """States that are probabilities come from sigmoids and carry no noise."""
        model = self.model
        if model.name != "mlp" and not dotted(model.name):
            raise UserError(
                f"family=bernoulli: needs model.name=mlp with sigmoids, not {model.name}"
            )
        if model.name == "mlp" and model.activation != "sigmoid":
            raise UserError(
                f"family=bernoulli: needs model.activation=sigmoid, "
                f"not {model.activation} (states must be probabilities)"
            )
        if self.sigma > 0:
            raise UserError(
                f"sigma={self.sigma}: the Bernoulli family passes means on; use sigma=0"
            )


def recurrent(settings: Settings) -> bool:
    """Whether the tree is over time steps."""
    return settings.model.recurrent or settings.model.name in ("gru", "elman", "mingru")


def family_of(settings: Settings) -> str:
    """The family after `auto` is resolved."""
    if settings.family != "auto":
        return settings.family
    sigmoid = settings.model.name == "mlp" and settings.model.activation == "sigmoid"
    return "bernoulli" if sigmoid else "gaussian"


# Settings that may differ when a run is taken up again (`epochs` and `steps` not always: see
# `differences`).
RESUMABLE = {key for key, f, _ in walk(Settings()) if f.metadata.get("resumable")}
# Those that may differ besides if the user says so (`resume_with_changes`).
CHANGEABLE = {key for key, f, _ in walk(Settings()) if f.metadata.get("changeable")}
