"""What losses with targets share: keeping them, and naming them among what they are made of."""

from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array

__all__ = ["WithTargets"]


class WithTargets:
    """To be put before a class of losses: its targets, which may be missing, and its weight."""

    _weight: ArrayLike

    def __init__(self, targets: ArrayLike | None, weight: ArrayLike) -> None:
        super().__init__(weight)  # pyright: ignore[reportCallIssue]
        self._targets = None if targets is None else jnp.asarray(targets)

    @property
    def targets(self) -> Array | None:
        """What is to be predicted, if it is given."""
        return self._targets

    @property
    def parameter_independants(self) -> tuple[Any, ...]:
        """The targets if given, what else there is, and the weight."""
        given = () if self._targets is None else (self._targets,)
        return (*given, *self._further(), self._weight)

    def _further(self) -> tuple[Any, ...]:
        """What else does not depend on parameters."""
        return ()
