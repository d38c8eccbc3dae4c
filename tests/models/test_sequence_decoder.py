"""The decoding head: states, masks, and a task that needs both sequences in their order."""

import dataclasses
from inspect import unwrap

import pytest
import torch
from projections import equal_parts
from torch import nn
from torch.nn.functional import cross_entropy

from onescan.layers.basic import GLUConfig
from onescan.layers.block import Block
from onescan.layers.mixers import (
    HGRNMixerConfig,
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.mixers.linear_diffusion import LinearCrossAttention
from onescan.layers.position import sinusoidal_positions
from onescan.models.sequence_decoder import SequenceDecoderConfig
from onescan.ops.decay_attention import decay_attention
from onescan.shapes import Grid

START, END, VOCABULARY, WIDTH = 0, 1, 8, 32
CONFIG = SequenceDecoderConfig(
    vocab_size=VOCABULARY,
    width=WIDTH,
    num_heads=4,
    mixer=LinearDiffusionMixerConfig(num_heads=4, direction="forward", max_sigma=8.5),
    init_std=0.1,
)
MIXERS = {
    "linear_diffusion": {},
    "lightnet": {
        "mixer": LightNetMixerConfig(num_heads=4, direction="forward"),
        "mlp": GLUConfig(),
    },
    "lion": {"mixer": LionMixerConfig(num_heads=4, direction="forward"), "mlp": GLUConfig()},
    "lower bounds": {
        "mixer": HGRNMixerConfig(num_heads=4, direction="forward"),
        "mlp": GLUConfig(),
    },
}


def ids(*shape):
    return torch.randint(2, VOCABULARY, shape)


def built(config=CONFIG):
    decoder = config.build().double().eval()
    for parameter in decoder.parameters():
        nn.init.normal_(parameter, std=0.3)
    return decoder


class Encoder(nn.Module):
    """Tokens to a small LDN's last layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        mixer = LinearDiffusionMixerConfig(num_heads=4)
        self.block = Block(WIDTH, axes=1, mixer=mixer, mlp=None, norm="layer")

    def forward(self, tokens, keep=None):
        places = sinusoidal_positions(torch.arange(tokens.shape[1]), WIDTH)
        x = self.embedding(tokens) + places
        return self.block(x, Grid((tokens.shape[1],)), keep=keep)[0]


@pytest.mark.slow
def test_it_learns_to_reverse_a_sequence():
    """Which needs the tokens, their places, and an end: none of 100 new ones is written wrongly."""
    encoder, decoder = Encoder(), CONFIG.build()
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=5e-3)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total_iters=300)
    for _ in range(300):
        read = ids(32, 4)
        written = torch.cat([read.flip(1), torch.full((32, 1), END)], dim=1)
        before = torch.cat([torch.full((32, 1), START), written[:, :-1]], dim=1)
        logits, _ = decoder(before, encoder(read))
        optimizer.zero_grad()
        cross_entropy(logits.flatten(0, 1), written.flatten()).backward()
        optimizer.step()
        rate.step()
    read = ids(100, 4)
    got = decoder.generate(encoder(read), start=START, end=END, max_new_tokens=20)
    assert torch.equal(got, torch.cat([read.flip(1), torch.full((100, 1), END)], dim=1))


@pytest.mark.parametrize("change", MIXERS.values(), ids=MIXERS)
def test_two_calls_equal_one_at_every_cut(change):
    decoder = built(dataclasses.replace(CONFIG, **change))
    tokens, memory = ids(2, 7), torch.randn(2, 9, WIDTH, dtype=torch.float64)
    keep = torch.rand(2, 9) < 0.7
    want, whole = decoder(tokens, memory, memory_mask=keep)
    for cut in range(1, 7):
        first, state = decoder(tokens[:, :cut], memory, memory_mask=keep)
        rest, state = decoder(tokens[:, cut:], state=state)
        torch.testing.assert_close(torch.cat([first, rest], dim=1), want)
        assert state.position == whole.position == 7


def test_no_token_hears_of_a_later_one_and_each_of_all_that_was_encoded():
    decoder, memory = built(), torch.randn(1, 9, WIDTH, dtype=torch.float64, requires_grad=True)
    tokens = ids(1, 6)
    logits, _ = decoder(tokens, memory)
    logits[:, 0].sum().backward()
    assert (memory.grad != 0).any(dim=-1).all()
    other = tokens.clone()
    other[:, 3:] = 9 - other[:, 3:]
    assert torch.equal(decoder(other, memory)[0][:, :3], logits[:, :3])
    assert (decoder(other, memory)[0][:, 3:] != logits[:, 3:]).all()


def test_masked_tokens_of_the_encoder_are_as_if_absent():
    decoder, memory = built(), torch.randn(2, 9, WIDTH, dtype=torch.float64)
    keep = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 0], dtype=torch.bool)
    tokens = ids(2, 4)
    want, _ = decoder(tokens, memory[:, keep])
    want.square().sum().backward()
    gradients = [p.grad for p in decoder.parameters()]
    decoder.zero_grad()
    memory[:, ~keep] = torch.nan
    got, _ = decoder(tokens, memory, memory_mask=keep.expand(2, -1))
    torch.testing.assert_close(got, want)
    got.square().sum().backward()
    torch.testing.assert_close([p.grad for p in decoder.parameters()], gradients)


def test_reading_what_was_remembered_is_attention_to_it():
    """As of a token that comes after all others, and is none of them."""
    attention = LinearCrossAttention(WIDTH, 4, "relu").double()
    x, memory = (torch.randn(2, n, WIDTH, dtype=torch.float64) for n in (3, 6))
    heads = lambda y: y.unflatten(-1, (4, -1))
    q = heads(attention.q_proj(x))
    k, v = (heads(y) for y in attention.kv_proj(memory).chunk(2, dim=-1))
    _, state = decay_attention(k.relu(), k.relu(), v, causal=True)
    want = torch.einsum("bthk,bhkv->bthv", q.relu(), state.kv)
    want = want / torch.einsum("bthk,bhk->bth", q.relu(), state.k_sum).unsqueeze(-1)
    remembered = attention.encode_memory(memory)
    torch.testing.assert_close(remembered.kv, state.kv)
    torch.testing.assert_close(attention(x, remembered), want.flatten(-2))


def test_nothing_but_masked_tokens_gives_zero_and_finite_gradients():
    attention = LinearCrossAttention(WIDTH, 4, "relu").double()
    x = torch.randn(1, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    remembered = attention.encode_memory(x, torch.zeros(1, 3, dtype=torch.bool))
    o = attention(x, remembered)
    assert (o == 0).all()
    o.sum().backward()
    assert torch.isfinite(x.grad).all()


def test_what_is_written_ends_with_its_first_end_or_after_the_most():
    decoder, memory = built(), 3 * torch.randn(40, 3, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        decoder.head.bias[END] += 0.6
    written = decoder.generate(memory, start=START, end=END, max_new_tokens=6)
    assert written.shape[1] <= 6
    lengths = set()
    for b in range(40):  # one at a time, and by hand
        token, state, alone = torch.tensor([[START]]), None, []
        while len(alone) < 6 and END not in alone:
            encoded = memory[b : b + 1] if state is None else None
            logits, state = decoder(token, encoded, state=state)
            token = logits[:, -1:].argmax(-1)
            alone.append(token.item())
        row = written[b].tolist()
        assert row[: len(alone)] == alone
        assert set(row[len(alone) :]) <= {END}
        lengths.add(len(alone))
    assert len(lengths) > 1  # some ended before others


def test_all_ends_at_once_end_the_writing():
    decoder = built()
    with torch.no_grad():
        decoder.head.bias[END] += 1e6
    memory = torch.randn(3, 2, WIDTH, dtype=torch.float64)
    assert decoder.generate(memory, start=START, end=END, max_new_tokens=50).tolist() == [[END]] * 3


def test_places_are_sines_and_cosines():
    places = sinusoidal_positions(torch.tensor([0, 3]), width=5)
    for i in range(3):
        angle = torch.tensor(3.0) / 10_000 ** (2 * i / 5)
        torch.testing.assert_close(places[1, i], angle.sin())
        if i < 2:
            torch.testing.assert_close(places[1, 3 + i], angle.cos())
    assert places[0].tolist() == [0, 0, 0, 1, 1]


def test_sines_of_far_positions_are_exact():
    far = 100_000_001
    found = sinusoidal_positions(torch.tensor([far]), width=64)[0]
    assert found.dtype == torch.float32
    angles = far * 10_000.0 ** -(torch.arange(0, 64, 2).double() / 64)
    expected = torch.cat([angles.sin(), angles.cos()])
    torch.testing.assert_close(found.double(), expected, atol=3e-7, rtol=0)


TOKENS, MEMORY = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 4, WIDTH)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": TOKENS[0]}, r"tokens has shape \(3,\)"),
        ({"tokens": TOKENS[:, :0]}, "T is 0"),
        ({"tokens": TOKENS + VOCABULARY}, "tokens contains ids from 8 to 8, expected 0 to 7"),
        ({"tokens": TOKENS - 1}, "tokens contains ids from -1 to -1, expected 0 to 7"),
        ({"tokens": None}, "tokens is a NoneType"),
        ({"tokens": TOKENS.float()}, "tokens has dtype torch.float32"),
        ({"memory": None}, "neither memory nor state was given"),
        ({"state": 3}, "memory and state were both given"),
        ({"memory": None, "state": 3}, "state is an int"),
        ({"memory": MEMORY[:1]}, r"memory has shape \(1, 4, 32\)"),
        ({"memory": MEMORY[..., :9]}, r"memory has shape \(2, 4, 9\)"),
        ({"memory": MEMORY.long()}, "memory has dtype torch.int64"),
        ({"memory_mask": torch.ones(2, 5).bool()}, r"memory_mask has shape \(2, 5\)"),
        ({"memory_mask": torch.ones(2, 4)}, "memory_mask has dtype torch.float32"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    decoder = CONFIG.build()
    with pytest.raises(ValueError, match=message):
        unwrap(type(decoder).forward)(decoder, **{"tokens": TOKENS, "memory": MEMORY, **arguments})


def test_a_state_of_another_decoder_is_refused():
    state = CONFIG.build()(TOKENS, MEMORY)[1]
    other = dataclasses.replace(CONFIG, depth=3).build()
    with pytest.raises(ValueError, match="state has 2 blocks and 2 memories, expected 3 of each"):
        other(TOKENS, state=state)
    other = dataclasses.replace(CONFIG, num_heads=2).build()
    with pytest.raises(ValueError, match=r"memories\[0\].kv has shape .*, expected 'B 2 16 16'"):
        other(TOKENS, state=state)
    with pytest.raises(ValueError, match=r"kv has shape \(2, .*, expected .* with B=1"):
        CONFIG.build()(TOKENS[:1], state=state)
    with pytest.raises(ValueError, match="memory_mask was given with a state"):
        CONFIG.build()(TOKENS, state=state, memory_mask=torch.ones(2, 4).bool())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixer": SoftmaxMixerConfig(num_heads=4)}, "mixer is not causal"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_heads": 5}, "width 32 is not a multiple of num_heads 5"),
        ({"depth": 0}, "depth is 0"),
    ],
)
def test_impossible_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change).build()


def test_the_logits_are_what_the_parts_make():
    """Embedding and place; each layer's block, then its attention; a norm, and the head."""
    decoder, tokens = built(), ids(2, 5)
    memory = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    x = embedding = (
        decoder.embedding(tokens) + sinusoidal_positions(torch.arange(5), WIDTH).double()
    )
    for layer in decoder.layers:
        x = x + layer.block.mixer(x, Grid((5,)), embedding=embedding)[0]
        q, k, v = (
            (y @ each.weight.T).unflatten(-1, (4, -1))
            for y, each in (
                (layer.norm(x), layer.attention.q_proj),
                *((memory, part) for part in equal_parts(layer.attention.kv_proj, 2)),
            )
        )
        scores = torch.einsum("bthk,bshk->bhts", q.relu(), k.relu())
        shares = scores / scores.sum(-1, keepdim=True)
        x = x + torch.einsum("bhts,bshv->bthv", shares.nan_to_num(), v).flatten(-2)
    mean, spread = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
    x = (x - mean) / (spread + 1e-6).sqrt() * decoder.norm.weight + decoder.norm.bias
    want = x @ decoder.head.weight.T + decoder.head.bias
    torch.testing.assert_close(decoder(tokens, memory)[0], want)


def test_what_a_decoder_is_by_default():
    config = SequenceDecoderConfig(vocab_size=9)
    assert (config.width, config.depth, config.norm, config.feature_map) == (
        192,
        2,
        "layer",
        "relu",
    )
    decoder = config.build()
    sigmas = [layer.block.mixer.diffusions[0].sigma().item() for layer in decoder.layers]
    assert sigmas == pytest.approx([1.0, 2.0])
    for weight in (decoder.embedding.weight, decoder.head.weight):
        assert weight.std().item() == pytest.approx(0.0176, rel=0.1)  # 0.02, cut at twice as much
        assert 0.03 < weight.abs().max().item() <= 0.04


def test_autocast_narrows_products_and_no_sums():
    decoder = CONFIG.build()
    memory = torch.nn.Linear(WIDTH, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        encoded = memory(torch.randn(2, 50, WIDTH))
        assert encoded.dtype == torch.bfloat16
        logits, state = decoder(ids(2, 3), encoded)
        attention = decoder.layers[0].attention
        read = attention(torch.randn(2, 3, WIDTH), state.memories[0])
    assert state.memories[0].kv.dtype == state.memories[0].k_sum.dtype == torch.float32
    assert read.dtype == logits.dtype == torch.bfloat16


def test_writing_needs_no_gradient_and_takes_small_ids():
    decoder, memory = CONFIG.build(), torch.randn(1, 2, WIDTH, requires_grad=True)
    seen = []
    decoder.head.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    decoder.generate(memory, start=START, end=END, max_new_tokens=1)
    assert seen == [False]  # and one token is one call
    small, _ = decoder(ids(1, 3).int(), memory)
    assert small.shape == (1, 3, VOCABULARY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": VOCABULARY}, "start is 8"),
        ({"end": -1}, "end is -1"),
        ({"end": 1.5}, "end is 1.5"),
        ({"end": None}, "end is None"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5, expected a whole number"),
        ({"memory": [[0.0]]}, "memory is a list, expected a tensor"),
    ],
)
def test_writing_refuses_invalid_arguments(change, message):
    decoder = CONFIG.build()
    arguments = {"memory": MEMORY, "start": START, "end": END, "max_new_tokens": 3, **change}
    with pytest.raises(ValueError, match=message):
        unwrap(type(decoder).generate)(decoder, **arguments)


def test_a_state_without_its_mixers_is_refused():
    decoder = CONFIG.build()
    _, state = decoder(TOKENS, MEMORY)
    with pytest.raises(ValueError, match=r"state\.mixers contains None"):
        decoder(TOKENS, state=state._replace(mixers=(None, None)))
    with pytest.raises(ValueError, match="state has 1 blocks and 2 memories, expected 2 of each"):
        decoder(TOKENS, state=state._replace(mixers=state.mixers[:1]))
    with pytest.raises(ValueError, match="memory is on meta and tokens on cpu"):
        decoder(TOKENS, MEMORY.to("meta"))


def test_lower_bounds_are_learned():
    decoder = built(dataclasses.replace(CONFIG, **MIXERS["lower bounds"]))
    logits, _ = decoder(ids(1, 3), torch.randn(1, 5, WIDTH, dtype=torch.float64))
    logits.square().sum().backward()
    assert decoder.lower_bounds.logits.grad.abs().sum() > 0
