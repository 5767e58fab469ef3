"""A report as one HTML page, without scripts and with nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

_SHEET = Path(__file__).with_name("page.css")


def document(title: str, header: str, sections: Iterable[str]) -> str:
    """The whole page.

    Args:
        title: text.
        header, sections: HTML.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_SHEET.read_text(encoding='utf-8')}</style></head>"
        f"<body><header>{header}</header><main>{''.join(sections)}</main></body></html>\n"
    )


def section(title: str, lead: str, content: str) -> str:
    """A titled part of the page; nothing where there is no content."""
    lead = f"<p>{escape(lead)}</p>" if lead else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{content}</section>" if content else ""


def details(title: str, content: str) -> str:
    """What has to be opened to be seen; nothing where there is no content."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>" if content else ""


def figure(caption: str, picture: str) -> str:
    """A picture, which scrolls where the page is narrower, below its caption."""
    return f'<figure><figcaption>{escape(caption)}</figcaption><div class="scroll">{picture}</div></figure>'


def definitions(entries: Iterable[tuple[str, str]]) -> str:
    """Names and what they are."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(text)}</dd>' for name, text in entries)}</dl>"


def table(headings: Iterable[str], rows: Iterable[tuple[str, Sequence[str]]], kind: str = "") -> str:
    """A table whose first column names the row and stays in sight.

    Args:
        headings: text.
        rows: the row's attributes, and its cells in HTML.
        kind: its class in the style sheet.
    """
    mark = f' class="{kind}"' if kind else ""
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "".join(
        f'<tr{attributes}><th scope="row">{cells[0]}</th>{"".join(f"<td>{cell}</td>" for cell in cells[1:])}</tr>'
        for attributes, cells in rows
    )
    return f'<div class="scroll"><table{mark}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
