"""ViT and DeiT of transformers and timm, as image classifiers with softmax attention."""

import math
import re

import torch
from torch import Tensor

from onescan.configs import ModelConfig
from onescan.integrations.weights.maps import (
    LinearNames,
    activation,
    copied,
    merged,
    num_heads,
    pair,
    patch_embedding,
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
    "patch_size": 16, "num_channels": 3,
}  # fmt: skip


def _vit_config(foreign: Foreign) -> ModelConfig:
    foreign.expect(hidden_dropout_prob=0.0, problem_type=(None, "single_label_classification"))
    width, fields = foreign.need("hidden_size"), foreign.fields
    head = "cls_classifier" if fields["model_type"] == "deit" else "classifier"
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
        name="transformers ViTForImageClassification and DeiTForImageClassificationWithTeacher",
        matches=lambda foreign: foreign.fields.get("model_type") in ("vit", "deit"),
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
