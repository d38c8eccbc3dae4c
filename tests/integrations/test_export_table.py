"""The table in docs/howto/export.md: every kind of model, exported and run at other sizes.

Models have the fields of the presets, chunk sizes included, but one block and few channels.
"""

import json
import re
from pathlib import Path

import jaxtyping
import numpy as np
import onnxruntime
import pytest
import torch

from onescan.configs import replace
from onescan.integrations.export import (
    export_onnx,
    export_onnx_step,
    export_program,
    export_step,
    initial_state,
)
from onescan.layers.mixers import HybridMixerConfig, LightNetMixerConfig, MambaMixerConfig
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.denoiser import Denoiser
from onescan.models.dense_predictor import DensePredictorConfig
from onescan.models.presets import PRESETS
from onescan.models.sequence_decoder import SequenceDecoder, SequenceDecoderConfig

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "export.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
ROWS = {name: tuple(map(str.strip, rest)) for name, *rest in ROW.findall(PAGE)}
EQUAL, NONE = "equal", "-"
VOCABULARY, WIDTH = 50, 32
TOLERANCE = 1e-5  # of the largest output
LENGTHS = ((1, 1), (3, 65), (2, 200))  # batch size and tokens; chunks have 64
PATCHES = ((1, (2, 9, 4)), (3, (5, 3, 2)), (2, (4, 7, 9)))  # batch size and patches per side
# An export takes up to a minute. The fast tests have the cheapest model of each kind, the slow ones
# one of each mixer, and `make compile` the others.
FAST = ("deit_tiny", "dit_s_8", "gpt2_small", "bert_base")
SLOW = (
    "lightnet_tiny", "hgrn_tiny", "lion_s_tiny", "lion_s_natural_tiny", "lion_lit_tiny", "ldn_base",
    "gated_deltanet_tiny", "hydra_small", "vision_rwkv_tiny", "vim_tiny", "lightnet_dit_s_8",
    "lightnet_hybrid_tiny", "lightnet_lm_45m", "kda_lm_47m", "mamba2_lm_1300m",
    "lion_s_mlm_base", "dense_predictor", "sequence_decoder",
)  # fmt: skip


def over(names):
    marks = dict.fromkeys(SLOW, pytest.mark.slow) | dict.fromkeys(FAST, ())
    return pytest.mark.parametrize(
        "name",
        [pytest.param(name, marks=marks.get(name, pytest.mark.compile)) for name in names],
    )


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


def small(name):
    """The preset with one block (two in hybrids) and few channels."""
    if name.startswith("dense_predictor"):
        sizes = {"image_size": (12, 12), "patch_size": (4, 4), "channels": 1, "out_channels": 2}
        mixer = LightNetMixerConfig(num_heads=2)
        decoder = "linear" if name.endswith("linear") else "pyramid"
        return (
            DensePredictorConfig(**sizes, width=WIDTH, depth=2, mixer=mixer, decoder=decoder)
            .build()
            .eval()
        )
    if name == "sequence_decoder":
        return SequenceDecoderConfig(vocab_size=VOCABULARY, width=24, depth=1).build().eval()
    config = PRESETS[name].config
    changes = {"width": WIDTH, "depth": 1, "init_std": 0.1}
    if isinstance(config.mixer, HybridMixerConfig):
        changes |= {"depth": 2, "mixer.period": 2}
    if not isinstance(config.mixer, MambaMixerConfig):
        changes["mixer.num_heads"] = 2
    if hasattr(config, "vocab_size"):
        changes["vocab_size"] = VOCABULARY
    else:
        changes |= {"num_classes": 5, "image_size": tuple(3 * n for n in config.patch_size)}
    return replace(config, changes).build().eval()


def masks(batch, *sides, patch=None):
    """True for the real values of each sample: a box of whole patches at the beginning."""
    keep = torch.zeros(batch, *sides, dtype=torch.bool)
    steps = patch or (1,) * len(sides)
    for row in keep:
        box = [
            slice(step * int(torch.randint(1, side // step + 1, ())))
            for side, step in zip(sides, steps, strict=True)
        ]
        row[tuple(box)] = True
    return keep


def inputs_of(model, sizes, *, masked):
    """Named inputs of one size."""
    batch, size = sizes
    config = model.config
    if isinstance(model, SequenceDecoder):
        memory = torch.randn(batch, 2 * size + 1, config.width)
        return {
            "tokens": torch.randint(VOCABULARY, (batch, size)),
            "memory": memory,
            "memory_mask": masks(batch, 2 * size + 1),
        }
    if hasattr(config, "vocab_size"):
        tokens = {"tokens": torch.randint(VOCABULARY, (batch, size))}
        return tokens | ({"keep": masks(batch, size)} if masked else {})
    sides = [n * p for n, p in zip(size[-len(config.patch_size) :], config.patch_size, strict=True)]
    if size == config.image_size:
        sides = size
    images = torch.randn(batch, config.channels, *sides)
    if isinstance(model, Denoiser):
        labels = torch.randint(config.num_classes + 1, (batch,))
        return {"noisy": images, "timesteps": 1000 * torch.rand(batch), "labels": labels}
    return {"images": images} | (
        {"keep": masks(batch, *sides, patch=config.patch_size)} if masked else {}
    )


def sizes_of(model, free):
    if hasattr(model.config, "vocab_size"):
        return LENGTHS
    return PATCHES if free else [(batch, model.config.image_size) for batch, _ in PATCHES]


def assert_near(got, want):
    scale = want.abs().max().item()
    torch.testing.assert_close(torch.as_tensor(got), want, rtol=0, atol=TOLERANCE * scale)


def output(model, named):
    result = model(**named)
    return result[0] if isinstance(result, tuple) else result


def check(model, run, free, masked):
    for sizes in sizes_of(model, free):
        named = inputs_of(model, sizes, masked=masked)
        want, got = output(model, named), torch.as_tensor(run(named))
        keep = named.get("keep")
        if keep is not None and keep.shape == want.shape[:2]:  # logits of padding may be anything
            want, got = want[keep], got[keep]
        assert_near(got, want)


@over(ROWS)
def test_programs_and_onnx_files_equal_the_model_at_other_sizes(name, tmp_path):
    sizes, mask, outcome, _ = ROWS[name]
    assert outcome == EQUAL
    assert sizes in ("any", "fixed")
    model = small(name)
    extra = () if mask == NONE else (mask.strip("`"),)
    program = export_program(model, extra_inputs=extra).module()
    check(model, lambda named: program(*named.values()), sizes == "any", bool(extra))
    export_onnx(model, tmp_path / "model.onnx", extra_inputs=extra)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")

    def run(named):
        return session.run(None, {key: value.numpy() for key, value in named.items()})[0]

    check(model, run, sizes == "any", bool(extra))


@over(name for name, row in ROWS.items() if row[3] == EQUAL)
def test_onnx_steps_equal_the_model(name, tmp_path):
    model = small(name)
    program, state = export_step(model).module(), initial_state(model, batch=2)
    export_onnx_step(model, tmp_path / "step.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "step.onnx")
    first = json.loads(session.get_modelmeta().custom_metadata_map["initial_state"])
    named = {
        part: np.full([2 if n == "batch" else n for n in it["shape"]], it["value"], it["type"])
        for part, it in first.items()
    }
    tokens, parts, files = torch.randint(VOCABULARY, (2, 70)), [], []
    for token in tokens.split(1, dim=1):
        logits, state = program(token, state)
        parts.append(logits)
        logits, *after = session.run(None, {"tokens": token.numpy(), **named})
        named = dict(zip(named, after, strict=True))
        files.append(torch.as_tensor(logits))
    want = model(tokens)[0]
    for got in (parts, files):
        assert_near(torch.cat(got, dim=1), want)


def test_the_table_contains_every_family():
    def family(config):
        return type(config), type(config.mixer), getattr(config.mixer, "decay", None)

    shown = {family(PRESETS[name].config) for name in ROWS if name in PRESETS}
    assert not {name for name, known in PRESETS.items() if family(known.config) not in shown}
    for name, row in ROWS.items():
        is_causal = isinstance(PRESETS[name].config, CausalLMConfig) if name in PRESETS else False
        assert (row[3] == EQUAL) == is_causal
