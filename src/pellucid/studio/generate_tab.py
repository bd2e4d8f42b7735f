"""The tab Generate: an image from a prompt, with a preview at every step."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradio as gr
import torch
from PIL import Image
from torch import Tensor

from pellucid.core.batch import StepSeen
from pellucid.core.errors import Cancelled
from pellucid.evidence.trace import previews
from pellucid.evidence.trace.recorder import Recorder
from pellucid.interop.source import bundles
from pellucid.models.guidance import GUARDED_SCALE
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.prepare import make_plan
from pellucid.pipeline.recipe import Recipe, write_png
from pellucid.pipeline.request import Control, ImagePrompt, Lora
from pellucid.studio import form, html
from pellucid.studio.form import Form, ImageStart, Shelf, adapter
from pellucid.studio.html import status
from pellucid.studio.visitors import Job, Session, Sessions

# --- One run --------------------------------------------------------------------------------------------------------

EAGER = 0.25  # seconds that a decoded preview may take; slower ones are mapped linearly


@dataclass(frozen=True)
class StepNews:
    """A completed step: `x0` is the network's estimate of the image."""

    step: int
    steps: int
    sigma: float
    lam: float
    seconds: float
    x0: Tensor

    @property
    def words(self) -> str:
        left = self.seconds / self.step * (self.steps - self.step)
        return f"step {self.step} of {self.steps} · σ {self.sigma:.3g} · λ {self.lam:+.2f} · {left:.1f} s left"


@dataclass(frozen=True)
class RunResult:
    """The image, the file that holds it with its recipe, and its trace."""

    image: Image.Image
    file: Path
    trace: Path
    recipe: Recipe
    notes: tuple[str, ...]
    seconds: float


def run(pipe: Pipeline, setup: Form, session: Session, job: Job) -> RunResult:
    """Runs a set-up and reports its steps; the trace is recorded with tensors."""
    began = time.perf_counter()
    request = setup.request(cancelled=job.cancelled)
    steps = make_plan(pipe.components, request).plan.nfe

    def see(seen: StepSeen) -> None:
        level, taken = seen.next_levels[0], time.perf_counter() - began
        job.tell(StepNews(seen.index + 1, steps, level.sigma, level.lam, taken, seen.x0[:1].detach().clone()))

    trace = session.new_file(".trace.safetensors")
    with Recorder(trace, tensors=True) as recorder:
        made = pipe.run(replace(request, observers=(recorder, see)))
    file = session.new_file(".png")
    write_png(made.images[0], file, made.recipe)
    return RunResult(made.images[0], file, trace, made.recipe, made.notes, time.perf_counter() - began)


class Preview:
    """x0 as an image: by the model's VAE where that is quick, else by the linear map that explains it best."""

    def __init__(self, pipe: Pipeline) -> None:
        self.vae, self.look = pipe.components.vae, None
        self.quick = True

    def warm(self) -> None:
        """A first look, at grey: what a decoder sets up at its first call is then there."""
        channels = None if self.vae is None else self.vae.config.latent_channels
        if channels is not None:
            self.image(torch.zeros(1, channels, 16, 16))

    def image(self, x0: Tensor) -> Image.Image | None:
        x0 = x0.float().cpu()
        if self.look is None or self.quick:
            began = time.perf_counter()
            self.look = previews.preview_for(x0, self.vae)
            self.quick = time.perf_counter() - began < EAGER
        if self.look is None:
            return None
        linear: Any = self.look if self.quick else getattr(self.look, "linear", self.look)
        return html.of_unit(linear.image(x0))


# --- The tab --------------------------------------------------------------------------------------------------------

_TAB = "generate"
EXAMPLES = (
    "a large red star on a white background",
    "a small striped blue square above a large green circle on a grey background",
    "a dotted purple heart left of a checkered yellow pentagon on a pale blue background",
)
_EMPTY = html.block(html.frame(None, "", empty="The image appears here, step by step."))


READY = status("ready")
_QUIET: dict[str, Any] = {"show_progress": "hidden"}


class GenerateTab:
    """Builds the tab; its handlers use the loaded models and the sessions."""

    def __init__(self, shelf: Shelf, sessions: Sessions, model: gr.Dropdown, ran: gr.State) -> None:
        self.shelf, self.sessions = shelf, sessions
        with gr.Row():
            with gr.Column(scale=6, min_width=320):
                self.prompt = gr.Textbox(label="Prompt", lines=2, max_lines=6, elem_id="prompt")
                gr.Examples([[one] for one in EXAMPLES], self.prompt, label="Try")
                with gr.Row():
                    go = gr.Button("Generate", variant="primary", elem_id="generate")
                    stop = gr.Button("Cancel", variant="stop", elem_id="cancel")
                said = gr.HTML(READY, elem_id="status")
                shown = gr.HTML(_EMPTY, elem_id="image")
                file = gr.DownloadButton("Download with recipe", interactive=False, elem_id="download")
                with gr.Accordion("Recipe", open=False):
                    recipe = gr.Code("", language="json", label="repeats this image", elem_id="recipe")
            with gr.Column(scale=5, min_width=320):
                asked = [self.prompt, *self.controls()]
        outputs = [shown, said, file, recipe, ran]
        for event in (go.click, self.prompt.submit):
            event(self.generate, [model, *asked], outputs, trigger_mode="multiple", concurrency_limit=4, **_QUIET)
        stop.click(self.cancel, None, [said], queue=False)

    def controls(self) -> list[Any]:
        negative = gr.Textbox(label="Negative prompt", lines=1, elem_id="negative")
        with gr.Row():
            sampler = gr.Dropdown(form.sampler_choices(), value=form.OWN, label="Sampler", min_width=140)
            grid = gr.Dropdown(form.grid_choices(), value=form.OWN, label="Grid", min_width=140)
        with gr.Row():
            steps = gr.Number(20, label="Steps", precision=None, min_width=120, elem_id="steps")
            seed = gr.Textbox("7", label="Seed", placeholder="random", min_width=120, elem_id="seed")
        scale = gr.Slider(0, form.MOST_SCALE, 4.0, step=0.1, label="Guidance", elem_id="guidance")
        guarded = gr.Checkbox(False, label="Guarded", info=html.GUARDED, elem_id="guarded")
        guarded.change(guard, [guarded, scale], scale, show_progress="hidden")
        with gr.Accordion("From an image", open=False):
            start = gr.Image(label="Image", type="filepath", sources=["upload", "clipboard"], height=200)
            mask = gr.ImageEditor(
                label="Paint the area to regenerate (if empty: the whole image)",
                type="pil",
                sources=(),
                layers=False,
                transforms=(),
                brush=gr.Brush(colors=["#ff3366"], default_size=24),
                height=260,
            )
            start.change(self.fitted, start, mask, show_progress="hidden")
            strength = gr.Slider(0.05, 1.0, 0.7, step=0.05, label="Strength")
        with gr.Accordion("Adapters", open=False):
            adapters = self.adapters()
        return [negative, sampler, grid, steps, scale, guarded, seed, start, mask, strength, *adapters]

    def adapters(self) -> list[Any]:
        own = [f"{name}/{part}" for name in bundles() for part in ("lora", "controlnet", "ip_adapter")]

        def of(kind: str) -> list[str]:
            return ["", *(name for name in own if kind in name)]

        lora = gr.Dropdown(of("lora"), value="", label="LoRA", allow_custom_value=True)
        by = gr.Slider(-2, 2, 1.0, step=0.05, label="LoRA scale")
        control = gr.Dropdown(of("controlnet"), value="", label="ControlNet", allow_custom_value=True)
        hint = gr.Image(label="Image to follow (edges)", type="filepath", height=160)
        look = gr.Dropdown(of("ip_adapter"), value="", label="IP-Adapter", allow_custom_value=True)
        like = gr.Image(label="Image to resemble", type="filepath", height=160)
        return [lora, by, control, hint, look, like]

    def fitted(self, path: str | None) -> Any:
        """An upload in the editor, no larger than is needed to paint on it."""
        with html.plainly():
            if path is None:
                return None
            small = form.upload(path).convert("RGB")
            small.thumbnail((512, 512))
            return small

    @html.settled(5, 1)
    def generate(self, request: gr.Request, model: str, *given: Any) -> Iterator[tuple[Any, ...]]:
        session = self.sessions.of(request.session_hash)
        rest = (gr.skip(),) * 3
        setup = setup_of(*given)
        if model not in self.shelf.held:
            yield gr.skip(), status(f"loading {model} …"), *rest
        pipe = self.shelf.pipe(model)
        preview = Preview(pipe)
        yield gr.skip(), status("starting …"), gr.DownloadButton(interactive=False), "", gr.skip()
        try:
            for news in session.follow(_TAB, lambda job: run(pipe, setup, session, job)):
                if isinstance(news, StepNews):
                    made = preview.image(news.x0)
                    shown = html.block(html.frame(made, "preview", "x0, the network's estimate of the image"))
                    yield shown, status(news.words, news.step / news.steps), *rest
                    continue
                name = f"{session.count:04d} · {setup.prompt[:60]}"
                session.keep(name, news.trace)
                about = f"seed {news.recipe.seed} · {news.recipe.sampler} · {news.recipe.steps} steps"
                shown = html.block(html.frame(news.image, setup.prompt, about))
                file = gr.DownloadButton(value=str(news.file), interactive=True)
                yield shown, html.done(news), file, json.dumps(news.recipe.to_dict(), indent=2), name
        except Cancelled:
            if _TAB not in session.jobs:  # and no newer run took its place
                raise

    def cancel(self, request: gr.Request) -> str:
        self.sessions.of(request.session_hash).cancel(_TAB)
        return status("cancelled")


def guard(guarded: bool, scale: float) -> Any:
    """The slider goes as far as the guard lets it."""
    most = GUARDED_SCALE if guarded else form.MOST_SCALE
    return gr.Slider(0, most, min(scale, most), step=0.1)


def setup_of(
    prompt: str,
    negative: str,
    sampler: str,
    grid: str,
    steps: Any,
    scale: float,
    guarded: bool,
    seed: Any,
    start: str | None = None,
    mask: dict[str, Any] | None = None,
    strength: float = 0.7,
    lora: str = "",
    lora_scale: float = 1.0,
    control: str = "",
    hint: str | None = None,
    look: str = "",
    like: str | None = None,
) -> Form:
    """The set-up that the controls hold, in their order."""
    image = None if start is None else ImageStart(form.upload(start), painted(mask), strength)
    lora, control, look = adapter(lora, "LoRA"), adapter(control, "ControlNet"), adapter(look, "IP-Adapter")
    loras = (Lora(lora, lora_scale),) if lora else ()
    controls = (Control(control, form.needed(hint, "ControlNet")),) if control else ()
    likes = (ImagePrompt(look, form.needed(like, "IP-Adapter")),) if look else ()
    return Form(
        prompt=prompt,
        negative=negative or "",
        sampler=sampler,
        grid=grid,
        steps=steps,
        guidance=scale,
        guarded=guarded,
        seed=seed,
        image=image,
        loras=loras,
        controls=controls,
        image_prompts=likes,
    )


def painted(editor: dict[str, Any] | None) -> Image.Image | None:
    """White where the mask was painted; None for an empty mask."""
    layers = [layer for layer in (editor or {}).get("layers") or () if layer is not None]
    for layer in layers:
        alpha = layer.convert("RGBA").getchannel("A").point(lambda value: 255 if value > 8 else 0)
        if alpha.getbbox() is not None:
            return alpha
    return None
