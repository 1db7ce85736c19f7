"""One HTML page per run: whole, self-contained, and a browser shows it without errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import browser
import pytest
from conftest import Result

from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree

Command = Callable[..., Result]
WORDS = ["model.hidden=8", "model.blocks=3", "epochs=1", "probe.every=15", "probe.draws=2"]
# added to a copy of the page: counts what a browser would complain about
WATCH = """<script>
window.problems = [];
addEventListener('error', e => problems.push(e.message || e.target.id || 'error'), true);
addEventListener('securitypolicyviolation', e => problems.push(e.blockedURI));
addEventListener('load', () => {
  const broken = [...document.images].filter(i => !i.complete || !i.naturalWidth).length;
  document.title = `problems ${problems.length} broken ${broken} images ${document.images.length}`;
});
</script></head>"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from treeprop_ray import train

    out = tmp_path_factory.mktemp("runs")
    assert train.main([*WORDS, f"out={out}", "name=<b>&one"]) == 0
    return out / "<b>&one"


def test_page_is_self_contained(command: Command, run_folder: Path) -> None:
    result = command("report", f"run={run_folder}")
    assert result.code == 0
    text = (run_folder / "report.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:)", text) and "<script" not in text
    assert "&lt;b&gt;&amp;one" in text and "<b>&one" not in text
    for name in ("path_accuracy", "tree_loss", "schedule", "probe_alignment", "probe_tree"):
        assert f'<figure id="{name}">' in text
    for words in ("spine-1", "full", "model.hidden", "epochs", "cosine", "Commit"):
        assert words in text


@browser.needs_chromium
def test_page_opens_in_a_browser_without_errors(run_folder: Path, tmp_path: Path) -> None:
    from treeprop_ray.reporting.page import write_page

    page = write_page(str(run_folder), tmp_path / "page.html")
    text = page.read_text()
    page.write_text(text.replace("</head>", WATCH, 1))
    dom = browser.read(page, tmp_path / "profile")
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title is not None
    assert title[1] == f"problems 0 broken 0 images {text.count('<img')}"
    assert "Accuracy per path" in dom


def test_page_of_an_unfinished_run_says_so(command: Command, run_folder: Path) -> None:
    from treeprop_ray.reporting.page import html_of
    from treeprop_ray.run.folder import run_settings

    settings = run_settings(str(run_folder))
    aside = run_folder / "summary.json"
    kept = aside.read_text()
    aside.unlink()
    try:
        text = html_of(settings, run_folder)
    finally:
        aside.write_text(kept)
    assert "not finished" in text and "python -m treeprop_ray.train" in text


def test_schedule_is_drawn_for_every_tree() -> None:
    from treeprop_ray.reporting.figures import plt, schedule

    for N in (2, 8, 13):
        fig = schedule(Tree(N), Rule(beta=0.5))
        assert len(fig.axes[0].get_yticks()) == N
        plt.close(fig)


def test_folders_that_are_no_run_are_refused(command: Command, tmp_path: Path) -> None:
    for word in ("to=page.html", "run=nowhere", f"run={tmp_path}"):
        result = command("report", word)
        assert result.code == 2 and len(result.error_lines) == 1 and "run=" in result.err
