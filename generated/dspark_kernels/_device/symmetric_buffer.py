"""The memory that the ranks of a chain write into each other's GPU: what lies where in a rank's symmetric buffer.

    hello       [source rank] 8 bytes                                      that the rank's launch has started, and of what shape it is
    mailboxes   [variant], of two ranks: [parity][source rank and CTA][row slot] 8                  one record a CTA, row and position
                of more: [parity][row slot] 256 bytes = [source rank] 8                             one record a rank, row and position
    staging     [launch parity][source rank but the own][position][tile][row slot][16 entries]      logits for the cache

Every rank's buffer has the same layout; `source rank` is the one that writes. All offsets and sizes are bytes. The buffer is filled once,
before any rank launches, and never again: the staging, which comes last, with BLANK, the rest with zeros. Plain Python without imports, for
the host and the device code alike.
"""

from typing import NamedTuple

MOST_RANKS = 16
MOST_ROWS = 8
TILE_ROWS = 16  # entries of a tile and row: a tile is what one warp finishes at once
RECORD_BYTES = 8
HELLO_BYTES = 256  # MOST_RANKS words, and what is behind them starts a line
BLANK_BYTE = 0xFF
# A word of staging in which no logit has arrived. In either dtype it is made of NaNs of a form that no arithmetic gives (that is 0x7FFF and
# 0x7FFFFFFF), and what is staged is at most BLANK - 1, a NaN too, so that this rests on no hardware.
BLANK = 0xFFFFFFFF
DIRECT_RANKS = (
    2  # up to so many ranks, every CTA writes to every rank, and no rank's record is made (rank_exchange.py says why)
)
ROW_BYTES = 256  # of a mailbox of ranks' records: all SMs poll one row's records; 256 bytes apart, the polls of two rows do not queue up
PARITIES = 2
ALIGNMENT = 256


class SymmetricLayout(NamedTuple):
    """Byte offsets in a symmetric buffer."""

    hello: int
    mailboxes: int
    mailbox_bytes: int  # of one variant
    staging: int
    staging_bytes: int  # of one launch parity
    total: int


def tiles_of(shard_width: int) -> int:
    """Tiles of a shard of that many columns."""
    return -(-shard_width // TILE_ROWS)


def mailbox_size(world: int, ctas: int) -> int:
    """Bytes of a mailbox. Where every CTA writes, a test may wait for one record more than there are."""
    if world <= DIRECT_RANKS:
        return PARITIES * (world * ctas + 1) * MOST_ROWS * RECORD_BYTES
    return PARITIES * MOST_ROWS * ROW_BYTES


def layout(
    *, world: int, ctas: int, variants: int, row_slots: int, num_steps: int, shard_width: int, cache_bytes: int
) -> SymmetricLayout:
    """What a sampler's symmetric buffers must hold.

    Args:
        world: tensor-parallel ranks.
        ctas: CTAs of a rank.
        variants: builds that share the buffer. Each has a mailbox of its own, since its records are tagged by its own launch count.
        row_slots: of the build with most.
        num_steps: draft positions.
        shard_width: columns of a rank (of the widest).
        cache_bytes: of an entry of the logits cache; 0 without a cache.
    """
    source = num_steps * tiles_of(shard_width) * row_slots * TILE_ROWS * cache_bytes
    staging_bytes = -(-(world - 1) * source // ALIGNMENT) * ALIGNMENT
    mailboxes = HELLO_BYTES
    mailbox_bytes = -(-mailbox_size(world, ctas) // ALIGNMENT) * ALIGNMENT
    staging = mailboxes + variants * mailbox_bytes
    return SymmetricLayout(0, mailboxes, mailbox_bytes, staging, staging_bytes, staging + PARITIES * staging_bytes)


def mailbox_offset(found: SymmetricLayout, variant: int) -> int:
    """Where the mailbox of the variant with that number lies."""
    return found.mailboxes + variant * found.mailbox_bytes
