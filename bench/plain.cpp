// What a processor can do at most: read memory, and multiply matrices from it with a vector, with no model around them.
// Threads are started and waiting before the clock runs.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

template <class F>
double timed(int threads, F work) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t) {
    pool.emplace_back([&, t] {
      ready.fetch_add(1);
      while (!go.load(std::memory_order_acquire)) {}
      work(t);
    });
  }
  while (ready.load() < threads) {}
  const auto start = std::chrono::steady_clock::now();
  go.store(true, std::memory_order_release);
  for (auto& thread : pool) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline float value(float v) { return v; }
inline float value(uint16_t v) {
  const uint32_t bits = uint32_t(v) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// y[first, last) = W x, four rows at a time.
template <class T>
void rows(const T* w, const float* x, float* y, int64_t first, int64_t last, int64_t k) {
  for (int64_t i = first; i < last; i += 4) {
    const int64_t more = last - i < 4 ? last - i - 1 : 3;
    const T *a = w + i * k, *b = a + (more > 0 ? k : 0), *c = b + (more > 1 ? k : 0), *d = c + (more > 2 ? k : 0);
    float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    for (int64_t j = 0; j < k; ++j) {
      s0 += value(a[j]) * x[j];
      s1 += value(b[j]) * x[j];
      s2 += value(c[j]) * x[j];
      s3 += value(d[j]) * x[j];
    }
    const float s[4] = {s0, s1, s2, s3};
    for (int64_t r = 0; r <= more; ++r) y[i + r] = s[r];
  }
}

template <class T>
double matvec(const void* weights, const int64_t* shapes, int count, const float* x, float* y, int threads) {
  return timed(threads, [=](int t) {
    const T* w = static_cast<const T*>(weights);
    for (int m = 0; m < count; ++m) {
      const int64_t n = shapes[2 * m], k = shapes[2 * m + 1];
      rows(w, x, y, n * t / threads, n * (t + 1) / threads, k);
      w += n * k;
    }
  });
}

}  // namespace

// Seconds to read `words` 8-byte words once.
extern "C" double plain_read(const uint64_t* data, int64_t words, int threads, uint64_t* out) {
  return timed(threads, [=](int t) {
    uint64_t all = 0;
    for (int64_t i = words * t / threads; i < words * (t + 1) / threads; ++i) all |= data[i];
    out[t] = all;
  });
}

// Seconds to multiply `count` matrices [n, k], one after another in memory, with x. element_bytes: 4 is f32, 2 bf16.
extern "C" double plain_matvec(const void* weights, const int64_t* shapes, int count, int element_bytes,
                               const float* x, float* y, int threads) {
  return element_bytes == 4 ? matvec<float>(weights, shapes, count, x, y, threads)
                            : matvec<uint16_t>(weights, shapes, count, x, y, threads);
}
