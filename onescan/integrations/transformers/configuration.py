"""Configs of the models in the format of transformers."""

import dataclasses
from typing import Any, ClassVar, TypeVar

from transformers import PreTrainedConfig

from onescan.configs import ModelConfig, from_dict, to_dict
from onescan.inputs.arrays import IMAGE_AXES
from onescan.integrations import REMOTE_MODULE, write_remote_module
from onescan.layers.basic import MLPConfig
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.dense_predictor import DensePredictorConfig
from onescan.models.image_classifier import ImageClassifierConfig

try:
    from transformers.backbone_utils import BackboneConfigMixin
except ImportError:  # older releases
    from transformers.utils.backbone_utils import BackboneConfigMixin  # type: ignore[attr-defined]

ConfigT = TypeVar("ConfigT", bound=ModelConfig)

# fields whose name differs in transformers
RENAMED = {
    "tie_embeddings": "tie_word_embeddings",
    "num_classes": "num_labels",
    "out_channels": "num_labels",
}


class _NativeFields:
    """The fields of a native config: mixers, MLPs and positions are dicts with their "type"."""

    attribute_map: ClassVar[dict[str, str]]
    auto_classes: ClassVar[dict[str, str]]
    """Class of this package for each Auto class of transformers."""
    width: int
    mixer: dict[str, Any]
    mlp: dict[str, Any] | None
    position: dict[str, Any] | None

    # Names that other tools read. These tools check with `hasattr` whether there is a value.

    @property
    def num_attention_heads(self) -> int:
        """Number of heads of the mixer."""
        if "num_heads" not in self.mixer:
            raise AttributeError(f"{self.mixer['type']} has no num_heads")
        return int(self.mixer["num_heads"])

    @num_attention_heads.setter
    def num_attention_heads(self, value: int) -> None:
        self.mixer = {**self.mixer, "num_heads": value}

    @property
    def intermediate_size(self) -> int:
        """Hidden width of the MLP; 0 without one."""
        if self.mlp is None:
            return 0
        return from_dict(MLPConfig, self.mlp).hidden_width(self.width)

    @property
    def max_position_embeddings(self) -> int:
        """Maximum length of a text, for models that have one."""
        if not self.position or "max_tokens" not in self.position:
            raise AttributeError("max_position_embeddings: the length is unlimited")
        return int(self.position["max_tokens"])

    @max_position_embeddings.setter
    def max_position_embeddings(self, value: int) -> None:
        if not self.position or "max_tokens" not in self.position:
            raise ValueError(
                f"max_position_embeddings is {value}, but the position encoding has no maximum "
                "length; expected a position of type TokenPositionConfig"
            )
        self.position = {**self.position, "max_tokens": value}

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, with the maximum length under the name that other tools read."""
        fields: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        if hasattr(self, "max_position_embeddings"):
            fields["max_position_embeddings"] = self.max_position_embeddings
        return fields

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
        native_fields = {
            name: _plain(fields.pop(name)) for name in plain.keys() & fields.keys() - RENAMED
        }
        for name, value in to_dict(from_dict(type(defaults), plain | native_fields)).items():
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
    attribute_map = {  # noqa: RUF012
        "hidden_size": "width",
        "num_hidden_layers": "depth",
        "initializer_range": "init_std",
    }
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    auto_classes = {  # noqa: RUF012
        "AutoModel": "OnescanTextModel",
        "AutoModelForCausalLM": "OnescanForCausalLM",
        "AutoModelForMaskedLM": "OnescanForMaskedLM",
        "AutoModelForMultipleChoice": "OnescanForMultipleChoice",
        "AutoModelForQuestionAnswering": "OnescanForQuestionAnswering",
        "AutoModelForSequenceClassification": "OnescanForSequenceClassification",
        "AutoModelForTokenClassification": "OnescanForTokenClassification",
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

    @property
    def is_decoder(self) -> bool:
        """Whether the model is causal."""
        return self.to_onescan(CausalLMConfig).mixer.is_causal

    @is_decoder.setter
    def is_decoder(self, value: bool) -> None:
        if value != self.is_decoder:
            kind = "causal" if self.is_decoder else "bidirectional"
            raise ValueError(f"is_decoder is {value}, but the model's mixer is {kind}")


class OnescanImageConfig(_NativeFields, BackboneConfigMixin, PreTrainedConfig):
    """Config of image models: the fields of `ImageClassifierConfig`.

    `out_features` or `out_indices` select the feature maps of an `OnescanBackbone`: "stem" (0) is
    the input of the first block, "stage1" (1) the output of the first block, and so on.
    """

    model_type = "onescan_image"
    attribute_map = {  # noqa: RUF012
        "hidden_size": "width",
        "num_hidden_layers": "depth",
        "num_channels": "channels",
        "initializer_range": "init_std",
    }
    auto_classes = {  # noqa: RUF012
        "AutoBackbone": "OnescanBackbone",
        "AutoModel": "OnescanImageModel",
        "AutoModelForImageClassification": "OnescanForImageClassification",
        "AutoImageProcessor": "OnescanImageProcessor",
    }

    def __init__(
        self,
        *,
        out_features: list[str] | None = None,
        out_indices: list[int] | None = None,
        **fields: Any,
    ) -> None:
        others = self._set_native_fields(ImageClassifierConfig(), fields)
        if out_features is None:
            self.out_indices = out_indices  # type: ignore[assignment]
        else:
            self.out_features = out_features
            end = len(self.stage_names)
            given = [i + end if i < 0 else i for i in out_indices or ()]
            if given and given != list(self.out_indices):
                raise ValueError(
                    f"out_features {out_features} and out_indices {out_indices} select different "
                    f"feature maps, expected out_indices {list(self.out_indices)}"
                )
        super().__init__(**others)

    @property
    def stage_names(self) -> list[str]:
        """Names of the feature maps that a backbone can return."""
        return ["stem", *(f"stage{i + 1}" for i in range(self.depth))]


class OnescanSegmentationConfig(_NativeFields, PreTrainedConfig):
    """Config of segmentation models: the fields of `DensePredictorConfig`, for two axes.

    `num_labels` is out_channels. Labels of the value `semantic_loss_ignore_index` have no loss.

    >>> config = OnescanSegmentationConfig(num_labels=3, hidden_size=48, patch_size=[8, 8])
    >>> config.width, config.decoder, config.semantic_loss_ignore_index
    (48, 'pyramid', 255)
    """

    model_type = "onescan_segmentation"
    attribute_map = {  # noqa: RUF012
        "hidden_size": "width",
        "num_hidden_layers": "depth",
        "num_channels": "channels",
        "initializer_range": "init_std",
    }
    auto_classes = {  # noqa: RUF012
        "AutoModelForSemanticSegmentation": "OnescanForSemanticSegmentation",
        "AutoImageProcessor": "OnescanImageProcessor",
    }

    def __init__(self, *, semantic_loss_ignore_index: int = 255, **fields: Any) -> None:
        others = self._set_native_fields(DensePredictorConfig(), fields)
        if len(self.image_size) != IMAGE_AXES:
            raise ValueError(
                f"image_size is {tuple(self.image_size)}, expected two numbers: segmentation "
                "models of transformers read images"
            )
        self.semantic_loss_ignore_index = semantic_loss_ignore_index
        super().__init__(**others)
