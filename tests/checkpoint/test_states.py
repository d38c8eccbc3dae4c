"""States in files: what is read goes on as what was written, and nothing else is taken."""

import dataclasses
from inspect import unwrap

import pytest
import torch

from onescan.checkpoint.generation_state import load_generation_state, save_generation_state
from onescan.checkpoint.weights import save_weights
from onescan.layers.mixers import LightNetMixerConfig, SoftmaxMixerConfig
from onescan.layers.position import ToeplitzPositionConfig, TokenPositionConfig
from onescan.models.causal_lm import CausalLMConfig

LIGHTNET = CausalLMConfig(
    vocab_size=13,
    width=24,
    depth=2,
    mixer=LightNetMixerConfig(num_heads=3, direction="forward"),
    position=ToeplitzPositionConfig(hidden_states=4),
)
SOFTMAX = dataclasses.replace(
    LIGHTNET,
    mixer=SoftmaxMixerConfig(num_heads=3, direction="forward"),
    position=TokenPositionConfig(max_tokens=20),
)


def ids(*shape):
    return torch.randint(13, shape)


@pytest.mark.parametrize("config", [LIGHTNET, SOFTMAX], ids=["lightnet", "softmax"])
def test_a_text_goes_on_from_a_file_to_the_last_bit(config, tmp_path):
    model = config.build().eval()
    _, state = model(ids(3, 7))
    save_generation_state(tmp_path / "a.safetensors", state, model)
    again = load_generation_state(tmp_path / "a.safetensors", model)
    more = ids(3, 4)
    assert torch.equal(model(more, again)[0], model(more, state)[0])


def test_a_newer_state_takes_the_place_of_an_older(tmp_path):
    model, path = LIGHTNET.build().eval(), tmp_path / "a.safetensors"
    states = [model(ids(1, n))[1] for n in (3, 5)]
    for state in states:
        save_generation_state(path, state, model)
    assert load_generation_state(path, model).blocks[0].position == 5
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_what_is_no_state_of_the_model_is_refused(tmp_path):
    model, path = LIGHTNET.build().eval(), tmp_path / "a.safetensors"
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_generation_state(path, model)
    save_generation_state(path, model(ids(1, 3))[1], model)
    other = dataclasses.replace(LIGHTNET, depth=3).build()
    with pytest.raises(
        ValueError, match="does not match the model: depth is 2 in the file and 3 in the model"
    ):
        load_generation_state(path, other)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is damaged"):
        load_generation_state(path, model)
    for notes in ({}, {"model": 3}, {"model": [1]}):
        save_weights(path, {"x": torch.ones(1)}, notes)
        with pytest.raises(ValueError, match="holds no generation state"):
            load_generation_state(path, model)
    save_weights(path, {"x": torch.ones(1)}, {"model": {"depth": {"a": 1}}})
    with pytest.raises(ValueError, match="depth is"):
        load_generation_state(path, model)
    _, state = model(ids(1, 3))
    save_generation_state(path, state._replace(position=None), model)
    with pytest.raises(ValueError, match=r"the model: position\.hidden is missing"):
        load_generation_state(path, model)


def test_swapped_arguments_are_named(tmp_path):
    model, path = LIGHTNET.build().eval(), tmp_path / "a.safetensors"
    state = model(ids(1, 3))[1]
    save = unwrap(save_generation_state)  # the tests check types
    with pytest.raises(ValueError, match="path is a CausalLM, expected a str or Path"):
        save(model, state, path)
    with pytest.raises(ValueError, match="model is a NetworkState, expected a CausalLM"):
        save(path, model, state)
