"""Models over several ranks have the outputs and gradients of a single process.

Mixers in MIXERS are tested in image classifiers and masked language models, and those in
CAUSAL_MIXERS in causal language models.
"""

import pytest
import torch
import torch.distributed as dist
from communication import Communication
from ranks import OneProcess, run_ranks, split

import onescan
from onescan import sequence_parallel
from onescan.configs import replace
from onescan.integrations.transformers import to_transformers
from onescan.layers.block import Block, DropPath, LabelEmbedding
from onescan.layers.mixers import DeltaRuleMixerConfig, LightNetMixerConfig
from onescan.layers.position import (
    AbsolutePositionConfig,
    SinusoidalPositionConfig,
    ToeplitzPositionConfig,
    TokenPositionConfig,
)
from onescan.models.causal_lm import token_losses
from onescan.models.token_network import flatten_state
from onescan.ops.collectives import sum_over_ranks

B, T, VOCABULARY, WIDTH = 2, 13, 17, 12
LIGHTNET = LightNetMixerConfig(num_heads=2)
CAUSAL = LightNetMixerConfig(num_heads=2, direction="forward")
TPE = ToeplitzPositionConfig(hidden_states=3)
BOTH_TPE = ToeplitzPositionConfig(hidden_states=3, bidirectional=True)
SMALL = {"width": WIDTH, "depth": 2, "position": TPE}


def mixer_of(preset, **changes):
    """Return the mixer of a preset, with two heads."""
    return replace(onescan.PRESETS[preset].config.mixer, {"num_heads": 2} | changes)


# Text has one axis: natural scans are the same as flat ones there.
MIXERS = {
    "lightnet": LIGHTNET,
    "separate decay": replace(LIGHTNET, {"decay_logits": "offset"}),
    "independent decay": replace(LIGHTNET, {"decay_logits": "independent", "norm": "none"}),
    "without decay": replace(LIGHTNET, {"decay": False}),
    "convolution": replace(LIGHTNET, {"conv_size": 3}),
    "lion_s": mixer_of("lion_s_tiny"),
    "lion_s natural": mixer_of("lion_s_natural_tiny"),
    "ldn": mixer_of("ldn_base"),
    "separable ldn": mixer_of("ldn_base", separable=True),
    "deltanet": DeltaRuleMixerConfig(num_heads=2),
    "gated deltanet": mixer_of("gated_deltanet_tiny"),
    "hybrid": mixer_of("lightnet_hybrid_tiny"),
}
CAUSAL_MIXERS = {
    "lightnet": CAUSAL,
    "separate decay": replace(CAUSAL, {"decay_logits": "offset"}),
    "independent decay": replace(CAUSAL, {"decay_logits": "independent"}),
    "without decay": replace(CAUSAL, {"decay": False}),
    "convolution": replace(CAUSAL, {"conv_size": 3}),
    "lion_s": mixer_of("lion_s_lm_124m"),
    "deltanet": DeltaRuleMixerConfig(num_heads=2, direction="forward", conv_size=4),
    "gated deltanet": mixer_of("gated_deltanet_lm_53m"),
    "kda": mixer_of("kda_lm_47m"),
    "hybrid": mixer_of("lightnet_hybrid_lm_45m"),
}
EVERY_SIZE = {"lightnet"}  # run on 2, 3 and 4 ranks; the others on 3 or 4


def cases(models):
    """Return the arguments of a test of each model: its config, and the numbers of ranks."""
    return [
        pytest.param(config, range(2, 5) if name in EVERY_SIZE else [3 + i % 2], id=name)
        for i, (name, config) in enumerate(models.items())
    ]


@pytest.fixture
def assert_same(tmp_path):
    """Compare models on a single process with models over ranks, for uneven shards."""

    def compare(units, *models, sizes=range(2, 5)):
        def check(group):
            for model in models:
                model.assert_same_over_ranks(split(units, group.size()), group)

        run_ranks(sizes[-1], check, tmp_path, smallest=sizes[0])

    return compare


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def built(config):
    """Build a model in float64 in which no parameter is 0."""
    model = config.build().double()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


# Images and video


def image_model(mixer=LIGHTNET, **changes):
    sizes = {"image_size": (12, 6), "patch_size": (2, 2), "channels": 1, "num_classes": 3}
    options = {"mixer": mixer, "drop_path": 0.5}
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


def pixels(config):
    return rand(B, 1, ROWS * config.patch_size[0], *config.image_size[1:])


def classify(model, images, keep=None):
    outputs = {}
    if keep is None:
        last, (grid,) = model.forward_intermediates(images, [0])
        logits, outputs["grid"] = model.forward_head(last), (grid, 2)
    else:
        logits = model(images, keep)
    logits = torch.cat(logits) if isinstance(logits, tuple) else logits
    return outputs | {"logits": (logits, None)}


@pytest.mark.sampled
@pytest.mark.parametrize(("config", "sizes"), cases(IMAGE_MODELS))
def test_image_classifier(assert_same, config, sizes):
    model, images = built(config), pixels(config)
    models = [OneProcess(model, classify, {"images": (images, 2)})]
    reads_padding = getattr(config.mixer, "separable", True)
    if reads_padding and not isinstance(config.position, AbsolutePositionConfig):
        keep = torch.ones_like(images[:, 0], dtype=torch.bool)
        keep[0, 4 * config.patch_size[0] :] = False
        inputs = {"images": (images, 2), "keep": (keep, 1)}
        models.append(OneProcess(model, classify, inputs))
    assert_same(ROWS, *models, sizes=sizes)


@pytest.mark.slow
def test_image_stream(assert_same):
    def call(model, images):
        before, state = model.stream(images)
        after, state = model.stream(images, state)
        shared = {name: (x, None) for name, x in flatten_state(state).items() if x.ndim}
        return {"before": (before, 1), "after": (after, 1)} | shared

    config = image_model(CAUSAL, pool="mean")
    assert_same(ROWS, OneProcess(built(config), call, {"images": (pixels(config), 2)}))


def denoiser(mixer=LIGHTNET, **changes):
    sizes = {"image_size": (12, 6), "patch_size": (2, 2), "channels": 1, "num_classes": 3}
    return onescan.DenoiserConfig(
        **SMALL | sizes | {"mixer": mixer, "label_dropout": 0.5} | changes
    )


DENOISERS = {
    "lightnet": denoiser(),
    "in norms": denoiser(condition="adaln_zero", position=SinusoidalPositionConfig()),
    "video": denoiser(**VIDEO),
}


def denoise(model, noisy, timesteps, labels):
    return {"prediction": (model(noisy, timesteps, labels), 2)}


def noisy_inputs(config):
    per_image = {"timesteps": torch.tensor([10, 500]), "labels": torch.tensor([0, 2])}
    return {"noisy": (pixels(config), 2)} | {name: (x, None) for name, x in per_image.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("config", "sizes"), cases(DENOISERS))
def test_denoiser(assert_same, config, sizes):
    assert_same(ROWS, OneProcess(built(config), denoise, noisy_inputs(config)), sizes=sizes)


def test_samples_are_dropped_on_all_ranks(tmp_path):
    ones, labels = torch.ones(64, 1), torch.zeros(64, dtype=torch.long)
    drop, embedding = DropPath(0.5), LabelEmbedding(1, WIDTH, dropout=0.5)
    torch.manual_seed(0)
    want = drop(ones), embedding(labels)

    def check(group):
        torch.manual_seed(dist.get_rank(group))
        with sequence_parallel(group):
            got = drop(ones), embedding(labels)
        torch.testing.assert_close(got, want)

    run_ranks(3, check, tmp_path)


@pytest.mark.slow
def test_checkpointed_blocks(assert_same, monkeypatch):
    """The backward pass, which runs outside of the context, recomputes blocks inside of it."""
    monkeypatch.setattr(Block, "recompute", True)
    images, noisy = image_model(), denoiser(condition="adaln_zero")
    classifier = OneProcess(built(images), classify, {"images": (pixels(images), 2)})
    assert_same(ROWS, classifier, OneProcess(built(noisy), denoise, noisy_inputs(noisy)))


# Text


def language_model(mixer, kind=onescan.CausalLMConfig, **changes):
    return kind(**SMALL | {"vocab_size": VOCABULARY, "mixer": mixer} | changes)


CAUSAL_MODELS = {name: language_model(mixer) for name, mixer in CAUSAL_MIXERS.items()} | {
    "token positions": language_model(CAUSAL, position=TokenPositionConfig(max_tokens=T + 8)),
    "no position": language_model(CAUSAL, position=None, tie_embeddings=False),
}


def texts(tokens=T):
    return torch.randint(VOCABULARY, (B, tokens))


def test_checkpointing_of_transformers(assert_same):
    """The backward pass, which runs outside of the context, recomputes blocks inside of it."""

    def call(model, tokens):
        return {"logits": (model(input_ids=tokens, use_cache=False).logits, 1)}

    model = to_transformers(built(language_model(CAUSAL)))
    model._set_gradient_checkpointing()
    model.train()
    assert_same(T, OneProcess(model, call, {"tokens": (texts(), 1)}), sizes=[3])


@pytest.mark.sampled
@pytest.mark.parametrize(("config", "sizes"), cases(CAUSAL_MODELS))
def test_causal_language_model(assert_same, config, sizes):
    def call(model, tokens, keep, before):
        with sequence_parallel(None):
            _, state = model(before)
        logits, _ = model(tokens, state)
        last, after = model(tokens, keep=keep, last_only=True)
        state = {name: x for name, x in flatten_state(after).items() if x.is_floating_point()}
        shared = {name: (x, None) for name, x in state.items()} | {"last": (last, None)}
        return {"logits": (logits, 1)} | shared

    left_padding = torch.arange(T) >= torch.tensor([[0], [T // 2 + 1]])
    inputs = {"tokens": (texts(), 1), "keep": (left_padding, 1), "before": (texts(3), None)}
    assert_same(T, OneProcess(built(config), call, inputs), sizes=sizes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightnet", "independent decay", "token positions"])
def test_generation(tmp_path, name):
    """Ranks read a sharded prompt, and then generate on their own."""
    model, tokens = built(CAUSAL_MODELS[name]).eval(), texts()
    generated = model.generate(tokens, max_new_tokens=8)
    scores = token_losses(model, tokens, tokens)

    def check(group):
        lengths, rank = split(T, group.size()), dist.get_rank(group)
        share = tokens.split(lengths, dim=1)[rank]
        with sequence_parallel(group):
            assert torch.equal(model.generate(share, max_new_tokens=8), generated)
            own = token_losses(model, share, share, chunk_tokens=2 * B)
        for x, whole in zip(own, scores, strict=True):
            torch.testing.assert_close(x, whole.split(lengths, dim=1)[rank], check_dtype=False)

    run_ranks(4, check, tmp_path)


MASKED = onescan.MaskedLMConfig
MASKED_MODELS = {name: language_model(mixer, MASKED) for name, mixer in MIXERS.items()} | {
    "segments": language_model(LIGHTNET, MASKED, segment_types=2, position=BOTH_TPE),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("config", "sizes"), cases(MASKED_MODELS))
def test_masked_language_model(assert_same, config, sizes):
    def call(model, tokens, keep, segments):
        segments = segments if config.segment_types else None
        logits = model(tokens, keep, segments=segments, read_outs=2)
        masked = model(tokens, keep, segments=segments, positions=tokens < 5)
        (total,) = sum_over_ranks(masked.sum(dim=1))
        return {"logits": (logits, 1), "masked": (total, None)}

    keep = torch.rand(B, T) > 0.3
    inputs = {"tokens": (texts(), 1), "keep": (keep, 1), "segments": (texts() % 2, 1)}
    assert_same(T, OneProcess(built(config), call, inputs), sizes=sizes)


# Offsets of two rows of T tokens: documents on one rank or several.
OFFSETS = torch.tensor([0, 1, 3, 8, T, T + 6, 2 * T], dtype=torch.int32)
PACKED_MODELS = {
    "lightnet": language_model(LIGHTNET, MASKED, position=BOTH_TPE),
    "causal": language_model(CAUSAL),
    "token positions": language_model(LIGHTNET, MASKED, position=TokenPositionConfig(max_tokens=8)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("config", "sizes"), cases(PACKED_MODELS))
def test_packed_documents(assert_same, config, sizes):
    def call(model, tokens, keep, offsets=None, documents=None):
        y = model(tokens, keep=keep, cu_seqlens=offsets, documents=documents)
        return {"logits": (y[0] if isinstance(y, tuple) else y, 1)}

    model = built(config)
    inputs = {"tokens": (texts(), 1), "keep": (torch.rand(B, T) > 0.3, 1)}
    numbers = torch.searchsorted(OFFSETS[1:], torch.arange(B * T), right=True).view(B, T)
    by_offsets = OneProcess(model, call, inputs | {"offsets": (OFFSETS, None)})
    by_numbers = OneProcess(model, call, inputs | {"documents": (numbers, 1)})
    assert_same(T, by_offsets, by_numbers, sizes=sizes)


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["first", "mean", "max", "attention"])
def test_sequence_classifier(assert_same, pool):
    def call(model, tokens, keep=None):
        return {"logits": (model(tokens, keep), None)}

    config = language_model(LIGHTNET, onescan.SequenceClassifierConfig, pool=pool, num_classes=3)
    model, inputs = built(config), {"tokens": (texts(), 1)}
    keep = torch.rand(B, T) > 0.3
    keep[0, : T // 2] = False
    padded = OneProcess(model, call, inputs | {"keep": (keep, 1)})
    assert_same(T, OneProcess(model, call, inputs), padded)


@pytest.mark.slow
def test_sequence_decoder(assert_same):
    """The encoder's tokens are sharded, those of the decoder are the same on every rank."""

    def call(model, tokens, memory, mask):
        logits, state = model(tokens, memory, memory_mask=mask)
        sums = torch.stack([summary.k_sum for summary in state.memories])
        generated = model.generate(memory, start=1, end=2, max_new_tokens=3, memory_mask=mask)
        found = {"logits": logits, "sums": sums, "generated": generated.double()}
        return {name: (x, None) for name, x in found.items()}

    model = built(onescan.SequenceDecoderConfig(vocab_size=VOCABULARY, width=WIDTH))
    inputs = {"tokens": (texts(5), None), "memory": (rand(B, T, WIDTH), 1)}
    inputs["mask"] = (torch.rand(B, T) > 0.3, 1)
    assert_same(T, OneProcess(model, call, inputs))


# Collectives and errors


def test_lengths_are_exchanged_once(tmp_path):
    text, image = built(language_model(CAUSAL)), built(image_model())

    def check(group):
        with Communication() as traffic, sequence_parallel(group):
            text(texts(3))
        assert traffic.calls == ["all_gather"] * 4  # lengths, positions, and one per block
        with Communication() as traffic, sequence_parallel(group):
            image(rand(B, 1, 4, 6))
        assert traffic.calls == [
            "all_gather",  # lengths
            *["all_to_all_single"] * 2,  # tokens, for positions
            *["all_reduce"] * 2,  # the first block
            *["all_reduce"] * 2,  # the second block, which has drop path
            *["all_gather"] * 2,
            "all_gather",  # class token
        ]

    run_ranks(3, check, tmp_path)


def test_a_mesh_is_a_group(tmp_path):
    model, tokens = built(language_model(CAUSAL)), texts(3)

    def check(group):
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
        with pytest.raises(ValueError, match="group is a mesh with 2 dimensions, expected one"):
            onescan.SequenceGroup(mesh)
        with sequence_parallel(mesh["sequence"]):
            got, _ = model(tokens, last_only=True)
        with sequence_parallel(mesh["sequence"].get_group()):
            torch.testing.assert_close(model(tokens, last_only=True)[0], got)

    run_ranks(4, check, tmp_path, smallest=4)


def test_inputs_that_cannot_run_over_ranks(tmp_path):
    """Every rank raises the same error, so that none waits for another."""
    text, image = built(language_model(CAUSAL)), built(image_model())
    joint = built(image_model(position=replace(TPE, {"joint": True})))
    separate = built(language_model(CAUSAL_MIXERS["separate decay"]))

    def check(group):
        size, rows = group.size(), 2 + dist.get_rank(group)
        offsets = torch.tensor([0, 1, 3 * size, 6 * size])
        wrong = [
            (lambda: text(texts(0)), "T is 0 on every rank, expected at least one token"),
            (
                lambda: image(rand(1, 1, rows, 4)),
                r"sizes \[2, 3.* multiples of the patch size 2, not",
            ),
            (lambda: image(rand(1, 1, 0, 4)), r"sizes \[0, 0.* not all 0"),
            (
                lambda: joint(rand(1, 1, 4, 4)),
                f"group has {size} ranks, but a joint kernel supports only one",
            ),
            (
                lambda: separate(texts(3), cu_seqlens=offsets),
                f"group has {size} ranks, but a layer without cu_seqlens supports only one",
            ),
        ]
        for call, message in wrong:
            with pytest.raises(ValueError, match=message), sequence_parallel(group):
                call()

    run_ranks(3, check, tmp_path)


# All presets


def small(config):
    """Return the config of a preset as a small model."""
    changes = {"width": 24, "depth": 2, "mixer.num_heads": 2}
    if hasattr(config, "image_size"):
        axes = len(config.image_size)
        changes |= {"image_size": (12, 6, 4)[:axes], "patch_size": (2,) * axes}
        changes |= {"channels": 1, "num_classes": 3}
    else:
        changes["vocab_size"] = VOCABULARY
    return replace(config, changes)


# without those that only differ in size
PRESETS = {repr(small(preset.config)): name for name, preset in onescan.PRESETS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS.values())
def test_preset(assert_same, name):
    def read(model, tokens):
        y = model(tokens)
        return {"logits": (y[0] if isinstance(y, tuple) else y, 1)}

    config = small(onescan.PRESETS[name].config)
    if isinstance(config, onescan.DenoiserConfig):
        units, call, inputs = ROWS, denoise, noisy_inputs(config)
    elif isinstance(config, onescan.ImageClassifierConfig):
        units, call, inputs = ROWS, classify, {"images": (pixels(config), 2)}
    else:
        units, call, inputs = T, read, {"tokens": (texts(), 1)}
    assert_same(units, OneProcess(built(config).eval(), call, inputs), sizes=[2, 3])
