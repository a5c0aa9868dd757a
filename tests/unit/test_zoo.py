"""A zoo on disk: what is written is read again, and what is wrong is said and never loaded."""

import copy
import errno
import json
import multiprocessing
import os
import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch
from helpers import assert_refused, assert_same
from safetensors.torch import save as save_safetensors
from torch import nn

import lightning_sym._files
from lightning_sym import zoo as zoo_module
from lightning_sym.networks import MultiLayerPerceptron, Network, build
from lightning_sym.zoo import ModelZoo, member_file, read_member, rebuild_manifest, versions, write_member


def perceptron(width: int = 4) -> MultiLayerPerceptron:
    return MultiLayerPerceptron(widths=(width,), image_size=4, num_classes=3)


def add(path: Path, number: int, network: Network | None = None, **kwargs) -> Path:
    network = network or perceptron()
    return write_member(path, number, network.fresh(number).state_dict(), architecture=network.architecture, **kwargs)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A zoo of members 0, 1, 2 and 7."""
    path = tmp_path / "zoo"
    for number in (0, 1, 2, 7):
        add(path, number, metrics={"val": {"accuracy": number / 10, "loss": 1.0}})
    rebuild_manifest(path)
    return path


def edit_record(file: Path, **changes: object) -> None:
    """Write a member anew with a changed record and checksums that fit it, as a stranger could."""
    _, tensors = read_member(file)
    text = json.loads(_metadata(file)["member"])
    text = json.dumps({**text, **changes}, sort_keys=True)
    sums = {"member_sha256": zoo_module._checksum(text, {}), "sha256": zoo_module._checksum(text, tensors)}
    metadata = {"member": text, **sums}
    file.write_bytes(save_safetensors(tensors, metadata=metadata))


def _metadata(file: Path) -> dict[str, str]:
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size])["__metadata__"]


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


# ---- writing and reading


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool"]
)
def test_every_dtype_comes_back_bitwise(tmp_path, dtype):
    dtype = getattr(torch, dtype)
    values = torch.arange(-3, 9).to(dtype)
    state = {
        "matrix": values.view(3, 4),
        "transposed": values.view(3, 4).T,
        "scalar": values[5],
        "empty": values[:0],
        "view": values[2:5],
    }
    file = write_member(tmp_path, 3, state, architecture=perceptron().architecture)
    _, found = read_member(file)
    assert_same(found, state)
    assert {value.dtype for value in found.values()} == {dtype}


def test_record_says_what_was_written(tmp_path):
    network = perceptron()
    file = add(tmp_path, 12, metrics={"val": {"accuracy": 0.5}}, data={"fingerprint": "f"}, training={"epochs": 2})
    member, _ = read_member(file)
    assert file.name == "member-0012.safetensors" == member.file
    assert (member.number, member.architecture) == (12, network.architecture)
    assert (member.metrics, member.data) == ({"val": {"accuracy": 0.5}}, {"fingerprint": "f"})
    assert member.training == {"epochs": 2}
    assert member.versions == versions()
    assert member.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert member.created.endswith("+00:00")


def test_written_file_can_be_read_by_others(tmp_path):
    old = os.umask(0o022)
    try:
        file = add(tmp_path, 0)
    finally:
        os.umask(old)
    assert file.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_written(tmp_path, value):
    state = {"a": torch.zeros(2), "b": torch.tensor([0.0, value])}
    assert_refused(write_member, tmp_path, 4, state, architecture={}, says="Member 4 has values that are not finite in")
    eight = {name: value.to(torch.float8_e5m2) for name, value in state.items()}
    assert_refused(write_member, tmp_path, 4, eight, architecture={}, says="Member 4 has values that are not finite in")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("metrics", [{"val": {"loss": float("nan")}}, {"val": {"loss": torch.zeros(())}}])
def test_records_that_are_no_json_are_not_written(tmp_path, metrics):
    assert_refused(add, tmp_path, 0, metrics=metrics, says="The record of member 0 cannot be stored as JSON")
    assert not list(tmp_path.iterdir())


def test_negative_numbers_are_refused(tmp_path):
    assert_refused(write_member, tmp_path, -1, {}, architecture={}, says="number must be an integer >= 0, got -1")


# ---- opening


def test_open_lists_members_in_order(folder):
    zoo = ModelZoo.open(folder)
    assert zoo.numbers == [0, 1, 2, 7]
    assert [member.number for member in zoo] == [0, 1, 2, 7]
    assert len(zoo) == 4
    assert zoo.damaged == {}
    assert zoo.verify() == {}
    assert zoo.architecture == perceptron().architecture
    assert "4 members of lightning_sym.networks.MultiLayerPerceptron" in repr(zoo)


def test_load_gives_the_member_in_eval_mode(folder):
    network = ModelZoo.open(folder).load(7)
    assert isinstance(network, MultiLayerPerceptron)
    assert not network.training
    assert_same(network.state_dict(), perceptron().fresh(7).state_dict())


def test_unknown_metrics_are_named(folder):
    member = ModelZoo.open(folder).member(1)
    assert member.metric("val", "accuracy") == 0.1
    assert_refused(member.metric, "test", "accuracy", says="Member 1 has no metric test/accuracy; it has:")


def test_filter(folder):
    zoo = ModelZoo.open(folder)
    assert zoo.filter(lambda member: member.metric("val", "accuracy") >= 0.2).numbers == [2, 7]
    assert_refused(zoo.filter, lambda member: False, says="remains after the filter; it holds 4 members")


def test_summary(folder):
    summary = ModelZoo.open(folder).summary()
    assert summary["members"] == 4
    assert summary["damaged"] == 0
    values = [0.0, 0.1, 0.2, 0.7]
    mean = sum(values) / 4
    found = summary["metrics"]["val"]["accuracy"]
    assert found["min"] == 0.0
    assert found["max"] == 0.7
    assert found["mean"] == pytest.approx(mean, rel=1e-12)
    assert found["std"] == pytest.approx((sum((v - mean) ** 2 for v in values) / 3) ** 0.5, rel=1e-12)
    json.dumps(summary)


def test_pairs_are_distinct_uniform_and_from_the_seed(folder):
    zoo = ModelZoo.open(folder)
    count = 12_000
    pairs = zoo.pairs(count, seed=0)
    assert pairs == zoo.pairs(count, seed=0)
    assert pairs != zoo.pairs(count, seed=1)
    counts = {pair: pairs.count(pair) for pair in set(pairs)}
    possible = [(a, b) for a in zoo.numbers for b in zoo.numbers if a != b]
    assert set(counts) == set(possible)
    expected = count / len(possible)
    chi_square = sum((counts[pair] - expected) ** 2 / expected for pair in possible)
    assert chi_square < 31.3  # the 0.999 quantile for 11 degrees of freedom


def test_pairs_need_two_members_and_a_count(folder):
    zoo = ModelZoo.open(folder)
    assert_refused(zoo.pairs, 0, seed=0, says="count must be an integer >= 1, got 0")
    assert_refused(lambda: zoo.filter(lambda member: member.number == 0).pairs(1, seed=0), says="Pairs need at least")


# ---- the manifest


def test_manifest_says_all_about_every_member(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == zoo_module.FORMAT
    assert manifest["architecture"] == perceptron().architecture
    assert manifest["damaged"] == {}
    assert [entry["number"] for entry in manifest["members"]] == [0, 1, 2, 7]
    entry = manifest["members"][3]
    assert entry["file"] == member_file(7)
    assert entry["seed"] == 7
    assert entry["metrics"] == {"val": {"accuracy": 0.7, "loss": 1.0}}
    assert entry["sha256"] == _metadata(folder / member_file(7))["sha256"]
    assert entry.keys() >= {"data", "training", "versions", "created"}


def test_member_that_is_not_yet_in_the_manifest_is_there(folder):
    add(folder, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ModelZoo.open(folder).numbers == [0, 1, 2, 3, 7]


def test_member_that_is_gone_is_reported(folder):
    (folder / member_file(1)).unlink()
    with pytest.warns(UserWarning, match=r"member-0001.safetensors: listed in the manifest, but the file is gone"):
        zoo = ModelZoo.open(folder)
    assert zoo.numbers == [0, 2, 7]
    assert list(zoo.verify()) == [member_file(1)]
    assert_refused(zoo.load, 1, says=("Member 1 cannot be used:", "the file is gone"))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "other/1", "members": []}', "\x00\xff"])
def test_corrupt_manifest(folder, text):
    (folder / "manifest.json").write_text(text, encoding="latin-1")
    assert_refused(ModelZoo.open, folder, says=("manifest.json is not the manifest of a zoo", "; delete it"))
    rebuild_manifest(folder)  # what the message proposes
    assert len(ModelZoo.open(folder)) == 4


# ---- damage


def test_mixed_architectures(folder):
    add(folder, 3, perceptron(5))
    says = ("mixes architectures: member 0 is", "and member 3 is", "in a separate folder")
    assert_refused(ModelZoo.open, folder, says=says)
    assert_refused(rebuild_manifest, folder, says="mixes architectures")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_half_written_member_is_left_out(folder, share):
    file = folder / member_file(2)
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.warns(UserWarning, match=r"Left out .*member-0002.* is damaged or no zoo member"):
        zoo = ModelZoo.open(folder)
    assert zoo.numbers == [0, 1, 7]
    assert_refused(zoo.load, 2, says="Member 2 cannot be used")
    rebuild_manifest(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert list(manifest["damaged"]) == [member_file(2)]


def test_every_flipped_byte_is_found(tmp_path):
    file = write_member(
        tmp_path, 0, {"a": torch.randn(3), "b": torch.tensor(5)}, architecture=perceptron().architecture
    )
    content = file.read_bytes()
    member, tensors = read_member(file)
    for position in range(0, len(content), 3):
        flip(file, position)
        try:
            # Spaces that pad the header and digits of "format":"pt" carry nothing; whatever is read must be right.
            again, read = read_member(file)
            assert again == member, position
            assert_same(read, tensors, str(position))
        except ValueError:
            pass
        file.write_bytes(content)


def headed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "it claims to be member 2"),  # a copy under another name
        (save_safetensors({"a": torch.zeros(1)}), "it is no member of a zoo"),
        *(
            (headed(header), "is damaged or no zoo member")
            for header in (b"[]", b"{}", b'{"a": 1}', b'{"a": {"data_offsets": []}}', b"[" * 100_000)
        ),
    ],
)
def test_files_that_are_no_member_of_their_number_are_left_out(folder, content, reason):
    (folder / member_file(3)).write_bytes(content or (folder / member_file(2)).read_bytes())
    with pytest.warns(UserWarning, match=f"member-0003.*{reason}"):
        assert ModelZoo.open(folder).numbers == [0, 1, 2, 7]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("number", 1e400, "its number is 'inf', and should be of type int"),
        ("number", 2.0, "its number is '2.0', and should be of type int"),
        ("number", True, "its number is 'True'"),
        ("number", -2, "its number is -2, and should be at least 0"),
        ("metrics", [1], "its metrics is"),
        ("metrics", {"val": 3}, "its metrics of val are '3', and should be numbers by name"),
        ("metrics", {"val": {"accuracy": "high"}}, "its metric val/accuracy is 'high', and should be a finite number"),
        ("metrics", {"val": {"loss": float("nan")}}, "its metric val/loss is 'nan'"),
        ("metrics", {"val": {"loss": [1.0]}}, "its metric val/loss"),
        ("architecture", "lightning_sym.networks.LeNet5", "its architecture is"),
        ("architecture", {"class_path": 3}, "its architecture has no class_path"),
        ("architecture", {"class_path": "a.B", "init_args": []}, "its architecture has no class_path, or init_args"),
        ("data", None, "its data is 'None'"),
        ("training", 3, "its training is '3'"),
        ("created", {}, "its created is"),
    ],
)
def test_records_of_wrong_types_are_left_out_and_the_others_are_read(folder, name, value, reason):
    edit_record(folder / member_file(2), **{name: value})
    with pytest.warns(UserWarning, match=f"member-0002.*{re.escape(reason)}"):
        zoo = ModelZoo.open(folder)
    assert zoo.numbers == [0, 1, 7]
    assert zoo.summary()["metrics"]["val"]["loss"]["mean"] == 1.0


def edit_weights(file: Path, **changes: torch.Tensor) -> None:
    """Write a member anew with other weights and checksums that fit them."""
    _, tensors = read_member(file)
    tensors |= changes
    metadata = _metadata(file)
    metadata |= {"sha256": zoo_module._checksum(metadata["member"], tensors)}
    file.write_bytes(save_safetensors(tensors, metadata=metadata))


def test_weights_that_are_not_finite_are_not_read_unless_that_is_meant(folder):
    name = next(iter(perceptron().state_dict()))
    value = perceptron().state_dict()[name].clone()
    value.view(-1)[1] = torch.inf
    edit_weights(folder / member_file(2), **{name: value})
    zoo = ModelZoo.open(folder)
    for read in (zoo.state, zoo.load):
        assert_refused(read, 2, says=f"Member 2 of {folder} has values that are not finite in {name}: it diverged")
        read(1)
    assert zoo.state(2, finite=False)[name].isinf().sum() == 1
    assert zoo.load(2, finite=False).state_dict()[name].isinf().sum() == 1
    assert "not finite" in zoo.verify()[member_file(2)]


@pytest.mark.parametrize("dtype", ["complex64", "int32", "bool"])
def test_weights_of_another_kind_of_number_are_not_read(folder, dtype):
    name, value = next(iter(perceptron().state_dict().items()))
    edit_weights(folder / member_file(2), **{name: value.to(getattr(torch, dtype))})
    said = f"holds {name!r} as torch.{dtype}, but the network has it as torch.float32"
    assert_refused(ModelZoo.open(folder).load, 2, says=said)


def test_headers_may_be_as_large_as_the_limit_and_no_larger(folder, monkeypatch):
    file = folder / member_file(2)
    size = int.from_bytes(file.read_bytes()[:8], "little")
    monkeypatch.setattr(zoo_module, "_LARGEST_HEADER", size)
    assert read_member(file)[0].number == 2
    monkeypatch.setattr(zoo_module, "_LARGEST_HEADER", size - 1)
    assert_refused(read_member, file, says="it is truncated, or not a safetensors file")


def test_only_damaged_members(tmp_path):
    (tmp_path / member_file(0)).write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="Left out"),
        pytest.raises(FileNotFoundError, match=r"holds 1 damaged member\(s\) only\. Delete them"),
    ):
        ModelZoo.open(tmp_path)


class Payload:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (os.system, (f"touch {self.target}",))


@pytest.mark.parametrize("writer", [pickle.dump, torch.save])
def test_pickle_renamed_to_safetensors_is_not_executed(folder, tmp_path, writer):
    proof = tmp_path / "executed"
    file = folder / member_file(3)
    with file.open("wb") as handle:
        writer(Payload(proof), handle)
    with pytest.warns(UserWarning, match=r"member-0003.* is damaged or no zoo member"):
        zoo = ModelZoo.open(folder)
    assert_refused(zoo.load, 3, says="damaged or no zoo member")
    assert_refused(read_member, file, says="damaged or no zoo member")
    assert not proof.exists()
    with file.open("rb") as handle:
        pickle.load(handle) if writer is pickle.dump else torch.load(handle, weights_only=False)
    assert proof.exists()  # the payload would have worked


# ---- class paths


def test_class_path_in_the_manifest_is_not_used(folder):
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["architecture"] = {"class_path": "os.system", "init_args": {"command": "true"}}
    file.write_text(json.dumps(manifest))
    zoo = ModelZoo.open(folder)
    assert zoo.architecture == perceptron().architecture
    assert isinstance(zoo.load(0), MultiLayerPerceptron)


class Tiny(Network):
    """A network of the user's own package."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(size, 2)

    def forward(self, x):
        return self.layer(x)


def test_package_of_the_user_needs_allow(tmp_path):
    network = build({"class_path": f"{__name__}.Tiny", "init_args": {"size": 5}}, [__name__])
    add(tmp_path, 0, network)
    assert_refused(lambda: ModelZoo.open(tmp_path).load(0), says="is not in the allow-list")
    zoo = ModelZoo.open(tmp_path, allow=[__name__])
    for view in (zoo, zoo.filter(lambda member: True)):
        assert torch.equal(view.load(0).layer.weight, network.fresh(0).layer.weight)


def test_passing_a_network(folder):
    for number in (0, 1, 2, 7):
        edit_record(folder / member_file(number), architecture={"class_path": "elsewhere.Net", "init_args": {}})
    network = perceptron()
    before = copy.deepcopy(network.state_dict())
    zoo = ModelZoo.open(folder, network=network)
    assert torch.equal(zoo.load(1).classifier.weight, network.fresh(1).classifier.weight)
    assert_same(network.state_dict(), before)


def test_weights_that_do_not_fit(folder):
    zoo = ModelZoo.open(folder, network=perceptron(5))
    with pytest.raises(
        ValueError, match=r"Member 1 of .* does not fit the network MultiLayerPerceptron: .*linear1"
    ) as e:
        zoo.load(1)
    assert "\n" not in str(e.value)


# ---- several processes, full disks, unwritable folders


def _write_some(path: Path, first: int) -> None:
    for number in range(first, first + 5):
        add(path, number)
        rebuild_manifest(path)


def test_four_processes_add_members_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    torch.set_num_threads(1)  # forked processes must not meet the threads of this one
    writers = [context.Process(target=_write_some, args=(tmp_path, 5 * index)) for index in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 4
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [entry["number"] for entry in manifest["members"]] == list(range(20))
    zoo = ModelZoo.open(tmp_path)
    assert zoo.verify() == {}
    assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp"))


@pytest.mark.long
def test_reading_while_a_member_is_replaced(tmp_path):
    """A reader sees the old member or the new one, whatever their sizes, never a damaged one."""
    context = multiprocessing.get_context("fork")
    add(tmp_path, 0, training={"note": ""})
    writer = context.Process(target=_replace, args=(tmp_path,))
    writer.start()
    reads = 0
    while writer.is_alive():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ModelZoo.open(tmp_path).load(0)
        reads += 1
    writer.join()
    assert writer.exitcode == 0
    assert reads > 5


def _replace(path: Path) -> None:
    for index in range(150):
        add(path, 0, training={"note": "x" * (1000 * (index % 2))})


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_full_disk(folder, monkeypatch, call):
    old = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "fsync":
        monkeypatch.setattr(lightning_sym._files.os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    assert_refused(add, folder, 2, training={"new": True}, says="member-0002.safetensors: No space left", error=OSError)
    assert_refused(rebuild_manifest, folder, says="manifest.json: No space left on device", error=OSError)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == old


def test_interrupt_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lightning_sym._files.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        add(tmp_path, 0)
    assert not list(tmp_path.iterdir())


def test_file_in_place_of_the_folder(tmp_path):
    blocked = tmp_path / "zoo"
    blocked.touch()
    assert_refused(add, blocked, 0, says="member-0000.safetensors:", error=FileExistsError)
    assert_refused(ModelZoo.open, blocked, says="the folder does not exist", error=FileNotFoundError)
