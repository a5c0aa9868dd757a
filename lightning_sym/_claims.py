"""Claims: exclusive write access of one run to a folder, or to members of a zoo."""

import json
import os
import socket
import time
from collections.abc import Collection
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from random import SystemRandom
from typing import Any
from warnings import warn
from weakref import WeakSet

from lightning_sym._files import hold, writing
from lightning_sym._text import ranges

_PATIENCE = 3.0  # seconds to settle between two processes that claim at once
_RANDOM = SystemRandom()  # separate from the run's generators
_MADE: "WeakSet[Claim]" = WeakSet()


class InUseError(OSError):
    """Another process has claimed the folder."""


class Claim:
    """Exclusive write access of this process to a folder, until it releases the claim or ends.

    A locked file ``.claim-*`` in the folder names the process. The kernel releases the lock when the process ends,
    however that happens, so that a killed process leaves no claim. Locks work between hosts if the file
    system supports them (NFS from version 4 on, or with its lock daemon); otherwise a warning is issued.

    Args:
        folder: The folder; created if it does not exist.
        kind: ``"run"`` or ``"zoo"``; a folder may be both.
        numbers: Indices of the claimed members; None for the whole folder.
        what: Subject of the message, for example "The zoo at runs/zoo".
        todo: Remedy for the message.

    Raises:
        InUseError: If another process has claimed the folder or some of the members. The message names process and
            host.
        OSError: If the folder cannot be written to.
    """

    def __init__(self, folder: Path, kind: str, numbers: Collection[int] | None, what: str, todo: str) -> None:
        self._name = f".claim-{kind}-"
        self._numbers = None if numbers is None else sorted(numbers)
        self._file: FileIO
        end = time.monotonic() + _PATIENCE
        while True:
            with writing(folder / ".claim"):
                folder.mkdir(parents=True, exist_ok=True)
                self._enter(folder)
            try:
                other = self._other(folder)
            except BaseException:
                self.release()
                raise
            if other is None:
                _MADE.add(self)
                return
            self.release()
            if time.monotonic() > end or other.get("settled"):
                raise InUseError(_sentence(other, what, todo))
            time.sleep(_RANDOM.uniform(0.01, 0.2))

    def _enter(self, folder: Path) -> None:
        """Make and lock the claim's file, again if another process removed it as abandoned."""
        while True:
            self._path = folder / f"{self._name}{_RANDOM.getrandbits(64):016x}"
            self._file = FileIO(self._path, "x+")
            held = hold(self._file.fileno())
            if held is None:
                warn(
                    f"The file system of {folder} has no locks: make sure that no other run writes there.", stacklevel=3
                )
            if held is not False and os.fstat(self._file.fileno()).st_nlink:
                break
            self._file.close()
        self._write_record(settled=False)

    def _other(self, folder: Path) -> dict[str, Any] | None:
        """Return the record of a process with a conflicting claim; remove claims of processes that have ended."""
        for path in folder.glob(f"{self._name}*"):
            if path == self._path:
                continue
            try:
                file = FileIO(path, "r+" if os.access(path, os.W_OK) else "r")
            except OSError:  # just released
                continue
            with file:
                held = hold(file.fileno())
                if held:
                    path.unlink(missing_ok=True)
                if held is not False:
                    continue
                try:
                    other = json.loads(file.read())
                except ValueError:  # incomplete: being written
                    other = {"numbers": None}
            if self._numbers is None or other["numbers"] is None:
                return dict(other)
            if both := sorted(set(self._numbers) & set(other["numbers"])):
                return {**other, "both": both}
        self._write_record(settled=True)
        return None

    def _write_record(self, *, settled: bool) -> None:
        about = {
            "process": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "numbers": self._numbers,
            "settled": settled,
        }
        self._file.seek(0)
        self._file.write(json.dumps(about).encode() + b"\n" + b" " * settled)

    def release(self) -> None:
        """Release the claim; a second call has no effect."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()


def _sentence(other: dict[str, Any], what: str, todo: str) -> str:
    who = f"process {other.get('process', '?')} on {other.get('host', 'some host')}"
    part = f"member(s) {ranges(other['both'])} of it" if "both" in other else "it"
    since = f", since {other['since']}" if "since" in other else ""
    return f"{what} is in use: {who} writes {part}{since}; {todo}."


def _close_after_fork() -> None:
    """Close the files in a forked process: claims belong to the process that made them."""
    for claim in _MADE:
        claim._file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_after_fork)
