"""`from_pretrained`, `save_pretrained` and `push_to_hub` of all models."""

from pathlib import Path
from typing import Any, TypeVar

from onescan.lazy import lazy_attributes

# These functions also handle input formats and model cards, so they are in higher layers.
_FUNCTIONS = dict.fromkeys(("load_as", "push_model", "save_model"), "inference.pretrained")
_function = lazy_attributes("onescan", _FUNCTIONS)
ModelT = TypeVar("ModelT", bound="Pretrained")


class Pretrained:
    """Base class of models that can be saved to a folder or the Hugging Face Hub."""

    @classmethod
    def from_pretrained(
        cls: type[ModelT],
        name: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
    ) -> ModelT:
        """Load a model of this class, on the CPU in evaluation mode.

        `onescan.load` also returns its input format and class names. Nothing is unpickled, and no
        code is executed or downloaded.

        Args:
            name: Folder that `save_pretrained` or a training run wrote, "zoo/NAME", or a name on
                the Hugging Face Hub.
            revision: Branch, tag or commit on the hub.
            token: Access token of the hub; by default the saved one, if any.
            cache_dir: Folder for downloads; by default that of huggingface_hub.

        Raises:
            FileNotFoundError: If there is no such folder, and it cannot be downloaded.
            ValueError: If the folder holds a model of another class, or is damaged.
        """
        model: ModelT = _function("load_as")(
            cls, name, revision=revision, token=token, cache_dir=cache_dir
        )
        return model

    def save_pretrained(self, folder: str | Path, **details: Any) -> None:
        """Save the model, with a model card, for `from_pretrained` and `onescan.load`.

        Args:
            folder: Folder to write. If it exists, it must be empty.
            details: ``format``, the input format, such as that of a loaded checkpoint;
                ``class_names``; and ``target``, what the outputs mean. Without a format,
                `onescan predict` cannot read the folder.

        Raises:
            ValueError: If the folder is not empty, the weights are float64, or a detail has the
                wrong type or does not match the model.
        """
        _function("save_model")(self, folder, **details)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the model, with a model card, to the Hugging Face Hub.

        Args:
            repo_id: Name of the repository, such as "user/model"; it is created if it does not
                exist.
            options: ``private``, ``token``, ``revision`` and ``commit_message``, as in
                huggingface_hub, and the details of `save_pretrained`.

        Returns:
            The address of the commit.

        Raises:
            ValueError: If the name is not valid on the hub; see also `save_pretrained`.
            OSError: If the upload fails.
        """
        address: str = _function("push_model")(self, repo_id, **options)
        return address
