"""How fast memory is divided: what must be there, and as many layers beside it as fit.

More layers in memory always pay at least as much as more slots in the ring: a slot saves reading a layer only while
the link would stand still between two passes, and a resident layer saves it in any case. So the ring is small.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from sequoia.errors import UsageError
from sequoia.model.offload.request import show_bytes

_RINGS = ((3, 512), (2, 512), (2, 128))  # slots and rows of a prompt's pass, the first that fit
_MOST_ROWS = 4096  # of a prompt's pass
_SPARE = 1 / 64  # of the budget, left for what nobody counts: allocators round up


@dataclass(frozen=True)
class Needs:
    """Bytes, but for the numbers of layers.

    Args:
        libraries: the interpreter and everything imported; on a GPU what others have taken.
        ends: of the target what is neither in a layer nor streamed: embedding, head, norms.
        draft: its weights.
        context: tokens of the longest request.
        caches: keys and values of both models at the full context.
        rows: what a pass over a tree needs, the draft's levels included.
        row: what each row of a prompt's pass needs.
        layer: the largest one in memory.
        layers: how many there are.
        read: the largest layer in the files.
        slot: of the ring.
        buffers: of the threads that read.
    """

    libraries: int
    ends: int
    draft: int
    context: int
    caches: int
    rows: int
    row: int
    layer: int
    layers: int
    read: int
    slot: int
    buffers: int

    @property
    def fixed(self) -> int:
        """Without layers, ring and prompts."""
        return self.libraries + self.ends + self.draft + self.caches + self.rows

    def with_ring(self, slots: int, rows: int) -> int:
        """Without resident layers."""
        return self.fixed + slots * self.slot + self.buffers + rows * self.row

    @property
    def rings(self) -> list[tuple[int, int]]:
        """Slots and rows, the first that fit; a prompt is no longer than the context."""
        return [(slots, min(rows, self.context)) for slots, rows in _RINGS]

    @property
    def smallest(self) -> int:
        """The least budget that works."""
        return round(self.with_ring(*self.rings[-1]) / (1 - _SPARE)) + 1


@dataclass(frozen=True)
class MemoryPlan:
    """How a budget is spent, in bytes, and what for."""

    budget: int
    libraries: int
    ends: int
    draft: int
    caches: int
    rows: int
    kept: int  # resident layers
    ring: int
    resident: int  # layers, of
    layers: int
    slots: int
    prompt_rows: int  # of one pass over a prompt
    read: int  # of the files, in each pass

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in PARTS)

    @property
    def streamed(self) -> int:
        """Layers that are read in each pass."""
        return self.layers - self.resident

    @property
    def resident_layers(self) -> frozenset[int]:
        """Their numbers, spread evenly, so that the link has time to fill the ring at each."""
        return frozenset((2 * index + 1) * self.layers // (2 * self.resident) for index in range(self.resident))


PARTS = tuple(
    field.name
    for field in fields(MemoryPlan)
    if field.name in ("libraries", "ends", "draft", "caches", "rows", "kept", "ring")
)
"""Of a plan's bytes."""


def plan_memory(needs: Needs, budget: int) -> MemoryPlan:
    """As many resident layers as fit.

    Raises:
        UsageError: not even the ring fits; the message names the smallest budget that works.
    """
    usable = int(budget * (1 - _SPARE))
    whole_rows = needs.rings[0][1]
    if needs.fixed + needs.layers * needs.layer + whole_rows * needs.row <= usable:
        return _plan(needs, budget, needs.layers, 0, whole_rows)
    for slots, rows in needs.rings:
        room = usable - needs.with_ring(slots, rows)
        if room >= 0:
            resident = min(room // needs.layer, needs.layers - 1)
            spare = room - resident * needs.layer
            most = min(_MOST_ROWS, needs.context)
            return _plan(needs, budget, resident, slots, min(rows + spare // needs.row, most))
    slots, rows = needs.rings[-1]
    parts = {
        "the libraries": needs.libraries,
        "embedding and head": needs.ends,
        "the draft": needs.draft,
        "caches": needs.caches,
        "rows": needs.rows + rows * needs.row,
        "the ring": slots * needs.slot + needs.buffers,
    }
    spent = ", ".join(f"{name} {show_bytes(count)}" for name, count in parts.items() if count)
    raise UsageError(
        f"a memory budget of {show_bytes(budget)} is too small ({spent}). Give --memory-budget "
        f"{-(-needs.smallest // 2**20)}MiB, the smallest that works, or a shorter --context."
    )


def _plan(needs: Needs, budget: int, resident: int, slots: int, rows: int) -> MemoryPlan:
    return MemoryPlan(
        budget=budget,
        libraries=needs.libraries,
        ends=needs.ends,
        draft=needs.draft,
        caches=needs.caches,
        rows=needs.rows + rows * needs.row,
        kept=resident * needs.layer,
        ring=slots * needs.slot + (needs.buffers if slots else 0),
        resident=resident,
        layers=needs.layers,
        slots=slots,
        prompt_rows=rows,
        read=(needs.layers - resident) * needs.read,
    )
