import csv

import numpy as np
import pytest
import torch
from helpers import assert_refused
from PIL import Image

from lightning_sym.datamodules import BrodenDataModule, Concept, ConceptsDataModule
from lightning_sym.datamodules.concepts import COLOURS, SHAPES, STROKES, TEXTURES, glyph_masks


@pytest.fixture(scope="module")
def data():
    return ConceptsDataModule(eval_batch_size=300)


def glyph(kind):
    row, column = np.mgrid[:28, :28]
    shapes = {
        "horizontal stroke": (abs(row - 14) < 2) & (abs(column - 14) < 9),
        "vertical stroke": (abs(column - 14) < 2) & (abs(row - 14) < 9),
        "falling stroke": (abs(row - column) < 2) & (abs(row - 14) < 9),
        "rising stroke": (abs(row + column - 28) < 2) & (abs(row - 14) < 9),
        "loop": abs(np.hypot(row - 14, column - 14) - 8) < 1.5,
    }
    return (255 * shapes[kind]).astype(np.uint8)


@pytest.mark.parametrize("kind", STROKES)
def test_stroke_of_a_glyph_has_its_direction(kind):
    masks = dict(zip((*STROKES, *SHAPES), glyph_masks(glyph(kind)), strict=True))
    ink = glyph(kind) > 0
    assert masks[kind].sum() > 0.7 * ink.sum()
    assert not masks["loop"].any()
    others = [masks[other] for other in STROKES if other != kind]
    assert sum(mask.sum() for mask in others) < 0.2 * ink.sum()
    # Every pixel of ink is of one stroke or a corner.
    assert (sum(mask.astype(int) for name, mask in masks.items() if name != "loop") == ink).all()


def test_loop_of_a_glyph_is_what_ink_encloses():
    masks = glyph_masks(glyph("loop"))
    row, column = np.mgrid[:28, :28]
    assert (masks[-1] == (np.hypot(row - 14, column - 14) <= 6.5)).all()
    assert all(masks[kind].any() for kind in range(4)), "a ring has all directions"


def test_every_concept_is_in_many_images_and_in_few_pixels(data):
    masks = data.concept_masks()
    assert len({concept.name for concept in data.concepts}) == len(data.concepts) == masks.shape[1] == 25
    assert int(masks.flatten(2).any(2).sum(0).min()) > 100
    coverage = masks.double().mean((0, 2, 3))
    assert float(coverage.min()) > 0.002
    assert float(coverage.max()) < 0.05


def test_masks_say_what_is_drawn(data):
    masks = dict(zip([concept.name for concept in data.concepts], data.concept_masks().unbind(1), strict=True))
    images, labels = data.split_tensors("test")
    pixels = images.movedim(1, -1).float()
    ink = torch.stack([masks[name] for name in COLOURS]).any(0)
    for name, colour in COLOURS.items():
        mean = pixels[masks[name]].median(0).values
        assert (mean - torch.tensor(colour)).abs().max() < 15
    for name in TEXTURES:
        place = labels % len(TEXTURES) == TEXTURES.index(name)
        assert torch.equal(masks[name].flatten(1).any(1), place), "the class says which texture it is"
        assert not (masks[name] & ink).any()
        light = (pixels[masks[name]].mean(1) > 130).float().mean()
        assert abs(light - (0.25 if name == "dots" else 0.5)) < 0.03
    positions = [mask for concept, mask in zip(data.concepts, masks.values(), strict=True) if concept[1] == "position"]
    assert torch.equal(sum(mask.int() for mask in positions), ink.int())
    strokes = sum(masks[name].int() for name in (*STROKES, "corner"))
    assert torch.equal(strokes, ink.int())


def test_images_follow_from_the_seed_alone(data):
    again, other = ConceptsDataModule(max_samples=50), ConceptsDataModule(concept_seed=1, max_samples=50)
    again.concept_masks()  # before the images are asked for
    first = data.split_tensors("test").images[:50]
    assert torch.equal(again.split_tensors("test").images, first)
    assert torch.equal(again.concept_masks(), data.concept_masks()[:50])
    assert not torch.equal(other.split_tensors("test").images, first)
    assert again.identity()["fingerprint"] == ConceptsDataModule(max_samples=50).identity()["fingerprint"]
    assert ConceptsDataModule(copies=2).identity()["splits"] == {"train": 7200, "val": 800, "test": 1000}


def test_concept_batches_are_all_test_images_in_order(data):
    loader = data.concept_dataloader()
    batches = list(loader)
    assert [len(batch.images) for batch in batches] == [300, 300, 300, 100]
    assert loader.total == 1000
    images, labels = data.split_tensors("test")
    assert torch.equal(torch.cat([batch.images for batch in batches]), data.normalize(images))
    assert torch.equal(torch.cat([batch.labels for batch in batches]), labels)
    assert torch.equal(torch.cat([batch.masks for batch in batches]), data.concept_masks())
    assert all(batch.annotated.all() for batch in batches)


# ---- Broden


def write_table(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def broden(tmp_path):
    """Two images in Broden's format: a colour and an object in each pixel, and a scene of the second image."""
    (tmp_path / "images/one").mkdir(parents=True)
    write_table(tmp_path / "category.csv", [{"name": name, "first": 0} for name in ("color", "object", "scene")])
    for category, concepts in {
        "color": {1: "red-c"},
        "object": {2: "tree", 300: "sky"},
        "scene": {7: "street"},
    }.items():
        rows = [{"code": code, "number": n, "name": name} for code, (n, name) in enumerate(concepts.items())]
        write_table(tmp_path / f"c_{category}.csv", rows)
    rows = [
        {"image": "one/a.jpg", "split": "val", "color": "", "object": "one/a_1.png;one/a_2.png", "scene": ""},
        {"image": "one/b.jpg", "split": "train", "color": "one/b_c.png", "object": "", "scene": "7;99"},
    ]
    write_table(tmp_path / "index.csv", [{**row, "ih": 4, "iw": 4, "sh": 2, "sw": 2} for row in rows])
    for name in ("a", "b"):
        Image.fromarray(np.full((4, 4, 3), 255 if name == "a" else 0, np.uint8)).save(
            tmp_path / f"images/one/{name}.jpg"
        )
    for name, numbers in {"a_1": [[2, 300], [0, 5]], "a_2": [[0, 2], [0, 0]], "b_c": [[1, 1], [1, 0]]}.items():
        numbers = np.array(numbers)
        pixels = np.stack([numbers % 256, numbers // 256, 0 * numbers], -1).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"images/one/{name}.png")
    return tmp_path


def test_broden_is_read_as_it_is_written(broden):
    data = BrodenDataModule(str(broden), image_size=(3, 5), split=None, mean=(0, 0, 0), std=(1, 1, 1))
    (batch,) = data.concept_dataloader()
    assert data.concepts == (
        Concept("red-c", "color"),
        Concept("tree", "object"),
        Concept("sky", "object"),
        Concept("street", "scene"),
    )
    assert batch.images.shape == (2, 3, 3, 5)
    assert batch.images[0].eq(1).all()
    assert batch.images[1].eq(0).all()
    assert batch.labels is None
    assert batch.annotated.int().tolist() == [[0, 1, 1, 0], [1, 0, 0, 1]]
    masks = torch.zeros(2, 4, 2, 2, dtype=torch.bool)
    masks[0, 1, 0, :] = masks[0, 2, 0, 1] = True  # of two annotations one tree each, and a number that is no concept
    masks[1, 0] = torch.tensor([[True, True], [True, False]])
    masks[1, 3] = True
    assert torch.equal(batch.masks, masks)
    assert data.identity()["splits"] == {"images": 2}
    some = BrodenDataModule(str(broden), image_size=4, categories=["object"], split="val")
    assert [batch.masks.shape for batch in some.concept_dataloader()] == [(1, 2, 2, 2)]


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (lambda root: (root / "index.csv").unlink(), FileNotFoundError, ["index.csv", "is not there", "set root"]),
        (lambda root: (root / "c_scene.csv").unlink(), FileNotFoundError, ["c_scene.csv"]),
        (lambda root: (root / "images/one/a_1.png").unlink(), FileNotFoundError, ["a_1.png", "index.csv", "unpack"]),
        (lambda root: (root / "images/one/a.jpg").write_text("no image"), ValueError, ["a.jpg", "cannot be read"]),
        (lambda root: (root / "category.csv").write_text("nom\nx\n"), ValueError, ["category.csv", "no column name"]),
        (lambda root: (root / "c_color.csv").write_text("number,name\nred,1\n"), ValueError, ["c_color.csv", "'red'"]),
        (lambda root: Image.new("RGB", (3, 2)).save(root / "images/one/a_1.png"), ValueError, ["2 x 3", "2 x 2"]),
    ],
)
def test_damaged_broden_is_one_sentence(broden, damage, error, says):
    damage(broden)
    data = BrodenDataModule(str(broden), image_size=4)
    assert_refused(lambda: list(data.concept_dataloader()), error=error, says=says)


def test_broden_names_what_there_is(broden):
    for setting, known in (({"split": "tets"}, "val"), ({"categories": ["colour"]}, "color")):
        assert_refused(BrodenDataModule(str(broden), **setting).setup, says=known)
