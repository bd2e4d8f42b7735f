"""The tab Doctor: a model, a config, a trace or images in; findings out, with their numbers, cause and fix."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradio as gr

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import parse_object, read_text
from pellucid.core.wording import counted
from pellucid.evidence.doctor import checks as doctor
from pellucid.evidence.doctor.checks import SEVERITIES, Finding, Report, evidence_value, verdict_line
from pellucid.evidence.doctor.subject import OTHER, RunSpec, Subject, SubjectSpec, open_subject
from pellucid.evidence.metrics.images import SUFFIXES
from pellucid.studio import form, html, visitors
from pellucid.studio.form import Shelf, named
from pellucid.studio.html import status
from pellucid.studio.visitors import Job, Sessions
from pellucid.train.image_folder import ImageFolder

_TAB = "doctor"
MODEL, CONFIG, TRACE, IMAGES = "the chosen model", "a config, pasted or uploaded", "a trace", "images"
_KINDS = (MODEL, CONFIG, TRACE, IMAGES)
_MOST_IMAGES = 64
MOST_WORDS = 2**20  # characters of a pasted config
_NO_DATA, _SCENES = "none", "scenes"
COLOURS = {"error": "#c62828", "warning": "#b26a00", "note": "#1f6fd6"}
_EMPTY = html.block('<p class="note">Findings appear here, the most severe first.</p>')


# --- what is computed --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DoctorForm:
    """The values of the controls, in their order: one of four kinds of subject, and how to run it."""

    kind: str = MODEL
    model: str | None = None
    weights: bool = False  # load and run them; known images need them too
    pasted: str | None = ""
    config: str | None = None  # a file
    trace: str | None = None
    images: Sequence[str] | None = ()
    data: str | None = _NO_DATA
    steps: Any = None
    sampler: str = form.OWN
    grid: str = form.OWN
    device: str | None = None

    def asked(self) -> RunSpec:
        if self.kind not in (MODEL, CONFIG):
            return RunSpec(device=self.device)
        steps = None if self.steps in (None, "") else form.steps_of(self.steps)
        sampler, grid = (None if one == form.OWN else one for one in (self.sampler, self.grid))
        return RunSpec(steps=steps, sampler=sampler, grid=grid, device=self.device)

    def given(self, folder: Path) -> SubjectSpec:
        """What the doctor examines; files that are written for it go into the folder."""
        data = (self.data or "").strip()
        data = None if data in ("", _NO_DATA) else _known(data)
        if self.kind == MODEL:
            return SubjectSpec(named(self.model), quick=not self.weights and data is None, data=data)
        if self.kind == CONFIG:
            return SubjectSpec(str(_config_in(folder, self.pasted, self.config)))
        if self.kind == TRACE:
            return SubjectSpec(trace=_some(self.trace, "trace", "a file"))
        if self.kind == IMAGES:
            return SubjectSpec(images=str(_images_in(folder, self.images or ())), data=data)
        raise PellucidError(rule("what to look at", "one of " + ", ".join(_KINDS), self.kind), "doctor-kind")

    @property
    def name(self) -> str:
        """How the page calls it; a model's and a file's own name."""
        sent = {CONFIG: None if (self.pasted or "").strip() else self.config, TRACE: self.trace}.get(self.kind)
        if self.kind == MODEL:
            return str(self.model)
        if self.kind == IMAGES:
            return counted(len(self.images or ()), "image")
        return Path(sent).name if sent else "the pasted config"


def _known(data: str) -> str:
    """The name of known images. The error does not reveal whether another path exists."""
    try:
        if data != _SCENES:
            ImageFolder(Path(data).expanduser(), 1)
    except (PellucidError, OSError, ValueError, RuntimeError):  # ValueError: a null in it; RuntimeError: no such home
        raise PellucidError(rule("data", f"{_SCENES} or a folder of images", data), "data") from None
    return data


def _some(given: str | None, what: str, must: str) -> str:
    if not given:
        raise PellucidError(rule(what, must, "none"), "doctor-nothing")
    return given


def _config_in(folder: Path, pasted: str, sent: str | None) -> Path:
    """A scheduler's config or a plan as a file of its own; pasted text takes precedence over an uploaded file."""
    text = (pasted or "").strip()
    if not text:
        path = Path(_some(sent, "config", "pasted, or uploaded as a .json file"))
        text = read_text(path, "config", 64 * MOST_WORDS, "file-size")
    elif len(text) > MOST_WORDS:
        raise PellucidError(rule("config", f"at most {MOST_WORDS:,} characters", f"{len(text):,}"), "file-size")
    parse_object(text, "config", "config-json", foreign=True)
    place = folder / "doctor" / "config.json"
    place.parent.mkdir(exist_ok=True)
    place.write_text(text, "utf-8")
    return place


def _images_in(folder: Path, sent: Sequence[str]) -> Path:
    """A folder of the images that were sent, none of them too large."""
    if not 1 <= len(sent) <= _MOST_IMAGES:
        raise PellucidError(rule("images", f"from 1 to {_MOST_IMAGES}", len(sent)), "doctor-pictures")
    place = folder / "doctor" / "pictures"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for number, path in enumerate(map(Path, sent)):
        if path.suffix.lower() not in SUFFIXES:
            raise PellucidError(rule("image", "a file that ends in " + ", ".join(SUFFIXES), path.name), "file-type")
        form.upload(path, path.name)
        shutil.copyfile(path, place / f"{number:03d}{path.suffix.lower()}")
    return place


def examined(patient: DoctorForm, folder: Path, job: Job) -> Report:
    """All possible checks, one after the other; each is named while it runs."""
    job.tell(("opening …", 0.0))
    subject = open_subject(patient.given(folder), patient.asked())
    stoppable(subject, job)
    found = doctor.every()
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        job.check()
        upcoming = f": {found[done].name} …" if done < len(found) else ""
        job.tell((f"{done} of {len(found)} checks{upcoming}", done / len(found)))

    return replace(doctor.examine(subject, found, tick), subject=patient.name)


def stoppable(subject: Subject, job: Job) -> None:
    """A long check ends inside the subject's own networks when the job is cancelled."""
    networks = [] if subject.pipeline is None else [subject.pipeline.components.network]
    for network in [*networks, *([] if subject.vae is None else [subject.vae])]:
        network.register_forward_pre_hook(lambda *_: job.check())


# --- what is shown -----------------------------------------------------------------------------------------------


def cards(report: Report) -> str:
    """Whether it is healthy, in plain words; then the findings, the most severe first."""
    found = sorted(report.findings, key=lambda finding: -SEVERITIES.index(finding.severity))
    inside = "".join(map(_card, found))
    if not report.faulty:
        rest = "nothing wrong" if not found else "nothing wrong; the notes below are worth knowing"
        colour = COLOURS["warning"] if report.unchecked else "#188a3b"
        state = html.text(report.verdict[0].upper() + report.verdict[1:])
        inside = _boxed(colour, f"<p><b>{state}.</b> {len(report.checked)} checks found {rest}.</p>") + inside
    head = f'<p style="overflow-wrap: anywhere"><b>{html.text(report.subject)}</b></p>'  # of what, when others follow
    return html.block(f'{head}<div style="display: grid; gap: 12px; margin: 12px 0">{inside}</div>{_skipped(report)}')


def _card(finding: Finding) -> str:
    """The finding, its numbers, why, and what to do."""
    colour = COLOURS[finding.severity]
    head = (
        f'<span style="color: {colour}; font-weight: 700">{finding.severity}</span> '
        f'<b>{html.text(finding.title)}</b> <code style="opacity: .7">{html.text(finding.code)}</code>'
    )
    numbers = " · ".join(f"{name} = {evidence_value(item)}" for name, item in finding.evidence)
    said = (("Evidence", numbers), ("Cause", finding.cause), ("Fix", finding.fix))
    lines = (f"<p><b>{name}:</b> {html.text(text)}</p>" for name, text in said if text)
    return _boxed(colour, f"<p>{head}</p>{''.join(lines)}", f"finding-{finding.severity}")


def _boxed(colour: str, inside: str, kind: str = "") -> str:
    look = (
        f"border-left: 4px solid {colour}; padding: 8px 16px; overflow-wrap: anywhere; "
        "background: var(--background-fill-primary); border-radius: 4px"
    )
    return f'<article class="{kind}" style="{look}">{inside}</article>'


def _skipped(report: Report) -> str:
    """What was not checked, by the reason; checks that are for other subjects are only counted."""
    reasons: dict[str, list[str]] = {}
    for name, why in report.skipped:
        reasons.setdefault("" if why.startswith(OTHER) else why, []).append(name)
    others = len(reasons.pop("", ()))
    lines = [f"not checked: {', '.join(names)} ({why})" for why, names in reasons.items()]
    lines += [f"{others} more checks are for other subjects"] if others else []
    inside = "".join(f'<p class="note" style="overflow-wrap: anywhere">{html.text(line)}</p>' for line in lines)
    head = f"checked: {len(report.checked)}, not checked: {len(report.skipped)}"
    return f"<details><summary>{head}</summary>{inside}</details>"


# --- the tab -----------------------------------------------------------------------------------------------------


class DoctorTab:
    """Builds the tab: the subject on the left, the findings on the right."""

    def __init__(self, shelf: Shelf, sessions: Sessions, model: gr.Dropdown, ran: gr.State) -> None:
        self.shelf, self.sessions = shelf, sessions
        with gr.Row():
            with gr.Column(scale=4, min_width=320):
                kind = gr.Radio(list(_KINDS), value=MODEL, label="Look at", elem_id="doctor-kind")
                asked = self.controls(kind)
            with gr.Column(scale=7, min_width=320):
                with gr.Row():
                    go = gr.Button("Examine", variant="primary", min_width=120, elem_id="doctor-go")
                    stop = gr.Button("Cancel", variant="stop", min_width=120, elem_id="doctor-cancel")
                said = gr.HTML(status("ready"), elem_id="doctor-status")
                shown = gr.HTML(_EMPTY, elem_id="doctor-findings")
        go.click(self.examine, [kind, model, *asked], [said, shown], show_progress="hidden", concurrency_limit=4)
        stop.click(self.cancel, None, said, queue=False)

    def controls(self, kind: gr.Radio) -> list[Any]:
        """The controls of all four kinds; only those of the chosen one are visible."""
        with gr.Column(visible=True) as of_model:
            weights = gr.Checkbox(
                True,
                label="Load and run the weights",
                info="slower: tests which target and schedule the network was trained for, and checks its weights",
                elem_id="doctor-weights",
            )
        with gr.Column(visible=False) as of_config:
            pasted = gr.Textbox(
                label="Config",
                lines=8,
                max_lines=16,
                info="a scheduler_config.json or a plan",
                placeholder='{"_class_name": "DDIMScheduler", …}',
                elem_id="doctor-config",
            )
            config = gr.File(label="or a .json file", file_types=[".json"], height=120, elem_id="doctor-config-file")
        with gr.Column(visible=True) as of_run:
            steps = gr.Number(30, label="Steps of the run", precision=None, elem_id="doctor-steps")
            with gr.Row():
                sampler = gr.Dropdown(form.sampler_choices(), value=form.OWN, label="Sampler", min_width=130)
                grid = gr.Dropdown(form.grid_choices(), value=form.OWN, label="Grid", min_width=130)
        with gr.Column(visible=False) as of_trace:
            trace = gr.File(label="Trace", file_types=[".safetensors"], height=120, elem_id="doctor-trace")
        with gr.Column(visible=False) as of_images:
            images = gr.File(
                label=f"Images, {_MOST_IMAGES} at most",
                file_count="multiple",
                file_types=list(SUFFIXES),
                height=220,
                elem_id="doctor-images",
            )
        with gr.Column(visible=True) as of_data:
            data = gr.Dropdown(
                [_NO_DATA, _SCENES],
                value=_NO_DATA,
                label="Known images to measure with",
                info="scenes, or a folder of images; a model's weights are then run, which is slow",
                allow_custom_value=True,
                elem_id="doctor-data",
            )
        seen = {
            of_model: (MODEL,),
            of_config: (CONFIG,),
            of_run: (MODEL, CONFIG),
            of_trace: (TRACE,),
            of_images: (IMAGES,),
            of_data: (MODEL, IMAGES),
        }

        def choose(chosen: str) -> list[Any]:
            return [gr.Column(visible=chosen in kinds) for kinds in seen.values()]

        kind.change(choose, kind, list(seen), show_progress="hidden")
        return [weights, pasted, config, trace, images, data, steps, sampler, grid]

    @html.settled()
    def examine(self, request: gr.Request, kind: str, model: str, *asked: Any) -> Iterator[tuple[Any, Any]]:
        session = self.sessions.of(request.session_hash)
        patient = DoctorForm(kind, model, *asked, device=self.shelf.device)
        yield status("opening …"), gr.skip()
        work = session.begin(_TAB, lambda job: examined(patient, session.folder, job))
        for news in visitors.follow(work):
            yield status(*news), gr.skip()
        yield status(verdict_line(work.result), 1.0), cards(work.result)

    def cancel(self, request: gr.Request) -> Any:
        return status("cancelled") if self.sessions.of(request.session_hash).cancel(_TAB) else gr.skip()
