"""Code blocks of the documentation, which tests run."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_block(page, word):
    """Return the only example of a page's code that contains a word."""
    text = (ROOT / "docs" / "howto" / page).read_text()
    (block,) = [x for x in re.findall(r"^```py\n(.*?)^```", text, re.M | re.S) if word in x]
    return block
