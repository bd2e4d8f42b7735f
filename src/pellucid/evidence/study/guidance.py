"""The guidance study: scale × rule, each cell from the same prompts and the same noise, measured image by image.

A folder holds config.json, one record for each few prompts of a cell, and some images of every cell. Figures, ranges
and the recommendation are made from the records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from PIL import Image
from torch import Tensor

from pellucid import scenes
from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.evidence import qualities
from pellucid.evidence.adherence import sheets
from pellucid.evidence.adherence.judging import judge as judged
from pellucid.evidence.adherence.samples import DTYPE, PARTS, ImageSettings, Maker, Part, open_pipe, through
from pellucid.evidence.metrics.fid import Statistics
from pellucid.evidence.metrics.image_text import Judge
from pellucid.evidence.metrics.images import ImageSet, open_images
from pellucid.evidence.metrics.inception import to_bytes
from pellucid.evidence.study.kernel import ShardNumber, Study, check_lists, check_whole
from pellucid.evidence.study.subject import SCENES, queries_of, read_lines_of, scene_count
from pellucid.interop import source
from pellucid.models.guidance import Guidance, short
from pellucid.models.rules import RULES, CFGZero
from pellucid.pipeline import fingerprint
from pellucid.pipeline.images import to_tensor
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.wrapped import WrappedPipeline, read_scheduler
from pellucid.scenes.grammar import Query
from pellucid.scenes.sampling import OBJECTS
from pellucid.scenes.scene import Scenes

if TYPE_CHECKING:
    from pellucid.evidence.study.guidance_report import GuidanceReport, GuidanceResults

# --- Rules by name --------------------------------------------------------------------------------------------------

RULE_NAMES = ("plain", "rescale", "dynamic", "interval", "apg", "cfg_zero")
INTERVAL_SPAN = (0.28, 5.42)  # sigma / alpha between which `interval` guides: Kynkäänniemi et al. 2024, for SDXL


@dataclass(frozen=True)
class ModelTraits:
    """What of a model decides how a rule is spelled: whether it works on latents, and whether it is a flow."""

    latent: bool = False
    flow: bool = False

    @staticmethod
    def of(pipe: Any) -> ModelTraits:
        """Of a pipeline of ours or a wrapped one; what stands in for one works on pixels."""
        if isinstance(pipe, Pipeline):
            return ModelTraits(pipe.components.vae is not None, pipe.components.schedule.frame == "flow")
        if isinstance(pipe, WrappedPipeline):
            peer = pipe.peer.pipeline
            return ModelTraits(getattr(peer, "vae", None) is not None, read_scheduler(peer).schedule.frame == "flow")
        return ModelTraits()


def guidance_of(words: str, scale: float, nature: ModelTraits) -> Guidance:
    """A rule of the study, with options behind its name where it has any, at a scale.

    `dynamic` is `threshold` on pixels and `mimic` on latents; `interval` without options guides in the SPAN of sigmas.
    At scale 1 rules that then do nothing are plain, so that their images are made once.
    """
    name, *options = words.split() or [""]
    if name not in (*RULE_NAMES, *RULES):
        known = (*RULE_NAMES, *(one for one in RULES if one not in RULE_NAMES))
        raise PellucidError(rule("rules", f"of {', '.join(known)}", name, nearest(name, known)), "study-rules")
    if name == "plain" and options:
        raise PellucidError(rule("options of plain", "none", " ".join(options)), "study-rules")
    spelled = {"plain": "", "dynamic": "mimic" if nature.latent else "threshold"}.get(name, name)
    if name == "interval" and not options:
        low, high = (value / (1 + value) if nature.flow else value for value in INTERVAL_SPAN)
        spelled, options = "sigma_interval", [f"low={low:.4g}", f"high={high:.4g}"]
    found = Guidance.parse(" + ".join(filter(None, (short(float(scale)), " ".join([spelled, *options]).strip()))))
    way = found.combination
    idle = not found.extras and not (isinstance(way, CFGZero) and way.zero_steps)  # no term is added, no step zeroed
    return Guidance(1.0) if scale == 1 and idle else found


def check_rule(words: str, scale: float) -> None:
    """Refuses a rule that no model could take."""
    for nature in (ModelTraits(latent=True), ModelTraits()):
        try:
            guidance_of(words, scale, nature)
        except PellucidError as error:
            wrong = error
        else:
            return
    raise wrong


# --- Prompts --------------------------------------------------------------------------------------------------------

_DEFAULT_PROMPTS = 64  # prompts of scenes when no number is given
_MAX_PROMPTS = 100_000


@dataclass(frozen=True)
class GuidancePrompts:
    """The prompts: `queries` where every prompt is a caption of a scene, `truth` where the scenes are known."""

    texts: tuple[str, ...]
    queries: tuple[Query, ...] | None = None
    truth: Scenes | None = None

    def __len__(self) -> int:
        return len(self.texts)


def _read_guidance_prompts(where: str, seed: int) -> GuidancePrompts:
    """A text file with a prompt per line; of `scenes` and `scenes:N` held-out captions that say all but the style, and
    their scenes in the styles of training."""
    count = scene_count(where, _MAX_PROMPTS, _DEFAULT_PROMPTS)
    if count is None:
        texts = read_lines_of(Path(where), "scenes:N")
        if len(texts) > _MAX_PROMPTS:
            raise PellucidError(rule(f"prompts in {where}", f"at most {_MAX_PROMPTS:,}", len(texts)), "prompts")
        return GuidancePrompts(texts, queries_of(texts))
    texts, queries = zip(*scenes.prompts(count, OBJECTS, seed, split="held_out"), strict=True)
    drawn = scenes.sample(torch.arange(count), seed, "held_out", scenes.TRAIN_STYLES, OBJECTS)
    return GuidancePrompts(texts, queries, drawn)


# --- Measures of images ---------------------------------------------------------------------------------------------

LOOKS = ("saturation", "colourfulness", "sharpness")
_DIGITS = 6  # of a number in the records
_TRUE_BATCH = 32  # true images
_MAX_REFERENCE = 1000  # images of a reference that are measured
Row = dict[str, list[Any]]  # by figure, one value an image; of diversity one per prompt


def _looks_of(pixels: Tensor) -> Row:
    """How images (N, 3, H, W) in [0, 1] look, whatever they were asked to show."""
    return {name: _rounded_list(getattr(qualities, name)(pixels)) for name in LOOKS}


def _rounded_list(values: Tensor) -> list[float]:
    return [round(value, _DIGITS) for value in values.tolist()]


def measure_images(
    images: Sequence[Image.Image],
    texts: Sequence[str],
    queries: Sequence[Query] | None,
    judge: Judge | None,
    seeds: int,
    device: torch.device | str = "cpu",
) -> Row:
    """All figures of the images of some prompts, `seeds` of each in turn."""
    signed = to_tensor(images).to(device)
    pixels = (signed + 1) / 2
    found = _looks_of(pixels)
    if queries is not None:
        verdicts = [judged(reading, query) for reading, query in zip(scenes.read(signed), queries, strict=True)]
        found |= {  # all right, the share of attributes that are right, and whether colours bled (None: unknown)
            "right": [int(one.right) for one in verdicts],
            "attributes": [round(sum(one.marks.values()) / len(one.marks), _DIGITS) for one in verdicts],
            "bled": [None if one.bled is None else int(one.bled) for one in verdicts],
        }
    if judge is not None:
        cosines = (judge.image(to_bytes(pixels)) * judge.text(texts)[0]).sum(-1)
        found["image_text"] = _rounded_list(100 * cosines)
    if seeds > 1:
        groups = [i // seeds for i in range(len(images))]
        found["diversity"] = _rounded_list(qualities.diversity(pixels, groups).reshape(-1, seeds).mean(1))
    return found


# True images


def looks_of_scenes(truth: Scenes, size: tuple[int, int], pipe: Any) -> Row:
    """Renders of the scenes of the prompts, through the model's own VAE where it has one: the best it could do."""
    vae = pipe.components.vae if isinstance(pipe, Pipeline) else None
    rows = []
    for first in range(0, len(truth), _TRUE_BATCH):
        images = scenes.render(truth[first : first + _TRUE_BATCH], min(size))
        rows.append(_looks_of((images if vae is None else through(vae, images)).add(1).div(2)))
    return joined_rows(rows)


def _looks_of_folder(where: str, size: tuple[int, int]) -> Row:
    """Of true images that were given, of the size of the model's: else their sharpness would say nothing."""

    def refuse(_: int, why: str) -> None:
        raise PellucidError(why, "reference")

    rows: list[Row] = []
    left = _MAX_REFERENCE
    for chunk in _open_reference(where).chunks(refuse):
        if tuple(chunk.shape[2:]) != size[::-1]:
            got = f"{chunk.shape[3]}×{chunk.shape[2]}"
            raise PellucidError(rule("images of --reference", f"{size[0]}×{size[1]}, as the model's", got), "reference")
        rows.append(_looks_of(chunk[:left]))
        left -= len(chunk)
        if left <= 0:
            break
    return joined_rows(rows)


def _open_reference(where: str) -> ImageSet:
    found = open_images(where)
    if isinstance(found, Statistics):
        raise PellucidError(rule("--reference", "images", "statistics"), "reference")
    return found


def joined_rows(rows: Sequence[Mapping[str, Any]]) -> Row:
    return {name: [value for row in rows for value in row[name]] for name in rows[0]}


# --- The study ------------------------------------------------------------------------------------------------------

TRUE_IMAGES = "true"  # the record of the true images, among those of guidances
_MAX_SEEDS, _MAX_CELLS = 256, 400
PROMPTS_SHOWN = 16  # prompts whose first image is kept, for the report


@dataclass(frozen=True)
class GuidanceStudyConfig:
    """Every scale under every rule. `prompts` is `scenes`, `scenes:N` or a file; each has `seeds` images.

    `clip` is an image-text encoder, `reference` a folder of true images; `tolerance` is how far, as a share,
    colourfulness and sharpness may be from the reference's.
    """

    model: str
    scales: tuple[float, ...] = (1.0, 2.0, 4.0, 7.0, 10.0, 15.0)
    rules: tuple[str, ...] = RULE_NAMES
    prompts: str = SCENES
    seeds: int = 4
    sampler: str = "dpmpp_2m"
    steps: int = 20
    batch: int = 32
    seed: int = 0
    part: Part = "unet"
    dtype: str = DTYPE
    clip: str | None = None
    reference: str | None = None
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        check_lists(self, "scales", "rules")
        if list(self.scales) != sorted(self.scales):
            raise PellucidError(rule("scales", "numbers that grow", list(self.scales)), "study-list")
        if len(self.scales) * len(self.rules) > _MAX_CELLS:
            got = len(self.scales) * len(self.rules)
            raise PellucidError(rule("scales × rules", f"at most {_MAX_CELLS}", got), "study-list")
        check_whole("seeds", self.seeds, 1, _MAX_SEEDS, "study-seeds")
        if not 0 < self.tolerance < 1:
            raise PellucidError(rule("tolerance", "above 0 and below 1", self.tolerance), "study-tolerance")
        if self.part not in PARTS:
            raise PellucidError(rule("part", " or ".join(PARTS), self.part), "part")
        for scale in self.scales:
            self.making(guidance_of("plain", scale, ModelTraits()).text())
        for words in self.rules:
            check_rule(words, self.scales[-1])
        if (
            scene_count(self.prompts, _MAX_PROMPTS, _DEFAULT_PROMPTS) is None
            and self.reference is None
            and 1 not in self.scales
        ):
            advice = "Unguided images are what others are compared with where no --reference is given."
            raise PellucidError(rule("scales", "with 1 among them", list(self.scales), advice), "study-scales")

    def making(self, guidance: str) -> ImageSettings:
        return ImageSettings(self.sampler, self.steps, guidance, self.batch, self.seed)

    @cached_property
    def asked(self) -> GuidancePrompts:
        """The prompts; by the reader where they are captions of scenes, unless a file comes with an encoder."""
        found = _read_guidance_prompts(self.prompts, self.seed)
        return GuidancePrompts(found.texts) if self.clip is not None and found.truth is None else found


def with_own_clip(config: GuidanceStudyConfig) -> GuidanceStudyConfig:
    """With the image-text encoder of the model's own bundle, where prompts need one and none is given."""
    if config.clip is not None or config.asked.queries is not None:
        return config
    if not (source.locate(config.model) / "image_text").is_dir():
        advice = "They are no captions of scenes: name a CLIP that scores them."
        must = f"--clip must be given for the prompts of {config.prompts}; got none. {advice}"
        raise PellucidError(must, "study-clip")
    return replace(config, clip=f"{config.model}/image_text")


class GuidanceBatch(NamedTuple):
    """One guidance for some prompts, or the true images."""

    guidance: str
    first: int


class GuidanceStudy(Study[GuidanceStudyConfig, GuidanceBatch]):
    """`pipe` makes the images, and `judge` scores them where the config names a `clip`; results need neither."""

    kind = "guidance"
    cell = GuidanceBatch
    progress = "making and measuring images"

    def __init__(
        self,
        config: GuidanceStudyConfig,
        folder: Path,
        pipe: Maker | None = None,
        judge: Judge | None = None,
        device: torch.device | str = "cpu",
        shard: ShardNumber = (0, 1),
        model_hash: str = "",
    ) -> None:
        self.pipe, self.judge, self.device, self.model_hash = pipe, judge, device, model_hash
        self.nature = ModelTraits.of(pipe)
        self.asked = config.asked
        if self.asked.queries is None and config.clip is None:
            must = "given for prompts that are no captions of scenes"
            raise PellucidError(f"--clip must be {must}; got none.", "study-clip")
        if pipe is not None and (judge is None) != (config.clip is None):
            raise PellucidError(rule("judge", "given with clip, and only then", judge), "study-clip")
        if config.reference is not None:
            _open_reference(config.reference)
        found = [guidance_of(words, scale, self.nature) for scale in config.scales for words in config.rules]
        self.guidances = list(dict.fromkeys(one.text() for one in found))  # at scale 1 most rules are the same
        super().__init__(config, folder, shard)

    @classmethod
    def open(cls, config: GuidanceStudyConfig, folder: Path, shard: ShardNumber = (0, 1), **resources: Any) -> Self:
        """`resources` is the `device`."""
        pipe = open_pipe(config.model, config.part, dtype=config.dtype, **resources)
        judge = None if config.clip is None else Judge.load(config.clip, pipe.device)
        return cls(config, folder, pipe, judge, pipe.device, shard, fingerprint.of_model(pipe.components))

    def settings(self) -> dict[str, Any]:
        own = asdict(self.config)
        del own["tolerance"]  # the same images can be judged by another one
        return {**own, "texts": self.asked.texts, "nature": asdict(self.nature), "model_hash": self.model_hash}

    # --- the work -------------------------------------------------------------------------------------------------

    def guidance(self, words: str, scale: float) -> str:
        """The guidance of a cell as text, which is its name."""
        return guidance_of(words, scale, self.nature).text()

    @property
    def together(self) -> int:
        """Prompts of one record: whole ones, about a batch of images."""
        return max(1, self.config.batch // self.config.seeds)

    @property
    def firsts(self) -> range:
        return range(0, len(self.asked), self.together)

    def cells(self) -> Iterator[GuidanceBatch]:
        """The true images come second, as soon as their size is known: what is wrong with them is not found last."""
        has_truth = self.config.reference is not None or self.asked.truth is not None
        for guidance in self.guidances:
            for first in self.firsts:
                yield GuidanceBatch(guidance, first)
                if guidance == self.guidances[0] and first == 0 and has_truth:
                    yield GuidanceBatch(TRUE_IMAGES, 0)

    def part(self, cell: GuidanceBatch) -> GuidanceBatch:
        """The true images go with the first ones."""
        return GuidanceBatch(self.guidances[0], 0) if cell.guidance == TRUE_IMAGES else cell

    def cost(self, cell: GuidanceBatch) -> int:
        return 0 if cell.guidance == TRUE_IMAGES else 1

    def make(self, cell: GuidanceBatch) -> dict[str, Any]:
        if cell.guidance == TRUE_IMAGES:
            return self.truth()
        seeds, last = self.config.seeds, cell.first + self.together
        texts = [text for text in self.asked.texts[cell.first : last] for _ in range(seeds)]
        images = self.images(cell, texts)
        self.claim()  # only once there is an image to keep
        self.keep(images, cell)
        queries = self.asked.queries
        own = None if queries is None else [query for query in queries[cell.first : last] for _ in range(seeds)]
        row = measure_images(images, texts, own, self.judge, seeds, self.device)
        return {"size": list(images[0].size), "figures": row}

    def images(self, cell: GuidanceBatch, texts: Sequence[str]) -> list[Image.Image]:
        """All images of a record, `seeds` for each prompt in turn, in batches that the machine can hold."""
        assert self.pipe is not None
        making, number = self.config.making(cell.guidance), cell.first * self.config.seeds
        images: list[Image.Image] = []
        for start in making.firsts(len(texts)):
            images += making.images(self.pipe, texts[start : start + making.batch], number + start)
        return images

    def truth(self) -> dict[str, Any]:
        """The true images: those of the reference, or renders of the prompts' scenes."""
        width, height = self.records.rows[0]["size"]
        if self.config.reference is not None:
            row = _looks_of_folder(self.config.reference, (width, height))
        else:
            assert self.asked.truth is not None
            row = looks_of_scenes(self.asked.truth, (width, height), self.pipe)
        return {"size": [width, height], "figures": row}

    # --- images for the report ----------------------------------------------------------------------------------

    def keep(self, images: list[Image.Image], cell: GuidanceBatch) -> None:
        """The first image of each of the first prompts."""
        chosen = images[:: self.config.seeds][: max(0, PROMPTS_SHOWN - cell.first)]
        if chosen:
            sheets.write_tiles(chosen, self.place(cell.guidance, cell.first))

    def place(self, guidance: str, first: int) -> Path:
        return self.folder / "pictures" / f"{self.guidances.index(guidance):03d}-{first:05d}.png"

    def shown(self, guidance: str) -> list[Image.Image]:
        """Images of a cell, one per prompt."""
        found: list[Image.Image] = []
        for first in self.firsts:
            count = min(self.together, len(self.asked) - first, PROMPTS_SHOWN - first)
            if count > 0:
                found += sheets.read_tiles(self.place(guidance, first), count)
        return found

    # --- what is known --------------------------------------------------------------------------------------------

    def rows(self, guidance: str) -> list[Mapping[str, Any]]:
        """The records of a cell in order; none where some are missing."""
        own = {row["first"]: row for row in self.records.rows if row["guidance"] == guidance}
        return [own[first] for first in self.firsts] if set(own) == set(self.firsts) else []

    def results(self) -> GuidanceResults | None:
        """None before a first cell and its reference are whole."""
        from pellucid.evidence.study.guidance_report import results_of

        return results_of(self)

    def report(self) -> GuidanceReport:
        from pellucid.evidence.study import guidance_report

        return guidance_report.write(self)
