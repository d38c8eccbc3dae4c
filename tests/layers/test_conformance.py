"""`check_mixer` passes for every mixer, and finds a broken promise of every kind."""

import dataclasses
from dataclasses import dataclass
from inspect import unwrap
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from onescan.layers.mixers import (
    LINEAR_TRANSFORMERS,
    MIXERS,
    DeltaRuleMixerConfig,
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
    Mamba2MixerConfig,
    Mixer,
    MixerConfig,
    SoftmaxMixerConfig,
    check_mixer,
    mixer_named,
    mixer_names,
    register_mixer,
)
from onescan.ops import decay_attention

CONFIGS = {
    **{name: config() for name, config in MIXERS.items()},
    **{f"linear {name}": config for name, config in LINEAR_TRANSFORMERS.items()},
    **{
        f"causal {name}": dataclasses.replace(MIXERS[name](), direction="forward")
        for name in ("lightnet", "lion", "kda", "hgrn", "rwkv6", "mamba", "mamba2", "softmax")
    },
    "backward lightnet": LightNetMixerConfig(direction="backward"),
    "lightnet with leak": LightNetMixerConfig(direction="forward", leak=(2.0, 8.0)),
    "backward lion": LionMixerConfig(direction="backward"),
    "lightnet, blocks": LightNetMixerConfig(causal_block=3),
    "lion, blocks": LionMixerConfig(causal_block=3, conv_size=4),
    "delta, natural": DeltaRuleMixerConfig(scan="natural", conv_size="auto"),
    "lion, natural": LionMixerConfig(scan="natural", norm="rms", norm_heads=True, gate="silu"),
    "lightnet, convolution": LightNetMixerConfig(
        direction="forward", conv_size=3, lrpe=False, decay_logits="offset", value_width=2
    ),
    "diffusion, causal": LinearDiffusionMixerConfig(direction="forward"),
    "diffusion, free": LinearDiffusionMixerConfig(kernel="free", separable=True, kernels=None),
    "diffusion, free, causal": LinearDiffusionMixerConfig(kernel="free", direction="forward"),
    "diffusion, dense": LinearDiffusionMixerConfig(
        kernel="dense", kernels=5, tokens=12, linear_attention=False
    ),
    "mamba2, blocks": Mamba2MixerConfig(causal_block=3),
    "mamba2, natural": Mamba2MixerConfig(scan="natural"),
    "window": SoftmaxMixerConfig(direction="forward", window=3),
    "retnet": LionMixerConfig(rotary=True, normalize="none", direction="forward"),
}
ONE_AXIS = ("window", "retnet")


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_mixer_passes(name):
    config = dataclasses.replace(CONFIGS[name], num_heads=2)
    checked = check_mixer(config, axes=1 if name in ONE_AXIS else 2)
    assert "masked tokens are not read" in checked
    assert ("two calls equal one" in checked) == (config.state_block is not None)
    assert ("packed documents are separate" in checked) == ("cu_seqlens" in config.takes)


# A third party's mixer in twelve lines


@dataclass(frozen=True, kw_only=True)
class PlainConfig(MixerConfig):
    state_block: int | None = 1
    sizes: tuple[int, ...] = ()

    def build(self, *, width, axes):
        return Plain(self, width)


class Plain(Mixer):
    def __init__(self, config, width):
        super().__init__()
        self.config, self.in_proj = config, nn.Linear(width, 3 * width, bias=False)

    def forward(self, x, grid, *, keep=None, state=None):
        q, k, v = self.in_proj(x).unflatten(-1, (3, self.config.num_heads, -1)).unbind(2)
        causal = self.config.state_block is not None
        o, state = decay_attention(q, k, v, causal=causal, keep=keep, state=state)
        return o.flatten(2), state if causal else None


def test_a_mixer_of_twelve_lines_passes():
    checked = check_mixer(PlainConfig(num_heads=2))
    assert {"two calls equal one", "no later token is read"} <= set(checked)


def broken(change, state_block=1, **promises):
    """A config like `PlainConfig` whose mixer's forward is changed."""

    class Broken(Plain):
        def forward(self, x, grid, *, keep=None, state=None, **options):
            call = SimpleNamespace(x=x, grid=grid, keep=keep, state=state, options=options)
            return change(lambda **new: Plain.forward(self, **{**plain(call), **new}), call, self)

    def plain(call):
        return {"x": call.x, "grid": call.grid, "keep": call.keep, "state": call.state}

    class BrokenConfig(PlainConfig):
        def build(self, *, width, axes):
            return Broken(self, width)

    for name, value in promises.items():
        setattr(BrokenConfig, name, property(lambda _, value=value: value))
    return BrokenConfig(num_heads=2, state_block=state_block)


def outputs(change):
    """Change the outputs of a call, and leave its state."""

    def run(forward, call, mixer):
        y, state = forward()
        return change(y, call, mixer), state

    return run


FAULTS = {
    "outputs and state are as promised": broken(lambda f, *_: (f()[0], None)),
    "samples do not mix": broken(outputs(lambda y, *_: y - y.mean(dim=0))),
    "gradients are finite": broken(outputs(lambda y, *_: y + (0 * y).abs().sqrt())),
    "masked tokens are not read": broken(
        lambda f, call, _: f(x=call.x + call.x.nan_to_num().sum(dim=1, keepdim=True))
    ),
    "the prefix reads the grid as promised": broken(lambda f, *_: f(), prefix_reads_grid=True),
    "no later token is read": broken(
        outputs(
            lambda y, call, _: (
                (y + y.sum(1, keepdim=True)) * (1 if call.keep is None else call.keep.unsqueeze(-1))
            )
        ),
        prefix_reads_grid=True,
    ),
    "two calls equal one": broken(lambda f, *_: f(state=None)),
    "padding may be anywhere": broken(
        outputs(lambda y, call, _: y * torch.arange(1, 1 + y.shape[1]).view(-1, 1)),
        skips_padding=True,
        state_block=None,
    ),
    "packed documents are separate": broken(
        lambda f, *_: f(), takes=frozenset({"cu_seqlens"}), state_block=None
    ),
}


@pytest.mark.parametrize("promise", FAULTS)
def test_a_broken_promise_is_named(promise):
    with pytest.raises(ValueError, match=f'"{promise}" does not hold: '):
        check_mixer(FAULTS[promise], axes=1)


def overwritten(forward, call, mixer):
    """Return the outputs of a call that writes the new state over the one it continues."""
    y, state = forward()
    if call.state is not None:
        call.state.kv.copy_(state.kv)
    return y, state


def in_place(forward, call, mixer):
    call.x.data.clamp_(-1, 1)
    return forward()


def counted(forward, call, mixer):
    """Scale by the number of tokens seen, but remember those of the last call only."""
    inner, seen = (None, 0) if call.state is None else call.state
    y, state = forward(state=inner)
    return y * (1 + seen), (state, torch.full((len(y),), call.x.shape[1]).double().mean().item())


def without_prefix(forward, call, mixer):
    y, state = forward()
    return y, state if not call.grid.prefix else state._replace(kv=torch.zeros_like(state.kv))


SUBTLE = {
    "a sample reads the one before": (
        "samples do not mix",
        broken(outputs(lambda y, *_: y.cumsum(0))),
    ),
    "float64 outputs": (
        "outputs have the dtype of inputs",
        broken(outputs(lambda y, *_: y * torch.ones(1, dtype=torch.float64))),
    ),
    "a changed input": ("outputs and state are as promised", broken(in_place)),
    "a changed state": ("two calls equal one", broken(overwritten)),
    "a mask that is forgotten with a state": (
        "two calls equal one",
        broken(lambda f, call, _: f(keep=call.keep if call.state is None else None)),
    ),
    "a list as a state": ("the state keeps its size", broken(lambda f, call, _: as_list(f, call))),
    "NaN for a row without tokens": (
        "masked tokens are not read",
        broken(
            outputs(
                lambda y, call, _: (
                    y if call.keep is None else y / call.keep.sum(1).view(-1, 1, 1).double()
                )
            )
        ),
    ),
    "a state that counts only the last call": ("two calls equal one", broken(counted)),
    "a state without the prefix": ("a state remembers the prefix", broken(without_prefix)),
    "a list in place of a tuple": (
        "the config can be saved and loaded",
        PlainConfig(num_heads=2, sizes=[1]),
    ),
}


def as_list(forward, call):
    y, state = forward(state=None if call.state is None else call.state[0])
    return y, [state]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", SUBTLE)
def test_a_subtle_fault_is_found(fault):
    promise, config = SUBTLE[fault]
    with pytest.raises(ValueError, match=f'"{promise}" does not hold: '):
        check_mixer(config, axes=1)


class Ours(PlainConfig):
    def build(self, *, width, axes):
        return Normalizing(self, width)


class Normalizing(Plain):
    """A mixer that is right: it normalizes its input, and has a parameter that is frozen."""

    def __init__(self, config, width):
        super().__init__(config, width)
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x, grid, **options):
        return super().forward(
            nn.functional.layer_norm(x, x.shape[-1:]) * self.frozen, grid, **options
        )


@pytest.mark.sampled
@pytest.mark.parametrize(
    "config",
    [
        Ours(num_heads=2),
        Ours(num_heads=2, state_block=None),
        LightNetMixerConfig(num_heads=2, causal_block=4),
        LionMixerConfig(num_heads=2, causal_block=5),
    ],
)
@pytest.mark.parametrize("axes", [1, 3])
def test_right_mixers_are_not_refused(config, axes):
    check_mixer(config, axes=axes)


def test_weights_that_are_not_saved_and_growing_states_are_found():
    class Hidden(Plain):
        def __init__(self, config, width):
            super().__init__(config, width)
            self.scale = torch.rand(())

        def forward(self, x, grid, **options):
            y, state = super().forward(x, grid, **options)
            return y * self.scale, state

    class HiddenConfig(PlainConfig):
        def build(self, *, width, axes):
            return Hidden(self, width)

    with pytest.raises(ValueError, match='"weights can be saved and loaded" does not hold'):
        check_mixer(HiddenConfig(num_heads=2))

    class GrowingConfig(SoftmaxMixerConfig):
        state_grows = False

    with pytest.raises(
        ValueError, match='"the state keeps its size" does not hold: the state grows'
    ):
        check_mixer(GrowingConfig(num_heads=2, direction="forward"))


def test_other_objects_are_refused():
    with pytest.raises(ValueError, match="config is a str, expected a MixerConfig"):
        unwrap(check_mixer)("lion_s")
    with pytest.raises(ValueError, match="config is the class PlainConfig, expected an instance"):
        unwrap(register_mixer)("plain", PlainConfig)

    class Undecorated(PlainConfig):
        rank: int = 3

    with pytest.raises(ValueError, match=r"^Undecorated declares options, but is not a dataclass"):
        check_mixer(Undecorated())

    class Empty(PlainConfig):
        def build(self, *, width, axes):
            return nn.Linear(width, width)

    with pytest.raises(ValueError, match="build returned a Linear, expected a Mixer"):
        check_mixer(Empty())


def test_registered_mixers_have_names():
    register_mixer("plain_for_a_test", PlainConfig(num_heads=2))
    assert mixer_named("plain_for_a_test") == PlainConfig(num_heads=2)
    register_mixer("plain_for_a_test", PlainConfig(num_heads=3))  # after an edit
    assert mixer_named("plain_for_a_test") == PlainConfig(num_heads=3)
    assert "plain_for_a_test" in mixer_names()
    with pytest.raises(ValueError, match="name is 'lion_s', which belongs to a built-in mixer"):
        register_mixer("lion_s", PlainConfig())
    with pytest.raises(ValueError, match="name is 'a b', expected letters, digits and underscores"):
        register_mixer("a b", PlainConfig())
    with pytest.raises(
        ValueError, match=r"name is 'x_hybrid', expected .* not ending in '_hybrid'"
    ):
        register_mixer("x_hybrid", PlainConfig())
    with pytest.raises(ValueError, match="config is a Plain, expected a MixerConfig"):
        unwrap(register_mixer)("x", Plain(PlainConfig(), 24))
    with pytest.raises(ValueError, match="name 'lion' is unknown"):
        mixer_named("lion")
