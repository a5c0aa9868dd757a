"""Elements that act on checkpoints on disk."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_sym.symmetry import Symmetry, trace_symmetry, without_weights

X = torch.randint(9, (3, 4))


class Net(nn.Module):
    """Tokens, a norm, hidden units, tied weights, an integer buffer and a constant that no file holds."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.up, self.norm, self.down = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("order", torch.tensor([3, 1, 2, 0]))
        self.register_buffer("pattern", torch.tensor([1.0, 1.0, 0.5, 0.5]), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)[:, self.order]
        inner = torch.relu(self.norm(self.up(hidden).mT)).mT
        return self.head((hidden + self.down(inner)) * self.pattern)


def network(width: int = 6, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    found = Net(width).eval()
    found.norm.running_mean.normal_()
    found.norm.running_var.uniform_(0.5, 2.0)
    return found


@pytest.fixture
def symmetry() -> Symmetry:
    with without_weights():
        empty = Net()
    return trace_symmetry(empty.eval(), X)


def stored(
    net: nn.Module, dtype: torch.dtype = torch.float32, prefix: str = "", twice: bool = False
) -> dict[str, Tensor]:
    """Return a state dict as it is stored, of tied weights the second or both."""
    state = {prefix + name: t.to(dtype) if t.is_floating_point() else t for name, t in net.state_dict().items()}
    state[f"{prefix}head.weight"] = state[f"{prefix}embed.weight"].clone()
    if not twice:
        del state[f"{prefix}embed.weight"]
    return {name: tensor.clone().contiguous() for name, tensor in state.items()}


def sharded(state: dict[str, Tensor], folder: Path, parts: int = 3) -> Path:
    """Write a checkpoint in several files, and return its index."""
    folder.mkdir(parents=True)
    names = list(state)
    placed = {}
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        own = {name: state[name] for name in names[part::parts]}
        save_file(own, folder / file, metadata={"format": "pt", "part": str(part)})
        placed |= dict.fromkeys(own, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 7}, "weight_map": placed}))
    return index


def loaded(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def header(file: Path) -> bytes:
    content = file.read_bytes()
    return content[: 8 + int.from_bytes(content[:8], "little")]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)],
    ids=str,
)
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("twice", [False, True], ids=["tied once", "tied twice"])
@pytest.mark.few(4)
def test_shards_move_as_the_network_does(
    symmetry: Symmetry, tmp_path: Path, dtype: torch.dtype, tolerance: float, prefix: str, twice: bool
) -> None:
    net = network().to(dtype)
    element = symmetry.sample(torch.Generator().manual_seed(1), scale=0.3)
    state = stored(net, dtype, prefix, twice)
    index = sharded(state, tmp_path / "old")
    before = {file.name: file.read_bytes() for file in (tmp_path / "old").iterdir()}
    assert symmetry.act_on_files(element, index, tmp_path / "a" / "new") == tmp_path / "a" / "new" / index.name
    assert {file.name: file.read_bytes() for file in (tmp_path / "old").iterdir()} == before
    assert {file.name for file in (tmp_path / "a" / "new").iterdir()} == set(before)
    for file in (tmp_path / "old").glob("*.safetensors"):  # names, types, order and metadata
        assert header(tmp_path / "a" / "new" / file.name) == header(file)
    assert (tmp_path / "a" / "new" / index.name).read_bytes() == before[index.name]
    found, expected = loaded(tmp_path / "a" / "new"), symmetry.act(element, net.double()).state_dict()
    assert set(found) == set(state)
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor.double(), expected[name.removeprefix(prefix)].double(), rtol=tolerance, atol=1e-2 * tolerance
        )
        assert tensor.dtype == state[name].dtype


def test_one_file_moves_and_comes_back(symmetry: Symmetry, tmp_path: Path) -> None:
    net = network()
    save_file(stored(net), tmp_path / "old.safetensors", metadata={"epoch": "3"})
    element = symmetry.sample(torch.Generator().manual_seed(2), scale=0.3)
    new = symmetry.act_on_files(element, tmp_path / "old.safetensors", tmp_path / "new" / "renamed.safetensors")
    assert new == tmp_path / "new" / "renamed.safetensors"
    moved = Net().eval()
    state = load_file(new)
    moved.load_state_dict({**state, "embed.weight": state["head.weight"]})
    torch.testing.assert_close(moved(X), net(X), rtol=1e-4, atol=1e-5)
    assert not torch.equal(moved.up.weight, net.up.weight)
    back = symmetry.act_on_files(symmetry.inverse(element), new, tmp_path / "back")
    assert back == tmp_path / "back" / "renamed.safetensors"
    for name, tensor in load_file(tmp_path / "old.safetensors").items():
        torch.testing.assert_close(load_file(back)[name], tensor)
    with safe_open(back, "pt") as file:
        assert file.metadata() == {"epoch": "3"}


def test_a_prefix_that_only_the_network_has(tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids)

    net = Wrapped().eval()
    symmetry = trace_symmetry(net, X)
    save_file(stored(net.model), tmp_path / "old.safetensors")
    element = symmetry.sample(torch.Generator().manual_seed(0))
    new = symmetry.act_on_files(element, tmp_path / "old.safetensors", tmp_path / "new")
    expected = symmetry.act(element, net).model.state_dict()
    for name, tensor in load_file(new).items():
        torch.testing.assert_close(tensor, expected[name])


def test_what_the_network_does_not_have_stays_if_it_is_named(symmetry: Symmetry, tmp_path: Path) -> None:
    state = stored(network()) | {"up.mask": torch.randn(3), "old.step": torch.tensor(5)}
    save_file(state, tmp_path / "old.safetensors")
    element = symmetry.sample()
    assert_refused(
        *(symmetry.act_on_files, element, tmp_path / "old.safetensors", tmp_path / "new"),
        says=("which the traced network does not have", "leave=["),
    )
    new = symmetry.act_on_files(element, tmp_path / "old.safetensors", tmp_path / "new", leave=["*.mask", "old.*"])
    assert torch.equal(load_file(new)["up.mask"], state["up.mask"])
    assert int(load_file(new)["old.step"]) == 5


def changed(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], Path]:
    """Return what writes a checkpoint whose tensors were changed."""

    def write(folder: Path) -> Path:
        state = stored(network())
        change(state)
        return sharded(state, folder)

    return write


def damaged(change: Callable[[Path], Any]) -> Callable[[Path], Path]:
    """Return what writes a checkpoint whose files were changed."""

    def write(folder: Path) -> Path:
        index = sharded(stored(network()), folder)
        return change(index) or index

    return write


def second(index: Path) -> Path:
    return index.parent / "model-00002-of-00003.safetensors"


def cut(index: Path) -> None:
    content = second(index).read_bytes()
    second(index).write_bytes(content[:-5])


def other_map(**placed: str) -> Callable[[Path], None]:
    def change(index: Path) -> None:
        content = json.loads(index.read_text())
        content["weight_map"].update(placed)
        index.write_text(json.dumps(content))

    return change


REFUSALS = {
    "no file": (damaged(lambda index: index.parent / "absent.safetensors"), "There is no file"),
    "missing shard": (damaged(lambda index: second(index).unlink()), "model-00002-of-00003.safetensors is missing"),
    "cut shard": (damaged(cut), "model-00002-of-00003.safetensors is damaged or no safetensors"),
    "empty shard": (damaged(lambda index: second(index).write_bytes(b"")), "is empty, not a file of safetensors"),
    "pickle": (damaged(lambda index: torch.save({"a": 1}, second(index)) and None), "is a file of torch.save, not a "),
    "wrong place": (damaged(other_map(nothing="model-00001-of-00003.safetensors")), "holds no tensor nothing"),
    "outside": (damaged(other_map(nothing="../up.safetensors")), "expected files in its folder"),
    "no index": (damaged(lambda index: index.write_text("{}") and None), "is no index of a checkpoint"),
    "no JSON": (damaged(lambda index: index.write_bytes(b"\xff\x00") and None), "is no index of a checkpoint"),
    "twice": (damaged(lambda index: shutil.copy(second(index),
        index.parent / "model-00003-of-00003.safetensors") and None), "as"),
    "missing tensor": (changed(lambda state: state.pop("down.weight")), "holds no down.weight"),
    "other width": (changed(lambda state: state.update(stored(network(7)))),
        "of shape [7]; expected [6], as in the traced"),
    "surplus": (changed(lambda state: state.update({"more.weight": torch.ones(2)})), "holds more.weight, which"),
    "other constant": (changed(lambda state: state["order"].fill_(1)), "holds other values of the constant order"),
    "infinite": (changed(lambda state: state["down.weight"][0].fill_(torch.inf)), "with values that are not finite"),
    "eight bits": (changed(lambda state: state.update({"down.weight": state["down.weight"].to(torch.float8_e4m3fn)})),
        "down.weight as torch.float8_e4m3fn"),
}  # fmt: skip


@pytest.mark.parametrize(("write", "says"), REFUSALS.values(), ids=REFUSALS)
@pytest.mark.few(3)
def test_checkpoints_that_are_refused_leave_nothing_behind(
    symmetry: Symmetry, tmp_path: Path, write: Callable[[Path], Path], says: str
) -> None:
    checkpoint = write(tmp_path / "old")
    before = sorted(tmp_path.rglob("*"))
    assert_refused(symmetry.act_on_files, symmetry.sample(), checkpoint, tmp_path / "a" / "b", says=says)
    assert sorted(tmp_path.rglob("*")) == before


def test_elements_and_folders_that_are_refused(symmetry: Symmetry, tmp_path: Path) -> None:
    index, element = sharded(stored(network()), tmp_path / "old"), symmetry.sample()
    other = trace_symmetry(network(7), X).sample()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for arguments, says in (
        ((other, index, tmp_path / "new"), "the element belongs to the symmetry of another network"),
        ((element, index, tmp_path / "old"), "is there already; expected a folder without it"),
        ((element, index, tmp_path / "new.safetensors"), "the checkpoint has several; expected a folder"),
    ):
        assert_refused(symmetry.act_on_files, *arguments, says=says)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_numbers_too_large_for_their_type(symmetry: Symmetry, tmp_path: Path) -> None:
    index = sharded(stored(network(), torch.float16), tmp_path / "old")
    element = symmetry.sample(torch.Generator().manual_seed(0), scale=30.0)
    assert_refused(symmetry.act_on_files, element, index, tmp_path / "new", says="that torch.float16 does not")
    assert not (tmp_path / "new").exists()


def test_checkpoints_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=14, **sizes)
    ids = torch.randint(14, (2, 5))
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config).eval()
    symmetry = trace_symmetry(empty, input_ids=ids)
    net = transformers.LlamaForCausalLM(config).eval()
    net.save_pretrained(tmp_path / "old", max_shard_size="2KB")
    index = tmp_path / "old" / "model.safetensors.index.json"
    symmetry.act_on_files(symmetry.sample(torch.Generator().manual_seed(0)), index, tmp_path / "new")
    shutil.copy(tmp_path / "old" / "config.json", tmp_path / "new")
    moved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "new")
    torch.testing.assert_close(moved(ids).logits, net(ids).logits, rtol=1e-3, atol=1e-4)
    assert not torch.equal(moved.lm_head.weight, net.lm_head.weight)
