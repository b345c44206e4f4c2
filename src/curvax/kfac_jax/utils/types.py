"""The types that kfac_jax's signatures are written in, under its names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
from jax import Array as Array
from jax.typing import DTypeLike

from curvax._types import PyTree as PyTree

Params = TypeVar("Params")
Batch = TypeVar("Batch")
FuncState = TypeVar("FuncState")
TArrayTree = TypeVar("TArrayTree")

PRNGKey: TypeAlias = Array
Scalar: TypeAlias = float | int
Numeric: TypeAlias = Array | float | int
Shape: TypeAlias = tuple[int, ...]
DType: TypeAlias = DTypeLike
PyTreeDef = jax.tree_util.PyTreeDef
ArrayTree: TypeAlias = PyTree
FuncArgs: TypeAlias = Sequence[PyTree]
FuncAux: TypeAlias = Mapping[str, PyTree]
FuncOuts: TypeAlias = Array | tuple[Array, FuncAux]
Func: TypeAlias = Callable[..., FuncOuts]
ValueFunc: TypeAlias = Callable[..., Array]
ValueAndGradFunc: TypeAlias = Callable[..., tuple[Array, PyTree]]
AssumedFuncOutput: TypeAlias = Array | tuple[Array, FuncAux] | tuple[Array, tuple[Any, FuncAux]]
ScheduleType: TypeAlias = (
    Callable[[Numeric, Numeric | None], Numeric] | Callable[[Numeric], Numeric]
)
