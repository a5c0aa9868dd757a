"""A new kind of symmetry is one class, found by one rule: signs of single entries of weights that are squared."""

import pytest
import torch
from orbit_laws import assert_a_group_acts, assert_matching_undoes, assert_members_have_one_form, drawn
from torch import nn

from lightning_sym.symmetry import canonicalize, orbit_distance, register_rule, trace_symmetry
from lightning_sym.symmetry.group import kinds
from lightning_sym.symmetry.group.factor import Factor
from lightning_sym.symmetry.group.gathered import Canonical


class Squared(nn.Module):
    """A layer without bias that reads the squares of its weights."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, x):
        return nn.functional.linear(x, self.weight.square())


class EntrySign(Factor[tuple[torch.Tensor, ...]]):
    """A sign for each entry of some weights."""

    name, keeps_norms, bounded = "entry_sign", True, True

    def identity(self):
        sizes = [{slot.axes[0]: slot.size for slot in self.structure.slots_of[name]} for name in self.told]
        return tuple(torch.ones([own[axis] for axis in sorted(own)], dtype=torch.float64) for own in sizes)

    def is_identity(self, own):
        return all(bool((signs == 1).all()) for signs in own)

    def sample(self, draw):
        same = self.identity()
        drawn = (torch.randint(0, 2, own.shape, generator=draw.generator) * 2.0 - 1 for own in same)
        return tuple(own.double() for own in drawn) if draw.signs else same

    def compose(self, later, earlier):
        return tuple(one * two for one, two in zip(later, earlier, strict=True))

    def inverse(self, own):
        return own

    def carried(self, own, by, back):
        source, found = self.group.source(by.permutation), []
        for name, signs in zip(self.told, own, strict=True):
            for slot in self.structure.slots_of[name]:
                signs = signs.index_select(slot.axes[0], torch.from_numpy(source[slot.rows] - slot.offset))
            found.append(signs)
        return tuple(found)

    def entries(self, own, name):
        return dict(zip(self.told, own, strict=True)).get(name)

    def canonical(self, state):
        return Canonical(
            {self.name: tuple(torch.where(state.tensors[name] < 0, -1.0, 1.0).double() for name in self.told)}
        )

    def improve(self, search):
        pairs = (search.target[name] * search.current[name] for name in self.told)
        parts = {self.name: tuple(torch.where(own < 0, -1.0, 1.0).double().cpu() for own in pairs)}
        return search.signs and search.attempt(parts, self.told)

    def veiled(self, signs):
        return set(self.told) if signs else set(), set()


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "KINDS", (*kinds.KINDS[:3], EntrySign, *kinds.KINDS[3:]))

        @register_rule(Squared)
        def squared(trace, module, x):
            trace.tell("entry_sign", trace.parameter(module, "weight"))
            return trace.compute(lambda x: nn.functional.linear(x, module.weight.square()), x)

        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), Squared(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
        yield network, trace_symmetry(network, torch.randn(2, 4).double())


def test_it_is_found_acts_and_composes(found):
    network, symmetry = found
    assert symmetry.factors["entry_sign"].told == ["2.weight"]
    assert_a_group_acts(symmetry, network, 1e-11, torch.randn(7, 4).double())
    moved = symmetry.act(drawn(symmetry), network)
    assert not torch.equal(moved[2].weight.sign(), network[2].weight.sign())


def test_forms_matches_and_distances_know_it(found):
    network, symmetry = found
    moved = symmetry.act(drawn(symmetry, 3), network)
    one = canonicalize(symmetry, network)
    assert one.difference < 1e-12
    assert not one.notes
    assert bool((one.network[2].weight >= 0).all())
    assert_members_have_one_form(symmetry, network, 1e-11, [3])
    assert_matching_undoes(symmetry, network, moved, 1e-11)
    assert orbit_distance(symmetry, network, moved).upper < 1e-10
    other = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), Squared(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    distance = orbit_distance(symmetry, network, other)
    assert 0 < distance.lower <= distance.upper


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_the_state_of_an_optimiser_goes_along(found, make):
    """Steps of optimisers commute with permutations and signs, those of single entries included."""
    network, symmetry = found
    element = symmetry.sample(torch.Generator().manual_seed(4), scale=0.0, mixing=False, shifts=False)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(5)).double()
    ends = []
    for moved in (False, True):
        own = symmetry.act(symmetry.identity(), network)
        optimizer = make(own.parameters(), 1e-2, **({"momentum": 0.9} if make is torch.optim.SGD else {}))
        for step in range(3):
            if moved and step == 2:
                symmetry.act(element, own, inplace=True, optimizer=optimizer)
            optimizer.zero_grad()
            own(x).square().mean().backward()
            optimizer.step()
        ends.append(symmetry.act(symmetry.inverse(element), own) if moved else own)
    for one, two in zip(*(end.parameters() for end in ends), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


def test_rules_for_what_is_not_there_say_so(found):
    """Of classes that were defined again, and of operations whose names are mistyped."""
    with pytest.raises(ValueError, match="torch has no operation aten::coshh"):
        register_rule("aten::coshh")
    again = type("Squared", (nn.Linear,), {"forward": Squared.forward})
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), again(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)).double()
    notes = trace_symmetry(network, torch.randn(2, 4).double()).notes
    assert any("a rule belongs to another class Squared" in note for note in notes)
    assert not any("another class" in note for note in found[1].notes)
