"""Generation: the cache changes nothing, and neither do drafts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Result
from test_gpt import BLOCKS, network_of, roughen
from torch import nn

from treeprop_ray.inference import drafting
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


@pytest.mark.parametrize("offer", [drafting.Offer("spine-1", 3, 9.0), drafting.Offer("", 0, 1.0)])
def test_auto_drafts_give_the_tokens_of_plain_decoding(
    offer: drafting.Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a path promises much or none anything; drafting may be given up and taken up."""
    monkeypatch.setattr(drafting, "best_offer", lambda acceptance, times: offer)
    monkeypatch.setattr(drafting, "TRIAL", 5)
    monkeypatch.setattr(drafting, "SHARE", 1000.0)
    monkeypatch.setattr(drafting, "DOUBT", 1)
    chain, *shorts = decoders(BLOCKS[0], "full", "spine-1", "spine-2")
    greedy, named = Sampler(temperature=0), dict(zip(("spine-1", "spine-2"), shorts, strict=True))
    plain = decode(chain, TEXT[:4], 60, greedy, 1)
    found = drafting.decode_auto(chain, named, TEXT[:4], 60, greedy, 1)
    assert found.tokens == plain.tokens
    assert bool(found.drafters) == bool(found.drafted) == bool(offer.path)


def test_the_offer_follows_acceptance_and_times() -> None:
    sure, unsure = [1.0] * 4000, [0.0] * 4000
    times = drafting.Times(deque([1.0]), deque([1.0]), {"a": 0.1, "b": 0.5}, seen=0.0)
    assert drafting.expected_tokens(sure)[3] == 4 and drafting.expected_tokens(unsure)[3] == 1
    # from the first place 1 + 0.5 + 0.5 * 0.8, from the second 1 + 0.8
    assert drafting.expected_tokens([0.5, 0.8]) == pytest.approx([1, 1.65, 1.65 + 0.4])
    best = drafting.best_offer({"a": sure, "b": sure}, times)
    assert best.path == "a" and best.ahead == 10 and best.gain == pytest.approx(11 / 2, rel=0.02)
    # a dear path that is right beats a cheap one that is wrong; if nothing is right, none drafts
    assert drafting.best_offer({"a": unsure, "b": sure}, times).path == "b"
    assert drafting.best_offer({"a": unsure, "b": unsure}, times) == ("", 0, 1.0)
    half = torch.tensor([1.0, 0.0] * 2000)  # every second draft is wrong: one ahead is enough
    assert drafting.best_offer({"a": half}, times).ahead == 1
    drafts = drafting.Drafting(drafting.Offer("a", 3, 2.0), times)
    for _ in range(2 * drafting.SEEN):
        drafts.note(3, 3, 1.3)
    assert drafts.pays and drafts.ahead == 10  # all right: more at a time
    for _ in range(2 * drafting.SEEN):
        drafts.note(3, 0, 1.3)
    assert not drafts.pays and drafts.ahead == 1


class OnAClock(Decoder):
    """A decoder whose calls take as long as they are said to; with sign = -1 it is always wrong."""

    def __init__(
        self, decoder: Decoder, clock: SimpleNamespace, seconds: float, sign: int = 1
    ) -> None:
        super().__init__(nn.Sequential(decoder.stem, *decoder.blocks, decoder.head))
        self.clock, self.seconds, self.sign = clock, seconds, sign

    def logits(self, tokens: Sequence[int], last: int = 1) -> torch.Tensor:
        said = super().logits(tokens, last)
        self.in_blocks = self.seconds
        self.clock.now += self.seconds + 0.1
        return self.sign * said


@pytest.mark.parametrize("count", [40, 100, 200, 600])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("sign", [-1, 1])
def test_auto_loses_two_percent_at_most_and_gains_where_a_path_is_right(
    sign: int, temperature: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where a path always promises much; by a clock on which a draft takes a fifth of a token
    and an examination two tokens."""
    (decoder,), clock = decoders(BLOCKS[0], "full"), SimpleNamespace(now=0.0)
    chain, short = OnAClock(decoder, clock, 0.9), OnAClock(decoder, clock, 0.1, sign)

    def consider(*given: Any) -> drafting.Offer:
        clock.now += 2
        given[4].shares["a"] = 0.1  # of the times
        return drafting.Offer("a", 4, 2.0)

    monkeypatch.setattr(drafting, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(drafting, "consider", consider)
    out = drafting.decode_auto(chain, {"a": short}, TEXT[:4], count, Sampler(temperature), 1)
    assert len(out.tokens) == count and count / clock.now >= 0.98
    assert bool(out.drafted) == (count >= 200)
    if sign == 1 and count >= 200:
        assert count / clock.now > 1.2


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
    auto = command("generate", f"run={run}", *told, "tokens=60", "draft=auto")
    assert auto.code == 0 and "drafts by auto" in auto.err and "same text as plain: yes" in auto.err
    sampled = command("generate", f"run={run}", *told[:2], "top_k=5", "path=[0,2,3,4]")
    assert sampled.code == 0
    timed = command("bench", "generate", f"run={run}", "rounds=1", "steps=1", f"out={tmp_path}")
    table = (tmp_path / "bench_generate.md").read_text()
    assert timed.code == 0 and table.count("| greedy ") == 12 and "| no  " not in table

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


def test_a_trial_learns_what_a_draft_costs_and_ends_where_it_does_not_pay() -> None:
    """A draft would cost a third of a token; looks of two tokens take three."""
    times = drafting.Times(deque([1.0]), deque([1.0]), {"a": 0.3})
    offer = drafting.best_offer({"a": [0.9] * 24}, times)
    assert offer.gain > drafting.PROMISE
    trial = drafting.Drafting(offer, times)
    while trial.pays and len(trial.looks) < 100:
        trial.note(2, 1, 1 + 2 * 1.0)  # two drafts, one of them good: two tokens in three seconds
    assert drafting.FIRST <= len(trial.looks) < 20
    assert times.seen == pytest.approx(1.4) and times.looks("a")[2] == pytest.approx(3.0)
    assert drafting.best_offer({"a": [0.9] * 24}, times).gain < drafting.PROMISE

    times = drafting.Times(deque([1.0]), deque([1.0]), {"a": 0.1})
    good = drafting.Drafting(drafting.Offer("a", 4, 2.0), times)
    for _ in range(100):
        good.note(good.ahead, good.ahead, 1 + 0.1 * good.ahead)
        assert good.pays
    assert good.ahead == 10  # all are right: as many as there may be


def test_paths_are_asked_without_running_a_block_twice() -> None:
    """What they say is what their own decoders say."""
    shorts = decoders(BLOCKS[0], "spine-1", "spine-2")
    named = dict(zip(("spine-1", "spine-2"), shorts, strict=True))
    counts: dict[int, int] = {}
    for block in {id(b): b for d in shorts for b in d.blocks}.values():
        block.register_forward_hook(
            lambda module, *_: counts.update({id(module): counts.get(id(module), 0) + 1})
        )
    said = dict(drafting.opinions(named, TEXT[:12], 3))
    assert set(counts.values()) == {1} and len(counts) == 2
    for name, decoder in named.items():
        torch.testing.assert_close(said[name], decoder.logits(TEXT[:12], 3))
