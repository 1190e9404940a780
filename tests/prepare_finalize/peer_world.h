// Virtual ranks whose peer windows lie on one GPU, and what their kernels must leave there, by the host.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "prepare_finalize/sm90/peer_rows.h"
#include "quant/fp8_group.h"
#include "support/cuda_device.h"
#include "support/random.h"

namespace moesaic::test {

using cuda::PeerPlace;
using cuda::PeerRouting;
using parallel::PeerAnswerForm;
using parallel::PeerKind;
using parallel::PeerOwnLine;
using parallel::PeerReport;

inline constexpr std::int32_t kExperts = 12;
inline constexpr std::uint64_t kGenerous = 2'000'000'000;  // ns

struct PeerShapeCase {
  int ranks = 2;
  std::int64_t tokens = 5, top_k = 3, hidden = 32;
  std::int32_t groups = 0;
  PeerAnswerForm form = PeerAnswerForm::kPartial;
  bool bf16 = false, gather = false;
  bool from_slots = false;  // partial answers are sums of bf16 slots
  std::string name() const {
    return std::to_string(ranks) + " ranks, " + std::to_string(groups) + " scales, " +
           (form == PeerAnswerForm::kSlot ? "slots"
            : gather                      ? "gather"
                                          : "partial") +
           (bf16 ? " bf16" : " fp32") + (from_slots ? " from slots" : "");
  }
  // Groups are of 128 columns.
  PeerShapeCase with_groups(std::int32_t count) const {
    PeerShapeCase c = *this;
    c.groups = count;
    if (count > 0) c.hidden = 128 * count;
    return c;
  }
  std::int64_t row_bytes() const { return groups > 0 ? hidden : 2 * hidden; }
  std::int64_t answer_bytes() const { return hidden * (bf16 ? 2 : 4); }
  std::int64_t results_per_row() const {
    return form == PeerAnswerForm::kSlot || from_slots ? top_k : 1;
  }
  bool bf16_results() const { return bf16 || from_slots; }
};

// To nearest, ties to even; no NaN comes here.
inline float round_to_bf16(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000U;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float widen(std::uint16_t code) {
  const std::uint32_t bits = std::uint32_t{code} << 16;
  float value = 0;
  std::memcpy(&value, &bits, 4);
  return value;
}

// What one virtual rank has on the device, and what it sends, on the host.
struct VirtualRank {
  std::unique_ptr<DeviceBytes> window, state, rows, ids, weights;
  std::unique_ptr<DeviceBytes> arrived, arrived_scale, arrived_ids, arrived_weights, results, sum;
  std::unique_ptr<DeviceBytes> expert_map;
  PeerReport* report = nullptr;
  PeerPlace place;
  std::int64_t live = 0;
  std::vector<std::uint8_t> row_values;
  std::vector<float> scale_values, weight_values;
  std::vector<std::int32_t> id_values;
  std::vector<std::uint8_t> result_values;
};

class PeerWorld {
 public:
  PeerWorld(const PeerShapeCase& c, std::uint32_t epoch, std::uint64_t limit_ns = kGenerous)
      : c_(c), epoch_(epoch), ranks_(static_cast<std::size_t>(c.ranks)) {
    parallel::PeerShape shape;
    shape.ranks = c.ranks;
    shape.tokens = c.tokens;
    shape.top_k = c.top_k;
    shape.row_bytes = c.row_bytes();
    shape.scale_bytes = c.groups * 4;
    shape.answer_bytes = c.answer_bytes();
    shape.form = c.form;
    layout_ = parallel::make_peer_layout(shape).value();
    for (std::int32_t e = 0; e < kExperts; ++e) owners_.push_back(e * 7 % c.ranks);
    owner_ = std::make_unique<DeviceBytes>(owners_);
    const std::int64_t all = c.ranks * c.tokens;
    for (VirtualRank& r : ranks_) {
      r.window = std::make_unique<DeviceBytes>(layout_.bytes);
      // Poison but for words and own lines, which are those of calls before.
      std::vector<std::uint64_t> words(static_cast<std::size_t>(layout_.ids / 8));
      for (int kind = 1; kind < static_cast<int>(PeerKind::kRefuse); ++kind) {
        // Lines of copies count as kinds.
        for (int w = 0; w < c.ranks * 16; ++w) {
          words[static_cast<std::size_t>(layout_.word(static_cast<PeerKind>(kind), w / 16, w % 16) /
                                         8)] = parallel::pack_peer_word({epoch, 0, 77});
        }
      }
      words[static_cast<std::size_t>(layout_.own_line(PeerOwnLine::kLimits) / 8)] = limit_ns;
      for (const PeerOwnLine line : {PeerOwnLine::kEpoch, PeerOwnLine::kCall}) {
        words[static_cast<std::size_t>(layout_.own_line(line) / 8)] = epoch;
      }
      EXPECT_EQ(
          cudaMemcpy(r.window->as<void>(), words.data(), words.size() * 8, cudaMemcpyHostToDevice),
          cudaSuccess);
      r.state = std::make_unique<DeviceBytes>(std::vector<std::int32_t>(64, 0));
      r.rows = std::make_unique<DeviceBytes>(c.tokens * c.hidden * 2);
      r.ids = std::make_unique<DeviceBytes>(c.tokens * c.top_k * 4);
      r.weights = std::make_unique<DeviceBytes>(c.tokens * c.top_k * 4);
      r.arrived = std::make_unique<DeviceBytes>(all * c.row_bytes());
      r.arrived_scale = std::make_unique<DeviceBytes>(all * c.groups * 4 + 4);
      r.arrived_ids = std::make_unique<DeviceBytes>(all * c.top_k * 4);
      r.arrived_weights = std::make_unique<DeviceBytes>(all * c.top_k * 4);
      r.results = std::make_unique<DeviceBytes>(all * c.results_per_row() * c.hidden *
                                                (c.bf16_results() ? 2 : 4));
      std::vector<std::int32_t> map(kExperts);
      for (std::size_t e = 0; e < map.size(); ++e) {
        map[e] = owners_[e] == static_cast<std::int32_t>(&r - ranks_.data()) ? 0 : -1;
      }
      r.expert_map = std::make_unique<DeviceBytes>(map);
      r.sum = std::make_unique<DeviceBytes>(c.tokens * c.hidden * 4);
      EXPECT_EQ(cudaHostAlloc(reinterpret_cast<void**>(&r.report), sizeof(PeerReport),
                              cudaHostAllocPortable),
                cudaSuccess);
      *r.report = {};
    }
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      PeerPlace& p = ranks_[i].place;
      p.layout = layout_;
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        p.base[r] = ranks_[r].window->as<std::byte>();
      }
      p.rank = static_cast<std::int32_t>(i);
      p.signature = 77;
      p.tickets = ranks_[i].state->as<std::uint32_t>();
      p.live = ranks_[i].state->as<std::int32_t>() + 16;
      p.sent_to = ranks_[i].state->as<std::uint32_t>() + 48;
      p.report = ranks_[i].report;
      p.max_blocks = 3;
      p.shares_device = c.ranks % 2 == 0;  // of either kind
      p.most_waiting = 4;
    }
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  PeerWorld(const PeerWorld&) = delete;
  PeerWorld& operator=(const PeerWorld&) = delete;
  ~PeerWorld() {
    (void)cudaStreamSynchronize(stream_);
    (void)cudaStreamDestroy(stream_);
    for (const VirtualRank& r : ranks_) (void)cudaFreeHost(r.report);
  }

  VirtualRank& rank(int r) { return ranks_[static_cast<std::size_t>(r)]; }
  cudaStream_t stream() const { return stream_; }

  // New rows for rank r.
  void fill(int r, std::uint64_t seed, std::int64_t live) {
    Rng rng(seed * 64 + static_cast<std::uint64_t>(r));
    VirtualRank& v = rank(r);
    v.live = live;
    const auto bytes_of = [&](std::vector<std::uint8_t>& to, std::int64_t count) {
      to.resize(static_cast<std::size_t>(count));
      for (auto& b : to) b = static_cast<std::uint8_t>(rng.next());
    };
    bytes_of(v.row_values, c_.tokens * c_.hidden * 2);
    if (c_.groups > 0) make_finite(v.row_values);
    const auto floats_of = [&](std::vector<float>& to, std::int64_t count) {
      to.resize(static_cast<std::size_t>(count));
      for (float& f : to) f = static_cast<float>(rng.next() % 1000) - 300.0F;
    };
    floats_of(v.weight_values, c_.tokens * c_.top_k);
    v.id_values.resize(v.weight_values.size());
    for (std::int32_t& id : v.id_values) {  // also none and out of range
      id = static_cast<std::int32_t>(rng.next() % (kExperts + 3)) - 1;
    }
    v.rows->upload(v.row_values.data());
    if (c_.groups > 0) quantize(v);
    v.weights->upload(v.weight_values.data());
    v.ids->upload(v.id_values.data());
  }

  // bf16 numbers of any magnitude below 2^64 but zero, whose sign codes do not keep.
  static void make_finite(std::vector<std::uint8_t>& rows) {
    for (std::size_t i = 0; i < rows.size(); i += 2) {
      rows[i] |= 1;
      rows[i + 1] &= 0xDF;
    }
  }
  // Rows that are bf16 numbers become their codes and scales.
  void quantize(VirtualRank& v) const {
    const std::int64_t h = c_.hidden;
    std::vector<float> row(static_cast<std::size_t>(h)),
        scales(static_cast<std::size_t>(c_.groups));
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(c_.tokens * h));
    v.scale_values.assign(static_cast<std::size_t>(c_.tokens * c_.groups), 0.0F);
    for (std::int64_t t = 0; t < c_.tokens; ++t) {
      for (std::int64_t i = 0; i < h; ++i) {
        std::uint16_t code = 0;
        std::memcpy(&code, v.row_values.data() + (t * h + i) * 2, 2);
        row[static_cast<std::size_t>(i)] = widen(code);
      }
      quant::ref_quantize_fp8_row(row.data(), h, 128,
                                  power_of_two_scales() ? quant::ScaleRounding::kCeilPowerOfTwo
                                                        : quant::ScaleRounding::kNone,
                                  codes.data() + t * h, scales.data());
      for (std::int64_t g = 0; g < c_.groups; ++g) {
        v.scale_values[static_cast<std::size_t>(g * c_.tokens + t)] =
            scales[static_cast<std::size_t>(g)];
      }
    }
    v.row_values = std::move(codes);
  }
  bool all_ids() const { return c_.ranks % 2 == 0; }
  bool power_of_two_scales() const { return c_.groups == 3; }

  PeerRouting routing(const DeviceBytes& ids) const {
    return {ids.as<std::int32_t>(), c_.gather ? nullptr : owner_->as<std::int32_t>(), kExperts};
  }
  void send(int r, cudaStream_t on = nullptr) {
    VirtualRank& v = rank(r);
    cuda::PeerSendParams p;
    p.place = v.place;
    p.routing = routing(*v.ids);
    p.tokens = v.live;
    p.rows = v.rows->as<std::byte>();
    p.row_bytes = c_.row_bytes();
    p.groups = c_.groups;
    p.power_of_two_scales = power_of_two_scales();
    p.weights = v.weights->as<float>();
    EXPECT_EQ(cuda::launch_peer_send(p, on != nullptr ? on : stream_), 0);
  }
  void wait(int r, PeerKind kind, cudaStream_t on = nullptr) {
    EXPECT_EQ(cuda::launch_peer_wait(rank(r).place, kind, on != nullptr ? on : stream_), 0);
  }
  void take(int r, cudaStream_t on = nullptr) {
    VirtualRank& v = rank(r);
    cuda::PeerTakeParams p;
    p.place = v.place;
    p.routing = routing(*v.ids);
    p.row_bytes = c_.row_bytes();
    p.groups = c_.groups;
    p.rows = v.arrived->as<std::byte>();
    p.scale = v.arrived_scale->as<float>();
    p.scale_stride = c_.ranks * c_.tokens;
    p.ids = v.arrived_ids->as<std::int32_t>();
    p.weights = v.arrived_weights->as<float>();
    p.all_ids = all_ids();
    p.likely_tokens = 2;
    EXPECT_EQ(cuda::launch_peer_take(p, on != nullptr ? on : stream_), 0);
  }
  void answer(int r) {
    VirtualRank& v = rank(r);
    cuda::PeerAnswerParams p;
    p.place = v.place;
    p.routing = routing(*v.arrived_ids);
    p.likely_tokens = 2;
    if (c_.from_slots) {
      p.slots.rows = v.results->as<void>();
      p.expert_map = v.expert_map->as<std::int32_t>();
      p.hidden = static_cast<std::int32_t>(c_.hidden);
      p.bf16 = c_.bf16;
    } else {
      p.results = v.results->as<std::byte>();
    }
    EXPECT_EQ(cuda::launch_peer_answer(p, stream_), 0);
  }
  void sum(int r) {
    VirtualRank& v = rank(r);
    cuda::PeerSumParams p;
    p.place = v.place;
    p.routing = routing(*v.ids);
    p.tokens = v.live;
    p.hidden = static_cast<std::int32_t>(c_.hidden);
    p.bf16 = c_.bf16;
    p.to.output = v.sum->as<void>();
    EXPECT_EQ(cuda::launch_peer_sum(p, stream_), 0);
  }
  void synchronize() { ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess); }

  bool owns(int r, std::int32_t id) const {
    return id >= 0 && id < kExperts && owners_[static_cast<std::size_t>(id)] == r;
  }
  bool needs(int r, const VirtualRank& from, std::int64_t t) const {
    if (c_.gather) return true;
    for (std::int64_t j = 0; j < c_.top_k; ++j) {
      if (owns(r, from.id_values[static_cast<std::size_t>(t * c_.top_k + j)])) return true;
    }
    return false;
  }

  // A whole call; empty, or what is wrong.
  std::string call(std::uint64_t seed, const std::vector<std::int64_t>& live) {
    for (int r = 0; r < c_.ranks; ++r) fill(r, seed, live[static_cast<std::size_t>(r)]);
    for (int r = 0; r < c_.ranks; ++r) send(r);
    for (int r = 0; r < c_.ranks; ++r) {
      wait(r, PeerKind::kRows);
      take(r);
    }
    synchronize();
    for (int r = 0; r < c_.ranks; ++r) {
      if (std::string wrong = check_arrived(r); !wrong.empty()) return wrong;
      make_results(r, seed);
    }
    for (int r = 0; r < c_.ranks; ++r) answer(r);
    for (int r = 0; r < c_.ranks; ++r) {
      wait(r, PeerKind::kAnswers);
      sum(r);
    }
    synchronize();
    for (int r = 0; r < c_.ranks; ++r) {
      if (std::string wrong = check_sum(r); !wrong.empty()) return wrong;
      if (rank(r).report->code != 0) return "a report of rank " + std::to_string(r);
      std::uint32_t epoch = 0;
      EXPECT_EQ(cudaMemcpy(&epoch, rank(r).place.base[r] + layout_.own_line(PeerOwnLine::kEpoch), 4,
                           cudaMemcpyDeviceToHost),
                cudaSuccess);
      if (epoch != epoch_ + 1) return "epoch of rank " + std::to_string(r);
    }
    ++epoch_;
    return {};
  }

  std::string check_arrived(int r) {
    VirtualRank& v = rank(r);
    const auto ids = v.arrived_ids->values<std::int32_t>();
    const auto weights = v.arrived_weights->values<float>();
    const auto rows = v.arrived->values<std::uint8_t>();
    const auto scales = v.arrived_scale->values<float>();
    const std::int64_t k = c_.top_k, bytes = c_.row_bytes(), all = c_.ranks * c_.tokens;
    for (int s = 0; s < c_.ranks; ++s) {
      const VirtualRank& from = rank(s);
      for (std::int64_t t = 0; t < c_.tokens; ++t) {
        const std::int64_t row = s * c_.tokens + t;
        const std::string at =
            "rank " + std::to_string(r) + ": row " + std::to_string(t) + " of " + std::to_string(s);
        for (std::int64_t j = 0; j < k; ++j) {
          const auto here = static_cast<std::size_t>(row * k + j);
          const auto there = static_cast<std::size_t>(t * k + j);
          if (t >= from.live && !all_ids()) continue;
          if (ids[here] != (t < from.live ? from.id_values[there] : -1)) return at + ": ids";
          if (t < from.live && weights[here] != from.weight_values[there]) return at + ": weights";
        }
        if (t >= from.live || !needs(r, from, t)) continue;
        if (std::memcmp(rows.data() + row * bytes, from.row_values.data() + t * bytes,
                        static_cast<std::size_t>(bytes)) != 0) {
          return at + ": values";
        }
        for (std::int64_t g = 0; g < c_.groups; ++g) {
          if (scales[static_cast<std::size_t>(g * all + row)] !=
              from.scale_values[static_cast<std::size_t>(g * c_.tokens + t)]) {
            return at + ": scales";
          }
        }
      }
    }
    for (const auto* d : {v.window.get(), v.arrived.get(), v.arrived_scale.get(),
                          v.arrived_ids.get(), v.arrived_weights.get()}) {
      if (!d->margin_is_intact()) return "rank " + std::to_string(r) + ": written behind the end";
    }
    return {};
  }

  void make_results(int r, std::uint64_t seed) {
    VirtualRank& v = rank(r);
    Rng rng(seed * 1000 + static_cast<std::uint64_t>(r));
    const std::int64_t count = c_.ranks * c_.tokens * c_.results_per_row() * c_.hidden;
    v.result_values.resize(static_cast<std::size_t>(count * (c_.bf16_results() ? 2 : 4)));
    for (std::int64_t i = 0; i < count; ++i) {
      // Sums of these depend on their order.
      const float f = (static_cast<float>(rng.next() % 2000) - 1000.0F) *
                      (rng.next() % 2 == 0 ? 1.0F : 0x1p-22F);
      if (c_.bf16_results()) {
        std::uint32_t bits = 0;
        std::memcpy(&bits, &f, 4);
        const auto code = static_cast<std::uint16_t>(bits >> 16);
        std::memcpy(v.result_values.data() + i * 2, &code, 2);
      } else {
        std::memcpy(v.result_values.data() + i * 4, &f, 4);
      }
    }
    v.results->upload(v.result_values.data());
  }
  float result(int r, std::int64_t row, std::int64_t h) {
    const VirtualRank& v = rank(r);
    const std::int64_t i = row * c_.hidden + h;
    if (c_.bf16_results()) {
      std::uint16_t code = 0;
      std::memcpy(&code, v.result_values.data() + i * 2, 2);
      return widen(code);
    }
    float f = 0;
    std::memcpy(&f, v.result_values.data() + i * 4, 4);
    return f;
  }
  // What rank r answers for row `token` of `home`.
  float partial(int r, int home, std::int64_t token, std::int64_t h) {
    const std::int64_t row = home * c_.tokens + token;
    if (!c_.from_slots) return result(r, row, h);
    float sum = 0;
    for (std::int64_t j = 0; j < c_.top_k; ++j) {
      const auto slot = static_cast<std::size_t>(token * c_.top_k + j);
      if (owns(r, rank(home).id_values[slot])) sum += result(r, row * c_.top_k + j, h);
    }
    return c_.bf16 ? round_to_bf16(sum) : sum;
  }
  std::string check_sum(int home) {
    VirtualRank& v = rank(home);
    const auto got = v.sum->values<float>();
    for (std::int64_t t = 0; t < v.live; ++t) {
      const std::int64_t row = home * c_.tokens + t;
      for (std::int64_t h = 0; h < c_.hidden; ++h) {
        float want = 0;
        if (c_.form == PeerAnswerForm::kSlot) {
          for (std::int64_t j = 0; j < c_.top_k; ++j) {
            const std::int32_t id = v.id_values[static_cast<std::size_t>(t * c_.top_k + j)];
            if (id < 0 || id >= kExperts) continue;
            want += result(owners_[static_cast<std::size_t>(id)], row * c_.top_k + j, h);
          }
        } else {
          for (int r = 0; r < c_.ranks; ++r) {
            if (needs(r, v, t)) want += partial(r, home, t, h);
          }
        }
        const float is = got[static_cast<std::size_t>(t * c_.hidden + h)];
        if (std::memcmp(&is, &want, 4) != 0) {
          return "sum of rank " + std::to_string(home) + ", row " + std::to_string(t) +
                 ", column " + std::to_string(h) + ": got " + std::to_string(is) + ", need " +
                 std::to_string(want);
        }
      }
    }
    return {};
  }

 private:
  PeerShapeCase c_;
  std::uint32_t epoch_;  // of the last call
  parallel::PeerLayout layout_;
  std::vector<std::int32_t> owners_;
  std::unique_ptr<DeviceBytes> owner_;
  std::vector<VirtualRank> ranks_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace moesaic::test
