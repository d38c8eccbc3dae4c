"""Replace the mixer of a recipe's model, by name: `onescan train RECIPE --model.mixer NAME`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from onescan import configs
from onescan.checks import check_choice
from onescan.experiments.training.config import RunConfig
from onescan.layers.mixers import (
    DirectedMixerConfig,
    HybridMixerConfig,
    MixerConfig,
    SoftmaxMixerConfig,
    mixer_named,
    mixer_names,
)
from onescan.layers.mixers.registry import HYBRID
from onescan.messages import named_type

KEPT = ("num_heads", "bias", "causal_block")


def with_mixer(run: RunConfig, name: str) -> RunConfig:
    """Return a run with another mixer, which keeps the number of heads, biases and direction.

    Args:
        run: Run to change.
        name: One of `mixer_names`, for example "lion_s"; or "lion_s_hybrid" for LION-s with
            softmax attention in every fourth block, which is that of the run if it has any.

    Raises:
        ValueError: If there is no such name (names the closest), or the model has no mixer.
    """
    names = mixer_names()
    check_choice("model.mixer", name, [*names, *(base + HYBRID for base in names)])
    base = name.removesuffix(HYBRID)
    old = getattr(run.model, "mixer", None)
    if not isinstance(old, MixerConfig):
        raise ValueError(
            f"model.mixer is {name!r}, but the model, {named_type(run.model)}, has no mixer"
        )
    similar = old.for_layer(0) if isinstance(old, HybridMixerConfig) else old
    new = _like(mixer_named(base), similar)
    if base != name:
        new = HybridMixerConfig(linear=new, attention=_attention_of(old))
    return dataclasses.replace(run, model=configs.replace(run.model, {"mixer": new}))


def check_mixer_options(run: RunConfig, given: Mapping[str, str]) -> None:
    """Raise ValueError for an option that the run's mixer lacks; names the mixers that have it.

    Args:
        run: The run.
        given: Values by dotted name, such as "model.mixer.num_heads".
    """
    for option, value in given.items():
        mixers = [name for name in mixer_names() if _has(mixer_named(name), option)]
        if mixers and not _has(getattr(run.model, "mixer", None), option):
            raise ValueError(
                f"{option} is {value!r}, but the model's mixer has no such setting; mixers that "
                f"have it: {', '.join(mixers)}"
            )


def _has(mixer: MixerConfig | None, option: str) -> bool:
    """Whether a mixer has an option, such as "model.mixer.decay.lower_bound"."""
    prefix, config = "model.mixer.", mixer
    if not option.startswith(prefix):
        return False
    for name in option.removeprefix(prefix).split("."):
        if name not in getattr(config, "__dataclass_fields__", ()):
            return False
        config = getattr(config, name)
    return True


def _attention_of(old: MixerConfig) -> MixerConfig:
    if isinstance(old, HybridMixerConfig):
        old = old.for_layer(old.offset % old.period)
    return old if isinstance(old, SoftmaxMixerConfig) else _like(SoftmaxMixerConfig(), old)


def _like(new: MixerConfig, old: MixerConfig) -> MixerConfig:
    """Return a mixer with the number of heads, biases, direction and blocks of another one."""
    changes: dict[str, Any] = {
        field: getattr(old, field) for field in KEPT if hasattr(old, field) and hasattr(new, field)
    }
    if isinstance(new, DirectedMixerConfig):
        direction = getattr(old, "direction", None)
        if direction not in new.directions:
            direction = "forward" if old.is_causal else "both"
        changes["direction"] = direction
    return dataclasses.replace(new, **changes)
