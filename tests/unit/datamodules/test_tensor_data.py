"""Data of one's own: tensors, files and torch data sets, of any shape, with classes or values as targets."""

import math

import numpy as np
import pytest
import torch
from fits import fit
from helpers import assert_refused, assert_same
from safetensors.torch import save_file
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from torchvision.transforms.functional import to_pil_image

from lightning_sym._random import generator
from lightning_sym.callbacks import MarginalLikelihood, ZooExport
from lightning_sym.datamodules import DatasetDataModule, DiabetesDataModule, TensorDataModule, TensorLoader
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import MatchingTask, SquaredDistance, ZooTask
from lightning_sym.zoo import ModelZoo

GENERATOR = torch.Generator().manual_seed(0)
SPECTRA, LABELS = torch.randn(60, 2, 7, generator=GENERATOR) * 5 + 3, torch.arange(60) % 3
VALUES = SPECTRA.mean((1, 2))


def noisy(inputs, generator):
    """Noise on every value, in place."""
    return inputs.add_(torch.randn(inputs.shape, generator=generator), alpha=0.1)


class Rolled:
    """Every input moved along its last axis by its own number of places."""

    def __init__(self, most=7):
        self.most = most

    def __call__(self, inputs, generator):
        places = torch.randint(self.most, (len(inputs), 1, 1), generator=generator) + torch.arange(inputs.shape[-1])
        return inputs.gather(-1, (places % inputs.shape[-1]).to(inputs.device).expand_as(inputs))


def data(inputs=SPECTRA, targets=LABELS, **settings):
    return TensorDataModule((inputs, targets), **{"batch_size": 8, **settings})


@pytest.mark.parametrize(
    ("inputs", "dtype", "tokens"),
    [
        (SPECTRA, torch.float32, None),
        (SPECTRA.double().numpy(), torch.float32, None),
        (SPECTRA[:, 0].half(), torch.float32, None),
        (SPECTRA[:, :, None] > 0, torch.float32, None),
        (torch.arange(60 * 4, dtype=torch.int32).view(60, 4) % 11, torch.int64, 11),
        (torch.arange(60 * 4, dtype=torch.uint8).view(60, 1, 2, 2), torch.float32, None),
    ],
    ids=["spectra", "array", "vectors", "masks", "tokens", "pixels"],
)
def test_inputs_of_any_kind_come_as_networks_take_them(inputs, dtype, tokens):
    made = data(inputs)
    assert (made.input_shape, made.num_classes, made.tokens) == (tuple(inputs.shape[1:]), 3, tokens)
    batch, labels = next(iter(made.train_dataloader()))
    assert batch.dtype == dtype
    assert labels.dtype == torch.int64
    whole = torch.cat([made.split_tensors(split)[0] for split in ("train", "val", "test")])
    unit = 255 if torch.as_tensor(inputs).dtype == torch.uint8 else 1
    expected = torch.as_tensor(inputs).to(torch.float64) / unit
    given, taken = (each.double().flatten(1).sum(1).sort()[0] for each in (expected.to(dtype), whole))
    assert torch.equal(taken, given)


@pytest.mark.parametrize(("targets", "shape"), [(VALUES, (1,)), (VALUES.view(30, 2).repeat(2, 1), (2,))])
def test_values_have_the_shape_of_a_networks_outputs(targets, shape):
    made = data(targets=targets.double())
    assert (made.regression, made.num_classes) == (True, shape[0])
    _, batch = next(iter(made.val_dataloader()))
    assert (batch.dtype, batch.shape[1:]) == (torch.float32, shape)


@pytest.mark.parametrize("standardize", [False, True])
def test_training_inputs_alone_are_augmented_by_seed_epoch_and_batch(standardize):
    made, plain = (data(standardize=standardize, augmentations=one) for one in ([Rolled()], None))
    assert_same(made.split_tensors("train"), plain.split_tensors("train"), "inputs as they were given")
    for name in ("curvature", "val", "test"):
        assert_same(*(list(getattr(one, f"{name}_dataloader")()) for one in (made, plain)), name)

    def epoch(number, **settings):
        inputs, targets = plain.split_tensors("train")
        options = {"batch_size": 8, "seeds": [5, 9], "augmentations": [Rolled()], "drop_last": True}
        loader = TensorLoader(inputs, targets, mean=made.mean, std=made.std, **options | settings)
        loader.set_epoch(number)
        return list(loader)

    whole = epoch(3)
    raw = plain.split_tensors("train").inputs[torch.randperm(43, generator=generator("order", 9, 3))]
    expected = made.normalize(Rolled()(raw[8:16].clone(), generator("augment", 9, 3, 1)))
    assert torch.equal(whole[1][0][1], expected)
    assert_same(whole, epoch(3), "drawn again")
    assert not torch.equal(whole[0][0], epoch(2)[0][0])
    assert_same([(x[1], y[1]) for x, y in whole], epoch(3, seeds=9), "one seed alone")
    shares = zip(*(epoch(3, batch_size=4, rank=rank, world_size=2) for rank in (0, 1)), strict=True)
    together = [tuple(torch.cat(parts, 1) for parts in zip(*both, strict=True)) for both in shares]
    assert_same(whole, together, "two processes")


def test_splits_are_disjoint_and_the_test_split_depends_on_no_seed():
    numbers = torch.arange(60.0)[:, None]
    first, second = (data(numbers, data_seed=seed) for seed in (0, 1))
    parts = [first.split_tensors(split)[0].flatten() for split in ("train", "val", "test")]
    assert [len(part) for part in parts] == [43, 5, 12]
    assert torch.cat(parts).sort()[0].tolist() == list(range(60))
    assert torch.equal(first.split_tensors("test")[0], second.split_tensors("test")[0])
    assert not torch.equal(parts[1], second.split_tensors("val")[0].flatten())
    given = TensorDataModule((numbers, LABELS), val=(numbers[:4], LABELS[:4]), test=(numbers[4:6], LABELS[4:6]))
    assert given.identity()["splits"] == {"train": 60, "val": 4, "test": 2}


def test_floats_stay_as_they_are_unless_they_are_standardized():
    plain, standardized = data(), data(standardize=True)
    assert (plain.mean, plain.identity()["std"]) == (None, None)
    raw = plain.split_tensors("train").inputs
    assert torch.equal(plain.normalize(raw), raw)
    found = torch.cat([inputs for inputs, _ in standardized.curvature_dataloader()]).double()
    expected = (raw.double() - raw.double().mean((0, 2), True)) / raw.double().std((0, 2), correction=0, keepdim=True)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)  # float32
    assert torch.equal(standardized.normalize(raw), found.float())
    assert torch.equal(standardized.split_tensors("train").inputs, raw)


class Points(Dataset):
    """The same data, item by item; targets are plain numbers."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return SPECTRA[index].numpy(), int(LABELS[index])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Points()[index] for index in range(60))


class Read(TensorDataModule):
    """What a subclass reads by itself, after its constructor."""

    def __init__(self, path, **settings):
        super().__init__(**settings)
        self.path = path

    def load(self):
        return (*[torch.load(self.path)[name] for name in "xy"],), None, None


def test_files_data_sets_and_subclasses_give_the_same_data(tmp_path):
    torch.save({"x": SPECTRA, "y": LABELS}, tmp_path / "a.pt")
    save_file({"inputs": SPECTRA, "targets": LABELS}, tmp_path / "b.safetensors")
    np.savez(tmp_path / "c.npz", x=SPECTRA.numpy(), targets=LABELS.numpy())
    expected = data().identity()
    for name in ("a.pt", "b.safetensors", "c.npz"):
        assert TensorDataModule(tmp_path / name, batch_size=8).identity() == expected  # wherever the file lies
    others = [
        DatasetDataModule(TensorDataset(SPECTRA, LABELS), batch_size=8),
        DatasetDataModule(Points(), batch_size=8),
        DatasetDataModule(Stream(), batch_size=8),
        Read(str(tmp_path / "a.pt"), batch_size=8),
    ]
    for other in others:
        assert (other.input_shape, other.num_classes) == ((2, 7), 3)
        assert other.identity()["fingerprint"] == expected["fingerprint"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"targets": LABELS[:-1]}, "train: there must be one target per input, got 59 for 60"),
        ({"inputs": SPECTRA[:, 0, 0]}, "inputs must be floats or int64 of shape"),
        ({"inputs": SPECTRA * 1j}, "train: inputs must be real numbers, got torch.complex64; pass real and imaginary"),
        ({"inputs": SPECTRA.to_sparse()}, "train holds 'inputs' as a tensor that is torch.sparse_coo"),
        ({"targets": VALUES * 1j}, "train: targets must be real numbers"),
        ({"inputs": SPECTRA / 0}, "train: inputs must be finite"),
        ({"targets": VALUES * math.nan}, "train: targets must be finite"),
        ({"targets": LABELS - 1}, "class numbers must be >= 0, got -1"),
        ({"targets": LABELS * 0, "num_classes": 1}, "all targets are class 0"),
        ({"targets": LABELS * 1_000_000}, "class numbers go up to 2000000, but there are 60 targets"),
        ({"inputs": LABELS[:, None] * 2_000_000}, "integer inputs are tokens, and these go up to 4000000"),
        ({"num_classes": 2}, "num_classes 2 is too small for class number 2"),
        ({"class_names": ["a", "b"]}, "class_names must have 3 names, got 2"),
        ({"batch_size": 60}, "batch_size 60 is more than the 43 training inputs"),
        ({"val_fraction": 0.001}, "val_fraction 0.001 of 48 training inputs leaves a split empty"),
        ({"test": (SPECTRA[:, :1], LABELS)}, r"test: inputs must be like those for training, .*\['N', 2, 7\]"),
        ({"inputs": LABELS[:, None], "standardize": True}, "standardize applies to floats"),
        ({"inputs": torch.ones(60, 1), "standardize": True}, "Channel 0 is constant"),
        ({"augmentations": ["noisy"]}, r"augmentations must be a list of functions .*, got \['noisy'\]"),
        ({"augmentations": [lambda x, _: x[:1]]}, r"<lambda> must return inputs like .*, got .* \[1, 2, 7\]"),
        ({"augmentations": [noisy, lambda x, _: None]}, "got a NoneType"),
    ],
)
def test_data_that_cannot_be_used_are_refused_when_the_datamodule_is_made(changes, says):
    with pytest.raises(ValueError, match=says):
        data(**changes)


def test_files_and_data_sets_that_cannot_be_used_are_refused(tmp_path):
    torch.save({"x": SPECTRA, "labels": LABELS}, tmp_path / "names.pt")
    torch.save({"x": SPECTRA, "y": Points()}, tmp_path / "objects.pt")
    np.savez(tmp_path / "objects.npz", x=np.array([Points()], dtype=object), y=LABELS.numpy())
    for name, says in (
        ("names.pt", "targets, named y or targets; it holds x, labels"),
        ("objects.pt", "holds objects other than tensors by name, and is not opened"),
        ("objects.npz", "holds objects other than arrays of numbers"),
        ("data.csv", "train must be a .pt, .safetensors or .npz file"),
    ):
        assert_refused(TensorDataModule, str(tmp_path / name), says=says)
    for name in ("none.npz", "none.pt"):
        says = ["There is no file", "or .npz file as train"]
        assert_refused(TensorDataModule, str(tmp_path / name), says=says, error=FileNotFoundError)
    assert_refused(DiabetesDataModule, "a.pt", says="DiabetesDataModule reads its data by itself")
    images = DatasetDataModule, [(object(), 1)]
    assert_refused(
        *images, says=["Item 0 of the data set for train must be a pair", "got tuple of object, int"], error=TypeError
    )
    # A pair with a wrong value is told what is wrong with the value.
    for pair, says in (
        ((SPECTRA[0], "cat"), ": target must be numbers, got <U3; convert them, names by"),
        (([[1.0, 2.0], [3.0]], 1), ": input must have one shape for all"),
        ((np.ma.masked_invalid([np.nan, 1.0]), 1), ": input must have no masked values"),
        ((SPECTRA[0].to_sparse(), 1), " holds 'input' as a tensor that is"),
    ):
        assert_refused(DatasetDataModule, [(SPECTRA[0], 1), pair], says=f"Item 1 of the data set for train{says}")
    assert_refused(DatasetDataModule, [(SPECTRA[0], 1), (SPECTRA[0, :1], 1)], says="must all have one shape")
    assert_refused(DatasetDataModule, [], says="The data set for train is empty; expected items")
    # A tensor of two rows is an input without its target, not a pair.
    assert_refused(DatasetDataModule, list(torch.randn(40, 2, 8)), says="got Tensor", error=TypeError)

    class Unreadable(list):
        def __getitem__(self, index):
            raise KeyError("scan_17.png")

    says = "Item 0 of the data set for train cannot be read (KeyError: 'scan_17.png')"
    assert_refused(DatasetDataModule, Unreadable([1]), says=says)


def test_unused_class_numbers_are_reported_and_a_part_of_the_data_has_the_outputs_of_all():
    outputs = "8 outputs, but 5 of them (0, 1, 2, 3, 4) are no target; .*set num_classes to 8 to keep them"
    with pytest.warns(UserWarning, match=outputs.replace("(", r"\(", 1).replace(")", r"\)", 1)):
        found = data(targets=LABELS + 5)
    assert found.num_classes == 8
    assert data(targets=LABELS + 5, num_classes=8).num_classes == 8  # without a warning
    tokens = torch.arange(60)[:, None] + torch.arange(4)
    assert data(inputs=tokens, targets=2 * tokens).num_classes == 125  # a vocabulary
    classes = torch.arange(60) % 20
    assert data(targets=classes, max_samples=4, batch_size=2).num_classes == data(targets=classes).num_classes == 20


def test_the_first_inputs_of_sorted_data_lack_classes():
    inputs, targets = torch.randn(60, 3), torch.arange(60) // 20
    with pytest.warns(UserWarning, match="which are of 1 of 3 classes; shuffle"):
        TensorDataModule((inputs, targets), (inputs, targets), (inputs, targets), batch_size=4, max_samples=10)
    with pytest.warns(UserWarning, match="which are of 2 of 3 classes; shuffle"):
        TensorDataModule((inputs, targets), (inputs, targets), (inputs, targets), batch_size=4, max_samples=30)
    TensorDataModule((inputs, targets), batch_size=4, max_samples=30)  # is shuffled to hold out data


def test_images_of_pil_have_their_channels_first_and_a_column_of_classes_becomes_a_row():
    pixels = torch.randint(256, (40, 3, 4, 5), dtype=torch.uint8)
    classes = torch.arange(40) % 3
    images = [(to_pil_image(one), target[None]) for one, target in zip(pixels, classes, strict=True)]
    grey = [(to_pil_image(one[:1]), target) for one, target in zip(pixels, classes, strict=True)]
    options = {"batch_size": 4}
    expected = DatasetDataModule(list(zip(pixels, classes, strict=True)), **options)
    found, flat = DatasetDataModule(images, **options), DatasetDataModule(grey, **options)
    for name in ("train", "val", "test"):
        torch.testing.assert_close(found.split_tensors(name), expected.split_tensors(name), rtol=0, atol=0)
    assert (found.input_shape, found.num_classes) == ((3, 4, 5), 3)
    assert flat.input_shape == (1, 4, 5)


def regressors(**settings):
    network = MultiLayerPerceptron(widths=(), in_channels=2, image_size=(7, 1), num_classes=1, bias=False)
    return ZooTask(network, **{"members": 2, "loss": SquaredDistance(), "execution": "vmap", **settings})


def test_members_have_orders_of_their_own_and_are_exported_with_the_data(tmp_path):
    together, alone = regressors(), regressors(members=1, seed=1)
    changed = {"targets": VALUES, "augmentations": [Rolled(3), noisy]}
    fit(together, data(**changed), ZooExport(str(tmp_path / "zoo")), folder=tmp_path)
    fit(alone, data(**changed), folder=tmp_path)
    for name, weight in alone.population.member_state(1).items():
        torch.testing.assert_close(weight, together.population.member_state(1)[name], atol=1e-6, rtol=1e-5)  # float32
    zoo = ModelZoo.open(tmp_path / "zoo")
    recorded = data(targets=VALUES).identity()
    recorded["arguments"]["augmentations"] = ["Rolled(most=3)", "noisy"]
    assert zoo.member(0).data == recorded
    for task in (ZooTask(together.network, members=1), MatchingTask(str(tmp_path / "zoo"))):
        assert_refused(fit, task, data(targets=VALUES), says="targets of TensorDataModule are values")


def test_the_evidence_of_a_linear_regression_is_the_closed_form(tmp_path):
    """log N(y | 0, I + X X' / precision) / N: a linear network has no other approximation than its fit."""
    inputs = torch.randn(50, 2, 7, generator=GENERATOR)
    precision, report = 2.0, MarginalLikelihood(burn_in=None, dirpath=str(tmp_path))
    task = regressors(prior_precision=precision, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.2), members=1)
    made = TensorDataModule((inputs, inputs.sum((1, 2)) / 3), batch_size=36)  # all training data in one step
    assert len(made.split_tensors("train").inputs) == 36
    fit(task, made, report, folder=tmp_path, max_epochs=300)
    x, y = (tensor.double().flatten(1) for tensor in made.split_tensors("train"))
    covariance = torch.eye(36, dtype=torch.float64) + x @ x.T / precision
    normal = torch.distributions.MultivariateNormal(torch.zeros(36, dtype=torch.float64), covariance)
    found = report.records[-1]
    assert found["log_marginal_likelihood"] == pytest.approx(float(normal.log_prob(y[:, 0])) / 36, abs=1e-4)


def test_a_loss_that_does_not_go_with_the_targets_is_said_with_their_shapes():
    network = MultiLayerPerceptron(widths=(), in_channels=2, image_size=(7, 1), num_classes=3)
    says = "loss cannot be computed for outputs of shape [5, 3] and targets of shape [5] and type torch.int64"
    assert_refused(fit, ZooTask(network, loss=SquaredDistance()), data(), says=says)


def test_another_loss_of_values_is_no_likelihood():
    assert_refused(regressors, loss=mse_loss, prior_precision=1.0, says="SquaredDistance for values")


def perceptron(outputs):
    return MultiLayerPerceptron([4], in_channels=2, image_size=(7, 1), num_classes=outputs)


def test_arrays_of_numpy_come_in_any_order_or_are_refused_in_a_sentence():
    inputs, targets = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 3
    plain = TensorDataModule((inputs[::-1].copy(), targets)).split_tensors("train")
    for same in (inputs[::-1], inputs[::-1].astype(">f8"), inputs[::-1].astype(np.longdouble)):
        assert torch.equal(TensorDataModule((same, targets)).split_tensors("train").inputs, plain.inputs)
    for wrong, says in (
        (
            (inputs, np.array(list("abc"))[targets]),
            "train: targets must be numbers, got <U1; convert them, names by np",
        ),
        ((inputs, targets.astype("M8[s]")), "train: targets must be numbers, got datetime64"),
        (([[1.0], [1.0, 2.0]], targets[:2]), "train: inputs must have one shape for all"),
        ((np.ma.masked_greater(inputs, 1), targets), "train: inputs must have no masked values"),
    ):
        assert_refused(TensorDataModule, wrong, says=says)
