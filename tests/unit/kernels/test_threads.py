"""Rows shared by threads: each once, whatever happens."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from flexgen_h2o.kernels.workspace import parallel_rows


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 2, 3, 47, 1000])
@pytest.mark.parametrize("row_bytes", [1, 2**20])
def test_each_row_once(rows: int, row_bytes: int, three_threads) -> None:
    seen: list[int] = []
    parallel_rows(lambda first, end: seen.extend(range(first, end)), rows, row_bytes)
    assert sorted(seen) == list(range(rows))


def test_threads_help_where_it_pays(three_threads) -> None:
    meet = threading.Barrier(3, timeout=10)  # passes only if three threads are at work at a time
    parallel_rows(lambda _first, _end: meet.wait(), 3, 2**30)
    names = set()
    parallel_rows(lambda _first, _end: names.add(threading.current_thread()), 1000, 1)
    assert names == {threading.current_thread()}


def test_an_error_comes_out_after_all_have_ended(three_threads) -> None:
    ended = []

    def loop(first: int, _end: int) -> None:
        if first == 0:
            raise ValueError("row 0")
        ended.append(first)

    with pytest.raises(ValueError, match="row 0"):
        parallel_rows(loop, 24, 2**30)
    assert len(ended) == 23


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_starts_its_own_threads(three_threads) -> None:
    parallel_rows(lambda _first, _end: None, 9, 2**30)
    child = os.fork()
    if child == 0:
        seen: list[int] = []
        parallel_rows(lambda first, end: seen.extend(range(first, end)), 9, 2**30)
        os._exit(0 if sorted(seen) == list(range(9)) else 1)
    assert os.waitpid(child, 0)[1] == 0
