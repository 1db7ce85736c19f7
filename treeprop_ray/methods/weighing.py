"""What the parts of a network cost, for the planner (schedule/planner.py): counted or measured.

Counted: FLOP, parameters and the bytes that autograd keeps, on tensors without numbers, so nothing
of the size of the network is allocated; seconds are FLOP over a device's speed. Measured: a forward
and backward of a real block in this process. Parts that look alike are weighed once.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from treeprop_ray.config import Settings, family_of
from treeprop_ray.config.nested import TEXTS
from treeprop_ray.core.network import STEM, Shape, edge_name, edge_of
from treeprop_ray.core.own_blocks import tensors_of
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.states import next_state, split_stem
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.data import load
from treeprop_ray.data.text import shape_of
from treeprop_ray.methods.job import Job, OwnModules
from treeprop_ray.models import blueprint
from treeprop_ray.models.pretrained import TreeNetwork, meta_model
from treeprop_ray.schedule.workload import STATE_BYTES, Device, Part, Workload

LONGEST = 2**20  # tokens, where a config sets no limit
SAMPLES = 2  # that parts are weighed with: some layers want more than one
CORE = Device(peak=1e11, share=0.5, half=8)  # a core in float32, assumed
GPU = Device()  # an A100 in bf16, assumed
SECONDS, ROUNDS = 1.0, 5  # a measurement takes at most about that long, so often


@dataclass(frozen=True)
class Anatomy:
    """The parts of a network without numbers, what to call them with, and how to make real ones."""

    tree: Tree
    parts: Mapping[Edge, nn.Module]
    x: Any
    build: Callable[[Edge], nn.Module] | None = None


def given_to(stem: nn.Module, shape: Shape) -> Any:
    """Some samples without numbers that the stem takes: floats, or tokens, or several tensors."""
    if shape.form:
        return shape.form.empty(SAMPLES, "meta")
    floats = torch.empty((SAMPLES, *shape.input_shape), device="meta")
    try:
        stem(floats)
    except Exception:  # an embedding, or whatever one's own stem raises
        return floats.long()
    return floats


def shape_for(settings: Settings) -> Shape:
    """What the model must know of the data; text need not be here for that."""
    return shape_of(settings.data) if settings.data.name in TEXTS else load(settings).shape


def anatomy_of(settings: Settings) -> Anatomy:
    """The network that the settings name."""
    shape = shape_for(settings)
    recipe = blueprint(settings, shape)
    tree = recipe.tree(settings.split)
    with torch.device("meta"):
        parts = recipe.build_all([STEM, *tree.blocks], 0)
    return Anatomy(tree, parts, given_to(parts[STEM], shape), lambda edge: recipe.build(edge, 0))


def anatomy_of_job(job: Job) -> Anatomy:
    """The network of a job; modules that are at hand are copied without their numbers."""
    names = [edge_name(edge) for edge in (STEM, *job.tree.blocks)]
    if isinstance(job.parts, OwnModules):
        made = {n: copy.deepcopy(m).to("meta") for n, m in job.parts(names).items()}
    else:
        with torch.device("meta"):
            made = job.parts(names)
    parts = {edge_of(name): module for name, module in made.items()}

    def build(edge: Edge) -> nn.Module:
        return copy.deepcopy(job.parts([edge_name(edge)])[edge_name(edge)])

    return Anatomy(job.tree, parts, given_to(parts[STEM], job.shape), build)


def anatomy_of_model(settings: Settings, name: str) -> Anatomy:
    """A Hugging Face model, known by its config alone; `data.length` tokens, where it takes any."""
    model = meta_model(name)
    about, own = model.config, settings.model
    network = TreeNetwork.from_pretrained(
        model, split=settings.split, group=own.group or 1, auxiliary_layers=own.auxiliary_layers
    )
    if size := getattr(about, "image_size", 0):
        x = torch.empty(SAMPLES, about.num_channels, size, size, device="meta")
    else:
        tokens = min(settings.data.length, getattr(about, "max_position_embeddings", LONGEST))
        x = torch.empty(SAMPLES, tokens, dtype=torch.long, device="meta")
    return Anatomy(network.tree, network.parts(), x)


class Kept(torch.autograd.Function):
    """Stands for attention that keeps queries, keys, values and its result, no matrix (T, T)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out)
        return out


class Fused(TorchFunctionMode):
    """Counts attention as fused kernels do it: half of the work where it is causal."""

    flops = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        words = dict(kwargs or {})
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **words)
        q, k, v = (*args, *(words.pop(n) for n in ("query", "key", "value") if n in words))[:3]
        whole = 4.0 * q.numel() * k.shape[-2]
        self.flops += whole / 2 if words.get("is_causal") else whole
        return Kept.apply(q, k, v)


@dataclass(frozen=True)
class Weight:
    """One part: FLOP, parameters and kept bytes for a sample, and the input it was given."""

    flops: float
    parameters: float
    graph: float
    given: tuple[int, ...]
    out: Any


def weigh(module: nn.Module, run: Callable[[], Any], given: Tensor) -> Weight:
    """Count a forward of a module."""
    own = {p.untyped_storage()._cdata for p in module.parameters()}
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        if (key := t.untyped_storage()._cdata) not in own:
            kept[key] = max(kept.get(key, 0), t.numel() * t.element_size())
        return t

    counter = FlopCounterMode(display=False)
    with counter, Fused() as fused, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = run()
    parameters = sum(p.numel() for p in module.parameters())
    flops = (counter.get_total_flops() + fused.flops) / SAMPLES
    graph = sum(kept.values()) / SAMPLES
    return Weight(flops, float(parameters), graph, tuple(given.shape[1:]), out)


def form(module: nn.Module, given: Tensor) -> tuple[Any, ...]:
    """What modules that look alike have in common."""
    names = tuple((name, tuple(t.shape)) for name, t in module.state_dict().items())
    kinds = tuple(type(m).__qualname__ for m in module.modules())
    return names, kinds, tuple(given.shape)


def weigh_all(anatomy: Anatomy) -> tuple[dict[Edge, Weight], list[Tensor]]:
    """Every part, and the states of the chain."""
    tree, parts = anatomy.tree, anatomy.parts
    stem = weigh(parts[STEM], lambda: parts[STEM](anatomy.x), tensors_of(anatomy.x)[0])
    z, context = split_stem(stem.out)
    states, found = [z.detach().requires_grad_()], {STEM: stem}
    known: dict[tuple[Any, ...], Weight] = {}

    def block(edge: Edge) -> Weight:
        module, z = parts[edge], states[edge[0]]
        if (key := form(module, z)) not in known:
            known[key] = weigh(module, lambda: next_state(module, z, context), z)
        return known[key]

    for l in range(tree.N - 1):
        found[l, l + 1] = block((l, l + 1))
        states.append(found[l, l + 1].out.detach().requires_grad_())
    for edge in tree.blocks:
        if edge not in found and edge != tree.head:
            found[edge] = block(edge)
    head = parts[tree.head]
    last = weigh(head, lambda: head(states[-1]), states[-1])
    tied = {id(p) for p in parts[STEM].parameters()}
    twice = sum(p.numel() for p in head.parameters() if id(p) in tied)
    found[tree.head] = replace(last, parameters=last.parameters - twice)
    return found, states


def positions(given: tuple[int, ...]) -> float:
    """Rows of the matrices that a sample is: tokens of (T, D), pixels of (C, H, W), 1 of (D,)."""
    if len(given) == 1:
        return 1.0
    return float(torch.Size(given[:-1] if len(given) == 2 else given[1:]).numel())


def workload(
    settings: Settings, anatomy: Anatomy, device: Device, measure: float = 0.0
) -> Workload:
    """What a step of the settings costs on a device; `measure`: blocks are timed in this process,
    and the device is taken to be so many times as fast as it."""
    weights, states = weigh_all(anatomy)
    half = settings.precision in ("bf16", "fp16")

    def part(edge: Edge) -> Part:
        w = weights[edge]
        graph = w.graph / 2 if half else w.graph
        return device.part(w.flops, positions(w.given), w.parameters, graph)

    tree, note = anatomy.tree, "counted: FLOP over the speed of a device"
    parts = {edge: part(edge) for edge in (STEM, *tree.blocks)}
    if measure:
        parts, note = timed(settings, anatomy, parts, states, measure)
    stem, head = parts.pop(STEM), parts.pop(tree.head)
    state = STATE_BYTES * sum(z[0].numel() for z in states) / len(states)
    rule = Rule.of(settings, family_of(settings))
    return Workload(tree, settings.step_samples, parts, head, state, stem, rule, note)


def timed(
    settings: Settings,
    anatomy: Anatomy,
    parts: Mapping[Edge, Part],
    states: list[Tensor],
    speed: float,
) -> tuple[dict[Edge, Part], str]:
    """A block by the clock, with two numbers of samples; other parts by their FLOP beside its."""
    tree, batch = anatomy.tree, settings.step_samples
    context = split_stem(anatomy.parts[STEM](anatomy.x))[1]
    edge = (0, 1) if tree.N == 2 else (1, 2)  # the first may be unlike the others
    counted, z = parts[edge], states[edge[0]]
    few = max(1, min(batch // 8, int(SECONDS / 10 / max(counted.forward(1), 1e-9))))
    if anatomy.build is None or context is not None or counted.forward(few) > 2 * SECONDS:
        return dict(parts), "counted: FLOP over the speed of a device"
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    with torch.random.fork_rng(devices=[]):
        module = anatomy.build(edge).train()
        one = seconds(module, z, few)
        many = max(few, min(batch, int(few * SECONDS / max(one, 1e-9))))
        more = seconds(module, z, many) if many > few else one
    torch.set_num_threads(before)
    each = (more - one) / (many - few) if many > few else one / few
    fixed = one - each * few
    if each <= 0 or fixed < 0:  # so short that the clock sees noise
        each, fixed = more / many, 0.0
    scale = (fixed + each * batch) / counted.forward(batch) / speed
    steady = each * batch / (fixed + each * batch)

    def like(part: Part) -> Part:
        whole = scale * part.forward(batch)
        return replace(part, fixed=(1 - steady) * whole, each=steady * whole / batch)

    note = f"measured with {few} and {many} samples"
    return {e: like(part) for e, part in parts.items()}, note


def seconds(module: nn.Module, z: Tensor, samples: int) -> float:
    """A forward, which a forward and backward takes three of; the best of some."""
    best = float("inf")
    for _ in range(ROUNDS):
        x = torch.randn(samples, *z.shape[1:], requires_grad=True)
        began = time.perf_counter()
        out = next_state(module, x, None)
        out.backward(torch.ones_like(out))
        best = min(best, time.perf_counter() - began)
    return best / 3
