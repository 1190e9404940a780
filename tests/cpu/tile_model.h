// A scalar model of the tile instructions, in the place of cpu/tiles_amx-inl.h: one thread's eight
// tile registers and what the processor's manual says of each instruction. What would fault there
// ends the test here.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cpu/tile_config.h"
#include "numerics/codec.h"

namespace moesaic::cpu {

// Subnormal values are zeros on the way in and out.
inline float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0F, x) : x;
}

class TilesModel {
 public:
  static void Configure(const TileConfig& config) {
    expect(config.palette == 1 && config.start_row == 0, "palette");
    for (int t = 0; t < kTileRegisters; ++t) {
      expect(config.rows[t] <= kTileRows && config.row_bytes[t] <= kTileBytes, "shape");
      expect(config.row_bytes[t] % 4 == 0, "row bytes");
    }
    State& s = state();
    s = State{};
    s.config = config;
    s.configured = true;
  }
  static void Release() { state() = State{}; }
  template <int T>
  static void Zero() {
    std::memset(tile(T), 0, sizeof(State::tiles[0]));
  }
  template <int T>
  static void Load(const void* base, std::int64_t stride) {
    Zero<T>();  // also what lies beyond the shape
    for (int r = 0; r < rows(T); ++r)
      std::memcpy(tile(T)[r], static_cast<const std::byte*>(base) + r * stride, bytes(T));
  }
  template <int T>
  static void Store(void* base, std::int64_t stride) {
    for (int r = 0; r < rows(T); ++r)
      std::memcpy(static_cast<std::byte*>(base) + r * stride, tile(T)[r], bytes(T));
  }

  // Even and odd steps have a chain each, in ascending order of k; their sum is added to C. All
  // roundings to nearest even.
  template <int C, int A, int B>
  static void DotBF16() {
    check_shapes(C, A, B);
    for (int m = 0; m < rows(C); ++m) {
      for (int n = 0; n < columns(C); ++n) {
        float chain[2] = {};
        for (int k = 0; k < columns(A); ++k) {
          for (int half = 0; half < 2; ++half) {
            const float a = flushed(f32_from_bf16(at<std::uint16_t>(A, m, 2 * k + half)));
            const float b = flushed(f32_from_bf16(at<std::uint16_t>(B, k, 2 * n + half)));
            chain[half] = flushed(std::fma(a, b, chain[half]));
          }
        }
        const float sum = flushed(chain[0] + chain[1]);
        put(C, m, n, flushed(flushed(at<float>(C, m, n)) + sum));
      }
    }
  }
  // Signed bytes of A, unsigned ones of B, modulo 2^32.
  template <int C, int A, int B>
  static void DotI8() {
    check_shapes(C, A, B);
    for (int m = 0; m < rows(C); ++m) {
      for (int n = 0; n < columns(C); ++n) {
        auto sum = at<std::uint32_t>(C, m, n);
        for (int k = 0; k < 4 * columns(A); ++k) {
          sum += static_cast<std::uint32_t>(at<std::int8_t>(A, m, k) *
                                            at<std::uint8_t>(B, k / 4, 4 * n + k % 4));
        }
        put(C, m, n, sum);
      }
    }
  }

 private:
  using Row = std::byte[kTileBytes];
  struct State {
    TileConfig config;
    bool configured = false;
    Row tiles[kTileRegisters][kTileRows] = {};
  };
  static State& state() {
    static thread_local State s;
    return s;
  }
  static void expect(bool ok, const char* what) {
    if (ok) return;
    std::fprintf(stderr, "tile instruction would fault: %s\n", what);
    std::abort();
  }
  static Row* tile(int t) {
    expect(state().configured && rows(t) > 0, "tile not configured");
    return state().tiles[t];
  }
  static int rows(int t) { return state().config.rows[t]; }
  static std::size_t bytes(int t) { return state().config.row_bytes[t]; }
  static int columns(int t) { return static_cast<int>(bytes(t) / 4); }
  static void check_shapes(int c, int a, int b) {
    expect(state().configured, "tile not configured");
    expect(rows(c) == rows(a), "rows of C and A");
    expect(columns(a) == rows(b), "columns of A, rows of B");
    expect(columns(c) == columns(b), "columns of C and B");
    expect(a != b && a != c && b != c, "the same register twice");
  }
  template <class T>
  static T at(int t, int row, int i) {
    T value;
    std::memcpy(&value, state().tiles[t][row] + i * static_cast<int>(sizeof(T)), sizeof(T));
    return value;
  }
  template <class T>
  static void put(int t, int row, int i, T value) {
    std::memcpy(state().tiles[t][row] + i * static_cast<int>(sizeof(T)), &value, sizeof(T));
  }
};

}  // namespace moesaic::cpu
