"""The reader against images whose truth is known, spoiled images, and images of nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from scene_checks import misread, spoiled

from pellucid.core.errors import PellucidError
from pellucid.scenes import ObjectQuery, Query, Scene, SceneObject, Scenes, described, grade, read, render, sample
from pellucid.scenes.grading import graded

GENERATOR = torch.Generator()


def noise(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=GENERATOR.manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("objects", [1, 2, 3])
def test_true_renders_are_read_right(objects):
    scenes = sample(torch.arange(24), 21, "any", objects=(objects,))
    assert misread(scenes, read(render(scenes))) == []


@pytest.mark.slow
@pytest.mark.parametrize("objects", [1, 2, 3])
@pytest.mark.parametrize(("damage", "least"), [(False, 0.995), (True, 0.98)], ids=["true", "spoiled"])
def test_shares_of_many(objects, damage, least):
    right = total = 0
    for start in range(0, 700, 50):
        scenes = sample(torch.arange(start, start + 50), 31, "any", objects=(objects,))
        images = render(scenes)
        right += 50 - len(misread(scenes, read(spoiled(images, start) if damage else images)))
        total += 50
    assert right / total >= least


def test_spoiled_renders_are_mostly_read_right():
    scenes = sample(torch.arange(60), 21, "any")
    assert len(misread(scenes, read(spoiled(render(scenes))))) <= 3  # 98 % and a deviation and a half


def test_any_size_is_read():
    scenes = sample(torch.arange(12), 2)
    assert misread(scenes, read(render(scenes, 256))) == []


def test_a_reading_does_not_depend_on_its_batch():
    images = render(sample(torch.arange(10), 2))
    whole = read(images)
    assert [one.objects[0].shape for one in read(images[7:8])] == [whole[7].objects[0].shape]
    assert read(images[3])[0].relations == whole[3].relations


def test_slightly_wrong_colours_and_wobbly_edges_are_read():
    scenes = sample(torch.arange(30), 12, styles=("flat",), objects=(1,))
    images = render(scenes)
    tinted = (images + torch.tensor([0.05, -0.04, 0.05])[:, None, None]).clamp(-1, 1)
    wobble = F.interpolate(torch.randn(30, 2, 16, 16, generator=GENERATOR.manual_seed(1)), (128, 128), mode="bicubic")
    axis = (torch.arange(128) + 0.5) / 64 - 1
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1) + wobble.permute(0, 2, 3, 1) * 0.5 / 64
    bent = F.grid_sample(tinted, grid, align_corners=False, padding_mode="border")
    assert len(misread(scenes, read(bent))) <= 2


@pytest.mark.parametrize(
    "image",
    [
        noise(6, 3, 128, 128),
        noise(6, 3, 128, 128).sign(),
        F.interpolate(noise(6, 3, 10, 10), (128, 128), mode="bicubic").clamp(-1, 1),
        torch.linspace(-1, 1, 6)[:, None, None, None].expand(6, 3, 128, 128),
    ],
    ids=["noise", "bits", "clouds", "blank"],
)
def test_garbage_is_unreadable(image):
    assert [one.readable for one in read(image)] == [False] * 6


def test_blends_of_two_scenes_are_unreadable():
    images = render(sample(torch.arange(24), 5, styles=("flat",)))
    assert not any(one.readable for one in read((images[:12] + images[12:]) / 2))


def test_a_strange_thing_is_unreadable_and_not_guessed():
    """A red scribble of no shape: its colour is read, its shape is not."""
    image = render(Scenes.of([Scene((SceneObject("circle", "red", radius=0.02, x=0.02, y=0.02),))]))[0]
    red = torch.tensor([0.85, 0.16, 0.19])[:, None, None] * 2 - 1
    image[:, 20:26, 20:100] = red
    image[:, 20:100, 60:66] = red
    image[:, 94:100, 40:110] = red
    seen = read(image)[0]
    assert len(seen.objects) == 1
    assert seen.objects[0].shape is None
    assert seen.objects[0].colour == "red"


def test_two_of_one_colour_are_two():
    one, other = SceneObject("star", "red", x=0.25, radius=0.11), SceneObject("ring", "red", x=0.7, radius=0.14)
    reading = read(render(Scenes.of([Scene((one, other))])))[0]
    assert sorted(seen.shape for seen in reading.objects) == ["ring", "star"]
    assert reading.readable
    assert not graded(reading, Query((ObjectQuery("star", "red", size="small"),))).right


def test_four_of_one_colour_are_not_readable():
    things = [SceneObject("circle", "blue", x=x, y=y, radius=0.1) for x in (0.2, 0.8) for y in (0.2, 0.8)]
    pair = [render(Scenes.of([Scene(tuple(two))])) for two in (things[:2], things[2:])]
    reading = read(torch.minimum(*pair))[0]
    assert len(reading.objects) == 3
    assert not reading.readable


def test_what_another_thing_divides_is_one():
    """Pieces of a thing touch what hides it."""
    for shape in ("cross", "star", "diamond", "crescent", "square"):
        behind, front = (
            SceneObject(shape, "green", radius=0.2),
            SceneObject("square", "pink", x=0.5, y=0.5, radius=0.11),
        )
        reading = read(render(Scenes.of([Scene((behind, front))])))[0]
        assert len(reading.objects) == 2, shape


def test_own_captions_are_right_and_each_wrong_word_is_found():
    star = SceneObject("star", "red", "striped", x=0.25, y=0.5, radius=0.165)
    box = SceneObject("square", "blue", x=0.72, y=0.5, radius=0.11)
    image = render(Scenes.of([Scene((star, box), "grey", "checkered")]))[0]
    wanted = ObjectQuery("star", "red", "striped", "medium"), ObjectQuery("square", "blue", "solid", "small")
    query = Query(wanted, ((0, "left of", 1),), "grey", "checkered")
    assert grade(image, query)[0].right
    changed = {
        "shape": Query((ObjectQuery("heart", "red", "striped", "medium"), wanted[1])),
        "colour": Query((ObjectQuery("star", "pink", "striped", "medium"), wanted[1])),
        "texture": Query((ObjectQuery("star", "red", "dotted", "medium"), wanted[1])),
        "size": Query((ObjectQuery("star", "red", "striped", "large"), wanted[1])),
        "relation": Query(wanted, ((0, "above", 1),)),
        "background": Query(wanted, (), "white"),
        "background kind": Query(wanted, (), "grey", "plain"),
        "count": Query(wanted[:1]),
    }
    for what, asked in changed.items():
        found = grade(image, asked)[0]
        assert not found.right
        assert [mark.what for mark in found.marks if mark.verdict != "right"] == [what]
        assert found.share(what) in (0.0, 0.5)


def test_swapped_colours_are_wrong():
    star, box = SceneObject("star", "red", x=0.25, radius=0.11), SceneObject("square", "blue", x=0.72, radius=0.11)
    image = render(Scenes.of([Scene((star, box))]))[0]
    assert not grade(image, Query((ObjectQuery("star", "blue"), ObjectQuery("square", "red"))))[0].right


def test_shuffled_captions_score_at_chance():
    """One attribute by chance: a shape or colour one in ten, a texture one in five, a size one in three."""
    scenes = sample(torch.arange(90), 7, "any", ("flat",), (1,))
    queries = [query for _, query in described(scenes, 1, full=True)]
    readings = read(render(scenes))
    marks: dict[str, list[bool]] = {}
    right = 0
    for shift in range(1, 60, 3):
        for i, reading in enumerate(readings):
            found = graded(reading, queries[(i + shift) % 90])
            right += found.right
            for mark in found.marks:
                marks.setdefault(mark.what, []).append(mark.verdict == "right")
    chance = {"shape": 1 / 10, "colour": 1 / 10, "texture": 1 / 5, "size": 1 / 3, "background": 1 / 7}
    for what, share in chance.items():
        # 90 scenes, not 1,800 independent ones: their own unevenness allows about a deviation of 90 draws.
        assert sum(marks[what]) / len(marks[what]) == pytest.approx(share, abs=1.5 * (share * (1 - share) / 90) ** 0.5)
    # All at once: 1/500 combinations, 1/3 sizes, 1/7 backgrounds and more: less than one in ten thousand.
    assert right <= 3


@pytest.mark.parametrize("bad", [torch.zeros(4, 128, 128), torch.zeros(1, 3, 8, 8), torch.full((3, 64, 64), torch.nan)])
def test_bad_images(bad):
    with pytest.raises(PellucidError, match="images must be"):
        read(bad)


def test_bad_grades():
    with pytest.raises(PellucidError, match="queries must be one for each of 2 images"):
        grade(torch.zeros(2, 3, 32, 32), Query((ObjectQuery("star", "red"),)))
