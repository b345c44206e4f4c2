"""The user-supplied function: its arguments, its results, and where it registers losses."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax import _jax
from curvax._errors import where
from curvax._types import Array, Fun, PyTree
from curvax.curvature.batch import axes_of, length_of
from curvax.layers.registration import registers_loss
from curvax.maps.accumulators import AccumulationType, Accumulator
from curvax.maps.microbatch import microbatch


class Evaluation(NamedTuple):
    """The results of the function for a batch."""

    loss: Array
    func_state: PyTree
    aux: PyTree
    gradient: PyTree


@dataclass(frozen=True)
class ValueFunction:
    """`value_and_grad_func`, with a uniform interface.

    The user-supplied function takes `(params, func_state, rng, batch)` and returns
    `((loss, func_state, aux), gradient)`, both without what it does not have. If there is neither
    state nor `aux`, it returns `(loss, gradient)`. If there are both, they may be a pair,
    `(loss, (func_state, aux))`, as `jax.value_and_grad(…, has_aux=True)` returns them.
    """

    value_and_grad: Fun
    has_aux: bool
    has_state: bool
    has_rng: bool
    microbatch_size: int | None = None
    memory_budget: int | float | str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the function's arguments."""
        has = {"params": True, "func_state": self.has_state, "rng": self.has_rng, "batch": True}
        return tuple(name for name, is_argument in has.items() if is_argument)

    def arguments(
        self, params: PyTree, func_state: PyTree, rng: Array, batch: PyTree
    ) -> tuple[PyTree, ...]:
        """Return those arguments that the function has, as one sequence."""
        if self.has_state and func_state is None:
            raise ValueError(f"{where()}: value_func_has_state=True, but func_state was not given.")
        if not self.has_state and func_state is not None:
            raise ValueError(
                f"{where()}: func_state was given, but value_func_has_state=False. Set "
                f"value_func_has_state=True, or leave it out."
            )
        state = (func_state,) if self.has_state else ()
        return (params, *state, *((rng,) if self.has_rng else ()), batch)

    def __call__(self, func_args: Sequence[PyTree]) -> Evaluation:
        """Evaluate the function and check its results; in microbatches if a size is set."""
        if self.microbatch_size is None and self.memory_budget is None:
            return self._at_once(*func_args)
        batch = len(func_args) - 1
        shapes = jax.eval_shape(self._at_once, *func_args)
        run = microbatch(
            self._at_once,
            argnums=(batch,),
            accumulator=_accumulators(shapes, self.rows_of_aux(func_args, shapes.aux)),
            in_axes=[axes_of(func_args[batch])],
            microbatch_size=self.microbatch_size,
            memory_budget=self.memory_budget,
        )
        return run(*func_args)

    def rows_of_aux(self, func_args: Sequence[PyTree], aux: PyTree) -> PyTree:
        """Return for each array in `aux` whether its leading axis is that of examples.

        It is if its length is the batch size, and grows when the function is traced with a larger
        batch. If the function does not accept a larger batch, the length alone decides.
        """
        *others, batch = func_args
        length = length_of(batch)
        are_long = jax.tree.map(lambda x: x.ndim > 0 and x.shape[0] == length, aux)
        if not any(jax.tree.leaves(are_long)):
            return are_long
        try:
            longer = jax.eval_shape(self._at_once, *others, jax.tree.map(_doubled, batch)).aux
        except Exception:  # noqa: BLE001  A user-supplied function may raise anything.
            return are_long
        has_grown = lambda is_long, x, other: is_long and x.shape != other.shape
        return jax.tree.map(has_grown, are_long, aux, longer)

    def _at_once(self, *func_args: PyTree) -> Evaluation:
        result = self.value_and_grad(*func_args)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise TypeError(
                f"{where()}: value_and_grad_func must return a pair of its value and its gradient, "
                f"as jax.value_and_grad(f) does, got {_described(result)}."
            )
        out, gradient = result
        loss, func_state, aux = self._unpacked(out)
        loss = jnp.asarray(loss)
        if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise TypeError(
                f"{where()}: the loss must be one real number, got {loss.dtype}{list(loss.shape)}. "
                f"{self._advice_on_loss(loss)}"
            )
        self._check_gradient(func_args[0], gradient)
        return Evaluation(loss, func_state, aux, gradient)

    def _unpacked(self, out: PyTree) -> tuple[ArrayLike, PyTree, PyTree]:
        """Return loss, state of the function and `aux`; None for those that it does not have."""
        expected = 1 + self.has_state + self.has_aux
        if expected == 1:
            if isinstance(out, tuple | list):
                raise self._wrong(out, "a loss alone")
            return out, None, None
        parts = list(out) if isinstance(out, tuple | list) else [out]
        if expected == 3 and len(parts) == 2 and isinstance(parts[1], tuple | list):
            parts = [parts[0], *parts[1]]
        if len(parts) != expected:
            raise self._wrong(out, f"{expected} values")
        if expected == 3:
            return parts[0], parts[1], parts[2]
        return (parts[0], parts[1], None) if self.has_state else (parts[0], None, parts[1])

    def _advice_on_loss(self, loss: Array) -> str:
        """Return what to do about a loss that is not one real number."""
        if jnp.issubdtype(loss.dtype, jnp.complexfloating) and not loss.shape:
            return (
                "Return its real part, which is what is minimised, and the complex number in aux."
            )
        options = {"value_func_has_aux": self.has_aux, "value_func_has_state": self.has_state}
        unset = [f"{name}=True" for name, is_set in options.items() if not is_set]
        if loss.shape or not unset:
            return "Return its mean over the examples, or their sum, as a floating-point number."
        return f"If value_and_grad_func returns more than the loss, set {' or '.join(unset)}."

    def _wrong(self, out: PyTree, expected: str) -> TypeError:
        return TypeError(
            f"{where()}: with value_func_has_state={self.has_state} and "
            f"value_func_has_aux={self.has_aux} the value of value_and_grad_func is {expected}, "
            f"got {_described(out)}."
        )

    def _check_gradient(self, params: PyTree, gradient: PyTree) -> None:
        described = lambda tree: (
            jax.tree.structure(tree),
            [jnp.shape(x) for x in jax.tree.leaves(tree)],
        )
        if described(params) != described(gradient):
            raise ValueError(
                f"{where()}: the gradient that value_and_grad_func returns must be like the "
                f"parameters, {described(params)}, got {described(gradient)}."
            )

    def for_estimator(self, given: Fun | None, func_args: Sequence[PyTree]) -> Fun:
        """Return the function in which losses are registered.

        It is `given` if that is not None; else the function that `jax.value_and_grad` was applied
        to, available as `__wrapped__`, if it registers a loss; else `value_and_grad_func` itself,
        whose derivative rules may register one.
        """
        if given is not None:
            return given
        registering = self.value_and_grad
        func: Fun | None = getattr(registering, "__wrapped__", None)
        while func is not None:
            # Choose the innermost: a gradient may rematerialise, and register a loss twice.
            if _accepts(func, func_args) and registers_loss(func, func_args):
                registering = func
            func = getattr(func, "__wrapped__", None)
        return registering


_LAST = Accumulator(
    init=lambda like: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like),
    update=lambda carry, value, index: value,
    finalize=lambda carry: carry,
    aggregate=lambda values: values[-1],
    uneven=True,
)


def _accumulators(shapes: Evaluation, rows: PyTree) -> PyTree:
    """Return accumulators for the results of microbatches: a pytree prefix of an `Evaluation`.

    Real numbers are averaged, weighted by the number of examples. Of a state that has no mean, such
    as a step counter, the last is kept. In `aux`, per-example rows are concatenated and integers
    summed.
    """
    mean = AccumulationType.MEAN

    def of_state(like: jax.ShapeDtypeStruct) -> AccumulationType | Accumulator:
        return mean if jnp.issubdtype(like.dtype, jnp.inexact) else _LAST

    def of_aux(like: jax.ShapeDtypeStruct, has_rows: bool) -> AccumulationType:
        if has_rows:
            return AccumulationType.CONCAT
        return mean if jnp.issubdtype(like.dtype, jnp.inexact) else AccumulationType.SUM

    state = jax.tree.map(of_state, shapes.func_state)
    return shapes._replace(
        loss=mean, func_state=state, aux=jax.tree.map(of_aux, shapes.aux, rows), gradient=mean
    )


def _doubled(x: ArrayLike) -> Any:
    """Return the type of a leaf of a batch with twice as many examples."""
    shape = jnp.shape(x)
    return x if axes_of(x) is None else _jax.resized(jnp.asarray(x), (2 * shape[0], *shape[1:]))


def _accepts(func: Fun, func_args: Sequence[PyTree]) -> bool:
    """Return whether the signature of a function accepts these arguments."""
    try:
        inspect.signature(func).bind(*func_args)
    except (TypeError, ValueError):
        return False
    return True


def _described(value: PyTree) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__
