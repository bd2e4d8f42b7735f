"""Event files, read by TensorBoard itself."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer import record_writer as writer

from pellucid.train.journal import Events, field, masked_crc, varint

STEPS = (1, 127, 128, 300, 2**31, 2**40)


def opened(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0}).Reload()


def test_scalars_come_back(tmp_path: Path) -> None:
    made = Events(tmp_path / "logs")
    for step in STEPS:
        made.scalars(step, {"loss": 1.0 / step, "loss by level/λ −0.5": float(step)})
    made.close()
    found = opened(tmp_path / "logs")
    assert sorted(found.Tags()["scalars"]) == ["loss", "loss by level/λ −0.5"]
    assert [event.step for event in found.Scalars("loss")] == list(STEPS)
    assert [event.value for event in found.Scalars("loss")] == [float(np.float32(1.0 / step)) for step in STEPS]
    times = [event.wall_time for event in found.Scalars("loss")]
    assert times == sorted(times)
    assert times[0] > 1.7e9


def test_images_come_back(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (300, 41, 3), dtype=np.uint8)
    made = Events(tmp_path)
    made.image(9, "pictures", pixels)
    made.close()
    (event,) = opened(tmp_path).Images("pictures")
    assert (event.step, event.height, event.width) == (9, 300, 41)
    with Image.open(io.BytesIO(event.encoded_image_string)) as found:
        assert np.array_equal(np.asarray(found), pixels)


def test_a_run_that_went_on_forgets_the_steps_that_come_again(tmp_path: Path) -> None:
    """Killed after step 5 with a checkpoint of step 3: one curve, as in log.jsonl, and no line back."""
    first = Events(tmp_path)
    for step in range(1, 6):
        first.scalars(step, {"loss": 1.0})
    first.close()
    first.path.rename(tmp_path / "events.out.tfevents.1.1")
    second = Events(tmp_path, first=3)
    for step in (4, 5, 6):
        second.scalars(step, {"loss": 2.0})
    second.close()
    found = opened(tmp_path).Scalars("loss")
    assert [(event.step, event.value) for event in found] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]


def test_a_killed_writer_leaves_what_it_wrote(tmp_path: Path) -> None:
    """Every record is flushed, and a torn last one hides nothing before it."""
    made = Events(tmp_path)
    made.scalars(1, {"loss": 1.0})
    made.scalars(2, {"loss": 2.0})
    whole = made.path.read_bytes()  # not closed
    made.close()
    made.path.write_bytes(whole[:-3])
    assert [event.step for event in opened(tmp_path).Scalars("loss")] == [1]


def test_the_first_record_says_its_version(tmp_path: Path) -> None:
    made = Events(tmp_path, first=7)
    made.close()
    data, events = made.path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    assert [event.file_version for event in events] == ["brain.Event:2", ""]
    assert (events[1].step, events[1].session_log.status) == (8, SessionLog.START)


@given(st.binary(max_size=300))
def test_checksums_are_tensorboards(data: bytes) -> None:
    assert masked_crc(data) == writer.masked_crc32c(data)


def test_the_check_value() -> None:
    """Of CRC-32C, and the mask of the format."""
    crc = 0xE3069283  # of "123456789"
    assert masked_crc(b"123456789") == (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@given(st.integers(0, 2**64 - 1))
def test_a_varint_is_read_back(number: int) -> None:
    read = 0
    for i, byte in enumerate(varint(number)):
        read |= (byte & 0x7F) << (7 * i)
        assert (byte < 128) == (i == len(varint(number)) - 1)
    assert read == number


def test_a_field_is_told_by_its_type() -> None:
    assert field(1, 1.5, double=True) == b"\x09" + struct.pack("<d", 1.5)
    assert field(2, 1.5) == b"\x15" + struct.pack("<f", 1.5)
    assert field(2, 300) == b"\x10\xac\x02"  # the example of protobuf's own page
    assert field(2, "testing") == b"\x12\x07testing"
