"""``lightning-sym merge``: checkpoints in, the mean of aligned networks out."""

import copy
import errno
import functools
import gc
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import OURS
from commands import MLP, X, call, perceptron, succeed
from fits import descended
from helpers import assert_refused, one_in, randomize_statistics
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_sym.connectivity import average
from lightning_sym.connectivity.interpolation import mean_tensors
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.merging import METHODS, MergeConfig, MergedCheckpoints, merge_checkpoints
from lightning_sym.merging.checkpoint import Checkpoint
from lightning_sym.merging.network_files import NetworkFiles
from lightning_sym.networks import MultiLayerPerceptron, VisionTransformer
from lightning_sym.reports.merging import UNITS
from lightning_sym.symmetry import Symmetry, trace_symmetry, without_weights
from lightning_sym.symmetry import files as symmetry_files
from lightning_sym.symmetry.arrays import give_back_memory
from lightning_sym.symmetry.proof import double_copies
from lightning_sym.symmetry.tracing.graph.capture import state_tensors
from lightning_sym.zoo import ModelZoo

pytestmark = pytest.mark.long

NETS = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, 4), nn.BatchNorm1d(8)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.head = nn.Linear(4, 9, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.example_input_array = torch.randint(9, (2, 3))

    def forward(self, ids):
        hidden = self.embed(ids)
        return self.head(hidden + self.down(torch.relu(self.norm(self.up(hidden).mT)).mT))
"""


class Named(nn.Sequential):
    """A network that puts out its logits among other things."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"features": x.flatten(1), "logits": super().forward(x.flatten(1))}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    Path("merge_nets.py").write_text(NETS)
    monkeypatch.delitem(sys.modules, "merge_nets", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def tied(seed: int = 0) -> nn.Module:
    import merge_nets

    torch.manual_seed(seed)
    found: nn.Module = merge_nets.Tied().eval()
    found.norm.running_mean.normal_()
    found.norm.running_var.uniform_(0.5, 2.0)
    return found


@functools.cache
def symmetry_of_perceptron() -> Symmetry:
    return trace_symmetry(perceptron(), X)


def planted(symmetry: Symmetry, network: nn.Module, seed: int = 1, **settings: Any) -> nn.Module:
    return symmetry.act(symmetry.sample(torch.Generator().manual_seed(seed), **settings), network)


def as_lightning(network: nn.Module, name: str) -> str:
    content = {"state_dict": {f"model.{n}": t for n, t in network.state_dict().items()}, "epoch": 3}
    torch.save(content, name)
    return name


def as_state_dict(network: nn.Module, name: str) -> str:
    torch.save(network.state_dict(), name)
    return name


def as_shards(network: nn.Module, name: str, dtype: torch.dtype = torch.float32, prefix: str = "") -> str:
    """Write two files of safetensors and their index, tied weights once; return the index."""
    Path(name).mkdir(parents=True)
    names = dict.fromkeys(dict(network.named_parameters()) | dict(network.named_buffers()))
    state = {n: t.to(dtype) if t.is_floating_point() else t for n, t in network.state_dict().items() if n in names}
    files = {f"{prefix}{n}": f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(state)}
    for file in set(files.values()):
        own = {f"{prefix}{n}": t.clone() for n, t in state.items() if files[f"{prefix}{n}"] == file}
        save_file(own, Path(name) / file, {"format": "pt"})
    index = Path(name) / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return str(index)


def read_shards(index: Path) -> dict[str, Tensor]:
    files = set(json.loads(index.read_text())["weight_map"].values())
    return {name: tensor for file in sorted(files) for name, tensor in load_file(index.parent / file).items()}


@pytest.mark.parametrize("align", ["weights", "activations"])
@pytest.mark.parametrize("save", [as_state_dict, as_lightning])
def test_a_planted_element_is_found(save: Callable[[nn.Module, str], str], align: str) -> None:
    a = perceptron()
    files = save(a, "a.ckpt"), save(planted(symmetry_of_perceptron(), a), "b.ckpt")
    data = ("--data=DigitsDataModule", "--data.max_samples=80", "--points=3") if align == "activations" else ()
    for out, options in (("m", ()), ("aligned", ("--align-only",))):
        result = succeed("merge", *files, *MLP, f"--align={align}", *options, *data, f"--out=new/{out}.safetensors")
        found = load_file(f"new/{out}.safetensors")
        assert found.keys() == a.state_dict().keys()
        for name, tensor in a.state_dict().items():
            assert torch.allclose(found[name], tensor, rtol=0, atol=1e-6)
        rows = json.loads(Path(f"new/{out}-report/lines.json").read_text())["rows"]
        before, after = (row["distance"] for row in rows)
        assert after < 1e-5 < before
        assert [row["equal"] for row in rows] == [False, True]
        assert "b.ckpt: equal to a.ckpt up to symmetry, to rounding" in " ".join(result.out.split())
        if data:
            assert {row["alignment"]: row["loss_barrier"] < 1e-4 for row in rows} == {
                "unmatched": False,
                "aligned": True,
            }
            assert Path(f"new/{out}-report/interpolation.png").is_file()
        else:
            assert "without data there are no losses, no barrier and no recalibration" in " ".join(result.out.split())


def test_members_of_a_zoo_of_vision_transformers() -> None:
    torch.manual_seed(0)
    settings = {"in_channels": 1, "image_size": 8, "width": 8, "depth": 1, "heads": 2}
    a = VisionTransformer(**settings).eval()
    with torch.no_grad():
        for parameter in a.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    b = planted(trace_symmetry(a, X), a)
    ModelZoo.add("zoo", [a, b], network=a)
    files = [f"zoo/member-000{number}.safetensors" for number in range(2)]
    options = [f"--network.{name}={value}" for name, value in settings.items()]
    succeed("merge", *files, "--network=VisionTransformer", *options, "--input=1,8,8", "--out=m.safetensors")
    succeed("merge", "zoo", "--out=whole.safetensors")
    for name, tensor in load_file("m.safetensors").items():
        assert torch.equal(load_file("whole.safetensors")[name], tensor)
    merged = VisionTransformer(**settings).eval()
    merged.load_state_dict(load_file("m.safetensors"))
    torch.testing.assert_close(merged(X), a(X), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(dict(merged.named_parameters()), dict(a.named_parameters()), rtol=1e-2, atol=1e-3)


def test_shards_keep_their_form_and_tied_weights_their_tie() -> None:
    a = tied()
    symmetry = trace_symmetry(a, torch.randint(9, (2, 3)))
    b = planted(symmetry, a)
    indices = as_shards(a, "a", prefix="model."), as_shards(b, "b")
    common = ("merge", *indices, "--network=merge_nets.Tied")
    result = succeed(*common, "--out=merged")
    assert "match no network (--recalibrate)" in " ".join(result.out.split())
    found = read_shards(Path("merged/model.safetensors.index.json"))
    assert found.keys() == read_shards(Path(indices[0])).keys()
    for name, tensor in a.state_dict().items():
        if name != "head.weight":
            assert torch.allclose(found[f"model.{name}"].float(), tensor.float(), rtol=0, atol=1e-5)
    succeed(*common, "--out=aligned", "--align-only")
    assert read_shards(Path("aligned/model.safetensors.index.json")).keys() == read_shards(Path(indices[1])).keys()
    assert not list(Path().rglob("*.tmp"))


def as_file(network: nn.Module, name: str, dtype: torch.dtype) -> str:
    """Write one file of safetensors, of tied weights the second name only."""
    state = {n: t.to(dtype) if t.is_floating_point() else t for n, t in network.state_dict().items()}
    del state["embed.weight"]
    save_file(state, f"{name}.safetensors", {"epoch": "3"})
    return f"{name}.safetensors"


def as_pickle(network: nn.Module, name: str, dtype: torch.dtype) -> str:
    torch.save({n: t.to(dtype) if t.is_floating_point() else t for n, t in network.state_dict().items()}, f"{name}.pt")
    return f"{name}.pt"


@pytest.mark.parametrize(
    ("save", "count", "dtype", "tolerance"),
    [
        (as_pickle, 2, torch.float64, 1e-12),
        (as_pickle, 3, torch.float16, 1e-2),
        (as_file, 2, torch.bfloat16, 5e-2),
        (as_file, 3, torch.float32, 1e-5),
        (as_shards, 3, torch.float32, 1e-5),
        (as_shards, 2, torch.bfloat16, 5e-2),
    ],
)
def test_what_is_written_is_the_mean_of_networks_that_elements_act_on(
    save: Callable[[nn.Module, str, torch.dtype], str], count: int, dtype: torch.dtype, tolerance: float
) -> None:
    networks = [tied(seed).to(dtype) for seed in range(count)]
    files = [save(network, f"n{seed}", dtype) for seed, network in enumerate(networks)]
    types = {name: tensor.dtype for name, tensor in networks[0].state_dict().items()}
    out = "m" if save is as_shards else "m.safetensors"
    with without_weights():
        empty = tied()
    found = merge_checkpoints(files, out, network=empty, inputs=torch.randint(9, (2, 3)))
    moved = [found.symmetry.act(e, own.double()) for e, own in zip(found.elements, networks, strict=True)]
    written = read_shards(found.out) if save is as_shards else load_file(found.out)
    assert written.keys() | {"embed.weight", "head.weight"} == types.keys()
    expected = average(moved).state_dict()
    for name, tensor in written.items():
        assert tensor.dtype == types[name]
        torch.testing.assert_close(tensor.double(), expected[name].double(), rtol=tolerance, atol=tolerance)
    assert found.distances[0][1] < found.distances[0][0]


def peak_of(function: Callable[[], object]) -> float:
    """Return how much more memory of its own a process takes at most while it calls a function, in bytes."""

    def own() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

    def measure(connection: Connection) -> None:
        gc.collect()
        give_back_memory()
        before, peaks, done = own(), [0], threading.Event()

        def watch() -> None:
            while not done.wait(0.005):
                peaks[0] = max(peaks[0], own() - before)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            function()
        finally:
            done.set()
            watching.join()
        connection.send(peaks[0])

    theirs, ours = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=measure, args=(ours,))
    child.start()
    ours.close()
    peak: int = theirs.recv()
    child.join()
    return peak


ON_LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs to know what memory is its own")


def deep(width: int, depth: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 8))


@ON_LINUX
def test_all_but_matching_needs_the_memory_of_a_few_tensors() -> None:
    for seed in range(2):
        save_file(deep(512, 30, seed).state_dict(), f"{seed}.safetensors")
    with without_weights():
        empty = deep(512, 30)

    def work() -> None:
        copies = NetworkFiles(Path())
        one, two = (Checkpoint.read(f"{seed}.safetensors", empty, None, copies) for seed in range(2))
        with double_copies(copies.placed):
            symmetry = trace_symmetry(one.network, torch.randn(2, 512))
        mean = copies.copy(one.network, mean_tensors([one.network, two.network]))
        moved = symmetry.act(symmetry.sample(), mean, inplace=True, check=False)
        one.write(state_tensors(moved), Path("m.safetensors"))

    symmetry_of_perceptron()  # what tracing imports is no part of it
    # Three networks, two of them in double precision for a while, and what the tracing keeps.
    assert peak_of(work) < 1.5 * Path("0.safetensors").stat().st_size


def test_vision_transformers_are_merged_by_activations() -> None:
    data = DigitsDataModule(max_samples=300)
    settings = {"in_channels": 1, "image_size": 8, "patch_size": 4, "width": 8, "depth": 1, "heads": 2}
    for seed in range(3):
        torch.manual_seed(seed)
        network = VisionTransformer(**settings)
        as_state_dict(descended(network, data, steps=60, lr=5e-3), f"{seed}.pt")
    options = [f"--network.{name}={value}" for name, value in settings.items()]
    succeed(
        *("merge", "0.pt", "1.pt", "2.pt", "--network=VisionTransformer", *options, "--align=activations"),
        *("--data=DigitsDataModule", "--data.max_samples=300", "--points=3", "--out=m.safetensors"),
    )
    lines = json.loads(Path("m-report/lines.json").read_text())["rows"]
    barriers = [[r["loss_barrier"] for r in lines if r["alignment"] == name] for name in ("unmatched", "aligned")]
    assert all(after < before for before, after in zip(*barriers, strict=True))
    rows = {row["weights"]: row["loss"] for row in json.loads(Path("m-report/networks.json").read_text())["rows"]}
    assert rows["merged, aligned"] < rows["merged, unaligned"]


@pytest.mark.filterwarnings("ignore:The mean over batches of other sizes:UserWarning")
def test_a_mean_that_alignment_makes_worse_is_said_to_be() -> None:
    a = perceptron()
    b = planted(symmetry_of_perceptron(), a)
    with torch.no_grad():  # equal networks merge to themselves whatever the loss
        next(b.parameters()).mul_(1.01)
    files = as_state_dict(a, "a.pt"), as_state_dict(b, "b.pt")
    data = DigitsDataModule(max_samples=80).test_dataloader()
    merge = functools.partial(merge_checkpoints, files, network=a, inputs=X, data=data, points=2)
    found = merge("m.safetensors", loss=lambda outputs, _: outputs.var())  # small where units cancel one another
    assert "no network was aligned, as the loss on these data is lower without alignment" in found.notes[-1]
    assert "try --align activations" in found.notes[-1]
    for name, tensor in average([a, Checkpoint.read(files[1], a).network]).state_dict().items():
        assert torch.equal(load_file("m.safetensors")[name], tensor)
    assert not any("lower" in note for note in merge("n.safetensors").notes)


def test_double_precision_is_kept() -> None:
    a = perceptron().double()
    b = planted(symmetry_of_perceptron(), a)
    save_file(a.state_dict(), "a.safetensors")
    data = DigitsDataModule(max_samples=80)
    found = merge_checkpoints(
        ["a.safetensors", as_state_dict(b, "b.pt")], "m.safetensors", network=perceptron(3), inputs=X, points=3,
        data=data.test_dataloader(), train=data.curvature_dataloader(), align="activations",
    )  # fmt: skip
    for name, tensor in load_file("m.safetensors").items():
        assert tensor.dtype == torch.float64
        assert torch.allclose(tensor, a.state_dict()[name], rtol=0, atol=1e-12)
    assert found.largest_change < 1e-10
    assert found.distances[0][1] < 1e-12 < found.distances[0][0]


def answers(found: MergedCheckpoints) -> list[str]:
    """Return whether each checkpoint but the first was found to be equal to it, up to symmetry."""
    return [after.answer for _, after in found.equal]


def test_one_weight_or_statistic_that_differs_makes_networks_unequal() -> None:
    torch.manual_seed(0)
    a = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)).eval()
    symmetry = trace_symmetry(a, X)
    others = [planted(symmetry, a) for _ in range(3)]
    with torch.no_grad():
        others[1].get_parameter("4.bias")[3] += 1e-4
        others[2].get_buffer("2.running_mean")[5] += 1e-4
    files = [as_state_dict(own, f"{name}.pt") for name, own in zip("abcd", (a, *others), strict=True)]
    found = merge_checkpoints(files, "m.safetensors", network=a, inputs=X)
    assert answers(found) == ["equal", "not found", "not found"]
    assert found.notes[:2] == (
        "b.pt: equal to a.pt up to symmetry, to rounding",
        "c.pt, d.pt: not found to equal a.pt, as outputs differ on 64 random inputs",
    )


@pytest.mark.parametrize("large", ["bias", "row", "column", "scale"])
def test_large_numbers_do_not_hide_that_others_differ(large: str) -> None:
    a = perceptron()
    with torch.no_grad():
        weight, bias = a.classifier.weight, a.classifier.bias
        if large == "bias":
            bias[0] = 1e5
        elif large == "row":
            weight[0] *= 1e5
        elif large == "column":
            weight[:, 0] *= 1e5
        else:
            a.linear1.weight[0] *= 1e4
    b = planted(symmetry_of_perceptron(), a)
    equal = merge_checkpoints(
        [as_state_dict(a, "a.pt"), as_state_dict(b, "b.pt")], "n.safetensors", network=a, inputs=X
    )
    assert answers(equal) == ["equal"]
    with torch.no_grad():
        b.classifier.weight[3, 2] *= 1.01
    found = merge_checkpoints(["a.pt", as_state_dict(b, "c.pt")], "m.safetensors", network=a, inputs=X)
    assert answers(found) == ["same function" if large == "column" else "not found"]


def test_a_bias_that_takes_up_a_shift_is_known_as_well_as_what_was_added_up() -> None:
    """Biases in front of a batch norm take up large means that cancel, as in pitch networks."""
    torch.manual_seed(0)
    layers = nn.Linear(64, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()
    a = nn.Sequential(nn.Flatten(), *layers, nn.Linear(8, 10)).eval()
    with torch.no_grad():
        a[3].running_mean += 30
        a[4].weight *= 20
        a[4].bias.copy_(a[4].weight @ a[3].running_mean / 20)
        a[5].running_mean.copy_(a[4].bias + 0.1)
    symmetry = trace_symmetry(a, X)
    assert symmetry.structure.shifts
    files = [as_state_dict(a, "a.pt"), as_state_dict(planted(symmetry, a), "b.pt")]
    found = merge_checkpoints(files, "m.safetensors", network=a, inputs=X)
    assert answers(found) == ["equal"]


@pytest.mark.parametrize("types", [(torch.float64, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_files_of_other_types_may_be_equal(types: tuple[torch.dtype, torch.dtype]) -> None:
    a = perceptron()
    files = [
        as_pickle(own, name, dtype)
        for own, name, dtype in zip((a, planted(symmetry_of_perceptron(), a)), "ab", types, strict=True)
    ]
    found = merge_checkpoints(files, "m.safetensors", network=a, inputs=X)
    assert answers(found) == ["equal"]
    assert any(f"as {str(types[1])[6:]}, and a.pt as {str(types[0])[6:]}: it was converted" in n for n in found.notes)
    assert {tensor.dtype for tensor in load_file("m.safetensors").values()} == {types[0]}
    with torch.no_grad():
        a.classifier.weight[3] *= 1.1
    files[0] = as_pickle(a, "c", types[0])
    assert answers(merge_checkpoints(files, "n.safetensors", network=a, inputs=X)) != ["equal"]


@pytest.mark.parametrize("name", one_in(6, [name for name in OURS if name not in ("resnet44", "resnet56")]))
def test_a_network_is_equal_to_what_any_element_makes_of_it(name: str) -> None:
    torch.manual_seed(0)
    make, shape = OURS[name]
    a, x = randomize_statistics(make()).eval(), torch.randn(2, *shape)
    with torch.no_grad():
        for own in a.parameters():  # biases of norms that are zero leave tilts without a form (theory/matching.md, 1.8)
            own.add_(0.05 * torch.randn_like(own))
    symmetry = trace_symmetry(a, x)
    b = planted(symmetry, a)
    files = as_state_dict(a, "a.pt"), as_state_dict(b, "b.pt")
    assert answers(merge_checkpoints(files, "m.safetensors", network=a, inputs=x)) == ["equal"]
    with torch.no_grad():
        for own in b.parameters():
            own.mul_(1 + 1e-5 * torch.randn_like(own))
    files = files[0], as_state_dict(b, "c.pt")
    assert answers(merge_checkpoints(files, "n.safetensors", network=a, inputs=x)) == ["not found"]


def test_the_same_function_that_is_not_found_is_said_to_be_the_same() -> None:
    torch.manual_seed(0)
    a = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)).eval()
    b = copy.deepcopy(a)
    with torch.no_grad():  # a dead unit, whose outgoing weights are of no account and which no element changes
        for own, outgoing in ((a, 1.0), (b, 3.0)):
            own.get_parameter("1.weight")[2], own.get_parameter("1.bias")[2] = 0, -1
            own.get_parameter("3.weight")[:, 2] = torch.linspace(-outgoing, 1, 10)
    found = merge_checkpoints(
        [as_state_dict(a, "a.pt"), as_state_dict(b, "b.pt")], "m.safetensors", network=a, inputs=X
    )
    assert answers(found) == ["same function"]
    assert "b.pt: the same function as a.pt on 64 random inputs, by other weights (3.weight at " in found.notes[0]


def test_a_network_that_is_nearer_as_it_is_stays() -> None:
    torch.manual_seed(0)
    a = MultiLayerPerceptron(widths=(32, 32), in_channels=1, image_size=8).eval()
    b = copy.deepcopy(a)
    with torch.no_grad():
        for own in b.parameters():
            own.add_(0.3 * own.std() * torch.randn_like(own))
    files = [as_state_dict(a, "a.pt"), as_state_dict(b, "b.pt")]
    found = merge_checkpoints(files, "m.safetensors", network=a, inputs=X)
    before, after = found.distances[0]
    assert after == before
    assert any(note.startswith("b.pt ") and note.endswith(": unchanged") for note in found.notes)
    for name, tensor in average([a, b]).state_dict().items():
        assert torch.equal(load_file("m.safetensors")[name], tensor)


@pytest.mark.slow
def test_means_of_trained_networks_are_better_after_alignment() -> None:
    data = DigitsDataModule()
    networks = [descended(perceptron(seed), data, steps=60, lr=5e-3) for seed in range(3)]
    files = [as_state_dict(network, f"{seed}.pt") for seed, network in enumerate(networks)]
    result = succeed("merge", *files, *MLP, "--out=m.safetensors", "--data=DigitsDataModule", "--points=3")
    rows = {row["weights"]: row for row in json.loads(Path("m-report/networks.json").read_text())["rows"]}
    assert list(rows) == ["0.pt", "1.pt", "2.pt", "merged, unaligned", "merged, aligned"]
    assert rows["merged, aligned"]["accuracy"] > rows["merged, unaligned"]["accuracy"] + 0.1
    lines = json.loads(Path("m-report/lines.json").read_text())["rows"]
    barriers = [[row["loss_barrier"] for row in lines if row["alignment"] == name] for name in ("unmatched", "aligned")]
    assert all(after < before for before, after in zip(*barriers, strict=True))
    assert "merged, aligned" in result.out
    # What was written is what was measured.
    network = perceptron()
    network.load_state_dict(load_file("m.safetensors"))
    x, y = (torch.cat(parts) for parts in zip(*data.test_dataloader(), strict=True))
    assert (network(x).argmax(1) == y).float().mean().item() == pytest.approx(rows["merged, aligned"]["accuracy"])


@pytest.mark.slow
def test_statistics_of_batch_norms_are_measured_anew() -> None:
    ids = torch.randint(9, (64, 3), generator=torch.Generator().manual_seed(0))
    a, b = tied(0), tied(1)
    files = [as_state_dict(a, "a.pt"), as_state_dict(b, "b.pt")]
    common = {"network": a, "inputs": ids[:2], "train": [(ids[:40], ids[:40]), (ids[40:], ids[40:])]}
    merge_checkpoints(files, "plain.safetensors", **common)  # type: ignore[arg-type]
    merge_checkpoints(files, "new.safetensors", **common, recalibrate=True)  # type: ignore[arg-type]
    plain, new = load_file("plain.safetensors"), load_file("new.safetensors")
    changed = {name for name in plain if not torch.equal(plain[name], new[name])}
    assert changed - {"norm.num_batches_tracked"} == {"norm.running_mean", "norm.running_var"}
    network = tied()
    network.load_state_dict({**new, "head.weight": new["embed.weight"]})
    seen: list[Tensor] = []
    network.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    network(ids[:40])  # the batch of another size is left out
    assert torch.allclose(seen[0].mean((0, 2)), network.norm.running_mean, atol=1e-5)


@pytest.mark.parametrize(("kind", "shards"), [("llama", 2), ("gpt2", 1), ("gpt2", 0)])
def test_folders_of_transformers_become_a_folder_that_they_load(kind: str, shards: int) -> None:
    """Shards: how many files of safetensors; 0: the older pickle."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {
        "llama": lambda: transformers.LlamaConfig(**sizes, vocab_size=14),
        "gpt2": lambda: transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=14, n_positions=8),
    }[kind]()
    torch.manual_seed(0)
    networks = [transformers.AutoModelForCausalLM.from_config(config).eval() for _ in range(2)]
    for number, network in enumerate(networks):
        network.save_pretrained(f"n{number}", max_shard_size="2KB" if shards > 1 else "5GB")
        if not shards:
            Path(f"n{number}/model.safetensors").unlink()
            torch.save(network.state_dict(), f"n{number}/pytorch_model.bin")
    Path("n0/tokenizer.json").write_text("{}")
    for name in ("optimizer.pt", "README.md", ".hidden", "tf_model.h5"):
        Path("n0", name).write_text("no part of the result")
    succeed("merge", "n0", "n1", "--out=merged")
    left_out = {"optimizer.pt", ".hidden", "tf_model.h5", "pytorch_model.bin"}
    there = {path.name for path in Path("n0").iterdir()} - left_out
    assert {path.name for path in Path("merged").iterdir()} == there | ({"model.safetensors"} if not shards else set())
    assert Path("merged/tokenizer.json").read_text() == "{}"
    assert "`linear`" in Path("merged/README.md").read_text()
    again, info = transformers.AutoModelForCausalLM.from_pretrained("merged", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    own, mean = dict(networks[0].named_parameters()), dict(again.named_parameters())
    assert own.keys() == mean.keys()
    assert not any(torch.equal(own[name], mean[name]) for name in own if own[name].ndim > 1)
    succeed("merge", "n0", "n1", "--align-only", "--out=aligned")
    ids = torch.randint(14, (2, 6))
    aligned = transformers.AutoModelForCausalLM.from_pretrained("aligned").eval()
    torch.testing.assert_close(aligned(ids).logits, networks[1](ids).logits, rtol=1e-3, atol=1e-4)


def test_tables_explain_their_columns_and_an_existing_report_names_a_remedy() -> None:
    gpt2_folders("p", "a", "b")
    said = " ".join(succeed("merge", "a", "b", "--base=p", "--method=ties", "--out=m").out.split())
    for column in ("equal", "dropped", "conflicts", "after", "cosine"):
        assert f" {column}: {UNITS[column]}" in said
    assert "a, b: not found to equal p, as outputs differ" in said
    rows = json.loads(Path("m-report/differences.json").read_text())["rows"]
    assert [row["after"] for row in rows] == ["b", "a"]
    shutil.rmtree("m")
    error = call("merge", "a", "b", "--out=m").error
    assert "m-report exists already, the report of an earlier merge; remove it, or choose another --out." in error
    single = succeed("merge", "a", "--base=p", "--method=ties", "--out=n").out
    assert "conflicts" in single
    assert "cosine" not in single  # there is no other network


def test_the_statistics_of_one_network_are_no_averages() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    file = as_state_dict(network, "a.pt")
    for files, method, averages in (([file], "passthrough", False), ([file, file], "linear", True)):
        out = f"{method}.safetensors"
        found = merge_checkpoints(files, out, network=network, inputs=X, method=method)
        assert any("statistics are averages" in note for note in found.notes) == averages


def test_passthrough_merges_one_file() -> None:
    a = perceptron()
    succeed("merge", as_state_dict(a, "a.pt"), *MLP, "--method=passthrough", "--scale=0.5", "--out=m.safetensors")
    found = load_file("m.safetensors")
    for name, tensor in a.state_dict().items():
        assert torch.equal(found[name], tensor / 2)


def test_an_unknown_architecture_is_named_in_one_sentence() -> None:
    gpt2_folders("a", "b")
    Path("b/config.json").write_text(Path("b/config.json").read_text().replace("GPT2LMHeadModel", "GPT2Head"))
    assert (
        "error: b names the architecture 'GPT2Head', which transformers does" in call("merge", "b", "a", "--out=m").err
    )


def test_a_network_that_no_option_names_is_that_of_the_files_folder() -> None:
    gpt2_folders("a", "b")
    state = load_file("b/model.safetensors")
    save_file({name: own for name, own in state.items() if "ln_f" not in name}, "b/model.safetensors", {"format": "pt"})
    for options in (("a", "b"), ("a", "b", "--tokens=14"), ("a/model.safetensors", "b/model.safetensors")):
        error = call("merge", *options, "--out=m").error
        assert "check that all its shards are there, and that b/config.json describes the network" in error
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1, num_labels=3)
    for name in ("c", "d"):
        transformers.ViTForImageClassification(config).save_pretrained(name)
    error = call("merge", "c", "d", "--out=m", "--data=DigitsDataModule").error
    assert "c cannot be run on DigitsDataModule (" in error
    assert "give the data that it was trained on, and check its configuration." in error


def gpt2_folders(*names: str) -> dict[str, nn.Module]:
    """Write a parent of GPT-2's architecture and fine-tunes of it as folders."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=14, n_positions=8)
    torch.manual_seed(0)
    parent = transformers.GPT2LMHeadModel(config).eval()
    found = {}
    for number, name in enumerate(names):
        found[name] = copy.deepcopy(parent)
        if number:
            with torch.no_grad():
                for own in found[name].parameters():
                    own.add_(0.01 * torch.randn_like(own))
        found[name].save_pretrained(name)
    return found


def test_a_configuration_does_what_the_options_do_and_the_result_holds_it() -> None:
    networks = gpt2_folders("parent", "code", "maths")
    options = "--base=parent --method=dare_ties --weight=0.5,0.3 --density=0.5 --lambda=0.9 --seed=4 --rescale=false"
    succeed("merge", "code", "maths", *options.split(), "--out=merged")
    card = Path("merged/README.md").read_text()
    assert "`dare_ties` (arXiv:2311.03099)" in card
    Path("again.yml").write_text(card.partition("```yaml\n")[2].partition("```")[0])
    succeed("merge", "again.yml", "--out=again")
    Path("own.yml").write_text(
        "merge_method: dare_ties\nbase_model: ./parent\nmodels:\n"
        "  - {model: ./code, parameters: {weight: 0.5}}\n  - {model: ./maths, parameters: {weight: [0.3, 0.3]}}\n"
        "parameters: {density: 0.5, lambda: 0.9, rescale: false}\nseed: 4\nout_dtype: bfloat16\n"
    )
    succeed("merge", "own.yml", "--out=own")
    assert "out_dtype: bfloat16" in Path("own/README.md").read_text()
    assert json.loads(Path("own/config.json").read_text())["dtype"] == "bfloat16"
    found, again, own = (load_file(f"{name}/model.safetensors") for name in ("merged", "again", "own"))
    assert found.keys() == again.keys() == own.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor.bfloat16(), own[name])
    assert not torch.equal(
        found["transformer.wte.weight"], dict(networks["parent"].named_parameters())["transformer.wte.weight"]
    )
    lines = json.loads(Path("merged-report/lines.json").read_text())["rows"]
    assert [(row["to"], row["alignment"]) for row in lines] == [("code", "unchanged"), ("maths", "unchanged")]
    rows = json.loads(Path("merged-report/differences.json").read_text())["rows"]
    assert [row["network"] for row in rows] == ["code", "maths"]
    assert all(abs(row["dropped"] - 0.5) < 0.1 for row in rows)


def lora_folders(*names: str) -> dict[str, dict[str, Tensor]]:
    """Write adapters of rank 2 of a layer of GPT-2; return their factors."""
    factors = {}
    for number, name in enumerate(names):
        Path(name).mkdir()
        draw = torch.Generator().manual_seed(number)
        module = "base_model.model.transformer.h.1.attn.c_attn"
        own = {"A": torch.randn(2, 8, generator=draw), "B": torch.randn(24, 2, generator=draw)}
        save_file(
            {f"{module}.lora_{key}.weight": tensor for key, tensor in own.items()}, f"{name}/adapter_model.safetensors"
        )
        content = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True}
        Path(name, "adapter_config.json").write_text(json.dumps(content))
        factors[name] = own
    return factors


def test_adapters_are_merged_on_their_model_and_alone() -> None:
    parent = gpt2_folders("parent")["parent"]
    factors = lora_folders("one", "two")
    succeed("merge", "parent+one", "parent+two", "--weight=0.25,0.75", "--out=merged")
    found = load_file("merged/model.safetensors")
    product = sum(w * 2 * own["B"] @ own["A"] for w, own in zip((0.25, 0.75), factors.values(), strict=True))
    for name, tensor in parent.named_parameters():
        expected = tensor + product.T if name == "transformer.h.1.attn.c_attn.weight" else tensor
        torch.testing.assert_close(found[name], expected.detach(), rtol=0, atol=1e-5)
    succeed("merge", "one", "two", "--weight=0.25,0.75", "--rank=4", "--out=alone")
    alone = load_file("alone/adapter_model.safetensors")
    scale = 4 / json.loads(Path("alone/adapter_config.json").read_text())["r"]
    b, a = (alone[f"base_model.model.transformer.h.1.attn.c_attn.lora_{key}.weight"] for key in "BA")
    torch.testing.assert_close(scale * b @ a, product, rtol=0, atol=1e-4)
    assert "--base does not apply to adapters alone" in call("merge", "one", "two", "--base=parent", "--out=x").error


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--weight=0.25,0.75", "`linear` (arXiv:2203.05482)"),
        ("--weight=0.25,0.75 --rank=3", "Its rank is 3; truncation changes products by at most 0."),
        ("--method=dare_ties --density=0.6,0.8 --seed=5 --rescale=false --rank=4", "`dare_ties` (arXiv:2311.03099)"),
        ("--method=slerp --t=0.3", "`slerp`"),
        ("--method=linear --normalize=false --weight=0.5,-0.2", "| one | 2 |\n| two | 2 |"),
    ],
)
def test_merged_adapters_hold_how_to_make_them_again(options: str, says: str) -> None:
    lora_folders("one", "two")
    succeed("merge", "one", "two", *options.split(), "--out=merged")
    card = Path("merged/README.md").read_text()
    assert says in card
    Path("again.yml").write_text(card.partition("```yaml\n")[2].partition("```")[0])
    succeed("merge", "again.yml", "--out=again")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert Path("merged", name).read_bytes() == Path("again", name).read_bytes()
    assert Path("again.yml").read_text() in Path("again/README.md").read_text()


def test_configurations_of_adapters_have_no_options_of_networks() -> None:
    lora_folders("one", "two")
    models = "models: [{model: one}, {model: two, parameters: {weight: [1, 2]}}]"
    for more, options, says in (
        ("merge_method: linear, align: weights", (), "align does not apply to adapters alone; expected MODEL+ADAPTER"),
        ("merge_method: ties, base_model: one", (), "base_model does not apply to adapters alone"),
        ("merge_method: linear, rank: 0", (), "rank must be an integer >= 1, for models that are adapters alone"),
        ("merge_method: ties, parameters: {weight: 1}", ("--seed=3",), "--seed of adapters is set by own.yml"),
        (
            "merge_method: ties, parameters: {weight: 1}",
            (),
            "models[1].parameters.weight depends on the tensor; expected one",
        ),
    ):
        Path("own.yml").write_text(f"{{{more}, {models}}}")
        assert says in call("merge", "own.yml", "--out=x", *options).error, more
    assert not Path("x").exists()
    assert_refused(MergeConfig.read("own.yml").run, "x", says="own.yml names adapters alone; expected MODEL+ADAPTER")


def test_help_names_all_methods() -> None:
    text = succeed("merge", "--help").out
    assert all(name in text for name in (*METHODS, "--align-only "))
    assert text == succeed("merge").out


# ---- refusals


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("a.pt nan.pt --out=m.safetensors", "nan.pt holds classifier.bias with values that are not finite"),
        ("a.pt wide.pt --out=m.safetensors", "wide.pt holds 'linear1.weight' of shape [13, 64], but"),
        ("a.pt bad.safetensors --out=m.safetensors", "bad.safetensors is text, not a file of safetensors"),
        ("a.pt b.pt a.pt --out=m.safetensors --align-only", "align_only writes the second of two checkpoints"),
        ("a.pt b.pt --out=m.safetensors --align-only --recalibrate --data=DigitsDataModule", "align_only writes none"),
        (
            "a.pt b.pt --out=m.safetensors --data=DiabetesDataModule",
            "; the data give num_classes 1, as their targets are values",
        ),
        ("a.pt extra.pt --out=m.safetensors", "extra.pt holds 'more', which MultiLayerPerceptron has not"),
        ("a.pt fewer.pt --out=m.safetensors", "fewer.pt does not hold"),
    ],
)
def test_the_command_line_says_what_is_wrong(options: str, says: str) -> None:
    state = perceptron().state_dict()
    for name in ("a.pt", "b.pt"):
        torch.save(state, name)
    torch.save({**state, "classifier.bias": state["classifier.bias"] / 0}, "nan.pt")
    torch.save({**state, "linear1.weight": torch.zeros(13, 64)}, "wide.pt")
    torch.save({**state, "more": torch.zeros(3)}, "extra.pt")
    torch.save({name: t for name, t in state.items() if name != "classifier.bias"}, "fewer.pt")
    Path("bad.safetensors").write_bytes(b"x" * 100)
    before = set(Path().rglob("*"))
    result = call("merge", *options.split(), *MLP)
    assert result.status == 1
    assert says in result.error
    assert {path for path in Path().rglob("*") if "__pycache__" not in path.parts} <= before


def test_an_interrupted_merge_leaves_nothing_and_the_same_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, name in enumerate(("a.pt", "b.pt")):
        as_state_dict(perceptron(seed), name)
    options = ("merge", "a.pt", "b.pt", "--out=new/m.safetensors", "--data=DigitsDataModule", "--points=2", *MLP)
    before = set(Path().rglob("*"))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lightning_sym.figures.write_figure", interrupt)  # the last file; the weights are written
        result = call(*options)
    assert (result.status, result.err) == (130, "lightning-sym: interrupted\n")
    assert {path for path in Path().rglob("*") if "__pycache__" not in path.parts} <= before
    said = succeed(*options).out
    assert "weights new/m.safetensors" in said
    assert {path.name for path in Path("new").iterdir()} == {"m.safetensors", "m-report"}
    assert "new/m.safetensors" in Path("new/m-report/lines.json").read_text()


OWN_DATA = """
import torch

class Rows(torch.utils.data.Dataset):
    def __init__(self, count=60):
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(count, 1, 8, 8, generator=generator), torch.arange(count) % 10

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], int(self.y[index])
"""


@pytest.mark.parametrize(
    "command", [("merge", "b.pt", "--points=2"), ("reparametrize", "--objective=sharpness", "--max_steps=1")]
)
def test_data_are_named_as_for_other_commands(command: tuple[str, ...]) -> None:
    """A data set of one's own has its arguments, and gives the sizes of the network."""
    Path("own_rows.py").write_text(OWN_DATA)
    for seed, name in enumerate(("a.pt", "b.pt")):
        as_state_dict(perceptron(seed), name)
    data = (
        "--data=DatasetDataModule",
        "--data.dataset=own_rows.Rows",
        "--data.dataset.count=50",
        "--data.batch_size=9",
    )
    name, *options = command
    network = ("--network=MultiLayerPerceptron", "--network.widths=[12,12]")
    assert "loss" in succeed(name, "a.pt", *options, *network, *data, "--out=m.safetensors").out
    torch.save(MultiLayerPerceptron(widths=(12, 12), in_channels=1, image_size=8, num_classes=4).state_dict(), "a.pt")
    said = call(name, "a.pt", *options, *network, *data, "--out=n.safetensors").error
    assert said.endswith("; the data give in_channels 1, image_size (8, 8), num_classes 10."), said


def test_shards_that_do_not_fit() -> None:
    a = tied()
    one, two = as_shards(a, "one"), as_shards(tied(1), "two")
    common = {"network": a, "inputs": torch.randint(9, (2, 3))}
    merge = functools.partial(merge_checkpoints, **common)
    assert_refused(merge, [one, two], "m.safetensors", says="expected a folder for the shards of model.safetensors")
    for place, heads in (("one", 2), ("two", 4)):
        Path(place, "config.json").write_text(json.dumps({"model_type": "llama", "heads": heads, "dtype": place}))
    assert_refused(merge, [one, two], "m", says=["two/config.json states heads: 4, but one/config.json 2"])
    Path("two", "config.json").unlink()
    state = a.state_dict()
    torch.save({**state, "head.weight": state["head.weight"] + 1}, "untied.pt")
    assert_refused(merge, [one, "untied.pt"], "m", says="of 'embed.weight', which are tied in Tied")
    import merge_nets

    assert_refused(
        *(merge_checkpoints, [one, two], "m"), network=merge_nets.Tied(tied=False), inputs=torch.randint(9, (2, 3)),
        says="does not hold 'head.weight' of Tied",
    )  # fmt: skip
    shard = Path("two", "model-00002-of-00002.safetensors")
    shard.write_bytes(shard.read_bytes()[:-4])
    assert_refused(merge, [one, two], "m", says="model-00002-of-00002.safetensors is damaged")
    shard.unlink()
    assert_refused(merge, [one, two], "m", says="model-00002-of-00002.safetensors is missing beside")
    assert not Path("m").exists()


def fails_at(place: str, monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Let the second tensor that is written at a place fail."""
    target, name = {
        "copies": (NetworkFiles, "_write"),
        "result": (symmetry_files, "_write"),
    }[place]
    write, count = getattr(target, name), iter(range(100_000))

    def failing(*arguments: Any) -> None:
        if next(count) == 1:
            action()
        write(*arguments)

    monkeypatch.setattr(target, name, staticmethod(failing) if target is NetworkFiles else failing)


def disk_is_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("place", ["copies", "result"])
@pytest.mark.parametrize(
    ("save", "out"), [(as_pickle, "a/m.safetensors"), (as_file, "m.safetensors"), (as_shards, "m")]
)
def test_a_full_disk_leaves_nothing_behind(
    save: Callable[[nn.Module, str, torch.dtype], str], out: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [save(tied(seed), f"n{seed}", torch.float32) for seed in range(2)]
    before = sorted(Path().rglob("*"))
    fails_at(place, monkeypatch, disk_is_full)
    merge = functools.partial(merge_checkpoints, files, out, network=tied(), inputs=torch.randint(9, (2, 3)))
    says = "copy of the weights" if place == "copies" else f"Cannot write {out}"
    assert_refused(merge, says=(says, "No space left on device; no file remains"), error=OSError)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("place", ["copies", "result"])
@pytest.mark.parametrize("existing", [False, True])
def test_a_run_that_is_killed_is_in_nobodys_way(place: str, existing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [as_shards(tied(seed), f"n{seed}") for seed in range(2)]
    if existing:
        Path("m").mkdir()
    before = set(Path().rglob("*"))
    merge = functools.partial(merge_checkpoints, files, "m", network=tied(), inputs=torch.randint(9, (2, 3)))
    with monkeypatch.context() as patch:
        fails_at(place, patch, lambda: os.kill(os.getpid(), signal.SIGKILL))
        child = multiprocessing.get_context("fork").Process(target=merge)
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    left = set(Path().rglob("*")) - before
    assert bool(left) == (place == "result")
    assert all(any(part.startswith(".") for part in path.parts) for path in left)
    assert read_shards(merge().out).keys() == read_shards(Path(files[0])).keys()
