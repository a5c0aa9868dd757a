"""What the scenario scripts beside this file share."""

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Scenarios:
    """Runs scenarios one after the other, and writes down what those said that failed.

    Args:
        folder: Where results go; each scenario gets a subfolder of its name.
    """

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        self.folder = folder
        self.errors: dict[str, str] = {}

    def run(self, name: str, action: Callable[..., Any], *arguments: Any, **settings: Any) -> None:
        """Call ``action(folder / name, *arguments, **settings)``."""
        try:
            action(self.folder / name, *arguments, **settings)
        except Exception as error:
            self.errors[name] = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"

    def finish(self) -> None:
        """Write ``errors.json``."""
        (self.folder / "errors.json").write_text(json.dumps(self.errors))


def parallel(processes: int) -> dict[str, Any]:
    """Return a trainer's settings for one or two processes that fork."""
    return {"devices": 2, "strategy": "ddp_fork"} if processes == 2 else {"devices": 1}


def paths() -> list[Path]:
    """Return the script's arguments."""
    return [Path(argument) for argument in sys.argv[1:]]
