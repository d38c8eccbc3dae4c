"""Initialize a model with the weights of another one."""

from collections import Counter
from collections.abc import Mapping

from torch import Tensor, nn

from onescan.inference.loading import load_pretrained_model
from onescan.layers.mixers import LowerBounds, Mixer
from onescan.layers.mixers.projections import copy_projection, projection_weights

HEAD = "head."  # prefix of the weights that belong to one task
MAX_SHOWN = 3  # weights that do not match


def init_from(name: str, model: nn.Module, class_names: tuple[str, ...] = ()) -> str:
    """Initialize a model with the weights of another one.

    All weights but those of the head must match. The head keeps its random weights, unless the
    other head is of the same class: then its weights of matching shape are loaded too. For
    classifiers with different numbers of classes, these are all but the output layer.

    Mixers may be of another class, such as LION in place of softmax attention. The projections of
    queries, keys, values and outputs that both mixers have, with the same shape and number of
    heads, are then copied; see `Mixer.projections`. Biases that the source lacks are set to zero.
    All other weights of the new mixer keep their random values.

    Args:
        name: See `load_pretrained_model`.
        model: Model on the CPU.
        class_names: Names of its classes, if known.

    Returns:
        What was copied and what is new, in one line.

    Raises:
        ValueError: If there is no such model, weights are missing or of another shape (names them),
            or it has the same classes in another order.
        FileNotFoundError: If the run has not saved any weights.
        ImportError: If transformers is needed and not installed.
    """
    source = load_pretrained_model(name)
    other = source.model
    if source.class_names != class_names and set(source.class_names) == set(class_names):
        raise ValueError(
            f"init_from is {name!r}, whose classes are in another order than those of the data: "
            f"{', '.join(source.class_names)} instead of {', '.join(class_names)}"
        )
    source_weights, target_weights = other.state_dict(), model.state_dict()
    source_mixers, target_mixers = _mixers(other), _mixers(model)
    replaced = [
        key
        for key in target_mixers
        if key in source_mixers and type(target_mixers[key]) is not type(source_mixers[key])
    ]
    inside = tuple(f"{key}." for key in replaced)
    bounds = [f"{key}." for network in (other, model) for key in _lower_bounds(network)]
    separate = (HEAD, *inside, *(bounds if replaced else ()))
    loaded, kept = (
        {key: weight for key, weight in weights.items() if not key.startswith(separate)}
        for weights in (source_weights, target_weights)
    )
    _check_match(name, loaded, kept)
    if _head_class(other) is _head_class(model):
        shared = [key for key in target_weights if key.startswith(HEAD) and key in source_weights]
        loaded |= {
            key: source_weights[key]
            for key in shared
            if source_weights[key].shape == target_weights[key].shape
        }
    model.load_state_dict(loaded, strict=False)
    mixers = Counter(_copy_projections(source_mixers[key], target_mixers[key]) for key in replaced)
    new = [key for key in target_weights if key not in loaded and not key.startswith(inside)]
    return "; ".join(
        [
            f"copied from {name}: {len(loaded)} tensors",
            *(f"{count} mixers, {described}" for described, count in mixers.items()),
            *([f"new: {', '.join(new)}"] if new else []),
        ]
    )


def _copy_projections(source: Mixer, target: Mixer) -> str:
    """Copy the projections that two mixers have in common; describe what is copied and new."""
    copied: list[str] = []
    rows: Counter[str] = Counter()
    for role, projection in target.projections.items():
        if role not in source.projections:
            continue
        source_weights = projection_weights(source, source.projections[role])
        target_weights = projection_weights(target, projection)
        if not target_weights.corresponds_to(source_weights):
            continue
        copy_projection(source_weights, target_weights)
        has_no_bias = source_weights.bias is not None and target_weights.bias is None
        copied.append(f"{role} (without bias)" if has_no_bias else role)
        rows[projection.layer] += projection.stop - projection.start
    new = []
    for name, tensor in target.state_dict().items():
        new_rows = len(tensor) - rows[name.rpartition(".")[0]] if tensor.ndim else 1
        if new_rows:
            is_part = tensor.ndim and new_rows < len(tensor)
            new.append(f"{new_rows} rows of {name}" if is_part else name)
    return (
        f"{type(target).__name__} in place of {type(source).__name__}: "
        f"copied {', '.join(copied) or 'nothing'}, new {', '.join(new) or 'nothing'}"
    )


def _mixers(model: nn.Module) -> dict[str, Mixer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Mixer)}


def _lower_bounds(model: nn.Module) -> list[str]:
    """Return the names of the lower bounds of decays, which belong to the mixers of all blocks."""
    return [name for name, module in model.named_modules() if isinstance(module, LowerBounds)]


def _head_class(model: nn.Module) -> type | None:
    head = getattr(model, "head", None)
    return type(head) if isinstance(head, nn.Module) else None


def _check_match(name: str, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    def shape(weights: Mapping[str, Tensor], key: str) -> str:
        return str(tuple(weights[key].shape)) if key in weights else "missing"

    wrong = [
        f"{key} is {shape(source, key)} in the file and {shape(target, key)} in the model"
        for key in dict.fromkeys([*target, *source])
        if shape(source, key) != shape(target, key)
    ]
    if wrong:
        more = f", and {len(wrong) - MAX_SHOWN} more" * (len(wrong) > MAX_SHOWN)
        raise ValueError(
            f"init_from is {name!r}, whose weights do not match the model: "
            f"{', '.join(wrong[:MAX_SHOWN])}{more}"
        )
