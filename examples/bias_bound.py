"""Train a linear Gaussian chain by TreeProp and watch the bias of its update, exactly.

    python examples/bias_bound.py                  # writes results/theory_bias.{md,csv,png}
    python examples/bias_bound.py --steps 200 --out /tmp/theory

A chain of N = 4 steps in the plane and the tree's factors are trained together by Adam on the
exact bound F, the chain's gradient taken as in the method: the feedback in q is held constant. At
every 50th step the true gradient, the update, the two parts of its bias and the bounds on them are
computed in closed form (treeprop_ray/theory_bias.py): nothing is sampled.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from treeprop_ray.core.tree import Tree
from treeprop_ray.theory import gaussian as theory
from treeprop_ray.theory.bias import TreePosterior, bias_of
from treeprop_ray.theory.gaussian import Chain

N, WIDTH, PAIRS = 4, 2, 6


def problem(seed: int) -> tuple[Chain, list[tuple[Tensor, Tensor]]]:
    """A random chain, and pairs (x, y) drawn from another one."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    def chain() -> Chain:
        weights = tuple(normal(WIDTH, WIDTH) / 1.5 for _ in range(N))
        return Chain(weights, tuple(normal(WIDTH) / 2 for _ in range(N)), (0.5,) * N)

    teacher, student = chain(), chain()
    across = theory.transition(teacher, 0, N)
    pairs = []
    for _ in range(PAIRS):
        x = normal(WIDTH)
        y = across.given(x)
        pairs.append((x, y.mean + torch.linalg.cholesky(y.cov) @ normal(WIDTH)))
    for t in (*student.weights, *student.biases):
        t.requires_grad_()
    return student, pairs


def train(steps: int, every: int, seed: int = 0) -> list[dict[str, float]]:
    """One row every so many steps: means over the pairs of norms and bounds."""
    chain, pairs = problem(seed)
    tree = Tree(N)
    q = TreePosterior(chain, tree, seed)
    parameters = [*chain.weights, *chain.biases, *q.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    rows = []
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            found = [bias_of(chain, tree, q.factors(chain), x, y) for x, y in pairs]
            holds = all(
                b.score <= b.score_bound + 1e-9 and b.path <= b.path_bound + 1e-9 for b in found
            )
            row = {"step": float(step)}
            for key in asdict(found[0]):
                row[key] = sum(asdict(b)[key] for b in found) / len(found)
            row["bound"] = sum(b.bound for b in found) / len(found)
            row["bounds_hold"] = float(holds)
            rows.append(row)
        optimizer.zero_grad()
        factors = q.factors(chain)
        loss = torch.stack([theory.bound(chain, tree, factors, x, y) for x, y in pairs]).mean()
        loss.backward()
        optimizer.step()
        schedule.step()
    return rows


def draw(rows: list[dict[str, float]], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = [row["step"] for row in rows]
    fig, axes = plt.subplots(1, 3, figsize=(13, 3.8))
    for ax, name in zip(axes[:2], ("score", "path"), strict=True):
        ax.plot(steps, [row[f"{name}_bound"] for row in rows], label="bound", color="tab:red")
        ax.plot(steps, [row[name] for row in rows], label=f"|b_{name}|, exact", color="tab:blue")
        ax.set(yscale="log", xlabel="step", title=f"{name} term of the bias")
    for key, label in (("g", "|g|"), ("bias", "|b|"), ("kl", "KL(q || p)")):
        axes[2].plot(steps, [row[key] for row in rows], label=label)
    axes[2].set(yscale="log", xlabel="step", title="bias goes to 0 with the divergence")
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    fig.tight_layout()
    fig.savefig(target, dpi=110)
    plt.close(fig)


def main() -> None:
    from treeprop_ray.reporting.tables import write_table

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--out", default="results")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = train(chosen.steps, chosen.every)
    shown = [
        {
            "step": int(row["step"]),
            **{
                key: f"{row[key]:.3g}"
                for key in ("kl", "g", "g_hat", "cosine", "bias", "bound", "score", "score_bound",
                            "path", "path_bound")
            },
            "bounds hold": "yes" if row["bounds_hold"] else "NO",
        }
        for row in rows
    ]  # fmt: skip
    Path(chosen.out).mkdir(parents=True, exist_ok=True)
    notes = [
        f"Linear Gaussian chain, N = {N}, width {WIDTH}, {PAIRS} pairs; all columns are exact, "
        "means over the pairs. `bounds hold`: for every pair the score term and the path term are "
        "below their bounds. Figure: [theory_bias.png](theory_bias.png).",
    ]
    title = "Bias of the TreeProp update and its bounds along a training run"
    print(write_table(chosen.out, "theory_bias", title, shown, notes))
    draw(rows, Path(chosen.out) / "theory_bias.png")


if __name__ == "__main__":
    main()
