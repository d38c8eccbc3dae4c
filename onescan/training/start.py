"""Weights to begin with, of a model that was trained before on something else."""

from collections.abc import Mapping

from torch import Tensor, nn

from onescan.training.checkpoint import load
from onescan.training.language_model import is_elsewhere

HEAD = "head."  # how the names of weights begin that are one problem's own
SHOWN = 3  # weights that do not fit


def init_from(name: str, model: nn.Module) -> None:
    """Fill a fresh model with another's weights.

    All but the head has to fit. The head stays fresh, unless the other one is of the same kind: of
    such, the weights that fit are taken too, as of classifiers of unequally many classes all but
    the scores.

    Args:
        name: a run's folder, or best.safetensors in it; or a folder that transformers'
            `save_pretrained` wrote, or a name on the Hugging Face hub.
        model: on the CPU.

    Raises:
        ValueError: there is no such model, or weights are missing or of another shape: says which.
        FileNotFoundError: the run has not saved any weights.
        ImportError: transformers is needed and not installed.
    """
    other = _load(name)
    there, here = other.state_dict(), model.state_dict()
    _check_fit(name, _body(there), _body(here))
    taken = _body(there)
    if _head_kind(other) is _head_kind(model):
        fitting = {key for key in here.keys() & there.keys() if _fits(there[key], here[key])}
        taken |= {key: there[key] for key in fitting}
    model.load_state_dict(taken, strict=False)


def _load(name: str) -> nn.Module:
    if not is_elsewhere(name):
        return load(name).model
    from onescan.integrations.transformers import load_pretrained  # slow

    return load_pretrained(name)


def _body(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: weight for key, weight in weights.items() if not key.startswith(HEAD)}


def _head_kind(model: nn.Module) -> type | None:
    head = getattr(model, "head", None)
    return type(head) if isinstance(head, nn.Module) else None


def _fits(there: Tensor, here: Tensor) -> bool:
    return there.shape == here.shape


def _check_fit(name: str, there: Mapping[str, Tensor], here: Mapping[str, Tensor]) -> None:
    """Raise ValueError for weights that one side lacks, or that are of another shape."""
    wrong = [
        f"{key} is {_shape(there, key)} there and {_shape(here, key)} here"
        for key in dict.fromkeys([*here, *there])
        if key not in here or key not in there or not _fits(there[key], here[key])
    ]
    if wrong:
        more = f", and {len(wrong) - SHOWN} more" * (len(wrong) > SHOWN)
        raise ValueError(
            f"init_from is {name!r}, whose weights are of another model: "
            f"{', '.join(wrong[:SHOWN])}{more}"
        )


def _shape(weights: Mapping[str, Tensor], key: str) -> str:
    return str(tuple(weights[key].shape)) if key in weights else "missing"
