"""Save and load weights as safetensors files with a checksum and notes.

The notes in the header contain the SHA-256 of the whole file, computed with zeros in place of the
digest itself, so any changed bit is detected.
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

from onescan.allocation import build_on_meta, build_unchecked
from onescan.checkpoint.files import damaged, finite, parse_json, write_atomically
from onescan.configs import ModelConfig

WEIGHTS, BEST = "model.safetensors", "best.safetensors"
AVERAGE = "ema.safetensors"  # if raw weights and EMA are evaluated
NOTES = "onescan"  # a single header entry, because the order of several is not fixed
DIGEST = "sha256"
MARK = rb"\"sha256\": \""  # escaped, because the notes are a JSON string in the header
ZEROS = "0" * 64
MAX_HEADER = 100_000_000  # bytes, as safetensors allows
REMEDY = "restore it from a backup"
REWRITE = (
    f"{REMEDY}, or remove it and run the command that wrote it again"  # not for best.safetensors
)
WRITTEN = {  # why a file may be missing
    WEIGHTS: "no checkpoint has been saved there",
    BEST: "training writes it at the first evaluation",
    AVERAGE: "only runs with training.reported_weights raw write it, at every checkpoint",
}
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
HALF = ("float16", "bfloat16")


class TensorSize(NamedTuple):
    """Shape and dtype of a tensor in memory or in a file."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.shape}" if self.dtype == "float32" else f"{self.shape} of {self.dtype}"


def whole_weights(model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Copy the full weights to the CPU.

    If weights are sharded, every process must call this. With keep=False, the result is empty.
    """
    weights = {}
    for name, tensor in distinct(model).items():
        gather = getattr(tensor, "full_tensor", None)  # avoids importing DTensor, which is slow
        tensor = gather() if gather else tensor
        if keep:
            weights[name] = tensor.detach().to("cpu", copy=True)
    return weights


def save_weights(path: Path, weights: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
    """Write weights and notes to a safetensors file, replacing an older file atomically.

    Numbers in the notes that are not finite become null.

    Raises:
        OSError: If the file cannot be written. An older file is not changed.
    """

    def write(partial: Path) -> None:
        partial.touch()
        mode = partial.stat().st_mode  # honor the user's umask, which safetensors ignores
        try:
            contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
            metadata = {NOTES: json.dumps({DIGEST: ZEROS, **finite(notes)})}
            save_file(contiguous, partial, metadata=metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        partial.chmod(mode)
        with partial.open("r+b") as file:
            offset, _, digest = _digest(file)
            file.seek(offset)
            file.write(digest.encode())

    write_atomically(path, write)


def read_weights(path: Path, remedy: str = REMEDY) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file that `save_weights` wrote, and verify its checksum.

    Args:
        path: The file.
        remedy: What the user can do about a damaged file, for the error message.

    Returns:
        The tensors, on the CPU, and the notes.

    Raises:
        ValueError: If any bit has changed.
        OSError: If the file cannot be read.
    """
    with _reading(path, remedy):
        return load_file(path), _checked_notes(path)


def read_notes(path: Path, remedy: str = REMEDY) -> dict[str, Any]:
    """Read only the notes, and verify the checksum; see `read_weights` for the errors."""
    with _reading(path, remedy):
        return _checked_notes(path)


def load_model(path: Path, config: ModelConfig) -> tuple[nn.Module, dict[str, Any]]:
    """Build a model and load its weights from a file.

    Shapes and dtypes are compared before anything is allocated. Tensors that are stored in float16
    or bfloat16 are converted to float32 if the model's are.

    Returns:
        The model, on the CPU in evaluation mode, and the notes.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the file is damaged, does not match the model (names the first tensor that
            differs), or the model does not fit into memory.
    """
    if not path.exists():
        raise missing(path)
    remedy = REMEDY if path.name == BEST else REWRITE
    stored = _sizes_in(path, remedy)
    try:
        empty = build_on_meta(config, max_tensors=2 * len(stored) + 100)  # tied tensors count twice
    except ValueError as error:
        raise ValueError(f"{path} does not match the model: {error}") from error
    if empty is not None:
        expected = sizes_of(distinct(empty))
        check_sizes(_widened(stored, expected), expected, path)
    tensors, notes = read_weights(path, remedy)
    model = build_unchecked(config)
    expected = sizes_of(distinct(model))
    check_sizes(_widened(stored, expected), expected, path)
    model.load_state_dict(tensors, strict=False)  # not strict: tied weights are stored once
    return model.eval(), notes


def missing(path: Path) -> FileNotFoundError:
    """Return the error for a file that a run does not have."""
    why = WRITTEN.get(path.name, f"its weights are in {WEIGHTS}")
    return FileNotFoundError(f"{path.parent} has no {path.name}: {why}")


def _widened(
    stored: Mapping[str, TensorSize], expected: Mapping[str, TensorSize]
) -> dict[str, TensorSize]:
    """Return stored sizes, with float32 for half precision where the model has float32."""
    return {
        name: size._replace(dtype="float32")
        if size.dtype in HALF and name in expected and expected[name].dtype == "float32"
        else size
        for name, size in stored.items()
    }


def sizes_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSize]:
    """Return the shape and dtype of each tensor."""
    return {
        name: TensorSize(tuple(x.shape), str(x.dtype).removeprefix("torch."))
        for name, x in tensors.items()
    }


def check_sizes(
    stored: Mapping[str, TensorSize], expected: Mapping[str, TensorSize], path: Path
) -> None:
    """Compare shapes and dtypes of stored tensors with those of the model.

    Raises:
        ValueError: Names the first tensor that is missing, unexpected, or differs.
    """
    for name in [*expected, *stored]:
        stored_size, expected_size = (sizes.get(name, "missing") for sizes in (stored, expected))
        if stored_size != expected_size:
            raise ValueError(
                f"{path} does not match the model: {name} is {stored_size} in the file and "
                f"{expected_size} in the model"
            )


def distinct(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters and buffers; tied tensors only under their first name."""
    tensors = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}


def _sizes_in(path: Path, remedy: str) -> dict[str, TensorSize]:
    with _reading(path, remedy), safe_open(path, framework="pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: TensorSize(tuple(part.get_shape()), _dtype(part.get_dtype()))
            for name, part in parts.items()
        }


def _dtype(name: str) -> str:
    """Convert the name of a dtype from safetensors to torch: I64 to int64, U8 to uint8."""
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
        raise ValueError("checksum mismatch")
    with safe_open(path, framework="pt") as file:
        notes = parse_json(file.metadata()[NOTES].encode(), "the header", "it is not valid JSON")
    if not isinstance(notes, dict):
        raise ValueError("the header has no notes")
    return {name: note for name, note in notes.items() if name != DIGEST}


def _digest(file: IO[bytes]) -> tuple[int, str, str]:
    """Return the offset of the digest in the file, the stored digest, and the computed one."""
    size = file.read(8)
    length = int.from_bytes(size, "little")
    header = file.read(length) if length <= MAX_HEADER else b""
    offset = header.find(MARK)
    if offset < 0:
        raise ValueError("no checksum")
    begin, end = offset + len(MARK), offset + len(MARK) + len(ZEROS)
    content = sha256(size + header[:begin] + ZEROS.encode() + header[end:])
    digest = file_digest(file, lambda: content).hexdigest()  # type: ignore[arg-type]
    return len(size) + begin, header[begin:end].decode("ascii", "replace"), digest
