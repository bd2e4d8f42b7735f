"""schemathesis draws requests from the OpenAPI page; none of them gets an answer that the page does not promise."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from servers import RunningServer


@pytest.fixture(scope="module")
def schema(server: RunningServer) -> Any:
    return schemathesis.openapi.from_url(f"{server.address}/openapi.json")


def test_every_address_is_in_the_page(schema: Any) -> None:
    found = {operation.ok().label for operation in schema.get_all_operations()}
    assert {"POST /v1/images/generations", "POST /v1/plans", "GET /v1/jobs/{id}", "GET /ready"} <= found


OPERATIONS = (
    "POST /v1/images/generations",
    "POST /v1/images/edits",
    "POST /v1/plans",
    "GET /v1/jobs/{id}",
    "DELETE /v1/jobs/{id}",
    "GET /v1/jobs/{id}/images/{index}",
    "GET /v1/models/{name}",
)


@pytest.mark.parametrize("name", OPERATIONS)
def test_drawn_requests(schema: Any, name: str) -> None:
    method, path = name.split()
    operation = schema[path][method]
    seen = set()

    @settings(max_examples=25, suppress_health_check=list(HealthCheck), deadline=None)
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        if isinstance(case.body, dict):  # what is right is made small
            small = {"steps": 1, "n": 1, "size": "128x128"}
            case.body.update({key: value for key, value in small.items() if type(case.body.get(key)) is type(value)})
            case.body.pop("stream", None)
        answer = case.call(timeout=60)
        seen.add(answer.status_code)
        case.validate_response(answer, checks=[not_a_server_error])
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    run()
    assert seen
