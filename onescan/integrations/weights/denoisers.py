"""DiT of diffusers and the original code, as denoisers with softmax attention.

DiT's position encoding stores columns before rows, and this package's rows before columns. No norm
of DiT has parameters, so the halves of all token vectors can be exchanged instead, by exchanging
the halves of the maps that write and read them.

Both sources sort the pixels of an output patch by row, column and channel, and this package by
channel, row and column. Both have cosines before sines in their timestep embedding.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from onescan.checks import check_choice, check_whole
from onescan.configs import replace
from onescan.integrations.weights.maps import (
    SAME,
    Fields,
    Layout,
    Rule,
    Target,
    activation,
    linear,
    num_heads,
    patch_embedding,
    weights_by,
)
from onescan.integrations.weights.source import Foreign, Source
from onescan.layers.basic import Activation, MLPConfig
from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.layers.position import SinusoidalPositionConfig
from onescan.models.denoiser import DenoiserConfig

# names of the original code -> names of diffusers
ORIGINAL = {
    r"^blocks\.": "transformer_blocks.",
    r"^x_embedder\.": "pos_embed.",
    r"^final_layer\.adaLN_modulation\.1\.": "proj_out_1.",
    r"^final_layer\.linear\.": "proj_out_2.",
    r"\.adaLN_modulation\.1\.": ".norm1.linear.",
    r"\.attn\.proj\.": ".attn1.to_out.0.",
    r"\.attn\.qkv\.": ".attn1.to_qkv.",
    r"\.mlp\.fc1\.": ".ff.net.0.proj.",
    r"\.mlp\.fc2\.": ".ff.net.2.",
    r"^t_embedder\.mlp\.0\.": "transformer_blocks.0.norm1.emb.timestep_embedder.linear_1.",
    r"^t_embedder\.mlp\.2\.": "transformer_blocks.0.norm1.emb.timestep_embedder.linear_2.",
    r"^y_embedder\.": "transformer_blocks.0.norm1.emb.class_embedder.",
}
# names of activations in diffusers -> names in `MLPConfig`
ACTIVATIONS: Mapping[str, Activation] = {"gelu-approximate": "gelu_tanh", "gelu": "gelu"}
CLASSES = (  # of diffusers
    "DiTTransformer2DModel",
    "Transformer2DModel",  # before DiTTransformer2DModel
)
DIT_BASE = DenoiserConfig(
    mixer=SoftmaxMixerConfig(),
    mlp=MLPConfig(),
    position=SinusoidalPositionConfig(),
    condition="adaln_zero",
    inclusive_frequencies=True,
)
# names of native fields -> names in diffusers
DIT_FIELDS = {
    "channels": "in_channels", "depth": "num_layers", "mixer.num_heads": "num_attention_heads",
    "num_classes": "num_embeds_ada_norm", "mlp_norm_eps": "norm_eps",
}  # fmt: skip
DIT = Fields(
    base=DIT_BASE,
    names=DIT_FIELDS,
    others=("image_size", "patch_size", "width", "mlp.activation", "learn_sigma"),
)
EMBEDDING = "transformer_blocks.{}.norm1.emb"  # of timesteps and classes, in each block
PATCHES, FINAL = "pos_embed.proj.weight", "proj_out_2.weight"
MODULATION, MLP = (
    "transformer_blocks.0.norm1.linear.weight",
    "transformer_blocks.0.ff.net.0.proj.weight",
)
SINES = r"pos_embed(\.pos_embed)?"  # of positions
TABLE = "class_embedder.embedding_table.weight"


def _swap(tensor: Tensor, *, dim: int = 0, parts: int = 1) -> Tensor:
    """Exchange the halves of each of some equal parts along a dimension; its own inverse."""
    halves = tensor.unflatten(dim, (parts, 2, -1))
    return halves.flip(dim + 1).flatten(dim, dim + 2)


def _swapped(*, dim: int = 0, parts: int = 1) -> Layout:
    swap = partial(_swap, dim=dim, parts=parts)
    return Layout(swap, swap)


def _exchanged(rows: int) -> Layout:
    """Return the layout of rows sorted by pixel and channel, natively by channel and pixel."""

    def exchange(x: Tensor, shape: tuple[int, int]) -> Tensor:
        return x.unflatten(0, shape).transpose(0, 1).flatten(0, 1)

    return Layout(partial(exchange, shape=(rows, -1)), partial(exchange, shape=(-1, rows)))


READS, WRITES = _swapped(dim=1), _swapped()  # layouts of maps from and to token vectors


def _is_dit(foreign: Foreign) -> bool:
    return {MODULATION, FINAL} <= set(foreign.tensors)


def _of_diffusers(foreign: Foreign) -> bool:
    kind = foreign.fields.get("_class_name", foreign.fields.get("model_class"))
    return kind in CLASSES and _is_dit(foreign)


def _dit(foreign: Foreign, changes: Mapping[str, Any]) -> DenoiserConfig:
    """Return a config with the sizes of the tensors."""
    tensors = foreign.tensors
    width, channels, side, _ = tensors.shape(PATCHES)
    out_channels = tensors.shape(FINAL)[0] // side**2
    if out_channels not in (channels, 2 * channels):
        raise ValueError(
            f"out_channels is {out_channels} in the source, expected {channels} or {2 * channels}"
        )
    sizes = {
        "channels": channels,
        "patch_size": (side, side),
        "num_classes": tensors.shape(f"{EMBEDDING.format(0)}.{TABLE}")[0] - 1,
        "width": width,
        "depth": tensors.count("transformer_blocks."),
        "learn_sigma": out_channels == 2 * channels,
    }
    return replace(DIT_BASE, {**sizes, **changes})


def _diffusers_config(foreign: Foreign) -> DenoiserConfig:
    foreign.expect(
        norm_type="ada_norm_zero",
        norm_elementwise_affine=False,
        dropout=0.0,
        upcast_attention=False,
    )
    side = foreign.need("sample_size")
    changes = {
        "image_size": (side, side),
        "mixer.num_heads": foreign.need("num_attention_heads"),
        "mlp.activation": activation(foreign, "activation_fn", ACTIVATIONS),
        "mlp_norm_eps": foreign.need("norm_eps"),
    }
    return _dit(foreign, changes)


def _original_config(foreign: Foreign) -> DenoiserConfig:
    foreign.expect(**{"mlp.act": "GELU(approximate='tanh')"})
    width, _, patch, _ = foreign.tensors.shape(PATCHES)
    side = math.isqrt(foreign.tensors.shape("pos_embed")[1]) * patch
    changes = {
        "image_size": (side, side),
        "mixer.num_heads": num_heads(foreign, width),
        "mlp.ratio": foreign.tensors.shape(MLP)[0] / width,
        "mlp.activation": "gelu_tanh",
        "inclusive_frequencies": False,
    }
    return _dit(foreign, changes)


def _fields(config: Any) -> dict[str, Any]:
    check_whole(1, num_classes=config.num_classes)
    fields = DIT.write(config, CLASSES[0])
    for name in ("image_size", "patch_size"):
        first, *others = sides = getattr(config, name)
        if others != [first]:
            raise ValueError(f"{name} is {sides}, expected two equal sides, as in {CLASSES[0]}")
    known = {native: name for name, native in ACTIVATIONS.items()}
    check_choice("mlp.activation", config.mlp.activation, known)
    return fields | {
        "attention_head_dim": config.width // config.mixer.num_heads,
        "sample_size": config.image_size[0],
        "patch_size": config.patch_size[0],
        "out_channels": config.channels * (1 + config.learn_sigma),
        "activation_fn": known[config.mlp.activation],
    }


def _rules(
    config: DenoiserConfig, qkv: tuple[str, ...] = ("to_q", "to_k", "to_v")
) -> Iterator[Rule]:
    yield from patch_embedding("pos_embed.proj", config.channels, config.patch_size, WRITES)
    for i in range(config.depth):
        native, layer = f"blocks.{i}", f"transformer_blocks.{i}"
        maps = tuple(f"{layer}.attn1.{name}" for name in qkv)
        yield from linear(f"{native}.mixer.in_proj", maps, READS, bias=SAME)
        yield from linear(f"{native}.mixer.out_proj", f"{layer}.attn1.to_out.0", WRITES)
        yield from linear(f"{native}.mlp.up_proj", f"{layer}.ff.net.0.proj", READS, bias=SAME)
        yield from linear(f"{native}.mlp.down_proj", f"{layer}.ff.net.2", WRITES)
        yield from linear(f"{native}.modulation.proj", f"{layer}.norm1.linear", _swapped(parts=6))
    yield from linear("modulation.proj", "proj_out_1", _swapped(parts=2))
    pixels = _exchanged(math.prod(config.patch_size))
    yield from linear("unpatchify.proj", "proj_out_2", pixels.then(READS), bias=pixels)
    # Each block of diffusers has an embedding of timesteps and classes, with equal weights.
    blocks = range(config.depth)
    for name, source, layout in (("in", "linear_1", READS), ("out", "linear_2", SAME)):
        first, *copies = (f"{EMBEDDING.format(i)}.timestep_embedder.{source}" for i in blocks)
        yield from linear(f"time.{name}_proj", first, layout, bias=SAME, copies=copies)
    first, *copies = (f"{EMBEDDING.format(i)}.{TABLE}" for i in blocks)
    yield Rule("label.table.weight", (first,), copies=tuple(copies))


DENOISER_SOURCES = (
    Source(
        name="diffusers DiTTransformer2DModel",
        matches=_of_diffusers,
        config=_diffusers_config,
        weights=weights_by(_rules, _diffusers_config, unused=SINES),
    ),
    Source(
        name="the original DiT",
        matches=_is_dit,
        config=_original_config,
        weights=weights_by(partial(_rules, qkv=("to_qkv",)), _original_config, unused=SINES),
        rename=ORIGINAL,
    ),
)
DENOISER_TARGET = Target(
    config=DenoiserConfig,
    library="diffusers",
    model=lambda _: CLASSES[0],
    fields=_fields,
    rules=_rules,
)
