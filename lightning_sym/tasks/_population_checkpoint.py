"""The part of a checkpoint for a population, without the current weights."""

from collections.abc import Mapping
from typing import Any

from lightning_sym.tasks.strategy import gather


def population_state(task: Any) -> dict[str, Any]:
    """Collect the kept weights and records of the members of all ranks; to be called on every rank."""
    mine = task.kept, task.stopped, task.member_records()
    parts = gather(mine) if task.member_parallel else [mine]
    kept, stopped, records = ({n: one for part in parts for n, one in part[i].items()} for i in range(3))
    return {
        "identity": task.identity(),
        "optimizer": _optimizer(task),
        "data": _data(task),
        "kept": dict(kept),
        "stopped": dict(stopped),
        "records": dict(records),
        "history": task.history,
        "history_epochs": task.history_epochs,
        "train_sums": task.train_metrics.totals(task.trainer),
        "processes": task.trainer.world_size if task.member_parallel else 1,
    }


def load_population_state(task: Any, checkpoint: Mapping[str, Any]) -> None:
    """Restore this rank's members from the result of :func:`population_state`.

    Raises:
        ValueError: If the checkpoint is of other members or settings, or training resumes with another optimizer,
            other data or batches, fewer epochs, or another placement of the members.
    """
    saved = checkpoint.get("population")
    if saved is None or not task.identity().keys() & saved["identity"].keys():
        raise ValueError(f"The checkpoint holds no population: it was not written by a {type(task).__name__}.")
    require_same(saved["identity"], task.identity())
    if task._trainer is not None and task.trainer.state.fn == "fit":
        _check_training(task, saved, checkpoint)
    own = set(task.population.numbers)

    def mine_of(part: str) -> dict[int, Any]:
        return {number: record for number, record in saved[part].items() if number in own}

    task.kept = mine_of("kept")
    task.stopping.restart(mine_of("stopped"))
    task.load_member_records(mine_of("records"))
    task.history, task.history_epochs = saved["history"], saved["history_epochs"]
    if task._trainer is None or task.trainer.is_global_zero:  # sums over ranks now belong to one rank
        task.train_metrics.set_totals(saved["train_sums"])


def _optimizer(task: Any) -> dict[str, Any]:
    """Return the settings that training restores from a checkpoint: the classes first."""
    settings = dict(task._settings)
    names = {name: settings.pop(f"{name}_name") for name in ("optimizer", "lr_scheduler")}
    return {**names, **settings}


def _data(task: Any) -> dict[str, Any]:
    """Return the data that training reads again: the class, its arguments, and the fingerprint of the values."""
    identity = getattr(task.trainer.datamodule, "identity", None)
    if not callable(identity):
        return {}
    own = identity()
    arguments = {name: value for name, value in own["arguments"].items() if name != "eval_batch_size"}
    return {"class_path": own["class_path"], **arguments, "fingerprint": own.get("fingerprint")}


def _check_training(task: Any, saved: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> None:
    """Raise an error if the optimizer, data or processes differ from the checkpoint's, or there are fewer epochs."""
    # Lightning would restore the state and the learning rate of the old optimizer into the new one.
    require_same(saved["optimizer"], _optimizer(task))
    require_same(saved.get("data", {}), _data(task) if "data" in saved else {})
    begun, most = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["ready"], task.trainer.max_epochs
    if most not in (None, -1) and begun > most:
        raise ValueError(f"The checkpoint is of epoch {begun} and max_epochs is {most}; raise it to at least {begun}.")
    processes = task.trainer.world_size if task.member_parallel else 1
    if saved["processes"] != processes:
        raise ValueError(
            f"The members of the checkpoint were placed on {saved['processes']} process(es) and those of this run "
            f"on {processes}; resume with the same strategy and number of processes."
        )


def require_same(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise unless a checkpoint has the settings of this run; one that is missing on a side is ``none`` there."""
    for name in {**identity, **saved}:
        if saved.get(name, "none") != identity.get(name, "none"):
            theirs, ours = first_difference(saved.get(name, "none"), identity.get(name, "none"))
            raise ValueError(
                f"The checkpoint has {name} {theirs} and this run has {ours}; use the settings that it was made with, "
                "which the config.yaml of its run holds."
            )


def first_difference(a: Any, b: Any) -> tuple[Any, Any]:
    """Return two values that differ; of lists the first entries that the other list lacks, or words on the order."""
    if not (isinstance(a, list) and isinstance(b, list)):
        return a, b
    one, two = ([item for item in mine if item not in theirs] for mine, theirs in ((a, b), (b, a)))
    if not one and not two:
        return "in one order", "in another"
    return (one[0] if one else f"without {two[0]}"), (two[0] if two else f"without {one[0]}")
