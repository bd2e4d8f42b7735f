"""A trace run again: bit by bit the same from seeds, from kept tensors, with its model; and where it is not, why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_scenes import write_model
from trace_runs import SEEDS, SHAPE, denoiser, plan_of, record

import pellucid
from pellucid import Brownian, Job, Lora, PellucidError, Philox, TorchStream, run, run_batch
from pellucid.core.samplers import REGISTRY
from pellucid.evidence import trace
from pellucid.evidence.trace import Recorder, Trace
from pellucid.evidence.trace.diff import header_diff
from pellucid.evidence.trace.replay import replay, replay_with, request_of, rerun
from pellucid.evidence.trace.timeline import timeline
from pellucid.pipeline.pipeline import Pipeline

TOY = pellucid.denoiser(lambda x, time: x * 0.4 / (1.0 + x * x), "scaled_linear", "eps")
STOCHASTIC = [name for name in REGISTRY if plan_of(name, 4).stochastic]


def code_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(PellucidError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return error.value.code


# --- a bare denoiser -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["dpmpp_2m", "heun", "pndm", *STOCHASTIC[::4]])
def test_a_run_by_seed_is_the_same_again(tmp_path: Path, sampler: str) -> None:
    found = replay(record(tmp_path / "run", plan_of(sampler, 4), denoiser(), tensors=False), denoiser())
    assert (found.same, found.way, found.comparison.steps) == (True, "denoiser", plan_of(sampler, 4).nfe)


@pytest.mark.parametrize("source", [Philox, Brownian, TorchStream])
@pytest.mark.parametrize("given", [False, True], ids=["drawn", "given"])
def test_every_noise_and_a_first_x_of_ones_own(tmp_path: Path, source: Any, given: bool) -> None:
    """A stream of torch's has moved on where it drew the first x, and has not where x was given."""
    plan = plan_of("euler_a", 4)
    x = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(1)) if given else None
    how = {"shape": None if given else SHAPE, "noise": source(SEEDS)}
    with Recorder(tmp_path / "run", True) as recorder:
        run(plan, TOY, x, observers=[recorder], **how)
    held = trace.read(tmp_path / "run")
    assert replay(held, TOY).same
    assert replay(held).same


def test_an_x_that_was_given_and_not_kept_is_asked_for(tmp_path: Path) -> None:
    x = torch.ones(2, *SHAPE)
    with Recorder(tmp_path / "run") as recorder:
        run(plan_of(), TOY, x, observers=[recorder])
    held = trace.read(tmp_path / "run")
    assert code_of(replay, held, TOY) == "trace-start"
    assert replay(held, TOY, x=x).same


def test_a_mixed_batch(tmp_path: Path) -> None:
    jobs = [Job(plan_of(name, 3 + i % 3), seed=i) for i, name in enumerate(["heun", "euler_a", "dpmpp_2m", "unipc"])]
    with Recorder(tmp_path / "run", True) as recorder:
        run_batch(jobs, TOY, shape=SHAPE, observers=[recorder])
    held = trace.read(tmp_path / "run")
    assert replay(held, TOY).same
    assert replay(held).same


def test_predictions_stand_for_the_network(tmp_path: Path) -> None:
    held = record(tmp_path / "run", plan_of("euler_a"), denoiser())
    found = replay(held)
    assert (found.same, found.way) == (True, "predictions")
    few = record(tmp_path / "few", plan_of("euler_a"), denoiser(), every=2)
    assert code_of(replay, few) == "trace-tensor"
    none = record(tmp_path / "none", plan_of("euler_a"), denoiser(), tensors=False)
    assert code_of(replay, none) == "trace-tensor"
    guided = next(name for name in REGISTRY if plan_of(name, 3).guided)
    assert code_of(replay, record(tmp_path / "guided", plan_of(guided, 3), denoiser())) == "trace-model"


def test_a_replay_that_differs_says_where(tmp_path: Path) -> None:
    held = record(tmp_path / "run", plan_of(), denoiser())
    found = replay(held, denoiser(shift=0.1))
    assert not found.same
    assert found.comparison.first is not None
    assert (found.comparison.first.step, found.comparison.first.cause) == (0, "model")
    found = rerun(held, lambda seen: run(plan_of(), denoiser(), shape=SHAPE, seeds=[3, 9], observers=[seen]))
    assert found.comparison.first.cause == "noise"  # type: ignore[union-attr]


def test_a_noise_source_of_ones_own_is_asked_for(tmp_path: Path) -> None:
    class Own(Philox):
        pass

    held = record(tmp_path / "run", plan_of("euler_a"), TOY, noise=Own(SEEDS))
    assert held.header.noise["kind"] == "Own"
    assert code_of(replay, held, TOY) == "trace-noise"
    assert replay(held, TOY, noise=Own(SEEDS)).same


# --- a pipeline ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "scenes")


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Pipeline:
    return pellucid.load(folder)


def traced(pipe: Any, path: Path, tensors: bool = False, **request: Any) -> Trace:
    with Recorder(path, tensors) as recorder:
        pipe(**{"steps": 4, "seed": 5, "observers": [recorder], **request})
    return trace.read(path)


REQUESTS: dict[str, dict[str, Any]] = {
    "one": {"prompt": "a red star"},
    "batch": {"prompt": ["a red star", "a blue square"], "n": 2, "negative_prompt": ["grey", ""], "guidance": 5.0},
    "empty": {"prompt": "", "n": 2, "seed": [7, 3]},
    "torch noise": {"prompt": "a star", "noise": "torch", "sampler": "euler_a"},
    "a path": {"prompt": "a star", "sampler": "euler_a", "noise": Brownian([5])},
    "rules": {"prompt": "a star", "guidance": "linear:6:2 + apg", "sampler": "dpmpp_2m", "grid": "karras"},
    "a plan": {"prompt": "a star", "steps": None, "plan": "own"},
    "an end": {"prompt": "a star", "sampler": "ddim", "denoising_end": 0.6},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_the_same_again(pipe: Pipeline, tmp_path: Path, name: str) -> None:
    asked = dict(REQUESTS[name])
    if "plan" in asked:
        asked["plan"] = pellucid.compile_plan(
            "heun", steps=3, schedule=pipe.components.schedule, target=pipe.components.target
        )
    held = traced(pipe, tmp_path / "run", **asked)
    assert replay_with(held, pipe).same
    request = request_of(held)
    assert len(held.header.recipes) == held.header.images == len(request.seeds())


def test_the_same_weights_under_another_name_are_no_cause(pipe: Pipeline, tmp_path: Path) -> None:
    held = traced(pipe, tmp_path / "run", prompt="a red star")
    recipes = tuple({**recipe, "model": "moved", "prompt": "a blue star"} for recipe in held.header.recipes)
    found = {told.name: told.causes for told in header_diff(held.header, replace(held.header, recipes=recipes))}
    assert found == {"name of the same model": (), "prompt": ("model",)}


def test_a_trace_of_a_pipeline_holds_its_recipe_and_stages(pipe: Pipeline, tmp_path: Path) -> None:
    held = traced(pipe, tmp_path / "run", True, prompt="a red star", n=2, guidance=4.0)
    assert [stage.name for stage in held.header.stages] == ["text", "encode", "denoise", "decode"]
    denoise = held.header.stages[2]
    assert denoise.began <= 0 <= denoise.began + denoise.seconds
    assert denoise.seconds >= held.header.seconds > 0  # type: ignore[operator]
    assert [recipe["seed"] for recipe in held.header.recipes] == [5, 6]
    assert held.header.recipe is not None
    assert held.header.recipe.prompt == "a red star"
    assert (held.steps[0].norms["delta"] > 0).all()
    assert not np.isnan(held.steps[0].cosine).any()


def test_a_request_that_is_stopped_has_its_recipe_too(pipe: Pipeline, tmp_path: Path) -> None:
    calls = iter(range(10))
    with pytest.raises(pellucid.Cancelled):
        traced(pipe, tmp_path / "run", prompt="a star", cancelled=lambda: next(calls) == 2)
    held = trace.read(tmp_path / "run")
    assert (len(held.steps), held.header.recipes[0]["prompt"]) == (2, "a star")


def test_other_words_are_found_in_the_headers(pipe: Pipeline, tmp_path: Path) -> None:
    from pellucid.evidence.trace.diff import compare

    base = {"prompt": "a red star", "guidance": 4.0, "sampler": "dpmpp_2m"}
    plain = traced(pipe, tmp_path / "plain", **base)
    for change, cause, name in (
        ({"prompt": "a blue star"}, "model", "prompt"),
        ({"negative_prompt": "grey"}, "model", "negative_prompt"),
        ({"guidance": 5.0}, "guidance", "guidance"),
        ({"seed": 6}, "noise", "seeds"),
        ({"steps": 5}, "level", "model calls of the plan"),
        ({"grid": "karras"}, "level", "grid of the plan"),
    ):
        found = compare(plain, traced(pipe, tmp_path / f"{name}", **{**base, **change}))
        assert found.first is not None
        assert (found.first.step, found.first.cause) == (0, cause), name
        assert name in [told.name for told in found.why]


def test_another_model_is_found(pipe: Pipeline, folder: Path, tmp_path: Path) -> None:
    held = traced(pipe, tmp_path / "run", prompt="a red star")
    other = pellucid.load(folder)
    with torch.no_grad():
        next(other.components.network.parameters()).mul_(1.5)
    found = replay_with(held, other).comparison
    assert found.first is not None
    assert (found.first.step, found.first.cause) == (0, "model")
    assert [told.mine for told in found.why] == ["network"]


def test_images_and_adapters_are_asked_for(pipe: Pipeline, folder: Path, tmp_path: Path) -> None:
    image = Image.linear_gradient("L").resize((16, 16)).convert("RGB")
    held = traced(pipe, tmp_path / "image", prompt="a star", image=image, strength=0.6)
    assert code_of(replay_with, held, pipe) == "missing"
    assert replay_with(held, pipe, {"image": image}).same
    lora = Lora(next((folder / "lora").glob("*.safetensors")), 0.7)
    held = traced(pipe, tmp_path / "lora", prompt="a star", loras=[lora])
    assert code_of(replay_with, held, pipe) == "missing"
    assert replay_with(held, pipe, {"loras": [lora]}).same
    found = replay_with(held, pipe, {"loras": [replace(lora, scale=0.9)]}).comparison
    assert "adapters" in [told.name for told in found.why]


TINY = {"width": 16, "height": 16}


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("ddpm", {"n": 2}),
        ("dit", {"label": [3, 4]}),
        ("dit", {"label": 3, "n": 2}),
        ("xl", {"prompt": ["ab", "cd"], "original_size": (64, 32), **TINY}),
        ("xl", {"prompt": ["", "a"], "prompt_2": ["c", "d"], "negative_prompt": "", "negative_prompt_2": "b", **TINY}),
        ("xl", {"prompt": "", "prompt_2": "", "n": 2, **TINY}),
    ],
)
def test_models_without_text_of_classes_and_with_sizes(tmp_path: Path, name: str, asked: dict[str, Any]) -> None:
    import tiny_models as tiny

    model = pellucid.load(tiny.saved(name)[1])
    held = traced(model, tmp_path / "run", steps=2, **asked)
    assert replay_with(held, model).same


def test_a_wrapped_pipeline_is_traced(tmp_path: Path) -> None:
    """Its recipe comes when it has run; what it mixed is seen where it is a plain guidance."""
    import tiny_models as tiny

    peer = pellucid.wrap(tiny.saved("sd1")[0])
    held = traced(peer, tmp_path / "run", True, prompt="abc", steps=3, width=16, height=16)
    assert held.header.recipes[0]["prompt"] == "abc"
    assert [stage.name for stage in held.header.stages] == ["text", "denoise", "decode"]
    assert all((step.norms["delta"] > 0).all() and np.isfinite(step.cosine).all() for step in held.steps)
    assert replay(held).same


def test_a_bare_trace_has_no_request(tmp_path: Path) -> None:
    assert code_of(request_of, record(tmp_path / "run", plan_of(), denoiser())) == "trace-recipe"


# --- timelines -------------------------------------------------------------------------------------------------


def check_format(document: dict[str, Any]) -> None:
    """The Trace Event Format (Google, 2016): the JSON object form, metadata, complete events and counters.

    Complete events of one thread lie one after the other or within each other, as its viewers ask.
    """
    text = json.dumps(document, allow_nan=False)
    assert json.loads(text) == document
    assert document["displayTimeUnit"] in ("ms", "ns")
    spans: dict[int, list[tuple[float, float]]] = {}
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in "MXC"
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            continue
        assert isinstance(event["ts"], float | int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
            spans.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
        else:
            assert all(isinstance(value, float | int) for value in event["args"].values())
    for own in spans.values():
        open_until: list[float] = []
        for begin, end in sorted(own, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6
            open_until.append(end)


def events(document: dict[str, Any], track: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event.get("cat") == track]


def test_a_timeline_is_of_the_format_and_says_what_the_trace_says(pipe: Pipeline, tmp_path: Path) -> None:
    held = traced(pipe, tmp_path / "run", prompt="a star", sampler="euler_a")
    document = timeline(held)
    check_format(document)
    stages = events(document, "stages of the pipeline")
    assert [event["name"] for event in stages] == ["text", "encode", "denoise", "decode"]
    steps = events(document, "steps")
    assert [event["name"] for event in steps] == [f"step {i}" for i in range(4)]
    begun, ended = stages[2]["ts"], stages[2]["ts"] + stages[2]["dur"]
    assert all(begun <= event["ts"] and event["ts"] + event["dur"] <= ended + 1 for event in steps)
    works = events(document, "loop, on the host")
    assert {event["name"] for event in works} == {"noise", "model", "update", "observe"}
    for step in held.steps:
        for work, seconds in step.seconds.items():
            own = [e["dur"] for e in works if (e["name"], e["args"]["step"]) == (work, step.index)]
            assert sum(own) == pytest.approx(seconds * 1e6, abs=0.02)
    assert steps[1]["args"]["sigma"] == held.steps[1].level.sigma
    counters = {event["name"] for event in document["traceEvents"] if event["ph"] == "C"}
    assert {"saturation", "guidance delta / x0"} <= counters


def test_a_timeline_of_a_bare_and_of_a_broken_run(tmp_path: Path) -> None:
    bare = timeline(record(tmp_path / "bare", plan_of("heun"), TOY))
    check_format(bare)
    assert not events(bare, "stages of the pipeline")
    calls = iter(range(10))
    with pytest.raises(pellucid.Cancelled):
        record(tmp_path / "cut", plan_of(), denoiser(), cancelled=lambda: next(calls) == 2)
    broken = timeline(trace.read(tmp_path / "cut"))
    check_format(broken)
    assert len(events(broken, "steps")) == 2


def test_the_last_step_of_a_cut_file_does_not_last_until_the_runs_end(tmp_path: Path) -> None:
    whole = record(tmp_path / "whole", plan_of(), denoiser())
    data = (tmp_path / "whole").read_bytes()
    (tmp_path / "cut").write_bytes(data[: len(data) * 2 // 3])
    cut = events(timeline(trace.read(tmp_path / "cut", partial=True)), "steps")
    assert 0 < len(cut) < 6
    assert cut[-1]["dur"] <= events(timeline(whole), "steps")[len(cut) - 1]["dur"]
