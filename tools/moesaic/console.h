// What the tool says and where: results on stdout (text, or one JSON object with --json),
// everything else on stderr; progress only when stderr is a terminal. Text that people read never
// has a control character but the end of a line, whatever name it quotes.
#pragma once

#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "exit_code.h"
#include "moesaic/checkpoint.h"
#include "moesaic/status.h"

namespace moesaic::tool {

// Keys keep the order in which they are added, so that a person can read the object too.
using Json = nlohmann::ordered_json;

class Console {
 public:
  //   results  false: emit and print do nothing (ranks other than 0)
  //   out      stderr when stdout carries the result itself
  Console(bool json, int verbosity, bool results = true, std::FILE* out = stdout)
      : json_(json), verbosity_(verbosity), results_(results), out_(out) {}

  bool json() const { return json_; }
  // One JSON object and a line end; nothing without --json.
  void emit(const Json& object) const;
  // Human text; nothing with --json.
  void print(std::string_view text) const;
  // To stderr, from `level` times -v on.
  void note(int level, std::string_view text) const;
  void warn(std::string_view text) const;
  // Reports a failure on stderr with its next step (and as a JSON object with --json, behind the
  // keys of `report`) and returns the exit code.
  int fail(const Status& status, Origin origin, std::string_view next = {},
           Json report = Json::object()) const;
  // The same for work that a signal ended: the exit code is 128 and the signal's number, as shells
  // have it.
  int fail_interrupted(const Status& status, int signal) const;
  // Draws "label  42 %" on stderr from half a second on, at most ten times a second; empty function
  // when stderr is not a terminal.
  ProgressFn progress(std::string label) const;
  void finish_progress() const;

 private:
  int report_failure(const Status& status, int code, std::string_view next, Json report) const;

  bool json_;
  int verbosity_;
  bool results_;
  std::FILE* out_;
};

// Messages of this thread on stderr carry this rank's number from now on.
void set_log_rank(int rank);
// "moesaic" or "moesaic[rank 3]".
std::string log_name();

// JSON has no infinity and no NaN: a number that is neither becomes the largest finite double,
// which no bound admits.
double finite(double value);

// "1.2 GB", "340 kB": decimal units, three significant digits.
std::string format_bytes(std::int64_t bytes);
std::string format_us(double us);

}  // namespace moesaic::tool
