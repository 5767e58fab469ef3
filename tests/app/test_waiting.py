"""What runs while people wait."""

from __future__ import annotations

import gc

import pytest

from sequoia.app.waiting import uncollected


@pytest.mark.parametrize("searching", [True, False])
def test_garbage_is_searched_for_afterwards_as_before(searching: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if searching else gc.disable)()
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled() == searching
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        (gc.enable if before else gc.disable)()
