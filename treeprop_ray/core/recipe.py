"""A network that stands, as a recipe: for commands, whose actors make their own parts alone."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import nn
from torch.utils import _pytree as pytree

from treeprop_ray.core.network import Blueprint, TreeNetwork, edge_name
from treeprop_ray.core.states import Stack


def recipe_of(network: TreeNetwork) -> Blueprint:
    """How to make the parts of a network, with the weights that they have."""
    tree, head = network.tree, network.block(network.tree.head)

    def block(l: int, r: int) -> nn.Module:
        """A block; of one with several layers, the layer."""
        if tree.grouping is None:
            return copied(network.block((l, r)))
        stacks = (module for module in network.edges.values() if isinstance(module, Stack))
        layers = {name: layer for stack in stacks for name, layer in stack.named_children()}
        return copied(layers[edge_name((l, r))])

    ours = {id(p): name for name, p in network.stem.named_parameters()}
    shared = {name: ours[id(p)] for name, p in head.named_parameters() if id(p) in ours}
    spec = network.context
    return Blueprint(
        tree.N,
        partial(copied, network.stem),
        block,
        partial(copied, head),
        network.family,
        partial(tie, shared) if shared else None,
        None if spec is None else pytree.tree_unflatten([0] * spec.num_leaves, spec),
        tree.grouping,
        network.plain or spec is not None,
    )


def copied(module: nn.Module) -> nn.Module:
    """A module of its own; without numbers where none are wanted."""
    twin = copy.deepcopy(module)
    return twin.to("meta") if torch.get_default_device().type == "meta" else twin


def tie(shared: dict[str, str], stem: nn.Module, head: nn.Module) -> None:
    """Give the head the parameters that it has in common with the stem."""
    for name, theirs in shared.items():
        module, _, leaf = name.rpartition(".")
        setattr(head.get_submodule(module), leaf, stem.get_parameter(theirs))
