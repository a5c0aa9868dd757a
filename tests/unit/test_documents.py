"""YAML and JSON of strangers: what is too much is refused in one sentence, and everything else is read as ever."""

from pathlib import Path

import pytest
import yaml
from commands import QUIET, SMALL, call, succeed
from helpers import assert_refused

from lightning_sym._files import TooLargeError, load_json, load_yaml
from lightning_sym._runs import read_run
from lightning_sym.recipes import recipe_names, recipe_path

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
HOSTILE = {
    "aliases": (LAUGHS, "holds more than 1000 values with expanded aliases"),
    "merged keys": (
        "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 9)),
        "holds more than 1000 values with expanded aliases",
    ),
    "itself": ("model: &a {b: *a}", "contains itself, by an alias within its own anchor"),
    "deep": ("model: " + "[" * 5000, "is nested more than 50 levels deep"),
    "deep blocks": ("".join(" " * n + "a:\n" for n in range(60)), "is nested more than 50 levels deep"),
    "many": ("model: [" + "[]," * 1_200 + "]", "holds more than 1000 values"),
    "long": ("model: '" + "x" * 10_000_001 + "'", "is longer than 10000000 characters"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_yaml_beyond_the_limits_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning_sym._files._MOST", 1000)  # which is reached sooner
    text, says = HOSTILE[name]
    Path("config.yaml").write_text(text)
    said = call("fit", "--config", "config.yaml")
    assert said.status == 2
    assert said.error.startswith("config.yaml is not read: it ")
    assert says in said.error
    assert_refused(read_run, Path(), says=("config.yaml is not read", says), error=TooLargeError)
    if len(text) < 100_000:
        assert says in call("fit", f"--config={text}").error
        assert says in call("fit", *SMALL, f"--model.network={text}").error
        for command in (["merge", "a", "b", "--out=c", "--network=D"], ["symmetry", "D"], ["estimate"], ["import"]):
            assert says in call(*command, f"--data={text}").error


@pytest.mark.parametrize("name", ["aliases", "itself", "deep", "many"])
def test_files_that_options_name_have_the_same_limits(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning_sym._files._MOST", 1000)
    text, says = HOSTILE[name]
    Path("value.yaml").write_text(text)
    Path("nested.yaml").write_text("model: value.yaml\n")
    Path("optimizer.txt").write_text(text)
    options = ["--model=value.yaml"], ["--config=nested.yaml"], [*SMALL, "--model.optimizer=optimizer.txt"]
    for given in options:
        said = call("fit", *given, "--data=DigitsDataModule", "--run_dir=run")
        assert said.status == 2
        assert says in said.error
        assert said.error.startswith("The value of an option, or a file that it names, is not read: it ")
    assert not Path("run").exists()


def test_a_file_that_an_option_names_is_read_as_ever(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    network = "  network: {class_path: MultiLayerPerceptron, init_args: {widths: &a [8]}}\n"
    Path("task.yaml").write_text(f"class_path: lightning_sym.tasks.ZooTask\ninit_args:\n  members: 3\n{network}")
    options = ["--data=DigitsDataModule", "--data.max_samples=64", "--trainer.max_epochs=0", "--run_dir=run", *QUIET]
    succeed("fit", "--model=task.yaml", *options)
    assert yaml.safe_load(Path("run/config.yaml").read_text())["model"]["init_args"]["members"] == 3


def test_yaml_within_the_limits_is_read_as_ever():
    texts = [recipe_path(name).read_text() for name in recipe_names()]
    texts += ["", "3", "a: &a {x: 1}\nb: [*a, *a]\nc: {<<: *a, y: 2}", "[" * 50 + "]" * 50, "- 1e3\n- 2001-01-01"]
    for text in texts:
        assert load_yaml(text, "it") == yaml.safe_load(text)
    with pytest.raises(yaml.YAMLError):
        load_yaml("{", "it")


def test_json_beyond_the_limits_is_refused():
    for text in ("[" * 100_000, "[" * 60 + "]" * 60, '{"a":' * 60 + "1" + "}" * 60):
        assert_refused(load_json, text, says="nested more than 50 levels deep", error=TooLargeError)
    for text in ("[" * 50 + "]" * 50, "3", '{"a": [1, {"b": null}]}', "[]"):
        load_json(text)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.yaml", "model: {}\ntrainer: 3\n"),
        ("config.yaml", "model: {}\ntrainer: {max_epochs: many}\n"),
        ("results/numbers.json", '{"rows": [3]}'),
        ("results/numbers.json", '{"rows": [{"value": 3}]}'),
        ("results/numbers.json", '{"rows": [{"number": "a", "value": [1]}]}'),
        ("results/numbers.json", '{"rows": [{"number": "a", "value": "many"}]}'),
        ("results/numbers.json", "[" * 100_000),
        ("results/members.json", '{"seeds": [[1]]}'),
        ("metrics.csv", "a,epoch\n1,many\n"),
        ("metrics.csv", "a,epoch\n1,inf\n"),
    ],
)
def test_results_of_wrong_types_are_refused_in_a_sentence(file, text, tmp_path):
    (tmp_path / "results").mkdir()
    files = {"config.yaml": "model: {}\n", "results/numbers.json": '{"rows": []}', file: text}
    for name, content in files.items():
        if (name, file) != ("results/numbers.json", "config.yaml"):
            (tmp_path / name).write_text(content)
    assert_refused(read_run, tmp_path, says=str(tmp_path))
