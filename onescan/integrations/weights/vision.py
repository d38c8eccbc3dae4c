"""ViT and DeiT of transformers and timm, as image classifiers with softmax attention."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from onescan.integrations.weights.maps import (
    Fields,
    Names,
    Rule,
    Target,
    batched,
    layers,
    linear,
    num_heads,
    patch_embedding,
    weights_by,
)
from onescan.integrations.weights.source import Foreign, Source
from onescan.layers.basic import EPS, MLPConfig
from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.layers.position import AbsolutePositionConfig
from onescan.models.image_classifier import ImageClassifierConfig

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
    "patch_size": 16, "num_channels": 3, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
# names of native fields, and of native layers -> names in the source
VIT_FIELDS = {
    "channels": "num_channels", "width": "hidden_size", "depth": "num_hidden_layers",
    "mixer.num_heads": "num_attention_heads", "mixer.dropout": "attention_probs_dropout_prob",
    "norm_eps": "layer_norm_eps",
}  # fmt: skip
VIT_LAYERS: Mapping[str, Names] = {
    "mixer.in_proj": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "mixer.out_proj": "attention.o_proj", "mixer_norm": "layernorm_before",
    "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2", "mlp_norm": "layernorm_after",
}  # fmt: skip
TIMM_LAYERS: Mapping[str, Names] = {
    "mixer.in_proj": ("attn.qkv",), "mixer.out_proj": "attn.proj", "mixer_norm": "norm1",
    "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2", "mlp_norm": "norm2",
}  # fmt: skip
VIT = Fields(
    base=ImageClassifierConfig(
        mixer=SoftmaxMixerConfig(),
        mlp=MLPConfig(),
        position=AbsolutePositionConfig(),
        drop_path=0.0,
    ),
    names=VIT_FIELDS,
    others=("image_size", "patch_size", "num_classes", "distillation_token"),
    hidden="intermediate_size",
    activation="hidden_act",
)
IMAGE_AXES = 2


def _vit_model(config: ImageClassifierConfig) -> str:
    distilled = config.distillation_token
    return "DeiTForImageClassificationWithTeacher" if distilled else "ViTForImageClassification"


def _vit_config(foreign: Foreign) -> ImageClassifierConfig:
    foreign.expect(hidden_dropout_prob=0.0, problem_type=(None, "single_label_classification"))
    distilled = foreign.need("model_type") == "deit"
    head = f"{'cls_' * distilled}classifier.weight"
    if head not in foreign.tensors:
        raise ValueError(
            "the source has no classification head, expected a ViTForImageClassification, "
            "DeiTForImageClassification or DeiTForImageClassificationWithTeacher"
        )
    changes = {name: _pair(name, foreign.need(name)) for name in ("image_size", "patch_size")}
    classes, _ = foreign.tensors.shape(head, 2)
    return VIT.read(foreign, {**changes, "num_classes": classes, "distillation_token": distilled})


def _pair(name: str, size: Any) -> list[Any]:
    """Return [height, width] of one number or two."""
    sides = list(size) if isinstance(size, list | tuple) else [size, size]
    if len(sides) != IMAGE_AXES:
        raise ValueError(f"{name} is {size!r} in the source's config, expected one size or two")
    return sides


def _vit_fields(config: ImageClassifierConfig) -> dict[str, Any]:
    fields = VIT.write(config, _vit_model(config))
    if len(config.image_size) != IMAGE_AXES:
        raise ValueError(f"image_size is {config.image_size}, expected {IMAGE_AXES} axes")
    for name in ("image_size", "patch_size"):
        sides = getattr(config, name)
        fields[name] = sides[0] if len(set(sides)) == 1 else list(sides)
    return fields | {"num_labels": config.num_classes}


def _one_head(foreign: Foreign) -> Foreign:
    """Return a DeiT with one head as one with two, whose logits are averaged: 2 W x and 0."""
    name = "classifier"
    if foreign.fields["model_type"] != "deit" or f"{name}.weight" not in foreign.tensors:
        return foreign
    heads = {}
    for part in ("weight", "bias"):
        tensor = foreign.tensors.get(f"{name}.{part}")
        heads[f"cls_{name}.{part}"] = 2 * tensor
        heads[f"distillation_{name}.{part}"] = torch.zeros_like(tensor)
    return foreign.changed(tensors=heads, without=(f"{name}.weight", f"{name}.bias"))


def _vit_rules(config: ImageClassifierConfig) -> Iterator[Rule]:
    model, head = ("deit", "cls_classifier") if config.distillation_token else ("vit", "classifier")
    embeddings = f"{model}.embeddings"
    projection = f"{embeddings}.patch_embeddings.projection"
    yield from patch_embedding(projection, config.channels, config.patch_size)
    yield Rule("class_token", (f"{embeddings}.cls_token",), batched(2))
    yield Rule("position.table", (f"{embeddings}.position_embeddings",), batched(1))
    if config.distillation_token:
        yield Rule("distillation_token", (f"{embeddings}.distillation_token",), batched(2))
        yield from linear("distillation_head", "distillation_classifier")
    for i in range(config.depth):
        yield from layers(f"blocks.{i}", f"{model}.layers.{i}", VIT_LAYERS)
    yield from linear("norm", f"{model}.layernorm")
    yield from linear("head", head)


def _of_timm(foreign: Foreign) -> bool:
    names = ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "pos_embed", "cls_token")
    return all(name in foreign.tensors for name in names)


def _timm_config(foreign: Foreign) -> ImageClassifierConfig:
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
    distilled = "dist_token" in tensors
    width, *_ = tensors.shape("patch_embed.proj.weight", 4)
    return timm_config(
        foreign,
        patches=tensors.shape("pos_embed", 3)[1] - 1 - distilled,
        mixer=SoftmaxMixerConfig(num_heads=num_heads(foreign, width)),
        position=AbsolutePositionConfig(),
        norm_eps=fields.get("norm_eps", EPS),
        distillation_token=distilled,
    )


def timm_config(foreign: Foreign, *, patches: int, **fields: Any) -> ImageClassifierConfig:
    """Return the config of a model with timm's names; its images are square."""
    tensors, side = foreign.tensors, math.isqrt(patches)
    if side**2 != patches:
        raise ValueError(f"pos_embed is for {patches} patches, expected those of a square image")
    width, channels, *patch = tensors.shape("patch_embed.proj.weight", 4)
    return ImageClassifierConfig(
        image_size=(side * patch[0], side * patch[1]),
        patch_size=(patch[0], patch[1]),
        channels=channels,
        num_classes=tensors.shape("head.weight", 2)[0],
        width=width,
        depth=tensors.count("blocks."),
        mlp=MLPConfig(ratio=tensors.shape("blocks.0.mlp.fc1.weight", 2)[0] / width),
        drop_path=0.0,
        **fields,
    )


def timm_rules(config: ImageClassifierConfig) -> Iterator[Rule]:
    """Yield the rules of the tensors with timm's names."""
    yield from patch_embedding("patch_embed.proj", config.channels, config.patch_size)
    yield Rule("class_token", ("cls_token",), batched(2))
    if config.position is not None:
        yield Rule("position.table", ("pos_embed",), batched(1))
    if config.distillation_token:
        yield Rule("distillation_token", ("dist_token",), batched(2))
        yield from linear("distillation_head", "head_dist")
    for i in range(config.depth):
        yield from layers(f"blocks.{i}", f"blocks.{i}", TIMM_LAYERS)
    yield from linear("norm", "norm")
    yield from linear("head", "head")


def _of_deit3(foreign: Foreign) -> Foreign:
    """Fold layer scale into the last maps of branches, and add zeros as positions of the prefix."""
    tensors = foreign.tensors
    changes, scales = {}, []
    for i in range(tensors.count("blocks.")):
        for scale, last in (("ls1.gamma", "attn.proj"), ("ls2.gamma", "mlp.fc2")):
            if f"blocks.{i}.{scale}" not in tensors:
                continue
            gamma = tensors.get(f"blocks.{i}.{scale}")
            scales.append(f"blocks.{i}.{scale}")
            for name in (f"blocks.{i}.{last}.weight", f"blocks.{i}.{last}.bias"):
                changes[name] = (gamma * tensors.get(name).t()).t()
    table = tensors.get("pos_embed")
    if math.isqrt(table.shape[1]) ** 2 == table.shape[1]:  # a side has at least 2 patches
        prefix = 1 + ("dist_token" in tensors)
        changes["pos_embed"] = F.pad(table, (0, 0, prefix, 0))
    return foreign.changed(tensors=changes, without=scales)


VISION_SOURCES = (
    Source(
        name="transformers ViTForImageClassification and DeiTForImageClassification(WithTeacher)",
        matches=lambda foreign: foreign.fields.get("model_type") in ("vit", "deit"),
        config=_vit_config,
        weights=weights_by(
            _vit_rules, _vit_config, unused=r"\w+\.(embeddings\.mask_token|pooler\..*)"
        ),
        defaults=DEFAULTS,
        rename=LEGACY,
        adapt=_one_head,
    ),
    Source(
        name="timm vit_*, deit_* and deit3_*",
        matches=_of_timm,
        config=_timm_config,
        weights=weights_by(timm_rules, _timm_config),
        adapt=_of_deit3,
    ),
)
VISION_TARGET = Target(
    config=ImageClassifierConfig,
    library="transformers",
    model=_vit_model,
    fields=_vit_fields,
    rules=_vit_rules,
    rename=LEGACY,
)
