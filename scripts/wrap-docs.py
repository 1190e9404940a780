#!/usr/bin/env python3
"""Fills the prose and list items of Markdown files to 110 columns; tables, code and headings stay.

usage: scripts/wrap-docs.py FILE...
"""

import re
import sys
import textwrap
from pathlib import Path

WIDTH = 110
ITEM = re.compile(r"^(\s*)([*+-]|\d+[.)])(\s+)")
HEADING = re.compile(r"^#{1,6} ")
# What would become a list item, a heading, a table or a quotation at the beginning of a line.
MARKER = re.compile(r" (?=(?:[*+-]|\d+[.)]|#+|\||>|=+|-+|:)(?: |$))")
CODE_SPAN = re.compile(r"`[^`]*`")
LINK = re.compile(r"\]\([^)]*\)")
GLUE = "\0"


def glued(match):
    text = match.group(0)
    return text.replace(" ", GLUE) if len(text) <= 60 else text


def fill(lines):
    item = ITEM.match(lines[0])
    first = item.group(0) if item else re.match(r"\s*", lines[0]).group(0)
    rest = " " * len(first)
    words = " ".join([lines[0][len(first) :].strip()] + [line.strip() for line in lines[1:]])
    words = LINK.sub(glued, CODE_SPAN.sub(glued, MARKER.sub(GLUE, re.sub(r"\s+", " ", words))))
    filled = textwrap.wrap(
        words, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(GLUE, " ") for line in filled]


def wrap(text):
    out, block, code = [], [], False

    def flush():
        if block:
            out.extend(fill(block))
            block.clear()

    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        if fence or code:
            flush()
            code = code != fence
            out.append(line)
        elif HEADING.match(line):
            flush()
            out.extend([""] * bool(out and out[-1]) + [line.rstrip(), ""])
        elif not line.strip() or line.lstrip().startswith(("|", "<")):
            flush()
            out.append(line.rstrip())
        else:
            if ITEM.match(line):
                flush()
            block.append(line)
    flush()
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).rstrip("\n") + "\n"


def main():
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(wrap(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
