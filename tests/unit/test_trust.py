"""Class paths in files that are not the user's own: nothing outside the allow-list is imported, whatever names it."""

import functools
import io
import sys
from pathlib import Path

import pytest
import torch
from commands import QUIET, SMALL, call, succeed
from helpers import assert_refused
from torchvision.models import SqueezeNet

from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import StitchingTask, ZooTask

EVIL = """
from pathlib import Path
import torch
Path("marker").touch()
class Net(torch.nn.Module):
    def __init__(self, **arguments):
        super().__init__()
class Task(Net):
    pass
def function(*arguments):
    return Net()
"""
MLP = {"class_path": "lightning_sym.networks.MultiLayerPerceptron", "init_args": {"widths": [4]}}
ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)
# What a hostile checkpoint says in place of what a task wrote.
HOSTILE = {
    "task": {"_class_path": "evil.Task"},
    "loss": {"loss": "evil.function"},
    "loss, class": {"loss": {"class_path": "evil.Net"}},
    "loss, file": {"loss": "evil.yaml"},
    "loss, file elsewhere": {"loss": "./evil.yaml"},
    "loss, text": {"loss": "{class_path: evil.Net}"},
    "loss, of a trusted class": {"loss": {"class_path": "torch.nn.Sequential", "init_args": {"args": "evil.function"}}},
    "loss, in a list": {"loss": [{"class_path": "evil.Net"}]},
    "loss, key with dots": {"loss": {"class_path": "torch.nn.MSELoss", "init_args.inner.class_path": "evil.Net"}},
    "loss, imported module": {"loss": "os.system"},
    "loss, of torch": {"loss": "torch.hub.load"},
    "loss, by way of a trusted module": {"loss": "lightning_sym.tasks.population.torch.hub.load"},
    "network": {"network": {"class_path": "evil.Net"}},
    "network, text": {"network": "{class_path: evil.Net}"},
    "network that says whom to trust": {"network": {"class_path": "evil.Net"}, "allow": ["evil"]},
    "network, nested": {
        "network": {"class_path": "torchvision.models.resnet18", "init_args": {"norm_layer": "evil.function"}}
    },
    "optimizer": {"optimizer": "evil.function"},
    "optimizer, nested": {"optimizer": {"class_path": "torch.optim.SGD", "dict_kwargs": {"x": "evil.function"}}},
    "scheduler": {"lr_scheduler": {"class_path": "evil.Net"}},
    "loss, of Lightning": {"loss": "pytorch_lightning.seed_everything"},
    "no plain value": {"members": torch.tensor(2)},
    "without end": {"pairs": ENDLESS, "seed": ENDLESS},
    "no name": {"loss": {"class_path": ["evil.Net"]}},
    "a list": ["evil.Net"],
}


@pytest.fixture(autouse=True)
def beside(tmp_path, monkeypatch):
    """Work in a folder that is on the module path and holds a module which leaves a mark when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("evil.py").write_text(EVIL)
    Path("evil.yaml").write_text("class_path: evil.Net\n")
    yield
    sys.modules.pop("evil", None)


def write(settings, *, key="hyper_parameters", **others):
    """Write a checkpoint of a small task that says something else."""
    if isinstance(settings, dict):
        own = {"_class_path": "lightning_sym.tasks.ZooTask", "members": 2, "network": MLP}
        settings = {**own, "_instantiator": "pytorch_lightning.cli.instantiate_module", **settings}
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.0", key: settings, **others}, "evil.ckpt")
    return "evil.ckpt"


@pytest.mark.parametrize("settings", HOSTILE.values(), ids=HOSTILE)
def test_a_checkpoint_imports_nothing_at_the_command_line_and_in_python(settings):
    said = call("test", "--ckpt_path", write(settings), "--data=DigitsDataModule", *QUIET)
    assert not Path("marker").exists()
    assert "evil" not in sys.modules
    assert said.status == 1
    assert said.error.startswith("evil.ckpt "), said.error
    assert_refused(lambda: ZooTask.load_from_checkpoint(write(settings)), says="evil.ckpt")
    assert not Path("marker").exists()


@pytest.mark.parametrize("key", ["hparams", "module_arguments", "datamodule_hyper_parameters"])
def test_other_places_of_settings_are_checked_too(key):
    kind, kept = (DigitsDataModule, {}) if key.startswith("data") else (ZooTask, {"hyper_parameters": {"members": 2}})
    settings = {"_class_path": "evil.Net"}
    if key.startswith("data"):
        settings |= {"transforms": [{"class_path": "evil.Net"}]}
    assert_refused(lambda: kind.load_from_checkpoint(write(settings, key=key, **kept)), says="allow-list")
    write({"_class_path": "lightning_sym.datamodules.DigitsDataModule", "transforms": "evil.yaml"}, key=key, **kept)
    if key.startswith("data"):
        assert_refused(lambda: kind.load_from_checkpoint("evil.ckpt"), says="evil.yaml")
    assert not Path("marker").exists()


def test_settings_of_an_open_file_and_of_a_file_beside_it_are_checked():
    write({"loss": "evil.function"})
    assert_refused(lambda: ZooTask.load_from_checkpoint(io.BytesIO(Path("evil.ckpt").read_bytes())), says="allow-list")
    write({})
    Path("hparams.yaml").write_text("loss: evil.function\n")
    loading = {"hparams_file": "hparams.yaml"}
    assert_refused(lambda: ZooTask.load_from_checkpoint("evil.ckpt", **loading), says="allow-list")
    write({"_instantiator": "evil.function"})
    assert_refused(lambda: ZooTask.load_from_checkpoint("evil.ckpt"), says="evil.function")
    write({"_class_path": "lightning_sym.tasks.StitchingTask", "maps": ["full", {"class_path": "evil.Net"}]})
    assert_refused(lambda: StitchingTask.load_from_checkpoint("evil.ckpt"), says="allow-list")
    assert not Path("marker").exists()


@pytest.mark.parametrize("place", ["network", "loss", "optimizer", "lr_scheduler"])
@pytest.mark.parametrize("weights", [{"weights": "DEFAULT"}, {"weights": "IMAGENET1K_V1", "progress": False}])
@pytest.mark.few(3)
def test_a_checkpoint_fetches_no_trained_weights(place, weights, monkeypatch):
    """At the command line a function is no network, but may be called as a loss or make an optimizer."""
    fetched, built = [], []
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *_, **__: fetched.append(1) or {})
    real = SqueezeNet.__init__
    monkeypatch.setattr(SqueezeNet, "__init__", functools.wraps(real)(lambda *a, **k: built.append(1) or real(*a, **k)))
    network = {"class_path": "torchvision.models.squeezenet1_1", "init_args": {"num_classes": 1000, **weights}}
    file = write({place: network, "members": 1})
    with pytest.raises((TypeError, ValueError)):
        ZooTask.load_from_checkpoint(file)
    assert built
    built.clear()
    said = call("test", "--ckpt_path", file, "--data=DigitsDataModule", *QUIET)
    assert said.status
    assert bool(built) == (place != "network"), said.error
    assert not fetched


def test_what_the_user_names_is_trusted_and_what_a_task_wrote_comes_back():
    succeed("fit", *SMALL, *QUIET, "--trainer.max_epochs=1", "--run_dir=run")
    checkpoint = "run/checkpoints/last.ckpt"
    succeed("test", "--ckpt_path", checkpoint, "--data=DigitsDataModule", "--run_dir=tested", *QUIET)
    network = MultiLayerPerceptron(widths=[8], image_size=8).architecture
    assert (
        ZooTask.load_from_checkpoint(checkpoint).network.architecture["init_args"].keys() == network["init_args"].keys()
    )
    assert DigitsDataModule.load_from_checkpoint(checkpoint).hparams["max_samples"] == 64
    content = torch.load(checkpoint)
    content["hyper_parameters"]["loss"] = "evil.function"
    torch.save(content, "named.ckpt")
    assert "allow-list" in call("test", "--ckpt_path=named.ckpt", "--data=DigitsDataModule").error
    call("test", "--ckpt_path=named.ckpt", "--data=DigitsDataModule", "--model.allow=[evil]", "--run_dir=named", *QUIET)
    assert Path("marker").exists()  # the user's own word
