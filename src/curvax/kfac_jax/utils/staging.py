"""Classes with compiled methods, and classes whose attributes can be frozen."""

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import jax
from jax import lax

from curvax.kfac_jax.utils.pmap import get_first, replicate_all_local_devices
from curvax.kfac_jax.utils.trees import copy_obj

T = TypeVar("T")


class Finalizable:
    """A class whose instances take no new attributes after `finalize`.

    Args:
        forbid_setting_attributes_after_finalize: Whether `finalize` freezes the attributes.
        excluded_attribute_names: Attributes that may be set all the same.
    """

    def __init__(
        self,
        forbid_setting_attributes_after_finalize: bool = True,
        excluded_attribute_names: Sequence[str] = (),
        **parent_kwargs: Any,
    ):
        super().__init__(**parent_kwargs)
        self._finalized = False
        self._locked = False
        self._forbids = forbid_setting_attributes_after_finalize
        self._excluded = frozenset(excluded_attribute_names) | {"_locked", "_finalized"}

    @property
    def finalized(self) -> bool:
        """Whether `finalize` was called."""
        return self._finalized

    def lock_attributes(self) -> None:
        """Take no new attributes from now on."""
        self._locked = True

    def unlock_attributes(self) -> None:
        """Take new attributes again."""
        self._locked = False

    def finalize(self, *args: Any, **kwargs: Any) -> None:
        """Call `_finalize` with these arguments, once, and freeze the attributes."""
        if self.finalized:
            raise ValueError("Object has already been finalized.")
        self._finalize(*args, **kwargs)
        self._finalized = True
        if self._forbids:
            self.lock_attributes()

    def _finalize(self, *args: Any, **kwargs: Any) -> None:
        """Do what is to be done before attributes are frozen; for subclasses."""

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_locked", False) and name not in self._excluded:
            verb = "set" if hasattr(self, name) else "create new"
            raise AttributeError(
                f"Can't {verb} attributes after finalization. Attempted to "
                f"{'set' if hasattr(self, name) else 'create'} {name}."
            )
        super().__setattr__(name, value)


class WithStagedMethods(Finalizable):
    """A class with methods that are compiled by `staged`.

    Args:
        multi_device: Whether arguments of staged methods have a leading axis of devices.
        pmap_axis_name: The name of that axis.
        debug: Whether to run staged methods without compiling them.
    """

    def __init__(
        self,
        multi_device: bool = False,
        pmap_axis_name: str | None = None,
        debug: bool = False,
        **parent_kwargs: Any,
    ):
        excluded = (*parent_kwargs.pop("excluded_attribute_names", ()), "_in_staging")
        super().__init__(excluded_attribute_names=excluded, **parent_kwargs)
        if multi_device and not isinstance(pmap_axis_name, str):
            raise ValueError(
                "When `multi_device=True` you must pass in a string for `pmap_axis_name`."
            )
        self._multi_device, self._pmap_axis_name = multi_device, pmap_axis_name
        self._debug = debug
        self._in_staging = False

    @property
    def multi_device(self) -> bool:
        """Whether arguments of staged methods have a leading axis of devices."""
        return self._multi_device

    @property
    def pmap_axis_name(self) -> str | None:
        """The name of the axis of devices."""
        return self._pmap_axis_name

    @property
    def debug(self) -> bool:
        """Whether staged methods run without being compiled."""
        return self._debug

    @property
    def in_staging(self) -> bool:
        """Whether a staged method is being traced."""
        return self._in_staging

    @contextlib.contextmanager
    def staging_context(self) -> Generator[None]:
        """Note that a staged method is being traced."""
        if self._in_staging:
            raise ValueError("A staging context has been already initiated.")
        self._in_staging = True
        try:
            yield
        finally:
            self._in_staging = False

    def get_first(self, obj: T) -> T:
        """Return what the first device has, if there is an axis of devices."""
        return get_first(obj) if self.multi_device else obj

    def copy_obj(self, obj: T | None) -> T | None:
        """Return a copy of the arrays of a pytree; None of None."""
        return None if obj is None else copy_obj(obj)

    def replicate(self, obj: T) -> T:
        """Repeat arrays along a leading axis of devices, if there is one."""
        return replicate_all_local_devices(obj) if self.multi_device else obj

    def pmean_if_pmap_wrapper(self, func: Callable[..., T]) -> Callable[..., T]:
        """Return a function whose result is averaged over devices while a method is staged."""

        @functools.wraps(func)
        def wrapped(*args: Any, **kwargs: Any) -> T:
            result = func(*args, **kwargs)
            if not (self.multi_device and self.in_staging):
                return result
            return lax.pmean(result, self.pmap_axis_name)

        return wrapped


def staged(
    method: Callable[..., T],
    static_argnums: int | Sequence[int] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
) -> Callable[..., T]:
    """Compile a method of a `WithStagedMethods`.

    Equal to `jax.jit` of the method, or to `jax.pmap` if the instance has `multi_device`, except
    that inside another staged method it is called as it is.

    Args:
        method: The method.
        static_argnums: The static arguments, not counting `self`.
        donate_argnums: The donated arguments, not counting `self`.
    """
    as_tuple = lambda x: () if x is None else (x,) if isinstance(x, int) else tuple(x)
    static, donated = as_tuple(static_argnums), as_tuple(donate_argnums)

    @functools.wraps(method)
    def traced(self: Any, *args: Any) -> T:
        with self.staging_context():
            return method(self, *args)

    def compile_for(self: Any) -> Callable[..., Any]:
        options: Any = {
            "static_broadcasted_argnums" if self.multi_device else "static_argnums": (
                0,
                *(k + 1 for k in static),
            ),
            "donate_argnums": tuple(k + 1 for k in donated),
        }
        if self.multi_device:
            return jax.pmap(traced, axis_name=self.pmap_axis_name, **options)
        return jax.jit(traced, **options)

    @functools.wraps(method)
    def decorated(self: Any, *args: Any) -> T:
        if self.in_staging:
            return method(self, *args)
        if self.debug and not self.multi_device:
            return traced(self, *args)
        # One program for each instance: what it has is static, as it is hashed by identity.
        programs = self.__dict__.setdefault("_staged_programs", {})
        if method not in programs:
            programs[method] = compile_for(self)
        return programs[method](self, *args)

    return decorated
