"""Checks of the plan that would run: what it wastes, where it misses its levels, where it starts and ends."""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.core import schedule as schedules
from pellucid.core.dialect_diffusers import PREVIOUS, ZERO_SNR_RATIO
from pellucid.core.errors import PellucidError
from pellucid.core.plan import Plan, kept
from pellucid.core.schedule import Tabled
from pellucid.evidence.doctor import subject as subjects
from pellucid.evidence.doctor.checks import Finding, Unable, check
from pellucid.evidence.doctor.subject import Subject
from pellucid.interop.diffusers_config import Reading
from pellucid.interop.weights import some

EXPLAINED = ("target-schedule", "alpha-zero")  # plans that fail for what the config checks say
OFF = 1e-6  # a gap that rounding does not explain
SEEN_OFF = 0.01  # a gap that matters, as a part of x
LATE_START = 0.25  # alpha of the first call beyond that of the noisiest level: a run starts without it
SLIGHTLY_LATE = 0.05
NOISY_END = 0.05  # sigma / alpha that stays in the image; the published schedules leave 0.03 at most
FAR_CALL = 0.03  # sigma / alpha of a last call; 0.04 is a tenth of a model's KID in docs/results/schedules.md
VERY_FAR = 0.2
SIZES = (1.0, 0.5, 0.25)  # standard deviations of what pixels and latents are made of
EXAGGERATED = 1.2  # how much larger it may come out
PIXELS = ("DDPMPipeline", "DDIMPipeline", "PNDMPipeline")  # diffusers' pipelines without an autoencoder
ENOUGH = 20  # calls; with fewer every grid ends with a leap
OFTEN = 0.1  # share of the calls
NOTHING = 0.01  # alpha below which x holds nothing of an image
WASTED = 0.2  # share of the calls there, the first aside: a grid has to begin somewhere


@check("steps", needs=("reading",))
def steps(subject: Subject) -> Iterator[Finding]:
    """More steps than there are times, and other plans that cannot be made."""
    reading, wanted = subject.reading, subjects.steps_of(subject.asked)
    assert reading is not None
    most = most_steps(reading)
    if subject.asked.own and most is not None and wanted > most:
        yield Finding(
            "steps-beyond",
            "error",
            f"{wanted} steps are more than the schedule has times",
            (("steps", wanted), ("times", most)),
            f"The scheduler spreads the steps over {most} whole times, so {wanted - most} steps and more would repeat "
            "a level, and diffusers refuses or does nothing in them.",
            f"--steps {most} at most; with --sampler NAME times are fractional and any number works",
        )
    elif subject.plan is None:
        try:
            subjects.make_plan(reading, subject.asked)
        except PellucidError as error:
            if error.code not in EXPLAINED:
                yield no_plan(wanted, error)


def no_plan(wanted: int, error: PellucidError) -> Finding:
    return Finding(
        "no-plan",
        "error",
        f"no plan of {wanted} steps can be made",
        (("steps", wanted), ("error", error.code)),
        str(error),
        "Change the steps, the grid or the key that the cause names.",
    )


def most_steps(reading: Reading) -> int | None:
    """The number of different times that the scheduler has for its steps."""
    if not isinstance(reading.schedule, Tabled):
        return None
    if reading.sampler in ("lcm", "tcd"):
        return min(reading.grid.original, reading.schedule.num_train)
    return reading.schedule.num_train


@check("strength and steps", needs=("reading",))
def strength(subject: Subject) -> Iterator[Finding]:
    """Too little strength for a single step."""
    asked, reading = subject.asked, subject.reading
    assert reading is not None
    if asked.strength is None:
        raise Unable("no strength: give --strength S")
    count = subjects.steps_of(asked)
    if asked.whole_steps and int(count * asked.strength) < 1:
        yield Finding(
            "strength-below-a-step",
            "error",
            "strength × steps is less than one step",
            (("strength", asked.strength), ("steps", count), ("strength × steps", asked.strength * count)),
            "diffusers keeps int(strength × steps) of the steps, which is 0: the image would come back as it is, "
            "or the run would fail.",
            f"--steps {int(1 / asked.strength) + 1} or more; or --sampler {reading.sampler}, which starts at any level",
        )


@check("repeated last sigma", needs=("plan",))
def repeated(subject: Subject) -> Iterator[Finding]:
    """Calls of the model that change nothing, or only correct the step before."""
    plan = subject.plan
    assert plan is not None
    null, last = subjects.null_rows(plan), len(plan.rows) - 1
    before = plan.rows[last].level.ratio
    if abs(before - plan.end.ratio) <= subjects.IDENTITY * before:
        idle = last in null
        effect = "x stays what it was" if idle else "x is only corrected for the step before"
        yield Finding(
            "repeated-last-sigma",
            "warning" if idle else "note",
            "the last step goes nowhere",
            (("steps", plan.nfe), ("sigma / alpha before", before), ("sigma / alpha after", plan.end.ratio)),
            f"The last sigma of the grid is repeated as the end: the model is called and {effect}, "
            f"with noise of {plan.end.ratio:.3g} in it.",
            end_fix(subject, '"steps_offset": 1 with "timestep_spacing": "leading", or '),
        )
    inner = [row for row in null if row != last]
    if inner:
        yield Finding(
            "null-step",
            "warning",
            f"{len(inner)} steps do nothing",
            (("steps", plan.nfe), ("that do nothing", len(inner)), ("rows", some([str(row) for row in inner], 6))),
            "The grid repeats a level, so the model is called and x stays what it was.",
            "Use fewer steps, or another grid.",
        )


def end_fix(subject: Subject, before: str = "") -> str:
    """How this scheduler ends at a clean image; `before` is what may be done instead of going all the way."""
    known = {} if subject.reading is None else subject.reading.values
    if known.get("final_sigmas_type") == "sigma_min":
        return '"final_sigmas_type": "zero"'
    if known.get("set_alpha_to_one") is False:
        return f'{before}"set_alpha_to_one": true'
    return "Sample with --sampler NAME --grid karras, which ends at sigma 0; this class of diffusers cannot."


@check("last call", needs=("plan", "reading"))
def last_call(subject: Subject) -> Iterator[Finding]:
    """Pixels whose finest detail is made in one leap, from further off than the network was trained to go."""
    plan, reading = subject.plan, subject.reading
    assert plan is not None
    assert reading is not None
    if not in_pixels(subject) or plan.nfe < ENOUGH or plan.end.ratio > 0:
        return
    far, near = plan.rows[-1].level.ratio, float(reading.schedule.ratio_at(reading.schedule.span[0]))
    known = reading.class_name in ("DDIMScheduler", "DDPMScheduler")  # of which `leading` ends there as well
    leading = '; in diffusers "timestep_spacing": "leading"' if known else ""
    if far > FAR_CALL and far > 2 * near:
        yield Finding(
            "far-last-call",
            "warning" if far > VERY_FAR else "note",
            "the finest detail is made in one leap",
            (("calls", plan.nfe), ("sigma / alpha of the last call", far), ("of the first training time", near)),
            f"The last call sees noise of {far * 127.5:.0f} in 255 and goes to the image in one step, which is the "
            "mean of all that it could be: smoother than images are. The network was trained to go nearer.",
            f"--sampler {reading.sampler} --grid beta or linspace, which end at its first time{leading}",
        )


def in_pixels(subject: Subject) -> bool:
    """Whether what is denoised are pixels, and not latents or something that is not known."""
    if subject.pipeline is not None:
        return subject.pipeline.components.vae is None and subject.pipeline.channels == 3
    return subject.index is not None and subject.index.get("_class_name") in PIXELS


@check("size of what comes out", needs=("plan",))
def size(subject: Subject) -> Iterator[Finding]:
    """Plans that make Gaussian data larger than they are, however good the network."""
    plan = subject.plan
    assert plan is not None
    if plan.end.ratio > 0:
        return
    largest, scale = max(zip(kept(plan, SIZES).tolist(), SIZES, strict=True))
    reason = plan.declared or f"{plan.name} steps too far for this grid"
    if largest > EXAGGERATED:
        yield Finding(
            "plan-exaggerates",
            "warning" if largest > 2 * EXAGGERATED and not plan.declared else "note",
            f"the plan makes things {largest:.3g} times as large as they are",
            (("calls", plan.nfe), ("of Gaussian data", scale), ("times as large", largest)),
            f"{reason}: with a perfect network, data of standard deviation {scale:g} come out as "
            f"{largest * scale:.3g}. Images are glaring, or no images.",
            "More steps, or another --grid or --sampler: `pellucid plan` says what each keeps",
        )


@check("previous step", needs=("plan",))
def previous(subject: Subject) -> Iterator[Finding]:
    """Rows that land beside the level of the next call."""
    plan = subject.plan
    assert plan is not None
    found = subjects.misses(plan, OFF)
    if not found:
        return
    worst = max(found, key=lambda miss: miss.gap)
    rows = some([str(miss.row) for miss in found], 6)
    facts: tuple[tuple[str, float | str], ...] = (
        ("rows", rows),
        ("worst row", worst.row),
        ("off by, of x", worst.gap),
        *apart(subject, worst.row),
    )
    if PREVIOUS in plan.declared:
        yield Finding(
            "previous-step",
            "warning" if worst.gap >= SEEN_OFF else "note",
            "steps land beside the level that the next one starts from",
            facts,
            f"diffusers steps to t − {stride(plan)} whatever the next time is; with this timestep_spacing and "
            f"{plan.grid.get('steps')} steps the next time is another, so x is not as noisy as the network is told.",
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


def stride(plan: Plan) -> int:
    return int(plan.schedule.get("num_train", 1000)) // max(int(plan.grid.get("steps", 1)), 1)


def apart(subject: Subject, row: int) -> tuple[tuple[str, float | str], ...]:
    """What the exact plan has in the same place."""
    plan, reading = subject.plan, subject.reading
    if plan is None or reading is None or row >= len(plan.rows):
        return ()
    try:
        other = subjects.exact_plan(reading, subject.asked)
    except PellucidError:
        return ()
    differing = [number for number, (a, b) in enumerate(zip(plan.rows, other.rows, strict=False)) if a.x != b.x]
    times = f"{plan.rows[row].time:.6g}"
    return (("time told there", times), ("rows with other weights than the exact plan", len(differing)))


def of_betas(subject: Subject, why: str) -> tuple[Plan, Tabled]:
    """The plan and its schedule where that is one of betas; else `why` the check cannot be made."""
    plan, reading = subject.plan, subject.reading
    assert plan is not None
    schedule = schedules.from_dict(plan.schedule) if reading is None else reading.schedule
    if not isinstance(schedule, Tabled):
        raise Unable(why)
    return plan, schedule


@check("first level", needs=("plan",))
def first_level(subject: Subject) -> Iterator[Finding]:
    """A run that starts below the noisiest level, from noise that is as large as there."""
    plan, schedule = of_betas(subject, "only schedules of betas have a noisiest time")
    recipe = subject.recipe
    if subject.is_run and (recipe is None or recipe.get("strength") or recipe.get("denoising_start")):
        raise Unable("the run that was recorded starts from an image, or may")
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
            "The network was trained to start from pure noise; a grid that leaves the last time out gives it noise "
            "where it expects a trace of the image, and brightness drifts to the middle.",
            '"timestep_spacing": "trailing"',
        )
    elif alpha - noisiest > SLIGHTLY_LATE:
        yield Finding(
            "late-start",
            "warning" if alpha - noisiest > LATE_START else "note",
            "the first call is far below the noisiest level",
            facts,
            f"At the first time x should hold {alpha:.0%} of the image, and the run starts from noise that holds "
            "none: the image comes out grey or washed.",
            '"timestep_spacing": "trailing", or other steps',
        )


@check("calls in noise", needs=("plan",))
def in_noise(subject: Subject) -> Iterator[Finding]:
    """Calls that see no image, where a schedule reaches far into noise."""
    plan, _ = of_betas(subject, "a schedule without betas goes as far into noise as its sigmas are asked to")
    there = sum(row.level.to("vp").alpha < NOTHING for row in plan.rows)
    if there - 1 <= WASTED * plan.nfe:
        return
    last = plan.rows[there].level if there < len(plan.rows) else plan.end
    yield Finding(
        "calls-in-noise",
        "warning",
        f"{there} of {plan.nfe} calls are made in pure noise",
        (
            ("calls", plan.nfe),
            (f"at alpha below {NOTHING}", there),
            ("sigma / alpha of the first", plan.start.ratio),
            ("of the first with an image", last.ratio),
        ),
        "A grid that is even in powers or logarithms of sigma, such as Karras', is for schedules that end at a sigma "
        f"of about 14 or 80. This one goes on to {plan.start.ratio:.3g}, and {plan.nfe - there} calls are left for all "
        "of the image.",
        "--grid trailing (even in time), or more steps",
    )


@check("last level", needs=("plan",))
def last_level(subject: Subject) -> Iterator[Finding]:
    """Noise that the last step leaves in the image."""
    plan = subject.plan
    assert plan is not None
    if subject.is_run:
        raise Unable("the levels of the trace tell it")
    if plan.end.ratio <= 0.0:
        return
    clear = plan.end.ratio > NOISY_END
    yield Finding(
        "noisy-end",
        "warning" if clear else "note",
        "the run ends above sigma 0",
        (("sigma / alpha at the end", plan.end.ratio), ("time of the last call", plan.rows[-1].time)),
        f"The last step goes to the schedule's least level, so noise of {plan.end.ratio:.3g} of the image's spread "
        "stays in it" + (", which is seen." if clear else "; that is little, and what the published configs do."),
        end_fix(subject),
    )


@check("told times", needs=("plan",))
def told(subject: Subject) -> Iterator[Finding]:
    """Levels that differ and times that do not."""
    plan = subject.plan
    assert plan is not None
    count = subjects.repeated_times(plan)
    if count >= OFTEN * plan.nfe:
        yield Finding(
            "same-time-told",
            "note",
            f"{count} of {plan.nfe} calls tell the network a time that it was told before",
            (("calls", plan.nfe), ("repeated", count)),
            "diffusers rounds times to whole numbers, and the grid is denser than they are.",
            "Use fewer steps, or --sampler NAME, which tells fractional times.",
        )


@check("steps offset", needs=("reading",))
def offset(subject: Subject) -> Iterator[Finding]:
    """An offset that nothing reads, or that moves all times."""
    reading = subject.reading
    assert reading is not None
    amount, spacing = reading.values.get("steps_offset"), reading.values.get("timestep_spacing")
    written = (subject.scheduler or {}).get("steps_offset", amount)  # a pipeline may have set it right: not the file's
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
            f"With leading the last call is made at time {amount}, and the step from there to the clean image is "
            "taken at once; the published configs say 0 or 1.",
            '"steps_offset": 1',
        )


@check("plan", needs=("plan_file",))
def law(subject: Subject) -> Iterator[Finding]:
    """A plan file whose rows do not keep the marginal law, or that cannot be read."""
    if subject.plan is None:
        yield Finding(
            "plan-broken",
            "error",
            "the plan does not hold together",
            (("rows", len((subject.plan_file or {}).get("rows") or ())),),
            subject.absent.get("plan", ""),
            "Compile it again: pellucid plan SAMPLER --save plan.json",
        )
