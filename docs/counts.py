"""Write the output of `onescan models --ablations` into papers.md.

python docs/counts.py
"""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "papers.md"
BLOCK = re.compile(r"(?<=^\$ onescan models --ablations\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)


def counts() -> str:
    """Return the command's output without spaces at the ends of lines."""
    argv = [sys.executable, "-m", "onescan", "models", "--ablations"]
    output = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return re.sub(r" +$", "", output, flags=re.MULTILINE)


if __name__ == "__main__":
    text, new = PAGE.read_text(encoding="utf-8"), counts()
    PAGE.write_text(BLOCK.sub(lambda _: new, text), encoding="utf-8")
