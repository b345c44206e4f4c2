"""An autoencoder of handwritten digits, trained with K-FAC and with Adam, and its curvature.

The 8-by-8 images of scikit-learn go through a bottleneck of 12 numbers, the kind of network that
first-order methods find hard. Learning rate, momentum and damping of K-FAC are adaptive, so there
is nothing to tune; Adam gets the best of three learning rates. To run this example alone, with
pictures in a folder of your choice: `python -m examples.digits [folder]`.
"""

import itertools
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import curvax
from examples import _show

SIZES = (64, 100, 40, 12, 40, 100, 64)
RATES = (1e-3, 3e-3, 1e-2)
ADAM_STEPS = 600
KFAC_STEPS = 120
BUDGET = "100MB"
PICTURES = Path("demo-pictures")

Params = list[dict[str, jax.Array]]


def images() -> jax.Array:
    """Return all digits, one per row, with values between zero and one."""
    return jnp.asarray(load_digits().data / 16, jnp.float32)


def first_guess() -> Params:
    random = np.random.default_rng(0)
    draw = lambda m, n: jnp.asarray(random.normal(size=(m, n)) / m**0.5, jnp.float32)
    return [{"w": draw(m, n), "b": jnp.zeros(n)} for m, n in itertools.pairwise(SIZES)]


def reconstruct(params: Params, x: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss(params: Params, x: jax.Array) -> jax.Array:
    """Return the squared error per image, averaged over images."""
    prediction = curvax.register_squared_error_loss(reconstruct(params, x), x)
    return jnp.mean(jnp.sum((prediction - x) ** 2, axis=1))


@dataclass(frozen=True)
class Run:
    """A training run: the loss before each step, and the seconds since its second step."""

    name: str
    losses: list[float]
    seconds: list[float]
    rate: float | None = None

    def steps_to(self, target: float) -> int | None:
        """Return the number of steps to reach the target, or None."""
        return next((k for k, value in enumerate(self.losses) if value <= target), None)


def with_adam(x: jax.Array, rate: float, num_steps: int = ADAM_STEPS) -> Run:
    transformation = optax.adam(rate)
    params = first_guess()
    state = transformation.init(params)

    @jax.jit
    def step(params: Params, state: Any) -> tuple[Params, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, x)
        updates, state = transformation.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    losses, seconds, begin = [], [], 0.0
    for number in range(num_steps + 1):
        params, state, value = step(params, state)
        losses.append(float(value))
        begin = time.perf_counter() if number == 0 else begin  # Compilation does not count.
        seconds.append(time.perf_counter() - begin)
    return Run(f"Adam, {rate:g}", losses, seconds, rate)


def with_kfac(
    x: jax.Array, num_steps: int = KFAC_STEPS, progress: bool = True
) -> tuple[Params, Run]:
    optimizer = curvax.Optimizer(
        jax.value_and_grad(loss),
        l2_reg=0.0,
        use_adaptive_learning_rate=True,
        use_adaptive_momentum=True,
        use_adaptive_damping=True,
        initial_damping=1.0,
    )
    losses, seconds, begin = [], [], [0.0]

    def note(params: Params, state: Any, stats: dict[str, Any]) -> None:
        del params, state
        losses.append(float(stats["loss"]))
        begin[0] = begin[0] or time.perf_counter()
        seconds.append(time.perf_counter() - begin[0])

    rng, params = jax.random.key(0), first_guess()
    state = optimizer.init(params, rng, x)
    batches = itertools.repeat(x)
    params, _, _ = optimizer.fit(params, state, rng, batches, num_steps, note, progress)
    return params, Run("K-FAC", losses, seconds)


def table(kfac: Run, adam: Run) -> None:
    """Print both losses by step and by time."""
    print(f"\n  {'loss after':>14}{kfac.name:>14}{adam.name:>18}")
    for step in (0, 10, 30, 60, 90, 119, 300, 600):
        shown = [f"{r.losses[step]:.4f}" if step < len(r.losses) else "" for r in (kfac, adam)]
        print(f"  {step:>8} steps{shown[0]:>14}{shown[1]:>18}")
    total = kfac.seconds[-1]
    for fraction in (0.25, 0.5, 1.0):
        at = fraction * total
        shown = [r.losses[int(np.searchsorted(r.seconds, at, "right")) - 1] for r in (kfac, adam)]
        print(f"  {at:>8.1f} s    {shown[0]:>14.4f}{shown[1]:>18.4f}")


def plot(runs: list[Run], target: float, path: Path) -> None:
    """Plot losses by step and by time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for run in runs:
        style = {"linewidth": 2.2} if run.name == "K-FAC" else {"alpha": 0.8}
        panels[0].semilogy(run.losses, label=run.name, **style)
        panels[1].semilogy(run.seconds, run.losses, label=run.name, **style)
    for panel, label in zip(panels, ("steps", "seconds, without compilation"), strict=True):
        panel.axhline(target, color="gray", linestyle=":", linewidth=1)
        panel.set_xlabel(label)
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("squared error per image")
    panels[0].legend()
    figure.suptitle("Autoencoder of digits, full batch")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def run(pictures: Path = PICTURES) -> None:
    pictures.mkdir(parents=True, exist_ok=True)
    x = images()
    _show.text(
        f"""{len(x)} images of digits go through a network {"-".join(map(str, SIZES))} and back.
        One line registers the loss; the layers are detected in the model as it is written:"""
    )
    print()
    print(_indented(str(curvax.explain_registration(loss, (first_guess(), x)))))
    _show.text(
        f"""Adam takes {ADAM_STEPS} steps with each of three rates, K-FAC {KFAC_STEPS},
        all on the full batch; learning rate, momentum and damping of K-FAC are adaptive."""
    )
    print(flush=True)
    adams = [with_adam(x, rate) for rate in RATES]
    params, kfac = with_kfac(x)
    best = min(adams, key=lambda run: run.losses[-1])
    target = best.losses[-1]
    table(kfac, best)
    steps = kfac.steps_to(target)
    _show.text(
        f"""K-FAC needs {steps} steps to reach the loss {target:.4f}, for which Adam with its best
        learning rate ({best.rate:g}) needs {ADAM_STEPS}."""
        if steps is not None
        else f"K-FAC did not reach Adam's loss, {target:.4f}, in {KFAC_STEPS} steps."
    )
    plot([*adams, kfac], target, pictures / "training.png")
    curvature(params, x, pictures)


def curvature(params: Params, x: jax.Array, pictures: Path) -> None:
    """Compute the Hessian of two layers within a memory budget, and the spectrum of the GGN."""
    inner = params[2:4]
    of_inner = lambda inner: loss([*params[:2], *inner, *params[4:]], x)
    with curvax.recorded_plans() as plans:
        matrix, _ = curvax.hessian(of_inner, inner, memory_budget=BUDGET)
    used = plans[0].usage.temp_bytes / 1e6
    naive = _show.compiled(jax.hessian(of_inner), inner)[1]
    values = np.linalg.eigvalsh(np.asarray(matrix, np.float64))
    _show.text(
        f"""How curved is the loss where K-FAC stopped? The exact Hessian of the two layers
        around the bottleneck is a {matrix.shape[0]} by {matrix.shape[0]} matrix, computed
        within a budget of {BUDGET}."""
    )
    _show.memory([("Hessian", naive, used)], "jax.hessian", f"curvax, {BUDGET}")
    _show.text(
        f"""Its eigenvalues lie between {values[0]:.2g} and {values[-1]:.2g}; {np.sum(values < 0)}
        of {len(values)} are negative."""
    )
    exact = curvax.ImplicitExactCurvature(loss)
    operator = curvax.as_linear_operator(exact, (params, x), matrix="ggn")
    density = curvax.spectral_density(operator, jax.random.key(0))
    density.plot().figure.savefig(pictures / "spectrum.png", dpi=130)
    _show.text(f"Pictures are in {pictures}: training.png, and spectrum.png of the full GGN.")


def _indented(words: str) -> str:
    return "\n".join(f"  {line}" for line in words.splitlines())


if __name__ == "__main__":
    run(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)
