"""A thread that ends a command when it must end, and reports the reason; without importing torch.

The main thread may be where nothing reaches it: in a wait for another process, or in a long computation. So a thread
listens to three things: signals, the processes that this one launched, and connections to the other ranks of the run,
which the kernel closes when one of them ends, however that happens.
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

GRACE = 20.0  # seconds that the main thread has to put things in order
PARENT = "LIGHTNING_SYM_PARENT"  # environment variable: the process that launched this one
JOINING = 300.0  # seconds that all processes have to join; torch waits for half an hour
_PATIENCE = 20.0  # seconds after which a wait for the other processes is reported
_TICK = 0.5
_DONE, _END, _FAILED = "done", "end ", "failed: "


class StoppedError(SystemExit):
    """The process was told to end, or another one of the run has ended.

    Raised in the main thread at any place: files are whole or absent, and a run resumes from its last checkpoint.
    """


class Watch:
    """Watch over a command, as a context.

    Attributes:
        current: The one that is entered.
        children: Processes that this one launched: ranks 1, 2, ... of its run.
        folder: The run folder of a fit; the message names its checkpoint.
        waits: Address at which this process waits for the others to join; empty if it does not.
        joins_within: Longest wait in seconds.
    """

    current: ClassVar["Watch | None"] = None

    def __init__(self) -> None:
        self.children: Sequence[subprocess.Popen[Any]] = []
        self.folder: Path | None = None
        self.waits = ""
        self.joins_within = JOINING
        self._me = f"process {os.getpid()} on {socket.gethostname()}"
        self._reason, self._status = "", 1
        self._told = threading.Event()  # there is a reason
        self._joined = False  # there are other ranks, or were
        self._raised = False  # the main thread has been told
        self._over = threading.Event()
        self._deadline = self._interrupt_at = float("inf")
        self._peers: dict[socket.socket, tuple[int, int, str]] = {}
        self._heard: dict[socket.socket, bytes] = {}
        self._parent = os.getppid() if os.environ.get(PARENT) == str(os.getppid()) else 0
        self._main = threading.current_thread()
        self._signals = self._main is threading.main_thread()  # elsewhere they cannot be handled

    def __enter__(self) -> "Watch":
        self._read, self._wake = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._wake, False)
        if self._signals:
            self._handler = signal.signal(signal.SIGTERM, stop)
            self._descriptor = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        Watch.current = self
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._poke()
        self._thread.join(5.0)
        if self._signals:
            signal.set_wakeup_fd(self._descriptor)
            signal.signal(signal.SIGTERM, self._handler)
        Watch.current = None
        for peer in self._peers:
            peer.close()
        os.close(self._read)
        os.close(self._wake)

    # ---- the main thread

    def call(self, work: Callable[[], object]) -> None:
        """Do the work of the command; the other processes are told how it ended.

        Raises:
            SystemExit: If the process was stopped; the reason is printed to standard error.
        """
        try:
            try:
                work()
            except RuntimeError:
                if self._joined:  # also before the thread has reported a lost connection
                    self._told.wait(3.0)  # a collective fails a moment before it is known why
                raise
        except BaseException as error:
            self._raised = True  # first of all: a second reason must not interrupt the clean-up and the message
            if self._reason and (isinstance(error, RuntimeError) or not isinstance(error, Exception)):
                self._leave()
                print(self.sentence, file=sys.stderr, flush=True)
                raise SystemExit(self._status) from None
            if not isinstance(error, Exception):
                self._tell("was interrupted")
            else:
                self._tell(f"{_FAILED}{' '.join(str(error).split())[:300]}")
            self._leave()
            raise
        self._raised = True  # nothing is left to be stopped: the others close their connections as they end
        for peer in list(self._peers):
            _send(peer, _DONE)

    def join(self, rank: int, peers: Mapping[socket.socket, tuple[int, int, str]]) -> None:
        """Listen to other ranks: rank 0 to all, the others to rank 0.

        Args:
            rank: That of this process.
            peers: By connection rank, process and host at its other end.
        """
        self._me = f"rank {rank} ({self._me})"
        self.waits, self._joined = "", True
        for peer, about in peers.items():
            peer.settimeout(1.0)
            self._heard[peer] = b""
            self._peers[peer] = about
        self._poke()

    def handle(self, signum: int) -> None:
        """Stop for a signal.

        Raises:
            StoppedError: Once, as clean-up must not be interrupted.
        """
        self._stop_for(signum)
        if not self._raised:
            self._raised = True
            raise StoppedError(self._status)

    @property
    def sentence(self) -> str:
        """The reason for the end of the process, and a remedy."""
        todo = ""
        if self.folder is not None:
            last, begun = (self.folder / name for name in ("checkpoints/last.ckpt", "config.yaml"))
            anew = "restart with --overwrite true" if begun.is_file() else "restart"
            todo = f"; {'resume with --ckpt_path last' if last.is_file() else anew}"
        return f"lightning-sym: {self._reason or 'interrupted'}{todo}"

    def _leave(self) -> None:
        """Wait for the processes that this one launched, so that they say nothing after it has ended."""
        self._end_children(signal.SIGTERM)
        end = time.monotonic() + (GRACE / 2 if self._peers else 2.0)
        while any(child.poll() is None for child in self.children) and time.monotonic() < end:
            time.sleep(0.05)
        self._end_children(signal.SIGKILL)

    # ---- either thread

    def _stop(self, reason: str, status: int, delay: float = 0.0) -> None:
        """Have the main thread stopped: now if it is in Python, or when it is again, or without it after its time."""
        if not self._reason:
            self._reason, self._status = reason, status
            self._deadline = time.monotonic() + (2.0 if self.waits else GRACE) + delay  # nothing has been begun
            self._interrupt_at = time.monotonic() + delay
            self._told.set()

    def _stop_for(self, signum: int) -> None:
        if not self._reason:
            name = signal.Signals(signum).name
            self._stop(f"{self._me} was stopped by {name}", 128 + signum)
            self._tell(f"was stopped by {name}")

    def _tell(self, what: str) -> None:
        """Tell the other ranks how this one ended; processes that have not joined yet are ended."""
        for peer in list(self._peers):
            _send(peer, f"{_END}{self._me} {what}")
        if not self._peers:
            self._end_children(signal.SIGTERM)

    def _end_children(self, signum: int) -> None:
        for child in self.children:
            if child.poll() is None and (signum == signal.SIGKILL or not self._peers):
                child.send_signal(signum)

    def _poke(self) -> None:
        with suppress(OSError):
            os.write(self._wake, b"\0")

    # ---- the thread

    def _run(self) -> None:
        began, said = time.monotonic(), False
        while not self._over.is_set():
            with selectors.DefaultSelector() as selector:
                selector.register(self._read, selectors.EVENT_READ)
                for peer in self._peers:
                    selector.register(peer, selectors.EVENT_READ)
                ready = [key.fileobj for key, _ in selector.select(_TICK)]
            for source in ready:
                if isinstance(source, socket.socket):
                    self._hear(source)
                else:
                    self._signalled(os.read(self._read, 1024))
            self._look()
            now = time.monotonic()
            began = now if not self.waits else began
            if not said and now - began > _PATIENCE:
                said = True
                print(f"  {self._me} waits for the others of the run, at {self.waits}", file=sys.stderr, flush=True)
            if self.waits and now - began > self.joins_within and not self._reason:
                self._stop(
                    f"{self._me} did not meet all others of the run at {self.waits} within {now - began:.0f} s; check "
                    "that all of them were started, with the same address, port and number of processes",
                    1,
                )
            if now > self._interrupt_at and not self._raised and self._signals and not self._over.is_set():
                self._interrupt_at = float("inf")
                signal.pthread_kill(self._main.ident or 0, signal.SIGTERM)
            if now > self._deadline and not self._over.is_set():
                self._end_children(signal.SIGKILL)
                print(self.sentence, file=sys.stderr, flush=True)
                os._exit(self._status)

    def _signalled(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers:
            self._stop_for(signal.SIGTERM)
        if signal.SIGINT in numbers:  # Lightning, or Python, tells the main thread
            self._deadline = min(self._deadline, time.monotonic() + GRACE)
            self._status = self._status if self._reason else 128 + signal.SIGINT

    def _hear(self, peer: socket.socket) -> None:
        """Read the message of another rank, or notice that its connection has ended."""
        rank, process, host = self._peers[peer]
        try:
            content = peer.recv(4096)
        except TimeoutError:
            return
        except OSError:
            content = b""
        *lines, self._heard[peer] = (self._heard[peer] + content).split(b"\n")
        said = [line.decode(errors="replace") for line in lines]
        if content and not said:
            return
        del self._peers[peer]
        peer.close()
        if said and said[0] == _DONE:
            return
        what = said[0].removeprefix(_END) if said else f"rank {rank} (process {process} on {host}) {self._how(process)}"
        for other in list(self._peers):
            _send(other, f"{_END}{what}")
        # A failure on one rank mostly occurs on all, and each prints its own sentence.
        self._stop(f"{what}, and so this process ended", 1, delay=1.0 if _FAILED in what else 0.0)

    def _how(self, process: int) -> str:
        """Describe how a process has ended, if that is known."""
        for child in self.children:
            if child.pid == process:
                with suppress(subprocess.TimeoutExpired):
                    status = child.wait(2.0)
                    return _ended(status)
        return "ended without a word, as after SIGKILL or for want of memory"

    def _look(self) -> None:
        """Check the processes that have not joined yet: the children and the parent."""
        if self._peers or self._over.is_set():
            return
        for number, child in enumerate(self.children, 1):
            if child.poll() and not self._reason:
                what = f"rank {number} (process {child.pid}) {_ended(child.returncode)}"
                self._stop(f"{what}, and so this process ended", 1)
        if self._parent and os.getppid() != self._parent:
            self._stop(f"rank 0 (process {self._parent}) ended without a word, and so this process ended", 1)


def stop(signum: int, frame: FrameType | None) -> None:
    """Handle a signal: stop the command, or the process if it is one that a command forked."""
    if Watch.current is None:
        raise StoppedError(128 + signum)
    Watch.current.handle(signum)


def _ended(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _send(peer: socket.socket, line: str) -> None:
    with suppress(OSError):
        peer.sendall(" ".join(line.split()).encode() + b"\n")


def _forget() -> None:
    """Forget the watch in a forked process, which has no thread for it and must not write into its pipe."""
    if Watch.current is not None:
        for peer in Watch.current._peers:  # which would be open for as long as this process lives
            peer.close()
        Watch.current = None
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is stop:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)
