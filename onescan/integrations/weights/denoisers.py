"""DiT of diffusers and the original code, as denoisers with softmax attention.

DiT's position encoding stores columns before rows, and this package's rows before columns. No norm
of DiT has parameters, so the halves of all token vectors can be exchanged instead, by exchanging
the halves of the maps that write and read them.

Both sources sort the pixels of an output patch by row, column and channel, and this package by
channel, row and column. The original code has cosines before sines in its timestep embedding.
"""

import math

from torch import Tensor

from onescan.configs import ModelConfig, replace
from onescan.integrations.weights.maps import (
    LinearNames,
    activation,
    copied,
    merged,
    num_heads,
    patch_embedding,
)
from onescan.integrations.weights.source import Foreign, Source
from onescan.layers.basic import MLPConfig
from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.layers.position import SinusoidalPositionConfig
from onescan.models.denoiser import DenoiserConfig

# names of diffusers -> names of the original code
DIFFUSERS = {
    r"^transformer_blocks\.": "blocks.",
    r"^pos_embed\.": "x_embedder.",
    r"\.norm1\.linear\.": ".adaLN_modulation.1.",
    r"\.attn1\.to_out\.0\.": ".attn.proj.",
    r"\.attn1\.": ".attn.",
    r"\.ff\.net\.0\.proj\.": ".mlp.fc1.",
    r"\.ff\.net\.2\.": ".mlp.fc2.",
    r"^proj_out_1\.": "final_layer.adaLN_modulation.1.",
    r"^proj_out_2\.": "final_layer.linear.",
    r"\.timestep_embedder\.linear_1\.": ".t_embedder.mlp.0.",
    r"\.timestep_embedder\.linear_2\.": ".t_embedder.mlp.2.",
    r"\.class_embedder\.": ".y_embedder.",
    r"^blocks\.0\.norm1\.emb\.": "",
}
# maps of a block that read token vectors; and that write them, with the number of their vectors
READS = ("mixer.in_proj", "mlp.up_proj")
WRITES = {"mixer.out_proj": 1, "mlp.down_proj": 1, "modulation.proj": 6}
FINAL = "final_layer.linear.weight"


def _swap(tensor: Tensor, *, dim: int = 0, parts: int = 1) -> Tensor:
    """Exchange the halves of each of some equal parts along a dimension."""
    halves = tensor.unflatten(dim, (parts, 2, -1))
    return halves.flip(dim + 1).flatten(dim, dim + 2)


def _of_diffusers(foreign: Foreign) -> bool:
    return foreign.fields.get("_class_name", foreign.fields.get("model_class")) in (
        "DiTTransformer2DModel",
        "Transformer2DModel",  # of diffusers before DiTTransformer2DModel
    ) and ("blocks.0.adaLN_modulation.1.weight" in foreign.tensors)


def _is_original(foreign: Foreign) -> bool:
    return {"blocks.0.adaLN_modulation.1.weight", FINAL} <= set(foreign.tensors)


def _dit(foreign: Foreign, *, image_size: int, heads: int, mlp: MLPConfig) -> DenoiserConfig:
    tensors = foreign.tensors
    width, channels, height, _ = tensors.shape("x_embedder.proj.weight")
    out_channels = tensors.shape(FINAL)[0] // height**2
    if out_channels not in (channels, 2 * channels):
        raise ValueError(
            f"out_channels is {out_channels} in the source, expected {channels} or {2 * channels}"
        )
    return DenoiserConfig(
        image_size=(image_size, image_size),
        channels=channels,
        patch_size=(height, height),
        num_classes=tensors.shape("y_embedder.embedding_table.weight")[0] - 1,
        width=width,
        depth=tensors.count("blocks."),
        mixer=SoftmaxMixerConfig(num_heads=heads),
        mlp=mlp,
        position=SinusoidalPositionConfig(),
        condition="adaln_zero",
        learn_sigma=out_channels == 2 * channels,
    )


def _diffusers_config(foreign: Foreign) -> ModelConfig:
    foreign.expect(
        norm_type="ada_norm_zero",
        norm_elementwise_affine=False,
        dropout=0.0,
        upcast_attention=False,
    )
    kind = activation(foreign, "activation_fn")
    heads = foreign.need("num_attention_heads")
    config = _dit(
        foreign,
        image_size=foreign.need("sample_size"),
        heads=heads,
        mlp=MLPConfig(activation=kind),
    )
    fields = {"mlp_norm_eps": foreign.need("norm_eps"), "inclusive_frequencies": True}
    return replace(config, fields)


def _original_config(foreign: Foreign) -> ModelConfig:
    foreign.expect(**{"mlp.act": "GELU(approximate='tanh')"})
    width, _, patch, _ = foreign.tensors.shape("x_embedder.proj.weight")
    patches = foreign.tensors.shape("pos_embed")[1]
    hidden = foreign.tensors.shape("blocks.0.mlp.fc1.weight")[0]
    return _dit(
        foreign,
        image_size=math.isqrt(patches) * patch,
        heads=num_heads(foreign, width),
        mlp=MLPConfig(ratio=hidden / width, activation="gelu_tanh"),
    )


def _weights(foreign: Foreign, qkv: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the native tensors of a model with the names of the original code."""
    tensors = foreign.tensors
    depth = tensors.count("blocks.")
    patch = tensors.shape("x_embedder.proj.weight")[-1]
    tokens = patch_embedding(tensors, "x_embedder.proj")
    weights = {name: _swap(tensor) for name, tensor in tokens.items()}
    for i in range(depth):
        block = f"blocks.{i}"
        names = [
            LinearNames("mixer.out_proj", f"{block}.attn.proj"),
            LinearNames("mlp.up_proj", f"{block}.mlp.fc1"),
            LinearNames("mlp.down_proj", f"{block}.mlp.fc2"),
            LinearNames("modulation.proj", f"{block}.adaLN_modulation.1"),
        ]
        part = copied(tensors, names)
        qkv_map = merged(tensors, f"{block}.attn", qkv)
        part |= {f"mixer.{name}": tensor for name, tensor in qkv_map.items()}
        for name in READS:
            part[f"{name}.weight"] = _swap(part[f"{name}.weight"], dim=1)
        for name, vectors in WRITES.items():
            for kind in ("weight", "bias"):
                part[f"{name}.{kind}"] = _swap(part[f"{name}.{kind}"], parts=vectors)
        weights |= {f"{block}.{name}": tensor for name, tensor in part.items()}
    for kind in ("weight", "bias"):
        shifts = tensors.take(f"final_layer.adaLN_modulation.1.{kind}")
        weights[f"modulation.proj.{kind}"] = _swap(shifts, parts=2)
        pixels = tensors.take(f"final_layer.linear.{kind}")
        pixels = pixels.unflatten(0, (patch * patch, -1)).transpose(0, 1).flatten(0, 1)
        pixels = _swap(pixels, dim=1) if kind == "weight" else pixels
        weights[f"unpatchify.proj.{kind}"] = pixels
    condition = [
        LinearNames("time.in_proj", "t_embedder.mlp.0"),
        LinearNames("time.out_proj", "t_embedder.mlp.2"),
    ]
    weights |= copied(tensors, condition)
    weights["time.in_proj.weight"] = _swap(weights["time.in_proj.weight"], dim=1)
    weights["label.table.weight"] = tensors.take("y_embedder.embedding_table.weight")
    return weights


def _diffusers_weights(foreign: Foreign) -> dict[str, Tensor]:
    tensors = foreign.tensors
    tensors.drop(r"x_embedder\.pos_embed")  # sines and cosines
    weights = _weights(foreign, ("to_q", "to_k", "to_v"))
    # Each block has an embedding of timesteps and classes; those of published models are equal.
    for i in range(1, tensors.count("blocks.")):
        emb = f"blocks.{i}.norm1.emb"
        first = weights["time.in_proj.weight"]
        tensors.take_equal(f"{emb}.t_embedder.mlp.0.weight", _swap(first, dim=1))
        tensors.take_equal(f"{emb}.t_embedder.mlp.0.bias", weights["time.in_proj.bias"])
        for kind in ("weight", "bias"):
            shared = weights[f"time.out_proj.{kind}"]
            tensors.take_equal(f"{emb}.t_embedder.mlp.2.{kind}", shared)
        table = weights["label.table.weight"]
        tensors.take_equal(f"{emb}.y_embedder.embedding_table.weight", table)
    return weights


def _original_weights(foreign: Foreign) -> dict[str, Tensor]:
    foreign.tensors.drop("pos_embed")  # sines and cosines
    return _weights(foreign, ("qkv",))


DENOISER_SOURCES = (
    Source(
        name="diffusers DiTTransformer2DModel",
        matches=_of_diffusers,
        config=_diffusers_config,
        weights=_diffusers_weights,
        rename=DIFFUSERS,
    ),
    Source(
        name="the original DiT",
        matches=_is_original,
        config=_original_config,
        weights=_original_weights,
    ),
)
