"""`pellucid study adherence` and `pellucid study guidance`: whether a model's images show what was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pellucid.cli import output
from pellucid.cli.options import Device, whole_numbers
from pellucid.cli.run_study import AsJson, Folder, Processes, Ray, Shard, comma_words, given_only, run
from pellucid.core.errors import PellucidError, rule

if TYPE_CHECKING:
    from pellucid.evidence.adherence.study import AdherenceFigures
    from pellucid.evidence.study.guidance import GuidanceStudyConfig
    from pellucid.evidence.study.guidance_report import GuidanceReport


# --- Adherence ------------------------------------------------------------------------------------------------------


def study_adherence(
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="A bundle's name, or the folder of a model of scenes.")
    ],
    out: Folder = Path("out/adherence"),
    part: Annotated[
        str | None, typer.Option(metavar="NAME", help="unet, or dit: the transformer beside it; unet when not given.")
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many prompts; 1000 when not given.")
    ] = None,
    objects: Annotated[
        str | None, typer.Option(metavar="N,N", help="Numbers of objects, drawn at random; 1,2,3 when not given.")
    ] = None,
    sampler: Annotated[str | None, typer.Option(metavar="NAME", help="dpmpp_2m when not given.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="20 when not given.")] = None,
    guidance: Annotated[float | None, typer.Option(metavar="X", help="4 when not given.")] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", min=1, help="Images at once; 50 when not given.")] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Of the prompts, and of the first image; 0 when not given.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="float32, float16, bfloat16; float32 when not given.")
    ] = None,
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

    given = {"sampler": sampler, "steps": steps, "guidance": guidance, "batch": batch, "seed": seed}
    making = ImageSettings(**given_only(given))
    asked = {
        "part": part,
        "prompts": prompts,
        "dtype": dtype,
        "objects": None if objects is None else whole_numbers("--objects", objects),
    }
    config = AdherenceConfig(model=model, making=making, **given_only(asked))
    how = {"shard": shard, "processes": processes, "ray": ray}
    run(AdherenceStudy, config, out, device=device, show=_show_adherence, as_json=as_json, **how)


def _show_adherence(found: dict[str, AdherenceFigures], out: Path) -> None:
    from pellucid.evidence.adherence.study import adherence_table

    told = adherence_table(found)
    shown = output.table(*told.columns, right=told.columns[1:])
    for row in told.rows:
        shown.add_row(*(cell.replace("**", "") for cell in row), style="bold" if "**" in row[0] else None)
    output.console().print(shown)
    print(f"95 % intervals → {out}: table.md, figures.json, random.png" + _failures_sheet(out))


def _failures_sheet(out: Path) -> str:
    return ", failures.png" if (out / "failures.png").exists() else ""


# --- Guidance -------------------------------------------------------------------------------------------------------


def study_guidance(
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="What `pellucid sample` takes: a bundle, a folder, …")
    ],
    scales: Annotated[
        str | None, typer.Option(metavar="X,X", help="Guidance scales; 1,2,4,7,10,15 when not given.")
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="plain, rescale, dynamic, interval, apg, cfg_zero when not given; with options: 'rescale phi=0.5'.",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A prompt per line; or scenes:N, captions whose truth is known. scenes:64 when not given.",
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Images a prompt; 4 when not given.")] = None,
    out: Folder = Path("out/guidance"),
    clip: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="A CLIP that scores prompts of a file; the bundle's own when not given."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="True images; those of scenes, or unguided ones, when not given."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="X", help="How far looks may be from the reference's, as a share; 0.1 when not given."),
    ] = None,
    sampler: Annotated[str | None, typer.Option(metavar="NAME", help="dpmpp_2m when not given.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="20 when not given.")] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", min=1, help="Images at once; 32 when not given.")] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Of scenes, and of the first image; 0 when not given.")
    ] = None,
    part: Annotated[
        str | None, typer.Option(metavar="NAME", help="unet, or dit: the transformer beside it; unet when not given.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="float32, float16, bfloat16; float32 when not given.")
    ] = None,
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

    given = {
        "scales": None if scales is None else _scale_numbers(scales),
        "rules": None if rules is None else tuple(" ".join(name.split()) for name in rules.split(",")),
        **{"prompts": prompts, "seeds": seeds, "clip": clip, "reference": reference},
        **{"tolerance": tolerance, "sampler": sampler, "steps": steps, "batch": batch, "seed": seed},
        **{"part": part, "dtype": dtype},
    }
    config = _with_own_clip(GuidanceStudyConfig(model=model, **given_only(given)))
    how = {"shard": shard, "processes": processes, "ray": ray}
    run(GuidanceStudy, config, out, device=device, show=_show_guidance, as_json=as_json, **how)


def _scale_numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in comma_words(text))
    except ValueError:
        raise PellucidError(rule("--scales", "numbers with commas between them", text), "usage") from None


def _with_own_clip(config: GuidanceStudyConfig) -> GuidanceStudyConfig:
    """With the image-text encoder of the model's own bundle, where prompts need one and none is given."""
    from dataclasses import replace

    from pellucid.interop import source

    if config.clip is not None or config.asked.queries is not None:
        return config
    if not (source.locate(config.model) / "image_text").is_dir():
        advice = "They are no captions of scenes: name a CLIP that scores them."
        raise PellucidError(
            f"--clip must be given for the prompts of {config.prompts}; got none. {advice}", "study-clip"
        )
    return replace(config, clip=f"{config.model}/image_text")


def _show_guidance(report: GuidanceReport, out: Path) -> None:
    from pellucid.evidence.study.guidance_report import definition, headline, range_table
    from pellucid.evidence.study.guidance_results import doubts

    console = output.console()
    console.print(headline(report), markup=False)
    told = range_table(report)
    table = output.table(*told.columns, right=told.columns[1:4])
    for row in told.rows:
        table.add_row(*row)
    console.print(table)
    console.print(definition(report), markup=False)
    console.print(report.advice.words, markup=False, style="bold")
    for words in doubts(report.found):
        console.print(words, markup=False)
    print(f"→ {out}: report.html, table.md, figures.json, charts/")
