// One caller-owned block of bytes, carved front to back into 64-byte aligned pieces. Allocates
// nothing itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/checked.h"
#include "moesaic/status.h"

namespace moesaic {

inline constexpr std::int64_t kArenaAlignment = 64;

// Carves when constructed over memory; only adds up sizes when constructed empty with measure(), so
// that one function can both compute a workspace size and lay the workspace out.
class Arena {
 public:
  explicit Arena(std::span<std::byte> memory) : memory_(memory) {}
  static Arena measure() { return Arena(); }

  // Space for `count` elements of T, or nullptr when measuring. Overflow or exhaustion is
  // remembered in status().
  template <class T>
  T* take(std::int64_t count) {
    const auto bytes = checked_mul(count, static_cast<std::int64_t>(sizeof(T)));
    if (count < 0 || !bytes || *bytes > kMaxBytes || used_ > kMaxBytes) {
      status_ = Status(StatusCode::kLimitExceeded, "workspace: a size exceeds 2^62 bytes");
      return nullptr;
    }
    const std::int64_t begin = used_;
    used_ += round_up(*bytes, kArenaAlignment);
    if (measuring_) return nullptr;
    if (used_ > static_cast<std::int64_t>(memory_.size())) {
      exhausted_ = true;
      return nullptr;
    }
    return reinterpret_cast<T*>(memory_.data() + begin);
  }

  std::int64_t used() const { return used_; }
  // kWorkspaceTooSmall with the bytes given and needed so far, kLimitExceeded, or ok.
  Status status() const {
    if (!status_.ok()) return status_;
    if (!exhausted_) return {};
    return Status(StatusCode::kWorkspaceTooSmall, "workspace: got " +
                                                      std::to_string(memory_.size()) +
                                                      " bytes, need " + std::to_string(used_));
  }

 private:
  static constexpr std::int64_t kMaxBytes = std::int64_t{1} << 62;
  Arena() : measuring_(true) {}
  std::span<std::byte> memory_;
  std::int64_t used_ = 0;
  bool measuring_ = false;
  bool exhausted_ = false;
  Status status_;
};

}  // namespace moesaic
