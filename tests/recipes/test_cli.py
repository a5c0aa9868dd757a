"""The command line: what it says, what it refuses, and what it does to a run folder."""

import gc
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml
from commands import QUIET, SMALL, call, succeed
from helpers import assert_refused, read_csv
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import LearningRateMonitor
from safetensors.torch import load_file
from torch import nn

from lightning_sym import __version__
from lightning_sym.callbacks import ZooExport, ZooReport
from lightning_sym.cli import main
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MultiLayerPerceptron, Network
from lightning_sym.recipes import recipe_names, recipe_path, recipe_summary
from lightning_sym.tasks import ZooTask
from lightning_sym.zoo import ModelZoo


class SizelessNetwork(Network):
    """A network of a user that takes no image_size and no in_channels."""

    def __init__(self, hidden: int = 4, num_classes: int = 3) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.flatten = nn.Flatten()
        self.linear = nn.Linear(4, hidden)
        self.activation = nn.ReLU()
        self.classifier = nn.Linear(hidden, num_classes)

    def forward(self, x):
        return self.classifier(self.activation(self.linear(self.flatten(self.pool(x)))))


class Plain(nn.Sequential):
    """A module of a user that is no Network."""

    def __init__(self, num_classes: int, widths: tuple[int, ...] = (4,), kind: str = "") -> None:  # as ours is called
        super().__init__(nn.Flatten(), nn.Linear(64, widths[0]), nn.ReLU(), nn.Linear(widths[0], num_classes))


class SquareNetwork(Network):
    """A network that takes the side of square images only."""

    def __init__(self, hidden: int = 4, image_size: int = 5, num_classes: int = 3) -> None:
        super().__init__()
        self.flatten, self.linear = nn.Flatten(), nn.Linear(image_size**2, num_classes)

    def forward(self, x):
        return self.linear(self.flatten(x))


class SizesOnly(SquareNetwork):
    def __init__(self, image_size: int, num_classes: int | None = None) -> None:
        super().__init__(3, image_size, num_classes)


class SideByDefault(SquareNetwork):
    def __init__(self, hidden=4, image_size=5, num_classes=3):
        super().__init__(hidden, image_size, num_classes)


class SquareModule(nn.Sequential):
    def __init__(self, image_size: int, num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(image_size**2, num_classes))


class AnyName(SquareNetwork):
    def __init__(self, **options) -> None:
        super().__init__(image_size=8, num_classes=10 + len(options))


def made(image_size: int) -> Network:
    return SquareNetwork(4, image_size)


class TheirTask(ZooTask):
    """A task of a user."""


class NetworklessTask(LightningModule):
    """A task without a network argument, and with its own idea of training."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(64, width)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0].flatten(-3)).square().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Leave(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        raise KeyboardInterrupt


class LeaveAtOnce(Callback):
    def on_train_batch_end(self, *_):
        raise KeyboardInterrupt


class Break(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        raise RuntimeError("broken\non purpose")


class Second(Callback):
    """Starts other runs while this one trains, and keeps how they end and what they say."""

    args, ended = (), []

    def on_train_start(self, trainer, pl_module):
        for number, args in enumerate(Second.args):
            child = os.fork()
            if child == 0:
                result = call(*args)
                Path(f"said{number}").write_text(result.err)
                os._exit(result.status)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            Second.ended.append((status, Path(f"said{number}").read_text()))


@pytest.fixture
def run(digits_run, tmp_path):
    """A copy of a finished run, which may be changed."""
    return Path(shutil.copytree(digits_run, tmp_path / "copy"))


def python(*args, **kwargs):
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=120, **kwargs)


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---- without torch


def test_what_needs_no_torch_does_not_load_it():
    commands = ["--help", "", "--version", "recipes", "recipes zoo/mnist5k", "fitt", "fit --config zoo"]
    commands += ["fit --config zoo/mnist5k --model.membrs 3", "fit --config zoo/mnist5k --trainer.max_epoch 3"]
    commands += ["fit --help", "fit --help trainer", "fit --help ZooTask", "test --run_dir=nowhere"]
    commands += ["fit --config zoo/digits_mlp --ckpt_path absent.ckpt", "import a.pt --network=my.Net --out=zoo"]
    commands += ["spectrum --help", "spectrum absent.pt --network=my.Net --data=DigitsDataModule", "curve a.pt"]
    commands += ["symmetry --help", "symmetry Net --inptu=3", "estimate", "compare --help", "compare a b --metric=x"]
    commands += ["compare a b", "compare a --out="]
    code = f"import sys; from lightning_sym.cli import main; [main(c.split()) for c in {commands}]"
    assert python("-c", f"{code}; print('torch' in sys.modules)").stdout.splitlines()[-1] == "False"


def test_help_names_all_commands():
    for args in ([], ["--help"], ["-h"], ["help"]):
        result = call(*args)
        assert result.status == 0
        for word in ("fit", "validate", "test", "predict", "recipes", "--config"):
            assert word in result.out
    assert call("--version").out == f"lightning-sym {__version__}\n"


def test_recipes_are_listed_and_shown():
    lines = call("recipes").out.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert all(recipe_summary(line.split()[0]) in line for line in lines)
    for name in ("zoo/mnist5k", "zoo/mnist5k.yaml"):
        assert call("recipes", name).out == recipe_path("zoo/mnist5k").read_text()
    assert call("recipes", "--help").status == 0
    assert call("recipes", "a", "b").status == 2


def test_module_can_be_run():
    assert "zoo/mnist5k" in python("-m", "lightning_sym.cli", "recipes").stdout
    assert python("-m", "lightning_sym.cli", "fitt").returncode == 2


def test_a_reader_that_goes_away_is_no_error():
    command = [sys.executable, "-m", "lightning_sym.cli", "recipes"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()  # ... | head -0
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_the_traceback_is_shown_when_asked_for(monkeypatch):
    monkeypatch.setenv("LIGHTNING_SYM_TRACEBACK", "1")
    assert_refused(call, "fit", *SMALL, "--model.members=0", says="members must be an integer >= 1")
    with pytest.raises(Exception, match="members"):
        call("fit", *SMALL, "--model.members=many")
    monkeypatch.setenv("LIGHTNING_SYM_TRACEBACK", "0")
    assert call("fit", *SMALL, "--model.members=0").status == 1


def test_errors_and_interrupts_while_training():
    args = ["fit", *SMALL, *QUIET, "--trainer.max_epochs=1"]
    result = call(*args, "--run_dir=a", "--trainer.callbacks+=test_cli.Break")
    assert (result.status, result.error) == (1, "RuntimeError: broken on purpose")
    result = call(*args, "--run_dir=b", "--trainer.callbacks+=test_cli.Leave")
    assert result.status == 130
    assert result.err == "lightning-sym: interrupted before its first checkpoint; restart with --overwrite true\n"
    assert "b already holds a run without a checkpoint; put this one elsewhere" in call(*args, "--run_dir=b").error
    result = call(*args, "--run_dir=d", "--trainer.callbacks+=test_cli.LeaveAtOnce")
    assert result.err == "lightning-sym: interrupted before its first checkpoint; the same command starts it again\n"
    again = succeed(*args, "--run_dir=d")  # nothing that cost an epoch is in the way
    assert again.err == "d holds a run without a finished epoch, which is replaced\n"
    assert len(list(Path("d").glob("events.*"))) == 1
    assert "d already holds a run; resume it" in call(*args, "--run_dir=d").error
    succeed(*args, "--run_dir=c")
    result = call(
        *args, "--run_dir=c", "--ckpt_path=last", "--trainer.max_epochs=2", "--trainer.callbacks+=test_cli.Leave"
    )
    assert result.err == "lightning-sym: interrupted; resume with --ckpt_path last\n"


@pytest.mark.long  # three runs, in a process of their own
def test_a_second_run_in_a_folder_or_on_members_in_work_is_told_who_is_there():
    fit = ["fit", *SMALL, *QUIET, "--trainer.max_epochs=1", "--trainer.callbacks=ZooExport", "--zoo_dir=zoo"]
    others = (["--run_dir=a", "--overwrite=true"], ["--run_dir=b", "--model.seed=1"], ["--run_dir=c", "--model.seed=2"])
    # In a process of its own: autograd's threads, which other tests may have started, do not survive a fork.
    code = (
        f"import json, os, test_cli; test_cli.Second.args = {[[*fit, *options] for options in others]}; "
        f"test_cli.succeed(*{fit}, '--run_dir=a', '--trainer.callbacks+=test_cli.Second'); "
        "print(json.dumps([os.getpid(), test_cli.Second.ended]))"
    )
    paths = os.pathsep.join(map(str, Path(__file__).parents[:2]))
    done = python("-c", code, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    process, ended = json.loads(done.stdout.splitlines()[-1])
    for (status, said), what in zip(ended, ("run folder", "zoo", None), strict=True):
        assert status == bool(what), said
        assert what is None or (f"process {process} on " in said and f"The {what} " in said), said
    assert ModelZoo.open("zoo").numbers == [0, 1, 2, 3]


# ---- classes of the package lightning are other classes


def test_classes_of_the_package_lightning_are_refused_with_a_reason(monkeypatch):
    def refusal(*args):
        result = call("fit", *SMALL, *args)
        assert result.status == 2
        return result.error

    timer = "--trainer.callbacks+=lightning.pytorch.callbacks.Timer"
    monkeypatch.setitem(sys.modules, "lightning", None)  # not installed
    assert "use pytorch_lightning.callbacks.Timer" in refusal(timer)
    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.callbacks", "other_people"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    base = type("Callback", (), {"__module__": "lightning.pytorch.callbacks"})
    sys.modules["lightning.pytorch.callbacks"].Timer = type("Timer", (base,), {"__module__": base.__module__})
    sys.modules["other_people"].Mine = type("Mine", (base,), {"__module__": "other_people"})
    assert refusal(timer).startswith("lightning.pytorch.callbacks.Timer is of the package lightning")
    Path("config.yaml").write_text("trainer: {callbacks: [{class_path: other_people.Mine}]}")
    for given in ("--trainer.callbacks+=other_people.Mine", "--config=config.yaml"):
        assert "lightning.pytorch.callbacks.Callback is of the package lightning" in refusal(given)


# ---- what a recipe and the command line say together


def test_a_recipe_is_found_by_name_and_by_file():
    by_name = call("fit", "--config", "zoo/digits_mlp", "--print_config").out
    Path("mine.yaml").write_text(recipe_path("zoo/digits_mlp").read_text())
    for config in (["--config=zoo/digits_mlp"], ["-c", "zoo/digits_mlp.yaml"], ["--config", "mine.yaml"]):
        assert call("fit", *config, "--print_config").out == by_name


def test_a_file_of_ones_own_goes_before_a_recipe_of_that_name():
    Path("zoo").mkdir()
    Path("zoo/mnist5k").write_text(recipe_path("zoo/digits_mlp").read_text())
    assert "DigitsDataModule" in call("fit", "--config", "zoo/mnist5k", "--print_config").out


@pytest.mark.parametrize("text", ["model: {members: 2}", "{model: {members: 2}}", "model:\n  members: 2\n"])
@pytest.mark.few(2)
def test_what_a_file_says_may_stand_on_the_command_line(text, built):
    succeed("fit", "--config=zoo/digits_mlp", "--config", text)
    assert built.model.members == 2


def test_another_optimizer_takes_nothing_from_the_one_of_the_recipe(built):
    parameter = torch.nn.Parameter(torch.zeros(1))
    recipe = yaml.safe_load(recipe_path("zoo/mnist5k").read_text())["model"]["init_args"]["optimizer"]
    assert recipe["class_path"] == "torch.optim.Adam"
    assert recipe["init_args"]["weight_decay"] > 0

    def optimizer(*args):
        succeed("fit", "--config", "zoo/mnist5k", *args)
        return built.model.optimizer([parameter])

    given = optimizer("--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.1")
    alone = torch.optim.SGD([parameter], lr=0.1)
    assert type(given) is torch.optim.SGD
    assert given.defaults == alone.defaults
    Path("sgd.yaml").write_text("model: {init_args: {optimizer: {class_path: SGD, init_args: {lr: 0.1}}}}")
    assert optimizer("--config", "sgd.yaml").defaults == alone.defaults
    # The same class again is a change of what the recipe says.
    kept = optimizer("--model.optimizer=Adam", "--model.optimizer.lr=0.1").defaults
    assert (kept["lr"], kept["weight_decay"]) == (0.1, recipe["init_args"]["weight_decay"])


def test_callbacks_are_added_or_replaced(built):
    def kinds(*args):
        succeed("fit", "--config", "zoo/digits_mlp", *args)
        return {type(callback) for callback in built.trainer.callbacks}

    monitor = "pytorch_lightning.callbacks.LearningRateMonitor"
    assert {ZooExport, ZooReport, LearningRateMonitor} <= kinds(f"--trainer.callbacks+={monitor}")
    Path("more.yaml").write_text(f"trainer: {{callbacks+: [{{class_path: {monitor}}}]}}")
    assert {ZooExport, ZooReport, LearningRateMonitor} <= kinds("--config", "more.yaml")
    assert not {ZooExport, ZooReport} & kinds("--trainer.callbacks=[]")
    only = kinds(f"--trainer.callbacks={monitor}")
    assert LearningRateMonitor in only
    assert ZooExport not in only


def test_checkpoints_and_loggers_can_be_switched_off():
    args = ["--trainer.enable_checkpointing=false", "--trainer.logger=false", "--trainer.max_epochs=1"]
    succeed("fit", *SMALL, *QUIET, "--run_dir=run", *args)
    assert [path.name for path in Path("run").iterdir()] == ["config.yaml"]


# ---- sizes follow from the data


def test_sizes_of_the_network_follow_from_the_data(built):
    for args, size, classes in ([], 8, 10), (["--data.transforms+=Quadrant"], 16, 40):
        succeed("fit", *SMALL, *args)
        assert built.data.num_classes == classes
        arguments = built.model.network.architecture["init_args"]
        assert arguments == {
            **MultiLayerPerceptron(widths=[8]).architecture["init_args"],
            **{"in_channels": 1, "image_size": [size, size], "num_classes": classes},
        }


def test_networks_and_tasks_of_ones_own():
    Path("mine.yaml").write_text(
        """
        trainer: {max_epochs: 1}
        model:
          class_path: test_cli.TheirTask
          init_args:
            members: 2
            network: {class_path: test_cli.SizelessNetwork, init_args: {hidden: 5}}
        data: {class_path: DigitsDataModule, init_args: {max_samples: 64}}
        """
    )
    succeed("fit", "--config=mine.yaml", "--run_dir=run", "--trainer.callbacks+=ZooExport", *QUIET)
    zoo = ModelZoo.open("run/zoo", allow=["test_cli"])
    written = {"class_path": "test_cli.SizelessNetwork", "init_args": {"hidden": 5, "num_classes": 10}}
    assert zoo.architecture == written
    # Their task and network come back from the checkpoint as well, where the user trusts it.
    args = ["test", "--ckpt_path=run/checkpoints/last.ckpt", "--data=DigitsDataModule", "--run_dir=tested", *QUIET]
    assert "last.ckpt names test_cli.TheirTask, which is not in the allow-list" in call(*args).error
    for trust in ("--model.allow=[test_cli]", "--model=test_cli.TheirTask"):
        succeed(*args, trust)


def test_a_plain_module_is_wrapped_and_keeps_its_own_defaults():
    """The recipe's widths are those of its own class, and do not become an argument of another one."""
    args = ["fit", "--config=zoo/digits_mlp", "--model.network=test_cli.Plain", "--run_dir=run", *QUIET]
    args += ["--model.members=2", "--trainer.max_epochs=1", "--data.max_samples=64"]
    Path("mine.yaml").write_text("model: {init_args: {network: {class_path: test_cli.Plain}}}")
    in_a_file = ["--config=mine.yaml" if "network" in arg else arg for arg in args]
    assert "test_cli.Plain, which is not in the allow-list" in call(*in_a_file).error
    assert {path.name for path in Path().iterdir()} == {"mine.yaml"}
    succeed(*args)  # whoever names a class on the command line trusts it
    assert yaml.safe_load(Path("run/config.yaml").read_text())["model"]["init_args"]["allow"] == ["test_cli"]
    zoo = ModelZoo.open("run/zoo", allow=["test_cli"])
    assert zoo.architecture == {
        "class_path": "test_cli.Plain",
        "init_args": {"num_classes": 10, "widths": [4], "kind": ""},
    }
    assert type(zoo.load(0).module) is Plain
    succeed(*in_a_file, "--model.allow=[test_cli]", "--ckpt_path=last", "--trainer.max_epochs=2")
    model = ZooTask.load_from_checkpoint("run/checkpoints/last.ckpt", weights_only=True, allow=["test_cli"])
    assert model.network.architecture == zoo.architecture


@pytest.mark.parametrize(
    ("given", "widths"),
    [
        (["--model.network=test_cli.Plain"], [4]),
        (["--model.network=test_cli.Plain", "--model.network.widths=[3]"], [3]),
        (["--config={model: {init_args: {network: {class_path: test_cli.Plain}}}}"], [4]),
        (["--model.network=MultiLayerPerceptron"], [64, 64]),
        (["--model.network.widths=[3]"], [3]),
    ],
)
@pytest.mark.few(5, "given2-widths2")
def test_another_network_takes_nothing_from_the_one_of_the_recipe(built, given, widths):
    assert yaml.safe_load(recipe_path("zoo/digits_mlp").read_text())["model"]["init_args"]["network"]["init_args"] == {
        "widths": [64, 64]
    }
    succeed("fit", "--config=zoo/digits_mlp", "--model.allow=[test_cli]", *given)
    assert built.model.network.architecture["init_args"]["widths"] == widths


RECTANGLES = ["--data=TensorDataModule", "--data.train=rectangles.pt"]


@pytest.mark.parametrize("name", ["SquareNetwork", "SquareModule", "SizesOnly", "SideByDefault"])
def test_the_side_of_square_images_is_an_integer_where_a_network_takes_one(name, built):
    torch.save({"x": torch.randn(90, 1, 4, 6), "y": torch.arange(90) % 3}, "rectangles.pt")
    fit = ["fit", "--model=ZooTask", f"--model.network=test_cli.{name}", "--model.allow=[test_cli]", "--run_dir=run"]
    succeed(*fit, "--data=DigitsDataModule")
    network = built.model.network
    assert network.architecture["init_args"]["image_size"] == 8
    assert network(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    result = call(*fit, *RECTANGLES)
    assert result.status == 1
    says = "does not take the data's image_size=(4, 6), height" if name == "SideByDefault" else "takes int, and that of"
    assert says in result.error


def test_a_network_of_sizes_alone_comes_back_from_its_checkpoint():
    args = ["--data=DigitsDataModule", "--data.max_samples=64", "--trainer.max_epochs=1", "--run_dir=run", *QUIET]
    succeed("fit", "--model=ZooTask", "--model.members=1", "--model.network=test_cli.SizesOnly", *args)
    again = ["--ckpt_path=run/checkpoints/last.ckpt", "--model.allow=[test_cli]", "--trainer.max_epochs=2"]
    succeed("fit", *args, *again)
    model = ZooTask.load_from_checkpoint("run/checkpoints/last.ckpt", allow=["test_cli"])
    assert model.network.architecture["init_args"] == {"image_size": 8, "num_classes": 10}


def test_networks_that_hide_what_they_take_are_told_so():
    args = ["fit", "--model=ZooTask", "--data=DigitsDataModule", "--trainer.fast_dev_run=true", *QUIET]
    with pytest.warns(UserWarning, match="AnyName takes arguments of any name .* are not handed to it; name them"):
        call(*args, "--model.network=test_cli.AnyName")
    result = call(*args, "--model.network=test_cli.made")
    assert result.error == (
        "model.network must name a class, to which sizes of the data are handed, and test_cli.made is a function."
    )


def test_a_task_without_a_network_argument():
    args = ["--data=DigitsDataModule", "--trainer.max_epochs=1", "--trainer.limit_train_batches=1", *QUIET]
    succeed("fit", "--model=test_cli.NetworklessTask", "--run_dir=run", *args)
    saved = torch.load("run/checkpoints/last.ckpt", weights_only=True)["hyper_parameters"]
    assert "network" not in saved
    assert saved["width"] == 3


# ---- the run folder


def test_a_run_is_not_written_over(run):
    before = contents(run)
    result = call("fit", "--config=zoo/digits_mlp", f"--run_dir={run}", *QUIET)
    assert result.status == 1
    for way in ("--ckpt_path last", "--run_dir FOLDER", "--overwrite true"):
        assert way in result.error
    assert contents(run) == before


def test_a_run_is_replaced_when_asked_for(run):
    before = contents(run)
    (run / "config_test.yaml").write_text("# of an earlier test")
    args = ["--config=zoo/digits_mlp", f"--run_dir={run}", "--model.members=1", "--trainer.max_epochs=1", *QUIET]
    succeed("fit", *args, "--overwrite=true")
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["trainer"]["max_epochs"] == 1
    assert config["overwrite"] is False  # to repeat the run is not to replace it once more
    assert [row["epoch"] for row in read_csv(run / "metrics.csv")] == ["0"]
    assert not (run / "config_test.yaml").exists()
    events = list(run.glob("events.*"))
    assert len(events) == 1
    assert events[0] not in before
    after = contents(run)
    assert after[run / "zoo/member-0000.safetensors"] != before[run / "zoo/member-0000.safetensors"]
    # Members that were not trained anew stay.
    assert after[run / "zoo/member-0002.safetensors"] == before[run / "zoo/member-0002.safetensors"]
    assert call("fit", *args).status == 1


@pytest.mark.parametrize(
    ("args", "status"),
    [
        (["--config=zoo/digits_mlp", "--model.membres=1"], 2),
        (["--config=zoo/digits_mlp", "--model.members=0"], 1),
        (["--config=zoo/digits_mlp", "--trainer.accelerator=gpuu"], 1),
        (["--config=zoo/cifar10_myrtle", "--data.download=false"], 1),  # found out when the data are read
        (["--config=zoo/digits_mlp", "--model.network.widths=[3]"], 1),  # the zoo holds another architecture
    ],
)
def test_a_mistake_does_not_cost_the_earlier_run(args, status, run):
    before = contents(run)
    result = call("fit", *QUIET, *args, f"--run_dir={run}", "--overwrite=true")
    assert result.status == status, result.err
    assert contents(run) == before


def test_a_folder_that_is_no_run_is_not_removed():
    Path("thesis/results").mkdir(parents=True)
    Path("thesis/results/years_of_work.txt").write_text("42")
    for args in ([], ["--overwrite=true"]):
        assert call("fit", *SMALL, *QUIET, "--run_dir=thesis", *args).status == 1
    assert Path("thesis/results/years_of_work.txt").read_text() == "42"


@pytest.mark.parametrize("mistake", ["--data.batch_size=1000", "--model.members=0", "--model=nowhere.Task"])
def test_an_attempt_that_failed_leaves_nothing(mistake):
    args = ["fit", *SMALL, *QUIET, "--run_dir=runs/run", "--trainer.max_epochs=1"]
    assert call(*args, mistake).status
    assert not list(Path().iterdir())
    assert call(*args).status == 0


# ---- test, validate, predict


def test_other_commands_leave_the_files_of_the_fit_alone(run):
    before = contents(run)
    for command in ("test", "validate", "predict"):
        succeed(command, "--config", run / "config.yaml", f"--run_dir={run}", "--ckpt_path=last", *QUIET)
        said = yaml.safe_load((run / f"config_{command}.yaml").read_text())
        assert said["ckpt_path"] == str(run / "checkpoints/last.ckpt")
    assert before.items() <= contents(run).items()
    (tested,) = read_csv(run / "metrics_test.csv")
    zoo = ModelZoo.open(run / "zoo")
    mean = sum(member.metrics["test"]["accuracy"] for member in zoo) / len(zoo)
    assert float(tested["test/accuracy"]) == pytest.approx(mean, abs=1e-6)  # float32 sums
    assert (run / "metrics_validate.csv").exists()


def test_predict_writes_the_probabilities_of_the_runs_own_members(run):
    succeed("predict", "--config", run / "config.yaml", f"--run_dir={run}", *QUIET)
    written = load_file(run / "results/predictions.safetensors")["predictions"]
    zoo = ModelZoo.open(run / "zoo")
    data = next(iter(zoo)).data
    images, _ = DigitsDataModule(**data["arguments"]).split_tensors("test")
    assert written.shape == (len(zoo), len(images), 10)
    torch.testing.assert_close(written.sum(2), torch.ones(written.shape[:2]))
    normal = (images / 255 - torch.tensor(data["mean"])) / torch.tensor(data["std"])
    for number, probabilities in zip(zoo.numbers, written, strict=True):
        expected = zoo.load(number)(normal).softmax(1)
        torch.testing.assert_close(probabilities, expected, atol=1e-4, rtol=1e-3)


def test_a_resumed_run_is_repeated_from_its_start(run):
    before = contents(run)
    args = [f"--config={run}/config.yaml", f"--run_dir={run}", "--ckpt_path=last", "--trainer.max_epochs=3", *QUIET]
    succeed("fit", *args)
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["ckpt_path"] is None
    assert config["trainer"]["max_epochs"] == 3
    # Its members were in the zoo already.
    member = run / "zoo/member-0000.safetensors"
    assert member.read_bytes() != before[member]
    assert [row["epoch"] for row in read_csv(run / "metrics.csv")] == ["0", "1", "2"]


def test_settings_of_a_checkpoint_are_used_and_the_command_line_wins(digits_run, built):
    checkpoint = ["--ckpt_path", digits_run / "checkpoints/last.ckpt"]

    def task(*args):
        succeed("test", *checkpoint, "--data=DigitsDataModule", *args)
        return built.model

    own = task()
    assert (own.members, own.execution, own.keep) == (3, "vmap", "best")
    assert own.network.architecture["init_args"]["widths"] == [64, 64]
    given = task("--model.label_smoothing=0.25", "--model.keep=last")
    assert (given.members, given.label_smoothing, given.keep) == (3, 0.25, "last")
    Path("mine.yaml").write_text("model: {class_path: lightning_sym.tasks.ZooTask, init_args: {execution: loop}}")
    assert task("--config=mine.yaml").execution == "loop"
    # The same with the option written as one word, and behind the others.
    checkpoint[:] = [f"--ckpt_path={digits_run / 'checkpoints/last.ckpt'}"]
    assert task("--model.keep=last").keep == "last"


def test_data_that_do_not_fit_a_checkpoint_are_named(digits_run):
    checkpoint = f"--ckpt_path={digits_run / 'checkpoints/last.ckpt'}"
    result = call("test", checkpoint, "--data=DigitsDataModule", "--data.transforms+=Quadrant")
    assert result.status == 1
    assert "is set to (8, 8), but follows from the data: (16, 16) with DigitsDataModule" in result.error


def test_imports_are_not_searched_for_garbage_and_later_searches_pass_them_over(monkeypatch):
    no_collection = sys.modules["lightning_sym.cli.main"]._no_collection
    with no_collection():
        assert gc.isenabled()  # PyTorch is there already: this process is not the command's own
    monkeypatch.delitem(sys.modules, "torch")
    try:
        with no_collection():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_main_returns_a_status_and_never_exits(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning-sym", "fit", "--bogus"])
    assert main() == 2
    assert main(["fit", "--help"]) == 0
    assert "--run_dir" in capsys.readouterr().out
    assert os.environ.get("LIGHTNING_SYM_TRACEBACK") is None


@pytest.mark.parametrize(
    ("kind", "option"),
    [("ZooTask", "members = 4"), ("SimilarityReport", "dirpath = None"), ("shown.Report", "dirpath = None"),
     ("shown.Net", "width = 8"), ("torch.optim.SGD", "momentum = 0")],
)  # fmt: skip
def test_help_shows_the_options_of_any_class_also_of_its_base(kind, option):
    own = "class Net:\n    def __init__(self, width=8): ...\n\n\nclass Report(ZooReport): ...\n"
    Path("shown.py").write_text(f"from lightning_sym.callbacks import ZooReport\n\n\n{own}")
    assert f"\n  {option}" in succeed("fit", "--help", kind).out


@pytest.mark.parametrize(("options", "bars"), [((), False), (("--trainer.enable_progress_bar=true",), True)])
def test_there_is_a_progress_bar_in_a_pipe_only_if_it_is_asked_for(options, bars):
    quiet = [option for option in QUIET if "progress_bar" not in option]
    result = succeed("fit", *SMALL, "--trainer.max_epochs=1", "--run_dir=piped", *quiet, *options)
    assert ("it/s" in result.out + result.err) == bars
