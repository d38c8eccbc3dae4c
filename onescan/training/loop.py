"""The training loop: any model, any task, and the same numbers whether or not it was stopped.

All chance at a step comes from (seed, step), so a run that goes on from a checkpoint needs
nothing but the weights, the optimizer's moments and the step.
"""

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

from onescan.data import derive_seed
from onescan.tasks import Evaluation, Task
from onescan.training.folder import claim, read_result, write_manifest, write_result
from onescan.training.optimizer import build_optimizer
from onescan.training.progress import Progress, Show, shown
from onescan.training.records import Records, Split
from onescan.training.run import RunConfig, RunResult, TrainingConfig
from onescan.training.schedule import Plan, learning_rate
from onescan.training.state import TrainingState, last_state, restore_state, save_state
from onescan.training.weights import save_weights


def train(
    run: RunConfig, folder: str | Path, *, overwrite: bool = False, progress: bool | Show = False
) -> RunResult:
    """Carry out a run in `folder`, or go on with it from its last checkpoint.

    A folder that holds the same run finished is left as it is, and its result returned. Ctrl-C
    saves a checkpoint and then stops the run. On a CPU, a run that was stopped in any way and
    started again gives, to the last bit, the numbers of one that was not.

    Args:
        run: what to train, on what, and how.
        folder: where everything is written.
        overwrite: remove the run that the folder holds, finished or not, and start anew.
        progress: True draws a bar on stderr; a function is called after every update.

    Raises:
        ValueError: the folder holds another run, or no run at all; or a config is refused.
        FloatingPointError: the loss, its gradient or the weights are no longer finite.
        OSError: the folder cannot be written to; what was saved before is intact.
    """
    folder, settings = Path(folder), run.training
    claim(folder, run, overwrite=overwrite)
    finished = read_result(folder)
    if finished:
        return finished
    device = _device(settings.device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        task = run.task.build(run.data.build())
        plan = Plan.of(settings, task.steps_per_epoch(settings.batch_size))
        torch.manual_seed(derive_seed(settings.seed, "model"))
        model = run.model.build().to(device)
        state = TrainingState(model=model, optimizer=build_optimizer(model, settings))
        write_manifest(folder, run, task, device)
        restore_state(folder, state)
        with closing(Records(folder, upto=state.step)) as records:
            loop = Loop(folder, settings, task, plan, state, device, records)
            with shown(progress, loop.progress({})) as show:
                evaluation = loop.run(show)
    write_result(folder, evaluation, state.step)
    return RunResult(folder=folder, evaluation=evaluation, steps=state.step)


@dataclass
class Loop:
    """A run under way."""

    folder: Path
    settings: TrainingConfig
    task: Task
    plan: Plan
    state: TrainingState
    device: torch.device
    records: Records
    judged: dict[str, float] = field(default_factory=dict)
    """The last evaluation's metrics, to show."""

    def run(self, show: Show) -> Evaluation:
        """Train to the end of the plan and return the last evaluation."""
        try:
            while True:
                step = self.state.step
                evaluation = self.evaluate() if self.plan.evaluates(step) else None
                if self.plan.saves(step):
                    self.save()
                if evaluation and step == self.plan.steps:
                    return evaluation
                show(self.progress(self.update()))
        except KeyboardInterrupt:
            if self.state.step > 0:
                self.save()
            raise

    def update(self) -> dict[str, float]:
        """Update the weights once: forward, backward, clip, step. Returns the batch's metrics."""
        begin, step = perf_counter(), self.state.step
        model, optimizer = self.state.model, self.state.optimizer
        epoch, index = divmod(step, self.plan.steps_per_epoch)
        size, seed = self.settings.batch_size, self.settings.seed
        batch = self.task.batch(epoch=epoch, index=index, batch_size=size, seed=seed)
        torch.manual_seed(derive_seed(seed, "step", step))  # of dropped paths
        loss, metrics = self.task.loss(model, tuple(part.to(self.device) for part in batch))
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), self.settings.clip_norm or math.inf)
        shown = {name: value.item() for name, value in ({"loss": loss} | metrics).items()}
        self.check_finite(loss=shown["loss"], gradient_norm=norm.item())
        rate = learning_rate(step, self.plan.steps, self.settings)
        with uninterrupted():  # the weights, the step and its record change together
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            self.check_finite(weight_norm=get_total_norm(model.parameters()).item())
            optimizer.zero_grad()
            self.state.step += 1
            measured = {"learning_rate": rate, "gradient_norm": norm.item()}
            self.record("train", shown | measured | {"seconds": perf_counter() - begin})
        return shown

    def evaluate(self) -> Evaluation:
        """Judge the model, and record how it did."""
        evaluation = self.task.evaluate(self.state.model)
        self.judged = {f"test_{name}": value for name, value in evaluation.metrics.items()}
        self.record("test", evaluation.metrics)
        return evaluation

    def save(self) -> None:
        """Save everything that resuming needs, and the weights for use."""
        with uninterrupted():
            self.records.sync()
            save_state(self.folder, self.state)
            save_weights(self.folder, self.state.model)

    def record(self, split: Split, metrics: dict[str, float]) -> None:
        """Write one line of metrics.jsonl."""
        epoch = self.state.step / self.plan.steps_per_epoch
        self.records.add(split, step=self.state.step, epoch=epoch, metrics=metrics)

    def progress(self, metrics: dict[str, float]) -> Progress:
        """Tell where the run stands."""
        return Progress(
            step=self.state.step,
            steps=self.plan.steps,
            batch_size=self.settings.batch_size,
            unit=self.task.unit,
            metrics=metrics | self.judged,
        )

    def check_finite(self, **numbers: float) -> None:
        """Raise FloatingPointError for a number that training cannot recover from."""
        for name, number in numbers.items():
            if not math.isfinite(number):
                last = last_state(self.folder)
                saved = f"the last good checkpoint is {last}" if last else "no checkpoint was saved"
                raise FloatingPointError(
                    f"{name} is {number} at step {self.state.step}; {saved}; try a smaller "
                    f"training.learning_rate (now {self.settings.learning_rate}) or "
                    f"training.clip_norm (now {self.settings.clip_norm})"
                )


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done."""
    if threading.current_thread() is not threading.main_thread():  # only it gets signals
        yield
        return
    caught: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if caught:
        signal.raise_signal(signal.SIGINT)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"training.device is {name!r}, expected auto, cpu, cuda, ...") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"training.device is {name!r}, but there is no GPU that torch can use")
    return device
