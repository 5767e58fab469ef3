"""A real round as an SVG: the token tree with its words, the accepted path and the next token marked."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from html import escape

from sequoia.measure.bench.records import RoundEntry
from sequoia.tree.shape import TreeShape

INK, FADED, LINE, ACCEPTED, PAPER = "#24292f", "#6e7781", "#d0d7de", "#1a7f37", "#ffffff"
_MOST_NODES = 160
_LONGEST_WORD = 18  # in cells
_CELL, _ROW, _BOX, _GAP, _PAD, _CAPTION = 8.0, 32.0, 24.0, 46.0, 16.0, 26.0
_SPELT_OUT = {"\n": "↵", "\r": "←", "\t": "⇥"}


@dataclass(frozen=True)
class _Node:
    """A box of the picture."""

    parent: int
    depth: int
    word: str
    is_accepted: bool
    is_next: bool = False


@dataclass(frozen=True)
class _Spot:
    """Where a box lies: its left end and its middle line."""

    left: float
    width: float
    middle: float


def draw_round(entry: RoundEntry) -> str:
    """The picture, which needs no style sheet and no fonts beyond the reader's own.

    Args:
        entry: of more than `_MOST_NODES` nodes, the accepted path and the first others are drawn and the rest counted.
    """
    kept = _kept(entry)
    nodes = _nodes(entry, kept)
    spots = _spots(nodes)
    width = max(spot.left + spot.width for spot in spots) + _PAD
    height = max(spot.middle for spot in spots) + _ROW / 2 + _PAD
    caption = _caption(entry, len(entry.parents) - len(kept))
    width, height = max(width, _PAD * 2 + 0.9 * _CELL * len(caption)), height + _CAPTION
    edges = [_edge(spots[node.parent], spot, node) for node, spot in zip(nodes, spots, strict=True) if node.parent >= 0]
    boxes = [_box(node, spot) for node, spot in zip(nodes, spots, strict=True)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(describe_round(entry))}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, \'DejaVu Sans Mono\', monospace" font-size="13">'
        f'<rect width="100%" height="100%" fill="{PAPER}"/>{"".join(edges)}{"".join(boxes)}'
        f'<text x="{_PAD}" y="{height - _PAD:.1f}" fill="{INK}">{escape(caption)}</text></svg>\n'
    )


def describe_round(entry: RoundEntry) -> str:
    """The picture in a sentence, for readers who do not see it."""
    words = [visible(entry.words[node]) for node in (0, *entry.path)]
    return f"{_caption(entry, 0)}: {' '.join(words)} and then {visible(entry.next_word)}"


def visible(word: str) -> str:
    """A word in which spaces, line ends and control characters can be seen; the empty one as well."""
    return "".join(map(_visible_character, word)) or "∅"


def _visible_character(character: str) -> str:
    if character in _SPELT_OUT:
        return _SPELT_OUT[character]
    if character.isspace():
        return "␣"
    # Controls, formatting marks, lone surrogates and unassigned characters have no glyph, or break the file.
    return f"\\u{ord(character):04x}" if unicodedata.category(character)[0] == "C" else character


def _caption(entry: RoundEntry, hidden: int) -> str:
    size, tokens = len(entry.parents), len(entry.path) + 1
    nodes = "1 node" if size == 1 else f"{size} nodes"
    emitted = "1 token" if tokens == 1 else f"{tokens} tokens"
    rest = f" ({hidden} not drawn)" if hidden else ""
    return f"one pass of the target checked {nodes}{rest} and emitted {emitted}"


def _kept(entry: RoundEntry) -> list[int]:
    """The nodes to draw: the accepted path, its siblings, and then the others by depth."""
    shape = TreeShape(entry.parents)
    path = {0, *entry.path}
    order = sorted(range(shape.size), key=lambda n: (n not in path, shape.parents[n] not in path, shape.depths[n]))
    return sorted(order[:_MOST_NODES])


def _nodes(entry: RoundEntry, kept: list[int]) -> list[_Node]:
    """The boxes; the next token is one more child of the path's end, so that it gets room of its own."""
    depths, place, path = TreeShape(entry.parents).depths, {-1: -1}, (0, *entry.path)
    nodes = []
    for index, node in enumerate(kept):
        place[node] = index
        word = visible(entry.words[node])
        nodes.append(_Node(place[entry.parents[node]], depths[node], word, node in path))
    end = path[-1]
    return [*nodes, _Node(place[end], depths[end] + 1, visible(entry.next_word), True, is_next=True)]


def _spots(nodes: list[_Node]) -> list[_Spot]:
    depth = max(node.depth for node in nodes)
    widths = [
        _CELL * (2 + max(_cells(_shortened(node.word)) for node in nodes if node.depth == level))
        for level in range(depth + 1)
    ]
    lefts = [_PAD + sum(widths[:level]) + level * _GAP for level in range(depth + 1)]
    rows = _rows(nodes)
    return [
        _Spot(lefts[node.depth], widths[node.depth], _PAD + _ROW * (row + 0.5))
        for node, row in zip(nodes, rows, strict=True)
    ]


def _rows(nodes: list[_Node]) -> list[float]:
    """A row for each leaf from the top, inner nodes in the middle of their children; the next token comes first."""
    children: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        if node.parent >= 0:
            children[node.parent].insert(0 if node.is_next else len(nodes), index)
    rows, free, stack, order = [0.0] * len(nodes), 0, [0], list[int]()
    while stack:
        order.append(index := stack.pop())
        stack.extend(reversed(children[index]))
    for index in order:
        if not children[index]:
            rows[index], free = float(free), free + 1
    for index in reversed(order):
        if below := children[index]:
            rows[index] = (rows[below[0]] + rows[below[-1]]) / 2
    return rows


def _edge(start: _Spot, end: _Spot, node: _Node) -> str:
    x0, x1 = start.left + start.width, end.left
    bend = (x1 - x0) / 2
    colour, width = (ACCEPTED, 3) if node.is_accepted else (LINE, 1.5)
    return (
        f'<path d="M{x0:.1f},{start.middle:.1f} C{x0 + bend:.1f},{start.middle:.1f} {x1 - bend:.1f},{end.middle:.1f} '
        f'{x1:.1f},{end.middle:.1f}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
    )


def _box(node: _Node, spot: _Spot) -> str:
    colour = ACCEPTED if node.is_accepted else FADED
    weight = ' font-weight="bold"' if node.is_accepted else ""
    paper, ink = (ACCEPTED, PAPER) if node.is_next else (PAPER, colour)
    return (
        f"<g><title>{escape(node.word)}</title>"
        f'<rect x="{spot.left:.1f}" y="{spot.middle - _BOX / 2:.1f}" width="{spot.width:.1f}" height="{_BOX}" rx="6" '
        f'fill="{paper}" stroke="{colour}"/>'
        f'<text x="{spot.left + spot.width / 2:.1f}" y="{spot.middle + 4.5:.1f}" text-anchor="middle" fill="{ink}"'
        f"{weight}>{_faded_spaces(_shortened(node.word))}</text></g>"
    )


def _faded_spaces(word: str) -> str:
    return escape(word).replace("␣", '<tspan fill-opacity="0.45">␣</tspan>')


def _shortened(word: str) -> str:
    if _cells(word) <= _LONGEST_WORD:
        return word
    end = next(end for end in range(_LONGEST_WORD - 1, 0, -1) if _cells(word[:end]) < _LONGEST_WORD)
    return word[:end] + "…"


def _cells(word: str) -> int:
    """Columns of a terminal, which is also about the room a word takes in print."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in word)
