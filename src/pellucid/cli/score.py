"""`pellucid score`: how near images are to a reference, and to their prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import output
from pellucid.cli.options import AsJson, Device, Overwrite, flag, given_only, option
from pellucid.core.errors import PellucidError, rule

if TYPE_CHECKING:
    from pellucid.evidence.metrics.image_text import ImageText
    from pellucid.evidence.metrics.images import ImageSet
    from pellucid.evidence.metrics.inception import Inception
    from pellucid.evidence.metrics.score import FeatureSet, Score, ScoreConfig
    from pellucid.evidence.statistics import Estimate

_EXAMPLES = (
    "pellucid score samples.npz --against reference.safetensors --inception inception.safetensors --json",
    "pellucid score out/ --clip clip-vit-base-patch32 --prompts prompts.txt",
    "pellucid score data/cifar10:train --save cifar10-train.safetensors",
)
_MEGABYTES = 92  # of the weights, when they are downloaded
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
    from pellucid.evidence.metrics.score import ScoreConfig, with_image_text

    kid = {"subsets": kid_subsets, "subset": kid_size}
    asked = ScoreConfig(**given_only(**kid, neighbours=neighbours, resamples=bootstrap, seed=seed))
    work = _ScoreRun(images, against, batch, device, cached=not no_cache)
    fit = None if clip is None or prompts is None else work.judge(clip, prompts)  # before the long work
    found = work.score(inception, goal, asked)
    if fit is not None:
        found = with_image_text(found, fit(asked))
    if as_json:
        output.print_json(found.to_json())
    else:
        _show(found, asked.level)
    if goal is not None:
        output.wrote(goal, as_json)


class _ScoreRun:
    """The sets and networks of one call; what is missing is found before the long work begins."""

    def __init__(self, images: str, reference: str | None, batch: int, device: str | None, cached: bool) -> None:
        from pellucid.evidence.metrics.fid import Statistics
        from pellucid.evidence.metrics.images import open_images
        from pellucid.interop import source
        from pellucid.pipeline.load import default_device

        self.names = (images, reference)
        self.images = open_images(images)
        self.reference = None if reference is None else open_images(reference)
        self.batch, self.cached = batch, cached
        self.device = source.place(device) or default_device()
        self.known = [isinstance(side, Statistics) for side in (self.images, self.reference) if side is not None]

    def score(self, inception: Path | None, save: output.Destination | None, asked: ScoreConfig) -> Score:
        """The figures against the reference; without one, only the count."""
        from pellucid.evidence.metrics.score import Score, score, stages

        name, against = self.names
        if against is None and save is None:
            return Score(name, len(self.image_set("--clip")))
        if save is not None:
            self.image_set("--save")
        network = self.network(inception)
        mine = self.measured(name, self.images, network, False)
        if save is not None:
            save.write(mine.statistics.save)
        if against is None:
            return Score(name, mine.count, notes=tuple(mine.notes()))
        other = self.measured(against, self.reference, network, self.cached)
        with output.progress("scoring", stages(asked)) as seen:
            return score(mine, other, asked, seen)

    def network(self, path: Path | None) -> Inception | None:
        """FID's network, unless both sides are statistics already."""
        from pellucid.evidence.metrics.inception import load_inception

        if all(self.known):
            if path is not None:
                raise PellucidError(rule("--inception", "left out for statistics", str(path)), "usage")
            return None
        with output.progress("Inception's weights", _MEGABYTES) as seen:
            return load_inception(path, self.device, lambda *_: seen())

    def measured(self, name: str, side: Any, network: Inception | None, cached: bool) -> FeatureSet:
        """One side as the network sees it."""
        from pellucid.evidence.metrics import score
        from pellucid.evidence.metrics.fid import Statistics
        from pellucid.evidence.metrics.inception import cache_folder

        if network is None or isinstance(side, Statistics):
            return score.FeatureSet(name, side.to(self.device))
        with output.progress(name, len(side)) as done:
            if cached:
                return score.measure_cached(side, network, cache_folder(), self.batch, done)
            return score.measure(side, network, self.batch, done)

    def image_set(self, option: str) -> ImageSet:
        from pellucid.evidence.metrics.fid import Statistics

        if isinstance(self.images, Statistics):
            raise PellucidError(rule(f"IMAGES of {option}", "images", "statistics"), "usage")
        return self.images

    def judge(self, clip: str, prompts: Path) -> Callable[[ScoreConfig], ImageText]:
        """What says how well each image fits its prompt, ready to run."""
        from pellucid.evidence.metrics.image_text import Judge, image_text, read_prompts

        images = self.image_set("--clip")
        texts = read_prompts(prompts, images)
        judge = Judge.load(clip, self.device)

        def run(asked: ScoreConfig) -> ImageText:
            with output.progress("prompts", len(images)) as done:
                return image_text(images, texts, judge, asked.resamples, asked.seed, done)

        return run


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
