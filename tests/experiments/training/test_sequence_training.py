"""Runs with sequence parallelism have the losses of a single process, in any layout."""

import os
import signal
import time
from dataclasses import replace
from functools import partial
from itertools import product
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from ranks import run_processes
from safetensors.torch import load_file
from tiny_denoiser import denoiser_run
from tiny_run import StripesConfig, untimed

from onescan import configs
from onescan.experiments.data import (
    ArrayDataset,
    ArrayDatasetConfig,
    Example,
    ListOpsDataConfig,
    MixConfig,
    RecallConfig,
)
from onescan.experiments.data.long_range import ListOpsConfig
from onescan.experiments.data.share import Share
from onescan.experiments.data.text import TextDatasetConfig
from onescan.experiments.data.text.corpus import Corpus
from onescan.experiments.data.text.packing import PackedText
from onescan.experiments.tasks import (
    ImageClassification,
    ImageClassificationConfig,
    LanguageModellingConfig,
    MaskedLanguageModellingConfig,
    RecallTaskConfig,
    SequenceClassificationConfig,
    Task,
)
from onescan.experiments.training import (
    MachineConfig,
    Ranks,
    RunConfig,
    TrainingConfig,
    TransferConfig,
    read_metrics,
    train,
)
from onescan.experiments.training.data import share_of_batch
from onescan.experiments.training.folder import read_manifest
from onescan.experiments.training.loop import Loop
from onescan.inputs import GridFormat
from onescan.layers.basic import GLUConfig
from onescan.layers.mixers import LightNetMixerConfig, LionMixerConfig, SoftmaxMixerConfig
from onescan.layers.position import ToeplitzPositionConfig
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.masked_lm import MaskedLMConfig
from onescan.models.sequence_classifier import SequenceClassifierConfig

STEPS = 20
TIMEOUT_S = 600  # of all runs of a test
WORDS = "one scan reads every row of a grid and each word of a text"


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    """Compute in float64, so that only the order of sums differs."""
    before, standardize = torch.get_default_dtype(), GridFormat.standardize
    monkeypatch.setattr(GridFormat, "standardize", lambda self, x: standardize(self, x).double())
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def run_of(model, data, task, **training):
    defaults = {
        "steps": STEPS,
        "batch_size": 8,
        "learning_rate": 1e-2,
        "eps": 1e-5,
        "ema_decay": 0.9,
        "checkpoint_every": 100.0,
        "evaluate_every": 100.0,
    }
    return RunConfig(
        name="tiny",
        model=model,
        data=data,
        task=task,
        training=TrainingConfig(**defaults | training),
        machine=MachineConfig(trackers=(), workers=0, device="cpu"),
    )


TPE = ToeplitzPositionConfig(hidden_states=4)
TEXT = {"vocab_size": 258, "width": 12, "depth": 2, "init_std": 0.2, "mlp": GLUConfig()}


def packed_run(folder):
    """Documents of 1 to 13 tokens in rows of 14, of which a model reads 13."""
    path = folder / "words.txt"
    path.write_text("\n".join(word * (i % 3 + 1) for i, word in enumerate(8 * WORDS.split())))
    data = TextDatasetConfig(path=str(path), length=14, sample_by="line", cache=False)
    model = CausalLMConfig(
        mixer=LightNetMixerConfig(num_heads=2, direction="forward"), position=TPE, **TEXT
    )
    return run_of(model, data, LanguageModellingConfig())


def text_run(folder):
    """Rows of one document."""
    path = folder / "text.txt"
    path.write_text(" ".join(20 * [WORDS]))
    data = TextDatasetConfig(path=str(path), length=8, cache=False)
    mixer = LionMixerConfig(num_heads=2, direction="forward")
    return run_of(
        CausalLMConfig(mixer=mixer, position=None, **TEXT), data, LanguageModellingConfig()
    )


def masked_run(folder):
    """Masked tokens of packed words; some ranks have none to predict."""
    run = packed_run(folder)
    position = ToeplitzPositionConfig(hidden_states=4, bidirectional=True)
    model = MaskedLMConfig(mixer=LightNetMixerConfig(num_heads=2), position=position, **TEXT)
    task = MaskedLanguageModellingConfig(mask_rate=0.1)
    run = replace(run, model=model, task=task)
    return configs.replace(run, {"training.batch_size": 4})


def image_run(_):
    """Images of two rows of patches with a class token, augmentation and dropped paths."""
    model = ImageClassifierConfig(
        image_size=(4, 4), channels=1, patch_size=(2, 2), num_classes=3, width=12, depth=2,
        pool="class_token", mixer=LightNetMixerConfig(num_heads=2, gate_rank=4), position=TPE,
        mlp=GLUConfig(), drop_path=0.3,
    )  # fmt: skip
    task = ImageClassificationConfig(augment=None, mix=MixConfig(), label_smoothing=0.1)
    return run_of(model, StripesConfig(), task)


def video_run(folder):
    """Videos of three frames, of which each rank reads only its own."""
    path, generator = folder / "videos", np.random.default_rng(0)
    path.mkdir(exist_ok=True)
    for split in ("train", "test"):
        labels = np.arange(24) % 3
        videos = generator.standard_normal((24, 3, 4, 4)) + labels[:, None, None, None]
        np.save(path / f"x_{split}.npy", videos)
        np.save(path / f"y_{split}.npy", labels)
    model = replace(image_run(folder).model, image_size=(3, 4, 4), patch_size=(1, 4, 4))
    data = ArrayDatasetConfig(path=str(path), axes=3)
    return run_of(model, data, ImageClassificationConfig(augment=None))


def sequence_run(_):
    """Padded sequences of different lengths."""
    mixer = LionMixerConfig(num_heads=2)
    model = SequenceClassifierConfig(mixer=mixer, position=None, num_classes=10, **TEXT)
    lists = ListOpsConfig(min_length=4, max_length=20, max_depth=3, max_args=4)
    data = ListOpsDataConfig(expressions=lists, train_examples=40, test_examples=20)
    return run_of(model, data, SequenceClassificationConfig())


def recall_run(_):
    data = RecallConfig(
        keys=9, values=5, length=12, pairs=(1, 3), test_pairs=(2, 4), train_examples=40,
        test_examples=20,
    )  # fmt: skip
    mixer = LightNetMixerConfig(num_heads=2, direction="forward")
    model = CausalLMConfig(mixer=mixer, position=TPE, **TEXT)
    return run_of(model, data, RecallTaskConfig())


def denoiser(_):
    """A denoiser with learned variances and dropped labels, which draws pictures."""
    changes = {"model.learn_sigma": True, "task.noise.prediction": "noise"}
    run = denoiser_run(**changes)
    return run_of(run.model, run.data, run.task)


def transfer_run(folder):
    """Attention transfer from softmax attention in the first half of the steps."""
    run, teacher = video_run(folder), folder / "teacher"
    changes = {"model.mixer": SoftmaxMixerConfig(num_heads=2), "training.steps": 1}
    train(configs.replace(run, changes), teacher)
    return replace(run, init_from=str(teacher), transfer=TransferConfig(steps=0.5))


RUNS = {
    "packed": packed_run,
    "text": text_run,
    "masked": masked_run,
    "image": image_run,
    "video": video_run,
    "sequences": sequence_run,
    "recall": recall_run,
    "denoiser": denoiser,
    "transfer": transfer_run,
}


QUICK = ("packed", "masked", "image")


def on(run, **machine):
    return replace(run, machine=replace(run.machine, **machine))


def train_all(runs, folder, **machine):
    """Train runs in this process, which may be one of several."""
    for name, run in runs.items():
        train(on(run, **machine), folder / name)


def losses(folder, split="train"):
    return torch.tensor([line["loss"] for line in read_metrics(folder) if line["split"] == split])


def assert_equal_runs(folder, one, atol=1e-6):
    assert len(losses(one)) + len(losses(one, "transfer")) == STEPS
    for split in ("transfer", "train", "test"):
        torch.testing.assert_close(losses(folder, split), losses(one, split), atol=atol, rtol=0)
    for ours, theirs in zip(untimed(folder), untimed(one), strict=True):
        assert ours.pop("split") == theirs.pop("split")
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)  # accuracy, gradient norm, ...
    for name in ("evaluation", "model"):
        tensors, expected = (load_file(f / f"{name}.safetensors") for f in (folder, one))
        torch.testing.assert_close(tensors, expected, atol=1e-5, rtol=1e-5)
    for picture in (one / "pictures").glob("*"):
        ours, theirs = (
            np.array(Image.open(f / "pictures" / picture.name), int) for f in (folder, one)
        )
        assert abs(ours - theirs).max() <= 1


def check_layout(names, folder, processes, *, sequence_parallel, fsdp=False, **machine):
    """Compare runs with runs that have one process per group."""
    groups, one, shared = processes // sequence_parallel, folder / "one", folder / "shared"
    runs = {name: RUNS[name](folder) for name in names if not (fsdp and name == "transfer")}
    if groups == 1:
        train_all(runs, one, **machine)
    else:
        work = partial(train_all, runs, one, **machine)
        run_processes(groups, lambda _: work(), folder / "ranks", timeout=TIMEOUT_S)
    machine |= {"sequence_parallel": sequence_parallel, "fsdp": fsdp}
    work = partial(train_all, runs, shared, **machine)
    run_processes(processes, lambda _: work(), folder / "shared ranks", timeout=TIMEOUT_S)
    for name in runs:
        # attention transfer compares outputs in float32
        assert_equal_runs(shared / name, one / name, 1e-5 if name == "transfer" else 1e-6)


@pytest.mark.slow
def test_two_processes_shard_sequences(tmp_path):
    check_layout(QUICK, tmp_path, 2, sequence_parallel=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # states, which are views
@pytest.mark.parametrize(
    ("names", "processes", "machine"),
    [
        (RUNS, 2, {"sequence_parallel": 2, "gradient_accumulation_steps": 2}),
        (RUNS, 4, {"sequence_parallel": 4, "gradient_checkpointing": True}),
        (QUICK, 4, {"sequence_parallel": 2}),
        (RUNS, 4, {"sequence_parallel": 2, "fsdp": True, "gradient_accumulation_steps": 2}),
    ],
)
def test_layouts_of_processes(tmp_path, names, processes, machine):
    check_layout(names, tmp_path, processes, **machine)


def unaugmented_run(folder):
    """A run without randomness that differs between processes."""
    return configs.replace(video_run(folder), {"model.drop_path": 0.0})


def stop_at(monkeypatch, step):
    """Interrupt the last process before a step."""
    update = Loop.update

    def interrupting(self, batches):
        if self.state.step == step and self.ranks.rank == self.ranks.size - 1:
            signal.raise_signal(signal.SIGINT)
        return update(self, batches)

    monkeypatch.setattr(Loop, "update", interrupting)


@pytest.mark.slow
def test_a_run_resumes_in_any_layout(tmp_path, monkeypatch):
    run = unaugmented_run(tmp_path)
    train(run, tmp_path / "one")
    stages = [
        (4, {"sequence_parallel": 2, "fsdp": True}),
        (2, {"sequence_parallel": 2}),
        (2, {}),
        (4, {"sequence_parallel": 4}),
    ]

    def start(number, machine):
        stop_at(monkeypatch, 4 * number - 1)
        with pytest.raises(KeyboardInterrupt):
            train(on(run, **machine), tmp_path / "run")

    for number, (processes, machine) in enumerate(stages, 1):
        stage = partial(start, number, machine)
        run_processes(processes, lambda _, stage=stage: stage(), tmp_path / str(number))
    train(run, tmp_path / "run")
    assert_equal_runs(tmp_path / "run", tmp_path / "one")
    environments = read_manifest(tmp_path / "run").environments
    assert [(e.since_step, e.processes, e.sequence_parallel) for e in environments] == [
        *((0, 4, 2), (4, 2, 2), (8, 2, 1), (12, 4, 4), (16, 1, 1)),
    ]


# Processes that exit or do not respond


def at_step(monkeypatch, step, rank, act):
    update = Loop.update

    def acting(self, batches):
        if (self.state.step, self.ranks.rank) == (step, rank):
            act()
        return update(self, batches)

    monkeypatch.setattr(Loop, "update", acting)


LOST = "another process of the run has exited, or did not respond within machine.timeout"


def test_a_killed_process_stops_the_others(tmp_path, monkeypatch):
    run = on(text_run(tmp_path), sequence_parallel=2)

    def work(_):
        at_step(monkeypatch, 3, 1, lambda: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(ConnectionError, match=LOST):
            train(run, tmp_path / "run")

    with pytest.raises(AssertionError, match=r"^ranks \{1: 9\} failed"):
        run_processes(4, work, tmp_path / "ranks", grace=20)


@pytest.mark.slow
def test_a_process_that_hangs_stops_the_others(tmp_path, monkeypatch):
    run = on(text_run(tmp_path), sequence_parallel=2, timeout=1.0)

    def hang():
        while not (tmp_path / "ended").exists():
            time.sleep(0.01)
        os._exit(0)

    def work(_):
        at_step(monkeypatch, 3, 1, hang)
        with pytest.raises(ConnectionError, match=LOST):
            train(run, tmp_path / "run")
        (tmp_path / "ended").touch()

    run_processes(2, work, tmp_path / "ranks")


# Shards


def test_shards_are_whole_patches_and_as_equal_as_possible():
    for size, patch, patches in product(range(1, 6), (1, 3), range(8)):
        x = torch.arange(patch * patches).unsqueeze(0)
        parts = [Share(rank, size, patch).cut(x, axis=1) for rank in range(size)]
        assert torch.equal(torch.cat(parts, dim=1), x)
        counts = [part.shape[1] // patch for part in parts]
        assert all(part.shape[1] % patch == 0 for part in parts)
        assert max(counts) - min(counts) <= 1
    with pytest.raises(ValueError, match="10 positions along axis 0 cannot be cut into patches of"):
        Share(0, 2, patch=3).slice(10)


class Recorded(np.ndarray):
    """Token ids that record which of them are copied."""

    copied: ClassVar = []

    def __array_function__(self, function, types, arguments, options):
        parts = [np.asarray(part) for part in arguments[0]]
        Recorded.copied.extend(np.concatenate(parts).tolist())
        return function(parts, **options)


@pytest.mark.parametrize("size", [2, 3, 20])
def test_a_rank_reads_its_tokens_and_the_next_one(size):
    ids, ends = np.arange(41, dtype=np.uint16), np.array([3, 4, 11, 40, 41])
    for rank in range(size):
        corpus = Corpus(tokens=ids.view(Recorded), ends=ends)
        whole = PackedText(corpus=Corpus(tokens=ids, ends=ends), length=14, padding=99)
        text = PackedText(corpus=corpus, length=14, padding=99).shared(share := Share(rank, size))
        for example, _ in whole.examples(seed=0):
            Recorded.copied.clear()
            (row, numbers), (tokens, documents) = (x.read([example]).batch for x in (whole, text))
            own = share.slice(13)
            assert torch.equal(tokens, row[:, own.start : own.stop + 1])
            assert torch.equal(documents, numbers)
            assert Recorded.copied == tokens[tokens != 99].tolist()


@pytest.mark.parametrize("channels", [None, "first", "last"])
def test_a_rank_reads_its_shard_of_arrays(channels):
    shape = {None: (5, 6, 4), "first": (5, 2, 6, 4), "last": (5, 6, 4, 2)}[channels]
    options = {"labels": torch.arange(5), "indices": torch.arange(5), "axes": 2}
    data = ArrayDataset(
        x=np.random.default_rng(0).random(shape), channels_first=channels == "first", **options
    )
    examples = [Example(3), Example(0)]
    for rank in range(4):
        share = Share(rank, 4, patch=2)
        (part, labels), (whole, _) = (d.read(examples).batch for d in (data.shared(share), data))
        assert torch.equal(part, share.cut(whole, axis=2))
        assert labels.tolist() == [3, 0]


# Errors


def test_the_number_of_processes_must_be_a_multiple(tmp_path):
    message = "machine.sequence_parallel is 3, expected a divisor of the number of processes, "
    with pytest.raises(ValueError, match=f"{message}1; start several with torchrun"):
        train(on(image_run(tmp_path), sequence_parallel=3), tmp_path / "run")

    def work(_):
        with pytest.raises(ValueError, match=f"{message}2"):
            train(on(image_run(tmp_path), sequence_parallel=3), tmp_path / "run")
        run = on(image_run(tmp_path), sequence_parallel=1, gradient_accumulation_steps=8)
        with pytest.raises(ValueError, match="a multiple of 16: 2 processes times"):
            train(run, tmp_path / "run")

    run_processes(2, work, tmp_path / "ranks")
    assert not (tmp_path / "run").exists()


def test_groups_read_different_examples():
    ranks = [Ranks(rank=rank, size=4, sequence=2) for rank in range(4)]
    training, machine = TrainingConfig(batch_size=8), MachineConfig(sequence_parallel=2)
    shares = [share_of_batch(training, machine, each) for each in ranks]
    assert shares == [slice(0, 4), slice(0, 4), slice(4, 8), slice(4, 8)]
    with pytest.raises(ValueError, match="a multiple of 2: 2 groups of 2 processes times machine"):
        share_of_batch(TrainingConfig(batch_size=9), machine, ranks[0])


def test_tasks_that_need_whole_sequences(tmp_path):
    class Other(ImageClassification):
        shard = Task.shard

    run = image_run(tmp_path)
    with pytest.raises(ValueError, match="sequence_parallel is 2, but an Other does not support"):
        Other(run.task, run.data.build()).shard(Share(0, 2))
    with pytest.raises(ValueError, match="sequence_parallel is 2, but ImageTensors can only"):
        run.data.build().train.shared(Share(0, 2))


@pytest.mark.parametrize("setting", [{"sequence_parallel": 0}, {"timeout": -1.0}])
def test_settings_are_checked(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"machine.{name} is {value}, expected a number above 0"):
        MachineConfig(**setting)
