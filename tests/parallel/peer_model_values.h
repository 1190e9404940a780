// What the files of the model share.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "parallel/peer_model.h"

namespace moesaic::peer_model {

inline constexpr std::array<Piece, kPieces> kEachPiece = {kIds, kRows, kAnswers};
inline constexpr std::array<Step, kPieces> kStores = {Step::kStoreIds, Step::kStoreRows,
                                                      Step::kStoreAnswers};
inline constexpr std::array<Step, kPieces> kPublishes = {Step::kPublishIds, Step::kPublishRows,
                                                         Step::kPublishAnswers};
inline constexpr std::array<Step, kPieces> kLastReads = {Step::kReadIds, Step::kLastRead,
                                                         Step::kSum};

constexpr std::optional<Piece> waited_for(Step step) {
  if (step == Step::kWaitIds) return kIds;
  if (step == Step::kWaitRows) return kRows;
  if (step == Step::kWaitAnswers) return kAnswers;
  return std::nullopt;
}
// Protocol::merged: steps that are one transition with the one before.
constexpr bool joins_the_step_before(Step step) {
  return !waited_for(step) && step != Step::kStoreIds && step != Step::kLastRead;
}
constexpr bool strays_in(const Protocol& protocol, int rank, int call) {
  return protocol.failure == Failure::kOtherCall && rank == protocol.ranks - 1 && call == 2;
}

}  // namespace moesaic::peer_model
