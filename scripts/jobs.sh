#!/bin/sh
# Prints how many compile jobs this machine takes: one per core, at most one per 1.5 GB of free memory.
cores=$(nproc 2>/dev/null || echo 1)
free_kb=$(sed -n 's/^MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo 2>/dev/null)
by_memory=$((${free_kb:-1572864} / 1572864))
[ "$by_memory" -lt 1 ] && by_memory=1
[ "$by_memory" -lt "$cores" ] && cores=$by_memory
echo "$cores"
