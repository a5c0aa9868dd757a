"""Elements of a traced network's symmetry form a group, and act as one."""

import functools
import tempfile

import pytest
import torch
from helpers import Program, assert_same, of, parameter
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_sym.symmetry.moving import MovedTensors
from lightning_sym.symmetry.trace import trace_symmetry

LAW = settings(max_examples=3, deadline=None, derandomize=True)
TIGHT = 1e-12  # relative to the largest entry of each tensor


def attention(s, x):
    """A residual stream with one attention block: dense cells, heads that move as blocks, LayerNorm."""
    x = s.inner(x)
    y = s.norm(x)
    return s.head(torch.tanh(x + s.attention(y, y, y, need_weights=False)[0]))


def grouped(s, x):
    """Grouped convolutions on both sides of a residual stream, with batch norms and padded channels."""
    x = torch.relu(s.first(x))
    y = torch.relu(s.transposed(torch.relu(s.norm(s.grouped(x)))))
    return s.last(torch.cat([nn.functional.pad(x, (0, 0, 0, 0, 2, 2)), y], 1)[:, 1:])


def products(s, x):
    """Products of several factors: scales that never act alone on a weight."""
    return s.head(s.norm(s.norm(s.a(x) * s.b(x) * s.c(x))) * s.gain * s.other_gain)


def mixed_groups(s, x):
    """A grouped convolution whose groups hold units and inputs."""
    return s.last(torch.relu(s.grouped(torch.cat([torch.relu(s.first(x)), x], 1))))


def recurrent(s, x):
    """A recurrent network written by hand, which starts from zeros."""
    state = torch.zeros(x.shape[0], 6, dtype=x.dtype)
    for step in range(x.shape[1]):
        state = torch.tanh(s.inner(x[:, step]) + s.again(state))
    return s.head(state)


def grouped_queries(s, x):
    """Attention of six queries with two keys, and gains behind each query: copies that have scales of their own."""
    q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (s.q, s.k, s.v))
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return s.head(s.gain * mixed.transpose(1, 2).flatten(2))


def unbiased(s, x):
    """Attention whose queries, keys and values have no biases behind a layer norm that has one."""
    x = s.inner(x)
    q, k, v = s.qkv(s.norm(x)).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
    x = x + s.gain * s.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
    return s.head(s.last_norm(x))


def program(function, **parts):
    return lambda: Program(function, parts)


def stream(s, x):
    """A residual stream that is rotated between the gains of its norms, one of which may leave ones alone."""
    x = s.write(x)
    x = x + s.scale * s.down(torch.sigmoid(s.up(s.norm(x))))
    return s.head(s.last_norm(x))


def gains_and_ones(s, x):
    """A stream whose norms have gains 1 + w (Gemma), cast on the way."""

    def norm(x, w):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + w.to(x.dtype))

    x = s.write(x)
    x = x + s.down(torch.tanh(s.up(norm(x, s.gain))))
    return s.head(norm(x, s.last_gain))


def sines(s, x):
    """Sines and cosines of multiples of layers with biases, one of which adds to a stream."""
    x = torch.cos(s.first(x) / 2).mean((2, 3))
    x = torch.sin(30 * s.second(x))
    v = s.third(x)
    return s.last(torch.sin(v) + torch.cos(-v) + torch.sin(s.again(x)))


def rotary(s, x):
    """Attention whose queries and keys are turned by their positions."""
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3], dtype=x.dtype)

    def turned(y):
        one, two = y.unflatten(-1, (-1, 4)).transpose(1, 2).chunk(2, -1)
        return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)

    x = s.inner(x)
    values = s.v(x).unflatten(-1, (-1, 4)).transpose(1, 2)
    mixed = nn.functional.scaled_dot_product_attention(turned(s.q(x)), turned(s.k(x)), values)
    return s.head(torch.tanh(s.out(mixed.transpose(1, 2).flatten(2))))


def bottlenecks(s, x):
    """A stream that batch norms and a gain write into and linear maps alone read, behind a layer norm."""
    x = s.norm(s.first(x))
    y = s.one(s.write(x))
    y = y + s.gain * s.plain(torch.relu(s.expand(y)))
    y = y + s.two(s.project(torch.tanh(s.again(y))))
    return s.head(y)


def gained_heads(s, x):
    """A batch norm behind queries, keys and values of heads, which change places as blocks, and gains."""
    x = s.norm(s.inner(x).flatten(0, 1)).unflatten(0, x.shape[:2])
    q, k, v = x.unflatten(-1, (2, 7)).transpose(1, 2).split([2, 2, 3], -1)
    mixed = nn.functional.scaled_dot_product_attention(q, k, v)
    return s.head(s.gain * mixed.transpose(1, 2).flatten(2))


def added_kernels(s, x):
    x = torch.relu(s.stem(x))
    return s.head(torch.relu(s.a(s.three(x)) + s.b(s.one(x)) + s.c(x)))


L, C = nn.Linear, nn.Conv2d
RECURRENT = program(recurrent, inner=of(L, 5, 6), again=of(L, 6, 6), head=of(L, 6, 2))
NETWORKS = {
    "rotated stream": (program(stream, write=of(L, 5, 6), norm=of(nn.RMSNorm, 6), up=of(L, 6, 4), down=of(L, 4, 6),
        head=of(L, 6, 3), scale=parameter(6), last_norm=of(nn.RMSNorm, 6)), (2, 5)),
    "gains and ones": (program(gains_and_ones, write=of(L, 5, 6), up=of(L, 6, 4), down=of(L, 4, 6), head=of(L, 6, 3),
        gain=parameter(6), last_gain=parameter(6)), (2, 5)),
    "centred stream": (program(stream, write=of(L, 5, 6), norm=of(nn.LayerNorm, 6), up=of(L, 6, 4), down=of(L, 4, 6),
        head=of(L, 6, 3), scale=parameter(6), last_norm=of(nn.RMSNorm, 6)), (2, 5)),
    "tilted stream": (program(stream, write=of(L, 5, 6), norm=of(nn.LayerNorm, 6), up=of(L, 6, 4), down=of(L, 4, 6),
        head=of(L, 6, 3, bias=False), scale=parameter(6), last_norm=of(nn.LayerNorm, 6)), (2, 5)),
    "unbiased attention": (program(unbiased, inner=of(L, 5, 4), norm=of(nn.LayerNorm, 4), qkv=of(L, 4, 12, bias=False),
        out=of(L, 4, 4), gain=parameter(4), last_norm=of(nn.LayerNorm, 4), head=of(L, 4, 3)), (2, 3, 5)),
    "products": (program(products, a=of(L, 5, 6), b=of(L, 5, 6), c=of(L, 5, 6), gain=parameter(6),
        other_gain=parameter(6), norm=of(nn.RMSNorm, 6), head=of(L, 6, 3)), (2, 5)),
    "mixed groups": (program(mixed_groups, first=of(C, 3, 5, 1), grouped=of(C, 8, 6, 1, groups=2), last=of(C, 6, 2, 1)),
        (2, 3, 4, 4)),
    "recurrent": (RECURRENT, (2, 3, 5)),
    "grouped queries": (program(grouped_queries, q=of(L, 5, 12), k=of(L, 5, 4, bias=False), v=of(L, 5, 4),
        gain=parameter(12), head=of(L, 12, 2)), (2, 3, 5)),
    "bottlenecks": (program(bottlenecks, first=of(L, 8, 6), norm=of(nn.LayerNorm, 6), write=of(L, 6, 3, bias=False),
        one=of(nn.BatchNorm1d, 3), expand=of(L, 3, 5), plain=of(L, 5, 3), gain=parameter(3), again=of(L, 3, 5),
        project=of(L, 5, 3), two=of(nn.BatchNorm1d, 3), head=of(L, 3, 4)), (2, 8)),
    "linear bottleneck": (lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.LeakyReLU(), nn.Conv2d(6, 3, 1, bias=False),
        nn.BatchNorm2d(3), nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 1)), (2, 4, 3, 3)),
    "gained heads": (program(gained_heads, inner=of(L, 5, 14), norm=of(nn.BatchNorm1d, 14), gain=parameter(6),
        head=of(L, 6, 4)), (2, 3, 5)),
    "perceptron": (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)),
        (2, 5)),
    "linear": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 4), nn.Linear(4, 2)),
        (2, 5)),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(24, 5),
        nn.BatchNorm1d(5), nn.Sigmoid(), nn.Linear(5, 2)), (2, 3, 8, 8)),
    "attention": (program(attention, inner=of(L, 5, 8), norm=of(nn.LayerNorm, 8), head=of(L, 8, 3),
        attention=of(nn.MultiheadAttention, 8, 2, batch_first=True)), (2, 4, 5)),
    "grouped": (program(grouped, first=of(C, 3, 4, 1), grouped=of(C, 4, 8, 3, padding=1, groups=2),
        norm=of(nn.BatchNorm2d, 8), transposed=of(nn.ConvTranspose2d, 8, 8, 3, padding=1, groups=2),
        last=of(C, 15, 2, 1)), (2, 3, 4, 4)),
    "sines": (program(sines, first=of(C, 2, 4, 3), second=of(L, 4, 5), third=of(L, 5, 4), again=of(L, 5, 4),
        last=of(L, 4, 3)), (2, 2, 5, 5)),
    "rotary": (program(rotary, inner=of(L, 5, 6), q=of(L, 6, 8), k=of(L, 6, 8), v=of(L, 6, 8), out=of(L, 8, 5),
        head=of(L, 5, 3)), (2, 4, 5)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(9, 4), nn.RMSNorm(4), nn.Linear(4, 6), nn.PReLU(),
        nn.Linear(6, 2)), None),
    "added kernels": (program(added_kernels, stem=of(C, 3, 4, 1), three=of(C, 4, 4, 3, padding=1, bias=False),
        one=of(C, 4, 4, 1, bias=False), a=of(nn.BatchNorm2d, 4), b=of(nn.BatchNorm2d, 4), c=of(nn.BatchNorm2d, 4),
        head=of(C, 4, 2, 1)), (2, 3, 5, 5)),
    "low rank": (program(lambda s, x: s.o(torch.tanh(s.w(x) + s.b(s.a(x)))), w=of(L, 6, 5), a=of(L, 6, 2, bias=False),
        b=of(L, 2, 5, bias=False), o=of(L, 5, 4)), (2, 6)),
}  # fmt: skip
each = pytest.mark.parametrize("name", sorted(NETWORKS))
seeds = st.integers(0, 2**40)
flags = st.fixed_dictionaries({flag: st.booleans() for flag in ("permutations", "signs", "mixing", "shifts")})


@functools.cache
def traced(name):
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    network = make().double()
    for module in network.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            nn.init.normal_(module.weight)
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.bias)
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.running_mean)
    x = torch.randn(shape, dtype=torch.float64) if shape else torch.arange(8).reshape(2, 4)
    return network, trace_symmetry(network, x)


def draw(symmetry, seed, count, **options):
    generator = torch.Generator().manual_seed(seed)
    return [symmetry.sample(generator, **options) for _ in range(count)]


def same_element(one, two, tolerance=1e-11):
    assert torch.equal(one.permutation, two.permutation)
    assert torch.equal(one.sign, two.sign)
    assert torch.equal(one.half_turn, two.half_turn)
    pairs = zip(one.tensors().items(), two.tensors().values(), strict=True)
    for (name, a), b in pairs:
        if name == "phase":
            a, b = a.cos() + 2 * a.sin(), b.cos() + 2 * b.sin()
        a, b = (torch.eye(max(len(a), len(b)), dtype=c.dtype) if c.shape == (0, 0) else c for c in (a, b))
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def same_weights(one, two, tolerance=TIGHT):
    first, second = one.state_dict(), two.state_dict()
    assert first.keys() == second.keys()
    for name, a in first.items():
        size = float(a.abs().max())
        assert float((a - second[name]).abs().max()) <= tolerance * size, name


@pytest.mark.few(4, "gained heads", "grouped")
@each
@LAW
@given(seeds)
def test_elements_form_a_group_that_acts_and_is_saved(name, seed):
    network, symmetry = traced(name)
    a, b, c = draw(symmetry, seed, 3)
    one = symmetry.identity()
    same_element(symmetry.compose(symmetry.compose(a, b), c), symmetry.compose(a, symmetry.compose(b, c)))
    same_element(symmetry.compose(a, one), a)
    same_element(symmetry.compose(one, a), a)
    inverse = symmetry.inverse(a)
    same_element(symmetry.compose(inverse, a), one)
    same_element(symmetry.compose(a, inverse), one)
    same_element(symmetry.inverse(inverse), a)
    same_element(symmetry.inverse(symmetry.compose(a, b)), symmetry.compose(symmetry.inverse(b), symmetry.inverse(a)))
    same_element(symmetry.inverse(one), one, 0)
    same_weights(symmetry.act(b, symmetry.act(a, network)), symmetry.act(symmetry.compose(b, a), network))
    with tempfile.TemporaryDirectory() as folder:
        again = symmetry.load(symmetry.save(a, f"{folder}/element.safetensors"))
    assert all(torch.equal(x, y) for x, y in zip(a.tensors().values(), again.tensors().values(), strict=True))


@pytest.mark.few(4)
@each
@LAW
@given(seeds)
def test_each_factor_is_a_group_that_the_outer_ones_carry_into_itself(name, seed):
    """Elements of one factor act as its own product says; :math:`g n g^{-1}` stays in the factor for outer g."""
    network, symmetry = traced(name)
    g, h = draw(symmetry, seed, 2)
    one = symmetry.identity()
    kinds = [*symmetry.factors]
    for place, factor in enumerate(kinds):
        mine, other = (one.replaced(**{factor.name: own.parts[factor.name]}) for own in (g, h))
        if factor.is_identity(mine.parts[factor.name]):
            continue
        both = one.replaced(**{factor.name: factor.compose(other.parts[factor.name], mine.parts[factor.name])})
        same_element(symmetry.compose(other, mine), both)
        same_weights(symmetry.act(both, network), symmetry.act(other, symmetry.act(mine, network)), 1e-11)
        undone = one.replaced(**{factor.name: factor.inverse(mine.parts[factor.name])})
        same_element(symmetry.compose(undone, mine), one)
        outside = one.replaced(**{own.name: h.parts[own.name] for own in kinds[:place]})
        back = symmetry.inverse(outside)
        carried = symmetry.compose(symmetry.compose(outside, mine), back)
        for own in kinds:
            assert own.is_identity(carried.parts[own.name]) or own is factor or _nearly(own, carried)


def _nearly(factor, element):
    """Return whether the part of a factor is the identity up to rounding."""
    part, same = element.parts[factor.name], factor.identity()
    pairs = zip(part, same, strict=True) if isinstance(part, tuple) else [(part, same)]
    return all(torch.allclose(a, b if b.shape == a.shape else torch.eye(len(a), dtype=a.dtype)) for a, b in pairs)


def same_bits(one, two):
    for key, value in one.state_dict().items():
        tolerance = 1e-15 if "running_var" in key else 0  # v' = s^2 (v + eps) - eps rounds
        torch.testing.assert_close(two.state_dict()[key], value, rtol=tolerance, atol=tolerance)


@each
def test_the_identity_changes_no_bit(name):
    network, symmetry = traced(name)
    same_bits(network, symmetry.act(symmetry.identity(), network))


@pytest.mark.few(6)
@each
@LAW
@given(seeds, st.booleans())
def test_permutations_and_signs_are_inverted_bitwise(name, seed, signs):
    network, symmetry = traced(name)
    (g,) = draw(symmetry, seed, 1, scale=0, signs=signs, mixing=False, shifts=False)
    g = g.replaced(half_turn=symmetry.identity().half_turn)  # what is added and taken off again is rounded
    same_bits(network, symmetry.act(symmetry.inverse(g), symmetry.act(g, network)))


@each
@LAW
@given(seeds)
def test_sampling_is_determined_by_the_generator(name, seed):
    _, symmetry = traced(name)
    state = torch.get_rng_state()
    a, b = draw(symmetry, seed, 2)
    again, _ = draw(symmetry, seed, 2)
    assert all(torch.equal(x, y) for x, y in zip(a.tensors().values(), again.tensors().values(), strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(a.tensors().values(), b.tensors().values(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@each
@LAW
@given(seeds, flags, st.sampled_from([0.0, 0.5, 2.0]))
def test_sampling_respects_its_flags(name, seed, flags, scale):
    network, symmetry = traced(name)
    (g,) = draw(symmetry, seed, 1, scale=scale, **flags)
    one = symmetry.identity()
    assert sorted(g.permutation.tolist()) == one.permutation.tolist()
    assert bool((g.sign.abs() == 1).all())
    if not flags["permutations"]:
        assert torch.equal(g.permutation, one.permutation)
    if not flags["signs"]:
        assert torch.equal(g.sign, one.sign)
        assert not bool(g.half_turn.any())
    if scale == 0:
        assert not g.log_scale.any()
        assert all(torch.allclose(m @ m.mT, torch.eye(len(m), dtype=m.dtype)) for m in g.dense)
    if not flags["mixing"]:
        assert all(torch.equal(m, torch.eye(len(m), dtype=m.dtype)) for m in g.dense)
        assert not any(bool(t.any()) for t in g.tilt)
    if scale == 0 or not flags["shifts"]:
        assert not bool(g.shift.any())
    if not flags["shifts"]:
        assert not bool(g.half_turn.any())
    (still,) = draw(symmetry, seed, 1, scale=0, **dict.fromkeys(flags, False))
    assert all(own.is_identity(still.parts[own.name]) for own in symmetry.factors)
    same_weights(network, symmetry.act(still, network), 0)


@pytest.mark.few(6)
@each
@LAW
@given(seeds, st.sampled_from([0.1, 0.5, 1.0]))
def test_scales_have_the_spread_asked_for(name, seed, scale):
    _, symmetry = traced(name)
    elements = draw(symmetry, seed, 30, scale=scale)
    drawn = torch.stack([e.log_scale for e in elements])
    drawn = drawn[:, drawn.any(0)]
    if drawn.numel() > 100:
        assert float(drawn.std()) == pytest.approx(scale, rel=0.3)


@pytest.mark.parametrize("name", ["perceptron", "convolutions", "grouped"])
def test_permutations_are_uniform(name):
    """Over many draws each unit comes to each place of its own axis group equally often, and to no other."""
    _, symmetry = traced(name)
    counts = torch.zeros(symmetry.units, symmetry.units)
    for element in draw(symmetry, 0, 1500):
        counts[torch.arange(symmetry.units), element.permutation] += 1
    for group in symmetry.groups:
        inside = counts[group.units][:, group.units]
        assert float(inside.sum()) == 1500 * group.size
        if group.kind != "moves with its block":
            assert float((inside * group.size / 1500 - 1).abs().max()) < 0.35


def test_permutations_of_grouped_queries_are_uniform():
    """All 2! 3! 3! orders of six queries with two keys come equally often."""
    _, symmetry = traced("grouped queries")
    slots = next(copies for copies in symmetry.structure.copies if copies is not None).slots[0]
    orders = [tuple(e.permutation[slots].tolist()) for e in draw(symmetry, 0, 1200)]
    assert len(set(orders)) == 12  # of the group that comes to the first place, and of its three queries
    assert min(map(orders.count, set(orders))) > 60


@pytest.mark.few(6)
@each
@LAW
@given(seeds)
def test_tensors_by_name_move_as_in_the_network(name, seed):
    network, symmetry = traced(name)
    (g,) = draw(symmetry, seed, 1)
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    moved = symmetry.act(g, network)
    made, inplace = moved.state_dict(), symmetry.act(symmetry.identity(), network)
    asked_for, there = MovedTensors(symmetry.factors, g, symmetry.tensors(network)), symmetry.tensors(moved)
    assert asked_for.keys() == tensors.keys()
    assert all(torch.equal(value, made[key]) for key, value in symmetry.act_on(g, tensors).items())
    assert_same(symmetry.act(g, inplace, inplace=True).state_dict(), made)
    assert all(torch.allclose(value, there[key], rtol=1e-14, atol=1e-14) for key, value in asked_for.items())


def test_zeros_to_start_from_do_not_hide_the_group():
    symmetry = trace_symmetry(RECURRENT(), torch.randn(2, 3, 5))
    assert [(group.size, group.kind) for group in symmetry.groups] == [(6, "permutation + sign")]
