"""From what the page holds to a request: what is right passes, what is wrong is named in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pellucid.cli import sample
from pellucid.core.errors import PellucidError
from pellucid.evidence.study.samplers import SamplerStudyConfig
from pellucid.models.guidance import Guidance, guarded
from pellucid.pipeline.request import Request
from pellucid.pipeline.sheet import cell_fields
from pellucid.studio import form
from pellucid.studio.form import OWN, Form, ImageStart
from pellucid.studio.generate_tab import painted, setup_of

SETUP = Form(prompt="a red star", seed="7")
STUDY = SamplerStudyConfig("model", samplers=("ddim",), steps=(2,), guidance="4")


def test_a_setup_is_a_request() -> None:
    request = Form(" a red star ", " grey ", "euler", "karras", 12.0, 3.0, seed="1_000").request()
    assert (request.prompt, request.negative_prompt) == ("a red star", "grey")
    assert (request.sampler, request.grid, request.steps, request.seed) == ("euler", "karras", 12, 1000)
    assert SETUP.request().sampler is None
    assert SETUP.request().negative_prompt is None


def test_no_seed_is_a_random_one() -> None:
    assert len({Form(prompt="x", seed=nothing).request().seed for nothing in ("", "  ", None)}) == 3


def test_a_number_means_the_same_on_every_surface() -> None:
    """4 is plain, and `guarded 4` is the preset."""
    meanings = {
        "studio": Form(prompt="x", guidance=4.0).request().guidance,
        "command line": sample.read_fields({"guidance": "4"})["guidance"],
        "python": Guidance.parse(Request(prompt="x", guidance=4).guidance),
        "study": Guidance.parse(STUDY.how["guidance"]),
        "sheet": cell_fields({}, {"guidance": 4.0})["guidance"],
    }
    assert meanings == dict.fromkeys(meanings, Guidance(4.0))
    assert Form(prompt="x", guidance=15.0, guarded=True).request().guidance == Guidance.parse("guarded 15")
    assert sample.read_fields({"guidance": "guarded 15"})["guidance"] == guarded(15)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": "  "}, "prompt must not be empty"),
        ({"prompt": "x" * 5000}, "prompt must be at most 4,000 characters"),
        ({"steps": 0}, "steps must be a whole number from 1 to 1,000; got 0"),
        ({"steps": 10_000}, "got 10000"),
        ({"steps": 2.5}, "got 2.5"),
        ({"steps": None}, "got nothing"),
        ({"steps": float("nan")}, "steps must be"),
        ({"seed": "seven"}, "seed must be a whole number, or left empty for a random one; got 'seven'"),
        ({"seed": "1.5"}, "seed must be"),
        ({"guidance": float("nan")}, "guidance"),
    ],
)
def test_bad_input_is_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PellucidError) as caught:
        Form(**{"prompt": "a red star", "seed": "7", **changes}).request()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_upload_is_bounded_before_it_is_decoded(tmp_path: Path) -> None:
    Image.new("1", (10_000, 5_000)).save(tmp_path / "large.png")  # 50 megapixels in a few bytes
    with pytest.raises(PellucidError, match=r"image must be at most 16 megapixels; got '10000 × 5000'"):
        form.upload(tmp_path / "large.png")
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(PellucidError, match="an image file"):
        form.upload(tmp_path / "text.png")


def test_a_painted_mask_is_white_where_somebody_painted() -> None:
    layer = Image.new("RGBA", (8, 8))
    assert painted({"layers": [layer]}) is None
    assert painted(None) is None
    layer.putpixel((3, 4), (255, 0, 80, 255))
    mask = painted({"layers": [layer]})
    assert mask is not None
    assert mask.getbbox() == (3, 4, 4, 5)


def test_the_controls_make_a_setup(tmp_path: Path) -> None:
    Image.new("RGB", (16, 16), "red").save(tmp_path / "start.png")
    setup = setup_of(
        "a star", "", OWN, OWN, 4, 2.0, False, "1", str(tmp_path / "start.png"), None, 0.5, "scenes-128/lora"
    )
    assert isinstance(setup.image, ImageStart)
    assert setup.image.mask is None
    assert [lora.source for lora in setup.loras] == ["scenes-128/lora"]
    request = setup.request()
    assert request.strength == 0.5
    with pytest.raises(PellucidError, match="ControlNet must come with an image; got none"):
        setup_of("a star", "", OWN, OWN, 4, 2.0, False, "1", control="scenes-128/controlnet")


def test_names_are_offered_as_the_engine_has_them() -> None:
    assert form.sampler_choices()[0] == OWN == form.grid_choices()[0]
    assert "dpmpp_2m" in form.sampler_choices()
    assert "karras" in form.grid_choices()
