"""Measures again and writes the pages of docs/results that hold measured tables.

make results     (or: .venv/bin/python docs/make.py). The site itself is `make docs`: docs/conf.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from rich.progress import track

from pellucid.core.samplers import REGISTRY

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
sys.path.insert(0, str(ROOT / "tests" / "laws"))

import orders as law  # noqa: E402

MADE = "<!-- made by docs/make.py: do not edit -->\n"
CURVATURE_STEPS = (6, 8, 10, 15, 20, 30, 50, 100, 200)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def order_row(found: law.OrderMeasurement) -> list[str]:
    case = found.case
    return [
        f"`{case.sampler}`",
        case.told or "default",
        str(case.order),
        f"{found.order:.2f}",
        f"{found.errors[0]:.1e}",
        f"{found.errors[-1]:.1e}",
        f"{found.calls_a_step:.2g}",
    ]


def orders() -> str:
    head = ["sampler", "options", "claimed", "measured", "error, fewest steps", "error, most steps", "calls per step"]
    own = [order_row(law.measure(case)) for case in track(law.registered(), description="orders")]
    variants = [order_row(law.measure(case)) for case in track(law.variants(), description="variants")]
    weak = [order_row(law.measure(case, law.weak_error)) for case in track(law.weak_cases(), description="noise on")]
    few, many = law.COUNTS[0], law.COUNTS[-1]
    off = law.reference_error(law.TOP, law.BOTTOM)
    return f"""{MADE}# The order of every sampler, measured

A Gaussian mixture in four dimensions has an exact denoiser. From sigma {law.TOP:g} to sigma {law.BOTTOM:g}, on a grid
that is even in λ, each sampler is compared with classical Runge-Kutta of order 4 in {law.REFERENCE_STEPS:,} steps, which
shares no code with the samplers and has an error of {off:.0e}. The order is the slope of the error between {law.COUNTS[-2]}
and {many} steps; the errors shown are relative, at {few} and at {many} steps. The two samplers that group their calls by
three take 18 to 576 steps, or as many as the table says.

Limitations:
- Order says how fast the error falls, not which sampler is best for your model. Small steps on a smooth, unguided
  density are not a guided image model at ten steps.
- Multistep methods begin with a first-order step, which in theory caps the order at 2. At sigma {law.TOP:g} that step
  is nearly exact, so the order of the method itself is measured. On the flow path below, which starts at sigma / alpha
  19, it is not: there `dpmpp_3m`, `deis` and `lms` measure 2.
- The last step to a clean image is first order in all of them; it is left out here.
- PLMS, PNDM and iPNDM use the coefficients of an even grid, which gives order 2 on this one. `dpm_fast` spends leftover
  calls on steps of a lower order. UniPC gains one order from its corrector. A lower-order last step
  (`lower_order_final`) gives order 2.

`make results` (`docs/make.py`) generates this page; a test makes the same measurement, `tests/laws/test_order.py`.

## As registered

Default options; stochastic samplers with their noise turned off.

{table(head, own)}
## Options and schedules

{table(head, variants)}
## With the noise on

The order of the variance of the result on a Gaussian of standard deviation {law.SPREAD:g}. Every state of such a run
is a sum of independent normal numbers with known coefficients, so the variance is computed exactly, without sampling.
This is one test function, so the true weak order may be lower. Errors are relative to the true variance.

{table(head, weak)}"""


def third_order() -> str:
    whole = law.Case("dpmpp_3m", 3, setting="edm80")
    half = law.Case("dpmpp_3m", 2, {"curvature_scale": 0.5}, setting="edm80")
    second = law.Case("dpmpp_2m", 2, setting="edm80")
    rows = []
    for steps in track(CURVATURE_STEPS, description="third order"):
        a, b, c = (law.error_of(law.compiled(case, steps)) for case in (second, half, whole))
        rows.append([str(steps), f"{a:.2e}", f"{b:.2e}", f"{c:.2e}", f"{b / c:.1f}"])
    head = ["steps", "DPM++ 2M", "DPM++ 3M, published form", "DPM++ 3M, here", "published / here"]
    orders_of = {name: law.measure(case).order for name, case in (("half", half), ("whole", whole))}
    return f"""{MADE}# DPM++ 3M: half of a derivative was missing

Third-order DPM-Solver++ fits a parabola through the last three predictions. Its curvature weight multiplies the
*second derivative* of the prediction. The published code, followed by diffusers and k-diffusion, uses the second
*divided difference* instead, which is half of the second derivative (`D2` in `multistep_dpm_solver_third_order_update`,
`d2` in `sample_dpmpp_3m_sde`). The table still satisfies the marginal law, and images look right. The order law reveals it:
the published form measures {orders_of["half"]:.2f}, and with the whole derivative it measures {orders_of["whole"]:.2f}.

Relative error on the exact denoiser of [the orders](orders.md), from sigma 80 to 0.1:

{table(head, rows)}
Pellucid's exact dialect uses the whole derivative in `dpmpp_3m`, `dpmpp_3m_sde` and `dpm_multistep` of order 3. The
dialects of diffusers, k-diffusion and ComfyUI keep the published form (`curvature_scale=0.5`). Whether the difference
is visible in images of a guided network at few steps is not measured here.

`make results` generates this page; the claim is tested by `test_third_order_needs_the_whole_second_derivative`.
"""


def samplers() -> str:
    rows = []
    for entry in REGISTRY.values():
        options = ", ".join(f"{k}={v}" for k, v in entry.options().items()) or "none"
        noise = "no" if entry.deterministic else "yes"
        facts = [str(entry.order), noise, str(entry.calls)]
        rows.append([f"`{entry.name}` {entry.title}", *facts, f"{entry.suits} ({entry.paper})", options])
    head = ["sampler", "order", "noise", "calls per step", "suits", "options"]
    return f"""{MADE}# The samplers

There are {len(REGISTRY)} samplers. `pellucid samplers NAME` shows one with all its other names. The orders are
[measured](orders.md), with any noise turned off.

{table(head, rows)}"""


def main() -> None:
    torch.set_num_threads(1)  # 16 points in 4 dimensions: threads only wait for each other
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name, page in (("orders.md", orders()), ("third-order.md", third_order()), ("samplers.md", samplers())):
        (RESULTS / name).write_text(page, encoding="utf-8")
        print(f"wrote docs/results/{name}")


if __name__ == "__main__":
    main()
