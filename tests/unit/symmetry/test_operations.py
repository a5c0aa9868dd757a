"""The table of operations tells the truth of what torch does, and other files hold no lists of their own."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sym import symmetry
from lightning_sym.symmetry.tracing.graph import operations as table
from lightning_sym.symmetry.tracing.graph.operations import Trait, is_pointwise, operations, out_of_place
from lightning_sym.symmetry.tracing.labelling import walk  # noqa: F401 (it registers rules)
from lightning_sym.symmetry.tracing.labelling.rules import rule_for

X = torch.arange(1.0, 13.0).reshape(2, 6) / 16
# First arguments other than X.
GIVEN = {
    **dict.fromkeys(("channel_shuffle", "pixel_shuffle", "dsplit"), X.reshape(1, 4, 1, 3)),
    **{"pixel_unshuffle": X.reshape(1, 3, 2, 2), "bitwise_not": X > 0.5, "logical_not": X > 0.5},
}
# Arguments after the first one.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view"), ([3, 4],)),
    **dict.fromkeys(("view_as", "reshape_as"), (torch.zeros(3, 4),)),
    **dict.fromkeys(("transpose", "movedim", "moveaxis", "swapaxes", "swapdims"), (1, 0)),
    **dict.fromkeys(("chunk", "tensor_split", "split", "unsafe_chunk", "unsafe_split"), (2, 1)),
    **dict.fromkeys(("split_with_sizes", "unsafe_split_with_sizes"), ([2, 4], 1)),
    **dict.fromkeys(("expand", "broadcast_to", "repeat"), ([2, 2, 6],)),
    **dict.fromkeys(("hsplit", "vsplit", "channel_shuffle", "repeat_interleave"), (2,)),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), (2,)),
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), (0.5, False)),
    **dict.fromkeys(("new_zeros", "new_ones"), ([2],)),
    **{"permute": ([1, 0],), "tile": ([2, 1],), "roll": ([1], [0]), "flip": ([1],), "rot90": (1, [0, 1])},
    **{"select": (1, 3), "slice": (1, 2, 5), "narrow": (1, 2, 3), "unfold": (1, 2, 2), "dsplit": (1,)},
    **{"unsqueeze": (1,), "unflatten": (1, [2, 3]), "expand_as": (torch.zeros(2, 2, 6),), "type_as": (X,)},
    **{"index": ([None, torch.tensor([3, 0])],), "index_select": (1, torch.tensor([3, 0]))},
    **{"gather": (1, torch.tensor([[1, 3], [5, 5]])), "take": (torch.tensor([3, 0]),), "to": (torch.float64,)},
    **{"clamp": (0.2, 0.4), "clamp_min": (0.3,), "clamp_max": (0.3,), "threshold": (0.3, 0.1), "pow": (3,)},
    **{"full_like": (3,), "new_full": ([2], 3)},
}


def known(traits: Trait) -> list[str]:
    """Return the operations with one of some traits that torch has."""
    return sorted(name for name in operations(traits) if hasattr(torch.ops.aten, name))


def run(name: str) -> tuple[torch.Tensor, Any]:
    """Return the first argument of an operation, and what comes out."""
    given = GIVEN.get(name, X)
    return given, getattr(torch.ops.aten, name)(given, *ARGUMENTS.get(name, ()))


def test_every_operation_has_one_row() -> None:
    names = [name for names in table._ROWS for name in names.split()]
    assert len(names) == len(set(names))
    assert not [name for name in names if name.endswith("_")]


@pytest.mark.parametrize("name", known(Trait.MOVE | Trait.PICK | Trait.CAST))
def test_what_moves_elements_makes_none(name: str) -> None:
    given, result = run(name)
    several = isinstance(result, (list, tuple))
    assert several == (name in operations(Trait.PARTS))
    for part in result if several else [result]:
        assert torch.isin(part.float(), given).all()
        if name in operations(Trait.REGROUP | Trait.CAST):
            assert torch.equal(part.float().reshape(-1), given.reshape(-1))
        if name in operations(Trait.PERMUTE):
            assert sorted(part.shape) == sorted(given.shape)
            assert torch.equal(part, given.mT)
        if name in operations(Trait.EXPAND):
            assert torch.equal(part, given.expand_as(part))


@pytest.mark.parametrize("name", known(Trait.POINTWISE))
def test_pointwise_operations_act_on_every_element_by_itself(name: str) -> None:
    given, result = run(name)
    one = getattr(torch.ops.aten, name)(given[1:, 2:3], *ARGUMENTS.get(name, ()))
    torch.testing.assert_close(one, result[1:, 2:3])
    packet = getattr(torch.ops.aten, name)
    assert is_pointwise(getattr(packet, "Tensor_Scalar" if name == "pow" else "default"))


@pytest.mark.parametrize("name", sorted({*known(Trait.LIKE)} - {"empty_like", "new_empty"}))
def test_constants_hold_one_number(name: str) -> None:
    assert len(run(name)[1].unique()) == 1


def test_writing_in_place_is_the_same_operation() -> None:
    assert out_of_place(torch.ops.aten.relu_.default) is torch.ops.aten.relu.default
    assert is_pointwise(torch.ops.aten.exp_.default)
    assert rule_for(torch.ops.aten.squeeze_.dim) is rule_for(torch.ops.aten.view.default)


def collections_of(file: Path) -> list[tuple[int, set[str]]]:
    """Return the words in each set, list, tuple and call of `register_rule` in a file, with its line."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        registers = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "register_rule"
        if registers or isinstance(node, ast.Set | ast.List | ast.Tuple):
            texts = [
                own.value for own in ast.walk(node) if isinstance(own, ast.Constant) and isinstance(own.value, str)
            ]
            words = {word for text in texts for word in text.split()}
            found.append((node.lineno, {word.removeprefix("aten::").removesuffix("_") for word in words}))
    return found


def test_no_other_file_lists_operations() -> None:
    folder = Path(symmetry.__file__).parent
    # Which group an activation has is its own table. The other two are going to be replaced.
    apart = {"tracing/graph/operations.py", "groups.py"}
    known = {trait: operations(trait) for trait in Trait}
    offenders = [
        f"{name}:{line} lists operations that have the trait {trait.name}: {sorted(words & own)}"
        for file in sorted(folder.rglob("*.py"))
        if (name := file.relative_to(folder).as_posix()) not in apart
        for line, words in collections_of(file)
        if len(words) > 4
        for trait, own in known.items()
        if len(words & own) > 4
    ]
    assert not offenders
    listed = [words & operations(Trait.POINTWISE) for _, words in collections_of(folder / "groups.py")]
    assert max(map(len, listed)) > 4  # a list is found where there is one
