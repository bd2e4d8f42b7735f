"""Configs: frozen dataclasses whose fields are the keys of diffusers' config.json, read strictly and written back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, ClassVar, Protocol, TypeVar, cast

from pellucid.core.errors import PellucidError, nearest, rule


class Config(Protocol):
    """A dataclass; FIXED names the keys that exist in the wild but are supported at these values only."""

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]]

    def __init__(self, **values: Any) -> None: ...


C = TypeVar("C", bound=Config)


def frozen(value: Any) -> Any:
    return tuple(frozen(v) for v in value) if isinstance(value, list | tuple) else value


def read(cls: type[C], raw: Mapping[str, Any]) -> C:
    """A config from a parsed config.json. A key that would have an effect but is unknown here is an error."""
    owner = raw.get("_class_name", cls.__name__)
    known = {f.name: f for f in fields(cast(Any, cls))}
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key.startswith("_"):
            continue
        if key in known:
            values[key] = frozen(value)
        elif key in cls.FIXED:
            if frozen(value) not in cls.FIXED[key]:
                allowed = " or ".join(repr(v) for v in cls.FIXED[key])
                raise PellucidError(rule(f"{key} of {owner}", allowed, value), "config-unsupported")
        elif value is not None and value is not False:
            hint = nearest(key, [*known, *cls.FIXED])
            raise PellucidError(f"{key} of {owner} must be a known config key; got {value!r}. {hint}", "config-key")
    missing = [k for k, f in known.items() if k not in values and f.default is MISSING and f.default_factory is MISSING]
    if missing:
        raise PellucidError(f"config of {owner} must have {', '.join(missing)}; got none.", "config-missing")
    return cls(**values)


def per_block(value: Any, count: int) -> tuple[Any, ...]:
    """One value for all blocks, or one a block."""
    if isinstance(value, list | tuple):
        if len(value) != count:
            raise PellucidError(rule("a value a block", f"{count} values", value), "config-length")
        return tuple(value)
    return (value,) * count
