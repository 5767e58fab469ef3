"""A hollow model set to work: layers for keeps, and a ring for the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from sequoia.model.lean.decoder import Layer, LeanDecoder
from sequoia.model.lean.linear import Gated, Linear
from sequoia.model.offload.disk import DiskLink
from sequoia.model.offload.gpu import CopyLink, CudaDevice
from sequoia.model.offload.hollow import Hollow
from sequoia.model.offload.layout import LayerLayout, layer_layout
from sequoia.model.offload.schedule import Schedule
from sequoia.model.offload.stream import Bound, LayerStream
from sequoia.model.placement import return_freed_memory

_READING_AHEAD = 2  # slots, while layers are read into the host's memory


def layer_layouts(layers: Sequence[Layer], hollow: Hollow, dtype: torch.dtype) -> list[LayerLayout]:
    """How each layer would lie in a slot, the matrices in the order of `linears`.

    Raises:
        FileError: the files lack one, or hold no floats.
    """
    names = {module: f"{name}.weight" for name, module in hollow.model.named_modules()}
    return [
        layer_layout(
            [hollow.source.places(names[module] for module in linear.modules) for linear in linears(layer)], dtype
        )
        for layer in layers
    ]


def attach(
    decoder: LeanDecoder, hollow: Hollow, dtype: torch.dtype, resident: Collection[int], slots: int
) -> DiskLink | CopyLink | None:
    """Read the resident layers and have the others streamed from now on. All of them calculate with plain weights, so
    that the output does not depend on how many are resident.

    Args:
        resident: numbers of the layers that stay.
        slots: of the ring; at least two.

    Returns:
        What brings the others; None where all layers are resident.

    Raises:
        FileError: a layer cannot be read.
    """
    layers = decoder.recipe.layers
    places = dict(enumerate(layer_layouts(layers, hollow, dtype)))
    for number in sorted(resident):
        _keep(layers[number], hollow, number)
        del places[number]
    if not places:
        hollow.source.close()
        return None
    link = _link(hollow, list(places.values()), dtype, slots)
    bound = {
        number: [Bound(*pair) for pair in zip(linears(layers[number]), layout.matrices, strict=True)]
        for number, layout in places.items()
    }
    decoder.layers = LayerStream(layers, bound, link, link.ring).a_pass
    return link


def _keep(layer: Layer, hollow: Hollow, number: int) -> None:
    """Read a layer's matrices, where they are used from now on."""
    hollow.fill(number)
    for linear in linears(layer):
        linear.settle(packed=False, release=True)
    return_freed_memory()


def _link(hollow: Hollow, layouts: Sequence[LayerLayout], dtype: torch.dtype, slots: int) -> DiskLink | CopyLink:
    if hollow.device.type == "cpu":
        return DiskLink(hollow.source.files, layouts, dtype, slots)
    size = max(layout.size for layout in layouts)
    ring = [torch.empty(size, dtype=torch.uint8, device=hollow.device) for _ in range(slots)]
    reading = DiskLink(hollow.source.files, layouts, dtype, _READING_AHEAD)
    try:
        return CopyLink(CudaDevice(hollow.device), in_memory(reading, layouts, pin=True), ring)
    finally:
        reading.close()


def in_memory(reading: DiskLink, layouts: Sequence[LayerLayout], pin: bool) -> list[Tensor]:
    """The layers' bytes in the host's memory.

    Raises:
        FileError: one cannot be read.
    """
    schedule = Schedule(reading, len(layouts))
    schedule.start_pass()
    layers = []
    for layout in layouts:
        layer = torch.empty(layout.size, dtype=torch.uint8, pin_memory=pin)
        layer.copy_(reading.ring[schedule.take()][: layout.size])
        schedule.give_back()
        layers.append(layer)
    return layers


def linears(layer: Layer) -> Iterator[Linear]:
    """Of a layer, each alone."""
    for part in layer.linears:
        yield from (part.gate, part.up) if isinstance(part, Gated) else (part,)
