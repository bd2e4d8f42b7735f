"""`pellucid demo` with a bundle: an image of every prompt, what the reader finds in it, and one on its way."""

from __future__ import annotations

import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tiny_bundle
import torch

from pellucid import scenes
from pellucid.evidence import demo
from pellucid.interop import source
from pellucid.pipeline.images import to_images
from pellucid.pipeline.load import load
from pellucid.scenes.words import COLOUR_NAMES, SHAPE_NAMES, TEXTURE_NAMES, held_out_combination


@pytest.fixture(autouse=True)
def _bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "BUNDLES", tiny_bundle.bundles())


def test_the_sheet_and_what_was_found(tell, see, tmp_path):
    found = tell("demo", "--steps", "3", "--json").json
    see(tmp_path / "demo.png", demo.WIDTH, 2000)
    assert (found["model"], found["steps"], found["out"]) == ("scenes-128", 3, "demo.png")
    assert [row["prompt"] for row in found["pictures"]] == list(demo.PROMPTS)
    assert all(row["seconds"] > 0 for row in found["pictures"])
    assert all(row["wrong"] for row in found["pictures"] if not row["right"])


def test_the_table(tell, see, tmp_path):
    text = tell("demo", "--steps", "2", "--out", "two.png").words
    assert text.startswith("scenes-128 · DPM++ 2M, 2 steps, guidance 4")
    assert all(prompt in text for prompt in demo.PROMPTS)
    assert "of 12 match their prompts" in text
    assert text.endswith("wrote two.png")
    see(tmp_path / "two.png", demo.WIDTH, 2000)


@pytest.mark.parametrize(
    ("args", "start"),
    [
        (["--out", "sheet.pdf"], "error[file-type]: --out must be a file that ends in .png"),
        (["--out", "missing/sheet.png"], "error[file]: --out must be in a folder that exists"),
        (["--steps", "101"], "error[usage]: "),
    ],
)
def test_bad_input(refuse, args, start):
    assert refuse("demo", *args).startswith(start)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(("goal", "quiet"), [("demo", "pip install -q"), ("browser", "apt-get install -yqq")])
def test_make_says_what_it_installs_before_a_long_silence(goal, quiet):
    root = Path(__file__).parents[2]
    asked = ["make", "--dry-run", "--always-make", "-C", str(root), goal]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert "echo" in said[: said.index("installing")]
    assert 0 <= said.index("installing") < said.index(quiet)


def test_every_thing_that_is_asked_for_is_new_and_can_be_asked_for():
    for prompt in demo.PROMPTS:
        for thing in scenes.parse(prompt).objects:
            names = ((SHAPE_NAMES, thing.shape), (COLOUR_NAMES, thing.colour), (TEXTURE_NAMES, thing.texture))
            assert held_out_combination(*(torch.tensor(known.index(name)) for known, name in names)), prompt


def test_a_true_image_is_as_asked_and_another_is_not():
    first, other = (scenes.Scene((scenes.SceneObject("heart", colour, "striped", radius=0.23),), "pale pink")
                    for colour in ("red", "blue"))  # fmt: skip
    rest = [first] * (len(demo.PROMPTS) - 1)
    for scene, right in ((first, True), (other, False)):
        images = to_images(scenes.render(scenes.Scenes.of([scene, *rest]), 128))
        made = demo.grade_images(images, [1.0] * len(images))[0]
        assert made.grade.right == right
        assert made.wrong == ("" if right else "colour: blue, not red")


def test_the_way_from_noise_is_that_of_the_image():
    """Noise falls from all to nearly none, and the last x0 is the image: the sampler's last row lands on it."""
    pipe, watch = load("scenes-128", device="cpu"), demo.StepRecorder()
    asked = {"sampler": demo.SAMPLER, "grid": demo.GRID, "steps": 10, "guidance": demo.GUIDANCE}
    made = pipe(demo.PROMPTS[0], seed=1, observers=[watch], **asked)
    moments = watch.moments(pipe)
    assert len(moments) == demo.MOMENTS
    assert all(a.sigma > b.sigma for a, b in pairwise(moments))
    assert moments[0].sigma > 0.99
    apart = np.abs(np.asarray(moments[-1].x0).astype(int) - np.asarray(made.images[0]).astype(int))
    assert apart.max() <= 1  # rounding: a decoder's kernels differ by batch
