"""GLUE's tables with a rule that a tiny model learns, in the columns of the published archive."""

import dataclasses
import random

from onescan.experiments.data.text import TextDatasetConfig
from onescan.experiments.tasks import MaskedLanguageModellingConfig
from onescan.experiments.training import MachineConfig, RunConfig, TrainingConfig
from onescan.layers.basic import MLPConfig
from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.layers.position import TokenPositionConfig
from onescan.models.masked_lm import MaskedLMConfig

STSB = "index genre filename year old_index source1 source2 sentence1 sentence2 score"
HEADS = {
    "CoLA": None,
    "SST-2": ["sentence", "label"],
    "MRPC": ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
    "QQP": ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
    "MNLI": ["index", "genre", "sentence1", "sentence2", "label1", "gold_label"],
    "QNLI": ["index", "question", "sentence", "label"],
    "RTE": ["index", "sentence1", "sentence2", "label"],
    "STS-B": STSB.split(),
}
ENTAILMENT = ("entailment", "not_entailment")
INFERENCES = ("entailment", "neutral", "contradiction")
LABELS = {"QNLI": ENTAILMENT, "RTE": ENTAILMENT, "MNLI": INFERENCES, "STS-B": "012345"}


def row(title, text, label):
    """One row: the label's place among a task's, and the text on which it depends."""
    written = LABELS.get(title, "01")[label]
    other = "of it"
    return {
        "CoLA": ["gj04", written, "", text],
        "SST-2": [text, written],
        "MRPC": [written, "1", "2", other, text],
        "QQP": ["0", "1", "2", other, text, written],
        "MNLI": ["0", "fiction", other, text, written, written],
        "QNLI": ["0", other, text, written],
        "RTE": ["0", other, text, written],
        "STS-B": ["0", "news", "f", "2012", "1", "a", "b", other, text, written],
    }[title]


def write_table(path, title, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    head = [HEADS[title]] if HEADS[title] else []
    path.write_text("".join("\t".join(cells) + "\n" for cells in [*head, *rows]))


def ruled(title, count, seed):
    """Rows whose label one letter determines."""
    rng, classes = random.Random(seed), len(LABELS.get(title, "01"))
    labels = [rng.randrange(classes) for _ in range(count)]
    texts = ["".join(rng.choices("xyz", k=4)) + "abcdef"[label] * 4 for label in labels]
    return [row(title, text, label) for text, label in zip(texts, labels, strict=True)]


def write_ruled(folder, *titles, train=64, dev=24):
    """An archive's folder with some of its tasks."""
    for title in titles:
        write_table(folder / title / "train.tsv", title, ruled(title, train, seed=0))
        for place, part in enumerate(
            ["dev_matched", "dev_mismatched"] if title == "MNLI" else ["dev"]
        ):
            write_table(folder / title / f"{part}.tsv", title, ruled(title, dev, seed=1 + place))
    return folder


TINY_MLM = MaskedLMConfig(
    vocab_size=258,
    width=16,
    depth=1,
    mixer=SoftmaxMixerConfig(num_heads=2),
    mlp=MLPConfig(),
    position=TokenPositionConfig(max_tokens=64),
    segment_types=2,
    init_std=0.2,
)


def pretraining(folder, **changes):
    """A run of two updates."""
    (folder / "text.txt").write_text("xyz of it abcdef\n" * 40)
    return RunConfig(
        name="mlm",
        model=dataclasses.replace(TINY_MLM, **changes),
        data=TextDatasetConfig(path=str(folder / "text.txt"), length=16),
        task=MaskedLanguageModellingConfig(),
        training=TrainingConfig(steps=2, batch_size=4),
        machine=MachineConfig(trackers=()),
    )
