"""Functions that read what can be changed between two calls, in every way that Python has.

`KINDS` lists ways to hold a value. Each makes of `body(value, *args)` a function of `args`, and
returns how to get at that function and how to change the value.
"""

import functools
import types

import jax
import numpy as np

HELD = {}


def attribute_of_an_object(body):
    class Owner:
        def call(self, *args):
            return body(self.value, *args)

    owner = Owner()
    return lambda: owner.call, functools.partial(setattr, owner, "value")


def attribute_of_a_class(body):
    class Owner:
        @classmethod
        def call(cls, *args):
            return body(cls.value, *args)

    return lambda: Owner.call, functools.partial(setattr, Owner, "value")


def attribute_of_a_callable(body):
    class Owner:
        def __call__(self, *args):
            return body(self.value, *args)

    owner = Owner()
    return lambda: owner, functools.partial(setattr, owner, "value")


def variable_of_a_closure(body):
    value = None

    def call(*args):
        return body(value, *args)

    def change(new):
        nonlocal value
        value = new

    return lambda: call, change


def list_in_a_closure(body):
    held = [None]
    call = lambda *args: body(held[0], *args)
    return lambda: call, functools.partial(held.__setitem__, 0)


def default_argument(body):
    def call(*args, held={}):  # noqa: B006
        return body(held["value"], *args)

    return lambda: call, functools.partial(call.__kwdefaults__["held"].__setitem__, "value")


def argument_of_a_partial(body):
    held = types.SimpleNamespace()
    call = functools.partial(lambda held, *args: body(held.value, *args), held)
    return lambda: call, functools.partial(setattr, held, "value")


def global_variable(body):
    call = lambda *args: body(HELD["value"], *args)
    return lambda: call, functools.partial(HELD.__setitem__, "value")


def array_changed_in_place(body):
    held = np.zeros(())
    call = lambda *args: body(held, *args)
    return lambda: call, functools.partial(held.__setitem__, ...)


def callback(body):
    """A function that is called while the program runs, created again each time it is traced."""
    held = [None]

    def call(*args):
        value = np.asarray(held[0], np.float64)
        read = jax.pure_callback(lambda v=value: v, jax.ShapeDtypeStruct((), np.float64))
        return body(read, *args)

    return lambda: call, functools.partial(held.__setitem__, 0)


def callback_over_a_variable(body):
    held = [None]

    def call(*args):
        value = float(held[0])
        read = jax.pure_callback(
            lambda: np.asarray(value, np.float64), jax.ShapeDtypeStruct((), np.float64)
        )
        return body(read, *args)

    return lambda: call, functools.partial(held.__setitem__, 0)


KINDS = {
    make.__name__: make
    for make in (
        attribute_of_an_object,
        attribute_of_a_class,
        attribute_of_a_callable,
        variable_of_a_closure,
        list_in_a_closure,
        default_argument,
        argument_of_a_partial,
        global_variable,
        array_changed_in_place,
        callback,
        callback_over_a_variable,
    )
}
