"""What a pipeline shows to observers that want more than steps: the recipes before a run, the result after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from pellucid.core.loop import StepSeen
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.result import Result


@runtime_checkable
class RequestObserver(Protocol):
    """An observer that is also shown what a request is, and what it made. A wrapped pipeline shows the latter only."""

    def __call__(self, seen: StepSeen) -> None: ...

    def begin_request(self, recipes: Sequence[Recipe]) -> None: ...

    def end_request(self, result: Result) -> None: ...


def begin(observers: Sequence[Any], recipes: Callable[[], Sequence[Recipe]]) -> None:
    """Shows the recipes, which are made only for who looks: they name the weights, and that reads all of them."""
    for observe in observers:
        if isinstance(observe, RequestObserver):
            observe.begin_request(recipes())


def end(observers: Sequence[Any], result: Result) -> Result:
    """The result, shown."""
    for observe in observers:
        if isinstance(observe, RequestObserver):
            observe.end_request(result)
    return result
