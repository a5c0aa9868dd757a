"""Rotary positions turn planes of coordinates, on which complex numbers act: in all conventions, and what forbids it.

See docs/theory/transformers.md, 5. The judge is the nullity of the Jacobian.
"""

import functools

import pytest
import torch
from helpers import assert_refused, one_in
from orbit_laws import (
    assert_a_group_acts,
    assert_dimension_is_the_nullity,
    assert_members_have_one_form,
    assert_tangents_change_no_output,
    assert_values_move,
    drawn,
)
from torch import nn
from torch.nn import functional as F

from lightning_sym.symmetry import balance_heads, canonicalize, orbit_distance, trace_symmetry
from lightning_sym.symmetry.dimension import local_dimension

pytestmark = pytest.mark.long

N, E, T = 5, 4, 6  # width of the input, of a head, and positions
EXACT = 1e-10


def angles(positions, width=E):
    return positions[:, None] * 3.0 ** -torch.arange(width // 2, dtype=torch.float64)


def halves(x, positions):
    angle = torch.cat([angles(positions, x.shape[-1])] * 2, -1)
    one, two = x.chunk(2, -1)
    return x * angle.cos() + torch.cat((-two, one), -1) * angle.sin()


def halves_the_other_way_round(x, positions):
    angle = torch.cat([angles(positions, x.shape[-1])] * 2, -1)
    one, two = x.chunk(2, -1)
    return torch.cat((-two, one), -1) * angle.sin() + x * angle.cos()


def two_sums(x, positions):
    angle = angles(positions, x.shape[-1])
    one, two = x.chunk(2, -1)
    return torch.cat([one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()], -1)


def neighbours(x, positions):
    angle = angles(positions, x.shape[-1])
    one, two = x[..., ::2], x[..., 1::2]
    pairs = [one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()]
    return torch.stack(pairs, -1).flatten(-2)


def every_two(x, positions):
    angle = angles(positions, x.shape[-1]).repeat_interleave(2, -1)
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * angle.cos() + turned * angle.sin()


def complex_numbers(x, positions):
    angle = angles(positions, x.shape[-1])
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def mirrored(x, positions):
    """Reflections by half the angle: what comes out is turned the other way."""
    angle = torch.cat([angles(positions, x.shape[-1])] * 2, -1)
    one, two = x.chunk(2, -1)
    return torch.cat((one, -two), -1) * angle.cos() + torch.cat((two, one), -1) * angle.sin()


def partial(x, positions):
    return torch.cat([halves(x[..., :2], positions), x[..., 2:]], -1)


def scaled(x, positions):
    """Longer at later positions (xPos), the same for queries and keys."""
    return halves(x, positions) * (1 + positions[:, None] / 10)


CONVENTIONS = (
    *(halves, halves_the_other_way_round, two_sums, neighbours, every_two),
    *(complex_numbers, mirrored, partial, scaled),
)


class Attention(nn.Module):
    """One layer of attention, heads of E coordinates; `between` happens to queries and keys before they are turned."""

    def __init__(self, turn, heads=2, keys=2, bias=False, between=None, other=None):
        super().__init__()
        self.turn, self.heads, self.keys, self.between, self.other = turn, heads, keys, between, other
        self.q, self.k = nn.Linear(N, heads * E, bias=bias), nn.Linear(N, keys * E, bias=bias)
        self.v, self.o = nn.Linear(N, keys * E, bias=False), nn.Linear(heads * E, 3, bias=False)
        self.gain = nn.Parameter(torch.randn(E)) if between is gains else None

    def forward(self, x, positions=None):
        where = torch.arange(x.shape[1], dtype=torch.float64) if positions is None else positions.double()
        q, k, v = (layer(x).unflatten(-1, (-1, E)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.between is not None:
            q, k = self.between(self, q), self.between(self, k)
        turned = self.turn(q, where), (self.other or self.turn)(k, where)
        mixed = F.scaled_dot_product_attention(*turned, v, is_causal=True, enable_gqa=self.keys < self.heads)
        return self.o(mixed.transpose(1, 2).flatten(2))


@functools.cache
def traced(turn, **options):
    torch.manual_seed(0)
    network = Attention(turn, **options).double()
    x = torch.randn(2, T, N, dtype=torch.float64)
    return network, x, trace_symmetry(network, x)


@pytest.mark.parametrize("turn", CONVENTIONS)
def test_planes_are_found_in_all_conventions(turn):
    _, _, symmetry = traced(turn)
    planes = 2 if turn is partial else E  # in two heads; and the matrices of values, and of what is not turned
    assert symmetry.structure.phases == planes
    assert symmetry.dimension == 2 * planes + 2 * E**2 + (2 * 2**2 if turn is partial else 0)
    assert symmetry.worst_error <= EXACT
    (kind,) = {group.kind for group in symmetry.groups if group.phase}
    assert kind == "scale + phase"
    assert "permuted blocks: 2 of" in str(symmetry)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("turn", [halves, neighbours, complex_numbers, partial])
def test_dimension_is_the_nullity_of_the_jacobian(turn):
    network, _, symmetry = traced(turn, heads=4, bias=True)
    assert_dimension_is_the_nullity(symmetry, network, torch.randn(16, T, N, dtype=torch.float64), 1e6)
    assert symmetry.worst_error <= EXACT


def gains(network, x):
    return x * network.gain


def means(network, x):
    return x - x.mean(-1, keepdim=True)


def an_activation(network, x):
    return torch.tanh(x)


def another_angle(x, positions):
    """The two coordinates of a plane see two angles."""
    angle = positions[:, None] * 3.0 ** -torch.arange(E, dtype=torch.float64)
    one, two = x.chunk(2, -1)
    return x * angle.cos() + torch.cat((-two, one), -1) * angle.sin()


def stretched(x, positions):
    """A symmetric matrix at each position, no rotation."""
    angle = torch.cat([angles(positions)] * 2, -1)
    one, two = x.chunk(2, -1)
    return x * angle.cos() + torch.cat((two, one), -1) * angle.sin()


def read_before(x, positions):
    return halves(x, positions) + torch.relu(x)


def half_read(x, positions):
    angle = torch.cat([angles(positions)] * 2, -1)
    one, two = x.chunk(2, -1)
    turned = torch.cat((-two, one), -1) * angle.sin()
    return x * angle.cos() + turned + torch.relu(turned)


def in_place(x, positions):
    x = x.clone()
    one = x[..., :2] * 1.0
    x[..., :2] = one * angles(positions).cos() - x[..., 2:] * angles(positions).sin()
    return x


FORBIDDEN = {
    "gains": (halves, {"between": gains}),
    "means": (halves, {"between": means}),
    "an activation": (halves, {"between": an_activation}),
    "two angles": (another_angle, {}),
    "no rotation": (stretched, {}),
    "read before": (read_before, {}),
    "half of it read": (half_read, {}),
    "in place": (in_place, {}),
    "keys of another convention": (halves, {"other": neighbours}),
    "keys turned back": (halves, {"other": lambda x, positions: halves(x, -positions)}),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_sees_single_coordinates_leaves_no_phase(name):
    turn, options = FORBIDDEN[name]
    _, _, symmetry = traced(turn, **options)
    assert symmetry.worst_error <= EXACT
    turned_back = name == "keys turned back"  # a rotation is a rotation
    assert symmetry.structure.phases == (E if turned_back else 0)


def test_balanced_planes_have_queries_and_keys_of_one_norm():
    network, x, symmetry = traced(neighbours, heads=4, bias=True)
    moved, element = balance_heads(symmetry, network)
    torch.testing.assert_close(moved(x), network(x), rtol=EXACT, atol=EXACT)

    def norms(layer):
        """Of each key's planes, the bias included."""
        rows = torch.cat([layer.weight, layer.bias[:, None]], 1)
        return rows.square().sum(1).reshape(2, -1, E // 2, 2).sum((1, 3))

    torch.testing.assert_close(norms(moved.q), norms(moved.k), rtol=EXACT, atol=EXACT)
    other = symmetry.act(symmetry.sample(permutations=False).replaced(shift=symmetry.identity().shift), network)
    torch.testing.assert_close(norms(balance_heads(symmetry, other).network.q), norms(moved.q), rtol=1e-8, atol=1e-8)
    assert not element.phase.any()
    zero = symmetry.act(symmetry.identity(), network)
    with torch.no_grad():
        zero.k.weight[0], zero.k.weight[1], zero.k.bias[:2] = 0.0, 0.0, 0.0
    assert any("1 planes stay" in note for note in balance_heads(symmetry, zero).notes)


class RepeatedBefore(Attention):
    """Keys are repeated for the queries that share them before they are turned, and not behind."""

    def forward(self, x):
        where = torch.arange(x.shape[1], dtype=torch.float64)
        q, k, v = (layer(x).unflatten(-1, (-1, E)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (y[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for y in (k, v))
        mixed = F.scaled_dot_product_attention(self.turn(q, where), self.turn(k, where), v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("turn", [halves, neighbours])
def test_copies_are_turned_as_what_they_are_copies_of(turn):
    torch.manual_seed(0)
    network, x = RepeatedBefore(turn, heads=4).double(), torch.randn(2, T, N, dtype=torch.float64)
    symmetry, same = trace_symmetry(network, x), traced(turn, heads=4)[2]
    assert (symmetry.structure.phases, symmetry.dimension) == (E, same.dimension)
    assert symmetry.log10_permutations == same.log10_permutations > 0
    assert symmetry.worst_error <= EXACT


class SharedKeys(nn.Module):
    """All heads share keys that are turned, and have others of their own: both are written into one tensor."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.own = (nn.Linear(N, size, bias=False) for size in (2 * 2 * E, E, 2 * E))

    def forward(self, x):
        where = torch.arange(x.shape[1], dtype=torch.float64)
        q, own = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.own))
        k = halves(self.k(x), where)[:, None].expand(-1, 2, -1, -1)
        keys = own.new_empty(*own.shape[:-1], 2 * E)
        keys[..., :E].copy_(own)
        keys[..., E:].copy_(k)
        return (torch.cat([q[..., :E], halves(q[..., E:], where)], -1) @ keys.mT).sum(1)


def test_a_modulus_that_units_share_leaves_no_phase_to_one_of_them():
    torch.manual_seed(0)
    network = SharedKeys().double()
    symmetry = trace_symmetry(network, torch.randn(2, T, N, dtype=torch.float64))
    assert symmetry.worst_error <= EXACT
    assert symmetry.structure.phases in (0, E // 2)  # none, or one that turns the queries of all heads along


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("turn", one_in(2, CONVENTIONS))
def test_one_position_is_traced_as_several(turn, check):
    torch.manual_seed(0)
    network = Attention(turn).double()
    x = torch.randn(2, T, N, dtype=torch.float64)
    symmetry = trace_symmetry(network, x[:, :1], check=check)
    assert symmetry.dimension == trace_symmetry(network, x, check=False).dimension
    element = drawn(symmetry)
    torch.testing.assert_close(symmetry.act(element, network)(x), network(x), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("options", [{"heads": 4, "bias": True}, {"heads": 4, "keys": 4}], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_phases_obey_the_laws_of_a_group(seed, options):
    network, x, symmetry = traced(halves, **options)
    element = drawn(symmetry, seed)
    assert element.phase.abs().max() > 0
    assert_a_group_acts(symmetry, symmetry.act(element, network), EXACT, x)
    assert_values_move(symmetry, element, network, x, "qkv", EXACT)


class Tapped(nn.Module):
    """Halves, with what comes between them watched."""

    def __init__(self):
        super().__init__()
        self.inside, self.whole = nn.Identity(), nn.Identity()

    def forward(self, x, positions):
        angle = torch.cat([angles(positions)] * 2, -1)
        one, two = x.chunk(2, -1)
        return self.whole(self.inside(x * angle.cos()) + torch.cat((-two, one), -1) * angle.sin())


def test_values_between_the_planes_and_what_is_made_of_them_have_no_image():
    torch.manual_seed(0)
    network = Attention(Tapped()).double()
    x = torch.randn(2, T, N, dtype=torch.float64)
    symmetry = trace_symmetry(network, x)
    element = drawn(symmetry)
    assert_values_move(symmetry, element, network, x, ["turn.whole"], EXACT)
    assert_refused(lambda: symmetry.on_activations(element, "turn.inside"), says=["turn.inside shows", "mixing=False"])
    symmetry.on_activations(symmetry.sample(mixing=False), "turn.inside")


class Scores(Attention):
    """The scores of queries and keys alone: no matrix acts, which has no tangents here."""

    def __init__(self):
        super().__init__(halves, bias=True)
        self.v = self.o = None

    def forward(self, x):
        where = torch.arange(x.shape[1], dtype=torch.float64)
        q, k = (self.turn(f(x).unflatten(-1, (-1, E)).transpose(1, 2), where) for f in (self.q, self.k))
        return (q @ k.mT).sum(1)


def test_tangents_of_phases_change_no_output_and_are_as_many_as_these():
    torch.manual_seed(0)
    network, x = Scores().double(), torch.randn(2, T, N, dtype=torch.float64)
    symmetry = trace_symmetry(network, x)
    assert (symmetry.structure.phases, symmetry.dimension) == (E, 2 * E)
    found = assert_tangents_change_no_output(symmetry, network, x, EXACT)
    assert (found.rank, found.vectors.shape[1]) == (2 * E, 2 * E)


def test_planted_phases_are_recovered_by_the_canonical_form():
    network, _, symmetry = traced(neighbours, heads=4, bias=True)
    form = assert_members_have_one_form(symmetry, network, 1e-8, [3])
    rows = form.q.weight.detach().reshape(2, 2, E // 2, 2, N)  # keys, queries, planes, coordinates
    assert float((rows[..., 0, :] * rows[..., 1, :]).sum((1, -1)).abs().max()) < EXACT
    assert canonicalize(symmetry, network, scales=None).notes
    distance = orbit_distance(symmetry, network, symmetry.act(drawn(symmetry, 3), network))
    assert distance.lower <= distance.upper < 1e-6
    assert any("planes are turned" in note for note in distance.notes)


def test_second_moments_of_turned_weights_have_no_image():
    network, x, symmetry = traced(halves)
    moved = symmetry.act(symmetry.identity(), network)
    optimizer = torch.optim.Adam(moved.parameters())
    moved(x).square().sum().backward()
    optimizer.step()
    only = drawn(symmetry)
    act = functools.partial(symmetry.act, network=moved, inplace=True, optimizer=optimizer)
    assert_refused(lambda: act(only), says=["second moments", "mixing=False"])
    act(symmetry.sample(mixing=False))


# Models of transformers: the table of the dimensions derived by hand.

SPEC = {
    "Llama": ("Llama", {"num_attention_heads": 2}, 160),
    "Llama, no eps": ("Llama", {"num_attention_heads": 2, "rms_norm_eps": 0.0}, 161),
    "Llama, grouped": ("Llama", {"num_key_value_heads": 2}, 104),
    "Llama, grouped and tied": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}, 68),
    "Qwen2": ("Qwen2", {"num_key_value_heads": 2}, 104),
    "Qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 2}, 98),
}


def in_double_precision(norm, x):
    return norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))


def tables_in_double_precision(rotary, x, position_ids):
    angle = torch.cat([position_ids[..., None].double() * rotary.inv_freq.double()] * 2, -1)
    return angle.cos(), angle.sin()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SPEC)
def test_dimension_of_a_language_model_is_the_nullity_of_the_jacobian(name, monkeypatch):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind, changed, dimension = SPEC[name]
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 14, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False, "rms_norm_eps": 0.1}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, "tie_word_embeddings": False, **changed})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double().eval()
    for module in model.modules():  # these cast to single precision
        if type(module).__name__.endswith("RMSNorm"):
            monkeypatch.setattr(type(module), "forward", in_double_precision)
        if type(module).__name__.endswith("RotaryEmbedding"):
            monkeypatch.setattr(type(module), "forward", tables_in_double_precision)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2 + (parameter.ndim == 1))
    symmetry = trace_symmetry(model, input_ids=torch.arange(10).reshape(2, 5))
    assert symmetry.worst_error <= EXACT
    assert symmetry.dimension == dimension
    found = local_dimension(symmetry, model, input_ids=torch.randint(0, 14, (40, 5)), tolerance=1e-10)
    assert found.gap > 1e6
    assert found.nullity == dimension
