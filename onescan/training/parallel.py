"""A model made ready to train: less memory, compiled, copied or split over processes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onescan.layers.block import Block
from onescan.training.ranks import Ranks
from onescan.training.run import MachineConfig


def prepare(
    model: nn.Module, machine: MachineConfig, ranks: Ranks, device: torch.device
) -> nn.Module:
    """Return what training calls; the names of the model's own weights stay as they are.

    Raises:
        ValueError: If `machine.gradient_checkpointing` is set and the model has no blocks.
    """
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if machine.gradient_checkpointing and not blocks:
        raise ValueError(
            "machine.gradient_checkpointing is True, but the model has no blocks to compute again"
        )
    for block in blocks:
        block.recompute = machine.gradient_checkpointing
    parts: list[nn.Module] = [*blocks] or [model]
    for part in parts if machine.compile else ():
        part.compile()
    if ranks.size == 1:
        return model
    if not machine.fsdp:
        own = [device] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=own, gradient_as_bucket_view=True)
    return _sharded(model, blocks, device)


@contextmanager
def exchanging(model: nn.Module, *, gradients: bool) -> Iterator[None]:
    """Let a backward pass share its gradients with the other processes, or keep them for later."""
    if isinstance(model, DistributedDataParallel) and not gradients:
        with model.no_sync():
            yield
        return
    switch = getattr(model, "set_requires_gradient_sync", None)  # fully_shard's
    if switch:
        switch(gradients)
    yield


def _sharded(model: nn.Module, blocks: list[Block], device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh  # on use: half a second
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in [*blocks, model]:
        # the root too is split again after a forward alone: names and lengths are of the parts
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    return model
