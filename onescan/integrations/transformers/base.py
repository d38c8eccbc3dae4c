"""What all models share in transformers: parts of onescan's, first weights, recomputation."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from onescan.layers.block import Block

SET = "_is_hf_initialized"  # set by transformers on initialized tensors


def mark_initialized(module: nn.Module) -> None:
    """Keep `initialize_weights` from changing weights, except those on the meta device."""
    for tensor in module.state_dict(keep_vars=True).values():
        setattr(tensor, SET, not tensor.is_meta)


class OnescanModel(PreTrainedModel):
    """Parts of a model of onescan, under names that users of transformers expect."""

    base_model_prefix = "network"
    supports_gradient_checkpointing = True
    # LRPE multiplies its angles by the place of a token, and any rounding of them too
    _keep_in_fp32_modules_strict = ["theta"]  # noqa: RUF012
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.dtype == torch.float64:
            self.dtype_plan: dict[
                str, Any
            ] = {}  # by which transformers 5.0 would round angles to float32
        self.adopt(self.build_native())
        mark_initialized(self)
        self.post_init()

    @abstractmethod
    def build_native(self) -> nn.Module:
        """Build the model of onescan that the config tells, with fresh weights."""

    @abstractmethod
    def adopt(self, native: Any) -> None:
        """Take a native model's parts, which both share then."""

    @contextmanager
    def recorded(
        self,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **_: Any,
    ) -> Iterator[list[Tensor]]:
        """Note what enters the first block and what leaves each, where it is wanted.

        Raises:
            ValueError: attention matrices are wanted.
        """
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_attentions:
            raise ValueError("output_attentions is True, but no attention matrix is ever computed")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden: list[Tensor] = []
        blocks, hooks = self._blocks(), []
        if output_hidden_states:
            hooks.append(blocks[0].register_forward_pre_hook(lambda _, x: hidden.append(x[0])))
        for block in blocks if output_hidden_states else ():
            hooks.append(block.register_forward_hook(lambda _, __, x: hidden.append(x[0])))
        try:
            yield hidden
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Set what a checkpoint lacks, as a fresh model has it."""
        tensors = self.state_dict(keep_vars=True)
        lacking = [name for name, tensor in tensors.items() if not getattr(tensor, SET, False)]
        fresh = type(self)(self.config).state_dict() if lacking else {}
        for name in lacking:
            tensors[name].copy_(fresh[name])

    def mark_tied_weights_as_initialized(self, loading_info: Any) -> None:
        """Mark tied weights as initialized, but keep all missing keys.

        For models outside its own package, transformers removes the missing keys of marked
        parameters. Both names of a tied weight refer to one parameter, so if both are missing, both
        would be removed, and the weight would never be allocated.
        """
        missing = set(loading_info.missing_keys)
        super().mark_tied_weights_as_initialized(loading_info)
        loading_info.missing_keys = missing

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        """Have blocks compute again for gradients, in their own way, which is not reentrant."""
        for i, block in enumerate(self._blocks()):
            block.recompute = enable and i % every_n_layers == 0
        self.gradient_checkpointing = enable  # what is_gradient_checkpointing looks at

    def _blocks(self) -> list[Block]:
        return [module for module in self.modules() if isinstance(module, Block)]
