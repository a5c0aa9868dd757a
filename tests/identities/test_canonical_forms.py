"""Canonical forms: the same for every member of an orbit, and themselves canonical."""

import copy
import math
from typing import Any

import pytest
import torch
from helpers import Program, assert_refused, of, one_in, parameter
from orbit_cases import EXACT, LARGE, NETWORKS, difference, function_change, made, mlp
from orbit_laws import assert_a_group_acts, assert_members_have_one_form, drawn
from torch import nn
from torch.nn import functional as F

from lightning_sym.symmetry import balance, canonicalize, orbit_distance, trace_symmetry


def squared_norm(network: nn.Module) -> float:
    return math.fsum(float(p.detach().square().sum()) for p in network.parameters())


@pytest.mark.parametrize(
    ("name", "scales"),
    # One pass over 11 million weights in float64 is enough.
    one_in(2, [(name, scales) for name in NETWORKS for scales in ("balanced",
        "unit") if name != LARGE or scales == "balanced"]),
)  # fmt: skip
@pytest.mark.long
def test_one_form_for_the_whole_orbit(name: str, scales: str) -> None:
    network, _, symmetry = made(name)
    before = copy.deepcopy(network)
    found = canonicalize(symmetry, network, scales=scales)
    assert difference(network, before) == 0
    assert found.converged
    assert not found.dead
    # Streams stay with norms of 1; what else acts on them is undone.
    rotated = bool(symmetry.structure.rotations) and scales == "unit"
    assert [note for note in found.notes if "rotated" in note] == list(found.notes)
    assert bool(found.notes) == rotated
    assert function_change(made(name), network, found.network) <= EXACT
    assert difference(symmetry.act(found.element, network), found.network) == 0
    assert difference(canonicalize(symmetry, found.network, scales=scales).network, found.network) <= EXACT
    for seed in range(1 if name == LARGE else 2):
        element = symmetry.sample(torch.Generator().manual_seed(seed), mixing=not rotated)
        member = symmetry.act(element, network)
        assert difference(canonicalize(symmetry, member, scales=scales).network, found.network) <= EXACT


@pytest.mark.parametrize("name", ["relu", "square", "residual", "recurrent", "lenet5"])
def test_balanced_member_has_the_smallest_norm(name: str) -> None:
    network, _, symmetry = made(name)
    found = canonicalize(symmetry, network).network
    least = squared_norm(found)
    for seed in range(5):
        near = symmetry.sample(torch.Generator().manual_seed(seed), scale=0.01)
        assert squared_norm(symmetry.act(near, found)) > least
    for group in balance(symmetry, found).values():
        assert group.dead == 0
        assert float((group.difference / group.incoming).abs().max()) < 1e-11


def test_unit_gauge_is_the_forward_sweep() -> None:
    network, _, symmetry = made("relu")
    found = canonicalize(symmetry, network, scales="unit", order=False).network
    expected = copy.deepcopy(network)
    with torch.no_grad():
        for first, second in ((0, 2), (2, 4), (4, 6)):
            layer = expected[first]
            length = (layer.weight.square().sum(1) + layer.bias.square()).sqrt()
            layer.weight /= length[:, None]
            layer.bias /= length
            expected[second].weight *= length
    assert difference(found, expected) <= 1e-14


def test_batch_norm_gauge() -> None:
    network, _, symmetry = made("myrtle")
    found = canonicalize(symmetry, network).network
    for layer in range(1, 5):
        conv, norm = getattr(found, f"conv{layer}"), getattr(found, f"norm{layer}")
        assert torch.allclose(conv.weight.flatten(1).norm(dim=1), torch.ones_like(norm.weight), rtol=0, atol=1e-12)
        assert (norm.weight > 0).all()
        own = norm.weight.square() + norm.bias.square()
        # The last norm's scale can be balanced against the classifier, whose rows nothing normalises.
        target = found.classifier.weight.square().sum(0) if layer == 4 else torch.ones_like(own)
        assert torch.allclose(own, target, rtol=0, atol=1e-12)


def test_stream_gauge() -> None:
    network, _, symmetry = made(LARGE)
    found = canonicalize(symmetry, network).network
    norms = [found.bn1, found.layer1[0].bn2, found.layer1[1].bn2]
    total = sum(norm.weight.square() + norm.bias.square() for norm in norms)
    assert torch.allclose(total, torch.full_like(total, 3.0), rtol=0, atol=1e-12)
    assert all(bool((norm.weight > 0).all()) for norm in norms)


def test_bias_before_batch_norm_is_zero() -> None:
    network, _, symmetry = made("biased_before_batch_norm")
    bias = canonicalize(symmetry, network).network[0].bias
    assert torch.allclose(bias, torch.zeros_like(bias), rtol=0, atol=1e-14)


def test_largest_incoming_weight_is_positive() -> None:
    network, _, symmetry = made("tanh")
    found = canonicalize(symmetry, network).network
    for layer in (found[0], found[2]):
        rows = torch.cat([layer.weight, layer.bias[:, None]], 1)
        assert (rows.gather(1, rows.abs().argmax(1, keepdim=True)) > 0).all()
        lengths = rows.norm(dim=1)
        assert (lengths[:-1] >= lengths[1:]).all()


def test_ties_of_signs_and_keys() -> None:
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor([[1.0, -1.0], [1.0, 1.0], [-0.5, 0.5], [1.0, -1.0]]))
        network[0].bias.copy_(torch.tensor([0.3, -0.3, 0.0, -0.3]))
        network[2].weight.copy_(torch.tensor([[1.0, -1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]))
    symmetry = trace_symmetry(network, torch.randn(4, 2, dtype=torch.float64))
    found = canonicalize(symmetry, network, signs=False)
    for seed in range(6):
        member = symmetry.act(symmetry.sample(torch.Generator().manual_seed(seed), signs=False), network)
        assert difference(canonicalize(symmetry, member, signs=False).network, found.network) == 0
    found = canonicalize(symmetry, network)
    again = canonicalize(symmetry, found.network)
    assert difference(again.network, found.network) == 0


def test_units_that_only_the_places_of_their_weights_tell_apart_are_sorted() -> None:
    network = nn.Sequential(nn.Linear(2, 2, bias=False), nn.GELU(), nn.Linear(2, 1)).double()
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
        network[2].weight.fill_(1.0)
    symmetry = trace_symmetry(network, torch.randn(4, 2, dtype=torch.float64))
    swapped = symmetry.act(symmetry.identity().replaced(permutation=torch.tensor([1, 0])), network)
    one, two = (canonicalize(symmetry, member) for member in (network, swapped))
    assert difference(one.network, two.network) == 0
    assert not one.notes


@pytest.mark.parametrize("scales", ["balanced", "unit"])
def test_dead_units_are_reported(scales: str) -> None:
    network, _, symmetry = made("relu")
    network = copy.deepcopy(network)
    with torch.no_grad():
        network[0].weight[2] = 0
        network[0].bias[2] = 0
        network[4].weight[:, 5] = 0
    found = canonicalize(symmetry, network, scales=scales)
    if scales == "balanced":
        assert {name: units.nonzero().flatten().tolist() for name, units in found.dead.items()} == {"0": [2], "2": [5]}
        assert [group.dead for group in balance(symmetry, network).values()] == [1, 1, 0]
    else:
        assert found.dead["0"].nonzero().flatten().tolist() == [2]
    assert all(bool(torch.isfinite(p).all()) for p in found.network.parameters())
    assert function_change(made("relu"), network, found.network) <= EXACT
    assert difference(canonicalize(symmetry, found.network, scales=scales).network, found.network) <= EXACT


def test_dead_batch_norm() -> None:
    network, _, symmetry = made("myrtle")
    network = copy.deepcopy(network)
    with torch.no_grad():
        network.norm2.weight[1] = 0
        network.norm2.bias[1] = 0
        network.conv3.weight[0] = 0
    found = canonicalize(symmetry, network)
    assert {name: int(units.sum()) for name, units in found.dead.items()} == {"conv2": 1, "conv3": 1}
    assert all(bool(torch.isfinite(t).all()) for t in found.network.state_dict().values())
    assert function_change(made("myrtle"), network, found.network) <= EXACT


def test_invertible_matrices_are_left() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    symmetry = trace_symmetry(network, torch.randn(2, 3))
    found = canonicalize(symmetry, network)
    assert all(torch.equal(matrix, torch.eye(4, dtype=torch.float64)) for matrix in found.element.dense)
    assert any("invertible matrices" in note for note in found.notes)


def test_parts_of_the_gauge() -> None:
    network, _, symmetry = made("square")
    found = canonicalize(symmetry, network, scales=None, signs=False, order=False)
    assert difference(found.network, network) == 0
    found = canonicalize(symmetry, network, signs=False, order=False)
    assert (found.element.sign == 1).all()
    assert (found.element.permutation == torch.arange(symmetry.units)).all()
    other = copy.deepcopy(network)
    assert canonicalize(symmetry, other, inplace=True).network is other
    assert difference(other, canonicalize(symmetry, network).network) == 0


def test_single_precision() -> None:
    network, _, symmetry = made("resnet20_a")
    single = copy.deepcopy(network).float()
    found = canonicalize(symmetry, single)
    assert all(p.dtype == torch.float32 for p in found.network.parameters())
    expected = canonicalize(symmetry, copy.deepcopy(single).double()).network
    # A few roundings to 24 bits.
    assert difference(found.network.double(), expected) < 1e-5


def test_canonical_forms_name_bad_arguments() -> None:
    network, _, symmetry = made("relu")
    assert_refused(canonicalize, symmetry, network, scales="norm", says="'balanced', 'unit' or None, got 'norm'")
    assert_refused(lambda: canonicalize(symmetry, mlp(nn.ReLU())), says="expected shape")
    broken = copy.deepcopy(network)
    with torch.no_grad():
        broken[2].weight[0, 0] = math.nan
    assert_refused(canonicalize, symmetry, broken, says="2.weight holds values that are not finite")


@pytest.mark.parametrize("name", ["relu", "square", "residual", "recurrent", "myrtle", "myrtle_without_norm", "tanh"])
def test_balance_is_what_gradient_flow_conserves(name: str) -> None:
    network, inputs, symmetry = made(name)
    network = copy.deepcopy(network)
    target = torch.randn(network(inputs).shape, dtype=torch.float64)
    F.mse_loss(network(inputs), target).backward()
    before = balance(symmetry, network)
    # d/dt |w|^2 = -2 <w, g>: a difference quotient along the gradient, symmetric, so that it is exact for squares.
    rates = []
    for step in (1.0, -1.0):
        moved = copy.deepcopy(network)
        with torch.no_grad():
            for p, q in zip(moved.parameters(), network.parameters(), strict=True):
                p.add_(q.grad, alpha=-step)
        rates.append(balance(symmetry, moved))
    for group in before:
        rate = (rates[0][group].difference - rates[1][group].difference) / 4
        size = (rates[0][group].incoming - rates[1][group].incoming).abs().max() / 4
        if name == "tanh":
            assert float(rate.abs().max() / size) > 1e-3
        else:
            assert float(rate.abs().max() / size) < 1e-10
        assert before[group].incoming.dtype == torch.float64


def norms_of_one_layer(s: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return s.head(s.one(s.layer(x)).relu()), s.other_head(s.other(s.layer(x.flip(2))).relu())


def layers_of_one_norm(s: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return s.head(s.one(s.layer(x)).relu()), s.other_head(s.one(s.other(x)).relu())


@pytest.mark.parametrize(
    ("function", "other", "dimension"),
    [(norms_of_one_layer, of(nn.BatchNorm2d, 6), 24), (layers_of_one_norm, of(nn.Conv2d, 3, 6, 3), 18)],
)
def test_a_shift_that_layers_or_norms_share_is_one(function: Any, other: Any, dimension: int) -> None:
    torch.manual_seed(0)
    parts = {"layer": of(nn.Conv2d, 3, 6, 3), "one": of(nn.BatchNorm2d, 6), "other": other}
    heads = dict.fromkeys(("head", "other_head"), of(nn.Conv2d, 6, 2, 1))
    network = Program(function, {**parts, **heads}).double().eval()
    for buffer in network.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    symmetry = trace_symmetry(network, torch.randn(2, 3, 8, 8).double())
    assert (symmetry.shifts, symmetry.dimension) == (6, dimension)
    assert_a_group_acts(symmetry, network, 1e-12)
    assert_members_have_one_form(symmetry, network, 1e-12)
    assert orbit_distance(symmetry, network, symmetry.act(drawn(symmetry, 1), network)).upper < 1e-12


def of_heads(s, x):
    """Attention in a stream, and then queries that share keys, with gains behind each query."""
    y = torch.relu(s.inner(x))
    y = torch.relu(y + s.attention(y, y, y, need_weights=False)[0])
    q, k, v = (layer(y).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (s.q, s.k, s.v))
    mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
    return s.head(s.gain * mixed)


HEADS = {"inner": of(nn.Linear, 4, 8), "attention": of(nn.MultiheadAttention, 8, 2, batch_first=True),
         "q": of(nn.Linear, 8, 12), "k": of(nn.Linear, 8, 4), "v": of(nn.Linear, 8, 4), "gain": parameter(12),
         "head": of(nn.Linear, 12, 3)}  # fmt: skip


@pytest.mark.long
def test_heads_have_one_form_and_no_distance_on_an_orbit():
    torch.manual_seed(0)
    network, other = (Program(of_heads, HEADS).double().eval() for _ in range(2))
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    symmetry = trace_symmetry(network, x)
    assert any(symmetry.structure.copies)
    form = canonicalize(symmetry, network)
    assert form.converged
    assert not form.notes
    assert torch.allclose(form.network(x), network(x), rtol=0, atol=EXACT)
    for seed in range(2):
        element = symmetry.sample(torch.Generator().manual_seed(seed))
        again = canonicalize(symmetry, symmetry.act(element, network))
        assert difference(again.network, form.network) < 1e-9
        assert difference(symmetry.act(again.element, symmetry.act(element, network)), again.network) < EXACT
    assert orbit_distance(symmetry, network, symmetry.act(element, network)).upper < 1e-9
    one, two = (orbit_distance(symmetry, network, n) for n in (other, symmetry.act(element, other)))
    assert 0.1 < max(one.lower, two.lower) <= min(one.upper, two.upper)
    assert one.lower == pytest.approx(two.lower, abs=1e-9)
    assert one.notes == ()


def test_cells_without_a_balanced_member_are_named():
    network = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    symmetry = trace_symmetry(network, torch.randn(2, 5, dtype=torch.float64))
    assert any("linearly dependent" in note for note in canonicalize(symmetry, network).notes)
    bounds = orbit_distance(symmetry, network, network)
    assert bounds.lower == 0
    assert any("no lower bound" in note for note in bounds.notes)


@pytest.mark.parametrize("removed", ["in", "out", "both"])
def test_scales_of_dead_units_leave_no_lower_bound(removed: str) -> None:
    """They have no balance: points of one orbit differ there after balancing, at a distance of 0."""
    network = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        if removed != "out":
            network[0].weight[1], network[0].bias[1] = 0, 0
        if removed != "in":
            network[2].weight[:, 1] = 0
    symmetry = trace_symmetry(network, torch.randn(2, 5, dtype=torch.float64))
    other = symmetry.act(drawn(symmetry, 0), network)
    bounds = orbit_distance(symmetry, network, other)
    assert bounds.lower < EXACT
    assert any("have no balance" in note for note in bounds.notes) == (removed != "both")
    assert (bounds.upper < EXACT) == (removed == "both")


@torch.enable_grad()  # as in a notebook: weights that require gradients are no reason to fail
@pytest.mark.long
def test_post_norm_transformers_on_one_orbit_have_one_form() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    network = nn.Sequential(nn.Linear(5, 8), layer, nn.Linear(8, 3)).double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    symmetry = trace_symmetry(network, torch.randn(2, 4, 5, dtype=torch.float64), check=False)
    assert_members_have_one_form(symmetry, network, 1e-10)


def written(forward, **parts) -> nn.Module:
    return Program(forward, parts)


def square(size: int = 6) -> nn.Parameter:
    return nn.Parameter(torch.randn(size, size))


def ends() -> dict[str, nn.Module]:
    return {"a": nn.Linear(5, 6), "o": nn.Linear(6, 3)}


def mask(*shape: int) -> torch.Tensor:
    return (torch.rand(*shape) > 0.4).float()


def three_summands(s, x):
    return s.o(torch.relu(s.a(x) + s.b + s.c))


def attended(s, y):
    parts = (layer(y[None]).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (s.q, s.k, s.v))
    return s.p(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


def beside_heads(s, x, after):
    y = s.a(x)
    return s.o(y.relu() + after(attended(s, y)))


def in_two_signs(s, x):
    """Every entry of the values depends on the sign of the whole stream, too, which only the last gain tells."""
    y = s.a(x)
    y = y + torch.tanh(attended(s, y))
    return s.o(y + s.m(s.w(torch.tanh(s.u(y)))))


def heads(bias: bool = False) -> dict[str, nn.Module]:
    layers = {name: nn.Linear(6, 4 if name == "v" else 6) for name in "qkv"}
    return layers | {"p": nn.Linear(4, 6, bias=bias), **ends()}


def gain_of_both_signs() -> nn.Module:
    norm = nn.RMSNorm(6)
    norm.weight = nn.Parameter(torch.tensor([0.5, -1.0, 0.0, 2.0, -0.3, 1.0]))
    return norm


def embedding(s, i, t):
    return s.o(torch.relu(s.h(s.n(s.e(i) + s.t(t) + s.p))))


# Networks, and whether their form is unique.
def beside_a_norm(s, x):
    h = s.a(x)
    return h + s.d(torch.nn.functional.gelu(s.u(s.n(h))))


def gains_of_both_signs(size):
    norm = nn.LayerNorm(size)
    nn.init.normal_(norm.weight)
    return norm


SELF_TESTED = {
    "symmetric matrix": (lambda: written(lambda s, x: s.o(s.a(x) @ (s.w + s.w.T)), w=square(), **ends()), True),
    "symmetric matrix between tanh": (lambda: written(lambda s, x: s.o((s.a(x).tanh() @ (s.w + s.w.T)).tanh()),
        w=square(), **ends()), True),
    "antisymmetric matrix": (lambda: written(lambda s, x: s.o(s.a(x) @ (s.w - s.w.T)), w=square(), **ends()), False),
    "product of weights": (lambda: written(lambda s, x: s.o((x @ (s.v * s.w)).relu()), v=square(5), w=square(5),
        o=nn.Linear(5, 3)), True),
    "symmetric matrix beside a path": (lambda: written(lambda s, x: s.o(s.a(x) + s.a(x).relu() @ (s.w + s.w.T)),
        w=square(), **ends()), True),
    "mask times a weight": (lambda: written(lambda s, x: s.o((x @ (s.w * s.m)).relu()), w=square(5), m=mask(5, 5),
        o=nn.Linear(5, 3)), True),
    "mask that divides": (lambda: written(lambda s, x: s.o((x @ (s.w * s.m)).relu()), w=square(5), m=2 * mask(5, 5),
        o=nn.Linear(5, 3)), True),
    "mask of units": (lambda: written(lambda s, x: s.o(s.a(x).relu() * s.m), m=mask(6), **ends()), True),
    "three summands": (lambda: written(three_summands, **{k: nn.Parameter(torch.randn(6)) for k in "bc"}, **ends()),
        True),
    "norm behind heads": (lambda: written(lambda s, x: beside_heads(s, x, s.n), n=gain_of_both_signs(), **heads()),
        True),
    "norm behind heads and a bias": (lambda: written(lambda s, x: beside_heads(s, x, s.n), n=gain_of_both_signs(),
        **heads(bias=True)), True),
    "tanh behind heads": (lambda: written(lambda s, x: beside_heads(s, x, torch.tanh), **heads()), True),
    "tanh in a stream of two signs": (lambda: written(in_two_signs, m=nn.LayerNorm(6), u=nn.Linear(6, 5),
        w=nn.Linear(5, 6), **heads(bias=True)), True),
    "half of a rotated stream": (lambda: written(lambda s, x: s.o(0.5 * beside_a_norm(s, x)), a=nn.Linear(5, 4),
        n=gains_of_both_signs(4), u=nn.Linear(4, 3), d=nn.Linear(3, 4), o=nn.Linear(4, 6)), True),
    "rotated stream read by what writes it": (lambda: written(lambda s, x: beside_a_norm(s, x) @ s.a.weight,
        a=nn.Linear(5, 4), n=gains_of_both_signs(4), u=nn.Linear(4, 3), d=nn.Linear(3, 4)), True),
    "embedding, types and positions": (lambda: written(embedding, e=nn.Embedding(11, 6), t=nn.Embedding(2, 6),
        p=nn.Parameter(torch.randn(4, 6)), n=nn.LayerNorm(6), h=nn.Linear(6, 8), o=nn.Linear(8, 3)), True),
}  # fmt: skip


OFTEN = ["product of weights", "half of a rotated stream", "rotated stream read by what writes it"]
OFTEN += ["embedding, types and positions"]


@pytest.mark.few(4, *OFTEN)
@pytest.mark.parametrize("name", SELF_TESTED)
def test_the_form_says_whether_it_is_unique(name):
    make, unique = SELF_TESTED[name]
    torch.manual_seed(0)
    network = make().double()
    words = (torch.randint(11, (3, 4)), torch.randint(2, (3, 4)))
    x = words if name.startswith("embedding") else torch.randn(3, 5, dtype=torch.float64)
    symmetry = trace_symmetry(network, x, check=False)
    found = canonicalize(symmetry, network)
    largest = 0.0
    for seed in range(2):
        element = symmetry.sample(torch.Generator().manual_seed(seed))
        other = canonicalize(symmetry, symmetry.act(element, network), check=False)
        pairs = zip(found.network.state_dict().values(), other.network.state_dict().values(), strict=True)
        largest = max(largest, *(float((one - two).abs().max()) for one, two in pairs))
    assert (largest < 1e-10) == (found.difference < 1e-10) == unique
    assert found.converged
    assert unique == (not any(note.startswith("not unique") for note in found.notes))
    assert math.isnan(other.difference)
    if "mask" in name:
        assert set(found.network.m.unique().tolist()) == set(network.m.unique().tolist())


def test_norms_behind_heads_of_a_language_model_leave_one_form():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Olmo2Config(
        vocab_size=13, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    network = transformers.Olmo2ForCausalLM(config).double().eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "norm" in name:
                parameter.normal_()
    form = canonicalize(trace_symmetry(network, input_ids=torch.randint(13, (2, 4)), output="logits"), network)
    assert form.difference < 1e-10


def test_shifts_that_do_not_settle_are_no_canonical_form(monkeypatch):
    torch.manual_seed(0)
    network = SELF_TESTED["three summands"][0]().double()
    symmetry = trace_symmetry(network, torch.randn(3, 5, dtype=torch.float64))
    monkeypatch.setattr("lightning_sym.symmetry.canonical.form._MOST_TURNS", 1)
    found = canonicalize(symmetry, network)
    assert not found.converged
    assert any("shifts and all else were found to" in note for note in found.notes)


def test_sign_of_a_number() -> None:
    """A parameter without axes has a sign where only its size is read (Gabor wavelets)."""
    forward = lambda s, x: s.o(torch.cos(s.f * s.a(x)) * torch.exp(-((s.w * s.a(x)) ** 2)))  # noqa: E731
    number = lambda: nn.Parameter(torch.tensor(0.7))  # noqa: E731
    network = Program(forward, {"a": of(nn.Linear, 5, 3), "o": of(nn.Linear, 3, 4), "f": number, "w": number}).double()
    symmetry = trace_symmetry(network, torch.randn(9, 5, dtype=torch.float64), nullity=False)
    assert symmetry.signs == 5
    assert_members_have_one_form(symmetry, network, EXACT, seeds=range(3))
    member = symmetry.act(drawn(symmetry, 0), network)
    assert orbit_distance(symmetry, network, member).upper < 1e-7
