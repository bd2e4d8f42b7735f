"""Pictures and maps: antialiased, exact, the same at every size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pellucid.core.errors import PellucidError
from pellucid.scenes import STYLE_NAMES, Scene, SceneObject, Scenes, attributes, edges, render, sample, segmentation
from pellucid.scenes.painting import BACKGROUNDS, OBJECTS

SOME = torch.arange(24)


@pytest.mark.parametrize("style", STYLE_NAMES)
def test_a_pixel_is_the_mean_of_its_area(style):
    """The image at 128 is the mean of 8 × 8 pixels at 1024, up to what one pixel's ramp approximates."""
    scenes = sample(SOME[:4], 8, styles=(style,))
    small, fine = render(scenes, 128), F.avg_pool2d(render(scenes, 1024), 8)
    off = (small - fine).abs()
    assert off.mean() < 2.5e-3
    most = 0.45 if style == "sketch" else 0.35  # at corners and tips, and in strokes of two pixels
    assert off.amax(1).flatten(1).quantile(0.999, dim=1).max() < most


def test_range_and_shape():
    images = render(sample(SOME, styles=STYLE_NAMES), 40)
    assert images.shape == (24, 3, 40, 40)
    assert images.min() >= -1
    assert images.max() <= 1


def test_colours_are_those_of_the_palette():
    scene = Scene((SceneObject("square", "teal", x=0.5, y=0.5, radius=0.2),), background="cream")
    image = (render(Scenes.of([scene]), 64)[0] + 1) / 2
    torch.testing.assert_close(image[:, 32, 32], torch.tensor(OBJECTS["teal"]))
    torch.testing.assert_close(image[:, 2, 2], torch.tensor(BACKGROUNDS["cream"]))


def test_later_things_cover_earlier_ones():
    back, front = (SceneObject("circle", c, x=0.5, y=0.5, radius=r) for c, r in (("red", 0.24), ("blue", 0.11)))
    scenes = Scenes.of([Scene((back, front)), Scene((front, back))])
    labels = segmentation(scenes, 64)
    assert labels[0, 32, 32] == 2
    assert labels[0, 32, 20] == 1
    assert (labels[1, 20:44, 32] == 2).all()
    assert edges(scenes, 64)[1, 0, 26:38, 32].max() == 0  # the hidden outline is not drawn


def test_segmentation_area_is_the_shapes():
    """A circle's area, and a square's less its rounded corners: (2·0.9)² − (4 − π)·0.1²."""
    scenes = Scenes.of([Scene((SceneObject(name, "red", radius=0.2),)) for name in ("circle", "square")])
    areas = (segmentation(scenes, 512) > 0).float().mean((1, 2))
    wanted = torch.tensor([torch.pi, 3.24 - (4 - torch.pi) * 0.01]) * 0.04
    torch.testing.assert_close(areas, wanted, rtol=3e-3, atol=0)


def test_edges_lie_where_labels_change():
    scenes = sample(SOME, 6)
    exact = edges(scenes)[:, 0] >= 0.5
    label = segmentation(scenes)
    change = torch.zeros_like(exact)
    change[:, :, 1:] |= label[:, :, 1:] != label[:, :, :-1]
    change[:, 1:, :] |= label[:, 1:, :] != label[:, :-1, :]
    near = [F.max_pool2d(m[:, None].float(), 3, 1, 1)[:, 0] > 0 for m in (exact, change)]
    assert (change & ~near[0]).sum() <= 1e-3 * change.sum()
    assert (exact & ~near[1]).sum() <= 3e-3 * exact.sum()  # outlines meet at sharp tips, where no pixel is covered


def test_edges_are_one_pixel_wide_and_antialiased():
    scene = Scene((SceneObject("square", "red", x=0.5, y=0.5, radius=0.2),))
    row = edges(Scenes.of([scene]), 128)[0, 0, 64]
    left = 0.5 * 128 - 0.9 * 0.2 * 128 - 0.5  # where the outline crosses, counted in pixels' middles
    want = (1 - (torch.arange(128) - left).abs()).clamp(min=0)
    torch.testing.assert_close(row[:64], want[:64], rtol=0, atol=1e-3)
    assert float(row[:64].sum()) == pytest.approx(1, abs=2e-3)


def test_attributes_are_plain_and_whole():
    scenes = sample(SOME, 1)
    for row, scene in zip(attributes(scenes), scenes.scenes(), strict=True):
        assert len(row["objects"]) == len(scene.things)
        assert [o["shape"] for o in row["objects"]] == [t.shape for t in scene.things]
        assert row["background"] == scene.background


def test_bad_size():
    with pytest.raises(PellucidError, match="size must be from 16 to 2048"):
        render(sample(SOME[:1]), 8)
