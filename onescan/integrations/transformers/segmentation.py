"""Segmentation models with the interface of transformers."""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import SemanticSegmenterOutput
from transformers.utils.generic import can_return_tuple

from onescan.checks import check_shapes
from onescan.integrations.transformers.configuration import OnescanSegmentationConfig
from onescan.integrations.transformers.modeling import OnescanModel
from onescan.models.dense_predictor import DensePredictor, DensePredictorConfig


class OnescanForSemanticSegmentation(OnescanModel):
    """A `DensePredictor` with two axes: one logit per class at each pixel."""

    config_class = OnescanSegmentationConfig
    native_config = DensePredictorConfig
    main_input_name = "pixel_values"
    input_modalities = "image"
    pipeline_tag = "image-segmentation"
    accepts_loss_kwargs = False  # the loss is a mean over the labels of a batch
    network: DensePredictor

    def get_input_embeddings(self) -> nn.Module:
        """Return the layer that turns patches into tokens."""
        return self.network.patchify

    def to_onescan(self) -> DensePredictor:
        """Return the native model contained in this one."""
        return self.network

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **_: Any,
    ) -> SemanticSegmenterOutput:
        """Compute class logits, [B, num_labels, height, width], at the size of the images.

        The loss is the mean cross-entropy over all labels other than the config's
        `semantic_loss_ignore_index`, and 0 if there are none.

        Args:
            pixel_values: Images [B, channels, height, width], of any size.
            labels: Classes [B, height, width].
            output_hidden_states: Whether to return the output of each block, [B, T, width].
            output_attentions: Must be False.

        Raises:
            ValueError: If labels have another shape, or num_labels is 1.
        """
        with self.record_hidden_states(output_hidden_states, output_attentions) as hidden:
            logits = self.network(pixel_values)
        loss = None
        if labels is not None:
            check_shapes(pixel_values=(pixel_values, "B C H W"), labels=(labels, "B H W"))
            loss = self._loss(logits, labels)
        last = [self.network.norm(x) for x in hidden[-1:]]
        return SemanticSegmenterOutput(
            loss=loss,
            logits=logits,
            hidden_states=(*hidden[:-1], *last) if hidden else None,
        )

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if logits.shape[1] == 1:
            raise ValueError("labels were given to a model with num_labels 1, expected at least 2")
        ignored = self.config.semantic_loss_ignore_index
        count = (labels != ignored).sum().clamp(min=1)
        total = cross_entropy(logits, labels.long(), ignore_index=ignored, reduction="sum")
        return total / count
