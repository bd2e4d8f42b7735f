"""Recipes: all that is needed to repeat an image, carried inside its PNG beside the A1111 text."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any

from PIL import Image, PngImagePlugin

from pellucid._version import __version__
from pellucid.core import dialect as dialects
from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.core.noise import check_seed
from pellucid.core.plan import BOUNDS, UNBOUNDED
from pellucid.core.reader import hints_of, naming, parse_json, typed
from pellucid.interop.atomic_files import put
from pellucid.pipeline import parameters
from pellucid.pipeline.images import UNREADABLE, check_size, first_line, open_bounded
from pellucid.pipeline.parameters import ForeignRecipe

_SCHEMA = 1
_KIND = "pellucid-recipe"
_SHEET = "pellucid-sheet"
_TEXT_KEYS = ("pellucid", _SHEET, "parameters")  # the text chunks that are read
MAX_TEXT = 2**20  # bytes of one text chunk, read or written
_MAX_DEPTH = 32  # of nested JSON
_EXIF_IFD, _USER_COMMENT = 0x8769, 0x9286
_ADAPTER = ("name", "kind", "hash", "scale", "start", "end", "guess")


@dataclass(frozen=True)
class Recipe:
    """All that is needed to repeat one image exactly. A recipe that exists is valid and can be written.

    `clip_skip` counts the last text layers left out; `conditioning` is what is passed to the network besides the text
    (class label, SDXL's sizes), and the texts of a second encoder; `plan` is there only where the plan was given as a
    table; `inputs` are hashes by role; `policy` is what of the memory policy changes numbers.
    """

    model: str = ""
    model_hash: str | None = None
    prompt: str = ""
    negative_prompt: str = ""
    weighting: bool = False
    clip_skip: int = 0
    conditioning: dict[str, Any] = field(default_factory=dict)
    sampler: str | None = None
    grid: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    dialect: str = "exact"
    options: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    guidance: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    noise: str = "philox"
    size: tuple[int, int] | None = None
    strength: float | None = None
    denoising_start: float | None = None
    denoising_end: float | None = None
    adapters: tuple[dict[str, Any], ...] = ()
    inputs: dict[str, str] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    dtype: str = ""
    device: str = ""
    torch: str = ""
    pellucid: str = __version__

    def __post_init__(self) -> None:
        for name, hint in hints_of(Recipe).items():
            object.__setattr__(self, name, _checked(name, hint, getattr(self, name)))
        size = len(self.to_json().encode())
        if size > MAX_TEXT:
            advice = "Name the plan's sampler instead of its table, or shorten the prompt."
            raise PellucidError(rule("recipe", f"at most {MAX_TEXT} bytes of JSON", size, advice), "recipe-size")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: every field, whatever its value."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        own["options"] = _unbounded(self.options)
        made: dict[str, Any] = _plain_json("recipe", own)
        return {"kind": _KIND, "schema": _SCHEMA, **made}

    @staticmethod
    def from_dict(data: Any) -> Recipe:
        """Reads a recipe strictly: what it does not know it names. A field left out has its default."""
        if not isinstance(data, Mapping) or data.get("kind") != _KIND:
            raise PellucidError(f"recipe must be a JSON object of kind {_KIND}; got something else.", "recipe-json")
        if data.get("schema") != _SCHEMA:
            advice = f"Made by pellucid {str(data.get('pellucid', '?'))[:40]}; this is {__version__}."
            raise PellucidError(rule("schema of the recipe", str(_SCHEMA), data.get("schema"), advice), "schema")
        known = [f.name for f in fields(Recipe)]
        given = {key: value for key, value in data.items() if key not in ("kind", "schema")}
        unknown = [str(key)[:80] for key in given if key not in known]
        if unknown:
            hint = nearest(unknown[0], known)
            raise PellucidError(rule("recipe", "made of known fields", unknown[:8], hint), "recipe-key")
        return Recipe(**given)

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False, ensure_ascii=False)

    @staticmethod
    def from_json(text: str | bytes) -> Recipe:
        if len(text) > MAX_TEXT:
            raise PellucidError(rule("recipe", f"at most {MAX_TEXT} bytes of JSON", len(text)), "recipe-size")
        return Recipe.from_dict(parse_json(text, "recipe", "recipe-json"))

    def parameters(self) -> str:
        """The same in the A1111 form, as far as it has words for it."""
        return parameters.write(parameters.describe(self.to_dict()))


# --- checks of fields ------------------------------------------------------------------------------------------


def _plain_json(name: str, value: Any, depth: int = 0) -> Any:
    """The same value as JSON has it: tuples as lists, finite numbers, text that UTF-8 can hold."""
    if depth > _MAX_DEPTH:
        raise PellucidError(rule(name, f"nested at most {_MAX_DEPTH} deep", "more"), "recipe-value")
    if isinstance(value, Mapping):
        return {text(f"key of {name}", k): _plain_json(name, v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_json(name, v, depth + 1) for v in value]
    if isinstance(value, str):
        return text(name, value)
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise PellucidError(rule(name, "made of text, finite numbers, lists and objects", value), "recipe-value")


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise PellucidError(rule(name, "text", value), "recipe-value")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PellucidError(rule(name, "text that UTF-8 can hold", value[:80]), "recipe-value") from None
    return str(value)  # plain, not torch's own kind of version


def _checked(name: str, hint: Any, value: Any) -> Any:
    """A field's value of its annotated type, in its bounds, as JSON can hold it."""
    if name in ("seed", "size"):  # their checks know the type too
        return None if value is None and name == "size" else _CHECKS[name](value)
    if name == "options" and isinstance(value, Mapping):
        value = _unbounded(value)
    try:
        found = typed(hint, _plain_json(name, value), name, _LIMITS.get(name), "recipe")
    except PellucidError as error:
        raise PellucidError(str(error), "recipe-value") from None
    return found if found is None or name not in _CHECKS else _CHECKS[name](found)


def _unbounded(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with infinities as words, as a plan writes them."""
    return {k: UNBOUNDED.get(v, v) if isinstance(v, float) else v for k, v in options.items()}


def _bounded(options: Mapping[str, Any]) -> dict[str, Any]:
    return {k: BOUNDS.get(v, v) if isinstance(v, str) else v for k, v in options.items()}


def _plan_table(table: dict[str, Any]) -> dict[str, Any]:
    if table.get("kind") != "pellucid-plan":
        raise PellucidError("plan must be a plan's table, as Plan.to_dict() gives it; got another.", "recipe-value")
    return table


def _adapter_list(adapters: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Adapters as {name, kind, hash, scale}; a ControlNet also from which part of the run to which, and `guess`."""
    for one in adapters:
        unknown = [key for key in one if key not in _ADAPTER]
        if unknown or not isinstance(one.get("name"), str) or not isinstance(one.get("kind"), str):
            raise PellucidError(rule("adapters", f"objects of {', '.join(_ADAPTER)}", one), "recipe-value")
    return adapters


_PART = (0, 1)
_LIMITS = {
    "clip_skip": (0, 64),
    "steps": (1, 10_000),
    "strength": _PART,
    "denoising_start": _PART,
    "denoising_end": _PART,
}
_CHECKS: dict[str, Callable[[Any], Any]] = {
    "dialect": dialects.named,
    "options": _bounded,
    "plan": _plan_table,
    "seed": check_seed,
    "size": check_size,
    "adapters": _adapter_list,
}


# --- PNG -------------------------------------------------------------------------------------------------------


class RecipeImage(Image.Image):
    """An image that carries its recipe into every PNG that `save` writes, as long as it has the recipe's size.

    Copies and crops are plain images. What is drawn into the image itself is not noticed.
    """

    recipe: Recipe | None = None

    @staticmethod
    def of(image: Image.Image, recipe: Recipe) -> RecipeImage:
        """The same image, with its recipe."""
        image.__class__ = RecipeImage  # Pillow offers no constructor from an image that copies nothing
        assert isinstance(image, RecipeImage)
        image.recipe = recipe
        return image

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None:
        name = fp if isinstance(fp, str | os.PathLike) else getattr(fp, "name", "")
        kind = format or ("PNG" if str(name).lower().endswith(".png") else "")
        own = self.recipe is not None and self.size == tuple(self.recipe.size or self.size)
        if own and kind.upper() == "PNG":
            params.setdefault("pnginfo", _png_info(self.recipe))
        super().save(fp, format, **params)


def _png_info(recipe: Recipe | None, axes: str | None = None) -> PngImagePlugin.PngInfo:
    """The text chunks of a PNG with its recipe: ours, and A1111's."""
    info = PngImagePlugin.PngInfo()
    if recipe is not None and axes is not None:
        info.add_itxt(_SHEET, json.dumps({"axes": axes, "recipe": recipe.to_dict()}, ensure_ascii=False))
    elif recipe is not None:
        info.add_itxt("pellucid", recipe.to_json())
        # NUL ends a chunk's text in many readers
        info.add_text("parameters", recipe.parameters().replace("\0", "\N{REPLACEMENT CHARACTER}"))
    return info


def write_png(
    image: Image.Image, goal: str | os.PathLike[str] | IO[bytes], recipe: Recipe | None = None, axes: str | None = None
) -> None:
    """Writes a PNG that carries its recipe, as our JSON and as A1111's text. A file is whole or absent.

    With `axes` it is a sheet: the recipe is that of its first cell, and the axes say what the others change.
    """
    try:
        data = _encode(image, _png_info(recipe, axes))
        if isinstance(goal, str | os.PathLike):
            put(Path(goal), lambda part: part.write_bytes(data))
        else:
            goal.write(data)
    except (OSError, ValueError) as error:
        advice = f"{getattr(error, 'strerror', None) or first_line(error).rstrip('.')}."
        shown = os.fspath(goal) if isinstance(goal, str | os.PathLike) else "a buffer"
        raise PellucidError(rule("PNG", "one that can be written", shown, advice), "file") from None


def _encode(image: Image.Image, info: PngImagePlugin.PngInfo) -> bytes:
    """A PNG's bytes. From a copy: Pillow keeps the text of a save that broke off, and would write it into the next."""
    whole = io.BytesIO()
    image.copy().save(whole, format="PNG", pnginfo=info)
    return whole.getvalue()


def read_png(source: str | os.PathLike[str] | IO[bytes]) -> Recipe | ForeignRecipe:
    """The recipe inside an image: ours exactly; else what an A1111 text says (PNG; EXIF of JPEG and WebP)."""
    with open_bounded(source) as image:
        found = _texts(image)
    if "pellucid" in found:
        with naming(_name_of(source)):
            return Recipe.from_json(found["pellucid"])
    if _SHEET in found:
        raise PellucidError("image must be a single image; got a sheet, which `read_sheet` reads.", "recipe-sheet")
    if "parameters" in found:
        return parameters.understand(found["parameters"])
    advice = "Its text was removed, or another program made it."
    if "workflow" in found:
        advice = "It holds a ComfyUI workflow, which is not read."
    raise PellucidError(f"image must carry a recipe or an A1111 text; got neither. {advice}", "no-recipe")


def read_sheet(source: str | os.PathLike[str] | IO[bytes]) -> tuple[str, Recipe] | None:
    """The axes of a sheet and the recipe of its first cell; None where the image is no sheet."""
    with open_bounded(source) as image:
        found = _texts(image).get(_SHEET)
    if found is None:
        return None
    with naming(_name_of(source)):
        held = parse_json(found, "sheet", "recipe-json")
        if not isinstance(held, dict) or not isinstance(held.get("axes"), str):
            raise PellucidError("sheet must be an object with axes and a recipe; got another.", "recipe-json")
        return held["axes"], Recipe.from_dict(held.get("recipe"))


def _name_of(source: str | os.PathLike[str] | IO[bytes]) -> str:
    """The file's, for messages; a buffer has none."""
    return os.path.basename(os.fspath(source)) if isinstance(source, str | os.PathLike) else ""


def _texts(image: Image.Image) -> dict[str, str]:
    """The text chunks of a PNG, or the user comment of another file as `parameters`; refuses what is too long."""
    if image.format == "PNG":
        found = {str(k): v for k, v in image.info.items() if isinstance(v, str)}
        if not found.keys() & set(_TEXT_KEYS):  # chunks may stand behind the pixels
            try:
                image.load()
            except UNREADABLE as error:
                raise PellucidError(
                    rule("image", "a complete image", "less", first_line(error)), "image-file"
                ) from None
            found = {str(k): v for k, v in image.info.items() if isinstance(v, str)}
    else:
        comment = _user_comment(image)
        found = {"parameters": comment} if comment else {}
    for key in _TEXT_KEYS:
        if len(found.get(key, "").encode(errors="replace")) > MAX_TEXT:
            raise PellucidError(rule(f"text {key}", f"at most {MAX_TEXT} bytes", "more"), "text-size")
    return found


def _user_comment(image: Image.Image) -> str:
    """EXIF's user comment: eight bytes name its encoding."""
    try:
        raw = image.getexif().get_ifd(_EXIF_IFD).get(_USER_COMMENT, b"")
    except UNREADABLE:
        return ""
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, bytes) or len(raw) > 2 * MAX_TEXT:
        return ""
    head, body = raw[:8], raw[8:]
    if head == b"UNICODE\0":
        # The byte order is the writer's: where the text is mostly Latin, the zeros tell.
        little = body[:2] == b"\xff\xfe" or body[1::2].count(0) > body[::2].count(0)
        return body.decode("utf-16-le" if little else "utf-16-be", errors="replace").lstrip("\ufeff")
    return body.decode(errors="replace").rstrip("\0") if head in (b"ASCII\0\0\0", bytes(8)) else ""
