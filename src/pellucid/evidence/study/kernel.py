"""What all studies share: the folder with its config and records, shares of the work over processes, and the report.

A study is a subclass of `Study` that says which cells there are, how the record of one is made, what follows from the
records, and how that is reported; `tests/evidence/test_study_kernel.py` is a whole one. `run_study` runs it:

    found = run_study(RootStudy, RootConfig((2.0, 3.0)), Path("out/roots"), processes=2)

The folder belongs to one config. Every finished cell is one JSON line, so that a killed study resumes; a line
whose digest does not match is a cell that is made again.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import read_json, whole
from pellucid.evidence.report import charts
from pellucid.interop.atomic_files import is_left, put, read_lines, sealed, writing
from pellucid.interop.lock import locked

Config = TypeVar("Config")
Cell = TypeVar("Cell", bound=NamedTuple)
ShardNumber = tuple[int, int]  # (index, count): every count-th part of a study, for one of several processes
# (what, how much) → a context that gives a function to call after each part, or with the number of parts that are done
ProgressBar = Callable[[str, int], AbstractContextManager[Callable[..., object]]]

CONFIG, RECORDS = "config.json", "records.jsonl"
_KEY_TYPES = (str, int, float, type(None))  # what a cell's keys may be
_MAX_SHARDS = 256
_POLL_SECONDS = 1.0
_ELSEWHERE = "Choose another --out."
MARKS = ("study", "version")  # the words of a config that say what it is of


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch uses one thread per kernel: small work is quicker so."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_whole(name: str, value: object, least: int, most: int, code: str, must: str = "") -> None:
    """Refuses what is not a whole number in a range."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise PellucidError(rule(name, must or f"a whole number from {least} to {most:,}", value), code)


def check_lists(config: object, *names: str) -> None:
    """Refuses fields of a config that are empty, or hold something twice."""
    for name in names:
        held = getattr(config, name)
        if not held or len(set(held)) != len(held):
            raise PellucidError(rule(name, "at least one, none of them twice", list(held)), "study-list")


def no_bar(what: str, total: int) -> AbstractContextManager[Callable[..., object]]:
    return nullcontext(lambda count=1: None)


class Study(ABC, Generic[Config, Cell]):
    """A study in its folder. What is there is not made again; the folder of another study is refused. Each shard
    writes records of its own and reads those of all."""

    kind: ClassVar[str]
    version: ClassVar[int] = 1  # records of another version are refused
    cell: ClassVar[type[Any]]  # a NamedTuple of plain values: they name a record
    fixed: ClassVar[tuple[str, ...] | None] = None  # keys of config.json that must stay; None: all
    parts: ClassVar[str] = "cells"  # what is shared out, in words
    parts_advice = ""  # how to have more of them
    progress = "cells"  # what a progress bar says
    charts: ClassVar[bool] = True  # whether its report needs matplotlib

    def __init__(self, config: Config, folder: Path, shard: ShardNumber = (0, 1)) -> None:
        self.config, self.folder, self.shard = config, folder, shard
        self.claimed = False
        is_mine(folder, self.text, self.fixed)
        self.reload()

    @classmethod
    def open(cls, config: Config, folder: Path, shard: ShardNumber = (0, 1), **resources: Any) -> Self:
        """The study with all that its cells need; `resources` can be sent to another process."""
        return cls(config, folder, shard, **resources)

    # --- what a study says of itself ------------------------------------------------------------------------------

    @abstractmethod
    def cells(self) -> Iterable[Cell]:
        """All of them, in the order in which they are made."""

    def make(self, cell: Cell) -> Mapping[str, Any]:
        """The record of a cell. `claim` comes before the first file that it writes. A study whose cells are studies
        themselves has its own `work` instead."""
        raise NotImplementedError

    @abstractmethod
    def results(self) -> Any:
        """What follows from the records that are there."""

    @abstractmethod
    def report(self) -> Any:
        """Writes what people read and the figures for programs; the results."""

    def part(self, cell: Cell) -> Hashable:
        """Cells of one part are made by one process, in their order."""
        return cell

    def cost(self, cell: Cell) -> int:
        """What a progress bar counts."""
        return 1

    def settings(self) -> dict[str, Any]:
        """What config.json holds beside kind and version."""
        return asdict(self.config)  # type: ignore[call-overload]

    def finish(self, bar: ProgressBar) -> None:
        """What is left to one process when all cells are there."""

    # --- the folder -----------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """What config.json holds."""
        held = {"study": self.kind, "version": self.version, **self.settings()}
        return json.dumps(held, indent=1, ensure_ascii=False) + "\n"

    def reload(self) -> None:
        """Reads the records, those of other shards too."""
        self.records = Records.shared(self.folder, self.cell._fields, self.shard)

    def claim(self) -> None:
        """Makes the folder this study's own."""
        if not self.claimed:
            claim(self.folder, self.text, self.fixed)
            self.claimed = True

    # --- the work -------------------------------------------------------------------------------------------------

    def shares(self, count: int) -> list[list[Cell]]:
        """The cells of each of `count` shards: every `count`-th part."""
        numbers: dict[Hashable, int] = {}
        found: list[list[Cell]] = [[] for _ in range(count)]
        for cell in self.cells():
            found[numbers.setdefault(self.part(cell), len(numbers)) % count].append(cell)
        return found

    def missing(self) -> list[Cell]:
        """The cells of this shard that nobody has made."""
        index, count = self.shard
        return [cell for cell in self.shares(count)[index] if not self.records.has(cell._asdict())]

    def todo(self) -> int:
        return sum(map(self.cost, self.missing()))

    def run(self, bar: ProgressBar = no_bar, stopped: Callable[[], bool] = lambda: False) -> None:
        """Makes what is missing of this shard, in one process at a time."""
        with locked(self.folder, "written", self.shard):
            self.work(bar, stopped)

    def work(self, bar: ProgressBar, stopped: Callable[[], bool]) -> None:
        missing = self.missing()
        with bar(self.progress, sum(map(self.cost, missing))) as done:
            for cell in missing:
                if stopped():
                    return
                record = self.make(cell)
                self.claim()
                self.records.add({**cell._asdict(), **record})
                if cost := self.cost(cell):
                    done(cost)


def run_study(
    kind: type[Study[Config, Any]],
    config: Config,
    folder: Path,
    *,
    processes: int = 1,
    ray: int = 0,
    bar: ProgressBar = no_bar,
    **resources: Any,
) -> Any:
    """From a config to its report: makes what is missing, here or over processes; the results. `resources` is
    what `kind.open` takes besides."""
    if kind.charts:
        charts.require()
    study = kind.open(config, folder, **resources)
    if processes != 1 or ray:
        _share_out(study, processes, ray, bar, resources)
        study.reload()
    study.run(bar)
    study.finish(bar)
    return study.report()


# --- Over processes, here or on a Ray cluster ----------------------------------------------------------------------


@dataclass(frozen=True)
class WorkShare:
    """What one process gets; all of it can be sent to another machine. `folder` must be the same place there."""

    kind: type[Study[Any, Any]]
    config: Any
    folder: str
    index: int
    count: int
    resources: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 0  # of torch; 0 leaves them
    parent: int = 0  # process whose end is this one's too; 0 for none


def make_share(share: WorkShare) -> None:
    if share.threads:
        import torch

        torch.set_num_threads(share.threads)
    study = share.kind.open(share.config, Path(share.folder), (share.index, share.count), **share.resources)
    orphaned = (lambda: os.getppid() != share.parent) if share.parent else (lambda: False)
    study.run(stopped=orphaned)
    if orphaned():
        os._exit(1)  # a pool's process would wait for work forever


def _share_out(
    study: Study[Any, Any], processes: int, ray: int, bar: ProgressBar, resources: Mapping[str, Any]
) -> None:
    """Everything that is missing, over processes or over Ray."""
    if resources.get("pipe") is not None or resources.get("pipes"):
        must = "left out for a pipeline that is given: other processes load a model by its name"
        raise PellucidError(rule("processes, ray", must, (processes, ray)), "shard")
    if processes != 1 and ray:
        raise PellucidError(rule("--processes", "left out with --ray", processes), "shard")
    name, count = ("--ray", ray) if ray else ("--processes", processes)
    most = min(_MAX_SHARDS, len({study.part(cell) for cell in study.cells()}))
    if not 1 <= count <= most:
        must = f"at most {most}, as many as there are {study.parts}" if count > 0 else f"from 1 to {most}"
        raise PellucidError(rule(name, must, count, study.parts_advice), "shard")
    study.claim()
    place = study.folder.resolve() if ray else study.folder
    shares = [WorkShare(type(study), study.config, str(place), index, count, resources) for index in range(count)]
    if ray:
        over_ray(shares)
        return
    with bar(study.progress, len(study.missing())) as done:
        over_processes(shares, done)


def over_processes(shares: Sequence[WorkShare], done: Callable[[int], object] = lambda count: None) -> None:
    """Each in a process of this machine; `done` is called with the number of new records."""
    threads = max(1, (os.cpu_count() or 1) // len(shares))
    own_shares = [replace(share, threads=threads, parent=os.getpid()) for share in shares]
    try:
        with ProcessPoolExecutor(len(own_shares), mp_context=get_context("spawn")) as pool:
            wait_for([pool.submit(make_share, share) for share in own_shares], Path(shares[0].folder), done)
    except BrokenProcessPool:
        words = "a process of the study was killed. Run the same command again: it continues."
        raise PellucidError(words, "shard-killed") from None


def wait_for(waiting: Sequence[Future[None]], folder: Path, done: Callable[[int], object]) -> None:
    """Until all have ended or one has failed, whose error is raised."""
    pending, known = set(waiting), _records_in(folder)
    while pending:
        ended, pending = wait(pending, _POLL_SECONDS, FIRST_EXCEPTION)
        count = _records_in(folder)
        done(count - known)
        known = count
        for future in ended:
            future.result()


def _records_in(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("records*.jsonl"))


def over_ray(shares: Sequence[WorkShare]) -> None:
    """Each as a task of Ray. The folder and the model must be in reach of every machine under these names."""
    try:
        import ray
    except ImportError:
        advice = "Install it: pip install ray. Or use --processes."
        raise PellucidError(f"ray must be installed to work over it; got none. {advice}", "missing-extra") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    gpus = 1 if str(shares[0].resources.get("device")).startswith("cuda") else 0
    task = ray.remote(num_gpus=gpus)(make_share) if gpus else ray.remote(make_share)
    ray.get([task.remote(share) for share in shares])


def shard_of(text: str) -> ShardNumber:
    """`0/4` is the first of four."""
    first, _, last = text.partition("/")
    index, count = whole(first, _MAX_SHARDS), whole(last, _MAX_SHARDS)
    if index is None or count is None or index >= count:
        raise PellucidError(rule("--shard", f"as 0/4, the first of four, of at most {_MAX_SHARDS}", text), "shard")
    return index, count


# --- Records -------------------------------------------------------------------------------------------------------


class Records:
    """The cells of a study that are done. A cell is named by the values of its `keys`, which can be hashed. Processes
    that share a study have a file each."""

    def __init__(self, folder: Path, keys: Sequence[str], file: str = RECORDS) -> None:
        self.path, self.keys = folder / file, tuple(keys)
        self.by_name: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in read_lines(self.path):
            if all(isinstance(row.get(key, []), _KEY_TYPES) for key in self.keys):
                self.take(row)

    @staticmethod
    def shared(folder: Path, keys: Sequence[str], shard: ShardNumber = (0, 1)) -> Records:
        """Those of one shard of a study: it knows what all have done, and writes its own file."""
        index, count = shard
        own = Records(folder, keys, RECORDS if count == 1 else f"records-{index}of{count}.jsonl")
        for path in sorted(folder.glob("records*.jsonl")):
            if path != own.path:
                for row in Records(folder, keys, path.name).rows:
                    own.take(row)
        return own

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self.by_name.values())

    def take(self, row: Mapping[str, Any]) -> None:
        """Knows a row; of a cell that is there twice the first counts."""
        self.by_name.setdefault(self.name(row), dict(row))

    def name(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[key] for key in self.keys)

    def has(self, cell: Mapping[str, Any]) -> bool:
        return self.name(cell) in self.by_name

    def add(self, row: Mapping[str, Any]) -> None:
        if self.has(row):
            raise PellucidError(rule("cell", "new", {k: row[k] for k in self.keys}), "study-cell")
        self.take(row)
        with writing(self.path), self.path.open("a+b") as file:
            torn = file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"
            file.write((("\n" if torn else "") + sealed(row)).encode())
            file.flush()
            os.fsync(file.fileno())


# --- The folder ----------------------------------------------------------------------------------------------------


def _read_config(folder: Path) -> dict[str, Any]:
    """What config.json holds; nothing where it is no table."""
    try:
        return read_json(folder / CONFIG, foreign=True)
    except PellucidError:
        return {}


def is_mine(folder: Path, text: str, fixed: Sequence[str] | None = None) -> bool:
    """Whether a folder is of the study with this config already; refuses the folder of another one, one that holds
    other things, and one that cannot be written to. `fixed` are the keys that must stay; None: all."""
    known = (folder / CONFIG).exists()
    if known:
        _check_config(folder, json.loads(text), fixed)
    elif folder.exists() and not (folder.is_dir() and all(map(is_left, folder.iterdir()))):
        raise PellucidError(rule("--out", "empty, new, or a study of this config", str(folder)), "out-taken")
    place = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise PellucidError(rule("--out", "a folder that can be written to", str(folder)), "out-unwritable")
    return known


def _check_config(folder: Path, mine: Mapping[str, Any], fixed: Sequence[str] | None) -> None:
    """Refuses the config of another study, version, model or setting."""
    held = _read_config(folder)
    if "study" in mine:
        if {*held, *MARKS} == set(mine):  # some studies of version 1 were written without the marks
            held = {"study": mine["study"], "version": 1, **held}
        if held.get("study") != mine["study"]:
            got = f"{folder}: {_kind_words(held.get('study'))}"
            raise PellucidError(rule("--out", f"of {_kind_words(mine['study'])}", got, _ELSEWHERE), "study-folder")
        if held.get("version") != mine["version"]:
            must = f"of version {mine['version']}"
            raise PellucidError(rule(f"study in {folder}", must, held.get("version"), _ELSEWHERE), "study-version")
    if held.get("mark") != mine.get("mark"):
        raise PellucidError(rule("model", f"the one that began {folder}", mine["model"], _ELSEWHERE), "resume-model")
    names = fixed if fixed is not None else {**mine, **held}
    if other := [name for name in names if held.get(name, ...) != mine.get(name, ...)]:
        got = f"another {', '.join(other)}"
        raise PellucidError(f"config must be the one that began {folder}; got {got}. {_ELSEWHERE}", "resume-config")


def _kind_words(kind: object) -> str:
    """'a sampler study', 'an oracle study'"""
    if not isinstance(kind, str) or not kind.isidentifier() or len(kind) > 30:
        return "something else"
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind.removesuffix('s')} study"


def claim(folder: Path, text: str, fixed: Sequence[str] | None = None) -> None:
    """Makes a folder that of the study with this config; what it may add to an earlier one is added."""
    if not is_mine(folder, text, fixed) or _read_config(folder) != json.loads(text):
        folder.mkdir(parents=True, exist_ok=True)
        put(folder / CONFIG, text)
