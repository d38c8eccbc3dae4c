"""Sliding-window attention against softmax with a T x T mask, and its bounded cache."""

import dataclasses
import itertools

import pytest
import torch
from pairwise import pairwise

from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.ops.packing import Packing
from onescan.ops.window_attention import MIN_BLOCK, window_attention
from onescan.shapes import Grid

HEADS, WIDTH = 2, 12
LENGTHS = (1, 2, 63, 64, 65, 197)
WINDOWS = (1, 5, 70)  # below and above the smallest block
over_causal = pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
over_windows = pytest.mark.parametrize("window", WINDOWS)


def reads(tokens, window, *, causal):
    """Which tokens each token reads, [T, T]."""
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    return (distance.abs() <= window) & ((distance >= 0) | (not causal))


def reference(q, k, v, mask):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(dim=-1) @ v


def inputs(tokens, batch=2):
    qkv = torch.randn(3, batch, HEADS, tokens, 4, dtype=torch.float64)
    return [x.requires_grad_() for x in qkv]


def assert_equal(y, expected, leaves):
    torch.testing.assert_close(y, expected, atol=1e-9, rtol=1e-9)
    direction = torch.randn_like(expected)
    found, wanted = (
        torch.autograd.grad((z * direction).sum(), leaves, retain_graph=True) for z in (y, expected)
    )
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)


@pairwise({"tokens": LENGTHS, "window": WINDOWS, "causal": [False, True]}, rest_is_slow=True)
def test_values_and_gradients_are_those_of_a_masked_softmax(tokens, window, causal):
    q, k, v = inputs(tokens)
    expected = reference(q, k, v, reads(tokens, window, causal=causal))
    y = window_attention(q, k, v, window=window, causal=causal)
    assert_equal(y, expected, (q, k, v))


@over_causal
@over_windows
@pytest.mark.parametrize("tokens", [9, 150])
def test_masked_tokens_and_other_sequences_are_not_read(tokens, window, causal):
    (q, k, v), keep = inputs(tokens), torch.rand(2, tokens) < 0.7
    offsets = torch.tensor([0, 3, tokens - 1, tokens, tokens + 5, 2 * tokens])
    packing = Packing(offsets, batch=2, tokens=tokens)
    alike = packing.sequence[:, :, None] == packing.sequence[:, None, :]
    own = torch.eye(tokens, dtype=torch.bool)
    mask = reads(tokens, window, causal=causal) & alike & keep[:, None, :] & keep[:, :, None] | own
    expected = reference(q, k, v, mask.unsqueeze(1))
    y = window_attention(
        q, k, v, window=window, causal=causal, keep=keep, sequence=packing.sequence
    )
    assert_equal(y, expected, (q, k, v))


@over_windows
@pytest.mark.parametrize("tokens", [1, 9, 150])
def test_queries_continue_after_cached_keys(tokens, window):
    total = tokens + window
    q, k, v = inputs(total)
    expected = reference(q, k, v, reads(total, window, causal=True))[:, :, window:]
    y = window_attention(q[:, :, window:], k, v, window=window, causal=True)
    assert_equal(y, expected, (q, k, v))


def test_memory_does_not_grow_with_the_square_of_the_length():
    """Without a block larger than the window, no tensor has more than T x 3 blocks elements."""
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            y = function(*args, **(kwargs or {}))
            for x in y if isinstance(y, tuple) else (y,):
                largest = max(largest, x.numel() if isinstance(x, torch.Tensor) else 0)
            return y

    tokens = 4096
    q, k, v = torch.randn(3, 1, 1, tokens, 4).unbind()
    with Sizes():
        window_attention(q, k, v, window=7, causal=False)
    assert largest <= tokens * 3 * MIN_BLOCK


def trained(**fields):
    mixer = SoftmaxMixerConfig(num_heads=HEADS, **fields).build(width=WIDTH, axes=1).double()
    for parameter in mixer.parameters():  # biases too
        torch.nn.init.normal_(parameter, std=0.5)
    return mixer.eval()


def tokens_of(batch, count):
    return torch.randn(batch, count, WIDTH, dtype=torch.float64, requires_grad=True)


def rotate(x):
    """Rotary embeddings, as products of complex numbers."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 10_000.0 ** -(torch.arange(half) / half)
    y = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones(()), angles)
    return torch.cat([y.real, y.imag], dim=-1)


@over_causal
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("window", [3, 30])
def test_the_mixer_is_the_formula(window, rotary, causal):
    mixer, x = (
        trained(window=window, direction="forward" if causal else "both", rotary=rotary),
        tokens_of(2, 20),
    )
    keep = torch.rand(2, 20) < 0.7
    q, k, v = (
        y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in mixer.in_proj(x).chunk(3, dim=-1)
    )
    if rotary:
        q, k = rotate(q), rotate(k)
    own = torch.eye(20, dtype=torch.bool)
    for real in (torch.ones_like(keep), keep):
        mask = reads(20, window, causal=causal) & real[:, None, :] | own
        o = reference(q, k, v, mask.unsqueeze(1)).transpose(1, 2).flatten(2)
        expected = mixer.out_proj(o) * real.unsqueeze(-1)
        y, state = mixer(x, Grid((20,)), keep=None if real.all() else real)
        torch.testing.assert_close(y, expected, atol=1e-6, rtol=1e-6)  # angles are float32
        assert (state is not None) == causal


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("window", [1, 3, 20])
@pytest.mark.parametrize("masked", [False, True])
def test_two_calls_equal_one_at_every_cut(masked, window, rotary):
    mixer, x = trained(window=window, direction="forward", rotary=rotary), tokens_of(2, 9)
    keep = torch.rand(2, 9) < 0.7 if masked else None
    want, whole = mixer(x, Grid((9,)), keep=keep)
    for sizes in [*([cut, 9 - cut] for cut in range(1, 9)), [2, 3, 4], [1] * 9]:
        outputs, state, start = [], None, 0
        for count in sizes:
            part = slice(start, start + count)
            real = None if keep is None else keep[:, part]
            y, state = mixer(x[:, part], Grid((count,)), keep=real, state=state)
            assert state.k.shape[2] == window
            outputs.append(y)
            start += count
        assert_equal(torch.cat(outputs, dim=1), want, (x, *mixer.parameters()))
        torch.testing.assert_close(state, whole)


def test_a_state_continues_long_inputs():
    mixer, x = trained(window=5, direction="forward", rotary=True), tokens_of(1, 200)
    want, whole = mixer(x, Grid((200,)))
    first, state = mixer(x[:, :7], Grid((7,)))
    rest, state = mixer(x[:, 7:], Grid((193,)), state=state)
    assert_equal(torch.cat([first, rest], dim=1), want, (x, *mixer.parameters()))
    torch.testing.assert_close(state, whole)
    assert whole.k.untyped_storage().nbytes() <= 2 * whole.k.nbytes  # not that of all keys


@over_causal
@pytest.mark.parametrize("window", [3, 100])
def test_packed_sequences_equal_each_alone(window, causal):
    mixer, x = (
        trained(window=window, direction="forward" if causal else "both", rotary=True),
        tokens_of(2, 90),
    )
    keep = torch.rand(2, 90) < 0.8
    offsets = [0, 1, 75, 90, 94, 180]
    packing = Packing(torch.tensor(offsets), batch=2, tokens=90)
    y, state = mixer(x, Grid((90,)), keep=keep, cu_seqlens=packing)
    assert state is None
    rows, real = x.flatten(0, 1), keep.flatten()
    alone = [
        mixer(rows[None, start:stop], Grid((stop - start,)), keep=real[None, start:stop])[0]
        for start, stop in itertools.pairwise(offsets)
    ]
    assert_equal(y.flatten(0, 1), torch.cat(alone, dim=1)[0], (x, *mixer.parameters()))


def test_padding_on_the_left_changes_nothing():
    mixer, x = trained(window=3, direction="forward", rotary=True), tokens_of(2, 5)
    want, whole = mixer(x, Grid((5,)))
    padded = torch.cat([torch.full_like(x[:, :3], torch.nan), x], dim=1)
    y, state = mixer(padded, Grid((8,)), keep=torch.arange(8).expand(2, -1) >= 3)
    torch.testing.assert_close(y[:, 3:], want)
    torch.testing.assert_close(state.v, whole.v)
    assert (y[:, :3] == 0).all()


def test_a_window_of_all_tokens_is_softmax_attention():
    for causal in (False, True):
        mixer, x = trained(window=6, direction="forward" if causal else "both"), tokens_of(2, 7)
        everywhere = SoftmaxMixerConfig(
            num_heads=HEADS, direction="forward" if causal else "both"
        ).build(width=WIDTH, axes=1)
        everywhere.double().load_state_dict(mixer.state_dict())
        assert torch.equal(mixer(x, Grid((7,)))[0], everywhere(x, Grid((7,)))[0])


@pytest.mark.compile
def test_a_window_compiles_whole():
    mixer, x = trained(window=3, direction="forward", rotary=True), tokens_of(2, 80).detach()
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    want, whole = mixer(x, Grid((80,)))
    first, state = compiled(x[:, :70], Grid((70,)))
    rest, state = compiled(x[:, 70:], Grid((10,)), state=state)
    torch.testing.assert_close(torch.cat([first, rest], dim=1), want)
    torch.testing.assert_close(state, whole)


@pytest.mark.parametrize(
    ("fields", "axes", "message"),
    [({"window": 0}, 1, "window is 0"), ({"window": 4}, 2, "mixer.window is 4 with 2 axes")],
)
def test_impossible_windows_are_refused(fields, axes, message):
    with pytest.raises(ValueError, match=message):
        SoftmaxMixerConfig(**fields).build(width=WIDTH, axes=axes)


def test_states_and_offsets_that_do_not_apply_are_refused():
    mixer, other = trained(window=3, direction="forward"), trained(window=4, direction="forward")
    everywhere, x, grid = trained(direction="forward"), tokens_of(1, 5), Grid((5,))
    packing = Packing(torch.tensor([0, 2, 5]), batch=1, tokens=5)
    _, state = other(x, grid)
    with pytest.raises(ValueError, match="state has 4 cached tokens, expected 3"):
        mixer(x, grid, state=state)
    with pytest.raises(ValueError, match="cu_seqlens and state were both given"):
        other(x, grid, state=state, cu_seqlens=packing)
    with pytest.raises(ValueError, match="cu_seqlens was given with window None"):
        everywhere(x, grid, cu_seqlens=packing)
    with pytest.raises(ValueError, match="state was given to a mixer that is not causal"):
        trained(window=3)(x, grid, state=state)


@pytest.mark.parametrize("window", [0, 1.5, True, "4"])
def test_windows_of_other_types_are_refused(window):
    config = SoftmaxMixerConfig(num_heads=HEADS)
    object.__setattr__(config, "window", window)  # tests check the types of arguments
    expected = "a whole number of at least 1" if window == 0 else r"int \| None"
    message = f"window is {window!r}, expected {expected}"
    with pytest.raises(ValueError, match=message):
        config.build(width=WIDTH, axes=1)


def test_the_state_of_a_huge_window_is_refused():
    config = SoftmaxMixerConfig(num_heads=HEADS, window=10**9, direction="forward")
    with pytest.raises(ValueError, match=r"window is 1000000000, expected at most .* None"):
        config.build(width=WIDTH, axes=1)
    both = dataclasses.replace(config, direction="both").build(width=WIDTH, axes=1)  # has no state
    x = torch.randn(1, 5, WIDTH)
    everything = dataclasses.replace(config, direction="both", window=None).build(
        width=WIDTH, axes=1
    )
    everything.load_state_dict(both.state_dict())
    assert torch.equal(both(x, Grid((5,)))[0], everything(x, Grid((5,)))[0])
