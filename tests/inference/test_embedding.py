"""Vectors of texts and images: padding, batches and order have no effect; each kind of pooling."""

from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
from PIL import Image
from tiny_language_models import BOTH, CAUSAL, SMALL, causal, ids, masked, padded
from tiny_tokenizers import WORDS, words
from torch.testing import assert_close

from onescan.inference.embedding import embed, embed_grids, embed_tokens
from onescan.inference.loading import Checkpoint, load, load_language_model
from onescan.inputs import ByteTokenizer, ImageFormat, PairFormat, TextFormat, read_image
from onescan.layers.position import TokenPositionConfig
from onescan.models.dense_predictor import DensePredictorConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.sequence_classifier import SequenceClassifierConfig

TEXTS = ["the cat sat on the mat", "a dog", "the mat", "the dog sat", "a cat on a mat"]
TOLERANCE = {"rtol": 0, "atol": 1e-9}
MODELS = {
    **{f"{name}, causal": (causal, change) for name, change in CAUSAL.items()},
    **{name: (masked, change) for name, change in BOTH.items()},
}
IMAGES = ImageFormat(channels=3, height=8, width=8, mean=(0.5,) * 3, std=(0.2,) * 3)


def pair(name="lion", **more):
    """A masked language model in float64 and a tokenizer that adds [CLS] and [SEP]."""
    return masked(BOTH[name], vocab_size=len(WORDS), **more), words(framed=True)


def checkpoint(model, format, folder="nowhere"):
    return Checkpoint(
        folder=Path(folder), run={}, model=model.eval(), format=format, class_names=(), metrics={}
    )


def text_classifier(length=16, **more):
    """A text classifier of bytes."""
    config = SequenceClassifierConfig(**{**SMALL, **BOTH["lion"], "vocab_size": 258, **more})
    format = PairFormat(text=TextFormat.of(ByteTokenizer()), length=length)
    return checkpoint(config.build().double(), format)


def image_classifier(**more):
    sizes = {"image_size": (8, 8), "patch_size": (4, 4), "width": 24, "depth": 1, "num_classes": 3}
    return ImageClassifierConfig(**{**sizes, **more}).build().double().eval()


@pytest.fixture
def _untyped():
    """Without the type checks of the tests, so that functions check their arguments themselves."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# Texts


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", MODELS)
def test_padding_of_tokens_has_no_effect(kind, side, pooling):
    build, change = MODELS[kind]
    model, tokens, lengths = build(change), ids(4, 9), [9, 5, 1, 7]
    together = embed_tokens(model, *padded(tokens, lengths, side), pooling=pooling)
    for row, length, vector in zip(tokens, lengths, together, strict=True):
        alone = embed_tokens(model, row[None, :length], None, pooling=pooling)
        assert_close(vector, alone[0], **TOLERANCE)


def test_one_text_has_the_vector_that_it_has_among_others():
    source = pair()
    together = embed(source, TEXTS)
    assert together.shape == (len(TEXTS), 24)
    alone = torch.cat([embed(source, [text]) for text in TEXTS])
    assert_close(together, alone, **TOLERANCE)
    for size in (1, 2, 3):
        assert_close(embed(source, TEXTS, batch_size=size), together, **TOLERANCE)
    assert_close(embed(source, TEXTS[::-1]), together.flip(0), **TOLERANCE)
    assert not torch.allclose(together[0], together[1])


def test_in_float32_batches_agree_to_five_digits():
    source = load_language_model("zoo/shakespeare_lightnet")
    texts = ["To be, or not to be", "A horse! A horse! my kingdom for a horse!", "Ay", "No" * 300]
    together = embed(source, texts)
    assert together.dtype == torch.float32
    alone = torch.cat([embed(source, [text], batch_size=1) for text in texts])
    assert_close(together, alone, rtol=1e-5, atol=1e-5)
    assert_close(embed(load("zoo/shakespeare_lightnet"), texts), together)


def test_poolings_of_texts_are_what_they_say():
    model, tokenizer = pair()
    with torch.no_grad():
        x, _ = model.network(torch.tensor([tokenizer.encode(TEXTS[0], framed=True)]))
    for pooling, want in {"mean": x.mean(dim=1), "last": x[:, -1], "class_token": x[:, 0]}.items():
        assert_close(embed((model, tokenizer), TEXTS[:1], pooling=pooling), want, **TOLERANCE)
    assert_close(embed((model, tokenizer), TEXTS[:1]), x.mean(dim=1), **TOLERANCE)


@pytest.mark.parametrize("pool", ["mean", "first", "max", "attention"])
def test_the_head_of_a_text_classifier_reads_what_is_pooled(pool):
    source = text_classifier(pool=pool, head_transform=False)
    vectors = embed(source, TEXTS[1:3], pooling="head")
    with torch.no_grad():
        want = source.model(*source.format.model_input(TEXTS[1:3]))
        assert_close(source.model.head.scores(vectors), want, **TOLERANCE)
    if pool == "mean":
        assert_close(embed(source, TEXTS[1:3]), vectors, **TOLERANCE)


def test_vectors_are_normalized_on_request():
    source = pair()
    vectors = embed(source, TEXTS, normalize=True)
    assert_close(vectors.norm(dim=1), torch.ones(len(TEXTS)).double(), **TOLERANCE)
    assert_close(vectors, torch.nn.functional.normalize(embed(source, TEXTS)), **TOLERANCE)


@pytest.mark.parametrize("kind", ["language model", "classifier"])
def test_long_texts_are_refused_or_truncated_as_in_predict(kind):
    long, short = "the " * 9 + "cat", "the " * 5 + "the"
    if kind == "language model":  # [CLS], 6 words, [SEP]
        source = pair("bert", position=TokenPositionConfig(max_tokens=8))
    else:
        source, short = text_classifier(length=8), "the the "
    message = r"inputs\[1\] is longer than the 8 tokens that the model reads; pass truncate=True"
    with pytest.raises(ValueError, match=message):
        embed(source, [short, long])
    vectors = embed(source, [short, long], truncate=True)
    assert_close(vectors[0], vectors[1], **TOLERANCE)
    assert_close(vectors[:1], embed(source, [short]), **TOLERANCE)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "inputs is empty"),
        ("the cat", "inputs is a single string"),
        (["a", ""], r"inputs\[1\] is '', which has no tokens"),
        (["a", "b\ud800"], r"inputs\[1\] is 'b\\ud800', expected Unicode text without lone"),
        (["a", 3], r"inputs\[1\] is an int, expected a string"),
        (3, "inputs is an int, expected a list of texts or images, or an array or tensor"),
        ({"text": "a"}, "inputs is a dict, expected a list of texts or images"),
        (torch.ones(2, 3), r"inputs\[0\] is a Tensor, expected a string"),
    ],
)
@pytest.mark.usefixtures("_untyped")
def test_inputs_without_texts_are_refused(inputs, message):
    with pytest.raises(ValueError, match=message):
        embed(pair(), inputs)


def test_texts_may_be_any_iterable():
    source = pair()
    want = embed(source, TEXTS)
    for texts in (iter(TEXTS), tuple(TEXTS), np.array(TEXTS), dict.fromkeys(TEXTS).keys()):
        assert_close(embed(source, texts), want, **TOLERANCE)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, "bytes"), lambda x: (x,), str])
@pytest.mark.usefixtures("_untyped")
def test_other_sources_are_refused(wrap):
    source = wrap(causal(CAUSAL["lion"]))
    message = "source is .*, expected a model as onescan.load returns it, or a language model and"
    with pytest.raises(ValueError, match=message):
        embed(source, TEXTS)


@pytest.mark.parametrize(
    ("source", "pooling", "message"),
    [
        (pair, "head", "pooling is 'head', expected 'mean', 'last' or 'class_token'"),
        (
            lambda: (causal(CAUSAL["lion"], vocab_size=len(WORDS)), words(framed=True)),
            "class_token",
            "pooling is 'class_token', but the first token of a causal model reads no other",
        ),
        (
            lambda: (masked(BOTH["lion"], vocab_size=258), ByteTokenizer()),
            "class_token",
            "pooling is 'class_token', but tokenizer 'bytes' adds no token before a text",
        ),
        (
            lambda: checkpoint(image_classifier(), IMAGES),
            "last",
            "pooling is 'last', expected 'head', 'mean' or 'class_token'",
        ),
        (
            lambda: checkpoint(image_classifier(pool="mean"), IMAGES),
            "class_token",
            "pooling is 'class_token', but this model has no class token",
        ),
    ],
)
def test_poolings_that_do_not_fit_are_refused(source, pooling, message):
    with pytest.raises(ValueError, match=message):
        embed(source(), TEXTS, pooling=pooling)


def test_other_models_are_refused():
    model = DensePredictorConfig(image_size=(8, 8), patch_size=(4, 4)).build()
    with pytest.raises(
        ValueError, match="a DensePredictor cannot embed inputs, expected a language"
    ):
        embed(checkpoint(model, IMAGES), ["a.png"])
    with pytest.raises(ValueError, match="batch_size is 0"):
        embed(pair(), TEXTS, batch_size=0)


# Images


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)
    for name, size in (("a.png", (8, 8)), ("b.png", (20, 11)), ("c.png", (5, 9))):
        Image.fromarray(rng.integers(256, size=(*size, 3), dtype=np.uint8)).save(tmp_path / name)
    return sorted(tmp_path.iterdir())


@pytest.mark.parametrize("pool", ["class_token", "mean", "mean_with_class_token", "attention"])
def test_the_head_of_an_image_classifier_reads_the_vectors(pool, files):
    source = checkpoint(image_classifier(pool=pool), IMAGES)
    source.model.double()
    vectors = embed(source, files)
    images = torch.stack([read_image(file, IMAGES) for file in files]).double()
    with torch.no_grad():
        assert_close(source.model.head(vectors), source.model(images), **TOLERANCE)
    assert_close(torch.cat([embed(source, [file]) for file in files]), vectors, **TOLERANCE)
    assert_close(embed(source, files, batch_size=2), vectors, **TOLERANCE)


def test_poolings_of_images_are_what_they_say(files):
    source = checkpoint(image_classifier(), IMAGES)
    images = torch.stack([read_image(file, IMAGES) for file in files]).double()
    with torch.no_grad():
        tokens = source.model.forward_features(images)
    assert_close(embed(source, files, pooling="class_token"), tokens[:, 0], **TOLERANCE)
    assert_close(embed(source, files, pooling="mean"), tokens[:, 1:].mean(dim=1), **TOLERANCE)


def test_pixels_are_standardized_like_files(files):
    source = checkpoint(image_classifier(), IMAGES)
    pixels = torch.randint(256, (3, 3, 8, 8), dtype=torch.uint8)
    for i, file in enumerate(files):
        Image.fromarray(pixels[i].movedim(0, -1).numpy()).save(file)
    want = embed(source, files)
    assert_close(embed(source, pixels, batch_size=2), want, rtol=0, atol=1e-6)
    assert_close(embed(source, pixels.numpy()), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pooling", ["head", "mean"])
def test_padding_of_grids_has_no_effect(pooling):
    model = image_classifier(channels=1, image_size=(16,), patch_size=(4,), pool="mean")
    signals = torch.randn(2, 1, 16).double()
    keep = torch.ones(2, 16, dtype=torch.bool)
    keep[1, 8:] = False
    signals[1, :, 8:] = torch.nan
    together = embed_grids(model, signals, keep, pooling=pooling)
    for i, length in enumerate((16, 8)):
        alone = embed_grids(model, signals[i : i + 1, :, :length], pooling=pooling)
        assert_close(together[i : i + 1], alone, **TOLERANCE)


def test_pictures_in_memory_are_embedded_like_files(files):
    source = checkpoint(image_classifier(), IMAGES)
    want = embed(source, files)
    assert_close(embed(source, [Image.open(file) for file in files]), want, **TOLERANCE)
    assert_close(embed(source, iter(files)), want, **TOLERANCE)
    assert_close(embed(source, np.array([str(file) for file in files])), want, **TOLERANCE)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.rand(2, 8, 8, 3), r"has shape \(2, 8, 8, 3\), expected \[\.\.\., 3, \*axes\]"),
        (torch.rand(2, 1, 8, 8), r"has shape \(2, 1, 8, 8\), expected \[\.\.\., 3, \*axes\]"),
        (
            torch.rand(3, 8, 8),
            r"inputs has shape \(3, 8, 8\), expected \[N, 3, \*axes\] with 2 axes",
        ),
        (torch.rand(2, 3, 8, 8) * 255, "pixels are floats from .* expected floats from 0 to 1"),
        (torch.randn(2, 3, 8, 8).numpy(), "pixels are floats from"),
        ([torch.rand(3, 8, 8)], r"inputs\[0\] is a Tensor, expected an image file or a PIL image"),
        (torch.rand(1, 3, 8, 8).tolist(), r"inputs\[0\] is a list, expected an image file"),
        (Image.new("L", (8, 8)), "inputs is an Image, expected a list of texts or images"),
    ],
)
@pytest.mark.usefixtures("_untyped")
def test_other_pixels_are_refused(inputs, message):
    with pytest.raises(ValueError, match=message):
        embed(checkpoint(image_classifier(), IMAGES), inputs)


@pytest.mark.parametrize("pooling", ["max", "last", None])
@pytest.mark.usefixtures("_untyped")
def test_other_poolings_of_grids_are_refused(pooling):
    message = f"pooling is {pooling!r}, expected 'head', 'mean' or 'class_token'"
    with pytest.raises(ValueError, match=message):
        embed_grids(image_classifier(), torch.randn(1, 3, 8, 8), pooling=pooling)
    with pytest.raises(ValueError, match="pooling is 'class_token', but this model has no class"):
        embed_grids(image_classifier(pool="mean"), torch.randn(1, 3, 8, 8), pooling="class_token")


@pytest.mark.usefixtures("_untyped")
def test_other_poolings_of_tokens_are_refused():
    for pooling in ("head", "max"):
        message = f"pooling is '{pooling}', expected 'mean', 'last' or 'class_token'$"
        with pytest.raises(ValueError, match=message):
            embed_tokens(pair()[0], ids(1, 4), None, pooling=pooling)
    model = text_classifier().model
    with pytest.raises(ValueError, match="expected 'mean', 'last', 'class_token' or 'head'"):
        embed_tokens(model, ids(1, 4), None, pooling="max")


def test_files_for_a_model_of_arrays_are_refused():
    with pytest.raises(ValueError, match="inputs is empty"):
        embed(checkpoint(image_classifier(), IMAGES), [])
    with pytest.raises(ValueError, match="inputs is empty"):
        embed(checkpoint(image_classifier(), IMAGES), torch.rand(0, 3, 8, 8))
    with pytest.raises(FileNotFoundError, match=r"no\.png"):
        embed(checkpoint(image_classifier(), IMAGES), ["no.png"])
