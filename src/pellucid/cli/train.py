"""`pellucid train`: a run from one config file, on one process or under torchrun."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import output
from pellucid.cli.options import CANCELLED, AsJson, Device, Out, flag, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from pellucid.train.config import TrainConfig
    from pellucid.train.explain import Collective, Explanation


def command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file that describes the whole run.")],
    out: Out = None,
    device: Device = None,
    until: Annotated[int | None, option("STEP", "Stop after this step; the next call continues.", min=1)] = None,
    data_changed: Annotated[bool, flag("--data-changed", "Continue although the data have changed.")] = False,
    explain: Annotated[bool, flag("--explain", "Do not train: show what each rank holds and sends.")] = False,
    ranks: Annotated[int | None, option("N", "With --explain: the number of ranks.", min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Train from a config file. An interrupted run continues from its last checkpoint.

    Example: [bold]pellucid train configs/cifar10.toml --out out/cifar10[/]

    On several GPUs: [bold]torchrun --nproc-per-node 8 -m pellucid.cli train configs/cifar10.toml[/]
    """
    if "RANK" in os.environ:  # DDP warns of an option that we choose, once a rank; torch reads this when it is imported
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from pellucid.core.errors import PellucidError
    from pellucid.core.reader import naming
    from pellucid.train.config import TrainConfig, chosen
    from pellucid.train.kinds import DATA, TASKS

    read = TrainConfig.load(config)
    with naming(config.name):  # what they hold is read where they are built
        chosen(read.data, DATA, "data")
        chosen(read.task, TASKS, "task")
    if explain:
        _show_explanation(read, ranks or int(os.environ.get("WORLD_SIZE", "1")), as_json=as_json)
        return
    if ranks is not None:
        raise PellucidError("--ranks must be given with --explain; torchrun says how many ranks train.", "usage")
    folder = out or Path("out") / config.stem
    try:
        from pellucid.train.trainer import train

        done = train(read, folder, device=device, until=until, data_changed=data_changed)
    except KeyboardInterrupt:
        if not int(os.environ.get("RANK", "0")):
            words = {"--out": out, "--device": device, "--until": until, "--json": "" if as_json else None}
            _show_stopped(read.steps, folder, config, words)
        raise typer.Exit(CANCELLED) from None
    if int(os.environ.get("RANK", "0")):
        return
    if as_json:
        output.print_json({**vars(done), "folder": str(done.folder)})
        return
    left = "" if done.steps == read.steps else f" of {read.steps}"
    bad = f"; {done.skipped} images could not be read and were skipped" if done.skipped else ""
    print(f"{done.steps} steps{left} in {done.seconds:.0f} s → {done.folder}{bad}")


def _show_stopped(steps: int, folder: Path, config: Path, words: dict[str, Any]) -> None:
    """After Ctrl-C: what is kept, and the command that continues."""
    from pellucid.train.checkpoint import Checkpoints

    kept = max(Checkpoints(folder / "checkpoints").steps(), default=0)
    options = [word for name, value in words.items() if value is not None for word in (name, str(value)) if word]
    again = shlex.join(["pellucid", "train", str(config), *options])
    if "RANK" in os.environ:
        again = "the same torchrun command"
    print(f"cancelled: {folder} keeps {kept} of {steps} steps. Continue with: {again}", file=sys.stderr)


# --- What each rank holds and sends ---------------------------------------------------------------------------------


def _show_explanation(config: TrainConfig, ranks: int, *, as_json: bool) -> None:
    """Builds the network on the CPU, and says what a run on this many ranks would do with it."""
    import torch

    from pellucid.train.config import chosen
    from pellucid.train.explain import of_run
    from pellucid.train.kinds import TASKS

    task = chosen(config.task, TASKS, "task").build(config.seed, torch.device("cpu"))
    found = of_run(task, config, ranks)
    if as_json:
        output.print_json(found.to_json())
    else:
        _print_tables(found)


def _print_tables(found: Explanation) -> None:
    from pellucid.pipeline.memory import size_text

    console = output.console()
    console.print(
        f"{found.parameters:,} parameters, {found.trained:,} trained · {found.ranks} ranks · {found.strategy} · "
        f"accumulate {found.accumulate}"
    )
    rows = [(row.what, row.how, size_text(row.whole), size_text(row.per_rank)) for row in found.held]
    rows.append(("together", "", "", size_text(found.bytes_per_rank)))
    columns = ("held between steps", "how", "in all", "per rank")
    console.print(output.table(*columns, right=columns[2:], rows=rows))
    if not found.collectives:
        console.print("One rank: nothing is sent.")
        return
    console.print(_collective_table(found.collectives, "in each optimiser step"))
    console.print(_collective_table(found.of_log, "in each line of the log"))
    console.print(f"Each rank sends, and receives, {size_text(found.sent_per_step)} a step (rings).")


def _collective_table(collectives: Sequence[Collective], when: str) -> Table:
    """The collectives; those alike in kind and pass are one row, where there are many."""
    from pellucid.pipeline.memory import size_text

    groups: dict[tuple[str, str, str], list[Collective]] = {}
    for one in collectives:
        groups.setdefault((one.operation, one.when, one.what.split(" of ")[0].split(", bucket")[0]), []).append(one)
    rows = []
    for (operation, phase, what), same in groups.items():
        name = same[0].what if len(same) == 1 else f"{what}, {len(same)} groups"
        times, sent = sum(one.times for one in same), sum(one.times * one.sent for one in same)
        size = sum(one.times * one.size for one in same)
        rows.append((operation, name, phase, str(times), size_text(size), size_text(sent)))
    columns = (when, "of", "pass", "times", "bytes", "sent per rank")
    return output.table(*columns, right=columns[3:], rows=rows)
