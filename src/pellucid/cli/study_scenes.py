"""`pellucid study adherence` and `pellucid study guidance`: whether a model's images show what was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pellucid.cli import output
from pellucid.cli.options import Device, numbers, option
from pellucid.cli.run_study import AsJson, Folder, Processes, Ray, Shard, fields_given, run
from pellucid.core.errors import PellucidError

if TYPE_CHECKING:
    from pellucid.evidence.adherence.study import AdherenceFigures
    from pellucid.evidence.study.guidance import GuidanceStudyConfig
    from pellucid.evidence.study.guidance_report import GuidanceReport

Part = Annotated[str | None, option("NAME", "unet, or dit: the transformer beside it; unet when not given.")]
Sampler = Annotated[str | None, option("NAME", "dpmpp_2m when not given.")]
Steps = Annotated[int | None, option("N", "20 when not given.", min=1)]
DType = Annotated[str | None, option("NAME", "float32, float16, bfloat16; float32 when not given.")]


# --- Adherence ------------------------------------------------------------------------------------------------------


def study_adherence(
    ctx: typer.Context,
    model: Annotated[str, option("MODEL", "A bundle's name, or the folder of a model of scenes.")],
    out: Folder = Path("out/adherence"),
    part: Part = None,
    prompts: Annotated[int | None, option("N", "How many prompts; 1000 when not given.", min=1)] = None,
    objects: Annotated[str | None, option("N,N", "Numbers of objects, drawn at random; 1,2,3 when not given.")] = None,
    sampler: Sampler = None,
    steps: Steps = None,
    guidance: Annotated[float | None, option("X", "4 when not given.")] = None,
    batch: Annotated[int | None, option("N", "Images at once; 50 when not given.", min=1)] = None,
    seed: Annotated[int | None, option("N", "Of the prompts, and of the first image; 0 when not given.", min=0)] = None,
    dtype: DType = None,
    device: Device = None,
    shard: Shard = None,
    processes: Processes = None,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """Ask for combinations that training never saw, read the images, and count what is right.

    Writes a table, a sheet of 100 random images and a sheet of failures.

    Example: [bold]pellucid study adherence --model scenes-128 --prompts 200[/]
    """
    from pellucid.evidence.adherence.samples import ImageSettings
    from pellucid.evidence.adherence.study import AdherenceConfig, AdherenceStudy

    making = ImageSettings(**fields_given(ImageSettings, ctx.params))
    read = {"making": making, "objects": None if objects is None else numbers("--objects", objects)}
    config = AdherenceConfig(**fields_given(AdherenceConfig, {**ctx.params, **read}))
    run(AdherenceStudy, config, ctx.params, _show_adherence)


def _show_adherence(found: dict[str, AdherenceFigures], out: Path) -> None:
    from pellucid.evidence.adherence.study import adherence_table

    told = adherence_table(found)
    shown = output.table(*told.columns, right=told.columns[1:])
    for row in told.rows:
        shown.add_row(*(cell.replace("**", "") for cell in row), style="bold" if "**" in row[0] else None)
    output.console().print(shown)
    failures = ", failures.png" if (out / "failures.png").exists() else ""
    print(f"95 % intervals → {out}: table.md, figures.json, random.png{failures}")


# --- Guidance -------------------------------------------------------------------------------------------------------


def study_guidance(
    ctx: typer.Context,
    model: Annotated[str, option("MODEL", "What `pellucid sample` takes: a bundle, a folder, …")],
    scales: Annotated[str | None, option("X,X", "Guidance scales; 1,2,4,7,10,15 when not given.")] = None,
    rules: Annotated[
        str | None,
        option(
            "NAME,NAME",
            "plain, rescale, dynamic, interval, apg, cfg_zero when not given; with options: 'rescale phi=0.5'.",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        option("FILE", "A prompt per line; or scenes:N, captions whose truth is known. scenes:64 when not given."),
    ] = None,
    seeds: Annotated[int | None, option("N", "Images a prompt; 4 when not given.", min=1)] = None,
    out: Folder = Path("out/guidance"),
    clip: Annotated[
        str | None, option("FOLDER", "A CLIP that scores prompts of a file; the bundle's own when not given.")
    ] = None,
    reference: Annotated[
        str | None, option("FOLDER", "True images; those of scenes, or unguided ones, when not given.")
    ] = None,
    tolerance: Annotated[
        float | None, option("X", "How far looks may be from the reference's, as a share; 0.1 when not given.")
    ] = None,
    sampler: Sampler = None,
    steps: Steps = None,
    batch: Annotated[int | None, option("N", "Images at once; 32 when not given.", min=1)] = None,
    seed: Annotated[int | None, option("N", "Of scenes, and of the first image; 0 when not given.", min=0)] = None,
    part: Part = None,
    dtype: DType = None,
    device: Device = None,
    shard: Shard = None,
    processes: Processes = None,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """Guide one model with every scale under every rule, and find the scales that are useful.

    Adherence, colour bleeding, saturation, sharpness and diversity, with intervals; report.html and charts.

    Example: [bold]pellucid study guidance --model scenes-128 --scales 1,2,4,7,10 --rules plain,rescale,apg[/]
    """
    from pellucid.evidence.study.guidance import GuidanceStudy, GuidanceStudyConfig

    read = {
        "scales": None if scales is None else numbers("--scales", scales, float),
        "rules": None if rules is None else tuple(" ".join(name.split()) for name in rules.split(",")),
    }
    config = GuidanceStudyConfig(**fields_given(GuidanceStudyConfig, {**ctx.params, **read}))
    run(GuidanceStudy, _with_own_clip(config), ctx.params, _show_guidance)


def _with_own_clip(config: GuidanceStudyConfig) -> GuidanceStudyConfig:
    """With the image-text encoder of the model's own bundle, where prompts need one and none is given."""
    from dataclasses import replace

    from pellucid.interop import source

    if config.clip is not None or config.asked.queries is not None:
        return config
    if not (source.locate(config.model) / "image_text").is_dir():
        advice = "They are no captions of scenes: name a CLIP that scores them."
        must = f"--clip must be given for the prompts of {config.prompts}; got none. {advice}"
        raise PellucidError(must, "study-clip")
    return replace(config, clip=f"{config.model}/image_text")


def _show_guidance(report: GuidanceReport, out: Path) -> None:
    from pellucid.evidence.study.guidance_report import definition, headline, range_table
    from pellucid.evidence.study.guidance_results import doubts

    console = output.console()
    console.print(headline(report), markup=False)
    told = range_table(report)
    console.print(output.table(*told.columns, right=told.columns[1:4], rows=told.rows))
    console.print(definition(report), markup=False)
    console.print(report.advice.words, markup=False, style="bold")
    for words in doubts(report.found):
        console.print(words, markup=False)
    print(f"→ {out}: report.html, table.md, figures.json, charts/")
