"""Checks against published families, and of the recipe that an image was made by."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pellucid.core import schedule as schedules
from pellucid.core.errors import PellucidError
from pellucid.core.filters import Clip, DynamicThreshold
from pellucid.core.schedule import Tabled
from pellucid.evidence.doctor.checks import Finding, Unable, check
from pellucid.evidence.doctor.components import inventory, network_of
from pellucid.evidence.doctor.scheduler_configs import flow_in_eps, flows
from pellucid.evidence.doctor.subject import Subject
from pellucid.interop import single_file, weights
from pellucid.interop.components import NETWORK_PARTS
from pellucid.interop.diffusers_classes import CLASSES
from pellucid.interop.family import DIT, Family, family_of
from pellucid.interop.folder import mended as mended_of
from pellucid.models.guidance import GUARDED_SCALE, Guidance
from pellucid.pipeline.request import Request

V_NAMES = re.compile(r"v[-_ ]?pred|768[-_]?v\b|[-_]v[-_]ema", re.IGNORECASE)
DIT_WIDTH = 1152  # of DiT-XL/2, which the family's name stands for
DISTILLED = ("LCMScheduler", "TCDScheduler")
FLOW_NETWORKS = (
    "SD3Transformer2DModel", "FluxTransformer2DModel", "AuraFlowTransformer2DModel", "Lumina2Transformer2DModel",
    "SanaTransformer2DModel", "ChromaTransformer2DModel", "QwenImageTransformer2DModel", "ZImageTransformer2DModel",
    "CogView4Transformer2DModel", "HiDreamImageTransformer2DModel",
)  # fmt: skip
DETECT = "pellucid doctor MODEL measures which it is"


def known_family(subject: Subject) -> Family | None:
    """The published family that the network has the shape of."""
    network: Any = network_of(subject)
    found = None if network is None else family_of(network)
    return None if found is DIT and network.config.width != DIT_WIDTH else found


@check("target and family", needs=("reading",))
def family_target(subject: Subject) -> Iterator[Finding]:
    """What the config says is predicted, and what such networks predict."""
    reading = subject.reading
    assert reading is not None
    family = known_family(subject)
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
            f"or --target {family.target}. {DETECT}",
        )  # fmt: skip
    elif V_NAMES.search(Path(subject.name).name) and reading.target == "eps":
        yield Finding(
            "target-name",
            "warning",
            "the name speaks of v, and the config of eps",
            (("name", Path(subject.name).name), ("prediction_type", str(reading.values.get("prediction_type")))),
            "Models that predict v are named so, because their weights do not show it.",
            f'"prediction_type": "v_prediction" in the scheduler\'s config, or --target v. {DETECT}',
        )


@check("target of a single file", needs=("file",))
def file_target(subject: Subject) -> Iterator[Finding]:
    """What the key, the metadata and the yaml of a file say, where they differ."""
    assert subject.file is not None
    try:
        tensors = weights.read(subject.file)
        sections = single_file.split(tensors, subject.file.name)
        layout = single_file.layout_of(sections, subject.file.name)
        found, notes = single_file.target_of(subject.file, layout, tensors, sections, None)
    except PellucidError as error:
        raise Unable(str(error)) from None
    for words in notes:
        silent = words.startswith("nothing")
        yield Finding(
            "target-assumed" if silent else "target-sources",
            "note" if silent else "warning",
            "nothing says what the network predicts" if silent else "what the file says of its target differs",
            (("target that is used", found), ("family", layout.name)),
            words[0].upper() + words[1:],
            f"--target eps or --target v, if another is right. {DETECT}",
        )


@check("schedule and family", needs=("reading",))
def family_schedule(subject: Subject) -> Iterator[Finding]:
    """Betas that are not those of Stable Diffusion, in a network that is."""
    reading = subject.reading
    assert reading is not None
    family = known_family(subject)
    if family is None or family is DIT or not isinstance(reading.schedule, Tabled):
        return
    own = schedules.scaled_linear()
    given = schedules.zero_terminal_snr(own) if reading.schedule.zero_terminal else own
    if reading.schedule.num_train == own.num_train and np.allclose(reading.schedule.betas, given.betas, atol=1e-6):
        return
    middle = own.num_train // 2
    at = min(middle, reading.schedule.num_train - 1)
    v = reading.values
    yield Finding(
        "schedule-family",
        "warning",
        f"the schedule is not the one that {family.name} was trained on",
        (
            ("beta_schedule", str(v.get("beta_schedule"))),
            ("beta_start", v["beta_start"]), ("beta_end", v["beta_end"]),
            ("num_train_timesteps", reading.schedule.num_train),
            (f"alpha at time {at}", float(reading.schedule.alpha_bar[at]) ** 0.5),
            ("alpha there in training", float(own.alpha_bar[middle]) ** 0.5),
        ),
        "At every time x is noisier or cleaner than the network was shown at that time. A scheduler that was made "
        "anew, and not from the model's own config, has the betas of its class.",
        '"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "num_train_timesteps": 1000',
    )  # fmt: skip


@check("scale of the VAE and family", needs=())
def family_scale(subject: Subject) -> Iterator[Finding]:
    """A scaling factor of another family."""
    family, factor = known_family(subject), scaling_of(subject)
    if family is None or factor is None:
        raise Unable("the subject is not a model of a published family")
    if abs(factor - family.scaling) > 1e-6:
        yield Finding(
            "scaling-family",
            "warning",
            f"the VAE's scaling_factor is not that of {family.name}",
            (("scaling_factor", factor), ("of the family", family.scaling), ("ratio", factor / family.scaling)),
            f"Latents reach the network {factor / family.scaling:.2f} times as large as in its training, and the "
            "decoder is given them back by the wrong factor.",
            f'"scaling_factor": {family.scaling} in vae/config.json',
        )


def scaling_of(subject: Subject) -> float | None:
    if subject.vae is not None:
        return float(subject.vae.config.scaling_factor)
    if subject.folder is None:
        return None
    listed = inventory(subject).get("vae")
    if listed is None or listed.config is None or listed.kind != "AutoencoderKL":
        return None
    return float(listed.config.get("scaling_factor", 0.18215))


# --- the scheduler's fit to the network ------------------------------------------------------------------------


def network_config(subject: Subject) -> tuple[str, Mapping[str, Any]] | None:
    """The denoising network's class and config, from the files."""
    if subject.folder is None:
        return None
    parts = inventory(subject)
    listed = next((parts[part] for part in NETWORK_PARTS if part in parts), None)
    return None if listed is None or listed.config is None else (listed.own_kind or listed.kind, listed.config)


@check("scheduler and network", needs=("folder", "scheduler"))
def sampler_fits(subject: Subject) -> Iterator[Finding]:
    """Flow networks without a flow's scheduler; distilled ones without their own."""
    config, found = subject.scheduler or {}, network_config(subject)
    name = str(config.get("_class_name"))
    if found is None or name not in CLASSES:
        return
    kind, network = found
    if kind in FLOW_NETWORKS and not flows(config) and config.get("prediction_type") != "flow_prediction":
        yield flow_in_eps(name, (("network", kind),))
    told = network.get("time_cond_proj_dim") is not None
    if told and name not in DISTILLED:
        yield Finding(
            "distilled-scheduler",
            "warning",
            f"a network that was distilled for few steps is sampled by {name}",
            (("time_cond_proj_dim", network["time_cond_proj_dim"]), ("_class_name", name)),
            "The network is told its guidance as an input: it is a consistency model, whose output at any time is the "
            "image itself, and a solver that follows its slope does not come out there.",
            '"_class_name": "LCMScheduler", and 4 to 8 steps',
        )
    elif name in DISTILLED and not told and kind == "UNet2DConditionModel":
        yield Finding(
            "distilled-scheduler",
            "note",
            f"{name} is for distilled networks, and this one takes no guidance as an input",
            (("_class_name", name),),
            "It makes sharp images only of a network that was distilled, or with an LCM LoRA on it.",
            "Load the LoRA, or take a scheduler such as DPMSolverMultistepScheduler.",
        )


@check("clipping of latents", needs=("folder", "reading"))
def clipping(subject: Subject) -> Iterator[Finding]:
    """Predictions cut to the range of pixels, where they are latents."""
    reading = subject.reading
    assert reading is not None
    if "vae" not in inventory(subject) or reading.x0_filter is None:
        return
    kept = reading.x0_filter
    if isinstance(kept, Clip) and kept.limit < 3.0:
        yield Finding(
            "clipped-latents",
            "error",
            "predicted latents are cut to the range of pixels",
            (("clip_sample_range", kept.limit), ("latents beyond it, of a standard normal", beyond(kept.limit))),
            "clip_sample cuts the predicted x0 at every step; latents have a standard deviation of 1, so a good part "
            "of them is cut off, and images come out flat.",
            '"clip_sample": false',
        )
    elif isinstance(kept, DynamicThreshold):
        yield Finding(
            "threshold-latents",
            "warning",
            "dynamic thresholding is on for latents",
            (("dynamic_thresholding_ratio", kept.quantile), ("sample_max_value", kept.most)),
            "The rule is made for pixels in −1 to 1: it scales predicted latents down to that range at every step.",
            '"thresholding": false; against burnt colours use guidance with rescale',
        )


def beyond(limit: float) -> float:
    """The share of a standard normal beyond ± limit."""
    return math.erfc(limit / math.sqrt(2))


@check("keys that the pipeline sets right", needs=("folder", "scheduler"))
def mended(subject: Subject) -> Iterator[Finding]:
    """Old configs that Stable Diffusion's pipelines correct when they open them."""
    pipeline = str((subject.index or {}).get("_class_name"))
    for words in mended_of(dict(subject.scheduler or {}), pipeline)[1]:
        yield Finding(
            "mended-key",
            "note",
            "the pipeline sets a key of the scheduler's config right",
            (("pipeline", pipeline),),
            words[0].upper() + words[1:],
            "Write what the pipeline sets into scheduler/scheduler_config.json: other programs read it too.",
        )


# --- Recipes --------------------------------------------------------------------------------------------------------

BURNING = 15.0  # a scale at which plain guidance burns colours in every family
LARGER = 2.0  # times the pixels that a model was trained on


@check("guidance of the recipe", needs=("recipe",))
def recipe_guidance(subject: Subject) -> Iterator[Finding]:
    """A scale that burns colours, with nothing against it."""
    told = (subject.recipe or {}).get("guidance")
    if not told:
        raise Unable("the recipe names no guidance")
    asked = Guidance.from_dict(told)
    most = asked.most
    if not asked.untamed:
        return
    yield Finding(
        "guidance-high",
        "warning" if most >= BURNING else "note",
        f"the guidance scale is {most:g}, with no rule against burnt colours",
        (("scale", most), ("guarded at", GUARDED_SCALE)),
        "Guidance adds the difference of two predictions so many times over: the predicted image leaves the range of "
        "images, colours saturate and bleed.",
        f'--guidance "guarded {most:g}", or --guidance "{most:g} + rescale"',
    )


@check("size of the recipe", needs=("recipe", "pipeline"))
def recipe_size(subject: Subject) -> Iterator[Finding]:
    """An image of another size than the model was trained on."""
    asked = (subject.recipe or {}).get("size")
    if asked is None:
        raise Unable("the recipe names no size")
    assert subject.pipeline is not None
    own = subject.pipeline.size_of(Request())
    ratio = asked[0] * asked[1] / (own[0] * own[1])
    if not 1 / LARGER <= ratio <= LARGER:
        yield Finding(
            "size-off",
            "warning",
            f"the image has {ratio:.2g} times the pixels that the model was trained on",
            (("width", asked[0]), ("height", asked[1]), ("trained width", own[0]),
             ("trained height", own[1])),
            "Larger images repeat their subject, smaller ones lose it: the network knows structures of one size.",
            f"--size {own[0]}x{own[1]}; enlarge afterwards with --image and a low --strength",
        )  # fmt: skip


@check("words of another program", needs=("recipe",))
def foreign_words(subject: Subject) -> Iterator[Finding]:
    """Settings of an A1111 text that are not read here."""
    recipe = subject.recipe or {}
    unread = dict(recipe.get("unread") or {})
    if unread:
        yield Finding(
            "recipe-unread",
            "note",
            f"{len(unread)} settings of the image's text are not read here",
            tuple((name or "rest", value[:60]) for name, value in unread.items()),
            "Another program made the image, and has settings that Pellucid has no words for.",
            "Repeat it by hand where they matter: pellucid sample --from FILE says what it takes.",
        )
