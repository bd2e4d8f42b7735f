"""What a call costs: operations as counted by hand, memory as it lives, and a table that holds them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_networks import PIXART, UNET

from pellucid.core.errors import PellucidError
from pellucid.train.initial import fresh

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import network_cost
from network_cost import activations, call_of, compare, networks_of, operations, roles_of, tables

CONFIGS = Path(__file__).parents[2] / "configs"


def test_operations_are_those_of_the_formula() -> None:
    """A PixArt of width D with L patches and T tokens; each product of matrices counts twice its size."""
    depth, D, C, T, L = 2, 32, 32, 10, 16
    network = fresh(PIXART, 0).eval()
    patches = 2 * L * (2 * 2 * 4) * D
    told = 2 * (256 * D + D * D) + 2 * D * 6 * D + 2 * T * (C * D + D * D)
    text = 2 * (2 * L * D * D) + 2 * (2 * T * D * D) + 2 * (2 * L * T * D)
    block = 4 * (2 * L * D * D) + 2 * (2 * L * L * D) + text + 2 * (2 * L * D * 4 * D)
    end = 2 * L * D * (2 * 2 * 4)
    found, heard = operations(network, call_of(network, 8, 1, T))
    assert found == patches + told + depth * block + end
    assert heard == depth * text + 2 * T * (C * D + D * D)


def test_parameters_have_one_role_each() -> None:
    for raw in (UNET, PIXART):
        network = fresh(raw, 0)
        roles = roles_of(network)
        assert sum(roles.values()) == sum(p.numel() for p in network.parameters())
        assert all(roles.values())


def test_memory_grows_with_the_batch() -> None:
    network = fresh(UNET, 0).eval()
    one, four = (activations(call_of(network, 8, batch, 10), torch.device("cpu")) for batch in (1, 4))
    assert 3 * one < four <= 4 * one  # some buffers do not depend on it
    assert one > 16 * 8 * 8 * 4  # the first convolution's result alone


def test_networks_are_compared_at_every_size(tmp_path: Path) -> None:
    networks = {"UNet": fresh(UNET, 0), "DiT": fresh(PIXART, 0)}
    found = compare(networks, (8, 16), rounds=3, calls=1, tokens=10, batch=2)
    assert [(cost.network, cost.side) for cost in found.costs] == [("UNet", 8), ("DiT", 8), ("UNet", 16), ("DiT", 16)]
    for cost in found.costs:
        assert 0 < cost.fastest <= cost.milliseconds <= cost.slowest
        assert 0 < cost.text_flops < cost.flops
    small, large = (cost for cost in found.costs if cost.network == "UNet")
    assert large.flops > 3.5 * small.flops
    assert large.activations > 3 * small.activations
    assert small.weights == 4 * found.parameters["UNet"]
    with Image.open(network_cost.write(found, tmp_path / "cost")) as chart:
        assert chart.width > 1000
    held = json.loads((tmp_path / "cost" / "cost.json").read_text("utf-8"))
    assert held["costs"][0]["flops"] == found.costs[0].flops
    text = (tmp_path / "cost" / "cost.md").read_text("utf-8")
    assert "| 8 × 8 |" in text
    assert "self-attention" in text
    assert len(tables(found)) == 2


def test_the_recipes_are_of_one_size() -> None:
    found = networks_of(CONFIGS / "scenes_text_unet.toml", CONFIGS / "scenes_text_dit.toml")
    unet, dit = (sum(p.numel() for p in found[name].parameters()) for name in ("UNet", "DiT"))
    assert abs(unet / dit - 1) < 0.02


def test_what_cannot_be_compared_is_one_line() -> None:
    networks = {"DiT": fresh(PIXART, 0)}
    for bad in ({"sides": ()}, {"sides": (0,)}, {"sides": (4096,)}, {"rounds": 0}, {"batch": 0}):
        with pytest.raises(PellucidError, match="numbers from 1"):
            compare(networks, **bad)
    with pytest.raises(PellucidError, match=r"task\.network"):
        networks_of(CONFIGS / "cifar10_schedules_smoke.toml")
    with pytest.raises(PellucidError, match="device"):
        compare(networks, device="nowhere")


def test_the_command_writes_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(CONFIGS / "scenes_text_unet.toml"), "--sides", "8", "--rounds", "1", "--calls", "1", "--tokens", "8"]
    assert network_cost.main([*words, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "cost.png")
    assert {path.name for path in tmp_path.iterdir()} == {"cost.json", "cost.md", "cost.png"}
    assert network_cost.main([*words, "--batch", "0", "--out", str(tmp_path)]) > 0
