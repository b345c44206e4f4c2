"""The number of floating-point operations of a function, counted in its jaxpr without running it.

Only matrix products and convolutions count, with two operations for each multiply-add. Elements of
a convolution that fall on padding or between dilated elements do not count. The body of a loop
counts as often as it runs, unlike in the compiler's cost analysis.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

__all__ = ["flops"]


def flops(fun: Callable[..., Any], *args: Any) -> int:
    """Return the number of operations of a function; its arguments may be shapes."""
    return _of_program(jax.make_jaxpr(fun)(*args).jaxpr)


def _of_program(program: Any) -> int:
    return sum(map(_of_equation, program.eqns))


def _of_equation(equation: Any) -> int:
    name = equation.primitive.name
    if name == "dot_general":
        return _of_product(equation)
    if name == "conv_general_dilated":
        return _of_convolution(equation)
    inside = sum(map(_of_program, _programs(equation.params)))
    if name == "while" and inside:
        raise ValueError("It is not known how often a while loop runs.")
    return inside * equation.params["length"] if name == "scan" else inside


def _programs(params: dict[str, Any]) -> Iterator[Any]:
    """Yield the jaxprs inside an equation: bodies of loops, calls."""
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else [value]:
            program = getattr(each, "jaxpr", each)
            if hasattr(program, "eqns"):
                yield program


def _of_product(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, result = equation.invars[0].aval, equation.outvars[0].aval
    return 2 * result.size * math.prod(left.shape[axis] for axis in contracted)


def _of_convolution(equation: Any) -> int:
    params, numbers = equation.params, equation.params["dimension_numbers"]
    image, kernel = (v.aval.shape for v in equation.invars)
    result = equation.outvars[0].aval.shape
    batch, channels = (result[axis] for axis in numbers.out_spec[:2])
    pairs = 1
    for k, axes in enumerate(
        zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    ):
        places = np.arange(result[axes[2]]) * params["window_strides"][k]
        taps = np.arange(kernel[axes[1]]) * params["rhs_dilation"][k] - params["padding"][k][0]
        met, spread = places[:, None] + taps, params["lhs_dilation"][k]
        last = (image[axes[0]] - 1) * spread
        pairs *= int(np.sum((met >= 0) & (met <= last) & (met % spread == 0)))
    return 2 * batch * channels * kernel[numbers.rhs_spec[1]] * pairs
