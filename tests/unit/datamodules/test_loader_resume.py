"""A run that was interrupted and resumed sees exactly the batches that it had not seen."""

from functools import partial

import pytest
from fits import fit
from pytorch_lightning.callbacks import ModelCheckpoint

# A resumed run writes into the folder of the run that it continues.
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


def seen(tmp_path, tiny, recorder, *, ckpt_path=None, members=None, saved, **settings):
    """Return what a run sees; ``saved`` are the settings of its checkpoints, for each of which there is a file."""
    data = tiny(batch_size=8, shift=1, flip=False)  # 36 images: 4 batches in an epoch
    task = recorder(data)
    if members:
        task.member_seeds = members
    kept = ModelCheckpoint(tmp_path, save_top_k=-1, auto_insert_metric_name=False, **saved)
    fit(task, data, kept, folder=tmp_path, ckpt_path=ckpt_path, **settings)
    return task.seen


@pytest.mark.parametrize("members", [None, (3, 1)])
def test_resume_after_any_step(tmp_path, tiny, recorder, members):
    saved = {"filename": "{step}", "every_n_train_steps": 1}
    run = partial(seen, tmp_path, tiny, recorder, max_epochs=3, saved=saved, members=members)
    whole = run()
    assert len(whole) == 12
    for step in range(1, 9):
        assert run(ckpt_path=tmp_path / f"{step}.ckpt") == whole[step:]


@pytest.mark.parametrize("at_the_end_of_training", [True, False])  # False: at the end of validation
@pytest.mark.parametrize("limit", [1.0, 3])
def test_resume_from_the_end_of_an_epoch(tmp_path, tiny, recorder, at_the_end_of_training, limit):
    saved = {"filename": "{epoch}", "save_on_train_epoch_end": at_the_end_of_training}
    run = partial(seen, tmp_path, tiny, recorder, max_epochs=4, saved=saved, limit_train_batches=limit)
    whole = run()
    for epoch in range(3):
        assert run(ckpt_path=tmp_path / f"{epoch}.ckpt") == [(e, batch) for e, batch in whole if e > epoch]


def test_resume_from_validation_in_the_middle_of_an_epoch(tmp_path, tiny, recorder):
    saved = {"filename": "{step}", "save_on_train_epoch_end": False}
    run = partial(seen, tmp_path, tiny, recorder, max_epochs=2, saved=saved, val_check_interval=2)
    whole = run()
    for step in (2, 4, 6):
        assert run(ckpt_path=tmp_path / f"{step}.ckpt") == whole[step:]
