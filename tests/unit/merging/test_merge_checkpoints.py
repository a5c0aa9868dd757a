"""``merge_checkpoints``: the formula, the reference and the alignment of networks in files."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_refused, assert_same, randomize_statistics
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_sym.merging import METHODS, checkpoints, merge_checkpoints, merge_tensors
from lightning_sym.symmetry import Symmetry, trace_symmetry

X = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)
    return randomize_statistics(nn.Sequential(*layers)).double().eval()


def near(parent: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return the tensors of a fine-tune."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype) * tensor.abs().mean()
        if tensor.is_floating_point()
        else tensor.clone()
        for name, tensor in parent.state_dict().items()
    }


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """Write a parent and two fine-tunes, and return their tensors."""
    monkeypatch.chdir(tmp_path)
    parent = network()
    states = [dict(parent.state_dict()), near(parent, 1), near(parent, 2)]
    for name, state in zip(("parent", "a", "b"), states, strict=True):
        save_file(state, f"{name}.safetensors")
    return states


@pytest.fixture(autouse=True, scope="module")
def _traced_once() -> Iterator[None]:
    """Trace an architecture once: the self-test would take most of the time of these merges."""
    traced: dict[str, Symmetry] = {}

    def trace(model: nn.Module, example: Any, *, exchange: bool = True) -> Symmetry:
        if str(model) not in traced:
            traced[str(model)] = trace_symmetry(model, example, exchange=exchange)
        return copy.deepcopy(traced[str(model)])  # merges add notes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "trace_symmetry", trace)
        yield


def merged(*names: str, **settings: Any) -> dict[str, Tensor]:
    """Merge files, and return the tensors that were written."""
    base = settings.pop("base", None)
    settings["base"] = None if base is None else f"{base}.safetensors"
    inputs = {"network": network(7), "inputs": X}
    Path("m.safetensors").unlink(missing_ok=True)
    out = merge_checkpoints([f"{name}.safetensors" for name in names], "m.safetensors", **inputs, **settings).out
    return load_file(out)


def weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if tensor.is_floating_point() and "running" not in name}


CASES = {
    "linear": {"weight": [0.7, 0.2]},
    "slerp": {"t": 0.3},
    "nuslerp": {"weight": [0.7, 0.2]},
    "karcher": {},
    "multislerp": {"weight": [0.7, 0.2]},
    "task_arithmetic": {"weight": [0.7, 0.2], "lambda_": 0.5},
    "ties": {"weight": [0.7, 0.2], "density": [0.5, 0.8]},
    "dare_linear": {"density": 0.5, "seed": 3},
    "dare_ties": {"density": 0.5, "normalize": True},
    "breadcrumbs": {"density": 0.5, "gamma": 0.1},
    "breadcrumbs_ties": {"density": 0.5, "gamma": 0.1},
    "della": {"density": 0.5, "epsilon": 0.2},
    "della_linear": {"density": 0.5},
    "model_stock": {},
    "passthrough": {"scale": 2.0},
}


@pytest.mark.parametrize("method", CASES)
@pytest.mark.few(4)
def test_each_method_is_its_formula_and_averages_statistics(method: str, files: list[dict[str, Tensor]]) -> None:
    parent, *models = (weights(state) for state in files)
    assert CASES.keys() == METHODS.keys()
    names = ("a", "b") if method != "passthrough" else ("a",)
    based = METHODS[method].base == "needed"
    found = merged(*names, method=method, base="parent" if based else None, **CASES[method])
    expected = merge_tensors(method, models[: len(names)], base=parent if based else None, **CASES[method])
    assert not all(torch.equal(found[name], models[0][name]) for name in expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-14)
    used = files if based else files[1 : 1 + len(names)]
    for name in ("1.running_mean", "1.running_var"):
        stacked = torch.stack([state[name] for state in used])
        assert bool((found[name] >= stacked.amin(0) - 1e-12).all() and (found[name] <= stacked.amax(0) + 1e-12).all())


@pytest.mark.parametrize(
    ("settings", "variance"),
    [
        ({"weight": [1.5, -0.5]}, "a"),
        ({"base": "parent", "method": "task_arithmetic", "weight": [0.5, -0.5]}, None),
        ({"base": "parent", "method": "task_arithmetic", "lambda_": -0.5}, "parent"),
    ],
)
def test_negative_weights_count_as_0_in_statistics_with_a_note(
    settings: dict[str, Any], variance: str | None, files: list[dict[str, Tensor]]
) -> None:
    base = settings.pop("base", None)
    given = {"network": network(7), "inputs": X, "base": base and f"{base}.safetensors", **settings}
    found = merge_checkpoints(["a.safetensors", "b.safetensors"], "m.safetensors", **given)
    (note,) = [note for note in found.notes if note.startswith("negative weights count as 0 in averages of statistics")]
    assert "running_" in note
    state, own = dict(zip(("parent", "a", "b"), files, strict=True)), load_file("m.safetensors")["1.running_var"]
    expected = (
        state[variance]["1.running_var"]
        if variance
        else (0.5 * (files[0]["1.running_var"] + files[1]["1.running_var"]))
    )
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-14)
    others = merge_checkpoints(["a.safetensors", "b.safetensors"], "n.safetensors", network=network(7), inputs=X)
    assert not any("negative" in note for note in others.notes)


def test_ends_are_the_given_networks_with_their_statistics(files: list[dict[str, Tensor]]) -> None:
    parent, a, b = files
    cases = (
        (a, merged("a", "b", method="slerp", t=0.0)),
        (b, merged("a", "b", method="slerp", t=1.0)),
        (parent, merged("a", "b", base="parent", method="task_arithmetic", lambda_=0.0)),
        (a, merged("a", "b", weight=[1.0, 0.0])),
        (a, merged("a", "a", method="karcher")),
        (a, merged("a", base="parent", method="task_arithmetic")),
    )
    for expected, found in cases:
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-13)


def test_a_base_among_the_models_counts_where_the_method_has_none(files: list[dict[str, Tensor]]) -> None:
    weighed = merged("a", "parent", "b", weight=[1, 2, 3])
    torch.testing.assert_close(merged("a", "parent", "b", base="parent", weight=[1, 2, 3]), weighed)
    for settings in ({"method": "ties", "density": 0.5}, {"method": "model_stock"}):
        assert_same(merged("parent", "a", "b", base="parent", **settings), merged("a", "b", base="parent", **settings))
    sums = {"base": "parent", "method": "task_arithmetic"}
    assert_same(merged("a", "b", **sums, weight=[0.3, 0.6]), merged("a", "parent", "b", **sums, weight=[0.3, 9, 0.6]))
    assert_same(merged("b", base="a", method="slerp", t=0.2), merged("a", "b", method="slerp", t=0.2))


def planted(symmetry: Symmetry, state: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    other = network()
    other.load_state_dict(state)
    return dict(symmetry.act(symmetry.sample(torch.Generator().manual_seed(seed)), other).state_dict())


@pytest.mark.parametrize("method", ["linear", "slerp", "task_arithmetic", "ties", "dare_ties", "model_stock"])
@pytest.mark.few(3)
def test_a_moved_model_is_brought_back_as_near_as_fine_tunes_are(method: str, files: list[dict[str, Tensor]]) -> None:
    symmetry = trace_symmetry(network(), X)
    save_file(planted(symmetry, files[2], 3), "moved.safetensors")
    based = "parent" if METHODS[method].base == "needed" else None
    plain = merged("a", "b", base=based, method=method, align="none")
    found = merged("a", "moved", base=based, method=method)
    unaligned = merged("a", "moved", base=based, method=method, align="none")
    assert any(float((unaligned[name] - tensor).abs().max()) > 1e-2 for name, tensor in weights(plain).items())
    # Its scales are those nearest to the reference, not those that it had.
    scale = max(float((own - files[2][name]).abs().max()) for name, own in weights(files[1]).items())
    for name, tensor in weights(plain).items():
        assert float((found[name] - tensor).abs().max()) < 2 * scale


def test_one_element_on_all_models_moves_the_result(files: list[dict[str, Tensor]]) -> None:
    symmetry = trace_symmetry(network(), X)
    parts = symmetry.sample(torch.Generator().manual_seed(3), scale=0.0)
    other = network()
    for name, state in zip(("parent", "a", "b"), files, strict=True):
        other.load_state_dict(state)
        save_file(dict(symmetry.act(parts, other).state_dict()), f"moved-{name}.safetensors")
    for method in ("linear", "slerp", "karcher", "ties", "breadcrumbs", "model_stock"):
        based = METHODS[method].base == "needed"
        plain = merged("a", "b", base="parent" if based else None, method=method)
        other.load_state_dict(plain)
        expected = symmetry.act(parts, other).state_dict()
        found = merged("moved-a", "moved-b", base="moved-parent" if based else None, method=method)
        for name, tensor in weights(found).items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12)


def test_a_network_of_another_parent_is_said_not_to_come_from_the_base(files: list[dict[str, Tensor]]) -> None:
    save_file(dict(network(5).state_dict()), "other.safetensors")
    inputs = {"network": network(7), "inputs": X, "base": "parent.safetensors", "method": "ties"}
    found = merge_checkpoints(["a.safetensors", "other.safetensors"], "m.safetensors", **inputs)
    assert "other.safetensors: does not seem to come from the base parent.safetensors" in found.notes
    assert found.tally.cosines.shape == (2, 2)
    symmetry = trace_symmetry(network(), X)
    save_file(planted(symmetry, files[2], 3), "moved.safetensors")
    found = merge_checkpoints(["a.safetensors", "moved.safetensors"], "n.safetensors", **inputs)
    assert any(note.startswith("moved.safetensors was aligned (distance ") for note in found.notes)
    assert not any("does not seem" in note for note in found.notes)


@pytest.mark.parametrize(
    ("names", "settings", "says"),
    [
        ("a b", {"method": "ties"}, "ties needs a base"),
        ("a b", {"base": "parent"}, "linear uses no base; leave it out, or put it among the models"),
        ("a b", {"method": "slerp", "base": "parent"}, "slerp merges 2 models, got 3"),
        ("a b", {"weight": [1, -1]}, "sum to 0"),
        ("a b", {"weight": [1, 2, 3]}, "weight holds 3 values for 2 models"),
        ("a b", {"method": "ties", "base": "parent", "density": 0.0}, "density must be"),
        ("a b", {"method": "tie"}, "Did you mean 'ties'?"),
        ("a b", {"densty": 0.5, "method": "ties", "base": "parent"}, "Did you mean 'density'?"),
        ("a b", {"method": "weights"}, "weights says how to align: --align weights"),
        ("a b", {"align": "weight"}, "Did you mean 'weights'?"),
        ("a", {}, "linear merges two or more checkpoints, got one"),
        ("a missing", {}, "There is no file or folder missing.safetensors"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_read(
    names: str, settings: dict[str, Any], says: str, files: list[dict[str, Tensor]]
) -> None:
    for name in ("a", "b"):
        Path(f"{name}.safetensors").write_bytes(b"not read")
    assert_refused(merged, *names.split(), **settings, says=says)
    assert not Path("m.safetensors").exists()


def test_filters_are_no_list_with_one_value_per_model(files: list[dict[str, Tensor]]) -> None:
    filters = [{"filter": "0.", "value": 0.3}, {"value": 0.6}]
    once = merged("parent", "a", base="parent", method="task_arithmetic", weight=filters)
    for name, tensor in merged("a", base="parent", method="task_arithmetic", weight=filters).items():
        assert torch.equal(tensor, once[name])


def test_the_order_of_the_models_makes_no_difference(files: list[dict[str, Tensor]]) -> None:
    """Networks of several seeds are aligned in rounds, whose order is drawn."""
    for seed in (1, 2, 3):
        save_file(network(seed).state_dict(), f"seed{seed}.safetensors")
    one, two = merged("parent", "seed1", "seed2", "seed3"), merged("parent", "seed3", "seed1", "seed2")
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-10, atol=1e-12)


def test_equal_networks_merge_to_themselves_whatever_the_losses(files: list[dict[str, Tensor]]) -> None:
    """The unaligned mean of untrained networks can have the lower loss by chance."""
    model = network()
    data = [(torch.randn(16, 6, dtype=torch.float64), torch.randint(0, 3, (16,)))]
    symmetry = trace_symmetry(model, X)
    moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(1)), model)
    save_file(moved.state_dict(), "moved.safetensors")
    with torch.no_grad():  # the targets of the unaligned mean
        mean = network(7)
        mean.load_state_dict({name: (own + moved.state_dict()[name]) / 2 for name, own in model.state_dict().items()})
        data[0][1].copy_(mean.train()(data[0][0]).argmax(1))
    found = merged("parent", "moved", data=data)
    for name, tensor in files[0].items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9)


def test_negative_variances_are_refused(files: list[dict[str, Tensor]]) -> None:
    """The outputs are NaN there, and a mean with other variances would hide it."""
    state = files[1]
    state["1.running_var"][2] = -1.0
    save_file(state, "b.safetensors")
    assert_refused(merged, "a", "b", says="b.safetensors holds 1.running_var with negative numbers")
