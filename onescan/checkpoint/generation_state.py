"""Save and load the state of a causal language model, to continue a text later."""

from pathlib import Path
from typing import Any

import torch

from onescan import configs
from onescan.checkpoint.weights import read_weights, save_weights
from onescan.messages import named_type
from onescan.models.causal_lm import CausalLM
from onescan.models.token_network import flatten_state, unflatten_state


def save_generation_state(path: str | Path, state: Any, model: CausalLM) -> None:
    """Save the state that a model returned with its logits, replacing an older file atomically.

    Args:
        path: The file.
        state: State returned by the model.
        model: The model.

    Raises:
        OSError: If the file cannot be written. An older file is not changed.
        ValueError: If an argument is of another type, such as swapped arguments.
    """
    if not isinstance(path, str | Path):
        raise ValueError(f"path is {named_type(path)}, expected a str or Path")
    if not isinstance(model, CausalLM):
        raise ValueError(f"model is {named_type(model)}, expected a CausalLM")
    tensors = {name: tensor.detach().cpu() for name, tensor in flatten_state(state).items()}
    save_weights(Path(path), tensors, {"model": configs.to_dict(model.config)})


def load_generation_state(path: str | Path, model: CausalLM) -> Any:
    """Load a state, to continue a text without reading it again.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged, or the config of its model differs (names the first
            difference).
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    tensors, notes = read_weights(path)
    if not isinstance(notes.get("model"), dict):
        raise ValueError(f"{path} holds no generation state")
    saved_config = configs.from_dict(type(model.config), notes["model"])
    for where, saved, expected in configs.differences(saved_config, model.config):
        raise ValueError(
            f"{path} does not match the model: {where} is {saved!r} in the file and {expected!r} "
            "in the model"
        )
    device = model.network.device
    with torch.no_grad():  # compute a state with the same structure
        _, like = model(torch.zeros(1, 1, dtype=torch.long, device=device))
    try:
        state = unflatten_state(like, {name: x.to(device) for name, x in tensors.items()})
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path} does not match the model: {error}") from error
    return state
