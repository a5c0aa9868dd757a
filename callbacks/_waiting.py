"""A line on the terminal about a long-running measurement."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pytorch_lightning import Trainer

LONG: Final = 20.0  # seconds until the first line


@contextmanager
def said_if_long(trainer: Trainer, what: str, after: float = LONG) -> Iterator[None]:
    """Print a line about the work in the block if it takes long: after 20 seconds, then at doubling intervals.

    Prints only on rank 0, with a progress bar, and to a terminal rather than a file or a pipe.

    Args:
        trainer: The trainer; lines are printed above its progress bar.
        what: Description of the work, for example "CurvatureMonitor measures".
        after: Seconds until the first line; each pause is twice as long as the previous one.
    """
    bar = trainer.progress_bar_callback
    if bar is None or not trainer.is_global_zero or not sys.stdout.isatty():
        yield
        return
    done, begun = threading.Event(), time.monotonic()

    def speak() -> None:
        pause = after
        while not done.wait(pause):
            bar.print(f"  {what}: {time.monotonic() - begun:.0f} s so far")
            pause *= 2

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
