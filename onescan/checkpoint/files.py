"""Atomic writes, and JSON with checksums."""

import contextlib
import json
import math
import os
import re
import reprlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

PARTIAL = ".partial"  # suffix of unfinished writes; ignored, and removed by the next write
CHECKSUM = "checksum"  # last entry of a JSON object


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file or folder under a temporary name, flush it to disk, and rename it to `path`.

    An existing file is replaced; a folder must not exist yet.

    Args:
        path: Final path.
        write: Called with the temporary path; creates the file or folder there.

    Raises:
        OSError: If it cannot be written. The message names the folder and the cause.
    """
    with writing(path.parent):
        partial = begin(path)
        try:
            write(partial)
            finish(path)
        except OSError:
            remove(partial)  # free the space, because the disk may be full
            raise


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text file like `write_atomically`, with the same bytes on every system."""
    write_atomically(path, lambda partial: partial.write_bytes(text.encode()))


def begin(path: Path) -> Path:
    """Create the parent folder of `path`, and return the temporary path to write to."""
    partial = partial_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(partial)
    return partial


def finish(path: Path) -> None:
    """Flush the temporary file or folder to disk, and rename it to `path`."""
    partial = partial_of(path)
    for written in [partial, *partial.rglob("*")]:
        _sync(written)
    partial.replace(path)
    _sync(path.parent)
    with contextlib.suppress(PermissionError):  # it may not be readable
        _sync(path.parent.parent)  # because the parent may be new as well


def remove(path: Path) -> None:
    """Remove a file or folder if it exists; a folder is renamed first, so that removal is atomic.

    For a symbolic link, only the link is removed, never its target.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    elif path.suffix == PARTIAL:
        shutil.rmtree(path)  # does not follow symbolic links
    else:
        partial = partial_of(path)
        remove(partial)
        path.rename(partial)
        remove(partial)


def remove_from(folder: Path, names: re.Pattern[str], *, but: Path | None = None) -> None:
    """Remove entries whose name matches `names`, and the folder itself if it is empty afterwards.

    Args:
        folder: Folder to clean up; may be missing.
        names: Pattern of the whole name, without the suffix of unfinished writes.
        but: Entry to keep.
    """
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if path != but and names.fullmatch(path.name.removesuffix(PARTIAL)):
            remove(path)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def check_regular(path: Path, *, folder: bool = False) -> None:
    """Check that a path to be written either does not exist, or is a regular file or folder.

    Raises:
        ValueError: If it is a symbolic link, or a file instead of a folder or vice versa.
    """
    kind = "folder" if folder else "file"
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link, expected a {kind}")
    if path.exists() and not (path.is_dir() if folder else path.is_file()):
        raise ValueError(f"{path} exists but is not a {kind}")


def check_writable(name: str, path: Path, *, folder: bool = False) -> None:
    """Check before any work that a file, or files in a folder, can be written to a path.

    Args:
        name: Name of the path, for the error message.
        path: The path.
        folder: Whether the path is that of a folder.

    Raises:
        ValueError: If it is a folder instead of a file or vice versa, or if nothing can be written
            to the folder that holds it or will hold it.
    """
    if path.exists() and path.is_dir() != folder:
        kinds = ("a file", "a folder") if folder else ("a folder", "a file")
        raise ValueError(f"{name} is '{path}', which is {kinds[0]}, expected {kinds[1]}")
    parents = (path, *path.parents) if folder else path.parents
    parent = next(each for each in parents if each.exists())
    if not parent.is_dir():
        raise ValueError(f"{name} is '{path}', but {parent} is not a folder")
    if not os.access(parent, os.W_OK):
        raise ValueError(f"{name} is '{path}', but nothing can be written to {parent}")


def partial_of(path: Path) -> Path:
    """Return the temporary path of an unfinished write, in the same folder as `path`."""
    return path.with_name(path.name + PARTIAL)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise errors of the file system again, as one line that names the folder.

    Raises:
        OSError: With the folder and the cause.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        saved = any(path.suffix != PARTIAL for path in folder.glob("*"))
        intact = "; files saved earlier are intact" if saved else ""
        raise OSError(f"cannot write to {folder}: {reason}{intact}") from error


def damaged(source: Path | str, problem: object, remedy: str) -> ValueError:
    """Return the error for a damaged file.

    Args:
        source: The file, or a line of it.
        problem: The cause, as an exception, or the content that was found instead.
        remedy: What the user can do about it.
    """
    what = problem if isinstance(problem, Exception) else f"it holds {reprlib.repr(problem)}"
    return ValueError(f"{source} is damaged ({what}): {remedy}")


def parse_json(content: bytes, source: Path | str, remedy: str) -> Any:
    """Parse JSON.

    Args:
        content: Content of the file, or of one line of it.
        source: Source of the content, for the error message.
        remedy: What the user can do, for the error message.

    Raises:
        ValueError: If it is not valid JSON, or nested too deeply.
    """
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise damaged(source, error, remedy) from error


def is_number(value: object) -> bool:
    """Return whether a value parsed from JSON is a number that a float can represent.

    >>> is_number(0.5), is_number(10**400), is_number("1")
    (True, False, False)
    """
    is_whole = isinstance(value, int) and abs(value) <= sys.float_info.max
    return is_whole or isinstance(value, float)


def numbers(data: object) -> dict[str, Any] | None:
    """Return the numbers of a JSON object, with NaN for null; None if it holds anything else.

    >>> numbers({"loss": None, "accuracy": 0.5}), numbers({"loss": "low"})
    ({'loss': nan, 'accuracy': 0.5}, None)
    """
    if not isinstance(data, dict):
        return None
    values = {name: math.nan if value is None else value for name, value in data.items()}
    return values if all(map(is_number, values.values())) else None


def finite(data: Any) -> Any:
    """Return JSON types with None for numbers that are not finite, which JSON cannot represent.

    >>> finite({"losses": [0.5, float("nan")]})
    {'losses': [0.5, None]}
    """
    if isinstance(data, Mapping):
        return {name: finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def to_json(data: Mapping[str, Any], *, indent: int | None = None) -> str:
    r"""Serialize a JSON object, and append a checksum as its last entry.

    Numbers that are not finite become null.

    >>> to_json({"steps": 3})
    '{"steps": 3, "checksum": "6f35973e41fd89bc"}\n'
    """
    return _with_checksum(finite(data), indent)


def _with_checksum(data: Mapping[str, Any], indent: int | None) -> str:
    content = json.dumps(data, indent=indent)
    checksum = sha256(content.encode()).hexdigest()[:16]
    return json.dumps({**data, CHECKSUM: checksum}, indent=indent) + "\n"


def from_json(content: bytes, source: Path | str, remedy: str, *, indent: int | None = None) -> Any:
    """Parse the output of `to_json`, and return it without the checksum.

    Raises:
        ValueError: If any byte has changed.
    """
    data = parse_json(content, source, remedy)
    if isinstance(data, dict) and matches(data, content, indent=indent):
        return data
    raise damaged(source, ValueError("checksum mismatch"), remedy)


def matches(data: dict[str, Any], content: bytes, *, indent: int | None = None) -> bool:
    """Return whether `content` equals the output of `to_json`; removes the checksum from `data`.

    NaN and infinity, which version 0.26 and earlier ones wrote, are accepted.
    """
    if data.pop(CHECKSUM, None) is None:
        return False
    try:
        return _with_checksum(data, indent).encode() == content
    except RecursionError:
        return False


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in a folder, by name."""
    return {path.name: _digest(path) for path in sorted(folder.iterdir())}


def check_digests(
    folder: Path, files: Mapping[str, Any], remedy: str, *, but: str, links: bool = False
) -> None:
    """Check that a folder contains exactly the listed files, unchanged.

    Args:
        folder: The folder.
        files: Digests by file name, from `digests`.
        remedy: What the error message recommends.
        but: Name of the file that contains the list.
        links: Accept symbolic links, of which folders downloaded from a hub consist.

    Raises:
        ValueError: If a file is missing, changed or not listed; names the file.
    """
    existing = {path.name for path in folder.iterdir()} - {but}
    for name in sorted(existing ^ files.keys()):
        problem = "is missing" if name in files else "is not in its list of files"
        raise damaged(folder, ValueError(f"{name} {problem}"), remedy)
    for name, digest in files.items():
        is_allowed = (folder / name).is_file() if links else is_own_file(folder / name)
        if not is_allowed or _digest(folder / name) != digest:
            mismatch = ValueError("checksum mismatch")
            raise damaged(folder / name, mismatch, remedy)


def is_own_file(path: Path) -> bool:
    """Return whether `path` is a regular file, not a symbolic link."""
    return path.is_file() and not path.is_symlink()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    if os.name != "posix":  # other systems cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
