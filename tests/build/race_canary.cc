// Shows that the ThreadSanitizer build sees races between OpenMP threads, and only races: without
// an argument all writes are ordered by a barrier; with one, threads add to the same variable.
#include <cstdio>
#include <vector>

int main(int argc, char**) {
  constexpr int kCount = 1000;
  std::vector<int> values(kCount);
  long sum = 0;
  long shared = 0;
  for (int round = 0; round < 50; ++round) {
#pragma omp parallel for reduction(+ : sum) schedule(static, 16) num_threads(4)
    for (int i = 0; i < kCount; ++i) {
      values[static_cast<std::size_t>(i)] += i;
      sum += values[static_cast<std::size_t>(i)];
      if (argc > 1) shared += i;
    }
    for (int& value : values) value ^= 1;
  }
  std::printf("%ld %ld\n", sum, shared);
}
