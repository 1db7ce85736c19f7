"""The page of a plan: self-contained, and its sliders give the planner's own figures."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import browser
import pytest

from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.reporting.plan_page import data_of, write_plan
from treeprop_ray.schedule import planner
from treeprop_ray.schedule.placement import lines
from treeprop_ray.schedule.planner import DATA, ONE_F_ONE_B, TREE, ZERO_BUBBLE, Fleet
from treeprop_ray.schedule.pricing import ETHERNET, RUNTIMES, Runtime
from treeprop_ray.schedule.workload import Device, Network, Part, Workload

FLEET = Fleet((1.0,) * 8, ETHERNET, RUNTIMES["store"], 80e9)
# moves the sliders as a hand would, and writes down what is shown
HAND = """<script>
const told = [];
for (const position of POSITIONS) {
  for (const key in position) {
    const values = SLIDERS[key][1](), input = document.getElementById("slider-" + key);
    input.value = values.indexOf(position[key]);
    input.dispatchEvent(new Event("input"));
  }
  show();
  const ways = answer(data, at).ways, rows = {};
  for (const way in ways) {
    const c = ways[way], row = document.querySelector(`tr[data-way="${way}"]`);
    rows[way] = {seconds: c.seconds, memory: c.memory, moved: c.moved,
                 layout: [c.hosts, c.copies, c.pieces], shown: row.cells[1].textContent,
                 won: row.className === "won"};
  }
  const bars = document.querySelectorAll("#waves rect title").length;
  const nodes = document.querySelectorAll("#tree circle title").length;
  const driver = document.getElementById("driver").textContent;
  told.push({at: {...at}, rows, bars, nodes, driver});
}
document.title = "told";
document.body.append(Object.assign(document.createElement("pre"), {id: "told",
  textContent: JSON.stringify(told)}));
</script></body>"""


def work_of(split: str, beta: float, objective: str) -> Workload:
    net = Network(13).on(Device())
    rest = {"rule": Rule(objective=objective, beta=beta), "stem": Part(1e-3, 1e-5, 1e6, 1e4)}
    return Workload.even(Tree(13, split), 64, net.block, net.head, net.state, **rest)


def expected(work: Workload, at: dict[str, Any], block_ms: float) -> dict[str, planner.Candidate]:
    """What the planner says for a position of the sliders."""
    scale = at["block"] / block_ms

    def timed(part: Part) -> Part:
        return replace(part, fixed=part.fixed * scale, each=part.each * scale)

    sized = work.resized(at["N"])
    sized = replace(
        sized,
        blocks={edge: timed(part) for edge, part in sized.blocks.items()},
        head=timed(sized.head),
        stem=timed(sized.stem),
    )
    ray = Runtime(at["hop"] / 1000, FLEET.ray.submit)
    some = replace(FLEET, speeds=(1.0,) * (at["hosts"] * at["replicas"]), ray=ray)
    found = planner.fastest(sized, some, [ONE_F_ONE_B, ZERO_BUBBLE, DATA])
    tree = planner.tree(sized, some, at["replicas"], at["pieces"], at["hosts"])
    return {TREE: tree, **found}


def test_the_page_fetches_nothing_and_escapes_what_it_is_told(tmp_path: Path) -> None:
    work = replace(work_of("floor", 0.0, "node"), note="<b>&note</script>")
    text = write_plan(work, FLEET, "fastest: …", str(tmp_path / "deep" / "plan.html")).read_text()
    assert not re.search(r"(src|href)\s*=", text) and "@import" not in text and "url(" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "<b>&note" not in text and text.count("</script>") == 2


@browser.needs_chromium
@pytest.mark.parametrize(
    ("split", "beta", "objective"),
    [("floor", 0.0, "node"), ("right_full", 0.5, "node_all_ce")],
)
def test_the_sliders_give_the_planners_figures(
    split: str, beta: float, objective: str, tmp_path: Path
) -> None:
    work = work_of(split, beta, objective)
    block_ms = data_of(work, FLEET)["block_ms"]
    most = len(lines(Tree(64, split)))
    first = {"N": 13, "hosts": 4, "replicas": 1, "pieces": 2, "block": block_ms, "hop": 0}
    positions = [
        first,
        {**first, "replicas": 4, "pieces": 8, "hop": 0.5},
        {"N": 2, "hosts": 1, "replicas": 2, "pieces": 1, "block": 1, "hop": 10},
        {"N": 64, "hosts": most, "replicas": 2, "pieces": 4, "block": 50, "hop": 1},
        {"N": 37, "hosts": 5, "replicas": 1, "pieces": 1, "block": 0.2, "hop": 0.1},
        {"N": 64, "hosts": most, "replicas": 8, "pieces": 8, "block": 0.1, "hop": 0},
    ]  # fmt: skip
    page = write_plan(work, FLEET, "fastest: …", str(tmp_path / "plan.html"))
    hand = HAND.replace("POSITIONS", json.dumps(positions))
    page.write_text(page.read_text().replace("</body>", hand))
    dom = browser.read(page, tmp_path / "profile")
    found = re.search(r'<pre id="told">(.*?)</pre>', dom, re.S)
    assert found is not None
    told = json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&"))
    for position, seen in zip(positions, told, strict=True):
        assert seen["at"] == position
        assert seen["nodes"] == position["N"] - 1 and seen["bars"] >= position["N"]
        wanted = expected(work, position, block_ms)
        for way, c in wanted.items():
            row = seen["rows"][way]
            assert row["layout"] == [c.hosts, c.copies, c.pieces], (position, way)
            figures = [row["seconds"], row["memory"], row["moved"]]
            assert figures == pytest.approx([c.seconds, c.memory, c.step.moved], rel=1e-9)
            if way == TREE:  # what is drawn is shorter than the step
                assert bool(seen["driver"]) == (c.step.driver > c.step.path), position
            number, unit = row["shown"].split()
            shown = float(number) * {"s": 1.0, "ms": 1e-3}[unit]
            assert shown == pytest.approx(c.seconds, rel=6e-3)
        won = [way for way, row in seen["rows"].items() if row["won"]]
        assert won == [planner.winner(wanted, FLEET.memory)]
    assert {bool(seen["driver"]) for seen in told} == {True, False}


@browser.needs_chromium
def test_the_page_fits_into_windows_of_any_width(tmp_path: Path) -> None:
    work = work_of("floor", 0.0, "node")
    page = write_plan(work, FLEET, "fastest: …", str(tmp_path / "plan.html"))

    async def look() -> list[int]:
        async with browser.opened(tmp_path / "profile") as tab:
            await tab.until(page.as_uri(), ["fastest: …"])
            return [await tab.spills(pixels) for pixels in (400, 800, 1000, 1600)]

    assert asyncio.run(look()) == [0, 0, 0, 0]
