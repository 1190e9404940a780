// moesaic run over several ranks.
#pragma once

#include <string>

#include "rank_cli.h"
#include "result_file.h"

namespace moesaic::tool {

struct RunRequest {
  std::string model, input, output_dtype;
  ResultFile output;
  int layer = 0;
  int repeat = 0;
};

// One rank of it: its part of the layer on its share of the rows; rank 0 writes the file and one
// table or JSON object for all.
int run_layer_on_rank(const RunRequest& request, const RankContext& context);

}  // namespace moesaic::tool
