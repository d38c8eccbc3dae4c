"""Read a model of another library: its config and its tensors, from a folder, a file or memory."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from onescan import zoo
from onescan.checkpoint.hub import download, is_hub_name
from onescan.checks import in_a_line
from onescan.configs import ModelConfig
from onescan.messages import named_type

CONFIG, SUFFIX = "config.json", ".safetensors"
SHARD = re.compile(rf".*-\d+-of-0*[1-9]\d*{re.escape(SUFFIX)}")
PIPELINE = "transformer"  # folder of the denoiser in a pipeline of diffusers


class Tensors:
    """The tensors of a model, each of which is used exactly once.

    >>> tensors = Tensors({"head.weight": torch.zeros(2, 3), "head.bias": torch.zeros(2)})
    >>> tensors.take("head.bias").shape, tensors.unused
    (torch.Size([2]), ['head.weight'])
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._all = dict(tensors)
        self._unused = dict.fromkeys(tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._all

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def renamed(self, rules: Mapping[str, str]) -> "Tensors":
        """Return all tensors, unused, under new names: regular expressions and replacements."""
        tensors: dict[str, Tensor] = {}
        for old, tensor in self._all.items():
            name = renamed(old, rules)
            if name in tensors:
                raise ValueError(f"several tensors of the source correspond to {name}")
            tensors[name] = tensor
        return Tensors(tensors)

    def get(self, name: str) -> Tensor:
        """Return a tensor without using it; ValueError if it is missing."""
        if name not in self._all:
            raise ValueError(f"the source has no tensor {name}")
        return self._all[name]

    def shape(self, name: str, axes: int | None = None) -> tuple[int, ...]:
        """Return the shape of a tensor without using it.

        Raises:
            ValueError: If it is missing, or has another number of axes than expected.
        """
        shape = tuple(self.get(name).shape)
        if axes is not None and len(shape) != axes:
            raise ValueError(f"{name} is {shape} in the source, expected {axes} axes")
        return shape

    def take(self, name: str) -> Tensor:
        """Return and use a tensor.

        Raises:
            ValueError: If it is missing, or was used before.
        """
        tensor = self.get(name)
        if name not in self._unused:
            raise ValueError(f"the tensor {name} is used twice")
        del self._unused[name]
        return tensor

    def drop(self, pattern: str) -> None:
        """Ignore the tensors whose whole name matches a regular expression."""
        for name in [name for name in self._unused if re.fullmatch(pattern, name)]:
            del self._unused[name]

    def take_equal(self, name: str, other: Tensor) -> None:
        """Use a tensor, if present, that must equal another one, such as a tied output layer.

        Raises:
            ValueError: If it differs.
        """
        if name in self and not torch.equal(self.take(name), other):
            raise ValueError(f"{name} differs from the weights that it is tied to")

    def count(self, prefix: str) -> int:
        """Return the number of layers called "{prefix}0.", "{prefix}1.", and so on."""
        indices = {m[1] for name in self if (m := re.match(re.escape(prefix) + r"(\d+)\.", name))}
        return len(indices)

    @property
    def unused(self) -> list[str]:
        """Names of the tensors that were neither used nor dropped."""
        return list(self._unused)


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A model of another library."""

    fields: Mapping[str, Any]
    """Its config; empty for a file of tensors."""
    tensors: Tensors

    def expect(self, **allowed: Any) -> None:
        """Check fields of the config, if present: each has the given value, or one of a tuple.

        Raises:
            ValueError: If a field has another value; names the field.
        """
        for name, values in allowed.items():
            choices = values if isinstance(values, tuple) else (values,)
            if name in self.fields and self.fields[name] not in choices:
                expected = " or ".join(map(repr, choices))
                raise ValueError(
                    f"{name} is {self.fields[name]!r} in the source's config, expected {expected}"
                )

    def need(self, name: str) -> Any:
        """Return a field of the config.

        Raises:
            ValueError: If it is missing.
        """
        if self.fields.get(name) is None:
            raise ValueError(f"the source's config has no {name}")
        return self.fields[name]

    def changed(
        self,
        *,
        fields: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        without: Iterable[str] = (),
    ) -> "Foreign":
        """Return the model with some fields and tensors replaced, and without some tensors."""
        kept = [name for name in self.tensors if name not in set(without)]
        return Foreign(
            fields={**self.fields, **(fields or {})},
            tensors=Tensors({name: self.tensors.get(name) for name in kept} | dict(tensors or {})),
        )


@dataclass(frozen=True, kw_only=True)
class Source:
    """How to convert the models of one architecture of another library; a row of `SOURCES`."""

    name: str
    """Library and architecture, for messages."""
    matches: Callable[[Foreign], bool]
    """Whether a model has this architecture; reads the config and the names of the tensors."""
    config: Callable[[Foreign], ModelConfig]
    """Return the native config; raises ValueError for a setting that is not supported."""
    weights: Callable[[Foreign], Mapping[str, Tensor]]
    """Return the tensors by their native names; tied tensors only under their first name."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the source's config may omit."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Regular expressions in names of tensors and their replacements, such as for names of older
    versions; applied first, in this order, before `matches`."""
    adapt: Callable[[Foreign], Foreign] = lambda foreign: foreign
    """Applied before `config` and `weights`, to models that store tensors or fields differently."""


def renamed(name: str, rules: Mapping[str, str]) -> str:
    """Apply regular expressions and their replacements to a name."""
    for pattern, replacement in rules.items():
        name = re.sub(pattern, replacement, name)
    return name


def read(source: str | Path | nn.Module, *, num_heads: int | None = None) -> Foreign:
    """Read the config and the tensors of a model.

    Args:
        source: A folder with config.json and safetensors files, a safetensors file, a name on the
            Hugging Face Hub, or a model in memory.
        num_heads: Number of attention heads, for sources without a config.

    Raises:
        FileNotFoundError: If there is no such file or folder, and it is no hub name.
        ValueError: If there are no safetensors files, or a file cannot be read.
    """
    extra = {} if num_heads is None else {"num_heads": num_heads}
    if isinstance(source, nn.Module):
        return Foreign(fields=_fields_of(source) | extra, tensors=Tensors(source.state_dict()))
    path = find(source)
    folder = path if path.is_dir() else path.parent
    config = folder / CONFIG
    fields = read_json(config) if config.is_file() else {}
    if num_heads is not None and fields.get("num_heads", num_heads) != num_heads:
        raise ValueError(
            f"num_heads is {num_heads}, but the source has {fields['num_heads']} heads"
        )
    return Foreign(fields=fields | extra, tensors=Tensors(_read_tensors(path)))


def find(source: str | Path) -> Path:
    """Return the folder or file of a source; a hub name is downloaded, without any code."""
    if not isinstance(source, str | Path):
        raise ValueError(
            f"source is {named_type(source)}, expected a folder, a file, a hub name or a model"
        )
    path = zoo.resolve(Path(source))
    if not path.exists():
        if not is_hub_name(source):
            raise FileNotFoundError(f"there is no file or folder {source}")
        path = download(str(source))
    if path.is_dir() and not (path / CONFIG).is_file() and (path / PIPELINE / CONFIG).is_file():
        return path / PIPELINE
    return path


def _fields_of(model: nn.Module) -> dict[str, Any]:
    """Return the config of a model in memory, or the settings of its layers if it has none.

    The models of timm and the original DiT have no config.
    """
    config: Any = getattr(model, "config", None)
    if config is not None:
        fields = dict(config.to_dict() if hasattr(config, "to_dict") else config)
        return {"model_class": type(model).__name__, **fields}
    heads = {getattr(m, "num_heads", None) for m in model.modules()}
    eps = {m.eps for m in model.modules() if isinstance(m, nn.LayerNorm)}
    act = {str(m) for name, m in model.named_modules() if name.endswith("mlp.act")}
    found: dict[str, set[Any]] = {
        "num_heads": heads - {None},
        "norm_eps": eps,
        "mlp.act": act,
        "global_pool": {getattr(model, "global_pool", "token")},
    }
    return {name: values.pop() for name, values in found.items() if len(values) == 1}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file with named values.

    Raises:
        ValueError: If it is damaged; names the file.
    """
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {in_a_line(error)}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is not a JSON object")
    return fields


def _read_tensors(path: Path) -> dict[str, Tensor]:
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    index = sorted(path.glob(f"*{SUFFIX}.index.json")) if path.is_dir() else []
    if index:  # of sharded weights
        shards = read_json(index[0]).get("weight_map")
        file_names = shards.values() if isinstance(shards, dict) else ()
        files = sorted({path / Path(str(name)).name for name in file_names})
        if missing := next((file.name for file in files if not file.is_file()), None):
            raise ValueError(f"{index[0]} names {missing}, but there is no such file")
    if path.is_file() and SHARD.fullmatch(path.name):
        raise ValueError(f"{path} is one of several shards, expected the folder that contains them")
    if not files or (path.is_file() and path.suffix != SUFFIX):
        raise ValueError(
            f"{path} holds no safetensors file; pickled weights are not read, convert them to "
            "safetensors with the library that wrote them"
        )
    if len(files) > 1 and not index:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{path} holds several safetensors files, expected one of them: {names}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise ValueError(f"{file} cannot be read: {in_a_line(error)}") from error
    return tensors
