"""LION's Table 1 row by row, its scans and directions, and the delta rule's mixer."""

import dataclasses
from functools import partial

import pytest
import torch
from pairwise import pairwise
from projections import parts_of

from onescan.configs import replace
from onescan.layers.decays import (
    FixedDecayConfig,
    HippoDecayConfig,
    NoDecayConfig,
    SelectiveDecayConfig,
)
from onescan.layers.mixers import (
    LINEAR_TRANSFORMERS,
    DeltaRuleMixerConfig,
    HGRNMixerConfig,
    HydraMixerConfig,
    LightNetMixerConfig,
    LionMixerConfig,
    RWKV6MixerConfig,
    lion,
)
from onescan.layers.tokens import snake_orders
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.presets import preset
from onescan.ops.decay_attention import decay_attention
from onescan.shapes import Grid

WIDTH, HEADS, K = 24, 3, 8
LINE = Grid((6,))
DECAYS = {"lit": NoDecayConfig(), "d": FixedDecayConfig(), "s": LionMixerConfig().decay}
DIRECTED = (LionMixerConfig, DeltaRuleMixerConfig, HGRNMixerConfig)
over_rows = pytest.mark.parametrize("row", LINEAR_TRANSFORMERS)


def tokens(*shape):
    return torch.randn(*shape, WIDTH, dtype=torch.float64)


def trained(config, axes=1):
    """The mixer with weights as training may leave them, in float64."""
    mixer = dataclasses.replace(config, num_heads=HEADS).build(width=WIDTH, axes=axes).double()
    for parameter in mixer.parameters():
        with torch.no_grad():
            parameter += 0.3 * torch.randn_like(parameter)
    return mixer


def linear(layer, x, *, heads=True):
    y = x @ layer.weight.T + (0 if layer.bias is None else layer.bias)
    return y.unflatten(-1, (HEADS, -1)) if heads else y


def silu(x):
    return x * torch.sigmoid(x)


def elu_plus_one(x):
    return torch.where(x > 0, x + 1, x.exp())


def unit(x):
    return x / x.square().sum(dim=-1, keepdim=True).sqrt()


def same(x):
    return x


# Table 1: phi, the mixer's gates -> (decay, what multiplies the key or, for HGRN2, is the key),
# and scale.
def keeps_all(decay, x):
    return 1, 1


def retnet(decay, x):
    return 1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=x.dtype)[:, None]), 1


def gated_rfa(decay, x):
    g = torch.sigmoid(linear(decay.proj, x))
    return g, 1 - g


def mamba2(decay, x):
    dt = (1 + (linear(decay.proj, x, heads=False) + decay.dt_bias).exp()).log()
    return ((-decay.log_rate.exp() * dt).exp()).unsqueeze(-1), dt.unsqueeze(-1)


def rwkv6(decay, x):
    z = linear(decay.up_proj, torch.tanh(linear(decay.down_proj, x, heads=False)))
    return (-(decay.log_rate + z).exp()).exp(), 1


def gla(decay, x):
    return torch.sigmoid(linear(decay.up_proj, linear(decay.down_proj, x, heads=False))) ** (
        1 / 16
    ), 1


def hgrn2(decay, x):
    kept = torch.sigmoid(linear(decay.proj, x))
    return kept, 1 - kept


def xlstm(decay, x):
    forget = torch.sigmoid(linear(decay.forget_proj, x, heads=False) + decay.forget_bias)
    enter = (15 * torch.tanh(linear(decay.input_proj, x, heads=False) / 15)).exp()
    return forget.unsqueeze(-1), enter.unsqueeze(-1)


ROWS = {
    "linear_attention": (elu_plus_one, keeps_all, "none"),
    "linear_attention_scaled": (elu_plus_one, keeps_all, "sum"),
    "retnet": (same, retnet, "none"),
    "retnet_scaled": (lambda x: unit(silu(x) + 0.5), retnet, "sum"),
    "gated_rfa": (elu_plus_one, gated_rfa, "sum"),
    "mamba2": (silu, mamba2, "none"),
    "rwkv6": (same, rwkv6, "none"),
    "gla": (same, gla, "none"),
    "hgrn2": (silu, hgrn2, "none"),
    "xlstm": (same, xlstm, "max_one"),
}


def visit(q, k, v, decay, *, both):
    """y_t = q_t (S_t - k_t v_t^T / 2), or S_t alone, by the recurrence S_t = decay_t S + k v^T."""
    state = torch.zeros(*k[:, 0].shape, v.shape[-1], dtype=v.dtype)
    outputs = []
    for t in range(q.shape[1]):
        own = k[:, t, :, :, None] * v[:, t, :, None, :]
        state = decay[:, t, :, :, None] * state + own
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state - own / 2 * both))
    return torch.stack(outputs, dim=1)


def by_table_1(row, mixer, x, direction, *, absolute=True):
    phi, gates, scale = ROWS[row]
    decay, key = gates(mixer.decays[0], x)
    to_q, *to_k, to_v = parts_of(mixer)
    q, v = phi(linear(to_q, x)) / K**0.5, linear(to_v, x)
    k = key * phi(linear(to_k[0], x)) if to_k else key
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    decay = decay * torch.ones_like(k)
    both = direction == "both"
    o = visit(q, k, v, decay, both=both)
    if both:
        o = o + visit(*(y.flip(1) for y in (q, k, v, decay)), both=True).flip(1)
    o, c = o[..., :-1], o[..., -1:]
    if scale == "sum":
        o = o / c
    if scale == "max_one":
        o = o / torch.maximum(c.abs() if absolute and not both else c, torch.ones_like(c))
    return o.flatten(-2)


def delta_net(mixer, x, direction):
    """S = (I - beta k k^T) S + beta k v^T, each direction without half of a token's own part."""
    to_q, to_k, to_v = parts_of(mixer)
    q, k = (silu(linear(layer, x)) for layer in (to_q, to_k))
    q, k = (y / (y.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    v, beta = linear(to_v, x), torch.sigmoid(linear(mixer.beta_proj, x, heads=False))

    def visit(q, k, v, beta):
        state, outputs = torch.zeros(x.shape[0], HEADS, K, K, dtype=x.dtype), []
        for t in range(x.shape[1]):
            b, key = beta[:, t, :, None, None], k[:, t].unsqueeze(-1)
            own = b * key * v[:, t].unsqueeze(-2)
            state = state - b * key * (key.mT @ state) + own
            half = own / 2 if direction == "both" else 0
            outputs.append((q[:, t].unsqueeze(-2) @ (state - half)).squeeze(-2))
        return torch.stack(outputs, dim=1)

    o = visit(q, k, v, beta)
    if direction == "both":
        o = o + visit(*(y.flip(1) for y in (q, k, v, beta))).flip(1)
    return o.flatten(-2)


def mamba(mixer, x, direction):
    """h = exp(dt A) h + dt B x per channel and state, y = C h; bidirectional counts x_t once."""
    decay, state_size = mixer.decays[0], mixer.config.state_size
    in_group = WIDTH // HEADS

    def groups(layer):
        return linear(layer, x).repeat_interleave(in_group, dim=2)  # B T D N

    to_q, to_k, to_v = parts_of(mixer)
    c, b, u = groups(to_q) / state_size**0.5, groups(to_k), linear(to_v, x)
    u = u.flatten(-2)
    z = linear(decay.up_proj, linear(decay.down_proj, x, heads=False), heads=False) + decay.dt_bias
    dt, a = (1 + z.exp()).log(), -decay.log_rate.exp()
    y = torch.zeros_like(u)
    steps = range(x.shape[1])
    for order in [steps] if direction == "forward" else [steps, steps[::-1]]:
        h = torch.zeros(x.shape[0], WIDTH, state_size, dtype=x.dtype)
        for t in order:
            h = (dt[:, t, :, None] * a).exp() * h
            if order is steps:
                h = h + dt[:, t, :, None] * b[:, t] * u[:, t, :, None]
            y[:, t] += (c[:, t] * h).sum(-1)
            if order is not steps:
                h = h + dt[:, t, :, None] * b[:, t] * u[:, t, :, None]
    return y


ORIGINALS = {
    **{row: partial(by_table_1, row) for row in ROWS},
    "deltanet": delta_net,
    "mamba": mamba,
}


def normed(mixer, o):
    if mixer.config.norm == "none":
        return o
    assert mixer.config.norm == "rms"
    return o / (o.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * mixer.norm.weight


@over_rows
@pytest.mark.parametrize("direction", ["forward", "both"])
def test_every_row_of_table_1_is_its_recurrence(row, direction):
    mixer = trained(dataclasses.replace(LINEAR_TRANSFORMERS[row], direction=direction))
    x = tokens(2, 6)
    o = ORIGINALS[row](mixer, x, direction)
    want = linear(mixer.out_proj, normed(mixer, o), heads=False)
    torch.testing.assert_close(mixer(x, LINE)[0], want)


@pytest.mark.sampled(17)
@over_rows
@pytest.mark.parametrize("form", ["full", "chunk", "recurrent"])
def test_the_forward_half_of_every_row_is_its_causal_original(row, form):
    """For the last token, both are equal. The divisor of bidirectional xLSTM is not absolute."""
    if row == "deltanet" and form == "full":
        pytest.skip("the delta rule has no full form")
    config = dataclasses.replace(LINEAR_TRANSFORMERS[row], form=form, chunk_size=2)
    mixer, x = trained(config), tokens(2, 6)
    o = ORIGINALS[row](mixer, x, "forward", **{"absolute": False} if row == "xlstm" else {})
    want = linear(mixer.out_proj, normed(mixer, o), heads=False)
    for count in range(1, 7):
        y, _ = mixer(x[:, :count], Grid((count,)))
        torch.testing.assert_close(y[:, -1], want[:, count - 1])


def test_the_rows_that_are_tested_are_all():
    assert set(ORIGINALS) == set(LINEAR_TRANSFORMERS)


@over_rows
def test_backward_is_forward_from_the_other_end(row):
    config = LINEAR_TRANSFORMERS[row]
    forward, backward = (
        trained(dataclasses.replace(config, direction=d)) for d in ("forward", "backward")
    )
    backward.load_state_dict(forward.state_dict())
    x, keep = tokens(2, 6), torch.rand(2, 6) < 0.7
    y, state = backward(x, LINE, keep=keep)
    assert state is None
    torch.testing.assert_close(y, forward(x.flip(1), LINE, keep=keep.flip(1))[0].flip(1))


@over_rows
def test_both_directions_do_not_care_from_which_end_tokens_come(row):
    mixer, x = trained(LINEAR_TRANSFORMERS[row]), tokens(2, 6)
    torch.testing.assert_close(mixer(x.flip(1), LINE)[0].flip(1), mixer(x, LINE)[0])


@over_rows
def test_masked_tokens_equal_removed_ones(row):
    mixer, x = trained(LINEAR_TRANSFORMERS[row]), tokens(1, 6)
    keep = torch.tensor([[True, False, True, True, False, True]])
    y, _ = mixer(x, LINE, keep=keep)
    torch.testing.assert_close(y[keep][None], mixer(x[keep][None], Grid((4,)))[0])


@pytest.mark.sampled(7)
@over_rows
def test_a_causal_mixer_in_two_calls_equals_one_at_every_cut(row):
    config = dataclasses.replace(LINEAR_TRANSFORMERS[row], direction="forward", chunk_size=4)
    assert config.is_causal
    mixer, x, keep = trained(config), tokens(2, 7), torch.rand(2, 7) < 0.8
    want, whole = mixer(x, Grid((7,)), keep=keep)
    for cut in range(1, 7):
        first, state = mixer(x[:, :cut], Grid((cut,)), keep=keep[:, :cut])
        rest, state = mixer(x[:, cut:], Grid((7 - cut,)), keep=keep[:, cut:], state=state)
        torch.testing.assert_close(torch.cat([first, rest], dim=1), want)
        torch.testing.assert_close(state.attention.kv, whole.attention.kv)


def mask(decay):
    """Eq. 14: between i and j lies the decay of all from j, itself included, up to i."""
    size = decay.shape[0]
    rows = [
        [decay[j:i].prod(dim=0) if i > j else decay[i + 1 : j + 1].prod(dim=0) for j in range(size)]
        for i in range(size)
    ]
    return torch.stack([torch.stack(row) for row in rows])  # T T H


def scan_decays(mixer, x, grid):
    """Each scan's decays, [B, T, H], by their formulas."""
    for decay in mixer.decays:
        if isinstance(mixer.config.decay, NoDecayConfig):
            yield torch.ones(*x.shape[:2], HEADS, dtype=x.dtype)
        elif isinstance(mixer.config.decay, FixedDecayConfig):
            yield torch.sigmoid(decay.logit).expand(*x.shape[:2], HEADS)
        else:
            chosen = torch.sigmoid(linear(decay.proj, x, heads=False))
            chosen[:, : grid.prefix] = 1
            yield chosen


@pairwise(
    {
        "name": DECAYS,
        "scan": ["flat", "natural"],
        "normalize": ["sum", "none"],
        "shape": [(3, 4), (3, 2, 3)],
    },
    rest_is_slow=True,
    ids=str,
)
def test_lion_is_masked_attention_normalized_once(name, scan, normalize, shape):
    """Sec. 3.1, with the mask that App. C.14's scans make, each in its order, on average."""
    grid = Grid(shape, prefix=1)
    config = LionMixerConfig(decay=DECAYS[name], scan=scan, normalize=normalize)
    mixer = trained(config, axes=len(shape))
    x = tokens(2, grid.tokens)
    orders = [order.token for order in snake_orders(grid, x.device)]
    orders = orders if scan == "natural" else [torch.arange(grid.tokens)]
    to_q, to_k, to_v = parts_of(mixer)
    q, k = (unit(silu(linear(layer, x)) + 0.5) for layer in (to_q, to_k))
    masks = torch.zeros(2, grid.tokens, grid.tokens, HEADS, dtype=x.dtype)
    for order, chosen in zip(orders, scan_decays(mixer, x, grid), strict=True):
        for b in range(2):
            masks[b, order[:, None], order[None, :]] += mask(chosen[b, order]) / len(orders)
    scores = torch.einsum("bihk,bjhk->bijh", q / K**0.5, k) * masks
    if normalize == "sum":
        scores = scores / scores.sum(dim=2, keepdim=True)
    o = torch.einsum("bijh,bjhv->bihv", scores, linear(to_v, x)).flatten(-2)
    torch.testing.assert_close(mixer(x, grid)[0], linear(mixer.out_proj, o, heads=False))


def test_scores_may_be_normalized_before_they_decay():
    """Table 6's row 5, with padding, which counts in no row sum."""
    mixer = trained(LionMixerConfig(normalize="sum_before_mask"))
    x, keep = tokens(2, 7), torch.tensor([[True] * 5 + [False] * 2, [False] * 3 + [True] * 4])
    to_q, to_k, to_v = parts_of(mixer)
    q, k = (unit(silu(linear(layer, x)) + 0.5) for layer in (to_q, to_k))
    log_decay, gate = mixer.decays[0](x)
    k = k if gate is None else k * gate
    scores = torch.einsum("bihk,bjhk->bijh", q, k) * keep[:, None, :, None]
    masks = torch.stack([mask(d.exp()) for d in log_decay * keep[:, :, None]])
    scores = scores / scores.sum(dim=2, keepdim=True) * masks
    o = torch.einsum("bijh,bjhv->bihv", scores, linear(to_v, x)).flatten(-2)
    want = linear(mixer.out_proj, o, heads=False) * keep[:, :, None]
    torch.testing.assert_close(mixer(x, Grid((7,)), keep=keep)[0], want)


@pytest.mark.parametrize("direction", ["both", "forward", "backward"])
@pytest.mark.parametrize("row", sorted({*ORIGINALS} - {"deltanet", "xlstm"}))
def test_the_natural_scan_of_a_line_is_the_flat_one(row, direction):
    config = dataclasses.replace(LINEAR_TRANSFORMERS[row], direction=direction)
    flat = trained(config)
    natural = trained(dataclasses.replace(config, scan="natural"))
    natural.load_state_dict(flat.state_dict())
    x, keep = tokens(2, 7), torch.rand(2, 7) < 0.7
    grid = Grid((5,), prefix=2)
    torch.testing.assert_close(natural(x, grid, keep=keep)[0], flat(x, grid, keep=keep)[0])


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_one_direction_along_natural_scans_reads_what_each_has_passed(direction):
    """Where nothing decays, a token's mask over a scan is 1 for those before it."""
    grid = Grid((2, 3))
    mixer = trained(
        LionMixerConfig(decay=NoDecayConfig(), scan="natural", direction=direction), axes=2
    )
    assert not mixer.config.is_causal
    x = tokens(1, 6)
    y, state = mixer(x, grid)
    assert state is None
    steps = torch.stack([order.step for order in snake_orders(grid, x.device)])
    passed = steps[:, :, None] >= steps[:, None, :]
    if direction == "backward":
        passed = passed.mT
    weight = passed.double().mean(dim=0)
    to_q, to_k, to_v = parts_of(mixer)
    q, k = (unit(silu(linear(layer, x)) + 0.5)[0] for layer in (to_q, to_k))
    scores = torch.einsum("ihk,jhk->ijh", q, k) * weight.unsqueeze(-1)
    scores = scores / scores.sum(dim=1, keepdim=True)
    o = torch.einsum("ijh,jhv->ihv", scores, linear(to_v, x)[0]).flatten(-2)
    torch.testing.assert_close(y[0], linear(mixer.out_proj, o, heads=False))


def test_masked_tokens_of_a_natural_scan_equal_removed_rows():
    mixer = trained(LionMixerConfig(scan="natural"), axes=2)
    x, keep = tokens(1, 12), torch.arange(12)[None] < 8  # the last of three rows is gone
    y, _ = mixer(x, Grid((3, 4)), keep=keep)
    torch.testing.assert_close(y[:, :8], mixer(x[:, :8], Grid((2, 4)))[0])
    assert (y[:, 8:] == 0).all()


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["lion_lit", "lion_d", "lion_s", "lion_d_natural"])
def test_a_models_forms_predict_alike(name):
    config = preset(f"{name}_tiny", image_size=32, patch_size=4, depth=2, num_classes=5)
    models = [
        replace(config, {"mixer.form": form, "mixer.chunk_size": 7}).build().double().eval()
        for form in ("full", "chunk", "recurrent")
    ]
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    want = models[0](images)
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
        torch.testing.assert_close(model(images), want, rtol=1e-9, atol=1e-9)


def test_alternating_blocks_read_forward_first():
    config = ImageClassifierConfig(
        image_size=(8, 8), patch_size=(2, 2), width=24, depth=3,
        mixer=LionMixerConfig(num_heads=3, direction="alternating"),
    )  # fmt: skip
    directions = [block.mixer.config.direction for block in config.build().blocks]
    assert directions == ["forward", "backward", "forward"]
    assert config.mixer.for_layer(1) == LionMixerConfig(num_heads=3, direction="backward")
    assert LionMixerConfig().for_layer(1) == LionMixerConfig()
    with pytest.raises(ValueError, match="class token reads no patch"):
        dataclasses.replace(config, depth=1).build()


@pytest.mark.parametrize("scan", ["flat", "natural"])
def test_a_class_token_before_what_only_looks_back_is_refused(scan):
    mixer = LionMixerConfig(num_heads=3, direction="forward", scan=scan)
    config = ImageClassifierConfig(width=24, depth=1, mixer=mixer)
    with pytest.raises(ValueError, match="class token reads no patch"):
        config.build()
    dataclasses.replace(config, pool="mean_with_class_token").build()
    dataclasses.replace(config, mixer=dataclasses.replace(mixer, direction="backward")).build()


def test_mean_decays_say_what_each_head_keeps():
    grid = Grid((2, 3), prefix=1)
    x = tokens(2, 7)
    for decay, shape in (
        (NoDecayConfig(), (1, HEADS)),
        (FixedDecayConfig(), (1, HEADS)),
        (LionMixerConfig().decay, (1, HEADS)),
        (HippoDecayConfig(), (1, HEADS, K)),
    ):
        mixer = trained(LionMixerConfig(decay=decay), axes=2)
        assert mixer.mean_decays(x, grid).shape == shape
    mixer = trained(LionMixerConfig(decay=FixedDecayConfig(), scan="natural"), axes=2)
    want = torch.stack([torch.sigmoid(decay.logit) for decay in mixer.decays])
    torch.testing.assert_close(mixer.mean_decays(x, grid), want)
    mixer = trained(LionMixerConfig(scan="natural"), axes=2)
    want = [
        torch.sigmoid(linear(decay.proj, x[:, 1:], heads=False)).log().mean(dim=(0, 1)).exp()
        for decay in mixer.decays
    ]
    kept = mixer.mean_decays(x, grid)
    torch.testing.assert_close(kept, torch.stack(want))
    assert not kept.requires_grad


def test_hippo_keeps_its_first_weights_in_a_model():
    """LION, App. C.2: queries, keys and gate of spread 0.1, values by zero-order hold."""
    config = ImageClassifierConfig(
        width=192, depth=1, mixer=LionMixerConfig(num_heads=3, decay=HippoDecayConfig())
    )
    mixer = config.build().blocks[0].mixer
    to_q, to_k, to_v = parts_of(mixer)
    for layer in (to_q, to_k, mixer.decays[0].proj):
        assert layer.weight.std().item() == pytest.approx(0.1, rel=0.02)
    assert mixer.out_proj.weight.std().item() == pytest.approx(0.0175, rel=0.05)  # DeiT's, cut at 2
    log_decay = -mixer.decays[0].log_rate.exp().flatten()
    held = torch.diag((log_decay.exp() - 1) / log_decay)
    torch.testing.assert_close(to_v.weight.detach(), held, rtol=1e-4, atol=1e-6)
    assert (mixer.in_proj.bias == 0).all()


@pytest.mark.parametrize("direction", ["forward", "both"])
def test_lion_s_is_discretized_by_zero_order_hold(direction):
    """App. B.11, Eq. 243 and 244 as printed: the negative factors cancel in the quotient."""
    decay = SelectiveDecayConfig(couple_key=True)
    mixer = trained(LionMixerConfig(decay=decay, decay_at="target", direction=direction))
    x = tokens(2, 6)
    to_q, to_k, to_v = parts_of(mixer)
    q, k = (unit(silu(linear(layer, x)) + 0.5) for layer in (to_q, to_k))
    v, a = linear(to_v, x), torch.sigmoid(linear(mixer.decays[0].proj, x)).log()

    def quotients(order):
        s, z, sums = 0, 0, {}
        for t in order:
            own_z = (a[:, t].exp() - 1) * k[:, t]
            own_s = own_z.unsqueeze(-1) * v[:, t].unsqueeze(-2)
            s, z = a[:, t].exp().unsqueeze(-1) * s + own_s, a[:, t].exp() * z + own_z
            half = 0 if direction == "forward" else 0.5
            y = torch.einsum("bhk,bhkv->bhv", q[:, t], s - half * own_s)
            sums[t] = torch.cat([y, (q[:, t] * (z - half * own_z)).sum(-1, keepdim=True)], -1)
        return torch.stack([sums[t] for t in range(6)], dim=1)

    o = quotients(range(6))
    o = o if direction == "forward" else o + quotients(range(5, -1, -1))
    o = (o[..., :-1] / o[..., -1:]).flatten(-2)
    want = linear(mixer.out_proj, o, heads=False)
    torch.testing.assert_close(mixer(x, LINE)[0], want)


def test_zero_order_hold_replaces_hippos_first_values():
    """The factor of the keys takes the place of the initial values that approximate it."""
    values = [
        parts_of(
            LionMixerConfig(num_heads=HEADS, decay=HippoDecayConfig(zero_order_hold=held)).build(
                width=WIDTH, axes=1
            )
        )[-1].weight
        for held in (False, True)
    ]
    diagonal = torch.eye(WIDTH, dtype=torch.bool)
    assert [(value[~diagonal] == 0).all().item() for value in values] == [True, False]


def test_a_blank_token_does_not_blow_up_the_delta_rules_gradient():
    mixer = DeltaRuleMixerConfig(num_heads=HEADS).build(width=WIDTH, axes=1)
    x = torch.randn(1, 6, WIDTH)
    x[:, 2] = 0
    mixer(x, LINE)[0].sum().backward()
    assert all(p.grad.abs().max() < 1e3 for p in mixer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scan", ["flat", "natural"])
def test_mixed_precision_stays_near_the_whole(dtype, scan):
    mixer = LionMixerConfig(num_heads=HEADS, scan=scan).build(width=WIDTH, axes=2)
    grid, x = Grid((6, 6), prefix=1), torch.randn(2, 37, WIDTH)
    want, _ = mixer(x, grid)
    with torch.autocast("cpu", dtype):
        assert (mixer(x, grid)[0] - want).abs().max() < 0.02 * want.abs().max()
    half, _ = mixer.to(dtype)(x.to(dtype), grid)
    assert half.dtype == dtype
    assert (half.float() - want).abs().max() < 0.05 * want.abs().max()


@pytest.mark.parametrize("decay", [*DECAYS.values(), SelectiveDecayConfig(couple_key=True)])
@pytest.mark.parametrize("autocasts", [True, False])
def test_the_op_reads_queries_keys_and_values_in_the_narrow_type(decay, autocasts, monkeypatch):
    read = {}

    def attend(q, k, v, log_decay, **options):
        read.update(q=q.dtype, k=k.dtype, v=v.dtype)
        if log_decay is not None:
            read["log_decay"] = log_decay.dtype
        return decay_attention(q, k, v, log_decay, **options)

    monkeypatch.setattr(lion, "decay_attention", attend)
    mixer = LionMixerConfig(num_heads=HEADS, decay=decay).build(width=WIDTH, axes=1)
    x = torch.randn(2, 6, WIDTH)
    if not autocasts:
        mixer, x = mixer.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        mixer(x, LINE)
    assert read.pop("log_decay", torch.float32) == torch.float32
    assert read == dict.fromkeys("qkv", torch.bfloat16)


def test_what_natural_scans_divide_has_not_been_rounded():
    """Where all values are one, so is their mean, to the last digit."""
    mixer = LionMixerConfig(num_heads=HEADS, scan="natural").build(width=WIDTH, axes=2).bfloat16()
    with torch.no_grad():
        to_v = parts_of(mixer)[-1]
        to_v.weight.zero_()
        mixer.out_proj.weight.copy_(torch.eye(WIDTH))
        mixer.out_proj.bias.zero_()
    y, _ = mixer(torch.randn(2, 36, WIDTH).bfloat16(), Grid((6, 6)))
    assert torch.equal(y, to_v.bias.expand_as(y))


def test_autocast_does_not_narrow_the_row_sums_before_decay():
    """Without decay the weights of each token are one together, to the last digit."""
    config = LionMixerConfig(
        num_heads=HEADS, decay=NoDecayConfig(), normalize="sum_before_mask", norm="none"
    )
    mixer = config.build(width=WIDTH, axes=1)
    with torch.no_grad():
        to_v = parts_of(mixer)[-1]
        to_v.weight.zero_()
        to_v.bias.fill_(1.0)
        mixer.out_proj.weight.copy_(torch.eye(WIDTH))
        mixer.out_proj.bias.zero_()
        with torch.autocast("cpu", torch.bfloat16):
            y, _ = mixer(torch.randn(2, 36, WIDTH), Grid((36,)))
    assert torch.equal(y, torch.ones_like(y))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LionMixerConfig(direction="alternating"), "'alternating', which describes a whole model"),
        (DeltaRuleMixerConfig(direction="alternating"), "direction is 'alternating'"),
        (LionMixerConfig(chunk_size=0), "chunk_size is 0"),
        (DeltaRuleMixerConfig(chunk_size=0), "chunk_size is 0"),
        (
            LionMixerConfig(scan="natural", normalize="max_one"),
            "normalize is 'max_one' with scan='natural', expected 'none' or 'sum'",
        ),
        (
            LionMixerConfig(normalize="sum_before_mask", direction="forward"),
            "normalize is 'sum_before_mask' with direction='forward', expected 'both'",
        ),
        (
            LionMixerConfig(decay_at="symmetric", direction="backward"),
            "decay_at is 'symmetric' with direction='backward', expected 'both'",
        ),
        (LionMixerConfig(state_size=0), "state_size is 0"),
        (LionMixerConfig(key_width=0), "key_width is 0"),
        (LionMixerConfig(state_size=4, norm_heads=True), "state_size is 4 .* norm_heads=True"),
        (
            LionMixerConfig(state_size=4, decay=HippoDecayConfig()),
            "state_size is 4 with decay=HippoDecayConfig, expected None",
        ),
        (LionMixerConfig(decay=HippoDecayConfig(), num_heads=5), "width 24 is not a multiple of"),
    ],
)
def test_impossible_fields_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        config.build(width=WIDTH, axes=2)


@pytest.mark.parametrize(
    ("config_class", "field"),
    [
        *((LionMixerConfig, f) for f in ("feature_map", "value_map", "gate")),
        *((LionMixerConfig, f) for f in ("normalize", "decay_at", "scan")),
        *((c, f) for c in DIRECTED for f in ("direction", "form")),
    ],
)
def test_unknown_names_are_refused(config_class, field):
    config = config_class()
    object.__setattr__(config, field, "sumn")  # past the tests' own check of types
    with pytest.raises(ValueError, match=f"{field} 'sumn' is unknown"):
        config.build(width=WIDTH, axes=2)


@pytest.mark.compile
@pytest.mark.parametrize("scan", ["flat", "natural"])
def test_a_lion_classifier_compiles_whole(scan):
    config = ImageClassifierConfig(
        image_size=(8, 8), patch_size=(2, 2), width=24, depth=1,
        mixer=LionMixerConfig(num_heads=3, scan=scan),
    )  # fmt: skip
    model, images = config.build().eval(), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images), model(images))
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), model(images))
    batch = torch.export.Dim("batch")
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            exported = torch.export.export(model, (images,), dynamic_shapes=({0: batch},))
        more = torch.randn(5, 3, 8, 8)
        torch.testing.assert_close(exported.module()(more), model(more))


@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        *(LINEAR_TRANSFORMERS[row] for row in ("linear_attention", "mamba2", "gla")),
        dataclasses.replace(LINEAR_TRANSFORMERS["gla"], norm="simple_rms"),
        HydraMixerConfig(),
        RWKV6MixerConfig(),
        LightNetMixerConfig(decay=False),
        LightNetMixerConfig(decay=False, direction="forward"),
    ],
)
def test_sums_that_nothing_divides_may_outgrow_float16(config, autocasts):
    mixer = dataclasses.replace(config, num_heads=HEADS).build(width=WIDTH, axes=1)
    x = 300 * torch.randn(1, 256, WIDTH).abs()
    if not autocasts:
        mixer, x = mixer.half(), x.half()
    with torch.autocast("cpu", dtype=torch.float16, enabled=autocasts):
        o, _ = mixer(x, Grid((256,)))
    assert o.dtype == torch.float16
    assert o.isfinite().all()


@pytest.mark.parametrize("grid", [Grid((4, 4)), Grid((5, 5)), Grid((20,)), Grid((4, 5), prefix=1)])
def test_natural_scans_refuse_a_grid_that_is_not_the_tokens(grid):
    mixer = LionMixerConfig(num_heads=HEADS, scan="natural").build(width=WIDTH, axes=2)
    message = r"x has 20 tokens, but Grid\(.* has|axes, but the mixer was built for 2"
    with pytest.raises(ValueError, match=message):
        mixer(torch.randn(2, 20, WIDTH), grid)


def test_selective_decays_begin_at_their_initial_value():
    x, grid = torch.zeros(1, 3, 8), Grid((3,))
    for decay in (0.5, 0.9):
        mixer = LionMixerConfig(num_heads=2, decay=SelectiveDecayConfig(initial_decay=decay))
        model = ImageClassifierConfig(
            image_size=(4, 4), patch_size=(2, 2), width=8, depth=1, mixer=mixer, position=None
        ).build()
        expected = torch.full((1, 2), decay)
        torch.testing.assert_close(model.blocks[0].mixer.mean_decays(x, grid), expected)
    for decay in (0.0, 1.0):
        with pytest.raises(ValueError, match=rf"decay\.initial_decay is {decay}, expected between"):
            SelectiveDecayConfig(initial_decay=decay).build(width=8, num_heads=2, head_width=4)
