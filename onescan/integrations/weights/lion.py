"""Models of LION's code: LION-lit, LION-d and LION-s, as image classifiers and masked LMs.

Only names of tensors are known here; no code of LION is used. The files of image classifiers
contain no settings, so the width of a head is that of all published models, and config.json may set
the rest: {"architecture": "lion_lit"} identifies LION-lit, whose tensors are named as DeiT's, and
{"global_pool": "token"} pools the class token instead of the mean of all tokens.

Language models have BERT's names and config, whose field arch_type names the kind of LION.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import torch

from onescan.checks import check_choice
from onescan.configs import replace
from onescan.integrations.weights.maps import (
    NEGATED,
    Fields,
    Layout,
    Rule,
    linear,
    weights_by,
)
from onescan.integrations.weights.source import Foreign, Source
from onescan.integrations.weights.text import (
    BERT,
    BERT_DEFAULTS,
    BERT_NAMES,
    BERT_POSITIONS,
    BERT_UNUSED,
    bert_rules,
    check_bert,
)
from onescan.integrations.weights.vision import timm_config, timm_rules
from onescan.layers.decays import (
    DecayConfig,
    FixedDecayConfig,
    NoDecayConfig,
    SelectiveDecayConfig,
)
from onescan.layers.mixers import LionMixerConfig
from onescan.layers.position import AbsolutePositionConfig
from onescan.models.image_classifier import ImageClassifierConfig, Pool
from onescan.models.masked_lm import MaskedLMConfig

HEAD_WIDTH = 64
IMAGE_SIZE = 224  # of models without positions, which read any size
ATTENTION = "blocks.0.attn"
GATES = ("a_i", "a2_i")  # decays of the first and of the second scan
POOLS: dict[str, Pool] = {"avg": "mean_with_class_token", "token": "class_token"}
ARCHITECTURE = re.compile(r"lion_(lit|d|s)\b.*")
BERT_KINDS: dict[str, DecayConfig] = {
    "lion-lit": NoDecayConfig(),
    "lion-d": FixedDecayConfig(),
    "lion-s": SelectiveDecayConfig(),
}
LION_BERT = Fields(
    base=replace(
        BERT.base,
        {"mixer": LionMixerConfig(feature_map="identity", normalize="none", norm_eps=1e-5)},
    ),
    names={native: name for native, name in BERT.names.items() if native != "mixer.dropout"},
    hidden=BERT.hidden,
)


def _matches(foreign: Foreign) -> bool:
    if "blocks.0.attn.qkv.weight" not in foreign.tensors:
        return False
    named = ARCHITECTURE.fullmatch(str(foreign.fields.get("architecture", "")))
    return named is not None or _decay(foreign) != NoDecayConfig()


def _decay(foreign: Foreign) -> DecayConfig:
    first = f"{ATTENTION}.{GATES[0]}"
    if f"{first}.weight" in foreign.tensors:
        return SelectiveDecayConfig()
    return FixedDecayConfig() if first in foreign.tensors else NoDecayConfig()


def _is_natural(foreign: Foreign) -> bool:
    second = f"{ATTENTION}.{GATES[1]}"
    return second in foreign.tensors or f"{second}.weight" in foreign.tensors


def _num_heads(foreign: Foreign, width: int) -> int:
    first = f"{ATTENTION}.{GATES[0]}"
    for name in (first, f"{first}.bias"):
        if name in foreign.tensors:
            return math.prod(foreign.tensors.shape(name))
    return int(foreign.fields.get("num_heads", width // HEAD_WIDTH))


def _config(foreign: Foreign) -> ImageClassifierConfig:
    tensors, decay = foreign.tensors, _decay(foreign)
    pool = foreign.fields.get("global_pool", "avg")
    check_choice("global_pool", pool, POOLS)
    width, _, side, _ = tensors.shape("patch_embed.proj.weight", 4)
    has_positions = "pos_embed" in tensors
    patches = tensors.shape("pos_embed", 3)[1] - 1 if has_positions else (IMAGE_SIZE // side) ** 2
    is_lit = isinstance(decay, NoDecayConfig)
    return timm_config(
        foreign,
        patches=patches,
        mixer=LionMixerConfig(
            num_heads=_num_heads(foreign, width),
            feature_map="elu_plus_one" if is_lit else "shifted_silu",
            decay=decay,
            scan="natural" if _is_natural(foreign) else "flat",
        ),
        position=AbsolutePositionConfig() if has_positions else None,
        pool=POOLS[pool],
    )


def _rules(config: Any) -> Iterator[Rule]:
    yield from timm_rules(config)
    gates = GATES if config.mixer.scan == "natural" else GATES[:1]
    for i in range(config.depth):
        for scan, gate in enumerate(gates):
            native = f"blocks.{i}.mixer.decays.{scan}"
            yield from _decay_rules(config.mixer.decay, native, f"blocks.{i}.attn.{gate}")


def _decay_rules(decay: DecayConfig, native: str, gate: str) -> Iterator[Rule]:
    if isinstance(decay, FixedDecayConfig):
        yield Rule(f"{native}.logit", (gate,), Layout(torch.flatten, torch.flatten))
    elif isinstance(decay, SelectiveDecayConfig):
        # LION's decay is 1 - sigmoid(W x + b) = sigmoid(-W x - b)
        yield from linear(f"{native}.proj", gate, NEGATED)


def _bert_config(foreign: Foreign) -> MaskedLMConfig:
    check_bert(foreign)
    kind = foreign.need("arch_type")
    check_choice("arch_type", kind, BERT_KINDS)
    changes: dict[str, Any] = {
        "mixer.decay": BERT_KINDS[kind],
        "mixer.norm": "layer" if foreign.fields.get("layer_norm_after") else "none",
    }
    if BERT_POSITIONS not in foreign.tensors:
        changes["position"] = None
    return LION_BERT.read(foreign, changes)


def _bert_rules(config: Any) -> Iterator[Rule]:
    mixer = config.mixer
    yield from bert_rules(config)
    for i in range(config.depth):
        native, layer = f"network.blocks.{i}.mixer", f"bert.encoder.layer.{i}.attention.self"
        if mixer.norm == "layer":
            yield from linear(f"{native}.norm", f"{layer}.layer_norm")
        gate = "ai" if isinstance(mixer.decay, FixedDecayConfig) else "Wa_i"
        yield from _decay_rules(mixer.decay, f"{native}.decays.0", f"{layer}.{gate}")


def _without_positions(foreign: Foreign) -> Foreign:
    """Return a BERT without the positions that it stores and does not use."""
    if foreign.fields.get("position_embedding_type", "absolute") == "absolute":
        return foreign
    return foreign.changed(without=(BERT_POSITIONS,))


LION_SOURCES = (
    Source(
        name="image classifiers of LION",
        matches=_matches,
        config=_config,
        weights=weights_by(_rules, _config),
    ),
    Source(
        name="masked language models of LION",
        matches=lambda foreign: str(foreign.fields.get("arch_type")).startswith("lion-"),
        config=_bert_config,
        weights=weights_by(_bert_rules, _bert_config, unused=BERT_UNUSED),
        defaults=BERT_DEFAULTS,
        rename={r"^model\.": "", **BERT_NAMES},  # the prefix of Composer, which trains them
        adapt=_without_positions,
    ),
)
