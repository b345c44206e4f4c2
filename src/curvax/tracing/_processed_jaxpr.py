"""`ProcessedJaxpr`: a traced function, with its losses and layers read from the tags in it."""

from collections.abc import Sequence
from typing import Any

import jax

from curvax import _compat
from curvax._types import Fun, PyTree, TreeDef
from curvax.graph import (
    Layer,
    Node,
    Program,
    RegistrationError,
    auto_register_tags as tag_layers,
    check_reached,
    check_tags,
    is_loss,
    read,
    tagged_layers,
)

__all__ = ["ProcessedJaxpr"]


class ProcessedJaxpr:
    """A traced function whose losses and layers are tagged.

    Arguments:
        jaxpr: the jaxpr of the function.
        consts: its constants.
        in_tree: the structure of the arguments of the function.
        params_index: which of them are the parameters.
        allow_left_out_params: whether there may be parameters that are in no layer.

    Attributes:
        jaxpr: as given.
        consts: as given.
        in_tree: as given.
        params_index: as given.
        loss_tags: the equations that tag losses, in order.
        layer_tags: an equation for each layer, sorted by the numbers of their parameters. A layer
            that is applied at several places has several; this is the first.
        layer_indices: the numbers of the parameters of each layer.
        interaction: the operation by which what is computed for one example depends on others, as
            far as such is found.

    Raises:
        RegistrationError: if a parameter is in no layer and that is not allowed.
    """

    def __init__(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        in_tree: TreeDef,
        params_index: int,
        allow_left_out_params: bool = False,
    ) -> None:
        self.jaxpr = jaxpr
        self.consts = tuple(consts)
        self.in_tree = in_tree
        self.params_index = params_index
        self.interaction: str | None = None
        self.program: Program = read(_compat.closed(jaxpr, consts))
        self.losses: Sequence[Node] = [n for n in self.program.all_nodes() if is_loss(n)]
        start = self.params_range.start
        params = self.program.inputs[start : self.params_range.stop]
        self.layers: Sequence[Layer] = tagged_layers(self.program, params)
        self.loss_tags = tuple(node.equation for node in self.losses)
        self.layer_tags = tuple(layer.tagged[0].equation for layer in self.layers)
        self.layer_indices = tuple(layer.params for layer in self.layers)
        if not allow_left_out_params:
            self._check_complete()

    @property
    def params_range(self) -> range:
        """Which of the flat arguments are parameters."""
        sizes = [child.num_leaves for child in self.in_tree.children()]
        start = sum(sizes[: self.params_index])
        return range(start, start + sizes[self.params_index])

    @property
    def in_vars_flat(self) -> list[Any]:
        """The variables of the arguments."""
        return list(self.jaxpr.invars)

    @property
    def in_vars(self) -> PyTree:
        """The variables of the arguments, in the structure of these."""
        return jax.tree.unflatten(self.in_tree, self.in_vars_flat)

    @property
    def params_vars(self) -> PyTree:
        """The variables of the parameters, in the structure of these."""
        return self.in_vars[self.params_index]

    @property
    def params_vars_flat(self) -> list[Any]:
        """The variables of the parameters."""
        return jax.tree.leaves(self.params_vars)

    @property
    def params_tree(self) -> TreeDef:
        """The structure of the parameters."""
        return jax.tree.structure(self.params_vars)

    @classmethod
    def make_from_func(
        cls,
        func: Fun,
        func_args: Sequence[PyTree],
        params_index: int = 0,
        auto_register_tags: bool = True,
        allow_left_out_params: bool = False,
        **auto_registration_kwargs: Any,
    ) -> "ProcessedJaxpr":
        """Trace a function, with its layers tagged.

        Arguments:
            func: a function that registers at least one loss.
            func_args: arguments to trace it with.
            params_index: which of them are the parameters.
            auto_register_tags: whether to look for layers; otherwise there are only those that the
                function tags itself.
            allow_left_out_params: whether there may be parameters that are in no layer, or that no
                loss depends on.
            auto_registration_kwargs: as in `curvax.auto_register_tags`.

        Returns:
            The processed jaxpr.
        """
        args = tuple(func_args)
        interaction = None
        if auto_register_tags:
            options: dict[str, Any] = {"allow_unused_params": allow_left_out_params}
            options |= auto_registration_kwargs
            tagged = tag_layers(func, args, params_index, **options)
            func, interaction = tagged, tagged.registration(*args).interaction
        traced = jax.make_jaxpr(func)(*args)
        through_custom = auto_registration_kwargs.get("through_custom_derivatives", False)
        where = "curvax.ProcessedJaxpr"
        check_tags(read(traced), through_custom, where)
        tree = jax.tree.structure(args)
        index = params_index % len(args)
        processed = cls(traced.jaxpr, traced.consts, tree, index, allow_left_out_params)
        processed.interaction = interaction
        if not auto_register_tags:  # Otherwise it was checked where layers were looked for.
            inside = processed.params_range
            params = processed.program.inputs[inside.start : inside.stop]
            check_reached(processed.program, processed.losses, params, through_custom, where)
        return processed

    def _check_complete(self) -> None:
        registered = {number for layer in self.layers for number in layer.params}
        paths, _ = jax.tree_util.tree_flatten_with_path(self.params_vars)
        missing = [
            jax.tree_util.keystr(path)
            for number, (path, _) in enumerate(paths)
            if number not in registered
        ]
        if missing:
            raise RegistrationError(
                f"curvax.ProcessedJaxpr: {', '.join(missing)} are in no layer. Tag them, let "
                f"auto_register_tags look for layers, or say allow_left_out_params=True."
            )
