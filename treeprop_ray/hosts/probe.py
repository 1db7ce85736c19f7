"""What a host measures for the probe. One process, no Ray; only numbers leave the host.

A probe is a few held-out batches through the host's own nodes and blocks, in parts:

    tree    the waves of a training step without the optimizer: the update g_hat
    chain   backpropagation through the deployed chain: the true gradient g
    states  the forward waves once more: KL of every state's factor to the chain's own transition,
            cross-entropy at every spine node
    draws   the forward waves with states drawn from q: log q(z) - log p(z, y | x), for the bound F

Blocks are in evaluation mode (no dropout); the noise of the states stays on. Afterwards the host is
as before: no gradients, the same batch at hand, the same state of the random generators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from treeprop_ray.core import devices, factor, loss
from treeprop_ray.core.network import STEM, edge_name
from treeprop_ray.core.rng import derive, normal_rows
from treeprop_ray.core.rule import HeldOut, Piece
from treeprop_ray.hosts.base import Held, Verb, there
from treeprop_ray.schedule.ops import Op

if TYPE_CHECKING:
    from treeprop_ray.hosts.tree import TreeHost


@dataclass
class HostProbe:
    """The numbers of one host, summed over places and batches."""

    blocks: dict[str, tuple[float, float, float, float]] = field(default_factory=dict)
    # chain block -> g . g_hat, |g|^2, |g_hat|^2, |g_hat - g|^2
    labels: float = 0.0  # that count, in the batches of the chain's pass
    kl: dict[int, float] = field(default_factory=dict)
    kl_constant: float = 0.0
    tree_ce: dict[int, float] = field(default_factory=dict)  # spine node -> sum of batch means
    log_ratio: dict[int, float] = field(default_factory=dict)  # state -> sum of log q - log p
    final_ce: float = 0.0
    draws: dict[tuple[HeldOut, int], list[float]] = field(default_factory=dict)
    # (batch, piece) -> this host's share of log q(z) - log p(z, y | x), place by place


class Probed(Protocol):
    """A host that the probe can ask."""

    def probe(self, part: str) -> HostProbe | None:
        """Begin a part of a probe; "end" returns what was measured."""


def turn(host: Probed, part: str) -> HostProbe | None:
    """What the engine asks every host: that host's own way to begin a part."""
    return host.probe(part)


class Gauge:
    """The probe inside one host."""

    def __init__(self, host: TreeHost) -> None:
        self.host, self.tree, self.rule = host, host.tree, host.rule
        self.part = "tree"
        self.found = HostProbe()
        self.update: dict[str, dict[str, Tensor]] = {}  # g_hat of the chain blocks that live here
        self.graphs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (piece, block)
        self.verbs: dict[str, Verb] = {
            "ahead": self._do_ahead, "top": self._do_top, "back": self._do_back,
            "weigh": self._do_weigh, "readout": self._do_readout,
        }  # fmt: skip
        self._before = (host.current, host.data_seconds)
        self._scale = (host.half, host.optimizer.scale.value)
        if host.optimizer.rule.scaled:  # measured in float32, without a scale
            host.half, host.optimizer.scale.value = None, 1.0
        self._rng = torch.get_rng_state()
        gpu = devices.gpus.is_gpu(host.device)
        self._gpu_rng = devices.gpus.rng(host.device) if gpu else None
        for module in host.parts.values():
            module.eval()

    def turn(self, part: str) -> HostProbe | None:
        """Close the part that was under way and begin the next; at "end" returns the numbers."""
        if self.part == "tree" and part != "tree":
            self.update = {
                name: {k: p.grad for k, p in named.items() if p.grad is not None}
                for name, named in self._chain_parameters()
            }
        elif self.part == "chain":
            self._compare()
        elif self.part == "states" and self.host.boundary:
            for n, losses in self.host.boundary.losses.items():
                if "ce" in losses.terms:  # copies of the head are not asked here
                    self.found.tree_ce[n] = float(losses.terms["ce"])
        self._clear()
        self.part = part
        if part != "end":
            return None
        self.restore()
        return self.found

    def restore(self) -> None:
        """Leave the host as it was."""
        for module in self.host.parts.values():
            module.train()
        self.host.current, self.host.data_seconds = self._before
        self.host.half, self.host.optimizer.scale.value = self._scale
        torch.set_rng_state(self._rng)
        if self._gpu_rng is not None:
            devices.gpus.set_rng(self._gpu_rng, self.host.device)

    def _clear(self) -> None:
        for module in self.host.parts.values():
            module.zero_grad(set_to_none=True)
        for losses in (*self.host.losses.values(), *self.host.sizes.values()):
            losses.take()
        if self.host.boundary:
            self.host.boundary.z_0.clear()

    def _chain_parameters(self) -> Iterator[tuple[str, dict[str, nn.Parameter]]]:
        chain = {edge_name(e) for e in (STEM, *self.tree.path_edges(self.tree.chain))}
        for name, named in self.host.optimizer.params.items():
            if name in chain and named:
                yield name, named

    def _compare(self) -> None:
        """g is in the parameters, g_hat was set aside: four numbers for each block."""
        for name, named in self._chain_parameters():
            sums = torch.zeros(4, dtype=torch.float64)
            for k, p in named.items():
                zero = torch.zeros((), device=p.device)
                g, g_hat = p.grad, self.update[name].get(k)
                a = (zero if g is None else g).double()
                b = (zero if g_hat is None else g_hat).double()
                products = (a * b, a**2, b**2, (b - a) ** 2)
                sums += torch.stack([product.sum() for product in products]).cpu()
            dot, of_g, of_hat, of_bias = sums.tolist()
            self.found.blocks[name] = (dot, of_g, of_hat, of_bias)
        self.update = {}

    # -- ops ------------------------------------------------------------------------------------

    def _do_ahead(self, op: Op, held: Held, piece: Piece) -> None:
        held[op.writes[0]] = self._ahead(op.n, there(held, op.reads[0]), piece)

    def _do_top(self, op: Op, held: Held, piece: Piece) -> None:
        held[op.writes[0]] = self._top(there(held, op.reads[0]), piece)

    def _do_back(self, op: Op, held: Held, piece: Piece) -> None:
        z_in, z_out = self.graphs.pop((piece.index, op.n))
        z_out.backward(there(held, op.reads[0]))
        held[op.writes[0]] = z_in.grad

    def _do_weigh(self, op: Op, held: Held, piece: Piece) -> None:
        z_r, m_r = (held[name] for name in op.reads[1:]) if op.reads[1:] else (None, None)
        settled = there(held, op.reads[0])
        held[op.writes[0]], held[op.writes[1]] = self._weigh(op.n, settled, z_r, m_r, piece)

    def _do_readout(self, op: Op, held: Held, piece: Piece) -> None:
        self._readout(there(held, op.reads[0]), piece)

    def _ahead(self, n: int, z: Tensor, piece: Piece) -> Tensor:
        z_in = z.detach().requires_grad_(z.is_floating_point())
        z_out = self.host.run_block(
            self.host.parts[edge_name((n - 1, n))], z_in, self._seed(n, piece)
        )
        self.graphs[piece.index, n] = (z_in, z_out)
        return z_out.detach()

    def _top(self, z: Tensor, piece: Piece) -> Tensor:
        """Loss and backward of the deployed head."""
        boundary = self.host.boundary
        assert boundary is not None and boundary.head is not None
        leaf = z.detach().requires_grad_()
        loss_of = boundary.loss_of(boundary.head, piece)
        self.found.labels += loss.counted(self.rule.loss, boundary.labels[piece.index].y)
        self.host.run_block(loss_of, leaf, self._seed(self.tree.N, piece)).backward()
        assert leaf.grad is not None
        return leaf.grad

    @torch.no_grad()
    def _weigh(
        self, n: int, settled: Tensor, z_r: Tensor | None, m_r: Tensor | None, piece: Piece
    ) -> tuple[Tensor, Tensor]:
        """The state of node n and the mean of its factor; compares both with the chain's blocks.

        Chain block n, into z_n, is node n's left block or the right block of node n - 1, so each
        transition p(z_n | z_{n-1}) is at hand in exactly one node, together with both states.
        """
        node, rule = self.tree.nodes[n], self.rule
        saved = self.host.nodes[n].saved.pop(piece.index)
        mu_fwd = saved.mu_fwd.detach()
        mu = factor.posterior_mean(mu_fwd, saved.correction, rule.alpha, rule.beta, rule.kind)
        drawn = self.part == "draws"
        z_n = settled
        if drawn and rule.family == "bernoulli":
            eps = normal_rows(mu, piece.places, rule.seed, "noise", piece.step, n)
            z_n = (torch.special.ndtr(eps) < mu).to(mu.dtype)
        if drawn:
            self._add(n, self._log_q(n, z_n, mu), piece)
        if node.l == n - 1:
            self._against_chain(n, z_n, mu, mu_fwd, piece)
        if node.r == n + 1 and z_r is not None and m_r is not None:
            right = self.host.nodes[n].right
            assert right is not None
            z_r_hat = self.host.run_block(right, z_n, self._seed(n + 1, piece))
            self._against_chain(n + 1, z_r, m_r, z_r_hat, piece)
        return z_n, mu

    def _against_chain(self, n: int, z_n: Tensor, mu: Tensor, rho: Tensor, piece: Piece) -> None:
        """State n against the chain's transition, whose mean is rho."""
        if self.part == "draws":
            self._add(n, -self._log_p(z_n, rho), piece)
            return
        mu, rho = _wide(mu), _wide(rho)
        if self.rule.family == "bernoulli":
            mu, rho = (t.clamp(factor.EPS, 1 - factor.EPS) for t in (mu, rho))
            value, constant = factor.kl_bernoulli(mu, rho).sum(), 0.0
        else:
            sigma_p = self.rule.transition_sigma
            value, constant = ((mu - rho) ** 2).sum() / (2 * sigma_p**2), 0.0
            if self.rule.sigma > 0:
                zero = torch.zeros(())
                constant = mu.numel() * float(
                    factor.kl_gaussian(zero, zero, self._sigma(n), sigma_p)
                )
        self.found.kl[n] = self.found.kl.get(n, 0.0) + float(value)
        self.found.kl_constant += constant

    @torch.no_grad()
    def _readout(self, z: Tensor, piece: Piece) -> None:
        """-log p(y | z_{N-1}) of every sample, at the state itself."""
        if self.part != "draws":
            return
        boundary = self.host.boundary
        assert boundary is not None and boundary.head is not None
        head, labels = boundary.head, boundary.labels[piece.index].y

        def rows(state: Tensor) -> Tensor:
            if loss.plain_head(self.rule.loss, head, "loss_sum"):
                pairs = zip(state.split(1), labels.split(1), strict=True)
                return torch.stack([head.loss_sum(z_i, y_i) for z_i, y_i in pairs])  # type: ignore[operator]
            return loss.per_sample(self.rule.loss, head(state), labels)

        ce = _wide(self.host.run_block(rows, z, self._seed(self.tree.N, piece)))
        self.found.final_ce += float(ce.sum())
        self._share(ce, piece)

    # -- densities ------------------------------------------------------------------------------

    def _sigma(self, n: int) -> float:
        rule, level = self.rule, self.tree.nodes[n].level
        return factor.sigma_at(rule.sigma, level, self.tree.depth, rule.noise_schedule)

    def _log_q(self, n: int, z: Tensor, mu: Tensor) -> Tensor:
        if self.rule.family == "bernoulli":
            return _log_bernoulli(z, mu)
        return _rows(factor.log_normal(_wide(z), _wide(mu), self._sigma(n)))

    def _log_p(self, z: Tensor, rho: Tensor) -> Tensor:
        if self.rule.family == "bernoulli":
            return _log_bernoulli(z, rho)
        return _rows(factor.log_normal(_wide(z), _wide(rho), self.rule.transition_sigma))

    def _add(self, n: int, values: Tensor, piece: Piece) -> None:
        self.found.log_ratio[n] = self.found.log_ratio.get(n, 0.0) + float(values.sum())
        self._share(values, piece)

    def _share(self, values: Tensor, piece: Piece) -> None:
        assert piece.held is not None
        key = (piece.held, piece.index)
        before = self.found.draws.get(key, [0.0] * len(values))
        self.found.draws[key] = [a + b for a, b in zip(before, values.tolist(), strict=True)]

    def _seed(self, n: int, piece: Piece) -> int:
        return derive(self.rule.seed, "chain", piece.step, n - 1, n, piece.index)


def _wide(x: Tensor) -> Tensor:
    return x.detach().double()


def _rows(x: Tensor) -> Tensor:
    return x.flatten(1).sum(1)


def _log_bernoulli(z: Tensor, probability: Tensor) -> Tensor:
    p = _wide(probability).clamp(factor.EPS, 1 - factor.EPS)
    z = _wide(z)
    return _rows(z * p.log() + (1 - z) * (1 - p).log())
