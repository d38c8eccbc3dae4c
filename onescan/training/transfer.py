"""Attention transfer: train new mixers to reproduce those of a teacher, layer by layer.

L = mean over layers of sum_t |m'(x_t) - m(x_t)|^2 / sum_t |m(x_t)|^2

m and m' are the mixers of teacher and student in one layer, and x is the input of the teacher's
mixer, so layers learn independently of each other. The sums are over all real tokens of a batch. A
student that outputs zeros has a loss of 1.

Source: the first stage of LoLCATs, arXiv:2410.10254, which trains only feature maps and does not
normalize the loss. Hedgehog, arXiv:2402.04347, matches attention weights instead, which mixers with
an output norm or gate do not have.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onescan.data import GridFormat
from onescan.layers.block import Block, lower_bound_of_each
from onescan.layers.mixers import LowerBounds
from onescan.ops.collectives import sum_over_ranks
from onescan.ops.parallel import in_current_group, sequence_group
from onescan.shapes import LowerBound
from onescan.tasks import Batch, Task
from onescan.training.config import RunConfig, TransferConfig
from onescan.training.loading import PretrainedModel, load_pretrained_model

STANDARDIZATION = ("channels", "mean", "std")


class _FinishedError(Exception):
    """Ends the teacher's forward pass after its last block."""


class AttentionTransfer:
    """The loss of attention transfer from a teacher, which is loaded by the first call."""

    def __init__(self, config: TransferConfig, teacher: str) -> None:
        self.config, self.name = config, teacher
        self.teacher: nn.Module | None = None

    @classmethod
    def of(cls, run: RunConfig) -> "AttentionTransfer | None":
        """Return the loss of a run; None if it has no attention transfer."""
        if run.transfer is None:
            return None
        if not run.init_from:
            raise ValueError(f"init_from is {run.init_from!r}, expected a teacher for transfer")
        return cls(run.transfer, run.init_from)

    def loss(self, student: nn.Module, task: Task, batch: Batch) -> Float[Tensor, ""]:
        """Return the loss of a batch of the task. Only mixers receive a gradient.

        The teacher reads the batch in evaluation mode, up to its last block, and each mixer of the
        student runs right after the teacher's. Only activations inside the student's mixers are
        stored for the backward pass.

        Raises:
            ValueError: If the teacher cannot be read, has other blocks than the student, or reads
                images of another standardization; or if the student's mixers cannot be trained
                separately.
        """
        device = next(student.parameters()).device
        teacher = self.load(task, device)
        theirs, ours = _blocks(teacher), _blocks(student)
        self._check(theirs, ours)
        module = next((m for m in student.modules() if isinstance(m, LowerBounds)), None)
        bounds = lower_bound_of_each(nn.ModuleList(ours), module)
        errors = [torch.zeros((), device=device) for _ in ours]
        norms = [torch.zeros((), device=device) for _ in ours]

        def comparing(i: int) -> Callable[..., Any]:
            def compare(_: nn.Module, inputs: Any, options: dict[str, Any], output: Any) -> Any:
                target = output[0].float()
                with torch.enable_grad():
                    y = _mix(ours[i], bounds[i], *inputs, keep=options.get("keep"))
                    errors[i] = errors[i] + (y.float() - target).square().sum()
                norms[i] = norms[i] + target.square().sum()
                return output[0], None  # drop the teacher's state, such as a cache of keys

            return compare

        with ExitStack() as hooks, torch.no_grad():
            for i, block in enumerate(theirs):
                hook = block.mixer.register_forward_hook(comparing(i), with_kwargs=True)
                hooks.callback(hook.remove)
            hooks.callback(theirs[-1].register_forward_hook(_finish).remove)
            with suppress(_FinishedError):
                task.loss(teacher, batch)
        group, tiny = sequence_group(None), torch.finfo(torch.float32).tiny
        # Sum only the norms, because losses are averaged over ranks.
        (total,) = sum_over_ranks(torch.stack(norms))
        total = total if group is None else total / group.size
        return torch.stack(errors).div(total.clamp(min=tiny)).mean()

    def load(self, task: Task, device: torch.device) -> nn.Module:
        """Load the teacher, if it is not loaded yet.

        Raises:
            FileNotFoundError, ImportError: See `load_pretrained_model`.
            ValueError: If it cannot be read, or reads images of another standardization.
        """
        if self.teacher is None:
            with torch.random.fork_rng(devices=[]):  # keep the random state of this step
                loaded = load_pretrained_model(self.name)
            _check_format(loaded, task)
            self.teacher = loaded.model.requires_grad_(False).to(device)
        return self.teacher

    def release(self) -> None:
        """Free the teacher's memory."""
        self.teacher = None

    def _check(self, theirs: list[Block], ours: list[Block]) -> None:
        if not theirs or len(theirs) != len(ours):
            raise ValueError(
                f"init_from is {self.name!r}, whose model has {len(theirs)} blocks, expected "
                f"{len(ours)}, as in the model, and at least one"
            )
        if any(block.reads_embedding for block in ours):
            raise ValueError(
                "transfer is set, but model.mixer reads the embedding, which differs between "
                "teacher and student; expected another mixer or transfer None"
            )


def _blocks(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]


def _mix(
    block: Block, bound: LowerBound | None, x: Tensor, grid: Any, *, keep: Tensor | None
) -> Tensor:
    """Apply a block's mixer; recompute it in the backward pass where the block would be."""
    options: dict[str, Any] = {"keep": keep} | ({} if bound is None else {"lower_bound": bound})
    if block.recompute:
        run = in_current_group(block.mixer)
        y, _ = checkpoint(run, x, grid, use_reentrant=False, **options)
    else:
        y, _ = block.mixer(x, grid, **options)
    return y


def _finish(*_: Any) -> None:
    raise _FinishedError


def _check_format(teacher: PretrainedModel, task: Task) -> None:
    """Raise ValueError if images are standardized differently for teacher and student."""
    if not (isinstance(teacher.format, GridFormat) and isinstance(task.format, GridFormat)):
        return
    for name in STANDARDIZATION:
        theirs, ours = getattr(teacher.format, name), getattr(task.format, name)
        if theirs != ours:
            raise ValueError(
                f"data.{name} is {ours}, expected {theirs}, as in the training of init_from "
                f"{teacher.name!r}"
            )
