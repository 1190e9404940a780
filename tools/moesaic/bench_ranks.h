// moesaic bench over several ranks: the layer stage, timed together.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bench_stages.h"
#include "rank_cli.h"

namespace moesaic::tool {

struct BenchRanksRequest {
  std::string name, routing;
  std::vector<std::int64_t> tokens;  // per engine
  double seconds = 1;
  // What to time; every rank opens the files itself.
  std::function<Result<BenchSettings>(std::optional<Checkpoint>& checkpoint, Origin& origin)>
      settings;
};

// One rank of it; rank 0 prints.
int bench_on_rank(const BenchRanksRequest& request, const RankContext& context);

}  // namespace moesaic::tool
