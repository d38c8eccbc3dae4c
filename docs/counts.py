"""Count all presets for onescan/models/sizes.json, and write their table into papers.md.

python docs/counts.py
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from onescan.models.size import SIZES, fingerprint, listed_configs, model_size

PAGE = Path(__file__).parent / "papers.md"
BLOCK = re.compile(r"(?<=^\$ onescan models --ablations\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)


def sizes() -> str:
    """Count the presets; return the content of sizes.json, one line per preset."""
    rows = {
        name: {"config": fingerprint(config), **model_size(config)._asdict()}
        for name, config in listed_configs().items()
    }
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def table() -> str:
    """Return the output of `onescan models --ablations` without spaces at the ends of lines."""
    argv = [sys.executable, "-m", "onescan", "models", "--ablations"]
    output = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return re.sub(r" +$", "", output, flags=re.MULTILINE)


if __name__ == "__main__":
    SIZES.write_text(sizes(), encoding="utf-8")
    text, new = PAGE.read_text(encoding="utf-8"), table()
    PAGE.write_text(BLOCK.sub(lambda _: new, text), encoding="utf-8")
