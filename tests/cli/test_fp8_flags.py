"""`--dtype fp8` of the commands that load a model."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from pellucid.models import quantize

MODEL = "scenes-128"


@pytest.fixture(autouse=True)
def _small_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "LEAST", 64)


def test_sample_says_that_it_is_emulated_and_repeats_its_image(ask, tmp_path) -> None:
    first = ask("sample", MODEL, "a red star", "--steps", "2", "--dtype", "fp8", "--device", "cpu", "--out", "a.png")
    assert first.code == 0
    assert "fp8 is emulated on this device (cpu), which is slow" in " ".join((first.out + first.err).split())
    assert ask("sample", "--from", "a.png", "--device", "cpu", "--out", "b.png").code == 0
    plain = ask("sample", "--from", "a.png", "--dtype", "bfloat16", "--device", "cpu", "--out", "c.png")
    assert plain.code == 0
    a, b, c = (np.asarray(Image.open(tmp_path / f"{name}.png")) for name in "abc")
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


def test_memory_and_inspect_show_it(tell) -> None:
    made = tell("memory", MODEL, "--dtype", "fp8", "--predict", "--device", "cpu", "--json").json
    plain = tell("memory", MODEL, "--dtype", "bfloat16", "--predict", "--device", "cpu", "--json").json
    assert made["stages"]["denoise"]["weights"] < plain["stages"]["denoise"]["weights"]
    assert (made["dtype"], plain["dtype"]) == ("fp8", "bfloat16")
    [unet] = [
        node for node in tell("inspect", MODEL, "--dtype", "fp8", "--json").json["nodes"] if node["name"] == "unet"
    ]
    assert unet["dtype"] == "fp8"


def test_small_models_and_other_uses_are_refused_in_one_line(ask, monkeypatch) -> None:
    monkeypatch.setattr(quantize, "LEAST", 256)
    answer = ask("sample", MODEL, "a red star", "--dtype", "fp8", "--out", "a.png")
    assert answer.code == 2
    assert "fp8 is for linear layers of 256 features or more" in " ".join(answer.err.split())
