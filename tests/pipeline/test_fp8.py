"""Models loaded in fp8: their images, their bytes, their recipes, their adapters, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_bundle
import tiny_models as tiny
import torch

import pellucid
from pellucid import Lora, Pipeline
from pellucid.core.errors import PellucidError
from pellucid.interop import source
from pellucid.models import quantize
from pellucid.models.quantize import Fp8Linear
from pellucid.pipeline import compare, memory
from pellucid.pipeline.inspection import GraphOptions
from pellucid.pipeline.inspection_graph import inspect, sketch

ASKED: dict[str, Any] = {"steps": 3, "seed": 5}
TEXT = {**ASKED, "prompt": "a small red star"}
LABEL = {**ASKED, "label": 3}
SIDE = 64


@pytest.fixture(autouse=True)
def _small_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of tiny networks are below what pays."""
    torch.set_num_threads(1)
    monkeypatch.setattr(quantize, "LEAST", 16)


def folder_of(name: str) -> Path:
    if name == "unet":
        return tiny.saved("sd1")[1]
    if name == "pixart":
        return tiny_bundle.bundles() / tiny_bundle.NAME / "dit"
    return tiny.saved(name)[1]


MODELS = {"unet": TEXT, "pixart": TEXT, "dit": LABEL, "ddpm": ASKED}


def pixels(pipe: Pipeline, **asked: Any) -> np.ndarray[Any, Any]:
    return np.asarray(pipe(**asked).images[0]).astype(float)


@pytest.mark.parametrize("name", MODELS)
def test_images_are_near_those_in_bfloat16(name: str) -> None:
    plain, made = (pellucid.load(folder_of(name), dtype=dtype, device="cpu") for dtype in ("bfloat16", "fp8"))
    network = made.components.network
    assert sum(isinstance(module, Fp8Linear) for module in network.modules()) > 0
    for one in (made.components.vae, *made.components.text_encoders):
        assert one is None or not quantize.is_quantized(one)
    expected, found = pixels(plain, **MODELS[name]), pixels(made, **MODELS[name])
    assert not np.array_equal(expected, found)
    assert np.abs(expected - found).mean() < 12  # of 255: random networks are less forgiving than trained ones


@pytest.mark.parametrize("name", ["scenes-128", "scenes-128/dit"])
def test_the_embedded_model_draws_the_same_scene(name: str) -> None:
    asked = {**TEXT, "prompt": "a small red star above a large blue square on a grey background", "steps": 6}
    plain, made = (pellucid.load(name, dtype=dtype, device="cpu") for dtype in ("bfloat16", "fp8"))
    expected = pixels(plain, **asked)
    another = np.abs(pixels(plain, **{**asked, "seed": 6}) - expected).mean()
    assert np.abs(pixels(made, **asked) - expected).mean() < another / 3


def test_a_cpu_says_that_it_is_emulated_and_the_recipe_says_fp8() -> None:
    made = pellucid.load(folder_of("unet"), dtype="fp8", device="cpu")
    [note] = [note for note in made.components.notes if "fp8" in note]
    assert note.startswith("fp8 is emulated on this device (cpu), which is slow")
    result = made(**TEXT)
    assert note in result.notes
    assert result.recipes[0].dtype == "fp8"
    assert "fp8" in str(made)


def test_what_does_not_apply_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(PellucidError, match=r"dtype must be one of float32.* here; got 'fp8'\. .*pellucid\.load"):
        source.load_component(folder_of("unet") / "unet", dtype="fp8")
    made = pellucid.load(folder_of("unet"), dtype="fp8", device="cpu")
    with pytest.raises(PellucidError, match=r"Load the model without dtype='fp8' to save it\."):
        made.save(tmp_path / "saved")
    monkeypatch.setattr(quantize, "LEAST", 256)
    with pytest.raises(PellucidError, match=r"fp8 is for linear layers of 256 features or more; got 'fp8'"):
        pellucid.load(folder_of("unet"), dtype="fp8", device="cpu")


# --- memory -------------------------------------------------------------------------------------------------------


def held(pipe: Pipeline) -> int:
    network = pipe.components.network
    return sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))


@pytest.mark.parametrize("name", ["scenes-128", "scenes-128/dit", "dit"])
def test_the_prediction_is_what_a_run_takes(name: str) -> None:
    made = pellucid.load(folder_of(name) if name == "dit" else name, dtype="fp8", device="cpu")
    request = memory.request_for(made, size=(SIDE, SIDE))
    forecast, found = memory.predict(made, request), compare.measure(made, request)
    for stage, peak in forecast.stages.items():
        assert peak.total == pytest.approx(found.peaks[stage], rel=0.01), stage


def test_bytes_are_those_of_e4m3_and_scales() -> None:
    plain, made = (pellucid.load(folder_of("unet"), dtype=dtype, device="cpu") for dtype in ("bfloat16", "fp8"))
    layers = [m for m in made.components.network.modules() if isinstance(m, Fp8Linear)]
    saved = sum(m.weight.numel() - 4 * m.out_features for m in layers)
    assert held(plain) - held(made) == saved
    forecasts = [memory.predict(one, memory.request_for(one, size=(SIDE, SIDE))) for one in (plain, made)]
    assert forecasts[0].stages["denoise"].weights - forecasts[1].stages["denoise"].weights == saved


@pytest.mark.parametrize("name", ["unet", "pixart", "dit"])
def test_inspect_and_the_sketch_know_it(name: str) -> None:
    made = pellucid.load(folder_of(name), dtype="fp8", device="cpu")
    part = "unet" if name == "unet" else "transformer"
    node = inspect(folder_of(name), GraphOptions(size=(SIDE, SIDE)), dtype="fp8").node(part)
    plain = inspect(folder_of(name), GraphOptions(size=(SIDE, SIDE)), dtype="bfloat16").node(part)
    scales = sum(m.out_features for m in made.components.network.modules() if isinstance(m, Fp8Linear))
    assert (node.dtype, node.memory, node.parameters) == ("fp8", held(made), plain.parameters + scales)
    seen = sketch(folder_of(name), dtype="fp8")
    request = memory.request_for(seen, size=(SIDE, SIDE))
    mine = memory.request_for(made, size=(SIDE, SIDE))
    cuda = memory.predict(seen, request, device="cuda").stages["denoise"]
    assert cuda.weights == memory.predict(made, mine, device="cuda").stages["denoise"].weights


# --- adapters -----------------------------------------------------------------------------------------------------


def test_a_request_with_a_lora_is_another_image_and_leaves_the_model() -> None:
    made = pellucid.load("scenes-128", dtype="fp8", device="cpu")
    plain = pellucid.load("scenes-128", dtype="bfloat16", device="cpu")
    with_lora = {**TEXT, "loras": [Lora("scenes-128/lora", 1.0)]}
    bare, dressed = pixels(made, **TEXT), pixels(made, **with_lora)
    moved = np.abs(pixels(plain, **with_lora) - pixels(plain, **TEXT)).mean()
    assert np.abs(dressed - pixels(plain, **with_lora)).mean() < moved / 2  # the style is there
    assert np.array_equal(pixels(made, **TEXT), bare)
    half = pixels(made, **{**TEXT, "loras": [Lora("scenes-128/lora", 0.5)]})
    assert not np.array_equal(half, dressed)
    assert np.array_equal(pixels(made, **with_lora), dressed)


def test_memory_of_a_lora_counts_weights_and_scales() -> None:
    made = pellucid.load("scenes-128", dtype="fp8", device="cpu")
    bare = memory.predict(made, memory.request_for(made)).stages["denoise"]
    request = memory.request_for(made, loras=[Lora("scenes-128/lora")])
    dressed, found = memory.predict(made, request), compare.measure(made, request)
    assert dressed.stages["denoise"].weights > bare.weights
    for stage, peak in dressed.stages.items():
        assert peak.total == pytest.approx(found.peaks[stage], rel=0.01), stage
