"""The strict configuration every test runs under.

Float64, so that results can be compared with their oracles to rounding. No implicit promotion of
types or of ranks, so that a mixed-up dtype or a forgotten axis is an error. Warnings are errors
(`pyproject.toml`), and every annotated function of curvax checks its arguments while it is tested.
"""

import inspect
import os
import re

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import jaxtyping
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compiling takes its time, so neither a deadline nor the health check for slowness means anything.
UNHURRIED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("default", max_examples=6, **UNHURRIED)
hypothesis.settings.register_profile("ci", max_examples=6, derandomize=True, **UNHURRIED)
hypothesis.settings.register_profile("thorough", max_examples=150, **UNHURRIED)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

pytest.register_assert_rewrite("helpers")

# Programs run once and on a few numbers, so it is compiling that takes time.
COMPILED_QUICKLY = "--xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):  # Later versions have no other way to compile fusions.
    COMPILED_QUICKLY += " --xla_cpu_use_fusion_emitters=false"


def is_thorough(config):
    return config.getoption("--hypothesis-profile") == "thorough"


def pytest_configure(config):
    """Compile in a third of the time; or, if all tests are wanted, as programs are for users."""
    flags = os.environ.get("XLA_FLAGS", "")
    if not is_thorough(config) and COMPILED_QUICKLY not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {COMPILED_QUICKLY}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Leave the tests of a module to one process, so that what they share is compiled once.

    Groups alone do not: xdist 3.8 writes them into names that pytest 9.2 does not read.
    """
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.fixture
def unchecked():
    """No run-time checks of annotations: what a user meets who passes a wrong type."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def compilations():
    """A list that grows by one with each compilation."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs(request):
    """Keep memory flat: property tests leave hundreds of compiled programs behind.

    Most of the time goes into compiling programs that are run once. Only where memory is measured
    is their machine code optimised as it is for users, if all tests are wanted.
    """
    measures = re.search("memory|temporaries", inspect.getsource(request.module))
    quickly = not (measures and is_thorough(request.config))
    jax.config.update("jax_disable_most_optimizations", quickly)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


@pytest.fixture(autouse=True, scope="session")
def _measure_what_users_have():
    """Programs whose memory is asked for have the buffers that they have for users."""
    from curvax import _jax
    from helpers import BUFFERS_OF_USERS

    account = _jax.true_account
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_jax, "true_account", lambda name: account(name) | BUFFERS_OF_USERS)
        yield


def pytest_terminal_summary(terminalreporter):
    """Say what the documentation tests executed, and which examples they did not."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    notes = [
        note for report in reports for key, note in report.user_properties if key == "documentation"
    ]
    if notes:
        terminalreporter.section("documentation")
        for note in sorted(notes):
            terminalreporter.write_line(note)
