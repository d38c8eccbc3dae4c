"""LDN's layer and its parts: the paper's sum, its switches, states, grids, and pooling."""

import dataclasses
import itertools
import math
from inspect import unwrap
from unittest.mock import Mock

import pytest
import torch
from pairwise import pairwise
from projections import equal_parts

from onescan.layers.basic import MLPConfig
from onescan.layers.block import Block
from onescan.layers.mixers import (
    HybridMixerConfig,
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
)
from onescan.layers.mixers import linear_diffusion as mixer_module
from onescan.layers.mixers.linear_diffusion import (
    DenseDiffusion,
    FreeDiffusion,
    GaussianDiffusion,
    LinearSelfAttention,
    LocalUpdate,
)
from onescan.layers.position import AbsolutePositionConfig
from onescan.models.denoiser import DenoiserConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.masked_lm import MaskedLMConfig
from onescan.ops.linear_diffusion import IMPLEMENTATIONS
from onescan.ops.packing import Packing
from onescan.ops.parallel import SequenceGroup
from onescan.shapes import Grid

WIDTH, HEADS = 12, 3
PARTS = ("diffusion", "local_update", "linear_attention")
SOME_PARTS = [on for on in itertools.product([True, False], repeat=3) if any(on)]
some_parts = pytest.mark.parametrize("on", SOME_PARTS, ids=str)


def tokens(*shape):
    return torch.randn(*shape, WIDTH, dtype=torch.float64)


def built(axes=1, **fields):
    """A mixer as after training: no parameter is where it starts."""
    config = LinearDiffusionMixerConfig(**{"num_heads": HEADS, "max_sigma": 3.0, **SMALL, **fields})
    mixer = config.build(width=WIDTH, axes=axes).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixer


SMALL = {"sigmas": (1.0, 2.0)}
DENSE = {"kernel": "dense", "tokens": 7}


def kernel_of(diffusion, size):
    """K of the first head by its formula, [T, T], and the step, written out."""
    sigma = 0.25 * (3.0 / 0.25) ** torch.sigmoid(diffusion.raw_sigma)
    radius = math.ceil(3.0 * math.sqrt(2 * math.log(1e4)))
    past, future = ((1 + raw.exp()).log() for raw in (diffusion.raw_past, diffusion.raw_future))
    lag = torch.arange(size)[:, None] - torch.arange(size)
    phi = past[:, None, None] * (lag > 0) + future[:, None, None] * (lag < 0)
    kernel = phi * (-(lag**2) / (2 * sigma[:, None, None] ** 2)).exp() * (lag.abs() <= radius)
    lags = torch.arange(1, radius + 1)
    both_sides = (past + future) * (-(lags**2) / (2 * sigma[:, None] ** 2)).exp().sum(-1)
    return kernel, 0.999 * torch.sigmoid(diffusion.raw_step) / both_sides


def diffused(diffusion, h):
    """h + dt (K h - diag(K 1) h), each kernel its share of the channels."""
    kernels, dt = kernel_of(diffusion, h.shape[1])
    shares = h.chunk(len(dt), dim=-1)
    moved = [
        x + t * (k @ x - k.sum(-1, keepdim=True) * x)
        for x, k, t in zip(shares, kernels, dt, strict=True)
    ]
    return torch.cat(moved, dim=-1)


def attended(attention, h):
    q, k, v = (h @ w.weight.T for w in equal_parts(attention.in_proj))
    q, k, v = (x.reshape(*h.shape[:2], HEADS, -1) for x in (q, k, v))
    scores = torch.einsum("bthk,bshk->bhts", q.clamp(min=0), k.clamp(min=0))
    row_sums = scores.sum(-1, keepdim=True)
    shares = torch.where(row_sums > 0, scores / row_sums, 0)
    return torch.einsum("bhts,bshv->bthv", shares, v).flatten(-2)


def updated(local, x, h):
    gate, update = (torch.cat([x, h], dim=-1) @ local.proj.weight.T).chunk(2, -1)
    return torch.sigmoid(gate) * torch.nn.functional.gelu(update)


@pairwise(
    {"on": SOME_PARTS, "kernels": [1, 2], "residual": [False, True]}, rest_is_slow=True, ids=str
)
def test_a_layer_is_the_papers_sum(on, kernels, residual):
    """Sec. 3.3: h + dt (K h - diag(K 1) h) + F(x, h) + A_lin(h), without what is switched off."""
    fields = dict(zip(PARTS, on, strict=True), kernels=kernels, input_residual=residual)
    mixer = built(**fields)
    x, h = tokens(2, 7), tokens(2, 7)
    want = torch.zeros_like(h)
    if on[0]:
        want = want + diffused(mixer.diffusions[0], h) - h
    if on[1]:
        want = want + updated(mixer.local_update, x, h)
    if on[2]:
        want = want + attended(mixer.attention, h)
    if residual:
        want = want + mixer.input_weight * x
    got, state = mixer(h, Grid((7,)), embedding=x)
    assert state is None
    torch.testing.assert_close(got, want)


def test_a_block_adds_the_layer_to_what_it_read_and_nothing_else():
    config = LinearDiffusionMixerConfig(num_heads=HEADS)
    block = Block(WIDTH, axes=1, mixer=config, mlp=None, norm="layer").double()
    assert {name.partition(".")[0] for name, _ in block.named_parameters()} == {"mixer"}
    x, h = tokens(2, 5), tokens(2, 5)
    change, _ = block.mixer(h, Grid((5,)), embedding=x)
    torch.testing.assert_close(block(h, Grid((5,)), embedding=x)[0], h + change)


def test_a_block_may_follow_it_with_an_mlp():
    config = LinearDiffusionMixerConfig(num_heads=HEADS)
    block = Block(WIDTH, axes=1, mixer=config, mlp=MLPConfig(), norm="layer").double()
    h = tokens(2, 5)
    mixed = h + block.mixer(h, Grid((5,)))[0]
    want = mixed + block.mlp(block.mlp_norm(mixed))
    torch.testing.assert_close(block(h, Grid((5,)))[0], want)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_norm_is_read_by_the_second_and_third_part_and_not_by_what_diffuses(norm):
    x, h = tokens(2, 5), tokens(2, 5)
    mixer = built(norm=norm)
    read = mixer.norm(h)
    want = diffused(mixer.diffusions[0], h) - h
    want = want + updated(mixer.local_update, x, read) + attended(mixer.attention, read)
    torch.testing.assert_close(mixer(h, Grid((5,)), embedding=x)[0], want)


def test_separable_diffusion_is_a_step_along_each_axis_and_passes_the_prefix_by():
    grid = Grid((3, 4), prefix=2)
    mixer = built(axes=2, separable=True, local_update=False, linear_attention=False, kernels=2)
    rows, columns = mixer.diffusions
    h = tokens(2, grid.tokens)
    want = h[:, 2:].unflatten(1, grid.shape).clone()
    for b in range(2):
        for j in range(4):  # down each column of patches, along axis 0
            want[b, :, j] = diffused(rows, want[b, None, :, j])[0]
        for i in range(3):
            want[b, i] = diffused(columns, want[b, None, i])[0]
    change, _ = mixer(h, grid)
    assert (change[:, :2] == 0).all()
    torch.testing.assert_close((h + change)[:, 2:], want.flatten(1, 2))


def test_separable_diffusion_keeps_the_largest_number_and_constants():
    grid = Grid((5, 4))
    mixer = built(axes=2, separable=True, local_update=False, linear_attention=False)
    h = tokens(2, 20)
    moved = h + mixer(h, grid)[0]
    assert (moved.amax(1) <= h.amax(1)).all()
    assert (moved.amin(1) >= h.amin(1)).all()
    constant = torch.ones_like(h)
    torch.testing.assert_close(mixer(constant, grid)[0], torch.zeros_like(h))


def test_masked_tokens_of_a_grid_equal_removed_rows():
    mixer = built(axes=2, separable=True)
    h, keep = tokens(1, 12), torch.arange(12)[None] < 8  # the last of three rows is gone
    change, _ = mixer(h, Grid((3, 4)), keep=keep)
    torch.testing.assert_close(change[:, :8], mixer(h[:, :8], Grid((2, 4)))[0])
    assert (change[:, 8:] == 0).all()


@pytest.mark.parametrize("grid", [Grid((3, 3)), Grid((12,)), Grid((2, 3, 2))], ids=str)
def test_separable_diffusion_wants_the_grid_of_its_tokens(grid):
    message = r"x has 12 tokens, but Grid\(.* has 9|axes, but the mixer was built for 2"
    with pytest.raises(ValueError, match=message):
        built(axes=2, separable=True)(tokens(1, 12), grid)


@pytest.mark.sampled(6)
@some_parts
@pytest.mark.parametrize("fields", [{}, {"kernels": 2, "norm": "layer", "input_residual": True}])
def test_causal_in_two_calls_equals_one_at_every_cut(on, fields):
    mixer = built(direction="forward", **dict(zip(PARTS, on, strict=True)), **fields)
    assert mixer.config.is_causal
    x, h, keep = tokens(2, 9), tokens(2, 9), torch.rand(2, 9) < 0.8
    want, whole = mixer(h, Grid((9,)), keep=keep, embedding=x)
    for cut in range(1, 9):
        first, state = mixer(h[:, :cut], Grid((cut,)), keep=keep[:, :cut], embedding=x[:, :cut])
        rest, state = mixer(
            h[:, cut:], Grid((9 - cut,)), keep=keep[:, cut:], state=state, embedding=x[:, cut:]
        )
        torch.testing.assert_close(torch.cat([first, rest], dim=1), want)
        if on[0]:
            torch.testing.assert_close(state.diffusion.x, whole.diffusion.x)
        if on[2]:
            torch.testing.assert_close(state.attention.kv, whole.attention.kv)


def test_a_causal_layer_reads_no_later_token():
    mixer, h = built(direction="forward"), tokens(1, 9)
    before, _ = mixer(h, Grid((9,)))
    h[:, 5:] += 1
    after, _ = mixer(h, Grid((9,)))
    assert torch.equal(after[:, :5], before[:, :5])
    assert (after[:, 5:] != before[:, 5:]).all()


def test_a_state_stays_as_large_as_it_is_over_any_number_of_tokens():
    mixer, state, sizes = built(direction="forward"), None, set()
    for _ in range(30):
        _, state = mixer(tokens(2, 1), Grid((1,)), state=state)
        parts = (*state.diffusion, *state.attention)
        sizes.add(tuple(part.shape for part in parts))
    assert len(sizes) == 1


def test_each_block_begins_one_width_further():
    config = LinearDiffusionMixerConfig(num_heads=HEADS, kernels=3, sigmas=(1.0, 2.0))
    first = [config.for_layer(i).build(width=WIDTH, axes=1).diffusions[0].sigma() for i in range(3)]
    want = [[1.0, 2.0, 1.0], [2.0, 1.0, 2.0], [1.0, 2.0, 1.0]]
    torch.testing.assert_close(torch.stack(first), torch.tensor(want))


def test_at_first_a_step_is_half_of_the_longest_stable_one():
    fields = {"sigmas": [2.0], "max_sigma": 8.0, "epsilon": 1e-4, "causal": False, "form": "auto"}
    for scheme, share in (("explicit", 0.999 / 2), ("crank_nicolson", math.log(2))):
        diffusion = GaussianDiffusion(**fields, scheme=scheme)
        weights = diffusion.weights()
        longest = 1 / (weights.sum() - weights[0, diffusion.radius])
        torch.testing.assert_close(diffusion.dt(weights), share * longest[None])
        torch.testing.assert_close(diffusion.sigma(), torch.tensor([2.0]))


def test_crank_nicolson_is_a_layers_scheme_too():
    mixer = built(scheme="crank_nicolson", local_update=False, linear_attention=False)
    diffusion, h = mixer.diffusions[0], tokens(2, 6)
    kernel, _ = kernel_of(diffusion, 6)
    weights = diffusion.weights()
    laplacian = diffusion.dt(weights)[0] / 2 * (kernel[0] - torch.diag(kernel[0].sum(-1)))
    one = torch.eye(6, dtype=torch.float64)
    want = torch.linalg.solve(one - laplacian, (one + laplacian) @ h)
    torch.testing.assert_close(h + mixer(h, Grid((6,)))[0], want)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_all_zero_rows_is_zero_with_finite_gradients(causal):
    attention = LinearSelfAttention(WIDTH, HEADS, "relu").double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    x = tokens(2, 6)
    x[:, 2] = 0  # its query, and its key
    x[1] = 0  # all of a sequence
    x.requires_grad_()
    o, _ = attention(x, causal=causal)
    assert (o[:, 2] == 0).all()
    assert (o[1] == 0).all()
    assert (o[0, [0, 1, 3, 4, 5]] != 0).any(dim=-1).all()
    o.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in [x, *attention.parameters()])
    assert all((p.grad != 0).any() for p in attention.parameters())


@pytest.mark.parametrize("feature_map", ["relu", "elu_plus_one", "identity"])
def test_queries_and_keys_pass_through_the_feature_map(feature_map):
    maps = {
        "relu": lambda x: x.clamp(min=0),
        "elu_plus_one": lambda x: torch.where(x > 0, x + 1, x.exp()),
        "identity": lambda x: x,
    }
    attention, x = LinearSelfAttention(WIDTH, HEADS, feature_map).double(), tokens(1, 5)
    heads = lambda layer: layer(x).reshape(5, HEADS, -1)
    *qk, to_v = equal_parts(attention.in_proj)
    q, k = (maps[feature_map](heads(layer)) for layer in qk)
    scores = torch.einsum("thk,shk->hts", q, k)
    shares = scores / scores.sum(-1, keepdim=True)
    want = torch.einsum("hts,shv->thv", shares, heads(to_v)).reshape(1, 5, -1)
    torch.testing.assert_close(attention(x)[0], want)


@pytest.mark.parametrize("activation", ["gelu", "silu", "tanh"])
def test_the_local_update_is_gated_and_of_its_activation(activation):
    local = LocalUpdate(WIDTH, activation).double()
    x, h = tokens(2, 3), tokens(2, 3)
    gate, update = (torch.cat([x, h], -1) @ local.proj.weight.T).chunk(2, -1)
    function = torch.tanh if activation == "tanh" else getattr(torch.nn.functional, activation)
    torch.testing.assert_close(local(x, h), function(update) / (1 + (-gate).exp()))
    assert sum(p.numel() for p in local.parameters()) == 4 * WIDTH**2


def test_dropout_leaves_diffusion_alone_and_is_off_when_judging():
    h, grid = tokens(1, 6), Grid((6,))
    mixer = built(dropout=0.5)
    assert not torch.equal(mixer(h, grid)[0], mixer(h, grid)[0])
    assert torch.equal(mixer.eval()(h, grid)[0], mixer(h, grid)[0])
    diffusion = built(dropout=0.5, local_update=False, linear_attention=False)
    assert torch.equal(diffusion(h, grid)[0], diffusion(h, grid)[0])


def small(**changes):
    fields = {
        "image_size": (8, 8), "channels": 1, "patch_size": (2, 2), "num_classes": 5, "width": 24,
        "depth": 3, "mixer": LinearDiffusionMixerConfig(num_heads=2), "mlp": None, "pool": "mean",
        "position": AbsolutePositionConfig(), "drop_path": 0.0,
    }  # fmt: skip
    return ImageClassifierConfig(**{**fields, **changes})


def test_every_block_of_a_model_reads_the_embedding():
    """F(x, h): what enters the first block goes along to the last."""
    model, seen = small().build(), []
    for block in model.blocks:
        block.mixer.register_forward_pre_hook(
            lambda _module, args, kwargs: seen.append((args[0], kwargs["embedding"])),
            with_kwargs=True,
        )
    model(torch.randn(2, 1, 8, 8))
    assert len(seen) == 3
    assert all(torch.equal(embedding, seen[0][0]) for _, embedding in seen)
    assert not torch.equal(seen[2][0], seen[0][0])


@pytest.mark.parametrize("pool", ["mean", "max", "attention"])
def test_a_model_pools_what_its_last_norm_gave(pool):
    model = small(pool=pool).build().eval()
    if pool == "attention":
        torch.nn.init.normal_(model.attention_pool.query)
    images = torch.randn(2, 1, 8, 8)
    features = model.forward_features(images)
    assert features.shape == (2, 16, 24)
    if pool == "mean":
        pooled = features.mean(1)
    elif pool == "max":
        pooled = features.max(1).values
    else:
        shares = (features @ model.attention_pool.query).softmax(1)
        pooled = (features * shares[..., None]).sum(1)
    torch.testing.assert_close(model(images), model.head(pooled))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kernels": 5}, "width 12 is not a multiple of kernels 5"),
        ({"kernels": 0}, "kernels is 0"),
        ({"sigmas": ()}, r"sigmas is \(\)"),
        ({"sigmas": (0.1,)}, r"sigmas contains 0.1"),
        ({"sigmas": (3.0,)}, r"sigmas contains 3.0"),
        ({"max_sigma": -1.0}, "max_sigma is -1.0"),
        ({"epsilon": 0.0}, "epsilon is 0.0"),
        ({"epsilon": 1.0}, "epsilon is 1.0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"kernel": "cubic"}, "kernel 'cubic' is unknown; available: gaussian, free, dense"),
        ({"tokens": 9}, "tokens is 9 with kernel='gaussian', expected None"),
        ({"kernel": "free", "tokens": 9}, "tokens is 9 with kernel='free', expected None"),
        ({"kernel": "dense"}, "tokens is None with kernel='dense'"),
        ({"kernel": "dense", "tokens": 0}, "tokens is 0"),
        ({**DENSE, "kernels": 13}, "kernels is 13, expected at most the width 12"),
        ({**DENSE, "kernels": 0}, "kernels is 0"),
        ({**DENSE, "epsilon": 0.0}, "epsilon is 0.0"),
        ({**DENSE, "direction": "forward"}, "direction is 'forward' with kernel='dense', expected"),
        ({**DENSE, "separable": True}, "separable is True with kernel='dense', expected False"),
        ({**DENSE, "scheme": "crank_nicolson"}, "scheme is 'crank_nicolson' with kernel='dense'"),
        ({**DENSE, "form": "fft"}, "form is 'fft' with kernel='dense', expected 'auto'"),
        ({"scheme": "euler"}, "scheme 'euler' is unknown; available: explicit, crank_nicolson"),
        ({"feature_map": "exp"}, "feature_map 'exp' is unknown"),
        ({"activation": "relu"}, "activation 'relu' is unknown .*; available: gelu, silu, tanh"),
        ({"form": "chunk"}, "form 'chunk' is unknown; available: auto, dense, banded, fft"),
        (dict.fromkeys(PARTS, False), "are all False"),
        (
            {"direction": "forward", "separable": True},
            "direction is 'forward' with separable=True",
        ),
        (
            {"direction": "forward", "scheme": "crank_nicolson"},
            "direction is 'forward' with .*scheme='crank_nicolson', expected",
        ),
        ({"form": "fft", "scheme": "crank_nicolson"}, "form is 'fft' with scheme='crank_nicolson'"),
    ],
)
def test_impossible_fields_are_refused(fields, message):
    config = LinearDiffusionMixerConfig(num_heads=HEADS, max_sigma=3.0, sigmas=(1.0,))
    for name, value in fields.items():  # past the hook of types, as from a config file
        object.__setattr__(config, name, value)
    with pytest.raises(ValueError, match=message):
        config.build(width=WIDTH, axes=1)


@pytest.mark.parametrize(
    "mixer", [{"direction": "forward"}, {"separable": True, "linear_attention": False}], ids=str
)
def test_a_class_token_that_reads_no_patch_is_refused(mixer):
    config = small(mixer=LinearDiffusionMixerConfig(num_heads=2, **mixer), pool="class_token")
    with pytest.raises(ValueError, match="class token reads no patch"):
        config.build()
    dataclasses.replace(config, pool="mean").build()


@pytest.mark.parametrize("pool", ["mean", "max", "attention"])
def test_a_distillation_token_wants_a_class_token_beside_it(pool):
    config = small(mixer=LightNetMixerConfig(num_heads=2), pool=pool, distillation_token=True)
    with pytest.raises(ValueError, match=f"distillation_token is True with pool='{pool}'"):
        config.build()


@pytest.mark.parametrize("separable", [False, True])
def test_a_models_forms_predict_alike(separable):
    images = torch.randn(2, 1, 24, 24, dtype=torch.float64)
    models = [
        small(
            image_size=(24, 24),
            mixer=LinearDiffusionMixerConfig(num_heads=2, separable=separable, form=form),
        )
        .build()
        .double()
        .eval()
        for form in ("dense", "banded", "fft")
    ]
    want = models[0](images)
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
        torch.testing.assert_close(model(images), want, rtol=1e-9, atol=1e-9)


@pytest.mark.compile
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"separable": True},
        {"scheme": "crank_nicolson"},
        {"kernel": "free", "kernels": None},
        {"kernel": "dense", "kernels": 3},
    ],
    ids=str,
)
def test_an_ldn_classifier_compiles_whole(fields):
    torch.compiler.reset()
    mixer = LinearDiffusionMixerConfig(num_heads=2, **fields)
    model = small(mixer=mixer).build()
    images = torch.randn(2, 1, 8, 8)
    want = model(images)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images), want)


def test_drop_path_and_dropout_never_scale_up_what_keeps_tokens_within_bounds():
    config = LinearDiffusionMixerConfig(num_heads=3, local_update=False, linear_attention=False)
    block = Block(WIDTH, axes=1, mixer=config, mlp=None, norm="none", drop_path=0.5, dropout=0.5)
    with torch.no_grad():
        block.mixer.diffusions[0].raw_step.fill_(10.0)
    h = torch.randn(64, 40, WIDTH)
    largest = h.amax(dim=1)
    for _ in range(10):
        h, _ = block(h, Grid((40,)))
        assert (h.amax(dim=1) <= largest + 1e-5).all()
    x = torch.randn(4096, 3, WIDTH)
    step = block.mixer(x, Grid((3,)))[0]
    in_training = (block(x, Grid((3,)))[0] - x).mean(0)
    torch.testing.assert_close(in_training, step.mean(0) / 2, atol=0.03, rtol=0)
    judged = block.eval()(x, Grid((3,)))[0] - x
    torch.testing.assert_close(judged, step / 2)


def test_other_mixers_are_normalized_before_scaled_up_and_followed_by_an_mlp():
    mixer, grid = LightNetMixerConfig(num_heads=HEADS), Grid((5,))
    block = Block(WIDTH, axes=1, mixer=mixer, mlp=MLPConfig(), norm="layer", drop_path=0.25)
    block = block.double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    h, keep = tokens(2, 5), torch.tensor([[True] * 5, [True, False, True, True, False]])
    mixed = h + block.mixer(block.mixer_norm(h), grid, keep=keep)[0]
    want = mixed + block.mlp(block.mlp_norm(mixed))
    torch.testing.assert_close(block.eval()(h, grid, keep=keep)[0], want)
    many = h[:1].expand(4000, -1, -1)
    block.train()
    after = block(many, grid)[0]
    step = block.mixer(block.mixer_norm(h[:1]), grid)[0] / 0.75
    kept = [h[:1], h[:1] + step]  # without the mixer's branch, and with it
    kept += [x + block.mlp(block.mlp_norm(x)) / 0.75 for x in kept]
    found = torch.stack([(after - x).abs().amax((1, 2)) < 1e-5 for x in kept])
    assert (found.sum(0) == 1).all()
    shares = found.double().mean(1)
    want = torch.tensor([0.0625, 0.1875, 0.1875, 0.5625]).double()
    torch.testing.assert_close(shares, want, atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"diffusion": False}, {"local_update", "attention"}),
        ({"local_update": False}, {"diffusions", "attention"}),
        ({"linear_attention": False}, {"diffusions", "local_update"}),
        ({"input_residual": True}, {"diffusions", "local_update", "attention", "input_weight"}),
    ],
    ids=["diffusion", "local_update", "linear_attention", "input_residual"],
)
def test_a_part_that_is_off_has_no_parameters(row, names):
    mixer = built(**row)
    assert {name.partition(".")[0] for name, _ in mixer.named_parameters()} == names


def softplus(x):
    return (1 + x.exp()).log()


def pair_weights(diffusion, tokens):
    """K of each kernel, [H, T, T], pair by pair, and the sums that bound its step."""
    if isinstance(diffusion, DenseDiffusion):
        kernel = softplus(diffusion.raw_kernel) * (1 - torch.eye(tokens).double())
        return kernel, torch.stack([max(row.sum() for row in rows) for rows in kernel])
    raw, radius = diffusion.raw_weight, diffusion.radius
    lags = [*range(1, radius + 1)]
    if not diffusion.causal:
        lags = [-lag for lag in lags[::-1]] + lags
    assert raw.shape[1] == len(lags)
    weights = [dict(zip(lags, softplus(row).unbind(), strict=True)) for row in raw]
    nothing = torch.zeros((), dtype=raw.dtype)
    kernel = torch.stack([
        torch.stack([
            torch.stack([row.get(t - s, nothing) for s in range(tokens)]) for t in range(tokens)
        ])
        for row in weights
    ])  # fmt: skip
    return kernel, torch.stack([sum(row.values()) for row in weights])


def moved_token_by_token(diffusion, h, keep):
    """h_t + dt sum_s K_ts (h_s - h_t) over the real tokens s; each kernel has some channels."""
    kernel, largest = pair_weights(diffusion, h.shape[1])
    dt = 0.999 * torch.sigmoid(diffusion.raw_step) / largest
    shares = []
    for k, step, share in zip(kernel, dt, h.tensor_split(len(kernel), dim=-1), strict=True):
        rows = []
        for t in range(h.shape[1]):
            flow = torch.zeros_like(share[:, t])
            for s in range(h.shape[1]):
                flow = flow + k[t, s] * (share[:, s] - share[:, t]) * keep[:, s, None]
            rows.append(share[:, t] + step * flow)
        shares.append(torch.stack(rows, dim=1))
    return torch.cat(shares, dim=-1) * keep.unsqueeze(-1)


ALONE = {"local_update": False, "linear_attention": False}
LEARNED = {
    "free": {"kernel": "free", "max_sigma": 1.5},
    "free, per head": {"kernel": "free", "kernels": None},
    "free, causal": {"kernel": "free", "kernels": 2, "direction": "forward", "max_sigma": 1.5},
    "dense": DENSE,
    "dense, shares of 3, 3, 2, 2 and 2 channels": {**DENSE, "kernels": 5},
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LEARNED)
def test_learned_kernels_match_the_definition_token_by_token(name, masked):
    mixer = built(**LEARNED[name], **ALONE, sigmas=(1.0,))
    (diffusion,) = mixer.diffusions
    h = tokens(2, 7)
    keep = torch.rand(2, 7) < 0.7 if masked else torch.ones(2, 7, dtype=torch.bool)
    h = (h * keep.unsqueeze(-1)).requires_grad_()
    leaves, weight = [h, *mixer.parameters()], tokens(2, 7)
    want = moved_token_by_token(diffusion, h, keep)
    wanted = [want, *torch.autograd.grad((want * weight).sum(), leaves)]
    change, _ = mixer(h, Grid((7,)), keep=keep if masked else None)
    got = (h + change) * keep.unsqueeze(-1)
    computed = [got, *torch.autograd.grad((got * weight).sum(), leaves)]
    computed[1], wanted[1] = computed[1] * keep[..., None], wanted[1] * keep[..., None]
    assert len(leaves) == 3
    for one, other in zip(computed, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_learned_kernels_start_as_gaussians_of_at_least_epsilon():
    fields = {"epsilon": 1e-3, "causal": False, "scheme": "explicit", "form": "auto"}
    gaussian = GaussianDiffusion([1.0, 2.0], max_sigma=4.0, **fields).weights()
    free = FreeDiffusion([1.0, 2.0], max_sigma=4.0, **fields)
    radius = free.radius
    want = gaussian.clamp(min=1e-3).index_fill(1, torch.tensor([radius]), 0)
    torch.testing.assert_close(free.weights(), want)
    dense = DenseDiffusion([1.0, 2.0], 6, epsilon=1e-3)
    lag = torch.arange(6)[:, None] - torch.arange(6)
    torch.testing.assert_close(dense.weights(), want[:, radius + lag])
    for diffusion in (free, dense):
        for parameter in diffusion.parameters():
            assert parameter.ndim == 1 or [*diffusion.no_weight_decay] == [
                name for name, p in diffusion.named_parameters() if p is parameter
            ]


def test_free_kernels_of_each_axis_are_its_own():
    mixer = built(axes=2, separable=True, kernel="free", kernels=None, **ALONE)
    h, grid = tokens(2, 14), Grid((3, 4), prefix=2)
    want = h[:, 2:].unflatten(1, grid.shape)
    for axis, diffusion in enumerate(mixer.diffusions, start=1):
        lines = want.movedim(axis, -2).flatten(0, 1)
        every = torch.ones(lines.shape[:2], dtype=torch.bool)
        moved = moved_token_by_token(diffusion, lines, every)
        want = moved.view(want.movedim(axis, -2).shape).movedim(-2, axis)
    torch.testing.assert_close(h + mixer(h, grid)[0], torch.cat([h[:, :2], want.flatten(1, 2)], 1))


def test_dense_kernels_leave_the_prefix_as_it_is_and_refuse_other_sizes():
    mixer = built(axes=2, kernel="dense", tokens=6, **ALONE)
    h, grid = tokens(2, 8), Grid((2, 3), prefix=2)
    change, _ = mixer(h, grid)
    assert (change[:, :2] == 0).all()
    torch.testing.assert_close(change[:, 2:], mixer(h[:, 2:], Grid((2, 3)))[0])
    with pytest.raises(ValueError, match="x has 8 tokens without the prefix, but kernel='dense'"):
        mixer(h, Grid((2, 4)))
    with pytest.raises(ValueError, match="keep was given with kernel='dense'"):
        mixer.config.check_padding(grid)


def test_dense_kernels_refuse_several_ranks(monkeypatch):
    mixer = built(**DENSE, **ALONE)
    monkeypatch.setattr(mixer_module, "sequence_group", lambda _: Mock(SequenceGroup, size=2))
    with pytest.raises(ValueError, match="group has 2 ranks, but kernel='dense' supports only one"):
        mixer(tokens(1, 7), Grid((7,)))


def test_models_refuse_dense_kernels_for_grids_of_other_sizes():
    dense = LinearDiffusionMixerConfig(num_heads=2, kernel="dense", tokens=9)
    with pytest.raises(ValueError, match=r"tokens is 9, but the model's default grid \(4, 4\)"):
        small(mixer=dense).build()
    hybrid = HybridMixerConfig(linear=dense, attention=LightNetMixerConfig(num_heads=2), period=2)
    with pytest.raises(ValueError, match=r"mixer\.tokens is 9, .* has 16 tokens; expected 16"):
        small(mixer=hybrid).build()
    small(mixer=dataclasses.replace(dense, tokens=16)).build()


def test_dense_kernels_need_no_number_of_tokens_without_diffusion():
    for tokens in (None, 9):
        mixer = built(kernel="dense", diffusion=False, tokens=tokens)
        assert len(mixer.diffusions) == 0


def test_models_of_grids_tell_dense_kernels_their_number_of_tokens():
    dense = LinearDiffusionMixerConfig(num_heads=2, kernel="dense", kernels=5)
    hybrid = HybridMixerConfig(linear=dense, attention=LightNetMixerConfig(num_heads=2), period=2)
    denoiser = DenoiserConfig(image_size=(4, 6), width=24, depth=1, num_classes=3, mixer=dense)
    for config, count in (
        (small(mixer=dense), 16),
        (small(mixer=dense, pool="class_token"), 16),
        (small(mixer=hybrid, image_size=(4, 8)), 8),
        (denoiser, 6),
    ):
        model = config.build()
        (diffusion,) = model.blocks[0].mixer.diffusions
        assert diffusion.raw_kernel.shape == (5, count, count)
        assert not config.mixer.fits_any_grid
        assert config.mixer.for_grid(Grid((4, 2))) != config.mixer
    model = small(mixer=dense).build()
    assert model(torch.zeros(1, 1, 8, 8)).shape == (1, 5)
    with pytest.raises(ValueError, match="x has 32 tokens without the prefix, but"):
        model(torch.zeros(1, 1, 8, 16))
    with pytest.raises(ValueError, match="tokens is None with kernel='dense'"):
        MaskedLMConfig(width=24, depth=1, mixer=dense).build()


def test_what_a_new_layer_begins_with():
    config = LinearDiffusionMixerConfig(num_heads=HEADS, input_residual=True)
    mixer = config.build(width=WIDTH, axes=1)
    (diffusion,) = mixer.diffusions
    weights, radius = diffusion.weights()[0], diffusion.radius
    assert radius == 138  # 32 sqrt(2 ln 10,000), rounded up
    torch.testing.assert_close(weights, weights.flip(0))
    torch.testing.assert_close(weights[radius + 1], torch.tensor(-0.5).exp())
    assert mixer.input_weight.item() == 0
    assert config.sigmas == (1.0, 2.0, 4.0, 8.0)
    wide = LinearDiffusionMixerConfig(num_heads=HEADS, epsilon=1e-2).build(width=WIDTH, axes=1)
    assert wide.diffusions[0].radius == math.ceil(32 * math.sqrt(2 * math.log(100)))


def test_a_first_width_next_to_a_bound_can_still_be_learnt():
    for sigma in (0.25001, 31.99999):
        mixer = built(sigmas=(sigma,), max_sigma=32.0)
        diffusion = GaussianDiffusion(
            [sigma], max_sigma=32.0, epsilon=1e-4, causal=False, scheme="explicit", form="auto"
        )
        assert diffusion.sigma().item() == pytest.approx(sigma, rel=0.05)
        diffusion.sigma().sum().backward()
        assert diffusion.raw_sigma.grad.abs() > 1e-4
        assert torch.isfinite(mixer(tokens(1, 4), Grid((4,)))[0]).all()


def test_a_bfloat16_layer_has_a_kernel_of_full_precision():
    diffusion = LinearDiffusionMixerConfig(num_heads=HEADS).build(width=WIDTH, axes=1).diffusions[0]
    weights = diffusion.bfloat16().weights()
    assert weights.dtype == torch.float32
    assert torch.equal(weights, weights.flip(1))


@pytest.mark.parametrize("form", ["dense", "banded", "fft"])
def test_a_layer_runs_the_form_it_is_asked_for(form, monkeypatch):
    calls = []
    known = dict(IMPLEMENTATIONS)
    for name, product in known.items():
        monkeypatch.setitem(
            IMPLEMENTATIONS, name, lambda *a, n=name, p=product: calls.append(n) or p(*a)
        )
    built(form=form)(tokens(1, 70), Grid((70,)))
    assert set(calls) == {form}


@pytest.mark.parametrize("part", ["local_update", "linear_attention"])
def test_dropout_is_of_either_part(part):
    only = {name: name == part for name in PARTS}
    mixer, h = built(dropout=0.5, **only), tokens(1, 6)
    assert not torch.equal(mixer(h, Grid((6,)))[0], mixer(h, Grid((6,)))[0])


def test_what_a_masked_token_holds_reaches_no_one_and_no_weight():
    mixer, h = built(norm="layer", input_residual=True), tokens(1, 6)
    keep = torch.tensor([[True, True, False, True, True, True]])
    want, _ = mixer(h, Grid((6,)), keep=keep)
    h[:, 2] = torch.nan
    got, _ = mixer(h, Grid((6,)), keep=keep)
    torch.testing.assert_close(got, want)
    got.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in mixer.parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_sigma": math.nan}, "max_sigma is nan"),
        ({"max_sigma": math.inf}, "max_sigma is inf"),
        (
            {"max_sigma": 1e9},
            "max_sigma is 1000000000.0, which gives kernels a radius of .* tokens",
        ),
        ({"epsilon": math.nan}, "epsilon is nan"),
        ({"sigmas": (1.0, 40.0)}, r"sigmas contains 40\.0"),
    ],
)
def test_a_first_block_refuses_what_any_block_would(fields, message):
    config = LinearDiffusionMixerConfig(num_heads=HEADS, **fields)
    with pytest.raises(ValueError, match=message):
        config.for_layer(0).build(width=WIDTH, axes=1)


def test_no_first_widths_are_refused_by_name():
    config = LinearDiffusionMixerConfig(num_heads=HEADS, sigmas=())
    with pytest.raises(ValueError, match=r"sigmas is \(\)"):
        config.for_layer(0).build(width=WIDTH, axes=1)


def test_a_state_of_another_mixer_is_refused():
    mixer = built(direction="forward")
    with pytest.raises(ValueError, match="state is an int"):
        unwrap(type(mixer).forward)(mixer, tokens(1, 2), Grid((2,)), state=3)


@pytest.mark.parametrize(
    ("fields", "tokens"), [({"separable": True}, None), ({"kernel": "dense"}, 7)]
)
def test_packed_sequences_that_cannot_be_separated_are_refused(fields, tokens):
    mixer = built(**fields, **({} if tokens is None else {"tokens": tokens}))
    packing = Packing(torch.tensor([0, 3, 7]), batch=1, tokens=7)
    with pytest.raises(ValueError, match="cu_seqlens was given to a mixer that cannot separate"):
        mixer(torch.randn(1, 7, WIDTH).double(), Grid((7,)), cu_seqlens=packing)


def test_masked_tokens_of_the_embedding_may_be_nan():
    mixer = built()
    h, x = torch.randn(2, 1, 5, WIDTH).double()
    keep = torch.tensor([[True, True, False, True, True]])
    x = x.masked_fill(~keep.unsqueeze(-1), torch.nan)
    got, _ = mixer(h, Grid((5,)), keep=keep, embedding=x)
    got.sum().backward()
    assert got.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in mixer.parameters())
