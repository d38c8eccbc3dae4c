"""The mixer of docs/howto/own_mixer.md is trained by name, loaded, continued and exported."""

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import onescan
from onescan.cli import main
from onescan.experiments.recipes import find_recipe
from onescan.experiments.recipes.files import import_file
from onescan.experiments.recipes.mixers import with_mixer
from onescan.integrations.export import export_program, export_step, initial_state
from onescan.layers.mixers import MixerConfig, registry
from onescan.models.causal_lm import CausalLMConfig, Sampling
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.token_network import flatten_state

PAGE = Path(__file__).parents[3] / "docs/howto/own_mixer.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
FILE = BLOCKS[0]
CAUSAL = next(block for block in BLOCKS if "class CausalPlain(" in block)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_MIXERS", dict(registry._MIXERS))
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "my_own_mixer.py"
    path.write_text(
        f"{FILE}\n{CAUSAL}\nregister_mixer('causal_plain', CausalPlainConfig())\n", "utf-8"
    )
    yield path
    sys.modules.pop("my_own_mixer", None)


@pytest.mark.slow
@pytest.mark.usefixtures("_unchecked")
def test_a_recipe_trains_it_by_name_and_the_run_is_loaded_and_exported(file, tmp_path):
    out = tmp_path / "run"
    small = ["--model.width", "16", "--model.depth", "1", "--model.mixer.num-heads", "2"]
    steps = ["--training.epochs", "1", "--training.batch-size", "512", "--machine.device", "cpu"]
    name = ["digits", "--import", str(file), "--model.mixer", "plain", *small, *steps]
    assert main(["train", *name, "--out", str(out)]) == 0
    model = onescan.load(out / "seed-0").model.eval()
    assert type(model.blocks[0].mixer).__name__ == "PlainMixer"
    images = torch.randn(3, 1, 8, 8)
    got = export_program(model).module()(images)
    torch.testing.assert_close(got, model(images), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("_unchecked")
def test_a_causal_one_generates_streams_and_is_exported_as_a_step(file):
    config = import_file(str(file)).CausalPlainConfig(num_heads=2)
    lm = CausalLMConfig(vocab_size=11, width=24, depth=2, mixer=config).build().eval()
    tokens = torch.randint(11, (2, 5))
    want = lm(tokens)[0]
    _, state = lm(tokens[:, :3])
    torch.testing.assert_close(lm(tokens[:, 3:], state)[0], want[:, 3:])
    generated = lm.generate(tokens, Sampling(), max_new_tokens=3)
    assert torch.equal(generated[:, 0], want[:, -1].argmax(dim=-1))
    step, flat = export_step(lm).module(), initial_state(lm, 2)
    for t in range(5):
        logits, flat = step(tokens[:, t : t + 1], flat)
        torch.testing.assert_close(logits[:, 0], want[:, t], atol=1e-5, rtol=1e-5)
    assert flat.keys() == flatten_state(state).keys()

    video = ImageClassifierConfig(
        image_size=(4, 8, 8), patch_size=(1, 4, 4), channels=1, width=24, depth=2, pool="mean",
        mixer=config, position=None, num_classes=3,
    ).build().eval()  # fmt: skip
    frames, state, parts = torch.randn(1, 1, 4, 8, 8), None, []
    for frame in frames.split(1, dim=2):
        part, state = video.stream(frame, state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), video.forward_features(frames))


@dataclass(frozen=True, kw_only=True)
class OneWayConfig(MixerConfig):
    """A causal mixer without a setting for its direction."""

    state_block: int | None = 1

    def build(self, *, width, axes):
        raise NotImplementedError


def test_a_mixer_in_place_of_a_causal_one_is_causal():
    run = find_recipe("shakespeare_lightnet")()
    own = replace(run, model=replace(run.model, mixer=OneWayConfig(num_heads=4)))
    for name in ("lion_s", "softmax", "lightnet", "kda"):
        assert with_mixer(own, name).model.mixer.is_causal
