r"""
Lab 01: Forward noise
=====================

**Question.** What does the forward process do to an image, and why can one formula jump to any level of noise without
walking there?

**Handbook.** :doc:`/handbook/forward_and_reverse`

**Mechanism.** One step of the forward process keeps most of x and adds a little noise:
:math:`x_t = \sqrt{1-\beta_t}\,x_{t-1} + \sqrt{\beta_t}\,\epsilon_t`. Sums of Gaussians are Gaussian, so all steps up
to t are one step with the product of what each kept, :math:`\bar\alpha_t = \prod_{s \le t} (1-\beta_s)`:

.. math:: x_t = \sqrt{\bar\alpha_t}\, x_0 + \sqrt{1 - \bar\alpha_t}\, \epsilon = \alpha\, x_0 + \sigma\, \epsilon .

The pair :math:`(\alpha, \sigma)` is the *level*. Time is only its name. Training draws a time and a noise, makes
:math:`x_t` in one line, and asks the network for what was put in.
"""

# %%
# An image at five levels
# ------------------------
# The image is a scene, drawn by code. The schedule is the one that ``scenes-128`` was trained with. One noise for
# all five, so that only the level differs.
import matplotlib.pyplot as plt
import numpy as np
import torch

import pellucid
from pellucid import scenes
from pellucid.labs import few

cosine = pellucid.schedules.make("cosine")
x0 = scenes.render(scenes.sample(torch.tensor([5]), seed=1), 128)  # (1, 3, 128, 128) in [−1, 1]
eps = torch.randn(x0.shape, generator=torch.Generator().manual_seed(0))
print(f"x0 {tuple(x0.shape)} from {x0.min():.1f} to {x0.max():.1f}; schedule of {cosine.num_train} times")


# %%
# ``level`` gives the two numbers of a time. Everything else is a multiplication and an addition.
def noised(x0, eps, level):
    return level.alpha * x0 + level.sigma * eps


figure, axes = plt.subplots(1, 5, figsize=(8, 2.1), layout="constrained")
for axis, time in zip(axes, (0, 250, 500, 750, 999), strict=True):
    level = cosine.level(time)
    x = noised(x0, eps, level)
    axis.imshow(((x[0].permute(1, 2, 0) + 1) / 2).clamp(0, 1))
    axis.set_title(f"t {time}\nα {level.alpha:.2f}, σ {level.sigma:.2f}", fontsize=9)
    axis.set_axis_off()
    snr = (level.alpha / level.sigma) ** 2
    print(f"t {time:3d}: α² + σ² = {level.alpha**2 + level.sigma**2:.12f}, SNR = {snr:.3g}")

# %%
# The walk and the jump
# ---------------------
# Does the closed form tell the truth? A crowd of points that all begin at :math:`x_0 = 1` walks through all steps, each
# with noise of its own. Its mean and spread are compared with α and σ of the jump.
table = cosine.table()
crowd, draw = torch.ones(few(40_000, 4_000), dtype=torch.float64), torch.Generator().manual_seed(1)
walked = []
for beta in table["beta"]:
    z = torch.randn(crowd.shape, generator=draw, dtype=torch.float64)
    crowd = (1 - beta) ** 0.5 * crowd + beta**0.5 * z
    walked.append((float(crowd.mean()), float(crowd.std())))
alpha, sigma = np.sqrt(table["alpha_bar"]), np.sqrt(1 - table["alpha_bar"])
off = np.abs(np.array(walked) - np.stack([alpha, sigma], 1)).max(0)
print(f"largest difference over all times: mean {off[0]:.4f}, spread {off[1]:.4f} ({len(crowd):,} points)")
assert off.max() < 5 / len(crowd) ** 0.5  # five standard errors

# %%
# The lines are the jump, the dots are the crowd. The jump costs one line; the walk cost a thousand draws.
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for i, (curve, name) in enumerate(((alpha, "α = √ᾱ, the mean"), (sigma, "σ = √(1−ᾱ), the spread"))):
    axis.plot(table["time"], curve, label=f"{name}, by the formula")
    axis.plot(table["time"][::50], np.array(walked)[::50, i], "o", ms=4, color=axis.lines[-1].get_color())
axis.set(xlabel="time t", ylabel="α and σ", title="A thousand steps (dots) and one jump (lines)")
axis.legend(fontsize=9)

# %%
# The same axis for every schedule
# --------------------------------
# Schedules differ in *when* they reach a level, and in where they end. The time at which signal and noise are equal
# (SNR 1, λ 0) says much of it; the SNR of the last time says how much image is left in "pure noise".
figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
for name in ("linear", "scaled_linear", "cosine", "flow"):
    schedule = pellucid.schedules.make(name)
    columns = schedule.table()
    equal = schedule.time(pellucid.Level(1.0, 1.0))
    axis.plot(columns["time"], columns["lam"], label=name)
    print(f"{name:13s} SNR 1 at t {equal:5.0f}; at the last time SNR {columns['snr'][-1]:.2g}")
axis.axhline(0, color="0.7", lw=1)
axis.set(xlabel="time t", ylabel="λ = ½ log SNR", ylim=(-10, 8), title="Where the noise is, by schedule")
axis.legend(fontsize=9)

# %%
# What to notice
# --------------
# - The shape never changes: x, :math:`x_0` and :math:`\epsilon` are all (1, 3, 128, 128). Noise is not a new axis.
# - The level is one pair of numbers for each image of a batch. Two images of one batch may have different times.
# - :math:`\alpha^2 + \sigma^2 = 1` keeps the spread of x at 1 only where :math:`x_0` has spread 1 itself. Our image
#   has less, so its x grows on the way. That is one reason why latents are scaled (:doc:`lab 05
#   <lab_05_latent_space>`).
for time in (0, 500, 999):
    level = cosine.level(time)
    expected = float((level.alpha**2 * x0.var() + level.sigma**2) ** 0.5)
    measured = float(noised(x0, eps, level).std())
    print(f"t {time:3d}: spread {measured:.3f}, expected {expected:.3f}")
    assert abs(measured - expected) < 0.02

# %%
# What goes wrong
# ---------------
# **β taken for the level.** :math:`\beta_t` is the noise that *one* step adds. Who noises with :math:`\sqrt{\beta_t}`
# makes an x that is almost clean at every time but the last, and trains on a task that hardly exists.
time = 500
small, right = table["beta"][time] ** 0.5, sigma[time]
print(f"t {time}: √β = {small:.3f} is not σ = {right:.3f}; the noise is {right / small:.0f} times too weak")
assert right / small > 10

# %%
# **The last time is pure noise.** Under Stable Diffusion's schedule it is not: α is small, and not zero. Over all
# pixels that is enough to read the brightness of the image from its "noise". Networks learn to read it, and a run
# that starts from real noise, which has brightness 0, gives images of medium brightness (Lin and others, below). The
# cosine schedule leaves nothing to read.
noise_of_mean = eps.numel() ** -0.5  # the standard error of the mean of pure noise
for name in ("scaled_linear", "cosine"):
    last = pellucid.schedules.make(name).level(999)
    white, black = (float(noised(torch.full_like(x0, c), eps, last).mean() - eps.mean() * last.sigma) for c in (1, -1))
    print(f"{name:13s} α {last.alpha:.1e}: white and black differ by {(white - black) / noise_of_mean:.2g} std. errors")
    assert ((white - black) / noise_of_mean > 10) == (name == "scaled_linear")

# %%
# **Any schedule will do for a trained network.** The network gets a time, and knows only what that time meant in
# training. Here its input is noised with the right schedule, and with others at the same time. It predicts v, so
# :math:`\hat x_0 = \alpha x - \sigma v` with the levels it was trained on.
from pellucid.models.vae import to_diffusion
from pellucid.pipeline.encoders.text import encode_prompts

parts = pellucid.load("scenes-128").components
batch = scenes.sample(torch.arange(few(16, 4)), seed=3)
with torch.no_grad():
    clean = to_diffusion(parts.vae.config, parts.vae.encode(scenes.render(batch, 128)).mean)
    context = encode_prompts(parts.text_encoders, parts.tokenizers, scenes.captions(batch, seed=3)).context
noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(4))


# %%
# The error of :math:`\hat x_0`, for latents (N, 4, 16, 16) whose spread is about 1.
def error_of_x0(schedule, time):
    trained, level = cosine.level(time), schedule.level(time)
    x = noised(clean, noise, level)
    with torch.no_grad():
        v = parts.network(x, torch.full((len(x),), float(time)), context)
    return float((trained.alpha * x - trained.sigma * v - clean).square().mean().sqrt())


errors = {}
for name in ("cosine", "scaled_linear", "linear"):
    schedule = pellucid.schedules.make(name)
    errors[name] = error_of_x0(schedule, 300)
    print(f"noised with {name:13s}: α {schedule.level(300).alpha:.2f}, rms error of x0 {errors[name]:.3f}")
assert min(errors["scaled_linear"], errors["linear"]) > 1.3 * errors["cosine"]

# %%
# Say it in an interview
# ----------------------
# "The forward process has no parameters. Its state is x, with the shape of the data, (B, 3, 128, 128) for pixels or
# (B, 4, 16, 16) for our latents, and one level per batch item. Because Gaussians add up, x at any time is one line,
# sqrt(ᾱ)·x0 + sqrt(1−ᾱ)·eps, so training draws a random time for each image and never walks. I compare schedules over
# log-SNR and not over t: they differ in how many times they spend at which SNR, and in the SNR that is left at the
# end. That last number is a tradeoff: above zero it leaks the brightness, at zero eps cannot be the target any more,
# because there x says nothing about x0. A schedule belongs to its network: at the same time under another schedule, the
# error of x0 grows, as the last block printed."
#
# Your turn
# ---------
# Write the forward process yourself: ``pellucid lab 01 --starter answer.py``, fill it in, and check it with
# ``pellucid lab 01 --check answer.py``.
#
# Further reading
# ---------------
# - *Denoising Diffusion Probabilistic Models*, Ho, Jain, Abbeel, arXiv:2006.11239: equation 4 is the jump.
# - *Improved Denoising Diffusion Probabilistic Models*, Nichol, Dhariwal, arXiv:2102.09672: the cosine schedule.
# - *Common Diffusion Noise Schedules and Sample Steps are Flawed*, Lin, Liu, Li, Yang, arXiv:2305.08891: what the last
#   time leaks, and zero terminal SNR.
# - ``pellucid schedules`` prints and plots all schedules; :doc:`lab 13 <lab_13_schedules_and_training>` trains with
#   them.
