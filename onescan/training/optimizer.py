"""AdamW, with weight decay on matrices only."""

from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from onescan.training.run import TrainingConfig


def build_optimizer(model: nn.Module, config: TrainingConfig) -> Optimizer:
    """Build the optimizer; its learning rate is set anew at every step.

    AdamW decays by the learning rate times the decay, so that a decoupled one is divided by the
    highest learning rate.
    """
    scale = config.learning_rate if config.decoupled_weight_decay else 1.0
    groups = parameter_groups(model, config.weight_decay / scale)
    return AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Sort the trainable parameters into those that decay and those that do not.

    A parameter does not decay if it has at most one axis (norms, biases), or if a module that
    owns it names it in its class attribute `no_weight_decay: frozenset[str]`.
    """
    exempt = {
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim <= 1 or name in getattr(module, "no_weight_decay", ())
    }
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trainable if p not in exempt], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p in exempt], "weight_decay": 0.0},
    ]
