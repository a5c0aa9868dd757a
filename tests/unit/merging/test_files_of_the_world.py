"""Checkpoints as other programs write them: prefixes, averages beside the weights, surplus and missing tensors."""

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_refused
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_sym.merging.checkpoint import Checkpoint
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.symmetry.tracing.graph.capture import state_tensors
from lightning_sym.weights import match_weights, read_weights


class Net(nn.Module):
    """Layers, a norm, a constant that state dicts lack, and an auxiliary head."""

    def __init__(self, auxiliary: bool = False) -> None:
        super().__init__()
        self.embed, self.norm, self.output = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("position_ids", torch.arange(5)[None], persistent=False)
        self.register_buffer("frequencies", torch.linspace(0.1, 1, 7), persistent=False)
        if auxiliary:
            self.aux = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.relu(self.norm(self.embed(x))))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(seed: int = 0, **settings: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**settings).eval()


def prefixed(state: Mapping[str, Tensor], start: str) -> dict[str, Tensor]:
    return {start + name: tensor for name, tensor in state.items()}


def state_of(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    return checkpoint.network.state_dict()


def assert_holds(checkpoint: Checkpoint, network: nn.Module) -> None:
    state = state_of(checkpoint)
    assert state.keys() == network.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in network.state_dict().items())


# Two networks, of which the first is the one to be read.
FORMS: dict[str, Callable[[Net, Net], Any]] = {
    "torch.compile": lambda a, _: torch.compile(a).state_dict(),
    "torch.compile of a layer": lambda a, _: {
        name.replace("embed.", "embed._orig_mod."): tensor for name, tensor in a.state_dict().items()
    },
    "data parallel": lambda a, _: nn.DataParallel(a).state_dict(),
    "data parallel and compiled": lambda a, _: nn.DataParallel(torch.compile(a)).state_dict(),  # type: ignore[arg-type]
    "averaged": lambda a, _: AveragedModel(a).state_dict(),
    "shadow": lambda a, _: {"decay": 0.99, "shadow": a.state_dict()},
    "fully sharded": lambda a, _: prefixed(a.state_dict(), "_fsdp_wrapped_module."),
    "Lightning": lambda a, _: {
        "state_dict": prefixed(a.state_dict(), "model.") | {"metric.total": torch.ones(1)},
        "epoch": 3,
        "best": np.float64(0.1),
        "steps": [np.int64(3)],
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(2)}}}],
    },
    "with numbers of numpy": lambda a, _: {**a.state_dict(), "loss": np.float32(2)},
}
CHOICES: dict[str, tuple[Callable[[Net, Net], Any], str, str]] = {
    "beside an average": (lambda a, b: {"model": a.state_dict(), "model_ema": b.state_dict()}, "model.", "model_ema."),
    "online": (
        lambda a, b: prefixed(a.state_dict(), "online_model.") | prefixed(b.state_dict(), "ema_model."),
        *("online_model.", "ema_model."),
    ),
    "timm": (
        lambda a, b: {"state_dict": a.state_dict(), "state_dict_ema": b.state_dict()},
        *("state_dict.", "state_dict_ema."),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_other_programs_are_read(form: str) -> None:
    a, b = made(0), made(1)
    torch.save(FORMS[form](a, b), "x.pt")
    found = Checkpoint.read("x.pt", made(2))
    assert_holds(found, a)
    assert found.notes == ()
    found.write(state_tensors(found.network), "out.safetensors")
    assert load_file("out.safetensors").keys() == a.state_dict().keys()


def test_compiled_networks_take_plain_weights() -> None:
    a = made()
    torch.save(a.state_dict(), "x.pt")
    found = match_weights(read_weights("x.pt"), torch.compile(made(1)))  # type: ignore[arg-type]
    assert {name.removeprefix("_orig_mod."): tensor.tolist() for name, tensor in found.tensors.items()} == {
        name: tensor.tolist() for name, tensor in a.state_dict().items()
    }


@pytest.mark.parametrize("form", CHOICES)
def test_weights_are_chosen_before_their_average_and_this_is_said(form: str) -> None:
    a, b = made(0), made(1)
    make, plain, average = CHOICES[form]
    torch.save(make(a, b), "x.pt")
    found = Checkpoint.read("x.pt", made(2))
    assert_holds(found, a)
    assert found.notes == (
        f"x.pt holds weights under {plain!r}, {average!r}: {plain!r} was read; --prefix chooses another",
    )
    assert_holds(Checkpoint.read("x.pt", made(2), prefix=average), b)


def test_prefixes_without_a_plain_choice_are_named() -> None:
    torch.save({"student": made().state_dict(), "teacher": made(1).state_dict()}, "x.pt")
    says = "x.pt holds weights of Net under several prefixes ('student.', 'teacher.'); choose one as prefix (--prefix)."
    assert_refused(Checkpoint.read, "x.pt", made(), says=says)


def test_ten_surplus_tensors_are_named_and_the_others_counted() -> None:
    a = made()
    extra = {f"ema.{number}.weight": torch.ones(2) for number in range(13)} | {"head": torch.ones(1)}
    save_file({**a.state_dict(), **extra}, "x.safetensors")
    with pytest.raises(ValueError, match=r"x\.safetensors holds 'ema\.0\.weight', ") as caught:
        Checkpoint.read("x.safetensors", a)
    said = str(caught.value)
    assert len(re.findall(r"'ema\.\d+\.weight'", said)) == 10
    assert " and 4 others, which Net has not; leave them out with --ignore 'ema.*,head', or pass the arguments" in said
    found = Checkpoint.read("x.safetensors", a, ignore=["ema.*", "head"])
    assert_holds(found, a)
    found.write(state_tensors(made(1)), "out.safetensors")
    written = load_file("out.safetensors")
    assert written.keys() == a.state_dict().keys() | extra.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in extra.items())


def test_missing_tensors_are_named_and_the_patterns_spare_the_others() -> None:
    a = made(auxiliary=True)
    state = {name: tensor for name, tensor in a.state_dict().items() if not name.startswith("aux.1")}
    torch.save(prefixed(state, "model."), "x.pt")
    says = (
        "x.pt does not hold 'model.aux.1.weight', 'model.aux.1.bias' of Net; it holds ",
        "or leave them out with --ignore 'model.aux.1.*'.",
    )
    assert_refused(Checkpoint.read, "x.pt", a, says=says)
    other = made(1, auxiliary=True)
    found = Checkpoint.read("x.pt", other, ignore=["model.aux.1.*"])
    assert found.ignored == {"aux.1.weight", "aux.1.bias"}
    assert found.notes == ("x.pt does not hold 'aux.1.weight', 'aux.1.bias', which is ignored",)
    found.write(state_tensors(other), "out.safetensors")
    assert load_file("out.safetensors").keys() == state.keys()
    for name, tensor in state_of(found).items():
        assert torch.equal(tensor, (other if name.startswith("aux.1") else a).state_dict()[name])


def test_auxiliary_heads_of_another_network_are_copied_from_the_reference() -> None:
    a = made(auxiliary=True)
    save_file(a.state_dict(), "x.safetensors")
    found = Checkpoint.read("x.safetensors", made(1), ignore=["aux.*"])
    found.write(state_tensors(made(2)), "out.safetensors")
    written = load_file("out.safetensors")
    assert list(written) == list(load_file("x.safetensors"))
    for name, tensor in a.state_dict().items():
        expected = tensor if name.startswith("aux.") else made(2).state_dict()[name]
        assert torch.equal(written[name], expected) or name.endswith("num_batches_tracked")


def test_ignored_tensors_may_have_another_shape() -> None:
    a, b = made(), made(1)
    b.output = nn.Linear(6, 5)
    torch.save(b.state_dict(), "x.pt")
    assert_refused(Checkpoint.read, "x.pt", a, says="'output.weight' of shape [5, 6], but Net has it of shape [3, 6]")
    found = Checkpoint.read("x.pt", a, ignore=["output.*"])
    assert torch.equal(state_of(found)["output.weight"], a.output.weight)
    assert torch.equal(state_of(found)["embed.weight"], b.embed.weight)


def test_constants_that_older_versions_saved_are_no_surplus() -> None:
    a = made()
    constants = {"position_ids": torch.arange(5)[None], "frequencies": a.frequencies.bfloat16()}
    save_file({**a.state_dict(), **constants}, "x.safetensors")
    found = Checkpoint.read("x.safetensors", made(1))
    assert_holds(found, a)
    found.write(state_tensors(found.network), "out.safetensors")
    written = load_file("out.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in constants.items())
    save_file({**a.state_dict(), "position_ids": torch.arange(1, 6)[None]}, "y.safetensors")
    assert_refused(Checkpoint.read, "y.safetensors", a, says="holds 'position_ids', which Net has not")


def test_tensors_beside_the_network_are_copied() -> None:
    a = made()
    save_file({**prefixed(a.state_dict(), "net."), "loss.weight": torch.ones(2)}, "x.safetensors")
    found = Checkpoint.read("x.safetensors", made(1))
    assert found.notes == ("x.safetensors also holds 'loss.weight', which the network has not: copied as is",)
    found.write(state_tensors(made(2)), "out.safetensors")
    written = load_file("out.safetensors")
    assert list(written) == list(load_file("x.safetensors"))
    assert torch.equal(written["loss.weight"], torch.ones(2))
    assert torch.equal(written["net.embed.weight"], made(2).embed.weight)


def test_tied_tensors_that_are_there_twice_are_computed_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.embed.weight

    a, reads = Tied(), []

    class Counted(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            reads.append(name)
            return torch.full((9, 4), float(len(reads)))

    save_file({name: tensor.clone() for name, tensor in a.state_dict().items()}, "x.safetensors")
    found = Checkpoint.read("x.safetensors", a)
    for number, dtype in enumerate((None, "bfloat16")):
        found.write(Counted(state_tensors(a)), f"{number}.safetensors", out_dtype=dtype)
        written = load_file(f"{number}.safetensors")
        assert torch.equal(written["embed.weight"], written["head.weight"])
        assert reads == ["embed.weight"] * (number + 1)


def test_programs_modules_and_types_are_refused_in_their_own_sentences() -> None:
    a = made()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but files of it remain
        torch.jit.save(torch.jit.trace(a, torch.ones(2, 4)), "script.pt")
    torch.save(a, "module.pt")
    torch.save(MultiLayerPerceptron((3,), image_size=8), "old.pt", _use_new_zipfile_serialization=False)
    state = a.state_dict()
    torch.save({**state, "embed.weight": state["embed.weight"].to(torch.float8_e4m3fn)}, "small.pt")
    for name, says in (
        ("script.pt", "script.pt is TorchScript: save module.state_dict() in a trusted environment"),
        (
            "module.pt",
            ("module.pt holds a whole module (", ".Net), and is not opened, because that could run code; save"),
        ),
        ("old.pt", "old.pt holds a whole module (lightning_sym.networks.multilayer_perceptron.MultiLayerPerceptron)"),
        ("small.pt", "holds embed.weight as torch.float8_e4m3fn; expected numbers of 16 bits or more."),
    ):
        assert_refused(Checkpoint.read, name, a, says=says)
