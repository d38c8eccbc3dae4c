"""GLUE's tasks: what each asks, where its texts and labels stand, and how it is judged."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

GlueTask = Literal["mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb"]
Metric = Literal["accuracy", "f1", "matthews_correlation", "pearson", "spearman"]

YES_NO = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
INFERENCES = ("entailment", "neutral", "contradiction")
MOST_ALIKE = 5.0  # of STS-B's scores, which begin at 0


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Examples to be judged on.

    Attributes:
        file: of the published archive, without its ending.
        split: of the hub's data set.
        prefix: of its metrics' names; empty where there is but one such part.
    """

    file: str = "dev"
    split: str = "validation"
    prefix: str = ""


@dataclass(frozen=True, kw_only=True)
class GlueProblem:
    """One task of GLUE, arXiv:1804.07461.

    Attributes:
        title: what GLUE calls it, and its folder in the published archive.
        texts: the columns of the one text or the two, in the archive's tables.
        label: the column of the label.
        metrics: the most telling one first.
        class_names: in the order of GLUE's labels; none where the label is a number.
        spelt: the classes as the archive spells them, in the same order.
        columns: of tables whose first line is no heading; None where it is.
        hub_texts: the columns of the texts on the hub; None for the archive's.
        held_out: one part, or several that are judged one by one.
    """

    title: str
    texts: tuple[str, ...]
    label: str = "label"
    metrics: tuple[Metric, ...] = ("accuracy",)
    class_names: tuple[str, ...] = ()
    spelt: tuple[str, ...] = YES_NO
    columns: tuple[str, ...] | None = None
    hub_texts: tuple[str, ...] | None = None
    held_out: tuple[HeldOut, ...] = (HeldOut(),)


PROBLEMS: Mapping[GlueTask, GlueProblem] = MappingProxyType(
    {
        "mnli": GlueProblem(
            title="MNLI",
            texts=("sentence1", "sentence2"),
            label="gold_label",
            class_names=INFERENCES,
            spelt=INFERENCES,
            hub_texts=("premise", "hypothesis"),
            held_out=(
                HeldOut(file="dev_matched", split="validation_matched", prefix="matched_"),
                HeldOut(file="dev_mismatched", split="validation_mismatched", prefix="mismatched_"),
            ),
        ),
        "qnli": GlueProblem(
            title="QNLI",
            texts=("question", "sentence"),
            class_names=ENTAILMENT,
            spelt=ENTAILMENT,
        ),
        "qqp": GlueProblem(
            title="QQP",
            texts=("question1", "question2"),
            label="is_duplicate",
            metrics=("accuracy", "f1"),
            class_names=("not_duplicate", "duplicate"),
        ),
        "rte": GlueProblem(
            title="RTE",
            texts=("sentence1", "sentence2"),
            class_names=ENTAILMENT,
            spelt=ENTAILMENT,
        ),
        "sst2": GlueProblem(
            title="SST-2",
            texts=("sentence",),
            class_names=("negative", "positive"),
        ),
        "mrpc": GlueProblem(
            title="MRPC",
            texts=("#1 String", "#2 String"),
            label="Quality",
            metrics=("accuracy", "f1"),
            class_names=("not_equivalent", "equivalent"),
            hub_texts=("sentence1", "sentence2"),
        ),
        "cola": GlueProblem(
            title="CoLA",
            texts=("sentence",),
            metrics=("matthews_correlation",),
            class_names=("unacceptable", "acceptable"),
            columns=("source", "label", "mark", "sentence"),
        ),
        "stsb": GlueProblem(
            title="STS-B",
            texts=("sentence1", "sentence2"),
            label="score",
            metrics=("pearson", "spearman"),
        ),
    }
)
