"""The state of a text that a model has read, in a file: to go on from it another day."""

from pathlib import Path
from typing import Any

import torch

from onescan import configs
from onescan.checkpoint.weights import read_weights, save_weights
from onescan.models.causal_lm import CausalLM
from onescan.models.states import flatten, unflatten


def save_state(path: str | Path, state: Any, model: CausalLM) -> None:
    """Write what a model returned beside its logits, in place of an older file.

    Raises:
        OSError: it cannot be written; the older one is intact.
    """
    tensors = {name: tensor.detach().cpu() for name, tensor in flatten(state).items()}
    save_weights(Path(path), tensors, {"model": configs.to_dict(model.config)})


def load_state(path: str | Path, model: CausalLM) -> Any:
    """Read a state for a model, which goes on as if it had read the text itself.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or of a model of another config; names the first difference.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no state in {path}")
    tensors, notes = read_weights(path)
    if not isinstance(notes.get("model"), dict):
        raise ValueError(f"{path} holds no state")
    there = configs.from_dict(type(model.config), notes["model"])
    for where, saved, wanted in configs.differences(there, model.config):
        raise ValueError(f"{path} is of another model: {where} is {saved!r} there, {wanted!r} here")
    device = model.network.device
    with torch.no_grad():  # a state of the same kind, to be filled
        _, like = model(torch.zeros(1, 1, dtype=torch.long, device=device))
    try:
        state = unflatten(like, {name: x.to(device) for name, x in tensors.items()})
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is of another model: {error}") from error
    return state
