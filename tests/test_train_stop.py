"""The training loop: what it calls, and how it is stopped."""

import signal
import threading

import jax.numpy as jnp
import pytest

import jaxformer as jf
from jaxformer.data import Batch

SIGNALS = [signal.SIGINT, signal.SIGTERM]


def state(step=0):
    return jf.TrainState(jnp.asarray(step), {"w": jnp.asarray(0.0)}, ())


def step(state, batch):
    """Adds up what it is given, so that the state says which batches it has seen."""
    total = state.params["w"] * 10 + batch.ids
    return jf.TrainState(state.step + 1, {"w": total}, ()), {"loss": total}


def batches(*numbers):
    return iter([Batch(*[jnp.float32(number)] * 5) for number in numbers])


def sender(at, *numbers):
    """A callback that sends these signals to the process after one of the steps."""

    def callback(step, *_):
        for number in numbers if step == at else ():
            signal.raise_signal(number)

    return callback


@pytest.fixture(autouse=True)
def handlers():
    """Whatever a test does to the handlers, the next one finds those that were there; and so must `fit` itself."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield before
    after = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


def test_every_step_has_its_batch_its_number_and_its_callbacks_in_order():
    calls = []

    def first(step, state, metrics):
        calls.append((step, int(state.step), float(metrics["loss"])))

    last = jf.fit(state(), step, batches(1, 2, 3), 3, callbacks=[first, lambda *_: calls.append("second")])
    assert calls == [(1, 1, 1.0), "second", (2, 2, 12.0), "second", (3, 3, 123.0), "second"]
    assert (int(last.step), float(last.params["w"])) == (3, 123.0)


def test_a_resumed_run_goes_on_with_the_number_of_its_state():
    numbers = []
    last = jf.fit(state(step=2), step, batches(3, 4, 5), 4, callbacks=[lambda number, *_: numbers.append(number)])
    assert numbers == [3, 4]
    assert (int(last.step), float(last.params["w"])) == (4, 34.0)


@pytest.mark.parametrize("num_steps", [0, 4, 5])
def test_a_run_that_is_done_takes_no_batch(num_steps):
    left = batches(1)
    assert jf.fit(state(step=5), step, left, num_steps).step == 5
    assert next(left).ids == 1


def test_batches_that_end_too_early_are_an_error_that_names_the_step():
    with pytest.raises(ValueError, match="the batches ended before step 3 of 5; give one for each step"):
        jf.fit(state(), step, batches(1, 2), 5)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_stops_between_two_steps_with_a_whole_state(number):
    numbers = []
    callbacks = [sender(2, number), lambda step, *_: numbers.append(step)]
    last = jf.fit(state(), step, batches(1, 2, 3, 4), 4, callbacks=callbacks)
    assert numbers == [1, 2]  # the callbacks of the step are run to their end
    assert (int(last.step), float(last.params["w"])) == (2, 12.0)


def test_a_signal_in_the_middle_of_a_step_lets_it_finish():
    def interrupted(state, batch):
        if state.step == 1:
            signal.raise_signal(signal.SIGTERM)
        return step(state, batch)

    last = jf.fit(state(), interrupted, batches(1, 2, 3, 4), 4)
    assert (int(last.step), float(last.params["w"])) == (2, 12.0)


def test_a_second_interrupt_acts_at_once():
    with pytest.raises(KeyboardInterrupt):
        jf.fit(state(), step, batches(1, 2, 3, 4), 4, callbacks=[sender(2, signal.SIGINT, signal.SIGINT)])


@pytest.mark.parametrize("first", SIGNALS)
def test_the_second_signal_of_either_kind_goes_to_the_handler_that_was_there_before(first, handlers):
    received = []
    handlers[signal.SIGTERM] = lambda number, _: received.append(number)
    signal.signal(signal.SIGTERM, handlers[signal.SIGTERM])
    last = jf.fit(state(), step, batches(1, 2, 3), 3, callbacks=[sender(1, first, signal.SIGTERM)])
    assert received == [signal.SIGTERM]
    assert last.step == 1


def test_an_error_puts_the_handlers_back():
    def fail(*_):
        raise RuntimeError("a callback failed")

    with pytest.raises(RuntimeError, match="a callback failed"):
        jf.fit(state(), step, batches(1), 1, callbacks=[fail])


def test_outside_of_the_main_thread_it_trains_and_leaves_signals_alone(handlers):
    seen = []

    def look(*_):
        seen.append({number: signal.getsignal(number) for number in SIGNALS})

    result = []
    thread = threading.Thread(target=lambda: result.append(jf.fit(state(), step, batches(1, 2), 2, callbacks=[look])))
    thread.start()
    thread.join()
    assert float(result[0].params["w"]) == 12.0
    assert seen == [handlers] * 2
