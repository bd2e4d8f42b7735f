"""`pellucid inspect`: the graph as text, as JSON and as a picture in which no text meets another."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny

from pellucid.cli import draw, draw_inspect, inspect_text
from pellucid.cli import inspect_words as words
from pellucid.pipeline.inspection import Asked, Block, Graph, Times
from pellucid.pipeline.inspection_graph import inspect

PAGE = Path(__file__).parents[2] / "docs" / "inspect.md"
TIMES = Times("cuda", 11.2, 3.0, 44.1, 120.0, 1530.0, 3)
LONG = "a note that is long enough to be broken into several lines wherever the picture is narrow, as it may well be"
FAMILIES = ("sd1", "xl", "dit", "ddpm", "inpaint", "lcm", "everything")


@pytest.fixture(scope="module")
def extras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A ControlNet, an image encoder and an IP-Adapter for the tiny model, as the words of the command line."""
    control, eyes, ip = tiny.extras(tmp_path_factory.mktemp("extras"))
    return {"control": str(control), "eyes": str(eyes), "ip": str(ip)}


@cache
def plain(name: str) -> Graph:
    return inspect(tiny.saved(name)[1], Asked(steps=5))


@pytest.fixture
def graph(request: pytest.FixtureRequest, extras: dict[str, str]) -> Graph:
    if request.param != "everything":
        return plain(request.param)
    asked = Asked(controlnets=(extras["control"],) * 2, ip_adapters=(extras["ip"],), batch=4, size=(128, 160))
    return inspect(tiny.saved("sd1")[1], asked, image_encoder=extras["eyes"])


def folder(name: str = "sd1") -> str:
    return str(tiny.saved(name)[1])


# --- text --------------------------------------------------------------------------------------------------------


def test_the_text_shows_the_way_from_prompt_to_images(tell: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = tell("inspect", folder(), "--steps", "5").out
    said = [
        "StableDiffusionPipeline · 128 × 128 pixels", "( prompt )", "╭─ tokenizer", "token ids (1, 16)",
        "╭─ text_encoder", "CLIPTextEncoder · CLIPTextModel", "states (1, 16, 64)", "╭─ conditions",
        "context (2, 16, 64)", "× 6 calls in 5 steps", "╭─ unet", "1.1 M parameters", "eps (2, 4, 64, 64)",
        "scale 7 + rescale", "x0 (1, 4, 64, 64)", "plms · PNDMScheduler", "scaled_linear schedule", "◂ noise",
        "latents (1, 4, 64, 64)", "╭─ vae", "pixels (1, 3, 128, 128)", "( images )",
    ]  # fmt: skip
    places = [out.find(word) for word in said]
    assert -1 not in places
    assert places == sorted(places)
    assert "│ x (2, 4, 64, 64)" in out
    assert "up_blocks.1" in out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 100


@pytest.mark.parametrize("graph", FAMILIES, indirect=True)
def test_every_line_of_the_drawing_has_its_width_and_every_box_is_whole(graph: Graph):
    lines = [line.plain for line in inspect_text.drawing(graph)]
    assert max(len(line) for line in lines) <= inspect_text.WIDTH
    text = "\n".join(lines)
    for left, right in ("╭╮", "╰╯", "┏┓", "┗┛"):
        rails = 1 if left in "╭╰" else 0  # the rail of the loop turns once at either end
        assert text.count(right) == text.count(left) + rails
    for node in graph.nodes:
        assert node.name in text


def test_names_of_blocks_stand_once_for_equal_neighbours():
    blocks = [*(Block(f"layers.{n}", "Layer", 10, 0.1, (1, 2)) for n in range(9)), Block("out", "Linear", 10, 0.1)]
    found = list(inspect_text.listed(blocks))
    assert [(block.name, times) for _, block, times in found] == [("layers.0 … 8", 9), ("out", 1)]


def test_one_component_in_detail(tell: Callable[..., Any]):
    out = tell("inspect", folder(), "--component", "unet").words
    assert "← conditions: context (2, 16, 64) float32" in out
    assert "→ guidance: eps (2, 4, 64, 64) float32" in out
    assert "attentions.0 … 1 SpatialTransformer 2 ×" in out
    assert "text_encoder" not in out


@pytest.mark.parametrize(
    ("value", "text"),
    [(859_520_964, "859.5 M"), (2_567_463_684, "2.57 B"), (999_999_999, "1.00 B"), (1536, "1.5 K"), (640, "640")],
)
def test_counts(value: int, text: str):
    assert words.count(value) == text


@pytest.mark.parametrize(("value", "text"), [(1_719_041_928, "1.72 GB"), (246_120_960, "246 MB"), (80, "80 B")])
def test_sizes(value: int, text: str):
    assert words.size(value) == text


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


# --- pictures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("graph", "timed"), [(name, True) for name in FAMILIES] + [("sd1", False)], indirect=["graph"])
def test_no_text_of_the_picture_meets_another(graph: Graph, timed: bool, tmp_path: Path):
    draw.destination(tmp_path / "any.png")
    if timed:
        each = dict.fromkeys([node.name for node in graph.components()], 12.3)
        graph = replace(graph.timed(TIMES, each), notes=(LONG, LONG))
    figure = draw_inspect.figure_of(graph)
    renderer = figure.canvas.get_renderer()
    texts = [text for text in figure.axes[0].texts if text.get_text().strip()]
    # a text's box has the height of its tallest possible letter: a tenth of it at either end is air
    boxes = [text.get_window_extent(renderer).shrunk(0.98, 0.8) for text in texts]
    for (one, box), (other, second) in combinations(zip(texts, boxes, strict=True), 2):
        assert not box.overlaps(second), f"{one.get_text()!r} meets {other.get_text()!r}"
    for text, box in zip(texts, boxes, strict=True):
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, text.get_text()
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, text.get_text()
    said = " ".join(text.get_text() for text in texts)
    assert all(node.name in said for node in graph.nodes)
    assert words.pace(graph) in said


@pytest.mark.parametrize("graph", FAMILIES, indirect=True)
def test_no_card_meets_another(graph: Graph, tmp_path: Path):
    draw.destination(tmp_path / "any.png")
    plan = draw_inspect.Layout(graph)
    plan.arrange()
    for one, other in combinations(plan.places.values(), 2):
        apart = one.right < other.left or other.right < one.left or one.top < other.bottom or other.top < one.bottom
        assert apart, f"{one.card.lines[0].text} meets {other.card.lines[0].text}"


def test_a_picture_and_the_text_beside_it(tell: Callable[..., Any], see: Callable[..., Any], tmp_path: Path):
    assert tell("inspect", folder(), "--plot", "sd.png").words.endswith("wrote sd.png")
    see(tmp_path / "sd.png", 2000, 50)
    assert tell("inspect", folder("ddpm"), "--plot", "ddpm.svg", "--json").json["kind"] == "pellucid-graph"
    assert (tmp_path / "ddpm.svg").read_text().startswith("<?xml")


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
