"""Checks of the range of numbers: the scale of latents, and values that overflow a dtype."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.core.noise import Philox
from pellucid.evidence.doctor.checks import Evidence, Finding, check
from pellucid.evidence.doctor.probe import Probe, any_probe, check_callable
from pellucid.evidence.doctor.subject import KnownImages, Subject, dtype_name
from pellucid.evidence.statistics import Estimate, draws, percentiles
from pellucid.models.vae import from_diffusion, to_diffusion
from pellucid.pipeline.encoders.image_inputs import is_inpainting
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.request import Request

# --- the scale of latents -----------------------------------------------------------------------------------------

_BATCH = 8
_RESAMPLES = 400
_TINY = 1e-12
_LEVEL = 0.99
# Factors by which the spread may be off: images of one kind differ by 15 %, those of another kind by more.
_OFF, _SEEN, _FAR = 1.25, 1.6, 2.5  # worth a note, a warning, an error
_SHIFTED = 0.5  # standard deviations by which the mean may be off


@check("scale of the VAE")
def vae_scale(subject: Subject, vae: Any, data: KnownImages) -> Iterator[Finding]:
    """Do encoded images have a standard deviation of about 1?"""
    latents = _encoded(vae, data.pixels)
    found = spread_of(latents)
    spread, low, high = found.value, found.low, found.high
    factor = float(vae.config.scaling_factor)
    right = factor / max(spread, _TINY)
    facts = (
        ("standard deviation of the latents", spread), ("99 % interval", f"{low:.3g} to {high:.3g}"),
        ("images", len(data.pixels)), ("scaling_factor", factor), ("that makes it 1", right),
    )  # fmt: skip
    off = max(low, 1 / max(high, _TINY))  # the end of the interval that is nearer to 1
    if off > _OFF:
        yield Finding(
            "vae-scale",
            "error" if off > _FAR else "warning" if off > _SEEN else "note",
            f"encoded images have a standard deviation of {spread:.3g}, not 1",
            facts,
            "The scaling_factor is not this VAE's: a schedule's noise is measured against latents of standard "
            f"deviation 1, so every level is {max(spread, 1 / max(spread, _TINY)):.2g} times too "
            f"{'clean' if spread > 1 else 'noisy'}.",
            f'"scaling_factor": {right:.4g} in vae/config.json, if these images are of the kind it was trained on',
        )
    mean = float(latents.mean())
    if abs(mean) > _SHIFTED * spread:
        shift = float(vae.config.shift_factor or 0.0)
        yield Finding(
            "vae-shift",
            "note",
            "encoded images are not centred",
            (("mean of the latents", mean), ("standard deviation", spread), ("shift_factor", shift)),
            "The latents' mean is far from 0; such VAEs have a shift_factor, which is subtracted first.",
            "Compare shift_factor with that of the model's source.",
        )


@torch.no_grad()
def _encoded(vae: Any, pixels: Tensor) -> Tensor:
    """(N, C, h, w) float32 on the CPU: the means of the posteriors, scaled for diffusion."""
    first = next(vae.parameters())
    multiple = vae.config.factor
    height, width = (side - side % multiple for side in pixels.shape[-2:])
    latents = []
    for part in (pixels[..., :height, :width] * 2 - 1).split(_BATCH):
        mean = vae.encode(part.to(first.device, first.dtype)).mean
        latents.append(to_diffusion(vae.config, mean).float().cpu())
    return torch.cat(latents)


def spread_of(latents: Tensor) -> Estimate:
    """The standard deviation over all images, and its interval over resampled ones."""
    flat = latents.double().flatten(1)
    moments = torch.stack((flat.mean(1), flat.square().mean(1)), 1)  # (N, 2)
    drawn = draws(len(moments), _RESAMPLES).double() @ moments / len(moments)  # (RESAMPLES, 2)
    spreads = (drawn[:, 1] - drawn[:, 0].square()).clamp_min(0).sqrt()
    return percentiles(spreads, float(flat.std(correction=0)), _LEVEL)


# --- hooks on modules ---------------------------------------------------------------------------------------------

_SENSE = 1e6  # what no activation of a sound network passes


@dataclass(frozen=True)
class NumberRange:
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
    """The first output that was not finite: which module made it, from what, in which dtype."""

    path: str
    kind: str
    dtype: torch.dtype
    inputs: NumberRange
    outputs: NumberRange
    between: bool = False  # made by no module, but by the code of this one, between its parts
    weights: int = 0  # numbers of its own weights that are not finite
    in_float32: float | None = None  # the largest number that it makes of the same input, where it can be tried
    grew: str = ""  # the first module before it whose numbers were already beyond SENSE


@dataclass
class ModuleWatch:
    """What the hooks record: the first broken output, and the largest finite number of each module."""

    first: BrokenModule | None = None
    largest: dict[str, float] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def see(self, path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.first is not None:
            return
        outputs = _range_of(output)
        dtype = next((t.dtype for t in _tensors(output)), torch.float32)
        self.largest[path] = max(outputs.most, self.largest.get(path, 0.0))
        self.dtypes[path] = dtype
        if not outputs.broken:
            return
        read, kind = _range_of(inputs), type(module).__name__
        if read.broken:  # no module before this one made it: the code around it did
            self.first = BrokenModule(path.rpartition(".")[0] or path, kind, dtype, read, outputs, between=True)
            return
        weights = sum(int((~torch.isfinite(p)).sum()) for p in module.parameters())
        wider = None if weights else _largest_in_float32(module, *inputs)
        grew = next((one for one, most in self.largest.items() if one != path and most > _SENSE), "")
        self.first = BrokenModule(path, kind, dtype, read, outputs, False, weights, wider, grew)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The floating-point tensors of a tree of tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        if tree.is_floating_point() and tree.numel():
            yield tree
    elif isinstance(tree, Mapping | tuple | list):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors(value)


def _range_of(tree: Any) -> NumberRange:
    lows, highs, broken = [0.0], [0.0], 0
    for tensor in _tensors(tree):
        low, high = (float(end) for end in tensor.aminmax())
        if not (abs(low) < float("inf") and abs(high) < float("inf")):
            finite = tensor[torch.isfinite(tensor)]
            broken += tensor.numel() - finite.numel()
            if not finite.numel():
                continue
            low, high = (float(end) for end in finite.aminmax())
        lows.append(low)
        highs.append(high)
    return NumberRange(min(lows[1:], default=0.0), max(highs[1:], default=0.0), broken)


@torch.no_grad()
def _largest_in_float32(module: nn.Module, args: Any, kwargs: Any) -> float | None:
    """The largest number that a module makes of its inputs in float32; None where one is not finite."""
    try:
        # forward itself: the copy carries the hooks of the module, which are not to see this
        outputs = _range_of(copy.deepcopy(module).float().forward(*_widened(args), **_widened(kwargs)))
    except (RuntimeError, TypeError, ValueError):
        return None
    return None if outputs.broken else outputs.most


def _widened(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.float() if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {name: _widened(value) for name, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_widened(value) for value in tree))
    return type(tree)(_widened(value) for value in tree) if isinstance(tree, tuple | list) else tree


@contextmanager
def watch_modules(networks: Mapping[str, nn.Module]) -> Iterator[ModuleWatch]:
    """Inside, every module of the networks is recorded as it returns, inner ones before those that hold them."""
    watch, handles = ModuleWatch(), []

    def record(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        watch.see(path, module, (args, kwargs), output)

    try:
        for name, network in networks.items():
            for inner, module in network.named_modules():
                hook = partial(record, f"{name}.{inner}" if inner else name)
                handles.append(module.register_forward_hook(hook, with_kwargs=True))
        yield watch
    finally:
        for handle in handles:
            handle.remove()


# --- overflow -----------------------------------------------------------------------------------------------------

HALF = float(torch.finfo(torch.float16).max)  # 65504
_NEAR = 0.5  # of it: another prompt may pass it
_REHEARSED = 2  # images
_PARTS = (0.999, 0.5, 0.001)  # of the schedule's span: much noise, some, nearly none


def _rehearse(pipe: Pipeline, data: KnownImages | None) -> ModuleWatch:
    """Text, three calls of the denoiser and a decoding, with all modules watched, until one breaks."""
    parts = pipe.components
    networks = {**pipe.networks(), **({} if parts.vae is None else {"vae": parts.vae})}
    width, height = pipe.size_of(Request())
    images = KnownImages(torch.full((_REHEARSED, 3, height, width), 0.5)) if data is None else data.first(_REHEARSED)
    with torch.no_grad(), watch_modules(networks) as watch:
        probe = any_probe(pipe, images)
        x0 = probe.clean
        if not is_inpainting(parts):  # which takes more than x
            for part in _PARTS:
                x0 = _denoise_once(probe, part)
        if parts.vae is not None:
            latents = from_diffusion(parts.vae.config, x0.nan_to_num())
            parts.vae.decode(latents.to(next(parts.vae.parameters())))
    return watch


def _denoise_once(probe: Probe, part: float) -> Tensor:
    """x0 at one part of the schedule's span, from the probe's data and noise."""
    low, high = probe.schedule.span
    time = low + part * (high - low)
    level = probe.schedule.level(time)
    everything = range(len(probe))
    noise = Philox(list(everything)).first(probe.clean.shape[1:], probe.clean, everything)
    x = probe.clean * level.alpha + noise * level.sigma
    return probe.x0(x, level, time, everything)


@check("overflow")
def overflow(subject: Subject, pipeline: Pipeline) -> Iterable[Finding]:
    """Does every module make finite numbers, with room to spare in its dtype?"""
    check_callable(pipeline)
    watch = _rehearse(pipeline, subject.data)
    return _range_findings(watch) if watch.first is None else [_broken_finding(watch.first)]


def _broken_finding(first: BrokenModule) -> Finding:
    """The finding of the first module whose output is not finite."""
    dtype = dtype_name(first.dtype)
    evidence: Evidence = (
        ("module", first.path),
        ("kind", first.kind),
        ("dtype", dtype),
        ("input", first.inputs.text()),
        ("output", first.outputs.text()),
    )
    if not first.weights and first.dtype == torch.float16 and (first.in_float32 is not None or first.between):
        return _overflow_finding(first, evidence)
    where = f"the code of {first.path}, between its parts," if first.between else first.path
    if first.weights:
        evidence = (*evidence, ("weights that are not finite", first.weights))
        cause = f"{first.weights} numbers of its own weights are not finite."
        fix = "Load the weights again from their source: they were damaged, or saved by a run that had broken."
    elif first.grew:
        evidence = (*evidence, (f"first module beyond {_SENSE:g}", first.grew))
        cause = f"{first.grew} makes numbers beyond {_SENSE:g}, and {where} turns them into others that are not finite."
        fix = f"Look at the weights of {first.grew}: they are out of scale. Load them again from their source."
    else:
        cause = f"In {dtype}, {where} turns finite numbers into others that are not."
        fix = (
            f"Look at {first.path}: its weights are finite, so a division, root or logarithm of its input is to blame."
        )
    title = f"{first.path} makes numbers that are not finite"
    return Finding("module-not-finite", "error", title, evidence, cause, fix)


def _overflow_finding(first: BrokenModule, evidence: Evidence) -> Finding:
    """Numbers beyond the end of float16."""
    wider = first.in_float32
    if wider is None:
        why = "a step between its parts goes beyond it"
    elif wider > HALF:
        why = f"its output reaches {wider:.3g}"
    else:
        why = f"a number within it goes beyond that, though in float32 its output is {wider:.3g} at most"
    facts = evidence if wider is None else (*evidence, ("largest number in float32", wider))
    title, cause = f"{first.path} overflows float16", f"float16 ends at {HALF:.0f}, and {why}."
    return Finding("float16-overflow", "error", title, facts, cause, _wider_dtype(first.path))


def _wider_dtype(path: str) -> str:
    if path.split(".")[0] == "vae":
        return 'Set "force_upcast": true in vae/config.json, or load with dtype="bfloat16".'
    return 'Load with dtype="bfloat16" (pellucid.load(model, dtype="bfloat16")), or "float32".'


def _range_findings(watch: ModuleWatch) -> Iterable[Finding]:
    """Modules whose numbers come near the end of float16, or would leave it."""
    if not watch.largest:
        return
    path = max(watch.largest, key=watch.largest.__getitem__)
    most, dtype = watch.largest[path], watch.dtypes[path]
    tight = {one: most for one, most in watch.largest.items() if watch.dtypes[one] == torch.float16}
    worst = max(tight, key=tight.__getitem__, default="")
    if tight and tight[worst] > _NEAR * HALF:
        yield Finding(
            "float16-near-overflow",
            "warning",
            f"{worst} comes near the end of float16",
            (("module", worst), ("largest number", tight[worst]), ("end of float16", HALF)),
            f"Its numbers reach {tight[worst] / HALF:.0%} of what float16 holds; another prompt may exceed it.",
            _wider_dtype(worst),
        )
    elif most > HALF and dtype != torch.float16:
        yield Finding(
            "too-large-for-float16",
            "note",
            f"{path} produces numbers that float16 cannot represent",
            (("module", path), ("dtype", dtype_name(dtype)), ("largest number", most), ("end of float16", HALF)),
            f"It works in {dtype_name(dtype)} now; in float16 it would overflow.",
            "Keep it in bfloat16 or float32.",
        )
