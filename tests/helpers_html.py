"""HTML taken apart, to test pages."""

import re
from collections import Counter
from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "hr", "input"}
EVIL = "<script>alert('x')</script>\"'&$\\frac{"


class Tree(HTMLParser):
    """Tags balanced, ids unique, headings in order; counts of tags and their attributes."""

    def __init__(self, html):
        super().__init__()
        self.stack, self.tags, self.ids, self.levels, self.foreign = [], [], Counter(), [], 0
        self.feed(html)
        assert self.stack == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes, list(self.stack)))
        if "id" in attributes:
            self.ids[attributes["id"]] += 1
        if re.fullmatch(r"h[1-6]", tag):
            self.levels.append(int(tag[1]))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.stack.pop()

    def handle_endtag(self, tag):
        assert self.stack and self.stack[-1] == tag, f"</{tag}> closes {self.stack[-3:]}"
        self.stack.pop()

    def named(self, name):
        return [attributes for tag, attributes, _ in self.tags if tag == name]
