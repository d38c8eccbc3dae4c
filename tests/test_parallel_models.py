"""Models over several ranks: outputs and gradients of one process.

To test another mixer, add it to MIXERS and CAUSAL_MIXERS.
"""

import pytest
import torch
import torch.distributed as dist
from ranks import assert_same_model_over_ranks, run_ranks, split

import onescan
from onescan.configs import replace
from onescan.layers.block import Block
from onescan.layers.mixers import LightNetMixerConfig
from onescan.layers.position import (
    AbsolutePositionConfig,
    SinusoidalPositionConfig,
    ToeplitzPositionConfig,
    TokenPositionConfig,
)
from onescan.models.causal_lm import token_losses
from onescan.models.token_network import flatten_state
from onescan.ops.parallel import sequence_parallel, sum_over_ranks

B, T = 2, 13
WIDTH = 12
LIGHTNET = LightNetMixerConfig(num_heads=2)
CAUSAL = LightNetMixerConfig(num_heads=2, causal=True)
TPE = ToeplitzPositionConfig(hidden_states=3)
BOTH_TPE = ToeplitzPositionConfig(hidden_states=3, bidirectional=True)
SMALL = {"width": WIDTH, "depth": 2, "position": TPE}


@pytest.fixture
def over_ranks(tmp_path):
    """Run a check in groups of 2, 3 and 4 processes."""
    return lambda check: run_ranks(4, check, tmp_path)


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def built(config):
    """Build a model in float64 in which no parameter is 0."""
    model = config.build().double()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


# Images and video. Mixers are tested with both.
MIXERS = {
    "lightnet": LIGHTNET,
    "separate decay": replace(LIGHTNET, {"decay_logits": "offset"}),
    "independent decay": replace(LIGHTNET, {"decay_logits": "independent", "norm": "none"}),
    "without decay": replace(LIGHTNET, {"decay": False}),
    "without lrpe": replace(LIGHTNET, {"lrpe": False}),
}


def image_model(mixer=LIGHTNET, **changes):
    sizes = {"image_size": (12, 6), "patch_size": (2, 2), "channels": 1, "num_classes": 3}
    options = {"mixer": mixer, "drop_path": 0.3}
    return onescan.ImageClassifierConfig(**SMALL | sizes | options | changes)


VIDEO = {"image_size": (6, 4, 4), "patch_size": (1, 2, 2)}
IMAGE_MODELS = {name: image_model(mixer) for name, mixer in MIXERS.items()} | {
    "mean": image_model(pool="mean", position=AbsolutePositionConfig()),
    "mean with class token": image_model(
        pool="mean_with_class_token", distillation_token=True, position=AbsolutePositionConfig()
    ),
    "distillation": image_model(distillation_token=True, position=BOTH_TPE),
    "max": image_model(pool="max", position=SinusoidalPositionConfig()),
    "attention": image_model(pool="attention", position=None),
    "causal": image_model(CAUSAL, pool="mean"),
    "signal": image_model(image_size=(24,), patch_size=(2,)),
    "video": image_model(**VIDEO),
}
ROWS = 7  # patches or frames, one more than in the config


def pixels(config, channels=1):
    return rand(B, channels, ROWS * config.patch_size[0], *config.image_size[1:])


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_image_classifier(over_ranks, name):
    config = IMAGE_MODELS[name]

    def call(model, images, keep=None):
        if keep is not None:
            return {"logits": (model(images, keep), None)}
        last, (grid,) = model.forward_intermediates(images, [0])
        logits = model.forward_head(last)
        logits = torch.cat(logits) if isinstance(logits, tuple) else logits
        return {"logits": (logits, None), "grid": (grid, 2)}

    def check(group):
        model, lengths = built(config), split(ROWS, group.size())
        inputs = {"images": (pixels(config), 2)}
        assert_same_model_over_ranks(model, call, inputs, lengths, group)
        if isinstance(config.position, AbsolutePositionConfig):
            return
        keep = torch.ones_like(inputs["images"][0][:, 0], dtype=torch.bool)
        keep[0, 4 * config.patch_size[0] :] = False
        inputs["keep"] = (keep, 1)
        assert_same_model_over_ranks(model.eval(), call, inputs, lengths, group)

    over_ranks(check)


# Text. Causal mixers are tested in causal language models, MIXERS in masked ones.
CAUSAL_MIXERS = {
    "lightnet": CAUSAL,
    "separate decay": replace(CAUSAL, {"decay_logits": "offset"}),
    "independent decay": replace(CAUSAL, {"decay_logits": "independent"}),
    "without decay": replace(CAUSAL, {"decay": False}),
}
VOCABULARY = 17


def language_model(mixer, kind=onescan.CausalLMConfig, **changes):
    return kind(**SMALL | {"vocab_size": VOCABULARY, "mixer": mixer} | changes)


CAUSAL_MODELS = {name: language_model(mixer) for name, mixer in CAUSAL_MIXERS.items()} | {
    "token positions": language_model(CAUSAL, position=TokenPositionConfig(max_tokens=2 * T + 8)),
    "no position": language_model(CAUSAL, position=None, tie_embeddings=False),
}


def texts(tokens=T):
    return torch.randint(VOCABULARY, (B, tokens))


def left_padding():
    return torch.arange(T) >= torch.tensor([[0], [T // 2 + 1]])


def state_outputs(state):
    flat = flatten_state(state).items()
    return {f"state.{name}": (x, None) for name, x in flat if x.is_floating_point()}


@pytest.mark.parametrize("name", CAUSAL_MODELS)
def test_causal_language_model(over_ranks, name):
    def call(model, tokens, keep, before):
        with sequence_parallel(None):
            _, state = model(before)
        logits, state = model(tokens, state, keep=keep)
        last, after = model(tokens, keep=keep, last_only=True)
        numbers = [x for x in flatten_state(after).values() if not x.is_floating_point()]
        assert all(int(x.max()) == T for x in numbers)
        shared = state_outputs(state) | {"last": (last, None)}
        return {"logits": (logits, 1)} | shared

    def check(group):
        model, lengths = built(CAUSAL_MODELS[name]), split(T, group.size())
        inputs = {"tokens": (texts(), 1), "keep": (left_padding(), 1), "before": (texts(3), None)}
        assert_same_model_over_ranks(model, call, inputs, lengths, group)
        model.eval()
        tokens = inputs["tokens"][0]
        with sequence_parallel(group):
            share = tokens.split(lengths, dim=1)[dist.get_rank(group)]
            generated = model.generate(share, max_new_tokens=8)
            scores = token_losses(model, share, share, chunk_tokens=2 * B)
        assert torch.equal(generated, model.generate(tokens, max_new_tokens=8))
        want = token_losses(model, tokens, tokens).losses.split(lengths, dim=1)
        own = want[dist.get_rank(group)]
        torch.testing.assert_close(scores.losses, own, check_dtype=False)

    over_ranks(check)


# Offsets of two rows of T tokens: documents on one rank or several.
OFFSETS = torch.tensor([0, 1, 3, 8, T, T + 6, 2 * T], dtype=torch.int32)
MASKED = onescan.MaskedLMConfig
PACKED_MODELS = [language_model(CAUSAL), language_model(LIGHTNET, MASKED, position=BOTH_TPE)]


def test_packed_documents(over_ranks):
    def call(model, tokens, offsets, documents=None):
        options = {"cu_seqlens": offsets} if documents is None else {"documents": documents}
        y = model(tokens, **options)
        return {"logits": (y if isinstance(y, torch.Tensor) else y[0], 1)}

    def check(group):
        inputs = {"tokens": (texts(), 1), "offsets": (OFFSETS, None)}
        lengths = split(T, group.size())
        for config in PACKED_MODELS:
            assert_same_model_over_ranks(built(config), call, inputs, lengths, group)
        numbers = torch.searchsorted(OFFSETS[1:], torch.arange(B * T), right=True).view(B, T)
        inputs["documents"] = (numbers, 1)
        assert_same_model_over_ranks(built(PACKED_MODELS[0]), call, inputs, lengths, group)

    over_ranks(check)


MASKED_MODELS = {name: language_model(mixer, MASKED) for name, mixer in MIXERS.items()} | {
    "segments": language_model(LIGHTNET, MASKED, segment_types=2, position=BOTH_TPE),
}


@pytest.mark.parametrize("name", MASKED_MODELS)
def test_masked_language_model(over_ranks, name):
    config = MASKED_MODELS[name]

    def call(model, tokens, keep, segments):
        segments = segments if config.segment_types else None
        logits = model(tokens, keep, segments=segments, read_outs=2)
        masked = model(tokens, keep, segments=segments, positions=tokens == 0)
        (total,) = sum_over_ranks(masked.sum(dim=1))
        return {"logits": (logits, 1), "masked": (total, None)}

    def check(group):
        keep = torch.rand(B, T) > 0.3
        inputs = {"tokens": (texts(), 1), "keep": (keep, 1), "segments": (texts() % 2, 1)}
        assert_same_model_over_ranks(built(config), call, inputs, split(T, group.size()), group)

    over_ranks(check)


def logits_of(model, tokens, keep=None):
    return {"logits": (model(tokens, keep), None)}


@pytest.mark.parametrize("pool", ["first", "mean", "max", "attention"])
def test_sequence_classifier(over_ranks, pool):
    config = language_model(LIGHTNET, onescan.SequenceClassifierConfig, pool=pool, num_classes=3)

    def check(group):
        keep = torch.rand(B, T) > 0.3
        keep[0, : T // 2] = False
        inputs, model = {"tokens": (texts(), 1)}, built(config)
        for more in ({}, {"keep": (keep, 1)}):
            lengths = split(T, group.size())
            assert_same_model_over_ranks(model, logits_of, inputs | more, lengths, group)

    over_ranks(check)


def denoiser(mixer=LIGHTNET, **changes):
    sizes = {"image_size": (12, 6), "patch_size": (2, 2), "channels": 1, "num_classes": 3}
    return onescan.DenoiserConfig(
        **SMALL | sizes | {"mixer": mixer, "label_dropout": 0.5} | changes
    )


TIMESTEPS = torch.tensor([10, 500])
DENOISERS = {
    "tokens": denoiser(),
    "in norms": denoiser(condition="adaln_zero", position=SinusoidalPositionConfig()),
    "video": denoiser(**VIDEO),
}


@pytest.mark.parametrize("name", DENOISERS)
def test_denoiser(over_ranks, name):
    def call(model, noisy, timesteps, labels):
        return {"prediction": (model(noisy, timesteps, labels), 2)}

    def check(group):
        model = built(DENOISERS[name])
        inputs = {"noisy": (pixels(model.config), 2), "timesteps": (TIMESTEPS, None)}
        inputs["labels"] = (torch.tensor([0, 2]), None)
        assert_same_model_over_ranks(model, call, inputs, split(ROWS, group.size()), group)

    over_ranks(check)


@pytest.mark.parametrize("name", ["class token", "in norms"])
def test_checkpointed_blocks(over_ranks, name, monkeypatch):
    """The backward pass, which runs outside of the context, recomputes blocks inside of it."""
    monkeypatch.setattr(Block, "recompute", True)
    config = image_model() if name == "class token" else denoiser(condition="adaln_zero")

    def call(model, images):
        if name == "class token":
            return {"logits": (model(images)[0], None)}
        return {"prediction": (model(images, TIMESTEPS), 2)}

    def check(group):
        inputs = {"images": (pixels(config), 2)}
        lengths = split(ROWS, group.size())
        assert_same_model_over_ranks(built(config), call, inputs, lengths, group)

    over_ranks(check)
