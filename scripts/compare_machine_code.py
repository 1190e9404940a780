#!/usr/bin/env python3
"""Compares the GPU machine code of two builds, kernel by kernel and instruction by instruction.

usage: compare_machine_code.py BEFORE AFTER [--rename OLD=NEW]... [--context N] [--list]

BEFORE and AFTER are files with device code (objects, libraries, programs, cubins) or folders, in which every
*.cu.o is taken. For each kernel of BEFORE one kernel of AFTER is found: of the same name (without namespaces,
parameters and template arguments, so that a change in how templates are spelled does not matter) and the same
code; else of any name and the same code, so that renamed kernels are found; else the most similar of those left
with the same name. --rename tells a new name where the code changed too.

Compared are opcodes, operands and predicates, in order, and registers, stack and shared memory of the kernel.
Not compared are addresses (a jump is written as its distance), encodings, control codes (stalls and barriers that
follow from the instructions) and tables of constants. --list prints identical kernels too.
Exit status: 0 when all kernels are identical, 1 when some differ, appear or vanish, 2 for wrong usage.
"""

import argparse
import difflib
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

FUNCTION = re.compile(r"^\s*Function : (\S+)\s*$")
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);?\s*/\*\s*0x[0-9a-f]+\s*\*/\s*$")
JUMPS = re.compile(r"^(@\S+ )?(BRA|BSSY|CALL|WARPSYNC|RET|JMP|BREAK|LEPC|YIELD)\b")
ADDRESS = re.compile(r"0x[0-9a-f]+")
RESOURCES = re.compile(r"^\s*Function (\S+):\s*$")


def tool(*names):
    for name in names:
        found = shutil.which(name) or f"/usr/local/cuda/bin/{name}"
        if os.access(found, os.X_OK):
            return found
    sys.exit(f"{' or '.join(names)} is needed: not on the PATH, nor in /usr/local/cuda/bin")


def device_files(path):
    path = Path(path)
    if path.is_dir():
        return sorted(path.rglob("*.cu.o"))
    if not path.is_file():
        sys.exit(f"{path}: no such file or folder")
    return [path]


def relative(address, text):
    """An instruction with the address it jumps to as a distance."""
    if not JUMPS.match(text):
        return text
    return ADDRESS.sub(lambda match: f"{int(match.group(), 16) - address:+d}", text)


def instructions(text):
    """Kernel name -> instructions, of what cuobjdump -sass prints."""
    kernels, lines = {}, None
    for line in text.splitlines():
        function = FUNCTION.match(line)
        if function:
            lines = kernels.setdefault(function.group(1), [])
            continue
        found = INSTRUCTION.match(line)
        if found and lines is not None:
            lines.append(relative(int(found.group(1), 16), " ".join(found.group(2).split())))
    return {name: tuple(lines) for name, lines in kernels.items()}


def resources(text):
    """Kernel name -> registers, stack and shared memory, of what cuobjdump -res-usage prints."""
    usage, name = {}, None
    for line in text.splitlines():
        found = RESOURCES.match(line)
        if found:
            name = found.group(1)
        elif name is not None and "REG:" in line:
            usage[name] = " ".join(word for word in line.split() if re.match(r"(REG|STACK|SHARED|LOCAL):", word))
            name = None
    return usage


def simple_name(demangled):
    """Without return type, namespaces, parameters and template arguments."""
    text, depth = "", 0
    for c in demangled.replace("(anonymous namespace)", "anonymous"):
        depth -= c in ">)"
        if depth == 0 and c not in "<>()":
            text += c
        if depth == 0 and c == ")":
            break
        depth += c in "<("
    return text.strip().split("::")[-1].split(" ")[-1]


def kernels_of(path):
    """[(simple name, full name, instructions, resources)]"""
    objdump, found = tool("cuobjdump"), []
    for file in device_files(path):
        sass = instructions(subprocess.run([objdump, "-sass", str(file)], capture_output=True, text=True).stdout)
        usage = resources(subprocess.run([objdump, "-res-usage", str(file)], capture_output=True, text=True).stdout)
        found += [(name, lines, usage.get(name, "")) for name, lines in sass.items()]
    if not found:
        sys.exit(f"{path}: no device code")
    names = "\n".join(name for name, _, _ in found)
    demangled = subprocess.run([tool("cu++filt", "c++filt")], input=names, capture_output=True, text=True).stdout.splitlines()
    return [(simple_name(full), full, lines, usage) for full, (_, lines, usage) in zip(demangled, found)]


def similarity(a, b):
    return difflib.SequenceMatcher(None, a, b, autojunk=False).quick_ratio()


def match(before, after, renames):
    """Pairs (kernel of before or None, kernel of after or None)."""
    pairs, left = [], []
    by_code = defaultdict(list)
    for kernel in after:
        by_code[kernel[2:]].append(kernel)
    taken = set()

    def take(kernel, candidates):
        for other in candidates:
            if id(other) not in taken:
                taken.add(id(other))
                pairs.append((kernel, other))
                return True
        return False

    for kernel in before:
        name = renames.get(kernel[0], kernel[0])
        if not take(kernel, [k for k in by_code[kernel[2:]] if k[0] == name]):
            left.append(kernel)
    still = [kernel for kernel in left if not take(kernel, by_code[kernel[2:]])]
    candidates = []
    for kernel in still:
        name = renames.get(kernel[0], kernel[0])
        for other in after:
            if id(other) not in taken and other[0] == name:
                candidates.append((similarity(kernel[2], other[2]), kernel, other))
    unmatched = {id(kernel): kernel for kernel in still}
    for _, kernel, other in sorted(candidates, key=lambda c: -c[0]):
        if id(kernel) in unmatched and take(kernel, [other]):
            del unmatched[id(kernel)]
    pairs += [(kernel, None) for kernel in unmatched.values()]
    pairs += [(None, kernel) for kernel in after if id(kernel) not in taken]
    return pairs


def describe(before, after, context):
    """What differs, in a few lines."""
    a, b = before[2], after[2]
    lines = []
    if before[3] != after[3]:
        lines.append(f"    resources: {before[3] or '-'} -> {after[3] or '-'}")
    changed = sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in
                  difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes() if tag != "equal") \
        if max(len(a), len(b)) <= 4000 else None
    first = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    if a != b:
        count = "" if changed is None else f", {changed} instructions changed, added or removed"
        lines.append(f"    {len(a)} -> {len(b)} instructions{count}; first difference at instruction {first}:")
        for sign, code in (("-", a), ("+", b)):
            lines += [f"      {sign} {line}" for line in code[first:first + context]]
    return lines


def main():
    parser = argparse.ArgumentParser(usage=__doc__, add_help=True)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--rename", action="append", default=[])
    parser.add_argument("--context", type=int, default=3)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    renames = dict(rename.split("=", 1) for rename in arguments.rename)
    pairs = match(kernels_of(arguments.before), kernels_of(arguments.after), renames)
    identical = 0
    for before, after in sorted(pairs, key=lambda pair: (pair[0] or pair[1])[1]):
        if before is None or after is None:
            print(f"{'only after ' if before is None else 'only before'}  {(before or after)[1]}")
        elif before[2:] == after[2:]:
            identical += 1
            if arguments.list:
                print(f"identical    {after[1]}  ({len(after[2])} instructions)")
        else:
            print(f"differs      {after[1]}")
            print("\n".join(describe(before, after, arguments.context)))
    print(f"{identical} of {len(pairs)} kernels identical")
    return 0 if identical == len(pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
