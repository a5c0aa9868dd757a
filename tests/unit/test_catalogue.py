"""Options read from source are those that an import finds, and what a command line gives is read as the parser does."""

import pytest
from jsonargparse._parameter_resolvers import get_signature_parameters
from pytorch_lightning import Trainer
from pytorch_lightning.cli import LightningCLI

from lightning_sym.cli import catalogue
from lightning_sym.cli.catalogue import shipped_options
from lightning_sym.cli.given import SECTIONS, SETTINGS, merge, path_of, read_given, unknown_option
from lightning_sym.cli.lightning import RecipeCLI
from lightning_sym.cli.messages import _classes, explain

SHIPPED = sorted(
    {kind for kind in _classes() if kind.__module__.startswith("lightning_sym.")}, key=lambda kind: kind.__name__
)


def test_options_from_source_are_those_that_can_be_given():
    known = {}
    for kind in SHIPPED:
        read = shipped_options(kind.__name__)
        if read is not None:
            known[kind.__name__] = read
            taken = {parameter.name for parameter in get_signature_parameters(kind)}
            assert taken <= read, (kind, taken - read)  # nothing that could be given is refused
    assert {"ZooTask", "StitchingTask", "MyrtleCNN", "ZooExport", "MNIST5kDataModule"} <= set(known)
    assert shipped_options("lightning_sym.tasks.ZooTask") == known["ZooTask"]
    assert shipped_options("pytorch_lightning.Trainer") == {item.name for item in get_signature_parameters(Trainer)}
    assert shipped_options("SGD") is shipped_options("other.ZooTask") is shipped_options("no such") is None


def test_classes_are_found_in_folders_that_are_links(tmp_path, monkeypatch):
    (tmp_path / "tasks").symlink_to(catalogue.folders("lightning_sym.tasks")[0])
    monkeypatch.setattr(catalogue, "folders", lambda _: [tmp_path])
    assert "ZooTask" in catalogue._files_with_classes.__wrapped__()


@pytest.mark.parametrize("command", LightningCLI.subcommands())
def test_all_that_a_command_takes_is_known(command, monkeypatch):
    parsers = []
    monkeypatch.setattr(RecipeCLI, "parse_arguments", lambda self, parser, args: parsers.append(self) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        RecipeCLI([command])
    actions = parsers[0]._parser(command)._actions
    options = {name.removeprefix("--") for action in actions for name in action.option_strings if name[:2] == "--"}
    assert {name.split(".")[0].removesuffix("+") for name in options} <= {*SECTIONS, *SETTINGS}
    assert {name.split(".")[0] for name in options} >= set(SECTIONS)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--model=A", "--model.x=1", "--model.init_args.y", "2"], {"model": {"class_path": "A", "x": 1, "y": 2}}),
        (["--model=A", "--model.x=1", "--model=m.A"], {"model": {"class_path": "m.A", "x": 1}}),
        (["--config={model: {class_path: A, init_args: {x: 1}}}", "--model=B"], {"model": "B"}),
        (["--config={model: {class_path: A, x: 1}}", "-c={model: {class_path: B}}"], {"model": {"class_path": "B"}}),
        (["--a.b+=C", "--a.b+=D", "--a.b.x=1"], {"a": {"b": ["C", {"class_path": "D", "x": 1}]}}),
        (["--a.b=[C]", "--a.b+=[D]"], {"a": {"b": ["C", "D"]}}),
        (["--a.b", "--c=[", "stray"], {"a": {"b": None}, "c": "["}),
        (["--config=absent.yaml"], {}),
    ],
)  # fmt: skip
def test_what_was_given_is_one_tree(args, expected):
    assert merge(read_given(args)) == expected


def test_a_value_is_found_where_it_was_given():
    tree = merge(read_given(["--model=A", "--model.x=many", "--model.net=B", "--model.net.x=few", "--trainer.x=2"]))
    assert path_of(tree, "x", "few") == "model.net.x"
    assert path_of(tree, "x", "many") == "model.x"
    assert path_of(tree, "x", "2") == "trainer.x"
    assert path_of(tree, "x", "other") == "x"
    assert unknown_option(tree, lambda kind: None) == ""
    options = {"A": frozenset({"x", "net"}), "B": frozenset({"xy"})}
    assert unknown_option(tree, options.get) == "B has no option 'model.net.x'. Did you mean 'model.net.xy'?"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--max_epochs=3"], "Unknown option 'max_epochs'. Did you mean 'trainer.max_epochs'?"),
        (["--data=A", "--batch_size=3"], "Unknown option 'batch_size'. Did you mean 'data.batch_size'?"),
        (["--model.optimizer=SGD", "--optimizer.lr=3"], "Did you mean 'model.optimizer.lr'?"),
        (["--model=A", "--model.optimizer=S", "--model.optimizer.lr=1", "--lr=3"], "mean 'model.optimizer.lr'?"),
    ],
)
def test_an_option_without_its_section_is_found(args, says):
    options = {"A": frozenset({"batch_size"}), "pytorch_lightning.Trainer": frozenset({"max_epochs"})}
    tree = merge([{"model": {"class_path": "M"}}, *read_given(args)])
    assert unknown_option(tree, options.get).endswith(says)


def test_a_sentence_names_the_whole_path():
    def says(message, *args):
        return explain(message, merge(read_given(args)))

    nested = "Parser key \"members\": Expected a <class 'int'>. Got value: NestedArg(key='foo', val='3')"
    expected = "There is no option 'model.members.foo': 'model.members' names no class that could have it."
    assert says(nested, "--model=ZooTask", "--model.members.foo=3") == expected
    early = "Option 'model.members' comes before the class that has it; put --config, or the class, before it."
    assert says("Option 'members' is not accepted", "--model.members=3") == early
    assert says("unrecognized arguments: members=3", "--model.members=3") == early
    assert "mean 'checkpoint.save_top_k'?" in says("Key 'x' is not expected", "--checkpoint.save_topk=3")
