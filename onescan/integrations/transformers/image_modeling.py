"""Image models with the interface of transformers."""

from typing import Any, cast

from torch import Tensor, nn
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutputWithPooling,
    ImageClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from onescan.integrations.transformers.configuration import OnescanImageConfig
from onescan.integrations.transformers.modeling import OnescanModel
from onescan.models.image_classifier import ImageClassifier, ImageClassifierConfig

try:
    from transformers.backbone_utils import BackboneMixin
except ImportError:  # older releases
    from transformers.utils.backbone_utils import BackboneMixin  # type: ignore[attr-defined]


class _ReadsImages(OnescanModel):
    """Base class of models that contain an `ImageClassifier`."""

    config_class = OnescanImageConfig
    native_config = ImageClassifierConfig
    main_input_name = "pixel_values"
    input_modalities = "image"

    def get_input_embeddings(self) -> nn.Module:
        """Return the layer that turns patches into tokens."""
        return self.to_onescan().patchify

    def to_onescan(self) -> ImageClassifier:
        """Return the native model contained in this one."""
        return cast(ImageClassifier, self.network)


class OnescanImageModel(_ReadsImages):
    """An `ImageClassifier` without its head: one vector per token, learned tokens first."""

    network: ImageClassifier

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


class OnescanForImageClassification(_ReadsImages):
    """An `ImageClassifier`: one logit per class."""

    pipeline_tag = "image-classification"
    model: OnescanImageModel

    def wrap(self, native: ImageClassifier) -> None:
        self.wrap_base(OnescanImageModel, native)

    @property
    def network(self) -> ImageClassifier:
        """The native model, head included."""
        return self.model.network

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
        outputs = self.model(
            pixel_values,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        logits = self.network.forward_head(outputs.last_hidden_state)
        if isinstance(logits, tuple):
            logits = (logits[0] + logits[1]) / 2
        loss = None
        if labels is not None:
            loss = self.loss_function(
                labels=labels, pooled_logits=logits, config=self.config, **loss_options
            )
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class OnescanBackbone(BackboneMixin, OnescanImageModel):
    """An `ImageClassifier` as the backbone of detectors and segmenters of transformers.

    The config's `out_features` or `out_indices` select the feature maps, which all have the
    resolution of the patches. The last block's is normalized.
    """

    has_attentions = False

    def __init__(self, config: OnescanImageConfig, **options: Any) -> None:
        super().__init__(config, **options)
        if hasattr(self, "_init_backbone"):  # older releases do not call it
            self._init_backbone(config)  # type: ignore[operator]
        self.num_features = [config.width] * len(config.stage_names)

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **_: Any,
    ) -> BackboneOutput:
        """Compute the selected feature maps, [B, width, *grid] each.

        Args:
            pixel_values: Images [B, channels, height, width], of any size that patches divide.
            output_hidden_states: Whether to return the output of each block.
            output_attentions: Must be False.
        """
        outputs = OnescanImageModel.forward(  # the mixin's forward comes first
            self,
            pixel_values,
            output_hidden_states=True,
            output_attentions=output_attentions,
            return_dict=True,
        )
        shape = self.network.patchify.grid_shape(tuple(pixel_values.shape[1:]))
        chosen = [self.stage_names.index(name) for name in self.out_features]
        patches = [outputs.hidden_states[i][:, self.network.prefix :] for i in chosen]
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        return BackboneOutput(
            feature_maps=tuple(x.mT.unflatten(-1, shape).contiguous() for x in patches),
            hidden_states=outputs.hidden_states if output_hidden_states else None,
        )
