import json
import subprocess
import sys

import pytest
import torch
from fits import fit

from lightning_sym.datamodules import DigitsDataModule, Rotated, TensorLoader
from lightning_sym.datamodules.base import channel_statistics


def numbers(data, split):
    return data.split_tensors(split).images[:, 0, 0, 0].tolist()


def test_splits_are_disjoint_complete_and_fixed_by_the_seed(tiny):
    data = tiny(batch_size=4, val_fraction=0.25)
    train, val = numbers(data, "train"), numbers(data, "val")
    assert (len(train), len(val)) == (30, 10)
    assert sorted(train + val) == list(range(40))
    assert numbers(data, "test") == list(range(12))
    again, other = tiny(batch_size=8, val_fraction=0.25), tiny(batch_size=4, val_fraction=0.25, data_seed=1)
    assert numbers(again, "train") == train
    assert numbers(other, "train") != train
    assert numbers(other, "test") == numbers(data, "test")


def test_smaller_training_sets_are_parts_of_larger_ones(tiny):
    whole, val = numbers(tiny(batch_size=2), "train"), numbers(tiny(batch_size=2), "val")
    assert numbers(tiny(batch_size=2, train_fraction=0.5), "train") == whole[:18]
    assert numbers(tiny(batch_size=2, train_fraction=0.5), "val") == val
    few = tiny(batch_size=2, max_samples=3)
    assert numbers(few, "train") == whole[:3]
    assert numbers(few, "val") == val[:3]
    assert numbers(few, "test") == [0, 1, 2]


def test_transforms_see_the_whole_source(tiny):
    """What happens to an image does not depend on how many of them are kept."""
    whole, few = (tiny(batch_size=1, transforms=[Rotated()], max_samples=limit) for limit in (None, 5))
    for split in ("train", "val", "test"):
        kept = few.split_tensors(split).images
        assert torch.equal(whole.split_tensors(split).images[: len(kept)], kept)


def test_normalisation_uses_the_statistics_of_the_training_images(tiny):
    data = tiny(batch_size=4, train_fraction=0.5)
    images = data.split_tensors("train").images.double() / 255
    torch.testing.assert_close(torch.tensor(data.mean).double(), images.mean((0, 2, 3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.tensor(data.std).double(), images.std((0, 2, 3), correction=0), rtol=1e-6, atol=0)
    batch = torch.cat([batch for batch, _ in data.curvature_dataloader()])
    assert batch.mean((0, 2, 3)).abs().max() < 1e-5
    assert (batch.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5
    assert torch.equal(batch, data.normalize(data.split_tensors("train").images))


def test_given_statistics_are_used(tiny):
    data = tiny(batch_size=4, mean=[0.5, 0.25], std=[0.5, 0.125])
    assert (data.mean, data.std) == ([0.5, 0.25], [0.5, 0.125])
    images = data.split_tensors("val").images
    expected = (images / 255 - torch.tensor([0.5, 0.25]).view(2, 1, 1)) / torch.tensor([0.5, 0.125]).view(2, 1, 1)
    torch.testing.assert_close(next(iter(data.val_dataloader()))[0], expected, rtol=1e-5, atol=1e-5)
    assert tiny(mean=[0.5, 0.25]).std == tiny().std


def test_channel_statistics_are_exact():
    images = torch.tensor([0, 255, 255, 255], dtype=torch.uint8).view(4, 1, 1, 1)
    mean, std = channel_statistics(images)
    assert mean == [0.75]
    assert std == pytest.approx([0.1875**0.5], rel=1e-15)
    assert channel_statistics(torch.full((3, 1, 5, 5), 77, dtype=torch.uint8))[1] == [0.0]


def test_loaders(tiny):
    data = tiny(batch_size=7, eval_batch_size=5, shift=1, flip=True)
    train = list(data.train_dataloader())
    assert [tuple(images.shape) for images, _ in train] == [(7, 2, 5, 6)] * 5  # 36 images, one left over
    for loader, count in (
        (data.val_dataloader(), 4),
        (data.test_dataloader(), 12),
        (data.predict_dataloader(), 12),
        (data.curvature_dataloader(), 36),
    ):
        assert isinstance(loader, TensorLoader)
        labels = torch.cat([labels for _, labels in loader])
        assert len(labels) == count
        assert torch.equal(labels, torch.cat([labels for _, labels in loader]))


def test_without_validation(tiny, recorder):
    data = tiny(batch_size=10, val_fraction=0)
    assert data.val_dataloader() == []
    assert sorted(numbers(data, "train")) == list(range(40))
    task = recorder(data)
    with pytest.warns(UserWarning, match=r"is zero. Please make sure this was your intention"):
        fit(task, data)
    assert len(task.seen) == 4
    assert task.evaluated == []


def test_with_a_trainer(tiny, recorder):
    data = tiny(batch_size=9)
    task = recorder(data)
    run = fit(task, data, max_epochs=2, num_sanity_val_steps=0)
    by_epoch = [[n for e, batch in task.seen if e == epoch for n in batch] for epoch in (0, 1)]
    assert [sorted(part) for part in by_epoch] == [sorted(numbers(data, "train"))] * 2
    assert by_epoch[0] != by_epoch[1]
    assert task.evaluated == numbers(data, "val") * 2
    task.evaluated = []
    run.test(task, data)
    assert task.evaluated == list(range(12))
    predictions = run.predict(task, data)
    assert torch.equal(torch.cat(predictions), data.split_tensors("test").labels)
    assert data.loads == 1


def test_overfit_batches_repeats_the_same_batches(tiny, recorder):
    data = tiny(batch_size=9)
    task = recorder(data)
    fit(task, data, max_epochs=2, overfit_batches=2, num_sanity_val_steps=0)
    assert [batch for epoch, batch in task.seen if epoch == 0] == [batch for epoch, batch in task.seen if epoch == 1]


def test_identity_is_plain_stable_and_about_the_data(tiny):
    data = tiny(batch_size=4, transforms=[Rotated(90)])
    identity = data.identity()
    assert json.loads(json.dumps(identity)) == identity
    assert identity["class_path"].endswith("TinyDataModule")
    assert identity["splits"] == {"train": 36, "val": 4, "test": 12}
    assert identity["arguments"]["transforms"] == [Rotated(90).config()]
    assert (identity["mean"], identity["std"]) == (data.mean, data.std)
    assert len(identity["fingerprint"]) == 64
    assert tiny(batch_size=8, shift=1, transforms=[Rotated(90)]).identity()["fingerprint"] == identity["fingerprint"]
    for other in (tiny(), tiny(data_seed=1), tiny(max_samples=35), tiny(val_fraction=0.2)):
        assert other.identity()["fingerprint"] != identity["fingerprint"]


@pytest.mark.long
def test_identity_is_the_same_in_another_process():
    program = (
        "import json; from lightning_sym.datamodules import DigitsDataModule, Rotated;"
        "print(json.dumps(DigitsDataModule(transforms=[Rotated()]).identity()))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert json.loads(output) == DigitsDataModule(transforms=[Rotated()]).identity()
