"""Every class that a recipe or a guide may name is built by the command line, with and without arguments."""

import inspect
import itertools
import re
from pathlib import Path
from typing import Literal, get_origin

import pytest
import torch
import yaml
from commands import QUIET, SMALL, call, succeed
from helpers import write_zoo
from jsonargparse._parameter_resolvers import get_signature_parameters
from pytorch_lightning import Callback, LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import Dataset

from lightning_sym import callbacks, datamodules, networks, tasks
from lightning_sym.datamodules import (
    DatasetDataModule,
    DigitsDataModule,
    ImageTransform,
    LabelledImages,
    TensorDataModule,
)
from lightning_sym.datamodules._downloaded import DownloadedDataModule
from lightning_sym.networks import MultiLayerPerceptron, Network, WrappedNetwork
from lightning_sym.recipes import recipe_names, recipe_path

GUIDES = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))


def public(room, base):
    """Return the classes of a room that can be made, by name."""
    found = [kind for kind in vars(room).values() if inspect.isclass(kind) and issubclass(kind, base)]
    return sorted((kind for kind in found if not inspect.isabstract(kind)), key=lambda kind: kind.__name__)


# Without a constructor that a command line could call: bases to inherit from, and what code wraps.
NETWORKS = [kind for kind in public(networks, Network) if kind not in (Network, WrappedNetwork)]
TASKS = [kind for kind in public(tasks, LightningModule) if kind is not tasks.PopulationTask]
CALLBACKS = [kind for kind in public(callbacks, Callback) if kind is not callbacks.RunReport]
DATA = public(datamodules, LightningDataModule)
TRANSFORMS = public(datamodules, ImageTransform)
REQUIRED = {
    "model": "stand-in", "zoo": "runs/zoo", "zoos": {"some": "runs/zoo"}, "root": "data", "train": "values.pt",
    "dataset": "test_named_classes.Numbers", "teacher": None, "network": "MultiLayerPerceptron", "size": 16,
    "dirpath": "runs/zoo",
}  # fmt: skip
TAKEN = set(networks.__all__) | set(tasks.__all__) | set(callbacks.__all__) | set(datamodules.__all__)


class Numbers(Dataset[tuple[torch.Tensor, int]]):
    """A data set of a user."""

    def __init__(self, scale: float = 1.0, sizes: list[int] | None = None, count: int = 60, part: str = "a"):
        self.x = scale * torch.ones(count, *(sizes or [3]))
        self.y = torch.arange(count) % 3

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], int(self.y[index])


def numbers(scale: float = 1.0) -> Dataset[tuple[torch.Tensor, int]]:
    return Numbers(scale)


class Handed(TensorDataModule):
    """A datamodule of a user, whose arguments are of generic classes wherever a class may stand."""

    def __init__(
        self,
        one: Dataset[int] | None = None,
        several: list[Dataset[int]] | None = None,
        by_name: "dict[str, Dataset[int]] | None" = None,
        batch_size: int = 8,
    ):
        self.handed = one, several, by_name
        super().__init__(batch_size=batch_size)

    def load(self):
        return (torch.randn(40, 3), torch.arange(40) % 3), None, None


class Mean(LightningModule):
    """A task that takes whatever comes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        return (self.weight * batch[0].float().mean()).square()

    def validation_step(self, batch, batch_idx):
        assert batch[0].ndim

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


# ---- options are those of the class that is named


def others(kind):
    """Return a value for each argument of a class, other than its default where the type is plain."""
    values = {}
    for parameter in get_signature_parameters(kind):
        default = parameter.default
        if type(default) in (int, float) and get_origin(parameter.annotation) is not Literal:
            values[parameter.name] = default + 1
        elif isinstance(default, bool):
            values[parameter.name] = not default
        elif default is inspect.Parameter.empty and parameter.name in REQUIRED:
            values[parameter.name] = REQUIRED[parameter.name]
    return values


def nested(kind):
    return f"{kind.__module__}.{kind.__qualname__}"


def configurations():
    """Yield names and settings, in which every class has arguments."""
    made = {"class_path": nested(tasks.ZooTask)}
    digits = {"class_path": nested(datamodules.DigitsDataModule)}
    perceptron = {"class_path": nested(networks.MultiLayerPerceptron)}
    models, data = [], []
    for kind in NETWORKS:
        sizes = ("in_channels", "image_size", "num_classes")
        arguments = {n: value for n, value in others(kind).items() if n not in sizes} | (
            {"model": "resnet18"} if kind is networks.TorchvisionNetwork else {}
        )
        network = {"class_path": nested(kind), "init_args": arguments}
        models.append((kind.__name__, {**made, "init_args": {"network": network}}))
    for kind in TASKS:
        arguments = others(kind)
        if "network" in inspect.signature(kind).parameters:
            arguments["network"] = perceptron
        models.append((kind.__name__, {"class_path": nested(kind), "init_args": arguments}))
    model = {**made, "init_args": {"network": perceptron}}
    for kind in DATA:
        data.append((kind.__name__, {"class_path": nested(kind), "init_args": others(kind)}))
    changes = [{"class_path": nested(kind), "init_args": others(kind)} for kind in TRANSFORMS]
    data.append(("transforms", {**digits, "init_args": {"transforms": changes}}))
    reports = [{"class_path": nested(kind), "init_args": others(kind)} for kind in CALLBACKS]
    yield "callbacks", {"model": model, "data": digits, "trainer": {"callbacks": reports}}
    choices = (("SGD", "StepLR", {"step_size": 3}), ("AdamW", "CosineAnnealingLR", {"T_max": 4}),
               ("Adam", "LinearLR", {"total_iters": 7}), ("SGD", "OneCycleLR", {"max_lr": 0.3}))  # fmt: skip
    for optimizer, scheduler, own in choices:
        chosen = {
            "optimizer": {"class_path": f"torch.optim.{optimizer}", "init_args": {"lr": 0.3, "weight_decay": 0.1}},
            "lr_scheduler": {"class_path": f"torch.optim.lr_scheduler.{scheduler}", "init_args": own},
            "loss": {"class_path": "lightning_sym.tasks.SquaredDistance", "init_args": {}},
        }
        models.append((f"{optimizer}, {scheduler}", {**made, "init_args": {**model["init_args"], **chosen}}))
    # The sections do not know of one another: one file tests a model and a datamodule.
    for (one, asked), (other, given) in itertools.zip_longest(models, data, fillvalue=("digits", digits)):
        yield f"{one}, {other}", {"model": asked if one != "digits" else model, "data": given}


def contains(found, wanted):
    """Return whether settings hold all that was asked for."""
    if isinstance(wanted, dict):
        return all(name in found and contains(found[name], value) for name, value in wanted.items() if value != {})
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(contains, found, wanted))
    return found == wanted


@pytest.mark.parametrize("configuration", [pytest.param(one, id=name) for name, one in configurations()])
@pytest.mark.few(9, "SimilarityTask, digits")
def test_arguments_reach_the_class_that_has_them(configuration):
    """A file with every argument comes back from ``--print_config``, and again from what that printed."""
    Path("all.yaml").write_text(yaml.safe_dump(configuration))
    printed = succeed("fit", "--config=all.yaml", "--print_config").out
    found = yaml.safe_load(printed)
    for section, wanted in configuration.items():
        if section == "data" and "dataset" in wanted.get("init_args", {}):  # the class alone stands for all of it
            wanted["init_args"]["dataset"] = {"class_path": REQUIRED["dataset"]}
        assert contains(found[section], wanted), (section, wanted, found[section])
    Path("printed.yaml").write_text(printed)
    assert succeed("fit", "--config=printed.yaml", "--print_config").out == printed


def test_what_recipes_and_guides_name_is_among_them():
    """Nothing else is named there but classes of other packages."""
    tested = {kind.__name__ for kind in (*NETWORKS, *TASKS, *CALLBACKS, *DATA, *TRANSFORMS)} | {"SquaredDistance"}
    text = "".join(recipe_path(name).read_text() for name in recipe_names()) + "".join(map(Path.read_text, GUIDES))
    named = set(re.findall(r"class_path: lightning_sym\.\w+\.(\w+)", text))
    named |= set(re.findall(r"--(?:model|data|model\.network|trainer\.callbacks\+?)[ =](?:[a-z_]+\.)*([A-Z]\w+)", text))
    assert len(named) > 50
    own = {name for name in named if name in TAKEN or name.startswith(("Data", "Zoo"))}
    assert own <= tested, own - tested
    torch_classes = {one.rpartition(".")[2] for one in re.findall(r"class_path: (torch\.optim\.[\w.]+)", text)}
    assert torch_classes <= {"SGD", "Adam", "AdamW", "CosineAnnealingLR", "StepLR", "OneCycleLR", "LinearLR"}


# ---- without arguments, and built


@pytest.mark.parametrize("kind", NETWORKS, ids=lambda kind: kind.__name__)
@pytest.mark.few(5, "CIFARResNet", "CIFARResNet18", "CompactTransformer", "LeNet5")
def test_networks_are_built_for_the_data(kind, built):
    size = ["--data.transforms+=Resized", "--data.transforms.size=32"]
    small = ["--model.network.model=squeezenet1_1"] if kind is networks.TorchvisionNetwork else []
    data = ["--data=DigitsDataModule", "--data.max_samples=64", *size]
    succeed("fit", "--model=ZooTask", "--model.members=1", f"--model.network={kind.__name__}", *small, *data)
    arguments = built.model.network.architecture["init_args"]
    assert (arguments["in_channels"], arguments["num_classes"]) == (1, 10)
    assert arguments.get("image_size", 32) in (32, [32, 32])


def test_callbacks_are_built_without_arguments(built):
    kinds = [kind for kind in CALLBACKS if not any(p.default is p.empty for p in list(signature(kind).values()))]
    assert len(kinds) > 20
    succeed("fit", *SMALL, *(f"--trainer.callbacks+={kind.__name__}" for kind in kinds))
    assert set(kinds) <= {type(callback) for callback in built.trainer.callbacks}


def signature(kind):
    return inspect.signature(kind).parameters


def images_for(module):
    images = torch.randint(256, (60, *module.source_shape), dtype=torch.uint8)
    part = LabelledImages(images, torch.arange(60) % module.source_classes)
    return part, part


@pytest.fixture
def data_files(monkeypatch):
    """Put what datamodules read into the test's folder, and images in the place of a download."""
    monkeypatch.setattr(DownloadedDataModule, "prepare_data", lambda self: None)
    monkeypatch.setattr(DownloadedDataModule, "load", images_for)
    for kind in DATA:
        if issubclass(kind, DownloadedDataModule):
            monkeypatch.setattr(kind, "source_sizes", None)
    torch.save({"x": torch.randn(60, 2, 4), "y": torch.arange(60) % 3}, "values.pt")
    networks = [MultiLayerPerceptron(widths=(3,), image_size=8).fresh(number) for number in range(60)]
    write_zoo(Path("zoo"), networks, DigitsDataModule(), [number / 60 for number in range(60)])


OWN = {
    "TensorDataModule": ["--data.train=values.pt"],
    "DatasetDataModule": ["--data.dataset=test_named_classes.Numbers"],
    "GaussianInputsDataModule": ["--data.shape=[3]"],
    "ZooWeightsDataModule": ["--data.zoo=zoo"],
}
# Its images are a folder in Broden's format; tests/unit/datamodules/test_concept_data.py writes one.
FITTED = [kind for kind in DATA if kind.__name__ not in ("BrodenDataModule", "ConceptsDataModule")]


@pytest.mark.usefixtures("data_files")
@pytest.mark.parametrize("kind", FITTED, ids=lambda kind: kind.__name__)
@pytest.mark.few(5)
def test_datamodules_are_fitted_without_arguments_and_with_some(kind):
    for some in ([], ["--data.batch_size=7"]):
        args = [f"--data={kind.__name__}", *OWN.get(kind.__name__, []), *some, *QUIET, "--trainer.fast_dev_run=true"]
        assert succeed("fit", "--model=test_named_classes.Mean", *args).err == ""


# ---- data sets of one's own


NUMBERS = "--data.dataset=test_named_classes.Numbers"
YAML = """
data:
  class_path: lightning_sym.datamodules.DatasetDataModule
  init_args:
    batch_size: 8
    dataset: {class_path: test_named_classes.Numbers, init_args: {scale: 2.0, sizes: [2, 2]}}
    test: {class_path: test_named_classes.Numbers, init_args: {scale: 5.0, sizes: [2, 2], count: 11}}
"""


@pytest.mark.parametrize(
    ("given", "scale", "shape", "tested"),
    [
        (["--data=DatasetDataModule", NUMBERS], 1, (3,), (1, 12)),
        (["--data=DatasetDataModule", NUMBERS, "--data.dataset.scale=3"], 3, (3,), (3, 12)),
        (["--data=DatasetDataModule", NUMBERS, "--data.dataset.sizes=[2,5]"], 1, (2, 5), (1, 12)),
        (["--data=DatasetDataModule", NUMBERS, "--data.dataset.init_args.part=b"], 1, (3,), (1, 12)),
        (["--data=DatasetDataModule", "--data.dataset=Numbers", "--data.dataset.scale=4"], 4, (3,), (4, 12)),
        (["--data=DatasetDataModule", f"{NUMBERS[:-7]}numbers", "--data.dataset.scale=4"], 4, (3,), (4, 12)),
        (["--config=data.yaml"], 2, (2, 2), (5, 11)),
        (["--config=data.yaml", "--data.dataset.scale=6"], 6, (2, 2), (5, 11)),
        (["--config=data.yaml", "--data.test.count=12", "--data.test.scale=0.5"], 2, (2, 2), (0.5, 12)),
        (["--config=data.yaml", "--data.test=null"], 2, (2, 2), (2, 12)),
    ],
)  # fmt: skip
@pytest.mark.few(5)
def test_a_data_set_is_built_with_its_arguments(given, scale, shape, tested, built):
    Path("data.yaml").write_text(YAML)
    succeed("fit", "--model=test_named_classes.Mean", *given)
    assert type(built.data) is DatasetDataModule
    assert built.data.input_shape == shape
    assert built.data.split_tensors("train").inputs.unique().tolist() == [scale]
    inputs = built.data.split_tensors("test").inputs
    assert (inputs.unique().tolist(), len(inputs)) == ([tested[0]], tested[1])


@pytest.mark.long
def test_a_run_on_a_data_set_is_repeated_resumed_and_tested():
    Path("data.yaml").write_text(YAML)
    network = ["--model=ZooTask", "--model.members=2", "--model.network=MultiLayerPerceptron"]
    args = [*network, "--model.network.widths=[4]", "--config=data.yaml", "--data.dataset.scale=7", *QUIET]
    succeed("fit", *args, "--run_dir=run", "--trainer.max_epochs=1")
    said = yaml.safe_load(Path("run/config.yaml").read_text())["data"]["init_args"]
    assert said["dataset"]["init_args"]["scale"] == 7.0
    assert said["test"]["init_args"]["count"] == 11
    succeed("fit", "--config=run/config.yaml", "--run_dir=run", "--ckpt_path=last", "--trainer.max_epochs=2", *QUIET)
    succeed("test", "--config=run/config.yaml", *QUIET)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["--data.one=test_named_classes.Numbers", "--data.one.scale=2"], lambda one, several, named: one),
        (["--data.several+=test_named_classes.Numbers", "--data.several.scale=2"], lambda one, several, _: several[0]),
        (
            ["--data.by_name={k: {class_path: test_named_classes.Numbers, init_args: {scale: 2}}}"],
            lambda one, several, named: named["k"],
        ),
    ],
)
def test_generic_annotations_of_a_user_are_followed(given, found, built):
    succeed("fit", "--model=test_named_classes.Mean", "--data=test_named_classes.Handed", *given)
    data_set = found(*built.data.handed)
    assert type(data_set) is Numbers
    assert data_set.x.unique().tolist() == [2.0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([NUMBERS, "--data.dataset.scal=3"], "Numbers has no option 'data.dataset.scal'. Did you mean"),
        ([f"{NUMBERS[:-7]}numbers", "--data.dataset.scal=3"], "numbers has no option 'data.dataset.scal'. Did you"),
        (["--data.dataset.scale=3", NUMBERS], "Option 'data.dataset.scale' comes before the class that has it; put"),
        (["--data.dataset=torch.utils.data.Dataset"], "data: The data set for train must have __len__ and"),
    ],
)
def test_mistakes_about_a_data_set_are_one_sentence(given, says):
    result = call("fit", "--model=test_named_classes.Mean", "--data=DatasetDataModule", *given)
    assert result.error.startswith(says)
