"""The wave schedule: who computes what in which order, as data. Pure Python, no torch, no Ray.

One step of N = 8 with the spine (4, 6, 7) on the boundary's host, in waves:

    wave      1     2       3           4       5
    level     1     2       3           2       1
    node 4    F                                 B
    node 2          F                   B
    node 6          F                   B
    node 1                  FB
    node 3                  FB
    node 5                  FB
    node 7                  FB
              z_4   z_2 z_6             adjoints of z_2, z_4, z_6 -> z_4, z_0

Forward waves go down the levels, adjoints come back up. A node that expects no adjoint does
forward and backward in one call (FB). A call serves all nodes of one level in one host.

When a spine node and the head live apart, the head answers in a call of its own:

    beta = 0    node: lift, settle -> mu_n, z_n    head -> g_n    node: receive, backward
    beta > 0    node: lift -> mu_n                 head -> g_n    node: receive, settle -> z_n

With beta = 0 the right block is not needed for z_n: its forward and backward (`answer`) stand
aside and fill the time until the adjoints come.

input=sample: the right loss is at z_n, so `predict` stands aside, and `answer` (beta > 0) is for
the correction only. ce_at=sample: the head reads z_n, and with beta > 0 it is asked twice:

    beta > 0    node: lift -> mu_n    hint -> g_n    node: receive, settle -> z_n
                head -> h_n           node: hear, backward

Tensors are named by what they are: z4 (state), mu4 (spine node's mu_fwd for the head), g4 (the
head's answer), k4 (correction=vjp: of how many labels g4 is the mean), h4 (the head's answer at
z4), l2 and r2 (adjoints that node 2 hands to its parent for its z_l and z_r, its own contribution
plus those of its descendants), c0, c1, … (what the stem gives to all blocks besides z_0; each host
gets it once per piece). Adding up along the tree fixes the order of every sum, so results do not
depend on the placement.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Node, Tree
from treeprop_ray.schedule.gather import gather
from treeprop_ray.schedule.ops import Call, Layout, Op, Row, Wave, alike, interleave, make_calls


@dataclass(frozen=True)
class Phases:
    """The ops of one node, by the call they belong to; a call may be empty."""

    forward: list[Op]
    head: list[Op] = field(default_factory=list)
    settle: list[Op] = field(default_factory=list)
    again: list[Op] = field(default_factory=list)  # the head once more, after z_n
    aside: list[Op] = field(default_factory=list)  # any time before the backward call
    backward: list[Op] = field(default_factory=list)


def answers(n: int, rule: Rule) -> tuple[str, ...]:
    """What the head tells spine node n."""
    summed = rule.beta > 0 and rule.by_product
    return (f"g{n}", f"k{n}") if summed else (f"g{n}",)


class Flow:
    """The ops of every node under a rule, and the tensors they read and write."""

    def __init__(
        self, tree: Tree, rule: Rule, layout: Layout, stem_trains: bool, piece: int = 0
    ) -> None:
        self.tree, self.rule, self.stem_trains, self.piece = tree, rule, stem_trains, piece
        self.at, self.boundary, self.heads = layout.host_of, layout.boundary, layout.heads

    def head_at(self, node: Node) -> int:
        """The host of the head, or of the copy, that answers a node."""
        return self.heads.get(node.n, self.boundary)

    def apart(self, node: Node) -> bool:
        """A spine node that needs the head, which lives in another host."""
        return self.at[node.n] != self.head_at(node) and self.rule.asks_head(self.tree, node)

    def hands_up(self, node: Node) -> tuple[str, ...]:
        """The adjoints l<n> and r<n> as far as they exist."""
        left = (f"l{node.n}",) if self.rule.sends_left(node, self.stem_trains) else ()
        return left + ((f"r{node.n}",) if self.rule.sends_right(self.tree, node) else ())

    def awaits(self, node: Node) -> tuple[str, ...]:
        """The adjoints that the two children hand up."""
        children = (self.tree.left_child(node), self.tree.right_child(node))
        return tuple(name for child in children if child for name in self.hands_up(child))

    def backward(self, node: Node) -> list[Op]:
        ops = [Op("backward", node.n, self.awaits(node), self.hands_up(node))]
        return ops + self.close() if node is self.tree.root and self.closes_with_root else ops

    @property
    def closes_with_root(self) -> bool:
        """Whether the stem goes back in the root's call; not with a root that went back long ago,
        since the heads of finer levels come first (`one_piece`)."""
        root = self.tree.root
        last = bool(self.awaits(root)) or root.is_leaf
        return last and self.at[root.n] == self.boundary

    def open(self) -> list[Op]:
        return [Op("open", 0, (), ("z0", *self.rule.side_inputs))]

    def close(self) -> list[Op]:
        verb = "close_noted" if self.heads else "close"
        ops = [Op(verb, 0, (f"l{self.tree.root.n}",))] if self.stem_trains else []
        weighed = [n for n in self.heads if self.rule.ce_weight(self.tree, self.tree.nodes[n]) > 0]
        sums = [Op("collect", 0, tuple(f"h{n}" for n in weighed))] if weighed else []
        return sums + ops

    def share(self) -> list[Op]:
        """What copies of the head need: labels, and once in a step the weights."""
        weights = ("hw",) if self.piece == 0 else ()
        return [Op("share", 0, (), ("y", "k", *weights))] if self.heads else []

    def lift(self, node: Node) -> Op:
        reads = (f"z{node.l}", *self.rule.side_inputs)
        return Op("lift", node.n, reads, (f"mu{node.n}",))

    def head(self, node: Node, verb: str = "head") -> Op:
        n, told = node.n, answers(node.n, self.rule)
        if not self.heads:
            return Op(verb, n, (f"mu{n}",), told)
        if n not in self.heads:
            return Op("head_noted", n, (f"mu{n}",), told)
        back = (f"h{n}",) if self.rule.ce_weight(self.tree, node) > 0 else ()
        return Op("head_copy", n, (f"mu{n}", *self.share()[0].writes), told + back)

    def head_at_sample(self, node: Node) -> list[Op]:
        """The head's answer at z_n, in the head's host and in the node's."""
        return [
            Op("head", node.n, (f"z{node.n}",), (f"h{node.n}",)),
            Op("hear", node.n, (f"h{node.n}",)),
        ]

    def receive(self, node: Node) -> Op:
        return Op("receive", node.n, answers(node.n, self.rule))

    def settle(self, node: Node) -> Op:
        return Op("settle", node.n, (), (f"z{node.n}",))

    def phases(self, node: Node) -> Phases:
        """A node's ops in its forward, head, settle, aside and backward call."""
        lift, settle = self.lift(node), self.settle(node)
        back = self.backward(node)
        now, later = ([], back) if self.awaits(node) else (back, [])
        at_sample = self.rule.at_sample(self.tree, node)
        if not self.tree.is_spine(node):
            answer = Op("answer", node.n, (f"z{node.r}",))
            if at_sample:
                predict = Op("predict", node.n, (f"z{node.n}", f"z{node.r}"))
                first = [lift, answer, settle] if self.rule.beta > 0 else [lift, settle]
                if later:
                    return Phases(first, aside=[predict], backward=later)
                return Phases([*first, predict, *now])
            if self.rule.beta == 0 and later:  # z_n does not wait for the right block
                return Phases([lift, settle], aside=[answer], backward=later)
            return Phases([lift, answer, settle, *now], backward=later)
        if not self.rule.asks_head(self.tree, node):
            return Phases([lift, settle, *now], backward=later)
        head, receive = self.head(node), self.receive(node)
        if at_sample:
            hint = self.head(node, "hint")
            head, hear = self.head_at_sample(node)
            if self.rule.beta == 0:
                if self.apart(node):
                    return Phases([lift, settle], [head], backward=[hear, *back])
                return Phases([lift, settle, head, hear, *now], backward=later)
            if self.apart(node):
                first = [receive, settle]
                return Phases([lift], [hint], first, again=[head], backward=[hear, *back])
            return Phases([lift, hint, receive, settle, head, hear, *now], backward=later)
        if not self.apart(node):
            return Phases([lift, head, receive, settle, *now], backward=later)
        if self.rule.beta > 0:
            return Phases([lift], [head], [receive, settle, *now], backward=later)
        return Phases([lift, settle], [head], backward=[receive, *back])


def one_piece(
    tree: Tree,
    rule: Rule,
    layout: Layout,
    stem_trains: bool,
    piece: int = 0,
    gathered: bool = False,
) -> list[Wave]:
    """The waves of one piece, in order; `gathered`: in fewer calls where hosts have many nodes.

    The clock of a wave does not depend on the layout (a level takes three ticks: forward, head,
    settle), so head and stem meet levels and pieces in the same order wherever the nodes live.
    """
    flow = Flow(tree, rule, layout, stem_trains, piece)
    at, boundary, D = layout.host_of, layout.boundary, tree.depth
    # Who begins with z_0 in another host must not wait for the root: the stem has its own call.
    stem_alone = any(at[node.n] != boundary for node in tree.nodes.values() if node.l == 0)
    waves: list[Row] = []

    def wave(clock: int, phase: str, level: int, rows: list[tuple[int, list[Op]]]) -> None:
        by_host: dict[int, list[Op]] = {}
        for host, ops in rows:
            if ops:
                by_host.setdefault(host, []).extend(ops)
        if by_host:
            waves.append((clock, phase, level, dict(sorted(by_host.items()))))

    # What is aside goes into the host's call for the finest level, which nobody's forward waits
    # for; a host without one (an actor per node) does it in a call of its own while its
    # descendants work.
    late = {at[node.n] for node in tree.level(D)}
    aside: list[tuple[int, list[Op]]] = []
    if stem_alone:
        wave(0, "stem", 0, [(boundary, flow.open())])
    for s in range(1, D + 1):
        rows = [(at[node.n], flow.phases(node)) for node in tree.level(s)]
        opening = [(boundary, flow.open())] if s == 1 and not stem_alone else []
        aside += [(host, ops.aside) for host, ops in rows if host in late]
        closing = aside if s == D else []
        wave(3 * s - 2, "forward", s, opening + [(h, ops.forward) for h, ops in rows] + closing)
        if s == 1:
            wave(1, "share", 0, [(boundary, flow.share())])
        heads = [(flow.head_at(node), flow.phases(node).head) for node in tree.level(s)]
        wave(3 * s - 1, "head", s, heads)
        wave(3 * s, "settle", s, [(h, ops.settle) for h, ops in rows])
        wave(3 * s, "again", s, [(boundary, ops.again) for _, ops in rows])
        wave(3 * s, "aside", s, [(h, ops.aside) for h, ops in rows if h not in late])
    for s in range(D, 0, -1):
        rows = [(at[node.n], flow.phases(node)) for node in tree.level(s)]
        clock = 3 * (2 * D - min(s, D - 1)) - 2  # meets the next piece's forward and goes first
        wave(clock, "backward", s, [(h, ops.backward) for h, ops in rows])
    if not flow.closes_with_root:
        wave(clock, "stem_backward", 0, [(boundary, flow.close())])
    return make_calls(gather(waves) if gathered else waves, piece, layout.one_machine)


def head_key(node: Node, piece: int) -> tuple[int, int]:
    """When the head answers a node: what its gradients are sorted by."""
    return 3 * (node.level + piece) - 1, piece


def close_key(tree: Tree, piece: int) -> tuple[int, int]:
    """When the stem goes back."""
    return 3 * (2 * tree.depth - min(1, tree.depth - 1) + piece) - 2, piece


def order_of_sums(tree: Tree, rule: Rule, stem_trains: bool, pieces: int) -> list[tuple[int, int]]:
    """In which order gradients of head and stem are added up, with copies of the head or without
    them."""
    weighed = [n for n in tree.spine if rule.asks_head(tree, n) and rule.ce_weight(tree, n) > 0]
    keys = [head_key(node, m) for node in weighed for m in range(pieces)]
    return sorted(keys + [close_key(tree, m) for m in range(pieces) if stem_trains])


def one_step(
    tree: Tree,
    rule: Rule,
    layout: Layout,
    stem_trains: bool,
    pieces: int = 1,
    gathered: bool = True,
) -> list[Call]:
    """The calls of a TreeProp step. A piece enters one level behind the one before it, so at most
    2D pieces are ever between their forward and their backward."""
    first = one_piece(tree, rule, layout, stem_trains, 0, gathered)
    if not layout.heads:
        return interleave(alike(first, pieces), stride=3)
    # with copies of the head its weights travel with the first piece only
    rest = [one_piece(tree, rule, layout, stem_trains, m, gathered) for m in range(1, pieces)]
    return interleave([first, *rest], stride=3)
