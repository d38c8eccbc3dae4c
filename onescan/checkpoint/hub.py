"""Folders on the Hugging Face Hub: download them without any code, and upload them."""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from onescan.checks import HUB_NAME, LOAD_ERRORS, in_a_line
from onescan.messages import missing_package

# What is read from the hub: configs, weights, tokenizers and model cards, in any folder. Code and
# pickled files are never downloaded.
DOWNLOADED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "README.md")


def is_hub_name(name: Any) -> bool:
    """Return whether a name may be that of a model on the hub.

    >>> is_hub_name("user/model"), is_hub_name("gpt2"), is_hub_name("runs/digits/seed-0")
    (True, True, False)
    """
    return re.fullmatch(HUB_NAME, str(name)) is not None


@contextmanager
def without_retries(*configs: Any) -> Iterator[None]:
    """Use only the cache if the hub's host name cannot be resolved, instead of retrying for 30 s.

    Args:
        configs: Further modules with a setting HF_HUB_OFFLINE, such as ``datasets.config``.
    """
    from huggingface_hub import constants

    libraries: tuple[Any, ...] = (constants, *configs)
    before = [library.HF_HUB_OFFLINE for library in libraries]
    try:
        if not getproxies():
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        for library in libraries:
            library.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for library, value in zip(libraries, before, strict=True):
            library.HF_HUB_OFFLINE = value


def find_folder(name: Any, **options: Any) -> Path:
    """Return a local path, or download the model with this name.

    Args:
        name: Path, or name on the hub.
        options: Options of `download`.

    Raises:
        FileNotFoundError: If there is no such path, and no such model can be downloaded.
        ImportError: If huggingface_hub is needed but not installed.
    """
    path = Path(name)
    if path.exists():
        return path
    if not is_hub_name(name):
        raise FileNotFoundError(f"there is no folder {str(name)!r}")
    return download(str(name), **options)


def download(
    name: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
) -> Path:
    """Download a model from the hub, or find it in the cache, and return its folder.

    Args:
        name: Name, such as "user/model".
        revision: Branch, tag or commit.
        token: Access token; by default the saved one, if any.
        cache_dir: Folder of the cache; by default that of huggingface_hub.

    Raises:
        FileNotFoundError: If it cannot be downloaded, for example without network access.
        ImportError: If huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        what = f"there is no folder {name!r}; downloading a model of this name"
        raise missing_package(what, "huggingface_hub", "text", error) from error
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            allow_patterns=list(DOWNLOADED),
        )
    except LOAD_ERRORS as error:
        if isinstance(error, errors.RevisionNotFoundError):
            reason = f"it has no revision {revision!r}"
        elif isinstance(error, errors.RepositoryNotFoundError):
            reason = "there is no such model on the hub, or you have no access to it"
        else:
            reason = in_a_line(error)
        raise FileNotFoundError(
            f"there is no folder {name!r}, and no model of this name can be downloaded from the "
            f"Hugging Face Hub: {reason}"
        ) from error
    return Path(folder)


def upload(
    folder: Path,
    name: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload model",
) -> str:
    """Upload a folder to the hub; the repository is created if it does not exist.

    Args:
        folder: Folder with the files.
        name: Name of the repository, such as "user/model".
        private: Whether a new repository is private; None uses the default of the user.
        token: Access token; by default the saved one.
        revision: Branch; by default main.
        commit_message: Summary of the commit.

    Returns:
        The address of the commit.

    Raises:
        ValueError: If the name is not valid on the hub.
        ImportError: If huggingface_hub is not installed.
        OSError: If the upload fails.
    """
    if not is_hub_name(name):
        raise ValueError(f"repo_id is {name!r}, expected a name such as 'user/model'")
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise missing_package("push_to_hub", "huggingface_hub", "text", error) from error
    api = HfApi(token=token)
    try:
        repository = api.create_repo(name, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository.repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository.repo_id,
            folder_path=folder,
            commit_message=commit_message,
            revision=revision,
        )
    except Exception as error:  # of huggingface_hub or of its HTTP client
        raise OSError(
            f"the model cannot be uploaded to the Hugging Face Hub as {name!r}: {in_a_line(error)}"
        ) from error
    return str(commit)
