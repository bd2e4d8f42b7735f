"""The parts of a model: what is measured of a VAE, of adapters and of an image-text encoder is what is there."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_scenes import Truth, draw, write_model
from torch import Tensor, nn

from pellucid import scenes
from pellucid.core.errors import PellucidError
from pellucid.evidence.adherence.samples import ImageSettings
from pellucid.models.ip_adapter import IPAdapter
from pellucid.pipeline.load import load
from pellucid.pipeline.request import ImagePrompt
from pellucid.train.scenes_source import alone

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import parts as suite
from parts import Exam, decibels, round_trip

EXAM = Exam(6, making=ImageSettings(batch=4))
DRAWN = scenes.sample(torch.arange(6), 0, "held_out", ("flat",), EXAM.objects)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


# The VAE


class Offset(nn.Module):
    """A VAE that moves every pixel by so much."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by))

    def encode(self, x: Tensor) -> Any:
        return SimpleNamespace(mean=x)

    def decode(self, x: Tensor) -> Tensor:
        return x + self.by


def test_decibels_are_those_of_the_error() -> None:
    true = torch.zeros(2, 3, 8, 8)
    made = true + torch.tensor([0.02, 0.2])[:, None, None, None]
    assert decibels(true, made).tolist() == pytest.approx([40.0, 20.0], abs=1e-4)  # 1 % and 10 % of the range


def test_a_vae_that_changes_nothing_loses_8_bits_and_no_reading() -> None:
    found = round_trip(Offset(0.0), 12, batch=5)
    rounding = 10 * math.log10(12 * 255**2)  # errors spread evenly over a step of 8 bits
    assert found.psnr.value == pytest.approx(rounding, abs=4)  # flat colours do not spread evenly
    assert found.before == found.after
    assert found.before.right >= 11  # the reader's promise is 99.5 %
    assert found.worst <= found.psnr.value
    assert set(found.by_style) <= {"flat", "outlined", "soft"}


def test_a_vae_that_drowns_the_image_is_seen_to() -> None:
    found = round_trip(Offset(-1.2), 4)
    assert found.psnr.value < 10
    assert found.after.right == 0
    assert found.psnr.low <= found.psnr.value <= found.psnr.high
    assert json.dumps(found.plain())


# Adapters


def test_edges_that_are_followed_score_one_and_those_of_another_scene_do_not() -> None:
    pipe = Truth(DRAWN, lambda n, options: n if "controls" in options else n + 1)
    found = suite.follows_edges(pipe, "a-controlnet", EXAM)
    assert found.adapted.value > 0.98
    assert found.base.value < 0.5
    assert found.adapted.low <= found.adapted.value <= found.adapted.high
    assert found.more["share of 0.9 or more"] == 1
    assert len(found.cards) == 18
    assert pipe.calls == 4


def test_the_controlnet_gets_each_scene_s_own_edges() -> None:
    seen = []

    class Watching(Truth):
        def __call__(self, prompt: Any, /, **options: Any) -> Any:
            seen.extend(options.get("controls", ()))
            return super().__call__(prompt, **options)

    suite.follows_edges(Watching(DRAWN), "a-controlnet", EXAM)
    assert torch.equal(torch.cat([control.image for control in seen]), scenes.edges(DRAWN))


def test_a_reference_is_carried_or_it_is_not() -> None:
    single = scenes.sample(torch.arange(6), 0, "held_out", ("flat",), (1,))
    pipe = Truth(single, lambda n, options: n if "image_prompts" in options else n + 1)
    found = suite.carries_reference(pipe, None, EXAM)  # type: ignore[arg-type]
    assert found.adapted.value == 1
    assert found.base.value < 0.2
    assert found.more == {"colour": 1, "shape": 1, "objects a picture": 1}


def test_colour_and_shape_must_be_of_one_object() -> None:
    thing = scenes.SceneObject("star", "red")
    both = scenes.Scene((replace(thing, colour="blue", x=0.25), replace(thing, shape="square", x=0.75)))
    (reading,) = scenes.read(scenes.render(scenes.Scenes.of([both])))
    assert suite.likeness(reading, thing) == (False, True, True)


def test_a_style_is_seen_with_the_lora_alone() -> None:
    class Styled(Truth):
        def __call__(self, prompt: Any, /, *, seed: Any, **options: Any) -> Any:
            style = scenes.STYLE_NAMES.index("sketch" if options.get("loras") else "flat")
            return SimpleNamespace(images=draw(replace(self.drawn, style=torch.full((6,), style))[list(seed)]))

    found = suite.has_style(Styled(DRAWN), "a-lora", "sketch", EXAM)
    assert found.adapted.value == 1
    assert found.base.value == 0
    with pytest.raises(PellucidError, match="style must be one of"):
        suite.has_style(Styled(DRAWN), "a-lora", "baroque", EXAM)


def test_an_exam_without_images_is_refused() -> None:
    with pytest.raises(PellucidError, match="count must be"):
        Exam(1)


def test_each_image_of_a_batch_is_prompted_by_its_own_image(model: Path) -> None:
    """As if each had been asked for alone, with the adapter as it is."""
    pipe = load(model, device="cpu", dtype="float32", image_encoder=model / "ip_adapter" / "image_encoder")
    like = next(pipe.components.network.parameters())
    each = suite.read_adapter(model / "ip_adapter" / "ip_adapter.safetensors", like)
    for parameter in each.parameters():  # its values begin at zero, where no image would matter
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    plain = IPAdapter(each.kind, each.image_proj, list(each.pairs))
    references = draw(alone(DRAWN[:3]))
    options = {"steps": 2, "guidance": 3.0, "sampler": "dpmpp_2m"}
    whole = pipe(["", "", ""], seed=[5, 6, 7], image_prompts=[ImagePrompt(each, references)], **options).latents
    for i in range(3):
        one = pipe("", seed=5 + i, image_prompts=[ImagePrompt(plain, references[i])], **options).latents
        assert torch.allclose(whole[i : i + 1], one, atol=1e-4)
    other = pipe("", seed=5, image_prompts=[ImagePrompt(plain, references[1])], **options).latents
    assert not torch.allclose(whole[:1], other, atol=1e-2)
    with pytest.raises(PellucidError, match="one per image"):
        pipe(["", ""], seed=[5, 6], image_prompts=[ImagePrompt(each, references)], **options)


# Image and text


def test_finding_among_32_is_counted_by_hand() -> None:
    cosines = torch.eye(32)[None].repeat(2, 1, 1)
    cosines[1, 3] = torch.arange(32.0).flip(0)  # image 3 is nearest to text 0, and text 0 to it, not to its own
    found = suite.summed(cosines)
    assert (found.count, found.by_image.right) == (64, 63)
    assert found.by_text.right == 64 - int((cosines[1].argmax(0) != torch.arange(32)).sum())
    assert found.told.right == 64 - int(cosines[1, 3, 3] < cosines[1, 3, 4])
    assert found.right == pytest.approx((63 + 28) / 64)


def test_an_untrained_encoder_is_at_chance(model: Path) -> None:
    from pellucid.evidence.metrics.image_text import Judge

    found = suite.matching(Judge.load(model / "image_text"), 96)
    assert found.count == 96
    assert abs(found.right - found.shuffled) < 0.1
    assert found.by_image.interval[0] < 1 / 32
    with pytest.raises(PellucidError, match="multiple of 32"):
        suite.matching(Judge.load(model / "image_text"), 40)


# All of them


def test_untrained_adapters_change_nothing_and_the_suite_says_so(model: Path, tmp_path: Path) -> None:
    asked = suite.Suite.of(str(model), count=4, true=32, making=ImageSettings(steps=2, batch=4), device="cpu")
    assert asked.parts == ["vae", "controlnet", "ip_adapter", "lora", "image_text"]
    told: list[str] = []
    only = asked.parts[1:]
    found = suite.measure(asked, tmp_path / "out", told.append, only)
    assert told == [f"measuring {part}" for part in only]
    for part in ("controlnet", "ip_adapter"):  # they begin as nothing
        assert found[part]["adapted"] == found[part]["base"]
    for part in ("controlnet", "ip_adapter", "lora"):
        with Image.open(tmp_path / "out" / f"{part}.png") as sheet:
            assert sheet.width > 700
    text = (tmp_path / "out" / "suite.md").read_text("utf-8")
    assert all(word in text for word in ("ControlNet", "IP-Adapter", "LoRA", "caption found among 32"))
    assert suite.measure(asked, tmp_path / "out", told.append, only) == json.loads(json.dumps(found))
    assert len(told) == 4  # nothing was measured again
    other = json.loads((tmp_path / "out" / "lora.json").read_text("utf-8"))["asked"] | {"style": "neon"}
    assert suite.read_figures(tmp_path / "out" / "lora.json", other) is None
    with pytest.raises(PellucidError, match="only must be"):
        suite.measure(asked, tmp_path / "out", told.append, ["gan"])


@pytest.mark.slow
def test_the_suite_measures_a_vae(model: Path, tmp_path: Path) -> None:
    asked = suite.Suite(str(model), count=4, true=32, device="cpu")
    found = suite.measure(asked, tmp_path / "out", lambda _: None)
    assert list(found) == ["vae"]
    assert found["vae"]["after"]["right"] == 0  # a random VAE
    assert (tmp_path / "out" / "vae.png").exists()
    assert "PSNR" in (tmp_path / "out" / "suite.md").read_text("utf-8")


def test_a_suite_that_cannot_be_grouped_is_refused() -> None:
    with pytest.raises(PellucidError, match="multiple of 32"):
        suite.Suite("x", true=40)
