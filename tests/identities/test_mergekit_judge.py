"""Mergekit's own methods merge the same tensors and folders to the same numbers, but for four stated differences."""

import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from lightning_sym._random import generator
from lightning_sym.merging import MergeConfig
from lightning_sym.merging.methods import METHODS, merge_tensors

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("mergekit.merge", reason="needs mergekit 0.1.5, as CONTRIBUTING.md describes", exc_type=ImportError)

CLOSE = {"rtol": 0, "atol": 1e-6}
NAME = "layer.weight"
WEIGHT, DENSITY = [0.5, 0.3, 0.9], [0.9, 0.5, 0.25]
SIGNED = [0.5, -0.2, 0.9]


def drawn(count: int, *, shared: float = 0.0) -> tuple[Tensor, list[Tensor]]:
    """Return a base and models, float64, whose differences from it share a direction."""
    draw = torch.Generator().manual_seed(0)
    base, direction, *more = torch.randn(count + 2, 23, 17, dtype=torch.float64, generator=draw)
    return base, [base + 0.1 * own + shared * direction for own in more]


def theirs(method: str, models: list[Tensor], base: Tensor | None = None, **settings: Any) -> Tensor:
    """Merge by mergekit; the base is its first model."""
    from mergekit.merge_methods import merge_state_dicts

    tensors = [*([] if base is None else [base]), *models]
    given = {name.removesuffix("_"): value for name, value in settings.items()}
    found: Mapping[str, Tensor] = merge_state_dicts(
        [{NAME: own} for own in tensors], method, parameters=given, base=None if base is None else 0
    )
    return found[NAME]


def ours(method: str, models: list[Tensor], base: Tensor | None = None, **settings: Any) -> Tensor:
    return merge_tensors(method, models, base=base, name=NAME, **settings)


TASKS = [
    *itertools.product(["task_arithmetic"], [WEIGHT, SIGNED], [{}]),
    *itertools.product(
        ["ties", "breadcrumbs", "breadcrumbs_ties"],
        [WEIGHT, SIGNED],
        [{"density": DENSITY}, {"density": DENSITY, "rescale": True}],
    ),
    ("breadcrumbs", WEIGHT, {"density": DENSITY, "gamma": [0.1, 0.2, 0.0]}),
    ("breadcrumbs_ties", WEIGHT, {"density": [0.9] * 3, "gamma": [0.3] * 3}),  # fewer large numbers are dropped
]


@pytest.mark.parametrize("normalize", [None, True, False])
@pytest.mark.parametrize(("method", "weight", "settings"), TASKS)
def test_task_vectors(method: str, weight: list[float], settings: dict[str, Any], normalize: bool | None) -> None:
    base, models = drawn(3)
    given = {"weight": weight, "lambda_": 0.7, **settings} | ({} if normalize is None else {"normalize": normalize})
    torch.testing.assert_close(ours(method, models, base, **given), theirs(method, models, base, **given), **CLOSE)


@pytest.mark.parametrize(
    ("method", "count", "based", "settings"),
    [
        ("linear", 3, False, {"weight": WEIGHT}),
        ("linear", 3, False, {"weight": SIGNED, "normalize": False}),
        ("nuslerp", 2, False, {"weight": [0.5, 0.3]}),
        ("nuslerp", 2, True, {"weight": [0.5, 0.3]}),
        ("multislerp", 3, False, {"weight": WEIGHT}),
        ("multislerp", 3, True, {"weight": WEIGHT}),
        ("karcher", 3, False, {}),
        ("passthrough", 1, False, {"scale": [-0.4]}),
    ],
)
def test_linear_combinations(method: str, count: int, based: bool, settings: dict[str, Any]) -> None:
    base, models = drawn(count)
    given = (models, base) if based else (models,)
    torch.testing.assert_close(ours(method, *given, **settings), theirs(method, *given, **settings), **CLOSE)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("near", [False, True])
def test_slerp(t: float, near: bool) -> None:
    first, (second,) = drawn(1)
    # Linear where tensors are almost parallel.
    second = first + 0.1 * (second - first) if near else torch.flip(second, [0])
    assert bool(torch.cosine_similarity(first.flatten(), second.flatten(), 0) > 0.9995) is near
    torch.testing.assert_close(ours("slerp", [first, second], t=t), theirs("slerp", [second], first, t=t), **CLOSE)


def test_every_method_has_a_case() -> None:
    tried = {name for name, *_ in TASKS} | {"linear", "nuslerp", "multislerp", "karcher", "passthrough", "slerp"}
    assert tried | {"dare_linear", "dare_ties", "della", "della_linear", "model_stock"} == METHODS.keys()


# ---- random masks


@pytest.fixture
def our_draws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let mergekit draw the masks of model 0, 1, ... from our numbers, with its probabilities."""
    models = itertools.count()

    def bernoulli(chances: Tensor) -> Tensor:
        numbers = torch.rand(chances.shape, generator=generator("merge", 0, next(models), NAME))
        return (numbers < chances).to(chances.dtype)

    monkeypatch.setattr(torch, "bernoulli", bernoulli)
    yield
    assert next(models) > 0


@pytest.mark.usefixtures("our_draws")
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("dare_linear", {"rescale": False}),
        ("dare_ties", {"rescale": False}),
        ("della", {"epsilon": 0.1}),
        ("della_linear", {"epsilon": 0.1}),
        ("della_linear", {"epsilon": 0.2, "rescale": False}),
    ],
)
def test_random_masks(method: str, settings: dict[str, Any]) -> None:
    base, models = drawn(3)
    given = {"weight": SIGNED, "density": [0.7, 0.5, 0.3], "lambda_": 0.7, **settings}
    torch.testing.assert_close(ours(method, models, base, **given), theirs(method, models, base, **given), **CLOSE)


@pytest.mark.usefixtures("our_draws")
def test_dare_divides_by_the_density_where_mergekit_restores_the_sum_of_magnitudes() -> None:
    base, models = drawn(1)
    given = {"weight": [1.0], "density": [0.4]}
    own, other = (merge("dare_linear", models, base, **given) - base for merge in (ours, theirs))
    delta = models[0] - base
    restoring = delta.abs().sum() / delta[own != 0].abs().sum()
    torch.testing.assert_close(own * 0.4 * restoring, other, **CLOSE)
    assert abs(0.4 * restoring - 1) > 0.01
    # Without a mask they are the same.
    torch.testing.assert_close(ours("dare_linear", models, base), models[0])


# ---- model_stock


def test_model_stock_where_differences_agree() -> None:
    base, models = drawn(3, shared=0.1)
    torch.testing.assert_close(ours("model_stock", models, base), theirs("model_stock", models, base), **CLOSE)


def test_model_stock_takes_the_base_where_mergekit_extrapolates() -> None:
    base, (first, second) = drawn(2)
    models = [first, 0.9 * base - 0.9 * (first - base) + 0.1 * second]
    torch.testing.assert_close(ours("model_stock", models, base), base)
    mean = (models[0] + models[1]) / 2
    other = theirs("model_stock", models, base)
    t = torch.dot((other - base).flatten(), (mean - base).flatten()) / (mean - base).square().sum()
    assert t < -1e-3
    torch.testing.assert_close(other, t * mean + (1 - t) * base, **CLOSE)


# ---- whole folders


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a parent and two fine-tunes, four layers each."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=14, num_key_value_heads=2, max_position_embeddings=32)
    torch.manual_seed(0)
    network = transformers.LlamaForCausalLM(config)
    for name in ("parent", "code", "maths"):
        network.save_pretrained(name)
        with torch.no_grad():
            for own in network.parameters():
                own.add_(0.01 * torch.randn_like(own))
    return tmp_path


def merged(text: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run a configuration here and in mergekit; return the tensors of both."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    Path("config.yml").write_text(text)
    MergeConfig.read("config.yml").run("ours")
    options = MergeOptions(copy_tokenizer=False, quiet=True, write_model_card=False)
    run_merge(MergeConfiguration.model_validate(yaml.safe_load(text)), "theirs", options)
    return tuple(  # type: ignore[return-value]
        {name: own for file in Path(place).glob("*.safetensors") for name, own in load_file(file).items()}
        for place in ("ours", "theirs")
    )


RAMPS = """
merge_method: {method}
base_model: ./parent
models:
  - model: ./code
    parameters: {{weight: [0.2, 0.9], density: [1, 0.5, 0.3]}}
  - model: ./maths
    parameters:
      weight: [{{filter: mlp, value: [0.7, 0.1]}}, {{value: 0.3}}]
      density: 0.6
parameters: {{int8_mask: true, rescale: {rescale}, lambda: 0.9}}
dtype: float32
"""


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("method", "rescale"), [("task_arithmetic", "false"), ("ties", "true"), ("ties", "false")])
def test_files_of_mergekit_with_ramps_and_filters(method: str, rescale: str) -> None:
    """Tensors after the last layer take the last number of a ramp, in mergekit 0.1.5 the first."""
    own, other = merged(RAMPS.format(method=method, rescale=rescale))
    assert own.keys() == other.keys()
    after = {"model.norm.weight", "lm_head.weight"}
    for name in own.keys() - after:
        torch.testing.assert_close(own[name], other[name], **CLOSE)
    states = [load_file(f"{place}/model.safetensors") for place in ("parent", "code", "maths")]
    for name in after:
        base, *models = (state[name] for state in states)
        settings = {"base": base, "lambda_": 0.9}
        more = {} if method == "task_arithmetic" else {"rescale": rescale == "true"}
        ends = ({"weight": [0.9, 0.3], "density": [0.3, 0.6]}, {"weight": [0.2, 0.3], "density": [1.0, 0.6]})
        for found, end in zip((own[name], other[name]), ends, strict=True):
            given = {**settings, **end, **more}
            if method == "task_arithmetic":
                del given["density"]
            torch.testing.assert_close(found, merge_tensors(method, models, name=name, **given), **CLOSE)
        assert not torch.allclose(own[name], other[name], atol=1e-4, rtol=0)


@pytest.mark.usefixtures("folder")
def test_slerp_of_slices() -> None:
    own, other = merged(
        "slices: [{sources: [{model: ./code, layer_range: [0, 4]}, {model: ./maths, layer_range: [0, 4]}]}]\n"
        "merge_method: slerp\nbase_model: ./code\ndtype: float32\n"
        "parameters: {t: [{filter: self_attn, value: [0, 0.5, 1]}, {value: 0.5}]}\n"
    )
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, other[name], **CLOSE)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("method", ["karcher", "linear"])
def test_a_base_among_the_models_counts_and_an_unlisted_one_is_used_by_mergekit_only(method: str) -> None:
    weight = ", parameters: {weight: 1}" if method == "linear" else ""
    models = [f"{{model: ./{name}{weight}}}" for name in ("parent", "code", "maths")]
    shared = ", parameters: {weight: 1}" if method == "linear" else ""  # also of an unlisted base
    text = f"{{merge_method: {method}, base_model: ./parent, dtype: float32{shared}, models: [%s]}}"
    own, other = merged(text % ", ".join(models))
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, other[name], **CLOSE)
    for place in ("ours", "theirs"):
        Path(place).rename(f"{place} of three")
    two, three = merged(text % ", ".join(models[1:]))
    states = [load_file(f"{place}/model.safetensors") for place in ("parent", "code", "maths")]
    merge = functools.partial(merge_tensors, method)
    for name in own:
        base, *others = (state[name] for state in states)
        torch.testing.assert_close(two[name], merge(others), **CLOSE)
        torch.testing.assert_close(three[name], merge([base, *others]), **CLOSE)
