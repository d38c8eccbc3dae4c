"""model.safetensors: the weights alone, in a format whose reading runs nobody's code.

The header's notes hold a SHA-256 of the whole file, in which the digest's own place counts as
zeros. So every changed bit is found, and a file is consistent by itself.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import file_digest, sha256
from pathlib import Path
from typing import IO, Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onescan.allocation import build_here, build_on_meta
from onescan.checkpoint.files import damaged, parse_json, write_atomically
from onescan.configs import ModelConfig

WEIGHTS, BEST = "model.safetensors", "best.safetensors"
NOTES = "onescan"  # one entry of the header: several would come in no fixed order
DIGEST = "sha256"
MARK = rb"\"sha256\": \""  # as it stands in the header, where the notes are a string
EMPTY = "0" * 64
MOST_HEADER = 100_000_000  # bytes, as safetensors allows
REMEDY = "bring it back from a copy"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class TensorSize(NamedTuple):
    """Of a tensor, in memory or in a file."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.shape}" if self.dtype == "float32" else f"{self.shape} of {self.dtype}"


def whole_weights(model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Copy the weights to the CPU; all processes call it where they are split, and one keeps it."""
    whole = {}
    for name, tensor in distinct(model).items():
        gather = getattr(tensor, "full_tensor", None)  # DTensor's, whose import is slow
        tensor = gather() if gather else tensor
        if keep:
            whole[name] = tensor.detach().to("cpu", copy=True)
    return whole


def save_weights(path: Path, weights: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
    """Write weights to a file, in place of older ones, with notes in its header.

    Raises:
        OSError: they cannot be written; the older ones are intact.
    """

    def write(partial: Path) -> None:
        partial.touch()
        mode = partial.stat().st_mode  # as the user has files made, which safetensors does not ask
        try:
            contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
            metadata = {NOTES: json.dumps({DIGEST: EMPTY, **notes})}
            save_file(contiguous, partial, metadata=metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        partial.chmod(mode)
        with partial.open("r+b") as file:
            place, _, digest = _digest(file)
            file.seek(place)
            file.write(digest.encode())

    write_atomically(path, write)


def read_weights(path: Path, remedy: str = REMEDY) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_weights` wrote: the tensors, on the CPU, and the notes.

    Raises:
        ValueError: any bit of it was changed.
        OSError: it cannot be read.
    """
    with _reading(path, remedy):
        return load_file(path), _checked_notes(path)


def read_notes(path: Path, remedy: str = REMEDY) -> dict[str, Any]:
    """Read the notes alone; raises as `read_weights`."""
    with _reading(path, remedy):
        return _checked_notes(path)


def load_model(path: Path, config: ModelConfig) -> tuple[nn.Module, dict[str, Any]]:
    """Build a model and fill it with the weights in a file.

    Sizes are compared before anything is allocated.

    Returns:
        The model, on the CPU in evaluation mode, and the file's notes.

    Raises:
        FileNotFoundError: there are no weights.
        ValueError: they are damaged, or of another model (names the first tensor that differs), or
            the model does not fit into this machine's memory.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path.parent} has no {path.name}: no checkpoint has been saved there"
        )
    stored = _sizes_in(path)
    try:
        empty = build_on_meta(config, most_tensors=2 * len(stored) + 100)  # tied ones count twice
    except ValueError as error:
        raise ValueError(f"{path} is of another model: {error}") from error
    if empty is not None:
        check_sizes(stored, sizes_of(distinct(empty)), path)
    tensors, notes = read_weights(path)
    model = build_here(config)
    check_sizes(stored, sizes_of(distinct(model)), path)
    model.load_state_dict(tensors, strict=False)  # not strict: tied weights are stored once
    return model.eval(), notes


def sizes_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSize]:
    """Shapes and dtypes by name."""
    return {
        name: TensorSize(tuple(x.shape), str(x.dtype).removeprefix("torch."))
        for name, x in tensors.items()
    }


def check_sizes(
    stored: Mapping[str, TensorSize], wanted: Mapping[str, TensorSize], path: Path
) -> None:
    """Raise ValueError naming the first tensor that is missing, left over, or of another size."""
    for name in [*wanted, *stored]:
        there, here = (sizes.get(name, "missing") for sizes in (stored, wanted))
        if there != here:
            raise ValueError(f"{path} is of another model: {name} is {there} there and {here} here")


def distinct(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors, those that are one under two names only under the first."""
    tensors = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}


def _sizes_in(path: Path) -> dict[str, TensorSize]:
    with _reading(path, REMEDY), safe_open(path, framework="pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: TensorSize(tuple(part.get_shape()), _dtype(part.get_dtype()))
            for name, part in parts.items()
        }


def _dtype(name: str) -> str:
    """A dtype of safetensors as torch spells it: I64, U8, BOOL ..."""
    if name in DTYPES:
        return DTYPES[name]
    return name.lower() if name == "BOOL" else name.replace("U", "uint").replace("I", "int")


@contextmanager
def _reading(path: Path, remedy: str) -> Iterator[None]:
    if not path.is_file():
        raise damaged(path, ValueError("it is not a file"), remedy)
    try:
        yield
    except (SafetensorError, KeyError, ValueError) as error:
        raise damaged(path, error, remedy) from error


def _checked_notes(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        _, stored, digest = _digest(file)
    if stored != digest:
        raise ValueError("its checksum does not match its content")
    with safe_open(path, framework="pt") as file:
        notes = parse_json(file.metadata()[NOTES].encode(), "the header", "see there")
    if not isinstance(notes, dict):
        raise ValueError("its header has no notes")
    return {name: note for name, note in notes.items() if name != DIGEST}


def _digest(file: IO[bytes]) -> tuple[int, str, str]:
    """Where a file's digest stands, what stands there, and what it should be."""
    size = file.read(8)
    length = int.from_bytes(size, "little")
    header = file.read(length) if length <= MOST_HEADER else b""
    place = header.find(MARK)
    if place < 0:
        raise ValueError("it has no checksum")
    begin, end = place + len(MARK), place + len(MARK) + len(EMPTY)
    content = sha256(size + header[:begin] + EMPTY.encode() + header[end:])
    digest = file_digest(file, lambda: content).hexdigest()  # type: ignore[arg-type]
    return len(size) + begin, header[begin:end].decode("ascii", "replace"), digest
