"""Holding out a part of labelled examples, of every class alike."""

import math

import torch
from jaxtyping import Int
from torch import Tensor

from onescan.shapes import Labels

Learnt = Int[Tensor, " learnt"]
Held = Int[Tensor, " held"]


def stratified_split(labels: Labels, *, fraction: float, seed: int) -> tuple[Learnt, Held]:
    """Split the indices of labels into a training and a test part of every class.

    Raises:
        ValueError: fraction is not between 0 and 1, or leaves too few images on a side for every
            class; or a class has a single image.
    """
    from sklearn.model_selection import train_test_split  # imported on use: half a second

    if not 0 < fraction < 1:
        raise ValueError(f"data.test_fraction is {fraction}, expected between 0 and 1")
    sizes = labels.bincount()
    count, classes = len(labels), int((sizes > 0).sum())
    held = math.ceil(fraction * count)
    if not classes <= held <= count - classes:
        raise ValueError(
            f"data.test_fraction is {fraction}, which holds out {held} of {count} "
            f"images, expected {classes} to {count - classes}: at least as many as classes"
        )
    if (sizes == 1).any():
        raise ValueError(
            f"class {sizes.tolist().index(1)} has one image, expected 2 to hold one out"
        )
    train, test = train_test_split(
        range(count), test_size=fraction, random_state=seed, stratify=labels.numpy()
    )
    return torch.tensor(train), torch.tensor(test)
