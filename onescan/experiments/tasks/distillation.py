"""Distillation: learn from a teacher as well as from labels.

L = (1 - w) CE(z, y) + w CE(z', argmax z_t)                                  hard
L = (1 - w) CE(z, y) + w tau^2 KL(softmax(z_t / tau) || softmax(z' / tau))   soft

z are the student's logits, z' those of its distillation head (z if it has none), z_t the teacher's
logits of the same augmented images, and y the labels.

Source: DeiT, arXiv:2012.12877, Sec. 4, whose recipe LION follows, arXiv:2502.16249, App. C.13.
DeiT prints the student first in KL; its code and Hinton's arXiv:1503.02531 match the teacher's
distribution, as here. The mean is over images; DeiT's code also divides by the number of classes.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from onescan.checks import check_choice, check_positive
from onescan.experiments.data import ImageSplits
from onescan.experiments.tasks.base import Metrics
from onescan.experiments.tasks.teacher import Teacher, load_teacher
from onescan.inputs.images import unit_pixels
from onescan.ops.parallel import sequence_parallel
from onescan.shapes import Logits

Kind = Literal["hard", "soft"]


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Distillation from a teacher, by default as in DeiT."""

    kind: Kind = "hard"
    """hard learns the teacher's most likely class, soft its probabilities."""
    weight: float = 0.5
    """Weight of the distillation loss, above 0 and at most 1."""
    temperature: float = 3.0
    """Temperature that divides the logits of student and teacher; soft distillation only."""

    def build(self, teacher: str, data: ImageSplits) -> "Distillation":
        """Prepare the loss with the teacher of that name, which `load` or the first call loads.

        Raises:
            ValueError: If the kind is unknown, or a number out of range.
        """
        check_choice("task.distillation.kind", self.kind, get_args(Kind))
        check_positive(**{"task.distillation.temperature": self.temperature})
        if not 0 < self.weight <= 1:
            raise ValueError(
                f"task.distillation.weight is {self.weight}, expected above 0 and at most 1"
            )
        return Distillation(self, teacher, data)


class Distillation:
    """The distillation loss of one teacher."""

    def __init__(self, config: DistillationConfig, teacher: str, data: ImageSplits) -> None:
        self.config = config
        self.name = teacher
        self.format, self.class_names = data.format, data.class_names
        self.teacher: Teacher | None = None  # evaluation does not need it

    def loss(
        self, label_loss: Float[Tensor, ""], scores: Logits, images: Tensor
    ) -> tuple[Float[Tensor, ""], Metrics]:
        """Combine the losses of labels and teacher; both are also returned as metrics.

        Args:
            label_loss: Loss on the labels.
            scores: The student's logits that learn from the teacher.
            images: The student's augmented images, as bytes or as floats from 0 to 1.

        Raises:
            ValueError: If the teacher cannot be read, or does not fit the data.
        """
        with sequence_parallel(None):  # the teacher reads whole images
            teacher_scores = self.load(images.device).scores(unit_pixels(images))
        teacher_loss = self._teacher_loss(scores, teacher_scores)
        agreement = (scores.argmax(dim=1) == teacher_scores.argmax(dim=1)).float().mean()
        return torch.lerp(label_loss, teacher_loss, self.config.weight), {
            "label_loss": label_loss,
            "teacher_loss": teacher_loss,
            "teacher_agreement": agreement,
        }

    def load(self, device: torch.device) -> Teacher:
        """Load the teacher, if it is not loaded yet.

        Raises:
            FileNotFoundError: See `load_teacher`.
            ValueError: If the teacher cannot be read, or does not fit the data.
            ImportError: See `load_teacher`.
        """
        if self.teacher is None:
            teacher = load_teacher(self.name)
            teacher.check(self.format, self.class_names)
            teacher.model.to(device)
            self.teacher = teacher
        return self.teacher

    def _teacher_loss(self, scores: Logits, teacher_scores: Logits) -> Float[Tensor, ""]:
        if self.config.kind == "hard":
            return cross_entropy(scores, teacher_scores.argmax(dim=1))
        tau = self.config.temperature
        log_p, log_target = ((z / tau).log_softmax(dim=1) for z in (scores, teacher_scores))
        return tau**2 * kl_div(log_p, log_target, reduction="batchmean", log_target=True)
