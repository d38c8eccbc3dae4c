"""Add what depends on the address of the repository to the package's metadata.

The setting `repository` in pyproject.toml is empty until the repository is published. Then the
description on the index is README.md without links to files and without pictures, which would
be broken there, and the package has no URLs.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

FILE = r"(?!\w+:|#)[^)\s]+"  # not the address of a site, nor a heading
PICTURE = re.compile(rf"!\[([^\]]*)\]\(({FILE})\)")
LINK = re.compile(rf"(?<!!)\[([^\]]+)\]\(({FILE})\)")


class RepositoryHook(MetadataHookInterface):
    """Sets the URLs of the project, and the description."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        repository, tag = self.config["repository"], f"v{metadata['version']}"
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["urls"] = {}
        pictures = links = ""
        if repository:
            pictures, links = (f"{repository}/{kind}/{tag}/" for kind in ("raw", "blob"))
            metadata["urls"] = {
                "Source": repository,
                "Documentation": f"{links}docs/index.md",
                "Changelog": f"{links}CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": describe(text, pictures=pictures, links=links),
        }


def describe(text: str, *, pictures: str = "", links: str = "") -> str:
    """Prefix relative addresses of pictures and links, or remove those that have no prefix."""
    text = PICTURE.sub(rf"![\1]({pictures}\2)" if pictures else "", text)
    text = LINK.sub(rf"[\1]({links}\2)" if links else r"\1", text)
    return re.sub(r"\n{3,}", "\n\n", text)
