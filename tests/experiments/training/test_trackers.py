"""Experiment trackers, which show every step of a killed run once, and never cost a run."""

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
from onescan.experiments.training import MachineConfig, logging, read_metrics, train
from onescan.experiments.training.logging import TRACKER_ID, memory_mib, open_trackers

CHILD = """
import os, signal, sys
from pathlib import Path
from tiny_run import tiny_run
from onescan.experiments.training.logging import open_trackers
"""


def child(folder, code, *arguments, **environment):
    """Run code in another process, with tiny_run and open_trackers imported."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD + code, str(folder), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


# TensorBoard


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()


def points(folder):
    """Return the steps and values that TensorBoard shows, by name."""
    read = events(folder)
    return {
        name: [(event.step, round(event.value, 3)) for event in read.Scalars(name)]
        for name in read.Tags()["scalars"]
    }


KILLED = """
folder, step, last, value = Path(sys.argv[1]), *map(int, sys.argv[2:])
trackers = open_trackers(None, folder=folder, run=tiny_run(learning_rate=0.0625), step=step)
for now in range(step + 1, last + 1):
    trackers.log(now, {"train/loss": value})
    if now % 4 == 0:
        trackers.log(now, {"test/accuracy": value})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_tensorboard_shows_a_run_that_was_killed_twice_once(tmp_path):
    for step, last, value in [(0, 9, 1), (4, 11, 2), (8, 12, 3)]:
        killed = child(tmp_path, KILLED, step, last, value)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        time.sleep(0.5)  # event files are sorted by the second of their creation
    assert points(tmp_path) == {
        "train/loss": [(step, 1 + (step > 4) + (step > 8)) for step in range(1, 13)],
        "test/accuracy": [(4, 1), (8, 2), (12, 3)],
    }
    (config,) = events(tmp_path).Tensors("config/text_summary")  # once
    assert config.step == 0
    assert '"learning_rate": 0.0625' in config.tensor_proto.string_val[0].decode()


def test_tensorboard_forgets_a_run_that_is_replaced(tmp_path):
    for loss in (0.5, 0.25):
        trackers = open_trackers(("tensorboard",), folder=tmp_path, run=tiny_run(), step=0)
        trackers.log(0, {"train/loss": loss})
        trackers.close()
    assert points(tmp_path) == {"train/loss": [(0, 0.25)]}


# trackio and wandb


class Service(ModuleType):
    """A fake of trackio or wandb, and of its run, which knows the steps that it has received."""

    def __init__(self, name):
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # for find_spec
        self.inits, self.points, self.finished = [], [], 0
        self.fails_at = math.inf

    def init(self, project, **settings):
        self.inits.append({"project": project} | settings)
        self._next_step = self.starting_step = max((s for s, _ in self.points), default=-1) + 1
        return self

    def log(self, metrics, step):
        assert type(metrics) is dict
        if step >= self.fails_at:
            raise ConnectionError("no route to host")
        self.points.append((step, metrics))

    def finish(self):
        if self.fails_at < math.inf:
            raise ConnectionError("no route to host")
        self.finished += 1

    def identifiers(self):
        return [start["id"] if self.__name__ == "wandb" else start["name"] for start in self.inits]


@pytest.fixture
def services(monkeypatch):
    services = {name: Service(name) for name in ("trackio", "wandb")}
    for name, service in services.items():
        monkeypatch.setitem(sys.modules, name, service)
    return services


@pytest.fixture(params=["trackio", "wandb"])
def service(request, services):
    return services[request.param]


def opened(service, folder, step):
    return open_trackers((service.__name__,), folder=folder, run=tiny_run(seed=7), step=step)


def test_a_service_receives_the_run(service, tmp_path):
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


def test_a_service_receives_every_step_of_a_killed_run_once(service, tmp_path):
    for step, last in [(0, 7), (4, 9), (8, 12)]:
        trackers = opened(service, tmp_path, step)
        for now in range(step + 1, last + 1):
            trackers.log(now, {"train/loss": 1 / now})
    assert service.points == [(step, {"train/loss": 1 / step}) for step in range(1, 13)]
    assert len(service.inits) == 3
    assert len(set(service.identifiers())) == 1


def test_a_run_keeps_its_identifier_until_it_is_replaced(service, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    opened(service, first, 0)
    first.rename(second)
    opened(service, second, 3)
    opened(service, first, 0)
    opened(service, second, 0)
    moved, *others = service.identifiers()
    assert others[0] == moved
    assert len({moved, *others}) == 3
    assert (second / TRACKER_ID).read_text() in others[2]


def test_a_tracker_may_be_added_to_a_run_in_progress(service, tmp_path):
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
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = child(tmp_path / "run", TRACKIO, **environment)
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
    identifier = (tmp_path / TRACKER_ID).read_text()
    (record,) = tmp_path.glob(f"wandb/offline-run-*/run-{identifier}.wandb")
    for written in (b"onescan", b"tiny/seed-0", b"train/loss"):
        assert written in record.read_bytes()


# Missing and failing trackers


@pytest.mark.parametrize("name", ["tensorboard", "accelerate"])
def test_tensorboard_is_used_only_if_it_is_installed(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    open_trackers(None, folder=tmp_path, run=tiny_run(), step=0).log(1, {"train/loss": 0.5})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "missing", "remedy"),
    [
        ("tensorboard", "tensorboard", r"pip install 'onescan\[log\]'"),
        ("tensorboard", "accelerate", r"pip install 'onescan\[log\]'"),
        ("trackio", "trackio", "pip install trackio"),
        ("wandb", "wandb", "pip install wandb"),
    ],
)
def test_a_missing_tracker_is_an_error(name, missing, remedy, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"machine\.trackers .*{name}, .*{missing} .*: {remedy}"):
        open_trackers((name,), folder=tmp_path, run=tiny_run(), step=0)


@pytest.mark.parametrize("error", [RuntimeError, ConnectionError, KeyError])
def test_a_tracker_that_does_not_start_is_an_error(error, tmp_path, services, monkeypatch):
    def init(*args, **kwargs):
        raise error("no API key")

    monkeypatch.setattr(services["wandb"], "init", init)
    with pytest.raises(OSError, match=r"wandb in machine\.trackers .*no API key"):
        open_trackers(("trackio", "wandb"), folder=tmp_path, run=tiny_run(), step=0)
    assert services["trackio"].finished == 1


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(OSError, match=r"tensorboard in machine\.trackers"):
        open_trackers(None, folder=tmp_path / "run", run=tiny_run(), step=1)


@pytest.mark.sampled
@pytest.mark.parametrize("fails_at", [3, 100])  # 100: only when it is closed
def test_training_continues_without_a_tracker_that_fails(tmp_path, services, caplog, fails_at):
    services["wandb"].fails_at = fails_at
    machine = MachineConfig(trackers=("wandb", "trackio", "tensorboard"))
    tracked = train(dataclasses.replace(tiny_run(), machine=machine), tmp_path / "tracked")
    assert tracked.metrics == train(tiny_run(), tmp_path / "untracked").metrics
    (record,) = [record for record in caplog.records if record.name == "onescan"]
    assert "wandb" in record.message
    assert "no route to host" in record.message
    assert services["trackio"].finished == 1
    losses = {"train/loss": [], "test/loss": []}
    for line in read_metrics(tmp_path / "tracked"):
        losses[f"{line['split']}/loss"].append((line["step"], round(line["loss"], 3)))
    shown = points(tmp_path / "tracked")
    assert {name: shown[name] for name in losses} == losses
    assert len(losses["train/loss"]) == STEPS
    received = [step for step, metrics in services["wandb"].points if "train/loss" in metrics]
    assert received == list(range(1, min(fails_at - 1, STEPS) + 1))


def test_ctrl_c_in_a_tracker_stops_the_run(services, monkeypatch, tmp_path):
    def interrupt(metrics, step):
        raise KeyboardInterrupt

    monkeypatch.setattr(services["wandb"], "log", interrupt)
    with pytest.raises(KeyboardInterrupt):
        opened(services["wandb"], tmp_path, 0).log(1, {})


@pytest.mark.slow
def test_training_imports_no_tracker(tmp_path):
    code = "print(sorted({'accelerate', 'tensorboard', 'trackio', 'wandb'} & set(sys.modules)))"
    done = child(tmp_path, f"import onescan.experiments.training; {code}")
    assert done.stdout == "[]\n", done.stderr


# Memory


def test_memory_grows_with_what_is_held():
    before = memory_mib(torch.device("cpu"))
    held = mmap.mmap(-1, 64 * 2**20)  # an allocator might reuse freed memory
    for page in range(0, len(held), mmap.PAGESIZE):
        held[page] = 1
    assert 48 < memory_mib(torch.device("cpu")) - before < 80
    held.close()


def test_memory_without_proc_is_the_peak_or_nan(monkeypatch):
    monkeypatch.setattr(logging, "STATM", Path("/nowhere"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak / 1024 <= memory_mib(torch.device("cpu")) < peak / 1024 + 8
    monkeypatch.setattr(logging.sys, "platform", "darwin")
    assert memory_mib(torch.device("cpu")) < peak / 2**20 + 8
    monkeypatch.setitem(sys.modules, "resource", None)
    assert math.isnan(memory_mib(torch.device("cpu")))


def test_memory_of_a_gpu_is_the_peak_of_its_tensors(monkeypatch):
    peaks = {torch.device("cuda", 1): 3 * 2**20}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peaks.get)
    assert memory_mib(torch.device("cuda", 1)) == 3
