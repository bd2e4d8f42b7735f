"""What all adapters are asked: the base's own latents, text and objective; what cannot be adapted; the recipes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import adapt_cases as cases
import pytest
import torch

import pellucid
from pellucid.models.vae import to_diffusion
from pellucid.train.adapters import AdapterObjectiveConfig, FrozenPipeline
from pellucid.train.config import TrainConfig, chosen
from pellucid.train.controlnet import ControlNetConfig
from pellucid.train.draws import Draws
from pellucid.train.ip_adapter import IPAdapterConfig
from pellucid.train.lora import LoraConfig
from pellucid.train.objective import Objective
from pellucid.train.scenes_source import ScenesConfig
from pellucid.train.source import Batch

ROOT = Path(__file__).parents[2]
every_kind = pytest.mark.parametrize("kind", cases.NAMES)
each_network = pytest.mark.parametrize("kind", ["lora", "controlnet", "ip_adapter"])


# --- the question -------------------------------------------------------------------------------------------------


@every_kind
def test_what_is_asked_depends_on_the_draws_alone_and_parts_make_the_whole(kind: str) -> None:
    task, batch = cases.task(kind), cases.examples()
    whole, again = (task.prepare(batch, cases.draws(3)) for _ in range(2))
    other = task.prepare(batch, cases.draws(4))
    parts = [
        task.prepare(cases.rows(batch, torch.arange(2) + 2 * part), cases.draws(3, part=part, parts=2))
        for part in range(2)
    ]
    for name, tensor in whole.items():
        assert torch.equal(tensor, again[name])
        joined = torch.cat([part[name] for part in parts], dim=1 if name == "numbers" else 0)
        assert joined.shape == tensor.shape
        assert torch.allclose(joined, tensor, atol=2e-5)  # a network's kernels round by batch size
    assert not torch.equal(whole["noise"], other["noise"])
    assert not torch.equal(whole["x0"], other["x0"])  # the posterior is sampled too


def test_latents_are_the_pipelines_and_cached_ones_are_taken_as_they_are() -> None:
    base, draws = FrozenPipeline(cases.base(), "float32", cases.CPU), cases.draws()
    found = base.latents(cases.examples().images, draws)
    vae = pellucid.load(cases.base()).components.vae
    posterior = vae.encode(cases.examples().images)
    noise = draws.normal("posterior", posterior.mean.shape[1:])
    wanted = to_diffusion(vae.config, posterior.mean + torch.exp(posterior.logvar / 2) * noise)
    assert torch.allclose(found, wanted, atol=1e-6)
    assert torch.equal(base.latents(found, draws), found)


@pytest.mark.parametrize("name", ["sd1", "xl"])
def test_text_is_what_the_pipeline_tells(name: str) -> None:
    from pellucid.pipeline.encoders.conditions import make_conditions
    from pellucid.pipeline.request import Request

    base, pipe = FrozenPipeline(cases.base(name), "float32", cases.CPU), pellucid.load(cases.base(name))
    told = make_conditions(pipe.components, Request(prompt=list(cases.WORDS)), (16, 16), 1.0, True)
    assert told.uncond is not None
    for without, wanted in ((False, told.cond), (True, told.uncond)):
        found = base.conditions(cases.WORDS, torch.full((cases.COUNT,), without)) | base.sizes(cases.COUNT, 16, 16)
        assert found.keys() == wanted.keys()
        assert all(torch.allclose(found[key], wanted[key], atol=1e-5) for key in found)


@every_kind
def test_sdxl_bases_are_trained_too(kind: str) -> None:
    task = cases.task(kind, base=cases.base("xl"))
    asked = task.prepare(cases.examples(), cases.draws())
    text = {"tokens", "kept"} if kind == "text_lora" else {"context", "pooled"}
    assert text | {"sizes"} <= asked.keys()
    task.loss(task.network, asked).loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in task.network.parameters())


def test_the_objective_is_the_bases_own_unless_it_is_overruled() -> None:
    parts = FrozenPipeline(cases.base("sd2"), "float32", cases.CPU).parts
    own = AdapterObjectiveConfig().build(parts)
    assert (own.schedule, own.target) == (parts.schedule, "v")
    other = AdapterObjectiveConfig(schedule={"name": "linear"}, target="eps", dropout=0.3).build(parts)
    assert isinstance(other, Objective)
    assert (other.schedule.name, other.target, other.dropout) == ("linear", "eps", 0.3)


def test_long_captions_are_cut_and_long_runs_go_on() -> None:
    base = FrozenPipeline(cases.base(), "float32", cases.CPU)
    room = base.text[0].tokenizer.room
    long = " ".join("a" for _ in range(room + 5))
    assert torch.equal(base.tokens([long]), base.tokens([" ".join("a" for _ in range(room))]))


# --- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ddpm", "dit", "inpaint", "lcm", "refiner"])
def test_bases_that_take_no_text_or_more_than_text(name: str) -> None:
    assert cases.refusal(cases.task, "lora", base=cases.base(name)) == "adapt-base"


@each_network
def test_data_without_captions_or_of_another_shape(kind: str) -> None:
    task, batch = cases.task(kind), cases.examples()
    bare = Batch(batch.images, None, None, batch.hints)
    assert cases.refusal(task.prepare, bare, cases.draws()) == "data-captions"
    odd = Batch(batch.images[:, :2], None, batch.captions, batch.hints)
    assert cases.refusal(task.prepare, odd, cases.draws()) == "shape"


def test_a_base_that_is_not_there(tmp_path: Path) -> None:
    assert cases.refusal(ControlNetConfig(base=str(tmp_path / "nothing")).build, 0, cases.CPU) == "not-found"


def test_an_objective_that_cannot_be(tmp_path: Path) -> None:
    objective = AdapterObjectiveConfig(dropout=1.5)
    assert cases.refusal(cases.task, "lora", objective=objective) == "objective"
    assert cases.refusal(cases.task, "lora", objective=AdapterObjectiveConfig(target="flow")) == "target-schedule"


def test_draws_of_one_image_are_enough() -> None:
    task = cases.task("lora")
    one = cases.rows(cases.examples(), torch.tensor([0]))
    assert task.prepare(one, Draws(0, 0, 1))["x0"].shape == (1, 4, 8, 8)


# --- recipes ------------------------------------------------------------------------------------------------------


RECIPES = {"lora": LoraConfig, "controlnet": ControlNetConfig, "ip_adapter": IPAdapterConfig}


@pytest.mark.parametrize("kind", RECIPES)
def test_recipes_are_read(kind: str) -> None:
    """The task and the data of a recipe are known to the last key, and the data has what the task asks for."""
    config = TrainConfig.load(ROOT / "configs" / f"scenes_{kind}.toml")
    task = chosen(config.task, RECIPES, "task")
    data = chosen(config.data["of"], {"scenes": ScenesConfig}, "data.of")
    assert task.base == "runs/scenes_text_unet_layout/model"
    wanted = {"controlnet": "hint", "ip_adapter": "reference"}.get(kind)
    assert wanted is None or getattr(task, wanted) in data.hints
    batch = replace(data, compile_render=False).open().batch(torch.arange(2), Draws(0, 0, 2), cases.CPU)
    assert batch.images.shape == (2, 3, 128, 128)
    assert batch.captions is not None
    assert all(hint.shape[2:] == (128, 128) for hint in batch.hints.values())
