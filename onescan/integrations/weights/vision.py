"""ViT and DeiT of transformers and timm, as image classifiers with softmax attention."""

import math
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onescan.checks import check_choice
from onescan.configs import ModelConfig
from onescan.integrations.weights.source import Foreign, Source, Tensors
from onescan.layers.basic import EPS, Activation, MLPConfig
from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.layers.position import AbsolutePositionConfig
from onescan.models.image_classifier import ImageClassifierConfig

# names of activations in transformers and diffusers -> names in `MLPConfig`
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu-approximate": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
NUM_HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1152: 16, 1280: 16}  # by width, as published
# Architectures of timm whose whole computation is in the names of the tensors. Others, such as
# those of CLIP, differ in settings that a file of tensors does not show.
TIMM = re.compile(r"(vit|deit3?)_(tiny|small|base|large|huge)(_distilled)?_patch\d+_\d+(\..*)?")
# names of earlier versions of transformers
LEGACY = {
    r"\.encoder\.layer\.": ".layers.",
    r"attention\.attention\.query\.": "attention.q_proj.",
    r"attention\.attention\.key\.": "attention.k_proj.",
    r"attention\.attention\.value\.": "attention.v_proj.",
    r"attention\.output\.dense\.": "attention.o_proj.",
    r"intermediate\.dense\.": "mlp.fc1.",
    r"(layers\.\d+)\.output\.dense\.": r"\1.mlp.fc2.",
}
DEFAULTS = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "image_size": 224,
    "patch_size": 16, "num_channels": 3,
}  # fmt: skip


class LinearNames(NamedTuple):
    """Names of a linear layer or norm, native and in the source."""

    native: str
    source: str


def activation(foreign: Foreign, name: str) -> Activation:
    """Return the activation that a field of the source's config names; ValueError if unknown."""
    given = foreign.need(name)
    check_choice(name, given, ACTIVATIONS)
    return ACTIVATIONS[given]


def copied(tensors: Tensors, names: list[LinearNames]) -> dict[str, Tensor]:
    """Return weights and biases under native names."""
    return {
        f"{native}.{part}": tensors.take(f"{source}.{part}")
        for native, source in names
        for part in ("weight", "bias")
    }


def merged(tensors: Tensors, prefix: str, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the merged map of queries, keys and values; zeros for biases that are missing."""
    weights = [tensors.take(f"{prefix}.{name}.weight") for name in names]
    biases = [
        tensors.take(f"{prefix}.{name}.bias")
        if f"{prefix}.{name}.bias" in tensors
        else weight.new_zeros(len(weight))
        for name, weight in zip(names, weights, strict=True)
    ]
    return {"in_proj.weight": torch.cat(weights), "in_proj.bias": torch.cat(biases)}


def patch_embedding(tensors: Tensors, name: str) -> dict[str, Tensor]:
    """Return a convolution whose stride is its size as a linear map of flattened patches."""
    return {
        "patchify.proj.weight": tensors.take(f"{name}.weight").flatten(1),
        "patchify.proj.bias": tensors.take(f"{name}.bias"),
    }


def num_heads(foreign: Foreign, width: int) -> int:
    """Return the number of heads: as given, or that of the published model of this width.

    Raises:
        ValueError: If it is neither given nor known.
    """
    heads = foreign.fields.get("num_heads", NUM_HEADS.get(width))
    if heads is None:
        raise ValueError(f"the source of width {width} has no config; num_heads is required")
    return int(heads)


def pair(size: Any) -> tuple[int, int]:
    """Return (height, width) of one number or two."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _of_transformers(foreign: Foreign, kind: str) -> bool:
    return foreign.fields.get("model_type") == kind


def _vit_config(foreign: Foreign) -> ModelConfig:
    foreign.expect(hidden_dropout_prob=0.0, problem_type=(None, "single_label_classification"))
    width, fields = foreign.need("hidden_size"), foreign.fields
    head = "cls_classifier" if _of_transformers(foreign, "deit") else "classifier"
    if head == "cls_classifier" and f"{head}.weight" not in foreign.tensors:
        raise ValueError(
            "the source has no cls_classifier, expected a DeiTForImageClassificationWithTeacher: "
            "other DeiT models of transformers have a distillation token without a head"
        )
    return ImageClassifierConfig(
        image_size=pair(foreign.need("image_size")),
        patch_size=pair(foreign.need("patch_size")),
        channels=foreign.need("num_channels"),
        num_classes=foreign.tensors.shape(f"{head}.weight")[0],
        width=width,
        depth=foreign.need("num_hidden_layers"),
        mixer=SoftmaxMixerConfig(
            num_heads=foreign.need("num_attention_heads"),
            dropout=fields.get("attention_probs_dropout_prob", 0.0),
        ),
        mlp=MLPConfig(
            ratio=foreign.need("intermediate_size") / width,
            activation=activation(foreign, "hidden_act"),
        ),
        position=AbsolutePositionConfig(),
        norm_eps=foreign.need("layer_norm_eps"),
        distillation_token=head == "cls_classifier",
        drop_path=0.0,
    )


def _vit_weights(foreign: Foreign) -> dict[str, Tensor]:
    tensors, prefix = foreign.tensors, foreign.fields["model_type"]
    embeddings = f"{prefix}.embeddings"
    tensors.drop(rf"{embeddings}\.mask_token|{prefix}\.pooler\..*")
    weights = patch_embedding(tensors, f"{embeddings}.patch_embeddings.projection")
    weights |= {
        "class_token": tensors.take(f"{embeddings}.cls_token").flatten(),
        "position.table": tensors.take(f"{embeddings}.position_embeddings").squeeze(0),
    }
    names = [LinearNames("norm", f"{prefix}.layernorm")]
    if prefix == "deit":
        weights["distillation_token"] = tensors.take(f"{embeddings}.distillation_token").flatten()
        names += [
            LinearNames("head", "cls_classifier"),
            LinearNames("distillation_head", "distillation_classifier"),
        ]
    else:
        names.append(LinearNames("head", "classifier"))
    for i in range(foreign.need("num_hidden_layers")):
        native, layer = f"blocks.{i}", f"{prefix}.layers.{i}"
        qkv = merged(tensors, f"{layer}.attention", ("q_proj", "k_proj", "v_proj"))
        weights |= {f"{native}.mixer.{name}": tensor for name, tensor in qkv.items()}
        names += [
            LinearNames(f"{native}.mixer.out_proj", f"{layer}.attention.o_proj"),
            LinearNames(f"{native}.mixer_norm", f"{layer}.layernorm_before"),
            LinearNames(f"{native}.mlp_norm", f"{layer}.layernorm_after"),
            LinearNames(f"{native}.mlp.up_proj", f"{layer}.mlp.fc1"),
            LinearNames(f"{native}.mlp.down_proj", f"{layer}.mlp.fc2"),
        ]
    return weights | copied(tensors, names)


def _of_timm(foreign: Foreign) -> bool:
    names = ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "pos_embed", "cls_token")
    return all(name in foreign.tensors for name in names)


def _timm_config(foreign: Foreign) -> ModelConfig:
    tensors, fields = foreign.tensors, foreign.fields
    name = fields.get("architecture", "vit_base_patch16_224")
    if not TIMM.fullmatch(name):
        raise ValueError(
            f"architecture is {name!r}, expected a plain vit_*, deit_* or deit3_* of timm, such as "
            "vit_base_patch16_224"
        )
    foreign.expect(**{"global_pool": ("token", ""), "mlp.act": "GELU(approximate='none')"})
    known = {"img_size", "patch_size", "in_chans", "num_classes", "global_pool"}
    for argument in fields.get("model_args", {}).keys() - known:
        raise ValueError(f"model_args of the source's config has {argument}, which is unsupported")
    width, channels, *patch = tensors.shape("patch_embed.proj.weight")
    distilled = "dist_token" in tensors
    patches = tensors.shape("pos_embed")[1]
    if math.isqrt(patches) ** 2 != patches:  # a side has at least 2 patches
        patches -= 1 + distilled
    side = math.isqrt(patches)
    if side**2 != patches:
        raise ValueError(f"pos_embed is for {patches} patches, expected those of a square image")
    return ImageClassifierConfig(
        image_size=(side * patch[0], side * patch[1]),
        patch_size=(patch[0], patch[1]),
        channels=channels,
        num_classes=tensors.shape("head.weight")[0],
        width=width,
        depth=tensors.count("blocks."),
        mixer=SoftmaxMixerConfig(num_heads=num_heads(foreign, width)),
        mlp=MLPConfig(ratio=tensors.shape("blocks.0.mlp.fc1.weight")[0] / width),
        position=AbsolutePositionConfig(),
        norm_eps=fields.get("norm_eps", EPS),
        distillation_token=distilled,
        drop_path=0.0,
    )


def _timm_weights(foreign: Foreign) -> dict[str, Tensor]:
    tensors = foreign.tensors
    weights = patch_embedding(tensors, "patch_embed.proj")
    weights["class_token"] = tensors.take("cls_token").flatten()
    names = [LinearNames("norm", "norm"), LinearNames("head", "head")]
    if "dist_token" in tensors:
        weights["distillation_token"] = tensors.take("dist_token").flatten()
        names.append(LinearNames("distillation_head", "head_dist"))
    table = tensors.take("pos_embed").squeeze(0)
    if math.isqrt(len(table)) ** 2 == len(table):  # DeiT III: no positions of prefix tokens
        prefix = 1 + ("dist_token" in tensors)
        table = torch.cat([table.new_zeros(prefix, table.shape[1]), table])
    weights["position.table"] = table
    for i in range(tensors.count("blocks.")):
        block = f"blocks.{i}"
        qkv = merged(tensors, f"{block}.attn", ("qkv",))
        weights |= {f"{block}.mixer.{name}": tensor for name, tensor in qkv.items()}
        names += [
            LinearNames(f"{block}.mixer_norm", f"{block}.norm1"),
            LinearNames(f"{block}.mlp_norm", f"{block}.norm2"),
            LinearNames(f"{block}.mlp.up_proj", f"{block}.mlp.fc1"),
        ]
        for native, source, scale in (
            ("mixer.out_proj", "attn.proj", "ls1.gamma"),
            ("mlp.down_proj", "mlp.fc2", "ls2.gamma"),
        ):
            part = copied(tensors, [LinearNames(f"{block}.{native}", f"{block}.{source}")])
            if f"{block}.{scale}" in tensors:  # fold the scale of the branch into its last map
                gamma = tensors.take(f"{block}.{scale}")
                part = {name: (gamma * tensor.t()).t() for name, tensor in part.items()}
            weights |= part
    return weights | copied(tensors, names)


VISION_SOURCES = (
    Source(
        name="transformers ViTForImageClassification",
        matches=lambda foreign: _of_transformers(foreign, "vit"),
        config=_vit_config,
        weights=_vit_weights,
        defaults=DEFAULTS,
        rename=LEGACY,
    ),
    Source(
        name="transformers DeiTForImageClassificationWithTeacher",
        matches=lambda foreign: _of_transformers(foreign, "deit"),
        config=_vit_config,
        weights=_vit_weights,
        defaults=DEFAULTS,
        rename=LEGACY,
    ),
    Source(
        name="timm vit_*, deit_* and deit3_*",
        matches=_of_timm,
        config=_timm_config,
        weights=_timm_weights,
    ),
)
