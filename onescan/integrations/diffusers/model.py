"""A denoiser as one of diffusers' models: saved, loaded, trained and averaged there."""

from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils.import_utils import is_accelerate_available
from torch import Tensor

from onescan.configs import from_dict, to_dict
from onescan.layers.block import Block
from onescan.models.denoiser import Denoiser, DenoiserConfig
from onescan.shapes import Images, Labels


class DenoiserModel(ModelMixin, ConfigMixin):  # type: ignore[misc]  # as all of diffusers'
    """A `Denoiser`, called as diffusers' transformers are.

    `DenoiserModel.of(native)` shares its weights, and `to_onescan()` is the way back.
    """

    _supports_gradient_checkpointing = True
    # LRPE multiplies its angles by the place of a token, and any rounding of them too; without
    # accelerate diffusers can keep nothing, and loads nothing where something is to be kept
    _keep_in_fp32_modules = ["theta"] if is_accelerate_available() else None  # type: ignore[assignment]
    _no_split_modules = ["Block", "ConditionedBlock"]  # type: ignore[assignment]  # noqa: RUF012

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, denoiser: dict[str, Any]) -> None:
        """Build the network.

        Args:
            denoiser: a `DenoiserConfig` as plain data, which is all that config.json holds.

        Raises:
            ValueError: a field is unknown or of another type, or no network has it.
        """
        super().__init__()
        self.network = from_dict(DenoiserConfig, denoiser).build()
        self.gradient_checkpointing = False

    @classmethod
    def of(cls, native: Denoiser) -> "DenoiserModel":
        """The same model as diffusers has it; both share their weights."""
        with torch.device("meta"):
            model = cls(denoiser=to_dict(native.config))
        model.network = native
        return model.train(native.training)

    def to_onescan(self) -> Denoiser:
        """The model as onescan's own, which it holds."""
        return self.network

    def forward(
        self,
        hidden_states: Images,
        timestep: Tensor | float | int,
        class_labels: Labels | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """What the model makes of noisy images, as `Denoiser.forward` has it.

        Args:
            hidden_states: [B, channels, height, width], of any size that patches divide.
            timestep: one for each image, or one for all.
            class_labels: one for each image, num_classes for no class; None for none in all.
            return_dict: whether an object is returned, or a tuple.
        """
        times = torch.as_tensor(timestep, device=hidden_states.device)
        if times.numel() == 1:
            times = times.reshape(1).expand(len(hidden_states))
        sample = self.network(hidden_states, times, class_labels)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None
    ) -> None:
        """Have blocks compute again for gradients, in their own way, which is not reentrant."""
        for module in self.modules():
            if isinstance(module, Block):
                module.recompute = enable
        self.gradient_checkpointing = enable  # what is_gradient_checkpointing looks at
