"""Mixers over several ranks: outputs, states and gradients of one process."""

import math

import pytest
import torch
import torch.distributed as dist
from ranks import assert_same_over_ranks, run_ranks, split
from torch.func import functional_call

from onescan.configs import replace
from onescan.layers.decays import (
    FixedDecayConfig,
    HGRN2DecayConfig,
    NoDecayConfig,
    XLSTMDecayConfig,
)
from onescan.layers.mixers import (
    LINEAR_TRANSFORMERS,
    DeltaProductMixerConfig,
    DeltaRuleMixerConfig,
    GatedDeltaNetMixerConfig,
    HGRNMixerConfig,
    HydraMixerConfig,
    KDAMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
    MambaMixerConfig,
    RWKV6MixerConfig,
    SoftmaxMixerConfig,
    VisionRWKVMixerConfig,
)
from onescan.ops.parallel import SequenceGroup, sequence_parallel
from onescan.shapes import Grid

B, T, WIDTH, HEADS = 2, 13, 8, 2
SMALL = {"num_heads": HEADS, "chunk_size": 4}

LION = LionMixerConfig(**SMALL)
RETENTION = LionMixerConfig(
    **SMALL, feature_map="identity", decay=FixedDecayConfig(), normalize="none",
    norm="rms", norm_heads=True, gate="silu", rotary=True,
)  # fmt: skip
DIFFUSION = LinearDiffusionMixerConfig(num_heads=HEADS, kernels=2, sigmas=(0.5, 1.0), max_sigma=1.5)
DELTA = DeltaRuleMixerConfig(**SMALL, conv_size="auto", gate="silu")
DELTAS = {
    "delta rule": DELTA,
    "gated": GatedDeltaNetMixerConfig(**SMALL),
    "kda": KDAMixerConfig(**SMALL, gate_rank=4),
    "product": DeltaProductMixerConfig(**SMALL),
}


def directed(**configs):
    """Return each config in all directions."""
    return {
        f"{name}, {direction}": replace(config, {"direction": direction})
        for name, config in configs.items()
        for direction in ("both", "forward", "backward")
    }


# mixers on tokens [T], and on grids of T rows
MIXERS = {
    "lion": directed(
        lion=LION,
        convolution=replace(LION, {"conv_size": 3, "conv_bias": True}),
        retention=RETENTION,
    )
    | {
        "sum before mask": replace(LION, {"normalize": "sum_before_mask"}),
        "max one": replace(LION, {"normalize": "max_one", "decay": XLSTMDecayConfig()}),
        "keys": replace(LION, {"decay": HGRN2DecayConfig(), "normalize": "none"}),
        "symmetric": replace(LION, {"decay_at": "symmetric"}),
        "mamba": replace(LINEAR_TRANSFORMERS["mamba"], {"state_size": 3}),
        "kernel of one": replace(LION, {"conv_size": 1}),
    },
    "delta": directed(**DELTAS),
    "recurrent": directed(
        hgrn=HGRNMixerConfig(**SMALL),
        rwkv6=RWKV6MixerConfig(**SMALL, shift_rank=3, decay_rank=3),
        mamba=MambaMixerConfig(state_size=3),
    )
    | {
        "hydra": HydraMixerConfig(**SMALL, state_size=3),
        "hydra, shared": HydraMixerConfig(**SMALL, state_size=3, shared_keys=True, conv_size=3),
        "spatial": VisionRWKVMixerConfig(**SMALL),
    },
    "softmax": {
        f"softmax, window {window}, causal {causal}": SoftmaxMixerConfig(
            num_heads=HEADS, causal=causal, window=window, rotary=causal or window == 3
        )
        for window in (None, 3, 40)
        for causal in (False, True)
    },
    "diffusion": {
        "both": DIFFUSION,
        "causal": replace(DIFFUSION, {"causal": True, "norm": "rms"}),
        "embedding": replace(DIFFUSION, {"input_residual": True, "form": "banded"}),
        "no attention": replace(DIFFUSION, {"linear_attention": False}),
        "no diffusion": replace(DIFFUSION, {"diffusion": False, "causal": True}),
    },
}
GRIDS = {
    "lion": directed(
        natural=replace(LION, {"scan": "natural"}),
        convolution=replace(LION, {"scan": "natural", "conv_size": 3}),
    )
    | {
        "fixed": replace(LION, {"scan": "natural", "decay": FixedDecayConfig()}),
        "no decay": replace(LION, {"scan": "natural", "decay": NoDecayConfig()}),
        "keys": replace(
            LION, {"scan": "natural", "decay": HGRN2DecayConfig(), "normalize": "none"}
        ),
        "flat": LION,
    },
    "delta": directed(natural=replace(DELTA, {"scan": "natural"})),
    "recurrent": {
        "spatial": VisionRWKVMixerConfig(**SMALL),
        "channel": VisionRWKVMixerConfig(**SMALL, part="channel"),
        "vim": MambaMixerConfig(state_size=3, prefix_position="middle"),
        "hydra": HydraMixerConfig(**SMALL, state_size=3),
    },
    "softmax": {"softmax": SoftmaxMixerConfig(num_heads=HEADS)},
    "diffusion": {"flat": DIFFUSION, "separable": replace(DIFFUSION, {"separable": True})},
}


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def tensors_of(state):
    """Return all tensors and numbers in a state, in float64."""
    if state is None:
        return []
    if isinstance(state, tuple):
        return [x for part in state for x in tensors_of(part)]
    return [torch.as_tensor(state).double()]


def check_mixer(config, shape, group, *, prefix=0, masks=False, continues=False):
    mixer = config.build(width=WIDTH, axes=len(shape)).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    columns, size = math.prod(shape[1:]), group.size()

    def op(x, group, keep=None, past=None, **parameters):
        def call(x, **options):
            is_first = group is None or dist.get_rank(group) == 0
            own = prefix if is_first else 0
            grid = Grid(((x.shape[1] - own) // columns, *shape[1:]), own)
            return functional_call(mixer, parameters, (x, grid), options)

        options = {} if past is None else {"state": call(past)[1]}
        ranks = group
        if size == 3 and group is not None:
            ranks = SequenceGroup(group, SequenceGroup(group).lengths(x))
        with sequence_parallel(ranks):
            y, state = call(x, keep=keep, **options)
        return y, tensors_of(state)

    tokens, shared = {"x": rand(B, prefix + T * columns, WIDTH)}, dict(mixer.named_parameters())
    if masks:
        tokens["keep"] = torch.rand(B, prefix + T * columns) > 0.3
    if continues:
        shared["past"] = rand(B, 5, WIDTH)
    options = {"per_position": columns, "prefix": prefix}
    assert_same_over_ranks(op, tokens, shared, split(T, size), group, **options)


@pytest.fixture
def over_ranks(tmp_path):
    """Run a check in groups of 2, 3 and 4 processes."""
    return lambda check: run_ranks(4, check, tmp_path)


@pytest.mark.parametrize("family", MIXERS)
def test_tokens(over_ranks, family):
    def check(group):
        for name, config in MIXERS[family].items():
            try:
                continues = config.is_causal and group.size() != 2
                options = {"masks": group.size() > 2, "continues": continues}
                check_mixer(config, (T,), group, prefix=0 if continues else 2, **options)
            except BaseException as error:
                error.add_note(name)
                raise

    over_ranks(check)


@pytest.mark.parametrize("family", GRIDS)
def test_grids(over_ranks, family):
    def check(group):
        for name, config in GRIDS[family].items():
            try:
                shape = (T, 3) if group.size() < 4 else (T, 2, 3)
                check_mixer(config, shape, group, prefix=group.size() % 2, masks=group.size() > 2)
            except BaseException as error:
                error.add_note(name)
                raise

    over_ranks(check)
