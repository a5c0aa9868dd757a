"""Laws of merge methods, for tensors and settings of all sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sym.merging.methods import METHODS, merge_tensors

torch.set_num_threads(1)
LAW = settings(max_examples=30, deadline=None, derandomize=True)
EXACT = {"rtol": 1e-12, "atol": 1e-12}
TASKS = tuple(name for name, method in METHODS.items() if "lambda" in method.shared)
RANDOM = ("dare_linear", "dare_ties", "della", "della_linear")

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)
seeds = st.integers(0, 2**40)
counts = st.integers(1, 4)
numbers = st.floats(0.1, 3.0)
densities = st.floats(0.2, 0.8)


def drawn(count, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(count)]


def fitting(method, base, **given):
    """Choose the settings that a method has, and its base."""
    own = METHODS[method]
    known = {*own.per_model, *own.shared}
    found = {key: value for key, value in given.items() if key.removesuffix("_") in known}
    return found | ({"base": base} if own.base == "needed" else {})


def number_of(method, count):
    own = METHODS[method]
    return min(max(count, own.fewest), own.most or count + 2)


@pytest.mark.few(5)
@pytest.mark.parametrize("method", METHODS)
@LAW
@given(counts, shapes, seeds, st.booleans())
def test_equal_models_give_the_model(method, count, shape, seed, based):
    base, model = drawn(2, shape, seed)
    count = number_of(method, count)
    given = fitting(method, base, weight=[1 / count] * count)
    if based and METHODS[method].base == "optional":
        given["base"] = base
    found = merge_tensors(method, [model] * count, **given)
    torch.testing.assert_close(found, model, **EXACT)


@pytest.mark.parametrize(("dare", "plain"), [("dare_linear", "task_arithmetic"), ("della_linear", "task_arithmetic")])
@LAW
@given(counts, shapes, seeds, st.data())
def test_density_one_is_task_arithmetic_bit_for_bit(dare, plain, count, shape, seed, data):
    base, *models = drawn(count + 1, shape, seed)
    given = {"base": base, "weight": data.draw(st.lists(numbers, min_size=count, max_size=count)), "lambda_": 0.7}
    assert torch.equal(merge_tensors(dare, models, density=1.0, **given), merge_tensors(plain, models, **given))


@pytest.mark.parametrize("method", TASKS)
@LAW
@given(counts, shapes, seeds, densities)
def test_lambda_zero_gives_the_base(method, count, shape, seed, density):
    base, *models = drawn(count + 1, shape, seed)
    found = merge_tensors(method, models, lambda_=0.0, seed=seed, **fitting(method, base, density=density, epsilon=0.1))
    assert torch.equal(found, base)


@LAW
@given(shapes, seeds)
def test_slerp_ends_at_its_models(shape, seed):
    models = drawn(2, shape, seed)
    for t, own in enumerate(models):
        torch.testing.assert_close(merge_tensors("slerp", models, t=float(t)), own, **EXACT)
        weights = [1.0 - t, float(t)]
        torch.testing.assert_close(merge_tensors("nuslerp", models, weight=weights), own, **EXACT)


@LAW
@given(st.integers(2, 40), seeds)
def test_the_karcher_mean_of_two_of_equal_norm_is_the_middle_of_the_arc(size, seed):
    models = [own / own.norm() for own in drawn(2, (size,), seed)]
    middle = merge_tensors("nuslerp", models)
    for method in ("karcher", "multislerp"):
        torch.testing.assert_close(merge_tensors(method, models), middle, rtol=0, atol=1e-9)
    if abs(float(models[0] @ models[1])) < 0.9995:
        torch.testing.assert_close(merge_tensors("slerp", models, t=0.5), middle, **EXACT)


@pytest.mark.few(6)
@pytest.mark.parametrize("method", [name for name in METHODS if name not in RANDOM])
@LAW
@given(counts, st.tuples(st.integers(1, 7), st.integers(1, 7)), seeds, densities)
def test_permuting_all_alike_permutes_the_result(method, count, shape, seed, density):
    count = number_of(method, count)
    base, *models = drawn(count + 1, shape, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    rows, columns = (torch.randperm(size, generator=generator) for size in shape)
    given = fitting(method, base, density=density, t=0.3, gamma=0.2)
    permuted = {**given, **({"base": base[rows][:, columns]} if "base" in given else {})}
    found = merge_tensors(method, [own[rows][:, columns] for own in models], **permuted)
    torch.testing.assert_close(found, merge_tensors(method, models, **given)[rows][:, columns], **EXACT)


@pytest.mark.few(5, "karcher")
@pytest.mark.parametrize("method", [name for name, own in METHODS.items() if own.most is None and name not in RANDOM])
@LAW
@given(st.integers(2, 4), shapes, seeds, st.data())
def test_the_order_of_models_does_not_matter(method, count, shape, seed, data):
    base, *models = drawn(count + 1, shape, seed)
    order = data.draw(st.permutations(range(count)))
    given = {"weight": data.draw(st.lists(numbers, min_size=count, max_size=count)), "density": 0.6}
    own = fitting(method, base, **given)
    turned = {**own, **({"weight": [own["weight"][place] for place in order]} if "weight" in own else {})}
    found = merge_tensors(method, [models[place] for place in order], **turned)
    torch.testing.assert_close(
        found, merge_tensors(method, models, **own), rtol=0, atol=1e-5 if method == "karcher" else 1e-9
    )


@pytest.mark.parametrize("method", RANDOM)
@LAW
@given(st.integers(1, 3), st.tuples(st.integers(10, 30), st.integers(10, 30)), seeds, densities)
def test_the_mask_of_a_model_does_not_depend_on_the_others(method, place, shape, seed, density):
    base, *models = drawn(place + 1, shape, seed)
    given = {"base": base, "density": density, "seed": seed, "name": "a", "normalize": False}
    epsilon = {"epsilon": 0.1} if method.startswith("della") else {}
    before = [0.0] * (place - 1)
    alone = merge_tensors(method, models, weight=[*before, 1.0], **given, **epsilon)
    swapped = [own + 1 for own in models[:-1]]
    assert torch.equal(merge_tensors(method, [*swapped, models[-1]], weight=[*before, 1.0], **given, **epsilon), alone)
    dropped = float((alone == base).double().mean())
    sd = (density * (1 - density) / base.numel()) ** 0.5
    assert abs(dropped - (1 - density)) < 6 * sd
