"""Does a test notice? Changes one line of the core at a time and runs the tests that should fail.

    make mutants                          # all of them; prints the survivors, exit code 1 if any
    python tests/mutants.py optim rng     # those whose file or change contains one of the words

A mutant is applied to a copy of the package, which the tests then import: first those of the file
itself, and if they pass, all that could notice. docs/mutants.md has the last result.
"""

# ruff: noqa: E501 (lines of the core, as they stand)
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
# what runs first | what runs if that has passed
WIDE = "tests/core tests/theory/test_theory.py tests/methods/test_cff.py tests/data/test_data.py"
CORE = f"tests/core/test_node.py tests/core/test_backward.py | {WIDE}"
FACTOR = f"tests/core/test_backward.py tests/theory/test_theory.py | {WIDE}"
OPTIM = f"tests/core/test_optim.py | {WIDE} tests/run/test_train.py"
RNG = f"tests/core/test_rng.py | {WIDE}"
INPUT_FIRST = f"tests/core/test_input_first.py | {WIDE}"
SCHEDULE = "tests/core/test_tree.py tests/schedule | tests/core"
TIME = "tests/methods/test_through_time.py | tests/methods/test_lookahead.py"
PROBE = "tests/hosts"
MUTANTS: list[tuple[str, str, str, str]] = [  # (file, line, change, tests)
    ("core/tree.py", "return (l + r) // 2", "return (l + r + 1) // 2", SCHEDULE),
    ("core/tree.py", "return r - 2 ** ((r - l - 1).bit_length() - 1)",
     "return r - 2 ** max(0, (r - l - 1).bit_length() - 2)", SCHEDULE),
    ("core/tree.py", "return node.r == self.N", "return node.n == self.N - 1", SCHEDULE),
    ("core/tree.py", "return self.r - self.l == 2", "return self.r - self.l <= 3", SCHEDULE),
    ("core/rule.py", "return 1 / (rows[0].numel() * self.total)", "return 1 / self.total", CORE),
    ("core/rule.py", "return not self.detach_levels and node.l not in self.still",
     "return node.l not in self.still", CORE),
    ("core/rule.py", "return node.r < tree.N and self.target_gradient and not self.detach_levels",
     "return node.r < tree.N and not self.detach_levels", CORE),
    ("core/rule.py", "return 0.0, 0.0", "return self.own, self.right", CORE),
    ("core/rule.py", "return -1 - self.batch - MOST_HELD_OUT * self.draw", "return -1 - self.batch",
     PROBE),
    ("core/rule.py", "bounds = [total * i // pieces for i in range(pieces + 1)]",
     "bounds = [total * i // pieces for i in range(pieces)] + [total - 1]", CORE),
    ("core/factor.py", "mu = torch.add(mu_fwd, correction, alpha=beta)", "mu = mu_fwd + correction",
     FACTOR),
    ("core/factor.py", "mu = mu_fwd if alpha == 1 else alpha * mu_fwd", "mu = mu_fwd", FACTOR),
    ("core/factor.py", "return sigma * math.sqrt(2 ** (depth - level)) if schedule",
     "return sigma * math.sqrt(2 ** (depth - level + 1)) if schedule", FACTOR),
    ("core/factor.py", "at_q = difference * (2 * scale)", "at_q = difference * scale", FACTOR),
    ("core/factor.py", "at_q = (mu_q / mu_p).log_().sub_(of_zero)", "at_q = (mu_q / mu_p).log_()",
     FACTOR),
    ("core/objective.py", "return -rule.correction_scale * rule.mc_samples * gradient",
     "return -rule.correction_scale * gradient", CORE),
    ("core/objective.py", "return correction_by_product(-counted * gradient, rule, mu_fwd)",
     "return correction_by_product(-gradient, rule, mu_fwd)", CORE),
    ("core/node.py", 'return derive(self.rule.seed, "block", piece.step, self.node.n, side, '
     "piece.index)", 'return derive(self.rule.seed, "block", self.node.n, side, piece.index)', CORE),
    ("core/node.py", 'return derive(self.rule.seed, "block", piece.step, self.node.n, side, '
     "piece.index)", 'return derive(self.rule.seed, "block", piece.step, self.node.n, piece.index)',
     CORE),
    ("core/node.py", "total = adj_n if self.gain == 1 else self.gain * adj_n", "total = adj_n", CORE),
    ("core/node.py", "total = add(total, saved.own_slope)", "total = total", CORE),
    ("core/node.py", "slope = at_fwd.add_(at_mu, alpha=self.gain) if rule.target_gradient else at_fwd",
     "slope = at_fwd", CORE),
    ("core/node.py", "return (mu + self.sigma * eps).to(mu.dtype)",
     "return (mu + 2 * self.sigma * eps).to(mu.dtype)", CORE),
    ("core/node.py", "return leaf.grad if weight == 1 else leaf.grad / weight", "return leaf.grad",
     CORE),
    ("core/node.py", "self.pieces.setdefault(name, []).append(value.detach())",
     "self.pieces[name] = [value.detach()]", f"tests/hosts/test_base.py | {WIDE} | {TIME}"),
    ("core/optim_rule.py", "return self.lr * (step + 1) / rising", "return self.lr * step / rising", OPTIM),
    ("core/optim_rule.py", "return self.lr * 0.5 * (1 + math.cos(math.pi * done))",
     "return self.lr * 0.5 * (1 + math.cos(0.9 * math.pi * done))", OPTIM),
    ("core/optim_rule.py", "done = (step - rising) / max(1, self.total_steps - rising)",
     "done = step / max(1, self.total_steps)", OPTIM),
    ("core/optim.py", "return math.sqrt(sum(merged[k] for k in sorted(merged)))",
     "return sum(merged[k] for k in sorted(merged))", OPTIM),
    ("core/optim.py", "self._multiply(parts, self.rule.clip / norm)",
     "self._multiply(parts, self.rule.clip)", OPTIM),
    ("core/rng.py", "gen.manual_seed(base + place)", "gen.manual_seed(base)", RNG),
    ("core/rng.py", '"/".join(map(str, words))', '"".join(map(str, words))', RNG),
    ("core/gradients.py", "parameter.grad += gradient", "parameter.grad = gradient", INPUT_FIRST),
    ("core/time_tree.py", "count = 1 if self.rule.summed else nodes - 1",
     "count = 1 if self.rule.summed else nodes", TIME),
    ("core/time_tree.py", "near *= self.rule.lambda_cons", "near *= 1.0", TIME),
    ("core/time_tree.py", "before[::N] = 0  # h_0 of every sample", "pass", TIME),
    ("core/time_tree.py", "return flat.dot(flat) * share, errors.mul_(2 * share)",
     "return flat.dot(flat) * share, errors.mul_(share)", TIME),
    ("core/jumps.py", "return 2 ** max(1, min(D - 1, (4 * D).bit_length() - 1))",
     "return 2 ** max(1, min(D - 1, (2 * D).bit_length() - 1))", "tests/methods/test_lookahead.py"),
    ("hosts/tree.py", 'held[f"l{op.n}"] = add(adj_l, from_left[0])',
     'held[f"l{op.n}"] = add(adj_l, from_left[1])', CORE),
    ("hosts/tree.py", "adj_l, adj_r = node.backward(add(from_left[1], from_right[0]), piece)",
     "adj_l, adj_r = node.backward(from_left[1], piece)", CORE),
    ("schedule/tree.py", "if self.rule.beta == 0 and later:", "if later:", SCHEDULE),
    ("schedule/ops.py", "keyed.sort(key=lambda entry: entry[:2])", "keyed.reverse()", SCHEDULE),
]  # fmt: skip


def survives(folder: Path, file: str, line: str, change: str, tests: str) -> bool:
    """Whether the tests pass with the change."""
    path = folder / "treeprop_ray" / file
    text = path.read_text()
    if text.count(line) != 1:
        raise SystemExit(f"{file}: {line!r} stands there {text.count(line)} times, must be once")
    path.write_text(text.replace(line, change))
    try:
        return all(passes(folder, part) for part in tests.split("|"))
    finally:
        path.write_text(text)


def passes(folder: Path, tests: str) -> bool:
    """Whether tests pass in a copy of the project."""
    words = ["-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *tests.split()]
    words.append("--hypothesis-profile=first_failure")
    env = {**os.environ, "PYTHONPATH": str(folder), "HYPOTHESIS_STORAGE_DIRECTORY": str(folder)}
    run = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True)
    if run.returncode >= 4:  # no such test, or none at all
        raise SystemExit(f"{tests}: {run.stdout.decode()[-300:]}")
    return run.returncode == 0


def main(words: list[str]) -> int:
    """Run the mutants; the number of survivors decides the exit code."""
    chosen = [m for m in MUTANTS if not words or any(w in f"{m[0]} {m[2]}" for w in words)]
    alive = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in ("treeprop_ray", "tests", "tune_spaces"):
            shutil.copytree(ROOT / name, folder / name)
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, folder)
        for file, line, change, tests in chosen:
            began = time.monotonic()
            lives = survives(folder, file, line, change, tests)
            alive += [f"{file}: {change}"] if lives else []
            state = "SURVIVES" if lives else "killed"
            print(
                f"{state:<9} {time.monotonic() - began:5.0f} s  {file}: {change[:80]}", flush=True
            )
    print(f"{len(chosen)} mutants, {len(alive)} survive")
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
