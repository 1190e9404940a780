// The picture of a benchmark: time against tokens with the floor and other implementations, as SVG.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "moesaic/spec.h"
#include "moesaic/status.h"

namespace moesaic::tool {

// (tokens, microseconds), ascending in tokens.
struct PlotSeries {
  std::string name;
  std::vector<std::pair<double, double>> points;
};

// The rows of a JSON-lines file that are about this layer in this scheme, one series per "impl" in
// the order of the file. A row has impl, format (the scheme's name, perhaps with more behind it),
// E, top_k, hidden, intermediate, M and gemm12_us. kCorruptFile names the line, kNotFound the file;
// no matching row is an empty list.
Result<std::vector<PlotSeries>> read_peers(const std::string& path, const MoeLayerSpec& spec,
                                           std::string_view quant);

// The smallest time of any series for this number of tokens, or 0.
double best_of(const std::vector<PlotSeries>& series, double tokens);

// Both axes logarithmic. The first series is drawn thick, `floor` dashed. No point at all gives an
// empty frame; points that are not positive are left out.
std::string bench_svg(const std::string& title, const std::string& subtitle,
                      const std::vector<PlotSeries>& series, const PlotSeries& floor);

}  // namespace moesaic::tool
