"""Checks of the plan that would run: what it wastes, where it misses its levels, where it starts and ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pellucid.core import schedule as schedules
from pellucid.core.dialect_diffusers import PREVIOUS, ZERO_SNR_RATIO
from pellucid.core.errors import PellucidError
from pellucid.core.plan import Plan, kept, landings
from pellucid.core.schedule import DiscreteVP
from pellucid.evidence.doctor.checks import Evidence, Finding, check
from pellucid.evidence.doctor.subject import Subject, UnsupportedCheck, exact_plan, make_plan, steps_of
from pellucid.interop.diffusers_config import SchedulerSettings
from pellucid.interop.weights import some

_EXPLAINED = ("target-schedule", "alpha-zero")  # plans that fail for reasons that the config checks report
_IDENTITY = 1e-9  # how far from "x stays x" a row may be that does nothing
_OFF = 1e-6  # a gap that rounding does not explain
_SEEN_OFF = 0.01  # a gap that matters, as a part of x
_LATE_START = 0.25  # alpha of the first call beyond that of the noisiest level: a run starts without it
_SLIGHTLY_LATE = 0.05
_NOISY_END = 0.05  # sigma / alpha that stays in the image; the published schedules leave 0.03 at most
_FAR_CALL = 0.03  # sigma / alpha of a last call; 0.04 is a tenth of a model's KID in docs/results/schedules.md
_VERY_FAR = 0.2
_SIZES = (1.0, 0.5, 0.25)  # standard deviations of what pixels and latents are made of
_EXAGGERATED = 1.2  # how much larger it may come out
_PIXELS = ("DDPMPipeline", "DDIMPipeline", "PNDMPipeline")  # diffusers' pipelines without an autoencoder
_ENOUGH = 20  # calls; with fewer every grid ends with a leap
_OFTEN = 0.1  # share of the calls
_NOTHING = 0.01  # alpha below which x holds nothing of an image
_WASTED = 0.2  # share of the calls there, the first aside: a grid has to begin somewhere


@check("steps")
def steps(subject: Subject, reading: SchedulerSettings) -> Iterator[Finding]:
    """More steps than there are times, and other plans that cannot be made."""
    wanted, most = steps_of(subject.run), _most_steps(reading)
    if subject.run.own and most is not None and wanted > most:
        yield Finding(
            "steps-beyond",
            "error",
            f"{wanted} steps are more than the schedule has times",
            (("steps", wanted), ("times", most)),
            f"The scheduler spreads the steps over {most} whole times, so {wanted - most} or more steps would repeat "
            "a level, and diffusers refuses them or does nothing.",
            f"--steps {most} at most; with --sampler NAME times are fractional and any number works",
        )
    elif subject.plan is None:
        try:
            make_plan(reading, subject.run)
        except PellucidError as error:
            if error.code not in _EXPLAINED:
                yield Finding(
                    "no-plan",
                    "error",
                    f"no plan of {wanted} steps can be made",
                    (("steps", wanted), ("error", error.code)),
                    str(error),
                    "Change the steps, the grid or the key that the cause names.",
                )


def _most_steps(reading: SchedulerSettings) -> int | None:
    """The number of distinct times that the scheduler has for its steps."""
    if not isinstance(reading.schedule, DiscreteVP):
        return None
    if reading.sampler in ("lcm", "tcd"):
        return min(reading.grid.original, reading.schedule.num_train)
    return reading.schedule.num_train


@check("strength and steps")
def strength(subject: Subject, reading: SchedulerSettings) -> Iterator[Finding]:
    """Too little strength for a single step."""
    share, count = subject.run.strength, steps_of(subject.run)
    if share is None:
        raise UnsupportedCheck("no strength: give --strength S")
    if subject.run.whole_steps and int(count * share) < 1:
        yield Finding(
            "strength-below-a-step",
            "error",
            "strength × steps is less than one step",
            (("strength", share), ("steps", count), ("strength × steps", share * count)),
            "diffusers keeps int(strength × steps) of the steps, which is 0: the image would come back as it is, "
            "or the run would fail.",
            f"--steps {int(1 / share) + 1} or more; or --sampler {reading.sampler}, which starts at any level",
        )


@check("repeated last sigma")
def repeated(subject: Subject, plan: Plan) -> Iterator[Finding]:
    """Calls of the model that change nothing, or only correct the step before."""
    null, last = _null_rows(plan), len(plan.rows) - 1
    before = plan.rows[last].level.ratio
    if abs(before - plan.end.ratio) <= _IDENTITY * before:
        idle = last in null
        effect = "x stays what it was" if idle else "x is only corrected for the step before"
        yield Finding(
            "repeated-last-sigma",
            "warning" if idle else "note",
            "the last step goes nowhere",
            (("steps", plan.nfe), ("sigma / alpha before", before), ("sigma / alpha after", plan.end.ratio)),
            f"The last sigma of the grid is repeated as the end: the model is called and {effect}, "
            f"with noise of {plan.end.ratio:.3g} in it.",
            _end_fix(subject, '"steps_offset": 1 with "timestep_spacing": "leading", or '),
        )
    inner = [row for row in null if row != last]
    if inner:
        yield Finding(
            "null-step",
            "warning",
            f"{len(inner)} steps do nothing",
            (("steps", plan.nfe), ("that do nothing", len(inner)), ("rows", some([str(row) for row in inner], 6))),
            "The grid repeats a level, so the model is called and x stays the same.",
            "Use fewer steps, or another grid.",
        )


def _null_rows(plan: Plan) -> list[int]:
    """Calls of the model after which x is what it was."""
    return [
        number
        for number, row in enumerate(plan.rows)
        if all(abs(weight - (register == 0)) <= _IDENTITY for register, weight in row.x) and row.anchor is None
    ]


def _end_fix(subject: Subject, before: str = "") -> str:
    """How this scheduler ends at a clean image; `before` is an alternative to that."""
    known = {} if subject.reading is None else subject.reading.values
    if known.get("final_sigmas_type") == "sigma_min":
        return '"final_sigmas_type": "zero"'
    if known.get("set_alpha_to_one") is False:
        return f'{before}"set_alpha_to_one": true'
    return "Sample with --sampler NAME --grid karras, which ends at sigma 0; this class of diffusers cannot."


@check("last call")
def last_call(subject: Subject, plan: Plan, reading: SchedulerSettings) -> Iterator[Finding]:
    """Pixels whose finest detail is made in one leap, from further away than the network's training ends."""
    if not _in_pixels(subject) or plan.nfe < _ENOUGH or plan.end.ratio > 0:
        return
    far, near = plan.rows[-1].level.ratio, float(reading.schedule.ratio_at(reading.schedule.span[0]))
    known = reading.class_name in ("DDIMScheduler", "DDPMScheduler")  # of which `leading` ends there as well
    leading = '; in diffusers "timestep_spacing": "leading"' if known else ""
    if far > _FAR_CALL and far > 2 * near:
        yield Finding(
            "far-last-call",
            "warning" if far > _VERY_FAR else "note",
            "the finest detail is made in a single step",
            (("calls", plan.nfe), ("sigma / alpha of the last call", far), ("of the first training time", near)),
            f"The last call sees noise of {far * 127.5:.0f} in 255 and goes to the image in one step, which yields "
            "the mean of all it could be: smoother than images are. The network was trained at lower noise levels.",
            f"--sampler {reading.sampler} --grid beta or linspace, which end at its first time{leading}",
        )


def _in_pixels(subject: Subject) -> bool:
    """Whether pixels are denoised, and not latents or something unknown."""
    if subject.pipeline is not None:
        return subject.pipeline.components.vae is None and subject.pipeline.channels == 3
    return subject.index is not None and subject.index.get("_class_name") in _PIXELS


@check("size of what comes out")
def size(subject: Subject, plan: Plan) -> Iterator[Finding]:
    """Plans that amplify Gaussian data, however good the network."""
    if plan.end.ratio > 0:
        return
    largest, scale = max(zip(kept(plan, _SIZES).tolist(), _SIZES, strict=True))
    reason = plan.declared or f"{plan.name} steps too far for this grid"
    if largest > _EXAGGERATED:
        yield Finding(
            "plan-exaggerates",
            "warning" if largest > 2 * _EXAGGERATED and not plan.declared else "note",
            f"the plan amplifies what it draws {largest:.3g} times",
            (("calls", plan.nfe), ("of Gaussian data", scale), ("times as large", largest)),
            f"{reason}: with a perfect network, data of standard deviation {scale:g} come out as "
            f"{largest * scale:.3g}. Images come out with far too much contrast, or as noise.",
            "More steps, or another --grid or --sampler: `pellucid plan` shows what each keeps",
        )


@check("previous step")
def previous(subject: Subject, plan: Plan) -> Iterator[Finding]:
    """Rows that miss the level of the next call."""
    gaps = {
        row: gap for row, (gap, _) in enumerate(landings(plan)) if gap > _OFF
    }  # as a part of x; the last is the end
    if not gaps:
        return
    worst = max(gaps, key=gaps.__getitem__)
    facts: Evidence = (
        ("rows", some([str(row) for row in gaps], 6)),
        ("worst row", worst),
        ("off by, of x", gaps[worst]),
        *_exact_evidence(subject, worst),
    )
    if PREVIOUS in plan.declared:
        stride = int(plan.schedule.get("num_train", 1000)) // max(int(plan.grid.get("steps", 1)), 1)
        yield Finding(
            "previous-step",
            "warning" if gaps[worst] >= _SEEN_OFF else "note",
            "steps miss the level that the next one starts from",
            facts,
            f"diffusers steps to t − {stride} whatever the next time is; with this timestep_spacing and "
            f"{plan.grid.get('steps')} steps the next time is another, so x has another noise level than the network "
            "is given.",
            '"timestep_spacing": "leading", or a number of steps that divides the training times; '
            "--sampler NAME steps exactly",
        )
        return
    yield Finding(
        "off-the-level",
        "note",
        f"{plan.name} leaves its levels on purpose",
        facts,
        plan.declared or "The plan declares no reason.",
        "Nothing, if that is the sampler that you want.",
    )


def _exact_evidence(subject: Subject, row: int) -> Evidence:
    """What the exact plan does otherwise."""
    plan, reading = subject.plan, subject.reading
    if plan is None or reading is None or row >= len(plan.rows):
        return ()
    try:
        rows = exact_plan(reading, subject.run).rows
    except PellucidError:
        return ()
    differing = sum(a.x != b.x for a, b in zip(plan.rows, rows, strict=False))
    time = f"{plan.rows[row].time:.6g}"
    return ("time passed there", time), ("rows with other weights than the exact plan", differing)


def _schedule_of_betas(subject: Subject, plan: Plan, why: str) -> DiscreteVP:
    """The plan's schedule where that is one of betas; else `why` the check cannot be made."""
    schedule = schedules.from_dict(plan.schedule) if subject.reading is None else subject.reading.schedule
    if not isinstance(schedule, DiscreteVP):
        raise UnsupportedCheck(why)
    return schedule


@check("first level")
def first_level(subject: Subject, plan: Plan) -> Iterator[Finding]:
    """A run that starts below the noisiest level, from noise that is as large as there."""
    schedule = _schedule_of_betas(subject, plan, "only schedules of betas have a noisiest time")
    recipe = subject.recipe
    if subject.is_run and (recipe is None or recipe.get("strength") or recipe.get("denoising_start")):
        raise UnsupportedCheck("the run that was recorded starts from an image, or may")
    noisiest = float(schedule.alpha_bar[-1]) ** 0.5
    alpha = plan.start.to("vp").alpha
    facts = (("alpha of the first call", alpha), ("alpha of the noisiest level", noisiest),
             ("first time", plan.rows[0].time), ("last training time", schedule.num_train - 1.0))  # fmt: skip
    if schedule.zero_terminal and plan.start.ratio < 0.99 * ZERO_SNR_RATIO:
        yield Finding(
            "zero-snr-not-reached",
            "warning",
            "the schedule ends at zero SNR, but the run does not start there",
            facts,
            "The network was trained to start from pure noise; a grid that omits the last time gives it noise where it "
            "expects a trace of the image, and brightness drifts to the middle.",
            '"timestep_spacing": "trailing"',
        )
    elif alpha - noisiest > _SLIGHTLY_LATE:
        yield Finding(
            "late-start",
            "warning" if alpha - noisiest > _LATE_START else "note",
            "the first call is far below the noisiest level",
            facts,
            f"At the first time x should hold {alpha:.0%} of the image, and the run starts from noise that holds "
            "none: the image comes out grey or washed.",
            '"timestep_spacing": "trailing", or other steps',
        )


@check("calls in noise")
def in_noise(subject: Subject, plan: Plan) -> Iterator[Finding]:
    """Calls that see no image, where a schedule reaches far into noise."""
    _schedule_of_betas(subject, plan, "a schedule without betas goes as far into noise as its sigmas say")
    there = sum(row.level.to("vp").alpha < _NOTHING for row in plan.rows)
    if there - 1 <= _WASTED * plan.nfe:
        return
    last = plan.rows[there].level if there < len(plan.rows) else plan.end
    yield Finding(
        "calls-in-noise",
        "warning",
        f"{there} of {plan.nfe} calls are made in pure noise",
        (
            ("calls", plan.nfe),
            (f"at alpha below {_NOTHING}", there),
            ("sigma / alpha of the first", plan.start.ratio),
            ("of the first with an image", last.ratio),
        ),
        "A grid that is even in powers or logarithms of sigma, such as Karras', is for schedules that end at a sigma "
        f"of about 14 or 80. This schedule reaches {plan.start.ratio:.3g}, and {plan.nfe - there} calls are left for "
        "all of the image.",
        "--grid trailing (even in time), or more steps",
    )


@check("last level")
def last_level(subject: Subject, plan: Plan) -> Iterator[Finding]:
    """Noise that the last step leaves in the image."""
    if subject.is_run:
        raise UnsupportedCheck("the check of the trace's levels reports it")
    if plan.end.ratio <= 0.0:
        return
    clear = plan.end.ratio > _NOISY_END
    yield Finding(
        "noisy-end",
        "warning" if clear else "note",
        "the run ends above sigma 0",
        (("sigma / alpha at the end", plan.end.ratio), ("time of the last call", plan.rows[-1].time)),
        f"The last step goes to the schedule's lowest level, so noise of {plan.end.ratio:.3g} of the image's spread "
        "stays in it" + (", and is visible." if clear else "; that is little, and what the published configs do."),
        _end_fix(subject),
    )


@check("repeated times")
def repeated_times(subject: Subject, plan: Plan) -> Iterator[Finding]:
    """Levels that differ and times that do not."""
    first: dict[float, float] = {}  # the level at which a time is passed for the first time
    count = 0
    for row in plan.rows:
        known = first.setdefault(row.time, row.level.ratio)
        count += abs(known - row.level.ratio) > _IDENTITY * known
    if count >= _OFTEN * plan.nfe:
        yield Finding(
            "same-time-told",
            "note",
            f"{count} of {plan.nfe} calls pass the network a time that an earlier call has passed",
            (("calls", plan.nfe), ("repeated", count)),
            "diffusers rounds times to whole numbers, and the grid is denser than they are.",
            "Use fewer steps, or --sampler NAME, which passes fractional times.",
        )


@check("steps offset")
def offset(subject: Subject, reading: SchedulerSettings) -> Iterator[Finding]:
    """An offset that nothing reads, or that moves all times."""
    amount, spacing = reading.values.get("steps_offset"), reading.values.get("timestep_spacing")
    written = (subject.scheduler or {}).get("steps_offset", amount)  # in the file; a pipeline may have corrected it
    if not amount or not written or spacing is None:
        return
    facts = (("steps_offset", amount), ("timestep_spacing", str(spacing)))
    if spacing != "leading":
        yield Finding(
            "offset-unread",
            "note",
            f"steps_offset has no effect with timestep_spacing {spacing}",
            facts,
            "diffusers adds the offset to the times of leading only.",
            '"steps_offset": 0, or "timestep_spacing": "leading"',
        )
    elif amount not in (0, 1):
        yield Finding(
            "offset-large",
            "warning",
            f"every time is moved up by {amount}",
            (*facts, ("time of the last call", amount)),
            f"With leading the last call is made at time {amount}, and one step goes from there to the clean image; "
            "the published configs say 0 or 1.",
            '"steps_offset": 1',
        )


@check("plan")
def law(subject: Subject, plan_file: Mapping[str, Any]) -> Iterator[Finding]:
    """A plan file whose rows do not keep the marginal law, or that cannot be read."""
    if subject.plan is None:
        yield Finding(
            "plan-broken",
            "error",
            "the plan is inconsistent",
            (("rows", len(plan_file.get("rows") or ())),),
            subject.absent.get("plan", ""),
            "Compile it again: pellucid plan SAMPLER --save plan.json",
        )
