"""An image in, one score per class out."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import nn

from onescan.checks import check_choice, check_floating, check_positive
from onescan.configs import ModelConfig
from onescan.layers.basic import GLUConfig, MLPConfig, NormName, build_norm
from onescan.layers.block import Block, init_weights
from onescan.layers.mixers import LightNetMixerConfig, MixerConfig
from onescan.layers.position import PositionConfig, ToeplitzPositionConfig
from onescan.layers.tokens import AttentionPool, Patchify, max_pool, mean_pool
from onescan.shapes import Grid, Hidden, Images, Logits, Pooled

Pool = Literal["class_token", "mean", "mean_with_class_token", "max", "attention"]
WITH_CLASS_TOKEN = ("class_token", "mean_with_class_token")


@dataclass(frozen=True, kw_only=True)
class ImageClassifierConfig(ModelConfig):
    """LightNet's image classifier by default; DeiT's and every ablation by changing fields."""

    image_size: tuple[int, int] = (224, 224)
    """Usual height and width; a model takes any size that its patches divide."""
    channels: int = 3
    """Of the image: 3 for colour, 1 for grey."""
    patch_size: tuple[int, int] = (16, 16)
    """Height and width of the square that becomes one token."""
    num_classes: int = 1000
    """Scores per image."""
    width: int = 192
    """Of a token."""
    depth: int = 12
    """Blocks."""
    mixer: MixerConfig = field(default_factory=LightNetMixerConfig)
    """How tokens exchange what they know."""
    mlp: MLPConfig | None = field(default_factory=GLUConfig)
    """What each token does on its own, after the mixer; None where the mixer sees to that too."""
    position: PositionConfig | None = field(default_factory=ToeplitzPositionConfig)
    """How tokens learn where they are, once, after the embedding; None leaves it out."""
    norm: NormName = "layer"
    """Of every block, but before mixers that normalize what they read, and before the head."""
    pool: Pool = "class_token"
    """What the head reads: a learnt extra token; the mean of all patches, their largest, or one
    weighed by learnt attention; or the mean of all tokens."""
    distillation_token: bool = False
    """A second learnt token, with a head of its own that learns from a teacher."""
    drop_path: float = 0.1
    """Chance that a sample skips a branch of the last block; it grows linearly from 0."""
    init_std: float = 0.02
    """Spread of the first weights of linear maps: DeiT's; narrow models learn faster with more."""

    def check(self) -> None:
        """Raise ValueError for sizes that no network has, or fields that do not go together."""
        check_positive(
            channels=self.channels,
            num_classes=self.num_classes,
            width=self.width,
            depth=self.depth,
            init_std=self.init_std,
            **{f"patch_size[{i}]": size for i, size in enumerate(self.patch_size)},
        )
        if not 0 <= self.drop_path < 1:
            raise ValueError(f"drop_path is {self.drop_path}, expected a chance from 0 to below 1")
        check_choice("pool", self.pool, get_args(Pool))
        mixers = (
            self.mixer.for_layer(i) for i in range(min(self.depth, 2))
        )  # directions alternate
        if self.pool == "class_token" and not any(mixer.prefix_reads_grid for mixer in mixers):
            raise ValueError(
                "pool is 'class_token' with mixers by which the first token reads no patch; "
                "expected pool='mean'"
            )
        if self.distillation_token and self.pool not in WITH_CLASS_TOKEN:
            raise ValueError(
                f"distillation_token is True with pool={self.pool!r}, which has no class token; "
                "expected pool='class_token' or 'mean_with_class_token'"
            )

    def build(self) -> "ImageClassifier":
        """Build the network, with fresh weights from torch's global generator.

        Raises:
            ValueError: what `check` refuses, patches that do not divide the image, or what the
                mixer, the norms and the position refuse.
        """
        self.check()
        return ImageClassifier(self)

    def example_inputs(self) -> tuple[Images]:
        """One black image of the usual size."""
        return (torch.zeros(1, self.channels, *self.image_size),)


class ImageClassifier(nn.Module):
    """Patches -> position -> blocks -> pool -> head, as LightNet's Fig. 3.

    >>> model = ImageClassifierConfig(width=48, depth=2, num_classes=10).build()
    >>> model(torch.zeros(2, 3, 224, 160)).shape  # any size that 16 divides
    torch.Size([2, 10])
    """

    def __init__(self, config: ImageClassifierConfig) -> None:
        super().__init__()
        self.config = config
        width, depth = config.width, config.depth
        self.patchify = Patchify(config.channels, config.patch_size, width)
        shape = self.patchify.grid_shape((config.channels, *config.image_size))
        self.class_token = _token(width) if config.pool in WITH_CLASS_TOKEN else None
        self.position = None
        if config.position is not None:
            grid = Grid(shape, prefix=self.prefix)
            self.position = config.position.build(width=width, grid=grid)
        self.blocks = nn.ModuleList(
            Block(
                width,
                axes=len(shape),
                mixer=config.mixer.for_layer(i),
                mlp=config.mlp,
                norm=config.norm,
                drop_path=config.drop_path * i / max(depth - 1, 1),
            )
            for i in range(depth)
        )
        self.norm = build_norm(config.norm, width)
        self.attention_pool = AttentionPool(width) if config.pool == "attention" else None
        self.head = nn.Linear(width, config.num_classes)
        for part in (self.blocks, self.head):
            part.apply(self._init_weights)
        self.distillation_token = self.distillation_head = None
        if config.distillation_token:
            self.distillation_token = _token(width)
            self.distillation_head = nn.Linear(width, config.num_classes)
            self._init_weights(self.distillation_head)

    @property
    def prefix(self) -> int:
        """Tokens before the patches."""
        return (self.config.pool in WITH_CLASS_TOKEN) + self.config.distillation_token

    def forward(self, images: Images) -> Logits | tuple[Logits, Logits]:
        """Score images of any size that patches divide; `forward_head` says when twice.

        Raises:
            ValueError: another number of channels, or a side that patches do not divide.
        """
        check_floating(images=images)
        return self.forward_head(self.forward_features(images))

    def forward_features(self, images: Images) -> Hidden:
        """The normalized tokens after the last block: class token, distillation token, patches."""
        x, grid = self.embed(images)
        embedding = x
        for block in self.blocks:
            x, _ = block(x, grid, embedding=embedding)
        return self.norm(x)

    def embed(self, images: Images) -> tuple[Hidden, Grid]:
        """The tokens before the first block, and how they lie."""
        x, shape = self.patchify(images)  # B T D
        grid = Grid(shape, prefix=self.prefix)
        for token in (self.distillation_token, self.class_token):
            if token is not None:
                x = torch.cat([token.expand(x.shape[0], 1, -1), x], dim=1)  # B 1+T D
        if self.position is not None:
            x, _ = self.position(x, grid)
        return x, grid

    def forward_head(self, tokens: Hidden) -> Logits | tuple[Logits, Logits]:
        """Class scores from what `forward_features` gave.

        With a distillation token, in training the class head's and the distillation head's; else
        their mean, as in DeiT's code. Its paper, arXiv:2012.12877, Sec. 4, adds up their softmaxes.
        """
        scores = self.head(self.pooled(tokens))
        if self.distillation_head is None:
            return scores
        distilled = self.distillation_head(tokens[:, 1])
        return (scores, distilled) if self.training else (scores + distilled) / 2

    def pooled(self, tokens: Hidden) -> Pooled:
        """What the head reads of the tokens, without what a second head reads."""
        if self.config.pool == "class_token":
            return tokens[:, 0]
        if self.config.distillation_token:  # which has a head of its own
            tokens = torch.cat([tokens[:, :1], tokens[:, 2:]], dim=1)
        if self.attention_pool is not None:
            return self.attention_pool(tokens)
        return max_pool(tokens) if self.config.pool == "max" else mean_pool(tokens)

    def _init_weights(self, module: nn.Module) -> None:
        init_weights(module, std=self.config.init_std)


def _token(width: int) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(width), std=0.02))
