"""What a server counts, under stable names, for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEPS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
STAGES = ("wait", "encode", "denoise", "decode")  # whose seconds an answer tells


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The nearest rank: the least value that so many percent of all do not exceed."""
    return ordered[max(-(-percent * len(ordered) // 100), 1) - 1]


class Metrics:
    """One set for one server, so that two in one process do not add up."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        name = "pellucid_"
        self.queue = Gauge(f"{name}queue_length", "Jobs that wait for a stage.", ["stage"], **own)
        self.age = Gauge(f"{name}queue_age_seconds", "Age of the oldest job that waits for a stage.", ["stage"], **own)
        self.running = Gauge(f"{name}running_images", "Images in step batches.", **own)
        self.accepted = Gauge(f"{name}unanswered_images", "Images that were accepted and not answered yet.", **own)
        self.admitted = Counter(f"{name}admitted_images", "Images that were accepted.", ["model"], **own)
        self.refused = Counter(f"{name}refused_requests", "Requests that were refused, by reason.", ["reason"], **own)
        self.finished = Counter(f"{name}finished_images", "Images that were made.", ["model"], **own)
        self.failed = Counter(f"{name}failed_images", "Images that failed, by code.", ["code"], **own)
        self.cancelled = Counter(f"{name}cancelled_images", "Images that were cancelled, by why.", ["why"], **own)
        self.step = Histogram(f"{name}step_seconds", "Of a step, by images.", ["images"], buckets=_STEPS, **own)
        self.occupancy = Gauge(f"{name}batch_occupancy", "Images of the last step over its lane's limit.", **own)
        self.stage = Histogram(f"{name}stage_seconds", "Of a job in a stage.", ["stage"], buckets=_SECONDS, **own)
        self.total = Histogram(f"{name}image_seconds", "From acceptance to answer.", buckets=_SECONDS, **own)
        self.restarts = Counter(f"{name}engine_restarts", "Engines that were replaced.", **own)
        self.ready = Gauge(f"{name}engine_ready", "1 while the engine is warm.", **own)
        self.rollouts = Counter(f"{name}rollouts", "Roll-outs that ended, by how.", ["end"], **own)
        self.responses = Counter(f"{name}http_responses", "By route and status.", ["route", "status"], **own)

    def text(self) -> bytes:
        return generate_latest(self.registry)
