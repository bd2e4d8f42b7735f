r"""
Lab 12: Samplers as tables
==========================

**Question.** DDIM, Euler, DPM++ 2M, Heun, Euler a: five classes of hundreds of lines elsewhere. What is left of them
when everything that can be computed before the run has been computed?

**Handbook.** :doc:`/handbook/scheduler_and_sampler`

**Mechanism.** With clipping off, every sampler is linear in the state, the model's answers and fresh noise. So a
sampler is a table with one row for each model call. A row says at which level :math:`(\alpha, \sigma)` to call the
network, which time to tell it, and with which weights the next state is made:

.. math:: x \leftarrow w_x\, x + w_0\, p_0 + w_1\, p_1 + \dots + w_z\, z

:math:`p_0` is this call's prediction (here of :math:`x_0`), :math:`p_1, p_2, \dots` are those of earlier rows,
:math:`z` is noise.
"""

import math
from itertools import pairwise

import matplotlib.pyplot as plt
import torch

import pellucid
from pellucid.core.plan import REGISTERS
from pellucid.labs import few


def show(plan):
    """A plan, one line per row."""
    print(f"{plan.name}: {plan.nfe} calls, in the frame {plan.frame}, starts at noise × {plan.initial_scale:.4g}")
    for row in plan.rows:
        update = "  ".join(f"{weight:+9.4f}·{REGISTERS[register]}" for register, weight in row.x)
        print(f"  time {row.time:5.0f}  alpha {row.level.alpha:.4f}  sigma {row.level.sigma:8.4f}   x ← {update}")


# %%
# Three samplers, printed
# -----------------------
# The same schedule, the same grid, four steps. (`pellucid plan dpmpp_2m --steps 4` prints this too.)

asked = {"schedule": "linear", "grid": "trailing", "steps": 4}
ddim, euler, dpmpp = (pellucid.compile_plan(name, **asked) for name in ("ddim", "euler", "dpmpp_2m"))
for plan in (ddim, euler, dpmpp):
    show(plan)

# %%
# The loop over a table
# ---------------------
# That is all that a sampler does while it runs. Five lines, and the result is that of `pellucid.run`. The "model" is a
# mixture of Gaussians, whose denoiser is known exactly.

density = pellucid.oracle.smooth()  # three Gaussians in four dimensions
noise = torch.randn(64, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
x, history = noise * dpmpp.initial_scale, []
for row in dpmpp.rows:
    history = [density(x, row.level), *history]  # p0, p1, …
    registers = {"x": x, **{f"p{k}": p for k, p in enumerate(history)}}
    x = sum(weight * registers[REGISTERS[register]] for register, weight in row.x)
apart = float((x - pellucid.run(dpmpp, density, noise * dpmpp.initial_scale)).abs().max())
print(f"five lines against the engine: {apart:.1e}")
assert apart < 1e-12

# %%
# DDIM is Euler
# -------------
# The two tables above look unlike, because they count x in other units: DDIM in the frame where :math:`\alpha^2 +
# \sigma^2 = 1`, Euler in the one where :math:`\alpha = 1`. With :math:`x_{vp} = \alpha\, x_{ve}` a row of one becomes a
# row of the other: the weight of x is multiplied by :math:`\alpha_{next} / \alpha`, the weight of :math:`p_0` by
# :math:`\alpha_{next}`.

levels = [row.level for row in ddim.rows] + [ddim.end]
for i, row in enumerate(euler.rows):
    here, after = levels[i].alpha, levels[i + 1].alpha
    moved = {REGISTERS[r]: w * (after / here if REGISTERS[r] == "x" else after) for r, w in row.x}
    own = {REGISTERS[r]: w for r, w in ddim.rows[i].x}
    worst = max(abs(moved[name] - own[name]) for name in own)
    print(f"  row {i}: Euler's weights in DDIM's frame {[f'{w:.4f}' for w in moved.values()]}, {worst:.0e} apart")
    assert worst < 1e-12

# %%
# And so they make the same points.

ends = [pellucid.run(plan, density, noise * plan.initial_scale) for plan in (ddim, euler)]
print(f"largest difference of 64 points: {float((ends[0] - ends[1]).abs().max()):.1e}")
assert torch.allclose(*ends, atol=1e-9)

# %%
# The order, measured
# -------------------
# An order is a slope: how fast the error falls when there are more calls. The truth is the same noise, taken to its end
# by a thousand steps. DPM++ 2M differs from DDIM by one number per row, the weight of the *last* prediction, and gains
# an order.

truth_plan = pellucid.compile_plan("dpmpp_3m", schedule="linear", grid="exponential", steps=few(1000, 400))
truth = pellucid.run(truth_plan, density, noise * truth_plan.initial_scale)


def error(name, steps):
    """(calls, relative distance from the truth) of a sampler at a number of steps."""
    plan = pellucid.compile_plan(name, schedule="linear", grid="exponential", steps=steps)
    return plan.nfe, pellucid.oracle.distance(pellucid.run(plan, density, noise * plan.initial_scale), truth)


counts = (5, 10, 20, 40, 80, 160)[: few(6, 5)]
found = {name: [error(name, steps) for steps in counts] for name in ("euler", "heun", "dpmpp_2m", "unipc")}
orders = {}
for name, cells in found.items():
    (calls, before), (more, after) = cells[-2:]
    orders[name] = math.log(before / after) / math.log(more / calls)
    print(f"  {name:<9}" + "  ".join(f"{n:>3}: {e:.1e}" for n, e in cells) + f"   order {orders[name]:.2f}")
assert abs(orders["euler"] - 1) < 0.1
assert abs(orders["dpmpp_2m"] - 2) < 0.1

# %%
# Straight lines, once the steps are small enough. Before that there is no order to speak of.

fig, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
for name, cells in found.items():
    axis.loglog(*zip(*cells, strict=True), marker="o", markersize=4, label=f"{name}, order {orders[name]:.1f}")
axis.set(xlabel="model calls (NFE)", ylabel="relative error", title="Error against calls, on an exact mixture")
axis.legend()
axis.grid(alpha=0.3)

# %%
# Noise on the way
# ----------------
# Euler a steps *below* the next level, to :math:`\sigma_{down}`, and adds fresh noise up to it: :math:`\sigma_{down}^2
# + \sigma_{up}^2 = \sigma_{next}^2`. In the table the noise has the register z, and the identity can be checked row by
# row.

ancestral = pellucid.compile_plan("euler_a", **asked)
show(ancestral)
levels = [row.level.sigma for row in ancestral.rows] + [0.0]
for i, row in enumerate(ancestral.rows):
    weight = {REGISTERS[r]: w for r, w in row.x}
    down, up = weight.get("x", 0.0) * levels[i], weight.get("z", 0.0)
    print(
        f"  row {i}: down {down:.4f}, up {up:.4f}, together {math.hypot(down, up):.4f}, next level {levels[i + 1]:.4f}"
    )
    assert math.isclose(math.hypot(down, up), levels[i + 1], rel_tol=1e-9, abs_tol=1e-9)

# %%
# Paths in the plane, from the same starting noise to a ring of eight Gaussians. Euler's is a curve that the noise
# decides; Euler a wanders, and may end at another mode.

ring, steps = pellucid.oracle.ring(), 30
fig, axes = plt.subplots(1, 2, figsize=(7, 3.4), layout="constrained", sharex=True, sharey=True)
for axis, name in zip(axes, ("euler", "euler_a"), strict=True):
    plan = pellucid.compile_plan(name, schedule="linear", grid="karras", steps=steps)
    path = []
    pellucid.run(
        plan,
        ring,
        shape=(2,),
        seeds=range(6),
        dtype=torch.float64,
        observers=[lambda seen, path=path: path.append(seen.x0)],
    )
    for points in torch.stack(path).unbind(1):
        axis.plot(*points.T, marker=".", markersize=3, linewidth=0.8)
    axis.scatter(*ring.means.T, s=200, facecolors="none", edgecolors="grey")
    axis.set(title=f"{name}: its x0, call by call", aspect="equal")

# %%
# What to notice
# --------------
# - A plan is finished before the run begins. While it runs nobody asks which sampler it is: there is one loop.
# - `plan.nfe` is the number of rows, and rows are what you pay for.
# - What a sampler *is* are the weights; what a schedule is are the levels and their times; the grid chooses some of
#   them.
# - The last row of DDIM, Euler and DPM++ 2M is the same: x ← p0, the last prediction.
#
# What goes wrong
# ---------------
# **"A sampler owns the schedule."** It owns neither levels nor times. Put Euler on the same levels under two schedules:
# the weights are the same numbers. Only the *times* that the network gets differ, and they belong to the model.

sigmas = (80.0, 10.0, 2.0, 0.5)
times = {name: tuple(pellucid.schedules.make(name).time_at(s) for s in sigmas) for name in ("linear", "cosine")}
plans = [pellucid.compile_plan("euler", schedule=n, grid=pellucid.Grid(timesteps=t)) for n, t in times.items()]
for one, other in zip(*(plan.rows for plan in plans), strict=True):
    weights = ", ".join(f"{weight:.4f}" for _, weight in one.x)
    print(f"  sigma {one.level.sigma:6.3f}: weights {weights}; times {one.time:.1f} or {other.time:.1f}")
    assert all(math.isclose(a, b, rel_tol=1e-6) for (_, a), (_, b) in zip(one.x, other.x, strict=True))
    assert abs(one.time - other.time) > 1

# %%
# **"Twice the steps, half the error."** That is the law of order 1, for small steps. An order 2 gives a quarter, and
# with few steps neither holds. Of a sampler that draws noise the distance to the deterministic truth does not fall at
# all: it ends elsewhere on purpose.

for name in ("euler", "dpmpp_2m", "unipc", "euler_a"):
    cells = found[name] if name in found else [error(name, steps) for steps in counts]
    ratios = [before / after for (_, before), (_, after) in pairwise(cells)]
    print(f"  {name:<9} error shrinks by " + ", ".join(f"{ratio:.1f}" for ratio in ratios))
assert max(ratios) < 1.5  # euler_a
ratio = found["dpmpp_2m"][-2][1] / found["dpmpp_2m"][-1][1]
assert 3.5 < ratio < 4.5

# %%
# **"Heun is better than Euler: at ten steps it is nearer."** Heun's step is two calls. At equal steps it wins here, and
# at equal calls, the thing that takes time, it loses.

(calls, heun), (_, same_steps), (_, same_calls) = error("heun", 10), error("euler", 10), error("euler", 19)
print(f"  10 steps: heun {heun:.3f} ({calls} calls), euler {same_steps:.3f}; 19 steps of euler: {same_calls:.3f}")
assert same_calls < heun < same_steps
assert calls == 19

# %%
# Say it in an interview
# ----------------------
# "A sampler is a linear multistep or Runge-Kutta method for the probability-flow ODE. Compiled, it is a table: one row
# a model call with the level to call at, the time to tell, and weights over x, the predictions kept so far, and noise.
# The state is the latent x (B, C, h, w) and a short history, one tensor for DPM++ 2M. DDIM is Euler in other units.
# Second order costs one more tensor of memory for a multistep method, or one more call per step for Heun, so I compare
# at equal NFE. Ancestral samplers add noise each step and do not converge to the image of the ODE."
#
# Your turn
# ---------
# ``pellucid lab 12 --starter answer.py``: a row of DDIM, a row of DPM++ 2M, Euler a's split, and the loop. Then
# ``pellucid lab 12 --check answer.py``.
#
# Further reading
# ---------------
# - Song, Meng and Ermon, *Denoising Diffusion Implicit Models*, arXiv:2010.02502
# - Karras et al., *Elucidating the Design Space of Diffusion-Based Generative Models*, arXiv:2206.00364
# - Lu et al., *DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic Models*, arXiv:2211.01095
# - :doc:`/results/orders`; :doc:`/decisions/0001-a-sampler-is-a-table`
