"""Bytes and counts as people read them."""

from __future__ import annotations


def size(count: int) -> str:
    """Bytes for people: 62.7 MiB."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 999.5 or unit == "TiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def number(count: int) -> str:
    """A count for people: 124.4 M."""
    for unit, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return str(count)
