"""SimilarityTask: the numbers of the metrics themselves, from one look at the data by each network; and refusals."""

import io
import math
from pathlib import Path

import fits
import pytest
import torch
from helpers import assert_refused, assert_same, read_csv, read_rows, refused, write_zoo
from rich.console import Console

from lightning_sym.callbacks import SimilarityOfZoosReport, SimilarityReport
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.datamodules import MNIST5kDataModule
from lightning_sym.networks import CIFARResNet, LeNet5, MultiLayerPerceptron
from lightning_sym.reports.similarity import Similarities, similarity_of_zoos_results
from lightning_sym.similarity import (
    CKA,
    Features,
    GroupProcrustes,
    Link,
    OrthogonalProcrustes,
    PopulationSimilarity,
    SimilarityMatrix,
    features_of,
)
from lightning_sym.tasks import SimilarityOfZoosTask, SimilarityTask
from lightning_sym.tasks import similarity as module
from lightning_sym.zoo import ModelZoo

pytestmark = pytest.mark.filterwarnings("ignore:The members of the zoo at .* were trained on other data")

# Sums in float64 of features in float32, of other batches.
ROUNDING = {"atol": 1e-5, "rtol": 1e-5}
LAYERS = ["activation1", "activation2"]
MEASURES = {
    "group": GroupProcrustes("relu"),  # what the traced symmetry of a perceptron with ReLU comes to
    "orthogonal": OrthogonalProcrustes(),
    "cka_linear": CKA("linear"),
    "cka_max": CKA("max"),
    "cka_laplace": CKA("laplace"),
}


def digits(**changes):
    return fits.digits(**{"eval_batch_size": 32, **changes})


@pytest.fixture(scope="module")
def fitted(matching_zoo):
    task = SimilarityTask(str(matching_zoo), measures=list(MEASURES))
    fits.fit(task, digits(), max_epochs=3)
    return task


def images(split="test"):
    data = digits()
    return data.normalize(data.split_tensors(split).images)


def directly(metric, first, second, order=None, split="test"):
    """Return the similarities of two networks by the metric itself, in one batch."""
    matrix, x = SimilarityMatrix(metric, LAYERS), images(split)
    matrix.update(features_of(first, LAYERS, x), features_of(second, LAYERS, x if order is None else x[order]))
    return matrix.compute()


@pytest.mark.parametrize("name", MEASURES)
def test_similarities_are_those_of_the_metric(fitted, matching_zoo, name):
    zoo = ModelZoo.open(matching_zoo)
    assert fitted.pairs == [(0, 1), (0, 2), (1, 2)]
    for place, (a, b) in enumerate(fitted.pairs):
        expected = directly(MEASURES[name], zoo.load(a), zoo.load(b))
        torch.testing.assert_close(fitted.similarities[name]["trained"][place], expected, **ROUNDING)


@pytest.mark.parametrize("name", MEASURES)
def test_nulls_are_those_of_the_metric_for_other_networks_and_orders(fitted, matching_zoo, name):
    zoo, (a, b) = ModelZoo.open(matching_zoo), fitted.pairs[1]
    fresh = [zoo.load(0).fresh(module.derive_seed("untrained", 0, 0, number)) for number in (a, b)]
    untrained = directly(MEASURES[name], *fresh)
    torch.testing.assert_close(fitted.similarities[name]["untrained"][1], untrained, **ROUNDING)
    orders, start = [], 0
    for number, size in enumerate((32, 32, 16)):
        orders.append(start + module._another_order(size, module.generator("shuffled", 0, number)))
        start += size
    order = torch.cat(orders)
    assert sorted(order.tolist()) == list(range(80))
    assert not (order == torch.arange(80)).any()
    shuffled = directly(MEASURES[name], zoo.load(a), zoo.load(b), order)
    torch.testing.assert_close(fitted.similarities[name]["shuffled"][1], shuffled, **ROUNDING)
    if name.startswith("cka"):
        assert shuffled.abs().max() < 0.3 < untrained.diagonal().min() + 0.3


def test_one_pass_in_which_every_network_sees_every_image_once_as_it_is(matching_zoo, fitted, monkeypatch):
    seen = []

    def watched(network, taps, inputs):
        seen.append(inputs)
        return features_of(network, taps, inputs)

    monkeypatch.setattr(module, "features_of", watched)
    task = SimilarityTask(str(matching_zoo), measures=["orthogonal"], split="val")
    trainer = fits.fit(task, digits(shift=2, flip=True), max_epochs=5)
    batches = seen[1:]  # the first one is an example
    assert trainer.current_epoch == 1
    assert len(batches) == 6 * 3  # three members and their counterparts, three batches
    assert torch.equal(torch.cat(batches[::6]), images("val"))
    assert (task.images, fitted.images) == (80, 80)
    expected = directly(OrthogonalProcrustes(), *map(ModelZoo.open(matching_zoo).load, (0, 1)), split="val")
    torch.testing.assert_close(task.similarities["orthogonal"]["trained"][0], expected, **ROUNDING)


def test_a_layer_that_is_not_there_in_the_other_network_has_no_like(matching_zoo, tmp_path):
    """Members of another zoo, of another depth; the same numbers are other networks."""
    shallow = [MultiLayerPerceptron(widths=(7,), image_size=8).fresh(seed).eval() for seed in (0, 1)]
    other = write_zoo(tmp_path / "zoo", shallow, digits())
    task = SimilarityTask(str(matching_zoo), str(other), pairs=[[0, 0], [0, 1], [1, 1]], measures=["group", "cka_max"])
    report = SimilarityReport()
    fits.fit(task, digits(), report, folder=tmp_path)
    assert task.similarities["group"]["trained"].shape == (3, 2, 1)
    rows = read_rows(tmp_path / "results" / "summary")
    assert [row["second_layer"] for row in rows] == ["activation1"] * 4
    assert all(row["models"] == 4 and row["untrained"] < 0.99 for row in rows)
    # The same network twice is the same.
    zoo = SimilarityTask(str(matching_zoo), str(matching_zoo), pairs=[[2, 2]], measures=["cka_max"], nulls=[])
    fits.fit(zoo, digits())
    assert zoo.similarities["cka_max"]["trained"][0].diagonal().tolist() == pytest.approx([1, 1], abs=1e-6)


@pytest.mark.drawn
def test_layers_that_a_measure_cannot_compare_are_left_empty(tmp_path):
    """LeNet's grids, 28 and 10 pixels wide, have no common refinement, and its last layers have no grid."""
    networks = [LeNet5(image_size=28).fresh(seed).eval() for seed in (0, 1)]
    data = MNIST5kDataModule(max_samples=40, batch_size=20)
    zoo = write_zoo(tmp_path / "zoo", networks, data)
    task = SimilarityTask(str(zoo), measures=["orthogonal", "cka_linear"])
    fits.fit(task, data, SimilarityReport(), folder=tmp_path)
    orthogonal, cka = (task.similarities[name]["trained"][0] for name in task.measures)
    assert orthogonal.isnan().any()
    assert orthogonal.diagonal().isfinite().all()
    assert cka.isfinite().all()
    rows = read_rows(tmp_path / "results" / "matrices")
    assert {row["note"] for row in rows if row["similarity"] is None} == {"not comparable"}
    assert (tmp_path / "results" / "heat_maps.png").stat().st_size > 0


def test_a_network_whose_channels_are_tied_has_layers_of_different_kinds(tmp_path):
    """The zero-padded shortcut of ResNet-20 ties half of the wider channels to the narrower ones."""
    networks = [CIFARResNet(width=4, in_channels=1, image_size=8).fresh(seed).eval() for seed in (0, 1)]
    zoo = write_zoo(tmp_path / "zoo", networks, digits())
    task = SimilarityTask(str(zoo), measures={"group": None, "relu": {"measure": "group", "group": "relu"}}, nulls=[])
    fits.fit(task, digits())
    own, relu = (task.similarities[name]["trained"][0] for name in task.measures)
    stem, wide = 0, task.layers[0].index("blocks.3.activation2")
    assert own[stem, wide].isnan()
    assert own.diagonal().isfinite().all()
    assert relu.isfinite().all()
    # A smaller group can do less.
    assert own[wide, wide] < relu[wide, wide]


def test_a_kernel_is_that_of_the_metric_also_where_batches_are_added_up():
    features = {name: [torch.rand(8, 3, 2, 2, dtype=torch.float64) for _ in range(3)] for name in "abc"}
    links = [Link("a", "b"), Link("a", "c"), Link("a", "b", shuffled=True)]
    order = torch.roll(torch.arange(8), 3)
    for metric in (CKA("linear", estimator="minibatch"), CKA("max"), CKA("laplace", estimator="biased")):
        several = PopulationSimilarity(metric, ["low"], ["low"], links)
        single = [SimilarityMatrix(metric, ["low"]) for _ in links]
        for batch in range(3):
            now = {name: {"low": own[batch]} for name, own in features.items()}
            several.update({name: {"low": Features(own["low"])} for name, own in now.items()}, order)
            for link, matrix in zip(links, single, strict=True):
                second = now[link.second]["low"]
                matrix.update(now[link.first], {"low": second[order] if link.shuffled else second})
        expected = torch.stack([matrix.compute().view(1, 1) for matrix in single])
        torch.testing.assert_close(several.compute(), expected, atol=1e-10, rtol=1e-10)
        with pytest.raises(ValueError, match="pass the order"):
            several.update({name: {"low": Features(own[0])} for name, own in features.items()})
        several.reset()
        several.update({name: {"low": Features(own[0][:1])} for name, own in features.items()}, order[:1] * 0)
        with pytest.warns(UserWarning, match="needs 4 samples|needs 2 samples"):
            assert several.compute().isnan().all()


def test_a_finished_run_reports_again_and_a_checkpoint_of_other_settings_is_refused(matching_zoo, tmp_path):
    def task(**changes):
        return SimilarityTask(str(matching_zoo), measures={"live": {"measure": "group", "live": True}}, **changes)

    first, again = task(), task()
    fits.fit(first, digits(), fits.saving(tmp_path), folder=tmp_path)
    last = tmp_path / "last.ckpt"
    fits.fit(again, digits(), SimilarityReport(), folder=tmp_path / "again", ckpt_path=last)
    assert_same(first.similarities, again.similarities)
    assert_same(first.live, again.live)
    rows = read_csv(tmp_path / "again" / "results" / "pairs.csv")
    assert float(rows[0]["similarity"]) == first.similarities["live"]["trained"][0, 0, 0]
    with pytest.raises(ValueError, match="The checkpoint has split test and this run has val; use the settings"):
        fits.fit(task(split="val"), digits(), ckpt_path=last)


def check_lines(console, note):
    lines = console.file.getvalue().splitlines()
    assert [line for line in lines if len(line.rstrip()) > 80] == []
    assert any(note in line for line in lines)


# ---- several zoos


@pytest.fixture(scope="module")
def zoos(matching_zoo, tmp_path_factory):
    networks = [MultiLayerPerceptron(widths=(5, 4), activation="tanh", image_size=8).fresh(n).eval() for n in (0, 1, 2)]
    return {"16": str(matching_zoo), "5": str(write_zoo(tmp_path_factory.mktemp("zoo"), networks, digits()))}


def test_several_zoos_are_each_as_by_itself(zoos, tmp_path):
    """The group of each is that of its own networks."""
    task, report = SimilarityOfZoosTask(zoos, measures=["group", "cka_linear"]), SimilarityOfZoosReport()
    logger = MetricsCSV(tmp_path)
    fits.fit(task, digits(), report, fits.saving(tmp_path), folder=tmp_path, max_epochs=3, logger=logger)
    logged = read_csv(tmp_path / "metrics.csv")[-1]
    rows = read_rows(tmp_path / "results" / "summary")
    assert len(rows) == 2 * 2 * 2
    for name, zoo in zoos.items():
        alone = SimilarityTask(zoo, measures=["group", "cka_linear"])
        fits.fit(alone, digits(), SimilarityReport(), folder=tmp_path / name)
        assert_same(task.parts[name].similarities, alone.similarities)
        assert task.parts[name].images == alone.images
        own = [{key: value for key, value in row.items() if key != "zoo"} for row in rows if row["zoo"] == name]
        assert own == read_rows(tmp_path / name / "results" / "summary")
        tag = "similarity_untrained/group/activation1"
        assert float(logged[f"details/{tag}/{name}"]) == pytest.approx(alone.logged()[1][tag])
    console = Console(file=io.StringIO(), width=80)
    report.results.show(console, Path("runs/similarity/results"), Path("runs/similarity"))
    check_lines(console, "in brackets 95 % interval")
    again = SimilarityOfZoosTask(zoos, measures=["group", "cka_linear"])
    fits.fit(again, digits(), ckpt_path=tmp_path / "last.ckpt")
    assert_same(again.parts["5"].similarities, task.parts["5"].similarities)
    other = SimilarityOfZoosTask({"5": zoos["5"]}, measures=["group", "cka_linear"])
    with pytest.raises(ValueError, match=r"similarities of the zoos \['16', '5'\] and this run has \['5'\]"):
        fits.fit(other, digits(), ckpt_path=tmp_path / "last.ckpt")


def test_no_zoos_are_refused():
    assert_refused(SimilarityOfZoosTask, {}, says="zoos must be folders of zoos by their names")


def test_zoos_that_are_numbers_are_an_axis_and_others_are_names():
    found = Similarities({"cka": {"trained": torch.tensor([[[0.5]], [[0.6]], [[0.7]]])}}, [(0, 1), (0, 2), (1, 2)],
                         (["relu"], ["relu"]), {})  # fmt: skip
    ((_, figure),) = similarity_of_zoos_results(dict.fromkeys(("8", "32"), found), title="", about={}).figures
    assert figure.axes[0].get_xscale() == "log"
    assert figure.axes[0].lines[0].get_xdata().tolist() == [8.0, 32.0]
    assert figure.axes[0].get_title() == "cka, layer 1"
    ((_, figure),) = similarity_of_zoos_results(dict.fromkeys(("relu", "tanh"), found), title="", about={}).figures
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["relu", "tanh"]


def test_pairs_are_drawn_and_intervals_are_over_models(matching_zoo, tmp_path):
    task = SimilarityTask(str(matching_zoo), pairs=2, measures=["cka_linear"], nulls=["untrained"])
    fits.fit(task, digits(), SimilarityReport(), folder=tmp_path)
    assert len(task.pairs) == len(set(task.pairs)) == 2
    row = read_rows(tmp_path / "results" / "summary")[0]
    values = {kind: each[:, 0, 0] for kind, each in task.similarities["cka_linear"].items()}
    assert row["similarity"] == pytest.approx(float(values["trained"].mean()))
    assert row["above_untrained"] == pytest.approx(float((values["trained"] - values["untrained"]).mean()))
    assert row["above_untrained_low"] <= row["above_untrained"] <= row["above_untrained_high"]
    assert "shuffled" not in row
    assert math.isfinite(task.logged()[1]["similarity_untrained/cka_linear/activation1"])


@pytest.mark.parametrize(
    "refusal",
    [
        refused(SimilarityTask, "zoo", measures=["cca"], says=["Unknown measure 'cca'", "cka_linear"]),
        refused(SimilarityTask, "zoo", measures=[], says="measures must be a list of different names"),
        refused(SimilarityTask, "zoo", measures={"group": {"kernel": "max"}}, says="kernel"),
        refused(SimilarityTask, "zoo", measures={"cka_max": {"estimator": "minibatch"}}, says='normalize="none"'),
        refused(SimilarityTask, "zoo", measures={"group": {"group": "softmax"}}, says="softmax"),
        *(refused(SimilarityTask, "zoo", **bad) for bad in ({"split": "all"}, {"sites": []}, {"seed": -1})),
        refused(SimilarityTask, "zoo", nulls=["random"], says="untrained"),
        refused(SimilarityTask, "zoo", pairs=0),
        refused(SimilarityTask, "zoo", pairs=[[0, 0]], says="two different members"),
    ],
)
def test_wrong_settings_are_one_sentence(refusal):
    refusal()


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"sites": ["relu"]}, "relu"), ({"pairs": 4}, "at most the 3"), ({"pairs": [[0, 9]]}, "No member 9")],
)
def test_sites_and_numbers_that_are_not_there_are_one_sentence(matching_zoo, settings, says):
    with pytest.raises(ValueError, match=says):
        fits.fit(SimilarityTask(str(matching_zoo), **settings), digits())


def test_data_that_do_not_come_as_they_are_are_refused(matching_zoo):
    with pytest.raises(TypeError, match=r"needs a datamodule of .*, which yields each input once"):
        fits.fit(SimilarityTask(str(matching_zoo)), fits.Given(torch.randn(20, 1, 8, 8), torch.eye(10).repeat(2, 1)))
