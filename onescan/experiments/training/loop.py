"""The training loop, for any model and any task.

Randomness at each step depends only on (seed, step, rank), so an interrupted run resumes exactly
from the weights, the optimizer state, the step and the position in the data. All processes use the
same masks and noise, and processes of one sequence the same augmentation, but each draws dropout
for its own tokens.

The loss of a step is the mean over the labels of its whole batch, however the batch is split over
processes, accumulation steps, and micro-batches of a growing batch.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from onescan.allocation import build_on_meta, build_unchecked
from onescan.checkpoint.files import begin, damaged, partial_of, remove, writing
from onescan.checkpoint.weights import (
    AVERAGE,
    BEST,
    REMEDY,
    WEIGHTS,
    read_notes,
    save_weights,
    whole_weights,
)
from onescan.experiments.data import derive_seed
from onescan.experiments.data.share import Share
from onescan.experiments.installation import require_train
from onescan.experiments.locks import LOCK, locked
from onescan.experiments.tasks import Batch, BatchPlan, Evaluation, Metrics, Task
from onescan.experiments.training.config import (
    MachineConfig,
    Precision,
    RunConfig,
    RunResult,
    TrainingConfig,
)
from onescan.experiments.training.data import Loader, choose_workers, share_of_batch
from onescan.experiments.training.distributed import (
    Interrupts,
    Ranks,
    choose_device,
    gradient_sync,
    joined,
    prepare,
    sharing_sequences,
)
from onescan.experiments.training.evaluation import eval_mode, evaluate, make_picture
from onescan.experiments.training.folder import (
    check_run_dir,
    prepare_run_dir,
    read_manifest,
    read_result,
    write_manifest,
    write_result,
)
from onescan.experiments.training.initialization import init_from
from onescan.experiments.training.logging import (
    Display,
    Progress,
    Records,
    Show,
    Split,
    check_installed,
    display,
    duration,
    memory_mib,
)
from onescan.experiments.training.optim import (
    EMA,
    Plan,
    autocast,
    build_optimizer,
    build_scaler,
    compute_settings,
    gathered,
    lower_scale,
    underflowed,
)
from onescan.experiments.training.precision import choose_precision, precision_note
from onescan.experiments.training.state import TrainingState, last_state, restore_state, save_state
from onescan.experiments.training.transfer import AttentionTransfer, Average
from onescan.messages import printable

EMA_PREFIX = "ema_"  # prefix of the metrics of the EMA, if the raw weights are reported
ESTIMATE_AFTER = 6  # steps; the first one is slow and does not count

EnteredT = TypeVar("EnteredT")


def train(
    run: RunConfig, folder: str | Path, *, overwrite: bool = False, progress: bool | Show = False
) -> RunResult:
    """Train a run in `folder`, or resume it from its last checkpoint.

    If the folder holds the same run finished, its result is returned. Ctrl-C saves a checkpoint
    before the run stops. On a CPU, an interrupted and resumed run gives bit-identical numbers to an
    uninterrupted one. Processes started by torchrun, or joined by the caller with
    torch.distributed, share the work.

    Args:
        run: Config of the run.
        folder: Folder of the run; with several machines, on a disk that they share.
        overwrite: Remove the run in the folder, finished or not, and start from scratch.
        progress: True shows a summary of the run, a time estimate and a progress bar on stderr. A
            function is called after every step. Only rank 0 shows anything.

    Raises:
        ValueError: If the folder holds another run or other files, or a config is invalid.
        FloatingPointError: If the loss, its gradient or the weights are no longer finite.
        OSError: If the folder cannot be written to. Files saved earlier are intact.
        ImportError: If the extra for training is not installed.
    """
    require_train("onescan.train")
    folder, settings, machine = Path(folder), run.training, run.machine
    with ExitStack() as stack:
        ranks = stack.enter_context(joined(machine.device, timeout=machine.timeout))
        is_replaced = ranks.first(lambda: check_run_dir(folder, run, overwrite=overwrite))
        finished = None if is_replaced else ranks.first(lambda: _finished(folder, settings))
        if finished:
            return finished
        device = choose_device(machine.device, ranks)
        check_installed(machine.trackers)
        stack.enter_context(compute_settings(machine.backend, machine.matmul_precision))
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        ranks = stack.enter_context(sharing_sequences(ranks, machine))
        task = run.build_task()
        per_epoch = task.steps_per_epoch(settings.micro_batch_size)
        plan = Plan.of(settings, per_epoch, run.transfer)
        transfer = AttentionTransfer.of(run)
        share = share_of_batch(settings, machine, ranks)
        build_on_meta(run.model)  # raises if it does not fit into memory
        torch.manual_seed(derive_seed(settings.seed, "model"))
        model = build_unchecked(run.model)
        initialization = ""
        is_new = is_replaced or not ranks.first(lambda: last_state(folder))
        precision: Precision = ranks.first(
            lambda: (
                choose_precision(settings.precision, device)
                if is_new
                else read_manifest(folder).used_precision
            )
        )
        if run.init_from and is_new:
            initialization = init_from(run.init_from, model, task.class_names)
        model = model.to(device)
        task.prepare_training(device)
        if ranks.sequence > 1:
            patch_size = getattr(getattr(model, "patchify", None), "patch_size", (1,))
            task.shard(Share(ranks.sequence_rank, ranks.sequence, patch=patch_size[0]))
        if is_replaced:
            dry_run(model, task, settings, precision, device, transfer)
        trained = prepare(model, machine, ranks, device)
        state = TrainingState(
            model=model,
            optimizer=build_optimizer(model, settings),
            ema=EMA(model, settings.ema_decay) if settings.ema_decay else None,
            reports_ema=settings.reported_weights == "ema",
            scaler=build_scaler(precision, device),
        )
        _enter_on_first_rank(stack, ranks, lambda: locked(folder))
        _check_shared(folder, ranks)
        ranks.first(lambda: prepare_run_dir(folder, run, overwrite=overwrite))
        _restore(folder, state, ranks)
        environment: Any = {"step": state.step, "processes": ranks.size, "precision": precision}
        changes = ranks.first(lambda: write_manifest(folder, run, task, device, **environment))
        records = _enter_on_first_rank(
            stack, ranks, lambda: closing(Records(folder, run, upto=state.step))
        )
        loop = Loop(
            folder=folder,
            settings=settings,
            precision=precision,
            machine=machine,
            task=task,
            plan=plan,
            transfer=transfer,
            initialization=initialization,
            state=state,
            trained=trained,
            device=device,
            ranks=ranks,
            share=share,
            records=records,
            metrics=records.metrics if records else {},
            changes=changes,
        )
        rank_progress = progress if ranks.is_first else False
        loop.display = stack.enter_context(display(rank_progress, loop.progress()))
        evaluation = loop.run()
        ranks.first(lambda: write_result(folder, evaluation, state.step))
    return RunResult(folder=folder, evaluation=evaluation, steps=state.step)


@dataclass(kw_only=True)
class Loop:
    """The steps, evaluations and checkpoints of a run."""

    folder: Path
    settings: TrainingConfig
    precision: Precision
    """Precision of matrix products, which settings may leave open."""
    machine: MachineConfig
    task: Task
    plan: Plan
    transfer: AttentionTransfer | None
    """The loss of the first phase, if there is one."""
    initialization: str
    """Description of the weights copied from another model; empty if there are none."""
    state: TrainingState
    trained: nn.Module
    """The model as called in training, wrapped by DDP or FSDP2 if there are several processes."""
    device: torch.device
    ranks: Ranks
    share: slice
    """Examples of every micro-batch that this process reads."""
    records: Records | None
    """In rank 0 only."""
    metrics: dict[str, float]
    """Metrics of the last evaluation."""
    changes: tuple[str, ...] = ()
    """How the environment of a resumed run differs from that of its last start."""
    display: Display = field(default_factory=Display)
    shown_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last batch and the last evaluation, to show."""
    interrupts: Interrupts = field(default_factory=Interrupts)
    steps_since_start: int = 0
    """Steps since this start."""
    timed_micro_batches: int = 0
    """Micro-batches since this start, without those of the first step."""
    seconds: float = 0.0
    """Time of these steps."""
    waiting_seconds: float = 0.0
    """Part of it spent waiting for data."""
    first_step_seconds: float = 0.0
    """Time of the first of these steps."""

    def run(self) -> Evaluation:
        """Train to the end of the plan, and return the last evaluation."""
        evaluation = None
        with closing(self.read_batches()) as batches, self.interrupts:
            while True:
                step = self.state.step
                is_new = step > self.state.evaluated_step
                if self.plan.evaluates(step) and (is_new or self.is_over):
                    evaluation = self.evaluate()
                    self.stop_if_requested()
                if self.is_over or self.plan.saves(step):
                    self.save()
                if self.is_over:
                    assert evaluation is not None
                    if self.display.has_bar:  # the bar stays, with the last evaluation
                        self.display.show(self.progress())
                    return evaluation
                self.update(batches)
                self.display.show(self.progress())
                self.end_transfer()
                self.stop_if_requested()

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or patience has run out."""
        patience = self.settings.patience
        return self.state.step >= self.plan.steps or (
            patience is not None and self.state.evaluations_without_improvement >= patience
        )

    def end_transfer(self) -> None:
        """After the last step of attention transfer, free the teacher's memory."""
        step = self.state.step
        if self.transfer and self.plan.is_transfer(step - 1) and not self.plan.is_transfer(step):
            self.transfer.release()
            last = self.shown_metrics["transfer_loss"]
            self.display.write(
                f"attention transfer ended after step {step:,} with a loss of {last:.3g}; all "
                "weights are trained on the task from now on"
            )

    def stop_if_requested(self) -> None:
        """Save a checkpoint and stop, if any process was interrupted."""
        if self.ranks.any(self.interrupts.requested):
            self.save()
            raise KeyboardInterrupt

    def read_batches(self) -> Loader:
        """Start to read this process's examples of the remaining micro-batches."""
        plan = self.task.batches(
            step=self.plan.read(self.state.step),
            batch_size=self.settings.micro_batch_size,
            seed=self.settings.seed,
            data_state=self.state.data_state,
        )
        rank_plan = (BatchPlan(examples[self.share], data_state) for examples, data_state in plan)
        workers = choose_workers(self.machine.workers, self.task.train)
        return Loader(self.task.train, rank_plan, workers=workers, pin=self.device.type == "cuda")

    def update(self, batches: Loader) -> None:
        """Run one optimizer step: read, augment, forward, backward, clip, update the weights."""
        start, step, optimizer = perf_counter(), self.state.step, self.state.optimizer
        first, end = self.plan.read(step), self.plan.read(step + 1)
        is_transfer = self.plan.is_transfer(step)
        parts: list[Batch] = []
        unreadable, waiting = 0, 0.0
        for i in range(end - first):
            batch = self.task.to_device(next(batches), self.device)
            if self.steps_since_start == i == 0:
                self.display.write(self.summary(batch))
            parts += self.split(self.randomize(batch, i))
            unreadable += batches.unreadable
            waiting += batches.waiting_s
        weights = self.weights(parts)
        metrics, norm = self.backward(parts, weights) if weights else ({"loss": 0.0}, 0.0)
        means = self.ranks.mean(metrics | {"unreadable": unreadable})
        unreadable = round(means.pop("unreadable") * self.ranks.data_size)
        self.check_finite(loss=means["loss"])
        rate = self.plan.learning_rate(
            step, self.settings, self.transfer.config if self.transfer else None
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        if weights:
            self.step_optimizer(norm)
            optimizer.zero_grad()
        self.state.step += 1
        self.state.data_state = batches.data_state
        if self.state.ema:
            self.state.ema.update(self.state.model, self.state.step)
        seconds = perf_counter() - start
        measured = {"learning_rate": rate, "gradient_norm": norm, "seconds": seconds}
        measured |= {"waiting_seconds": waiting, "memory_mib": memory_mib(self.device)}
        counts = {"unreadable": unreadable} if unreadable else {}
        counts |= {} if weights else {"labels": 0}
        if self.plan.ends is not None:
            counts["batch_size"] = (end - first) * self.settings.micro_batch_size
        self.record("transfer" if is_transfer else "train", means | measured | counts)
        self.shown_metrics |= {"transfer_loss": means["loss"]} if is_transfer else means
        self.count_time(seconds, waiting, end - first)

    def randomize(self, batch: Batch, index: int) -> Batch:
        """Augment and corrupt a micro-batch of this step, and seed dropout and dropped paths."""
        ranks, micro_batch = self.ranks, [index] * (index > 0)
        shared_seed, rank_seed = (
            derive_seed(self.settings.seed, "step", self.state.step, rank, *micro_batch)
            for rank in (0, ranks.data_rank)
        )
        rows, shard = Share(ranks.data_rank, ranks.data_size), ranks.sequence_rank
        torch.manual_seed(shared_seed)
        batch = self.task.corrupt(self.task.augment(batch, rank_seed), shared_seed, rows)
        if not ranks.is_first:  # the first rank draws its dropout after its noise
            torch.manual_seed(derive_seed(rank_seed, "dropout", shard) if shard else rank_seed)
        return batch

    def split(self, batch: Batch) -> list[Batch]:
        """Split a micro-batch into the parts that are processed one after the other."""
        count = self.machine.gradient_accumulation_steps
        return [*zip(*(tensor.chunk(count) for tensor in batch), strict=True)]

    def weights(self, parts: list[Batch]) -> list[float] | None:
        """Return the weight of each part, so that the step's loss is the mean over its labels.

        Losses and gradients are summed over parts and averaged over processes.

        Returns:
            None if the step has no labels in any process.
        """
        if self.plan.is_transfer(self.state.step):  # which has no labels
            return [1.0] * len(parts)
        counts = [self.task.count_labels(part) for part in parts]
        mean = self.ranks.mean({"labels": float(sum(counts))})["labels"]
        return [count / mean for count in counts] if mean else None

    def backward(self, parts: list[Batch], weights: list[float]) -> tuple[dict[str, float], float]:
        """Compute the gradient of the parts of a step, and clip it.

        Returns:
            This process's sums of the weighted loss and metrics, and the norm of the gradient
            before clipping.
        """
        is_transfer = self.plan.is_transfer(self.state.step)
        average = self.averaging(parts) if is_transfer else None
        sums: dict[str, Tensor] = {}
        for i, (part, weight) in enumerate(zip(parts, weights, strict=True), start=1):
            with gradient_sync(self.trained, enabled=i == len(parts)):
                loss, metrics = self.loss(part, average)
                scaled = self.state.scaler.scale(loss) if self.state.scaler else loss
                (scaled * weight).backward()
            for name, value in ({"loss": loss} | metrics).items():
                sums[name] = sums.get(name, 0) + value.detach().float() * weight
        if is_transfer:
            self.ranks.average_gradients(self.state.model)
        *values, norm = torch.stack([*sums.values(), self.clip()]).tolist()  # waits for the GPU
        return dict(zip(sums, values, strict=True)), norm

    def averaging(self, parts: list[Batch]) -> Average:
        """Return the function that `AttentionTransfer.loss` applies to the norms of each part."""
        assert self.transfer is not None
        if len(parts) == 1:
            return self.ranks.average
        with torch.no_grad(), autocast(self.precision, self.device):
            norms = [self.transfer.norms(self.state.model, self.task, part) for part in parts]
        total = self.ranks.average(torch.stack(norms).sum(dim=0))
        return lambda _: total

    def loss(self, part: Batch, average: Average | None) -> tuple[Tensor, Metrics]:
        """Return the phase's loss; after the first step, an error of an op means divergence.

        Args:
            part: Part of the batch.
            average: Averages the norms of attention transfer; None trains on the task.
        """
        try:
            with autocast(self.precision, self.device):
                if self.transfer and average:
                    if self.steps_since_start == 0:
                        self.check_task(part)
                    return self.transfer.loss(self.state.model, self.task, part, average), {}
                return self.task.loss(self.trained, part)
        except ValueError as error:
            if self.steps_since_start == 0:
                raise
            raise self.failure(str(error)) from error

    @torch.no_grad()
    def check_task(self, part: Batch) -> None:
        """Before attention transfer, raise ValueError if the model does not fit the task."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            self.task.loss(self.state.model, part)

    def clip(self) -> Tensor:
        """Clip the gradient, and return its norm before clipping."""
        if self.state.scaler:
            self.state.scaler.unscale_(self.state.optimizer)
        parameters = self.state.model.parameters()
        return gathered(clip_grad_norm_(parameters, self.settings.max_grad_norm or math.inf))

    def step_optimizer(self, norm: float) -> None:
        """Update the weights; in float16, skip the step if the gradient overflowed.

        Raises:
            FloatingPointError: If the gradient is not finite, in float16 at any scale of the loss.
        """
        scaler, optimizer = self.state.scaler, self.state.optimizer
        if scaler is None:
            self.check_finite(gradient_norm=norm)
            optimizer.step()
            return
        if math.isfinite(norm):
            scaler.step(optimizer)
            scaler.update()
            return
        lower_scale(scaler)
        if underflowed(scaler):
            raise self.failure("the gradient overflows float16 at any scale of the loss")

    def evaluate(self) -> Evaluation:
        """Evaluate the model, record the metrics, and save the weights if they are the best."""
        state = self.state
        self.check_weights()
        self.share_buffers()
        with state.eval_weights():
            evaluation = self.evaluate_model()
            picture = make_picture(state.model, self.task, precision=self.precision)
        score = self.task.score(evaluation.metrics)
        if state.additional_ema:
            with state.additional_ema.swapped_into(state.model):
                ema_metrics = self.evaluate_model().metrics
            prefixed = {f"{EMA_PREFIX}{name}": value for name, value in ema_metrics.items()}
            metrics = evaluation.metrics | prefixed | evaluation.metrics  # a class may be "ema"
            evaluation = replace(evaluation, metrics=metrics)
        self.metrics = evaluation.metrics
        self.shown_metrics |= {f"test_{name}": value for name, value in self.metrics.items()}
        unreadable = {"unreadable": evaluation.left_out} if evaluation.left_out else {}
        self.record("test", self.metrics | unreadable)
        if self.records and picture is not None:
            self.records.add_picture(picture, step=state.step)
        is_new = state.step > state.evaluated_step
        if is_new and state.add_score(score):
            self.save_weights(BEST)
        if self.plan.read(state.step) <= self.plan.transfer:
            state.evaluations_without_improvement = 0
        return evaluation

    def evaluate_model(self) -> Evaluation:
        """Evaluate the model with its current weights."""
        return evaluate(
            self.state.model,
            self.task,
            precision=self.precision,
            workers=choose_workers(self.machine.workers, self.task.test),
            ranks=self.ranks,
            progress=self.display.has_bar,
        )

    def save(self) -> None:
        """Save the state to resume from, and the weights."""
        self.check_weights()
        self.share_buffers()
        if self.records:
            self.records.sync()
        save_state(self.folder, self.state, self.ranks)
        self.save_weights(WEIGHTS)
        if self.state.additional_ema:
            with self.state.additional_ema.swapped_into(self.state.model):
                self.save_weights(AVERAGE, EMA_PREFIX)

    def save_weights(self, name: str, prefix: str = "") -> None:
        """Write the weights to report to a file, with their metrics if they were evaluated.

        Args:
            name: Name of the file.
            prefix: Prefix of the names of their metrics, which is removed.
        """
        with self.state.eval_weights():
            weights = whole_weights(self.state.model, keep=self.ranks.is_first)
        is_current = self.state.evaluated_step == self.state.step
        metrics = {
            metric.removeprefix(prefix): value
            for metric, value in self.metrics.items()
            if is_current and self.is_ema_metric(metric) == bool(prefix)
        }
        notes = {"step": self.state.step, "metrics": metrics}
        self.ranks.first(lambda: save_weights(self.folder / name, weights, notes))

    def is_ema_metric(self, name: str) -> bool:
        """Return whether a metric is the EMA's, rather than that of a class called ema."""
        has_prefix = self.state.additional_ema is not None and name.startswith(EMA_PREFIX)
        return has_prefix and f"{EMA_PREFIX}{name}" not in self.metrics

    def share_buffers(self) -> None:
        """Copy rank 0's buffers, such as running statistics, to all processes."""
        buffers = dict(self.state.model.named_buffers())
        averages = self.state.ema.tensors if self.state.ema else {}
        self.ranks.broadcast(
            [*buffers.values(), *(averages[name] for name in buffers if name in averages)]
        )

    def record(self, split: Split, metrics: dict[str, float]) -> None:
        """Write one line of metrics.jsonl, and log it to the trackers."""
        if self.records:
            epoch = self.plan.read(self.state.step) / self.plan.per_epoch
            self.records.add(split, step=self.state.step, epoch=epoch, metrics=metrics)

    def progress(self) -> Progress:
        """Return the state of the run, to show."""
        return Progress(
            step=self.state.step,
            steps=self.plan.steps,
            batch_size=self.settings.batch_size,
            unit=self.task.unit,
            metrics=dict(self.shown_metrics),
            waiting=self.waiting_seconds / (self.seconds or 1),
            examples=self.plan.read(self.state.step) * self.settings.micro_batch_size,
            total_examples=self.plan.micro_batches * self.settings.micro_batch_size,
        )

    def summary(self, batch: Batch) -> str:
        """Describe the model, data, device, batch size and length of the run."""
        settings, task, plan, ranks = self.settings, self.task, self.plan, self.ranks
        name = type(self.state.model).__name__.removeprefix("FSDP")  # added by fully_shard
        parameters = sum(parameter.numel() for parameter in self.state.model.parameters())
        parts, on_gpu = self.machine.gradient_accumulation_steps, self.device.type == "cuda"
        device = torch.cuda.get_device_name(self.device) if on_gpu else self.device.type
        split = f", {ranks.size} processes" * (ranks.size > 1)
        split += f", {ranks.sequence} per sequence" * (ranks.sequence > 1)
        split += f", {parts} accumulation steps" * (parts > 1)
        resumed = f", resuming after step {self.state.step:,}" if self.state.step else ""
        epochs = round(plan.micro_batches / plan.per_epoch, 2)
        size, first = settings.batch_size, settings.initial_batch_size
        growth = "" if first is None else f"{first} to "
        per_epoch = "" if first else f" of {plan.per_epoch:,}"
        precision_warning = precision_note(settings.precision, self.precision, self.device)
        return (
            f"folder: {printable(self.folder)}\n"
            f"model: {name}, {parameters:,} parameters\n"
            f"data: {len(task.train):,} training and {len(task.test):,} test {task.unit}, "
            f"input shape {[*batch[0].shape[1:]]}\n"
            + "".join(f"note: {printable(note)}\n" for note in task.notes)
            + f"device: {device}, {self.precision}\n"
            + (f"note: {precision_warning}\n" if precision_warning else "")
            + f"batch size: {growth}{size}{split}\n"
            f"steps: {plan.steps:,} ({epochs:,} epochs{per_epoch}){resumed}"
            f"{self.phases()}" + "".join(f"\nchanged: {change}" for change in self.changes)
        )

    def phases(self) -> str:
        """Describe the initialization from another model and attention transfer, if any."""
        initialization = f"\ninitialized: {self.initialization}" if self.initialization else ""
        if not (self.transfer and self.plan.is_transfer(self.state.step)):
            return initialization
        return (
            f"{initialization}\nattention transfer: {self.plan.transfer:,} of "
            f"{self.plan.micro_batches:,} batches, from {self.transfer.name}; only mixers are "
            "trained"
        )

    def count_time(self, seconds: float, waiting: float, micro_batches: int) -> None:
        """Add up the time of the steps, and show an estimate after the first few."""
        self.steps_since_start += 1
        self.seconds, self.waiting_seconds = self.seconds + seconds, self.waiting_seconds + waiting
        if self.steps_since_start == 1:
            self.first_step_seconds = seconds
            return
        self.timed_micro_batches += micro_batches
        if self.steps_since_start == ESTIMATE_AFTER:
            per_batch = (self.seconds - self.first_step_seconds) / self.timed_micro_batches
            step, plan = self.state.step, self.plan
            remaining = plan.micro_batches - plan.read(step)
            unit = "steps" if plan.ends is None else "micro-batches"
            self.display.write(
                f"estimated time: {duration(per_batch * remaining)} for {remaining:,} more {unit} "
                f"of {per_batch:.2g} s, without evaluation"
            )

    def check_weights(self) -> None:
        """Raise FloatingPointError if the weights are not finite."""
        norm = gathered(get_total_norm(self.state.model.parameters())).item()
        self.check_finite(weight_norm=norm)

    def check_finite(self, **numbers: float) -> None:
        """Raise FloatingPointError for a number that is not finite."""
        for name, number in numbers.items():
            if not math.isfinite(number):
                raise self.failure(f"{name} is {number}")

    def failure(self, reason: str) -> FloatingPointError:
        """Return the error for a run that diverges, with its step, checkpoint and remedies."""
        last = last_state(self.folder)
        saved = f"the last good checkpoint is {last}" if last else "no checkpoint was saved"
        return FloatingPointError(
            f"training diverged at step {self.state.step}: {reason}; {saved}; try a smaller "
            f"training.learning_rate (now {self.settings.learning_rate}) or "
            f"training.max_grad_norm (now {self.settings.max_grad_norm})"
        )


def dry_run(
    model: nn.Module,
    task: Task,
    settings: TrainingConfig,
    precision: Precision,
    device: torch.device,
    transfer: AttentionTransfer | None = None,
) -> None:
    """Compute the loss of each phase once, to check that model and data match."""
    plan = task.batches(step=0, batch_size=settings.micro_batch_size, seed=settings.seed)
    examples = next(plan).examples[:2]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        batch = task.to_device(task.train.read(examples).batch, device)
        with eval_mode(model), autocast(precision, device):
            batch = task.corrupt(task.augment(batch, 0), 0)
            task.loss(model, batch)
            if transfer:
                transfer.loss(model, task, batch)


def _check_shared(folder: Path, ranks: Ranks) -> None:
    """Check that all processes see a file that rank 0 writes."""
    if ranks.size == 1:
        return
    token, token_file = ranks.first(lambda: _write_token(folder)), partial_of(folder / LOCK)
    sees_token = token_file.is_file() and token_file.read_text(encoding="utf-8") == token
    all_see_token = ranks.gather(sees_token)
    ranks.first(lambda: remove(token_file))
    if not all(all_see_token):
        raise ValueError(
            f"{folder} is not on a disk that all processes share, which checkpoints require"
        )


def _write_token(folder: Path) -> str:
    """Write a unique token to the temporary path of the lock file, and return it."""
    token = uuid4().hex
    with writing(folder):
        begin(folder / LOCK).write_bytes(token.encode())
    return token


def _restore(folder: Path, state: TrainingState, ranks: Ranks) -> None:
    """Resume from the last checkpoint, if there is one."""
    last = ranks.first(lambda: last_state(folder))
    if last:
        restore_state(last, state, ranks)
    if ranks.first(lambda: _step_of_best(folder / BEST)) > state.step:
        state.best = -math.inf  # that evaluation will be repeated


def _finished(folder: Path, settings: TrainingConfig) -> RunResult | None:
    """Return a finished run's result; None if its EMA can be recreated from the last state."""
    if (
        settings.reported_weights == "raw"
        and not (folder / AVERAGE).exists()
        and last_state(folder)
    ):
        return None
    return read_result(folder)


def _step_of_best(weights: Path) -> int:
    if not weights.exists():
        return 0
    step = read_notes(weights).get("step")
    if not isinstance(step, int):
        raise damaged(weights, step, REMEDY)
    return step


def _enter_on_first_rank(
    stack: ExitStack, ranks: Ranks, make: Callable[[], AbstractContextManager[EnteredT]]
) -> EnteredT | None:
    """Enter a context in rank 0 only, and return its value there."""
    entered: list[EnteredT] = []
    ranks.first(lambda: entered.append(stack.enter_context(make())))
    return entered[0] if entered else None
