"""The shipped model's shape and tokenizer, and the shape alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexgen_h2o.models.load import Model, find_model


@pytest.fixture(scope="session")
def words() -> Model:
    return find_model("opt-tiny", None)


@pytest.fixture(scope="session")
def ids_only(words: Model) -> Model:
    return replace(words, tokenizer=None)
