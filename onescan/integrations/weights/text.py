"""GPT-2, BERT, RoBERTa and DistilBERT of transformers, with softmax attention."""

from collections.abc import Iterator, Mapping
from typing import Any

from onescan.checks import check_whole
from onescan.integrations.weights.maps import (
    TRANSPOSED,
    Fields,
    Names,
    Rule,
    Target,
    layers,
    linear,
    weights_by,
)
from onescan.integrations.weights.source import Foreign, Source
from onescan.layers.basic import MLPConfig
from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.layers.position import TokenPositionConfig
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.masked_lm import MaskedLMConfig

# GPT-2's first weights have no prefix, and BERT's name the parts of norms gamma and beta.
GPT2_NAMES = {r"^(wte|wpe|h|ln_f)\.": r"transformer.\1."}
BERT_NAMES = {r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"}
# names of RoBERTa and DistilBERT -> names of BERT
ROBERTA_NAMES = {
    **BERT_NAMES,
    r"^roberta\.": "bert.",
    r"^lm_head\.dense\.": "cls.predictions.transform.dense.",
    r"^lm_head\.layer_norm\.": "cls.predictions.transform.LayerNorm.",
    r"^lm_head\.": "cls.predictions.",
}
DISTILBERT_NAMES = {
    r"^distilbert\.transformer\.": "bert.encoder.", r"^distilbert\.": "bert.",
    r"\.q_lin\.": ".self.query.", r"\.k_lin\.": ".self.key.", r"\.v_lin\.": ".self.value.",
    r"\.out_lin\.": ".output.dense.", r"\.sa_layer_norm\.": ".attention.output.LayerNorm.",
    r"\.ffn\.lin1\.": ".intermediate.dense.", r"\.ffn\.lin2\.": ".output.dense.",
    r"\.output_layer_norm\.": ".output.LayerNorm.",
    r"^vocab_transform\.": "cls.predictions.transform.dense.",
    r"^vocab_layer_norm\.": "cls.predictions.transform.LayerNorm.",
    r"^vocab_projector\.bias$": "cls.predictions.bias",
    r"^vocab_projector\.": "cls.predictions.decoder.",
}  # fmt: skip
# names of fields of DistilBERT's config -> those of BERT
DISTILBERT_FIELDS = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size", "activation": "hidden_act", "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}  # fmt: skip
GPT2_DEFAULTS = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
    "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
BERT_DEFAULTS = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
}  # fmt: skip
ROBERTA_DEFAULTS = {**BERT_DEFAULTS, "vocab_size": 50265, "pad_token_id": 1}
DISTILBERT_DEFAULTS = {
    "vocab_size": 30522, "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072,
    "dropout": 0.1, "attention_dropout": 0.1, "activation": "gelu", "max_position_embeddings": 512,
}  # fmt: skip
# names of native fields -> names in the source
GPT2_FIELDS = {
    "vocab_size": "vocab_size", "width": "n_embd", "depth": "n_layer", "dropout": "resid_pdrop",
    "mixer.num_heads": "n_head", "mixer.dropout": "attn_pdrop", "norm_eps": "layer_norm_epsilon",
    "position.max_tokens": "n_positions", "tie_embeddings": "tie_word_embeddings",
}  # fmt: skip
BERT_FIELDS = {
    "vocab_size": "vocab_size", "width": "hidden_size", "depth": "num_hidden_layers",
    "mixer.num_heads": "num_attention_heads", "mixer.dropout": "attention_probs_dropout_prob",
    "position.max_tokens": "max_position_embeddings", "segment_types": "type_vocab_size",
    "norm_eps": "layer_norm_eps", "dropout": "hidden_dropout_prob",
}  # fmt: skip
# names of native layers -> names in the source
GPT2_NORMS = {"mixer_norm": "ln_1", "mlp_norm": "ln_2"}
GPT2_MAPS = {
    "mixer.in_proj": "attn.c_attn", "mixer.out_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj",
}  # fmt: skip
BERT_LAYERS: Mapping[str, Names] = {
    "mixer.in_proj": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "mixer.out_proj": "attention.output.dense", "mixer_norm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense", "mlp.down_proj": "output.dense",
    "mlp_norm": "output.LayerNorm",
}  # fmt: skip
BERT_POSITIONS = "bert.embeddings.position_embeddings.weight"
# tensors that are not converted
CAUSAL_MASKS = r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"
BERT_UNUSED = r"bert\.pooler\..*|cls\.seq_relationship\..*|bert\.embeddings\.position_ids"
RATIO = 4  # of the widths of GPT-2's MLP and its tokens

GPT2 = Fields(
    base=CausalLMConfig(
        mixer=SoftmaxMixerConfig(direction="forward"),
        mlp=MLPConfig(),
        position=TokenPositionConfig(),
    ),
    names=GPT2_FIELDS,
    hidden="n_inner",
    activation="activation_function",
)
BERT = Fields(
    base=MaskedLMConfig(
        mixer=SoftmaxMixerConfig(),
        mlp=MLPConfig(),
        position=TokenPositionConfig(),
        embedding_norm=True,
        norm_position="post",
    ),
    names=BERT_FIELDS,
    hidden="intermediate_size",
)


def _gpt2_config(foreign: Foreign) -> CausalLMConfig:
    foreign.expect(
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
        embd_pdrop=foreign.need("resid_pdrop"),
    )
    return GPT2.read(foreign)


def _gpt2_hidden(foreign: Foreign) -> Foreign:
    """Return a GPT-2 whose config states the hidden width of its MLPs."""
    hidden = foreign.fields.get("n_inner") or RATIO * foreign.need("n_embd")
    return foreign.changed(fields={"n_inner": hidden})


def _gpt2_fields(config: CausalLMConfig) -> dict[str, Any]:
    fields = GPT2.write(config, "GPT2LMHeadModel")
    ids = {"bos_token_id": None, "eos_token_id": None}  # unknown; the defaults are of GPT-2's texts
    return fields | ids | {"embd_pdrop": config.dropout}


def _gpt2_rules(config: CausalLMConfig) -> Iterator[Rule]:
    output = ("lm_head.weight",)
    tied = output if config.tie_embeddings else ()
    yield Rule("network.embedding.weight", ("transformer.wte.weight",), copies=tied)
    yield Rule("network.position.table", ("transformer.wpe.weight",))
    for i in range(config.depth):
        block, layer = f"network.blocks.{i}", f"transformer.h.{i}"
        yield from layers(block, layer, GPT2_NORMS)
        # Conv1D of transformers stores its matrix with one row per input.
        yield from layers(block, layer, GPT2_MAPS, TRANSPOSED)
    yield from linear("network.norm", "transformer.ln_f")
    if not config.tie_embeddings:
        yield Rule("head.weight", output)


def check_bert(foreign: Foreign) -> None:
    """Raise ValueError if a BERT has no head, or a setting without a counterpart."""
    if "cls.predictions.transform.dense.weight" not in foreign.tensors:
        raise ValueError(
            "the source has no head that predicts masked tokens, expected a BertForMaskedLM, "
            "BertForPreTraining, RobertaForMaskedLM or DistilBertForMaskedLM"
        )
    foreign.expect(
        hidden_act="gelu",  # also that of the head
        is_decoder=False,
        add_cross_attention=False,
        tie_word_embeddings=True,
    )


def _bert_config(foreign: Foreign) -> MaskedLMConfig:
    check_bert(foreign)
    foreign.expect(position_embedding_type="absolute")
    return BERT.read(foreign)


def _bert_fields(config: MaskedLMConfig) -> dict[str, Any]:
    check_whole(1, segment_types=config.segment_types)
    return BERT.write(config, "BertForMaskedLM")


def bert_rules(config: MaskedLMConfig) -> Iterator[Rule]:
    """Yield the rules of BERT, with or without positions and segments."""
    embeddings, head = "bert.embeddings", "cls.predictions"
    words = (f"{embeddings}.word_embeddings.weight",)
    yield Rule("network.embedding.weight", words, copies=(f"{head}.decoder.weight",))
    if config.position is not None:
        yield Rule("network.position.table", (BERT_POSITIONS,))
    if config.segment_types:
        segments = (f"{embeddings}.token_type_embeddings.weight",)
        yield Rule("network.segment_embedding.weight", segments)
    yield from linear("network.embedding_norm", f"{embeddings}.LayerNorm")
    for i in range(config.depth):
        yield from layers(f"network.blocks.{i}", f"bert.encoder.layer.{i}", BERT_LAYERS)
    yield from linear("head.transform", f"{head}.transform.dense")
    yield from linear("head.norm", f"{head}.transform.LayerNorm")
    yield Rule("head.scores.bias", (f"{head}.bias",), copies=(f"{head}.decoder.bias",))


def _of_roberta(foreign: Foreign) -> Foreign:
    """Return a RoBERTa as a BERT: its positions count from the padding token's id + 1."""
    pad = foreign.need("pad_token_id")
    check_whole(0, pad_token_id=pad)
    if BERT_POSITIONS not in foreign.tensors:  # of an encoder without a head
        return foreign
    table = foreign.tensors.get(BERT_POSITIONS)[pad + 1 :]
    fields = {"max_position_embeddings": len(table)}
    return foreign.changed(fields=fields, tensors={BERT_POSITIONS: table})


def _of_distilbert(foreign: Foreign) -> Foreign:
    """Return a DistilBERT as a BERT: it has no segments."""
    fields = {bert: foreign.need(name) for name, bert in DISTILBERT_FIELDS.items()}
    eps = BERT_DEFAULTS["layer_norm_eps"]
    return foreign.changed(fields={**fields, "type_vocab_size": 0, "layer_norm_eps": eps})


def _of_type(*types: str) -> Any:
    return lambda foreign: foreign.fields.get("model_type") in types


TEXT_SOURCES = (
    Source(
        name="transformers GPT2LMHeadModel",
        matches=_of_type("gpt2"),
        config=_gpt2_config,
        weights=weights_by(_gpt2_rules, _gpt2_config, unused=CAUSAL_MASKS),
        defaults=GPT2_DEFAULTS,
        rename=GPT2_NAMES,
        adapt=_gpt2_hidden,
    ),
    Source(
        name="transformers BertForMaskedLM",
        matches=_of_type("bert"),
        config=_bert_config,
        weights=weights_by(bert_rules, _bert_config, unused=BERT_UNUSED),
        defaults=BERT_DEFAULTS,
        rename=BERT_NAMES,
    ),
    Source(
        name="transformers RobertaForMaskedLM",
        matches=_of_type("roberta", "xlm-roberta", "camembert"),
        config=_bert_config,
        weights=weights_by(bert_rules, _bert_config, unused=BERT_UNUSED),
        defaults=ROBERTA_DEFAULTS,
        rename=ROBERTA_NAMES,
        adapt=_of_roberta,
    ),
    Source(
        name="transformers DistilBertForMaskedLM",
        matches=_of_type("distilbert"),
        config=_bert_config,
        weights=weights_by(bert_rules, _bert_config, unused=BERT_UNUSED),
        defaults=DISTILBERT_DEFAULTS,
        rename=DISTILBERT_NAMES,
        adapt=_of_distilbert,
    ),
)
TEXT_TARGETS = (
    Target(
        config=CausalLMConfig,
        library="transformers",
        model=lambda _: "GPT2LMHeadModel",
        fields=_gpt2_fields,
        rules=_gpt2_rules,
    ),
    Target(
        config=MaskedLMConfig,
        library="transformers",
        model=lambda _: "BertForMaskedLM",
        fields=_bert_fields,
        rules=bert_rules,
    ),
)
