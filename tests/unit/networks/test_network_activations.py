import math
from collections.abc import Callable

import pytest
import torch
from helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_sym.networks import Gaussian, IdentityActivation, Polynomial, is_activation, make_activation

NAMES = ["relu", "leaky_relu", "leaky_relu(0.1)", "gelu", "silu", "tanh", "sigmoid"]
NAMES += ["gaussian", "polynomial(2)", "identity"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_activation_is_recognised_and_leaves_its_input_alone(name: str, dtype: torch.dtype) -> None:
    module = make_activation(name)
    x = torch.linspace(-2, 2, 9, dtype=dtype)
    before = x.clone()
    y = module(x)
    assert is_activation(module)
    assert not list(module.parameters())
    assert (y.shape, y.dtype) == (x.shape, dtype)
    assert torch.equal(x, before)


def test_values_of_our_own() -> None:
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    torch.testing.assert_close(Gaussian()(x), torch.exp(-(x**2)))
    torch.testing.assert_close(Polynomial(3)(x), x * x * x)
    assert torch.equal(IdentityActivation()(x), x)
    assert repr(Polynomial(3)) == "Polynomial(degree=3)"


@given(slope=st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_any_finite_slope_is_read_back_exactly(slope: float) -> None:
    module = make_activation(f"leaky_relu({slope!r})")
    assert isinstance(module, nn.LeakyReLU)
    assert module.negative_slope == slope


@given(degree=st.integers(1, 1000), spaces=st.text(" ", max_size=2))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_degree_is_read_back(degree: int, spaces: str) -> None:
    module = make_activation(f"{spaces}polynomial({spaces}{degree}{spaces})")
    assert isinstance(module, Polynomial)
    assert module.degree == degree


@given(st.text(alphabet="relu_leaky()0123456789.polynmia-", max_size=16))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_other_strings_give_an_activation_or_a_value_error(name: str) -> None:
    try:
        assert is_activation(make_activation(name))
    except ValueError as error:
        assert "\n" not in str(error)  # noqa: PT017 (either outcome is right)


@pytest.mark.parametrize(
    "refusal",
    [
        refused(make_activation, "rellu", says=("Unknown activation 'rellu'", "Did you mean 'relu'")),
        *(refused(make_activation, bad, says=f"Unknown activation {bad!r}") for bad in ("", "relu(", None, 3)),
        refused(make_activation, "relu(0.1)", says="'relu' takes no argument"),
        *(
            refused(make_activation, f"leaky_relu({bad})", says="slope of leaky_relu must be a finite number")
            for bad in ("", "nan", "x")
        ),
        *(
            refused(make_activation, bad, says="polynomial needs an integer degree >= 1, as in polynomial(2)")
            for bad in ("polynomial", "polynomial(0)", "polynomial(2.5)")
        ),
        *(refused(Polynomial, bad, says="degree of a polynomial activation") for bad in (0, -1, 2.0, True, math.nan)),
    ],
)
def test_names_and_degrees_that_are_refused(refusal: Callable[[], None]) -> None:
    refusal()


def test_elementwise_modules_of_torch_are_activations_and_no_others() -> None:
    mixing = {"GLU", "MultiheadAttention", "Softmax", "Softmax2d", "Softmin", "LogSoftmax"}
    arguments = {"Threshold": (0.1, 20.0), "MultiheadAttention": (4, 2)}
    for name in torch.nn.modules.activation.__all__:
        module = getattr(nn, name)(*arguments.get(name, ()))
        assert is_activation(module) == (name not in mixing), name
    assert not is_activation(nn.Identity())
    assert not is_activation(nn.Linear(2, 2))
