"""Pipelines as people call them: signature, repr, images that carry their recipe, diffusers' words."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from PIL import Image

import pellucid
from pellucid import Lora, PellucidError, Pipeline, Request
from pellucid.core.compile import compile_plan
from pellucid.pipeline import peer_words
from pellucid.pipeline.decode import decode
from pellucid.pipeline.prepare import denoise
from pellucid.pipeline.recipe import read_png

ASKED: dict[str, Any] = {"steps": 2, "seed": 7, "guidance": 3, "width": 16, "height": 16}


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = tmp_path_factory.mktemp("calling")
    tiny.stable_diffusion(folder).save_pretrained(folder / "model")
    return pellucid.load(folder / "model", device="cpu")


def test_a_call_has_the_fields_of_a_request_as_its_signature(pipe: Pipeline) -> None:
    found = inspect.signature(pipe)
    assert list(found.parameters) == [f.name for f in fields(Request)]
    assert found.parameters["steps"].annotation == "int | None"
    assert found.parameters["steps"].kind is inspect.Parameter.KEYWORD_ONLY
    assert found.parameters["prompt"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    found.bind("a red star", steps=20, seed=7)


def test_a_request_is_validated_once_and_its_plan_is_compiled_once(pipe: Pipeline, count_calls: Any) -> None:
    for changes in ({}, {"sampler": "euler"}, {"sampler": "euler", "dialect": "diffusers", "guidance": "5 + apg"}):
        with count_calls(Request.__post_init__, compile_plan) as calls:
            pipe("abc", **{**ASKED, **changes}, observers=[lambda seen: None])
        assert calls == {"__post_init__": 1, "compile_plan": 1}


def test_a_prepared_request_waits_and_runs_as_it_would_have(pipe: Pipeline) -> None:
    request = Request("abc", **ASKED)
    prepared = [pipe.prepare(request), pipe.prepare(replace(request, seed=8))]
    assert [held.start.shape for held in prepared] == [(1, 4, 8, 8)] * 2
    later = [decode(denoise(held)) for held in reversed(prepared)][::-1]
    own = [pipe("abc", **ASKED), pipe("abc", **{**ASKED, "seed": 8})]
    for waited, run in zip(later, own, strict=True):
        assert torch.equal(waited.latents, run.latents)
        assert waited.recipes == run.recipes
        assert [stage.name for stage in waited.stages] == ["text", "encode", "denoise", "decode"]
    assert torch.equal(denoise(prepared[0]).x, own[0].latents)  # and again: nothing of it was used up


def test_everything_but_the_prompt_is_given_by_name(pipe: Pipeline) -> None:
    with pytest.raises(PellucidError, match="every other option by its name"):
        pipe("abc", "bad")
    with pytest.raises(PellucidError, match="prompt must be given once"):
        pipe("abc", prompt="abc")


def test_a_repr_is_some_ten_lines(pipe: Pipeline) -> None:
    lines = repr(pipe).splitlines()
    assert 6 <= len(lines) <= 10
    assert max(map(len, lines)) <= 120
    text = repr(pipe)
    for word in (
        "UNet",
        "AutoencoderKL",
        "M parameters",
        "predicts eps",
        "guidance 7 + rescale",
        "128×128 pixels",
        "cpu",
    ):
        assert word in text, text


# --- saving ------------------------------------------------------------------------------------------------------


def test_a_result_saves_images_with_their_recipes(pipe: Pipeline, tmp_path: Path) -> None:
    one = pipe("abc", **ASKED)
    assert one.save(tmp_path / "star.png") == [tmp_path / "star.png"]
    assert read_png(tmp_path / "star.png") == one.recipe
    with pytest.raises(PellucidError, match="pass overwrite=True") as caught:
        one.save(tmp_path / "star.png")
    assert caught.value.code == "file-exists"
    one.save(tmp_path / "star.png", overwrite=True)
    several = pipe(["abc", "def"], **{**ASKED, "seed": [5, 5]}).save(tmp_path / "two.png")
    assert [path.name for path in several] == ["two-5.png", "two-5-2.png"]
    assert [read_png(path).prompt for path in several] == ["abc", "def"]


def test_what_cannot_be_saved_is_refused(pipe: Pipeline, tmp_path: Path) -> None:
    made = pipe("abc", **ASKED)
    with pytest.raises(PellucidError, match=r"ends in \.png"):
        made.save(tmp_path / "star.jpg")
    with pytest.raises(PellucidError, match="latents alone"):
        pipe("abc", decode=False, **ASKED).save(tmp_path / "latents.png")
    assert list(tmp_path.iterdir()) == []


def test_an_image_carries_its_recipe_when_pillow_saves_it(pipe: Pipeline, tmp_path: Path) -> None:
    made = pipe("abc", **ASKED)
    image = made.images[0]
    image.save(tmp_path / "a.png")
    with (tmp_path / "b.png").open("wb") as file:
        image.save(file)
    image.save(tmp_path / "c", format="png")
    for name in "a.png", "b.png", "c":
        assert read_png(tmp_path / name) == made.recipe
    image.save(tmp_path / "d.jpg")
    with Image.open(tmp_path / "d.jpg") as plain:
        assert plain.size == image.size


def test_a_changed_image_is_no_longer_that_of_the_recipe(pipe: Pipeline, tmp_path: Path) -> None:
    image = pipe("abc", **ASKED).images[0]
    image.resize((8, 8)).save(tmp_path / "small.png")
    with pytest.raises(PellucidError, match="must carry a recipe"):
        read_png(tmp_path / "small.png")
    assert pickle.loads(pickle.dumps(image)).tobytes() == copy.copy(image).tobytes() == image.tobytes()


# --- LoRAs by name -----------------------------------------------------------------------------------------------


def test_a_lora_may_be_named_alone() -> None:
    request = Request("x", loras=["scenes-128/lora", Lora("b", 0.5)])
    assert [(one.source, one.scale) for one in request.loras] == [("scenes-128/lora", 1.0), ("b", 0.5)]
    with pytest.raises(PellucidError, match="loras must be a list of Lora"):
        Request("x", loras=[3])


# --- diffusers' words --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", peer_words.CALL)
def test_an_argument_of_diffusers_is_refused_with_ours(pipe: Pipeline, word: str) -> None:
    with pytest.raises(PellucidError) as caught:
        pipe("abc", **{word: 1})
    assert str(caught.value) == f"unknown option {word}; use {peer_words.CALL[word]}."


def test_the_names_that_are_offered_exist() -> None:
    known = {f.name for f in fields(Request)}
    firsts = {words.split(",")[0].split(":")[0].split(" ")[0] for words in peer_words.CALL.values()}
    assert firsts - known == {"the"}  # "the scale of …", "the result …"
    loads = {words.split(",")[0] for words in peer_words.LOAD.values() if " " not in words.split(",")[0]}
    assert loads <= set(inspect.signature(pellucid.load).parameters)


@pytest.mark.parametrize("word", peer_words.LOAD)
def test_an_argument_of_from_pretrained_is_refused_with_ours(word: str) -> None:
    with pytest.raises(PellucidError, match=f"unknown option {word}; use "):
        pellucid.load("scenes-128", **{word: None})


@pytest.mark.parametrize("word", peer_words.PIPELINE)
def test_an_attribute_of_diffusers_is_refused_with_ours(pipe: Pipeline, word: str) -> None:
    with pytest.raises(AttributeError, match=f"a pipeline has no {word}; use "):
        getattr(pipe, word)(1)
    with pytest.raises(AttributeError, match=f"a pipeline has no {word}; use "):
        setattr(pipe, word, 1)


def test_other_attributes_are_as_ever(pipe: Pipeline) -> None:
    assert not hasattr(pipe, "scheduler")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = pipe.nonsense
    pipe.mine = 3
    assert pipe.mine == 3
    with pytest.raises(PellucidError, match=r"unknown option setps; got 3. Nearest: steps"):
        pipe("abc", setps=3)


@pytest.mark.parametrize("name", ["DiffusionPipeline", "StableDiffusionXLPipeline", "AutoPipelineForText2Image"])
def test_the_module_points_to_load(name: str) -> None:
    with pytest.raises(AttributeError, match=r"use pellucid.load\(…\)"):
        getattr(pellucid, name)


def test_an_image_of_another_size_is_not_that_of_the_recipe(pipe: Pipeline, tmp_path: Path) -> None:
    image = pipe("abc", **ASKED).images[0]
    image.thumbnail((8, 8))  # in place
    image.save(tmp_path / "small.png")
    with pytest.raises(PellucidError, match="must carry a recipe"):
        read_png(tmp_path / "small.png")
