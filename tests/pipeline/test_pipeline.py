"""Laws of our pipelines: exact strength, one image a seed whatever the batch, watched and stopped, many at once."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tiny
import torch
from PIL import Image

import pellucid
from pellucid import Cancelled, Control, Guidance, Lora, PellucidError, Philox, Request, compile_plan
from pellucid.pipeline.pipeline import Pipeline

SMALL = {"width": 16, "height": 16, "steps": 3}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("sd")
    tiny.stable_diffusion(base).save_pretrained(base / "model")
    return base / "model"


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Pipeline:
    return pellucid.load(folder)


def image(size: tuple[int, int] = (16, 16), seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))


def code_of(call: Any, *args: Any, **kwargs: Any) -> str:
    """The stable code of the error, which must be one clear line."""
    with pytest.raises(PellucidError) as error:
        call(*args, **kwargs)
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 600
    return error.value.code


# --- the start level ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [3, 10, 29])
@pytest.mark.parametrize("strength", [1.0, 0.75, 0.58, 0.29, 0.1])
def test_strength_is_the_start_level_that_was_asked(pipe: Pipeline, strength: float, steps: int) -> None:
    """diffusers keeps int(0.58 · 50) = 28 and int(0.29 · 100) = 28 steps: off by one. Here the level is exact."""
    made = pipe("abc", image=image(), strength=strength, sampler="dpmpp_2m", steps=steps, seed=1, decode=False)
    level = pipe.components.schedule.level(strength * 999)
    assert made.plan.start.ratio == pytest.approx(level.ratio, rel=1e-12)
    assert made.plan.rows[0].time == pytest.approx(strength * 999, rel=1e-9)


def test_img2img_starts_at_the_image_with_that_much_noise(pipe: Pipeline) -> None:
    seen: list[Any] = []
    noise = torch.zeros(1, 4, 8, 8)
    given = {"image": image(), "sampler": "euler", "seed": 1, "latents": noise, "decode": False}
    made = pipe("abc", **given, strength=0.4, steps=5, observers=[seen.append])
    clean = pipe("abc", **given, strength=0.002, steps=1, observers=[seen.append])
    level = made.plan.start
    first, last = seen[0].x, seen[-1].x
    assert torch.allclose(first / level.alpha, last / clean.plan.start.alpha, atol=1e-5)


def test_a_run_in_two_hands_over_between_frames(pipe: Pipeline) -> None:
    """Euler walks x0 + σ·eps, DPM++ the VP frame; a Result hands its level over with its latents."""
    shared = {"seed": 3, "guidance": 1.0, "width": 16, "height": 16}
    first = pipe("abc", sampler="euler", steps=40, denoising_end=0.5, decode=False, **shared)
    rest = pipe("abc", image=first, sampler="dpmpp_2m", steps=40, denoising_start=0.5, **shared)
    whole = pipe("abc", sampler="dpmpp_2m", steps=80, **shared)
    other = pipe("abc", sampler="dpmpp_2m", steps=80, **{**shared, "seed": 4})
    gap = float((rest.latents - whole.latents).norm() / whole.latents.norm())
    assert gap < 0.1 * float((other.latents - whole.latents).norm() / whole.latents.norm())


# --- seeds and batches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["dpmpp_2m", "euler_a"])
def test_a_seed_gives_its_image_whatever_the_batch(pipe: Pipeline, sampler: str) -> None:
    together = pipe(["abc", "cab b"], n=2, seed=[5, 9, 5, 7], sampler=sampler, **SMALL)
    for i, (prompt, seed) in enumerate([("abc", 5), ("abc", 9), ("cab b", 5), ("cab b", 7)]):
        alone = pipe(prompt, seed=seed, sampler=sampler, **SMALL)
        assert torch.allclose(together.latents[i], alone.latents[0], atol=1e-4)  # kernels, not noise, differ by batch
        assert together.recipes[i].seed == seed
    assert len(together.images) == 4


def test_a_call_without_a_seed_draws_one_and_says_it(pipe: Pipeline) -> None:
    first, second = pipe("abc", **SMALL), pipe("abc", **SMALL)
    assert first.recipe.seed != second.recipe.seed
    again = pipe("abc", seed=first.recipe.seed, **SMALL)
    assert torch.equal(again.latents, first.latents)


def test_threads_share_a_pipeline(pipe: Pipeline) -> None:
    asked = [
        {"prompt": "abc", "sampler": "euler_a", "seed": 1, "guidance": "4 + apg"},
        {"prompt": "cab", "sampler": "unipc", "seed": 2, "guidance": "3 + interval stop=0.5"},
        {"prompt": "b", "seed": 3},
        {"prompt": "a", "seed": 4, "image": image(), "strength": 0.6, "mask": image().convert("L")},
    ]
    alone = [pipe(**one, **SMALL) for one in asked]
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        found[i] = pipe(**asked[i], **SMALL)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, one in enumerate(alone):
        assert torch.equal(found[i].latents, one.latents)


# --- plans, watchers, guidance -----------------------------------------------------------------------------------


def test_a_plan_file_runs_and_is_in_the_recipe(pipe: Pipeline, tmp_path: Path) -> None:
    plan = compile_plan("heun", schedule=pipe.components.schedule, target="eps", steps=3)
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    made = pipe("abc", plan=path, seed=1, width=16, height=16)
    named = pipe("abc", sampler="heun", steps=3, seed=1, width=16, height=16)
    assert torch.equal(made.latents, named.latents)
    assert made.recipe.plan is not None
    assert named.recipe.plan is None
    other = compile_plan("heun", schedule="cosine", target="eps", steps=3)
    assert code_of(pipe, "abc", plan=other) == "plan-model"
    assert code_of(pipe, "abc", plan=plan, steps=4) == "request"
    assert code_of(pipe, "abc", plan=tmp_path / "none.json") == "plan-file"


def test_a_folder_keeps_its_scheduler_unless_a_sampler_is_named(pipe: Pipeline) -> None:
    own = pipe("abc", seed=1, **SMALL)
    assert (own.plan.name, own.plan.dialect, own.recipe.noise) == ("plms", "diffusers", "torch")
    named = pipe("abc", seed=1, sampler="DPM++ 2M Karras", **SMALL)
    assert (named.plan.name, named.plan.dialect, named.recipe.noise) == ("dpmpp_2m", "exact", "philox")
    assert named.plan.grid["name"] == "karras"


def test_observers_see_every_row_with_its_parts(pipe: Pipeline) -> None:
    seen: list[Any] = []
    made = pipe("abc", sampler="heun", guidance="5 + rescale", seed=1, observers=[seen.append], **SMALL)
    assert [s.index for s in seen] == list(range(made.plan.nfe))
    assert {"cond", "uncond", "cfg", "rescale"} <= set(seen[0].parts)
    assert torch.equal(seen[-1].x_next, made.latents)


def test_cancelling_stops_between_rows(pipe: Pipeline) -> None:
    seen: list[Any] = []
    with pytest.raises(Cancelled):
        pipe("abc", seed=1, observers=[seen.append], cancelled=lambda: len(seen) >= 2, **SMALL)
    assert len(seen) == 2


def test_guidance_off_or_outside_its_interval_does_not_pay(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    network = pipe.components.network
    forward = type(network).forward

    def counting(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        batches.append(len(x))
        return forward(self, x, *args, **kwargs)

    monkeypatch.setattr(type(network), "forward", counting)
    given = {"sampler": "euler", "seed": 1, "width": 16, "height": 16, "steps": 4}
    pipe("abc", guidance=1.0, **given)
    assert batches == [1, 1, 1, 1]
    batches.clear()
    pipe("abc", guidance="5 + interval start=0.25 stop=0.75", **given)
    assert batches == [1, 2, 2, 1]
    batches.clear()
    made = pipe("abc", **given)  # guarded
    assert batches == [2, 2, 2, 2]
    assert made.recipe.guidance["scale"] == 7.0
    assert [r["rule"] for r in made.recipe.guidance["rules"]] == ["rescale"]


def test_perturbed_attention_reaches_the_network(pipe: Pipeline) -> None:
    plain = pipe("abc", guidance=3.0, seed=1, **SMALL)
    pag = pipe("abc", guidance="3 + pag layers=mid_block", seed=1, **SMALL)
    assert not torch.equal(plain.latents, pag.latents)


def test_autoguidance_takes_a_second_pipeline(pipe: Pipeline, folder: Path) -> None:
    weak = pellucid.load(folder)
    with torch.no_grad():
        for weight in weak.components.network.parameters():
            weight.mul_(0.9)
    made = pipe("abc", guidance="1 + autoguidance scale=2", weak=weak, seed=1, **SMALL)
    assert not torch.equal(made.latents, pipe("abc", guidance=1.0, seed=1, **SMALL).latents)


def test_a_negative_prompt_without_effect_is_said(pipe: Pipeline) -> None:
    made = pipe("abc", negative_prompt="c", guidance=1.0, seed=1, **SMALL)
    assert any("negative_prompt has no effect" in note for note in made.notes)


def test_prompt_embeds_equal_the_prompt(pipe: Pipeline) -> None:
    from pellucid.pipeline.encoders.text import encode_pair

    parts = pipe.components
    cond, uncond = encode_pair(parts.text_encoders, parts.tokenizers, ["abc"], [""])
    made = pipe(prompt_embeds=cond.context, negative_prompt_embeds=uncond, guidance=4.0, seed=1, **SMALL)
    assert torch.equal(made.latents, pipe("abc", guidance=4.0, seed=1, **SMALL).latents)


def test_a_noise_source_of_ones_own(pipe: Pipeline) -> None:
    made = pipe("abc", noise=Philox([11]), sampler="euler_a", **SMALL)
    assert torch.equal(made.latents, pipe("abc", seed=11, sampler="euler_a", **SMALL).latents)


def test_inpainting_keeps_what_is_not_painted(pipe: Pipeline) -> None:
    mask = Image.fromarray(np.pad(np.full((16, 8), 255, np.uint8), ((0, 0), (8, 0))))
    blank = {"image": image(), "latents": torch.zeros(1, 4, 8, 8), "seed": 1, "sampler": "dpmpp_2m"}
    made = pipe("abc", mask=mask, **blank, **SMALL)
    other = pipe("cab", mask=mask, **blank, **SMALL)
    assert torch.equal(made.latents[..., :4], other.latents[..., :4])
    assert not torch.equal(made.latents[..., 4:], other.latents[..., 4:])


def test_save_and_load_again(pipe: Pipeline, tmp_path: Path) -> None:
    pipe.save(tmp_path / "copy")
    again = pellucid.load(tmp_path / "copy")
    assert torch.equal(again("abc", seed=1, **SMALL).latents, pipe("abc", seed=1, **SMALL).latents)


# --- bad input: one clear line each ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"width": 17}, "size-multiple"),
        ({"n": 0}, "request"),
        ({"n": 1000}, "request"),
        ({"steps": 0}, "steps"),
        ({"seed": -1}, "seed"),
        ({"seed": [1, 2, 3]}, "seed"),
        ({"guidance": float("nan")}, "guidance"),
        ({"guidance": "5 + rescale phi=3"}, "guidance"),
        ({"sampler": "dpm_plus_plus"}, "unknown-sampler"),
        ({"strength": 0.5}, "request"),
        ({"mask": image()}, "request"),
        ({"image": image(), "strength": float("nan")}, "request"),
        ({"image": image(), "strength": 0.0}, "request"),
        ({"image": image(), "strength": 0.1}, "strength"),
        ({"image": image(), "mask": image((32, 16))}, "mask-size"),
        ({"image": image((17, 16))}, "size-multiple"),
        ({"label": 3}, "no-labels"),
        ({"latents": torch.zeros(1, 4, 9, 9)}, "latents"),
        ({"options": {"eta": 1.0}}, "option"),  # the folder's own sampler has no eta
        ({"sampler": "euler", "options": {"eta": 1.0}}, "option"),
        ({"noise": "white"}, "noise"),
        ({"clip_skip": 99}, "request"),
        ({"clip_skip": 12}, "clip-skip"),
        ({"denoising_start": 0.8, "denoising_end": 0.2, "image": image()}, "request"),
        ({"negative_prompt": ["a", "b", "c"]}, "request"),
        ({"prompt_embeds": torch.zeros(3)}, "prompt"),
        ({"guidence": 5.0}, "option"),
    ],
)
def test_bad_options(pipe: Pipeline, given: dict[str, Any], code: str) -> None:
    assert code_of(pipe, "abc", **{"seed": 1, "steps": 3, **given}) == code


def test_a_prompt_of_ten_thousand_characters(pipe: Pipeline) -> None:
    assert code_of(pipe, "abc " * 2500, **SMALL).startswith("prompt")


def test_a_nan_scale_of_an_adapter(pipe: Pipeline) -> None:
    assert code_of(Lora, "file", float("nan")) == "scale"
    assert code_of(Control, "folder", image(), float("inf")) == "scale"
    assert code_of(Control, "folder", image(), 1.0, 0.6, 0.4) == "scale"


def test_a_control_that_is_no_controlnet(pipe: Pipeline, folder: Path) -> None:
    control = Control(folder / "vae", image())
    assert code_of(pipe, "abc", controls=[control], seed=1, **SMALL) == "control-kind"


def test_an_image_prompt_without_an_encoder(pipe: Pipeline, tmp_path: Path) -> None:
    from pellucid import ImagePrompt

    assert code_of(pipe, "abc", image_prompts=[ImagePrompt(tmp_path / "no", image())], **SMALL)


def test_not_a_model(tmp_path: Path, folder: Path) -> None:
    assert code_of(pellucid.load, tmp_path) == "not-a-model"
    assert code_of(pellucid.load, "no such model") == "not-found"
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model_index.json").write_text(json.dumps({"_class_name": "AudioLDMPipeline"}))
    assert code_of(pellucid.load, broken)


def test_out_of_memory_names_its_owner(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = type(pipe.components.vae).decode
    calls: list[int] = []

    def full(self: Any, latents: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 1:  # what comes after is the rehearsal that finds the owner
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(self, latents)

    monkeypatch.setattr(type(pipe.components.vae), "decode", full)
    with pytest.raises(PellucidError, match="decode") as error:
        pipe(["abc", "b"], seed=1, **SMALL)
    assert error.value.code == "out-of-memory"
    assert "decoder" in str(error.value)
    assert "brings it to" in str(error.value)


def test_guidance_objects_and_requests(pipe: Pipeline) -> None:
    request = Request("abc", guidance=Guidance(3.0), seed=1, **SMALL)
    assert torch.equal(pipe.run(request).latents, pipe("abc", guidance=3.0, seed=1, **SMALL).latents)


def test_adapters_are_read_once_and_again_when_they_change(pipe: Pipeline, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    layer = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    path = tmp_path / "style.safetensors"

    def write(size: float) -> None:
        shape = pipe.components.network.get_submodule(layer).weight.shape
        keys = {f"unet.{layer}.lora_A.weight": (2, shape[1]), f"unet.{layer}.lora_B.weight": (shape[0], 2)}
        save_file({key: torch.full(shape, size) for key, shape in keys.items()}, path)

    write(0.1)
    first = pipe.lora_of(Lora(path))
    assert pipe.lora_of(Lora(path)) is first
    write(0.2)
    os.utime(path, ns=(1, 1))
    assert pipe.lora_of(Lora(path)) is not first
    for number in range(20):
        other = tmp_path / f"{number}.safetensors"
        other.write_bytes(path.read_bytes())
        pipe.lora_of(Lora(other))
    assert len(pipe.shelf) <= 16


def a_style(pipe: Pipeline, path: Path) -> Lora:
    """A LoRA of one layer of the network."""
    from safetensors.torch import save_file

    layer = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    wide = pipe.components.network.get_submodule(layer).in_features
    g = torch.Generator().manual_seed(0)
    state = {f"unet.{layer}.lora_{name}.weight": torch.randn(2, wide, generator=g) for name in "AB"}
    state[f"unet.{layer}.lora_B.weight"] = state[f"unet.{layer}.lora_B.weight"].T.contiguous()
    save_file(state, path)
    return Lora(path, 0.7)


def test_a_merged_lora_is_the_request_s_and_comes_out_to_the_bit(folder: Path, tmp_path: Path) -> None:
    pipe = pellucid.load(folder)
    style = a_style(pipe, tmp_path / "style.safetensors")
    plain = pipe("abc", seed=1, **SMALL)
    asked = pipe("abc", seed=1, loras=[style], **SMALL)
    with pipe.merge(style) as merged:
        inside = pipe("abc", seed=1, **SMALL)
        assert set(merged.receipt.change) == {"unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"}
    assert torch.equal(inside.latents, asked.latents)
    assert not torch.equal(inside.latents, plain.latents)
    assert torch.equal(pipe("abc", seed=1, **SMALL).latents, plain.latents)


@pytest.mark.parametrize("shared", [False, True], ids=["one pipeline", "another over the same networks"])
def test_no_merge_and_no_unmerge_while_another_thread_samples(folder: Path, tmp_path: Path, shared: bool) -> None:
    pipe = pellucid.load(folder)
    other = Pipeline(pipe.components) if shared else pipe
    style = a_style(pipe, tmp_path / "style.safetensors")
    plain = pipe("abc", seed=1, **SMALL)
    merged = pipe.merge(style)
    inside = pipe("abc", seed=1, **SMALL)

    def meanwhile(call: Any) -> torch.Tensor:
        """Calls in the middle of a run of another thread; what that run made."""
        stopped, go = threading.Event(), threading.Event()
        made: list[torch.Tensor] = []

        def pause(_: Any) -> None:
            stopped.set()
            assert go.wait(30)

        thread = threading.Thread(target=lambda: made.append(other("abc", seed=1, observers=[pause], **SMALL).latents))
        thread.start()
        assert stopped.wait(30)
        assert code_of(call) == "merge-running"
        go.set()
        thread.join()
        return made[0]

    assert torch.equal(meanwhile(merged.unmerge), inside.latents)
    merged.unmerge()
    assert torch.equal(meanwhile(lambda: pipe.merge(style)), plain.latents)
    with pytest.raises(PellucidError):
        pipe("abc", seed=1, observers=[lambda _: pipe.merge(style)], **SMALL)
    pipe.merge(style).unmerge()  # a run that broke off is none in progress
    assert torch.equal(pipe("abc", seed=1, **SMALL).latents, plain.latents)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_latents_that_are_not_finite_are_refused(pipe: Pipeline, value: float) -> None:
    """Given as the first noise, as an image, and made by a network: a VAE may squash infinities into pixels."""
    given = torch.zeros(1, pipe.channels, 8, 8)
    given[0, 0, 0, 0] = value
    size = {"width": 8 * pipe.factor, "height": 8 * pipe.factor}
    spoil = {"constraints": [lambda seen: torch.full_like(seen.x_next, value)]}
    for options in ({"latents": given}, {"image": given, "strength": 0.5}, spoil):
        with pytest.raises(PellucidError, match="latents") as error:
            pipe("a cat", sampler="ddim", steps=2, **size, **options)
        assert error.value.code == "nan"


def test_views_that_are_dropped_are_forgotten_and_the_model_never_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pellucid.load("scenes-128", device="cpu")
    gone: list[Any] = []
    monkeypatch.setattr(pipe.graphs, "forget", gone.append)

    def view_at(scale: float) -> Any:
        return pipe.with_loras(Request.of("a star", loras=[Lora("scenes-128/lora", scale)]))[0].network

    whole, half = view_at(1.0), view_at(0.5)
    assert view_at(1.0) is whole  # used again, so the other one goes next
    view_at(0.75)
    assert gone == [half]
    pipe._forget(pipe.components.network)  # that of a LoRA on the text encoder alone
    assert gone == [half]
