#include <gtest/gtest.h>

#include <vector>

#include "moesaic/interop/parallel.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;

// Property 15.
TEST(EplbSchedule, FirstAfterAQuarterThenEveryInterval) {
  EplbSchedule s = EplbSchedule::create({.window = 10, .interval = 40}).value();
  std::vector<int> when;
  int recorded = 0;
  for (int step = 1; step <= 130; ++step) {
    recorded += s.recording() ? 1 : 0;
    if (s.advance()) when.push_back(step);
  }
  EXPECT_EQ(when, (std::vector<int>{10, 50, 90, 130}));
  EXPECT_EQ(recorded, 40);  // ten steps before each
  EplbSchedule busy = EplbSchedule::create({.window = 1, .interval = 1}).value();
  EXPECT_FALSE(busy.advance(/*in_flight=*/true));
  EXPECT_TRUE(busy.advance());
  expect_refusal(EplbSchedule::create({.window = 0}).status(), StatusCode::kInvalidArgument,
                 {"window"});
}

}  // namespace
}  // namespace moesaic
