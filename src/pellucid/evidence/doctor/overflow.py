"""Numbers that leave the range of their dtype, and the first module that makes one that is none."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pellucid.core import target as targets
from pellucid.core.denoiser import input_scale, read_output
from pellucid.core.noise import Philox
from pellucid.evidence.doctor.checks import check
from pellucid.evidence.doctor.finding import Finding
from pellucid.evidence.doctor.probe import Probe, check_askable, clean_latents, first, told
from pellucid.evidence.doctor.subject import Data, Subject
from pellucid.evidence.doctor.watching import SENSE, Broken, Watch, watched
from pellucid.models.vae import from_diffusion
from pellucid.pipeline.denoising import half_of
from pellucid.pipeline.image_inputs import is_inpainting
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.request import Request

HALF = float(torch.finfo(torch.float16).max)  # 65504
NEAR = 0.5  # of it: another prompt may pass it
COUNT = 2  # images
PARTS = (0.999, 0.5, 0.001)  # of the schedule's span: much noise, some, nearly none


def rehearse(pipe: Pipeline, data: Data | None) -> Watch:
    """Text, three calls of the denoiser and a decoding, with all modules watched, until one breaks."""
    parts = pipe.components
    networks = {**pipe.networks(), **({} if parts.vae is None else {"vae": parts.vae})}
    width, height = pipe.size_of(Request())
    held = Data(torch.full((COUNT, 3, height, width), 0.5)) if data is None else first(data, COUNT)
    with torch.no_grad(), watched(networks) as watch:
        probe = Probe(
            parts.network,
            parts.schedule,
            targets.named(parts.target),
            clean_latents(pipe, held.pixels),
            told(pipe, held),
            half_of(parts.network),
        )
        x0 = probe.clean
        if not is_inpainting(parts):  # which takes more than x
            for part in PARTS:
                x0 = denoised(probe, part)
        if parts.vae is not None:
            latents = from_diffusion(parts.vae.config, x0.nan_to_num())
            parts.vae.decode(latents.to(next(parts.vae.parameters())))
    return watch


def denoised(probe: Probe, part: float) -> Tensor:
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
        return [broken(watch.first)]
    return list(near(watch))


def broken(first: Broken) -> Finding:
    """The finding of the first module whose output is not finite."""
    dtype = name_of(first.dtype)
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


def overflowed(first: Broken, evidence: list[tuple[str, float | str]]) -> Finding:
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


def near(watch: Watch) -> Iterable[Finding]:
    """Modules whose numbers come near the end of float16, or would leave it."""
    if not watch.largest:
        return
    path = max(watch.largest, key=lambda one: watch.largest[one])
    most, dtype = watch.largest[path], watch.dtypes[path]
    evidence = (("module", path), ("dtype", name_of(dtype)), ("largest number", most), ("end of float16", HALF))
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
            f"It works in {name_of(dtype)} now; in float16 it would overflow.",
            "Keep it in bfloat16 or float32.",
        )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
