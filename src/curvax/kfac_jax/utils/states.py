"""States: dataclasses that are pytrees, averages over time, and sums over chunks."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, dataclass_transform, get_type_hints

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax.curvature.linalg.moving_average import WeightedMovingAverage as _MovingAverage
from curvax.kfac_jax.utils.pmap import pmap_sync_and_divide_value
from curvax.kfac_jax.utils.trees import copy_obj, default_add_function, scalar_mul
from curvax.kfac_jax.utils.types import DType, Numeric, PyTree, TArrayTree

StateType = TypeVar("StateType", bound="State")
C = TypeVar("C")


class State:
    """Base of the states that `register_state_class` makes: dataclasses that are pytrees."""

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Return the names of the fields, in order."""
        return tuple(field.name for field in dataclasses.fields(_as_dataclass(cls)))

    @classmethod
    def field_types(cls) -> dict[str, type[Any]]:
        """Return the annotation of each field."""
        hints = get_type_hints(cls)
        return {name: hints[name] for name in cls.field_names()}

    @property
    def field_values(self) -> tuple[PyTree, ...]:
        """The values of the fields, in order."""
        return tuple(getattr(self, name) for name in self.field_names())

    def copy(self: StateType) -> StateType:
        """Return a state with the same arrays, whose fields are set independently."""
        return jax.tree.map(lambda x: x, self)

    def tree_flatten(self) -> tuple[tuple[PyTree, ...], tuple[str, ...]]:
        """Return the fields, and their names."""
        return self.field_values, self.field_names()

    @classmethod
    def tree_unflatten(cls, aux_data: tuple[str, ...], children: Sequence[PyTree]) -> "State":
        """Return a state with these fields."""
        return cls(**dict(zip(aux_data, children, strict=True)))


def _as_dataclass(cls: type[Any]) -> Any:
    if not dataclasses.is_dataclass(cls):
        raise TypeError(
            f"{cls.__qualname__} has no fields yet. Decorate it with "
            f"curvax.kfac_jax.utils.register_state_class."
        )
    return cls


@dataclass_transform()
def register_state_class(class_type: type[C]) -> type[C]:
    """Make a class a dataclass whose fields are the children of a pytree."""
    made = dataclasses.dataclass(class_type)
    return jax.tree_util.register_dataclass(made)


_CLASS = "__class__"


def serialize_state_tree(instance: PyTree) -> PyTree:
    """Return a state as nested dictionaries, in which `__class__` names the class of each."""
    if isinstance(instance, State | WeightedMovingAverage):
        fields = {name: getattr(instance, name) for name in instance.field_names()}
        name = f"{type(instance).__module__}.{type(instance).__qualname__}"
        return {**{k: serialize_state_tree(x) for k, x in fields.items()}, _CLASS: name}
    if isinstance(instance, dict):
        return {key: serialize_state_tree(x) for key, x in instance.items()}
    if isinstance(instance, list | tuple):
        return type(instance)(serialize_state_tree(x) for x in instance)
    return instance


def deserialize_state_tree(representation: PyTree) -> PyTree:
    """Return the state that `serialize_state_tree` made dictionaries of, by kfac_jax's or ours."""
    if isinstance(representation, dict):
        fields = {k: deserialize_state_tree(x) for k, x in representation.items() if k != _CLASS}
        if _CLASS not in representation:
            return fields
        return _class_of(representation[_CLASS])(**fields)
    if isinstance(representation, list | tuple):
        return type(representation)(deserialize_state_tree(x) for x in representation)
    return representation


def _class_of(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    if attribute == "WeightedMovingAverage":
        return WeightedMovingAverage
    parts = module.split(".")
    for count in range(len(parts), 0, -1):  # Classes inside classes have dots in their names.
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in (*parts[count:], attribute):
            found = getattr(found, part)
        return found
    raise ImportError(f"The class {name!r} of a serialised state cannot be imported.")


@jax.tree_util.register_pytree_with_keys_class
class WeightedMovingAverage(_MovingAverage, Generic[TArrayTree]):
    """A weighted average over time, made from its weight and its value.

    Equal to `curvax.WeightedMovingAverage` except that it is made from the average itself and not
    from the weighted sum, can be cleared, and can be updated by a function of one's own.
    """

    def __init__(self, weight: Numeric, value: TArrayTree | None):
        self.weight = jnp.asarray(weight)
        weighted = lambda x: x * self.weight.astype(jnp.result_type(x))
        self.raw_value = None if value is None else jax.tree.map(weighted, value)
        self.refused = jnp.zeros((), jnp.int32)

    @classmethod
    def zero(cls, shape: Sequence[int], dtype: DType = jnp.float32) -> "WeightedMovingAverage[Any]":
        """Equal to `zeros_array`; the name that older versions have."""
        return cls.zeros_array(shape, dtype)

    @classmethod
    def zeros_array(cls, shape: Sequence[int], dtype: Any = None) -> "WeightedMovingAverage[Any]":
        """Return an average of nothing yet, of arrays of this shape."""
        return cls.zeros_like(jnp.zeros(shape, dtype))

    @classmethod
    def zeros_like(cls, value: PyTree) -> "WeightedMovingAverage[Any]":
        """Return an average of nothing yet, of values like this."""
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), value)
        return cls(jnp.zeros((), jnp.result_type(float)), zeros)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Return the names of what it is made from."""
        return ("weight", "value")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value, if that is an array."""
        return self.raw_value.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the value, if that is an array."""
        return self.raw_value.ndim

    @property
    def dtype(self) -> Any:
        """The dtype of the value, if that is an array."""
        return self.raw_value.dtype

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]  kfac_jax's arguments.
        self,
        value: TArrayTree,
        old_weight_multiplier: ArrayLike,
        new_weight: ArrayLike,
        add_function: Callable[..., TArrayTree] = default_add_function,
        **kwargs: Any,
    ) -> "WeightedMovingAverage[TArrayTree]":
        """Update the average with a value, in place.

        Args:
            value: A value of the structure and the shapes of the average.
            old_weight_multiplier: Factor of the weight so far.
            new_weight: The weight of this value.
            add_function: Returns the new average from the old one, the value, and the parts of the
                total weight that each has.
            **kwargs: As curvax's blocks pass them: `is_finite`, whether the value is.
        """
        if add_function is default_add_function:
            super().update(value, old_weight_multiplier, new_weight, **kwargs)
            return self
        kept = self.weight * old_weight_multiplier
        total = kept + new_weight
        mixed = add_function(self.value, value, kept / total, new_weight / total)
        self.weight, self.raw_value = total, scalar_mul(mixed, total)
        return self

    def clear(self, value_to_none: bool = False) -> None:
        """Set weight and value to zero, or the value to None."""
        self.weight = jnp.zeros_like(self.weight)
        zeros = jax.tree.map(jnp.zeros_like, self.raw_value)
        self.raw_value = None if value_to_none else zeros

    def value_and_clear(self) -> TArrayTree:
        """Return the value, and clear it."""
        value = self.value
        self.clear()
        return value

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        """Return weight, weighted sum and the count of refused values."""
        names = ("weight", "raw_value", "refused")
        keys = [jax.tree_util.GetAttrKey(name) for name in names]
        return tuple((k, getattr(self, n)) for k, n in zip(keys, names, strict=True)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Any]) -> "WeightedMovingAverage[Any]":
        """Return an average with these leaves."""
        made = object.__new__(cls)
        made.weight, made.raw_value, made.refused = children
        return made


class MultiChunkAccumulator(Generic[TArrayTree]):
    """A weighted mean over chunks of a batch, summed up one by one.

    Args:
        init_obj_value: The weighted sum so far, or None.
        weight: The sum of the weights so far.
        multi_device: Whether values have a leading axis of devices, over which `value` averages.
    """

    def __init__(self, init_obj_value: TArrayTree | None, weight: Numeric, multi_device: bool):
        self._accumulator = init_obj_value
        self._weight: Numeric | None = weight
        self._multi_device = multi_device

    @classmethod
    def empty(cls, multi_device: bool) -> "MultiChunkAccumulator[Any]":
        """Return an accumulator of nothing yet."""
        return cls(None, 0, multi_device)

    @classmethod
    def zeros_like(cls, obj: TArrayTree, multi_device: bool) -> "MultiChunkAccumulator[TArrayTree]":
        """Return an accumulator that begins with zeros like `obj`."""
        return cls(jax.tree.map(jnp.zeros_like, obj), 0, multi_device)

    @property
    def accumulator(self) -> TArrayTree | None:
        """The weighted sum so far."""
        return self._accumulator

    @property
    def weight(self) -> Numeric | None:
        """The sum of the weights so far."""
        return self._weight

    @property
    def multi_device(self) -> bool:
        """Whether values have a leading axis of devices."""
        return self._multi_device

    @property
    def value(self) -> TArrayTree | None:
        """The weighted mean; None of nothing."""
        if self._accumulator is None or self._weight is None:
            return None
        if not self._multi_device:
            return jax.tree.map(lambda x: x / self._weight, self._accumulator)
        counts = jnp.broadcast_to(self._weight, jax.tree.leaves(self._accumulator)[0].shape[:1])
        return pmap_sync_and_divide_value(self._accumulator, counts)

    def add(self, value_obj: TArrayTree, weight: Numeric = 1) -> None:
        """Add a value with its weight."""
        weighted = scalar_mul(value_obj, weight)
        if self._accumulator is None:
            self._accumulator, self._weight = weighted, weight
            return
        self._accumulator = jax.tree.map(lambda x, y: x + y, self._accumulator, weighted)
        self._weight = (self._weight or 0) + weight

    def clear(self) -> None:
        """Forget everything."""
        self._accumulator = self._weight = None

    def value_and_clear(self) -> TArrayTree | None:
        """Return the weighted mean, and forget everything."""
        value = self.value
        self.clear()
        return value

    def copy(self) -> "MultiChunkAccumulator[TArrayTree]":
        """Return an accumulator that is added to independently."""
        copied = None if self._accumulator is None else copy_obj(self._accumulator)
        return MultiChunkAccumulator(copied, self._weight or 0, self._multi_device)
