"""Decoding steps that a CUDA graph can replay: without one, up to its capture."""

import dataclasses

import pytest
import torch
from kernel_device import GPU, MARKS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from onescan import use_backend
from onescan.layers.decays import GLADecayConfig
from onescan.layers.mixers import (
    DeltaRuleMixerConfig,
    KDAMixerConfig,
    LightNetMixerConfig,
    LionMixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import ToeplitzPositionConfig, TokenPositionConfig
from onescan.models import decoding_graph
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.decoding_graph import DecodingGraph
from onescan.models.token_network import as_buffers, map_tensors

pytestmark = MARKS

LIGHTNET = LightNetMixerConfig(num_heads=2, direction="forward")
MIXERS = {
    "lightnet": LIGHTNET,
    "lightnet, separate decay": dataclasses.replace(LIGHTNET, decay_logits="offset", conv_size=3),
    "lion_s": LionMixerConfig(num_heads=2, direction="forward"),
    "gla, rotary": LionMixerConfig(
        num_heads=2, direction="forward", normalize="none", rotary=True, decay=GLADecayConfig()
    ),
    "delta_rule": DeltaRuleMixerConfig(num_heads=2, direction="forward"),
    "kda": KDAMixerConfig(num_heads=2, direction="forward", gate_rank=4),
}


def build(mixer, position=None):
    torch.manual_seed(0)
    config = CausalLMConfig(vocab_size=11, width=24, depth=2, mixer=mixer, position=position)
    return config.build().eval()


@pytest.fixture
def replayed(monkeypatch):
    """Without a GPU, a replay runs the step again."""
    monkeypatch.setattr(decoding_graph, "capture", lambda step, warm_up, device: step)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("position", [ToeplitzPositionConfig(), TokenPositionConfig()], ids=str)
@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_a_graph_generates_the_same_tokens(mixer, position, replayed):
    model = build(mixer, position)
    prompt = torch.randint(11, (3, 4))
    expected = [token.tolist() for token, _ in model.stream(prompt, max_new_tokens=6)]
    state = model(prompt)[1]
    before = map_tensors(torch.clone, state)
    graph = DecodingGraph(model, prompt[:, :1], state)
    steps = model.stream(prompt, max_new_tokens=6, cuda_graph=True)
    assert [token.tolist() for token, _ in steps] == expected
    logits = graph(prompt[:, :1])[0]
    torch.testing.assert_close(logits, model(prompt[:, :1], state)[0])
    torch.testing.assert_close(state, before, rtol=0, atol=0)


class Operators(TorchDispatchMode):
    """Names of operators, shapes and strides of tensors, and all other arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def described(x):
            return (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x

        self.calls.append((str(func), tree_map(described, (args, kwargs))))
        return func(*args, **(kwargs or {}))


def operators_at(model, position):
    """The operators of a step after so many tokens."""
    with torch.no_grad():
        token = torch.zeros(2, 1, dtype=torch.long)
        state = as_buffers(model(token)[1], token.device)
        state = map_tensors(lambda x: x if x.ndim else torch.full_like(x, position), state)
        with Operators() as operators:
            model(token, state)
    return operators.calls


@pytest.mark.sampled(2)
@pytest.mark.skipif(GPU, reason="kernels are not interpreted on a GPU")
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_operators_do_not_depend_on_the_position(mixer, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    model = build(mixer, ToeplitzPositionConfig())
    with use_backend(backend):
        early, late = (operators_at(model, position) for position in (1, 70_000))
    assert early == late


def test_growing_states_are_refused(replayed):
    model = build(SoftmaxMixerConfig(num_heads=2, direction="forward"))
    prompt = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"state grows with the text: blocks\.0"):
        model.generate(prompt, max_new_tokens=2, cuda_graph=True)


@pytest.mark.skipif(GPU, reason="the model is not on the GPU")
def test_a_cpu_has_no_graphs():
    with pytest.raises(ValueError, match="cuda_graph is True with a model on cpu, expected a GPU"):
        build(LIGHTNET).generate(
            torch.zeros(1, 2, dtype=torch.long), max_new_tokens=2, cuda_graph=True
        )


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_a_captured_graph_generates_the_same_tokens(mixer, backend):
    model = build(mixer, ToeplitzPositionConfig()).cuda()
    prompt = torch.randint(11, (3, 4), device="cuda")
    with use_backend(backend):
        expected = model.generate(prompt, max_new_tokens=20)
        found = model.generate(prompt, max_new_tokens=20, cuda_graph=True)
    assert torch.equal(found, expected)
