"""Work under way: it is followed, told how far it is, and left at once when somebody cancels it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pellucid.core.errors import Cancelled, PellucidError
from pellucid.studio import visitors
from pellucid.studio.form import named
from pellucid.studio.visitors import Job, Session


def test_cancel_does_not_wait_for_a_long_step(tmp_path: Path) -> None:
    session, free, begun = Session(tmp_path), threading.Event(), threading.Event()

    def work(job: Job) -> None:
        job.tell(("begun", 0.0))
        begun.set()
        free.wait(20)

    job = session.begin("tab", work)
    events = visitors.follow(job)
    assert next(events) == ("begun", 0.0)
    assert begun.wait(5)
    assert session.cancel("tab")
    with pytest.raises(Cancelled):
        next(events)
    assert not job.ended
    assert job.cancelled()
    free.set()


def test_what_was_under_way_in_the_tab_is_stopped_by_what_follows(tmp_path: Path) -> None:
    session = Session(tmp_path)
    first = session.begin("tab", lambda job: job.stop.wait(20))
    second = session.begin("tab", lambda job: "done")
    with pytest.raises(Cancelled):
        list(visitors.follow(first))
    assert list(visitors.follow(second)) == []
    assert second.result == "done"
    assert not session.cancel("tab")  # it has ended
    assert not session.cancel("another")


def test_ticks_tell_how_far_it_is_and_end_what_is_cancelled() -> None:
    job = Job()
    tick = job.ticks(4, "part")
    tick()
    tick(2)
    assert [job.reports.get(), job.reports.get()] == [("part 1 of 4", 0.25), ("part 3 of 4", 0.75)]
    job.cancel()
    with pytest.raises(Cancelled):
        tick()


@pytest.mark.parametrize("name", ["", " ", None])
def test_a_model_has_a_name(name: str | None) -> None:
    with pytest.raises(PellucidError, match="model must be"):
        named(name)
    assert named(" scenes-128 ") == "scenes-128"
