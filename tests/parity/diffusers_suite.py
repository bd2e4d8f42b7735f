"""A pytest plugin for diffusers' own scheduler tests: each class that Pellucid reads is replaced by ours of that name.

    PYTHONPATH=tests/parity pytest -p diffusers_suite <checkout of diffusers>/tests/schedulers

`from diffusers import DDIMScheduler` then gives a `pellucid.Scheduler` that is made with DDIMScheduler's keywords.
Tests of classes that Pellucid does not read are left out. With SUITE_OF=theirs nothing is replaced: what fails then
says nothing about us (a test that asks the hub, a number of another version).
"""

from __future__ import annotations

import os
from typing import Any

import diffusers

from pellucid.interop.diffusers_classes import CLASSES
from pellucid.interop.scheduler import class_named

if os.environ.get("SUITE_OF") != "theirs":
    for name in CLASSES:
        ours = class_named(name)
        ours._deprecated_kwargs = []  # a class attribute that only their tests read
        setattr(diffusers, name, ours)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    kept = [i for i in items if any(c.__name__ in CLASSES for c in getattr(i.cls, "scheduler_classes", ()))]
    config.hook.pytest_deselected(items=[i for i in items if i not in kept])
    items[:] = kept
