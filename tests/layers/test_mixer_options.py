"""Short convolutions, rotary positions, widths and gates of mixers, against their equations."""

from functools import partial

import numpy as np
import pytest
import torch
from projections import parts_of
from test_convolution import loop as convolve
from torch import nn

from onescan.configs import check_types, replace
from onescan.layers.decays import FixedDecayConfig, GLADecayConfig, HGRN2DecayConfig, NoDecayConfig
from onescan.layers.mixers import (
    DeltaProductMixerConfig,
    DeltaRuleMixerConfig,
    GatedDeltaNetMixerConfig,
    KDAMixerConfig,
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
    Mamba2MixerConfig,
    MambaMixerConfig,
)
from onescan.layers.tokens import snake_orders
from onescan.ops.packing import Packing
from onescan.shapes import Grid

WIDTH, HEADS = 24, 3
DIRECTIONS = ("forward", "backward", "both")
CONVOLUTIONS = {
    "delta rule": DeltaRuleMixerConfig(value_map="silu", key_width=5, gate="silu"),
    "delta rule, bias": DeltaRuleMixerConfig(conv_bias=True, feature_map="relu"),
    "lion": LionMixerConfig(feature_map="silu", value_map="silu", conv_bias=True, gate="sigmoid"),
    "lion, per channel": LionMixerConfig(decay=GLADecayConfig(rank=4), value_width=5),
    "lion, keys of the decay": LionMixerConfig(decay=HGRN2DecayConfig(), normalize="none"),
    "lightnet": LightNetMixerConfig(gate_rank=4),
    "lightnet, separate decay": LightNetMixerConfig(
        conv_bias=True, decay_logits="offset", decay_rank=4
    ),
}
DELTAS = {
    "gate": DeltaRuleMixerConfig(
        gate="silu", value_map="silu", key_width=5, value_width=6, norm_heads=True
    ),
    "sum": DeltaRuleMixerConfig(
        feature_map="elu_plus_one", qk_norm="sum", beta=False, gate="sigmoid", norm="none"
    ),
    "negative eigenvalues": DeltaRuleMixerConfig(
        feature_map="relu", negative_eigenvalues=True, value_width=3
    ),
    "full strength": DeltaRuleMixerConfig(
        feature_map="identity", negative_eigenvalues=True, beta=False, bias=True
    ),
}
RETENTION = LionMixerConfig(
    feature_map="identity", decay=FixedDecayConfig(init="retnet", learnable=False),
    normalize="none", key_width=6, value_width=16, norm="rms", norm_heads=True, gate="silu",
    rotary=True, bias=False,
)  # fmt: skip
CAUSAL = {
    "deltanet": replace(DELTAS["gate"], {"conv_size": 4, "direction": "forward"}),
    "gated_deltanet": GatedDeltaNetMixerConfig(direction="forward"),
    "kda": KDAMixerConfig(direction="forward", gate_rank=4),
    "delta_product": DeltaProductMixerConfig(direction="forward"),
    "retention": replace(RETENTION, {"direction": "forward"}),
    "retention, convolution": replace(RETENTION, {"conv_size": 3, "direction": "forward"}),
    "lion, convolution": replace(CONVOLUTIONS["lion"], {"conv_size": 1, "direction": "forward"}),
    "lightnet": replace(
        CONVOLUTIONS["lightnet, separate decay"], {"conv_size": 4, "direction": "forward"}
    ),
}
PLAIN = {"deltanet": {"conv_size": None}, "retention": {"rotary": False}}
over_directions = pytest.mark.parametrize("direction", DIRECTIONS)


def tokens(*shape):
    return torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True)


def masks(*shape):
    keep = torch.rand(*shape) < 0.7
    keep[:, 0] = True
    return keep


def trained(config, axes=1):
    """The mixer with weights as training may leave them, in float64."""
    config = replace(config, {"num_heads": HEADS})
    mixer = config.build(width=WIDTH, axes=axes).double()
    for parameter in mixer.parameters():
        with torch.no_grad():
            parameter += 0.3 * torch.randn_like(parameter)
    return mixer


def silu(x):
    return x * torch.sigmoid(x)


def rms(x, weight):
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight


def gradients(y, *inputs):
    return torch.autograd.grad((y * y.detach().cos()).sum(), inputs, allow_unused=True)


class Projected(nn.Module):
    """A linear layer whose outputs are known."""

    def __init__(self, y):
        super().__init__()
        self.y = y

    def forward(self, x):
        return self.y


def without_convolution(mixer, x, convolved, axes=1):
    """Return the mixer without its convolution, whose q, k and v for x are `convolved`."""
    rest = mixer.in_proj(x)[..., convolved.shape[-1] :]
    plain = replace(mixer.config, {"conv_size": None}).build(width=WIDTH, axes=axes).double()
    shared = {n: w for n, w in mixer.state_dict().items() if not n.startswith("conv.")}
    plain.load_state_dict(shared)
    plain.in_proj = Projected(torch.cat([convolved, rest], dim=-1))
    return plain


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("name", "direction"),
    [
        (name, direction)
        for name in CONVOLUTIONS
        for direction in DIRECTIONS
        if not (name.startswith("lightnet") and direction == "backward")
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_a_convolution_comes_before_the_activations(name, direction, masked):
    """It reads real tokens in the mixer's direction, or on both sides of each token."""
    causal = direction != "both"
    config = replace(
        replace(CONVOLUTIONS[name], {"direction": direction}), {"conv_size": 4 if causal else 5}
    )
    mixer, grid, x = trained(config, axes=2), Grid((3, 2), prefix=1), tokens(2, 7)
    keep = masks(2, 7) if masked else torch.ones(2, 7, dtype=torch.bool)
    u = mixer.in_proj(x)[..., : mixer.conv.in_channels]
    flip = (1,) if direction == "backward" else ()
    convolved = convolve(mixer.conv, u.flip(flip), keep.flip(flip), causal=causal).flip(flip)
    expected, _ = without_convolution(mixer, x, convolved, axes=2)(x, grid, keep=keep)
    y, _ = mixer(x, grid, keep=keep if masked else None)
    torch.testing.assert_close(y, expected)
    leaves = (x, mixer.conv.weight)
    torch.testing.assert_close(gradients(y, *leaves), gradients(expected, *leaves))


@over_directions
def test_a_convolution_follows_each_natural_scan(direction):
    """Without a norm, the output is the mean over scans of the flat mixer in their order."""
    fields = {"conv_size": 3, "scan": "natural", "normalize": "none", "bias": False}
    config = replace(replace(CONVOLUTIONS["lion"], {"direction": direction}), fields)
    config = replace(config, {"decay": NoDecayConfig()})
    natural, grid, x = trained(config, axes=2), Grid((3, 4), prefix=1), tokens(2, 13)
    flat = replace(natural.config, {"scan": "flat", "gate": "none"})
    flat = flat.build(width=WIDTH, axes=2).double()
    weights = natural.state_dict()
    weights["in_proj.weight"] = weights["in_proj.weight"][: flat.in_proj.out_features]
    flat.load_state_dict(weights)
    flat.out_proj = nn.Identity()
    gate = nn.functional.linear(x, parts_of(natural)[-1].weight)
    keep, outputs = masks(2, 13), []
    for order in snake_orders(grid, x.device):
        o, _ = flat(x[:, order.token], grid, keep=keep[:, order.token])
        outputs.append(o[:, order.step])
    expected = natural.out_proj(sum(outputs) / 2 * torch.sigmoid(gate))
    torch.testing.assert_close(natural(x, grid, keep=keep)[0], expected)


def delta_loop(mixer, x):
    """S = (I - beta k k^T) S + beta k v^T; each of two directions counts half of a token's own."""
    config = mixer.config
    q, k, v, *gate = (f(x) for f in parts_of(mixer))
    q, k, v = (y.unflatten(-1, (HEADS, -1)) for y in (q, k, v))
    phi = {
        "silu": silu,
        "relu": torch.relu,
        "elu_plus_one": lambda y: torch.where(y > 0, y + 1, y.exp()),
        "identity": lambda y: y,
    }[config.feature_map]
    q, k = phi(q), phi(k)
    if config.qk_norm == "sum":
        q, k = (y / y.sum(dim=-1, keepdim=True) for y in (q, k))
    else:
        q, k = (y / (y.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    v = silu(v) if config.value_map == "silu" else v
    beta = torch.ones(*x.shape[:2], HEADS, dtype=x.dtype)
    if config.beta:
        z = nn.functional.linear(x, mixer.beta_proj.weight, mixer.beta_proj.bias)
        beta = torch.sigmoid(z)
    beta = 2 * beta if config.negative_eigenvalues else beta

    def visit(q, k, v, beta):
        state, outputs = torch.zeros(len(x), HEADS, k.shape[-1], v.shape[-1], dtype=x.dtype), []
        for t in range(x.shape[1]):
            b, key = beta[:, t, :, None, None], k[:, t].unsqueeze(-1)
            own = b * key * v[:, t].unsqueeze(-2)
            state = state - b * key * (key.mT @ state) + own
            half = own / 2 if config.direction == "both" else 0
            outputs.append((q[:, t].unsqueeze(-2) @ (state - half)).squeeze(-2))
        return torch.stack(outputs, dim=1)

    o = 0
    if config.direction != "backward":
        o = visit(q, k, v, beta)
    if config.direction != "forward":
        o = o + visit(*(y.flip(1) for y in (q, k, v, beta))).flip(1)
    if config.norm == "rms":
        o = rms(o if config.norm_heads else o.flatten(-2), mixer.norm.weight)
    o = o.flatten(2)
    for z in gate:
        o = o * (silu(z) if config.gate == "silu" else torch.sigmoid(z))
    return nn.functional.linear(o, mixer.out_proj.weight, mixer.out_proj.bias)


@over_directions
@pytest.mark.parametrize("name", DELTAS)
def test_options_of_the_delta_rule_are_the_recurrence(name, direction):
    mixer, x = trained(replace(DELTAS[name], {"direction": direction})), tokens(2, 6)
    y, expected = mixer(x, Grid((6,)))[0], delta_loop(mixer, x)
    torch.testing.assert_close(y, expected)
    leaves = (x, *mixer.parameters())
    torch.testing.assert_close(gradients(y, *leaves), gradients(expected, *leaves))


def test_keys_whose_sum_is_zero_write_nothing():
    config = DeltaRuleMixerConfig(feature_map="relu", qk_norm="sum", norm="none")
    mixer, x = trained(config), torch.zeros(1, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    y, _ = mixer(x, Grid((3,)))
    y.sum().backward()
    assert (y == 0).all()
    assert x.grad.isfinite().all()


@over_directions
@pytest.mark.parametrize("form", ["full", "chunk", "recurrent"])
def test_rotations_are_products_of_complex_numbers(direction, form):
    """RetNet, Eq. 5 and 8; the angle is that of the distance in the mixer's direction."""
    config = replace(replace(RETENTION, {"direction": direction}), {"form": form, "chunk_size": 4})
    mixer, x = trained(config), tokens(2, 9)
    q, k, v, gate = (f(x) for f in parts_of(mixer))
    q, k, v = (y.unflatten(-1, (HEADS, -1)) for y in (q, k, v))
    q, k = (torch.complex(*y.chunk(2, dim=-1)) for y in (q, k))
    lags = torch.arange(9)[:, None] - torch.arange(9)
    lags = (-lags if direction == "backward" else lags).double()
    theta = 10000.0 ** -(torch.arange(3, dtype=torch.float64) / 3)
    turn = torch.polar(torch.ones(9, 9, 3, dtype=torch.float64), lags[..., None] * theta)
    gamma = 1 - 2.0 ** -(5 + torch.arange(HEADS, dtype=torch.float64))
    mask = gamma ** lags.abs()[..., None]
    mask = mask if direction == "both" else mask * (lags >= 0)[..., None]
    scores = torch.einsum("bihk,bjhk,ijk->bijh", q, k.conj(), turn).real / 6**0.5
    o = rms(torch.einsum("bijh,ijh,bjhv->bihv", scores, mask, v), mixer.norm.weight).flatten(2)
    expected = (o * silu(gate)) @ mixer.out_proj.weight.T
    # the decays are stored in float32
    torch.testing.assert_close(mixer(x, Grid((9,)))[0], expected, atol=1e-6, rtol=1e-6)


def test_rotations_skip_prefix_tokens():
    mixer, x = trained(replace(RETENTION, {"decay": NoDecayConfig()})), tokens(1, 3)
    y, _ = mixer(x, Grid((1,), prefix=2))
    plain = replace(mixer.config, {"rotary": False}).build(width=WIDTH, axes=1).double()
    plain.load_state_dict(mixer.state_dict())
    torch.testing.assert_close(y, plain(x, Grid((3,)))[0])  # all three have angle 0


@pytest.mark.parametrize("name", ["retention", "retention, convolution"])
def test_the_natural_scan_of_a_line_is_the_flat_one(name):
    for direction in DIRECTIONS:
        config = replace(CAUSAL[name], {"direction": direction})
        flat = trained(config)
        natural = replace(flat.config, {"scan": "natural"}).build(width=WIDTH, axes=1).double()
        natural.load_state_dict(flat.state_dict())
        x, keep, grid = tokens(2, 7), masks(2, 7), Grid((5,), prefix=2)
        torch.testing.assert_close(natural(x, grid, keep=keep)[0], flat(x, grid, keep=keep)[0])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("config", CAUSAL.values(), ids=CAUSAL)
@pytest.mark.parametrize("masked", [False, True])
def test_two_calls_equal_one_at_every_cut(config, masked):
    mixer, x = trained(config), tokens(2, 7)
    keep = masks(2, 7) if masked else None
    want, whole = mixer(x, Grid((7,)), keep=keep)
    for cuts in [*([cut, 7 - cut] for cut in range(1, 7)), [1] * 7]:
        outputs, state, start = [], None, 0
        for count in cuts:
            part = slice(start, start + count)
            seen = None if keep is None else keep[:, part]
            y, state = mixer(x[:, part], Grid((count,)), keep=seen, state=state)
            outputs.append(y)
            start += count
        torch.testing.assert_close(torch.cat(outputs, dim=1), want)
        torch.testing.assert_close(state, whole)


@pytest.mark.parametrize("config", CAUSAL.values(), ids=CAUSAL)
def test_padding_on_the_left_changes_nothing(config):
    mixer, x = trained(config), tokens(2, 5)
    want, _ = mixer(x, Grid((5,)))
    padded = torch.cat([torch.full_like(x[:, :3], torch.nan), x], dim=1)
    y, _ = mixer(padded, Grid((8,)), keep=torch.arange(8).expand(2, -1) >= 3)
    torch.testing.assert_close(y[:, 3:], want)


@pytest.mark.parametrize("name", ["deltanet", "kda", "retention, convolution", "lion, convolution"])
def test_backward_is_forward_from_the_other_end(name):
    forward, backward = (
        trained(replace(CAUSAL[name], {"direction": d})) for d in ("forward", "backward")
    )
    backward.load_state_dict(forward.state_dict())
    x, keep = tokens(2, 6), masks(2, 6)
    y, state = backward(x, Grid((6,)), keep=keep)
    assert state is None
    want, _ = forward(x.flip(1), Grid((6,)), keep=keep.flip(1))
    torch.testing.assert_close(y, want.flip(1))


def test_packed_sequences_are_refused_where_they_are_not_separated():
    packing = Packing(torch.tensor([0, 2, 5], dtype=torch.int32), batch=1, tokens=5)
    x, grid = torch.randn(1, 5, WIDTH), Grid((5,))
    for config in (LION(conv_size=3), LIGHTNET(decay_logits="offset"), LION(scan="natural")):
        mixer = config.build(width=WIDTH, axes=1)
        with pytest.raises(ValueError, match="to a mixer that cannot separate packed"):
            mixer(x, grid, cu_seqlens=packing)
    LION().build(width=WIDTH, axes=1)(x, grid, cu_seqlens=packing)


def test_a_state_of_another_batch_size_is_refused():
    for config in (
        Mamba2MixerConfig(num_heads=HEADS, direction="forward"),
        LION(direction="forward"),
    ):
        mixer = config.build(width=WIDTH, axes=1)
        _, state = mixer(torch.randn(3, 4, WIDTH), Grid((4,)))
        with pytest.raises(ValueError, match=r"state\..* has (3 rows, but x has 2|shape \(3, )"):
            mixer(torch.randn(2, 4, WIDTH), Grid((4,)), state=state)


@pytest.mark.parametrize("name", ["deltanet", "retention"])
def test_a_state_of_another_config_is_refused(name):
    mixer, x = trained(CAUSAL[name]), tokens(1, 2)
    plain = trained(replace(mixer.config, PLAIN[name]))
    states = {each: each(x, Grid((2,)))[1] for each in (mixer, plain)}
    for each, other in ((mixer, plain), (plain, mixer)):
        with pytest.raises(ValueError, match=r"state\.(window|position) is .*, but this mixer has"):
            each(x, Grid((2,)), state=states[other])


@pytest.mark.compile
@pytest.mark.parametrize("name", ["deltanet", "retention, convolution"])
def test_a_mixer_compiles_whole(name):
    mixer, x = trained(CAUSAL[name]), tokens(2, 5).detach()
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    want, whole = mixer(x, Grid((5,)))
    first, state = compiled(x[:, :3], Grid((3,)))
    rest, state = compiled(x[:, 3:], Grid((2,)), state=state)
    torch.testing.assert_close(torch.cat([first, rest], dim=1), want)
    torch.testing.assert_close(state, whole)


LION, DELTA, LIGHTNET = (
    partial(config, num_heads=HEADS)
    for config in (LionMixerConfig, DeltaRuleMixerConfig, LightNetMixerConfig)
)


@pytest.mark.parametrize(
    ("config", "axes", "message"),
    [
        *(
            (config(conv_size=4), 1, "conv_size is 4, expected an odd number")
            for config in (LION, DELTA, LIGHTNET)
        ),
        (DELTA(conv_size=0), 1, "conv_size is 0"),
        (DELTA(key_width=0), 1, "key_width is 0"),
        (DELTA(value_width=-1), 1, "value_width is -1"),
        (LION(value_width=0), 1, "value_width is 0"),
        (LION(value_width=5, state_size=4), 1, "state_size is 4 .* value_width=5"),
        (LION(gate_rank=2), 1, "gate_rank is 2 with gate='none', expected gate='sigmoid'"),
        (DELTA(gate_rank=2), 1, "gate_rank is 2 with gate='none'"),
        (LION(rotary=True), 1, "normalize is 'sum' with rotary=True, expected 'none'"),
        (LION(rotary=True, normalize="none"), 2, "rotary is True with 2 axes"),
        (LION(rotary=True, normalize="none", key_width=5), 1, "heads of width 5, expected"),
    ],
)
def test_impossible_fields_are_refused(config, axes, message):
    with pytest.raises(ValueError, match=message):
        config.build(width=WIDTH, axes=axes)


@pytest.mark.parametrize(
    ("config", "field", "value", "message"),
    [
        (
            LIGHTNET(direction="forward"),
            "leak",
            (1, 2, 3),
            r"leak is \(1, 2, 3\), expected tuple\[",
        ),
        (LIGHTNET(direction="forward"), "leak", 16, r"leak is 16, expected tuple\[float, float\]"),
        (Mamba2MixerConfig(), "value_expansion", 1.5, "value_expansion is 1.5, expected int"),
        (DELTA(), "key_width", 1.5, r"key_width is 1.5, expected int \| None"),
        (DELTA(), "num_heads", 2.0, "num_heads is 2.0, expected int"),
        (DELTA(), "num_heads", True, "num_heads is True, expected int"),
        (DELTA(), "conv_size", 2.5, r"conv_size is 2.5, expected int \| Literal\['auto'\] \| None"),
        (LinearDiffusionMixerConfig(), "kernels", 2.0, "kernels is 2.0, expected int"),
        (
            LinearDiffusionMixerConfig(),
            "sigmas",
            (1.0, "2"),
            r"sigmas is \(1.0, '2'\), expected tup",
        ),
        (MambaMixerConfig(), "chunk_size", 3.3, "chunk_size is 3.3, expected int"),
        (MambaMixerConfig(), "gate", None, "gate is None, expected Literal"),
        (LION(), "bias", 1, "bias is 1, expected bool"),
        (LION(), "norm_eps", "1e-5", "norm_eps is '1e-5', expected float"),
    ],
)
def test_values_of_wrong_types_are_refused(config, field, value, message):
    object.__setattr__(config, field, value)  # past the tests' own check of types
    with pytest.raises(ValueError, match=message):
        config.build(width=WIDTH, axes=1)


def test_types_of_nested_configs_are_checked():
    decay = GLADecayConfig()
    object.__setattr__(decay, "rank", 2.5)
    with pytest.raises(ValueError, match=r"decay\.rank is 2.5, expected int"):
        LION(decay=decay).build(width=WIDTH, axes=1)


def test_numpy_numbers_and_lists_are_accepted():
    config = LinearDiffusionMixerConfig(num_heads=HEADS)
    for field, value in {
        "kernels": np.int64(2),
        "epsilon": np.float64(1e-3),
        "sigmas": [1],
    }.items():
        object.__setattr__(config, field, value)
    check_types(config)


@pytest.mark.parametrize("field", ["feature_map", "qk_norm", "gate"])
def test_unknown_names_are_refused(field):
    config = DELTA()
    object.__setattr__(config, field, "l3")  # past the tests' own check of types
    with pytest.raises(ValueError, match=f"{field} 'l3' is unknown"):
        config.build(width=WIDTH, axes=1)
