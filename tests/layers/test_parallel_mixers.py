"""Mixers over several ranks have the outputs, states and gradients of a single process."""

import math

import pytest
import torch
import torch.distributed as dist
from communication import Communication
from ranks import assert_same_over_ranks, run_ranks, split
from torch.func import functional_call

from onescan.configs import replace
from onescan.layers.decays import (
    FixedDecayConfig,
    HGRN2DecayConfig,
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
    Mamba2MixerConfig,
    MambaMixerConfig,
    RWKV6MixerConfig,
    SoftmaxMixerConfig,
    VisionRWKVMixerConfig,
)
from onescan.ops.packing import Packing, PackingShard
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
KDA = KDAMixerConfig(**SMALL, gate_rank=4)
NATURAL = replace(LION, {"scan": "natural"})


def directed(*directions, **configs):
    """Return each config in these directions."""
    return {
        f"{name}, {direction}": replace(config, {"direction": direction})
        for name, config in configs.items()
        for direction in directions
    }


# mixers on tokens [T], and on grids of T rows
MIXERS = {
    "lion": directed("both", "forward", "backward", lion=LION)
    | directed("both", "backward", convolution=replace(LION, {"conv_size": 3, "conv_bias": True}))
    | directed("forward", "backward", retention=RETENTION)
    | {
        "sum before mask": replace(LION, {"normalize": "sum_before_mask"}),
        "max one": replace(LION, {"normalize": "max_one", "decay": XLSTMDecayConfig()}),
        "keys": replace(LION, {"decay": HGRN2DecayConfig(), "normalize": "none"}),
        "mamba": replace(LINEAR_TRANSFORMERS["mamba"], {"state_size": 3}),
        "kernel of one": replace(LION, {"conv_size": 1}),
    },
    "delta": {
        "delta rule": DELTA,
        "gated": GatedDeltaNetMixerConfig(**SMALL, direction="forward"),
        "kda": replace(KDA, {"direction": "backward"}),
        "product": DeltaProductMixerConfig(**SMALL, direction="forward"),
    },
    "recurrent": directed(
        "both",
        "forward",
        hgrn=HGRNMixerConfig(**SMALL),
        mamba=MambaMixerConfig(state_size=3),
        mamba2=Mamba2MixerConfig(**SMALL, key_width=3),
    )
    | directed(
        "both",
        "forward",
        "backward",
        rwkv6=RWKV6MixerConfig(**SMALL, shift_rank=3, decay_rank=3),
    )
    | {
        "hydra": HydraMixerConfig(**SMALL, state_size=3),
        "spatial": VisionRWKVMixerConfig(**SMALL),
    },
    "softmax": {
        f"softmax, window {window}, causal {causal}": SoftmaxMixerConfig(
            num_heads=HEADS,
            direction="forward" if causal else "both",
            window=window,
            rotary=causal or window == 3,
        )
        for window in (None, 3, 40)
        for causal in (False, True)
    },
    "diffusion": {
        "both": DIFFUSION,
        "causal": replace(DIFFUSION, {"direction": "forward", "norm": "rms"}),
        "embedding": replace(DIFFUSION, {"input_residual": True, "linear_attention": False}),
        "no diffusion": replace(DIFFUSION, {"diffusion": False, "direction": "forward"}),
        "free": replace(DIFFUSION, {"kernel": "free", "direction": "forward"}),
    },
}
GRIDS = {
    "lion": directed("both", "backward", natural=NATURAL)
    | {
        "convolution": replace(NATURAL, {"conv_size": 3, "direction": "backward"}),
        "fixed": replace(NATURAL, {"decay": FixedDecayConfig()}),
        "keys": replace(NATURAL, {"decay": HGRN2DecayConfig(), "normalize": "none"}),
        "flat": LION,
    },
    "delta": directed("both", "forward", natural=replace(DELTA, {"scan": "natural"})),
    "recurrent": {
        "spatial": VisionRWKVMixerConfig(**SMALL),
        "channel": VisionRWKVMixerConfig(**SMALL, part="channel"),
        "vim": MambaMixerConfig(state_size=3, prefix_position="middle"),
    },
    "softmax": {"softmax": SoftmaxMixerConfig(num_heads=HEADS)},
    "diffusion": {
        "flat": DIFFUSION,
        "separable": replace(DIFFUSION, {"separable": True}),
        "free": replace(DIFFUSION, {"separable": True, "kernel": "free"}),
    },
}


# Offsets of two rows of T tokens: sequences on one rank or several, ends where ranks end.
OFFSETS = torch.tensor([0, 1, 1, 3, 8, T, T + 6, T + 7, 2 * T], dtype=torch.int32)
PACKED = {
    "lion": LION,
    "lion, forward": replace(LION, {"direction": "forward", "normalize": "max_one"}),
    "delta": replace(DELTA, {"conv_size": None}),
    "kda, forward": replace(KDA, {"conv_size": None, "direction": "forward"}),
    "diffusion": DIFFUSION,
    "diffusion, free": replace(DIFFUSION, {"kernel": "free"}),
    "window": MIXERS["softmax"]["softmax, window 3, causal False"],
    "window, causal": MIXERS["softmax"]["softmax, window 3, causal True"],
}
CONSTANT_TRAFFIC = (
    MIXERS["lion"]["convolution, both"],
    MIXERS["delta"]["gated"],
    *(MIXERS["recurrent"][f"{name}, both"] for name in ("hgrn", "rwkv6", "mamba")),
    MIXERS["recurrent"]["hydra"],
    MIXERS["softmax"]["softmax, window 3, causal True"],
)


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def tensors_of(state):
    """Return all tensors and numbers in a state, in float64."""
    if state is None:
        return []
    if isinstance(state, tuple):
        return [x for part in state for x in tensors_of(part)]
    return [torch.as_tensor(state).double()]


def built(config, axes):
    """Build a mixer in float64 with all parameters perturbed."""
    mixer = config.build(width=WIDTH, axes=axes).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return mixer


def check_mixer(config, shape, group, *, prefix=0, masks=False, continues=False, offsets=None):
    """Compare a mixer over the ranks of a group with one process.

    Args:
        config: The mixer.
        shape: The grid of all ranks; T rows.
        group: The process group.
        prefix: Prefix tokens of the first rank.
        masks: Whether some tokens are masked.
        continues: Whether the call continues the state of an earlier one.
        offsets: Offsets of packed sequences.
    """
    mixer = built(config, len(shape))
    columns, size = math.prod(shape[1:]), group.size()

    def op(x, group, keep=None, past=None, **parameters):
        def call(x, **options):
            is_first = group is None or dist.get_rank(group) == 0
            own = prefix if is_first else 0
            grid = Grid(((x.shape[1] - own) // columns, *shape[1:]), own)
            return functional_call(mixer, parameters, (x, grid), options)

        options = {} if past is None else {"state": call(past)[1]}
        if offsets is not None:
            packing = Packing(offsets, batch=B, tokens=T)
            if group is not None:
                packing = PackingShard(packing, split(T, size), dist.get_rank(group))
            options["cu_seqlens"] = packing
        ranks = group
        if size == 3 and group is not None:
            ranks = SequenceGroup(group, SequenceGroup(group).lengths(x), prefix=prefix)
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


def check_each(configs, group, **options):
    """Check several mixers, and add the name of one that fails to its error."""
    for name, config in configs.items():
        try:
            continues = options.get("continues", False) and config.is_causal
            prefix = 0 if continues else options.get("prefix", 0)
            check_mixer(config, group=group, **options | {"prefix": prefix, "continues": continues})
        except BaseException as error:
            error.add_note(name)
            raise


@pytest.mark.sampled
@pytest.mark.parametrize("family", MIXERS)
def test_tokens(over_ranks, family):
    def check(group):
        options = {"masks": group.size() > 2, "continues": group.size() > 2}
        check_each(MIXERS[family], group, shape=(T,), prefix=2, **options)

    over_ranks(check)


@pytest.mark.slow
@pytest.mark.parametrize("family", GRIDS)
def test_grids(over_ranks, family):
    def check(group):
        shape = (T, 3) if group.size() < 4 else (T, 2, 3)
        masks = group.size() > 2
        check_each(GRIDS[family], group, shape=shape, prefix=group.size() % 2, masks=masks)

    over_ranks(check)


@pytest.mark.slow
def test_packed_sequences(over_ranks):
    def check(group):
        check_each(PACKED, group, shape=(T,), masks=group.size() > 2, offsets=OFFSETS)

    over_ranks(check)


def test_collectives(over_ranks):
    """Natural scans move tokens once in each direction; other mixers do not."""

    def check(group):
        def traffic_of(config, shape):
            mixer, x = built(config, len(shape)), rand(B, math.prod(shape), WIDTH)
            with sequence_parallel(group), Communication() as traffic:
                mixer(x, Grid(shape))
            return traffic

        for config in CONSTANT_TRAFFIC:
            few, many = (traffic_of(config, (tokens,)) for tokens in (2, 30))
            assert "all_to_all_single" not in many.calls
            assert few.bytes == many.bytes
        for config in (GRIDS["lion"]["natural, both"], GRIDS["delta"]["natural, forward"]):
            assert traffic_of(config, (4, 3, 2)).calls.count("all_to_all_single") == 2
            assert "all_to_all_single" not in traffic_of(config, (4,)).calls

    over_ranks(check)


def test_a_scheme_that_needs_all_tokens(over_ranks):
    def check(group):
        mixer = built(replace(DIFFUSION, {"scheme": "crank_nicolson"}), 1)
        with (
            sequence_parallel(group),
            pytest.raises(
                ValueError, match="'crank_nicolson' supports only one: it solves a system"
            ),
        ):
            mixer(rand(B, 3, WIDTH), Grid((3,)))

    over_ranks(check)


def test_training_after_inference(over_ranks):
    """The orders of scans are cached, even if they are first computed in inference mode."""

    def check(group):
        mixer, x = built(NATURAL, 2), rand(B, 5 * 3, WIDTH)
        with sequence_parallel(group):
            with torch.inference_mode():
                mixer(x, Grid((5, 3)))
            mixer(x, Grid((5, 3)))[0].sum().backward()
        assert mixer.in_proj.weight.grad is not None

    over_ranks(check)
