"""`fingerprint`: a hash of a program and its inputs that is the same in every process.

A result on disk may be resumed only by the same program on the same inputs. The printed form of a
jaxpr does not identify it: it abbreviates arrays, and it shows memory addresses, which change from
one process to the next. So the jaxpr is traversed here. Variables are numbered in order of
appearance, values are hashed with all their bytes, parameters by their type, and inner jaxprs
recursively, each of them once.

Python functions in the parameters of an operation (the derivative rule of a `jax.custom_jvp`, a
callback to the host) are represented by their names only, because their behaviour cannot be
compared. So the program to hash is the one that computes the result, in which derivative rules have
been applied already. `callbacks` lists the functions that it calls at run time, which a fingerprint
does not cover.
"""

import dataclasses
import enum
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence, Set as AbstractSet

import jax
import numpy as np

from curvax import _jax

# To be changed with the form of the hashed text: old stores are then rejected, not misread.
FORMAT = "curvax fingerprint 1"

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")


def fingerprint(
    closed_jaxpr: _jax.ClosedJaxpr, consts: Sequence[_jax.Value], inputs: Sequence[_jax.Value]
) -> str:
    """Return a SHA-256 hash of a program and its inputs, as 64 hexadecimal digits.

    Arguments:
        closed_jaxpr: The program, as `jax.make_jaxpr` returns it. Its constants are hashed, also
            those of inner jaxprs.
        consts: Further arrays that the result depends on.
        inputs: The arrays that the program is called with. They may be typed random keys.

    Returns:
        The same hash for the same program and the same values in any process. It differs if an
        operation, a parameter, a literal, or the dtype, shape or bytes of an array differ.
    """
    parts = [
        FORMAT,
        _Texts({}).value(closed_jaxpr),
        *(f"constant {_array(x)}" for x in consts),
        *(f"input {_array(x)}" for x in inputs),
    ]
    return _sha256("\n".join(parts).encode())


def callbacks(closed_jaxpr: _jax.ClosedJaxpr) -> list[str]:
    """Return the names of the Python functions that a program calls for its result.

    `jax.debug.print` and `jax.debug.callback` are left out: no result depends on them.
    """
    names = map(_jax.callback_name, _jax.equations_inside(closed_jaxpr))
    return list(dict.fromkeys(name for name in names if name is not None))


@dataclasses.dataclass(frozen=True)
class _Texts:
    """Texts that identify the parts of a program. `known` has those of jaxprs, by identity.

    A function that is called twice is one jaxpr with two references, and so is each that it calls:
    without `known`, the work would double with each level.
    """

    known: dict[int, str]

    def value(self, x: object) -> str:
        """Return a text for a parameter of an operation, of any type."""
        program = _jax.as_program(x)
        if program is not None:
            if id(x) not in self.known:
                self.known[id(x)] = self._program(*program)
            return self.known[id(x)]
        if isinstance(x, np.ndarray | np.generic | jax.Array):
            return f"array {_array(x)}"
        inside = self._inside(x)
        if inside is not None:
            return f"{_name(type(x))}({', '.join(inside)})"
        if isinstance(x, enum.Enum):
            return f"{_name(type(x))}.{x.name}"
        if callable(x):
            return f"function {_name(x)}"
        return f"{_name(type(x))} {_plain(x)}"

    def _inside(self, x: object) -> list[str] | None:
        """Return the texts of the items of a container, or None if `x` is not one."""
        if isinstance(x, tuple | list):
            return [self.value(item) for item in x]
        if isinstance(x, AbstractSet):
            return sorted(self.value(item) for item in x)
        if isinstance(x, Mapping):
            return sorted(f"{self.value(key)}: {self.value(item)}" for key, item in x.items())
        if isinstance(x, functools.partial):
            return [self.value(item) for item in (x.func, x.args, x.keywords)]
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            fields = [field.name for field in dataclasses.fields(x)]
            return [f"{name}={self.value(getattr(x, name, None))}" for name in fields]
        return None

    def _program(self, jaxpr: _jax.Jaxpr, consts: Sequence[_jax.Value]) -> str:
        indices: dict[_jax.Atom, int] = {}

        def atom(a: _jax.Atom) -> str:
            kind = _plain(a.aval)
            if _jax.is_literal(a):
                return f"{kind} {self.value(a.val)}"
            return f"{kind} v{indices.setdefault(a, len(indices))}"

        def atoms(operands: Sequence[_jax.Atom]) -> str:
            return "; ".join(map(atom, operands))

        lines = [f"constant {_array(const)}" for const in consts]
        lines += [f"constants {atoms(jaxpr.constvars)}", f"inputs {atoms(jaxpr.invars)}"]
        for eqn in jaxpr.eqns:
            # The context holds settings that change results, such as those of random bits.
            settings = f"{self.value(_jax.parameters(eqn))} {_plain(eqn.ctx)}"
            lines.append(f"{_jax.operation_name(eqn)} {settings} reads {atoms(eqn.invars)}")
            lines.append(f"writes {atoms(eqn.outvars)}")
        lines.append(f"outputs {atoms(jaxpr.outvars)}")
        return f"program {_sha256(chr(10).join(lines).encode())}"


def _array(x: _jax.Value) -> str:
    """Return the dtype and the shape of an array, and a hash of its bytes."""
    dtype = getattr(x, "dtype", None)
    data = np.asarray(_jax.unwrap_keys(x) if isinstance(x, jax.Array) else x)
    flat = np.ascontiguousarray(data).reshape(-1)
    # A view of the bytes: a copy could be as large as the largest input.
    content = flat.view(np.uint8).data if flat.size and flat.dtype.itemsize else b""
    return f"{data.dtype if dtype is None else dtype}{list(data.shape)} {_sha256(content)}"


def _plain(x: object) -> str:
    """Return how `x` prints, without memory addresses."""
    return _ADDRESS.sub("0x", repr(x))


def _name(x: object) -> str:
    """Return the qualified name of a class or a function, or of the type of `x`."""
    named = x if isinstance(x, type) or hasattr(x, "__qualname__") else type(x)
    return f"{named.__module__}.{getattr(named, '__qualname__', '')}"


def _sha256(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()
