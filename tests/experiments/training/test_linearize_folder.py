"""The parts of `linearize_folder`: classes, image processors and lengths."""

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoModelForMaskedLM

from onescan.experiments.training.linearize_folder import (
    _check_length,
    _length,
    match_classes,
)
from onescan.experiments.training.processed_images import image_format

SIZES = {
    "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 20, "pad_token_id": 1,
}  # fmt: skip


def config_of(names):
    return transformers.BertConfig(
        id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)}
    )


def numbered(count):
    return transformers.BertConfig(num_labels=count)


def test_numbered_classes_are_matched_by_number():
    for prefix in ("LABEL_", "", "class"):
        names = tuple(sorted(f"{prefix}{i}" for i in range(11)))
        order, notes = match_classes(config := numbered(11), names)
        assert [int(name.removeprefix(prefix)) for name in names] == order
        assert bool(notes) == (prefix == "class")
        first = "class0" if prefix == "class" else "LABEL_0"
        assert (config.id2label[0], config.label2id[first]) == (first, 0)


def test_named_classes_are_matched_by_name_or_index():
    assert match_classes(config_of(["pos", "neg"]), ("neg", "pos")) == ([1, 0], [])
    order, (note,) = match_classes(config_of(["NEGATIVE", "POSITIVE"]), ("0", "1"))
    assert order == [0, 1]
    assert note == "classes of the data, and of the model: 0 is NEGATIVE, 1 is POSITIVE"


@pytest.mark.parametrize(
    ("config", "names", "reason"),
    [
        (config_of(["a", "b"]), ("a", "c"), "data has the classes a, c, but the model has a, b"),
        (config_of(["a", "b"]), ("1", "2"), "data has the classes 1, 2, but the model has a, b"),
        (config_of(["a", "a"]), ("a", "b"), "but the model has a, a"),
        (numbered(3), ("a", "b"), "data has the classes a, b, but the model has 3 classes"),
        (numbered(2), ("LABEL_1", "LABEL_2"), "but the model has 2 classes"),
    ],
)
def test_other_classes_are_an_error(config, names, reason):
    with pytest.raises(ValueError, match=reason):
        match_classes(config, names)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("ViT", {}),
        ("ViT", {"do_normalize": False}),
        ("ViT", {"do_rescale": False}),
        ("ViT", {"do_rescale": False, "do_normalize": False}),
        ("ViT", {"rescale_factor": 1 / 127.5, "image_mean": 1.0, "image_std": 1.0}),
        ("ViT", {"resample": 0}),
        ("DeiT", {}),
        ("CLIP", {"size": {"shortest_edge": 30}, "crop_size": 28}),
        ("Bit", {"size": {"shortest_edge": 20}}),
        ("Siglip", {}),
    ],
)
def test_pixels_are_those_of_the_image_processor(tmp_path, kind, fields):
    sizes = {} if "size" in fields or kind == "DeiT" else {"size": {"height": 12, "width": 20}}
    processor = getattr(transformers, f"{kind}ImageProcessorPil")(**sizes, **fields)
    format = image_format(transformers.ViTForImageClassification(small_vit()), processor)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    found = format.model_input(format.decode(tmp_path / "x.png"))
    expected = processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"][0].float()
    assert found.shape == (3, format.height, format.width)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def small_vit():
    return transformers.ViTConfig(
        image_size=(12, 20), patch_size=4, hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=16,
    )  # fmt: skip


def test_other_image_processors_are_an_error():
    model = transformers.ViTForImageClassification(small_vit())
    with pytest.raises(ValueError, match="it returns pixel_values of shape"):
        image_format(model, transformers.Siglip2ImageProcessorPil())
    with pytest.raises(ValueError, match="expected one that only resizes, crops"):
        image_format(model, transformers.EfficientNetImageProcessorPil(rescale_offset=True))


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("bert", 20), ("camembert", 18), ("data2vec-text", 18), ("ibert", 18), ("luke", 18),
        ("longformer", 18), ("mpnet", 18), ("roberta", 18), ("roberta-prelayernorm", 18),
        ("xlm-roberta", 18), ("xlm-roberta-xl", 18), ("xmod", 18), ("electra", 20),
        ("distilbert", 20), ("esm", 18), ("nystromformer", 20),
    ],
)  # fmt: skip
def test_positions_begin_after_the_padding_id(kind, most):
    fields = dict(SIZES)
    fields |= {"default_language": "en_XX"} if kind == "xmod" else {}
    fields |= {"attention_window": 4} if kind == "longformer" else {}
    fields |= {"entity_vocab_size": 5} if kind == "luke" else {}
    fields |= {"dim": 16, "n_layers": 1, "n_heads": 2} if kind == "distilbert" else {}
    fields |= {"mask_token_id": 4, "position_embedding_type": "absolute"} if kind == "esm" else {}
    config = transformers.CONFIG_MAPPING[kind](**fields)
    model = AutoModelForMaskedLM.from_config(config).eval()
    assert _length(model, None) == most
    inputs = torch.full((1, most), 7)
    model(input_ids=inputs, attention_mask=inputs * 0 + 1)
    with pytest.raises(ValueError, match=f"length is {most + 1}, but the model has {most}"):
        _length(model, most + 1)


class Vocabulary:
    all_special_ids = (0, 1)

    def get_vocab(self):
        return {"a": 5}


def test_a_model_that_cannot_read_text_is_an_error():
    config = transformers.RobertaConfig(**SIZES | {"pad_token_id": None})
    model = transformers.RobertaForMaskedLM(config)
    with pytest.raises(ValueError, match="the model cannot read a text of 20 tokens"):
        _check_length(model, Vocabulary(), _length(model, None))
