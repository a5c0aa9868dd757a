"""Stacks: experts and heads that are members of one parameter, chosen by a router or all used.

Members change places together with what chooses them; inside each member its own units change places, with scales of
their own (docs/theory/intertwiners.md, 2.13 and 2.14). The groups are derived by hand.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import Program, parameter
from orbit_laws import assert_a_group_acts, assert_dimension_is_the_nullity, assert_members_have_one_form, drawn
from symmetry_family_cases import EXACT, difference, randomise
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from lightning_sym.symmetry import Symmetry, orbit_distance, trace_symmetry
from lightning_sym.symmetry.matching.soft_maps import SoftMaps

E, D, M, OUT = 3, 5, 4, 2
GATED = {"r": (E, D), "g": (E, M, D), "u": (E, M, D), "w": (E, OUT, M)}
HEADS = {"q": (3, D, 2), "k": (3, D, 2), "v": (3, D, 2), "o": (3, 2, D)}
DEEP = {"r": (E, D), "g": (E, M, D), "b": (E, M), "mid": (E, M, M), "w": (E, OUT, M), "c": (E, OUT)}


@dataclass(frozen=True)
class Case:
    """A program on stacks."""

    program: Callable[[Any, Tensor], Tensor]
    parts: dict[str, tuple[int, ...]]  # shapes of its parameters
    shape: tuple[int, ...]  # of one sample
    orders: tuple[int, ...]  # the orders of the factors of its group of permutations
    dimension: int  # of its group, with shifts

    def make(self) -> nn.Module:
        return randomise(
            Program(self.program, {name: parameter(*shape) for name, shape in self.parts.items()})
        ).double()

    def inputs(self, count: int) -> Tensor:
        return torch.randn(count, *self.shape, dtype=torch.float64)


CASES: dict[str, Case] = {}
# Each expert's four units, with a scale of `u` against `w` each; the experts; and what a softmax takes off the router.
WHOLE = ((6, 24, 24, 24), E * M + D)
SHARED = ((6, 24), M + D)


def case(group: tuple[tuple[int, ...], int], shape: tuple[int, ...] = (D,), **parts: tuple[int, ...]) -> Any:
    def decorate(program: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        CASES[program.__name__] = Case(program, parts or GATED, shape, *group)
        return program

    return decorate


def router(s: Any, x: Tensor) -> Tensor:
    return (x @ s.r.T).softmax(-1)


def chosen(s: Any, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """As transformers' batched_mm: the weights of the experts that were chosen, one after the other."""
    count = index.shape[1]
    x, index = x.repeat_interleave(count, 0)[..., None], index.reshape(-1)
    h = F.silu((s.g[index] @ x).squeeze(-1)) * (s.u[index] @ x).squeeze(-1)
    return ((s.w[index] @ h[..., None]).squeeze(-1) * weight.reshape(-1, 1)).view(-1, count, OUT).sum(1)


def of_all(s: Any, x: Tensor) -> Tensor:
    h = F.silu(torch.einsum("bd,emd->bem", x, s.g)) * torch.einsum("bd,emd->bem", x, s.u)
    return torch.einsum("bem,eom->beo", h, s.w)


@case(WHOLE)
def two_largest(s: Any, x: Tensor) -> Tensor:
    weight, index = router(s, x).topk(2, -1)
    return chosen(s, x, index, weight / weight.sum(-1, keepdim=True))


@case(WHOLE)
def weights_gathered(s: Any, x: Tensor) -> Tensor:
    index = router(s, x).topk(2, -1).indices
    return chosen(s, x, index, router(s, x).gather(1, index))


@case((WHOLE[0], E * M))
def best_alone(s: Any, x: Tensor) -> Tensor:
    scores = x @ s.r.T
    index = scores.argmax(-1, keepdim=True)
    return chosen(s, x, index, torch.sigmoid(scores).gather(1, index))


@case(WHOLE)
def mixture_of_all(s: Any, x: Tensor) -> Tensor:
    return torch.einsum("be,beo->bo", router(s, x), of_all(s, x))


@case(WHOLE)
def batched_products(s: Any, x: Tensor) -> Tensor:
    wide = x.expand(E, *x.shape)
    h = F.silu(torch.bmm(wide, s.g.mT)) * torch.bmm(wide, s.u.mT)
    return (torch.bmm(h, s.w.mT) * router(s, x).T[..., None]).sum(0)


@case(WHOLE)
def one_hot_dispatch(s: Any, x: Tensor) -> Tensor:
    weight, index = router(s, x).topk(2, -1)
    return ((F.one_hot(index, E) * weight[..., None]).sum(1)[..., None] * of_all(s, x)).sum(1)


@case(WHOLE)
def scattered_weights(s: Any, x: Tensor) -> Tensor:
    weight, index = router(s, x).topk(2, -1)
    return torch.einsum("be,beo->bo", x.new_zeros(len(x), E).scatter(1, index, weight), of_all(s, x))


@case(WHOLE)
def compared_with_numbers(s: Any, x: Tensor) -> Tensor:
    weight, index = router(s, x).topk(2, -1)
    dense = ((index[..., None] == torch.arange(E)) * weight[..., None]).sum(1)
    return torch.einsum("be,beo->bo", dense, of_all(s, x))


@case(WHOLE)
def added_by_index(s: Any, x: Tensor) -> Tensor:
    weight, index = router(s, x).topk(2, -1)
    token, index = torch.arange(len(x)).repeat_interleave(2), index.reshape(-1)
    wide = x[token][..., None]
    h = F.silu((s.g[index] @ wide).squeeze(-1)) * (s.u[index] @ wide).squeeze(-1)
    y = (s.w[index] @ h[..., None]).squeeze(-1) * weight.reshape(-1, 1)
    return x.new_zeros(len(x), OUT).index_add(0, token, y)


# Hidden units of two experts are added up: these have their units in common.
@case(SHARED, **{**GATED, "w": (OUT, M)})
def added_before_they_are_read(s: Any, x: Tensor) -> Tensor:
    weight, index = router(s, x).topk(2, -1)
    h = [(F.silu(s.g[i] @ x[..., None]) * (s.u[i] @ x[..., None])).squeeze(-1) for i in index.unbind(1)]
    return (weight[:, :1] * h[0] + weight[:, 1:] * h[1]) @ s.w.T


@case(SHARED, **{**GATED, "w": (OUT, M)})
def mixed_before_they_are_read(s: Any, x: Tensor) -> Tensor:
    h = F.silu(torch.einsum("bd,emd->bem", x, s.g)) * torch.einsum("bd,emd->bem", x, s.u)
    return torch.einsum("be,bem->bm", router(s, x), h) @ s.w.T


# A number of its own for each expert, which is none of the weights.
@case(((24, 24, 24), E * M))
def factors_tell_experts_apart(s: Any, x: Tensor) -> Tensor:
    slopes = torch.arange(1.0, E + 1, dtype=x.dtype)
    return torch.einsum("be,beo->bo", torch.sigmoid(x @ s.r.T) * slopes, of_all(s, x))


# Nobody knows which expert it is now: none moves, and all have their units in common.
@case(((24,), M + D))
def index_with_something_added(s: Any, x: Tensor) -> Tensor:
    weight, index = router(s, x).topk(2, -1)
    return chosen(s, x, (index + 1) % E, weight)


@case(WHOLE)
def indicators_of_each_expert(s: Any, x: Tensor) -> Tensor:
    """Each expert's share is a product of the largest weights and of indicators, with an axis of experts first."""
    weight, index = router(s, x).topk(2, -1)
    indicators = F.one_hot(index, E).to(x).movedim(2, 0)[..., None]
    shares = (weight[:, None][None] @ indicators)[..., 0, 0]
    return torch.einsum("eb,beo->bo", shares, of_all(s, x))


# Two hidden layers, with a scale for each unit; what a softmax takes off the router.
@case(((6, *[24] * 6), 2 * E * M + D), **DEEP)
def two_layers_in_each_expert(s: Any, x: Tensor) -> Tensor:
    h = torch.relu(torch.einsum("bd,emd->bem", x, s.g) + s.b)
    h = torch.relu(torch.einsum("bem,ekm->bek", h, s.mid))
    return torch.einsum("be,beo->bo", router(s, x), torch.einsum("bek,eok->beo", h, s.w) + s.c)


# Any matrix between queries and keys of a head, and between values and what reads them.
@case(((6,), 6 * 4), (4, D), **HEADS)
def heads_on_an_axis(s: Any, x: Tensor) -> Tensor:
    q, k, v = (torch.einsum("btd,hde->bthe", x, w) for w in (s.q, s.k, s.v))
    z = torch.einsum("bhts,bshe->bthe", torch.einsum("bthe,bshe->bhts", q, k).softmax(-1), v)
    return torch.einsum("bthe,hed->btd", z, s.o)


def squashed(h: Tensor) -> Tensor:
    return h * torch.tanh(h.norm(dim=-1, keepdim=True))


CAPSULES = {"w": (3, 2, 2, 3)}


# The capsules, an orthogonal matrix for each. The weight of the next ones is read along its axes 0 and 2 as one axis.
@case(((6,), 3), **CAPSULES, p=(6, D))
def capsules_on_one_axis(s: Any, x: Tensor) -> Tensor:
    read = squashed((x @ s.p.T).unflatten(1, (3, 2))).flatten(1)
    return squashed((read @ s.w.transpose(1, 2).reshape(6, 6)).unflatten(1, (2, 3)))


@case(((1,), 3), p=(2, D), q=(2, D), r=(2, D), w=(3, 2, 6))
def capsules_of_their_own_layers(s: Any, x: Tensor) -> Tensor:
    read = torch.stack([squashed(x @ own.T) for own in (s.p, s.q, s.r)], 1)
    return torch.einsum("bid,ide->be", read, s.w)


@functools.cache
def traced(name: str) -> tuple[Case, nn.Module, Symmetry]:
    torch.manual_seed(0)
    own = CASES[name]
    network = own.make()
    return own, network, trace_symmetry(network, own.inputs(4))


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
@pytest.mark.few(5, "weights_gathered", "best_alone", "compared_with_numbers", "added_by_index")
def test_members_and_their_units_change_places(name: str) -> None:
    """The whole group; elements keep the function in a fresh network, for another number of samples."""
    own, network, symmetry = traced(name)
    assert math.isclose(symmetry.log10_permutations, sum(math.log10(order) for order in own.orders), abs_tol=1e-9)
    assert symmetry.dimension == own.dimension, symmetry
    x = own.inputs(7)
    moved, fresh = symmetry.act(drawn(symmetry, 1), network), own.make()
    fresh.load_state_dict(moved.state_dict())
    assert any(not torch.equal(one, two) for one, two in zip(fresh.parameters(), network.parameters(), strict=True))
    assert difference(fresh(x), network(x)) < EXACT
    assert_a_group_acts(symmetry, network, EXACT)


# What is done to the integers that name experts, and the order of the group that is left to their places.
MOVED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "roll": (lambda i, x: i.roll(1, -1), 6),
    "flip": (lambda i, x: i.flip(-1), 6),
    "moveaxis": (lambda i, x: i.moveaxis(0, 1).clone().moveaxis(1, 0), 6),
    "unfold": (lambda i, x: i.unfold(1, 1, 1).squeeze(-1), 6),
    "fixed places": (lambda i, x: i.gather(1, torch.tensor([[1, 0]]).expand(len(i), 2)), 6),
    "places by the input": (lambda i, x: i.gather(1, (x[:, :2] > 0).long()), 6),
    "index by the input": (lambda i, x: i[torch.arange(len(i))[:, None], (x[:, :2] > 0).long()], 6),
    "take by the input": (lambda i, x: i.take((x[:, :2] > 0).long()), 1),
    "to double and back": (lambda i, x: i.double().long(), 6),
    "to half and back": (lambda i, x: i.half().int(), 6),
    "to truth values": (lambda i, x: i.bool().long(), 1),
}


@pytest.mark.parametrize("name", MOVED)
def test_integers_that_name_members_may_be_moved_and_cast(name: str) -> None:
    change, order = MOVED[name]

    def program(s: Any, x: Tensor) -> Tensor:
        weight, index = (x @ s.r.T).softmax(-1).topk(2, -1)
        return (s.w[change(index, x)] * weight[..., None]).sum(1)

    network = randomise(Program(program, {"r": parameter(E, D), "w": parameter(E, OUT)})).double()
    x = torch.randn(7, D, dtype=torch.float64)
    symmetry = trace_symmetry(network, x)
    assert round(10**symmetry.log10_permutations) == order
    moved, x = symmetry.act(symmetry.sample(torch.Generator().manual_seed(1)), network), torch.randn(9, D).double()
    assert difference(moved(x).detach(), network(x).detach()) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two_largest", "two_layers_in_each_expert", "heads_on_an_axis"])
def test_planted_elements_are_found_again(name: str) -> None:
    _, network, symmetry = traced(name)
    assert_members_have_one_form(symmetry, network, 1e-8, [3])
    bounds = orbit_distance(symmetry, network, symmetry.act(drawn(symmetry, 3), network))
    assert bounds.lower <= bounds.upper < 1e-8


@pytest.mark.parametrize("name", ["capsules_on_one_axis", "capsules_of_their_own_layers"])
def test_rotations_of_members_are_found_again(name: str) -> None:
    _, network, symmetry = traced(name)
    assert_members_have_one_form(symmetry, network, 1e-8, [3])
    moved = symmetry.act(drawn(symmetry, 3), network)
    assert orbit_distance(symmetry, network, moved).upper < 1e-8
    maps = SoftMaps(symmetry)
    turns = {name: torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q for name, size in maps.sizes.items()}
    weights = maps.act(turns, {name: own.detach() for name, own in network.named_parameters()})
    assert len(turns) == 3
    x = traced(name)[0].inputs(7)
    assert torch.allclose(functional_call(network, weights, x), network(x), atol=1e-12)


def rotated(h: Tensor) -> Tensor:
    angles = torch.arange(h.shape[-2], dtype=h.dtype)[:, None] * torch.tensor([1.0, 0.3], dtype=h.dtype)
    one, two = h[..., :2], h[..., 2:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - two * sin, one * sin + two * cos], -1)


def test_signs_that_only_meet_in_pairs_have_one_form() -> None:
    """Heads and coordinates have signs, and every entry of queries and keys has one of each."""

    def attend(s: Any, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,hde->bhte", x, own) for own in (s.q, s.k, s.v))
        read = (rotated(q) @ rotated(k).mT).softmax(-1) @ v
        return torch.einsum("bhte,hed->btd", read, s.o)

    parts = {"q": parameter(2, 8, 4), "k": parameter(2, 8, 4), "v": parameter(2, 8, 2), "o": parameter(2, 2, 6)}
    network = randomise(Program(attend, parts)).double()
    symmetry = trace_symmetry(network, torch.randn(2, 3, 8, dtype=torch.float64))
    assert_members_have_one_form(symmetry, network, 1e-8, range(8))


@pytest.mark.parametrize("name", ["mixture_of_all", "heads_on_an_axis", "capsules_of_their_own_layers"])
def test_dimension_is_the_nullity_of_the_jacobian(name: str) -> None:
    own, network, symmetry = traced(name)
    assert_dimension_is_the_nullity(symmetry, network, own.inputs(100), 0)


def test_a_trace_inside_of_a_device_context_for_building() -> None:
    with torch.device("meta"):
        network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        symmetry = trace_symmetry(network, torch.randn(2, 5))
    assert symmetry.dimension == 8


def test_experts_that_look_at_values_are_refused_with_the_way_out() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(vocab_size=11, num_key_value_heads=2, num_local_experts=2, **sizes)
    network = transformers.MixtralForCausalLM(config).eval()
    network.set_experts_implementation("eager")
    with pytest.raises(ValueError, match="set_experts_implementation"):
        trace_symmetry(network, input_ids=torch.randint(11, (2, 4)))
