"""A run's classes and input format, compared with its data when it is used again; its notes."""

import dataclasses
import json
from dataclasses import dataclass

import pytest
from tiny_images import write_folders
from tiny_run import StripesConfig, TinyModelConfig, press_ctrl_c_at, tiny_run

from onescan.cli import main
from onescan.experiments.data import ImageDatasetConfig
from onescan.experiments.report import write_report
from onescan.experiments.tasks import ImageClassificationConfig
from onescan.experiments.training import train
from onescan.experiments.training.folder import _is_near
from onescan.experiments.training.initialization import init_from
from onescan.experiments.training.runs import build_task
from onescan.inference.loading import load
from onescan.inputs import ArrayFormat, ImageFormat

NOTES = ("3 of 36 images are left out: 3 .heic", "2 images were turned upright")


@dataclass(frozen=True, kw_only=True)
class NotedStripesConfig(StripesConfig):
    def build(self):
        return dataclasses.replace(super().build(), notes=NOTES)


def run_on_folders(folder, **training):
    data = ImageDatasetConfig(
        path=folder, channels=1, image_size=(4, 4), mean=(0.5,), std=(0.5,), test_fraction=0.5
    )
    return dataclasses.replace(
        tiny_run(**{"batch_size": 4} | training),
        model=TinyModelConfig(num_classes=2),
        data=data,
        task=ImageClassificationConfig(),
    )


def rename_first_class(folder):
    """Rename class a to c, so that b becomes the first class."""
    (folder / "a").rename(folder / "c")


@pytest.fixture
def finished(tmp_path):
    """A finished run whose classes have a different order now."""
    write_folders(tmp_path / "data", "a", "b", count=8)
    run = run_on_folders(str(tmp_path / "data"), epochs=1)
    folder = train(run, tmp_path / "run").folder
    assert build_task(load(folder)).class_names == ("a", "b")
    rename_first_class(tmp_path / "data")
    return folder


CHANGED = "the data has changed since the run in .* began: class 0 was 'a' and is now 'b'"


def test_a_model_is_not_evaluated_on_other_classes(finished, capsys):
    with pytest.raises(ValueError, match=CHANGED):
        build_task(load(finished))
    module = ["--import", __file__]
    assert main(["evaluate", str(finished), "--device", "cpu", *module]) == 2
    assert "class 0 was 'a' and is now 'b'" in capsys.readouterr().err


def test_there_is_no_report_on_other_classes(finished, tmp_path):
    with pytest.raises(ValueError, match=CHANGED):
        write_report([finished], tmp_path / "report.html")


def test_a_run_does_not_resume_with_other_classes(tmp_path):
    write_folders(tmp_path / "data", "a", "b", count=8)
    run = run_on_folders(str(tmp_path / "data"))
    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "run", progress=press_ctrl_c_at(2))
    rename_first_class(tmp_path / "data")
    with pytest.raises(ValueError, match=CHANGED + ".*or start in another folder"):
        train(run, tmp_path / "run")


def test_a_run_does_not_start_from_a_model_with_another_order_of_classes(finished, tmp_path):
    (tmp_path / "data" / "b").rename(tmp_path / "data" / "z")
    (tmp_path / "data" / "c").rename(tmp_path / "data" / "b")
    (tmp_path / "data" / "z").rename(tmp_path / "data" / "a")  # as they were
    with pytest.raises(
        ValueError, match="in another order than those of the data: a, b instead of b, a"
    ):
        init_from(str(finished), TinyModelConfig(num_classes=2).build(), ("b", "a"))
    run = run_on_folders(str(tmp_path / "data"), epochs=1)
    train(dataclasses.replace(run, init_from=str(finished)), tmp_path / "next")


@pytest.mark.slow
def test_notes_are_shown_saved_and_reported(tmp_path, capsys):
    run = dataclasses.replace(tiny_run(epochs=1), data=NotedStripesConfig())
    folder = train(run, tmp_path / "run", progress=True).folder
    shown = capsys.readouterr().err
    assert all(f"note: {note}\n" in shown for note in NOTES)
    assert json.loads((folder / "config.json").read_text())["notes"] == list(NOTES)
    page = write_report([folder], tmp_path / "report.html").read_text()
    assert all(f"<dd>{note}</dd>" in page for note in NOTES)
    assert main(["evaluate", str(folder), "--device", "cpu"]) == 0
    assert f"note: {NOTES[0]}\nnote: {NOTES[1]}\n" in capsys.readouterr().out


def test_constants_may_be_rounded_but_not_changed():
    format = ImageFormat(channels=1, height=2, width=2, mean=(0.1,), std=(0.2,))
    assert _is_near(format, dataclasses.replace(format, mean=(0.1 + 1e-7,), std=(0.2 - 1e-7,)))
    assert not _is_near(format, dataclasses.replace(format, mean=(0.101,)))
    assert not _is_near(format, dataclasses.replace(format, std=(0.201,)))
    assert not _is_near(format, dataclasses.replace(format, height=3))
    assert not _is_near(format, ArrayFormat(channels=1, shape=(2, 2), mean=(0.1,), std=(0.2,)))
