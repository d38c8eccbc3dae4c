"""Locks between processes, which the operating system releases when their holder ends.

They work on POSIX systems and on Windows. Forked processes, such as the workers of a data loader,
do not inherit them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onescan.checkpoint.files import check_regular, writing

LOCK = "lock"  # on Windows, no other process can read it while it is locked


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder, which is created if it does not exist.

    Raises:
        ValueError: If another process holds the lock, or the lock file is a symbolic link.
        OSError: If the folder cannot be written to, or its file system does not support locks.
    """
    from filelock import FileLock, Timeout

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        check_regular(folder / LOCK)
        try:
            lock = FileLock(folder / LOCK, blocking=False, fallback_to_soft=False).acquire()
        except Timeout as error:
            raise ValueError(
                f"another process is using {folder}: wait until it ends, or choose another folder"
            ) from error
    with lock:
        yield
