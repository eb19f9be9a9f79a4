"""Schemas: which can be read, and the steps from an older one to the newest.

A step is a pure function from the parsed ``index.json`` of one schema to that of the next. A frozen directory of every
schema ever written is loaded in the tests for ever.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from lightning_resume.errors import CorruptCheckpointError, SchemaError

SCHEMA = "lightning-resume/2"

Step = Callable[[dict[str, Any]], dict[str, Any]]


def _from_1(document: dict[str, Any]) -> dict[str, Any]:
    """A run of schema 1 did not count how often it had gone back; step numbers alone ordered its checkpoints."""
    if "timeline" in document:
        raise ValueError("a timeline, which its schema does not know")
    return {**document, "schema": "lightning-resume/2", "timeline": 0}


STEPS: Mapping[str, Step] = {"lightning-resume/1": _from_1}  # schema → step to the next schema

_SCHEMA_PATTERN = re.compile(r"lightning-resume/[0-9]{1,9}")


def require_known_schema(
    document: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    steps: Mapping[str, Step] = STEPS,
    newest: str = SCHEMA,
) -> None:
    """Refuses a document whose schema is neither the newest nor one that a step leads on from.

    Raises:
        SchemaError: the schema is unknown, as that of a newer version is.
        CorruptCheckpointError: there is no schema string.
    """
    schema = document.get("schema")
    if type(schema) is not str or not _SCHEMA_PATTERN.fullmatch(schema):
        found = repr(schema[:100]) if type(schema) is str else f"of type {type(schema).__name__}"
        raise CorruptCheckpointError(path, "index.json", f"schema {newest!r}", f"schema {found}")
    if schema != newest and schema not in steps:
        raise SchemaError(path, schema, sorted({*steps, newest}))


def upgrade_index(
    document: dict[str, Any], *, steps: Mapping[str, Step] = STEPS, newest: str = SCHEMA
) -> dict[str, Any]:
    """Applies the steps that lead from a document's schema to the newest, in order.

    Args:
        document: a parsed index of a known schema; left as it is.
        steps: schema → step to the next schema.
        newest: the schema to arrive at.

    Returns:
        The document in the newest schema.
    """
    document = dict(document)
    while document["schema"] != newest:
        document = steps[document["schema"]](document)
    return document
