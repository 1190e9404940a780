#include "ceilings.h"

#include <map>
#include <utility>

#include "cpu/ceilings.h"
#include "cpu/tiers.h"

namespace moesaic::tool {
namespace {

cpu::OperandKind operand_of(const cpu::CpuKernels& kernels, Arithmetic arithmetic) {
  if (arithmetic == Arithmetic::kF32) return cpu::OperandKind::kF32;
  const bool integers = arithmetic == Arithmetic::kInt8 && kernels.store_i8 != nullptr;
  return integers ? cpu::OperandKind::kI8 : kernels.narrow_operand;
}

}  // namespace

Ceilings measure_ceilings(int threads, Arithmetic arithmetic) {
  static std::map<std::pair<Arithmetic, int>, Ceilings> done;
  const auto found = done.find({arithmetic, threads});
  if (found != done.end()) return found->second;
  Ceilings ceilings;
  const auto kernels = cpu::current_kernels();
  if (kernels.ok()) {
    const auto measured =
        cpu::measure_ceilings(**kernels, operand_of(**kernels, arithmetic), threads);
    if (measured.ok()) ceilings = {measured->read_gbps, measured->gflops};
  }
  done[{arithmetic, threads}] = ceilings;
  return ceilings;
}

}  // namespace moesaic::tool
