"""`pellucid train --explain`: what each rank holds and sends, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pellucid.cli import output
from pellucid.pipeline.memory import size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pellucid.train.config import TrainConfig
    from pellucid.train.explain import Collective, Explanation


def show(config: TrainConfig, ranks: int, *, as_json: bool) -> None:
    """Builds the network on the CPU, and says what a run of so many ranks would do with it."""
    import torch

    from pellucid.train.config import chosen
    from pellucid.train.explain import of_run
    from pellucid.train.kinds import TASKS

    task = chosen(config.task, TASKS, "task").build(config.seed, torch.device("cpu"))
    found = of_run(task, config, ranks)
    if as_json:
        output.print_json(found.to_json())
    else:
        print_tables(found)


def print_tables(found: Explanation) -> None:
    console = output.console()
    console.print(
        f"{found.parameters:,} parameters, {found.trained:,} trained · {found.ranks} ranks · {found.strategy} · "
        f"accumulate {found.accumulate}"
    )
    held = output.table("held between steps", "how", "in all", "per rank", right=("in all", "per rank"))
    for row in found.held:
        held.add_row(row.what, row.how, size_text(row.whole), size_text(row.per_rank))
    held.add_row("together", "", "", size_text(found.bytes_per_rank))
    console.print(held)
    if not found.collectives:
        console.print("One rank: nothing is sent.")
        return
    console.print(collective_table(found.collectives, "in each optimiser step"))
    console.print(collective_table(found.of_log, "in each line of the log"))
    console.print(f"Each rank sends, and receives, {size_text(found.sent_per_step)} a step (rings).")


def collective_table(collectives: Sequence[Collective], when: str):  # type: ignore[no-untyped-def]
    """The collectives; those alike in kind and pass are one row, where there are many."""
    table = output.table(
        when, "of", "pass", "times", "bytes", "sent per rank", right=("times", "bytes", "sent per rank")
    )
    groups: dict[tuple[str, str, str], list[Collective]] = {}
    for one in collectives:
        groups.setdefault((one.operation, one.when, one.what.split(" of ")[0].split(", bucket")[0]), []).append(one)
    for (operation, phase, what), rows in groups.items():
        name = rows[0].what if len(rows) == 1 else f"{what}, {len(rows)} groups"
        times, sent = sum(r.times for r in rows), sum(r.times * r.sent for r in rows)
        table.add_row(
            operation, name, phase, str(times), size_text(sum(r.times * r.size for r in rows)), size_text(sent)
        )
    return table
