"""Language models in transformers: the same numbers, saved, loaded, generating, resized."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_language_models import (
    BOTH,
    CAUSAL,
    SMALL,
    TOKENS,
    VOCABULARY,
    built,
    causal,
    ids,
    masked,
    over_all_causal,
    over_both,
    over_causal,
    padded,
)
from torch.nn.functional import cross_entropy, pad
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    DynamicCache,
)
from transformers.generation import configuration_utils

import onescan
from onescan.configs import to_dict
from onescan.integrations.transformers import (
    OnescanTextConfig,
    StateCache,
    load_pretrained,
    to_transformers,
)
from onescan.integrations.transformers.modeling import CACHE
from onescan.layers.decays import FixedDecayConfig
from onescan.layers.mixers import (
    HGRNMixerConfig,
    LightNetMixerConfig,
    LionMixerConfig,
    Mamba2MixerConfig,
)
from onescan.models.sequence_classifier import SequenceClassifierConfig

GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": None}
LENGTHS = (4, 1, 9)


def classifier(change, **more):
    return built(SequenceClassifierConfig(**{**SMALL, "num_classes": 3, **change, **more}))


def saved(model, folder, **options):
    model.save_pretrained(folder, **options)
    return folder


@pytest.fixture
def lightnet():
    return to_transformers(causal(CAUSAL["lightnet"]))


@pytest.mark.sampled
@over_causal
def test_a_causal_model_comes_back_with_the_same_scores(change, tmp_path):
    native, tokens = causal(change), ids(2, TOKENS)
    want, _ = native(tokens)
    folder = saved(to_transformers(native), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert_close(model(tokens).logits, want)
    assert model.lm_head.weight is model.network.embedding.weight
    assert_close(model.to_onescan()(tokens)[0], want)
    assert_close(AutoModel.from_pretrained(folder)(tokens)[0], native.network(tokens)[0])
    for name, weight in native.state_dict().items():
        assert torch.equal(model.to_onescan().state_dict()[name], weight), name


@pytest.mark.sampled(3)
@over_both
def test_a_masked_model_comes_back_with_the_same_scores(change, tmp_path):
    native, tokens = masked(change), ids(2, TOKENS)
    folder = saved(to_transformers(native), tmp_path)
    model = AutoModelForMaskedLM.from_pretrained(folder)
    assert_close(model(tokens).logits, native(tokens))
    assert model.lm_head.scores.weight is model.network.embedding.weight
    assert_close(model.to_onescan()(tokens), native(tokens))


@pytest.mark.sampled(3)
@over_both
def test_a_classifier_comes_back_with_the_same_scores(change, tmp_path):
    native, tokens = classifier(change), ids(2, TOKENS)
    names = {0: "bad", 1: "fair", 2: "good"}
    folder = saved(to_transformers(native, id2label=names), tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert_close(model(tokens).logits, native(tokens))
    assert_close(model.to_onescan()(tokens), native(tokens))
    assert model.config.id2label == names


def test_a_model_in_several_files_comes_back(lightnet, tmp_path):
    saved(lightnet, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert not list(tmp_path.glob("*.bin"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(again(ids(2, 5)).logits, lightnet(ids(2, 5)).logits)


def test_untied_heads_stay_apart(tmp_path):
    native = causal(CAUSAL["lightnet"], tie_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(saved(to_transformers(native), tmp_path))
    assert model.lm_head.weight is not model.network.embedding.weight
    assert_close(model(ids(2, 5)).logits, native(ids(2, 5))[0])


def test_untied_heads_of_masked_models_stay_apart(tmp_path):
    native = masked(BOTH["lion"], tie_embeddings=False)
    model = AutoModelForMaskedLM.from_pretrained(saved(to_transformers(native), tmp_path))
    assert model.lm_head.scores.weight is not model.network.embedding.weight
    assert_close(model(ids(2, 5)).logits, native(ids(2, 5)))
    assert_close(load_pretrained(str(tmp_path))(ids(2, 5)), native(ids(2, 5)))
    again = model.to_onescan()
    assert not again.config.tie_embeddings
    for name, weight in native.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


def test_a_model_loads_in_another_precision(lightnet, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved(lightnet, tmp_path), dtype=torch.bfloat16)
    logits = model(ids(2, 5)).logits
    assert logits.dtype == torch.bfloat16
    assert_close(logits.double(), lightnet(ids(2, 5)).logits, atol=0.3, rtol=0.1)


def test_a_config_is_made_from_names_that_transformers_has():
    config = AutoConfig.for_model("onescan_text", vocab_size=13, hidden_size=24)
    assert (config.vocab_size, config.width) == (13, 24)
    config.num_hidden_layers = 1
    config.mixer = {**config.mixer, "num_heads": 3}
    model = AutoModelForCausalLM.from_config(config)
    assert model(ids(1, 3)).logits.shape == (1, 3, 13)
    assert len(model.network.blocks) == 1
    with pytest.raises(ValueError, match=r"mixer\.num_heads is 'many', expected int"):
        OnescanTextConfig(mixer={"type": "LightNetMixerConfig", "num_heads": "many"})


def test_what_a_config_cannot_be_is_refused():
    with pytest.raises(ValueError, match="mixer is not causal"):
        AutoModelForCausalLM.from_config(
            OnescanTextConfig.from_onescan(masked(BOTH["lion"]).config)
        )
    with pytest.raises(ValueError, match="model is a Linear, expected one of CausalLM, MaskedLM,"):
        to_transformers(torch.nn.Linear(2, 2))


@pytest.mark.sampled(2)
@over_causal
def test_cached_and_uncached_scores_are_equal_at_every_cut(change):
    model, tokens = to_transformers(causal(change)), ids(2, TOKENS)
    want = model(tokens).logits
    for cut in range(1, TOKENS):
        first = model(tokens[:, :cut])
        rest = model(tokens[:, cut:], past_key_values=first.past_key_values)
        assert_close(first.logits, want[:, :cut])
        assert_close(rest.logits, want[:, cut:])
        assert rest.past_key_values.get_seq_length() == TOKENS


@pytest.mark.sampled(2)
@over_all_causal
def test_generate_writes_what_the_model_itself_writes(change):
    native, tokens = causal(change), ids(2, 4)
    model = to_transformers(native)
    want = torch.cat([tokens, native.generate(tokens, max_new_tokens=6)], dim=1)
    assert torch.equal(model.generate(tokens, **GREEDY), want)
    assert torch.equal(model.generate(tokens, use_cache=False, **GREEDY), want)
    assert torch.equal(model.generate(tokens, prefill_chunk_size=3, **GREEDY), want)


@pytest.mark.sampled(5)
@over_causal
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_score(change, side):
    model, tokens = to_transformers(causal(change)), ids(3, TOKENS)
    rows, keep = padded(tokens, LENGTHS, side)
    together = model(rows, attention_mask=keep.long())
    for got, real, row, n in zip(together.logits, keep, tokens, LENGTHS, strict=True):
        assert_close(got[real], model(row[None, :n]).logits[0])


@pytest.mark.sampled(2)
@over_all_causal
def test_texts_of_several_lengths_are_continued_together(change):
    model, tokens = to_transformers(causal(change)), ids(3, TOKENS)
    rows, keep = padded(tokens, LENGTHS, "left")
    together = model.generate(rows, attention_mask=keep.long(), **GREEDY)[:, TOKENS:]
    for got, row, n in zip(together, tokens, LENGTHS, strict=True):
        assert torch.equal(got, model.generate(row[None, :n], **GREEDY)[0, n:])


@pytest.mark.sampled(2)
@over_causal
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5}],
    ids=["one of three", "two of four"],
)
def test_beams_carry_their_own_states(change, options):
    model, tokens = to_transformers(causal(change)), ids(2, 4)
    got = model.generate(tokens, **GREEDY, **options)
    assert torch.equal(got, model.generate(tokens, use_cache=False, **GREEDY, **options))
    assert not torch.equal(got[:2], model.generate(tokens, **GREEDY)) or len(got) > 2


def test_sampling_is_as_the_seed_says(lightnet):
    options = {**GREEDY, "do_sample": True, "top_k": 5, "temperature": 1.5}
    runs = []
    for use_cache in (True, True, False):
        torch.manual_seed(4)
        written = lightnet.generate(
            ids(2, 4), use_cache=use_cache, num_return_sequences=3, **options
        )
        runs.append(written)
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
    assert len(runs[0].unique(dim=0)) > 2


@pytest.mark.sampled(2)
@over_causal
def test_a_conversation_goes_on_from_the_cache_that_generate_returned(change):
    model = to_transformers(causal(change))
    first = model.generate(ids(2, 4), return_dict_in_generate=True, **GREEDY)
    assert isinstance(first.past_key_values, StateCache)
    asked = torch.cat([first.sequences, ids(2, 3, seed=8)], dim=1)
    again = model.generate(asked, **{CACHE: first.past_key_values}, **GREEDY)
    assert torch.equal(again, model.generate(asked, **GREEDY))


def test_a_cache_can_be_emptied_and_its_rows_chosen(lightnet):
    tokens, more = ids(2, 5), ids(2, 3, seed=2)
    cache = lightnet(tokens).past_key_values
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    want = lightnet(torch.cat([tokens, more], dim=1)[[1, 0]]).logits[:, 5:]
    assert_close(lightnet(more[[1, 0]], past_key_values=cache).logits, want)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_close(lightnet(tokens, past_key_values=cache).logits, lightnet(tokens).logits)


def test_a_cache_has_one_layer_per_block(lightnet):
    cache = lightnet(ids(2, 5)).past_key_values
    assert len(cache.layers) == lightnet.config.num_hidden_layers
    assert [layer.get_seq_length() for layer in cache.layers] == [5, 5]
    given = StateCache()
    lightnet(ids(2, 5), past_key_values=given)
    assert len(given.layers) == 2
    assert all(layer.is_croppable for layer in cache.layers)


@pytest.mark.sampled(2)
@over_all_causal
@pytest.mark.parametrize("embedded", [False, True], ids=["ids", "embeddings"])
def test_a_cropped_cache_continues_as_if_the_removed_tokens_were_never_read(change, embedded):
    model, tokens = to_transformers(causal(change)), ids(3, TOKENS)
    other = ids(3, TOKENS, seed=5)
    keep = padded(tokens, LENGTHS, "left")[1].long()
    cut = 4
    for kept in range(cut, TOKENS):
        cache = model(tokens[:, :cut], attention_mask=keep[:, :cut]).past_key_values
        rest = tokens[:, cut:]
        given = (
            {"inputs_embeds": model.get_input_embeddings()(rest)}
            if embedded
            else {"input_ids": rest}
        )
        model(**given, attention_mask=keep, past_key_values=cache)
        cache.crop(kept - TOKENS)
        assert cache.get_seq_length() == kept
        cache.batch_select_indices(torch.tensor([2, 1]))
        mixed = torch.cat([tokens[:, :kept], other[:, kept:]], dim=1)[[2, 1]]
        mask = torch.cat([keep[:, :kept], torch.ones_like(keep[:, kept:])], dim=1)[[2, 1]]
        got = model(mixed[:, kept:], attention_mask=mask, past_key_values=cache)
        want = model(mixed, attention_mask=mask)
        assert_close(got.logits, want.logits[:, kept:])
        assert cache.get_seq_length() == TOKENS


@pytest.mark.sampled(3)
@over_causal
def test_tokens_read_one_at_a_time_are_removed_down_to_the_snapshot(change):
    model, tokens = to_transformers(causal(change)), ids(2, TOKENS)
    want = model(tokens).logits
    cache = model(tokens[:, :3]).past_key_values
    for t in range(3, TOKENS):
        model(ids(2, 1, seed=t), past_key_values=cache)
    cache.crop(-2)
    cache.crop(2)  # the number of tokens to keep
    assert_close(model(tokens[:, 2:4], past_key_values=cache).logits, want[:, 2:4])
    with pytest.raises(ValueError, match="to 1 tokens: it has read 4 and keeps a snapshot at 2"):
        cache.crop(-3)
    cache.crop(-2)
    assert_close(model(tokens[:, 2:], past_key_values=cache).logits, want[:, 2:])
    cache.crop(0)
    with pytest.raises(ValueError, match=f"to {TOKENS - 1} tokens: it has read {TOKENS}"):
        cache.crop(-1)


# transformers 5.0 needs an end-of-text token for prompt lookup
ASSISTED = {**GREEDY, "max_new_tokens": 12, "eos_token_id": -1, "pad_token_id": 0}


@pytest.mark.sampled
@over_causal
def test_an_assistant_changes_no_token(change):
    model, tokens = to_transformers(causal(change)), ids(1, 7)
    assistants = [model, to_transformers(causal(CAUSAL["lion"]))]
    masks = [torch.ones_like(tokens), torch.tensor([[0, 0, 1, 1, 1, 1, 1]])]
    for mask, assistant in zip(masks, assistants, strict=True):
        want = model.generate(tokens, attention_mask=mask, **ASSISTED)
        got = model.generate(tokens, attention_mask=mask, assistant_model=assistant, **ASSISTED)
        assert torch.equal(got, want)


@pytest.mark.sampled
@over_causal
def test_prompt_lookup_changes_no_token(change):
    model, tokens = to_transformers(causal(change)), ids(1, 5).repeat(1, 2)
    for mask in (torch.ones_like(tokens), (torch.arange(10) >= 3)[None].long()):
        want = model.generate(tokens, attention_mask=mask, **ASSISTED)
        got = model.generate(tokens, attention_mask=mask, prompt_lookup_num_tokens=3, **ASSISTED)
        assert torch.equal(got[:, : want.shape[1]], want)  # transformers 5.0 may add a token


def test_assisted_generation_reads_several_tokens_per_call(lightnet):
    calls = []
    lightnet.register_forward_pre_hook(
        lambda _, __, options: calls.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    assistant = to_transformers(lightnet.to_onescan())
    assistant.generation_config.assistant_confidence_threshold = 0
    first = lightnet.generate(
        ids(1, 4), assistant_model=assistant, return_dict_in_generate=True, **ASSISTED
    )
    assert len(calls) < 4  # the assistant is always right
    more = torch.cat([first.sequences, ids(1, 3, seed=8)], dim=1)
    again = lightnet.generate(more, **{CACHE: first.past_key_values}, **GREEDY)
    assert torch.equal(again, lightnet.generate(more, **GREEDY))


@pytest.mark.parametrize(
    "kind", {"dynamic", "dynamic_full"} & set(configuration_utils.DYNAMIC_CACHE_IMPLEMENTATIONS)
)
def test_a_dynamic_cache_is_the_default_state(lightnet, kind):
    want = lightnet.generate(ids(1, 5), **GREEDY)
    got = lightnet.generate(ids(1, 5), cache_implementation=kind, **GREEDY)
    assert torch.equal(got, want)


def test_what_a_state_cannot_do_is_refused(lightnet):
    cache = lightnet(ids(1, 5)).past_key_values
    cache.crop(torch.tensor(-2))  # as assisted generation of transformers 5.14 does
    assert cache.get_seq_length() == 3
    with pytest.raises(ValueError, match="cannot be cropped to -2 tokens: it has read 3"):
        cache.crop(-5)
    with pytest.raises(ValueError, match="past_key_values is a DynamicCache, expected the StateC"):
        lightnet(ids(1, 5), past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="cache_implementation is 'static', expected None or 'dy"):
        lightnet.generate(ids(1, 5), cache_implementation="static", **GREEDY)
    other = to_transformers(causal(CAUSAL["lightnet"], depth=3))
    with pytest.raises(ValueError, match="state is from a model with 2 blocks, expected 3"):
        other(ids(1, 1), past_key_values=lightnet(ids(1, 5)).past_key_values)
    encoder = AutoModel.from_config(OnescanTextConfig.from_onescan(masked(BOTH["lion"]).config))
    with pytest.raises(ValueError, match="past_key_values was given to a bidirectional model"):
        encoder(ids(1, 5), past_key_values=cache)


def test_the_config_enables_gradient_checkpointing():
    config = to_transformers(causal(CAUSAL["lightnet"])).config
    config.gradient_checkpointing = True
    model, calls = AutoModelForCausalLM.from_config(config).train(), []
    for block in model.network.blocks:
        block.mixer.register_forward_hook(lambda *_: calls.append(1))
    model(ids(2, 5), labels=ids(2, 5)).loss.backward()
    assert len(calls) == 4  # twice per block
    assert not hasattr(model.config, "gradient_checkpointing")


def test_a_state_is_not_returned_where_none_is_wanted(lightnet):
    assert lightnet(ids(1, 5), use_cache=False).past_key_values is None
    assert lightnet.train()(ids(1, 5)).past_key_values is None


def test_the_last_scores_alone(lightnet):
    whole = lightnet(ids(2, 5)).logits
    assert_close(lightnet(ids(2, 5), logits_to_keep=2).logits, whole[:, 3:])
    places = torch.tensor([0, 4])
    assert_close(lightnet(ids(2, 5), logits_to_keep=places).logits, whole[:, places])


def test_vectors_stand_for_tokens(lightnet):
    tokens = ids(2, 5)
    vectors = lightnet.get_input_embeddings()(tokens)
    assert torch.equal(lightnet(inputs_embeds=vectors).logits, lightnet(tokens).logits)


def test_hidden_states_are_those_between_the_blocks(lightnet):
    tokens, network = ids(2, 5), lightnet.network
    out = lightnet(tokens, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    assert torch.equal(lightnet.lm_head(out.hidden_states[-1]), out.logits)
    x, _ = network.position(network.embedding(tokens), onescan.Grid((5,)), None, None)
    assert torch.equal(out.hidden_states[0], x)
    x, _ = network.blocks[0](x, onescan.Grid((5,)))
    assert torch.equal(out.hidden_states[1], x)
    assert lightnet(tokens).hidden_states is None


@pytest.mark.slow
def test_losses_are_cross_entropies():
    tokens = ids(2, 5)
    model = to_transformers(causal(CAUSAL["lightnet"]))
    out = model(tokens, labels=tokens)
    want = cross_entropy(out.logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
    assert_close(out.loss, want.float())
    encoder = to_transformers(masked(BOTH["lion"]))
    labels = tokens.masked_fill(torch.arange(5) % 2 == 0, -100)
    out = encoder(tokens, labels=labels)
    want = cross_entropy(out.logits.reshape(-1, VOCABULARY), labels.reshape(-1))
    assert_close(out.loss, want.float())


@pytest.mark.parametrize(
    ("problem", "labels"),
    [
        ("single_label_classification", torch.tensor([2, 0])),
        ("multi_label_classification", torch.tensor([[1.0, 0, 1], [0, 0, 1]])),
        ("regression", torch.tensor([[0.5, 0, 1], [0, 2, 1]])),
    ],
    ids=["one class", "several classes", "numbers"],
)
def test_a_classifier_learns_each_kind_of_label(problem, labels):
    model = to_transformers(classifier(BOTH["bert"]), problem_type=problem)
    labels = labels.double() if labels.is_floating_point() else labels
    out = model(ids(2, 5), labels=labels)
    losses = {
        "single_label_classification": cross_entropy,
        "multi_label_classification": torch.nn.functional.binary_cross_entropy_with_logits,
        "regression": torch.nn.functional.mse_loss,
    }
    assert_close(out.loss, losses[problem](out.logits, labels))


def test_segments_count_where_a_model_tells_them_apart():
    tokens, segments = ids(2, 6), torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    for name, differ in (("bert", True), ("lion", False)):
        native = classifier(BOTH[name])
        model = to_transformers(native)
        scores = model(tokens, token_type_ids=segments).logits
        assert torch.equal(scores, model(tokens).logits) != differ
        if differ:
            assert torch.equal(scores, native(tokens, segments=segments))


def test_a_classifier_begins_from_a_masked_model(tmp_path):
    native = masked(BOTH["lion"], init_std=0.02)
    saved(to_transformers(native), tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=4)
    for name, weight in native.network.named_parameters():
        assert torch.equal(model.network.get_parameter(name), weight), name
    head = model.classifier.scores
    assert head.weight.shape == (4, 24)
    assert 0.01 < head.weight.std() < 0.03
    assert not head.bias.any()
    assert not torch.equal(model.classifier.transform.weight, native.head.transform.weight)


def test_what_a_checkpoint_lacks_is_as_in_a_fresh_model(lightnet, tmp_path):
    saved(lightnet, tmp_path)
    deeper = AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=3, dtype="float32")
    assert len(deeper.network.blocks) == 3
    fresh = AutoModelForCausalLM.from_config(deeper.config).network.blocks[2]
    for name, weight in deeper.network.blocks[2].named_parameters():
        like = fresh.get_parameter(name)
        assert (weight.std() > 0) == (like.std() > 0), name
        assert_close(weight.abs().mean(), like.abs().mean(), rtol=0.5, atol=0.02)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [20, 9], ids=["larger", "smaller"])
@pytest.mark.parametrize("tie_embeddings", [True, False], ids=["tied", "untied"])
def test_a_vocabulary_can_grow_and_shrink(size, tie_embeddings, tmp_path):
    model = to_transformers(causal(CAUSAL["lightnet"], tie_embeddings=tie_embeddings))
    tokens = ids(2, 5) % 9
    want = model(tokens).logits
    model.resize_token_embeddings(size, mean_resizing=False)
    got = model(tokens).logits
    both = min(size, VOCABULARY)
    assert_close(got[..., :both], want[..., :both])
    assert got.shape[-1] == model.config.vocab_size == size
    assert (model.lm_head.weight is model.network.embedding.weight) == tie_embeddings
    with pytest.raises(ValueError, match=f"expected 0 to {size - 1}"):
        model(torch.tensor([[size]]))
    again = AutoModelForCausalLM.from_pretrained(saved(model, tmp_path))
    assert_close(again(tokens).logits, got)
    assert_close(again.to_onescan()(tokens)[0], got)


@pytest.mark.parametrize("head", ["lm_head.weight", "lm_head.scores.weight"])
def test_a_missing_tied_weight_is_reported_and_initialized(head, tmp_path):
    is_causal = head == "lm_head.weight"
    native = causal(CAUSAL["lightnet"]) if is_causal else masked(BOTH["lion"])
    saved(to_transformers(native), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.network.embedding.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    auto = AutoModelForCausalLM if is_causal else AutoModelForMaskedLM
    model, found = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert found["missing_keys"] == {"model.network.embedding.weight", head}
    embedding = model.network.embedding.weight
    assert model.get_output_embeddings().weight is embedding
    assert embedding.device.type == "cpu"
    assert 0 < embedding.std() < 1
    with pytest.raises(ValueError, match=r"has 2 missing weights, such as lm_head\."):
        load_pretrained(str(tmp_path))


@pytest.mark.parametrize("initialize", ["post_init", "init_weights"])
def test_a_resized_untied_head_keeps_its_weights(initialize):
    model = to_transformers(causal(CAUSAL["lightnet"], tie_embeddings=False))
    model.resize_token_embeddings(20, mean_resizing=False)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    getattr(model, initialize)()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name


@pytest.mark.parametrize("tie_embeddings", [True, False], ids=["tied", "untied"])
def test_a_masked_models_vocabulary_can_grow(tie_embeddings, tmp_path):
    model = to_transformers(masked(BOTH["lion"], tie_embeddings=tie_embeddings))
    want = model(ids(2, 5)).logits
    model.resize_token_embeddings(20, mean_resizing=False)
    got = model(ids(2, 5)).logits
    assert_close(got[..., :VOCABULARY], want)
    assert (model.lm_head.scores.weight is model.network.embedding.weight) == tie_embeddings
    again = AutoModelForMaskedLM.from_pretrained(saved(model, tmp_path))
    assert_close(again(ids(2, 5)).logits, got)


def test_positions_that_begin_anew_are_texts_of_their_own(lightnet):
    tokens, positions = ids(1, 7), torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    out = lightnet(tokens, position_ids=positions)
    assert_close(out.logits[:, :3], lightnet(tokens[:, :3]).logits)
    assert_close(out.logits[:, 3:], lightnet(tokens[:, 3:]).logits)
    assert out.past_key_values is None
    for lengths in ([1, 6], [1, 1, 5], [3, 1, 3], [1] * 7):  # also texts of one token
        parts = tokens.split(lengths, dim=1)
        row = torch.cat([torch.arange(n) for n in lengths])[None]
        want = torch.cat([lightnet(part).logits for part in parts], dim=1)
        assert_close(lightnet(tokens, position_ids=row).logits, want)
    plain = lightnet(tokens, position_ids=torch.arange(7)[None])
    assert_close(plain.logits, lightnet(tokens).logits)
    with pytest.raises(ValueError, match="documents and state were given together"):
        lightnet(tokens, position_ids=positions, past_key_values=plain.past_key_values)


def test_texts_stay_apart_with_padding_between_them(lightnet):
    tokens = ids(1, 9)
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 1, 1, 0, 1, 2, 3]])
    got = lightnet(tokens, attention_mask=mask, position_ids=positions).logits
    assert_close(got[:, :3], lightnet(tokens[:, :3]).logits)
    assert_close(got[:, 5:], lightnet(tokens[:, 5:]).logits)
    mask, positions = torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([[1, 1, 0, 1, 2]])
    padded_left = lightnet(tokens[:, :5], attention_mask=mask, position_ids=positions)
    assert_close(padded_left.logits[:, 2:], lightnet(tokens[:, 2:5]).logits)
    assert padded_left.past_key_values is not None


def test_a_config_that_says_what_the_model_is_not_is_refused():
    native = causal(CAUSAL["lightnet"])
    for fields in ({"depth": 1}, {"tie_word_embeddings": False}, {"vocab_size": 70}):
        with pytest.raises(ValueError, match="but the model's is"):
            to_transformers(native, **fields)


@pytest.mark.parametrize(
    ("mixer", "names"),
    [
        (Mamba2MixerConfig(num_heads=3, direction="forward", key_width=4), {"log_rate", "dt_bias"}),
        (
            LightNetMixerConfig(num_heads=3, direction="forward", leak=(2.0, 64.0)),
            {"theta", "log_leak"},
        ),
        (LionMixerConfig(num_heads=3, direction="forward", decay=FixedDecayConfig()), {"logit"}),
        (HGRNMixerConfig(num_heads=3, direction="forward"), {"theta", "logits"}),
    ],
)
def test_decays_keep_their_precision(mixer, names, tmp_path):
    whole = to_transformers(causal({"mixer": mixer, "position": None}))
    path = saved(whole, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    wide = {n.rpartition(".")[2] for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert wide == names
    want = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32:
            assert torch.equal(parameter, want[name].float())
    assert model.generate(ids(2, 4), **GREEDY).shape == (2, 10)


def test_angles_keep_their_precision(lightnet, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved(lightnet, tmp_path), dtype=torch.bfloat16)
    assert model.network.blocks[0].mixer.theta.dtype == torch.float32
    assert model.network.blocks[0].mixer.in_proj.weight.dtype == torch.bfloat16
    out = model.generate(ids(2, 4), **GREEDY)
    assert out.shape == (2, 10)
    fresh = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    mixer = fresh.network.blocks[0].mixer
    assert mixer.in_proj.weight.dtype == torch.bfloat16
    assert torch.equal(mixer.theta, type(fresh)(model.config).network.blocks[0].mixer.theta)


def test_a_config_may_be_given_as_onescans_own():
    mixer = CAUSAL["lightnet"]["mixer"]
    config = OnescanTextConfig(mixer=mixer, width=24)
    assert config.mixer == {"type": "LightNetMixerConfig", **to_dict(mixer)}


def test_bad_input_is_refused(lightnet):
    with pytest.raises(ValueError, match="tokens contains ids from 0 to 13, expected 0 to 12"):
        lightnet(torch.tensor([[0, 13]]))
    with pytest.raises(ValueError, match="T is 0"):
        lightnet(torch.zeros(1, 0, dtype=torch.long))
    for shape in ((1, 5), (2, 4)):
        with pytest.raises(ValueError, match=r"attention_mask has shape .*, expected 2 rows and 5"):
            lightnet(ids(2, 5), attention_mask=torch.ones(shape))
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 1, 5, 5\)"):
        lightnet(ids(2, 5), attention_mask=torch.ones(2, 1, 5, 5))
    with pytest.raises(ValueError, match="expected one of input_ids and inputs_embeds, but"):
        lightnet()
    with pytest.raises(ValueError, match="output_attentions is True, but no attention matrix"):
        lightnet(ids(1, 5), output_attentions=True)
    with pytest.raises(ValueError, match=r"position_ids has shape \(1, 4\), expected \(1, 5\)"):
        lightnet(ids(1, 5), position_ids=torch.arange(4)[None])
    with pytest.raises(ValueError, match="x has width 5, expected 24"):
        lightnet(inputs_embeds=torch.zeros(1, 3, 5, dtype=torch.float64))
    judge = to_transformers(classifier(BOTH["lion"]))
    with pytest.raises(ValueError, match="position_ids restart within a row, but there is one"):
        judge(ids(1, 4), position_ids=torch.tensor([[0, 1, 0, 1]]))


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModelForMaskedLM])
def test_the_base_model_reads_tokens(auto, tmp_path):
    native = causal(CAUSAL["lightnet"]) if auto is AutoModelForCausalLM else masked(BOTH["lion"])
    model = to_transformers(native)
    base, tokens = getattr(model, model.base_model_prefix), ids(2, 5)
    assert base is model.base_model is not model
    assert base.config is model.config
    out = base(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    assert torch.equal(out.last_hidden_state, native.network(tokens)[0])
    assert torch.equal(model.lm_head(out.last_hidden_state), model(tokens).logits)


def test_folders_with_names_of_older_versions_load(lightnet, tmp_path):
    saved(lightnet, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    old = {name.removeprefix("model."): weight for name, weight in weights.items()}
    assert "network.embedding.weight" in old
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for auto in (AutoModelForCausalLM, AutoModel):
        model, info = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"]
        assert info["unexpected_keys"] <= {"lm_head.weight"}
        read = model.base_model(ids(2, 5)).last_hidden_state
        assert_close(read, lightnet.model(ids(2, 5)).last_hidden_state)
    assert_close(load_pretrained(str(tmp_path))(ids(2, 5))[0], lightnet(ids(2, 5)).logits)


@pytest.mark.sampled(3)
@over_causal
def test_padding_between_real_tokens_changes_no_score(change):
    model, tokens = to_transformers(causal(change)), ids(2, 9)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 1, 1], [0, 1, 1, 1, 0, 1, 1, 0, 0]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for given in ({}, {"position_ids": positions}):
        out = model(tokens, attention_mask=mask, output_hidden_states=True, **given)
        more = model(
            ids(2, 1, seed=1), attention_mask=pad(mask, (0, 1), value=1),
            **{CACHE: getattr(out, CACHE)},
        ).logits  # fmt: skip
        for b, real in enumerate(mask.bool()):
            row = torch.cat([tokens[b, real], ids(2, 1, seed=1)[b]])[None]
            want = model(row, output_hidden_states=True)
            assert_close(out.logits[b, real], want.logits[0, :-1])
            assert_close(more[b, 0], want.logits[0, -1])
            for x, y in zip(out.hidden_states, want.hidden_states, strict=True):
                assert_close(x[b, real], y[0, :-1])


@pytest.mark.sampled(4)
@over_causal
def test_nan_embeddings_of_padding_reach_nothing(change):
    model, mask = to_transformers(causal(change)), torch.tensor([[0, 1, 1, 0, 1]])
    clean = model.get_input_embeddings()(ids(1, 5)).detach()
    outcomes = []
    for value in (0.0, torch.nan):
        model.zero_grad()
        x = clean.masked_fill(mask.unsqueeze(-1) == 0, value).requires_grad_()
        labels = ids(1, 5).masked_fill(mask == 0, -100)
        out = model(inputs_embeds=x, attention_mask=mask, labels=labels)
        out.loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        outcomes.append([out.loss, out.logits[mask.bool()], x.grad, *gradients])
    for x, want in zip(outcomes[1], outcomes[0], strict=True):
        assert torch.equal(x, want)
    assert (outcomes[1][2][mask == 0] == 0).all()


def test_positions_that_do_not_count_real_tokens_are_refused(lightnet):
    tokens, mask = ids(1, 5), torch.tensor([[1, 1, 0, 1, 1]])
    with pytest.raises(ValueError, match="position_ids do not increase by 1 from one real token"):
        lightnet(tokens, attention_mask=mask, position_ids=torch.arange(5)[None])
    with pytest.raises(ValueError, match="position_ids do not increase by 1"):
        lightnet(tokens, position_ids=torch.tensor([[0, 2, 4, 6, 8]]))


def test_learned_positions_begin_at_the_number_of_tokens_before():
    model, tokens = to_transformers(causal(CAUSAL["gpt2"])), ids(1, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    with pytest.raises(ValueError, match=r"position_ids begin at \[2\], expected 0, the number"):
        model(tokens, attention_mask=mask, position_ids=torch.arange(5)[None])
    out = model(tokens, attention_mask=mask, position_ids=torch.tensor([[1, 1, 0, 1, 2]]))
    cached = {CACHE: getattr(out, CACHE)}
    with pytest.raises(ValueError, match=r"position_ids begin at \[5\], expected \[3\]"):
        model(tokens[:, :1], position_ids=torch.tensor([[5]]), **cached)
    model(tokens[:, :1], position_ids=torch.tensor([[3]]), **cached)


def test_the_attention_implementation_is_the_mixers_own(lightnet, tmp_path):
    lightnet.save_pretrained(tmp_path)
    tokens = ids(1, 5)
    for name in (None, "eager", "sdpa"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
        assert torch.equal(model.double()(tokens).logits, lightnet(tokens).logits)
    with pytest.raises(
        ValueError, match="attn_implementation is 'flash_attention_2', expected 'sd"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flash_attention_2")


def test_configs_state_the_maximum_length_if_there_is_one(tmp_path):
    config = to_transformers(causal(CAUSAL["gpt2"])).config
    config.max_position_embeddings = 30
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["max_position_embeddings"] == saved["position"]["max_tokens"] == 30
    assert OnescanTextConfig.from_pretrained(tmp_path).max_position_embeddings == 30
    unlimited = OnescanTextConfig()
    assert not hasattr(unlimited, "max_position_embeddings")
    assert "max_position_embeddings" not in unlimited.to_dict()
    with pytest.raises(ValueError, match="max_position_embeddings is 8, but the position encoding"):
        OnescanTextConfig(max_position_embeddings=8)
