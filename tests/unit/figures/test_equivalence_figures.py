"""The figures of equivalence classes show what they are given."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import too_small
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from mpl_toolkits.mplot3d.art3d import Path3DCollection, Poly3DCollection

from lightning_sym.figures import (
    FoundPoint,
    betti_curve,
    class_stack_figure,
    embedding,
    isosurface,
    isosurface_mesh,
    log_contour,
    loss_surface,
    planes_beside,
    point_set,
    search_curves,
)

pytestmark = pytest.mark.long

TARGET = (0.56, 0.30)
SCALE = SimpleNamespace(zero=0.2018, constant=0.0841)
AXIS = np.linspace(-2, 2, 41)
POINTS = [
    FoundPoint(r"$\theta_0$", (0, 0), 0.0),
    FoundPoint(r"$\theta_1$", (1.5, 0), 0.01),
    FoundPoint(r"$\theta_2$", (0.2, -1), 0.02),
]
POINTS3 = [FoundPoint(point.label, (*point.coefficients, 0.5), point.loss) for point in POINTS]


def exact(weights, target=TARGET):
    a, b, c, d = np.moveaxis(weights, -1, 0)
    p = c * np.maximum(a, 0) + d * np.maximum(b, 0)
    q = c * np.maximum(-a, 0) + d * np.maximum(-b, 0)
    return ((p - target[0]) ** 2 + (q - target[1]) ** 2) / 2


def plane(dimension: int, axis=AXIS, target=TARGET):
    """J on a random orthonormal plane through a member of the class, as its value at the centre shows."""
    basis, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(4, dimension)))
    coefficients = np.stack(np.meshgrid(*[axis] * dimension, indexing="ij"), -1)
    return exact(np.array([0.8, -0.6, 0.7, 0.5]) + coefficients @ basis.T, target)


def sphere(radius_axis=AXIS):
    x, y, z = np.meshgrid(*[radius_axis] * 3, indexing="ij")
    return x**2 + y**2 + z**2


def drawn(figure: Figure) -> Figure:
    figure.savefig(io.BytesIO())
    assert not too_small(figure)
    return figure


def words(figure: Figure) -> str:
    """All that is written outside of legends."""
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    return " ".join([*texts, figure.get_suptitle(), *(artist.get_text() for artist in notes(figure))])


def notes(figure: Figure) -> list:
    return [artist for artist in figure.get_children() if type(artist).__name__ == "Annotation"]


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def bar(figure: Figure):
    """The axes of the colour bar."""
    (axes,) = (axes for axes in figure.axes if axes.get_label() == "<colorbar>")
    return axes


def marked(axes) -> dict[str, float]:
    """Where lines cross the colour bar, by what the text that points at them says."""
    low, high = axes.get_ylim()
    return {text.get_text(): low + text.xy[1] * (high - low) for text in axes.texts}


def lines(axes, name: str):
    (line,) = (line for line in axes.lines if str(line.get_label()).startswith(name))
    return line


# ---- planes


def test_surface_has_the_points_at_their_height_and_is_cut_off():
    values = plane(2)
    figure = drawn(loss_surface(values, AXIS, POINTS, SCALE, title="surface"))
    axes = figure.axes[0]
    for point, color in zip(POINTS, ("#d62728", "#8e44c9", "#f0e442"), strict=True):
        line = lines(axes, point.label)
        np.testing.assert_allclose(np.ravel(line.get_data_3d()), [*point.coefficients, point.loss])
        assert to_hex(line.get_markerfacecolor()) == color
    clip = 2 * SCALE.zero
    quartile = np.quantile(values, 0.25)
    top = max(clip, quartile)
    assert axes.get_zlim()[1] == pytest.approx(top)
    assert axes.get_zlabel() == f"J, cut off at {top:.3g}"
    (surface,) = (part for part in axes.collections if isinstance(part, Poly3DCollection))
    heights = surface.get_array()
    assert np.nanmax(heights) <= top
    assert bar(figure).get_ylabel() == "J"
    assert {"$J_0$ = 0.202": SCALE.zero, "V = 0.0841": SCALE.constant} == pytest.approx(marked(bar(figure)))
    assert figure.get_suptitle() == "surface"


def test_contours_are_of_the_natural_logarithm():
    values = plane(2)
    values[20, 20] = 0  # the centre is a member
    figure = drawn(log_contour(values, AXIS, POINTS, SCALE, epsilon=0.004, title="contour"))
    axes = figure.axes[0]
    levels = axes.collections[0].levels
    assert levels[0] >= np.log(0.004) - 13
    assert levels[-1] <= np.log(values.max()) + 1
    assert np.log(SCALE.zero) < levels[-1]
    assert bar(figure).get_ylabel() == "ln J"
    expected = {"$J_0$ = 0.202": np.log(SCALE.zero), "V = 0.0841": np.log(SCALE.constant)}
    assert marked(bar(figure)) == pytest.approx(expected | {r"$\epsilon$ = 0.004": np.log(0.004)})
    for point in POINTS:
        np.testing.assert_allclose(np.ravel(lines(axes, point.label).get_data()), point.coefficients)
    assert r"$\theta_1$, J = 0.01" in labels(figure)
    low, high = bar(figure).get_ylim()
    assert all(low <= tick <= high for tick in bar(figure).get_yticks())


def test_the_line_at_epsilon_and_the_exact_class_are_in_place():
    values = (AXIS[:, None] - 0.33) ** 2 + 0 * AXIS
    field = np.where(AXIS > 0, AXIS[:, None] - 0.33, np.nan)
    figure = drawn(log_contour(values, AXIS, [], SCALE, epsilon=0.01, overlay=[("exact", field), ("none", field + 9)]))
    _, at_epsilon, at_zero = figure.axes[0].collections
    ends = np.concatenate([path.vertices for path in at_epsilon.get_paths()])[:, 0]
    assert set(np.round(ends, 3)) == {0.23, 0.43}
    vertices = np.concatenate([path.vertices for path in at_zero.get_paths()])
    np.testing.assert_allclose(vertices[:, 0], 0.33)  # rows are the first axis, which is drawn to the right
    assert vertices[:, 1].min() > 0
    assert labels(figure) == [r"J = $\epsilon$ = 0.01", "exact", "none (not on this grid)"]


def test_missing_infinite_and_constant_values():
    values = plane(2)
    values[:5], values[:, 7] = np.nan, np.inf
    drawn(loss_surface(values, AXIS, POINTS, SCALE))
    drawn(log_contour(values, AXIS, POINTS, SCALE, epsilon=0.01))
    for constant in (np.nan, np.inf, 0.0, 0.3):
        surface = drawn(loss_surface(np.full((41, 41), constant), AXIS, POINTS, SCALE))
        assert ("nowhere on the grid" in words(surface).replace("\n", " ")) == (not np.isfinite(constant))
        figure = drawn(log_contour(np.full((41, 41), constant), AXIS, POINTS, SCALE, epsilon=0.01))
        assert labels(figure)[-1].endswith("(not on this grid)")
    nothing = SimpleNamespace(zero=0.0, constant=np.nan)
    figure = drawn(log_contour(plane(2), AXIS, [], nothing))
    assert marked(bar(figure)) == {}


def test_points_off_the_grid_are_told_apart():
    points = [FoundPoint("far", (5, 0), 0.1), FoundPoint("lost", (np.nan, 0), 0.1), FoundPoint("t", (1, 1), np.nan)]
    figure = drawn(log_contour(plane(2), AXIS, points, SCALE))
    assert labels(figure) == ["far, J = 0.1 (outside)", "lost, J = 0.1 (outside)", "t"]
    axes = figure.axes[0]
    assert axes.get_xlim() == (-2, 2)
    assert np.isnan(lines(axes, "far").get_xdata()).all()


def test_two_planes_have_one_scale():
    near, far = plane(2), 100 * plane(2, AXIS[::2])
    figure = drawn(
        planes_beside(
            (near, far), (AXIS, AXIS[::2]), (POINTS, POINTS[:1]), SCALE, names=("searched", "orbit"), epsilon=0.01
        )
    )
    left, right, _ = figure.axes
    assert [left.get_title(), right.get_title()] == ["searched", "orbit"]
    np.testing.assert_array_equal(left.collections[0].levels, right.collections[0].levels)
    assert left.collections[0].norm.vmax == right.collections[0].norm.vmax
    assert labels(figure)[3:] == [r"orbit: $\theta_0$, J = 0", r"J = $\epsilon$ = 0.01"]
    assert bar(figure).get_ylabel() == "ln J"


@pytest.mark.parametrize("count", [1, 3, 6])
def test_stack_of_classes(count):
    targets = [(0.56, 0.1 * k) for k in range(count)]
    stack = np.stack([plane(2, AXIS, target) for target in targets])
    names = [f"q = {q}" for _, q in targets]
    figure = drawn(class_stack_figure(stack, names, AXIS, epsilon=0.004))
    panels = [axes for axes in figure.axes if axes.collections and axes is not bar(figure)]
    assert [axes.get_title() for axes in panels] == names
    assert len({tuple(axes.collections[0].levels) for axes in panels}) == 1
    assert marked(bar(figure)) == pytest.approx({r"$\epsilon$ = 0.004": np.log(0.004)})


# ---- sets


def test_point_set_has_all_points_below_epsilon():
    coefficients = np.stack(np.meshgrid(*[AXIS] * 3, indexing="ij"), -1).reshape(-1, 3)
    values = sphere().ravel()
    values[0] = np.nan
    figure = drawn(point_set(coefficients, values, 0.5, 2.0, POINTS3, SCALE, title="set"))
    inside = coefficients[values < 0.5]
    assert f"J < 0.5: {len(inside):,} grid points" in figure.get_suptitle()
    assert "drawn" not in figure.get_suptitle()
    views = set()
    for axes in figure.axes[:2]:
        views.add((axes.elev, axes.azim))
        (dots,) = (part for part in axes.collections if isinstance(part, Path3DCollection))
        np.testing.assert_array_equal(np.sort(np.stack(dots._offsets3d, 1), 0), np.sort(inside, 0))
        assert dots.get_clim() == (0, 0.5)
        assert dots.get_rasterized()
        np.testing.assert_allclose(np.ravel(lines(axes, r"$\theta_1$").get_data_3d()), [1.5, 0, 0.5])
    assert len(views) == 2
    assert bar(figure).get_ylabel() == "J"
    assert marked(bar(figure)) == pytest.approx({"$J_0$ = 0.202": SCALE.zero, "V = 0.0841": SCALE.constant})


@pytest.mark.parametrize("count", [0, 5])
def test_an_empty_set_says_so(count):
    figure = drawn(point_set(np.zeros((count, 3)), np.full(count, 0.3), 0.1, 2.0, POINTS3, SCALE, title="empty"))
    said = words(figure).replace("\n", " ")
    assert "No point of the grid has J < 0.1" in said
    assert ("the smallest is 0.3" in said) == (count > 0)
    assert "No point" in words(drawn(embedding(np.zeros((0, 2)), [], 0.1, [], SCALE)))


def test_mesh_is_a_sphere():
    values = sphere() / 0.81
    vertices, faces = isosurface_mesh(values, AXIS, 1.0)
    assert vertices.dtype == np.float64
    assert faces.dtype == np.int64
    np.testing.assert_allclose(np.linalg.norm(vertices, axis=1), 0.9, atol=2e-3)
    corners = vertices[faces]
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    assert (np.einsum("fk,fk->f", normals, corners.mean(1)) > 0).mean() > 0.99  # outward
    # Euler's formula
    edges = {tuple(sorted(edge)) for face in faces for edge in zip(face, np.roll(face, 1), strict=True)}
    assert len(vertices) - len(edges) + len(faces) == 2
    # what is known only to be above leaves the surface where it was, to a part of a cell
    rejected, triangles = isosurface_mesh(np.where(values < 1.6, values, np.inf), AXIS, 1.0)
    assert len(triangles) == len(faces)
    np.testing.assert_allclose(np.linalg.norm(rejected, axis=1), 0.9, atol=0.05)


def test_mesh_leaves_out_cubes_without_values():
    values = np.where(np.meshgrid(*[AXIS] * 3, indexing="ij")[0] >= 0, sphere(), np.nan)
    vertices, faces = isosurface_mesh(values, AXIS, 1.0)
    assert len(faces) > 100
    assert vertices[:, 0].min() >= 0
    np.testing.assert_allclose(np.linalg.norm(vertices, axis=1), 1, atol=2e-3)
    for nothing in (np.full_like(values, np.nan), np.full_like(values, np.inf), sphere() + 5, np.zeros_like(values)):
        vertices, faces = isosurface_mesh(nothing, AXIS, 1.0)
        assert vertices.shape == faces.shape == (0, 3)
    # a lone value among missing ones has a level on its edges, but no whole cube
    lone = np.full_like(values, np.nan)
    lone[5, 5, 5], lone[9, 9, 9] = 0.5, 2.0
    assert len(isosurface_mesh(lone, AXIS, 1.0)[1]) == 0


def test_isosurface_shows_the_set_and_the_exact_class():
    values = plane(3, AXIS[::2])
    field = np.where(sphere(AXIS[::2]) < 2, np.meshgrid(*[AXIS[::2]] * 3, indexing="ij")[2] - 0.1, np.nan)
    faces = len(isosurface_mesh(values, AXIS[::2], 0.02)[1])
    for exact_field in (None, field, np.full_like(field, np.nan)):
        figure = drawn(isosurface(values, AXIS[::2], 0.02, POINTS3, SCALE, overlay_field=exact_field, title="tube"))
        for axes in figure.axes:
            (surface,) = (part for part in axes.collections if isinstance(part, Poly3DCollection))
            more = len(surface._facecolor3d) - faces
            assert (more > 0) == (exact_field is field)
            assert axes.get_xlim() == pytest.approx((-2, 2))
        assert any("J = 0.02  ($J_0$ = 0.202, V = 0.0841)" in label for label in labels(figure))
    assert labels(figure)[-1] == "exact class (not on this grid)"
    assert figure.axes[0].azim != figure.axes[1].azim


def test_embedding_has_the_points_of_the_paper_on_top():
    coordinates = np.random.default_rng(0).normal(size=(50, 2))
    coordinates[3] = np.nan
    figure = drawn(embedding(coordinates, np.linspace(0, 0.1, 50), 0.1, POINTS, SCALE, title="UMAP"))
    axes = figure.axes[0]
    (dots,) = (part for part in axes.collections if isinstance(part, PathCollection))
    np.testing.assert_array_equal(dots.get_offsets(), np.delete(coordinates, 3, 0))
    assert dots.get_clim() == (0, 0.1)
    colors = [to_hex(lines(axes, point.label).get_markerfacecolor()) for point in POINTS]
    assert colors == ["#0072b2", "#d62728", "#8e44c9"]
    assert "49 weights with J < 0.1" in figure.get_suptitle()
    assert "▲ $J_0$ = 0.202" in marked(bar(figure))


# ---- curves


def test_betti_numbers_and_thresholds():
    counts = {"pieces": [4, 2, 1], "loops": [0, 1, 0]}
    figure = drawn(betti_curve([0.1, 0.01, 1], counts, {"barrier": 0.045, "unknown": np.nan}, title="b"))
    (axes,) = figure.axes
    np.testing.assert_array_equal(lines(axes, "pieces").get_xdata(), [0.01, 0.1, 1])
    np.testing.assert_array_equal(lines(axes, "pieces").get_ydata(), [2, 4, 1])
    np.testing.assert_array_equal(lines(axes, "barrier").get_xdata(), 0.045)
    assert labels(figure) == ["pieces", "loops", "barrier = 0.045"]
    assert axes.get_xscale() == "log"
    assert axes.get_yscale() == "linear"
    (axes,) = drawn(betti_curve([0.1, 1], {"pieces": [4000, 1]}, {})).axes
    assert axes.get_yscale() == "symlog"
    assert axes.get_ylim()[1] > 4000


def search(candidates: int = 6):
    steps = np.arange(0, 100, 10)
    losses = SCALE.zero * np.exp(-np.outer(steps, np.linspace(0, 0.5, candidates)))
    return steps, losses


def test_search_tells_survivors_from_failures():
    steps, losses = search()
    losses[-1, 0], losses[-1, 3] = 0.157, 0.0
    losses[5:, 1] = np.nan
    kept = losses[-1] < 1e-6
    figure = drawn(search_curves(steps, losses, kept, 1e-6, SCALE, levels={"bad": 0.157}, title="search"))
    left, right = figure.axes
    failed, survived = (part for part in left.collections)
    assert (len(failed.get_segments()), len(survived.get_segments())) == (2, 4)
    np.testing.assert_allclose(failed.get_segments()[0][:, 1], losses[:, 0])
    np.testing.assert_array_equal(lines(left, "$J_0$").get_ydata(), SCALE.zero)
    np.testing.assert_array_equal(lines(left, "V").get_ydata(), SCALE.constant)
    np.testing.assert_array_equal(lines(left, "threshold: 1e-06").get_ydata(), 1e-6)
    assert left.get_yscale() == "log"
    assert labels(figure)[:2] == ["not found: 2", "found: 4"]
    np.testing.assert_allclose(lines(right, "bad = 0.157").get_xdata(), 0.157 / SCALE.zero)
    assert right.get_xlabel() == "last J / $J_0$"
    assert right.get_title().endswith("(1 not finite)")
    assert sum(patch.get_height() for patch in right.patches) == 5


# ---- all


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: loss_surface(np.zeros((3, 4)), [0, 1, 2], [], SCALE), r"values must have shape \[3, 3\]"),
        (lambda: loss_surface(np.zeros((3, 3)), [0, 2, 1], [], SCALE), "axis must ascend"),
        (lambda: loss_surface(np.zeros((1, 1)), [0], [], SCALE), "axis must ascend"),
        (lambda: log_contour(plane(2), AXIS, POINTS3, SCALE), r"coefficients of .* must have shape \[2\]"),
        (lambda: log_contour(plane(2), AXIS, [], SCALE, epsilon=0), "epsilon must be a number > 0"),
        (lambda: log_contour(plane(2), AXIS, [], SCALE, overlay=[("c", [1])]), r"c must have shape \[41, 41\]"),
        (lambda: class_stack_figure(np.zeros((0, 2, 2)), [], [0, 1]), "at least one"),
        (lambda: class_stack_figure(np.zeros((2, 2, 2)), ["a"], [0, 1]), "one slice per label"),
        (lambda: point_set(np.zeros((3, 2)), np.zeros(3), 1, 1, [], SCALE), r"coefficients must have shape \[any, 3\]"),
        (lambda: point_set(np.zeros((3, 3)), np.zeros(2), 1, 1, [], SCALE), r"values must have shape \[3\]"),
        (lambda: point_set(np.zeros((3, 3)), np.zeros(3), np.nan, 1, [], SCALE), "epsilon must be a number > 0"),
        (lambda: isosurface_mesh(np.zeros((2, 2)), [0, 1], 1), r"values must have shape \[2, 2, 2\]"),
        (lambda: isosurface_mesh(np.zeros((2, 2, 2)), [0, 1], 0), "level must be a number > 0"),
        (lambda: isosurface(sphere(), AXIS, 1, [], SCALE, overlay_field=[1.0]), "overlay_field must have shape"),
        (lambda: embedding(np.zeros((3, 3)), np.zeros(3), 1, [], SCALE), "coordinates must have shape"),
        (lambda: betti_curve([1, 2], {"pieces": [1]}, {}), "must have shape"),
        (lambda: betti_curve([0, 2], {"pieces": [1, 1]}, {}), "epsilons must be positive"),
        (lambda: betti_curve([1], {}, {}), "numbers must have at least one"),
        (lambda: search_curves([0, 1], np.zeros((3, 2)), [1, 1], 1e-6, SCALE, levels={}), "losses must have shape"),
        (lambda: search_curves([0, 1], np.zeros((2, 0)), [], 1e-6, SCALE, levels={}), "at least one step and one"),
        (lambda: search_curves([0], [[1.0]], [True, False], 1e-6, SCALE, levels={}), r"found must have shape \[1\]"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
