"""What a call of `pellucid sample` has in its hands, and one run of it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from pellucid.cli import sample_repeat, sample_words
from pellucid.cli.sample_output import OutputPaths, SampleReport, StepBar, TraceFiles
from pellucid.cli.sample_repeat import RecipeSource
from pellucid.cli.sample_words import SampleWords
from pellucid.core.errors import PellucidError
from pellucid.pipeline.pipeline import Pipeline, Result
from pellucid.pipeline.prepare import make_plan
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.request import Request


@dataclass(frozen=True)
class ImageJob:
    """One image: its words, its seed, and its number where there are several prompts."""

    prompt: str | None
    label: int | str | None
    seed: int
    number: int | None = None


@dataclass
class SampleRun:
    """The words, the model, where images go, and what is said of them. `named`: the model is no recipe's."""

    asked: SampleWords
    goal: OutputPaths
    report: SampleReport
    bar: StepBar
    pipe: Pipeline
    origin: RecipeSource | None = None
    named: bool = True
    weak: Pipeline | None = None
    traces: TraceFiles | None = None

    def steps(self, request: Request) -> int:
        """Model calls of a request. An option of the right type and a wrong size is the user's error, not a crash."""
        try:
            return make_plan(self.pipe.components, request).plan.nfe
        except PellucidError:
            raise
        except (ValueError, TypeError, IndexError, ArithmeticError) as error:
            told = ", ".join(f"{key}={value}" for key, value in request.options.items())
            message = f"option must be one that {request.sampler} can use; got {told}: {error}."
            raise PellucidError(message, "option") from None

    def run(self, request: Request) -> Result:
        self.bar.run(self.steps(request))
        with nullcontext() if self.traces is None else self.traces.recorder() as recorder:
            watching = (self.bar,) if recorder is None else (recorder, self.bar)
            result = self.pipe.run(replace(request, weak=self.weak, observers=watching))
        self.report.add(result)
        if recorder is not None:
            self.report.traces.append(recorder.path)
        return result

    def check_recipe(self, request: Request) -> None:
        """With `--from`: reports what is not the recipe's."""
        if self.origin is not None and self.report.source is not None:
            whole = replace(request, weak=self.weak)
            self.report.source["changed"] += sample_repeat.check_same(self.origin, self.pipe, whole, self.named)

    def compare_pixels(self, image: Any, recipe: Recipe) -> None:
        """With `--from`: reports whether the image is the same."""
        if self.origin is not None and self.report.source is not None:
            self.report.source["pixels"] = sample_repeat.compare_pixels(self.origin, image, recipe)


def request_of(jobs: list[ImageJob], fields: dict[str, Any]) -> Request:
    """The request of one run."""
    told: dict[str, Any] = {"seed": [job.seed for job in jobs]}
    if fields.get("options"):
        told["options"] = sample_words.typed_options(fields.get("sampler"), fields["options"])
    for name in ("prompt", "label"):
        held = [getattr(job, name) for job in jobs]
        if any(one is not None for one in held):
            told[name] = held if len(held) > 1 else held[0]
    if not told.keys() & {"prompt", "label"} and len(jobs) > 1:
        told["n"] = len(jobs)  # told nothing, so that only their number says how many there are
    return Request(**{**fields, **told})
