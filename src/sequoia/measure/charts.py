"""What the reports' plots have in common: their style, and how they become SVG and PNG."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FADED, GRID, PLAIN = "#24292f", "#57606a", "#d0d7de", "#8c959f"
COLOURS = ("#2f6f9f", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#9a6700", "#0e7a86", "#cf222e", "#57606a")
DASHED = (0, (4, 3))
WIDTH = 5.6  # inches
_STYLE: Any = {
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,  # a file's name may hold a $
    "axes.edgecolor": FADED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FADED,
    "ytick.color": INK,
    "grid.color": GRID,
    "figure.constrained_layout.w_pad": 0.08,
    "svg.fonttype": "none",  # the reader's fonts have the characters that Matplotlib's own lack
    "svg.hashsalt": "sequoia",
}


def svg(description: str, height: float, draw: Callable[[Axes], None], width: float = WIDTH) -> str:
    """One plot as an SVG element whose ids are its own, so that any number of them share a page.

    Args:
        description: the plot in words, for those who do not see it; no other of the page may have the same.
        height, width: inches.
    """
    with _figure(width, height) as figure:
        draw(figure.subplots())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _with_own_ids(text.getvalue(), description)


def png(width: float, height: float, draw: Callable[[Figure], None], dots: int = 120) -> bytes:
    """A picture of several plots; `width` and `height` in inches, `dots` per inch."""
    with _figure(width, height) as figure:
        draw(figure)
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=dots, facecolor="white", metadata={"Software": None})
    return data.getvalue()


@contextmanager
def _figure(width: float, height: float) -> Iterator[Figure]:
    with _silent():
        from matplotlib import rc_context, rcdefaults, rcParams
        from matplotlib.figure import Figure

        with rc_context():
            rcdefaults()  # not the user's style
            rcParams.update(_STYLE)
            yield Figure(figsize=(width, height), layout="constrained")


@contextmanager
def _silent() -> Iterator[None]:
    """No lines about the font cache or missing glyphs, which the reader's own fonts have."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _with_own_ids(svg: str, description: str) -> str:
    """The element alone, its ids made unlike other plots', with a text for those who do not see it."""
    svg = svg[svg.index("<svg") :]
    mark = f"p{crc32(description.encode('utf-8', 'replace')):08x}"
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{mark}-", svg)
    # The style would hold for the whole page.
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(description)}" ', 1)
