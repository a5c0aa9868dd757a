"""Settings of a merge: depth from the names of tensors, interpolation, filters, and checks before reading."""

import math

import numpy as np
import pytest
import torch
import torchvision
from helpers import assert_refused
from hypothesis import given
from hypothesis import strategies as st

from lightning_sym.merging.methods import FLAGS, METHODS, merge_tensors
from lightning_sym.merging.parameters import Layers, MergeSettings, Setting

LLAMA = Layers(
    [
        "model.embed_tokens.weight",
        *(
            f"model.layers.{n}.{part}.weight"
            for n in range(5)
            for part in ("self_attn.q_proj", "mlp.experts.7.up_proj")
        ),
        "model.norm.weight",
        "lm_head.weight",
    ]
)
ROUNDING = 1e-12  # of a few operations in float64 on numbers of size 10
NUMBERS = st.lists(st.floats(-10, 10), min_size=1, max_size=6)


def layer(prefix, n, tail="mlp.0.weight"):
    return f"{prefix}.{n}.{tail}"


@pytest.mark.parametrize(
    ("before", "prefix", "after"),
    [
        (["model.embed_tokens.weight"], "model.layers", ["model.norm.weight", "lm_head.weight"]),
        (["transformer.wte.weight", "transformer.wpe.weight"], "transformer.h", ["transformer.ln_f.bias"]),
        (
            ["bert.embeddings.word_embeddings.weight"],
            "bert.encoder.layer",
            ["bert.pooler.dense.bias", "classifier.bias"],
        ),
        (["cls_token", "patch_embed.proj.weight"], "blocks", ["norm.weight", "head.bias"]),
        (["module.0.cls_token", "module.0.conv_1.weight"], "module.0.blocks", ["module.0.head.bias"]),
        ([], "layers", []),
    ],
)
@pytest.mark.parametrize("count", [1, 2, 12])
def test_layers_are_found_in_the_names_of_transformers(before, prefix, after, count):
    before = [name for name in before if "conv_1" not in name]
    layers = Layers([*before, *(layer(prefix, n) for n in range(count)), *after])
    assert [layers.place(name) for name in before] == [0.0] * len(before)
    assert [layers.place(name) for name in after] == [1.0] * len(after)
    expected = [n / (count - 1) for n in range(count)] if count > 1 else [1.0]
    assert [layers.place(layer(prefix, n)) for n in range(count)] == expected


@pytest.mark.parametrize(
    ("build", "count", "first", "last"),
    [
        (torchvision.models.resnet18, 8, "layer1.0.conv1.weight", "layer4.1.bn2.bias"),
        (torchvision.models.vit_b_16, 12, "encoder.layers.encoder_layer_0.ln_1.weight", "encoder.ln.weight"),
        (torchvision.models.vgg11, 11, "features.0.weight", "classifier.6.bias"),
    ],
)
def test_layers_of_torchvision_are_its_blocks(build, count, first, last):
    with torch.device("meta"):
        names = list(build().state_dict())
    layers = Layers(names)
    places = [layers.place(name) for name in names]
    assert layers.count == count
    assert (layers.place(first), layers.place(last)) == (0.0, 1.0)
    assert places == sorted(places)
    assert set(places) == {n / (count - 1) for n in range(count)}


def test_modules_are_layers_in_a_network_without_numbers():
    layers = Layers(["scale", "fc1.weight", "fc1.bias", "fc2.weight", "fc3.weight", "fc3.bias"])
    assert [layers.place(name) for name in layers.names] == [0, 1 / 3, 1 / 3, 2 / 3, 1, 1]
    assert Layers([]).count == 0
    assert Layers(["weight", "bias"]).place("bias") == 1


def test_tensors_between_layers_have_the_depth_of_the_layer_before():
    layers = Layers(["shared", "encoder.block.0.w", "encoder.block.1.w", "encoder.norm", "decoder.block.0.w", "head"])
    assert [layers.place(name) for name in layers.names] == [0, 0, 0.5, 0.5, 1, 1]


def test_tensors_after_the_last_layer_have_depth_1_although_an_earlier_layer_comes_again():
    layers = Layers(["h.0.w", "h.1.w", "h.2.w", "h.0.cache", "head"])
    assert [layers.place(name) for name in layers.names] == [0, 0.5, 1, 0, 1]


def test_numbers_that_name_tensors_are_no_layers():
    layers = Layers(["prompts.0", "prompts.1", "layers.0.w", "layers.1.w", "layers.1.scales.0"])
    assert [layers.place(name) for name in layers.names] == [0, 0, 0, 1, 1]


def test_tensor_of_another_network_is_refused():
    assert_refused(lambda: LLAMA.place("model.norm.wieght"), says=("no tensor", "Did you mean 'model.norm.weight'?"))


@given(NUMBERS, st.integers(2, 40))
def test_lists_are_interpolated_piecewise_linearly(numbers, count):
    layers = Layers([layer("h", n) for n in range(count)])
    setting = Setting.of(numbers, "weight")
    found = [setting.at(name, layers) for name in layers.names]
    knots = np.linspace(0, 1, len(numbers)) if len(numbers) > 1 else [0.0]
    expected = np.interp([n / (count - 1) for n in range(count)], knots, numbers)
    assert np.allclose(found, expected, rtol=0, atol=10 * ROUNDING)
    assert found[0] == numbers[0]
    assert math.isclose(found[-1], numbers[-1], abs_tol=ROUNDING)
    assert min(numbers) - ROUNDING <= min(found) <= max(found) <= max(numbers) + ROUNDING


@given(st.lists(st.tuples(st.sampled_from([None, "mlp", "self_attn", "norm", "7"]), NUMBERS), min_size=1, max_size=5))
def test_first_matching_entry_counts_and_entries_of_the_next_level_follow(entries):
    nodes = [{"value": value} if part is None else {"filter": part, "value": value} for part, value in entries]
    whole = Setting.of([*nodes, {"value": -1}], "t")
    split = len(nodes) // 2
    levels = Setting.of(nodes[split:], "t").over(Setting.of(-1, "t"))
    levels = Setting.of(nodes[:split], "t").over(levels) if split else levels
    for name in LLAMA.names:
        first = next((value for part, value in entries if part is None or part in name), -1)
        assert whole.at(name, LLAMA) == levels.at(name, LLAMA) == Setting.of(first, "t").at(name, LLAMA)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        ("1e-3", 1e-3),  # text in YAML 1.1
        ({"filter": "mlp", "value": 2}, 2.0),
        ([{"filter": "*", "value": "5"}, {"filter": "mlp", "value": 2}], 5.0),
        ([{"filter": None, "value": [0, 1]}], 0.5),
        ((0, 4, 0), 4.0),
    ],
)
def test_setting_has_the_forms_of_mergekit(value, expected):
    assert Setting.of(value, "weight").at("model.layers.2.mlp.experts.7.up_proj.weight", LLAMA) == expected


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (True, "must be a finite number"),
        ("half", "must be a finite number"),
        (float("nan"), "must be a finite number"),
        ("inf", "must be a finite number"),
        (10**400, "must be a finite number"),
        ([], "must be a finite number"),
        ([0.5, [1]], "must be a finite number"),
        ([0.5, None], "must be a finite number"),
        ({"filtre": "mlp", "value": 1}, "here[0] has an unknown key 'filtre'; expected filter and value. Did you mean"),
        ([{"value": 1}, {"filter": "mlp"}], "here[1] has no value"),
        ([{"value": 1}, 0.5], "here[1] must be an entry with filter and value"),
        ([{"filter": 3, "value": 1}], "here[0].filter must be a part of tensors' names"),
        ([{"filter": "", "value": 1}], "here[0].filter must be a part of tensors' names"),
        ([{"filter": "mlp", "value": "x"}], "here[0].value must be a finite number"),
    ],
)
def test_setting_of_another_form_is_refused(value, says):
    assert_refused(lambda: Setting.of(value, "here"), says=says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("tis", 2), "Did you mean 'ties'?"),
        (("weights", 2), "says how to align"),
        (("ties", 2), "needs a base"),
        (("linear", 2, True), "uses no base; leave it out, or put it among the models"),
        (("slerp", 3), "slerp merges 2 models, got 3"),
        (("model_stock", 1, True), "at least 2 models besides the base, got 1"),
        (
            ("linear", 2, False, {"wieght": 1}),
            "linear has no setting 'wieght'; expected weight, normalize. Did you mean",
        ),
        (("linear", 2, False, {"density": 1}), "linear has no setting 'density'"),
        (("model_stock", 2, True, {"weight": 1}), "model_stock has no setting 'weight'; leave it out."),
        (("linear", 2, False, {"weight": [1, -1]}), "The weights 1, -1 sum to 0"),
        (("linear", 2, False, {"weight": 0}), "The weights 0, 0 sum to 0"),
        (("linear", 3, False, {"weight": [0.3, 0.7]}), "weight holds 2 values for 3 models"),
        (("linear", 2, False, {"weight": [0.3, "x"]}), "weight[1] must be a finite number"),
        (("linear", 2, False, {"normalize": "yes"}), "normalize must be true or false"),
        (("linear", 2, False, {"normalize": [True, False]}), "normalize must be true or false"),
        (("ties", 2, True, {"density": 0}), "density must be in (0, 1], got 0.0"),
        (("ties", 2, True, {"density": [0.5, [0.1, 1.5]]}), "density[1] must be in (0, 1], got 1.5"),
        (("breadcrumbs", 2, True, {"gamma": 1}), "gamma must be a number in [0, 1), got 1.0"),
        (("della", 2, True, {"density": 0.9}), "epsilon must leave density - epsilon and density + epsilon in (0, 1)"),
        (("ties", 2, True, {"seed": -1}), "seed must be an integer from 0 to 4294967295, got -1"),
        (("ties", 2, True, {"seed": 2**32}), "seed must be an integer from 0 to 4294967295, got 4294967296"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_read(arguments, says):
    method, models, has_base, settings = (*arguments, *(False, {})[len(arguments) - 2 :])
    assert_refused(lambda: MergeSettings.of(method, models, has_base=has_base, **settings), says=says)


def test_weights_that_sum_to_0_are_fine_where_no_sum_divides():
    for method, normalize in (("linear", False), ("ties", True), ("task_arithmetic", False)):
        has_base = METHODS[method].base == "needed"
        own = MergeSettings.of(method, 2, has_base=has_base, weight=[1, -1], normalize=normalize)
        assert own.check(LLAMA) == ()


def test_check_finds_uncovered_tensors_and_zero_sums_in_single_layers():
    uncovered = MergeSettings.of("slerp", 2, has_base=False, t=[{"filter": "mlp", "value": 0.3}])
    assert_refused(
        lambda: uncovered.check(LLAMA), says=("t has no value for model.embed_tokens.weight", "without filter")
    )
    crossing = MergeSettings.of("linear", 2, has_base=False, weight=[[-1, 1], [1, -1]])
    assert_refused(lambda: crossing.check(LLAMA), says="The weights -1, 1 at model.embed_tokens.weight sum to 0")
    narrow = MergeSettings.of("della", 1, has_base=True, density=[[0.5, 0.95]])
    assert_refused(lambda: narrow.check(LLAMA), says="at model.layers.4.self_attn.q_proj.weight")


def test_check_names_filters_that_match_no_tensor():
    own = MergeSettings.of("slerp", 2, has_base=False, t=[{"filter": "self_atn", "value": 0.3}, {"value": 0.5}])
    (note,) = own.check(LLAMA)
    assert note == "filter 'self_atn' of t is part of no tensor's name. Did you mean 'self_attn'?"


def test_defaults_count_for_tensors_without_an_entry_except_for_weights():
    own = MergeSettings.of("ties", 1, has_base=True, density=[{"filter": "mlp", "value": 0.5}])
    name = "model.norm.weight"
    assert own.per_model[0]["density"].at(name, LLAMA) == 1.0
    assert own.per_model[0]["weight"].at(name, LLAMA) == 1.0
    partial = MergeSettings.of("ties", 1, has_base=True, weight=[{"filter": "mlp", "value": 0.5}])
    assert_refused(lambda: partial.check(LLAMA), says="weight has no value for model.embed_tokens.weight")


@pytest.mark.parametrize("method", METHODS)
def test_merged_is_the_method_at_the_values_of_the_tensor(method):
    own = METHODS[method]
    generator = torch.Generator().manual_seed(0)
    count = own.most or 3
    base, *tensors = (torch.randn(5, 7, generator=generator) for _ in range(count + 1))
    ends = {"weight": (0.25, 1), "density": (0.5, 0.75), "gamma": (0, 0.25), "epsilon": (0, 0.125), "scale": (2, 4)}
    ramps = {name: [[ends[name][0], ends[name][1] / (n + 1)] for n in range(count)] for name in own.per_model}
    names = {"lambda": "lambda_"}  # a word of Python
    shared = {names.get(name, name): [0.25, 0.75] for name in own.shared if name not in FLAGS}
    origin = base if own.base == "needed" else None
    made = MergeSettings.of(method, count, has_base=origin is not None, seed=3, **ramps, **shared)
    name = "model.layers.2.self_attn.q_proj.weight"  # in the middle
    middles = {key: [(low + high) / 2 for low, high in value] for key, value in ramps.items()}
    middles |= dict.fromkeys(shared, 0.5)
    expected = merge_tensors(method, tensors, base=origin, seed=3, name=name, **middles)
    assert torch.equal(made.merged(name, tensors, origin, LLAMA), expected)
    if ramps or shared:
        assert not torch.equal(made.merged("lm_head.weight", tensors, origin, LLAMA), expected)


@pytest.mark.parametrize("weight", [torch.tensor([0.5, 1.5]), np.array([0.5, 1.5], np.float32), [np.float32(0.5), 1.5]])
def test_settings_may_be_numbers_of_other_libraries(weight):
    found = merge_tensors("linear", [torch.ones(2), torch.zeros(2)], weight=weight)
    torch.testing.assert_close(found, torch.full((2,), 0.25), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("models", "says"),
    [
        ([torch.nn.Linear(2, 2)] * 2, "model 0 is a Linear; pass state dicts"),
        ([{"state_dict": {"w": torch.zeros(2)}, "epoch": 3}] * 2, "state_dict of model 0 is a dict, and no tensor"),
        ([torch.tensor([1.0, math.nan])] * 2, "must be finite"),
    ],
)
def test_what_is_no_state_dict_is_named(models, says):
    with pytest.raises(ValueError, match=says):
        merge_tensors("linear", models)
