"""Which blocks an estimate has, and which parameters belong to each."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from curvax._types import Array, PyTree
from curvax.blocks import (
    CurvatureBlock,
    LayerEquation,
    default_block_ctor,
    get_default_tag_to_block_ctor,
    make_block,
)
from curvax.tracing import LossMap

__all__ = ["BlockCtor", "Structure"]

BlockCtor = Callable[[Any, str], CurvatureBlock]
"""Makes a block, from the equation of a layer and a name."""


@dataclass(frozen=True)
class Structure:
    """Which parameters there are, and which blocks they belong to."""

    tree: Any
    shapes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    indices: tuple[tuple[int, ...], ...]
    blocks: tuple[CurvatureBlock, ...]
    where: str

    @classmethod
    def of(
        cls,
        at: LossMap,
        indices: tuple[tuple[int, ...], ...],
        blocks: tuple[CurvatureBlock, ...],
        where: str,
    ) -> "Structure":
        """Blocks of the parameters of a traced function, by the numbers of these."""
        shapes = tuple(v.aval.shape for v in at.processed.params_vars_flat)
        return cls(at.processed.params_tree, shapes, names_of(at), indices, blocks, where)

    @classmethod
    def of_layers(
        cls,
        at: LossMap,
        tag_ctors: Mapping[str, BlockCtor],
        index_ctors: Mapping[tuple[int, ...], BlockCtor],
        where: str,
    ) -> "Structure":
        """A block for each layer, made as is said for its parameters, its tag, or by default."""
        processed = at.processed
        names, indices = names_of(at), processed.layer_indices
        _check_single(indices, names, where)
        _check_ctors(at, tag_ctors, index_ctors, where)
        blocks = []
        for layer in processed.layers:
            ctor = index_ctors.get(layer.params) or tag_ctors.get(layer.tag_name)
            equation = LayerEquation.of_layer(layer, processed.params_vars_flat)
            name = ", ".join(names[n] for n in layer.params)
            blocks.append(make_block(ctor or default_block_ctor(layer.tag_name), equation, name))
        return cls.of(at, indices, tuple(blocks), where)

    def dense(self, blocks: Sequence[Array]) -> Array:
        """All blocks in one matrix, rows and columns in the order of all parameters, flattened."""
        sizes = [math.prod(shape) for shape in self.shapes]
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        dtype = jnp.result_type(*blocks)
        whole = jnp.zeros((sum(sizes), sum(sizes)), dtype)
        for indices, block in zip(self.indices, blocks, strict=True):
            rows = jnp.concatenate([jnp.arange(sizes[n]) + starts[n] for n in indices])
            whole = whole.at[rows[:, None], rows[None, :]].set(block.astype(dtype))
        return whole

    @property
    def params(self) -> PyTree:
        """The shapes and dtypes of the parameters."""
        dtypes = {
            n: dtype
            for own, block in zip(self.indices, self.blocks, strict=True)
            for n, dtype in zip(own, block.parameters_dtypes, strict=True)
        }
        shapes = [jax.ShapeDtypeStruct(s, dtypes[n]) for n, s in enumerate(self.shapes)]
        return jax.tree.unflatten(self.tree, shapes)

    @property
    def block_params(self) -> list[list[str]]:
        """The names of the parameters of each block."""
        return [[self.names[n] for n in own] for own in self.indices]

    def split(self, vector: PyTree) -> tuple[tuple[Array, ...], ...]:
        """What is like the parameters, as arrays for each block."""
        leaves, tree = jax.tree.flatten(vector)
        shapes = tuple(jnp.shape(x) for x in leaves)
        if tree != self.tree or shapes != self.shapes:
            raise ValueError(
                f"{self.where}: a vector is like the parameters, {self.tree} of the shapes "
                f"{self.shapes}, got {tree} of {shapes}."
            )
        return tuple(tuple(jnp.asarray(leaves[n]) for n in own) for own in self.indices)

    def join(self, blocks_vectors: Sequence[Sequence[Any]]) -> PyTree:
        """Arrays for each block, together as the parameters are."""
        counts = [len(each) for each in blocks_vectors]
        expected = [len(own) for own in self.indices]
        if counts != expected:
            raise ValueError(
                f"{self.where}: the blocks have {expected} parameters, got {counts} arrays."
            )
        numbered = {
            n: x
            for own, each in zip(self.indices, blocks_vectors, strict=True)
            for n, x in zip(own, each, strict=True)
        }
        return jax.tree.unflatten(self.tree, [numbered[n] for n in range(len(self.shapes))])


def names_of(at: LossMap) -> tuple[str, ...]:
    """The parameters, by their paths."""
    paths = jax.tree_util.tree_leaves_with_path(at.processed.params_vars)
    return tuple(jax.tree_util.keystr(path) for path, _ in paths)


def _check_single(indices: Sequence[tuple[int, ...]], names: Sequence[str], where: str) -> None:
    """Check that each parameter is in one layer, once."""
    counts = [sum(own.count(n) for own in indices) for n in range(len(names))]
    wrong = [name for name, count in zip(names, counts, strict=True) if count != 1]
    if wrong:
        raise ValueError(
            f"{where}: each parameter is in one block, once, but {', '.join(wrong)} are in none, "
            f"in several layers, or in one layer twice: the layers have the parameters {indices}. "
            f"Tag each once."
        )


def _check_ctors(
    at: LossMap,
    tag_ctors: Mapping[str, BlockCtor],
    index_ctors: Mapping[tuple[int, ...], BlockCtor],
    where: str,
) -> None:
    """What classes of blocks are given for is there."""
    layers, indices = at.processed.layers, at.processed.layer_indices
    present = {layer.tag_name for layer in layers}
    for name in tag_ctors:
        if name not in present:
            get_default_tag_to_block_ctor(name)  # Else it is an error: there is no such tag.
    unknown = [index for index in index_ctors if index not in indices]
    if unknown:
        raise ValueError(
            f"{where}: index_to_block_ctor has {unknown}, but the blocks have the parameters "
            f"{indices}."
        )
