"""Inception's weights: from a path, from the cache, from a server on this machine; whole, checked, or one line."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pellucid import PellucidError
from pellucid.evidence.metrics import inception
from pellucid.evidence.metrics.inception import Inception

BODY = b"weights " * 300_000  # 2.4 MB: more than one piece
SUM = hashlib.sha256(BODY).hexdigest()[:8]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/gone":
            self.send_error(404)
            return
        self.send_response(200)
        body = BODY[: len(BODY) // 2] if "short" in self.path else BODY
        if "silent" not in self.path:
            self.send_header("Content-Length", str(10**12 if "huge" in self.path else len(BODY)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.mark.parametrize("place", ["", "silent/"])
def test_a_download_is_whole_and_checked(server: str, tmp_path: Path, place: str) -> None:
    goal, told = tmp_path / "deep" / "w.pth", []
    found = inception.download_weights(f"{server}/{place}w-{SUM}.pth", goal, lambda *n: told.append(n))
    assert found.read_bytes() == BODY
    assert told[-1] == (len(BODY), 0 if place else len(BODY))
    assert len(told) > 2
    assert [path.name for path in goal.parent.iterdir()] == ["w.pth"]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (f"short/w-{SUM}.pth", "weights-network"),
        (f"huge/w-{SUM}.pth", "weights-size"),
        ("w-00000000.pth", "weights-checksum"),
        ("w.pth", "weights-checksum"),
        ("gone", "weights-network"),
    ],
)
def test_what_is_not_right_leaves_nothing(server: str, tmp_path: Path, path: str, code: str) -> None:
    with pytest.raises(PellucidError) as error:
        inception.download_weights(f"{server}/{path}", tmp_path / "w.pth")
    assert error.value.code == code
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_more_bytes_than_allowed_are_not_taken(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inception, "MAX_BYTES", 2**20)
    with pytest.raises(PellucidError) as error:
        inception.download_weights(f"{server}/silent/w-{SUM}.pth", tmp_path / "w.pth")
    assert error.value.code == "weights-size"
    assert not list(tmp_path.iterdir())


def test_without_a_network_it_is_one_line(tmp_path: Path) -> None:
    for url, code in (("http://127.0.0.1:9/w-00000000.pth", "weights-network"), ("file:///etc/x", "weights-address")):
        with pytest.raises(PellucidError) as error:
            inception.download_weights(url, tmp_path / "w.pth")
        assert error.value.code == code
    with pytest.raises(PellucidError, match=r"--inception") as error:
        inception.download_weights("http://127.0.0.1:9/w-00000000.pth", tmp_path / "w.pth")
    assert "\n" not in str(error.value)


def test_the_cache_comes_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path))
    url = f"{server}/w-{SUM}.pth"
    first = inception.find_weights(url=url)
    assert first == tmp_path / inception.WEIGHTS_NAME
    assert inception.find_weights(url="http://127.0.0.1:9/none") == first
    (tmp_path / "inception.safetensors").write_bytes(b"x")
    assert inception.find_weights(url="http://127.0.0.1:9/none").name == "inception.safetensors"


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in Inception().state_dict().items()}


def test_both_forms_of_the_file_are_one_network(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    save_file(state, tmp_path / "a.safetensors")
    extra = {"fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}
    extra["Mixed_5b.branch1x1.bn.num_batches_tracked"] = torch.tensor(0)
    torch.save({**state, **extra}, tmp_path / "b.pth")
    first, second = (inception.load_inception(tmp_path / name) for name in ("a.safetensors", "b.pth"))
    assert first.digest() == second.digest()
    assert not first.training
    assert not any(p.requires_grad for p in first.parameters())
    assert len(state) == 470  # what the converted file of the canonical weights holds


def test_bad_files_are_one_line(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    name = "Mixed_7c.branch_pool.conv.weight"
    cases: list[tuple[dict[str, torch.Tensor] | None, str]] = [
        (None, "file"),
        ({k: v for k, v in state.items() if k != name}, "weights-keys"),
        ({**state, "other": torch.zeros(1)}, "weights-keys"),
        ({**state, name: torch.zeros(3)}, "weights-shape"),
    ]
    for number, (tensors, code) in enumerate(cases):
        path = tmp_path / f"{number}.safetensors"
        if tensors is not None:
            save_file(tensors, path)
        with pytest.raises(PellucidError) as error:
            inception.load_inception(path)
        assert error.value.code == code
