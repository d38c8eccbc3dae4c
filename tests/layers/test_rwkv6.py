"""RWKV-6's time mixing against the paper's recurrence, token by token in float64."""

import dataclasses
from inspect import unwrap

import pytest
import torch
from pairwise import pairwise

from onescan.checkpoint.generation_state import load_generation_state, save_generation_state
from onescan.configs import from_dict, replace, to_dict
from onescan.layers.mixers import MIXERS, RWKV6MixerConfig
from onescan.layers.mixers.rwkv6 import GROUP_NORM_EPS, previous_tokens
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.shapes import Grid

WIDTH, HEADS, K = 24, 3, 8
LM = CausalLMConfig(
    vocab_size=13, width=WIDTH, depth=2, mixer=RWKV6MixerConfig(num_heads=3, direction="forward")
)
DIRECTIONS = ["forward", "backward", "both"]
over_directions = pytest.mark.parametrize("direction", DIRECTIONS)


def tokens(*shape):
    return torch.randn(*shape, WIDTH, dtype=torch.float64)


def trained(direction, **fields):
    """Return a mixer with weights as training may leave them, in float64."""
    config = RWKV6MixerConfig(num_heads=HEADS, direction=direction, shift_rank=4, **fields)
    mixer = config.build(width=WIDTH, axes=1).double()
    for parameter in mixer.parameters():
        with torch.no_grad():
            parameter += 0.3 * torch.randn_like(parameter)
    return mixer


def line(count):
    return Grid((count,))


def ddlerp(mixer, part, x, other):
    """a + (b - a) * (mu + tanh((a + (b - a) mu_x) A) B), for one of r, k, v, w and g."""
    mu, up = mixer.shift_mix[part], mixer.shift_up[part]
    rank = up.shape[0]
    down = mixer.shift_down.weight[part * rank : (part + 1) * rank]
    mixed = x + (other - x) * mixer.shift_base
    return x + (other - x) * (mu + torch.tanh(mixed @ down.T) @ up)


def inputs(mixer, x, other):
    """Return r, k, v [T, H, K], w [T, H, K] and silu(g) [T, D] of one sequence [T, D]."""
    r, k, v, w, g = (ddlerp(mixer, part, x, other) for part in range(5))
    d = torch.tanh(w @ mixer.decay.down_proj.weight.T) @ mixer.decay.up_proj.weight.T
    w = torch.exp(-torch.exp(mixer.decay.log_rate.flatten() + d))
    r, k, v = r @ mixer.q_proj.weight.T, k @ mixer.k_proj.weight.T, v @ mixer.v_proj.weight.T
    g = g @ mixer.gate_proj.weight.T
    return *(y.reshape(len(x), HEADS, K) for y in (r, k, v, w)), g * torch.sigmoid(g)


def recurrence(mixer, r, k, v, w, *, bonus):
    """o_t = r_t (S_{t-1} + bonus diag(u) k_t v_t^T), then S_t = diag(w_t) S_{t-1} + k_t v_t^T."""
    state, outputs = torch.zeros(HEADS, K, K, dtype=r.dtype), []
    for t in range(len(r)):
        own = k[t].unsqueeze(-1) * v[t].unsqueeze(-2)
        read = state + bonus * mixer.bonus.unsqueeze(-1) * own
        outputs.append((r[t].unsqueeze(-2) @ read).squeeze(-2))
        state = w[t].unsqueeze(-1) * state + own
    return torch.stack(outputs)


def original(mixer, x, direction):
    """The paper's time mixing of one sequence [T, D]."""
    if direction == "backward":
        return original(mixer, x.flip(0), "forward").flip(0)
    zero = torch.zeros_like(x[:1])
    before, after = torch.cat([zero, x])[:-1], torch.cat([x, zero])[1:]
    other = before if direction == "forward" else (before + after) / 2
    r, k, v, w, gate = inputs(mixer, x, other)
    if direction == "forward":
        o = recurrence(mixer, r, k, v, w, bonus=1)
    else:
        o = recurrence(mixer, r, k, v, w, bonus=0.5)
        o = o + recurrence(mixer, *(y.flip(0) for y in (r, k, v, w)), bonus=0.5).flip(0)
    centered = o - o.mean(dim=-1, keepdim=True)
    o = centered / (centered.square().mean(dim=-1, keepdim=True) + GROUP_NORM_EPS).sqrt()
    o = o.reshape(len(x), WIDTH) * mixer.norm.weight + mixer.norm.bias
    return (o * gate) @ mixer.out_proj.weight.T


@pairwise(
    {
        "direction": DIRECTIONS,
        "form": ["full", "chunk", "recurrent", "auto"],
        "count": [1, 2, 7],
    },
    rest_is_slow=True,
)
def test_rwkv6_is_the_papers_recurrence(direction, form, count):
    mixer = trained(direction, form=form, chunk_size=2)
    x = tokens(2, count).requires_grad_()
    y, _ = mixer(x, line(count))
    want = torch.stack([original(mixer, row, direction) for row in x])
    torch.testing.assert_close(y, want, rtol=1e-9, atol=1e-9)
    slope, parameters = torch.randn_like(y), [x, *mixer.parameters()]
    got = torch.autograd.grad(y, parameters, slope, allow_unused=count == 1)
    expected = torch.autograd.grad(want, parameters, slope, allow_unused=count == 1)
    for one, two in zip(got, expected, strict=True):
        if two is None:  # a single token has no use for a decay
            assert one is None or not one.any()
        else:
            torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-8)


def test_both_directions_attend_with_a_mask_that_excludes_both_tokens():
    """M_ij is the product of the decays strictly between i and j, and u on the diagonal."""
    mixer, x = trained("both"), tokens(1, 5)
    zero = torch.zeros_like(x[0, :1])
    other = (torch.cat([zero, x[0]])[:-1] + torch.cat([x[0], zero])[1:]) / 2
    r, k, v, w, gate = inputs(mixer, x[0], other)
    o = torch.zeros_like(v)
    for i in range(5):
        for j in range(5):
            mask = mixer.bonus if i == j else w[min(i, j) + 1 : max(i, j)].prod(dim=0)
            o[i] += (r[i] * mask * k[j]).sum(dim=-1, keepdim=True) * v[j]
    o = torch.nn.functional.group_norm(
        o.reshape(5, WIDTH), HEADS, mixer.norm.weight, mixer.norm.bias, GROUP_NORM_EPS
    )
    torch.testing.assert_close(mixer(x, line(5))[0][0], (o * gate) @ mixer.out_proj.weight.T)


def test_both_directions_do_not_depend_on_the_end_at_which_they_start():
    mixer, x = trained("both"), tokens(2, 6)
    torch.testing.assert_close(mixer(x.flip(1), line(6))[0].flip(1), mixer(x, line(6))[0])


def test_decays_of_zero_are_exact():
    """A decay that underflows forgets all tokens but the previous one, whose decay is not read."""
    mixer = trained("forward")
    with torch.no_grad():
        mixer.decay.log_rate.fill_(100)
    x = tokens(1, 6).requires_grad_()
    y, _ = mixer(x, line(6))
    y.sum().backward()
    assert x.grad.isfinite().all()
    other = torch.cat([torch.zeros_like(x[0, :1]), x[0]])[:-1]
    r, k, v, _, gate = inputs(mixer, x[0], other)
    own = (r * mixer.bonus * k).sum(dim=-1, keepdim=True) * v
    before = (r[1:] * k[:-1]).sum(dim=-1, keepdim=True) * v[:-1]
    o = own + torch.cat([torch.zeros_like(own[:1]), before])
    o = torch.nn.functional.group_norm(
        o.reshape(6, WIDTH), HEADS, mixer.norm.weight, mixer.norm.bias, GROUP_NORM_EPS
    )
    torch.testing.assert_close(y[0], (o * gate) @ mixer.out_proj.weight.T)


@pytest.mark.parametrize("form", ["full", "chunk", "recurrent", "auto"])
def test_two_calls_equal_one_at_every_cut(form):
    mixer = trained("forward", form=form, chunk_size=4)
    x, keep = tokens(3, 7), torch.rand(3, 7) < 0.7
    keep[0], keep[1, :4] = True, False  # no real token before some cuts
    want, whole = mixer(x, line(7), keep=keep)
    for cut in range(1, 7):
        first, state = mixer(x[:, :cut], line(cut), keep=keep[:, :cut])
        rest, state = mixer(x[:, cut:], line(7 - cut), keep=keep[:, cut:], state=state)
        torch.testing.assert_close(torch.cat([first, rest], dim=1), want)
        torch.testing.assert_close(state, whole)


@over_directions
def test_masked_tokens_equal_removed_ones(direction):
    mixer, x = trained(direction), tokens(1, 8)
    keep = torch.tensor([[False, False, True, True, False, False, True, False]])
    x[~keep] = torch.nan
    y, state = mixer(x, line(8), keep=keep)
    short, short_state = mixer(x[keep][None], line(3))
    torch.testing.assert_close(y[keep][None], short)
    assert (y[~keep] == 0).all()
    torch.testing.assert_close(state, short_state)
    y.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in mixer.parameters())


def test_the_previous_token_is_the_last_real_one():
    x = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]]).unsqueeze(-1)
    keep = torch.tensor([[True, False, False, True], [False] * 4])
    first = torch.tensor([[-1.0], [-2.0]])
    before, last = previous_tokens(x, keep, first)
    assert before.squeeze(-1).tolist() == [[-1, 1, 1, 1], [-2] * 4]
    assert last.tolist() == [[4], [-2]]
    before, last = previous_tokens(x, None, first)
    assert before.squeeze(-1).tolist() == [[-1, 1, 2, 3], [-2, 5, 6, 7]]
    assert last.tolist() == [[4], [8]]


def test_initial_values_are_the_papers():
    mixer = RWKV6MixerConfig(num_heads=HEADS).build(width=WIDTH, axes=1)
    mixer.init_weights()
    share = torch.arange(WIDTH) / WIDTH
    r, k, v, w, g = mixer.shift_mix
    for mix, power in ((mixer.shift_base, 1), (k, 1), (v, 1), (w, 1), (r, 0.5), (g, 0.5)):
        torch.testing.assert_close(mix, 1 - share**power)
    rates = mixer.decay.log_rate.flatten()
    assert rates[0].item() == pytest.approx(-6)
    assert rates[-1].item() == pytest.approx(-1)
    assert (rates.diff() > 0).all()
    assert mixer.bonus.flatten()[:4].tolist() == pytest.approx([0, 0.1, -0.1, 0])


def test_a_language_model_is_built_saved_and_generates(tmp_path):
    config = from_dict(CausalLMConfig, to_dict(LM))
    assert config == LM
    model = config.build().double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(13, (2, 5))
    generated = model.generate(ids, max_new_tokens=6)
    texts = torch.cat([ids, generated], dim=1)
    assert torch.equal(model(texts)[0][:, 4:-1].argmax(dim=-1), generated)
    _, state = model(ids)
    save_generation_state(tmp_path / "state.safetensors", state, model)
    loaded = load_generation_state(tmp_path / "state.safetensors", model)
    assert torch.equal(model(texts[:, 5:], loaded)[0], model(texts[:, 5:], state)[0])


def test_rwkv6_classifies_images_in_both_directions():
    config = ImageClassifierConfig(
        image_size=(8, 8), patch_size=(2, 2), width=WIDTH, depth=1, num_classes=5,
        mixer=RWKV6MixerConfig(num_heads=HEADS),
    )  # fmt: skip
    model = config.build().eval()
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 5)
    with pytest.raises(ValueError, match="class token reads no patch"):
        dataclasses.replace(
            config, mixer=RWKV6MixerConfig(num_heads=HEADS, direction="forward")
        ).build()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_is_close_to_float32(dtype):
    mixer, x = trained("forward").float(), torch.randn(2, 37, WIDTH)
    want, _ = mixer(x, line(37))
    with torch.autocast("cpu", dtype):
        found, state = mixer(x, line(37))
    assert (found - want).norm() < 0.05 * want.norm()
    assert state.attention.kv.dtype == torch.float32
    half, state = mixer.to(dtype)(x.to(dtype), line(37))
    assert half.dtype == state.last_token.dtype == dtype
    assert (half.float() - want).norm() < 0.1 * want.norm()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shift_rank": 0}, "shift_rank is 0"),
        ({"decay_rank": -1}, "decay_rank is -1"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"direction": "alternating"}, "direction is 'alternating'"),
        ({"num_heads": 5}, "width 24 is not a multiple of num_heads 5"),
    ],
)
def test_invalid_fields_are_rejected(fields, message):
    config = replace(MIXERS["rwkv6"](num_heads=HEADS), fields)
    with pytest.raises(ValueError, match=message):
        config.build(width=WIDTH, axes=1)


def test_states_of_other_mixers_and_grids_are_rejected():
    mixer = trained("forward")
    _, state = mixer(tokens(1, 3), line(3))
    with pytest.raises(ValueError, match="state is a DecayState, expected a RWKV6State"):
        unwrap(type(mixer).forward)(mixer, tokens(1, 3), line(3), state=state.attention)
    with pytest.raises(ValueError, match=r"state was given with Grid\(.*prefix"):
        mixer(tokens(1, 7), Grid((2, 3), prefix=1), state=state)


@pytest.mark.compile
def test_an_rwkv6_language_model_compiles_whole():
    model, ids = LM.build().eval(), torch.randint(13, (2, 9))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids)[0], model(ids)[0])
