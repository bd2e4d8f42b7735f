"""Observers that want more than steps: the recipes before a run, the result after it, and no other way round."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny

import pellucid
from pellucid import Cancelled, StepSeen
from pellucid.pipeline.pipeline import Pipeline


class Watcher:
    """Writes down what it is shown, in order."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def begin_request(self, recipes: Any) -> None:
        self.shown.append(list(recipes))

    def __call__(self, seen: StepSeen) -> None:
        self.shown.append(seen.index)

    def end_request(self, result: Any) -> None:
        self.shown.append(result)


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    base = tmp_path_factory.mktemp("sd")
    tiny.stable_diffusion(base).save_pretrained(base / "model")
    return pellucid.load(Path(base / "model"))


def test_recipes_come_before_the_steps_and_the_result_after_them(pipe: Pipeline) -> None:
    watcher, plain = Watcher(), []
    result = pipe(
        "abc", sampler="ddim", steps=2, seed=[1, 2], n=2, width=16, height=16, observers=[watcher, plain.append]
    )
    recipes, *steps, shown = watcher.shown
    assert steps == [0, 1]
    assert shown is result
    assert recipes == result.recipes
    assert [recipe.seed for recipe in recipes] == [1, 2]
    assert len(plain) == 2  # who wants steps only is shown steps only


def test_a_request_that_is_stopped_has_shown_its_recipes_and_no_result(pipe: Pipeline) -> None:
    watcher = Watcher()
    with pytest.raises(Cancelled):
        pipe("abc", steps=2, width=16, height=16, observers=[watcher], cancelled=lambda: len(watcher.shown) == 2)
    assert len(watcher.shown) == 2
    assert watcher.shown[1] == 0


def test_a_wrapped_pipeline_shows_its_result() -> None:
    watcher = Watcher()
    peer = pellucid.wrap(tiny.saved("sd1")[0])
    result = peer("abc", sampler="ddim", steps=2, seed=1, width=16, height=16, observers=[watcher])
    assert watcher.shown[:2] == [0, 1]
    assert watcher.shown[2] is result


def test_stages_say_when_they_began(pipe: Pipeline) -> None:
    stages = pipe("abc", steps=1, width=16, height=16).stages
    begun = [stage.began for stage in stages]
    assert begun == sorted(begun)
    for stage, following in pairwise(stages):
        assert stage.began + stage.seconds <= following.began
