"""The prefetcher returns the right step or raises, leaks nothing, and swallows no exception."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
import weakref

import pytest

from penstock.errors import FeedError
from penstock.load.prefetch import Prefetcher


class Value:
    """A value that supports weak references."""

    def __init__(self, step: int) -> None:
        self.step = step


def threads() -> int:
    return sum(thread.name == "penstock-prefetch" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> object:
    assert threads() == 0
    yield
    if threads():
        gc.collect()
    assert threads() == 0


@pytest.mark.parametrize("slots", [0, 1, 2, 8])
def test_values_come_in_order(slots: int) -> None:
    with Prefetcher(Value, 3, 20, slots) as prefetcher:
        assert [prefetcher.get(step).step for step in range(3, 20)] == list(range(3, 20)) and prefetcher.step == 20
        with pytest.raises(FeedError, match=r"step 20 was requested, but the next step is 20 \(of 20\)"):
            prefetcher.get(20)


@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("asked", [0, 2, 7])
def test_steps_out_of_order_are_refused(slots: int, asked: int) -> None:
    with Prefetcher(Value, 0, 9, slots) as prefetcher:
        prefetcher.get(0)
        with pytest.raises(FeedError, match=f"step {asked} was requested, but the next step is 1"):
            prefetcher.get(asked)
        assert prefetcher.get(1).step == 1, "a wrong request does not advance"


def test_a_value_of_another_step_is_never_served() -> None:
    with Prefetcher(Value, 0, 9, 2) as prefetcher:
        prefetcher.get(0)
        with prefetcher._shared.changed:
            prefetcher._shared.changed.wait_for(lambda: len(prefetcher._shared.made) == 2)
            prefetcher._shared.made.popleft()  # simulates a bug
        with pytest.raises(FeedError, match="step 1 was requested but step 2 was produced"):
            prefetcher.get(1)


def test_at_most_slots_values_are_pending() -> None:
    made: list[int] = []
    with Prefetcher(made.append, 0, 100, 3) as prefetcher:
        deadline = time.monotonic() + 5
        while len(made) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        assert made == [0, 1, 2]
        prefetcher.get(0)
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        assert made == [0, 1, 2, 3]


def test_values_are_computed_before_they_are_requested() -> None:
    third = threading.Event()
    with Prefetcher(lambda step: third.set() if step == 2 else None, 0, 5, 3):
        assert third.wait(5), "computed without a request"


class Odd(BaseException):
    """Neither an Exception nor one of Python's own."""


@pytest.mark.parametrize("slots", [0, 1, 4])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, Odd])
def test_a_producer_error_is_raised_at_its_step_and_every_later_one(slots: int, kind: type[BaseException]) -> None:
    error = kind("broken")

    def produce(step: int) -> int:
        if step == 3:
            raise error
        return step

    with Prefetcher(produce, 0, 9, slots) as prefetcher:
        assert [prefetcher.get(step) for step in range(3)] == [0, 1, 2], "earlier values are served first"
        for _ in range(2):
            with pytest.raises(kind) as caught:
                prefetcher.get(3)
            assert caught.value is error
        assert prefetcher.step == 3


@pytest.mark.parametrize("slots", [0, 1])
def test_a_failed_step_is_not_retried(slots: int) -> None:
    tried: list[int] = []

    def produce(step: int) -> int:
        tried.append(step)
        raise ValueError(f"attempt {len(tried)}")

    with Prefetcher(produce, 0, 9, slots) as prefetcher:
        for _ in range(2):
            with pytest.raises(ValueError, match="attempt 1"):
                prefetcher.get(0)
    assert tried == [0]


def test_an_error_in_the_loop_takes_precedence(caplog: pytest.LogCaptureFixture) -> None:
    failed = threading.Event()

    def produce(step: int) -> int:
        if step == 1:
            failed.set()
            raise ValueError("producer")
        return step

    with pytest.raises(RuntimeError, match="loop"), Prefetcher(produce, 0, 9, 4) as prefetcher:
        prefetcher.get(0)
        assert failed.wait(5)
        raise RuntimeError("loop")
    assert "prefetching step 1 failed" in caplog.text and caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("slots", [0, 2])
def test_close_stops_the_thread_and_is_idempotent(slots: int, caplog: pytest.LogCaptureFixture) -> None:
    prefetcher = Prefetcher(Value, 0, 10, slots)
    assert prefetcher.get(0).step == 0
    prefetcher.close()
    prefetcher.close()
    assert threads() == 0 and not caplog.records
    with pytest.raises(FeedError, match="step 1 was requested from a closed feed"):
        prefetcher.get(1)


def test_close_waits_for_the_value_being_computed() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def produce(step: int) -> int:
        begun.set()
        may_end.wait(5)
        return step

    prefetcher = Prefetcher(produce, 0, 10, 1)
    assert begun.wait(5)
    threading.Timer(0.05, may_end.set).start()
    prefetcher.close()
    assert may_end.is_set() and threads() == 0 and not prefetcher._shared.made, "the unfinished value is discarded"


def test_close_wakes_a_waiting_get() -> None:
    may_end = threading.Event()
    prefetcher = Prefetcher(lambda step: may_end.wait(5), 0, 10, 1)
    found: list[BaseException] = []

    def ask() -> None:
        try:
            prefetcher.get(0)
        except FeedError as error:
            found.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.05)
    threading.Timer(0.05, may_end.set).start()
    prefetcher.close()
    asking.join(5)
    assert len(found) == 1 and "closed" in str(found[0])


def test_close_releases_values_and_producer() -> None:
    class Producer:
        def __call__(self, step: int) -> Value:
            return Value(step)

    producer = Producer()
    prefetcher = Prefetcher(producer, 0, 10, 2)
    value = weakref.ref(prefetcher.get(0))
    watched = weakref.ref(producer)
    del producer
    prefetcher.close()
    gc.collect()
    assert value() is None and watched() is None and not prefetcher._shared.made


def test_the_thread_holds_no_reference_to_a_value_already_taken() -> None:
    may_end = threading.Event()

    def produce(step: int) -> Value:
        if step:
            may_end.wait(5)
        return Value(step)

    with Prefetcher(produce, 0, 10, 1) as prefetcher:
        value = weakref.ref(prefetcher.get(0))
        time.sleep(0.05)
        gc.collect()
        assert value() is None, "while the next one is being computed"
        may_end.set()


def test_a_collected_prefetcher_stops_its_thread() -> None:
    prefetcher = Prefetcher(Value, 0, 10, 2)
    prefetcher.get(0)
    watched = weakref.ref(prefetcher)
    del prefetcher
    gc.collect()
    assert watched() is None and threads() == 0


def test_a_dead_thread_is_detected() -> None:
    prefetcher = Prefetcher(Value, 0, 3, 1)
    prefetcher.get(0)
    prefetcher.get(1)
    assert prefetcher._thread is not None
    prefetcher.get(2)
    prefetcher._thread.join(5)
    prefetcher._step, prefetcher._shared.last = 2, 4  # as if the thread had died before step 2
    with pytest.raises(FeedError, match="step 2 will never arrive"):
        prefetcher.get(2)
    prefetcher.close()


@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(3)", "raise RuntimeError"])
def test_the_interpreter_exits_with_an_open_prefetcher(ending: str) -> None:
    load = "from penstock.load.prefetch import Prefetcher"
    code = f"{load}\nfeed = Prefetcher(lambda step: step, 0, 10**9, 2)\nfeed.get(0)\n{ending}"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode == {"pass": 0, "raise SystemExit(3)": 3, "raise RuntimeError": 1}[ending], done.stderr


def test_an_interrupt_reaches_a_waiting_get() -> None:
    code = (
        "import _thread, signal, threading, time\nfrom penstock.load.prefetch import Prefetcher\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs ignore it
        "interrupted = threading.Event()\n"
        "def later():\n    _thread.interrupt_main()\n    time.sleep(1.5)\n    interrupted.set()\n"
        "threading.Timer(0.3, later).start()\n"
        "with Prefetcher(lambda step: interrupted.wait(), 0, 9, 1) as prefetcher:\n    prefetcher.get(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode != 0 and "KeyboardInterrupt" in done.stderr
