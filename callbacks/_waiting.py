"""A line that says what a run is doing while nothing else moves on the terminal."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pytorch_lightning import Trainer

LONG: Final = 20.0  # seconds after which one wonders


@contextmanager
def said_if_long(trainer: Trainer, what: str, after: float = LONG) -> Iterator[None]:
    """Say on the terminal what is being done if it takes long: after 20 seconds, and then ever more seldom.

    Nothing is said on ranks other than 0, without a progress bar, or if the output goes to a file or a pipe.

    Args:
        trainer: Its progress bar is written above.
        what: What is being done, for example "CurvatureMonitor measures".
        after: Seconds until the first line; each of the next pauses is twice as long as the one before.
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
