import torch
from fits import epoch
from helpers import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sym.datamodules import TensorLoader

LAW = settings(max_examples=60, deadline=None, derandomize=True)

counts = st.integers(1, 40)
batches = st.integers(1, 9)
worlds = st.integers(1, 6)
seeds = st.integers(-3, 2**40)
epochs = st.integers(0, 1000)


def make(count, **options):
    images = torch.arange(count).to(torch.uint8).view(count, 1, 1, 1).repeat(1, 1, 3, 4)
    images[:, :, 1] += torch.arange(4).to(torch.uint8)
    return TensorLoader(images, torch.arange(count), mean=[0.5], std=[0.25], **options)


def labels(loader, number=0):
    return [label.tolist() for _, label in epoch(loader, number)]


@LAW
@given(counts, batches, worlds)
def test_evaluation_shards_partition_the_set(count, batch, world):
    parts = [labels(make(count, batch_size=batch, rank=r, world_size=world)) for r in range(world)]
    assert [n for part in parts for b in part for n in b] == list(range(count))
    sizes = [sum(map(len, part)) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@LAW
@given(counts, batches, worlds, seeds, epochs, st.booleans())
def test_training_shards_make_up_the_global_batches(count, batch, world, seed, number, drop):
    if drop and batch * world > count:
        return
    options = {"seeds": [seed, 3], "drop_last": drop, "shift": 1, "flip": True}
    whole = epoch(make(count, batch_size=batch * world, **options), number)
    parts = [epoch(make(count, batch_size=batch, rank=r, world_size=world, **options), number) for r in range(world)]
    for index, expected in enumerate(whole):
        found = zip(*(part[index] for part in parts if index < len(part)), strict=True)
        assert all(torch.equal(one, torch.cat(shares, 1)) for one, shares in zip(expected, found, strict=True))
    assert max(map(len, parts)) == len(whole)
    seen = [n for _, b in whole for n in b[0].tolist()]
    assert len(set(seen)) == len(seen) == (count // (batch * world) * batch * world if drop else count)


@LAW
@given(counts, batches, st.lists(seeds, min_size=1, max_size=4), epochs, st.integers(0, 2), st.booleans())
def test_members_do_not_depend_on_each_other(count, batch, members, number, shift, flip):
    options = {"batch_size": batch, "shift": shift, "flip": flip}
    together = epoch(make(count, seeds=members, **options), number)
    for row, seed in enumerate(members):
        alone = epoch(make(count, seeds=seed, **options), number)
        for (images, numbers), (images_alone, numbers_alone) in zip(together, alone, strict=True):
            assert torch.equal(images[row], images_alone)
            assert torch.equal(numbers[row], numbers_alone)


@LAW
@given(counts, batches, seeds, epochs, st.integers(0, 60))
def test_resuming_gives_the_rest(count, batch, seed, number, position):
    options = {"batch_size": batch, "seeds": [seed, seed + 1], "shift": 1}
    loader = make(count, **options)
    whole = epoch(loader, number)
    position %= len(whole)
    iterator = iter(loader)
    for _ in range(position):
        next(iterator)
    state = loader.state_dict()
    fresh = make(count, **options)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    iter(fresh)  # made and never used, as Lightning does
    fresh.set_epoch(number)
    assert_same(list(fresh), whole[position:])
    assert len(list(fresh)) == len(whole)  # only the first iteration is shortened
