"""Check that the packages of the extra for training are installed."""

from importlib.util import find_spec

from onescan.messages import missing_package

TRAIN = {  # name of each package, and of the module to import
    "scikit-learn": "sklearn",
    "scipy": "scipy",
    "matplotlib": "matplotlib",
    "jinja2": "jinja2",
    "filelock": "filelock",
}


def require_train(what: str) -> None:
    """Check that the extra for training is installed, without importing it.

    Args:
        what: What needs it, for the message.

    Raises:
        ImportError: If one of its packages is missing.
    """
    missing = [name for name, module in TRAIN.items() if not _is_installed(module)]
    if missing:
        raise missing_package(what, ", ".join(missing), "train")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
