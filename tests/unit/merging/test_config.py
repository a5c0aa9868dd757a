"""Merges in YAML: files as people publish them with their models, and every place where a typo can be."""

import json
import textwrap
from pathlib import Path

import pytest
import torch
import yaml
from helpers import assert_refused

from lightning_sym.merging.config import MergeConfig
from lightning_sym.merging.methods import FLAGS, METHODS
from lightning_sym.merging.parameters import Layers

DEPTH = 5
LAYERS = Layers(
    [
        "model.embed_tokens.weight",
        *(
            f"model.layers.{n}.{part}.weight"
            for n in range(DEPTH)
            for part in ("self_attn.q_proj", "mlp.up_proj", "norm")
        ),
        "model.norm.weight",
        "lm_head.weight",
    ]
)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def attention(n):
    return f"model.layers.{n}.self_attn.q_proj.weight"


def mlp(n):
    return f"model.layers.{n}.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    """Return a folder with models of five layers, a file of weights, and an adapter."""
    for name in ("parent", "code", "maths", "chat"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"num_hidden_layers": DEPTH}))
    (tmp_path / "vision").mkdir()
    (tmp_path / "vision" / "config.json").write_text(json.dumps({"text_config": {"n_layer": DEPTH}}))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "a.safetensors").touch()
    return tmp_path


def read(folder, text):
    file = folder / "config.yml"
    file.write_text(textwrap.dedent(text))
    return MergeConfig.read(file)


def names(config):
    """Return the models, and the base, by the names of their folders."""
    return [Path(path).name for path in config.models], config.base and Path(config.base).name


# Text; method; models; base; numbers at tensors: of each model, or of the merge.
PUBLISHED = {
    "soup": (
        """
        models:
          - model: ./code
            parameters:
              weight: 1.0
          - model: ./maths
            parameters:
              weight: 0.3
          - model: ./chat
            parameters:
              weight: 0.5
        merge_method: linear
        dtype: float16
        """,
        "linear",
        ["code", "maths", "chat"],
        None,
        {("weight", EMBED): [1, 0.3, 0.5], ("weight", mlp(3)): [1, 0.3, 0.5], ("normalize", HEAD): 1},
    ),
    "slerp with ramps": (
        """
        slices:
          - sources:
              - model: ./code
                layer_range: [0, 5]
              - model: ./maths
                layer_range: [0, 5]
        merge_method: slerp
        base_model: ./maths
        parameters:
          t:
            - filter: self_attn
              value: [0, 0.5, 0.3, 0.7, 1]
            - filter: mlp
              value: [1, 0.5, 0.7, 0.3, 0]
            - value: 0.5 # fallback for rest of tensors
        dtype: bfloat16
        """,
        "slerp",
        ["maths", "code"],
        None,
        {("t", attention(2)): 0.3, ("t", attention(4)): 1, ("t", mlp(0)): 1, ("t", mlp(3)): 0.3, ("t", EMBED): 0.5},
    ),
    "slerp of one model and the base": (
        "{merge_method: slerp, base_model: parent, models: [{model: code}], parameters: {t: [0.2, 0.4, 0.8]}}",
        "slerp",
        ["parent", "code"],
        None,
        {("t", EMBED): 0.2, ("t", mlp(1)): 0.3, ("t", mlp(3)): 0.6, ("t", HEAD): 0.8},
    ),
    "ties with ramps": (
        """
        models:
          - model: ./code
            parameters:
              density: [1, 0.7, 0.1] # density gradient
              weight: 1.0
          - model: ./maths
            parameters:
              density: 0.5
              weight: [0, 0.3, 0.7, 1] # weight gradient
          - model: ./chat
            parameters:
              density: 0.33
              weight:
                - filter: mlp
                  value: 0.5
                - value: 0
        merge_method: ties
        base_model: ./parent
        parameters:
          normalize: true
          int8_mask: true
        dtype: float16
        """,
        "ties",
        ["code", "maths", "chat"],
        "parent",
        {
            ("density", attention(1)): [0.85, 0.5, 0.33],
            ("density", HEAD): [0.1, 0.5, 0.33],
            ("weight", mlp(2)): [1, 0.5, 0.5],
            ("weight", attention(4)): [1, 1, 0],
            ("lambda", EMBED): 1,
        },
    ),
    "dare_ties with the base listed": (
        """
        models:
          - model: ./parent
            # No parameters necessary for base model
          - model: ./code
            parameters:
              density: 0.53
              weight: 0.4
          - model: ./maths
            parameters:
              density: 0.53
              weight: 0.3
        merge_method: dare_ties
        base_model: parent/
        parameters:
          int8_mask: true
          rescale: true
        dtype: bfloat16
        tokenizer_source: base
        chat_template: auto
        """,
        "dare_ties",
        ["code", "maths"],
        "parent",
        {("weight", EMBED): [0.4, 0.3], ("density", mlp(1)): [0.53, 0.53], ("normalize", EMBED): 0},
    ),
    "task_arithmetic with one weight for all": (
        """
        merge_method: task_arithmetic
        base_model: parent
        models: [{model: code}, {model: maths, parameters: {weight: 0.7}}]
        parameters: {weight: 0.3, lambda: 1e-1, normalize: false}
        """,
        "task_arithmetic",
        ["code", "maths"],
        "parent",
        {("weight", EMBED): [0.3, 0.7], ("lambda", HEAD): 0.1},
    ),
    "breadcrumbs": (
        """
        name: crumbs
        models:
        - model: code
          parameters: {weight: 0.6, density: 0.9, gamma: 0.01}
        - model: maths
          parameters: {weight: 0.6, density: 0.9}
        merge_method: breadcrumbs_ties
        base_model: {model: {path: parent}}
        parameters: {gamma: 0.02}
        """,
        "breadcrumbs_ties",
        ["code", "maths"],
        "parent",
        {("gamma", EMBED): [0.01, 0.02], ("density", EMBED): [0.9, 0.9]},
    ),
    "della_linear in one slice": (
        """
        base_model: parent
        dtype: bfloat16
        merge_method: della_linear
        slices:
        - sources:
          - layer_range: [0, 5]
            model: code
            parameters:
              density: 0.5
              epsilon: 0.4
              weight: [0.9, 0.2, 0.2, 0.2, 0.95]
          - layer_range: [0, 5]
            model: maths
            parameters:
              weight: [0.1, 0.9, 1.0, 0.95, 0.4]
          - layer_range: [0, 5]
            model: parent
          parameters: {density: 0.6}
        parameters: {density: 0.7, epsilon: 0.3, lambda: 1.1}
        """,
        "della_linear",
        ["code", "maths"],
        "parent",
        {
            ("density", HEAD): [0.5, 0.6],
            ("epsilon", mlp(0)): [0.4, 0.3],
            ("weight", mlp(4)): [0.95, 0.4],
            ("lambda", mlp(2)): 1.1,
        },
    ),
    "model_stock": (
        """
        models: [{model: parent}, {model: code}, {model: maths}, {model: chat}]
        merge_method: model_stock
        base_model: parent
        parameters: {filter_wise: false}
        """,
        "model_stock",
        ["code", "maths", "chat"],
        "parent",
        {},
    ),
    "passthrough of one": (
        """
        slices:
        - sources:
          - model: code
            layer_range: [0, 5]
            parameters:
              scale:
              - filter: q_proj
                value: 0.5
              - value: 1
        merge_method: passthrough
        """,
        "passthrough",
        ["code"],
        None,
        {("scale", attention(2)): [0.5], ("scale", mlp(2)): [1]},
    ),
    "nuslerp without base": (
        "{merge_method: nuslerp, models: [{model: code, parameters: {weight: 0.4}}, {model: maths, parameters: "
        "{weight: 0.6}}], parameters: {nuslerp_flatten: true}}",
        "nuslerp",
        ["code", "maths"],
        None,
        {("weight", EMBED): [0.4, 0.6]},
    ),
    "karcher": (
        """
        models:
          - model: code
          - model: maths
        merge_method: karcher
        parameters:
          tol: 1e-10
          max_iter: 999
        """,
        "karcher",
        ["code", "maths"],
        None,
        {("weight", EMBED): [1, 1]},
    ),
    "adapter and file": (
        "{merge_method: linear, models: [{model: parent+adapter}, {model: {model: {path: parent}, lora: {path: "
        "./adapter/.}}, parameters: null}, {model: a.safetensors}]}",
        None,
        None,
        None,
        "config.yml: models[1].model: {folder}/parent+{folder}/adapter is models[0] already; list each model once.",
    ),
    "linear with the base listed": (
        "{merge_method: linear, base_model: maths, models: [{model: code, parameters: {weight: 2}}, {model: maths, "
        "parameters: {weight: 3}}], parameters: {normalize: 0}}",
        "linear",
        ["maths", "code"],
        None,
        {("weight", EMBED): [3, 2], ("normalize", EMBED): 0},
    ),
    "frankenmerge": (
        """
        slices:
          - sources:
            - model: code
              layer_range: [0, 4]
          - sources:
            - model: maths
              layer_range: [2, 5]
        merge_method: passthrough
        dtype: bfloat16
        """,
        None,
        None,
        None,
        "config.yml: slices holds 2 slices, but putting layers together needs mergekit; expected a single one.",
    ),
    "part of the layers": (
        "{merge_method: linear, slices: [{sources: [{model: code, layer_range: [0, 5]}, {model: maths, layer_range: "
        "[1, 5]}]}]}",
        None,
        None,
        None,
        "config.yml: slices[0].sources[1].layer_range is [1, 5] of [0, 5], but putting layers together needs mergekit; "
        "expected all layers.",
    ),
    "mixture of experts": (
        """
        base_model: parent
        gate_mode: hidden
        experts:
          - source_model: code
            positive_prompts: ["python"]
        """,
        None,
        None,
        None,
        "config.yml: the file has gate_mode: building mixtures of experts needs mergekit-moe.",
    ),
    "union of vocabularies": (
        "{merge_method: linear, models: [{model: code}], tokenizer_source: union}",
        None,
        None,
        None,
        "config.yml: tokenizer_source is union, but merging vocabularies needs mergekit; expected base.",
    ),
    "section of the tokenizer": (
        "{merge_method: linear, models: [{model: code}], tokenizer: {source: base, tokens: {a: {force: true}}}}",
        None,
        None,
        None,
        "config.yml: the file has tokenizer: merging tokenizers needs mergekit; tokenizer_source: base takes that of "
        "the base.",
    ),
    "modules": (
        "{merge_method: linear, modules: {default: {models: [{model: code}]}}}",
        None,
        None,
        None,
        "config.yml: the file has modules: merging by modules needs mergekit; list the models under models.",
    ),
    "models on the hub": (
        """
        models:
          - model: psmathur/orca_mini_v3_13b
        merge_method: linear
        """,
        None,
        None,
        None,
        "config.yml: models[0].model: there is no 'psmathur/orca_mini_v3_13b' in the folder of this file, {folder}; "
        "expected the path of a local model, as nothing is downloaded.",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_file_gives_these_settings_or_this_sentence(name, folder):
    text, method, models, base, expected = PUBLISHED[name]
    if method is None:
        sentence = expected.replace("{folder}", str(folder)).replace("config.yml", str(folder / "config.yml"), 1)
        with pytest.raises(ValueError, match=r"config\.yml") as caught:
            read(folder, text)
        assert str(caught.value) == sentence
        return
    config = read(folder, text)
    assert names(config) == (models, base)
    settings = config.settings
    assert settings.method is METHODS[method]
    assert len(settings.per_model) == len(models)
    assert settings.check(LAYERS) == ()
    for (setting, tensor), values in expected.items():
        if setting in settings.method.per_model:
            found = [model[setting].at(tensor, LAYERS) for model in settings.per_model]
        else:
            found = settings.shared[setting].at(tensor, LAYERS)
        assert found == pytest.approx(values, abs=1e-12), (setting, tensor)


def test_arguments_hold_the_settings_of_the_file_and_own_keys(folder):
    config = read(
        folder,
        """
        merge_method: dare_linear
        base_model: parent
        models: [{model: code+adapter}, {model: a.safetensors}]
        dtype: float32
        out_dtype: torch.bfloat16
        align: none
        seed: 7
        ignore: "ema.*"
        recalibrate: true
        network: {class_path: torchvision:resnet18, init_args: {num_classes: 10}}
        data: MNIST5k
        """,
    )
    assert config.arguments() == {
        "files": (f"{folder}/code+{folder}/adapter", f"{folder}/a.safetensors"),
        "base": f"{folder}/parent",
        "method": config.settings,
        "align": "none",
        "recalibrate": True,
        "ignore": ("ema.*",),
        "out_dtype": "bfloat16",
        "seed": 7,
        "description": (folder / "config.yml").read_text(),
        "notes": (),
    }
    assert config.settings.seed == 7
    assert config.network == {"class_path": "torchvision:resnet18", "init_args": {"num_classes": 10}}
    assert config.data == {"class_path": "MNIST5k", "init_args": {}}
    assert config.notes == ()
    plain = read(folder, "{merge_method: linear, models: [{model: code}], dtype: float16, base_model: null}")
    assert (plain.out_dtype, plain.align, plain.arguments()["seed"]) == ("float16", "auto", 0)


def test_paths_start_at_the_folder_of_the_file(folder, monkeypatch):
    (folder / "configs").mkdir()
    file = folder / "configs" / "config.yml"
    file.write_text("{merge_method: linear, models: [{model: ../code}]}")
    monkeypatch.chdir(folder / "maths")
    assert MergeConfig.read("../configs/config.yml").models == ("../code",)
    monkeypatch.chdir(folder)
    file.write_text("{merge_method: linear, models: [{model: code}]}")
    assert_refused(MergeConfig.read, "configs/config.yml", says=("there is no 'code'", str(folder / "configs")))
    file.write_text(f"{{merge_method: linear, models: [{{model: '{folder}/code'}}]}}")
    assert MergeConfig.read("configs/config.yml").models == (f"{folder}/code",)


def test_an_unused_base_outside_the_models_is_not_used(folder):
    config = read(folder, "{merge_method: linear, base_model: parent, models: [{model: code}], tokenizer_source: base}")
    assert names(config) == (["code"], None)
    assert config.notes == (
        f"linear uses no base, and {folder}/parent is not among the models: it is not used, and the tokenizer is that "
        "of the first model; list it among the models to merge it, as mergekit does",
    )


def test_chat_template_is_not_applied_and_a_note_says_so(folder):
    config = read(folder, "{merge_method: linear, models: [{model: code}], chat_template: chatml}")
    assert config.notes == (f"chat_template is not applied: the result has that of {folder}/code",)


def test_weights_of_a_filter_without_rest_are_refused_when_the_network_is_known(folder):
    config = read(
        folder,
        "{merge_method: linear, models: [{model: code, parameters: {weight: [{filter: mlp, value: 1}]}}, {model: "
        "maths, parameters: {weight: 1}}]}",
    )
    assert_refused(config.settings.check, LAYERS, says="models[0].parameters.weight has no value for model.embed")


GOOD = {
    "merge_method": "ties",
    "base_model": "parent",
    "models": [
        {"model": "code", "parameters": {"weight": [{"filter": "mlp", "value": [0.1, 0.2]}, {"value": 0.3}]}},
        {"model": "maths", "parameters": {"weight": 0.5, "density": 0.5}},
    ],
    "parameters": {"lambda": 1.0, "normalize": True, "density": 0.7},
    "dtype": "float32",
    "out_dtype": "bfloat16",
    "tokenizer_source": "base",
    "chat_template": "auto",
    "name": "one",
    "align": "auto",
    "network": {"class_path": "torchvision:resnet18", "init_args": {}},
    "data": "MNIST5k",
    "seed": 1,
    "ignore": ["ema.*"],
    "recalibrate": False,
}


def write(folder, content):
    (folder / "config.yml").write_text(json.dumps(content))  # JSON is YAML
    return folder / "config.yml"


def places(node, path=()):
    """Yield the paths of all keys and values of a document."""
    yield path
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield from places(node[key], (*path, key))


def changed(node, path, change):
    """Return a document with a change at the end of a path."""
    if len(path) == 1:
        return change(node, path[0])
    copy = dict(node) if isinstance(node, dict) else list(node)
    copy[path[0]] = changed(node[path[0]], path[1:], change)
    return copy


FREE = ("filter", "chat_template", "name", "class_path", "data", "ignore", "network", "init_args")  # checked elsewhere
KEYS = [path for path in places(GOOD) if path and isinstance(path[-1], str)]
WORDS = [("merge_method",), ("dtype",), ("out_dtype",), ("align",), ("tokenizer_source",), ("base_model",)]
WORDS += [("models", 0, "model"), ("models", 1, "model")]


def test_file_without_typos_is_read(folder):
    assert names(MergeConfig.read(write(folder, GOOD))) == (["code", "maths"], "parent")


@pytest.mark.parametrize("path", KEYS, ids=lambda path: ".".join(map(str, path)))
def test_typo_in_a_key_is_refused_with_the_nearest(path, folder):
    key = path[-1]
    typo = key[:-2] + key[-1] + key[-2] if key[-1] != key[-2] else f"{key}s"

    def change(node, key):
        return {typo if one == key else one: value for one, value in node.items()}

    assert_refused(
        MergeConfig.read, write(folder, changed(GOOD, path, change)), says=(f"'{typo}'", f"Did you mean '{key}'")
    )


@pytest.mark.parametrize("path", WORDS, ids=lambda path: ".".join(map(str, path)))
def test_typo_in_a_word_is_refused_with_the_nearest(path, folder):
    word = GOOD
    for key in path:
        word = word[key]

    def change(node, key):
        return {**node, key: f"{word}e"}

    said = f"Did you mean '{word}'"
    assert_refused(
        MergeConfig.read, write(folder, changed(GOOD, path, change)), says=(path[-1].replace("_", " ")[-5:], said)
    )


@pytest.mark.parametrize("value", [{"a": 1}, [], [[]], -7, 0.5, True, "", "nonsense"], ids=repr)
@pytest.mark.parametrize("path", [path for path in places(GOOD) if path], ids=lambda path: ".".join(map(str, path)))
def test_value_of_another_kind_is_refused_in_one_sentence(path, value, folder):
    """Whatever stands at any place is either accepted there, or refused by a sentence that names the place."""

    def change(node, key):
        copy = dict(node) if isinstance(node, dict) else list(node)
        copy[key] = value
        return copy

    where = f"models[{path[1]}]" if path[0] == "models" and len(path) > 1 else path[0]
    file = write(folder, changed(GOOD, path, change))
    try:
        config = MergeConfig.read(file)
    except ValueError as error:
        sentence = str(error)
        assert sentence.startswith(f"{file}: ")
        assert where in sentence or where.replace("_", " ") in sentence or str(path[-1]) in sentence, sentence
        assert "\n" not in sentence
    else:
        free = FREE if value != True else (*FREE, "recalibrate", "normalize")  # noqa: E712  # also 1
        numbers = isinstance(value, float) or (value == -7 and path[-1] not in ("seed", "density", "normalize"))
        assert numbers or free_of(path, free)
        assert config.settings.method.name == "ties"


def free_of(path, free):
    return any(key in free for key in path[-2:])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file must be a mapping with merge_method"),
        ("- a", "the file must be a mapping"),
        ("a: [", "is not valid YAML"),
        ("!!python/object/apply:os.system [ls]", "is not valid YAML"),
        ("{merge_method: linear, merge_method: ties}", "merge_method is there twice"),
        ("merge_method: linear\n---\nmerge_method: ties", "is not valid YAML: expected a single document"),
        ("{merge_method: linear}", "expected models or slices"),
        ("{merge_method: linear, models: [{model: code}], slices: [{sources: []}]}", "expected models or slices"),
        ("{models: [{model: code}]}", "merge_method is missing"),
        ("{merge_method: sce, models: [{model: code}]}", "'sce' is not available yet"),
        ("{merge_method: weights, models: [{model: code}]}", "--align weights"),
        ("{merge_method: ties, models: [{model: code}]}", "ties needs base_model"),
        (
            "{merge_method: slerp, models: [{model: code}, {model: maths}]}",
            "slerp needs base_model, the model at t = 0",
        ),
        (
            "{merge_method: slerp, base_model: chat, models: [{model: code}, {model: maths}]}",
            "slerp merges 2 models, got 3",
        ),
        (
            "{merge_method: linear, models: [{model: code, weight: 1}]}",
            "weight is a parameter; put it under parameters",
        ),
        (
            "{merge_method: ties, base_model: parent, models: [{model: code, parameters: {lambda: 1}}]}",
            "models[0].parameters.lambda: lambda is one value for the whole merge",
        ),
        (
            "{merge_method: linear, models: [{model: code, parameters: {weight: 1}}, {model: maths}]}",
            "models[1] has no weight, but other models have",
        ),
        (
            "{merge_method: model_stock, base_model: parent, models: [{model: code}], parameters: {filter_wise: true}}",
            "parameters.filter_wise is True, but model_stock is implemented only with filter_wise: false; leave it out",
        ),
        (
            "{merge_method: nuslerp, models: [{model: code}], parameters: {nuslerp_flatten: false}}",
            "parameters.nuslerp_flatten is False, but nuslerp is implemented only with nuslerp_flatten: true",
        ),
        (
            "{merge_method: ties, base_model: parent, models: [{model: code}], parameters: {rescale: 2}}",
            "parameters.rescale must be true or false, got 2",
        ),
        (
            "{merge_method: linear, models: [{model: code}], parameters: {dtype: bfloat16}}",
            "parameters.dtype: linear has no setting 'dtype'",
        ),
        (
            "{merge_method: ties, base_model: parent, models: [{model: code}], tokenizer: {source: union}}",
            "tokenizer_source is union, but merging vocabularies needs mergekit; expected base.",
        ),
        ("{merge_method: linear, models: [{model: code@main}]}", "there is no 'code@main'"),
        ("{merge_method: linear, models: [{model: code+adaptr}]}", "there is no 'adaptr' in the folder of this file"),
        ("{merge_method: linear, models: [{model: code+adapter+adapter}]}", "holds several +"),
        ("{merge_method: linear, models: [{model: {model: {path: code, revision: v2}}}]}", "has revision"),
        ("{merge_method: linear, models: [{model: {lora: adapter}}]}", "models[0].model has no model"),
        ("{merge_method: linear, slices: [{sources: [{model: code}]}]}", "layer_range must be the first layer and"),
        (
            "{merge_method: linear, slices: [{sources: [{model: a.safetensors, layer_range: [0, 5]}]}]}",
            "has no config.json with a number of layers; list the models under models",
        ),
        (
            "{merge_method: linear, slices: [{sources: [{model: vision, layer_range: [0, 4]}]}]}",
            "layer_range is [0, 4] of [0, 5]",
        ),
        (
            "{merge_method: linear, base_model: code, slices: [{base_model: maths, sources: [{model: code, "
            "layer_range: [0, 5]}]}]}",
            "expected one base",
        ),
        (
            "{merge_method: linear, slices: [{residual_weight: 1, sources: [{model: code, layer_range: [0, 5]}]}]}",
            "putting layers together needs mergekit",
        ),
        (
            "{merge_method: linear, models: [{model: code}], tokenizer_source: base}",
            "tokenizer_source is base, but there is no base_model",
        ),
    ],
)
def test_file_that_cannot_be_run_is_refused_in_one_sentence(text, says, folder):
    assert_refused(read, folder, text, says=says)


def test_binary_and_missing_files_are_refused(folder):
    (folder / "config.yml").write_bytes(b"\xff\xfe\x00")
    assert_refused(MergeConfig.read, folder / "config.yml", says="is not a text file")
    assert_refused(MergeConfig.read, folder / "none.yml", says="none.yml", error=FileNotFoundError)


@pytest.fixture
def driven(monkeypatch):
    """Return a dictionary that receives what the driver is called with."""
    received = {}

    def merge_checkpoints(files, out, **given):
        received.update(given, files=files, out=out)
        return "merged"

    monkeypatch.setattr("lightning_sym.merging.config.merge_checkpoints", merge_checkpoints)
    return received


def test_run_hands_everything_to_the_driver_and_arguments_of_the_call_come_first(folder, driven):
    config = read(folder, "{merge_method: linear, models: [{model: code}], seed: 4, align: weights}")
    assert config.run("out", align="none", points=3) == "merged"
    text = {"description": config.file.read_text(), "notes": ()}
    assert driven == {**config.arguments(), **text, "out": "out", "align": "none", "points": 3}


def test_run_builds_the_network_that_the_file_names(folder, driven):
    text = (
        "{merge_method: linear, models: [{model: code}], network: {class_path: torchvision:resnet18, init_args: "
        "{num_classes: 7}}}"
    )
    read(folder, text).run("out")
    assert driven["network"](*driven["inputs"].positional).shape == (2, 7)
    own = torch.nn.Linear(1, 1)
    read(folder, text).run("out", network=own)
    assert driven["network"] is own


def test_run_needs_the_batches_of_a_named_datamodule(folder, driven):
    config = MergeConfig.read(write(folder, {**GOOD, "network": None}))
    assert_refused(config.run, "out", says=("names the datamodule MNIST5k", "pass its batches as data"))
    assert not driven
    config.run("out", data=[1])
    assert driven["data"] == [1]


def test_the_tokenizer_of_the_base_and_settings_of_other_methods_are_accepted(folder):
    text = (
        "{merge_method: task_arithmetic, base_model: parent, tokenizer: {source: base}, models: [{model: code, "
        "parameters: {density: 0.5}}], parameters: {rescale: true, int8_mask: true}}"
    )
    config = read(folder, text)
    assert config.notes == ("models[0].parameters.density changes nothing, as task_arithmetic has no density",)
    assert config.base.endswith("parent")


@pytest.mark.parametrize(
    ("method", "parameters", "notes"),
    [
        ("ties", "{normalize: false, int8_mask: true}", 0),
        ("ties", "{normalize: true, rescale: true}", 0),
        ("dare_ties", "{lambda: 1.0, rescale: false}", 0),
        ("task_arithmetic", "{normalize: false, rescale: false, int8_mask: false}", 1),  # a density
        ("model_stock", "{normalize: false, int8_mask: true, filter_wise: false}", 3),  # a weight and a density
        ("multislerp", "{eps: 1e-8, normalize_weights: true}", 1),
        ("linear", "{rescale: true, int8_mask: true, tol: 1e-5}", 3),
    ],
)
def test_parameters_of_published_files_are_accepted_with_one_note_for_each_without_effect(
    folder, method, parameters, notes
):
    base = "parent" if METHODS[method].base != "unused" else "code"
    models = ", ".join(f"{{model: {one}, parameters: {{weight: 0.4, density: 0.5}}}}" for one in ("code", "maths"))
    text = (
        f"{{merge_method: {method}, base_model: {base}, models: [{models}], parameters: {parameters}, "
        "tokenizer: {source: base}, chat_template: auto, dtype: float16}"
    )
    config = read(folder, text)
    assert len(config.notes) == notes
    assert all("changes nothing, as" in note for note in config.notes)
    given = yaml.safe_load(parameters)
    for name in {*FLAGS} & given.keys() & config.settings.shared.keys():
        assert config.settings.shared[name].constant == given[name]


def test_a_line_of_broken_yaml_is_named(folder):
    Path(folder, "broken.yml").write_text("merge_method: linear\nmodels: [\n  {model: code\n")
    assert_refused(MergeConfig.read, Path(folder, "broken.yml"), says=["is not valid YAML", "(line 4)"])
