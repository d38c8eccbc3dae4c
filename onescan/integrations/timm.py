"""Image classifiers as models of timm. Importing this module registers them by name.

The presets have no trained weights. The image classifiers of `onescan.zoo` are registered with the
prefix "onescan_": `timm.create_model("onescan_digits_lightnet", pretrained=True)`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch

try:
    from timm.models import build_model_with_cfg, register_model
except ModuleNotFoundError as error:
    from onescan.messages import missing_package

    raise missing_package("onescan.integrations.timm", "timm", "timm", error) from error
from torch import Tensor, nn
from torch.fx import Proxy

from onescan import configs, zoo
from onescan.checkpoint.run_folder import read_config
from onescan.checkpoint.weights import WEIGHTS
from onescan.configs import ModelConfig
from onescan.layers.block import Block
from onescan.layers.position import AbsolutePosition
from onescan.layers.tokens import max_pool, mean_pool, prefix_token
from onescan.models.image_classifier import (
    ImageClassifier,
    ImageClassifierConfig,
    chosen_blocks,
)
from onescan.models.presets import PRESETS, preset
from onescan.shapes import Grid, Grids, Hidden, Pooled

# timm has its own DeiT and ViT, and prepares images only
IMAGE_AXES = 2
NAMES = [
    name
    for name, model in PRESETS.items()
    if isinstance(model.config, ImageClassifierConfig)
    and len(model.config.image_size) == IMAGE_AXES
    and not name.startswith(("deit_", "vit_"))
]


def _trained() -> dict[str, tuple[ImageClassifierConfig, dict[str, Any]]]:
    """Return config and preprocessing of each trained classifier of images, by timm's name."""
    classifiers = {}
    for name in zoo.names():
        folder = zoo.FOLDER / name  # timm checks no digests, but loads only safetensors
        manifest = read_config(folder)
        model, format = manifest["run"]["model"], manifest["format"]
        config = configs.from_dict(ModelConfig, model)  # type: ignore[type-abstract]
        if not isinstance(config, ImageClassifierConfig) or "crop" not in format:
            continue  # not a classifier of images
        classifiers[f"onescan_{name}"] = (
            config,
            {
                "file": str(folder / WEIGHTS),
                "input_size": (config.channels, *config.image_size),
                "num_classes": config.num_classes,
                "crop_pct": format["crop"] or 1.0,
                "crop_mode": "center" if format["crop"] else "squash",
                "interpolation": "bicubic",
                "mean": tuple(format["mean"]),
                "std": tuple(format["std"]),
                "classifier": "head",
            },
        )
    return classifiers


TRAINED = _trained()
default_cfgs: dict[str, dict[str, Any]] = {
    name: {
        "input_size": (3, 224, 224),
        "num_classes": 1000,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "patchify.proj",
        "classifier": "head",
    }
    for name in NAMES
} | {name: preprocessing for name, (_, preprocessing) in TRAINED.items()}
"""Preprocessing of images; timm looks for this name in the module of a registered model."""

INSTEAD = "use torch.export, as onescan.integrations.export does"
FIELDS = {"img_size": "image_size", "in_chans": "channels", "drop_path_rate": "drop_path"}
DEFAULT_POOLS = {
    "class_token": "token",
    "mean": "avg",
    "mean_with_class_token": "avg",
    "max": "max",
    "attention": "map",
}


def _entrypoint(name: str) -> Callable[..., nn.Module]:
    """Return the function that timm calls to build a model."""

    def create(pretrained: bool = False, **options: Any) -> nn.Module:
        features = {"out_indices": 3, "feature_cls": "getter"}
        build = partial(_build, name)
        return build_model_with_cfg(
            build,
            name,
            pretrained,
            pretrained_filter_fn=_adapt_channels,
            feature_cfg=features,
            **options,
        )

    create.__name__ = create.__qualname__ = name
    return create


def _build(
    name: str,
    *,
    num_classes: int,
    global_pool: str | None = None,
    drop_rate: float = 0.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **fields: Any,
) -> "TimmImageClassifier":
    for in_timm, native in FIELDS.items():
        if native in fields:
            raise ValueError(
                f"{native} is {fields[native]!r}, expected {in_timm} instead, which is timm's name"
            )
        if in_timm in fields:
            fields[native] = fields.pop(in_timm)
    fields["num_classes"] = num_classes or 1  # the head for 1 class is removed below
    if name in TRAINED:
        trained = TRAINED[name][0]
        sizes = {
            key: _sizes(fields[key], len(trained.image_size))
            for key in ("image_size", "patch_size")
            if key in fields
        }
        config = configs.replace(trained, fields | sizes)
    else:
        config = cast(ImageClassifierConfig, preset(name, **fields))
    if config.distillation_token:
        raise ValueError("distillation_token is True, expected False: timm reads one output")
    config.check()
    model = TimmImageClassifier(config, drop_rate=drop_rate)
    if global_pool is not None or not num_classes:
        model.reset_classifier(num_classes, global_pool)
    return model.to(device=device, dtype=dtype)


def _adapt_channels(weights: dict[str, Tensor], model: "TimmImageClassifier") -> dict[str, Tensor]:
    """Adapt the patch embedding of trained weights to the channels of a model.

    A gray image, repeated over the channels, has the same embedding for any number of channels.
    """
    name = "patchify.proj.weight"
    area, channels = math.prod(model.config.patch_size), model.in_chans
    weight = weights[name]
    if weight.shape[1] % area or weight.shape[1] == channels * area:
        return weights  # another patch size, which the loading of weights reports
    # Channels come before the pixels of a patch. Stored weights may have half precision.
    of_gray = weight.float().unflatten(1, (-1, area)).sum(1)
    return weights | {name: of_gray.repeat(1, channels) / channels}


class PatchEmbed(NamedTuple):
    """Sizes of an image and its patches, with timm's names."""

    img_size: tuple[int, ...]
    patch_size: tuple[int, ...]
    grid_size: tuple[int, ...]

    @property
    def num_patches(self) -> int:
        """Number of patches of an image of the default size."""
        return Grid(self.grid_size).tokens


class TimmImageClassifier(ImageClassifier):
    """An image classifier with the methods and attributes of timm's models, and the same weights.

    As in timm, the pooling before the head can be changed: `global_pool` is "token", "avg", "max",
    "avgmax", "map" for attention pooling, or "" for all tokens. Means and maxima are computed over
    patches, and over the class token too if `pool_include_prefix` is True. The config's `pool`
    determines the default, and which weights exist.
    """

    def __init__(self, config: ImageClassifierConfig, *, drop_rate: float = 0.0) -> None:
        super().__init__(config)
        self.head_drop = nn.Dropout(drop_rate)
        self.num_classes, self.in_chans = config.num_classes, config.channels
        self.num_features = self.head_hidden_size = self.embed_dim = config.width
        self.num_prefix_tokens = self.prefix
        self.global_pool = DEFAULT_POOLS[config.pool]
        self.pool_include_prefix = config.pool == "mean_with_class_token"
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": config.width, "reduction": max(config.patch_size)}
            for i in range(config.depth)
        ]

    @property
    def patch_embed(self) -> PatchEmbed:
        """Sizes of images and patches; the module itself is `patchify`."""
        size, patch = self.config.image_size, self.config.patch_size
        return PatchEmbed(size, patch, self.patchify.grid_shape((self.in_chans, *size)))

    def forward(self, x: Grids | Proxy) -> Tensor:  # type: ignore[override]  # as in timm, without a mask
        """Compute class logits, per token if `global_pool` is "", or features without a head."""
        if isinstance(x, Proxy):
            raise NotImplementedError(f"torch.fx cannot trace this model; {INSTEAD}")
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            raise NotImplementedError(f"torch.jit.trace cannot trace this model; {INSTEAD}")
        return self.forward_head(self.forward_features(x))

    def forward_head(  # type: ignore[override]  # as in timm
        self, x: Hidden, pre_logits: bool = False
    ) -> Tensor:
        """Compute class logits from `forward_features`; with `pre_logits`, the head's input."""
        x = self.head_drop(self._pooled(x))
        return x if pre_logits else self.head(x)

    def __prepare_scriptable__(self) -> "TimmImageClassifier":  # called by torch.jit.script
        raise NotImplementedError(f"torch.jit.script cannot compile this model; {INSTEAD}")

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Remove the blocks after the last selected one; return the indices from the start."""
        chosen = chosen_blocks(indices, len(self.blocks))
        self.blocks = self.blocks[: max(chosen) + 1]
        if prune_norm:
            self.register_module("norm", nn.Identity())
        if prune_head:
            self.reset_classifier(0, "")
        return chosen

    def get_classifier(self) -> nn.Module:
        """Return the classification head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a new one, or remove it if num_classes is 0.

        Raises:
            ValueError: If num_classes is negative, or the model lacks the weights of global_pool.
        """
        if num_classes < 0:
            raise ValueError(f"num_classes is {num_classes}, expected 0 or more")
        if global_pool is not None:
            self._set_pool(global_pool)
        self.num_classes = num_classes
        if num_classes == 0:
            self.register_module("head", nn.Identity())
            return
        like = next(self.parameters())
        self.head = nn.Linear(self.embed_dim, num_classes, device=like.device, dtype=like.dtype)
        self._init_weights(self.head)
        self.config = replace(self.config, num_classes=num_classes)

    def set_input_size(
        self,
        img_size: int | tuple[int, ...] | None = None,
        patch_size: int | tuple[int, ...] | None = None,
    ) -> None:
        """Change the default image size, and resize a table of absolute positions to it.

        Raises:
            ValueError: If patch_size differs from the model's, or the mixer's weights fit one size
                only.
        """
        axes = len(self.config.image_size)
        if patch_size is not None and _sizes(patch_size, axes) != self.config.patch_size:
            expected = f"expected the model's {self.config.patch_size}"
            raise ValueError(f"patch_size is {patch_size}, {expected}")
        if img_size is None:
            return
        size = _sizes(img_size, axes)
        grid = Grid(self.patchify.grid_shape((self.in_chans, *size)), prefix=self.prefix)
        if size != self.config.image_size and not self.config.mixer.fits_any_grid:
            expected = f"expected {self.config.image_size}, which the mixer's weights fit"
            raise ValueError(f"img_size is {img_size}, {expected}")
        if isinstance(self.position, AbsolutePosition):
            with torch.no_grad():
                nothing = self.position.table.new_zeros(1, grid.tokens, self.embed_dim)
                table, _ = self.position(nothing, grid)
            learned = self.position.table.requires_grad
            self.position.table = nn.Parameter(table[0], requires_grad=learned)
            self.position.grid = grid
        self.config = replace(self.config, image_size=size)
        self._traits = {**getattr(self, "_traits", {}), "img_size": size}  # saved by timm

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of blocks in the backward pass, or store them."""
        for module in self.modules():
            if isinstance(module, Block):
                module.recompute = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that group parameter names, from the stem to the last block."""
        return {
            "stem": r"^(?:patchify|class_token|position|lower_bounds)",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^(?:norm|attention_pool)", (99999,))],
        }

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay, besides norms and biases."""
        return {
            f"{path}.{name}"
            for path, module in self.named_modules()
            if path
            for name in getattr(module, "no_weight_decay", ())
            if hasattr(module, name)  # some depend on the config
        }

    def _set_pool(self, global_pool: str) -> None:
        mixers = [self.config.mixer.for_layer(i) for i in range(self.config.depth)]
        token_reads = self.prefix > 0 and any(mixer.prefix_reads_grid for mixer in mixers)
        possible = ["", "avg", "max", "avgmax"]
        possible += ["token"] * token_reads
        possible += ["map"] * (self.attention_pool is not None)
        if global_pool not in possible:
            raise ValueError(f"global_pool is {global_pool!r}, expected one of {possible}")
        if global_pool != "map":
            self.attention_pool = None
        self.global_pool = global_pool

    def _pooled(self, tokens: Hidden) -> Hidden | Pooled:
        if self.global_pool == "":
            return tokens
        if self.global_pool == "token":
            return prefix_token(tokens, 0)
        if not self.pool_include_prefix:
            tokens = tokens[:, self.own_prefix :]
        if self.attention_pool is not None:
            return self.attention_pool(tokens)
        if self.global_pool == "avgmax":
            return (mean_pool(tokens) + max_pool(tokens)) / 2
        return max_pool(tokens) if self.global_pool == "max" else mean_pool(tokens)


def _sizes(size: int | Sequence[int], axes: int) -> tuple[int, ...]:
    return (size,) * axes if isinstance(size, int) else tuple(size)


for _name in default_cfgs:
    register_model(_entrypoint(_name))
