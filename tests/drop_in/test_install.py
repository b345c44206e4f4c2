"""`install` and `_src` give the modules of `curvax.kfac_jax` other paths, and no second copies."""

import json
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

import curvax
import curvax.kfac_jax as ours
from helpers import as_users_run

MODULES = [
    name for name in json.loads(Path(__file__).with_name("contract.json").read_text()) if name
]


@pytest.fixture
def no_kfac_jax(monkeypatch):
    """No module of that name, before the test and after it."""
    for name in [*sys.modules]:
        if name.partition(".")[0] == "kfac_jax":
            monkeypatch.delitem(sys.modules, name)
    yield
    for name in [*sys.modules]:
        if name.partition(".")[0] == "kfac_jax":
            monkeypatch.delitem(sys.modules, name)


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        env=as_users_run(),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", MODULES)
def test_src_has_the_same_modules(name):
    from curvax.kfac_jax import _src

    module = getattr(ours, name)
    assert getattr(_src, name) is module
    assert sys.modules[f"curvax.kfac_jax._src.{name}"] is module
    assert module.__name__ == f"curvax.kfac_jax.{name}"


def test_modules_can_be_imported_from_src():
    import curvax.kfac_jax._src.utils as utils
    from curvax.kfac_jax._src.utils import trees

    assert utils is ours.utils
    assert trees is ours.utils.trees


@pytest.mark.usefixtures("no_kfac_jax")
class TestInstall:
    def test_every_path_is_the_same_module(self):
        ours.install()
        for name in MODULES:
            assert sys.modules[f"kfac_jax.{name}"] is getattr(ours, name)
            assert sys.modules[f"kfac_jax._src.{name}"] is getattr(ours, name)
        assert sys.modules["kfac_jax"] is ours

    def test_twice_is_once(self):
        ours.install()
        ours.install()
        assert sys.modules["kfac_jax"] is ours

    @pytest.mark.parametrize("name", ["kfac_jax", "kfac_jax._src.utils"])
    def test_another_kfac_jax_is_not_replaced(self, monkeypatch, name):
        other = types.ModuleType(name)
        other.__file__ = "/elsewhere/kfac_jax.py"
        monkeypatch.setitem(sys.modules, name, other)
        with pytest.raises(ImportError, match=rf"{name} is already imported, from /elsewhere/.*"):
            ours.install()
        assert sys.modules[name] is other
        assert "kfac_jax.utils" not in sys.modules


def test_a_program_that_is_not_edited_runs():
    """In a process of its own: all ways to import, before and after `install`."""
    result = run(
        """
        import curvax.kfac_jax
        curvax.kfac_jax.install()

        import kfac_jax
        import kfac_jax._src.utils as same
        from kfac_jax import utils
        from kfac_jax._src import utils as also_the_same
        from kfac_jax.utils import product

        assert kfac_jax is curvax.kfac_jax
        assert utils is same is also_the_same is curvax.kfac_jax.utils
        print(product([2, 3]))
        try:
            import kfac_jax.nothing
        except ModuleNotFoundError as error:
            print(error)
        """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "6\nNo module named 'kfac_jax.nothing'\n"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("utils", "curvax.kfac_jax.utils"),
        ("p_split", "curvax.kfac_jax.utils.p_split"),
        ("install", "curvax.kfac_jax.install"),
        ("LayerVjpData", "curvax.kfac_jax.LayerVjpData"),
        ("layer_tag", "curvax.kfac_jax.layers_and_loss_tags.layer_tag"),
    ],
)
def test_an_attribute_error_says_where_a_name_of_kfac_jax_is(name, path):
    with pytest.raises(AttributeError) as error:
        getattr(curvax, name)
    assert str(error.value).startswith(f"module 'curvax' has no attribute {name!r}. ")
    assert f"`{path}`" in str(error.value)


@pytest.mark.parametrize("name", ["jnp", "Callable", "import_paths", "path_of", "_private"])
def test_other_names_have_no_hint(name):
    with pytest.raises(AttributeError) as error:
        getattr(curvax, name)
    assert str(error.value) == f"module 'curvax' has no attribute {name!r}"


def test_kfac_jax_is_imported_only_when_used():
    result = run(
        """
        import sys
        import curvax
        assert "curvax.kfac_jax" not in sys.modules
        curvax.kfac_jax.utils
        assert "curvax.kfac_jax" in sys.modules
        """
    )
    assert result.returncode == 0, result.stderr
