"""Classes of JAX that signatures name: jaxprs and what they consist of, and the types of arrays.

The classes of jaxprs are public in `jax.extend.core`. That module imports every primitive of JAX,
which takes some 50 ms, so that at run time they are taken from where `import jax` has
loaded them already.
"""

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
from jax.core import AbstractValue as AbstractValue, ShapedArray as ShapedArray, Tracer as Tracer
from numpy.typing import NDArray

from curvax._types import Array, ArrayLike, DType

if TYPE_CHECKING:
    from jax.extend.core import (
        ClosedJaxpr as ClosedJaxpr,
        Jaxpr as Jaxpr,
        JaxprEqn as JaxprEqn,
        Literal as Literal,
        Primitive as Primitive,
        Var as Var,
    )
else:
    from jax._src import core

    Jaxpr, JaxprEqn, Literal, Var = core.Jaxpr, core.JaxprEqn, core.Literal, core.Var
    Primitive = core.Primitive
    # In JAX 0.12 a jaxpr holds its constants, and one class is both.
    ClosedJaxpr = getattr(core, "ClosedJaxpr", Jaxpr)

Atom: TypeAlias = Var | Literal
"""An operand of an equation."""

Value: TypeAlias = ArrayLike | np.generic | jax.Ref
"""What a variable of a jaxpr stands for: an array, a tracer, a scalar, or a mutable array."""

Shaped: TypeAlias = Array | NDArray[np.generic] | jax.ShapeDtypeStruct | ShapedArray
"""An array or the type of one: it has a shape and a dtype."""


@runtime_checkable
class HasDType(Protocol):
    """An array, the type of one, or anything else that has a dtype."""

    @property
    def dtype(self) -> DType: ...


Typed: TypeAlias = Value | jax.ShapeDtypeStruct | AbstractValue
"""A value or the type of one, as `jax.typeof` returns it."""

Params: TypeAlias = dict[str, Any]
"""The static parameters of an equation. Each primitive has other ones, of any type."""
