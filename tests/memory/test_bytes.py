"""Amounts of memory are read as people write them, and anything else is refused with the reason."""

import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from curvax import parse_memory
from curvax.memory import budget
from curvax.memory.budget import format_bytes

AVAILABLE = 1_000_001


@pytest.fixture
def some_memory(monkeypatch):
    monkeypatch.setattr(budget, "available_memory", lambda: AVAILABLE)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("one", [1, np.int8(1), np.uint64(1), np.array(1), jnp.array(1)], ids=repr)
def test_integers_of_any_kind_are_bytes(one):
    count = parse_memory(one)
    assert count == 1
    assert type(count) is int


@given(st.integers(1, 10**18))
def test_an_integer_is_itself(count):
    assert parse_memory(count) == count
    assert parse_memory(f"{count}B") == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7B", 7),
        ("1kB", 10**3),
        ("512MB", 512 * 10**6),
        ("3GB", 3 * 10**9),
        ("2TB", 2 * 10**12),
        ("1PB", 10**15),
        ("1KiB", 2**10),
        ("1MiB", 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("2TiB", 2**41),
        ("1PiB", 2**50),
        (".5kB", 500),
        ("  4  MB ", 4 * 10**6),
        ("4\tmb\n", 4 * 10**6),
        ("4mib", 2**22),
        ("4MIB", 2**22),
        ("1e3 B", 1000),
        ("1.5E-1 kB", 150),
        ("2e+1kB", 20_000),
        ("1.9B", 1),
    ],
)
def test_units_are_decimal_or_binary_in_any_case(text, count):
    assert parse_memory(text) == count


@given(st.integers(1, 10**7), st.integers(0, 3))
def test_decimal_fractions_lose_nothing(thousandths, zeros):
    """1.001 kB are 1001 bytes, though the float nearest to 1.001 is a bit less."""
    text = f"{thousandths // 1000}.{thousandths % 1000:03d}{'0' * zeros}"
    assert parse_memory(f"{text}kB") == thousandths
    assert parse_memory(f"{text} GB") == thousandths * 10**6


@pytest.mark.usefixtures("some_memory")
@pytest.mark.parametrize(
    ("given", "count"),
    [
        (1.0, AVAILABLE),
        (0.5, 500_000),
        (np.float64(0.25), 250_000),
        ("50%", 500_000),
        ("12.5 %", 125_000),
        ("100%", AVAILABLE),
        (0.000001, 1),
    ],
)
def test_a_float_or_a_percentage_is_a_fraction_of_what_is_available(given, count):
    assert parse_memory(given) == count


def test_one_is_a_byte_and_one_point_zero_is_everything(some_memory):
    assert parse_memory(1) == 1
    assert parse_memory(1.0) == AVAILABLE


@pytest.mark.usefixtures("some_memory")
class TestErrors:
    @pytest.mark.parametrize("amount", [0, -1, np.int64(-5), "0B", "0.9 B", "0.0GB", "1e-9kB"])
    @pytest.mark.usefixtures("unchecked")
    def test_an_amount_is_at_least_a_byte(self, amount):
        with pytest.raises(ValueError, match=r"^curvax\.parse_memory: .* at least one byte, got "):
            parse_memory(amount)

    def test_a_fraction_of_less_than_a_byte(self):
        with pytest.raises(ValueError, match=r"at least one byte, got 1e-07"):
            parse_memory(1e-7)

    @pytest.mark.parametrize(
        "amount", [0.0, -0.5, 1.5, 1e9, math.nan, math.inf, -math.inf, "0%", "101%"]
    )
    def test_a_fraction_is_of_something(self, amount):
        with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\], got .*Give bytes as"):
            parse_memory(amount)

    @pytest.mark.parametrize(
        "text",
        [
            *["", " ", "12", "1e9", "2G", "2Gi", "2K", "GB", "-1MB", "1.GB", "1,5GB", "1 2 MB"],
            *["5 EB", "nan B", "inf MB", "1e400GB", "half", "1MB/s", "0x10B"],
        ],
    )
    def test_a_text_is_a_number_with_a_unit(self, text):
        words = r"not an amount of memory. Give .* Units are B, kB, MB"
        with pytest.raises(ValueError, match=words):
            parse_memory(text)

    @pytest.mark.parametrize(
        "amount",
        [True, False, np.True_, None, b"1MB", [1], 1j, np.ones(2), jnp.float64(0.5)],
        ids=repr,
    )
    @pytest.mark.usefixtures("unchecked")
    def test_other_types_are_named(self, amount):
        words = rf"^curvax\.parse_memory: Give bytes as .*; got {type(amount).__name__} "
        with pytest.raises(TypeError, match=words):
            parse_memory(amount)

    @pytest.mark.usefixtures("unchecked")
    def test_a_budget_must_be_known(self):
        with pytest.raises(TypeError, match=r"Give bytes as .*; got .*Tracer"):
            jax.jit(parse_memory)(5)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20, "1.00 MiB"),
        (5 * 2**29, "2.50 GiB"),
        (2**40, "1.00 TiB"),
        (2**50, "1.00 PiB"),
        (2**63, "8192.00 PiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_bytes_are_printed_in_binary_units(count, text):
    assert format_bytes(count) == text


@given(st.integers(1, 10**17))
def test_what_is_printed_reads_back_to_half_a_percent(count):
    assert abs(parse_memory(format_bytes(count)) - count) <= 0.005 * count + 1
