"""``lightning-sym estimate``: a few steps are run, and the whole run is computed from them."""

import re
from pathlib import Path

import pytest
from commands import QUIET, SMALL, call, succeed

from lightning_sym.cli.estimate import read_options
from lightning_sym.recipes import recipe_path


def numbers(out: str) -> dict[str, str]:
    """Return how often each part comes, by its name."""
    return dict(re.findall(r"^│ ([\w ]+?) +│ +(\d+) │", out, re.MULTILINE))


def test_a_recipe_is_estimated_by_its_parts_and_nothing_is_left_behind() -> None:
    learned = ("--trainer.callbacks=MarginalLikelihood", "--trainer.callbacks.burn_in=7")
    out = succeed(
        *("estimate", *SMALL, *QUIET, "--data.batch_size=16", "--trainer.max_epochs=20", "--model.prior_precision=1"),
        *(*learned, "--trainer.callbacks.every_n_epochs=5", "--devices=2", "--trainer.check_val_every_n_epoch=3"),
    ).out
    assert max(map(len, out.splitlines())) <= 80
    assert out.startswith("20 epochs of 4 steps on this machine (cpu, ")
    assert numbers(out) == {
        **{"start": "1", "training step": "80", "validation": "6", "rest of an epoch": "20"},
        **{"MarginalLikelihood": "3", "after training": "1", "all": "1"},
    }
    for said in ("on 2 devices like this one", "one device", "ddp ", "ddp_members", "memory  "):
        assert said in out
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_a_short_recipe_and_what_it_requires() -> None:
    out = succeed("estimate", "--config", "stitching/digits_mlp", *QUIET, "--model.pairs=1", "--model.maps=[full]").out
    assert numbers(out)["rest of an epoch"] == "10"
    assert "without zoo/digits_mlp, which is run first: estimate it by itself" in out
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--devices=0", "--devices takes a whole number >= 1, got 0."),
        ("--devices=many", "--devices takes a whole number >= 1, got 'many'."),
        ("--steps 2", "--steps takes a whole number >= 4, got 2."),
        ("--bandwidth=-1", "--bandwidth takes a number of gigabytes per second > 0, got -1."),
        ("--config zoo/mnist6k", "There is no recipe or file 'zoo/mnist6k'. Did you mean 'zoo/mnist5k'?"),
    ],
)
def test_wrong_options_are_said_in_a_sentence(options: str, says: str) -> None:
    result = call("estimate", *options.split())
    assert result.status == 2
    assert says in result.error


def test_options_of_its_own_are_told_from_those_of_fit() -> None:
    assert "--bandwidth 25" in succeed("estimate").out
    recipe = str(recipe_path("zoo/mnist5k"))
    asked = read_options(["--config", "zoo/mnist5k", "--devices", "8", "--trainer.devices", "2", "--bandwidth=1.5"])
    assert (asked.args, asked.devices, asked.bandwidth) == (("--config", recipe, "--trainer.devices", "2"), 8, 1.5e9)
