"""Replace the mixer of a recipe's model, by name: `onescan train RECIPE --model.mixer NAME`."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from onescan import configs
from onescan.checks import check_choice
from onescan.layers.decays import FixedDecayConfig, NoDecayConfig
from onescan.layers.mixers import (
    LINEAR_TRANSFORMERS,
    LightNetMixerConfig,
    LionMixerConfig,
    MixerConfig,
    SoftmaxMixerConfig,
)
from onescan.messages import named_type
from onescan.training.config import RunConfig

NAMED_MIXERS: Mapping[str, MixerConfig] = MappingProxyType(
    {
        "lightnet": LightNetMixerConfig(),
        "lion_lit": LionMixerConfig(decay=NoDecayConfig()),
        "lion_d": LionMixerConfig(decay=FixedDecayConfig()),
        "lion_s": LionMixerConfig(),
        "softmax": SoftmaxMixerConfig(),
        **LINEAR_TRANSFORMERS,
    }
)
KEPT = ("num_heads", "bias")


def with_mixer(run: RunConfig, name: str) -> RunConfig:
    """Return a run with another mixer, which keeps the number of heads, biases and direction.

    Args:
        run: Run to change.
        name: Key of `NAMED_MIXERS`.

    Raises:
        ValueError: If there is no such name (names the closest), or the model has no mixer.
    """
    check_choice("model.mixer", name, NAMED_MIXERS)
    new, old = NAMED_MIXERS[name], getattr(run.model, "mixer", None)
    if not isinstance(old, MixerConfig):
        raise ValueError(
            f"model.mixer is {name!r}, but the model, {named_type(run.model)}, has no mixer"
        )
    changes: dict[str, Any] = {
        field: getattr(old, field) for field in KEPT if hasattr(old, field) and hasattr(new, field)
    }
    if hasattr(new, "direction"):
        changes["direction"] = getattr(old, "direction", "forward" if old.is_causal else "both")
    else:
        changes["causal"] = old.is_causal
    changed = configs.replace(run.model, {"mixer": dataclasses.replace(new, **changes)})
    return dataclasses.replace(run, model=changed)
