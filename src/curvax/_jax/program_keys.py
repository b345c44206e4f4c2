"""Keys of traced programs: equal only where two jaxprs compute the same, operation by operation.

A compiled program may be used again only for a function that is still what it was. Whether it is,
Python cannot tell: a method may read attributes that have changed, a closure a variable that was
assigned to. So a function is traced again, and its jaxpr compared. Variables count by the order in
which they appear, literals with all their bits (`0.0` is not `-0.0`), numbers by type (`1` is not
`True`). The constants of the program itself do not count, only their types, since a compiled
program takes them as arguments; those of programs inside it are built in, and do count.

Two kinds of Python functions are part of a program. A *callback* is called while the compiled
program runs. It is compared as a function: by its code and by what it closes over. A *derivative
rule* is called while derivatives are traced, and may read anything then. JAX's own rules are known
to read nothing that changes; of any other nothing is known before it has been traced.
"""

import dataclasses
import functools
import types
import weakref
from collections.abc import Hashable, Mapping, Sequence, Set as AbstractSet
from typing import Any, final

import jax
import numpy as np

from curvax._jax.jaxprs import as_program, is_literal, operation_name, parameters

__all__ = ["program_key", "scalar_key"]


def program_key(program: Any, *, differentiated: bool) -> Hashable | None:
    """A key for a closed jaxpr, without the values of its constants.

    Args:
        program: the closed jaxpr.
        differentiated: whether it will be differentiated, so that derivative rules count, or only
            be compiled as it is.

    Returns:
        Something that equals what another program gives if both compute the same from constants
        and arguments. None if a derivative rule in it is a Python function that is not JAX's own.
    """
    jaxpr, _ = as_program(program) or (program, ())
    try:
        return _Keys(differentiated).jaxpr(jaxpr)
    except _UnknownRule:
        return None


class _UnknownRule(Exception):
    """A derivative rule whose results cannot be known without tracing it."""


class _Keys:
    """Keys for what is in a program."""

    def __init__(self, differentiated: bool) -> None:
        self._differentiated = differentiated
        # A function that is called twice is one jaxpr in two places, and so is what it calls.
        self._known: dict[int, Hashable] = {}

    def jaxpr(self, jaxpr: Any) -> Hashable:
        """A key for a jaxpr, up to the names of its variables."""
        numbers: dict[Any, int] = {}

        def read(atom: Any) -> Hashable:
            if is_literal(atom):
                return atom.aval, self.value(atom.val)
            return numbers[atom]

        def written(variable: Any) -> Hashable:
            numbers[variable] = len(numbers)
            return variable.aval

        inputs = [tuple(map(written, of)) for of in (jaxpr.constvars, jaxpr.invars)]
        equations = []
        for eqn in jaxpr.eqns:
            is_callback = "callback" in eqn.primitive.name
            params = [(k, self._param(x, is_callback)) for k, x in parameters(eqn).items()]
            reads = tuple(map(read, eqn.invars))
            # Contexts are interned. They have settings that change what an operation computes.
            writes = tuple(map(written, eqn.outvars))
            kind = eqn.primitive, operation_name(eqn)
            equations.append((kind, tuple(params), eqn.ctx, reads, writes))
        return (*inputs, *equations, tuple(map(read, jaxpr.outvars)))

    def _param(self, x: Any, is_callback: bool) -> Hashable:
        if is_callback or not _is_function(x):
            return self.value(x)
        if not self._differentiated:
            # It has been applied, or it will not be. What is compiled are the programs beside it.
            return "function"
        return _rule_key(x)

    def value(self, x: Any) -> Hashable:
        """A key for anything that can be a parameter of an operation."""
        if x is None or type(x) in (str, int):
            return x
        if isinstance(x, bool | int | float | complex | np.generic):
            return scalar_key(x)
        program = as_program(x)
        if program is not None:
            if id(x) not in self._known:
                jaxpr, consts = program
                self._known[id(x)] = (self.jaxpr(jaxpr), *map(self.value, consts))
            return self._known[id(x)]
        if isinstance(x, jax.Array):
            return _Alive(x)
        if hasattr(x, "dtype") and hasattr(x, "__array__"):  # NumPy's, and the values of literals.
            array = np.asarray(x)
            return "array", array.dtype, array.shape, array.tobytes()
        inside = self._inside(x)
        if inside is not None:
            return type(x), *inside
        if isinstance(x, types.FunctionType):
            return _Function(x)
        return _hashable(x)

    def _inside(self, x: Any) -> Sequence[Hashable] | None:
        """The keys of what a container holds, or None if `x` is not one."""
        if isinstance(x, tuple | list):
            return [self.value(item) for item in x]
        if isinstance(x, AbstractSet):
            return [frozenset(self.value(item) for item in x)]
        if isinstance(x, Mapping):
            return [frozenset((self.value(key), self.value(item)) for key, item in x.items())]
        if isinstance(x, functools.partial):
            return [self.value(item) for item in (x.func, x.args, x.keywords)]
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            return [self.value(getattr(x, field.name, None)) for field in dataclasses.fields(x)]
        return None


def scalar_key(x: Any) -> Hashable:
    """A key for a number: by its type and all of its bits."""
    if isinstance(x, int):
        return type(x), int(x)
    return type(x), np.asarray(x).tobytes()


def _hashable(x: Any) -> Hashable:
    """`x` as a key: by its type and value if it has one, else as this very object."""
    try:
        hash(x)
    except TypeError:
        return _Same(x)
    return type(x), x


@final
class _Same:
    """A key that equals only one of the very same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@final
class _Alive:
    """A key that equals only one of the very same array, and that does not keep it alive."""

    def __init__(self, array: Any) -> None:
        self._array, self._hash = weakref.ref(array), id(array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alive) and self._array() is other._array() is not None

    def __hash__(self) -> int:
        return self._hash


@final
class _Function:
    """A key for a Python function that equals one that does the same now.

    That is a function of the same code, globals and defaults that closes over the same objects, or
    equal numbers. What they close over is looked at when they are compared, since it is then that
    one is to be called in place of the other.
    """

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Function) and _do_the_same(self._function, other._function)

    def __hash__(self) -> int:
        return hash(self._function.__code__)


def _do_the_same(one: types.FunctionType, two: types.FunctionType) -> bool:
    if one is two:
        return True
    if one.__code__ != two.__code__ or one.__globals__ is not two.__globals__:
        return False
    # JAX does not change what its own functions close over. Of others, a list is that very list.
    open_containers = _is_of_jax(one.__module__)
    have_attributes = bool(vars(one) or vars(two))
    return not have_attributes and _are_same(_held_by(one), _held_by(two), open_containers)


def _are_same(a: Any, b: Any, open_containers: bool) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, str | jax.tree_util.PyTreeDef):
        return a == b
    if isinstance(a, bool | int | float | complex):
        return scalar_key(a) == scalar_key(b)
    if isinstance(a, types.FunctionType):
        return _do_the_same(a, b)
    if type(a) is tuple or (open_containers and type(a) is list):
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(_are_same(x, y, open_containers) for x, y in pairs)
    if open_containers and type(a) is dict:
        return a.keys() == b.keys() and all(_are_same(a[k], b[k], True) for k in a)
    return False


def _held_by(function: types.FunctionType) -> tuple[Any, ...]:
    """All that a function refers to beside its globals."""
    keywords = sorted((function.__kwdefaults__ or {}).items())
    contents = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:  # It has not been assigned to yet.
            contents.append(None)
    return function.__defaults__ or (), tuple(keywords), *contents


def _is_function(x: Any) -> bool:
    """Whether `x` is called in Python: a function, or something made of one."""
    if isinstance(x, type):
        return False
    if hasattr(x, "call_wrapped") or hasattr(x, "__wrapped__"):
        return True
    # JAX has things that can be called and are no functions, such as a mesh.
    return callable(x) and (isinstance(x, _FUNCTIONS) or not _is_of_jax(type(x).__module__))


_FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    functools.partial,
)


def _rule_key(rule: Any) -> Hashable:
    """A key for a derivative rule of JAX's own: the code of all functions that it is made of."""
    found: list[Hashable] = []
    seen: set[int] = set()
    pending = [rule]
    while pending:
        x = pending.pop()
        parts = _parts(x)
        if isinstance(x, types.FunctionType):
            if not _is_of_jax(x.__module__):
                raise _UnknownRule
            found.append(x.__code__)
            parts = () if id(x) in seen else parts  # It may close over itself.
            seen.add(id(x))
        elif isinstance(x, str | bool | int | float | complex):
            found.append(x if isinstance(x, str) else scalar_key(x))
        elif parts is None and _is_function(x):
            raise _UnknownRule
        # What else there is are types, and where JAX will store results.
        pending += parts or ()
    return tuple(found)


def _parts(x: Any) -> Sequence[Any] | None:
    """What a function or a tuple is made of, or None if it is neither."""
    if isinstance(x, tuple | list):
        return x
    if hasattr(x, "call_wrapped"):  # JAX's wrapper, with transformations and their arguments.
        return x.f, x.transforms
    if isinstance(x, functools.partial):
        return x.func, *x.args, *x.keywords.values()
    if isinstance(x, types.FunctionType):
        return _held_by(x)
    if hasattr(x, "__wrapped__"):  # Made by `jax.jit` or `jax.custom_jvp`.
        return (x.__wrapped__,)
    return None


def _is_of_jax(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("jax", "jaxlib")
