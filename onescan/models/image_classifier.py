"""Image classifiers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import nn

from onescan.checks import check_choice, check_floating, check_positive
from onescan.configs import ModelConfig
from onescan.layers.basic import EPS, GLUConfig, MLPConfig, NormName, build_norm
from onescan.layers.block import init_weights
from onescan.layers.mixers import LightNetMixerConfig, MixerConfig
from onescan.layers.position import (
    PositionConfig,
    ToeplitzPosition,
    ToeplitzPositionConfig,
    check_masked_position,
)
from onescan.layers.stack import StackOutput, apply_blocks, build_blocks
from onescan.layers.tokens import (
    AttentionPool,
    Patchify,
    check_sizes,
    masked_pixels,
    max_pool,
    mean_pool,
    prefix_token,
)
from onescan.messages import named_type
from onescan.models.pretrained import Pretrained
from onescan.ops.parallel import is_first_rank, sequence_group
from onescan.ops.toeplitz_position import ToeplitzState
from onescan.shapes import Grid, GridFeatures, GridKeep, Grids, Hidden, Keep, Logits, Pooled

Pool = Literal["class_token", "mean", "mean_with_class_token", "max", "attention"]
WITH_CLASS_TOKEN = ("class_token", "mean_with_class_token")


@dataclass(frozen=True, kw_only=True)
class ImageClassifierConfig(ModelConfig):
    """Config of image classifiers: LightNet by default; DeiT and ablations by changing fields."""

    image_size: tuple[int, ...] = (224, 224)
    """Default size along each axis: one axis for signals, two for images, three for video and
    volumes. Most models accept any size."""
    channels: int = 3
    """Channels of the image: 3 for color, 1 for grayscale."""
    patch_size: tuple[int, ...] = (16, 16)
    """Size of the patch that becomes one token, along each axis of image_size."""
    num_classes: int = 1000
    """Number of classes."""
    width: int = 192
    """Features per token."""
    depth: int = 12
    """Number of blocks."""
    mixer: MixerConfig = field(default_factory=LightNetMixerConfig)
    """Layer that mixes information between tokens."""
    mlp: MLPConfig | None = field(default_factory=GLUConfig)
    """MLP after the mixer, applied to each token; None for mixers that need none."""
    position: PositionConfig | None = field(default_factory=ToeplitzPositionConfig)
    """Position encoding after the embedding; None for no encoding."""
    norm: NormName = "layer"
    """Norm of every block, except before mixers that normalize their input, and before the head."""
    norm_eps: float = EPS
    """Epsilon added to the variance in every norm."""
    pool: Pool = "class_token"
    """Input of the head: a learned extra token; the mean or the maximum over patches; their mean
    weighted by learned attention; or the mean of all tokens, the extra one included."""
    distillation_token: bool = False
    """Add a second learned token and a second head that learns from a teacher."""
    drop_path: float = 0.1
    """Stochastic depth: drop rate of the last block; it increases linearly from 0."""
    init_std: float = 0.02
    """Standard deviation of the initial weights of linear layers; 0.02 in DeiT. Narrow models learn
    faster with a larger value."""

    def check(self) -> None:
        """Raise ValueError if a number is out of range, or fields contradict each other."""
        check_positive(
            channels=self.channels,
            num_classes=self.num_classes,
            width=self.width,
            depth=self.depth,
            norm_eps=self.norm_eps,
            init_std=self.init_std,
        )
        check_sizes(self.image_size, self.patch_size)
        if not 0 <= self.drop_path < 1:
            raise ValueError(f"drop_path is {self.drop_path}, expected 0 or more and less than 1")
        check_choice("pool", self.pool, get_args(Pool))
        mixers = (self.mixer.for_layer(i) for i in range(self.depth))
        if self.pool == "class_token" and not any(mixer.prefix_reads_grid for mixer in mixers):
            raise ValueError(
                "pool is 'class_token', but with this mixer the class token reads no patch; "
                "expected pool='mean'"
            )
        if self.distillation_token and self.pool not in WITH_CLASS_TOKEN:
            raise ValueError(
                f"distillation_token is True with pool={self.pool!r}, which has no class token; "
                "expected pool='class_token' or 'mean_with_class_token'"
            )

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches."""
        return (self.pool in WITH_CLASS_TOKEN) + self.distillation_token

    def check_padding(self) -> None:
        """Raise ValueError if the network cannot read images of mixed sizes in one batch."""
        check_masked_position(self.position)
        self.mixer.check_padding(Grid((1,) * len(self.patch_size), prefix=self.prefix))

    def build(self) -> "ImageClassifier":
        """Build the network with new weights from torch's global generator.

        Raises:
            ValueError: If `check` raises it, or the mixer, the norm or the position rejects its
                config.
        """
        self.check()
        return ImageClassifier(self)

    def example_inputs(self) -> tuple[Grids]:
        """Return one black image of the default size."""
        return (torch.zeros(1, self.channels, *self.image_size),)


class StreamState(NamedTuple):
    """State of `ImageClassifier.stream`; its size does not depend on the number of frames.

    Attributes:
        mixers: State of the mixer of each block.
        position: State of the position encoding, None without one.
        frame_shape: Number of patches along each axis but the first.
    """

    mixers: tuple[Any, ...]
    position: ToeplitzState | None
    frame_shape: tuple[int, ...]


class ImageClassifier(Pretrained, nn.Module):
    """Patches -> position encoding -> blocks -> pool -> head, as in LightNet, Fig. 3.

    >>> model = ImageClassifierConfig(width=48, depth=2, num_classes=10).build()
    >>> model(torch.zeros(2, 3, 224, 150)).shape  # any size
    torch.Size([2, 10])

    `image_size` and `patch_size` set the number of axes, here frames, height and width:

    >>> sizes = {"image_size": (8, 32, 32), "patch_size": (2, 8, 8)}
    >>> video = ImageClassifierConfig(**sizes, width=48, depth=2, num_classes=10).build()
    >>> video(torch.zeros(2, 3, 8, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, config: ImageClassifierConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.patchify = Patchify(config.channels, config.patch_size, width)
        shape = self.patchify.grid_shape((config.channels, *config.image_size))
        self.class_token = _token(width) if config.pool in WITH_CLASS_TOKEN else None
        self.position = None
        grid = Grid(shape, prefix=self.prefix)
        if config.position is not None:
            self.position = config.position.build(width=width, grid=grid)
        self.blocks, self.lower_bounds = build_blocks(
            config.depth, width, axes=len(shape), mixer=config.mixer.for_grid(grid), mlp=config.mlp,
            norm=config.norm, norm_eps=config.norm_eps, drop_path=config.drop_path,
        )  # fmt: skip
        self.norm = build_norm(config.norm, width, eps=config.norm_eps)
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
        """Number of tokens before the patches."""
        return self.config.prefix

    @property
    def own_prefix(self) -> int:
        """Number of tokens before the patches on this rank: 0 except on the first rank."""
        return self.prefix if is_first_rank() else 0

    def forward(
        self, images: Grids, keep: GridKeep | None = None
    ) -> Logits | tuple[Logits, Logits]:
        """Compute class logits; see `forward_head` for the return value.

        Args:
            images: Grids of any size, of shape [B, channels, *sides]. If a side is not a
                multiple of the patch size, it is padded with zeros.
            keep: True for real pixels and False for padding, of shape [B, *sides], for images of
                mixed sizes in one batch; `onescan.inputs.pad_images` returns it. The real pixels of
                an image must form a box that begins at index 0. The logits equal those of each
                image alone at its own size. Padding may hold any values, even NaN.

        Raises:
            ValueError: If the images are not floats, the number of channels differs, a side is 0,
                the model cannot read padded images (absolute positions, diffusion in row-major
                order, or a class token in the middle) or, on a CPU, real pixels do not form such a
                box.
        """
        images, token_keep = self._without_padding(images, keep)
        x = self._through_blocks(images, token_keep).x
        return self.forward_head(self.norm(x), token_keep)

    def forward_features(self, images: Grids, keep: GridKeep | None = None) -> Hidden:
        """Return the normalized tokens of the last block, [B, prefix + patches, width].

        The first `prefix` tokens are the class token and the distillation token, if the model has
        them. The patches follow in row-major order; `forward_grid` returns them as a grid. Features
        of padding are meaningless.

        Args:
            images: As in `forward`.
            keep: As in `forward`.
        """
        return self.norm(self._through_blocks(*self._without_padding(images, keep)).x)

    def forward_grid(self, images: Grids, keep: GridKeep | None = None) -> GridFeatures:
        """Return the normalized patches of the last block as a grid, [B, width, *grid].

        It contains no prefix tokens. A 1 x 1 convolution on it is a segmentation head. Arguments
        are those of `forward`; features of padding are meaningless.

        >>> model = ImageClassifierConfig(width=48, depth=2, num_classes=10).build()
        >>> model.forward_grid(torch.zeros(2, 3, 224, 160)).shape
        torch.Size([2, 48, 14, 10])
        """
        (grid,) = self.forward_intermediates(
            images, 1, norm=True, intermediates_only=True, keep=keep
        )
        return grid

    def stream(self, images: Grids, state: StreamState | None = None) -> tuple[Hidden, StreamState]:
        """Read the next frames of a video, or the next rows of an image, in constant memory.

        Only for causal models without prefix tokens, for example `pool="mean"` with
        `LightNetMixerConfig(direction="forward")`, and without positions or with one-directional
        MD-TPE. In blockwise causal models, such as those with
        `LightNetMixerConfig(causal_block=n)`, each part must consist of whole blocks.

        Args:
            images: The next part along the first axis, [B, channels, *sides].
            state: State returned for the part before it; None at the beginning.

        Returns:
            The normalized tokens of this part, and the state after it. All parts' tokens together
            equal `forward_features` of the whole; `forward_head` computes logits from tokens.

        Raises:
            ValueError: If the model cannot stream, the part ends within a block, or the sizes of
                the other axes have changed.

        >>> config = ImageClassifierConfig(
        ...     image_size=(8, 32, 32), patch_size=(1, 8, 8), width=48, depth=2, pool="mean",
        ...     mixer=LightNetMixerConfig(direction="forward"),
        ... )
        >>> model, state = config.build(), None
        >>> for frame in torch.zeros(1, 3, 8, 32, 32).split(1, dim=2):
        ...     tokens, state = model.stream(frame, state)
        >>> tokens.shape
        torch.Size([1, 16, 48])
        """
        check_floating(images=images)
        per_block = self._check_streams()
        with self.patchify.known_lengths(images, prefix=0):
            return self._read(images, state, per_block)

    def _read(
        self, images: Grids, state: Any, per_block: int
    ) -> tuple[Hidden, StreamState]:  # Any: user input
        """Read the next part of an image, in blocks of `per_block` patches; see `stream`."""
        x, shape = self.patchify(images)
        side, patch = images.shape[2], self.patchify.patch_size[0]
        if side % patch:  # the next part would begin after the zeros that complete the patch
            raise ValueError(
                f"images have size {side} along the first axis, expected a multiple of {patch}, "
                "the size of a patch"
            )
        group = sequence_group(None)
        patches = x.shape[1] if group is None else sum(group.lengths(x))
        if patches % per_block:
            raise ValueError(
                f"images have {patches} patches, expected a multiple of {per_block}, the block size"
            )
        if state is None:
            state = StreamState((None,) * len(self.blocks), None, shape[1:])
        elif not isinstance(state, StreamState):
            raise ValueError(f"state is {named_type(state)}, expected a StreamState")
        if state.frame_shape != shape[1:]:
            raise ValueError(
                f"images have {shape[1:]} patches per step, expected {state.frame_shape}, as before"
            )
        if len(state.mixers) != len(self.blocks):
            raise ValueError(
                f"state is from a model with {len(state.mixers)} blocks, expected "
                f"{len(self.blocks)}"
            )
        grid, position = Grid(shape), None
        if self.position is not None:
            x, position = self.position(x, grid, state.position, return_state=True)
        x, mixers, _ = apply_blocks(self.blocks, self.lower_bounds, x, grid, states=state.mixers)
        return self.norm(x), StreamState(mixers, position, shape[1:])

    def _check_streams(self) -> int:
        """Return the block size of a stream, in patches.

        Raises:
            ValueError: If parts of an image cannot be read one after another.
        """
        mixers = [self.config.mixer.for_layer(i) for i in range(len(self.blocks))]
        growing = next((mixer for mixer in mixers if mixer.state_grows), None)
        obstacle = None
        blocks = [mixer.state_block for mixer in mixers]
        if None in blocks:
            obstacle = "a mixer that is not causal"
        elif growing is not None:
            obstacle = f"{named_type(growing)}, whose state grows with every token"
        elif self.prefix:
            obstacle = f"{self.prefix} prefix tokens, expected none, as with pool='mean'"
        elif isinstance(self.position, ToeplitzPosition) and not self.position.has_state:
            obstacle = "a position encoding with bidirectional=True or joint=True"
        elif self.position is not None and not isinstance(self.position, ToeplitzPosition):
            obstacle = f"position {type(self.position).__name__}, expected ToeplitzPosition or None"
        if obstacle is not None:
            raise ValueError(f"stream was called on a model with {obstacle}")
        return math.lcm(*(block or 1 for block in blocks))

    def forward_intermediates(
        self,
        x: Grids,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        keep: GridKeep | None = None,
    ) -> Any:
        """Return the normalized tokens after the last block, and the patches after some blocks.

        Arguments and results are those of timm's models, except for `keep`.

        Args:
            x: Images.
            indices: Indices of blocks, from the end if negative; or the number of last blocks; or
                None for all.
            return_prefix_tokens: Whether to return pairs of patches and prefix tokens, if there are
                any.
            norm: Whether to normalize the patches.
            stop_early: Whether to skip the blocks after the last selected one.
            output_fmt: "NCHW" returns patches as a grid, [B, width, *grid] with as many axes as the
                images; "NLC" as a sequence in row-major order, [B, patches, width].
            intermediates_only: Whether to leave out the tokens after the last block.
            keep: As in `forward`; features of padding are meaningless.

        Returns:
            The tokens after the last block (or the last selected one, if `stop_early`), and a list
            with one entry per selected block; only the list if `intermediates_only`.

        Raises:
            ValueError: If an index is out of range, or the format is unknown.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt is {output_fmt!r}, expected 'NCHW' or 'NLC'")
        selected = chosen_blocks(indices, len(self.blocks))
        stop = max(selected) + 1 if stop_early else None
        x, token_keep = self._without_padding(x, keep)
        last, _, after = self._through_blocks(x, token_keep, selected=selected, stop=stop)
        if norm:
            after = [self.norm(tokens) for tokens in after]
        prefixes = [tokens[:, : self.own_prefix] for tokens in after]
        patches = [tokens[:, self.own_prefix :] for tokens in after]
        if output_fmt == "NCHW":
            shape = self.patchify.grid_shape(tuple(x.shape[1:]))
            patches = [tokens.mT.unflatten(-1, shape).contiguous() for tokens in patches]
        with_prefix = return_prefix_tokens and self.prefix > 0
        intermediates = list(zip(patches, prefixes, strict=True)) if with_prefix else patches
        return intermediates if intermediates_only else (self.norm(last), intermediates)

    def _through_blocks(
        self,
        images: Grids,
        keep: Keep | None = None,
        *,
        selected: Sequence[int] = (),
        stop: int | None = None,
    ) -> StackOutput:
        """Return the tokens after the last block before `stop`, and after `selected` blocks."""
        with self.patchify.known_lengths(images, prefix=self.prefix):
            x, grid = self.embed(images, keep)
            return apply_blocks(
                self.blocks[:stop], self.lower_bounds, x, grid, keep=keep, selected=selected
            )

    def embed(self, images: Grids, kept: Keep | None = None) -> tuple[Hidden, Grid]:
        """Return the tokens before the first block, and their grid; `kept` tokens are real."""
        x, shape = self.patchify(images)  # B T D
        grid = Grid(shape, prefix=self.own_prefix)
        count = int(is_first_rank())
        for token in (self.distillation_token, self.class_token):
            if token is not None:
                x = torch.cat([token.expand(x.shape[0], count, -1), x], dim=1)  # B 1+T D
        if self.position is not None:
            x, _ = self.position(x, grid, keep=kept)
        return x, grid

    def _without_padding(self, images: Grids, keep: GridKeep | None) -> tuple[Grids, Keep | None]:
        """Set padding to zero, and return which tokens are real, prefix included; see `forward`."""
        check_floating(images=images)
        if keep is None:
            return images, None
        self.config.check_padding()
        images, patches = masked_pixels(images, keep, self.patchify.patch_size)
        return images, F.pad(patches, (self.own_prefix, 0), value=True)

    def forward_head(
        self, tokens: Hidden, keep: Keep | None = None
    ) -> Logits | tuple[Logits, Logits]:
        """Compute class logits from the tokens of `forward_features`, where `keep` is True.

        With a distillation token, return the logits of both heads in training, and their mean
        otherwise, as in DeiT's code. DeiT's paper, arXiv:2012.12877, Sec. 4, adds the softmax
        outputs instead.
        """
        scores = self.head(self.pooled(tokens, keep))
        if self.distillation_head is None:
            return scores
        distilled = self.distillation_head(prefix_token(tokens, 1))
        return (scores, distilled) if self.training else (scores + distilled) / 2

    def pooled(self, tokens: Hidden, keep: Keep | None = None) -> Pooled:
        """Pool real tokens into the input of the class head."""
        if self.config.pool == "class_token":
            return prefix_token(tokens, 0)
        if self.config.distillation_token and is_first_rank():
            # only the distillation head reads this token
            tokens = torch.cat([tokens[:, :1], tokens[:, 2:]], dim=1)
            keep = None if keep is None else keep[:, 1:]
        if self.attention_pool is not None:
            return self.attention_pool(tokens, keep)
        return max_pool(tokens, keep) if self.config.pool == "max" else mean_pool(tokens, keep)

    def _init_weights(self, module: nn.Module) -> None:
        init_weights(module, std=self.config.init_std)


def _token(width: int) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(width), std=0.02))


def chosen_blocks(indices: int | Sequence[int] | None, depth: int) -> list[int]:
    """Return indices of blocks, counted from 0; see `ImageClassifier.forward_intermediates`."""
    if indices is None:
        return list(range(depth))
    if isinstance(indices, int):
        indices = range(-indices, 0)
    selected = [i + depth if i < 0 else i for i in indices]
    if not selected or not all(0 <= i < depth for i in selected):
        raise ValueError(
            f"indices is {indices}, expected indices from {-depth} to {depth - 1}, or a number of "
            f"last blocks from 1 to {depth}"
        )
    return selected
