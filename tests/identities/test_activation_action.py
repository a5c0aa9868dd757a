"""The group acts on activations: what an element does to the weights, and what `on_activations` says of every value."""

from typing import Any

import pytest
import torch
from helpers import Program, assert_refused, of, one_in, sequential
from symmetry_family_cases import CASES, difference, randomise
from test_stitching_theorem import OURS, SLOW, WRAPPED, listed, made
from torch import Tensor, fx, nn

from lightning_sym.stitching import Crossing
from lightning_sym.symmetry import Element, Symmetry, trace_symmetry
from lightning_sym.symmetry.charts import Charts, charted
from lightning_sym.symmetry.elements import Tap
from lightning_sym.symmetry.tracing import tracer
from lightning_sym.symmetry.tracing.graph.capture import Capture, Mark, capture, state_tensors

EXACT = 1e-9  # of float64, relative to each number and to what is usual in its tensor; measured values are below 1e-11


class Watching(fx.Interpreter):
    """Runs a captured network and keeps every value that an operation returns, as it was then."""

    def __init__(self, found: Capture) -> None:
        super().__init__(fx.GraphModule(found.graph.owning_module, found.graph))
        self.values: dict[str, Tensor] = {}
        self.names: dict[str, list[str]] = {}  # by node, as the normal form may have another one in its place
        for mark in found.marks:
            self.names.setdefault(mark.node.name, []).append(mark.name)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if "empty" in n.name:
            result.zero_()  # what was there before, nobody reads
        if isinstance(result, Tensor):
            self.values |= dict.fromkeys([n.name, *self.names.get(n.name, ())], result.clone())
        return result


def marked(found: Capture) -> Capture:
    """Name every value of the graph."""
    found.marks = [
        Mark(node.name, node, node)
        for node in found.graph.nodes
        if node.op == "call_function"
        and isinstance(value := node.meta.get("val"), Tensor)
        and value.is_floating_point()
    ]
    return found


def without_unknown(symmetry: Symmetry, element: Element) -> Element:
    """Leave out the shifts that add something to a value that depends on the input."""
    shift = element.shift.clone()
    for tap in symmetry.taps.values():
        if len(tap.shown.unknown):
            shift[torch.from_numpy(symmetry.structure.shifts.reaching(tap.shown.unknown)[0])] = 0
    return element.replaced(shift=shift)


def halves_planes(symmetry: Symmetry, tap: Tap) -> bool:
    """Whether a value shows coordinates of planes one by one."""
    structure = symmetry._values
    if not structure.phases:
        return False
    units = [slot.unit.ravel() for slot in tap.seen]
    seen = [int((structure.phase_of[own[own >= 0]] >= 0).sum()) for own in units]
    told = [2 * len(structure.turned_places.get(slot.offset, ((),))[0]) for slot in tap.seen]
    return any(seen) and seen != told


def check_every_value(
    monkeypatch: pytest.MonkeyPatch,
    network: nn.Module,
    example: tuple[Any, ...],
    tolerance: float,
    draws: int = 3,
    **settings: Any,
) -> Symmetry:
    """Let random elements act on a network, and compare the values of all operations."""
    captures: list[Capture] = []

    def keep(*arguments: Any, **keywords: Any) -> Capture:
        captures.append(marked(capture(*arguments, **keywords)))
        return captures[-1]

    monkeypatch.setattr(tracer, "capture", keep)
    symmetry = trace_symmetry(network, example, check=False, **settings)  # what follows is a stricter test

    def values(network: nn.Module) -> dict[str, Tensor]:
        watching = Watching(captures[0])
        inputs = [x.clone() for x in example if isinstance(x, Tensor)]
        with torch.no_grad():
            states = charted(state_tensors(network), Charts(captures[0].charts))  # the graph reads 1 + w as w
            watching.run(*(tensor.clone() for tensor in states.values()), *inputs)
        return watching.values

    before = values(network)
    assert symmetry.taps
    for seed in range(draws):
        element = symmetry.sample(torch.Generator().manual_seed(seed))
        after = values(symmetry.act(element, network))
        for name, tap in symmetry.taps.items():
            if tap.squared:  # no matrix acts there, if units are rotated
                continue
            if len(tap.shown.unknown):
                assert_refused(symmetry.on_activations, element, tap, network, says="multiple of ones")
                continue
            if halves_planes(symmetry, tap):
                assert_refused(symmetry.on_activations, element, tap, network, says="coordinates of planes")
                continue
            told = symmetry.on_activations(element, tap, network).apply(before[name])
            assert difference(after[name], told) < tolerance, name
        element = without_unknown(symmetry, element).replaced(phase=symmetry.identity().phase)
        after = values(symmetry.act(element, network))
        for name, tap in symmetry.taps.items():
            if tap.squared:
                continue
            told = symmetry.on_activations(element, tap, network).apply(before[name])
            assert difference(after[name], told) < tolerance, name
    return symmetry


@pytest.mark.parametrize("name", one_in(7, CASES, 1))
@pytest.mark.long
def test_every_value_of_a_traced_program_moves_as_it_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    settings = {"more_examples": [make(2) for make in case.more]} if case.more else {}
    check_every_value(monkeypatch, case.make().double(), case.example(2), case.tolerance, **settings)


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))


def mixer(s: Any, x: Tensor) -> Tensor:
    """Mixes tokens, then channels: units live on two axes of one value."""
    h = s.embed(x)
    h = h + s.back(s.act(s.tokens(h.mT))).mT
    return s.out(s.act2(s.channels(h)))


def attention(s: Any, x: Tensor) -> Tensor:
    """Shows the weights of its heads, which change places as wholes."""
    q, k, v = s.project(x).unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4)
    weights = s.dropped((q @ k.mT).softmax(-1))
    return s.out((weights @ v).transpose(1, 2).flatten(2))


def rolled(s: Any, x: Tensor) -> Tensor:
    """The last unit's pixels stand in another order than those of the others."""
    return s.out(s.act(s.head(s.act(s.conv(x)).flatten(1).roll(1, 1))))


def program(function: Any, **parts: Any) -> Any:
    return lambda: Program(function, parts)


L, C = nn.Linear, nn.Conv2d
MIXER = program(mixer, embed=of(L, 5, 6), tokens=of(L, 4, 7), back=of(L, 7, 4), act=nn.ReLU, channels=of(L, 6, 9),
                act2=nn.ReLU, out=of(L, 9, 3))  # fmt: skip
SMALL = {
    "sigmoids": (sequential(of(L, 5, 8), nn.Sigmoid, of(L, 8, 7), nn.Hardsigmoid, of(L, 7, 3)), (5,), {"affine": True}),
    "shift": (with_batch_norm, (5,), {}),
    "flattened": (sequential(of(C, 3, 4, 3), nn.ReLU, of(nn.MaxPool2d, 2), nn.Flatten, of(L, 36, 5), nn.Tanh,
        of(L, 5, 2)), (3, 8, 8), {}),
    "linear": (sequential(of(C, 3, 4, 3), of(nn.AvgPool2d, 2), nn.Flatten, of(L, 36, 5), of(L, 5, 2)), (3, 8, 8), {}),
    "grouped": (sequential(of(C, 3, 8, 3), nn.ReLU, of(C, 8, 6, 1, groups=2), of(nn.GroupNorm, 2, 6), nn.GELU,
        nn.Flatten, of(L, 216, 2)), (3, 8, 8), {}),
    "rolled": (program(rolled, conv=of(C, 3, 4, 3), act=nn.ReLU, head=of(L, 36, 5), out=of(L, 5, 2)), (3, 5, 5), {}),
    "mixer": (MIXER, (4, 5), {}),
    "attention": (program(attention, project=of(L, 6, 36), dropped=nn.Dropout, out=of(L, 12, 6)), (5, 6), {}),
    "torch's attention": (of(nn.TransformerEncoderLayer, 8, 2, 12, batch_first=True), (5, 8), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.few(4, "attention")
def test_every_value_of_a_small_network_moves_as_it_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape, settings = SMALL[name]
    torch.manual_seed(0)
    network = randomise(make().double())
    example = (torch.randn(2, *shape, dtype=torch.float64),)
    symmetry = check_every_value(monkeypatch, network, example, EXACT, **settings)
    parts = [symmetry.on_activations(symmetry.identity(), tap).parts for tap in symmetry.taps.values()]
    if name == "mixer":
        assert any(set(own) == {(1,), (2,)} for own in parts)
    if name == "attention":  # head by head
        assert any(set(own) == {(1,)} and len(own[1,][0].permutation) == 4 for own in parts)
        assert symmetry.structure.blocks


ARCHITECTURES = {**OURS, **WRAPPED}


@pytest.mark.parametrize("name", one_in(3, listed(ARCHITECTURES)))
@pytest.mark.few(4, "vit modern", "densenet")
def test_every_value_of_an_architecture_moves_as_it_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, images = made(ARCHITECTURES[name], 1)
    # One element moves hundreds of units there; of small groups, one may be close to the identity.
    check_every_value(monkeypatch, source.network, (images,), EXACT, draws=1)


# The same seen from outside: a linear map that is the identity, behind a value, turns into the inverse of what acts.


class Probed(nn.Module):
    """A network with further outputs: of values inside, each through a linear map of its channels."""

    def __init__(self, whole: nn.Module, crossings: list[Crossing]) -> None:
        super().__init__()
        self.network, self.crossings = whole, crossings
        self.probes = nn.ModuleList(
            nn.Linear(c.channels, c.channels, bias=False) if c.shape else None for c in crossings
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        output, *values = self.network(x)
        cases = zip(self.probes, values, self.crossings, strict=True)
        return [output, *(probe(v.movedim(c.axis, -1)) for probe, v, c in cases if probe is not None)]


# Elements with probes are those without, if both number generators alike, which they do not where there are planes.
PROBED = {*ARCHITECTURES} - SLOW - {"vit modern"}


@pytest.mark.parametrize(
    ("name", "before"),
    one_in(4, [*((name, False) for name in sorted(PROBED)), *((name, True) for name in OURS if name in PROBED)]),
)
@pytest.mark.long
def test_probes_see_what_taps_say(name: str, before: bool) -> None:
    case = ARCHITECTURES[name]
    source, images = made(case, *case[2:], before=before)
    found = [(f"{site}/{i}", c) for site in source.sites for i, c in enumerate(source.crossings(site))]
    probed = Probed(source.network.cuts(source.sites, before=before).whole, [c for _, c in found]).double()
    outside, inside = trace_symmetry(probed, images), source.symmetry
    element = outside.sample(torch.Generator().manual_seed(0))
    # Both number units and generators alike; of shifts and tilts, there are others where probes read.
    element = element.replaced(tilt=outside.identity().tilt, phase=outside.identity().phase)
    same = inside.identity()
    own = Element(inside.fingerprint, element.replaced(shift=same.shift, tilt=same.tilt, phase=same.phase).parts)
    if element.dense:  # but for cells, whose order is that of hashes
        place = {tuple(cell): matrix for cell, matrix in zip(outside.structure.dense, element.dense, strict=True)}
        own = own.replaced(dense=tuple(place[tuple(cell)] for cell in inside.structure.dense))
    for index, (tap, crossing) in enumerate(found):
        if not crossing.mapped:
            continue
        weight = f"probes.{index}.weight"
        moved = outside.act_on(element, {weight: torch.eye(crossing.channels, dtype=torch.float64)})[weight]
        action = inside.on_activations(own, tap)
        eye = torch.eye(crossing.channels, dtype=torch.float64)
        matrix = action.element.matrix() if action.parts else eye
        torch.testing.assert_close(moved @ matrix, eye, rtol=0, atol=EXACT)
        groups = [g for g in outside.groups if any(o.tensor == weight and o.axis == 1 for o in g.occurrences)]
        assert crossing.group.permutations == any(group.movable for group in groups)
        assert crossing.group.dense == any(group.dense for group in groups)
        several = [outside.act_on(outside.sample(torch.Generator().manual_seed(k), permutations=False, mixing=False),
                                  {weight: eye})[weight].diagonal() for k in range(8)]  # fmt: skip
        if not crossing.group.dense:  # there random elements have neither, but matrices
            assert crossing.group.positive_scales == any(
                not torch.allclose(d.abs(), torch.ones_like(d)) for d in several
            )
            assert crossing.group.signs == any(bool((d < 0).any()) for d in several)


def test_a_module_that_is_called_twice_has_two_taps() -> None:
    twice = Program(
        lambda s, x: s.c(s.act(s.b(s.act(s.a(x))))),
        {"a": of(L, 5, 8), "b": of(L, 8, 7), "c": of(L, 7, 3), "act": nn.ReLU},
    )
    symmetry = trace_symmetry(twice, torch.randn(2, 5))
    assert [(tap.name, tap.module, tap.call, tap.shape) for tap in symmetry.taps.values() if tap.module == "act"] == [
        ("act", "act", 0, (2, 8)),
        ("act-2", "act", 1, (2, 7)),
    ]
    assert [{tap.name for tap in group.taps} for group in symmetry.groups] == [{"a", "act"}, {"b", "act-2"}]


def test_what_cannot_be_told_is_said() -> None:
    symmetry = trace_symmetry(with_batch_norm(), torch.randn(2, 5))
    element = symmetry.sample(torch.Generator().manual_seed(0))
    assert_refused(symmetry.on_activations, element, "22", says="'2'")
    other = trace_symmetry(nn.Linear(5, 3), torch.randn(2, 5)).identity()
    assert_refused(symmetry.on_activations, other, "2", says="another network")
    assert_refused(lambda: symmetry.on_activations(element, "0").element, says="sample(shifts=False)")
    assert symmetry.on_activations(symmetry.sample(shifts=False), "0").element.size == 8
    mixed = trace_symmetry(MIXER(), torch.randn(2, 4, 5))
    assert_refused(lambda: mixed.on_activations(mixed.sample(shifts=False), "act").element, says="use apply")
