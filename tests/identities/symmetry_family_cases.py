"""Small networks for the families of things that went wrong in tracing, each with its whole group, derived by hand.

A case states the group as numbers: how many units change places, how many magnitudes, signs and shifts are free. The
derivations use the table of docs/theory/intertwiners.md, 2.2, and nothing of the tracer. Each family is a principle,
not a list of examples:

- tables: a piece of the state that an example does not reach (position tables, masks, filters cut to a length);
- constants: tensors that a state dict does not hold cannot move;
- writes: a program that writes into tensors has the group of the same program without writing;
- shared: what is used twice is subject to the demands of both uses;
- copies: what is repeated, for each of several queries say, moves with what it is a copy of; copies change places.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import CodeType
from typing import Any

import torch
from helpers import Fixed, Program, buffer, of, parameter
from numpy import s_
from torch import Tensor, nn
from torch.nn import functional as F

EXACT = 1e-9
L, C = nn.Linear, nn.Conv2d
relu, tanh = torch.relu, torch.tanh


def randomise(network: nn.Module) -> nn.Module:
    """Replace the values at which initialisation leaves gains, biases and statistics: they could hide a mistake."""
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
        for name, buffer in network.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
    return network.eval()


def leaves(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    return [leaf for part in (output.values() if isinstance(output, dict) else output) for leaf in leaves(part)]


def difference(new: Any, old: Any) -> float:
    """Return the largest change of an output's element, relative to itself and to what is usual in that output.

    What is infinite or not a number has to be the same in both.
    """
    worst = 0.0
    for one, two in zip(leaves(new), leaves(old), strict=True):
        assert one.shape == two.shape
        assert torch.equal(one.isfinite(), two.isfinite())
        finite = two.isfinite()
        assert torch.equal(one[~finite].nan_to_num(0.0), two[~finite].nan_to_num(0.0))
        one, two = one[finite].double(), two[finite].double()
        if one.numel():
            scale = two.abs() + two.abs().median()
            worst = max(worst, float(((one - two).abs() / scale.clamp(min=1e-300)).max()))
    return worst


@torch.no_grad()
def evaluate(network: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return network(*(x.clone() for x in inputs))


@dataclass(frozen=True)
class Group:
    """The size of a group: the logarithm of the number of permutations, and what is free."""

    log10: float
    scales: int
    signs: int
    shifts: int
    dimension: int

    def __add__(self, other: "Group") -> "Group":
        return Group(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def within(self, least: "Group", most: "Group") -> bool:
        return all(
            getattr(least, name) - 1e-6 <= getattr(self, name) <= getattr(most, name) + 1e-6
            for name in self.__dataclass_fields__
        )


def group(
    units: Sequence[int] = (),
    scales: int = 0,
    signs: int = 0,
    *,
    blocks: Sequence[int] = (),
    dense: Sequence[int] = (),
    phases: int = 0,
    shifts: int = 0,
) -> Group:
    """Return the size of a group.

    Args:
        units: How many units change places freely, cell by cell.
        scales: Free magnitudes, those inside dense cells included.
        signs: The same for signs.
        blocks: Further factors of the number of permutations.
        dense: Sizes of the cells on which any invertible matrix acts.
        phases: How many planes may be turned.
        shifts: Free shifts in front of batch norms.
    """
    log10 = sum(math.lgamma(size + 1) / math.log(10) for size in units) + sum(math.log10(order) for order in blocks)
    dimension = scales + shifts + phases + sum(size * size - size for size in dense)
    return Group(log10, scales, signs, shifts, dimension)


Inputs = Callable[[int], tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """A network, its inputs and its group."""

    family: str  # which family it belongs to
    make: Callable[[], nn.Module]  # makes the network, with random weights and the same structure every time
    example: Inputs  # what it is traced on, from the batch size
    whole: Group  # the whole group
    more: Sequence[Inputs] = ()  # further examples, where the program branches on the shape
    fresh: Sequence[Inputs] = ()  # inputs that no example shows: other lengths, other image sizes
    batches: Sequence[int] = (1, 5)  # batch sizes on which elements are tried
    # units that nothing feeds or that nothing reads: they may move or stay, each of these groups by itself
    spare: Sequence[Group] = ()
    # a smaller group that is right as well, where the whole one needs more than labels to be seen
    least: Group | None = None
    tolerance: float = EXACT  # largest relative change of an output

    def accepts(self, found: Group) -> bool:
        """Return whether a group is the whole one, with or without the spare units, or one that is named as enough."""
        for count in range(len(self.spare) + 1):
            for chosen in combinations(self.spare, count):
                whole = sum(chosen, self.whole)
                if found.within(self.least or whole, whole):
                    return True
        return False

    def all_inputs(self, *batches: int) -> list[tuple[Any, ...]]:
        """Return inputs of these batch sizes (by default the case's), and of all the sizes that the network takes."""
        made = [self.example(n) for n in batches or self.batches]
        return made + [make(3) for make in (*self.more, *self.fresh)]


CASES: dict[str, Case] = {}


def normal(*shape: int) -> Inputs:
    """Return a maker of one normal input, from the batch size."""
    return lambda n: (torch.randn(n, *shape, dtype=torch.float64),)


def tokens(length: int, vocabulary: int = 10) -> Inputs:
    return lambda n: (torch.randint(vocabulary, (n, length)),)


def zeros(x: Tensor, width: int) -> Tensor:
    return x.new_zeros(len(x), width)


def sinusoids(length: int, width: int) -> Tensor:
    """Return a table of sines and cosines, whose columns all differ. Shape (length, width)."""
    angles = torch.arange(length)[:, None] * torch.exp(-torch.arange(0, width, 2) / width * math.log(100.0))
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


# The inputs that networks are shown, with other sizes that they take, and the layers of those that say nothing else.
X, SEQUENCE, IMAGE = normal(5), normal(5, 5), normal(3, 6, 6)
LENGTHS = [normal(1, 5), normal(7, 5), normal(12, 5)]
SIZES = [normal(3, 9, 12), normal(3, 12, 4), normal(3, 12, 12)]
A, B = of(L, 5, 8), of(L, 8, 2)
CA, CB = of(C, 3, 8, 3, padding=1), of(C, 8, 2, 1)
USUAL = {X: ([], A, B), SEQUENCE: (LENGTHS, A, B), IMAGE: (SIZES, CA, CB)}
SETTINGS = {"more", "batches", "spare", "least", "tolerance"}


def names(code: CodeType) -> set[str]:
    """Return the attributes that a function reads, in the functions within it, too."""
    return set(code.co_names).union(*(names(part) for part in code.co_consts if isinstance(part, CodeType)))


def usual_parts(function: Any, a: Any, b: Any) -> dict[str, Any]:
    """Return the first and the last layer, `a` and `b`, of a program that reads them."""
    return {name: make for name, make in (("a", a), ("b", b)) if make and name in names(function.__code__)}


class Family:
    """Adds cases to a family: as the decorator of a program, or as a row of a table.

    Args:
        name: The family's name.
        on: What its networks are traced on, unless a case says otherwise.
    """

    def __init__(self, name: str, on: Inputs) -> None:
        self.name, self.on = name, on

    def __call__(
        self, whole: Group, *, on: Inputs | None = None, fresh: Any = None, **given: Any
    ) -> Callable[..., Any]:
        """Make a program a case; besides :class:`Case`'s settings, keywords are the network's parts."""
        example = on or self.on
        sizes, a, b = USUAL.get(example, ([], None, None))
        settings = {key: given.pop(key) for key in SETTINGS & given.keys()}

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            key = f"{self.name}: {function.__name__}"
            assert key not in CASES, key
            make = lambda: randomise(Program(function, usual_parts(function, a, b) | given))  # noqa: E731
            CASES[key] = Case(self.name, make, example, whole, fresh=sizes if fresh is None else fresh, **settings)
            return function

        return decorate

    def row(self, name: str, whole: Group, function: Callable[..., Any], **settings: Any) -> None:
        """Add a program of one expression."""
        function.__name__ = name
        self(whole, **settings)(function)


# fmt: off
# Tables of which an example reaches a part.

tables = Family("tables", SEQUENCE)
UNITS = group([8], 8)
EMPTY = group()
SHIFTED = group([8], 8, shifts=8)  # the bias takes off what is added to all rows

def added(name: str, table: Callable[..., Any], whole: Group = UNITS, **settings: Any) -> None:
    """Add a program that adds to hidden units what `table(network, length)` makes, usually of 12 rows `pos`."""
    if "pos" in names(table.__code__):
        settings = {"pos": parameter(12, 8)} | settings
    tables.row(name, whole, lambda s, x: s.b(relu(s.a(x) + table(s, x.shape[1]))), **settings)

WPE = {"wpe": of(nn.Embedding, 12, 8)}

added("parameter_cut_to_length", lambda s, t: s.pos[:t])
added("embedding_weight_cut_to_length", lambda s, t: s.wpe.weight[:t], **WPE)
added("embedding_of_arange", lambda s, t: s.wpe(torch.arange(t)), **WPE)
added("functional_embedding_of_arange", lambda s, t: F.embedding(torch.arange(t), s.pos), pos=buffer(12, 8))
added("embedding_of_a_buffer_of_positions", lambda s, t: s.wpe(s.ids[:, :t]), **WPE, ids=lambda: torch.arange(12)[None])
added("buffer_cut_to_length", lambda s, t: s.pos[:t], pos=buffer(12, 8))
added("narrow", lambda s, t: s.pos.narrow(0, 0, t))
added("index_select_of_arange", lambda s, t: s.pos.index_select(0, torch.arange(t)), SHIFTED)
added("advanced_index", lambda s, t: s.pos[torch.arange(t)], SHIFTED)
added("gathered", lambda s, t: s.pos.gather(0, torch.arange(t)[:, None].expand(-1, 8)))
added("second_axis_cut", lambda s, t: s.pos[:, :t], pos=parameter(1, 12, 8))
added("transposed_table", lambda s, t: s.pos[:, :t].t(), pos=parameter(8, 12))
added("cut_from_the_end", lambda s, t: s.pos[-t:])
added("cut_with_an_offset", lambda s, t: s.pos[2 : t + 2], fresh=[normal(1, 5), normal(10, 5)])
added("stack_of_unbound_rows", lambda s, t: torch.stack(s.pos.unbind(0)[:t]), SHIFTED)
added("split_at_the_length", lambda s, t: s.pos.split([t, 12 - t])[0])
added("table_of_two_indices", lambda s, t: s.pos[torch.arange(t) // 4, torch.arange(t) % 4], pos=parameter(3, 4, 8))
added("reversed_table", lambda s, t: s.pos.flip(0)[:t])
added("sums_of_rows", lambda s, t: s.pos.cumsum(0)[:t])
added("row_of_the_last_step", lambda s, t: s.pos[t - 1])
added("mean_of_the_rows_of_a_cut_table", lambda s, t: s.pos[:t].mean(0))
added("table_behind_a_linear_layer", lambda s, t: s.mix(s.pos[:t]), group([8], 14, 6, dense=[6]), pos=parameter(12, 6),
    mix=of(L, 6, 8))
added("table_behind_a_perceptron", lambda s, t: s.n(relu(s.m(s.pos[:t]))), group([8, 6], 18, 4, dense=[4]),
    pos=parameter(12, 4), m=of(L, 4, 6), n=of(L, 6, 8))
# Other ways to leave out a part of a table than a slice of the table itself.
added("cropped_by_negative_padding", lambda s, t: F.pad(s.pos, (0, 0, 0, t - 12)))
added("rows_times_a_mask", lambda s, t: (s.pos * (torch.arange(12) < t).unsqueeze(-1)).sum(0))
added("rows_where_a_mask_says", lambda s, t: torch.where((torch.arange(12) < t).unsqueeze(-1), s.pos, 0.0).sum(0))
added("weights_of_rows_masked_with_minus_infinity",
    lambda s, t: s.weights.masked_fill(torch.arange(12) >= t, -math.inf).softmax(0) @ s.pos, weights=parameter(12))
added("weights_of_rows_plus_a_mask", lambda s, t: (s.weights + -1e9 * (torch.arange(12) >= t)).softmax(0) @ s.pos,
    weights=parameter(12))

tables.row("every_second_row", UNITS,
    lambda s, x: s.b(relu(s.a(x) + s.pos[::2][: x.shape[1]] - s.pos[1::2][: x.shape[1]])),
    fresh=[normal(1, 5), normal(7, 5)], pos=parameter(14, 8))

@tables(UNITS, b=of(L, 5, 3), pos=parameter(12, 8))
def relative_logits_cut_to_length(s, x):
    logits = relu(s.a(x)) @ s.pos.t()
    return s.b(logits[:, :, : x.shape[1]].softmax(-1) @ x)

# The columns of the table meet nothing but themselves, which any orthogonal matrix passes.
tables.row("largest_of_the_rows_of_a_cut_table", group([8], 8, 8) + Group(0.0, 0, 0, 0, 28),
    lambda s, x: s.b(relu(s.a(x)) * torch.softmax(s.pos.narrow(0, 0, x.shape[1]) @ s.pos[0], 0).amax()),
    pos=parameter(12, 8))

@tables(UNITS, fresh=[normal(1, 5)], pos=parameter(12, 8))
def rows_that_nothing_reads(s, x):
    first, _ = s.pos.chunk(2)
    return s.b(relu(s.a(x) + first.mean(0) + s.pos[9] - s.pos.split(3)[2].select(0, 1)))

# The gate has a scale and a sign of its own, against b.
tables.row("multiplied_table", group([8], 16, 8), lambda s, x: s.b(relu(s.a(x)) * s.gate[: x.shape[1]]),
    gate=parameter(12, 8))

@tables(group([8], 8), fresh=[normal(1, 5), normal(7, 5), normal(11, 5)], pos=parameter(12, 8), cls=parameter(1, 1, 8))
def table_with_a_class_token(s, x):
    h = torch.cat([s.cls.expand(len(x), -1, -1), s.a(x)], 1)
    return s.b(relu(h + s.pos[: h.shape[1]]))

tables.row("class_row_by_itself", group([8], 8),
    lambda s, x: s.b(relu(s.a(x) + s.pos[1 : x.shape[1] + 1] - s.pos.select(0, 0))),
    fresh=[normal(1, 5), normal(11, 5)], pos=parameter(12, 8))
# The scale of the whole mixing weight is free against b; it is a symmetry, but not one of units.
tables.row("mixing_of_time_cut_to_length", group([8], 9),
    lambda s, x: s.b(relu(s.w[: x.shape[1], : x.shape[1]] @ relu(s.a(x)))), least=UNITS, w=parameter(12, 12))
tables.row("weight_cut_to_the_features", UNITS, lambda s, x: s.b(relu(F.linear(x, s.w[:, : x.shape[1]], s.c))), on=X,
    fresh=[normal(3), normal(9)], w=parameter(8, 9), c=parameter(8))
tables.row("filter_cut_to_the_length", UNITS, lambda s, x: s.b(relu(F.conv1d(x, s.w[..., : x.shape[2] // 2]))),
    on=normal(3, 10), fresh=[normal(3, 4), normal(3, 20)], w=parameter(8, 3, 6), b=of(nn.Conv1d, 8, 2, 1))

# Hidden units are cut to the length: further lengths, which the self-test tries, tell all of them apart.
@tables(group([], 5), fresh=[], more=[normal(3, 5)], w=parameter(9, 5), v=parameter(2, 9))
def width_cut_to_the_length(s, x):
    t = x.shape[1]
    return F.linear(relu(F.linear(x.mean(1), s.w[:t])), s.v[:, :t])

tables.row("image_table_cut_to_size", UNITS, lambda s, x: s.b(relu(s.a(x) + s.pos[..., : x.shape[2], : x.shape[3]])),
    on=IMAGE, pos=parameter(1, 8, 12, 12))
tables.row("interpolated_table", UNITS,
    lambda s, x: s.b(relu(s.a(x) + F.interpolate(s.pos, size=x.shape[-2:], mode="bilinear"))), on=IMAGE,
    pos=parameter(1, 8, 5, 5))

@tables(UNITS, on=IMAGE, more=[normal(3, 8, 8)], pos=parameter(1, 8, 6, 6))
def interpolated_if_the_size_differs(s, x):
    fits = s.pos.shape[-2:] == x.shape[-2:]
    return s.b(relu(s.a(x) + (s.pos if fits else F.interpolate(s.pos, size=x.shape[-2:], mode="bicubic"))))

@tables(group([4, 4], 8), on=IMAGE, rows=parameter(12, 4), columns=parameter(12, 4))
def rows_and_columns(s, x):
    height, width = x.shape[2:]
    columns = s.columns[:width].unsqueeze(0).expand(height, -1, -1)
    rows = s.rows[:height].unsqueeze(1).expand(-1, width, -1)
    return s.b(relu(s.a(x) + torch.cat([columns, rows], -1).permute(2, 0, 1)))

def attend(s: Any, x: Tensor, bias: Tensor | float) -> Tensor:
    """One head of width 4: any matrix between queries and keys, and between values and output."""
    scores = s.q(x) @ s.k(x).mT / 2 + bias
    return s.o(scores.softmax(-1) @ s.v(x))

# A bias of the keys would drop out of the softmax.
ATTENTION = {"q": of(L, 5, 4), "k": of(L, 5, 4, bias=False), "v": of(L, 5, 4), "o": of(L, 4, 2)}
HEAD = group([], 8, 8, dense=[4, 4])

def distances(length: int, largest: int) -> Tensor:
    places = torch.arange(length)
    return places[:, None] - places + largest

tables.row("relative_table", HEAD, lambda s, x: attend(s, x, s.table[distances(x.shape[1], 11)]), table=parameter(23),
    **ATTENTION)
tables.row("relative_embedding", HEAD, lambda s, x: attend(s, x, s.table(distances(x.shape[1], 11)).squeeze(-1)),
    table=of(nn.Embedding, 23, 1), **ATTENTION)

@tables(HEAD, table=parameter(23), index=lambda: distances(12, 11), **ATTENTION)
def relative_table_by_a_buffer_of_indices(s, x):
    t = x.shape[1]
    return attend(s, x, s.table[s.index[:t, :t].reshape(-1)].reshape(t, t))

@tables(group([], 8, 8, blocks=[2], dense=[2] * 4), table=parameter(23, 2), **ATTENTION)
def relative_table_of_two_heads(s, x):
    q, k, v = (layer(x).unflatten(-1, (2, 2)).transpose(1, 2) for layer in (s.q, s.k, s.v))
    bias = s.table[distances(x.shape[1], 11)].permute(2, 0, 1)
    return s.o(((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))

# Queries meet keys and the table of relative keys: one matrix on all three.
@tables(HEAD, table=parameter(23, 4), **ATTENTION)
def relative_keys(s, x):
    relative = s.table[distances(x.shape[1], 11)]
    return attend(s, x, torch.einsum("ntd,tsd->nts", s.q(x), relative))

@tables(HEAD, mask=lambda: torch.tril(torch.ones(12, 12)), **ATTENTION)
def mask_of_zeros_and_ones(s, x):
    t = x.shape[1]
    scores = (s.q(x) @ s.k(x).mT).masked_fill(s.mask[:t, :t] == 0, -math.inf)
    return s.o(scores.softmax(-1) @ s.v(x))

@tables(HEAD, mask=lambda: torch.tril(torch.ones(12, 12, dtype=torch.bool)), **ATTENTION)
def mask_of_truth_values(s, x):
    t = x.shape[1]
    return attend(s, x, torch.zeros(t, t).masked_fill(~s.mask[:t, :t], -math.inf))

tables.row("mask_of_minus_infinity", HEAD, lambda s, x: attend(s, x, s.mask[: x.shape[1], : x.shape[1]]),
    mask=lambda: torch.full((12, 12), -math.inf).triu(1), **ATTENTION)

tables.row("softmax_of_weights_of_steps", UNITS,
    lambda s, x: s.b((s.weights[: x.shape[1], None].softmax(0) * relu(s.a(x))).sum(1)), weights=parameter(12))
# The scale and the sign of all weights of the steps are free against b; a symmetry, but not one of units.
tables.row("weights_of_steps", group([8], 9, 1),
    lambda s, x: s.b((s.weights[: x.shape[1], None] * relu(s.a(x))).sum(1)), least=UNITS, weights=parameter(12))

@tables(UNITS, pos=parameter(12, 8))
def added_into_a_copy_of_the_table(s, x):
    h = s.pos.repeat(len(x), 1, 1)
    h[:, : x.shape[1]] += s.a(x)
    return s.b(relu(h[:, : x.shape[1]]))

@tables(UNITS, pos=parameter(12, 8))
def first_row_of_a_copy_to_zero(s, x):
    table = s.pos.clone()
    table[0] = 0.0
    return s.b(relu(s.a(x) + table[: x.shape[1]]))

# The table's columns and the queries take any matrix, as keys in attention do.
@tables(group([], 8, 8, dense=[4, 4]), q=of(L, 5, 4), v=of(L, 5, 4), o=of(L, 4, 2), table=parameter(23, 4))
def relative_scores_gathered_behind_the_product(s, x):
    index = distances(x.shape[1], 11).expand(len(x), -1, -1)
    return s.o((s.q(x) @ s.table.T).gather(-1, index).softmax(-1) @ s.v(x))

# Slices that between them read all of a weight discard nothing.
@tables(HEAD, w=parameter(12, 5), o=of(L, 4, 2))
def packed_queries_keys_values(s, x):
    q, k, v = F.linear(x, s.w[:4]), F.linear(x, s.w[4:8]), F.linear(x, s.w[8:])
    return s.o((q @ k.mT).softmax(-1) @ v)

tables.row("half_of_a_weight_and_all_of_it", group([4, 4], 8),
    lambda s, x: s.b(relu(F.linear(x, s.w[:4]))) + s.c(relu(F.linear(x, s.w))), on=X, w=parameter(8, 5), b=of(L, 4, 2),
    c=B)

# Programs that branch on the shape: the group is what all branches allow.
tables.row("a_head_for_each_step", UNITS,
    lambda s, x: torch.stack([head(step) for head, step in zip(s.heads, relu(s.a(x)).unbind(1), strict=False)], 1),
    more=[normal(9, 5)], fresh=[normal(1, 5), normal(7, 5)], heads=lambda: nn.ModuleList([L(8, 2) for _ in range(9)]))

# One sign for all units passes the norm.
@tables(group([8], 0, 1), more=[normal(7, 5)], fresh=[normal(1, 5), normal(9, 5)])
def normed_if_long(s, x):
    h = s.a(x)
    return s.b(tanh(h if x.shape[1] < 6 else F.layer_norm(h, (8,))))

tables.row("threshold_of_each_unit", UNITS, lambda s, x: s.b((h := s.a(x)) * (h > s.t)), t=parameter(8))
tables.row("exponentials_of_halves", UNITS, lambda s, x: s.b(torch.exp(-s.a(x) / 2)))
tables.row("other_head_for_long_inputs", UNITS, lambda s, x: (s.b if x.shape[1] < 6 else s.c)(relu(s.a(x))),
    more=[normal(7, 5)], fresh=[normal(1, 5), normal(9, 5)], c=B)
tables.row("other_activation_for_long_inputs", group([8]),
    lambda s, x: s.b(relu(s.a(x)) if x.shape[1] < 6 else torch.sigmoid(s.a(x))), more=[normal(7, 5)],
    fresh=[normal(1, 5), normal(9, 5)])

@tables(group([3, 5], 8), more=[normal(7, 5)], fresh=[normal(1, 5)], c=of(L, 3, 2))
def fewer_units_for_long_inputs(s, x):
    h = relu(s.a(x))
    return s.b(h) if x.shape[1] < 6 else s.c(h[..., :3])

@tables(group([8], 8), more=[normal(1, 5)], fresh=[normal(7, 5)], mix=of(L, 8, 8))
def mixed_only_if_longer_than_one(s, x):
    h = relu(s.a(x))
    if x.shape[1] > 1:
        h = relu(h + s.mix(h.mean(1, keepdim=True)))
    return s.b(h)

@tables(UNITS, more=[normal(9, 5)], fresh=[normal(12, 5)], pos=parameter(12, 8))
def second_half_for_long_inputs(s, x):
    first, second = s.pos.chunk(2)
    t = x.shape[1]
    return s.b(relu(s.a(x) + (first[:t] if t <= 6 else torch.cat([first, second[: t - 6]]))))

@tables(group([8, 4], 12), on=IMAGE, more=[normal(3, 12, 12)], fresh=[normal(3, 5, 5), normal(3, 10, 14)],
        b=of(C, 8, 4, 3, padding=1), c=of(L, 4, 2))
def pooled_if_large(s, x):
    h = relu(s.a(x))
    h = relu(s.b(F.max_pool2d(h, 2) if x.shape[-1] > 8 else h))
    return s.c(h.mean((2, 3)))

@tables(group([6, 7], 13), on=X, more=[lambda n: (*normal(5)(n), *normal(4)(n))], a=of(L, 5, 6), c=of(L, 4, 7),
        b=of(L, 6, 2), d=of(L, 7, 2))
def optional_second_input(s, x, y=None):
    out = s.b(relu(s.a(x)))
    return out if y is None else out + s.d(relu(s.c(y)))

@tables(group([8], 0, 8), w=of(L, 5, 8), u=of(L, 8, 8), start=parameter(8))
def recurrence_of_any_length(s, x):
    h = s.start.expand(len(x), 8)
    for step in x.unbind(1):
        h = tanh(s.w(step) + s.u(h))
    return s.b(h)

tables.row("tokens_and_positions", group([6], 6), lambda s, i: s.b(relu(s.e(i) + s.pos[: i.shape[1]])), on=tokens(5),
    fresh=[tokens(1), tokens(9)], e=of(nn.Embedding, 10, 6), pos=parameter(9, 6), b=of(L, 6, 2))

# Tensors that a state dict does not hold.

constants = Family("constants", X)

constants.row("sinusoids_on_a_hidden_stream", EMPTY, lambda s, x: s.b(relu(s.a(x) + s.pe[: x.shape[1]])), on=SEQUENCE,
    pe=Fixed(lambda: sinusoids(12, 8)))
constants.row("sinusoids_that_are_saved", UNITS, lambda s, x: s.b(relu(s.a(x) + s.pe[: x.shape[1]])), on=SEQUENCE,
    pe=lambda: sinusoids(12, 8))
constants.row("layer_behind_sinusoids", group([6], 6), lambda s, x: s.b(relu(s.c(s.a(x) + s.pe[: x.shape[1]]))),
    on=SEQUENCE, c=of(L, 8, 6), b=of(L, 6, 2), pe=Fixed(lambda: sinusoids(12, 8)))
constants.row("sinusoids_on_an_embedding", group([8], 8), lambda s, i: s.b(relu(s.c(s.e(i) + s.pe[: i.shape[1]]))),
    on=tokens(5), fresh=[tokens(1), tokens(9)], e=of(nn.Embedding, 10, 6), c=of(L, 6, 8), b=B,
    pe=Fixed(lambda: sinusoids(9, 6)))

# Keys have a bias of zeros that is not saved: any matrix acts on them nevertheless.
@constants(HEAD + group(shifts=4), on=SEQUENCE, fresh=[], w=parameter(12, 5), qb=parameter(4),
        kb=Fixed(lambda: torch.zeros(4)), vb=parameter(4), o=of(L, 4, 2))
def packed_biases_with_zeros_for_the_keys(s, x):
    q, k, v = F.linear(x, s.w, torch.cat([s.qb, s.kb, s.vb])).chunk(3, -1)
    return s.o((q @ k.mT).softmax(-1) @ v)

# Saved numbers that have to stay positive, each with a scale of its own.
constants.row("root_of_saved_numbers", group([8], 16), lambda s, x: s.b(relu(s.a(x) / s.variance.sqrt())), least=UNITS,
    variance=lambda: torch.linspace(0.05, 2, 8))
constants.row("different_factors", group([], 8), lambda s, x: s.b(relu(s.a(x)) * s.k),
    k=Fixed(lambda: torch.arange(1.0, 9.0)))
constants.row("equal_factors", UNITS, lambda s, x: s.b(relu(s.a(x)) * s.k), k=Fixed(lambda: torch.full((8,), 2.0)))
constants.row("two_factors", group([4, 4], 8), lambda s, x: s.b(relu(s.a(x)) * s.k),
    k=Fixed(lambda: torch.tensor([1.0, 3.0] * 4)))
constants.row("two_summands", UNITS, lambda s, x: s.b(relu(s.a(x) + s.k)),
    k=Fixed(lambda: torch.tensor([1.0, 3.0] * 4)))
constants.row("one_factor_for_all", UNITS, lambda s, x: s.b(relu(s.a(x)) * s.k), k=Fixed(lambda: torch.tensor(3.0)))
constants.row("one_summand_for_all", group([8], 8), lambda s, x: s.b(relu(s.a(x) + s.k)),
    k=Fixed(lambda: torch.tensor(0.5)))

class Standardise(nn.Module):
    """Subtracts a mean and divides by a deviation that are not saved."""

    def __init__(self, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("deviation", deviation, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.deviation

RAMP = torch.linspace(0.5, 2.0, 8)

constants.row("standardised_inputs", UNITS, lambda s, x: s.b(relu(s.a(s.n(x)))),
    n=of(Standardise, RAMP[:5], 1 + RAMP[:5]))
# The bias absorbs the means; the deviations hold the units in place.
constants.row("standardised_units", group([6], 14), lambda s, x: s.b(relu(s.c(relu(s.n(s.a(x)))))),
    n=of(Standardise, RAMP, 1 + RAMP), c=of(L, 8, 6), b=of(L, 6, 2))
# Frozen statistics hold the units in place and their inputs' scales; gain and bias are free against the next layer.
constants.row("frozen_statistics", group([], 8), lambda s, x: s.b(relu(F.batch_norm(s.a(x), s.m, s.v, s.gain, s.bias))),
    m=Fixed(lambda: RAMP.clone()), v=Fixed(lambda: 1 + RAMP), gain=parameter(8), bias=parameter(8))

BLUR = torch.tensor([[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]) / 16

constants.row("blur_of_every_channel", UNITS,
    lambda s, x: s.b(F.conv2d(relu(s.a(x)), s.k, stride=2, padding=1, groups=8)), on=IMAGE,
    k=Fixed(lambda: BLUR.expand(8, 1, 3, 3).clone()))
constants.row("blur_repeated_in_the_program", UNITS,
    lambda s, x: s.b(F.conv2d(relu(s.a(x)), s.k.repeat(8, 1, 1, 1), stride=2, padding=1, groups=8)), on=IMAGE,
    k=Fixed(lambda: BLUR[None, None]))
constants.row("another_blur_for_each_channel", group([], 8),
    lambda s, x: s.b(F.conv2d(relu(s.a(x)), s.k, stride=2, padding=1, groups=8)), on=IMAGE,
    k=Fixed(lambda: RAMP[:, None, None, None] * BLUR))
# One scale for all units passes any fixed matrix.
constants.row("fixed_basis", group([], 1), lambda s, x: s.b(relu(relu(s.a(x)) @ s.k)), least=EMPTY,
    k=Fixed(lambda: sinusoids(8, 8) + torch.eye(8)))
constants.row("fixed_order_of_units", UNITS, lambda s, x: s.b(relu(s.a(x))[:, s.order]),
    order=Fixed(lambda: torch.tensor([3, 0, 7, 5, 1, 2, 6, 4])))
constants.row("fixed_mask_of_minus_infinity", HEAD, lambda s, x: attend(s, x, s.mask[: x.shape[1], : x.shape[1]]),
    on=SEQUENCE, mask=Fixed(lambda: torch.full((12, 12), -math.inf).triu(1)), **ATTENTION)
constants.row("fixed_linear_bias", HEAD, lambda s, x: attend(s, x, -s.slopes * distances(x.shape[1], 0).abs()),
    on=SEQUENCE, slopes=Fixed(lambda: torch.tensor(0.3)), **ATTENTION)

@constants(group([], 8, 8, dense=[2, 2, 2, 2]), on=SEQUENCE, slopes=Fixed(lambda: torch.tensor([0.5, 0.1])),
        **ATTENTION)
def fixed_slopes_that_tell_heads_apart(s, x):
    q, k, v = (layer(x).unflatten(-1, (2, 2)).transpose(1, 2) for layer in (s.q, s.k, s.v))
    bias = -s.slopes[:, None, None] * distances(x.shape[1], 0).abs()
    return s.o(((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))

def rotate(x: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate the pairs (i, i + half) of the last axis by angles that grow with the position."""
    angles = torch.outer(torch.arange(x.shape[-2]).to(frequencies), frequencies)
    cos, sin = (torch.cat([f(angles)] * 2, -1).to(x.dtype) for f in (torch.cos, torch.sin))
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat([-two, one], -1) * sin

# Of the matrices between queries and keys a complex number remains for each pair. Values and output are free.
@constants(group([], 6, 6, dense=[4], phases=2), on=SEQUENCE, inv_freq=Fixed(lambda: torch.tensor([1.0, 0.1])),
    **ATTENTION)
def rotary(s, x):
    q, k = (rotate(layer(x), s.inv_freq) for layer in (s.q, s.k))
    return s.o((q @ k.mT).softmax(-1) @ s.v(x))

class Rotary(nn.Module):
    """Tables of cosines and sines, made once and cut to the length."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(12.0), torch.tensor([1.0, 0.1])).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        return x * self.cos[: x.shape[1]] + torch.cat([-two, one], -1) * self.sin[: x.shape[1]]

constants.row("rotary_tables_in_a_submodule", group([], 6, 6, dense=[4], phases=2),
    lambda s, x: s.o((s.turn(s.q(x)) @ s.turn(s.k(x)).mT).softmax(-1) @ s.v(x)), on=SEQUENCE, turn=Rotary, **ATTENTION)
constants.row("random_features", EMPTY, lambda s, x: s.b(tanh(F.linear(x, s.w))),
    w=Fixed(lambda: sinusoids(8, 8)[:, :5] + torch.eye(8, 5)))

@constants(EMPTY, on=SEQUENCE, u=Fixed(lambda: sinusoids(8, 8) / 3))
def reservoir(s, x):
    h = x.new_zeros(len(x), 8)
    for step in x.unbind(1):
        h = torch.sigmoid(s.a(step) + h @ s.u)
    return s.b(h)

constants.row("fixed_embedding", group([8], 8), lambda s, i: s.b(relu(s.a(F.embedding(i, s.e)))), on=tokens(5),
    fresh=[tokens(9)], a=of(L, 6, 8), b=B, e=Fixed(lambda: sinusoids(10, 6)))

@constants(UNITS, on=IMAGE, a=of(C, 3, 8, 1), k=Fixed(lambda: BLUR[None, None]))
def filtered_image(s, x):
    return s.b(relu(s.a(F.conv2d(x.flatten(0, 1)[:, None], s.k, padding=1).unflatten(0, x.shape[:2]).squeeze(2))))

# A constant on half of the units, which the bias absorbs.
constants.row("summand_on_half_of_the_units", UNITS, lambda s, x: s.b(relu(s.a(x) + s.k)),
    k=Fixed(lambda: torch.tensor([0.0, 1.0] * 4)))
# The masked units are never read; the rest is as without the mask.
constants.row("units_masked_by_a_constant", group([4], 4), lambda s, x: s.b(relu(s.a(x)) * s.k),
    spare=[group([4], 4), group([4], 4, 4)], k=Fixed(lambda: torch.tensor([0.0, 1.0] * 4)))

# Writing into tensors. Where only a part is written, the columns that read the rest read zeros (`ZEROS`): nothing
# feeds these units, and a unit that is written over is read by nothing (`LOST`).

writes = Family("writes", X)
HALF, OTHER = of(L, 5, 4), of(L, 5, 4)
FOUR = group([4], 4)
ZEROS, LOST, ONES = group([4], 4, 4), group([4], 4), group([4])
FOURS = group([4, 4], 8)

def put(tensor: Tensor, where: Any, value: Any) -> None:
    """Assign, as an expression."""
    tensor[where] = value

def into_zeros(name: str, write: Callable[..., Any], **settings: Any) -> None:
    """Add a program that writes four units into eight zeros, `write(network, zeros, units)`."""
    def program(s, x):
        out = zeros(x, 8)
        write(s, out, relu(s.a(x)))
        return s.b(out)
    writes.row(name, FOUR, program, spare=[ZEROS], a=HALF, **settings)

into_zeros("slice_of_zeros", lambda s, out, h: put(out, s_[:, 2:6], h))
into_zeros("every_second_column", lambda s, out, h: put(out, s_[:, ::2], h))
into_zeros("columns_by_a_list", lambda s, out, h: put(out, s_[:, [1, 6, 3, 0]], h))
into_zeros("columns_by_a_buffer", lambda s, out, h: put(out, s_[:, s.places], h),
    places=lambda: torch.tensor([1, 6, 3, 0]))
into_zeros("columns_by_truth_values", lambda s, out, h: put(out, s_[:, s.chosen], h),
    chosen=lambda: torch.arange(8) % 2 == 0)
into_zeros("slice_of_the_transposed", lambda s, out, h: put(out.t(), s_[2:6], h.t()))
into_zeros("half_of_a_view", lambda s, out, h: put(out.view(-1, 2, 4), s_[:, 1], h))
into_zeros("copy_into_a_piece_of_a_split", lambda s, out, h: out.split([2, 4, 2], 1)[1].copy_(h))
into_zeros("index_copy", lambda s, out, h: out.index_copy_(1, torch.tensor([1, 6, 3, 0]), h))
into_zeros("scatter", lambda s, out, h: out.scatter_(1, torch.tensor([1, 6, 3, 0]).expand(len(h), 4), h))
into_zeros("index_put", lambda s, out, h: out.index_put_(
    (torch.arange(len(h))[:, None], torch.tensor([1, 6, 3, 0])), h, accumulate=True))
writes.row("index_add", FOUR, lambda s, x: s.b(zeros(x, 8).index_add(1, torch.tensor([1, 6, 3, 0]), relu(s.a(x)))),
    spare=[ZEROS], a=HALF)
writes.row("slice_scatter", FOUR, lambda s, x: s.b(torch.slice_scatter(zeros(x, 8), relu(s.a(x)), 1, 2, 6)),
    spare=[ZEROS], a=HALF)

# The same units on both sides of the choice: they differ by the places at which they pass the activation.
@writes(group([4, 4], 8), even=lambda: torch.arange(8) % 2 == 0)
def activation_where_a_mask_says(s, x):
    h = s.a(x)
    return s.b(torch.where(s.even, relu(h), F.leaky_relu(h, 0.2)))

@writes(group([4, 4], 8), on=SEQUENCE, fresh=[])
def units_pass_at_other_steps(s, x):
    h = relu(s.a(x))
    out = h * 2
    out[:, ::2, :4] = h[:, ::2, :4]
    return s.b(out)

@writes(group([8], 8))
def empty_slices(s, x):
    h = relu(s.a(x))
    h[:, 5:5] = 0.0
    h[:, torch.zeros(8, dtype=torch.bool)] = 1.0
    return s.b(h)

@writes(HEAD, on=SEQUENCE, **ATTENTION)
def scores_masked_with_the_least_number(s, x):
    t = x.shape[1]
    scores = s.q(x) @ s.k(x).mT
    ahead = torch.ones(t, t, dtype=torch.bool).triu(1)
    return s.o(scores.masked_fill_(ahead, torch.finfo(scores.dtype).min).softmax(-1) @ s.v(x))



@writes(FOUR, spare=[ZEROS], a=HALF)
def add_into_a_slice_of_zeros(s, x):
    out = zeros(x, 8)
    out[:, 2:6] += relu(s.a(x))
    return s.b(out)

@writes(FOUR, spare=[ZEROS], a=HALF)
def zeros_like_something(s, x):
    h = relu(s.a(x))
    out = torch.zeros_like(torch.cat([x, x], 1)[:, :8])
    out[:, 2:6].copy_(h)
    return s.b(out)

# The rest is written by a second layer.
TWO = {"a": HALF, "c": OTHER, "b": B}

@writes(group([4, 4], 4, 4), **TWO)
def two_layers_into_zeros(s, x):
    out = zeros(x, 8)
    out[:, :4] = relu(s.a(x))
    out[:, 4:] = tanh(s.c(x))
    return s.b(out)

@writes(group([8], 8), **TWO)
def two_layers_into_empty(s, x):
    out = x.new_empty(len(x), 8)
    out[:, :4].copy_(relu(s.a(x)))
    out[:, 4:].copy_(relu(s.c(x)))
    return s.b(out)

@writes(group([8], 8), **TWO)
def two_layers_interleaved(s, x):
    out = torch.empty(len(x), 8, dtype=x.dtype)
    out[:, ::2], out[:, 1::2] = relu(s.a(x)), relu(s.c(x))
    return s.b(out)

@writes(group([4, 4], 4, 4))
def halves_of_a_layer_interleaved(s, x):
    out = torch.empty(len(x), 8, dtype=x.dtype)
    first, second = s.a(x).chunk(2, -1)
    out[:, ::2], out[:, 1::2] = relu(first), tanh(second)
    return s.b(out)

# Units 3 and 4 of the first layer are written over.
@writes(group([3, 5], 8), spare=[group([2], 2)], a=of(L, 5, 5), c=of(L, 5, 5))
def overlapping_writes(s, x):
    out = zeros(x, 8)
    out[:, :5] = relu(s.a(x))
    out[:, 3:] = relu(s.c(x))
    return s.b(out)

# What is filled with a constant takes part in no scale, and could be permuted; the written units keep theirs.
@writes(FOUR, least=group([4]), spare=[ONES], a=HALF)
def slice_of_ones(s, x):
    out = x.new_ones(len(x), 8)
    out[:, 4:] = relu(s.a(x))
    return s.b(out)

@writes(FOUR, least=group([4]), spare=[ONES], a=HALF)
def slice_of_a_filled_tensor(s, x):
    out = x.new_full((len(x), 8), 0.5)
    out[:, 1:5] = relu(s.a(x))
    return s.b(out)

# The start is a part of the state: its units are free behind the ReLU.
# What is written over might be more for a longer input, so that the start may stay as it is.
@writes(FOURS, spare=[ZEROS], least=group([4], 4), a=HALF, start=parameter(8))
def slice_of_a_learned_start(s, x):
    out = s.start.expand(len(x), 8).clone()
    out[:, 2:6] = s.a(x)
    return s.b(relu(out))

# Writing into hidden units.

def into_units(name: str, whole: Group, write: Callable[..., Any], start: Any = relu, end: Any = None, **settings: Any):
    """Add a program that writes into hidden units, `write(network, inputs, units)`, and reads all of them.

    Args:
        name: The program's name.
        whole: The whole group.
        write: What writes.
        start: The activation in front; None for linear units.
        end: The activation behind.
        settings: As of :meth:`Family.__call__`.
    """
    def program(s, x):
        h = s.a(x) if start is None else start(s.a(x))
        write(s, x, h)
        return s.b(h if end is None else end(h))
    writes.row(name, whole, program, **settings)

into_units("one_unit_to_zero", group([7], 7), lambda s, x, h: put(h, s_[:, 0], 0),
    spare=[group([], 1), group([], 1, 1)])
into_units("one_unit_to_one", group([7], 7), lambda s, x, h: put(h, s_[:, 3], 1), least=group([7]),
    spare=[group([], 1)])
into_units("narrow_to_zero", FOUR, lambda s, x, h: h.narrow(1, 2, 4).zero_(), spare=[LOST, ZEROS])
into_units("select_to_zero", group([7], 7), lambda s, x, h: h.select(1, 5).zero_(),
    spare=[group([], 1), group([], 1, 1)])
# Unit 1 is read twice, so it does not change places with the others.
into_units("one_unit_to_another", group([6], 7), lambda s, x, h: put(h, s_[:, 0], h[:, 1]), spare=[group([], 1)])
into_units("one_unit_to_an_input", group([7], 7), lambda s, x, h: put(h, s_[:, 0], x[:, 2]), None, relu,
    spare=[group([], 1), group([], 0, 1)])
into_units("one_unit_to_another_layer", group([7], 8), lambda s, x, h: put(h, s_[:, 0], relu(s.c(x))[:, 0]),
    spare=[group([], 1)], c=of(L, 5, 1))
# Units 1 and 2 have one scale, because their sum is read; they may change places.
into_units("one_unit_to_a_sum", group([5, 2], 6), lambda s, x, h: put(h, s_[:, 0], h[:, 1] + h[:, 2]),
    least=group([5], 5), spare=[group([], 1)])
into_units("copy_into_half", FOURS, lambda s, x, h: h[:, 2:6].copy_(relu(s.c(x))), spare=[LOST], c=OTHER)
into_units("two_units_swapped", UNITS, lambda s, x, h: put(h, s_[:, [0, 1]], h[:, [1, 0]]), least=group([6, 2], 8))
into_units("masked_fill_of_columns", FOUR, lambda s, x, h: h.masked_fill_(torch.arange(8) < 4, 0.0),
    spare=[LOST, ZEROS], least=EMPTY)
into_units("product_through_the_transposed", group([8], 16, 8), lambda s, x, h: h.t().mul_(s.gain[:, None]),
    gain=parameter(8))
# Pairs of units change places together.
into_units("product_of_chunks", group([4], 8), lambda s, x, h: operator.imul(*h.chunk(2, 1)))
into_units("sum_of_chunks", FOUR, lambda s, x, h: operator.iadd(*h.chunk(2, 1)))
# The other half meets linear maps only: any matrix.
into_units("relu_of_half", group([4], 8, 4, dense=[4]), lambda s, x, h: put(h, s_[:, :4], relu(h[:, :4])), None,
    least=FOUR)
into_units("first_step_to_zero", UNITS, lambda s, x, h: put(h, s_[:, 0], 0), on=SEQUENCE)
into_units("first_step_to_a_token", UNITS, lambda s, x, h: put(h, s_[:, 0], s.token), None, relu, on=SEQUENCE,
    token=parameter(8))

def rectify_half(s: Any, x: Tensor, h: Tensor) -> None:
    half = h[:, 4:]
    half.masked_fill_(half < 0, 0.0)

# Half of the units pass a ReLU before all of them pass tanh.
for name, write in {
    "item_in_place": lambda s, x, h: h[:, :4].relu_(),
    "transposed_in_place": lambda s, x, h: h.t()[4:].relu_(),
    "index_of_half": lambda s, x, h: put(h, s_[:, [0, 2, 4, 6]], relu(h[:, [0, 2, 4, 6]])),
    "detached_in_place": lambda s, x, h: h[:, :4].detach().relu_(),
    "module_in_place": lambda s, x, h: nn.ReLU(inplace=True)(h[:, 4:]),
    "unsqueezed_in_place": lambda s, x, h: h.unsqueeze(1)[:, 0, :4].clamp_(min=0),
    "masked_fill_by_sign": rectify_half,
}.items():
    into_units(name, group([4, 4], 0, 4), write, None, tanh)
into_units("view_in_place", group([4, 4], 0, 4), lambda s, x, h: h.view(-1, 2, 4)[:, 1].relu_(), None, Tensor.tanh_)

@writes(FOURS, c=OTHER)
def add_into_half(s, x):
    h = relu(s.a(x))
    h[:, :4] += relu(s.c(x))
    return s.b(h)

@writes(group([4, 4], 4, 4))
def chunks_in_place(s, x):
    h = s.a(x)
    one, two = h.chunk(2, 1)
    one.relu_()
    two.tanh_()
    return s.b(h)

@writes(group([3, 5], 3, 5))
def split_in_place(s, x):
    h = s.a(x)
    one, two = h.split([3, 5], 1)
    two.tanh_()
    F.relu(one, inplace=True)
    return s.b(h)

@writes(FOUR + group([4]))
def unbind_in_place(s, x):
    h = s.a(x).view(-1, 2, 4)
    one, two = h.unbind(1)
    one.relu_()
    two.sigmoid_()
    return s.b(h.flatten(1))

# A view sees what is written into its base, and a copy does not. All weights of the other units are shifts.
@writes(FOUR, spare=[Group(0, 4, 4, 0, 0)], b=of(L, 4, 2))
def view_of_what_is_written_later(s, x):
    h = s.a(x)
    half = h[:, :4]
    h.relu_()
    return s.b(half)

@writes(group([8]), c=B)
def copy_of_what_is_written_later(s, x):
    h = s.a(x)
    copied = h.t().contiguous()
    copied.relu_()
    return s.b(tanh(h)) + s.c(copied.t())

@writes(FOURS, spare=[ZEROS], c=B)
def clone_with_zeros(s, x):
    h = relu(s.a(x))
    g = h.clone()
    g[:, :4] = 0
    return s.b(h) + s.c(g)

@writes(FOURS, a=HALF, c=A)
def padded_residual(s, x):
    out = zeros(x, 8)
    out[:, :4] = s.a(x).relu_()
    return s.b(relu(out + s.c(x)))

# Both layers write into the same units, for other samples.
@writes(UNITS, batches=(2, 5), c=A)
def samples_in_turn(s, x):
    out = zeros(x, 8)
    out[0::2], out[1::2] = relu(s.a(x[0::2])), relu(s.c(x[1::2]))
    return s.b(out)

# A mask that the program makes from positions may be made from the input's size, so that its columns may stay.
writes.row("where_of_columns", group([4, 4], 4, 4),
    lambda s, x: s.b(torch.where(torch.arange(8) < 4, relu(s.a(x)), tanh(s.c(x)))), spare=[LOST, group([4], 0, 4)],
    least=EMPTY, c=A)

# Two units are added: they change places within pairs and as pairs.
@writes(group([4], 4, blocks=[2**4]), least=EMPTY, b=of(L, 4, 2))
def scatter_add_of_pairs(s, x):
    index = (torch.arange(8) % 4).expand(len(x), 8)
    return s.b(zeros(x, 4).scatter_add_(1, index, relu(s.a(x))))

@writes(UNITS, on=SEQUENCE)
def steps_into_zeros(s, x):
    out = x.new_zeros(*x.shape[:2], 8)
    for t in range(x.shape[1]):
        out[:, t] = relu(s.a(x[:, t]))
    return s.b(out)

@writes(group([8], 0, 8), on=SEQUENCE, u=of(L, 8, 8))
def recurrent_steps_into_empty(s, x):
    out = x.new_empty(*x.shape[:2], 8)
    h = x.new_zeros(len(x), 8)
    for t in range(x.shape[1]):
        h = tanh(s.a(x[:, t]) + s.u(h))
        out[:, t] = h
    return s.b(out)

@writes(UNITS, on=SEQUENCE)
def steps_first(s, x):
    out = x.new_zeros(x.shape[1], len(x), 8)
    for t, step in enumerate(x.unbind(1)):
        out[t] += relu(s.a(step))
    return s.b(out.transpose(0, 1))

# Each step reads what the one before has written.
@writes(UNITS, on=SEQUENCE, u=of(L, 8, 8))
def steps_that_read_the_buffer(s, x):
    out = x.new_zeros(len(x), x.shape[1] + 1, 8)
    for t in range(x.shape[1]):
        out[:, t + 1] = relu(s.a(x[:, t]) + s.u(out[:, t]))
    return s.b(out[:, 1:])

@writes(UNITS, on=SEQUENCE)
def shifted_in_time(s, x):
    h = relu(s.a(x))
    out = torch.zeros_like(h)
    out[:, 1:] = h[:, :-1]
    return s.b(h - out)

@writes(UNITS, on=IMAGE, b=of(C, 8, 2, 3))
def image_inside_a_border(s, x):
    h = relu(s.a(x))
    out = h.new_zeros(len(x), 8, x.shape[2] + 2, x.shape[3] + 2)
    out[:, :, 1:-1, 1:-1] = h
    return s.b(out)

@writes(group([8]), on=IMAGE, b=of(C, 8, 2, 3))
def image_inside_a_border_of_ones(s, x):
    h = relu(s.a(x))
    out = h.new_ones(len(x), 8, x.shape[2] + 2, x.shape[3] + 2)
    out[..., 1:-1, 1:-1] = h
    return s.b(out)

@writes(group([4, 4], 4, 4), on=IMAGE, a=of(C, 3, 4, 3, padding=1), c=of(C, 3, 4, 3, padding=1))
def channels_in_turn(s, x):
    out = x.new_empty(len(x), 8, *x.shape[2:])
    out[:, ::2] = relu(s.a(x))
    out[:, 1::2] = tanh(s.c(x))
    return s.b(out)

EVEN = [normal(3, 8, 12), normal(3, 12, 4)]

writes.row("pooled_values_only", UNITS, lambda s, x: s.b(F.max_pool2d(relu(s.a(x)), 2, return_indices=True)[0]),
    on=IMAGE)
writes.row("adaptive_pooled_values_only", UNITS, lambda s, x: s.b(s.pool(relu(s.a(x)))[0]), on=IMAGE,
    pool=of(nn.AdaptiveMaxPool2d, 2, return_indices=True))
writes.row("unpooled", UNITS, lambda s, x: s.b(s.up(*s.pool(relu(s.a(x))))), on=IMAGE, fresh=EVEN,
    pool=of(nn.MaxPool2d, 2, return_indices=True), up=of(nn.MaxUnpool2d, 2))

# The places come from one map and the values from another: channels of both move together, scales are their own.
@writes(group([8], 16), on=IMAGE, fresh=EVEN, c=of(C, 8, 8, 1))
def unpooled_by_the_indices_of_another_map(s, x):
    values, places = F.max_pool2d(relu(s.a(x)), 2, return_indices=True)
    return s.b(F.max_unpool2d(relu(s.c(values)), places, 2))

@writes(group([], 8), on=IMAGE, fresh=EVEN)
def indices_are_an_output(s, x):
    values, places = F.max_pool2d(relu(s.a(x)), 2, return_indices=True)
    return s.b(values), places

@writes(FOUR, a=HALF, b=of(L, 5, 2))
def into_a_copy_of_the_input(s, x):
    y = x.clone()
    y[:, :4] = relu(s.a(x))
    return s.b(y)

@writes(group([4, 4], 12, 4), gain=parameter(4))
def gain_on_half(s, x):
    h = relu(s.a(x))
    h[:, :4] *= s.gain
    return s.b(h)

@writes(group([], 1), least=EMPTY)
def sums_of_units_step_by_step(s, x):
    h = relu(s.a(x))
    for i in range(1, 8):
        h[:, i] += h[:, i - 1]
    return s.b(h)

writes.row("index_fill", FOUR, lambda s, x: s.b(relu(s.a(x)).index_fill_(1, torch.tensor([0, 2, 4, 6]), 0.0)),
    spare=[LOST, ZEROS])

writes.row("scatter_of_zeros", FOUR,
    lambda s, x: s.b(relu(s.a(x)).scatter(1, torch.tensor([1, 3, 5, 7]).expand(len(x), 4), 0.0)), spare=[LOST, ZEROS])

@writes(group([8], 0, 8), least=EMPTY)
def result_into_empty(s, x):
    out = x.new_empty(len(x), 8)
    torch.tanh(s.a(x), out=out)
    return s.b(out)

@writes(FOURS)
def buffer_written_twice(s, x):
    out = x.new_zeros(len(x), 4)
    h = relu(s.a(x))
    out.copy_(h[:, :4])
    first = out * 2
    out.copy_(h[:, 4:])
    return s.b(torch.cat([first, out], 1))

@writes(UNITS, on=SEQUENCE)
def last_step_wins(s, x):
    out = x.new_zeros(len(x), 8)
    for step in x.unbind(1):
        out.mul_(0.5).add_(relu(s.a(step)))
    return s.b(out)

@writes(group([8], 0, 8), on=SEQUENCE)
def masked_steps(s, x):
    h = tanh(s.a(x))
    h[:, 1::2] = 0.0
    return s.b(h).masked_fill_((torch.arange(x.shape[1]) % 3 == 0)[:, None], -math.inf)

# Pieces that are used more than once.

shared = Family("shared", X)
NORM, NORM2D = of(nn.BatchNorm1d, 8), of(nn.BatchNorm2d, 8)

# The scale in front of both norms with its sign, two scales behind.
@shared(group([8], 24, 8, shifts=8), least=group([8], 16), m=NORM, n=NORM, c=B)
def linear_behind_which_two_norms_stand(s, x):
    h = s.a(x)
    return s.b(relu(s.m(h))) + s.c(relu(s.n(h)))

@shared(group([8, 4], 20, 8, shifts=8), on=IMAGE, least=group([8, 4], 12), m=NORM2D, n=NORM2D, b=of(C, 8, 4, 1),
        c=of(C, 4, 2, 1))
def detection_head(s, x):
    """One head on two levels, with norms of their own."""
    levels = [(x, s.m), (F.avg_pool2d(x, 2), s.n)]
    return tuple(s.c(relu(s.b(relu(norm(s.a(level)))))) for level, norm in levels)

@shared(group([8], 24, 8), on=IMAGE, least=group([8], 16), a=of(C, 3, 8, 3, bias=False),
        norms=lambda: nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)]), c=CB)
def norms_of_two_domains(s, x):
    one, two = (relu(norm(s.a(x))) for norm in s.norms)
    return s.b(one), s.c(two)

# The domains' outputs are read by the same weights: one scale behind.
shared.row("norms_of_two_domains_with_one_head", group([8], 16, 8),
    lambda s, x: [s.b(relu(norm(s.a(x)))) for norm in s.norms], on=IMAGE, least=UNITS, a=of(C, 3, 8, 3, bias=False),
    norms=lambda: nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)]))
# The two layers with their readers, and the biases of these, can be exchanged.
shared.row("norm_behind_two_layers", group([8, 2, 2], 16, 8, shifts=8),
    lambda s, x: s.b(relu(s.n(s.a(x)))) + s.d(relu(s.n(s.c(x)))), least=UNITS, c=A, n=NORM, d=B)
shared.row("norm_behind_two_convolutions", group([8], 16, 8, shifts=8),
    lambda s, x: s.b(relu(s.n(s.a(x))) + relu(s.n(s.c(x)))), on=IMAGE, least=UNITS, c=of(C, 3, 8, 1), n=NORM2D)
# The norm between is the same as the one at the end.
shared.row("norm_used_twice_in_series", group([8], 16, 8, shifts=8),
    lambda s, x: s.b(relu(s.n(s.c(relu(s.n(s.a(x))))))), least=UNITS, c=of(L, 8, 8), n=NORM)
shared.row("norm_of_the_input_and_of_units", group([], 5), lambda s, x: s.b(relu(s.n(x))) + s.c(relu(s.n(s.a(x)))),
    a=of(L, 5, 5), n=of(nn.BatchNorm1d, 5), b=of(L, 5, 2), c=of(L, 5, 2))

# The ReLU without the norm allows positive scales only, and no shift.
@shared(group([8], 16), least=UNITS, n=NORM, c=B)
def linear_with_and_without_its_norm(s, x):
    h = s.a(x)
    return s.b(relu(s.n(h))) + s.c(relu(h))

@shared(group([8], 16, 8), on=IMAGE, least=UNITS, n=NORM2D, c=CB)
def convolution_with_and_without_its_norm(s, x):
    h = s.a(x)
    return s.b(relu(s.n(h))) + s.c(h)

# What stands in front of the norm is an output, so its units stay; what the norm puts out has scales.
@shared(group([], 8), on=IMAGE, n=NORM2D)
def convolution_that_is_an_output_and_normed(s, x):
    h = s.a(x)
    return h, s.b(relu(s.n(h)))

# One scale and one sign in front; the signs behind are those of tanh.
@shared(group([8], 8, 24, shifts=8), least=group([8], 0, 16), m=NORM, n=NORM, c=B)
def two_norms_in_front_of_tanh(s, x):
    h = s.a(x)
    return s.b(tanh(s.m(h))) + s.c(tanh(s.n(h)))

# Each unit of one layer changes places with that of the other, and both last biases do.
shared.row("bias_of_two_weights", group([8], 8) + Group(9 * math.log10(2), 0, 0, 0, 0),
    lambda s, x: s.b(relu(F.linear(x, s.w, s.bias))) + s.c(relu(F.linear(x, s.v, s.bias))), w=parameter(8, 5),
    v=parameter(8, 5), bias=parameter(8), c=B)
shared.row("bias_of_two_convolutions", UNITS,
    lambda s, x: (s.b(relu(F.conv2d(x, s.w, s.bias))), s.c(relu(F.conv2d(x, s.v, s.bias)))), on=IMAGE,
    w=parameter(8, 3, 3, 3), v=parameter(8, 3, 1, 1), bias=parameter(8), c=CB)
# Which input a weight's second axis means depends on the group in one use, and not in the other: no label says so.
shared.row("weight_of_a_grouped_and_of_a_plain_convolution", group([2], 0, 10, blocks=[16, 24]),
    lambda s, x: s.b(tanh(F.conv2d(tanh(s.a(x)), s.g, groups=4))) + s.c(tanh(F.conv2d(tanh(s.d(x)), s.g))),
    on=normal(4, 6, 6), least=EMPTY, a=of(C, 4, 8, 1), d=of(C, 4, 2, 1), g=parameter(8, 2, 1, 1), b=of(C, 8, 2, 1),
    c=of(C, 8, 2, 1))
# Each channel is read at another pixel; of a larger image all pixels that are read are in the first channel.
shared.row("a_pixel_of_each_channel", group([], 1), lambda s, x: s.b(relu(s.a(x)).flatten(1)[:, [0, 5, 10, 15]]),
    on=normal(1, 2, 2), a=of(C, 1, 4, 1), b=of(L, 4, 2))
# A bias that is doubled shifts a running mean by twice as much.
shared.row("doubled_bias_in_front_of_a_norm", group([8], 16, 8, shifts=8),
    lambda s, x: s.b(relu(s.n(torch.addmm(s.bias, x, s.w, beta=2)))), w=parameter(5, 8), bias=parameter(8), n=NORM)
# Rounding has no derivative, which is what scales are checked by.
shared.row("units_rounded_to_integers", group([8]), lambda s, x: s.b((8 * relu(s.a(x))).int().to(x.dtype)))
# The second weight is in front of a norm; the bias ties its scales to those of the first.
shared.row("bias_with_and_without_a_norm", group([8], 16),
    lambda s, x: s.b(relu(F.linear(x, s.w, s.bias))) + s.c(relu(s.n(F.linear(x, s.v, s.bias)))), least=UNITS,
    w=parameter(8, 5), v=parameter(8, 5), bias=parameter(8), n=NORM, c=B)
shared.row("one_prelu_for_two_layers", group([8], 16), lambda s, x: s.b(s.p(s.c(s.p(s.a(x))))), c=of(L, 8, 8),
    p=of(nn.PReLU, 8))
shared.row("one_slope_for_two_layers", group([8, 8], 16), lambda s, x: s.b(s.p(s.c(s.p(s.a(x))))), c=of(L, 8, 8),
    p=nn.PReLU)
# Gain and bias against both readers; all units of both layers change sign at once, and the gain takes it back. The
# layers with their readers, and the biases of these, can be exchanged.
shared.row("layer_norm_of_two_layers", group([8, 2, 2], 8, 1),
    lambda s, x: s.b(relu(s.n(s.a(x)))) + s.d(relu(s.n(s.c(x)))), c=A, n=of(nn.LayerNorm, 8), d=B)
shared.row("layer_norm_used_twice_in_series", group([8], 8, 1), lambda s, x: s.b(relu(s.n(s.c(relu(s.n(s.a(x))))))),
    c=of(L, 8, 8), n=of(nn.LayerNorm, 8))

@shared(group([8], 16, 8), c=B, gain=parameter(8))
def one_gain_for_two_paths(s, x):
    h = relu(s.a(x))
    return s.b(h * s.gain) + s.c(relu(h) * s.gain)

# The stream is rotated.
@shared(group([8], 8, 6) + Group(0.0, 0, 0, 0, 15), on=tokens(4), fresh=[tokens(1), tokens(7)],
        e=of(nn.Embedding, 10, 6), u=of(L, 6, 8), d=of(L, 8, 6))
def embedding_and_its_transpose(s, i):
    h = s.e(i)
    return F.linear(h + s.d(relu(s.u(h))), s.e.weight)

# All units change sign at once, with the norm's bias.
shared.row("embedding_and_its_transpose_behind_a_norm", group([6], 0, 1), lambda s, i: s.n(s.e(i)) @ s.e.weight.t(),
    on=tokens(4), fresh=[tokens(1), tokens(7)], e=of(nn.Embedding, 10, 6), n=of(nn.LayerNorm, 6))

# From input to output and back: what scales the first hidden layer is undone in the third, the middle has no scale.
@shared(group([8, 6], 8), w=parameter(8, 5), v=parameter(6, 8))
def autoencoder_of_tied_weights(s, x):
    h = relu(F.linear(relu(F.linear(x, s.w)), s.v))
    return F.linear(relu(F.linear(h, s.v.t())), s.w.t())

# What scales the first layer is undone in the third; besides, one scale for the whole weight that is read twice.
shared.row("weight_used_also_transposed", group([8, 6], 9),
    lambda s, x: s.b(relu(F.linear(relu(F.linear(relu(s.a(x)), s.v)), s.v.t()))), least=group([8, 6], 8),
    v=parameter(6, 8))

@shared(UNITS, c=of(L, 8, 8))
def layer_applied_three_times(s, x):
    h = relu(s.a(x))
    for _ in range(3):
        h = relu(s.c(h))
    return s.b(h)

@shared(group([8, 6], 14), u=of(L, 8, 6), d=of(L, 6, 8))
def residual_block_applied_twice(s, x):
    h = relu(s.a(x))
    for _ in range(2):
        h = relu(h + s.d(relu(s.u(h))))
    return s.b(h)

@shared(group([6], 14, 8, dense=[8]), u=of(L, 8, 6), d=of(L, 6, 8))
def linear_stream_of_tied_blocks(s, x):
    h = s.a(x)
    for _ in range(3):
        h = h + s.d(relu(s.u(h)))
    return s.b(h)

@shared(group([8], 16, 8, shifts=8), least=UNITS, c=of(L, 8, 8), n=NORM)
def normed_block_applied_twice(s, x):
    h = relu(s.a(x))
    for _ in range(2):
        h = relu(s.n(s.c(h)))
    return s.b(h)

shared.row("siamese", UNITS, lambda s, x, y: s.b(relu(s.a(x)) - relu(s.a(y))), on=lambda n: (*X(n), *X(n)), a=A, b=B)

# The candidate and the state change sign together, as in a plain recurrence.
@shared(group([8], 0, 8), on=SEQUENCE, w=of(L, 5, 24), u=of(L, 8, 24))
def gated_recurrence(s, x):
    h = x.new_zeros(len(x), 8)
    for step in x.unbind(1):
        (r, z, n), (p, q, m) = s.w(step).chunk(3, 1), s.u(h).chunk(3, 1)
        update = torch.sigmoid(z + q)
        h = (1 - update) * tanh(n + torch.sigmoid(r + p) * m) + update * h
    return s.b(h)

# Written both ways round, so that its scales would have to be their own inverses.
shared.row("convolution_and_its_transpose", group([8]),
    lambda s, x: F.conv_transpose2d(relu(F.conv2d(x, s.w, padding=1)), s.w, padding=1), on=IMAGE,
    w=parameter(8, 3, 3, 3))
shared.row("weight_of_a_linear_layer_and_of_a_convolution", UNITS,
    lambda s, x: s.b(relu(F.linear(x, s.w))) + s.c(relu(F.conv1d(x[..., None], s.w[..., None])[..., 0])),
    w=parameter(8, 5), c=B)
shared.row("weight_stacked_twice", group([4], 4), lambda s, x: s.b(relu(F.linear(x, torch.cat([s.w, 2 * s.w])))),
    w=parameter(4, 5))

@shared(group([6], 12, 6), a=of(L, 5, 6), gain=parameter(6), b=of(L, 6, 2), c=of(L, 6, 2))
def gain_and_its_square(s, x):
    h = relu(s.a(x))
    return s.b(h * s.gain) + s.c(h * s.gain.square())

# Units that stay together, because something is summed, normalised or chosen over a part of them: heads, groups, paths.

parts = Family("parts", SEQUENCE)
LOOSE = of(L, 5, 8, bias=False)

# Within a head, four units change places; its length is divided out, and with it a scale that they have in common.
@parts(group([4, 4], 2, blocks=[2]))
def heads_over_their_length(s, x):
    h = s.a(x).unflatten(-1, (2, 4))
    return s.b(relu(h / torch.linalg.vector_norm(h, dim=-1, keepdim=True)).flatten(-2))

@parts(group([4, 4], 2, blocks=[2]))
def heads_over_their_deviation(s, x):
    h = relu(s.a(x)).unflatten(-1, (2, 4))
    return s.b((h / h.std(-1, keepdim=True)).flatten(-2))

# Two paths of eight channels; what is chosen of each depends on their sum.
@parts(group([8, 6], 6, 8), c=of(L, 5, 8), r=of(L, 8, 6), t=of(L, 6, 16))
def selected_paths(s, x):
    both = tanh(torch.stack([s.a(x), s.c(x)], 2))
    gate = torch.sigmoid(s.t(relu(s.r(both.sum(2).mean(1)))))
    return s.b((both * gate.reshape(-1, 1, 2, 8)).sum(2))

# Each row of the weight loses its own scale and mean; all that goes in may only scale together.
@parts(group([8, 4], 5, shifts=4), least=group([8, 4], 4, shifts=4), on=IMAGE, a=CA, w=parameter(4, 8, 3, 3),
    b=of(C, 4, 2, 1))
def standardised_filters(s, x):
    variance, mean = torch.var_mean(s.w, (1, 2, 3), keepdim=True)
    return s.b(relu(F.conv2d(relu(s.a(x)), (s.w - mean) / variance.sqrt())))

@parts(group([8, 4], 5, 4), least=group([8, 4], 4, 4), on=IMAGE, a=CA, w=parameter(4, 8, 3, 3), g=parameter(4),
    b=of(C, 4, 2, 1))
def filters_through_a_batch_norm(s, x):
    w = F.batch_norm(s.w.reshape(1, 4, -1), None, None, weight=s.g, training=True, eps=0.1)
    return s.b(relu(F.conv2d(relu(s.a(x)), w.reshape_as(s.w))))

# The gain's three axes of size 1 say nothing of their own.
parts.row("gain_of_each_filter", group([8], 16, 8), lambda s, x: s.b(relu(F.conv2d(x, s.w * s.g))), on=IMAGE,
    w=parameter(8, 3, 3, 3), g=parameter(8, 1, 1, 1), b=CB)
parts.row("gate_expanded_to_the_others_shape", UNITS,
    lambda s, x: s.b(relu(s.a(x)) * torch.sigmoid(s.c(x.mean(1, keepdim=True))).expand_as(s.a(x))), c=of(L, 5, 8))
parts.row("filters_of_channels_moved_about", group([8], 16),
    lambda s, x: s.b(relu(F.conv1d(relu(s.a(x)).mT, s.w.squeeze(1).unsqueeze(1), padding=1, groups=8)).mT),
    w=parameter(8, 1, 3))
parts.row("step_chosen_by_the_input", UNITS, lambda s, x: s.b(relu(s.a(x))[torch.arange(len(x)), x[:, :, 0].argmax(1)]))
parts.row("step_gathered_by_the_input", UNITS,
    lambda s, x: s.b(relu(s.a(x)).gather(1, x[:, :, 0].argmax(1)[:, None, None].expand(-1, -1, 8))))
# An index of its own for each unit, and nothing that says how it would move along.
parts.row("steps_gathered_for_each_unit", group(scales=8),
    lambda s, x: s.b(relu(s.a(x)).gather(1, (x @ s.k).argmax(1, keepdim=True))), least=EMPTY,
    k=Fixed(lambda: sinusoids(5, 8).double()))

# What is added to the scores tells the heads apart.
@parts(group(scales=16, signs=16, dense=[4, 4, 4, 4]), q=LOOSE, k=LOOSE, v=LOOSE, b=of(L, 8, 2, bias=False))
def slopes_of_heads(s, x):
    q, k, v = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (s.q, s.k, s.v))
    slopes = torch.tensor([0.5, 0.25], dtype=x.dtype)[:, None, None] * torch.arange(x.shape[1])
    return s.b(F.scaled_dot_product_attention(q, k, v, slopes).transpose(1, 2).flatten(-2))

copies = Family("copies", SEQUENCE)

def heads(x: Tensor, width: int) -> Tensor:
    """Split the last axis into heads: [N, T, heads * width] becomes [N, heads, T, width]."""
    return x.unflatten(-1, (-1, width)).transpose(1, 2)

def repeat(x: Tensor, times: int) -> Tensor:
    """Repeat each head, as models of `transformers` do."""
    n, k, t, width = x.shape
    return x[:, :, None].expand(n, k, times, t, width).reshape(n, k * times, t, width)

def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT / 2).softmax(-1)

def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)

def sdpa(s, x, **options):
    q, k, v = (heads(layer(x), 2) for layer in (s.q, s.k, s.v))
    return s.o(merged(F.scaled_dot_product_attention(q, k, v, **options)))

# Two keys for six queries of width 2: any matrix between keys and their three queries, and between values and what
# reads them. The groups change places, and the queries in each group.
GROUPED = {"q": of(L, 5, 12), "k": of(L, 5, 4, bias=False), "v": of(L, 5, 4), "o": of(L, 12, 2)}
WREATH = group([], 8, 8, blocks=[6, 6, 2], dense=[2] * 4)

@copies(WREATH, **GROUPED)
def keys_repeated_by_expanding(s, x):
    q, k, v = (heads(layer(x), 2) for layer in (s.q, s.k, s.v))
    return s.o(merged(scores(q, repeat(k, 3)) @ repeat(v, 3)))

@copies(WREATH, **GROUPED)
def keys_repeated_by_interleaving(s, x):
    q, k, v = (heads(layer(x), 2) for layer in (s.q, s.k, s.v))
    return s.o(merged(scores(q, k.repeat_interleave(3, 1)) @ v.repeat_interleave(3, 1)))

@copies(WREATH, **GROUPED)
def keys_repeated_by_an_index(s, x):
    q, k, v = (heads(layer(x), 2) for layer in (s.q, s.k, s.v))
    order = [0, 1, 1, 0, 0, 1]
    return s.o(merged(scores(q, k[:, order]) @ v[:, order]))

@copies(WREATH, **GROUPED)
def queries_grouped_on_an_axis(s, x):
    q, k, v = (heads(layer(x), 2) for layer in (s.q, s.k, s.v))
    weights = scores(q.unflatten(1, (2, 3)), k[:, :, None])
    return s.o(merged((weights @ v[:, :, None]).flatten(1, 2)))

copies.row("keys_grouped_by_torch", WREATH, lambda s, x: sdpa(s, x, enable_gqa=True), **GROUPED)

SHARED_KEY = {"q": of(L, 5, 6), "k": of(L, 5, 2, bias=False), "v": of(L, 5, 2), "o": of(L, 6, 2)}
ONE_KEY = group([], 4, 4, blocks=[6], dense=[2, 2])
copies.row("one_key_for_all_queries", ONE_KEY, lambda s, x: sdpa(s, x, enable_gqa=True), **SHARED_KEY)

@copies(ONE_KEY, **SHARED_KEY)
def one_key_broadcast_to_all_queries(s, x):
    q, k, v = (heads(layer(x), 2) for layer in (s.q, s.k, s.v))
    return s.o(merged(scores(q, k) @ v))

@copies(ONE_KEY + group(shifts=2), **SHARED_KEY)
def one_key_expanded_to_all_queries(s, x):
    q, k, v = (heads(layer(x), 2) for layer in (s.q, s.k, s.v))
    return s.o(merged(scores(q, k.expand_as(q)) @ v.expand_as(q)))

# The slopes differ, so that no query moves; the values' matrices are still shared.
@copies(group([], 8, 8, dense=[2] * 4), slopes=Fixed(lambda: torch.arange(1.0, 7.0) / 6), **GROUPED)
def slopes_that_tell_queries_apart(s, x):
    q, k, v = (heads(layer(x), 2) for layer in (s.q, s.k, s.v))
    bias = -s.slopes[:, None, None] * distances(x.shape[1], 0).abs()
    return s.o(merged((q @ repeat(k, 3).mT / 2 + bias).softmax(-1) @ repeat(v, 3)))

# A learned sink for each query (a number beside its scores) moves with it.
@copies(WREATH, sinks=parameter(6), **GROUPED)
def a_sink_for_each_query(s, x):
    q, k, v = (heads(layer(x), 2) for layer in (s.q, s.k, s.v))
    logits = q @ repeat(k, 3).mT / 2
    sinks = s.sinks[:, None, None].expand(len(x), 6, x.shape[1], 1)
    weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
    return s.o(merged(weights @ repeat(v, 3)))

# Every query's share of the output has gains of its own, whose scales move with it; the values' two coordinates change
# places in all copies at once. (A matrix that gains conjugate would do, too.)
@copies(group([2, 2], 20, 20, blocks=[6, 6, 2], dense=[2, 2], shifts=4), gain=parameter(12), **GROUPED)
def gains_behind_each_query(s, x):
    q, k, v = (heads(layer(x), 2) for layer in (s.q, s.k, s.v))
    return s.o(s.gain * merged(scores(q, repeat(k, 3)) @ repeat(v, 3)))

@copies(group([], 8, 8, blocks=[6, 6, 2], dense=[2, 2], phases=4), inv_freq=Fixed(lambda: torch.tensor([1.0, 0.1])),
    q=of(L, 5, 24), k=of(L, 5, 8, bias=False), v=of(L, 5, 4), o=of(L, 12, 2))
def rotary_with_grouped_queries(s, x):
    q, k = (rotate(heads(layer(x), 4), s.inv_freq) for layer in (s.q, s.k))
    return s.o(merged(scores(q, repeat(k, 3)) @ repeat(heads(s.v(x), 2), 3)))

# Units that are repeated and read one by one: their copies could change places, too, but there is no block of them.
copies.row("units_read_twice", UNITS, lambda s, x: s.b(relu(s.a(x)).repeat_interleave(2, -1)), on=X, b=of(L, 16, 2))
