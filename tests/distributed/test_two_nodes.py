"""Two nodes on the loopback, started by torchrun as docs/scaling-out.md says: the same zoo as from two processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.ddp, pytest.mark.slow, pytest.mark.timeout(600)]

RECIPE = (
    *("fit", "--config", "zoo/digits_mlp", "--model.members", "4", "--trainer.max_epochs", "2"),
    *("--trainer.accelerator", "cpu"),
)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(folder: Path, name: str, strategy: str, *words: str, nodes: int) -> subprocess.Popen[str]:
    """Start one node's part of a run, its output in ``folder``."""
    options = ["--trainer.strategy", strategy, "--trainer.num_nodes", str(nodes)]
    devices = ["--trainer.devices", str(2 // nodes), "--run_dir", str(folder / f"{nodes} nodes")]
    with (folder / f"{name}.txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *words, *RECIPE, *options, *devices],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def torchrun(rank: int, port: int) -> tuple[str, ...]:
    address = ("--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", str(port))
    return ("torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *address, "-m", "lightning_sym.cli")


def finish(folder: Path, **processes: subprocess.Popen[str]) -> None:
    """Wait for all, and fail with what they printed if one ended badly."""
    statuses = {name: process.wait(280) for name, process in processes.items()}
    said = {name: (folder / f"{name}.txt").read_text()[-2000:] for name in processes}
    assert not any(statuses.values()), said


@pytest.mark.parametrize("strategy", ["ddp", "ddp_members"])
def test_two_nodes_make_the_zoo_of_two_processes(tmp_path, strategy):
    port = free_port()
    nodes = {
        f"node{rank}": start(tmp_path, f"node{rank}", strategy, *torchrun(rank, port), nodes=2) for rank in range(2)
    }
    finish(tmp_path, **nodes)
    finish(tmp_path, alone=start(tmp_path, "alone", strategy, "lightning_sym.cli", nodes=1))
    two, one = (tmp_path / name / "zoo" for name in ("2 nodes", "1 nodes"))
    names = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert len(names) == 4
    for name in names:
        expected, found = load_file(one / name), load_file(two / name)
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    tables = [(folder.parent / "results" / "members.csv").read_text() for folder in (two, one)]
    assert tables[0] == tables[1]
