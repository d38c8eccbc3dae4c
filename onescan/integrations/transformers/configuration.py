"""A model's config as transformers keeps it: the same fields, with its names for a few."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from transformers import PreTrainedConfig

from onescan.configs import ModelConfig, from_dict, to_dict
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.image_classifier import ImageClassifierConfig

ConfigT = TypeVar("ConfigT", bound=ModelConfig)

# where a field has a name that all of transformers knows
RENAMED = {"tie_embeddings": "tie_word_embeddings", "num_classes": "num_labels"}

INTRODUCTION = "onescan_model"  # the module beside a saved config that makes onescan known


class _NativeFields:
    """A flat config; mixers, MLPs and positions are nested plain data, each with its "type"."""

    attribute_map: ClassVar[dict[str, str]]

    def save_pretrained(self, save_directory: Any, *rest: Any, **options: Any) -> None:
        """Save as any config, and beside it a module that imports onescan.

        By it, programs that do not import onescan load the folder with trust_remote_code.
        """
        name = type(self).__name__
        self.auto_map = {"AutoConfig": f"{INTRODUCTION}.{name}"}
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        module = f'from onescan.integrations.transformers import {name}\n\n__all__ = ["{name}"]\n'
        (folder / f"{INTRODUCTION}.py").write_text(module)
        super().save_pretrained(save_directory, *rest, **options)  # type: ignore[misc]

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: `save_pretrained` says where the class is, and its source is not copied."""

    @classmethod
    def of(cls, config: ModelConfig, **others: Any) -> Any:
        """The config of a model of onescan, with fields of transformers beside it."""
        fields = {RENAMED.get(name, name): value for name, value in to_dict(config).items()}
        return cls(**{**fields, **others})

    def native(self, kind: type[ConfigT]) -> ConfigT:
        """What onescan builds a model from.

        Raises:
            ValueError: a field's value is of another type than declared, or no known class.
        """
        names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
        return from_dict(kind, {name: getattr(self, RENAMED.get(name, name)) for name in names})

    def _keep(self, defaults: ModelConfig, fields: dict[str, Any]) -> dict[str, Any]:
        """Set the fields that onescan knows, checked and completed; return the others."""
        for known, name in self.attribute_map.items():
            if known in fields:
                fields[name] = fields.pop(known)
        plain = to_dict(defaults)
        given = {name: _plain(fields.pop(name)) for name in plain.keys() & fields.keys() - RENAMED}
        for name, value in to_dict(from_dict(type(defaults), plain | given)).items():
            if name not in RENAMED:
                setattr(self, name, value)
        return fields


def _plain(value: Any) -> Any:
    """A config of onescan as plain data; all else as it is."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    return {"type": type(value).__name__} | to_dict(value)


class OnescanTextConfig(_NativeFields, PreTrainedConfig):
    """Of every model of text: `CausalLMConfig`'s, `MaskedLMConfig`'s, `SequenceClassifierConfig`'s.

    Without fields it is `CausalLMConfig()`. `vocab_size`, `hidden_size` and `num_hidden_layers` are
    other names of vocab_size, width and depth.

    >>> config = OnescanTextConfig(vocab_size=100, num_hidden_layers=2, num_labels=3)
    >>> config.depth, config.mixer["type"], config.num_labels
    (2, 'LightNetMixerConfig', 3)
    """

    model_type = "onescan_text"
    attribute_map = {  # noqa: RUF012
        "vocab_size": "vocab_size",
        "hidden_size": "width",
        "num_hidden_layers": "depth",
    }
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __init__(
        self,
        *,
        tie_word_embeddings: bool = True,
        head_transform: bool = True,
        pool: str = "mean",
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **fields: Any,
    ) -> None:
        others = self._keep(CausalLMConfig(), fields)
        self.tie_word_embeddings = tie_word_embeddings
        self.head_transform = head_transform
        self.pool = pool
        self.use_cache = use_cache
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        super().__init__(**others)


class OnescanImageConfig(_NativeFields, PreTrainedConfig):
    """Of image classifiers: the fields of `ImageClassifierConfig`."""

    model_type = "onescan_image"
    attribute_map = {  # noqa: RUF012
        "hidden_size": "width",
        "num_hidden_layers": "depth",
        "num_channels": "channels",
    }

    def __init__(self, **fields: Any) -> None:
        super().__init__(**self._keep(ImageClassifierConfig(), fields))
