"""How far branches are from the trunk, while they are trained."""

from pytorch_lightning import Callback


class BranchDistance(Callback):
    """Log the Euclidean distance of each branch to the trunk after each epoch."""

    charts = {"distance to the trunk": "distance/.*"}

    def on_train_epoch_end(self, trainer, task):
        members = task.population
        trunk, *branches = map(members.member_state, members.numbers)
        for epoch, branch in zip(task.leave, branches, strict=True):
            squares = [(branch[key] - trunk[key]).square().sum() for key in trunk]
            task.log(f"distance/left-after-{epoch:02d}", sum(squares).sqrt())
