"""The objectives of a tree and of a time tree from the formulas alone; gradients are autograd's."""

import math
from typing import Any

import torch
from reference_terms import distance, push_of, reduced, through
from torch import Tensor, nn


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
            push, fixed = torch.zeros_like(mu_fwd), None if z_r is None else z_r.detach()
            if o["beta"] > 0:
                push = o["beta"] * push_of(o, mu_fwd, net.block((n, r))(mu_fwd), fixed, y).detach()
            mu = o["alpha"] * mu_fwd + push
            if o["family"] == "bernoulli" and o["bernoulli"] == "kl":
                mu = through(mu_fwd + push) if o["beta"] > 0 else mu_fwd
            elif o["family"] == "bernoulli" and o["beta"] > 0:
                mu = through(mu)
            wide = math.sqrt(2 ** (depth - s)) if o["noise_schedule"] == "depth" else 1.0
            z[n] = mu + o["sigma"] * wide * draw(mu, n) if o["sigma"] > 0 else mu
            at = {"mean": mu_fwd, "sample": z[n]}
            terms = o["objective"] != "final_ce"
            if z_r is None:
                loss = nn.functional.cross_entropy(net.block((n, r))(at[o["ce_at"]]), y)
                weight = o["ce"] * (r - l == 2 or o["objective"] == "node_all_ce")
            else:
                target = z_r if o["target_gradient"] else z_r.detach()
                loss = reduced(distance(target, net.block((n, r))(at[o["input"]]), o), o)
                weight = o["right"] * terms * (o["levels"] == "all" or r - n == 1)
            target = mu if o["target_gradient"] else mu.detach()
            own = o["own"] * terms * (o["levels"] == "all" or n - l == 1)
            total = total + weight * loss + own * reduced(distance(target, mu_fwd, o), o)
        level = below
    return total


def time_loss(
    net: Any, x: Tensor, y: Tensor, K: int = 0, lam: float = 0.0, loss: str = "mean",
    gradient: str = "both",
) -> Tensor:  # fmt: skip
    """N = 2**D symbols; cell f_d for the nodes of depth d, K consistency sweeps of f_0."""
    N, f, total = x.shape[1], net.parts(), torch.zeros((), dtype=x.dtype)
    h = {0: x.new_zeros(len(x), f["readout"].in_features)}
    for d in reversed(range(net.depth)):
        nodes, w = range(2**d, N, 2 ** (d + 1)), 2**d
        new = {n: f[f"f{d}"](x[:, n - w : n].flatten(1), h[n - w].detach()) for n in nodes}
        read = {n: state.detach() if gradient == "one" else state for n, state in new.items()}
        hats = {n: f[f"f{d}"](x[:, n : n + w].flatten(1), read[n]) for n in nodes}
        for n in nodes:
            if n + w == N:
                total = total + nn.functional.cross_entropy(f["readout"](hats[n]), y)
            else:
                error = (hats[n] - h[n + w].detach()).pow(2).sum(1)
                total = total + error.mean() / (len(nodes) - 1 if loss == "mean" else 1)
        h |= new
    tree = swept = {t: state.detach() for t, state in h.items()}
    for _ in range(K):
        swept = {0: tree[0], **{t: f["f0"](x[:, t - 1], swept[t - 1].detach()) for t in tree if t}}
    apart = torch.stack([(swept[t] - tree[t]).pow(2).sum(1).mean() for t in tree if t])
    return total + lam * (apart.mean() if loss == "mean" else apart.sum()) if K else total
