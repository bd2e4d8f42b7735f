"""AdamW, its rate, and its state as plain named tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError
from pellucid.train.config import OptimizerConfig


def build(network: nn.Module, config: OptimizerConfig, *, capture: bool = False) -> torch.optim.AdamW:
    """AdamW over what is trained, with its moments made now: a checkpoint then has the same names at every step.

    Biases, norms and other vectors are not decayed.
    """
    trained = [p for p in network.parameters() if p.requires_grad]
    if not trained:
        raise PellucidError("network must have parameters to train; got none.", "nothing-to-train")
    on_gpu = trained[0].device.type == "cuda"
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    made = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=torch.tensor(config.rate, device=trained[0].device) if capture else config.rate,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=on_gpu,
        foreach=None if on_gpu else True,
        capturable=capture,
    )
    for p in trained:
        made.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device if on_gpu else "cpu"),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return made


def rate_at(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of a step, counted from 0: a linear rise, then what `decay` says."""
    rise = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    if config.decay == "constant" or step < config.warmup:
        return config.rate * rise
    part = (step - config.warmup) / max(1, steps - config.warmup)
    return config.rate * 0.5 * (1.0 + math.cos(math.pi * min(part, 1.0)))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def state(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The moments of each trained parameter, by the parameter's name."""
    held = {}
    for name, parameter in network.named_parameters():
        for key, tensor in optimizer.state.get(parameter, {}).items():
            held[f"{name}/{key}"] = tensor
    return held
