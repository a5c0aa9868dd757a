"""Files are whole or absent, say why they cannot be written, and have one writer."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_refused

import lightning_sym._files
from lightning_sym._agreement import content_of, flat_settings
from lightning_sym._claims import Claim, InUseError
from lightning_sym._files import remove_abandoned, write_atomically
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.reports import ResultTable
from lightning_sym.zoo import ModelZoo, rebuild_manifest, write_member

# ---- errors

NETWORK = MultiLayerPerceptron(widths=(2,), image_size=2)
WRITERS = {
    "text": lambda path: write_atomically(path, "text"),
    "torch.save": lambda path: write_atomically(path, lambda file: torch.save({"a": torch.ones(5)}, file)),
    "numpy": lambda path: write_atomically(path, lambda file: np.savez(file, a=np.ones(5))),
    "member": lambda path: write_member(path.parent, 0, NETWORK.state_dict(), architecture=NETWORK.architecture),
    "manifest": lambda path: rebuild_manifest(path.parent),
    "table": lambda path: ResultTable("t", "what", [{"a": 1}]).write(path.parent),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_what_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, writer, code):
    def fail(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(lightning_sym._files.os, "write", fail)
    says = rf"Cannot write .*: {os.strerror(code)}; no file remains. To go on: "
    with pytest.raises(OSError, match=says) as e:
        WRITERS[writer](tmp_path / "file")
    assert e.value.errno == code
    assert ("free space" in str(e.value)) == (code == errno.ENOSPC)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".manifest.lock"] == []


@pytest.mark.long  # starts a process
def test_full_disk_keeps_what_was_there(tmp_path):
    """A disk of 64 KiB; where none can be mounted, a limit on the size of files."""
    code = (
        "import resource, signal, sys, torch, numpy as np\n"
        "from lightning_sym._files import write_atomically\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "big = ['x' * 100_000, lambda f: torch.save(torch.ones(100_000), f),\n"
        "       lambda f: np.savez(f, a=np.ones(100_000))]\n"
        "for file, content in zip(sys.argv[1:], big, strict=True):\n"
        "    try:\n        write_atomically(file, content)\n    except OSError as error:\n        print(error)\n"
    )
    files = [tmp_path / writer for writer in ("text", "torch", "numpy")]
    for file in files:
        file.write_text("before")
    said = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True, check=True).stdout
    for file in files:
        text = f"Cannot write {file}: File too large; its previous content is intact. To go on: raise the limit"
        assert text in said
        assert file.read_text() == "before"
    assert {*tmp_path.iterdir()} == {*files}


# ---- temporary files


def test_temporary_files_of_killed_processes_are_removed_and_those_in_use_are_not(tmp_path):
    abandoned, other = tmp_path / ".a.0123456789abcdef.tmp", tmp_path / ".mine.tmp"
    abandoned.touch()
    other.touch()
    removed = []
    write_atomically(tmp_path / "b", lambda file: (file.write(b"x"), removed.append(remove_abandoned(tmp_path))))
    assert removed == [[abandoned]]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.tmp", "b"]
    assert (tmp_path / "b").read_bytes() == b"x"


# ---- claims


def claim(folder: Path, *numbers: int, kind: str = "zoo") -> Claim:
    return Claim(folder, kind, numbers or None, "The zoo", "wait")


def test_who_comes_second_is_told_who_is_there(tmp_path):
    first, apart = claim(tmp_path, 0, 1, 2), claim(tmp_path, 3)
    with pytest.raises(
        InUseError, match=rf"The zoo is in use: process {os.getpid()} on .* writes member\(s\) 1-2 of it"
    ):
        claim(tmp_path, 1, 2, 4)
    assert_refused(claim, tmp_path, says=("writes it, since ", "; wait"), error=InUseError)
    claim(tmp_path, kind="run").release()
    first.release()
    claim(tmp_path, 0, 1).release()
    apart.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["zoo", "run"])
def test_the_claim_of_a_killed_process_is_none(tmp_path, kind):
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom lightning_sym._claims import Claim\n"
        "claim = Claim(Path(sys.argv[1]), sys.argv[2], None, 'It', 'wait')\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path, kind], check=False)
    assert len(list(tmp_path.glob(f".claim-{kind}-*"))) == 1
    claim(tmp_path, 5, kind=kind).release()
    assert not list(tmp_path.iterdir())


def test_a_forked_process_neither_holds_nor_ends_a_claim(tmp_path):
    mine = claim(tmp_path)
    child = os.fork()
    if child == 0:
        mine.release()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(InUseError):
        claim(tmp_path)
    mine.release()


def test_networks_are_not_added_where_a_run_is_about_to_write(tmp_path):
    running = claim(tmp_path, 0, 1)
    assert_refused(ModelZoo.add, tmp_path, [NETWORK], network=NETWORK, says="member(s) 0 of it", error=InUseError)
    assert not list(tmp_path.glob("member-*"))
    running.release()
    assert ModelZoo.add(tmp_path, [NETWORK], network=NETWORK).numbers == [0]


# ---- metrics.csv


def test_rows_are_appended_and_the_file_is_that_of_one_write(tmp_path, monkeypatch):
    written = []
    append, write = MetricsCSV._append, lightning_sym.cli.loggers.write_atomically
    monkeypatch.setattr(
        MetricsCSV, "_append", lambda self, rows: append(self, rows) and not written.append(len(b"".join(rows)))
    )
    monkeypatch.setattr(
        lightning_sym.cli.loggers,
        "write_atomically",
        lambda path, text: (written.append(len(text)), write(path, text)),
    )
    generator = torch.Generator().manual_seed(0)
    logger, once = MetricsCSV(tmp_path / "rows"), MetricsCSV(tmp_path / "once")
    for step in range(0, 600, 3):
        for name in ("a", "b", "epoch", "a"):
            value = {name: float(torch.rand((), generator=generator).round(decimals=3)), "c": float("nan")}
            logger.log_metrics(value, step)
            once.log_metrics(value, step)
            logger.save()
    once.save()
    size = (tmp_path / "once" / "metrics.csv").stat().st_size
    assert (tmp_path / "rows" / "metrics.csv").read_bytes() == (tmp_path / "once" / "metrics.csv").read_bytes()
    del written[-1]
    assert sum(written) < 60 * size  # rewritten whole each time it is 400 times the size
    logger.log_metrics({"late": 1.0}, 3)
    logger.save()
    once.log_metrics({"late": 1.0}, 3)
    once.save()
    assert (tmp_path / "rows" / "metrics.csv").read_bytes() == (tmp_path / "once" / "metrics.csv").read_bytes()


def test_a_file_that_another_has_changed_is_written_anew(tmp_path):
    logger = MetricsCSV(tmp_path)
    for step, change in ((1, None), (2, "removed"), (3, "cut"), (4, None)):
        logger.log_metrics({"a": step / 3}, step)
        logger.save()
        if change == "removed":
            (tmp_path / "metrics.csv").unlink()
        elif change == "cut":
            (tmp_path / "metrics.csv").write_text("step,a\n1,0.3")
    assert (tmp_path / "metrics.csv").read_text().splitlines()[1:] == [f"{step},{step / 3}" for step in (1, 2, 3, 4)]


def test_a_row_without_its_end_is_none(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,a\n1,0.25\n2,0.1")
    logger = MetricsCSV(tmp_path)
    logger.log_metrics({"a": 0.5}, 9)
    logger.save()
    assert (tmp_path / "metrics.csv").read_text() == "step,a\n1,0.25\n9,0.5\n"


# ---- settings of processes


def test_settings_are_compared_by_what_they_say(tmp_path):
    settings = {"a": {"class_path": "A", "init_args": {"x": [1, {"y": None}]}}, "f": torch.relu, "t": torch.ones(2)}
    flat = dict(flat_settings(settings))
    assert flat["a"] == '"A"'
    assert flat["a.x[1].y"] == "null"
    assert flat == dict(flat_settings({**settings, "t": torch.ones(2)}))
    assert flat != dict(flat_settings({**settings, "t": torch.zeros(2)}))
    assert not any(" at 0x" in value for value in flat.values())


def test_a_copy_of_a_folder_is_the_same(tmp_path):
    for name, text in (("one", "x"), ("two", "x"), ("other", "y")):
        (tmp_path / name / "in").mkdir(parents=True)
        (tmp_path / name / "in" / "file").write_text(text)
    one, two, other = (content_of(tmp_path / name) for name in ("one", "two", "other"))
    assert one == two != other
    assert content_of(tmp_path / "absent") is None
