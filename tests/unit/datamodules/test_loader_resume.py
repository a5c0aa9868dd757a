"""A run that was interrupted and resumed sees exactly the batches that it had not seen."""

from functools import partial

import pytest
from fits import fit
from pytorch_lightning.callbacks import ModelCheckpoint

# A resumed run writes into the folder of the run that it continues.


def seen(tmp_path, tiny, recorder, *, ckpt_path=None, members=None, saved, **settings):
    """Return what a run sees; ``saved`` are the settings of its checkpoints, for each of which there is a file."""
    data = tiny(batch_size=8, shift=1, flip=False)  # 36 images: 4 batches in an epoch
    task = recorder(data)
    if members:
        task.member_seeds = members
    kept = ModelCheckpoint(tmp_path, save_top_k=-1, auto_insert_metric_name=False, **saved)
    fit(task, data, kept, folder=tmp_path, ckpt_path=ckpt_path, **settings)
    return task.seen


@pytest.mark.parametrize(
    ("steps", "epochs", "saved", "settings"),
    [
        (range(1, 9), 3, {"every_n_train_steps": 1}, {}),
        (range(1, 9), 3, {"every_n_train_steps": 1}, {"members": (3, 1)}),
        ((2, 4, 6), 2, {"save_on_train_epoch_end": False}, {"val_check_interval": 2}),
        ((4, 8, 12), 4, {"save_on_train_epoch_end": True}, {}),
        ((4, 8, 12), 4, {"save_on_train_epoch_end": False}, {}),
        ((3, 6, 9), 4, {"save_on_train_epoch_end": True}, {"limit_train_batches": 3}),
        ((3, 6, 9), 4, {"save_on_train_epoch_end": False}, {"limit_train_batches": 3}),
    ],
    ids=str,
)
def test_a_resumed_run_sees_the_rest(tmp_path, tiny, recorder, steps, epochs, saved, settings):
    saved = {"filename": "{step}", **saved}
    run = partial(seen, tmp_path, tiny, recorder, max_epochs=epochs, saved=saved, **settings)
    whole = run()
    assert len(whole) == epochs * settings.get("limit_train_batches", 4)
    for step in steps:
        assert run(ckpt_path=tmp_path / f"{step}.ckpt") == whole[step:]
