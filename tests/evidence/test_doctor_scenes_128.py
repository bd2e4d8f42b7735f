"""The doctor on the model that is shipped: as it is, and broken in the ways in which models are broken.

All of it runs the true weights; the other tests of the doctor have small stand-ins for the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageFilter
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import pellucid
from pellucid.cli import app
from pellucid.evidence.trace import Recorder
from pellucid.interop.source import BUNDLES

pytestmark = pytest.mark.slow
MODEL = BUNDLES / "scenes-128"
SCHEDULER, UNET = "scheduler/scheduler_config.json", "unet/diffusion_pytorch_model.safetensors"
ASKED: dict[str, Any] = {"sampler": "dpmpp_2m", "grid": "trailing", "steps": 20}
PROMPTS = [f"a large {colour} {shape} on a grey background" for colour in ("red", "blue") for shape in
           ("star", "circle", "square", "heart")]  # fmt: skip
Words = tuple[str, ...]


def doctor(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["doctor", *words, "--device", "cpu", "--json"])
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


def copy(folder: Path) -> Path:
    return Path(shutil.copytree(MODEL, folder / "model"))


def edited(folder: Path, file: str, **changes: Any) -> Path:
    model = copy(folder)
    path = model / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return model


def reweighed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], file: str = UNET) -> Path:
    model = copy(folder)
    held = load_file(model / file)
    change(held)
    save_file(held, model / file, {"format": "pt"})
    return model


def images(folder: Path, change: Callable[[Image.Image], Image.Image] = lambda image: image) -> Path:
    place = folder / "pictures"
    place.mkdir()
    for n, made in enumerate(pellucid.load("scenes-128", device="cpu")(PROMPTS, seed=1, guidance=4.0, **ASKED).images):
        change(made).save(place / f"{n}.png")
    return place


def traced(folder: Path, guidance: float) -> Path:
    path = folder / "run.safetensors"
    with Recorder(path) as recorder:
        pipe = pellucid.load("scenes-128", device="cpu")
        pipe(PROMPTS[0], seed=1, guidance=guidance, observers=[recorder], **ASKED)
    return path


def grainy(image: Image.Image) -> Image.Image:
    noise = torch.randn(image.height, image.width, 3, generator=torch.Generator().manual_seed(0)) * 12
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(image.height, image.width, 3)
    return Image.fromarray((pixels + noise).clamp(0, 255).byte().numpy())


def tiled(image: Image.Image) -> Image.Image:
    """Every other tile of 32 pixels a little brighter."""
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(image.height, image.width, 3)
    tile = torch.arange(image.width) // 32 % 2
    return Image.fromarray((pixels + 24 * (tile[:, None] ^ tile)[..., None]).clamp(0, 255).byte().numpy())


def nan_in_a_weight(held: dict[str, torch.Tensor]) -> None:
    held["mid_block.resnets.0.conv1.weight"][0, 0, 0, 0] = float("nan")


def huge_first_layer(held: dict[str, torch.Tensor]) -> None:
    held["conv_in.weight"].mul_(3e4).clamp_(-6e4, 6e4)


def zero(held: dict[str, torch.Tensor]) -> None:
    for tensor in held.values():
        tensor.zero_()


SABOTAGES: dict[str, tuple[str, Callable[[Path], Words]]] = {
    "said to predict eps": (
        "target-mismatch",
        lambda f: (str(edited(f, SCHEDULER, prediction_type="epsilon")), "--data", "scenes", "--only", "target"),
    ),
    "said to be trained by another schedule": (
        "schedule-mismatch",
        lambda f: (str(edited(f, SCHEDULER, beta_schedule="linear")), "--data", "scenes", "--only", "schedule"),
    ),
    "latents of another size": (
        "vae-scale",
        lambda f: (
            str(edited(f, "vae/config.json", scaling_factor=5.0)),
            "--data",
            "scenes",
            "--only",
            "scale of the VAE",
        ),
    ),
    "latents cut as pixels are": (
        "threshold-latents",
        lambda f: (str(edited(f, SCHEDULER, thresholding=True)), "--quick"),
    ),
    "eps at zero SNR": (
        "eps-zero-snr",
        lambda f: (str(edited(f, SCHEDULER, prediction_type="epsilon", rescale_betas_zero_snr=True)), "--quick"),
    ),
    "Karras on its schedule": (
        "calls-in-noise",
        lambda f: (str(MODEL), "--sampler", "dpmpp_2m", "--grid", "karras", "--steps", "20", "--quick"),
    ),
    "no weights of the VAE": ("component-missing", lambda f: (str(without(f, "vae")), "--quick")),
    "NaN in a weight": (
        "weights-not-finite",
        lambda f: (str(reweighed(f, nan_in_a_weight)), "--only", "numbers of weights"),
    ),
    "values beyond float16": (
        "float16-overflow",
        lambda f: (str(reweighed(f, huge_first_layer)), "--dtype", "float16", "--only", "overflow"),
    ),
    "a LoRA of zeros": ("adapter-no-effect", lambda f: (str(MODEL), "--lora", zero_lora(f), "--only", "adapters")),
    "guidance of 60": ("oversaturated", lambda f: ("--trace", str(traced(f, 60.0)))),
    "grain": ("residual-noise", lambda f: ("--images", str(images(f, grainy)))),
    "its transformer said to predict v": (
        "target-mismatch",
        lambda f: (
            str(edited(f, f"dit/{SCHEDULER}", prediction_type="v_prediction") / "dit"),
            *("--data", "scenes", "--only", "target"),
        ),
    ),
    "in a flow's sampler": (
        "eps-in-flow-sampler",
        lambda f: (str(edited(f, SCHEDULER, _class_name="FlowMatchEulerDiscreteScheduler")), "--quick"),
    ),
    "a key that nothing knows": (
        "unknown-key",
        lambda f: (str(edited(f, SCHEDULER, beta_shedule="linear")), "--quick"),
    ),
    "more steps than times": ("steps-beyond", lambda f: (str(MODEL), "--steps", "1500", "--quick")),
    "Heun on its grid": (
        "plan-exaggerates",
        lambda f: (str(MODEL), "--sampler", "heun", "--grid", "trailing", "--steps", "20", "--quick"),
    ),
    "guidance of 20 in a run": ("guidance-high", lambda f: ("--trace", str(traced(f, 20.0)))),
    "tiles that do not meet": ("tile-seams", lambda f: ("--images", str(images(f, tiled)))),
    "blur": (
        "low-sharpness",
        lambda f: ("--images", str(images(f, lambda image: image.filter(ImageFilter.GaussianBlur(3))))),
    ),
}


CAUSES = {  # words of the cause that is told
    "said to predict eps": "trained for v",
    "said to be trained by another schedule": "trained on cosine",
    "latents of another size": "4.3 times too clean",
    "latents cut as pixels are": "made for pixels",
    "eps at zero SNR": "is not determined by eps",
    "Karras on its schedule": "8 calls are left",
    "no weights of the VAE": "vae/config.json is not there",
    "NaN in a weight": "the training diverged",
    "values beyond float16": "float16 ends at 65504",
    "a LoRA of zeros": "must change a layer",
    "guidance of 60": "Guidance of 60",
    "grain": "Noise of 12",
    "its transformer said to predict v": "trained for eps",
    "in a flow's sampler": "never trained on",
    "a key that nothing knows": "ignores beta_shedule",
    "more steps than times": "1000 whole times",
    "Heun on its grid": "steps too far",
    "guidance of 20 in a run": "so many times over",
    "tiles that do not meet": "know nothing of their neighbours",
    "blur": "fine detail is missing",
}


def without(folder: Path, part: str) -> Path:
    model = copy(folder)
    shutil.rmtree(model / part)
    return model


def zero_lora(folder: Path) -> str:
    place = Path(shutil.copytree(MODEL / "lora", folder / "lora"))
    (file,) = place.glob("*.safetensors")
    held = load_file(file)
    zero(held)
    save_file(held, file, {"format": "pt"})
    return str(file)


HEALTHY: dict[str, Callable[[Path], Words]] = {
    "as it is": lambda f: (str(MODEL), "--data", "scenes"),
    "with its LoRA": lambda f: (str(MODEL), "--lora", str(MODEL / "lora"), "--only", "adapters"),
    "with its ControlNet": lambda f: (str(MODEL), "--controlnet", str(MODEL / "controlnet"), "--only", "adapters"),
    "a run": lambda f: ("--trace", str(traced(f, 4.0))),
    "its images": lambda f: ("--images", str(images(f))),
    "its transformer": lambda f: (str(MODEL / "dit"), "--data", "scenes"),
    "with its IP-Adapter": lambda f: (str(MODEL), "--ip-adapter", str(MODEL / "ip_adapter"), "--only", "adapters"),
    "its tuned plan": lambda f: ("scenes-128/plans/8.json",),
    "DDIM with 8 steps": lambda f: (str(MODEL), "--sampler", "ddim", "--steps", "8", "--quick"),
    "from half of an image": lambda f: (str(MODEL), "--steps", "20", "--strength", "0.5", "--quick"),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_sabotage_is_found(name: str, tmp_path: Path) -> None:
    code, words = SABOTAGES[name]
    found = doctor(*words(tmp_path))
    causes = {one["code"]: one["cause"] for one in found["findings"] if one["severity"] != "note"}
    assert CAUSES[name] in causes.get(code, ""), found["findings"]
    assert found["status"] == 1


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_healthy_is_left_alone(name: str, tmp_path: Path) -> None:
    found = doctor(*HEALTHY[name](tmp_path))
    assert [finding for finding in found["findings"] if finding["severity"] != "note"] == []
    assert found["checked"]
