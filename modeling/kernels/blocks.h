// Blocks of numbers, and the memory of a thread that a kernel works in.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace {

constexpr int64_t BLOCK = 32;  // rows and columns of a block

inline int64_t blocks_of(int64_t n) { return (n + BLOCK - 1) / BLOCK; }

// Memory of this thread, kept from call to call and cut into parts whose contents are arbitrary.
class Room {
 public:
  explicit Room(size_t bytes) {
    static thread_local struct Kept {
      char* start = nullptr;
      size_t size = 0;
      ~Kept() { std::free(start); }
    } kept;
    if (kept.size < bytes) {
      std::free(kept.start);
      kept.size = (bytes + bytes / 16 + 63) / 64 * 64;
      kept.start = static_cast<char*>(std::aligned_alloc(64, kept.size));
      if (kept.start == nullptr) kept.size = 0;
    }
    next_ = kept.start;
  }
  bool is_there() const { return next_ != nullptr; }
  template <class Number>
  Number* take(int64_t n) {
    Number* taken = reinterpret_cast<Number*>(next_);
    next_ += (n * sizeof(Number) + 63) / 64 * 64;
    return taken;
  }

 private:
  char* next_;
};

}  // namespace
