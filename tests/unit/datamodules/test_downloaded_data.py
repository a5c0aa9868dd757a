"""MNIST and CIFAR as torchvision fetches and reads them, on small files of the published formats."""

import gzip
import hashlib
import io
import pickle
import tarfile
import urllib.request
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision
from helpers import assert_refused

from lightning_sym.datamodules import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    FashionMNISTDataModule,
    MNISTDataModule,
)

TRAIN, TEST = 20, 6
IMAGES = "train-images-idx3-ubyte"


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def mnist_files() -> dict[str, bytes]:
    random = np.random.default_rng(0)
    files = {}
    for prefix, count in (("train", TRAIN), ("t10k", TEST)):
        files[f"{prefix}-images-idx3-ubyte"] = idx(random.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        files[f"{prefix}-labels-idx1-ubyte"] = idx((np.arange(count) % 10).astype(np.uint8))
    return files


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """Files are served from folders; every other address is out of reach."""
    urlopen = urllib.request.urlopen

    def local(request, *args, **kwargs):
        if not request.full_url.startswith("file:"):
            raise URLError("Name or service not known")
        response = urlopen(request, *args, **kwargs)
        response.length = None  # torchvision asks for it, and only answers of servers have it
        return response

    monkeypatch.setattr(urllib.request, "urlopen", local)


@pytest.fixture
def mnist(monkeypatch):
    monkeypatch.setattr(MNISTDataModule, "source_sizes", None)
    return lambda root, **settings: MNISTDataModule(str(root), batch_size=4, **settings)


@pytest.fixture
def mnist_root(tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, data in mnist_files().items():
        (folder / name).write_bytes(data)
    return tmp_path


@pytest.fixture
def served(tmp_path_factory, monkeypatch):
    """A folder from which torchvision downloads MNIST; its first mirror is out of reach."""
    folder = tmp_path_factory.mktemp("served")
    packed = {f"{name}.gz": gzip.compress(data) for name, data in mnist_files().items()}
    for name, data in packed.items():
        (folder / name).write_bytes(data)
    source = torchvision.datasets.MNIST
    monkeypatch.setattr(source, "resources", [(name, md5(data)) for name, data in packed.items()])
    monkeypatch.setattr(source, "mirrors", ["https://first/", f"{folder.as_uri()}/"])
    return folder


@pytest.fixture(params=[CIFAR10DataModule, CIFAR100DataModule])
def cifar(request, monkeypatch, tmp_path_factory):
    """The class, its files and the archive that holds them; torchvision's sums and address are replaced by theirs."""
    cls, random = request.param, np.random.default_rng(0)
    source, key = cls.source, {10: "labels", 100: "fine_labels"}[cls.source_classes]
    files = {
        name: pickle.dumps({"data": random.integers(0, 256, (4, 3072), dtype=np.uint8), key: [0, 1, 2, 3]})
        for name, _ in [*source.train_list, *source.test_list]
    }
    files[source.meta["filename"]] = pickle.dumps({source.meta["key"]: ["a", "b"]})
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"{source.base_folder}/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    path = tmp_path_factory.mktemp("served") / source.filename
    path.write_bytes(buffer.getvalue())
    for part in ("train_list", "test_list"):
        monkeypatch.setattr(source, part, [[name, md5(files[name])] for name, _ in getattr(source, part)])
    monkeypatch.setattr(source, "meta", {**source.meta, "md5": md5(files[source.meta["filename"]])})
    monkeypatch.setattr(source, "tgz_md5", md5(buffer.getvalue()))
    monkeypatch.setattr(source, "url", path.as_uri())
    monkeypatch.setattr(cls, "source_sizes", None)
    return cls, files, path


def test_mnist_reads_the_values_and_labels_of_the_files(mnist, mnist_root):
    data = mnist(mnist_root, val_fraction=0.25)
    data.prepare_data()  # nothing to do
    train, test = data.load()
    expected = np.frombuffer(mnist_files()[IMAGES], np.uint8, offset=16).reshape(TRAIN, 1, 28, 28)
    assert train.images.dtype == torch.uint8
    assert torch.equal(train.images, torch.from_numpy(expected.copy()))
    assert torch.equal(train.labels, torch.arange(TRAIN) % 10)
    assert data.identity()["splits"] == {"train": 15, "val": 5, "test": TEST}
    assert test.images.shape == (TEST, 1, 28, 28)


def test_identity_does_not_depend_on_the_folder(mnist, mnist_root, tmp_path_factory):
    other = tmp_path_factory.mktemp("elsewhere")
    (mnist_root / "MNIST").rename(other / "MNIST")
    there = mnist(other).identity()
    (other / "MNIST").rename(mnist_root / "MNIST")
    assert mnist(mnist_root, download=False).identity() == there
    assert "root" not in there["arguments"]


@pytest.mark.parametrize(
    ("cls", "folder"),
    [
        (MNISTDataModule, "MNIST/raw"),
        (FashionMNISTDataModule, "FashionMNIST/raw"),
        (CIFAR10DataModule, "cifar-10-batches-py"),
        (CIFAR100DataModule, "cifar-100-python"),
    ],
)
def test_offline_and_absent_says_where_and_what_to_do(tmp_path, monkeypatch, cls, folder):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        cls().prepare_data()
    message = str(caught.value)
    assert f"{cls.title} is not in {tmp_path}/data/{folder} (missing: " in message
    assert "the download failed: " in message
    assert "Name or service not known" in message
    assert "; copy them there, or set root to" in message
    assert "\n" not in message
    assert list((tmp_path / "data").iterdir()) == []
    assert_refused(lambda: cls(download=False).prepare_data(), says="set download to true", error=FileNotFoundError)
    assert_refused(lambda: cls().setup(), says="nothing was downloaded yet", error=FileNotFoundError)


def test_declared_sizes_allow_checks_before_anything_is_downloaded():
    assert_refused(MNISTDataModule, batch_size=60_001, says="batch_size 60001 is more than the 54000 training inputs")
    assert CIFAR100DataModule().num_classes == 100
    assert CIFAR10DataModule().class_names[9] == "truck"
    assert FashionMNISTDataModule().class_names[9] == "Ankle boot"


def test_mnist_is_downloaded_whole_from_the_first_mirror_that_works(mnist, served, tmp_path):
    data = mnist(tmp_path)
    data.prepare_data()
    assert {path.name: path.read_bytes() for path in data.folder.iterdir()} == mnist_files()
    assert data.identity()["splits"]["test"] == TEST
    assert [path.name for path in tmp_path.iterdir()] == ["MNIST"]


@pytest.mark.parametrize("problem", ["absent", "another sum"])
def test_a_failed_mnist_download_leaves_nothing(mnist, served, tmp_path, problem):
    last = served / "t10k-labels-idx1-ubyte.gz"
    last.unlink() if problem == "absent" else last.write_bytes(b"not the file")
    assert_refused(lambda: mnist(tmp_path).prepare_data(), says="the download failed: ", error=FileNotFoundError)
    assert list(tmp_path.iterdir()) == []


def test_packed_mnist_files_are_unpacked_without_a_network(mnist, served, tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    served.rename(folder.parent.mkdir() or folder)
    data = mnist(tmp_path)
    data.prepare_data()
    assert {name: (folder / name).read_bytes() for name in mnist_files()} == mnist_files()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (IMAGES, lambda data: data[:-1], "the file is damaged .*15679"),
        ("train-labels-idx1-ubyte", lambda data: b"<html>", "the file is damaged .*wrong header"),
        ("t10k-images-idx3-ubyte", lambda data: b"", "the file is damaged"),
        (IMAGES, lambda data: idx(np.zeros((0, 28, 28), np.uint8)), "the file is damaged"),
        (IMAGES, lambda data: data[:2] + b"\x0d" + data[3:], "the file is damaged"),  # floats
        ("t10k-labels-idx1-ubyte", lambda data: idx(np.zeros(5, np.uint8)), "the test images .*one per image"),
        ("t10k-labels-idx1-ubyte", lambda data: idx(np.full(6, 10, np.uint8)), r"the test images .*in \[0, 10\)"),
        (IMAGES, lambda data: idx(np.zeros((20, 8, 8), np.uint8)), r"must have shape \(1, 28, 28\)"),
    ],
)
def test_a_damaged_mnist_file_is_named(mnist, mnist_root, name, change, message):
    path = mnist_root / "MNIST" / "raw" / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message.replace("the file", f"MNIST: {path}")):
        mnist(mnist_root).setup()


def test_cifar_is_downloaded_unpacked_and_read(cifar, tmp_path):
    cls, files, _ = cifar
    data = cls(str(tmp_path), batch_size=2, val_fraction=0.25)
    data.prepare_data()
    assert sorted(path.name for path in data.folder.iterdir()) == sorted(files)
    assert [path.name for path in tmp_path.iterdir()] == [cls.source.base_folder]
    train, test = data.load()
    assert train.images.shape == (4 * len(cls.source.train_list), 3, 32, 32)
    assert train.images.is_contiguous()
    first = pickle.loads(files[cls.source.train_list[0][0]])["data"]
    assert torch.equal(train.images[:4].flatten(1), torch.from_numpy(first))
    assert test.labels.tolist() == [0, 1, 2, 3]
    assert test.labels.dtype == torch.int64


@pytest.mark.parametrize("published", [True, False], ids=["another sum", "no archive to its end"])
def test_a_failed_cifar_download_leaves_nothing(cifar, tmp_path, monkeypatch, published):
    cls, _, archive = cifar
    archive.write_bytes(archive.read_bytes()[:-100])
    if not published:
        monkeypatch.setattr(cls.source, "tgz_md5", md5(archive.read_bytes()))
    assert_refused(lambda: cls(str(tmp_path)).prepare_data(), says="the download failed", error=FileNotFoundError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("which", ["train_list", "test_list", "meta"])
def test_a_foreign_pickle_is_never_opened(cifar, tmp_path, which):
    cls, files, _ = cifar

    class Harmful:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "harm",))

    folder = tmp_path / cls.source.base_folder
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    name = cls.source.meta["filename"] if which == "meta" else getattr(cls.source, which)[0][0]
    for content in (pickle.dumps(Harmful()), files[name][:-5]):
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{folder} is damaged .*corrupted.*; delete it and run again"):
            cls(str(tmp_path), batch_size=2).setup()
    assert not (tmp_path / "harm").exists()


def test_a_folder_that_cannot_be_written_to_is_named(mnist, served, tmp_path):
    (tmp_path / "MNIST").write_text("a file where a folder should be")
    says = (f"MNIST is not in {tmp_path}/MNIST/raw ", "the download failed")
    assert_refused(mnist(tmp_path).prepare_data, says=says, error=FileNotFoundError)
