"""bench finetune: a small Llama of Hugging Face, fine-tuned by TreeProp and by backpropagation.

A byte-level `LlamaForCausalLM` is trained by backpropagation on Python's help texts and saved by
Transformers. From that folder every candidate starts (`TreeNetwork.from_pretrained`) and sees the
same windows of WikiText-2 equally often. The validation split chooses the learning rate; TreeProp's
model is then given back (`save_pretrained`) and loaded in a process without this package.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from treeprop_ray import config, data, methods
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.config import OWN, Settings
from treeprop_ray.core.network import named, part_state
from treeprop_ray.data import DataSet, Split
from treeprop_ray.errors import TrainingError
from treeprop_ray.models.pretrained import TreeNetwork
from treeprop_ray.reporting.tables import write_table
from treeprop_ray.run.trainer import Trainer

WORDS = {
    "batch": 16, "schedule": "cosine", "warmup": 0.1, "clip": 1.0, "weight_decay": 0.01,
    "eval_every": 1000, "timeline_steps": 0,
}  # fmt: skip
TREE: dict[str, Any] = {"sigma": 0.005, "beta": 0.0, "weights": {"right": 10.0}}
BP: dict[str, Any] = {"method": "bp"}
LOAD = """
import sys, torch
for name in ("nms", "qnms"):  # torchvision's own are missing beside a torch for the CPU
    if not hasattr(torch.ops.torchvision, name):
        torch.library.define("torchvision::" + name, "(Tensor d, Tensor s, float t) -> Tensor")
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
assert type(model).__name__ == "LlamaForCausalLM" and "treeprop_ray" not in sys.modules
torch.set_num_threads(1)
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[2])).logits, sys.argv[3])
"""


@dataclass(frozen=True)
class Size:
    """How large the study is."""

    layers: int = 8
    width: int = 128
    length: int = 64
    windows: int = 1024  # to fine-tune on
    held: int = 128  # of the validation and of the test split
    pretrain: tuple[int, int, float] = (4096, 1, 3e-3)  # windows, epochs, learning rate
    epochs: int = 2
    rates: Sequence[float] = (3e-4, 1e-3, 3e-3)


@dataclass(frozen=True)
class Stage:
    """Some of the epochs, and their settings."""

    epochs: int
    words: Mapping[str, Any]


def candidates(size: Size) -> dict[str, list[Stage]]:
    """Ways to fine-tune; all of them go over the same windows equally often."""
    half, rest = size.epochs // 2, size.epochs - size.epochs // 2
    return {
        "BP": [Stage(size.epochs, BP)],
        "TreeProp": [Stage(size.epochs, TREE)],
        "TreeProp, then BP": [Stage(half, TREE), Stage(rest, BP)],
    }


def text(experiment: str, size: Size, windows: int) -> DataSet:
    """The first windows of a text and of its held-out splits."""
    words = [f"experiment={experiment}", f"data.length={size.length}", f"data.limit={windows}"]
    whole = data.load(config.load(words))
    validation, test = (
        split.part(torch.arange(min(size.held, len(split))))
        for split in (whole.validation, whole.test)
    )
    return replace(whole, validation=validation, test=test)


def train(
    network: TreeNetwork, samples: DataSet, epochs: int, words: Mapping[str, Any]
) -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """Train a network in place; its scores by split and path."""
    own = {
        "experiment": "finetune", "model": {"name": OWN}, "data": {"name": OWN},
        "split": network.tree.split, "epochs": epochs,
    }  # fmt: skip
    merged: Settings = config.merge(Settings, ("", OmegaConf.create({**own, **WORDS, **words})))
    settings = methods.checked(merged)
    steps = samples.total_steps(settings.step_samples, epochs, 0, 0)
    trainer = Trainer(methods.job_over(network, settings, samples, steps), None, [])
    summary = trainer.train()
    for name, module in named(network.cpu().parts()).items():
        if state := part_state(trainer.weights, name):  # BP has no auxiliary blocks
            module.load_state_dict(state)
    return summary["final"]


def pretrained(size: Size, folder: Path) -> None:
    """A Llama over bytes that has read Python's help texts, saved by Transformers."""
    import treeprop_ray.core.vision  # noqa: F401  (transformers imports torchvision)

    import transformers  # isort: skip

    windows, epochs, rate = size.pretrain
    shape = transformers.LlamaConfig(
        vocab_size=256, hidden_size=size.width, intermediate_size=size.width * 11 // 4,
        num_hidden_layers=size.layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=size.length, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    network = TreeNetwork.from_pretrained(transformers.LlamaForCausalLM(shape))
    train(network, text("text_small", size, windows), epochs, {**BP, "lr": rate})
    network.save_pretrained(folder)


def logits_elsewhere(folder: Path, x: Tensor) -> Tensor:
    """What Transformers alone gives for the model in a folder, in a process of its own."""
    torch.save(x, folder / "x.pt")
    files = [str(folder), str(folder / "x.pt"), str(folder / "logits.pt")]
    alone = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", LOAD, *files]
    ran = subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True)
    if ran.returncode:
        raise TrainingError(f"transformers alone: {ran.stderr.strip().splitlines()[-1]}")
    logits: Tensor = torch.load(folder / "logits.pt")
    return logits


def bits(loss: float) -> float:
    """Nats to bits."""
    return loss / math.log(2)


def study(size: Size) -> tuple[list[dict[str, Any]], str]:
    """A row for every candidate and learning rate, and what became of TreeProp's model."""
    samples, rows = text("wikitext2_small", size, size.windows), []
    assert isinstance(samples.test, Split)
    best: dict[str, tuple[float, dict[str, Any], TreeNetwork]] = {}
    with TemporaryDirectory() as place:
        given, out = Path(place) / "given", Path(place) / "out"
        pretrained(size, given)
        before = train(TreeNetwork.from_pretrained(given), samples, 1, {**BP, "lr": 1e-30})
        rows.append(row("as it was pre-trained", "-", before))
        for name, stages in candidates(size).items():
            for rate in size.rates:
                network = TreeNetwork.from_pretrained(given)
                for stage in stages:
                    scores = train(network, samples, stage.epochs, {**stage.words, "lr": rate})
                rows.append(row(name, f"{rate:g}", scores))
                loss = scores["validation"]["full"]["loss"]
                if name not in best or loss < best[name][0]:
                    best[name] = loss, rows[-1], network
        for _, line, _ in best.values():
            line["chosen by validation"] = "yes"
        network = best["TreeProp"][2].eval()
        network.save_pretrained(out)
        x = samples.test.x[:8].long()
        with torch.no_grad():
            ours, theirs = network.chain()(x), logits_elsewhere(out, x)
    far = float((ours - theirs).abs().max())
    same = "equal logits, bit for bit" if torch.equal(ours, theirs) else f"logits {far:.1e} apart"
    return rows, same


def row(name: str, rate: str, scores: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Any:
    """One line of the table."""
    short = [bits(s["loss"]) for path, s in scores["validation"].items() if path != "full"]
    return {
        "fine-tuned by": name,
        "lr": rate,
        "validation (bits per byte)": f"{bits(scores['validation']['full']['loss']):.3f}",
        "test (bits per byte)": f"{bits(scores['test']['full']['loss']):.3f}",
        "short paths, validation": ", ".join(f"{b:.2f}" for b in short) or "-",
        "chosen by validation": "",
    }


def run(bench: BenchSettings) -> None:
    """The study at its full size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        size = Size()
        rows, same = study(size)
    finally:
        torch.set_num_threads(threads)
    windows, epochs, rate = size.pretrain
    notes = [
        f"`LlamaForCausalLM`, {size.layers} layers of width {size.width}, bytes as tokens, windows "
        f"of {size.length}. Pre-trained by BP on {windows} windows of Python's help texts "
        f"({epochs} epoch, lr {rate:g}), then fine-tuned on the first {size.windows} windows of "
        f"WikiText-2, {size.epochs} epochs of batch {WORDS['batch']} for everybody; scored on the "
        f"first {size.held} windows of the validation and the test split after the last step. "
        "AdamW with a cosine schedule, begun anew in each half of a candidate in two halves. "
        "One seed. TreeProp: auxiliary blocks start as copies of the layer in the middle of their "
        "interval, sigma 0.005, beta 0, weight 10 for the right term. A step of TreeProp applies "
        "about twice as many blocks as one of BP.",
        "",
        f"TreeProp's chosen model, written by `save_pretrained` and loaded by Transformers in a "
        f"process without this package: {same}.",
    ]
    title = "Fine-tuning a small Llama: TreeProp and BP"
    print(write_table(bench.out, "bench_finetune", title, rows, notes))
