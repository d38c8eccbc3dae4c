"""Other mixers for the model of a recipe, by name: `onescan train RECIPE --model.mixer NAME`."""

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


def with_mixer(run: RunConfig, mixer: str | MixerConfig) -> RunConfig:
    """Return a run with another mixer, which has the heads, biases and direction of the old one.

    Args:
        run: Run to change.
        mixer: Key of `NAMED_MIXERS`, or a config.

    Raises:
        ValueError: If there is no such name (states the closest), or the model has no mixer.
    """
    if isinstance(mixer, str):
        check_choice("model.mixer", mixer, NAMED_MIXERS)
        mixer = NAMED_MIXERS[mixer]
    old, new = getattr(run.model, "mixer", None), mixer
    if not isinstance(old, MixerConfig):
        raise ValueError(
            f"model.mixer is {named_type(new)}, but a {named_type(run.model)} has no mixer"
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
