"""Scenes painted without branches: the same images, and compiled the same within rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pellucid import scenes as world
from pellucid.core.errors import PellucidError
from pellucid.scenes import renderer
from pellucid.train.draws import Draws
from pellucid.train.scenes_source import ScenesConfig, ScenesSource

HINTS = ("edges", "reference")


@pytest.mark.parametrize("size", [16, 48, 128])
def test_dense_images_and_edges_are_those_of_the_renderer(size: int) -> None:
    scenes = world.sample(torch.arange(60), 3, "any", world.STYLE_NAMES)
    assert torch.equal(renderer.render_dense(scenes, size), world.render(scenes, size))
    assert torch.equal(renderer.edges_dense(scenes, size), world.edges(scenes, size))


def test_only_the_styles_and_things_that_are_named_are_painted() -> None:
    scenes = world.sample(torch.arange(40), 1, "train", ("soft", "flat"), (1, 2))
    painted = renderer.render_dense(scenes, 32, ("soft", "flat", "soft"), most=2)
    assert torch.equal(painted, world.render(scenes, 32))
    with pytest.raises(PellucidError, match="style"):
        renderer.render_dense(scenes, 32, ("cubist",))


def test_the_painter_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any scenes of a size: nothing in it waits for a value."""
    graphs: list[torch.fx.GraphModule] = []

    def counter(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    made = torch.compile(renderer.stroke, backend=counter, fullgraph=True, dynamic=False)
    monkeypatch.setattr(renderer, "compiled", lambda work: made)
    for seed in (0, 1):
        scenes = world.sample(torch.arange(6), seed, "any", world.STYLE_NAMES)
        assert torch.equal(renderer.render_dense(scenes, 16, compile=True), world.render(scenes, 16))
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, within its compiler
def test_compiled_they_differ_by_rounding_alone() -> None:
    config = ScenesConfig(size=32, hints=HINTS, styles=world.STYLE_NAMES, split="any")
    asked, draws = torch.arange(48), Draws(0, 0, 48)
    plain, fast = (replace(config, compile_render=on).open().batch(asked, draws) for on in (False, True))
    assert fast.captions == plain.captions
    for a, b in ((fast.images, plain.images), *((fast.hints[n], plain.hints[n]) for n in HINTS)):
        assert torch.allclose(a, b, rtol=0, atol=1e-5)  # some 128 pixels times the rounding of a distance


def test_a_source_that_compiles_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it asks of the compiled painter is what the plain one gives; and the plain one is not asked."""
    config = ScenesConfig(size=16, hints=HINTS, styles=("outlined", "soft"), objects=(1, 2))
    asked, draws = torch.arange(12), Draws(0, 0, 12)
    plain = config.open().batch(asked, draws)
    used: list[str] = []

    def uncompiled(work):
        used.append(work.__name__)
        return work

    monkeypatch.setattr(renderer, "compiled", uncompiled)
    for name in ("render", "edges"):
        monkeypatch.setattr(world, name, lambda *_: pytest.fail("fell back"))
    fast = ScenesSource(replace(config, compile_render=True)).batch(asked, draws)
    assert used == ["stroke", "_outlined", "stroke"]
    assert torch.equal(fast.images, plain.images)
    assert all(torch.equal(fast.hints[name], plain.hints[name]) for name in HINTS)
