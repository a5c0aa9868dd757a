"""Processes of a run: they compare their settings at the start, and all end when one of them fails."""

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.strategies.launchers import _SubprocessScriptLauncher
from torch.distributed.constants import default_pg_timeout

from lightning_sym._agreement import check_agreement, content_of
from lightning_sym._distributed import gathered, rank, ranks
from lightning_sym.cli.watch import PARENT, Watch, stop
from lightning_sym.zoo import versions

_CONNECTING = 60.0  # seconds
# Display settings, and those that only rank 0 uses, may differ.
_FREE = ("config", "log_details", "figures", "figure_size", "overwrite", "requires")
_FREE_OF_TRAINER = ("enable_model_summary", "enable_progress_bar", "logger", "profiler")
_FOLDERS = ("run_dir", "zoo_dir")
_ENVIRONMENT = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")


class WatchedLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher with :class:`Watch`, which ends its processes and reports the reason."""

    def _call_children_scripts(self) -> None:
        os.environ[PARENT] = str(os.getpid())
        super()._call_children_scripts()
        watch = Watch.current
        if watch is not None:
            watch.children, self.procs = self.procs, []  # an observer of Lightning would kill all without a word


def watch_over(trainer: Trainer, command: str, settings: Any, data: object) -> None:
    """Make the processes of a run compare their settings at the start, and notice each other's end.

    Args:
        trainer: Trainer that has not started.
        command: Name of the command.
        settings: Resolved settings of the command.
        data: The datamodule; processes may read from different folders, and tasks compare the data.
    """
    strategy: Any = trainer.strategy
    places = tuple(getattr(data, "location_arguments", ()))
    strategy.setup_environment = partial(_meet, strategy.setup_environment, command, settings, places)
    # Lightning's own handler waits for the other processes, which may be anywhere.
    trainer._signal_connector._sigterm_notifier_fn = stop  # type: ignore[method-assign, assignment]
    timeout = getattr(strategy, "_timeout", None)
    if Watch.current is not None and timeout not in (None, default_pg_timeout):  # the user's own
        Watch.current.joins_within = timeout.total_seconds()
    launcher = strategy.launcher
    if type(launcher) is _SubprocessScriptLauncher and Watch.current is not None:
        strategy._launcher = WatchedLauncher(launcher.cluster_environment, launcher.num_processes, launcher.num_nodes)


def _meet(setup: Callable[[], None], command: str, settings: Any, places: Collection[str]) -> None:
    """Set up the process group, compare settings, and connect the processes."""
    watch = Watch.current
    began = time.monotonic()
    if watch is not None:
        watch.waits = f"{os.environ.get('MASTER_ADDR', 'its address')}:{os.environ.get('MASTER_PORT', 'its port')}"
    try:
        setup()
    except (RuntimeError, torch.distributed.DistError) as error:
        if time.monotonic() - began < _CONNECTING:
            raise
        raise TimeoutError(
            f"The processes of the run did not meet at {watch.waits if watch else 'their address'} within "
            f"{time.monotonic() - began:.0f} s ({str(error).splitlines()[0][:200]}); start all of them, with the same "
            "address, port and number of processes."
        ) from error
    finally:
        if watch is not None:
            watch.waits = ""
    if ranks() > 1:
        check_agreement(comparable(command, settings, places))
        if watch is not None:
            _connect(watch)


def comparable(command: str, settings: Any, places: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings that all processes must share, by name.

    Args:
        command: Name of the command.
        settings: Resolved settings of the command.
        places: Arguments of the datamodule for folders and files.
    """
    own = {name: value for name, value in settings.as_dict().items() if name not in _FREE}
    own["trainer"] = {name: value for name, value in own["trainer"].items() if name not in _FREE_OF_TRAINER}
    if places:
        data = own["data"]
        own["data"] = {**data, "init_args": {n: v for n, v in data.get("init_args", {}).items() if n not in places}}
    for name in _FOLDERS:  # of processes in different working folders
        own[name] = own.get(name) and os.path.abspath(own[name])
    if path := own.get("ckpt_path"):
        own["content of ckpt_path"] = content_of(Path(path))
    python = ".".join(map(str, sys.version_info[:2]))
    own["version of"] = {"python": python, **versions()}
    own["environment variable"] = {name: os.environ.get(name) for name in _ENVIRONMENT}
    return {"command": command, **own}


def _connect(watch: Watch) -> None:
    """Connect all ranks to the first one."""
    own, world = rank(), ranks()
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    listening = None
    if own == 0:
        local = address in ("127.0.0.1", "localhost")
        listening = socket.create_server(("127.0.0.1" if local else "", 0), backlog=world)
        listening.settimeout(_CONNECTING)
    where = None if listening is None else (listening.getsockname()[1], secrets.token_hex(16))
    port, token = gathered(where)[0]
    people = gathered((own, os.getpid(), socket.gethostname()))
    peers: dict[socket.socket, tuple[int, int, str]] = {}
    error: OSError | None = None
    try:
        if listening is None:
            connection = socket.create_connection((address, port), _CONNECTING)
            connection.sendall(f"{token} {own:08d}\n".encode())
            peers[connection] = people[0]
        else:
            while len(peers) < world - 1:
                connection, _ = listening.accept()
                connection.settimeout(5.0)
                said = connection.recv(42, socket.MSG_WAITALL).decode(errors="replace").split()
                if len(said) == 2 and secrets.compare_digest(said[0], token):
                    peers[connection] = people[int(said[1])]
                else:
                    connection.close()
    except OSError as caught:
        error = caught
    finally:
        if listening is not None:
            listening.close()
    if any(gathered(error is not None)):
        for connection in peers:
            connection.close()
        peers = {}
        if own == 0:
            print(
                f"  The processes cannot connect at {address}, port {port} ({error or 'another rank failed'}): if one "
                "is killed, the others wait for as long as torch.distributed does.",
                file=sys.stderr,
            )
    for connection in peers:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6)):
            if hasattr(socket, option):  # a machine that has lost its power says nothing
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    watch.join(own, peers)
