"""Linear attention in encoders of PyTorch, transformers and timm."""

import re

import pytest
import torch
from torch import nn

from onescan.nn import (
    DeltaAttention,
    LightNetAttention,
    LionAttention,
    MultiheadAttention,
    replace_attention,
)

DIM, HEADS = 12, 2
KINDS = {"lightnet": LightNetAttention, "lion": LionAttention, "delta": DeltaAttention}


def tokens(count, batch=2):
    return torch.randn(batch, count, DIM)


def padding(batch=2, count=7, real=5):
    return (torch.arange(count) >= real).expand(batch, count)


def encoder_layer(batch_first=True):
    return nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=batch_first)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("additive", [True, False])
def test_multihead_attention_equals_its_layer(kind, batch_first, additive):
    attention = MultiheadAttention(DIM, HEADS, batch_first=batch_first, kind=kind)
    assert isinstance(attention.attention, KINDS[kind])
    x, mask = tokens(7), padding()
    expected = attention.attention(x, key_padding_mask=mask)
    x = x if batch_first else x.transpose(0, 1)
    passed = torch.zeros(2, 7).masked_fill(mask, -torch.inf) if additive else mask
    o, weights = attention(x, x, x, key_padding_mask=passed)
    assert weights is None
    assert torch.equal(o if batch_first else o.transpose(0, 1), expected)


def test_multihead_attention_reads_a_context():
    attention = MultiheadAttention(DIM, HEADS, batch_first=True)
    x, context = tokens(3), tokens(7)
    o, _ = attention(x, context, context, padding())
    expected = attention.attention(x, context=context, key_padding_mask=padding())
    assert torch.equal(o, expected)


def test_multihead_attention_on_a_grid():
    attention = MultiheadAttention(DIM, HEADS, batch_first=True, shape=(2, 3), prefix=1)
    x = tokens(7)
    assert torch.equal(attention(x, x, x)[0], attention.attention(x, (2, 3), prefix=1))


def test_causal_multihead_attention_accepts_the_causal_mask_only():
    attention = MultiheadAttention(DIM, HEADS, batch_first=True, causal=True)
    x, mask = tokens(5), nn.Transformer.generate_square_subsequent_mask(5)
    expected = attention.attention(x)
    assert torch.equal(attention(x, x, x, attn_mask=mask, is_causal=True)[0], expected)
    assert torch.equal(attention(x, x, x, attn_mask=mask < 0)[0], expected)
    with pytest.raises(ValueError, match="attn_mask is not the causal mask"):
        attention(x, x, x, attn_mask=torch.zeros(5, 5))


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.1}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True},
        {"kdim": 8}, {"vdim": 8}, {"kind": "softmax"}, {"attention": LightNetAttention(8, 2)},
        {"attention": LightNetAttention(DIM, 3)}, {"attention": nn.Linear(DIM, DIM)},
    ],
)  # fmt: skip
def test_unsupported_options_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        MultiheadAttention(DIM, HEADS, **options)


def test_unsupported_calls_are_named():
    attention, x = MultiheadAttention(DIM, HEADS, batch_first=True), tokens(7)
    with pytest.raises(ValueError, match="the same tensor for both; add positions"):
        attention(x, x, x.clone())
    with pytest.raises(ValueError, match="attn_mask has shape"):
        attention(x, x, x, attn_mask=torch.zeros(7, 7))
    with pytest.raises(ValueError, match="is_causal is True"):
        attention(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match="query has shape"):
        attention(x[..., 1:], x, x)
    with pytest.raises(ValueError, match="key_padding_mask has values other than"):
        attention(x, x, x, torch.ones(2, 7))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_encoders_respect_padding(kind, training, replace):
    layer = encoder_layer()
    if replace:  # after construction, when nested tensors are enabled already
        encoder = nn.TransformerEncoder(layer, 2)
        names = replace_attention(encoder, kind)
        assert names == ["layers.0.self_attn", "layers.1.self_attn"]
    else:
        layer.self_attn = MultiheadAttention(DIM, HEADS, batch_first=True, kind=kind)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    encoder.train(training)
    x = tokens(7)
    with torch.set_grad_enabled(training):
        padded = encoder(x, src_key_padding_mask=padding())
        torch.testing.assert_close(padded[:, :5], encoder(x[:, :5]))
        torch.testing.assert_close(layer(x)[:, :5].shape, x[:, :5].shape)
    if training:
        padded[:, :5].sum().backward()
        grads = [p.grad for p in encoder.layers[0].self_attn.parameters()]
        assert all(grad is not None and grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("kind", KINDS)
def test_causal_torch_encoders_take_the_causal_mask(kind):
    encoder = nn.TransformerEncoder(encoder_layer(), 2)
    replace_attention(encoder, kind, causal=True)
    x, mask = tokens(7), nn.Transformer.generate_square_subsequent_mask(7)
    o = encoder.eval()(x, mask=mask, is_causal=True)
    torch.testing.assert_close(o[:, :4], encoder(x[:, :4]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_replaced_layers_keep_the_projections(kind, bias):
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, bias=bias).eval()
    old = layer.self_attn
    replace_attention(layer, kind)
    mixer = layer.self_attn.attention.mixer
    assert not layer.self_attn.training
    assert not layer.self_attn.batch_first
    assert torch.equal(mixer.in_proj.weight[: 3 * DIM], old.in_proj_weight)
    if bias:
        nn.init.normal_(old.in_proj_bias)
        model = nn.ModuleList([old, nn.ModuleList([old])])
        assert replace_attention(model, kind) == ["0", "1.0"]
        assert model[0] is model[1][0]  # a shared module stays shared
        copied = model[0].attention.mixer.in_proj.bias
        assert torch.equal(copied[: 3 * DIM], old.in_proj_bias)
    assert mixer.out_proj is old.out_proj


def test_models_without_supported_attention_are_unchanged():
    with pytest.raises(ValueError, match="model is a Linear without softmax attention"):
        replace_attention(nn.Linear(2, 2))
    model = nn.ModuleList([encoder_layer(), nn.MultiheadAttention(DIM, HEADS, kdim=8)])
    with pytest.raises(ValueError, match=r"1 \(MultiheadAttention\) has kdim"):
        replace_attention(model)
    assert isinstance(model[0].self_attn, nn.MultiheadAttention)


def test_an_attention_layer_itself_is_not_replaced():
    with pytest.raises(ValueError, match=r"itself an attention layer.*onescan\.nn\.Multihead"):
        replace_attention(nn.MultiheadAttention(DIM, HEADS))


@pytest.mark.parametrize("part", ["decoder", "decoder.layers.0", ""])
def test_decoders_of_torch_are_refused(part):
    model = nn.Transformer(DIM, HEADS, 1, 1, 16, batch_first=True)
    names = list(model.state_dict())
    with pytest.raises(ValueError, match="expected an encoder"):
        replace_attention(model.get_submodule(part))
    assert list(model.state_dict()) == names
    assert replace_attention(model.encoder) == ["layers.0.self_attn"]


SIZES = {
    "hidden_size": DIM, "num_attention_heads": HEADS, "num_hidden_layers": 2,
    "intermediate_size": 16, "hidden_dropout_prob": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_bert_respects_padding(kind, implementation):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(vocab_size=11, attn_implementation=implementation, **SIZES)
    model = transformers.BertModel(config)
    old = model.encoder.layer[1].attention.self
    names = replace_attention(model, kind)
    assert names == [f"encoder.layer.{i}.attention.self" for i in range(2)]
    mixer = model.encoder.layer[1].attention.self.attention.mixer
    weights = torch.cat([old.query.weight, old.key.weight, old.value.weight])
    assert torch.equal(mixer.in_proj.weight[: 3 * DIM], weights)
    ids = torch.randint(11, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    o = model(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(o[1:, :5], model(ids[1:, :5]).last_hidden_state)
    torch.testing.assert_close(o[:1], model(ids[:1]).last_hidden_state)
    o[mask.bool()].sum().backward()
    grads = [p.grad for p in mixer.parameters()]
    assert all(grad is not None and grad.isfinite().all() for grad in grads)


def test_sparse_attention_is_refused():
    """BigBird switches to other modules, and copies their queries, if a text is short."""
    transformers = pytest.importorskip("transformers")
    model = transformers.BigBirdModel(transformers.BigBirdConfig(vocab_size=11, **SIZES))
    with pytest.raises(ValueError, match="is sparse attention, whose module changes"):
        replace_attention(model)


def test_decoders_of_bert_are_refused():
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig(vocab_size=11, is_decoder=True, **SIZES))
    with pytest.raises(
        ValueError, match=r"encoder\.layer\.0\.attention\.self .* is part of a decoder"
    ):
        replace_attention(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grid", [{}, {"shape": (2, 3), "prefix": 1}])
def test_vit_is_replaced(kind, grid):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(image_size=(4, 6), patch_size=2, **SIZES)
    model = transformers.ViTModel(config)
    names = replace_attention(model, kind, **grid)
    assert len(names) == 2
    o = model(torch.randn(2, 3, 4, 6)).last_hidden_state
    assert o.shape == (2, 7, DIM)
    o.square().sum().backward()
    grads = [p.grad for p in model.get_submodule(names[0]).parameters()]
    assert all(grad is not None and grad.isfinite().all() for grad in grads)


class Attention(nn.Module):
    """Stand-in for timm's module, with its parts and the signature of its forward."""

    def __init__(self, gated=False, norm=False):
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        self.attn_drop = nn.Dropout(0.0)
        self.norm = nn.LayerNorm(DIM) if norm else nn.Identity()
        self.gate = nn.Linear(DIM, DIM) if gated else None
        self.proj = nn.Linear(DIM, DIM)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x, attn_mask=None, is_causal=False):
        return self.proj_drop(self.proj(self.qkv(x)[..., :DIM]))


class Separate(nn.Module):
    """Attention with separate projections, which takes any layers in addition."""

    def __init__(self, heads=HEADS, groups=HEADS, **layers):
        super().__init__()
        self.n_heads = heads
        self.q_proj = nn.Linear(DIM, DIM)
        self.k_proj, self.v_proj = (nn.Linear(DIM, DIM // heads * groups) for _ in range(2))
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(
        self, hidden_states, mask=None, head_mask=None, cache=None, output_attentions=False
    ):
        outputs = (hidden_states, mask) if output_attentions else (hidden_states,)
        return outputs  # noqa: RET504 - a name, as in earlier versions of transformers


def test_attention_of_timm_is_replaced():
    model, x = nn.ModuleDict({"attn": Attention()}), tokens(7)
    old = model["attn"]
    assert replace_attention(model) == ["attn"]
    new = model["attn"]
    assert new.attention.mixer.out_proj is old.proj
    assert torch.equal(new.attention.mixer.in_proj.weight[: 3 * DIM], old.qkv.weight)
    o = new(x, attn_mask=~padding()[:, None, None])
    torch.testing.assert_close(o[:, :5], new(x[:, :5]))
    with pytest.raises(ValueError, match="differs between queries"):
        new(x, attn_mask=torch.ones(2, 1, 7, 7, dtype=torch.bool).tril())
    with pytest.raises(ValueError, match="is_causal"):
        new(x, is_causal=True)


def test_a_norm_before_the_output_projection_is_kept():
    model = nn.ModuleDict({"attn": Attention(norm=True)})
    norm, proj = model["attn"].norm, model["attn"].proj
    replace_attention(model)
    assert list(model["attn"].attention.mixer.out_proj) == [norm, proj]


def test_separate_biases_are_copied():
    attention = Attention()
    attention.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
    attention.q_bias, attention.v_bias = (nn.Parameter(torch.randn(DIM)) for _ in range(2))
    model = nn.ModuleDict({"attn": attention})
    replace_attention(model)
    bias = model["attn"].attention.mixer.in_proj.bias[: 3 * DIM]
    assert torch.equal(bias, torch.cat([attention.q_bias, torch.zeros(DIM), attention.v_bias]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "groups"), [(3, 1), (6, 2), (6, 3)])
def test_grouped_keys_and_values_are_repeated(kind, heads, groups):
    source = Separate(heads, groups)
    model = nn.ModuleDict({"attn": source})
    replace_attention(model, kind)
    x = tokens(5)
    mixer = model["attn"].attention.mixer
    q, k, v = mixer.in_proj(x).split(mixer.in_widths, dim=-1)[:3]
    torch.testing.assert_close(q, source.q_proj(x))
    for ours, layer in ((k, source.k_proj), (v, source.v_proj)):
        grouped = layer(x).unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, dim=2)
        torch.testing.assert_close(ours, grouped.flatten(2))


@pytest.mark.parametrize("kind", KINDS)
def test_heads_need_not_divide_the_width(kind):
    attention = Separate(heads=5, out_proj=nn.Linear(15, DIM))
    attention.q_proj, attention.k_proj, attention.v_proj = (nn.Linear(DIM, 15) for _ in range(3))
    model = nn.ModuleDict({"attn": attention})
    replace_attention(model, kind)
    (o,) = model["attn"](tokens(7))
    assert o.shape == (2, 7, DIM)


def test_the_length_of_returned_tuples_is_that_without_weights():
    model = nn.ModuleDict({"attn": Separate()})
    replace_attention(model)
    x = tokens(7)
    (o,) = model["attn"](x, output_attentions=True)
    assert torch.equal(o, model["attn"].attention(x))


def test_calls_that_would_be_ignored_are_refused():
    model = nn.ModuleDict({"attn": Separate()})
    replace_attention(model)
    x = tokens(7)
    for name in ("cache", "head_mask", "past_key_values", "key_value_states", "cu_seq_lens_q"):
        with pytest.raises(ValueError, match=f"{name} was given"):
            model["attn"](x, **{name: torch.ones(2)})
    model["attn"](x, cache=None, past_key_values=None, output_attentions=False, training=True)
    with pytest.raises(ValueError, match="new attention is bidirectional; pass causal=True"):
        model["attn"](x, is_causal=True)
    with pytest.raises(ValueError, match="has values other than 0 and -inf"):
        model["attn"](x, mask=torch.randn(2, 1, 7, 7))
    causal = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"differs between queries.*causal=True"):
        model["attn"](x, mask=causal)


def test_causal_attention_takes_the_causal_mask_with_padding():
    model = nn.ModuleDict({"attn": Separate()})
    replace_attention(model, causal=True)
    x, real = tokens(7), ~padding()
    mask = torch.ones(7, 7, dtype=torch.bool).tril() & real[:, None, None]
    (o,) = model["attn"](x, mask=mask, is_causal=True)
    torch.testing.assert_close(o[:, :5], model["attn"](x[:, :5])[0])
    with pytest.raises(ValueError, match="expected a causal mask"):
        model["attn"](x, mask=torch.ones(1, 1, 7, 7, dtype=torch.bool))


REFUSED = {
    "also has the unknown layer gate": Attention(gated=True),
    "also has the unknown layer LayerNorm": Separate(LayerNorm=nn.LayerNorm(DIM)),
    "also has the unknown parameter gamma": Separate(gamma=nn.Parameter(torch.ones(DIM))),
    "attends within windows": Separate(window_size=7),
    "is part of a decoder": Separate(is_decoder=True),
    "is causal; pass causal=True to replace it": Separate(is_causal=True),
    "as cross-attention does": Separate(k_proj=nn.Linear(8, DIM), v_proj=nn.Linear(8, DIM)),
    "an nn.Linear is expected": Separate(q_proj=nn.Conv1d(DIM, DIM, 1)),
    "has no attribute for the number of heads": Separate(n_heads=None),
    "which cannot be split into 5 heads": Separate(n_heads=5),
    "of equal groups": Separate(heads=6, groups=4),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_attention_that_cannot_be_replaced_is_an_error(reason):
    model = nn.ModuleDict({"supported": encoder_layer(), "other": REFUSED[reason]})
    before = dict(model.named_modules())
    with pytest.raises(
        ValueError, match=rf"other \(\w+\) .*{re.escape(reason)}.*pass its name in exclude"
    ):
        replace_attention(model)
    assert dict(model.named_modules()) == before
    assert replace_attention(model, exclude=["other"]) == ["supported.self_attn"]


NAMES = {
    "transformers": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "bert": ("query", "key", "value"),
    "t5": ("q", "k", "v", "o"),
    "distilbert": ("q_lin", "k_lin", "v_lin", "out_lin"),
    "conformer": ("linear_q", "linear_k", "linear_v", "linear_out"),
    "diffusers": ("to_q", "to_k", "to_v"),
    "llama.c": ("wq", "wk", "wv", "wo"),
    "timm": ("qkv", "proj"),
    "modernbert": ("Wqkv", "Wo"),
    "phi3": ("qkv_proj", "o_proj"),
}


class AnyNames(nn.Module):
    def __init__(self, *names):
        super().__init__()
        self.heads = HEADS
        for name in names:
            setattr(self, name, nn.Linear(DIM, 3 * DIM if "qkv" in name else DIM))

    def forward(self, x):
        return x


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_layers_are_recognized_by_their_names(names):
    model = nn.ModuleDict({"attn": AnyNames(*names)})
    projected = [getattr(model["attn"], name).weight for name in names]
    out = getattr(model["attn"], names[-1])
    assert replace_attention(model) == ["attn"]
    mixer = model["attn"].attention.mixer
    has_out = len(names) % 2 == 0
    weights = torch.cat(projected[:-1] if has_out else projected)
    assert torch.equal(mixer.in_proj.weight[: 3 * DIM], weights)
    assert (mixer.out_proj is out) == has_out


@pytest.mark.parametrize(
    "names",
    [
        ("q", "kv"),
        ("qk", "v"),
        ("query_key_value", "dense"),
        ("query_proj", "key_proj", "value_proj", "pos_q"),
    ],
)
def test_projections_in_an_unknown_order_are_an_error(names):
    model = nn.ModuleDict({"supported": encoder_layer(), "other": AnyNames(*names)})
    with pytest.raises(ValueError, match=r"cannot be replaced: other \(AnyNames\)"):
        replace_attention(model)


def test_many_modules_that_cannot_be_replaced_are_counted():
    model = nn.ModuleList(Attention(gated=True) for _ in range(5))
    with pytest.raises(ValueError, match=r"0 .*; 1 .*; 2 \(Attention\) .*; and 2 more"):
        replace_attention(model)


def test_excluded_modules_stay():
    model = nn.ModuleList([encoder_layer(), nn.ModuleList([encoder_layer()]), encoder_layer()])
    with pytest.raises(ValueError, match="exclude contains '3', but the model has no module"):
        replace_attention(model, exclude=["3"])
    assert replace_attention(model, exclude=["0.self_attn", "1"]) == ["2.self_attn"]


@pytest.mark.parametrize("kind", KINDS)
def test_replaced_attention_is_not_left_attention(kind):
    model = nn.ModuleList([encoder_layer()])
    replace_attention(model, kind)
    model.append(encoder_layer())
    assert replace_attention(model, kind) == ["1.self_attn"]
