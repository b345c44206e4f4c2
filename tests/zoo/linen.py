"""Models in Flax's linen."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from layers.models import normal
from zoo.case import (
    Family,
    Model,
    chances,
    normal_errors,
    one_class,
    random_like,
    squared_error,
    tapped_by,
    tokens,
    yes_or_no,
)

LINEN = Family("linen")
KEY = jax.random.key(0)

VECTORS, SEQUENCES = normal(0, 4, 6), normal(1, 3, 5, 8)
IMAGES = normal(2, 3, 6, 6, 2)
TAPPED = (nn.Dense, nn.DenseGeneral, nn.Conv, nn.ConvTranspose)
TAPPED_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm)


def initialised(module, *inputs):
    variables = jax.eval_shape(module.init, KEY, *inputs)
    params = random_like(variables.pop("params"))
    return params, jax.tree.map(lambda x: np.ones(x.shape), variables)


tapped = tapped_by(
    nn.intercept_methods,
    TAPPED,
    TAPPED_NORMS,
    lambda module: "".join(f"['{part}']" for part in module.path),
)


def model(module, loss, x, targets, **options):
    params, _ = initialised(module, x)
    f = lambda params, x, targets: loss(module.apply({"params": params}, x), targets)
    return Model(f, params, (x, targets), tapped=tapped(f), **options)


class MLP(nn.Module):
    features: tuple[int, ...] = (5, 3)
    dtype: object = None

    @nn.compact
    def __call__(self, x):
        for features in self.features[:-1]:
            x = nn.tanh(nn.Dense(features, dtype=self.dtype)(x))
        return nn.Dense(self.features[-1], dtype=self.dtype)(x)


@LINEN.add(tapped=True)
def mlp():
    return model(MLP((5, 4, 3)), one_class, VECTORS, tokens(3, 3, 4))


@LINEN.add()
def bfloat16():
    loss = lambda y, targets: squared_error(y.astype(float), targets)
    targets = normal(3, 4, 3)
    return model(MLP(dtype=jnp.bfloat16), loss, VECTORS, targets, accuracy=3e-2)


@LINEN.add(tapped=True)
def cnn():
    class CNN(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.max_pool(nn.gelu(nn.Conv(3, (3, 3))(x)), (2, 2), (2, 2))
            x = nn.gelu(nn.Conv(4, (2, 2), strides=2, padding="VALID", use_bias=False)(x))
            return nn.Dense(3)(x.reshape(x.shape[0], -1))

    return model(CNN(), one_class, IMAGES, tokens(3, 3, 3))


@LINEN.add(tapped=True)
def depthwise():
    class Separable(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.tanh(nn.Conv(4, (3, 3), feature_group_count=2)(x))
            x = nn.tanh(nn.Conv(6, (1, 1))(x))
            x = nn.tanh(nn.Conv(6, (3, 3), feature_group_count=3, kernel_dilation=2)(x))
            return nn.Dense(2)(x.mean((1, 2)))

    return model(Separable(), yes_or_no, IMAGES, chances(3, 3, 2))


@LINEN.add(tapped=True)
def resnet():
    """With batch norm in training, so that each example depends on all."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Conv(3, (3, 3), use_bias=False)(x)
            y = nn.relu(nn.BatchNorm(use_running_average=False)(y))
            y = nn.BatchNorm(use_running_average=False)(nn.Conv(3, (3, 3), use_bias=False)(y))
            return nn.relu(y + nn.Conv(3, (1, 1), use_bias=False, name="projection")(x))

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(Block()(Block()(x)).mean((1, 2)))

    net = ResNet()
    params, statistics = initialised(net, IMAGES)

    def loss(params, x, labels):
        y, _ = net.apply({"params": params, **statistics}, x, mutable=["batch_stats"])
        return one_class(y, labels)

    batch = IMAGES, tokens(3, 3, 3)
    return Model(loss, params, batch, tapped=tapped(loss), independent=False)


@LINEN.add(tapped=True)
def unet():
    class UNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            top = nn.gelu(nn.GroupNorm(2)(nn.Conv(4, (3, 3))(x)))
            y = nn.gelu(nn.GroupNorm(2)(nn.Conv(4, (3, 3), strides=2)(top)))
            y = nn.ConvTranspose(4, (3, 3), strides=(2, 2))(y)
            y = nn.gelu(nn.Conv(3, (3, 3))(jnp.concatenate([top, y], -1)))
            return nn.Conv(1, (1, 1))(y)

    return model(UNet(), squared_error, IMAGES, normal(3, 3, 6, 6, 1))


class Block(nn.Module):
    """A transformer's."""

    causal: bool = False

    @nn.compact
    def __call__(self, x, memory=None):
        mask = nn.make_causal_mask(x[..., 0]) if self.causal else None
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2)(h, mask=mask)
        if memory is not None:
            x = x + nn.MultiHeadDotProductAttention(2, name="cross")(nn.RMSNorm()(x), memory)
        h = nn.gelu(nn.Dense(10)(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(h)


@LINEN.add()
def vit():
    class ViT(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(8, (3, 3), strides=3)(x).reshape(x.shape[0], 4, 8)
            start = self.param("class", nn.initializers.normal(), (1, 1, 8))
            x = jnp.concatenate([jnp.broadcast_to(start, (x.shape[0], 1, 8)), x], 1)
            x = x + self.param("position", nn.initializers.normal(), (1, 5, 8))
            return nn.Dense(3)(nn.LayerNorm()(Block()(x))[:, 0])

    return model(ViT(), one_class, IMAGES, tokens(3, 3, 3))


@LINEN.add()
def gpt():
    """The table is also the last layer, and blocks are computed again on the way back."""

    class GPT(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            table = nn.Embed(7, 8)
            x = table(tokens) + nn.Embed(5, 8, name="position")(jnp.arange(5))
            for _ in range(2):
                x = nn.remat(Block)(causal=True)(x)
            return table.attend(nn.LayerNorm()(x))

    return model(GPT(), one_class, tokens(3, 7, 3, 5), tokens(4, 7, 3, 5))


@LINEN.add()
def encoder_decoder():
    class Translator(nn.Module):
        @nn.compact
        def __call__(self, inputs):
            source, target = inputs
            memory = Block()(nn.Embed(7, 8)(source))
            return nn.Dense(6)(Block(causal=True)(nn.Embed(6, 8)(target), memory))

    inputs = tokens(3, 7, 3, 4), tokens(4, 6, 3, 5)
    return model(Translator(), one_class, inputs, tokens(5, 6, 3, 5))


@LINEN.add()
def lstm():
    net = nn.Sequential(
        [nn.RNN(nn.OptimizedLSTMCell(4, param_dtype=jnp.float64)), lambda y: y[:, -1], nn.Dense(3)]
    )
    return model(net, normal_errors, SEQUENCES, normal(3, 3, 3))


@LINEN.add()
def bidirectional():
    cell = lambda: nn.RNN(nn.GRUCell(4, param_dtype=jnp.float64))
    net = nn.Sequential([nn.Bidirectional(cell(), cell()), nn.Dense(2)])
    return model(net, yes_or_no, SEQUENCES, chances(3, 3, 5, 2))


@LINEN.add(tapped=True)
def mixer():
    """Dense layers along each of two axes."""

    class Mixer(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm()(x).swapaxes(1, 2)
            x = x + nn.Dense(5)(nn.gelu(nn.Dense(4)(y))).swapaxes(1, 2)
            x = x + nn.Dense(8)(nn.gelu(nn.Dense(6)(nn.LayerNorm()(x))))
            return nn.Dense(3)(x.mean(1))

    return model(Mixer(), one_class, SEQUENCES, tokens(3, 3, 3))


@LINEN.add(scanned=True)
def scanned():
    """A stack of blocks in `nn.scan`, computed again on the way back."""

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            step = nn.scan(nn.remat(lambda block, x, _: (block(x), None)), length=3, **options)
            return nn.Dense(2, name="head")(step(Block(name="blocks"), x, None)[0])

    made = model(Scanned(), squared_error, SEQUENCES, normal(3, 3, 5, 2))

    def unrolled(params, x, targets):
        for block in params["blocks"]:
            x = Block().apply({"params": block}, x)
        return squared_error(nn.Dense(2).apply({"params": params["head"]}, x), targets)

    stack = made.params["blocks"]
    slices = [jax.tree.map(lambda p: p[k], stack) for k in range(3)]  # noqa: B023
    params = made.params | {"blocks": slices}
    return Model(made.loss, made.params, made.batch, unrolled=(unrolled, params, "['blocks']"))


@LINEN.add()
def weight_norm():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(nn.tanh(nn.WeightNorm(nn.Dense(5, name="normed"))(x)))

    generic = {
        "['normed']['kernel']": "it meets another parameter in `mul`",
        "['WeightNorm_0']['normed/kernel/scale']": "it meets nothing that differs from example",
    }
    return model(Normed(), squared_error, VECTORS, normal(3, 4, 3), generic=generic)
