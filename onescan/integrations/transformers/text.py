"""Models of text: one network, and the head of each task."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutputWithPast,
)
from transformers.utils.generic import can_return_tuple

from onescan.checks import can_look_at_values, check_shapes
from onescan.integrations.transformers.base import OnescanModel, mark_initialized
from onescan.integrations.transformers.cache import StateCache
from onescan.integrations.transformers.configuration import OnescanTextConfig
from onescan.models.causal_lm import CausalLM, CausalLMConfig
from onescan.models.masked_lm import MaskedLM, MaskedLMConfig
from onescan.models.sequence_classifier import SequenceClassifier, SequenceClassifierConfig
from onescan.models.token_network import TokenNetwork

# transformers 5.24 renamed past_key_values to cache, in outputs and in arguments of `generate`.
CACHE = "past_key_values"
if "cache" in {field.name for field in dataclasses.fields(BaseModelOutputWithPast)}:
    CACHE = "cache"


class OnescanTextModel(OnescanModel):
    """A `TokenNetwork`: one vector a token."""

    config_class = OnescanTextConfig
    network: TokenNetwork

    def build_native(self) -> nn.Module:
        config = self.config.native(CausalLMConfig)
        config.check()
        return TokenNetwork(config)

    def adopt(self, native: Any) -> None:
        self.network = native

    def get_input_embeddings(self) -> nn.Embedding:
        """The vector of each token of the vocabulary."""
        return self.network.embedding

    def set_input_embeddings(self, value: Any) -> None:
        """Take those of another vocabulary."""
        mark_initialized(value)
        self.network.set_embedding(value)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        **options: Any,
    ) -> BaseModelOutputWithPast:
        """Compute one vector per token.

        Args:
            input_ids: Ids [B, T], without the tokens in the cache.
            attention_mask: 1 for real tokens [B, T], optionally including the tokens in the cache.
                Padding may be on either side.
            token_type_ids: Segments [B, T]; ignored by models without segments.
            position_ids: Positions [B, T]. A position that restarts within a row begins a new
                document, which does not attend to previous ones. Other values are ignored: the
                network counts real tokens itself.
            inputs_embeds: Embeddings [B, T, width], instead of input_ids.
            past_key_values: Cache returned by a previous call of a causal model.
            cache: Name of past_key_values since transformers 5.24.
            use_cache: Whether to return the cache. None uses the config, and False in training.
            options: ``output_hidden_states=True`` returns the output of each block.

        Raises:
            ValueError: If shapes do not match, an id is out of range, the cache has another type or
                several documents, or attention weights are requested.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected one of input_ids and inputs_embeds")
        given: Any = input_ids if inputs_embeds is None else inputs_embeds
        keep = _keep(attention_mask, given)
        documents = _documents(position_ids, keep, given)
        cache = self._cache(past_key_values if cache is None else cache, use_cache)
        segments = token_type_ids if self.network.config.segment_types else None
        state = None if cache is None else cache.whole.state
        with self.recorded(**options) as hidden:
            read = self.network if inputs_embeds is None else self.network.read
            x, state = read(given, segments=segments, keep=keep, documents=documents, state=state)
        if cache is not None and state is not None:
            cache.whole.take(state, x.shape[1])
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*hidden[:-1], x) if hidden else None,  # the last one is normalized
            **{CACHE: cache if state is not None else None},  # type: ignore[arg-type]
        )

    def _cache(self, given: Any, use_cache: bool | None) -> StateCache | None:
        if given is not None and not isinstance(given, StateCache):
            raise ValueError(
                f"past_key_values is a {type(given).__name__}, expected the StateCache that the "
                "model returned"
            )
        if not self.network.config.mixer.is_causal:
            if given is not None:
                raise ValueError("past_key_values was given to a model that reads both ways")
            return None
        if given is None and use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return StateCache() if given is None and use_cache else given


class OnescanForCausalLM(OnescanTextModel, GenerationMixin):
    """A `CausalLM`: the next token."""

    _tied_weights_keys = {"lm_head.weight": "network.embedding.weight"}  # noqa: RUF012
    _is_stateful = True  # what was read cannot be taken back, as speculative decoding would

    def build_native(self) -> CausalLM:
        return self.config.native(CausalLMConfig).build()

    def adopt(self, native: CausalLM) -> None:
        self.network, self.lm_head = native.network, native.head

    def to_onescan(self) -> CausalLM:
        """The same model as onescan's own, which shares its weights."""
        with torch.device("meta"):
            native = self.build_native()
        native.network, native.head = self.network, self.lm_head
        return native.train(self.training)

    def get_output_embeddings(self) -> nn.Linear:
        """The map from a token's vector to scores of the vocabulary."""
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Take that of another vocabulary."""
        mark_initialized(value)
        self.lm_head = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **loss_options: Any,
    ) -> CausalLMOutputWithPast:
        """Score what may follow each token; most arguments are as in `OnescanTextModel.forward`.

        `labels` [B, T] are the tokens themselves, as they are shifted here; those of -100 are not
        scored. `logits_to_keep` is how many of the last tokens are scored, or the places of those
        that are; 0 is all. `loss_options` are what the loss of transformers takes, such as
        num_items_in_batch.
        """
        read = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values if cache is None else cache,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        is_count = isinstance(logits_to_keep, int)
        scored = slice(-logits_to_keep, None) if is_count else logits_to_keep
        logits = self.lm_head(read.last_hidden_state[:, scored])
        loss = None
        if labels is not None:
            size = self.config.vocab_size
            loss = self.loss_function(logits, labels, vocab_size=size, **loss_options)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=read.hidden_states,
            **{CACHE: getattr(read, CACHE)},
        )

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any, **__: Any
    ) -> None:
        """Hand `generate` a state to begin with."""
        kind = generation_config.cache_implementation
        if kind is not None:
            raise ValueError(
                f"cache_implementation is {kind!r}, expected None: a state has one kind"
            )
        if model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
            model_kwargs[CACHE] = StateCache()


class OnescanForMaskedLM(OnescanTextModel):
    """A `MaskedLM`: what stands where a token is masked."""

    _tied_weights_keys = {"lm_head.scores.weight": "network.embedding.weight"}  # noqa: RUF012

    def build_native(self) -> MaskedLM:
        if not self.config.tie_word_embeddings:
            raise ValueError(
                "tie_word_embeddings is False, but those of a MaskedLM are always tied"
            )
        return self.config.native(MaskedLMConfig).build()

    def adopt(self, native: MaskedLM) -> None:
        self.network, self.lm_head = native.network, native.head

    def to_onescan(self) -> MaskedLM:
        """The same model as onescan's own, which shares its weights."""
        with torch.device("meta"):
            native = self.build_native()
        native.network, native.head = self.network, self.lm_head
        return native.train(self.training)

    def get_output_embeddings(self) -> nn.Linear:
        """The map from a token's vector to scores of the vocabulary."""
        return self.lm_head.scores

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Take that of another vocabulary."""
        mark_initialized(value)
        self.lm_head.scores = value

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
        **loss_options: Any,
    ) -> MaskedLMOutput:
        """Score what may stand at each place; most arguments are as in `OnescanTextModel.forward`.

        `labels` [B, T] is what stands there, -100 where it is not scored. `loss_options` are what
        the loss of transformers takes, such as num_items_in_batch.
        """
        read = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        logits = self.lm_head(read.last_hidden_state)
        loss = None
        if labels is not None:
            size = self.config.vocab_size
            loss = self.loss_function(logits, labels, vocab_size=size, **loss_options)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=read.hidden_states)


class OnescanForSequenceClassification(OnescanTextModel):
    """A `SequenceClassifier`: scores of a text or a pair of texts, or a number."""

    def build_native(self) -> SequenceClassifier:
        return self.config.native(SequenceClassifierConfig).build()

    def adopt(self, native: SequenceClassifier) -> None:
        self.network, self.classifier = native.network, native.head

    def to_onescan(self) -> SequenceClassifier:
        """The same model as onescan's own, which shares its weights."""
        with torch.device("meta"):
            native = self.build_native()
        native.network, native.head = self.network, self.classifier
        return native.train(self.training)

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
        **loss_options: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Score each text; most arguments are as in `OnescanTextModel.forward`.

        `labels` are [B] classes or numbers, or [B, num_labels] of several classes at once; the
        config's problem_type says which. `loss_options` are what the loss of transformers takes.
        """
        read = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        x = read.last_hidden_state
        if _documents(position_ids, _keep(attention_mask, x), x) is not None:
            raise ValueError("position_ids begin anew within a row, of which there is one score")
        logits = self.classifier(x, _keep(attention_mask, x))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                labels=labels, pooled_logits=logits, config=self.config, **loss_options
            )
        return SequenceClassifierOutputWithPast(
            loss=loss, logits=logits, hidden_states=read.hidden_states
        )


def _keep(attention_mask: Any, given: Any) -> Tensor | None:
    """The part of a mask that is about what was given; None where all of that is real."""
    if attention_mask is None:
        return None
    check_shapes(attention_mask=(attention_mask, "B S"))
    length = given.shape[1]
    if len(attention_mask) != len(given) or attention_mask.shape[1] < length:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, expected {len(given)} rows "
            f"and {length} columns, or more where they are of a cache too"
        )
    keep = attention_mask[:, -length:].bool() if length else attention_mask.bool()
    return None if can_look_at_values(keep) and bool(keep.all()) else keep


def _documents(position_ids: Tensor | None, keep: Tensor | None, given: Tensor) -> Tensor | None:
    """Numbers of a row's texts by their positions; None where each row is one."""
    if position_ids is None:
        return None
    check_shapes(position_ids=(position_ids, "B T"))
    batch, length = given.shape[:2]
    if position_ids.shape not in ((batch, length), (1, length)):
        shape = tuple(position_ids.shape)
        raise ValueError(f"position_ids has shape {shape}, expected {(batch, length)}")
    if length == 1:
        return None
    real = given.new_ones(batch, length, dtype=torch.bool) if keep is None else keep
    begins = (position_ids == 0).expand(batch, -1).clone()
    begins[:, 1:] |= (position_ids.diff(dim=1) <= 0) & real[:, :-1]
    begins &= real & (real.cumsum(dim=1) > 1)  # a row's first text begins in any case
    return begins.cumsum(dim=1) if bool(begins.any()) else None
