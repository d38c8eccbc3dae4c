"""Compute one vector per text or image, for search, clustering or a small classifier on top."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from onescan.checks import check_whole
from onescan.inference.classification import image_format
from onescan.inference.loading import Checkpoint
from onescan.inputs import GridFormat, PairFormat, TextFormat, read_image
from onescan.inputs.image_files import Pixels
from onescan.inputs.pairs import PairEncoder
from onescan.inputs.sequences import Ids, check_batch, check_texts, pad_tokens
from onescan.inputs.tokenizer import Tokenizer
from onescan.layers.position import TokenPositionConfig
from onescan.layers.tokens import first_token, masked_pixels, mean_pool, prefix_token
from onescan.messages import named_type, plural
from onescan.models.causal_lm import CausalLM
from onescan.models.image_classifier import WITH_CLASS_TOKEN, ImageClassifier
from onescan.models.masked_lm import MaskedLM
from onescan.models.sequence_classifier import SequenceClassifier
from onescan.shapes import GridKeep, Grids, Keep, Pooled, Tokens

Pooling = Literal["mean", "last", "class_token", "head"]
Source = Checkpoint | tuple[nn.Module, Tokenizer]
TextModel = CausalLM | MaskedLM | SequenceClassifier


@torch.no_grad()
def embed(
    source: Source,
    inputs: Iterable[str | Path | Image.Image] | Tensor | NDArray[Any],
    *,
    pooling: Pooling | None = None,
    normalize: bool = False,
    batch_size: int = 64,
    truncate: bool = False,
) -> Pooled:
    """Compute one vector per text or image.

    Texts of similar length share a batch. A vector depends neither on the padding nor on the other
    inputs, except for rounding.

    Args:
        source: A language model, text classifier or image classifier, as `onescan.load` returns it;
            or a language model with its tokenizer, as `onescan.load_language_model` returns them.
        inputs: Texts, which are read with the special tokens that the tokenizer adds around a text.
            For an image model, image files or PIL images of any size, or pixels of shape [N,
            channels, height, width]: bytes, or floats from 0 to 1, as `ImageFormat.model_input`
            takes them; for a model of arrays, an array or tensor of shape [N, channels, *axes].
        pooling: What the vector is. "mean", the default for texts, is the mean over all real
            tokens, special tokens included, or over all patches. "head", the default for images, is
            what the head of a classifier reads. "last" is the last token of a text, which has read
            all others in a causal model. "class_token" is the class token of an image, or the first
            token of a text, such as [CLS].
        normalize: Whether to divide each vector by its length.
        batch_size: Texts or images per batch; affects memory, and results only by rounding.
        truncate: Whether to cut off the end of texts that are longer than the model reads. The
            limit is `data.length` of a text classifier's run, or the number of absolute positions.

    Returns:
        Vectors on the CPU, in the order of the inputs.

    Raises:
        ValueError: If there are no inputs, if one of them cannot be read, has no tokens or is too
            long, if pixels have another shape or range, if the model is of another class, or if the
            pooling does not apply to it.
        FileNotFoundError: If an image file does not exist.
    """
    check_whole(1, batch_size=batch_size)
    model: Any = model_of(source)
    encoder = text_encoder(source)
    pooling = choose_pooling(model, encoder, pooling)
    options: Any = {"pooling": pooling, "normalize": normalize}
    if encoder is None:
        batches = _image_batches(source, _listed(inputs), batch_size)
        return torch.cat([embed_grids(model, batch, **options).cpu() for batch in batches])
    sequences, is_truncated = encoder.encode_texts(check_texts(_listed(inputs)))
    if any(is_truncated) and not truncate:
        raise ValueError(
            f"inputs[{is_truncated.index(True)}] is longer than the {encoder.length} tokens that "
            "the model reads; pass truncate=True to cut off its end"
        )
    return embed_sequences(model, sequences, batch_size=batch_size, **options)


def model_of(source: Source) -> nn.Module:
    """Return the model of a source.

    Raises:
        ValueError: If it is something else, or models of its class are not supported.
    """
    match source:
        case Checkpoint(model=model) | (nn.Module() as model, Tokenizer()):
            pass
        case _:
            raise ValueError(
                f"source is {named_type(source)}, expected a model as onescan.load returns it, or "
                "a language model and its tokenizer as onescan.load_language_model returns them"
            )
    if not isinstance(model, TextModel | ImageClassifier):
        raise ValueError(
            f"{named_type(model)} cannot embed inputs, expected a language model or a classifier "
            "of texts, images or arrays"
        )
    expected = GridFormat if isinstance(model, ImageClassifier) else PairFormat | TextFormat
    if isinstance(source, Checkpoint) and not isinstance(source.format, expected):
        raise ValueError(
            f"the model's input format is {type(source.format).__name__}, expected that of texts, "
            "images or arrays"
        )
    return model


def text_encoder(source: Source) -> PairEncoder | None:
    """Return what encodes the texts of a model; None for a model of images or arrays.

    Its `length` is the maximum number of tokens that the model reads.

    Raises:
        ValueError: If the tokenizer is missing or damaged, or belongs to another model.
        ImportError: If transformers is needed but not installed.
    """
    lengths, tokenizer = [sys.maxsize], None
    if not isinstance(source, Checkpoint):
        tokenizer = source[1]
    elif isinstance(source.format, TextFormat):
        tokenizer = source.format.open(source.folder)
    elif isinstance(source.format, PairFormat):
        tokenizer = source.format.text.open(source.folder)
        lengths.append(source.format.length)
    if tokenizer is None:
        return None
    config: Any = model_of(source).config
    tokenizer.check_vocabulary(config.vocab_size)
    if isinstance(config.position, TokenPositionConfig):
        lengths.append(config.position.max_tokens)
    return PairEncoder(tokenizer, min(lengths))


def choose_pooling(model: nn.Module, encoder: PairEncoder | None, pooling: str | None) -> Pooling:
    """Return a pooling, or the default of a model.

    Raises:
        ValueError: If the pooling does not apply to the model.
    """
    if pooling is None:
        return _poolings(model)[0]
    known = _check_pooling(model, pooling)
    if known == "class_token" and encoder is not None and not encoder.before:
        name = encoder.tokenizer.name
        raise ValueError(
            f"pooling is 'class_token', but tokenizer {name!r} adds no token before a text"
        )
    return known


def _poolings(model: nn.Module) -> tuple[Pooling, ...]:
    """Return the poolings for a class of models, the default first."""
    if isinstance(model, ImageClassifier):
        return "head", "mean", "class_token"
    if isinstance(model, SequenceClassifier):
        return "mean", "last", "class_token", "head"
    return "mean", "last", "class_token"


def _check_pooling(model: Any, pooling: Any) -> Pooling:
    """Return a pooling. Raise ValueError if it does not apply to the model."""
    known = {name: name for name in _poolings(model)}
    if pooling not in known:
        *others, last = map(repr, known)
        raise ValueError(f"pooling is {pooling!r}, expected {', '.join(others)} or {last}")
    if pooling == "class_token":
        reason = ""
        if isinstance(model, ImageClassifier):
            if model.config.pool not in WITH_CLASS_TOKEN:
                reason = "this model has no class token"
        elif model.config.state_block is not None:
            reason = "the first token of a causal model reads no other tokens"
        if reason:
            raise ValueError(f"pooling is 'class_token', but {reason}")
    return known[pooling]


def embed_sequences(
    model: TextModel,
    sequences: Sequence[Ids],
    *,
    batch_size: int = 64,
    pooling: Pooling = "mean",
    normalize: bool = False,
) -> Pooled:
    """Compute the vectors of tokenized texts, in batches of texts of similar length.

    Args:
        model: Language model or text classifier in evaluation mode.
        sequences: Tokens of each text, as `PairEncoder.encode_texts` returns them.
        batch_size: As in `embed`.
        pooling: As in `embed`; "head" is for text classifiers.
        normalize: As in `embed`.

    Returns:
        Vectors on the CPU.
    """
    # Longest first, so that running out of memory raises an error at once.
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]), reverse=True)
    device, vectors = model.network.device, []
    for first in range(0, len(order), batch_size):
        tokens, keep = pad_tokens([sequences[i] for i in order[first : first + batch_size]])
        tokens, keep = tokens.to(device), keep.to(device)
        vectors.append(
            embed_tokens(model, tokens, keep, pooling=pooling, normalize=normalize).cpu()
        )
    return torch.cat(vectors)[torch.tensor(order).argsort()]


@torch.no_grad()
def embed_tokens(
    model: TextModel,
    tokens: Tokens,
    keep: Keep | None,
    *,
    pooling: Pooling = "mean",
    normalize: bool = False,
) -> Pooled:
    """Compute the vectors of one batch of tokenized texts.

    Args:
        model: Language model or text classifier in evaluation mode.
        tokens: Token ids.
        keep: True for real tokens, False for padding, which may be on either side and has no
            effect. None if all tokens are real.
        pooling: As in `embed`; "head" is for text classifiers.
        normalize: As in `embed`.

    Raises:
        ValueError: If the pooling does not apply to the model.
    """
    _check_pooling(model, pooling)
    x, _ = model.network(tokens, keep=keep)
    if pooling == "mean":
        vectors = mean_pool(x, keep)
    elif pooling == "last":
        vectors = first_token(x.flip(1), None if keep is None else keep.flip(1))
    elif pooling == "class_token":
        vectors = first_token(x, keep)
    else:
        head: Any = model.head
        vectors = head.pooled(x, keep)
    return _finished(vectors, normalize=normalize)


@torch.no_grad()
def embed_grids(
    model: ImageClassifier,
    images: Grids,
    keep: GridKeep | None = None,
    *,
    pooling: Pooling = "head",
    normalize: bool = False,
) -> Pooled:
    """Compute the vectors of one batch of images, signals or volumes.

    Args:
        model: Image classifier in evaluation mode.
        images: Standardized grids, as `ImageFormat.model_input` returns them.
        keep: True for real pixels, for grids of mixed sizes; see `ImageClassifier.forward`.
        pooling: As in `embed`.
        normalize: As in `embed`.

    Raises:
        ValueError: If the pooling does not apply to the model.
    """
    _check_pooling(model, pooling)
    weight = model.patchify.proj.weight
    images = images.to(weight.device, weight.dtype)
    kept = None
    if keep is not None:
        keep = keep.to(weight.device)
        _, patches = masked_pixels(images, keep, model.config.patch_size)
        kept = F.pad(patches, (model.prefix, 0), value=True)
    tokens = model.forward_features(images, keep)
    if pooling == "head":
        vectors = model.pooled(tokens, kept)
    elif pooling == "class_token":
        vectors = prefix_token(tokens, 0)
    else:
        first = model.prefix
        vectors = mean_pool(tokens[:, first:], None if kept is None else kept[:, first:])
    return _finished(vectors, normalize=normalize)


def _finished(vectors: Pooled, *, normalize: bool) -> Pooled:
    """Return vectors in float32 or float64, divided by their lengths if requested."""
    vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    return F.normalize(vectors, dim=1) if normalize else vectors


def _listed(inputs: Any) -> Any:
    """Return inputs that are neither an array nor a single text as a list."""
    if isinstance(inputs, Tensor | str | bytes):
        return inputs
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "biuf":
        return inputs
    if isinstance(inputs, Mapping) or not isinstance(inputs, Iterable):
        raise ValueError(
            f"inputs is {named_type(inputs)}, expected a list of texts or images, or an array or "
            "tensor of pixels"
        )
    return list(inputs)


def _image_batches(source: Any, inputs: Any, batch_size: int) -> Iterator[Grids]:
    """Yield standardized grids from images, or from pixels or values."""
    format: Any = source.format
    is_array = isinstance(inputs, Tensor | np.ndarray)
    if is_array and inputs.ndim != format.axes + 2:
        raise ValueError(
            f"inputs has shape {tuple(inputs.shape)}, expected [N, {format.channels}, *axes] with "
            f"{plural(format.axes, 'axis')}"
        )
    check_batch(inputs)
    for first in range(0, len(inputs), batch_size):
        part = inputs[first : first + batch_size]
        if is_array:  # their range is checked only on the CPU
            part = part.cpu() if isinstance(part, Tensor) else part
            yield format.model_input(part).float()
        else:
            images = [_read(image, first + i, format) for i, image in enumerate(part)]
            yield torch.stack(images)


def _read(image: Any, index: int, format: Any) -> Pixels:
    """Read one of the inputs, an image file or a PIL image, as the input of a model."""
    if isinstance(image, Image.Image):
        return image_format(format, f"inputs[{index}]").from_pil(image)
    if isinstance(image, str | Path):
        return read_image(image, image_format(format, image))
    raise ValueError(
        f"inputs[{index}] is {named_type(image)}, expected an image file or a PIL image; pass "
        "pixels as one array or tensor [N, channels, *axes]"
    )
