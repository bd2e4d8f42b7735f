"""`pellucid score`: how near images are to a reference, and to their prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pellucid.cli import output
from pellucid.cli.options import AsJson, Device, Overwrite, flag, given_only, option
from pellucid.core.errors import PellucidError

if TYPE_CHECKING:
    from pellucid.evidence.metrics.score import Score
    from pellucid.evidence.statistics import Estimate

_EXAMPLES = (
    "pellucid score samples.npz --against reference.safetensors --inception inception.safetensors --json",
    "pellucid score out/ --clip clip-vit-base-patch32 --prompts prompts.txt",
    "pellucid score data/cifar10:train --save cifar10-train.safetensors",
)
EPILOG = "\n\n".join(("More:", *_EXAMPLES))


def command(
    images: Annotated[
        str,
        typer.Argument(
            metavar="IMAGES",
            help="A folder of images, FOLDER:train or :test of CIFAR-10, an .npz or .safetensors file of uint8.",
        ),
    ],
    against: Annotated[str | None, option("REFERENCE", "Images as above, or a file from --save.")] = None,
    inception: Annotated[
        Path | None, option("FILE", "Weights of FID's Inception (default: the cached ones, or a download).")
    ] = None,
    clip: Annotated[str | None, option("FOLDER", "A CLIP that compares each image with its prompt.")] = None,
    prompts: Annotated[Path | None, option("FILE", "A prompt per line, or .jsonl with file_name and text.")] = None,
    save: Annotated[Path | None, option("FILE", "Write the statistics of IMAGES, to score others against.")] = None,
    overwrite: Overwrite = False,
    kid_subsets: Annotated[int | None, option("N", "Random subsets of KID (default: 100).", min=1)] = None,
    kid_size: Annotated[int | None, option("N", "Images of each subset (default: 1000).", min=2)] = None,
    neighbours: Annotated[int | None, option("K", "Neighbours of precision and recall (default: 3).", min=1)] = None,
    bootstrap: Annotated[
        int | None, option("N", "Resamples of the intervals, 0 for none (default: 1000; for FID 50).", min=0)
    ] = None,
    seed: Annotated[int | None, option("N", "Seed of the subsets and resamples.", min=0)] = None,
    batch: Annotated[int, option("N", "Images at once.", min=1)] = 64,
    device: Device = None,
    no_cache: Annotated[bool, flag("--no-cache", "Neither read nor keep features of the reference.")] = False,
    as_json: AsJson = False,
) -> None:
    """Score images: FID, KID, precision and recall against a reference; CLIP's cosine against prompts.

    All with bootstrap intervals. Below 10,000 images, trust KID rather than FID.

    Example: [bold]pellucid score out/ --against data/cifar10:train[/]
    """
    if (clip is None) != (prompts is None):
        got = "--clip" if prompts is None else "--prompts"
        raise PellucidError(f"--clip and --prompts must be given together; got {got} alone.", "usage")
    if against is None and clip is None and save is None:
        raise PellucidError("--against, --clip or --save must be given; got none of them.", "usage")
    if inception is not None and against is None and save is None:
        raise PellucidError("--inception must be given with --against or --save; got it alone.", "usage")
    output.check_overwrite(overwrite, "--save", save is not None)
    goal = None if save is None else output.destination(save, "--save", (".safetensors",), overwrite=overwrite)
    with_reference = {"kid-subsets": kid_subsets, "kid-size": kid_size, "neighbours": neighbours}
    for name in given_only(**with_reference, **{"no-cache": no_cache or None}):
        if against is None:
            raise PellucidError(f"--{name} must be given with --against; got it alone.", "usage")
    from pellucid.evidence.metrics.score import ScoreConfig, ScoreRun, with_image_text

    kid = {"subsets": kid_subsets, "subset": kid_size}
    config = ScoreConfig(**given_only(**kid, neighbours=neighbours, resamples=bootstrap, seed=seed))
    run = ScoreRun(images, against, config, batch, device, cached=not no_cache, bar=output.progress)
    fit = None if clip is None or prompts is None else run.judge(clip, prompts)  # before the long work
    found = run.score(inception, None if goal is None else goal.write)
    if fit is not None:
        found = with_image_text(found, fit())
    if as_json:
        output.print_json(found.to_json())
    else:
        _show(found, config.level)
    if goal is not None:
        output.wrote(goal, as_json)


def _show(found: Score, level: float) -> None:
    """A table, KID first where FID is not to be trusted, and the notes."""
    console = output.console()
    words = f"{found.images} · {found.count:,} images"
    if found.reference is not None:
        words += f" · against {found.reference} · {found.reference_count:,} images"
    console.print(words, markup=False)
    table = output.table("figure", "value", f"{level:.0%} interval", "how", right=("value",), rows=_rows(found))
    if table.row_count:
        console.print(table)
    for note in found.notes:
        console.print(f"note: {note}", markup=False)


def _rows(found: Score) -> Iterator[tuple[str, str, str, str]]:
    distances = []
    if found.fid is not None:
        how = f"{found.fid.count} resamples, reflected; their bias, {found.fid.bias:.3f}, is taken out"
        distances.append(("FID", *_with_interval(found.fid, "{:.3f}"), how if found.fid.ends is not None else ""))
    if found.kid is not None and found.kid_subsets is not None:
        part = found.kid_subsets
        subsets = f"{1000 * part.value:.3f} ± {1000 * part.std:.3f} over {part.subsets} subsets of {part.size}"
        distances.insert(
            0 if found.prefers_kid else 1,
            ("KID × 1000", *_with_interval(found.kid, "{:.3f}", 1000), f"over all pairs; {subsets}"),
        )
    yield from distances
    if found.precision is not None and found.recall is not None:
        yield ("precision", *_with_interval(found.precision, "{:.4f}"), "images like some of the reference")
        yield ("recall", *_with_interval(found.recall, "{:.4f}"), "of the reference like some images")
    if found.image_text is not None:
        yield ("image-text", *_with_interval(found.image_text, "{:.2f}"), "100 × mean cosine of image and prompt")


def _with_interval(figure: Estimate, form: str, factor: float = 1.0) -> tuple[str, str]:
    spread = [form.format(factor * end) for end in figure.ends or ()]
    return form.format(factor * figure.value), " to ".join(spread)
