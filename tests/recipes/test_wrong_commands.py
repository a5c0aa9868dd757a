"""Wrong command lines of many kinds: each is answered by one sentence, before anything slow is imported."""

import gc
import inspect
import json
import re
import shlex
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest
from commands import call
from test_sentences import assert_says, entries

import lightning_sym.cli
from lightning_sym.cli import checking, merging, reparametrize
from lightning_sym.figures.files import FORMATS, FigureSize
from lightning_sym.merging import METHODS
from lightning_sym.orbit.objectives import OBJECTIVES

SHORT = {
    "ASK": "--network=own_nets.Net --data=DigitsDataModule",
    "MODELS": "a.pt b.pt --network=own_nets.Net",
    "ONE": "a.pt --network=own_nets.Net --out=m.safetensors",
    "SMALL": "--model=ZooTask --model.network=MultiLayerPerceptron --data=DigitsDataModule",
}

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
'trainer'? Also the name of a class of lightning_sym, or the full path of another class.
$ fit --help SimilarityReprt
Unknown section 'SimilarityReprt'; ... Did you mean 'SimilarityReport'? ...
$ fit --help trainer.devices
Unknown section 'trainer.devices'; ... Did you mean 'trainer'? ...
$ import a.pt --network=own_nets.Net
Missing: --out; give for example --out runs/mine/zoo.
$ import a.pt --network.width=8 --out=zoo
Missing: --network; give for example --network my_networks.Net.
$ import --network=own_nets.Net --out=zoo
Missing: the file of a checkpoint.
$ spectrum --data=DigitsDataModule
spectrum takes one or more checkpoints, or a zoo; got none.
$ similarity a.pt ASK
similarity takes two or more checkpoints, or a zoo; got a.pt.
$ curve zoo a.pt ASK
zoo is a zoo; expected one zoo alone, or the files of checkpoints.
$ curve a.pt ASK
curve takes two or more checkpoints, or a zoo; got a.pt.
$ spectrum a.pt
Missing: --network, --data; give for example --network my_networks.Net --data MNIST5kDataModule.
$ evidence a.pt --data=DigitsDataModule
Missing: --network; give for example --network my_networks.Net.
$ learning-coefficient a.pt --network=own_nets.Net
Missing: --data; give for example --data MNIST5kDataModule.
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
$ spectrum a.pt ASK --input=3,4
spectrum has no option 'input'. The shape of an input follows from --data.
$ spectrum a.pt ASK --run_dir=x
spectrum has no option 'run_dir'. The run folder is --out.
$ spectrum a.pt ASK -out x
Unknown option '-out'; options begin with two dashes, as in --out.
$ similarity a.pt b.pt ASK --figures=jpg
Unknown word of --figures 'jpg'; expected one of: png, pdf, svg. ...
$ curve a.pt b.pt ASK --figures=pdf --figure_size=tiny
Unknown word of --figure_size 'tiny'; expected one of: column, page.
$ spectrum a.pt --network=own_nets.Net --data=own_nets
data: own_nets is a module; name a class in it, as own_nets.Net.
$ spectrum a.pt --network=own_nets.Net --data=DatasetDataModule --data.dataset=own_nets.Nets
data.dataset: There is no class own_nets.Nets. Did you mean 'Net'?
$ fit SMALL --model.network=own_nets.Nett
model.network: There is no class own_nets.Nett. Did you mean 'Net'?
$ fit SMALL --data=DigitsDatamodule
data: Unknown class 'DigitsDatamodule'; ... Did you mean 'DigitsDataModule'?
$ fit SMALL --data=Digits
data: Unknown class 'Digits'; ... Did you mean 'DigitsDataModule'?
$ fit SMALL --trainer.callbacks+=EarlyStoping
trainer.callbacks: Unknown class 'EarlyStoping'; ... Did you mean 'EarlyStopping'?
$ fit --config=named.yaml
model.network: The module 'own_nets' of this folder is named in a file only, which is not trusted to import it; add
--model.allow '[own_nets]'.
$ fit -config zoo/mnist5k
Unknown option '-config'; options begin with two dashes, as in --config.
$ fit --config zoo/mnist5k --epochs 3
Unknown option 'epochs'. Did you mean 'trainer.max_epochs'?
$ --config zoo/mnist5k
Expected a command, got --config; for example lightning-sym fit --config zoo/mnist5k.
$ recipes zoo/mnist5k stitching/mnist5k
recipes takes one name or none, got zoo/mnist5k stitching/mnist5k.
$ merge MODELS
Missing: --out; give for example --out merged.safetensors.
$ merge MODELS -o m.safetensors
Unknown option '-o'; options begin with two dashes, as in --o.
$ merge a.pt b.pt --architecture=own_nets.Net --out=m.safetensors
merge has no option 'architecture'. Did you mean 'network'?
$ spectrum a.pt --arch=own_nets.Net
spectrum has no option 'arch'. Did you mean 'network'?
$ merge --network=own_nets.Net --method=passthrough --out=m.safetensors
Expected two or more checkpoints, got none.
$ merge MODELS --out=m.safetensors --base=
Option 'base' has no value; give one, as in --base VALUE.
$ merge MODELS --prefix --out=m.safetensors
Option 'prefix' has no value; give one, as in --prefix VALUE.
$ spectrum a.pt --network=own_nets.Net --prefix
Option 'prefix' has no value; give one, as in --prefix VALUE.
$ reparametrize ONE --objective=weight_norm --factors=
Option 'factors' has no value; give one, as in --factors VALUE.
$ merge MODELS --out=m.safetensors --seed=4294967296
--seed takes a whole number from 0 to 4294967295, got 4294967296.
$ reparametrize ONE --objective=weight_norm --seed=99999999999999999999
--seed takes a whole number from 0 to 4294967295, got 99999999999999999999.
$ merge MODELS --out=m.safetensors --method=tie
Unknown method 'tie'; expected one of: linear, ... Did you mean 'ties'?
$ merge MODELS --out=m.safetensors --out-dtype=bf16
Unknown word of --out-dtype 'bf16'; ... Did you mean 'bfloat16'?
$ merge MODELS --out=m.safetensors --weight=half,half
--weight takes a number, or one for each model with commas, as in 0.5,0.3; got 'half,half'.
$ merge MODELS --out=m.safetensors --normalize=maybe
--normalize takes true or false, got 'maybe'.
$ merge MODELS --out=m.safetensors --align=both
--align takes auto, weights, activations, none...
$ merge MODELS --out=m.safetensors --method=weights
...says how to align, not how to merge: --align...
$ merge named.yaml --out=m --method=ties
--method is set by named.yaml; change it there.
$ merge MODELS --out=m.safetensors --points=1
--points takes a whole number >= 2, got 1.
$ merge MODELS --out=m.safetensors --recalibrate=3
--recalibrate takes no value, got 3.
$ reparametrize --objective=weight_norm --out=m
Expected one checkpoint, got none.
$ reparametrize ONE
Expected one of --objective and --apply, got neither.
$ reparametrize ONE --objective=quantisation_error
...Did you mean 'quantization_error'?
$ reparametrize ONE --objective=weight_norm --start=hadamad
...Did you mean 'hadamard'?
$ reparametrize ONE --objective=weight_norm --max_step=3
reparametrize has no option 'max_step'. Did you mean 'max_steps'?
$ reparametrize ONE --objective=quantization_error --bits=4
...Did you mean 'objective.bits'?
$ reparametrize ONE --objective=weight_norm --max_steps=-3
--max_steps takes a whole number >= 0, got -3.
$ reparametrize ONE --objective=weight_norm --budget=0
--budget takes a number > 0, got 0.
$ reparametrize ONE --objective=weight_norm --inverse
--inverse needs --apply...
$ reparametrize ONE --apply=folder --factors=scales
--factors needs --objective...
$ reparametrize ONE --objective=quantization_error --objective.bit=3
quantization_error has no option 'objective.bit'. Did you mean 'objective.bits'?
$ reparametrize ONE --objective=quantization_error --objective.bits=many
--objective.bits takes a number, got 'many'.
$ reparametrize ONE --objective=sharpness --objective.kind=range
Unknown word of --objective.kind 'range'; expected one of: trace, top. ...
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
network: There is no module 'nowhere'. If it is yours, run this in its folder, or put that on PYTHONPATH.
$ import a.pt --network=MyrtleCN --out=zoo
network: Unknown class 'MyrtleCN'; give its full path, or the name of a shipped class. Did you mean 'MyrtleCNN'?
$ import a.pt --network=own_nets.Nett --out=zoo
network: There is no class own_nets.Nett. Did you mean 'Net'?
$ import a.pt --network=own_nets.py --out=zoo
network: own_nets.py is a module; name a class in it, as own_nets.Net.
$ import a.pt --network=own_nets --out=zoo
network: own_nets is a module; name a class in it, as own_nets.Net.
$ import a.pt --network=broken_nets.Net --out=zoo
broken_nets.py, line 1: ...; Python cannot read this module.
$ import a.pt --network=b.pt --out=zoo
network: b.pt is a file; expected a class, as my_networks.Net, or torchvision:resnet18.
$ import a.pt --network=own_nets.Net --data=MNIST5kDatamodule --out=zoo
data: Unknown class 'MNIST5kDatamodule'; ... Did you mean 'MNIST5kDataModule' or 'MNISTDataModule'?
$ import a.pt --network=own_nets.Net --out=b.pt
b.pt is a file; expected a folder.
$ import a.pt --network=own_nets.Net --out=b.pt/zoo
b.pt/zoo cannot be made, as .../b.pt is a file; expected a place in a folder.
$ import shards --network=own_nets.Net --out=new
shards is a folder; expected the file of a checkpoint. It holds model.safetensors.index.json: give
shards/model.safetensors.index.json.
$ spectrum absent.pt ASK
There is no file .../absent.pt.
$ curve a.pt a.pt ASK
a.pt is there twice; leave one of them out.
$ evidence a.pt --network=nowhere:make --data=DigitsDataModule
network: There is no module 'nowhere'. If it is yours, run this in its folder, or put that on PYTHONPATH.
$ spectrum mine --data=DigitsDataModule
mine is a folder; expected the file of a checkpoint. It holds zoo: give mine/zoo.
$ evidence a.pt --network=own_nets.Net --data=TensorDataModule --data.train=absent.pt
data.train: There is no file .../absent.pt; expected a .pt, .safetensors or .npz file with x and y.
$ evidence a.pt --network=own_nets.Net --data=TensorDataModule --data.train=own_nets.py
data.train: own_nets.py is of another type; expected a .pt, .safetensors or .npz file with x and y.
$ spectrum a.pt ASK --out=b.pt
b.pt is a file; expected a folder.
$ symmetry own_nets.Nett --input=3
network: There is no class own_nets.Nett. Did you mean 'Net'?
$ symmetry folder
folder names no network; expected the folder of a model (with config.json), or a zoo.
$ symmetry a.pt
network: a.pt is a file; expected a class, as my_networks.Net, or torchvision:resnet18.
$ symmetry own_nets.Net --input=3 --out=a.pt/table.json
a.pt/table.json cannot be made, as .../a.pt is a file; expected a place in a folder.
$ merge a.pt absent.pt --network=own_nets.Net --out=m.safetensors
There is no file or folder absent.pt; expected a checkpoint, ...
$ merge a.pt shards --network=own_nets.Net --out=m.safetensors
shards is neither a zoo ... It holds model.safetensors.index.json: give shards/model.safetensors.index.json.
$ merge mine --out=m.safetensors
mine is neither a zoo ... It holds zoo: give mine/zoo.
$ merge model b.pt --out=m
model has config.json, but no weights (model.safetensors, ...); add them.
$ merge a.pt b.pt --network=own_nets.Nett --out=m.safetensors
network: There is no class own_nets.Nett. Did you mean 'Net'?
$ merge MODELS --out=m.pt
out is m.pt; expected a file that ends in .safetensors.
$ merge MODELS --out=there.safetensors
there.safetensors exists already; remove it, or choose another place for the result.
$ merge MODELS --out=old.safetensors
old-report exists already, the report of an earlier merge; remove it, or choose another --out.
$ merge MODELS --out=a.pt/m.safetensors
a.pt/m.safetensors cannot be made, as .../a.pt is a file; expected a place in a folder.
$ merge mistyped b.pt --out=m
mistyped is of model_type 'gptt2'; expected one that transformers ... knows. Did you mean 'gpt2'?
$ symmetry mistyped
mistyped is of model_type 'gptt2'; ... Did you mean 'gpt2'?
$ reparametrize mistyped --objective=weight_norm --out=m
mistyped is of model_type 'gptt2'; ... Did you mean 'gpt2'?
$ merge a.pt+absent b.pt --network=own_nets.Net --out=m.safetensors
There is no file or folder a.pt+absent; ... a.pt exists, but adapter absent is not a folder.
$ merge absent+adapter b.pt --network=own_nets.Net --out=m.safetensors
There is no file or folder absent+adapter; ... adapter exists, but model absent is not a folder or a file.
$ merge a.pt+ b.pt --network=own_nets.Net --out=m.safetensors
There is no file or folder a.pt+; expected a checkpoint, the folder of a model, a zoo, or MODEL+ADAPTER. Nothing is
downloaded.
$ merge a.pt adapter --network=own_nets.Net --out=m.safetensors
adapter is an adapter without its model; give MODEL+ADAPTER.
$ merge MODELS --out=m.safetensors --base=c.pt
There is no file or folder c.pt; ...
$ merge MODELS --out=m.safetensors --method=ties
ties needs a base, the parent of the models; pass base (--base).
$ merge MODELS --out=m.safetensors --weight=0.1,0.2,0.7
--weight holds 3 values for 2 models; expected one for all, or one for each.
$ merge MODELS --out=m.safetensors --recalibrate
--recalibrate needs data to run the networks on; give --data.
$ merge MODELS --out=m.safetensors --align=activations
--align activations needs data to run the networks on; give --data.
$ merge MODELS --out=m.safetensors --data=DigitDataModule
data: Unknown class 'DigitDataModule'; ... Did you mean 'DigitsDataModule'?
$ merge absent.yml --out=m
There is no file .../absent.yml; expected a configuration.
$ reparametrize zoo --objective=weight_norm --out=m.safetensors
zoo holds 2 networks; expected one: give one file of them.
$ reparametrize a.pt --objective=weight_norm --out=m.safetensors
a.pt does not say its network; give the folder with its config.json, or --network.
$ reparametrize adapter --objective=weight_norm --out=m
adapter holds an adapter; expected a whole model: ...
$ reparametrize ONE --objective=sharpness
sharpness needs data to run the network on; give --data, or an objective of the weights alone.
$ reparametrize ONE --objective=own_nets.Nett
objective: There is no class own_nets.Nett. Did you mean 'Net'?
$ reparametrize ONE --apply=absent.safetensors
There is no file absent.safetensors; expected an element that reparametrize wrote.
$ reparametrize ONE --apply=folder
There is no file folder/element.safetensors; expected an element that reparametrize wrote.
$ reparametrize ONE --objective=weight_norm --data=Random
data: Unknown class 'Random'; ...
$ fit SMALL --run_dir=a.pt
a.pt is a file; expected a folder.
$ fit SMALL --run_dir=a.pt/run
a.pt/run cannot be made, as .../a.pt is a file; expected a place in a folder.
$ fit SMALL --model.initial=folder
model.initial: folder is no zoo, as it holds no member-0000.safetensors; give another.
$ fit SMALL --model.initial=mine
model.initial: mine is no zoo, as it holds no member-0000.safetensors; give another. It holds zoo: give mine/zoo.
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


FILES = {
    **dict.fromkeys(("a.pt", "b.pt", "there.safetensors", "taken/checkpoints/last.ckpt"), ""),
    **dict.fromkeys(("thesis/results/years_of_work.txt", "zoo/member-0000.safetensors"), ""),
    **dict.fromkeys(("zoo/member-0001.safetensors", "mine/zoo/member-0000.safetensors"), ""),
    "own_nets.py": "from collections import Counter\n\n\nclass Net:\n    pass\n",
    "broken_nets.py": "class Net(:\n",
    "named.yaml": "model: {class_path: ZooTask, init_args: {network: own_nets.Net}}",
    "taken/config.yaml": "model: {}",
    "shards/model.safetensors.index.json": "{}",
    "model/config.json": '{"model_type": "gpt2"}',
    "mistyped/config.json": '{"model_type": "gptt2"}',
    "mistyped/model.safetensors": "",
    "adapter/adapter_config.json": "{}",
    "adapter/adapter_model.safetensors": "",
}


@pytest.fixture
def places(monkeypatch):
    """Make the files and folders that the commands name."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the command adds the folder
    for name, text in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    for folder in ("folder", "old-report"):
        Path(folder).mkdir()


def arguments(command):
    return shlex.split(re.sub(r"\b[A-Z]{3,}\b(?=$| )", lambda found: SHORT.get(found[0], found[0]), command))


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize(("status", "command", "sentence"), [*entries(NOT_UNDERSTOOD, 2), *entries(FAILED, 1)])
def test_a_wrong_command_is_answered_before_torch_is_imported(status, command, sentence, monkeypatch):
    def load(module):
        raise AssertionError(f"{module} is imported")

    monkeypatch.setattr(sys.modules[lightning_sym.cli.main.__module__], "_load", load)
    files = set(Path().rglob("*"))
    gc.disable()  # to collect what other tests left takes more than a second
    start = time.thread_time()
    result = call(*arguments(command))
    taken = time.thread_time() - start
    gc.enable()
    assert taken < 1
    assert result.status == status, result.err
    assert_says(result.error, sentence)
    assert set(Path().rglob("*")) == files
    usage = result.err.splitlines()[-1]
    assert len(usage) <= 80, usage
    assert re.match(r"usage: lightning-sym |\(LIGHTNING_SYM_TRACEBACK", usage)


@pytest.mark.usefixtures("places")
def test_none_of_these_commands_imports_torch():
    commands = [arguments(entry.values[1]) for entry in (*entries(NOT_UNDERSTOOD, 2), *entries(FAILED, 1))]
    code = (
        "import json, sys\nfrom lightning_sym.cli import main\npath = [place for place in sys.path if place]\n"
        "for line in sys.stdin:\n    sys.path[:] = path\n    main(json.loads(line))\n"
        "    assert 'torch' not in sys.modules, line\nprint('done')"
    )
    lines = "".join(f"{json.dumps(command)}\n" for command in commands)
    run = subprocess.run([sys.executable, "-c", code], input=lines, capture_output=True, text=True, check=False)
    assert run.stdout.splitlines()[-1:] == ["done"], run.stderr[-600:]


def test_names_that_are_repeated_where_torch_is_not_imported():
    assert tuple(METHODS) == merging.METHODS
    assert {name for name, method in METHODS.items() if method.base == "needed"} == {*merging.DIFFERENCES}
    assert {name: {*options} for name, options in reparametrize.OBJECTIVES.items()} == {
        name: {*inspect.signature(make).parameters} for name, make in OBJECTIVES.items()
    }
    for name, options in reparametrize.OBJECTIVES.items():
        hints = typing.get_type_hints(OBJECTIVES[name])
        for option, words in options.items():
            assert not words or option == "loss" or words == typing.get_args(hints[option]), (name, option)
    assert {"figures": FORMATS, "figure_size": typing.get_args(FigureSize)} == checking.WORDS
