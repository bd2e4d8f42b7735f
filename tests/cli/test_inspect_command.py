"""`pellucid inspect`: the graph as text, as JSON and as an image."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_graphs
import tiny_models as tiny
from rich.console import Console
from tiny_graphs import FAMILIES, plain

from pellucid.cli import inspect
from pellucid.pipeline.inspection import Graph

PAGE = Path(__file__).parents[2] / "docs" / "inspect.md"


@pytest.fixture(scope="module")
def extras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return tiny_graphs.extras(tmp_path_factory.mktemp("extras"))


@pytest.fixture
def graph(request: pytest.FixtureRequest, extras: dict[str, str]) -> Graph:
    return tiny_graphs.of(request.param, extras)


def folder(name: str = "sd1") -> str:
    return str(tiny.saved(name)[1])


# --- text --------------------------------------------------------------------------------------------------------


def test_the_text_shows_the_way_from_prompt_to_images(tell: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = tell("inspect", folder(), "--steps", "5").out
    said = [
        "StableDiffusionPipeline · 128 × 128 pixels", "╭─ prompt", "╭─ tokenizer", "text_encoder: token ids (1, 16)",
        "╭─ text_encoder", "CLIPTextEncoder · CLIPTextModel", "conditions: states (1, 16, 64)", "╭─ conditions",
        "unet: context (2, 16, 64)", "× 6 calls in 5 steps", "╭─ unet", "1.1 M parameters",
        "guidance: eps (2, 4, 64, 64)", "scale 7 + rescale", "sampler: x0 (1, 4, 64, 64)", "╭─ noise",
        "plms · PNDMScheduler", "scaled_linear schedule", "unet: x (2, 4, 64, 64)", "vae: latents (1, 4, 64, 64)",
        "back to unet", "╭─ vae", "images: pixels (1, 3, 128, 128)", "╭─ images",
    ]  # fmt: skip
    places = [out.find(word) for word in said]
    assert -1 not in places
    assert places == sorted(places)
    assert "up_blocks.1" in out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 100


@pytest.mark.parametrize("graph", FAMILIES, indirect=True)
def test_every_line_of_the_drawing_has_its_width_and_every_box_is_whole(graph: Graph):
    screen = Console(width=120, highlight=False)
    with screen.capture() as held:
        screen.print(inspect.rows_of_cards(graph), width=inspect.WIDTH)
    text = held.get()
    assert {len(line) for line in text.splitlines()} == {inspect.WIDTH}
    for left, right in ("╭╮", "╰╯", "┏┓", "┗┛"):
        assert text.count(right) == text.count(left) > 0
    for node in graph.nodes:
        assert f"╭─ {node.name} ─" in text


def test_one_component_in_detail(tell: Callable[..., Any]):
    out = tell("inspect", folder(), "--component", "unet").words
    assert "← conditions: context (2, 16, 64) float32" in out
    assert "→ guidance: eps (2, 4, 64, 64) float32" in out
    assert "attentions.0 … 1 SpatialTransformer 2 ×" in out
    assert "text_encoder" not in out


# --- JSON --------------------------------------------------------------------------------------------------------


def test_json_is_the_graph(tell: Callable[..., Any]):
    found = tell("inspect", folder("xl"), "--json", "--steps", "5").json
    held = plain("xl")
    assert found["parameters"] == held.parameters
    assert found["size"] == [256, 256]
    flows = {(f["source"], f["goal"], f["what"]): f["shapes"] for f in found["flows"]}
    assert flows["conditions", "unet", "pooled"] == [[2, 64]]
    unet = next(node for node in found["nodes"] if node["name"] == "unet")
    assert unet["stored"]["dtypes"] == ["float32"]
    assert sum(block["parameters"] for block in unet["blocks"]) == unet["parameters"]


def test_json_of_one_component(tell: Callable[..., Any]):
    found = tell("inspect", folder("dit"), "--component", "transformer", "--json", "--depth", "1", "--batch", "3").json
    assert found["name"] == "transformer"
    assert {
        "source": "conditions",
        "goal": "transformer",
        "what": "labels",
        "shapes": [[6]],
        "dtype": "int64",
    } in found["flows"]
    assert not found["blocks"][0]["blocks"]


def test_the_questions_change_the_shapes(tell: Callable[..., Any]):
    args = ("--size", "64x96", "--batch", "2", "--steps", "7", "--guidance", "off", "--json")
    found = tell("inspect", folder(), *args).json
    assert (found["size"], found["batch"], found["steps"]) == ([64, 96], 2, 7)
    flows = {(f["source"], f["goal"], f["what"]): f["shapes"] for f in found["flows"]}
    assert flows["sampler", "vae", "latents"] == [[2, 4, 48, 32]]
    assert flows["sampler", "unet", "x"] == [[2, 4, 48, 32]]


def test_controlnet_and_image_prompt_by_words(tell: Callable[..., Any], extras: dict[str, str]):
    args = ("--controlnet", extras["control"], "--ip-adapter", extras["ip"], "--image-encoder", extras["eyes"])
    found = tell("inspect", folder(), *args, "--json").json
    names = [node["name"] for node in found["nodes"] if node["parameters"]]
    assert names == ["text_encoder", "image_encoder", "ip_adapter", "controlnet", "unet", "vae"]


# --- images ----------------------------------------------------------------------------------------------------


def test_a_image_and_the_text_beside_it(
    ask: Callable[..., Any], tell: Callable[..., Any], see: Callable[..., Any], tmp_path: Path
):
    assert tell("inspect", folder(), "--plot", "sd.png").words.endswith("wrote sd.png")
    see(tmp_path / "sd.png", 2000, 50)
    answer = ask("inspect", folder("ddpm"), "--plot", "ddpm.svg", "--json")
    assert (answer.json["kind"], answer.err) == ("pellucid-graph", "wrote ddpm.svg\n")
    assert (tmp_path / "ddpm.svg").read_text().startswith("<?xml")


def test_a_page_and_text_for_mermaid(tell: Callable[..., Any], tmp_path: Path):
    tell("inspect", folder(), "--plot", "sd.html")
    page = (tmp_path / "sd.html").read_text()
    assert "text_encoder: token ids (1, 16)" in page
    assert "up_blocks.1" in page
    assert not re.search(r"(src|href)=", page)  # it needs no network
    tell("inspect", folder(), "--plot", "sd.mmd")
    lines = (tmp_path / "sd.mmd").read_text().splitlines()
    assert lines[0] == "flowchart TD"
    assert '  unet -->|"eps (2, 4, 64, 64)"| guidance' in lines


# --- time --------------------------------------------------------------------------------------------------------


def test_time_by_stage(tell: Callable[..., Any]):
    args = ("--time", "--device", "cpu", "--steps", "3")
    text = tell("inspect", folder("ddpm"), *args).words
    assert re.search(r"3 × one step of [\d.]+ ms", text)
    assert "the whole run on cpu, measured" in text
    found = tell("inspect", folder("dit"), *args, "--component", "vae", "--json").json
    assert found["milliseconds"] > 0


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "start"),
    [
        (["missing"], "error[not-found]: model must be a folder, a file, a bundle's name or a hub id"),
        (["."], "error[not-a-model]: model folder must hold model_index.json"),
        (["SD1", "--component", "unit"], "error[component]: component must be one of text_encoder, unet, vae"),
        (["SD1", "--size", "33"], "error[size-multiple]: "),
        (["SD1", "--size", "big"], "error[size]: "),
        (["SD1", "--depth", "9"], "error[usage]: --depth must be from 0 to 8"),
        (["SD1", "--device", "cpu"], "error[usage]: --device must be given with --time"),
        (["SD1", "--plot", "a.gif"], "error[file-type]: "),
        (["SD1", "--plot", "a.png", "--component", "vae"], "error[usage]: --plot must be given without --component"),
        (["SD1", "--controlnet", "."], "error[not-a-component]: "),
        (["SD1", "--ip-adapter", "missing.safetensors"], "error[weights-file]: "),
        (["SD1", "--dtype", "int3"], "error[dtype]: "),
        ([], "error[usage]: "),
    ],
)
def test_bad_input_is_one_line(refuse: Callable[..., str], args: list[str], start: str):
    assert refuse("inspect", *[folder() if arg == "SD1" else arg for arg in args]).startswith(start)


def test_a_truncated_file_is_one_line(refuse: Callable[..., str], tmp_path: Path):
    spoilt = tiny.copied("sd1", tmp_path)
    path = spoilt / "unet" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert refuse("inspect", str(spoilt)).startswith("error[weights-corrupt]: ")


# --- the page ----------------------------------------------------------------------------------------------------


def commands() -> list[str]:
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def test_the_page_has_commands():
    assert len(commands()) >= 5


@pytest.mark.parametrize("line", commands())
def test_every_command_of_the_page_runs(line: str, tell: Callable[..., Any], extras: dict[str, str]):
    places = {
        "./sd15": folder(),
        "./canny": extras["control"],
        "./ip.safetensors": extras["ip"],
        "./eyes": extras["eyes"],
    }
    program, *args = line.split()
    assert program == "pellucid"
    tell(*[places.get(arg, {"768x512": "64x32"}.get(arg, arg)) for arg in args])
