"""The sentences that people meet when something is wrong, word for word: at the command line, and in Python.

Dots stand for what depends on the folder, on the version of a library, or on how many recipes there are.
"""

import re
import shlex
from pathlib import Path

import pytest
import torch
from commands import QUIET, SMALL, call
from helpers import write_zoo

from lightning_sym import (
    callbacks,
    connectivity,
    datamodules,
    landscape,
    networks,
    recipes,
    stitching,
    symmetry,
    tasks,
    zoo,
)

# Each command with what it says; SMALL is a small task on small data.

NOT_UNDERSTOOD = """
$ fitt
Unknown command 'fitt'; expected one of: fit, validate, test, predict, import, spectrum, learning-coefficient, evidence,
similarity, curve, merge, reparametrize, symmetry, compare, estimate, recipes.
Did you mean 'fit'?
$ recipes zoo/mnist6k
Unknown recipe 'zoo/mnist6k'. Did you mean 'zoo/mnist5k'?
$ recipes nothing
Unknown recipe 'nothing'. lightning-sym recipes lists them.
$ fit --config zoo/mnist6k
There is no recipe or file 'zoo/mnist6k'. Did you mean 'zoo/mnist5k'?
$ fit --config mine
There is no recipe or file 'mine'. lightning-sym recipes lists the recipes.
$ fit --config runs/mine/config.yaml
There is no file .../runs/mine/config.yaml.
$ fit --config
Option 'config' has no value; give one, as in --config VALUE.
$ fit --config zoo/digits_mlp --config 'model: {membrs: 3}'
ZooTask has no option 'model.membrs'. Did you mean 'model.members'?
$ fit --config 'model: {'
The value of --config is not valid YAML: ...
$ fit SMALL --model.members
Option 'model.members' has no value; give one, as in --model.members VALUE.
$ fit SMALL --trainer.callbacks+ --trainer.max_epochs 3
Option 'trainer.callbacks+' has no value; give one, as in --trainer.callbacks+ VALUE.
$ fit SMALL --model.network.widths=
Option 'model.network.widths' has no value; give one, as in --model.network.widths VALUE.
$ fit zoo/digits_mlp
'zoo/digits_mlp' belongs to no option; give it as --config zoo/digits_mlp.
$ test zoo/digits_mpl --run_dir x
'zoo/digits_mpl' belongs to no option; options are --NAME VALUE, a recipe is --config RECIPE. Did you mean
'zoo/digits_mlp'?
$ estimate zoo/digits_mlp
'zoo/digits_mlp' belongs to no option; give it as --config zoo/digits_mlp.
$ fit SMALL --overwrite=true true
'true' belongs to no option; options are --NAME VALUE, a recipe is --config RECIPE.
$ fit SMALL --model.loss=torch.optim.SGD
model.loss: torch.optim.SGD is no class of callable objects; expected a function, or a class as
torch.nn.MSELoss.
$ fit SMALL --model.loss=SGD
model.loss: SGD is a class of the wrong kind.
$ fit SMALL --model.loss=torch.float32
model.loss: expected the path of a class or a function, got 'torch.float32'.
$ fit SMALL --model.optimizer=torch.nn.Linear
model.optimizer: torch.nn.Linear is no optimizer; expected a class as torch.optim.SGD.
$ fit SMALL --model.optimizer=torch.nn.functional.relu
model.optimizer: torch.nn.functional.relu is no optimizer; expected a class as torch.optim.SGD.
$ fit SMALL --model.lr_scheduler=torch.optim.SGD
model.lr_scheduler: torch.optim.SGD is no scheduler; expected a class as torch.optim.lr_scheduler.CosineAnnealingLR.
$ fit SMALL --model.network=torchvision.models.resnet18
model.network must name a class, to which sizes of the data are handed, and torchvision.models.resnet18 is a function;
for torchvision: --model.network TorchvisionNetwork --model.network.model resnet18.
$ fit --config words.yaml
words.yaml holds no configuration; expected sections such as model, data and trainer.
$ fit --config broken.yaml
broken.yaml is not valid YAML: ... line 1...
$ fit --config twice.yaml
twice.yaml is not valid YAML: members is there twice ... line 3...
$ fit --config ./folder
./folder is a folder; --config takes a file, or the name of a recipe.
$ fit --config bytes.yaml
bytes.yaml is not a text file; --config takes YAML, or the name of a recipe.
$ fit --config section.yaml
Unknown option 'modle.class_path'. Did you mean 'model.class_path'?
$ fit
Missing: --...; or name a recipe with --config (lightning-sym recipes lists them).
$ compare runs/a runs/b --metric val/loss
compare has no option 'metric'. Did you mean 'metrics'?
$ compare --metrics val/loss
Expected the folders of two or more runs, got none.
$ compare runs/a runs/b --table
Option 'table' has no value; give one, as in --table VALUE.
$ fit SMALL --trainr.max_epochs=3
Unknown option 'trainr.max_epochs'. Did you mean 'trainer.max_epochs'?
$ fit SMALL --trainer.maxepochs=3
Trainer has no option 'trainer.maxepochs'. Did you mean 'trainer.max_epochs'?
$ fit SMALL --trainer.max_epoch=3
Trainer has no option 'trainer.max_epoch'. Did you mean 'trainer.max_epochs'?
$ fit SMALL --over=true
Unknown option 'over'. Did you mean ...'overwrite'?
$ fit SMALL --run_dri=x
Unknown option 'run_dri'. Did you mean 'run_dir'?
$ fit SMALL --model.membres=3
ZooTask has no option 'model.membres'. Did you mean 'model.members'?
$ fit SMALL --model.network.widthz=[3]
MultiLayerPerceptron has no option 'model.network.widthz'. Did you mean 'model.network.widths'?
$ fit SMALL --model.network.batch_norm=1
MultiLayerPerceptron has no option 'model.network.batch_norm'. lightning-sym fit --help MultiLayerPerceptron lists those
it has.
$ fit SMALL --model.optimizer=SGD --model.optimizer.momentun=0.9
SGD has no option 'model.optimizer.momentun'. Did you mean 'model.optimizer.momentum'?
$ fit SMALL --model.optimizer=SGD --model.optimizer.learning_rate=0.1
SGD has no option 'model.optimizer.learning_rate'. Did you mean 'model.optimizer.lr'?
$ fit SMALL --model.optimizer=SGD --model.optimizer.lr=0.1 --model.learning_rate=0.2
ZooTask has no option 'model.learning_rate'. Did you mean 'model.optimizer.lr'?
$ fit --model.network.help MultiLayerPerceptron
Option 'model.network.help' comes before the class that has it; put --config, or the class, before it.
$ fit SMALL --model=ZooTsk
model: Unknown class 'ZooTsk'; give its full path, or the name of a shipped class. Did you mean 'ZooTask'?
$ fit SMALL --model=lightning_sym.tasks.ZooTsk
model: There is no class lightning_sym.tasks.ZooTsk. Did you mean 'ZooTask'?
$ fit SMALL --model=lightning_sim.ZooTask
model: There is no module 'lightning_sim'. Did you mean 'lightning_sym'? If it is yours, run this in its folder, or
put that on PYTHONPATH.
$ fit SMALL --trainer.callbacks+=nowhere.Callback
trainer.callbacks: There is no module 'nowhere'. If it is yours, run this in its folder, or put that on
PYTHONPATH.
$ fit SMALL --model.network=torch.optim.SGD
...network: torch.optim.SGD is not a subclass of torch.nn.Module.
$ fit SMALL --model.optimizer=torch.optim.Adm
model.optimizer: There is no class torch.optim.Adm. Did you mean 'Adam'?
$ fit SMALL --trainer.callbacks+=ZooExprt
trainer.callbacks: Unknown class 'ZooExprt'; give its full path, or the name of a shipped class. Did you mean
'ZooExport'?
$ fit SMALL --model.loss=mse_loss
model.loss: Unknown function 'mse_loss'; give its full path, as torch.nn.functional.mse_loss.
$ fit SMALL --model.loss=torch.nn.functional.cross_entropyy
model.loss: There is no function torch.nn.functional.cross_entropyy. Did you mean 'cross_entropy'?
$ fit SMALL --model=raises.Task
model: raises, which holds Task, imports 'does_not_exist_anywhere', and there is no such module; install it, or put its
folder on PYTHONPATH.
$ fit SMALL --model.network=misspelt.Net
...network: misspelt, which holds Net, cannot be imported: ImportError in line 1: cannot import name 'Colum' from
'lightning_sym.reports' (...); correct the module.
$ fit SMALL --model=divides.Task
model: divides, which holds Task, cannot be imported: ZeroDivisionError in line 2: division by zero; correct the module.
$ fit SMALL --model.members=many
model.members: expected an integer, got 'many'.
$ fit SMALL --trainer.max_epochs=many
trainer.max_epochs: expected an integer or null, got 'many'.
$ fit SMALL --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=val/loss --trainer.callbacks.patience=many
trainer.callbacks.patience: expected an integer, got 'many'.
$ fit SMALL --model.prior_precision=nan
model.prior_precision: expected a finite number or null, got 'nan'.
$ fit SMALL --trainer.gradient_clip_val=much
trainer.gradient_clip_val: expected a number or null, got 'much'.
$ fit SMALL --trainer.callbacks+=needs.Needs
Missing: --trainer.callbacks.threshold, which Needs requires.
$ fit SMALL --model.lr_scheduler=CosineAnnealingLR
Missing: --model.lr_scheduler.T_max, which CosineAnnealingLR requires.
$ fit SMALL --model.execution=fast
model.execution: expected one of 'loop', 'vmap', got 'fast'.
$ fit SMALL --model.network.widths=wide
model.network.widths: expected a list, got 'wide'.
$ fit SMALL --overwrite=perhaps
overwrite: expected true or false, got 'perhaps'.
$ fit SMALL --seed_everything=x
seed_everything: expected true or false or an integer, got 'x'.
"""

FAILED = """
$ compare runs/a runs/b
runs/a is not there; expected the folder of a run (with config.yaml), or of several runs.
$ fit SMALL --model.members=0
model.members must be an integer >= 1, got 0.
$ fit SMALL --data.val_fraction=1
data.val_fraction must be a number in [0, 1), got 1.0.
$ fit SMALL --data.batch_size=1000
data.batch_size 1000 is more than the 64 training inputs, and incomplete batches are dropped; use a batch_size of at
most 64.
$ fit SMALL --model.network.activation=reluu
model.network.activation: Unknown activation 'reluu'; expected one of: relu, ... Did you mean 'relu'?
$ fit SMALL --model.network=MyrtleCNN --data.transforms+=Resized --data.transforms.size=4
model.network: MyrtleCNN takes images of at least 8x8 pixels, got image_size=(4, 4).
$ fit SMALL --model.network=LeNet5
model.network: LeNet5 takes images of 28x28 or 32x32 pixels, got image_size=(8, 8).
$ fit SMALL --model.network.widths=[8,-3]
model.network.widths[1] must be an integer >= 1, got -3.
$ fit SMALL --model.optimizer=Adam --model.optimizer.lr=-0.1
model.optimizer.lr: Invalid learning rate: -0.1
$ fit SMALL --model.label_smoothing=1.5
model.label_smoothing must be in [0, 1), got 1.5.
$ fit SMALL --model.prior_precision=1 --model.optimizer=Adam --model.optimizer.weight_decay=0.1
model.optimizer.weight_decay: Adam decays weights, which the Gaussian prior does by itself; set weight_decay to 0.
$ fit SMALL --model.prior_precision=1 --trainer.callbacks+=MarginalLikelihood --trainer.callbacks.burn_in=0
trainer.callbacks.burn_in must be an integer >= 1, got 0.
$ fit SMALL --model.prior_precision=1 --trainer.callbacks+=MarginalLikelihood --trainer.callbacks.engine=foo
trainer.callbacks.engine: Unknown engine 'foo'; expected one of: auto, autograd, backpack.
$ fit SMALL --trainer.callbacks+=MarginalLikelihood
MarginalLikelihood learns the precisions of a task's prior, but ZooTask has none; set prior_precision, for example to
1.0 (--model.prior_precision 1.0).
$ fit SMALL --trainer.callbacks+=StitchingReport
StitchingReport works with lightning_sym.tasks.StitchingTask and similar tasks, but ZooTask has no ... and no ... and no
... and ... more; remove the callback, or add these to the task.
$ fit SMALL --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=val/los --trainer.max_epochs=1
trainer.callbacks.monitor must be a number that the run logs, got 'val/los'. Did you mean 'val/loss'?
$ fit SMALL --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=val/loss --trainer.callbacks.mode=lowest
trainer.callbacks.mode must be min or max, got 'lowest'.
$ fit SMALL --model.loss=torch.nn.ReLU
model.loss must be a function of outputs and targets, and ReLU(inplace=False) takes (input: torch.Tensor) ->
torch.Tensor; give another one, as torch.nn.functional.mse_loss.
$ fit SMALL --model.label_smoothing -.5
model.label_smoothing must be in [0, 1), got -0.5.
$ fit SMALL --trainer.max_epochs -5
trainer.max_epochs must be a non-negative integer or -1. You passed in -5.
$ fit SMALL --trainer.limit_train_batches=2.5
trainer.limit_train_batches: You have passed invalid value 2.5 for limit_train_batches, it has to be in [0.0, 1.0] or
an int.
$ fit SMALL --trainer.devices=0
trainer.devices: `Trainer(devices='0')` value is not a valid input using cpu accelerator.
$ fit SMALL --data=TensorDataModule
data.train: TensorDataModule needs train: a pair (inputs, targets), or the path of a file.
$ fit SMALL --model.initial=nowhere
model.initial: No zoo at .../nowhere: the folder does not exist. Train one first, for example lightning-sym fit --config
zoo/mnist5k.
$ fit SMALL --model.network.num_classes=7
model.network.num_classes is set to 7, but follows from the data: 10 with DigitsDataModule; leave it out, or choose data
that fit.
$ fit SMALL --ckpt_path=last
Nothing to resume: .../run/checkpoints/last.ckpt does not exist (the first checkpoint is written after the first
epoch); start with lightning-sym fit without --ckpt_path, or give another --run_dir or a file as --ckpt_path.
$ test SMALL
Nothing to test: .../run/checkpoints/last.ckpt does not exist; run lightning-sym fit with these options first, or give
another --run_dir or a file as --ckpt_path.
$ fit SMALL --data=TensorDataModule --data.train=values.pt --model.loss=torch.nn.functional.cross_entropy
ZooTask has the cross-entropy as its loss, which is of class numbers, and the targets of TensorDataModule are values;
...
$ fit SMALL --data=TensorDataModule --data.train=one_hot.pt
ZooTask takes one class number per input, and the targets of TensorDataModule are of shape [..., 3]; of one-hot targets
give targets.argmax(1), or name a loss of your own that takes them.
$ fit SMALL --data=TensorDataModule --data.train=one_class.pt
data: TensorDataModule: all targets are class 0; pass class numbers of at least two classes (num_classes for those that
do not occur), or floats for regression.
$ test --ckpt_path=list.ckpt
list.ckpt holds a list instead of settings by name; pass a file that lightning-sym wrote.
$ fit SMALL --ckpt_path=weights.ckpt
weights.ckpt is no checkpoint of Lightning: it has no pytorch-lightning_version; give one that fit wrote (lightning-sym
import reads weights alone).
$ fit SMALL --ckpt_path=absent.ckpt
No checkpoint at .../absent.ckpt; give a file, or last.
$ fit SMALL --ckpt_path=words.yaml
words.yaml is text, not a file of torch.save; pass the file of the weights.
$ fit SMALL --run_dir=words.yaml/run
words.yaml/run cannot be made, as .../words.yaml is a file; expected a place in a folder.
$ fit SMALL --trainer.accelerator=gpuu
...invalid accelerator name...
$ fit --config zoo/cifar10_myrtle --data.download=false
data.root: CIFAR-10 is not in .../data/cifar-10-batches-py (...); copy ...
$ fit --config stitching/mnist5k --requires={} --model.zoo=nowhere
model.zoo: No zoo at .../nowhere: the folder does not exist. Train one first, for example lightning-sym fit --config
zoo/mnist5k.
$ fit --config stitching/mnist5k --model.zoo=folder
folder, which --model.zoo names, is empty; give a folder that is not, or leave the option out: runs/zoo-mnist5k/zoo is
then made, by zoo/mnist5k.
$ fit --config matching/mnist5k_mlp --requires '{"model.zo": "zoo/mnist5k"}'
requires names the option 'model.zo', which this run does not have.
$ fit --config matching/mnist5k_mlp --requires=null --model.zoo=nowhere
model.zoo: No zoo at .../nowhere: the folder does not exist. Train one first, for example lightning-sym fit --config
zoo/mnist5k.
$ fit --config matching/mnist5k_mlp --model.zoo=runs/zoo-mnist5k/zoo
runs/zoo-mnist5k/zoo, which --model.zoo names, is not there; run lightning-sym fit --config zoo/mnist5k first, or give a
folder that is, or leave the option out: runs/zoo-mnist5k-mlp/zoo is then made, by zoo/mnist5k_mlp.
$ fit --config stitching/mnist5k --model.zoo=runs/zoo-mnist5kk/zoo
runs/zoo-mnist5kk/zoo, which --model.zoo names, is not there; give a folder that is, or leave the option out:
runs/zoo-mnist5k/zoo is then made, by zoo/mnist5k.
"""


PYTHON = """
$ ModelZoo.open("nowhere")
FileNotFoundError: No zoo at .../nowhere: the folder does not exist. Train one first, for example lightning-sym fit
--config zoo/mnist5k.
$ ModelZoo.open("empty")
FileNotFoundError: The zoo at .../empty holds no members. Train some into it first.
$ ModelZoo.open("zoo").load(7)
ValueError: No member 7 in zoo; it has members 0-1.
$ ModelZoo.open("zoo").load("0")
ValueError: No member '0' in zoo; it has members 0-1.
$ MNISTDataModule(download=False).setup("fit")
FileNotFoundError: MNIST is not in .../data/MNIST/raw (missing: ...); copy them there, or set root to a folder that has
them (now 'data'), or set download to true.
$ DigitsDataModule(mean=[0.5, 0.5], std=[1, 1])
ValueError: mean must have one value per channel (1), got 2: [0.5, 0.5].
$ recipe_path("zoo/mnist6k")
ValueError: Unknown recipe 'zoo/mnist6k'. Did you mean 'zoo/mnist5k'?
$ MultiLayerPerceptron([4, 0])
ValueError: widths[1] must be an integer >= 1, got 0.
$ perceptron(4)(larger)
ValueError: MultiLayerPerceptron was built for images of shape [N, 1, 8, 8] and cannot take [2, 1, 28, 28]; use data of
the kind that it was trained on.
$ perceptron(4).double()(torch.randn(2, 1, 8, 8))
ValueError: The network has weights in torch.float64 and cannot take inputs in torch.float32; convert them, or set the
precision of the trainer to '64-true'.
$ ZooTask(torch.nn.Linear(64, 10))
TypeError: network must be a lightning_sym Network, got Linear; wrap any other module:
Network.wrap(functools.partial(YourModule, ...)).
$ ZooTask(perceptron(4), members=0)
ValueError: members must be an integer >= 1, got 0.
$ StitchingTask("zoo", maps=["ful"])
ValueError: Unknown stitching map 'ful'; expected one of: full, rank(1), lasso(0.01), group, group(euclidean), softsort,
orthogonal, identity, least_squares, assignment, procrustes. Did you mean 'full'?
$ MatchingTask("zoo", methods=["weight"])
ValueError: Unknown method 'weight'; expected one of: permutations, ... soft_maps. Did you mean 'weights'?
$ RotationTask("zoo", kinds=["grp"])
ValueError: kinds must be a list of different ones of group, orthogonal, none, undo, got ['grp'].
$ MarginalLikelihood(burn_in=-1)
ValueError: burn_in must be an integer >= 1, got -1.
$ stitching_map("full(3)")
ValueError: The stitching map 'full' takes no argument, got 'full(3)'.
$ CutNetwork(torch.nn.Linear(3, 3), example=images)
TypeError: network must be a Network with known sites, got Linear; pass Network.wrap(network).
$ CutNetwork(perceptron(4), ["activaton1"], example=images)
ValueError: Unknown site 'activaton1'; expected one of: activation1. Did you mean 'activation1'?
$ StitchedNetwork(cut(4), cut(4), "activation7")
ValueError: The network is not cut at 'activation7', only at activation1.
$ StitchedNetwork(cut(4), cut(5), "activation1")
ValueError: GroupMap needs equal widths, got 4 channels in and 5 out; use FullMap, LowRankMap or LassoMap.
$ trace_symmetry(perceptron(4), larger)
UnfitInputsError: the network does not run on the example input, because of ...; expected an input as the network takes
it, several as a tuple or by name
$ weight_matching(trace_symmetry(perceptron(4), images), perceptron(4), perceptron(5))
ValueError: b is not of the traced architecture: the network has shape [5, 64] there: linear1.weight; expected shape
[4, 64], as in the traced network.
$ barrier(perceptron(4), perceptron(5), [(images, torch.tensor([0, 1]))])
ValueError: The networks differ: the parameter 'linear1.weight' is of shape [4, 64] and dtype float32 in the first and
of shape [5, 64] and dtype float32 in the second; pass two of one architecture.
$ Grid(2, points=1, bound=1.0)
ValueError: points of a grid must be an integer >= 2, got 1.
"""


NEEDS = """
from pytorch_lightning import Callback


class Needs(Callback):
    def __init__(self, threshold):
        self.threshold = threshold
"""


def entries(text, *before):
    """Return what is typed and what is said, for each entry of a transcript."""
    parts = [entry.partition("\n") for entry in text.strip().removeprefix("$ ").split("\n$ ")]
    return [pytest.param(*before, typed, " ".join(said.split()), id=typed) for typed, _, said in parts]


def assert_says(found, sentence):
    assert re.fullmatch(".*".join(map(re.escape, sentence.split("..."))), found, re.DOTALL), found


@pytest.mark.parametrize(("status", "command", "sentence"), [*entries(NOT_UNDERSTOOD, 2), *entries(FAILED, 1)])
@pytest.mark.long
def test_the_command_line_says_in_one_line_what_is_wrong(status, command, sentence, monkeypatch):
    Path("words.yaml").write_text("just words")
    Path("broken.yaml").write_text("model: [")
    Path("bytes.yaml").write_bytes(b"\xff\xfe\x00")
    Path("section.yaml").write_text("modle: {class_path: ZooTask}")
    Path("twice.yaml").write_text("model:\n  members: 2\n  members: 3\n")
    Path("folder").mkdir()
    Path("needs.py").write_text(NEEDS)
    Path("misspelt.py").write_text("from lightning_sym.reports import Colum\n\nclass Net: ...")
    Path("divides.py").write_text("class Task: ...\n1 / 0")
    Path("raises.py").write_text("import does_not_exist_anywhere\n\nclass Task: ...")
    monkeypatch.syspath_prepend(Path.cwd())
    torch.save({"x": torch.randn(64, 1, 8, 8), "y": torch.randn(64, 1)}, "values.pt")
    classes = torch.arange(64) % 3
    one_hot = torch.nn.functional.one_hot(classes)
    torch.save({"x": torch.randn(64, 1, 8, 8), "y": one_hot}, "one_hot.pt")
    torch.save({"x": torch.randn(64, 1, 8, 8), "y": 0 * classes}, "one_class.pt")
    lightning = {"state_dict": {}, "pytorch-lightning_version": "2.6.0"}
    torch.save({**lightning, "hyper_parameters": [1]}, "list.ckpt")
    torch.save({"state_dict": {}, "epoch": 3}, "weights.ckpt")
    files = set(Path().iterdir())
    name, *options = shlex.split(command)
    if options[:1] == ["SMALL"]:
        options = [*SMALL, "--run_dir=run", *QUIET, *options[1:]]
    result = call(name, *options)
    assert result.status == status, result.err
    assert_says(result.error, sentence)
    there = {path for path in Path().iterdir() if path.name != "__pycache__"}
    assert status == 1 or there == files  # nothing is begun before all is understood


def perceptron(width):
    return networks.MultiLayerPerceptron([width], image_size=8)


@pytest.fixture
def names():
    """Return all that is public, and a few things to call it with."""
    rooms = (callbacks, connectivity, datamodules, landscape, networks, recipes, stitching, symmetry, tasks, zoo)
    images = torch.zeros(2, 1, 8, 8)
    own = {"torch": torch, "perceptron": perceptron, "images": images, "larger": torch.zeros(2, 1, 28, 28)}
    own["cut"] = lambda width: stitching.CutNetwork(perceptron(width), example=images)
    return {name: value for room in rooms for name, value in vars(room).items()} | own


@pytest.mark.parametrize(("expression", "sentence"), entries(PYTHON))
def test_python_says_what_is_wrong(expression, sentence, names):
    Path("empty").mkdir()
    write_zoo(Path("zoo"), [perceptron(4), perceptron(4)], datamodules.DigitsDataModule(max_samples=64))
    with pytest.raises((OSError, TypeError, ValueError)) as caught:
        eval(expression, names)
    assert_says(f"{caught.type.__name__}: {caught.value}", sentence)
