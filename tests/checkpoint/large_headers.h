// Safetensors headers of a chosen size that cost a reader the most: for the bounds of its memory
// (header_bounds_test) and its steps (header_steps_test) and for measuring its time
// (bench/header_bench).
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <span>
#include <string_view>

#include "moesaic/status.h"

namespace moesaic::test {

// Writes a header of exactly `bytes` piece by piece: a test of memory must itself stay small.
class HeaderWriter {
 public:
  HeaderWriter(std::ostream& out, std::uint64_t bytes);
  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t left() const { return bytes_ - written_; }
  void add(std::string_view text);
  // Repeats `text` while more than `reserve` bytes stay free.
  void repeat(std::string_view text, std::uint64_t reserve);

 private:
  std::ostream& out_;
  std::uint64_t bytes_;
  std::uint64_t written_ = 0;
};

struct LargeHeader {
  const char* name;                                  // letters and digits
  StatusCode want;                                   // of opening the file
  std::function<std::uint64_t(HeaderWriter&)> fill;  // returns the number of data bytes
};

inline void PrintTo(const LargeHeader& header, std::ostream* out) { *out << header.name; }

std::span<const LargeHeader> large_headers();

// The whole file: length, header of `bytes` (at least 1000), data.
void write_large_header(const LargeHeader& header, std::uint64_t bytes, std::ostream& out);

}  // namespace moesaic::test
