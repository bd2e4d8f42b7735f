"""Traces: a run recorded step by step, in one file that can be looked at, compared, run again and drawn in time."""

from pellucid.evidence.trace.reading import Step, Trace, read
from pellucid.evidence.trace.recorder import Recorder

__all__ = ["Recorder", "Step", "Trace", "read"]
