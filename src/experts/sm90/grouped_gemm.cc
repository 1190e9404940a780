// Which build of the grouped-GEMM kernel runs: host code, tested without a device.
#include "experts/sm90/grouped_gemm.h"

namespace moesaic::cuda {

GroupedVariant choose_grouped(GroupedFormat format, EpilogueKind epilogue, std::int64_t tokens,
                              std::int64_t top_k, std::int64_t experts, std::int64_t bands) {
  GroupedVariant v;
  v.format = format;
  v.epilogue = epilogue;
  // A group should hold every row of an ordinary expert, so that weights stream once. Uniform
  // routing gives rows per expert near the mean; twice the mean leaves room for skew.
  const std::int64_t mean = (tokens * top_k + experts - 1) / experts;
  v.max_columns = mean <= 8 ? 32 : mean <= 32 ? 64 : 128;
  // One token may have fewer items than there are multiprocessors: halves of them keep more busy.
  // fp8: while no pair gets a second item of GEMM1; past that whole bands, which are handed out to
  // whoever is free, are as fast (Qwen3-235B) or faster (3 to 6 % at 2 to 16 tokens). bf16, whose
  // items are twice as long: up to two (Qwen3-235B: about 4 % faster).
  constexpr std::int64_t kPairsOfMultiprocessors = 66;
  const std::int64_t items_of_pair = format == GroupedFormat::kBf16 ? 2 : 1;
  if (tokens <= 1 && top_k * bands <= items_of_pair * kPairsOfMultiprocessors &&
      epilogue == EpilogueKind::kSwiglu) {
    v.max_columns = kSplitColumns;
  }
  if (epilogue != EpilogueKind::kSwiglu) v.max_columns = 32;
  // Sharing weights between two CTAs pays where experts have two groups and the kernel waits for
  // memory traffic: measured for bf16, up to 9 % (fp8, which waits for its consumers: slower).
  v.paired = format == GroupedFormat::kBf16 && epilogue == EpilogueKind::kSwiglu && mean >= 96;
  return v;
}

#if MOESAIC_HAS_CUDA
int launch_grouped(const GroupedVariant& variant, const GroupedParams& params, int num_sms,
                   void* stream) {
  const bool fp8 = variant.format == GroupedFormat::kFp8Block;
  if (variant.epilogue != EpilogueKind::kSwiglu) {
    return fp8 ? launch_grouped_fp8_other(variant, params, num_sms, stream)
               : launch_grouped_bf16_other(variant, params, num_sms, stream);
  }
  return fp8 ? launch_grouped_fp8(variant, params, num_sms, stream)
             : launch_grouped_bf16(variant, params, num_sms, stream);
}
#endif

}  // namespace moesaic::cuda
