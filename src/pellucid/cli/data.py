"""`pellucid data`: images to look at and to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pellucid.cli import output
from pellucid.cli.options import Device, Overwrite, group
from pellucid.interop.atomic_files import writing

EPILOG = "A folder of scenes is one that `pellucid train` reads: metadata.jsonl names image, caption and maps."

app = group("Make data, and look at it.")


@app.command("scenes", epilog=EPILOG)
def scenes(
    count: Annotated[int, typer.Option(metavar="N", help="How many scenes.")] = 16,
    seed: Annotated[int, typer.Option(metavar="N", help="Scene i of a seed is the same everywhere.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a contact sheet with captions into this file.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write images, edges, segmentation and metadata.jsonl.")
    ] = None,
    size: Annotated[int, typer.Option(metavar="PIXELS", help="The side of an image.")] = 128,
    split: Annotated[str, typer.Option(metavar="NAME", help="train, held_out or any.")] = "train",
    style: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A style; again for more. Default: those of training."),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print captions and attributes as JSON.")] = False,
) -> None:
    """Make scenes: coloured shapes with captions that are true of them.

    Example: [bold]pellucid data scenes --count 16 --seed 0 --out sheet.png[/]
    """
    from pellucid.cli import data_files

    if out is None and folder is None and not as_json:
        out = Path("scenes.png")
    output.check_overwrite(overwrite, "--out", out is not None)
    wanted = data_files.SceneOptions(count, seed, size, split, tuple(style or ()))
    wanted.check(sheet=out is not None)
    goal = None if out is None else output.destination(out, "--out", (".png",), overwrite=overwrite)
    if folder is not None:
        data_files.check_folder(folder)
    if goal is not None:
        goal.write(data_files.contact_sheet(wanted).save)
    if folder is not None:
        with writing(folder):
            data_files.write_folder(wanted, folder)
    if as_json:
        output.print_json([row for part in data_files.batches(wanted) for row in part.rows])
    for path in (out, folder):
        if path is not None:
            output.wrote(path, as_json)


@app.command("latents")
def latents(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A training config: its data, VAE and tokenizer.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where it writes; data.folder of the config when not given.")
    ] = None,
    count: Annotated[int | None, typer.Option(metavar="N", min=1, help="How many scenes, of data without end.")] = None,
    phrasings: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Captions of each scene; a step draws one of them.")
    ] = None,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the result as JSON.")] = False,
) -> None:
    """Encode the images of a training config once, so that training reads latents and tokens.

    Example: [bold]pellucid data latents configs/scenes_text_unet.toml --out out/latents --count 400000[/]
    """
    from pellucid.cli import data_files

    made = data_files.make_cache(config, out, count=count, phrasings=phrasings, device=device)
    if as_json:
        output.print_json({**vars(made), "folder": str(made.folder)})
        return
    bad = f"; {made.unreadable} images could not be read" if made.unreadable else ""
    print(f"{made.count} images, {made.bytes / 1e6:.0f} MB in {made.seconds:.0f} s → {made.folder}{bad}")
