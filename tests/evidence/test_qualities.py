"""Qualities of images: each answers to what it names, and keeps still under what it says it does."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter
from torch import Tensor

from pellucid import scenes
from pellucid.core.errors import PellucidError
from pellucid.evidence import qualities
from pellucid.evidence.qualities import (
    bled,
    bleeding,
    colourfulness,
    diversity,
    residual_noise,
    saturation,
    seams,
    sharpness,
)
from pellucid.scenes.scene import Scenes

ALONE = {
    "saturation": saturation,
    "colourfulness": colourfulness,
    "sharpness": sharpness,
    "residual_noise": residual_noise,
    "seams": lambda x: seams(x, 16),
}  # of one image by itself


def true_renders(count: int = 24, seed: int = 5, styles: tuple[str, ...] = scenes.TRAIN_STYLES) -> Tensor:
    """(N, 3, 128, 128) in [0, 1]"""
    return (scenes.render(scenes.sample(torch.arange(count), seed, "any", styles)) + 1) / 2


@pytest.fixture(scope="module")
def renders() -> Tensor:
    return true_renders()


@pytest.fixture(scope="module")
def inner(renders: Tensor) -> Tensor:
    """The same with room at both ends, so that nothing is clipped by what is added."""
    return 0.6 * renders + 0.2


def blurred(x: Tensor, sigma: float) -> Tensor:
    """By scipy, not by what the measures use."""
    return torch.from_numpy(gaussian_filter(x.numpy(), (0, 0, sigma, sigma), mode="nearest")).clamp(0, 1)


def noisy(x: Tensor, sigma: float, seed: int = 0) -> Tensor:
    return (x + sigma * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))).clamp(0, 1)


def flat(count: int = 4, side: int = 64) -> Tensor:
    tones = torch.rand(count, 3, 1, 1, generator=torch.Generator().manual_seed(3)) * 0.4 + 0.3
    return tones.expand(count, 3, side, side).clone()


# All of them


@pytest.mark.parametrize("name", ALONE)
def test_one_number_a_image_whatever_its_company(renders: Tensor, name: str) -> None:
    found = ALONE[name](renders)
    assert found.shape == (len(renders),)
    assert found.dtype == torch.float64
    torch.testing.assert_close(ALONE[name](renders[7:8]), found[7:8], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ALONE)
def test_bytes_are_what_they_show(renders: Tensor, name: str) -> None:
    shown = (renders * 255).round()
    torch.testing.assert_close(ALONE[name](shown.to(torch.uint8)), ALONE[name](shown / 255), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize(
    ("images", "hint"),
    [
        (torch.zeros(3, 64, 64), "(N, 3, H, W)"),
        (torch.zeros(1, 4, 64, 64), "(N, 3, H, W)"),
        (torch.zeros(0, 3, 64, 64), "(N, 3, H, W)"),
        (torch.zeros(1, 3, 8, 64), "16 pixels or more"),
        (torch.zeros(1, 3, 64, 64, dtype=torch.int64), "uint8"),
        (torch.full((1, 3, 64, 64), torch.nan), "in [0, 1]"),
        (torch.full((1, 3, 64, 64), 200.0), "in [0, 1]"),
        (-torch.ones(1, 3, 64, 64), "take (x + 1) / 2"),
        (np.zeros((1, 3, 64, 64)), "a tensor"),
    ],
)
def test_what_is_no_image_is_refused(name: str, images: Tensor, hint: str) -> None:
    with pytest.raises(PellucidError, match=r"images must be") as error:
        ALONE[name](images)
    assert hint in str(error.value)


# Saturation and colourfulness


@given(st.floats(0, 1), st.integers(0, 2**31))
@settings(max_examples=20)
def test_saturation_is_the_share_of_clipped_values(share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(1, 3, 32, 32, generator=generator) * 0.9 + 0.05
    ends = torch.rand(images.shape, generator=generator) < share
    upper = torch.rand(images.shape, generator=generator) < 0.5
    images = torch.where(ends, upper.float(), images)
    assert float(saturation(images)) == pytest.approx(float(ends.float().mean()), abs=1e-6)


def test_pushing_values_apart_saturates_and_colours(renders: Tensor) -> None:
    pushed = ((renders - 0.5) * 1.6 + 0.5).clamp(0, 1)
    assert (saturation(pushed) > saturation(renders) + 0.1).float().mean() > 0.8
    assert (colourfulness(pushed) > colourfulness(renders)).float().mean() > 0.9


def test_colourfulness_is_hasler_and_suesstrunk_s(renders: Tensor) -> None:
    for image, found in zip(renders.double().numpy(), colourfulness(renders), strict=True):
        red, green, blue = image
        rg, yb = red - green, (red + green) / 2 - blue
        want = math.hypot(rg.std(), yb.std()) + 0.3 * math.hypot(rg.mean(), yb.mean())
        assert float(found) == pytest.approx(want, rel=1e-5)


def test_grey_has_no_colour(renders: Tensor) -> None:
    grey = renders.mean(1, keepdim=True).expand_as(renders)
    assert colourfulness(grey).abs().max() < 1e-6


def test_colourfulness_ignores_brightness_and_follows_contrast(renders: Tensor) -> None:
    base = colourfulness(0.5 * renders)
    torch.testing.assert_close(colourfulness(0.5 * renders + 0.3), base, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(2 * base, colourfulness(renders), rtol=1e-5, atol=1e-7)


# Sharpness


def test_a_step_has_the_sharpness_that_can_be_computed() -> None:
    """Two pixels of the Laplacian over Σ k (7 − k) / 49, whatever the height of the step."""
    images = torch.full((2, 3, 64, 64), 0.2)
    images[0, :, :, 32:] = 0.9
    images[1, :, 20:, :] = 0.25
    want = 2 / sum(k * (7 - k) / 49 for k in range(1, 7))
    torch.testing.assert_close(sharpness(images), torch.full((2,), want, dtype=torch.float64), rtol=1e-4, atol=0)


def test_blur_lowers_sharpness_and_leaves_colourfulness(renders: Tensor) -> None:
    previous, colours = sharpness(renders), colourfulness(renders)
    for sigma, most in ((0.5, 0.8), (0.8, 0.7), (1.2, 0.6)):
        softer = blurred(renders, sigma)
        found = sharpness(softer)
        assert (found < most * previous).all()
        torch.testing.assert_close(colourfulness(softer), colours, rtol=0.25, atol=0)
        assert float((colourfulness(softer) / colours).mean()) == pytest.approx(1, abs=0.08)
        previous = found


def test_sharpness_ignores_brightness_and_contrast(renders: Tensor) -> None:
    base = sharpness(renders)
    for gain, shift in ((0.5, 0.0), (0.5, 0.5), (0.2, 0.4)):
        torch.testing.assert_close(sharpness(gain * renders + shift), base, rtol=2e-3, atol=0)


def test_noise_is_not_sharpness(inner: Tensor) -> None:
    base = sharpness(inner)
    for sigma, most in ((0.005, 0.03), (0.02, 0.1)):
        torch.testing.assert_close(sharpness(noisy(inner, sigma)), base, rtol=most, atol=0)


def test_nothing_drawn_is_not_sharp() -> None:
    ramp = torch.linspace(0.2, 0.8, 64).expand(1, 3, 64, 64)
    assert sharpness(flat()).tolist() == [0.0] * 4
    assert float(sharpness(ramp)) < 1e-4


# Noise


@pytest.mark.parametrize("sigma", [0.003, 0.01, 0.03, 0.08])
def test_noise_is_measured_on_flat_images(sigma: float) -> None:
    found = residual_noise(noisy(flat(side=128), sigma))
    assert ((found / sigma - 1).abs() < 0.1).all(), found


@pytest.mark.parametrize("sigma", [0.003, 0.01, 0.03, 0.08])
def test_noise_is_measured_on_true_renders(inner: Tensor, sigma: float) -> None:
    found = residual_noise(noisy(inner, sigma))
    assert ((found / sigma - 1).abs() < 0.1).all(), found


def test_true_renders_of_all_styles_are_clean() -> None:
    images = true_renders(40, styles=scenes.STYLE_NAMES)
    assert residual_noise(images).max() < 1e-4
    assert residual_noise((images * 255).round().to(torch.uint8)).max() < 1e-4


def test_noise_ignores_brightness_and_follows_contrast(inner: Tensor) -> None:
    images = noisy(inner, 0.02)
    base = residual_noise(0.5 * images)
    torch.testing.assert_close(residual_noise(0.5 * images + 0.4), base, rtol=0.01, atol=1e-6)
    torch.testing.assert_close(2 * base, residual_noise(images), rtol=0.01, atol=1e-6)


def test_what_is_clipped_hides_no_noise_elsewhere() -> None:
    images = noisy(flat(side=128), 0.02)
    images[:, :, :, :90] = 1.0
    assert ((residual_noise(images) / 0.02 - 1).abs() < 0.1).all()
    assert residual_noise(torch.ones(1, 3, 64, 64)).tolist() == [0.0]


def test_coarse_grain_is_seen_at_its_scale() -> None:
    coarse = noisy(flat(side=32), 0.05).repeat_interleave(4, 2).repeat_interleave(4, 3)
    assert (residual_noise(coarse) < 0.02).all()
    torch.testing.assert_close(residual_noise(coarse, scale=4), torch.full((4,), 0.05).double(), rtol=0.15, atol=0)
    white = noisy(flat(side=128), 0.04)
    torch.testing.assert_close(residual_noise(white, scale=2), torch.full((4,), 0.02).double(), rtol=0.1, atol=0)


@pytest.mark.parametrize("scale", [0, -1, 1.5, True, 5])
def test_a_scale_that_leaves_nothing_is_refused(scale: int) -> None:
    with pytest.raises(PellucidError, match="scale must be"):
        residual_noise(torch.zeros(1, 3, 64, 64), scale)


# Seams


def tiled(x: Tensor, step: float, period: int, seed: int = 0) -> Tensor:
    """Every tile of `period` pixels with a tone of its own, `step` apart from its neighbours' on average."""
    high, wide = (math.ceil(side / period) for side in x.shape[2:])
    generator = torch.Generator().manual_seed(seed)
    sign = torch.tensor([[(-1.0) ** (i + j) for j in range(wide)] for i in range(high)])
    tone = step / 2 * sign * (0.8 + 0.4 * torch.rand(len(x), 3, high, wide, generator=generator))
    spread = tone.repeat_interleave(period, 2).repeat_interleave(period, 3)[:, :, : x.shape[2], : x.shape[3]]
    return (x + spread).clamp(0, 1)


def test_no_seam_in_true_renders() -> None:
    """Checkered backgrounds have borders at 64 too, and at 48 and 80: no seam."""
    images = true_renders(80, styles=scenes.STYLE_NAMES)
    for period in (32, 64):
        assert seams(images, period).max() < 1.6
        assert seams((images * 255).round().to(torch.uint8), period).max() < 1.6


def test_a_planted_seam_is_found_at_its_period_alone(inner: Tensor) -> None:
    plain = inner[[i for i, one in enumerate(drawn_scenes()) if one.kind != "checkered"]]
    sewn = tiled(plain, 6 / 255, 64)
    assert len(plain) > 10
    assert (seams(sewn, 64) > 3).all()
    for other in (24, 40, 48, 56):
        assert (seams(sewn, other) < 1.25).all()


def test_a_seam_is_found_across_a_checkered_background_if_it_is_the_stronger(inner: Tensor) -> None:
    sewn = tiled(inner, 0.2, 64)
    assert (seams(sewn, 64) > 2).all()


def drawn_scenes() -> list[scenes.Scene]:
    return scenes.sample(torch.arange(24), 5, "any", scenes.TRAIN_STYLES).scenes()


def test_an_object_s_edge_and_noise_are_no_seam() -> None:
    images = flat(4, 128)
    images[:, :, 40:90, 64:] += 0.2  # less than half of the rows
    assert seams(images, 64).max() < 1.1
    assert seams(noisy(flat(4, 128), 0.05), 64).max() < 1.1


def test_a_seam_in_one_direction_is_enough() -> None:
    rows = flat(1, 128)
    rows[:, :, 64:] += 0.05
    assert float(seams(rows, 64)) > 5
    assert float(seams(rows.transpose(2, 3), 64)) > 5
    strip = flat(1, 128)[:, :, :32]  # lower than a tile is: only columns have borders
    strip[:, :, :, 64:] += 0.05
    assert float(seams(strip, 64)) > 5


@pytest.mark.parametrize("period", [0, 3, 64, 100, 16.0, True])
def test_a_period_without_a_border_is_refused(period: int) -> None:
    with pytest.raises(PellucidError, match="period must be"):
        seams(torch.zeros(1, 3, 64, 64), period)


# Bleeding


def pairs_of_shapes(count: int = 28) -> tuple[Scenes, Scenes, list[scenes.Query]]:
    """Scenes of two objects of different shapes, the same with their colours swapped, and what was asked for."""
    drawn = scenes.sample(torch.arange(count), 2, "any", ("flat",), (2,))
    drawn = drawn[(drawn.shape[:, 0] != drawn.shape[:, 1]).nonzero()[:, 0]]
    queries = [query for _, query in scenes.described(drawn, full=True, style=False)]
    return drawn, replace(drawn, colour=drawn.colour[:, [1, 0, 2]]), queries


def test_swapped_colours_are_bleeding_and_the_truth_is_not() -> None:
    drawn, swapped, queries = pairs_of_shapes()
    as_asked, bad = ((scenes.render(one) + 1) / 2 for one in (drawn, swapped))
    assert bled(as_asked, queries).sum() == 0
    assert bled(bad, queries).mean() > 0.97  # what the reader cannot read has not bled
    fresh = replace(drawn, colour=(drawn.colour + 1) % 10)
    others = [
        i
        for i in range(len(fresh))
        if not set(fresh.colour[i, :2].tolist()) & set(drawn.colour[i, :2].tolist())  # colours that nobody asked for
    ]
    assert len(others) > 10
    assert bled((scenes.render(fresh[others]) + 1) / 2, [queries[i] for i in others]).sum() == 0


def test_bleeding_cannot_be_told_of_one_object() -> None:
    drawn = scenes.sample(torch.arange(4), 0, "any", ("flat",), (1,))
    queries = [query for _, query in scenes.described(drawn, full=True)]
    assert bled((scenes.render(drawn) + 1) / 2, queries).isnan().all()
    assert bleeding is qualities.bleeding
    with pytest.raises(PellucidError, match="queries must be one for each of 4 images"):
        bled((scenes.render(drawn) + 1) / 2, queries[:3])


# Diversity


def test_diversity_is_the_mean_over_pairs() -> None:
    rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    pairs = [float((rows[i] - rows[j]).norm()) for i in range(6) for j in range(i)]
    found = diversity(rows)
    assert float(found.mean()) == pytest.approx(sum(pairs) / len(pairs), rel=1e-6)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(diversity(rows[order]), found[order])


def test_diversity_is_within_a_prompt(renders: Tensor) -> None:
    groups = ["a"] * 10 + ["b"] * 14
    found = diversity(renders, groups)
    torch.testing.assert_close(found[:10], diversity(renders[:10]))
    torch.testing.assert_close(found[10:], diversity(renders[10:]))


def test_alike_images_have_none_and_brightness_adds_none(renders: Tensor) -> None:
    assert diversity(renders[:1].expand(5, -1, -1, -1)).max() == 0
    dim = 0.5 * renders
    torch.testing.assert_close(diversity(dim + 0.4), diversity(dim), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(2 * diversity(dim), diversity(renders), rtol=1e-5, atol=1e-7)


def test_grain_is_hardly_another_image(inner: Tensor) -> None:
    same = inner[:1].expand(6, -1, -1, -1)
    assert float(diversity(noisy(same, 0.03)).mean()) < 0.1 * float(diversity(inner).mean())


def test_a_single_image_has_no_diversity() -> None:
    with pytest.raises(PellucidError, match="images of 'b' must be at least two; got 1"):
        diversity(torch.zeros(3, 3, 16, 16), ["a", "a", "b"])
    with pytest.raises(PellucidError, match="groups must be one for each of 3 images"):
        diversity(torch.zeros(3, 3, 16, 16), ["a", "a"])
    with pytest.raises(PellucidError, match="features must be finite"):
        diversity(torch.full((2, 4), torch.nan))
