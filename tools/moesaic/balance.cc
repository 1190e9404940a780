// moesaic balance: places experts on ranks from measured load, and shows the load before and after.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "checkpoint/container/json_strict.h"
#include "moesaic/eplb.h"
#include "text_file.h"
#include "verbs.h"

namespace moesaic::tool {
namespace {

struct BalanceArguments {
  CommonOptions common;
  std::string load;
  int ranks = 0, nodes = 1, groups = 1;
  std::int64_t redundant = 0;
};

using Matrix = std::vector<std::vector<double>>;

// Of all experts and layers together: sums of loads, and of their sums, stay finite.
constexpr double kMaxLoad = 1e300;
// Far above what run --json writes.
constexpr int kMaxDepth = 32;
// As of a checkpoint's layers, and above any model's slots: bounds memory and time.
constexpr std::size_t kMaxLayers = 4096;
constexpr std::int64_t kMaxSlots = std::int64_t{1} << 20, kMaxSlotsOfLayers = kMaxSlots << 4;

// [experts], [[experts], ...] or an object that has one of them as expert_load, as run --json does.
Result<Matrix> read_load(const std::string& path) {
  MOESAIC_ASSIGN_OR_RETURN(const std::string text, read_text(path));
  const auto bad = [&](const std::string& why) {
    return Status(StatusCode::kCorruptFile,
                  fmt::format("{}: {}, need a JSON array of loads per expert, an array of such per "
                              "layer, or an object with expert_load",
                              path, why));
  };
  const auto parsed = checkpoint::parse_json_document("loads", text, {text.size(), kMaxDepth});
  if (!parsed.ok()) return bad(parsed.status().message());
  const auto& json = *parsed;
  const auto* value = &json;
  if (json.is_object() && json.contains("expert_load")) value = &json["expert_load"];
  if (!value->is_array() || value->empty()) return bad("no array of loads");
  const bool nested = value->front().is_array();
  if (nested && value->size() > kMaxLayers) {
    return Status(
        StatusCode::kLimitExceeded,
        fmt::format("{}: loads: got {} layers, need at most {}", path, value->size(), kMaxLayers));
  }
  Matrix loads;
  const auto row = [&](const nlohmann::json& numbers) -> Status {
    if (!numbers.is_array() || numbers.empty()) return bad("a layer is not an array of loads");
    loads.emplace_back();
    for (const auto& n : numbers) {
      if (!n.is_number() || !(n.get<double>() >= 0)) return bad("an entry is no number >= 0");
      loads.back().push_back(n.get<double>());
    }
    if (loads.back().size() != loads.front().size()) return bad("layers differ in experts");
    return {};
  };
  if (!nested) {
    MOESAIC_RETURN_IF_ERROR(row(*value));
  } else {
    for (const auto& layer : *value) MOESAIC_RETURN_IF_ERROR(row(layer));
  }
  double sum = 0;
  for (const std::vector<double>& layer : loads) {
    for (const double load : layer) sum += load;
  }
  if (!(sum <= kMaxLoad)) {
    return Status(StatusCode::kLimitExceeded,
                  fmt::format("{}: loads: got a sum of {}, need at most {}", path, sum, kMaxLoad));
  }
  return loads;
}

// One line per layer, one cell per rank: the darker the more load, as a share of the largest rank
// load of both maps.
std::string heat_map(std::span<const double> loads, int ranks, double most) {
  static constexpr const char* kShades[] = {"·", "░", "▒", "▓", "█"};
  std::string text;
  const auto width = static_cast<std::size_t>(ranks);
  for (std::size_t first = 0; first < loads.size(); first += width) {
    text += fmt::format("  layer {:>3} ", first / width);
    for (std::size_t r = first; r < first + width; ++r) {
      const double share = most > 0 ? loads[r] / most : 0;
      text += kShades[std::clamp(static_cast<int>(share * 5), 0, 4)];
    }
    text += '\n';
  }
  return text;
}

int run_balance(const BalanceArguments& state) {
  const Console console = state.common.console();
  const Result<Matrix> loads = read_load(state.load);
  if (!loads.ok()) {
    return console.fail(loads.status(), Origin::kFile, "'moesaic run --json' writes such a file");
  }
  const auto experts = static_cast<std::int64_t>(loads->front().size());
  const auto layers = static_cast<std::int64_t>(loads->size());
  const std::int64_t room = std::min(kMaxSlots, kMaxSlotsOfLayers / layers);
  if (experts + state.redundant > room) {
    // The file's fault where it alone asks for as much.
    return console.fail(
        {StatusCode::kLimitExceeded,
         fmt::format("slots: got {} experts and {} redundant in each of {} layer(s), need at most "
                     "{} of both",
                     experts, state.redundant, layers, room)},
        experts > room ? Origin::kFile : Origin::kOption);
  }
  EplbShape shape;
  shape.num_physical = experts + state.redundant;
  shape.num_ranks = state.ranks;
  shape.num_nodes = state.nodes;
  shape.num_groups = state.groups;
  Matrix::value_type before, after;
  Json maps = Json::array();
  for (const std::vector<double>& load : *loads) {
    const Result<std::vector<std::int32_t>> map = rebalance_experts(load, shape);
    if (!map.ok()) return console.fail(map.status(), Origin::kOption);
    const auto initial = initial_physical_to_logical(experts, shape.num_physical);
    if (!initial.ok()) return console.fail(initial.status(), Origin::kOption);
    const auto old_loads = rank_loads(load, *initial, state.ranks);
    const auto new_loads = rank_loads(load, *map, state.ranks);
    if (!old_loads.ok()) return console.fail(old_loads.status(), Origin::kOption);
    if (!new_loads.ok()) return console.fail(new_loads.status(), Origin::kOption);
    before.insert(before.end(), old_loads->begin(), old_loads->end());
    after.insert(after.end(), new_loads->begin(), new_loads->end());
    maps.push_back(*map);
  }
  // rebalance_experts(): hosts and groups count only where every host has whole groups.
  const bool by_node = state.groups % state.nodes == 0;
  const double balanced_before = balancedness(before, state.ranks);
  const double balanced_after = balancedness(after, state.ranks);
  console.emit({{"layers", loads->size()},
                {"num_experts", experts},
                {"num_physical", shape.num_physical},
                {"ranks", state.ranks},
                {"policy", by_node ? "hierarchical" : "global"},
                {"physical_to_logical", maps},
                {"rank_loads_before", before},
                {"rank_loads_after", after},
                {"balancedness_before", balanced_before},
                {"balancedness_after", balanced_after}});
  const double most = std::max(*std::max_element(before.begin(), before.end()),
                               *std::max_element(after.begin(), after.end()));
  console.print(fmt::format(
      "{} layer(s), {} experts and {} redundant on {} ranks; a column is a rank, darker is more\n",
      loads->size(), experts, state.redundant, state.ranks));
  if (!by_node) {
    console.print(fmt::format("policy  global: --groups {} is no multiple of --nodes {}\n",
                              state.groups, state.nodes));
  }
  console.print(fmt::format("before  balancedness {:.3f} (mean / largest rank load)\n{}",
                            balanced_before, heat_map(before, state.ranks, most)));
  console.print(fmt::format("after   balancedness {:.3f}\n{}", balanced_after,
                            heat_map(after, state.ranks, most)));
  if (loads->size() == 1) {
    console.print(fmt::format("slots   {}\n", maps.front().dump()));
  } else {
    console.print("slots   with --json: physical_to_logical\n");
  }
  return kExitOk;
}

}  // namespace

Verb make_balance(CLI::App& root) {
  auto state = std::make_shared<BalanceArguments>();
  CLI::App* app =
      add_verb(root, "balance", "Place experts on ranks from a load matrix",
               "  moesaic run --model DIR --layer 3 --input F --output O --json > load.json\n"
               "  moesaic balance --load load.json --ranks 8 --redundant 8\n"
               "  moesaic balance --load layers.json --ranks 16 --nodes 2 --groups 8 --json\n");
  app->add_option("--load", state->load,
                  "JSON file: loads per expert, an array of such per layer, or an object with "
                  "expert_load")
      ->required();
  app->add_option("--ranks", state->ranks, "Ranks that share the experts")
      ->required()
      ->check(whole_number(1, 65536));
  app->add_option("--redundant", state->redundant, "Slots beyond one per expert")
      ->check(whole_number(std::int64_t{0}, std::int64_t{1} << 20))
      ->capture_default_str();
  app->add_option("--nodes", state->nodes, "Hosts; ranks of one host are consecutive")
      ->check(whole_number(1, 65536))
      ->capture_default_str();
  app->add_option("--groups", state->groups,
                  "Expert groups of the router; kept on one host each if a multiple of --nodes")
      ->check(whole_number(1, 65536))
      ->capture_default_str();
  add_output_options(*app, state->common);
  return {app, [state] { return run_balance(*state); }, /*computes=*/false};
}

}  // namespace moesaic::tool
