"""Configs of the models in the format of transformers."""

import dataclasses
from typing import Any, ClassVar, TypeVar

from transformers import PreTrainedConfig

from onescan.configs import ModelConfig, from_dict, to_dict
from onescan.integrations import REMOTE_MODULE, write_remote_module
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.image_classifier import ImageClassifierConfig

ConfigT = TypeVar("ConfigT", bound=ModelConfig)

# fields whose name differs in transformers
RENAMED = {"tie_embeddings": "tie_word_embeddings", "num_classes": "num_labels"}


class _NativeFields:
    """The fields of a native config: mixers, MLPs and positions are dicts with their "type"."""

    attribute_map: ClassVar[dict[str, str]]
    auto_classes: ClassVar[dict[str, str]]
    """Class of this package for each Auto class of transformers."""

    def save_pretrained(self, save_directory: Any, *rest: Any, **options: Any) -> None:
        """Save the config, and the module that ``trust_remote_code=True`` imports."""
        classes = {"AutoConfig": type(self).__name__, **self.auto_classes}
        self.auto_map = {auto: f"{REMOTE_MODULE}.{name}" for auto, name in classes.items()}
        package = __package__  # importing it registers the classes
        write_remote_module(save_directory, package, sorted(classes.values()))
        super().save_pretrained(save_directory, *rest, **options)  # type: ignore[misc]

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing, because `save_pretrained` writes the auto_map without copying source code."""

    @classmethod
    def from_onescan(cls, config: ModelConfig, **others: Any) -> Any:
        """Convert the config of a native model; `others` are fields of transformers' configs."""
        fields = {RENAMED.get(name, name): value for name, value in to_dict(config).items()}
        return cls(**{**fields, **others})

    def to_onescan(self, kind: type[ConfigT]) -> ConfigT:
        """Convert to the config of a native model, of the class `kind`.

        Raises:
            ValueError: If a field has the wrong type or names an unknown class.
        """
        names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
        return from_dict(kind, {name: getattr(self, RENAMED.get(name, name)) for name in names})

    def _set_native_fields(self, defaults: ModelConfig, fields: dict[str, Any]) -> dict[str, Any]:
        """Validate, complete and set the fields of the native config; return the other fields."""
        for alias, name in self.attribute_map.items():
            if alias in fields:
                fields[name] = fields.pop(alias)
        plain = to_dict(defaults)
        given = {name: _plain(fields.pop(name)) for name in plain.keys() & fields.keys() - RENAMED}
        for name, value in to_dict(from_dict(type(defaults), plain | given)).items():
            if name not in RENAMED:
                setattr(self, name, value)
        return fields


def _plain(value: Any) -> Any:
    """Return a native config as plain data, and any other value unchanged."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    return {"type": type(value).__name__} | to_dict(value)


class OnescanTextConfig(_NativeFields, PreTrainedConfig):
    """Config of the text models: `CausalLMConfig`, `MaskedLMConfig`, `SequenceClassifierConfig`.

    The defaults are those of `CausalLMConfig`. `hidden_size` and `num_hidden_layers` are aliases of
    width and depth.

    >>> config = OnescanTextConfig(vocab_size=100, num_hidden_layers=2, num_labels=3)
    >>> config.depth, config.mixer["type"], config.num_labels
    (2, 'LightNetMixerConfig', 3)
    """

    model_type = "onescan_text"
    attribute_map = {"hidden_size": "width", "num_hidden_layers": "depth"}  # noqa: RUF012
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    auto_classes = {  # noqa: RUF012
        "AutoModel": "OnescanTextModel",
        "AutoModelForCausalLM": "OnescanForCausalLM",
        "AutoModelForMaskedLM": "OnescanForMaskedLM",
        "AutoModelForSequenceClassification": "OnescanForSequenceClassification",
    }

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
        others = self._set_native_fields(CausalLMConfig(), fields)
        self.tie_word_embeddings = tie_word_embeddings
        self.head_transform = head_transform
        self.pool = pool
        self.use_cache = use_cache
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        super().__init__(**others)


class OnescanImageConfig(_NativeFields, PreTrainedConfig):
    """Config of image classifiers: the fields of `ImageClassifierConfig`."""

    model_type = "onescan_image"
    attribute_map = {  # noqa: RUF012
        "hidden_size": "width",
        "num_hidden_layers": "depth",
        "num_channels": "channels",
    }
    auto_classes = {  # noqa: RUF012
        "AutoModel": "OnescanImageModel",
        "AutoModelForImageClassification": "OnescanForImageClassification",
    }

    def __init__(self, **fields: Any) -> None:
        super().__init__(**self._set_native_fields(ImageClassifierConfig(), fields))
