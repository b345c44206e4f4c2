"""`fit`: steps in a loop, with a bar, that ends when it is asked to and loses nothing."""

import itertools
import os
import signal

import jax
import pytest

from helpers import assert_same, key
from optimizer.problems import ADAPTIVE, VALUES, make, make_batch, make_params, train


@pytest.fixture(scope="module")
def optimizer():
    return make()


def start(optimizer):
    params = make_params()
    return params, optimizer.init(params, key(0), make_batch())


def batches():
    return (make_batch(number % 4) for number in itertools.count())


def test_it_equals_a_loop_of_steps_and_shows_where_it_is(optimizer, capsys):
    params, state = start(optimizer)
    found, _, stats = optimizer.fit(params, state, key(7), batches(), 5, **VALUES)
    params, state = start(optimizer)
    for number in range(5):
        rng = jax.random.fold_in(key(7), number)
        batch = make_batch(number % 4)
        params, state, _ = optimizer.step(params, state, rng, batch=batch, **VALUES)
    assert_same(found, params)
    assert int(stats["step"]) == 4
    shown = capsys.readouterr().err
    assert "5/5" in shown
    assert "loss=" in shown
    assert "damping=0.05" in shown
    assert "ms/step" in shown


def test_it_is_quiet_on_request_and_without_steps_changes_nothing(optimizer, capsys):
    params, state = start(optimizer)
    found, same, stats = optimizer.fit(params, state, key(7), [], 0, progress=False, **VALUES)
    assert_same((found, same), (params, state))
    assert stats == {}
    assert not capsys.readouterr().err


def test_a_callback_sees_each_step_and_can_end_it(optimizer):
    seen = []

    def callback(params, state, stats):
        seen.append((int(state.step_counter), float(stats["loss"])))
        return len(seen) == 3

    params, state = start(optimizer)
    options = {"callback": callback, "progress": False, **VALUES}
    _, state, _ = optimizer.fit(params, state, key(7), batches(), 10, **options)
    assert int(state.step_counter) == 3
    assert [count for count, _ in seen] == [1, 2, 3]


def test_an_iterator_that_ends_too_early_is_a_warning_and_nothing_is_lost(optimizer):
    params, state = start(optimizer)
    two = [make_batch(0), make_batch(1)]
    with pytest.warns(UserWarning, match="ended after 2 of 5 steps"):
        params, state, stats = optimizer.fit(
            params, state, key(7), two, 5, progress=False, **VALUES
        )
    assert int(state.step_counter) == 2
    assert not any(x.is_deleted() for x in jax.tree.leaves((params, state, stats)))


def test_an_interrupt_ends_it_after_the_step_that_is_being_done(optimizer):
    def interrupted():
        for number in itertools.count():
            if number == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield make_batch(number % 4)

    before = signal.getsignal(signal.SIGINT)
    params, state = start(optimizer)
    options = {"progress": False, **VALUES}
    params, state, _ = optimizer.fit(params, state, key(7), interrupted(), 9, **options)
    assert int(state.step_counter) == 3
    assert not any(x.is_deleted() for x in jax.tree.leaves((params, state)))
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_is_raised(optimizer):
    def interrupted():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        yield make_batch()

    params, state = start(optimizer)
    with pytest.raises(KeyboardInterrupt):
        optimizer.fit(params, state, key(7), interrupted(), 9, progress=False, **VALUES)


def test_the_state_of_the_function_goes_along():
    from optimizer.problems import loss

    counted = lambda params, count, batch: (loss(params, batch), count + 1)
    optimizer = make(
        jax.value_and_grad(counted, has_aux=True), value_func_has_state=True, **ADAPTIVE
    )
    params = make_params()
    state = optimizer.init(params, key(0), make_batch(), jax.numpy.zeros(()))
    found = optimizer.fit(
        params, state, key(7), batches(), 3, progress=False, func_state=jax.numpy.zeros(())
    )
    assert float(found[2]) == 3
    plain, _, _ = train(make(**ADAPTIVE), 3)
    assert_same(found[0], plain)
