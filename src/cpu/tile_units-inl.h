// The units that tiles read next, a block of them at a time.
#if defined(MOESAIC_CPU_TILE_UNITS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_TILE_UNITS_INL_H_
#undef MOESAIC_CPU_TILE_UNITS_INL_H_
#else
#define MOESAIC_CPU_TILE_UNITS_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "core/checked.h"
#include "cpu/panel_sources_tiles-inl.h"

#if MOESAIC_TIER_BF16
MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// A block begins, is decoded in parts (if the source's weights are codes) while tiles read the one
// before, and is finished. What is not a whole number of tiles ends in zeros.
template <class Source>
class TileUnits {
 public:
  static constexpr std::int64_t kBytes = Source::kBlockBytes / 4 * kUnitBytes;  // of a full block

  explicit TileUnits(const PanelArgs& args) : source_(args) {}

  // Steps from k0 on, whose first unit is w; none beyond the end. False: see Pairs::Begin.
  HWY_INLINE bool Begin(const PanelArgs& args, const TileSteps& steps, const std::byte* w,
                        std::int64_t k0) {
    count_ = std::clamp<std::int64_t>(args.padded_k - k0, 0, steps.block);
    padded_ = round_up(count_, std::int64_t{steps.product});
    w_ = w;
    end_ = w + count_ / Source::kSteps * Source::kBytes;
    in_place_ = !Source::kDecodes && count_ == padded_;
    if (Source::kDecodes) buffer_ = 1 - buffer_;
    out_ = buffers_ + buffer_ * kBytes;
    block_ = in_place_ ? w : out_;
    return count_ == 0 || source_.Begin(args, k0);
  }
  // The next `units` of them, if there are as many.
  HWY_INLINE void Decode(std::int64_t units) {
    units = std::min<std::int64_t>(units, (end_ - w_) / Source::kBytes);
    source_.Decode(w_, units, out_);
    w_ += units * Source::kBytes;
    out_ += units * Source::kExpands * kUnitBytes;
  }
  HWY_INLINE void Finish() {
    if (in_place_) return;
    Decode(count_);
    const std::int64_t bytes = (padded_ - count_) * Source::Operand::kStepBytes;
    std::memset(out_, 0, static_cast<std::size_t>(bytes / 4 * kUnitBytes));
  }

  const std::byte* block() const { return block_; }
  const std::byte* end() const { return end_; }  // in the panel
  std::int64_t count() const { return count_; }  // steps
  std::int64_t padded() const { return padded_; }

 private:
  alignas(64) std::byte buffers_[(Source::kDecodes ? 2 : 1) * kBytes];
  Source source_;
  const std::byte* w_ = nullptr;  // what is left in the panel
  const std::byte* end_ = nullptr;
  std::byte* out_ = nullptr;  // where that goes
  const std::byte* block_ = nullptr;
  std::int64_t count_ = 0, padded_ = 0;
  bool in_place_ = false;
  int buffer_ = 0;
};

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();
#endif  // MOESAIC_TIER_BF16

#endif  // per-target include guard
