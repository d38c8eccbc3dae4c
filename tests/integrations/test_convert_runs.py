"""Runs of linear attention as folders of transformers and diffusers, with what pipelines need."""

import inspect
import random
from importlib import import_module

import pytest
import torch
from PIL import Image
from tiny_tokenizers import word_tokenizer

import onescan
from onescan import configs
from onescan.cli import main
from onescan.experiments.training.sampling import load_pipeline
from onescan.inference.classification import classify, classify_texts
from onescan.inference.loading import load_language_model
from onescan.inputs import ByteTokenizer
from onescan.inputs.tokenizer import PretrainedTokenizer

transformers = pytest.importorskip("transformers")

TEXTS = ("the soup was good", "the rain was cold")
ROWS = [f"{text} {end},{text.split()[1]}" for text in TEXTS for end in "abcdefghij"]


def convert(source, out, library="transformers"):
    assert main(["convert", str(source), "--out", str(out), "--to", library]) == 0


def load_words():
    return PretrainedTokenizer("words", word_tokenizer())


def test_a_folder_of_transformers_says_how_to_get_the_native_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Image.new("L", (8, 8), 255).save("a.png")
    convert("zoo/digits_lightnet", "theirs")
    capsys.readouterr()
    assert main(["predict", "theirs", "a.png"]) == 2
    error = capsys.readouterr().err
    assert "error: theirs holds a model of onescan in transformers' format, expected a run" in error
    assert "OnescanForImageClassification.from_pretrained of onescan.integrations.tran" in error
    for source in ("theirs", str(onescan.zoo.path("digits_lightnet"))):
        assert main(["convert", source, "--out", "back"]) == 2
        assert "--to transformers or --to diffusers converts it" in capsys.readouterr().err


@pytest.mark.slow
def test_a_byte_model_generates_in_a_pipeline(tmp_path, capsys):
    convert("zoo/shakespeare_lightnet", tmp_path / "model")
    said = capsys.readouterr().out
    assert "model: OnescanForCausalLM with 859,648 parameters and its tokenizer" in said
    write = transformers.pipeline("text-generation", str(tmp_path / "model"))
    options = {"do_sample": False, "return_full_text": False}
    (text,) = write("ROMEO: né", max_new_tokens=30, **options)
    model, tokenizer = load_language_model("zoo/shakespeare_lightnet")
    prompt = torch.tensor([tokenizer.begin("ROMEO: né")])
    ids = model.generate(prompt, max_new_tokens=30, end=tokenizer.end)
    assert text["generated_text"] == tokenizer.decode(ids[0].tolist())
    (text,) = write("", max_new_tokens=5, **options)  # begins with the token between two texts
    ids = model.generate(torch.tensor([[256]]), max_new_tokens=5, end=tokenizer.end)
    assert text["generated_text"] == tokenizer.decode(ids[0].tolist())


def test_the_saved_byte_tokenizer_equals_ours(tmp_path):
    ours = ByteTokenizer()
    ours.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.eos_token_id, theirs.mask_token_id, len(theirs)) == (256, 257, ours.size)
    rng = random.Random(0)
    for size in range(1, 300):
        ids = [rng.randrange(ours.size) for _ in range(size)]  # most bytes are no character
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
        text = ours.decode(ids)
        assert theirs(text).input_ids == ours.encode(text)
    assert theirs("a[MASK] b").input_ids == ours.encode("a[MASK] b", framed=True)
    assert theirs("a", "b").input_ids == [97, 256, 98]
    assert theirs.decode(ours.encode("who 's , there ?")) == "who 's , there ?"


def test_images_are_classified_as_by_predict(tmp_path, capsys):
    convert("zoo/cifar10_lightnet", tmp_path / "model")
    said = capsys.readouterr().out
    assert "OnescanForImageClassification with 1,655,434 parameters and its image proc" in said
    picture = tmp_path / "picture.png"
    Image.effect_noise((50, 40), 90).convert("RGB").save(picture)
    trained = onescan.load("zoo/cifar10_lightnet")
    scores = classify(trained.model, [picture], trained.format)[0].tolist()
    want = dict(zip(trained.class_names, scores, strict=True))
    pipeline = transformers.pipeline("image-classification", str(tmp_path / "model"), top_k=10)
    got = {guess["label"]: guess["score"] for guess in pipeline(str(picture))}
    assert got == pytest.approx(want, abs=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
def test_texts_are_classified_as_by_predict(tokenizer, tmp_path, capsys):
    table = tmp_path / "texts.csv"
    table.write_text("\n".join(["text,label", *ROWS]), encoding="utf-8")
    command = ["train", "text_classifier", "--data.path", str(table), "--out", str(tmp_path)]
    if tokenizer == "words":
        word_tokenizer().save_pretrained(tmp_path / "words")
        command += ["--data.tokenizer", str(tmp_path / "words")]
    command += ["--training.epochs", "1", "--model.depth", "1", "--model.width", "32"]
    assert main([*command, "--training.batch-size", "8", "--data.length", "20"]) == 0
    convert(tmp_path / "seed-0", tmp_path / "model")
    assert "OnescanForSequenceClassification with" in capsys.readouterr().out
    trained = onescan.load(tmp_path / "seed-0")
    texts = [TEXTS[0], "soup", "the rain was cold, and the soup was good"]  # the last is too long
    encoder = trained.format.open(trained.folder)
    want = classify_texts(trained.model, texts, encoder)
    pipeline = transformers.pipeline("text-classification", str(tmp_path / "model"), top_k=2)
    for text, scores in zip(texts, want.tolist(), strict=True):
        got = {guess["label"]: guess["score"] for guess in pipeline([text], truncation=True)[0]}
        expected = dict(zip(trained.class_names, scores, strict=True))
        assert got == pytest.approx(expected, abs=1e-5)


def test_a_denoiser_keeps_its_noise_and_classes(tmp_path, capsys):
    convert("zoo/digits_denoiser", tmp_path / "model", "diffusers")
    assert "model: DenoiserModel with 1,376,516 parameters\n" in capsys.readouterr().out
    theirs, ours = load_pipeline(tmp_path / "model"), load_pipeline("zoo/digits_denoiser")
    assert (theirs.names, dict(theirs.config)["noise"]) == (ours.names, dict(ours.config)["noise"])
    a, b = (
        pipeline([3], num_inference_steps=2, generator=torch.Generator().manual_seed(0)).images[0]
        for pipeline in (theirs, ours)
    )
    assert a.tobytes() == b.tobytes()


def test_softmax_without_a_counterpart_keeps_its_architecture(tmp_path):
    changes = {"width": 24, "depth": 1, "mixer.num_heads": 3, "vocab_size": 31}
    rotary = configs.replace(onescan.preset("gpt2_small"), {**changes, "mixer.rotary": True})
    assert type(onescan.convert(rotary.build(), to="transformers")).__name__ == "OnescanForCausalLM"
    dit = configs.replace(onescan.preset("dit_s_2"), {"depth": 1, "image_size": (8, 8)})
    onescan.convert(dit.build(), tmp_path / "dit", to="diffusers")
    assert load_pipeline(tmp_path / "dit").transformer.to_onescan().config == dit


def test_the_command_says_what_pipelines_lack(tmp_path, capsys):
    convert("zoo/moving_digits_lightnet", tmp_path / "video")
    assert "parameters; the source has no tokenizer or image processor\n" in capsys.readouterr().out
    for name, library, says in (
        ("digits_denoiser", "transformers", "model is a Denoiser, expected one of CausalLM, "),
        ("digits_lightnet", "diffusers", "model is an ImageClassifier, expected a Denoiser"),
    ):
        out = str(tmp_path / "none")
        assert main(["convert", f"zoo/{name}", "--out", out, "--to", library]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", ["transformers", "diffusers"])
def test_a_checkpoint_in_place_of_its_model_is_named(name):
    checkpoint = onescan.load("zoo/digits_denoiser")
    function = getattr(import_module(f"onescan.integrations.{name}"), f"to_{name}")
    with pytest.raises(ValueError, match=r"a Checkpoint, expected .*; pass checkpoint.model"):
        inspect.unwrap(function)(checkpoint)
    with pytest.raises(
        ValueError, match=r"source is a Checkpoint, .* as onescan.load\(...\).model"
    ):
        inspect.unwrap(onescan.convert)(checkpoint, to=name)


def test_tokenizers_of_other_models_are_refused():
    from onescan.integrations.transformers import to_transformers

    small = {"width": 24, "depth": 1, "mixer.num_heads": 3, "vocab_size": 31}
    model = configs.replace(onescan.preset("lightnet_lm_45m"), small).build()
    with pytest.raises(ValueError, match="has 258 tokens, but the model's vocabulary has 31"):
        to_transformers(model, tokenizer=ByteTokenizer())
    with pytest.raises(ValueError, match=r"expected an onescan\.inputs\.Tokenizer"):
        to_transformers(model, tokenizer=word_tokenizer())
    given = to_transformers(model, tokenizer=load_words(), eos_token_id=4)
    assert given.config.eos_token_id == 4
    assert given.config.pad_token_id == word_tokenizer().pad_token_id
    image_model = onescan.build("lightnet_tiny", num_classes=2, depth=1)
    with pytest.raises(ValueError, match="tokenizer was given for an ImageClassifier, which reads"):
        to_transformers(image_model, tokenizer=load_words())
