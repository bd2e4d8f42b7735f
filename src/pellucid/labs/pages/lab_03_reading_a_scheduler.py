r"""
Lab 03: Reading a scheduler
===========================

**Question.** Which numbers does a scheduler hold? Which of them are facts about the network, and which may one choose?

**Handbook.** :doc:`/handbook/scheduler_and_sampler`

**Mechanism.** A scheduler is asked three things, and holds what it needs for them:

- ``set_timesteps(n)``: at which times is the network called? This is the *grid*.
- ``scale_model_input(x, t)``: how must x be scaled for the network?
- ``step(output, t, x)``: what is the next x? This is the *sampler*.

Behind all three stands the noise *schedule*, which turns a time into a level. Euler's step, with
:math:`\sigma` for :math:`\sqrt{(1-\bar\alpha)/\bar\alpha}`, is the shortest one there is:

.. math:: x' = x + (\sigma' - \sigma)\,\hat\epsilon, \qquad \text{input} = x \,/ \sqrt{1 + \sigma^2} .
"""

# %%
# The file
# --------
# A scheduler comes with its model, as JSON. Four of its fields say how the *network* was trained: they are facts, and a
# wrong one breaks every image. The others are choices, which one may change for any run.
import json

import matplotlib.pyplot as plt
import torch

import pellucid
from pellucid import scenes
from pellucid.labs import few
from pellucid.models.vae import from_diffusion
from pellucid.pipeline.encoders.text import encode_prompts

pipe = pellucid.load("scenes-128")
config = pipe.components.scheduler  # scheduler/scheduler_config.json
facts = ("num_train_timesteps", "beta_schedule", "prediction_type", "rescale_betas_zero_snr")
choices = ("_class_name", "solver_order", "algorithm_type", "timestep_spacing", "final_sigmas_type")
print("facts:  ", json.dumps({name: config[name] for name in facts}))
print("choices:", json.dumps({name: config[name] for name in choices}))

# %%
# First call: the grid
# --------------------
# Three schedulers of one model. They agree on the times; DPM++ and Euler differ in the space in which x lives. Euler
# keeps x as :math:`x_0 + \sigma\epsilon`, so its first noise has to be large: ``init_noise_sigma``.
trained = {"schedule": "cosine", "target": "v", "grid": "trailing"}
for name in ("ddim", "dpmpp_2m", "euler"):
    scheduler = pellucid.Scheduler(name, **trained)
    scheduler.set_timesteps(5)
    times = " ".join(f"{time:.0f}" for time in scheduler.timesteps)
    print(f"{name:9s} times {times}; first noise × {scheduler.init_noise_sigma:.4g}")
print("sigmas   ", " ".join(f"{sigma:.4g}" for sigma in scheduler.sigmas))

# %%
# Second and third call: the step
# -------------------------------
# With a made-up network output, both calls of Euler by hand. The output is v, so it is converted first: the scheduler
# reads ``prediction_type`` here and nowhere else.
draw = torch.Generator().manual_seed(0)
scheduler.set_timesteps(5)
sigma, after = (row.level.ratio for row in scheduler.plan.rows[:2])  # float64
x, v = (torch.randn(1, 4, 16, 16, generator=draw, dtype=torch.float64) for _ in range(2))
x = x * scheduler.init_noise_sigma
seen = scheduler.scale_model_input(x, scheduler.timesteps[0])
stepped = scheduler.step(v, scheduler.timesteps[0], x).prev_sample
length = (1 + sigma**2) ** 0.5
eps = (sigma * seen + v) / length  # from v, at alpha 1/length and sigma/length
by_hand = x + (after - sigma) * eps
off = (by_hand - stepped).abs().max()
print(f"x has spread {x.std():.0f}, the network sees {seen.std():.2f}; the step by hand is off by {off:.0e}")
assert torch.allclose(seen, x / length) and off < 1e-6


# %%
# All three calls make a loop
# ---------------------------
# This loop does not know which sampler it runs. Guidance doubles the batch; the scheduler does not see it.
prompts = [prompt for prompt, _ in scenes.prompts(few(4, 1), objects=1, seed=0)]
parts = pipe.components
context = encode_prompts(parts.text_encoders, parts.tokenizers, [""] * len(prompts) + prompts).context
first = torch.randn(len(prompts), 4, 16, 16, generator=torch.Generator().manual_seed(7))


def sampled(scheduler, steps, scale=4.0):
    scheduler.set_timesteps(steps)
    x = first * scheduler.init_noise_sigma
    for time in scheduler.timesteps:
        with torch.no_grad():
            twice = scheduler.scale_model_input(torch.cat([x, x]), time)
            uncond, cond = parts.network(twice, time.float().expand(len(twice)), context).chunk(2)
        x = scheduler.step(uncond + scale * (cond - uncond), time, x).prev_sample
    return x


# %%
# The images are graded: is it the shape, the colour, the texture, the place that the prompt asked for?
def decoded(latents):
    with torch.no_grad():
        return parts.vae.decode(from_diffusion(parts.vae.config, latents)).clamp(-1, 1)


def right(images):
    return sum(grade.right for grade in scenes.grade(images, [scenes.parse(prompt) for prompt in prompts]))


steps = 12
latents = {name: sampled(pellucid.Scheduler(name, **trained), steps) for name in ("euler", "dpmpp_2m")}
for name, found in latents.items():
    print(f"{name:9s} {steps} steps: {right(decoded(found))} of {len(prompts)} as prompted")
    assert right(decoded(found)) >= max(1, len(prompts) - 1)

# %%
# A grid is a choice of levels
# ----------------------------
# The same number of calls, spent elsewhere. A grid that was made for one schedule may be poor for another: the cosine
# schedule ends at a very large σ, and Karras' grid, which spaces roots of σ, stays up there for most of its calls.
figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
grids = ("trailing", "leading", "linspace", "karras")
for i, grid in enumerate(grids):
    plan = pellucid.compile_plan("dpmpp_2m", schedule="cosine", target="v", grid=grid, steps=steps)
    axis.plot([row.level.lam for row in plan.rows], [i] * plan.nfe, "o", ms=6)
    high = sum(row.level.sigma / row.level.alpha > 30 for row in plan.rows)
    print(f"{grid:9s} first time {plan.rows[0].time:6.1f}, {high} of {plan.nfe} calls above σ/α 30")
axis.set(yticks=range(4), yticklabels=grids, ylim=(-0.5, 3.5), title="Where a grid calls")
axis.set_xlabel("λ of the call: noise ← → image")

# %%
# What to notice
# --------------
# - The scheduler holds no weights. Its state is the place in the grid and, for multistep samplers, earlier predictions.
# - x has the shape (B, 4, 16, 16) before and after every call. ``scale_model_input`` and ``step`` are weighted sums.
# - ``timesteps`` are what the network *gets*; ``sigmas`` are where x *is*. They must mean the same level, and only the
#   schedule converts one into the other.
# - DPM++ and DDIM cost the same here: one call per step. What differs is how far a step of this size can be trusted.
level = parts.schedule.level(500.0)
print(f"t 500 is α {level.alpha:.3f}, σ {level.sigma:.3f} under cosine; the network knows no other meaning of 500")

# %%
# What goes wrong
# ---------------
# **The target changed as if it were a choice, and a grid taken because it is famous.** The same network, noise and
# loop. The last line is a fact changed too: the schedule.
wrong = {
    "target eps, not v": {**trained, "target": "eps"},
    "grid karras": {**trained, "grid": "karras"},
    "schedule linear": {**trained, "schedule": "linear"},
}
runs = {"as it was trained": latents["dpmpp_2m"]}
runs |= {name: sampled(pellucid.Scheduler("dpmpp_2m", **facts), steps) for name, facts in wrong.items()}
images = {name: decoded(found) for name, found in runs.items()}
counts = {name: right(found) for name, found in images.items()}
for name, count in counts.items():
    print(f"{name:18s} {count} of {len(prompts)} as prompted")
assert counts["as it was trained"] >= max(1, len(prompts) - 1)
assert counts["target eps, not v"] == 0 and counts["grid karras"] <= len(prompts) // 2

# %%
# No error was raised, and no number was NaN. This is what the runs look like.
shown = min(2, len(prompts))
figure, axes = plt.subplots(shown, len(runs), figsize=(8, 2.2 * shown), layout="constrained", squeeze=False)
for column, (name, found) in zip(axes.T, images.items(), strict=True):
    for axis, image in zip(column, found, strict=False):
        axis.imshow((image.permute(1, 2, 0) + 1) / 2)
        axis.set_axis_off()
    column[0].set_title(f"{name}\n{counts[name]} of {len(prompts)} as prompted", fontsize=9)

# %%
# **It looks right, so the schedule must be right.** This network forgives the wrong schedule: a reader of the image
# may find nothing. The numbers do. Against many steps with the right one, the wrong one is further away than the few
# steps explain: x is not at the level that its time stands for.
many = sampled(pellucid.Scheduler("dpmpp_2m", **trained), few(30, 16))
far = {name: float((runs[name] - many).square().mean().sqrt()) for name in ("as it was trained", "schedule linear")}
for name, distance in far.items():
    print(f"{name:18s} rms {distance:.3f} from the latents of many steps")
assert far["schedule linear"] > 1.15 * far["as it was trained"]

# %%
# **The step's number passed as its time.** ``timesteps[i]`` is not ``i``. A loop that passes 0, 1, 2, … asks the
# network about almost clean images throughout. A scheduler refuses a time that is not in its plan.
scheduler = pellucid.Scheduler("dpmpp_2m", **trained)
scheduler.set_timesteps(steps)
try:
    scheduler.step(v, 1, x)
    refused = ""
except pellucid.PellucidError as error:
    refused = str(error)
print(refused)
assert refused

# %%
# Say it in an interview
# ----------------------
# "A scheduler is three calls over two tables. set_timesteps picks the levels to call at, scale_model_input brings x
# (B, 4, 16, 16) to the scale the network was trained on, step turns the prediction into the next x. The schedule's
# betas, the number of training times and the prediction type belong to the checkpoint: I read them from
# scheduler_config.json and never change them, because nothing fails when they are wrong, only the images do. Sampler,
# grid and step count are mine. The tradeoff is calls against error: a multistep sampler buys order with memory of
# earlier predictions, not with calls. And a grid is not good by name: on a cosine schedule Karras' grid spends most
# calls where nothing is decided, which I see by printing the λ of the calls."
#
# Your turn
# ---------
# Write the grids and Euler's two calls yourself: ``pellucid lab 03 --starter answer.py``, fill it in, and check it with
# ``pellucid lab 03 --check answer.py``.
#
# Further reading
# ---------------
# - *Elucidating the Design Space of Diffusion-Based Generative Models*, Karras, Aittala, Aila, Laine, arXiv:2206.00364.
# - *DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic Models*, Lu, Zhou, Bao, Chen, Li, Zhu,
#   arXiv:2211.01095.
# - *Common Diffusion Noise Schedules and Sample Steps are Flawed*, Lin, Liu, Li, Yang, arXiv:2305.08891: why trailing.
# - ``pellucid plan dpmpp_2m --schedule cosine --target v --steps 12`` prints the whole table; ``pellucid doctor
#   --config scheduler_config.json`` looks for the mistakes of this page.
