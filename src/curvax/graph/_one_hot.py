"""Products with one-hot vectors, which look up rows of a table."""

from collections.abc import Mapping
from dataclasses import replace

from curvax.graph._axes import Arrangement, Axes
from curvax.graph._program import Node, Operand
from curvax.graph._sites import Site
from curvax.tags import embedding_tag

__all__ = ["as_lookup"]


def as_lookup(site: Site, made_by: Mapping[Operand, Node]) -> Site:
    """A dense site whose input is one-hot vectors, as an embedding; any other as it is."""
    (vectors,) = site.factors
    indices = _indices(vectors, made_by)
    last = len(vectors.shape) - 1
    side = site.node.inputs.index(vectors)
    contracted, batched = site.node.params["dimension_numbers"]
    if indices is None or tuple(contracted[side]) != (last,) or batched[side]:
        return site
    axes = Axes.of(indices.shape).dims
    positions = [atom for dim in axes for atom in dim]
    return replace(
        site,
        tag=embedding_tag,
        factors=(indices,),
        input_arrangement=Arrangement.of(axes, [positions]),
        constants=(("rows", (vectors.shape[-1], False)),),
    )


def _indices(vectors: Operand, made_by: Mapping[Operand, Node]) -> Operand | None:
    """The indices of one-hot vectors: `indices[..., None] == arange`, as floats."""
    compared = _before(vectors, "convert_element_type", made_by)
    if compared is None or compared not in made_by or made_by[compared].name != "eq":
        return None
    for one, other in (made_by[compared].inputs, made_by[compared].inputs[::-1]):
        numbers = made_by.get(other)
        expanded = made_by.get(one)
        if numbers is None or numbers.name != "iota" or expanded is None:
            continue
        last = len(vectors.shape) - 1
        counted = int(numbers.params["dimension"]) == last
        in_front = one.shape == (*vectors.shape[:-1], 1)
        if counted and in_front and expanded.name in ("broadcast_in_dim", "reshape"):
            (indices, *_) = expanded.inputs
            if indices.shape == vectors.shape[:-1]:
                return indices
    return None


def _before(operand: Operand, name: str, made_by: Mapping[Operand, Node]) -> Operand | None:
    """What an operation of that name was applied to, once or several times."""
    found = None
    while operand in made_by and made_by[operand].name == name:
        (operand,) = made_by[operand].inputs
        found = operand
    return found
