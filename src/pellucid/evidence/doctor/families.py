"""Checks against published families, and of the recipe that an image was made by."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pellucid.core import schedule as schedules
from pellucid.core.errors import PellucidError
from pellucid.core.filters import Clip, DynamicThreshold
from pellucid.core.schedule import DiscreteVP
from pellucid.evidence.doctor.checks import Finding, check
from pellucid.evidence.doctor.scheduler_configs import flow_in_eps, flows
from pellucid.evidence.doctor.subject import Component, Subject, UnsupportedCheck, read_single_file
from pellucid.interop.diffusers_classes import CLASSES
from pellucid.interop.diffusers_config import SchedulerSettings
from pellucid.interop.family import DIT, Family, family_of
from pellucid.interop.folder import mended
from pellucid.models.guidance import GUARDED_SCALE, Guidance
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.request import Request

_V_NAMES = re.compile(r"v[-_ ]?pred|768[-_]?v\b|[-_]v[-_]ema", re.IGNORECASE)
_DIT_WIDTH = 1152  # of DiT-XL/2, which the family's name stands for
_DISTILLED = ("LCMScheduler", "TCDScheduler")
_FLOW_NETWORKS = (
    "SD3Transformer2DModel", "FluxTransformer2DModel", "AuraFlowTransformer2DModel", "Lumina2Transformer2DModel",
    "SanaTransformer2DModel", "ChromaTransformer2DModel", "QwenImageTransformer2DModel", "ZImageTransformer2DModel",
    "CogView4Transformer2DModel", "HiDreamImageTransformer2DModel",
)  # fmt: skip
_DETECT = "pellucid doctor MODEL measures which it is"


def _known_family(subject: Subject) -> Family | None:
    """The published family whose shape the network has, loaded or sketched from its config."""
    listed, network = subject.listed_network, None
    if subject.pipeline is not None:
        network = subject.pipeline.components.network
    elif listed is not None and listed.config is not None and listed.network_kind is not None:
        with suppress(PellucidError):
            network = listed.sketch()
    found = None if network is None else family_of(network)
    return None if found is DIT and network.config.width != _DIT_WIDTH else found  # type: ignore[union-attr]


@check("target and family")
def family_target(subject: Subject, reading: SchedulerSettings) -> Iterator[Finding]:
    """What the config says is predicted, and what such networks predict."""
    family = _known_family(subject)
    if family is not None and reading.target != family.target:
        own = reading.target == "v" and bool(reading.values.get("rescale_betas_zero_snr"))
        yield Finding(
            "target-family",
            "note" if own else "warning",
            f"the target is {reading.target}, but {family.name} predicts {family.target}",
            (("prediction_type", str(reading.values.get("prediction_type"))), ("family", family.name),
             ("its target", family.target)),
            f"The network has the shape of {family.name}, which was trained for {family.target}"
            + ("; with zero terminal SNR beside it this is a fine-tune for v." if own else
               f": read as {reading.target}, its output makes noise or washed images."),
            f'"prediction_type": "{"v_prediction" if family.target == "v" else "epsilon"}" in the scheduler\'s config, '
            f"or --target {family.target}. {_DETECT}",
        )  # fmt: skip
    elif _V_NAMES.search(Path(subject.name).name) and reading.target == "eps":
        yield Finding(
            "target-name",
            "warning",
            "the model's name says v, its config eps",
            (("name", Path(subject.name).name), ("prediction_type", str(reading.values.get("prediction_type")))),
            "Models that predict v are named so, because their weights do not show it.",
            f'"prediction_type": "v_prediction" in the scheduler\'s config, or --target v. {_DETECT}',
        )


@check("target of a single file")
def file_target(subject: Subject, file: Path) -> Iterator[Finding]:
    """What the key, the metadata and the yaml of a file say, where they differ."""
    try:
        _, layout, target, notes = read_single_file(file)
    except PellucidError as error:
        raise UnsupportedCheck(str(error)) from None
    for note in notes:
        silent = note.startswith("nothing")
        yield Finding(
            "target-assumed" if silent else "target-sources",
            "note" if silent else "warning",
            "nothing says what the network predicts" if silent else "the file says different things of its target",
            (("target that is used", target), ("family", layout.name)),
            note[0].upper() + note[1:],
            f"--target eps or --target v, if another is right. {_DETECT}",
        )


@check("schedule and family")
def family_schedule(subject: Subject, reading: SchedulerSettings) -> Iterator[Finding]:
    """Betas that are not those of Stable Diffusion, in a network that is."""
    family = _known_family(subject)
    if family is None or family is DIT or not isinstance(reading.schedule, DiscreteVP):
        return
    own, schedule, values = schedules.scaled_linear(), reading.schedule, reading.values
    right = schedules.zero_terminal_snr(own) if schedule.zero_terminal else own
    if schedule.num_train == own.num_train and np.allclose(schedule.betas, right.betas, atol=1e-6):
        return
    middle = own.num_train // 2
    at = min(middle, schedule.num_train - 1)
    yield Finding(
        "schedule-family",
        "warning",
        f"the schedule is not the one that {family.name} was trained on",
        (
            ("beta_schedule", str(values.get("beta_schedule"))),
            ("beta_start", values["beta_start"]), ("beta_end", values["beta_end"]),
            ("num_train_timesteps", schedule.num_train),
            (f"alpha at time {at}", float(schedule.alpha_bar[at]) ** 0.5),
            ("alpha there in training", float(own.alpha_bar[middle]) ** 0.5),
        ),
        "At every time x is noisier or cleaner than in the network's training. A scheduler that was not made from the "
        "model's own config has the betas of its class.",
        '"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "num_train_timesteps": 1000',
    )  # fmt: skip


@check("scale of the VAE and family")
def family_scale(subject: Subject) -> Iterator[Finding]:
    """A scaling factor of another family."""
    family, factor = _known_family(subject), _scaling_of(subject)
    if family is None or factor is None:
        raise UnsupportedCheck("the subject is not a model of a published family")
    if abs(factor - family.scaling) > 1e-6:
        yield Finding(
            "scaling-family",
            "warning",
            f"the VAE's scaling_factor is not that of {family.name}",
            (("scaling_factor", factor), ("of the family", family.scaling), ("ratio", factor / family.scaling)),
            f"Latents reach the network {factor / family.scaling:.2f} times as large as in its training, and are "
            "scaled back by the wrong factor before they are decoded.",
            f'"scaling_factor": {family.scaling} in vae/config.json',
        )


def _scaling_of(subject: Subject) -> float | None:
    if subject.vae is not None:
        return float(subject.vae.config.scaling_factor)
    vae = (subject.components or {}).get("vae")
    if vae is None or vae.config is None or vae.kind != "AutoencoderKL":
        return None
    return float(vae.config.get("scaling_factor", 0.18215))


# --- the scheduler's fit to the network ------------------------------------------------------------------------


@check("scheduler and network")
def sampler_fits(
    subject: Subject, components: Mapping[str, Component], scheduler: Mapping[str, Any]
) -> Iterator[Finding]:
    """Flow networks without a flow's scheduler; distilled ones without their own."""
    name, listed = str(scheduler.get("_class_name")), subject.listed_network
    if name not in CLASSES or listed is None or listed.config is None:
        return
    kind = listed.own_kind or listed.kind
    if kind in _FLOW_NETWORKS and not flows(scheduler) and scheduler.get("prediction_type") != "flow_prediction":
        yield flow_in_eps(name, (("network", kind),))
    embedded = listed.config.get("time_cond_proj_dim")
    if embedded is not None and name not in _DISTILLED:
        yield Finding(
            "distilled-scheduler",
            "warning",
            f"a network that was distilled for few steps is sampled by {name}",
            (("time_cond_proj_dim", embedded), ("_class_name", name)),
            "The network takes its guidance as an input: it is a consistency model, whose output at any time is the "
            "image itself, and a solver that follows its slope does not end there.",
            '"_class_name": "LCMScheduler", and 4 to 8 steps',
        )
    elif name in _DISTILLED and embedded is None and kind == "UNet2DConditionModel":
        yield Finding(
            "distilled-scheduler",
            "note",
            f"{name} is for distilled networks, and this one takes no guidance as an input",
            (("_class_name", name),),
            "It makes sharp images only of a network that was distilled, or with an LCM LoRA on it.",
            "Load the LoRA, or take a scheduler such as DPMSolverMultistepScheduler.",
        )


@check("clipping of latents")
def clipping(subject: Subject, components: Mapping[str, Component], reading: SchedulerSettings) -> Iterator[Finding]:
    """Predicted latents that are cut to the range of pixels."""
    rule = reading.x0_filter if "vae" in components else None
    if isinstance(rule, Clip) and rule.limit < 3.0:
        beyond = math.erfc(rule.limit / math.sqrt(2))
        yield Finding(
            "clipped-latents",
            "error",
            "predicted latents are cut to the range of pixels",
            (("clip_sample_range", rule.limit), ("latents beyond it, of a standard normal", beyond)),
            "clip_sample cuts the predicted x0 at every step; latents have a standard deviation of 1, so a good part "
            "of them is cut off, and images come out flat.",
            '"clip_sample": false',
        )
    elif isinstance(rule, DynamicThreshold):
        yield Finding(
            "threshold-latents",
            "warning",
            "dynamic thresholding is on for latents",
            (("dynamic_thresholding_ratio", rule.quantile), ("sample_max_value", rule.most)),
            "The rule is made for pixels in −1 to 1: it scales predicted latents down to that range at every step.",
            '"thresholding": false; against burnt colours use guidance with rescale',
        )


@check("keys that the pipeline sets right")
def mended_keys(
    subject: Subject, components: Mapping[str, Component], scheduler: Mapping[str, Any]
) -> Iterator[Finding]:
    """Old configs that Stable Diffusion's pipelines correct when they open them."""
    pipeline = str((subject.index or {}).get("_class_name"))
    for note in mended(dict(scheduler), pipeline)[1]:
        yield Finding(
            "mended-key",
            "note",
            "the pipeline corrects a key of the scheduler's config",
            (("pipeline", pipeline),),
            note[0].upper() + note[1:],
            "Write what the pipeline sets into scheduler/scheduler_config.json: other programs read it too.",
        )


# --- recipes ------------------------------------------------------------------------------------------------------

_BURNING = 15.0  # a scale at which plain guidance burns colours in every family
_LARGER = 2.0  # times the pixels that a model was trained on


@check("guidance of the recipe")
def recipe_guidance(subject: Subject, recipe: Mapping[str, Any]) -> Iterator[Finding]:
    """A scale that burns colours, with nothing against it."""
    if not recipe.get("guidance"):
        raise UnsupportedCheck("the recipe names no guidance")
    guidance = Guidance.from_dict(recipe["guidance"])
    most = guidance.most
    if guidance.untamed:
        yield Finding(
            "guidance-high",
            "warning" if most >= _BURNING else "note",
            f"the guidance scale is {most:g}, with no rule against burnt colours",
            (("scale", most), ("guarded at", GUARDED_SCALE)),
            "Guidance adds the difference of two predictions so many times over: the prediction leaves the range of "
            "images, colours saturate and bleed.",
            f'--guidance "guarded {most:g}", or --guidance "{most:g} + rescale"',
        )


@check("size of the recipe")
def recipe_size(subject: Subject, recipe: Mapping[str, Any], pipeline: Pipeline) -> Iterator[Finding]:
    """An image of another size than the model was trained on."""
    if recipe.get("size") is None:
        raise UnsupportedCheck("the recipe names no size")
    (width, height), own = recipe["size"], pipeline.size_of(Request())
    ratio = width * height / (own[0] * own[1])
    if not 1 / _LARGER <= ratio <= _LARGER:
        yield Finding(
            "size-off",
            "warning",
            f"the image has {ratio:.2g} times the pixels that the model was trained on",
            (("width", width), ("height", height), ("trained width", own[0]), ("trained height", own[1])),
            "Larger images repeat their subject, smaller ones lose it: the network knows structures of one size.",
            f"--size {own[0]}x{own[1]}; enlarge afterwards with --image and a low --strength",
        )


@check("words of another program")
def foreign_words(subject: Subject, recipe: Mapping[str, Any]) -> Iterator[Finding]:
    """Settings of an A1111 text that are not read here."""
    unread = dict(recipe.get("unread") or {})
    if unread:
        yield Finding(
            "recipe-unread",
            "note",
            f"{len(unread)} settings of the image's text are not read here",
            tuple((name or "rest", value[:60]) for name, value in unread.items()),
            "Another program made the image, with settings that Pellucid does not have.",
            "Set what matters by hand: pellucid sample --from FILE says what it takes.",
        )
