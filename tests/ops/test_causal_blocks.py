"""Blockwise causal ops and mixers: the definition, cuts, packed sequences, ranks and errors."""

from functools import partial
from inspect import unwrap
from itertools import pairwise as neighbors

import pytest
import torch
import torch.nn.functional as F
from op_checks import assert_same
from pairwise import pairwise
from ranks import assert_same_over_ranks, run_ranks, split
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from onescan.layers.mixers import (
    DeltaProductMixerConfig,
    DeltaRuleMixerConfig,
    HybridMixerConfig,
    KDAMixerConfig,
    LightNetMixerConfig,
    LionMixerConfig,
)
from onescan.layers.position import ToeplitzPositionConfig
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.ops import (
    AdditiveDecayState,
    DecayState,
    DeltaState,
    additive_decay,
    decay_attention,
    delta_rule,
)
from onescan.ops.additive_decay import reference as additive_reference
from onescan.ops.decay_attention import reference as decay_reference
from onescan.ops.delta_rule import reference as delta_reference
from onescan.ops.parallel import sequence_parallel
from onescan.shapes import Grid

B, T, H, K, V = 2, 11, 2, 4, 3
BLOCKS = [1, 3, 4, T, T + 5]


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def some_infinite(log_decay):
    return log_decay.masked_fill(torch.rand(log_decay.shape) < 0.1, -torch.inf)


def additive_inputs(*, angles=False, scale=2):
    features = 2 * K if angles else K
    tokens = {"q": normal(B, T, H, K), "k": scale * normal(B, T, H, K), "v": normal(B, T, H, V)}
    tokens |= {"angles": normal(T, H, K)} if angles else {}
    return tokens, AdditiveDecayState(normal(B, H, K), normal(B, H, features, V))


def decay_inputs(*shape, scale=1):
    tokens = {"q": normal(B, T, H, K).abs(), "k": normal(B, T, H, K).abs(), "v": normal(B, T, H, V)}
    if shape:
        tokens["log_decay"] = some_infinite(-scale * normal(*shape).abs())
    return tokens, DecayState(normal(B, H, K, V), normal(B, H, K).abs())


def delta_inputs(*shape, updates=()):
    tokens = {
        "q": normal(B, T, H, K),
        "k": F.normalize(normal(B, T, *updates, H, K), dim=-1),
        "v": normal(B, T, *updates, H, V),
        "beta": 2 * torch.rand(B, T, *updates, H, dtype=torch.float64),
    }
    if shape:
        tokens["log_decay"] = some_infinite(-normal(*shape).abs())
    return tokens, DeltaState(normal(B, H, K, V))


ADDITIVE = (additive_decay, additive_reference.forward, ["one_scan", "chunk", "full"])
DECAY = (decay_attention, decay_reference.forward, ["chunk", "full", "recurrent"])
DELTA = (delta_rule, delta_reference.forward, ["chunk", "full", "recurrent"])
# op, reference and forms; inputs; options
CASES = {
    "additive": (*ADDITIVE, additive_inputs, {}),
    "additive, angles": (*ADDITIVE, partial(additive_inputs, angles=True, scale=300), {}),
    "no decay": (*DECAY, decay_inputs, {"normalize": "sum", "decay_at": "source"}),
    "fixed decay": (*DECAY, partial(decay_inputs, H), {"decay_at": "symmetric"}),
    "scalar decay": (
        *DECAY,
        partial(decay_inputs, B, T, H),
        {"normalize": "sum", "decay_at": "source"},
    ),
    "diagonal decay": (
        *DECAY,
        partial(decay_inputs, B, T, H, K, scale=20),
        {"normalize": "max_one", "decay_at": "target"},
    ),
    "delta rule": (*DELTA, delta_inputs, {}),
    "gated delta rule": (*DELTA, partial(delta_inputs, B, T, H), {}),
    "two updates": (*DELTA, partial(delta_inputs, B, T, H, K, updates=(2,)), {}),
}
over_cases = pytest.mark.parametrize("name", CASES)
ONE_OF_EACH = ["additive, angles", "scalar decay", "two updates"]
over_ops = pytest.mark.parametrize("name", ONE_OF_EACH)


def calls(name):
    """Return the op and the reference with the options of a case, its forms, tokens and state."""
    op, reference, forms, inputs, options = CASES[name]
    return partial(op, **options), partial(reference, **options), forms, *inputs()


def gradients(call, tokens, state, **options):
    """Return outputs and states, and the gradients of all tensors."""
    named = tree_map(lambda x: x.clone().requires_grad_(), tokens | state)
    state = {"state": named.pop("state")} if "state" in state else {}
    o, after = call(**named, **state, **options)
    outputs = [o, *after]
    loss = sum((x * x.detach().cos()).sum() for x in outputs)
    found = torch.autograd.grad(loss, tree_leaves((named, state)), materialize_grads=True)
    return outputs + list(found)


@pytest.mark.sampled(23)
@pairwise({"name": CASES, "block": BLOCKS, "form": range(3), "has_state, keeps": [(0, 0), (1, 1)]})
def test_every_form_matches_the_reference(name, block, form, has_state, keeps):
    op, reference, forms, tokens, state = calls(name)
    options = {"causal_block": block, "keep": torch.rand(B, T) < 0.6 if keeps else None}
    state = {"state": state} if has_state else {}
    want = gradients(reference, tokens, state, **options)
    got = gradients(op, tokens, state, form=forms[form], chunk_size=4, **options)
    assert_same(got, want)


UNEVEN = {  # offsets of blocks of several sizes
    "prefix": [0, 6, *range(7, T + 1)],
    "some": [0, 1, 5, 5, 9, T],
    "one": [0, T],
}


@pairwise({"name": CASES, "blocks": UNEVEN, "form": range(3), "has_state, keeps": [(0, 0), (1, 1)]})
def test_uneven_blocks_match_the_reference(name, blocks, form, has_state, keeps):
    op, reference, forms, tokens, state = calls(name)
    offsets = torch.tensor(UNEVEN[blocks], dtype=torch.int32)
    options = {"causal_block": offsets, "keep": torch.rand(B, T) < 0.6 if keeps else None}
    state = {"state": state} if has_state else {}
    chosen = "auto" if forms[form] == "one_scan" else forms[form]
    want = gradients(reference, tokens, state, **options)
    got = gradients(op, tokens, state, form=chosen, chunk_size=4, **options)
    assert_same(got, want)


@over_cases
def test_equal_offsets_are_blocks_of_one_size(name):
    op, _, _, tokens, state = calls(name)
    offsets = torch.tensor([0, 4, 8, T])
    (want, last), (got, after) = (
        op(**tokens, state=state, causal_block=blocks) for blocks in (4, offsets)
    )
    assert_same([got, *after], [want, *last])


@over_ops
def test_a_prefix_is_read_in_both_directions_and_the_rest_is_causal(name):
    op, _, _, tokens, _ = calls(name)
    prefix = 6
    call = partial(op, causal_block=torch.tensor([0, prefix, *range(prefix + 1, T + 1)]))
    part = {key: x[:prefix] if key == "angles" else x[:, :prefix] for key, x in tokens.items()}
    want, _ = op(**part)  # bidirectional
    assert_same([call(**tokens)[0][:, :prefix]], [want])
    later = {key: x.clone() for key, x in tokens.items()}
    later["v"][:, -1] += 1  # the last token changes only its own output
    before, after = call(**tokens)[0], call(**later)[0]
    assert_same([after[:, :-1]], [before[:, :-1]])
    assert not torch.allclose(after[:, -1], before[:, -1])


@over_ops
def test_errors_about_offsets_of_blocks(name):
    op, _, _, tokens, _ = calls(name)
    call = partial(unwrap(op.func), **tokens)
    for offsets, message in (
        ([1, T], "causal_block begins with 1, expected 0"),
        ([0, T - 1], f"causal_block ends at {T - 1}, expected {T}, the number of tokens"),
        ([0, 5, 3, T], "causal_block decreases from 5 to 3, expected offsets in ascending order"),
        ([[0, T]], r"causal_block has shape \(1, 2\), expected offsets \[N \+ 1\] of N blocks"),
        ([0.0, T], "causal_block has dtype torch.float32, expected torch.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            call(causal_block=torch.tensor(offsets))
    whole = torch.tensor([0, T])
    with pytest.raises(ValueError, match="causal_block holds offsets with causal=True"):
        call(causal_block=whole, causal=True)
    with pytest.raises(ValueError, match="causal_block holds offsets with cu_seqlens"):
        call(causal_block=whole, cu_seqlens=torch.tensor([0, T, 2 * T]))


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["additive, angles", "diagonal decay", "gated delta rule"])
def test_ranks_compute_uneven_blocks_as_one_process(name, tmp_path):
    op, _, _, tokens, state = calls(name)
    offsets, fields = torch.tensor([0, 1, 4, 5, 9, T]), type(state)._fields

    def call(group, **tensors):
        given = type(state)(*(tensors.pop(field) for field in fields))
        o, after = op(**tensors, state=given, group=group, causal_block=offsets, chunk_size=4)
        return o, list(after)

    def check(group):
        lengths = {2: [4, T - 4], 3: [5, 0, T - 5], 4: [1, 4, T - 5, 0]}[group.size()]
        assert_same_over_ranks(call, tokens, state._asdict(), lengths, group)
        if "additive" in name and group.size() == len(within := [2, 2, T - 4]):
            own = {key: tokens[key][:, : within[group.rank()]] for key in "qkv"}
            with pytest.raises(ValueError, match="causal_block=offsets, expected whole blocks"):
                additive_decay(**own, causal_block=offsets, group=group)

    run_ranks(4, check, tmp_path)


@pytest.mark.compile
@over_ops
def test_uneven_blocks_compile(name):
    torch.compiler.reset()
    op, _, _, tokens, _ = calls(name)
    call = partial(op, causal_block=torch.tensor([0, 6, 7, T]))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same([compiled(**tokens)[0]], [call(**tokens)[0]])


@pytest.mark.parametrize("block", BLOCKS)
def test_decay_is_a_mask_of_both_directions_inside_blocks_and_one_between_them(block):
    q, k, v, log_decay = decay_inputs(B, T, H)[0].values()
    decays, mask = log_decay.exp(), torch.zeros(B, T, T, H, dtype=torch.float64)
    for i in range(T):
        for j in range(T):
            if j <= i or i // block == j // block:  # Eq. 14
                between = slice(j, i) if j <= i else slice(i + 1, j + 1)
                mask[:, i, j] = decays[:, between].prod(dim=1)
    want = torch.einsum("bihk,bjhk,bijh,bjhv->bihv", q, k, mask, v)
    assert_same([decay_attention(q, k, v, log_decay, causal_block=block)[0]], [want])


@pytest.mark.parametrize("block", BLOCKS)
def test_additive_decay_is_a_softmax_over_tokens_up_to_the_end_of_a_block(block):
    q, k, v = additive_inputs()[0].values()
    outputs = []
    for t in range(T):
        end = (t // block + 1) * block
        kv = torch.einsum("bshk,bshv->bhkv", k[:, :end].softmax(dim=1), v[:, :end])
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], kv))
    assert_same([additive_decay(q, k, v, causal_block=block)[0]], [torch.stack(outputs, dim=1)])


@pytest.mark.parametrize("block", BLOCKS)
def test_the_delta_rule_adds_a_backward_direction_in_each_block(block):
    tokens, state = delta_inputs(B, T, H)
    want, last = delta_rule(**tokens, state=state, causal=True)
    parts = []
    for start in range(0, T, block):
        part = {name: x[:, start : start + block] for name, x in tokens.items()}
        parts.append(delta_rule(**part)[0] - delta_rule(**part, causal=True)[0])
    got, after = delta_rule(**tokens, state=state, causal_block=block)
    assert_same([got, *after], [want + torch.cat(parts, dim=1), *last])


@over_cases
def test_blocks_of_one_token_are_causal_and_one_block_is_bidirectional(name):
    op, _, _, tokens, state = calls(name)
    if name == "fixed decay":  # "symmetric" is "target" forward
        want = decay_attention(**tokens, state=state, causal=True, decay_at="target")
    else:
        want = op(**tokens, state=state, causal=True)
    got = op(**tokens, state=state, causal_block=1)
    assert_same([got[0], *got[1]], [want[0], *want[1]])
    both, _ = op(**tokens)
    for block in (T, T + 1):
        assert_same([op(**tokens, causal_block=block)[0]], [both])


@pytest.mark.sampled(12)
@over_cases
@pytest.mark.parametrize("block", [1, 3, 4])
def test_two_calls_equal_one_at_every_end_of_a_block(name, block):
    op, _, _, tokens, state = calls(name)
    call = partial(op, causal_block=block, chunk_size=4)
    want, last = call(**tokens, state=state)

    def part(*at):
        return {
            key: x if x.ndim == 1 else x[slice(*at)] if key == "angles" else x[:, slice(*at)]
            for key, x in tokens.items()
        }

    for cut in range(block, T, block):
        first, between = call(**part(0, cut), state=state)
        second, after = call(**part(cut, T), state=between)
        assert_same([torch.cat([first, second], dim=1), *after], [want, *last])


@over_cases
def test_packed_sequences_begin_with_a_block(name):
    op, _, forms, tokens, _ = calls(name)
    keep = torch.rand(B, T) < 0.7
    offsets = torch.tensor([0, 1, 5, T, T + 7, 2 * T], dtype=torch.int32)
    form = "one_scan" if "one_scan" in forms else "chunk"
    got, state = op(**tokens, keep=keep, cu_seqlens=offsets, causal_block=3, form=form)
    assert state is None
    for first, end in neighbors(offsets.tolist()):
        row, at = first // T, slice(first % T, first % T + end - first)
        alone = {
            key: x if x.ndim == 1 else x[at] if key == "angles" else x[row : row + 1, at]
            for key, x in tokens.items()
        }
        want, _ = op(**alone, keep=keep[row : row + 1, at], causal_block=3)
        assert_same([got[row : row + 1, at]], [want])


@over_cases
def test_masked_tokens_keep_their_place_and_are_not_read(name):
    op, _, forms, tokens, state = calls(name)
    keep = torch.rand(B, T) < 0.6
    call = partial(op, keep=keep, causal_block=4, state=state)
    want, last = call(**tokens)
    changed = {key: x if x.ndim == 1 or key == "angles" else x.clone() for key, x in tokens.items()}
    for key, x in changed.items():
        if x.ndim > 1 and key != "angles":
            x[~keep] = torch.nan
    for form in forms:
        got, after = call(**changed, form=form)
        assert_same([got, *after], [want, *last])
        assert (got[~keep] == 0).all()


def test_second_derivatives_of_a_state_per_block():
    tokens, state = additive_inputs(angles=True)
    short = {key: x[:3] if key == "angles" else x[:1, :3] for key, x in tokens.items()}
    leaves = [x.clone().requires_grad_() for x in [*short.values(), *(x[:1] for x in state)]]

    def call(*tensors):
        named, before = dict(zip(short, tensors, strict=False)), AdditiveDecayState(*tensors[-2:])
        o, after = additive_decay(**named, state=before, causal_block=2, form="one_scan")
        return o, *after

    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("additive, angles", "one_scan"),
        ("additive, angles", "chunk"),
        ("diagonal decay", "auto"),
        ("gated delta rule", "auto"),
    ],
)
def test_ranks_compute_the_outputs_of_one_process(name, form, tmp_path):
    """A rank may end within a block, except in additive decay."""
    op, _, _, tokens, state = calls(name)
    options = {"causal_block": 4, "chunk_size": 4, "form": form}
    fields = type(state)._fields

    def call(group, **tensors):
        given = type(state)(*(tensors.pop(field) for field in fields))
        o, after = op(**tensors, state=given, group=group, **options)
        return o, list(after)

    def check(group):
        lengths = split(T, group.size())
        if "additive" in name:
            lengths = {2: [0, T], 3: [4, 0, T - 4], 4: [4, 4, T - 8, 0]}[group.size()]
        keep = {"keep": torch.rand(B, T) < 0.7} if group.size() == 3 else {}
        assert_same_over_ranks(call, tokens | keep, state._asdict(), lengths, group)
        own = {key: x for key, x in tokens.items() if key != "angles"}
        offsets = torch.tensor([0, T, 2 * T])
        with pytest.raises(ValueError, match="causal_block with cu_seqlens supports only one"):
            op(**own, cu_seqlens=offsets, group=group, **options)

    run_ranks(4, check, tmp_path)


def test_a_rank_of_additive_decay_ends_with_a_block(tmp_path):
    tokens, _ = additive_inputs()

    def check(group):
        lengths = [1, 4, 3]
        own = {key: x[:, : lengths[group.rank()]] for key, x in tokens.items()}
        with pytest.raises(ValueError, match="1 tokens on rank 0 with causal_block=4, expected"):
            additive_decay(**own, causal_block=4, group=group)

    run_ranks(3, check, tmp_path)


@over_ops
def test_unsupported_options_are_errors(name):
    op, _, _, tokens, state = calls(name)
    op = partial(unwrap(op.func), **op.keywords)  # without the test run's check of types
    with pytest.raises(ValueError, match="causal_block is 0, expected a whole number of at least"):
        op(**tokens, causal_block=0)
    with pytest.raises(ValueError, match="causal_block is 2 with causal=True, expected causal=Fal"):
        op(**tokens, causal_block=2, causal=True)
    with pytest.raises(ValueError, match=r"state is .*tuple, expected an? \w+State"):
        op(**tokens, causal_block=2, state=(state, None))


def test_forms_of_additive_decay_without_blocks():
    tokens, _ = additive_inputs()
    call = partial(additive_decay, **tokens, causal_block=2)
    with pytest.raises(ValueError, match=r"form is 'recurrent', .* causal=False and causal_block;"):
        call(form="recurrent")
    offsets = torch.tensor([0, T, 2 * T])
    with pytest.raises(
        ValueError, match=r"form is 'chunk', .* causal=False, causal_block and cu_seqlens;"
    ):
        call(form="chunk", cu_seqlens=offsets)
    with pytest.raises(ValueError, match="one_scan"):
        call(form="one_scan", backend="triton")


MIXERS = {
    "lightnet": LightNetMixerConfig,
    "lightnet, separate decay": partial(LightNetMixerConfig, decay_logits="independent"),
    "lightnet, no decay": partial(LightNetMixerConfig, decay=False),
    "lightnet, convolution": partial(LightNetMixerConfig, conv_size=4),
    "lion": LionMixerConfig,
    "lion, convolution": partial(LionMixerConfig, conv_size=4, gate="silu", normalize="max_one"),
    "delta rule": DeltaRuleMixerConfig,
    "kda, convolution": partial(KDAMixerConfig, gate_rank=4),
    "delta product": partial(DeltaProductMixerConfig, conv_size=None),
}
over_mixers = pytest.mark.parametrize("config", MIXERS.values(), ids=MIXERS)
WIDTH, ROWS, COLUMNS = 24, 4, 3


def trained(config, **fields):
    mixer = config(num_heads=3, **fields).build(width=WIDTH, axes=2).double()
    for parameter in mixer.parameters():
        with torch.no_grad():
            parameter += 0.1 * torch.randn_like(parameter)
    return mixer


@pytest.mark.sampled(5)
@over_mixers
def test_a_mixer_continues_a_grid_after_every_block_and_reads_no_later_block(config):
    mixer = trained(config, causal_block=COLUMNS)
    x = normal(2, ROWS * COLUMNS, WIDTH).requires_grad_()
    leaves = [x, *mixer.parameters()]
    want, state = mixer(x, Grid((ROWS, COLUMNS)))
    weights = torch.randn_like(want)
    gradients = torch.autograd.grad((want * weights).sum(), leaves, retain_graph=True)
    for cut in range(1, ROWS):
        end = cut * COLUMNS
        first, state = mixer(x[:, :end], Grid((cut, COLUMNS)))
        rest, after = mixer(x[:, end:], Grid((ROWS - cut, COLUMNS)), state=state)
        got = torch.cat([first, rest], dim=1)
        assert_same([got], [want])
        assert_same(torch.autograd.grad((got * weights).sum(), leaves), gradients)
        assert isinstance(after, type(state))
        (reads,) = torch.autograd.grad(want[:, end - COLUMNS].sum(), x, retain_graph=True)
        assert reads[:, end:].abs().max() < 1e-12
        assert reads[:, end - 1].abs().max() > 1e-6  # the last token of the block


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["lightnet, separate decay", "lion, convolution", "delta rule"])
def test_ranks_compute_the_mixers_of_one_process(name, tmp_path):
    mixer = trained(MIXERS[name], causal_block=COLUMNS)

    def op(x, group, **parameters):
        grid = Grid((x.shape[1] // COLUMNS, COLUMNS))
        with sequence_parallel(group):
            y, state = functional_call(mixer, parameters, (x, grid))
        return y, [each for each in tree_leaves(state) if isinstance(each, torch.Tensor)]

    def check(group):
        rows = {2: [0, ROWS], 3: [1, ROWS - 2, 1], 4: [2, 0, ROWS - 2, 0]}[group.size()]
        tokens = {"x": normal(2, ROWS * COLUMNS, WIDTH)}
        parameters = dict(mixer.named_parameters())
        assert_same_over_ranks(op, tokens, parameters, rows, group, per_position=COLUMNS)

    run_ranks(4, check, tmp_path)


@over_mixers
def test_one_token_per_block_is_the_causal_mixer(config):
    causal = {"direction": "forward"}
    if "Lion" in str(config):
        causal["decay_at"] = "source"  # as in both directions
    torch.manual_seed(0)
    mixer = trained(config, **causal)
    torch.manual_seed(0)
    ours = trained(config, causal_block=1)
    x = normal(2, ROWS * COLUMNS, WIDTH)
    assert_same([ours(x, Grid((ROWS, COLUMNS)))[0]], [mixer(x, Grid((ROWS, COLUMNS)))[0]])


@pytest.mark.parametrize("name", [name for name in MIXERS if "convolution" not in name])
def test_one_block_is_the_bidirectional_mixer(name):
    torch.manual_seed(0)
    mixer = trained(MIXERS[name])
    torch.manual_seed(0)
    ours = trained(MIXERS[name], causal_block=ROWS * COLUMNS)
    x = normal(2, ROWS * COLUMNS, WIDTH)
    assert_same([ours(x, Grid((ROWS, COLUMNS)))[0]], [mixer(x, Grid((ROWS, COLUMNS)))[0]])


@over_mixers
def test_a_mixer_has_blocks_only_without_a_prefix_and_another_direction(config):
    mixer = trained(config, causal_block=4)
    with pytest.raises(ValueError, match=r"causal_block is 4 with Grid.* expected no prefix"):
        mixer(normal(1, 13, WIDTH), Grid((3, 4), prefix=1))
    with pytest.raises(ValueError, match="causal_block is 0, expected a whole number"):
        trained(config, causal_block=0)
    with pytest.raises(ValueError, match=r"causal_block is 4 with .*scan='natural', expected"):
        trained(config, causal_block=4, scan="natural")
    with pytest.raises(ValueError, match="causal_block is 4 with"):
        trained(config, causal_block=4, direction="forward")


def test_mixers_without_blocks():
    with pytest.raises(ValueError, match="sum_before_mask' with causal_block=4, expected"):
        trained(LionMixerConfig, causal_block=4, normalize="sum_before_mask")
    with pytest.raises(ValueError, match="form is 'recurrent' with direction='both', expected"):
        trained(LightNetMixerConfig, causal_block=4, form="recurrent")
    with pytest.raises(ValueError, match="form is 'one_scan' with decay=False and causal_block=4"):
        trained(LightNetMixerConfig, causal_block=4, form="one_scan", decay=False)


STREAMED = {
    "lightnet": LightNetMixerConfig(num_heads=3, causal_block=6),
    "lion": LionMixerConfig(num_heads=3, causal_block=6),
    "hybrid": HybridMixerConfig(
        linear=LightNetMixerConfig(causal_block=6),
        attention=KDAMixerConfig(causal_block=3, gate_rank=4),
        period=2,
        num_heads=3,
    ),
}


def classifier(mixer, **fields):
    options = {"image_size": (4, 6), "patch_size": (1, 2), "num_classes": 3, "pool": "mean"}
    options |= {"position": ToeplitzPositionConfig()}
    config = ImageClassifierConfig(width=WIDTH, depth=2, mixer=mixer, **options | fields)
    return config.build().double().eval()


@pytest.mark.parametrize("mixer", STREAMED.values(), ids=STREAMED)
def test_a_model_streams_whole_blocks(mixer):
    model, state, parts = classifier(mixer), None, []
    images = normal(2, 3, 4, 6)
    for rows in images.split(2, dim=2):  # of 2 x 3 patches
        tokens, state = model.stream(rows, state)
        parts.append(tokens)
    assert_same([torch.cat(parts, dim=1)], [model.forward_features(images)])
    with pytest.raises(ValueError, match="images have 3 patches, expected a multiple of 6"):
        model.stream(images[:, :, :1])


def test_models_with_blocks():
    mixer = LightNetMixerConfig(num_heads=3, causal_block=6)
    with pytest.raises(ValueError, match="the class token reads no patch"):
        classifier(mixer, pool="class_token")
    with pytest.raises(ValueError, match="mixer is not causal"):
        CausalLMConfig(vocab_size=9, width=WIDTH, mixer=mixer).build()


@pytest.mark.compile
@over_ops
def test_compiles_without_a_graph_break(name):
    op, _, _, tokens, state = calls(name)
    call = partial(op, causal_block=4)
    want, last = call(**tokens, state=state)
    got, after = torch.compile(call, fullgraph=True, backend="aot_eager")(**tokens, state=state)
    assert_same([got, *after], [want, *last])
