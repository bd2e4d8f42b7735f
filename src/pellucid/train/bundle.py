"""Finished runs → a bundle: one folder with a base model and what belongs to it, in float16, whole or not at all."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from string import Template
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from pellucid.core import reader
from pellucid.core.errors import PellucidError, rule
from pellucid.interop import save, source, weights
from pellucid.interop.atomic_files import settle
from pellucid.interop.components import INDEX, Components
from pellucid.interop.diffusers_config import FILE_NAME as SCHEDULER
from pellucid.interop.folder import OUTER, SHARED, class_in
from pellucid.models.controlnet import ControlNet
from pellucid.pipeline.shelf import ADAPTER_EYES, ADAPTER_FILE, ENCODER_NOTE, SHARED_ENCODER
from pellucid.train import journal, lora, trainer
from pellucid.train.autoencoder import read_vae
from pellucid.train.text_denoiser import PIXART, STABLE_DIFFUSION
from pellucid.train.trainer import MODEL

# --- Model card -----------------------------------------------------------------------------------------------------

_MAX_BYTES = 1 << 20  # of a template, a config, a file of figures
_MAX_LOG_BYTES = 256 << 20
_MAX_FIGURES = 400
_FIELDS = ("sizes", "runs", "figures", "recipes")  # what a template may ask for, as $sizes, …


@dataclass(frozen=True)
class ModelCard:
    """`template` is Markdown with $sizes, $runs, $figures and $recipes; `figures` are files of what was measured, JSON
    or Markdown, shown under their names; `hardware` is what it was trained on; from `earlier` runs others went on."""

    template: Path
    figures: tuple[Path, ...] = ()
    hardware: str = ""
    earlier: Mapping[str, Path] = field(default_factory=dict)

    def text(self, runs: Mapping[str, Path], sizes: Mapping[str, int]) -> str:
        """The card, as Markdown. It says nothing that changes from one making of it to the next."""
        runs = {**self.earlier, **runs}
        words = {
            "sizes": _table(("part", "MB"), [(name, f"{size / 1e6:.2f}") for name, size in sizes.items()]),
            "runs": _runs_table(runs, self.hardware),
            "figures": "\n\n".join(_figures_of(path) for path in self.figures) or "None were given.",
            "recipes": "\n\n".join(_recipe_of(name, run) for name, run in runs.items()),
        }
        template = Template(_read_text(self.template))
        try:
            return template.substitute(words).rstrip() + "\n"
        except (KeyError, ValueError) as error:
            must = "with no other $ than " + ", ".join(f"${name}" for name in _FIELDS)
            raise PellucidError(rule(f"template {self.template.name}", must, str(error)), "card-template") from None


def _read_text(path: Path) -> str:
    return reader.read_text(path, path.name, _MAX_BYTES, "card-file")


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---", *["---:"] * (len(head) - 1)), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


# --- runs --------------------------------------------------------------------------------------------------------


def _runs_table(runs: Mapping[str, Path], hardware: str) -> str:
    rows, total = [], 0.0
    for name, run in runs.items():
        config, last, seconds = _config_of(run), *_logged(run)
        total += seconds
        steps, batch = int(config["steps"]), int(config["batch"])
        counts = (f"{steps:,}", f"{batch:,}", f"{steps * batch / 1e6:.2f}", f"{seconds / 60:.1f}")
        rows.append((name, _parameters_of(run / trainer.MODEL), *counts, f"{last:.4g}"))
    head = ("run", "parameters in its folder", "steps", "batch", "million images", "minutes", "last loss")
    on = f" on {hardware}" if hardware else ""
    return f"{_table(head, rows)}\n\nTogether {total / 60:.1f} minutes of training{on}."


def _config_of(run: Path) -> dict[str, Any]:
    try:
        held = reader.read_json(run / trainer.CONFIG, _MAX_BYTES, foreign=True)["config"]
        int(held["steps"]), int(held["batch"])
    except (PellucidError, ValueError, KeyError, TypeError, OverflowError):
        raise PellucidError(rule(f"{trainer.CONFIG} of {run.name}", "that of a run", "another"), "card-file") from None
    return held


def _logged(run: Path) -> tuple[float, float]:
    """The last loss of a run, and the seconds of its training: each window's images by its images per second."""
    path = run / journal.FILE
    what = f"{journal.FILE} of {run.name}"
    seconds, before, last = 0.0, 0.0, 0.0
    for text in reader.read_text(path, what, _MAX_LOG_BYTES, "card-file").splitlines():
        held = reader.parse_object(text, what, "card-file", foreign=True)
        if "note" in held:
            continue
        line = {
            key: reader.typed(float, held.get(key), f"{key} in {what}", code="card")
            for key in ("images", "images_per_s", "loss")
        }
        seconds += (line["images"] - before) / max(line["images_per_s"], 1e-9)
        before, last = line["images"], line["loss"]
    return last, seconds


def _parameters_of(model: Path) -> str:
    """How many numbers the files of a model hold."""
    count = 0
    for path in sorted(model.rglob("*.safetensors")):
        shapes = weights.shapes_of(path)
        count += sum(math.prod(shape) for shape in shapes)
    return f"{count / 1e6:.2f} M"


def _recipe_of(name: str, run: Path) -> str:
    held = json.dumps(_config_of(run), indent=1, sort_keys=True, ensure_ascii=False)
    return f"<details><summary>{name}</summary>\n\n```json\n{held}\n```\n\n</details>"


# --- figures -----------------------------------------------------------------------------------------------------


def _figures_of(path: Path) -> str:
    """A Markdown file as it is; a JSON file as a table, where what is nested has its names joined."""
    title = f"### {path.stem.replace('_', ' ')}\n\n"
    if path.suffix == ".md":
        return title + _read_text(path).strip()
    rows = [(name, _shown(value)) for name, value in _flat(weights.read_json(path, _MAX_BYTES))]
    if not 0 < len(rows) <= _MAX_FIGURES:
        raise PellucidError(rule(f"figures in {path.name}", f"1 to {_MAX_FIGURES}", len(rows)), "card-figures")
    return title + _table(("what", "value"), rows)


def _flat(held: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in held.items():
        whole = f"{above} · {name}" if above else name
        if isinstance(value, dict):
            yield from _flat(value, whole)
        else:
            yield whole, value


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_shown(one) for one in value[:8]) + (", …" if len(value) > 8 else "")
    return str(value)


# --- Assembly -------------------------------------------------------------------------------------------------------

_DTYPE = torch.float16
_CARD = "README.md"
_MOST_BASE, _MOST_ALL = 14_000_000, 24_000_000  # bytes
_MAX_WORDS = 4 << 20  # bytes of a file beside the weights


@dataclass(frozen=True)
class BundleRuns:
    """The run of each part. `base` is that of a UNet with its text encoder, and holds the VAE that it was trained over;
    `vae` is that VAE's own run, named in the model card. The IP-Adapter brings its image encoder."""

    base: Path
    vae: Path | None = None
    dit: Path | None = None
    controlnet: Path | None = None
    ip_adapter: Path | None = None
    lora: Path | None = None
    image_text: Path | None = None

    def given(self) -> dict[str, Path]:
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: Path(run) for name, run in held.items() if run is not None}


def assemble(
    parts: BundleRuns, folder: str | Path, card: ModelCard | None = None, *, overwrite: bool = False
) -> dict[str, int]:
    """Writes a bundle and says how many bytes each part has; the same runs make the same bytes.

    The base lies at the root in the layout of diffusers' StableDiffusionPipeline, the others in folders of their names.
    """
    runs = parts.given()
    for name, run in runs.items():
        if not (run / MODEL).is_dir():
            raise PellucidError(rule(name, f"the folder of a finished run, with {MODEL}/", str(run)), "bundle-run")
    with save.replaced(Path(folder), INDEX, overwrite) as place:
        base = _write_base(runs, place)
        writers = {
            "dit": lambda model, goal: _write_dit(model, goal, base),
            "controlnet": _write_controlnet,
            "image_text": _write_image_text,
            "ip_adapter": _write_ip_adapter,  # after the one whose vision half it may share
            "lora": lambda model, goal: _write_file(model / lora.FILE, goal, "lora"),
        }
        for name, write in writers.items():
            if name in runs:
                write(runs[name] / MODEL, place / name)
        _check_finite(place)
        sizes = _sizes_of(place)
        if card is not None:
            (place / _CARD).write_text(card.text(runs, sizes), encoding="utf-8")
        _check_sizes(_sizes_of(place))
        _check_opens(place, "dit" in runs)
        for path in place.rglob("*"):
            if path.is_file():
                path.chmod(0o644)  # safetensors writes for the owner alone
            settle(path)
        sizes = _sizes_of(place)
    return sizes


# --- the parts ---------------------------------------------------------------------------------------------------


def _write_base(runs: Mapping[str, Path], place: Path) -> Components:
    base = _pipeline_in(runs["base"] / MODEL, STABLE_DIFFUSION, "base")
    if "vae" in runs:
        vae = read_vae(str(runs["vae"] / MODEL))
        _check_same("vae of base", base.vae, vae, f"that of {runs['vae'].name}")
    save.save_components(base, place, dtype=_DTYPE)
    return base


def _write_dit(model: Path, goal: Path, base: Components) -> None:
    """Its transformer and its scheduler; VAE, text encoder and tokenizer are the base's, and its index says so."""
    dit = _pipeline_in(model, PIXART, "dit")
    _check_same("vae of dit", dit.vae, base.vae, "that of the base")
    (mine,), (theirs,) = dit.text_encoders, base.text_encoders
    _check_same("text_encoder of dit", mine, theirs, "that of the base")
    _check_same_words(dit, base)
    index, networks, _ = save.layout(dit)
    goal.mkdir()
    save.write_json(goal / INDEX, {SHARED: OUTER, **index})
    save.write_network(networks["transformer"], goal / "transformer", _DTYPE, save.MAX_SHARD_BYTES)
    (goal / "scheduler").mkdir()
    save.write_json(goal / "scheduler" / SCHEDULER, dit.scheduler)


def _write_controlnet(model: Path, goal: Path) -> None:
    network = source.load_component(model, dtype=torch.float32)
    if not isinstance(network, ControlNet):
        raise PellucidError(rule("controlnet", "the run of a ControlNet", type(network).__name__), "bundle-part")
    save.save_component(network, goal, dtype=_DTYPE)


def _write_ip_adapter(model: Path, goal: Path) -> None:
    """Its file, and its image encoder where that is not the vision half of the bundle's image_text, to the bit."""
    _write_file(model / ADAPTER_FILE, goal, "ip_adapter")
    eyes = model / ADAPTER_EYES
    if not eyes.is_dir():
        raise PellucidError(rule("ip_adapter", f"a run that saved its {ADAPTER_EYES}/", model.parent), "bundle-part")
    own, shared = source.load_image_encoder(eyes, dtype=_DTYPE), goal.parent / "image_text"
    if shared.is_dir() and _same(own, source.load_image_encoder(shared)):
        save.write_json(goal / ENCODER_NOTE, {SHARED: SHARED_ENCODER})
    else:
        save.save_component(own, goal / ADAPTER_EYES)


def _write_image_text(model: Path, goal: Path) -> None:
    """The folder of a CLIPModel: its weights in float16, its configs and vocabulary unchanged."""
    if class_in(model) != "CLIPModel":
        raise PellucidError(rule("image_text", "the run of an image-text encoder", class_in(model)), "bundle-part")
    goal.mkdir()
    for path in sorted(model.iterdir()):
        if path.suffix in (".json", ".txt") and path.stat().st_size <= _MAX_WORDS and "safetensors" not in path.name:
            shutil.copyfile(path, goal / path.name)
    save.write_tensors(weights.read_folder(model)[0], goal, "model", _DTYPE, save.MAX_SHARD_BYTES)


def _write_file(path: Path, goal: Path, what: str) -> None:
    """An adapter's one file, in float16."""
    if not path.is_file():
        raise PellucidError(rule(what, f"a run that saved {path.name}", path.parents[1].name), "bundle-part")
    goal.mkdir()
    held = {name: save.own(tensor, _DTYPE) for name, tensor in weights.read(path).items()}
    save_file(held, goal / path.name, {"format": "pt"})


def _pipeline_in(model: Path, kind: str, what: str) -> Components:
    parts = source.read_components(model, dtype=torch.float32)
    if parts.pipeline_class != kind:
        raise PellucidError(rule(what, f"the run of a {kind}", parts.pipeline_class), "bundle-part")
    return parts


# --- what must hold ----------------------------------------------------------------------------------------------


def _same(mine: nn.Module, theirs: nn.Module) -> bool:
    """Two networks of the same config and the same bits: one copy stands for both."""
    one, two = mine.state_dict(), theirs.state_dict()
    equal = one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    return equal and save.config_of(mine) == save.config_of(theirs)


def _check_same(what: str, mine: nn.Module | None, theirs: nn.Module | None, whose: str) -> None:
    assert mine is not None
    assert theirs is not None
    if not _same(mine, theirs):
        raise PellucidError(rule(what, whose, "another"), "bundle-fit")


def _check_same_words(dit: Components, base: Components) -> None:
    (mine,), (theirs,) = dit.tokenizers, base.tokenizers
    if mine.core.get_vocab() != theirs.core.get_vocab() or mine.length != theirs.length:
        raise PellucidError(rule("tokenizer of dit", "that of the base", "another"), "bundle-fit")


def _check_finite(place: Path) -> None:
    """No weight left the range of float16."""
    for path in sorted(place.rglob("*.safetensors")):
        for name, tensor in weights.read(path).items():
            if not bool(torch.isfinite(tensor).all()):
                where = f"{name} of {path.relative_to(place)}"
                raise PellucidError(rule(where, "finite, and in the range of float16", "what is not"), "bundle-range")


def _sizes_of(place: Path) -> dict[str, int]:
    """Bytes by part: `base` is everything at the root and in the folders of its pipeline."""
    named = [field.name for field in fields(BundleRuns)]
    sizes = dict.fromkeys(("base", *(name for name in named if name != "vae" and (place / name).is_dir())), 0)
    for path in place.rglob("*"):
        if path.is_file():
            top = path.relative_to(place).parts[0]
            sizes[top if top in sizes else "base"] += path.stat().st_size
    return sizes


def _check_sizes(sizes: Mapping[str, int]) -> None:
    parts = ", ".join(f"{name} {size / 1e6:.2f}" for name, size in sizes.items())
    for what, size, most in (("base", sizes["base"], _MOST_BASE), ("bundle", sum(sizes.values()), _MOST_ALL)):
        if size > most:
            words = f"{what} must be at most {most / 1e6:g} MB; got {size / 1e6:.2f} MB ({parts})."
            raise PellucidError(words, "bundle-size")


def _check_opens(place: Path, dit: bool) -> None:
    """What was written can be read."""
    for folder in (place, *([place / "dit"] if dit else [])):
        source.read_components(folder)
