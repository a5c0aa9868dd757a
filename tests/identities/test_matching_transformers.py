"""Elements of every kind that were planted in transformers are found by matching, to rounding."""

import copy
import functools
import itertools

import pytest
import torch
from architectures import Logits
from helpers import one_in
from torch import nn

from lightning_sym.connectivity.interpolation import output_change
from lightning_sym.networks import CompactTransformer, VisionTransformer
from lightning_sym.orbit.directions import OrbitDirections
from lightning_sym.symmetry import (
    activation_matching,
    orbit_distance,
    parameter_distance,
    trace_symmetry,
    weight_matching,
)
from lightning_sym.symmetry.matching.coordinate_descent import FREEDOM
from lightning_sym.symmetry.matching.soft_maps import SoftMaps

pytestmark = pytest.mark.long

EXACT = 1e-8  # relative to the norm of the weights; after gauges found by iteration


def vision(**options):
    sizes = {"in_channels": 1, "image_size": 8, "patch_size": 2, "width": 16, "depth": 2, "heads": 2}
    return VisionTransformer(**sizes, **options)


def compact():
    return CompactTransformer(variant="2/3x1", in_channels=1, image_size=8, width=16, heads=2)


def language(kind, **options):
    transformers = pytest.importorskip("transformers")
    tokens = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    if kind == "GPT2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 24, "n_positions": 6}
        return Logits(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens, **options)))
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Logits(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **tokens, **options)))


CASES = {
    "vit": functools.partial(vision),
    "vit_rotary": functools.partial(vision, norm="rms", positions="rotary", activation="swiglu", layer_scale=0.5),
    "cct": compact,
    "gpt2_tied": functools.partial(language, "GPT2", tie_word_embeddings=True),
    "gpt2": functools.partial(language, "GPT2", tie_word_embeddings=False),
    "llama": functools.partial(language, "Llama", tie_word_embeddings=False),
    "llama_grouped": functools.partial(language, "Llama", num_key_value_heads=2, tie_word_embeddings=False),
}


@functools.cache
def planted(name):
    """Return a network of generic weights, what an element of every kind makes of it, their symmetry, and inputs."""
    torch.manual_seed(0)
    network = CASES[name]().double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    images = name.startswith(("vit", "cct"))
    inputs = torch.randn(64, 1, 8, 8).double() if images else torch.randint(0, 20, (64, 6))
    symmetry = trace_symmetry(network, inputs[:2])
    element = symmetry.sample(torch.Generator().manual_seed(1))
    return network, symmetry.act(element, network), symmetry, inputs


@pytest.mark.parametrize(
    ("method", "name"),
    [*one_in(3, [("weights", name) for name in CASES]), *one_in(3, [("activations", name) for name in CASES], 1)],
)
def test_planted_elements_of_every_kind_are_found(method, name):
    a, b, symmetry, inputs = planted(name)
    if method == "weights":
        match = weight_matching(symmetry, a, b)
    else:
        match = activation_matching(symmetry, a, b, inputs.split(16))
    size = float(sum(p.detach().square().sum() for p in a.parameters())) ** 0.5
    assert match.distance_after <= EXACT * size < match.distance_before
    assert parameter_distance(match.network, symmetry.act(match.element, b)) == 0


def test_all_but_tilts_is_found_where_the_biases_of_norms_are_zero():
    """As in networks that were never trained, in which a tilt leaves no trace: docs/theory/matching.md, 1.8."""
    torch.manual_seed(0)
    a = compact().double().eval()
    symmetry = trace_symmetry(a, torch.randn(2, 1, 8, 8).double(), check=False)
    assert symmetry.structure.tilts
    element = symmetry.sample(torch.Generator().manual_seed(1)).replaced(tilt=symmetry.identity().tilt)
    match = weight_matching(symmetry, a, symmetry.act(element, a))
    assert match.distance_after <= EXACT < 1 < match.distance_before
    found = orbit_distance(symmetry, a, symmetry.act(symmetry.sample(torch.Generator().manual_seed(1)), a))
    assert (found.lower, ["rank-one" in note for note in found.notes]) == (0, [True])


@pytest.mark.parametrize(
    "name",
    ["vit", "vit_rotary", "cct", "gpt2_tied", "gpt2",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "llama_grouped"))],
)  # fmt: skip
def test_of_unrelated_transformers_only_the_distance_changes(name):
    a, _, symmetry, inputs = planted(name)
    torch.manual_seed(1)
    b = CASES[name]().eval()  # single precision, as checkpoints are
    before = {key: tensor.clone() for key, tensor in b.state_dict().items()}
    match = weight_matching(symmetry, copy.deepcopy(a).float(), b)
    assert match.distance_after < match.distance_before
    assert all(one <= two for one, two in itertools.pairwise(match.objective))
    assert match.sweeps < 100
    assert all(torch.equal(tensor, before[key]) for key, tensor in b.state_dict().items())
    assert parameter_distance(match.network, symmetry.act(match.element, b)) == 0
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    with torch.no_grad():
        assert torch.allclose(match.network(inputs), b(inputs), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["vit", "vit_rotary", "cct"])
def test_gradients_on_the_orbit_are_derivatives_along_it(name):
    """Of a linear function of the weights, against differences: streams, matrices, phases and scales at once."""
    network, _, symmetry, _ = planted(name)
    directions, weights = OrbitDirections(symmetry), dict(network.named_parameters())
    generator = torch.Generator().manual_seed(2)
    slopes = {n: torch.randn(p.shape, dtype=torch.float64, generator=generator) for n, p in weights.items()}
    found = directions.pulled_back(weights, slopes)
    assert {"scales", "matrix 0"} <= set(found)
    assert ("rotation 0" in found, "phases" in found) == (name != "cct", name == "vit_rotary")
    for kind, gradient in found.items():
        along = {k: torch.zeros(shape, dtype=torch.float64) for k, shape in directions.shapes.items()}
        along[kind] = torch.randn(gradient.shape, dtype=torch.float64, generator=generator)

        def value(step, along=along):
            element = directions.element({name: step * own for name, own in along.items()})
            moved = symmetry.act(element, network)
            return sum(float((slopes[n] * p.detach()).sum()) for n, p in moved.named_parameters())

        slope = (value(1e-5) - value(-1e-5)) / 2e-5
        assert slope == pytest.approx(float((gradient * along[kind]).sum()), rel=1e-6, abs=1e-6), kind


def soft_maps_of(symmetry, soft, generator):
    """Return an element of permutations within cells, matrices and rotations, and the soft maps that it is."""
    structure, drawn = symmetry.structure, symmetry.sample(generator)
    permutation, maps = torch.arange(symmetry.units), {}
    for name, size in soft.sizes.items():
        kind, numbers = name.split(" ", 1)
        if kind == "units":
            orbit, cell = map(int, numbers.split(","))
            units = torch.from_numpy(structure.orbits[orbit][structure.cells[orbit] == cell])
            order = torch.randperm(size, generator=generator)
            permutation[units], maps[name] = units[order], torch.eye(size, dtype=torch.float64)[order]
        else:
            maps[name] = (drawn.rotation if kind == "stream" else drawn.dense)[int(numbers)]
    element = symmetry.identity()
    return element.replaced(permutation=permutation, dense=drawn.dense, rotation=drawn.rotation), maps


@pytest.mark.parametrize("name", ["vit", "vit_rotary", "cct"])
def test_soft_maps_that_are_in_the_group_act_as_it_does(name):
    network, _, symmetry, _ = planted(name)
    soft, weights = SoftMaps(symmetry), {n: p.detach() for n, p in network.named_parameters()}
    element, maps = soft_maps_of(symmetry, soft, torch.Generator().manual_seed(3))
    assert {own.split()[0] for own in maps} == ({"matrix", "units"} if name == "cct" else {"matrix", "stream", "units"})
    moved = symmetry.act(element, network)
    for own, value in soft.act(maps, weights).items():
        torch.testing.assert_close(value, moved.get_parameter(own).detach(), atol=1e-10, rtol=1e-10)
    batches = [(planted(name)[3][:4], None)]
    assert output_change(network, moved, batches) < 1e-10
    maps[next(own for own in maps if own.startswith("units"))].mul_(1.1)
    with torch.no_grad():
        for own, value in soft.act(maps, weights).items():
            moved.get_parameter(own).copy_(value)
    assert output_change(network, moved, batches) > 1e-4


@pytest.mark.parametrize("name", ["vit", "vit_rotary"])
def test_gradients_of_soft_maps_are_differences(name):
    network, _, symmetry, _ = planted(name)
    soft, weights = SoftMaps(symmetry), {n: p.detach() for n, p in network.named_parameters()}
    generator = torch.Generator().manual_seed(4)
    slopes = {n: torch.randn(p.shape, dtype=torch.float64, generator=generator) for n, p in weights.items()}
    _, maps = soft_maps_of(symmetry, soft, generator)

    def value(*given):
        moved = soft.act(dict(zip(maps, given, strict=True)), weights)
        return sum((slopes[n] * own).sum() for n, own in moved.items())

    given = tuple(own.requires_grad_() for own in maps.values())
    assert torch.autograd.gradcheck(value, given, fast_mode=True)


def test_parts_of_the_group_move_what_they_may():
    a, _, symmetry, _ = planted("vit")
    torch.manual_seed(1)
    b = CASES["vit"]().double().eval()
    allowed, before = [], parameter_distance(a, b)
    for word in FREEDOM:
        allowed.append(word)
        element = weight_matching(symmetry, a, b, freedom=allowed).element
        matrices = any(bool((matrix - matrix.diag().diag()).any()) for matrix in element.dense)
        assert matrices == ("matrices" in allowed)
        assert any(len(turn) for turn in element.rotation) == ("rotations" in allowed)
        moved = parameter_distance(a, symmetry.act(element, b))
        assert moved <= before + 1e-9
    with pytest.raises(ValueError, match="blocks"):
        weight_matching(symmetry, a, b, freedom=["block"])


def test_query_heads_inside_a_group_are_matched_under_noise():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=24, intermediate_size=10, num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=13, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    a = transformers.LlamaForCausalLM(config).double().eval()
    b = copy.deepcopy(a)
    with torch.no_grad():
        for own in b.parameters():
            own.add_(0.2 * own.std() * torch.randn_like(own))
    c = copy.deepcopy(b)
    attention, size = c.model.layers[0].self_attn, config.head_dim
    heads = torch.tensor([5, 3, 4, 2, 0, 1])  # groups are exchanged, and heads inside each are permuted
    rows = (heads[:, None] * size + torch.arange(size)).flatten()
    groups = (torch.tensor([1, 0])[:, None] * size + torch.arange(size)).flatten()
    with torch.no_grad():
        attention.q_proj.weight.copy_(attention.q_proj.weight[rows])
        attention.o_proj.weight.copy_(attention.o_proj.weight[:, rows])
        for own in (attention.k_proj, attention.v_proj):
            own.weight.copy_(own.weight[groups])
    ids = torch.randint(13, (2, 6))
    torch.testing.assert_close(b(ids).logits, c(ids).logits, rtol=0, atol=1e-10)
    symmetry = trace_symmetry(a, input_ids=ids, check=False)
    one, two = (weight_matching(symmetry, a, own, scales=False) for own in (b, c))
    assert two.distance_before > 1.2 * one.distance_before
    assert two.distance_after == pytest.approx(one.distance_after, rel=1e-9)


class GroupedQueries(nn.Module):
    """Attention with three queries for each of two keys, and a ReLU before values are averaged."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, size) for size in (24, 8, 8))
        self.out = nn.Linear(24, 5)

    def forward(self, x):
        query, key, value = (
            own.unflatten(-1, (-1, 4)).transpose(1, 2)
            for own in (self.query(x), self.key(x), self.value(x).relu())
        )  # fmt: skip
        key, value = (own.repeat_interleave(3, 1) for own in (key, value))
        read = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        return self.out(read.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("seed", range(3))
def test_activations_match_keys_by_values_and_weights_their_queries(seed):
    torch.manual_seed(0)
    a = GroupedQueries().double().eval()
    b, inputs = copy.deepcopy(a), torch.randn(64, 6, 8).double()
    with torch.no_grad():
        for own in b.parameters():
            own.add_(0.1 * own.std() * torch.randn_like(own))
    symmetry = trace_symmetry(a, inputs[:2], check=False)
    element = symmetry.sample(torch.Generator().manual_seed(seed), scale=0.0)
    one, two = (activation_matching(symmetry, a, own, inputs.split(16)) for own in (b, symmetry.act(element, b)))
    assert two.distance_before > 10 * one.distance_before
    assert two.distance_after == pytest.approx(one.distance_after, rel=1e-9)
