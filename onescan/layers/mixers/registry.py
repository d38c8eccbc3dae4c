"""Mixers by name, for `onescan train RECIPE --model.mixer NAME`."""

import re

from onescan.checks import check_choice
from onescan.layers.decays import FixedDecayConfig, NoDecayConfig
from onescan.layers.mixers.contract import MixerConfig, check_is_config
from onescan.layers.mixers.delta_rule import (
    DeltaProductMixerConfig,
    GatedDeltaNetMixerConfig,
    KDAMixerConfig,
)
from onescan.layers.mixers.lightnet import LightNetMixerConfig
from onescan.layers.mixers.lion import LINEAR_TRANSFORMERS, LionMixerConfig
from onescan.layers.mixers.softmax import SoftmaxMixerConfig

HYBRID = "_hybrid"  # suffix of names: softmax attention in every fourth block

_MIXERS: dict[str, MixerConfig] = {
    "lightnet": LightNetMixerConfig(),
    "lion_lit": LionMixerConfig(decay=NoDecayConfig()),
    "lion_d": LionMixerConfig(decay=FixedDecayConfig()),
    "lion_s": LionMixerConfig(),
    "gated_deltanet": GatedDeltaNetMixerConfig(),
    "kda": KDAMixerConfig(),
    "delta_product": DeltaProductMixerConfig(),
    "softmax": SoftmaxMixerConfig(),
    **LINEAR_TRANSFORMERS,
}


BUILT_IN = frozenset(_MIXERS)


def register_mixer(name: str, config: MixerConfig) -> None:
    """Register a custom mixer under a name, for `--model.mixer` and `mixer_named`.

    Args:
        name: ASCII letters, digits and underscores, beginning with a letter; not the name of a
            built-in mixer. Registering a name again replaces its config.
        config: Config of the mixer. Recipes that use it set its number of heads, biases and
            direction, if it has these fields.

    Raises:
        ValueError: If the name is invalid or belongs to a built-in mixer.

    >>> register_mixer("retnet_wide", LionMixerConfig(key_width=64))
    >>> mixer_named("retnet_wide").key_width
    64
    """
    check_is_config(config)
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) or name.endswith(HYBRID):
        raise ValueError(
            f"name is {name!r}, expected letters, digits and underscores, beginning with a letter "
            f"and not ending in {HYBRID!r}"
        )
    if name in BUILT_IN:
        raise ValueError(
            f"name is {name!r}, which belongs to a built-in mixer; choose another name"
        )
    _MIXERS[name] = config


def mixer_named(name: str) -> MixerConfig:
    """Return the config of a mixer by name.

    Raises:
        ValueError: If there is no such mixer; the message suggests similar names.
    """
    check_choice("name", name, _MIXERS)
    return _MIXERS[name]


def mixer_names() -> list[str]:
    """Return the names of all mixers, including registered ones."""
    return list(_MIXERS)
