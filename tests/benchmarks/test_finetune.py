"""The fine-tuning study, at a size that shows nothing but that it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from treeprop_ray.benchmarks import finetune

SMALL = finetune.Size(3, 16, 16, windows=32, held=8, pretrain=(64, 1, 3e-3))


def test_validation_chooses_and_transformers_alone_gives_equal_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = finetune.text

    def helps(experiment: str, size: finetune.Size, windows: int) -> Any:
        return whole("text_small", size, windows)  # WikiText may not be here

    monkeypatch.setattr(finetune, "text", helps)
    assert len(whole("text_small", finetune.Size(), 4096).validation) == 128
    rows, same = finetune.study(replace(SMALL, rates=(1e-30, 1e-2)))
    assert same == "equal logits, bit for bit"
    before, *tuned = rows
    assert [r["fine-tuned by"] for r in tuned[::2]] == list(finetune.candidates(SMALL))
    column = "validation (bits per byte)"
    assert all(r[column] == before[column] for r in tuned[::2])  # they all start from the folder
    for pair in zip(tuned[::2], tuned[1::2], strict=True):
        lower = min(pair, key=lambda r: float(r[column]))
        assert [r["lr"] for r in pair if r["chosen by validation"] == "yes"] == [lower["lr"]]
    assert float(tuned[1][column]) < float(before[column])  # BP at least


def test_the_logits_are_those_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(finetune.TrainingError, match="transformers alone"):
        finetune.logits_elsewhere(tmp_path, torch.zeros(1, 4, dtype=torch.long))
