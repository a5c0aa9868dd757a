"""Checkpoints of a run are read without running what they hold."""

import pytest
import torch
from torch import nn

from lightning_sym.cli.checkpoints import AtomicCheckpointIO
from lightning_sym.cli.messages import explain, is_expected


class Malicious:
    def __reduce__(self):
        raise_it = "raise AssertionError('code of the checkpoint ran')"
        return exec, (raise_it,)


def test_a_checkpoint_that_holds_code_is_refused_in_one_sentence_of_ours(tmp_path):
    torch.save({"state_dict": {}, "more": Malicious()}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"last.ckpt is damaged, or holds code, which is not run") as refusal:
        AtomicCheckpointIO().load_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert "weights_only" not in str(refusal.value)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({}, "it has no weight and 1 more"),
        ({"weight": torch.ones(2, 3)}, "it has no bias"),
        ({"weight": torch.ones(2, 3), "bias": torch.ones(2), "scale": torch.ones(1)}, "it has scale besides"),
        ({"weight": torch.ones(2, 4), "bias": torch.ones(2)}, "weight has shape [2, 4] instead of [2, 3]"),
    ],
)
def test_weights_of_another_network_are_one_sentence_with_the_first_difference(state, says):
    with pytest.raises(RuntimeError) as error:
        nn.Linear(3, 2).load_state_dict(state)
    assert is_expected(error.value)
    assert explain(str(error.value)) == (
        f"The checkpoint holds other weights than Linear: {says}; give the checkpoint of a run with these settings."
    )
