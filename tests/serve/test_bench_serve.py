"""`pellucid bench-serve`: loads are Poisson and open, outcomes are counted, nothing is hidden by a slow client."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fake_server import FakeServer, ask, error, images, refused
from PIL import Image
from scipy import stats
from servers import RunningServer

from pellucid.core.errors import PellucidError
from pellucid.serve.bench import DEFAULT_MIX, Kind, Load, Outcome, Sample, arrivals, read_mix, run
from pellucid.serve.bench_report import comparison, figures, load_of, report, spread
from pellucid.serve.client import Remote, read_reply

ONE = (Kind("one", 1, {"prompt": "a red star", "steps": 2}),)


@pytest.fixture(autouse=True)
def _without_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PELLUCID_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "200")


def sent_to(server: FakeServer, tell=lambda: None, **load) -> tuple[dict, float]:
    """The report of a load, and the seconds that it took."""
    began = time.monotonic()
    found = report(asyncio.run(run(Remote.of(server.url), Load(**{"mix": ONE, **load}), tell)))
    return found, time.monotonic() - began


# --- The load -----------------------------------------------------------------------------------------------------


def test_arrivals_follow_from_the_seed_and_times_do_not_depend_on_the_mix() -> None:
    first, again, other = arrivals(Load(seed=3)), arrivals(Load(seed=3)), arrivals(Load(seed=4))
    assert first == again
    assert [one.due for one in first] != [one.due for one in other]
    assert [one.due for one in arrivals(Load(seed=3, mix=ONE))] == [one.due for one in first]
    assert arrivals(Load(seed=3, requests=20)) == first[:20]


def test_arrivals_are_a_poisson_process() -> None:
    """Gaps are exponential with mean 1/rate: the test of Kolmogorov and Smirnov, at a fixed seed."""
    due = [one.due for one in arrivals(Load(rate=8, requests=4000, seed=1))]
    assert stats.kstest(np.diff([0, *due]), "expon", args=(0, 1 / 8)).pvalue > 0.01


def test_kinds_come_as_often_as_their_weights_say() -> None:
    counts = Counter(one.kind.name for one in arrivals(Load(requests=5000)))
    whole = sum(kind.weight for kind in DEFAULT_MIX)
    expected = [5000 * kind.weight / whole for kind in DEFAULT_MIX]
    assert stats.chisquare([counts[kind.name] for kind in DEFAULT_MIX], expected).pvalue > 0.01


@pytest.mark.parametrize(
    ("field", "value"), [("rate", 0.0), ("rate", float("nan")), ("requests", 0), ("timeout", -1.0), ("seed", -1)]
)
def test_a_load_has_limits(field: str, value: float) -> None:
    with pytest.raises(PellucidError, match=f"--{field} must be from"):
        Load(**{field: value})


def test_the_load_is_open() -> None:
    """Thirty requests within half a second, each answered after one: none may wait for another."""
    with FakeServer(delay=1.0) as server:
        found, took = sent_to(server, rate=60, requests=30)
        assert server.most_running >= 25
    assert found["all"]["ok"] == 30
    assert found["all"]["latency"]["p50"] >= 1.0
    assert took < 4.0


def test_a_load_ends_after_the_timeout_at_the_latest() -> None:
    with FakeServer(delay=5.0) as server:
        found, took = sent_to(server, rate=50, requests=10, timeout=0.3)
    assert found["all"]["timeouts"] == 10
    assert found["all"]["latency"] == {}
    assert found["images_per_second"] == 0
    assert took < 3.0


def test_a_late_client_shows_in_the_lag_and_in_the_latency() -> None:
    """The first answer holds the client up for 0.4 s: what was due meanwhile is late, and counts from when it was."""
    calls = []

    def hold() -> None:
        calls.append(time.sleep(0.4 if not calls else 0))

    with FakeServer() as server:
        found, _ = sent_to(server, hold, rate=50, requests=40)
    assert found["lag"]["max"] > 0.25
    late = max(found["answers"], key=lambda one: one["sent"] - one["due"])
    assert late["done"] - late["due"] > 0.25
    assert found["all"]["latency"]["max"] > found["all"]["from_sending"]["p50"] + 0.25


# --- Arithmetic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 19, 20, 100, 101, 1000])
def test_percentiles_are_those_of_numpy(count: int) -> None:
    values = np.random.default_rng(count).exponential(size=count)
    found = spread(values)
    for percent in (50, 90, 95, 99):
        assert found[f"p{percent}"] == round(float(np.percentile(values, percent, method="inverted_cdf")), 4)
    assert found["max"] == round(float(values.max()), 4)
    assert spread([]) == {}


def test_outcomes_are_counted_and_only_answers_have_latencies() -> None:
    stages = {"wait": 0.5, "encode": 0.1, "denoise": 1.0, "decode": 0.2}
    outcomes = [
        Outcome("a", 2, 1.0, 1.25, 3.25, 200, stages=stages),
        Outcome("a", 1, 2.0, 2.0, 2.5, 200),  # of a server that tells no timings
        Outcome("a", 1, 2.0, 2.0, 2.01, 429, "rate_limit_exceeded", 3.0),
        Outcome("a", 1, 2.0, 2.0, 9.0, code="timeout"),
        Outcome("a", 1, 2.0, 2.0, 2.1, 500, "internal_error"),
        Outcome("a", 1, 2.0, 2.0, 2.1, 500, "internal_error"),
        Outcome("a", 1, 2.0, 2.0, 2.1, code="connection refused"),
        Outcome("a", 1, 2.0, 2.0, 2.1, 200, "no images"),
    ]
    found = figures(outcomes)
    assert {name: found[name] for name in ("sent", "ok", "refused", "timeouts")} == {
        "sent": 8, "ok": 2, "refused": 1, "timeouts": 1,
    }  # fmt: skip
    assert found["errors"] == {"200 no images": 1, "500 internal_error": 2, "connection refused": 1}
    assert (found["latency"]["max"], found["from_sending"]["max"]) == (2.25, 2.0)
    means = {part: one["mean"] for part, one in found["split"].items()}
    assert means == {**stages, "rest": 0.2}  # 2 s since it was sent, 1.8 s in the stages


def test_the_servers_load_is_that_of_its_samples() -> None:
    samples = [
        Sample(0, 0, 0, 0, 0, 100, 200, 0),
        Sample(1, 6, 2, 4, 4, 110, 230, 0),
        Sample(2, 2, 0, 2, 4, 120, 250, 0),
    ]
    found = load_of(samples)
    assert found["occupancy"]["mean"] == 0.75  # without the sample in which there was no step batch
    assert found["images_per_step"] == 2.5
    assert (found["unanswered"]["mean"], found["unanswered"]["max"]) == (round(8 / 3, 4), 6)
    assert load_of([])["images_per_step"] is None


def test_comparison_is_a_ratio_where_there_is_one() -> None:
    mine = {"images_per_second": 3.0, "all": {"ok": 5, "refused": 2, "latency": {"p50": 1.0}}}
    other = {"images_per_second": 2.0, "all": {"ok": 10, "refused": 0, "latency": {"p50": "x"}}}
    rows = {row["figure"]: row for row in comparison(mine, other)}
    assert rows["images/s"]["ratio"] == 1.5
    assert rows["answered"]["ratio"] == 0.5
    assert rows["refused"]["ratio"] is None
    assert rows["latency p50, s"] == {"figure": "latency p50, s", "this": 1.0, "other": None, "ratio": None}


# --- The client ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcd", b"abc"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=1\r\nab\r\n1\r\nc\r\n0\r\n\r\n", b"abc"),
        (b"HTTP/1.0 200 OK\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc", b"abc"),
    ],
)
def test_a_body_ends_where_its_head_says(said: bytes, body: bytes) -> None:
    async def read():
        reader = asyncio.StreamReader()
        reader.feed_data(said)
        reader.feed_eof()
        return await read_reply(reader)

    reply = asyncio.run(read())
    assert (reply.status, reply.body) == (200, body)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nx: y",
        b"HTTP/1.1 200 OK\r\n" + 300 * b"x: y\r\n",
    ],
)
def test_half_a_reply_is_none(said: bytes) -> None:
    async def read():
        reader = asyncio.StreamReader()
        reader.feed_data(said)
        reader.feed_eof()
        return await read_reply(reader)

    with pytest.raises((EOFError, ValueError)):
        asyncio.run(read())


@pytest.mark.parametrize(
    "url", ["", "ftp://a", "http://", "http://a:b", "http://u:p@a", "http://a/\r\nx: y", "http://a b"]
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(PellucidError, match="URL must be as http"):
        Remote.of(url)


def test_a_url_may_be_short_or_that_of_openais_client() -> None:
    assert Remote.of("localhost:8000").url == Remote.of("http://localhost:8000/v1/").url == "http://localhost:8000"
    behind = Remote.of("https://example.org/images/v1", "secret")
    assert (behind.port, behind.secure, behind.prefix) == (443, True, "/images")
    assert "secret" not in repr(behind)


# --- The command --------------------------------------------------------------------------------------------------


def uneven(number: int, body: dict) -> tuple:
    """One in five is refused, and the eighth fails."""
    if number % 5 == 2:
        return error(429, "rate_limit_exceeded", retry_after=str(1 + number))
    return error(500, "internal_error") if number == 8 else images(body)


def test_a_load_is_reported_in_words_json_and_a_chart(tmp_path: Path) -> None:
    out = tmp_path / "made" / "here"
    with FakeServer(uneven, delay=0.06) as server:
        answer = ask("bench-serve", server.url, "--rate", "40", "--requests", "25", "--out", str(out))
        assert (answer.code, answer.err) == (0, "")
        assert sum("seed" in body for body in server.bodies) == 25
        assert len({body["seed"] for body in server.bodies}) == 25
    assert "19 ok, 5 refused, 0 timed out, 1 × 500 internal_error" in answer.words
    assert "5 × rate_limit_exceeded" in answer.words
    assert "retry after 13 s (median), 23 s at most" in answer.words
    assert "step batches: 50% full on average, 2.50 images a step" in answer.words
    assert "3 at most, of 8" in answer.words
    found = json.loads((out / "bench-serve.json").read_text())
    assert found["all"]["split"]["denoise"]["mean"] == 0.03
    assert 0.005 < found["all"]["split"]["rest"]["mean"] < 0.5
    assert sum(row["sent"] for row in found["kinds"].values()) == len(found["answers"]) == 25
    assert found["images"] == sum(one["images"] for one in found["answers"] if one["result"] == "ok")
    assert found["load"]["mix"][0]["name"] == "draft"
    with Image.open(out / "bench-serve.png") as chart:
        assert chart.width > 1500
        assert len(chart.convert("RGB").getcolors(1 << 20) or ()) > 100


def test_nothing_is_replaced_unasked_and_two_runs_are_compared(tmp_path: Path) -> None:
    words = ("--rate", "50", "--requests", "4", "--out", str(tmp_path))
    with FakeServer() as server:
        assert ask("bench-serve", server.url, *words).code == 0
        before = (tmp_path / "bench-serve.json").read_bytes()
        (tmp_path / "before.json").write_bytes(before)
        assert "error[file-exists]: --out" in refused("bench-serve", server.url, *words)
        assert len(server.bodies) == 4
        assert (tmp_path / "bench-serve.json").read_bytes() == before
        other = ("--compare", str(tmp_path / "before.json"), "--overwrite", "--seed", "5")
        answer = ask("bench-serve", server.url, *words, *other)
    assert answer.code == 0
    assert "answered 4 4 1.000" in answer.words
    assert "note: the loads differ: seed 5 against 0" in answer.words
    compared = json.loads((tmp_path / "bench-serve.json").read_text())["compared"]
    figures = {row["figure"]: row for row in compared["figures"]}
    assert figures["answered"] == {"figure": "answered", "this": 4, "other": 4, "ratio": 1.0}
    assert figures["latency p50, s"]["other"] == json.loads(before)["all"]["latency"]["p50"]


BAD_MIXES = {
    "": "1 to 100 [[request]] tables; got 0",
    "request = []": "1 to 100 [[request]] tables; got 0",
    "request = 3": "1 to 100 [[request]] tables; got 3",
    "[request]\nsteps = 2": "1 to 100 [[request]] tables",
    "kinds = []": "must be a list of [[request]] tables; got 'kinds'",
    "[[request]]\nsteps = 2\nwieght = 3": "request 1.wieght must be a field of a request. Nearest: weight",
    "[[request]]\nweight = 0": "request 1.weight must be above 0; got 0.0",
    "[[request]]\nweight = -1": "request 1.weight must be above 0",
    "[[request]]\nweight = nan": "request 1.weight must be a finite",
    "[[request]]\nweight = 'much'": "request 1.weight must be a number",
    "[[request]]\nsteps = 0": "request 1.steps: Input should be greater than or equal to 1; got 0.",
    "[[request]]\nn = 11": "request 1.n: ",
    "[[request]]\nsize = 'big'": "request 1.size: ",
    "[[request]]\nstream = true": "request 1.stream must be left out",
    "[[request]]\nbackground = true": "request 1.background must be left out",
    "[[request]]\nprompt = 2020-01-01": "request 1.prompt must be",
    "[[request]]\nname = ''": "request 1.name must be a text of 1 to 60 characters",
    "[[request]]\nsteps = 2\n[[request]]\nsteps = 2": "request 2.name must be different from the others",
    "[[request": "--mix must be valid TOML",
}


@pytest.mark.parametrize("text", BAD_MIXES)
def test_a_bad_mix_is_refused_before_anything_is_sent(tmp_path: Path, text: str) -> None:
    (tmp_path / "mix.toml").write_text(text)
    line = refused("bench-serve", "http://127.0.0.1:9", "--mix", str(tmp_path / "mix.toml"), "--out", str(tmp_path))
    assert line.startswith("error[mix")
    assert BAD_MIXES[text] in line


def test_a_mix_names_its_kinds(tmp_path: Path) -> None:
    file = tmp_path / "mix.toml"
    file.write_text(
        "[[request]]\nweight = 3\nsampler = 'heun'\nsteps = 8\n\n[[request]]\nname = 'pair'\nn = 2\nseed = 7\n"
    )
    first, second = read_mix(file)
    assert (first.name, first.weight, first.body) == ("heun, 8 steps", 3.0, {"sampler": "heun", "steps": 8})
    assert (second.name, second.weight, second.images) == ("pair", 1.0, 2)
    seeds = {json.loads(one.payload)["seed"] for one in arrivals(Load(mix=(second,), requests=5))}
    assert seeds == {7}


def test_a_server_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    words = ("--requests", "2", "--out", str(tmp_path))
    with FakeServer() as server:
        server.key = "of-the-server"
        assert "--api-key must be one of the server's keys; got none (HTTP 401)" in refused(
            "bench-serve", server.url, *words
        )
        line = refused("bench-serve", server.url, *words, "--api-key", "of-another")
        assert "got another" in line
        assert "of-another" not in line
        assert ask("bench-serve", server.url, *words, "--api-key", server.key, "--rate", "50").code == 0
        assert server.key not in (tmp_path / "bench-serve.json").read_text()
        server.key = ""
        server.state |= {"ready": False, "why": "the engine is starting."}
        line = refused("bench-serve", server.url, *words, "--overwrite")
        assert line == "error[no-server]: the server must be ready; got 'one that is not'. the engine is starting."
        assert len(server.bodies) == 2
    assert "Connection refused." in refused("bench-serve", server.url, *words, "--overwrite")


def test_compare_takes_a_report_alone(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"kind": "pellucid-plan"}')
    words = ("bench-serve", "http://127.0.0.1:9", "--out", str(tmp_path), "--compare")
    assert "--compare must be a bench-serve.json; got 'pellucid-plan'" in refused(*words, str(tmp_path / "a.json"))
    assert "must be a file that exists" in refused(*words, str(tmp_path / "b.json"))


# --- A real server ------------------------------------------------------------------------------------------------


def test_a_real_server_under_load(server: RunningServer, tmp_path: Path) -> None:
    mix = "".join(f"[[request]]\nprompt = 'a red star'\nsampler = 'euler'\nsteps = {steps}\n" for steps in (2, 3, 4))
    (tmp_path / "mix.toml").write_text(mix)
    words = ("--rate", "5", "--requests", "10", "--mix", str(tmp_path / "mix.toml"), "--out", str(tmp_path / "out"))
    answer = ask("bench-serve", server.address, *words, "--json")
    assert answer.code == 0
    found = answer.json
    assert not {"answers", "samples"} & found.keys()  # those are in the file
    assert found["all"]["ok"] == found["images"] == 10
    assert set(found["kinds"]) == {"euler, 2 steps", "euler, 3 steps", "euler, 4 steps"}
    parts = {part: one["mean"] for part, one in found["all"]["split"].items()}
    assert sum(parts.values()) == pytest.approx(found["all"]["from_sending"]["mean"], abs=1e-3)  # of four digits each
    assert min(parts[name] for name in ("encode", "denoise", "decode")) > 0
    assert found["server_load"]["images_per_step"] >= 1
    assert (tmp_path / "out" / "bench-serve.png").stat().st_size > 10_000
