// The table of families: every row is complete and consistent; patterns of expert names.
#include "checkpoint/config/families.h"

#include <gtest/gtest.h>

#include <set>
#include <string_view>

namespace moesaic::test {
namespace {

TEST(Families, TablesAreSound) {
  std::set<std::string_view> types;
  for (const checkpoint::Family& family : checkpoint::families()) {
    SCOPED_TRACE(family.title);
    for (const std::string_view type : family.model_types.list()) {
      EXPECT_TRUE(types.insert(type).second) << type << " belongs to two families";
      EXPECT_EQ(checkpoint::find_family(type), &family);
    }
    EXPECT_FALSE(family.width_fields.list().empty());
    EXPECT_TRUE(family.layouts[0].present());
    EXPECT_EQ(family.routing.bias == checkpoint::BiasRule::kNone,
              family.correction_bias.list().empty());
    EXPECT_EQ(family.shared == checkpoint::SharedRule::kNone, family.shared_layout.down.empty());
    for (const checkpoint::ExpertLayout& layout : family.layouts) {
      if (!layout.present()) continue;
      const bool per_expert = checkpoint::is_per_expert(layout.storage);
      EXPECT_EQ(per_expert, layout.down.find("{e}") != std::string_view::npos);
      EXPECT_EQ(checkpoint::is_fused(layout.storage), layout.up.empty());
      EXPECT_EQ(layout.gate.empty(), !is_gated(family.activation.kind));
      EXPECT_FALSE(layout.block.empty() && family.router_beside_block);
      EXPECT_FALSE(layout.weight_suffixes.list().empty());
      EXPECT_EQ(layout.bias_suffix.empty(), family.layouts[0].bias_suffix.empty());
    }
  }
  EXPECT_GE(types.size(), 37U);
  EXPECT_EQ(checkpoint::find_family("llama"), nullptr);
  EXPECT_EQ(checkpoint::find_family(""), nullptr);
}

TEST(Families, PatternsMatchWholeNumbersOnly) {
  EXPECT_EQ(checkpoint::expand_expert("experts.{e}.w1", 11), "experts.11.w1");
  EXPECT_TRUE(checkpoint::matches_pattern("experts.{e}.w1", "experts.11.w1"));
  for (const char* name : {"experts..w1", "experts.1x.w1", "experts.1.w2", "experts.1.w11",
                           "shared_experts.1.w1", "experts.-1.w1"}) {
    EXPECT_FALSE(checkpoint::matches_pattern("experts.{e}.w1", name)) << name;
  }
  EXPECT_TRUE(checkpoint::matches_pattern("experts.gate_up_proj", "experts.gate_up_proj"));
  EXPECT_FALSE(checkpoint::matches_pattern("experts.gate_up_proj", "experts.gate_up_proj_bias"));
}

}  // namespace
}  // namespace moesaic::test
