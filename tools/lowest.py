"""Print the oldest versions that pyproject.toml allows, as requirements: ``torch==2.11``, one per line.

python tools/lowest.py > lowest.txt && pip install -r lowest.txt
"""

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lowest(requirements: list[str]) -> list[str]:
    """Return each requirement at its lower bound.

    Raises:
        ValueError: If a requirement has none.
    """
    found = []
    for requirement in requirements:
        match = re.match(r"([\w.-]+(?:\[[\w,]+\])?)>=([\w.]+)", requirement)
        if match is None:
            raise ValueError(f"{requirement} has no lower bound; write name>=version first.")
        found.append(f"{match[1]}=={match[2]}")
    return found


if __name__ == "__main__":
    print("\n".join(lowest(tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"])))
