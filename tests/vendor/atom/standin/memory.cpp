#include "memory.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

#include "faults.h"

namespace standin {
namespace {

struct Allocation {
  uint32_t device;
  uint32_t number;  // for the log: addresses mean nothing to a reader
  std::vector<unsigned char> bytes;
};

// Virtual addresses of no memory of this process: whoever follows one dies at once.
constexpr uint64_t kFirstAddress = 1ULL << 46;
constexpr uint64_t kCapacity = 16ULL << 30;

struct State {
  std::recursive_mutex mutex;
  std::map<uint64_t, Allocation> live;
  uint64_t next = kFirstAddress;
  uint32_t allocated = 0;
  uint64_t bytes = 0;
  uint64_t peak = 0;
  std::string log;
};

State& Get() {
  static State* state = new State();  // outlives the destructors of whoever frees late
  return *state;
}

// The allocation that holds a whole range, or null.
Allocation* Find(uint64_t address, uint64_t nbytes, uint64_t* offset) {
  State& state = Get();
  auto after = state.live.upper_bound(address);
  if (after == state.live.begin()) return nullptr;
  auto& [base, allocation] = *std::prev(after);
  *offset = address - base;
  if (*offset + nbytes > allocation.bytes.size()) return nullptr;
  return &allocation;
}

void LogRange(const char* call, const Allocation& allocation, uint64_t offset, uint64_t nbytes) {
  std::ostringstream line;
  line << call << " #" << allocation.number << " offset=" << offset << " bytes=" << nbytes;
  Log(line.str());
}

}  // namespace

void Log(const std::string& line) {
  State& state = Get();
  std::lock_guard<std::recursive_mutex> hold(state.mutex);
  state.log += line + "\n";
}

Code Allocate(uint32_t device, uint64_t nbytes, uint64_t* address) {
  State& state = Get();
  std::lock_guard<std::recursive_mutex> hold(state.mutex);
  if (nbytes > kCapacity - state.bytes) {
    Log("malloc refused bytes=" + std::to_string(nbytes));
    return kFailed;
  }
  *address = state.next;
  state.next += ((nbytes >> 12) + 2) << 12;  // a gap behind each: a range over the end hits nothing
  Allocation allocation{device, ++state.allocated, std::vector<unsigned char>(nbytes, 0xA5)};
  LogRange("malloc", allocation, 0, nbytes);
  state.live.emplace(*address, std::move(allocation));
  state.bytes += nbytes;
  if (state.bytes > state.peak) state.peak = state.bytes;
  return kOk;
}

Code Free(uint64_t address) {
  State& state = Get();
  std::lock_guard<std::recursive_mutex> hold(state.mutex);
  auto found = state.live.find(address);
  if (found == state.live.end()) {
    Log("free of nothing");
    return kFailed;
  }
  LogRange("free", found->second, 0, found->second.bytes.size());
  if (Take(Operation::kRelease) != nullptr) return kFailed;
  state.bytes -= found->second.bytes.size();
  state.live.erase(found);
  return kOk;
}

Code Write(const char* call, uint64_t address, const void* source, uint64_t nbytes) {
  State& state = Get();
  std::lock_guard<std::recursive_mutex> hold(state.mutex);
  uint64_t offset = 0;
  Allocation* allocation = Find(address, nbytes, &offset);
  if (allocation == nullptr) {
    Log(std::string(call) + " out of bounds");
    return kFailed;
  }
  LogRange(call, *allocation, offset, nbytes);
  const Fault* fault = Take(Operation::kWrite);
  const bool whole = fault == nullptr || fault->effect == Effect::kFlip;
  std::memcpy(allocation->bytes.data() + offset, source, whole ? nbytes : nbytes / 2);
  if (fault == nullptr) return kOk;
  if (fault->effect == Effect::kFlip) Flip(allocation->bytes.data() + offset, nbytes, *fault);
  return fault->effect == Effect::kError ? kFailed : kOk;
}

Code Read(const char* call, uint64_t address, void* destination, uint64_t nbytes) {
  State& state = Get();
  std::lock_guard<std::recursive_mutex> hold(state.mutex);
  uint64_t offset = 0;
  Allocation* allocation = Find(address, nbytes, &offset);
  if (allocation == nullptr) {
    Log(std::string(call) + " out of bounds");
    return kFailed;
  }
  LogRange(call, *allocation, offset, nbytes);
  const Fault* fault = Take(Operation::kRead);
  if (fault != nullptr && fault->effect == Effect::kError) return kFailed;
  std::memcpy(destination, allocation->bytes.data() + offset, nbytes);
  if (fault != nullptr) Flip(static_cast<unsigned char*>(destination), nbytes, *fault);
  return kOk;
}

Code Copy(uint64_t source, uint64_t destination, uint64_t nbytes) {
  std::vector<unsigned char> between(nbytes);
  const Code read = Read("v2v from", source, between.data(), nbytes);
  return read == kOk ? Write("v2v to", destination, between.data(), nbytes) : read;
}

Code Zero(uint64_t address) {
  State& state = Get();
  std::lock_guard<std::recursive_mutex> hold(state.mutex);
  auto found = state.live.find(address);
  if (found == state.live.end()) return kFailed;
  LogRange("zero", found->second, 0, found->second.bytes.size());
  std::fill(found->second.bytes.begin(), found->second.bytes.end(), 0);
  return kOk;
}

Code Synchronize(const char* call) {
  Log(call);
  return Take(Operation::kFence) == nullptr ? kOk : kFailed;
}

uint32_t DeviceOf(uint64_t address) {
  State& state = Get();
  std::lock_guard<std::recursive_mutex> hold(state.mutex);
  uint64_t offset = 0;
  const Allocation* allocation = Find(address, 0, &offset);
  return allocation == nullptr ? 0 : allocation->device;
}

uint64_t LiveBytes() { return Get().bytes; }
uint64_t PeakBytes() { return Get().peak; }

}  // namespace standin

// For the tests, through ctypes.

extern "C" uint64_t standin_live_bytes() { return standin::LiveBytes(); }

// Copies at most `capacity` bytes of the log, and empties it. Returns its full length.
extern "C" uint64_t standin_take_log(char* out, uint64_t capacity) {
  auto& state = standin::Get();
  std::lock_guard<std::recursive_mutex> hold(state.mutex);
  const uint64_t length = state.log.size();
  std::memcpy(out, state.log.data(), length < capacity ? length : capacity);
  state.log.clear();
  return length;
}
