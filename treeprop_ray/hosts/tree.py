"""Nodes of a tree that live together, and the boundary (stem, head, labels) if it is here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from treeprop_ray.core import factor
from treeprop_ray.core.boundary import Boundary
from treeprop_ray.core.growth import take_weights, weights_of
from treeprop_ray.core.head_sums import HeadSums, Key, as_bytes, from_bytes, parameters_of
from treeprop_ray.core.network import STEM, edge_name
from treeprop_ray.core.node import TreeNode, add, at_once
from treeprop_ray.core.rule import Piece, Rule
from treeprop_ray.core.tree import Node, Tree
from treeprop_ray.hosts.base import Held, Share, Verb, there
from treeprop_ray.hosts.blocks import BlockHost
from treeprop_ray.hosts.probe import Gauge, HostProbe
from treeprop_ray.hosts.sweeps import Sweeps, summed
from treeprop_ray.schedule.growth import given_edge
from treeprop_ray.schedule.ops import Call, Op
from treeprop_ray.schedule.probe import edge_of
from treeprop_ray.schedule.tree import close_key, head_key


class TreeHost(BlockHost):
    """Each verb is a method of TreeNode or Boundary (in core/), or belongs to the probe."""

    leads = edge_name(STEM)  # others may wait for z_0 of the next batch

    def __init__(
        self, share: Share, tree: Tree, rule: Rule, nodes: Iterable[int], stem_trains: bool
    ) -> None:
        super().__init__(share, tree, rule)
        self.nodes: dict[int, TreeNode] = {}
        for n in nodes:
            node = tree.nodes[n]
            right = None if tree.is_spine(node) else self.parts[edge_name(node.right)]
            self.nodes[n] = TreeNode(
                tree,
                node,
                self.parts[edge_name(node.left)],
                right,
                rule,
                stem_trains,
                self.run_block,
                self.go_back,
                self.scale,
            )
            self.losses[n] = self.nodes[n].losses
            self.sizes[n] = self.nodes[n].sizes
        self.boundary: Boundary | None = None
        if share.batches is not None:
            stem, head = (self.parts[edge_name(edge)] for edge in (STEM, tree.head))
            self.boundary = Boundary(tree, stem, head, rule, self.run_block, self.scale)
            for n, losses in self.boundary.losses.items():  # the head's terms of a spine node
                self.losses[n] = losses
                if n in self.nodes:
                    self.nodes[n].losses = losses
        self.stem_alone = False  # whether a step begins with a call of the stem alone
        self.gauge: Gauge | None = None  # while a probe is under way
        self.graphs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # path: (piece, state)
        self.stem_trains = stem_trains
        self.sweeps = Sweeps(self, stem_trains)
        self.head_sums: HeadSums | None = None  # with copies of the head elsewhere
        self.own_verbs: dict[str, Verb] = {
            "open": self._open, "lift": self._lift, "answer": self._answer, "head": self._head,
            "hint": self._hint, "receive": self._receive, "settle": self._settle,
            "predict": self._predict, "hear": self._hear, "backward": self._backward,
            "close": self._close, "ahead": self._ahead, "top": self._top,
            "back": self._back, "meet": self._meet, "turn": self._turn, "reach": self._reach,
            "give": self._give, "take": self._take,
            **self.sweeps.verbs,
        }  # fmt: skip
        self.verbs = dict(self.own_verbs)

    def note_sums(self, order: Sequence[Key]) -> None:
        """Others have copies of the head: gradients of head and stem are added in this order."""
        assert self.boundary is not None and self.boundary.head is not None
        self.head_sums = HeadSums(parameters_of(self.boundary.head, self.boundary.stem), order)
        self.own_verbs |= {
            "share": self._share, "head_noted": self._head_noted, "collect": self._collect,
            "close_noted": self._close_noted,
        }  # fmt: skip
        self.verbs = dict(self.own_verbs)

    def begin(self, call: Call) -> None:
        """The stem alone is what others wait for: nothing else is caught up with before it."""
        if call.phase == "stem":
            self.stem_alone = True
        else:
            self.catch_up()

    def end_piece(self, piece: Piece) -> None:
        """The labels of the piece are not needed any more."""
        if self.boundary:
            self.boundary.labels.pop(piece.index, None)

    # -- verbs --------------------------------------------------------------------------------

    def _open(self, op: Op, held: Held, piece: Piece) -> None:
        assert self.boundary is not None
        copies = self.rule.mc_samples
        x, y = self.places(piece, copies)
        held["z0"] = self.boundary.open(x, y, piece, self.counted(copies))

    def _head(self, op: Op, held: Held, piece: Piece) -> None:
        assert self.boundary is not None
        held[op.writes[0]] = self.boundary.answer(op.n, there(held, op.reads[0]), piece)
        self._count(op, held, piece)

    def _hint(self, op: Op, held: Held, piece: Piece) -> None:
        assert self.boundary is not None
        held[op.writes[0]] = self.boundary.hint(op.n, there(held, op.reads[0]), piece)
        self._count(op, held, piece)

    def _count(self, op: Op, held: Held, piece: Piece) -> None:
        assert self.boundary is not None
        for name in op.writes[1:]:  # correction=vjp asks for the number of labels
            held[name] = torch.tensor(float(self.boundary.labels[piece.index].counted))

    def _share(self, op: Op, held: Held, piece: Piece) -> None:
        assert self.boundary is not None and self.head_sums is not None
        held["y"], counted = self.boundary.labels[piece.index]
        held["k"] = torch.tensor(float(counted), dtype=torch.float64)
        if "hw" in op.writes:
            held["hw"] = as_bytes(self.head_sums.parameters)

    def _head_noted(self, op: Op, held: Held, piece: Piece) -> None:
        assert self.head_sums is not None
        node = self.tree.nodes[op.n]
        _, gradients = self.head_sums.apart(lambda: self._head(op, held, piece))
        if self.rule.ce_weight(self.tree, node) > 0:
            self.head_sums.put(head_key(node, piece.index), gradients)

    def _collect(self, op: Op, held: Held, piece: Piece) -> None:
        assert self.head_sums is not None
        for name in op.reads:
            gradients = from_bytes(there(held, name), self.head_sums.parameters)
            self.head_sums.put(head_key(self.tree.nodes[int(name[1:])], piece.index), gradients)

    def _close_noted(self, op: Op, held: Held, piece: Piece) -> None:
        assert self.head_sums is not None
        _, gradients = self.head_sums.apart(lambda: self._close(op, held, piece))
        self.head_sums.put(close_key(self.tree, piece.index), gradients)

    def _close(self, op: Op, held: Held, piece: Piece) -> None:
        assert self.boundary is not None
        self.boundary.close(held[op.reads[0]], piece)

    def _lift(self, op: Op, held: Held, piece: Piece) -> None:
        held[op.writes[0]] = self.nodes[op.n].lift(there(held, op.reads[0]), piece)

    def _answer(self, op: Op, held: Held, piece: Piece) -> None:
        self.nodes[op.n].answer(there(held, op.reads[0]), piece)

    def _receive(self, op: Op, held: Held, piece: Piece) -> None:
        labels = [float(there(held, name)) for name in op.reads[1:]]
        self.nodes[op.n].receive(there(held, op.reads[0]), piece, *labels)

    def _predict(self, op: Op, held: Held, piece: Piece) -> None:
        z_n, z_r = (there(held, name) for name in op.reads[:2])
        self.nodes[op.n].predict(z_n, z_r, piece)

    def _hear(self, op: Op, held: Held, piece: Piece) -> None:
        self.nodes[op.n].hear(there(held, op.reads[0]), piece)

    def _settle(self, op: Op, held: Held, piece: Piece) -> None:
        held[op.writes[0]] = self.nodes[op.n].settle(piece)

    def _backward(self, op: Op, held: Held, piece: Piece) -> None:
        """Add up what the children handed up, go back through the node, hand up the sums."""
        node = self.nodes[op.n]
        left, right = self.tree.left_child(node.node), self.tree.right_child(node.node)
        from_left = (held.get(f"l{left.n}"), held.get(f"r{left.n}")) if left else (None, None)
        from_right = (held.get(f"l{right.n}"), held.get(f"r{right.n}")) if right else (None, None)
        adj_l, adj_r = node.backward(add(from_left[1], from_right[0]), piece)
        held[f"l{op.n}"] = add(adj_l, from_left[0])
        held[f"r{op.n}"] = add(adj_r, from_right[1])

    def _ahead(self, op: Op, held: Held, piece: Piece) -> None:
        """A block of a path, into z_n; what stands before it may be in another host."""
        edge = edge_of(op)
        z_in = there(held, op.reads[0]).detach().requires_grad_(edge[0] > 0 or self.stem_trains)
        z_out = self.run_part(edge, z_in, piece)
        self.graphs[piece.index, op.n] = (z_in, z_out)
        held[op.writes[0]] = z_out.detach()

    def _top(self, op: Op, held: Held, piece: Piece) -> None:
        assert self.boundary is not None
        labels = self.boundary.labels[piece.index]
        z = there(held, op.reads[0])
        held[op.writes[0]] = self.end_chain(z, labels.y, labels.counted, piece)

    def _back(self, op: Op, held: Held, piece: Piece) -> None:
        graph = self.graphs.pop((piece.index, op.n))
        held[op.writes[0]] = self.back_through(*graph, held[op.reads[0]])

    def _meet(self, op: Op, held: Held, piece: Piece) -> None:
        """The end of a segment against z_r: the right loss of its node, and its slopes at both."""
        found, z_r = (there(held, name) for name in op.reads)
        rule, scale = self.rule, self.scale()
        loss, at_z_r, at_end = factor.divergence_slopes(
            z_r, found, rule.kind, scale * rule.share(z_r, piece)
        )
        self.note(op.n, "right", loss / scale)
        for name, slope in zip(op.writes, (at_end.to(found.dtype), at_z_r), strict=False):
            held[name] = slope if rule.right == 1 else rule.right * slope

    def _reach(self, op: Op, held: Held, piece: Piece) -> None:
        """The end of the chain after sweeps: the loss there."""
        assert self.boundary is not None
        labels = self.boundary.labels[piece.index]
        z = summed(held, op.reads)
        held[op.writes[0]] = self.end_chain(z, labels.y, labels.counted, piece)

    def _give(self, op: Op, held: Held, piece: Piece) -> None:
        held[op.writes[0]] = weights_of(self.parts[edge_name(given_edge(op))])

    def _take(self, op: Op, held: Held, piece: Piece) -> None:
        """A block of the chain becomes its share of an auxiliary one beside it."""
        (l, r), layers = given_edge(op), self.tree.layers
        name = edge_name((op.n - 1, op.n))
        before = sum(layers((i, i + 1)) for i in range(l, op.n - 1))
        take_weights(self.parts[name], there(held, op.reads[0]), layers((l, r)), before)
        self.optimizer.begin_anew(name)

    def _turn(self, op: Op, held: Held, piece: Piece) -> None:
        """The head's answer at the end of a segment, as its loss is weighted."""
        slope, weight = there(held, op.reads[0]), self.rule.ce
        held[op.writes[0]] = slope if weight == 1 else weight * slope

    def go_back(self, out: Tensor, slope: Tensor, leaf: Tensor) -> None:
        """Backward through a block; in one step where two would run the block again twice."""
        if self.rule.recompute:
            at_once(out, slope, leaf)
        else:
            super().go_back(out, slope, leaf)

    # -- the end of a step ----------------------------------------------------------------------

    def apply(self, step: int, square_norms: Iterable[Mapping[str, float]] | None) -> None:
        """Optimizer step; when others wait for z_0 of the next batch, only the stem's at once."""
        self.later += self.optimizer.turns(step, square_norms)
        if self.stem_alone and self.later:
            self.later.pop(0)()
        else:
            self.catch_up()

    def where(self, place: int) -> str:
        """Node and level."""
        if place == self.tree.N:
            return "the head, level 0"
        if place not in self.tree.nodes:
            return ""
        return f"node {place}, level {self.tree.nodes[place].level}"

    def part_at(self, part: str, value: float) -> str:
        """The block and its node."""
        owner = next((n for n, node in self.nodes.items() if part in edges_of(node.node)), None)
        where = "the boundary, level 0" if owner is None else self.where(owner)
        return f"block {part} is {value} at {where}"

    def forget(self) -> None:
        """Drop everything of a step that was under way."""
        super().forget()
        if self.gauge:
            self.gauge.restore()
            self._end_probe()
        self.graphs.clear()
        self.sweeps.graphs.clear()
        for node in self.nodes.values():
            node.saved.clear()
        if self.boundary:
            self.boundary.z_0.clear()
            self.boundary.labels.clear()
        if self.head_sums:
            self.head_sums.clear()

    def probe(self, part: str) -> HostProbe | None:
        """Begin a part of a probe (hosts/probe.py); "end" returns what was measured."""
        self.catch_up()
        if part == "tree":
            self.gauge = Gauge(self)
            self.verbs = {**self.own_verbs, **self.gauge.verbs}
        assert self.gauge is not None
        measured = self.gauge.turn(part)
        if part == "end":
            self._end_probe()
        return measured

    def _end_probe(self) -> None:
        self.verbs, self.gauge = dict(self.own_verbs), None


def edges_of(node: Node) -> tuple[str, str]:
    """The names of a node's two edges."""
    return edge_name(node.left), edge_name(node.right)
