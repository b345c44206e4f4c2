"""What a computation is, as one short text that is the same in every process.

A result on disk may be continued only by the program that began it, on the same numbers. The
printed form of a jaxpr cannot tell: it abbreviates arrays, and it shows memory addresses, which
change from one process to the next. So the program is walked here. Variables are numbered in order
of appearance, values count with all their bytes, parameters are taken apart by type, and programs
inside programs are walked in turn, each of them once.

Python functions in the parameters of an operation (the derivative rule of a `jax.custom_jvp`, a
callback to the host) count by their names only; nothing can compare what they do. So the program
to give is the one that computes the result, in which derivative rules have been applied already;
and `callbacks` lists the functions that it calls while it runs, for which a fingerprint says
nothing.
"""

import dataclasses
import enum
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence, Set as AbstractSet
from typing import Any

import jax
import numpy as np

from curvax import _jax

# Whoever changes how a text is made changes this too: old stores are then refused, not misread.
FORMAT = "curvax fingerprint 1"

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")


def fingerprint(closed_jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> str:
    """A SHA-256 of a program and of the numbers that it is given, as 64 hexadecimal digits.

    Args:
        closed_jaxpr: the program, as `jax.make_jaxpr` gives it. Its constants count, also those of
            the programs inside it.
        consts: further arrays that the result depends on.
        inputs: the arrays that the program is called with. Typed random keys are fine.

    Returns:
        The same text for the same program and the same numbers in any process. Another one where
        an operation, a parameter, a literal, or the dtype, shape or bytes of an array differ.
    """
    parts = [
        FORMAT,
        _Texts({}).value(closed_jaxpr),
        *(f"constant {_array(x)}" for x in consts),
        *(f"input {_array(x)}" for x in inputs),
    ]
    return _sha256("\n".join(parts).encode())


def callbacks(closed_jaxpr: Any) -> list[str]:
    """Return the names of the Python functions that a program calls back to for its result.

    `jax.debug.print` and `jax.debug.callback` do not count: no result depends on them.
    """
    names = map(_jax.callback_name, _jax.equations_inside(closed_jaxpr))
    return list(dict.fromkeys(name for name in names if name is not None))


@dataclasses.dataclass(frozen=True)
class _Texts:
    """Texts for what is in a program. `known` has those of the programs met so far, by identity.

    A function that is called twice is one jaxpr in two places, and so is what it calls: without
    `known` the work would double with each level.
    """

    known: dict[int, str]

    def value(self, x: Any) -> str:
        """A text for anything that can be a parameter of an operation."""
        if _jax.as_program(x) is not None:
            if id(x) not in self.known:
                self.known[id(x)] = self._program(x)
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

    def _inside(self, x: Any) -> list[str] | None:
        """The texts of what a container holds, or None if `x` is not one."""
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

    def _program(self, x: Any) -> str:
        jaxpr, consts = _jax.as_program(x) or (x, ())
        numbers: dict[Any, int] = {}

        def atom(a: Any) -> str:
            kind = _plain(a.aval)
            if _jax.is_literal(a):
                return f"{kind} {self.value(a.val)}"
            return f"{kind} v{numbers.setdefault(a, len(numbers))}"

        def atoms(of: Sequence[Any]) -> str:
            return "; ".join(map(atom, of))

        lines = [f"constant {_array(const)}" for const in consts]
        lines += [f"constants {atoms(jaxpr.constvars)}", f"inputs {atoms(jaxpr.invars)}"]
        for eqn in jaxpr.eqns:
            # The context has settings that change what an operation computes, as of random bits.
            settings = f"{self.value(_jax.parameters(eqn))} {_plain(eqn.ctx)}"
            lines.append(f"{_jax.operation_name(eqn)} {settings} reads {atoms(eqn.invars)}")
            lines.append(f"writes {atoms(eqn.outvars)}")
        lines.append(f"outputs {atoms(jaxpr.outvars)}")
        return f"program {_sha256(chr(10).join(lines).encode())}"


def _array(x: Any) -> str:
    """The dtype and the shape of an array, and a digest of its bytes."""
    x = x if hasattr(x, "dtype") else np.asarray(x)
    numbers = np.asarray(_jax.unwrap_keys(x) if _jax.is_key(x) else x)
    flat = np.ascontiguousarray(numbers).reshape(-1)
    # A view of the bytes: a copy would be as large as the largest of the inputs.
    content = flat.view(np.uint8) if flat.size and flat.dtype.itemsize else b""
    return f"{x.dtype}{list(numbers.shape)} {_sha256(content)}"


def _plain(x: Any) -> str:
    """How `x` prints, without where it lies in memory."""
    return _ADDRESS.sub("0x", repr(x))


def _name(x: Any) -> str:
    """The name under which a class or a function was defined."""
    named = x if hasattr(x, "__qualname__") else type(x)
    return f"{named.__module__}.{named.__qualname__}"


def _sha256(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()
