"""A page as a test sees it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Document(HTMLParser):
    """What a page is made of; opening and closing tags must match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        values = dict(attributes)
        assert len(values) == len(attributes), f"an attribute of {tag} comes twice"
        self.ids += [values["id"]] if "id" in values else []
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href", "data", "action")]
        self.references += [name for value in values.values() for name in re.findall(r"url\(#([^)]*)\)", value or "")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, f"{tag} closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def require_whole(self):
        """All is closed, no id comes twice, and nothing is loaded from elsewhere or run."""
        assert self.open == []
        assert len(set(self.ids)) == len(self.ids)
        assert {link for link in self.links if not link.startswith("#")} == set()
        assert {link[1:] for link in self.links} | set(self.references) <= set(self.ids)
        assert not {"script", "link", "iframe", "img"} & set(self.tags)
