"""The orders that samplers are said to have. `docs/make.py` publishes what `test_order.py` checks.

How an order is measured is in `pellucid.evidence.study.oracle_orders`, which `pellucid study oracle` uses too.
"""

from __future__ import annotations

from typing import Any

from pellucid import samplers
from pellucid.evidence.study.oracle_orders import (
    ABOVE,
    ALWAYS_NOISY,
    BELOW,
    BOTTOM,
    COUNTS,
    MIXTURE,
    NO_ORDER,
    NOISE_OFF,
    REFERENCE_STEPS,
    SETTINGS,
    SPREAD,
    THIRDS,
    TOP,
    Case,
    Coordinates,
    OrderMeasurement,
    compiled,
    counts_of,
    ends,
    error_of,
    measure,
    reference_error,
    weak_error,
)

__all__ = [
    "ABOVE", "ALWAYS_NOISY", "BELOW", "BOTTOM", "COUNTS", "MIXTURE", "NOISE_OFF", "NO_ORDER", "REFERENCE_STEPS",
    "SETTINGS", "SPREAD", "THIRDS", "TOP", "Case", "Coordinates", "OrderMeasurement", "compiled", "counts_of", "ends",
    "error_of", "measure", "reference_error", "registered", "variants", "weak_cases", "weak_error",
]  # fmt: skip


def registered() -> list[Case]:
    """Every sampler with its default options, noise off, and the order of the registry."""
    return [
        Case(name, entry.order, NOISE_OFF.get(name, {}), counts_of(name))
        for name, entry in samplers.REGISTRY.items()
        if name not in (*ALWAYS_NOISY, *NO_ORDER)
    ]


def variants() -> list[Case]:
    """Options that change the order, and frames that must not."""
    cases: list[Case] = []
    for algorithm in ("dpmsolver++", "dpmsolver"):
        for solver in ("midpoint", "heun"):
            for order in (1, 2, 3):
                options = {"order": order, "algorithm": algorithm, "solver": solver}
                cases += [Case("dpm_multistep", order, options), Case("dpm_singlestep", order, options, THIRDS)]
    # the published third order takes half of the curvature: the peers' dialects keep it, and it costs an order
    cases.append(Case("dpm_multistep", 2, {"order": 3, "curvature_scale": 0.5}))
    for order in (1, 2, 3):
        # the corrector raises the order by one (Zhao et al. 2023, theorem 3.1)
        for variant in ("bh1", "bh2"):
            for predict_x0 in (True, False):
                options = {"order": order, "variant": variant, "predict_x0": predict_x0}
                cases.append(Case("unipc", order + 1, options))
        cases.append(Case("deis", order, {"order": order}))
    # a first-order last step errs by h² once: order 2, whatever the method
    cases += [Case("unipc", 2, {"order": order, "lower_order_final": True}) for order in (1, 2, 3)]
    for predictor in (1, 2, 3):
        for corrector in (1, 2, 3, 4):
            options = {"tau": 0.0, "predictor_order": predictor, "corrector_order": corrector}
            cases.append(Case("sa_solver", min(predictor + 1, corrector), options))
    for order in (1, 2, 3):
        options = {"tau": 0.0, "predict_x0": False, "predictor_order": order, "corrector_order": order}
        cases.append(Case("sa_solver", order, options))
    cases += [Case("lms", order, {"order": order}) for order in (1, 2, 3, 4)]
    # coefficients of an even grid: on a grid that is only smooth, order 2 at most
    cases += [Case("ipndm", min(order, 2), {"order": order}) for order in (1, 2, 3, 4)]
    cases += [
        Case("plms", 2, {"warm": False}),
        Case("gradient_estimation", 1, {"gamma": 1.0}),
        Case("gradient_estimation", 2, {"gamma": 1.5}),  # Adams-Bashforth
        Case("dpmpp_2m", 2, {"solver": "heun"}),
        Case("dpmpp_sde", 2, {"eta": 0.0, "r": 0.3}),
        # the calls that are left over after the groups of three make the last steps
        Case("dpm_fast", 2, {}, tuple(n + 1 for n in THIRDS)),
        Case("dpm_fast", 3, {}, tuple(n + 2 for n in THIRDS)),
    ]
    in_vp = {"ddim": 1, "euler": 1, "heun": 2, "plms": 2, "dpmpp_2m": 2, "dpmpp_3m": 3, "unipc": 3, "deis": 3}
    cases += [Case(name, order, {}, setting="vp") for name, order in in_vp.items()]
    # This path starts at sigma / alpha 19, where x0 moves already: the first-order first step caps multistep at 2.
    in_flow = {"flow_euler": 1, "ddim": 1, "flow_heun": 2, "heun": 2, "dpm2": 2, "dpmpp_2m": 2, "res_multistep": 2}
    in_flow |= {"dpmpp_3m": 2, "deis": 2, "lms": 2}
    return cases + [Case(name, order, {}, setting="flow") for name, order in in_flow.items()]


def weak_cases() -> list[Case]:
    """Stochastic samplers with their noise on: the order of the variance on a Gaussian."""
    claims: list[tuple[str, int, dict[str, Any]]] = [
        ("ddpm", 1, {}),
        ("euler_a", 1, {}),
        ("ddim", 1, {"eta": 1.0}),
        ("dpm2_a", 2, {}),
        ("dpmpp_2s_a", 2, {}),
        ("dpmpp_sde", 2, {}),
        ("dpmpp_2m_sde", 2, {}),
        ("dpmpp_3m_sde", 2, {}),  # three with the noise off: the history of a noisy path is rough
        ("dpm_multistep", 2, {"algorithm": "sde-dpmsolver"}),
        ("sa_solver", 2, {}),
        ("sa_solver", 2, {"tau_range": (0.0, 1.0)}),
        ("er_sde", 1, {"order": 1}),
        ("er_sde", 2, {"order": 2}),
        ("er_sde", 2, {}),
        ("edm_stochastic", 2, {"s_noise": 1.0}),
        ("restart", 2, {}),
        ("res_multistep", 1, {"eta": 1.0}),  # two with the noise off: the last slope is that of another noise
    ]
    return [Case(name, order, options) for name, order, options in claims]
