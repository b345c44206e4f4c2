"""Every mistake in the use of a map is answered in the user's words."""

import jax
import jax.numpy as jnp
import pytest

import curvax
from curvax import AccumulationType, Accumulator

X, Y = jnp.ones((5, 2)), jnp.ones((4, 2))


def add(x, y):
    return x + y


MAPS = {
    "chunked_vmap": lambda fun, **options: curvax.chunked_vmap(fun, 2, **options),
    "micro_vmap": lambda fun, **options: curvax.micro_vmap(fun, microbatch_size=2, **options),
}


@pytest.mark.parametrize("make", MAPS.values(), ids=MAPS)
class TestArguments:
    def test_sizes_that_disagree_are_named(self, make):
        with pytest.raises(ValueError, match=r"same size.*but x has 5, y has 4"):
            make(add)(X, Y)

    def test_leaves_of_pytrees_are_named_by_their_path(self, make):
        with pytest.raises(ValueError, match=r"tree\['a'\] has 5, tree\['b'\]\[0\] has 4"):
            make(lambda tree: tree)({"a": X, "b": (Y,)})

    def test_keywords_are_named(self, make):
        with pytest.raises(ValueError, match=r"x has 5, y has 4"):
            make(add)(X, y=Y)

    def test_a_scalar_cannot_be_mapped(self, make):
        with pytest.raises(ValueError, match=r"y has no batch axis: it is zero-dimensional"):
            make(add)(X, 1.0)

    def test_something_that_is_no_array_cannot_be_mapped(self, make):
        with pytest.raises(TypeError, match=r"y must be batched but is not an array: str 'hello'"):
            make(add)(X, "hello")

    def test_an_axis_must_exist(self, make):
        with pytest.raises(ValueError, match=r"axis 2 is out of range for x of shape \(5, 2\)"):
            make(add, in_axes=2)(X, X)

    def test_an_axis_must_be_an_integer(self, make):
        with pytest.raises(TypeError, match=r"axis of x .* must be an integer or None, got 0\.5"):
            make(add, in_axes=0.5)(X, X)

    def test_a_bool_is_no_axis(self, make):
        with pytest.raises(TypeError, match=r"must be an integer or None, got True"):
            make(add, in_axes=True)(X, X)

    def test_there_must_be_something_to_map(self, make):
        with pytest.raises(ValueError, match=r"nothing to map over"):
            make(add, in_axes=None)(X, X)
        with pytest.raises(ValueError, match=r"nothing to map over"):
            make(lambda: 1.0)()

    def test_in_axes_must_have_an_entry_for_each_argument(self, make):
        with pytest.raises(ValueError, match=r"in_axes has 1 entries but .* 2 positional"):
            make(add, in_axes=(0,))(X, X)

    def test_in_axes_must_be_a_prefix(self, make):
        with pytest.raises(ValueError, match=r"axes \{'a': 0\} given for tree are not a prefix"):
            make(lambda tree: tree, in_axes=({"a": 0},))({"b": X})

    def test_out_axes_must_be_a_prefix(self, make):
        with pytest.raises(ValueError, match=r"(?i)prefix|out_axes"):
            make(lambda x: x, out_axes=(0, 0))(X)

    def test_an_out_axis_must_exist(self, make):
        with pytest.raises(ValueError, match=r"axis 5 is out of range for an output of shape"):
            make(lambda x: x, out_axes=5)(X)


SIZED = {
    "chunked_vmap": lambda size: curvax.chunked_vmap(jnp.sin, size),
    "micro_vmap": lambda size: curvax.micro_vmap(jnp.sin, microbatch_size=size),
    "microbatch": lambda size: curvax.microbatch(jnp.sin, 0, size),
    "micro_grad": lambda size: curvax.micro_grad(jnp.dot, microbatch_size=size),
    "reshape_batch_axis": lambda size: curvax.reshape_batch_axis(X, size),
}


@pytest.mark.parametrize("make", SIZED.values(), ids=SIZED)
class TestSizes:
    @pytest.mark.parametrize("size", [0, -3])
    def test_a_size_must_be_positive(self, make, size):
        with pytest.raises(ValueError, match=rf"_size must be at least 1, got {size}"):
            make(size)

    @pytest.mark.parametrize("size", [2.5, "2", True])
    def test_a_size_must_be_an_integer(self, make, size, unchecked):
        with pytest.raises(TypeError, match=r"_size must be a Python integer, got"):
            make(size)

    def test_a_size_cannot_be_traced(self, make, unchecked):
        with pytest.raises(TypeError, match=r"cannot be a traced value"):
            jax.jit(lambda size: make(size))(2)


ORDERED = {
    "micro_vmap": lambda order: curvax.micro_vmap(jnp.sin, order=order),
    "microbatch": lambda order: curvax.microbatch(jnp.sin, 0, 2, order=order),
    "micro_grad": lambda order: curvax.micro_grad(jnp.dot, order=order),
}


@pytest.mark.parametrize("make", ORDERED.values(), ids=ORDERED)
def test_an_order_must_be_known(make, unchecked):
    with pytest.raises(ValueError, match=r"order must be one of .* got 'random'"):
        make("random")


LIMITED = {
    "micro_vmap": lambda number: curvax.micro_vmap(
        jnp.sin, microbatch_size=2, num_real_microbatches=number
    )(X),
    "microbatch": lambda number: curvax.microbatch(jnp.sum, 0, 2, num_real_microbatches=number)(X),
    "micro_grad": lambda number: curvax.micro_grad(
        lambda w, x: jnp.sum(x @ w), microbatch_size=2, num_real_microbatches=number
    )(jnp.ones(2), X),
}


@pytest.mark.parametrize("run", LIMITED.values(), ids=LIMITED)
class TestLimits:
    @pytest.mark.parametrize("number", [-1, 4])
    def test_more_real_microbatches_than_there_are_is_rejected(self, run, number):
        with pytest.raises(ValueError, match=rf"num_real_microbatches={number} .* make 3"):
            run(number)

    @pytest.mark.parametrize("number", [1.5, "1", True, jnp.ones(2, int), jnp.array(1.0)])
    def test_their_number_must_be_an_integer(self, run, number, unchecked):
        with pytest.raises(TypeError, match=r"num_real_microbatches must be None"):
            run(number)


class TestAccumulators:
    @pytest.mark.parametrize("kind", ["MEAN", "RUNNING_MEAN"])
    @pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_])
    def test_integers_have_no_mean(self, kind, dtype):
        x = jnp.ones(5, dtype)
        kind = AccumulationType[kind]
        with pytest.raises(TypeError, match=rf"{kind} of an output of dtype {x.dtype}"):
            curvax.micro_vmap(lambda x: x, microbatch_size=2, accumulator=kind)(x)
        with pytest.raises(TypeError, match=rf"{kind} of an output of dtype {x.dtype}"):
            curvax.microbatch(lambda x: x[0], 0, 2, kind)(x)

    def test_an_accumulator_must_be_one(self):
        with pytest.raises(TypeError, match=r"must be an AccumulationType or an Accum.*'sum'"):
            curvax.micro_vmap(jnp.sin, microbatch_size=2, accumulator="sum")(X)

    def test_accumulators_must_be_a_prefix_of_the_outputs(self):
        kinds = (AccumulationType.SUM, AccumulationType.SUM)
        with pytest.raises(ValueError, match=r"must be pytree prefixes of the outputs"):
            curvax.micro_vmap(jnp.sin, microbatch_size=2, accumulator=kinds)(X)

    def test_an_output_that_is_the_same_for_all_is_not_summed(self):
        micro = curvax.micro_vmap(
            lambda x: 1.0, out_axes=None, microbatch_size=2, accumulator=AccumulationType.SUM
        )
        with pytest.raises(ValueError, match=r"out_axes=None says that an output is the same"):
            micro(X)

    @pytest.mark.parametrize("fun", [jnp.sum, lambda x: jnp.ones(7)])
    def test_concat_wants_a_row_for_each_example(self, fun):
        with pytest.raises(ValueError, match=r"CONCAT collects one row .* microbatch of 2 it"):
            curvax.microbatch(fun, 0, 2, AccumulationType.CONCAT)(X)

    @pytest.mark.parametrize("kind", ["SUM", "MEAN", "RUNNING_MEAN"])
    def test_outputs_of_two_shapes_cannot_be_added(self, kind):
        with pytest.raises(ValueError, match=r"\[2, 2\] for a microbatch of 2 .*\[1, 2\] for one"):
            curvax.microbatch(jnp.sin, 0, 2, AccumulationType[kind])(X)

    @pytest.mark.parametrize("fun", [lambda x: jnp.ones(2), lambda x: x.astype(f"int{8 * len(x)}")])
    def test_concat_wants_the_same_rows_of_every_microbatch(self, fun):
        with pytest.raises(ValueError, match=r"curvax.microbatch: .* cannot be combined"):
            curvax.microbatch(fun, 0, 2, AccumulationType.CONCAT)(jnp.ones(5))

    @pytest.mark.parametrize("kind", ["SUM", "MEAN"])
    def test_keys_have_no_sum(self, kind):
        micro = curvax.micro_vmap(
            lambda key: key, microbatch_size=2, accumulator=AccumulationType[kind]
        )
        with pytest.raises(TypeError, match=r"of random keys has no meaning"):
            micro(jax.random.split(jax.random.key(0), 5))

    def own(self, **options):
        parts = {
            "init": lambda like: jnp.zeros(like.shape, like.dtype),
            "update": lambda carry, value, index: carry + value,
            "finalize": lambda carry: carry,
            "aggregate": lambda values: jnp.sum(values, axis=0),
        }
        return Accumulator(**(parts | options))

    @pytest.mark.parametrize("limit", [None, 3, jnp.array(3)])
    def test_a_user_supplied_accumulator_must_declare_uneven_microbatches(self, limit):
        words = r"5 examples in microbatches of at most 2 come out uneven \(sizes 2 and 1\)"
        micro = curvax.micro_vmap(
            jnp.sin, microbatch_size=2, accumulator=self.own(), num_real_microbatches=limit
        )
        with pytest.raises(ValueError, match=words):
            micro(X)
        with pytest.raises(ValueError, match=r"uneven=True"):
            curvax.microbatch(jnp.sum, 0, 2, self.own(), num_real_microbatches=limit)(X)

    def test_a_user_supplied_accumulator_may_take_the_even_part_of_an_uneven_batch(self):
        micro = curvax.microbatch(jnp.sum, 0, 2, self.own(), num_real_microbatches=2)
        assert micro(X) == 8.0

    def test_a_user_supplied_accumulator_must_keep_the_type_of_its_carry(self):
        own = self.own(update=lambda carry, value, index: jnp.stack([carry, value]))
        with pytest.raises(TypeError, match=r"update must return a carry like the one it was giv"):
            curvax.micro_vmap(jnp.sum, microbatch_size=1, accumulator=own)(X)


class TestBatchArguments:
    def test_a_missing_batch_argument_is_named(self):
        with pytest.raises(ValueError, match=r"batch argument 'y' is missing"):
            curvax.microbatch(lambda x, y: x, (0, 1), 2)(X)

    def test_a_batch_argument_beyond_the_last_is_named(self):
        with pytest.raises(ValueError, match=r"batch argument 3 is missing"):
            curvax.microbatch(lambda *args: args[0], (0, 3), 2)(X, X)

    @pytest.mark.parametrize("number", [-3, 2])
    def test_a_batch_argument_out_of_range_is_named(self, number):
        with pytest.raises(ValueError, match=rf"batch argument {number} is missing"):
            curvax.microbatch(lambda w, y: w * y, number, 3)(1.0, X)

    def test_an_omitted_batch_is_missed_unless_it_is_none_by_default(self):
        with pytest.raises(ValueError, match=r"batch argument 'y' is missing"):
            curvax.microbatch(lambda x, y=2.0: jnp.sum(x * y), (0, 1), 2)(X)

    def test_a_batch_argument_is_named_once(self):
        with pytest.raises(ValueError, match=r"batch argument 'x' is named twice"):
            curvax.microbatch(lambda x: x, 0, 2, argnames="x")(X)

    def test_arguments_of_one_name_are_distinguished(self):
        with pytest.raises(ValueError, match=r"x has 5, x has 4"):
            curvax.chunked_vmap(lambda x, /, **more: x + more["x"], 2)(X, x=Y)

    def test_in_axes_must_have_an_entry_for_each_batch_argument(self):
        with pytest.raises(ValueError, match=r"in_axes has 3 entries for 2 batch arguments"):
            curvax.microbatch(add, (0, 1), 2, in_axes=(0, 0, 0))(X, X)

    def test_sizes_that_disagree_are_named(self):
        with pytest.raises(ValueError, match=r"curvax.microbatch: .* x has 5, y has 4"):
            curvax.microbatch(add, (0, 1), 2)(X, Y)
        with pytest.raises(ValueError, match=r"curvax.micro_grad: .* x has 5, y has 4"):
            curvax.micro_grad(lambda w, x, y: w, batch_argnums=(1, 2))(1.0, X, Y)


def test_a_traced_number_of_microbatches_has_no_reverse_derivative():
    micro = lambda x, number: curvax.micro_vmap(
        jnp.sin, microbatch_size=2, num_real_microbatches=number
    )(x)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.jit(jax.grad(lambda x, number: jnp.sum(micro(x, number))))(X, 2)


@pytest.mark.parametrize("name", ["transform_fn", "metrics_fn"])
def test_transforms_of_gradients_must_be_functions(unchecked, name):
    words = rf"curvax.micro_grad: {name} must be a function .* got None. Leave it out for none"
    with pytest.raises(TypeError, match=words):
        curvax.micro_grad(lambda w, x: w, **{name: None})


class TestReshape:
    def test_the_size_must_divide_the_axis(self):
        with pytest.raises(ValueError, match=r"axis 0 of tree\['a'\] .* 5 examples.* Use 4 or 6"):
            curvax.reshape_batch_axis({"a": X}, 2)

    def test_the_axis_must_exist(self):
        with pytest.raises(ValueError, match=r"axis 3 is out of range for tree of shape \(5, 2\)"):
            curvax.reshape_batch_axis(X, 2, axis=3)

    def test_a_size_is_needed(self, unchecked):
        with pytest.raises(TypeError, match=r"microbatch_size must be a Python integer, got None"):
            curvax.reshape_batch_axis(X, None)
