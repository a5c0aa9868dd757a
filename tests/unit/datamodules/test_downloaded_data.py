import gzip
import hashlib
import io
import pickle
import tarfile
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision

from lightning_sym.datamodules import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    FashionMNISTDataModule,
    MNISTDataModule,
)

TRAIN, TEST = 20, 6


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


def cifar_files(names: list[str], key: str) -> dict[str, bytes]:
    random = np.random.default_rng(0)
    return {
        name: pickle.dumps({"data": random.integers(0, 256, (4, 3072), dtype=np.uint8), key: [0, 1, 2, 3]})
        for name in names
    }


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise URLError("Name or service not known")

    monkeypatch.setattr("lightning_sym.datamodules._downloaded.download_url", refuse)


def serve(monkeypatch, contents: dict[str, bytes]):
    """Let downloads of the named files succeed."""
    asked = []

    def download(url, root, md5=None):
        name = url.rpartition("/")[2]
        asked.append(url)
        if name not in contents:
            Path(root, name).write_bytes(b"half a fi")
            raise URLError("timed out")
        Path(root, name).write_bytes(contents[name])
        if hashlib.md5(contents[name]).hexdigest() != md5:
            raise RuntimeError("File not found or corrupted.")

    monkeypatch.setattr("lightning_sym.datamodules._downloaded.download_url", download)
    return asked


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


@pytest.fixture(params=[CIFAR10DataModule, CIFAR100DataModule])
def cifar(request, monkeypatch):
    """The class, its files and the archive that holds them; torchvision's sums are replaced by theirs."""
    cls = request.param
    source, key = cls.source, cls.label_key
    files = cifar_files([name for name, _ in [*source.train_list, *source.test_list]], key)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"{source.base_folder}/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    archive = buffer.getvalue()
    for part in ("train_list", "test_list"):
        monkeypatch.setattr(source, part, [[name, md5(files[name])] for name, _ in getattr(source, part)])
    monkeypatch.setattr(source, "tgz_md5", md5(archive))
    monkeypatch.setattr(cls, "source_sizes", None)
    return cls, files, archive


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_reads_what_torchvision_reads(mnist, mnist_root, packed):
    expected = torchvision.datasets.MNIST(mnist_root, train=True)
    if packed:
        for path in list((mnist_root / "MNIST" / "raw").iterdir()):
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    data = mnist(mnist_root, val_fraction=0.25)
    data.prepare_data()  # nothing to do
    train, test = data.load()
    assert torch.equal(train.images[:, 0], expected.data)
    assert torch.equal(train.labels, expected.targets)
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
    assert "the download failed: Name or service not known); copy them there, or set root to" in message
    assert "\n" not in message
    with pytest.raises(FileNotFoundError, match=r"download is false.*set download to true"):
        cls(download=False).prepare_data()
    with pytest.raises(FileNotFoundError, match=r"nothing was downloaded yet.*call prepare_data\(\) first"):
        cls().setup()


def test_declared_sizes_allow_checks_before_anything_is_downloaded():
    with pytest.raises(ValueError, match=r"batch_size 60001 is more than the 54000 training images"):
        MNISTDataModule(batch_size=60_001)
    assert CIFAR100DataModule().num_classes == 100
    assert CIFAR10DataModule().class_names[9] == "truck"
    assert FashionMNISTDataModule().class_names[9] == "Ankle boot"


def test_mnist_is_downloaded_whole_from_the_first_mirror_that_works(mnist, tmp_path, monkeypatch):
    contents = {f"{name}.gz": gzip.compress(data) for name, data in mnist_files().items()}
    resources = [(name, md5(data)) for name, data in contents.items()]
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", ["https://first/", "https://second/"])
    last = resources[-1][0]
    asked = serve(monkeypatch, {name: data for name, data in contents.items() if name != last})
    with pytest.raises(FileNotFoundError, match=r"missing: .*the download failed: timed out"):
        mnist(tmp_path).prepare_data()
    assert asked[-2:] == [f"https://first/{last}", f"https://second/{last}"]
    folder = tmp_path / "MNIST" / "raw"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: data for name, data in mnist_files().items() if name != last.removesuffix(".gz")
    }
    asked = serve(monkeypatch, contents)
    data = mnist(tmp_path)
    data.prepare_data()
    assert asked == [f"https://first/{last}"]  # only what was missing
    assert data.identity()["splits"]["test"] == TEST


def test_a_download_with_the_wrong_sum_leaves_nothing(mnist, tmp_path, monkeypatch):
    serve(monkeypatch, {f"{name}.gz": b"not the file" for name in mnist_files()})
    with pytest.raises(FileNotFoundError, match=r"the download failed: File not found or corrupted"):
        mnist(tmp_path).prepare_data()
    assert list((tmp_path / "MNIST" / "raw").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train-images-idx3-ubyte", lambda data: data[:-1], "15679 values where its header says 15680"),
        ("train-labels-idx1-ubyte", lambda data: b"<html>", "no header of uint8 values with 1 axes"),
        ("t10k-images-idx3-ubyte", lambda data: b"", "no header of uint8 values with 3 axes"),
        ("t10k-labels-idx1-ubyte", lambda data: idx(np.zeros(5, np.uint8)), "5 labels for 6 images"),
        ("t10k-labels-idx1-ubyte", lambda data: idx(np.full(6, 10, np.uint8)), "a label of 10"),
        (
            "train-images-idx3-ubyte",
            lambda data: idx(np.zeros((20, 8, 8), np.uint8)),
            r"images of \[8, 8\] pixels",
        ),
        ("train-images-idx3-ubyte", lambda data: idx(np.zeros((0, 28, 28), np.uint8)), "it holds nothing"),
    ],
)
def test_a_damaged_mnist_file_is_named(mnist, mnist_root, name, change, message):
    path = mnist_root / "MNIST" / "raw" / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"MNIST: the file {path} is damaged .{message}.; delete it and run again"):
        mnist(mnist_root).setup()


def test_a_damaged_packed_file_is_named(mnist, mnist_root):
    path = mnist_root / "MNIST" / "raw" / "train-images-idx3-ubyte"
    packed = gzip.compress(path.read_bytes())
    path.unlink()
    for content in (packed[: len(packed) // 2], b"not gzip", packed[:50] + bytes(50) + packed[100:]):
        path.with_name(path.name + ".gz").write_bytes(content)
        with pytest.raises(ValueError, match=rf"the file {path}.gz is damaged .cannot be unpacked"):
            mnist(mnist_root).setup()


def test_cifar_is_downloaded_unpacked_and_read(cifar, tmp_path, monkeypatch):
    cls, files, archive = cifar
    serve(monkeypatch, {cls.source.url.rpartition("/")[2]: archive})
    data = cls(str(tmp_path), batch_size=2, val_fraction=0.25)
    data.prepare_data()
    assert sorted(path.name for path in data.folder.iterdir()) == sorted(files)
    assert [path.name for path in tmp_path.iterdir()] == [cls.source.base_folder]
    train, test = data.load()
    assert train.images.shape == (4 * len(cls.source.train_list), 3, 32, 32)
    first = pickle.loads(files[cls.source.train_list[0][0]])["data"]
    assert torch.equal(train.images[:4].flatten(1), torch.from_numpy(first))
    assert test.labels.tolist() == [0, 1, 2, 3]


def test_a_failed_cifar_download_leaves_nothing(cifar, tmp_path, monkeypatch):
    cls, _, archive = cifar
    name = cls.source.url.rpartition("/")[2]
    serve(monkeypatch, {name: archive[:-100]})
    with pytest.raises(FileNotFoundError, match=r"the download failed"):
        cls(str(tmp_path)).prepare_data()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(cls.source, "tgz_md5", md5(archive[:-100]))  # whole, but not an archive to its end
    with pytest.raises(FileNotFoundError, match=r"the download failed"):
        cls(str(tmp_path)).prepare_data()
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


def test_a_foreign_pickle_is_never_opened(cifar, tmp_path):
    cls, files, _ = cifar

    class Harmful:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "harm",))

    folder = tmp_path / cls.source.base_folder
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    path = folder / cls.source.test_list[0][0]
    path.write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(
        ValueError, match=rf"the file {path} is damaged .its MD5 sum is .*it was not opened.; delete it"
    ):
        cls(str(tmp_path), batch_size=2).setup()
    assert not (tmp_path / "harm").exists()
    path.write_bytes(files[path.name][:-5])
    with pytest.raises(ValueError, match=rf"the file {path} is damaged"):
        cls(str(tmp_path), batch_size=2).setup()


def test_a_folder_that_cannot_be_written_to_is_named(mnist, tmp_path):
    (tmp_path / "MNIST").write_text("a file where a folder should be")
    with pytest.raises(FileNotFoundError, match=rf"MNIST is not in {tmp_path}/MNIST/raw .*the download failed"):
        mnist(tmp_path).prepare_data()
