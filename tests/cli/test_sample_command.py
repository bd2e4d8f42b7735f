"""`pellucid sample` on tiny random models: images, recipes that repeat them bit by bit, sheets, and refusals."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import tiny_models as tiny
import torch
from PIL import Image, PngImagePlugin
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file, save_file

from pellucid.cli import sample as words
from pellucid.cli import sample_run
from pellucid.core.compile import compile_plan
from pellucid.core.errors import PellucidError
from pellucid.pipeline import recipe as recipes
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.recipe import Recipe, read_png, write_png
from pellucid.pipeline.repeat import AdapterFile
from pellucid.pipeline.request import Request
from pellucid.pipeline.sheet import axes_of, cell_fields, shared_settings

DOCS = Path(__file__).parents[2] / "docs" / "sample.md"
SMALL = {**tiny.SD1_UNET, "sample_size": 8, "layers_per_block": 1}  # 16×16 pixels
LAYER = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
A1111 = (
    "a (cat:1.2) <lora:ink:0.6>\nNegative prompt: bad\n"
    "Steps: 3, Sampler: DPM++ 2M Karras, CFG scale: 12, Seed: 9, Size: 16x16, Model: v1-5, Clip skip: 2, "
    "Face restoration: GFPGAN"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text-to-image model, a class-conditional one, a pixel one, adapters and images."""
    folder = tmp_path_factory.mktemp("home")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers' own
        make_models(folder)
    draw = np.random.default_rng(0)
    coarse = Image.fromarray(draw.integers(0, 255, (4, 4, 3), dtype=np.uint8))
    coarse.resize((16, 16), Image.Resampling.BICUBIC).save(folder / "sketch.png")
    mask = np.zeros((16, 16), dtype=np.uint8)
    mask[:, 8:] = 255
    Image.fromarray(mask).save(folder / "mask.png")
    (folder / "prompts.txt").write_text("abc\n\ncab bca\n", encoding="utf-8")
    with_text("theirs.png", folder, parameters=A1111)
    return folder


def make_models(folder: Path) -> None:
    diffusers.utils.logging.set_verbosity_error()
    sd = tiny.stable_diffusion(folder / "raw", unet=SMALL)
    with torch.no_grad():
        sd.vae.decoder.conv_out.weight.mul_(20)  # an image with contrast: settings must show in its pixels
    sd.save_pretrained(folder / "model")
    net = diffusers.ControlNetModel.from_unet(sd.unet, conditioning_embedding_out_channels=(8, 16))
    tiny.randomised(net).save_pretrained(folder / "edges")
    tiny.controlnet(SMALL).save_pretrained(folder / "eighth")  # for latents of 1/8
    generator = torch.Generator().manual_seed(1)
    for name, layer, scale in (("ink", LAYER, 1.0), ("other", LAYER.replace("blocks.0", "blocks.7"), 1.0)):
        pair = {
            f"unet.{layer}.lora_{k}.weight": torch.randn(shape, generator=generator) * scale
            for k, shape in (("A", (4, 32)), ("B", (32, 4)))
        }
        save_file(pair, folder / f"{name}.safetensors")
    save_file({"<star>": torch.randn(2, 64, generator=generator)}, folder / "star.safetensors")
    make_eyes(folder, sd.unet)
    network = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=1, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10, norm_type="ada_norm_zero", norm_elementwise_affine=False,
    )  # fmt: skip
    dit = diffusers.DiTPipeline(tiny.randomised(network), sd.vae, diffusers.DDIMScheduler())
    dit.save_pretrained(folder / "classes")
    index = folder / "classes" / "model_index.json"
    held = {**json.loads(index.read_text()), "id2label": {"0": "tench, Tinca", "1": "goldfish"}}
    index.write_text(json.dumps(held), encoding="utf-8")
    pixels = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(32,), layers_per_block=1, down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )  # fmt: skip
    diffusers.DDPMPipeline(tiny.randomised(pixels), diffusers.DDPMScheduler()).save_pretrained(folder / "pixels")


def make_eyes(folder: Path, unet: Any) -> None:
    """An image encoder and a plain IP-Adapter for it."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, projection_dim=20, num_hidden_layers=1, num_attention_heads=4,
        image_size=16, patch_size=8,
    )  # fmt: skip
    tiny.randomised(CLIPVisionModelWithProjection(config)).save_pretrained(folder / "eyes")
    generator = torch.Generator().manual_seed(2)
    shapes = {"image_proj.proj.weight": (256, 20), "image_proj.proj.bias": (256,)}
    shapes |= {"image_proj.norm.weight": (64,), "image_proj.norm.bias": (64,)}
    for number, name in enumerate(unet.attn_processors):
        if "attn2" in name:
            inner = unet.get_submodule(name.removesuffix(".processor")).to_q.out_features
            shapes |= {f"ip_adapter.{number}.to_{k}_ip.weight": (inner, 64) for k in "kv"}
    held = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(held, folder / "ip.safetensors")


def with_text(name: str, folder: Path, **texts: str) -> Path:
    """An image that carries texts."""
    info = PngImagePlugin.PngInfo()
    for key, value in texts.items():
        info.add_itxt(key, value)
    Image.new("RGB", (16, 16)).save(folder / name, pnginfo=info)
    return folder / name


@pytest.fixture
def here(home: Path, tmp_path: Path, ask: Callable[..., Any]) -> Path:
    """The empty folder in which commands run, with links to everything in `home`."""
    for path in home.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


@pytest.fixture
def make(here: Path, tell: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `pellucid sample … --json` with few steps and gives back what it says."""

    def run(*args: str) -> Any:
        return tell("sample", *args, "--json").json

    return run


def pixels(path: Path | str) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image).astype(int)


# --- images ----------------------------------------------------------------------------------------------------


def test_an_image_carries_its_recipe_and_the_text_of_a1111(make, here):
    said = make("model", "abc", "--seed", "7", "--steps", "3", "--negative", "cab", "--out", "a.png")
    assert said["files"] == ["a.png"]
    assert said["seeds"] == [7]
    assert [stage["name"] for stage in said["stages"]] == ["text", "encode", "denoise", "decode"]
    assert all(stage["seconds"] >= 0 for stage in said["stages"])
    assert said["calls"] == 4  # PLMS calls once more
    assert said["plain"] == {"device": 4}  # no step is captured on a CPU
    recipe = read_png(here / "a.png")
    assert recipe.to_dict() == said["recipes"][0]
    assert (recipe.prompt, recipe.negative_prompt, recipe.seed, recipe.steps) == ("abc", "cab", 7, 3)
    assert recipe.dialect == "diffusers"
    assert re.fullmatch(r"weights-1:[0-9a-f]{16}(-[0-9a-f]{16}){4}", recipe.model_hash)
    with Image.open(here / "a.png") as image:
        text = image.text["parameters"]
        assert image.size == (16, 16)
    assert text.startswith(
        "abc\nNegative prompt: cab\nSteps: 3, Sampler: PLMS, Schedule type: DDIM, CFG scale: 7, Seed: 7"
    )
    assert pixels("a.png").std() > 5


def test_words_at_the_end(tell, here):
    text = tell("sample", "model", "abc", "--seed", "7", "--sampler", "Euler a", "--steps", "2").out
    assert text.startswith("wrote out-7.png: seed 7 · 16×16 · Euler a (trailing), 2 steps · guidance 7 + rescale\n")
    assert re.search(r"load [\d.]+ s · text [\d.]+ s · encode [\d.]+ s · denoise [\d.]+ s · decode [\d.]+ s", text)
    assert "2 model calls" in text


def test_float16_on_a_cpu_is_said_to_be_slow_once_and_before_the_run(ask, tell, here):
    done = ask("sample", "model", "abc", "--steps", "1", "--dtype", "float16", "--device", "cpu")
    assert done.code == 0
    assert (done.out + done.err).count("float16 is slow on a CPU") == 1
    assert done.err.startswith("note: float16 is slow on a CPU")
    tell("sample", "model", "abd", "--steps", "1", "--dtype", "auto", "--device", "cpu")


def test_every_option_reaches_the_request(make, here):
    """One call with most options; what each sets is in the recipe."""
    recipe = make(
        "model", "a (cat:1.3)", "--negative", "cab", "--seed", "3", "--size", "32x16", "--sampler", "euler_a", "--grid",
        "karras", "--steps", "4", "--as", "k-diffusion", "--option", "eta=0.5", "--guidance",
        "linear:5:2 + interval start=0.2", "--image", "sketch.png", "--strength", "0.75", "--clip-skip", "1",
        "--weighting", "--noise", "philox", "--attention", "math", "--vae-tile", "16", "--vae-slicing",
        "--channels-last", "--dtype", "float32", "--device", "cpu", "--out", "a.png",
    )["recipes"][0]  # fmt: skip
    wanted = {
        "negative_prompt": "cab", "seed": 3, "size": [32, 16], "sampler": "euler_a", "steps": 4,
        "dialect": "k-diffusion", "options": {"eta": 0.5}, "strength": 0.75, "clip_skip": 1, "weighting": True,
        "noise": "philox",
        "policy": {"attention": "math", "vae_tile": 16, "vae_slicing": True, "channels_last": True},
    }  # fmt: skip
    assert {name: recipe[name] for name in wanted} == wanted
    assert recipe["grid"]["name"] == "karras"
    assert recipe["guidance"]["scale"] == {"first": 5.0, "last": 2.0, "shape": "linear"}
    assert [rule["rule"] for rule in recipe["guidance"]["rules"]] == ["interval"]
    assert list(recipe["inputs"]) == ["image"]


@pytest.mark.parametrize(
    ("seeds", "extra", "wanted"),
    [
        ("5", ["-n", "3"], [5, 6, 7]),
        ("9,2", [], [9, 2]),
        ("1..3", [], [1, 2, 3]),
        ("1..2,7", ["-n", "3"], [1, 2, 7]),
    ],
)
def test_seeds(make, here, seeds, extra, wanted):
    said = make("pixels", "--seed", seeds, "--steps", "1", *extra, "--out", "made")
    assert said["seeds"] == wanted
    assert said["files"] == [f"made/out-{seed}.png" for seed in wanted]


def test_a_seed_is_drawn_where_none_is_given(make, here):
    seeds = [make("pixels", "--steps", "1")["seeds"][0] for _ in range(2)]
    assert seeds[0] != seeds[1]
    assert all((here / f"out-{seed}.png").is_file() for seed in seeds)


def test_prompts_from_a_file_are_numbered_and_alone_as_in_a_batch(make, here):
    alone = make("model", "@prompts.txt", "-n", "2", "--seed", "5", "--steps", "2", "--out", "alone")
    assert [recipe["prompt"] for recipe in alone["recipes"]] == ["abc", "abc", "cab bca", "cab bca"]
    assert [Path(path).name for path in alone["files"]] == [f"out-{i + 1:04d}-{i + 5}.png" for i in range(4)]
    batch = make("model", "@prompts.txt", "-n", "2", "--seed", "5", "--steps", "2", "--out", "batch", "--batch", "4")
    assert (alone["calls"], batch["calls"]) == (4 * 3, 3)
    for a, b in zip(alone["files"], batch["files"], strict=True):
        assert np.abs(pixels(a) - pixels(b)).max() <= 1  # kernels may round by batch


def test_images_of_a_model_without_text_are_alone_as_in_a_batch(make, here):
    alone = make("pixels", "-n", "5", "--seed", "5", "--steps", "2", "--out", "alone")
    batch = make("pixels", "-n", "5", "--seed", "5", "--steps", "2", "--out", "batch", "--batch", "3")
    assert alone["seeds"] == batch["seeds"] == [5, 6, 7, 8, 9]
    assert batch["calls"] < alone["calls"]
    for a, b in zip(alone["files"], batch["files"], strict=True):
        assert np.abs(pixels(a) - pixels(b)).max() <= 1  # kernels may round by batch


def test_prompts_of_other_lengths_do_not_fill_each_other_up(make, here):
    """A longer neighbour would add empty chunks to a short prompt, and change its image."""
    (here / "mixed.txt").write_text("abc\n" + "bcd " * 20 + "\n", encoding="utf-8")
    said = make("model", "@mixed.txt", "--seed", "5", "--steps", "2", "--batch", "2", "--out", "mixed")
    alone = make("model", "abc", "--seed", "5", "--steps", "2", "--out", "alone.png")
    assert (pixels(said["files"][0]) == pixels(alone["files"][0])).all()


def test_no_file_is_replaced_unasked(make, refuse, here):
    for wanted in ("out-7.png", "out-7-2.png", "out-7-3.png"):
        assert make("pixels", "--seed", "7", "--steps", "1")["files"] == [wanted]
    assert make("pixels", "--seed", "7", "--steps", "1", "--overwrite")["files"] == ["out-7.png"]
    assert "--overwrite" in refuse("sample", "pixels", "--out", "out-7.png")
    both = make("pixels", "--seed", "7,7", "--steps", "1", "--overwrite")["files"]
    assert both == ["out-7.png", "out-7-2.png"]


def test_a_number_is_plain_guidance_and_guarded_is_a_word(make, here):
    base = ("model", "abc", "--seed", "1", "--steps", "2")
    capped = make(*base, "--guidance", "guarded 12", "--out", "a.png")
    assert capped["recipes"][0]["guidance"]["scale"] == 7.0
    assert capped["recipes"][0]["guidance"]["rules"][0]["rule"] == "rescale"
    assert "guidance scale 12 was capped at 7 by the guarded preset" in capped["notes"]
    high = make(*base, "--guidance", "12", "--out", "b.png")
    assert high["recipes"][0]["guidance"] == {"scale": 12.0, "rules": []}
    assert [note for note in high["notes"] if note.startswith("a guidance scale of 12 may burn colours")]
    mild = make(*base, "--guidance", "4", "--out", "d.png")
    assert mild["recipes"][0]["guidance"] == {"scale": 4.0, "rules": []}
    assert not [note for note in mild["notes"] if "guidance" in note]
    plain = make(*base, "--out", "c.png")
    assert plain["recipes"][0]["guidance"]["scale"] == 7.0
    assert (pixels("a.png") == pixels("c.png")).all()
    assert (pixels("a.png") != pixels("b.png")).any()


def test_autoguidance_takes_a_second_model(make, refuse, here):
    base = ("model", "abc", "--seed", "1", "--steps", "2")
    said = make(*base, "--guidance", "3 + autoguidance scale=2", "--weak", "model", "--out", "a.png")
    assert [(a["kind"], a["name"]) for a in said["recipes"][0]["adapters"]] == [("weak", "model")]
    assert "--weak MODEL for model must be given again" in refuse("sample", "--from", "a.png", "--out", "b.png")
    again = make("--from", "a.png", "--weak", "model", "--out", "b.png")
    assert again["from"]["pixels"] == "same pixels as a.png"


# --- from an image back to it ---------------------------------------------------------------------------------

REPEATED = {
    "text": (["model", "abc", "--negative", "cab"], []),
    "named sampler": (["model", "abc", "--sampler", "dpmpp_sde", "--grid", "karras"], []),
    "eta": (["model", "abc", "--sampler", "ddim", "--option", "eta=0.7", "--noise", "torch"], []),
    "guidance": (["model", "abc", "--guidance", "cosine:9:2 + apg"], []),
    "image": (["model", "abc", "--image", "sketch.png", "--strength", "0.6"], ["--image", "sketch.png"]),
    "exact strength": (
        ["model", "abc", "--image", "sketch.png", "--strength", "0.6", "--sampler", "euler_a"],
        ["--image", "sketch.png"],
    ),
    "mask": (
        ["model", "abc", "--image", "sketch.png", "--mask", "mask.png"],
        ["--image", "sketch.png", "--mask", "mask.png"],
    ),
    "class": (["classes", "--label", "goldfish"], []),
    "pixel": (["pixels"], []),
    "lora found": (["model", "abc", "--lora", "ink.safetensors:0.5"], []),
    "lora given": (["model", "abc", "--lora", "ink.safetensors:0.5"], ["--lora", "ink.safetensors"]),
    "control": (["model", "abc", "--control", "edges,sketch.png,0.7,0-0.6"], ["--control", "edges,sketch.png"]),
    "image prompt": (
        ["model", "abc", "--image-prompt", "ip.safetensors,sketch.png,0.6", "--image-encoder", "eyes"],
        ["--image-prompt", "ip.safetensors,sketch.png", "--image-encoder", "eyes"],
    ),
    "word": (["model", "a <star>", "--inversion", "star.safetensors"], ["--inversion", "star.safetensors"]),
    "target": (["model", "abc", "--target", "v"], ["--target", "v"]),
    "tiles": (["model", "abc", "--vae-tile", "16", "--size", "64x16"], []),
    "other precision": (["model", "abc", "--dtype", "bfloat16"], []),
    "clip skip, size": (["model", "(abc:1.3)", "--clip-skip", "1", "--weighting", "--size", "32x16"], []),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_image_is_repeated_bit_by_bit(make, here, name):
    args, again = REPEATED[name]
    first = make(*args, "--seed", "11", "--steps", "3", "--out", "first.png")
    second = make("--from", "first.png", *again, "--out", "second.png")
    assert (pixels("first.png") == pixels("second.png")).all()
    assert second["from"]["pixels"] == "same pixels as first.png"
    assert second["from"]["changed"] == []
    assert second["recipes"] == first["recipes"]
    other = make(*args, "--seed", "12", "--steps", "3", "--out", "third.png")
    assert (pixels("first.png") != pixels("third.png")).any(), other


def test_a_guessing_control_of_python_is_repeated(make, here):
    import pellucid

    control = pellucid.Control("edges", "sketch.png", 0.7, guess=True)
    pellucid.load("model")("abc", controls=[control], steps=3, seed=11).save("first.png")
    said = make("--from", "first.png", "--control", "edges,sketch.png", "--out", "second.png")
    assert said["from"]["pixels"] == "same pixels as first.png"
    assert said["recipes"][0]["adapters"][0]["guess"] is True


def test_one_of_a_batch_is_repeated_alone(make, here):
    make("model", "abc", "-n", "3", "--seed", "4", "--steps", "2", "--out", "many")
    assert make("--from", "many/out-5.png")["from"]["pixels"] == "same pixels as many/out-5.png"


def test_options_beside_a_recipe_override_it_and_are_listed(make, tell, here):
    make("model", "abc", "--seed", "7", "--steps", "3", "--out", "a.png")
    said = make(
        "--from", "a.png", "--steps", "2", "--seed", "8", "--guidance", "3", "--size", "32x16", "--out", "b.png"
    )
    assert said["from"]["changed"] == [
        "width 16 → 32",
        "guidance 7 + rescale space=raw → 3",
        "steps 3 → 2",
        "seed 7 → 8",
    ]
    assert (said["recipes"][0]["steps"], said["seeds"], said["recipes"][0]["size"]) == (2, [8], [32, 16])
    text = tell("sample", "--from", "a.png", "model", "cab", "--out", "c.png").out
    assert "changed: prompt abc → cab" in text
    assert "differs from a.png: " in text
    assert read_png(here / "c.png").prompt == "cab"


def test_another_sampler_leaves_the_old_ones_options_and_grid_behind(make, here):
    make(
        "model",
        "abc",
        "--sampler",
        "ddim",
        "--option",
        "eta=0.5",
        "--grid",
        "leading",
        "--steps",
        "2",
        "--out",
        "a.png",
    )
    recipe = make("--from", "a.png", "--sampler", "DPM++ 2M Karras", "--out", "b.png")["recipes"][0]
    assert (recipe["sampler"], recipe["grid"]["name"], recipe["options"]) == ("dpmpp_2m", "karras", {})


def test_what_is_missing_is_one_line(make, refuse, here, tmp_path):
    make(
        "model", "abc", "--image", "sketch.png", "--strength", "0.5", "--lora", "ink.safetensors:0.4", "--control",
        "edges,sketch.png", "--steps", "2", "--seed", "1", "--out", "a.png",
    )  # fmt: skip
    (here / "ink.safetensors").unlink()
    line = refuse("sample", "--from", "a.png")
    assert line == (
        "error[missing]: --lora FILE for ink, --control NET,FILE for edges, --image FILE must be given again: "
        "the recipe holds names and hashes, not the files."
    )


def test_another_image_or_adapter_is_reported(make, home, here):
    make(
        "model", "abc", "--image", "sketch.png", "--lora", "ink.safetensors:0.5", "--steps", "2", "--seed", "1",
        "--out", "a.png",
    )  # fmt: skip
    (here / "ink.safetensors").unlink()
    held = {key: tensor * 1.5 for key, tensor in load_file(home / "ink.safetensors").items()}
    save_file(held, here / "ink.safetensors")
    said = make("--from", "a.png", "--image", "mask.png", "--out", "b.png")
    assert said["from"]["changed"] == ["image is another image", "lora ink has other weights"]
    assert said["from"]["pixels"].startswith("differs from a.png")
    said = make("--from", "a.png", "--image", "sketch.png", "--lora", "ink.safetensors:0.9", "--out", "c.png")
    assert said["from"]["changed"] == ["lora ink has other weights", "lora ink at 0.9, not 0.5"]


def test_another_model_is_reported_or_refused(make, refuse, home, here):
    (here / "model").unlink()
    shutil.copytree(home / "model", here / "model")
    make("model", "abc", "--seed", "1", "--steps", "2", "--out", "a.png")
    shutil.copytree(here / "model", here / "renamed")
    assert make("--from", "a.png", "renamed", "--out", "b.png")["from"]["changed"] == []  # the same weights elsewhere
    path = here / "model" / "unet" / "diffusion_pytorch_model.safetensors"
    held = load_file(path)
    held["conv_out.bias"] = held["conv_out.bias"] + 1e-3
    save_file(held, path)
    assert refuse("sample", "--from", "a.png").startswith(
        "error[model-hash]: model must be the recipe's; model has another network now."
    )
    assert make("--from", "a.png", "model", "--out", "c.png")["from"]["changed"] == ["the model is another: network"]
    shutil.rmtree(here / "model")
    assert refuse("sample", "--from", "a.png") == (
        "error[missing]: MODEL must be given: the recipe names 'model', which is not here."
    )


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--target", "v"], "schedule, target or settings"),
        (["--inversion", "star.safetensors"], "text encoders, tokenizers"),
    ],
)
def test_what_was_loaded_otherwise_must_be_said_again(make, refuse, here, args, part):
    make("model", "abc", *args, "--seed", "1", "--steps", "2", "--out", "a.png")
    line = refuse("sample", "--from", "a.png")
    assert line.startswith(f"error[model-hash]: model must be the recipe's; model has another {part} now. Give --vae,")


def test_a1111s_text_is_read_and_what_is_not_understood_is_said(make, tell, refuse, here):
    assert "MODEL must be given: the recipe names 'v1-5'" in refuse("sample", "--from", "theirs.png")
    text = tell("sample", "--from", "theirs.png", "model", "--out", "a.png").out
    assert "from theirs.png: A1111's text" in text
    assert "understood: prompt a (cat:1.2), negative_prompt bad, weighting True, steps 3, sampler dpmpp_2m" in text
    assert "lora ink at 0.6" in text
    assert "not understood: Face restoration GFPGAN\n" in text
    assert "note: a guidance scale of 12 may burn colours" in text
    recipe = read_png(here / "a.png")
    assert (recipe.sampler, recipe.grid["name"], recipe.steps, recipe.seed) == ("dpmpp_2m", "karras", 3, 9)
    assert (recipe.clip_skip, recipe.weighting, recipe.dialect) == (1, True, "k-diffusion")
    assert [(a["name"], a["scale"]) for a in recipe.adapters] == [("ink", 0.6)]
    assert (recipe.guidance["scale"], recipe.guidance["rules"]) == (12.0, [])  # as A1111 means it
    said = make("--from", "theirs.png", "model", "--guidance", "guarded 12", "--out", "b.png")
    assert said["recipes"][0]["guidance"]["scale"] == 7.0
    assert said["from"]["pixels"] == ""


def test_our_own_text_without_the_recipe_gives_the_settings_back(make, here, tmp_path):
    """A program that keeps `parameters` alone keeps enough."""
    make("model", "abc", "--sampler", "euler_a", "--grid", "karras", "--steps", "3", "--seed", "5", "--out", "a.png")
    with Image.open("a.png") as image:
        with_text("b.png", tmp_path, parameters=image.text["parameters"])
    recipe = make("--from", "b.png", "model", "--out", "c.png")["recipes"][0]
    assert (recipe["sampler"], recipe["grid"]["name"], recipe["steps"], recipe["seed"]) == ("euler_a", "karras", 3, 5)


BIG = "a cat\nSteps: 2, Sampler: Euler, Seed: 9, Size: 64x56"
LONG = "a cat\nSteps: 1200, Sampler: Euler, Seed: 9, Size: 16x16"


@pytest.mark.parametrize(
    ("text", "word", "flags"),
    [
        (BIG, "64×56 for x.png of 16×16. Give --size 64x56", ("--size", "64x56")),
        (LONG, "1200 for x.png. Give --steps 1200", ("--steps", "2")),
    ],
)
def test_a_recipe_of_another_order_of_size_is_not_run_unasked(here, refuse, make, text, word, flags):
    """Nobody sees in a small image what its recipe asks for. Saying it on the command line is consent."""
    with_text("x.png", here, parameters=text)
    line = refuse("sample", "--from", "x.png", "model", "--out", "a.png")
    assert line.startswith("error[recipe-size]: ")
    assert word in line
    assert not (here / "a.png").exists()
    assert len(make("--from", "x.png", "model", *flags, "--out", "a.png")["files"]) == 1


@pytest.mark.parametrize("answer", ["y", "n"])
def test_on_a_terminal_it_asks(here, ask, monkeypatch, answer):
    with_text("x.png", here, parameters=BIG)
    asked = []
    monkeypatch.setattr(sample_run, "on_terminal", lambda: True)
    monkeypatch.setattr("typer.confirm", lambda text, **_: asked.append(text) or answer == "y")
    said = ask("sample", "--from", "x.png", "model", "--out", "a.png")
    assert asked == ["x.png is 16×16, and its recipe makes 64×56, 14 times as many pixels. Run it?"]
    assert (said.code, (here / "a.png").exists()) == ((0, True) if answer == "y" else (130, False))


def test_a_recipe_of_the_same_order_runs(here, make):
    with_text("x.png", here, parameters=BIG.replace("64x56", "48x48"))
    assert make("--from", "x.png", "model", "--out", "a.png")["files"] == ["a.png"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"grid": {"bogus": 1}}, "recipe-value"),
        ({"grid": {"name": "bogus"}}, "unknown-grid"),
        ({"conditioning": {"crop": "x"}}, "recipe-value"),
        ({"conditioning": {"label": [1]}}, "recipe-value"),
        ({"policy": {"bogus": 1}}, "recipe-value"),
        ({"noise": "brownian"}, "recipe-noise"),
        ({"guidance": {"scale": "x"}}, "guidance"),
        ({"sampler": "ddim", "options": {"eta": "x"}}, "option"),
        ({"sampler": "bogus"}, "unknown-sampler"),
        ({"model": "../../etc"}, "missing"),
        ({"model": "some/where"}, "missing"),
        ({"inputs": {"latents": "sha256:0"}}, "missing"),
        ({"adapters": ({"name": "../ink", "kind": "lora", "scale": 1.0},)}, "missing"),
        ({"strength": 0.0, "inputs": {}}, "missing"),
    ],
)
def test_a_strangers_recipe_is_refused_in_a_line(refuse, here, change, code):
    base = Recipe(model="model", prompt="abc", sampler="euler", grid={"name": "karras"}, steps=2, size=(16, 16))
    write_png(Image.new("RGB", (16, 16)), here / "x.png", replace(base, **change))
    line = refuse("sample", "--from", "x.png")
    assert line.startswith(f"error[{code}"), line


# --- sheets ----------------------------------------------------------------------------------------------------


def test_a_sheet_is_labelled_with_the_guidance_that_ran():
    axes = axes_of("guidance=4,guarded 5,guarded 15", None)
    assert axes[0].labels() == ["4", "5 + rescale", "7 + rescale"]
    assert axes_of("guidance=4,8,15", None)[0].labels() == ["4", "8", "15"]
    runs = [cell_fields({}, {"guidance": value})["guidance"].text() for value in axes[0].values]
    assert runs == axes[0].labels()


def test_a_sheet_has_its_cells_and_repeats(make, tell, see, here):
    args = ("model", "abc", "--seed", "7", "--grid-of", "steps=1,2 x guidance=1,3,20", "--keep-cells", "--out", "s.png")
    said = make(*args)
    see(here / "s.png", 300, 200)
    assert said["sheet"] == {"file": "s.png", "axes": "steps=1,2 x guidance=1,3,20", "cells": "s-cells"}
    settings = [(r["steps"], r["guidance"]["scale"]) for r in said["recipes"]]
    assert settings == [(1, 1.0), (2, 1.0), (1, 3.0), (2, 3.0), (1, 20.0), (2, 20.0)]
    assert said["files"][1] == "s-cells/01-steps=1-guidance=1.0.png"
    assert len(list((here / "s-cells").iterdir())) == 6
    assert [note for note in said["notes"] if note.startswith("a guidance scale of 20 may burn colours")]
    cell = make("model", "abc", "--seed", "7", "--steps", "2", "--guidance", "3", "--out", "cell.png")
    assert (pixels("cell.png") == pixels(said["files"][4])).all(), cell
    axes, recipe = recipes.read_sheet(here / "s.png")
    assert (axes, recipe.to_dict()) == ("steps=1,2 x guidance=1,3,20", said["recipes"][0])
    text = tell("sample", "--from", "s.png", "--out", "again.png").out
    assert "from s.png: a recipe of pellucid" in text
    assert "a sheet" in text
    assert "same pixels as s.png" in text


@pytest.mark.parametrize(
    ("axes", "extra", "field", "wanted"),
    [
        ("sampler=euler,DPM++ 2M Karras", [], "sampler", ["euler", "dpmpp_2m"]),
        ("eta=0,0.5", ["--sampler", "ddim"], "options", [{"eta": 0.0}, {"eta": 0.5}]),
        ("seed=1..3", [], "seed", [1, 2, 3]),
        ('prompt="abc","b, c"', [], "prompt", ["abc", "b, c"]),
        ("size=16x16,32x16", [], "size", [[16, 16], [32, 16]]),
        ("strength=0.5,1", ["--image", "sketch.png"], "strength", [0.5, 1.0]),
        ("guidance=linear:5:2,3", [], "guidance", None),
        ("lora=0.2,0.9", ["--lora", "ink.safetensors"], "adapters", None),
        ("negative=bad,cab", ["--sampler", "euler"], "negative_prompt", ["bad", "cab"]),
    ],
)
def test_axes_of_a_sheet(make, here, axes, extra, field, wanted):
    said = make("model", "abc", "--steps", "2", "--seed", "3", *extra, "--grid-of", axes)
    assert said["files"] == ["sheet.png"]
    found = [recipe[field] for recipe in said["recipes"]]
    if field == "adapters":
        assert [adapters[0]["scale"] for adapters in found] == [0.2, 0.9]
    elif field == "guidance":
        assert [guidance["scale"] for guidance in found] == [{"first": 5.0, "last": 2.0, "shape": "linear"}, 3.0]
    else:
        assert found == wanted
    assert [recipe["seed"] for recipe in said["recipes"]] == ([1, 2, 3] if field == "seed" else [3] * len(found))


def test_the_footer_says_what_all_cells_share():
    one = Recipe(model="a/b", sampler="euler", grid={"name": "trailing"}, steps=4, seed=7, size=(16, 16))
    two = replace(one, sampler="dpmpp_2m", grid={"name": "karras"})
    assert shared_settings([one, one]).startswith("b · seed 7 · 16×16 · euler · trailing · 4 steps")
    assert shared_settings([one, two]).startswith("b · seed 7 · 16×16 · 4 steps")


def test_labels_are_an_axis_too(make, here):
    said = make("classes", "--label", "0", "--steps", "1", "--seed", "1", "--grid-of", "label=3,goldfish")
    assert [recipe["conditioning"] for recipe in said["recipes"]] == [{"label": 3}, {"label": "goldfish"}]


# --- refusals --------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(home: Path, here: Path) -> Path:
    """A model whose weights are cut off, and a pickle that would write a file."""
    shutil.copytree(home / "model", here / "cut")
    path = here / "cut" / "unet" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:10_000])
    torch.save({"state_dict": {"a": Trap(here / "trapped")}}, here / "trap.ckpt")
    (here / "small.png").write_bytes(image_bytes((8, 8)))
    (here / "empty").mkdir()
    return here


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def image_bytes(size: tuple[int, int]) -> bytes:
    held = io.BytesIO()
    Image.new("RGB", size).save(held, "PNG")
    return held.getvalue()


@pytest.mark.parametrize(
    ("args", "code", "hint"),
    [
        ([], "usage", "MODEL must be given"),
        (["nowhere", "x"], "not-found", "model must be a folder"),
        (["empty", "x"], "not-a-model", "model_index.json"),
        (["edges", "x"], "not-a-model", "one component (ControlNetModel)"),
        (["cut", "x"], "weights-corrupt", "truncated"),
        (["trap.ckpt", "x"], "weights-pickle", "nothing of it was run"),
        (["model"], "prompt", "prompt must be given"),
        (["pixels", "x"], "no-text", "takes no text"),
        (["classes"], "labels", "label must be given"),
        (["classes", "--label", "cat"], "labels", "a class number or name"),
        (["model", "x", "--guidance", "nan"], "guidance", "got nan"),
        (["model", "x", "--guidance", "5 + bogus"], "guidance", "Nearest"),
        (["pixels", "--guidance", "3"], "guidance", "guidance"),
        (["model", "x", "--lora", "ink.safetensors:nan"], "scale", "finite"),
        (["model", "x", "--lora", "other.safetensors"], "lora", "keys for layers"),
        (["model", "x", "--lora", "none.safetensors"], "lora-file", "none.safetensors"),
        (["model", "x", "--lora", "ink.safetensors:0"], "lora-nothing", "no change at all"),
        (["model", "x", "--control", "eighth,sketch.png"], "control-base", "1/8"),
        (["model", "x", "--control", "edges"], "usage", "NET,FILE,SCALE,A-B"),
        (["model", "x", "--control", "edges,sketch.png,1,0.8-0.2"], "scale", "start < end"),
        (["model", "x", "--image-prompt", "ip.safetensors,sketch.png"], "ip-encoder", "image_encoder"),
        (["model", "x", "--size", "17x16"], "size-multiple", "multiple of 2"),
        (["model", "x", "--size", "big"], "size", "768x512"),
        (["model", "x", "--image", "prompts.txt"], "image-file", "an image file"),
        (["model", "x", "--image", "none.png"], "file", "none.png"),
        (["model", "x", "--image", "sketch.png", "--mask", "small.png"], "mask-size", "16×16"),
        (["model", "x", "--mask", "mask.png"], "request", "mask must come with image"),
        (["model", "x", "--strength", "0.5"], "request", "strength must come with image"),
        (["model", "x", "--image", "sketch.png", "--strength", "1.5"], "request", "at most 1"),
        (["model", "b " * 5_000], "prompt-length", "Shorten it"),
        (["model", "@none.txt"], "file", "none.txt"),
        (["model", "x", "--option", "tau=1"], "", "option must be one that"),
        (["model", "x", "--sampler", "ddim", "--option", "bogus=1"], "", "bogus"),
        (["model", "x", "--sampler", "bogus"], "unknown-sampler", "Nearest"),
        (["model", "x", "--plan", "none.json"], "plan-file", "none.json"),
        (["model", "x", "--steps", "0"], "steps", "from 1"),
        (["model", "x", "--seed", "-1"], "seed", "whole number"),
        (["model", "x", "--seed", "1,2", "-n", "3"], "seed", "one seed, or 3"),
        (["model", "x", "-n", "0"], "usage", "-n must be at least 1"),
        (["model", "x", "--noise", "pink"], "noise", "philox"),
        (["model", "x", "--attention", "bogus"], "", "attention"),
        (["model", "x", "--offload", "bogus"], "policy", "component"),
        (["model", "x", "--dtype", "int8"], "dtype", "float32"),
        (["model", "x", "--device", "bogus"], "device", "torch"),
        (["model", "x", "--vae", "edges"], "component-kind", "vae"),
        (["model", "x", "--guidance", "4", "--unguarded"], "usage", "No such option: --unguarded"),
        (["model", "x", "--grid-of", "guidance=guarded 8,guarded 15"], "grid-value", "which are both 7 + rescale"),
        (["model", "x", "--keep-cells"], "usage", "--grid-of"),
        (["model", "x", "--grid-of", "stps=1,2"], "grid-axis", "Nearest: steps"),
        (["model", "x", "--grid-of", "lora=1,2"], "grid-axis", "--lora"),
        (["model", "x", "--grid-of", "steps=1,2", "-n", "2"], "usage", "one image per cell"),
        (["model", "x", "--grid-of", "guidance=3,x"], "guidance", "linear"),
        (["model", "x", "--out", "none/a.png"], "file", "a folder that exists"),
        (["model", "x", "--out", "a.jpg"], "file-type", ".png"),
        (["model", "x", "--out", "prompts.txt"], "file", "a folder"),
        (["model", "x", "--out", "/proc/a.png"], "file", "written to"),
        (["--from", "sketch.png", "model"], "no-recipe", "carry a recipe"),
        (["--from", "none.png"], "file", "none.png"),
    ],
)
def test_bad_input_is_one_line(refuse, broken, args, code, hint):
    before = set(broken.rglob("*.png"))
    line = refuse("sample", *args)
    assert line.startswith(f"error[{code}")
    assert hint in line
    assert set(broken.rglob("*.png")) == before
    assert not (broken / "trapped").exists()


def test_a_folder_that_cannot_be_written_is_found_before_the_work(refuse, here, monkeypatch):
    monkeypatch.setattr(Pipeline, "run", lambda *_: pytest.fail("it ran"))
    assert refuse("sample", "model", "x", "--out", "/proc/a.png").startswith("error[file]")


def test_every_request_is_validated_once_and_its_plan_is_compiled_once(ask, here, count_calls):
    for flags, requests in (([], 1), (["--seed", "1..3"], 3), (["--grid-of", "steps=1,2"], 2)):
        with count_calls(Request.__post_init__, compile_plan) as calls:
            answer = ask("sample", "model", "abc", "--steps", "1", *flags, "--out", f"made{requests}")
        assert answer.code == 0
        assert calls == {"__post_init__": requests, "compile_plan": requests}


def test_ctrl_c_is_one_line_and_130_and_what_was_written_stays(ask, here, monkeypatch):
    real, calls = Pipeline.run, []

    def run(self: Pipeline, request: Any, *more: Any) -> Any:
        calls.append(request)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, request, *more)

    monkeypatch.setattr(Pipeline, "run", run)
    answer = ask("sample", "pixels", "--steps", "1", "--seed", "1..3", "--out", "made")
    assert (answer.code, answer.out, answer.err) == (130, "", "cancelled: 1 file written\n")
    assert [path.name for path in (here / "made").iterdir()] == ["out-1.png"]


# --- words -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path", "scale"),
    [
        ("a.safetensors", "a.safetensors", None),
        ("a.safetensors:0.8", "a.safetensors", 0.8),
        ("a.safetensors:-1", "a.safetensors", -1.0),
        ("a:b.safetensors", "a:b.safetensors", None),
        ("a:b.safetensors:2", "a:b.safetensors", 2.0),
        ("a:2", "a:2", None),  # exists under this name
    ],
)
def test_a_lora_may_have_a_colon_in_its_path(text, path, scale, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:2").touch()
    assert words.lora(text) == AdapterFile(path, scale=scale)


@pytest.mark.parametrize(
    ("text", "net", "scale", "span"),
    [
        ("net,a.png", "net", None, None),
        ("net,a.png,0.5", "net", 0.5, None),
        ("net,a.png,0.5,0.1-0.9", "net", 0.5, (0.1, 0.9)),
        ("n,et,a.png,2", "n,et", 2.0, None),
        ("owner/name,a.png", "owner/name", None, None),
    ],
)
def test_a_control_is_read_from_its_end(text, net, scale, span, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(image_bytes((4, 4)))
    (tmp_path / "n,et").mkdir()
    found = words.with_image("--control", text, True)
    assert (found.path, found.scale, found.span) == (net, scale, span)
    assert found.image is not None
    assert found.image.size == (4, 4)


def test_a_prompt_may_begin_with_an_at_sign(tmp_path):
    assert words.prompts("@@home") == ["@home"]
    (tmp_path / "empty.txt").touch()
    with pytest.raises(PellucidError, match="at least one line"):
        words.prompts(f"@{tmp_path / 'empty.txt'}")
    with pytest.raises(PellucidError, match="a plain file"):
        words.prompts("@/dev/null")


def test_the_bar_counts_steps_and_says_the_stage():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    with Progress(console=console, auto_refresh=False) as progress:
        bar = sample_run.StepBar(progress, progress.add_task("load", total=None), unit="cell")
        bar.begin(2, 4)
        seen = []
        for _ in range(2):
            bar.run(2)
            for _ in range(2):
                seen.append(progress.tasks[0].description)
                bar(None)
            seen.append(progress.tasks[0].description)
            bar.done += 1
    assert seen == [f"cell {i}/2 · {stage}" for i in (1, 2) for stage in ("encode", "denoise", "decode")]
    assert progress.finished


# --- the page --------------------------------------------------------------------------------------------------


def commands() -> Iterator[str]:
    for block in re.findall(r"^```sh\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.S | re.M):
        yield from block.strip().splitlines()


def test_every_command_of_the_page_runs(tell, here):
    """In the order of the page: later commands read what earlier ones wrote."""
    for line in commands():
        program, *args = shlex.split(line)
        assert program == "pellucid"
        tell(*args)
    assert len(list(commands())) > 20
    assert {path.name for path in here.glob("*.png")} >= {"star.png", "sketched.png", "inked.png", "sheet.png"}
