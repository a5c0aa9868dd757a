import copy
import functools
import inspect
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from architectures import check_every_cut
from helpers import assert_refused, refused
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym.networks import (
    CIFARResNet,
    LeNet5,
    LinearSumsResNet,
    MultiLayerPerceptron,
    MyrtleCNN,
    Network,
    TorchvisionNetwork,
    WrappedNetwork,
    architecture_name,
    build,
)

SMALL: list[Network] = [
    MultiLayerPerceptron((5, 4), image_size=(3, 2), activation="leaky_relu(0.1)"),
    LeNet5(num_classes=3),
    MyrtleCNN(2, image_size=8),
    CIFARResNet(width=1, shortcut="B"),
    TorchvisionNetwork("squeezenet1_1", image_size=32),
    LinearSumsResNet("resnet18", image_size=32),
]


class Custom(Network):
    """A user's network, with a skip connection, a size and a default that forward keeps."""

    def __init__(self, hidden: int = 3, *, names: tuple[str, ...] = ("a",), num_classes: int = 2) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden))
        self.register_buffer("offset", torch.ones(hidden))
        self.first = nn.Linear(4, hidden)
        self.act = nn.Tanh()
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(hidden, hidden)
        self.last_act = nn.ReLU()
        self.out = nn.Linear(2 * hidden, num_classes)

    def forward(self, x: Tensor, times: int = 2, flag: bool = False, extra: Tensor | None = None) -> Tensor:
        if flag or extra is not None:
            return x
        batch, features = x.shape[0], self.first(x.flatten(1)) * self.scale
        hidden = self.act(features) + self.offset
        for _ in range(times):
            hidden = self.drop(self.second(hidden)) * self.scale
        hidden += features
        return self.out(torch.cat([self.last_act(hidden), hidden], 1).view(batch, -1))


class Child(Custom):
    def __init__(self, depth: list[int], **kwargs: int) -> None:
        super().__init__(hidden=len(depth), **kwargs)
        depth.append(0)


class NoConstructor(Custom):
    pass


class Positional(Network):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(*sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def same(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return list(first) == list(second) and all(torch.equal(first[key], second[key]) for key in first)


# Arguments


def test_architecture_holds_every_argument_of_the_outermost_constructor() -> None:
    assert MyrtleCNN(16).architecture == {
        "class_path": "lightning_sym.networks.MyrtleCNN",
        "init_args": {
            "width": 16,
            "batch_norm": True,
            "constant_width": False,
            "in_channels": 3,
            "image_size": 32,
            "num_classes": 10,
            "activation": "relu",
        },
    }
    assert MultiLayerPerceptron((5,), image_size=(3, 2)).architecture["init_args"]["image_size"] == [3, 2]
    assert NoConstructor().architecture == {
        "class_path": "test_network_base.NoConstructor",
        "init_args": {"hidden": 3, "names": ["a"], "num_classes": 2},
    }
    given = [1, 2]
    child = Child(given, num_classes=5)
    assert given == [1, 2, 0]
    assert child.architecture["init_args"] == {"depth": [1, 2], "num_classes": 5}
    assert child.fresh(0).architecture == child.architecture


def test_image_shape_needs_channels_and_a_size() -> None:
    class Sizeless(Custom):
        def __init__(self, in_channels: int) -> None:
            super().__init__()

    assert Sizeless(3).image_shape() is None
    assert LeNet5(image_size=28).image_shape() == (1, 28, 28)


@pytest.mark.parametrize("network", [*SMALL, Custom(names=("a", "b"))], ids=lambda n: type(n).__name__)
def test_architecture_and_build_round_trip_through_json(network: Network) -> None:
    text = json.dumps(network.architecture)
    again = build(json.loads(text), allow=["test_network_base"])
    assert type(again) is type(network)
    assert json.dumps(again.architecture) == text
    again.load_state_dict(network.state_dict())
    assert same(again, network)


@pytest.mark.parametrize("network", [*SMALL, Custom()], ids=lambda n: type(n).__name__)
def test_fresh_is_manual_seed_and_the_constructor(network: Network) -> None:
    torch.manual_seed(3)
    expected = build(network.architecture, allow=["test_network_base"])
    torch.manual_seed(11)
    before = torch.get_rng_state()
    fresh = network.fresh(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(fresh) is type(network)
    assert same(fresh, expected)
    assert fresh.training
    assert not same(fresh, network.fresh(4))
    shared = {p.data_ptr() for p in fresh.parameters()} & {p.data_ptr() for p in network.parameters()}
    assert not shared


@pytest.mark.parametrize("network", [*SMALL, Child([1, 2])], ids=lambda n: type(n).__name__)
@pytest.mark.few(3)
def test_copies_and_pickles_keep_arguments_and_weights(network: Network) -> None:
    for again in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert again.architecture == network.architecture
        assert same(again, network)
        assert same(again.fresh(1), network.fresh(1))
        assert again.sites() == network.sites()


def test_sites_of_a_wrapped_network_have_the_names_that_figures_and_tables_show() -> None:
    network, x = Network.wrap(Mixed()), torch.randn(2, 3)
    whole = network.sites()
    short = [name.removeprefix("module.") for name in whole]
    assert short != whole
    assert network.cuts(short).sites == network.cuts().sites == tuple(whole)
    for name in short:
        lower, upper = network.split(name)
        assert torch.equal(upper(lower(x)), network(x))
    with pytest.raises(ValueError, match="site"):
        network.split("module." + whole[0])


def test_the_constructor_looks_the_same_from_outside() -> None:
    assert list(inspect.signature(Custom).parameters) == ["hidden", "names", "num_classes"]
    with pytest.raises(TypeError, match=r"Custom\.__init__\(\) got an unexpected keyword argument 'hiden'"):
        Custom(hiden=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="abstract"):
        Network()  # type: ignore[abstract]


# Sites and cuts


def test_a_users_network_is_cut_with_values_that_cross() -> None:
    network = Custom()
    x = torch.randn(5, 2, 2)
    assert network.sites() == ["act", "last_act"]
    check_every_cut(network, x)
    lower, upper = network.eval().split("act")
    values = lower(x)
    assert isinstance(values, tuple)
    assert torch.equal(values[0], torch.tanh(network.first(x.flatten(1))))
    assert [value for value in values if isinstance(value, int)] == [5]
    assert {id(p) for p in lower.parameters()} == {id(network.first.weight), id(network.first.bias), id(network.scale)}
    assert upper.get_submodule("second") is network.second
    keys = set(lower.state_dict()) | set(upper.state_dict())
    assert keys == set(network.state_dict())
    pickled = pickle.loads(pickle.dumps(upper))
    assert torch.equal(pickled(values), network(x))
    assert torch.equal(copy.deepcopy(upper)(values), network(x))


class Blocks(MyrtleCNN):
    """A network whose sites are other modules than its activations."""

    def sites(self) -> list[str]:
        return ["pool2", "pool4", "flatten"]


def test_sites_may_be_other_modules() -> None:
    network = Blocks(width=2, image_size=8)
    check_every_cut(network, torch.randn(2, 3, 8, 8))
    assert network.split("pool2")[0](torch.randn(2, 3, 8, 8)).shape == (2, 4, 4, 4)


class SkipInPlace(Network):
    """Overwrites a tensor that crosses the cut, and reads another through a view that was made before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.other = nn.Linear(4, 4)
        self.other_act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        branch = self.act(x)
        x += branch
        y = self.other(x)
        rows = y.view(-1)
        y = self.other_act(y)
        y.add_(1)
        z = y + rows.view(-1, 4)
        z *= 2
        return z


class ViewInPlace(Network):
    """An in-place operation that must stay one: its result is read through the tensor it is a view of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        half = x[:, :2]
        half += 1
        return self.act(x)


@pytest.mark.parametrize("network", [SkipInPlace(), ViewInPlace()])
def test_in_place_arithmetic_keeps_its_meaning_and_does_not_change_what_lower_returned(network: Network) -> None:
    check_every_cut(network, torch.randn(3, 4))


class Broken(Network):
    """One way of breaking the rules per name."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=how == "inplace"))
        self.relu = nn.ReLU()
        self.block = Branching() if how == "branching" else Functional()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.how == "twice":
            return self.relu(self.relu(x) + 1)
        if self.how == "own":
            return x if x.sum() > 0 else -x
        return self.block(x)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x, inplace=True)


class WithFunctions(Network):
    """Activations as functions and as a method, in its own forward and in that of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(2, 4), Functional(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.block(self.first(x)) - 0.1).sigmoid())


def test_activations_that_are_functions_are_sites() -> None:
    network = WithFunctions()
    assert network.sites() == ["block.functional-relu", "functional-relu", "functional-sigmoid"]
    check_every_cut(network, torch.randn(3, 2))


class WithLeaf(Broken):
    leaf_modules = (Branching,)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("inplace", r"The module 'inner.1' of Broken works in place; write ReLU\(inplace=False\)"),
        ("twice", "The activation module 'relu' of Broken is called more than once; give each call its own ReLU"),
        ("branching", r"Broken cannot be traced in module 'block' \(.*control flow.*leaf_modules"),
        ("own", "Broken cannot be traced in its own forward"),
    ],
)
def test_a_network_that_breaks_a_rule_is_told_which(how: str, message: str) -> None:
    for action in (Network.sites, lambda network: network.split("relu")):
        with pytest.raises(ValueError, match=message) as caught:
            action(Broken(how))
        assert "\n" not in str(caught.value)


def test_leaf_modules_are_not_looked_into() -> None:
    network = WithLeaf("branching")
    assert network.sites() == ["inner.1"]
    check_every_cut(network, torch.randn(3, 2))


class TwoInputs(Network):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return x + y


# Wrapping


def small_resnet() -> nn.Module:
    return torchvision.models.resnet18(num_classes=3, width_per_group=64)


class Mixed(nn.Module):
    """Functional activations, repeated calls, and a module whose name is that of a second call."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.relu = nn.ReLU(inplace=True)
        self.add_module("relu-2", nn.Tanh())
        self.inner = Functional()

    def forward(self, x: Tensor) -> Tensor:
        x = self.get_submodule("relu-2")(self.relu(self.linear(x)))
        x = self.inner(self.relu(self.linear(x)))
        x = F.leaky_relu(torch.tanh(x) + 1, 0.3, inplace=True)
        return torch.tanh(F.relu(x, inplace=True).sigmoid_())


def test_repeated_and_functional_activations_have_names() -> None:
    network = Network.wrap(Mixed())
    assert network.sites() == [
        "module.relu",
        "module.relu-2",
        "module.relu-2-2",
        "module.inner.functional-relu",
        "module.functional-tanh",
        "module.functional-leaky_relu",
        "module.functional-relu",
        "module.functional-sigmoid",
        "module.functional-tanh-2",
    ]
    check_every_cut(network, torch.randn(4, 3))


def test_a_wrapped_module_is_owned_and_keeps_its_names() -> None:
    module = Mixed()
    network = Network.wrap(module)
    assert isinstance(network, WrappedNetwork)
    assert network.module is module
    assert module.relu.inplace is False
    assert list(network.state_dict()) == ["module.linear.weight", "module.linear.bias"]
    for call, message in (
        (lambda: network.fresh(0), "wrapped as a module and cannot have fresh weights; pass Network.wrap a callable"),
        (lambda: network.architecture, "cannot have its architecture recorded"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    again = pickle.loads(pickle.dumps(network))
    assert same(again, network)
    assert again.sites() == network.sites()


@pytest.mark.parametrize(
    ("factory", "class_path", "init_args"),
    [
        (
            functools.partial(torchvision.models.squeezenet1_1, num_classes=3),
            "torchvision.models.squeezenet.squeezenet1_1",
            {"num_classes": 3},
        ),
        (functools.partial(Mixed, width=2), "test_network_base.Mixed", {"width": 2}),
        (functools.partial(Mixed, 2), "test_network_base.Mixed", {"width": 2}),
        (Mixed, "test_network_base.Mixed", {}),
        (small_resnet, "test_network_base.small_resnet", {}),
    ],
)
def test_a_wrapped_factory_makes_fresh_networks_and_an_architecture(
    factory: Callable[[], nn.Module], class_path: str, init_args: dict[str, Any]
) -> None:
    network = Network.wrap(factory)
    assert network.architecture == {"class_path": class_path, "init_args": init_args}
    torch.manual_seed(5)
    expected = factory()
    state = torch.get_rng_state()
    assert same(network.fresh(5).module, expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert network.fresh(5).fresh(6).architecture == network.architecture
    again = build(json.loads(json.dumps(network.architecture)), allow=["test_network_base"])
    assert isinstance(again, WrappedNetwork)
    assert again.architecture == network.architecture
    assert same(again.fresh(5), network.fresh(5))
    copied = copy.deepcopy(network)
    assert copied.architecture == network.architecture
    assert same(copied, network)


NAMELESS = Network.wrap(lambda: Mixed(2))
OF_A_CLASS = Network.wrap(functools.partial(torchvision.models.resnet18, norm_layer=nn.BatchNorm2d))


@pytest.mark.parametrize(
    "refusal",
    [
        refused(lambda: Custom(names={1, 2}).architecture, says="Custom is a set, which cannot be written as JSON"),
        refused(lambda: Positional(2, 3).architecture, says="unnamed arguments (*sizes); pass them by name"),
        refused(Custom(names=nn.Linear(1, 1)).fresh, 0, says="was given a Linear, which a fresh network would share"),
        refused(TwoInputs().sites, says="TwoInputs.forward must take exactly one required input"),
        refused(LeNet5().split, "activaton2", says="Did you mean 'activation2'"),
        refused(lambda: NAMELESS.architecture, says="cannot be imported by that name"),
        refused(lambda: OF_A_CLASS.architecture, says=("argument norm_layer of ", " is a type, which cannot be")),
        *(
            refused(network, torch.zeros(given), says=f"images of shape {built_for} and cannot take {given}; use data")
            for network, given, built_for in (
                (MyrtleCNN(2, in_channels=1, image_size=28), [4, 1, 8, 8], "[N, 1, 28, 28]"),
                (MultiLayerPerceptron((4,), image_size=(8, 6)), [3, 1, 28, 28], "[N, 1, 8, 6]"),
                (CIFARResNet(width=1), [2, 1, 32, 32], "[N, 3, 32, 32]"),
            )
        ),
        *(
            refused(Network.wrap, bad, says="Only a module or a callable that builds one can be wrapped")
            for bad in (3, list)
        ),
        *(refused(Network.wrap, bad, says="LeNet5 is a Network already") for bad in (LeNet5(), LeNet5)),
    ],
)
def test_what_networks_refuse(refusal: Callable[[], None]) -> None:
    refusal()


def test_what_cannot_be_written_down_can_be_made_again() -> None:
    assert NAMELESS.fresh(0).module.linear.out_features == 2
    assert Positional(2, 3).fresh(0).linear.out_features == 3
    Custom(names={1, 2}).fresh(0)  # type: ignore[arg-type]


# jsonargparse


def test_errors_of_images_that_do_not_fit_have_a_cause_and_others_are_left_alone():
    with pytest.raises(ValueError, match="was built for") as caught:
        LeNet5()(torch.zeros(4, 1, 8, 8))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert CIFARResNet(width=1)(torch.zeros(2, 3, 16, 16)).shape == (2, 10)  # another size that runs
    network = MultiLayerPerceptron((4,), image_size=8)
    assert_refused(network, torch.zeros(3, 1, 8, 8, dtype=torch.float64), says="cannot take inputs in torch.float64")
    with pytest.raises(RuntimeError):  # it does not record what it was built for
        Custom()(torch.zeros(2, 5))


def test_a_wrapped_network_is_called_after_its_module():
    assert architecture_name(Network.wrap(nn.Linear(2, 2))) == "Linear"
    assert architecture_name(MultiLayerPerceptron(widths=[2])) == "MultiLayerPerceptron"
