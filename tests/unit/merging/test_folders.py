"""Folders of models in and out: what ``from_pretrained`` needs, whole or not at all."""

import contextlib
import errno
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_sym._checkpoint_files import _model_types, check_model_type
from lightning_sym.merging import merge_checkpoints
from lightning_sym.merging.checkpoint import Checkpoint, find_checkpoints, model_of
from lightning_sym.merging.folders import check_configurations
from lightning_sym.models import example_of
from lightning_sym.networks import LeNet5
from lightning_sym.symmetry import files as symmetry_files
from lightning_sym.symmetry import trace_symmetry
from lightning_sym.symmetry.tracing.graph.capture import state_tensors
from lightning_sym.zoo import ModelZoo

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": 14, "max_position_embeddings": 32}
MODELS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=14, n_positions=32)
    ),
    "grouped llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_key_value_heads=2)),
    "tied qwen": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**TEXT, num_key_value_heads=2, tie_word_embeddings=True)
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**SIZES, image_size=8, patch_size=4, num_channels=1, num_labels=3)
    ),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def made(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    network = MODELS[kind]().eval()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    return network


def saved(network: Any, name: str, form: str = "one") -> str:
    """Write a folder: of one file, of shards, or of pickles as older versions wrote them."""
    network.save_pretrained(name, max_shard_size="2KB" if "shards" in form else "5GB")
    if "pickle" in form:
        for file in sorted(Path(name).glob("*.safetensors")):
            file.unlink()
        state = network.state_dict()
        if form == "pickle":
            torch.save(state, Path(name, "pytorch_model.bin"))
        else:
            Path(name, "model.safetensors.index.json").unlink()
            files = {key: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, key in enumerate(state)}
            for file in sorted(set(files.values())):
                torch.save({key: state[key] for key in state if files[key] == file}, Path(name, file))
            index = {"metadata": {"total_size": 1}, "weight_map": files}
            Path(name, "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return name


def read(name: str, **settings: Any) -> Checkpoint:
    (found,) = find_checkpoints(name)
    return Checkpoint.read(found.file, model_of(found).network, **settings)


def floating(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state_tensors(network).items() if tensor.is_floating_point()}


def loaded(kind: str, name: str) -> Any:
    """Read a folder as transformers does, and check that it fits."""
    network, info = type(made(kind)).from_pretrained(name, local_files_only=True, output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info[what], (what, info[what])
    return network.eval()


def outputs(network: Any) -> Tensor:
    if network.main_input_name == "pixel_values":
        found: Tensor = network(torch.linspace(-1, 1, 128).view(2, 1, 8, 8)).logits
    else:
        found = network(torch.arange(12).view(2, 6)).logits
    return found.detach()


class Once(Mapping[str, Tensor]):
    """Tensors that can be read once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.seen = tensors, set[str]()

    def __getitem__(self, name: str) -> Tensor:
        assert name not in self.seen
        self.seen.add(name)
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@pytest.mark.parametrize("form", ["one", "shards", "pickle", "shards of pickles"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.few(4)
def test_written_folders_are_loaded_and_compute_the_same(kind: str, form: str) -> None:
    parent = made(kind)
    reference = read(saved(made(kind, 1), "reference", form))
    weights = Once(floating(read(saved(parent, "parent")).network))
    written = reference.write(weights, "out", beside={"README.md": lambda path: path.write_text("# A model\n")})
    assert weights.seen == {name for name in reference.names.values() if name in weights.tensors}
    again = loaded(kind, "out")
    assert torch.equal(outputs(again), outputs(parent))
    if hasattr(parent, "generate") and kind != "bert" and kind != "vit":
        ids = torch.tensor([[1, 2, 3]])
        settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(again.generate(ids, **settings), parent.generate(ids, **settings))
    assert Path("out/README.md").read_text() == "# A model\n"
    names = {
        path.name.replace("pytorch_model", "model").replace(".bin", ".safetensors")
        for path in Path("reference").iterdir()
    }
    assert {path.name for path in Path("out").iterdir()} == names | {"README.md"}
    if "shards" in form:
        index = json.loads(written.read_text())
        files = {file: load_file(f"out/{file}") for file in set(index["weight_map"].values())}
        assert len(files) > 1
        assert {key: file for file, own in files.items() for key in own} == index["weight_map"]
        assert index["metadata"]["total_size"] == sum(t.nbytes for own in files.values() for t in own.values())
    for file in Path("out").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
    if kind in ("gpt2", "tied qwen"):
        held = {key for file in Path("out").glob("*.safetensors") for key in load_file(file)}
        assert "lm_head.weight" not in held


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "grouped llama", "tied qwen"])
@pytest.mark.parametrize("settings", [{}, {"base": "image-0", "method": "ties", "density": 0.5}])
def test_merged_images_of_a_parent_generate_its_tokens(kind: str, settings: dict[str, Any]) -> None:
    parent = made(kind)
    (found,) = find_checkpoints(saved(parent, "parent"))
    example = example_of(model_of(found))
    symmetry = trace_symmetry(parent, *example.positional, output=example.output, **example.keywords)
    images = [
        saved(symmetry.act(symmetry.sample(torch.Generator().manual_seed(seed)), parent), f"image-{seed}")
        for seed in range(3)
    ]
    plain = merge_checkpoints(images, "plain", align="none")
    assert min(after for _, after in plain.distances) > 1
    merged = merge_checkpoints(images, "merged", **settings)
    assert max(after for _, after in merged.distances) < 1e-3
    ids = torch.arange(12).view(2, 6)

    def tokens(network: Any) -> Tensor:
        found: Tensor = network.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None)
        return found

    expected = tokens(parent)
    assert len(set(expected[:, 6:].flatten().tolist())) > 2
    assert torch.equal(tokens(loaded(kind, "merged")), expected)
    assert not torch.equal(tokens(loaded(kind, "plain")), expected)


def test_all_files_but_other_weights_and_training_states_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    saved(made("gpt2"), "reference")
    copied = {
        "generation_config.json": "{}",
        "tokenizer.json": "{}",
        "tokenizer_config.json": "{}",
        "chat_template.jinja": "{{ x }}",
        "preprocessor_config.json": "{}",
        "modeling_own.py": "raise SystemExit('this code ran')",
        "additional_chat_templates/tools.jinja": "{{ y }}",
        "vocab.txt": "a",
        "tokenizer.model": "b",
        "1_Pooling/config.json": "{}",
        "2_Dense/config.json": "{}",
        "2_Dense/model.safetensors": "c",
        "modules.json": json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]),
        "original/params.json": "{}",
        "onnx/config.json": "{}",
    }
    left_out = (
        *("README.md", ".gitattributes", "tf_model.h5", "flax_model.msgpack", "pytorch_model.bin", "optimizer.pt"),
        *("model.onnx", "model.gguf", "trainer_state.json", "training_args.bin", "rng_state.pth", "scheduler.pt"),
        *("checkpoint-5/config.json", "onnx/model.onnx", ".git/HEAD", "adapter_config.json", "model.fp16.safetensors"),
        *("original/consolidated.00.pth", "speech/adapter_model.safetensors", "coreml/large"),
    )
    for name, text in {**copied, **dict.fromkeys(left_out, "no part of the result")}.items():
        path = Path("reference", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr("lightning_sym.merging.folders._SMALL", 30)
    Path("reference/coreml/large").write_text("x" * 31)
    configuration = json.loads(Path("reference/config.json").read_text())
    configuration["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}
    Path("reference/config.json").write_text(json.dumps(configuration))
    reference = read("reference")
    reference.write(floating(reference.network), "out")
    assert reference.left_behind("out.safetensors") == ()
    left, modules = reference.left_behind("out")
    assert left == (
        "not copied from reference, as weights of another format or part are not merged: coreml/large, "
        "flax_model.msgpack, model.fp16.safetensors, model.gguf, model.onnx and 5 more"
    )
    assert modules == "copied from reference unchanged, as further modules are not merged: 2_Dense/model.safetensors"
    there = {str(path.relative_to("out")) for path in Path("out").rglob("*") if path.is_file()}
    assert there == {*copied, "config.json", "model.safetensors"}
    for name, text in copied.items():
        assert Path("out", name).read_text() == text
    assert json.loads(Path("out/config.json").read_text())["auto_map"] == configuration["auto_map"]


def test_types_are_those_of_the_reference_or_as_asked() -> None:
    network = made("grouped llama").to(torch.bfloat16)
    network.model.norm.float()
    saved(network, "reference")
    state, reference = load_file("reference/model.safetensors"), read("reference")
    assert state["model.norm.weight"].dtype == torch.float32
    weights = floating(reference.network)
    reference.write(weights, "same")
    assert {k: t.dtype for k, t in load_file("same/model.safetensors").items()} == {
        k: t.dtype for k, t in state.items()
    }
    assert Path("same/config.json").read_bytes() == Path("reference/config.json").read_bytes()
    reference.write(weights, "half", out_dtype="float16")
    for key, tensor in load_file("half/model.safetensors").items():
        assert tensor.dtype == (torch.float32 if key == "model.norm.weight" else torch.float16)
        assert torch.equal(tensor.float(), state[key].float().to(tensor.dtype).float())
    assert json.loads(Path("half/config.json").read_text())["dtype"] == "float16"
    assert loaded("grouped llama", "half").lm_head.weight.dtype == torch.float16
    assert_refused(reference.write, weights, "no", out_dtype="int4", says="Unknown out_dtype 'int4'")
    large = {**weights, "lm_head.weight": weights["lm_head.weight"] * 1e9}
    assert_refused(
        reference.write, large, "no", out_dtype="float16", says="lm_head.weight would hold numbers that torch"
    )
    assert {path.name for path in Path().iterdir()} == {"reference", "same", "half"}


def test_ignored_tensors_of_the_reference_are_copied() -> None:
    saved(made("bert"), "reference")
    state = load_file("reference/model.safetensors")
    extra = {"head.weight": torch.ones(3), "bert.embeddings.position_ids": torch.arange(32)[None]}
    save_file({**state, **extra}, "reference/model.safetensors", {"format": "pt"})
    says = ("holds 'head.weight', which BertForMaskedLM has not; leave them out with --ignore 'head.*', or pass",)
    (found,) = find_checkpoints("reference")
    network = model_of(found).network
    assert_refused(Checkpoint.read, found.file, network, says=says)
    reference = Checkpoint.read(found.file, network, ignore=["head.*", "*.layer.1.*"])
    assert reference.ignored == {name for name in reference.names.values() if ".layer.1." in name}
    other = floating(made("bert", 1))
    reference.write(other, "out")
    for key, tensor in load_file("out/model.safetensors").items():
        same = key in extra or ".layer.1." in key
        assert torch.equal(tensor, ({**state, **extra})[key] if same else other[reference.names[key]])


@pytest.mark.parametrize("lacks", ["bert.encoder.layer.1.output.dense.bias"])
def test_ignored_tensors_that_are_missing_have_the_value_of_the_reference(lacks: str) -> None:
    for number, name in enumerate("ab"):
        saved(made("bert", number), name)
    state = load_file("b/model.safetensors")
    save_file({key: tensor for key, tensor in state.items() if key != lacks}, "b/model.safetensors", {"format": "pt"})
    says = (f"does not hold '{lacks}' of BertForMaskedLM", f"or leave them out with --ignore '{lacks}'.")
    assert_refused(read, "b", says=says)
    assert_refused(lambda: read("b", ignore=[lacks]), says=f"does not hold {lacks}, which is ignored, but")
    a = read("a")
    b = Checkpoint.read("b/model.safetensors", a.network, ignore=[lacks])
    assert torch.equal(b.network.state_dict()[lacks], a.network.state_dict()[lacks])
    assert b.ignored == {lacks}


def test_a_backbone_in_the_file_fits_the_network_around_it() -> None:
    """Checkpoints of base models, such as the first GPT-2, lack the prefix of the network with a head."""
    network = made("gpt2")
    network.transformer.save_pretrained("reference")
    configuration = json.loads(Path("reference/config.json").read_text())
    Path("reference/config.json").write_text(json.dumps({**configuration, "architectures": ["GPT2LMHeadModel"]}))
    reference = read("reference")
    assert torch.equal(outputs(reference.network), outputs(network))
    reference.write(floating(reference.network), "out")
    assert load_file("out/model.safetensors").keys() == load_file("reference/model.safetensors").keys()
    assert torch.equal(outputs(loaded("gpt2", "out")), outputs(network))


def test_tensors_that_transformers_joins_are_named() -> None:
    sizes = {**TEXT, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    torch.manual_seed(0)
    network = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).eval()
    network.save_pretrained("parts")
    says = (
        "as it reads MixtralForCausalLM; write them joined, with save_pretrained(..., save_original_format=False).",
    )
    assert_refused(read, "parts", says=says)
    network.save_pretrained("joined", save_original_format=False)
    reference = read("joined")
    reference.write(floating(reference.network), "out")
    again = transformers.MixtralForCausalLM.from_pretrained("out").eval()
    torch.testing.assert_close(outputs(again), outputs(network))


def test_weights_that_are_tied_here_and_different_there_are_refused() -> None:
    saved(made("tied qwen"), "tied")
    untied = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**TEXT, num_key_value_heads=2, tie_word_embeddings=False)
    )
    saved(untied, "untied")
    network = read("tied").network
    says = "holds other values of 'lm_head.weight' than of 'model.embed_tokens.weight', which are tied in"
    assert_refused(Checkpoint.read, "untied/model.safetensors", network, says=says)
    files = [Path(name, "model.safetensors") for name in ("tied", "untied")]
    says = "untied/config.json states tie_word_embeddings: False, but tied/config.json True"
    assert_refused(check_configurations, files, says=says)


def test_configurations_are_compared_by_what_they_mean() -> None:
    for name in "abc":
        saved(made("grouped llama"), name)
    files = [Path(name, "model.safetensors") for name in "abc"]
    content = json.loads(Path("b/config.json").read_text())
    del content["attention_bias"]  # an entry that older versions did not write
    Path("b/config.json").write_text(
        json.dumps({**content, "dtype": "float16", "eos_token_id": 3, "id2label": {"0": "x"}})
    )
    Path("a/chat_template.jinja").write_text("one")
    Path("b/tokenizer_config.json").write_text(json.dumps({"chat_template": "two"}))
    Path("c/chat_template.jinja").write_text("one")
    assert check_configurations(files) == (
        "the chat templates of b and a differ: those of a are taken",
        "the names of the labels of b and a differ: those of a are taken",
    )
    Path("b/config.json").write_text(json.dumps({**content, "attention_bias": True}))
    assert_refused(
        check_configurations, files, says="b/config.json states attention_bias: True, but a/config.json False"
    )
    Path("b/config.json").write_text(json.dumps({**content, "vocab_size": 15}))
    says = "b has a vocabulary of 15 and a one of 14; save b with resize_token_embeddings(14) of transformers first"
    assert_refused(check_configurations, files, says=says)


# ---- what is found


def test_paths_of_files_folders_zoos_and_adapters() -> None:
    saved(made("gpt2"), "model")
    network = LeNet5()
    ModelZoo.add("zoo", [network, LeNet5()], network=network)
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text("{}")
    Path("adapter/adapter_model.safetensors").write_bytes(b"")
    Path("x.pt").write_bytes(b"")
    (model,) = find_checkpoints("model")
    assert (model.file, model.folder, model.adapter) == (Path("model/model.safetensors"), Path("model"), None)
    assert model.configuration is not None
    assert model.configuration["model_type"] == "gpt2"
    assert find_checkpoints("model/config.json")[0].file == model.file
    assert find_checkpoints("model/model.safetensors")[0].folder == Path("model")
    zoo = find_checkpoints("zoo")
    assert [one.file for one in zoo] == [Path(f"zoo/member-000{number}.safetensors") for number in range(2)]
    assert {one.folder for one in zoo} == {None}
    assert type(model_of(zoo[0]).network) is LeNet5
    (alone,) = find_checkpoints("adapter")
    assert (alone.file, alone.folder, alone.adapter) == (
        Path("adapter/adapter_model.safetensors"), None, Path("adapter"),
    )  # fmt: skip
    (both,) = find_checkpoints("model+adapter")
    assert (both.given, both.file, both.folder, both.adapter) == (
        "model+adapter", model.file, model.folder, Path("adapter"),
    )  # fmt: skip
    for inside, given in (("model", ".+../adapter"), ("adapter", "../model+.")):
        with contextlib.chdir(inside):
            assert find_checkpoints(given)[0].adapter == Path(given.split("+")[1])
    (file,) = find_checkpoints("x.pt")
    assert (file.file, file.folder) == (Path("x.pt"), None)
    Path("with").mkdir()
    shutil.move("model", "with/checkpoint-5")
    Path("cache/snapshots").mkdir(parents=True)
    shutil.copytree("with/checkpoint-5", "cache/snapshots/1a2b")
    for path, says in (
        ("cache", "It holds snapshots/1a2b: give cache/snapshots/1a2b."),
        ("nowhere", "There is no file or folder nowhere; expected"),
        ("nowhere+adapter", "There is no file or folder nowhere+adapter; expected"),
        ("x.pt+zoo", "zoo is no adapter; expected a folder with adapter_config.json"),
        ("zoo+adapter", "zoo+adapter adds an adapter to zoo; expected one model before the +."),
        ("with", "It holds checkpoint-5: give with/checkpoint-5."),
    ):
        assert_refused(find_checkpoints, path, says=says)
    assert_refused(model_of, file, says="x.pt does not say its network; give the folder with its config.json, or")
    assert_refused(model_of, alone, says="adapter is an adapter without its model; give MODEL+ADAPTER.")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.popitem(), "; check that all its shards are there, and that b/config.json describes the"),
        (
            lambda state: state.update(more=torch.ones(2)),
            "GPT2LMHeadModel has not; leave them out with --ignore 'more'",
        ),
        (
            lambda state: state.update({"transformer.ln_f.bias": torch.ones(9)}),
            "but GPT2LMHeadModel has it of shape [8]",
        ),
        (lambda state: state.update({"lm_head.weight": torch.ones(14, 8)}), "which are tied in GPT2LMHeadModel"),
    ],
)
def test_advice_on_a_folder_is_about_its_files(change: Callable[[dict[str, Tensor]], object], says: str) -> None:
    saved(made("gpt2"), "a")
    saved(made("gpt2", 1), "b")
    state = load_file("b/model.safetensors")
    change(state)
    save_file(state, "b/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        merge_checkpoints(["a", "b"], "out")
    assert "b/config.json describes" in str(caught.value)
    assert "arguments" not in str(caught.value)
    # A network that the caller has chosen has a class and arguments.
    says = "pass the (class and the )?arguments that the network was built with"
    with pytest.raises(ValueError, match=says):
        merge_checkpoints(["a", "b"], "out", network=made("gpt2"), inputs=torch.ones(1, 3, dtype=torch.long))


def test_quantized_models_are_refused() -> None:
    saved(made("gpt2"), "model")
    content = json.loads(Path("model/config.json").read_text())
    content["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    Path("model/config.json").write_text(json.dumps(content))
    says = "model holds quantized weights (gptq); expected weights of 16 bits or more: dequantize() and"
    assert_refused(read, "model", says=says)


def test_models_are_built_without_memory_for_weights() -> None:
    saved(made("grouped llama"), "model")
    (found,) = find_checkpoints("model")
    assert all(parameter.is_meta for parameter in model_of(found).network.parameters())
    assert not any(parameter.is_meta for parameter in model_of(found, weights=True).network.parameters())


def test_folders_of_timm() -> None:
    timm = pytest.importorskip("timm")
    network = timm.create_model("resnet10t", num_classes=3).eval()
    Path("model").mkdir()
    save_file(network.state_dict(), "model/model.safetensors", {"format": "pt"})
    arguments = {"checkpoint_path": "absent.pt", "pretrained": True, "pretrained_cfg": {"file": "absent.pt"}}
    content = {"architecture": "resnet10t", "num_classes": 3, "model_args": arguments}
    Path("model/config.json").write_text(json.dumps(content))
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(read("model").network(x), network(x))


# ---- failures


def failing(name: str, number: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a function of the writers fail at a call."""
    function, count = getattr(symmetry_files, name), iter(range(100_000))

    def fail(*arguments: Any) -> Any:
        if next(count) == number:
            raise error
        return function(*arguments)

    monkeypatch.setattr(symmetry_files, name, fail)


@pytest.mark.parametrize("out", ["out", "new/out", "there", "out.safetensors"])
def test_a_full_disk_leaves_no_folder(out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = read(saved(made("gpt2"), "reference", "one" if out.endswith("safetensors") else "shards"))
    Path("there").mkdir()
    before = sorted(Path().rglob("*"))
    failing("_write", 3, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), monkeypatch)
    says = (f"Cannot write {out}: No space left on device", "free space, or choose another folder")
    assert_refused(reference.write, floating(reference.network), out, says=says, error=OSError)
    assert sorted(Path().rglob("*")) == before


def test_a_file_that_is_removed_meanwhile_is_named() -> None:
    reference = read(saved(made("gpt2"), "reference"))

    class Removing(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            Path("reference/config.json").unlink(missing_ok=True)
            return super().__getitem__(name)

    with pytest.raises(FileNotFoundError) as caught:
        reference.write(Removing(floating(reference.network)), "out")
    assert "reference/config.json" in str(caught.value)
    assert "Cannot write" not in str(caught.value)
    assert [path.name for path in Path().iterdir()] == ["reference"]


def test_a_full_disk_at_the_other_files_leaves_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = read(saved(made("gpt2"), "reference"))

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", fail)
    says = "Cannot write out: No space left on device; no file remains"
    assert_refused(reference.write, floating(reference.network), "out", says=says, error=OSError)
    assert [path.name for path in Path().iterdir()] == ["reference"]


def test_an_input_that_is_removed_meanwhile_leaves_no_folder() -> None:
    reference = read(saved(made("gpt2"), "reference"))
    shutil.rmtree("reference")
    with pytest.raises(FileNotFoundError, match="reference"):
        reference.write(floating(reference.network), "out")
    assert not list(Path().iterdir())


def test_folders_with_files_are_not_written_to() -> None:
    reference = read(saved(made("gpt2"), "reference"))
    Path("out").mkdir()
    reference.write(floating(reference.network), "out")
    before = {path: path.stat().st_mtime_ns for path in Path("out").iterdir()}
    says = "out is there already; expected a new or an empty folder."
    assert_refused(reference.write, floating(reference.network), "out", says=says)
    assert {path: path.stat().st_mtime_ns for path in Path("out").iterdir()} == before


@pytest.mark.parametrize("fails", [False, True])
def test_folders_that_cannot_be_replaced_receive_the_configuration_last(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = read(saved(made("gpt2"), "reference"))
    Path("out").mkdir()
    Path("out/.older.tmp").write_text("of another program")
    rename, moved = Path.rename, list[str]()

    def renamed(path: Path, target: Path) -> Path:
        if fails and moved:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        moved.append(target.name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    if fails:
        says = "Cannot write out: Input/output error"
        assert_refused(reference.write, floating(reference.network), "out", says=says, error=OSError)
        assert [path.name for path in Path("out").iterdir()] == [".older.tmp"]
    else:
        reference.write(floating(reference.network), "out")
        assert moved == ["generation_config.json", "model.safetensors", "config.json"]


KILLED = """
import os, signal, sys
from pathlib import Path
from lightning_sym.merging import merge_checkpoints
from lightning_sym.merging.checkpoint import Checkpoint, find_checkpoints, model_of
from lightning_sym.symmetry import files
from lightning_sym.symmetry.tracing.graph.capture import state_tensors

(found,) = find_checkpoints("reference")
checkpoint = Checkpoint.read(found.file, model_of(found).network)
write, count = files._write, iter(range(100_000))

def killed(*arguments):
    if next(count) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*arguments)

files._write = killed
checkpoint.write(state_tensors(checkpoint.network), "out")
"""


@pytest.mark.long
def test_a_killed_process_leaves_no_folder() -> None:
    saved(made("gpt2"), "reference", "shards")
    run = subprocess.run([sys.executable, "-c", KILLED], timeout=300, check=False)
    assert run.returncode == -signal.SIGKILL
    left = [path.name for path in Path().iterdir() if path.name != "reference"]
    assert left
    assert all(name.startswith(".") for name in left)
    reference = read("reference")
    reference.write(floating(reference.network), "out")
    loaded("gpt2", "out")
    assert {path.name for path in Path().iterdir()} == {"reference", "out"}


def test_of_two_processes_that_write_one_folder_the_first_succeeds() -> None:
    reference = read(saved(made("gpt2"), "reference"))

    def slow() -> None:
        with symmetry_files.new_folder(Path("out")) as scratch:
            (scratch / "x").write_text("x")
            reference.write(floating(reference.network), "out")
            assert (scratch / "x").exists()

    assert_refused(slow, says="Cannot write out: Directory not empty; its previous content is intact", error=OSError)
    assert {path.name for path in Path().iterdir()} == {"reference", "out"}
    loaded("gpt2", "out")


def test_types_of_models_are_known_without_the_import_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    types = [*transformers.CONFIG_MAPPING.keys()]
    monkeypatch.delitem(sys.modules, "transformers")
    assert {*types} <= {*_model_types(importlib.util.find_spec("transformers"))}
    check_model_type("model", {"model_type": types[-1]})
    assert "transformers" not in sys.modules
    says = "model is of model_type 'gptt2'; expected one that transformers"
    assert_refused(check_model_type, "model", {"model_type": "gptt2"}, says=says)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    assert_refused(check_model_type, "model", {"model_type": "gptt2"}, says=says)
    config = type("OwnConfig", (transformers.PretrainedConfig,), {"model_type": "gptt2"})
    monkeypatch.setattr(transformers.CONFIG_MAPPING, "_extra_content", {"gptt2": config})  # as AutoConfig.register
    check_model_type("model", {"model_type": "gptt2"})


def test_complex_weights_are_refused_by_their_name(tmp_path: Path) -> None:
    network = nn.Linear(2, 2)
    network.phase = nn.Parameter(torch.ones(2) + 1j)
    torch.save(network.state_dict(), tmp_path / "a.pt")
    says = "a.pt holds phase as torch.complex64; expected weights that are real numbers."
    assert_refused(Checkpoint.read, tmp_path / "a.pt", network, says=says)
