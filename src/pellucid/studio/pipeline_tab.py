"""The tab Pipeline: a model's parts, what flows between them, their memory, and what each saving costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import gradio as gr
from gradio.context import Context

from pellucid.evidence.drawing import graph as graph_drawing
from pellucid.evidence.drawing import memory as memory_drawing
from pellucid.pipeline import compare, inspection_graph, memory
from pellucid.pipeline.compare import StrategyCost
from pellucid.pipeline.inspection import Graph, GraphOptions
from pellucid.pipeline.load import load
from pellucid.pipeline.pipeline import Pipeline
from pellucid.studio import form, html, visitors
from pellucid.studio.form import Shelf, named
from pellucid.studio.html import status
from pellucid.studio.visitors import Job, Sessions

_TAB, _MEMORY = "pipeline", "pipeline-memory"
DEPTH = 2  # levels of blocks
_STEPS = 10  # of the run that is drawn, unless another number is asked for
_MOST_BATCH = 16
_KEPT = 8  # graphs
_COLUMNS = ("strategy", "predicted", "measured", "denoise", "decode", "ms", "× time", "max diff", "mean diff", "to")
_PREDICTED = ("strategy", "predicted peak", "denoise", "decode")
_GAP = '<div style="height: 1rem"></div>'
_EMPTY = html.block('<p class="note">The pipeline of the chosen model appears here.</p>')
_NO_ROWS = html.block('<p class="note">What the model needs, and what each saving would change, appears here.</p>')


# --- what is computed --------------------------------------------------------------------------------------------


def timed(graph: Graph, name: str, asked: GraphOptions, device: str | None, job: Job) -> Graph:
    """The graph with milliseconds: the weights are loaded again, so that no other run is counted."""

    def watch(rows: int) -> Callable[[], None]:
        return job.ticks(rows, "timing, row")

    return inspection_graph.with_times(graph, name, asked, watch, device=device)


@dataclass(frozen=True)
class StrategyTable:
    """Strategies side by side; `ran` where they were run and not only predicted."""

    about: dict[str, Any]
    rows: Sequence[StrategyCost]
    left_out: Sequence[str]
    ran: bool


def compared(pipe: Pipeline, batch: int, ran: bool, job: Job) -> StrategyTable:
    """Every strategy that this device knows: predicted, or run, measured and timed too.

    A pipeline that is run under strategies must be nobody else's: some of them rearrange its weights for a while.
    """
    request = memory.request_for(pipe, batch=batch)
    found, left_out = compare.strategies(pipe, request, request)
    seen = job.ticks(len(found), "strategy")
    if ran:
        rows = compare.compare(pipe, found, seen)
    else:
        rows = []
        for one in found:
            peaks = memory.predict(pipe, one.request, policy=one.policy, dtype=one.dtype).stages
            rows.append(StrategyCost(one, {name: peak.total for name, peak in peaks.items()}))
            seen()
    about = memory_drawing.describe_run(pipe, request, pipe.policy, pipe.device)
    return StrategyTable(about, rows, left_out, ran)


# --- what is shown -----------------------------------------------------------------------------------------------


def image(graph: Graph) -> str:
    alt = f"the pipeline of {graph_drawing.title(graph)}: {', '.join(node.name for node in graph.nodes)}"
    return html.block(html.figure(graph_drawing.figure_of(graph), alt))


def overview(graph: Graph) -> str:
    """The components with their bytes and, where it was timed, milliseconds."""
    parts = [html.table(graph_drawing.component_columns(graph), graph_drawing.components(graph))]
    if graph.times is not None:
        parts.append(html.table(graph_drawing.CLOCK, graph_drawing.clock(graph)))
    parts += [f'<p class="warning"><b>!</b> {html.text(note)}</p>' for note in graph.notes]
    return html.block(_GAP.join(parts))


def names_of(graph: Graph) -> list[str]:
    """Components first, since they have an anatomy; then the other stations, in the order in which they act."""
    first = [node.name for node in graph.components()]
    return [*first, *(node.name for node in graph.nodes if node.name not in first)]


def component(graph: Graph, name: str) -> str:
    """One node of the graph: its class, its inputs and outputs, and its blocks."""
    node = graph.node(name)
    lines = [f"<p><b>{html.text(node.name)}</b> {html.text(' · '.join(graph_drawing.node_words(node)))}</p>"]
    flows = [(mark, other, what, dtype) for mark, other, what, dtype in graph_drawing.links(graph, node)]
    if flows:
        lines.append(html.table(("", "with", "what flows", "dtype"), flows, words=4))
    if node.blocks:
        rows = [
            ("\u2003" * row.level + row.name, row.kind, row.leaves, row.parameters, row.percent)
            for row in graph_drawing.anatomy(node)
        ]
        lines.append(html.table(("block", "class", "leaves as", "parameters", "share"), rows, words=2))
    facts = [(key.replace("_", " "), str(value)) for key, value in node.facts.items()]
    if facts:
        lines.append(html.table(("fact", ""), facts, words=2))
    return html.block(_GAP.join(lines))


def strategies(found: StrategyTable) -> str:
    """The table, how to read it, and its image."""
    if found.ran:
        rows = [(row.strategy.name, *_cells_of(row)) for row in found.rows]
        table = html.table(_COLUMNS, rows)
        notes = memory_drawing.row_notes(found.about, found.rows, found.left_out)
    else:
        rows = [
            (row.strategy.name, *(memory.size_text(size) for size in (memory_drawing.peak_of(row), *_by_stage(row))))
            for row in found.rows
        ]
        table = html.table(_PREDICTED, rows)
        notes = ["Predicted from the model's own code on tensors without data; nothing was run."]
        notes += [f"left out: {why}." for why in found.left_out]
    figure = memory_drawing.strategy_figure(found.about, found.rows)
    image = html.figure(figure, "peak memory of each strategy")
    return html.block(table + "".join(f'<p class="note">{html.text(line)}</p>' for line in notes) + image)


def _cells_of(row: StrategyCost) -> tuple[str, ...]:
    return (row.trouble.partition(":")[0], *["–"] * 8) if row.trouble else memory_drawing.strategy_cells(row)


def _by_stage(row: StrategyCost) -> tuple[int, int]:
    return row.predicted.get("denoise", 0), row.predicted.get("decode", 0)


# --- the tab -----------------------------------------------------------------------------------------------------


class PipelineTab:
    """Builds the tab. The graph of a model is drawn when the tab is first opened."""

    def __init__(self, shelf: Shelf, sessions: Sessions, model: gr.Dropdown, ran: gr.State) -> None:
        self.shelf, self.sessions = shelf, sessions
        self.graph = lru_cache(maxsize=_KEPT)(self.inspect)
        self.times: dict[tuple[str, int], Graph] = {}
        place = Context.block
        with gr.Row():
            steps = gr.Number(_STEPS, label="Steps", precision=None, min_width=120, elem_id="pipeline-steps")
            draw = gr.Button("Draw", min_width=120, elem_id="pipeline-draw")
            time = gr.Button("Measure milliseconds", variant="primary", min_width=160, elem_id="pipeline-time")
            stop = gr.Button("Cancel", variant="stop", min_width=120, elem_id="pipeline-cancel")
        said = gr.HTML(status("ready"), elem_id="pipeline-status")
        shown = gr.HTML(_EMPTY, elem_id="pipeline-graph")
        table = gr.HTML("", elem_id="pipeline-components")
        which = gr.Dropdown([], label="One component", elem_id="pipeline-component")
        inside = gr.HTML("", elem_id="pipeline-anatomy")
        here = gr.State("")  # the model that is drawn
        outputs = [said, shown, table, which, here]
        if isinstance(place, gr.Tab):
            place.select(self.came, [model, steps, here], outputs, show_progress="hidden")
        draw.click(self.draw, [model, steps], outputs, show_progress="hidden")
        time.click(self.time, [model, steps], outputs, show_progress="hidden", concurrency_limit=4)
        stop.click(self.cancel, None, said, queue=False)
        gr.on([which.change, here.change], self.look, [here, steps, which], inside, show_progress="hidden")
        self.memory(model)

    def memory(self, model: gr.Dropdown) -> None:
        gr.Markdown("### Memory: what each strategy saves, and what it costs")
        with gr.Row():
            batch = gr.Slider(1, _MOST_BATCH, 1, step=1, label="Images at once", min_width=160, elem_id="memory-batch")
            ran = gr.Checkbox(
                False,
                label="Run each strategy",
                info="slower: measured peaks, milliseconds, changed pixels",
                min_width=200,
                elem_id="memory-run",
            )
            go = gr.Button("Compare strategies", variant="primary", min_width=160, elem_id="memory-compare")
            stop = gr.Button("Cancel", variant="stop", min_width=120, elem_id="memory-cancel")
        said = gr.HTML(status("ready"), elem_id="memory-status")
        shown = gr.HTML(_NO_ROWS, elem_id="memory-table")
        go.click(self.compare, [model, batch, ran], [said, shown], show_progress="hidden", concurrency_limit=4)
        stop.click(self.cancel_memory, None, said, queue=False)

    def inspect(self, name: str, steps: int) -> Graph:
        return inspection_graph.inspect(name, GraphOptions(steps=steps, depth=DEPTH))

    # handlers

    def came(self, request: gr.Request, model: str, steps: Any, here: str) -> tuple[Any, ...]:
        """Somebody opened the tab: what is drawn already stays."""
        return (gr.skip(),) * 5 if not model or here == model else self.draw(request, model, steps)

    def draw(self, request: gr.Request, model: str, steps: Any) -> tuple[Any, ...]:
        with html.plainly():
            name, count = named(model), form.steps_of(steps)
            return self.drawing(self.known(name, count), name)

    def known(self, name: str, steps: int) -> Graph:
        return self.times.get((name, steps)) or self.graph(name, steps)

    def drawing(self, graph: Graph, name: str) -> tuple[Any, ...]:
        whole = "" if graph.times is None else f" · {graph_drawing.milliseconds(graph.times.whole)} a run, measured"
        said = status(" · ".join(graph_drawing.subtitle(graph)) + whole, 0.0 if graph.times is None else 1.0)
        names = names_of(graph)
        network = graph.of("network")[0].name
        return said, image(graph), overview(graph), gr.Dropdown(names, value=network), name

    @html.settled(5)
    def time(self, request: gr.Request, model: str, steps: Any) -> Iterator[tuple[Any, ...]]:
        nothing = (gr.skip(),) * 4
        name, count = named(model), form.steps_of(steps)
        session = self.sessions.of(request.session_hash)
        yield status("reading …"), *nothing
        graph = self.graph(name, count)
        asked = GraphOptions(steps=count, depth=DEPTH)
        work = session.begin(_TAB, lambda job: timed(graph, name, asked, self.shelf.device, job))
        for news in visitors.follow(work):
            yield status(*news), *nothing
        while len(self.times) >= _KEPT:
            self.times.pop(next(iter(self.times)), None)
        self.times[name, count] = work.result
        yield self.drawing(work.result, name)

    def look(self, here: str, steps: Any, which: str | None) -> str:
        with html.plainly():
            if not here or not which:
                return ""
            graph = self.known(here, form.steps_of(steps))
            return component(graph, which) if which in names_of(graph) else ""

    @html.settled()
    def compare(self, request: gr.Request, model: str, batch: Any, ran: bool) -> Iterator[tuple[Any, Any]]:
        name = named(model)
        session = self.sessions.of(request.session_hash)
        yield status("loading …"), gr.skip()
        pipe = load(name, device=self.shelf.device) if ran else self.shelf.pipe(name)
        count = max(1, min(int(batch), _MOST_BATCH))
        work = session.begin(_MEMORY, lambda job: compared(pipe, count, bool(ran), job))
        for news in visitors.follow(work):
            yield status(*news), gr.skip()
        yield status(memory_drawing.headline(work.result.about), 1.0), strategies(work.result)

    def cancel(self, request: gr.Request) -> Any:
        return status("cancelled") if self.sessions.of(request.session_hash).cancel(_TAB) else gr.skip()

    def cancel_memory(self, request: gr.Request) -> Any:
        return status("cancelled") if self.sessions.of(request.session_hash).cancel(_MEMORY) else gr.skip()
