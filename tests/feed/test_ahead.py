"""The contract of working ahead: the right step or an error, no leaks, no swallowed exceptions."""

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
from penstock.feed.ahead import Ahead


class Value:
    """Something that can be watched."""

    def __init__(self, step: int) -> None:
        self.step = step


def threads() -> int:
    return sum(thread.name == "penstock-ahead" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> object:
    assert threads() == 0
    yield
    gc.collect()
    assert threads() == 0


@pytest.mark.parametrize("slots", [0, 1, 2, 8])
def test_values_come_in_order(slots: int) -> None:
    with Ahead(Value, 3, 20, slots) as ahead:
        assert [ahead.get(step).step for step in range(3, 20)] == list(range(3, 20)) and ahead.step == 20
        with pytest.raises(FeedError, match=r"step 20 was asked for, but the next one is 20 \(of 20\)"):
            ahead.get(20)


@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("asked", [0, 2, 7])
def test_another_step_is_never_served(slots: int, asked: int) -> None:
    with Ahead(Value, 0, 9, slots) as ahead:
        ahead.get(0)
        with pytest.raises(FeedError, match=f"step {asked} was asked for, but the next one is 1"):
            ahead.get(asked)
        assert ahead.get(1).step == 1, "asking wrongly moves nothing"


def test_a_value_of_another_step_is_never_served() -> None:
    with Ahead(Value, 0, 9, 2) as ahead:
        ahead.get(0)
        with ahead._desk.changed:
            ahead._desk.changed.wait_for(lambda: len(ahead._desk.made) == 2)
            ahead._desk.made.popleft()  # what a bug would look like
        with pytest.raises(FeedError, match="step 1 was asked for and step 2 was made"):
            ahead.get(1)


def test_no_more_than_the_slots_are_made() -> None:
    made: list[int] = []
    with Ahead(made.append, 0, 100, 3) as ahead:
        deadline = time.monotonic() + 5
        while len(made) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        assert made == [0, 1, 2]
        ahead.get(0)
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        assert made == [0, 1, 2, 3]


def test_it_does_work_ahead() -> None:
    third = threading.Event()
    with Ahead(lambda step: third.set() if step == 2 else None, 0, 5, 3):
        assert third.wait(5), "made though nobody asked"


class Odd(BaseException):
    """Neither an Exception nor one of Python's own."""


@pytest.mark.parametrize("slots", [0, 1, 4])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, Odd])
def test_an_error_is_raised_at_its_step_and_ever_after(slots: int, kind: type[BaseException]) -> None:
    error = kind("broken")

    def produce(step: int) -> int:
        if step == 3:
            raise error
        return step

    with Ahead(produce, 0, 9, slots) as ahead:
        assert [ahead.get(step) for step in range(3)] == [0, 1, 2], "what came before is served"
        for _ in range(2):
            with pytest.raises(kind) as caught:
                ahead.get(3)
            assert caught.value is error
        assert ahead.step == 3


@pytest.mark.parametrize("slots", [0, 1])
def test_a_step_that_failed_is_not_tried_again(slots: int) -> None:
    tried: list[int] = []

    def produce(step: int) -> int:
        tried.append(step)
        raise ValueError(f"attempt {len(tried)}")

    with Ahead(produce, 0, 9, slots) as ahead:
        for _ in range(2):
            with pytest.raises(ValueError, match="attempt 1"):
                ahead.get(0)
    assert tried == [0]


def test_the_error_of_the_loop_is_the_one_that_propagates(caplog: pytest.LogCaptureFixture) -> None:
    failed = threading.Event()

    def produce(step: int) -> int:
        if step == 1:
            failed.set()
            raise ValueError("producer")
        return step

    with pytest.raises(RuntimeError, match="loop"), Ahead(produce, 0, 9, 4) as ahead:
        ahead.get(0)
        assert failed.wait(5)
        raise RuntimeError("loop")
    assert "step 1 failed ahead of the loop" in caplog.text and caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("slots", [0, 2])
def test_closing_is_quiet_complete_and_repeatable(slots: int, caplog: pytest.LogCaptureFixture) -> None:
    ahead = Ahead(Value, 0, 10, slots)
    assert ahead.get(0).step == 0
    ahead.close()
    ahead.close()
    assert threads() == 0 and not caplog.records
    with pytest.raises(FeedError, match="step 1 was asked of a feed that is closed"):
        ahead.get(1)


def test_closing_while_a_value_is_made_waits_for_it() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def produce(step: int) -> int:
        begun.set()
        may_end.wait(5)
        return step

    ahead = Ahead(produce, 0, 10, 1)
    assert begun.wait(5)
    threading.Timer(0.05, may_end.set).start()
    ahead.close()
    assert may_end.is_set() and threads() == 0 and not ahead._desk.made, "what was in the making is let go"


def test_closing_wakes_one_who_waits() -> None:
    may_end = threading.Event()
    ahead = Ahead(lambda step: may_end.wait(5), 0, 10, 1)
    found: list[BaseException] = []

    def ask() -> None:
        try:
            ahead.get(0)
        except FeedError as error:
            found.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.05)
    threading.Timer(0.05, may_end.set).start()
    ahead.close()
    asking.join(5)
    assert len(found) == 1 and "closed" in str(found[0])


def test_nothing_is_kept_alive() -> None:
    class Producer:
        def __call__(self, step: int) -> Value:
            return Value(step)

    producer = Producer()
    ahead = Ahead(producer, 0, 10, 2)
    value = weakref.ref(ahead.get(0))
    watched = weakref.ref(producer)
    del producer
    ahead.close()
    gc.collect()
    assert value() is None and watched() is None and not ahead._desk.made


def test_the_thread_keeps_no_value_that_was_taken() -> None:
    may_end = threading.Event()

    def produce(step: int) -> Value:
        if step:
            may_end.wait(5)
        return Value(step)

    with Ahead(produce, 0, 10, 1) as ahead:
        value = weakref.ref(ahead.get(0))
        time.sleep(0.05)
        gc.collect()
        assert value() is None, "while the next one is in the making"
        may_end.set()


def test_one_that_is_forgotten_ends_its_thread() -> None:
    ahead = Ahead(Value, 0, 10, 2)
    ahead.get(0)
    watched = weakref.ref(ahead)
    del ahead
    gc.collect()
    assert watched() is None and threads() == 0


def test_a_thread_that_is_gone_is_noticed() -> None:
    ahead = Ahead(Value, 0, 3, 1)
    ahead.get(0)
    ahead.get(1)
    assert ahead._thread is not None
    ahead.get(2)
    ahead._thread.join(5)
    ahead._step, ahead._desk.last = 2, 4  # as if the thread had died before step 2
    with pytest.raises(FeedError, match="nobody makes step 2"):
        ahead.get(2)
    ahead.close()


@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(3)", "raise RuntimeError"])
def test_the_interpreter_ends_while_a_feed_is_open(ending: str) -> None:
    code = (
        f"from penstock.feed.ahead import Ahead\nahead = Ahead(lambda step: step, 0, 10**9, 2)\nahead.get(0)\n{ending}"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode == {"pass": 0, "raise SystemExit(3)": 3, "raise RuntimeError": 1}[ending], done.stderr


def test_an_interrupt_reaches_the_one_who_waits() -> None:
    code = (
        "import _thread, signal, threading, time\nfrom penstock.feed.ahead import Ahead\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs ignore it
        "interrupted = threading.Event()\n"
        "def later():\n    _thread.interrupt_main()\n    time.sleep(1.5)\n    interrupted.set()\n"
        "threading.Timer(0.3, later).start()\n"
        "with Ahead(lambda step: interrupted.wait(), 0, 9, 1) as ahead:\n    ahead.get(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode != 0 and "KeyboardInterrupt" in done.stderr
