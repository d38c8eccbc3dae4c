"""Image models with the interface of transformers."""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.utils.generic import can_return_tuple

from onescan.integrations.transformers.configuration import OnescanImageConfig
from onescan.integrations.transformers.modeling import OnescanModel
from onescan.models.image_classifier import ImageClassifier, ImageClassifierConfig


class OnescanImageModel(OnescanModel):
    """An `ImageClassifier` without its head: one vector per token, learned tokens first."""

    config_class = OnescanImageConfig
    native_config = ImageClassifierConfig
    main_input_name = "pixel_values"
    input_modalities = "image"
    network: ImageClassifier

    def get_input_embeddings(self) -> nn.Module:
        """Return the layer that turns patches into tokens."""
        return self.network.patchify

    def to_onescan(self) -> ImageClassifier:
        """Return the native model contained in this one."""
        return self.network

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPooling:
        """Compute the normalized tokens after the last block, and the input of the class head.

        Args:
            pixel_values: Images [B, channels, height, width], of any size that patches divide.
            output_hidden_states: Whether to return the output of each block.
            output_attentions: Must be False.
        """
        with self.record_hidden_states(output_hidden_states, output_attentions) as hidden:
            x = self.network.forward_features(pixel_values)
        return BaseModelOutputWithPooling(
            last_hidden_state=x,
            pooler_output=self.network.pooled(x),
            hidden_states=(*hidden[:-1], x) if hidden else None,
        )


class OnescanForImageClassification(OnescanModel):
    """An `ImageClassifier`: one logit per class."""

    config_class = OnescanImageConfig
    native_config = ImageClassifierConfig
    main_input_name = "pixel_values"
    input_modalities = "image"
    model: OnescanImageModel

    def wrap(self, native: ImageClassifier) -> None:
        self.wrap_base(OnescanImageModel, native)

    @property
    def network(self) -> ImageClassifier:
        """The native model, head included."""
        return self.model.network

    def get_input_embeddings(self) -> nn.Module:
        """Return the layer that turns patches into tokens."""
        return self.network.patchify

    def to_onescan(self) -> ImageClassifier:
        """Return the native model contained in this one."""
        return self.network

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **loss_options: Any,
    ) -> ImageClassifierOutput:
        """Compute class logits; with a distillation token, the mean of both heads.

        Args:
            pixel_values: Images [B, channels, height, width], of any size that patches divide.
            labels: Classes [B], or labels in the form that the config's problem_type requires.
            output_hidden_states: Whether to return the output of each block.
            output_attentions: Must be False.
            loss_options: Options of transformers' loss functions.
        """
        read = self.model(
            pixel_values,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        logits = self.network.forward_head(read.last_hidden_state)
        if isinstance(logits, tuple):
            logits = (logits[0] + logits[1]) / 2
        loss = None
        if labels is not None:
            loss = self.loss_function(
                labels=labels, pooled_logits=logits, config=self.config, **loss_options
            )
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=read.hidden_states)
