"""``lightning-sym reparametrize``: a checkpoint in, other weights with the same function out."""

import csv
import errno
import functools
import io
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from commands import MLP, X, call, perceptron, succeed
from fits import descended
from helpers import assert_refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_sym.cli.reparametrize import FACTORS, OBJECTIVES, _Progress
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MultiLayerPerceptron, VisionTransformer
from lightning_sym.orbit import minimize_on_orbit, objectives, reparametrize_checkpoint, round_to_nearest, weight_norm
from lightning_sym.orbit.directions import KINDS
from lightning_sym.orbit.files import calibration_batch, stored_input
from lightning_sym.orbit.objective import Watched
from lightning_sym.symmetry import files as symmetry_files
from lightning_sym.symmetry import trace_symmetry
from lightning_sym.zoo import ModelZoo

pytestmark = pytest.mark.long

OWN = """
from lightning_sym.orbit import Objective

class Largest(Objective):
    def __init__(self, p=8):
        self.p = p

    def __call__(self, view, batch=None):
        return sum(own.abs().pow(self.p).sum() for own in view.values()) ** (1 / self.p)
"""
SIZES = {
    **{"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 14},
    **{"num_key_value_heads": 2, "max_position_embeddings": 16},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def as_file(network: nn.Module, name: str) -> str:
    save_file(network.state_dict(), name)
    return name


def report_of(out: str) -> dict[str, Any]:
    """Read the report of a result, a folder or a file."""
    path = Path(out)
    file = path.with_suffix(".report.json") if path.suffix == ".safetensors" else path / "report.json"
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def model(kind: str, seed: int) -> Any:
    transformers = pytest.importorskip("transformers")
    config = {
        "llama": lambda: transformers.LlamaConfig(**SIZES),
        "gemma": lambda: transformers.GemmaConfig(**SIZES, head_dim=2),
        "qwen": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    }[kind]()
    torch.manual_seed(seed)
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for own in network.parameters():
            own.add_(0.3 * torch.randn_like(own))
    return network


def loaded(path: str) -> Any:
    """Load a folder as its users do; nothing may be missing or surplus."""
    transformers = pytest.importorskip("transformers")
    network, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return network.eval()


def squares(network: nn.Module) -> float:
    return sum(float(own.detach().double().square().sum()) for own in network.parameters())


def apart(one: nn.Module, two: nn.Module) -> float:
    """Return the relative distance of the logits of two language models."""
    ids = torch.randint(14, (4, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        a, b = one(ids).logits.double(), two(ids).logits.double()
    return float((a - b).norm() / a.norm())


# ---- from files to files


# Networks of transformers compute their norms in single precision.
@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [("llama", torch.float32, 1e-5), ("gemma", torch.float32, 1e-5), ("qwen", torch.bfloat16, 0.05)],
)
def test_folders_of_transformers_become_folders_with_the_same_function(
    kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Grouped queries and rotary planes; gains of 1 + w and scaled, tied embeddings; tied embeddings in 16 bits."""
    for seed, name in enumerate(("one", "two")):
        model(kind, seed).to(dtype).save_pretrained(name)
    Path("one/tokenizer.json").write_text("{}")
    one, two = loaded("one"), loaded("two")
    succeed("reparametrize", "one", "--objective=weight_norm", "--max_steps=15", "--out=moved")
    moved = loaded("moved")
    assert apart(one, moved) < tolerance
    assert not torch.equal(one.lm_head.weight, moved.lm_head.weight) or kind != "llama"
    found = report_of("moved")
    assert found["before"] == pytest.approx(squares(one), rel=1e-6)
    assert found["after"] == pytest.approx(squares(moved), rel=1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert found["after"] < 0.99 * found["before"]
    assert found["change"] < 1e-4
    assert found["change_as_written"] < 20 * tolerance
    assert {name: own.dtype for name, own in load_file("moved/model.safetensors").items()} == {
        name: own.dtype for name, own in load_file("one/model.safetensors").items()
    }
    own = {"element.safetensors", "history.csv", "report.json", "README.md"}
    assert {path.name for path in Path("moved").iterdir()} == {path.name for path in Path("one").iterdir()} | own
    steps = list(csv.DictReader(Path("moved/history.csv").read_text().splitlines()))
    assert float(steps[0]["objective"]) == pytest.approx(found["before"])
    assert float(steps[-1]["objective"]) == pytest.approx(found["after"])
    # The element acts on other checkpoints, and its inverse gives back the original.
    succeed("reparametrize", "two", "--apply=moved", "--out=other")
    assert apart(two, loaded("other")) < tolerance
    assert not torch.equal(load_file("two/model.safetensors")[NORM], load_file("other/model.safetensors")[NORM])
    succeed("reparametrize", "moved", "--apply=moved/element.safetensors", "--inverse", "--out=back")
    assert {path.name for path in Path("back").iterdir()} == {path.name for path in Path("one").iterdir()} | {
        "report.json",
        "README.md",
    }
    for name, tensor in loaded("back").named_parameters():
        torch.testing.assert_close(tensor, one.get_parameter(name), rtol=tolerance, atol=tolerance)


NORM = "model.layers.0.post_attention_layernorm.weight"


def test_random_tokens_are_drawn_if_they_are_asked_for() -> None:
    model("llama", 0).save_pretrained("one")
    result = succeed(
        *("reparametrize", "one", "--objective=quantization_error", "--objective.bits=3", "--data=random"),
        *("--samples=8", "--max_steps=8", "--factors=scales,rotations", "--out=moved"),
    )
    found = report_of("moved")
    assert found["after"] < 0.9 * found["before"]
    assert found["data"] == "random"
    assert any("random inputs" in note for note in found["notes"])
    assert "random inputs" in " ".join(result.out.split())
    one, moved = loaded("one"), loaded("moved")
    assert apart(one, moved) < 1e-5
    assert apart(one, round_to_nearest(moved, 3)) < apart(one, round_to_nearest(one, 3))


def test_networks_on_data_are_rounded_before_and_after() -> None:
    data = DigitsDataModule(max_samples=300)
    network = descended(perceptron(), data, steps=60, lr=5e-3)
    content = {"state_dict": {f"model.{name}": own for name, own in network.state_dict().items()}, "epoch": 3}
    torch.save(content, "a.ckpt")
    result = succeed(
        *("reparametrize", "a.ckpt", *MLP, "--objective=quantization_error", "--objective.bits=2"),
        *("--data=DigitsDataModule", "--data.max_samples=300", "--samples=100", "--max_steps=40"),
        "--out=moved.safetensors",
    )
    found = report_of("moved.safetensors")
    assert found["after"] < 0.5 * found["before"]
    assert found["samples"] == 100
    assert found["data"]["class_path"].endswith("DigitsDataModule")
    rows = {row["weights"]: row for row in found["test"]}
    given, moved, given_rounded, moved_rounded = rows.values()
    assert list(rows)[2:] == [f"{name}, 2-bit weights" for name in ("as given", "reparametrized")]
    assert given["loss"] == pytest.approx(moved["loss"], rel=1e-4)
    assert moved_rounded["accuracy"] > given_rounded["accuracy"] + 0.05
    assert "2-bit weights" in result.out
    # What was written is what was measured.
    again = perceptron()
    again.load_state_dict(load_file("moved.safetensors"))
    x, y = (torch.cat(parts) for parts in zip(*data.test_dataloader(), strict=True))
    for own, row in ((again, moved), (round_to_nearest(again, 2), moved_rounded)):
        with torch.no_grad():
            assert row["loss"] == pytest.approx(nn.functional.cross_entropy(own(x), y).item(), rel=1e-4)


def test_networks_on_data_are_pruned_before_and_after() -> None:
    """Scales alone do not change what a pruned network of ReLU computes; rotations of a transformer's stream do."""
    data = DigitsDataModule(max_samples=300)
    settings = {"in_channels": 1, "image_size": 8, "patch_size": 4, "width": 8, "depth": 1, "heads": 2}
    torch.manual_seed(0)
    as_file(descended(VisionTransformer(**settings), data, steps=60, lr=5e-3), "vit.safetensors")
    as_file(perceptron(), "mlp.safetensors")
    common = "--objective=sparsity", "--data=DigitsDataModule", "--data.max_samples=300", "--max_steps=30"
    options = [f"--network.{name}={value}" for name, value in settings.items()]
    network = "--network=VisionTransformer", *options
    succeed("reparametrize", "vit.safetensors", *network, *common, "--out=v.safetensors")
    found = report_of("v.safetensors")
    assert found["after"] < 0.8 * found["before"]
    rows = {row["weights"]: row["loss"] for row in found["test"]}
    assert rows["reparametrized, 50% pruned"] < rows["as given, 50% pruned"]
    result = succeed("reparametrize", "mlp.safetensors", *MLP, *common, "--out=m.safetensors")
    assert "the objective did not improve" in " ".join(result.out.split())


def test_regression_has_squared_errors() -> None:
    torch.manual_seed(0)
    sizes = "--network.widths=[6]", "--network.in_channels=10", "--network.image_size=1", "--network.num_classes=1"
    network = MultiLayerPerceptron(widths=(6,), in_channels=10, image_size=1, num_classes=1)
    found = succeed(
        *("reparametrize", as_file(network, "a.safetensors"), "--network=MultiLayerPerceptron", *sizes),
        *(
            "--objective=gradient_norm",
            "--data=DiabetesDataModule",
            "--samples=40",
            "--max_steps=3",
            "--out=b.safetensors",
        ),
    )
    assert "gradient_norm: " in found.out
    report = report_of("b.safetensors")
    assert report["options"] == {"loss": "mse", "p": 2}
    assert report["after"] < report["before"]
    assert [row["accuracy"] for row in report["test"]] == [None, None]


def test_the_same_seed_gives_the_same_files_and_double_precision_stays() -> None:
    as_file(perceptron().double(), "a.safetensors")
    sought = "--objective=sparsity", "--data=random", "--samples=20", "--max_steps=5", "--seed=3"
    for out in ("one", "two"):
        succeed("reparametrize", "a.safetensors", *MLP, *sought, f"--out={out}.safetensors")
    assert Path("one.safetensors").read_bytes() == Path("two.safetensors").read_bytes()
    found = load_file("one.safetensors")
    moved = perceptron(1).double()
    moved.load_state_dict(found)
    torch.testing.assert_close(moved(X.double()), perceptron().double()(X.double()), rtol=1e-11, atol=1e-12)
    assert report_of("one.safetensors")["change_as_written"] < 1e-12
    assert {path.name for path in Path().glob("one*")} == {
        f"one.{end}" for end in ("safetensors", "element.safetensors", "history.csv", "report.json")
    }


def test_an_element_of_an_own_class_is_applied_without_the_shape_of_an_input() -> None:
    Path("own_networks.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Plain(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))\n"
    )
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
        as_file(layers, f"{name}.safetensors")
    own = "--network=own_networks.Plain"
    sought = "--objective=weight_norm", "--input=1,2,3", "--out=moved.safetensors"
    succeed("reparametrize", "a.safetensors", own, *sought)
    apply = "reparametrize", "b.safetensors", own, "--apply=moved.element.safetensors"
    succeed(*apply, "--out=other.safetensors")
    succeed(*apply, "--input=1,2,3", "--out=again.safetensors")
    assert Path("other.safetensors").read_bytes() == Path("again.safetensors").read_bytes()
    assert not torch.equal(load_file("other.safetensors")["1.weight"], layers[1].weight)
    given = load_file("moved.element.safetensors")
    with safe_open("moved.element.safetensors", "pt") as opened:
        metadata = opened.metadata()
    for text, says in (
        ('{"shape": [1, -2], "tokens": null}', "its input is"),
        ('{"shape": [99999, 99999], "tokens": null}', "9999800001 numbers"),
        ("[1", "is damaged"),
    ):
        save_file(given, "moved.element.safetensors", {**metadata, "lightning_sym.input": text})
        assert_refused(stored_input, "moved.element.safetensors", says=[says, "write it again"])
    save_file(given, "moved.element.safetensors", {"lightning_sym.group": metadata["lightning_sym.group"]})
    assert stored_input("moved.element.safetensors") is None


def test_progress_is_one_line_on_a_terminal_and_seldom_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def __init__(self, *, terminal: bool) -> None:
            super().__init__()
            self.isatty = lambda: terminal  # type: ignore[method-assign]

    def shown(*, terminal: bool, seconds: float) -> str:
        monkeypatch.setattr(sys, "stderr", screen := Screen(terminal=terminal))
        times = itertools.count(step=seconds)
        monkeypatch.setattr(time, "monotonic", lambda: next(times))
        network = perceptron().double()
        progress = _Progress("weight_norm")
        minimize_on_orbit(trace_symmetry(network, X.double()), network, Watched(weight_norm(4), progress), max_steps=5)
        progress.close()
        return screen.getvalue()

    lines = shown(terminal=True, seconds=0.5).split("\r")
    assert re.fullmatch(r"weight_norm: \d+\.\d+ after 1 evaluations, 0 s *", lines[1])
    assert len(lines) > 6
    assert not lines[-1].strip()
    assert len(shown(terminal=False, seconds=15).splitlines()) in range(3, 8)
    assert not shown(terminal=False, seconds=0.1)


def test_objectives_of_ones_own_and_maxima_within_a_budget() -> None:
    Path("own_objectives.py").write_text(OWN)
    as_file(perceptron(), "a.safetensors")
    own = "--objective=own_objectives.Largest", "--objective.p=6", "--max_steps=5", "--out=b.safetensors"
    succeed("reparametrize", "a.safetensors", *MLP, *own)
    found = report_of("b.safetensors")
    assert found["options"] == {"p": 6}
    assert found["after"] < found["before"]
    largest = "--objective=weight_norm", "--maximize", "--budget=0.5", "--max_steps=5", "--out=c.safetensors"
    succeed("reparametrize", "a.safetensors", *MLP, *largest)
    assert report_of("c.safetensors")["after"] > report_of("c.safetensors")["before"]
    balanced = "--objective=weight_norm", "--start=balanced", "--max_steps=0", "--out=d.safetensors"
    succeed("reparametrize", "a.safetensors", *MLP, *balanced)
    assert report_of("d.safetensors")["after"] < report_of("d.safetensors")["before"]


def test_calibration_batches_are_random_parts_of_all_data() -> None:
    inputs = torch.arange(50.0)
    batches = [(part, part + 0.5) for part in inputs.split(8)]
    one, other = (calibration_batch(batches, 20, seed) for seed in (0, 1))
    assert torch.equal(one[1], one[0] + 0.5)
    assert len(one[0].unique()) == 20
    assert not torch.equal(one[0], other[0])
    assert torch.equal(one[0], calibration_batch(iter(batches), 20)[0])
    assert torch.equal(calibration_batch(batches, 99)[0].sort().values, inputs)
    assert_refused(calibration_batch, [], 3, says="the data hold no batch")


GUIDE = (Path(__file__).parents[2] / "docs" / "reparametrize.md").read_text()
LINES = [line for line in GUIDE.replace("\\\n", " ").splitlines() if line.startswith("lightning-sym reparametrize")]


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=[pytest.mark.slow] if "resnet" in line else []) for line in LINES]
)
def test_commands_of_the_guide(line: str) -> None:
    if "runs/" in line:
        torch.manual_seed(0)
        network = VisionTransformer(in_channels=1, image_size=8, patch_size=4, width=8, depth=1, heads=2)
        ModelZoo.add("runs/zoo-digits-vit/zoo", [network], network=network)
    elif "resnet" in line:
        torch.manual_seed(0)
        torch.save(torchvision.models.resnet18().state_dict(), "resnet.pt")
    else:
        for seed, name in enumerate(("llama", "llama-chat")):
            model("llama", seed).save_pretrained(name)
    if "--apply" in line:
        succeed("reparametrize", "llama", "--objective=weight_norm", "--max_steps=1", "--out=llama-4bit")
    small = [] if "--apply" in line else ["--max_steps=1", *(["--samples=2"] if "--data" in line else [])]
    assert "  report " in succeed(*line.split()[1:], *small).out


# ---- the command line


def test_help_names_all_objectives_and_kinds_and_fits_on_a_screen() -> None:
    text = succeed("reparametrize", "--help").out
    assert text == succeed("reparametrize").out
    assert set(OBJECTIVES) == set(objectives.OBJECTIVES)
    assert set(FACTORS) == {"all", *KINDS.values()}
    assert all(name in text for name in (*OBJECTIVES, *FACTORS))
    assert len(text.splitlines()) < 50


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("a.pt --objective=gradient_norm --data=random", "the batch holds no targets"),
        ("a.pt --objective=weight_norm --factors=rotations", "'rotations'; expected one of: all, scales"),
        ("a.pt --objective=weight_norm --out=old.safetensors", "old.report.json exists already"),
        ("a.pt --objective=weight_norm --ignore=linear1.*", "ignore leaves out linear1.bias, which has to move"),
        ("a.pt --apply=bad.safetensors", "bad.safetensors"),
        ("a.pt --apply=other.safetensors", "holds an element of another symmetry"),
    ],
)
def test_the_command_line_says_what_is_wrong(options: str, says: str) -> None:
    torch.save(perceptron().state_dict(), "a.pt")
    Path("bad.safetensors").write_bytes(b"x" * 100)
    Path("old.report.json").write_text("{}")
    if "other" in options:
        other = MultiLayerPerceptron(widths=(8,), in_channels=1, image_size=8)
        found = reparametrize_checkpoint(
            as_file(other, "b.safetensors"), "c.safetensors", weight_norm(), network=other, inputs=X, max_steps=0
        )
        found.symmetry.save(found.element, "other.safetensors")
    before = set(Path().rglob("*"))
    out = () if "--out" in options else ("--out=m.safetensors",)
    result = call("reparametrize", *options.split(), *MLP, *out)
    assert result.status == 1
    assert says in result.error
    assert {path for path in Path().rglob("*") if "__pycache__" not in path.parts} <= before


def test_files_without_a_network_adapters_and_zoos_are_refused() -> None:
    as_file(perceptron(), "a.safetensors")
    assert (
        "does not say its network; give the folder with its config.json, or --network"
        in call("reparametrize", "a.safetensors", "--objective=weight_norm", "--out=m.safetensors").error
    )
    sought: Callable[..., Any] = functools.partial(
        reparametrize_checkpoint, network=perceptron(), inputs=X, out="m.safetensors"
    )
    assert_refused(sought, "a.safetensors", says="expected an objective to minimise, or an element to apply, got")
    for name in ("member-0000.safetensors", "member-0001.safetensors"):
        Path("adapter").mkdir(exist_ok=True)
        Path("adapter", name.replace("member-0000", "adapter_model")).touch()
    Path("adapter/adapter_config.json").write_text("{}")
    Path("adapter/member-0001.safetensors").unlink()
    says = "a.safetensors+adapter holds an adapter; expected a whole model: lightning-sym merge"
    assert_refused(sought, "a.safetensors+adapter", objective=weight_norm(), says=says)


# ---- whole or not at all


@pytest.mark.parametrize("out", ["m.safetensors", "new/m.safetensors"])
def test_a_full_disk_leaves_nothing_behind(out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_file(perceptron(), "a.safetensors")
    before = sorted(Path().rglob("*"))

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(symmetry_files, "_write", fail)
    result = call("reparametrize", "a.safetensors", *MLP, "--objective=weight_norm", "--max_steps=1", f"--out={out}")
    assert result.status == 1
    assert "No space left on device; no file remains" in result.error
    assert sorted(Path().rglob("*")) == before


def test_a_run_that_is_killed_is_in_nobodys_way(monkeypatch: pytest.MonkeyPatch) -> None:
    move: Callable[..., Any] = functools.partial(
        reparametrize_checkpoint, as_file(perceptron(), "a.safetensors"), network=perceptron(), inputs=X
    )
    move("first.safetensors", weight_norm(), max_steps=1)
    move = functools.partial(move, "m.safetensors", element="first.element.safetensors")  # without threads of autograd
    before = set(Path().rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(symmetry_files, "_write", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        child = multiprocessing.get_context("fork").Process(target=move)
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    left = set(Path().rglob("*")) - before
    assert left
    assert all(any(part.startswith(".") for part in path.parts) for path in left)
    found = move()
    assert found.out == Path("m.safetensors")
    assert not [path for path in Path().iterdir() if path.name.startswith(".")]


def test_a_changed_function_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    as_file(perceptron(), "a.safetensors")
    before = set(Path().rglob("*"))
    change = "lightning_sym.symmetry.moves.moved.largest_output_change"
    monkeypatch.setattr(change, lambda *_: (0.5, torch.float64))
    result = call(
        "reparametrize", "a.safetensors", *MLP, "--objective=weight_norm", "--max_steps=1", "--out=m.safetensors"
    )
    assert result.status == 1
    assert result.error.startswith("the move changed the output by 5.0e-01")
    assert set(Path().rglob("*")) == before
