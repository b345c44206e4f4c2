"""K-FAC for a network with one hidden layer, in plain NumPy: what the optimizer must equal.

    hidden = tanh([x, 1] W1),   output = [hidden, 1] W2,   loss = mean |output - y|² / 2 + L2

The curvature is the exact Gauss-Newton matrix, approximated by a Kronecker product for each layer.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


def with_ones(x):
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)


def forward(weights, x):
    w1, w2 = weights
    hidden = np.tanh(with_ones(x) @ w1)
    return hidden, with_ones(hidden) @ w2


def loss_of(weights, batch, l2):
    x, y = batch
    _, output = forward(weights, x)
    squares = sum(np.sum(w**2) for w in weights)
    return np.mean(np.sum((output - y) ** 2, axis=1)) / 2 + l2 / 2 * squares


def backward(weights, x, cotangent):
    """For each layer its inputs, and the cotangents of its outputs."""
    hidden, _ = forward(weights, x)
    at_hidden = (cotangent @ weights[1][:-1].T) * (1 - hidden**2)
    return [(with_ones(x), at_hidden), (with_ones(hidden), cotangent)]


def gradient_of(weights, batch, l2):
    x, y = batch
    _, output = forward(weights, x)
    layers = backward(weights, x, output - y)
    return [a.T @ g / len(x) + l2 * w for (a, g), w in zip(layers, weights, strict=True)]


def factors_of(weights, x):
    """The second moments of inputs and of cotangents, the latter for one output after the other."""
    _, output = forward(weights, x)
    found = []
    for layer in range(2):
        columns = [np.tile(row, (len(x), 1)) for row in np.eye(output.shape[1])]
        passes = [backward(weights, x, c)[layer] for c in columns]
        inputs = passes[0][0]
        outputs = sum(g.T @ g for _, g in passes) / len(x)
        found.append((inputs.T @ inputs / len(x), outputs))
    return found


def exact_product(weights, x, vectors):
    """The Gauss-Newton matrix times vectors, as inner products: of J v for all v."""
    hidden, _ = forward(weights, x)
    moved = []
    for v1, v2 in vectors:
        tangent = (with_ones(x) @ v1) * (1 - hidden**2)
        moved.append(tangent @ weights[1][:-1] + with_ones(hidden) @ v2)
    return np.array([[np.sum(a * b) / len(x) for b in moved] for a in moved])


def inner(x, y):
    return sum(np.sum(a * b) for a, b in zip(x, y, strict=True))


def gram(xs, ys):
    return np.array([[inner(x, y) for y in ys] for x in xs])


@dataclass
class Reference:
    """The optimizer, with its arguments named as those of `curvax.Optimizer`."""

    l2_reg: float = 0.0
    learning_rate: float | None = None
    momentum: float | None = None
    damping: float | None = None
    initial_damping: float | None = None
    min_damping: float = 1e-8
    max_damping: float = np.inf
    include_damping_in_quad_change: bool = False
    damping_adaptation_interval: int = 5
    damping_adaptation_decay: float = 0.9
    damping_lower_threshold: float = 0.25
    damping_upper_threshold: float = 0.75
    always_use_exact_qmodel_for_damping_adjustment: bool = False
    norm_constraint: float | None = None
    num_burnin_steps: int = 0
    curvature_ema: float = 0.95
    inverse_update_period: int = 5
    use_exact_inverses: bool = False
    steps: int = 0
    totals: Any = None
    weight: float = 0.0
    velocities: Any = None
    inverses: Any = None
    stats: dict = field(default_factory=dict)

    def learn(self, weights, x):
        new = factors_of(weights, x)
        old = self.totals or [(0 * a, 0 * g) for a, g in new]
        ema = self.curvature_ema
        pairs = zip(old, new, strict=True)
        self.totals = [(ema * a + c, ema * g + d) for (a, g), (c, d) in pairs]
        self.weight = ema * self.weight + 1

    def factors(self):
        return [(a / self.weight, g / self.weight) for a, g in self.totals]

    def invert(self):
        """For each layer, from a gradient and the damping to the product with the inverse.

        With exact inverses, eigenvectors are those of the last refresh, and the damping is current.
        """
        at_refresh = self.damping + self.l2_reg
        self.inverses = []
        for a, g in self.factors():
            if self.use_exact_inverses:
                s, u = np.linalg.eigh(a)
                t, v = np.linalg.eigh(g)
                apply = lambda w, damping, s=s, u=u, t=t, v=v: (
                    u @ ((u.T @ w @ v) / (np.outer(s, t) + damping)) @ v.T
                )
            else:
                pi = np.sqrt((np.trace(a) / len(a)) / (np.trace(g) / len(g)))
                left = np.linalg.inv(a + pi * np.sqrt(at_refresh) * np.eye(len(a)))
                right = np.linalg.inv(g + np.sqrt(at_refresh) / pi * np.eye(len(g)))
                apply = lambda w, damping, left=left, right=right: left @ w @ right
            self.inverses.append(apply)

    def step(self, weights, batch):
        x, _ = batch
        if self.steps == 0:
            self.velocities = [0 * w for w in weights]
            for _ in range(self.num_burnin_steps):
                self.learn(weights, x)
            if self.initial_damping is not None:
                self.damping = self.initial_damping
        self.learn(weights, x)
        if self.steps % self.inverse_update_period == 0:
            self.invert()
        loss = loss_of(weights, batch, self.l2_reg)
        gradient = gradient_of(weights, batch, self.l2_reg)
        direction = [
            apply(g, self.damping + self.l2_reg)
            for apply, g in zip(self.inverses, gradient, strict=True)
        ]
        if self.norm_constraint is not None:
            size = self.learning_rate**2 * inner(gradient, direction)
            scale = min(1.0, np.sqrt(self.norm_constraint / size))
            direction = [scale * d for d in direction]
        vectors = [direction, self.velocities]
        is_due = (self.steps + 1) % self.damping_adaptation_interval == 0
        adaptive = self.learning_rate is None or self.momentum is None
        exact = adaptive or self.always_use_exact_qmodel_for_damping_adjustment
        curvature = exact_product(weights, x, vectors) if exact else self.approx_product(vectors)
        curvature = curvature + self.l2_reg * gram(vectors, vectors)
        identity, slope = gram(vectors, vectors), gram(vectors, [gradient])[:, 0]
        rate = None if self.learning_rate is None else -self.learning_rate
        w = minimum(curvature + self.damping * identity, slope, [rate, self.momentum])
        update = [w[0] * d + w[1] * v for d, v in zip(*vectors, strict=True)]
        moved = [a + d for a, d in zip(weights, update, strict=True)]
        added = self.damping if self.include_damping_in_quad_change else 0.0
        change = w @ (curvature + added * identity) @ w / 2 + slope @ w
        self.stats = {"loss": loss, "learning_rate": -w[0], "momentum": w[1]}
        self.stats |= {"damping": self.damping}
        if self.initial_damping is not None and is_due:
            new_loss = loss_of(moved, batch, self.l2_reg)
            rho = (new_loss - loss) / change
            self.stats |= {"rho": rho, "new_loss": new_loss, "quad_model_change": change}
            factor = self.damping_adaptation_decay**self.damping_adaptation_interval
            is_bad = rho < self.damping_lower_threshold if change < 0 else new_loss > loss
            if change < 0 and rho > self.damping_upper_threshold:
                self.damping *= factor
            elif is_bad:
                self.damping /= factor
            self.damping = min(max(self.damping, self.min_damping), self.max_damping)
        self.velocities = update
        self.steps += 1
        return moved

    def approx_product(self, vectors):
        pairs = lambda v: zip(self.factors(), v, strict=True)
        return gram(vectors, [[a @ w @ g for (a, g), w in pairs(v)] for v in vectors])


def minimum(matrix, slope, fixed):
    """The coefficients at the minimum of a quadratic function, some of which are given."""
    free = [k for k, c in enumerate(fixed) if c is None]
    w = np.array([0.0 if c is None else c for c in fixed])
    if free:
        rest = (slope + matrix @ w)[free]
        w[free] = -np.linalg.pinv(matrix[np.ix_(free, free)], rcond=1e-14) @ rest
    return w
