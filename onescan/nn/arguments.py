"""Arguments that all layers of `onescan.nn` share: the grid of the tokens and the padding mask."""

from typing import Any

import torch
from torch import Tensor

from onescan.checks import (
    as_grid_shape,
    can_look_at_values,
    check_devices,
    check_floating,
    check_shapes,
    check_whole,
)
from onescan.shapes import Grid


def check_token_vectors(name: str, x: Any, dim: int) -> None:
    """Raise ValueError if x is not a floating point tensor [B, T, dim]."""
    check_shapes(**{name: (x, f"B T {dim}")})
    check_floating(**{name: x})


def grid_of(tokens: int, shape: Any, axes: int, prefix: int, *, name: str = "shape") -> Grid:
    """Return the grid of a call.

    Raises:
        ValueError: If the grid is empty, if shape is None for a layer with several axes, or if its
            number of axes does not match the layer, or its number of tokens the input.
    """
    check_whole(0, prefix=prefix)
    if tokens <= prefix:
        raise ValueError(
            f"the input has {tokens} tokens with prefix={prefix}, expected at least {prefix + 1}"
        )
    if shape is None:
        if axes > 1:
            raise ValueError(f"{name} is None, expected a size for each of {axes} axes")
        shape = (tokens - prefix,)
    shape = as_grid_shape(shape, name=name)
    grid = Grid(shape, prefix)
    if len(shape) != axes:
        expected = "1 axis" if axes == 1 else f"{axes} axes"
        raise ValueError(f"{name} is {shape}, expected {expected}, as in the layer")
    if grid.tokens != tokens:
        raise ValueError(
            f"the input has {tokens} tokens, but {name} {shape} with prefix={prefix} has "
            f"{grid.tokens}"
        )
    return grid


def check_continuable(can_continue: bool, state: Any, return_state: bool, expected: str) -> None:
    """Raise ValueError if a state is passed to or requested from a layer that has none."""
    if not can_continue and (state is not None or return_state):
        what = "return_state is True" if state is None else "state was given"
        raise ValueError(f"{what}, expected {expected}")


def keep_of(key_padding_mask: Any, x: Tensor) -> Tensor | None:
    """Return the opposite of a padding mask, [B, T], for tokens x.

    Raises:
        ValueError: If the shape or device of the mask does not match x, or it is not bool.
    """
    if key_padding_mask is None:
        return None
    check_devices(x=x, key_padding_mask=key_padding_mask)
    sizes = {"x": (x, "B T D"), "key_padding_mask": (key_padding_mask, "B T")}
    check_shapes(**sizes)
    if key_padding_mask.dtype != torch.bool:
        raise ValueError(
            f"key_padding_mask has dtype {key_padding_mask.dtype}, expected torch.bool, True for "
            "padding"
        )
    return ~key_padding_mask


def bool_mask(name: str, mask: Tensor) -> Tensor:
    """Return a mask as bool, True for what is masked, from a bool or an additive mask.

    Raises:
        ValueError: If the mask is neither bool nor floating point, or, on a CPU, has values other
            than 0 and minus infinity (or the lowest finite number).
    """
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise ValueError(f"{name} has dtype {mask.dtype}, expected torch.bool or floating point")
    masked = mask <= torch.finfo(mask.dtype).min
    if can_look_at_values(mask) and bool((mask != 0)[~masked].any()):
        raise ValueError(f"{name} has values other than 0 and -inf, expected a mask without bias")
    return masked
