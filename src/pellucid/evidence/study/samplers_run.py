"""A sampler study from its config to its report.

    config = SamplerStudy("scenes-128", ("ddim", "dpmpp_2m:karras"), (5, 10, 20), prompts, seeds=4)
    found = study(config, Path("out/samplers"))  # or study(config, folder, pellucid.wrap(pipeline))
    print(found.verdict.sentence)

First the images, here or over processes; then times, alone; then figures.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.report import charts
from pellucid.evidence.study import samplers_report, samplers_shards
from pellucid.evidence.study.samplers import SamplerStudy, SamplerStudyConfig
from pellucid.evidence.study.samplers_results import LatencyClock
from pellucid.evidence.study.samplers_verdict import Figures, Judges
from pellucid.evidence.study.subject import Subject

__all__ = ["Figures", "SamplerStudy", "open_study", "study"]

# (what, how much) → a context that gives a function to call with each part that is done
ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]


def no_bar(what: str, total: int) -> AbstractContextManager[Callable[[int], object]]:
    return nullcontext(lambda count: None)


def open_study(
    config: SamplerStudyConfig,
    folder: Path,
    pipe: Any = None,
    *,
    shard: tuple[int, int] = (0, 1),
    device: str | None = None,
) -> SamplerStudy:
    """The study in its folder; `pipe` is used in place of loading the model by its name."""
    subject = Subject.of(pipe) if pipe is not None else Subject.open(config.model, dtype=config.dtype, device=device)
    return SamplerStudy(config, subject, folder, shard)


def study(
    config: SamplerStudyConfig,
    folder: Path,
    pipe: Any = None,
    *,
    judges: dict[str, Any] | None = None,
    device: str | None = None,
    processes: int = 1,
    ray: int = 0,
    bar: ProgressBar = no_bar,
) -> Figures:
    """Makes what is missing, times what is missing, and writes the report. `judges` are the options of `Judges.open`:
    inception, clip, reference."""
    charts.require()
    given = judges or {}
    opened = open_study(config, folder, pipe, device=device)
    who = Judges.open(opened, **given)
    opened.files.claim(config.to_dict(opened.subject.mark))
    if processes != 1 or ray:
        run_shares(opened, pipe, given, device, processes, ray, bar)
        opened = SamplerStudy(config, opened.subject, folder)
    with bar("making and scoring images", opened.todo()) as done:
        opened.run(who.scorers, done)
    clock = LatencyClock(opened)
    with bar("timing", sum(cell.nfe for _, cell in clock.missing())) as done:
        clock.run(done)
    found = Figures(opened, who)
    samplers_report.write(found)
    return found


def run_shares(
    opened: SamplerStudy,
    pipe: Any,
    judges: dict[str, Any],
    device: str | None,
    processes: int,
    ray: int,
    bar: ProgressBar,
) -> None:
    """The images, over processes or over Ray."""
    if pipe is not None:
        must = "left out for a pipeline that is given: other processes load a model by its name"
        raise PellucidError(rule("processes, ray", must, (processes, ray)), "shard")
    if processes != 1 and ray:
        raise PellucidError(rule("--processes", "left out with --ray", processes), "shard")
    config, folder = opened.config, opened.folder
    name, count = ("--ray", ray) if ray else ("--processes", processes)
    if count > len(config.firsts()):
        must = f"at most {len(config.firsts())}, as many as there are batches"
        raise PellucidError(rule(name, must, count, f"Use a --batch below {config.batch}."), "shard")
    if ray:
        samplers_shards.over_ray(config, folder, ray, judges=judges, device=device)
        return
    before = samplers_shards.batches_in(folder)
    total = sum(len(opened.missing(first)) for first in config.firsts())
    with bar("making and scoring images", total) as done:
        told = before

        def seen(count: int) -> None:
            nonlocal told
            done(count - told)
            told = count

        samplers_shards.over_processes(config, folder, processes, judges=judges, device=device, seen=seen)
