"""The strict configuration every test runs under, on eight virtual devices.

Float64, so that results can be compared with their oracles to rounding. No implicit promotion of
types or of ranks, so that a mixed-up dtype or a forgotten axis is an error. Warnings are errors
(`pyproject.toml`), and every annotated function of curvax checks its arguments while it is tested.
There are eight devices, of which `helpers.mesh_of` makes meshes; without a mesh, programs run on
the first. Only tests of several processes, of environments and of imports start processes.
"""

import os
import time
import warnings

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest
from beartype import BeartypeConf, BeartypeDecorPlace
from beartype.claw import beartype_package


class WrongType(UserWarning):
    """A value that is not of the annotated type: an error, except in tests of wrong types."""


# Each array is checked by itself. jaxtyping's own hook would also compare the sizes of one call's
# arrays, which made the suite take a third more time. The first package below walks over programs
# in many small functions, whose checks would take a quarter of the time of tests of layers; in the
# second, `jax.eval_shape` makes a named tuple of shapes.
beartype_package(
    "curvax",
    conf=BeartypeConf(
        violation_type=WrongType,
        claw_skip_package_names=("curvax.layers.detection", "curvax.optimizer.value_function"),
        claw_is_pep526=False,
        claw_decor_place_func=BeartypeDecorPlace.FIRST,
        claw_decor_place_type=BeartypeDecorPlace.FIRST,
    ),
)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

_register_dataclass = jax.tree_util.register_dataclass


def _register_unchecked(nodetype, *args, **kwargs):
    """Leave the constructors of pytrees unchecked.

    JAX makes them of leaves that no annotation describes, such as specs and its own sentinels.
    """
    nodetype.__no_type_check__ = True
    return _register_dataclass(nodetype, *args, **kwargs)


jax.tree_util.register_dataclass = _register_unchecked

# Compiling takes its time, so neither a deadline nor the health check for slowness means anything.
UNHURRIED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("default", max_examples=6, **UNHURRIED)
hypothesis.settings.register_profile("ci", max_examples=6, derandomize=True, **UNHURRIED)
hypothesis.settings.register_profile("thorough", max_examples=150, **UNHURRIED)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

pytest.register_assert_rewrite("helpers")

COMPILATION = "/jax/core/compile/backend_compile_duration"
# The number of programs that were compiled, and seconds: of compiling, and of running tests.
SPENT = {"programs": 0, "compiling": 0.0, "running": 0.0}
STARTED = time.monotonic()


def is_thorough(config):
    return config.getoption("--hypothesis-profile") == "thorough"


def pytest_configure(config):
    """Compile in a third of the time; or, if all tests are wanted, as programs are for users."""
    from helpers import COMPILED_QUICKLY

    flags = os.environ.get("XLA_FLAGS", "")
    if not is_thorough(config) and COMPILED_QUICKLY not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {COMPILED_QUICKLY}"
    jax.monitoring.register_event_duration_secs_listener(_note_compilation)


def _note_compilation(event, duration, **_):
    if event == COMPILATION:
        SPENT["programs"] += 1
        SPENT["compiling"] += duration


def pytest_collection_modifyitems(items):
    """Reject the mark `optimised` on a single test: programs are shared within a module."""
    for item in items:
        if any(mark.name == "optimised" for mark in item.own_markers):
            raise pytest.UsageError(f"{item.nodeid}: mark the module as optimised (pytestmark)")


def pytest_sessionfinish(session):
    """Report the time of a worker to the process that started it."""
    is_controller = session.config.getoption("numprocesses", None)
    if not is_controller:
        SPENT["running"] = time.monotonic() - STARTED
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["spent"] = SPENT


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    for name, spent in getattr(node, "workeroutput", {}).get("spent", {}).items():
        SPENT[name] += spent


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Leave the tests of a module to one process, so that what they share is compiled once.

    Groups alone do not: xdist 3.8 writes them into names that pytest 9.2 does not read. The tests
    of the documentation share nothing and start processes: whichever worker is free has the next.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            module = super()._split_scope(nodeid)
            return nodeid if module.endswith("test_documentation.py") else module

    return Scheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.fixture
def unchecked():
    """No run-time checks of annotations: what a user meets who passes a wrong type."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WrongType)
        yield


@pytest.fixture
def jax_defaults():
    """JAX's default configuration: single precision, and promotion of dtypes and ranks."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


@pytest.fixture
def compilations():
    """A list that grows by one with each compilation."""
    seen = []

    def listen(event, duration, **_):
        if event == COMPILATION:
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs(request):
    """Keep memory flat: property tests leave hundreds of compiled programs behind.

    Most of the time goes into compiling programs that are run once. Only in modules marked
    `optimised`, which measure memory, is their machine code optimised as it is for users, if all
    tests are wanted.
    """
    is_optimised = request.node.get_closest_marker("optimised") and is_thorough(request.config)
    jax.config.update("jax_disable_most_optimizations", not is_optimised)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


@pytest.fixture(autouse=True, scope="session")
def _measure_what_users_have():
    """Programs whose memory is asked for have the buffers that they have for users."""
    from curvax import _jax
    from helpers import BUFFERS_OF_USERS

    account = _jax.exact_memory_options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_jax, "exact_memory_options", lambda name: account(name) | BUFFERS_OF_USERS)
        yield


def pytest_terminal_summary(terminalreporter):
    """Say what took the time, what the documentation tests executed and what they did not."""
    programs, compiling, running = SPENT.values()
    terminalreporter.write_line(
        f"{programs} programs were compiled in {compiling:.0f} s, {compiling / max(running, 1):.0%}"
        f" of the {running:.0f} s of all workers (processes that tests start are not counted)"
    )
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    notes = [
        note for report in reports for key, note in report.user_properties if key == "documentation"
    ]
    if notes:
        terminalreporter.section("documentation")
        for note in sorted(notes):
            terminalreporter.write_line(note)
