#!/usr/bin/env bash
# Every way to spread a layer over 2 to 8 processes (tp, pcp, dp, ep, sp, placement, transport,
# reduction) against one rank, on the bundled checkpoints and those named.
#   scripts/rank-matrix.sh [BUILD_DIR [FOLDER...]]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/dev}
shift || true
cmake --build "$build" --target mpi_matrix
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_btl_vader_single_copy_mechanism=none OMP_NUM_THREADS=1
exec mpirun --oversubscribe -n "${RANKS:-8}" "$build/tests/layer/mpi_matrix" "${EVERY:-1}" testdata/models/* "$@"
