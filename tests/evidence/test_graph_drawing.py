"""The drawing of a pipeline's graph: no text meets another, no card another; and its rows and words."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import tiny_graphs
from tiny_graphs import FAMILIES

from pellucid.evidence.drawing import graph as drawing
from pellucid.pipeline.inspection import Block, Graph, Times

TIMES = Times("cuda", 11.2, 3.0, 44.1, 120.0, 1530.0, 3)
LONG = "a note that is long enough to be broken into several lines wherever the image is narrow, as it may well be"


@pytest.fixture(scope="module")
def extras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return tiny_graphs.extras(tmp_path_factory.mktemp("extras"))


@pytest.fixture
def graph(request: pytest.FixtureRequest, extras: dict[str, str]) -> Graph:
    return tiny_graphs.of(request.param, extras)


# --- the image -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("graph", "timed"), [(name, True) for name in FAMILIES] + [("sd1", False)], indirect=["graph"])
def test_no_text_of_the_image_meets_another(graph: Graph, timed: bool):
    if timed:
        each = dict.fromkeys([node.name for node in graph.components()], 12.3)
        graph = replace(graph.timed(TIMES, each), notes=(LONG, LONG))
    figure = drawing.figure_of(graph)
    renderer = figure.canvas.get_renderer()
    texts = [text for text in figure.axes[0].texts if text.get_text().strip()]
    # a text's box has the height of its tallest possible letter: a tenth of it at either end is air
    boxes = [text.get_window_extent(renderer).shrunk(0.98, 0.8) for text in texts]
    for (one, box), (other, second) in combinations(zip(texts, boxes, strict=True), 2):
        assert not box.overlaps(second), f"{one.get_text()!r} meets {other.get_text()!r}"
    for text, box in zip(texts, boxes, strict=True):
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, text.get_text()
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, text.get_text()
    said = " ".join(text.get_text() for text in texts)
    assert all(node.name in said for node in graph.nodes)
    assert drawing.pace(graph) in said


@pytest.mark.parametrize("graph", FAMILIES, indirect=True)
def test_no_card_meets_another(graph: Graph):
    sheet = drawing.layout(graph)
    assert {node.name for node in graph.nodes} == set(sheet.cards)
    for one, other in combinations(sheet.cards.values(), 2):
        apart = one.right < other.left or other.right < one.left or one.bottom < other.top or other.bottom < one.top
        assert apart, f"{one.node.name} meets {other.node.name}"


@pytest.mark.parametrize("graph", FAMILIES, indirect=True)
def test_the_page_and_the_flowchart_have_every_node_and_every_flow(graph: Graph):
    page, chart = drawing.page(graph).html(), drawing.mermaid(graph)
    for node in graph.nodes:
        assert f"<b>{node.name}</b>" in page
        assert f"<b>{node.name}</b>" in chart
    for flow in graph.flows:
        assert f"→ {flow.goal}: {drawing.flow_text(flow)}" in page
    assert chart.count(" -->|") == len(graph.flows)


# --- rows and words ----------------------------------------------------------------------------------------------


def test_names_of_blocks_stand_once_for_equal_neighbours():
    blocks = [*(Block(f"layers.{n}", "Layer", 10, 0.1, (1, 2)) for n in range(9)), Block("out", "Linear", 10, 0.1)]
    found = list(drawing.listed(blocks))
    assert [(block.name, times) for _, block, times in found] == [("layers.0 … 8", 9), ("out", 1)]


@pytest.mark.parametrize(
    ("value", "text"),
    [(859_520_964, "859.5 M"), (2_567_463_684, "2.57 B"), (999_999_999, "1.00 B"), (1536, "1.5 K"), (640, "640")],
)
def test_counts(value: int, text: str):
    assert drawing.count(value) == text


@pytest.mark.parametrize(("value", "text"), [(1_719_041_928, "1.72 GB"), (246_120_960, "246 MB"), (80, "80 B")])
def test_sizes(value: int, text: str):
    assert drawing.size(value) == text
