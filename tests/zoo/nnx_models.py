"""Models in Flax's NNX."""

import jax
import jax.numpy as jnp
from flax import nnx

from layers.models import normal
from zoo.case import (
    Family,
    Model,
    normal_errors,
    one_class,
    random_like,
    squared_error,
    tokens,
    yes_or_no,
)

NNX = Family("nnx")
F64 = {"dtype": jnp.float64, "param_dtype": jnp.float64}
VECTORS, SEQUENCES, IMAGES = normal(0, 4, 6), normal(1, 3, 5, 8), normal(2, 3, 6, 6, 2)


def ones(shape):
    """In float64, where NNX insists on float32."""
    is_float = jnp.issubdtype(shape.dtype, jnp.floating)
    return jnp.ones(shape.shape, jnp.float64 if is_float else shape.dtype)


def model(make, loss, x, targets, **options):
    """What is no parameter, as the running means of batch norm, is changed and dropped."""
    shapes = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    definition, params, rest = nnx.split(shapes, nnx.Param, ...)

    def f(params, x, targets):
        # NNX refuses variables from outside of the innermost transformation, so these are new.
        params = jax.tree.map(lambda p: p, params)
        others = jax.tree.map(ones, rest)
        return loss(nnx.merge(definition, params, others)(x), targets)

    return Model(f, random_like(params), (x, targets), **options)


class MLP(nnx.Module):
    def __init__(self, ins, outs, rngs):
        self.up = nnx.Linear(ins, 5, **F64, rngs=rngs)
        self.norm = nnx.LayerNorm(5, **F64, rngs=rngs)
        self.down = nnx.Linear(5, outs, **F64, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.norm(self.up(x))))


@NNX.add()
def mlp():
    return model(lambda rngs: MLP(6, 3, rngs), normal_errors, VECTORS, normal(3, 4, 3))


@NNX.add()
def cnn():
    class CNN(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Conv(2, 3, (3, 3), **F64, rngs=rngs)
            self.norm = nnx.BatchNorm(3, **F64, rngs=rngs)
            self.second = nnx.Conv(3, 6, (2, 2), feature_group_count=3, **F64, rngs=rngs)
            self.head = nnx.Linear(6, 3, **F64, rngs=rngs)

        def __call__(self, x):
            x = nnx.avg_pool(nnx.relu(self.norm(self.first(x))), (2, 2), (2, 2))
            return self.head(nnx.tanh(self.second(x)).mean((1, 2)))

    return model(CNN, one_class, IMAGES, tokens(3, 3, 3), independent=False)


@NNX.add()
def transformer():
    class Transformer(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Embed(7, 8, **F64, rngs=rngs)
            self.norm = nnx.RMSNorm(8, **F64, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 8, decode=False, **F64, rngs=rngs)
            self.feed_forward = MLP(8, 8, rngs)

        def __call__(self, tokens):
            x = self.table(tokens)
            mask = nnx.make_causal_mask(tokens)
            x = x + self.attention(self.norm(x), mask=mask)
            return self.table.attend(x + self.feed_forward(x))

    batch = tokens(1, 7, 3, 5), tokens(3, 7, 3, 5)
    return model(Transformer, one_class, *batch, accuracy=1e-5)  # Softmax is in float32 there.


@NNX.add()
def recurrent():
    class Recurrent(nnx.Module):
        def __init__(self, rngs):
            self.cells = nnx.RNN(nnx.GRUCell(8, 4, **F64, rngs=rngs))
            self.head = nnx.Linear(4, 2, **F64, rngs=rngs)

        def __call__(self, x):
            return self.head(self.cells(x)[:, -1])

    return model(Recurrent, squared_error, SEQUENCES, normal(3, 3, 2))


@NNX.add()
def low_rank():
    class LowRank(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.LoRALinear(6, 5, lora_rank=2, **F64, rngs=rngs)
            self.second = nnx.LoRALinear(5, 3, lora_rank=1, **F64, rngs=rngs)

        def __call__(self, x):
            return self.second(nnx.tanh(self.first(x)))

    return model(LowRank, squared_error, VECTORS, normal(3, 4, 3))


@NNX.add()
def siamese():
    class Siamese(nnx.Module):
        def __init__(self, rngs):
            self.arm = MLP(6, 4, rngs)
            self.head = nnx.Linear(4, 1, **F64, rngs=rngs)

        def __call__(self, x):
            return self.head(jnp.abs(self.arm(x[:, 0]) - self.arm(x[:, 1])))

    answers = tokens(5, 2, 4, 1).astype(float)
    return model(Siamese, yes_or_no, normal(4, 4, 2, 6), answers)


@NNX.add()
def rematerialised():
    """Its layers in one `nnx.remat` each."""

    class Deep(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([MLP(6, 6, rngs) for _ in range(2)])

        def __call__(self, x):
            for layer in self.layers:
                x = x + nnx.remat(lambda layer, x: layer(x))(layer, x)
            return x

    return model(Deep, squared_error, VECTORS, normal(3, 4, 6))
