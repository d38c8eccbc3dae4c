"""DiT of diffusers and the original code, converted: equal outputs, and errors for the rest."""

import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from test_convert_vision import randomized

from onescan.integrations.weights import convert_model, read

SIZES = {
    "num_attention_heads": 3, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2,
    "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 10,
}  # fmt: skip
WIDTH, CLASSES = 24, 10


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def of_diffusers(*, shared=True, **changes):
    diffusers = pytest.importorskip("diffusers")
    model = randomized(diffusers.DiTTransformer2DModel(**{**SIZES, "out_channels": 8, **changes}))
    first = model.transformer_blocks[0].norm1.emb.state_dict()
    for block in model.transformer_blocks[1:] if shared else ():
        block.norm1.emb.load_state_dict(first)
    return model


def inputs():
    return torch.randn(2, 4, 8, 8, dtype=torch.double), torch.tensor([1, 5]), torch.tensor([1, 9])


@pytest.mark.parametrize("changes", [{}, {"out_channels": 4, "norm_eps": 1e-3}])
def test_models_of_diffusers_have_equal_outputs(changes, tmp_path):
    model, (noisy, timesteps, labels) = of_diffusers(**changes), inputs()
    model.save_pretrained(tmp_path / "transformer")
    for source in (model, tmp_path / "transformer", tmp_path):
        native = convert_model(read(source))
        with torch.no_grad():
            expected = model(noisy, timestep=timesteps, class_labels=labels).sample
            # diffusers computes the frequencies of timesteps in float32
            torch.testing.assert_close(
                native(noisy, timesteps, labels), expected, rtol=1e-5, atol=1e-5
            )


def original_weights():
    sizes = {
        "x_embedder.proj": (WIDTH, 4, 2, 2), "t_embedder.mlp.0": (WIDTH, 256),
        "t_embedder.mlp.2": (WIDTH, WIDTH), "final_layer.linear": (32, WIDTH),
        "final_layer.adaLN_modulation.1": (2 * WIDTH, WIDTH),
    }  # fmt: skip
    for i in range(2):
        block = f"blocks.{i}"
        sizes |= {
            f"{block}.attn.qkv": (3 * WIDTH, WIDTH), f"{block}.attn.proj": (WIDTH, WIDTH),
            f"{block}.mlp.fc1": (96, WIDTH), f"{block}.mlp.fc2": (WIDTH, 96),
            f"{block}.adaLN_modulation.1": (6 * WIDTH, WIDTH),
        }  # fmt: skip
    weights = {f"{name}.weight": torch.randn(size) * 0.3 for name, size in sizes.items()}
    weights |= {f"{name}.bias": torch.randn(size[0]) * 0.3 for name, size in sizes.items()}
    weights["y_embedder.embedding_table.weight"] = torch.randn(CLASSES + 1, WIDTH)
    weights["pos_embed"] = original_positions(4)
    return {name: tensor.double() for name, tensor in weights.items()}


def original_positions(side):
    """Return DiT's position encoding: the first half of a vector encodes the column."""
    quarter = WIDTH // 4
    omega = 10_000.0 ** -(torch.arange(quarter, dtype=torch.double) / quarter)
    waves = torch.arange(side)[:, None] * omega
    waves = torch.cat([waves.sin(), waves.cos()], dim=1)
    rows = waves[:, None].expand(side, side, -1)
    return torch.cat([rows.transpose(0, 1), rows], dim=-1).flatten(0, 1)[None]


def original_output(w, noisy, timesteps, labels, *, heads):
    """Compute DiT's forward pass from its weights, independently of the package."""

    def linear(name, x):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def modulated(x, shift, scale):
        return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]

    x = F.conv2d(noisy, w["x_embedder.proj.weight"], w["x_embedder.proj.bias"], stride=2)
    x = x.flatten(2).transpose(1, 2) + w["pos_embed"]
    omega = torch.exp(-math.log(10_000) * torch.arange(128, dtype=torch.double) / 128)
    angles = timesteps[:, None] * omega
    waves = torch.cat([angles.cos(), angles.sin()], dim=1)
    c = linear("t_embedder.mlp.2", F.silu(linear("t_embedder.mlp.0", waves)))
    c = F.silu(c + w["y_embedder.embedding_table.weight"][labels])
    for i in range(2):
        block = f"blocks.{i}"
        a, b, gate, d, e, mlp_gate = linear(f"{block}.adaLN_modulation.1", c).chunk(6, dim=1)
        q, k, v = linear(f"{block}.attn.qkv", modulated(x, a, b)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k, v))
        y = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        x = x + gate[:, None] * linear(f"{block}.attn.proj", y.transpose(1, 2).flatten(2))
        y = F.gelu(linear(f"{block}.mlp.fc1", modulated(x, d, e)), approximate="tanh")
        x = x + mlp_gate[:, None] * linear(f"{block}.mlp.fc2", y)
    x = modulated(x, *linear("final_layer.adaLN_modulation.1", c).chunk(2, dim=1))
    x = linear("final_layer.linear", x).unflatten(1, (4, 4)).unflatten(-1, (2, 2, 8))
    return torch.einsum("nhwpqc->nchpwq", x).flatten(4, 5).flatten(2, 3)


def test_original_weights_have_equal_outputs(tmp_path):
    weights, (noisy, timesteps, labels) = original_weights(), inputs()
    save_file(weights, tmp_path / "dit.safetensors")
    native = convert_model(read(tmp_path / "dit.safetensors", num_heads=3))
    expected = original_output(weights, noisy, timesteps, labels, heads=3)
    with torch.no_grad():
        actual = native(noisy, timesteps.double(), labels)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)  # positions are in float32


def test_settings_that_are_not_supported_are_named():
    with pytest.raises(ValueError, match="activation_fn 'geglu' is unknown"):
        convert_model(read(of_diffusers(activation_fn="geglu")))
    with pytest.raises(ValueError, match=r"blocks.1.*differs from the weights that it is tied to"):
        convert_model(read(of_diffusers(shared=False)))
    with pytest.raises(ValueError, match="out_channels is 6 in the source, expected 4 or 8"):
        convert_model(read(of_diffusers(out_channels=6)))
