"""OrbitTask and OrbitReport: points of one orbit have one function, and tables hold what rounding makes of them."""

import pytest
import torch
from fits import digits, fit
from helpers import assert_refused, read_csv, read_rows, refused, write_zoo
from matplotlib.image import imread
from scipy.stats import ttest_1samp

from lightning_sym.callbacks import OrbitReport
from lightning_sym.networks import MultiLayerPerceptron, VisionTransformer
from lightning_sym.orbit import awq, prune_by_wanda, quantization_error, round_by_gptq, round_to_nearest
from lightning_sym.tasks import OrbitTask

ROUNDED = {"grid": {"bits": [3, 4], "granularity": ["tensor", "channel"]}}
ARMS = ["trained", "random", "balanced", "equalized", "smooth_quant", "orbit", "random_orbit"]


def data():
    return digits(max_samples=100)


def transformer(seed):
    shape = {"patch_size": 4, "width": 8, "depth": 1, "heads": 2, "norm": "rms", "positions": "rotary"}
    return VisionTransformer(1, 8, **shape).fresh(seed)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    networks = [MultiLayerPerceptron([8], image_size=8).fresh(number) for number in range(3)]
    return str(write_zoo(tmp_path_factory.mktemp("zoo"), networks, data()))


@pytest.fixture(scope="module")
def transformers(tmp_path_factory):
    return str(write_zoo(tmp_path_factory.mktemp("transformers"), [transformer(0)], data()))


def ran(folder, zoo, objective, **settings):
    """Return the task after its run with a report, and the report."""
    task = OrbitTask(zoo, objective, **{"images": 32, "steps": 10, **settings})
    fit(task, data(), report := OrbitReport(), folder=folder, max_epochs=0)
    return task, report


@pytest.fixture(scope="module")
def run(zoo, tmp_path_factory):
    path = tmp_path_factory.mktemp("orbit")
    return path, *ran(path, zoo, "quantization_error", arms=ARMS, some={"random_orbit": [4]}, **ROUNDED)


def split_of(split):
    images, labels = data().split_tensors(split)
    return data().normalize(images).double(), labels


def compared(network, changed):
    images, labels = split_of("test")
    with torch.no_grad():
        before, after = network(images), changed(images)
    accuracy = (after.argmax(1) == labels).double().mean()
    return float(((after - before) ** 2).sum() / (before**2).sum()), float(accuracy)


def test_trained_networks_are_rounded_as_by_hand(run):
    _, task, _ = run
    points = [point for point in task.results if point.arm == "trained"]
    assert len(points) == 3 * 4
    for point in points:
        network = task.model_zoo.load(point.member).double()
        error, accuracy = compared(network, round_to_nearest(network, **point.setting))
        assert point.values["error"] == pytest.approx(error, rel=1e-12)
        assert point.values["accuracy"] == accuracy
        assert point.values["whole_accuracy"] == compared(network, network)[1]


def test_points_of_an_orbit_have_one_function_and_different_errors(run):
    _, task, _ = run
    assert max(point.values["change"] for point in task.results) < 1e-12
    for member in range(3):
        own = {point.arm: point.values for point in task.results
               if point.member == member and point.setting == {"bits": 4, "granularity": "tensor"}}  # fmt: skip
        assert list(own) == ARMS
        assert len({values["error"] for values in own.values()}) == len(ARMS)
        assert own["orbit"]["objective"] < min(own["trained"]["objective"], own["random"]["objective"])
        assert own["random_orbit"]["objective"] < own["random"]["objective"]


def test_objective_is_that_of_the_calibration_images(run):
    _, task, _ = run
    (point,) = [one for one in task.results if (one.member, one.arm) == (1, "trained") and one.setting["bits"] == 3
                and one.setting["granularity"] == "channel"]  # fmt: skip
    network = task.model_zoo.load(1).double()
    images, _ = task._calibration(data(), torch.device("cpu"))
    whole, _ = split_of("train")
    assert len(images) == 32
    assert all((whole == image).flatten(1).all(1).any() for image in images)
    changed = round_to_nearest(network, 3, "channel")
    with torch.no_grad():
        before, after = network(images), changed(images)
    expected = ((after - before) ** 2).sum() / (before**2).sum()
    assert point.values["objective"] == pytest.approx(float(expected), rel=1e-12)
    assert quantization_error(3, "channel").reads_data


def test_each_point_is_rounded_in_all_ways(zoo, tmp_path):
    settings = {"grid": {"bits": [3, 4]}, "options": {"activations": 8}, "members": 2}
    arms, some = ["trained", "awq", "orbit"], {"gptq": [3]}
    task, report = ran(
        tmp_path, zoo, "quantization_error", arms=arms, some=some, roundings=["nearest", "gptq"], **settings
    )
    assert len(task.results) == 2 * 3 * (2 + 1)
    calibration, network = task._calibration(data(), torch.device("cpu")), task.model_zoo.load(1).double()
    moved = task.symmetry.act(awq(task.symmetry, network, calibration, 3), network)
    for rounding, change in (("nearest", round_to_nearest), ("gptq", round_by_gptq)):
        (own,) = [one.values for one in task.results if (one.member, one.arm) == (1, "awq")
                  and one.setting == {"bits": 3, "rounding": rounding}]  # fmt: skip
        error, accuracy = compared(network, change(moved, 3, activations=8, data=calibration))
        assert own["error"] == pytest.approx(error, rel=1e-9)
        assert own["accuracy"] == accuracy
        assert ("objective" in own) == (rounding == "nearest")
    descents = [row for row in read_rows(tmp_path / "results/points") if row["arm"] == "orbit"]
    assert [row["variant"] for row in descents] == ["nearest", "gptq", "nearest"] * 2
    assert [row["seconds"] is None for row in descents] == [False, True, False] * 2
    assert "6 descents" not in str(report.results.notes)


def test_files_hold_means_and_intervals(run):
    path, task, report = run
    folder = path / "results"
    names = {f"{name}.{kind}" for name in ("summary", "points", "numbers") for kind in ("csv", "json")}
    assert {file.name for file in folder.iterdir()} == {*names, "accuracy.png", "error.png"}
    assert all(imread(folder / f"{name}.png").std() > 0.01 for name in ("accuracy", "error"))
    summary, points = read_rows(folder / "summary"), read_rows(folder / "points")
    assert len(points) == len(read_csv(folder / "points.csv")) == len(task.results) == 3 * (6 * 4 + 2)
    (row,) = [one for one in summary if (one["arm"], one["level"], one["variant"]) == ("orbit", 4, "tensor")]
    own = {arm: [one for one in points if (one["arm"], one["level"], one["variant"]) == (arm, 4, "tensor")]
           for arm in ("trained", "orbit")}  # fmt: skip
    gains = [two["accuracy"] - one["accuracy"] for one, two in zip(own["trained"], own["orbit"], strict=True)]
    assert row["accuracy_change"] == pytest.approx(sum(gains) / 3)
    logs = [torch.tensor(two["error"] / one["error"]).log().item()
            for one, two in zip(own["trained"], own["orbit"], strict=True)]  # fmt: skip
    ends = torch.tensor(tuple(ttest_1samp(logs, 0).confidence_interval(0.95))).exp() - 1
    assert (row["error_change_low"], row["error_change_high"]) == pytest.approx(tuple(ends.tolist()), rel=1e-5)
    means = [one["error_change"] for one in summary if one["arm"] == "orbit"]
    assert report.results.numbers["orbit/error_change"] == pytest.approx(sum(means) / 4)
    assert len([name for name in report.results.numbers if not name.startswith("details/")]) < 30


def test_pruning_beside_wanda_and_single_kinds_of_coordinates(transformers, tmp_path):
    arms = ["trained", "hadamard", "wanda", "l1", "orbit", "rotations"]
    task, report = ran(tmp_path, transformers, "sparsity", grid={"fraction": [0.5, 0.7]}, arms=arms)
    values = {point.arm: point.values for point in task.results if point.setting["fraction"] == 0.7}
    network = task.model_zoo.load(0).double()
    calibration = task._calibration(data(), torch.device("cpu"))
    error, _ = compared(network, prune_by_wanda(network, calibration, 0.7))
    assert values["wanda"]["error"] == pytest.approx(error, rel=1e-12)
    for arm in ("orbit", "rotations"):
        assert values[arm]["objective"] < values["trained"]["objective"]
    assert values["hadamard"]["change"] < 1e-12
    assert "orbit/error_change" in report.results.numbers


def gauss_newton_trace(network, images):
    """Return the trace for the mean cross-entropy, from the Jacobian of all outputs."""
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
    jacobians = torch.func.jacrev(lambda own: torch.func.functional_call(network, own, (images,)))(weights)
    whole = torch.cat([part.flatten(2) for part in jacobians.values()], 2)
    likely = network(images).detach().softmax(1)
    inner = torch.diag_embed(likely) - likely[:, :, None] * likely[:, None]
    return float(torch.einsum("nip,nij,njp->", whole, inner, whole) / len(images))


def test_objectives_that_change_no_network_are_compared_themselves(zoo, tmp_path):
    arms = ["trained", "balanced", "orbit"]
    task, report = ran(tmp_path, zoo, "sharpness", grid={"kind": ["trace", "top"]}, arms=arms, members=2, steps=3)
    assert (tmp_path / "results/objective.png").is_file()
    for member in range(2):
        for kind in ("trace", "top"):
            own = {point.arm: point.values for point in task.results
                   if point.member == member and point.setting["kind"] == kind}  # fmt: skip
            assert own["orbit"]["objective"] < own["balanced"]["objective"]
            assert own["orbit"]["objective_test"] != own["orbit"]["objective"]
        (trained,) = [point.values for point in task.results
                      if (point.member, point.arm, point.setting["kind"]) == (member, "trained", "trace")]  # fmt: skip
        network = task.model_zoo.load(member).double()
        images, _ = task._calibration(data(), torch.device("cpu"))
        assert trained["objective"] == pytest.approx(gauss_newton_trace(network, images), rel=1e-10)
        assert trained["objective_test"] == pytest.approx(gauss_newton_trace(network, split_of("test")[0]), rel=1e-10)
    assert report.results.numbers["orbit/objective_change"] < 0


def test_a_run_that_was_interrupted_and_resumed_is_the_uninterrupted_one(zoo, run, tmp_path, monkeypatch):
    """Nothing is trained and nothing half-done is kept: the run that is resumed, from its start, measures anew."""
    settings = {"arms": ARMS, "some": {"random_orbit": [4]}, "images": 32, "steps": 10, **ROUNDED}
    trainer = fit(OrbitTask(zoo, "quantization_error", **settings), data(), folder=tmp_path, max_epochs=0)
    trainer.save_checkpoint(last := tmp_path / "last.ckpt")
    measured = OrbitTask._measured

    def interrupt(self, network, number, arm, *others):
        if arm == "balanced":
            raise RuntimeError("interrupted")
        return measured(self, network, number, arm, *others)

    with monkeypatch.context() as patch:
        patch.setattr(OrbitTask, "_measured", interrupt)
        with pytest.raises(RuntimeError, match="interrupted"):
            fit(OrbitTask(zoo, **settings), data(), OrbitReport(), folder=tmp_path, max_epochs=0)
    assert not [file for file in (tmp_path / "results").rglob("*") if file.is_file()]
    fit(OrbitTask(zoo, **settings), data(), OrbitReport(), folder=tmp_path, max_epochs=0, ckpt_path=last)
    times = {"seconds"}
    for one, two in zip(read_rows(run[0] / "results/points"), read_rows(tmp_path / "results/points"), strict=True):
        assert {**one, **dict.fromkeys(times)} == {**two, **dict.fromkeys(times)}


@pytest.mark.parametrize(
    "refusal",
    [
        refused(OrbitTask, "a", objective="quantisation_error", says=["objective", "quantization_error"]),
        refused(OrbitTask, "a", grid={"bit": [4]}, says=["bit", "bits"]),
        refused(OrbitTask, "a", grid={"bits": []}, says="bits"),
        refused(OrbitTask, "a", grid={"bits": [4, 4]}, says="different"),
        refused(OrbitTask, "a", grid={"bits": [4, 1]}, says=["bits", "1"]),
        refused(OrbitTask, "a", arms=["orbit"], says="trained"),
        refused(OrbitTask, "a", arms=["trained", "balance"], says="balanced"),
        refused(OrbitTask, "a", arms=["trained", "wanda"], says=["wanda", "quantization_error"]),
        refused(OrbitTask, "a", "sparsity", arms=["trained", "awq"], says=["awq", "sparsity"]),
        refused(OrbitTask, "a", "sparsity", roundings=["gptq"], says=["gptq", "sparsity"]),
        refused(OrbitTask, "a", roundings=["nearest", "gtpq"], says="gptq"),
        refused(OrbitTask, "a", roundings=[], says="at least one"),
        refused(OrbitTask, "a", arms=["trained", "l1"], says=["kind", "l1"]),
        refused(OrbitTask, "a", some={"scales": [4]}, says="scales"),
        refused(OrbitTask, "a", some={"trained": [4]}, says="trained"),
        *(refused(OrbitTask, "a", **bad) for bad in ({"members": 0}, {"images": 0}, {"steps": 0}, {"lr": 0.0})),
        refused(OrbitTask, "a", orbit_seed=-1),
    ],
)
def test_settings_out_of_range_are_refused(refusal):
    refusal()


def test_what_does_not_fit_is_one_sentence(zoo, tmp_path):
    def run(task):
        fit(task, data(), max_epochs=0, folder=tmp_path)

    assert_refused(run, OrbitTask(zoo, arms=["trained", "rotations"]), says=["rotations", "scales"])
    assert_refused(run, OrbitTask(str(tmp_path / "none")), error=FileNotFoundError, says="none")
