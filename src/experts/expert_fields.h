// The tensors of an expert, once, for code that treats them all alike.
#pragma once

#include <array>
#include <string_view>

#include "moesaic/experts.h"

namespace moesaic::experts {

struct ExpertField {
  std::string_view name;
  ConstTensorView ExpertWeightsView::*view;
  int stacked_rank;  // of StackedExpertWeights; 0: as the scheme has it
};

inline constexpr std::array kExpertFields = {
    ExpertField{"w13", &ExpertWeightsView::w13, 3},
    ExpertField{"w13_scale", &ExpertWeightsView::w13_scale, 0},
    ExpertField{"w13_bias", &ExpertWeightsView::w13_bias, 2},
    ExpertField{"w2", &ExpertWeightsView::w2, 3},
    ExpertField{"w2_scale", &ExpertWeightsView::w2_scale, 0},
    ExpertField{"w2_bias", &ExpertWeightsView::w2_bias, 2},
    ExpertField{"w13_global_scale", &ExpertWeightsView::w13_global_scale, 2},
    ExpertField{"w2_global_scale", &ExpertWeightsView::w2_global_scale, 2},
    ExpertField{"w13_channel_scale", &ExpertWeightsView::w13_channel_scale, 2},
    ExpertField{"w2_channel_scale", &ExpertWeightsView::w2_channel_scale, 2},
    ExpertField{"w13_zero", &ExpertWeightsView::w13_zero, 0},
    ExpertField{"w2_zero", &ExpertWeightsView::w2_zero, 0},
    ExpertField{"w13_min", &ExpertWeightsView::w13_min, 0},
    ExpertField{"w2_min", &ExpertWeightsView::w2_min, 0},
    ExpertField{"w13_input_scale", &ExpertWeightsView::w13_input_scale, 2},
    ExpertField{"w2_input_scale", &ExpertWeightsView::w2_input_scale, 2},
    ExpertField{"w13_perm", &ExpertWeightsView::w13_perm, 2},
    ExpertField{"w2_perm", &ExpertWeightsView::w2_perm, 2},
};
// A member that is not listed would stay behind when its expert moves.
static_assert(sizeof(ExpertWeightsView) == kExpertFields.size() * sizeof(ConstTensorView));

}  // namespace moesaic::experts
