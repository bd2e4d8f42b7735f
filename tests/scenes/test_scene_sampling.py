"""Scenes by seed and index: the same in every batch, kept apart by split, and never crowded."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from pellucid.core.errors import PellucidError
from pellucid.scenes import Scene, SceneObject, Scenes, held_out, render, sample, sampling
from pellucid.scenes.relations import NARROW, holding, shared
from pellucid.scenes.scene import PLACE_CUTS, RADII, SIZE_CUTS
from pellucid.scenes.shapes import halves
from pellucid.scenes.words import LORA_STYLES, RELATION_NAMES, STYLE_NAMES, combinations, held_out_combination

MANY = torch.arange(6000)


def same(a: Scenes, b: Scenes) -> bool:
    return all(torch.equal(getattr(a, field.name), getattr(b, field.name)) for field in fields(Scenes))


def test_a_scene_does_not_depend_on_its_batch():
    whole = sample(MANY[:200], 5)
    some = torch.tensor([3, 199, 77, 3])
    assert same(sample(some, 5), whole[some])
    images = render(whole[:20], 48)
    torch.testing.assert_close(render(sample(torch.tensor([17]), 5), 48)[0], images[17], rtol=0, atol=1e-6)


def test_numbers_are_those_of_the_published_hash():
    """Frozen: computed in plain Python from the rounds named in counter.py. A change would change every scene."""

    def mix(x):
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
        return x ^ (x >> 15)

    values = [0, 1, 0xDEADBEEF, 0xFFFFFFFF]
    assert sampling.mix(torch.tensor(values)).tolist() == [mix(v) for v in values]


def test_numbers_are_even_and_apart():
    u = sampling.uniform(torch.arange(20000), 1, 8)
    assert u.min() >= 0
    assert u.max() < 1
    # 20,000 uniform numbers: a mean's deviation is 0.002, a correlation's 0.007; five of them.
    assert (u.mean(0) - 0.5).abs().max() < 0.0102
    close = torch.corrcoef(torch.cat([u.T, u[:, :1].roll(1, 0).T, sampling.uniform(torch.arange(20000), 2, 1).T]))
    assert (close - torch.eye(len(close))).abs().max() < 0.036
    far = torch.tensor([2**40, 2**40 + 1, 2**32, 0])
    assert len(sampling.random_words(far, 0, 1).unique()) == 4


@pytest.mark.parametrize("count", [1, 2, 3])
def test_things_stand_where_captions_can_speak_of_them(count):
    scenes = sample(MANY, 9, objects=(count,))
    own = scenes.present
    half = halves()[scenes.shape].float() * scenes.radius[..., None]
    for axis, v in enumerate((scenes.x, scenes.y)):
        assert (v - half[..., axis])[own].min() >= 0.01
        assert (v + half[..., axis])[own].max() <= 0.99
    holds = holding(scenes, NARROW)
    if count > 1:
        assert holds[:, 1, 0].any(-1).all()
    if count > 2:
        assert (holds[:, 2, 0].any(-1) | holds[:, 2, 1].any(-1)).all()
    colours = scenes.colour[:, :count].sort(1).values
    assert (colours.diff(dim=1) > 0).all()  # all different


def test_sizes_and_places_keep_clear_of_their_cuts():
    scenes = sample(MANY, 2)
    radius = scenes.radius[scenes.present]
    ranges = torch.tensor(list(RADII.values()))
    assert ((radius[:, None] >= ranges[:, 0] - 1e-6) & (radius[:, None] <= ranges[:, 1] + 1e-6)).any(1).all()
    assert all(
        high < cut < low
        for (_, high), cut, (low, _) in zip(list(RADII.values())[:2], SIZE_CUTS, list(RADII.values())[1:], strict=True)
    )
    single = scenes[scenes.count == 1]
    for v in (single.x[:, 0], single.y[:, 0]):
        assert min((v - cut).abs().min() for cut in PLACE_CUTS) > 0.02


def test_what_crosses_is_in_front_or_inside_and_leaves_enough_to_see():
    scenes = sample(MANY, 4, objects=(2,))
    pair = [v[:, :2] for v in (scenes.shape, scenes.x, scenes.y, scenes.radius)]
    share = shared(*pair)  # (N, 2): of the back one, of the front one
    names = {name: holding(scenes)[:, 1, 0, RELATION_NAMES.index(name)] for name in ("inside", "in front of")}
    crossed = share.amax(1) > 0
    assert torch.equal(crossed, names["inside"] | names["in front of"])
    assert share[names["in front of"], 0].max() < 0.45
    assert (names["inside"].float().mean() > 0.03) & (names["in front of"].float().mean() > 0.03)


def test_relations_by_hand():
    left = SceneObject("circle", "red", x=0.25, y=0.5, radius=0.11)
    right = SceneObject("square", "blue", x=0.7, y=0.55, radius=0.11)
    near = SceneObject("square", "blue", x=0.5, y=0.5, radius=0.11)
    low = SceneObject("star", "green", x=0.25, y=0.85, radius=0.11)
    large = SceneObject("circle", "teal", x=0.5, y=0.5, radius=0.23)
    cases = {
        (left, right): {"left of"},
        (right, left): {"right of"},
        (left, near): {"left of", "next to"},
        (left, low): {"above"},
        (low, left): {"below"},
        (low, right): set(),  # neither: off both axes
        (large, near): {"around"},
        (near, large): {"behind"},  # a small square wholly hidden is not "around", and nobody is inside it
    }
    for (a, b), wanted in cases.items():
        table = holding(Scenes.of([Scene((a, b))]))[0, 0, 1]
        found = {name for k, name in enumerate(RELATION_NAMES) if table[k]}
        assert found == wanted, (a.colour, b.colour)


def test_training_never_sees_what_is_held_out():
    train, out = sample(MANY, 1, "train"), sample(MANY, 1, "held_out")
    assert not held_out(train).any()
    marks = held_out_combination(out.shape, out.colour, out.texture)
    assert marks[out.present].all()
    seen = {tuple(row) for row in torch.stack([out.shape, out.colour, out.texture], -1)[out.present].tolist()}
    assert len(seen) == 50
    seen = {tuple(row) for row in torch.stack([train.shape, train.colour, train.texture], -1)[train.present].tolist()}
    assert len(seen) == 450


def test_the_split_is_even():
    shape, colour, texture = torch.meshgrid(torch.arange(10), torch.arange(10), torch.arange(5), indexing="ij")
    out = held_out_combination(shape, colour, texture)
    assert (out.sum((1, 2)) == 5).all()
    assert (out.sum((0, 2)) == 5).all()
    assert (out.sum((0, 1)) == 10).all()
    assert out.sum(2).max() == 1  # every shape and colour is seen together
    assert combinations("train").shape == (10, 45, 2)


def test_base_training_has_no_style_of_the_lora():
    names = {STYLE_NAMES[i] for i in sample(MANY[:500]).style.tolist()}
    assert names == {"flat", "outlined", "soft"}
    assert not names & set(LORA_STYLES)


def test_scenes_in_words_and_back():
    scenes = sample(MANY[:50], 3, styles=STYLE_NAMES)
    again = Scenes.of(scenes.scenes())
    assert same(again[1:], scenes[1:]) or torch.equal(again.x, scenes.x)
    torch.testing.assert_close(render(again, 32), render(scenes, 32), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"indices": torch.zeros(2)}, "scenes-indices"),
        ({"split": "test"}, "scenes-split"),
        ({"styles": ()}, "scenes-styles"),
        ({"styles": ("cubist",)}, "scene-style"),
        ({"objects": (4,)}, "scenes-objects"),
        ({"seed": 2**70}, "scenes-seed"),
    ],
)
def test_bad_input(change, code):
    with pytest.raises(PellucidError) as caught:
        sample(**{"indices": torch.arange(2), **change})
    assert caught.value.code == code


@pytest.mark.parametrize("bad", [{"shape": "blob"}, {"colour": "mauve"}, {"texture": "furry"}, {"radius": 0.0}])
def test_bad_things(bad):
    with pytest.raises(PellucidError):
        SceneObject(**{"shape": "star", "colour": "red", **bad})
