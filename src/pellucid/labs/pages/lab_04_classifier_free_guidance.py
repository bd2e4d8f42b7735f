r"""
Lab 04: Classifier-free guidance
================================

**Question.** What does the guidance scale do to one prediction, what does it cost, and when does more of it hurt?

**Handbook.** :doc:`/handbook/guidance`

**Mechanism.** In training the prompt is now and then replaced by the empty one, so that one network knows both: what it
predicts with the prompt (cond) and without it (uncond). At every step it is asked for both, and the difference between
them, the direction of the prompt, is taken s times:

.. math:: \text{guided} = \text{uncond} + s\,(\text{cond} - \text{uncond})

:math:`s = 0` is uncond, :math:`s = 1` is cond, and beyond 1 it is an extrapolation: a point that the network predicted
neither with nor without the prompt.
"""

# %%
# Two predictions in one call
# ---------------------------
# A run with scale 4, watched. Then one of its steps by hand: x twice, the time twice, the empty prompt and the prompt
# as one batch of two. The engine stacks them in this order too, so that both halves take one call.
import matplotlib.pyplot as plt
import torch

import pellucid
from pellucid import scenes
from pellucid.core import target as targets
from pellucid.evidence import qualities
from pellucid.labs import few
from pellucid.models.guided import GuidedDenoiser
from pellucid.pipeline.images import to_tensor
from pellucid.pipeline.encoders.text import encode_prompts

pipe = pellucid.load("scenes-128")
parts = pipe.components

# %%
# The empty prompt comes first, as in the engine.
options = {"sampler": "dpmpp_2m", "grid": "trailing", "steps": few(10, 5)}
prompt = "a large dotted green heart on a grey background"
seen = []
pipe(prompt, guidance=4.0, seed=1, observers=[seen.append], decode=False, **options)
texts = encode_prompts(parts.text_encoders, parts.tokenizers, ["", prompt]).context
print(f"{len(seen)} steps; the two texts are {tuple(texts.shape)}: (batch, tokens, width)")

# %%
# The network predicts v, so the mixing happens with v. The step keeps the named predictions as x0; there they are
# equal.
step = seen[len(seen) // 2]
level, time = step.row.level, torch.full((2,), step.row.time)
with torch.no_grad():
    uncond, cond = parts.network(torch.cat([step.x, step.x]), time, texts).chunk(2)
guided = uncond + 4.0 * (cond - uncond)
x0 = level.alpha * step.x - level.sigma * guided
print(f"shape {tuple(guided.shape)}; parts of the step: {', '.join(step.parts)}")
print(f"guided x0 against the engine: {(x0 - step.x0).abs().max():.1e}")
assert (x0 - step.x0).abs().max() < 1e-4

# %%
# How large is the push? The difference is small beside the prediction where the image is settled, and the scale
# multiplies it. It is largest early, where the prompt decides what there will be.
share = [float((s.parts["cond"] - s.parts["uncond"]).norm() / s.parts["cond"].norm()) for s in seen]
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
axis.plot([s.row.level.sigma for s in seen], share, marker="o")
axis.invert_xaxis()
axis.set(
    xlabel="sigma (the run goes to the right)", ylabel="|cond − uncond| / |cond|", title="What the prompt adds, as x0"
)

# %%
# A sweep of the scale
# --------------------
# Prompts with two objects that training never combined so, the same noise at every scale. The reader of scenes says
# what share of the prompt each image fulfils; beside it the share of 8-bit values that are clipped at 0 or 255, and
# the spread of the latents.
count = few(6, 2)
asked = scenes.prompts(count, objects=2, seed=1)
prompts, wanted = [text for text, _ in asked], [query for _, query in asked]
scales = [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0] if count > 2 else [0.0, 1.0, 30.0]


def measured(guidance):
    """(all right, share of what was asked for, clipped values, spread of the latents), and the images."""
    made = pipe(prompts, guidance=guidance, seed=list(range(count)), **options)
    images = to_tensor(made.images)
    grades = scenes.grade(images, wanted)
    marks = [mark.verdict == "right" for grade in grades for mark in grade.marks]
    clipped = float(qualities.saturation((images + 1) / 2).mean())
    return sum(g.right for g in grades), sum(marks) / len(marks), clipped, float(made.latents.std()), made.images


# %%
# Every scale from the same noise.
sweep = {scale: measured(scale) for scale in scales}
for scale, (right, marks, clipped, spread, _) in sweep.items():
    print(
        f"scale {scale:4g}: {right} of {count} right, {marks:4.0%} of it, clipped {clipped:5.1%}, spread {spread:.2f}"
    )

# %%
# The first two prompts, by scale.
figure, grid = plt.subplots(2, len(scales), figsize=(8, 2.8), layout="constrained")
for column, scale in enumerate(scales):
    for line in range(2):
        grid[line, column].imshow(sweep[scale][4][line])
        grid[line, column].set_axis_off()
    grid[0, column].set_title(f"scale {scale:g}", fontsize=9)

# %%
# And the numbers.
figure, axes = plt.subplots(1, 3, figsize=(8, 2.8), layout="constrained")
for axis, index, name in zip(
    axes, (1, 2, 3), ("share of the prompt", "clipped values", "spread of latents"), strict=True
):
    axis.plot(scales, [sweep[scale][index] for scale in scales], marker="o")
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xticks([0, 1, 4, 30], ["0", "1", "4", "30"])
    axis.set(xlabel="scale", title=name)

# %%
# A negative prompt is the other branch
# -------------------------------------
# There is no third prediction. The text of the negative prompt takes the place of the empty one in uncond, and guidance
# leads away from it. Here the prompt says nothing about the size; the negative prompt does.
plain = "a red star on a white background"
sizes = {}
for negative in ("", "a small red star on a white background"):
    made = pipe([plain] * few(6, 2), negative_prompt=negative, guidance=4.0, seed=list(range(few(6, 2))), **options)
    sizes[negative] = [
        found.objects[0].size if found.objects else None for found in scenes.read(to_tensor(made.images))
    ]
    print(f"negative {negative!r}: {sizes[negative]}")
small = [listed.count("small") for listed in sizes.values()]
assert small[1] < small[0]

# %%
# Rules declare their space
# -------------------------
# At one level x0, eps and v are affine in each other, so a weighted sum of predictions is the same in all of them, when
# the weights add up to 1. A rule that takes a norm is not: *rescale* brings the spread of the guided prediction back to
# that of cond, and the spread of v is another number than the spread of eps.


def mixed(space, rescale):
    """Guided x0 at scale 7, combined (and rescaled) in a space."""
    c, u = (targets.change(out, "v", space, step.x, level) for out in (cond, uncond))
    g = u + 7.0 * (c - u)
    g = g * (c.std() / g.std()) if rescale else g
    return targets.change(g, space, "x0", step.x, level)


for rescale in (False, True):
    base = mixed("v", rescale)
    far = {space: float((mixed(space, rescale) - base).norm() / base.norm()) for space in ("eps", "x0")}
    print("with rescale:" if rescale else "plain:", {space: f"{d:.1e} from v" for space, d in far.items()})
    assert (min(far.values()) > 1e-3) if rescale else (max(far.values()) < 1e-4)

# %%
# In Pellucid each rule names its space, and a text may name another. The engine's answer is ours.
inputs = {"cond": {"context": texts[1:]}, "uncond": {"context": texts[:1]}}
for space in ("v", "eps", "x0"):
    rule = pellucid.Guidance.parse(f"7 + rescale phi=1 space={space}")
    with torch.no_grad():
        found = GuidedDenoiser(parts.network, parts.schedule, "v", guidance=rule, **inputs)(
            step.x, level, step.row.time
        )
    print(f"{rule.text():34}: {(found.x0 - mixed(space, True)).abs().max():.1e} from the one by hand")
    assert (found.x0 - mixed(space, True)).abs().max() < 1e-3

# %%
# What to notice
# --------------
# - From 0 to 1 the prompt comes in. This model follows it at scale 1 already: it is small, and its captions say all
#   there is to say. Models of photographs need more; that is a property of the model and its captions, not of the
#   formula.
# - At high scales the latents leave the range that the decoder knows; then images lose what was asked for.
# - The state is x; guidance changes the prediction, never x. It has no memory, and it may differ from step to step.

# %%
# What goes wrong
# ---------------
# **"More is better."** The share of the prompt that is right rises, stays, and falls.
best = max(sweep, key=lambda scale: sweep[scale][1])
print(f"best of these scales: {best:g} with {sweep[best][1]:.0%}; at {scales[-1]:g} it is {sweep[scales[-1]][1]:.0%}")
assert sweep[scales[-1]][1] < sweep[best][1] - 0.2
assert sweep[scales[-1]][3] > 1.5 * sweep[1.0][3]

# %%
# **"Guidance 0 is off."** 0 is uncond: the prompt is not in the result at all. Off is 1.
assert sweep[0.0][1] < sweep[1.0][1] - 0.2

# %%
# **"Scale 1 costs as much as scale 4."** By the formula scale 1 is cond, so uncond need not be asked for. The number
# of calls is that of the plan in both cases; what doubles is the batch of each call.
rows = []
hook = parts.network.register_forward_pre_hook(lambda network, given: rows.append(len(given[0])))
for scale in (1.0, 4.0):
    rows.clear()
    made = pipe(prompt, guidance=scale, seed=1, decode=False, **options)
    print(f"scale {scale:g}: plan of {made.plan.nfe} rows, {len(rows)} calls, {sum(rows)} latents through the network")
    assert sum(rows) == made.plan.nfe * (1 if scale == 1.0 else 2)
hook.remove()

# %%
# **"A rule works on whatever tensor is at hand."** Rescale written for v and applied to eps, as above, is another
# rule; late and early in a run by another amount.
for other in seen[1::2]:
    with torch.no_grad():
        u, c = parts.network(torch.cat([other.x] * 2), torch.full((2,), other.row.time), texts).chunk(2)
    results = []
    for space in ("v", "eps"):
        cs, us = (targets.change(out, "v", space, other.x, other.row.level) for out in (c, u))
        g = us + 7.0 * (cs - us)
        results.append(targets.change(g * (cs.std() / g.std()), space, "x0", other.x, other.row.level))
    print(
        f"sigma {other.row.level.sigma:.2f}: x0 differs by {(results[1] - results[0]).norm() / results[0].norm():.1%}"
    )

# %%
# Say it in an interview
# ----------------------
# "Classifier-free guidance runs the denoiser on the prompt and on the empty prompt – as one batch of two along axis 0
# – and extrapolates: uncond + s·(cond − uncond). The state x is not touched; the result is a prediction of the same
# shape that the scheduler uses as any other. A negative prompt is a different text in the uncond row. The price is
# twice the batch in every call, and at s = 1 nothing. The gain is adherence, the price is diversity (``pellucid study
# guidance`` measures it) and, at high s, predictions outside of what the decoder knows: in this lab adherence falls
# and the spread of the latents grows with the scale. Plain guidance is the same for eps, x0 and v; rescale and
# thresholding are not, so I ask in which space a rule was written."
#
# Your turn
# ---------
# ``pellucid lab 04 --starter answer.py``, then ``pellucid lab 04 --check answer.py``.
#
# Further reading
# ---------------
# - *Classifier-Free Diffusion Guidance*, Ho, Salimans, arXiv:2207.12598.
# - *Common Diffusion Noise Schedules and Sample Steps are Flawed*, Lin, Liu, Li, Yang, arXiv:2305.08891: rescale.
# - *Applying Guidance in a Limited Interval Improves Sample and Distribution Quality in Diffusion Models*,
#   Kynkäänniemi, Aittala, Karras, Laine, Aila, Lehtinen, arXiv:2404.07724.
# - :doc:`/decisions/0008-guidance-rules-declare-their-space`, :doc:`/study_guidance`: the sweep as a study, with
#   intervals.
