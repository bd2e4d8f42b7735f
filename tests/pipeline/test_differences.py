"""docs/differences.md: every known difference from diffusers, measured. `python tests/pipeline/test_differences.py`
writes the page; the tests measure again, and fail where a size has changed or a difference is gone."""

from __future__ import annotations

import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "differences.md"
sys.path[:0] = [str(HERE), str(HERE.parent / "interop")]  # for those who run this file to write the page

import diffusers  # noqa: E402
import test_wrapped as wrapped  # noqa: E402
import tiny_models as tiny  # noqa: E402
from test_parity import BETAS, CLOSE, SIZE, WORDS, Model, image, theirs  # noqa: E402

from pellucid.interop.scheduler import Scheduler  # noqa: E402

KNOWN: list[Difference] = []
PROMPT = {"num_inference_steps": 6, "guidance_scale": 5.0}
OURS = {"steps": 6, "guidance": 5.0, "seed": 3, "decode": False}


@dataclass(frozen=True)
class Difference:
    """One known difference: what each side does, why, and how to get diffusers' image where that is possible."""

    where: str
    diffusers: str
    pellucid: str
    why: str
    instead: str
    measure: Callable[[], float]
    section: str


def difference(section: str, where: str, *, diffusers: str, pellucid: str, why: str, instead: str) -> Any:
    def keep(measure: Callable[[], float]) -> Callable[[], float]:
        KNOWN.append(Difference(where, diffusers, pellucid, why, instead, measure, section))
        return measure

    return keep


@cache
def model(name: str) -> Model:
    folder = Path(tempfile.mkdtemp(prefix="pellucid-differences-"))
    maker = {"sd": tiny.stable_diffusion, "xl": tiny.stable_diffusion_xl}[name]
    return Model(folder / "model", maker(folder))


def apart(ours: Tensor, peer: Tensor) -> float:
    return float((ours - peer).abs().max() / peer.abs().max())


# --- what is left open -------------------------------------------------------------------------------------------

OPEN, TEXT, IMAGE, STEP, WRAP = "What you leave out", "Text", "Images", "Samplers and noise", "`pellucid.wrap`"


@difference(
    OPEN,
    "`guidance` left out",
    diffusers="7.5 in SD, 5 in SDXL, as plain guidance",
    pellucid="`guarded`: 7 with rescale 0.7",
    why="High plain scales burn colours, so the default is a safer preset. The recipe records it. Measured on SDXL.",
    instead="`guidance=7.5`, or 5",
)
def no_guidance_given() -> float:
    peer, mine = model("xl").with_scheduler("ddim")
    made = mine(**WORDS, **SIZE, **{**OURS, "guidance": None})
    return apart(made.latents, theirs(peer, **WORDS, **SIZE, num_inference_steps=6)[0])


@difference(
    OPEN,
    "`sampler` named, `dialect` left out",
    diffusers="its scheduler's times, rounding and last step",
    pellucid="the sampler as in its paper, and noise that does not depend on the device",
    why="diffusers' tables carry [defects](results/parity.md), which the exact dialect leaves out. Measured on the "
    "same first noise, with DPM++ 2M on Karras sigmas.",
    instead='`dialect="diffusers", noise="torch"`, or no sampler: the folder\'s own scheduler',
)
def exact_sampler() -> float:
    peer, mine = model("xl").with_scheduler("dpmpp_2m_karras")
    shape = (1, 4, SIZE["height"] // mine.factor, SIZE["width"] // mine.factor)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    made = mine(**WORDS, **SIZE, **OURS, sampler="dpmpp_2m", grid="karras", latents=noise)
    return apart(made.latents, theirs(peer, **WORDS, **SIZE, **PROMPT, latents=noise)[0])


@difference(
    OPEN,
    "`guidance` from 0 to below 1 with a named sampler",
    diffusers="the prompt without guidance, as at 1",
    pellucid="follows the formula: 0 ignores the prompt, 0.5 weakens it; a note says so",
    why="The folder's own scheduler and `wrap` follow diffusers; elsewhere the formula is applied as it is. "
    "Measured between 0 and 1.",
    instead="`guidance=1`",
)
def weak_scale() -> float:
    _, mine = model("xl").with_scheduler("ddim")
    a, b = (mine(**WORDS, **SIZE, **{**OURS, "guidance": s}, sampler="ddim").latents for s in (0, 1))
    return apart(a, b)


# --- text --------------------------------------------------------------------------------------------------------


def long_prompt(name: str) -> float:
    peer, mine = model(name).with_scheduler("ddim")
    room = mine.components.tokenizers[0].room
    long = "a b " * (room // 2) + "c " * room
    return apart(mine(long, **SIZE, **OURS).latents, theirs(peer, prompt=long, **SIZE, **PROMPT)[0])


LONG = {
    "diffusers": "truncates it after 75 tokens, with a warning",
    "pellucid": "encodes all of it, in chunks of 75, with a note",
    "why": "The whole prompt is used. The random text encoders measured here hardly distinguish texts.",
    "instead": "shorten the prompt to 75 tokens",
}


@difference(TEXT, "a prompt beyond 75 tokens, SD", **LONG)
def long_sd() -> float:
    return long_prompt("sd")


@difference(TEXT, "a prompt beyond 75 tokens, SDXL", **LONG)
def long_xl() -> float:
    return long_prompt("xl")


@difference(
    TEXT,
    '`prompt_2=""` in SDXL',
    diffusers="treats it as omitted: the first prompt is used",
    pellucid="uses the empty text",
    why="An empty text is a text; `None` omits it.",
    instead="omit `prompt_2`",
)
def empty_second_prompt() -> float:
    peer, mine = model("xl").with_scheduler("ddim")
    made = mine(**WORDS, **SIZE, **OURS, prompt_2="")
    return apart(made.latents, theirs(peer, **WORDS, **SIZE, **PROMPT, prompt_2="")[0])


# --- images ------------------------------------------------------------------------------------------------------


@difference(
    IMAGE,
    "two prompts, two images, two copies of each (image-to-image)",
    diffusers="pairs both copies of the first prompt with different images",
    pellucid="pairs the first prompt with the first image, in both copies",
    why="diffusers repeats prompts one by one, but images as a list.",
    instead="one call per prompt",
)
def copies_of_images() -> float:
    _, mine = model("sd").with_scheduler("ddim")
    peer = model("sd").as_class("StableDiffusionImg2ImgPipeline")
    prompts, images = ["abc", "bca bca"], [image(1), image(2)]
    made = mine(prompts, image=images, n=2, strength=0.7, **OURS)
    return apart(
        made.latents, theirs(peer, prompt=prompts, image=images, num_images_per_prompt=2, strength=0.7, **PROMPT)[0]
    )


@difference(
    IMAGE,
    "image-to-image with `SASolverScheduler` on Karras sigmas",
    diffusers="adds the noise of the rounded timestep, and continues from the sigma",
    pellucid="adds the noise of the sigma",
    why="Reproducing it would put two levels into one row of the plan.",
    instead="none; other schedulers agree",
)
def sa_solver_karras() -> float:
    _, mine = model("sd").with_scheduler("sa_solver_karras")
    peer = model("sd").as_class("StableDiffusionImg2ImgPipeline")
    made = mine(**WORDS, image=image(), strength=0.5, **OURS)
    return apart(made.latents, theirs(peer, **WORDS, image=image(), strength=0.5, **PROMPT)[0])


# --- samplers ----------------------------------------------------------------------------------------------------


@difference(
    STEP,
    "`DPMSolverSDEScheduler`, and `CosineDPMSolverMultistepScheduler`",
    diffusers="noise from torchsde's Brownian tree, with its own seed",
    pellucid="the same distribution, from the caller's generator; a note says so",
    why="The tree's numbers are specific to torchsde. [More](refused.md#noise-from-a-brownian-tree)",
    instead="none: the image of a seed differs",
)
def brownian() -> float:
    peer, mine = model("sd").with_scheduler("dpmpp_sde")
    return apart(mine(**WORDS, **SIZE, **OURS).latents, theirs(peer, **WORDS, **SIZE, **PROMPT)[0])


@difference(
    STEP,
    "`add_noise` before `set_timesteps` of the DPM solvers, UniPC and DEIS (time 100)",
    diffusers="reads its table of sigmas from the wrong end: timestep 0 gets the most noise",
    pellucid="adds the noise of the given timestep, as after `set_timesteps`",
    why="This is a defect of diffusers; training code that relies on it would train on the wrong levels.",
    instead="none needed: after `set_timesteps` both agree",
)
def noise_from_the_wrong_end() -> float:
    peer = diffusers.DPMSolverMultistepScheduler(**BETAS)
    ours = Scheduler.from_config(peer)
    x, noise = torch.ones(1, 4, 4, 4), torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(3))
    time = torch.tensor([100])
    return apart(ours.add_noise(x, noise, time), peer.add_noise(x, noise, time))


# --- wrap --------------------------------------------------------------------------------------------------------


@difference(
    WRAP,
    "Z-Image: `guidance=4` beside `guidance_scale=4`",
    diffusers="its scale counts from 0: 4 is cond + 4 (cond − uncond)",
    pellucid="a scale counts from 1 in every family: uncond + 4 (cond − uncond)",
    why="One number means one thing.",
    instead="`guidance=5`, or omit `guidance`",
)
def z_image() -> float:
    made = wrapped.ours("z-image", guidance=4.0, decode=False)
    return apart(made.latents, wrapped.theirs("z-image", guidance_scale=4.0))


@difference(
    WRAP,
    "Lumina 2: `guidance=4` beside `guidance_scale=4`",
    diffusers="restores the norm of cond in the guided prediction",
    pellucid="plain guidance, unless a rule is named",
    why="A number is plain guidance everywhere.",
    instead="omit `guidance` and pass `guidance_scale` in `peer_options`: the pipeline combines",
)
def lumina() -> float:
    made = wrapped.ours("lumina2", guidance=4.0, decode=False)
    return apart(made.latents, wrapped.theirs("lumina2", guidance_scale=4.0))


@difference(
    WRAP,
    "Qwen-Image: `guidance=4` beside `true_cfg_scale=4`",
    diffusers="restores the norm of cond in the guided prediction, token by token",
    pellucid="plain guidance, unless a rule is named",
    why="As for Lumina 2.",
    instead="omit `guidance` and pass `true_cfg_scale` in `peer_options`",
)
def qwen_image() -> float:
    made = wrapped.ours("qwen-image", guidance=4.0, decode=False)
    return apart(made.latents, wrapped.theirs("qwen-image", true_cfg_scale=4.0))


# --- the page ----------------------------------------------------------------------------------------------------

HEAD = """# Differences from diffusers

A folder's own scheduler runs in diffusers' dialect, with torch's noise: the same seed gives diffusers' image, to
1e-4 of the largest latent and mostly to 1e-6. The same holds for `pellucid.Scheduler` inside a diffusers pipeline, and
for `pellucid.wrap`. This page lists every known difference. What we refuse, with its error, is on
[another page](refused.md).

The size is the largest difference of the final latents, as a share of the largest latent, in tiny models with random
weights, mostly at 6 steps and seed 3. It distinguishes a difference from rounding; trained weights give other numbers.
`python tests/pipeline/test_differences.py` writes this page, and `make test` measures each entry again: it fails if
a size has changed, or if a difference is gone.

A folder's safety checker is not run, because it does not affect generation. Compared with diffusers {version}.
"""


def written(size: float) -> str:
    return f"{size:.2g}"


def render(sizes: list[str]) -> str:
    parts = [HEAD.format(version=diffusers.__version__)]
    for section in dict.fromkeys(known.section for known in KNOWN):
        parts.append(f"## {section}\n")
        for known, size in zip(KNOWN, sizes, strict=True):
            if known.section == section:
                parts.append(
                    f"### {known.where}\n\n"
                    f"| size | diffusers | Pellucid | for diffusers' result |\n|---|---|---|---|\n"
                    f"| {size} | {known.diffusers} | {known.pellucid} | {known.instead} |\n\n{known.why}\n"
                )
    return "\n".join(parts)


def sizes_on_the_page() -> list[str]:
    return re.findall(r"^\|---\|---\|---\|---\|\n\| (\S+) \|", PAGE.read_text("utf-8"), re.M)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    torch.set_num_threads(1)
    diffusers.utils.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers' own
        yield


def test_the_page_is_what_the_list_makes_of_it() -> None:
    assert PAGE.read_text("utf-8") == render(sizes_on_the_page()), f"run python {Path(__file__).name}"


@pytest.mark.parametrize("number", range(len(KNOWN)), ids=[known.measure.__name__ for known in KNOWN])
def test_a_difference_has_the_size_that_the_page_says(number: int) -> None:
    size = KNOWN[number].measure()
    assert size > CLOSE, "no longer a difference: take it off the list"
    assert float(sizes_on_the_page()[number]) == pytest.approx(size, rel=0.1)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    diffusers.utils.logging.set_verbosity_error()
    PAGE.write_text(render([written(known.measure()) for known in KNOWN]), "utf-8")
    print(f"{len(KNOWN)} differences in {PAGE.relative_to(PAGE.parents[1])}")


if __name__ == "__main__":
    main()
