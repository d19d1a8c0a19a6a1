"""Two networks for tests of ranks that are cut off from each other or from the store."""

import pytest

from helpers.networks import Networks, NoNetworks
from manyhands.blocks.crew import _store


@pytest.fixture
def networks(monkeypatch):
    monkeypatch.setattr(_store, "STORE_TIMEOUT", 5.0)
    try:
        with Networks() as made:
            yield made
    except NoNetworks as error:
        pytest.skip(f"network namespaces are not allowed here: {error}")
