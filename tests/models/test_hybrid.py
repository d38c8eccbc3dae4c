"""Hybrids: attention in every n-th block, another mixer in the others, in models of every kind."""

import dataclasses
from importlib import import_module

import pytest
import torch
from tiny_language_models import PLACES, causal, ids
from tiny_run import StripesConfig

import onescan
from onescan import cli, configs
from onescan.checkpoint.generation_state import load_generation_state, save_generation_state
from onescan.experiments.tasks import ImageClassificationConfig
from onescan.experiments.training import MachineConfig, RunConfig, TrainingConfig, train
from onescan.layers.decays import HGRN2DecayConfig
from onescan.layers.mixers import (
    HGRNMixerConfig,
    HybridMixerConfig,
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import ToeplitzPositionConfig
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.continuous_batch import ContinuousBatch
from onescan.models.denoiser import DenoiserConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.masked_lm import MaskedLMConfig
from onescan.models.sequence_decoder import SequenceDecoderConfig

LIGHTNET, SOFTMAX = LightNetMixerConfig(num_heads=3), SoftmaxMixerConfig(num_heads=2)
HYBRID = HybridMixerConfig(linear=LIGHTNET, attention=SOFTMAX, period=3)
CAUSAL = HybridMixerConfig(
    linear=dataclasses.replace(LIGHTNET, direction="forward"),
    attention=dataclasses.replace(SOFTMAX, direction="forward"),
    period=3,
)
WINDOW = configs.replace(CAUSAL, {"attention.window": 4})


def layers(config, depth):
    return [config.for_layer(i) for i in range(depth)]


@pytest.mark.parametrize(
    ("period", "offset", "attention"),
    [
        (3, -1, {2, 5}),
        (3, 0, {0, 3, 6}),
        (3, 1, {1, 4, 7}),
        (1, -1, set(range(8))),
        (9, -1, set()),
        (9, 7, {7}),
    ],
)
def test_attention_is_in_every_nth_block(period, offset, attention):
    config = dataclasses.replace(HYBRID, period=period, offset=offset)
    expected = [SOFTMAX if i in attention else LIGHTNET for i in range(8)]
    assert layers(config, 8) == expected


def test_the_number_of_heads_may_be_set_for_both():
    config = configs.replace(HYBRID, {"num_heads": 4})
    assert {mixer.num_heads for mixer in layers(config, 3)} == {4}
    assert configs.from_dict(HybridMixerConfig, configs.to_dict(config)) == config


def test_each_mixer_counts_its_own_blocks():
    lion = LionMixerConfig(direction="alternating")
    config = HybridMixerConfig(linear=lion, attention=SOFTMAX, period=2, offset=0)
    directions = [mixer.direction for mixer in layers(config, 6)]
    assert directions == ["both", "forward", "both", "backward", "both", "forward"]


def test_hybrids_nest():
    """Local attention in every second block, and attention to all tokens in every sixth."""
    local = dataclasses.replace(SOFTMAX, window=4)
    config = HybridMixerConfig(
        linear=LIGHTNET,
        attention=HybridMixerConfig(linear=local, attention=SOFTMAX, period=3),
        period=2,
    )
    expected = [LIGHTNET, local, LIGHTNET, local, LIGHTNET, SOFTMAX]
    assert layers(config, 12) == expected * 2
    assert configs.from_dict(HybridMixerConfig, configs.to_dict(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"period": 0}, "mixer.period is 0, expected a whole number of at least 1"),
        ({"offset": 3}, "mixer.offset is 3, expected -3 to 2 with period 3"),
        ({"offset": -4}, "mixer.offset is -4"),
        ({"linear.direction": "forward"}, "mixer.linear is causal and mixer.attention is not"),
        ({"attention.direction": "forward"}, "mixer.attention is causal and mixer.linear is not"),
    ],
)
def test_impossible_hybrids_are_refused(change, message):
    config = configs.replace(HYBRID, change)
    with pytest.raises(ValueError, match=message):
        MaskedLMConfig(vocab_size=9, width=24, depth=3, mixer=config).build()


@pytest.mark.parametrize("value", [1.0, True, "1", None])
@pytest.mark.parametrize("field", ["period", "offset"])
def test_numbers_of_other_types_are_refused(field, value):
    config = dataclasses.replace(HYBRID)
    object.__setattr__(config, field, value)  # tests check the types of arguments, users need not
    with pytest.raises(ValueError, match=f"mixer.{field} is {value!r}, expected a whole number"):
        config.for_layer(0)


def test_a_hybrid_is_not_a_mixer():
    with pytest.raises(ValueError, match=r"cannot be built: .* for_layer\(index\)"):
        HYBRID.build(width=24, axes=1)


@pytest.mark.sampled
@pytest.mark.parametrize("mixer", [CAUSAL, WINDOW], ids=["softmax", "window"])
@pytest.mark.parametrize("position", [None, PLACES], ids=["none", "places"])
def test_generation_equals_whole_texts_at_every_cut(mixer, position, tmp_path):
    model = causal({"mixer": mixer, "position": position, "depth": 4})
    tokens = ids(2, 11)
    want, _ = model(tokens)
    for cut in range(1, 11):
        first, state = model(tokens[:, :cut])
        rest, _ = model(tokens[:, cut:], state)
        torch.testing.assert_close(torch.cat([first, rest], dim=1), want)
    prompt, generated = tokens[:, :3], model.generate(tokens[:, :3], max_new_tokens=8)
    for i in range(8):  # greedy, without a state
        expected = model(torch.cat([prompt, generated[:, :i]], dim=1))[0][:, -1].argmax(-1)
        assert torch.equal(generated[:, i], expected)
    save_generation_state(tmp_path / "state.safetensors", state, model)
    loaded = load_generation_state(tmp_path / "state.safetensors", model)
    assert torch.equal(model(tokens[:, :2], loaded)[0], model(tokens[:, :2], state)[0])


def test_only_a_window_keeps_the_state_of_a_hybrid_constant():
    assert ContinuousBatch(causal({"mixer": WINDOW, "depth": 3})).model is not None
    with pytest.raises(ValueError, match=r"blocks\.2\.k; .* attention with a window"):
        ContinuousBatch(causal({"mixer": CAUSAL, "depth": 3}))


def test_both_mixers_must_be_causal_for_a_causal_model():
    sizes = {"vocab_size": 9, "width": 24, "depth": 3}
    with pytest.raises(ValueError, match="mixer is not causal"):
        CausalLMConfig(**sizes, mixer=HYBRID).build()
    for config in (CausalLMConfig(**sizes), SequenceDecoderConfig(**sizes, num_heads=2)):
        for one, other in (("linear", "attention"), ("attention", "linear")):
            mixed = dataclasses.replace(
                config, mixer=configs.replace(HYBRID, {f"{one}.direction": "forward"})
            )
            with pytest.raises(ValueError, match=f"mixer.{one} is causal and mixer.{other} is not"):
                mixed.build()


IMAGES = ImageClassifierConfig(
    image_size=(8, 12),
    patch_size=(2, 2),
    channels=1,
    num_classes=3,
    width=24,
    depth=3,
    mixer=HYBRID,
    position=ToeplitzPositionConfig(hidden_states=4),
)


def test_images_of_mixed_sizes_are_padded():
    model = IMAGES.build().double().eval()
    images = torch.randn(2, 1, 8, 12, dtype=torch.float64)
    keep = torch.ones(2, 8, 12, dtype=torch.bool)
    keep[1, 6:], keep[1, :, 8:] = False, False
    logits = model(images.masked_fill(~keep.unsqueeze(1), torch.nan), keep)
    torch.testing.assert_close(logits[:1], model(images[:1]))
    torch.testing.assert_close(logits[1:], model(images[1:, :, :6, :8]))


def test_lower_bounds_reach_only_the_blocks_that_read_them():
    linear = HGRNMixerConfig(num_heads=3)
    model = dataclasses.replace(IMAGES, mixer=HybridMixerConfig(linear=linear, period=3)).build()
    model(torch.randn(2, 1, 8, 12)).square().sum().backward()
    assert model.lower_bounds.logits.grad.abs().sum() > 0
    linear = LionMixerConfig(num_heads=3, decay=HGRN2DecayConfig(learned_lower_bound=True))
    mixer = HybridMixerConfig(linear=linear, attention=SOFTMAX, period=2)
    assert "lower_bound" in mixer.takes
    assert "lower_bound" not in HYBRID.takes


@pytest.mark.parametrize("condition", ["tokens", "adaln_zero"])
def test_denoisers_take_hybrids(condition):
    config = DenoiserConfig(
        image_size=(4, 4), patch_size=(2, 2), channels=2, num_classes=3, width=24, depth=3,
        mixer=HYBRID, condition=condition,
    )  # fmt: skip
    model = config.build()
    images, labels = torch.randn(2, 2, 4, 4), torch.tensor([0, 2])
    assert model(images, torch.tensor([1, 999]), labels).shape[2:] == images.shape[2:]


SIGNAL = ImageClassifierConfig(
    image_size=(9,), patch_size=(1,), channels=2, num_classes=3, width=24, depth=3, pool="mean",
    mixer=WINDOW, position=ToeplitzPositionConfig(hidden_states=4), drop_path=0.0,
)  # fmt: skip


def test_a_window_streams_signals():
    model = SIGNAL.build().double().eval()
    signals, state, parts = torch.randn(2, 2, 9, dtype=torch.float64), None, []
    for part in signals.split([1, 3, 5], dim=2):
        y, state = model.stream(part, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, dim=1), model.forward_features(signals))
    grows = dataclasses.replace(SIGNAL, mixer=CAUSAL).build().double()
    with pytest.raises(ValueError, match="a SoftmaxMixerConfig, whose state grows"):
        grows.stream(signals)


def test_a_class_token_may_read_patches_in_the_last_block_only():
    local = LinearDiffusionMixerConfig(num_heads=3, separable=True, linear_attention=False)
    mixer = HybridMixerConfig(linear=local, attention=SOFTMAX, period=3)
    model = dataclasses.replace(IMAGES, mixer=mixer, position=None).build()
    images = torch.randn(1, 1, 8, 12, requires_grad=True)
    model(images).square().sum().backward()
    assert (images.grad != 0).all()
    with pytest.raises(ValueError, match="the class token reads no patch"):
        dataclasses.replace(IMAGES, mixer=mixer, depth=2).build()


@pytest.mark.slow
def test_the_command_line_builds_hybrids(monkeypatch):
    started = []
    monkeypatch.setattr(
        "onescan.experiments.training.train", lambda run, *_, **__: started.append(run)
    )
    monkeypatch.setattr("onescan.experiments.report.write_report", lambda *_: None)
    monkeypatch.setattr(import_module("onescan.cli.train"), "_results", lambda _: "")
    argv = "digits --model.mixer lion_s_hybrid --model.mixer.period 2 --model.mixer.num-heads 2"
    argv += " --model.mixer.attention.dropout 0.1 --model.mixer.linear.no-bias"
    cli.main(["train", *argv.split()])
    (run,) = started
    lion, softmax = layers(run.model.mixer, 2)
    assert lion == LionMixerConfig(num_heads=2, bias=False)
    assert softmax == SoftmaxMixerConfig(num_heads=2, dropout=0.1, bias=False)


def test_a_run_saves_and_loads_a_hybrid(tmp_path):
    run = RunConfig(
        name="hybrid",
        model=dataclasses.replace(IMAGES, image_size=(4, 4)),
        data=StripesConfig(),
        task=ImageClassificationConfig(),
        training=TrainingConfig(steps=2, batch_size=4),
        machine=MachineConfig(trackers=()),
    )
    train(run, tmp_path)
    loaded = onescan.load(tmp_path)
    assert configs.from_dict(type(run), loaded.run) == run
    kinds = [type(block.mixer).__name__ for block in loaded.model.blocks]
    assert kinds == ["LightNetMixer", "LightNetMixer", "SoftmaxMixer"]
