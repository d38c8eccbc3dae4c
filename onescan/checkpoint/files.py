"""Files that survive a kill at any moment, and checksums that reveal any damage to them."""

import json
import os
import re
import reprlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import file_digest, sha256
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

LOCK = "lock"
PARTIAL = ".partial"  # what a killed write leaves ends so, is ignored, and goes at the next write
CHECKSUM = "checksum"  # the last entry of a JSON object with a checksum


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file or a folder, and put it in place once it is whole on the disk.

    A file that was at `path` is replaced; a folder must not be there yet.

    Raises:
        OSError: it cannot be written; says in which folder, and why.
    """
    with writing(path.parent):
        partial = begin(path)
        try:
            write(partial)
            finish(path)
        except OSError:
            remove(partial)  # what is of no use takes no room on a full disk
            raise


def begin(path: Path) -> Path:
    """Make way for what is to be at `path`, and say where to write it first."""
    partial = partial_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(partial)
    return partial


def finish(path: Path) -> None:
    """Put what was written in place, once it is whole on the disk."""
    partial = partial_of(path)
    for written in [partial, *partial.rglob("*")]:
        _sync(written)
    partial.replace(path)
    for folder in (path.parent, path.parent.parent):  # the folder may be new too
        _sync(folder)


def remove(path: Path) -> None:
    """Remove a file or a folder, if there; a folder is out of sight before its parts go.

    Of a symbolic link the link alone is removed, never what it points to.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    elif path.suffix == PARTIAL:
        shutil.rmtree(path)  # which follows no links
    else:
        doomed = partial_of(path)
        remove(doomed)
        path.rename(doomed)
        remove(doomed)


def remove_from(folder: Path, names: re.Pattern[str], *, but: Path | None = None) -> None:
    """Remove what has such a name, whole or partial, and then the folder if nothing is left."""
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if path != but and names.fullmatch(path.name.removesuffix(PARTIAL)):
            remove(path)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def check_own(path: Path, *, folder: bool = False) -> None:
    """Make sure that a run may write to a path of its own, and that nothing leads elsewhere.

    Raises:
        ValueError: there is a symbolic link, or what is not a file, or not a folder.
    """
    kind = "folder" if folder else "file"
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link, expected a {kind}")
    if path.exists() and not (path.is_dir() if folder else path.is_file()):
        raise ValueError(f"{path} is not a {kind}, expected one")


def partial_of(path: Path) -> Path:
    """Where `path` is while it is not whole: beside it, so that a rename is all it takes."""
    return path.with_name(path.name + PARTIAL)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what goes wrong with a disk into one sentence.

    Raises:
        OSError: saying which folder, and why.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        saved = any(path.suffix != PARTIAL for path in folder.glob("*"))
        intact = "; what was saved before is intact" if saved else ""
        raise OSError(f"cannot write to {folder}: {reason}{intact}") from error


@contextmanager
def locked(folder: Path) -> Iterator[str]:
    """Keep other processes out of a folder for a while; the lock of one that is killed is gone.

    Yields:
        What the lock file says now and never said before.

    Raises:
        ValueError: another process is at work in it, or the lock is a symbolic link.
        OSError: it cannot be written to, or its disk has no locks.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        check_own(folder / LOCK)
        file = (folder / LOCK).open("a")
    with file:
        with writing(folder):
            _take(file, folder)
            token = uuid4().hex
            file.truncate(0)
            file.write(token)
            file.flush()
        yield token


def _take(file: IO[str], folder: Path) -> None:
    if os.name != "posix":  # nothing else has such locks
        return
    from fcntl import LOCK_EX, LOCK_NB, lockf

    try:
        lockf(file, LOCK_EX | LOCK_NB)  # unlike flock's, not shared with forked readers
    except (BlockingIOError, PermissionError) as error:
        raise ValueError(
            f"another process is at work in {folder}: wait for its end, or choose another folder"
        ) from error


def damaged(place: Path | str, found: object, remedy: str) -> ValueError:
    """Make the error for a file that is not what was written: what is in it, and what to do."""
    what = found if isinstance(found, Exception) else f"it holds {reprlib.repr(found)}"
    return ValueError(f"{place} is damaged ({what}): {remedy}")


def parse_json(text: bytes, place: Path | str, remedy: str) -> Any:
    """Parse what lies at `place`.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise damaged(place, error, remedy) from error


def is_number(value: object) -> bool:
    """Whether what JSON gave is a number that a float can hold.

    >>> is_number(0.5), is_number(10**400), is_number("1")
    (True, False, False)
    """
    is_whole = isinstance(value, int) and abs(value) <= sys.float_info.max
    return is_whole or isinstance(value, float)


def to_json(data: Mapping[str, Any], *, indent: int | None = None) -> str:
    r"""Write a JSON object whose last entry is a checksum of the others.

    >>> to_json({"steps": 3})
    '{"steps": 3, "checksum": "6f35973e41fd89bc"}\n'
    """
    content = json.dumps(data, indent=indent)
    checksum = sha256(content.encode()).hexdigest()[:16]
    return json.dumps({**data, CHECKSUM: checksum}, indent=indent) + "\n"


def from_json(text: bytes, place: Path | str, remedy: str, *, indent: int | None = None) -> Any:
    """Read what `to_json` wrote, without the checksum.

    Raises:
        ValueError: any byte of it was changed.
    """
    data = parse_json(text, place, remedy)
    if isinstance(data, dict) and matches(data, text, indent=indent):
        return data
    raise damaged(place, ValueError("its checksum does not match its content"), remedy)


def matches(data: dict[str, Any], text: bytes, *, indent: int | None = None) -> bool:
    """Whether an object that was read is as `to_json` wrote it; the checksum is taken out."""
    if data.pop(CHECKSUM, None) is None:
        return False
    try:
        return to_json(data, indent=indent).encode() == text
    except RecursionError:
        return False


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file in a folder, by name."""
    return {path.name: _digest(path) for path in sorted(folder.iterdir())}


def check_digests(folder: Path, files: Mapping[str, Any], remedy: str, *, but: str) -> None:
    """Check that a folder holds the files that `digests` saw, unchanged.

    Args:
        folder: where they are.
        files: what `digests` gave, as it was read back.
        remedy: what to do about damage.
        but: the name of one more file, which lists them.

    Raises:
        ValueError: a file is missing, or changed, or not one of them; names it.
    """
    there = {path.name for path in folder.iterdir()} - {but}
    for name in sorted(there ^ files.keys()):
        what = "is not there" if name in files else "is not one of its files"
        raise damaged(folder, ValueError(f"{name} {what}"), remedy)
    for name, digest in files.items():
        if not is_own_file(folder / name) or _digest(folder / name) != digest:
            mismatch = ValueError("its checksum does not match its content")
            raise damaged(folder / name, mismatch, remedy)


def is_own_file(path: Path) -> bool:
    """Whether it is a file, and no symbolic link to one."""
    return path.is_file() and not path.is_symlink()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
