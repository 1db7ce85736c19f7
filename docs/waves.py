"""The waves of a step as an animated picture, drawn from the real schedule: docs/waves.svg.

    python docs/waves.py

A tree of eight blocks with an actor for every node, beside the same blocks by backpropagation. A
block's forward takes one tick, its backward one; hops are free. Which call waits for which is what
`treeprop_ray.schedule` says.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.schedule.ops import Layout
from treeprop_ray.schedule.tree import one_step

N, SECONDS = 8, 0.7  # blocks; seconds of a tick
FORWARD, BACKWARD, IDLE = "#1e88e5", "#fb8c00", "#cfd8dc"
LEFT, UNIT, TOP, GAP = 70, 62, 60, 46
Tick = dict[int, str]  # tick -> colour
Edge = tuple[int, int]


def tree_ticks() -> tuple[dict[tuple[int, Edge], Tick], int]:
    """(level, block) -> when it works; and how many ticks a step has."""
    tree = Tree(N, "floor")
    calls = one_step(tree, Rule(objective="node"), Layout({n: n for n in tree.nodes}), True)
    free: dict[int, int] = defaultdict(int)
    there: dict[str, int] = {}
    work: dict[tuple[int, Edge], Tick] = {}
    for node in tree.nodes.values():
        work |= {(node.level, edge): {} for edge in ((node.l, node.n), (node.n, node.r))}
    for call in calls:
        now = max([free[call.host], *(there[name] for name in call.inputs)])
        for op in call.ops:
            now = max([now, *(there.get(name, 0) for name in op.reads)])
            if op.verb in ("lift", "answer", "head", "backward"):
                node = tree.nodes[op.n]
                is_left = op.verb in ("lift", "backward")
                edge = (node.l, node.n) if is_left else (node.n, node.r)
                for colour in {"lift": [FORWARD], "backward": [BACKWARD]}.get(
                    op.verb, [FORWARD, BACKWARD]
                ):
                    work[node.level, edge][now] = colour
                    now += 1
            there.update(dict.fromkeys(op.writes, now))
        free[call.host] = now
    return work, max(t for ticks in work.values() for t in ticks) + 1


def chain_ticks() -> dict[Edge, Tick]:
    """Backpropagation: one block after the other, and back."""
    return {(i, i + 1): {i: FORWARD, 2 * N - 1 - i: BACKWARD} for i in range(N)}


def line(y: float, edge: Edge, ticks: Tick, total: int) -> str:
    """A block as a line that lights up while it works."""
    a, b = (LEFT + UNIT * k for k in edge)
    colours = [ticks.get(t, IDLE) for t in range(total)]
    times = ";".join(f"{t / total:.4f}" for t in range(total))
    return (
        f'<line x1="{a + 9}" y1="{y}" x2="{b - 9}" y2="{y}" stroke="{IDLE}" stroke-width="7" '
        f'stroke-linecap="round"><animate attributeName="stroke" calcMode="discrete" '
        f'dur="{total * SECONDS:g}s" repeatCount="indefinite" keyTimes="{times}" '
        f'values="{";".join(colours)}"/></line>'
    )


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "middle") -> str:
    """Some words."""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def picture() -> str:
    """The whole SVG."""
    tree_work, waves = tree_ticks()
    chain, total = chain_ticks(), 2 * N
    width, chain_y = LEFT + UNIT * N + 40, TOP + GAP * 4 + 26
    parts = [text(LEFT, 24, f"TreeProp, {waves} ticks of a block", 15, "start")]
    levels = sorted({level for level, _ in tree_work})
    for (level, edge), ticks in sorted(tree_work.items()):
        parts.append(line(TOP + GAP * (level - 1), edge, ticks, total))
    for level in levels:
        y = TOP + GAP * (level - 1)
        parts.append(text(34, y + 4, f"level {level}", 12))
        ends = {k for at, edge in tree_work if at == level for k in edge}
        parts += [text(LEFT + UNIT * k, y + 4, str(k)) for k in sorted(ends)]
    parts.append(text(LEFT, chain_y - 26, f"backpropagation, {total} ticks", 15, "start"))
    parts += [line(chain_y, edge, ticks, total) for edge, ticks in chain.items()]
    parts += [text(LEFT + UNIT * k, chain_y + 4, str(k)) for k in range(N + 1)]
    legend = [(FORWARD, "forward"), (BACKWARD, "backward"), (IDLE, "waits")]
    for i, (colour, words) in enumerate(legend):
        x = LEFT + 110 * i
        parts.append(
            f'<rect x="{x}" y="{chain_y + 26}" width="22" height="7" rx="3" fill="{colour}"/>'
        )
        parts.append(text(x + 30, chain_y + 34, words, 12, "start"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {chain_y + 50}" '
            f'font-family="sans-serif" fill="#607d8b" role="img" '
            f'aria-label="Which blocks work at the same time, tick by tick">',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    Path(__file__).with_name("waves.svg").write_text(picture())
