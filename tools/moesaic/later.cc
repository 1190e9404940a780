// Verbs that the design of the command line has and this version does not: they say so and end with
// "unsupported" instead of being unknown words.
#include <memory>

#include "verbs.h"

namespace moesaic::tool {
namespace {

Verb make_unsupported(CLI::App& root, const std::string& name, const std::string& description,
                      const std::string& instead) {
  CLI::App* app =
      add_verb(root, name, description + " (not in this version)", "  " + instead + "\n");
  auto options = std::make_shared<CommonOptions>();
  add_output_options(*app, *options);
  // Whatever else is given belongs to a later version's options.
  app->allow_extras();
  return {app, [options, name, instead] {
            return options->console().fail(
                {StatusCode::kUnsupported, name + ": not in this version"}, Origin::kOption,
                "this version has: " + instead);
          }};
}

}  // namespace

Verb make_convert(CLI::App& root) {
  return make_unsupported(
      root, "convert", "Write a checkpoint with the experts in another format",
      "moesaic run --model DIR --layer L --input F --quant SCHEME --output OUT");
}

}  // namespace moesaic::tool
