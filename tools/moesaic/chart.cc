#include "chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace moesaic::tool {

std::string column_chart(std::span<const std::int64_t> values, int height,
                         const std::string& label) {
  constexpr std::size_t kColumns = 24;  // of three characters: 72
  // Eighths of a character cell, from empty to full.
  static constexpr const char* kEighths[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  if (values.empty()) return "";
  const std::size_t fold = (values.size() + kColumns - 1) / kColumns;
  std::vector<double> bars;
  for (std::size_t begin = 0; begin < values.size(); begin += fold) {
    const std::size_t end = std::min(begin + fold, values.size());
    double sum = 0;
    for (std::size_t i = begin; i < end; ++i) sum += static_cast<double>(values[i]);
    bars.push_back(sum / static_cast<double>(end - begin));
  }
  const double top = std::max(*std::max_element(bars.begin(), bars.end()), 1.0);
  const std::string indent(label.size(), ' ');
  std::string text;
  for (int line = height - 1; line >= 0; --line) {
    text += line == height - 1 ? label : indent;
    for (const double bar : bars) {
      const int filled = static_cast<int>(std::lround(bar / top * 8 * height)) - 8 * line;
      const char* cell = kEighths[std::clamp(filled, 0, 8)];
      text += fmt::format("{}{} ", cell, cell);
    }
    if (line == height - 1) text += fmt::format("{:.4g}", top);
    text += '\n';
  }
  text += indent;
  for (std::size_t i = 0; i < bars.size(); ++i) text += fmt::format("{:<3}", i * fold);
  return text + '\n';
}

}  // namespace moesaic::tool
