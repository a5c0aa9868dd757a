"""Every shipped recipe, and one run from end to end."""

import copy
import functools
import json
import re
import shlex
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torchvision
import yaml
from commands import QUIET, call, succeed
from helpers import BRODEN as BRODEN_CATEGORIES
from helpers import dead_charts, one_in, read_csv, write_broden
from pytorch_lightning import Trainer
from pytorch_lightning.loggers.logger import DummyLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams import metadata

import lightning_sym.callbacks
import lightning_sym.datamodules
from lightning_sym._tags import is_detail
from lightning_sym.cli import main
from lightning_sym.datamodules import BrodenDataModule, ZooWeightsDataModule
from lightning_sym.datamodules._downloaded import DownloadedDataModule
from lightning_sym.datamodules.base import LabelledImages
from lightning_sym.recipes import recipe_header, recipe_names, recipe_path, recipe_summary
from lightning_sym.tasks._optimizers import make_scheduler
from lightning_sym.zoo import ModelZoo, read_member

pytestmark = pytest.mark.long

NAMES = recipe_names()


@functools.cache
def as_written(name):
    return yaml.safe_load(recipe_path(name).read_text())


def settings(name):
    return copy.deepcopy(as_written(name))


def data_class(name):
    return getattr(lightning_sym.datamodules, settings(name)["data"]["class_path"].rsplit(".")[-1])


DOWNLOADED = [name for name in NAMES if issubclass(data_class(name), DownloadedDataModule)]
BRODEN = [name for name in NAMES if data_class(name) is BrodenDataModule]
EMBEDDED = [name for name in NAMES if name not in (*DOWNLOADED, *BRODEN)]
ZOOS = [name for name in NAMES if settings(name)["model"]["class_path"] == "lightning_sym.tasks.ZooTask"]


def class_paths(node):
    if isinstance(node, dict):
        return [*([node["class_path"]] if "class_path" in node else []), *class_paths(list(node.values()))]
    return [path for item in node for path in class_paths(item)] if isinstance(node, list) else []


def arguments(recipe):
    return recipe["model"]["init_args"]


# One for each set of classes: what the whole configuration of a class holds does not depend on the values.
OTHER = {tuple(class_paths(settings(name))): name for name in NAMES}.values()


@pytest.mark.parametrize("name", NAMES)
def test_header_says_all_that_a_reader_needs(name):
    lines = recipe_path(name).read_text().splitlines()
    header = lines[: next(index for index, line in enumerate(lines) if not line.startswith("#"))]
    assert recipe_summary(name).endswith(".")
    assert len(recipe_summary(name)) <= 110  # one line in the list of recipes
    assert header[1] == "#"
    found = [match[1] for line in header[2:] if (match := re.match(r"# (\w+): +\S", line))]
    assert found == ["question", "source", "expected", "time", "hardware"]
    assert all(re.match(r"# (\w+: +| +)\S", line) for line in header[2:])


@pytest.mark.parametrize("name", NAMES)
def test_sections_are_in_order_and_classes_named_in_full(name):
    recipe = settings(name)
    requires = ["requires"] if "requires" in recipe else []
    assert list(recipe) == ["seed_everything", "run_dir", *requires, "trainer", "model", "data"]
    assert recipe["run_dir"] == "runs/" + name.replace("/", "-").replace("_", "-")
    for path in class_paths(recipe):
        if path.startswith("lightning_sym."):
            room, _, kind = path.removeprefix("lightning_sym.").partition(".")
            assert kind in getattr(lightning_sym, room).__all__
        else:
            assert path.startswith(("torch.optim.", "pytorch_lightning."))


@pytest.mark.parametrize("name", one_in(3, NAMES))
def test_print_config_can_be_read_back(name):
    whole = call("fit", "--config", name, "--print_config")
    assert (whole.status, whole.err) == (0, "")
    Path("whole.yaml").write_text(whole.out)
    Path("short.yaml").write_text(call("fit", "--config", name, "--print_config=skip_default").out)
    assert len(Path("short.yaml").read_text()) < 0.6 * len(whole.out)
    for file in ("short.yaml", *(["whole.yaml"] if name in OTHER else [])):
        assert call("fit", "--config", file, "--print_config").out == whole.out


@pytest.mark.parametrize("name", one_in(3, [name for name in NAMES if "requires" in settings(name)]))
def test_what_a_recipe_requires_is_what_the_other_recipe_leaves(name, built):
    assert call("fit", "--config", name, *QUIET).status == 0
    assert type(built.data) is data_class(name)
    for option, other in settings(name)["requires"].items():
        several, _, entry = option.rpartition(".")
        assert several in ("model", "model.zoos", "data")
        of = built.data if several == "data" else built.model
        folder = built.model.folders[entry] if several == "model.zoos" else getattr(of, entry)
        recipe, *options = shlex.split(other)
        if options:  # not what the recipe leaves by itself, and so somewhere else
            assert folder != settings(recipe)["run_dir"] + "/zoo"
            assert folder.endswith("/zoo")
        else:
            assert folder == settings(recipe)["run_dir"] + "/zoo"
        # The weights of a zoo are other data than its images.
        assert data_class(name) in (data_class(recipe), ZooWeightsDataModule)


@pytest.mark.parametrize("name", one_in(3, ZOOS))
def test_model_and_data_are_built_and_fit_each_other(name, built):
    succeed("fit", "--config", name, *QUIET)
    assert type(built.data) is data_class(name)
    network = built.model.network.eval()
    with torch.no_grad():
        assert network(torch.zeros(2, *built.data.input_shape)).shape == (2, built.data.num_classes)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = built.model.optimizer([parameter])
    if built.model.lr_scheduler is not None:
        make_scheduler(built.model.lr_scheduler, optimizer, built.model, built.model.lr_scheduler_interval)
        if "T_max" in (schedule := settings(name)["model"]["init_args"]["lr_scheduler"]["init_args"]):
            assert schedule["T_max"] == built.trainer.max_epochs


# They train the zoos that they need: a minute each. make demo runs the first of them in full.
SLOW = (
    "stitching/mnist5k",
    "stitching/mnist5k_cct",
    "matching/mnist5k_cnn",
    "matching/mnist5k_vit",
    "similarity/width",
    "similarity/activations",
)


@pytest.fixture(scope="session")
def trials():
    """Return the folders that trials of required recipes have left, by their options."""
    return {}


@pytest.fixture
def without_another_process(monkeypatch, trials, tmp_path_factory):
    """Let this process, which has imported all that it takes, run what a recipe requires; the test below starts one.

    What several recipes require is run once.
    """

    def run(requirement, options):
        trial = (requirement.recipe, *(one for one in options if not one.startswith(("--run_dir=", "--zoo_dir="))))
        if trial not in trials:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The learning rate comes to its lowest")  # a trial is one epoch
                assert main(["fit", "--config", *shlex.split(requirement.recipe), *options]) == 0
            trials[trial] = shutil.copytree(requirement.folder, tmp_path_factory.mktemp("trial") / "zoo")
        shutil.copytree(trials[trial], requirement.folder, dirs_exist_ok=True)

    monkeypatch.setattr("lightning_sym.cli.requirements._run", run)


@pytest.mark.usefixtures("without_another_process", "part_of_mnist", "unproven")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in EMBEDDED]
)
def test_embedded_recipes_run(name, monkeypatch):
    logged, charts = set(), {}
    log = DummyLogger.log_metrics  # which checks the names

    def log_metrics(self, metrics, step=None):
        log(self, metrics, step)
        logged.update(metrics)

    monkeypatch.setattr(DummyLogger, "log_metrics", log_metrics)
    real = Trainer.fit

    @functools.wraps(real)
    def fit(self, model, *args, **kwargs):
        real(self, model, *args, **kwargs)
        charts.clear()  # those of a zoo that is made first
        charts.update(getattr(model, "charts", {}))

    monkeypatch.setattr(Trainer, "fit", fit)
    result = succeed("fit", "--config", name, "--trainer.fast_dev_run=true", *QUIET)
    assert result.err == ""
    assert list(Path().iterdir()) == []  # a trial leaves nothing behind
    assert dead_charts(charts, logged) == []


def _made_up_images(module):
    """Return random images in place of those that would be downloaded."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        LabelledImages(
            torch.randint(256, (count, *module.source_shape), generator=generator, dtype=torch.uint8),
            torch.randint(10, (count,), generator=generator),
        )
        for count in (80, 40)
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 19 sites with 7 maps each
@pytest.mark.usefixtures("without_another_process")
@pytest.mark.parametrize("name", DOWNLOADED)
def test_recipes_of_downloaded_data_run_on_made_up_images(name, monkeypatch):
    monkeypatch.setattr(DownloadedDataModule, "prepare_data", lambda self: None)
    monkeypatch.setattr(DownloadedDataModule, "load", _made_up_images)
    for module in {data_class(name) for name in DOWNLOADED}:
        monkeypatch.setattr(module, "source_sizes", None)
    recipe = settings(name)
    small = {"members": 2, "pairs": "[[0,1]]"}
    few = [f"--model.{option}={count}" for option, count in small.items() if option in arguments(recipe)]
    requires = {
        option: f"{made} --model.members 2 --data.batch_size 16" for option, made in recipe.get("requires", {}).items()
    }
    if requires:
        few += [f"--requires={json.dumps(requires)}", *(f"--{option}=few-{option}/zoo" for option in requires)]
    result = succeed("fit", "--config", name, "--trainer.fast_dev_run=true", "--data.batch_size=16", *few, *QUIET)
    assert result.err == ""


@pytest.fixture(scope="session")
def imported(tmp_path_factory):
    """Return the folder of zoos with random weights, imported as the header of dissection/broden says.

    ResNet-34 has the blocks and names of a ResNet-50, and a quarter of its channels.
    """
    folder = tmp_path_factory.mktemp("imported")
    header = recipe_header("dissection/broden")["source"]
    commands = [
        command.split() for command in re.findall(r"lightning-sym (import (?:(?!lightning-sym ).)+/\w+)", header)
    ]
    assert len(commands) == 3
    for number, (verb, _, option, network, *others) in enumerate(commands):
        model = "convnext_tiny" if "convnext" in network else "resnet34"
        torch.manual_seed(number)
        torch.save(torchvision.models.get_model(model, weights=None).state_dict(), file := folder / f"{number}.pth")
        smaller = ["--network.model", model] if network == "LinearSumsResNet" else []
        network = network.replace("resnet50", model)
        out = others.pop()
        assert others.pop() == "--out"
        succeed(verb, file, option, network, *smaller, *others, "--out", folder / out)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", BRODEN)
def test_recipes_of_broden_run_to_the_end_on_made_up_images(name, imported):
    shutil.copytree(imported / "zoos", "zoos")
    write_broden(Path("data/broden1_224"))
    few = ["--data.image_size=64", "--model.alphas=[0,0.5,1]", "--model.top=0.2"]
    succeed("fit", "--config", name, *QUIET[:2], *few)  # with the summary
    results = Path(settings(name)["run_dir"]) / "results"
    zoos = arguments(settings(name))["zoos"]
    rows = read_csv(results / "bases.csv")
    assert [(row["zoo"], float(row["alpha"])) for row in rows] == [(zoo, a) for zoo in zoos for a in (0.0, 0.5, 1.0)]
    assert {int(row["units"]) for row in rows} == ({512} if name.endswith("inside") else {512, 768})
    assert all(int(row["interpretable"]) > 0 for row in rows)
    assert {row["category"] for row in read_csv(results / "categories.csv")} <= set(BRODEN_CATEGORIES)
    names = [zoo.replace(" ", "-") for zoo in zoos]
    pictures = {f"{kind}-{zoo}.png" for kind in ("concepts", "best-units") for zoo in names}
    assert {file.name for file in results.glob("*.png")} == {"dissection.png", "categories.png", *pictures}


def test_what_a_recipe_requires_is_made_first_and_only_once(tmp_path):
    network = "{class_path: MultiLayerPerceptron, init_args: {widths: [6]}}"
    (tmp_path / "small.yaml").write_text(
        f"""
        seed_everything: 0
        trainer: {{max_epochs: 1, callbacks: [{{class_path: ZooExport}}]}}
        model: {{class_path: ZooTask, init_args: {{members: 2, network: {network}}}}}
        data: {{class_path: DigitsDataModule, init_args: {{max_samples: 64}}}}
        """
    )
    fit = [
        *("fit", "--config", "matching/mnist5k_mlp", *QUIET, "--requires", '{"model.zoo": small.yaml}'),
        *("--model.zoo=made/zoo", "--data=DigitsDataModule", "--data.batch_size=32", "--data.max_samples=64"),
        "--trainer.max_epochs=1",
    ]
    result = succeed(*fit)
    assert "made/zoo, which model.zoo names, is not there: it is made first, by lightning-sym fit" in result.out
    assert ModelZoo.open("made/zoo").numbers == [0, 1]
    times = {path: path.stat().st_mtime_ns for path in Path("made").rglob("*")}
    rows = read_csv(Path("runs/matching-mnist5k-mlp/results/summary.csv"))
    assert [row["method"] for row in rows] == ["unmatched", "weights", "activations", "straight_through"] * 2
    again = call(*fit, "--overwrite=true")
    assert again.status == 0, again.err
    assert "is not there" not in again.out
    assert {path: path.stat().st_mtime_ns for path in Path("made").rglob("*")} == times


def test_a_run_leaves_what_the_design_promises(digits_run):
    files = {path.relative_to(digits_run).as_posix() for path in digits_run.rglob("*") if path.is_file()}
    files = {re.sub(r"tfevents\..*", "tfevents", name) for name in files if "/." not in name}
    assert files == {
        "config.yaml",
        "hparams.yaml",
        "metrics.csv",
        "events.out.tfevents",
        "checkpoints/last.ckpt",
        "results/members.csv",
        "results/members.json",
        "results/numbers.csv",
        "results/numbers.json",
        "results/validation_curves.png",
        "results/confusion.png",
        "terminal.txt",
        "zoo/manifest.json",
        *(f"zoo/member-000{number}.safetensors" for number in range(3)),
    }
    terminal = (digits_run / "terminal.txt").read_text()
    for place in ("results/validation_curves.png", "results/members.csv", "zoo", ""):
        assert str(digits_run / place) in terminal
    assert (digits_run / "results/confusion.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_numbers_of_a_run_agree_with_each_other(digits_run):
    table = read_csv(digits_run / "results/members.csv")
    report = json.loads((digits_run / "results/members.json").read_text())
    assert report["seeds"] == [0, 1, 2] == [int(row["member"]) for row in table]
    accuracies = [float(row["test_accuracy"]) for row in table]
    assert min(accuracies) > 0.85  # two epochs reach 0.9; a tenth would be guessing
    zoo = ModelZoo.open(digits_run / "zoo")
    assert [member.metrics["test"]["accuracy"] for member in zoo] == pytest.approx(accuracies, abs=1e-7)
    assert {member.data["fingerprint"] for member in zoo} == {report["data"]["fingerprint"]}
    rows = read_csv(digits_run / "metrics.csv")
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert int(rows[0]["step"]) < int(rows[1]["step"])
    assert all(float(row["val/accuracy"]) > 0 and float(row["train/loss"]) > 0 for row in rows)


def test_tensorboard_shows_means_and_extremes_the_main_figure_and_the_config(digits_run):
    events = EventAccumulator(str(digits_run), size_guidance={"tensors": 0}).Reload()
    of_splits = {f"{split}/{name}{end}" for split in ("train", "val") for name in ("accuracy", "loss")
                 for end in ("", "/min", "/max")}  # fmt: skip
    assert set(events.Tags()["scalars"]) == of_splits | {"test/accuracy"}
    details = {name for name in read_csv(digits_run / "metrics.csv")[0] if is_detail(name)}
    assert len(details) == 3 * 4  # members; accuracy and loss of two splits
    (text,) = events.Tensors("config/text_summary")
    shown = "\n".join(line[4:] for line in text.tensor_proto.string_val[0].decode().splitlines())
    assert "profiler: null" not in shown
    Path("shown.yaml").write_text(shown)  # says all that the run depends on
    whole, short = (
        call("fit", "--config", file, "--print_config").out for file in (digits_run / "config.yaml", "shown.yaml")
    )
    assert short == whole
    (layout,) = events.Tensors("custom_scalars__config__")
    (first,) = Layout.FromString(layout.tensor_proto.string_val[0]).category
    assert first.title == "ZooTask"
    charts = {chart.title: chart.multiline.tag[0] for chart in first.chart}
    assert list(charts) == ["accuracy", "accuracy, lowest and highest", "loss", "loss, lowest and highest"]
    assert dead_charts(charts, of_splits) == []
    assert dead_charts({"none": "val/f1$"}, of_splits) == ["none"]
    about = events.PluginTagToContent("hparams")
    experiment = metadata.parse_experiment_plugin_data(about[metadata.EXPERIMENT_TAG])
    assert [info.name.tag for info in experiment.metric_infos] == ["test/accuracy"]
    settings = metadata.parse_session_start_info_plugin_data(about[metadata.SESSION_START_INFO_TAG]).hparams
    assert settings["members"].number_value == 3
    assert settings["network"].string_value == "MultiLayerPerceptron"
    infos = metadata.parse_experiment_plugin_data(about[metadata.EXPERIMENT_TAG]).hparam_infos
    assert {"lr", "members", "network", "seed"} <= {info.name for info in infos if info.differs}  # the first columns
    assert {"execution", "network/activation"} < {info.name for info in infos if not info.differs}
    assert not {"allow", "_instantiator", "_class_path"} & set(settings)


def test_config_of_a_run_repeats_it_bit_by_bit(digits_run):
    succeed("fit", "--config", digits_run / "config.yaml", "--run_dir", "other")
    for number in range(3):
        name = f"member-000{number}.safetensors"
        mine, theirs = read_member(digits_run / "zoo" / name)[1], read_member(Path("other/zoo") / name)[1]
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    first, second = (yaml.safe_load((run / "config.yaml").read_text()) for run in (digits_run, Path("other")))
    assert {**first, "run_dir": "other"} == second
