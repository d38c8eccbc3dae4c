"""Models with the interface of transformers: a common base class, and text models."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutputWithPast,
)
from transformers.utils.generic import ModelOutput, can_return_tuple

from onescan.checks import can_look_at_values, check_shapes
from onescan.configs import ModelConfig
from onescan.integrations import check_not_native
from onescan.integrations.card import write_model_card
from onescan.integrations.transformers.cache import Inputs, StateCache
from onescan.integrations.transformers.configuration import OnescanTextConfig
from onescan.layers.block import Block
from onescan.layers.position import TokenPosition
from onescan.messages import named_type
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.masked_lm import MaskedLMConfig
from onescan.models.sequence_classifier import SequenceClassifierConfig
from onescan.models.token_network import NetworkState, TokenNetwork
from onescan.ops.parallel import in_current_group

INITIALIZED = "_is_hf_initialized"  # set by transformers on initialized tensors
# transformers 5.24 renamed past_key_values to cache, in outputs and in arguments of `generate`.
CACHE = "past_key_values"
if "cache" in {field.name for field in dataclasses.fields(BaseModelOutputWithPast)}:
    CACHE = "cache"


def mark_initialized(module: nn.Module) -> None:
    """Prevent `initialize_weights` from changing weights, except those on the meta device."""
    for tensor in module.state_dict(keep_vars=True).values():
        setattr(tensor, INITIALIZED, not tensor.is_meta)


class OnescanBlock(GradientCheckpointingLayer, Block):
    """A `Block` with the gradient checkpointing of transformers.

    Models replace the class of their blocks by this one, as FSDP2 does with its modules.
    """


class OnescanModel(PreTrainedModel):
    """Base class of all models, which contain the modules of a native model."""

    native_config: ClassVar[type[ModelConfig]]
    """Config of the native model."""
    pipeline_tag: ClassVar[str | None] = None
    """Task of the Hugging Face Hub, for the model card."""
    processor: Any = None
    """Tokenizer or image processor that `save_pretrained` also writes, if there is one."""
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    # Angles and decays are multiplied by positions, and so are their rounding errors.
    _keep_in_fp32_modules_strict = [  # noqa: RUF012
        *("theta", "log_leak", "log_rate", "dt_bias", "forget_bias", "logit", "logits")
    ]
    _no_split_modules = ["OnescanBlock"]  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.dtype == torch.float64:
            # otherwise transformers 5.0 rounds the angles to float32
            self.dtype_plan: dict[str, Any] = {}
        self.wrap(self.build_native())
        names = {name.rpartition(".")[2] for name in self.state_dict()}
        kept = [name for name in type(self)._keep_in_fp32_modules_strict if name in names]
        self._keep_in_fp32_modules_strict = kept
        mark_initialized(self)
        self.post_init()

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *_: Any, **__: Any
    ) -> str:
        """Accept the names of torch's own kernels, without effect: mixers choose their own kernels.

        Raises:
            ValueError: If other kernels are requested.
        """
        if attn_implementation not in (None, "eager", "sdpa"):
            raise ValueError(
                f"attn_implementation is {attn_implementation!r}, expected 'sdpa' or 'eager': the "
                "mixers of a model choose their own kernels"
            )
        return attn_implementation or "eager"

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing, because the auto_map is complete without copying source code."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *rest: Any, **options: Any) -> Any:
        """Load a saved model, as in transformers.

        Raises:
            ValueError: If the folder holds a run or another model in onescan's own format.
        """
        check_not_native(pretrained_model_name_or_path, "transformers")
        return super().from_pretrained(pretrained_model_name_or_path, *rest, **options)

    def build_native(self) -> Any:
        """Build the native model that the config describes, with new weights."""
        return self.config.to_onescan(self.native_config).build()

    def wrap(self, native: Any) -> None:
        """Use the modules of a native model, sharing its weights."""
        self.network = native
        for block in self._blocks():
            block.__class__ = OnescanBlock

    def wrap_base(self, kind: type["OnescanModel"], network: nn.Module) -> None:
        """Set the base model, of the class `kind`, to one that contains a native network."""
        checkpointing = getattr(self.config, "gradient_checkpointing", False)
        with torch.device("meta"):
            self.model = kind(self.config)
        self.model.wrap(network)
        if checkpointing:  # the base model removed it before its blocks were replaced
            self.config.gradient_checkpointing = True

    def save_pretrained(
        self, save_directory: Any, is_main_process: bool = True, *rest: Any, **options: Any
    ) -> None:
        """Save the model and its `processor`, with a model card if the folder has no README.md."""
        super().save_pretrained(save_directory, is_main_process, *rest, **options)
        if not is_main_process:
            return
        if self.processor is not None:
            self.processor.save_pretrained(save_directory)
        name, package = type(self).__name__, __package__
        write_model_card(
            save_directory,
            self.config.to_onescan(self.native_config),
            title=name,
            usage=f"from {package} import {name}\n\n"
            f'model = {name}.from_pretrained("path/to/folder")',
            parameters=self.num_parameters(),
            metadata={"library_name": "transformers", "pipeline_tag": self.pipeline_tag},
        )

    def returns_hidden_states(
        self,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **_: Any,
    ) -> bool:
        """Return whether the input of the first block and the output of each block are requested.

        Raises:
            ValueError: If attention matrices are requested.
        """
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_attentions:
            raise ValueError("output_attentions is True, but no attention matrix is ever computed")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        return bool(output_hidden_states)

    @contextmanager
    def record_hidden_states(self, *requested: bool | None) -> Iterator[list[Tensor]]:
        """Collect hidden states if they are requested; see `returns_hidden_states`."""
        hidden: list[Tensor] = []
        blocks, hooks = self._blocks(), []
        if output_hidden_states := self.returns_hidden_states(*requested):
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
        """Initialize weights that are missing in a checkpoint as in a new model."""
        tensors = self.state_dict(keep_vars=True)
        missing = [name for name, x in tensors.items() if not getattr(x, INITIALIZED, False)]
        fresh = type(self)(self.config).state_dict() if missing else {}
        for name in missing:
            if name in fresh:  # bitsandbytes adds tensors of its own, such as scales
                tensors[name].copy_(fresh[name])

    def mark_tied_weights_as_initialized(self, *loading_info: Any) -> None:
        """Mark tied weights as initialized, but keep all missing keys.

        For models outside of its own package, transformers removes the keys of marked parameters
        from the missing keys. Both names of a tied weight refer to the same parameter, so if both
        are missing, both would be removed, and the weight would never be allocated. The first
        releases of transformers 5 remove no keys and pass no argument.
        """
        missing = [set(info.missing_keys) for info in loading_info]  # none in transformers 5.0
        super().mark_tied_weights_as_initialized(*loading_info)
        for info, keys in zip(loading_info, missing, strict=True):
            info.missing_keys = keys

    def _set_gradient_checkpointing(  # type: ignore[override]  # older releases lack every_n_layers
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, **options: Any
    ) -> None:
        """Enable or disable gradient checkpointing, always with ``use_reentrant=False``.

        Reentrant checkpointing would drop the gradients of tensors passed as keyword arguments.
        """

        def function(block: Callable[..., Any], *arguments: Any) -> Any:
            run = in_current_group(block)  # the backward pass may run outside of its context
            return gradient_checkpointing_func(run, *arguments, use_reentrant=False)

        super()._set_gradient_checkpointing(enable, function, **options)

    def _blocks(self) -> list[Block]:
        return [module for module in self.modules() if isinstance(module, Block)]


HEADS = [r"^lm_head\.", r"^classifier\.", r"^qa_outputs\."]  # of models that contain a text model


class OnescanTextModel(OnescanModel):
    """A `TokenNetwork`: one vector per token."""

    config_class = OnescanTextConfig
    native_config: ClassVar[type[ModelConfig]] = CausalLMConfig
    network: TokenNetwork
    _keys_to_ignore_on_load_unexpected = HEADS

    def build_native(self) -> nn.Module:
        config = self.config.to_onescan(CausalLMConfig)
        config.check()
        return TokenNetwork(config)

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the token embedding."""
        return self.network.embedding

    def set_input_embeddings(self, value: Any) -> None:
        """Set the token embedding, possibly of another vocabulary size."""
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
                Padding may be anywhere. If it ends a call with a cache, only padding can follow.
            token_type_ids: Segments [B, T]; ignored by models without segments.
            position_ids: Positions [B, T]. If positions restart within a row, a new document
                begins, which does not attend to previous ones. The network counts real tokens
                itself, and other positions are rejected.
            inputs_embeds: Embeddings [B, T, width], instead of input_ids.
            past_key_values: Cache returned by a previous call of a causal model.
            cache: Name of past_key_values since transformers 5.24.
            use_cache: Whether to return the cache. None uses the config, or False in training.
            options: ``output_hidden_states=True`` returns the output of each block.

        Raises:
            ValueError: If shapes do not match, an id is out of range, the cache has another type or
                is combined with several documents, position_ids do not count real tokens, or
                attention weights are requested.
        """
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither is" if input_ids is None else "both are"
            raise ValueError(f"expected one of input_ids and inputs_embeds, but {given} given")
        inputs: Any = input_ids if inputs_embeds is None else inputs_embeds
        keep = _keep(attention_mask, inputs)
        cache = self._cache(past_key_values if cache is None else cache, use_cache)
        documents = _documents(position_ids, keep, inputs)
        segments = token_type_ids if self.network.config.segment_types else None
        network_inputs = Inputs(input_ids, inputs_embeds, segments, keep)
        state = None if cache is None else cache.resume(self._read)
        if isinstance(self.network.position, TokenPosition):
            _check_first_positions(position_ids, keep, 0 if state is None else state.position)
        hidden: list[Tensor] = []
        outputs = hidden if self.returns_hidden_states(**options) else None
        x, state = self._read(network_inputs, state, documents, outputs)
        if cache is not None and state is not None:
            cache.write(state, network_inputs)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*hidden[:-1], x) if hidden else None,  # the last one is normalized
            **{CACHE: cache if state is not None else None},  # type: ignore[arg-type]
        )

    def _read(
        self,
        inputs: Inputs,
        state: NetworkState | None,
        documents: Tensor | None = None,
        outputs: list[Tensor] | None = None,
    ) -> tuple[Tensor, NetworkState | None]:
        ids, embeddings, segments, keep = inputs
        options: Any = {"segments": segments, "keep": keep, "documents": documents, "state": state}
        if embeddings is not None:
            return self.network.read(embeddings, outputs=outputs, **options)
        return self.network(ids, outputs=outputs, **options)

    def _cache(self, cache: Any, use_cache: bool | None) -> StateCache | None:
        if cache is not None and not isinstance(cache, StateCache):
            raise ValueError(
                f"past_key_values is {named_type(cache)}, expected the StateCache that the "
                "model returned"
            )
        if self.network.config.state_block != 1:
            if cache is not None:
                raise ValueError("past_key_values was given to a bidirectional model")
            return None
        if cache is None and use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return StateCache(self.network.config.depth) if cache is None and use_cache else cache


class OnescanTextModelWithHead(OnescanModel):
    """Base class of text models with a head."""

    config_class = OnescanTextConfig
    head_name = "lm_head"
    output_class: type[ModelOutput]
    returns_cache = False
    model: OnescanTextModel

    def wrap(self, native: Any) -> None:
        self.wrap_base(OnescanTextModel, native.network)
        setattr(self, self.head_name, native.head)

    @property
    def network(self) -> TokenNetwork:
        """The native network of the base model."""
        return self.model.network

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the token embedding."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: Any) -> None:
        """Set the token embedding, possibly of another vocabulary size."""
        self.model.set_input_embeddings(value)

    def to_onescan(self) -> Any:
        """Return the native model. Both share their weights."""
        with torch.device("meta"):
            native = self.build_native()
        native.network, native.head = self.network, getattr(self, self.head_name)
        return native.train(self.training)

    def score(
        self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        """Apply the head to the vectors of tokens."""
        del attention_mask, position_ids  # used by heads that pool
        return getattr(self, self.head_name)(x)

    def compute_loss(self, logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """Compute the loss that transformers defines for this task."""
        return self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **options)

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
    ) -> Any:
        """Compute logits, and the loss if there are labels.

        The other arguments are those of `OnescanTextModel.forward`.

        ``labels`` are token ids [B, T] for language models, with -100 for tokens without a loss; a
        causal model shifts them itself. For classifiers, they are classes or numbers [B], or
        multiple classes [B, num_labels], according to the config's problem_type.

        ``logits_to_keep`` is the number of last tokens for which to compute logits, or their
        positions; 0 selects all tokens. For language models only.

        ``loss_options`` are options of transformers' loss functions, such as num_items_in_batch.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values if cache is None else cache,
            use_cache=use_cache if self.returns_cache else False,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        is_count = isinstance(logits_to_keep, int)
        indices = slice(-logits_to_keep, None) if is_count else logits_to_keep
        logits = self.score(outputs.last_hidden_state[:, indices], attention_mask, position_ids)
        loss = None if labels is None else self.compute_loss(logits, labels, **loss_options)
        cached = {CACHE: getattr(outputs, CACHE)} if self.returns_cache else {}
        return self.output_class(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, **cached
        )


class OnescanForCausalLM(OnescanTextModelWithHead, GenerationMixin):
    """A `CausalLM`, which predicts the next token."""

    pipeline_tag = "text-generation"
    native_config = CausalLMConfig
    output_class = CausalLMOutputWithPast
    returns_cache = True
    lm_head: nn.Linear
    _tied_weights_keys = {"lm_head.weight": "model.network.embedding.weight"}  # noqa: RUF012

    def get_output_embeddings(self) -> nn.Linear:
        """Return the map from vectors to logits."""
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Set the map from vectors to logits, possibly of another vocabulary size."""
        mark_initialized(value)
        self.lm_head = value

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any, **__: Any
    ) -> None:
        """Provide `generate` with an empty state."""
        kind = generation_config.cache_implementation
        # transformers before 5.24 sets "dynamic_full" for assisted generation
        if kind not in (None, "dynamic", "dynamic_full"):
            raise ValueError(
                f"cache_implementation is {kind!r}, expected None or 'dynamic': there is one kind "
                "of state"
            )
        if model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
            model_kwargs[CACHE] = StateCache(self.network.config.depth)


class OnescanForMaskedLM(OnescanTextModelWithHead):
    """A `MaskedLM`, which predicts masked tokens."""

    pipeline_tag = "fill-mask"
    native_config = MaskedLMConfig
    output_class = MaskedLMOutput
    lm_head: Any
    _tied_weights_keys = {"lm_head.scores.weight": "model.network.embedding.weight"}  # noqa: RUF012

    def get_output_embeddings(self) -> nn.Linear:
        """Return the map from vectors to logits."""
        return self.lm_head.scores

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Set the map from vectors to logits, possibly of another vocabulary size."""
        mark_initialized(value)
        self.lm_head.scores = value


class OnescanForSequenceClassification(OnescanTextModelWithHead):
    """A `SequenceClassifier`: class logits, or a number, for a text or a pair of texts."""

    pipeline_tag = "text-classification"
    native_config = SequenceClassifierConfig
    output_class = SequenceClassifierOutputWithPast
    head_name = "classifier"
    classifier: nn.Module

    def score(
        self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        """Compute the logits of the text in each row."""
        keep = _keep(attention_mask, x)
        if _documents(position_ids, keep, x) is not None:
            raise ValueError("position_ids restart within a row, but there is one score per row")
        return self.classifier(x, keep)

    def compute_loss(self, logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """Compute the loss of the config's problem_type."""
        return self.loss_function(
            labels=labels, pooled_logits=logits, config=self.config, **options
        )


def _keep(attention_mask: Any, inputs: Any) -> Tensor | None:
    """Return the part of the mask for the inputs, without the cache; None if all are real."""
    if attention_mask is None:
        return None
    check_shapes(attention_mask=(attention_mask, "B S"))
    length = inputs.shape[1]
    if len(attention_mask) != len(inputs) or attention_mask.shape[1] < length:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, expected {len(inputs)} rows "
            f"and {length} columns, or more if it includes the tokens in the cache"
        )
    keep = attention_mask[:, -length:].bool() if length else attention_mask.bool()
    return None if can_look_at_values(keep) and bool(keep.all()) else keep


def _check_first_positions(
    position_ids: Tensor | None, keep: Tensor | None, tokens_read: Any
) -> None:
    """Raise ValueError, on a CPU, if positions do not begin at the number of tokens read before."""
    if position_ids is None or not position_ids.numel() or not can_look_at_values(position_ids):
        return
    first = position_ids[:, 0]
    if keep is not None:
        rows = position_ids.expand(len(keep), -1)
        first = rows.gather(1, keep.long().argmax(dim=1, keepdim=True))[:, 0]
        first = first.where(keep.any(dim=1), tokens_read)
    if bool((first != tokens_read).any()):
        raise ValueError(
            f"position_ids begin at {first.tolist()}, expected "
            f"{torch.as_tensor(tokens_read).tolist()}, the number of real tokens read before"
        )


def _documents(position_ids: Tensor | None, keep: Tensor | None, inputs: Tensor) -> Tensor | None:
    """Return the document number of each token from position_ids; None for one document per row.

    Raises:
        ValueError: If positions do not increase by 1 from one real token of a document to the next.
    """
    if position_ids is None:
        return None
    check_shapes(position_ids=(position_ids, "B T"))
    batch, length = inputs.shape[:2]
    if position_ids.shape not in ((batch, length), (1, length)):
        shape = tuple(position_ids.shape)
        raise ValueError(f"position_ids has shape {shape}, expected {(batch, length)}")
    if length == 1:
        return None
    real = inputs.new_ones(batch, length, dtype=torch.bool) if keep is None else keep
    begins = (position_ids == 0).expand(batch, -1).clone()
    begins[:, 1:] |= (position_ids.diff(dim=1) <= 0) & real[:, :-1]
    begins &= real & (real.cumsum(dim=1) > 1)  # the first document of a row begins in any case
    documents = begins.cumsum(dim=1)
    # One position per token: if they count real tokens, the differences are the same in a document.
    shift = (position_ids - real.cumsum(dim=1))[real]
    row = torch.arange(batch, device=real.device).unsqueeze(1) * length
    is_same = (documents + row)[real].diff() == 0
    is_wrong = ((shift.diff() != 0) & is_same).any()
    # Wait for the device once; models read documents on the CPU.
    begins_any, wrong = torch.stack([begins.any(), is_wrong]).tolist()
    if wrong:
        raise ValueError(
            "position_ids do not increase by 1 from one real token to the next, expected positions "
            "that count the real tokens of attention_mask, such as attention_mask.cumsum(1) - 1"
        )
    return documents.cpu() if begins_any else None
