"""`BlockwiseCurvature`: what an estimate that has blocks knows about these and the parameters."""

import abc
from collections.abc import Sequence
from typing import Any

from curvax._types import Array, PyTree
from curvax.blocks import CurvatureBlock
from curvax.curvature._estimator import CurvatureEstimator
from curvax.curvature._report import CurvatureReport, report_of
from curvax.curvature._structure import Structure

__all__ = ["BlockwiseCurvature"]


class BlockwiseCurvature(CurvatureEstimator):
    """An estimator with blocks, which are known once its function was traced."""

    _where: str
    _made: Structure | None = None

    @property
    def blocks(self) -> tuple[CurvatureBlock, ...] | None:
        """The blocks, once the function was traced (by `init` or `finalize`)."""
        return None if self._made is None else self._made.blocks

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self._known.blocks)

    @property
    def block_dims(self) -> tuple[int, ...]:
        """The number of elements of the parameters of each block."""
        return tuple(block.dim for block in self._known.blocks)

    @property
    def dim(self) -> int:
        """The number of elements of all parameters."""
        return sum(self.block_dims)

    @property
    def params_shapes(self) -> PyTree:
        """The parameters, with each replaced by its shape and dtype."""
        return self._known.params

    @property
    def params_names(self) -> list[list[str]]:
        """The paths of the parameters of each block."""
        return self._known.block_params

    @property
    def params_structure_vector_of_indices(self) -> PyTree:
        """The parameters, with each replaced by its number."""
        return self._known.join(self._known.indices)

    @property
    def indices_to_block_map(self) -> dict[tuple[int, ...], CurvatureBlock]:
        """The blocks, by the numbers of their parameters."""
        return dict(zip(self._known.indices, self._known.blocks, strict=True))

    @property
    def params_block_index(self) -> PyTree:
        """The parameters, with each replaced by the number of its block."""
        known = self._known
        return known.join([[k] * len(own) for k, own in enumerate(known.indices)])

    @property
    def num_params_variables(self) -> int:
        """The number of arrays that the parameters are."""
        return len(self._known.shapes)

    def finalize(self, func_args: Sequence[PyTree]) -> None:
        """Trace the function and make the blocks, if that was not done yet.

        Arguments:
            func_args: arguments of the function.
        """
        if self._made is None:
            self._made = self._make(func_args)

    def params_vector_to_blocks_vectors(
        self, parameter_structured_vector: PyTree
    ) -> tuple[tuple[Array, ...], ...]:
        """The parts of a vector that belong to each block.

        Arguments:
            parameter_structured_vector: a pytree like the parameters.

        Returns:
            For each block, an array for each of its parameters.

        Raises:
            ValueError: if it is not like the parameters.
        """
        return self._known.split(parameter_structured_vector)

    def blocks_vectors_to_params_vector(self, blocks_vectors: Sequence[Sequence[Array]]) -> PyTree:
        """What `params_vector_to_blocks_vectors` split, together.

        Arguments:
            blocks_vectors: for each block, an array for each of its parameters.

        Returns:
            A pytree like the parameters.

        Raises:
            ValueError: if there are more or fewer.
        """
        return self._known.join(blocks_vectors)

    def to_diagonal_block_dense_matrix(self, state: Any) -> tuple[Array, ...]:
        """Each block as a dense matrix.

        Arguments:
            state: the state of the estimator.

        Returns:
            A matrix for each block. Rows and columns are in the order of its parameters, flattened.
        """
        each = zip(self._known.blocks, state.blocks_states, strict=True)
        return tuple(block.to_dense_matrix(own) for block, own in each)

    def to_dense_matrix(self, state: Any) -> Array:
        """The whole matrix, dense, with zeros between the blocks.

        Arguments:
            state: the state of the estimator.

        Returns:
            A matrix with rows and columns in the order of all parameters, flattened, as
            `jax.flatten_util.ravel_pytree` has them.
        """
        return self._known.dense(self.to_diagonal_block_dense_matrix(state))

    def report(self) -> CurvatureReport:
        """What each block is, of which parameters, and what there is to know about it."""
        return report_of(self._known.blocks, self._known.block_params)

    @property
    def _known(self) -> Structure:
        if self._made is None:
            raise ValueError(
                f"{self._where}: the blocks are not known before the function was traced. Call "
                f"init or finalize(func_args) first."
            )
        return self._made

    @abc.abstractmethod
    def _make(self, func_args: Sequence[PyTree]) -> Structure:
        """Which blocks there are, for a function of such arguments."""
