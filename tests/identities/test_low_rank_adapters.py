"""Adapters of low rank: their gauge, what matching finds, and how far means of factors are from means of products."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_refused
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_sym.merging.adapters import Adapter, merge_adapters, with_adapter
from lightning_sym.merging.methods import METHODS, merge_tensors
from lightning_sym.symmetry.low_rank import LowRank, difference, mean_factors, mean_product

TINY = 1e-10
NAMES = {"layers.0.q_proj": (7, 5), "layers.0.up_proj": (6, 9), "layers.1.q_proj": (7, 5)}
START = "base_model.model."


def drawn(rows: int, columns: int, rank: int, seed: int, scale: float = 1.0) -> LowRank:
    generator = torch.Generator().manual_seed(seed)
    up = torch.randn(rows, rank, dtype=torch.float64, generator=generator) * scale
    return LowRank(up, torch.randn(rank, columns, dtype=torch.float64, generator=generator))


def gauge_of(rank: int, seed: int) -> Tensor:
    return drawn(rank, rank, rank, seed).up + 0.5 * torch.eye(rank, dtype=torch.float64)


sizes = {
    "rows": st.integers(3, 8),
    "columns": st.integers(3, 8),
    "rank": st.integers(1, 3),
    "seed": st.integers(0, 999),
}


@settings(max_examples=25, deadline=None)
@given(**sizes)
def test_every_gauge_has_one_balanced_form_and_matching_finds_the_planted_one(
    rows: int, columns: int, rank: int, seed: int
) -> None:
    own, gauge = drawn(rows, columns, rank, seed), gauge_of(rank, seed + 1)
    other = own.changed(gauge)
    scale = own.norm
    assert difference(own, other) < TINY * scale
    balanced, again = own.balanced(), other.balanced()
    assert difference(own, balanced) < TINY * scale
    assert torch.allclose(balanced.up.T @ balanced.up, balanced.down @ balanced.down.T, rtol=0, atol=TINY * scale)
    assert balanced.squared_distance(again) < 1e-12 * scale  # one form for the whole orbit
    for kind in ("orthogonal", "invertible"):
        assert other.matched(own, kind).squared_distance(own) < 1e-12 * (scale + 1)  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(**sizes, members=st.integers(2, 4))
def test_a_mean_of_factors_misses_the_mean_of_products_by_their_covariance(
    rows: int, columns: int, rank: int, seed: int, members: int
) -> None:
    products = [drawn(rows, columns, rank, seed + 7 * number) for number in range(members)]
    shares = [1 / members] * members
    mean = mean_factors(products, shares)
    covariance = sum((own.up - mean.up) @ (own.down - mean.down) for own in products) / members
    exact = mean_product(products, shares)
    assert torch.allclose(exact.product - mean.product, covariance, rtol=0, atol=TINY)
    bound = sum(own.squared_distance(mean) for own in products) / (2 * members)
    assert difference(exact, mean) <= bound * (1 + TINY)
    # Nothing of that rank is nearer than the truncated product.
    assert difference(exact, exact.truncated(rank)) <= difference(exact, mean) * (1 + TINY)


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(3, 8), columns=st.integers(3, 8), rank=st.integers(1, 3), seed=st.integers(0, 999))
def test_no_gauge_nearby_is_better_than_what_matching_found(rows: int, columns: int, rank: int, seed: int) -> None:
    own, reference = drawn(rows, columns, rank, seed), drawn(rows, columns, rank, seed + 1, scale=0.3)
    turned = own.balanced().aligned(reference.balanced())
    best = own.matched(reference, "invertible")
    assert difference(best, own) < TINY * own.norm
    start = own.matched(reference).squared_distance(reference)
    assert best.squared_distance(reference) <= start * (1 + TINY)
    # The equation of stationary points: docs/theory/matching.md, 7.2.
    slope = (best.down - reference.down) @ best.down.T - best.up.T @ (best.up - reference.up)
    assert slope.norm() < 1e-4 * (reference.squared_distance(best) + own.norm + 1)
    for step in range(8):
        random = 0.05 * gauge_of(rank, seed + 10 + step)
        near = torch.eye(rank, dtype=torch.float64) + random
        assert best.changed(near).squared_distance(reference) > best.squared_distance(reference) * (1 - 1e-6)
        rotation = torch.linalg.matrix_exp(random - random.T)
        moved = turned.changed(rotation).squared_distance(reference.balanced())
        assert moved >= turned.squared_distance(reference.balanced()) * (1 - TINY)


# ---- files


def config(rank: int = 2, **more: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "rank_pattern": {}, "alpha_pattern": {}, **more}


def tensors(seed: int, rank: int = 2, ranks: dict[str, int] | None = None) -> dict[str, Tensor]:
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, (rows, columns) in NAMES.items():
        own = (ranks or {}).get(name, rank)
        found[f"{START}{name}.lora_A.weight"] = torch.randn(own, columns, generator=generator, dtype=torch.float64)
        found[f"{START}{name}.lora_B.weight"] = torch.randn(rows, own, generator=generator, dtype=torch.float64)
    return found


def save(folder: Path, held: dict[str, Tensor], settings: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(held, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def added(folder: Path, scaling: dict[str, float]) -> dict[str, Tensor]:
    """Return what is added to the weights, by the definition: s B A."""
    held = load_file(folder / "adapter_model.safetensors")
    return {
        name: scaling[name] * (held[f"{START}{name}.lora_B.weight"] @ held[f"{START}{name}.lora_A.weight"])
        for name in NAMES
    }


PATTERNS = {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"layers.1.q_proj": 5, r".*\.up_proj": 2}}
RANKS = {"layers.0.q_proj": 3, "layers.1.q_proj": 3}


@pytest.mark.parametrize(
    ("more", "ranks", "scaling"),
    [
        ({}, {}, [4.0, 4.0, 4.0]),
        ({"use_rslora": True}, {}, [8 / math.sqrt(2)] * 3),
        (PATTERNS, RANKS, [8 / 3, 1.0, 5 / 3]),
        ({**PATTERNS, "use_rslora": True}, RANKS, [8 / math.sqrt(3), 2 / math.sqrt(2), 5 / math.sqrt(3)]),
    ],
    ids=["plain", "rsLoRA", "patterns", "patterns of rsLoRA"],
)
def test_balancing_and_matching_add_the_same_to_every_weight(
    tmp_path: Path, more: dict[str, Any], ranks: dict[str, int], scaling: list[float]
) -> None:
    scalings = dict(zip(NAMES, scaling, strict=True))
    adapters = [Adapter.read(save(tmp_path / str(s), tensors(s, ranks=ranks), config(**more))) for s in range(2)]
    expected = added(tmp_path / "1", scalings)
    for place, changed in (("b", adapters[1].balanced()), ("m", adapters[1].matched(adapters[0]))):
        found = added(changed.write(tmp_path / place), scalings)
        assert json.loads((tmp_path / place / "adapter_config.json").read_text()) == config(**more)
        for name in NAMES:
            assert torch.allclose(found[name], expected[name], rtol=0, atol=TINY)
    # A planted gauge is found: the same tensors.
    gauges = {name: gauge_of(ranks.get(name, 2), 5) for name in NAMES}
    planted = adapters[0].with_products(
        {f"{START}{name}": adapters[0].products[f"{START}{name}"].changed(g) for name, g in gauges.items()}
    )
    back = planted.matched(adapters[0])
    for key, tensor in adapters[0].tensors.items():
        assert torch.allclose(back.tensors[key], tensor, rtol=0, atol=1e-8)
        assert not torch.allclose(planted.tensors[key], tensor, rtol=0, atol=1e-2)


def test_adapters_of_old_versions_are_read_without_running_code(tmp_path: Path) -> None:
    one = Adapter.read(save(tmp_path / "one", tensors(0), config()))
    (tmp_path / "one" / "adapter_model.safetensors").unlink()
    torch.save(tensors(0), tmp_path / "one" / "adapter_model.bin")
    old = Adapter.read(tmp_path / "one")
    assert old.tensors.keys() == one.tensors.keys()
    assert all(torch.equal(own, old.tensors[name]) for name, own in one.tensors.items())
    torch.save({**tensors(0), "network": nn.Linear(1, 1)}, tmp_path / "one" / "adapter_model.bin")
    assert_refused(Adapter.read, tmp_path / "one", says="adapter_model.bin")


def test_means_of_other_ranks_and_scalings(tmp_path: Path) -> None:
    one = Adapter.read(save(tmp_path / "1", tensors(0, ranks=RANKS), config(**PATTERNS)))
    two = Adapter.read(save(tmp_path / "2", tensors(1, rank=1), config(1, lora_alpha=3)))
    first = added(tmp_path / "1", dict(zip(NAMES, [8 / 3, 1.0, 5 / 3], strict=True)))
    second = added(tmp_path / "2", dict.fromkeys(NAMES, 3.0))
    mean = {name: 0.75 * first[name] + 0.25 * second[name] for name in NAMES}
    whole = merge_adapters([one, two], rank=5, weights=[3, 1])
    assert max(row["product"] for row in whole.errors.values()) < TINY
    merged = Adapter.read(whole.adapter.write(tmp_path / "whole"))
    assert (merged.config["r"], merged.config["rank_pattern"]) == (5, {})
    for name in NAMES:
        assert torch.allclose(merged.products[START + name].product, mean[name], rtol=0, atol=TINY)
    for method in ("product", "aligned", "factors"):
        found = merge_adapters([one, two], weights=[3, 1], method=method)  # type: ignore[arg-type]
        again = Adapter.read(found.adapter.write(tmp_path / method))
        assert {START + name: again.products[START + name].rank for name in NAMES} == {
            START + name: RANKS.get(name, 2) for name in NAMES
        }
        for name in NAMES:
            exact, own = mean[name], again.products[START + name].product
            error = float((own - exact).norm() / exact.norm())
            assert math.isclose(found.errors[START + name][method], error, rel_tol=1e-6)
            assert found.errors[START + name]["product"] <= found.errors[START + name][method] * (1 + TINY)
    assert "aligned" in str(whole)


def test_the_mean_of_one_adapter_in_two_gauges_is_that_adapter_but_for_the_mean_of_its_factors() -> None:
    one = Adapter(config(), tensors(0))
    two = one.with_products(
        {name: own.changed(-torch.eye(2, dtype=torch.float64)) for name, own in one.products.items()}
    )
    for row in merge_adapters([one, two]).errors.values():
        assert row["product"] < TINY
        assert row["aligned"] < TINY
        assert math.isclose(row["factors"], 1.0)  # the factors cancel, and nothing is left


def test_embeddings_convolutions_biases_and_whole_modules() -> None:
    def held(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shapes = {
            "embed.lora_embedding_A": (2, 11),
            "embed.lora_embedding_B": (5, 2),
            "conv.lora_A.weight": (2, 3, 3, 3),
            "conv.lora_B.weight": (4, 2, 1, 1),
            "conv.lora_B.bias": (4,),
            "head.weight": (3, 5),
        }
        return {START + name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    one, two = Adapter(config(), held(0)), Adapter(config(lora_alpha=2), held(1))
    mean = merge_adapters([one, two], rank=4).adapter
    s, scaling = mean.scaling(f"{START}conv"), (4.0, 1.0)
    x, tokens = torch.randn(2, 3, 6, 6), torch.arange(11)

    def conv(own: Adapter, s: float) -> Tensor:
        a, b, bias = (own.tensors[f"{START}conv.lora_{name}"] for name in ("A.weight", "B.weight", "B.bias"))
        return s * nn.functional.conv2d(nn.functional.conv2d(x, a), b, bias)

    def embed(own: Adapter, s: float) -> Tensor:
        a, b = (own.tensors[f"{START}embed.lora_embedding_{name}"] for name in "AB")
        return s * (nn.functional.embedding(tokens, a.T) @ b.T)

    for function in (conv, embed):
        expected = sum(function(own, s) for own, s in zip((one, two), scaling, strict=True)) / 2
        assert torch.allclose(function(mean, s), expected, atol=1e-4)
        assert torch.allclose(function(one.balanced(), 4.0), function(one, 4.0), atol=1e-4)
    head = f"{START}head.weight"
    assert torch.allclose(mean.tensors[head], (one.tensors[head] + two.tensors[head]) / 2)


def test_an_adapter_that_was_never_trained() -> None:
    held = {name: t if "lora_A" in name else torch.zeros_like(t) for name, t in tensors(0).items()}
    fresh, other = Adapter(config(), held), Adapter(config(), tensors(1))
    assert all(not t.any() for t in fresh.balanced().tensors.values())
    merged = merge_adapters([fresh, other])
    assert all(row["product"] < TINY for row in merged.errors.values())
    assert_refused(lambda: other.matched(fresh), says="a smaller rank than they have")
    assert_refused(lambda: fresh.matched(other, "invertible"), says="match by balance()")
    assert fresh.matched(other).products[f"{START}layers.0.q_proj"].norm == 0


# ---- merge methods


def formula(name: str, products: list[Tensor], place: str, **settings: Any) -> Tensor:
    base = torch.zeros_like(products[0]) if METHODS[name].base == "needed" else None
    return merge_tensors(name, products, base=base, name=place, **settings)


@pytest.mark.parametrize("method", METHODS)
def test_any_method_acts_on_products(method: str) -> None:
    count = METHODS[method].most or 3
    shared = tensors(9)  # of positive cosine, for model_stock
    moved = [{name: shared[name] + 0.5 * own for name, own in tensors(seed).items()} for seed in range(count)]
    adapters = [Adapter(config(), own) for own in moved]
    given = {"density": 0.5, "weight": [0.5, 0.3, 0.9][:count], "t": 0.3, "scale": 0.7}
    own = {key: given[key] for key in given if {key} & {*METHODS[method].per_model, *METHODS[method].shared}}
    weights = own.pop("weight", None)
    whole = merge_adapters(adapters, method=method, rank=7, weights=weights, **own)
    cut = merge_adapters(adapters, method=method, weights=weights, **own)
    for name in NAMES:
        products = [adapter.products[START + name].product for adapter in adapters]
        settings = own if weights is None else {**own, "weight": weights}
        exact = formula(method, products, f"{name}.weight", **settings)
        found = whole.adapter.products[START + name].product
        torch.testing.assert_close(found, exact, rtol=0, atol=TINY)
        # Nothing of rank 2 is nearer, and the error is said.
        values = torch.linalg.svdvals(exact)
        label = "product" if method == "linear" else method
        error = float(values[2:].norm() / values.norm())
        assert cut.errors[START + name][label] == pytest.approx(error, abs=1e-9)
        distance = float((cut.adapter.products[START + name].product - exact).norm() / exact.norm())
        assert distance == pytest.approx(error, abs=1e-9)
    assert label in str(cut)


def test_a_function_may_merge_products_and_biases(tmp_path: Path) -> None:
    bias = f"{START}layers.0.q_proj.lora_B.bias"
    held = [{**tensors(seed), bias: torch.full((7,), seed + 1.0).double()} for seed in range(2)]
    adapters = [Adapter(config(), held[0]), Adapter(config(lora_alpha=2), held[1])]
    asked = []

    def difference_of(name: str, products: list[Tensor]) -> Tensor:
        asked.append(name)
        return products[0] - products[1]

    merged = merge_adapters(adapters, method=difference_of, rank=4)
    assert asked == [*(f"{name}.weight" for name in NAMES), "layers.0.q_proj.bias"]
    assert max(row["difference_of"] for row in merged.errors.values()) < TINY
    module = START + "layers.0.q_proj"
    assert torch.allclose(
        merged.adapter.tensors[bias] * merged.adapter.scaling(module), torch.full((7,), 4.0 - 2).double()
    )


def test_large_products_are_truncated_nearly_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {f"{START}up.lora_A.weight": (2, 80), f"{START}up.lora_B.weight": (60, 2)}
    adapters = [
        Adapter(config(), {name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()})
        for _ in range(2)
    ]
    exact = merge_adapters(adapters, method="ties", density=0.3).errors[f"{START}up"]["ties"]
    monkeypatch.setattr("lightning_sym.merging.adapters._LARGE", 10)
    near = merge_adapters(adapters, method="ties", density=0.3).errors[f"{START}up"]["ties"]
    assert exact <= near < exact * 1.001


# ---- on a network

NETWORK = {"layers.0.q_proj": (7, 5), "layers.0.up_proj": (6, 9), "layers.1.q_proj": (7, 5)}


def network(seed: int = 9, prefix: str = "", dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    held = {f"{prefix}{name}.weight": torch.randn(shape, generator=generator) for name, shape in NETWORK.items()}
    return {**{name: own.to(dtype) for name, own in held.items()}, f"{prefix}steps": torch.tensor(3)}


@pytest.mark.parametrize("own", ["", "model.", "base."])
@pytest.mark.parametrize("theirs", ["", "model.", "base.model."])
def test_products_are_added_under_any_prefix(own: str, theirs: str) -> None:
    if own and theirs and own != theirs:
        return  # neither is the other with a prefix
    adapter = Adapter(config(**PATTERNS), {
        name.replace(START, START + theirs): tensor for name, tensor in tensors(0, ranks=RANKS).items()
    })  # fmt: skip
    before = network(prefix=own)
    after = with_adapter(before, adapter)
    assert list(after) == list(before)
    for name, scaling in zip(NAMES, [8 / 3, 1.0, 5 / 3], strict=True):
        a, b = (adapter.tensors[f"{START}{theirs}{name}.lora_{which}.weight"] for which in "AB")
        place = f"{own}{name}.weight"
        torch.testing.assert_close(after[place], before[place] + scaling * b @ a, rtol=0, atol=TINY)
    assert after[f"{own}steps"] is before[f"{own}steps"]


def test_tensors_are_changed_when_asked_and_small_changes_stay() -> None:
    class Asked(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            asked.append(name)
            return super().__getitem__(name)

    asked: list[str] = []
    small = {name: 1e-5 * tensor if "lora_B" in name else tensor for name, tensor in tensors(0).items()}
    before = network(dtype=torch.bfloat16)
    after = with_adapter(Asked(before), Adapter(config(), small))
    assert "layers.0.q_proj.weight" in after
    assert asked == []
    for name in NAMES:
        found = after[f"{name}.weight"]
        exact = before[f"{name}.weight"].double() + Adapter(config(), small).products[START + name].product
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, exact.float(), rtol=0, atol=0)
        assert not torch.equal(found.bfloat16().float(), found)
    assert asked == [f"{name}.weight" for name in NAMES]


def test_layers_of_all_kinds_and_whole_tensors() -> None:
    torch.manual_seed(0)
    shapes = {
        "embed.lora_embedding_A": (2, 11),
        "embed.lora_embedding_B": (5, 2),
        "conv.lora_A.weight": (2, 3, 3, 3),
        "conv.lora_B.weight": (4, 2, 1, 1),
        "conv.lora_B.bias": (4,),
        "turned.lora_A.weight": (2, 6),
        "turned.lora_B.weight": (8, 2),
        "square.lora_A.weight": (2, 5),
        "square.lora_B.weight": (5, 2),
        "head.weight": (3, 5),
        "head.modules_to_save.bias": (3,),
        "head.original_module.bias": (3,),
        "embed.base_layer.weight": (11, 5),
    }
    held = {START + name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    part = {name: held[START + name] for name in shapes}
    plain = {"conv.weight": (4, 3, 3, 3), "conv.bias": (4,), "embed.weight": (11, 5), "turned.weight": (6, 8)}
    plain |= {"square.weight": (5, 5), "head.weight": (3, 5), "head.bias": (3,)}
    before = {name: torch.randn(shape, dtype=torch.float64) for name, shape in plain.items()}
    after = with_adapter(before, Adapter(config(fan_in_fan_out=True), held))
    x, tokens = torch.randn(2, 3, 6, 6, dtype=torch.float64), torch.arange(11)
    inner = nn.functional.conv2d(x, part["conv.lora_A.weight"])
    added = 4 * nn.functional.conv2d(inner, part["conv.lora_B.weight"], part["conv.lora_B.bias"])
    expected = nn.functional.conv2d(x, before["conv.weight"], before["conv.bias"]) + added
    exact = {"rtol": 0, "atol": TINY}
    torch.testing.assert_close(nn.functional.conv2d(x, after["conv.weight"], after["conv.bias"]), expected, **exact)
    embedded = nn.functional.embedding(tokens, part["embed.lora_embedding_A"].T) @ part["embed.lora_embedding_B"].T
    saved = part["embed.base_layer.weight"]
    torch.testing.assert_close(nn.functional.embedding(tokens, after["embed.weight"]), saved + 4 * embedded, **exact)
    for name in ("turned", "square"):
        change = 4 * part[f"{name}.lora_B.weight"] @ part[f"{name}.lora_A.weight"]
        torch.testing.assert_close(after[f"{name}.weight"], before[f"{name}.weight"] + change.T, **exact)
    assert torch.equal(after["head.weight"], part["head.weight"])
    assert torch.equal(after["head.bias"], part["head.modules_to_save.bias"])
    unturned = with_adapter(before, Adapter(config(), held))
    change = 4 * part["square.lora_B.weight"] @ part["square.lora_A.weight"]
    torch.testing.assert_close(unturned["square.weight"], before["square.weight"] + change, **exact)
    torch.testing.assert_close(unturned["turned.weight"], after["turned.weight"], **exact)


def test_networks_that_do_not_fit_an_adapter() -> None:
    adapter = Adapter(config(), tensors(0), "one")
    fewer = {name: own for name, own in network().items() if "layers.1" not in name}
    assert_refused(with_adapter, fewer, adapter, says="one changes layers.1.q_proj.weight, which the network does not")
    other = {name: torch.ones(4, 4) for name in network()}
    assert_refused(lambda: with_adapter(other, adapter)["layers.0.q_proj.weight"], says="the adapter expects [7, 5]")
    whole = Adapter(config(), {**tensors(0), f"{START}head.weight": torch.ones(2)}, "one")
    wider = {**network(), "head.weight": torch.ones(3)}
    assert_refused(lambda: with_adapter(wider, whole)["head.weight"], says="[3] in the network and [2] in the adapter")
    started = Adapter(config(init_lora_weights="pissa_niter_4"), tensors(0), "one")
    assert_refused(with_adapter, network(), started, says="changed the weights of the network as well")


def bad(edit: Any, settings: dict[str, Any] | None = None) -> Adapter:
    held = copy.deepcopy(tensors(0))
    edit(held)
    return Adapter(config(**(settings or {})), held)


KEY = f"{START}layers.0.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("edit", "settings", "says"),
    [
        (lambda held: None, {"use_dora": True}, "is not plain LoRA (use_dora, DoRA"),
        (lambda held: None, {"peft_type": "IA3"}, "is of peft_type 'IA3'; expected LORA."),
        (lambda held: held.update({f"{START}q.lora_magnitude_vector": torch.ones(2)}), {}, "of DoRA, which does more"),
        (lambda held: held.pop(KEY), {}, "holds only one factor of base_model.model.layers.0.q_proj"),
        (lambda held: held.update({KEY: held[KEY] * math.nan}), {}, "values that are not finite floating numbers"),
        (lambda held: held.update({KEY: held[KEY].int()}), {}, "values that are not finite floating numbers"),
        (lambda held: held.clear(), {}, "holds no lora_A and lora_B"),
        (lambda held: None, {"r": 3}, "expected the rank 3 of its configuration between them"),
        (lambda held: None, {"lora_alpha": 0}, "lora_alpha of layers.0.q_proj is 0; expected a number > 0."),
        (lambda held: None, {"lora_alpha": "8"}, "lora_alpha of layers.0.q_proj is '8'"),
        (lambda held: None, {"alpha_pattern": {"(": 3}}, "alpha_pattern must map patterns of names"),
    ],
)  # fmt: skip
def test_adapters_that_are_refused(edit: Any, settings: dict[str, Any], says: str) -> None:
    assert_refused(lambda: bad(edit, settings).products, says=says)


def test_adapters_that_do_not_fit_each_other(tmp_path: Path) -> None:
    one = Adapter(config(), tensors(0), "one")
    fewer = Adapter(config(), {n: t for n, t in tensors(1).items() if "layers.1" not in n}, "two")
    longer = Adapter(config(1), tensors(1, rank=1), "two")
    other = Adapter(config(), {n: torch.cat([t, t], 1) if "lora_A" in n else t for n, t in tensors(1).items()}, "two")
    more = Adapter(config(), {**tensors(1), "head.weight": torch.ones(2)}, "two")
    assert_refused(merge_adapters, [one, fewer], says=["one changes", "layers.1.q_proj, but two does not"])
    assert_refused(merge_adapters, [one, other], says="has another shape in two than in one.")
    assert_refused(merge_adapters, [one, more], says="head.weight is missing in an adapter")
    assert_refused(longer.matched, one, says="has rank 1 in two and 2 in one")
    assert_refused(merge_adapters, [], says="got none")
    assert_refused(merge_adapters, [one], method="mean")
    assert_refused(merge_adapters, [one], rank=0)
    assert_refused(merge_adapters, [one], rank=2, method="factors")
    assert_refused(merge_adapters, [one, one], weights=[1])
    assert_refused(merge_adapters, [one, one], weights=[1, -1])
    assert_refused(merge_adapters, [one, one], method="tie", says="Did you mean 'ties'?")
    assert_refused(merge_adapters, [one, one], method="aligned", density=0.5, says="aligned has no density")
    one.write(tmp_path / "a")
    assert_refused(one.write, tmp_path / "a", says="exists already")
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"nothing")
    assert_refused(Adapter.read, tmp_path / "a", says="is text, not a file of safetensors")
    (tmp_path / "a" / "adapter_config.json").write_text("[")
    assert_refused(Adapter.read, tmp_path / "a", says="expected the JSON that peft writes")
    assert_refused(Adapter.read, tmp_path / "b", says="expected an adapter's folder, as peft saves it.")
    huge = Adapter(config(), {n: (t * 1e3).half() if "lora_A" in n else t.half() for n, t in tensors(0).items()})
    larger = {module: own.times(1e4) for module, own in huge.products.items()}
    assert_refused(lambda: huge.with_products(larger), says="would hold numbers outside the range of torch.float16")
