"""The tab Labs: read a lab, run it block by block, and check an answer to it."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from pellucid.core.errors import Cancelled, PellucidError, rule
from pellucid.labs import answers, catalog, process, script
from pellucid.labs.answers import Outcome
from pellucid.labs.catalog import LABS, Lab
from pellucid.labs.process import BlockResult
from pellucid.labs.script import Block
from pellucid.studio import html, visitors
from pellucid.studio.form import Shelf
from pellucid.studio.html import status
from pellucid.studio.visitors import Job, Session, Sessions

_TAB, _CHECKING = "labs", "labs-check"
_MATHS: list[dict[str, str | bool]] = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "$", "right": "$", "display": False},
]
_COLOURS = {"passed": "#188a3b", "wrong": "#c62828", "error": "#c62828", "not written yet": "#b26a00"}
_OFF = "Checks run code, so they only run on the studio's own machine: pellucid lab 03 --check FILE."
_NOTHING = html.block('<p class="note">The results of the checks appear here.</p>')


# --- what is computed --------------------------------------------------------------------------------------------


def ran(lab: Lab, smoke: bool, folder: Path, job: Job) -> list[BlockResult]:
    """Runs the blocks of a lab; reports all that are done each time one more is."""
    done: list[BlockResult] = []
    for shown in process.run_page(lab.page, smoke, job.cancelled, within=folder):
        done.append(shown)
        job.tell(tuple(done))
    return done


def checked(lab: Lab, answer: str, folder: Path, job: Job) -> list[Outcome]:
    """The answer as a file, checked in a process of its own."""
    if len(answer) > answers.MOST_BYTES:
        raise PellucidError(rule("answer", "at most 1 MiB", f"{len(answer):,} characters"), "answer-size")
    place = folder / "labs"
    place.mkdir(exist_ok=True)
    path = place / f"answer_{lab.code}.py"
    path.write_text(answer, "utf-8", errors="replace")
    return answers.check(lab, path, cancelled=job.cancelled, within=folder)


def read_answer(path: str) -> str:
    """The text of an uploaded file."""
    answers.refuse(Path(path))
    return Path(path).read_text("utf-8", errors="replace")


# --- what is shown -----------------------------------------------------------------------------------------------


def page_of(blocks: Sequence[Block], done: Sequence[BlockResult] = ()) -> str:
    """The lab as Markdown: its text and code, and the output below each block that has run."""
    parts = []
    for number, block in enumerate(blocks):
        parts.append(script.markdown(block.text))
        if block.code:
            parts.append(fenced(block.code, "python"))
        if number < len(done):
            parts.append(_output_of(done[number]))
    return "\n\n".join(part for part in parts if part)


def _output_of(shown: BlockResult) -> str:
    """What a block printed and drew, or why it failed."""
    parts = [fenced(shown.printed.rstrip("\n"), "text")] if shown.printed.strip() else []
    for i, file in enumerate(shown.figures, 1):
        alt = f"figure {i} of block {shown.number}"
        parts.append(f"![{alt}](data:image/png;base64,{base64.b64encode(file).decode()})")
    if shown.error is not None:
        parts.append(fenced(f"failed: {shown.error}", "text"))
    return "\n\n".join(parts)


def fenced(code: str, language: str) -> str:
    """Code that may hold fences itself."""
    fence = "```"
    while fence in code:
        fence += "`"
    return f"{fence}{language}\n{code}\n{fence}"


def outcomes(found: Sequence[Outcome]) -> str:
    """A card per check: what it asks, how it went, and the hint."""
    cards = []
    for one in found:
        head = f'<b style="color: {_COLOURS[one.verdict]}">{one.verdict}</b> {html.text(one.name)}'
        lines = [html.text(one.sentence)] if one.sentence else []
        if one.printed.strip():
            lines.append(f'<pre style="white-space: pre-wrap">{html.text(one.printed.strip())}</pre>')
        look = f"border-left: 4px solid {_COLOURS[one.verdict]}; padding: 4px 12px; overflow-wrap: anywhere"
        kind = one.verdict.replace(" ", "-")
        inside = "".join(f"<div>{line}</div>" for line in [head, *lines])
        cards.append(f'<article class="outcome-{kind}" style="{look}">{inside}</article>')
    return html.block(f'<div style="display: grid; gap: 8px">{"".join(cards)}</div>')


def summary(found: Sequence[Outcome]) -> str:
    passed = sum(one.verdict == "passed" for one in found)
    return f"{passed} of {len(found)} checks passed"


# --- the tab -----------------------------------------------------------------------------------------------------


class LabsTab:
    """Builds the tab: what to do on the left, the lab itself on the right."""

    def __init__(
        self,
        shelf: Shelf,
        sessions: Sessions,
        model: gr.Dropdown,
        ran: gr.State,
        chosen: Lab = LABS[0],
        checks: bool = True,
    ) -> None:
        self.sessions, self.checks = sessions, checks
        current, answers = gr.State(chosen.stem), gr.State({})  # answers to the labs that are not shown now
        with gr.Row():
            with gr.Column(scale=4, min_width=320):
                choice = gr.Dropdown(
                    [(f"{lab.code} {lab.title}", lab.stem) for lab in LABS],
                    value=chosen.stem,
                    label="Lab",
                    info="each answers one question by running code",
                    elem_id="labs-choice",
                )
                smoke = gr.Checkbox(False, label="Small size: takes seconds, makes fewer images", elem_id="labs-smoke")
                with gr.Row():
                    go = gr.Button("Run", variant="primary", min_width=120, elem_id="labs-run")
                    stop = gr.Button("Cancel", variant="stop", min_width=120, elem_id="labs-cancel")
                said = gr.HTML(status("ready"), elem_id="labs-status")
                answer = gr.Code(
                    chosen.starter.read_text("utf-8"),
                    language="python",
                    label="Your answer: fill in the gaps",
                    lines=10,
                    max_lines=24,
                    interactive=True,
                    elem_id="labs-answer",
                )
                with gr.Row():
                    starter = gr.DownloadButton(
                        "Download the starter", value=str(chosen.starter), min_width=120, elem_id="labs-starter"
                    )
                    sent = gr.UploadButton("Upload a file", file_types=[".py"], min_width=120, elem_id="labs-upload")
                look = gr.Button("Check", variant="primary", interactive=checks, elem_id="labs-check")
                told = gr.HTML(status("nothing checked yet" if checks else _OFF), elem_id="labs-check-status")
                results = gr.HTML(_NOTHING, elem_id="labs-results")
            with gr.Column(scale=7, min_width=320):
                page = gr.Markdown(page_of(script.read(chosen.page)), latex_delimiters=_MATHS, elem_id="labs-page")
        quiet: dict[str, Any] = {"show_progress": "hidden"}
        choice.change(
            self.choose,
            [choice, current, answer, answers],
            [page, answer, starter, said, told, results, current, answers],
            **quiet,
        )
        go.click(self.run, [choice, smoke], [said, page], concurrency_limit=4, **quiet)
        stop.click(self.cancel, None, said, queue=False)
        sent.upload(self.receive, sent, answer, **quiet)
        look.click(self.check, [choice, answer], [told, results], concurrency_limit=4, **quiet)

    def choose(self, name: str, current: str, answer: str | None, answers: dict[str, str], request: gr.Request) -> Any:
        """Another lab; the answer to the previous one is kept until that lab is chosen again."""
        with html.plainly():
            lab = catalog.find(name)
            session = self.sessions.of(request.session_hash)
            session.cancel(_TAB)
            session.cancel(_CHECKING)
            if name == current:
                return (gr.skip(),) * 8
            kept = {**answers, current: answer or ""}
            file = _starter_in(session, lab)
            written = kept.get(lab.stem) or lab.starter.read_text("utf-8")
            shown = page_of(script.read(lab.page))
            ready = (status("ready"), status("nothing checked yet" if self.checks else _OFF), _NOTHING)
            return shown, written, gr.DownloadButton(value=str(file)), *ready, lab.stem, kept

    @html.settled()
    def run(self, name: str, smoke: bool, request: gr.Request) -> Iterator[tuple[Any, Any]]:
        lab = catalog.find(name)
        blocks = script.read(lab.page)
        session = self.sessions.of(request.session_hash)
        yield _progress(0, len(blocks)), page_of(blocks)
        work = session.begin(_TAB, lambda job: ran(lab, smoke, session.folder, job))
        for done in visitors.follow(work):
            yield _progress(len(done), len(blocks)), page_of(blocks, done)
        yield ended(work.result), gr.skip()

    def cancel(self, request: gr.Request) -> Any:
        there = self.sessions.of(request.session_hash).cancel(_TAB)
        return status("cancelled") if there else gr.skip()

    def receive(self, path: str | None) -> Any:
        with html.plainly():
            return read_answer(path) if path else gr.skip()

    def check(self, name: str, answer: str | None, request: gr.Request) -> Iterator[tuple[Any, Any]]:
        try:
            with html.plainly():
                if not self.checks:
                    raise PellucidError(_OFF, "lab-check-off")
                lab = catalog.find(name)
                session = self.sessions.of(request.session_hash)
                yield status("checking …"), gr.skip()
                work = session.begin(_CHECKING, lambda job: checked(lab, answer or "", session.folder, job))
                for _ in visitors.follow(work):
                    pass
                yield status(summary(work.result), 1.0), outcomes(work.result)
        except Cancelled:
            yield gr.skip(), gr.skip()
        except gr.Error:
            yield status("nothing was checked"), _NOTHING
            raise


def _starter_in(session: Session, lab: Lab) -> Path:
    """A copy that Gradio may hand out."""
    place = session.folder / "labs"
    place.mkdir(exist_ok=True)
    return Path(shutil.copyfile(lab.starter, place / lab.starter.name))


def _progress(done: int, count: int) -> str:
    return status(f"block {min(done + 1, count)} of {count} …", done / count)


def ended(done: Sequence[BlockResult]) -> str:
    took = html.seconds(sum(shown.seconds for shown in done))
    if done and done[-1].error is not None:
        return status(f"block {done[-1].number} of {done[-1].count} failed: {done[-1].error}")
    return status(f"done in {took}", 1.0)
