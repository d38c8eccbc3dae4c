"""Linear attention in the encoders of transformers, each with a small random config."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onescan.nn import replace_attention
from onescan.nn.replace import is_replacement
from onescan.nn.softmax_parts import QK_NORM, RELATIVE, ROTARY, projects_queries_keys_and_values

transformers = pytest.importorskip("transformers")

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
MASKED = [name for name, case in CASES.items() if case.inputs == "text"]
RUN = [name for name, case in CASES.items() if case.inputs]


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


@pytest.mark.parametrize("name", CASES)
def test_all_attention_is_replaced(name):
    case = CASES[name]
    model = build(case)
    names = replace(case, model)
    assert len(names) == case.replaced
    kept = tuple(case.options.get("exclude", ()))
    for path, module in model.named_modules():
        is_softmax = isinstance(module, nn.MultiheadAttention) or projects_queries_keys_and_values(
            module
        )
        assert not is_softmax or path.startswith(kept or "nothing"), path
    assert all(is_replacement(model.get_submodule(each)) for each in names)
    if case.inputs:
        assert first_output(model(**inputs(case.inputs))).isfinite().all()


@pytest.mark.parametrize("name", CASES)
def test_weights_are_copied(name):
    """Softmax attention with the replacement's projections equals the original attention."""
    case = CASES[name]
    original, model = build(case).double(), build(case).double()
    for each in replace(case, model):
        source, mixer = original.get_submodule(each), model.get_submodule(each).attention.mixer
        x = torch.randn(2, 6, DIM, dtype=torch.float64)
        q, k, v = mixer.in_proj(x).split(mixer.in_widths, dim=-1)[:3]
        heads = mixer.config.num_heads
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        scale = 1.0 if RELATIVE in case.losses and "T5" in name else None
        tolerance = 1e-6 if ROTARY in case.losses else 1e-9  # angles are rotated in float32
        causal = case.options.get("causal", False)
        o = F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal)
        o = mixer.out_proj(o.transpose(1, 2).flatten(2))
        torch.testing.assert_close(
            o, first_output(source(x, **neutral(source, q, causal))), rtol=tolerance, atol=tolerance
        )


def neutral(source: nn.Module, q: torch.Tensor, causal: bool) -> dict[str, Any]:
    """Return arguments with which positions and biases have no effect."""
    head_dim, tokens = q.shape[-1], q.shape[-2]
    names = type(source).forward.__annotations__ | dict.fromkeys(
        type(source).forward.__code__.co_varnames
    )
    given: dict[str, Any] = {}
    if "position_embeddings" in names:
        shape = (tokens, head_dim) if "DINO" in type(source).__name__ else (1, tokens, head_dim)
        given["position_embeddings"] = (q.new_ones(shape), q.new_zeros(shape))
    if type(source).__name__ == "T5Attention":
        given["position_bias"] = q.new_zeros(1, q.shape[1], tokens, tokens)
    if causal:
        mask = q.new_full((tokens, tokens), -torch.inf).triu(1)
        given["attention_mask"] = mask.expand(1, 1, -1, -1)
    return given


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MASKED)
def test_padding_has_no_effect(name, implementation):
    case = CASES[name]
    model = build(case)
    model.config._attn_implementation = implementation
    replace(case, model)
    data = inputs(case.inputs, length=20)  # longer than a window
    data["attention_mask"] = torch.ones_like(data["input_ids"])
    data["attention_mask"][1, 13:] = 0
    data["input_ids"][1, 13:] = 0
    o = first_output(model(**data))
    torch.testing.assert_close(o[:1], first_output(model(input_ids=data["input_ids"][:1])))
    torch.testing.assert_close(
        o[1:, :13], first_output(model(input_ids=data["input_ids"][1:, :13]))
    )


def test_padding_of_sounds_has_no_effect():
    case = CASES["wav2vec 2.0"]
    model = build(case)
    replace(case, model)
    values, mask = inputs("audio")["input_values"], torch.ones(2, 200, dtype=torch.long)
    values[1, 120:] = 0
    mask[1, 120:] = 0
    changed = values.clone()
    changed[1, 130:] = 1.0
    before, after = (
        first_output(model(input_values=x, attention_mask=mask)) for x in (values, changed)
    )
    torch.testing.assert_close(before[1, :10], after[1, :10])
    assert not torch.equal(first_output(model(input_values=values))[1, :10], before[1, :10])


@pytest.mark.parametrize("name", RUN)
def test_it_trains(name):
    case = CASES[name]
    model = build(case)
    names = replace(case, model)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data, losses = inputs(case.inputs), []
    for _ in range(8):
        output = first_output(model(**data))
        loss = (output - output.detach().roll(1, 0)).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        grads = {
            n: p.grad for each in names for n, p in model.get_submodule(each).named_parameters()
        }
        assert all(grad is not None and grad.isfinite().all() for grad in grads.values())
        optimizer.step()
    assert losses[-1] < losses[0]
