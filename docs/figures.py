"""The figures and measured tables of the handbook: a function each, run when the site is built.

`make(FOLDER)` writes what is missing, or older than this file or the engine. By hand, all of it or by name:

    .venv/bin/python docs/figures.py [NAME.png NAME.md …]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import pellucid
from pellucid import scenes, schedules
from pellucid.core import target as targets
from pellucid.core.batch import StepSeen
from pellucid.core.plan import REGISTERS
from pellucid.evidence import qualities
from pellucid.evidence.drawing import graph as graph_drawing
from pellucid.evidence.report.charts import COLOURS, INK, MARKS, SLATE, canvas, log_y, quiet, save
from pellucid.evidence.trace.previews import decode, preview_for, signed
from pellucid.labs.catalog import LABS
from pellucid.models.vae import to_diffusion
from pellucid.pipeline.compare import compare as compare_strategies
from pellucid.pipeline.compare import strategies
from pellucid.pipeline.encoders.text import encode_prompts
from pellucid.pipeline.inspection import GraphOptions
from pellucid.pipeline.inspection_graph import inspect
from pellucid.pipeline.memory import request_for, size_text
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.result import Result
from pellucid.train.explain import explain
from pellucid.train.objective import Times

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import network_cost

ROOT = Path(__file__).resolve().parents[1]
MADE = Path(__file__).resolve().parent / "handbook" / "made"
ROOMS = ("core", "models", "interop", "pipeline", "scenes", "train", "evidence", "bundles")
UNET_RECIPE, DIT_RECIPE = ROOT / "configs" / "scenes_text_unet.toml", ROOT / "configs" / "scenes_text_dit.toml"
PROMPT = "a large red star above a small striped blue square on a grey background"
USUAL: dict[str, Any] = {"sampler": "dpmpp_2m", "grid": "trailing", "steps": 20, "guidance": "4"}

Drawer = Callable[[Path], None]
FIGURES: dict[str, Drawer] = {}  # by file name, in the order of the handbook


def drawn(name: str) -> Callable[[Drawer], Drawer]:
    """A function that draws the file `name`."""

    def keep(draw: Drawer) -> Drawer:
        FIGURES[name] = draw
        return draw

    return keep


# What the figures share.


@cache
def model() -> Pipeline:
    """The embedded model."""
    return pellucid.load("scenes-128")


def ask(prompt: str | Sequence[str], seed: int | Sequence[int], **changed: Any) -> Result:
    """Images with the settings of the handbook, except what is `changed`. Guidance is taken literally."""
    return model()(prompt, seed=seed, **{**USUAL, **changed})


def pixels(made: Result) -> Tensor:
    """(N, 3, H, W) in [0, 1]."""
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 for image in made.images])


@torch.no_grad()
def latents_of(images: Tensor) -> Tensor:
    """Images in [−1, 1] → latents as diffusion has them (the posterior's mean)."""
    vae: Any = model().components.vae
    return to_diffusion(vae.config, vae.encode(images).mean)


def context_of(prompts: Sequence[str]) -> Tensor:
    parts = model().components
    return encode_prompts(parts.text_encoders, parts.tokenizers, prompts).context


@torch.no_grad()
def x0_of(x: Tensor, at: float, prompts: Sequence[str]) -> Tensor:
    """What the embedded network makes of x at a training time, without guidance."""
    parts, context = model().components, context_of(prompts)
    network: Any = parts.network
    denoise = pellucid.denoiser(lambda x, told: network(x, told, context), parts.schedule, parts.target)
    x0 = denoise(x, parts.schedule.level(at), at)
    assert isinstance(x0, Tensor)
    return x0


def described(count: int, **asked: Any) -> tuple[Tensor, list[str]]:
    """True images in [−1, 1] of unseen scenes, and their full captions."""
    batch = scenes.sample(torch.arange(count), seed=17, split="held_out", styles=("flat",), **asked)
    return scenes.render(batch, 128), [caption for caption, _ in scenes.described(batch, full=True)]


def noise_like(x: Tensor, seed: int = 0) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> str:
    """Markdown, the first column to the left and the others to the right."""
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *rows]
    body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"{body}\n" + (f"\n{note}\n" if note else "")


@dataclass
class Cell:
    """An image of a sheet, with words above it or below."""

    image: Tensor | Image.Image
    above: str = ""
    below: str = ""


def sheet(rows: Sequence[Sequence[Cell]], names: Sequence[str], path: Path, inch: float = 1.25) -> None:
    """Images in rows, each row with its name to the left."""
    across = max(map(len, rows))
    left, gap, over, under = 1.15 if any(names) else 0.1, 0.08, 0.34, 0.34
    high = [
        inch + (over if any(c.above for c in row) else gap) + (under if any(c.below for c in row) else 0)
        for row in rows
    ]
    width, height = left + across * (inch + gap) + gap, sum(high) + 2 * gap
    figure, y = canvas(width, height), height - gap
    for row, name, tall in zip(rows, names, high, strict=True):
        top = y - (over if any(c.above for c in row) else gap)
        figure.text(0.08 / width, (top - inch / 2) / height, name, fontsize=8.5, color=INK, va="center", wrap=True)
        for place, cell in enumerate(row):
            x = left + place * (inch + gap)
            axes = figure.add_axes((x / width, (top - inch) / height, inch / width, inch / height))
            axes.imshow(as_array(cell.image), interpolation="nearest", vmin=0, vmax=1)
            axes.set_axis_off()
            middle = (x + inch / 2) / width
            figure.text(middle, (top + 0.04) / height, cell.above, fontsize=8, color=SLATE, ha="center", va="bottom")
            low = (top - inch - 0.05) / height
            figure.text(middle, low, cell.below, fontsize=8, color=SLATE, ha="center", va="top")
        y -= tall
    save(figure, path, dpi=130)


def as_array(image: Tensor | Image.Image) -> Any:
    if isinstance(image, Image.Image):
        return np.asarray(image)
    return image.clamp(0, 1).permute(1, 2, 0).numpy()


# The front page.


@drawn("front.png")
def front(path: Path) -> None:
    """Three prompts on their way from noise: the latents of every few calls, decoded."""
    prompts = [
        PROMPT,
        "a dotted purple heart left of a checkered yellow pentagon on a pale blue background",
        "a large orange crescent in front of a green square on a cream background",
    ]
    seen: list[Tensor] = []
    made = ask(prompts, [7, 7, 7], observers=[lambda step: seen.append(step.x)])
    vae = model().components.vae
    shown = [0, 3, 6, 9, 12, 15, 18]
    strips = [decode(vae, torch.stack([seen[i][row] for i in shown])) for row in range(3)]
    rows = [[*(Cell(p) for p in strip), Cell(image)] for strip, image in zip(strips, made.images, strict=True)]
    sheet(rows, ["", "", ""], path, inch=1.05)


# Objective.


@drawn("errors_by_level.png")
def errors_by_level(path: Path) -> None:
    """The error of one network, read as eps, x0 and v, at twelve noise levels."""
    images, captions = described(16)
    clean, parts = latents_of(images), model().components
    noise = noise_like(clean)
    found: dict[str, list[float]] = {"x0": [], "eps": [], "v": []}
    lams = []
    for at in np.linspace(20, 985, 12):
        level = parts.schedule.level(float(at))
        x = level.alpha * clean + level.sigma * noise
        wrong = (x0_of(x, float(at), captions) - clean).square().mean().item()
        lams.append(level.lam)
        for target, errors in found.items():
            errors.append(wrong * targets.from_x0(target, level)[1] ** 2)  # type: ignore[arg-type]
    figure = canvas(7, 3.6)
    axes = figure.add_subplot()
    for place, (target, errors) in enumerate(found.items()):
        axes.plot(lams, errors, color=COLOURS[place], marker=MARKS[place], markersize=5, label=target)
    quiet(
        axes,
        "One network, its error in three targets",
        "λ = ln(α/σ): noise to the left, images to the right",
        "mean squared error",
    )
    log_y(axes)
    axes.legend(frameon=False, title="error of")
    figure.tight_layout()
    save(figure, path)


@drawn("where_schedules_train.md")
def where_schedules_train(path: Path) -> None:
    """Shares of training times by noise level."""
    asked = [
        ("linear", "linear", Times()),
        ("cosine", "cosine", Times()),
        ("sqrt of ᾱ", "sqrt_alpha_bar", Times()),
        ("flow", "flow", Times()),
        ("flow, logit-normal times", "flow", Times("logit_normal")),
    ]
    rows = []
    for name, schedule, times in asked:
        curve = schedules.make(schedule)
        drawn_times = times.draw(100_000, curve, torch.Generator().manual_seed(0))
        lams = -np.log(np.asarray(curve.ratio_at(drawn_times)))
        shares = [(lams < -2).mean(), ((lams >= -2) & (lams <= 2)).mean(), (lams > 2).mean()]
        rows.append([name, *(f"{100 * share:.0f} %" for share in shares)])
    head = ["schedule", "λ < −2: mostly noise", "−2 to 2: content", "λ > 2: detail"]
    path.write_text(table(head, rows, "Shares of 100,000 drawn training times."), encoding="utf-8")


@drawn("ranks.md")
def ranks(path: Path) -> None:
    """What eight ranks hold and send, for the embedded UNet."""
    network = network_cost.networks_of(UNET_RECIPE)["UNet"]
    rows = []
    for name, strategy, accumulate in (("DDP", "ddp", 1), ("FSDP", "fsdp", 1), ("FSDP, 4 micro-steps", "fsdp", 4)):
        told = explain(network, 8, strategy, accumulate=accumulate, ema=[1.0])  # type: ignore[arg-type]
        kinds = {
            c.operation: sum(d.times for d in told.collectives if d.operation == c.operation) for c in told.collectives
        }
        calls = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        rows.append([name, size_text(told.bytes_per_rank), size_text(told.sent_per_step), calls])
    head = ["strategy", "kept per rank", "sent per rank and step", "collectives per step"]
    count = sum(p.numel() for p in network.parameters())
    note = f"The UNet of scenes-128 ({count:,} parameters, float32, AdamW, one running mean) on 8 ranks, not run."
    path.write_text(table(head, rows, note), encoding="utf-8")


# Forward and reverse.


@drawn("forward.png")
def forward(path: Path) -> None:
    """One image noised at the same training times under three schedules."""
    image = described(1)[0]
    noise, rows, names = noise_like(image), [], []
    for name, label in (("linear", "linear"), ("cosine", "cosine"), ("sqrt_alpha_bar", "sqrt of ᾱ")):
        curve = schedules.make(name)
        cells = []
        for at in (0, 150, 300, 450, 600, 800, 999):
            level = curve.level(at)
            x = level.alpha * image[0] + level.sigma * noise[0]
            cells.append(Cell(x / 2 + 0.5, f"t = {at}" if not rows else "", f"ᾱ = {level.alpha**2:.2g}"))
        rows.append(cells)
        names.append(label)
    sheet(rows, names, path, inch=1.05)


@drawn("one_call.png")
def one_call(path: Path) -> None:
    """From ever noisier versions of one image: what one call says, and where a whole run ends."""
    batch = scenes.sample(torch.arange(1), seed=17, split="held_out", styles=("flat",))
    ((caption, _),) = scenes.described(batch, full=True)
    clean, curve, vae = latents_of(scenes.render(batch, 128)), model().components.schedule, model().components.vae
    given, called, walked = [], [], []
    for at in (200, 500, 700, 850, 950, 995):
        level = curve.level(at)
        x = level.alpha * clean + level.sigma * noise_like(clean, 3)
        said = x0_of(x, at, [caption])
        run = ask(caption, 3, image=clean_image(clean), strength=at / 999, guidance="off")
        away = float((run.latents - clean).square().mean().sqrt())
        given.append(Cell(decode(vae, x)[0], f"t = {at}"))
        called.append(Cell(decode(vae, said)[0], below=f"off by {float((said - clean).square().mean().sqrt()):.2f}"))
        walked.append(Cell(run.images[0], below=f"off by {away:.2f}"))
    sheet([given, called, walked], ["x", "one call", "a run of\n20 calls"], path, inch=1.1)


def clean_image(latents: Tensor) -> Image.Image:
    array = (decode(model().components.vae, latents)[0] * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(array)


# Backbone.


@drawn("backbones.md")
def backbones(path: Path) -> None:
    """What a call of a UNet and of a DiT of one size costs, against the side of the latents."""
    found = network_cost.compare(network_cost.networks_of(UNET_RECIPE, DIT_RECIPE), (16, 32, 48), rounds=3, calls=1)
    rows = []
    for side in (16, 32, 48):
        by = {cost.network: cost for cost in found.costs if cost.side == side}
        cells = [f"{by[n].flops / 1e9:.2f}" for n in ("UNet", "DiT")]
        cells += [size_text(by[n].activations) for n in ("UNet", "DiT")]
        cells += [f"{by[n].milliseconds:.0f}" for n in ("UNet", "DiT")]
        rows.append([f"{side} × {side}", *cells])
    what = ("GFLOP", "activations", "ms")
    head = ["latents", *(f"{w}, {n}" for w in what for n in ("UNet", "DiT"))]
    sizes = ", ".join(f"{n} {count / 1e6:.2f} M" for n, count in found.parameters.items())
    note = f"One call, one image, float32, CPU threads: {found.threads}; random weights. Parameters: {sizes}."
    path.write_text(table(head, rows, note), encoding="utf-8")


# Scheduler and sampler.


@drawn("tables.md")
def tables(path: Path) -> None:
    """Two samplers as the tables that they are."""
    told = []
    for name in ("euler", "dpmpp_2m"):
        plan = pellucid.compile_plan(name, schedule="cosine", target="v", grid="trailing", steps=5)
        used = [i for i in range(len(REGISTERS)) if any(i in dict(row.x) for row in plan.rows)]
        rows = []
        for place, row in enumerate(plan.rows):
            weights = (f"{dict(row.x).get(register, 0.0):.4f}" for register in used)
            rows.append([str(place), f"{row.time:.1f}", f"{row.level.sigma / row.level.alpha:.3g}", *weights])
        head = ["row", "timestep", "σ/α", *(f"× {REGISTERS[register]}" for register in used)]
        told.append(
            f"`{name}`, 5 steps on the schedule of scenes-128; law holds to {plan.deviation:.0e}:\n\n"
            + table(head, rows)
        )
    path.write_text("\n".join(told), encoding="utf-8")


@drawn("calls_and_error.png")
def calls_and_error(path: Path) -> None:
    """Distance from the converged latents over model calls, for samplers on the embedded model."""
    prompts = [caption for caption, _ in scenes.prompts(3, objects=1, seed=5, split="held_out")]
    truth = ask(
        prompts, [1, 2, 3], sampler="dpmpp_3m", grid="exponential", steps=50, decode=False, guidance="off"
    ).latents
    asked = [
        ("Euler = DDIM, trailing", "euler", "trailing"),
        ("DPM++ 2M, trailing", "dpmpp_2m", "trailing"),
        ("DPM++ 2M, karras", "dpmpp_2m", "karras"),
        ("UniPC, trailing", "unipc", "trailing"),
    ]
    figure = canvas(7, 4)
    axes = figure.add_subplot()
    for place, (label, sampler, grid) in enumerate(asked):
        calls, errors = [], []
        for steps in (5, 8, 12, 20):
            made = ask(prompts, [1, 2, 3], sampler=sampler, grid=grid, steps=steps, decode=False, guidance="off")
            calls.append(made.plan.nfe)
            errors.append(float((made.latents - truth).square().mean().sqrt()))
        axes.plot(calls, errors, color=COLOURS[place], marker=MARKS[place], markersize=5, label=label)
    quiet(axes, "scenes-128, unguided: distance from the converged latents", "model calls", "root mean square distance")
    log_y(axes)
    axes.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    save(figure, path)


# Guidance.

SCALES = ("off", "2", "4", "7", "15")


@drawn("guidance.png")
def guidance(path: Path) -> None:
    """One seed under five scales, plain and with two rules."""
    prompt = "a small checkered teal cross left of a large pink diamond on a cream background"
    rows = []
    for rule in ("", " + rescale", " + apg"):
        cells = []
        for scale in SCALES:
            if rule and scale == "off":  # nothing is guided: the same image again
                cells.append(Cell(rows[0][0].image))
                continue
            made = ask(prompt, 11, guidance=scale if scale == "off" else scale + rule)
            colour = float(qualities.colourfulness(pixels(made)))
            name = "" if rule else "no guidance" if scale == "off" else f"scale {scale}"
            cells.append(Cell(made.images[0], name, f"colourfulness {colour:.2f}"))
        rows.append(cells)
    sheet(rows, ["plain", "rescale", "APG"], path)


@drawn("guidance.md")
def guidance_table(path: Path) -> None:
    """What scales do to adherence, colours and variety."""
    asked = scenes.prompts(4, objects=2, seed=3, split="held_out")
    prompts = [caption for caption, _ in asked for _ in range(2)]
    queries = [query for _, query in asked for _ in range(2)]
    rows = []
    for scale in SCALES:
        found = pixels(ask(prompts, list(range(8)), guidance=scale, steps=10))
        right = sum(grade.right for grade in scenes.grade(found * 2 - 1, queries))
        variety = statistics.mean(float(qualities.diversity(found[2 * i : 2 * i + 2]).mean()) for i in range(4))
        colour, clipped = float(qualities.colourfulness(found).mean()), 100 * float(qualities.saturation(found).mean())
        rows.append([scale, f"{right} of 8", f"{colour:.3f}", f"{clipped:.1f} %", f"{variety:.3f}"])
    head = ["scale", "all right", "colourfulness", "clipped values", "difference between two seeds"]
    note = "Plain guidance, 10 steps, 4 held-out prompts of two objects, two seeds each: few images, so read the trend."
    path.write_text(table(head, rows, note), encoding="utf-8")


# VAE.


@drawn("vae.png")
def vae_figure(path: Path) -> None:
    """An image, its latents, the image again, and what was lost."""
    images, _ = described(2)
    latents = latents_of(images)
    back = decode(model().components.vae, latents)
    rows = []
    for i in range(2):
        truth = images[i] / 2 + 0.5
        channels = [Cell((latents[i, c] / 6 + 0.5).expand(3, -1, -1), f"channel {c}", "16 × 16") for c in range(4)]
        lost = (back[i] - truth).abs()
        rows.append(
            [
                Cell(truth, "image", "128 × 128 × 3"),
                *channels,
                Cell(back[i], "decoded", f"{psnr(back[i], truth):.1f} dB"),
                Cell(lost * 10, "lost, × 10", f"at most {float(lost.max()):.2f}"),
            ]
        )
    sheet(rows, ["", ""], path, inch=1.1)


def psnr(one: Tensor, other: Tensor) -> float:
    return float(-10 * torch.log10((one - other).square().mean()))


@drawn("vae.md")
def vae_table(path: Path) -> None:
    """The numbers of the embedded VAE, and what decoding costs beside a call of the denoiser."""
    images, captions = described(16)
    latents = latents_of(images)
    vae: Any = model().components.vae
    back = decode(vae, latents)
    values = images[0].numel() / latents[0].numel()
    rows = [
        [
            "numbers of an image, of its latents",
            f"{images[0].numel():,}, {latents[0].numel():,} ({values:.0f} times fewer)",
        ],
        ["standard deviation of the latents, after `scaling_factor`", f"{float(latents.std()):.2f}"],
        [
            "round trip of 16 unseen scenes",
            f"{statistics.mean(psnr(b, p / 2 + 0.5) for b, p in zip(back, images, strict=True)):.1f} dB",
        ],
        ["one call of the denoiser", f"{milliseconds(lambda: x0_of(latents[:1], 500, captions[:1])):.0f} ms"],
        ["decoding one image", f"{milliseconds(lambda: decode(vae, latents[:1])):.0f} ms"],
        ["encoding one image", f"{milliseconds(lambda: latents_of(images[:1])):.0f} ms"],
    ]
    path.write_text(table(["scenes-128", "measured"], rows), encoding="utf-8")


def milliseconds(work: Callable[[], object], rounds: int = 7) -> float:
    """The fastest of some rounds, after one to warm up: others may be using the machine."""
    work()
    took = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        took.append(1000 * (time.perf_counter() - start))
    return min(took)


# Text.


@drawn("one_word.png")
def one_word(path: Path) -> None:
    """The same noise, one word of the prompt changed at a time."""
    changes = ["", "red → green", "star → heart", "above → left of", "striped → dotted", "grey → pale green"]
    cells, first = [], None
    for change in changes:
        old, _, new = change.partition(" → ")
        prompt = PROMPT.replace(old, new) if change else PROMPT
        made = ask(prompt, 7)
        first = made.latents if first is None else first
        moved = float((made.latents - first).square().mean().sqrt())
        cells.append(Cell(made.images[0], change or "the prompt", f"moved by {moved:.2f}"))
    sheet([cells], [""], path, inch=1.3)


@drawn("attention.png")
def attention(path: Path) -> None:
    """Where the words act: maps of cross-attention, the mean of heads, calls and layers of 16 × 16."""
    words = ("large", "red", "star", "above", "striped", "blue", "square", "grey")
    maps: list[Tensor] = []
    network: Any = model().components.network
    hooks = [
        module.register_forward_hook(watch_attention(maps), with_kwargs=True)
        for name, module in network.named_modules()
        if name.endswith("attn2")
    ]
    made = ask(PROMPT, 7, guidance="off", steps=20)
    for hook in hooks:
        hook.remove()
    mean = torch.stack([m for m in maps if m.shape[0] == 256]).mean(0)  # (256, tokens)
    places = token_places(PROMPT, words)
    cells = [Cell(made.images[0], "image")]
    for word in words:
        shown = mean[:, places[word]].reshape(16, 16)
        shown = (shown - shown.min()) / (shown.max() - shown.min())
        cells.append(Cell(shown.expand(3, -1, -1), f"“{word}”"))
    sheet([cells[:5], [cells[0], *cells[5:]]], ["", ""], path, inch=1.2)


def watch_attention(maps: list[Tensor]) -> Callable[..., None]:
    def watch(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        x, context = args[0], kwargs.get("context", args[1] if len(args) > 1 else None)
        q = module.to_q(x).unflatten(-1, (module.heads, -1)).transpose(1, 2)
        k = module.to_k(context).unflatten(-1, (module.heads, -1)).transpose(1, 2)
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)  # (B, heads, pixels, tokens)
        maps.append(weights[-1].mean(0).detach())

    return watch


def token_places(prompt: str, words: Sequence[str]) -> dict[str, int]:
    """The place of each word's last token, counted by encoding ever longer beginnings of the prompt."""
    (tokenizer,) = model().components.tokenizers
    found = {}
    for word in words:
        before = prompt[: prompt.index(word) + len(word)]
        found[word] = len(tokenizer.ids(before))  # the start token is at 0
    return found


# Pipeline.


@drawn("pipeline.png")
def pipeline(path: Path) -> None:
    """The embedded model as a graph."""
    graph_drawing.draw_graph(inspect("scenes-128", GraphOptions(steps=20, guidance="4")), path)


@drawn("pipeline.md")
def pipeline_table(path: Path) -> None:
    graph = inspect("scenes-128", GraphOptions(steps=20, guidance="4"))
    path.write_text(table(graph_drawing.component_columns(graph), graph_drawing.components(graph)), encoding="utf-8")


# The loop.


@cache
def ten_calls() -> tuple[Result, list[StepSeen]]:
    seen: list[StepSeen] = []
    return ask(PROMPT, 7, steps=10, observers=[seen.append]), seen


@drawn("loop.png")
def loop(path: Path) -> None:
    """A run of ten calls: the state, what the network says, what guidance changed."""
    made, seen = ten_calls()
    x0 = torch.cat([step.x0 for step in seen])
    delta = x0 - torch.cat([step.parts["cond"] for step in seen])
    look = preview_for(x0, model().components.vae)
    assert look is not None
    changes = look.change(x0, delta)
    told = [f"σ/α {step.row.level.sigma / step.row.level.alpha:.3g}" for step in seen]
    last = Cell(made.images[0], "decoded")
    rows = [
        [Cell(p, t) for p, t in zip(look.colours(torch.cat([s.x for s in seen])), told, strict=True)] + [last],
        [Cell(p) for p in look.image(x0)],
        [Cell(p) for p in signed(changes, float(changes.abs().max()))],
    ]
    sheet(rows, ["x, the state", "x0, the\nprediction", "what guidance\nchanged"], path, inch=0.85)


@drawn("loop.md")
def loop_table(path: Path) -> None:
    """The same run in numbers."""
    rows, before = [], None
    for step in ten_calls()[1]:
        delta = step.x0 - step.parts["cond"]
        moved = "" if before is None else f"{rms(step.x0 - before):.2f}"
        level = step.row.level
        cells = [
            f"{step.row.time:.0f}",
            f"{level.sigma / level.alpha:.3g}",
            f"{rms(step.x):.2f}",
            f"{rms(step.x0):.2f}",
        ]
        rows.append([str(step.index), *cells, f"{rms(delta):.2f}", moved])
        before = step.x0
    head = ["call", "timestep", "σ/α", "size of x", "size of x0", "part of guidance", "x0 moved by"]
    path.write_text(table(head, rows, "Root mean squares over the latents."), encoding="utf-8")


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


# Memory and speed.


@drawn("strategies.md")
def strategies_table(path: Path) -> None:
    """What each saving saves and costs, for the embedded model at a size that shows it."""
    pipe = model()
    request = request_for(pipe, size=(192, 192), batch=2, steps=1)
    asked = [
        s for s in strategies(pipe, request, request)[0] if s.name not in ("attention=flash", "channels_last=True")
    ]
    found = compare_strategies(pipe, asked, lambda: None, repeats=1)
    rows = []
    for row in found:
        stage = max(row.measured, key=lambda name: row.measured[name])
        cells = [size_text(row.predicted[stage]), size_text(row.measured[stage]), stage]
        rows.append([row.strategy.name, *cells, f"{row.times or 1:.2f}", f"{row.mean or 0:.2g}"])
    head = ["strategy", "predicted peak", "measured peak", "in stage", "relative time", "pixels changed by (of 255)"]
    note = "scenes-128 at 192 × 192, two images, one step, on the CPU. Times are ratios to runs just before and after."
    path.write_text(table(head, rows, note), encoding="utf-8")


@drawn("steps_and_seconds.md")
def steps_and_seconds(path: Path) -> None:
    """Where the time of an image goes, by steps and by guidance."""
    rows = []
    for steps, scale in ((10, "4"), (20, "4"), (20, "off")):
        runs = [ask(PROMPT, 7, steps=steps, guidance=scale) for _ in range(5)]
        spent = {
            s.name: min(next(t for t in run.stages if t.name == s.name).seconds for run in runs) for s in runs[0].stages
        }
        cells = [f"{1000 * spent[name]:.0f} ms" for name in ("text", "denoise", "decode")]
        rows.append([str(steps), scale, *cells, f"{1000 * spent['denoise'] / steps:.1f} ms"])
    head = ["steps", "guidance", "text", "denoising", "decoding", "per step"]
    path.write_text(
        table(head, rows, f"One image, the fastest of five; CPU threads: {torch.get_num_threads()}."),
        encoding="utf-8",
    )


# Adapters.


@drawn("adapters.png")
def adapters(path: Path) -> None:
    """The same noise and prompts: bare, under a ControlNet, with a LoRA, with both."""
    batch = scenes.sample(torch.arange(3), seed=21, split="held_out", styles=("flat",), objects=(2,))
    captions = [caption for caption, _ in scenes.described(batch)]
    edges = scenes.edges(batch, 128)
    hints = [Image.fromarray((e[0] * 255).round().byte().numpy()).convert("RGB") for e in edges]
    rows: list[list[Cell]] = [[], [], [], []]
    for caption, hint in zip(captions, hints, strict=True):
        control, style = pellucid.Control("scenes-128/controlnet", hint), pellucid.Lora("scenes-128/lora")
        rows[0].append(Cell(hint))
        for row, worn in enumerate(({}, {"controls": [control]}, {"loras": [style]}), 1):
            rows[row].append(Cell(ask(caption, 5, **worn).images[0]))
    turned = [list(cells) for cells in zip(*rows, strict=True)]
    for cell, name in zip(turned[0], ("outlines", "the base", "ControlNet", "LoRA"), strict=True):
        cell.above = name
    sheet(turned, [wrapped(caption) for caption in captions], path, inch=1.3)


def wrapped(words: str, width: int = 15) -> str:
    lines = [""]
    for word in words.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


@drawn("adapters.md")
def adapters_table(path: Path) -> None:
    """What adapters weigh, cost and do."""
    count = 6
    batch = scenes.sample(torch.arange(count), seed=22, split="held_out", styles=("flat",), objects=(2,))
    captions = [caption for caption, _ in scenes.described(batch)]
    edges, seeds = scenes.edges(batch, 128), list(range(count))
    hints = [Image.fromarray((e[0] * 255).round().byte().numpy()).convert("RGB") for e in edges]
    style = pellucid.Lora(model().load_lora("scenes-128/lora"))
    worn: dict[str, Callable[[int], dict[str, Any]]] = {
        "the base": lambda i: {},
        "ControlNet": lambda i: {"controls": [pellucid.Control("scenes-128/controlnet", hints[i])]},
        "LoRA": lambda i: {"loras": [style]},
    }
    rows = []
    for name, kind in worn.items():
        made = [ask(captions[i], seeds[i], **kind(i)) for i in range(count)]
        found = torch.cat([pixels(one) for one in made]) * 2 - 1
        took = min(1000 * sum(stage.seconds for stage in one.stages) for one in made)
        near = float(scenes.edge_f1(found, edges).mean())
        sketched = sum(s == "sketch" for s in scenes.style_of(found))
        rows.append([name, f"{near:.2f}", f"{sketched} of {count}", f"{took:.0f} ms"])
    head = ["same noise, same prompts", "outlines followed (F1)", "in the style of a sketch", "per image"]
    path.write_text(table(head, rows, f"{count} held-out scenes of two objects; the fastest image."), encoding="utf-8")


# Serving.


@drawn("batches.md")
def batches(path: Path) -> None:
    """Throughput against the wait of a request, by the size of a batch."""
    rows = []
    for count in (1, 2, 4):
        took = milliseconds(lambda count=count: ask([PROMPT] * count, list(range(count)), steps=8), 6)  # type: ignore[misc]
        rows.append([str(count), f"{took:.0f} ms", f"{1000 * count / took:.1f}"])
    head = ["images per batch", "a request waits", "images per second"]
    note = (
        f"scenes-128, 8 steps, CPU threads: {torch.get_num_threads()}. A GPU has idle units at batch 1 and gains more."
    )
    path.write_text(table(head, rows, note), encoding="utf-8")


# Making.


def engine_time() -> float:
    """When the engine, or this file, last changed."""
    files = [path for room in ROOMS for path in (ROOT / "src" / "pellucid" / room).rglob("*") if path.suffix != ".pyc"]
    return max(path.stat().st_mtime for path in [Path(__file__), *files] if path.is_file())


def placeholder(path: Path) -> None:
    """Stands for a figure where only the pages are tested."""
    if path.suffix == ".png":
        Image.new("RGB", (16, 16), "lightgrey").save(path)
    else:
        path.write_text(table(["not measured", ""], [["", ""]]), encoding="utf-8")


def labs_of(section: str) -> str:
    """The labs of a page of the handbook, as links."""
    here = [lab for lab in LABS if lab.section == section and lab.page.exists()]
    return "".join(f"- {{doc}}`Lab {lab.code}: {lab.title} </labs/{lab.stem}>`. {lab.question}\n" for lab in here) or (
        "- {doc}`All labs </labs/index>`\n"
    )


def make(folder: Path, placeholders: bool = False) -> None:
    """Writes what is missing or old. `placeholders`: what is missing alone, and without measuring."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in folder.parent.glob("*.md"):
        (folder / f"labs_{page.stem}.md").write_text(labs_of(page.stem), encoding="utf-8")
    changed = 0.0 if placeholders else engine_time()
    for name, draw in FIGURES.items():
        path = folder / name
        if path.exists() and path.stat().st_mtime > changed:
            continue
        start = time.perf_counter()
        (placeholder if placeholders else draw)(path)
        if not placeholders:
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    MADE.mkdir(exist_ok=True)
    for asked in sys.argv[1:] or FIGURES:
        begun = time.perf_counter()
        FIGURES[asked](MADE / asked)
        print(f"{asked}: {time.perf_counter() - begun:.1f} s", flush=True)
