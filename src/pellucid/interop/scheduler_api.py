"""What diffusers' schedulers have beside the three calls: config, files, tables, output objects, changes of class.

A training script reads `alphas_cumprod`, a pipeline saves its scheduler, a user changes its class: all of it works on
`SchedulerSettings`, without diffusers. Where diffusers is imported, its pipelines take our scheduler for the class that
it stands for.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.core.dialect_diffusers import finite_table
from pellucid.core.errors import PellucidError, rule
from pellucid.core.schedule import DiscreteVP
from pellucid.interop import diffusers_config, diffusers_export
from pellucid.interop.atomic_files import put
from pellucid.interop.diffusers_classes import KNOWN
from pellucid.interop.diffusers_config import FILE_NAME, SchedulerSettings


class Config(dict[str, Any]):
    """A config that reads as a dict and as attributes, as diffusers' pipelines expect."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class StepOutput(Mapping[str, Tensor]):
    """What `step` returns: by attribute, by name and by position. All but `prev_sample` is computed when asked for."""

    def __init__(self, prev_sample: Tensor, second: str | None, compute: Callable[[str], Tensor]) -> None:
        self.prev_sample = prev_sample
        self._names = ("prev_sample",) if second is None else ("prev_sample", second)
        self._compute = compute

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_") or name not in (*self._names, "pred_original_sample"):
            raise AttributeError(name)
        found = self._compute(name)
        setattr(self, name, found)
        return found

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return self.to_tuple()[key]
        if key not in (*self._names, "pred_original_sample"):
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"StepOutput({', '.join(self._names)})"

    def to_tuple(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self._names)


class _Table:
    """A table of the schedule as a float32 tensor. It may be set to itself on another device, as scripts do."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self.compute = compute

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, scheduler: Any, owner: type) -> Any:
        if scheduler is None:
            return self
        if self.name not in scheduler._tables:
            if not isinstance(scheduler.reading.schedule, DiscreteVP):
                raise AttributeError(f"{scheduler!r} has no {self.name}: its schedule is not a table of betas")
            made = torch.as_tensor(np.asarray(self.compute(scheduler)), dtype=torch.float32)
            scheduler._tables[self.name] = made
        return scheduler._tables[self.name]

    def __set__(self, scheduler: Any, value: Tensor) -> None:
        known = self.__get__(scheduler, type(scheduler))
        if value.shape != known.shape or not torch.allclose(value.detach().cpu().float(), known.cpu(), 1e-3, 1e-6):
            raise PellucidError(
                f"{self.name} must be the schedule's own; got other values. Pass trained_betas in the config.", "table"
            )
        scheduler._tables[self.name] = value


def _alpha_bar(scheduler: Any) -> Any:
    """ᾱ; where diffusers keeps sigma finite at zero terminal SNR, so do we."""
    curve = scheduler.reading.schedule
    if curve.zero_terminal and scheduler.entry.peer in ("k", "solver"):
        return 1.0 / (1.0 + finite_table(curve) ** 2)
    return curve.alpha_bar


class DiffusersAPI:
    """The part of diffusers' scheduler API that needs no run. `Scheduler` adds the three calls."""

    reading: SchedulerSettings
    dialect: str
    entry: Any
    config_name = FILE_NAME
    _class = ""  # the diffusers class that a subclass stands for
    _config: Config | None
    _tables: dict[str, Tensor]
    _setup: Callable[[SchedulerSettings, str], None]

    betas = _Table(lambda s: s.reading.schedule.betas)
    alphas = _Table(lambda s: 1.0 - s.reading.schedule.betas)
    alphas_cumprod = _Table(_alpha_bar)
    final_alpha_cumprod = _Table(lambda s: 1.0 if s.reading.grid.final == "zero" else s.reading.schedule.alpha_bar[0])

    # --- the config

    @property
    def config(self) -> Config:
        """The config of the class: every key that came in, also those that the class does not read."""
        if self._config is None:
            found = self.export() if self.reading.values else diffusers_export.describe(self.reading)
            if self.reading.defaults:
                found["_use_default_values"] = list(self.reading.defaults)
            self._config = Config(found)
        return self._config

    @property
    def _internal_dict(self) -> Config:
        return self.config

    @_internal_dict.setter
    def _internal_dict(self, value: Mapping[str, Any]) -> None:
        # diffusers' pipelines rewrite old configs (steps_offset, clip_sample) through this name
        if not self.reading.values:
            raise PellucidError(rule("config", "left as it is where the sampler was named", dict(value)), "config")
        if dict(value) == self.config:
            return
        own = {k: v for k, v in value.items() if not k.startswith("_") and k not in KNOWN}  # a caller's own notes
        known = {k: v for k, v in value.items() if k not in own and k != "_use_default_values"}
        reading = diffusers_config.read({**known, "_class_name": self.config["_class_name"]})
        defaults = tuple(value.get("_use_default_values") or ())
        self._setup(replace(reading, extra={**reading.extra, **own}, defaults=defaults), self.dialect)

    def register_to_config(self, **values: Any) -> None:
        """Changes keys of the config; the scheduler then computes what they say."""
        self._internal_dict = Config({**self.config, **values})

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self.config:  # diffusers still allows it, and warns
            warnings.warn(f"Use scheduler.config.{name}, not scheduler.{name}.", FutureWarning, stacklevel=2)
            return self.config[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- files

    @classmethod
    def from_config(cls, config: Any, *, strict: bool = True, dialect: str = "diffusers", **overrides: Any) -> Any:
        """Reads a diffusers scheduler config: a dict, a file, a folder, a live `.config` or a live scheduler.

        With another `_class_name` it changes class as in diffusers: what was set goes along, a default does not.
        """
        data = {**diffusers_config.chosen(diffusers_config.load(config)), **overrides}
        if cls._class:
            data["_class_name"] = cls._class
        made = cls.__new__(cls)
        made._setup(diffusers_config.read(data, strict), dialect)
        return made

    @classmethod
    def from_pretrained(
        cls, where: str | os.PathLike[str], subfolder: str | None = None, revision: str | None = None, **overrides: Any
    ) -> Any:
        """`from_config` of a folder, or of a hub id such as `owner/name` with its subfolder."""
        return cls.from_config(cls.load_config(where, subfolder, revision), **overrides)

    @classmethod
    def load_config(
        cls, where: str | os.PathLike[str], subfolder: str | None = None, revision: str | None = None
    ) -> dict[str, Any]:
        """The config in a folder or on the hub, as it stands there."""
        from pellucid.interop import hub  # with all that reads models, which a scheduler does not need

        place = Path(where) / subfolder if subfolder else Path(where)
        if isinstance(where, str) and not Path(where).exists() and hub.is_id(where):
            name = f"{subfolder}/{FILE_NAME}" if subfolder else FILE_NAME
            place = hub.fetch_file(where, name, revision=revision).parent
        return diffusers_config.load(place)

    def export(self) -> dict[str, Any]:
        """The config of the nearest diffusers class."""
        return diffusers_export.write(self.reading)

    def save_pretrained(self, save_directory: str | os.PathLike[str], **_: Any) -> None:
        """Writes scheduler_config.json, whole or not at all."""
        text = json.dumps(self.export(), indent=2, sort_keys=True) + "\n"
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        put(folder / FILE_NAME, text)

    save_config = save_pretrained

    # --- classes

    def _peer_class(self) -> type:
        """diffusers' class of this config where diffusers is imported: its pipelines take us for it, and save us."""
        library = sys.modules.get("diffusers")
        ready = library is not None and "reading" in self.__dict__
        found = getattr(library, self.config["_class_name"], None) if ready else None
        return found if isinstance(found, type) else type(self)

    __class__ = property(_peer_class)
