"""One object per training method, and the registry."""

from treeprop_ray.methods.base import Method, checked, of, register
from treeprop_ray.methods.bp import Backpropagation
from treeprop_ray.methods.bptt import Bptt
from treeprop_ray.methods.cff import ForwardForward
from treeprop_ray.methods.job import Job, job_of, job_over
from treeprop_ray.methods.tree import TreeProp
from treeprop_ray.methods.tree_time import TreePropThroughTime

__all__ = ["Job", "Method", "checked", "job_of", "job_over", "of", "register"]

for method in (
    TreeProp(),
    Backpropagation(),
    ForwardForward(),
    Bptt("bptt"),
    Bptt("bptt_fused"),
    TreePropThroughTime(),
):
    register(method)
