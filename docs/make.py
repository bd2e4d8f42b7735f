"""Measures again and writes the pages of docs/results that hold measured tables.

make docs        (or: .venv/bin/python docs/make.py)
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.progress import track

from pellucid.core.samplers import REGISTRY

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
sys.path.insert(0, str(ROOT / "tests" / "laws"))

from orders import BOTTOM, SETUPS, TOP, Setup, error, measured_order  # noqa: E402

MADE = "<!-- made by docs/make.py: do not edit -->\n"
CURVATURE_STEPS = (6, 8, 10, 15, 20, 30, 50, 100, 200)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def orders() -> str:
    rows = []
    for setup in track(SETUPS, description="orders"):
        options = ", ".join(f"{k} {v}" for k, v in setup.options.items()) or "default"
        calls = "1" if setup.sampler in ("plms", "pndm") else str(REGISTRY[setup.sampler].calls)
        rows.append(
            [
                f"`{setup.sampler}`",
                options + (" (flow)" if setup.flow else ""),
                str(setup.claimed),
                f"{measured_order(setup):.2f}",
                f"{error(setup, 20):.1e}",
                f"{error(setup, 96):.1e}",
                calls,
            ]
        )
    head = ["sampler", "options", "claimed", "measured", "error at 20 steps", "error at 96 steps", "calls a step"]
    return f"""{MADE}# The order of every deterministic sampler, measured

A Gaussian mixture in four dimensions has an exact denoiser. From sigma {TOP:g} to sigma {BOTTOM:g}, on a grid that is
even in λ, each sampler is compared with classical Runge-Kutta of order 4 in 3,000 steps, which shares no code with the
samplers. The order is the slope of the error between 96 and 192 steps; the error is relative.

Read with care: `claimed` is what the formula promises on this grid. PLMS, PNDM and iPNDM use the coefficients of an
even grid and start at first order, which leaves 2. `dpm_fast` ends with a first- or second-order step. UniPC gains one
order from its corrector. Small steps on a smooth, unguided density are not a guided image model at ten steps: order
says how fast the error falls, not which sampler is best for your model.

Made by `make docs` (`docs/make.py`); the same measurement is a test, `tests/laws/test_order.py`.

{table(head, rows)}"""


def third_order() -> str:
    whole, half = Setup("dpmpp_3m", 3), Setup("dpmpp_3m", 2, {"curvature_scale": 0.5})
    second = Setup("dpmpp_2m", 2)
    rows = []
    for steps in track(CURVATURE_STEPS, description="third order"):
        a, b, c = (error(s, steps) for s in (second, half, whole))
        rows.append([str(steps), f"{a:.2e}", f"{b:.2e}", f"{c:.2e}", f"{b / c:.1f}"])
    head = ["steps", "DPM++ 2M", "DPM++ 3M, published form", "DPM++ 3M, here", "published / here"]
    return f"""{MADE}# DPM++ 3M: half of a derivative was missing

Third-order DPM-Solver++ fits a parabola through the last three predictions. Its weight of the curvature multiplies the
*second derivative* of the prediction. The published code, and diffusers and k-diffusion after it, passes the second
*divided difference*, which is half of the second derivative (`D2` in `multistep_dpm_solver_third_order_update`, `d2` in
`sample_dpmpp_3m_sde`). The table still keeps the marginal law, and images look right. The order law sees it: the
published form measures {measured_order(half):.2f}, with the whole derivative it measures {measured_order(whole):.2f}.

Relative error on the exact denoiser of [orders.md](orders.md):

{table(head, rows)}
Pellucid's exact dialect uses the whole derivative in `dpmpp_3m`, `dpmpp_3m_sde` and `dpm_multistep` of order 3. The
dialects of diffusers, k-diffusion and ComfyUI keep the published form (`curvature_scale=0.5`). Whether the difference
shows in images of a guided network at few steps is not measured here.

Made by `make docs`; the claim is a test, `test_third_order_needs_the_whole_second_derivative`.
"""


def samplers() -> str:
    rows = []
    for entry in REGISTRY.values():
        options = ", ".join(f"{k}={v}" for k, v in entry.options().items()) or "none"
        noise = "no" if entry.deterministic else "yes"
        rows.append(
            [
                f"`{entry.name}`",
                entry.title,
                entry.family,
                str(entry.order),
                noise,
                str(entry.calls),
                entry.suits,
                entry.paper,
                options,
            ]
        )
    head = ["name", "title", "family", "order", "noise", "calls a step", "suits", "paper", "options"]
    return f"""{MADE}# The samplers

{len(REGISTRY)} samplers. `pellucid samplers NAME` shows one with all its other names; the order of the deterministic
ones is [measured](orders.md).

{table(head, rows)}"""


def main() -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name, page in (("orders.md", orders()), ("third-order.md", third_order()), ("samplers.md", samplers())):
        (RESULTS / name).write_text(page, encoding="utf-8")
        print(f"wrote docs/results/{name}")


if __name__ == "__main__":
    main()
