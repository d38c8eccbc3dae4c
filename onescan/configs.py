"""Convert configs, which are nested frozen dataclasses, to JSON types and back, with type checks.

If a field is declared as a base class or a union, the class of its value is stored as "type". It is
looked up by name among the imported subclasses of the declared class, and among the names that the
package of the declared class exports, which may be imported on first use.
"""

import dataclasses
import inspect
import math
import re
import reprlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import wraps
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from onescan.messages import hint, named_type

# names in other libraries or earlier versions -> names in onescan's configs
OTHER_NAMES = {
    **dict.fromkeys(
        ("hidden_size", "embed_dim", "hidden_dim", "dim", "d_model", "n_embd"), "width"
    ),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "num_hidden_layers"), "depth"),
    **dict.fromkeys(
        ("num_heads", "n_head", "n_heads", "nhead", "num_attention_heads"), "mixer.num_heads"
    ),
    **dict.fromkeys(("img_size", "input_size"), "image_size"),
    **dict.fromkeys(("in_chans", "in_channels", "num_channels"), "channels"),
    **dict.fromkeys(("vocabulary_size", "n_vocab"), "vocab_size"),
    **dict.fromkeys(("num_labels", "n_classes"), "num_classes"),
    "mlp_ratio": "mlp.ratio",
    "causal": "direction",
    "gate_activation": "gate",
    "drop_path_rate": "drop_path",
}

# For configs from before 0.20: classes with a field `causal`, and the activation of classes whose
# field `gate` was a bool
LEGACY_CAUSAL = ("LightNetMixerConfig", "SoftmaxMixerConfig", "LinearDiffusionMixerConfig")
LEGACY_GATES = {"LightNetMixerConfig": "sigmoid", "MambaMixerConfig": "silu"}

INT64_LIMIT = 2**63  # larger integers cannot be stored in tensors or used as indices

ConfigT = TypeVar("ConfigT")


class CheckedConfig:
    """Base class of configs with a method `build` that checks the types of all fields first."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "build" in vars(cls):
            setattr(cls, "build", _with_checked_types(vars(cls)["build"]))  # noqa: B010 - mypy


def _with_checked_types(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `build` that raises ValueError if a field has a wrong type."""

    @wraps(build)
    def checked(self: Any, **options: Any) -> Any:
        check_types(self)
        return build(self, **options)

    return checked


class ModelConfig(CheckedConfig, ABC):
    """Base class of the configs of models."""

    @abstractmethod
    def build(self) -> Any:
        """Build the model, a `torch.nn.Module`.

        Raises:
            ValueError: If a field has the wrong type, or fields contradict each other.
        """

    @abstractmethod
    def example_inputs(self) -> tuple[Any, ...]:
        """Return arguments for the model's forward, one example of the default size.

        Used to count operations and to export. Tensors are on torch's default device.
        """


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a config to JSON types.

    Raises:
        ValueError: If a field has a value that JSON cannot represent; names the field.
    """
    return _fields_to_plain(config, "")


def from_dict(cls: type[ConfigT], data: Mapping[str, Any]) -> ConfigT:
    """Build a config of class `cls` from the output of `to_dict`.

    Missing fields take their defaults. An int is accepted for a float, and a list for a tuple.
    Fields that earlier versions stored are converted to the current ones.

    Raises:
        ValueError: If a field is unknown or missing, a value has the wrong type, or a "type" is not
            an imported class; names the dotted path and what is expected.
    """
    try:
        config: ConfigT = _load(data, cls, "")
    except RecursionError as error:
        raise ValueError("the config is nested too deeply") from error
    return config


def replace(config: ConfigT, changes: Mapping[str, Any]) -> ConfigT:
    """Return `config` with changed fields, by dotted name: {"mixer.num_heads": 3, "width": 64}.

    Raises:
        ValueError: If a name is unknown (names the closest match), or a value has the wrong type.
    """
    data = to_dict(config)
    for dotted, value in changes.items():
        *above, name = dotted.split(".")
        fields = data
        for part in above:
            fields = fields.setdefault(part, {})
            if not isinstance(fields, dict):
                raise ValueError(f"{dotted}: {part} is {fields!r}, which has no field {name!r}")
        fields[name] = _plain(value, None, dotted)
    return from_dict(type(config), data)


def check_types(config: Any, path: str = "") -> None:
    """Raise ValueError if a field of a config, or of a config in it, has a value of a wrong type.

    `from_dict` checks the same and more; this is for configs that are constructed directly.
    """
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, declared = getattr(config, field.name), hints[field.name]
        name = _join(path, field.name)
        if not any(_has_type(value, member) for member in _members(declared)):
            is_class = isinstance(value, type)
            shown = f"the class {value.__name__}" if is_class else reprlib.repr(value)
            raise ValueError(f"{name} is {shown}, expected {_expected(declared)}")
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            check_types(value, name)


def differences(a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    """Return the differences of two configs: dotted path, value in `a`, value in `b`."""
    return list(_differences(a, b, ""))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _fields_to_plain(config: Any, path: str) -> dict[str, Any]:
    hints = get_type_hints(type(config))
    return {
        field.name: _plain(getattr(config, field.name), hints[field.name], _join(path, field.name))
        for field in dataclasses.fields(config)
    }


def _plain(value: Any, declared: Any, path: str) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        is_declared = [type(value)] == [m for m in _members(declared) if m is not type(None)]
        label = {} if is_declared else {"type": type(value).__name__}
        return label | _fields_to_plain(value, path)
    if isinstance(value, list | tuple):
        return [_plain(item, None, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path} is {value}, expected a finite number")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{path} is {named_type(value)}, which a config cannot contain")


def _load(value: Any, declared: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return _load_config(value, declared, path)
    for member in _members(declared):
        try:
            return _convert(value, member, path)
        except TypeError:  # try the other members of a union
            continue
    raise ValueError(
        f"{path or 'the config'} is {reprlib.repr(value)}, expected {_expected(declared)}"
    )


def _expected(declared: Any) -> str:
    """Format a type; for a base class of configs, with the classes to choose from."""
    names = [cls.__name__ for member in _members(declared) for cls in _family(member)]
    choices = f", one of {', '.join(names)}" if len(names) > 1 else ""
    return f"{_type_name(declared)}{choices}"


def _load_config(data: Mapping[str, Any], declared: Any, path: str) -> Any:
    _import_exported(declared, data.get("type"))
    known = {cls.__name__: cls for member in _members(declared) for cls in _family(member)}
    if not known:
        raise ValueError(f"{path} is {reprlib.repr(dict(data))}, expected {_type_name(declared)}")
    members = [cls.__name__ for cls in _members(declared) if cls in known.values()]
    name = data.get("type", members[0] if len(members) == 1 else None)
    if not isinstance(name, str) or name not in known:
        choices = ", ".join(known)
        raise ValueError(f"{_join(path, 'type')} {_unknown(name)}; available: {choices}")
    return _load_fields(known[name], data, path)


def _import_exported(declared: Any, name: Any) -> None:
    """Import a class that the package of a declared class exports on first use."""
    for member in _members(declared):
        package = sys.modules.get(getattr(member, "__module__", "").rpartition(".")[0])
        if name in getattr(package, "__all__", ()):
            getattr(package, name)


def _unknown(name: Any) -> str:
    if name is None:
        return "is missing"
    return (
        f"{name!r} is not an imported class: import the file that defines it first "
        "(on the command line, with --import FILE.py)"
    )


def _load_fields(cls: Any, data: Mapping[str, Any], path: str) -> Any:
    data = _upgraded(cls.__name__, data)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    _check_names([name for name in data if name != "type"], fields, path)
    hints, values = get_type_hints(cls), {}
    for name, field in fields.items():
        if name in data:
            values[name] = _load(data[name], hints[name], _join(path, name))
        elif dataclasses.MISSING is field.default is field.default_factory:
            raise ValueError(f"{_join(path, name)} is missing, expected {_type_name(hints[name])}")
    return cls(**values)


def _upgraded(name: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a class, with those of earlier versions converted to the current ones.

    >>> _upgraded("SoftmaxMixerConfig", {"causal": True})
    {'direction': 'forward'}
    """
    fields = dict(data)
    if name in LEGACY_CAUSAL and isinstance(fields.get("causal"), bool) and "direction" not in data:
        fields["direction"] = "forward" if fields.pop("causal") else "both"
    if name in LEGACY_GATES and isinstance(fields.get("gate"), bool):
        activation = fields.pop("gate_activation", LEGACY_GATES[name])
        fields["gate"] = activation if fields["gate"] else "none"
    return fields


def _convert(value: Any, member: Any, path: str) -> Any:
    arguments = get_args(member)
    if get_origin(member) is tuple and isinstance(value, list | tuple):
        if arguments[1:] == (...,):
            arguments = arguments[:1] * len(value)
        if len(arguments) != len(value):
            raise TypeError
        items = zip(value, arguments, strict=True)
        return tuple(_load(item, each, f"{path}[{i}]") for i, (item, each) in enumerate(items))
    if get_origin(member) is Literal:
        fits = any(value == choice and type(value) is type(choice) for choice in arguments)
    elif member is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    elif member is int:
        fits = type(value) is int and abs(value) < INT64_LIMIT
    else:
        fits = type(value) is member
    if not fits:
        raise TypeError
    return value


def _has_type(value: Any, member: Any) -> bool:
    """Whether a value has a type; True for types that `from_dict` cannot load, such as `Any`.

    Numbers may be NumPy's, and tuples may be lists.
    """
    if get_origin(member) is tuple:
        items = get_args(member)
        if not isinstance(value, list | tuple):
            return False
        if items[1:] == (...,):
            items = items[:1] * len(value)
        return len(items) == len(value) and all(map(_has_type, value, items))
    if get_origin(member) is Literal:
        return type(value) in map(type, get_args(member))
    if member in (int, float):
        number = isinstance(value, Integral if member is int else Real)
        return number and not isinstance(value, bool)
    return not isinstance(member, type) or isinstance(value, member)


def _differences(a: Any, b: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if not (dataclasses.is_dataclass(a) and dataclasses.is_dataclass(b)):
        if a != b:
            yield path, a, b
    elif type(a).__name__ != type(b).__name__:  # by name, because a class may have been redefined
        yield _join(path, "type"), type(a).__name__, type(b).__name__
    else:
        for name in {field.name: None for each in (a, b) for field in dataclasses.fields(each)}:
            in_a, in_b = getattr(a, name, None), getattr(b, name, None)
            yield from _differences(in_a, in_b, _join(path, name))


def _members(declared: Any) -> tuple[Any, ...]:
    is_union = get_origin(declared) in (Union, UnionType)
    return get_args(declared) if is_union else (declared,)


def _family(cls: Any) -> Iterator[type]:
    """Yield the config classes that are instances of `cls`: itself and subclasses, if concrete."""
    if not isinstance(cls, type) or cls.__module__ == "builtins":
        return  # some libraries define dataclasses that subclass str
    if dataclasses.is_dataclass(cls) and not inspect.isabstract(cls):
        yield cls
    for subclass in type.__subclasses__(cls):
        yield from _family(subclass)


def _check_names(names: Iterable[str], fields: Collection[str], path: str) -> None:
    for name in names:
        if name not in fields:
            message = f"{_join(path, name)} is unknown"
            raise ValueError(f"{message}{_synonym(name, fields) or hint(name, fields)}")


def _synonym(name: str, fields: Collection[str]) -> str:
    """Return a hint at the field that another library calls `name`; empty if there is none."""
    known = OTHER_NAMES.get(name, "")
    return f"; onescan calls it {known!r}" if known.partition(".")[0] in fields else ""


def _type_name(declared: Any) -> str:
    """Format a type without the names of modules.

    >>> _type_name(int | Literal["auto"] | None)
    "int | Literal['auto'] | None"
    """
    if len(_members(declared)) > 1:
        return " | ".join(map(_type_name, _members(declared)))
    if declared is type(None):
        return "None"
    if isinstance(declared, type) and not get_args(declared):
        return declared.__name__
    return re.sub(r"[A-Za-z_][\w.]*\.(?=\w)", "", str(declared))
