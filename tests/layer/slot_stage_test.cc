// Experts that move through a stage in other ranks' memory, as between GPUs: a memory whose copies run as
// late as they may, on ranks that are threads.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <semaphore>
#include <string>
#include <utility>
#include <vector>

#include "layer/eplb_case.h"
#include "layer/expert_balancer.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

constexpr std::int64_t kLogical = 10, kPhysical = 16, kEach = kPhysical / test::kEplbRanks;
constexpr std::int64_t kBytes[] = {24, 7};  // of a slot in each part
constexpr std::int64_t kImage = kBytes[0] + kBytes[1];

// Stages that the ranks of a world make together.
struct Lobby {
  std::mutex mutex;
  std::map<int, std::vector<std::vector<std::byte>>> stages;  // by their number: of each rank
};

struct Behaviour {
  StatusCode refuses = StatusCode::kOk;  // make_stage, on all ranks
  int fails_at = -1;                     // which send of this rank
};

class LateStage final : public layer::SlotStage {
 public:
  LateStage(std::vector<std::vector<std::byte>>& places, int rank, int fails_at)
      : places_(places), rank_(rank), fails_at_(fails_at) {}
  Status send(std::span<const ExpertPart> parts, std::int64_t slot, int to,
              std::int64_t place) override {
    if (sends_++ == fails_at_) return {StatusCode::kDevice, "the copy engine is gone"};
    std::byte* there = places_[static_cast<std::size_t>(to)].data() + place * kImage;
    for (const ExpertPart& part : parts) {
      later_.push_back({there, part.rows.data + slot * part.rows.dim(1), part.rows.dim(1)});
      there += part.rows.dim(1);
    }
    return {};
  }
  Status settle() override {
    for (const Copy& c : later_) std::memcpy(c.to, c.from, static_cast<std::size_t>(c.bytes));
    later_.clear();
    return {};
  }
  Status take(std::span<const ExpertPart> parts, std::int64_t place, std::int64_t slot) override {
    const std::byte* here = places_[static_cast<std::size_t>(rank_)].data() + place * kImage;
    for (const ExpertPart& part : parts) {
      later_.push_back({part.rows.data + slot * part.rows.dim(1), here, part.rows.dim(1)});
      here += part.rows.dim(1);
    }
    return {};
  }

 private:
  struct Copy {
    std::byte* to;
    const std::byte* from;
    std::int64_t bytes;
  };
  std::vector<std::vector<std::byte>>& places_;
  int rank_, fails_at_, sends_ = 0;
  std::vector<Copy> later_;
};

class LateMemory final : public layer::SlotMemory {
 public:
  LateMemory(Lobby& lobby, int rank, const Behaviour& behaviour)
      : lobby_(lobby), rank_(rank), behaviour_(behaviour) {}
  Status read(const ExpertPart& part, std::int64_t slot, std::byte* to) override {
    std::memcpy(to, part.rows.data + slot * part.rows.dim(1),
                static_cast<std::size_t>(part.rows.dim(1)));
    return {};
  }
  Status write(const ExpertPart& part, std::int64_t slot, const std::byte* from) override {
    std::memcpy(part.rows.data + slot * part.rows.dim(1), from,
                static_cast<std::size_t>(part.rows.dim(1)));
    return {};
  }
  Status set_maps(const ExpertMaps&) override { return {}; }
  Status set_recording(bool) override {
    ++told_;
    return {};
  }
  Status end_step() override { return {}; }
  Status window_load(std::span<double>) override { return {}; }
  Status total_load(std::span<std::uint32_t>) override { return {}; }
  std::int64_t bytes() const override { return 0; }
  Result<std::unique_ptr<layer::SlotStage>> make_stage(Communicator* world, std::int64_t places,
                                                       std::int64_t bytes) override {
    if (behaviour_.refuses != StatusCode::kOk) return Status(behaviour_.refuses, "no stage");
    EXPECT_EQ(bytes, kImage);
    ++stages_;
    std::vector<std::vector<std::byte>>* made = nullptr;
    {
      const std::lock_guard lock(lobby_.mutex);
      made = &lobby_.stages[stages_];
      made->resize(test::kEplbRanks);
      (*made)[static_cast<std::size_t>(rank_)].assign(static_cast<std::size_t>(places * bytes),
                                                      std::byte{0xEE});
    }
    if (world != nullptr) MOESAIC_RETURN_IF_ERROR(world->barrier("stage"));
    return std::unique_ptr<layer::SlotStage>(
        std::make_unique<LateStage>(*made, rank_, behaviour_.fails_at));
  }
  int stages() const { return stages_; }
  int told() const { return told_; }  // whether to record

 private:
  Lobby& lobby_;
  int rank_, stages_ = 0, told_ = 0;
  Behaviour behaviour_;
};

// A rank's slots, whose bytes say which expert they are of.
struct Slots {
  std::vector<std::byte> memory[2];
  std::vector<ExpertPart> parts;
  static std::byte value(std::int32_t expert, std::size_t part, std::int64_t i) {
    return static_cast<std::byte>(expert * 16 + static_cast<std::int32_t>(part) * 8 + i % 8);
  }
  explicit Slots(std::span<const std::int32_t> experts) {
    for (std::size_t p = 0; p < 2; ++p) {
      for (const std::int32_t e : experts) {
        for (std::int64_t i = 0; i < kBytes[p]; ++i) memory[p].push_back(value(e, p, i));
      }
      parts.push_back({p == 0 ? "weights" : "scales",
                       TensorView(memory[p].data(), DType::kU8, {kEach, kBytes[p]})});
    }
  }
  bool are_of(std::span<const std::int32_t> experts) const {
    return memory[0] == Slots(experts).memory[0] && memory[1] == Slots(experts).memory[1];
  }
};

struct Rank {
  std::unique_ptr<layer::ExpertBalancer> balancer;
  LateMemory* memory;
  Slots slots;
  static Rank make(Lobby& lobby, int rank, const Behaviour& behaviour) {
    auto memory = std::make_unique<LateMemory>(lobby, rank, behaviour);
    LateMemory* const kept = memory.get();
    auto made = layer::ExpertBalancer::create({kLogical, kPhysical, test::kEplbRanks, rank}, 4,
                                              std::move(memory))
                    .value();
    Slots slots(made->local_experts());
    return {std::move(made), kept, std::move(slots)};
  }
};

std::string move_on_many_days(Lobby& lobby, int rank, Communicator& world,
                              const Behaviour& behaviour) {
  Rank r = Rank::make(lobby, rank, behaviour);
  // Every rank takes every step, whatever it has seen.
  std::string first;
  const auto note = [&first](bool right, std::string_view what, std::uint64_t day) {
    if (!right && first.empty()) first = fmt::format("day {}: {}", day, what);
  };
  for (std::uint64_t day = 0; day < 24; ++day) {
    const std::vector<std::int32_t> before(r.balancer->local_experts().begin(),
                                           r.balancer->local_experts().end());
    const std::vector<std::int32_t> wanted = test::random_map(day, kLogical, kPhysical);
    Status status = r.balancer->begin(wanted);
    if (status.ok()) status = r.balancer->make_room(&world, r.slots.parts);
    int calls = 0;
    for (bool done = false; status.ok() && !done; ++calls) {
      note(r.slots.are_of(before), "slots changed before the switch", day);
      const auto moved =
          r.balancer->advance(&world, 1 + static_cast<std::int64_t>(day % 3), r.slots.parts);
      status = moved.status();
      done = moved.ok() && *moved;
    }
    if (!status.ok()) return status.to_string();
    note(r.slots.are_of(r.balancer->local_experts()), "other slots", day);
    const auto now = r.balancer->physical_to_logical();
    note(std::equal(now.begin(), now.end(), wanted.begin(), wanted.end()), "another map", day);
    // The call that begins the last copies is not the one that waits for them.
    note(behaviour.refuses != StatusCode::kOk || calls >= 2, "a switch in the first call", day);
  }
  note(r.memory->stages() == (behaviour.refuses == StatusCode::kOk ? 24 : 0), "stages", 24);
  return first;
}

void expect_moves(const Behaviour& behaviour) {
  Lobby lobby;
  const auto wrong =
      test::on_ranks([&](int rank, std::shared_ptr<Communicator> world) -> std::string {
        return move_on_many_days(lobby, rank, *world, behaviour);
      });
  for (const std::string& w : wrong) EXPECT_EQ(w, "");
}

TEST(SlotStage, SlotsAreThoseOfTheMapAfterEveryDay) { expect_moves({}); }
TEST(SlotStage, WithoutOneExpertsGoThroughTheHost) {
  expect_moves({StatusCode::kUnsupported});
  expect_moves({StatusCode::kOutOfMemory});
}

TEST(SlotStage, ACopyThatCannotBeginLeavesAllAsItWas) {
  Lobby lobby;
  const auto wrong =
      test::on_ranks([&](int rank, std::shared_ptr<Communicator> world) -> std::string {
        Rank r = Rank::make(lobby, rank, {StatusCode::kOk, rank == 2 ? 1 : -1});
        const std::vector<std::int32_t> before(r.balancer->local_experts().begin(),
                                               r.balancer->local_experts().end());
        const auto wanted = test::random_map(3, kLogical, kPhysical);
        Status status = r.balancer->begin(wanted);
        if (status.ok()) status = r.balancer->make_room(world.get(), r.slots.parts);
        if (!status.ok()) return status.to_string();
        for (bool done = false; status.ok() && !done;) {
          const auto moved = r.balancer->advance(world.get(), 2, r.slots.parts);
          status = moved.status();
          done = moved.ok() && *moved;
        }
        if (status.ok()) return "nobody was told";
        if (rank == 2 && status.message().find("copy engine") == std::string::npos) {
          return "another reason: " + status.to_string();
        }
        if (r.balancer->in_flight()) return "still in flight";
        return r.slots.are_of(before) ? "" : "slots changed";
      });
  for (const std::string& w : wrong) EXPECT_EQ(w, "");
}

// Rank 0 is through with all but the last calls before any other rank makes its second one.
TEST(SlotStage, RanksDoNotWaitForEachOtherWhileThePlanLasts) {
  Lobby lobby;
  std::counting_semaphore<test::kEplbRanks> far{0};
  const auto wrong =
      test::on_ranks([&](int rank, std::shared_ptr<Communicator> world) -> std::string {
        Rank r = Rank::make(lobby, rank, {});
        const auto wanted = test::random_map(3, kLogical, kPhysical);
        const auto plan =
            plan_transfers(r.balancer->physical_to_logical(), wanted, test::kEplbRanks).value();
        if (plan.size() < 4) return "a plan of too few experts";
        Status status = r.balancer->begin(wanted);
        if (status.ok()) status = r.balancer->make_room(world.get(), r.slots.parts);
        if (!status.ok()) return status.to_string();
        std::size_t calls = 0;
        for (bool done = false; !done;) {
          if (rank != 0 && calls == 1 && !far.try_acquire_for(std::chrono::seconds(30))) {
            static_cast<void>(world->abandon("rank 0 waits"));  // so that it ends
            return "rank 0 waits for this one";
          }
          const auto moved = r.balancer->advance(world.get(), 1, r.slots.parts);
          if (!moved.ok()) return moved.status().to_string();
          done = *moved;
          if (++calls + 1 == plan.size() && rank == 0) far.release(test::kEplbRanks - 1);
        }
        return r.slots.are_of(r.balancer->local_experts()) ? "" : "other slots";
      });
  for (const std::string& w : wrong) EXPECT_EQ(w, "");
}

TEST(SlotStage, RanksThatWouldMoveUnequallyAreRefused) {
  Lobby lobby;
  const auto wrong =
      test::on_ranks([&](int rank, std::shared_ptr<Communicator> world) -> std::string {
        Rank r = Rank::make(lobby, rank, {});
        Status status = r.balancer->begin(test::random_map(3, kLogical, kPhysical));
        if (status.ok()) status = r.balancer->make_room(world.get(), r.slots.parts);
        if (!status.ok()) return status.to_string();
        const Status moved =
            r.balancer->advance(world.get(), rank == 1 ? 3 : 2, r.slots.parts).status();
        if (moved.code() != StatusCode::kInvalidArgument) return moved.to_string();
        if (moved.message() != "max_transfers: got 2 on rank 0 and 3 on rank 1, need the same") {
          return moved.message();
        }
        return r.balancer->in_flight() ? "still in flight" : "";
      });
  for (const std::string& w : wrong) EXPECT_EQ(w, "");
}

TEST(SlotStage, OneRankAloneMovesThroughItToo) {
  Lobby lobby;
  Rank r = Rank::make(lobby, 0, {});
  // Ranks that do not talk: slots of this one change places among themselves.
  std::vector<std::int32_t> wanted(r.balancer->physical_to_logical().begin(),
                                   r.balancer->physical_to_logical().end());
  std::swap(wanted[0], wanted[3]);
  std::swap(wanted[1], wanted[2]);
  ASSERT_TRUE(r.balancer->begin(wanted).ok());
  ASSERT_TRUE(r.balancer->make_room(nullptr, r.slots.parts).ok());
  EXPECT_FALSE(r.balancer->advance(nullptr, 8, r.slots.parts).value());
  EXPECT_TRUE(r.balancer->advance(nullptr, 8, r.slots.parts).value());
  EXPECT_TRUE(r.slots.are_of(r.balancer->local_experts()));
  EXPECT_EQ(r.balancer->local_experts()[0], wanted[0]);
}

// A GPU's memory waits for the calls before it: not in every step of a model.
TEST(SlotStage, TheMemoryIsToldWhatChanges) {
  Lobby lobby;
  Rank r = Rank::make(lobby, 0, {});
  for (const bool record : {true, true, false, false, true}) {
    ASSERT_TRUE(r.balancer->set_recording(record).ok());
    EXPECT_EQ(r.balancer->recording(), record);
  }
  EXPECT_EQ(r.memory->told(), 2);
}

}  // namespace
}  // namespace moesaic
