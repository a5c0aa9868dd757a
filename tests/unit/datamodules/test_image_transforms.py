import math

import pytest
import torch
import torch.nn.functional as F
from fits import fit

from lightning_sym.datamodules import DigitsDataModule, ImageTransform, Quadrant, Resized, Rotated, Translated
from lightning_sym.datamodules.transforms import paste, resize, rotate, translate


class Inverted(ImageTransform):
    """Written by a user."""

    def __init__(self, top: int = 255) -> None:
        self.top = top

    def __call__(self, images, labels, split):
        return self.top - images, labels


def disc(count, size):
    """Smooth images that vanish outside the inscribed disc."""
    grid = torch.linspace(-1, 1, size)
    radius = (grid[:, None] ** 2 + grid**2).sqrt()
    pattern = 100 * (1 + torch.sin(4 * grid[:, None] + 2 * grid)) * (1 - radius).clamp(0)
    return pattern.to(torch.uint8).expand(count, 1, size, size).contiguous()


def test_rotate_by_quarter_turns_is_exact(numbered):
    images = numbered(8, (3, 7, 7)).images
    for turns in range(-2, 3):
        turned = rotate(images, torch.full((8,), 90.0 * turns))
        assert torch.equal(turned, torch.rot90(images, turns, dims=(-2, -1)))


@pytest.mark.parametrize("angle", [33.0, 180.0])
def test_rotate_matches_bilinear_interpolation_pixel_by_pixel(numbered, angle):
    images = numbered(1, (1, 6, 9)).images
    turned = rotate(images, torch.tensor([angle]))
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    for row in range(6):
        for column in range(9):
            y, x = row - 2.5, column - 4.0
            source_y, source_x = sin * x + cos * y + 2.5, cos * x - sin * y + 4.0
            value = 0.0
            for r in (math.floor(source_y), math.floor(source_y) + 1):
                for c in (math.floor(source_x), math.floor(source_x) + 1):
                    if 0 <= r < 6 and 0 <= c < 9:
                        weight = (1 - abs(source_y - r)) * (1 - abs(source_x - c))
                        value += weight * int(images[0, 0, r, c])
            assert int(turned[0, 0, row, column]) == int(value + 1e-2)


def test_translate_by_whole_pixels_is_exact(numbered):
    images = numbered(3, (2, 6, 9)).images
    moved = translate(images, torch.tensor([[1.0, 0.0], [0.0, -2.0], [-3.0, 4.0]]))
    assert torch.equal(moved[0, :, 1:], images[0, :, :-1])
    assert moved[0, :, 0].sum() == 0
    assert torch.equal(moved[1, :, :, :-2], images[1, :, :, 2:])
    assert torch.equal(moved[2, :, :3, 4:], images[2, :, 3:, :-4])
    assert moved[2, :, 3:].sum() == moved[2, :, :, :4].sum() == 0


def test_translate_by_half_a_pixel_averages():
    images = torch.tensor([[[[10, 20, 40]]]], dtype=torch.uint8)
    assert translate(images, torch.tensor([[0.0, 0.5]])).flatten().tolist() == [5, 15, 30]


def test_quadrants_are_numbered_as_documented(numbered):
    images = numbered(4, (1, 3, 4)).images
    canvas = paste(images, torch.tensor([0, 1, 2, 3]))
    assert canvas.shape == (4, 1, 6, 8)
    assert torch.equal(canvas[0, :, :3, :4], images[0])
    assert torch.equal(canvas[1, :, :3, 4:], images[1])
    assert torch.equal(canvas[2, :, 3:, :4], images[2])
    assert torch.equal(canvas[3, :, 3:, 4:], images[3])
    assert torch.equal(canvas.sum(dim=(1, 2, 3)), images.sum(dim=(1, 2, 3)))


@pytest.mark.parametrize(("size", "image"), [(None, 8), (32, 28), (16, 8), (32, 8)])
def test_a_change_of_quadrant_is_a_circular_shift_by_half_the_canvas(numbered, size, image):
    source = numbered(400, (1, image, image))
    source.images[:] = source.images[:1]  # one image, many quadrants
    canvases, labels = Quadrant(size=size)(*source, "train")
    half = canvases.shape[-1] // 2
    quadrants = (labels - source.labels) // 10
    assert quadrants.unique().tolist() == [0, 1, 2, 3]
    upper_left = canvases[quadrants == 0][0]
    for canvas, quadrant in zip(canvases, quadrants.tolist(), strict=True):
        shifts = (half * (quadrant // 2), half * (quadrant % 2))
        assert torch.equal(canvas, upper_left.roll(shifts, dims=(-2, -1)))


@pytest.mark.parametrize("shape", [(1, 8, 8), (2, 8, 12)])
def test_jitter_moves_each_image_around_the_torus(numbered, shape):
    source = numbered(300, shape)
    still, labels = Quadrant()(*source, "train")
    moved, same_labels = Quadrant(jitter=2)(*source, "train")
    assert torch.equal(labels, same_labels)
    found = set()
    for one, other in zip(still, moved, strict=True):
        places = [(i, j) for i in range(-2, 3) for j in range(-2, 3) if torch.equal(one.roll((i, j), (1, 2)), other)]
        assert len(places) == 1
        found.update(places)
    assert len(found) == 25
    fewer, _ = Quadrant(jitter=2)(source.images[:10], source.labels[:10], "train")
    assert torch.equal(fewer, moved[:10])
    assert not torch.equal(moved, Quadrant(jitter=2)(*source, "test")[0])
    with pytest.raises(ValueError, match=r"smaller than a quarter of the canvas, which is 16x(16|24), got 4"):
        Quadrant(jitter=4)(*source, "train")


def test_quadrant_equals_resizing_the_canvas_as_in_the_paper(numbered):
    source = numbered(30, (1, 28, 28))
    small, labels = Quadrant(size=32)(*source, "test")
    large, same_labels = Quadrant()(*source, "test")
    assert torch.equal(labels, same_labels)
    expected = F.interpolate(large.float(), size=(32, 32), mode="bilinear", antialias=False).round()
    assert torch.equal(small, expected.to(torch.uint8))


def test_quadrant_targets(numbered):
    source = numbered(50, (1, 4, 4))
    digit, both = Quadrant(target="digit"), Quadrant()
    images, labels = digit(*source, "train")
    assert torch.equal(labels, source.labels)
    assert torch.equal(both(*source, "train")[0], images)
    assert (digit.output_classes(10), both.output_classes(10)) == (10, 40)
    assert digit.output_names(("a",)) == ("a",)
    assert both.output_names(("a", "b"))[:3] == ("a upper left", "b upper left", "a upper right")


TRANSFORMS = [Rotated(), Translated(2.5), Quadrant(), Quadrant(target="digit", size=12), Resized(11)]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("shape", [(1, 9, 7), (3, 4, 5), (2, 1, 4)])
def test_an_image_depends_on_its_index_and_the_split_only(numbered, transform, shape):
    source = numbered(1500, shape)  # more than one piece of work
    before = source.images.clone()
    images, labels = transform(*source, "train")
    assert torch.equal(source.images, before)
    assert images.dtype == torch.uint8
    assert tuple(images.shape[1:]) == transform.output_shape(shape)
    assert int(labels.max()) < transform.output_classes(10)
    for count in (1, 17, 1100):
        part, part_labels = transform(source.images[:count], source.labels[:count], "train")
        assert torch.equal(part, images[:count])
        assert torch.equal(part_labels, labels[:count])
    if not isinstance(transform, Resized):
        assert not torch.equal(transform(*source, "test")[0], images)


def test_seeds_choose_the_draw(numbered):
    source = numbered(20, (1, 8, 8))
    assert torch.equal(Rotated(train_seed=5)(*source, "train")[0], Rotated(test_seed=5)(*source, "test")[0])
    assert not torch.equal(Rotated(train_seed=5)(*source, "train")[0], Rotated()(*source, "train")[0])


def test_angles_and_shifts_fill_their_range():
    images = disc(400, 21)
    labels = torch.zeros(400).long()
    turned, _ = Rotated(max_angle=90)(images, labels, "train")
    candidates = rotate(images[:31], torch.arange(-90.0, 91, 6)).float().flatten(1)
    nearest = torch.cdist(turned.float().flatten(1), candidates).argmin(1)
    assert nearest.min() == 0
    assert nearest.max() == 30
    moved, _ = Translated(3.0)(images, labels, "train")
    rows = torch.arange(21.0)
    weights = moved.float().sum(dim=(1, 3))
    centres = (weights * rows).sum(1) / weights.sum(1)
    first = images[:1].float().sum(dim=(1, 3))
    shifts = centres - (first * rows).sum() / first.sum()
    assert -3.2 < shifts.min() < -2.6
    assert 2.6 < shifts.max() < 3.2


def test_resize_is_bilinear_and_rounded():
    images = torch.tensor([[[[0, 100], [200, 255]]]], dtype=torch.uint8)
    assert resize(images, (2, 2)) is images
    assert resize(images, (1, 1)).item() == 139  # 138.75


def test_transforms_compose_in_a_datamodule_whose_sizes_are_known_before_the_data_are_read(tiny):
    data = tiny(transforms=[Resized(7), Rotated(30), Quadrant(), Inverted()])
    assert (data.input_shape, data.image_size, data.in_channels) == ((2, 14, 14), (14, 14), 2)
    assert (data.num_classes, data.class_names[10]) == (40, "0 upper right")
    assert data.loads == 0
    images = data.split_tensors("test").images
    assert images.shape == (12, 2, 14, 14)
    assert int(images[0].max()) == 255  # the canvas, inverted


def test_config_is_plain_and_comes_back():
    transform = Quadrant(target="digit", size=32)
    config = transform.config()
    assert config["class_path"] == "lightning_sym.datamodules.transforms.Quadrant"
    assert ImageTransform.from_config(config).arguments() == transform.arguments()
    short = ImageTransform.from_config({"class_path": "lightning_sym.datamodules.Resized", "init_args": {"size": 9}})
    assert short.output_shape((1, 2, 2)) == (1, 9, 9)
    assert ImageTransform.from_config(Inverted(7).config()).arguments() == {"top": 7}


def test_a_checkpoint_of_a_run_holds_transforms_as_settings(tmp_path, recorder):
    data = DigitsDataModule(max_samples=40, transforms=[Quadrant()])
    fit(recorder(data), data, max_steps=1).save_checkpoint(tmp_path / "last.ckpt")
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)["datamodule_hyper_parameters"]
    assert stored["transforms"] == [Quadrant().config()]
    again = DigitsDataModule.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert again.identity() == data.identity()
