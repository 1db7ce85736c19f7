"""One object per training method, and the registry."""

from treeprop_ray.methods import bp, bptt, cff, tree, tree_time  # each registers itself
from treeprop_ray.methods.base import Job, Method, checked, job_of, job_over, of, register

__all__ = [
    "Job", "Method", "bp", "bptt", "cff", "checked", "job_of", "job_over", "of", "register", "tree",
    "tree_time",
]  # fmt: skip
