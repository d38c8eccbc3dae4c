"""The loss of language models: cross-entropy over the vocabulary."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from onescan.checks import check_choice, check_shapes
from onescan.ops.backend import Backend, resolved_backend


def cross_entropy(
    logits: Float[Tensor, "N classes"],
    labels: Int[Tensor, " N"],
    *,
    reduction: Literal["mean", "sum"] = "mean",
    ignore_index: int = -100,
    backend: Backend = "auto",
) -> Float[Tensor, ""]:
    """Return log sum exp(logits) - logits[label], in float32 or wider, reduced over all labels.

    Equals torch's ``cross_entropy(logits.float(), labels)``. For a large vocabulary, logits take
    more memory than any other tensor, and torch writes four float32 tensors of their size.

    Args:
        logits: Scores of each class, ``[N, classes]``.
        labels: Class of each row, int64.
        reduction: "mean" over the labels that are not ignored, or "sum".
        ignore_index: Label of rows without a loss.
        backend: "torch" runs on any device. "triton" runs on a GPU, reads logits once in each pass
            and has first derivatives only. "auto" chooses; see `use_backend`.

    Raises:
        ValueError: If shapes do not match, the reduction or the backend is unknown, or "triton"
            cannot run on these inputs.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([3, -100])).exp().item()
    4.0
    """
    check_choice("reduction", reduction, ("mean", "sum"))
    check_shapes(logits=(logits, "N classes"), labels=(labels, "N"))
    if resolved_backend(backend, True, logits, widest=None) == "triton":
        from onescan.ops import cross_entropy_launch  # imports Triton

        total = cross_entropy_launch.losses(logits, labels, ignored=ignore_index).sum()
        return total if reduction == "sum" else total / (labels != ignore_index).sum()
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, reduction=reduction, ignore_index=ignore_index)
