"""Evidence from Python: `pellucid.trace`, `pellucid.study` and `pellucid.tune`, each what its command does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.study.kernel import run_study
from pellucid.evidence.study.samplers import SamplerStudy, SamplerStudyConfig
from pellucid.evidence.study.samplers_verdict import SamplerFigures
from pellucid.evidence.trace import Recorder, Trace, read
from pellucid.evidence.tune.descent import Descent
from pellucid.evidence.tune.model import model_of
from pellucid.evidence.tune.table import Start
from pellucid.evidence.tune.tuning import TuningConfig, TuningResult
from pellucid.evidence.tune.tuning import tune as run_tuning
from pellucid.interop.atomic_files import put
from pellucid.pipeline.load import load
from pellucid.pipeline.peer_words import CALL, option_error
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.result import check_new

PathLike = str | os.PathLike[str]


def trace(
    source: PathLike | Any,
    prompt: str | Sequence[str] | None = None,
    /,
    *,
    out: PathLike | None = None,
    tensors: bool = False,
    every: int = 1,
    overwrite: bool = False,
    **options: Any,
) -> Trace:
    """Reads a trace, or runs a pipeline and records it.

    `trace("run.safetensors")` reads a file. `trace(pipe, "a red star", out="run.safetensors", steps=12)` makes the
    image, writes every step to `out`, and returns what was recorded; `tensors` keeps x, x0, eps and the guidance delta
    of every `every`-th step. The other options are those of the pipeline's call.
    """
    if isinstance(source, str | os.PathLike):
        if prompt is not None or out is not None or options or tensors or every != 1 or overwrite:
            must = "a pipeline where something is to be run; a file is read as it is"
            raise PellucidError(rule("source", must, os.fspath(source)), "trace-source")
        return read(source)
    if not callable(source):
        raise PellucidError(rule("source", "a trace file or a pipeline", type(source).__name__), "trace-source")
    if out is None:
        raise PellucidError("out must be given: the file that the trace is written to; got none.", "trace-out")
    with Recorder(out, tensors, every, overwrite=overwrite) as recorder:
        source(*(() if prompt is None else (prompt,)), observers=[*options.pop("observers", ()), recorder], **options)
    return read(out)


def study(
    model: PathLike | Any,
    samplers: Sequence[str],
    steps: Sequence[int],
    *,
    out: PathLike,
    prompts: Sequence[str] = (),
    guidance: Any = None,
    **settings: Any,
) -> SamplerFigures:
    """Compares samplers at step counts on a model: times, distances to the converged images, and what to use.

    `model` is a name for `pellucid.load`, or a pipeline that is loaded or wrapped. `samplers` are names with a grid and
    options (`dpmpp_2m:karras`) or plan files. `out` is the folder of the study; what is there is not made again. The
    other settings are fields of `SamplerStudyConfig`, as `seeds` and `batch` are. `.verdict.sentence` says what to use.
    """
    known = [f.name for f in fields(SamplerStudyConfig)]
    for name, value in settings.items():
        if name not in known:
            raise option_error(name, value, known, CALL)
    for name, value in (("samplers", samplers), ("steps", steps), ("prompts", prompts)):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise PellucidError(rule(name, "a list, such as [8, 20] or ['ddim']", value), "study-list")
    named = isinstance(model, str | os.PathLike)
    config = SamplerStudyConfig(
        os.fspath(model) if named else str(getattr(getattr(model, "components", None), "name", "pipeline")),
        tuple(samplers),
        tuple(steps),
        tuple(prompts),
        guidance=guidance,
        **settings,
    )
    found: SamplerFigures = run_study(SamplerStudy, config, Path(out), pipe=None if named else model)
    return found


def tune(
    model: PathLike | Pipeline,
    steps: int = 8,
    *,
    guidance: Any = None,
    prompts: str | None = None,
    out: PathLike | None = None,
    overwrite: bool = False,
    **settings: Any,
) -> TuningResult:
    """Tunes a plan of `steps` model calls for a model at a guidance, against its own converged images.

    `prompts` names a file with one prompt per line, or is `scenes`. The other settings are those of `pellucid tune`:
    `pairs`, `held_out`, `teacher`, `starts` (`unipc-3:karras`), `seed`, and of the descent `iterations`, `batch`,
    `what`. The result has `.plan`, which `pipe(plan=…)` takes, and `.evidence`; `out` is a file for the plan.
    """
    knobs = [f.name for f in fields(Descent) if f.name != "seed"]
    known = [f.name for f in fields(TuningConfig) if f.name != "descent"]
    for name, value in settings.items():
        if name not in (*knobs, *known):
            raise option_error(name, value, (*knobs, *known), CALL)
    if out is not None:
        check_new(Path(out), "out", overwrite)
    descent = Descent(seed=settings.get("seed", 0), **{name: settings.pop(name) for name in knobs if name in settings})
    start_words = settings.pop("starts", ())
    listed = [start_words] if isinstance(start_words, str) else start_words
    starts = tuple(Start.parse(one) if isinstance(one, str) else one for one in listed)
    config = TuningConfig(steps=steps, descent=descent, prompts=prompts, starts=starts, **settings)
    pipe = model if isinstance(model, Pipeline) else load(model)
    tuned = run_tuning(model_of(pipe, guidance), config)
    if out is not None:
        put(Path(out), tuned.plan.to_json() + "\n")
    return tuned
