"""GPT-2 and BERT of transformers, as language models with softmax attention."""

from torch import Tensor

from onescan.configs import ModelConfig
from onescan.integrations.weights.maps import LinearNames, activation, copied, merged
from onescan.integrations.weights.source import Foreign, Source
from onescan.layers.basic import MLPConfig
from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.layers.position import TokenPositionConfig
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.masked_lm import MaskedLMConfig

# GPT-2's first weights have no prefix, and BERT's name the parts of norms gamma and beta.
GPT2_NAMES = {r"^(wte|wpe|h|ln_f)\.": r"transformer.\1."}
BERT_NAMES = {r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"}
GPT2_DEFAULTS = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
    "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
}  # fmt: skip
BERT_DEFAULTS = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
}  # fmt: skip
RATIO = 4  # of the widths of GPT-2's MLP and its tokens


def _gpt2_config(foreign: Foreign) -> ModelConfig:
    foreign.expect(
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
        embd_pdrop=foreign.need("resid_pdrop"),
    )
    width = foreign.need("n_embd")
    hidden = foreign.fields.get("n_inner") or RATIO * width
    return CausalLMConfig(
        vocab_size=foreign.need("vocab_size"),
        width=width,
        depth=foreign.need("n_layer"),
        mixer=SoftmaxMixerConfig(
            num_heads=foreign.need("n_head"), causal=True, dropout=foreign.need("attn_pdrop")
        ),
        mlp=MLPConfig(ratio=hidden / width, activation=activation(foreign, "activation_function")),
        position=TokenPositionConfig(max_tokens=foreign.need("n_positions")),
        norm_eps=foreign.need("layer_norm_epsilon"),
        dropout=foreign.need("resid_pdrop"),
        tie_embeddings=_is_tied(foreign),
    )


def _is_tied(foreign: Foreign) -> bool:
    return bool(foreign.fields.get("tie_word_embeddings", True))


def _gpt2_weights(foreign: Foreign) -> dict[str, Tensor]:
    tensors = foreign.tensors
    tensors.drop(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")  # causal masks
    embedding = tensors.take("transformer.wte.weight")
    weights = {
        "network.embedding.weight": embedding,
        "network.position.table": tensors.take("transformer.wpe.weight"),
    }
    if _is_tied(foreign):
        tensors.take_equal("lm_head.weight", embedding)
    else:
        weights["head.weight"] = tensors.take("lm_head.weight")
    names = [LinearNames("network.norm", "transformer.ln_f")]
    for i in range(foreign.need("n_layer")):
        block, layer = f"network.blocks.{i}", f"transformer.h.{i}"
        names += [
            LinearNames(f"{block}.mixer_norm", f"{layer}.ln_1"),
            LinearNames(f"{block}.mlp_norm", f"{layer}.ln_2"),
        ]
        maps = [
            LinearNames(f"{block}.mixer.in_proj", f"{layer}.attn.c_attn"),
            LinearNames(f"{block}.mixer.out_proj", f"{layer}.attn.c_proj"),
            LinearNames(f"{block}.mlp.up_proj", f"{layer}.mlp.c_fc"),
            LinearNames(f"{block}.mlp.down_proj", f"{layer}.mlp.c_proj"),
        ]
        # Conv1D of transformers stores its matrix with one row per input.
        weights |= {name: tensor.t() for name, tensor in copied(tensors, maps).items()}
    return weights | copied(tensors, names)


def _bert_config(foreign: Foreign) -> ModelConfig:
    foreign.expect(
        hidden_act="gelu",  # also that of the head
        position_embedding_type="absolute",
        is_decoder=False,
        add_cross_attention=False,
        tie_word_embeddings=True,
    )
    width = foreign.need("hidden_size")
    return MaskedLMConfig(
        vocab_size=foreign.need("vocab_size"),
        width=width,
        depth=foreign.need("num_hidden_layers"),
        mixer=SoftmaxMixerConfig(
            num_heads=foreign.need("num_attention_heads"),
            dropout=foreign.need("attention_probs_dropout_prob"),
        ),
        mlp=MLPConfig(ratio=foreign.need("intermediate_size") / width),
        position=TokenPositionConfig(max_tokens=foreign.need("max_position_embeddings")),
        segment_types=foreign.need("type_vocab_size"),
        embedding_norm=True,
        norm_position="post",
        norm_eps=foreign.need("layer_norm_eps"),
        dropout=foreign.need("hidden_dropout_prob"),
    )


def _bert_weights(foreign: Foreign) -> dict[str, Tensor]:
    tensors, head, embeddings = foreign.tensors, "cls.predictions", "bert.embeddings"
    tensors.drop(rf"bert\.pooler\..*|cls\.seq_relationship\..*|{embeddings}\.position_ids")
    embedding = tensors.take(f"{embeddings}.word_embeddings.weight")
    bias = tensors.take(f"{head}.bias")
    tensors.take_equal(f"{head}.decoder.weight", embedding)
    tensors.take_equal(f"{head}.decoder.bias", bias)
    weights = {
        "network.embedding.weight": embedding,
        "network.position.table": tensors.take(f"{embeddings}.position_embeddings.weight"),
        "network.segment_embedding.weight": tensors.take(
            f"{embeddings}.token_type_embeddings.weight"
        ),
        "head.scores.bias": bias,
    }
    names = [
        LinearNames("network.embedding_norm", f"{embeddings}.LayerNorm"),
        LinearNames("head.transform", f"{head}.transform.dense"),
        LinearNames("head.norm", f"{head}.transform.LayerNorm"),
    ]
    for i in range(foreign.need("num_hidden_layers")):
        block, layer = f"network.blocks.{i}", f"bert.encoder.layer.{i}"
        qkv = merged(tensors, f"{layer}.attention.self", ("query", "key", "value"))
        weights |= {f"{block}.mixer.{name}": tensor for name, tensor in qkv.items()}
        names += [
            LinearNames(f"{block}.mixer.out_proj", f"{layer}.attention.output.dense"),
            LinearNames(f"{block}.mixer_norm", f"{layer}.attention.output.LayerNorm"),
            LinearNames(f"{block}.mlp.up_proj", f"{layer}.intermediate.dense"),
            LinearNames(f"{block}.mlp.down_proj", f"{layer}.output.dense"),
            LinearNames(f"{block}.mlp_norm", f"{layer}.output.LayerNorm"),
        ]
    return weights | copied(tensors, names)


TEXT_SOURCES = (
    Source(
        name="transformers GPT2LMHeadModel",
        matches=lambda foreign: foreign.fields.get("model_type") == "gpt2",
        config=_gpt2_config,
        weights=_gpt2_weights,
        defaults=GPT2_DEFAULTS,
        rename=GPT2_NAMES,
    ),
    Source(
        name="transformers BertForMaskedLM",
        matches=lambda foreign: foreign.fields.get("model_type") == "bert",
        config=_bert_config,
        weights=_bert_weights,
        defaults=BERT_DEFAULTS,
        rename=BERT_NAMES,
    ),
)
