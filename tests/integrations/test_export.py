"""Exported programs, in torch and in onnxruntime, against the models that they were made of."""

import json
import logging

import jaxtyping
import numpy as np
import onnxruntime
import pytest
import torch
from tiny_language_models import padded

import onescan
from onescan.integrations import export
from onescan.integrations.export import (
    export_onnx,
    export_onnx_step,
    export_program,
    export_step,
    initial_state,
    logaddexp,
    logcumsumexp,
    solve_unit_triangular,
)
from onescan.layers.basic import GLUConfig, MLPConfig
from onescan.layers.decays import FixedDecayConfig
from onescan.layers.mixers import (
    DeltaRuleMixerConfig,
    HybridMixerConfig,
    HydraMixerConfig,
    KDAMixerConfig,
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
    Mamba2MixerConfig,
    MambaMixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import (
    AbsolutePositionConfig,
    ToeplitzPositionConfig,
    TokenPositionConfig,
)
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.denoiser import DenoiserConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.masked_lm import MaskedLMConfig
from onescan.models.sequence_classifier import SequenceClassifierConfig

VOCABULARY, CHUNK = 11, 8
TEXT = {"vocab_size": VOCABULARY, "width": 16, "depth": 1, "init_std": 0.3}
NEAR = {"sigmas": (1.0,), "max_sigma": 2.0}
PLACES = TokenPositionConfig(max_tokens=200)
TPE = ToeplitzPositionConfig(hidden_states=4)
TPE_BOTH = ToeplitzPositionConfig(hidden_states=4, bidirectional=True)
SIZES = ((1, 8, 4), (3, 12, 18), (2, 8, 140))
LENGTHS = (1, 6, 131)  # below a chunk, and more than two of the position's 64

CAUSAL = {
    "lightnet": {
        "mixer": LightNetMixerConfig(
            num_heads=2, direction="forward", chunk_size=CHUNK, decay_logits="offset", decay_rank=4
        ),
        "position": TPE,
    },
    "lion": {
        "mixer": LionMixerConfig(num_heads=2, direction="forward", chunk_size=CHUNK),
        "position": None,
    },
    "delta": {
        "mixer": DeltaRuleMixerConfig(num_heads=2, direction="forward", chunk_size=CHUNK),
        "position": None,
    },
    "kda": {
        "mixer": KDAMixerConfig(num_heads=2, direction="forward", chunk_size=CHUNK, gate_rank=4),
        "position": None,
    },
    "retnet": {
        "mixer": LionMixerConfig(
            num_heads=2,
            direction="forward",
            chunk_size=CHUNK,
            feature_map="identity",
            decay=FixedDecayConfig(),
            normalize="none",
            norm="rms",
            value_width=16,
            conv_size=4,
            rotary=True,
        ),
        "position": None,
    },
    "mamba": {
        "mixer": MambaMixerConfig(direction="forward", state_size=4, chunk_size=CHUNK),
        "position": None,
    },
    "mamba2": {
        "mixer": Mamba2MixerConfig(num_heads=2, direction="forward", key_width=4, chunk_size=CHUNK),
        "position": None,
    },
    "gpt2": {
        "mixer": SoftmaxMixerConfig(num_heads=2, direction="forward"),
        "mlp": MLPConfig(),
        "position": PLACES,
    },
    "window": {
        "mixer": SoftmaxMixerConfig(num_heads=2, direction="forward", window=5, rotary=True),
        "position": None,
    },
    "leak": {
        "mixer": LightNetMixerConfig(
            num_heads=2, direction="forward", chunk_size=CHUNK, leak=(2.0, 8.0)
        ),
        "position": TPE,
    },
    "ldn": {
        "mixer": LinearDiffusionMixerConfig(num_heads=2, direction="forward", **NEAR),
        "mlp": None,
        "position": PLACES,
    },
    "ldn free": {
        "mixer": LinearDiffusionMixerConfig(
            num_heads=2, direction="forward", kernel="free", kernels=None, **NEAR
        ),
        "mlp": None,
        "position": PLACES,
    },
}
HYBRID = {
    "mixer": HybridMixerConfig(
        linear=LightNetMixerConfig(num_heads=2, direction="forward", chunk_size=CHUNK),
        attention=CAUSAL["window"]["mixer"],
        period=2,
    ),
    "depth": 2,
    "position": None,
}
BOTH = {
    "lightnet": {"mixer": LightNetMixerConfig(num_heads=2), "position": TPE_BOTH},
    "lion": {"mixer": LionMixerConfig(num_heads=2, chunk_size=CHUNK), "position": None},
    "delta": {"mixer": DeltaRuleMixerConfig(num_heads=2, chunk_size=CHUNK), "position": None},
    "hydra": {
        "mixer": HydraMixerConfig(num_heads=2, state_size=4, chunk_size=CHUNK),
        "position": None,
    },
    "ldn": {
        "mixer": LinearDiffusionMixerConfig(num_heads=2, **NEAR),
        "mlp": None,
        "position": PLACES,
    },
    "bert": {
        "mixer": SoftmaxMixerConfig(num_heads=2),
        "mlp": MLPConfig(),
        "position": PLACES,
        "segment_types": 2,
    },
    "window": {"mixer": SoftmaxMixerConfig(num_heads=2, window=3), "position": None},
}
IMAGES = {
    "lightnet": {"mixer": LightNetMixerConfig(num_heads=2)},
    "lion natural": {
        "mixer": LionMixerConfig(num_heads=2, scan="natural", chunk_size=CHUNK),
        "position": None,
    },
    "ldn separable": {
        "mixer": LinearDiffusionMixerConfig(num_heads=2, separable=True, **NEAR),
        "mlp": None,
        "position": None,
        "pool": "mean",
    },
}
# programs of the others are looked at where they become files
over_both = pytest.mark.parametrize("name", ["lightnet", "delta", "hydra", "ldn", "bert", "window"])
over_images = pytest.mark.parametrize("name", ["lion natural", "ldn separable"])


@pytest.fixture(autouse=True)
def _lengths_may_be_symbols():
    """Let the shape checks pass over calls: while a model is traced an int is none."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def traced(monkeypatch):
    """The programs that are traced from now on, each a module."""
    programs, trace = [], export._traced

    def traced(*given):
        program = trace(*given)
        programs.append(program.module())
        return program

    monkeypatch.setattr(export, "_traced", traced)
    return programs


def ids(*shape):
    return torch.randint(VOCABULARY, shape)


def causal(change):
    return CausalLMConfig(**{**TEXT, "mlp": GLUConfig(), **change}).build().eval()


def image_classifier(**change):
    config = ImageClassifierConfig(
        **{
            "image_size": (12, 8), "patch_size": (4, 2), "channels": 1, "num_classes": 3,
            "width": 16, "depth": 1, "init_std": 0.3, "mixer": SoftmaxMixerConfig(num_heads=2),
            **change,
        }
    )  # fmt: skip
    return config.build().eval()


def assert_near(got, want):
    torch.testing.assert_close(torch.as_tensor(got), want, atol=1e-5, rtol=0)


def run(session, **inputs):
    return session.run(None, {name: np.asarray(x) for name, x in inputs.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_program_takes_any_length(name):
    model = causal(CAUSAL[name])
    program = export_program(model).module()
    for length in LENGTHS:
        tokens = ids(3, length)
        assert_near(program(tokens), model(tokens)[0])


@pytest.mark.sampled
@over_both
def test_a_masked_program_takes_any_length_and_padding(name):
    model = MaskedLMConfig(**{**TEXT, **BOTH[name]}).build().eval()
    program = export_program(model, extra_inputs=("keep",)).module()
    for length in LENGTHS:
        tokens, keep = ids(2, length), torch.rand(2, length) < 0.8
        assert_near(program(tokens, keep), model(tokens, keep))


def test_a_classifiers_program_takes_segments():
    model = SequenceClassifierConfig(**{**TEXT, **BOTH["bert"]}, pool="first").build().eval()
    program = export_program(model, extra_inputs=("keep", "segments")).module()
    for length in LENGTHS:
        tokens, keep = ids(2, length), torch.rand(2, length) < 0.8
        segments = torch.randint(2, (2, length))
        assert_near(program(tokens, keep, segments), model(tokens, keep, segments=segments))


@pytest.mark.slow
@over_images
def test_an_image_program_takes_any_batch_and_size(name):
    model = image_classifier(**IMAGES[name])
    program = export_program(model).module()
    for batch, height, width in SIZES:
        images = torch.randn(batch, 1, height, width)
        assert_near(program(images), model(images))


DENSE = LinearDiffusionMixerConfig(num_heads=2, kernel="dense")


@pytest.mark.sampled
@pytest.mark.parametrize(
    "fields",
    [{"position": AbsolutePositionConfig()}, {"mixer": DENSE, "mlp": None, "pool": "mean"}],
    ids=["absolute positions", "dense diffusion"],
)
def test_some_models_have_one_size_and_any_batch(fields):
    model = image_classifier(**fields)
    program = export_program(model).module()
    for batch in (1, 3, 4):
        images = torch.randn(batch, 1, 12, 8)
        assert_near(program(images), model(images))
    with pytest.raises(AssertionError, match="size"):
        program(torch.randn(1, 1, 12, 10))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "any_length"),
    [
        (name, any_length)
        for name in CAUSAL
        for any_length in (False, True)
        if any_length or name in ("lion", "delta", "ldn")
    ],
)
def test_a_step_goes_on_from_its_state(name, any_length):
    model = causal(CAUSAL[name])
    program = export_step(model, any_length=any_length).module()
    tokens, state, parts = ids(3, 23), initial_state(model, batch=3), []
    for part in tokens.split([1, 20, 2] if any_length else 1, dim=1):
        scores, state = program(part, state)
        parts.append(scores)
    assert_near(torch.cat(parts, dim=1), model(tokens)[0])


@pytest.mark.slow
def test_an_onnx_file_of_images_says_what_it_is(tmp_path, traced, caplog):
    model = image_classifier(**IMAGES["lightnet"])
    export_onnx(model, tmp_path / "model.onnx")
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert not logging.getLogger("onnxscript").level
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (images,) = session.get_inputs()
    assert (images.name, images.shape) == ("images", ["batch", 1, "height", "width"])
    config = json.loads(session.get_modelmeta().custom_metadata_map["config"])
    assert config["type"] == "ImageClassifierConfig"
    assert config["num_classes"] == 3
    (program,) = traced
    for batch, height, width in SIZES:
        x = torch.randn(batch, 1, height, width)
        assert_near(program(x), model(x))
        assert_near(run(session, images=x)[0], model(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(BOTH["lion"], id="lion"),
        pytest.param(CAUSAL["delta"], id="delta"),
        pytest.param(  # chunks of several blocks; the others have one
            {"mixer": LightNetMixerConfig(num_heads=2, direction="forward"), "position": None},
            id="lightnet, default chunks",
        ),
    ],
)
def test_an_onnx_file_of_texts_takes_any_length_and_padding(tmp_path, traced, change):
    model = SequenceClassifierConfig(**{**TEXT, **change}).build().eval()
    export_onnx(model, tmp_path / "model.onnx", extra_inputs=("keep",))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert [(x.name, x.shape) for x in session.get_inputs()] == [
        ("tokens", ["batch", "length"]),
        ("keep", ["batch", "length"]),
    ]
    (program,) = traced
    for length in LENGTHS:
        tokens, keep = ids(2, length), torch.rand(2, length) < 0.8
        assert_near(program(tokens, keep), model(tokens, keep))
        assert_near(run(session, tokens=tokens, keep=keep)[0], model(tokens, keep))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "lightnet", "lion", "window"])
def test_an_onnx_masked_model_takes_padding_on_either_side(tmp_path, name):
    model = MaskedLMConfig(**{**TEXT, **BOTH[name]}).build().eval()
    export_onnx(model, tmp_path / "model.onnx", extra_inputs=("keep",))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for lengths in ((5, 2, 7), (1, 131)):
        tokens = ids(len(lengths), max(lengths))
        for side in ("right", "left"):
            rows, keep = padded(tokens, lengths, side)
            (scores,) = run(session, tokens=rows, keep=keep)
            assert_near(scores[keep.numpy()], model(rows, keep)[keep])  # padding may hold anything
            for row, real, text, length in zip(scores, keep, tokens, lengths, strict=True):
                assert_near(row[real.numpy()], model(text[None, :length])[0])


@pytest.mark.sampled
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(CAUSAL["gpt2"], id="gpt2"),
        pytest.param(CAUSAL["lightnet"], id="lightnet"),
        pytest.param(CAUSAL["leak"], id="leak"),
        pytest.param(HYBRID, id="hybrid"),
    ],
)
def test_an_onnx_step_needs_nothing_but_its_file(tmp_path, traced, change):
    model = causal(change)
    export_onnx_step(model, tmp_path / "step.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "step.onnx")
    first = json.loads(session.get_modelmeta().custom_metadata_map["initial_state"])
    state = {
        part: np.full([2 if n == "batch" else n for n in it["shape"]], it["value"], it["type"])
        for part, it in first.items()
    }
    assert [x.name for x in session.get_inputs()] == ["tokens", *state]
    assert [x.name for x in session.get_outputs()] == ["logits", *(f"next.{x}" for x in state)]
    tokens, parts = ids(2, 19), []
    for token in tokens.split(1, dim=1):
        scores, *after = run(session, tokens=token, **state)
        state = dict(zip(state, after, strict=True))
        parts.append(torch.as_tensor(scores))
    assert_near(torch.cat(parts, dim=1), model(tokens)[0])
    (program,) = traced
    state, parts = initial_state(model, batch=2), []
    for token in tokens.split(1, dim=1):
        scores, state = program(token, state)
        parts.append(scores)
    assert_near(torch.cat(parts, dim=1), model(tokens)[0])


@pytest.mark.slow
def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(program, path, **_):
        path.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(torch.onnx.ONNXProgram, "save", fail)
    (tmp_path / "model.onnx").write_text("old")
    model = image_classifier(position=AbsolutePositionConfig())
    with pytest.raises(OSError, match="disk full"):
        export_onnx(model, tmp_path / "model.onnx")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.slow
def test_an_export_leaves_the_model_as_it_was():
    model = causal(CAUSAL["gpt2"])
    model.head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY), requires_grad=False)
    before = {name: x.requires_grad for name, x in model.named_parameters()}
    export_step(model)
    assert {name: x.requires_grad for name, x in model.named_parameters()} == before
    assert len(set(before.values())) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: export_program(torch.nn.Linear(2, 2)), "model is a Linear, expected one of Image"),
        (
            lambda: export_program("runs/digits"),
            r"model is a str, expected one of .*; pass onescan.load\(path\).model$",
        ),
        (
            lambda: export_onnx(onescan.load("zoo/digits_lightnet"), "a.onnx"),
            "model is a Checkpoint, expected one of .*; pass checkpoint.model$",
        ),
        (
            lambda: export_step(onescan.load("zoo/digits_lightnet")),
            "model is a Checkpoint, expected a CausalLM; pass checkpoint.model$",
        ),
        (lambda: export_program(causal(CAUSAL["lion"]).train()), "model is in training mode"),
        (
            lambda: export_program(causal(CAUSAL["lion"]), extra_inputs=("segments",)),
            "extra_inputs contains 'segments', but this CausalLM takes 'keep'",
        ),
        (
            lambda: export_program(causal(CAUSAL["lion"]), extra_inputs=("mask",)),
            "extra_inputs contains 'mask', but this CausalLM takes 'keep'",
        ),
        (
            lambda: export_program(
                DenoiserConfig(width=24, depth=1).build().eval(), extra_inputs=("keep",)
            ),
            "but this Denoiser takes no extra inputs",
        ),
        (lambda: export_step(image_classifier()), "ImageClassifier"),
        (lambda: initial_state(causal(CAUSAL["lion"]), batch=0), "batch is 0, expected"),
    ],
)
def test_what_cannot_be_exported_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_form_that_fits_one_length_is_refused():
    mixer = LionMixerConfig(num_heads=2, direction="forward", form="full")
    model = causal({"mixer": mixer, "position": None})
    with pytest.raises(ValueError, match=r"mixer.form is 'full', expected 'auto'"):
        export_program(model)
    with pytest.raises(ValueError, match=r"mixer.form is 'full', expected 'auto'"):
        export_step(model, any_length=True)


@pytest.mark.slow
def test_onnx_has_no_joint_positions(tmp_path):
    position = ToeplitzPositionConfig(hidden_states=4, bidirectional=True, joint=True)
    model = image_classifier(mixer=LightNetMixerConfig(num_heads=2), position=position)
    with pytest.raises(ValueError, match=r"position.joint is True, expected False"):
        export_onnx(model, tmp_path / "model.onnx")
    images = torch.randn(2, 1, 8, 18)
    assert_near(export_program(model).module()(images), model(images))


@pytest.mark.slow
def test_onnx_has_no_crank_nicolson(tmp_path):
    mixer = LinearDiffusionMixerConfig(num_heads=2, scheme="crank_nicolson", **NEAR)
    model = image_classifier(mixer=mixer, mlp=None, position=None)
    with pytest.raises(ValueError, match=r"mixer.scheme is 'crank_nicolson', expected 'explicit'"):
        export_onnx(model, tmp_path / "model.onnx")
    images = torch.randn(2, 1, 8, 18)
    assert_near(export_program(model).module()(images), model(images))


class Logcumsumexp(torch.nn.Module):
    def forward(self, x):
        return logcumsumexp(x, 0)


def test_logarithms_of_sums_stay_exact_where_numbers_climb():
    x = torch.randn(7, 4, dtype=torch.float64)
    x[:, :2] += torch.linspace(-2000, 2000, 7).unsqueeze(1)
    torch.testing.assert_close(logcumsumexp(x, 0), x.logcumsumexp(0))
    free = torch.export.export(Logcumsumexp(), (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
    torch.testing.assert_close(free.module()(x[:5]), x[:5].logcumsumexp(0))
    a, b = torch.tensor([1e4, -1e30, 3.0]), torch.tensor([-1e30, -1e30, 3.0])
    torch.testing.assert_close(logaddexp(a, b), torch.logaddexp(a, b))


@pytest.mark.parametrize("size", [1, 5, 8])
def test_a_triangular_system_is_solved_by_blocks(size):
    a, b = torch.randn(2, size, size, dtype=torch.float64), torch.randn(2, size, 3).double()
    kind = {"upper": False, "unitriangular": True}
    want = torch.linalg.solve_triangular(a, b, **kind)
    torch.testing.assert_close(solve_unit_triangular(a, b, **kind), want)
    with pytest.raises(NotImplementedError, match="unit lower triangular"):
        solve_unit_triangular(a, b, upper=True)
