"""Bandwidths as people write them."""

import pytest

from castor.config import parse_bandwidth


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("25GB/s", 25 * 10**9),
        ("1.5 TB/s", 15 * 10**11),
        ("2GiB/s", 2 << 30),
        ("400Gb/s", 50 * 10**9),
        ("400 Gbit/s", 50 * 10**9),
        ("100Gbps", 125 * 10**8),
        ("800Mb/s", 10**8),
        (123, 123),
    ],
)
def test_bytes_and_bits_are_told_apart(text: str | int, expected: int) -> None:
    """400Gb/s were 400 GB/s: a network eight times as fast."""
    assert parse_bandwidth(text, "network") == expected


@pytest.mark.parametrize("text", ["25gb/s", "25", "25GB", "fast", "0Gb/s", "400gbps", "1b/h"])
def test_what_may_be_either_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="network is"):
        parse_bandwidth(text, "network")
