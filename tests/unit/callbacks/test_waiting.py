"""What is said while a run is busy with something that takes long."""

import sys
import threading
from types import SimpleNamespace

import pytest

from lightning_sym.callbacks._waiting import said_if_long


class Bar:
    """A progress bar that keeps what is written above it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.twice = threading.Event()

    def print(self, line: str) -> None:
        self.lines.append(line)
        if len(self.lines) == 2:
            self.twice.set()


def on_terminal(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> None:
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: terminal, write=lambda _: None))


def test_work_that_takes_long_is_named_again_and_again_until_it_ends(monkeypatch) -> None:
    on_terminal(monkeypatch, terminal=True)
    bar = Bar()
    trainer = SimpleNamespace(progress_bar_callback=bar, is_global_zero=True)
    threads = threading.active_count()

    def work() -> None:
        with said_if_long(trainer, "CurvatureMonitor measures", after=1e-3):
            assert bar.twice.wait(60)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert threading.active_count() == threads  # it ends with the work, also after an error
    assert all(line.startswith("  CurvatureMonitor measures: ") and line.endswith(" s so far") for line in bar.lines)


@pytest.mark.parametrize(
    ("terminal", "first", "shown"), [(False, True, True), (True, False, True), (True, True, False)]
)
def test_nothing_is_said_in_a_pipe_on_other_ranks_or_without_a_bar(monkeypatch, terminal, first, shown) -> None:
    on_terminal(monkeypatch, terminal=terminal)
    bar = Bar()
    trainer = SimpleNamespace(progress_bar_callback=bar if shown else None, is_global_zero=first)
    threads = threading.active_count()
    with said_if_long(trainer, "CurvatureMonitor measures", after=0.0):
        assert threading.active_count() == threads
    assert bar.lines == []
