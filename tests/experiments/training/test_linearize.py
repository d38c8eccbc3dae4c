"""Linear models that begin as softmax models: copied projections, attention transfer, recipes."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from tiny_images import write_folders
from tiny_run import StripesConfig, assert_same, interrupt
from tiny_tokenizers import word_tokenizer
from torch import nn

import onescan
from onescan import configs
from onescan.checkpoint.run_folder import write_config
from onescan.cli import main
from onescan.experiments.data import ImageDatasetConfig
from onescan.experiments.data.text import TextDatasetConfig
from onescan.experiments.recipes import find_recipe
from onescan.experiments.recipes.linearize import from_teacher
from onescan.experiments.recipes.mixers import with_mixer
from onescan.experiments.tasks import (
    ImageClassificationConfig,
    LanguageModellingConfig,
    MaskedLanguageModellingConfig,
)
from onescan.experiments.training import (
    MachineConfig,
    RunConfig,
    TrainingConfig,
    TransferConfig,
    read_metrics,
    train,
)
from onescan.experiments.training.folder import read_manifest
from onescan.experiments.training.initialization import init_from
from onescan.experiments.training.optim import Plan
from onescan.experiments.training.transfer import AttentionTransfer
from onescan.integrations.transformers import to_transformers
from onescan.layers.basic import MLPConfig
from onescan.layers.decays import HGRN2DecayConfig, NoDecayConfig
from onescan.layers.mixers import (
    DeltaRuleMixerConfig,
    HGRNMixerConfig,
    HybridMixerConfig,
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
    RWKV6MixerConfig,
    SoftmaxMixerConfig,
    mixer_names,
)
from onescan.layers.mixers.projections import projection_weights
from onescan.layers.position import AbsolutePositionConfig, TokenPositionConfig
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.masked_lm import MaskedLMConfig
from onescan.ops.feature_maps import FEATURE_MAPS
from onescan.shapes import Grid

WIDTH, HEADS = 16, 2
SOFTMAX = SoftmaxMixerConfig(num_heads=HEADS)
LIT = LionMixerConfig(num_heads=HEADS, decay=NoDecayConfig())
IMAGES = ImageClassifierConfig(
    image_size=(4, 4),
    channels=1,
    patch_size=(2, 2),
    num_classes=3,
    width=WIDTH,
    depth=2,
    mixer=SOFTMAX,
    mlp=MLPConfig(ratio=2.0),
    position=AbsolutePositionConfig(),
    drop_path=0.2,
    init_std=0.3,
)
TEXT = CausalLMConfig(
    vocab_size=258,
    width=WIDTH,
    depth=2,
    mixer=dataclasses.replace(SOFTMAX, direction="forward"),
    mlp=MLPConfig(ratio=2.0),
    position=TokenPositionConfig(max_tokens=16),
    dropout=0.1,
    init_std=0.3,
)
ROLES = ("query", "key", "value", "output")
FAST = {"steps": 12, "batch_size": 8, "learning_rate": 0.01, "checkpoint_every": 0.5}
TRANSFER = TransferConfig(steps=6.0)


def image_run(model=IMAGES, **training):
    return RunConfig(
        name="images",
        model=model,
        data=StripesConfig(),
        task=ImageClassificationConfig(),
        training=TrainingConfig(**FAST | training),
        machine=MachineConfig(trackers=()),
    )


def text_run(folder, model=TEXT, task=None, **training):
    """A run on documents of several lengths, packed into rows."""
    text = folder / "text.txt"
    text.write_text("\n".join("a bc def"[i % 5 :] + " " * (i % 3) for i in range(200)))
    return RunConfig(
        name="text",
        model=model,
        data=TextDatasetConfig(path=str(text), length=12, sample_by="line", cache=False),
        task=task or LanguageModellingConfig(),
        training=TrainingConfig(**FAST | training),
        machine=MachineConfig(trackers=()),
    )


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """A folder with trained softmax models of images, causal and masked text."""
    folder = tmp_path_factory.mktemp("teachers")
    train(image_run(), folder / "images")
    train(text_run(folder), folder / "text")
    fields = {field.name: getattr(TEXT, field.name) for field in dataclasses.fields(TEXT)}
    del fields["tie_embeddings"]
    masked = MaskedLMConfig(**fields | {"mixer": SOFTMAX})
    train(text_run(folder, masked, MaskedLanguageModellingConfig()), folder / "masked")
    return folder


def student_of(folder, mixer, *, transfer=TRANSFER, **training):
    """The run of a teacher, with another mixer, that begins from it."""
    run = read_manifest(folder).run
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, mixer=mixer),
        init_from=str(folder),
        transfer=transfer,
        training=dataclasses.replace(run.training, **training),
    )


def fresh(config):
    torch.manual_seed(5)
    return config.build()


def mixers_of(model):
    return [block.mixer for block in model.modules() if hasattr(block, "mixer")]


def softmax_maps(mixer):
    """Weights and biases of a softmax mixer, by role, split by hand."""
    parts = zip(mixer.in_proj.weight.chunk(3), mixer.in_proj.bias.chunk(3), strict=True)
    return dict(zip(ROLES, [*parts, (mixer.out_proj.weight, mixer.out_proj.bias)], strict=True))


# Copied projections

STUDENTS = {
    "lion_lit": (LIT, ROLES),
    "lion_s": (LionMixerConfig(num_heads=HEADS, gate="silu"), ROLES),
    "low-rank gate": (LionMixerConfig(num_heads=HEADS, gate="silu", gate_rank=3), ROLES),
    "hgrn2": (
        LionMixerConfig(num_heads=HEADS, decay=HGRN2DecayConfig()),
        ("query", "value", "output"),
    ),
    "narrow keys": (LionMixerConfig(num_heads=HEADS, key_width=4), ("value", "output")),
    "other heads": (LionMixerConfig(num_heads=4), ("value", "output")),
    "lightnet": (LightNetMixerConfig(num_heads=HEADS, bias=True), ROLES),
    "without bias": (LightNetMixerConfig(num_heads=HEADS, gate_rank=4), ROLES),
    "delta": (DeltaRuleMixerConfig(num_heads=HEADS, bias=True), ROLES),
    "rwkv6": (RWKV6MixerConfig(num_heads=HEADS), ROLES),
    "hgrn": (HGRNMixerConfig(num_heads=HEADS), ()),
}


@pytest.mark.parametrize(("mixer", "roles"), STUDENTS.values(), ids=STUDENTS)
def test_a_mixer_of_another_class_gets_the_maps_that_it_has(mixer, roles, teachers):
    config = dataclasses.replace(IMAGES, mixer=mixer)
    student, untouched = fresh(config), fresh(config)
    teacher = onescan.load(teachers / "images").model
    said = init_from(str(teachers / "images"), student)
    for ours, new, theirs in zip(*map(mixers_of, (student, untouched, teacher)), strict=True):
        expected, covered = softmax_maps(theirs), {}
        for role, projection in ours.projections.items():
            got, before = (projection_weights(each, projection) for each in (ours, new))
            weight, bias = expected[role] if role in roles else before[:2]
            assert torch.equal(got.weight, weight), role
            if got.bias is not None:
                assert torch.equal(got.bias, bias), role
            if role in roles:
                covered.setdefault(projection.layer, set()).update(
                    range(projection.start, projection.stop)
                )
        for name, weight in ours.state_dict().items():
            left = [
                row
                for row in range(len(weight) if weight.ndim else 0)
                if row not in covered.get(name.rpartition(".")[0], ())
            ]
            assert torch.equal(weight[left], new.state_dict()[name][left]), name
    assert ("lower_bounds.logits" in said) == ("lower_bounds.logits" in student.state_dict())
    others = [name for name in student.state_dict() if ".mixer." not in name]
    assert {"class_token", "head.weight", "blocks.1.mlp.up_proj.weight"} <= set(others)
    for name in others:
        if not name.startswith("lower_bounds"):
            assert torch.equal(student.state_dict()[name], teacher.state_dict()[name]), name
    has_bias = getattr(mixer, "bias", isinstance(mixer, HGRNMixerConfig))
    bias = "" if has_bias else " (without bias)"
    assert f"copied {', '.join(role + bias for role in roles) or 'nothing'}, new " in said
    assert f"2 mixers, {type(mixers_of(student)[0]).__name__} in place of SoftmaxMixer" in said


def test_the_new_weights_are_listed(teachers):
    mixer = LionMixerConfig(num_heads=HEADS, gate="silu")
    said = init_from(str(teachers / "images"), fresh(dataclasses.replace(IMAGES, mixer=mixer)))
    gate = f"{WIDTH} rows of in_proj.weight, {WIDTH} rows of in_proj.bias"
    assert f"new {gate}, decays.0.proj.weight, decays.0.proj.bias" in said
    other = dataclasses.replace(IMAGES, mixer=LIT, num_classes=5)
    said = init_from(str(teachers / "images"), fresh(other))
    assert said.endswith("new nothing; new: head.weight, head.bias")


def test_lion_lit_attends_with_the_maps_of_the_teacher(teachers):
    teacher = onescan.load(teachers / "images").model
    student = fresh(dataclasses.replace(IMAGES, mixer=LIT)).eval()
    init_from(str(teachers / "images"), student)
    x, grid = torch.randn(2, 5, WIDTH), Grid((2, 2), prefix=1)
    for theirs, ours in zip(*map(mixers_of, (teacher, student)), strict=True):
        q, k, v = rearrange(
            F.linear(x, theirs.in_proj.weight, theirs.in_proj.bias),
            "b t (three h k) -> three b h t k",
            three=3,
            h=HEADS,
        )
        q, k = map(FEATURE_MAPS["shifted_silu"], (q, k))
        scores = q @ k.mT
        o = rearrange(scores / scores.sum(-1, keepdim=True) @ v, "b h t k -> b t (h k)")
        torch.testing.assert_close(ours(x, grid)[0], theirs.out_proj(o))


def test_lightnet_attends_with_the_maps_of_the_teacher(teachers):
    teacher = onescan.load(teachers / "images").model
    plain = {"lrpe": False, "gate": "none", "norm": "none", "bias": True}
    mixer = LightNetMixerConfig(num_heads=HEADS, **plain)
    student = fresh(dataclasses.replace(IMAGES, mixer=mixer)).eval()
    init_from(str(teachers / "images"), student)
    x, grid = torch.randn(2, 5, WIDTH), Grid((2, 2), prefix=1)
    for theirs, ours in zip(*map(mixers_of, (teacher, student)), strict=True):
        q, k, v = rearrange(theirs.in_proj(x), "b t (i h k) -> i b h t k", i=3, h=HEADS)
        o = rearrange(F.silu(q) @ (k.softmax(dim=2).mT @ v), "b h t k -> b t (h k)")
        torch.testing.assert_close(ours(x, grid)[0], theirs.out_proj(o))


def test_a_softmax_student_is_the_teacher(teachers):
    for name in ("images", "text"):
        teacher = onescan.load(teachers / name).model
        student = fresh(teacher.config).eval()
        assert "mixers" not in init_from(str(teachers / name), student)
        assert student.state_dict().keys() == teacher.state_dict().keys()
        for key, weight in student.state_dict().items():
            assert torch.equal(weight, teacher.state_dict()[key]), key


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"width": 8}, r"class_token is \(16,\) in the file and \(8,\) in the model"),
        ({"depth": 3}, r"blocks\.2\..* is missing in the file"),
        ({"mlp.ratio": 3.0}, r"mlp\.up_proj\.weight is \(32, 16\) in the file and \(48, 16\)"),
        ({"patch_size": (4, 4)}, r"patchify\.proj\.weight is \(16, 4\) in the file"),
        ({"position": None}, r"position\.table is \(5, 16\) in the file and missing"),
    ],
)
def test_other_differences_are_still_refused(changes, says, teachers):
    config = configs.replace(dataclasses.replace(IMAGES, mixer=LIT), changes)
    with pytest.raises(ValueError, match=rf"init_from is .*images'.*{says}"):
        init_from(str(teachers / "images"), fresh(config))


def test_mixers_of_the_same_class_must_match(teachers, tmp_path):
    lion = LionMixerConfig(num_heads=HEADS)
    train(image_run(dataclasses.replace(IMAGES, mixer=lion), steps=1), tmp_path / "lion")
    gated = dataclasses.replace(IMAGES, mixer=dataclasses.replace(lion, gate="silu"))
    with pytest.raises(ValueError, match=r"mixer\.in_proj\.weight is \(48, 16\) in the file"):
        init_from(str(tmp_path / "lion"), fresh(gated))


def test_a_hybrid_copies_its_softmax_attention_whole(teachers):
    mixer = HybridMixerConfig(linear=LIT, attention=SOFTMAX, period=2)
    student = fresh(dataclasses.replace(IMAGES, mixer=mixer))
    said = init_from(str(teachers / "images"), student)
    teacher = onescan.load(teachers / "images").model
    (_, theirs), (lion, ours) = map(mixers_of, (teacher, student))
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name
    assert f"1 mixers, {type(lion).__name__} in place of SoftmaxMixer: copied query" in said


# Attention transfer


def squared_errors(teacher, student, x, grid):
    """Squared error and squared norm of each layer, from the tokens before the first block."""
    terms = []
    for theirs, ours in zip(teacher.blocks, student.blocks, strict=True):
        inside = theirs.mixer_norm(x)
        target, y = theirs.mixer(inside, grid)[0], ours.mixer(inside, grid)[0]
        terms.append(torch.stack([((y - target) ** 2).sum(), (target**2).sum()]))
        x = x + target
        x = x + theirs.mlp(theirs.mlp_norm(x))
    return torch.stack(terms)


def image_batch(run):
    data = run.data.build()
    batch = data.train.read([example for example, _ in data.train.examples(seed=None)]).batch
    return run.task.build(data), batch


def initialized(run):
    model = fresh(run.model)
    init_from(run.init_from, model)
    return model


@pytest.mark.parametrize("recompute", [False, True])
def test_the_loss_is_that_of_the_formula(recompute, teachers):
    run = student_of(teachers / "images", LIT)
    student, (task, batch) = initialized(run), image_batch(run)
    for block in student.blocks:
        block.recompute = recompute
    loss = AttentionTransfer.of(run).loss(student, task, batch)
    loss.backward()
    grads = {name: p.grad for name, p in student.named_parameters()}
    assert all((grad is not None) == (".mixer." in name) for name, grad in grads.items())
    teacher = onescan.load(teachers / "images").model
    student.zero_grad()
    x, grid = teacher.embed(task.format.standardize(batch[0]))
    errors, norms = squared_errors(teacher, student, x.detach(), grid).unbind(1)
    expected = (errors / norms.detach()).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert 0.01 < loss < 1
    for name, parameter in student.named_parameters():
        if grads[name] is not None:
            torch.testing.assert_close(grads[name], parameter.grad, msg=name)


def test_the_loss_of_a_batch_is_that_of_its_parts(teachers):
    run = student_of(teachers / "images", LIT)
    student, transfer, (task, batch) = initialized(run), AttentionTransfer.of(run), image_batch(run)
    images = batch[0] * torch.linspace(0, 2, len(batch[0]))[:, None, None, None]  # other norms
    batch = images, batch[1]
    whole = transfer.loss(student, task, batch)
    whole.backward()
    expected = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
    student.zero_grad()
    parts = [tuple(x[:5] for x in batch), tuple(x[5:] for x in batch)]
    total = sum(transfer.norms(student, task, part) for part in parts)
    losses = [transfer.loss(student, task, part, lambda _: total) for part in parts]
    sum(losses).backward()
    torch.testing.assert_close(sum(losses), whole)
    for name, parameter in student.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], msg=name)


def test_documents_are_compared_separately(teachers):
    run = student_of(teachers / "text", LionMixerConfig(num_heads=HEADS, direction="forward"))
    student, transfer = initialized(run).double(), AttentionTransfer.of(run)
    task, (tokens, documents) = image_batch(run)
    transfer.load(task, torch.device("cpu")).double()
    tokens, documents = tokens[:3], documents[:3]
    assert (documents != documents[:, :1]).any()
    loss = transfer.loss(student, task, (tokens, documents))
    teacher = onescan.load(teachers / "text").model.double().network
    terms = []
    for row, numbers in zip(tokens[:, :-1], documents[:, :-1], strict=True):
        lengths = numbers.unique_consecutive(return_counts=True)[1]
        for document in row.split(lengths.tolist()):
            grid = Grid((len(document),))
            x, _ = teacher.position(teacher.embedding(document[None]), grid)
            terms.append(squared_errors(teacher, student.network, x, grid))
    errors, norms = torch.stack(terms).sum(dim=0).unbind(1)
    assert len(terms) > len(tokens)
    torch.testing.assert_close(loss.double(), (errors / norms).mean(), atol=1e-5, rtol=1e-5)


def test_a_teacher_can_mix_packed_documents_itself(teachers):
    lion = LionMixerConfig(num_heads=HEADS, direction="forward")  # takes cu_seqlens
    run = student_of(teachers / "text", lion)
    student, transfer, (task, batch) = fresh(run.model), AttentionTransfer.of(run), image_batch(run)
    assert (batch[1] != batch[1][:, :1]).any()
    transfer.teacher = fresh(run.model).eval()
    assert transfer.loss(student, task, batch) == 0


def test_a_student_equal_to_its_teacher_has_no_loss(teachers):
    run = student_of(teachers / "images", SOFTMAX)
    task, batch = image_batch(run)
    assert AttentionTransfer.of(run).loss(initialized(run), task, batch) == 0


STUDENTS_OF = {
    "images": LionMixerConfig(num_heads=HEADS),
    "text": LightNetMixerConfig(num_heads=HEADS, direction="forward", bias=True),
    "masked": LionMixerConfig(num_heads=HEADS, decay=HGRN2DecayConfig(learned_lower_bound=True)),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("text", "masked")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["images", *SLOW])
def test_a_resumed_run_is_bit_equal_in_both_phases(name, teachers, tmp_path):
    transfer = TransferConfig(steps=16.0)
    run = student_of(teachers / name, STUDENTS_OF[name], steps=20, ema_decay=0.9, transfer=transfer)
    whole = train(run, tmp_path / "whole")
    for step in (5, 16, 18):
        interrupt(run, tmp_path / "run", step)
    assert_same(train(run, tmp_path / "run"), whole)
    splits = [x["split"] for x in read_metrics(whole.folder) if x["split"] != "test"]
    assert splits == ["transfer"] * 16 + ["train"] * 4


@pytest.mark.sampled
@pytest.mark.parametrize("name", STUDENTS_OF)
def test_the_first_phase_trains_only_mixers_and_lowers_the_loss(name, teachers, tmp_path):
    transfer = TransferConfig(steps=16.0)
    run = student_of(teachers / name, STUDENTS_OF[name], steps=17, transfer=transfer)
    interrupt(run, tmp_path / "run", 16)
    teacher = onescan.load(teachers / name).model.state_dict()
    changed = onescan.load(tmp_path / "run").model.state_dict()
    for key, weight in changed.items():
        assert ".mixer." in key or "lower_bounds" in key or torch.equal(weight, teacher[key]), key
    projections = [key for key in changed if "mixer.in_proj" in key]
    started = initialized(run).state_dict()
    assert all(not torch.equal(changed[key], started[key]) for key in projections)
    lines = [line for line in read_metrics(tmp_path / "run") if line["split"] != "test"]
    assert [line["split"] for line in lines] == ["transfer"] * 16
    losses = [line["loss"] for line in lines]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


def test_the_second_phase_does_not_need_the_teacher(teachers, tmp_path, monkeypatch):
    run = student_of(teachers / "images", LIT)
    interrupt(run, tmp_path, 7)
    monkeypatch.setattr("onescan.experiments.training.transfer.load_pretrained_model", None)
    assert train(run, tmp_path).steps == 12


def test_each_phase_goes_through_the_schedule(teachers, tmp_path):
    transfer = TransferConfig(steps=6.0, learning_rate=0.5)
    run = student_of(teachers / "images", LIT, transfer=transfer)
    run = configs.replace(run, {"training.warmup": 2.0, "training.final_lr_ratio": 0.0})
    train(run, tmp_path)
    lines = [line for line in read_metrics(tmp_path) if line["split"] != "test"]
    alone = configs.replace(run, {"training.steps": 6}).training
    phase = [Plan.of(alone, 4).learning_rate(step, alone, None) for step in range(6)]
    assert phase[:3] == [0.005, 0.01, 0.01]
    expected = [*(50 * rate for rate in phase), *phase]
    assert [line["learning_rate"] for line in lines] == pytest.approx(expected)


def test_the_length_of_the_first_phase(teachers):
    settings = TrainingConfig(steps=40)
    assert Plan.of(settings, 10, TransferConfig(steps=0.25)).transfer == 10
    assert Plan.of(settings, 10, TransferConfig(steps=30.0)).transfer == 30
    with pytest.raises(ValueError, match=r"transfer\.steps is 40, expected .* 40 steps"):
        Plan.of(settings, 10, TransferConfig(steps=40.0))
    growing = TrainingConfig(epochs=2, batch_size=8, initial_batch_size=2)
    plan = Plan.of(growing, 40, TransferConfig(steps=0.25))
    assert plan.transfer == 20
    assert plan.is_transfer(0)
    assert [plan.read(s) < 20 for s in range(plan.steps)] == [
        plan.is_transfer(s) for s in range(plan.steps)
    ]


def test_evaluations_of_the_first_phase_do_not_stop_a_run(teachers, tmp_path, monkeypatch):
    monkeypatch.setattr("onescan.experiments.tasks.ImageClassification.score", lambda *_: 0.0)
    run = student_of(
        teachers / "images", LIT, steps=24, patience=2, evaluate_every=0.5,
        transfer=TransferConfig(steps=12.0),
    )  # fmt: skip
    assert train(run, tmp_path).steps == 16


@pytest.mark.parametrize("processed", ["sum", "parts"])
def test_gradients_of_several_processes_are_averaged(processed, monkeypatch):
    from onescan.experiments.training.distributed import Ranks

    layer = nn.Linear(2, 2)
    layer.weight.grad = torch.full((2, 2), 3.0)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: tensor.mul_(2))
    Ranks(size=2 if processed == "sum" else 1).average_gradients(layer)
    assert (layer.weight.grad == 3.0).all()
    assert layer.bias.grad is None


def refused(run, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        train(run, tmp_path / "refused")


def test_bad_settings_are_refused(teachers, tmp_path):
    run = student_of(teachers / "images", LIT)
    with pytest.raises(ValueError, match=r"transfer is set, but init_from is None"):
        dataclasses.replace(run, init_from=None)
    with pytest.raises(ValueError, match=r"machine\.fsdp is True with transfer"):
        configs.replace(run, {"machine.fsdp": True})
    with pytest.raises(ValueError, match=r"transfer\.steps is 0"):
        TransferConfig(steps=0.0)
    with pytest.raises(ValueError, match=r"transfer\.learning_rate is -1"):
        TransferConfig(learning_rate=-1.0)
    refused(dataclasses.replace(run, init_from=""), "init_from is ''", tmp_path)
    wide = configs.replace(run, {"model.width": 32})
    refused(wide, r"init_from is .* in the file and \(32,\) in the model", tmp_path)
    refused(configs.replace(run, {"transfer.steps": 12.0}), r"transfer\.steps is 12", tmp_path)
    assert not (tmp_path / "refused").exists()


def test_a_model_that_does_not_fit_the_task_is_refused_before_transfer(
    teachers, tmp_path, monkeypatch
):
    run = configs.replace(student_of(teachers / "images", LIT), {"model.num_classes": 7})
    monkeypatch.setattr(AttentionTransfer, "loss", None)  # not called
    refused(run, r"scores of shape \(8, 7\).* expected model.num_classes 3", tmp_path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BrightConfig(StripesConfig):
    """Stripes that are standardized by other constants."""

    def build(self):
        data = super().build()
        return dataclasses.replace(data, format=dataclasses.replace(data.format, mean=(0.5,)))


def test_data_of_another_standardization_are_refused(teachers, tmp_path):
    run = dataclasses.replace(student_of(teachers / "images", LIT), data=BrightConfig())
    refused(run, r"data\.mean is \(0\.5,\), expected \(0\.0,\)", tmp_path)


def test_a_mixer_that_reads_the_embedding_is_refused(teachers):
    run = student_of(teachers / "images", LinearDiffusionMixerConfig(num_heads=HEADS))
    task, batch = image_batch(run)
    with pytest.raises(ValueError, match=r"model\.mixer reads the embedding"):
        AttentionTransfer.of(run).loss(fresh(run.model), task, batch)


# Recipes


@pytest.mark.parametrize("name", mixer_names())
def test_every_named_mixer_fits_both_recipes(name):
    for recipe in ("linearize_vit", "linearize_gpt2"):
        run = find_recipe(recipe)()
        mixer = with_mixer(run, name).model.mixer
        assert mixer.num_heads == run.model.mixer.num_heads
        assert mixer.is_causal == run.model.mixer.is_causal
        assert getattr(mixer, "bias", True)


@pytest.mark.parametrize("recipe", ["linearize_vit", "linearize_gpt2"])
def test_a_hybrid_keeps_the_attention_of_its_run(recipe):
    run = find_recipe(recipe)()
    softmax = dataclasses.replace(with_mixer(run, "softmax").model.mixer, dropout=0.1)
    softmax_run = dataclasses.replace(run, model=dataclasses.replace(run.model, mixer=softmax))
    hybrid = with_mixer(softmax_run, "gla_hybrid")
    mixer = hybrid.model.mixer
    assert mixer.for_layer(3) == softmax
    assert mixer.for_layer(0) == with_mixer(run, "gla").model.mixer
    assert with_mixer(hybrid, "gla_hybrid") == hybrid
    assert with_mixer(hybrid, "gla") == with_mixer(run, "gla")
    assert (
        with_mixer(run, "gla_hybrid").model.mixer.for_layer(3)
        == with_mixer(run, "softmax").model.mixer
    )


def test_unknown_mixers_are_refused():
    run = find_recipe("linearize_vit")()
    known = r".*available: .*lion_s, .*lion_s_hybrid, "
    with pytest.raises(ValueError, match=rf"mixer 'gla_hybird' is unknown .*'gla_hybrid'\){known}"):
        with_mixer(run, "gla_hybird")
    with pytest.raises(ValueError, match=rf"model\.mixer 'lion_x' is unknown {known}"):
        with_mixer(run, "lion_x")
    no_mixer = dataclasses.replace(run, model=StripesModelConfig())
    with pytest.raises(ValueError, match="has no mixer"):
        with_mixer(no_mixer, "lion_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StripesModelConfig(configs.ModelConfig):
    def build(self):
        return nn.Identity()

    def example_inputs(self):
        return (torch.zeros(1),)


def onescan_train(*argv):
    main(["train", *argv, "--machine.trackers"])


def test_linearize_vit_takes_data_and_settings_from_a_run(teachers):
    recipe, folder = find_recipe("linearize_vit"), str(teachers / "images")
    run = recipe.adapt(recipe(), {"init_from": folder})
    taught = image_run()
    changes = {"name": "linearize_vit", "init_from": folder, "transfer": TransferConfig()}
    mixer = LightNetMixerConfig(num_heads=HEADS, bias=True)
    model = dataclasses.replace(IMAGES, mixer=mixer)
    expected = dataclasses.replace(taught, **changes, model=model, machine=MachineConfig())
    assert run == expected
    run = recipe.adapt(recipe(), {"init_from": folder, "model.mixer": "lightnet_hybrid"})
    assert run.model.mixer == HybridMixerConfig(linear=mixer, attention=SOFTMAX)


@pytest.mark.slow
def test_linearize_vit_reads_other_images_with_a_converted_model(teachers, tmp_path, capsys):
    config = configs.to_dict(read_manifest(teachers / "images"))
    converted = tmp_path / "vit"
    converted.mkdir()
    (converted / "model.safetensors").write_bytes(
        (teachers / "images" / "model.safetensors").read_bytes()
    )
    config["run"]["data"] = {"type": "ImageDatasetConfig", "path": "unknown", "channels": 1} | {
        "image_size": [4, 4], "mean": [0.0], "std": [1.0], "test_crop": None,
    }  # fmt: skip
    write_config(converted, config)
    write_folders(tmp_path / "data" / "train", "a", "b", "c", count=3)
    write_folders(tmp_path / "data" / "val", "a", "b", "c")
    onescan_train(
        "linearize_vit", "--init-from", str(converted), "--data.path", str(tmp_path / "data"),
        "--model.mixer", "lion_lit", "--model.mixer.chunk-size", "8", "--training.steps", "3",
        "--training.batch-size", "4", "--transfer.steps", "2", "--out", str(tmp_path / "out"),
    )  # fmt: skip
    said = capsys.readouterr().err
    copied = "copied query, key, value, output, new nothing"
    assert f"2 mixers, LionMixer in place of SoftmaxMixer: {copied}" in said
    assert "attention transfer: 2 of 3 batches" in said
    assert "attention transfer ended after step 2" in said
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Attention transfer loss" in page
    assert "Training loss" in page
    run = read_manifest(tmp_path / "out" / "seed-0").run
    mixer = dataclasses.replace(LIT, chunk_size=8)
    assert run.model == dataclasses.replace(IMAGES, mixer=mixer)
    assert run.data.image_size == (4, 4)
    assert run.transfer.steps == 2


def test_batch_size_and_classes_fit_the_data(teachers, tmp_path):
    recipe, folder = find_recipe("linearize_vit"), str(teachers / "images")
    path = write_folders(tmp_path, "a", "b", count=120)
    run = configs.replace(
        recipe.adapt(recipe(), {"init_from": folder}),
        {
            "data": ImageDatasetConfig(path=path, image_size=(4, 4)),
            "training": recipe().training,
        },
    )
    fitted, lines = recipe.infer(run, {"data.path"})
    assert (fitted.training.batch_size, fitted.model.num_classes) == (32, 2)
    assert lines == [
        "model: 2 classes, as in the data, instead of 3",
        "training: batch size 32 instead of 256, because there are 216 training examples",
    ]
    given = {"data.path", "training.batch_size", "model.num_classes"}
    assert recipe.infer(run, given) == recipe.infer(run, {"init_from"}) == (run, [])


@pytest.mark.slow
def test_linearize_gpt2_begins_from_a_folder_of_transformers(teachers, tmp_path):
    to_transformers(onescan.load(teachers / "text").model).save_pretrained(tmp_path / "gpt2")
    word_tokenizer().save_pretrained(tmp_path / "gpt2")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on a mat " * 100)
    onescan_train(
        "linearize_gpt2", "--init-from", str(tmp_path / "gpt2"), "--data.path", str(text),
        "--training.steps", "4", "--training.batch-size", "4", "--out", str(tmp_path / "out"),
    )  # fmt: skip
    run = read_manifest(tmp_path / "out" / "seed-0").run
    assert run.model.position == TEXT.position
    assert run.data.length == TEXT.position.max_tokens
    assert run.model.mixer == LionMixerConfig(num_heads=HEADS, direction="forward")


def test_ablations_change_the_model_of_the_teacher(teachers):
    recipe = find_recipe("linearize_vit/without_lrpe")
    run = recipe.adapt(recipe(), {"init_from": str(teachers / "images")})
    mixer = LightNetMixerConfig(num_heads=HEADS, bias=True, lrpe=False)
    assert run.model == dataclasses.replace(IMAGES, mixer=mixer)
    assert run.name == "linearize_vit/without_lrpe"


def test_recipes_refuse_missing_and_other_models(teachers):
    run = find_recipe("linearize_vit")()
    with pytest.raises(ValueError, match=r"init_from is missing.* linearize_vit --init-from"):
        from_teacher(run, {})
    with pytest.raises(ValueError, match=r"the weights of .*CausalLM.*ImageClassifierConfig"):
        from_teacher(run, {"init_from": str(teachers / "text")})
