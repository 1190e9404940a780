#!/usr/bin/env python3
"""Checks what comments and documents refer to.

- A page named in a comment or a document exists, and so does every section that is cited of it:
  docs/spec/routing.md sections 2 and 7.1; docs/accuracy.md, section "When a bound holds". A range
  ("sections 2 to 9") is checked at its ends.
- Every relative link of a Markdown file leads to a file, and its #fragment to a heading.
- docs/performance.md is advice of one sitting: at most 120 lines. No line of a Markdown file outside
  tables and code is longer than 120 columns (scripts/wrap-docs.py fills paragraphs).

usage: check_citations.py SOURCE_DIR | check_citations.py --self-test
"""

import re
import sys
from pathlib import Path

sys.dont_write_bytecode = True  # nothing is written into the source folder
import planted  # noqa: E402

FOLDERS = ["bench", "cmake", "docs", "examples", "fuzz", "include", "scripts", "src", "testdata", "tests", "tools"]
CODE = {".h", ".cc", ".cu", ".cuh", ".cmake", ".in", ".py", ".sh", ".txt"}
MAX_COLUMNS = 120
MAX_LINES = {"docs/performance.md": 120}
# Files that talk of pages which are not of this tree.
SKIPPED = {"tests/build/check_citations.py"}

# A comment's text: markers at the beginning of lines are dropped and lines joined, because a
# citation may be broken over two of them.
MARKER = re.compile(r"\n\s*(?://+|#+|\*)?[ \t]*")
PAGE = re.compile(r"(?<![\w./*<-])([\w.-]+(?:/[\w.-]+)*\.md)\b")
NUMBER = r"\d+(?:\.\d+)*"
SECTIONS = re.compile(rf",?\s+sections?\s+({NUMBER}(?:(?:\s*,\s*(?:and\s+)?|\s+and\s+|\s+to\s+){NUMBER})*)")
TITLE = re.compile(r',?\s+section\s+"([^"]+)"')
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*$", re.MULTILINE)
LINK = re.compile(r"\]\(([^()\s]+)\)")
WHOLE_LINK = re.compile(r"\[[^\[\]]*\]\([^()\s]+\)")
FENCE = re.compile(r"^\s*```.*?^\s*```", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`[^`\n]*`")


def source_files(root):
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and (path.suffix in CODE or path.suffix == ".md"):
                yield path
    yield from sorted(root.glob("*.md"))


def headings(page):
    return HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))


def section_numbers(page):
    found = set()
    for title in headings(page):
        number = re.match(rf"({NUMBER})(?:\.|\s|$)", title)
        if number:
            found.add(number.group(1).rstrip("."))
    return found


def slugs(page):
    """Fragments of headings, as GitHub makes them."""
    seen, result = {}, set()
    for title in headings(page):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        result.add(slug if count == 0 else f"{slug}-{count}")
    return result


def find_page(root, path, name):
    for base in (root, path.parent):
        candidate = base / name
        if candidate.is_file():
            return candidate
    return None


def check_citations(root, path, text, problems):
    name = path.relative_to(root)
    for match in PAGE.finditer(text):
        page = find_page(root, path, match.group(1))
        if page is None:
            problems.append(f"{name}: cites {match.group(1)}, which does not exist")
            continue
        rest = text[match.end() :]
        numbers = SECTIONS.match(rest)
        if numbers:
            missing = [n for n in re.findall(NUMBER, numbers.group(1)) if n not in section_numbers(page)]
            for number in missing:
                problems.append(f"{name}: cites {match.group(1)} section {number}, which does not exist")
        title = TITLE.match(rest)
        if title and title.group(1) not in headings(page):
            problems.append(f'{name}: cites {match.group(1)} section "{title.group(1)}", which does not exist')


def check_links(root, path, text, problems):
    name = path.relative_to(root)
    for target in LINK.findall(CODE_SPAN.sub("", FENCE.sub("", text))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, fragment = target.partition("#")
        page = path if not file else (path.parent / file)
        if not page.exists():
            problems.append(f"{name}: links to {target}, which does not exist")
        elif fragment and page.suffix == ".md" and fragment not in slugs(page):
            problems.append(f"{name}: links to {target}, but that page has no such heading")


def check_size(root, path, text, problems):
    name = str(path.relative_to(root))
    lines = text.rstrip("\n").split("\n")
    if len(lines) > MAX_LINES.get(name, len(lines)):
        problems.append(f"{name}: got {len(lines)} lines, need at most {MAX_LINES[name]}")
    code = False
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and not line.lstrip().startswith(("|", "#", "<")) and len(line) > MAX_COLUMNS:
            problems.append(f"{name}:{number}: got {len(line)} columns, need at most {MAX_COLUMNS}")


def check(root):
    problems, files = [], 0
    for path in source_files(root):
        if str(path.relative_to(root)) in SKIPPED:
            continue
        files += 1
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".md":
            check_citations(root, path, re.sub(r"\s*\n\s*", " ", WHOLE_LINK.sub(" ", text)), problems)
            check_links(root, path, text, problems)
            check_size(root, path, text, problems)
        else:
            check_citations(root, path, MARKER.sub(" ", "\n" + text), problems)
    return problems, files


def just_this(expected, problems):
    return len(problems) == 1 and expected in problems[0]


def self_test():
    good = {
        "docs/spec/a.md": "# A\n\n## 1. One\n\n### 1.2 Half\n\n## 3. Three\n\n## Said twice\n\n## Said twice\n",
        "docs/performance.md": "line\n" * 120,
        "README.md": "[a](docs/spec/a.md#3-three), [again](docs/spec/a.md#said-twice-1), `[x](y)`\n\n| " + "x" * 200 + " |\n",
        "src/good.h": "// Source: docs/spec/a.md sections 1.2 and\n// 3; docs/spec/a.md, section \"Said twice\".\n",
    }
    faults = {
        "cites routing.md": ({"src/page.h": "// Source: spec\n// routing.md section 1.\n"}, "cites routing.md"),
        "section 2": ({"src/section.cc": "// docs/spec/a.md sections 1,\n// 2 and 3.\n"}, "section 2"),
        'section "Two"': ({"src/title.cu": '// docs/spec/a.md, section "Two".\n'}, 'section "Two"'),
        "links to gone.md": ({"docs/link.md": "[x](gone.md)\n"}, "links to gone.md"),
        "no such heading": ({"docs/fragment.md": "[x](spec/a.md#four)\n"}, "no such heading"),
        "121 columns": ({"docs/wide.md": "x" * 121 + "\n"}, "121 columns"),
        "121 lines": ({"docs/performance.md": "line\n" * 121}, "121 lines"),
    }
    return planted.self_test(good, faults, lambda root: check(root)[0], just_this)


if __name__ == "__main__":
    sys.exit(planted.main(__doc__, check, self_test, "files"))
