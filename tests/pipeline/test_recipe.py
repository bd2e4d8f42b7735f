"""Recipes: exact through JSON and PNG, strict with what they do not know, safe with files from strangers."""

from __future__ import annotations

import io
import json
import math
import struct
import zlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

import pellucid
from pellucid.core.errors import PellucidError
from pellucid.core.plan import Plan
from pellucid.pipeline import recipe as recipes
from pellucid.pipeline.parameters import ForeignRecipe, tidy, understand
from pellucid.pipeline.recipe import Recipe, read_png, write_png

TEXT = st.text(st.characters(blacklist_categories=["Cs"]), max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
TABLE = st.dictionaries(TEXT, JSON, max_size=3)
PART = st.none() | st.floats(0, 1)
RECIPES = st.builds(
    Recipe,
    model=TEXT,
    model_hash=st.none() | TEXT,
    prompt=TEXT,
    negative_prompt=TEXT,
    weighting=st.booleans(),
    clip_skip=st.integers(0, 12),
    conditioning=TABLE,
    sampler=st.none() | st.sampled_from(pellucid.samplers.names()),
    grid=st.just({"name": "karras", "rho": 7.0}),
    steps=st.none() | st.integers(1, 1000),
    dialect=st.sampled_from(["exact", "diffusers", "k-diffusion", "comfyui"]),
    options=st.just({"eta": 0.5, "s_tmax": math.inf}),
    guidance=st.fixed_dictionaries({"scale": st.floats(0, 30), "rules": st.lists(TABLE, max_size=2)}),
    seed=st.integers(0, 2**64 - 1),
    size=st.none() | st.tuples(st.integers(1, 4096), st.integers(1, 4096)),
    strength=PART,
    denoising_start=PART,
    denoising_end=PART,
    adapters=st.lists(
        st.fixed_dictionaries(
            {"name": TEXT, "kind": st.sampled_from(["lora", "controlnet"]), "hash": st.none() | TEXT, "scale": PART}
        ),
        max_size=2,
    ),
    inputs=st.dictionaries(TEXT, TEXT, max_size=2),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
IMAGE = Image.fromarray(np.arange(8 * 6 * 3, dtype=np.uint8).reshape(6, 8, 3))
WHOLE = Recipe(
    model="scenes-128", prompt="a cat, ☀ (sun:1.2)", negative_prompt="rain", sampler="dpmpp_2m",
    grid={"name": "karras"}, steps=20, guidance={"scale": 7.5, "rules": []}, seed=42, size=(512, 768),
)  # fmt: skip


def saved(recipe: Recipe | None, **text: str) -> io.BytesIO:
    buffer = io.BytesIO()
    if text:
        info = PngImagePlugin.PngInfo()
        for key, value in text.items():
            info.add_itxt(key, value)
        IMAGE.save(buffer, "PNG", pnginfo=info)
    else:
        write_png(IMAGE, buffer, recipe)
    buffer.seek(0)
    return buffer


def chunks(data: bytes) -> list[tuple[str, bytes]]:
    """The chunks of a PNG, read without PIL."""
    found, at = [], 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        found.append((data[at + 4 : at + 8].decode(), data[at + 8 : at + 8 + length]))
        at += 12 + length
    return found


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def refusal(code: str, call: Any, *args: Any) -> str:
    with pytest.raises(PellucidError) as caught:
        call(*args)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- there and back --------------------------------------------------------------------------------------------


@given(RECIPES)
@example(
    Recipe(prompt="\0\x01 \u2028 \U0001f600 é", negative_prompt="\r\n", adapters=({"name": ":>", "kind": "lora"},))
)
def test_a_recipe_comes_back_exactly_from_json_and_from_a_image(recipe: Recipe) -> None:
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert Recipe.from_json(recipe.to_json(indent=1).encode()) == recipe
    assert read_png(saved(recipe)) == recipe


@given(RECIPES)
def test_every_recipe_has_an_a1111_text(recipe: Recipe) -> None:
    found = understand(recipe.parameters())
    assert found.fields["seed"] == recipe.seed
    if recipe.sampler and not any(line.startswith("Negative prompt:") for line in tidy(recipe.prompt).split("\n")):
        assert found.fields["sampler"] == recipe.sampler
        assert found.fields["negative_prompt"] == tidy(recipe.negative_prompt)


def test_the_json_holds_every_field_and_no_number_is_rounded() -> None:
    data = json.loads(replace(WHOLE, strength=0.1 + 0.2, seed=2**64 - 1).to_json())
    assert set(data) == {f.name for f in fields(Recipe)} | {"kind", "schema"}
    assert data["strength"] == 0.30000000000000004
    assert data["seed"] == 2**64 - 1
    assert data["pellucid"] == pellucid.__version__


def test_torchs_own_kind_of_version_becomes_plain_text() -> None:
    assert type(replace(WHOLE, torch=torch.__version__).torch) is str


def test_a_plan_given_as_a_table_comes_back_and_still_proves_itself() -> None:
    plan = pellucid.compile_plan("dpmpp_2m", steps=5, grid="karras")
    found = read_png(saved(replace(WHOLE, plan=plan.to_dict())))
    assert isinstance(found, Recipe)
    assert found.plan is not None
    assert Plan.from_dict(found.plan) == plan


def test_a_recipe_does_not_change_with_what_made_it() -> None:
    guidance = {"scale": 7.5, "rules": [{"name": "rescale"}]}
    recipe = replace(WHOLE, guidance=guidance)
    guidance["rules"].append({"name": "other"})  # type: ignore[attr-defined]
    assert recipe.guidance["rules"] == [{"name": "rescale"}]


# --- strictness ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "code", "word"),
    [
        ({"sampelr": "euler"}, "recipe-key", "sampelr"),
        ({"schema": 2}, "schema", "schema"),
        ({"schema": None}, "schema", "schema"),
        ({"kind": "pellucid-plan"}, "recipe-json", "pellucid-recipe"),
        ({"seed": -1}, "seed", "seed"),
        ({"seed": 1.5}, "seed", "seed"),
        ({"steps": 0}, "recipe-value", "steps"),
        ({"steps": True}, "recipe-value", "steps"),
        ({"size": [512]}, "size", "size"),
        ({"size": [10**6, 10**6]}, "image-pixels", "size"),
        ({"strength": 1.5}, "recipe-value", "strength"),
        ({"strength": math.nan}, "recipe-value", "strength"),
        ({"prompt": None}, "recipe-value", "prompt"),
        ({"prompt": "\ud800"}, "recipe-value", "prompt"),
        ({"weighting": 1}, "recipe-value", "weighting"),
        ({"guidance": 7.5}, "recipe-value", "guidance"),
        ({"guidance": {"scale": math.inf}}, "recipe-value", "guidance"),
        ({"guidance": {"scale": object()}}, "recipe-value", "guidance"),
        ({"guidance": {1: 2}}, "recipe-value", "guidance"),
        ({"dialect": "difusers"}, "unknown-dialect", "diffusers"),
        ({"adapters": [{"name": "a"}]}, "recipe-value", "adapters"),
        ({"adapters": [{"name": "a", "kind": "lora", "path": "x"}]}, "recipe-value", "adapters"),
        ({"adapters": {}}, "recipe-value", "adapters"),
        ({"inputs": {"image": 3}}, "recipe-value", "inputs"),
        ({"plan": {"rows": []}}, "recipe-value", "plan"),
    ],
)
def test_a_field_that_is_unknown_or_wrong_is_named(change: dict[str, Any], code: str, word: str) -> None:
    assert word in refusal(code, Recipe.from_dict, {**WHOLE.to_dict(), **change})


def test_an_unknown_field_gets_the_nearest_known_one() -> None:
    assert "negative_prompt" in refusal("recipe-key", Recipe.from_dict, {**WHOLE.to_dict(), "negative_promt": ""})


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, '{"kind": "pellucid-recipe"', b"\xff\xfe"])
def test_what_is_no_recipe_is_refused_in_a_line(text: str | bytes) -> None:
    refusal("recipe-json", Recipe.from_json, text)


def test_deep_and_large_recipes_are_refused_before_they_are_written() -> None:
    deep: Any = 0
    for _ in range(100):
        deep = [deep]
    refusal("recipe-value", lambda: Recipe(guidance={"a": deep}))
    refusal("recipe-size", lambda: Recipe(prompt="x" * recipes.MAX_TEXT))
    refusal("recipe-size", Recipe.from_json, " " * (recipes.MAX_TEXT + 1))


# --- PNG -------------------------------------------------------------------------------------------------------


def test_a_image_carries_both_texts_before_its_pixels_and_keeps_them() -> None:
    data = saved(WHOLE).getvalue()
    found = chunks(data)
    kinds = [kind for kind, _ in found]
    texts = {body.split(b"\0")[0]: (kind, body) for kind, body in found if kind in ("tEXt", "iTXt")}
    assert kinds.index("IDAT") > max(i for i, kind in enumerate(kinds) if kind == "iTXt")
    assert texts[b"pellucid"][0] == "iTXt"
    assert json.loads(texts[b"pellucid"][1].split(b"\0", 5)[5]) == WHOLE.to_dict()
    with Image.open(io.BytesIO(data)) as image:
        assert image.text["parameters"] == WHOLE.parameters()
        assert np.array_equal(np.asarray(image), np.asarray(IMAGE))
    assert WHOLE.parameters().startswith(
        "a cat, ☀ (sun:1.2)\nNegative prompt: rain\nSteps: 20, Sampler: DPM++ 2M, Schedule type: Karras, "
        "CFG scale: 7.5, Seed: 42, Size: 512x768, Model: scenes-128"
    )


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "picture.png"
    write_png(IMAGE, path, WHOLE)
    before = path.read_bytes()
    assert before == saved(WHOLE).getvalue()
    with path.open("rb") as reader:  # who reads the old file while a new one comes reads it to its end
        write_png(IMAGE, path, replace(WHOLE, seed=7))
        assert reader.read() == before
    write_png(IMAGE, path, WHOLE)

    def break_off(half: Path, data: bytes) -> None:
        with half.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", break_off)
    assert "No space left" in refusal("file", write_png, IMAGE, path, replace(WHOLE, seed=7))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["picture.png"]


@pytest.mark.parametrize("goal", ["no/such/folder.png", "a\0b.png", "x" * 300 + ".png"])
def test_a_goal_that_cannot_be_written_is_refused(tmp_path: Path, goal: str) -> None:
    refusal("file", write_png, IMAGE, f"{tmp_path}/{goal}", WHOLE)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_broke_off_leaves_nothing_in_the_next(tmp_path: Path) -> None:
    image = IMAGE.copy()
    with pytest.raises(OSError, match="No such file"):
        image.save(tmp_path / "no" / "folder.png", pnginfo=PngImagePlugin.PngInfo())
    write_png(image, tmp_path / "picture.png", WHOLE)
    assert read_png(tmp_path / "picture.png") == WHOLE


def test_a_image_that_png_cannot_hold_is_refused(tmp_path: Path) -> None:
    refusal("file", write_png, Image.new("CMYK", (2, 2)), tmp_path / "picture.png", WHOLE)
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_written_through(tmp_path: Path) -> None:
    write_png(IMAGE, tmp_path / "real.png", WHOLE)
    (tmp_path / "link.png").symlink_to(tmp_path / "real.png")
    write_png(IMAGE, tmp_path / "link.png", replace(WHOLE, seed=7))
    assert (tmp_path / "link.png").is_symlink()
    assert read_png(tmp_path / "real.png") == replace(WHOLE, seed=7)


# --- images of others ----------------------------------------------------------------------------------------

A1111 = "ein Käse ☀\nNegative prompt: b\nSteps: 20, Sampler: Euler a, CFG scale: 7, Seed: 5, Size: 8x8, RNG: CPU"


def check_foreign(found: Recipe | ForeignRecipe) -> None:
    assert isinstance(found, ForeignRecipe)
    assert found.source == "a1111"
    assert found.text == A1111
    assert found.fields["prompt"] == "ein Käse ☀"
    assert (found.fields["sampler"], found.fields["steps"], found.fields["seed"]) == ("euler_a", 20, 5)
    assert found.unread == {"RNG": "CPU"}
    assert Recipe(**found.fields).guidance == {"scale": 7.0}


def test_an_a1111_image_is_understood_and_makes_a_recipe() -> None:
    check_foreign(read_png(saved(None, parameters=A1111)))


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
@pytest.mark.parametrize(
    "comment",
    [
        b"UNICODE\0" + A1111.encode("utf-16-be"),
        b"UNICODE\0" + A1111.encode("utf-16-le"),
        b"UNICODE\0" + A1111.encode("utf-16"),
        b"ASCII\0\0\0" + A1111.encode(),
        bytes(8) + A1111.encode(),
    ],
)
def test_the_user_comment_of_other_files_is_read(kind: str, comment: bytes) -> None:
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9286] = comment
    buffer = io.BytesIO()
    IMAGE.save(buffer, kind, exif=exif)
    buffer.seek(0)
    check_foreign(read_png(buffer))


def test_our_text_wins_and_a_broken_one_is_not_passed_over() -> None:
    assert read_png(saved(None, parameters=A1111, pellucid=WHOLE.to_json())) == WHOLE
    refusal("recipe-json", read_png, saved(None, parameters=A1111, pellucid="{"))


def test_text_behind_the_pixels_is_found() -> None:
    data = saved(None).getvalue()
    late = data[:-12] + chunk(b"tEXt", b"parameters\0a cat\nSteps: 5, Seed: 1") + data[-12:]
    found = read_png(io.BytesIO(late))
    assert isinstance(found, ForeignRecipe)
    assert found.fields["steps"] == 5


def test_a_image_without_a_recipe_is_refused(tmp_path: Path) -> None:
    refusal("no-recipe", read_png, saved(None))
    assert "ComfyUI" in refusal("no-recipe", read_png, saved(None, workflow="{}"))
    buffer = io.BytesIO()
    IMAGE.save(buffer, "JPEG")
    buffer.seek(0)
    refusal("no-recipe", read_png, buffer)
    refusal("file", read_png, tmp_path / "none.png")
    (tmp_path / "words.png").write_text("words")
    refusal("image-file", read_png, tmp_path / "words.png")


@pytest.mark.parametrize("key", ["pellucid", "parameters"])
def test_endless_texts_are_refused(key: str) -> None:
    refusal("text-size", read_png, saved(None, **{key: "x" * (recipes.MAX_TEXT + 1)}))
    bomb = zlib.compress(b"x" * 50_000_000, 9)
    data = saved(None).getvalue()
    packed = data[:33] + chunk(b"zTXt", key.encode() + b"\0\0" + bomb) + data[33:]
    refusal("image-file", read_png, io.BytesIO(packed))
