"""Fronts, knees and ranks: against brute force, on curves whose knee is known, and how sure they are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.core.compile import compile_plan
from pellucid.core.errors import PellucidError
from pellucid.evidence.statistics import front, knee, knee_of
from pellucid.evidence.study.samplers_results import MEASURES, Column, Latency
from pellucid.evidence.study.samplers_verdict import comparison_of, ranking, verdict
from pellucid.evidence.study.setups import SamplerCell, SamplerSetup

NUMBERS = st.floats(0.01, 100, allow_nan=False)
STEPS = (5, 8, 10, 20, 30, 50, 100)


@given(st.lists(st.tuples(st.sampled_from([1.0, 2.0, 5.0, 9.0]), NUMBERS), min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_the_front_is_what_nothing_beats(cells: list[tuple[float, float]]) -> None:
    costs, losses = zip(*cells, strict=True)
    kept = front(costs, losses)

    def beaten(i: int) -> bool:
        return any(
            costs[j] <= costs[i] and losses[j] <= losses[i] and (costs[j], losses[j]) != (costs[i], losses[i])
            for j in range(len(cells))
        )

    wanted = {(costs[i], losses[i]) for i in range(len(cells)) if not beaten(i)}
    assert {(costs[i], losses[i]) for i in kept} == wanted
    assert [costs[i] for i in kept] == sorted(costs[i] for i in kept)
    assert len(kept) == len(wanted)  # of equals one


def test_what_is_not_finite_is_on_no_front() -> None:
    assert front([1, 2, 3], [math.nan, 5.0, math.inf]) == [1]
    assert front([math.nan, 2], [1.0, 5.0]) == [1]
    assert knee([1, 2], [math.nan, math.nan]) is None
    with pytest.raises(PellucidError, match="costs, losses"):
        front([1, 2], [1.0])


@given(scale=NUMBERS, shift=st.floats(-50, 50), unit=NUMBERS, order=st.sampled_from([1.0, 2.0, 3.0]))
@settings(max_examples=60, deadline=None)
def test_the_knee_has_no_units(scale: float, shift: float, unit: float, order: float) -> None:
    """Another unit of cost, another scale or origin of the loss: the same knee."""
    losses = np.array([s**-order for s in STEPS])
    found = knee(STEPS, losses)
    assert knee(np.array(STEPS) * unit, scale * losses + shift) == found


def test_the_knee_of_a_power_law_is_where_its_slope_is_the_mean_one() -> None:
    """Loss 1/n over log n: the slope equals the chord's at n = log(b/a) / (1/a − 1/b)."""
    n = np.geomspace(5, 100, 400)
    wanted = math.log(20) / (1 / 5 - 1 / 100)
    assert n[knee(n, 1 / n)] == pytest.approx(wanted, rel=0.01)


def test_a_front_of_one_or_two() -> None:
    assert knee([5, 10, 20], [1.0, 1.0, 1.0]) == 0  # more steps gain nothing
    assert knee([5, 10], [1.0, 0.5]) == 1
    assert knee([5, 10, 20], [3.0, 2.5, 0.0]) == 2  # a front that bends the other way has no knee: the best is taken


@pytest.mark.parametrize(
    ("calls", "losses", "taken", "beyond"),
    [
        ((5, 10, 20), (1.0, 0.3, 0.2), 1, "less"),
        ((5, 10, 20, 50), (1.0, 0.5, 0.5, 0.5), 1, "nothing"),
        ((5, 10, 20), (1.0, 1.0, 1.0), 0, "nothing"),
        ((2, 4, 8), (1.0, 0.8, 0.2), 2, "more"),  # the gain grows up to the end
        ((5, 10), (1.0, 0.5), 1, "more"),
        ((5, 10, 20), (1.0, 0.5, math.nan), 1, "more"),  # what is not finite says nothing
        ((8, 8), (1.0, 0.5), 1, "unknown"),
    ],
)
def test_the_end_of_the_range_is_no_knee(calls: Any, losses: Any, taken: int, beyond: str) -> None:
    made = knee_of(calls, losses, np.array(losses)[:, None])
    assert (made.cell, made.beyond, made.found) == (taken, beyond, beyond in ("less", "nothing"))
    held = [SamplerCell(SamplerSetup("ddim"), n, n) for n in calls]
    found = verdict(held, column(list(losses), 1e-9), [Latency(())] * len(held), None, None)
    said = found.sentence
    assert said.startswith(f"Use ddim with {calls[taken]} steps: ")
    assert ("at the knee" in said, "No knee" in said, found.place(taken) == "knee") == (
        made.found,
        not made.found,
        made.found,
    )
    assert ("a doubling of the calls gains less" in said) == (beyond == "less")
    assert ("still improve" in said) == (beyond == "more")
    assert ("easure more steps" in said) == (not made.found)


def test_how_sure_a_knee_is() -> None:
    losses = np.array([1.0 / s for s in STEPS])
    random = np.random.default_rng(0)

    def spread(noise: float) -> Any:
        return knee_of(STEPS, losses, losses[:, None] * np.exp(noise * random.standard_normal((len(STEPS), 500))))

    sure, unsure = spread(0.001), spread(0.4)
    assert sure.cost.value == sure.cost.low == sure.cost.high == STEPS[sure.cell]
    assert sure.shares == {sure.cell: 1.0}
    cost = unsure.cost
    assert cost.low < cost.value <= cost.high or cost.low <= cost.value < cost.high
    assert sum(unsure.shares.values()) == pytest.approx(1.0)
    assert next(iter(unsure.shares.values())) == max(unsure.shares.values())


# --- ranks and the sentence --------------------------------------------------------------------------------------


def cells(calls: int = 1, names: tuple[str, ...] = ("ddim", "heun")) -> list[SamplerCell]:
    """`calls` a step for the second sampler."""
    return [SamplerCell(SamplerSetup(name), s, s * (calls if name == "heun" else 1)) for name in names for s in STEPS]


def column(values: list[float], noise: float = 0.01, name: str = "distance") -> Column:
    held = np.array(values)
    drawn = held[:, None] * np.exp(noise * np.random.default_rng(1).standard_normal((len(held), 300)))
    low, high = np.quantile(drawn, [0.025, 0.975], axis=1)
    return Column(MEASURES[name], held, low, high, drawn)


def test_samplers_are_compared_at_the_same_number_of_calls() -> None:
    """Both have error 1/calls; the second calls twice a step. By steps it would look twice as good."""
    both = cells(calls=2)
    found = ranking(both, column([1 / cell.nfe for cell in both], noise=1e-6))
    assert {one.sampler for one in found} == {"ddim", "heun"}
    assert found[1].behind.value == pytest.approx(1.0, abs=1e-2)


def test_the_first_is_first_by_the_factor_that_it_is() -> None:
    both = cells()
    found = ranking(both, column([1 / c.nfe * (1 if c.setup.sampler == "heun" else 1.5) for c in both]))
    assert [one.sampler for one in found] == ["heun", "ddim"]
    assert found[0].first == 1.0
    value, low, high = found[1].behind.value, found[1].behind.low, found[1].behind.high
    assert value == pytest.approx(1.5, rel=1e-6)
    assert low < value < high
    words = comparison_of(found, column([1.0] * len(both)))
    assert words.startswith("heun comes first over the whole range (in 100 % of resamples), then ddim, whose distance")
    assert "1.50 (" in words


def test_what_cannot_be_told_apart_is_said_so() -> None:
    both = cells()
    given = column([1 / c.nfe * (1 if c.setup.sampler == "heun" else 1.001) for c in both], noise=0.5)
    assert "not distinguishable" in comparison_of(ranking(both, given), given)


def test_more_may_be_better() -> None:
    both = cells()
    given = column([20 + c.nfe / 100 + (c.setup.sampler == "heun") for c in both], 1e-4, "image_text")
    found = ranking(both, given)
    assert [one.sampler for one in found] == ["heun", "ddim"]
    assert found[1].behind.value == pytest.approx(1.0, abs=1e-6)


def test_shares_are_said_in_percent() -> None:
    both = cells()
    given = column([0.4] * len(both), 1e-9, "right")
    assert (
        comparison_of(ranking(both, given), given)
        == "ddim and heun come first over the whole range, with the same figures."
    )
    apart = column([0.4 - 0.1 * (c.setup.sampler == "ddim") for c in both], 1e-9, "right")
    assert ", then ddim, behind by 10 (10 to 10) % of images that are all right." in comparison_of(
        ranking(both, apart), apart
    )
    said = verdict(both, given, [Latency(())] * len(both), None, None).sentence
    assert "give 40 (40 to 40) % of images that are all right, at the knee" in said


def test_one_sentence_and_what_to_paste() -> None:
    both = cells()
    times = [Latency((cell.nfe / 100, cell.nfe / 90, cell.nfe / 110)) for cell in both]
    given = column([1 / c.nfe ** (2 if c.setup.sampler == "heun" else 1) for c in both], noise=1e-3)
    found = verdict(both, given, times, 4.0, 'scenes-128 "…"')
    assert found.knee is not None
    pick = both[found.knee.cell]
    assert pick.setup.sampler == "heun"
    assert found.sentence.startswith(f"Use heun with {pick.steps} steps: {pick.nfe} model calls, ")
    assert found.sentence.count(".") - found.sentence.count("0.") >= 1
    assert found.sentence.endswith(".")
    assert "\n" not in found.sentence
    assert found.words == f'pellucid sample scenes-128 "…" --sampler heun --steps {pick.steps} --guidance "4.0"'
    assert found.call == {"sampler": "heun", "steps": pick.steps, "guidance": 4.0}
    assert set(found.by_calls) == set(found.by_seconds)  # the same price a call


def test_of_two_names_for_one_sampler_the_first_is_taken() -> None:
    """Their figures differ by rounding, which must not decide who is on the front."""
    both = cells()
    given = column([1 / c.nfe * (1 - 1e-7 * (c.setup.sampler == "heun")) for c in both])
    drawn = np.concatenate([given.drawn[: len(STEPS)]] * 2)  # type: ignore[index]
    drawn[len(STEPS) :] *= 1 - 1e-7
    found = verdict(both, replace(given, drawn=drawn), [Latency(())] * len(both), None, None)
    assert {both[i].setup.sampler for i in found.by_calls} == {"ddim"}
    assert found.knee is not None
    assert {both[i].setup.sampler for i in found.knee.shares} == {"ddim"}


def test_the_sentence_and_the_comparison_name_one_sampler() -> None:
    """Of two names for one sampler the second has the smaller figure by rounding; nobody is told to use the first then
    and that the second is better."""
    both = cells(names=("ddim", "euler"))
    given = column([1 / c.nfe * (1 - 1e-4 * (c.setup.sampler == "euler")) for c in both])
    drawn = np.concatenate([given.drawn[: len(STEPS)], given.drawn[: len(STEPS)] * (1 - 1e-4)])  # type: ignore[index]
    found = verdict(both, replace(given, drawn=drawn), [Latency(())] * len(both), None, None)
    assert found.sentence.startswith("Use ddim with ")
    assert found.comparison == "ddim and euler come first over the whole range, with the same figures."


def test_another_sampler_than_the_first_is_recommended_with_its_reason() -> None:
    both = cells()
    slow = {5: 1.0, 10: 0.9, 20: 0.1, 50: 0.01}
    values = [0.5 if c.setup.sampler == "heun" else slow.get(c.nfe, 0.01) for c in both]
    found = verdict(both, column(values, 1e-3), [Latency(())] * len(both), None, None)
    pick = both[found.knee.cell]  # type: ignore[union-attr]
    other = found.ranking[0].sampler != pick.setup.sampler
    assert other == ("nothing that was asked is better than" in found.comparison)


def test_a_plan_file_is_in_the_verdict_under_its_own_name(tmp_path: Path) -> None:
    file = tmp_path / "plans/8.json"
    file.parent.mkdir()
    file.write_text(compile_plan("ddim", steps=8).to_json())
    setup = SamplerSetup.parse(str(file))
    both = [*cells(), SamplerCell(setup, 8, 8)]
    values = [1 / c.nfe * (0.25 if c.setup.file else 1 if c.setup.sampler == "heun" else 2) for c in both]
    found = verdict(both, column(values, 1e-3), [Latency(())] * len(both), None, 'scenes-128 "…"')
    assert "#" not in found.sentence + found.comparison
    about = f"{file}: 0.0312 (0.0312 to 0.0313) with 8 calls, 0.25 (0.25 to 0.25) times that of heun, the best"
    assert about in found.comparison
    assert found.comparison.endswith("of the samplers at as many calls.")
    alone = verdict([SamplerCell(setup, 8, 8)], column([0.1]), [Latency(())], None, None)
    assert "no other sampler was measured at 8 calls to compare it with." in alone.comparison


def test_times_that_are_missing_leave_the_front_of_calls() -> None:
    both = cells()
    found = verdict(both, column([1 / c.nfe for c in both]), [Latency(())] * len(both), None, None)
    assert found.by_calls
    assert not found.by_seconds
    assert found.knee_seconds is None
    assert found.words == ""
    assert " s an image" not in found.sentence


def test_nothing_finite_recommends_nothing() -> None:
    both = cells()
    found = verdict(both, column([math.nan] * len(both)), [Latency(())] * len(both), None, None)
    assert found.knee is None
    assert "No sampler" in found.sentence
    assert found.ranking == []


@pytest.mark.parametrize(
    ("text", "sampler", "grid", "options"),
    [
        ("ddim", "ddim", None, {}),
        ("DPM++ 2M Karras", "dpmpp_2m", "karras", {}),
        ("dpmpp_2m:karras", "dpmpp_2m", "karras", {}),
        ("euler_a:exponential:eta=0.5", "euler_a", "exponential", {"eta": 0.5}),
        ("ddim:eta=1", "ddim", None, {"eta": 1.0}),
    ],
)
def test_words_of_a_sampler(text: str, sampler: str, grid: str | None, options: dict[str, Any]) -> None:
    found = SamplerSetup.parse(text)
    assert (found.sampler, found.grid, dict(found.options)) == (sampler, grid, options)
    assert SamplerSetup.parse(found.text) == found
    told = found.asks(7)
    assert told == {
        "sampler": sampler,
        "steps": 7,
        **({"grid": grid} if grid else {}),
        **({"options": options} if options else {}),
    }


def test_latency_is_a_median_with_quartiles() -> None:
    one = Latency((1.0, 2.0, 3.0, 4.0, 100.0))
    assert one.estimate.value == 3.0
    assert one.estimate.ends == (2.0, 4.0)
    drawn = one.drawn(2000)
    assert set(np.unique(drawn)) <= {1.0, 2.0, 3.0, 4.0, 100.0}
    assert np.mean(drawn == 3.0) == pytest.approx(0.37, abs=0.05)  # of 3,125 samples with repetition 1,141 have it
