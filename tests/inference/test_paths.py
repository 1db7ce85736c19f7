"""Paths that a user names, and their scores outside an engine."""

from __future__ import annotations

import pytest

from treeprop_ray import config, data, engine, methods
from treeprop_ray.errors import UserError
from treeprop_ray.inference.paths import as_path_text, parse_path, score_network

WORDS = ["model.hidden=8", "model.blocks=7"]  # N = 8


def parsed(text: str, *words: str) -> list[int]:
    settings = config.load([*WORDS, *words])
    method = methods.of(settings)
    return parse_path(text, method.outline(settings, method.tree(settings)), method)


@pytest.mark.parametrize("text", ["0,4,6,8", "[0, 4, 6, 8]", "0-4-6-8", "spine-2"])
def test_a_path_is_given_by_name_or_by_indices(text: str) -> None:
    assert parsed(text) == [0, 4, 6, 8]


def test_a_list_of_the_command_line_is_text_again() -> None:
    assert as_path_text([0, 4, 8]) == "0,4,8" and as_path_text("full") == "full"


@pytest.mark.parametrize(
    ("text", "part"),
    [("short", "not a list of indices"), ("0,3,8", "0->3 is no edge"), ("0,4", "end at N=8")],
)
def test_a_wrong_path_is_named_with_those_there_are(text: str, part: str) -> None:
    with pytest.raises(UserError, match=f"{part}.*; names: spine-1, spine-2, spine-3, full"):
        parsed(text)


@pytest.mark.parametrize("method", ["bp", "cff"])
def test_a_method_that_trains_a_chain_has_no_other_path(method: str) -> None:
    assert parsed("full", f"method={method}") == parsed("0,1,2,3,4,5,6,7,8", f"method={method}")
    with pytest.raises(UserError, match=f"method={method} has trained only the full chain"):
        parsed("0,4,8", f"method={method}")
    with pytest.raises(UserError, match="names: full"):
        parsed("spine-1", f"method={method}")


@pytest.mark.parametrize("words", [[], ["method=bp"], ["experiment=digits_gru"]])
def test_a_network_scores_as_the_engine_that_holds_it(words: list[str]) -> None:
    settings = config.load([*words, "model.hidden=8"])
    samples = data.load(settings)
    job = methods.job_of(settings, samples, total_steps=1)
    held = engine.build(job)
    paths = job.method.outline(settings, job.tree).paths
    network = job.method.assemble(settings, samples.shape, held.state()[0])
    assert score_network(network, paths, samples.batches("test")) == held.score(paths, "test")
    held.close()
