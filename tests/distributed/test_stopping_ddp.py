"""Two processes: started with different options, told to end or killed at any moment, they end with a sentence."""

import importlib
import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from commands import QUIET
from helpers import assert_same
from pytorch_lightning import Callback
from pytorch_lightning.utilities import rank_zero_only

from lightning_sym.cli import checkpoints, main, watch
from lightning_sym.zoo import ModelZoo

pytestmark = [pytest.mark.long, pytest.mark.ddp, pytest.mark.timeout(900)]
LIMIT = 800  # seconds for 18 runs of two processes, 3 s each on an idle machine

FIT = (
    *("fit", "--seed_everything=0", "--trainer.max_epochs=2", "--trainer.devices=2", *QUIET),
    *("--trainer.accelerator=cpu", "--trainer.strategy=ddp", "--trainer.callbacks=ZooExport"),
    *("--trainer.callbacks+=test_stopping_ddp.Signals", "--trainer.callbacks+=ZooReport"),
    *("--model=ZooTask", "--model.members=2", "--model.network=MultiLayerPerceptron", "--model.network.widths=[4]"),
    *("--model.optimizer=torch.optim.Adam", "--model.optimizer.lr=0.01"),
    *("--data=DigitsDataModule", "--data.batch_size=16", "--data.max_samples=80"),
)
MOMENTS = ("setup", "train 1 1", "val 1", "checkpoint 1", "report")
# The moment, the signal, and the rank that gets it.
STOPPED = [(moment, signal.SIGTERM, place % 2) for place, moment in enumerate(MOMENTS)]
STOPPED += [("train 1 1", signal.SIGKILL, 1), ("report", signal.SIGKILL, 0)]
# In the midst of an epoch and of writing a checkpoint, and when nothing is left to train.
RESUMED = [STOPPED[MOMENTS.index("train 1 1")], STOPPED[MOMENTS.index("checkpoint 1")], STOPPED[-1]]
# Options of rank 1 that rank 0 does not have, and what the sentence names.
DIFFERENT = {
    "optimizer": (["--model.optimizer.lr=0.02"], "model.optimizer.lr is 0.02 on rank 1 and 0.01 on rank 0"),
    "callbacks": (["--trainer.callbacks+=LearningRateMonitor"], "callbacks"),
    "folder": (["--run_dir=elsewhere"], "run_dir"),
    "environment": (["NVIDIA_TF32_OVERRIDE=1"], "NVIDIA_TF32_OVERRIDE"),
    "working folder": (["cd elsewhere"], "run_dir"),
}
# Options that may differ.
FREE = ["--log_details=true", "--trainer.enable_model_summary=true", "--run_dir=link/free"]


class Signals(Callback):
    """Sends a signal to a process of the run at one moment."""

    moment, signum, target, folder = "", 0, 0, Path()

    def at(self, moment):
        if moment == Signals.moment and not (sent := self.folder / "sent").exists() and os.environ["LOCAL_RANK"] == "0":
            sent.write_text(str(time.time()))
            os.kill(int((self.folder / f"pid{self.target}").read_text()), self.signum)
            if self.signum == signal.SIGTERM or self.target == 1:
                time.sleep(30)  # a long work, that has to be stopped

    def setup(self, trainer, task, stage):
        self.at("setup")

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        self.at(f"train {trainer.current_epoch} {batch_idx}")

    def on_validation_epoch_end(self, trainer, task):
        if not trainer.sanity_checking:
            self.at(f"val {trainer.current_epoch}")


def save_half(checkpoint, file, save=checkpoints.torch.save):
    """Write a checkpoint with a signal in its middle."""
    file.write(b"half")
    file.flush()
    Signals().at(f"checkpoint {checkpoint['epoch']}")
    file.seek(0)
    save(checkpoint, file)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(folder, rank, port, options):
    """Start one process of a run by a fork; what it says goes to ``folder/saidRANK``."""
    child = os.fork()
    if child == 0:
        file = os.open(folder / f"said{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": "2"}
        rank_zero_only.rank = rank  # which is found out when Lightning is imported
        (folder / f"pid{rank}").write_text(str(os.getpid()))
        Signals.folder = folder
        from lightning_sym.callbacks import publishing

        draw = publishing.publish_figure

        def publish_figure(*args):
            Signals().at("report")
            draw(*args)

        publishing.publish_figure = publish_figure
        checkpoints.torch.save = save_half
        for option in [option for option in options if not option.startswith("--")]:
            name, _, value = option.partition("=")
            if value:
                os.environ[name] = value
            else:
                os.chdir(name.removeprefix("cd "))
        os._exit(main([*FIT, *(option for option in options if option.startswith("--"))]))
    return child


def together(folder, *options):
    """Run two processes with their options.

    Returns:
        Of each its status, when it ended after the signal, if there was one, and what it said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sent").unlink(missing_ok=True)
    port = free_port()
    running = {start(folder, rank, port, own): rank for rank, own in enumerate(options)}
    ended = {}
    limit = time.time() + 100
    while running and time.time() < limit:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in running:
            ended[running.pop(child)] = (os.waitstatus_to_exitcode(status), time.time())
        time.sleep(0.02)
    for child, rank in running.items():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        ended[rank] = ("hangs", time.time())
    sent = float((folder / "sent").read_text()) if (folder / "sent").exists() else time.time()
    return [[status, at - sent, (folder / f"said{rank}").read_text()] for rank, (status, at) in sorted(ended.items())]


def scenarios(run):
    for module in ("lightning_sym.cli.lightning", "sklearn.datasets", "torch.utils.tensorboard"):
        importlib.import_module(module)  # once, for all processes
    os.chdir(run.folder)
    Path("elsewhere").mkdir()
    Path("link").symlink_to(".")
    results = {"whole": together(run.folder / "whole", *[["--run_dir=whole"]] * 2)}
    for name, (options, _) in DIFFERENT.items():
        results[name] = together(run.folder / name, [f"--run_dir={name}"], [f"--run_dir={name}", *options])
    results["free"] = together(run.folder / "free", ["--run_dir=free"], FREE)
    for moment, signum, target in STOPPED:
        name = f"{moment} {signum.name} {target}"
        Signals.moment, Signals.signum, Signals.target = moment, signum, target
        results[name] = together(run.folder / name, *[[f"--run_dir={name}"]] * 2)
        Signals.moment = ""
        if (moment, signum, target) in RESUMED:
            again = [f"--run_dir={name}", "--ckpt_path=last"]
            results[f"{name} again"] = together(run.folder / name, again, again)
    watch.JOINING = 2.0  # seconds
    results["alone"] = together(run.folder / "alone", ["--run_dir=alone"])
    (run.folder / "results.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def results(runs):
    return json.loads((runs / "results.json").read_text())


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_options_stop_all_before_anything_is_trained(runs, results, name):
    for status, _, said in results[name]:
        assert status == 1, said
        assert "The processes of this run were started differently: " in said
        assert DIFFERENT[name][1] in said
    assert not (runs / name / "checkpoints").exists()
    assert not (runs / name / "zoo").exists()


def test_a_process_whose_others_never_come_ends_with_a_sentence(runs, results):
    ((status, _, said),) = results["alone"]
    assert status == 1
    assert "did not meet all others of the run at 127.0.0.1:" in said.splitlines()[-1], said
    assert not (runs / "alone" / "config.yaml").exists()


def test_what_no_result_depends_on_may_differ(results):
    assert [status for status, _, _ in results["free"]] == [0, 0], results["free"]


@pytest.mark.parametrize(("moment", "signum", "target"), STOPPED)
def test_all_end_soon_with_a_sentence(results, moment, signum, target):
    ended = results[f"{moment} {signum.name} {target}"]
    for rank, (status, seconds, said) in enumerate(ended):
        assert seconds < 60
        if rank == target and signum == signal.SIGKILL:
            assert status == -signal.SIGKILL
            continue
        sentence = said.strip().splitlines()[-1]
        assert sentence.startswith("lightning-sym: "), said
        assert "Traceback" not in said
        assert f"rank {target}" in sentence or moment == "setup"
        assert ("resume with --ckpt_path last" in sentence) == (moment not in ("setup",)), sentence
        if signum == signal.SIGTERM:
            assert "was stopped by SIGTERM" in sentence
            assert status == (128 + signum if rank == target else 1)
        else:
            assert status == 1


@pytest.mark.parametrize(("moment", "signum", "target"), RESUMED)
def test_resumed_with_the_same_bits(runs, results, moment, signum, target):
    name = f"{moment} {signum.name} {target}"
    assert [status for status, _, _ in results[f"{name} again"]] == [0, 0], results[f"{name} again"]
    whole, again = runs / "whole", runs / name
    expected, found = ModelZoo.open(whole / "zoo"), ModelZoo.open(again / "zoo")
    assert found.numbers == expected.numbers == [0, 1]
    for number in expected.numbers:
        assert_same(found.state(number), expected.state(number))
        assert found.member(number).metrics == expected.member(number).metrics
    for file in ("results/members.csv", "metrics.csv"):
        assert (again / file).read_bytes() == (whole / file).read_bytes(), file
    assert not [path for path in again.rglob(".*") if path.name.endswith(".tmp") or "claim" in path.name]
