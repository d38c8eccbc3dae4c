"""Text models with heads that exist only in transformers: tokens, answers and choices."""

import dataclasses
from types import SimpleNamespace
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import (
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from onescan.checks import check_shapes
from onescan.integrations.transformers.modeling import (
    OnescanForSequenceClassification,
    OnescanTextModelWithHead,
)
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.sequence_classifier import SequenceClassifierConfig
from onescan.models.token_network import TokenNetwork


class _TokenHeadModel(OnescanTextModelWithHead):
    """Base class of models with a linear layer on the vector of each token."""

    native_config = CausalLMConfig
    output_class = TokenClassifierOutput

    def num_outputs(self) -> int:
        """Return the number of outputs per token."""
        return self.config.num_labels  # type: ignore[return-value]

    def build_native(self) -> SimpleNamespace:
        config = self.config.to_onescan(CausalLMConfig)
        config.check()
        network, head = TokenNetwork(config), nn.Linear(config.width, self.num_outputs())
        head.apply(network.init_weights)
        return SimpleNamespace(network=network, head=head)

    def to_onescan(self) -> NoReturn:
        """Raise ValueError: there is no such native model."""
        raise ValueError(
            f"{type(self).__name__} has no native model; its attribute network is the native "
            "network without the head"
        )


class OnescanForTokenClassification(_TokenHeadModel):
    """A `TokenNetwork` with class logits for each token, for example for named entities."""

    pipeline_tag = "token-classification"
    head_name = "classifier"
    classifier: nn.Linear

    def compute_loss(self, logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """Compute the cross-entropy of labels [B, T]; -100 marks tokens without a loss."""
        return self.loss_function(logits, labels, config=self.config, **options)


class OnescanForQuestionAnswering(_TokenHeadModel):
    """A `TokenNetwork` with logits for the first and the last token of an answer in the text."""

    pipeline_tag = "question-answering"
    head_name = "qa_outputs"
    qa_outputs: nn.Linear

    def num_outputs(self) -> int:
        """Return 2: the logits of the start and the end."""
        return 2

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **loss_options: Any,
    ) -> QuestionAnsweringModelOutput:
        """Compute the logits of start and end, [B, T] each.

        The loss is the mean of two cross-entropies with the indices ``start_positions`` and
        ``end_positions`` [B]; positions outside the text are ignored. The other arguments are those
        of `OnescanTextModel.forward`.
        """
        loss_options.pop("use_cache", None)
        outputs = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        start, end = outputs.logits.unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions, **loss_options)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start.contiguous(),
            end_logits=end.contiguous(),
            hidden_states=outputs.hidden_states,
        )


class OnescanForMultipleChoice(OnescanForSequenceClassification):
    """A `SequenceClassifier` with one output, which scores each of several continuations."""

    pipeline_tag = "multiple-choice"

    def build_native(self) -> Any:
        config = self.config.to_onescan(SequenceClassifierConfig)
        return dataclasses.replace(config, num_classes=1).build()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **_: Any,
    ) -> MultipleChoiceModelOutput:
        """Compute the logits of the choices, [B, C], and the loss for labels [B].

        The loss is the sum over the batch, divided by ``num_items_in_batch`` (default: B), which
        is the number of labels of all batches between two optimizer steps.

        The inputs have one more axis than those of `OnescanTextModel.forward`: ``input_ids`` are
        [B, C, T]. Hidden states have the shape [B * C, T, width].

        Raises:
            ValueError: See `OnescanTextModel.forward`; or if there is no axis for the choices.
        """
        inputs: Any = inputs_embeds if input_ids is None else input_ids
        name, shape = (
            ("input_ids", "B C T") if input_ids is not None else ("inputs_embeds", "B C T D")
        )
        check_shapes(**{name: (inputs, shape)})
        choices = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        outputs = super().forward(
            **{name: None if x is None else x.flatten(0, 1) for name, x in choices.items()},
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        logits = outputs.logits.view(-1, inputs.shape[1])
        loss = None
        if labels is not None:
            count = len(labels) if num_items_in_batch is None else num_items_in_batch
            loss = cross_entropy(logits, labels, reduction="sum") / count
        return MultipleChoiceModelOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
        )
