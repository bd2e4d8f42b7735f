"""The cells of a sampler study: a sampler with its grid and options at a step count, or a plan from a file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from pellucid.core.compile import compile_plan
from pellucid.core.errors import PellucidError, rule
from pellucid.core.grid import check_steps
from pellucid.core.grid import named as grid_named
from pellucid.core.noise import Brownian, NoiseSource, Philox
from pellucid.core.plan import Plan
from pellucid.core.reader import read_bytes
from pellucid.core.samplers import REGISTRY, Sampler, resolve
from pellucid.core.samplers.registry import value_of
from pellucid.core.schedule import Schedule
from pellucid.interop import source
from pellucid.pipeline.prepare import given_plan
from pellucid.pipeline.request import Request


@dataclass(frozen=True)
class SamplerSetup:
    """A sampler by its own name, its grid where one is named, and its options; or the file of a plan."""

    sampler: str
    grid: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    file: str | None = None

    @staticmethod
    def parse(text: str) -> SamplerSetup:
        """`NAME[:GRID][:KEY=VALUE…]`, by any name that the sampler has, or a plan file (.json)."""
        if text.strip().lower().endswith(".json"):
            path = source.bundled(text.strip())
            if not path.is_file():
                raise PellucidError(rule("plan", "a file that exists", text), "file")
            digest = hashlib.sha256(read_bytes(path, "plan")).hexdigest()[:8]
            return SamplerSetup(f"{path.stem}#{digest}", file=text.strip())
        name, *rest = (part.strip() for part in text.split(":"))
        entry, grid = resolve(name)
        options: dict[str, Any] = {}
        for part in rest:
            key, equals, value = part.partition("=")
            if equals:
                key = key.strip().replace("-", "_")
                if key not in entry.options():
                    known = ", ".join(entry.options()) or "none"
                    raise PellucidError(
                        rule("option", f"one that {entry.name} reads", key, f"Known: {known}."), "option"
                    )
                if key in options:
                    raise PellucidError(rule("option", "given once", key), "option")
                options[key] = value_of(entry, key, value.strip())
            elif not part or grid is not None:
                raise PellucidError(rule("sampler", "NAME[:GRID][:KEY=VALUE…]", text), "sampler-words")
            else:
                grid = part
        return SamplerSetup(entry.name, None if grid is None else grid_named(grid).name, tuple(sorted(options.items())))

    @property
    def text(self) -> str:
        options = (f"{key}={value}" for key, value in self.options)
        return ":".join([self.sampler, *([self.grid] if self.grid else []), *options])

    @property
    def label(self) -> str:
        """What people read: a plan by its file."""
        return self.file or self.text

    def asks(self, steps: int) -> dict[str, Any]:
        """What a request says of it."""
        if self.file is not None:
            return {"plan": self.file}
        found: dict[str, Any] = {"sampler": self.sampler, "steps": steps}
        if self.grid is not None:
            found["grid"] = self.grid
        if self.options:
            found["options"] = dict(self.options)
        return found

    def words(self, steps: int) -> str:
        """The same in words of `pellucid sample`."""
        if self.file is not None:
            return f"--plan {self.file}"
        grid = f" --grid {self.grid}" if self.grid else ""
        options = "".join(f" --option {key}={value}" for key, value in self.options)
        return f"--sampler {self.sampler}{grid} --steps {steps}{options}"

    def plan(self, steps: int, schedule: Schedule, target: str) -> Plan:
        """Its table for a model of this schedule and target."""
        if self.file is not None:
            parts: Any = SimpleNamespace(schedule=schedule, target=target)
            return given_plan(parts, Request(plan=self.file))
        return compile_plan(
            self.sampler, schedule=schedule, target=target, grid=self.grid, steps=steps, **dict(self.options)
        )


def folder_of(key: str) -> str:
    """A cell's key as a name for files, as readable as files allow."""
    return re.sub(r"[^\w.=#+-]+", "-", key, flags=re.ASCII).strip("-")


@dataclass(frozen=True)
class SamplerCell:
    """One set-up at one step count. `against` is the key of the converged run that it is compared with."""

    setup: SamplerSetup
    steps: int
    nfe: int
    clock: str | None = None  # of the noise that it injects; None where it injects none
    against: str = ""
    mark: str = ""  # before the key of what is no cell of the table: a converged run

    @property
    def key(self) -> str:
        return f"{self.mark}{self.setup.text} × {self.steps}"

    @property
    def label(self) -> str:
        return f"{self.mark}{self.setup.label} × {self.steps}"

    @property
    def folder(self) -> str:
        return folder_of(self.key)

    @property
    def stochastic(self) -> bool:
        return self.clock is not None

    def asks(self) -> dict[str, Any]:
        return self.setup.asks(self.steps)

    def noise(self, seeds: Sequence[int]) -> NoiseSource:
        """One seed is one image, and for a stochastic sampler one Brownian path, whatever the steps."""
        return Philox(seeds) if self.clock is None else Brownian(seeds, self.clock)  # type: ignore[arg-type]


_CONVERGED, _HALF = "converged: ", "half of "


@dataclass(frozen=True)
class Yardstick:
    """How a converged image is made: a deterministic sampler of high order with `steps` steps; for each stochastic
    sampler itself, on the same grid as that, with `path_steps`."""

    setup: SamplerSetup
    steps: int
    path_steps: int

    def of(self, cell: SamplerCell | None) -> tuple[SamplerSetup, int]:
        """For a cell; None for the deterministic ones."""
        if cell is None or not cell.stochastic:
            return self.setup, self.steps
        return replace(cell.setup, grid=self.setup.grid), self.path_steps


def lay_cells(
    setups: Sequence[SamplerSetup], steps: Sequence[int], yardstick: Yardstick, schedule: Schedule, target: str
) -> tuple[list[SamplerCell], list[SamplerCell]]:
    """(the cells, the converged runs that they need), each compiled once, so that a bad one is refused before work."""
    cells: list[SamplerCell] = []
    converged: dict[str, SamplerCell] = {}
    if duplicates := [setup.text for i, setup in enumerate(setups) if setup in setups[:i]]:
        raise PellucidError(rule("samplers", "different", duplicates[0]), "samplers-twice")
    for setup in setups:
        for count in steps:
            cell = _cell_of(setup, count, schedule, target)
            best = _converged_of(cell, yardstick, schedule, target)
            if setup.file is not None and cell.stochastic:
                raise PellucidError(
                    rule("plan", "deterministic: a stochastic one has no converged run", setup.file), "plan-noise"
                )
            converged.setdefault(best.key, best)
            cells.append(replace(cell, against=best.key))
            if setup.file is not None:
                break  # a plan has its own steps
    main = _converged_of(None, yardstick, schedule, target)
    if main.stochastic:
        raise PellucidError(rule("converged", "a deterministic sampler", yardstick.setup.text), "converged")
    return cells, [main, *(cell for key, cell in converged.items() if key != main.key)]


def _converged_of(cell: SamplerCell | None, yardstick: Yardstick, schedule: Schedule, target: str) -> SamplerCell:
    """The converged run of a cell; None: of the deterministic ones."""
    setup, steps = yardstick.of(cell)
    try:
        return _cell_of(setup, steps, schedule, target, _CONVERGED)
    except PellucidError as error:  # nobody asked for this grid: say whose it is
        raise PellucidError(f"--converged {setup.text}: {error}", error.code) from None


def _cell_of(setup: SamplerSetup, steps: int, schedule: Schedule, target: str, mark: str = "") -> SamplerCell:
    plan = setup.plan(check_steps(steps), schedule, target)
    noisy = any(row.draws or row.pre_draws for row in plan.rows)
    count = int(plan.grid["steps"]) if setup.file is not None else steps
    return SamplerCell(setup, count, plan.nfe, plan.clock if noisy else None, mark=mark)


def half_run(cell: SamplerCell, schedule: Schedule, target: str) -> SamplerCell:
    """A converged run with half of its steps: their distance says how converged it is."""
    return _cell_of(cell.setup, cell.steps // 2, schedule, target, _HALF + _CONVERGED)


# --- Setups without a grid ------------------------------------------------------------------------------------------


def setup_without_grid(text: str) -> SamplerSetup:
    """`unipc`, or `unipc:order=3`."""
    found = SamplerSetup.parse(text)
    if found.file is not None or found.grid is not None:
        advice = "Give --grids beside it."
        raise PellucidError(rule("sampler", "NAME[:KEY=VALUE…], without a grid", text, advice), "grid-twice")
    return found


def entry_of(setup: SamplerSetup) -> Sampler:
    return REGISTRY[setup.sampler]
