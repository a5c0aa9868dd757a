# Work on results with pandas.
# Have: a run in Python
# Get: mean and spread of the test accuracies, and the table as `members.csv`
from pytorch_lightning import Trainer

from lightning_sym.callbacks import ZooExport, ZooReport
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import ZooTask
from lightning_sym.zoo import ModelZoo

task = ZooTask(MultiLayerPerceptron([16], image_size=8), members=3, execution="vmap")
report = ZooReport()
trainer = Trainer(max_epochs=3, callbacks=[ZooExport("runs/pandas/zoo"), report], default_root_dir="runs/pandas")
trainer.fit(task, DigitsDataModule())
for table in report.results.tables:
    print(table.to_pandas())
frame = ModelZoo.open("runs/pandas/zoo").to_pandas()
print(frame.describe())
frame.to_csv("members.csv")
