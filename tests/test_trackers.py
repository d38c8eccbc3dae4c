import dataclasses
import importlib.util
import math
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tiny_run import STEPS, tiny_run

from onescan import configs
from onescan.training import memory, read_metrics, train
from onescan.training.config import MachineConfig
from onescan.training.logging import IDENTITY, Tracker, Trackers, memory_mib, open_trackers

CHILD = """
import os, signal, sys
from pathlib import Path
from tiny_run import tiny_run
from onescan.training.logging import open_trackers
"""


def child(folder, code, *arguments, **environment):
    """Run code in a process of its own; it finds names, the run's folder and tiny_run there."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD + code, str(folder), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


class Recorder(Tracker):
    """Keeps what it gets, or fails at the step where it is told to."""

    def __init__(self, fails_at=math.inf):
        self.fails_at, self.points, self.closed = fails_at, [], False

    def log(self, step, metrics):
        if step >= self.fails_at:
            raise ConnectionError("no route to host")
        self.points.append((step, metrics))

    def close(self):
        if self.fails_at < math.inf:
            raise ConnectionError("no route to host")
        self.closed = True


# TensorBoard


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()


def points(folder):
    """By name, the steps and values that TensorBoard shows."""
    read = events(folder)
    return {
        name: [(event.step, round(event.value, 3)) for event in read.Scalars(name)]
        for name in read.Tags()["scalars"]
    }


KILLED = """
folder, step, last, value = Path(sys.argv[1]), *map(int, sys.argv[2:])
trackers = open_trackers(None, folder=folder, run=tiny_run(), step=step)
for now in range(step + 1, last + 1):
    trackers.log(now, {"train/loss": value})
    if now % 4 == 0:
        trackers.log(now, {"test/accuracy": value})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_killed_twice_shows_every_point_once(tmp_path):
    pytest.importorskip("tensorboard")
    for step, last, value in [(0, 9, 1), (4, 11, 2), (8, 12, 3)]:
        killed = child(tmp_path, KILLED, step, last, value)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        time.sleep(0.5)  # event files are read in the order of the seconds in which they were made
    assert points(tmp_path) == {
        "train/loss": [(step, 1 + (step > 4) + (step > 8)) for step in range(1, 13)],
        "test/accuracy": [(4, 1), (8, 2), (12, 3)],
    }


def test_a_run_that_starts_anew_forgets_the_one_before(tmp_path):
    pytest.importorskip("tensorboard")
    for loss in (0.5, 0.25):
        trackers = open_trackers(("tensorboard",), folder=tmp_path, run=tiny_run(), step=0)
        trackers.log(0, {"train/loss": loss})
        trackers.close()
    assert points(tmp_path) == {"train/loss": [(0, 0.25)]}


def test_tensorboard_shows_the_config_once(tmp_path):
    pytest.importorskip("tensorboard")
    for step in (0, 3, 5):
        open_trackers(None, folder=tmp_path, run=tiny_run(learning_rate=0.0625), step=step).close()
    (text,) = events(tmp_path).Tensors("config/text_summary")
    assert text.step == 0
    assert '"learning_rate": 0.0625' in text.tensor_proto.string_val[0].decode()


# trackio and wandb


class Service(ModuleType):
    """Stands in for trackio or wandb, and for its run: steps that it has had, it knows."""

    def __init__(self, name):
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # find_spec asks for it
        self.inits, self.points, self.finished = [], [], 0

    def init(self, project, **settings):
        self.inits.append({"project": project} | settings)
        self._next_step = self.starting_step = max((s for s, _ in self.points), default=-1) + 1
        return self

    def log(self, metrics, step):
        assert type(metrics) is dict
        self.points.append((step, metrics))

    def finish(self):
        self.finished += 1

    def known(self):
        """What each start's run was known by: trackio has its name alone."""
        return [start["id"] if self.__name__ == "wandb" else start["name"] for start in self.inits]


@pytest.fixture(params=["trackio", "wandb"])
def service(request, monkeypatch):
    service = Service(request.param)
    monkeypatch.setitem(sys.modules, request.param, service)
    return service


def opened(service, folder, step):
    return open_trackers((service.__name__,), folder=folder, run=tiny_run(seed=7), step=step)


def test_a_service_gets_the_run(service, tmp_path):
    trackers = opened(service, tmp_path, 0)
    trackers.log(1, {"train/loss": 0.5})
    trackers.log(1, {"test/accuracy": 0.25})
    trackers.close()
    trackers.close()
    (start,) = service.inits
    assert (start["project"], start["resume"]) == ("onescan", "allow")
    assert start["name"].startswith("tiny/seed-7")
    assert start["config"] == configs.to_dict(tiny_run(seed=7))
    assert start.get("dir") == (str(tmp_path) if service.__name__ == "wandb" else None)
    assert service.points == [(1, {"train/loss": 0.5}), (1, {"test/accuracy": 0.25})]
    assert service.finished == 1


def test_a_service_gets_every_step_of_a_killed_run_once(service, tmp_path):
    for step, last in [(0, 7), (4, 9), (8, 12)]:
        trackers = opened(service, tmp_path, step)
        for now in range(step + 1, last + 1):
            trackers.log(now, {"train/loss": 1 / now})
    assert service.points == [(step, {"train/loss": 1 / step}) for step in range(1, 13)]
    assert len(service.inits) == 3
    assert len(set(service.known())) == 1


def test_a_run_is_known_by_its_folder_until_it_starts_anew(service, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    opened(service, first, 0)
    first.rename(second)
    opened(service, second, 3)
    opened(service, first, 0)
    opened(service, second, 0)
    moved, *others = service.known()
    assert others[0] == moved
    assert len({moved, *others}) == 3
    assert (second / IDENTITY).read_text() in others[2]


def test_a_tracker_added_to_a_run_under_way_starts_there(service, tmp_path):
    opened(service, tmp_path, 8).log(9, {"train/loss": 0.5})
    assert service.points == [(9, {"train/loss": 0.5})]


TRACKIO = """
import trackio.sqlite_storage
folder = Path(sys.argv[1])
for step, last in [(0, 7), (4, 9)]:
    trackers = open_trackers(("trackio",), folder=folder, run=tiny_run(), step=step)
    for now in range(step + 1, last + 1):
        trackers.log(now, {"train/loss": 1 / now})
    trackers.close()
(run,) = trackio.Api().runs("onescan")
assert run.name.startswith("tiny/seed-0/"), run.name
assert run.config["training"]["epochs"] == 3, run.config
logs = trackio.sqlite_storage.SQLiteStorage.get_logs("onescan", run.name)
assert [(log["step"], log["train/loss"]) for log in logs] == [(n, 1 / n) for n in range(1, 10)]
"""


def test_trackio_itself(tmp_path):
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed")
    apart = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = child(tmp_path / "run", TRACKIO, **apart)
    assert done.returncode == 0, done.stderr


WANDB = """
trackers = open_trackers(("wandb",), folder=Path(sys.argv[1]), run=tiny_run(), step=0)
trackers.log(1, {"train/loss": 0.5})
trackers.close()
"""


def test_wandb_itself(tmp_path):
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    done = child(tmp_path, WANDB, WANDB_MODE="offline", WANDB_SILENT="true")
    assert done.returncode == 0, done.stderr
    identity = (tmp_path / IDENTITY).read_text()
    (record,) = tmp_path.glob(f"wandb/offline-run-*/run-{identity}.wandb")
    for written in (b"onescan", b"tiny/seed-0", b"train/loss"):
        assert written in record.read_bytes()


# What is missing, and what fails


def test_no_tensorboard_is_no_tracker(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    open_trackers(None, folder=tmp_path, run=tiny_run(), step=0).log(1, {"train/loss": 0.5})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("tensorboard", r"pip install 'onescan\[log\]'"),
        ("trackio", "pip install trackio"),
        ("wandb", "pip install wandb"),
    ],
)
def test_a_missing_tracker_is_an_error(name, remedy, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"machine\.trackers names {name}, .*: {remedy}"):
        open_trackers((name,), folder=tmp_path, run=tiny_run(), step=0)


@pytest.mark.parametrize("error", [RuntimeError, ConnectionError, KeyError])
def test_a_tracker_that_does_not_start_is_an_error(error, tmp_path, monkeypatch):
    def init(*args, **kwargs):
        raise error("no API key")

    trackio, wandb = Service("trackio"), Service("wandb")
    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(OSError, match=r"wandb, of machine\.trackers, does not start: .*no API key"):
        open_trackers(("trackio", "wandb"), folder=tmp_path, run=tiny_run(), step=0)
    assert trackio.finished == 1


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "run").touch()
    with pytest.raises(OSError, match=r"tensorboard, of machine\.trackers, does not start"):
        open_trackers(None, folder=tmp_path / "run", run=tiny_run(), step=1)


def test_a_failing_tracker_is_dropped_with_one_warning(caplog):
    failing, sound = Recorder(fails_at=3), Recorder()
    trackers = Trackers({"wandb": failing, "trackio": sound})
    for step in range(1, 7):
        trackers.log(step, {"train/loss": 0.5})
    trackers.close()
    assert [step for step, _ in failing.points] == [1, 2]
    assert [step for step, _ in sound.points] == [1, 2, 3, 4, 5, 6]
    assert sound.closed
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("onescan", "WARNING")
    assert record.message == "wandb failed and gets no more of this run: no route to host"


def test_training_goes_on_without_a_failing_tracker(tmp_path, monkeypatch, caplog):
    pytest.importorskip("tensorboard")
    failing, failing_log = Service("wandb"), Recorder(fails_at=5)
    monkeypatch.setattr(failing, "log", lambda metrics, step: failing_log.log(step, metrics))
    monkeypatch.setitem(sys.modules, "wandb", failing)
    machine = MachineConfig(trackers=("wandb", "tensorboard"))
    tracked = train(dataclasses.replace(tiny_run(), machine=machine), tmp_path / "tracked")
    assert tracked.metrics == train(tiny_run(), tmp_path / "untracked").metrics
    assert len([record for record in caplog.records if record.name == "onescan"]) == 1
    losses = {"train/loss": [], "test/loss": []}
    for line in read_metrics(tmp_path / "tracked"):
        losses[f"{line['split']}/loss"].append((line["step"], round(line["loss"], 3)))
    shown = points(tmp_path / "tracked")
    assert {name: shown[name] for name in losses} == losses
    assert len(losses["train/loss"]) == STEPS


def test_a_tracker_that_fails_at_the_end_is_no_more_than_a_warning(caplog):
    failing, sound = Recorder(fails_at=3), Recorder()
    Trackers({"wandb": failing, "trackio": sound}).close()
    assert sound.closed
    assert len([record for record in caplog.records if record.name == "onescan"]) == 1


def test_ctrl_c_in_a_tracker_is_no_failure():
    class Interrupted(Recorder):
        def log(self, step, metrics):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trackers({"wandb": Interrupted()}).log(1, {})


def test_training_imports_no_tracker(tmp_path):
    code = "print(sorted({'tensorboard', 'trackio', 'wandb'} & set(sys.modules)))"
    done = child(tmp_path, f"import onescan.training; {code}")
    assert done.stdout == "[]\n", done.stderr


# Memory


def test_memory_grows_with_what_is_held():
    before = memory_mib(torch.device("cpu"))
    held = mmap.mmap(-1, 64 * 2**20)  # an allocator might have it from what was freed before
    for page in range(0, len(held), mmap.PAGESIZE):
        held[page] = 1
    assert 48 < memory_mib(torch.device("cpu")) - before < 80
    held.close()


def test_memory_where_there_is_no_proc(monkeypatch):
    monkeypatch.setattr(memory, "STATM", Path("/nowhere"))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert most / 1024 <= memory_mib(torch.device("cpu")) < most / 1024 + 8
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert memory_mib(torch.device("cpu")) < most / 2**20 + 8
    monkeypatch.setitem(sys.modules, "resource", None)
    assert math.isnan(memory_mib(torch.device("cpu")))


def test_memory_of_a_gpu_is_the_peak_of_its_tensors(monkeypatch):
    peaks = {torch.device("cuda", 1): 3 * 2**20}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peaks.get)
    assert memory_mib(torch.device("cuda", 1)) == 3
