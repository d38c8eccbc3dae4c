"""Reading a state's tensors without running anybody's code.

torch.distributed.checkpoint keeps its own notes, `.metadata`, as a pickle, and a pickle may call
whatever it names. Here it may name only what the notes of such a state are made of. The tensors
themselves are read by torch with weights_only.
"""

from pathlib import Path
from pickle import Unpickler
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

METADATA = ".metadata"
KNOWN = {
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # the same, as Python 3.13 spells them
    "torch": {"Size"} | {name for name, it in vars(torch).items() if isinstance(it, torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
}


class UnknownNameError(ValueError):
    """A pickle names what no checkpoint of onescan's holds."""


class StateReader(FileSystemReader):
    """Reads a state's folder; its metadata may be made of `KNOWN` alone."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Read `.metadata`.

        Raises:
            UnknownNameError: it names anything else.
            Exception: of any kind, if it is damaged.
        """
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{METADATA} holds a {type(metadata).__name__}, expected Metadata")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _MetadataUnpickler(Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in KNOWN.get(module, ()):
            raise UnknownNameError(
                f"{METADATA} names {module}.{name}, which no checkpoint of onescan's holds"
            )
        return super().find_class(module, name)
