"""`pellucid demo` without a bundle: five samplers, one picture, and errors that mean something."""

from __future__ import annotations

import pytest
import torch

from pellucid import oracle
from pellucid.cli import demo_ring as demo
from pellucid.interop import source

RING = oracle.ring()


@pytest.fixture(autouse=True)
def _no_bundle(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(source, "BUNDLES", tmp_path_factory.mktemp("bundles"))


def test_the_picture_and_the_errors(tell, see, tmp_path):
    found = tell("demo", "--steps", "12", "--out", "ring.png", "--json").json
    see(tmp_path / "ring.png", 1600, 2000)
    scores = {score["sampler"]: score for score in found["samplers"]}
    assert tuple(scores) == demo.SAMPLERS
    assert {name: score["nfe"] for name, score in scores.items()} == {
        "ddim": 12, "euler_a": 12, "heun": 23, "dpmpp_2m": 12, "unipc": 12,
    }  # fmt: skip
    assert scores["euler_a"]["error"] is None
    errors = {name: score["error"] for name, score in scores.items() if score["error"] is not None}
    assert errors["ddim"] > errors["dpmpp_2m"] > errors["heun"] > errors["unipc"] > 1e-4
    assert all(score["distance"] < 3 * found["floor"] for score in scores.values())
    assert 0.005 < found["floor"] < 0.08


def test_few_steps_make_few_panels(tell, see, tmp_path):
    text = tell("demo", "--steps", "2").words
    assert "A ring of eight modes in 2 steps" in text
    assert "DPM++ 2M (dpmpp_2m) 2" in text
    assert "true draws" in text
    assert text.endswith("wrote demo.png")
    see(tmp_path / "demo.png", 900, 2000)


@pytest.mark.parametrize(
    ("args", "start"),
    [
        (["--out", "ring.gif"], "error[file-type]: --out must be a file that ends in .png, .svg, .pdf"),
        (["--out", "missing/ring.png"], "error[file]: --out must be in a folder that exists"),
        (["--steps", "101"], "error[usage]: "),
    ],
)
def test_bad_input(refuse, args, start):
    assert refuse("demo", *args).startswith(start)


def test_the_distance_to_the_truth_is_a_distance():
    truth = demo.Truth(RING)
    draws = RING.sample(demo.COUNT, torch.Generator().manual_seed(99))
    near = truth.distance(draws)
    assert abs(near - truth.floor) < 5 * truth.spread
    shifted = truth.distance(draws + torch.tensor([0.5, 0.0], dtype=torch.float64))
    assert shifted == pytest.approx(0.5 / 2**0.5, rel=0.1)  # a shift of s is s·|cos| in each direction


def test_moments_are_apart_and_fall():
    moments = [demo.Moment(ratio, torch.zeros(1, 2)) for ratio in (9.0, 3.0, 1.0, 0.9, 0.3, 0.1)]
    found = demo.nearest_of(moments, [0.0, 0.0, -2.0])
    assert [m.ratio for m in found] == [1.0, 0.9, 0.1]
