"""Each merge method against its formula, written out for float64 vectors."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers import assert_refused
from torch import Tensor, nn

from lightning_sym.connectivity.interpolation import mean_tensors
from lightning_sym.merging.formulas import Tally
from lightning_sym.merging.methods import METHODS, merge_method, merge_tensors

EXACT = {"rtol": 0, "atol": 1e-12}
WEIGHTS = {2: [0.5, 0.3], 3: [0.5, 0.3, 0.9], 4: [1.0, 0.4, -0.2, 0.7]}
DENSITY = {2: [0.5, 0.3], 3: [0.9, 1.0, 0.25], 4: [0.5] * 4}
COUNTS = pytest.mark.parametrize("count", [2, 3, 4])
NORMALIZE = pytest.mark.parametrize("normalize", [True, False])


def drawn(count: int, shape: tuple[int, ...] = (9, 7), near: float = 0.5, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(shape, dtype=torch.float64, generator=generator)
    more = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(count)]
    return base, [base + near * own for own in more]


def arrays(tensors: list[Tensor]) -> list[np.ndarray]:
    return [tensor.numpy().ravel() for tensor in tensors]


def same(found: Tensor, expected: np.ndarray) -> None:
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.flatten(), torch.from_numpy(np.asarray(expected)).flatten(), **EXACT)


# ---- task vectors


def trimmed(vector: np.ndarray, density: float, gamma: float | None, rescale: bool = False) -> np.ndarray:
    """Zero all numbers but those of the kept ranks, found by sorting; optionally restore the sum of magnitudes."""
    order = sorted(range(len(vector)), key=lambda place: -abs(vector[place]))
    count = int(density * len(vector))
    first = 0 if gamma is None else min(int(gamma * len(vector)), len(vector) - count)
    if gamma is None:
        count = max(1, count)
    kept = np.zeros_like(vector)
    for place in order[first : first + count]:
        kept[place] = vector[place]
    if rescale:
        kept *= abs(vector).sum() / abs(kept).sum()
    return kept if density < 1 else vector


def added(base: np.ndarray, vectors: list[np.ndarray], weights: list[float], *, elect, normalize, factor) -> np.ndarray:
    """Add task vectors number by number."""
    result = base.copy()
    for place in range(len(base)):
        own = [(weight, vector[place]) for weight, vector in zip(weights, vectors, strict=True)]
        if elect:
            sign = 1 if sum(weight * value for weight, value in own) >= 0 else -1
            own = [(weight, value) for weight, value in own if np.sign(weight * value) == sign]
        total = sum(weight for weight, _ in own)
        step = sum(weight * value for weight, value in own)
        result[place] += factor * (step / total if normalize and total else step)
    return result


@COUNTS
@NORMALIZE
@pytest.mark.parametrize("rescale", [None, True])
@pytest.mark.parametrize(
    ("method", "gamma", "elect"),
    [("ties", None, True), ("breadcrumbs", 0.1, False), ("breadcrumbs_ties", 0.1, True)],
)
def test_sparse_task_vectors(
    method: str, gamma: float | None, elect: bool, count: int, normalize: bool, rescale: bool | None
) -> None:
    base, models = drawn(count)
    origin, own = base.numpy().ravel(), arrays(models)
    vectors = [
        trimmed(one - origin, density, gamma, bool(rescale)) for one, density in zip(own, DENSITY[count], strict=True)
    ]
    expected = added(origin, vectors, WEIGHTS[count], elect=elect, normalize=normalize, factor=0.7)
    more = {} if gamma is None else {"gamma": gamma}
    settings = {"weight": WEIGHTS[count], "density": DENSITY[count], "normalize": normalize, "lambda_": 0.7, **more}
    settings["rescale"] = rescale
    tally = Tally()
    same(merge_tensors(method, models, base=base, tally=tally, **settings), expected)
    shares = [float((vector == 0).mean()) for vector in vectors]
    assert tally.masked == pytest.approx(shares, abs=1e-12)
    signs = np.sign([weight * vector for weight, vector in zip(WEIGHTS[count], vectors, strict=True)])
    assert tally.conflicts == pytest.approx(float(((signs > 0).any(0) & (signs < 0).any(0)).mean()))
    raw = np.stack([one - origin for one in own])
    norms = np.linalg.norm(raw, axis=1)
    cosines = raw @ raw.T / np.outer(norms, norms)
    torch.testing.assert_close(tally.cosines, torch.from_numpy(cosines), **EXACT)


@COUNTS
@NORMALIZE
def test_task_arithmetic(count: int, normalize: bool) -> None:
    base, models = drawn(count)
    vectors = [own - base for own in models]
    step = sum(weight * vector for weight, vector in zip(WEIGHTS[count], vectors, strict=True))
    expected = base + 0.7 * (step / sum(WEIGHTS[count]) if normalize else step)
    found = merge_tensors("task_arithmetic", models, base=base, weight=WEIGHTS[count], normalize=normalize, lambda_=0.7)
    same(found, expected.numpy())


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "nuslerp", "multislerp"])
def test_signs_are_in_conflict_after_weights(method: str) -> None:
    models = [torch.tensor([1.0, 1.0, -2.0, 0.0]), torch.tensor([1.0, -3.0, -1.0, 1.0])]
    for weight, share in (([0.5, 0.3], 0.25), ([0.5, -0.2], 0.5), ([0.5, 0.0], 0.0)):
        tally = Tally()
        merge_tensors(method, models, base=torch.zeros(4), weight=weight, tally=tally)
        assert tally.conflicts == share


def test_equal_numbers_are_trimmed_to_the_density_and_the_first_ones_stay() -> None:
    base = torch.zeros(8)
    model = torch.tensor([1.0, -1, 1, 2, 1, -1, 1, 1])
    assert merge_tensors("ties", [model], base=base, density=0.5).tolist() == [1, -1, 1, 2, 0, 0, 0, 0]
    crumbs = merge_tensors("breadcrumbs", [model], base=base, density=0.5, gamma=0.25)
    assert crumbs.tolist() == [0, -1, 1, 0, 1, -1, 0, 0]


def test_a_sum_of_zero_elects_plus() -> None:
    found = merge_tensors("ties", [torch.tensor([1.0, 3.0]), torch.tensor([-1.0, -1.0])], base=torch.zeros(2))
    assert found.tolist() == [1.0, 3.0]


@pytest.mark.parametrize("shape", [(40, 50), (50, 8, 5), (2000,)])
def test_random_masks_keep_the_task_vector_on_average(shape: tuple[int, ...]) -> None:
    base, (model,) = drawn(1, shape)
    vector = (model - base).flatten()
    found = torch.stack(
        [merge_tensors("dare_linear", [model], base=base, density=0.3, seed=seed) - base for seed in range(200)]
    ).flatten(1)
    scaled = found / vector
    assert bool(((scaled.abs() < 1e-9) | ((scaled - 1 / 0.3).abs() < 1e-9)).all())
    assert scaled.mean() == pytest.approx(1, abs=4 * math.sqrt(0.7 / 0.3 / scaled.numel()))
    # Numbers and seeds are independent.
    assert abs(float(torch.corrcoef(scaled[:2])[0, 1])) < 0.1
    assert scaled.mean(0).var() == pytest.approx(0.7 / 0.3 / 200, rel=0.15)


@pytest.mark.parametrize("shape", [(300, 5), (60, 5, 5), (5,)])
def test_della_keeps_large_numbers_of_a_row_with_higher_probability(shape: tuple[int, ...]) -> None:
    base, (model,) = drawn(1, shape)
    vector = model - base
    kept, runs = torch.zeros(5), 400
    rows = vector.reshape(1, -1) if len(shape) == 1 else vector
    ranks = rows.abs().argsort(1).argsort(1)
    for seed in range(runs):
        found = merge_tensors("della_linear", [model], base=base, density=0.5, epsilon=0.3, seed=seed) - base
        if bool(found.any()):
            assert found.abs().sum() == pytest.approx(float(vector.abs().sum()))  # the sum of magnitudes is restored
        stays = found.reshape(rows.shape).abs() > 1e-12
        kept += torch.stack([stays[ranks == rank].float().mean() for rank in range(5)]) / runs
    assert kept.tolist() == pytest.approx([0.2, 0.35, 0.5, 0.65, 0.8], abs=0.08 if len(shape) == 1 else 0.01)


@pytest.mark.parametrize(("method", "epsilon"), [("dare_linear", None), ("della_linear", 0.2)])
def test_random_masks_without_a_factor(method: str, epsilon: float | None) -> None:
    base, (model,) = drawn(1, (40, 50))
    more = {} if epsilon is None else {"epsilon": epsilon}
    settings = {"base": base, "density": 0.3, **more}
    found = merge_tensors(method, [model], rescale=False, **settings) - base
    factor = (merge_tensors(method, [model], **settings) - base) / (model - base)
    kept = found != 0
    torch.testing.assert_close(found, torch.where(kept, model - base, 0.0), **EXACT)
    expected = 1 / 0.3 if epsilon is None else float((model - base).abs().sum() / (model - base)[kept].abs().sum())
    torch.testing.assert_close(factor, kept.double() * expected, rtol=0, atol=1e-9)


def test_masks_depend_on_seed_model_and_name_only() -> None:
    base, models = drawn(3, (30, 30))

    def masks(tensors: list[Tensor], **settings: object) -> list[Tensor]:
        return [
            merge_tensors("dare_linear", [base] * place + [own], base=base, density=0.5, **settings) == base
            for place, own in enumerate(tensors)
        ]

    one = masks(models, name="a")
    assert all(map(torch.equal, one, masks(models, name="a")))
    others = [*one, *masks(models, name="b"), *masks(models, name="a", seed=1)]
    assert all(not torch.equal(x, y) for x, y in itertools.combinations(others, 2))
    # A mapping's order and its other names change nothing.
    states = [{"b": own, "a": own} for own in models]
    both = merge_tensors("dare_ties", states, base={"b": base, "a": base}, density=0.5)
    assert torch.equal(both["a"], merge_tensors("dare_ties", models, base=base, density=0.5, name="a"))


# ---- linear combinations


@COUNTS
def test_linear_is_the_mean_of_networks_bit_for_bit(count: int) -> None:
    torch.manual_seed(0)
    networks = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)) for _ in range(count)]
    networks[0][0] = networks[0][0].to(memory_format=torch.channels_last)
    states = [dict(network.state_dict()) for network in networks]
    for weights in (None, WEIGHTS[count]):
        expected = dict(mean_tensors(networks, weights))
        found = merge_tensors("linear", states, weight=1.0 if weights is None else weights)
        assert all(torch.equal(found[name], mean) for name, mean in expected.items())
        assert found["1.num_batches_tracked"] is states[0]["1.num_batches_tracked"]
        for name, mean in expected.items():
            own = [1.0] * count if weights is None else weights
            exact = sum(w * state[name].double() for w, state in zip(own, states, strict=True)) / sum(own)
            torch.testing.assert_close(mean, exact.float(), rtol=1e-7, atol=1e-8)


def test_sums_without_normalisation_and_one_model() -> None:
    _, models = drawn(2)
    expected = 0.5 * models[0] + 0.3 * models[1]
    same(merge_tensors("linear", models, weight=[0.5, 0.3], normalize=False), expected.numpy())
    same(merge_tensors("passthrough", models[:1], scale=-0.4), (-0.4 * models[0]).numpy())


def on_arc(one: np.ndarray, two: np.ndarray, t: float) -> np.ndarray:
    angle = math.acos(one @ two / math.sqrt(one @ one) / math.sqrt(two @ two))
    return (math.sin((1 - t) * angle) * one + math.sin(t * angle) * two) / math.sin(angle)


@pytest.mark.parametrize("t", [0.0, 0.25, 0.5, 1.0, 1.3])
def test_slerp(t: float) -> None:
    _, models = drawn(2)
    one, two = arrays(models)
    same(merge_tensors("slerp", models, t=t), on_arc(one, two, t))
    # Linear beside the angle at which the cosine is 0.9995, on both sides.
    for cosine, line in ((0.9994, False), (0.9996, True), (-0.9994, False), (-0.9996, True)):
        pair = [torch.tensor([1.0, 0.0]).double(), torch.tensor([cosine, math.sqrt(1 - cosine**2)]).double()]
        one, two = arrays(pair)
        same(merge_tensors("slerp", pair, t=t), (1 - t) * one + t * two if line else on_arc(one, two, t))


def test_nuslerp_and_multislerp_of_tensors_and_of_task_vectors() -> None:
    base, models = drawn(2, near=0.01)
    origin, (one, two) = base.numpy().ravel(), arrays(models)
    t = 0.3 / 0.8
    weights = {"weight": [0.5, 0.3]}
    same(merge_tensors("nuslerp", models, **weights), on_arc(one, two, t))  # where slerp is linear
    vectors = [one - origin, two - origin]
    same(merge_tensors("nuslerp", models, base=base, **weights), origin + on_arc(*vectors, t))
    for own, start in (((one, two), None), (vectors, origin)):
        norms = [np.linalg.norm(vector) for vector in own]
        mean = (1 - t) * own[0] / norms[0] + t * own[1] / norms[1]
        expected = mean / np.linalg.norm(mean) * ((1 - t) * norms[0] + t * norms[1])
        found = merge_tensors("multislerp", models, base=None if start is None else base, **weights)
        same(found, expected if start is None else origin + expected)


@COUNTS
def test_karcher_is_where_the_tangents_cancel(count: int) -> None:
    _, models = drawn(count, near=0.8)
    found = merge_tensors("karcher", models).numpy().ravel()
    vectors = arrays(models)
    norms = [np.linalg.norm(vector) for vector in vectors]
    assert np.linalg.norm(found) == pytest.approx(np.mean(norms), rel=1e-12)
    point, pull = found / np.linalg.norm(found), 0.0
    for vector, norm in zip(vectors, norms, strict=True):
        cosine = vector @ point / norm
        pull = pull + math.acos(cosine) / math.sqrt(1 - cosine**2) * (vector / norm - cosine * point) / count
    assert np.linalg.norm(pull) < 1e-5


@COUNTS
def test_model_stock(count: int) -> None:
    base, models = drawn(count, near=0.3)
    shared = 0.4 * torch.ones_like(base)
    models = [own + shared for own in models]
    origin = base.numpy().ravel()
    vectors = [own - origin for own in arrays(models)]
    pairs = list(itertools.combinations(vectors, 2))
    cosine = np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs])
    t = count * cosine / (1 + (count - 1) * cosine)
    assert 0 < t < 1
    tally = Tally()
    same(merge_tensors("model_stock", models, base=base, tally=tally), origin + t * np.mean(vectors, axis=0))
    assert tally.notes == ()
    assert tally.masked == (0.0,) * count
    assert tally.cosines is not None
    assert float(tally.cosines.triu(1).sum()) == pytest.approx(cosine * len(pairs), abs=1e-12)


def test_model_stock_is_clipped_with_a_note() -> None:
    base, tally = torch.ones(2), Tally()
    models = [torch.tensor([2.0, 1.5]), torch.tensor([0.0, 1.5])]
    for name in ("a", "b"):
        assert torch.equal(merge_tensors("model_stock", models, base=base, name=name, tally=tally), base)
    assert tally.notes == ("t of model_stock was outside [0, 1] and became 0: a and 1 more",)


def test_directions_that_cancel_give_the_mean_with_a_note() -> None:
    models = [torch.tensor([1.0, 2.0]), torch.tensor([-3.0, -6.0])]
    for method in ("karcher", "multislerp"):
        tally = Tally()
        assert merge_tensors(method, models, name="a", tally=tally).tolist() == [-1.0, -2.0]
        assert tally.notes == ("the directions cancel, and the plain mean was taken: a",)


# ---- shapes, dtypes, refusals


def arguments(method: str) -> tuple[int, dict[str, float]]:
    own = METHODS[method]
    settings = {"density": 0.5, "t": 0.3}
    return own.most or 2, {key: value for key, value in settings.items() if key in own.per_model or key in own.shared}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (1, 7), (3, 1, 2)])
def test_every_shape_works_and_zeros_stay_zeros(method: str, shape: tuple[int, ...]) -> None:
    count, settings = arguments(method)
    base, models = drawn(count, shape)
    needed = {"base": base.float()} if METHODS[method].base == "needed" else {}
    found = merge_tensors(method, [own.float() for own in models], **needed, **settings)
    assert (found.shape, found.dtype, bool(found.isfinite().all())) == (shape, torch.float32, True)
    zero = torch.zeros(shape)
    needed = {"base": zero} if needed else {}
    assert torch.equal(merge_tensors(method, [zero] * count, **needed, **settings), zero)


@pytest.mark.parametrize("method", METHODS)
def test_parts_of_a_tensor_fit_together(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, settings = arguments(method)
    base, models = drawn(count, (11, 6))
    needed = {"base": base} if METHODS[method].base == "needed" else {}
    whole = merge_tensors(method, models, **needed, **settings)
    monkeypatch.setattr("lightning_sym.connectivity.interpolation.PART", 7)
    torch.testing.assert_close(merge_tensors(method, models, **needed, **settings), whole, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_merged_in_float32(dtype: torch.dtype) -> None:
    base, models = drawn(2)
    halves, start = [own.to(dtype) for own in models], base.to(dtype)
    found = merge_tensors("task_arithmetic", halves, base=start)
    assert found.dtype == torch.float32
    exact = merge_tensors("task_arithmetic", [own.double() for own in halves], base=start.double())
    assert torch.equal(found, exact.float())


def test_what_is_refused() -> None:
    base, models = drawn(2)
    assert_refused(merge_method, "tie", says="Did you mean 'ties'?")
    assert_refused(merge_method, "weights", says="weights says how to align: --align weights")
    for name in ("sce", "nearswap", "arcee_fusion"):
        assert_refused(merge_method, name, says=f"{name!r} is not available yet")
    assert_refused(merge_tensors, "ties", models, says="ties needs a base")
    assert_refused(merge_tensors, "linear", models, base=base, says="linear uses no base")
    assert_refused(merge_tensors, "slerp", models[:1], says="slerp merges 2 models, got 1")
    assert_refused(merge_tensors, "model_stock", models[:1], base=base, says="at least 2 models")
    assert_refused(merge_tensors, "linear", models, density=0.5, says="linear has no density")
    assert_refused(merge_tensors, "linear", models, rescale=False, says="linear has no rescale")
    assert_refused(merge_tensors, "linear", models, lambda_=0.5, says="linear has no lambda")
    assert_refused(merge_tensors, "linear", models, weight=[1, -1], name="a", says="got [1.0, -1.0] at a")
    assert_refused(merge_tensors, "linear", models + models[:1], weight=[0.1, 0.2, -0.3], says="other than 0")
    assert_refused(merge_tensors, "linear", models, weight=[1], says="one for each of 2 models, got 1")
    assert_refused(merge_tensors, "linear", models, weight=math.nan, says="weight must be")
    for density in (0.0, 1.1, -1):
        assert_refused(merge_tensors, "ties", models, base=base, density=density, says="density must be in (0, 1]")
    assert_refused(merge_tensors, "della", models, base=base, density=0.1, says="lower epsilon")
    assert_refused(merge_tensors, "linear", [models[0], models[1][:3]], says="must have one shape")
    assert_refused(merge_tensors, "linear", [models[0], models[1].int()], says="must be floating")
    assert_refused(merge_tensors, "linear", [{"a": base}, {}], says="a is missing in model 1")
    assert_refused(merge_tensors, "linear", [{}, {"a": base}], says="a is missing in model 0")
    assert_refused(merge_tensors, "ties", [{"a": base}], base={}, says="a is missing in the base")
    for wrong in (math.nan, math.inf):
        one, two = {"a": base}, {"a": torch.full_like(base, wrong)}
        assert_refused(
            merge_tensors, "ties", [one, two], base=one, says="a of model 1 holds values that are not finite"
        )
        assert_refused(merge_tensors, "ties", [one, one], base=two, says="a of the base holds values that are not")


@pytest.mark.parametrize("method", ["ties", "della"])
def test_weights_that_cancel_up_to_rounding_do_not_divide(method: str) -> None:
    models = [torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 1.0])]
    weights = [0.1, 0.2, -0.3]  # their floating-point sum is 6e-17
    found = merge_tensors(method, models, base=torch.zeros(2), weight=weights)
    # At the first number all agree, and their weights cancel; at the second the first two agree.
    assert found.tolist() == pytest.approx([0.6, 1.0])


def test_slerp_of_opposite_tensors_is_on_the_line_and_says_so() -> None:
    tally, one = Tally(), torch.tensor([1.0, 2.0])
    found = merge_tensors("slerp", [{"w": one, "b": one[:1]}, {"w": -one, "b": -one[:1]}], t=0.25, tally=tally)
    assert found["w"].tolist() == [0.5, 1.0]
    assert tally.notes == ("the two tensors are opposite, and a point on the line between them was taken: w",)
