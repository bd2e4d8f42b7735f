"""The recorder: an observer that streams a run into one file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from pellucid.core.errors import PellucidError, rule
from pellucid.core.loop import RunSeen, StepSeen, Work
from pellucid.evidence.trace import layout
from pellucid.evidence.trace.header import Spent
from pellucid.evidence.trace.recording import Recording, Settings
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.result import Result


class Recorder:
    """Records one run: `with Recorder("run.safetensors") as recorder: pipe("a star", observers=[recorder])`.

    `tensors` keeps x, x0, eps and the guidance delta of every `every`-th step and of the last one, beside the numbers
    of every step. `limit` is where values of x0 count as saturated; without it 1 for one or three channels, else 3.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: bool = False,
        every: int = 1,
        *,
        limit: float | None = None,
        overwrite: bool = False,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise PellucidError(rule("every", "a whole number from 1", every), "trace-every")
        if limit is not None and not limit > 0:
            raise PellucidError(rule("limit", "positive", limit), "trace-limit")
        self.path = Path(path)
        layout.check_goal(self.path, overwrite)
        self.asked = Settings(self.path, tensors, every, limit, overwrite)
        self.recording: Recording | None = None
        self.recipes: list[dict[str, Any]] = []
        self.closed = False

    # --- what the pipeline shows ----------------------------------------------------------------------------------

    def begin_request(self, recipes: Sequence[Recipe]) -> None:
        self.recipes = [recipe.to_dict() for recipe in recipes]

    def end_request(self, result: Result) -> None:
        """The recipes where they came late (a wrapped pipeline), and what each stage took."""
        held = self.recording
        if held is None or held.writer is None or held.header.state != "whole":
            return
        origin = held.clock.origin
        stages = [Spent(s.name, s.began - origin, s.seconds, s.peak) for s in result.stages]
        recipes = tuple(recipe.to_dict() for recipe in result.recipes)
        held.update(recipes=recipes, stages=tuple(stages), notes=(*held.header.notes, *result.notes))

    # --- what the loop shows --------------------------------------------------------------------------------------

    def begin_run(self, run: RunSeen) -> None:
        if self.closed or self.recording is not None:
            got = "a closed one" if self.closed else "a second run"
            raise PellucidError(rule("recorder", "of one run", got, "Make another Recorder."), "trace-runs")
        with torch.no_grad():
            self.recording = Recording(self.asked, run, self.recipes)

    def mark(self, work: Work) -> None:
        assert self.recording is not None
        self.recording.mark(work)

    def __call__(self, seen: StepSeen) -> None:
        assert self.recording is not None
        with torch.no_grad():
            self.recording.see(seen)

    # --- the end --------------------------------------------------------------------------------------------------

    def close(self, why: str | None = None) -> None:
        """Ends the file; a run that has not come to its end is noted as broken off, with `why`."""
        if self.closed:
            return
        self.closed = True
        held = self.recording
        if held is None or held.writer is None:
            if why is None:
                raise PellucidError("recorder must see a run before it is closed; got none.", "trace-runs")
            return
        try:
            if held.header.state != "whole":
                held.finish(why or "closed before its last step")
        finally:
            held.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(None if kind is None else f"{kind.__name__}: {error}".removesuffix(": "))
