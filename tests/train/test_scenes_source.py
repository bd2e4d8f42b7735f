"""Scenes as a source: addressed by index, the same in any batch, with captions and hints of the same scene."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pellucid import scenes as world
from pellucid.core.errors import PellucidError
from pellucid.train.config import read
from pellucid.train.draws import Draws, Order
from pellucid.train.scenes_source import ScenesConfig, spread_of

CPU = torch.device("cpu")
ALL = ScenesConfig(size=32, seed=4, hints=("edges", "reference"))


def test_a_scene_is_the_same_in_any_batch_and_step() -> None:
    source = ALL.open()
    whole = source.batch(torch.arange(6), Draws(0, 0, 6), CPU)
    part = source.batch(torch.tensor([4, 1]), Draws(9, 7, 2), CPU)
    assert torch.equal(part.images, whole.images[[4, 1]])
    assert part.captions == (whole.captions[4], whole.captions[1])
    for name in ("edges", "reference"):
        assert torch.equal(part.hints[name], whole.hints[name][[4, 1]])


def test_images_captions_and_hints_are_those_of_the_scenes() -> None:
    indices = torch.arange(100, 108)
    scenes = world.sample(indices, ALL.seed, "train")
    got = ALL.open().batch(indices, Draws(0, 0, 8), CPU)
    assert torch.equal(got.images, world.render(scenes, 32))
    assert got.images.shape == (8, 3, 32, 32)
    assert list(got.captions) == world.captions(scenes, ALL.seed)
    assert torch.equal(got.hints["edges"], world.edges(scenes, 32))
    for row, scene in enumerate(scenes.scenes()):
        first = scene.things[0]
        alone = world.Scene((world.SceneObject(first.shape, first.colour, first.texture, radius=0.2275),))
        assert torch.allclose(got.hints["reference"][row : row + 1], world.render(world.Scenes.of([alone]), 32))


def test_training_sees_no_held_out_combination_and_held_out_nothing_else() -> None:
    indices = torch.arange(400)
    assert not world.held_out(ScenesConfig().sample(indices)).any()
    assert world.held_out(ScenesConfig(split="held_out").sample(indices)).all()


def test_options_reach_the_world() -> None:
    plain = ScenesConfig(styles=("neon",), objects=(1,), name_style=False)
    scenes = plain.sample(torch.arange(50))
    assert scenes.count.eq(1).all()
    assert scenes.style.eq(world.STYLE_NAMES.index("neon")).all()
    captions = plain.open().batch(torch.arange(50), Draws(0, 0, 50), CPU).captions
    assert not any("neon" in caption for caption in captions)
    told = ScenesConfig(styles=("neon",), objects=(1,)).open().batch(torch.arange(50), Draws(0, 0, 50), CPU).captions
    assert all("neon" in caption for caption in told)


def test_the_closest_of_several_scenes_is_taken() -> None:
    indices = torch.arange(40)
    plain, close = ScenesConfig(objects=(1, 2, 3)), ScenesConfig(objects=(1, 2, 3), closest=4)
    every = spread_of(plain.sample(torch.arange(160))).view(40, 4)
    assert torch.equal(spread_of(close.sample(indices)), every.amin(1))
    assert (every.amin(1) < every[:, 0]).any()
    assert torch.equal(close.sample(indices[7:9]).index, close.sample(indices).index[7:9])


def test_indices_count_up_for_ever() -> None:
    source = ScenesConfig().open()
    order = Order(len(source), 8, shuffled=not source.endless)
    assert order.step(10**6, 1, 2).tolist() == list(range(8 * 10**6 + 4, 8 * 10**6 + 8))


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"size": 8}, "size"),
        ({"split": "test"}, "split"),
        ({"styles": ["cubist"]}, "style"),
        ({"styles": []}, "styles"),
        ({"objects": [4]}, "objects"),
        ({"hints": ["depth"]}, "hints"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_bad_configs_are_one_line(table: dict[str, Any], named: str) -> None:
    with pytest.raises(PellucidError, match=named) as caught:
        read(ScenesConfig, table, "data")
    assert "\n" not in str(caught.value)
