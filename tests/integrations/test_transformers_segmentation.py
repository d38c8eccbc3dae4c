"""Dense predictors in transformers: the same numbers, saved, loaded, trained, in a pipeline."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_run import tiny_run
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from transformers import (
    AutoImageProcessor,
    AutoModelForSemanticSegmentation,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.models.auto import modeling_auto

import onescan
from onescan.cli import main
from onescan.experiments.data import ArrayDatasetConfig
from onescan.experiments.tasks import SegmentationConfig
from onescan.experiments.training import train
from onescan.inputs import ImageFormat, read_image
from onescan.integrations.transformers import OnescanSegmentationConfig, to_transformers
from onescan.layers.mixers import (
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    SoftmaxMixerConfig,
)
from onescan.models.dense_predictor import DensePredictorConfig

MIXERS = {
    "lightnet": LightNetMixerConfig(num_heads=2),
    "softmax": SoftmaxMixerConfig(num_heads=2),
    "ldn": LinearDiffusionMixerConfig(num_heads=2),
}
FORMAT = ImageFormat(channels=3, height=16, width=24, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))


def built(mixer="lightnet", **options):
    torch.manual_seed(0)
    options = {"image_size": (16, 24), "patch_size": (4, 4), "out_channels": 5, **options}
    config = DensePredictorConfig(width=8, depth=2, mixer=MIXERS[mixer], drop_path=0.0, **options)
    return config.build().eval()


def images(*size):
    return torch.randn(2, 3, *(size or (16, 24)))


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("decoder", ["pyramid", "linear"])
def test_a_dense_predictor_comes_back_with_the_same_scores(mixer, decoder, tmp_path):
    native, names = built(mixer, decoder=decoder), dict(enumerate("abcde"))
    to_transformers(native, id2label=names).save_pretrained(tmp_path)
    model = AutoModelForSemanticSegmentation.from_pretrained(tmp_path)
    assert model.config.id2label == names
    for size in ((16, 24), (15, 9)):  # also one that patches do not divide
        pixels = images(*size)
        logits = model(pixels).logits
        assert logits.shape == (2, 5, *size)
        assert_close(logits, native(pixels))
    same = model.to_onescan()
    assert same.config == native.config
    for key, weight in native.state_dict().items():
        assert torch.equal(same.state_dict()[key], weight), key
    assert "pipeline_tag: image-segmentation" in (tmp_path / "README.md").read_text()


def test_other_classes_get_a_fresh_layer(tmp_path):
    native = built()
    to_transformers(native).save_pretrained(tmp_path)
    model = AutoModelForSemanticSegmentation.from_pretrained(
        tmp_path, num_labels=7, ignore_mismatched_sizes=True
    )
    assert model(images()).logits.shape == (2, 7, 16, 24)
    for key, weight in native.blocks.state_dict().items():
        assert torch.equal(model.network.blocks.state_dict()[key], weight), key


def test_a_config_is_made_from_names_that_transformers_has():
    config = OnescanSegmentationConfig(
        num_labels=4, hidden_size=8, num_hidden_layers=1, num_channels=1, patch_size=[8, 8]
    )
    config.mixer = {**config.mixer, "num_heads": 2}
    model = AutoModelForSemanticSegmentation.from_config(config)
    assert model(torch.zeros(1, 1, 16, 8)).logits.shape == (1, 4, 16, 8)


@pytest.mark.parametrize("ignored", [255, -100])
def test_the_loss_is_the_mean_over_labels_that_are_not_ignored(ignored):
    model = to_transformers(built(), semantic_loss_ignore_index=ignored).train()
    labels = torch.randint(5, (2, 16, 24))
    labels[:, :5] = ignored
    out = model(images(), labels=labels.int())
    assert_close(out.loss, cross_entropy(out.logits[:, :, 5:], labels[:, 5:]))
    out.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model(images(), labels=torch.full_like(labels, ignored)).loss == 0


def test_hidden_states_are_those_of_the_blocks():
    native = built()
    model, pixels = to_transformers(native), images()
    states = model(pixels, output_hidden_states=True).hidden_states
    assert [x.shape for x in states] == [(2, 24, 8)] * 3
    caught = []
    native.norm.register_forward_hook(lambda _, __, x: caught.append(x))
    native(pixels)
    assert_close(states[-1], caught[0])


def test_checkpointing_changes_no_gradient():
    gradients = []
    for enable in (False, True):
        model = to_transformers(built().train())
        model._set_gradient_checkpointing(enable=enable)
        assert model.network.blocks[0].gradient_checkpointing == enable
        labels = torch.ones(2, 16, 24, dtype=torch.long)
        model(torch.ones(2, 3, 16, 24), labels=labels).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


def test_trainer_learns(tmp_path):
    pixels = images(8, 8)
    data = [{"pixel_values": x, "labels": (x[0] > 0).long()} for x in pixels]
    model = to_transformers(built(out_channels=2).train())
    arguments = TrainingArguments(
        tmp_path, max_steps=6, learning_rate=1e-2, report_to="none", use_cpu=True,
        gradient_accumulation_steps=2, per_device_train_batch_size=1, logging_steps=1,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0] < 1  # log 2, not doubled by the accumulation


def test_a_pipeline_segments_images_at_their_own_size(tmp_path):
    native, names = built(), dict(enumerate("abcde"))
    to_transformers(native, image_format=FORMAT, id2label=names).save_pretrained(tmp_path)
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    assert processor.to_onescan() == FORMAT
    noise = np.random.default_rng(0).integers(0, 256, (11, 9, 3), dtype=np.uint8)
    picture = Image.fromarray(noise).resize((90, 110))
    picture.save(tmp_path / "picture.png")
    with torch.no_grad():
        logits = native(read_image(tmp_path / "picture.png", FORMAT)[None])
    want = torch.nn.functional.interpolate(logits, (110, 90), mode="bilinear")[0].argmax(0)
    known = modeling_auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES  # else a pipeline complains
    assert known["onescan_segmentation"] == "OnescanForSemanticSegmentation"
    found = pipeline("image-segmentation", str(tmp_path))(str(tmp_path / "picture.png"))
    assert {each["label"] for each in found} == {names[i] for i in want.unique().tolist()}
    for each in found:
        mask = torch.from_numpy(np.array(each["mask"])) > 0
        assert torch.equal(mask, want == "abcde".index(each["label"]))
    with torch.no_grad():
        outputs = to_transformers(native)(processor(picture).pixel_values)
    (small,) = processor.post_process_semantic_segmentation(outputs)
    assert torch.equal(small, logits[0].argmax(0))
    with pytest.raises(ValueError, match="target_sizes has 2 sizes, but there are 1 images"):
        processor.post_process_semantic_segmentation(outputs, [(1, 1)] * 2)


def test_convert_writes_a_folder(tmp_path):
    native = built()
    model = onescan.convert(native, tmp_path / "out", to="transformers")
    loaded = AutoModelForSemanticSegmentation.from_pretrained(tmp_path / "out")
    assert_close(loaded(pixels := images()).logits, model(pixels).logits)
    assert_close(model(pixels).logits, native(pixels))
    assert main(["convert", str(tmp_path / "out"), "--out", str(tmp_path / "back")]) == 2


def test_a_run_converts_with_its_classes(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=x[..., 0] // 128)
    native = built(image_size=(8, 8), out_channels=2)
    run = replace(
        tiny_run(epochs=1, batch_size=4),
        data=ArrayDatasetConfig(
            path=str(tmp_path / "a.npz"), test_fraction=0.25, class_names=("dark", "bright")
        ),
        task=SegmentationConfig(),
        model=native.config,
    )
    train(run, tmp_path / "run")
    onescan.convert(tmp_path / "run", tmp_path / "out", to="transformers")
    trained = onescan.load(tmp_path / "run")
    model = AutoModelForSemanticSegmentation.from_pretrained(tmp_path / "out")
    assert model.config.id2label == {0: "dark", 1: "bright"}
    assert AutoImageProcessor.from_pretrained(tmp_path / "out").to_onescan() == trained.format
    assert_close(model(pixels := images()).logits, trained.model(pixels))


def test_unusable_models_formats_and_labels_are_refused():
    with pytest.raises(ValueError, match=r"image_size is \(16,\), expected two numbers"):
        to_transformers(built(image_size=(16,), patch_size=(4,)))
    with pytest.raises(ValueError, match=r"image_format\.crop is 0\.9, expected None"):
        to_transformers(built(), image_format=replace(FORMAT, crop=0.9))
    with pytest.raises(ValueError, match="tokenizer was given for a DensePredictor, which reads"):
        to_transformers(built(), tokenizer="bytes")
    with pytest.raises(ValueError, match="out_channels is 2, but the model's is 5"):
        to_transformers(built(), num_labels=2)
    model, pixels = to_transformers(built()), images()
    with pytest.raises(ValueError, match="output_attentions is True"):
        model(pixels, output_attentions=True)
    with pytest.raises(ValueError, match=r"labels has shape \(2, 8, 8\), expected 'B H W'"):
        model(pixels, labels=torch.zeros(2, 8, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="num_labels 1, expected at least 2"):
        to_transformers(built(out_channels=1))(pixels, labels=torch.zeros(2, 16, 24).long())
