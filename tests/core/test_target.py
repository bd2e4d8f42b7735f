"""Targets: each is what its definition says, each pair converts both ways, and the two ends are limits or refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pellucid import PellucidError
from pellucid.core import target as T
from pellucid.core.schedule import Level, in_frame

FRAMES = ("vp", "ve", "flow")
CLEAN, BLIND = Level(1.0, 0.0), Level(0.0, 1.0)
DATA = 0.5  # EDM's sigma_data


def truth(target: str, x0: float, eps: float, level: Level) -> tuple[float, float]:
    """(x, the output of a perfect network) from the definitions in the papers, apart from the code under test."""
    a, s = level.alpha, level.sigma
    x = a * x0 + s * eps
    vp = math.hypot(a, s)
    edm = math.sqrt(s**2 + (DATA * a) ** 2)
    output = {
        "eps": lambda: eps,
        "x0": lambda: x0,
        "v": lambda: (a * eps - s * x0) / vp,  # Salimans and Ho 2022, with alpha² + sigma² = 1
        "flow": lambda: eps - x0,  # Liu et al. 2022: d/dsigma of (1 − sigma)·x0 + sigma·eps, in any frame
        "score": lambda: -eps / s,  # Song et al. 2021: ∇ log p(x | x0)
        "edm": lambda: (x0 - DATA**2 * a / edm**2 * x) * edm / (DATA * s),  # Karras et al. 2022, eq. 7 and table 1
    }[target]()
    return x, output


levels = st.builds(lambda lam, frame: in_frame(math.exp(-lam), frame), st.floats(-7, 7), st.sampled_from(FRAMES))
numbers = st.floats(-3, 3)


@pytest.mark.parametrize("target", T.TARGETS)
@given(x0=numbers, eps=numbers, level=levels)
@settings(max_examples=60, deadline=None)
def test_a_perfect_output_gives_back_x0(target: str, x0: float, eps: float, level: Level) -> None:
    x, out = truth(target, x0, eps, level)
    # x0 from eps divides by alpha: at λ = −7 a rounding of eps grows by e⁷ ≈ 1100
    assert T.change(out, target, "x0", x, level) == pytest.approx(x0, abs=1e-11)


@pytest.mark.parametrize("to", T.TARGETS)
@pytest.mark.parametrize("source", T.TARGETS)
@given(x0=numbers, eps=numbers, level=levels)
@settings(max_examples=30, deadline=None)
def test_every_pair_agrees_with_the_definitions(source: str, to: str, x0: float, eps: float, level: Level) -> None:
    x, out = truth(source, x0, eps, level)
    _, wanted = truth(to, x0, eps, level)
    # the worst pair, score → edm in the ve frame, grows a rounding by sigma² e⁷; values reach e⁷·3
    assert T.change(out, source, to, x, level) == pytest.approx(wanted, rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("to", T.TARGETS)
@pytest.mark.parametrize("source", T.TARGETS)
@given(out=numbers, x=numbers, level=levels)
@settings(max_examples=30, deadline=None)
def test_there_and_back(source: str, to: str, out: float, x: float, level: Level) -> None:
    """Any output comes back, also one that no perfect network would give."""
    there = T.change(out, source, to, x, level)
    back = T.change(there, to, source, x, level)
    size = max(1.0, abs(out), abs(x), abs(there))
    lost = gain(source, to, level) * abs(T.convert(to, source, level)[1]) + gain(to, source, level)
    assert back == pytest.approx(out, abs=4 * 2.0**-52 * size * lost)  # four roundings of what the way amplifies


def gain(source: str, to: str, level: Level) -> float:
    """How much the way through x0 may amplify a rounding: the sum of the sizes that it adds up."""
    k, c = T.to_x0(source, level), T.from_x0(to, level)
    return 1.0 + abs(c[0]) + abs(c[1]) * (abs(k[0]) + abs(k[1]))


@pytest.mark.parametrize("target", T.TARGETS)
@given(level=levels, sigma_data=st.floats(0.1, 2))
@settings(max_examples=40, deadline=None)
def test_from_x0_is_the_inverse_of_to_x0(target: str, level: Level, sigma_data: float) -> None:
    k_x, k_out = T.to_x0(target, level, sigma_data)
    c_x, c_0 = T.from_x0(target, level, sigma_data)
    assert k_out * c_0 == pytest.approx(1.0, rel=1e-12)
    assert k_x + k_out * c_x == pytest.approx(0.0, abs=1e-12 * max(1.0, abs(k_x)))


def test_sigma_data_is_read() -> None:
    level = in_frame(2.0, "ve")
    assert T.to_x0("edm", level, 1.0) == pytest.approx((0.2, 2 / math.sqrt(5)))
    assert T.to_x0("edm", level, 0.5) == pytest.approx((0.25 / 4.25, 1 / math.sqrt(4.25)))


def test_change_works_on_tensors_and_leaves_them() -> None:
    level = in_frame(0.7, "vp")
    x, out = torch.linspace(-1, 1, 8), torch.linspace(1, -2, 8)
    kept = out.clone()
    x0 = T.change(out, "eps", "x0", x, level)
    assert torch.allclose(x0, (x - level.sigma * out) / level.alpha, atol=1e-6)  # float32
    assert torch.equal(out, kept)


# --- the two ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["eps", "score"])
def test_pure_noise_determines_no_x0_from_eps_or_score(target: str) -> None:
    with pytest.raises(PellucidError, match="alpha 0") as refused:
        T.to_x0(target, BLIND)
    assert refused.value.code == "alpha-zero"


@pytest.mark.parametrize(
    ("target", "wanted"),
    [("x0", (0.0, 1.0)), ("v", (0.0, -1.0)), ("flow", (1.0, -1.0)), ("edm", (0.0, DATA))],
)
def test_targets_that_exist_at_pure_noise(target: str, wanted: tuple[float, float]) -> None:
    assert T.to_x0(target, BLIND) == pytest.approx(wanted)


@pytest.mark.parametrize("target", ["x0", "v", "flow", "edm"])
def test_pure_noise_is_the_limit_of_little_signal(target: str) -> None:
    # alpha 1e-9: coefficients are within 1e-8 of the limit
    assert T.to_x0(target, in_frame(1e9, "vp")) == pytest.approx(T.to_x0(target, BLIND), abs=1e-8)


@pytest.mark.parametrize("target", ["eps", "score", "v", "flow", "x0"])
def test_a_clean_x_is_its_own_x0(target: str) -> None:
    k_x, k_out = T.to_x0(target, CLEAN)
    if target == "x0":
        assert (k_x, k_out) == (0.0, 1.0)
    else:
        assert k_x == 1.0
        assert k_out == 0.0


@pytest.mark.parametrize("to", ["eps", "score", "v", "flow", "edm"])
def test_a_clean_x_determines_no_other_target(to: str) -> None:
    with pytest.raises(PellucidError, match="sigma 0") as refused:
        T.convert("x0", to, CLEAN)
    assert refused.value.code == "sigma-zero"


def test_v_and_eps_at_both_ends() -> None:
    assert T.convert("v", "eps", CLEAN) == (0.0, 1.0)  # v = alpha·eps − sigma·x0 = eps
    assert T.convert("eps", "v", CLEAN) == pytest.approx((0.0, 1.0))
    assert T.convert("v", "eps", BLIND) == (1.0, 0.0)  # x is eps


def test_flow_and_eps_at_both_ends() -> None:
    assert T.convert("flow", "eps", CLEAN) == (1.0, 1.0)  # eps = x0 + (eps − x0)
    assert T.convert("eps", "flow", CLEAN) == (-1.0, 1.0)
    assert T.convert("flow", "eps", BLIND) == (1.0, 0.0)


@pytest.mark.parametrize("source", ["x0", "v", "flow", "edm"])
def test_at_pure_noise_eps_is_x_whatever_the_network_says(source: str) -> None:
    assert T.convert(source, "eps", BLIND) == (1.0, 0.0)


@pytest.mark.parametrize("source", ["eps", "score"])
@pytest.mark.parametrize("to", ["x0", "v", "flow", "edm"])
def test_at_pure_noise_eps_and_score_give_nothing_else(source: str, to: str) -> None:
    with pytest.raises(PellucidError) as refused:
        T.convert(source, to, BLIND)  # each of these is made of x0 there, which eps does not know
    assert refused.value.code == "alpha-zero"


@pytest.mark.parametrize("source", ["x0", "v", "flow", "edm"])
@pytest.mark.parametrize("to", ["x0", "v", "flow", "edm"])
def test_conversions_at_pure_noise_are_limits(source: str, to: str) -> None:
    near, at = T.convert(source, to, in_frame(1e8, "vp")), T.convert(source, to, BLIND)
    assert near == pytest.approx(at, abs=1e-7)


@pytest.mark.parametrize(("source", "to"), [("v", "eps"), ("eps", "v"), ("flow", "eps"), ("eps", "flow")])
def test_conversions_at_a_clean_x_are_limits(source: str, to: str) -> None:
    near, at = T.convert(source, to, in_frame(1e-8, "vp")), T.convert(source, to, CLEAN)
    assert near == pytest.approx(at, abs=1e-7)


@pytest.mark.parametrize("target", T.TARGETS)
def test_nothing_to_convert(target: str) -> None:
    assert T.convert(target, target, BLIND) == (0.0, 1.0)


# --- levels that gradients flow through ------------------------------------------------------------------------


@pytest.mark.parametrize("target", T.TARGETS)
@pytest.mark.parametrize("which", [T.to_x0, T.from_x0])
def test_a_level_of_tensors_gives_the_same_numbers_and_their_slopes(target: str, which: Any) -> None:
    """Tuning descends on levels: the numbers are those of plain ones, the slopes those of differences."""
    at, step = (0.8, 0.6), 1e-6
    for k in range(2):
        pair = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in at]
        found = torch.as_tensor(which(target, Level(*pair))[k])  # type: ignore[arg-type]
        assert float(found.detach()) == pytest.approx(which(target, Level(*at))[k], rel=1e-14)
        if found.requires_grad:
            found.backward()
        for i, value in enumerate(pair):
            ends = [which(target, Level(*(v + s * step * (j == i) for j, v in enumerate(at))))[k] for s in (1, -1)]
            slope = 0.0 if value.grad is None else float(value.grad)
            assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-8)


# --- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "target"),
    [("epsilon", "eps"), ("sample", "x0"), ("v_prediction", "v"), ("flow_prediction", "flow"), ("score", "score")],
)
def test_diffusers_names(name: str, target: str) -> None:
    assert T.named(name) == target


@given(name=st.text(max_size=12))
@settings(max_examples=50, deadline=None)
def test_an_unknown_name_is_refused(name: str) -> None:
    assume(name not in (*T.TARGETS, *T.ALIASES))
    with pytest.raises(PellucidError, match="Nearest") as refused:
        T.named(name)
    assert refused.value.code == "unknown-target"
