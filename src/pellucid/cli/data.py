"""`pellucid data`: images to look at and to train on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from pellucid.cli import output
from pellucid.cli.options import AsJson, Device, Overwrite, group, option
from pellucid.interop.atomic_files import writing

EPILOG = "`pellucid train` reads a folder of scenes: metadata.jsonl names image, caption and maps."

app = group("Make data, and look at it.")


@app.command("scenes", epilog=EPILOG)
def scenes(
    count: Annotated[int, option("N", "How many scenes.")] = 16,
    seed: Annotated[int, option("N", "Scene i of a seed is the same everywhere.")] = 0,
    out: Annotated[Path | None, option("FILE", "Draw a contact sheet with captions into this file.")] = None,
    folder: Annotated[Path | None, option("DIR", "Write images, edges, segmentation and metadata.jsonl.")] = None,
    size: Annotated[int, option("PIXELS", "The side of an image.")] = 128,
    split: Annotated[str, option("NAME", "train, held_out or any.")] = "train",
    style: Annotated[list[str] | None, option("NAME", "A style; may be repeated (default: those of training).")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Make scenes: coloured shapes with true captions.

    Example: [bold]pellucid data scenes --count 16 --seed 0 --out sheet.png[/]
    """
    if out is None and folder is None and not as_json:
        out = Path("scenes.png")
    output.check_overwrite(overwrite, "--out", out is not None)
    from pellucid.scenes import export

    options = export.SceneOptions(count, seed, size, split, tuple(style or ()))
    options.check(sheet=out is not None)
    goal = None if out is None else output.destination(out, "--out", (".png",), overwrite=overwrite)
    if folder is not None:
        export.check_folder(folder)
    if goal is not None:
        goal.write(export.contact_sheet(options).save)
    if folder is not None:
        with writing(folder), output.progress("scenes", options.batches) as done:
            export.write_folder(options, folder, done)
    if as_json:
        output.print_json([row for part in export.batches(options) for row in part.rows])
    for path in (out, folder):
        if path is not None:
            output.wrote(path, as_json)


@app.command("latents")
def latents(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A training config: its data, VAE and tokenizer.")],
    out: Annotated[Path | None, option("FOLDER", "Output folder (default: data.folder of the config).")] = None,
    count: Annotated[int | None, option("N", "How many scenes to encode, for data without end.", min=1)] = None,
    phrasings: Annotated[
        int | None, option("N", "Captions per scene; a training step draws one of them.", min=1)
    ] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Encode the images of a training config once, so that training reads latents and tokens.

    Example: [bold]pellucid data latents configs/scenes_text_unet.toml --out out/latents --count 400000[/]
    """
    import torch

    from pellucid.train.config import TrainConfig
    from pellucid.train.latent_cache import Cache
    from pellucid.train.latent_recipe import make_latents

    read = TrainConfig.load(config)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    began, shown = time.perf_counter(), 0
    with output.progress("encoding", 100) as advance:

        def tell(done: int, total: int) -> None:
            nonlocal shown
            advance(100 * done // total - shown)
            shown = 100 * done // total

        folder = make_latents(read, out, count=count, phrasings=phrasings, device=place, tell=tell)
    cache, seconds = Cache.read(folder), time.perf_counter() - began
    facts = {"folder": str(folder), "count": cache.count, "bytes": sum(cache.sizes)}
    facts |= {"unreadable": len(cache.unreadable), "seconds": seconds}
    if as_json:
        output.print_json(facts)
        return
    bad = f"; {len(cache.unreadable)} images could not be read" if cache.unreadable else ""
    print(f"{cache.count} images, {sum(cache.sizes) / 1e6:.0f} MB in {seconds:.0f} s → {folder}{bad}")
