// Faults armed from outside, by writing a file: the same file as of the CPU binding (bindings/faults.py).
#pragma once

#include <cstdint>

namespace standin {

enum class Operation { kWrite, kRead, kRelease, kFence };
enum class Effect { kFlip, kTorn, kError };

struct Fault {
  Operation operation;
  Effect effect;
  uint64_t skip;
  uint64_t count;
  uint64_t bit;
};

// The fault that hits this operation now, or null.
const Fault* Take(Operation operation);

// Turn one bit of `bytes` over.
void Flip(unsigned char* bytes, uint64_t nbytes, const Fault& fault);

}  // namespace standin
