"""What the data refuse: one line for each call, with the words that name the argument."""

import pytest
import torch
from helpers import assert_refused, refused

from lightning_sym.datamodules import (
    BrodenDataModule,
    CIFAR100DataModule,
    ConceptsDataModule,
    DigitsDataModule,
    GaussianInputsDataModule,
    ImageDataModule,
    ImageTransform,
    LabelledImages,
    Quadrant,
    Resized,
    Rotated,
    TensorDataModule,
    TensorLoader,
    Translated,
)

NAN = float("nan")


PIXELS, CLASSES = torch.randint(256, (60, 1, 8, 8), dtype=torch.uint8), torch.arange(60) % 2


def loading(base, returned):
    """Return a datamodule that reads its data by itself."""
    members = {"source_shape": (1, 8, 8), "source_classes": 2, "load": lambda self: returned}
    return type("Mine", (base,), members)(batch_size=4)


@pytest.mark.parametrize("returned", [None, (PIXELS, CLASSES), ((PIXELS, CLASSES),) * 4, [PIXELS] * 2, {"x": PIXELS}])
def test_data_that_a_subclass_loads_in_another_form_are_refused(returned):
    assert_refused(loading(ImageDataModule, returned).setup, says="Mine.load must return training and test data, each")
    assert_refused(loading(TensorDataModule, returned).setup, says="Mine.load must return training, validation and")


def test_images_that_a_subclass_loads_may_be_pairs_and_arrays():
    pairs = (PIXELS, CLASSES), (PIXELS[:20], CLASSES[:20])
    found = loading(ImageDataModule, [[one.numpy() for one in pair] for pair in pairs])
    expected = loading(ImageDataModule, tuple(LabelledImages(*pair) for pair in pairs))
    assert found.identity()["fingerprint"] == expected.identity()["fingerprint"]
    assert loading(TensorDataModule, (pairs[0], None, None)).num_classes == 2


def loader(images=(20, 2, 5, 6), labels=None, dtype=torch.uint8, **settings):
    numbers = torch.arange(images[0]) if labels is None else labels
    settings = {"batch_size": 6, "mean": [0.4, 0.5], "std": [0.2, 0.3], **settings}
    return TensorLoader(torch.zeros(images, dtype=dtype), numbers, **settings)


@pytest.mark.parametrize(
    "refusal",
    [
        *(refused(DigitsDataModule, **{name: 0}) for name in ("batch_size", "eval_batch_size", "max_samples")),
        *(refused(DigitsDataModule, val_fraction=bad) for bad in (1.0, -0.1, NAN)),
        *(refused(DigitsDataModule, train_fraction=bad) for bad in (0, 1.5)),
        refused(DigitsDataModule, val_fraction=1e-4, says="0.0001 of 1438 training images leaves the validation split"),
        refused(DigitsDataModule, val_fraction=0.9999, says="leave the training split empty"),
        refused(DigitsDataModule, train_fraction=1e-5, says="leave the training split empty"),
        refused(DigitsDataModule, shift=8, says="smaller than the image (8x8 pixels), got 8"),
        *(refused(DigitsDataModule, **bad) for bad in ({"shift": -1}, {"shift_fill": "black"})),
        refused(DigitsDataModule, std=[0.0], says="std must be in (0, 1]"),
        refused(DigitsDataModule, mean=[33.3], says="divide values in 0-255 units by 255"),
        refused(CIFAR100DataModule, transforms=[Quadrant()], says="with 100 classes; set num_classes to 100"),
        *(
            refused(GaussianInputsDataModule, shape, says="shape must be a list of integers >= 1")
            for shape in ([], "28", [0], [1.0], [1, -2], [True], 3, None)
        ),
        *(refused(GaussianInputsDataModule, [3], samples=bad) for bad in (0, 1000.0)),
        *(
            refused(GaussianInputsDataModule, [3], **{name: 0})
            for name in ("test_samples", "num_classes", "batch_size")
        ),
        *(refused(GaussianInputsDataModule, [3], **bad) for bad in ({"val_samples": -1}, {"eval_batch_size": 0})),
        refused(GaussianInputsDataModule, [3], batch_size=601, samples=600, says="601 is more than the 600 training"),
        *(refused(ConceptsDataModule, **bad) for bad in ({"concept_seed": -1}, {"copies": 0}, {"batch_size": 0})),
        *(refused(BrodenDataModule, **{name: 0}) for name in ("image_size", "num_classes", "max_samples")),
        refused(BrodenDataModule, std=(0.0, 1.0, 1.0), says="std"),
        refused(loader, batch_size=2.5),
        refused(loader, mean=[125.3, 123.0], says=["mean must be in [0, 1]", "divide values in 0-255 units by 255"]),
        refused(loader, std=[0.1, NAN], says="std must be in (0, 1]"),
        refused(loader, shift=5, seeds=0, says="smaller than the image (5x6 pixels), got 5"),
        refused(loader, shift=1, seeds=0, shift_fill=256, says="shift_fill must be"),
        refused(loader, flip=True, says="shift, flip and augmentations are random and need seeds"),
        refused(loader, seeds=[], says="at least one seed"),
        refused(loader, rank=2, world_size=2),
        refused(loader, batch_size=21, drop_last=True, says=["batch_size 21 is more than the 20 ", "at most 20"]),
        refused(loader, batch_size=11, drop_last=True, seeds=0, world_size=2, says="11 x 2 processes = 22"),
        refused(loader, dtype=torch.complex64, says=["inputs must be floats or int64", "got torch.complex64"]),
        refused(loader, dtype=torch.float32, flip=True, seeds=0, says="shift and flip are for uint8 images"),
        refused(loader, mean=None, says="Images are normalised by mean and std; got None"),
        refused(loader, (3, 2, 2), says="shape [3, 2, 2]"),
        refused(loader, labels=torch.zeros(2).long(), says="labels must be int64 of shape [20]"),
        refused(loader, labels=torch.zeros(20), says="got torch.float32"),
        refused(loader, (0, 2, 5, 6), says="must not be empty"),
        *(refused(Rotated, max_angle=bad) for bad in (0, 181)),
        *(refused(Translated, max_shift=bad) for bad in (0, NAN)),
        refused(Quadrant, target="digits", says=["Unknown target 'digits'", "Did you mean 'digit'"]),
        *(refused(Quadrant, **bad) for bad in ({"size": 31}, {"size": 0}, {"jitter": -1}, {"num_classes": 0})),
        refused(Resized, size=0),
        refused(ImageTransform.from_config, {"class_path": "os.system"}, says="Unknown transform 'os.system'"),
        refused(DigitsDataModule().split_tensors, "vla", says=["Unknown split 'vla'", "Did you mean 'val'"]),
    ],
)
def test_a_wrong_argument_is_named(refusal):
    refusal()


class Cropped(ImageTransform):
    def __call__(self, images, labels, split):
        return images[..., 1:], labels


def first(count):
    return lambda train: LabelledImages(*(part[:count] for part in train))


def constant(train):
    train.images[:, 1] = 9
    return train


@pytest.mark.parametrize(
    ("train", "attributes", "settings", "words"),
    [
        (constant, {}, {}, r"Channel 1 is constant over the 36 training images.*set std"),
        (first(0), {}, {}, "train images of the source must not be empty"),
        (first(4), {}, {}, "0.1 of 4 training images leaves the validation split"),
        (first(4), {}, {"val_fraction": 0}, "batch_size 32 is more than the 4 training inputs"),
        (None, {"source_shape": (2, 5, 5)}, {}, r"must have shape \(2, 5, 5\), got \(2, 5, 6\)"),
        (None, {"source_classes": 9}, {}, r"labels must be in \[0, 9\), got values from 0 to 9"),
        (None, {}, {"transforms": [Cropped()]}, r"after the transforms must have shape \(2, 5, 6\), got \(2, 5, 5\)"),
    ],
)
def test_what_only_the_data_can_tell_is_said_in_setup(tiny, train, attributes, settings, words):
    class Changed(tiny):
        def load(self):
            source = super().load()
            return (train(source[0]), source[1]) if train else source

    for name, value in attributes.items():
        setattr(Changed, name, value)
    with pytest.raises(ValueError, match=words):
        Changed(**settings).setup()


def test_a_constant_channel_is_fine_with_a_given_deviation(tiny):
    class Constant(tiny):
        def load(self):
            train, test = super().load()
            return constant(train), test

    assert Constant(std=[1.0, 1.0]).std == [1.0, 1.0]
