// What the loops that measure ceilings do: their results, and their instructions in the machine
// code of every tier. A compiler that merges chains or drops loads makes a ceiling that nothing can
// reach, or one that everything passes.
#include "cpu/ceilings.h"

#include <dlfcn.h>
#include <elf.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/instrumented.h"
#include "cpu/available_tiers.h"
#include "cpu/tile_model_kernels.h"

namespace moesaic::cpu {
namespace {

// Small integers, so that every order of exact sums is right: starts differ everywhere.
std::vector<float> integer_operands() {
  std::vector<float> operands(kMultiplyAddFloats);
  for (int i = 0; i < 16 * kMaxMultiplyAddChains; ++i)
    operands[static_cast<std::size_t>(i)] = static_cast<float>(i + 1);
  for (int lane = 0; lane < 16; ++lane) {
    float* const constants = operands.data() + 16 * kMaxMultiplyAddChains + lane;
    constants[0] = 1;
    constants[16] = -1;
    constants[32] = static_cast<float>(lane % 3 + 1);
  }
  return operands;
}

bool on_tiles(const CpuKernels& kernels) {
  return std::string_view(kernels.name).starts_with("amx");
}

TEST(Ceilings, EveryChainIsComputedFromItsOwnStart) {
  constexpr int kIterations = 101;
  for (const CpuKernels* kernels : tiers()) {
    for (const OperandKind operand : {OperandKind::kF32, kernels->narrow_operand}) {
      if (on_tiles(*kernels) && operand == OperandKind::kBF16) continue;
      const std::vector<float> before = integer_operands();
      std::vector<float> after = before;
      const double flops = kernels->multiply_add_loop(operand, kIterations, after.data());
      const bool pairs = operand == OperandKind::kBF16;
      const int sums = static_cast<int>(flops / (kIterations * (pairs ? 4 : 2)));
      int lanes = 4;
      while (lanes < 16 && lanes * multiply_add_chains(lanes) != sums) lanes *= 2;
      const int chains = multiply_add_chains(lanes);
      ASSERT_EQ(sums, lanes * chains) << kernels->name;
      for (int chain = 0; chain < chains; ++chain) {
        for (int lane = 0; lane < lanes; ++lane) {
          const auto at = static_cast<std::size_t>(16 * chain + lane);
          const float x = chain % 2 == 0 ? 1.0F : -1.0F;
          const auto y = static_cast<float>(lane % 3 + 1);
          float want = before[at];
          for (int n = 0; n < kIterations; ++n) want = pairs ? want + 2 * x * y : want * x + y;
          ASSERT_EQ(after[at], want) << kernels->name << " chain " << chain << " lane " << lane;
        }
      }
    }
  }
}

std::int32_t halves(std::int32_t low, std::int32_t high) {
  return static_cast<std::int32_t>((static_cast<std::uint32_t>(high) << 16) |
                                   (static_cast<std::uint32_t>(low) & 0xFFFFU));
}

TEST(Ceilings, EveryIntegerChainIsComputedFromItsOwnStart) {
  constexpr int kIterations = 101;
  const auto pairs_store =
      kernels_avx2_pairs() == nullptr ? nullptr : kernels_avx2_pairs()->store_i8;
  for (const CpuKernels* kernels : tiers()) {
    if (kernels->store_i8 == nullptr || on_tiles(*kernels)) continue;  // no 8-bit dot product
    std::vector<std::int32_t> words(kMultiplyAddFloats);
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = static_cast<std::int32_t>(i);
    for (std::size_t lane = 0; lane < 16; ++lane) {
      std::int32_t* const constants = words.data() + 16 * kMaxMultiplyAddChains + lane;
      constants[0] = static_cast<std::int32_t>(0xFF000001U);  // 255, 0, 0, 1
      constants[16] = 0x00000100;
      constants[32] = static_cast<std::int32_t>(0xFF008002U);  // -1, 0, -128, 2
    }
    std::vector<std::int32_t> after = words;
    const bool in_pairs = kernels->store_i8 == pairs_store;
    const double ops = kernels->multiply_add_loop_i8(kIterations, after.data());
    const int sums = static_cast<int>(ops / (kIterations * 8));
    int lanes = 4;
    while (lanes < 16 && lanes * multiply_add_chains(lanes) != sums) lanes *= 2;
    ASSERT_EQ(sums, lanes * multiply_add_chains(lanes)) << kernels->name;
    for (int chain = 0; chain < multiply_add_chains(lanes); ++chain) {
      for (int lane = 0; lane < lanes; ++lane) {
        const auto at = static_cast<std::size_t>(16 * chain + lane);
        const int low = chain % 2 == 0 ? 2 : -128, high = chain % 2 == 0 ? -255 : 0;
        const int want =
            in_pairs ? halves(words[at] + kIterations * low, (words[at] >> 16) + kIterations * high)
                     : words[at] + kIterations * (low + high);
        ASSERT_EQ(after[at], want) << kernels->name << " chain " << chain << " lane " << lane;
      }
    }
  }
}

// On the model of tile registers too.
TEST(Ceilings, EveryTileIsComputedFromItsOwnStart) {
  constexpr std::int64_t kIterations = 3 * 8;
  int tested = 0;
  for (const CpuKernels* kernels : tiers_and_model()) {
    if (!on_tiles(*kernels)) continue;
    ++tested;
    const std::vector<float> before = integer_operands();
    std::vector<float> after = before;
    const double flops = kernels->multiply_add_loop(OperandKind::kBF16, kIterations, after.data());
    EXPECT_EQ(flops, 3 * 5 * 2.0 * 16 * 16 * 32);
    for (std::size_t at = 0; at < before.size(); ++at) {
      const float x = at / 16 % 2 == 0 ? 1.0F : -1.0F;
      const auto y = static_cast<float>(at % 16 % 3 + 1);
      ASSERT_EQ(after[at], at < 5 * 16 ? before[at] + 3 * 32 * x * y : before[at])
          << kernels->name << " at " << at;
    }
    std::vector<std::int32_t> words(kMultiplyAddFloats);
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = static_cast<std::int32_t>(i);
    for (std::size_t lane = 0; lane < 16; ++lane) {
      std::int32_t* const constants = words.data() + 16 * kMaxMultiplyAddChains + lane;
      constants[0] = static_cast<std::int32_t>(0xFF000001U);  // -1, 0, 0, 1
      constants[16] = 0x00000100;
      constants[32] = static_cast<std::int32_t>(0xFF008002U);  // 255, 0, 128, 2
    }
    std::vector<std::int32_t> sums = words;
    EXPECT_EQ(kernels->multiply_add_loop_i8(kIterations, sums.data()), 3 * 5 * 2.0 * 16 * 16 * 64);
    for (std::size_t at = 0; at < words.size(); ++at) {
      const int product = at / 16 % 2 == 0 ? -255 + 2 : 128;
      ASSERT_EQ(sums[at], at < 5 * 16 ? words[at] + 3 * 16 * product : words[at])
          << kernels->name << " at " << at;
    }
  }
  if (tested == 0) GTEST_SKIP() << "no AVX512_BF16, which the rest of the tier needs";
}

TEST(Ceilings, EveryWordIsRead) {
  alignas(64) std::uint32_t words[1024 + 1024] = {};  // the loop prefetches beyond its end
  for (const CpuKernels* kernels : tiers()) {
    for (std::size_t at = 0; at < 1024; ++at) {
      words[at] = 0xA5000000U + static_cast<std::uint32_t>(at);
      ASSERT_EQ(kernels->read_loop(reinterpret_cast<const std::byte*>(words), 4096), words[at])
          << kernels->name;
      words[at] = 0;
    }
  }
}

// Not where calls of a sanitizer stand between the loads.
#if defined(__x86_64__) && !MOESAIC_INSTRUMENTED
struct Instruction {
  std::uint64_t address = 0;
  std::string name;
  std::string operands;  // the last one is the destination
};

// The instructions of a function of this program, as objdump prints them; empty without objdump.
std::vector<Instruction> disassemble(const void* function) {
  Dl_info info{};
  if (::dladdr(function, &info) == 0) return {};
  Elf64_Ehdr header{};
  std::ifstream(info.dli_fname, std::ios::binary)
      .read(reinterpret_cast<char*>(&header), sizeof(header));
  auto begin = reinterpret_cast<std::uint64_t>(function);
  if (header.e_type == ET_DYN) begin -= reinterpret_cast<std::uint64_t>(info.dli_fbase);
  const std::string command =
      "objdump -d --no-show-raw-insn --start-address=" + std::to_string(begin) +
      " --stop-address=" + std::to_string(begin + 4096) + " '" + info.dli_fname + "' 2>/dev/null";
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return {};
  std::vector<Instruction> list;
  bool ended = false;
  for (char line[512]; std::fgets(line, sizeof(line), pipe) != nullptr;) {
    const std::string text(line, std::strcspn(line, "\n"));
    if (text.ends_with(">:")) ended = ended || !list.empty();  // the next function
    const std::size_t colon = text.find(":\t");
    if (ended || colon == std::string::npos) continue;
    Instruction& i = list.emplace_back();
    const std::string_view vex = "{vex} ";
    const bool prefixed = std::string_view(text).substr(colon + 2).starts_with(vex);
    i.address = std::strtoull(text.c_str(), nullptr, 16);
    const std::size_t name = colon + 2 + (prefixed ? vex.size() : 0);
    const std::size_t blank = std::min(text.find(' ', name), text.size());
    i.name = text.substr(name, blank - name);
    const std::size_t rest = text.find_first_not_of(' ', blank);
    if (rest != std::string::npos) i.operands = text.substr(rest);
  }
  ::pclose(pipe);
  return list;
}

// Runs of instructions that a jump backwards at their end repeats, without those that hold another.
std::vector<std::vector<Instruction>> inner_loops(const std::vector<Instruction>& code) {
  std::vector<std::vector<Instruction>> loops;
  std::size_t after_last = 0;
  for (std::size_t end = 0; end < code.size(); ++end) {
    if (code[end].name[0] != 'j') continue;
    const std::uint64_t target = std::strtoull(code[end].operands.c_str(), nullptr, 16);
    for (std::size_t begin = after_last; begin <= end; ++begin) {
      if (code[begin].address != target) continue;
      loops.emplace_back(code.begin() + static_cast<std::ptrdiff_t>(begin),
                         code.begin() + static_cast<std::ptrdiff_t>(end));
      after_last = end + 1;
      break;
    }
  }
  return loops;
}

std::string destination(const Instruction& i) {
  return i.operands.substr(i.operands.rfind(',') + 1);
}

// Destinations of the instructions of a loop whose name starts with one of `names`.
std::set<std::string> destinations(const std::vector<Instruction>& loop, std::string_view name) {
  std::set<std::string> found;
  for (const Instruction& i : loop) {
    if (i.name.starts_with(name)) found.insert(destination(i));
  }
  return found;
}

struct Tier {
  const CpuKernels* kernels;
  const char* multiply;   // of the fp32 chains
  const char* add;        // or null: part of it
  const char* registers;  // of the tier's width
  int bytes;
};

// Static: also tiers that this machine cannot run.
std::vector<Tier> all_tiers() {
  return {{kernels_baseline(), "mulps", "addps", "%xmm", 16},
          {kernels_avx2(), "vfmadd", nullptr, "%ymm", 32},
          {kernels_avx512(), "vfmadd", nullptr, "%zmm", 64},
          {kernels_avx512_bf16(), "vfmadd", nullptr, "%zmm", 64}};
}

#define REQUIRE_OBJDUMP()                                                                \
  if (disassemble(reinterpret_cast<const void*>(kernels_baseline()->read_loop)).empty()) \
  GTEST_SKIP() << "objdump is not there, or cannot read this program"

// One destination per chain, each in a register of full width, in one loop.
void expect_chains(const Tier& tier, const char* instruction) {
  const bool integers =
      std::string_view(instruction) == "vpdpbusd" || std::string_view(instruction) == "vpaddw";
  const auto code =
      disassemble(integers ? reinterpret_cast<const void*>(tier.kernels->multiply_add_loop_i8)
                           : reinterpret_cast<const void*>(tier.kernels->multiply_add_loop));
  std::size_t most = 0;
  for (const auto& loop : inner_loops(code)) {
    const std::set<std::string> found = destinations(loop, instruction);
    for (const std::string& name : found) {
      EXPECT_TRUE(name.starts_with(tier.registers)) << tier.kernels->name << ": " << name;
    }
    most = std::max(most, found.size());
  }
  EXPECT_EQ(most, static_cast<std::size_t>(multiply_add_chains(tier.bytes / 4)))
      << tier.kernels->name << ": chains of " << instruction << " in the machine code";
}

TEST(CeilingsMachineCode, ChainsAreNotMerged) {
  REQUIRE_OBJDUMP();
  for (const Tier& tier : all_tiers()) {
    expect_chains(tier, tier.multiply);
    if (tier.add != nullptr) expect_chains(tier, tier.add);
    if (tier.kernels->multiply_add_loop_i8 != nullptr) expect_chains(tier, "vpdpbusd");
  }
  expect_chains({kernels_avx2_pairs(), nullptr, nullptr, "%ymm", 32}, "vpaddw");
  expect_chains(all_tiers().back(), "vdpbf16ps");
}

TEST(CeilingsMachineCode, TilesAreNotMerged) {
  REQUIRE_OBJDUMP();
  const CpuKernels& amx = *kernels_amx();  // also where the machine cannot run it
  for (const auto& [function, name] :
       {std::pair{reinterpret_cast<const void*>(amx.multiply_add_loop), "tdpbf16ps"},
        std::pair{reinterpret_cast<const void*>(amx.multiply_add_loop_i8), "tdpbsud"}}) {
    std::size_t most = 0;
    for (const auto& loop : inner_loops(disassemble(function)))
      most = std::max(most, destinations(loop, name).size());
    EXPECT_EQ(most, 5U) << "tiles of sums of " << name << " in the machine code";
  }
}

TEST(CeilingsMachineCode, ReadsAreOfFullWidth) {
  REQUIRE_OBJDUMP();
  for (const Tier& tier : all_tiers()) {
    int most = 0;
    const auto code = disassemble(reinterpret_cast<const void*>(tier.kernels->read_loop));
    for (const auto& loop : inner_loops(code)) {
      int bytes = 0;
      for (const Instruction& i : loop) {
        if (i.operands.find('(') != std::string::npos && !i.name.starts_with("prefetch") &&
            destination(i).starts_with(tier.registers)) {
          bytes += tier.bytes;
        }
      }
      most = std::max(most, bytes);
    }
    EXPECT_TRUE(most >= 256 && most % 256 == 0)
        << tier.kernels->name << ": " << most << " bytes per turn of the loop";
  }
}
#endif

}  // namespace
}  // namespace moesaic::cpu
