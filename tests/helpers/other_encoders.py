"""Encoders of transformers, each with a small random config, for tests of replaced attention."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

from onescan.nn import replace_attention
from onescan.nn.softmax_parts import QK_NORM, RELATIVE, ROTARY

DIM, HEADS, LAYERS, VOCABULARY = 16, 2, 2, 11
COMMON = {
    "hidden_size": DIM, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
    "intermediate_size": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
TEXT = COMMON | {"vocab_size": VOCABULARY, "max_position_embeddings": 40, "pad_token_id": 0}
IMAGE = COMMON | {"image_size": 16, "patch_size": 4}
CLIP = {"hidden_size": DIM, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
        "intermediate_size": 16}  # fmt: skip
WINDOW = "windows of 9 tokens"


@dataclass(frozen=True)
class Case:
    """A class of models, its config, and what is expected of `replace_attention`."""

    model: str
    config: dict[str, Any]
    inputs: str
    part: str = ""
    """The part of the model whose attention is replaced."""
    replaced: int = LAYERS
    losses: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def audio(model: str, **changes: Any) -> Case:
    config = COMMON | {
        "vocab_size": VOCABULARY, "conv_dim": (8, 8), "conv_kernel": (4, 3), "conv_stride": (4, 2),
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0,
        "num_feat_extract_layers": 2, "feat_extract_norm": "layer", "mask_time_prob": 0.0,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
        "feat_proj_dropout": 0.0,
    }  # fmt: skip
    return Case(model, config | changes, "audio")


T5 = {"d_model": DIM, "num_heads": 3, "d_kv": 4, "num_layers": LAYERS, "d_ff": 16,
      "vocab_size": VOCABULARY, "dropout_rate": 0.0, "pad_token_id": 0}  # fmt: skip
WHISPER = {"d_model": DIM, "encoder_layers": LAYERS, "encoder_attention_heads": HEADS,
           "decoder_layers": 1, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 16,
           "decoder_ffn_dim": 16, "num_mel_bins": 8, "max_source_positions": 12,
           "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
           "decoder_start_token_id": 1}  # fmt: skip
DISTILBERT = {"dim": DIM, "n_heads": HEADS, "n_layers": LAYERS, "hidden_dim": 16,
              "vocab_size": VOCABULARY, "dropout": 0.0, "pad_token_id": 0}  # fmt: skip
MODERNBERT = TEXT | {"local_attention": 16, "global_attn_every_n_layers": 2, "bos_token_id": 1,
                     "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}  # fmt: skip
PATCHTST = {"d_model": DIM, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
            "ffn_dim": 16, "num_input_channels": 2, "context_length": 32, "patch_length": 4,
            "patch_stride": 4, "channel_attention": False}  # fmt: skip
GRID = {"shape": (4, 4), "prefix": 1}
CASES = {
    "BERT": Case("BertModel", TEXT, "text"),
    "BERT for masked LM": Case("BertForMaskedLM", TEXT, "text"),
    "RoBERTa": Case("RobertaModel", TEXT, "text"),
    "XLM-R": Case("XLMRobertaModel", TEXT, "text"),
    "DistilBERT": Case("DistilBertModel", DISTILBERT, "text"),
    "ELECTRA": Case("ElectraModel", TEXT | {"embedding_size": 8}, "text"),
    "ModernBERT": Case("ModernBertModel", MODERNBERT, "text", losses=(ROTARY, WINDOW)),
    "ESM": Case(
        "EsmModel", TEXT | {"position_embedding_type": "rotary", "mask_token_id": 3,
                            "token_dropout": False}, "text", losses=(ROTARY,),
    ),
    "T5's encoder": Case("T5EncoderModel", T5, "text", losses=(RELATIVE,)),
    "T5": Case("T5Model", T5, "", part="encoder", losses=(RELATIVE,)),
    "SigLIP for text": Case(
        "SiglipTextModel", CLIP | {"vocab_size": VOCABULARY, "max_position_embeddings": 40,
                                   "pad_token_id": 0}, "text",
    ),
    "CLIP for text": Case(
        "CLIPTextModel", CLIP | {"vocab_size": VOCABULARY, "max_position_embeddings": 40,
                                 "pad_token_id": 0, "eos_token_id": 2}, "text",
        options={"causal": True},
    ),
    "ViT": Case("ViTModel", IMAGE, "image", options=GRID),
    "ViT for classification": Case("ViTForImageClassification", IMAGE, "image", options=GRID),
    "DeiT": Case("DeiTModel", IMAGE, "image", options=GRID | {"prefix": 2}),
    "DINOv2": Case("Dinov2Model", IMAGE, "image", options=GRID),
    "DINOv2 with registers": Case(
        "Dinov2WithRegistersModel", IMAGE | {"num_register_tokens": 2}, "image",
        options=GRID | {"prefix": 3},
    ),
    "DINOv3": Case(
        "DINOv3ViTModel", IMAGE | {"num_register_tokens": 2}, "image", losses=(ROTARY,),
        options=GRID | {"prefix": 3},
    ),
    "BEiT": Case(
        "BeitModel", IMAGE | {"use_relative_position_bias": True}, "image", losses=(RELATIVE,),
        options=GRID,
    ),
    "BEiT with absolute positions": Case(
        "BeitModel", IMAGE | {"use_absolute_position_embeddings": True}, "image", options=GRID,
    ),
    "CLIP for images": Case(
        "CLIPVisionModel", CLIP | {"image_size": 16, "patch_size": 4}, "image", options=GRID
    ),
    "SigLIP for images": Case(
        "SiglipVisionModel", CLIP | {"image_size": 16, "patch_size": 4}, "image",
        replaced=LAYERS, options={"shape": (4, 4), "exclude": ["head"]},
    ),
    "SigLIP 2 for images": Case(
        "Siglip2VisionModel", CLIP | {"num_patches": 16, "patch_size": 4}, "",
        options={"exclude": ["head"]},
    ),
    "VideoMAE": Case(
        "VideoMAEModel", IMAGE | {"num_frames": 4, "tubelet_size": 2, "use_mean_pooling": True},
        "video", options={"shape": (2, 4, 4)},
    ),
    "Whisper's encoder": Case("WhisperModel", WHISPER, "mel", part="encoder"),
    "wav2vec 2.0": audio("Wav2Vec2Model"),
    "HuBERT": audio("HubertModel"),
    "PatchTST": Case("PatchTSTModel", PATCHTST, "series"),
}  # fmt: skip


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    kind = getattr(transformers, case.model)
    model: nn.Module = kind(kind.config_class(**case.config))
    for parameter in model.parameters():  # biases would hide in zeros
        nn.init.normal_(parameter, std=0.2)
    return (model.get_submodule(case.part) if case.part else model).eval()


def inputs(kind: str, length: int = 8) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    match kind:
        case "text":
            return {"input_ids": torch.randint(4, VOCABULARY, (2, length))}
        case "image":
            return {"pixel_values": torch.randn(2, 3, 16, 16)}
        case "video":
            return {"pixel_values": torch.randn(2, 4, 3, 16, 16)}
        case "mel":
            return {"input_features": torch.randn(2, 8, 24)}
        case "audio":
            return {"input_values": torch.randn(2, 200)}
        case "series":
            return {"past_values": torch.randn(2, 32, 2)}
    raise AssertionError(kind)


def replace(case: Case, model: nn.Module, kind: str = "lightnet") -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = replace_attention(model, kind, **case.options)
    said = " ".join(str(warning.message) for warning in caught)
    for loss in (ROTARY, RELATIVE, QK_NORM, WINDOW):
        assert (loss in said) == (loss in case.losses), (loss, said)
    return names


def first_output(outputs: Any) -> torch.Tensor:
    return outputs[0]
