#include "usage.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "core/fault.h"
#include "core/nearest_name.h"

namespace moesaic::tool {
namespace {

// Options of a verb, those of its groups included.
std::vector<const CLI::Option*> options_of(const CLI::App& app) {
  std::vector<const CLI::Option*> all;
  for (const CLI::Option* option : app.get_options([](const CLI::Option*) { return true; })) {
    all.push_back(option);
  }
  const auto nameless = [](const CLI::App* sub) { return sub->get_name().empty(); };
  for (const CLI::App* group : app.get_subcommands(nameless)) {
    for (const CLI::Option* option : options_of(*group)) all.push_back(option);
  }
  return all;
}

bool has_dash(std::string_view word) { return word.size() > 1 && word[0] == '-'; }

// "--threads=4" -> "--threads".
std::string_view name_in(std::string_view word) { return word.substr(0, word.find('=')); }

const CLI::Option* find_option(const std::vector<const CLI::Option*>& options,
                               std::string_view word) {
  const std::string name(name_in(word));
  for (const CLI::Option* option : options) {
    if (name.starts_with("--") && option->check_lname(name.substr(2))) return option;
    if (!name.starts_with("--") && option->check_sname(name.substr(1, 1))) return option;
  }
  return nullptr;
}

// Names with their dashes: what a misspelt one may have meant.
std::vector<std::string> names_of(const std::vector<const CLI::Option*>& options) {
  std::vector<std::string> names;
  for (const CLI::Option* option : options) {
    for (const std::string& name : option->get_lnames()) {
      // A group of options has a --help of its own.
      if (std::find(names.begin(), names.end(), "--" + name) == names.end()) {
        names.push_back("--" + name);
      }
    }
  }
  return names;
}

Status unknown_option(const std::string& verb, std::string_view word,
                      const std::vector<const CLI::Option*>& options) {
  const std::vector<std::string> names = names_of(options);
  const std::vector<std::string_view> views(names.begin(), names.end());
  const std::string_view got = name_in(word);
  // "-output" and "--output" differ in a dash; a single letter is near to nothing.
  const std::string wanted =
      "--" + std::string(got.substr(std::min(got.size(), got.find_first_not_of('-'))));
  const std::string_view nearest = nearest_name(wanted, views);
  const bool close = edit_distance(wanted, nearest) <= wanted.size() / 2 ||
                     !name_distance(wanted, nearest).unrelated;
  return {StatusCode::kInvalidArgument,
          fmt::format("option: got '{}', {} has {}{}", got, verb, fmt::join(names, ", "),
                      close ? fmt::format("; nearest is '{}'", nearest) : "")};
}

// The first word behind the verb that is no option of it, or an option that took another for its
// value; ok when there is none.
Status check_words(const CLI::App& app, int first, int argc, const char* const* argv) {
  const std::vector<const CLI::Option*> options = options_of(app);
  for (int i = first; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "--") return {};
    if (!has_dash(word)) continue;
    const CLI::Option* option = find_option(options, word);
    if (option == nullptr) return unknown_option(app.get_name(), word, options);
    if (word.find('=') != std::string_view::npos) continue;
    for (int n = option->get_items_expected_min(); n > 0 && i + 1 < argc; --n) {
      const std::string_view value = argv[++i];
      if (value.starts_with("--") && find_option(options, value) != nullptr) {
        return {StatusCode::kInvalidArgument,
                fmt::format("{}: got no value before {}, need one", word, value)};
      }
    }
  }
  return {};
}

// "Could not convert: --layer = x" and "Value x could not be converted" in our words.
std::string reworded(const CLI::App& app, const std::string& text) {
  constexpr std::string_view kConversion = "Could not convert: ";
  constexpr std::string_view kExtra = "The following argument was not expected: ";
  constexpr std::string_view kExtras = "The following arguments were not expected: ";
  for (const std::string_view extra : {kExtra, kExtras}) {
    if (text.starts_with(extra)) {
      return fmt::format("argument: got '{}', which {} does not take", text.substr(extra.size()),
                         app.get_name());
    }
  }
  const std::size_t equals = text.find(" = ");
  if (!text.starts_with(kConversion) || equals == std::string::npos) return text;
  const std::string name = text.substr(kConversion.size(), equals - kConversion.size());
  const CLI::Option* option = find_option(options_of(app), name);
  const std::string type = option != nullptr ? option->get_type_name() : "";
  const char* need = type.starts_with("UINT")    ? "a whole number >= 0"
                     : type.starts_with("INT")   ? "a whole number"
                     : type.starts_with("FLOAT") ? "a number"
                                                 : "another value";
  return fmt::format("{}: got '{}', need {}", name, text.substr(equals + 3), need);
}

// No verb: a misspelt one, an option before it, or nothing.
std::string verb_error(const CLI::App& root, int argc, const char* const* argv) {
  std::vector<std::string> names;
  for (const CLI::App* verb : root.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(verb->get_name());
  }
  const std::vector<std::string_view> views(names.begin(), names.end());
  if (argc <= 1) return fmt::format("verb: got none, need one of {}", fmt::join(names, ", "));
  const std::string_view word = argv[1];
  if (has_dash(word)) {
    return fmt::format("verb: got the option '{}' before one, need one of {} first", name_in(word),
                       fmt::join(names, ", "));
  }
  return fmt::format("verb: got '{}', need one of {}; nearest is '{}'", word,
                     fmt::join(names, ", "), nearest_name(word, views));
}

}  // namespace

UsageError explain_usage(const CLI::App& root, const CLI::ParseError& error, int argc,
                         const char* const* argv) {
  const std::vector<CLI::App*> chosen = root.get_subcommands();
  const auto usage = [](std::string text, const std::string& help) {
    return UsageError{{StatusCode::kInvalidArgument, std::move(text)}, "see '" + help + "'"};
  };
  if (chosen.empty()) return usage(verb_error(root, argc, argv), "moesaic --help");
  const CLI::App& app = *chosen.front();
  const std::string help = "moesaic " + app.get_name() + " --help";
  int verb = 1;
  while (verb < argc && app.get_name() != argv[verb]) ++verb;
  for (int i = 1; i < verb; ++i) {
    if (has_dash(argv[i])) {
      return usage(fmt::format("option: got '{}' before the verb, need it behind: moesaic {} {}",
                               argv[i], app.get_name(), argv[i]),
                   help);
    }
  }
  const Status words = check_words(app, verb + 1, argc, argv);
  if (!words.ok() && !MOESAIC_FAULT(usage_reports_what_is_missing_first)) {
    return {words, "see '" + help + "'"};
  }
  return usage(reworded(app, error.what()), help);
}

}  // namespace moesaic::tool
