"""Save and load transformers models whose attention was replaced by `onescan.nn`.

The folder is in transformers' format, except for three entries of config.json: "model_type" is
"onescan_linearized", so that transformers never loads the model with softmax attention;
"base_model_type" is its actual type; and "onescan_attention" describes the replaced modules. With
trust_remote_code=True, the Auto classes import this package, which registers the model type.
"""

import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from safetensors import safe_open
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from onescan.checkpoint.files import write_text_atomically
from onescan.checkpoint.hub import find_folder
from onescan.checkpoint.run_folder import LINEARIZED
from onescan.checks import LOAD_ERRORS, in_a_line
from onescan.integrations import REMOTE_MODULE, write_remote_module
from onescan.messages import named_type
from onescan.nn.replace import describe_replacements, repeat_replacements

MODEL_TYPE, BASE_TYPE, ATTENTION = LINEARIZED, "base_model_type", "onescan_attention"
CONFIG, MIXER = "config.json", ".attention.mixer."
NOT_IN_CONFIG = ("attn_implementation", "dtype", "torch_dtype")  # options of the model alone
AUTO_CLASSES = (
    "AutoModel",
    "AutoModelForAudioClassification",
    "AutoModelForAudioFrameClassification",
    "AutoModelForCTC",
    "AutoModelForDepthEstimation",
    "AutoModelForImageClassification",
    "AutoModelForMaskedImageModeling",
    "AutoModelForMaskedLM",
    "AutoModelForMultipleChoice",
    "AutoModelForNextSentencePrediction",
    "AutoModelForPreTraining",
    "AutoModelForQuestionAnswering",
    "AutoModelForSemanticSegmentation",
    "AutoModelForSequenceClassification",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForTokenClassification",
    "AutoModelForVideoClassification",
    "AutoModelForZeroShotImageClassification",
)


class OnescanLinearizedConfig(PreTrainedConfig):
    """Config of a saved model with replaced attention, with the fields of its original config."""

    model_type = MODEL_TYPE

    def __init__(
        self, base_model_type: str = "", onescan_attention: Any = (), **fields: Any
    ) -> None:
        self.base_model_type = base_model_type
        self.onescan_attention = onescan_attention
        super().__init__(**fields)
        for name, value in fields.items():
            if not hasattr(self, name):  # such as use_cache, which the base class drops
                setattr(self, name, value)

    def to_base(self) -> PreTrainedConfig:
        """Return the config of the model itself.

        Raises:
            ValueError: If the type of the model is missing or unknown.
        """
        fields = self.to_dict()
        del fields["model_type"], fields[ATTENTION]
        fields.pop("auto_map", None)
        kind = fields.pop(BASE_TYPE)
        if kind not in CONFIG_MAPPING or kind == MODEL_TYPE:
            raise ValueError(
                f"{BASE_TYPE} is {kind!r} in config.json, expected a model type that transformers "
                "supports"
            )
        config: PreTrainedConfig = CONFIG_MAPPING[kind].from_dict(fields)
        return config


def save_linearized(model: Any, folder: Any, *, processor: Any = None, **options: Any) -> None:
    """Save a transformers model whose attention was replaced.

    Args:
        model: Model, after `onescan.nn.replace_attention` or `onescan.linearize`.
        folder: Folder to write, for `load_linearized` and transformers' Auto classes. If it exists,
            the files of an earlier model are replaced.
        processor: Its tokenizer or image processor, to save it as well.
        options: Options of ``save_pretrained``, except push_to_hub.

    Raises:
        ValueError: If it is not a transformers model, its attention was not replaced, or
            transformers cannot save its weights so that they can be loaded.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is {named_type(model)}, expected a transformers model")
    if processor is not None and not hasattr(processor, "save_pretrained"):
        raise ValueError(
            f"processor is {named_type(processor)}, expected a tokenizer or image processor"
        )
    if options.pop("push_to_hub", False):
        raise ValueError(
            "push_to_hub is True, which is not supported here: save the model, and call "
            "push_to_hub of the model that load_linearized returns"
        )
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder is '{folder}', which is a file")
    attention = describe_replacements(model)
    if not attention:
        raise ValueError(
            "model has no replaced attention; call onescan.nn.replace_attention or "
            "onescan.linearize first"
        )
    base = _base_class(type(model))
    folder.parent.mkdir(parents=True, exist_ok=True)
    # There must never be a folder with the original config, which transformers would load with
    # random softmax attention.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        partial = Path(temporary)
        base.save_pretrained(model, partial, **options)
        path = partial / CONFIG
        if not path.exists():  # not the main process
            return
        if processor is not None:
            processor.save_pretrained(partial)
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields |= {
            "architectures": [base.__name__],
            "model_type": MODEL_TYPE,
            BASE_TYPE: model.config.model_type,
            ATTENTION: attention,
            "auto_map": {"AutoConfig": f"{REMOTE_MODULE}.{OnescanLinearizedConfig.__name__}"},
        }
        # importing the package registers the Auto classes
        write_remote_module(partial, __package__, [OnescanLinearizedConfig.__name__])
        write_text_atomically(path, json.dumps(fields, indent=2, sort_keys=True) + "\n")
        _check_names(model, partial, options)
        _move_files(partial, folder)


def _check_names(model: Any, folder: Path, options: Any) -> None:
    """Raise ValueError if weights of linear attention are lost when transformers renames them.

    For some types of models, it saves weights under other names, and renames them when it loads
    them. The patterns can match the names of our own weights.
    """
    known, saved = set(model.state_dict()), set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            saved |= set(weights.keys())
    if not any(MIXER in name for name in saved - known):
        return
    try:
        load_linearized(folder, device_map="meta", variant=options.get("variant"))
    except ValueError as error:
        raise ValueError(
            f"model cannot be saved, because transformers renames weights of "
            f"{model.config.model_type} models: {in_a_line(error)}; save model.state_dict() with "
            "safetensors instead"
        ) from error


def _move_files(source: Path, target: Path) -> None:
    """Move all files into a folder, and remove the weights of an earlier model from it."""
    target.mkdir(exist_ok=True)
    new = {path.name for path in source.iterdir()}
    if any(name.endswith(".safetensors") for name in new):
        for old in [*target.glob("*.safetensors"), *target.glob("*.safetensors.index.json")]:
            if old.name not in new:
                old.unlink()
    for name in sorted(new, key=lambda name: name == CONFIG):  # the config last
        if (target / name).is_dir():
            shutil.rmtree(target / name)
        (source / name).replace(target / name)


def load_linearized(name: Any, *, auto_class: str | None = None, **options: Any) -> Any:
    """Load a transformers model that `save_linearized` saved, in evaluation mode.

    Nothing is unpickled, and no code from the folder is executed. ``save_pretrained`` of the model
    saves it as `save_linearized` does. After ``import onescan.integrations.transformers``, the Auto
    classes of transformers also load such folders.

    Args:
        name: Folder, or a name on the Hugging Face Hub.
        auto_class: Name of transformers' Auto class that selects the head, such as
            "AutoModelForSequenceClassification". By default, the saved head is used.
        options: Options of ``from_pretrained``, such as dtype or num_labels.

    Raises:
        FileNotFoundError: If there is no such folder, and it cannot be downloaded.
        ValueError: If its config or weights are damaged or missing.
    """
    if not isinstance(name, str | os.PathLike):
        raise ValueError(f"name is {named_type(name)}, expected a folder or a name on the hub")
    hub = {k: options.pop(k) for k in ("revision", "token", "cache_dir") if k in options}
    folder = find_folder(name, **hub)
    try:
        config: Any = options.pop("config", None)
        if config is None:
            of_model = {k: options.pop(k) for k in NOT_IN_CONFIG if k in options}
            config, options = _read_config(folder, options)
            options |= of_model
        base_config = config.to_base()
        base = _class_of(config, base_config, auto_class)
        kind: Any = _linearized(base, config.onescan_attention)
        options |= {"use_safetensors": True, "trust_remote_code": False}
        model, info = kind.from_pretrained(
            folder, config=base_config, output_loading_info=True, **options
        )
    except (ValueError, *LOAD_ERRORS) as error:
        raise ValueError(f"{str(name)!r} cannot be loaded: {in_a_line(error)}") from error
    if lost := _lost_weights(config, base_config, base, info["missing_keys"]):
        raise ValueError(f"{str(name)!r} is damaged: it lacks weights, such as {lost[0]}")
    return model


def _lost_weights(
    config: Any, base_config: Any, base: type[PreTrainedModel], missing: Collection[str]
) -> list[str]:
    """Return the missing weights that the saved model had: not those of a new head."""
    if not missing:
        return []
    saved: set[str] = set()
    if config.architectures:
        with torch.device("meta"):
            model = _class_of(config, base_config, None)(base_config)
        saved = {_without_prefix(name, model) for name in model.state_dict()}
    return sorted(name for name in missing if MIXER in name or _without_prefix(name, base) in saved)


def _without_prefix(name: str, model: Any) -> str:
    """Return the name of a weight in the base model: without "bert.", for example."""
    return name.removeprefix(f"{model.base_model_prefix}.")


def _read_config(folder: Path, options: Any) -> tuple[OnescanLinearizedConfig, dict[str, Any]]:
    """Return the config of a folder, and the options that are not for the config."""
    fields, options = PreTrainedConfig.get_config_dict(folder, **options)
    kind = fields.get("model_type")
    if kind != MODEL_TYPE:
        raise ValueError(
            f"its model_type is {kind!r}, expected {MODEL_TYPE!r}: it was not written by "
            "save_linearized"
        )
    config, options = OnescanLinearizedConfig.from_dict(
        fields, return_unused_kwargs=True, **options
    )
    return config, options


def _base_class(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the transformers class of a model, which `load_linearized` may have loaded."""
    return next(base for base in kind.__mro__ if "_onescan_attention" not in vars(base))


def _class_of(config: Any, base_config: Any, auto_class: str | None) -> type[PreTrainedModel]:
    """Return the class that a config or an Auto class selects."""
    if auto_class is not None:
        mapping = getattr(transformers, auto_class)._model_mapping
        if type(base_config) not in mapping:
            raise ValueError(f"{auto_class} does not support {base_config.model_type} models")
        found: Any = mapping[type(base_config)]
        return found[0] if isinstance(found, tuple) else found
    name = (config.architectures or ["nothing"])[0]
    found = getattr(transformers, name, None)
    if found is None:  # encoders such as WhisperEncoder are not exported
        module = type(base_config).__module__.replace(".configuration_", ".modeling_")
        found = getattr(importlib.import_module(module), name, None)
    if not isinstance(found, type) or not issubclass(found, PreTrainedModel):
        raise ValueError(f"architectures names {name}, expected a transformers model class")
    return found


def _linearized(base: type[PreTrainedModel], attention: Any) -> type[PreTrainedModel]:
    """Return a subclass whose models have replaced attention, as described."""

    class Linearized(base):  # type: ignore[valid-type, misc]
        _onescan_attention: ClassVar[Any] = attention

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            repeat_replacements(self, _renamed(attention, self))

        def save_pretrained(self, save_directory: Any, **options: Any) -> None:
            save_linearized(self, save_directory, **options)

    Linearized.__name__ = Linearized.__qualname__ = base.__name__
    Linearized.__module__ = base.__module__
    return Linearized


def _renamed(attention: Any, model: PreTrainedModel) -> Any:
    """Return the description for a model with a head other than the saved one, or without a head.

    The names of modules then begin with that of the base model, or do not: "bert.encoder" of
    BertForMaskedLM is "encoder" of BertModel.
    """
    names, prefix = dict(model.named_modules()), f"{model.base_model_prefix}."

    def renamed(name: Any) -> Any:
        if name in names or not isinstance(name, str):
            return name
        return name.removeprefix(prefix) if name.startswith(prefix) else prefix + name

    try:
        return [
            each | {"modules": [renamed(name) for name in each["modules"]]} for each in attention
        ]
    except (KeyError, TypeError):
        return attention  # damaged, which `repeat_replacements` reports


def _auto_model(auto_class: str) -> Any:
    """Return the class that an Auto class calls for a config of a saved linearized model."""

    def from_pretrained(cls: Any, name: Any, *_: Any, **options: Any) -> Any:
        return load_linearized(name, auto_class=auto_class, **options)

    return type(
        auto_class.replace("AutoModel", "OnescanLinearizedModel"),
        (),
        {
            "config_class": OnescanLinearizedConfig,
            "from_pretrained": classmethod(from_pretrained),
        },
    )


def register() -> None:
    """Let the Auto classes of transformers load saved linearized models."""
    transformers.AutoConfig.register(MODEL_TYPE, OnescanLinearizedConfig)
    for name in AUTO_CLASSES:
        getattr(transformers, name).register(OnescanLinearizedConfig, _auto_model(name))
