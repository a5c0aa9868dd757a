"""A random element of the group in front of one activation is undone exactly by what is behind it, and only there."""

import pytest
import torch
from helpers import assert_refused

from lightning_sym.networks import CIFARResNet, LeNet5, MultiLayerPerceptron, MyrtleCNN
from lightning_sym.stitching import CutNetwork, FixedMap, PlantedStitches, StitchedNetwork
from lightning_sym.symmetry import INTERTWINER_GROUPS
from lightning_sym.tasks.rotation import element_at, rotate_by_group

# Float64 rounding, through scales of up to a factor of 20 or so.
EXACT = 1e-10
# Networks, image shapes, and what the group has: scales, signs, or matrices.
CASES = {
    "perceptron": (lambda: MultiLayerPerceptron([7, 6, 5], image_size=4), (1, 4, 4), "scales"),
    "perceptron_tanh": (lambda: MultiLayerPerceptron([7, 6], image_size=4, activation="tanh"), (1, 4, 4), "signs"),
    "perceptron_square": (lambda: MultiLayerPerceptron([7, 6], image_size=4, activation="polynomial(2)"), (1, 4, 4),
        "scales and signs"),
    "perceptron_linear": (lambda: MultiLayerPerceptron([7, 6], image_size=4, activation="identity"), (1, 4, 4), "all"),
    "lenet": (lambda: LeNet5(), (1, 28, 28), "scales"),
    "lenet_tanh": (lambda: LeNet5(activation="tanh"), (1, 28, 28), ""),  # max pooling takes the signs
    "lenet_gelu": (lambda: LeNet5(activation="gelu"), (1, 28, 28), ""),
    "myrtle": (lambda: MyrtleCNN(3, image_size=8), (3, 8, 8), "scales"),
    "myrtle_no_bn": (lambda: MyrtleCNN(3, image_size=8, batch_norm=False), (3, 8, 8), "scales"),
    "myrtle_tanh": (lambda: MyrtleCNN(3, image_size=8, activation="tanh"), (3, 8, 8), ""),
    "resnet": (lambda: CIFARResNet(width=2, shortcut="B"), (3, 8, 8), "scales"),
}  # fmt: skip
PLAIN = [name for name in CASES if name != "resnet"]


@pytest.fixture(scope="module", params=CASES)
def case(request):
    make, shape, has = CASES[request.param]
    network = make().fresh(0).double()
    torch.manual_seed(0)
    for name, buffer in network.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2.0)
    images = torch.randn(20, *shape, dtype=torch.float64)
    return request.param, CutNetwork(network, example=images, before=True), images, has


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def is_identity(matrix):
    return torch.equal(matrix, torch.eye(len(matrix), dtype=matrix.dtype))


def some(sites):
    return sites if len(sites) < 5 else sites[:4] + sites[-1:]


@torch.no_grad()
@pytest.mark.long
def test_the_undone_network_has_penalty_zero_at_every_site(case):
    _, source, images, has = case
    expected = source.network(images)
    for site in some(source.sites):
        matrix, undone = rotate_by_group(source, site, images, generator())
        assert not is_identity(matrix)
        settings = {"family": lambda port, matrix=matrix: FixedMap(port, matrix), "ports": "branch"}
        found = StitchedNetwork(source, undone, site, batch_norm="frozen", **settings)(images)
        assert (found - expected).abs().max() < EXACT * expected.abs().max(), site
        assert torch.equal(found.argmax(1), expected.argmax(1))
        wrong = StitchedNetwork(source, source, site, batch_norm="frozen", **settings)(images)
        assert (wrong - expected).abs().max() > 1e-4 * expected.abs().max()  # it was there
        if has == "all":
            assert (matrix != 0).all()
        else:
            assert torch.equal((matrix != 0).sum(0), torch.ones(len(matrix), dtype=torch.int64))
            # Where max pooling is not in between, tanh has signs.
            assert bool((matrix < 0).any()) == (
                "signs" in has or (has == "" and source.crossings(site)[0].group == INTERTWINER_GROUPS["tanh"])
            )
            sizes = matrix.abs().sum(1)
            assert bool((sizes - 1).abs().max() > 1e-3) == ("scales" in has)


@torch.no_grad()
@pytest.mark.few(6, "perceptron_square", "perceptron_linear")
def test_the_element_acts_at_one_site_only(case):
    name, source, _, _ = case
    old = dict(source.network.named_parameters())
    layers = list(dict.fromkeys(key.split(".")[0] for key in old if not key.startswith("norm")))
    for site in some(source.sites):
        planted = PlantedStitches(source, element_at(source, site, generator()))
        matrix, *others = planted.matrices(site)
        assert not is_identity(matrix)
        assert all(map(is_identity, others))
        if name in PLAIN:
            for other in source.sites:
                assert is_identity(planted.matrices(other)[0]) == (other != site), (site, other)
            # What changes are the layer in front of the activation, its batch norm, and the next layer.
            place = source.sites.index(site)
            new = dict(planted.network.named_parameters())
            changed = {key.split(".")[0] for key in new if not torch.equal(new[key], old[key])}
            assert changed - {f"norm{place + 1}"} <= set(layers[place : place + 2]), site


def test_scales_have_mean_one_and_the_given_spread():
    images = torch.rand(2, 1, 2, 2, dtype=torch.float64)
    source = CutNetwork(MultiLayerPerceptron([500], image_size=2).double(), example=images, before=True)
    matrix, _ = rotate_by_group(source, "activation1", images, generator())
    logs = matrix.sum(1).log()
    # Of 500 draws the mean has a standard error of 0.045, the standard deviation of 0.032.
    assert float(logs.mean()) == pytest.approx(-0.5, abs=0.15)
    assert float(logs.std()) == pytest.approx(1.0, abs=0.1)


def test_what_cannot_be_done_is_said(case):
    _, source, _, _ = case
    assert_refused(element_at, source, "nowhere", says="The network is not cut at 'nowhere', only at ")
    assert_refused(element_at, source, source.sites[0], scale=-1)


class Skipping(MultiLayerPerceptron):
    """What stands in front of the activation goes round it, too."""

    def forward(self, x):
        x = self.linear1(x.flatten(1))
        return self.classifier(self.activation1(x) + x)


class Stream(MultiLayerPerceptron):
    """What goes round the second activation is another value of the same units."""

    def forward(self, x):
        x = self.activation1(self.linear1(x.flatten(1)))
        return self.classifier(self.activation2(x + self.linear2(x)) + x)


class Early(MultiLayerPerceptron):
    """An activation of the input."""

    def forward(self, x):
        return self.classifier(self.linear1(self.activation1(x.flatten(1))))


def cut_of(kind):
    images = torch.rand(2, 1, 2, 2, dtype=torch.float64)
    network = kind([6] * (1 + (kind is Stream)), image_size=2, activation="relu").double()
    return CutNetwork(network, example=images, before=True), images


def test_a_value_that_is_read_twice_is_rotated_for_both():
    source, images = cut_of(Skipping)
    assert len(source.crossings("activation1")) == 1
    rotate_by_group(source, "activation1", images, generator())  # which checks the function


def test_sites_that_cannot_be_rotated_are_refused():
    source, images = cut_of(Stream)
    assert_refused(lambda: rotate_by_group(source, "activation2", images, generator()), says="changes the values")
    source, images = cut_of(Early)
    assert_refused(lambda: rotate_by_group(source, "activation1", images, generator()), says="The symmetry group does")
