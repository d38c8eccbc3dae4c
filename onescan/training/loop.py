"""The training loop: any model, any task, and the same numbers whether or not it was stopped.

All chance at a step comes from (seed, step, process), so a run that goes on from a checkpoint
needs nothing but the weights, the optimizer's moments, the step and where its data stood.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from onescan.allocation import build_on_meta, build_unchecked
from onescan.checkpoint.files import LOCK, damaged, locked
from onescan.checkpoint.weights import (
    BEST,
    REMEDY,
    WEIGHTS,
    read_notes,
    save_weights,
    whole_weights,
)
from onescan.data import derive_seed
from onescan.tasks import Batch, BatchPlan, Evaluation, Metrics, Task
from onescan.training.ema import WeightMean, local
from onescan.training.evaluation import draw, evaluate, evaluating
from onescan.training.folder import (
    check_claim,
    make_ready,
    read_result,
    write_manifest,
    write_result,
)
from onescan.training.interrupts import Interrupts
from onescan.training.loader import Loader, choose_workers
from onescan.training.memory import memory_mib
from onescan.training.optimizer import build_optimizer
from onescan.training.parallel import exchanging, prepare
from onescan.training.precision import LossScale, computing
from onescan.training.progress import Progress, Show, shown
from onescan.training.ranks import Ranks, choose_device, joined
from onescan.training.records import Records, Split
from onescan.training.run import MachineConfig, RunConfig, RunResult, TrainingConfig
from onescan.training.schedule import Plan, learning_rate
from onescan.training.start import init_from
from onescan.training.state import TrainingState, last_state, restore_state, save_state
from onescan.training.trackers import check_installed

EnteredT = TypeVar("EnteredT")


def train(
    run: RunConfig, folder: str | Path, *, overwrite: bool = False, progress: bool | Show = False
) -> RunResult:
    """Carry out a run in `folder`, or go on with it from its last checkpoint.

    A folder that holds the same run finished is left as it is, and its result returned. Ctrl-C
    saves a checkpoint and then stops the run. On a CPU, a run that was stopped in any way and
    started again gives, to the last bit, the numbers of one that was not. Started by torchrun, or
    with torch.distributed set up by the caller, its processes share the work.

    Args:
        run: what to train, on what, and how.
        folder: where everything is written; with several machines, one that they share.
        overwrite: remove the run that the folder holds, finished or not, and start anew.
        progress: True draws a bar on stderr; a function is called after every update. Of several
            processes the first one's is shown.

    Raises:
        ValueError: the folder holds another run, or no run at all; or a config is refused.
        FloatingPointError: the loss, its gradient or the weights are no longer finite.
        OSError: the folder cannot be written to; files saved earlier are intact.
    """
    folder, settings, machine = Path(folder), run.training, run.machine
    with ExitStack() as stack:
        ranks = stack.enter_context(joined(machine.device))
        gives_way = ranks.first(lambda: check_claim(folder, run, overwrite=overwrite))
        finished = None if gives_way else ranks.first(lambda: read_result(folder))
        if finished:
            return finished
        device = choose_device(machine.device, ranks)
        check_installed(machine.trackers)
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        task = run.task.build(run.data.build())
        plan = Plan.of(settings, task.steps_per_epoch(settings.batch_size))
        share = share_of_batch(settings, machine, ranks)
        build_on_meta(run.model)  # raises if it does not fit into memory
        torch.manual_seed(derive_seed(settings.seed, "model"))
        model = build_unchecked(run.model)
        if run.init_from and (gives_way or not ranks.first(lambda: last_state(folder))):
            init_from(run.init_from, model)
        model = model.to(device)
        if gives_way:
            _try_out(model, task, settings, device)
        trained = prepare(model, machine, ranks, device)
        state = TrainingState(
            model=model,
            optimizer=build_optimizer(model, settings),
            mean=WeightMean(model, settings.ema_decay) if settings.ema_decay else None,
            scale=LossScale() if settings.precision == "float16" else None,
        )
        token = _enter_first(stack, ranks, lambda: locked(folder))
        _check_shared(folder, token, ranks)
        ranks.first(lambda: make_ready(folder, run, overwrite=overwrite))
        _restore(folder, state, ranks)
        where = {"step": state.step, "processes": ranks.size}
        ranks.first(lambda: write_manifest(folder, run, task, device, **where))
        records = _enter_first(stack, ranks, lambda: closing(Records(folder, run, upto=state.step)))
        loop = Loop(
            folder=folder,
            settings=settings,
            machine=machine,
            task=task,
            plan=plan,
            state=state,
            trained=trained,
            device=device,
            ranks=ranks,
            share=share,
            records=records,
            draws=progress is True and ranks.is_first,
            metrics=records.metrics if records else {},
        )
        show = stack.enter_context(shown(progress if ranks.is_first else False, loop.progress()))
        evaluation = loop.run(show)
        ranks.first(lambda: write_result(folder, evaluation, state.step))
    return RunResult(folder=folder, evaluation=evaluation, steps=state.step)


@dataclass(kw_only=True)
class Loop:
    """A run under way."""

    folder: Path
    settings: TrainingConfig
    machine: MachineConfig
    task: Task
    plan: Plan
    state: TrainingState
    trained: nn.Module
    """The model as training calls it: copied or split over processes."""
    device: torch.device
    ranks: Ranks
    share: slice
    """This process' part of every batch."""
    records: Records | None
    """The first process' alone."""
    draws: bool
    """Whether to draw a bar while evaluating."""
    metrics: dict[str, float]
    """Of the last evaluation."""
    numbers: dict[str, float] = field(default_factory=dict)
    """The last batch's metrics and the last evaluation's, to show."""
    interrupts: Interrupts = field(default_factory=Interrupts)
    updates: int = 0
    """Of this start."""
    seconds: float = 0.0
    waiting_seconds: float = 0.0

    def run(self, show: Show) -> Evaluation:
        """Train to the end of the plan and return the last evaluation."""
        evaluation = None
        with closing(self.read_batches()) as batches, self.interrupts:
            while True:
                step = self.state.step
                if self.plan.evaluates(step) and (step > self.state.judged or self.is_over):
                    evaluation = self.evaluate()
                    self.stop_if_asked()
                if self.is_over or self.plan.saves(step):
                    self.save()
                if self.is_over:
                    assert evaluation is not None
                    return evaluation
                self.update(batches)
                show(self.progress())
                self.stop_if_asked()

    @property
    def is_over(self) -> bool:
        """Whether the plan is carried out, or patience has run out."""
        patience = self.settings.patience
        return self.state.step >= self.plan.steps or (
            patience is not None and self.state.evaluations_without_improvement >= patience
        )

    def stop_if_asked(self) -> None:
        """End the run between two updates, with a checkpoint, if any process was asked to."""
        if self.ranks.any(self.interrupts.asked):
            self.save()
            raise KeyboardInterrupt

    def read_batches(self) -> Loader:
        """Begin to read this process' part of every batch that is still to come."""
        plan = self.task.batches(
            step=self.state.step,
            batch_size=self.settings.batch_size,
            seed=self.settings.seed,
            data_state=self.state.data_state,
        )
        mine = (BatchPlan(examples[self.share], data_state) for examples, data_state in plan)
        workers = choose_workers(self.machine.workers, self.task.train)
        return Loader(self.task.train, mine, workers=workers, pin=self.device.type == "cuda")

    def update(self, batches: Loader) -> None:
        """Update the weights once: read, augment, forward, backward, clip, step."""
        begin, step, optimizer = perf_counter(), self.state.step, self.state.optimizer
        batch = tuple(part.to(self.device, non_blocking=True) for part in next(batches))
        chance = derive_seed(self.settings.seed, "step", step, self.ranks.rank)
        torch.manual_seed(chance)  # of dropped paths
        sums = self.backward(self.task.augment(batch, chance))
        *values, norm = torch.stack([*sums.values(), self.clip()]).tolist()  # the one wait
        metrics = dict(zip(sums, values, strict=True))
        means = self.ranks.mean(metrics | {"unreadable": batches.failures})
        unreadable = round(means.pop("unreadable") * self.ranks.size)
        self.check_gradient(means["loss"], norm)
        rate = learning_rate(step, self.plan.steps, self.settings)
        for group in optimizer.param_groups:
            group["lr"] = rate
        if math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()
        self.state.step += 1
        self.updates += 1
        self.state.data_state = batches.data_state
        if self.state.mean:
            self.state.mean.update(self.state.model, self.state.step)
        seconds, waiting = perf_counter() - begin, batches.waiting_s
        self.seconds, self.waiting_seconds = self.seconds + seconds, self.waiting_seconds + waiting
        measured = {"learning_rate": rate, "gradient_norm": norm, "seconds": seconds}
        measured |= {"waiting_seconds": waiting, "memory_mib": memory_mib(self.device)}
        counted = {"unreadable": unreadable} if unreadable else {}
        self.record("train", means | measured | counted)
        self.numbers |= means

    def backward(self, batch: Batch) -> dict[str, Tensor]:
        """Add up the gradient over the parts of a batch; return its metrics, the loss first."""
        parts = self.machine.gradient_accumulation_steps
        cut = [tensor.chunk(parts) for tensor in batch]
        sums: dict[str, Tensor] = {}
        for i, part in enumerate(zip(*cut, strict=True)):
            with exchanging(self.trained, gradients=i == parts - 1):
                loss, metrics = self.loss(part)
                scale = self.state.scale.scale if self.state.scale else 1.0
                (loss * (scale / parts)).backward()
            for name, value in ({"loss": loss} | metrics).items():
                sums[name] = sums.get(name, 0) + value.detach().float() / parts
        return sums

    def loss(self, part: Batch) -> tuple[Tensor, Metrics]:
        """The task's loss; what an op refuses after the first update are weights that diverge."""
        try:
            with computing(self.settings.precision, self.device):
                return self.task.loss(self.trained, part)
        except ValueError as error:
            if self.updates == 0:
                raise
            raise self.failure(str(error)) from error

    def clip(self) -> Tensor:
        """Shorten the gradient if it is too long, and return how long it was."""
        parameters = list(self.state.model.parameters())
        if self.state.scale:
            for gradient in [p.grad for p in parameters if p.grad is not None]:
                local(gradient).mul_(1 / self.state.scale.scale)
        return whole(clip_grad_norm_(parameters, self.settings.max_grad_norm or math.inf))

    def check_gradient(self, loss: float, norm: float) -> None:
        """Raise FloatingPointError for a loss or a gradient that training cannot recover from.

        In float16 a gradient may overflow now and then: that update is passed over.
        """
        self.check_finite(loss=loss)
        if self.state.scale is None:
            self.check_finite(gradient_norm=norm)
            return
        self.state.scale.update(finite=math.isfinite(norm))
        if self.state.scale.is_spent:
            raise self.failure("the gradient overflows float16 whatever the loss is scaled by")

    def evaluate(self) -> Evaluation:
        """Judge the model, record how it did, and keep its weights if it never did better."""
        state = self.state
        self.check_weights()
        self.share_buffers()
        with state.judged_weights():
            evaluation = evaluate(
                state.model,
                self.task,
                precision=self.settings.precision,
                workers=choose_workers(self.machine.workers, self.task.test),
                ranks=self.ranks,
                progress=self.draws,
            )
            picture = draw(state.model, self.task, precision=self.settings.precision)
        self.metrics = evaluation.metrics
        self.numbers |= {f"test_{name}": value for name, value in self.metrics.items()}
        unreadable = {"unreadable": evaluation.left_out} if evaluation.left_out else {}
        self.record("test", self.metrics | unreadable)
        if self.records and picture is not None:
            self.records.add_picture(picture, step=state.step)
        if state.step > state.judged and state.judge(self.task.score(self.metrics)):
            self.save_weights(BEST)
        return evaluation

    def save(self) -> None:
        """Save everything that resuming needs, and the weights for use."""
        self.check_weights()
        self.share_buffers()
        if self.records:
            self.records.sync()
        save_state(self.folder, self.state, self.ranks)
        self.save_weights(WEIGHTS)

    def save_weights(self, name: str) -> None:
        """Write the weights that are judged to a file, with how they did where that is known."""
        with self.state.judged_weights():
            weights = whole_weights(self.state.model, keep=self.ranks.is_first)
        known = self.metrics if self.state.judged == self.state.step else {}
        notes = {"step": self.state.step, "metrics": known}
        self.ranks.first(lambda: save_weights(self.folder / name, weights, notes))

    def share_buffers(self) -> None:
        """Let all processes have the first one's running statistics, in the model and its mean."""
        named = dict(self.state.model.named_buffers())
        means = self.state.mean.tensors if self.state.mean else {}
        self.ranks.agree([*named.values(), *(means[name] for name in named if name in means)])

    def record(self, split: Split, metrics: dict[str, float]) -> None:
        """Write one line of metrics.jsonl, and pass it on to the trackers."""
        if self.records:
            epoch = self.state.step / self.plan.steps_per_epoch
            self.records.add(split, step=self.state.step, epoch=epoch, metrics=metrics)

    def progress(self) -> Progress:
        """Tell where the run stands."""
        return Progress(
            step=self.state.step,
            steps=self.plan.steps,
            batch_size=self.settings.batch_size,
            unit=self.task.unit,
            metrics=dict(self.numbers),
            waiting=self.waiting_seconds / (self.seconds or 1),
        )

    def check_weights(self) -> None:
        """Raise FloatingPointError if the weights are of no use any more."""
        norm = whole(get_total_norm(self.state.model.parameters())).item()
        self.check_finite(weight_norm=norm)

    def check_finite(self, **numbers: float) -> None:
        """Raise FloatingPointError for a number that training cannot recover from."""
        for name, number in numbers.items():
            if not math.isfinite(number):
                raise self.failure(f"{name} is {number}")

    def failure(self, what: str) -> FloatingPointError:
        """Make the error that ends a run which diverges: when, what is saved, and what to try."""
        last = last_state(self.folder)
        saved = f"the last good checkpoint is {last}" if last else "no checkpoint was saved"
        return FloatingPointError(
            f"{what} at step {self.state.step}; {saved}; try a smaller "
            f"training.learning_rate (now {self.settings.learning_rate}) or "
            f"training.max_grad_norm (now {self.settings.max_grad_norm})"
        )


def share_of_batch(settings: TrainingConfig, machine: MachineConfig, ranks: Ranks) -> slice:
    """Say which part of every batch is this process'.

    Raises:
        ValueError: a batch cannot be cut into equal parts.
    """
    parts = ranks.size * machine.gradient_accumulation_steps
    if settings.batch_size % parts:
        raise ValueError(
            f"training.batch_size is {settings.batch_size}, expected a multiple of {parts}: "
            f"{ranks.size} processes times machine.gradient_accumulation_steps "
            f"{machine.gradient_accumulation_steps}"
        )
    share = settings.batch_size // ranks.size
    return slice(ranks.rank * share, (ranks.rank + 1) * share)


def whole(norm: Tensor) -> Tensor:
    """A gradient's or weights' length, gathered where they are split over processes."""
    gather = getattr(norm, "full_tensor", None)  # DTensor's, whose import takes half a second
    return gather() if gather else norm


def _try_out(model: nn.Module, task: Task, settings: TrainingConfig, device: torch.device) -> None:
    """Find out whether model and data fit each other, before a run that gives way is removed."""
    plan = task.batches(step=0, batch_size=settings.batch_size, seed=settings.seed)
    examples = next(plan).examples[:2]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        batch = tuple(part.to(device) for part in task.train.read(examples).batch)
        with evaluating(model), computing(settings.precision, device):
            task.loss(model, task.augment(batch, 0))


def _check_shared(folder: Path, token: str | None, ranks: Ranks) -> None:
    """Make sure that all processes see what the first one wrote to the lock file."""
    said = ranks.first(lambda: token)
    sees = ranks.is_first or ((folder / LOCK).is_file() and (folder / LOCK).read_text() == said)
    if not all(ranks.gather(sees)):
        raise ValueError(f"{folder} is not on a disk that all processes share, as checkpoints need")


def _restore(folder: Path, state: TrainingState, ranks: Ranks) -> None:
    """Resume from the last checkpoint, if there is one."""
    last = ranks.first(lambda: last_state(folder))
    if last:
        restore_state(last, state, ranks)
    if ranks.first(lambda: _noted_step(folder / BEST)) > state.step:
        state.best = -math.inf  # that evaluation will be repeated


def _noted_step(weights: Path) -> int:
    if not weights.exists():
        return 0
    step = read_notes(weights).get("step")
    if not isinstance(step, int):
        raise damaged(weights, step, REMEDY)
    return step


def _enter_first(
    stack: ExitStack, ranks: Ranks, make: Callable[[], AbstractContextManager[EnteredT]]
) -> EnteredT | None:
    """Enter a context in the first process alone, and return what it gave there."""
    entered: list[EnteredT] = []
    ranks.first(lambda: entered.append(stack.enter_context(make())))
    return entered[0] if entered else None
