"""Causal and masked language models and classifiers: states, padding, sampling, and errors."""

import dataclasses
import math
from inspect import unwrap

import jaxtyping
import pytest
import torch
from pairwise import pairwise
from tiny_language_models import (
    BOTH,
    CAUSAL,
    OPTIONS,
    PLACES,
    SMALL,
    TOKENS,
    TPE,
    VOCABULARY,
    WIDTH,
    built,
    causal,
    ids,
    over_all_causal,
    over_both,
    over_causal,
    padded,
)
from torch import nn
from torch.nn.functional import cross_entropy

from onescan.configs import replace
from onescan.experiments.recipes import RECIPES, find_recipe
from onescan.layers.basic import GLUConfig
from onescan.layers.mixers import (
    MIXERS,
    DeltaRuleMixerConfig,
    HGRNMixerConfig,
    HybridMixerConfig,
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
    RWKV6MixerConfig,
    SoftmaxMixerConfig,
    SoftmaxState,
    VisionRWKVMixerConfig,
)
from onescan.layers.position import (
    AbsolutePositionConfig,
    SinusoidalPositionConfig,
    ToeplitzPositionConfig,
    TokenPositionConfig,
)
from onescan.models.causal_lm import CausalLMConfig, Sampling
from onescan.models.masked_lm import MaskedLMConfig
from onescan.models.sequence_classifier import SequenceClassifierConfig
from onescan.models.token_network import (
    TokenNetwork,
    as_buffers,
    flatten_state,
    map_tensors,
    select_rows,
    unflatten_state,
)
from onescan.shapes import Grid


@pytest.mark.sampled(2)
@over_all_causal
def test_cached_and_chunked_calls_equal_one_at_every_cut(change):
    model, tokens = causal(change), ids(2, TOKENS)
    want, whole = model(tokens)
    for cut in range(1, TOKENS):
        first, state = model(tokens[:, :cut])
        rest, state = model(tokens[:, cut:], state)
        torch.testing.assert_close(torch.cat([first, rest], dim=1), want, atol=1e-9, rtol=1e-9)
        for x, y in zip(flatten_state(state).values(), flatten_state(whole).values(), strict=True):
            torch.testing.assert_close(x, y, atol=1e-9, rtol=1e-9)
    state, parts = None, []
    for t in range(TOKENS):
        logits, state = model(tokens[:, t : t + 1], state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), want, atol=1e-9, rtol=1e-9)


@over_causal
def test_no_token_hears_of_a_later_one(change):
    model, tokens = causal(change), ids(1, TOKENS)
    want, _ = model(tokens)
    tokens[:, 5:] = (tokens[:, 5:] + 1) % VOCABULARY
    got, _ = model(tokens)
    torch.testing.assert_close(got[:, :5], want[:, :5])
    assert (got[:, 5:] != want[:, 5:]).any(dim=-1).all()


@pytest.mark.sampled(6)
@over_all_causal
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_equals_single_runs(change, side):
    model, tokens, lengths = causal(change), ids(3, TOKENS), (4, TOKENS, 1)
    rows, keep = padded(tokens, lengths, side)
    got, state = model(rows, keep=keep)
    more = ids(3, 2, seed=1)
    after = model(more, state)[0]
    for b, n in enumerate(lengths):
        want, alone = model(tokens[b : b + 1, :n])
        torch.testing.assert_close(got[b, keep[b]], want[0], atol=1e-9, rtol=1e-9)
        want = model(more[b : b + 1], alone)[0]
        torch.testing.assert_close(after[b : b + 1], want, atol=1e-9, rtol=1e-9)


@over_all_causal
def test_beams_reorder_states(change):
    model, tokens, more = causal(change), ids(3, 5), ids(4, 2, seed=1)
    rows = torch.tensor([2, 0, 0, 1])
    _, state = model(tokens)
    got, _ = model(more, select_rows(state, rows))
    want, _ = model(torch.cat([tokens[rows], more], dim=1))
    torch.testing.assert_close(got, want[:, 5:], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", [name for name in CAUSAL if name != "gpt2"])
def test_a_state_does_not_grow_and_softmaxs_does(name):
    def sizes(model, tokens):
        return sum(x.numel() for x in flatten_state(model(ids(1, tokens))[1]).values())

    assert sizes(causal(CAUSAL[name]), 3) == sizes(causal(CAUSAL[name]), 30)
    assert sizes(causal(CAUSAL["gpt2"]), 30) > 9 * sizes(causal(CAUSAL["gpt2"]), 3)


def test_causal_softmax_is_the_formula():
    mixer = SoftmaxMixerConfig(num_heads=3, direction="forward").build(width=WIDTH, axes=1).double()
    x, keep = torch.randn(2, 6, WIDTH, dtype=torch.float64), torch.rand(2, 6) < 0.7
    q, k, v = (y.unflatten(-1, (3, -1)) for y in mixer.in_proj(x).chunk(3, dim=-1))
    scores = torch.einsum("bthk,bshk->bhts", q, k) / (WIDTH / 3) ** 0.5
    t = torch.arange(6)
    seen = (t[:, None] >= t) & keep[:, None, None, :]
    shares = scores.masked_fill(~(seen | (t[:, None] == t)), -torch.inf).softmax(-1)
    want = mixer.out_proj(torch.einsum("bhts,bshk->bthk", shares, v).flatten(-2))
    got, state = mixer(x, Grid((6,)), keep=keep)
    torch.testing.assert_close(got, want * keep.unsqueeze(-1))
    assert isinstance(state, SoftmaxState)
    whole = scores.masked_fill(t[:, None] < t, -torch.inf).softmax(-1)
    want = mixer.out_proj(torch.einsum("bhts,bshk->bthk", whole, v).flatten(-2))
    torch.testing.assert_close(mixer(x, Grid((6,)))[0], want)


def test_token_places_are_counted_over_real_tokens():
    position = TokenPositionConfig(max_tokens=5).build(width=3, grid=Grid((1,)))
    keep = torch.tensor([[False, True, True], [True, False, True]])
    x, taken = position(torch.zeros(2, 3, 3), Grid((3,)), None, keep)
    assert taken.tolist() == [2, 2]
    assert torch.equal(x[0, 1:], position.table[:2])
    assert torch.equal(x[1, [0, 2]], position.table[:2])
    x, taken = position(torch.zeros(2, 2, 3), Grid((2,)), taken)
    assert torch.equal(x[0], position.table[2:4])
    with pytest.raises(ValueError, match="a sequence has 6 tokens, expected at most 5"):
        position(torch.zeros(2, 2, 3), Grid((2,)), taken)


@pytest.mark.sampled(8)
@over_all_causal
def test_a_state_survives_being_flattened(change):
    model, tokens = causal(change), ids(2, 5)
    _, state = model(tokens)
    _, like = model(ids(1, 1))
    again = unflatten_state(like, flatten_state(state))
    assert type(again) is type(state)
    more = ids(2, 2)
    assert torch.equal(model(more, again)[0], model(more, state)[0])


def test_a_state_with_other_parts_is_no_state_of_this_model():
    _, one = causal(CAUSAL["lightnet"])(ids(1, 2))
    _, other = causal(CAUSAL["lion"])(ids(1, 2))
    with pytest.raises(ValueError, match=r"blocks\.0\.\S+ (is missing|does not exist)"):
        unflatten_state(one, flatten_state(other))


def test_trees_keep_what_is_no_tensor():
    tree = ((torch.ones(2), 3), None)
    assert map_tensors(lambda x: x + 1, tree)[0][1] == 3
    assert unflatten_state(tree, flatten_state(tree))[0][1] == 3
    assert unflatten_state(tree, flatten_state(tree))[1] is None


def test_heads_are_tied_unless_asked_otherwise():
    for tied in (True, False):
        decoder = CausalLMConfig(**SMALL, tie_embeddings=tied).build()
        encoder = MaskedLMConfig(**SMALL, tie_embeddings=tied).build()
        assert (decoder.head.weight is decoder.network.embedding.weight) == tied
        assert (encoder.head.scores.weight is encoder.network.embedding.weight) == tied


def test_last_only_scores_the_last_token():
    model, tokens = causal(CAUSAL["lightnet"]), ids(2, 5)
    got, _ = model(tokens, last_only=True)
    torch.testing.assert_close(got, model(tokens)[0][:, -1:])


@pytest.mark.sampled(3)
@over_causal
def test_generation_is_the_likeliest_token_again_and_again(change):
    model, tokens = causal(change), ids(2, 4)
    written = model.generate(tokens, max_new_tokens=6)
    text = tokens
    for _ in range(6):
        text = torch.cat([text, model(text)[0][:, -1:].argmax(-1)], dim=1)
    assert torch.equal(written, text[:, 4:])


@pytest.mark.sampled(4)
@over_all_causal
@pytest.mark.parametrize("side", ["left", "right"])
def test_generation_continues_padded_prompts_as_if_there_were_no_padding(change, side):
    model, tokens = causal(change), ids(2, 6)
    rows, keep = padded(tokens, (3, 6), side)
    written = model.generate(rows, max_new_tokens=5, keep=keep)
    assert torch.equal(written[:1], model.generate(tokens[:1, :3], max_new_tokens=5))
    assert torch.equal(written[1:], model.generate(tokens[1:], max_new_tokens=5))


def test_generation_ends_and_repeats_the_end():
    model = causal(CAUSAL["lightnet"])
    tokens = ids(3, 4)
    free = model.generate(tokens, max_new_tokens=8)
    end = int(free[0, 2])
    ended = model.generate(tokens, max_new_tokens=8, end=end)
    for row, want in zip(ended.tolist(), free.tolist(), strict=True):
        stop = want.index(end) if end in want else len(want)
        assert row[: stop + 1] == want[: stop + 1][: len(row)]
        assert set(row[stop + 1 :]) <= {end}
    assert (
        model.generate(tokens[:1], max_new_tokens=8, end=end).shape[1]
        == free[0].tolist().index(end) + 1
    )


def test_a_stream_can_be_taken_up_where_it_was_left():
    model, tokens = causal(CAUSAL["lightnet"]), ids(1, 4)
    whole = model.generate(tokens, max_new_tokens=7)
    pairs = list(model.stream(tokens, max_new_tokens=3))
    token, state = pairs[-1]
    rest = model.generate(token.unsqueeze(1), max_new_tokens=4, state=state)
    assert torch.equal(torch.cat([*(t.unsqueeze(1) for t, _ in pairs), rest], dim=1), whole)


def test_sampling_draws_by_its_probabilities_and_by_its_seed():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(20_000, -1)
    sampling = Sampling(temperature=1.0, top_k=3, top_p=0.9)
    g = torch.Generator().manual_seed(0)
    drawn = sampling.choose(logits, g)
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    want = torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95
    torch.testing.assert_close(shares, want, atol=0.01, rtol=0)
    assert torch.equal(sampling.choose(logits, torch.Generator().manual_seed(0)), drawn)
    sharp = Sampling(temperature=0.5).probabilities(logits[:1])
    squares = logits[:1].exp().square()
    torch.testing.assert_close(sharp, squares / squares.sum())
    torch.testing.assert_close(
        Sampling(temperature=1.0, top_p=0.5).probabilities(logits[:1])[0], torch.eye(4)[0]
    )
    assert Sampling().choose(logits[:1]).tolist() == [0]
    smallest = Sampling(temperature=1.0, top_p=1e-300)  # 0 in float32
    assert smallest.choose(logits[:1]).tolist() == [0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0, expected 0 or more"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0, expected above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_impossible_sampling_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        causal(CAUSAL["lion"]).generate(ids(1, 2), Sampling(**fields), max_new_tokens=1)


def test_nothing_to_write_is_refused():
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        causal(CAUSAL["lion"]).generate(ids(1, 2), max_new_tokens=0)
    with pytest.raises(ValueError, match="vocab_size is 0, expected a whole number of at least 1"):
        causal(CAUSAL["lion"]).generate(ids(1, 2), max_new_tokens=1, vocab_size=0)


def test_fractions_of_tokens_are_refused(monkeypatch):
    # the type checks of these tests would raise first
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=r"max_new_tokens is 1\.5, expected a whole number"):
        causal(CAUSAL["lion"]).generate(ids(1, 2), max_new_tokens=1.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 1.5}, r"top_k is 1\.5, expected int \| None"),
        ({"temperature": "0.7"}, r"temperature is '0\.7', expected float"),
        ({"top_p": None}, "top_p is None, expected float"),
    ],
)
def test_sampling_options_of_wrong_types_are_refused(options, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=f"^{message}"):
        causal(CAUSAL["lion"]).generate(ids(1, 2), Sampling(**options), max_new_tokens=2)


def masked(change, **more):
    return built(MaskedLMConfig(**{**SMALL, "mlp": GLUConfig(), **change, **more}))


@pytest.mark.sampled(8)
@over_both
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_of_a_masked_model_equals_single_runs(change, side):
    model, tokens, lengths = masked(change), ids(3, TOKENS), (4, TOKENS, 2)
    rows, keep = padded(tokens, lengths, side)
    got = model(rows, keep)
    for b, n in enumerate(lengths):
        torch.testing.assert_close(got[b, keep[b]], model(tokens[b : b + 1, :n])[0])


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([0, 2], "positions is a list, expected a tensor"),
        (torch.ones(2, 3).bool(), r"positions has shape \(2, 3\), expected 'B T'"),
        (torch.tensor([0.0]), "positions has dtype torch.float32, expected torch.int64"),
        (torch.tensor([1, -1]), "positions contains ids from -1 to 1, expected 0 to 7"),
        (torch.tensor([8]), "positions contains ids from 8 to 8, expected 0 to 7"),
    ],
)
def test_invalid_positions_are_refused(positions, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=f"^{message}"):
        masked({})(ids(2, 4), positions=positions)


@over_both
def test_every_token_hears_of_every_other(change):
    model, tokens = masked(change), ids(1, TOKENS)
    want = model(tokens)
    for t in (0, TOKENS - 1):
        other = tokens.clone()
        other[:, t] = (other[:, t] + 1) % VOCABULARY
        assert (model(other) != want).any(dim=-1).all()


@pytest.mark.sampled(10)
@pairwise(
    {
        "name": BOTH,
        "pool": ["first", "mean", "max", "attention"],
        "side": ["left", "right"],
    },
    rest_is_slow=True,
)
def test_a_padded_batch_of_a_classifier_equals_single_runs(name, pool, side):
    change = BOTH[name]
    config = SequenceClassifierConfig(**{**SMALL, **change}, pool=pool, num_classes=3)
    model, tokens, lengths = built(config), ids(3, TOKENS), (4, TOKENS, 2)
    rows, keep = padded(tokens, lengths, side)
    segments = (torch.arange(TOKENS) > 3).long().expand(3, -1)
    kinds = padded(segments, lengths, side)[0].clamp(max=1) if change.get("segment_types") else None
    got = model(rows, keep, segments=kinds)
    assert got.shape == (3, 3)
    for b, n in enumerate(lengths):
        own = segments[b : b + 1, :n] if kinds is not None else None
        want = model(tokens[b : b + 1, :n], segments=own)
        torch.testing.assert_close(got[b : b + 1], want)


def test_segments_are_told_apart_where_there_are_some():
    model, tokens = masked(BOTH["bert"]), ids(1, TOKENS)
    segments = (torch.arange(TOKENS) > 3).long()[None]
    assert torch.equal(model(tokens), model(tokens, segments=torch.zeros_like(segments)))
    assert (model(tokens, segments=segments) != model(tokens)).any()
    with pytest.raises(ValueError, match="segments contains ids from 0 to 2, expected 0 to 1"):
        model(tokens, segments=2 * segments)
    with pytest.raises(ValueError, match="segments were given, but the model has segment_types=0"):
        masked(BOTH["lion"])(tokens, segments=segments)


def test_a_regression_has_one_score_and_learns():
    """The share of a token in a text, which a mean of embeddings can tell."""
    config = SequenceClassifierConfig(
        **{**SMALL, "depth": 1}, mixer=LionMixerConfig(num_heads=3), position=None, num_classes=1
    )
    model = config.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for step in range(60):
        tokens = ids(32, 8, seed=step)
        loss = (model(tokens)[:, 0] - (tokens == 3).float().mean(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.2 * sum(losses[:5])


def every_parameter_learns(model, loss):
    loss.backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not missing


@over_causal
def test_every_parameter_of_a_causal_model_learns(change):
    model = causal(change)
    tokens = ids(2, TOKENS)
    logits, _ = model(tokens[:, :-1])
    loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    if isinstance(model.network.position, nn.Module) and hasattr(model.network.position, "table"):
        model.network.position.table.requires_grad_(False)  # places beyond the text's learn nothing
        loss.backward()
        rest = [p for p in model.parameters() if p.requires_grad]
        assert all(p.grad is not None and p.grad.any() for p in rest)
    else:
        every_parameter_learns(model, loss)


def test_dropout_is_for_training():
    model = CausalLMConfig(**SMALL, dropout=0.5).build()
    tokens = ids(1, 5)
    assert not torch.equal(model(tokens)[0], model(tokens)[0])
    model.eval()
    assert torch.equal(model(tokens)[0], model(tokens)[0])


ERRORS = [
    ({"tokens": ids(5)}, r"tokens has shape \(5,\)"),
    ({"tokens": ids(2, 0)}, "T is 0"),
    ({"tokens": ids(2, 5) + VOCABULARY}, f"tokens contains ids .*, expected 0 to {VOCABULARY - 1}"),
    ({"tokens": ids(2, 5).float()}, "tokens has dtype torch.float32"),
    ({"tokens": None}, "tokens is a NoneType"),
    ({"tokens": [1, 2]}, "tokens is a list"),
    ({"keep": torch.ones(2, 4).bool()}, r"keep has shape \(2, 4\)"),
    ({"documents": ids(2, 4)}, r"documents has shape \(2, 4\)"),
    ({"documents": torch.zeros(2, 5)}, "documents has dtype torch.float32"),
    ({"keep": torch.ones(2, 5)}, "keep has dtype torch.float32"),
]


@pytest.fixture
def _unchecked_network(monkeypatch):
    """Networks without the shape hook, as users call them."""
    for name in ("forward", "read"):
        monkeypatch.setattr(TokenNetwork, name, unwrap(getattr(TokenNetwork, name)))


@pytest.mark.usefixtures("_unchecked_network")
@pytest.mark.parametrize(("change", "message"), ERRORS)
def test_errors_name_the_argument(change, message):
    network = causal(CAUSAL["lion"]).network
    with pytest.raises(ValueError, match=message):
        network(**{"tokens": ids(2, 5), **change})


@pytest.mark.usefixtures("_unchecked_network")
def test_a_state_of_another_model_is_refused():
    _, state = causal(CAUSAL["lightnet"])(ids(2, 5))
    with pytest.raises(ValueError, match="state is from a model with 2 blocks, expected 3"):
        causal(CAUSAL["lightnet"], depth=3)(ids(2, 1), state)
    model = causal(CAUSAL["lightnet"])
    network = model.network
    with pytest.raises(ValueError, match="state is an int"):
        network(ids(2, 1), state=3)
    with pytest.raises(ValueError, match="state has batch size 2, expected 1"):
        model(ids(1, 1), state)
    _, other = causal(CAUSAL["lion"])(ids(2, 5))
    mixer, x = network.blocks[0].mixer, torch.randn(2, 1, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"state\.position is None, but this mixer has rotary"):
        unwrap(type(mixer).forward)(mixer, x, Grid((1,)), state=other.blocks[0])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CausalLMConfig(**SMALL, mixer=LightNetMixerConfig(num_heads=3)), "mixer is not causal"),
        *(
            (config(**SMALL, position=position), f"position is {type(position).__name__}")
            for config in (CausalLMConfig, MaskedLMConfig, SequenceClassifierConfig)
            for position in (AbsolutePositionConfig(), SinusoidalPositionConfig())
        ),
        (
            CausalLMConfig(**SMALL, position=ToeplitzPositionConfig(bidirectional=True)),
            "position.bidirectional is True",
        ),
        (
            MaskedLMConfig(**SMALL, mixer=LightNetMixerConfig(num_heads=3, direction="forward")),
            "mixer is causal",
        ),
        (
            SequenceClassifierConfig(**SMALL, mixer=CAUSAL["lightnet"]["mixer"], pool="first"),
            "the first token does not read all tokens",
        ),
        (SequenceClassifierConfig(**SMALL, num_classes=0), "num_classes is 0"),
        (CausalLMConfig(**{**SMALL, "depth": 0}), "depth is 0"),
        (CausalLMConfig(**SMALL, dropout=1.0), "dropout is 1.0, expected 0 or more"),
        (CausalLMConfig(**SMALL, segment_types=-1), "segment_types is -1"),
        (
            CausalLMConfig(**SMALL, position=TokenPositionConfig(max_tokens=0)),
            "position.max_tokens is 0",
        ),
    ],
)
def test_impossible_configs_are_refused(config, message):
    if config.mixer == LightNetMixerConfig(num_heads=8, direction="forward"):
        config = dataclasses.replace(
            config, mixer=LightNetMixerConfig(num_heads=3, direction="forward")
        )
    with pytest.raises(ValueError, match=message):
        config.build()


@pytest.mark.parametrize(("length", "longest"), [(None, 2.0), (128, 128.0)])
@pytest.mark.parametrize("config", [CausalLMConfig, MaskedLMConfig, SequenceClassifierConfig])
def test_text_models_start_with_short_half_lives_unless_a_length_is_set(config, length, longest):
    position = ToeplitzPositionConfig(hidden_states=4, init_length=length)
    sizes = {"vocab_size": 7, "width": 16, "depth": 1, "position": position}
    causal = {"direction": "forward"} if config is CausalLMConfig else {}
    network = config(**sizes, mixer=LightNetMixerConfig(num_heads=2, **causal)).build()
    rates = next(weight for name, weight in network.named_parameters() if "log_rate" in name)
    low, high = (math.log(2) / rates.exp()).aminmax()
    assert (low.item(), high.item()) == (pytest.approx(0.5), pytest.approx(longest))


TEXT_RECIPES = [name for name, make in RECIPES.items() if hasattr(make().model, "segment_types")]


@pytest.mark.parametrize("name", [f"{name}/with_positions" for name in TEXT_RECIPES])
def test_text_recipes_have_positions_that_depend_on_order(name):
    run = find_recipe(name)()
    position = run.model.position.build(width=8, grid=Grid((1,)))
    x, order = torch.randn(1, 12, 8), torch.randperm(12)
    placed, _ = position(x, Grid((12,)))
    permuted, _ = position(x[:, order], Grid((12,)))
    assert (permuted - placed[:, order]).abs().max() > 0.01
    assert run.model.position.max_tokens >= run.data.max_tokens
    fields = {"depth": 1, "width": 24, "mixer.num_heads": 3}
    replace(run.model, fields).build()


@pytest.mark.parametrize("name", ["listops_small_lion_lit", "c4_lion_lit_mlm_base"])
def test_models_with_positions_depend_on_token_order(name):
    config = find_recipe(f"{name}/with_positions")().model
    changes = {"vocab_size": VOCABULARY, "width": WIDTH, "mixer.num_heads": 3, "depth": 1}
    model = built(replace(config, changes)).network
    tokens, order = ids(1, TOKENS), torch.randperm(TOKENS)
    assert (model(tokens[:, order])[0] - model(tokens)[0][:, order]).abs().max() > 0.01


# Mixers whose positions are distances between tokens, besides those of every family.
PLACED = {
    "llama": {
        "mixer": SoftmaxMixerConfig(num_heads=3, direction="forward", rotary=True),
        "position": None,
    },
    "window": {
        "mixer": SoftmaxMixerConfig(num_heads=3, direction="forward", window=2),
        "position": None,
    },
    "lightnet without decay": {
        "mixer": LightNetMixerConfig(num_heads=3, direction="forward", decay=False),
        "position": None,
    },
    "hgrn": {"mixer": HGRNMixerConfig(num_heads=3, direction="forward"), "position": None},
}
EVERYWHERE = {**CAUSAL, **OPTIONS, **PLACED}
KEEP = torch.tensor(
    [
        [False, True, True, False, True, False, False, True, True],
        [True, True, False, True, True, True, False, False, False],
        [False, False, True, False, False, True, True, True, False],
    ]
)


def assert_padding_has_no_effect(read, rows, keep, parameters):
    """Compare the real tokens, and gradients of their losses, with those of rows without padding.

    Args:
        read: Returns a vector per token from embeddings [B, T, D] and a mask.
        rows: Embeddings of real and padded tokens.
        keep: True for real tokens.
        parameters: Parameters whose gradients to compare.
    """
    got = read(rows.masked_fill(~keep.unsqueeze(-1), torch.nan), keep)
    weights = torch.randn_like(got[keep])
    gradients = torch.autograd.grad((got[keep] * weights).sum(), parameters, allow_unused=True)
    alone = [read(x[None, real], None)[0] for x, real in zip(rows, keep, strict=True)]
    torch.testing.assert_close(got[keep], torch.cat(alone), atol=1e-9, rtol=1e-9)
    wanted = torch.autograd.grad((torch.cat(alone) * weights).sum(), parameters, allow_unused=True)
    for x, want in zip(gradients, wanted, strict=True):
        assert (x is None) == (want is None)
        if x is not None:
            torch.testing.assert_close(x, want, atol=1e-9, rtol=1e-9)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("change", EVERYWHERE.values(), ids=EVERYWHERE)
def test_padding_anywhere_has_no_effect_in_causal_models(change):
    model = causal(change)
    rows = torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    assert_padding_has_no_effect(
        lambda x, keep: model.network.read(x, keep=keep)[0], rows, KEEP, [*model.parameters()]
    )


@pytest.mark.parametrize("change", EVERYWHERE.values(), ids=EVERYWHERE)
@pytest.mark.parametrize(
    "sizes",
    [
        (2, 1, 3, 3),
        *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ((9,), (4, 5), (1,) * 9)),
    ],
    ids=str,
)
def test_padding_anywhere_has_no_effect_on_calls_with_a_state(change, sizes):
    model, tokens, more = causal(change), ids(3, TOKENS), ids(3, 2, seed=1)
    state, parts = None, []
    for part, real in zip(tokens.split(sizes, dim=1), KEEP.split(sizes, dim=1), strict=True):
        logits, state = model(part, state, keep=real)
        parts.append(logits)
    got, after = torch.cat(parts, dim=1), model(more, state)[0]
    for b, real in enumerate(KEEP):
        want, _ = model(torch.cat([tokens[b, real], more[b]])[None])
        count = int(real.sum())
        torch.testing.assert_close(got[b, real], want[0, :count], atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(after[b], want[0, count:], atol=1e-9, rtol=1e-9)


DISTANCES = {
    "roberta": {"mixer": SoftmaxMixerConfig(num_heads=3, rotary=True), "position": None},
    "vision_rwkv": {"mixer": VisionRWKVMixerConfig(num_heads=3), "position": None},
    "rwkv6": {"mixer": RWKV6MixerConfig(num_heads=3), "position": None},
    "hgrn": {"mixer": HGRNMixerConfig(num_heads=3), "position": None},
    "retnet": {
        "mixer": LionMixerConfig(num_heads=3, rotary=True, normalize="none", conv_size=3),
        "position": None,
    },
    "natural": {"mixer": LionMixerConfig(num_heads=3, scan="natural"), "position": None},
    "separable ldn": {
        "mixer": LinearDiffusionMixerConfig(num_heads=3, separable=True),
        "position": None,
    },
    "blocks": {
        "mixer": LightNetMixerConfig(num_heads=3, causal_block=2, conv_size=2),
        "position": TPE,
    },
    "lion blocks": {"mixer": LionMixerConfig(num_heads=3, causal_block=3), "position": None},
    "delta blocks": {
        "mixer": DeltaRuleMixerConfig(num_heads=3, causal_block=2),
        "position": PLACES,
    },
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("change", [*BOTH.values(), *DISTANCES.values()], ids=[*BOTH, *DISTANCES])
def test_padding_anywhere_has_no_effect_in_bidirectional_models(change):
    model = built(MaskedLMConfig(**{**SMALL, "mlp": GLUConfig(), **change}))
    rows = torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    assert_padding_has_no_effect(
        lambda x, keep: model.network.read(x, keep=keep)[0], rows, KEEP, [*model.parameters()]
    )


@pytest.mark.parametrize("config_class", MIXERS.values(), ids=MIXERS)
def test_a_mixer_that_skips_padding_needs_no_network_for_it(config_class):
    config = config_class(num_heads=3)
    if not config.skips_padding:
        return
    mixer = config.build(width=WIDTH, axes=1).double()
    rows = torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    assert_padding_has_no_effect(
        lambda x, keep: mixer(x, Grid((x.shape[1],)), keep=keep)[0],
        rows,
        KEEP,
        [*mixer.parameters()],
    )


@pytest.mark.parametrize("packed", ["documents", "cu_seqlens"])
@pytest.mark.parametrize("name", ["lightnet", "ldn", "hybrid"])
def test_padding_within_packed_documents_has_no_effect(name, packed):
    model = built(MaskedLMConfig(**{**SMALL, "mlp": GLUConfig(), **BOTH[name]}))
    tokens = ids(3, TOKENS)
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1]] * 3)
    offsets = torch.tensor([0, 5, 9, 14, 18, 23, 27], dtype=torch.int32)
    got = model(tokens, KEEP, **{packed: documents if packed == "documents" else offsets})
    for b, part in ((b, part) for b in range(3) for part in (slice(0, 5), slice(5, 9))):
        real = KEEP[b, part]
        want = model(tokens[b, part][real][None])[0]
        torch.testing.assert_close(got[b, part][real], want, atol=1e-9, rtol=1e-9)


def test_outputs_of_blocks_are_in_the_order_of_the_tokens():
    model, tokens, outputs = causal(CAUSAL["lightnet"]), ids(1, TOKENS), []
    read, _ = model.network(tokens, keep=KEEP[:1], outputs=outputs)
    alone = []
    model.network(tokens[:, KEEP[0]], outputs=alone)
    assert len(outputs) == len(alone) == 3
    for x, want in zip(outputs, alone, strict=True):
        torch.testing.assert_close(x[:, KEEP[0]], want, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(model.network.norm(outputs[-1]), read)


def test_a_text_without_real_tokens_changes_nothing():
    model, tokens = causal(CAUSAL["lightnet"]), ids(2, 5)
    keep = torch.tensor([[True] * 5, [False] * 5])
    logits, state = model(tokens, keep=keep)
    more, _ = model(tokens, state)
    torch.testing.assert_close(logits[0], model(tokens[:1])[0][0])
    torch.testing.assert_close(more[1], model(tokens[1:])[0][0])


def blockwise():
    return {
        "lightnet": LightNetMixerConfig(num_heads=3, causal_block=2, conv_size=2),
        "lion": LionMixerConfig(num_heads=3, causal_block=2),
        "delta": DeltaRuleMixerConfig(num_heads=3, causal_block=2, conv_size=3),
        "hybrid": HybridMixerConfig(
            linear=LightNetMixerConfig(num_heads=3, causal_block=2),
            attention=LionMixerConfig(num_heads=3, causal_block=4),
            period=2,
        ),
    }


@pytest.mark.parametrize("name", blockwise())
def test_blocks_read_no_later_block_and_continue_each_other(name):
    mixer = blockwise()[name]
    model = built(MaskedLMConfig(**SMALL, mixer=mixer, position=TPE)).network
    tokens, block = ids(2, 8), mixer.state_block
    want, whole = model(tokens)
    first, state = model(tokens[:, :block])
    rest, state = model(tokens[:, block:], state=state)
    torch.testing.assert_close(torch.cat([first, rest], dim=1), want, atol=1e-9, rtol=1e-9)
    for x, y in zip(flatten_state(state).values(), flatten_state(whole).values(), strict=True):
        torch.testing.assert_close(x, y, atol=1e-9, rtol=1e-9)
    _, partial = model(tokens[:, : block - 1])
    _, padded = model(tokens, keep=torch.arange(8).expand(2, -1) < block)
    for unfinished in (partial, padded):
        with pytest.raises(ValueError, match=f"expected one with whole blocks of {block} real"):
            model(tokens, state=unfinished)


@pytest.mark.parametrize("name", blockwise())
@pytest.mark.parametrize("config_class", [MaskedLMConfig, SequenceClassifierConfig])
def test_blockwise_models_with_positions_in_both_directions_are_refused(config_class, name):
    config = config_class(**SMALL, mixer=blockwise()[name])
    for build in (config.build, lambda: TokenNetwork(config)):
        with pytest.raises(ValueError, match=r"causal_block.*position\.bidirectional is True"):
            build()


def test_blocks_beside_bidirectional_attention_are_refused():
    mixer = dataclasses.replace(blockwise()["hybrid"], attention=SoftmaxMixerConfig(num_heads=3))
    with pytest.raises(ValueError, match="causal_block=2, but another mixer of the hybrid reads"):
        MaskedLMConfig(**SMALL, mixer=mixer, position=None).build()


def test_a_state_is_refused_where_positions_are_read_in_both_directions():
    mixer = LightNetMixerConfig(num_heads=3, direction="forward")
    model = SequenceClassifierConfig(**SMALL, mixer=mixer).build().network
    _, state = model(ids(1, 4))
    with pytest.raises(ValueError, match=r"position\.bidirectional=True, whose tokens"):
        model(ids(1, 4), state=state)


def test_rows_of_a_state_with_numbers_as_tensors_are_selected():
    state = as_buffers((torch.arange(6.0).view(3, 2), None, 7), torch.device("cpu"))
    rows, _, number = select_rows(state, torch.tensor([2, 0]))
    assert rows.tolist() == [[4, 5], [0, 1]]
    assert number == 7
