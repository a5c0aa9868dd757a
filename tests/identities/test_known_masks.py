"""Networks that index by masks of known values, read `.data`, or keep pruned weights: traced, and moved rightly."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Fixed, Program, of
from symmetry_family_cases import L, difference, evaluate, randomise
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from lightning_sym.connectivity import interpolate
from lightning_sym.symmetry import trace_symmetry

pytestmark = [
    pytest.mark.measured,
    pytest.mark.filterwarnings("ignore:parameters that evaluation never uses:UserWarning"),
]

MASK = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0]).bool()
TABLE = torch.arange(64).reshape(8, 8) % 3 > 0


def written(mask: Callable[[Any], Any]) -> Callable[[Any, Tensor], Any]:
    """Return a function that squares the units of a mask and takes the others through a sigmoid."""

    def run(s: Any, x: Tensor) -> Any:
        h, chosen = s.a(x), mask(s)
        o = torch.zeros_like(h)
        o[:, chosen] = h[:, chosen].square()
        o[:, ~chosen] = h[:, ~chosen].sigmoid()
        return s.b(o)

    return run


def filled(s: Any, x: Tensor) -> Any:
    h = s.a(x).relu().clone()
    h[..., s.mask] = 0.5
    return s.b(h)


def read(s: Any, x: Tensor) -> Any:
    return F.linear(s.a(x).relu()[:, s.mask], s.b.weight[:, s.mask], s.b.bias)


def places(s: Any, x: Tensor) -> Any:
    (index,) = s.mask.nonzero(as_tuple=True)
    return F.linear(s.a(x).relu()[:, index], s.b.weight[:, index], s.b.bias)


def cut(s: Any, x: Tensor) -> Any:
    count = (s.count + s.count) // 2
    return F.linear(s.a(x).relu()[:, :count], s.b.weight[:, :count], s.b.bias)


def branch(s: Any, x: Tensor) -> Any:
    return s.b(s.a(x).relu() if bool(s.mask[0]) else s.a(x).tanh())


def of_weights(s: Any, x: Tensor) -> Any:
    weight = torch.zeros_like(s.c.weight)
    weight[s.table] = s.c.weight[s.table]
    return s.b(F.linear(s.a(x).relu(), weight, s.c.bias).relu())


def clamped(s: Any, x: Tensor) -> Any:
    return s.b(s.a(x).data.clamp(min=0))


def clamped_in_place(s: Any, x: Tensor) -> Any:
    h = s.a(x)
    h.data.clamp_(min=0)
    return s.b(h)


def clamped_weights(s: Any, x: Tensor) -> Any:
    s.c.weight.data.clamp_(min=0)
    return s.b(s.c(s.a(x).relu()).relu())


PARTS: dict[str, Any] = {"a": of(L, 5, 8), "b": of(L, 8, 3), "c": of(L, 8, 8)}
SAVED, UNSAVED = {"mask": MASK.clone(), "table": TABLE.clone()}, {"mask": Fixed(lambda: MASK.clone())}

# The function, its buffers, and the dimension and order of its permutations; None where some units stay without need.
CASES: dict[str, tuple[Any, dict[str, Any], int, int | None]] = {
    "written, saved": (written(lambda s: s.mask), SAVED, 4, 24 * 24),
    "written, not saved": (written(lambda s: s.mask), UNSAVED, 4, 24 * 24),
    "written, constant": (written(lambda s: MASK), {}, 4, 24 * 24),
    "written, computed": (written(lambda s: (torch.arange(8) % 3 == 0) | s.mask), SAVED, 4, 24 * 24),
    "written, changed": (written(lambda s: s.mask.clone().logical_not_()), SAVED, 4, 24 * 24),
    "filled": (filled, SAVED, 8, None),
    "read": (read, SAVED, 24, None),  # the units that nothing reads are free
    "places": (places, SAVED, 24, None),
    "cut": (cut, {"count": torch.tensor(4)}, 24, None),
    "branch": (branch, SAVED, 8, 40320),
    "mask of weights": (of_weights, SAVED, 9, None),  # of 16
    ".data": (clamped, {}, 8, 40320),
    ".data in place": (clamped_in_place, {}, 8, 40320),
    ".data of weights": (clamped_weights, {}, 16, 40320**2),
}


def made(function: Any, parts: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    return randomise(Program(function, {**PARTS, **parts}).double())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.few(5, "places", "branch", ".data", ".data of weights")
def test_a_network_with_known_masks_is_traced(name: str) -> None:
    function, parts, dimension, permutations = CASES[name]
    network, x = made(function, parts, 0), torch.randn(2, 5, dtype=torch.float64)
    symmetry = trace_symmetry(network, x)
    assert symmetry.dimension == dimension
    assert permutations is None or 10**symmetry.log10_permutations == pytest.approx(permutations)
    other, inputs = made(function, parts, 1), torch.randn(7, 5, dtype=torch.float64)
    before = evaluate(other, (inputs,))
    fresh = made(function, parts, 2)
    fresh.load_state_dict(symmetry.act(symmetry.sample(torch.Generator().manual_seed(1)), other).state_dict())
    assert difference(evaluate(fresh, (inputs,)), before) < 1e-9


@pytest.mark.parametrize("name", ["written, saved", "written, not saved", "read"])
def test_a_network_with_another_mask_is_refused(name: str) -> None:
    function, parts, *_ = CASES[name]
    symmetry = trace_symmetry(made(function, parts, 0), torch.randn(2, 5, dtype=torch.float64))
    other = made(function, parts, 1)
    other.mask = MASK.roll(1)
    with pytest.raises(ValueError, match="mask"):
        symmetry.act(symmetry.sample(), other)


def test_a_mask_of_inputs_is_still_refused() -> None:
    network = made(written(lambda s: s.x[0] > 0), {}, 0)
    network.register_forward_pre_hook(lambda module, inputs: setattr(module, "x", network.a(inputs[0])))
    with pytest.raises(ValueError, match="do not depend on values"):
        trace_symmetry(network, torch.randn(2, 5, dtype=torch.float64))


def pruned() -> nn.Sequential:
    network = nn.Sequential(L(5, 8), nn.ReLU(), L(8, 8), nn.ReLU(), L(8, 3)).double().eval()
    prune.random_unstructured(network[0], "weight", 0.5)
    prune.l1_unstructured(network[0], "bias", 0.3)
    prune.ln_structured(network[2], "weight", 0.3, n=2, dim=0)
    prune.random_unstructured(network[2], "weight", 0.2)  # a second time
    return network


def test_a_pruned_network_is_moved_and_says_its_weights_at_once() -> None:
    network, x, inputs = pruned(), *(torch.randn(size, 5, dtype=torch.float64) for size in (2, 9))
    symmetry = trace_symmetry(network, x)
    before = evaluate(network, (inputs,))
    network(x).sum().backward()  # whose graph hangs on the weights that it keeps
    assert network[0].weight.grad_fn is not None
    other, fresh = pruned(), pruned()
    other.load_state_dict(network.state_dict())
    moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(1)), network)
    in_place = symmetry.act(symmetry.sample(torch.Generator().manual_seed(2)), other, inplace=True)
    fresh.load_state_dict(moved.state_dict())
    for own in (moved, in_place, fresh):
        if own is not fresh:  # torch computes its weights when it runs
            assert torch.equal(own[0].weight, own[0].weight_orig * own[0].weight_mask)
        assert difference(evaluate(own, (inputs,)), before) < 1e-9
    middle = interpolate(network, moved, 0.5)  # torch cannot copy weights of a graph
    assert torch.equal(middle[0].weight_orig, torch.lerp(network[0].weight_orig, moved[0].weight_orig, 0.5))


@pytest.mark.parametrize("change", [prune.identity, parametrizations.weight_norm], ids=["pruned", "weight norm"])
def test_a_network_that_computes_a_weight_is_refused_with_what_to_do(change: Any) -> None:
    plain = nn.Sequential(L(5, 8), nn.ReLU(), L(8, 3))
    symmetry, other = trace_symmetry(plain, torch.randn(2, 5)), copy.deepcopy(plain)
    change(other[0], "weight")
    with pytest.raises(ValueError, match=r"computes 0\.weight of others, make that permanent first"):
        symmetry.act(symmetry.sample(), other)


def _padded(s: Any, x: Tensor, keep: Tensor, *, by_hand: bool) -> Tensor:
    q, k, v = (layer(x)[:, None] for layer in (s.q, s.k, s.v))
    if not by_hand:
        return s.o(F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None]))
    scores = (q @ k.mT / 2).masked_fill(~keep[:, None, None], -torch.inf)
    return s.o(scores.softmax(-1).nan_to_num(0.0) @ v)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_rows_that_a_mask_hides_whole_have_no_weights(by_hand: bool, padding: bool) -> None:
    """Of such rows torch's attention is zero, so that biases of values are seen: 4 dimensions fewer."""
    keep = torch.ones(3, 5, dtype=torch.bool)
    keep[0], keep[1, 2:] = not padding, False
    torch.manual_seed(0)
    parts = {name: of(L, 8, 4) for name in "qkv"} | {"o": of(L, 4, 9)}
    network = Program(functools.partial(_padded, by_hand=by_hand), parts).double()
    symmetry = trace_symmetry(network, (torch.randn(3, 5, 8, dtype=torch.float64), keep))
    assert symmetry.worst_error < symmetry.tolerance
    assert (symmetry.dimension, symmetry.nullity) == ((36, 36) if padding else (40, 40))
    assert any("softmax in forward: a mask may hide whole rows" in note for note in symmetry.notes) == padding


class Tanh(nn.Module):
    """A hyperbolic tangent, made of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(2 * x) - 1


@pytest.mark.parametrize("function", [nn.Tanh, Tanh])
def test_functions_made_of_modules_have_their_signs(function: type[nn.Module]) -> None:
    torch.manual_seed(0)
    symmetry = trace_symmetry(nn.Sequential(L(6, 4), function(), L(4, 3)), torch.randn(2, 6))
    assert symmetry.signs == 4
