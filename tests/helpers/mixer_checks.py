"""What tests of single mixers share: weights as after training, and gradients to compare."""

import torch


def trained(config, width, axes=1):
    """The mixer with weights as training may leave them, in float64."""
    mixer = config.build(width=width, axes=axes).double()
    for parameter in mixer.parameters():
        with torch.no_grad():
            parameter += 0.3 * torch.randn_like(parameter)
    return mixer


def silu(x):
    return x * torch.sigmoid(x)


def gradients(y, x, mixer):
    """Gradients of the input and of all parameters, with a different weight for each output."""
    return torch.autograd.grad((y * y.detach().cos()).sum(), [x, *mixer.parameters()])
