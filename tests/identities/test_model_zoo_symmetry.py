"""Networks of transformers, timm and torch, unmodified: traced without hints, and proved at other lengths and sizes.

`STAYS_FIXED` lists every reason for which something stays fixed: a reason that is not listed fails.
"""

import copy
import functools
import re
import warnings
from pathlib import Path

import pytest
import torch
from helpers import one_in
from model_zoo_cases import TIMM, TORCH, TRANSFORMERS, Model
from orbit_laws import assert_same_weights
from torch import nn

from lightning_sym.connectivity import interpolate
from lightning_sym.symmetry import Symmetry, canonicalize, orbit_distance, trace_symmetry, weight_matching

LIBRARIES = {"torch": TORCH, "transformers": TRANSFORMERS, "timm": TIMM}
QUICK = {
    "torch": set(TORCH),
    "transformers": {
        "gpt2",
        "llama-grouped",
        "mixtral",
        "falcon-alibi",
        "bert-mask",
        "t5",
        "mamba",
        "clip-text",
        "gpt_neo",
    },
    "timm": {"vit, norms of queries and keys", "vit, LayerScale", "swin", "convnextv2", "sequencer", "beit"},
}
CASES = [
    pytest.param(library, name, marks=() if name in QUICK[library] else pytest.mark.slow, id=f"{library}-{name}")
    for library, cases in LIBRARIES.items()
    for name in cases
]

# Parameters that evaluation never uses, outputs that do not count, rows of tables that no example reaches, and zeros
# among weights: these say nothing of a rule.
HARMLESS = (
    *("parameters that evaluation never uses", "of the outputs", "no example reaches"),
    *("nothing reads", "invertible matrices also mix these", "unknowns)"),  # freer than the group
    *("further free directions depend on", "of this network hold zeros"),
)
# The reasons, as notes give them.
TIED = "embeddings are tied, or values before and behind a gain are added up"
HEADS = "meets numbers that tell units apart"  # linear biases, masks of windows, factors of one head's widths
PLACES = "combines units at different positions"  # rotary pairs, and tables of relative positions
TOGETHER = "8 signs that only act together with others are left out"
CHOSEN = "units are chosen by their values"  # groups of experts
EQUAL = f"{CHOSEN}, of which several may be equal"  # and experts behind the mask of their groups
FACTORS = "sums units times fixed numbers, behind which they keep no scale in common"  # relative positions by numbers
ALONG = "acts along an axis on which units live"  # positions that are resized
ROWS = "reads units at other positions in other rows"  # scores of relative positions, gathered
EXCHANGED = "layers that read one value are exchanged; exchange=False finds more of their translations"
ONE_AXIS = "two labelled axes became one"
RELATIVE = "the two sides of a product carry different labels"  # one table of relative positions for all heads
NORMED = (
    "multiplies the outputs of two layer norms: their gains, biases and inputs may change together, in "
    "one dimension, two with biases, that depend on the weights"
)
# What they mean, for the guide.
MEANING = {TIED: "tied embeddings: the stream is permuted, not rotated, as no reader absorbs its last gain",
    HEADS: "slopes of linear biases, masks of windows",
    PLACES: "rotary pairs of one unit, relative positions", ROWS: "a table read at distances",
    TOGETHER: "signs of rotary pairs with gains that all heads share", CHOSEN: "experts are chosen by groups first",
    EQUAL: "masked values may be equal", ONE_AXIS: "two kinds of units in one tensor, or attention over channels",
    RELATIVE: "one relative table for all heads, learned keys", EXCHANGED: "layers that are exchanged",
    FACTORS: "tables of relative positions are made of fixed numbers", ALONG: "learned positions are resized",
    NORMED: "layer norms on queries and keys"}  # fmt: skip
STAYS_FIXED: dict[str, set[str]] = {
    f"{library}: {name}": reasons
    for library, names, reasons in (
        ("transformers", ("gpt2", "gpt2-eager", "gpt2-mask", "gpt_neo", "gpt_bigcode", "opt", "falcon-new"), {TIED}),
        ("transformers", ("llama-tied", "qwen2-tied", "olmo2", "starcoder2", "mamba", "bert-untied"), {TIED}),
        ("transformers", ("bert-classifier", "albert", "electra", "t5", "t5-gated", "bart", "mbart"), {TIED}),
        ("transformers", ("pegasus", "marian", "whisper", "segformer"), {TIED}),
        ("transformers", ("bloom",), {TIED, HEADS}),
        ("transformers", ("falcon",), {TIED}),
        ("transformers", ("falcon-alibi", "mpt", "swin"), {TIED, HEADS}),
        ("transformers", ("gptj", "codegen"), {PLACES}),
        ("transformers", ("deberta", "deberta_v2"), {ROWS}),
        ("timm", ("mobileone",), {EXCHANGED}),
        ("transformers", ("cohere",), {TIED, PLACES}),
        ("transformers", ("gemma", "gemma2", "gemma2-untied"), {TIED}),
        ("transformers", ("gemma3",), {TIED, TOGETHER}),
        ("transformers", ("dinov2",), {ALONG}),
        ("transformers", ("qwen3",), {TOGETHER}),
        ("transformers", ("qwen3-moe",), {TOGETHER}),
        ("transformers", ("deepseek_v3",), {HEADS, PLACES, CHOSEN, EQUAL, ONE_AXIS}),
        ("timm", ("swin", "pvt_v2", "poolformer"), {TIED}),
        ("timm", ("swinv2",), {TIED, FACTORS}),
        ("timm", ("vit, relative positions", "vit, shared relative positions", "convit"), {FACTORS}),
        ("timm", ("eva02", "eva02, any size", "vit, rotary"), {PLACES}),
        ("timm", ("vit, learned rotary",), {PLACES, ONE_AXIS}),
        ("timm", ("dinov3",), {HEADS}),
        ("timm", ("davit",), {ONE_AXIS}),
        ("timm", ("xcit", "edgenext"), {ONE_AXIS, FACTORS}),
        ("timm", ("botnet", "lambda_resnet"), {RELATIVE}),
        ("timm", ("sam",), {PLACES}),
        ("timm", ("tnt",), {TIED, PLACES}),
        ("timm", ("vit, norms of queries and keys",), {TIED, NORMED}),
    )
    for name in names
}
# A head as wide as its centred input has dependent weights, and no balanced form.
SINGULAR = "linearly dependent"
# Networks with a form that depends on the point of the orbit, as their notes say.
NOT_UNIQUE = {
    "transformers: deepseek_v3",  # a common constant of a buffer that chooses experts
}
EXACT, NO_DISTANCE = 1e-10, 1e-7
LARGE = 5e6
# At another size than the example's these resize their positions, in single precision.
RESIZED = ("transformers: dinov2", "timm: vit, any size", "timm: eva02, any size")


def reason(note: str) -> str:
    """Return a note without the operation, the module and how many units it fixes."""
    return re.sub(r" \(fixes .*\)$", "", note.partition(": ")[2] or note)


@functools.cache
def traced(library: str, name: str) -> tuple[Model, nn.Module, Symmetry]:
    pytest.importorskip(library)
    torch.manual_seed(0)
    case = LIBRARIES[library][name]
    network, inputs = case.make(), case.inputs(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        symmetry = trace_symmetry(network, **inputs) if isinstance(inputs, dict) else trace_symmetry(network, inputs)
    return case, network, symmetry


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "name"), one_in(3, CASES))
@pytest.mark.long
def test_function_is_kept_and_what_stays_fixed_is_listed(library: str, name: str) -> None:
    """Through a state dict into a fresh copy, at a length or size that the tracer did not see."""
    case, network, symmetry = traced(library, name)
    other = case.inputs(True)
    change = symmetry.check(network, **other) if isinstance(other, dict) else symmetry.check(network, other)
    assert change < (1e-5 if f"{library}: {name}" in RESIZED else symmetry.tolerance)
    assert symmetry.dimension > 0
    notes = [note for note in symmetry.notes if not any(part in note for part in HARMLESS)]
    assert {reason(note) for note in notes} <= STAYS_FIXED.get(f"{library}: {name}", set())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "name"), one_in(3, CASES))
@pytest.mark.long
def test_points_of_an_orbit_have_one_form_at_no_distance(library: str, name: str) -> None:
    """With weights near random ones: biases of a new network are zero."""
    _, given, symmetry = traced(library, name)
    network, seed = copy.deepcopy(given).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for own in network.parameters():
            own += 0.03 * torch.randn(own.shape, generator=seed, dtype=own.dtype)
    one, two = (symmetry.sample(seed) for _ in range(2))
    member = symmetry.act(one, network)
    assert_same_weights(symmetry.act(symmetry.inverse(one), member), network, EXACT)
    assert_same_weights(symmetry.act(two, member), symmetry.act(symmetry.compose(two, one), network), EXACT)
    form, distance = canonicalize(symmetry, network, check=True), orbit_distance(symmetry, network, member)
    assert distance.lower < NO_DISTANCE
    if not any(SINGULAR in note for note in form.notes):
        assert form.difference < NO_DISTANCE or f"{library}: {name}" in NOT_UNIQUE
        assert distance.upper < NO_DISTANCE or f"{library}: {name}" in NOT_UNIQUE


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "name"), one_in(3, CASES))
@pytest.mark.long
def test_state_dicts_move_as_networks_and_matches_are_nearer_in_single_precision(library: str, name: str) -> None:
    """State dicts hold tied weights, and those of shared modules, by all of their names."""
    case, network, symmetry = traced(library, name)
    element = symmetry.sample(torch.Generator().manual_seed(0))
    moved = symmetry.act(element, network)
    torch.testing.assert_close(symmetry.act_on(element, network.state_dict()), dict(moved.state_dict()), equal_nan=True)
    if sum(own.numel() for own in network.parameters()) > LARGE:  # a match takes minutes
        return
    torch.manual_seed(1)
    other = case.make()
    match = weight_matching(symmetry, network, other)
    assert match.distance_after < match.distance_before
    with torch.no_grad():
        assert all(own.isfinite().all() for own in interpolate(network, match.network, 0.5).parameters())


def listed() -> str:
    """The table of the guide: why something stays fixed, and in how many of the networks."""
    lines = ["|why|networks|", "|-|-|"]
    for note, why in MEANING.items():
        lines.append(f"|{why}|{sum(note in reasons for reasons in STAYS_FIXED.values())}|")
    return "\n".join(lines)


def test_the_guide_lists_what_stays_fixed() -> None:
    assert {reason for reasons in STAYS_FIXED.values() for reason in reasons} == set(MEANING)
    guide = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    assert listed() in guide, f"docs/transformers.md should hold\n{listed()}"


def test_rows_of_a_table_of_distances_that_longer_inputs_read_are_not_counted() -> None:
    """At 6 tokens 11 of 64 rows are read, and the others may be anything; 32 tokens read all but the first."""
    torch.manual_seed(0)
    network = TRANSFORMERS["deberta"].make().double()
    table = network.deberta.encoder.rel_embeddings.weight
    assert trace_symmetry(network, input_ids=torch.randint(30, (2, 6)), check=False).dimension == 837

    def read(tokens: int) -> int:
        logits = network(input_ids=torch.randint(30, (2, tokens))).logits
        (gradient,) = torch.autograd.grad((logits * torch.randn_like(logits)).sum(), [table])
        return int(gradient.any(1).sum())

    assert (read(6), read(32)) == (11, 63)
