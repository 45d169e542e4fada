"""Tells the addresses that only programs of this machine can reach."""

from __future__ import annotations

import ipaddress


def is_loopback(name: str) -> bool:
    """Whether a host name or an IP address, without a port, means this machine alone."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
