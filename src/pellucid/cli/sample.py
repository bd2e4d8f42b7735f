"""`pellucid sample`: a model and a prompt → images that carry their recipe; and from such an image back again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from pellucid.cli.options import grid_names, model_names, sampler_names
from pellucid.core.errors import PellucidError

Completion = Callable[[str], list[str]]


def option(panel: str, *names: str, metavar: str = "", help: str, complete: Completion | None = None) -> Any:
    return typer.Option(
        *names, metavar=metavar, help=help, rich_help_panel=panel, show_default=False, autocompletion=complete
    )


WHAT, HOW, IMAGE, TEXT = "What", "How", "From an image", "Text"
ADAPT, LOAD, SPEED, OUT = "Adapters", "Loading", "Memory and speed", "Output"

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A folder, a single file, a hub id (owner/name) or a bundle.",
        show_default=False,
        autocompletion=model_names,
    ),
]
Prompt = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="What to make; @FILE takes one prompt per line.", show_default=False),
]

Negative = Annotated[str | None, option(WHAT, "--negative", metavar="TEXT", help="What to lead away from.")]
Label = Annotated[
    list[str] | None,
    option(WHAT, "--label", metavar="CLASS", help="A class by number or name; may be repeated, one image each."),
]
Count = Annotated[int | None, option(WHAT, "-n", metavar="N", help="Images of each prompt, with consecutive seeds.")]
Seed = Annotated[str | None, option(WHAT, "--seed", metavar="SEED", help="7, or 1,2,3, or 1..4: one per image.")]
Size = Annotated[str | None, option(WHAT, "--size", metavar="WxH", help="Pixels, as 768x512 or 512.")]
From = Annotated[
    Path | None,
    option(WHAT, "--from", metavar="FILE", help="Repeat an image by the recipe inside it, ours or A1111's."),
]

Sampler = Annotated[
    str | None,
    option(
        HOW,
        "--sampler",
        metavar="NAME",
        help="By any of its names; the model's own when not given.",
        complete=sampler_names,
    ),
]
Grid = Annotated[
    str | None,
    option(HOW, "--grid", metavar="NAME", help="Where the model is called: karras, trailing, …", complete=grid_names),
]
Steps = Annotated[int | None, option(HOW, "--steps", metavar="N", help="Steps; 30 when not given.")]
Dialect = Annotated[
    str | None,
    option(HOW, "--dialect", "--as", metavar="DIALECT", help="exact, or the way of diffusers, k-diffusion or comfyui."),
]
SamplerOption = Annotated[
    list[str] | None,
    option(HOW, "--option", metavar="KEY=VALUE", help="An option of the sampler; may be repeated."),
]
PlanFile = Annotated[Path | None, option(HOW, "--plan", metavar="FILE", help="A whole plan (pellucid plan --save).")]
GuidanceText = Annotated[
    str | None,
    option(
        HOW,
        "--guidance",
        metavar="TEXT",
        help="4, off, linear:7:2, 5 + apg, guarded 9 (capped at 7 and rescaled), …; guarded 7 when not given.",
    ),
]
Weak = Annotated[
    str | None, option(HOW, "--weak", metavar="MODEL", help="The worse model that autoguidance leads away from.")
]
Noise = Annotated[
    str | None, option(HOW, "--noise", metavar="SOURCE", help="philox (addressed) or torch (the peers').")
]

ImageFile = Annotated[Path | None, option(IMAGE, "--image", metavar="FILE", help="The image to start from.")]
Mask = Annotated[
    Path | None, option(IMAGE, "--mask", metavar="FILE", help="White is painted anew; as large as the image.")
]
Strength = Annotated[
    float | None, option(IMAGE, "--strength", metavar="S", help="How much is made anew, above 0 to 1.")
]
Start = Annotated[
    float | None,
    option(IMAGE, "--denoising-start", metavar="S", help="Take up an unfinished run at this part of it."),
]
End = Annotated[float | None, option(IMAGE, "--denoising-end", metavar="S", help="Stop at this part of the run.")]

ClipSkip = Annotated[
    int | None, option(TEXT, "--clip-skip", metavar="N", help="Last layers of the text encoder left out.")
]
Weighting = Annotated[bool, option(TEXT, "--weighting", help=r"Read (word:1.3) and \[word] as weights.")]
OriginalSize = Annotated[str | None, option(TEXT, "--original-size", metavar="WxH", help="SDXL: the original size.")]
Crop = Annotated[str | None, option(TEXT, "--crop", metavar="LEFT,TOP", help="SDXL: what was cropped.")]
TargetSize = Annotated[str | None, option(TEXT, "--target-size", metavar="WxH", help="SDXL: the size after the crop.")]
Aesthetic = Annotated[
    str | None, option(TEXT, "--aesthetic", metavar="A,B", help="SDXL refiner: scores with and without the prompt.")
]

LoraFile = Annotated[
    list[str] | None, option(ADAPT, "--lora", metavar="FILE[:SCALE]", help="A LoRA; may be repeated, they add up.")
]
ControlWords = Annotated[
    list[str] | None,
    option(
        ADAPT,
        "--control",
        metavar="NET,FILE[,SCALE[,A-B]]",
        help="A ControlNet, its image, its scale, and the part of the run where it acts; may be repeated.",
    ),
]
ImagePromptWords = Annotated[
    list[str] | None,
    option(ADAPT, "--image-prompt", metavar="ADAPTER,FILE[,SCALE]", help="An IP-Adapter and its image; repeatable."),
]
Inversion = Annotated[
    list[Path] | None, option(ADAPT, "--inversion", metavar="FILE", help="A textual inversion; may be repeated.")
]

Vae = Annotated[str | None, option(LOAD, "--vae", metavar="FOLDER", help="Another autoencoder, a tiny one too.")]
ImageEncoder = Annotated[
    str | None, option(LOAD, "--image-encoder", metavar="FOLDER", help="The encoder that image prompts need.")
]
Tokenizer = Annotated[
    Path | None, option(LOAD, "--tokenizer", metavar="FOLDER", help="For single files, which hold none.")
]
Target = Annotated[
    str | None, option(LOAD, "--target", metavar="NAME", help="What the network predicts, against its files: eps, v, …")
]
Variant = Annotated[str | None, option(LOAD, "--variant", metavar="NAME", help="Which files, such as fp16.")]
Revision = Annotated[str | None, option(LOAD, "--revision", metavar="NAME", help="A revision on the hub.")]

Dtype = Annotated[
    str | None,
    option(
        SPEED,
        "--dtype",
        metavar="NAME",
        help="float32, float16, bfloat16, stored (the files' own); stored when not given, but no float16 on a CPU.",
    ),
]
Device = Annotated[str | None, option(SPEED, "--device", metavar="NAME", help="cpu, cuda, …")]
Attention = Annotated[str | None, option(SPEED, "--attention", metavar="NAME", help="The kernel of every attention.")]
VaeTile = Annotated[
    int | None, option(SPEED, "--vae-tile", metavar="N", help="Decode in tiles of so many latents a side.")
]
VaeSlicing = Annotated[bool, option(SPEED, "--vae-slicing", help="Decode images one at a time.")]
ChannelsLast = Annotated[bool, option(SPEED, "--channels-last", help="Convolutions with the channels innermost.")]
Offload = Annotated[
    str | None, option(SPEED, "--offload", metavar="HOW", help="Networks wait on the CPU: none, component or block.")
]
Compile = Annotated[bool, option(SPEED, "--compile", help="The denoising network through torch.compile.")]
Batch = Annotated[
    int | None,
    option(SPEED, "--batch", metavar="N", help="Images at once; 1 when not given, which repeats bit by bit."),
]

Out = Annotated[
    Path | None, option(OUT, "--out", metavar="PATH", help="A .png or a folder; out-SEED.png when not given.")
]
Overwrite = Annotated[bool, option(OUT, "--overwrite", help="Replace files that exist.")]
GridOf = Annotated[
    str | None,
    option(OUT, "--grid-of", metavar="AXES", help='A labelled sheet: "steps=10,20,50 x guidance=3,5,7".'),
]
TraceFile = Annotated[
    Path | None,
    option(OUT, "--trace", metavar="FILE", help="Record every step; see pellucid trace. FILE-001, … of several runs."),
]
TraceTensors = Annotated[
    bool, option(OUT, "--trace-tensors", help="Keep x, x0, eps and the guidance delta of each step, beside numbers.")
]
KeepCells = Annotated[bool, option(OUT, "--keep-cells", help="Keep each cell of the sheet, in a folder beside it.")]
AsJson = Annotated[bool, option(OUT, "--json", help="Print files, seeds, stages, notes and recipes as JSON.")]

EXAMPLES = (
    'Example: pellucid sample ./sd15 "a red star" --seed 7 --out star.png',
    '  pellucid sample ./sd15 @prompts.txt -n 2 --sampler "DPM++ 2M Karras" --steps 20 --out pictures/',
    '  pellucid sample ./sd15 "a red star" --image sketch.png --strength 0.6 --lora ink.safetensors:0.8',
    '  pellucid sample ./sd15 "a red star" --seed 7 --grid-of "steps=10,20,50 x guidance=3,5,7" --out sheet.png',
    "  pellucid sample --from star.png",
)
EXAMPLES_TEXT = "\n\n".join(line.replace("[", r"\[") for line in EXAMPLES)


# --- The command ----------------------------------------------------------------------------------------------------

EPILOG = EXAMPLES_TEXT


def command(
    model: Model = None,
    prompt: Prompt = None,
    from_file: From = None,
    negative: Negative = None,
    label: Label = None,
    n: Count = None,
    seed: Seed = None,
    size: Size = None,
    sampler: Sampler = None,
    grid: Grid = None,
    steps: Steps = None,
    dialect: Dialect = None,
    option: SamplerOption = None,
    plan: PlanFile = None,
    guidance: GuidanceText = None,
    weak: Weak = None,
    noise: Noise = None,
    image: ImageFile = None,
    mask: Mask = None,
    strength: Strength = None,
    denoising_start: Start = None,
    denoising_end: End = None,
    clip_skip: ClipSkip = None,
    weighting: Weighting = False,
    original_size: OriginalSize = None,
    crop: Crop = None,
    target_size: TargetSize = None,
    aesthetic: Aesthetic = None,
    lora: LoraFile = None,
    control: ControlWords = None,
    image_prompt: ImagePromptWords = None,
    inversion: Inversion = None,
    vae: Vae = None,
    image_encoder: ImageEncoder = None,
    tokenizer: Tokenizer = None,
    target: Target = None,
    variant: Variant = None,
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
    attention: Attention = None,
    vae_tile: VaeTile = None,
    vae_slicing: VaeSlicing = False,
    channels_last: ChannelsLast = False,
    offload: Offload = None,
    compile: Compile = False,
    batch: Batch = None,
    out: Out = None,
    overwrite: Overwrite = False,
    grid_of: GridOf = None,
    keep_cells: KeepCells = False,
    trace: TraceFile = None,
    trace_tensors: TraceTensors = False,
    as_json: AsJson = False,
) -> None:
    """Make images. Each PNG carries its recipe, as ours and as A1111's `parameters` text.

    Without --sampler the model keeps its own scheduler; without --guidance it gets the guarded default.
    """
    words = dict(locals())  # as typer converted them: what its context holds are texts in some of its versions
    if model is None and from_file is None:  # said before torch is imported
        raise PellucidError("MODEL must be given, or an image with --from; got neither.", "usage")
    from pellucid.cli import sample_run

    sample_run.sample(words)
