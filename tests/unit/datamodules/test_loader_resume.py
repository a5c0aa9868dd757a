"""A run that was interrupted and resumed sees exactly the batches that it had not seen."""

import pytest
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

# A resumed run writes into the folder of the run that it continues.
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


def fit(
    tmp_path,
    tiny,
    recorder,
    *,
    epochs,
    checkpoint=None,
    ckpt_path=None,
    fail_at=None,
    members=None,
    **settings,
):
    data = tiny(batch_size=8, shift=1, flip=False)  # 36 images: 4 batches in an epoch
    task = recorder(data, fail_at)
    if members:
        task.member_seeds = members
    trainer = Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=checkpoint is not None,
        callbacks=[] if checkpoint is None else [checkpoint],
        **settings,
    )
    try:
        trainer.fit(task, data, ckpt_path=ckpt_path, weights_only=True)
    except SystemExit:  # what Lightning makes of the KeyboardInterrupt
        assert fail_at is not None
    return task.seen


def every_step(tmp_path):
    return ModelCheckpoint(
        dirpath=tmp_path,
        filename="{step}",
        every_n_train_steps=1,
        save_top_k=-1,
        auto_insert_metric_name=False,
    )


def every_epoch(tmp_path, filename, on_train_epoch_end):
    return ModelCheckpoint(
        dirpath=tmp_path,
        filename=filename,
        save_top_k=-1,
        save_on_train_epoch_end=on_train_epoch_end,
        auto_insert_metric_name=False,
    )


@pytest.mark.parametrize("step", range(1, 9))
@pytest.mark.parametrize("members", [None, (3, 1)])
def test_resume_after_any_step(tmp_path, tiny, recorder, step, members):
    whole = fit(tmp_path, tiny, recorder, epochs=3, checkpoint=every_step(tmp_path), members=members)
    assert len(whole) == 12
    rest = fit(
        tmp_path,
        tiny,
        recorder,
        epochs=3,
        checkpoint=every_step(tmp_path),
        ckpt_path=tmp_path / f"{step}.ckpt",
        members=members,
    )
    assert rest == whole[step:]


def test_resume_after_an_interruption(tmp_path, tiny, recorder):
    whole = fit(tmp_path, tiny, recorder, epochs=3)
    first = fit(tmp_path, tiny, recorder, epochs=3, checkpoint=every_step(tmp_path), fail_at=6)
    rest = fit(tmp_path, tiny, recorder, epochs=3, checkpoint=every_step(tmp_path), ckpt_path=tmp_path / "6.ckpt")
    assert first + rest == whole


@pytest.mark.parametrize("on_train_epoch_end", [True, False])  # False: at the end of validation
@pytest.mark.parametrize("limit", [1.0, 3])
def test_resume_from_the_end_of_an_epoch(tmp_path, tiny, recorder, on_train_epoch_end, limit):
    def run(ckpt_path=None):
        checkpoint = every_epoch(tmp_path, "{epoch}", on_train_epoch_end)
        settings = {"epochs": 4, "checkpoint": checkpoint, "limit_train_batches": limit}
        return fit(tmp_path, tiny, recorder, ckpt_path=ckpt_path, **settings)

    whole = run()
    for epoch in range(3):
        rest = run(tmp_path / f"{epoch}.ckpt")
        assert rest == [(e, batch) for e, batch in whole if e > epoch]


def test_resume_from_validation_in_the_middle_of_an_epoch(tmp_path, tiny, recorder):
    def run(ckpt_path=None):
        checkpoint = every_epoch(tmp_path, "{step}", False)
        settings = {"epochs": 2, "checkpoint": checkpoint, "val_check_interval": 2}
        return fit(tmp_path, tiny, recorder, ckpt_path=ckpt_path, **settings)

    whole = run()
    for step in (2, 4, 6):
        rest = run(tmp_path / f"{step}.ckpt")
        assert rest == whole[step:]
