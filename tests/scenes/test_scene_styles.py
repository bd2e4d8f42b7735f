"""The style classifier and the measure of edges."""

from __future__ import annotations

import pytest
import torch
from scene_checks import spoiled

from pellucid.core.errors import PellucidError
from pellucid.scenes import STYLE_NAMES, TRAIN_STYLES, edge_f1, edges, render, sample, style_of


@pytest.mark.parametrize("style", STYLE_NAMES)
def test_styles_of_true_renders(style):
    found = style_of(render(sample(torch.arange(12), 61, "any", (style,))))
    assert found == [style] * 12


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLE_NAMES)
def test_styles_of_many(style):
    parts = [sample(torch.arange(i, i + 60), 62, "any", (style,)) for i in range(0, 300, 60)]
    found = [name for part in parts for name in style_of(render(part))]
    assert found.count(style) >= 0.99 * len(found)


def test_nothing_has_no_style():
    assert style_of(torch.full((3, 128, 128), 0.9)) == [None]
    assert style_of(torch.full((3, 128, 128), -1.0)) == [None]


@pytest.mark.parametrize("style", sorted(set(TRAIN_STYLES)))
def test_edges_of_true_renders(style):
    scenes = sample(torch.arange(10), 63, styles=(style,))
    images, exact = render(scenes), edges(scenes)
    assert edge_f1(images, exact).mean() > 0.99
    assert edge_f1(spoiled(images), exact).mean() > 0.95
    assert edge_f1(images, exact.roll(1, 0)).mean() < 0.25  # another scene's edges


def test_edges_moved_by_pixels_are_seen():
    scenes = sample(torch.arange(10), 64, styles=("flat",))
    images, exact = render(scenes), edges(scenes)
    one, four = (edge_f1(images, exact.roll(by, 3)).mean() for by in (1, 4))
    assert one > 0.8  # an outline that lies between two pixels is found in one of them
    assert four < 0.6


def test_bad_edges():
    with pytest.raises(PellucidError, match="edges must be"):
        edge_f1(torch.zeros(2, 3, 64, 64), torch.zeros(2, 1, 64, 64))
