#!/usr/bin/env python3
"""Checks that nothing in the public headers is dead.

Every type, function and data member that include/moesaic/*.h declares has a use in the product: in src,
tools or examples, other than its own definition. What only engines beside this library need stands in
include/moesaic/interop (interop.h says who reads it) with its code in src/interop, and code there does
not count as a use: a name that nothing else wants belongs there too. In the interop headers every
function and every type that no function takes must have a test.

Names are compared as words, so a name shared with something in use passes; that is the price of a check
without a compiler.

usage: check_public_names.py SOURCE_DIR | check_public_names.py --self-test
"""

import re
import sys
from collections import Counter
from pathlib import Path

sys.dont_write_bytecode = True  # nothing is written into the source folder
import planted  # noqa: E402

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
SUFFIXES = (".h", ".cc", ".cu", ".cuh")
WORD = re.compile(r"[A-Za-z_]\w*")
NOT_NAMES = {"operator", "static_assert", "decltype", "noexcept", "alignas", "requires", "explicit"}

# Names without a use by their nature, each with the reason.
ALLOWED = {
    "RowNumericsFlag": "its enumerators are used without it",
}


def code_of(path):
    text = path.read_text(encoding="utf-8")
    return DIRECTIVE.sub("", STRING.sub('""', COMMENT.sub("", text)))


def name_of(statement, scopes):
    """(name, kind) of what a statement at namespace or class scope declares, or None."""
    statement = re.sub(r"^(\s*(public|private|protected)\s*:(?!:))+", "", statement).strip()
    statement = re.sub(r"\[\[.*?\]\]", "", statement)
    # The next of several members with braced initialisers.
    following = re.match(r",\s*(\w+)\s*(?:=|$)", statement)
    if following:
        return following.group(1), "data"
    statement = re.sub(r"^template\s*<[^<>]*(?:<[^<>]*>[^<>]*)*>\s*", "", statement)
    if re.match(r"(friend|static_assert|namespace)\b", statement):
        return None
    if re.match(r"using\s+(enum|namespace)\b", statement):
        return None
    alias = re.match(r"using\s+(\w+)\s*=", statement)
    if alias:
        return alias.group(1), "type"
    kind = re.match(r"(?:enum\s+class|enum\s+struct|enum|class|struct|union)\s+(\w+)(.*)", statement, re.DOTALL)
    if kind:
        return (kind.group(1), "type") if kind.group(2).strip() != ";" else None
    pointer = re.match(r"[\w:<>\s*&]*\(\*(\w+)\)\s*\(", statement)
    if pointer:
        return pointer.group(1), "data"
    # The first parenthesis outside of template arguments makes a function.
    depth = 0
    for at, letter in enumerate(statement):
        if letter == "<":
            depth += 1
        elif letter == ">":
            depth = max(0, depth - 1)
        elif letter == "(" and depth == 0:
            before = statement[:at].rstrip()
            words = WORD.findall(before)
            if "operator" in words or not words or before.endswith(("=", "~")) or "~" in before:
                return None
            name = words[-1]
            return None if name in scopes or name in NOT_NAMES else (name, "function")
        elif letter in "=," and depth == 0:
            statement = statement[:at]
            break
    head = re.sub(r"<.*>", " ", statement, flags=re.DOTALL).rstrip("; \n")
    head = re.sub(r"\[[^\]]*\]\s*$", "", head).rstrip()
    words = WORD.findall(head)
    return (words[-1], "data") if len(words) >= 2 and not head.endswith(("}", ")")) else None


def further_names(statement):
    """b and c of `int a = 0, b = 0, c;`."""
    flat = re.sub(r"<[^<>]*(?:<[^<>]*>[^<>]*)*>|\{[^{}]*\}|\([^()]*\)", " ", statement)
    words = [WORD.search(part) for part in flat.split(",")[1:]]
    return [word.group(0) for word in words if word]


def scopes_of(stack):
    return {name for _, name in stack if name}


def prefix_of(stack):
    return "".join(f"{name}::" for _, name in stack if name)


def declared_names(path):
    """(name, kind, line) of what a header declares; private members, bodies and enumerators left out."""
    return [(name, kind, line) for name, kind, line, _ in qualified_names(path) if kind != "enumerator"]


def qualified_names(path):
    """(name, kind, line, "Outer::Inner::") of what a header declares, enumerators too."""
    text = code_of(path)
    names, stack, start = [], [], 0
    private = [False]
    for match in re.finditer(r"[{};]|\b(?:public|private|protected)\s*:(?!:)", text):
        token = match.group(0)
        inside = stack[-1][0] if stack else "namespace"
        if token[0] == "p":
            if inside == "class":
                private[-1] = not token.startswith("public")
                start = match.end()
            continue
        statement = text[start : match.start()]
        visible = inside in ("namespace", "class") and not any(private)
        if token == "{":
            words = statement.strip()
            words = re.sub(r"^template\s*<[^<>]*(?:<[^<>]*>[^<>]*)*>\s*", "", words)
            if inside in ("body", "enum"):
                kind = "body"
            elif words.startswith("namespace") or words.startswith("extern"):
                kind = "namespace"
            elif re.match(r"(class|struct|union)\b", words):
                kind = "class"
            else:
                kind = "body"
            found = name_of(statement, scopes_of(stack)) if visible and kind != "namespace" else None
            if found:
                names.append((*found, text.count("\n", 0, match.start()) + 1, prefix_of(stack)))
            if found and re.match(r"enum\b", words):
                kind = "enum"
            own = found[0] if kind in ("class", "enum") and found else None
            # A member with a braced initialiser ends at its semicolon.
            stack.append((kind, own))
            private.append(kind == "class" and words.startswith("class"))
            start = match.end()
        elif token == "}":
            if stack:
                if inside == "enum":
                    line = text.count("\n", 0, start) + 1
                    for item in statement.split(","):
                        word = WORD.search(item)
                        if word:
                            names.append((word.group(0), "enumerator", line, prefix_of(stack)))
                stack.pop()
                private.pop()
            start = match.end()
        else:
            if visible and statement.strip():
                found = name_of(statement + ";", scopes_of(stack))
                if found:
                    line = text.count("\n", 0, match.start()) + 1
                    names.append((*found, line, prefix_of(stack)))
                    if found[1] == "data":
                        names += [(name, "data", line, prefix_of(stack)) for name in further_names(statement)]
            start = match.end()
    return names


def words_used(paths):
    """Words of the code; at the beginning of a line what is followed by a parenthesis is a definition."""
    used = set()
    for path in paths:
        for line in code_of(path).splitlines():
            if line[:1] in (" ", "\t"):
                used.update(WORD.findall(line))
                continue
            for match in WORD.finditer(line):
                if line[match.end() : match.end() + 1] != "(":
                    used.add(match.group(0))
    return used


def files(*folders):
    return sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in SUFFIXES)


def check(root):
    problems = []
    count = 0
    public = sorted((root / "include" / "moesaic").glob("*.h"))
    interop = files(root / "include" / "moesaic" / "interop")
    product = [p for p in files(root / "src", root / "tools", root / "examples")
               if (root / "src" / "interop") not in p.parents]
    used = words_used(product)
    mentions = Counter(word for path in public for word in WORD.findall(code_of(path)))
    allowed = set()
    for path in public:
        for name, kind, line in declared_names(path):
            count += 1
            # A type may be there for another public declaration's sake, which is then looked at itself.
            if name in used or (kind == "type" and mentions[name] > 1):
                continue
            if name in ALLOWED:
                allowed.add(name)
                continue
            problems.append(
                f"{path.relative_to(root)}:{line}: '{name}' has no use in src, tools or examples: "
                "give it one, move it to moesaic/interop, or delete it"
            )
    tested = words_used(files(root / "tests"))
    mentions = Counter(word for path in interop for word in WORD.findall(code_of(path)))
    for path in interop:
        for name, kind, line in declared_names(path):
            count += 1
            if kind == "data" or name in tested or (kind == "type" and mentions[name] > 1):
                continue
            problems.append(f"{path.relative_to(root)}:{line}: '{name}' has no test")
    for name in sorted(set(ALLOWED) - allowed):
        problems.append(f"{Path(__file__).name}: '{name}' is allowed without need")
    return problems, count


def just_this_name(expected, problems):
    return len(problems) == 1 and f"'{expected}'" in problems[0]


def self_test():
    good = {
        "include/moesaic/a.h": (
            "namespace moesaic {\n"
            "enum class Kind : int { kOne };\n"
            "struct Options {\n  int depth = 0;  // dead_word(\n};\n"
            "class Thing {\n public:\n  explicit Thing(int n);\n  ~Thing();\n"
            "  static int make(const Options& o, std::function<void(int)> f = {});\n"
            "  int size() const { return hidden_; }\n\n private:\n  int hidden_ = 0;\n};\n"
            "int twice(int n);\n"
            "}  // namespace moesaic\n"
        ),
        "include/moesaic/interop/b.h": "namespace moesaic {\nint order(int n);\n}\n",
        "src/core/a.cc": "int twice(int n) {\n  Options o;\n  Kind k;\n  o.depth = n;\n  return 2 * Thing::make(o).size();\n}\n",
        "src/interop/b.cc": "int order(int n) { return n; }\n",
        "tools/t.cc": "int main() {\n  return twice(1);\n}\n",
        "tests/t.cc": "void t() {\n  order(1);\n}\n",
    }
    header = "include/moesaic/c.h"
    faults = {
        "function": ({header: "int alone(int n);\n", "src/core/c.cc": "int alone(int n) { return n; }\n"}, "alone"),
        "defined and tested only": (
            {header: "int alone(int n);\n", "tests/c.cc": "void t() {\n  alone(1);\n}\n"}, "alone"
        ),
        "used by interop only": (
            {header: "int alone(int n);\n", "src/interop/c.cc": "int x() {\n  return alone(1);\n}\n"}, "alone"
        ),
        "in a comment": ({header: "int alone(int n);\n", "src/core/c.cc": "int x() {\n  // alone(1)\n}\n"}, "alone"),
        "type": ({header: "struct Lonely {};\n"}, "Lonely"),
        "option": ({header: "struct Options {\n  bool never = false;\n};\n"}, "never"),
        "option of several": ({header: "struct Options {\n  int depth = 0, never = 0;\n};\n"}, "never"),
        "first of several": ({header: "struct Options {\n  int never, depth;\n};\n"}, "never"),
        "braced": ({header: "struct Options {\n  Kind depth = {}, never = {};\n};\n"}, "never"),
        "pointer": ({header: "struct Options {\n  int (*never)(int depth) = nullptr;\n};\n"}, "never"),
        "method": ({header: "class Thing {\n public:\n  int never() const;\n};\n"}, "never"),
        "interop without a test": ({"include/moesaic/interop/c.h": "int bare(int n);\n"}, "bare"),
    }
    problems_of = lambda root: [p for p in check(root)[0] if "is allowed" not in p]  # noqa: E731
    return planted.self_test(good, faults, problems_of, just_this_name)


if __name__ == "__main__":
    sys.exit(planted.main(__doc__, check, self_test, "public names"))
