"""GaussianInputsDataModule: which inputs there are, whoever asks for them and however they are shared out."""

import json

import pytest
import torch

from lightning_sym.datamodules import GaussianInputsDataModule
from lightning_sym.datamodules.gaussian import GaussianLoader

SMALL = {"shape": [3], "samples": 600, "batch_size": 50, "val_samples": 70, "test_samples": 70, "eval_batch_size": 32}


def inputs(**settings):
    return GaussianInputsDataModule(**{**SMALL, **settings})


def together(loader, epoch=0):
    loader.set_epoch(epoch)
    return torch.cat([batch for (batch,) in loader])


def loaders(world_size, batch_size, *, samples=600, **settings):
    return [
        GaussianLoader([3], samples, batch_size, ("test", 0), rank=rank, world_size=world_size, **settings)
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("shape", [[5], [2, 3, 4], [1, 1, 1], (1, 28, 28)])
def test_shapes(shape):
    data = inputs(shape=shape)
    (batch,) = next(iter(data.train_dataloader()))
    assert batch.shape == (50, *shape)
    assert batch.dtype == torch.float32
    assert data.input_shape == tuple(shape)
    assert data.in_channels == shape[0]
    height, width = data.image_size
    assert data.in_channels * height * width == batch[0].numel()


def test_inputs_are_standard_normal_and_the_splits_differ():
    data = inputs(samples=20_000, val_samples=20_000, test_samples=20_000)
    splits = [
        together(loader) for loader in (data.curvature_dataloader(), data.val_dataloader(), data.test_dataloader())
    ]
    for split in splits:
        assert split.mean().abs() < 0.02  # 5 standard errors
        assert abs(split.var() - 1) < 0.03
        assert torch.corrcoef(split.T).fill_diagonal_(0).abs().max() < 0.04
        assert len(torch.unique(split, dim=0)) == 20_000
    assert not torch.equal(splits[0], splits[1])
    assert not torch.equal(splits[1], splits[2])
    assert torch.equal(together(data.predict_dataloader()), splits[2])


def test_seeds_and_nothing_else_decide():
    torch.manual_seed(1)
    first = together(inputs().train_dataloader())
    torch.manual_seed(2)
    assert torch.equal(together(inputs().train_dataloader()), first)
    assert not torch.equal(together(inputs(data_seed=1).train_dataloader()), first)


@pytest.mark.parametrize("batch_size", [1, 7, 255, 256, 257, 600])
def test_the_batch_size_does_not_change_inputs(batch_size):
    """Inputs are drawn in blocks of 256; batches lie across their borders."""
    whole = together(loaders(1, 600)[0])
    for fresh in (False, True):
        found = together(loaders(1, batch_size, fresh=fresh)[0], epoch=2)
        expected = together(loaders(1, 600, fresh=fresh)[0], epoch=2)
        assert torch.equal(found, expected)
        assert torch.equal(found, whole) == (not fresh)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_processes_share_the_inputs_of_one(world_size, fresh):
    whole = together(loaders(1, 600, fresh=fresh)[0], epoch=1)
    parts = [together(loader, epoch=1) for loader in loaders(world_size, 32, fresh=fresh)]
    assert torch.equal(torch.cat(parts), whole)
    settings = {"fresh": fresh, "interleaved": True, "drop_last": True}
    batches = []
    for loader in loaders(world_size, 10, **settings):
        loader.set_epoch(1)
        batches.append([batch for (batch,) in loader])
    steps = 600 // (10 * world_size)
    assert {len(found) for found in batches} == {steps}
    interleaved = torch.cat([found[step] for step in range(steps) for found in batches])
    assert torch.equal(interleaved, whole[: len(interleaved)])


def test_incomplete_batches():
    assert len(loaders(1, 64)[0]) == 10
    assert len(loaders(1, 64, drop_last=True)[0]) == 9
    assert [len(batch) for (batch,) in loaders(1, 256)[0]] == [256, 256, 88]
    data = inputs(batch_size=64)
    assert sum(len(batch) for (batch,) in data.train_dataloader()) == 9 * 64
    assert len(together(data.curvature_dataloader())) == 600
    assert torch.equal(together(data.train_dataloader()), together(data.curvature_dataloader())[: 9 * 64])


def test_fresh_inputs_differ_by_epoch_and_only_in_training():
    data = inputs(fresh=True)
    epochs = [together(data.train_dataloader(), epoch) for epoch in range(3)]
    assert not torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[1], epochs[2])
    assert torch.equal(together(data.train_dataloader(), 1), epochs[1])
    for name in ("val_dataloader", "test_dataloader", "curvature_dataloader"):
        one, two = (together(getattr(module, name)(), epoch) for module, epoch in ((data, 3), (inputs(), 0)))
        assert torch.equal(one, two)


def test_identity_is_plain_and_complete():
    one, two, three = inputs(shape=(3,)), inputs(shape=[3]), inputs(data_seed=1)
    text = json.dumps(one.identity(), sort_keys=True)
    assert text == json.dumps(two.identity(), sort_keys=True)
    assert text != json.dumps(three.identity(), sort_keys=True)
    assert one.identity()["splits"] == {"train": 600, "val": 70, "test": 70}
    assert one.identity()["arguments"]["data_seed"] == 0


def test_no_validation():
    assert inputs(val_samples=0).val_dataloader() == []
