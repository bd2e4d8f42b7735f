"""The version, which files are stamped with; `pellucid` re-exports it. pyproject.toml says the same."""

__version__ = "0.1.0"
