"""Distillation: the loss, the token, the teacher, and what is rejected."""

import dataclasses
import json
import math
import shutil
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import (
    KilledError,
    StripesConfig,
    TinyModelConfig,
    assert_same,
    press_ctrl_c_at,
    raise_at,
    tiny_run,
)
from torch import nn

from onescan.checkpoint.run_folder import write_config
from onescan.cli import main
from onescan.configs import from_dict, replace, to_dict
from onescan.experiments.data import MixConfig
from onescan.experiments.tasks import DistillationConfig, ImageClassificationConfig
from onescan.experiments.tasks.teacher import Teacher, load_teacher
from onescan.experiments.training import RunConfig, read_metrics, train
from onescan.inference.loading import load
from onescan.inputs import ArrayFormat, ImageFormat
from onescan.inputs.tokenizer import TextFormat
from onescan.models.image_classifier import ImageClassifierConfig

GRAY = ImageFormat(channels=1, height=4, width=4, mean=(0.0,), std=(1.0,))
NAMES = ("rows", "columns", "noise")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The folder of a run that classifies rows, columns and noise."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    run = replace(tiny_run(), {"training.epochs": 30, "task.augment": None})
    assert train(run, folder).metrics["accuracy"] > 0.9
    return str(folder)


@pytest.fixture
def copied(teacher, tmp_path):
    """A copy of the teacher, to be changed."""
    return shutil.copytree(teacher, tmp_path / "copied")


def distilled_run(teacher, **changes):
    return replace(tiny_run(), {"task.teacher": teacher, **changes})


def with_token(teacher, **changes) -> RunConfig:
    model = ImageClassifierConfig(
        image_size=(4, 4), channels=1, patch_size=(2, 2), num_classes=3, width=24, depth=2
    )
    model = replace(model, {"mixer.num_heads": 2, "mixer.gate_rank": 4, "position": None})
    model = dataclasses.replace(model, distillation_token=True)
    return dataclasses.replace(distilled_run(teacher, **changes), model=model)


class Fixed(nn.Module):
    """Scores that do not depend on the images: one tensor, or a pair for the two heads."""

    def __init__(self, *scores):
        super().__init__()
        self.scores = nn.ParameterList(scores)

    def forward(self, images):
        return tuple(self.scores) if len(self.scores) > 1 else self.scores[0]


# The loss


def log_softmax(row):
    total = math.log(sum(math.exp(z) for z in row))
    return [z - total for z in row]


def expected_loss(labeled, distilled, teacher_scores, targets, config):
    """Return the mean over images of DeiT's losses, computed number by number."""
    losses = []
    for z, d, t, y in zip(labeled, distilled, teacher_scores, targets, strict=True):
        loss = -sum(p * log for p, log in zip(y, log_softmax(z), strict=True))
        if config.kind == "hard":
            part = -log_softmax(d)[max(range(len(t)), key=t.__getitem__)]
        else:
            tau = config.temperature
            ours, log_target = (log_softmax([score / tau for score in row]) for row in (d, t))
            part = tau**2 * sum(
                math.exp(q) * (q - p) for p, q in zip(ours, log_target, strict=True)
            )
        losses.append((1 - config.weight) * loss + config.weight * part)
    return sum(losses) / len(losses)


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("weight", [0.1, 1.0])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("soft_labels", [False, True])
def test_the_loss_is_that_of_the_paper(kind, weight, heads, soft_labels):
    config = DistillationConfig(kind=kind, weight=weight, temperature=2.0)
    task = ImageClassificationConfig(teacher="t", distillation=config).build(
        StripesConfig().build()
    )
    torch.manual_seed(0)
    scores, teacher_scores = torch.randn(heads, 5, 3) * 2, torch.randn(5, 3) * 2
    labels = torch.tensor([0, 2, 1, 1, 0])
    targets = torch.rand(5, 3).softmax(dim=1) if soft_labels else nn.functional.one_hot(labels, 3)
    task.distillation.teacher = Teacher(
        name="t", model=Fixed(teacher_scores), format=GRAY, class_names=NAMES
    )
    batch = torch.rand(5, 1, 4, 4), targets if soft_labels else labels
    loss, metrics = task.loss(Fixed(*scores), batch)
    want = expected_loss(
        *(x.tolist() for x in (scores[0], scores[-1], teacher_scores, targets)), config
    )
    assert loss.item() == pytest.approx(want, rel=1e-5)
    parts = (1 - weight) * metrics["label_loss"] + weight * metrics["teacher_loss"]
    torch.testing.assert_close(parts, loss)
    agreement = (scores[-1].argmax(dim=1) == teacher_scores.argmax(dim=1)).float().mean()
    assert metrics["teacher_agreement"] == agreement
    classes = targets.argmax(dim=1)
    assert metrics["accuracy"] == (scores[0].argmax(dim=1) == classes).float().mean()


@pytest.mark.slow
def test_label_smoothing_does_not_change_the_teacher_loss(teacher):
    run = distilled_run(teacher, **{"task.augment": None})
    data = run.data.build()
    batch = data.train.read([example for example, _ in data.train.examples(seed=None)]).batch
    sharp, smooth = (
        replace(run.task, {"label_smoothing": part})
        .build(data)
        .loss(Fixed(torch.eye(33, 3)), batch)
        for part in (0.0, 0.3)
    )
    assert sharp[1]["label_loss"] != smooth[1]["label_loss"]
    assert sharp[1]["teacher_loss"] == smooth[1]["teacher_loss"]


# The token


def test_each_head_has_its_own_loss(teacher):
    run = with_token(teacher)
    model, data = run.model.build().train(), run.data.build()
    batch = data.train.read([example for example, _ in data.train.examples(seed=None)]).batch
    run.task.build(data).loss(model, batch)[0].backward()
    learning = {name for name, p in model.named_parameters() if p.grad.abs().sum() > 0}
    both = {"class_token", "distillation_token", "head.weight", "distillation_head.weight"}
    assert both <= learning
    model.zero_grad()
    replace(run.task, {"distillation.weight": 1.0}).build(data).loss(model, batch)[0].backward()
    assert (model.head.weight.grad == 0).all()
    assert (model.distillation_head.weight.grad != 0).any()


def test_inference_averages_both_heads():
    model = replace(with_token("t").model, {"drop_path": 0.0}).build()
    images = torch.randn(2, 1, 4, 4)
    scores, distilled = model.train()(images)
    assert (scores - distilled).abs().max() > 1e-4
    torch.testing.assert_close(model.eval()(images), (scores + distilled) / 2)
    entering = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0][0]))
    tokens = model.forward_features(images)
    assert tokens.shape == (2, 2 + 4, 24)
    assert torch.equal(entering[0][0], model.class_token)
    assert torch.equal(entering[0][1], model.distillation_token)
    torch.testing.assert_close(model.head(tokens[:, 0]), scores)
    torch.testing.assert_close(model.distillation_head(tokens[:, 1]), distilled)


def test_models_without_the_token_are_unchanged():
    model = dataclasses.replace(with_token("t").model, distillation_token=False).build()
    assert not [name for name in model.state_dict() if "distillation" in name]
    assert model.prefix == 1
    assert model.train()(torch.randn(2, 1, 4, 4)).shape == (2, 3)


# Runs


@dataclasses.dataclass(frozen=True, kw_only=True)
class MislabeledConfig(StripesConfig):
    """Stripes with random training labels."""

    def build(self):
        data = super().build()
        generator = torch.Generator().manual_seed(3)
        labels = torch.randint(3, (self.examples,), generator=generator)
        return dataclasses.replace(data, train=dataclasses.replace(data.train, labels=labels))


LONGER = {"training.epochs": 25, "task.augment": None}


@pytest.mark.slow
def test_random_labels_teach_nothing(tmp_path):
    alone = dataclasses.replace(replace(tiny_run(), LONGER), data=MislabeledConfig())
    assert train(alone, tmp_path).metrics["accuracy"] < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_student_learns_from_its_teacher_despite_random_labels(teacher, tmp_path, kind):
    distills = {"task.distillation.weight": 0.9, "task.distillation.kind": kind}
    run = dataclasses.replace(distilled_run(teacher, **LONGER, **distills), data=MislabeledConfig())
    result = train(run, tmp_path)
    assert result.metrics["accuracy"] > 0.8
    lines = [line for line in read_metrics(result.folder) if line["split"] == "train"]
    assert lines[-1]["teacher_agreement"] > lines[0]["teacher_agreement"]
    assert {"label_loss", "teacher_loss"} <= lines[0].keys()


@pytest.mark.sampled
@pytest.mark.parametrize("make", [distilled_run, with_token])
def test_a_resumed_run_is_bit_equal(teacher, tmp_path, make):
    run = replace(make(teacher), {"training.ema_decay": 0.9})
    run = dataclasses.replace(run, task=dataclasses.replace(run.task, mix=MixConfig()))
    whole = train(run, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "run", progress=press_ctrl_c_at(3))
    with pytest.raises(KilledError):
        train(run, tmp_path / "run", progress=raise_at(8, KilledError()))
    assert_same(train(run, tmp_path / "run"), whole)


def test_the_teacher_is_neither_changed_nor_saved(teacher, tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(
        "onescan.experiments.tasks.distillation.load_teacher",
        lambda name: loaded.append(load_teacher(name)) or loaded[-1],
    )
    result = train(distilled_run(teacher), tmp_path)
    (model,) = (found.model for found in loaded)
    assert not model.training
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    before = load(teacher).model.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    own = TinyModelConfig().build().state_dict()
    assert load_file(result.folder / "model.safetensors").keys() == own.keys()
    (shard,) = tmp_path.glob("state/*/*.safetensors")
    optimized = {name for name in load_file(shard) if name.startswith("optimizer.state.")}
    names = {name.removeprefix("optimizer.state.").rpartition(".")[0] for name in optimized}
    assert set() < names <= own.keys()


def test_a_teacher_that_cannot_be_read_leaves_no_run_folder(copied, tmp_path):
    (copied / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        train(distilled_run(str(copied)), tmp_path / "student")
    assert not (tmp_path / "student").exists()


def test_a_student_is_evaluated_without_its_teacher(copied, tmp_path, capsys):
    folder = tmp_path / "student"
    result = train(distilled_run(str(copied)), folder)
    shutil.rmtree(copied)
    assert main(["evaluate", str(folder)]) == 0
    assert f"{result.metrics['accuracy']:.1%}" in capsys.readouterr().out


def test_a_config_with_a_teacher_survives_json(teacher):
    run = distilled_run(teacher, **{"task.distillation.kind": "soft"})
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(run)))) == run


@pytest.mark.slow
def test_a_teacher_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr("onescan.experiments.report.write_report", lambda *_: None)
    small = ["--training.steps", "2", "--model.depth", "1", "--model.width", "16"]
    small += ["--model.mixer.num-heads", "2", "--model.mixer.gate-rank", "4"]
    out = tmp_path / "teacher"
    assert main(["train", "digits", *small, "--out", str(out)]) == 0
    words = ["--task.teacher", str(out / "seed-0"), "--task.distillation.kind", "soft"]
    words += ["--model.distillation-token", "--out", str(tmp_path / "student")]
    assert main(["train", "digits", *small, *words]) == 0
    lines = read_metrics(tmp_path / "student" / "seed-0")
    assert "teacher_agreement" in lines[0]


# The teacher


def test_the_teacher_uses_its_own_format(copied):
    manifest = json.loads((copied / "config.json").read_text())
    manifest["format"] |= {"mean": [0.3], "std": [0.2]}
    (copied / "config.json").write_text(json.dumps(manifest))
    pixels = torch.rand(2, 1, 4, 4)
    found = load_teacher(str(copied))
    with torch.no_grad():
        want = load(copied).model((pixels - 0.3) / 0.2)
        small = nn.functional.interpolate(
            pixels.repeat_interleave(2, -1).repeat_interleave(2, -2),
            (4, 4),
            mode="bilinear",
            antialias=True,
        )
        smaller = load(copied).model((small - 0.3) / 0.2)
    torch.testing.assert_close(found.scores(pixels), want)
    larger = pixels.repeat_interleave(2, -1).repeat_interleave(2, -2)
    torch.testing.assert_close(found.scores(larger), smaller)


def test_loading_keeps_the_random_state_and_finds_the_best_weights(copied):
    torch.manual_seed(5)
    want = torch.rand(1)
    torch.manual_seed(5)
    last = load_teacher(str(copied)).model.state_dict()
    assert torch.rand(1) == want
    best = load_teacher(str(copied / "best.safetensors")).model.state_dict()
    for name, tensor in load(copied / "best.safetensors").model.state_dict().items():
        assert torch.equal(best[name], tensor)
    assert all(torch.equal(last[k], t) for k, t in load(copied).model.state_dict().items())


# A stand-in for transformers


try:
    from transformers import TimmWrapperConfig
except ImportError:
    TimmWrapperConfig = None


class FakeClassifier(nn.Module):
    def __init__(self, names, pixels=4):
        super().__init__()
        self.config = SimpleNamespace(id2label=dict(enumerate(names)))
        self.linear = nn.Linear(pixels, len(names))

    def forward(self, pixel_values):
        return SimpleNamespace(logits=self.linear(pixel_values.mean(dim=1).flatten(1)))


@pytest.fixture
def transformers(monkeypatch):
    fake, options_seen = ModuleType("transformers"), {}
    processor = SimpleNamespace(
        do_normalize=True, image_mean=[0.5] * 3, image_std=[0.25] * 3, size={"shortest_edge": 2}
    )

    def give_model(place, **options):
        options_seen.update(options, place=place)
        return fake.model

    fake.model, fake.processor, fake.options_seen = FakeClassifier(NAMES), processor, options_seen
    fake.AutoModelForImageClassification = SimpleNamespace(from_pretrained=give_model)
    fake.AutoImageProcessor = SimpleNamespace(from_pretrained=lambda place, **_: processor)
    monkeypatch.setitem(sys.modules, "transformers", fake)
    monkeypatch.setitem(sys.modules, "onescan.integrations.transformers", ModuleType("registers"))
    return fake


def test_a_classifier_of_transformers(transformers, tmp_path):
    found = load_teacher("facebook/regnet-y-160")
    assert transformers.options_seen["place"] == "facebook/regnet-y-160"
    assert transformers.options_seen["use_safetensors"] is True
    assert transformers.options_seen["trust_remote_code"] is False
    pixels = torch.rand(2, 3, 2, 2)
    want = transformers.model((pixels - 0.5) / 0.25).logits
    torch.testing.assert_close(found.scores(pixels), want)
    assert (found.format.height, found.format.width) == (2, 2)
    transformers.processor.crop_size = {"height": 4, "width": 6}
    (tmp_path / "config.json").write_text('{"model_type": "regnet"}')
    found = load_teacher(str(tmp_path))
    assert (found.format.height, found.format.width) == (4, 6)
    assert transformers.options_seen["place"] == str(tmp_path)


@pytest.mark.parametrize(
    "rescaling", [{"do_rescale": False, "rescale_factor": 1 / 255}, {"rescale_factor": 1.0}]
)
def test_an_image_processor_may_standardize_bytes(rescaling, transformers):
    constants = {"image_mean": [127.5] * 3, "image_std": [51.0] * 3}
    vars(transformers.processor).update(rescaling | constants)
    found = load_teacher("regnet")
    assert found.format.mean == pytest.approx((0.5,) * 3)
    assert found.format.std == pytest.approx((0.2,) * 3)


def test_a_random_regnet_of_transformers(tmp_path):
    library = pytest.importorskip("transformers")
    names = dict(enumerate(NAMES))
    config = library.RegNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], groups_width=4, id2label=names
    )
    model = library.RegNetForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    processor = {"image_processor_type": "ConvNextImageProcessor", "do_normalize": True}
    processor |= {"size": {"shortest_edge": 32}, "image_mean": [0.4] * 3, "image_std": [0.2] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    found = load_teacher(str(tmp_path))
    assert (found.format.height, found.format.width, found.class_names) == (32, 32, NAMES)
    pixels = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        want = model((pixels - 0.4) / 0.2).logits
    torch.testing.assert_close(found.scores(pixels), want)


TIMM = {"input_size": [3, 2, 4], "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.25, 0.3]}


@pytest.mark.skipif(TimmWrapperConfig is None, reason="transformers is not installed")
def test_a_model_of_timm_has_its_format_in_the_config(transformers):
    """Its image processor has neither do_normalize nor image_mean, and needs torchvision."""
    settings = {"architecture": "regnety_160", "num_classes": 3, "label_names": list(NAMES)}
    transformers.model = FakeClassifier(NAMES, pixels=8)
    transformers.model.config = TimmWrapperConfig.from_dict(
        {**settings, "pretrained_cfg": dict(TIMM)}
    )
    del transformers.processor.do_normalize
    found = load_teacher("timm/regnety_160.deit_in1k")
    assert (found.format.height, found.format.width, found.class_names) == (2, 4, NAMES)
    pixels = torch.rand(2, 3, 2, 4)
    mean, std = (torch.tensor(TIMM[key]).view(3, 1, 1) for key in ("mean", "std"))
    torch.testing.assert_close(
        found.scores(pixels), transformers.model((pixels - mean) / std).logits
    )
    transformers.model.config.pretrained_cfg = {"input_size": [3, 2, 4]}
    with pytest.raises(ValueError, match="has a pretrained_cfg without mean, std"):
        load_teacher("timm/regnety_160.deit_in1k")


def test_class_names_may_differ_but_not_their_order(transformers):
    color = dataclasses.replace(GRAY, channels=3, mean=(0.0,) * 3, std=(1.0,) * 3)
    found = load_teacher("regnet")
    found.check(color, NAMES)
    found.check(color, ("n01", "n02", "n03"))
    with pytest.raises(
        ValueError, match="'regnet' calls class 0 'rows', but the data calls it 'col"
    ):
        found.check(color, ("columns", "rows", "noise"))
    with pytest.raises(ValueError, match="'regnet' reads images of 3 channels, but the data has 1"):
        found.check(GRAY, NAMES)
    transformers.processor.do_normalize = False
    with pytest.raises(ValueError, match="'regnet' does not standardize its images"):
        load_teacher("regnet")


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"'facebook/regnet'.*pip install 'onescan\[text\]'"):
        load_teacher("facebook/regnet")


# Errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distillation.kind": "hard", "distillation.weight": 0.3}, "task.teacher is None"),
        ({"teacher": "t", "distillation.weight": 0.0}, "weight is 0.0, expected above 0"),
        ({"teacher": "t", "distillation.weight": 1.5}, "weight is 1.5, expected above 0"),
        ({"teacher": "t", "distillation.temperature": 0.0}, "temperature is 0.0"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(ImageClassificationConfig(), changes).build(StripesConfig().build())


def test_an_unknown_kind_is_rejected():
    config = DistillationConfig()
    object.__setattr__(config, "kind", "firm")  # the tests check types
    with pytest.raises(ValueError, match=r"task.distillation.kind 'firm' is unknown.*hard, soft"):
        config.build("t", StripesConfig().build())


def test_a_token_needs_a_teacher_and_a_class_token(tmp_path):
    lonely = replace(with_token("t"), {"task.teacher": None})
    with pytest.raises(ValueError, match=r"has a distillation token, but task.teacher is None"):
        train(lonely, tmp_path)
    with pytest.raises(ValueError, match="distillation_token is True with pool='mean'"):
        replace(lonely.model, {"pool": "mean"}).build()


def test_the_mean_of_all_tokens_excludes_the_distillation_token():
    config = replace(with_token("t").model, {"pool": "mean_with_class_token"})
    model = config.build().eval()
    tokens = torch.randn(2, 6, 24)
    distilled = model.distillation_head(tokens[:, 1])
    scores = model.head(torch.cat([tokens[:, :1], tokens[:, 2:]], dim=1).mean(dim=1))
    torch.testing.assert_close(model.forward_head(tokens), (scores + distilled) / 2)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (NAMES[:2], "has 3 classes, but the data has 2"),
        (("a", "b", "c"), "calls class 0 'rows', but the data calls it 'a'"),
    ],
)
def test_teachers_with_other_classes_are_rejected(teacher, names, message):
    data = dataclasses.replace(StripesConfig().build(), class_names=names)
    task = ImageClassificationConfig(teacher=teacher).build(data)
    with pytest.raises(ValueError, match=message):
        task.loss(Fixed(torch.zeros(1, len(names))), (torch.rand(1, 1, 4, 4), torch.tensor([0])))


def overwrite(folder, name, text):
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda f: f / "a" / "b" / "c", FileNotFoundError, "there is no such file or folder"),
        (lambda f: f.parent, ValueError, "config.json"),
        (lambda f: overwrite(f, "config.json", "{"), ValueError, "without a valid config.json"),
        (lambda f: overwrite(f, "config.json", "3"), ValueError, "without a valid config.json"),
        (lambda f: overwrite(f, "config.json", '{"onescan": "1"}'), ValueError, "cannot be read"),
        (
            lambda f: overwrite(f, "config.json", "{}") / "state",
            ValueError,
            "without a valid config.json",
        ),
        (
            lambda f: overwrite(f, "config.json", "{}") / "lock",
            ValueError,
            "a file that does not belong to a run",
        ),
        (lambda f: overwrite(f, "model.safetensors", "x"), ValueError, "cannot be read"),
        (lambda f: (f / "model.safetensors").unlink() or f, FileNotFoundError, "no checkpoint"),
    ],
)
def test_invalid_teachers_are_rejected(copied, damage, error, message):
    with pytest.raises(error, match=message):
        load_teacher(str(damage(copied)))


def test_an_unreadable_transformers_teacher_is_one_line_that_names_the_field(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "nosuch"}')
    with pytest.raises(ValueError, match=r"^task.teacher is .* transformers can load: ") as caught:
        load_teacher(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("format", "named"),
    [
        (TextFormat(tokenizer="bytes", vocab_size=256, fingerprint="f"), "a TextFormat"),
        (ArrayFormat(channels=1, shape=(16,), mean=(0.0,), std=(1.0,)), "an ArrayFormat"),
    ],
)
def test_a_run_on_texts_or_signals_is_no_teacher(copied, format, named):
    manifest = json.loads((copied / "config.json").read_text())
    manifest["format"] = {"type": type(format).__name__, **to_dict(format)}
    write_config(copied, manifest)
    with pytest.raises(ValueError, match=f"its format is {named}, expected an ImageFormat"):
        load_teacher(str(copied))
