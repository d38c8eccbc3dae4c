"""Learning from a teacher: the loss, the token, the teacher's own view, and what is refused."""

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

from onescan.cli import main
from onescan.configs import from_dict, replace, to_dict
from onescan.data import ImageFormat, MixConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.tasks import DistillationConfig, ImageClassificationConfig
from onescan.tasks.teacher import Teacher, load_teacher
from onescan.training import RunConfig, load, read_metrics, train

GREY = ImageFormat(channels=1, height=4, width=4, mean=(0.0,), std=(1.0,))
NAMES = ("rows", "columns", "noise")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The folder of a run that tells rows, columns and noise apart."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    run = replace(tiny_run(), {"training.epochs": 30, "task.augment": None})
    assert train(run, folder).metrics["accuracy"] > 0.9
    return str(folder)


@pytest.fixture
def copied(teacher, tmp_path):
    """A teacher of one's own, to spoil."""
    return shutil.copytree(teacher, tmp_path / "copied")


def taught(teacher, **changes):
    return replace(tiny_run(), {"task.teacher": teacher, **changes})


def with_token(teacher, **changes) -> RunConfig:
    model = ImageClassifierConfig(
        image_size=(4, 4), channels=1, patch_size=(2, 2), num_classes=3, width=24, depth=2
    )
    model = replace(model, {"mixer.num_heads": 2, "mixer.gate_rank": 4, "position": None})
    model = dataclasses.replace(model, distillation_token=True)
    return dataclasses.replace(taught(teacher, **changes), model=model)


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


def by_hand(labelled, distilled, theirs, shares, config):
    """The mean over images of DeiT's losses, one number at a time."""
    losses = []
    for z, d, t, y in zip(labelled, distilled, theirs, shares, strict=True):
        loss = -sum(share * log for share, log in zip(y, log_softmax(z), strict=True))
        if config.kind == "hard":
            part = -log_softmax(d)[max(range(len(t)), key=t.__getitem__)]
        else:
            tau = config.temperature
            ours, wanted = (log_softmax([score / tau for score in row]) for row in (d, t))
            part = tau**2 * sum(math.exp(q) * (q - p) for p, q in zip(ours, wanted, strict=True))
        losses.append((1 - config.weight) * loss + config.weight * part)
    return sum(losses) / len(losses)


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("weight", [0.5, 0.1, 1.0])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("soft_labels", [False, True])
def test_the_loss_is_the_papers(kind, weight, heads, soft_labels):
    config = DistillationConfig(kind=kind, weight=weight, temperature=2.0)
    task = ImageClassificationConfig(teacher="t", distillation=config).build(
        StripesConfig().build()
    )
    torch.manual_seed(0)
    scores, theirs = torch.randn(heads, 5, 3) * 2, torch.randn(5, 3) * 2
    labels = torch.tensor([0, 2, 1, 1, 0])
    shares = torch.rand(5, 3).softmax(dim=1) if soft_labels else nn.functional.one_hot(labels, 3)
    task.distillation.teacher = Teacher(
        name="t", model=Fixed(theirs), format=GREY, class_names=NAMES
    )
    batch = torch.rand(5, 1, 4, 4), shares if soft_labels else labels
    loss, metrics = task.loss(Fixed(*scores), batch)
    want = by_hand(*(x.tolist() for x in (scores[0], scores[-1], theirs, shares)), config)
    assert loss.item() == pytest.approx(want, rel=1e-5)
    parts = (1 - weight) * metrics["label_loss"] + weight * metrics["teacher_loss"]
    torch.testing.assert_close(parts, loss)
    agreement = (scores[-1].argmax(dim=1) == theirs.argmax(dim=1)).float().mean()
    assert metrics["teacher_agreement"] == agreement
    likeliest = shares.argmax(dim=1)
    assert metrics["accuracy"] == (scores[0].argmax(dim=1) == likeliest).float().mean()


def test_labels_are_smoothed_and_the_teachers_decision_is_not(teacher):
    run = taught(teacher, **{"task.augment": None})
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


def test_each_head_learns_from_its_own_side(teacher):
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


def test_a_used_model_gives_the_mean_of_both_heads():
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


def test_without_the_token_the_model_is_as_before():
    model = dataclasses.replace(with_token("t").model, distillation_token=False).build()
    assert not [name for name in model.state_dict() if "distillation" in name]
    assert model.prefix == 1
    assert model.train()(torch.randn(2, 1, 4, 4)).shape == (2, 3)


# Runs


@dataclasses.dataclass(frozen=True, kw_only=True)
class MislabelledConfig(StripesConfig):
    """Stripes whose labels to learn from are chance."""

    def build(self):
        data = super().build()
        chance = torch.Generator().manual_seed(3)
        labels = torch.randint(3, (self.examples,), generator=chance)
        return dataclasses.replace(data, train=dataclasses.replace(data.train, labels=labels))


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_student_learns_what_labels_do_not_say(teacher, tmp_path, kind):
    longer = {"training.epochs": 25, "task.augment": None}
    follows = {"task.distillation.weight": 0.9, "task.distillation.kind": kind}
    run = dataclasses.replace(taught(teacher, **longer, **follows), data=MislabelledConfig())
    alone = dataclasses.replace(replace(tiny_run(), longer), data=MislabelledConfig())
    assert train(alone, tmp_path / "alone").metrics["accuracy"] < 0.6
    result = train(run, tmp_path / "taught")
    assert result.metrics["accuracy"] > 0.8
    lines = [line for line in read_metrics(result.folder) if line["split"] == "train"]
    assert lines[-1]["teacher_agreement"] > lines[0]["teacher_agreement"]
    assert {"label_loss", "teacher_loss"} <= lines[0].keys()


@pytest.mark.parametrize("make", [taught, with_token])
def test_a_stopped_run_goes_on_to_the_same_numbers(teacher, tmp_path, make):
    run = replace(make(teacher), {"training.ema_decay": 0.9})
    run = dataclasses.replace(run, task=dataclasses.replace(run.task, mix=MixConfig()))
    whole = train(run, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "run", progress=press_ctrl_c_at(3))
    with pytest.raises(KilledError):
        train(run, tmp_path / "run", progress=raise_at(8, KilledError()))
    assert_same(train(run, tmp_path / "run"), whole)


def test_the_teacher_is_neither_changed_nor_kept(teacher, tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(
        "onescan.tasks.distillation.load_teacher",
        lambda name: loaded.append(load_teacher(name)) or loaded[-1],
    )
    result = train(taught(teacher), tmp_path)
    (model,) = (found.model for found in loaded)
    assert not model.training
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    before = load(teacher).model.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    own = TinyModelConfig().build().state_dict()
    assert load_file(result.folder / "model.safetensors").keys() == own.keys()
    (shard,) = tmp_path.glob("state/*/*.safetensors")
    learnt = {name for name in load_file(shard) if name.startswith("optimizer.state.")}
    names = {name.removeprefix("optimizer.state.").rpartition(".")[0] for name in learnt}
    assert set() < names <= own.keys()


def test_a_student_is_judged_without_its_teacher(copied, tmp_path, capsys):
    folder = tmp_path / "student"
    result = train(taught(str(copied)), folder)
    shutil.rmtree(copied)
    assert main(["evaluate", str(folder)]) == 0
    assert f"{result.metrics['accuracy']:.4f}" in capsys.readouterr().out


def test_a_run_with_a_teacher_is_plain_data(teacher):
    run = taught(teacher, **{"task.distillation.kind": "soft"})
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(run)))) == run


def test_the_command_line_names_a_teacher(tmp_path):
    small = ["--training.steps", "2", "--model.depth", "1", "--model.width", "16"]
    small += ["--model.mixer.num-heads", "2", "--model.mixer.gate-rank", "4"]
    out = tmp_path / "teacher"
    assert main(["train", "digits", *small, "--out", str(out)]) == 0
    words = ["--task.teacher", str(out / "seed-0"), "--task.distillation.kind", "soft"]
    words += ["--model.distillation-token", "--out", str(tmp_path / "student")]
    assert main(["train", "digits", *small, *words]) == 0
    lines = read_metrics(tmp_path / "student" / "seed-0")
    assert "teacher_agreement" in lines[0]


# The teacher's own view


def test_the_teacher_sees_the_images_as_it_was_taught(copied):
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


def test_loading_spends_no_chance_and_finds_the_best_weights(copied):
    torch.manual_seed(5)
    want = torch.rand(1)
    torch.manual_seed(5)
    last = load_teacher(str(copied)).model.state_dict()
    assert torch.rand(1) == want
    best = load_teacher(str(copied / "best.safetensors")).model.state_dict()
    for name, tensor in load(copied / "best.safetensors").model.state_dict().items():
        assert torch.equal(best[name], tensor)
    assert all(torch.equal(last[k], t) for k, t in load(copied).model.state_dict().items())


# transformers, which a stand-in is for: the tests do not install it


class FakeClassifier(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.config = SimpleNamespace(id2label=dict(enumerate(names)))
        self.linear = nn.Linear(4, len(names))

    def forward(self, pixel_values):
        return SimpleNamespace(logits=self.linear(pixel_values.mean(dim=1).flatten(1)))


@pytest.fixture
def transformers(monkeypatch):
    fake, asked = ModuleType("transformers"), {}
    processor = SimpleNamespace(
        do_normalize=True, image_mean=[0.5] * 3, image_std=[0.25] * 3, size={"shortest_edge": 2}
    )

    def give_model(place, **options):
        asked.update(options, place=place)
        return fake.model

    fake.model, fake.processor, fake.asked = FakeClassifier(NAMES), processor, asked
    fake.AutoModelForImageClassification = SimpleNamespace(from_pretrained=give_model)
    fake.AutoImageProcessor = SimpleNamespace(from_pretrained=lambda place, **_: processor)
    monkeypatch.setitem(sys.modules, "transformers", fake)
    monkeypatch.setitem(sys.modules, "onescan.integrations.transformers", ModuleType("registers"))
    return fake


def test_a_classifier_of_transformers(transformers, tmp_path):
    found = load_teacher("facebook/regnet-y-160")
    assert transformers.asked["place"] == "facebook/regnet-y-160"
    assert transformers.asked["use_safetensors"] is True
    assert transformers.asked["trust_remote_code"] is False
    pixels = torch.rand(2, 3, 2, 2)
    want = transformers.model((pixels - 0.5) / 0.25).logits
    torch.testing.assert_close(found.scores(pixels), want)
    assert (found.format.height, found.format.width) == (2, 2)
    transformers.processor.crop_size = {"height": 4, "width": 6}
    (tmp_path / "config.json").write_text('{"model_type": "regnet"}')
    found = load_teacher(str(tmp_path))
    assert (found.format.height, found.format.width) == (4, 6)
    assert transformers.asked["place"] == str(tmp_path)


def test_names_of_another_spelling_pass_and_those_of_another_order_do_not(transformers):
    colour = dataclasses.replace(GREY, channels=3, mean=(0.0,) * 3, std=(1.0,) * 3)
    found = load_teacher("regnet")
    found.check(colour, NAMES)
    found.check(colour, ("n01", "n02", "n03"))
    with pytest.raises(ValueError, match="'regnet' calls class 0 'rows', the data calls it 'col"):
        found.check(colour, ("columns", "rows", "noise"))
    with pytest.raises(ValueError, match="'regnet' reads images of 3 channels, the data has 1"):
        found.check(GREY, NAMES)
    transformers.processor.do_normalize = False
    with pytest.raises(ValueError, match="'regnet' does not standardize its images"):
        load_teacher("regnet")


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"'facebook/regnet'.*pip install 'onescan\[text\]'"):
        load_teacher("facebook/regnet")


# What is refused


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


def test_an_unknown_kind_names_those_there_are():
    config = DistillationConfig()
    object.__setattr__(config, "kind", "firm")  # as without the tests' checks of types
    with pytest.raises(ValueError, match=r"task.distillation.kind 'firm' is unknown.*hard, soft"):
        config.build("t", StripesConfig().build())


def test_a_token_needs_a_teacher_and_a_class_token(tmp_path):
    lonely = replace(with_token("t"), {"task.teacher": None})
    with pytest.raises(ValueError, match=r"has a distillation token, but task.teacher is None"):
        train(lonely, tmp_path)
    with pytest.raises(ValueError, match="distillation_token is True with pool='mean'"):
        replace(lonely.model, {"pool": "mean"}).build()


def test_the_mean_of_all_tokens_leaves_the_distillation_token_to_its_head():
    config = replace(with_token("t").model, {"pool": "mean_with_class_token"})
    model = config.build().eval()
    tokens = torch.randn(2, 6, 24)
    distilled = model.distillation_head(tokens[:, 1])
    scores = model.head(torch.cat([tokens[:, :1], tokens[:, 2:]], dim=1).mean(dim=1))
    torch.testing.assert_close(model.forward_head(tokens), (scores + distilled) / 2)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (NAMES[:2], "has 3 classes, the data has 2"),
        (("a", "b", "c"), "calls class 0 'rows', the data calls it 'a'"),
    ],
)
def test_the_classes_must_be_the_same(teacher, names, message):
    data = dataclasses.replace(StripesConfig().build(), class_names=names)
    task = ImageClassificationConfig(teacher=teacher).build(data)
    with pytest.raises(ValueError, match=message):
        task.loss(Fixed(torch.zeros(1, len(names))), (torch.rand(1, 1, 4, 4), torch.tensor([0])))


def spoil(folder, name, text):
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("spoilt", "error", "message"),
    [
        (lambda f: f / "a" / "b" / "c", FileNotFoundError, "there is no such file or folder"),
        (lambda f: f.parent, ValueError, "without a valid config.json: expected a run's folder"),
        (lambda f: spoil(f, "config.json", "{"), ValueError, "without a valid config.json"),
        (lambda f: spoil(f, "config.json", "3"), ValueError, "without a valid config.json"),
        (lambda f: spoil(f, "config.json", '{"onescan": "1"}'), ValueError, "cannot be read"),
        (
            lambda f: spoil(f, "config.json", "{}") / "state",
            ValueError,
            "without a valid config.json",
        ),
        (
            lambda f: spoil(f, "config.json", "{}") / "lock",
            ValueError,
            "a file that belongs to no run",
        ),
        (lambda f: spoil(f, "model.safetensors", "x"), ValueError, "cannot be read"),
        (lambda f: (f / "model.safetensors").unlink() or f, FileNotFoundError, "no checkpoint"),
    ],
)
def test_what_is_no_teacher(copied, spoilt, error, message):
    with pytest.raises(error, match=message):
        load_teacher(str(spoilt(copied)))
