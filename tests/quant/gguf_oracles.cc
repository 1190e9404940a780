#include "quant/gguf_oracles.h"

#include <cmath>

#include "support/half.h"

namespace moesaic::test {
namespace {

double half_at(const std::uint8_t* p) {
  return half_value(static_cast<std::uint16_t>(p[0] | p[1] << 8));
}

void oracle_q4_0(const std::uint8_t* b, double* y) {
  for (int j = 0; j < 16; ++j) {
    y[j] = ((b[2 + j] & 15) - 8) * half_at(b);
    y[j + 16] = ((b[2 + j] >> 4) - 8) * half_at(b);
  }
}
void oracle_q4_1(const std::uint8_t* b, double* y) {
  for (int j = 0; j < 16; ++j) {
    y[j] = (b[4 + j] & 15) * half_at(b) + half_at(b + 2);
    y[j + 16] = (b[4 + j] >> 4) * half_at(b) + half_at(b + 2);
  }
}
void oracle_q5_0(const std::uint8_t* b, double* y) {
  const std::uint32_t qh = b[2] | static_cast<std::uint32_t>(b[3]) << 8 |
                           static_cast<std::uint32_t>(b[4]) << 16 |
                           static_cast<std::uint32_t>(b[5]) << 24;
  for (unsigned j = 0; j < 16; ++j) {
    const int low = (b[6 + j] & 15) + 16 * static_cast<int>(qh >> j & 1U);
    const int high = (b[6 + j] >> 4) + 16 * static_cast<int>(qh >> (j + 16) & 1U);
    y[j] = (low - 16) * half_at(b);
    y[j + 16] = (high - 16) * half_at(b);
  }
}
void oracle_q8_0(const std::uint8_t* b, double* y) {
  for (int j = 0; j < 32; ++j) y[j] = static_cast<std::int8_t>(b[2 + j]) * half_at(b);
}
void oracle_q2_k(const std::uint8_t* b, double* y) {
  const double d = half_at(b + 80), dmin = half_at(b + 82);
  const std::uint8_t* q = b + 16;
  int sub = 0;
  for (int half = 0; half < 2; ++half, q += 32) {
    for (int shift = 0; shift < 8; shift += 2) {
      for (int part = 0; part < 2; ++part, ++sub) {
        for (int l = 0; l < 16; ++l) {
          *y++ = d * (b[sub] & 15) * (q[16 * part + l] >> shift & 3) - dmin * (b[sub] >> 4);
        }
      }
    }
  }
}
void oracle_k_pair(const std::uint8_t* s, int j, int* sc, int* m) {
  if (j < 4) {
    *sc = s[j] & 63;
    *m = s[j + 4] & 63;
  } else {
    *sc = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
    *m = (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
  }
}
void oracle_q4_k(const std::uint8_t* b, double* y) {
  for (int c = 0; c < 4; ++c) {
    for (int nibble = 0; nibble < 2; ++nibble) {
      int sc = 0, m = 0;
      oracle_k_pair(b + 4, 2 * c + nibble, &sc, &m);
      for (int l = 0; l < 32; ++l) {
        const int q = b[16 + 32 * c + l] >> (4 * nibble) & 15;
        *y++ = half_at(b) * sc * q - half_at(b + 2) * m;
      }
    }
  }
}
void oracle_q5_k(const std::uint8_t* b, double* y) {
  for (int c = 0; c < 4; ++c) {
    for (int nibble = 0; nibble < 2; ++nibble) {
      int sc = 0, m = 0;
      oracle_k_pair(b + 4, 2 * c + nibble, &sc, &m);
      for (int l = 0; l < 32; ++l) {
        const int q =
            (b[48 + 32 * c + l] >> (4 * nibble) & 15) + 16 * (b[16 + l] >> (2 * c + nibble) & 1);
        *y++ = half_at(b) * sc * q - half_at(b + 2) * m;
      }
    }
  }
}
void oracle_q6_k(const std::uint8_t* b, double* y) {
  for (int h = 0; h < 2; ++h) {
    const std::uint8_t* ql = b + 64 * h;
    const std::uint8_t* qh = b + 128 + 32 * h;
    const auto* sc = reinterpret_cast<const std::int8_t*>(b + 192 + 8 * h);
    for (int l = 0; l < 32; ++l) {
      const int q[4] = {
          (ql[l] & 15) | ((qh[l] & 3) << 4), (ql[l + 32] & 15) | ((qh[l] >> 2 & 3) << 4),
          (ql[l] >> 4) | ((qh[l] >> 4 & 3) << 4), (ql[l + 32] >> 4) | ((qh[l] >> 6) << 4)};
      for (int i = 0; i < 4; ++i) {
        y[128 * h + 32 * i + l] = half_at(b + 208) * sc[l / 16 + 2 * i] * (q[i] - 32);
      }
    }
  }
}
void oracle_q5_1(const std::uint8_t* b, double* y) {
  for (int i = 0; i < 32; ++i) {
    const int nibble = i < 16 ? b[8 + i] & 15 : b[8 + i - 16] >> 4;
    const int fifth = b[4 + i / 8] >> i % 8 & 1;
    y[i] = (nibble + 16 * fifth) * half_at(b) + half_at(b + 2);
  }
}
void oracle_q3_k(const std::uint8_t* b, double* y) {
  const std::uint8_t* packed = b + 96;
  for (int i = 0; i < 256; ++i) {
    const int sub = i / 16;
    // Low four bits of scale `sub`, then its high two, which lie in the last word by columns.
    int scale = sub < 8 ? packed[sub] % 16 : packed[sub - 8] / 16;
    scale += 16 * (packed[8 + sub % 4] >> 2 * (sub / 4) & 3);
    const int low = b[32 + i / 128 * 32 + i % 32] >> 2 * (i / 32 % 4) & 3;
    const int high = b[i % 32] >> i / 32 & 1;
    y[i] = half_at(b + 108) * (scale - 32) * (low + 4 * high - 4);
  }
}
constexpr int kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
void oracle_iq4_nl(const std::uint8_t* b, double* y) {
  for (int j = 0; j < 16; ++j) {
    y[j] = kIq4[b[2 + j] & 15] * half_at(b);
    y[j + 16] = kIq4[b[2 + j] >> 4] * half_at(b);
  }
}
void oracle_iq4_xs(const std::uint8_t* b, double* y) {
  const unsigned high = b[2] + 256U * b[3];
  for (unsigned i = 0; i < 256; ++i) {
    const unsigned sub = i / 32, in = i % 32;
    const unsigned low = sub % 2 == 0 ? b[4 + sub / 2] & 15U : b[4 + sub / 2] >> 4;
    const int scale = static_cast<int>(low + 16 * (high >> 2 * sub & 3));
    const std::uint8_t byte = b[8 + 16 * sub + in % 16];
    y[i] = half_at(b) * (scale - 32) * kIq4[in < 16 ? byte & 15 : byte >> 4];
  }
}
// The first five ternary digits of byte / 256, by long division in integers.
int trit(int byte, int n) {
  int digit = 0;
  for (int rest = byte; n >= 0; --n) {
    rest *= 3;
    digit = rest / 256;
    rest %= 256;
  }
  return digit;
}
void oracle_tq1_0(const std::uint8_t* b, double* y) {
  for (int i = 0; i < 256; ++i) {
    const int at = i < 160 ? i % 32 : i < 240 ? 32 + (i - 160) % 16 : 48 + (i - 240) % 4;
    const int n = i < 160 ? i / 32 : i < 240 ? (i - 160) / 16 : (i - 240) / 4;
    y[i] = (trit(b[at], n) - 1) * half_at(b + 52);
  }
}
void oracle_tq2_0(const std::uint8_t* b, double* y) {
  for (int i = 0; i < 256; ++i) {
    y[i] = ((b[i / 128 * 32 + i % 32] >> 2 * (i / 32 % 4) & 3) - 1) * half_at(b + 64);
  }
}
constexpr double kE2m1[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
void oracle_mxfp4(const std::uint8_t* b, double* y) {
  for (int j = 0; j < 16; ++j) {
    y[j] = std::ldexp(kE2m1[b[1 + j] & 15], b[0] - 127);
    y[j + 16] = std::ldexp(kE2m1[b[1 + j] >> 4], b[0] - 127);
  }
}
void oracle_nvfp4(const std::uint8_t* b, double* y) {
  for (int s = 0; s < 4; ++s) {
    const int e = b[s] >> 3 & 15, m = b[s] & 7;
    double d = e == 0 ? std::ldexp(m, -9) : std::ldexp(8 + m, e - 10);
    if ((b[s] & 0x7F) == 0x7F) d = 0;
    for (int j = 0; j < 8; ++j) {
      y[16 * s + j] = kE2m1[b[4 + 8 * s + j] & 15] * d;
      y[16 * s + j + 8] = kE2m1[b[4 + 8 * s + j] >> 4] * d;
    }
  }
}

}  // namespace

const std::vector<GgufCase>& gguf_cases() {
  static const std::vector<GgufCase> all = {
      {quant::GgufType::kQ4_0, oracle_q4_0, {0}},
      {quant::GgufType::kQ4_1, oracle_q4_1, {0, 2}},
      {quant::GgufType::kQ5_0, oracle_q5_0, {0}},
      {quant::GgufType::kQ5_1, oracle_q5_1, {0, 2}},
      {quant::GgufType::kQ8_0, oracle_q8_0, {0}},
      {quant::GgufType::kQ2_K, oracle_q2_k, {80, 82}},
      {quant::GgufType::kQ3_K, oracle_q3_k, {108}},
      {quant::GgufType::kQ4_K, oracle_q4_k, {0, 2}},
      {quant::GgufType::kQ5_K, oracle_q5_k, {0, 2}},
      {quant::GgufType::kQ6_K, oracle_q6_k, {208}},
      {quant::GgufType::kIQ4_NL, oracle_iq4_nl, {0}},
      {quant::GgufType::kIQ4_XS, oracle_iq4_xs, {0}},
      {quant::GgufType::kTQ1_0, oracle_tq1_0, {52}},
      {quant::GgufType::kTQ2_0, oracle_tq2_0, {64}},
      {quant::GgufType::kMXFP4, oracle_mxfp4, {}},
      {quant::GgufType::kNVFP4, oracle_nvfp4, {}},
  };
  return all;
}

}  // namespace moesaic::test
