"""``lightning-sym symmetry``: tables of networks by their names."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import call, succeed
from torch import nn

from lightning_sym.cli.symmetry import read_options
from lightning_sym.models import build_model, example_of
from lightning_sym.networks import LeNet5
from lightning_sym.symmetry import trace_symmetry
from lightning_sym.zoo import ModelZoo

pytestmark = pytest.mark.measured

NETS = """
from pathlib import Path
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self, width=6, inputs=5):
        super().__init__(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 3))

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 4), nn.Linear(4, 3)
        self.example_input_array = torch.tensor([[1, 2], [3, 4]])

    def forward(self, ids):
        hidden = self.embed(ids)
        return {"scores": self.head(hidden), "hidden": hidden}

def number():
    return 3
"""
TEXT = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 14}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TEXT}


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    Path("symmetry_nets.py").write_text(NETS)
    monkeypatch.delitem(sys.modules, "symmetry_nets", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # which the command sets for good


def test_the_table_of_a_class_is_printed_and_written() -> None:
    result = succeed("symmetry", "symmetry_nets.Net", "--network.width", 8, "--input=5", "--out", "tables/net.json")
    lines = result.out.splitlines()
    assert lines[0].startswith("axis group")
    assert "1 axis groups, 8 units" in result.out
    assert lines[-2].startswith("checked with 2 random elements")
    assert lines[-1] == "nullity of the Jacobian: 8"
    written = json.loads(Path("tables/net.json").read_text())
    network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    symmetry = trace_symmetry(network, torch.randn(2, 5))
    assert written["groups"] == symmetry.table()
    assert (written["dimension"], written["nullity"]) == (8, 8)
    assert (written["inputs"], written["arguments"]) == ([[2, 5]], {"width": 8})
    assert written["worst_error"] <= written["tolerance"]


def test_tokens_count_where_a_class_has_an_example() -> None:
    result = call("symmetry", "symmetry_nets.Tokens", "--tokens=100000")
    assert result.status == 1
    assert "index out of range" in result.error  # the table holds 20 words


def test_without_weights_nothing_is_checked() -> None:
    result = succeed("symmetry", "--meta", "symmetry_nets.Net", "--network.width=100000", "--input=5", "--out=a.json")
    assert "dimension 100000" in result.out
    assert "not checked: tensors on meta have no values" in result.out
    written = json.loads(Path("a.json").read_text())
    assert (written["elements_tried"], written["worst_error"]) == (0, None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("torchvision:squeezenet1_1",), "10^"),
        (("torchvision:lraspp_mobilenet_v3_large", "--meta"), "axis groups"),
        (("MultiLayerPerceptron", "--network.image_size=8", "--network.in_channels=1"), "dimension"),
        (("symmetry_nets.Tokens", "--output=scores"), "hidden may change"),
        (("symmetry_nets.Tokens", "--output=scores", "--input=3", "--tokens=20"), "dimension 20"),
        (("symmetry_nets.Net", "--network.width=0", "--input=5"), "0 axis groups"),
    ],
    ids=["torchvision", "several outputs", "own class", "example of its own", "tokens", "no units"],
)
@pytest.mark.long
def test_networks_of_every_kind(options: tuple[str, ...], says: str) -> None:
    assert says in succeed("symmetry", *options).out


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("resnet18", (3, 224, 224)),
        ("inception_v3", (3, 299, 299)),
        ("r3d_18", (3, 16, 112, 112)),
        ("vit_b_16", (3, 224, 224)),
    ],
)
@pytest.mark.filterwarnings("ignore:The default weight initialization of inception_v3")
def test_default_inputs_of_torchvision(name: str, shape: tuple[int, ...]) -> None:
    assert tuple(example_of(build_model(f"torchvision:{name}", meta=True)).positional[0].shape[1:]) == shape


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "usage: lightning-sym symmetry NETWORK"),
        (("--help",), "transformers:path/to/config.json"),
        (("-h",), "--meta"),
    ],
)
def test_help(options: tuple[str, ...], says: str) -> None:
    assert says in succeed("symmetry", *options).out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("Net", "--inptu=3"), "symmetry has no option 'inptu'. Did you mean 'input'?"),
        (("Net", "Other"), "Expected one network, got Net, Other."),
        (("--meta",), "Expected one network, got none."),
        (("Net", "--input=3,x"), "--input takes a shape without the batch, such as 3,224,224, got"),
        (("Net", "--input=3,-1"), "--input takes a shape"),
        (("Net", "--input=0"), "--input takes a shape"),
        (("Net", "--tokens=many"), "--tokens takes a whole number >= 1, got 'many'."),
        (("Net", "--meta=maybe"), "--meta takes no value, got 'maybe'."),
        (("Net", "--out=table.csv"), "--out takes a file that ends in .json, got table.csv."),
        (("Net", "--network=Other"), "--network takes the arguments of a class"),
    ],
)
def test_options_that_are_not_understood(options: tuple[str, ...], says: str) -> None:
    result = call("symmetry", *options)
    assert result.status == 2
    assert says in result.error


def test_shapes_and_flags_are_read() -> None:
    for given in ("--input=3,8,8", "--input=[3, 8, 8]", "--input=3x8x8", "--input=3, 8, 8"):
        assert read_options(["Net", given]).shape == (3, 8, 8)
    assert read_options(["--meta", "Net", "--input", "16"]).shape == (16,)
    assert read_options(["--meta", "Net"]).meta
    assert not read_options(["--meta=false", "Net"]).meta
    assert read_options(["Net", "--output", "0"]).output == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("torchvison:resnet18", "network: There is no module 'torchvison'. Did you mean 'torchvision'?"),
        ("torchvision:resnet19", "torchvision has no model 'resnet19'. Did you mean 'resnet18'"),
        ("torchvision:resnet18 --network.widht=3", "torchvision:resnet18 cannot be built (TypeError: "),
        ("symmetry_nets.Nett", "network: There is no class symmetry_nets.Nett. Did you mean 'Net'?"),
        ("symmetry_nets.Net --network.widht=3", "Net has no argument 'widht'. Did you mean 'width'?"),
        ("symmetry_nets.Net --network.width=-3 --input=5", "symmetry_nets.Net cannot be built (RuntimeError: "),
        ("symmetry_nets.Net", "symmetry_nets.Net does not say what it takes; give the shape of one input"),
        ("symmetry_nets.number", "symmetry_nets.number makes a int; expected a network"),
        ("symmetry_nets.Net --input=4", "the network does not run on the example input"),
        ("symmetry_nets.Net --input=5 --output=logits", "output is 'logits', but the network returns one tensor"),
        ("symmetry_nets.Tokens --output=score", "Unknown output 'score'; expected one of: scores, hidden. Did"),
        (
            "symmetry_nets.Net --input=5 --out=symmetry_nets.py/a.json",
            "symmetry_nets.py is a file; expected a place in a folder.",
        ),
        ("some/config.json", "is no class; expected transformers:some/config.json"),
        ("transformers:nowhere", "nowhere; expected the configuration of a model (config.json), or its folder."),
    ],
)
def test_what_cannot_be_traced(options: str, says: str) -> None:
    result = call("symmetry", *options.split())
    assert result.status == 1
    for part in says.split("... "):
        assert part in result.error
    assert not list(Path.cwd().glob("**/*.json"))


@pytest.mark.parametrize(
    ("name", "inputs"),
    [("timm:vit_tiny_patch16_224", [2, 3, 224, 224]), ("timm:resnet10t", [2, 3, 176, 176])],
)
@pytest.mark.long
def test_timm(name: str, inputs: list[int]) -> None:
    pytest.importorskip("timm")
    succeed("symmetry", name, "--meta", "--out=table.json")
    assert json.loads(Path("table.json").read_text())["inputs"] == [inputs]
    found = call("symmetry", "timm:vit_tinny_patch16_224")
    assert "timm has no model 'vit_tinny_patch16_224'. Did you mean" in found.error
    assert "timm has no model 'hf-hub:a/b'." in call("symmetry", "timm:hf-hub:a/b").error


def saved(**content: Any) -> str:
    """Write a configuration and return the network's name on the command line."""
    Path("config.json").write_text(json.dumps(content))
    return "transformers:config.json"


TOWER = {**{key: TEXT[key] for key in TEXT if key != "vocab_size"}, "hidden_act": "gelu", "image_size": 32}
CLIP = {"text_config": TEXT, "vision_config": {**TOWER, "patch_size": 16}}
T5 = {"num_heads": 2, "num_layers": 1, "vocab_size": 14, "d_model": 8, "d_kv": 4, "d_ff": 6}


@pytest.mark.parametrize(
    ("content", "inputs"),
    [
        (LLAMA, [[2, 12]]),
        ({**TEXT, "model_type": "bert"}, [[2, 12]]),
        ({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 9, "n_positions": 5}, [[2, 4]]),
        ({**TOWER, "model_type": "vit", "architectures": ["ViTForImageClassification"]}, [[2, 3, 32, 32]]),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], **T5}, [[2, 12], [2, 12]]),
        ({"model_type": "clip", "architectures": ["CLIPModel"], **CLIP}, [[2, 3, 32, 32], [2, 12]]),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
@pytest.mark.long
def test_transformers_by_configuration(content: dict[str, Any], inputs: list[list[int]]) -> None:
    pytest.importorskip("transformers")
    result = succeed("symmetry", saved(**content), "--out=table.json")
    assert "checked with 2 random elements" in result.out
    assert json.loads(Path("table.json").read_text())["inputs"] == inputs


def test_folders_of_models_and_zoos() -> None:
    pytest.importorskip("transformers")
    Path("model").mkdir()
    Path("model", "config.json").write_text(json.dumps(LLAMA))
    assert succeed("symmetry", "model").out == succeed("symmetry", "transformers:model").out
    network = LeNet5()
    ModelZoo.add("zoo", [network], network=network)
    assert succeed("symmetry", "zoo").out == succeed("symmetry", "LeNet5").out
    Path("none").mkdir()
    assert "none names no network; expected the folder of a model" in call("symmetry", "none").error
    assert "zoo is a zoo, whose network has its arguments" in call("symmetry", "zoo", "--network.width=3").error


def test_arguments_inputs_and_meta_of_transformers() -> None:
    pytest.importorskip("transformers")
    options = "--network.num_hidden_layers=2", "--input=5", "--meta", "--out=table.json"
    content = {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2}
    result = succeed("symmetry", saved(**content), *options)
    assert "layers.0,1.mlp.gate_proj" in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    assert json.loads(Path("table.json").read_text())["inputs"] == [[2, 5]]


EVIL = "from pathlib import Path\nPath('ran').touch()\nclass Evil: ...\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"model_type": "evil", "auto_map": dict.fromkeys(("AutoModel", "AutoConfig"), "evil.Evil")}, "is never run"),
        ({**TEXT, "model_type": "lama"}, "is of model_type 'lama'; expected one that transformers"),
        ({**LLAMA, "architectures": ["pipeline"]}, "architecture 'pipeline', which transformers does not have"),
        ({**LLAMA, "architectures": ["evil.Evil"]}, "architecture 'evil.Evil', which transformers does not have"),
        ({**LLAMA, "architectures": ["LlamaForCausalML"]}, "Did you mean 'LlamaForCausalLM'"),
        ({**LLAMA, "architectures": ["BertModel"]}, "takes a BertConfig, not the LlamaConfig of its model_type"),
        ({**LLAMA, "hidden_size": 7}, "config.json cannot be built ("),
        ({**LLAMA, "hidden_size": "eight"}, "config.json cannot be built ("),
        (TEXT, "config.json names no model_type"),
    ],
)
def test_configurations_that_are_refused(content: dict[str, Any], says: str) -> None:
    pytest.importorskip("transformers")
    Path("evil.py").write_text(EVIL)
    result = call("symmetry", saved(**content), "--out=table.json")
    assert result.status == 1
    assert says in result.error
    assert not Path("ran").exists()
    assert not Path("table.json").exists()


def test_code_that_a_configuration_names_is_not_run() -> None:
    pytest.importorskip("transformers")
    Path("evil.py").write_text(EVIL)
    own = {"auto_map": {"AutoModel": "evil.Evil"}, "attn_implementation": "someone/kernel", "use_kernels": True}
    network = saved(**LLAMA, **own, _attn_implementation="someone/kernel", quantization_config={"quant_method": "evil"})
    assert "dimension" in succeed("symmetry", network).out
    assert not Path("ran").exists()


def test_a_configuration_that_is_no_json() -> None:
    Path("config.json").write_text("{")
    assert "config.json is not JSON (" in call("symmetry", "transformers:config.json").error


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    assert "timm is not installed; pip install 'lightning_sym[hf]'" in call("symmetry", "timm:resnet10t").error
