"""Arithmetic on live state, declared once: Python runs these functions, `abi` prints the same ones as CUDA.

A table never depends on lengths, activity or routing; what a task finds to do follows from these functions and
the device's inputs. Each is one integer expression (`+ - * //`, comparisons, `min`, `max`, `if else`) over
non-negative arguments, so that the translation is literal; `LIVE_FUNCTIONS` lists what is printed.
"""

from __future__ import annotations


def share_begin(units: int, share: int, shares: int) -> int:
    """First of the `units` that share `share` of `shares` takes; it ends where the next share begins."""
    return units * share // shares


def chunk_begin(position: int, window_tokens: int, chunk_tokens: int) -> int:
    """First attention chunk that the token at `position` sees; window 0 means all of the context."""
    return max(position + 1 - window_tokens, 0) // chunk_tokens if window_tokens > 0 else 0


def chunk_end(position: int, chunk_tokens: int) -> int:
    """One past the chunk that holds `position` itself."""
    return position // chunk_tokens + 1


def attend_units(active: int, position: int, window_tokens: int, chunk_tokens: int, kv_heads: int) -> int:
    """Attention units of one row: (KV head, chunk) pairs, chunk fastest; an inactive row has none."""
    return (
        (chunk_end(position, chunk_tokens) - chunk_begin(position, window_tokens, chunk_tokens)) * kv_heads
        if active > 0
        else 0
    )


def expert_rank(unit: int, tiles: int) -> int:
    """Rank, among the step's distinct experts in ascending order, that routed unit `unit` belongs to."""
    return unit // tiles


def expert_tile(unit: int, tiles: int) -> int:
    """Tile of that expert."""
    return unit % tiles


LIVE_FUNCTIONS = (share_begin, chunk_begin, chunk_end, attend_units, expert_rank, expert_tile)
