"""Wrong command lines of many kinds: each is answered by one sentence, before anything slow is imported."""

import re
import shlex
import sys
import time
from pathlib import Path

import pytest
from commands import call
from test_sentences import assert_says, entries

import lightning_sym.cli

# ASK are the options of a command that takes checkpoints, SMALL those of a small task.
ASK = "--network=own_nets.Net --data=DigitsDataModule"
SMALL = "--model=ZooTask --model.network=MultiLayerPerceptron --data=DigitsDataModule"

NOT_UNDERSTOOD = """
$ Fit --config zoo/mnist5k
Unknown command 'Fit'; ... Did you mean 'fit'?
$ similarty a.pt b.pt
Unknown command 'similarty'; ... Did you mean 'similarity'?
$ fit --config zoo/mnist5k.yml
There is no recipe or file 'zoo/mnist5k.yml'. Did you mean ...'zoo/mnist5k'?
$ fit --config=folder
folder is a folder; --config takes a file, or the name of a recipe.
$ fit --help trainr
Unknown section 'trainr'; expected one of: model, network, data, callbacks, trainer, checkpoint. Did you mean
'trainer'? Also the name of a class of lightning_sym.
$ fit --help trainer.devices
Unknown section 'trainer.devices'; ... Did you mean 'trainer'? ...
$ import a.pt --network=own_nets.Net
Missing: --out.
$ import a.pt --network.width=8 --out=zoo
Missing: --network.
$ import --network=own_nets.Net --out=zoo
Missing: a file.
$ spectrum --data=DigitsDataModule
spectrum takes one or more checkpoints, or a zoo; got none.
$ similarity a.pt ASK
similarity takes two or more checkpoints, or a zoo; got a.pt.
$ curve a.pt ASK
curve takes two or more checkpoints, or a zoo; got a.pt.
$ spectrum a.pt
Missing: --network, --data.
$ evidence a.pt --data=DigitsDataModule
Missing: --network.
$ learning-coefficient a.pt --network=own_nets.Net
Missing: --data.
$ spectrum a.pt --netwrk=own_nets.Net --data=DigitsDataModule
spectrum has no option 'netwrk'. Did you mean 'network'?
$ spectrum a.pt ASK --out
Option 'out' has no value; give one, as in --out VALUE.
$ spectrum zoo ASK
zoo is a zoo, which has its network; leave out --network.
$ spectrum a.pt ASK --model.membrs=3
ZooTask has no option 'model.membrs'. Did you mean 'model.members'?
$ spectrum a.pt ASK --trainer.callbacks.stepps=3
SpectrumReport has no option 'trainer.callbacks.stepps'. Did you mean 'trainer.callbacks.steps'?
$ evidence a.pt ASK --data.batchsize=3
DigitsDataModule has no option 'data.batchsize'. Did you mean 'data.batch_size'?
$ similarity a.pt b.pt ASK --model.measure=[group]
SimilarityTask has no option 'model.measure'. Did you mean 'model.measures'?
$ symmetry own_nets.Net other.Net
Expected one network, got own_nets.Net, other.Net.
$ symmetry own_nets.Net --tokens=0
--tokens takes a whole number >= 1, got 0.
$ symmetry own_nets.Net --out=table.txt
--out takes a file that ends in .json, got table.txt.
$ symmetry own_nets.Net --input=3,0
--input takes a shape without the batch, such as 3,224,224, got 3,0.
$ estimate --config zoo/mnist5k --devices=0
--devices takes a whole number >= 1, got 0.
$ estimate --config zoo/mnist5k --bandwidth=-1
--bandwidth takes a number of gigabytes per second > 0, got -1.
$ estimate --config zoo/mnist5k --steps=few
--steps takes a whole number >= 4, got 'few'.
"""

FAILED = """
$ import absent.pt --network=own_nets.Net --out=zoo
There is no file .../absent.pt.
$ import folder --network=own_nets.Net --out=zoo
folder is a folder; expected the file of a checkpoint.
$ import a.pt --network=nowhere.Net --out=zoo
There is no module 'nowhere', which nowhere.Net needs; run this in its folder, or put that on PYTHONPATH.
$ import a.pt --network=MyrtleCN --out=zoo
There is no class 'MyrtleCN'. Did you mean 'MyrtleCNN'?
$ spectrum absent.pt ASK
There is no file .../absent.pt.
$ curve a.pt a.pt ASK
a.pt is there twice; leave one of them out.
$ evidence a.pt --network=nowhere:make --data=DigitsDataModule
There is no module 'nowhere', which nowhere:make needs; run this in its folder, or put that on PYTHONPATH.
$ spectrum a.pt ASK --out=taken
taken already holds a run; put this one elsewhere (--out FOLDER), or replace it (--overwrite true).
$ spectrum a.pt ASK --out=thesis
thesis holds results, but no config.yaml as a run does, and is not replaced; choose another folder (--out FOLDER), or
delete its contents.
$ similarity a.pt b.pt ASK --model.measures=[orthogonl]
model.measures: Unknown measure 'orthogonl'; expected one of: group, orthogonal, cka_linear, cka_max, cka_laplace. Did
you mean 'orthogonal'?
$ fit --config similarity/mnist5k --model.measures=[cka]
model.measures: Unknown measure 'cka'; ...
$ fit --config similarity/mnist5k '--model.measures={live: {measure: grup}}'
model.measures: Unknown measure 'grup'; ... Did you mean 'group'?
$ fit SMALL --trainer.callbacks+=SimilarityMonitor --trainer.callbacks.measures=[linear_cka]
trainer.callbacks.measures: Unknown measure 'linear_cka'; ... Did you mean 'cka_linear'?
$ fit SMALL --run_dir=taken
taken already holds a run; resume it (--ckpt_path last), put this one elsewhere (--run_dir FOLDER), or replace it
(--overwrite true).
$ fit SMALL --run_dir=thesis --overwrite=true
thesis holds results, but no config.yaml as a run does, and is not replaced; ...
$ fit SMALL --ckpt_path=absent.ckpt
No checkpoint at .../absent.ckpt; give a file, or last.
$ validate SMALL --run_dir=other
Nothing to validate: .../other/checkpoints/last.ckpt does not exist; run lightning-sym fit with these options first, ...
$ predict --config=zoo/mnist5k --run_dir=other
Nothing to predict: .../other/checkpoints/last.ckpt does not exist; ...
$ fit --config stitching/mnist5k --model.zoo=nowhere
nowhere, which --model.zoo names, is not there; give a folder that is, or leave the option out: runs/zoo-mnist5k/zoo is
then made, by zoo/mnist5k.
$ fit --config stitching/mnist5k --requires=null --model.zoo=nowhere
model.zoo: No zoo at .../nowhere: the folder does not exist. Train one first, for example ...
$ fit SMALL --model.initial=runs/zoo-digits-mlp/zoo
model.initial: No zoo at ...: the folder does not exist. Train one first, for example lightning-sym fit --config
zoo/digits_mlp.
$ compare taken
taken has not ended: ...
$ compare a.pt taken
a.pt is a file; expected the folder of a run (with config.yaml), or of several runs.
"""


@pytest.fixture
def places():
    """Make the files and folders that the commands name."""
    for name in ("a.pt", "b.pt", "own_nets.py"):
        Path(name).write_text("")
    for folder in ("taken/checkpoints", "thesis/results", "zoo", "folder"):
        Path(folder).mkdir(parents=True)
    Path("taken/config.yaml").write_text("model: {}")
    Path("taken/checkpoints/last.ckpt").touch()
    Path("thesis/results/years_of_work.txt").touch()
    Path("zoo/member-0000.safetensors").touch()


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize(("status", "command", "sentence"), [*entries(NOT_UNDERSTOOD, 2), *entries(FAILED, 1)])
def test_a_wrong_command_is_answered_before_torch_is_imported(status, command, sentence, monkeypatch):
    def load(module):
        raise AssertionError(f"{module} is imported")

    monkeypatch.setattr(sys.modules[lightning_sym.cli.main.__module__], "_load", load)
    files = set(Path().rglob("*"))
    start = time.process_time()
    result = call(*shlex.split(command.replace("ASK", ASK).replace("SMALL", SMALL)))
    assert time.process_time() - start < 1
    assert result.status == status, result.err
    assert_says(result.error, sentence)
    assert set(Path().rglob("*")) == files
    usage = result.err.splitlines()[-1]
    assert len(usage) <= 80, usage
    assert re.match(r"usage: lightning-sym |\(LIGHTNING_SYM_TRACEBACK", usage)
