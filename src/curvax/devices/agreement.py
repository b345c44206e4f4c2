"""Several processes that compute one thing: what they must agree on, said in one place."""

from collections.abc import Sequence

import jax

from curvax import _jax
from curvax._tree import leaf_name
from curvax._types import PyTree

__all__ = ["check_agreement", "shapes_in_words"]


def check_agreement(lines: Sequence[str], where: str) -> None:
    """Check that all processes say the same, line by line. All of them must ask."""
    told = [text.split("\n") for text in _jax.gathered_texts("\n".join(lines))]
    longest = max(map(len, told))
    padded = [[*own, *["there is nothing more"] * (longest - len(own))] for own in told]
    for line in zip(*padded, strict=True):
        if len(set(line)) > 1:
            said = ", ".join(f"in process {number} {text}" for number, text in enumerate(line))
            raise ValueError(
                f"{where}: all processes must compute the same, but {said}. Give all of them the "
                f"same function, arrays and options."
            )


def shapes_in_words(name: str, tree: PyTree) -> list[str]:
    """A line for each array of a pytree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [f"{leaf_name(name, path)} is {x.dtype}{list(x.shape)}" for path, x in leaves]
