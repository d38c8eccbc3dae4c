"""Language models of transformers, converted: equal scores, and errors for the rest."""

import pytest
import torch
from test_convert_vision import randomized

from onescan.integrations.weights import SOURCES, convert_model, read

transformers = pytest.importorskip("transformers")
GPT2 = {"vocab_size": 31, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
BERT = {
    "vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 40, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def gpt2(**changes):
    return randomized(transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | changes)))


def bert(kind="ForMaskedLM", **changes):
    model = getattr(transformers, f"Bert{kind}")(transformers.BertConfig(**BERT | changes))
    return randomized(model)


def roberta(kind="Roberta", **changes):
    config = getattr(transformers, f"{kind}Config")(**BERT | {"pad_token_id": 3} | changes)
    return randomized(getattr(transformers, f"{kind}ForMaskedLM")(config))


def distilbert(**changes):
    sizes = {"vocab_size": 31, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40}
    config = transformers.DistilBertConfig(**{**sizes, "max_position_embeddings": 16, **changes})
    return randomized(transformers.DistilBertForMaskedLM(config))


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "changes", [{}, {"n_inner": 40, "activation_function": "relu", "tie_word_embeddings": False}]
)
def test_gpt2_has_equal_scores_and_generates_the_same(changes):
    model, tokens = gpt2(**changes), torch.randint(31, (2, 9))
    native = convert_model(read(model))
    with torch.no_grad():
        assert_close(native(tokens)[0], model(tokens).logits)
        head, state = native(tokens[:, :4])
        tail, _ = native(tokens[:, 4:], state)
        assert_close(torch.cat([head, tail], dim=1), model(tokens).logits)
    written = model.generate(tokens, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(native.generate(tokens, max_new_tokens=5), written[:, 9:])


def test_bert_has_equal_scores_with_padding_and_segments():
    model, tokens = bert(), torch.randint(31, (2, 9))
    native = convert_model(read(model))
    keep = torch.arange(9) < torch.tensor([[9], [6]])
    segments = torch.randint(2, (2, 9))
    with torch.no_grad():
        expected = model(tokens, attention_mask=keep.long(), token_type_ids=segments).logits
        assert_close(native(tokens, keep, segments=segments)[keep], expected[keep])
        assert_close(native(tokens), model(tokens).logits)


@pytest.mark.parametrize("kind", ["Roberta", "XLMRoberta", "Camembert"])
def test_roberta_has_equal_scores_with_padding_and_segments(kind):
    model, tokens = roberta(kind), torch.randint(4, 31, (2, 9))
    native = convert_model(read(model))
    assert native.config.position.max_tokens == 16 - 4  # positions begin after the padding's id
    keep = torch.arange(9) < torch.tensor([[9], [6]])
    tokens = tokens.masked_fill(~keep, 3)
    segments = torch.randint(2, (2, 9))
    with torch.no_grad():
        expected = model(tokens, attention_mask=keep.long(), token_type_ids=segments).logits
        assert_close(native(tokens, keep, segments=segments)[keep], expected[keep])


@pytest.mark.parametrize("changes", [{}, {"sinusoidal_pos_embds": True}])
def test_distilbert_has_equal_scores_with_padding(changes):
    model, tokens = distilbert(**changes), torch.randint(31, (2, 9))
    native = convert_model(read(model))
    keep = torch.arange(9) < torch.tensor([[9], [6]])
    with torch.no_grad():
        expected = model(tokens, attention_mask=keep.long()).logits
        assert_close(native(tokens, keep)[keep], expected[keep])


@pytest.mark.parametrize("build", [gpt2, bert, roberta])
def test_folders_are_read_with_the_names_of_older_versions(build, tmp_path):
    model, tokens = build(), torch.randint(4, 31, (2, 9))  # no padding of RoBERTa
    model.save_pretrained(tmp_path)
    foreign = read(tmp_path)
    old = {r"^transformer\.": "", r"LayerNorm\.weight": "LayerNorm.gamma"}
    older = foreign.tensors.renamed({**old, r"LayerNorm\.bias": "LayerNorm.beta"})
    for tensors in (foreign.tensors, older):
        native = convert_model(type(foreign)(fields=foreign.fields, tensors=tensors))
        with torch.no_grad():
            scores = native(tokens)
            scores = scores[0] if isinstance(scores, tuple) else scores
            assert_close(scores, model(tokens).logits)


def test_the_pooler_of_bert_is_dropped():
    model, tokens = bert("ForPreTraining"), torch.randint(31, (2, 9))
    with torch.no_grad():
        assert_close(convert_model(read(model))(tokens), model(tokens).prediction_logits)


@pytest.mark.parametrize(
    ("build", "changes", "message"),
    [
        (gpt2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is Tr"),
        (gpt2, {"embd_pdrop": 0.3}, "embd_pdrop is 0.3 in the source's config, expected 0.1"),
        (bert, {"hidden_act": "relu"}, "hidden_act is 'relu' in the source's config"),
        (bert, {"is_decoder": True}, "is_decoder is True in the source's config"),
        (roberta, {"hidden_act": "relu"}, "hidden_act is 'relu' in the source's config"),
        (distilbert, {"activation": "relu"}, "hidden_act is 'relu' in the source's config"),
    ],
)
def test_settings_that_are_not_supported_are_named(build, changes, message):
    with pytest.raises(ValueError, match=message):
        convert_model(read(build(**changes)))


def test_models_without_the_head_are_refused():
    with pytest.raises(ValueError, match="no head that predicts masked tokens, expected"):
        convert_model(read(transformers.RobertaModel(transformers.RobertaConfig(**BERT))))
    with pytest.raises(ValueError, match="no head that predicts masked tokens, expected a BertFor"):
        convert_model(read(bert("Model")))


@pytest.mark.parametrize("kind", ["GPT2", "Bert", "Roberta", "DistilBert"])
def test_configs_may_omit_defaults(kind):
    theirs = getattr(transformers, f"{kind}Config")().to_dict()
    (source,) = (source for source in SOURCES if f"transformers {kind}" in source.name)
    assert {name: theirs[name] for name in source.defaults} == source.defaults
