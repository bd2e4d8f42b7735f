"""A plan in the words of the command line, and from there to the plan itself."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pellucid.core import grid as grids
from pellucid.core import schedule as schedules
from pellucid.core.compile import compile_plan
from pellucid.core.errors import PellucidError, rule
from pellucid.core.grid import Grid
from pellucid.core.plan import Plan
from pellucid.core.reader import naming, read_text
from pellucid.core.samplers import resolve
from pellucid.core.samplers.registry import value_of
from pellucid.core.schedule import Schedule

MAX_PLAN_BYTES = 64 * 2**20
_OUTPUTS = ("as_json", "plot", "diff", "save")
_FLAGS = {"as_json": "json"}


@dataclass(frozen=True)
class PlanWords:
    """What was said of a plan; None where nothing was."""

    sampler: str
    schedule: str | Schedule | None = None
    target: str | None = None
    grid: str | Grid | None = None
    steps: int | None = None
    dialect: str | None = None
    final: str | None = None
    skip: int | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def of(params: dict[str, Any]) -> PlanWords:
        names = ("schedule", "target", "grid", "steps", "dialect", "final")
        options = tuple(sampler_options(params["option"] or ()).items())
        return PlanWords(params["sampler"], **{name: params[name] for name in names}, options=options)

    @property
    def file(self) -> Path | None:
        """The plan file that the first word names. A sampler's name has no slash and does not end in .json."""
        named = self.sampler.lower().endswith(".json") or "/" in self.sampler or "\\" in self.sampler
        return Path(self.sampler) if named else None

    def over(self, base: PlanWords) -> PlanWords:
        """These words, and the base's where these say nothing. Options pass on to the same sampler only."""
        said = {k: v for k, v in vars(self).items() if v is not None and k not in ("sampler", "options")}
        if not self.sampler:
            options = {**dict(base.options), **dict(self.options)}
            return replace(base, **said, options=tuple(options.items()))
        entry, grid_of_name = resolve(self.sampler)
        if grid_of_name is not None:
            said.setdefault("grid", grid_of_name)
        options = {**(dict(base.options) if entry.name == base.sampler else {}), **dict(self.options)}
        return replace(base, **{**said, "sampler": entry.name, "options": tuple(options.items())})


def parse_words(text: str, command: Any) -> PlanWords:
    """The words of `--diff`, read by the command's own parser. The sampler may be left out."""
    try:
        args = shlex.split(text)
    except ValueError as error:
        raise PellucidError(f"--diff must be words as on the command line; got {text!r}: {error}.", "usage") from None
    try:
        params = command.make_context("pellucid plan", list(args)).params
        named = True
    except Exception as error:
        if type(error).__name__ != "MissingParameter":
            raise
        params, named = command.make_context("pellucid plan", ["inherited", *args]).params, False
    for name in _OUTPUTS:
        if params[name]:
            raise PellucidError(rule("--diff", f"a plan, without --{_FLAGS.get(name, name)}", text), "usage")
    words = PlanWords.of(params)
    return words if named else replace(words, sampler="")


def inherit(said: PlanWords, words: PlanWords, plan: Plan) -> PlanWords:
    """What was said of another plan, completed by the words that made this one. A plan file is complete already."""
    if said.file is not None:
        return said
    if words.file is not None:
        return said.over(_words_of(plan))
    entry, grid_of_name = resolve(words.sampler)
    return said.over(replace(words, sampler=entry.name, grid=words.grid or grid_of_name))


def plan_of(words: PlanWords) -> Plan:
    """The plan that the words mean."""
    if words.file is not None:
        return _from_file(words, words.file)
    entry, _ = resolve(words.sampler)
    said = {k: getattr(words, k) for k in ("schedule", "target", "grid", "steps", "dialect", "skip")}
    said = {k: v for k, v in said.items() if v is not None}
    options = {key: value_of(entry, key, value) for key, value in words.options}
    plan = _compile_with(words.sampler, said, options)
    if words.final is not None:
        plain, lay = plan, said.get("grid", plan.grid["name"])
        plan = _compile_with(words.sampler, {**said, "grid": replace(grids.named(lay), final=words.final)}, options)
        if words.final != "zero" and plan.rows == plain.rows:
            advice = "It changes nothing there."
            raise PellucidError(rule("final", f"zero for {plan.name} as {plan.dialect}", words.final, advice), "final")
    return plan


def _compile_with(sampler: str, settings: dict[str, Any], options: dict[str, Any]) -> Plan:
    """`compile_plan`, where an option of the right type and a wrong size is the user's error and not a crash."""
    try:
        return compile_plan(sampler, **settings, **options)
    except PellucidError:
        raise
    except (ValueError, IndexError, ArithmeticError) as error:
        if not options:
            raise
        listed = ", ".join(f"{key}={value}" for key, value in options.items())
        raise PellucidError(f"option must be one that {sampler} can use; got {listed}: {error}.", "option") from None


def _from_file(words: PlanWords, path: Path) -> Plan:
    for name in ("schedule", "target", "grid", "steps", "dialect", "final", "options"):
        if getattr(words, name):
            flag = {"dialect": "as", "options": "option"}.get(name, name)
            raise PellucidError(f"--{flag} must be left out with a plan file: {path} holds a whole plan.", "usage")
    if not path.exists():
        from pellucid.interop.source import bundled

        path = bundled(path)  # a bundle's, by its name; torch is imported for it alone
    text = read_text(path, "plan file", MAX_PLAN_BYTES)
    with naming(path.name), np.errstate(all="ignore"):
        return Plan.from_json(text)


def _words_of(plan: Plan) -> PlanWords:
    """The words that would compile a plan again, as far as its grid and its schedule can be made."""
    lay = dict(plan.grid)
    steps, skip = lay.pop("steps", None), lay.pop("skip", None)
    with _as_file_error("plan file must name a grid and a schedule that can be made"):
        grid, curve = grids.named(Grid.from_dict(lay)), schedules.from_dict(plan.schedule)
        grids.points(curve, grid, steps)
    options = tuple(plan.options.items())
    return PlanWords(plan.name, curve, plan.target, grid, steps, plan.dialect, None, skip, options)


@contextmanager
def _as_file_error(what: str) -> Iterator[None]:
    """A file may hold anything: what breaks while it is read is the file's error and not a crash."""
    try:
        yield
    except PellucidError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise PellucidError(f"{what}; got {type(error).__name__}: {error}.", "plan-json") from None


# --- options of a sampler --------------------------------------------------------------------------------------


def sampler_options(texts: Iterable[str]) -> dict[str, str]:
    """`eta=0.5`, as often as they are given."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise PellucidError(rule("option", "key=value", text, "For example: --option eta=0.5"), "option")
        name = key.strip().replace("-", "_")
        if name in found:
            raise PellucidError(rule("option", "given once", name), "option")
        found[name] = value.strip()
    return found
