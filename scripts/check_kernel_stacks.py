#!/usr/bin/env python3
"""Fails when a GPU kernel of a program keeps more on its stack than it is known to: registers that are spilled.

usage: check_kernel_stacks.py PROGRAM

What is allowed: 32 bytes in the grouped-GEMM kernel and the router's, whose main loops keep nothing there (values
of the epilogue wait outside of them), and what KNOWN says of others. A kernel with no stack needs no line.
Exit status: 0, 1 with the kernels that have more, 2 for wrong usage or a missing cuobjdump.
"""

import re
import shutil
import subprocess
import sys

# Part of the mangled symbol (an expression): bytes. The widest builds of formats whose sums are taken out have a few
# words there in their loops as well, and are faster than narrower ones; so have those of 48 columns, which are
# faster than 64 without.
TILE = "ENS0_9TokenTileILi"
RELU2 = "Lb0ELb1EEENS0_13Relu2Epilogue"
KNOWN = {
    r"\dsm90_grouped_expertsI": 32,
    rf"\dInt4Bf16{TILE}32E": 48,
    rf"\dInt4Bf16{TILE}48E": 72,
    rf"\dInt4Bf16{TILE}136E": 80,
    rf"\dInt4Narrow{TILE}48E": 40,
    rf"\dInt4Minima{TILE}48E": 40,
    rf"\dInt4Int8{TILE}48E": 56,
    rf"\dInt4Super(Int4)?{TILE}48E": 48,
    rf"\dInt4Int6(Super|SuperMinima)?{TILE}48E": 72,
    rf"\dInt4SuperInt6{TILE}48E": 72,
    rf"\dTableBf16{TILE}48E": 72,
    rf"\dInt4Fp8{TILE}136E": 64,
    rf"\d(Int8|Fp8)Bf16{TILE}128E": 48,
    rf"\dInt4Bf16{TILE}136E{RELU2}": 104,
    rf"\dTableBf16{TILE}48E{RELU2}": 80,
    rf"\dTableBf16{TILE}128E{RELU2}": 40,
    rf"\dInt8Bf16{TILE}128E{RELU2}": 64,
    rf"\dFp8Block{TILE}136E": 56,
    rf"\dFp8Row{TILE}136E": 48,
    r"\drouteI": 32,
    r"\dgate_fp32I": 80,
    r"\dgateI\w*Li16ELi4E": 104,
    r"\dalign_and_quantizeI": 8,
    r"\dpeer_answerE": 16,
}


def main() -> int:
    tool = shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")
    if len(sys.argv) != 2 or tool is None:
        print(__doc__ if tool else "cuobjdump is not on the PATH: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    done = subprocess.run([tool, "--dump-resource-usage", sys.argv[1]], capture_output=True, text=True, check=False)
    kernels = re.findall(r"Function (\S+):\s*\n?\s*REG:(\d+) STACK:(\d+)", done.stdout)
    if not kernels:
        print(f"{sys.argv[1]}: no kernel found\n{done.stderr}", file=sys.stderr)
        return 1
    bad = 0
    for name, registers, stack in kernels:
        allowed = max((most for part, most in KNOWN.items() if re.search(part, name)), default=0)
        if int(stack) > allowed:
            print(f"{name}: {stack} bytes of stack ({registers} registers), at most {allowed} are known")
            bad += 1
    print(f"{len(kernels)} kernels, {bad} with more stack than is known")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
