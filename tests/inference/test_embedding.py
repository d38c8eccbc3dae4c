"""Vectors of texts and images: padding and batches have no effect."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize
from torch.testing import assert_close

import onescan
from onescan.inference.embedding import embed_images, embed_texts, encode_texts
from onescan.inputs.tokenizer import ByteTokenizer

TEXT = {"vocab_size": 257, "width": 12, "depth": 2, "mixer.num_heads": 2}
TEXTS = ["to be", "a", "or not to be, that is the question", "bee"]


def model(name):
    torch.manual_seed(0)
    if name == "classifier":
        mixer = onescan.preset("lightnet_mlm_base", **TEXT).mixer
        config = onescan.SequenceClassifierConfig(vocab_size=257, width=12, depth=2, mixer=mixer)
        return config.build().double().eval()
    return onescan.build(name, **TEXT).double().eval()


@pytest.mark.parametrize("name", ["lightnet_lm_45m", "lion_s_mlm_base", "bert_base", "classifier"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_batches_have_no_effect(name, pooling):
    net = model(name)
    tokens = encode_texts(net, ByteTokenizer(), TEXTS).tokens
    together = embed_texts(net, tokens, pooling=pooling)
    assert together.shape == (4, 12)
    for batch_size in (1, 3):
        assert_close(
            embed_texts(net, tokens, pooling=pooling, batch_size=batch_size), together,
            atol=1e-9, rtol=1e-9,
        )  # fmt: skip
    for ids, vector in zip(tokens, together, strict=True):
        x, _ = net.network(torch.as_tensor(ids.astype(np.int64))[None])
        expected = x[0].mean(dim=0) if pooling == "mean" else x[0, -1]
        assert_close(vector, expected.detach(), atol=1e-9, rtol=1e-9)


def test_vectors_are_scaled():
    net = model("lightnet_lm_45m")
    tokens = encode_texts(net, ByteTokenizer(), TEXTS)
    expected = normalize(embed_texts(net, tokens), dim=-1)
    assert torch.equal(embed_texts(net, tokens, normalize=True), expected)


def test_long_texts_are_truncated_and_counted():
    net = onescan.build("bert_base", **TEXT, **{"position.max_tokens": 6}).eval()
    encoded = encode_texts(net, ByteTokenizer(), TEXTS)
    assert encoded.truncated == 1
    assert [len(tokens) for tokens in encoded.tokens] == [5, 1, 6, 3]
    assert_close(
        embed_texts(net, encoded)[2:3],
        embed_texts(net, encode_texts(net, ByteTokenizer(), ["or not"])),
    )


@pytest.mark.parametrize("pool", ["mean", "class_token", "max"])
def test_images_give_the_input_of_the_head(pool):
    net = onescan.build(
        "lightnet_tiny", image_size=(8, 12), patch_size=(4, 4), width=12, depth=1, num_classes=3,
        pool=pool, **{"mixer.num_heads": 2},
    ).double().eval()  # fmt: skip
    images = torch.randn(5, 3, 8, 12, dtype=torch.float64)
    vectors = embed_images(net, images, batch_size=2)
    assert_close(net.head(vectors), net(images), atol=1e-9, rtol=1e-9)


def test_mistakes_are_named():
    net = model("lightnet_lm_45m")
    with pytest.raises(ValueError, match="texts is empty"):
        embed_texts(net, [])
    with pytest.raises(ValueError, match="pooling 'max' is unknown"):
        embed_texts(net, [np.array([1])], pooling="max")
    with pytest.raises(ValueError, match="batch_size"):
        embed_texts(net, [np.array([1])], batch_size=0)
    with pytest.raises(ValueError, match=r"texts\[1\] is '', which has no tokens"):
        encode_texts(net, ByteTokenizer(), ["a", ""])
    with pytest.raises(ValueError, match="expected an ImageClassifier"):
        embed_images(net, torch.randn(1, 3, 8, 8))
    with pytest.raises(ValueError, match="expected a language model or text classifier"):
        embed_texts(torch.nn.Linear(1, 1), [np.array([1])])
