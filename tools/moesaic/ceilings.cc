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

Result<Ceilings> measure_ceilings(int threads, Arithmetic arithmetic) {
  static std::map<std::pair<Arithmetic, int>, Ceilings> done;
  const auto found = done.find({arithmetic, threads});
  if (found != done.end()) return found->second;
  MOESAIC_ASSIGN_OR_RETURN(const cpu::CpuKernels* kernels, cpu::current_kernels());
  MOESAIC_ASSIGN_OR_RETURN(
      const cpu::Ceilings measured,
      cpu::measure_ceilings(*kernels, operand_of(*kernels, arithmetic), threads));
  return done[{arithmetic, threads}] = {measured.read_gbps, measured.gflops};
}

}  // namespace moesaic::tool
