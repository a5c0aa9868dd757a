"""What the data refuse: one line for each call, with the words that name the argument."""

import pytest
import torch

from lightning_sym.datamodules import (
    CIFAR100DataModule,
    DigitsDataModule,
    GaussianInputsDataModule,
    ImageTransform,
    LabelledImages,
    Quadrant,
    Resized,
    Rotated,
    TensorLoader,
    Translated,
)

NAN = float("nan")


def loader(images=(20, 2, 5, 6), labels=None, dtype=torch.uint8, **settings):
    numbers = torch.arange(images[0]) if labels is None else labels
    settings = {"batch_size": 6, "mean": [0.4, 0.5], "std": [0.2, 0.3], **settings}
    return TensorLoader(torch.zeros(images, dtype=dtype), numbers, **settings)


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (DigitsDataModule, {"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        (DigitsDataModule, {"eval_batch_size": 0}, "eval_batch_size must be an integer >= 1, got 0"),
        (DigitsDataModule, {"val_fraction": 1.0}, r"val_fraction must be .*in \[0, 1\), got 1.0"),
        (DigitsDataModule, {"val_fraction": -0.1}, r"val_fraction must be .*in \[0, 1\), got -0.1"),
        (DigitsDataModule, {"val_fraction": NAN}, "got nan"),
        (DigitsDataModule, {"val_fraction": 1e-4}, "0.0001 of 1438 training images leaves the validation split empty"),
        (DigitsDataModule, {"val_fraction": 0.9999}, "leave the training split empty"),
        (DigitsDataModule, {"train_fraction": 0}, r"train_fraction must be in \(0, 1\], got 0"),
        (DigitsDataModule, {"train_fraction": 1.5}, "got 1.5"),
        (DigitsDataModule, {"train_fraction": 1e-5}, "leave the training split empty"),
        (DigitsDataModule, {"max_samples": 0}, "max_samples must be an integer >= 1, got 0"),
        (DigitsDataModule, {"max_samples": 31}, "batch_size 32 is more than the 31 training inputs.*at most 31"),
        (DigitsDataModule, {"shift": 8}, "smaller than the image .8x8 pixels., got 8"),
        (DigitsDataModule, {"shift": -1}, "got -1"),
        (DigitsDataModule, {"shift_fill": "black"}, 'shift_fill must be "mean" or a number in .0, 255., got .black.'),
        (DigitsDataModule, {"mean": [0.1, 0.2, 0.3]}, r"mean must have one value per channel \(1\), got 3"),
        (DigitsDataModule, {"std": [0.0]}, r"std must be in \(0, 1\]"),
        (DigitsDataModule, {"mean": [33.3]}, "divide values in 0-255 units by 255"),
        (CIFAR100DataModule, {"transforms": [Quadrant()]}, "got data with 100 classes; set num_classes to 100"),
        *[
            (GaussianInputsDataModule, {"shape": shape}, "shape must be a list of integers >= 1")
            for shape in ([], "28", [0], [1.0], [1, -2], [True], 3, None)
        ],
        (GaussianInputsDataModule, {"samples": 0}, "samples must be an integer >= 1"),
        (GaussianInputsDataModule, {"samples": 1000.0}, "samples must be an integer >= 1, got 1000.0"),
        (GaussianInputsDataModule, {"val_samples": -1}, "val_samples must be an integer >= 0"),
        (GaussianInputsDataModule, {"test_samples": 0}, "test_samples must be an integer >= 1"),
        (GaussianInputsDataModule, {"num_classes": 0}, "num_classes must be an integer >= 1"),
        (GaussianInputsDataModule, {"batch_size": 0}, "batch_size"),
        (GaussianInputsDataModule, {"eval_batch_size": 0}, "eval_batch_size"),
        (GaussianInputsDataModule, {"batch_size": 601, "samples": 600}, "batch_size 601.*600"),
        (loader, {"batch_size": 2.5}, "batch_size must be an integer >= 1, got 2.5"),
        (loader, {"mean": [125.3, 123.0]}, r"mean must be in \[0, 1\].*divide values in 0-255 units by 255"),
        (loader, {"std": [0.1, NAN]}, r"std must be in \(0, 1\]"),
        (loader, {"shift": 5, "seeds": 0}, "smaller than the image .5x6 pixels.*got 5"),
        (loader, {"shift": 1, "shift_fill": 256, "seeds": 0}, "shift_fill must be .*got 256"),
        (loader, {"flip": True}, "shift, flip and augmentations are random and need seeds"),
        (loader, {"seeds": []}, "at least one seed"),
        (loader, {"rank": 2, "world_size": 2}, "got rank 2 of world_size 2"),
        (loader, {"batch_size": 21, "drop_last": True}, "batch_size 21 is more than the 20 .*at most 20"),
        (loader, {"batch_size": 11, "drop_last": True, "seeds": 0, "world_size": 2}, "11 x 2 processes = 22 .*most 10"),
        (loader, {"dtype": torch.complex64}, "inputs must be floats or int64 .* got torch.complex64"),
        (loader, {"dtype": torch.float32, "flip": True, "seeds": 0}, "shift and flip are for uint8 images"),
        (loader, {"mean": None}, "Images are normalised by mean and std; got None"),
        (loader, {"images": (3, 2, 2)}, r"shape \[3, 2, 2\]"),
        (loader, {"labels": torch.zeros(2).long()}, r"labels must be int64 of shape \[20\]"),
        (loader, {"labels": torch.zeros(20)}, "got torch.float32"),
        (loader, {"images": (0, 2, 5, 6)}, "must not be empty"),
        (Rotated, {"max_angle": 0}, r"max_angle must be in \(0, 180\], got 0"),
        (Rotated, {"max_angle": 181}, "got 181"),
        (Translated, {"max_shift": 0}, "max_shift must be a number > 0, got 0"),
        (Translated, {"max_shift": NAN}, "got nan"),
        (Quadrant, {"target": "digits"}, "Unknown target 'digits'.*Did you mean 'digit'"),
        (Quadrant, {"size": 31}, "size must be an even number of pixels >= 2, or null, got 31"),
        (Quadrant, {"size": 0}, "got 0"),
        (Quadrant, {"jitter": -1}, "jitter must be an integer >= 0, got -1"),
        (Quadrant, {"num_classes": 0}, "num_classes must be an integer >= 1, got 0"),
        (Resized, {"size": 0}, "size must be an integer >= 1, got 0"),
        (ImageTransform.from_config, {"config": {"class_path": "os.system"}}, "Unknown transform 'os.system'"),
        (DigitsDataModule().split_tensors, {"split": "vla"}, "Unknown split 'vla'.* Did you mean 'val'"),
    ],
)
def test_a_wrong_argument_is_named(make, settings, words):
    with pytest.raises(ValueError, match=words):
        make(**settings)


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
