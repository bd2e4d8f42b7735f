r"""
Lab 13: What a schedule does to training
========================================

**Question.** A schedule decides how often a network sees each noise level, and a weighting how much each counts. What
do the two do to what is learnt, and what do several machines exchange while they learn it?

**Handbook.** :doc:`/handbook/objective`

**Mechanism.** Training draws a time, noises the data to its level, and weighs the squared error of the answer:

.. math::
   \mathcal{L} = \mathbb{E}_{t,\,x_0,\,\epsilon}\; w(\lambda_t)\,
   \big\| f(\alpha_t x_0 + \sigma_t \epsilon,\, t) - \text{target} \big\|^2,
   \qquad \lambda = \ln(\alpha / \sigma)

Networks do not care about :math:`t`. They see :math:`\lambda`. So a schedule is, for training, a *density over λ*.
"""

import copy
import math
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
from torch import nn

import pellucid
from pellucid import scenes, schedules
from pellucid.pipeline.images import to_tensor
from pellucid.labs import few
from pellucid.pipeline.memory import size_text
from pellucid.train.draws import Draws, seeded
from pellucid.train.explain import explain
from pellucid.train.objective import ByLevel, Objective
from pellucid.train.objective import Times
from pellucid.train.objective import Weighting

NAMES = ("linear", "cosine", "sqrt_alpha_bar")

# %%
# Where the levels are
# --------------------
# The same uniform times, as λ. The linear schedule spends more than a third of its times on nearly pure noise.

times = Times("uniform", stratified=True).draw(4000, schedules.make("linear"), torch.Generator().manual_seed(0))
fig, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for name in NAMES:
    lam = [schedules.make(name).level(float(time)).lam for time in times[:: few(1, 10)]]
    noisy = sum(value < -2 for value in lam) / len(lam)
    print(f"  {name:<15} λ from {min(lam):6.2f} to {max(lam):5.2f}; {noisy:.0%} of the times below λ = -2")
    axis.hist(lam, bins=60, range=(-6, 6), density=True, histtype="step", label=name)
axis.set(
    xlabel="λ = ln(α / σ): noise on the left, data on the right", ylabel="density", title="What a network is shown"
)
axis.legend()

# %%
# A tiny network, and data whose truth is known
# ---------------------------------------------
# Points of a ring of eight Gaussians; the network gets the number of the Gaussian as its condition, as a text-to-image
# model gets its prompt. It predicts v. `Objective` is the trainer's own: times, noise, target and weight.

ring = pellucid.oracle.ring()


class Net(nn.Module):
    """(x, time, label) → v, all of it small."""

    def __init__(self):
        super().__init__()
        wide = 64
        layers = [nn.Linear(2 + 16 + 8, wide), nn.SiLU(), nn.Linear(wide, wide), nn.SiLU(), nn.Linear(wide, 2)]
        self.body = nn.Sequential(*layers)

    def forward(self, x, time, label):
        angle = time[:, None] / 1000 * math.pi * 2.0 ** torch.arange(-2, 6)  # (B, 8)
        which = nn.functional.one_hot(label, 8).float()
        return self.body(torch.cat([x, angle.sin(), angle.cos(), which], dim=1))


# %%
# The loop. Every random number is drawn by its address (seed, step, name), so that all runs meet the same points and
# the same noise.


def batch_of(draws):
    """Points of the ring (B, 2) and their labels, for the part of a batch that `draws` names."""
    label = draws.mine(torch.randint(8, (draws.batch,), generator=draws.generator("label")))
    return (ring.means[label] + ring.spreads[label, None] * draws.normal("data", (2,))).float(), label


# %%
# `ByLevel` sums up the errors in bins of λ, as the log of `pellucid train` has them.


def train(objective, steps):
    """A network, and its errors by λ over the second half of the run."""
    with seeded(0):
        network = Net()
    optimizer, seen_levels = torch.optim.Adam(network.parameters(), lr=3e-3), ByLevel(-6, 6, 12)
    for step in range(steps):
        x0, label = batch_of(Draws(0, step, batch=256))
        graded = objective(network, x0, Draws(0, step, batch=256), {"label": label})
        optimizer.zero_grad()
        graded.loss.backward()
        optimizer.step()
        if step >= steps // 2:
            seen_levels.add(graded)
    return network, seen_levels.rows()


# %%
# Loss by noise level
# -------------------
# Three schedules, the same network, the same weight for all. The curve is nearly one curve, since the question at a λ
# is the same question under every schedule. What differs is where its points lie, and how many.

steps = few(400, 30)
even = Times("uniform", stratified=True)
fig, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
for name in NAMES:
    _, rows = train(Objective(schedules.make(name), "v", even), steps)
    axis.plot([r["lam"] for r in rows], [r["mean"] for r in rows], marker="o", markersize=4, label=name)
    mean = sum(r["mean"] * r["count"] for r in rows) / sum(r["count"] for r in rows)
    print(f"  {name:<15} mean loss {mean:.3f}; bins with something in them: {len(rows)} of 12")
axis.set(xlabel="λ", ylabel="squared error of v", title="The loss of three schedules, by noise level")
axis.legend()

# %%
# What min-SNR weighs at pure noise
# ---------------------------------
# min-SNR weighs the error of x0 by min(SNR, 5): below SNR 5 a level counts as little as it has signal. As weights on
# the squared error of v, which is what the network predicts:

cosine = schedules.make("cosine")
print("   time      λ    uniform  min_snr")
for time in (999, 950, 900, 700, 500, 200):
    level = cosine.level(time)
    weights = [Weighting(kind).on("v", level) for kind in ("uniform", "min_snr")]
    print(f"  {time:>5} {level.lam:>6.2f} {weights[0]:>9.3f} {weights[1]:>8.3f}")
assert Weighting("min_snr").on("v", cosine.level(950)) < 0.01

# %%
# At pure noise x says nothing, and the answer is what the *label* says: the middle of its Gaussian. That is where
# layout comes from. Two runs that differ in the weighting alone, asked at pure noise and at a middle level:


@torch.no_grad()
def off(network, time):
    """How far the predicted x0 is from the mean of the label's Gaussian, on average."""
    label, level = torch.arange(512) % 8, cosine.level(time)
    noise = torch.randn(512, 2, generator=torch.Generator().manual_seed(5))
    x = level.alpha * ring.means[label].float() + level.sigma * noise
    x0 = level.alpha * x - level.sigma * network(x, torch.full((512,), float(time)), label)
    return float((x0 - ring.means[label]).norm(dim=1).mean())


found = {}
for kind in ("uniform", "min_snr"):
    network, _ = train(Objective(cosine, "v", even, Weighting(kind)), few(500, 60))
    found[kind] = [off(network, time) for time in (999, 900, 500)]
    print(f"  {kind:<8} off by {'{:.2f} at pure noise, {:.2f} at 900, {:.2f} at 500'.format(*found[kind])}")
assert found["min_snr"][0] > 1.5 * found["uniform"][0]

# %%
# scenes-128 was trained twice for this reason. After its first run, with min-SNR, things had their shape, colour,
# texture and size in 99.7 of 100 images and their *place* in 34 (``configs/scenes_text_unet_layout.toml`` says so).
# The second run weighed every level alike and drew more noisy times; its model card has 100 % of places.
#
# What ranks replicate, shard and exchange
# ----------------------------------------
# A batch is dealt to ranks. Each computes the gradient of its part, and the mean of these is the gradient of the whole
# batch. Here are two ranks in one process: their parts see the noise that the whole batch would have given them.

objective = Objective(cosine, "v", even)


def gradient(part=0, parts=1):
    """The gradient of one rank's part of a batch, as one long vector."""
    with seeded(1):
        network = Net()
    draws = Draws(7, 0, batch=256, part=part, parts=parts)
    x0, label = batch_of(draws)
    objective(network, x0, draws, {"label": label}).loss.backward()
    return torch.cat([p.grad.flatten() for p in network.parameters()])


alone, ranks = gradient(), [gradient(part, 2) for part in (0, 1)]
print(f"  one process against the mean of two ranks: {float((alone - sum(ranks) / 2).abs().max()):.1e} apart")
print(f"  the two ranks against each other:          {float((ranks[0] - ranks[1]).abs().max()):.1e} apart")
assert torch.allclose(alone, sum(ranks) / 2, atol=1e-5)

# %%
# What that costs is known before anything runs. ``pellucid train CONFIG --explain --ranks 8`` prints it; here for the
# UNet of scenes-128. `ddp` keeps everything on every rank and averages gradients. `fsdp` keeps a share, and must gather
# weights.

pipe = pellucid.load("scenes-128")
unet = copy.deepcopy(pipe.components.network).requires_grad_(True)
said = {strategy: explain(unet, 8, strategy, ema=(500_000,)) for strategy in ("ddp", "fsdp")}
for strategy, one in said.items():
    holds, sends = size_text(one.bytes_per_rank), size_text(one.sent_per_step)
    print(f"  {strategy}: each of {one.ranks} ranks holds {holds} and sends {sends} a step")
    for held in one.held:
        print(f"      {held.what:<18} {held.how:<10} {size_text(held.per_rank)}")
    kinds = {f"{c.operation} of {c.what.split(' of ')[0].split(', ')[0]}" for c in one.collectives}
    print("      exchanged:", ", ".join(sorted(kinds)))
assert said["fsdp"].bytes_per_rank < said["ddp"].bytes_per_rank / 4
assert said["fsdp"].sent_per_step > said["ddp"].sent_per_step

# %%
# What to notice
# --------------
# - A schedule in training is a density over λ, a weighting multiplies it. Only their product matters for what is
#   learnt.
# - The loss at a λ hardly depends on the schedule; the *mean* loss does, and is not to be compared.
# - Layout is decided where there is almost no signal. A weighting that is good for detail can forget it.
# - `ddp` trades memory for traffic, `fsdp` traffic for memory.
#
# What goes wrong
# ---------------
# **"Schedules can be swapped when sampling."** The network knows each level under the time that it was trained with.
# With the times of another schedule it expects the wrong amount of noise. The engine refuses such a plan; a model whose
# *config* is wrong it has to believe.

prompts = scenes.prompts(few(3, 1), objects=1, seed=3)
asked = {"prompt": [caption for caption, _ in prompts], "seed": list(range(len(prompts))), "guidance": 4.0}
try:
    pipe(plan=pellucid.compile_plan("dpmpp_2m", schedule="linear", target="v", grid="trailing", steps=10), **asked)
    refused = False
except pellucid.PellucidError as error:
    refused = True
    print(f"error[{error.code}]: {error}")
assert refused

# %%
# So we lie to it: the same networks, with another schedule in the scheduler's config.

fig, axes = plt.subplots(1, 3, figsize=(7, 2.6), layout="constrained")
right, latents = {}, {}
for axis, name in zip(axes, ("cosine", "linear", "sqrt_alpha_bar"), strict=True):
    believed = pellucid.Pipeline(replace(pipe.components, schedule=schedules.make(name), scheduler=None))
    made = believed(**asked, sampler="dpmpp_2m", grid="trailing", steps=few(12, 6))
    right[name] = sum(grade.right for grade in scenes.grade(to_tensor(made.images), [query for _, query in prompts]))
    latents[name] = made.latents
    moved = float((made.latents - latents["cosine"]).square().mean().sqrt())
    print(f"  sampled with {name:<15} {right[name]} of {len(prompts)} images right, latents moved by {moved:.2f}")
    axis.imshow(made.images[-1])
    axis.set_title(f"sampled with {name}", fontsize=9)
    axis.axis("off")
assert right["cosine"] == len(prompts)
assert right["sqrt_alpha_bar"] == 0

# %%
# The worst is not the ruin on the right. It is the image in the middle: it passes, and it is not the model's image.

apart = float((latents["linear"] - latents["cosine"]).square().mean().sqrt() / latents["cosine"].std())
print(f"linear in the place of cosine: {apart:.0%} of the latents' deviation")
assert apart > 0.05

# %%
# **"The lower loss is the better schedule."** Take a *perfect* network. Given the label, it knows a Gaussian of spread
# s, and no network has a smaller squared error of v at a level than s² / (σ² + s²·α²). Its mean over uniform times
# differs from schedule to schedule, although it cannot be improved under any: these are averages over other levels.

spread = float(ring.spreads[0])
floors = {}
for name in NAMES:
    levels = [schedules.make(name).level(float(time)) for time in range(0, 1000, few(1, 10))]
    floors[name] = sum(spread**2 / (at.sigma**2 + (spread * at.alpha) ** 2) for at in levels) / len(levels)
print("  the least loss there is:", ", ".join(f"{name} {value:.3f}" for name, value in floors.items()))
assert max(floors.values()) > 1.5 * min(floors.values())

# %%
# **"eps works with any schedule."** With zero terminal SNR the first level is pure noise, :math:`\alpha = 0`. There x0
# = (x − σ·eps)/α divides by nothing, whatever the network says. The engine refuses the pair, in training and in
# sampling.

zero = schedules.make("linear", zero_snr=True)
try:
    Objective(zero, "eps")
    code = None
except pellucid.PellucidError as error:
    code = error.code
    print(f"error[{code}]: {error}")
assert code == "target-schedule"
for time in (999, 998, 990, 900):
    level = zero.level(time)
    grown = math.inf if level.alpha == 0 else level.sigma / level.alpha
    print(f"  time {time}: an error of eps becomes one of x0 that is {grown:.3g} times as large")
assert zero.level(999).alpha == 0

# %%
# Say it in an interview
# ----------------------
# "Training draws a time for each image of a batch (B,), noises x0 to (alpha, sigma) and regresses a target: eps, v or
# x0. The schedule is a density over log-SNR and the loss weight multiplies it, so I look at the loss by λ and not at
# its mean. min-SNR trades low noise against high noise; at nearly pure noise it weighs almost nothing, and that is
# where layout is decided. At sampling the network must get the times of its own schedule. Across ranks, data parallel
# replicates weights, moments and means and all-reduces gradients once per step; FSDP shards all of them and pays with
# all-gathers of weights in forward and backward."
#
# Your turn
# ---------
# ``pellucid lab 13 --starter answer.py``: the v target, min-SNR's weight on v, the mean of gradients over ranks, and
# the density of λ. Then ``pellucid lab 13 --check answer.py``.
#
# Further reading
# ---------------
# - Nichol and Dhariwal, *Improved Denoising Diffusion Probabilistic Models*, arXiv:2102.09672
# - Salimans and Ho, *Progressive Distillation for Fast Sampling of Diffusion Models*, arXiv:2202.00512 (v)
# - Hang et al., *Efficient Diffusion Training via Min-SNR Weighting Strategy*, arXiv:2303.09556
# - Lin et al., *Common Diffusion Noise Schedules and Sample Steps are Flawed*, arXiv:2305.08891 (zero terminal SNR)
# - Kingma and Gao, *Understanding Diffusion Objectives as the ELBO with Simple Data Augmentation*, arXiv:2303.00848
# - :doc:`/train`, :doc:`/results/schedules`
