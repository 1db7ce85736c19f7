"""The objectives from the formulas alone; all gradients are autograd's, means over all elements."""

import math
from typing import Any

import torch
from torch import Tensor, nn


def through(p: Tensor, least: float = 1e-6) -> Tensor:
    """Kept inside (least, 1 - least); the gradient passes."""
    return p + (p.clamp(least, 1 - least) - p).detach()


def distance(q: Tensor, p: Tensor, family: str) -> Tensor:
    if family == "gaussian":
        return (q - p).pow(2).mean()
    q, p = through(q), through(p)
    return (q * torch.log(q / p) + (1 - q) * torch.log((1 - q) / (1 - p))).mean()


def tree_loss(net: Any, o: dict[str, Any], x: Tensor, y: Tensor, draw: Any) -> Tensor:
    """`o` holds the settings by name; x and y hold the copies of mc_samples already."""
    N, split, depth = net.tree.N, net.tree.split, math.ceil(math.log2(net.tree.N))
    z, total, level = {0: net.stem(x)}, torch.zeros((), dtype=torch.float64), [(0, N)]
    for s in range(1, depth + 1):
        below = []
        for l, r in (pair for pair in level if pair[1] - pair[0] > 1):
            half = 2 ** (math.ceil(math.log2(r - l)) - 1)
            n = (l + r) // 2 if split == "floor" else r - half
            below += [(l, n), (n, r)]
            ends = [z[i].detach() if o["detach_levels"] and i else z[i] for i in (l, r) if i < N]
            z_l, z_r = ends[0], ends[1] if r < N else None
            mu_fwd = net.block((l, n))(z_l)
            hat = net.block((n, r))(mu_fwd)
            if z_r is None:
                loss = nn.functional.cross_entropy(hat, y)
                weight = o["ce"] * (r - l == 2 or o["objective"] == "node_all_ce")
            else:
                loss = distance(z_r if o["target_gradient"] else z_r.detach(), hat, o["family"])
                weight = o["right"] * (o["objective"] != "final_ce")
            push = torch.zeros_like(mu_fwd)
            if o["beta"] > 0 and o["correction"] == "vjp" and z_r is not None:
                error = (z_r - hat).detach()
                push = torch.autograd.grad(hat, mu_fwd, error, retain_graph=True)[0]
            elif o["beta"] > 0:
                rows = len(y) if o["correction"] == "vjp" else o["mc_samples"]
                push = -rows * torch.autograd.grad(loss, mu_fwd, retain_graph=True)[0]
            push = o["beta"] * o["correction_scale"] * push.detach()
            mu = o["alpha"] * mu_fwd + push
            if o["family"] == "bernoulli":
                mu = through(mu_fwd + push) if o["beta"] > 0 else mu_fwd
            wide = math.sqrt(2 ** (depth - s)) if o["noise_schedule"] == "depth" else 1.0
            z[n] = mu + o["sigma"] * wide * draw(mu, n) if o["sigma"] > 0 else mu
            own = distance(mu if o["target_gradient"] else mu.detach(), mu_fwd, o["family"])
            total = total + weight * loss + o["own"] * (o["objective"] != "final_ce") * own
        level = below
    return total


def time_loss(net: Any, x: Tensor, y: Tensor, K: int = 0, lam: float = 0.0) -> Tensor:
    """N = 2**D symbols; cell f_d for the nodes of depth d, K consistency sweeps of f_0."""
    N, f, total = x.shape[1], net.parts(), torch.zeros((), dtype=x.dtype)
    h = {0: x.new_zeros(len(x), f["readout"].in_features)}
    for d in reversed(range(net.depth)):
        nodes, w = range(2**d, N, 2 ** (d + 1)), 2**d
        new = {n: f[f"f{d}"](x[:, n - w : n].flatten(1), h[n - w].detach()) for n in nodes}
        hats = {n: f[f"f{d}"](x[:, n : n + w].flatten(1), new[n]) for n in nodes}
        for n in nodes:
            if n + w == N:
                total = total + nn.functional.cross_entropy(f["readout"](hats[n]), y)
            else:
                error = (hats[n] - h[n + w].detach()).pow(2).sum(1)
                total = total + error.mean() / (len(nodes) - 1)
        h |= new
    tree = swept = {t: state.detach() for t, state in h.items()}
    for _ in range(K):
        swept = {0: tree[0], **{t: f["f0"](x[:, t - 1], swept[t - 1].detach()) for t in tree if t}}
    apart = [(swept[t] - tree[t]).pow(2).sum(1).mean() for t in tree if t]
    return total + lam * torch.stack(apart).mean() if K else total
