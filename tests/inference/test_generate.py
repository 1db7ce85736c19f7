"""Generation: the cache changes nothing, and neither do drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Result
from test_gpt import BLOCKS, network_of, roughen

from treeprop_ray.inference.decoding import (
    Decoder,
    Sampler,
    accept,
    decode,
    speculate,
    window_start,
)

Command = Callable[..., Result]
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]  # longer than the context 9


def decoders(words: list[str], *paths: str) -> list[Decoder]:
    network = network_of(words)
    roughen(network)
    with torch.no_grad():
        for name, p in network.named_parameters():  # weak blocks: some drafts are good, some not
            p.mul_(0.1 if "project" in name or "contract" in name else 1)
        network.stem.positions.mul_(2)  # type: ignore[union-attr, operator]
    return [Decoder(network.path(network.tree.named_paths[path])) for path in paths]


def test_the_window_moves_by_half_when_it_is_full() -> None:
    assert [window_start(n, 8) for n in (1, 8, 9, 12, 13, 16, 17)] == [0, 0, 4, 4, 8, 8, 12]


@pytest.mark.parametrize("words", BLOCKS)
def test_cached_logits_equal_reading_the_window_anew(words: list[str]) -> None:
    """Token by token, several at once, and after tokens were taken back."""
    network = network_of(words)
    roughen(network)
    chain = network.chain().eval()
    decoder = Decoder(chain)

    def plain(length: int, last: int) -> torch.Tensor:
        with torch.no_grad():
            return chain(torch.tensor([TEXT[window_start(length, 9) : length]]))[0, -last:]

    for length, last in ((3, 2), (4, 1), (8, 4), (9, 1), (10, 1), (11, 1), (13, 2), (14, 1)):
        torch.testing.assert_close(decoder.logits(TEXT[:length], last), plain(length, last))
    decoder.cut(12)
    assert decoder.known == 12
    torch.testing.assert_close(decoder.logits(TEXT[:13]), plain(13, 1))


@pytest.mark.parametrize("words", BLOCKS)
@pytest.mark.parametrize("ahead", [2, 20])
def test_greedy_drafts_give_the_tokens_of_plain_decoding(words: list[str], ahead: int) -> None:
    chain, short = decoders(words, "full", "spine-1")
    greedy = Sampler(temperature=0)
    plain = decode(chain, TEXT[:4], 24, greedy, 1)
    found = speculate(chain, short, TEXT[:4], 24, ahead, greedy, 1)
    assert found.tokens == plain.tokens and len(found.tokens) == 24
    assert 0 < found.accepted < found.drafted
    same = speculate(chain, decoders(words, "full")[0], TEXT[:4], 24, ahead, greedy, 1)
    assert same.accepted == same.drafted  # a draft by the chain itself is always right


def test_accepted_drafts_are_distributed_as_the_full_chain_says() -> None:
    """First and second token of many rounds, against p, for a poor q."""
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    q = torch.tensor([[0.1, 0.1, 0.3, 0.5]], dtype=torch.float64)
    rounds = 6000
    first, second = torch.zeros(4), torch.zeros(4)
    for _ in range(rounds):
        draft = int(torch.multinomial(q[0], 1, generator=generator))
        good, following = accept(p, q, [draft], generator)
        first[draft if good else following] += 1
        if good:
            second[following] += 1
    # five standard deviations of a share
    assert (first / rounds - p[0]).abs().max() < 5 * 0.5 / rounds**0.5
    assert (second / second.sum() - p[1]).abs().max() < 5 * 0.5 / float(second.sum()) ** 0.5
    assert float(second.sum()) / rounds == pytest.approx(
        float(torch.minimum(p[0], q[0]).sum()), abs=0.03
    )


def test_sampler() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0])
    assert Sampler(0).probabilities(logits).tolist() == [0, 1, 0, 0]
    half = Sampler(0.5).probabilities(logits)
    torch.testing.assert_close(half, (2 * logits.double()).softmax(-1))
    two = Sampler(1, top_k=2).probabilities(logits)
    assert two[0] == two[3] == 0 and two.sum() == pytest.approx(1)


TINY = ["experiment=text_small", "model.hidden=12", "model.heads=3", "data.length=16", "batch=8"]


def test_generate_and_hugging_face_export(command: Command, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    from treeprop_ray.run.reading import open_run

    words = [*TINY, "model.blocks=4", "model.output_block=true", "split=right_full"]
    run = tmp_path / "run"
    made = command("train", *words, "steps=2", "data.limit=16", f"out={tmp_path}", "name=run")
    assert made.code == 0
    told = ["prompt=a: [b", "tokens=12", "temperature=0"]
    plain = command("generate", f"run={run}", *told)
    assert plain.code == 0 and plain.out.startswith("a: [b") and "tokens/s" in plain.err
    drafted = command("generate", f"run={run}", *told, "draft=spine-1", "ahead=3")
    assert drafted.out == plain.out and "drafts accepted, same text as plain: yes" in drafted.err
    sampled = command("generate", f"run={run}", *told[:2], "top_k=5", "path=[0,2,3,4]")
    assert sampled.code == 0
    timed = command("bench", "generate", f"run={run}", "rounds=1", "steps=1", f"out={tmp_path}")
    table = (tmp_path / "bench_generate.md").read_text()
    assert timed.code == 0 and table.count("| greedy ") == 7 and "| no " not in table

    _, samples, _, network = open_run(str(run), "last", None)
    x = samples.inputs(samples.test.x[:2])
    for name, layers in (("full", 4), ("spine-1", 2)):
        target = tmp_path / name
        done = command("export", f"run={run}", "format=hf", f"path={name}", f"to={target}")
        assert done.code == 0
        theirs = GPT2LMHeadModel.from_pretrained(target).eval()
        assert theirs.config.n_layer == layers
        with torch.no_grad():
            ours = network.path(network.tree.named_paths[name])(x)  # type: ignore[union-attr]
            torch.testing.assert_close(theirs(x).logits, ours, rtol=1e-4, atol=1e-5)
    assert command("export", f"run={run}").code == 0  # the plain program, with tied weights
    program = torch.export.load(run / "export/full/model.pt2").module()
    with torch.no_grad():
        torch.testing.assert_close(program(x), network.chain()(x))  # type: ignore[union-attr]


def test_mistakes_are_named(command: Command, tmp_path: Path) -> None:
    assert command("train", "epochs=1", "data.limit=64", f"out={tmp_path}", "name=mlp").code == 0
    run = tmp_path / "mlp"
    assert "is no language model" in command("generate", f"run={run}").err
    assert "needs gpt" in command("export", f"run={run}", "format=hf").err
    assert "give a run folder" in command("generate").err
    assert "prompt= : at least one" in command("generate", f"run={run}", "prompt=").err
    assert "temperature=-1" in command("generate", f"run={run}", "temperature=-1").err
