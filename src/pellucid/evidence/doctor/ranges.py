"""Checks of the range of numbers: the scale of latents, and values that overflow a dtype."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.core import target as targets
from pellucid.core.denoiser import input_scale, read_output
from pellucid.core.noise import Philox
from pellucid.evidence.doctor.checks import Finding, check
from pellucid.evidence.doctor.probe import Probe, check_askable, clean_latents, conditions_of, head
from pellucid.evidence.doctor.subject import KnownImages, Subject
from pellucid.models.vae import from_diffusion, to_diffusion
from pellucid.pipeline.encoders.image_inputs import is_inpainting
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.prepare import working_dtype
from pellucid.pipeline.request import Request

# --- Scale of latents -----------------------------------------------------------------------------------------------

BATCH = 8
RESAMPLES = 400
TINY = 1e-12
LEVEL = 0.99
# Factors by which the spread may be off: images of one kind differ by 15 %, those of another kind by more.
OFF, SEEN, FAR = 1.25, 1.6, 2.5  # worth a note, a warning, an error
SHIFTED = 0.5  # standard deviations by which the mean may be off


@check("scale of the VAE", needs=("vae", "data"))
def vae_scale(subject: Subject) -> Iterator[Finding]:
    """The spread of encoded images against 1."""
    vae, data = subject.vae, subject.data
    assert data is not None
    latents = encoded(vae, data.pixels)
    spread, low, high = spread_of(latents)
    factor = float(vae.config.scaling_factor)
    right = factor / max(spread, TINY)
    facts = (
        ("standard deviation of the latents", spread), ("99 % interval", f"{low:.3g} to {high:.3g}"),
        ("images", len(data.pixels)), ("scaling_factor", factor), ("that makes it 1", right),
    )  # fmt: skip
    off = max(low, 1 / max(high, TINY))  # the end of the interval that is nearer to 1
    if off > OFF:
        yield Finding(
            "vae-scale",
            "error" if off > FAR else "warning" if off > SEEN else "note",
            f"encoded images have a standard deviation of {spread:.3g}, not 1",
            facts,
            "The scaling_factor is not the one of this VAE: noise of a schedule is measured against latents of "
            f"standard deviation 1, so every level is {max(spread, 1 / max(spread, TINY)):.2g} times too "
            f"{'clean' if spread > 1 else 'noisy'}.",
            f'"scaling_factor": {right:.4g} in vae/config.json, if these images are of the kind that was trained on',
        )
    mean = float(latents.mean())
    if abs(mean) > SHIFTED * spread:
        yield Finding(
            "vae-shift",
            "note",
            "encoded images are not centred",
            (("mean of the latents", mean), ("standard deviation", spread), ("shift_factor", shift_of(vae))),
            "The latents' mean is far from 0; VAEs of that kind name a shift_factor, which is taken off first.",
            "Compare shift_factor with that of the model's source.",
        )


def shift_of(vae: Any) -> float:
    return float(vae.config.shift_factor or 0.0)


@torch.no_grad()
def encoded(vae: Any, pixels: Tensor) -> Tensor:
    """(N, C, h, w) float32 on the CPU: the means of the posteriors, scaled for diffusion."""
    first = next(vae.parameters())
    multiple = vae.config.factor
    height, width = (side - side % multiple for side in pixels.shape[-2:])
    made = []
    for part in (pixels[..., :height, :width] * 2 - 1).split(BATCH):
        mean = vae.encode(part.to(first.device, first.dtype)).mean
        made.append(to_diffusion(vae.config, mean).float().cpu())
    return torch.cat(made)


def spread_of(latents: Tensor) -> tuple[float, float, float]:
    """The standard deviation over all images, and its interval over resampled ones."""
    flat = latents.double().flatten(1)
    moments = torch.stack((flat.mean(1), flat.square().mean(1)), 1)  # (N, 2)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(moments), (RESAMPLES, len(moments)), generator=generator)
    drawn = moments[rows].mean(1)  # (RESAMPLES, 2)
    spreads = (drawn[:, 1] - drawn[:, 0].square()).clamp_min(0).sqrt()
    low, high = torch.quantile(spreads, torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=spreads.dtype)).tolist()
    return float(flat.std(correction=0)), low, high


# --- Hooks on modules -----------------------------------------------------------------------------------------------

SENSE = 1e6  # what no activation of a sound network passes


@dataclass(frozen=True)
class Range:
    """Of the finite numbers of some tensors; `broken` counts the others."""

    low: float = 0.0
    high: float = 0.0
    broken: int = 0

    @property
    def most(self) -> float:
        return max(abs(self.low), abs(self.high))

    def text(self) -> str:
        return f"{self.low:.3g} to {self.high:.3g}" + (f", {self.broken} not finite" if self.broken else "")


@dataclass(frozen=True)
class BrokenModule:
    """The first output that was not finite: which module made it, from what, in which dtype.

    `between` says that no module made it, but the code of this one, between its parts. `in_float32` is the largest
    number that the module makes of the same input in float32, where it could be asked."""

    path: str
    kind: str
    dtype: torch.dtype
    inputs: Range
    outputs: Range
    between: bool = False
    weights: int = 0  # numbers of its own weights that are not finite
    in_float32: float | None = None
    grew: str = ""  # the first module before it whose numbers were already beyond any sense


@dataclass
class ModuleWatch:
    """What the hooks saw: the first broken output, and the largest finite number of each module."""

    first: BrokenModule | None = None
    largest: dict[str, float] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def see(self, path: str, module: nn.Module, given: Any, made: Any) -> None:
        if self.first is not None:
            return
        outputs = range_of(made)
        dtype = next((t.dtype for t in tensors(made)), torch.float32)
        self.largest[path] = max(outputs.most, self.largest.get(path, 0.0))
        self.dtypes[path] = dtype
        if not outputs.broken:
            return
        inputs = range_of(given)
        if inputs.broken:  # no module before this one made it: the code around it did
            around = path.rpartition(".")[0] or path
            self.first = BrokenModule(around, type(module).__name__, dtype, inputs, outputs, between=True)
            return
        held = sum(int((~torch.isfinite(p)).sum()) for p in module.parameters())
        wider = None if held else largest_in_float32(module, given)
        grew = next((one for one, most in self.largest.items() if one != path and most > SENSE), "")
        self.first = BrokenModule(path, type(module).__name__, dtype, inputs, outputs, False, held, wider, grew)


def tensors(tree: Any) -> Iterator[Tensor]:
    """The floating-point tensors of a tree of tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        if tree.is_floating_point() and tree.numel():
            yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from tensors(value)


def range_of(tree: Any) -> Range:
    lows, highs, broken = [0.0], [0.0], 0
    for tensor in tensors(tree):
        low, high = (float(end) for end in tensor.aminmax())
        if not (abs(low) < float("inf") and abs(high) < float("inf")):
            finite = tensor[torch.isfinite(tensor)]
            broken += tensor.numel() - finite.numel()
            if not finite.numel():
                continue
            low, high = (float(end) for end in finite.aminmax())
        lows.append(low)
        highs.append(high)
    return Range(min(lows[1:], default=0.0), max(highs[1:], default=0.0), broken)


@torch.no_grad()
def largest_in_float32(module: nn.Module, given: Any) -> float | None:
    """The largest number that a module makes of an input in float32; None where it makes none that is finite."""
    args, kwargs = given
    try:
        # forward itself: the copy carries the hooks of the module, which are not to see this
        made = range_of(copy.deepcopy(module).float().forward(*widened(args), **widened(kwargs)))
    except (RuntimeError, TypeError, ValueError):
        return None
    return None if made.broken else made.most


def widened(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.float() if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {name: widened(value) for name, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(widened(value) for value in tree))
    return type(tree)(widened(value) for value in tree) if isinstance(tree, tuple | list) else tree


@contextmanager
def watch_modules(networks: Mapping[str, nn.Module]) -> Iterator[ModuleWatch]:
    """Inside, every module of the networks is seen as it is done, inner ones before those that hold them."""
    watch, handles = ModuleWatch(), []

    def hook(path: str) -> Any:
        def seen(module: nn.Module, args: Any, kwargs: Any, made: Any) -> None:
            watch.see(path, module, (args, kwargs), made)

        return seen

    try:
        for name, network in networks.items():
            for inner, module in network.named_modules():
                path = f"{name}.{inner}" if inner else name
                handles.append(module.register_forward_hook(hook(path), with_kwargs=True))
        yield watch
    finally:
        for handle in handles:
            handle.remove()


# --- Overflow -------------------------------------------------------------------------------------------------------

HALF = float(torch.finfo(torch.float16).max)  # 65504
NEAR = 0.5  # of it: another prompt may pass it
REHEARSED = 2  # images
PARTS = (0.999, 0.5, 0.001)  # of the schedule's span: much noise, some, nearly none


def rehearse(pipe: Pipeline, data: KnownImages | None) -> ModuleWatch:
    """Text, three calls of the denoiser and a decoding, with all modules watched, until one breaks."""
    parts = pipe.components
    networks = {**pipe.networks(), **({} if parts.vae is None else {"vae": parts.vae})}
    width, height = pipe.size_of(Request())
    held = KnownImages(torch.full((REHEARSED, 3, height, width), 0.5)) if data is None else head(data, REHEARSED)
    with torch.no_grad(), watch_modules(networks) as watch:
        probe = Probe(
            parts.network,
            parts.schedule,
            targets.named(parts.target),
            clean_latents(pipe, held.pixels),
            conditions_of(pipe, held),
            working_dtype(parts.network),
        )
        x0 = probe.clean
        if not is_inpainting(parts):  # which takes more than x
            for part in PARTS:
                x0 = denoise_once(probe, part)
        if parts.vae is not None:
            latents = from_diffusion(parts.vae.config, x0.nan_to_num())
            parts.vae.decode(latents.to(next(parts.vae.parameters())))
    return watch


def denoise_once(probe: Probe, part: float) -> Tensor:
    """x0 at one part of the schedule's span, from the probe's data and noise."""
    low, high = probe.schedule.span
    time = low + part * (high - low)
    level = probe.schedule.level(time)
    everything = range(len(probe))
    noise = Philox(list(everything)).first(probe.clean.shape[1:], probe.clean, everything)
    x = probe.clean * level.alpha + noise * level.sigma
    out = probe.ask(x * input_scale(probe.schedule, level), time, everything)
    k_x, k_out = read_output(probe.schedule, probe.target, "x0", level)
    return x * k_x + out * k_out


@check("overflow", needs=("pipeline",))
def overflow(subject: Subject) -> Iterable[Finding]:
    """Does every module make finite numbers, with room to spare in its dtype?"""
    assert subject.pipeline is not None
    check_askable(subject.pipeline)
    watch = rehearse(subject.pipeline, subject.data)
    if watch.first is not None:
        return [broken_finding(watch.first)]
    return list(range_findings(watch))


def broken_finding(first: BrokenModule) -> Finding:
    """The finding of the first module whose output is not finite."""
    dtype = dtype_name(first.dtype)
    evidence: list[tuple[str, float | str]] = [
        ("module", first.path),
        ("kind", first.kind),
        ("dtype", dtype),
        ("input", first.inputs.text()),
        ("output", first.outputs.text()),
    ]
    title = f"{first.path} makes numbers that are not finite"
    if first.weights:
        facts = (*evidence, ("weights that are not finite", first.weights))
        words = f"{first.weights} numbers of its own weights are not finite."
        fix = "Load the weights again from their source: they were damaged, or saved by a run that had broken."
        return Finding("module-not-finite", "error", title, facts, words, fix)
    if first.dtype == torch.float16 and (first.in_float32 is not None or first.between):
        return overflowed(first, evidence)
    where = f"the code of {first.path}, between its parts," if first.between else first.path
    if first.grew:
        reach = (*evidence, (f"first module beyond {SENSE:g}", first.grew))
        words = f"{first.grew} makes numbers beyond {SENSE:g}, and {where} turns them into others that are not finite."
        fix = f"Look at the weights of {first.grew}: they are out of scale. Load them again from their source."
        return Finding("module-not-finite", "error", title, tuple(reach), words, fix)
    words = f"{where} turns finite numbers into others in {dtype}."
    fix = (
        f"Look at {first.path}: its weights are finite, so a division, a root or a logarithm of its input is to blame."
    )
    return Finding("module-not-finite", "error", title, tuple(evidence), words, fix)


def overflowed(first: BrokenModule, evidence: list[tuple[str, float | str]]) -> Finding:
    wider = first.in_float32
    extra = () if wider is None else (("largest number in float32", wider),)
    if wider is None:
        made = "a step between its parts goes beyond it"
    elif wider > HALF:
        made = f"its output reaches {wider:.3g}"
    else:
        made = f"a number within it goes beyond that, though in float32 its output is {wider:.3g} at most"
    words = f"float16 ends at {HALF:.0f}, and {made}."
    title = f"{first.path} overflows float16"
    return Finding("float16-overflow", "error", title, (*evidence, *extra), words, wider_dtype(first.path))


def wider_dtype(path: str) -> str:
    if path.split(".")[0] == "vae":
        return 'Set "force_upcast": true in vae/config.json, or load with dtype="bfloat16".'
    return 'Load with dtype="bfloat16" (pellucid.load(model, dtype="bfloat16")), or "float32".'


def range_findings(watch: ModuleWatch) -> Iterable[Finding]:
    """Modules whose numbers come near the end of float16, or would leave it."""
    if not watch.largest:
        return
    path = max(watch.largest, key=lambda one: watch.largest[one])
    most, dtype = watch.largest[path], watch.dtypes[path]
    evidence = (("module", path), ("dtype", dtype_name(dtype)), ("largest number", most), ("end of float16", HALF))
    tight = {one: most for one, most in watch.largest.items() if watch.dtypes[one] == torch.float16}
    if tight and max(tight.values()) > NEAR * HALF:
        worst = max(tight, key=lambda one: tight[one])
        yield Finding(
            "float16-near-overflow",
            "warning",
            f"{worst} comes near the end of float16",
            (("module", worst), ("largest number", tight[worst]), ("end of float16", HALF)),
            f"Its numbers reach {tight[worst] / HALF:.0%} of what float16 holds; another prompt may pass it.",
            wider_dtype(worst),
        )
    elif most > HALF and dtype != torch.float16:
        yield Finding(
            "too-large-for-float16",
            "note",
            f"{path} makes numbers that float16 cannot hold",
            evidence,
            f"It works in {dtype_name(dtype)} now; in float16 it would overflow.",
            "Keep it in bfloat16 or float32.",
        )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
