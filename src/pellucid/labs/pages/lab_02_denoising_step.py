r"""
Lab 02: One denoising step
==========================

**Question.** What happens between two neighbouring states of a run? Which part of it is the network's, and which is
arithmetic that needs no network at all?

**Handbook.** :doc:`/handbook/forward_and_reverse`

**Mechanism.** The state is :math:`x = \alpha x_0 + \sigma\epsilon`. The network sees x and the time, and predicts.
``scenes-128`` predicts the velocity :math:`v = \alpha\epsilon - \sigma x_0`, so with :math:`\alpha^2 + \sigma^2 = 1`

.. math:: \hat x_0 = \alpha x - \sigma v, \qquad \hat\epsilon = \sigma x + \alpha v .

The scheduler then goes to the next level. DDIM's update is the forward formula again, with both estimates put in:

.. math:: x' = \alpha' \hat x_0 + \sigma' \hat\epsilon .

A prediction, then two multiplications and an addition: that is one step. Every other sampler has other weights.
"""

# %%
# A run, watched
# --------------
# The model makes one image with DDIM. An observer keeps what every step saw. Guidance is off (scale 1), so that a
# step is one prediction; :doc:`lab 04 <lab_04_classifier_free_guidance>` adds the second one.
from itertools import pairwise

import matplotlib.pyplot as plt
import torch

import pellucid
from pellucid import scenes
from pellucid.core.plan import REGISTERS
from pellucid.labs import few
from pellucid.models.vae import from_diffusion
from pellucid.pipeline.encoders.text import encode_prompts

prompt = "a large striped red star on a white background"
pipe = pellucid.load("scenes-128")
steps = []
made = pipe(prompt, sampler="ddim", grid="trailing", steps=few(20, 8), guidance=1.0, seed=3, observers=[steps.append])
print(f"{made.plan.nfe} rows, {len(steps)} steps seen, x is {tuple(steps[0].x.shape)}")

# %%
# The row of the plan
# -------------------
# A plan is the sampler as a table; a row is one step. It has the level at which the network is called, the time that is
# passed to it, and the weights with which ``x`` and ``p0``, the prediction as :math:`\hat x_0`, make the next x.
middle = steps[len(steps) // 2]
row, level, after = middle.row, middle.row.level, middle.next_levels[0]
print(f"time {row.time:g}: alpha {level.alpha:.6f}, sigma {level.sigma:.6f}")
print(f"next level:     alpha {after.alpha:.6f}, sigma {after.sigma:.6f}")
weights = {REGISTERS[register]: weight for register, weight in row.x}
print("x_next =", " + ".join(f"{weight:.6f}·{name}" for name, weight in weights.items()))

# %%
# The prediction
# --------------
# The only expensive line: latents (1, 4, 16, 16), one time, and the text as 64 vectors of 128 numbers go in. What comes
# out has the shape of x. It is v because the training asked for v; nothing in the tensor says so.
parts = pipe.components
context = encode_prompts(parts.text_encoders, parts.tokenizers, [prompt]).context
with torch.no_grad():
    v = parts.network(middle.x, torch.tensor([row.time]), context)
print(f"in: x {tuple(middle.x.shape)}, text {tuple(context.shape)}; out: {tuple(v.shape)}, target {parts.target!r}")

# %%
# The arithmetic, by hand, in float64
# -----------------------------------
# Two conversions and one update. The engine does them in float32 with the weights of the row; here they are in float64
# with the formulas of the introduction. They agree to the rounding of float32.
x, out = middle.x.double(), v.double()
x0 = level.alpha * x - level.sigma * out
eps = level.sigma * x + level.alpha * out
by_hand = after.alpha * x0 + after.sigma * eps
by_row = weights["x"] * x + weights["p0"] * x0
print(f"x0   against the engine: {(x0 - middle.x0).abs().max():.1e}")
print(f"next against the engine: {(by_hand - middle.x_next).abs().max():.1e}")
print(f"formula against the row: {(by_hand - by_row).abs().max():.1e}")
assert (by_hand - middle.x_next).abs().max() < 1e-5 and (by_hand - by_row).abs().max() < 1e-12

# %%
# Where the two weights come from: put :math:`\hat\epsilon = (x - \alpha\hat x_0)/\sigma` into the update, and collect.
ratio = after.sigma / level.sigma
print(f"sigma'/sigma                  = {ratio:.6f}, the row has {weights['x']:.6f}")
print(f"alpha' − alpha·sigma'/sigma   = {after.alpha - level.alpha * ratio:.6f}, the row has {weights['p0']:.6f}")
assert abs(weights["x"] - ratio) < 1e-12 and abs(weights["p0"] - (after.alpha - level.alpha * ratio)) < 1e-12


# %%
# A whole run by hand
# -------------------
# The step, from the first noise to the end. The last row goes to sigma 0, where x is :math:`\hat x_0` itself.
def step(x, out, here, there):
    """DDIM's update of a network that predicts v."""
    x0, eps = here.alpha * x - here.sigma * out, here.sigma * x + here.alpha * out
    return there.alpha * x0 + there.sigma * eps


x = steps[0].x
with torch.no_grad():
    for seen in steps:
        out = parts.network(x, torch.tensor([seen.row.time]), context)
        x = step(x, out, seen.row.level, seen.next_levels[0])
print(f"after {len(steps)} steps: {(x - made.latents).abs().max():.1e} from the engine's latents")
assert (x - made.latents).abs().max() < 1e-3


# %%
# What x and the prediction look like
# -----------------------------------
# Both are latents, so the VAE shows them. x goes from noise to image; :math:`\hat x_0` is at every step the network's
# mean of the images that this x may have come from: unclear where x says little, sharp at the end.
def show(latents):
    """The decoded image as (H, W, 3) in [0, 1]."""
    with torch.no_grad():
        pixels = parts.vae.decode(from_diffusion(parts.vae.config, latents.float()))
    return ((pixels[0].permute(1, 2, 0) + 1) / 2).clamp(0, 1)


chosen = [steps[int(i)] for i in torch.linspace(0, len(steps) - 1, few(5, 3))]
figure, grid = plt.subplots(2, few(5, 3), figsize=(8, 3.6), layout="constrained")
for column, seen in enumerate(chosen):
    for line, (name, latents) in enumerate(((f"x, sigma {seen.row.level.sigma:.2f}", seen.x), ("its x0", seen.x0))):
        grid[line, column].imshow(show(latents))
        grid[line, column].set_title(name, fontsize=9)
        grid[line, column].set_axis_off()

# %%
# What to notice
# --------------
# - One step is one call of the network and a weighted sum. The weights were known before the run began.
# - The network is not asked for the next x. It says what it believes of the noise; how far to go is the scheduler's.
# - The next x is *not* :math:`\hat x_0`: the update keeps most of x. The weights of the row in the middle say how much.
# - Far from the end the prediction is a mean, and it moves from step to step. That is why one step is not enough.
moved = [float((b.x0 - a.x0).pow(2).mean().sqrt()) for a, b in pairwise(steps)]
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
axis.plot([s.row.level.sigma for s in steps[1:]], moved, marker="o")
axis.invert_xaxis()
axis.set(
    xlabel="sigma of the step (the run goes to the right)", ylabel="rms change of x0", title="The prediction moves"
)
print(f"x keeps {weights['x']:.0%} of itself in the middle step")

# %%
# What goes wrong
# ---------------
# **v taken for eps.** The tensor fits, no error is raised, and the update is finite. Only the image is wrong. The
# reader of scenes grades what comes out.
wanted = scenes.parse(prompt)


def run(update, time_of=lambda index, seen: seen.row.time):
    """All steps with another update or other times; the image (H, W, 3), and whether it is as prompted."""
    x = steps[0].x
    with torch.no_grad():
        for index, seen in enumerate(steps):
            out = parts.network(x, torch.tensor([time_of(index, seen)]), context)
            x = update(x, out, seen.row.level, seen.next_levels[0])
    image = show(x)
    return image, scenes.grade(image.permute(2, 0, 1) * 2 - 1, wanted)[0].right


def taken_for_eps(x, out, here, there):
    return there.alpha * (x - here.sigma * out) / here.alpha + there.sigma * out


# %%
# **The number of the step passed as the time.** The network was trained on times from 0 to 999, and they tell it how
# much noise to expect. At 0, 1, 2, … it expects almost none from the start, and the object never appears.
#
# **One step is enough.** :math:`\hat x_0` is a prediction of the image, so why not take the first one and stop?
# Because the first x is noise: the prediction there is the mean over all images of the prompt, and a mean of stars
# that stand in different places is no star.
results = {
    "right": run(step),
    "v taken for eps": run(taken_for_eps),
    "index for time": run(step, lambda index, seen: float(index)),
    "x0 of the first step": run(lambda x, out, here, there: steps[0].x0),
}
figure, row_of = plt.subplots(1, 4, figsize=(7.5, 2.4), layout="constrained")
for axis, (name, (image, right)) in zip(row_of, results.items(), strict=True):
    axis.imshow(image)
    axis.set_title(f"{name}\nas prompted: {'yes' if right else 'no'}", fontsize=9)
    axis.set_axis_off()
assert [right for _, right in results.values()] == [True, False, False, False]

# %%
# **The scale of the input skipped.** Euler's table is written for x with alpha 1, where sigma is
# :math:`\sigma/\alpha`. The network was trained on x with :math:`\alpha^2 + \sigma^2 = 1`. ``scale_model_input``
# divides by :math:`\sqrt{1 + \sigma^2}`. It is a line that one forgets easily, because without it everything still
# runs. The norms inside this network take out much of it, so that an image may even survive; the prediction does
# not.
euler = pellucid.compile_plan("euler", schedule=parts.schedule, target="v", grid="trailing", steps=made.plan.nfe)
print(f"Euler starts with x times {euler.initial_scale:.0f}; DDIM with x times {made.plan.initial_scale:.0f}")
errors = []
with torch.no_grad():
    for seen, here in zip(steps[1::2], euler.rows[1::2], strict=True):
        size = (1 + here.level.sigma**2) ** 0.5  # x of Euler's table is `size` times the x of DDIM's
        time = torch.tensor([here.time])
        right = parts.network(seen.x, time, context)
        wrong = parts.network(seen.x * size, time, context)
        errors.append(float((wrong - right).norm() / right.norm()))
        print(f"sigma {here.level.sigma:6.2f}: without the scale the prediction is off by {errors[-1]:.0%}")
assert errors[0] > 0.5 and errors[0] > errors[-1]

# %%
# **The output taken for pixels.** Neither v nor :math:`\hat x_0` is an image: they have 4 channels of 16×16. Drawn as
# colours, they have the outline of the image at most. Pixels are the decoder's work, once, after the loop.
print(f"out {tuple(v.shape)} has {v.numel()} numbers; the image has {3 * 128 * 128}")
assert v.shape[1] != 3

# %%
# Say it in an interview
# ----------------------
# "The state of a run is the noisy latent x, here (1, 4, 16, 16), at a level (alpha, sigma). A step calls the denoiser
# with x, the timestep and the text, converts its output to x0 and eps – for v by alpha·x − sigma·v and sigma·x +
# alpha·v – and combines them with the next level's alpha and sigma. The network costs milliseconds to seconds; the
# update is a weighted sum and costs nothing. The two must agree on the prediction type and on the scale of the input:
# if they do not, nothing fails but the image. Steps are the tradeoff: each costs a call, and fewer of them trust a
# mean too far."
#
# Your turn
# ---------
# Write the conversions and the step yourself: ``pellucid lab 02 --starter answer.py``, fill it in, and check it with
# ``pellucid lab 02 --check answer.py``.
#
# Further reading
# ---------------
# - *Denoising Diffusion Implicit Models*, Song, Meng, Ermon, arXiv:2010.02502: equation 12 is the update.
# - *Progressive Distillation for Fast Sampling of Diffusion Models*, Salimans, Ho, arXiv:2202.00512: where v comes
#   from.
# - :doc:`lab 03 <lab_03_reading_a_scheduler>` reads whole schedulers, :doc:`lab 12 <lab_12_samplers_as_tables>` their
#   tables.
