// Ranks as threads that exchange rows through peer windows in ordinary memory, laid out by
// peer_control.h: words are atomic, everything else is plain memory, so that ThreadSanitizer sees
// an access that no word orders. Integers, compared by bits with a direct computation.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "parallel/peer_control.h"
#include "support/hang_guard.h"
#include "support/random.h"

namespace moesaic::parallel {
namespace {

constexpr int kExpertsOfRank = 2;
// So that a later call's epoch wraps.
constexpr std::uint32_t kFirstEpoch = 0xFFFFFFFBU;

struct SimulatedCase {
  int ranks, calls, tokens, top_k, columns;
  PeerAnswerForm form;
  std::uint64_t seed;
};

// What a rank brings to a call: a function of the seed, so that every rank can compute it.
struct CallInput {
  int live = 0;
  std::vector<std::int32_t> ids;       // [live][top_k], -1: none
  std::vector<std::uint32_t> weights;  // [live][top_k]
  std::vector<std::uint32_t> x;        // [live][columns]
};
CallInput input_of(const SimulatedCase& c, int rank, int call) {
  test::Rng rng(c.seed * 1000003 + static_cast<std::uint64_t>(call) * 1009 +
                static_cast<std::uint64_t>(rank));
  CallInput in;
  // None, all, or something in between.
  in.live = static_cast<int>(std::min<std::int64_t>(rng.integer(-1, c.tokens + 1), c.tokens));
  in.live = std::max(in.live, 0);
  for (int i = 0; i < in.live * c.top_k; ++i) {
    in.ids.push_back(static_cast<std::int32_t>(rng.integer(-1, c.ranks * kExpertsOfRank - 1)));
    in.weights.push_back(static_cast<std::uint32_t>(rng.integer(1, 7)));
  }
  for (int i = 0; i < in.live * c.columns; ++i) {
    in.x.push_back(static_cast<std::uint32_t>(rng.next()));
  }
  return in;
}
int owner_of(std::int32_t id) { return id < 0 ? -1 : id / kExpertsOfRank; }
std::uint32_t expert_output(std::int32_t id, std::uint32_t x) {
  return x * (2 * static_cast<std::uint32_t>(id) + 3) + 11 * static_cast<std::uint32_t>(id);
}

class Window {
 public:
  explicit Window(const PeerLayout& layout)
      : bytes_(layout.bytes),
        data_(static_cast<std::byte*>(::operator new(static_cast<std::size_t>(bytes_), kAlign))) {
    // Words say the epoch before the first; everything else is poison.
    std::memset(data_, 0xFF, static_cast<std::size_t>(bytes_));
    const std::uint64_t word = pack_peer_word({kFirstEpoch - 1, 0, 0});
    for (std::int64_t at = 0; at < layout.own_lines; at += kPeerLine) {
      std::memcpy(data_ + at, &word, sizeof(word));
    }
  }
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;
  ~Window() { ::operator delete(data_, kAlign); }

  std::atomic_ref<std::uint64_t> word(std::int64_t at) {
    return std::atomic_ref<std::uint64_t>(*std::launder(at_as<std::uint64_t>(at)));
  }
  template <class T>
  void write(std::int64_t at, const T* from, int count) {
    if (count == 0) return;  // of no rows there is no address
    std::memcpy(data_ + at, from, sizeof(T) * static_cast<std::size_t>(count));
  }
  template <class T>
  std::vector<T> read(std::int64_t at, int count) const {
    std::vector<T> to(static_cast<std::size_t>(count));
    if (count > 0) std::memcpy(to.data(), data_ + at, sizeof(T) * to.size());
    return to;
  }
  void poison(std::int64_t begin, std::int64_t end) { test::poison(data_ + begin, end - begin); }

 private:
  static constexpr std::align_val_t kAlign{kPeerLine};
  template <class T>
  T* at_as(std::int64_t at) {
    return static_cast<T*>(static_cast<void*>(data_ + at));
  }
  std::int64_t bytes_;
  std::byte* data_;
};

// One rank: what the kernels of a GPU would do, one after the other.
class SimulatedRank {
 public:
  using Windows = std::vector<std::unique_ptr<Window>>;
  SimulatedRank(const SimulatedCase& c, const PeerLayout& layout, Windows& windows,
                std::atomic<bool>& broken, int rank)
      : c_(c),
        layout_(layout),
        windows_(windows),
        broken_(broken),
        rank_(rank),
        delays_(c.seed + 77 * static_cast<std::uint64_t>(rank)) {}

  void run() {
    for (int call = 0; call < c_.calls && !broken_; ++call) {
      const CallInput in = input_of(c_, rank_, call);
      dispatch(in, call);
      if (!broken_) answer(call);
      if (!broken_) sum(in, call);
    }
  }
  const std::string& problem() const { return problem_; }
  // [call][live * columns]
  const std::vector<std::vector<std::uint32_t>>& outputs() const { return outputs_; }

 private:
  Window& own() { return *windows_[static_cast<std::size_t>(rank_)]; }
  // Peers in an order that begins behind this rank.
  Window& peer(int i, int& number) {
    number = (rank_ + 1 + i) % c_.ranks;
    return *windows_[static_cast<std::size_t>(number)];
  }

  void delay() {
    const std::int64_t kind = delays_.integer(0, 7);
    if (kind == 0) std::this_thread::yield();
    volatile int spins = 0;
    for (std::int64_t i = 0; kind > 4 && i < delays_.integer(0, 100); ++i) spins = spins + 1;
  }

  static std::uint32_t signature(PeerKind kind) {
    return peer_signature(0x9E3779B97F4A7C15U * (static_cast<std::uint64_t>(kind) + 1));
  }
  void publish(PeerKind kind, int call, int live) {
    const std::uint64_t bits = pack_peer_word({kFirstEpoch + static_cast<std::uint32_t>(call),
                                               static_cast<std::uint32_t>(live), signature(kind)});
    for (int i = 0, to = 0; i < c_.ranks; ++i) {
      Window& window = peer(i, to);
      delay();
      window.word(layout_.word(kind, rank_)).store(bits, std::memory_order_release);
    }
  }
  // The live rows of every rank, once all words are there.
  std::vector<int> wait(PeerKind kind, int call) {
    const std::uint32_t epoch = kFirstEpoch + static_cast<std::uint32_t>(call);
    const PeerExpected expected{epoch, epoch - 1, signature(kind),
                                static_cast<std::uint32_t>(c_.tokens)};
    const auto guard =
        std::chrono::steady_clock::now() + std::chrono::milliseconds(test::kHangGuardMs);
    std::vector<int> live;
    for (int source = 0; source < c_.ranks && !broken_;) {
      const PeerWord word =
          unpack_peer_word(own().word(layout_.word(kind, source)).load(std::memory_order_acquire));
      const PeerVerdict verdict = judge_peer_word(word, expected);
      if (verdict == PeerVerdict::kReady) {
        live.push_back(static_cast<int>(word.live));
        ++source;
      } else if (verdict == PeerVerdict::kNotYet && std::chrono::steady_clock::now() < guard) {
        std::this_thread::yield();
      } else {
        give_up(fmt::format("call {}: word {} of rank {}: verdict {}, epoch {:#x}", call,
                            static_cast<int>(kind), source, static_cast<int>(verdict), word.epoch));
      }
    }
    return live;
  }
  void give_up(std::string problem) {
    problem_ = std::move(problem);
    broken_ = true;
  }

  // Ids and weights to all, each row once to every rank with one of its experts.
  void dispatch(const CallInput& in, int call) {
    for (int i = 0, to = 0; i < c_.ranks; ++i) {
      Window& window = peer(i, to);
      delay();
      window.write(layout_.id(rank_, 0), in.ids.data(), in.live * c_.top_k);
      window.write(layout_.weight(rank_, 0), in.weights.data(), in.live * c_.top_k);
    }
    publish(PeerKind::kMeta, call, in.live);
    for (int t = 0; t < in.live; ++t) {
      for (int i = 0, to = 0; i < c_.ranks; ++i) {
        Window& window = peer(i, to);
        bool needed = false;
        for (int k = 0; k < c_.top_k; ++k) {
          needed |= owner_of(in.ids[static_cast<std::size_t>(t * c_.top_k + k)]) == to;
        }
        if (needed) window.write(layout_.row(rank_, t), &in.x[at(t, 0)], c_.columns);
      }
      delay();
    }
    publish(PeerKind::kRows, call, in.live);
  }

  // The experts of this rank, for all rows of all ranks.
  void answer(int call) {
    const std::vector<int> live = wait(PeerKind::kMeta, call);
    if (broken_) return;
    std::vector<std::vector<std::int32_t>> ids;
    for (int s = 0; s < c_.ranks; ++s) {
      ids.push_back(
          own().read<std::int32_t>(layout_.id(s, 0), live[static_cast<std::size_t>(s)] * c_.top_k));
    }
    wait(PeerKind::kRows, call);
    for (int s = 0; s < c_.ranks && !broken_; ++s) {
      const int rows = live[static_cast<std::size_t>(s)];
      for (int t = 0; t < rows; ++t) answer_row(s, t, ids[static_cast<std::size_t>(s)]);
      delay();
    }
    // Whatever arrived has been read; the peers write again when they have all answers.
    own().poison(layout_.ids, layout_.answers);
    publish(PeerKind::kAnswers, call, live[static_cast<std::size_t>(rank_)]);
  }
  void answer_row(int source, int t, const std::vector<std::int32_t>& ids) {
    Window& home = *windows_[static_cast<std::size_t>(source)];
    std::vector<std::uint32_t> x, partial(static_cast<std::size_t>(c_.columns));
    for (int k = 0; k < c_.top_k; ++k) {
      const std::int32_t id = ids[static_cast<std::size_t>(t * c_.top_k + k)];
      if (owner_of(id) != rank_) continue;
      if (x.empty()) x = own().read<std::uint32_t>(layout_.row(source, t), c_.columns);
      const std::uint32_t weight = own().read<std::uint32_t>(layout_.weight(source, t),
                                                             c_.top_k)[static_cast<std::size_t>(k)];
      std::vector<std::uint32_t> y;
      for (std::size_t h = 0; h < x.size(); ++h) {
        y.push_back(weight * expert_output(id, x[h]));
        partial[h] += y[h];
      }
      if (c_.form == PeerAnswerForm::kSlot) {
        home.write(layout_.slot(t, k), y.data(), c_.columns);
      }
    }
    if (!x.empty() && c_.form == PeerAnswerForm::kPartial) {
      home.write(layout_.partial(rank_, t), partial.data(), c_.columns);
    }
  }

  // Adds what came back, by the rank's own ids.
  void sum(const CallInput& in, int call) {
    wait(PeerKind::kAnswers, call);
    if (broken_) return;
    std::vector<std::uint32_t> out(in.x.size());
    const auto add = [&](int t, std::int64_t from) {
      const auto row = own().read<std::uint32_t>(from, c_.columns);
      for (int h = 0; h < c_.columns; ++h) out[at(t, h)] += row[static_cast<std::size_t>(h)];
    };
    for (int t = 0; t < in.live; ++t) {
      std::vector<bool> answered(static_cast<std::size_t>(c_.ranks));
      for (int k = 0; k < c_.top_k; ++k) {
        const int from = owner_of(in.ids[static_cast<std::size_t>(t * c_.top_k + k)]);
        if (from < 0) continue;
        if (c_.form == PeerAnswerForm::kSlot) {
          add(t, layout_.slot(t, k));
        } else if (!answered[static_cast<std::size_t>(from)]) {
          add(t, layout_.partial(from, t));
          answered[static_cast<std::size_t>(from)] = true;
        }
      }
    }
    outputs_.push_back(std::move(out));
    own().poison(layout_.answers, layout_.bytes);
  }

  std::size_t at(int t, int h) const { return static_cast<std::size_t>(t * c_.columns + h); }

  const SimulatedCase& c_;
  const PeerLayout& layout_;
  Windows& windows_;
  std::atomic<bool>& broken_;
  int rank_;
  test::Rng delays_;
  std::string problem_;
  std::vector<std::vector<std::uint32_t>> outputs_;
};

void expect_direct_result(const SimulatedCase& c, int rank, const SimulatedRank& simulated) {
  ASSERT_EQ(simulated.problem(), "") << "rank " << rank;
  ASSERT_EQ(simulated.outputs().size(), static_cast<std::size_t>(c.calls)) << "rank " << rank;
  for (int call = 0; call < c.calls; ++call) {
    const CallInput in = input_of(c, rank, call);
    std::vector<std::uint32_t> need(in.x.size());
    for (std::size_t i = 0; i < in.x.size(); ++i) {
      const std::size_t t = i / static_cast<std::size_t>(c.columns);
      for (int k = 0; k < c.top_k; ++k) {
        const std::size_t slot =
            t * static_cast<std::size_t>(c.top_k) + static_cast<std::size_t>(k);
        if (in.ids[slot] >= 0) need[i] += in.weights[slot] * expert_output(in.ids[slot], in.x[i]);
      }
    }
    ASSERT_EQ(simulated.outputs()[static_cast<std::size_t>(call)], need)
        << "rank " << rank << " of " << c.ranks << ", call " << call << ", seed " << c.seed;
  }
}

void simulate(const SimulatedCase& c) {
  const PeerLayout layout =
      make_peer_layout({c.ranks, c.tokens, c.top_k, c.columns * 4, c.columns * 4, c.form}).value();
  SimulatedRank::Windows windows;
  std::atomic<bool> broken = false;
  std::vector<SimulatedRank> ranks;
  for (int r = 0; r < c.ranks; ++r) windows.push_back(std::make_unique<Window>(layout));
  for (int r = 0; r < c.ranks; ++r) ranks.emplace_back(c, layout, windows, broken, r);
  std::vector<std::thread> threads;
  for (SimulatedRank& rank : ranks) threads.emplace_back([&rank] { rank.run(); });
  for (std::thread& t : threads) t.join();
  for (int r = 0; r < c.ranks; ++r) expect_direct_result(c, r, ranks[static_cast<std::size_t>(r)]);
}

TEST(PeerThreads, FewRanksManyCalls) {
  for (const PeerAnswerForm form : {PeerAnswerForm::kPartial, PeerAnswerForm::kSlot}) {
    for (const int ranks : {1, 2, 3, 8}) {
      simulate({ranks, 400 / ranks, 5, 3, 9, form, static_cast<std::uint64_t>(ranks)});
    }
  }
}

TEST(PeerThreads, SixtyFourRanks) {
  simulate({64, 5, 3, 4, 8, PeerAnswerForm::kPartial, 64});
  simulate({64, 5, 3, 4, 8, PeerAnswerForm::kSlot, 65});
}

}  // namespace
}  // namespace moesaic::parallel
