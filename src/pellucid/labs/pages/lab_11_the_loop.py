r"""
Lab 11: The loop from end to end
================================

**Question.** From the prompt to the image: which tensors live on the way, which of them change at each step, and
where does the time go?

**Handbook.** :doc:`/handbook/inference_loop`

**Mechanism.** Everything before the loop makes inputs, everything after it makes pixels. The loop itself is one line
for every sampler: with a prediction :math:`p_0` of this call, earlier ones :math:`p_1, p_2, \dots` and the state x,
the next state is a weighted sum, and the weights are known before the run begins.

.. math:: p_0 = \text{denoise}(x, t, \text{text}), \qquad x \leftarrow w_x\,x + w_0\,p_0 + w_1\,p_1 + \dots
"""

# %%
# Before the loop: the words
# --------------------------
# The prompt becomes numbers twice: token ids, then one vector a token. The empty prompt goes the same way, for
# guidance. Both are made once. No step changes them.
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import pellucid
from pellucid import scenes
from pellucid.core.plan import REGISTERS
from pellucid.evidence import trace
from pellucid.labs import few
from pellucid.models.vae import from_diffusion
from pellucid.pipeline.encoders.text import encode_prompts

prompt = "a large striped red star on a white background"
pipe = pellucid.load("scenes-128")
parts = pipe.components
tokens = parts.tokenizers[0].encode(prompt)
context = encode_prompts(parts.text_encoders, parts.tokenizers, ["", prompt]).context
print(f"{len(tokens)} token ids with padding, {list(tokens)[:5]}…")
print(f"context {tuple(context.shape)}: (uncond and cond, tokens, width)")

# %%
# Before the loop: the plan and the noise
# ---------------------------------------
# The plan is the sampler as a table. DPM++ 2M remembers one earlier prediction, so its rows have a weight for ``p1``;
# the first row has none, because nothing came before it.
steps = few(20, 8)
plan = pellucid.compile_plan("dpmpp_2m", schedule=parts.schedule, target=parts.target, grid="trailing", steps=steps)
noise = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(11))
for index in (0, 1, steps // 2, steps - 1):
    row = plan.rows[index]
    weights = ", ".join(f"{REGISTERS[register]} {weight:+.3f}" for register, weight in row.x)
    print(f"row {index:2d}: time {row.time:5.1f}, α {row.level.alpha:.3f}, σ {row.level.sigma:.3f}; next x = {weights}")


# %%
# The loop
# --------
# The network is called with x and its copy, for uncond and cond at once. Its output is v; guidance mixes the two, and
# the result is read as x0. Then the row's weights make the next x. That is all.
def predicted(x, row, scale=4.0):
    with torch.no_grad():
        uncond, cond = parts.network(torch.cat([x, x]), torch.full((2,), row.time), context).chunk(2)
    v = uncond + scale * (cond - uncond)
    return row.level.alpha * x - row.level.sigma * v


def loop(x, rows, history=(), watch=lambda row, x, x0: None):
    for row in rows:
        history = (predicted(x, row), *history)[:2]  # p0, p1
        registers = {"x": x, **{f"p{i}": past for i, past in enumerate(history)}}
        watch(row, x, history[0])
        x = sum(weight * registers[REGISTERS[register]] for register, weight in row.x)
    return x, history


# %%
# By hand, and by the engine with the same noise: the latents agree to the rounding of float32.
seen = []
began = time.perf_counter()
latents, history = loop(noise * plan.initial_scale, plan.rows, watch=lambda *step: seen.append(step))
looped = time.perf_counter() - began
made = pipe(prompt, plan=plan, guidance=4.0, latents=noise)
off = float((latents - made.latents).abs().max())
print(f"{len(seen)} steps in {looped:.2f} s, {1000 * looped / len(seen):.0f} ms each; engine off by {off:.1e}")
assert off < 1e-3


# %%
# After the loop: pixels
# ----------------------
# The VAE is called once, at the end. The four channels are divided by the scaling factor first: the diffusion saw
# latents of spread 1, the decoder was trained on its own.
def decoded(latents):
    with torch.no_grad():
        return parts.vae.decode(from_diffusion(parts.vae.config, latents)).clamp(-1, 1)


began = time.perf_counter()
image = decoded(latents)
took = time.perf_counter() - began
print(f"latents {tuple(latents.shape)} → pixels {tuple(image.shape)} in {took:.2f} s: {took / looped:.0%} of the loop")
wanted = scenes.parse(prompt)
print("as prompted:", scenes.grade(image, wanted)[0].right)
assert scenes.grade(image, wanted)[0].right

# %%
# The run as a film
# -----------------
# Above x, below the x0 that the network saw in it. Places are decided early, edges late.
figure, axes = plt.subplots(2, 6, figsize=(8.4, 3.2), layout="constrained")
for column, index in enumerate(torch.linspace(0, len(seen) - 1, 6).round().int().tolist()):
    row, *state = seen[index]
    names = (f"x, step {index + 1}", f"x0, σ {row.level.sigma:.2f}")
    for axis, name, shown in zip(axes[:, column], names, state, strict=True):
        axis.imshow((decoded(shown)[0].permute(1, 2, 0) + 1) / 2)
        axis.set_title(name, fontsize=9)
        axis.set_axis_off()

# %%
# The same run as a trace
# -----------------------
# What was printed by hand so far is what a trace holds of every step: levels, norms, what guidance changed, times. The
# file can be shown, compared with another run and replayed bit by bit (``pellucid trace``).
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "run.safetensors"
    with trace.Recorder(path) as recorder:
        pipe(prompt, plan=plan, guidance=4.0, latents=noise, observers=[recorder])
    found = trace.read(path)
print("step  time     σ    rms x  rms x0  guidance changed")
size = latents.numel() ** 0.5
for step in found.steps[:: max(1, steps // 5)]:
    x, x0, delta = (float(step.norms[name][0]) / size for name in ("x", "x0", "delta"))
    print(f"{step.index:4d} {step.time:6.1f} {step.level.sigma:5.2f} {x:7.3f} {x0:7.3f} {delta:12.3f}")

# %%
# What guidance changes is large at the start, where the prompt decides what there will be, and small at the end. The
# rms of x hardly moves: the plan keeps :math:`\alpha^2 + \sigma^2 = 1`.
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for name, label in (("x", "x"), ("x0", "x0"), ("delta", "x0 − x0 of the prompt alone")):
    rms = [float(step.norms[name][0]) / size for step in found.steps]
    axis.plot(range(1, steps + 1), rms, "o-", ms=4, label=label)
axis.set(xlabel="step", xticks=range(1, steps + 1, 2), ylabel="rms of the latents", title="One run, step by step")
axis.legend(fontsize=9)

# %%
# What to notice
# --------------
# - One tensor is the state: x, (1, 4, 16, 16). Context and plan are constant; predictions are kept as long as a row has
#   a weight for them, here two.
# - The batch is doubled only inside the call. Nothing outside of it knows of guidance.
# - The loop does not know its sampler. Another table is another sampler, and the number of rows is the number of calls.
# - Time is in the calls: the weighted sums and the decoder are the rest.
spent = {stage.name: stage.seconds for stage in made.stages}
print("  ".join(f"{name} {seconds:.2f} s" for name, seconds in spent.items()))
calls = sum(step.seconds["model"] for step in found.steps)
sums = sum(step.seconds["update"] for step in found.steps)
print(f"of the traced loop: {calls:.2f} s in the network, {1000 * sums:.1f} ms in the weighted sums")
assert calls > 10 * sums

# %%
# What goes wrong
# ---------------
# **A history that is not emptied.** A multistep sampler remembers. A scheduler object that is shared by two runs and
# not reset takes the last prediction of the first run for its own past: its first step extrapolates,
# :math:`p_0 + (p_0 - p_1)/2`, from another image. Here is that one row, and all others as they should be. The plan
# has no state to reset; the history belongs to the run.
other = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(12))
clean, _ = loop(other, plan.rows)
(x_of, keep), (p0_of, push) = plan.rows[0].x
late = replace(plan.rows[0], x=((x_of, keep), (p0_of, 1.5 * push), (p0_of + 1, -0.5 * push)))
stale, _ = loop(other, [late, *plan.rows[1:]], history)
apart = float((stale - clean).square().mean().sqrt())
print(f"rms {apart:.3f} between the two results of one noise, for latents of rms {clean.square().mean().sqrt():.3f}")
assert apart > 0.05

# %%
# **Uncond and cond swapped.** Both halves have the same shape, so nothing fails. The prompt is then what the image is
# pushed away from. **Guidance applied to x.** The two runs are mixed after the loop, not in every call: that
# extrapolates between two finished images. **Stopped early to save time.** x is still noise plus image, and a
# decoder does not denoise.
right, context = context, context.flip(0)
swapped, _ = loop(noise, plan.rows)
context = right
with_prompt, without = (pipe(words, plan=plan, guidance=1.0, latents=noise, decode=False) for words in (prompt, ""))
mixed = without.latents + 4 * (with_prompt.latents - without.latents)
early, _ = loop(noise, plan.rows[: steps // 2])
broken = {"right": latents, "swapped": swapped, "guided after": mixed, "half the rows": early}

# %%
# The reader of scenes looks at the four.
figure, axes = plt.subplots(1, 4, figsize=(8, 2.4), layout="constrained")
grades = {}
for axis, (name, found) in zip(axes, broken.items(), strict=True):
    image = decoded(found)
    grades[name] = scenes.grade(image, wanted)[0].right
    axis.imshow((image[0].permute(1, 2, 0) + 1) / 2)
    axis.set_title(f"{name}\nas prompted: {'yes' if grades[name] else 'no'}", fontsize=9)
    axis.set_axis_off()
print(grades)
assert list(grades.values()) == [True, False, False, False]

# %%
# Say it in an interview
# ----------------------
# "Text encoding, the loop and decoding are three stages with three networks. The state of the loop is one latent,
# (B, 4, 16, 16) here, and a short history of predictions for multistep samplers. A step is one call of the denoiser on
# the doubled batch, guidance on its output, a conversion to x0, and a weighted sum with weights that the plan fixed
# before the run. So latency is calls times the cost of a call plus a decoder once; I get the split from a trace and do
# not guess it. More steps cost linearly and help less and less; a multistep sampler gets second order at one call a
# step, and pays with state that must not leak from run to run. That is why we keep the plan frozen and the history in
# the run: one pipeline object can then serve many requests at once."
#
# Your turn
# ---------
# Write guidance, the weighted sum and the loop yourself: ``pellucid lab 11 --starter answer.py``, fill it in, and check
# it with ``pellucid lab 11 --check answer.py``.
#
# Further reading
# ---------------
# - *High-Resolution Image Synthesis with Latent Diffusion Models*, Rombach, Blattmann, Lorenz, Esser, Ommer,
#   arXiv:2112.10752: the three stages.
# - *DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic Models*, Lu, Zhou, Bao, Chen, Li, Zhu,
#   arXiv:2211.01095: the table of this page.
# - :doc:`lab 12 <lab_12_samplers_as_tables>` makes tables; :doc:`lab 10 <lab_10_memory>` says what the stages cost in
#   memory; ``pellucid sample … --trace run.safetensors`` records any run.
