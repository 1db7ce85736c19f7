"""Adding to a parameter's gradient by hand, as autograd does it."""

from __future__ import annotations

from torch import Tensor


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to a parameter's gradient, which may keep `gradient` itself, and tell those who asked
    the parameter to (`register_post_accumulate_grad_hook`)."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)
