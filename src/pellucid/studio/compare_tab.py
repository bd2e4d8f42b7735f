"""The tab Compare: two set-ups of one seed side by side, where they part and why; and X/Y sheets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr

from pellucid.core.errors import Cancelled
from pellucid.studio import asking, compare_view, comparing, sheets, words
from pellucid.studio.asking import Setup
from pellucid.studio.comparing import SIDES, Compared, Pair
from pellucid.studio.generate import READY, guard
from pellucid.studio.html import status
from pellucid.studio.running import Finished, Moment, Preview
from pellucid.studio.session import Session, Sessions
from pellucid.studio.sheets import Filling
from pellucid.studio.shelf import Shelf

TAB, SHEET = "compare", "sheet"
PROMPT = "a large red star on a white background"
FIRST = (Setup(sampler="ddim", grid="trailing", steps=12), Setup(sampler="dpmpp_2m", grid="trailing", steps=12))
AXES = "steps=5,10,20 x guidance=1,4,7"
HELD = 5  # controls of a side


class CompareTab:
    """Builds the tab; its handlers know the models and who is at the page."""

    def __init__(self, shelf: Shelf, sessions: Sessions, model: gr.Dropdown, ran: gr.State) -> None:
        self.shelf, self.sessions = shelf, sessions
        with gr.Row():
            prompt = gr.Textbox(PROMPT, label="Prompt", lines=1, max_lines=4, scale=5, elem_id="compare-prompt")
            seed = gr.Textbox("7", label="Seed of both", placeholder="random", min_width=120, elem_id="compare-seed")
        with gr.Row():
            sides = [self.side(name, first) for name, first in zip(SIDES, FIRST, strict=True)]
        asked = [model, prompt, seed, *sides[0], *sides[1]]
        with gr.Tab("Side by side"):
            self.both(asked, ran)
        with gr.Tab("X/Y sheet"):
            self.sheets(asked)

    def side(self, name: str, first: Setup) -> list[Any]:
        mark = f"compare-{name.lower()}"
        with gr.Column(min_width=300, elem_id=mark):
            gr.Markdown(f"### Set-up {name}")
            with gr.Row():
                sampler = choice(asking.sampler_choices(), first.sampler, f"Sampler of {name}", f"{mark}-sampler")
                grid = choice(asking.grid_choices(), first.grid, f"Grid of {name}", f"{mark}-grid")
            with gr.Row():
                steps = gr.Number(first.steps, label=f"Steps of {name}", min_width=100, elem_id=f"{mark}-steps")
                about = {"label": f"Guidance of {name}", "min_width": 180, "elem_id": f"{mark}-guidance"}
                scale = gr.Slider(0, asking.MOST_SCALE, first.guidance, step=0.1, **about)
            guarded = gr.Checkbox(False, label=f"{name} guarded", info=words.GUARDED, elem_id=f"{mark}-guarded")
            guarded.change(guard, [guarded, scale], scale, show_progress="hidden")
        return [sampler, grid, steps, scale, guarded]

    def both(self, asked: list[Any], ran: gr.State) -> None:
        with gr.Row():
            go = gr.Button("Run both", variant="primary", elem_id="compare-run")
            stop = gr.Button("Cancel", variant="stop", elem_id="compare-cancel")
        said = gr.HTML(READY, elem_id="compare-status")
        shown = gr.HTML(compare_view.NOTHING, elem_id="compare-pictures")
        with gr.Row():
            files = [
                gr.DownloadButton(
                    f"Download {name} with recipe", interactive=False, elem_id=f"compare-download-{name.lower()}"
                )
                for name in SIDES
            ]
        verdict = gr.HTML(compare_view.EMPTY_FILM, elem_id="compare-verdict")
        film = gr.HTML("", elem_id="compare-film")
        apart = gr.HTML("", elem_id="compare-distance")
        plans = gr.HTML("", elem_id="compare-plans")
        outputs = [shown, said, *files, verdict, film, apart, plans, ran]
        go.click(self.compare, asked, outputs, show_progress="hidden", concurrency_limit=4)
        stop.click(self.cancel, None, [said], queue=False)

    def sheets(self, asked: list[Any]) -> None:
        names = ", ".join(sheets.NAMES)
        axes = gr.Textbox(
            AXES,
            label="What varies, to the right x down",
            info=f"around set-up A: {names}, or a number of its sampler; at most {sheets.MOST_CELLS} cells",
            elem_id="sheet-axes",
        )
        with gr.Row():
            go = gr.Button("Draw the sheet", variant="primary", elem_id="sheet-run")
            stop = gr.Button("Cancel", variant="stop", elem_id="sheet-cancel")
        said = gr.HTML(READY, elem_id="sheet-status")
        shown = gr.HTML(compare_view.sheet(None), elem_id="sheet-picture")
        file = gr.DownloadButton("Download with recipe", interactive=False, elem_id="sheet-download")
        for event in (go.click, axes.submit):
            event(self.draw, [*asked, axes], [shown, said, file], show_progress="hidden", concurrency_limit=4)
        stop.click(self.cancel_sheet, None, [said], queue=False)

    # --- what happens -------------------------------------------------------------------------------------------

    def compare(self, request: gr.Request, model: str, *given: Any) -> Iterator[tuple[Any, ...]]:
        session = self.sessions.of(request.session_hash)
        rest = (gr.skip(),) * 7

        def say(said: str, part: float = 0.0, shown: Any = None) -> tuple[Any, ...]:
            return shown or gr.skip(), status(said, part), *rest

        try:
            with words.plainly():
                setups = setups_of(*given)
                if model not in self.shelf.held:
                    yield say(f"loading {model} …")
                pipe = self.shelf.pipe(model)
                preview = Preview(pipe)
                yield say("starting …")
                for news in comparing.follow(pipe, setups, session, TAB):
                    if isinstance(news, Pair):
                        yield say(news.words, news.part, so_far(news, preview))
                    else:
                        yield finished(news, setups[0].prompt, session)
        except Cancelled:
            yield say("cancelled")
        except gr.Error:
            yield say("ready")
            raise

    def draw(self, request: gr.Request, model: str, *given: Any) -> Iterator[tuple[Any, ...]]:
        session = self.sessions.of(request.session_hash)
        try:
            with words.plainly():
                *held, axes = given
                sheet = sheets.asked(axes, setups_of(*held)[0])
                if model not in self.shelf.held:
                    yield gr.skip(), status(f"loading {model} …"), gr.skip()
                pipe = self.shelf.pipe(model)
                yield gr.skip(), status("starting …"), gr.DownloadButton(interactive=False)
                drawn = -1
                for news in sheets.follow(pipe, sheet, session, SHEET):
                    if isinstance(news, Filling):
                        fresh, drawn = len(news.images) != drawn, len(news.images)
                        image = compare_view.sheet(news.draw(), "the sheet so far") if fresh else gr.skip()
                        yield image, status(news.words, news.calls / news.of), gr.skip()
                        continue
                    done = status(" · ".join([f"done in {words.seconds(news.seconds)}", *news.notes]), 1.0)
                    file = gr.DownloadButton(value=str(news.file), interactive=True)
                    yield compare_view.sheet(news.image, f"a sheet of {sheet.text}"), done, file
        except Cancelled:
            yield gr.skip(), status("cancelled"), gr.skip()
        except gr.Error:
            yield gr.skip(), status("ready"), gr.skip()
            raise

    def cancel(self, request: gr.Request) -> str:
        self.sessions.of(request.session_hash).cancel(TAB)
        return status("cancelled")

    def cancel_sheet(self, request: gr.Request) -> str:
        self.sessions.of(request.session_hash).cancel(SHEET)
        return status("cancelled")


def choice(names: Sequence[str], value: str, label: str, mark: str) -> gr.Dropdown:
    return gr.Dropdown(names, value=value, label=label, min_width=130, elem_id=mark)


def setups_of(prompt: str, seed: Any, *given: Any) -> tuple[Setup, Setup]:
    """The two set-ups that the controls hold, in their order; an empty seed is one random seed for both."""
    whole = asking.seed_of(seed)
    held = (given[:HELD], given[HELD:])
    a, b = (
        Setup(prompt=prompt, sampler=sampler, grid=grid, steps=steps, guidance=scale, guarded=guarded, seed=whole)
        for sampler, grid, steps, scale, guarded in held
    )
    return a, b


def so_far(news: Pair, preview: Preview) -> str:
    """Both sides while they run: x0 of the latest step, or the image where it is done."""
    shown = [preview.image(one.x0) if isinstance(one, Moment) else one and one.image for one in news]
    said = [about(one) if isinstance(one, Finished) else "x0 as the network sees it now" if one else "" for one in news]
    return compare_view.pair(shown, said)


def about(made: Finished) -> str:
    recipe = made.recipe
    grid = recipe.grid.get("name", "")
    return f"{recipe.sampler}, {grid}, {recipe.steps} steps · seed {recipe.seed} · {words.seconds(made.seconds)}"


def finished(done: Compared, prompt: str, session: Session) -> tuple[Any, ...]:
    """All that is shown of two runs. Their traces are kept, so that the tab Trace can open them."""
    names = [f"{session.count:04d} · {side} · {prompt[:56]}" for side in SIDES]
    for name, made in zip(names, done.made, strict=True):
        session.keep(name, made.trace)
    notes = dict.fromkeys(note for made in done.made for note in made.notes)
    spent = words.seconds(sum(made.seconds for made in done.made))
    return (
        compare_view.pair([made.image for made in done.made], [about(made) for made in done.made]),
        status(" · ".join([f"done in {spent}", *notes]), 1.0),
        *(gr.DownloadButton(value=str(made.file), interactive=True) for made in done.made),
        compare_view.verdict(done),
        compare_view.film(done.film),
        compare_view.distances(done.found),
        compare_view.plans(done.plans, done.theirs),
        names[1],
    )
