"""ZooDataset: weights by name and as vectors, canonical forms, random points of orbits, and targets."""

import pytest
import torch
from fits import digits
from helpers import assert_refused, assert_same, write_zoo
from torch.utils.data import DataLoader

from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN
from lightning_sym.symmetry import canonicalize, trace_symmetry
from lightning_sym.zoo import ModelZoo, write_member
from lightning_sym.zoo_weights import WeightSpace, ZooDataset

ACCURACIES = [0.25, 0.75, 0.5]


def network():
    return MultiLayerPerceptron(widths=(7, 5), image_size=8).double()


@pytest.fixture
def zoo(tmp_path):
    return write_zoo(tmp_path / "zoo", [network().fresh(number).double() for number in range(3)], digits(), ACCURACIES)


def outputs(weights, make=network):
    one = make()
    one.load_state_dict({**one.state_dict(), **weights})
    inputs = torch.rand(9, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return one.eval()(inputs)


def test_items_are_the_weights_and_the_metric(zoo):
    data, flat = ZooDataset(zoo, "test/accuracy"), ZooDataset(ModelZoo.open(zoo), "test/accuracy", flat=True)
    assert len(data) == len(flat) == 3
    assert data.targets.tolist() == ACCURACIES
    for number in range(3):
        weights, accuracy = data[number]
        assert_same(weights, ModelZoo.open(zoo).state(number))
        vector, _ = flat[number]
        assert vector.shape == (flat.space.size,) == (64 * 7 + 7 + 7 * 5 + 5 + 5 * 10 + 10,)
        assert_same(flat.space.tensors(vector), weights)
        assert float(accuracy) == ACCURACIES[number]


def test_a_random_point_of_the_orbit_has_the_function_of_the_network(zoo):
    raw, data = ZooDataset(zoo), ZooDataset(zoo, augmentation="orbit")
    for number in range(3):
        weights, moved = raw[number][0], data[number][0]
        torch.testing.assert_close(outputs(moved), outputs(weights), rtol=0, atol=1e-12)
        assert all(not torch.allclose(moved[name], weights[name]) for name in weights if name != "classifier.bias")
    weights, permuted = raw[0][0], ZooDataset(zoo, augmentation="orbit", scale=0.0)[0][0]
    for name, own in weights.items():
        assert torch.equal(permuted[name].flatten().sort().values, own.flatten().sort().values)
    assert not torch.equal(permuted["linear1.weight"], weights["linear1.weight"])


def test_running_statistics_move_with_the_weights(tmp_path):
    def make():
        return MyrtleCNN(2, in_channels=1, image_size=8).double()

    networks = [make().fresh(number).double() for number in range(2)]
    for one in networks:
        for name, buffer in one.named_buffers():
            if "running" in name:
                buffer.uniform_(0.5, 2.0)
    zoo = write_zoo(tmp_path / "zoo", networks, digits(), ACCURACIES)
    raw, data = ZooDataset(zoo), ZooDataset(zoo, augmentation="orbit")
    moved = data[1][0]
    assert any("running" in name for name in moved)
    assert not any("num_batches" in name for name in moved)
    torch.testing.assert_close(outputs(moved, make), outputs(raw[1][0], make), rtol=0, atol=1e-12)


def test_random_points_depend_on_seed_epoch_and_member_only(zoo):
    def epoch(number, *, seed=0, **options):
        data = ZooDataset(zoo, augmentation="orbit", flat=True, seed=seed)
        data.set_epoch(number)
        return torch.cat([vectors for vectors, _ in DataLoader(data, **options)])

    first = epoch(0)
    assert torch.equal(epoch(0), first)
    assert torch.equal(epoch(0, batch_size=2, num_workers=2), first)
    assert not (epoch(1) == first).all(1).any()
    assert not (epoch(0, seed=1) == first).all(1).any()


def test_persistent_workers_see_the_epoch(zoo):
    data = ZooDataset(zoo, augmentation="orbit", flat=True)
    loader = DataLoader(data, num_workers=1, persistent_workers=True)
    epochs = []
    for epoch in (0, 1, 0):
        data.set_epoch(epoch)
        epochs.append(torch.cat([vectors for vectors, _ in loader]))
    assert torch.equal(epochs[0], epochs[2])
    assert not (epochs[0] == epochs[1]).all(1).any()


def test_canonical_items_are_equal_for_two_points_of_an_orbit(zoo, tmp_path):
    networks = [ModelZoo.open(zoo).load(number) for number in range(3)]
    symmetry = trace_symmetry(networks[0], torch.rand(2, 1, 8, 8, dtype=torch.float64))
    moved = [symmetry.act(symmetry.sample(torch.Generator().manual_seed(n)), one) for n, one in enumerate(networks)]
    other = write_zoo(tmp_path / "moved", moved, digits(), ACCURACIES)
    one, two = (ZooDataset(folder, form="canonical") for folder in (zoo, other))
    raw = ZooDataset(zoo)
    for number in range(3):
        torch.testing.assert_close(one[number][0], two[number][0], rtol=0, atol=1e-12)
        torch.testing.assert_close(outputs(one[number][0]), outputs(raw[number][0]), rtol=0, atol=1e-12)
        assert_same(one[number][0], canonicalize(symmetry, networks[number]).network.state_dict())
        assert not torch.allclose(one[number][0]["linear1.weight"], raw[number][0]["linear1.weight"])


def test_axes_name_the_permutations_and_leave_no_tensor_out(zoo):
    axes = ZooDataset(zoo).space.axes
    assert axes.keys() == ModelZoo.open(zoo).state(0).keys()
    first, second = axes["linear1.bias"][0], axes["linear2.bias"][0]
    assert axes["linear1.weight"][0] == axes["linear2.weight"][1] == first
    assert axes["linear2.weight"][0] == axes["classifier.weight"][1] == second
    others = [axes["linear1.weight"][1], axes["classifier.weight"][0], axes["classifier.bias"][0]]
    assert len({first, second, *others}) == 5


def test_what_the_zoo_lacks_is_named(zoo, tmp_path):
    says = "Member 0 has no metric test/r2; it has: test/accuracy."
    assert_refused(ZooDataset, zoo, "test/r2", says=says)
    assert_refused(ZooDataset, zoo, "accuracy", says="has no metric accuracy; it has: test/accuracy")
    assert_refused(ZooDataset, zoo, form="sorted", says="form must be")
    assert_refused(ZooDataset, zoo, seed=-1, says="seed must be")
    assert_refused(ZooDataset, zoo, augmentation="noise", says="augmentation must be")
    assert_refused(ZooDataset, zoo, form="canonical", augmentation="orbit", says='set form to "raw"')
    missing = tmp_path / "nowhere"
    assert_refused(ZooDataset, missing, says="No zoo at", error=FileNotFoundError)
    write_member(tmp_path / "bare", 0, network().state_dict(), architecture=network().architecture)
    (tmp_path / "run").mkdir()
    (tmp_path / "bare").rename(tmp_path / "run" / "zoo")
    assert_refused(ZooDataset, tmp_path / "run", says="Its folder zoo has some; open", error=FileNotFoundError)
    bare = ModelZoo.open(tmp_path / "run" / "zoo")
    assert_refused(lambda: WeightSpace(bare).symmetry, says="does not record the shape")
    assert WeightSpace(bare, torch.rand(2, 1, 8, 8, dtype=torch.float64)).symmetry.units == 12
