"""What is free does not depend on the order in which equations between scales are solved."""

from typing import Any

import numpy as np
import pytest
import torch
from further_model_cases import FURTHER_TRANSFORMERS

from lightning_sym.symmetry import trace_symmetry
from lightning_sym.symmetry.equations import solve
from lightning_sym.symmetry.solving import scales


class Shuffled:
    """Solves equations in another order."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def __call__(self, number: int, equations: Any, zeros: Any, **options: Any) -> Any:
        given = [(rows[self.generator.permutation(len(rows))], once) for rows, once in equations]
        return solve(number, [given[index] for index in self.generator.permutation(len(given))], zeros, **options)


@pytest.mark.parametrize(("name", "free"), [("roformer", 66), ("exaone4", 62)])
def test_what_acts_with_others_does_not_depend_on_the_order_of_equations(
    name: str, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = FURTHER_TRANSFORMERS[name]
    network, inputs = model.make().eval(), model.inputs(False)
    for seed in range(3):
        monkeypatch.setattr(scales, "solve", Shuffled(seed))
        given, named = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
        symmetry = trace_symmetry(network, *given, check=False, **named)
        assert symmetry.scales == free
        assert not any(" scales" in note and "only act together" in note for note in symmetry.notes)
