"""The feed: the batches of the steps, made ahead, whole, in order, and gone when nobody wants them."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from image_files import good_folder

from pellucid import PellucidError
from pellucid.train.draws import Draws, Order
from pellucid.train.image_folder import ImageFolder
from pellucid.train.source import Batch, Feed, hand_over, tensors_in

PATIENCE = 5.0  # seconds: a thread that has not ended by then hangs


def made(step: int) -> Batch:
    return Batch(torch.full((1,), float(step)))


def steps(feed: Feed) -> list[int]:
    return [int(batch.images[0]) for batch in feed]


def feeding() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "pellucid-feed"]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    end = time.monotonic() + PATIENCE
    while feeding() and time.monotonic() < end:
        time.sleep(0.01)
    assert feeding() == []


@pytest.mark.parametrize(("start", "stop", "ahead"), [(0, 0, 1), (0, 1, 5), (3, 20, 1), (3, 20, 7), (5, 5, 2)])
def test_steps_come_in_order_and_once(start: int, stop: int, ahead: int) -> None:
    with Feed(made, start, stop, ahead) as feed:
        assert steps(feed) == list(range(start, stop))
        assert list(feed) == []


def test_a_resumed_feed_gives_the_batches_that_the_first_would(tmp_path: Path) -> None:
    source = ImageFolder(good_folder(tmp_path, 10), 16, crop="random", flip=True)
    order = Order(10, 4, 1)

    def make(step: int) -> Batch:
        return source.batch(order.step(step), Draws(9, step, 4), torch.device("cpu"))

    plain = [make(step).images for step in range(8)]
    with Feed(make, 0, 8, ahead=3) as feed:
        whole = [batch.images for batch in feed]
    with Feed(make, 5, 8, ahead=1) as feed:
        resumed = [batch.images for batch in feed]
    assert all(torch.equal(a, b) for a, b in zip(plain, whole, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain[5:], resumed, strict=True))


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_more_is_made_than_was_asked_for(ahead: int) -> None:
    begun: list[int] = []

    def make(step: int) -> Batch:
        begun.append(step)
        return made(step)

    with Feed(make, 0, 100, ahead) as feed:
        for taken in (0, 1, 2):
            end = time.monotonic() + PATIENCE
            while len(begun) < taken + ahead and time.monotonic() < end:
                time.sleep(0.001)
            time.sleep(0.05)  # room for one too many
            assert begun == list(range(taken + ahead))
            next(feed)


def test_it_makes_ahead_while_the_consumer_works() -> None:
    other: list[int] = []

    def make(step: int) -> Batch:
        other.append(threading.get_ident())
        return made(step)

    with Feed(make, 0, 3) as feed:
        assert steps(feed) == [0, 1, 2]
    assert threading.get_ident() not in other


def test_an_error_is_raised_at_its_own_step() -> None:
    def make(step: int) -> Batch:
        if step == 4:
            raise PellucidError("data must be readable; got none.", "data-damaged")
        return made(step)

    with Feed(make, 2, 9, ahead=4) as feed:
        assert [int(next(feed).images[0]) for _ in range(2)] == [2, 3]
        with pytest.raises(PellucidError, match="data must be readable"):
            next(feed)
        assert list(feed) == []


def test_a_consumer_may_break_off() -> None:
    with Feed(made, 0, 10**9) as feed:
        for batch in feed:
            if int(batch.images[0]) == 3:
                break
    assert feeding() == []
    feed.close()  # twice is once
    assert list(feed) == []


def test_an_error_of_the_consumer_ends_the_thread() -> None:
    def consume() -> None:
        with Feed(made, 0, 10**9) as feed:
            next(feed)
            raise KeyError

    with pytest.raises(KeyError):
        consume()
    assert feeding() == []


def test_a_feed_that_is_dropped_ends_its_thread() -> None:
    feed = Feed(made, 0, 10**9)
    next(feed)
    assert len(feeding()) == 1
    del feed
    gc.collect()
    assert feeding() == []


def test_closing_wakes_a_consumer_that_waits() -> None:
    gate = threading.Event()

    def make(step: int) -> Batch:
        gate.wait(PATIENCE)
        return made(step)

    feed = Feed(make, 0, 5)
    got: list[list[Batch]] = []
    waiting = threading.Thread(target=lambda: got.append(list(feed)))
    waiting.start()
    closing = threading.Thread(target=feed.close)
    closing.start()
    waiting.join(PATIENCE)
    assert got == [[]]
    gate.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()


@pytest.mark.parametrize("last", ["", "1 / 0"])
def test_a_program_that_forgets_the_feed_still_ends(last: str) -> None:
    program = (
        "import torch\nfrom pellucid.train.source import Feed\nfrom pellucid.train.source import Batch\n"
        f"feed = Feed(lambda step: Batch(torch.zeros(1)), 0, 10**9)\nnext(feed)\n{last}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == (1 if last else 0)
    assert ("Traceback" in done.stderr) == (last == "1 / 0")


def test_what_a_trainer_prepares_comes_through_whole() -> None:
    """Lists of dicts of tensors, and on a CPU no stream is asked for."""
    with Feed(
        lambda step: [{"x0": torch.full((2,), step)}, {"x0": torch.full((2,), -step)}], 1, 3, device="cpu"
    ) as feed:
        found = [[part["x0"].tolist() for part in parts] for parts in feed]
    assert found == [[[1, 1], [-1, -1]], [[2, 2], [-2, -2]]]


class Kept:
    """A tensor, an event and a stream that note what is done with them, in order."""

    is_cuda = True

    def __init__(self, log: list[object]) -> None:
        self.log = log

    def record_stream(self, stream: object) -> None:
        self.log.append(("kept for", stream))

    def wait_event(self, event: object) -> None:
        self.log.append(("waits for", event))


def test_tensors_are_found_however_deep_they_lie() -> None:
    one, two, three, four, five, six = (torch.full((1,), float(i)) for i in range(6))
    batch = Batch(one, two, ("a", "b"), {"edges": three}, four)
    nest = [{"batch": batch, "n": 3, "none": None}, (five, [{"deep": (six,)}]), "text", Batch]
    assert [id(t) for t in tensors_in(nest)] == [id(t) for t in (one, two, three, four, five, six)]
    assert list(tensors_in([])) == []


def test_handing_over_waits_first_and_then_keeps_every_tensor_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[object] = []
    stream, found = Kept(log), [Kept(log), Kept(log), torch.zeros(1)]
    monkeypatch.setattr("pellucid.train.source.tensors_in", lambda nest: iter(found))
    hand_over({}, "ready", stream)  # type: ignore[arg-type]
    assert log == [("waits for", "ready"), ("kept for", stream), ("kept for", stream)]


@pytest.mark.parametrize("make", [lambda: Feed(made, 3, 2), lambda: Feed(made, -1, 2), lambda: Feed(made, 0, 2, 0)])
def test_bad_input_is_one_line(make) -> None:
    with pytest.raises(PellucidError, match="must be") as error:
        make()
    assert error.value.code == "feed"
