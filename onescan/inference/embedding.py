"""One vector per text or image, for search, clustering, or a small classifier on top."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import normalize as to_unit_length

from onescan.checks import check_choice, check_positive
from onescan.inputs.pairs import PairEncoder
from onescan.inputs.sequences import Ids, check_texts, pad_tokens
from onescan.inputs.tokenizer import Tokenizer
from onescan.layers.position import TokenPositionConfig
from onescan.messages import named_type
from onescan.models.causal_lm import CausalLM
from onescan.models.image_classifier import ImageClassifier
from onescan.models.masked_lm import MaskedLM
from onescan.models.sequence_classifier import SequenceClassifier

Pooling = Literal["mean", "last"]
Vectors = Float[Tensor, "N width"]


class EncodedTexts(NamedTuple):
    """The tokens of texts.

    Attributes:
        tokens: Ids of the tokens of each text.
        truncated: Number of texts that were longer than the model's input and are truncated.
    """

    tokens: list[Ids]
    truncated: int


def encode_texts(
    model: nn.Module, encoder: Tokenizer | PairEncoder, texts: Sequence[str]
) -> EncodedTexts:
    """Convert texts to tokens, at most as many as the model was trained with or has positions for.

    Args:
        model: Language model or text classifier.
        encoder: A language model's tokenizer, or a text classifier's encoder, which adds its
            special tokens.
        texts: Texts.

    Raises:
        ValueError: If there are no texts, one is not a string, or one has no tokens.
    """
    check_texts(texts)
    if isinstance(encoder, PairEncoder):
        found = [encoder.encode(text)[0] for text in texts]
        return EncodedTexts(found, sum(encoder.is_truncated([[text] for text in texts])))
    encoded = encoder.encode_many(texts)
    for place, tokens in enumerate(encoded):
        if not len(tokens):
            raise ValueError(f"texts[{place}] is {texts[place]!r}, which has no tokens")
    position: Any = getattr(getattr(model, "config", None), "position", None)
    limit = position.max_tokens if isinstance(position, TokenPositionConfig) else None
    count = sum(limit is not None and len(tokens) > limit for tokens in encoded)
    return EncodedTexts([tokens[:limit] for tokens in encoded], count)


@torch.no_grad()
def embed_texts(
    model: nn.Module,
    texts: EncodedTexts | Sequence[Ids],
    *,
    pooling: str = "mean",
    normalize: bool = False,
    batch_size: int = 64,
) -> Vectors:
    """Return one vector per text: the mean of the vectors of its tokens, or the last of them.

    Texts of similar length are processed together. Padding has no effect on the result, except for
    rounding.

    Args:
        model: Language model or text classifier in evaluation mode, as `onescan.load` returns it.
        texts: Tokens, as `encode_texts` returns them, or arrays of ids.
        pooling: "mean" of all tokens; or "last", which only suits causal models, in which the last
            token alone has read the whole text.
        normalize: Scale each vector to length 1.
        batch_size: Texts per batch.

    Returns:
        Vectors in the order of the texts, on the CPU.

    Raises:
        ValueError: If the model reads no text, there are no texts, or an option is invalid.
    """
    if not isinstance(model, CausalLM | MaskedLM | SequenceClassifier):
        raise ValueError(
            f"the model is {named_type(model)}, expected a language model or text classifier"
        )
    check_choice("pooling", pooling, get_args(Pooling))
    check_positive(batch_size=batch_size)
    tokens = texts.tokens if isinstance(texts, EncodedTexts) else list(texts)
    if not tokens:
        raise ValueError("texts is empty, expected at least one text")
    device = next(model.parameters()).device
    order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
    found: dict[int, Tensor] = {}
    for at in range(0, len(order), batch_size):
        chosen = order[at : at + batch_size]
        ids, keep = (x.to(device) for x in pad_tokens([tokens[i] for i in chosen]))
        x, _ = model.network(ids, keep=keep)
        if pooling == "last":
            pooled = x[torch.arange(len(x), device=device), keep.sum(dim=1) - 1]
        else:
            total = x.masked_fill(~keep.unsqueeze(-1), 0).sum(dim=1)
            pooled = total / keep.sum(dim=1, keepdim=True)
        found |= dict(zip(chosen, pooled.cpu(), strict=True))
    return _scaled(torch.stack([found[i] for i in range(len(tokens))]), normalize)


@torch.no_grad()
def embed_images(
    model: nn.Module, images: Tensor, *, normalize: bool = False, batch_size: int = 64
) -> Vectors:
    """Return one vector per image or array: what the class head reads.

    This is the mean of the vectors of the patches, or that of the class token.

    Args:
        model: Classifier of grids in evaluation mode, as `onescan.load` returns it.
        images: The model's input ``[N, channels, *shape]``, as `ImageFormat.model_input` returns.
        normalize: Scale each vector to length 1.
        batch_size: Images per batch.

    Returns:
        Vectors in the order of the images, on the CPU.

    Raises:
        ValueError: If the model is of another class, or there are no images.
    """
    if not isinstance(model, ImageClassifier):
        raise ValueError(f"the model is {named_type(model)}, expected an ImageClassifier")
    check_positive(batch_size=batch_size)
    if not len(images):
        raise ValueError("images is empty, expected at least one image")
    device = next(model.parameters()).device
    parts = [
        model.pooled(model.forward_features(part.to(device))).cpu()
        for part in images.split(batch_size)
    ]
    return _scaled(torch.cat(parts), normalize)


def _scaled(vectors: Vectors, normalize: bool) -> Vectors:
    return to_unit_length(vectors, dim=-1) if normalize else vectors
