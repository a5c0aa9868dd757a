"""What annotations of constructors say: classes that generic ones stand for, and the form of sizes of the data."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, Literal, Optional, Protocol, TypeVar, Union

import pytest
import torch
from torch.utils.data import Dataset

from lightning_sym.cli.annotations import fitting_size, unsubscripted

T = TypeVar("T")


class Base(Generic[T]):
    pass


class Calls(Protocol[T]):
    def __call__(self, x: T) -> T: ...


@dataclasses.dataclass
class Pair(Generic[T]):
    a: T


@pytest.mark.parametrize(
    ("annotation", "plain"),
    [
        (Base[int], Base),
        (Dataset[Any], Dataset),
        (Base[int] | None, Base | None),
        (Optional[Dataset[tuple[int, int]]], Dataset | None),  # noqa: UP045
        (Union[Base[int], str], Base | str),  # noqa: UP007
        (list[Base[int]], list[Base]),
        (dict[str, list[Base[T]]], dict[str, list[Base]]),
        (Sequence[Base[int] | None], Sequence[Base | None]),
        (tuple[Base[int], ...], tuple[Base, ...]),
        (Callable[[Base[int]], Base[int]], Callable[[Base], Base]),
        (Callable[..., Base[int]], Callable[..., Base]),
    ],
)
def test_generic_classes_stand_without_their_parameters(annotation, plain):
    assert unsubscripted(annotation) == plain


@pytest.mark.parametrize(
    "annotation",
    [
        *(int, None, Any, "Base[int]", Base, list[int], dict[str, Any], Literal["a", 1], int | None, type[int]),
        *(Callable[..., Any], Callable[[int], str], Calls[int], Pair[int], Annotated[int, "m"], tuple[int, ...]),
        tuple[()],
    ],
)
def test_other_annotations_stay(annotation):
    assert unsubscripted(annotation) is annotation


def said(annotation):
    class Taker:
        def __init__(self, image_size: annotation):
            pass

    return Taker


def unsaid(*default):
    class Taker:
        def __init__(self, image_size):
            pass

    Taker.__init__.__defaults__ = default
    return Taker


@pytest.mark.parametrize(
    ("kind", "square", "rectangle"),
    [
        (said(int), 8, None),
        (said(int | None), 8, None),
        (said(Literal[8, 16]), 8, None),
        (said(float), 8.0, None),
        (said(tuple[int, int]), (8, 8), (4, 6)),
        (said(tuple[int, ...] | None), (8, 8), (4, 6)),
        (said(int | tuple[int, int]), (8, 8), (4, 6)),
        (said(list[int]), [8, 8], [4, 6]),
        (said(Sequence[int] | int), [8, 8], [4, 6]),
        (said(Any), (8, 8), (4, 6)),
        (said(object), (8, 8), (4, 6)),
        (unsaid(), (8, 8), (4, 6)),
        (unsaid(None), (8, 8), (4, 6)),
        (unsaid((3, 3)), (8, 8), (4, 6)),
        (unsaid([3, 3]), [8, 8], [4, 6]),
        (unsaid(28), 8, (4, 6)),  # which may well take both
        *((said(other), None, None) for other in (str, bool, torch.Size, set[int], tuple[int, int, int], dict)),
    ],
)
def test_sizes_of_images_come_in_the_form_that_is_taken(kind, square, rectangle):
    for size, expected in (((8, 8), square), ((4, 6), rectangle)):
        if expected is None:
            with pytest.raises(ValueError, match=r"image_size of Taker takes .*, and that of the data is the pair \("):
                fitting_size(kind, "image_size", size)
        else:
            found = fitting_size(kind, "image_size", size)
            assert (found, type(found)) == (expected, type(expected))


def test_numbers_come_as_they_are_or_are_refused():
    class Net:
        def __init__(self, num_classes: int = 3, in_channels: list[int] | None = None, **other: Any):
            pass

    assert fitting_size(Net, "num_classes", 10) == 10
    assert fitting_size(Net, "image_size", (8, 8)) == (8, 8)  # not handed over
    with pytest.raises(ValueError, match=r"in_channels of Net takes list\[int\] \| None, and that of the data is 3;"):
        fitting_size(Net, "in_channels", 3)
