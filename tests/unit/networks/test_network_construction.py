from typing import Any

import pytest
import torch
from helpers import assert_refused
from torch import nn

from lightning_sym.networks import LeNet5, Network, WrappedNetwork, build

calls: list[str] = []


class Plain(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)


class Outer:
    class Inner(Network):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x


def make_plain(size: int) -> nn.Module:
    return Plain(size)


def make_lenet(**kwargs: Any):  # type: ignore[no-untyped-def]
    return LeNet5(**kwargs)


def make_nothing() -> None:
    calls.append("make_nothing")


def entry(path: object, **arguments: object) -> dict[str, Any]:
    return {"class_path": path, "init_args": arguments}


OUTSIDE_THE_ALLOW_LIST = [
    "os.system", "subprocess.Popen", "torch.hub.load", "torch.nn.Linear", "builtins.eval",
    "lightning_sym_evil.Network", "torchvision.models_evil.resnet18", "torchvision.datasets.FakeData",
    "torchvision.ops.MLP", "lightning_sym.networks.base.torch.hub.load", "lightning_sym.networks.base.sys.modules",
    "lightning_sym.networks.base.nn.Linear", "lightning_sym.networks.base.functools.partial",
    "lightning_sym.networks.construction.importlib.import_module", "lightning_sym.networks.base.Tensor",
    "lightning_sym.networks.MyrtleCNN.register", "lightning_sym.networks.MyrtleCNN.__class__",
    "lightning_sym.networks.MyrtleCNN.__init__.__globals__", "torchvision.models.resnet.torch.load",
    "torchvision.models.resnet.nn.Linear", "torchvision.models._api.load_state_dict_from_url",
    "torchvision.models.resnet.partial", "lightning_sym", "torchvision.models",
]  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE_THE_ALLOW_LIST)
def test_paths_outside_the_allow_list_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"(is not in the allow-list|no dotted name|there is no)") as caught:
        build(entry(path, name="x"))
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_refusal_names_path_list_and_way_out() -> None:
    which = "torch.hub.load, which is not in the allow-list (lightning_sym, torchvision.models); if you trust it, pass"
    assert_refused(build, entry("torch.hub.load"), says=(which, "in allow (--model.allow on the command line)."))


NO_NETWORKS = [
    "lightning_sym.networks.build", "lightning_sym.networks.make_activation", "lightning_sym.networks.Gaussian",
    "lightning_sym.networks.Network", "lightning_sym.networks.Network.wrap", "lightning_sym.networks.MyrtleCNN.fresh",
    "lightning_sym._random.seeded", "torchvision.models.list_models", "torchvision.models.get_weight",
    "torchvision.models.ResNet18_Weights", "torchvision.models._api.WeightsEnum.get_state_dict",
]  # fmt: skip


@pytest.mark.parametrize("path", NO_NETWORKS)
def test_what_builds_no_network_is_refused_before_it_is_called(path: str) -> None:
    assert_refused(lambda: build(entry(path)), says="which does not build a network")


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("lightning_sym.networks.LeNet5", "must be a dictionary"),
        (None, "must be a dictionary"),
        ({}, "class_path of an architecture is no dotted name: None"),
        ({"class_path": 3}, "no dotted name: 3"),
        (entry("LeNet5"), "no dotted name"),
        (entry("lightning_sym..LeNet5"), "no dotted name"),
        (entry("lightning_sym.networks.LeNet5; x"), "no dotted name"),
        (entry("lightning_sym.networks.LeNet5\n"), "no dotted name"),
        ({"class_path": "lightning_sym.networks.LeNet5", "init_args": [1]}, "init_args .* must be a dictionary"),
        ({"class_path": "lightning_sym.networks.LeNet5", "init_args": {1: 2}}, "init_args .* must be a dictionary"),
        ({"class_path": "lightning_sym.networks.LeNet5", "args": {}}, "has no entry 'args'"),
        (entry("lightning_sym.networks.LeNet6"), "there is no 'LeNet6' in .*networks. Did you mean 'LeNet5'"),
        (entry("lightning_sym.network.LeNet5"), "there is no 'network' in lightning_sym. Did you mean 'networks'"),
        (entry("lightning_sym.networks.LeNet5", classes=3), "do not fit .*unexpected keyword argument 'classes'"),
        (entry("lightning_sym.networks.TorchvisionNetwork"), "do not fit .*missing .*'model'"),
        (entry("lightning_sym.networks.LeNet5", image_size=8), "LeNet5 takes images of 28x28 or 32x32"),
        (entry("torchvision.models.resnet18", wings=2), "do not fit torchvision.models.resnet18"),
    ],
)
def test_malformed_architectures_get_a_sentence(architecture: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(architecture)


def test_arguments_may_be_left_out() -> None:
    assert isinstance(build({"class_path": "lightning_sym.networks.LeNet5"}), LeNet5)
    assert isinstance(build(entry("lightning_sym.networks.lenet.LeNet5", num_classes=2)), LeNet5)


def test_torchvision_builders_are_wrapped_under_either_name() -> None:
    for path in ("torchvision.models.squeezenet1_1", "torchvision.models.squeezenet.squeezenet1_1"):
        network = build(entry(path, num_classes=2))
        assert isinstance(network, WrappedNetwork)
        assert network.architecture == entry("torchvision.models.squeezenet.squeezenet1_1", num_classes=2)


def test_other_packages_must_be_named() -> None:
    path = f"{__name__}.make_plain"
    assert_refused(lambda: build(entry(path, size=2)), says="allow-list")
    assert_refused(lambda: build(entry(path, size=2), allow=["test_network"]), says="allow-list")
    network = build(entry(path, size=2), allow=[__name__])
    assert isinstance(network, WrappedNetwork)
    assert isinstance(network.module, Plain)
    assert isinstance(build(entry(f"{__name__}.Plain", size=2), allow=[__name__]), WrappedNetwork)
    assert isinstance(build(entry(f"{__name__}.Outer.Inner"), allow=[__name__]), Outer.Inner)
    assert isinstance(build(entry(f"{__name__}.make_lenet", num_classes=2), allow=[__name__]), LeNet5)
    assert_refused(lambda: build(entry(f"{__name__}.make_nothing"), allow=[__name__]), says="which built a NoneType,")
    assert calls == ["make_nothing"]
    assert_refused(lambda: build(entry(f"{__name__}.torch.hub.load"), allow=[__name__]), says="allow-list")
    with pytest.raises(ValueError, match="no_such_package cannot be imported"):
        build(entry("no_such_package.Net"), allow=["no_such_package"])
    assert_refused(lambda: build(entry(path, size=2), allow=__name__), says="allow must be a list of package names,")


class Unnamed(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_network_before_a_plain_module_hides_its_forward() -> None:
    with pytest.raises(TypeError, match=r"forward of Unnamed is hidden .* expected class Hidden\(Unnamed, Network\)"):

        class Hidden(Network, Unnamed):
            pass


def test_plain_module_before_network_is_a_network_that_remembers_its_arguments() -> None:
    class Both(Unnamed, Network):
        pass

    assert Both(5)(torch.ones(2, 5)).shape == (2, 3)
    assert Both(5).architecture["init_args"] == {"width": 5}


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("torchvision.models.squeezenet1_1", {"weights": "DEFAULT"}),
        ("torchvision.models.squeezenet1_1", {"weights": "SqueezeNet1_1_Weights.IMAGENET1K_V1"}),
        ("torchvision.models.squeezenet1_1", {"pretrained": True}),
        ("torchvision.models.get_model", {"name": "squeezenet1_1", "weights": "DEFAULT"}),
        ("torchvision.models.get_model", {"name": "lraspp_mobilenet_v3_large"}),
        ("torchvision.models.segmentation.lraspp_mobilenet_v3_large", {}),
        ("torchvision.models.segmentation.lraspp_mobilenet_v3_large", {"weights_backbone": "DEFAULT"}),
    ],
)
def test_trained_weights_are_never_fetched(path, arguments, monkeypatch):
    def fetch(*args, **kwargs):
        raise AssertionError("the network was reached for")

    for module in ("torch.hub", "torchvision.models._api", "torchvision._internally_replaced_utils"):
        monkeypatch.setattr(f"{module}.load_state_dict_from_url", fetch)
    network = build(entry(path, **arguments))
    build(network.architecture)  # what is recorded does not, either
    network.fresh(1)


def test_trained_weights_of_timm_are_never_fetched(monkeypatch):
    timm = pytest.importorskip("timm")
    monkeypatch.setattr("timm.models._builder.load_pretrained", lambda *args, **kwargs: pytest.fail("fetched"))
    network = build(entry("timm.create_model", model_name="test_vit", pretrained=True), allow=["timm"])
    assert type(network.module) is type(timm.create_model("test_vit"))
    build(entry("timm.models.vision_transformer.test_vit", pretrained=True, num_classes=3), allow=["timm"])
