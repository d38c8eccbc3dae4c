"""Calls of ops with states, with the types that kernels take, compared with calls in float64."""

import torch
from kernel_device import DEVICE
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten


def rounded(x):
    """The number in float64 that all narrower types hold exactly."""
    return x.bfloat16().half().double()


def tensors_of(state):
    """The tensors of a state, of one side or both, that are there."""
    return [x for x in tree_leaves(state) if x is not None]


def narrowed(named, dtype):
    """The same arguments as a kernel has them: float32 states."""
    made = {
        name: x.to(DEVICE, dtype if x.is_floating_point() else None)
        for name, x in named.items()
        if name != "state"
    }
    state = tree_map_only(Tensor, lambda x: x.float().to(DEVICE), named["state"])
    return dict(made, state=state)


def outputs_and_gradients(call, named):
    """Outputs and states, and gradients of all that has one, under one random loss."""
    leaves, structure = tree_flatten(named)
    leaves = [
        x.detach().clone().requires_grad_()
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for x in leaves
    ]
    o, leaving = call(**tree_unflatten(leaves, structure))
    outputs = [o, *tensors_of(leaving)]
    g = torch.Generator().manual_seed(7)
    weights = [rounded(torch.randn(x.shape, generator=g)).to(x.device) for x in outputs]
    loss = sum((x.double() * w).sum() for x, w in zip(outputs, weights, strict=True))
    learnt = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    return outputs, [*torch.autograd.grad(loss, learnt, materialize_grads=True)]


def assert_near(got, want, tolerance):
    """Each tensor within a share of the largest number of what it should be."""
    for x, y in zip(got, want, strict=True):
        atol = tolerance * max(y.abs().max().item(), 0.1)
        torch.testing.assert_close(x.double().cpu(), y, atol=atol, rtol=0)
