"""ZooWeightsDataModule: both forms of each network, and a fixed split."""

import pytest
import torch
from fits import digits
from helpers import assert_refused, write_zoo

from lightning_sym.datamodules import ZooWeightsDataModule
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.zoo_weights import ZooDataset


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    networks = [MultiLayerPerceptron(widths=(3,), image_size=8).fresh(number) for number in range(20)]
    folder = tmp_path_factory.mktemp("weights") / "zoo"
    return write_zoo(folder, networks, digits(), [number / 20 for number in range(20)])


def made(zoo, **changes):
    return ZooWeightsDataModule(str(zoo), **{"batch_size": 4, **changes})


def test_inputs_are_both_forms_and_targets_the_metric(zoo):
    data = made(zoo)
    forms = [ZooDataset(zoo, form=form, flat=True) for form in ("raw", "canonical")]
    assert data.input_shape == (2, forms[0].space.size)
    assert (data.num_classes, data.regression) == (1, True)
    seen = []
    for split, count in (("train", 13), ("val", 2), ("test", 5)):
        inputs, targets = data.split_tensors(split)
        assert inputs.shape == (count, 2, forms[0].space.size)
        assert targets.shape == (count, 1)
        for pair, target in zip(inputs, targets, strict=True):
            number = round(20 * float(target))
            assert torch.equal(pair, torch.stack([own[number][0] for own in forms]))
            seen.append(number)
    assert sorted(seen) == list(range(20))


def test_the_split_is_that_of_its_seed(zoo):
    one, two, other = made(zoo), made(zoo), made(zoo, data_seed=1)
    assert one.identity() == two.identity()
    assert "zoo" not in one.identity()["arguments"]
    assert torch.equal(one.split_tensors("test")[1], other.split_tensors("test")[1])
    assert not torch.equal(one.split_tensors("val")[1], other.split_tensors("val")[1])
    assert len(made(zoo, max_samples=3, batch_size=2).split_tensors("train")[0]) == 3


def test_a_missing_metric_is_named_when_data_are_read(zoo):
    assert_refused(lambda: made(zoo, target="val/accuracy").setup(), says="it has: test/accuracy")


def test_sizes_that_the_command_line_asks_for_need_no_zoo(zoo, tmp_path):
    early, data = made(tmp_path / "later"), made(zoo)
    assert (early.in_channels, early.num_classes, early.image_size) == (2, 1, (1, 1))
    assert (data.in_channels, data.num_classes, data.image_size) == (2, 1, (data.input_shape[1], 1))
