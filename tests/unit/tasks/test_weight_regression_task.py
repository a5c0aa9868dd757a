"""WeightRegressionTask: what each arm reads, what it cannot tell apart, and what is refused."""

import pytest
import torch
from fits import digits, fit
from helpers import assert_refused, write_zoo

from lightning_sym.datamodules import ZooWeightsDataModule
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import WeightRegressionTask
from lightning_sym.tasks.weight_regression import WeightRegressor

ARMS = ["raw", "canonical", "orbit", "statistics", "invariants"]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    networks = [MultiLayerPerceptron(widths=(3,), image_size=8).fresh(number) for number in range(30)]
    folder = tmp_path_factory.mktemp("regression") / "zoo"
    return str(write_zoo(folder, networks, digits(), [number / 30 for number in range(30)]))


def weights(zoo):
    return ZooWeightsDataModule(zoo, batch_size=5)


def fitted(zoo, task=WeightRegressionTask, **settings):
    made = task(zoo, **{"members": 5, "hidden": 8, **settings})
    fit(made, weights(zoo), max_epochs=2)
    return made


@pytest.fixture(scope="module")
def found(zoo):
    """Return a task after a fit, test inputs, these as other points of the orbits, and the function of predictions."""
    task = fitted(zoo)
    inputs, _ = weights(zoo).split_tensors("test")
    moved = task.moved(inputs, torch.Generator().manual_seed(1), canonical=True)

    def predict(given):
        with task.evaluating(), torch.no_grad():
            return dict(zip(ARMS, task.population(given)[..., 0], strict=True))

    return task, inputs, moved, predict


def test_arms_differ_by_what_they_cannot_tell_apart(found):
    _, inputs, moved, predict = found
    one, two = predict(inputs), predict(moved)
    for arm in ("canonical", "invariants"):
        torch.testing.assert_close(one[arm], two[arm], rtol=0, atol=1e-4)
    for arm in ("raw", "orbit", "statistics"):
        assert (one[arm] - two[arm]).abs().max() > 1e-2


def test_statistics_ignore_the_order_of_units(zoo, found):
    task, inputs, _, predict = found
    permuted, random = inputs.clone(), torch.Generator().manual_seed(0)
    for row in permuted:
        tensors = task.space.tensors(row[0])
        element = task.space.symmetry.sample(random, scale=0.0)
        row[0] = task.space.vector(task.space.symmetry.act_on(element, tensors))
    assert not torch.equal(permuted, inputs)
    plain = WeightRegressionTask(zoo, scale=0.0).moved(inputs, torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain[:, 0], permuted[:, 0])
    assert torch.equal(plain[:, 1], inputs[:, 1])
    torch.testing.assert_close(predict(permuted)["statistics"], predict(inputs)["statistics"], rtol=0, atol=1e-5)


def test_statistics_are_moments_and_extremes_of_each_tensor():
    regressor = WeightRegressor("canonical", 7, [4, 3], 2)
    inputs = torch.zeros(1, 2, 7)
    inputs[0, 1] = torch.tensor([1.0, 1.0, 1.0, 5.0, -2.0, -2.0, -2.0])
    mean, second, third, fourth, low, high, *other = regressor.features(inputs)[0].tolist()
    assert (mean, low, high) == (2.0, 1.0, 5.0)
    assert second == pytest.approx(3**0.5)  # deviations are -1, -1, -1 and 3
    assert third == pytest.approx(6 / 3)  # over the variance
    assert fourth == pytest.approx(21**0.25)
    assert other == [-2.0, 0.0, 0.0, 0.0, -2.0, -2.0]


def test_features_are_standardised_by_the_training_data(zoo, found):
    task, *_ = found
    inputs, targets = weights(zoo).split_tensors("train")
    for arm, member in zip(ARMS, task.population.members.values(), strict=True):
        assert (member.target_mean, member.target_deviation) == (targets.mean(), targets.std(correction=0))
        features = (member.features(inputs) - member.mean) / member.deviation
        if arm != "orbit":
            torch.testing.assert_close(features.mean(0), torch.zeros(features.shape[1]), rtol=0, atol=1e-4)
            torch.testing.assert_close(features.std(0, correction=0), torch.ones(features.shape[1]), rtol=0, atol=1e-3)
    regressor = WeightRegressor("raw", 2, None, 2)
    regressor.standardize(torch.tensor([[[1.0, 3.0]] * 2, [[1.0, 5.0]] * 2]), torch.tensor([[0.5], [0.5]]))
    assert regressor.deviation.tolist() == [1.0, 1.0]
    assert regressor.mean.tolist() == [1.0, 4.0]
    assert (float(regressor.target_mean), float(regressor.target_deviation)) == (0.5, 1.0)


def test_only_the_arm_of_the_orbit_is_augmented_and_keeps_the_functions(zoo):
    seen = []

    class Watching(WeightRegressionTask):
        def training_batch(self, batch, batch_idx):
            inputs, targets = super().training_batch(batch, batch_idx)
            seen.append((batch[0], inputs))
            return inputs, targets

    task = fitted(zoo, Watching)
    network = MultiLayerPerceptron(widths=(3,), image_size=8)
    images = torch.rand(6, 1, 8, 8)

    def outputs(vector):
        network.load_state_dict(task.space.tensors(vector))
        with torch.no_grad():
            return network(images)

    for given, made in seen:
        for index, arm in enumerate(ARMS):
            assert torch.equal(given[index], made[index]) == (arm != "orbit")
        assert torch.equal(given[2][:, 1], made[2][:, 1])
        for one, two in zip(given[2][:, 0], made[2][:, 0], strict=True):
            torch.testing.assert_close(outputs(one), outputs(two), rtol=1e-4, atol=1e-5)
    (_, first), (_, again) = seen[0], seen[len(seen) // 2]
    assert not torch.equal(first[2], again[2])


def test_members_are_repeats_of_arms(zoo):
    task = WeightRegressionTask(zoo, arms=["raw", "invariants"], members=3, seed=1)
    assert [task.arm_of(number) for number in task.numbers] == ["invariants", "raw", "invariants"]
    one, again, other = (task.make_member(number).body[0].weight for number in (1, 1, 3))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert task.identity()["arms"] == ["raw", "invariants"]
    made = task.default_optimizer(task.make_member(1).parameters())
    assert (type(made), made.defaults["lr"], made.defaults["weight_decay"]) == (torch.optim.AdamW, 1e-3, 0.1)


def test_losses_of_arms_are_means_over_their_predictors(zoo):
    task = WeightRegressionTask(zoo, arms=["raw", "statistics"], members=4, hidden=8)
    logged = fit(task, weights(zoo), max_epochs=1).callback_metrics
    arms = [float(logged[f"val/loss/{arm}"]) for arm in task.arms]
    assert arms[0] != arms[1]
    assert sum(arms) / 2 == pytest.approx(float(logged["val/loss"]), rel=1e-6)
    assert not {f"train/loss/{arm}" for arm in task.arms} & {*logged}


def test_what_does_not_fit_is_refused(zoo, tmp_path):
    assert_refused(WeightRegressionTask, zoo, arms=["sorted"], says="arms must be a list of different ones of raw")
    assert_refused(WeightRegressionTask, zoo, arms=["raw", "raw"], says="arms must be a list of different")
    assert_refused(WeightRegressionTask, zoo, arms=[], says="arms must be a list of different")
    assert_refused(WeightRegressionTask, zoo, hidden=0, says="hidden")
    assert_refused(WeightRegressionTask, zoo, scale=-1.0, says="scale")
    other = [MultiLayerPerceptron(widths=(2,), image_size=8).fresh(n) for n in range(3)]
    small = str(write_zoo(tmp_path / "zoo", other, digits(), [0.1, 0.2, 0.3]))
    says = ["takes weights of shape [2, 160], got [2, 235]", "use ZooWeightsDataModule with the zoo"]
    assert_refused(lambda: fit(WeightRegressionTask(small), weights(zoo)), says=says)


def test_rounding_errors_are_no_features():
    """Two entries have no third moment; its rounding errors would be as large as other features if standardised."""
    regressor = WeightRegressor("raw", 2, [2], 2)
    inputs = torch.randn(50, 2, 2, generator=torch.Generator().manual_seed(0)) + 3
    assert torch.equal(regressor.features(inputs)[:, 2], torch.zeros(50))
    constant = WeightRegressor("raw", 2, None, 2)
    inputs[:, 0] = 0.1 + 1e-8 * inputs[:, 0]
    constant.standardize(inputs, torch.arange(50.0)[:, None])
    assert torch.equal(constant.deviation, torch.ones(2))
