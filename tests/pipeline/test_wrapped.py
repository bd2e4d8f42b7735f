"""`wrap`: a live diffusers pipeline of any family equals itself, and takes our plans, guidance and observers.

Both sides work in float32 and order their sums differently; tiny random networks amplify that over the steps, to 1e-5
at most. 1e-4 leaves an order of magnitude.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import tiny_peers as tiny
import torch
from torch import Tensor, nn

from pellucid.core.batch import StepSeen
from pellucid.core.errors import Cancelled, PellucidError
from pellucid.core.noise import TorchStream
from pellucid.interop.scheduler import Scheduler
from pellucid.pipeline.result import Result
from pellucid.pipeline.wrapped import WrappedPipeline, wrap

CLOSE = 1e-4
STEPS = 5
TEXT = [name for name in tiny.MAKERS if "prompt_embeds" not in tiny.told(name)]
GUIDED = [name for name in tiny.MAKERS if name not in ("lcm", "sd-pag")]  # those that take our guidance
FLOWS = ("sd3", "flux", "flux-dev", "aura-flow", "lumina2", "sana", "chroma", "qwen-image", "z-image", "cogview4")
BATCHED = [name for name in GUIDED if name not in ("flux", "flux-dev", "lumina2", "chroma", "qwen-image", "cogview4")]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    torch.set_num_threads(1)
    diffusers.utils.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers' own
        yield
    left = [t for t in threading.enumerate() if t.name == "pellucid-wrap"]
    assert not left, "a pipeline was left waiting"


def words(name: str, prompt: Any = "abc bca") -> dict[str, Any]:
    return {"prompt": prompt} if name in TEXT else {}


def theirs(name: str, seed: int = 3, **more: Any) -> Tensor:
    """The latents that the pipeline makes by itself."""
    given = {"generator": [torch.Generator().manual_seed(seed)], "num_inference_steps": STEPS, "output_type": "latent"}
    return tiny.peer(name)(**{**words(name), **tiny.told(name), **tiny.size(name), **given, **more}).images


def ours(name: str, pipe: WrappedPipeline | None = None, **more: Any) -> Result:
    given = {"seed": 3, "steps": STEPS, "peer_options": tiny.told(name), **tiny.size(name), **words(name), **more}
    if "plan" in given:
        given.pop("steps")
    return (pipe or wrap(tiny.peer(name)))(**given)


def rules(name: str, text: Any) -> dict[str, Any]:
    """Guidance by rules, under the name that the model has for it."""
    return {"true_guidance" if name == "flux-dev" else "guidance": text}


def apart(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    assert b.isfinite().all()
    return float((a - b).abs().max() / b.abs().max())


class Counter:
    """How many images the network is asked about, call by call."""

    def __init__(self, name: str) -> None:
        self.network = getattr(tiny.peer(name), "unet", None) or tiny.peer(name).transformer
        self.calls: list[int] = []

    def __enter__(self) -> list[int]:
        self.hook = self.network.register_forward_hook(self.count)
        return self.calls

    def __exit__(self, *_: Any) -> None:
        self.hook.remove()

    def count(self, _: Any, __: Any, out: Any) -> None:
        self.calls.append(len(out[0] if isinstance(out, tuple) else out.sample))


# --- the pipeline's own image --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.MAKERS)
def test_the_default_is_the_pipelines_own_image(name: str) -> None:
    made = ours(name)
    assert apart(made.latents, theirs(name)) < CLOSE
    image = theirs(name, output_type="np")[0]
    assert np.abs(np.asarray(made.images[0]) / 255 - image).max() < 1.01 / 255  # one rounding
    assert made.plan.dialect == made.recipe.dialect == "diffusers"
    assert made.recipe.noise == "torch"
    assert made.recipe.size == made.images[0].size
    assert [stage.name for stage in made.stages] == ["text", "denoise", "decode"]


@pytest.mark.parametrize("name", GUIDED)
def test_plain_guidance_of_ours_is_the_pipelines_own(name: str) -> None:
    """Our mixture of the two predictions, found without knowing the family, equals the pipeline's at that scale."""
    if name == "flux-dev":
        made = ours(name, guidance=2.5, true_guidance=3.0, negative_prompt="cab")
        want = theirs(name, guidance_scale=2.5, true_cfg_scale=3.0, negative_prompt="cab")
    elif name == "flux":
        made = ours(name, guidance=3.0, negative_prompt="cab")
        want = theirs(name, true_cfg_scale=3.0, negative_prompt="cab")
    elif name == "qwen-image":  # it puts the norm of cond back: rescaled per token, which no rule of ours does
        assert apart(ours(name, guidance=1.0).latents, theirs(name, true_cfg_scale=1.0)) < CLOSE
        return
    else:
        plain = {"cfg_normalization": False} if name == "lumina2" else {}
        negative = {"negative_prompt": "cab"} if name in TEXT else {}
        counted = 2.0 if name == "z-image" else 3.0  # its scale counts from 0
        made = ours(name, guidance=3.0, **negative)
        want = theirs(name, guidance_scale=counted, **negative, **plain)
    assert apart(made.latents, want) < CLOSE


@pytest.mark.parametrize("name", ["sd", "sdxl"])
@pytest.mark.parametrize("kind", ["EulerAncestralDiscreteScheduler", "DDIMScheduler", "UniPCMultistepScheduler"])
def test_other_schedulers_of_the_pipeline(name: str, kind: str) -> None:
    """A stochastic one too: our steps go on drawing where the pipeline's first noise left the generator."""
    peer = tiny.peer(name)
    before = peer.scheduler
    peer.scheduler = getattr(diffusers, kind)(**tiny.tiny.LATENT_BETAS, steps_offset=1)
    try:
        made = ours(name, guidance="4 + rescale phi=0.5")
        want = theirs(name, guidance_scale=4.0, guidance_rescale=0.5)
        assert apart(made.latents, want) < CLOSE
    finally:
        peer.scheduler = before


def test_the_scale_that_a_network_is_told() -> None:
    assert apart(ours("flux-dev", guidance=5.0).latents, theirs("flux-dev", guidance_scale=5.0)) < CLOSE
    assert apart(ours("lcm", guidance=3.0).latents, theirs("lcm", guidance_scale=3.0)) < CLOSE
    assert apart(ours("flux-dev", guidance=5.0).latents, ours("flux-dev", guidance=1.0).latents) > 10 * CLOSE
    assert ours("flux-dev", guidance=5.0).recipe.conditioning["guidance_scale"] == 5.0


@pytest.mark.parametrize("name", ["flux", "chroma"])
def test_the_shift_follows_the_size(name: str) -> None:
    small, large = (ours(name, width=w, height=w, decode=False) for w in (32, 64))
    assert small.plan.schedule["shift"] < large.plan.schedule["shift"]
    assert apart(large.latents, theirs(name, width=64, height=64)) < CLOSE
    named = ours(name, width=64, height=64, sampler="euler", decode=False)
    assert named.plan.schedule["shift"] == pytest.approx(large.plan.schedule["shift"])


def test_cogview_is_told_the_time_before_the_shift() -> None:
    """Its network gets 1000, 750, … while the levels are shifted; so it does under a sampler of ours."""
    own = ours("cogview4")
    assert [row.time for row in own.plan.rows] == pytest.approx([1000, 750, 500, 250, 1], abs=0.5)
    for row in ours("cogview4", sampler="heun").plan.rows:
        bent = own.plan.schedule["shift"] * row.time / (1000 + (own.plan.schedule["shift"] - 1) * row.time)
        assert row.level.sigma == pytest.approx(bent, abs=1e-9)


def test_a_pipeline_with_a_mixture_of_its_own_is_left_to_it() -> None:
    pag = ours("sd-pag", decode=False)
    assert any("own" in note for note in pag.notes)
    renormed = ours("qwen-image", decode=False)
    assert any("own" in note for note in renormed.notes)
    with pytest.raises(PellucidError, match="guidance must be left to StableDiffusionPAGPipeline"):
        ours("sd-pag", guidance=4.0)


# --- our plans ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GUIDED)
def test_samplers_of_ours_run(name: str) -> None:
    samplers = ["euler", "heun", "dpmpp_2m"] if name in FLOWS else ["DPM++ 2M Karras", "unipc", "euler_a"]
    pipe = wrap(tiny.peer(name))
    for sampler in samplers:
        made = ours(name, pipe, sampler=sampler, decode=False)
        assert made.latents.isfinite().all()
        assert made.plan.dialect == "exact"
        assert torch.equal(made.latents, ours(name, pipe, sampler=sampler, decode=False).latents)


@pytest.mark.parametrize("name", ["sd3", "aura-flow"])
def test_samplers_of_ours_go_to_one_solution(name: str) -> None:
    """They solve the pipeline's own equation. A random network is rough in time, so that no order shows."""
    pipe = wrap(tiny.peer(name))

    def made(sampler: str, steps: int) -> Tensor:
        return ours(name, pipe, sampler=sampler, steps=steps, guidance=1.5, decode=False).latents

    fine = made("heun", 160)
    for sampler in ("euler", "heun", "dpmpp_2m"):
        assert apart(made(sampler, 40), fine) < apart(made(sampler, 5), fine) / 2


@pytest.mark.parametrize("name", ["sd", "flux", "cogview4"])
@pytest.mark.parametrize("sampler", [None, "dpmpp_2m"])
def test_a_plan_as_a_value_and_as_a_file(name: str, sampler: str | None, tmp_path: Path) -> None:
    first = ours(name, sampler=sampler, decode=False)
    again = ours(name, plan=first.plan, decode=False)
    assert torch.equal(first.latents, again.latents)
    assert again.recipe.plan is not None
    (tmp_path / "plan.json").write_text(first.plan.to_json(), encoding="utf-8")
    assert torch.equal(first.latents, ours(name, plan=tmp_path / "plan.json", decode=False).latents)


def test_a_churning_plan_and_one_of_another_model() -> None:
    first = ours("sd3", sampler="dpmpp_2m", decode=False)
    churned = ours("sd", sampler="euler", options={"s_churn": 2.0}, decode=False)  # noise before the first call
    assert churned.plan.rows[0].pre_noise > 0
    assert churned.latents.isfinite().all()
    with pytest.raises(PellucidError, match="plan must be made for the model's schedule"):
        ours("sd", plan=first.plan)


def test_noise_and_latents() -> None:
    addressed = ours("flux", noise="philox", decode=False)
    assert apart(addressed.latents, ours("flux", decode=False).latents) > 0.01
    stream = ours("flux", noise=TorchStream([3]), decode=False)
    assert torch.equal(stream.latents, ours("flux", decode=False).latents)
    start = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(8))
    assert apart(ours("flux", latents=start, decode=False).latents, theirs("flux", latents=start)) < CLOSE
    with pytest.raises(PellucidError, match=r"latents must be of shape \(1, 6, 16\)"):
        ours("flux", latents=start[:, :5])


# --- our guidance ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GUIDED)
def test_rules_compose_and_are_seen(name: str) -> None:
    seen: list[StepSeen] = []
    parts: list[set[str]] = []

    def watch(step: StepSeen) -> None:
        seen.append(step)
        parts.append(set(step.parts))
        mixed = step.parts["uncond"] + 4.0 * (step.parts["cond"] - step.parts["uncond"])
        assert apart(step.parts["cfg"], mixed) < CLOSE
        assert torch.equal(step.x0, step.parts["rescale"])

    sampler = "dpmpp_2m"
    made = ours(name, sampler=sampler, observers=[watch], decode=False, **rules(name, "4 + rescale phi=0.6"))
    assert len(seen) == made.plan.nfe == STEPS
    assert parts[0] == {"cond", "uncond", "cfg", "rescale"}
    assert seen[0].x0.shape == made.latents.shape
    assert torch.equal(seen[-1].x_next, made.latents)


@pytest.mark.parametrize("name", GUIDED)
def test_outside_of_its_interval_guidance_is_not_paid_for(name: str) -> None:
    pipe = wrap(tiny.peer(name))
    asked = {"sampler": "euler", "decode": False}
    with Counter(name) as calls:
        ours(name, pipe, **asked, **rules(name, 4.0))
        whole = sum(calls)
        calls.clear()
        ours(name, pipe, **asked, **rules(name, "4 + interval start=0.4 stop=0.8"))
        assert sum(calls) == STEPS + 2  # two guided steps of five
        calls.clear()
        ours(name, pipe, **asked, **rules(name, 1.0))
        # Z-Image counts its scale from 0, so 1 still mixes: the first step shows that, the others are asked for cond
        assert sum(calls) == STEPS + (name == "z-image")
    assert whole == 2 * STEPS


@pytest.mark.parametrize("name", BATCHED)
def test_with_and_without_the_prompt_are_one_call(name: str) -> None:
    with Counter(name) as calls:
        ours(name, sampler="euler", decode=False, guidance=4.0)
    assert calls == [2] * STEPS


@pytest.mark.parametrize("name", ["sd", "sd3", "chroma"])
def test_an_interval_gives_what_its_steps_say(name: str) -> None:
    """Guided in the first two steps only: their x is that of guidance, the rest goes on without it."""
    pipe = wrap(tiny.peer(name))
    whole, part = [], []
    asked = {"sampler": "euler", "decode": False}
    ours(name, pipe, **asked, guidance=4.0, observers=[whole.append])
    ours(name, pipe, **asked, guidance="4 + interval start=0 stop=0.4", observers=[part.append])
    assert torch.equal(whole[1].x_next, part[1].x_next)
    ours(name, pipe, **asked, guidance=1.0, latents=None, observers=[whole.append])
    alone = part[2]
    assert "uncond" not in alone.parts
    assert torch.equal(alone.x0, alone.parts["cond"])


def test_zero_steps_do_not_call_the_network() -> None:
    with Counter("sd3") as calls:
        made = ours("sd3", sampler="euler", guidance="4 + cfg_zero zero_steps=2", decode=False)
    assert calls == [2] * (STEPS - 2)
    assert made.latents.isfinite().all()


@pytest.mark.parametrize("name", ["sd3", "lumina2"])
def test_samplers_that_keep_uncond_apart(name: str) -> None:
    seen: list[StepSeen] = []
    made = ours(name, sampler="euler_cfg_pp", guidance=1.0, observers=[seen.append], decode=False)
    assert "uncond" in seen[0].parts
    assert apart(made.latents, ours(name, sampler="euler", guidance=1.0, decode=False).latents) > 10 * CLOSE


def test_skip_layers_where_the_network_can() -> None:
    """SD 3's own skip-layer guidance; its steps are counted with `<`, ours with `≤`."""
    own = {"skip_guidance_layers": [0], "skip_layer_guidance_start": 0.3, "skip_layer_guidance_stop": 0.8}
    made = ours("sd3", guidance="7 + skip_layer layers=0 start=0.4 stop=0.8")
    assert apart(made.latents, theirs("sd3", **own)) < CLOSE
    assert apart(made.latents, theirs("sd3")) > 10 * CLOSE
    with pytest.raises(PellucidError, match="skip_layer must be left out: FluxTransformer2DModel cannot"):
        ours("flux", guidance="3 + skip_layer")
    with pytest.raises(PellucidError, match="pag must be left out: SD3Transformer2DModel cannot"):
        ours("sd3", guidance="3 + pag")


@pytest.mark.parametrize("name", ["sd3", "flux", "lumina2"])
def test_autoguidance_by_another_pipeline(name: str) -> None:
    """With itself as the weaker network nothing changes; with another one it does."""
    other = tiny.MAKERS[name]()
    for weight in other.transformer.parameters():
        weight.data.mul_(0.8)
    asked = {"sampler": "euler", "decode": False}
    plain = ours(name, **asked, guidance=3.0).latents
    same = ours(name, **asked, guidance="3 + autoguidance scale=2", weak=tiny.peer(name)).latents
    assert apart(same, plain) < CLOSE
    assert apart(ours(name, **asked, guidance="3 + autoguidance scale=2", weak=wrap(other)).latents, plain) > 10 * CLOSE
    with pytest.raises(PellucidError, match="weak must come with the rule autoguidance"):
        ours(name, guidance=3.0, weak=other)


# --- batches, observers, cancellation -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in TEXT if n not in ("sd-pag",)])
def test_a_batch_of_prompts_equals_single_images(name: str) -> None:
    pipe = wrap(tiny.peer(name))
    for more in ({}, {"sampler": "dpmpp_2m", **({} if name == "lcm" else rules(name, "3 + rescale"))}):
        both = ours(name, pipe, prompt=["abc bca", "cab"], seed=[5, 9], decode=False, **more)
        assert [(r.prompt, r.seed) for r in both.recipes] == [("abc bca", 5), ("cab", 9)]
        for i, (prompt, seed) in enumerate((("abc bca", 5), ("cab", 9))):
            one = ours(name, pipe, prompt=prompt, seed=seed, decode=False, **more)
            assert apart(both.latents[i : i + 1], one.latents) < CLOSE


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_several_images_of_a_prompt(name: str) -> None:
    made = ours(name, prompt=["abc", "cab"], n=2, seed=7, negative_prompt=["b", "c"], **rules(name, 3.0))
    assert len(made.images) == 4
    assert [(r.prompt, r.negative_prompt, r.seed) for r in made.recipes] == [
        ("abc", "b", 7),
        ("abc", "b", 8),
        ("cab", "c", 9),
        ("cab", "c", 10),
    ]
    last = ours(name, prompt="cab", seed=10, negative_prompt="c", **rules(name, 3.0))
    assert apart(made.latents[3:], last.latents) < CLOSE


@pytest.mark.parametrize("name", ["sd", "flux", "lumina2"])
def test_cancellation_and_broken_observers_let_the_pipeline_go(name: str) -> None:
    seen: list[StepSeen] = []
    with pytest.raises(Cancelled):
        ours(name, observers=[seen.append], cancelled=lambda: len(seen) == 2)
    assert len(seen) == 2

    def broken(_: StepSeen) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        ours(name, observers=[broken])
    assert apart(ours(name, decode=False).latents, theirs(name)) < CLOSE


def test_constraints_change_x() -> None:
    made = ours("flux", constraints=[lambda step: torch.zeros_like(step.x_next)])
    assert made.latents.abs().max() == 0
    assert apart(torch.tensor(np.asarray(made.images[0]), dtype=torch.float32),
                 torch.tensor(np.asarray(ours("flux").images[0]), dtype=torch.float32)) > 0.01  # fmt: skip


def test_two_requests_at_once() -> None:
    """With embeddings: the padding of a fast tokenizer is state of the object, and races whoever calls."""
    pipe = wrap(tiny.peer("cogview4"))
    asked = [{"guidance": 3.0, "seed": 1, "sampler": "heun"}, {"guidance": "6 + apg", "seed": 2}]
    alone = [ours("cogview4", pipe, decode=False, **more).latents for more in asked]
    found: list[Any] = [None, None]

    def work(i: int) -> None:
        torch.set_num_threads(1)
        found[i] = ours("cogview4", pipe, decode=False, **asked[i]).latents

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))


@pytest.mark.parametrize("name", ["sd", "flux", "pixart-alpha", "lumina2", "sd-pag"])
def test_the_pipeline_is_left_as_it_was(name: str) -> None:
    peer = tiny.peer(name)
    before, config = dict(vars(peer)), dict(peer.scheduler.config)
    times = getattr(peer.scheduler, "timesteps", None)
    network = getattr(peer, "unet", None) or peer.transformer
    weights = {key: value.clone() for key, value in network.state_dict().items()}
    attention = dict(getattr(network, "attn_processors", {}))
    with pytest.raises(Cancelled):
        ours(name, cancelled=lambda: True)
    assert getattr(network, "attn_processors", {}) == attention  # PAG exchanges them while it runs
    ours(name, sampler="heun", **({} if name == "sd-pag" else rules(name, "4 + rescale")))
    after = dict(vars(peer))
    assert before.keys() == after.keys()
    assert all(before[key] is after[key] for key in before)
    assert dict(peer.scheduler.config) == config
    assert getattr(peer.scheduler, "timesteps", None) is times
    for module in network.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)
    assert all(torch.equal(value, weights[key]) for key, value in network.state_dict().items())


def test_half_precision() -> None:
    """The network works in bfloat16, x stays float32; the two predictions are still told apart."""
    pipe = wrap(tiny.MAKERS["sd3"]().to(torch.bfloat16))
    seen: list[StepSeen] = []
    made = ours("sd3", pipe, guidance=4.0, observers=[seen.append])
    assert made.latents.dtype == torch.float32
    assert made.recipe.dtype == "bfloat16"
    assert apart(made.latents, ours("sd3", guidance=4.0, decode=False).latents) < 0.1  # 8 bits a step


# --- a pipeline that nobody has seen --------------------------------------------------------------------------------


class Strange:
    """No diffusers here: cond comes first, in two calls, the sign is turned and x has five sides."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.transformer = nn.Linear(3, 3)
        torch.manual_seed(1)
        nn.init.normal_(self.transformer.weight)

    def prepare_latents(self, count: int, generator: list[torch.Generator]) -> Tensor:
        draws = [torch.randn(1, 2, 1, 2, 3, generator=g) for g in generator]
        return torch.cat(draws) * getattr(self.scheduler, "init_noise_sigma", 1.0)

    def __call__(
        self,
        prompt: list[str],
        num_inference_steps: int = 7,
        guidance_scale: float = 2.0,
        generator: Any = None,
        output_type: str = "pil",
    ) -> Any:
        self.scheduler.set_timesteps(num_inference_steps, device="cpu")
        latents = self.prepare_latents(len(prompt), generator)
        told = torch.tensor([float(len(text)) for text in prompt]).reshape(-1, 1, 1, 1, 1)
        for t in self.scheduler.timesteps:
            scale = getattr(self.scheduler, "scale_model_input", lambda x, _: x)
            x = scale(latents, t)
            cond = self.transformer(x + told / 10 - t / 1000)
            pred = cond
            if guidance_scale > 1:
                uncond = self.transformer(x - t / 1000)
                pred = uncond + guidance_scale * (cond - uncond)
            latents = self.scheduler.step(-pred, t, latents).prev_sample
        return SimpleNamespace(images=[latents[i] for i in range(len(prompt))])


@pytest.mark.parametrize("kind", ["FlowMatchEulerDiscreteScheduler", "EulerDiscreteScheduler", "DDIMScheduler"])
def test_a_family_that_nobody_has_seen(kind: str) -> None:
    more = {"clip_sample": False} if kind == "DDIMScheduler" else {}
    pipe = Strange(getattr(diffusers, kind)(**more))
    want = torch.stack(pipe(["ab", "abcd"], generator=[torch.Generator().manual_seed(s) for s in (3, 4)]).images)
    seen: list[StepSeen] = []
    made = wrap(pipe)(["ab", "abcd"], seed=3, observers=[seen.append], decode=False)
    assert apart(made.latents, want.detach()) < CLOSE
    assert len(seen) == 7
    assert set(seen[0].parts) == {"cond", "uncond", "cfg"}
    assert made.recipe.guidance["scale"] == 2.0
    again = wrap(pipe)(["ab", "abcd"], seed=3, guidance=2.0, decode=False)
    assert apart(again.latents, made.latents) < CLOSE


class Restless(Strange):
    """Changes its latents between the step and the network."""

    def __call__(self, prompt: list[str], num_inference_steps: int = 3, generator: Any = None, **_: Any) -> Any:
        self.scheduler.set_timesteps(num_inference_steps)
        latents = self.prepare_latents(len(prompt), generator)
        for t in self.scheduler.timesteps:
            latents = latents * 1.01
            latents = self.scheduler.step(self.transformer(latents), t, latents).prev_sample
        return SimpleNamespace(images=list(latents))


class Silent(Strange):
    """Never asks its network."""

    def __call__(self, prompt: list[str], num_inference_steps: int = 3, generator: Any = None, **_: Any) -> Any:
        self.scheduler.set_timesteps(num_inference_steps)
        latents = self.prepare_latents(len(prompt), generator)
        for t in self.scheduler.timesteps:
            latents = self.scheduler.step(latents, t, latents).prev_sample
        return SimpleNamespace(images=list(latents))


class Hasty(Strange):
    """Does not take all of its steps."""

    def __call__(self, prompt: list[str], num_inference_steps: int = 3, generator: Any = None, **_: Any) -> Any:
        self.scheduler.set_timesteps(num_inference_steps)
        latents = self.prepare_latents(len(prompt), generator)
        for t in self.scheduler.timesteps[:-1]:
            latents = self.scheduler.step(self.transformer(latents), t, latents).prev_sample
        return SimpleNamespace(images=list(latents))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Restless, "Restless must step from the latents that it was given"),
        (Silent, "Silent must call its network in each step"),
        (Hasty, "Hasty must run one step for each time of its scheduler"),
    ],
)
def test_a_loop_of_another_kind_is_refused_with_a_way_out(kind: type, message: str) -> None:
    with pytest.raises(PellucidError, match=message) as caught:
        wrap(kind(diffusers.EulerDiscreteScheduler()))("ab", seed=1, decode=False)
    assert "pipe.scheduler = pellucid.Scheduler.from_config" in str(caught.value)
    peer = kind(Scheduler.from_config(diffusers.EulerDiscreteScheduler()))
    assert peer(["ab"], generator=[torch.Generator().manual_seed(1)]).images[0].isfinite().all()


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": "x.png"}, "image must be an option of a wrapped pipeline"),
        ({"smapler": "ddim"}, "unknown option smapler; got 'ddim'. Nearest: sampler"),
        ({"num_inference_steps": 3}, "unknown option num_inference_steps; use steps."),
        ({"peer_options": {"guidance": 3}}, r"peer_options\['guidance'\] must be an argument of"),
        ({"peer_options": {"generator": 3}}, r"peer_options\['generator'\] must be left out"),
        ({"peer_options": {"guidance_scale": 3.0}, "guidance": 3}, r"\['guidance_scale'\] must be left out"),
        ({"true_guidance": 3.0}, "true_guidance must be left out"),
        ({"height": 17}, "StableDiffusion3Pipeline could not prepare: .*divisible"),
        ({"sampler": "dpmpp2m5"}, "sampler must be a known name"),
        ({"noise": "white"}, "noise must be philox, torch"),
        ({"guidance": float("nan")}, "guidance scale must be a number"),
        ({"prompt": None}, "prompt must be given to a text-to-image pipeline"),
        ({"steps": 0}, "steps must be"),
    ],
)
def test_bad_requests_are_one_clear_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PellucidError, match=message) as caught:
        wrap(tiny.peer("sd3"))(**{"prompt": "abc", "seed": 1, "steps": 2, **options})
    assert "\n" not in str(caught.value)


def test_guidance_that_a_model_cannot_have() -> None:
    with pytest.raises(PellucidError, match=r"guidance must be a plain number, since .* Rules go into true_guidance"):
        ours("flux-dev", guidance="3 + apg")
    with pytest.raises(PellucidError, match="true_guidance must be left out: LatentConsistencyModelPipeline"):
        ours("lcm", true_guidance=3.0)
    with pytest.raises(PellucidError, match="negative_prompt must be left out: LatentConsistencyModelPipeline"):
        ours("lcm", negative_prompt="b")
    noted = ours("flux", negative_prompt="b", guidance=1.0, decode=False)
    assert any("negative_prompt has no effect" in note for note in noted.notes)
    with pytest.raises(PellucidError, match="guidance must be 1 for LatentConsistencyModelPipeline"):
        ours("lcm", sampler="euler_cfg_pp")


def test_a_scheduler_that_is_not_read() -> None:
    peer = Strange(diffusers.EulerDiscreteScheduler(interpolation_type="log_linear"))
    with pytest.raises(PellucidError, match="scheduler of Strange: interpolation_type must be 'linear'") as caught:
        wrap(peer)("ab", seed=1)
    assert "strict" not in str(caught.value)


# --- guidance from 0 to 1, and times of the caller's own -------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 0.5])
@pytest.mark.parametrize("name", ["sd", "sdxl", "sd3", "pixart-alpha"])
def test_a_scale_below_one_is_no_guidance(name: str, scale: float) -> None:
    made = ours(name, guidance=scale, decode=False)
    assert apart(made.latents, theirs(name, guidance_scale=scale)) < CLOSE
    assert [note for note in made.notes if "was run as 1" in note]
    with Counter(name) as calls:
        exact = ours(name, guidance=scale, sampler="euler", decode=False)
    assert max(calls) == 1  # and so it is with a sampler of ours
    assert torch.equal(exact.latents, ours(name, guidance=1.0, sampler="euler", decode=False).latents)


@pytest.mark.parametrize("name", ["sd3", "flux", "flux-dev", "qwen-image"])
def test_sigmas_without_steps(name: str) -> None:
    sigmas = [1.0, 0.8, 0.45, 0.2]
    made = ours(name, steps=None, decode=False, peer_options={**tiny.told(name), "sigmas": sigmas})
    assert made.plan.nfe == 4
    assert apart(made.latents, theirs(name, num_inference_steps=50, sigmas=sigmas)) < CLOSE


def test_timesteps_without_steps() -> None:
    times = [900, 600, 300, 20]
    made = ours("sdxl", steps=None, decode=False, peer_options={**tiny.told("sdxl"), "timesteps": times})
    assert apart(made.latents, theirs("sdxl", num_inference_steps=50, timesteps=times)) < CLOSE


@pytest.mark.parametrize("more", [{"steps": 4}, {"steps": None, "sampler": "euler"}, {"steps": None, "grid": "karras"}])
def test_times_given_twice(more: dict[str, Any]) -> None:
    with pytest.raises(PellucidError, match=r"\['sigmas'\] must be left out where steps, sampler, grid or plan"):
        ours("sd3", peer_options={"sigmas": [1.0, 0.5]}, **more)
