"""The copying link: order and overlap on a device that keeps time, and contents on one that copies at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from streamed import resident, saved, streamed
from tiny_models import TreeRun, tiny
from torch import Tensor

from sequoia.model.lean.decoder import LeanDecoder
from sequoia.model.offload import attach as attaching
from sequoia.model.offload.disk import DiskLink
from sequoia.model.offload.gpu import CopyLink
from sequoia.model.offload.layout import LayerLayout
from sequoia.model.offload.schedule import Schedule


class FakeDevice:
    """Two workers, one that copies and one that calculates; events are the times at which they get somewhere.

    Args:
        seconds: of a copy of so many bytes.
    """

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds = seconds
        self.copying = self.calculating = 0.0
        self.spans: list[tuple[float, float, int]] = []
        """Start and end of each copy, and its first byte."""

    def copy(self, source: Tensor, target: Tensor, after: float | None) -> float:
        start = max(self.copying, after or 0.0)
        self.copying = start + self._seconds(len(source))
        self.spans.append((start, self.copying, int(source[0])))
        target.copy_(source)
        return self.copying

    def wait(self, event: float) -> None:
        self.calculating = max(self.calculating, event)

    def mark(self) -> float:
        return self.calculating

    def finish_copies(self) -> None:
        self.calculating = max(self.calculating, self.copying)


def run(layers: int, slots: int, compute: float, pause: float, passes: int) -> tuple[FakeDevice, list[int]]:
    """Passes of layers that take 1 s to copy; the layers as they were found."""
    device = FakeDevice(lambda size: size / 8)
    link = CopyLink(
        device,
        [torch.full((8,), layer, dtype=torch.uint8) for layer in range(layers)],
        [torch.zeros(8, dtype=torch.uint8) for _ in range(slots)],
    )
    schedule, found = Schedule(link, layers), []
    for _ in range(passes):
        schedule.start_pass()
        for _ in range(layers):
            found.append(int(link.ring[schedule.take()][3]))
            device.calculating += compute
            schedule.give_back()
        device.calculating += pause
    assert link.bytes_moved == 8 * len(device.spans)
    return device, found


@pytest.mark.parametrize("slots", [2, 3])
def test_copies_follow_each_other_without_a_gap_while_they_take_longer(slots: int) -> None:
    device, found = run(layers=5, slots=slots, compute=0.4, pause=0.5, passes=4)
    assert found == 4 * list(range(5))
    starts, ends = [span[0] for span in device.spans], [span[1] for span in device.spans]
    assert starts[1:] == pytest.approx(ends[:-1])


def test_the_ring_is_filled_while_nothing_is_calculated() -> None:
    """A pause as long as the ring's copies costs nothing."""
    device, _ = run(layers=6, slots=3, compute=0.1, pause=2.5, passes=5)
    assert device.calculating < 5 * 6 + 0.1 + 2.5 + 1


def test_where_calculating_takes_longer_it_never_waits_after_the_start() -> None:
    device, _ = run(layers=5, slots=2, compute=1.5, pause=0.0, passes=3)
    assert device.calculating == pytest.approx(1 + 15 * 1.5)


def test_no_slot_is_written_while_it_is_used() -> None:
    """With two slots a copy can only begin when the layer before the last is done."""
    device, _ = run(layers=4, slots=2, compute=3.0, pause=0.0, passes=2)
    for index in range(2, len(device.spans)):
        assert device.spans[index][0] >= 1 + 3.0 * (index - 1) - 1e-9


def test_a_pass_left_off_is_waited_for() -> None:
    device = FakeDevice(lambda size: 1.0)
    link = CopyLink(device, [torch.zeros(8, dtype=torch.uint8)] * 3, [torch.zeros(8, dtype=torch.uint8)] * 2)
    schedule = Schedule(link, 3)
    schedule.start_pass()
    schedule.take()
    device.calculating += 50
    schedule.start_pass()
    assert device.spans[-2][0] >= 50  # what the pass began may still read the slots
    schedule.take()


def test_a_model_streams_from_the_hosts_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tiny("llama", {"num_hidden_layers": 4}), tmp_path, torch.bfloat16)
    device = FakeDevice(float)

    def link(hollow: object, layouts: list[LayerLayout], dtype: torch.dtype, slots: int) -> CopyLink:
        reading = DiskLink(hollow.source.files, layouts, dtype, 2)  # type: ignore[attr-defined]
        layers = attaching.in_memory(reading, layouts, pin=False)
        reading.close()
        size = max(map(len, layers))
        return CopyLink(device, layers, [torch.empty(size, dtype=torch.uint8) for _ in range(slots)])

    monkeypatch.setattr(attaching, "_link", link)
    model = streamed(folder, torch.bfloat16, resident=[2], slots=2)
    assert isinstance(model._decoder, LeanDecoder)
    found = torch.cat([TreeRun(13).logits(model), TreeRun(5).logits(model)])
    whole = resident(folder, torch.bfloat16)
    assert torch.equal(found, torch.cat([TreeRun(13).logits(whole), TreeRun(5).logits(whole)]))
    assert device.spans


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    import sequoia
    from sequoia.params import SamplingParams

    folder = saved(tiny("llama", {"num_hidden_layers": 6}), tmp_path, torch.float32)
    params = SamplingParams(max_tokens=20, temperature=0.0)
    used = torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]
    there = sequoia.load(folder, dtype="fp32", device="cuda", offload="host", memory_budget=used + (300 << 20))
    here = sequoia.load(folder, dtype="fp32", device="cuda", offload="off")
    assert there.generate([3, 4, 5], params).token_ids == here.generate([3, 4, 5], params).token_ids
