"""`onescan embed`: vectors of texts and images in a file."""

import csv

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from PIL import Image

import onescan
from onescan.cli import main
from onescan.inference.embedding import embed_images, embed_texts, encode_texts
from onescan.integrations.transformers import to_transformers

TEXT_MODEL, IMAGE_MODEL = "zoo/shakespeare_lightnet", "zoo/digits_lightnet"


def read(path):
    with np.load(path, allow_pickle=False) as file:
        return file["vectors"], file["names"].tolist()


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.txt").write_text("to be\n\nor not to be\n", encoding="utf-8")
    with (tmp_path / "table.csv").open("w") as file:
        csv.writer(file).writerows([("text", "quote"), ("a", "hark"), ("b", "alas, poor Yorick")])
    (tmp_path / "images" / "more").mkdir(parents=True)
    for i, name in enumerate(("a.png", "more/b.png")):
        Image.fromarray(np.full((8, 8), 40 * i, np.uint8)).save(tmp_path / "images" / name)
    (tmp_path / "images" / "broken.png").write_bytes(b"no image")
    return tmp_path


def run(model, *words):
    return main(["embed", *words, "--model", model, "--out", "v.npz", "--device", "cpu"])


def test_texts_of_files_tables_and_arguments(inputs, capsys):
    words = ("lines.txt", "table.csv", "the king", "--text-column", "quote")
    assert run(TEXT_MODEL, *words) == 0
    assert "v.npz: 5 vectors of 128 numbers" in capsys.readouterr().out
    vectors, names = read("v.npz")
    assert names == ["to be", "or not to be", "hark", "alas, poor Yorick", "the king"]
    assert vectors.dtype == np.float32
    loaded = onescan.load(TEXT_MODEL)
    encoded = encode_texts(loaded.model, loaded.format.open(loaded.folder), names)
    assert_allclose(vectors, embed_texts(loaded.model, encoded).numpy(), atol=1e-5)


def test_options(inputs):
    assert run(TEXT_MODEL, "lines.txt", "--pooling", "last", "--normalize") == 0
    vectors, _ = read("v.npz")
    assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


def test_images_of_folders(inputs, capsys):
    assert run(IMAGE_MODEL, "images", "images/a.png", "--batch-size", "2") == 0
    printed = capsys.readouterr()
    assert "skipped: images/broken.png" in printed.err
    vectors, names = read("v.npz")
    assert names == ["images/a.png", "images/more/b.png", "images/a.png"]
    assert_allclose(vectors[0], vectors[2], atol=1e-5)
    loaded = onescan.load(IMAGE_MODEL)
    pixels = torch.full((1, 1, 8, 8), 40, dtype=torch.uint8)
    expected = embed_images(loaded.model, loaded.format.model_input(pixels))
    assert_allclose(vectors[1:2], expected.numpy(), atol=1e-5)


def test_folders_of_transformers(inputs):
    loaded = onescan.load(TEXT_MODEL)
    tokenizer = loaded.format.open(loaded.folder)
    to_transformers(loaded.model, tokenizer=tokenizer).save_pretrained("hf")
    assert run(TEXT_MODEL, "lines.txt") == 0
    expected, _ = read("v.npz")
    assert run("hf", "lines.txt") == 0
    assert_allclose(read("v.npz")[0], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "words", "reason"),
    [
        (TEXT_MODEL, (), "inputs is empty"),
        (TEXT_MODEL, ("images",), "images is a folder, but the model reads texts"),
        (TEXT_MODEL, ("lines.txt", "--batch-size", "0"), "batch-size is 0"),
        (TEXT_MODEL, ("none.csv",), "none.csv"),
        (TEXT_MODEL, ("table.csv", "--text-column", "x"), "has no column 'x'"),
        (IMAGE_MODEL, ("lines.txt",), "lines.txt"),
        (IMAGE_MODEL, ("images/broken.png",), "broken.png"),
        ("zoo/moving_digits_lightnet", ("a.npz",), "expected a model of texts or images"),
    ],
)
def test_mistakes_are_one_line(inputs, capsys, model, words, reason):
    assert run(model, *words) == 2
    assert reason in capsys.readouterr().err
    assert not (inputs / "v.npz").exists()


def test_the_output_has_a_suffix(inputs, capsys):
    assert main(["embed", "lines.txt", "--model", TEXT_MODEL, "--out", "v.csv"]) == 2
    assert "expected a name ending in .npz" in capsys.readouterr().err
