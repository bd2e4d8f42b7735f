"""`pellucid memory`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import save_file

import pellucid

STAGES = ["text", "encode", "denoise", "decode"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    base = tmp_path_factory.mktemp("memory")
    tiny.stable_diffusion(base).save_pretrained(base / "model")
    made = {k: v for k, v in tiny.SD1_UNET.items() if k not in ("up_block_types", "sample_size")}
    control = tiny.ControlNetModel(**made, conditioning_embedding_out_channels=(16, 32))
    tiny.randomised(control).save_pretrained(base / "control")
    layer = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora"
    save_file(
        {f"{layer}.down.weight": torch.ones(2, 64), f"{layer}.up.weight": torch.ones(64, 2)}, base / "lora.safetensors"
    )
    return str(base / "model")


def beside(model: str, name: str) -> str:
    return str(Path(model).parent / name)


def test_stages_before_and_after(tell, model):
    text = tell("memory", model, "--size", "32x24").out
    assert "model · 32×24 · batch 1 · float32 · on cpu" in text
    for stage in STAGES:
        row = next(line for line in text.splitlines() if line.split()[:1] == [stage])
        assert re.search(r"\d B +[\d.]+ MiB +[\d.]+ MiB +(0\.99|1\.00)\d +█", row), row
    assert "unet.up_blocks.1." in text
    assert re.search(r"peak: denoise, [\d.]+ MiB predicted, [\d.]+ MiB measured; owner: unet\.", text)


def test_json_and_options(tell, model):
    control = beside(model, "control")
    found = tell(
        "memory", model, "--size", "32", "--batch", "2", "--controlnet", control, "--vae-tile", "16", "--json"
    ).json
    assert list(found["stages"]) == STAGES
    assert (found["size"], found["batch"], found["policy"], found["controlnets"]) == ([32, 32], 2, {"vae_tile": 16}, 1)
    for stage in found["stages"].values():
        assert stage["predicted"] == stage["weights"] + stage["activations"] + stage["workspace"]
        assert stage["predicted"] == pytest.approx(stage["measured"], rel=0.01)
        assert stage["seconds"] > 0
    assert found["stages"]["encode"]["owner"].startswith("controlnet.controlnet_cond_embedding")
    assert found["peak_stage"] == "denoise"
    assert found["stages"]["denoise"]["held"][0]["bytes"] > 0


def test_a_prediction_is_in_the_dtype_of_the_files_and_on_a_cpu_in_what_they_work_in_there(tell, tmp_path):
    pellucid.load(tiny.saved("dit")[1]).save(tmp_path / "dit", dtype=torch.float16)  # which cannot be sketched
    for name in ("scenes-128", str(tmp_path / "dit")):
        for device, dtype in (("cuda", "float16"), ("cpu", "float32"), ("cpu:0", "float32")):
            assert f"· {dtype} · on {device}" in tell("memory", name, "--predict", "--device", device).out


def test_prediction_for_a_device_that_is_not_here(tell, model):
    sizes = {}
    for offload in ("none", "component", "block"):
        args = ("--size", "64", "--predict", "--device", "cuda", "--dtype", "bfloat16", "--offload", offload, "--json")
        found = tell("memory", model, *args).json
        assert found["stages"]["denoise"]["measured"] is None
        assert (found["device"], found["dtype"]) == ("cuda", "bfloat16")
        sizes[offload] = found["stages"]["denoise"]["weights"]
    assert sizes["none"] > sizes["component"] > sizes["block"] > 0
    text = tell("memory", model, "--size", "64", "--predict", "--offload", "block").out
    assert "measured" not in text
    assert "offload: reduces weights on the device" in text


def test_compare_and_plots(tell, model, see, tmp_path):
    adapters = ("--controlnet", beside(model, "control"), "--lora", beside(model, "lora.safetensors"))
    args = ("memory", model, "--size", "40", "--steps", "1", "--compare", *adapters)
    text = tell(*args, "--plot", "strategies.png").out
    for name in ("as it is", "attention=math", "vae_tile=16", "channels_last=True", "dtype=bfloat16", "LoRA, merged"):
        row = next(line for line in text.splitlines() if line.strip().startswith(name))
        assert len(re.findall(r"[\d.]+ [KM]iB", row)) == 4, row
    assert "left out: offload" in text
    assert text.count("LoRA, view") == 2  # its row, and what the merged one is compared with
    see(tmp_path / "strategies.png", 1500, 50)
    tell("memory", model, "--size", "32", "--plot", "stages.png")
    see(tmp_path / "stages.png", 1500, 50)


@pytest.mark.parametrize(
    ("args", "code", "hint"),
    [
        (["nowhere"], "not-found", "model must be"),
        (["MODEL", "--size", "wide"], "size", "--size must be WIDTHxHEIGHT"),
        (["MODEL", "--size", "33"], "size", "multiple"),
        (["MODEL", "--vae-tile", "3"], "policy", "vae_tile must be None or at least 16"),
        (["MODEL", "--attention", "flush"], "policy", "flash"),
        (["MODEL", "--offload", "block"], "policy", "offload must be none on the CPU"),
        (["MODEL", "--offload", "block", "--compile", "--predict"], "policy", "compile must be False"),
        (["MODEL", "--predict", "--compare"], "usage", "--compare"),
        (["MODEL", "--predict", "--device", "toaster"], "device", "--device must be cuda or cpu"),
        (["MODEL", "--controlnet", "MODEL"], "not-a-component", "a whole pipeline"),
        (["MODEL", "--batch", "0"], "usage", "--batch"),
        (["MODEL", "--plot", "a.txt"], "file-type", "--plot"),
        (["MODEL", "--dtype", "float7"], "dtype", "float7"),
    ],
)
def test_bad_input_is_one_line(refuse, model, args, code, hint):
    line = refuse("memory", *(model if word == "MODEL" else word for word in args))
    assert line.startswith(f"error[{code}")
    assert hint in line
