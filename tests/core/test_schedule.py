"""Schedules: known values, one taxonomy, time ↔ level both ways, shifts, and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid import PellucidError
from pellucid.core import schedule as S
from pellucid.core.schedule import Level, in_frame

TABLED = ("linear", "scaled_linear", "cosine", "sqrt_beta", "sqrt_alpha_bar", "sigmoid", "laplace", "exponential")
CONTINUOUS = ("vp_linear", "vp_cosine", "edm", "flow")
EVERY = {
    **{name: S.make(name) for name in S.names()},
    **{f"{name}+zero_snr": S.make(name, zero_snr=True) for name in TABLED},
    "flow shift 3": S.make("flow", shift=3.0),
    "edm atan": S.make("edm", c_noise="atan"),
    "edm sigma": S.make("edm", c_noise="sigma"),
    "trained": S.make("trained", betas=[0.1, 0.2, 0.3, 0.4]),
}
ZERO = tuple(f"{name}+zero_snr" for name in TABLED)


def test_the_names_are_these() -> None:
    assert S.names() == (*TABLED, *CONTINUOUS)


# --- known values ----------------------------------------------------------------------------------------------


def test_linear_beta_is_that_of_ddpm() -> None:
    betas = S.linear().betas
    assert betas[0] == 1e-4  # Ho et al. 2020, section 4
    assert betas[-1] == 0.02
    assert np.allclose(np.diff(betas), (0.02 - 1e-4) / 999, rtol=1e-9)


def test_scaled_linear_is_stable_diffusions() -> None:
    schedule = S.scaled_linear()
    assert np.allclose(np.diff(np.sqrt(schedule.betas)), np.diff(np.sqrt(schedule.betas))[0], rtol=1e-9)
    assert schedule.betas[[0, -1]] == pytest.approx([0.00085, 0.012], rel=1e-12)
    # the sigma range that k-diffusion and its users quote for Stable Diffusion 1
    assert schedule.sigma_range == pytest.approx((0.0292, 14.6146), abs=5e-5)


def test_cosine_follows_its_curve_until_the_cap() -> None:
    schedule = S.cosine()

    def curve(u: np.ndarray) -> np.ndarray:  # Nichol and Dhariwal 2021, eq. 17
        return np.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2

    assert schedule.betas.max() == 0.999
    assert int((schedule.betas == 0.999).sum()) == 1  # the cap binds at the last time alone
    u = np.arange(1, 1000) / 1000
    assert schedule.alpha_bar[:-1] == pytest.approx(curve(u) / curve(np.zeros(1)), rel=1e-9)


def test_sqrt_alpha_bar_is_diffusion_lms() -> None:
    schedule = S.sqrt_alpha_bar()
    u = np.arange(1, 1000) / 1000  # the last ᾱ would be below 0 and is capped
    wanted = (1 - np.sqrt(u + 1e-4)) / (1 - math.sqrt(1e-4))  # ᾱ = 1 − √(t/T + 1e-4), relative to time 0
    assert schedule.alpha_bar[:-1] == pytest.approx(wanted, rel=1e-9)


def test_sqrt_beta_is_compvis_sqrt() -> None:
    assert S.sqrt_beta().betas ** 2 == pytest.approx(np.linspace(1e-4, 0.02, 1000), rel=1e-12)
    assert S.make("sqrt") == S.sqrt_beta()


def test_sigmoid_beta() -> None:
    betas = S.sigmoid().betas
    assert betas[0] == pytest.approx(1e-4 + (0.02 - 1e-4) / (1 + math.exp(6)), rel=1e-12)
    assert betas + betas[::-1] == pytest.approx(np.full(1000, 0.02 + 1e-4), rel=1e-12)  # odd about the middle


def test_laplace_snr() -> None:
    schedule = S.laplace()
    # at the middle of time log(1 − 0 + 1e-6) ≈ 0, so SNR is 1 and diffusers' ᾱ is √½; ᾱ(0) is the curve's own start
    start = math.sqrt(1 / (1 + math.exp(0.5 * math.log(1e-6))))
    assert schedule.alpha_bar[499] == pytest.approx(math.sqrt(0.5) / start, rel=1e-5)


def test_exponential_alpha_bar() -> None:
    schedule = S.exponential()
    assert schedule.alpha_bar == pytest.approx(np.exp(-12.0 * np.arange(1, 1001) / 1000), rel=1e-9)


def test_continuous_vp_follows_song() -> None:
    schedule = S.vp_linear()
    u = np.linspace(1e-3, 1, 50)
    alpha_bar = np.exp(-19.9 * u**2 / 2 - 0.1 * u)  # Song et al. 2021, eq. 33 with β from 0.1 to 20
    ratio = schedule.ratio_at(u * 999)
    assert 1 / (1 + ratio**2) == pytest.approx(alpha_bar, rel=1e-10)


def test_vp_cosine_is_the_quarter_circle() -> None:
    schedule = S.vp_cosine()
    for u in (0.01, 0.3, 0.77, 0.999):
        level = schedule.level(u)
        assert (level.alpha, level.sigma) == pytest.approx((math.cos(math.pi * u / 2), math.sin(math.pi * u / 2)))
    assert schedule.level(1.0) == Level(0.0, 1.0)


@pytest.mark.parametrize(
    ("c_noise", "told"),
    [
        ("log", lambda s: math.log(s) / 4),
        ("atan", lambda s: math.atan(s) * 2 / math.pi),
        ("sigma", lambda s: s),
    ],
)
def test_edm_tells_the_network_its_c_noise(c_noise: str, told) -> None:
    schedule = S.EDM(c_noise=c_noise)
    assert schedule.span == pytest.approx((told(0.002), told(80.0)))
    assert schedule.time(Level(1.0, 3.0)) == pytest.approx(told(3.0))
    assert schedule.level(told(3.0)).sigma == pytest.approx(3.0)


def test_flow_time_is_a_thousand_sigma() -> None:
    schedule = S.flow()
    assert schedule.level(250.0) == Level(0.75, 0.25)
    assert schedule.level(1000.0) == Level(0.0, 1.0)
    assert schedule.sigma_range == pytest.approx((0.001, 1.0))


# --- one taxonomy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_beta_alpha_snr_and_lam_say_the_same(name: str) -> None:
    schedule = EVERY[name]
    table = schedule.table()
    assert np.all(np.diff(table["time"]) > 0)
    assert table["beta"] + table["alpha"] == pytest.approx(np.ones(len(table["time"])), abs=1e-15)
    assert np.cumprod(table["alpha"]) == pytest.approx(table["alpha_bar"], rel=1e-9, abs=1e-300)
    finite = table["alpha_bar"] > 0
    bar, snr = table["alpha_bar"][finite], table["snr"][finite]
    assert snr / (1 + snr) == pytest.approx(bar, rel=1e-12)
    assert 0.5 * np.log(snr) == pytest.approx(table["lam"][finite], rel=1e-12, abs=1e-12)
    if not finite.all():
        assert table["snr"][-1] == 0
        assert table["lam"][-1] == -math.inf
        assert table["beta"][-1] == 1


@pytest.mark.parametrize("name", TABLED)
def test_the_table_gives_back_the_betas(name: str) -> None:
    # 1 − ᾱ_t/ᾱ_{t−1} loses the digits that 1 − β has not: 1e-12 absolute is a hundred roundings of ᾱ near 1
    assert EVERY[name].table()["beta"] == pytest.approx(EVERY[name].betas, abs=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_noise_rises_with_time(name: str) -> None:
    schedule = EVERY[name]
    low, high = schedule.span
    ratios = schedule.ratio_at(np.linspace(low, high, 4001))
    assert np.all(ratios > 0)
    assert np.all(np.diff(ratios[:-1]) > 0)
    assert ratios[-1] > ratios[-2]


@pytest.mark.parametrize("name", EVERY)
def test_a_level_keeps_its_frame(name: str) -> None:
    schedule = EVERY[name]
    norm = {"vp": lambda v: math.hypot(v.alpha, v.sigma), "ve": lambda v: v.alpha, "flow": lambda v: v.alpha + v.sigma}
    for time in np.linspace(*schedule.span, 7):
        assert norm[schedule.frame](schedule.level(float(time))) == pytest.approx(1.0, abs=1e-15)


@given(lam=st.floats(-20, 20), frames=st.permutations(["vp", "ve", "flow"]))
@settings(max_examples=100, deadline=None)
def test_frames_only_rescale(lam: float, frames: list) -> None:
    level = in_frame(math.exp(-lam), frames[0])
    assert level.lam == pytest.approx(lam, abs=1e-12)
    assert level.to(frames[1]).to(frames[0]).alpha == pytest.approx(level.alpha, rel=1e-14)


def test_levels_at_the_two_ends() -> None:
    assert Level(0.0, 1.0).ratio == math.inf
    assert Level(0.0, 1.0).lam == -math.inf
    assert Level(1.0, 0.0).lam == math.inf
    assert in_frame(math.inf, "vp") == in_frame(math.inf, "flow") == Level(0.0, 1.0)
    with pytest.raises(PellucidError) as refused:
        in_frame(math.inf, "ve")
    assert refused.value.code == "alpha-zero"


# --- time ↔ level ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
@given(part=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_time_to_level_and_back(name: str, part: float) -> None:
    schedule = EVERY[name]
    low, high = schedule.span
    time = low + part * (high - low)
    # 45 roundings of a time as large as the span's: the worst of 200,000 times of any schedule was 9e-16
    assert schedule.time(schedule.level(time)) == pytest.approx(time, abs=1e-14 * max(abs(low), abs(high)))


@pytest.mark.parametrize("name", ZERO)
@given(part=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_the_last_cell_of_zero_terminal_snr_and_back(name: str, part: float) -> None:
    schedule = EVERY[name]
    time = schedule.span[1] - 1 + part
    ratio = schedule.ratio_at(time)
    assert schedule.time_at(ratio) == pytest.approx(time, abs=1e-11)  # times up to 999, as above
    assert ratio > schedule.ratio_at(schedule.span[1] - 1) or part < 1e-9


@pytest.mark.parametrize("name", EVERY)
def test_arrays_and_numbers_agree(name: str) -> None:
    schedule = EVERY[name]
    times = np.linspace(*schedule.span, 11)
    assert [float(schedule.ratio_at(t)) for t in times] == schedule.ratio_at(times).tolist()
    ratios = schedule.ratio_at(times)
    assert [float(schedule.time_at(r)) for r in ratios] == schedule.time_at(ratios).tolist()


@pytest.mark.parametrize("name", [n for n in EVERY if not n.startswith("flow")])
def test_outside_the_schedule_the_nearest_end_answers(name: str) -> None:
    schedule = EVERY[name]
    low, high = schedule.ratio_at(np.array(schedule.span))
    assert float(schedule.time_at(low / 10)) == pytest.approx(schedule.span[0], abs=1e-12)
    if math.isfinite(high):
        assert float(schedule.time_at(high * 10)) == pytest.approx(schedule.span[1], rel=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_sigma_is_the_one_that_people_quote(name: str) -> None:
    schedule = EVERY[name]
    ratios = schedule.ratio_at(schedule.times(50))
    sigmas = schedule.sigma_of(ratios)
    if schedule.frame == "flow":
        assert sigmas[:-1] == pytest.approx(ratios[:-1] / (1 + ratios[:-1]), rel=1e-12)
        assert (ratios[-1], sigmas[-1]) == (math.inf, 1.0)
    else:
        assert np.array_equal(sigmas, ratios)
    assert np.allclose(schedule.ratio_of_sigma(sigmas), ratios, rtol=1e-9)


# --- zero terminal SNR -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLED)
def test_zero_terminal_snr_ends_at_nothing_and_keeps_the_first(name: str) -> None:
    plain, zero = EVERY[name], EVERY[f"{name}+zero_snr"]
    assert zero.alpha_bar[-1] == 0.0
    assert zero.level(zero.span[1]) == Level(0.0, 1.0)
    assert zero.alpha_bar[0] == pytest.approx(plain.alpha_bar[0], rel=1e-14)
    assert zero.zero_terminal
    assert not plain.zero_terminal
    # Lin et al. 2023, algorithm 1: √ᾱ is moved and stretched linearly
    root, wanted = np.sqrt(zero.alpha_bar), np.sqrt(plain.alpha_bar)
    line = (wanted - wanted[-1]) * wanted[0] / (wanted[0] - wanted[-1])
    assert root == pytest.approx(line, abs=1e-12)


@pytest.mark.parametrize("name", ZERO)
def test_zero_terminal_snr_carries_no_eps(name: str) -> None:
    assert EVERY[name].carries == ("v", "x0")


@pytest.mark.parametrize("name", CONTINUOUS)
def test_zero_terminal_snr_of_a_continuous_schedule_is_refused(name: str) -> None:
    with pytest.raises(PellucidError, match="discrete") as refused:
        S.make(name, zero_snr=True)
    assert refused.value.code == "zero-snr"


# --- flow shifts -----------------------------------------------------------------------------------------------


@given(u=st.floats(0, 1), shift=st.floats(0.1, 20))
@settings(max_examples=100, deadline=None)
def test_static_shift_multiplies_the_ratio(u: float, shift: float) -> None:
    # Esser et al. 2024, eq. 23: sigma/(1 − sigma) is multiplied by the shift
    sigma = float(S.flow(shift=shift).bend(u))
    assert sigma * (1 - u) == pytest.approx(shift * u * (1 - sigma), rel=1e-9, abs=1e-12)


def test_shift_leaves_the_two_ends() -> None:
    assert S.flow(shift=3.0).bend([0.0, 1.0]).tolist() == [0.0, 1.0]


def test_dynamic_shift_of_flux() -> None:
    # FLUX: mu is 0.5 at 256 tokens and 1.15 at 4096, linear between
    assert math.log(S.dynamic_shift(256)) == pytest.approx(0.5, abs=1e-12)
    assert math.log(S.dynamic_shift(4096)) == pytest.approx(1.15, abs=1e-12)
    assert math.log(S.dynamic_shift(2176)) == pytest.approx(0.825, abs=1e-12)
    assert S.flow(image_tokens=4096).shift == pytest.approx(math.exp(1.15))


def test_a_shift_given_twice_is_refused() -> None:
    with pytest.raises(PellucidError, match="twice") as refused:
        S.flow(shift=3.0, image_tokens=4096)
    assert refused.value.code == "shift-twice"


def test_stretched_terminal_moves_the_last_and_keeps_the_first() -> None:
    schedule = S.flow(terminal=0.1)
    stretched = schedule.stretch(np.array([1.0, 0.6, 0.2]))
    assert stretched == pytest.approx([1.0, 0.55, 0.1])
    assert S.flow().stretch(np.array([1.0, 0.2])).tolist() == [1.0, 0.2]


# --- as data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_a_schedule_survives_its_dictionary(name: str) -> None:
    schedule = EVERY[name]
    again = S.from_dict(S.to_dict(schedule))
    times = schedule.times(200)
    assert type(again) is type(schedule)
    assert np.array_equal(again.ratio_at(times), schedule.ratio_at(times))
    assert S.to_dict(again) == S.to_dict(schedule)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("squaredcos_cap_v2", "cosine"),
        ("sqrt_linear", "linear"),
        ("sqrt", "sqrt_beta"),
        ("exp", "exponential"),
        ("vp", "vp_linear"),
        ("ve", "edm"),
        ("rectified_flow", "flow"),
    ],
)
def test_other_peoples_names(alias: str, name: str) -> None:
    assert S.to_dict(S.make(alias)) == S.to_dict(S.make(name))


def test_num_train_sets_the_length() -> None:
    assert S.linear(num_train=100).num_train == 100
    assert len(S.linear(num_train=100).table()["beta"]) == 100
    assert S.flow().num_train is None
    assert len(S.flow().table(50)["beta"]) == 50


@pytest.mark.parametrize("name", S.names())
def test_schedules_compare_by_value(name: str) -> None:
    assert S.make(name) == S.make(name)
    assert hash(S.make(name)) == hash(S.make(name))
    assert S.make(name) != S.make("linear", num_train=123)


def test_a_single_training_time() -> None:
    """diffusers takes one; the schedule is then a point."""
    single = S.trained([0.1])
    assert (single.num_train, single.span) == (1, (0.0, 0.0))
    assert float(single.ratio_at(0.0)) == pytest.approx(math.sqrt(0.1 / 0.9))
    assert float(single.time_at(5.0)) == 0.0
    assert S.linear(num_train=1).betas.tolist() == [1e-4]


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: S.make("cosin"), "unknown-schedule"),
        (lambda: S.make("linear", beta_stop=0.02), "option"),
        (lambda: S.make(S.linear(), num_train=10), "option"),
        (lambda: S.linear(num_train=0), "num-train"),
        (lambda: S.linear(num_train=-5), "num-train"),
        (lambda: S.linear(num_train=10.0), "num-train"),
        (lambda: S.linear(num_train=10**9), "num-train"),
        (lambda: S.linear(beta_end=1.5), "betas"),
        (lambda: S.linear(beta_start=0.0), "betas"),
        (lambda: S.trained([]), "betas"),
        (lambda: S.trained([[0.1, 0.2]]), "betas"),
        (lambda: S.trained([0.1, math.nan, 0.2]), "betas"),
        (lambda: S.trained([0.1, 1.0, 0.2]), "betas"),
        (lambda: S.EDM(sigma_min=0.0), "sigmas"),
        (lambda: S.EDM(sigma_min=2.0, sigma_max=1.0), "sigmas"),
        (lambda: S.EDM(sigma_max=math.inf), "sigmas"),
        (lambda: S.EDM(c_noise="tan"), "option"),
        (lambda: S.flow(shift=0.0), "shift"),
        (lambda: S.flow(shift=-1.0), "shift"),
        (lambda: S.flow(shift=math.nan), "shift"),
        (lambda: S.flow(terminal=0.0), "terminal"),
        (lambda: S.flow(terminal=1.0), "terminal"),
    ],
)
def test_bad_input_is_refused_by_name(make, code: str) -> None:
    with pytest.raises(PellucidError, match=r"must (be|have)") as refused:
        make()
    assert refused.value.code == code


def test_an_unknown_schedule_lists_the_nearest() -> None:
    with pytest.raises(PellucidError, match=r"Nearest: .*cosine"):
        S.make("cosin")


def test_an_unknown_option_lists_the_known() -> None:
    with pytest.raises(PellucidError, match=r"Known: num_train, beta_start, beta_end"):
        S.make("linear", beta_stop=0.02)
