import pytest
import torch
from fits import epoch
from helpers import assert_refused

from lightning_sym._random import generator
from lightning_sym.datamodules import TensorLoader

MEAN, STD = [0.4, 0.5], [0.2, 0.3]


def make(numbered, count=20, **settings):
    settings = {"batch_size": 6, "mean": MEAN, "std": STD} | settings
    return TensorLoader(*numbered(count), **settings)


def joined(loader, number=0):
    images, labels = zip(*epoch(loader, number), strict=True)
    axis = images[0].ndim - 4
    return torch.cat(images, dim=axis), torch.cat(labels, dim=axis)


def test_without_seeds_gives_the_images_in_order_and_normalised(numbered):
    source = numbered(20)
    images, labels = joined(make(numbered))
    mean, std = torch.tensor(MEAN).view(2, 1, 1), torch.tensor(STD).view(2, 1, 1)
    torch.testing.assert_close(images, (source.images / 255 - mean) / std, rtol=1e-5, atol=1e-5)  # float32
    assert images.dtype == torch.float32
    assert torch.equal(labels, source.labels)
    assert [len(batch) for batch, _ in make(numbered)] == [6, 6, 6, 2]
    assert [len(batch) for batch, _ in make(numbered, drop_last=True)] == [6, 6, 6]


def test_order_is_the_documented_permutation(numbered):
    source = numbered(20)
    loader = make(numbered, seeds=7)
    for number in (0, 3):
        order = torch.randperm(20, generator=generator("order", 7, number))
        images, labels = joined(loader, number)
        assert torch.equal(labels, source.labels[order])
        assert torch.equal(images, loader.normalize(source.images[order]))
    assert not torch.equal(joined(loader, 0)[1], joined(loader, 3)[1])


@pytest.mark.parametrize("fill", ["mean", 0, 200.4])
def test_shift_and_flip_are_those_of_a_slow_loop(numbered, fill):
    source, shift = numbered(20), 2
    loader = make(numbered, seeds=5, shift=shift, shift_fill=fill, flip=True)
    images, _ = joined(loader, 1)
    order = torch.randperm(20, generator=generator("order", 5, 1))
    draws = generator("augment", 5, 1)
    dy, dx = torch.randint(0, 2 * shift + 1, (2, 20), generator=draws)
    flips = torch.rand(20, generator=draws) < 0.5
    assert flips.any()
    assert not flips.all()
    fills = [102, 128] if fill == "mean" else [round(fill)] * 2  # 0.4 * 255, 0.5 * 255 rounded to even
    for position, index in enumerate(order):
        padded = torch.tensor(fills, dtype=torch.uint8).view(2, 1, 1).repeat(1, 9, 10)
        padded[:, shift:-shift, shift:-shift] = source.images[index]
        expected = padded[:, dy[position] : dy[position] + 5, dx[position] : dx[position] + 6]
        if flips[position]:
            expected = expected.flip(-1)
        assert torch.equal(images[position], loader.normalize(expected))


def test_shifts_are_uniform_over_both_axes():
    images = torch.zeros(20_000, 1, 7, 7, dtype=torch.uint8)
    images[:, :, 3, 3] = 255
    loader = TensorLoader(images, torch.zeros(20_000).long(), batch_size=500, mean=[0.0], std=[1.0], seeds=0, shift=2)
    mean = torch.cat([batch for batch, _ in loader]).mean(dim=(0, 1))
    expected = torch.zeros(7, 7)
    expected[1:6, 1:6] = 1 / 25
    assert (mean - expected).abs().max() < 0.006  # four standard errors of a frequency of 1/25 in 20,000 draws


def test_state_of_a_finished_or_another_epoch_starts_at_the_beginning(numbered):
    loader = make(numbered, seeds=1)
    epoch(loader, 0)
    fresh = make(numbered, seeds=1)
    fresh.load_state_dict(loader.state_dict())
    assert len(epoch(fresh, 0)) == 4
    loader.set_epoch(1)
    next(iter(loader))
    fresh.load_state_dict(loader.state_dict())
    assert len(epoch(fresh, 2)) == 4


def test_state_of_other_batches_is_refused_within_the_epoch_only(numbered):
    loader = make(numbered, seeds=1)
    next(iter(loader))
    other = make(numbered, seeds=1, batch_size=5)
    other.load_state_dict(loader.state_dict())
    assert_refused(list, other, says=("within epoch 0", "20 training inputs in global batches of 6", "of 5"))
    other.load_state_dict(loader.state_dict())
    other.set_epoch(1)
    assert len(list(other)) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_do_not_depend_on_the_device(numbered):
    settings = {"seeds": [1, 2], "shift": 2, "flip": True}
    images, labels = joined(make(numbered, **settings), 3)
    on_gpu = joined(make(numbered, device="cuda", **settings), 3)
    assert on_gpu[0].is_cuda
    assert torch.equal(on_gpu[0].cpu(), images)
    assert torch.equal(on_gpu[1].cpu(), labels)
