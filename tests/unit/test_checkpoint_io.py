"""Checkpoints of a run are read without running what they hold."""

import pytest
import torch

from lightning_sym.cli.checkpoints import AtomicCheckpointIO


class Malicious:
    def __reduce__(self):
        raise_it = "raise AssertionError('code of the checkpoint ran')"
        return exec, (raise_it,)


def test_a_checkpoint_that_holds_code_is_refused_in_one_sentence_of_ours(tmp_path):
    torch.save({"state_dict": {}, "more": Malicious()}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"last.ckpt is damaged, or holds code, which is not run") as refusal:
        AtomicCheckpointIO().load_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert "weights_only" not in str(refusal.value)
