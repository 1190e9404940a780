#include "bench_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "checkpoint/container/names.h"
#include "result_file.h"
#include "text_file.h"

namespace moesaic::tool {
namespace {

constexpr double kWidth = 860, kHeight = 520;
constexpr double kLeft = 80, kRight = 640, kTop = 70, kBottom = 460;  // of the frame
constexpr const char* kColors[] = {"#1f6fb4", "#d1495b", "#e6962e",
                                   "#5b8c5a", "#7d5ba6", "#6b705c"};

// As XML has it, which knows no control characters and no bytes that are not UTF-8.
std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : checkpoint::escape_controls(text)) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

// A logarithmic axis over whole steps of its base.
struct Axis {
  double low = 1, high = 2, from = 0, to = 1, base = 10;

  static Axis over(double smallest, double largest, double base, double from, double to) {
    Axis a;
    a.base = base;
    a.from = from;
    a.to = to;
    a.low = std::pow(base, std::floor(std::log(smallest) / std::log(base) + 1e-9));
    a.high = std::pow(base, std::ceil(std::log(largest) / std::log(base) - 1e-9));
    if (!(a.high > a.low)) a.high = a.low * base;
    return a;
  }
  double at(double v) const {
    return from + (to - from) * (std::log(v / low) / std::log(high / low));
  }
};

std::string number(double v) {
  if (v >= 1e6) return fmt::format("{:g} s", v / 1e6);
  if (v >= 1e3) return fmt::format("{:g} ms", v / 1e3);
  return fmt::format("{:g} us", v);
}

bool drawable(const std::pair<double, double>& p) {
  return p.first > 0 && p.second > 0 && std::isfinite(p.first) && std::isfinite(p.second);
}

std::string text_at(double x, double y, std::string_view text, std::string_view more) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" {}>{}</text>\n", x, y, more, escaped(text));
}

std::string polyline(const PlotSeries& s, const Axis& x, const Axis& y, std::string_view color,
                     double width, bool dashed) {
  std::string points, marks;
  for (const auto& p : s.points) {
    if (!drawable(p)) continue;
    points += fmt::format("{:.1f},{:.1f} ", x.at(p.first), y.at(p.second));
    if (dashed) continue;
    marks += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:.1f}\" fill=\"{}\"/>\n",
                         x.at(p.first), y.at(p.second), width + 1, color);
  }
  return fmt::format(
             "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{}\"{}/>\n",
             points, color, width, dashed ? " stroke-dasharray=\"6 5\"" : "") +
         marks;
}

std::string grid(const Axis& x, const Axis& y) {
  std::string out = fmt::format(
      "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"none\" stroke=\"#888\"/>\n", kLeft,
      kTop, kRight - kLeft, kBottom - kTop);
  constexpr const char* kLine =
      "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\"/>\n";
  for (double v = x.low; v <= x.high * 1.001; v *= x.base) {
    out += fmt::format(fmt::runtime(kLine), x.at(v), kTop, x.at(v), kBottom, "#e4e4e4");
    out += text_at(x.at(v), kBottom + 20, fmt::format("{:g}", v), "text-anchor=\"middle\"");
  }
  for (double v = y.low; v <= y.high * 1.001; v *= y.base) {
    out += fmt::format(fmt::runtime(kLine), kLeft, y.at(v), kRight, y.at(v), "#d4d4d4");
    out += text_at(kLeft - 8, y.at(v) + 4, number(v), "text-anchor=\"end\"");
    for (const double part : {2.0, 5.0}) {
      if (v * part >= y.high) break;
      out += fmt::format(fmt::runtime(kLine), kLeft, y.at(v * part), kRight, y.at(v * part),
                         "#efefef");
    }
  }
  out += text_at((kLeft + kRight) / 2, kBottom + 44, "tokens", "text-anchor=\"middle\"");
  return out;
}

// The row's time for this layer, or nothing.
bool matches(const nlohmann::json& row, const MoeLayerSpec& spec, std::string_view quant) {
  const auto is = [&](const char* key, std::int64_t want) {
    return row.contains(key) && row[key].is_number() &&
           row[key].get<double>() == static_cast<double>(want);
  };
  const std::string format = row.value("format", std::string());
  // "fp8-block128" is fp8-block, "mxfp4-bf16" is not mxfp4.
  const bool same = format.starts_with(quant) && !format.substr(quant.size()).starts_with('-');
  return same && is("E", spec.num_experts) && is("top_k", spec.routing.top_k) &&
         is("hidden", spec.hidden_size) && is("intermediate", spec.intermediate_size) &&
         row.contains("M") && row["M"].is_number() && row.contains("gemm12_us") &&
         row["gemm12_us"].is_number();
}

}  // namespace

Result<std::vector<PlotSeries>> read_peers(const std::string& path, const MoeLayerSpec& spec,
                                           std::string_view quant) {
  MOESAIC_ASSIGN_OR_RETURN(std::string text, read_text(path));
  std::istringstream file(std::move(text));
  std::vector<PlotSeries> all;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const nlohmann::json row = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const bool named = row.is_object() && row.contains("impl") && row["impl"].is_string() &&
                       row.contains("format") && row["format"].is_string();
    if (!named) {
      return Status(
          StatusCode::kCorruptFile,
          fmt::format("{} line {}: need a JSON object with impl and format", path, number));
    }
    if (!matches(row, spec, quant)) continue;
    const std::string name = row["impl"].get<std::string>();
    auto series =
        std::find_if(all.begin(), all.end(), [&](const PlotSeries& s) { return s.name == name; });
    if (series == all.end()) series = all.insert(all.end(), PlotSeries{name, {}});
    series->points.emplace_back(row["M"].get<double>(), row["gemm12_us"].get<double>());
  }
  for (PlotSeries& s : all) std::sort(s.points.begin(), s.points.end());
  return all;
}

double best_of(const std::vector<PlotSeries>& series, double tokens) {
  double best = 0;
  for (const PlotSeries& s : series) {
    for (const auto& [m, us] : s.points) {
      if (m == tokens && us > 0 && (best == 0 || us < best)) best = us;
    }
  }
  return best;
}

std::string bench_svg(const std::string& title, const std::string& subtitle,
                      const std::vector<PlotSeries>& series, const PlotSeries& floor) {
  double x_low = 0, x_high = 0, y_low = 0, y_high = 0;
  const auto cover = [&](const PlotSeries& s) {
    for (const auto& p : s.points) {
      if (!drawable(p)) continue;
      const bool first = x_low == 0;
      x_low = first ? p.first : std::min(x_low, p.first);
      x_high = first ? p.first : std::max(x_high, p.first);
      y_low = first ? p.second : std::min(y_low, p.second);
      y_high = first ? p.second : std::max(y_high, p.second);
    }
  };
  for (const PlotSeries& s : series) cover(s);
  cover(floor);
  if (x_low == 0) x_low = x_high = y_low = y_high = 1;
  const Axis x = Axis::over(x_low, x_high, 2, kLeft, kRight);
  const Axis y = Axis::over(y_low, y_high, 10, kBottom, kTop);
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" {2} width=\"{0}\" height=\"{1}\" "
      "viewBox=\"0 0 {0} {1}\" font-family=\"sans-serif\" font-size=\"13\" fill=\"#333\">\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n",
      kWidth, kHeight, kPlotMark);
  out += text_at(kLeft, 30, title, "font-size=\"18\" font-weight=\"bold\"");
  out += text_at(kLeft, 52, subtitle, "fill=\"#666\"");
  out += grid(x, y);
  out += polyline(floor, x, y, "#555", 1.5, true);
  // The first series last, on top of the others.
  for (std::size_t i = series.size(); i-- > 0;) {
    out += polyline(series[i], x, y, kColors[i % std::size(kColors)], i == 0 ? 3 : 1.5, false);
  }
  double line = kTop + 12;
  const auto legend = [&](const PlotSeries& s, std::string_view color, bool dashed) {
    out += fmt::format(
        "<line x1=\"{}\" y1=\"{:.1f}\" x2=\"{}\" y2=\"{:.1f}\" stroke=\"{}\" stroke-width=\"3\"{}/>"
        "\n",
        kRight + 16, line - 4, kRight + 44, line - 4, color,
        dashed ? " stroke-dasharray=\"6 5\"" : "");
    out += text_at(kRight + 52, line, s.name, "");
    line += 22;
  };
  for (std::size_t i = 0; i < series.size(); ++i) {
    legend(series[i], kColors[i % std::size(kColors)], false);
  }
  legend(floor, "#555", true);
  return out + "</svg>\n";
}

}  // namespace moesaic::tool
