"""Checkpoints from elsewhere: what can be read, which names fit, and what is refused before anything is written."""

import argparse
import functools
import pickle
import re
import shlex
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import QUIET, call, succeed
from helpers import assert_refused
from safetensors.torch import save_file
from torch import nn

from lightning_sym.datamodules import DiabetesDataModule
from lightning_sym.networks import MultiLayerPerceptron, Network
from lightning_sym.weights import fit_weights, match_weights, read_weights
from lightning_sym.zoo import ModelZoo


class Plain(nn.Module):
    """A module that knows nothing of this package."""

    def __init__(self, width=4):
        super().__init__()
        self.hidden, self.norm = nn.Linear(64, width), nn.BatchNorm1d(width)
        self.activation, self.output = nn.ReLU(), nn.Linear(width, 10)

    def forward(self, x):
        return self.output(self.activation(self.norm(self.hidden(x.flatten(1)))))


class Line(nn.Linear):
    """A regressor."""

    def __init__(self):
        super().__init__(10, 1)


class Needy(Plain):
    def __init__(self, width):
        super().__init__(width)


class Placed(Plain):
    def __init__(self, width, /):
        super().__init__(width)


class Starred(Plain):
    def __init__(self, *widths):
        super().__init__(*widths)


@pytest.fixture(autouse=True)
def module(monkeypatch, tmp_path):
    """A module of one's own, which can be imported by name."""
    found = types.ModuleType("my_networks")
    monkeypatch.setitem(sys.modules, "my_networks", found)
    for kind in (Plain, Line, Needy, Placed, Starred):
        setattr(found, kind.__name__, kind)
        monkeypatch.setattr(kind, "__module__", "my_networks")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


def outputs(network):
    return network.double().eval()(torch.linspace(-1, 1, 128).double().view(2, 1, 8, 8))


SHAPES = {
    "state.pt": lambda state: torch.save(state, "state.pt"),
    "state.safetensors": lambda state: save_file(state, "state.safetensors"),
    "parallel.pt": lambda state: torch.save({f"module.{name}": value for name, value in state.items()}, "parallel.pt"),
    "lightning.ckpt": lambda state: torch.save(
        {
            "state_dict": {f"net.{name}": value for name, value in state.items()} | {"loss.weight": torch.ones(10)},
            "epoch": 3,
            "optimizer_states": [{"state": {0: {"step": torch.ones(1)}}}],
        },
        "lightning.ckpt",
    ),
    "old.pt": lambda state: torch.save(
        {"model": {name: value for name, value in state.items() if "num_batches" not in name}}, "old.pt"
    ),
}


@pytest.mark.parametrize("network", [Plain, functools.partial(MultiLayerPerceptron, (3,), image_size=8)])
def test_members_compute_what_was_saved(network):
    trained = []
    for name, save in SHAPES.items():
        trained.append(network())
        save(trained[-1].state_dict())
        assert fit_weights(read_weights(name), network()).keys() == network().state_dict().keys()
    zoo = ModelZoo.add("zoo", list(SHAPES), network=network)
    assert zoo.numbers == [0, 1, 2, 3, 4]
    for number, (name, module) in enumerate(zip(SHAPES, trained, strict=True)):
        assert torch.equal(outputs(zoo.load(number)), outputs(module))
        assert zoo.member(number).training == {"imported": name}
    others = network(), network()
    more = ModelZoo.add(Path("zoo"), [others[0], others[1].state_dict()], network=network)
    assert more.numbers == [0, 1, 2, 3, 4, 5, 6]
    assert torch.equal(outputs(more.load(6)), outputs(others[1]))
    assert more.verify() == {}


class Touch:
    """An object whose unpickling runs code."""

    def __reduce__(self):
        return (Path("harm").touch, ())


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, np.int64, np.uint8, np.bool_])
@pytest.mark.parametrize("new", [True, False])
def test_scalars_of_numpy_beside_a_state_dict_are_read(kind, new):
    network = Plain()
    torch.save(
        {"state_dict": network.state_dict(), "best": kind(1), "all": [kind(0)]},
        "numpy.pt",
        _use_new_zipfile_serialization=new,
    )
    found = fit_weights(read_weights("numpy.pt"), network)
    assert all(torch.equal(found[name], tensor) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("new", [True, False])
def test_settings_beside_a_state_dict_are_passed_over_and_run_nothing(new):
    network = Plain()
    settings = argparse.Namespace(lr=0.1, out=Path("runs/a"), schedule={"steps": [3, 4]}, more=argparse.Namespace())
    content = {"model": network.state_dict(), "args": settings}
    torch.save(content, "settings.pt", _use_new_zipfile_serialization=new)
    found = fit_weights(read_weights("settings.pt"), network)
    assert all(torch.equal(found[name], tensor) for name, tensor in network.state_dict().items())

    settings.out = Touch()
    torch.save(content, "harm.pt", _use_new_zipfile_serialization=new)
    assert_refused(read_weights, "harm.pt", says="and is not opened")
    assert not Path("harm").exists()


def test_scalars_of_numpy_run_nothing():
    import numpy._core.multiarray as multiarray

    class Scalar:
        def __init__(self, dtype, data):
            self.parts = dtype, data

        def __reduce__(self):
            return multiarray.scalar, self.parts

    for number, (dtype, data) in enumerate(
        ((np.dtype(object), Touch()), (np.dtype("f4"), b"1"), (np.dtype("V8"), b""))
    ):
        torch.save({"state_dict": Plain().state_dict(), "best": Scalar(dtype, data)}, f"{number}.pt")
        assert_refused(read_weights, f"{number}.pt", says="and is not opened")
    assert not Path("harm").exists()


def write_other_formats():
    """Write files that people have beside checkpoints, or under the names of checkpoints."""
    for name in ("words.pt", "words.safetensors"):
        Path(name).write_text("just words, and then some more of them")
    Path("page.pt").write_text("<!DOCTYPE html><html>Sign in</html>")
    Path("lfs.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    Path("empty.pt").touch()
    Path("keras.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    np.savez("arrays.npz", weight=np.ones(3))
    np.save("array.npy", np.ones(3))
    with zipfile.ZipFile("files.zip", "w") as archive:
        archive.writestr("notes.txt", "some")
    torch.save(Plain().state_dict(), "named.safetensors")
    save_file(Plain().state_dict(), "named.bin")
    Path("cut.safetensors").write_bytes(Path("named.bin").read_bytes()[:-9])


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ("absent.pt", "There is no file"),
        ("whole.pt", "holds a whole module (my_networks.Plain), and is not opened, because that could run code"),
        ("harm.pt", "holds more than tensors and plain values"),
        ("words.pt", "words.pt is text, not a file of torch.save; pass the file of the weights."),
        ("page.pt", "is a web page, not a file of torch.save; download the file itself."),
        ("empty.pt", "is empty, not a file of torch.save; fetch or write it again."),
        ("arrays.npz", "is an archive of numpy's arrays (.npz), not a file of torch.save; save tensors by name with"),
        ("array.npy", "is an array of numpy, not a file of torch.save"),
        ("files.zip", "is a zip archive of other files, not a file of torch.save"),
        ("keras.h5", "is a file of HDF5, as of Keras, not a file of torch.save"),
        ("named.bin", "is a file of safetensors, not a file of torch.save; give it the ending .safetensors."),
        ("named.safetensors", "is a file of torch.save, not a file of safetensors; give it the ending .pt."),
        ("lfs.safetensors", "is a pointer of Git LFS, not a file of safetensors; fetch the file itself with git lfs"),
        ("cut.safetensors", "is damaged, or no safetensors file"),
        ("half.pt", "is damaged or truncated, or no file of torch.save; fetch or write it again"),
        ("half_of_old.pt", "is damaged or truncated, or no file of torch.save; fetch or write it again"),
        ("words.safetensors", "is text, not a file of safetensors"),
        ("list.pt", "holds no tensors by name"),
        ({"hidden.weight": torch.zeros(4, 64)}, "does not hold 'hidden.bias', 'norm.weight', "),
        ({"other": torch.zeros(2)}, "does not hold 'hidden.weight', 'hidden.bias', 'norm.weight'"),
        ({"own.weight": torch.zeros(4), "norm.bias": torch.zeros(4)}, "does not hold 'hidden.weight', 'hidden.bias', "),
        (Plain(5).state_dict(), ("of shape [5, 64], but Plain has it of shape [4, 64]", "pass the arguments")),
        (Plain().state_dict() | {"extra": torch.zeros(2)}, "holds 'extra', which Plain has not"),
        ({"a": Plain().state_dict(), "b": Plain().state_dict()}, "several prefixes ('a.', 'b.'); choose one"),
        (Plain().state_dict() | {"hidden.bias": torch.full((4,), torch.nan)}, "has values that are not finite in"),
        (Plain().state_dict() | {"hidden.bias": torch.ones(4) + 1j}, "'hidden.bias' as torch.complex64"),
        (Plain().state_dict() | {"hidden.bias": torch.ones(4, dtype=torch.int8)}, ("as torch.int8", "not quantized")),
        (Plain().state_dict() | {"norm.running_mean": torch.ones(4).bool()}, "'norm.running_mean' as torch.bool"),
        (Plain().state_dict() | {"hidden.bias": torch.ones(4, device="meta")}, "without its numbers"),
        ("sparse.pt", "as a tensor that is torch.sparse_coo; save hidden.weight.to_dense() instead"),
        ("script.pt", "is TorchScript: save module.state_dict() in a trusted environment, and pass that file."),
        ("itself.pt", "holds dictionaries in dictionaries, 32 deep or without end"),
        ("numpy.pt", ("holds arrays of numpy (numpy", "save them as torch.as_tensor(x)")),
        ("objects.pt", ("holds arrays of numpy (numpy", "save them as torch.as_tensor(x)")),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_written(weights, says):
    torch.save(Plain(), "whole.pt")
    Path("harm.pt").write_bytes(pickle.dumps({"a": Touch()}))
    torch.save([torch.zeros(2)], "list.pt")
    torch.save(Plain().state_dict() | {"hidden.weight": torch.eye(4, 64).to_sparse()}, "sparse.pt")
    torch.save({"state_dict": Plain().state_dict(), "best": np.ones(2)}, "numpy.pt")
    torch.save({"state_dict": Plain().state_dict(), "best": np.array([Touch()], dtype=object)}, "objects.pt")
    itself = Plain().state_dict()
    itself["itself"] = itself
    torch.save(itself, "itself.pt")
    with zipfile.ZipFile("script.pt", "w") as archive:  # as torch.jit.save writes it, which has been deprecated
        for name in ("data.pkl", "constants.pkl", "code/__torch__/plain.py", "version"):
            archive.writestr(f"script/{name}", b"3")
    for name, new in (("half.pt", True), ("half_of_old.pt", False)):
        torch.save(Plain().state_dict(), name, _use_new_zipfile_serialization=new)
        Path(name).write_bytes(Path(name).read_bytes()[: Path(name).stat().st_size // 2])
    write_other_formats()
    kind = FileNotFoundError if weights == "absent.pt" else ValueError
    assert_refused(ModelZoo.add, "zoo", [Plain(), weights], network=Plain, says=says, error=kind)
    assert not Path("zoo").exists()
    assert not Path("harm").exists()


def test_the_same_weights_are_no_second_member():
    one, two = Plain(), Plain()
    for name, network in (("one.pt", one), ("copy.pt", one)):
        torch.save(network.state_dict(), name)
    add = functools.partial(assert_refused, ModelZoo.add, "zoo", network=Plain)
    add(["one.pt", two, "copy.pt"], says="copy.pt holds the same weights as one.pt; leave one of them out.")
    add(["one.pt", "one.pt"], says="one.pt holds the same weights as one.pt")
    assert not Path("zoo").exists()
    ModelZoo.add("zoo", [two, "one.pt"], network=Plain)
    add([Plain(), "copy.pt"], says="copy.pt holds the same weights as member 1 of zoo")
    assert ModelZoo.open("zoo", network=Network.wrap(Plain)).numbers == [0, 1]


def test_networks_that_nothing_can_build_again_are_refused():
    add = functools.partial(assert_refused, ModelZoo.add, "zoo")
    add([Plain()], network=Plain(), says="network must describe how to build the module, got Plain", error=TypeError)
    add([Plain()], network=lambda: Plain(), says="cannot be imported by that name")
    add("a.pt", network=Plain, says="weights must be a list of files")
    ModelZoo.add("zoo", [Plain()], network=Plain)
    add([Plain(5)], network=functools.partial(Plain, 5), says="choose another folder")
    assert ModelZoo.open("zoo", network=Network.wrap(Plain)).numbers == [0]


def test_one_name_of_tied_weights_is_enough():
    network = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    network[2].weight = network[0].weight
    state = network.state_dict()
    for left in ("0.weight", "2.weight"):
        found = fit_weights({f"net.{name}": value for name, value in state.items() if name != left}, network)
        assert found.keys() == state.keys()
        assert torch.equal(found[left], state[left])
    assert_refused(
        lambda: fit_weights({name: value for name, value in state.items() if "weight" not in name}, network),
        says="does not hold '0.weight'",
    )


def test_a_prefix_can_be_chosen():
    a, b = Plain(), Plain()
    torch.save({"model": a.state_dict(), "average": b.state_dict()}, "two.pt")
    for prefix, module in (("model", a), ("average.", b)):
        zoo = ModelZoo.add(prefix, ["two.pt"], network=Plain, prefix=prefix)
        assert torch.equal(outputs(zoo.load(0)), outputs(module))


def test_weights_are_read_before_their_average_and_this_is_said_as_merge_says_it():
    a, b = Plain(), Plain()
    torch.save({"model": a.state_dict(), "model_ema": b.state_dict()}, "two.pt")
    said = "two.pt holds weights under 'model.', 'model_ema.': 'model.' was read; --prefix chooses another."
    with pytest.warns(UserWarning, match=re.escape(said)):
        zoo = ModelZoo.add("zoo", ["two.pt"], network=Plain)
    assert torch.equal(outputs(zoo.load(0)), outputs(a))
    found = succeed("import", "two.pt", "--network=my_networks.Plain", "--out=other", "--data=DigitsDataModule")
    assert found.out.count(said) == 1


def test_the_command_line_imports_and_says_how_good_the_members_are():
    torch.save(Plain(6).state_dict(), "a.pt")
    save_file(Plain(6).state_dict(), "b.safetensors")
    options = ["--network=my_networks.Plain", "--network.width", 6, "--out", "runs/mine/zoo", "--data=DigitsDataModule"]
    result = succeed("import", "a.pt", *options, "b.safetensors")
    zoo = ModelZoo.open("runs/mine/zoo", allow=["my_networks"])
    assert zoo.member(1).data["input_shape"] == [1, 8, 8]
    accuracy = zoo.member(1).metric("test", "accuracy")
    assert f"member 1: b.safetensors, test accuracy {accuracy:.1%}" in result.out
    # What it says can be pasted.
    hints = [shlex.split(line.partition("lightning-sym ")[2]) for line in result.out.splitlines() if "use it" in line]
    assert [hint[hint.index("--run_dir") + 1] for hint in hints] == ["runs/mine/matching", "runs/mine/stitching"]
    for hint in hints:
        succeed(*hint, *QUIET, "--trainer.fast_dev_run=true", "--data.batch_size=20")
    shown = call("import", "--help").out
    assert all(
        f"--{option} " in shown for option in ("network NETWORK", "out FOLDER", "prefix PREFIX", "data DATAMODULE")
    )


def test_regressors_are_imported_with_their_squared_distance():
    network = Line()
    torch.save(network.state_dict(), "a.pt")
    result = succeed("import", "a.pt", "--network=my_networks.Line", "--out=zoo", "--data=DiabetesDataModule")
    member = ModelZoo.open("zoo", allow=["my_networks"]).member(0)
    data = DiabetesDataModule()
    inputs, targets = next(iter(data.test_dataloader()))
    expected = (network(inputs) - targets).square().mean().item()
    assert len(inputs) == member.data["splits"]["test"]
    assert member.metrics["test"] == {"loss": pytest.approx(expected)}
    assert f"member 0: a.pt, test loss {expected:.3f}" in result.out
    assert "1 member of" in result.out
    found = call("import", "a.pt", "--network=my_networks.Line", "--out=other", "--data=DigitsDataModule")
    assert "Line cannot be evaluated on DigitsDataModule (" in found.error
    assert not Path("other").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("a.pt", "Missing: --network, --out; give for example --network my_networks.Net --out runs/mine/zoo."),
        ("--network=my_networks.Plain --out=zoo", "Missing: the file of a checkpoint."),
        ("--network=my_networks.Plin --out=zoo a.pt", "There is no class 'my_networks.Plin'. Did you mean 'Plain'?"),
        ("--network=nowhere.Plain --out=zoo a.pt", "network: There is no module 'nowhere'."),
        ("--network=my_networks.Plain --network.widht=3 --out=zoo a.pt", "Plain has no argument 'widht'. Did you mean"),
        ("--network=my_networks.Plain --outt=zoo a.pt", "import has no option 'outt'. Did you mean 'out'?"),
        ("--network=Plain --out=zoo a.pt", "network: Unknown class 'Plain';"),
        ("--network=my_networks.Plain.Inner --out=zoo a.pt", "Plain.Inner is not at the top level of a module"),
        ("--network=my_networks.Plain --out=zoo a.pt a.pt", "a.pt is there twice; leave one of them out."),
        ("--network=my_networks.Needy --out=zoo a.pt", "Needy needs the argument 'width'; give --network.width."),
        ("--network=my_networks.Placed --out=zoo a.pt", "Placed takes width by its position only, and options have"),
        ("--network=my_networks.Placed --network.width=4 --out=zoo a.pt", "takes it by name and returns Placed(...)"),
        ("--network=my_networks.Starred --network.widths=[4] --out=zoo a.pt", "Starred takes *widths by its position"),
        (
            "--network=my_networks.Plain --out=zoo a.pt --data=Digits",
            "data: Unknown class 'Digits'; give its full path, or",
        ),
    ],
)
def test_the_command_line_says_what_is_wrong(options, says):
    torch.save(Plain().state_dict(), "a.pt")
    result = call("import", *options.split())
    assert result.status in (1, 2)
    assert says in result.error
    assert not Path("zoo").exists()


def test_a_prefix_that_no_name_has_is_named_with_those_that_fit() -> None:
    held = {f"{start}.{name}": own for start in ("student", "teacher") for name, own in Plain().state_dict().items()}
    says = "No name in The state dict begins with the prefix 'nix' (--prefix); expected 'student.' or 'teacher.'."
    assert_refused(match_weights, held, Plain(), prefix="nix", says=says)
    assert match_weights(held, Plain(), prefix="teacher").prefix == "teacher."


@pytest.mark.parametrize(("shorter", "longer"), [("", "model."), ("model.", "model.model."), ("", "ema.model.")])
def test_one_of_two_copies_is_read_by_its_prefix_though_the_other_has_a_longer_one(shorter: str, longer: str) -> None:
    one, two = Plain().state_dict(), {name: own + 1 for name, own in Plain().state_dict().items()}
    held = {shorter + name: own for name, own in one.items()} | {longer + name: own for name, own in two.items()}
    for prefix, wanted, others in ((shorter, one, longer), (longer, two, shorter)):
        fit = match_weights(held, Plain(), prefix=prefix)
        assert all(torch.equal(fit.tensors[name], own) for name, own in wanted.items())
        assert {*fit.outside} == {others + name for name in one}
        assert not fit.extras


def test_a_copy_is_read_though_its_own_names_begin_like_another_one() -> None:
    network = nn.ModuleDict({"model": Plain()})
    state = network.state_dict()
    held = state | {f"model.{name}": own + 1 for name, own in state.items()}
    fit = match_weights(held, network, prefix="")
    assert all(torch.equal(fit.tensors[name], own) for name, own in state.items())
    assert {*fit.outside} == {f"model.{name}" for name in state}


def test_an_empty_prefix_is_a_value_on_the_command_line() -> None:
    state = Plain().state_dict()
    torch.save({**state, **{f"model.{name}": own + 1 for name, own in state.items()}}, "two.pt")
    command = ("import", "two.pt", "--network=my_networks.Plain", "--out=zoo")
    assert "several prefixes ('', 'model.'); choose one as prefix (--prefix)" in call(*command).error
    succeed(*command, "--prefix=")
    assert torch.equal(read_weights("zoo/member-0000.safetensors")["module.hidden.bias"], state["hidden.bias"])
