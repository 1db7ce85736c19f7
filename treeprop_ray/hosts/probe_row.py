"""A row of probe.csv: the numbers of all hosts put together.

    cosine, cosine/<block>   between the true gradient g (backpropagation through the deployed
                             chain) and the TreeProp update g_hat, over the chain's parameters
    norm_bp, norm_tree       |g|, |g_hat|
    ratio/<block>            |g_hat| / |g| of the block
    share/<block>            the block's part of |g|^2: how much its cosine counts in the whole
    norm_bias, bias/<block>  |b| with b = g_hat - g; per block |b| / |g|
    descent                  1 where |b| < |g|: sufficient for a positive cosine, not necessary
    kl/<n>, kl               KL(q(z_n | z_l, z_r) || p(z_n | z_{n-1})), its part that depends on
                             the means, and the sum over the states
    kl_constant              what the variances alone add to that sum (Gaussian)
    F_mean                   kl + kl_constant + cross-entropy at the finest spine node: F at the
                             means that training passes on (binary states: no draw takes place)
    F = F_kl + F_ce          the bound, by draws from q; log_ratio/<n>: share of state n in F_kl
    nll, gap                 -log p(y | x) by importance sampling with q, and F - nll; nll is an
                             upper bound that falls as draws rise, so gap is a lower one
    ess                      effective number of draws behind nll, of `draws`
    clean_ce/<n>, tree_ce/<n>, leak/<n>
                             cross-entropy of the spine path through n, of the tree at spine node n
                             on the same batch, and clean minus tree

Everything but norms and cosines is in nats per label. Without noise (Gaussian, sigma = 0) q is a
point: kl is then half the squared error and the columns of the bound are empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from treeprop_ray.core.network import STEM, edge_name
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.scoring import Score
from treeprop_ray.core.tree import Tree
from treeprop_ray.hosts.probe import HostProbe
from treeprop_ray.schedule.probe import has_density

# of the whole network, and of a block, a state, a spine node: in a few words, for a reader
WHOLE = {
    "cosine": "of the update and the true gradient: 1 the same way, above 0 downhill",
    "norm_bp": "length of the true gradient (backpropagation through the deployed chain)",
    "norm_tree": "length of the update",
    "norm_bias": "length of their difference, the bias",
    "descent": "1: the bias is shorter than the gradient, so the cosine must be positive",
    "kl": "of the states' factors to the chain's transitions, means only, nats per label",
    "kl_constant": "what the variances add to kl",
    "F_mean": "kl + kl_constant + cross-entropy: the bound at the means that training passes on",
    "F": "the variational bound, by draws; an upper bound of nll",
    "F_kl": "its part between the states",
    "F_ce": "its part at the labels",
    "nll": "-log p(y | x) of the chain, by importance sampling",
    "gap": "F - nll: what the bound gives away",
    "ess": "effective number of draws behind nll",
}
PARTS = {
    "cosine": "of the block's update and true gradient",
    "bias": "|update - gradient| / |gradient|",
    "ratio": "|update| / |gradient|",
    "share": "of the squared gradient that is this block's",
    "kl": "of the state, nats per label",
    "log_ratio": "share of the state in F_kl",
    "clean_ce": "cross-entropy of the path through this node, without labels in the states",
    "tree_ce": "of the tree at this node, on the same batch",
    "leak": "clean_ce - tree_ce: what the labels in the states give away",
}


def columns(tree: Tree) -> list[str]:
    """All columns of probe.csv."""
    blocks = [edge_name(e) for e in (STEM, *tree.path_edges(tree.chain))]
    spine = [node.n for node in tree.spine]
    return [
        "step", "epoch", *WHOLE,
        *(f"{kind}/{b}" for kind in ("cosine", "bias", "ratio", "share") for b in blocks),
        *(f"{kind}/{n}" for kind in ("kl", "log_ratio") for n in tree.nodes),
        *(f"{kind}/{n}" for kind in ("clean_ce", "tree_ce", "leak") for n in spine),
    ]  # fmt: skip


def combine(
    hosts: Sequence[HostProbe],
    tree: Tree,
    rule: Rule,
    clean: Mapping[str, Score],
    batches: int,
    draws: int,
    places: int,
) -> dict[str, float]:
    """The row of a probe of `batches` held-out batches with `places` samples each."""
    row = gradients({k: v for host in hosts for k, v in host.blocks.items()}, batches)
    labels = sum(host.labels for host in hosts)
    kl = dict.fromkeys(tree.nodes, 0.0)
    for host in hosts:
        for n, value in host.kl.items():
            kl[n] += value / labels
    row |= {f"kl/{n}": value for n, value in kl.items()}
    row["kl"] = sum(kl.values())
    if rule.family == "bernoulli" or rule.sigma > 0:
        row["kl_constant"] = sum(host.kl_constant for host in hosts) / labels
    for name, score in clean.items():
        tree_ce = sum(host.tree_ce.get(int(name), 0.0) for host in hosts) / batches
        row |= {f"clean_ce/{name}": score.loss, f"tree_ce/{name}": tree_ce}
        row[f"leak/{name}"] = score.loss - tree_ce
    row["F_mean"] = row["kl"] + row.get("kl_constant", 0.0) + row[f"tree_ce/{tree.spine[-1].n}"]
    if draws and has_density(rule):
        row |= bound(hosts, tree, draws, labels)
    return row


def gradients(
    blocks: Mapping[str, tuple[float, float, float, float]], batches: int
) -> dict[str, float]:
    """Cosines, norms and bias; gradients were summed over the batches."""
    row: dict[str, float] = {}
    for name, (dot, g, g_hat, bias) in sorted(blocks.items()):
        row[f"cosine/{name}"] = cosine(dot, g, g_hat)
        row[f"bias/{name}"] = math.sqrt(bias / g) if g else math.nan
        row[f"ratio/{name}"] = math.sqrt(g_hat / g) if g else math.nan
    whole = sum(g for _, g, _, _ in blocks.values())
    row |= {f"share/{name}": g / whole for name, (_, g, _, _) in blocks.items() if whole}
    dot, g, g_hat, bias = (sum(v[i] for _, v in sorted(blocks.items())) for i in range(4))
    row["cosine"] = cosine(dot, g, g_hat)
    for name, square in (("norm_bp", g), ("norm_tree", g_hat), ("norm_bias", bias)):
        row[name] = math.sqrt(square) / batches
    row["descent"] = float(bias < g)
    return row


def cosine(dot: float, g: float, g_hat: float) -> float:
    """From a dot product and two squared norms; not a number where one vector is zero."""
    return dot / math.sqrt(g * g_hat) if g > 0 and g_hat > 0 else math.nan


def bound(hosts: Sequence[HostProbe], tree: Tree, draws: int, labels: float) -> dict[str, float]:
    """F and its parts, and -log p(y | x) by importance sampling: w = p(z, y | x) / q(z)."""
    row = {}
    for n in tree.nodes:
        total = sum(host.log_ratio.get(n, 0.0) for host in hosts)
        row[f"log_ratio/{n}"] = total / (labels * draws)
    row["F_kl"] = sum(row.values())
    row["F_ce"] = sum(host.final_ce for host in hosts) / (labels * draws)
    row["F"] = row["F_kl"] + row["F_ce"]
    groups: dict[tuple[int, int], list[torch.Tensor]] = {}  # (batch, piece) -> draws
    keys = {key for host in hosts for key in host.draws}
    for held, piece in sorted(keys, key=lambda key: (key[0].word, key[1])):
        shares = [host.draws[held, piece] for host in hosts if (held, piece) in host.draws]
        draw = torch.tensor(shares, dtype=torch.float64).sum(0)
        groups.setdefault((held.batch, piece), []).append(draw)
    nll = ess = count = 0.0
    for group in groups.values():
        log_w = -torch.stack(group)  # (draws, places)
        nll -= float((torch.logsumexp(log_w, 0) - math.log(len(group))).sum())
        share = torch.softmax(log_w, 0)
        ess += float((1 / (share**2).sum(0)).sum())
        count += log_w.shape[1]
    row |= {"nll": nll / labels, "ess": ess / count}
    row["gap"] = row["F"] - row["nll"]
    return row
