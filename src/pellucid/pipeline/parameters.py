"""The `parameters` text that the AUTOMATIC1111 web UI made the field's habit: written, parsed, and understood.

The form: the prompt; `Negative prompt: …`; a last line of `Key: value` pairs that begins with `Steps:`. A value that
would break the line is a JSON string. A prompt's own line `Negative prompt:` looks like the mark in this form, and
blanks at the ends of a prompt are lost: the recipe beside it is exact.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pellucid.core import grid as grids
from pellucid.core.dialect import K_DIFFUSION
from pellucid.core.errors import PellucidError, rule
from pellucid.core.noise import check_seed
from pellucid.core.samplers import REGISTRY, Sampler, resolve

MAX_TEXT = 2**20  # characters; more is no prompt
NEGATIVE = "Negative prompt:"
_SETTINGS = re.compile(r"Steps: *\d+ *(,|$)")
_LORA = re.compile(r"[ \t]*<lora:([^:<>\n]+):([0-9.+-]+)>")
# Their schedule types → our grids.
SCHEDULES = {
    "Karras": "karras",
    "Exponential": "exponential",
    "Polyexponential": "polyexponential",
    "SGM Uniform": "sgm_uniform",
    "KL Optimal": "kl_optimal",
    "Align Your Steps": "ays",
    "Simple": "simple",
    "Uniform": "linspace",
    "Normal": "linspace",
    "DDIM": "leading",
    "Beta": "beta",
}
_SIGMA_KEYS = {"Schedule rho": "rho", "Schedule min sigma": "sigma_min", "Schedule max sigma": "sigma_max"}
_KNOWN = ("Steps", "Sampler", "Schedule type", "CFG scale", "Seed", "Size", "Model", "Model hash", "Clip skip")


@dataclass(frozen=True)
class Parameters:
    """What the text says, as it says it. `rest` holds what stands in the settings and is no pair."""

    prompt: str = ""
    negative_prompt: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    rest: tuple[str, ...] = ()


@dataclass(frozen=True)
class ForeignRecipe:
    """What another program wrote: `fields` are a recipe's; `unread` was not understood; `notes` say what to mind."""

    text: str
    fields: dict[str, Any]
    unread: dict[str, str]
    notes: tuple[str, ...] = ()
    source: str = "a1111"


# --- text ↔ parameters -----------------------------------------------------------------------------------------


def write(found: Parameters) -> str:
    """The text of parameters; `parse` gives them back."""
    lines = [tidy(found.prompt)]
    if tidy(found.negative_prompt):
        lines.append(f"{NEGATIVE} {tidy(found.negative_prompt)}")
    pairs = [f"{_key_of(key)}: {_quoted(value)}" for key, value in found.settings.items()]
    return "\n".join([*lines, ", ".join([*pairs, *found.rest])])


def tidy(text: str) -> str:
    """One kind of line end, no blanks at the ends: what the form can carry."""
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


def _key_of(key: str) -> str:
    if not key or key != key.strip() or re.search(r'[:,"\x00-\x1f]', key):
        raise PellucidError(rule("key", "words without comma, colon, quote and line end", key), "parameters-key")
    return key


def _quoted(value: str) -> str:
    plain = value and value == value.strip() and not re.search(r"[,:\x00-\x1f\x7f-\x9f\u2028\u2029]", value)
    return value if plain and value[0] not in '"{[' else json.dumps(value, ensure_ascii=False)


def parse(text: str) -> Parameters:
    """Reads the form; a text without a line of settings is a prompt."""
    if len(text) > MAX_TEXT:
        raise PellucidError(rule("parameters", f"at most {MAX_TEXT} characters", len(text)), "parameters-size")
    lines = tidy(text).split("\n")
    at = _settings_line(lines)
    settings, rest = _read_settings(lines[at]) if at is not None else ({}, ())
    after = tuple(line for line in lines[at + 1 :] if line.strip()) if at is not None else ()
    said = lines[:at]
    split = next((i for i, line in enumerate(said) if line.startswith(NEGATIVE)), len(said))
    negative = "\n".join(said[split:]).removeprefix(NEGATIVE)
    return Parameters(tidy("\n".join(said[:split])), tidy(negative), settings, (*rest, *after))


def _settings_line(lines: list[str]) -> int | None:
    """The last line that begins with Steps; else the last line, where it is pairs that we know."""
    for i in reversed(range(len(lines))):
        if _SETTINGS.match(lines[i].strip()):
            return i
    settings, _ = _read_settings(lines[-1])
    keys = list(settings)
    return len(lines) - 1 if len(keys) > 1 and all(key in _KNOWN for key in keys[:2]) else None


def _read_settings(line: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """`Key: value, Key: "value, quoted"` → the pairs, and what is none. Of a key that comes twice the first counts."""
    settings: dict[str, str] = {}
    rest: list[str] = []
    for key, value in _scan(line.strip()):
        if key and key not in settings:
            settings[key] = value
        elif key or value:
            rest.append(f"{key}: {value}" if key else value)
    return settings, tuple(rest)


def _scan(line: str) -> Iterator[tuple[str, str]]:
    """The pairs of a line, in order; a piece without a colon comes with an empty key."""
    at = 0
    while at < len(line):
        comma, colon = line.find(",", at), line.find(":", at)
        if colon < 0 or 0 <= comma < colon:
            end = len(line) if comma < 0 else comma
            yield "", line[at:end].strip()
        else:
            value, end = _read_value(line, colon + 1)
            yield line[at:colon].strip(), value
        at = end + 1


def _read_value(line: str, start: int) -> tuple[str, int]:
    """The value that begins at `start`, and where it ends: a JSON string, raw JSON as Civitai writes it, or words."""
    while start < len(line) and line[start] == " ":
        start += 1
    if line[start : start + 1] in ('"', "{", "["):
        try:
            value, end = json.JSONDecoder().raw_decode(line, start)
        except (ValueError, RecursionError):
            end = -1
        if end > 0 and line[end:].lstrip()[:1] in ("", ","):
            raw = line[start:end]
            comma = line.find(",", end)
            return value if isinstance(value, str) else raw, len(line) if comma < 0 else comma
    comma = line.find(",", start)
    end = len(line) if comma < 0 else comma
    return line[start:end].strip(), end


# --- a recipe → parameters -------------------------------------------------------------------------------------


def describe(recipe: Mapping[str, Any]) -> Parameters:
    """A recipe's fields in their words; a LoRA is named in the prompt, as they do."""
    loras = [a for a in recipe.get("adapters", ()) if a.get("kind") == "lora"]
    tags = [f"<lora:{a['name']}:{_number(a.get('scale', 1.0))}>" for a in loras]
    hashes = [f"{a['name']}: {a['hash'].rpartition(':')[2]}" for a in loras if a.get("hash")]
    sampler, size, skip = recipe.get("sampler"), recipe.get("size"), recipe.get("clip_skip")
    grid = (recipe.get("grid") or {}).get("name")
    scale = (recipe.get("guidance") or {}).get("scale")
    said = {
        "Steps": recipe.get("steps"),
        "Sampler": REGISTRY[sampler].title if sampler in REGISTRY else sampler,
        "Schedule type": next((theirs for theirs, ours in SCHEDULES.items() if ours == grid), grid),
        "CFG scale": scale,
        "Seed": recipe.get("seed"),
        "Size": f"{size[0]}x{size[1]}" if size else None,
        "Model hash": (recipe.get("model_hash") or "").rpartition(":")[2][:10] or None,
        "Model": recipe.get("model"),
        "Denoising strength": recipe.get("strength"),
        "Clip skip": skip + 1 if skip else None,  # theirs counts the last layer as 1
        "Lora hashes": ", ".join(hashes) or None,
        "Version": f"pellucid {recipe['pellucid']}" if recipe.get("pellucid") else None,
    }
    settings = {key: _number(value) for key, value in said.items() if value is not None}
    prompt = " ".join([recipe.get("prompt", ""), *(t for t in tags if _LORA.fullmatch(t))])
    return Parameters(prompt, recipe.get("negative_prompt", ""), settings)


def _number(value: object) -> str:
    """A number as people write it, in full precision; text as it is."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


# --- parameters → a recipe's fields ----------------------------------------------------------------------------


class _SettingsReader:
    """Takes settings one by one; what stays is unread, and what was wrong or lost is noted."""

    def __init__(self, found: Parameters) -> None:
        self.left = dict(found.settings)
        self.fields: dict[str, Any] = {}
        self.notes: list[str] = []

    def number(self, key: str, low: float, high: float, whole: bool = False) -> Any:
        """The number under a key, which is then read; None where there is none between the bounds."""
        text = self.left.get(key)
        if text is None:
            return None
        try:
            value = int(text) if whole and len(text) <= 20 else float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (whole and not isinstance(value, int)):
            kind = "a whole number" if whole else "a number"
            self.notes.append(rule(key, f"{kind} from {low:g} to {high:g}", text[:80]))
            return None
        del self.left[key]
        return value

    def take(self, field_name: str, value: object) -> None:
        if value is not None:
            self.fields[field_name] = value


def understand(text: str) -> ForeignRecipe:
    """The recipe's fields that a `parameters` text sets, what is left unread, and what to mind."""
    found = parse(text)
    reader = _SettingsReader(found)
    _read_prompts(reader, found)
    reader.take("steps", reader.number("Steps", 1, grids.MAX_STEPS, whole=True))
    _read_sampler(reader)
    scale = reader.number("CFG scale", 0, 1000)
    reader.take("guidance", None if scale is None else {"scale": float(scale)})
    _read_seed(reader)
    _read_size(reader)
    reader.take("model", reader.left.pop("Model", None))
    reader.take("model_hash", reader.left.pop("Model hash", None))
    _read_strength(reader)
    skip = reader.number("Clip skip", 1, 64, whole=True)
    reader.take("clip_skip", None if skip is None else skip - 1)
    unread = {**reader.left, **({"": ", ".join(found.rest)} if found.rest else {})}
    return ForeignRecipe(text, reader.fields, unread, tuple(reader.notes))


def _read_prompts(reader: _SettingsReader, found: Parameters) -> None:
    """The prompts without their LoRA tags, which become adapters."""
    hashes = dict(_scan(reader.left.pop("Lora hashes", "")))
    adapters = [
        {"name": m[1], "kind": "lora", "hash": hashes.pop(m[1], None), "scale": scale}
        for m in _LORA.finditer(found.prompt)
        if (scale := _finite(m[2])) is not None
    ]
    reader.fields |= {"prompt": tidy(_LORA.sub("", found.prompt)), "negative_prompt": found.negative_prompt}
    reader.take("adapters", adapters or None)
    if hashes:
        reader.left["Lora hashes"] = ", ".join(f"{name}: {value}" for name, value in hashes.items())
    both = f"{found.prompt}\n{found.negative_prompt}"
    if re.search(r"[()\[\]]", _LORA.sub("", both)):
        reader.fields["weighting"] = True
    if re.search(r"\bAND\b|\[[^\[\]]*[:|][^\[\]]*\]", both):
        reader.notes.append("The prompt joins or edits prompts (AND, [a:b:0.5], [a|b]): read as plain words.")


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _read_sampler(reader: _SettingsReader) -> None:
    """Sampler and schedule type, also in one name; a k-diffusion sampler gets k-diffusion's dialect."""
    name, kind = reader.left.get("Sampler"), reader.left.get("Schedule type")
    if name is None:
        return
    try:
        entry, grid = resolve(name[:80])
    except PellucidError as error:
        reader.notes.append(str(error))
        return
    del reader.left["Sampler"]
    reader.fields["sampler"] = entry.name
    old = entry.name in K_DIFFUSION
    if old:
        reader.fields["dialect"] = "k-diffusion"
    if kind is None or kind == "Automatic":
        reader.left.pop("Schedule type", None)
        uniform = "linspace" if old and kind is None else None
        _read_grid(reader, grid or uniform, entry)
        if kind and not grid:
            reader.notes.append("Schedule type Automatic means each sampler's own grid there: ours is used.")
        return
    ours = _named_grid(kind)
    if ours is None:
        reader.notes.append(f"Schedule type {kind[:80]!r} has no grid here.")
    else:
        del reader.left["Schedule type"]
    _read_grid(reader, ours or grid, entry)


def _named_grid(kind: str) -> str | None:
    """Our grid for a schedule type: their title in any case, or our own name."""
    titles = {theirs.lower(): ours for theirs, ours in SCHEDULES.items()}
    own = kind.lower().replace(" ", "_")
    return titles.get(kind.lower()) or (own if own in grids.names() and own != "explicit" else None)


def _read_grid(reader: _SettingsReader, grid: str | None, entry: Sampler) -> None:
    """The grid with its own ends and rho, and eta where the sampler has one."""
    made: dict[str, Any] = {"name": grid} if grid else {}
    if grid in grids.OVER_SIGMA:
        for key, ours in _SIGMA_KEYS.items():
            value = reader.number(key, 1e-6, 1e6)
            made |= {} if value is None else {ours: float(value)}
    reader.take("grid", made or None)
    if "eta" in entry.options():
        eta = reader.number("Eta", 0, 10)
        reader.take("options", None if eta is None else {"eta": float(eta)})


def _read_seed(reader: _SettingsReader) -> None:
    seed = reader.number("Seed", 0, 2**64 - 1, whole=True)
    if seed is not None:
        reader.fields["seed"] = check_seed(seed)
        reader.notes.append("The seed draws other noise there: the image will be alike in kind, not the same.")


def _read_size(reader: _SettingsReader) -> None:
    match = re.fullmatch(r"(\d{1,5}) ?[x×] ?(\d{1,5})", reader.left.get("Size", ""))
    if match and int(match[1]) and int(match[2]):
        reader.fields["size"] = (int(match[1]), int(match[2]))
        del reader.left["Size"]
    elif "Size" in reader.left:
        reader.notes.append(rule("Size", "as in 512x768", reader.left["Size"][:80]))


def _read_strength(reader: _SettingsReader) -> None:
    """Denoising strength; beside Hires keys it belongs to their second pass, which we do not have."""
    if any(key.startswith("Hires") for key in reader.left):
        reader.notes.append("Hires fix made this image larger in a second pass: only the first is read.")
        return
    strength = reader.number("Denoising strength", 0, 1)
    if strength is not None:
        reader.fields["strength"] = float(strength)
        reader.notes.append("Denoising strength needs the first image, which the text does not hold.")
