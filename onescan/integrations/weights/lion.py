"""Image classifiers published with LION: LION-lit, LION-d and LION-s, along rows or naturally.

Only names of tensors are known here; no code of LION is used. The files contain no settings, so the
width of a head is that of all published models, and config.json may set the rest:
{"architecture": "lion_lit"} identifies LION-lit, whose tensors are named as DeiT's, and
{"global_pool": "token"} pools the class token instead of the mean of all tokens.
"""

import math
import re

from torch import Tensor

from onescan.checks import check_choice
from onescan.configs import ModelConfig
from onescan.integrations.weights.maps import LinearNames, copied, merged, patch_embedding
from onescan.integrations.weights.source import Foreign, Source
from onescan.layers.basic import MLPConfig
from onescan.layers.decays import (
    DecayConfig,
    FixedDecayConfig,
    NoDecayConfig,
    SelectiveDecayConfig,
)
from onescan.layers.mixers import LionMixerConfig
from onescan.layers.position import AbsolutePositionConfig
from onescan.models.image_classifier import ImageClassifierConfig, Pool

HEAD_WIDTH = 64
IMAGE_SIZE = 224  # of models without positions, which read any size
ATTENTION = "blocks.0.attn"
GATES = ("a_i", "a2_i")  # decays of the first and of the second scan
POOLS: dict[str, Pool] = {"avg": "mean_with_class_token", "token": "class_token"}
ARCHITECTURE = re.compile(r"lion_(lit|d|s)\b.*")


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


def _config(foreign: Foreign) -> ModelConfig:
    tensors, decay = foreign.tensors, _decay(foreign)
    pool = foreign.fields.get("global_pool", "avg")
    check_choice("global_pool", pool, POOLS)
    width, channels, *patch = tensors.shape("patch_embed.proj.weight")
    side = IMAGE_SIZE // patch[0]
    if "pos_embed" in tensors:
        side = math.isqrt(tensors.shape("pos_embed")[1] - 1)
    is_lit = isinstance(decay, NoDecayConfig)
    return ImageClassifierConfig(
        image_size=(side * patch[0], side * patch[1]),
        patch_size=(patch[0], patch[1]),
        channels=channels,
        num_classes=tensors.shape("head.weight")[0],
        width=width,
        depth=tensors.count("blocks."),
        mixer=LionMixerConfig(
            num_heads=_num_heads(foreign, width),
            feature_map="elu_plus_one" if is_lit else "shifted_silu",
            decay=decay,
            scan="natural" if _is_natural(foreign) else "flat",
        ),
        mlp=MLPConfig(ratio=tensors.shape("blocks.0.mlp.fc1.weight")[0] / width),
        position=AbsolutePositionConfig() if "pos_embed" in tensors else None,
        pool=POOLS[pool],
        drop_path=0.0,
    )


def _weights(foreign: Foreign) -> dict[str, Tensor]:
    tensors, decay = foreign.tensors, _decay(foreign)
    weights = patch_embedding(tensors, "patch_embed.proj")
    weights["class_token"] = tensors.take("cls_token").flatten()
    if "pos_embed" in tensors:
        weights["position.table"] = tensors.take("pos_embed").squeeze(0)
    names = [LinearNames("norm", "norm"), LinearNames("head", "head")]
    gates = GATES[: 1 + _is_natural(foreign)]
    for i in range(tensors.count("blocks.")):
        block = f"blocks.{i}"
        qkv = merged(tensors, f"{block}.attn", ("qkv",))
        weights |= {f"{block}.mixer.{name}": tensor for name, tensor in qkv.items()}
        names += [
            LinearNames(f"{block}.mixer_norm", f"{block}.norm1"),
            LinearNames(f"{block}.mixer.out_proj", f"{block}.attn.proj"),
            LinearNames(f"{block}.mlp_norm", f"{block}.norm2"),
            LinearNames(f"{block}.mlp.up_proj", f"{block}.mlp.fc1"),
            LinearNames(f"{block}.mlp.down_proj", f"{block}.mlp.fc2"),
        ]
        for scan, gate in enumerate(gates):
            native, name = f"{block}.mixer.decays.{scan}", f"{block}.attn.{gate}"
            if isinstance(decay, FixedDecayConfig):
                weights[f"{native}.logit"] = tensors.take(name).flatten()
            elif isinstance(decay, SelectiveDecayConfig):
                # LION's decay is 1 - sigmoid(W x + b) = sigmoid(-W x - b)
                for part in ("weight", "bias"):
                    weights[f"{native}.proj.{part}"] = -tensors.take(f"{name}.{part}")
    return weights | copied(tensors, names)


LION_SOURCES = (
    Source(
        name="image classifiers of LION",
        matches=_matches,
        config=_config,
        weights=_weights,
    ),
)
